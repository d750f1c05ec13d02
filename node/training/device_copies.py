"""Copies from a model's device to host memory that the computation does not wait for.

On a GPU with streams of its own (CUDA) a copy to the host goes through page-locked memory and on a side stream: the
values are set aside on the device, in order with the steps before, and travel while the next steps are computed. On
every other device, the CPU included, copies are made at once, and are there when they are asked for.

Source: CUDA C++ Programming Guide, sections 3.2.7.1 (page-locked host memory) and 3.2.8.5 (streams).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch

from shoal.collectives.codecs import F32

THREADED_VALUES = 1 << 22
"""So many values and more are compared in several threads."""

logger = logging.getLogger("shoal.trainer")


class HostCopy(Protocol):
    """Values on their way to host memory."""

    @property
    def here(self) -> bool:
        """Whether `wait` would return at once."""

    def wait(self) -> torch.Tensor:
        """The values in host memory, ``(values,) float32``, which nobody else changes."""


class CopyMade:
    """Values that are in host memory."""

    here = True

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def wait(self) -> torch.Tensor:
        """The values."""
        return self._values


class CopyUnderWay:
    """Values that a side stream of a CUDA device writes to page-locked memory."""

    def __init__(self, values: torch.Tensor, room: torch.Tensor, side: torch.cuda.Stream) -> None:
        """Begin to copy to `room`, after all that the current stream was given so far.

        values: nobody changes them from here on.
        """
        self._values = room
        side.wait_stream(torch.cuda.current_stream(values.device))
        with torch.cuda.stream(side):
            self._values.copy_(values, non_blocking=True)
        values.record_stream(side)  # or its memory would be given to the next step while it is still read
        self._copied = side.record_event()

    @property
    def here(self) -> bool:
        """Whether it is all there."""
        return bool(self._copied.query())

    def wait(self) -> torch.Tensor:
        """The values, once they are all there. The computation goes on meanwhile."""
        self._copied.synchronize()
        return self._values


class DeviceCopies:
    """Copies from one device; makes its side stream when it is first wanted."""

    def __init__(self) -> None:
        self._side: torch.cuda.Stream | None = None
        self._pageable = False

    def to_host(self, values: torch.Tensor) -> HostCopy:
        """Begin to copy `values`, which nobody changes from here on, to host memory."""
        if not values.is_cuda:
            return CopyMade(values.cpu())
        if self._side is None or self._side.device != values.device:
            self._side = torch.cuda.Stream(values.device)  # type: ignore[no-untyped-call]
        return CopyUnderWay(values, self._room(values.numel()), self._side)

    def _room(self, numel: int) -> torch.Tensor:
        """``(numel,) float32`` in page-locked host memory; in other memory where none is to be had."""
        try:
            return torch.empty(numel, dtype=torch.float32, pin_memory=True)
        except RuntimeError as error:
            if not self._pageable:
                self._pageable = True
                logger.warning("no page-locked memory for %d values (%s); training waits for copies", numel, error)
            return torch.empty(numel, dtype=torch.float32)


def joined(vector: torch.Tensor, spans: Sequence[slice]) -> torch.Tensor:
    """The values of `vector` there, one span after another: a view of one span, a copy of several."""
    return vector[spans[0]] if len(spans) == 1 else torch.cat([vector[span] for span in spans])


def changed(before: F32, after: F32, spans: Sequence[slice]) -> list[slice]:
    """Those of `spans` where the bits of two host vectors differ; in as many threads as torch has, where that pays."""

    def differs(span: slice) -> bool:
        bits = np.int32 if (span.stop - span.start) % 2 else np.int64  # compared by words, three times as fast
        return not np.array_equal(before[span].view(bits), after[span].view(bits))

    def among(part: Sequence[slice]) -> list[slice]:
        return [span for span in part if differs(span)]

    threads = torch.get_num_threads()
    if threads == 1 or sum(span.stop - span.start for span in spans) < THREADED_VALUES:
        return among(spans)
    share = -(-len(spans) // threads)
    with ThreadPoolExecutor(threads, thread_name_prefix="compare") as pool:
        parts = pool.map(among, (spans[at : at + share] for at in range(0, len(spans), share)))
        return [span for part in parts for span in part]
