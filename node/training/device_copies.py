"""Copies between a model's device and host memory that the computation does not wait for.

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

THREADED_SPANS = 64
"""So many chunks and more are compared in several threads."""

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

    def __init__(self, values: torch.Tensor, side: torch.cuda.Stream) -> None:
        """Begin, after all that the current stream was given so far. values: nobody changes them from here on."""
        self._values = page_locked(values.numel())
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
    """Copies to and from one device; makes its side stream when it is first wanted."""

    def __init__(self) -> None:
        self._side: torch.cuda.Stream | None = None

    def to_host(self, values: torch.Tensor) -> HostCopy:
        """Begin to copy `values`, which nobody changes from here on, to host memory."""
        if not values.is_cuda:
            return CopyMade(values.cpu())
        if self._side is None:
            self._side = torch.cuda.Stream(values.device)  # type: ignore[no-untyped-call]
        return CopyUnderWay(values, self._side)

    def to_device(self, vector: torch.Tensor, spans: Sequence[slice], device: torch.device) -> torch.Tensor:
        """The values of the host vector there, one span after another, on `device`; not to be changed.

        On the CPU it may be a part of `vector` itself. Elsewhere it is a copy, made when this returns.
        """
        if device.type != "cuda":
            return joined(vector, spans).to(device)
        out = torch.empty(sum(span.stop - span.start for span in spans), dtype=vector.dtype, device=device)
        at = 0
        for span in spans:
            out[at : at + span.stop - span.start].copy_(vector[span], non_blocking=True)
            at += span.stop - span.start
        torch.cuda.current_stream(device).synchronize()  # `vector` may change from here on
        return out


def joined(vector: torch.Tensor, spans: Sequence[slice]) -> torch.Tensor:
    """The values of `vector` there, one span after another: a view of one span, a copy of several."""
    return vector[spans[0]] if len(spans) == 1 else torch.cat([vector[span] for span in spans])


def changed(before: F32, after: F32, spans: Sequence[slice]) -> list[slice]:
    """Those of `spans` where the bits of two host vectors differ; in as many threads as torch has, where that pays."""

    def differs(span: slice) -> bool:
        bits = np.int32 if (span.stop - span.start) % 2 else np.int64  # compared by words, three times as fast
        return not np.array_equal(before[span].view(bits), after[span].view(bits))

    if len(spans) < THREADED_SPANS or torch.get_num_threads() == 1:
        return [span for span in spans if differs(span)]
    with ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="compare") as threads:
        return [span for span, one in zip(spans, threads.map(differs, spans), strict=True) if one]


def page_locked(numel: int) -> torch.Tensor:
    """``(numel,) float32`` in page-locked host memory; in other memory, with a warning, where none is to be had."""
    try:
        return torch.empty(numel, dtype=torch.float32, pin_memory=True)
    except RuntimeError as error:
        logger.warning("no page-locked memory for %d values (%s); copies from the device take longer", numel, error)
        return torch.empty(numel, dtype=torch.float32)
