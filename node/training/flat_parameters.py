"""A model's parameters as one flat vector, in the order all members agree on, and its copies in host memory.

Floating parameters sorted by name, tied ones once under their first name, each in row-major order. Behind them, from
the beginning of a chunk on, lie the floating buffers that the model's `state_dict` has, sorted likewise. Other buffers
do not travel, such as counters: they belong to the node that counted.

On a GPU with streams of its own (CUDA) a copy to the host goes through page-locked memory and on a side stream: the
values are set aside on the device, in order with the steps before, and travel while the next steps are computed. On
every other device, the CPU included, copies are made at once, and are there when they are asked for.

Source: CUDA C++ Programming Guide, sections 3.2.7.1 (page-locked host memory) and 3.2.8.5 (streams).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from math import prod
from operator import itemgetter
from typing import Final, Protocol

import torch
from torch.nn.parameter import UninitializedParameter

from shoal.collectives.spans import VALUE_LIMIT
from shoal.node.training.trainer_messages import PARAMETERS_LIMIT, Layout
from shoal.protocol.errors import ConfigError

BLOCK_VALUES: Final = 1 << 24
"""64 MiB, of which an update takes a few times as much of the device."""

logger = logging.getLogger("shoal.trainer")


class HostCopy(Protocol):
    """Values on their way to host memory."""

    @property
    def here(self) -> bool:
        """True if `wait` would return at once."""

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
        """True if it is all there."""
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
        return CopyUnderWay(values, self.room(values.numel()), self._side)

    def room(self, numel: int) -> torch.Tensor:
        """``(numel,) float32`` in page-locked host memory; in other memory where none is to be had."""
        try:
            return torch.empty(numel, dtype=torch.float32, device="cpu", pin_memory=True)
        except RuntimeError as error:
            if not self._pageable:
                self._pageable = True
                logger.warning("no page-locked memory for %d values (%s); training waits for copies", numel, error)
            return torch.empty(numel, dtype=torch.float32, device="cpu")


def joined(vector: torch.Tensor, spans: Sequence[slice]) -> torch.Tensor:
    """The values of `vector` there, one span after another: a view of one span, a copy of several."""
    return vector[spans[0]] if len(spans) == 1 else torch.cat([vector[span] for span in spans])


def blocks_of(spans: Iterable[slice], limit: int) -> Iterator[list[slice]]:
    """The same values, in blocks of at most `limit` of them."""
    block: list[slice] = []
    room = limit
    for span in spans:
        start = span.start
        while start < span.stop:
            stop = min(span.stop, start + room)
            block.append(slice(start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield block
                block, room = [], limit
    if block:
        yield block


class HostFlat(ABC):
    """The parameters of several processes as a host vector, ``(numel,) float32``: what such vectors have in common."""

    layout: Layout
    on_host = True
    """Values go from the vector to all processes: an anchor is used where it lies."""

    def new_vector(self) -> torch.Tensor:
        """Return ``(numel,) float32`` zeros in host memory."""
        return torch.zeros(self.layout.numel, dtype=torch.float32, device="cpu")

    new_base = new_vector

    def set_aside(self) -> torch.Tensor:
        """Copy the parameters of all processes to the host."""
        return self.gather(self.new_vector())

    def to_device(self, vector: torch.Tensor, spans: Sequence[slice]) -> torch.Tensor:
        """The values of `vector` there, on the host; maybe a part of it."""
        return joined(vector, spans)

    @abstractmethod
    def gather(self, out: torch.Tensor) -> torch.Tensor:
        """Copy the parameters into `out`, and return it."""


def _check_apart(parameters: Mapping[str, torch.Tensor]) -> None:
    """Raises ConfigError where two parameters are of the same memory: what is applied to one would be to both."""
    last, end = "", (0, 0)
    for begin, stop, name in sorted(_memory_of(name, value) for name, value in parameters.items() if value.numel()):
        if begin[0] and begin[0] == end[0] and begin[1] < end[1]:
            raise ConfigError(
                f"parameters {last!r} and {name!r} share memory; make them one parameter, say "
                "`head.weight = embedding.weight`"
            )
        last, end = name, max(end, stop)


def _memory_of(name: str, value: torch.Tensor) -> tuple[tuple[int, int], tuple[int, int], str]:
    """Where its storage lies, 0 where that cannot be told, with its first value there and the one past its last."""
    try:
        storage = value.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a tensor that is none by itself, as of several processes
        storage = 0
    first = int(value.storage_offset()) if storage else 0
    extent = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)) + 1
    return (storage, first), (storage, first + extent), name


class FlatParameters:
    """Copies between a model, on any device, and host vectors ``(numel,) float32``.

    Spans are slices of such a vector, ascending. What is read of them is one vector of their values, in that order.
    """

    block_values = BLOCK_VALUES

    def __init__(self, model: torch.nn.Module, *, frozen: bool = True, chunk_values: int = 1) -> None:
        """Read the layout; without `frozen`, of parameters that need a gradient alone. chunk_values: of the swarm.

        Raises `ConfigError` on what cannot travel (say, parameters in bfloat16).
        """
        named = dict(model.named_parameters())  # torch lists a tied parameter once
        travelling = sorted(
            name
            for name, value in named.items()
            if (value.is_floating_point() or value.is_complex()) and (frozen or value.requires_grad)
        )
        for name in travelling:
            if isinstance(named[name], UninitializedParameter):
                raise ConfigError(f"parameter {name!r} has no shape yet; run the model on a batch before")
            if named[name].is_complex():
                raise ConfigError(
                    f"parameter {name!r} is {named[name].dtype}; make it of two in float32 (`torch.view_as_complex`)"
                )
            if named[name].dtype != torch.float32:
                raise ConfigError(
                    f"parameter {name!r} is {named[name].dtype}; keep parameters in float32, and use torch.autocast "
                    "around the loss for lower precision"
                )
        _check_apart({name: named[name] for name in travelling})
        buffers = _travelling_buffers(model)
        if not 0 < len(travelling) <= PARAMETERS_LIMIT - len(buffers):
            raise ConfigError(
                f"the model has {len(travelling)} parameters, expected 1 to {PARAMETERS_LIMIT - len(buffers)}"
            )
        self._model = model
        self._parameters = [named[name] for name in travelling]
        self._buffer_names = sorted(buffers)
        shapes = {name: tuple((named | buffers)[name].shape) for name in (*travelling, *self._buffer_names)}
        numel, own = (sum(prod(shapes[name]) for name in names) for names in (travelling, self._buffer_names))
        begin = -(-numel // chunk_values) * chunk_values if own else numel
        self.layout = Layout(
            names=tuple(sorted(shapes)),
            shapes=tuple(shapes[name] for name in sorted(shapes)),
            numel=begin + own,
            buffers=tuple(self._buffer_names),
        )
        places = self.layout.places()
        self._places = [places[name] for name in (*travelling, *self._buffer_names)]
        self._starts = [place.start for place in self._places]
        self._gap = slice(numel, begin)
        self._copies = DeviceCopies()

    def _tensors(self) -> list[torch.Tensor]:
        """The tensors that travel, in the order of the vector. A buffer that is moved or assigned is another tensor."""
        return [*self._parameters, *(self._model.get_buffer(name) for name in self._buffer_names)]

    def new_vector(self) -> torch.Tensor:
        """Return ``(numel,) float32`` zeros in host memory."""
        return torch.zeros(self.layout.numel, dtype=torch.float32, device="cpu")

    @property
    def on_host(self) -> bool:
        """True unless the model is on a device to which page-locked memory is copied sooner."""
        return self._device.type != "cuda"

    def new_base(self) -> torch.Tensor:
        """Return ``(numel,) float32`` zeros in host memory from which a CUDA device copies at full speed."""
        return self._copies.room(self.layout.numel).zero_()

    def set_aside(self) -> torch.Tensor:
        """Copy all parameters on their device, ``(numel,) float32``; where that has no room, to the host."""
        whole = [slice(0, self.layout.numel)]
        try:
            return self._read(whole, self._device)
        except torch.OutOfMemoryError:
            return self._read(whole, torch.device("cpu"))

    @torch.no_grad()
    def gather(self, out: torch.Tensor) -> torch.Tensor:
        """Copy the model's parameters and buffers into `out` and return it."""
        for tensor, place in zip(self._tensors(), self._places, strict=True):
            out[place].copy_(tensor.reshape(-1))
        out[self._gap].zero_()
        return out

    @torch.no_grad()
    def scatter(self, vector: torch.Tensor) -> None:
        """Copy `vector` into the model's parameters and buffers."""
        for tensor, place in zip(self._tensors(), self._places, strict=True):
            tensor.copy_(vector[place].view(tensor.shape))

    @property
    def _device(self) -> torch.device:
        """Device that the model is on now; the host, if it is in several places."""
        devices = {parameter.device for parameter in self._parameters}
        return devices.pop() if len(devices) == 1 else torch.device("cpu")

    def copy_out(self, spans: Sequence[slice]) -> HostCopy:
        """Begin to copy the parameters there, as they are now, to host memory."""
        try:
            return self._copies.to_host(self._read(spans, self._device))
        except torch.OutOfMemoryError:  # the device has no room to set them aside
            return CopyMade(self._read(spans, torch.device("cpu")))

    def update(self, spans: Sequence[slice], change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace the parameters there by what `change` makes of a copy of them, on the model's device."""
        self._write(spans, change(self._read(spans, self._device)))

    def to_device(self, vector: torch.Tensor, spans: Sequence[slice]) -> torch.Tensor:
        """The values of a host vector there, on the model's device, not to be changed; maybe a part of it."""
        device = self._device
        if device.type == "cpu" or len(spans) == 1:
            return joined(vector, spans).to(device)
        out = torch.empty(sum(span.stop - span.start for span in spans), dtype=torch.float32, device=device)
        at = 0
        for span in spans:  # not joined on the host first, whose new memory a device copies slowly
            end = at + span.stop - span.start
            out[at:end].copy_(vector[span])
            at = end
        return out

    @torch.no_grad()
    def _read(self, spans: Sequence[slice], device: torch.device) -> torch.Tensor:
        """A copy of the parameters there, ``(values,) float32``, on `device`."""
        room = torch.zeros if self._buffer_names else torch.empty  # nothing lies in front of the buffers
        out = room(sum(span.stop - span.start for span in spans), dtype=torch.float32, device=device)
        tensors = self._tensors()
        for number, pieces in groupby(self._pieces(spans), key=itemgetter(0)):
            flat = tensors[number].reshape(-1)  # a copy, if it does not lie in one piece
            for _, part, here in pieces:
                out[here].copy_(flat[part])
        return out

    @torch.no_grad()
    def _write(self, spans: Sequence[slice], values: torch.Tensor) -> None:
        tensors = self._tensors()
        for number, pieces in groupby(self._pieces(spans), key=itemgetter(0)):
            tensor = tensors[number]
            flat = tensor.reshape(-1)
            for _, part, here in pieces:
                flat[part].copy_(values[here])
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat.view(tensor.shape))

    def _pieces(self, spans: Iterable[slice]) -> Iterator[tuple[int, slice, slice]]:
        """The tensors that the spans touch, by number: which of their values, and where in what is read."""
        at = 0
        for span in spans:
            number = bisect_right(self._starts, span.start) - 1
            while number < len(self._places) and (start := self._starts[number]) < span.stop:
                begin, stop = max(span.start, start), min(span.stop, self._places[number].stop)
                if begin < stop:
                    here = at + begin - span.start
                    yield number, slice(begin - start, stop - start), slice(here, here + stop - begin)
                number += 1
            at += span.stop - span.start

    @torch.no_grad()
    def gather_gradients(self, out: torch.Tensor) -> None:
        """Copy the parameters' gradients into `out`, zeros for those that have none; and the buffers themselves."""
        out.zero_()
        for number, (tensor, place) in enumerate(zip(self._tensors(), self._places, strict=True)):
            source = tensor.grad if number < len(self._parameters) else tensor
            if source is not None:
                out[place].copy_(source.reshape(-1))


def own_buffers(model: torch.nn.Module, layout: Layout) -> list[tuple[str, torch.Tensor]]:
    """State of a model that does not travel, live, by name: counters."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    travelling = {id(model.get_buffer(name)) for name in layout.buffers}
    return [
        (name, value)
        for name, value in model.state_dict(keep_vars=True).items()
        if name not in parameters and isinstance(value, torch.Tensor) and id(value) not in travelling
    ]


def _travelling_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that travel: floating ones that the model's state has, a shared one once. Raises ConfigError."""
    kept = model.state_dict()
    found = {name: value for name, value in model.named_buffers() if name in kept and value.is_floating_point()}
    for name, value in found.items():
        if not bool((value.abs() <= float(VALUE_LIMIT)).all()):  # nor is NaN
            raise ConfigError(
                f"buffer {name!r} holds values that cannot travel, infinite, NaN or beyond {VALUE_LIMIT:.0e}; make it "
                "persistent=False where it is registered, and each node keeps its own"
            )
    return found
