"""What a node remembers of the peers that it has, or had, lanes to. No thread and no socket here."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio

from shoal.protocol.identity import PeerId
from shoal.swarm.lanes.count import LaneCount
from shoal.swarm.lanes.moved import Moved
from shoal.swarm.lanes.queue import FrameQueue

Jobs = trio.MemorySendChannel[Callable[[], Awaitable[object]]]
"""Where a pool takes what it is to run beside all else."""
IDLE_PAIRS_LIMIT = 1024
"""Peers without a lane that are remembered: many times those of a reduction, which looks at how much has moved."""


@dataclass(slots=True, eq=False)
class Pair:
    """What outlives the lanes to one peer. `queue.changed` guards the count. Times are monotonic."""

    queue: FrameQueue
    count: LaneCount
    next_look: float = 0.0
    next_widening: float = 0.0
    asked_for: int = 1  # lanes that the peer's last offer wanted
    told: int = 1  # no less than what the peer takes for wanted here
    payload_sent: int = 0  # by lanes that ended
    moved: Moved = field(default_factory=Moved)  # over lanes that ended


class PairTable:
    """The pairs with a lane, and IDLE_PAIRS_LIMIT others: those that had a lane, or were first asked for, last.

    make: a pair for a peer of which nothing is remembered.
    """

    def __init__(self, make: Callable[[PeerId], Pair]) -> None:
        self._make = make
        self._with_lanes: dict[PeerId, Pair] = {}
        self._idle: OrderedDict[PeerId, Pair] = OrderedDict()

    def __len__(self) -> int:
        return len(self._with_lanes) + len(self._idle)

    def get(self, peer: PeerId) -> Pair | None:
        """What is remembered of a peer, if anything."""
        return self._with_lanes.get(peer) or self._idle.get(peer)

    def of(self, peer: PeerId) -> Pair:
        """What is remembered of a peer, from now on if nothing was."""
        pair = self.get(peer)
        if pair is None:
            pair = self._make(peer)
            self._rest(peer, pair)
        return pair

    def hold(self, peer: PeerId, pair: Pair) -> None:
        """A lane to `peer` comes up, over this pair, which may have been forgotten since it was looked up."""
        self._idle.pop(peer, None)
        self._with_lanes[peer] = pair

    def release(self, peer: PeerId) -> None:
        """The last lane to `peer` ended."""
        self._rest(peer, self._with_lanes.pop(peer))

    def _rest(self, peer: PeerId, pair: Pair) -> None:
        self._idle[peer] = pair
        if len(self._idle) > IDLE_PAIRS_LIMIT:
            self._idle.popitem(last=False)
