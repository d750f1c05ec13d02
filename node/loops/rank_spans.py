"""One node's flat vector where several ranks have the model: whose span is whose, and how values come and go.

    DDP             every rank has all: rank 0 hands it over, and each anchor goes to all
    fully_shard     every rank has some rows of each parameter, a span of the vector, and hands that over
    HSDP            one rank of each replica has the same rows: the lowest hands them over, all get the anchor
    buffers         every rank has all: rank 0's count

Rank 0 asks once what each rank has, and gives every value of the vector to one rank to hand over. The accounts are rank
0's alone, on the host. A rank is sent, and sends, the values of a few spans in one piece, in their order.

`fully_shard` may leave whole parameters in the model after a forward without a backward, and computes with them the
next time: what was written to the parts meanwhile would not be seen. So all are cut again before they are touched.

Source: sharding by parameter and by rows as torchtitan does, arXiv 2410.06511.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from math import prod
from operator import itemgetter

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shoal.collectives.fragments import runs_of
from shoal.node.loops.rank_group import Build, HandOver, Holds, Leader, Read, Span, Write
from shoal.node.training.cut_tensors import own_rows
from shoal.node.training.flat_parameters import BLOCK_VALUES, CopyMade, FlatParameters, HostCopy, HostFlat, blocks_of
from shoal.protocol.errors import ConfigError, LocalError


class OwnParts(FlatParameters):
    """This rank's parts of the model: copies between that and spans of the whole model's flat vector."""

    def __init__(self, model: torch.nn.Module, *, chunk_values: int = 1) -> None:
        """Read the layout of the whole, and the places of this rank's parts. Raises ConfigError.

        chunk_values: of the swarm.
        """
        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            raise ConfigError(
                "FullyShardedDataParallel hides the model's parameters; use "
                "torch.distributed.fsdp.fully_shard (with accelerate: fsdp_version 2)"
            )
        self._cut = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._cut_again()
        super().__init__(model, frozen=False, chunk_values=chunk_values)
        places = self.layout.places()
        named = {id(value): name for name, value in model.named_parameters()}
        for number, parameter in enumerate(self._parameters):
            name = named[id(parameter)]
            self._places[number] = _own_place(parameter, places[name].start, name)
        self._starts = [place.start for place in self._places]
        self.held: tuple[Span, ...] = _spans(runs_of(place for place in self._places if place.start < place.stop))
        """Spans of the vector that this rank has, ascending."""
        self.handed: tuple[Span, ...] = ()
        """Those that it is to hand over."""

    def _tensors(self) -> list[torch.Tensor]:
        return [own_rows(tensor) for tensor in super()._tensors()]

    def _cut_again(self) -> None:
        for module in self._cut:
            module.reshard()

    @torch.no_grad()
    def read(self, spans: Iterable[Span]) -> torch.Tensor:
        """The values of spans that this rank has, ``(values,) float32`` in host memory."""
        self._cut_again()
        return self._read(_slices(spans), torch.device("cpu"))

    @torch.no_grad()
    def write(self, spans: Iterable[Span], values: torch.Tensor) -> None:
        """Replace the values of spans that this rank has by these, which are in host memory."""
        self._cut_again()
        self._write(_slices(spans), values)


class GroupFlat(HostFlat):
    """The parameters of all ranks as rank 0's host vector: what `accounts.Flat` asks for.

    All of it raises NetworkError where a rank is gone or late.
    """

    block_values = BLOCK_VALUES

    def __init__(self, model: torch.nn.Module, leader: Leader, *, chunk_values: int) -> None:
        """Learn from all ranks what they have. Raises ConfigError where they do not have one model together."""
        self._leader = leader
        leader.tell(Build(chunk_values=chunk_values))
        self._own = OwnParts(model, chunk_values=chunk_values)
        self.layout = self._own.layout
        self._held = [self._own.held]
        for rank in leader.others:
            holds = leader.answer_of(rank)
            if not isinstance(holds, Holds):
                raise LocalError(f"rank {rank} answered {type(holds).__name__} in place of Holds")
            if holds.digest != self.layout.digest:
                raise ConfigError(f"rank {rank} has a model of other parameters than rank 0; build the same in all")
            self._held.append(holds.spans)
        self._handed = dealt(self._held, _wanted(self._own))
        for rank in leader.others:
            leader.group.send(rank, HandOver(spans=self._handed[rank]))
        self._whole = all(held == self._held[0] for held in self._held)

    def gather(self, out: torch.Tensor) -> torch.Tensor:
        """Copy the parameters into `out`, ``(numel,) float32`` in host memory, and return it."""
        for block in blocks_of([slice(0, self.layout.numel)], self.block_values):
            out[block[0]] = self._read(block)
        return out

    def scatter(self, vector: torch.Tensor) -> None:
        """Copy `vector`, ``(numel,) float32`` in host memory, into the parameters of all ranks."""
        for block in blocks_of([slice(0, self.layout.numel)], self.block_values):
            self._write(block, vector[block[0]])

    def copy_out(self, spans: Sequence[slice]) -> HostCopy:
        """A host copy of the parameters there, of all ranks."""
        return CopyMade(torch.cat([self._read(block) for block in blocks_of(spans, self.block_values)]))

    def update(self, spans: Sequence[slice], change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace the parameters there, in all ranks, by what `change` makes of a host copy of them."""
        self._write(spans, change(self._read(spans)))

    def _read(self, spans: Sequence[slice]) -> torch.Tensor:
        """The values there, ``(values,) float32``; zeros where nothing lies."""
        parts = [overlap(_spans(spans), handed) for handed in self._handed]
        if any(parts[rank] for rank in self._leader.others):
            self._leader.tell(Read(spans=_spans(spans)))
        out = torch.zeros(_values(_spans(spans)), dtype=torch.float32, device="cpu")
        for rank, part in enumerate(parts):
            values = self._own.read(part) if not rank else torch.empty(_values(part), dtype=torch.float32, device="cpu")
            if rank:
                self._leader.group.receive_values(rank, values)
            for there, here in _among(spans, part):
                out[there] = values[here]
        return out

    def _write(self, spans: Sequence[slice], values: torch.Tensor) -> None:
        """Have all ranks take what they have of these values."""
        wanted = _spans(spans)
        self._leader.tell(Write(spans=wanted, whole=self._whole))
        own = overlap(wanted, self._held[0])
        mine = _picked(values, spans, own)
        if self._whole:
            self._leader.group.broadcast(mine)
        else:
            for rank in self._leader.others:
                self._leader.group.send_values(rank, _picked(values, spans, overlap(wanted, self._held[rank])))
        self._own.write(own, mine)


