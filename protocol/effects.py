"""What a round machine asks its node to do; what it asks of the disk, and of the network, is in agreement.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from shoal.protocol.agreement import Broadcast, Decided, Mismatch, NeedFinals, NeedState, Persist
from shoal.protocol.bans import NeedEvidence
from shoal.protocol.durable import DurableRecord
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Held, Plan


@dataclass(frozen=True, slots=True)
class StartReduce:
    """Close any reduction under way and start this one."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class CloseOff:
    """Take nothing more from `evicted` in this reduction, if it is under way; then call `closed_off`."""

    lineage: bytes
    evicted: frozenset[PeerId]


@dataclass(frozen=True, slots=True)
class Repair:
    """Go on with the reduction under way by this revised plan; if it is not under way, start it.

    `held` is what others said they hold, as far as this node heard: they need no copy of it.
    """

    plan: Plan
    held: tuple[tuple[PeerId, Held], ...]


@dataclass(frozen=True, slots=True)
class Evicted:
    """The lead planned without this node: stop reducing, wait for the certificate, then catch up."""

    plan: Plan


Effect = (
    Persist
    | Broadcast
    | NeedFinals
    | NeedState
    | NeedEvidence
    | Mismatch
    | Decided
    | StartReduce
    | CloseOff
    | Repair
    | Evicted
)


def batched(effects: Iterable[Effect]) -> Iterator[Effect | tuple[DurableRecord, ...]]:
    """The same effects in order; records that are to be durable one right after the other come together."""
    for durable, group in groupby(effects, key=lambda effect: isinstance(effect, Persist)):
        if durable:
            yield tuple(effect.record for effect in group if isinstance(effect, Persist))
        else:
            yield from group