def dealt(held: Sequence[Sequence[Span]], wanted: Sequence[Span]) -> list[tuple[Span, ...]]:
    """Give each value of the wanted spans to the lowest rank that has it, to hand over.

    held: of each rank. Raises ConfigError where nobody has a part of it.
    """
    left, handed = tuple(wanted), list[tuple[Span, ...]]()
    for spans in held:
        handed.append(overlap(left, spans))
        left = without(left, handed[-1])
    if left:
        raise ConfigError(
            f"no rank of this node has the values {left[0][0]} to {left[0][1]} of its model; start all of its ranks"
        )
    return handed


def overlap(spans: Sequence[Span], others: Sequence[Span]) -> tuple[Span, ...]:
    """The parts of ascending spans that lie in ascending others, each in one piece with what it touches in both."""
    found: list[Span] = []
    for start, stop in spans:
        number = bisect_right(others, start, key=itemgetter(1))
        while number < len(others) and others[number][0] < stop:
            found.append((max(start, others[number][0]), min(stop, others[number][1])))
            number += 1
    return tuple(found)


def without(spans: Sequence[Span], taken: Sequence[Span]) -> tuple[Span, ...]:
    """The parts of ascending spans that lie in none of `taken`, ascending parts of them."""
    left: list[Span] = []
    for start, stop in spans:
        at = start
        for begin, end in overlap(((start, stop),), taken):
            if at < begin:
                left.append((at, begin))
            at = end
        if at < stop:
            left.append((at, stop))
    return tuple(left)


def _among(spans: Sequence[slice], part: Sequence[Span]) -> list[tuple[slice, slice]]:
    """Where the values of `part`, which lies in the spans, are among theirs, and where among its own."""
    found: list[tuple[slice, slice]] = []
    begin = here = number = 0
    for start, stop in part:
        while spans[number].stop <= start:
            begin += spans[number].stop - spans[number].start
            number += 1
        there = begin + start - spans[number].start
        found.append((slice(there, there + stop - start), slice(here, here + stop - start)))
        here += stop - start
    return found


def _picked(values: torch.Tensor, spans: Sequence[slice], part: Sequence[Span]) -> torch.Tensor:
    """Those of the values of `spans` that are the ones of `part`, which lies in them; in one piece."""
    return torch.cat([values[there] for there, _ in _among(spans, part)]) if part else values[:0]


def _wanted(own: OwnParts) -> tuple[Span, ...]:
    """All of the vector but the gap in front of the buffers."""
    places = (place for place in own.layout.places().values() if place.start < place.stop)
    return _spans(runs_of(sorted(places, key=lambda place: place.start)))


def _own_place(parameter: torch.Tensor, start: int, name: str) -> slice:
    """Where the rows that this rank has of a parameter lie in the vector. Raises ConfigError if they are no span."""
    if not isinstance(parameter, DTensor):
        return slice(start, start + parameter.numel())
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    if tuple(shape[1:]) != tuple(parameter.shape[1:]) or parameter.to_local().shape != torch.Size(shape):
        raise ConfigError(
            f"parameter {name!r} is cut as {parameter.placements}; a rank has to have whole rows of it, as fully_shard "
            "cuts by itself (Shard(0))"
        )
    begin = start + (offset[0] * prod(parameter.shape[1:]) if shape else 0)
    return slice(begin, begin + prod(shape))


def _spans(slices: Iterable[slice]) -> tuple[Span, ...]:
    return tuple((each.start, each.stop) for each in slices)


def _slices(spans: Iterable[Span]) -> list[slice]:
    return [slice(*span) for span in spans]


def _values(spans: Iterable[Span]) -> int:
    return sum(stop - start for start, stop in spans)
