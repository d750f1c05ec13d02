"""Table of lanes by peer: those of one pool, what they moved until they ended, and what outlives them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.protocol.identity import PeerId
from shoal.swarm.lanes.count import LaneCount
from shoal.swarm.lanes.lane import Lane
from shoal.swarm.lanes.queue import FrameQueue
from shoal.swarm.lanes.socket import Moved

IDLE_PAIRS_LIMIT = 1024
"""Peers without a lane that are remembered: many times those of a reduction, which looks at how much has moved."""


@dataclass(slots=True, eq=False)
class Pair:
    """State that outlives the lanes to one peer. `queue.changed` guards the count. Times are monotonic."""

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
        """State that is remembered of a peer, if any."""
        return self._with_lanes.get(peer) or self._idle.get(peer)

    def of(self, peer: PeerId) -> Pair:
        """State that is remembered of a peer; without any, begin to remember it."""
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


class LaneTable:
    """Used from any thread: lanes end in their own. make: as of `PairTable`; it must take no lock."""

    def __init__(self, make: Callable[[PeerId], Pair]) -> None:
        self._lock = threading.Lock()  # guards all below; taken before no other lock
        self._lanes: dict[PeerId, list[Lane]] = {}
        self._pairs = PairTable(make)
        self._past_bytes = (0, 0)  # sent, received by lanes that ended

    def add(self, lane: Lane, pair: Pair) -> None:
        """A lane comes up, over `pair`."""
        with self._lock:
            self._pairs.hold(lane.peer, pair)
            self._lanes.setdefault(lane.peer, []).append(lane)

    def remove(self, lane: Lane) -> None:
        """Called in a lane's thread when it ended."""
        moved, pair = lane.moved, self.pair(lane.peer)
        with self._lock:
            lanes = self._lanes[lane.peer]
            lanes.remove(lane)
            if not lanes:
                del self._lanes[lane.peer]
                self._pairs.release(lane.peer)
            sent, received = self._past_bytes
            self._past_bytes = (sent + lane.bytes_sent, received + lane.bytes_received)
            pair.moved += moved
            pair.payload_sent += lane.payload_sent

    def of(self, peer: PeerId) -> list[Lane]:
        """Those to one peer, usable or ending."""
        with self._lock:
            return list(self._lanes.get(peer, ()))

    def usable(self, peer: PeerId) -> list[Lane]:
        """Those to one peer that take frames."""
        return [lane for lane in self.of(peer) if lane.usable]

    def all(self) -> list[Lane]:
        """Those to all peers."""
        with self._lock:
            return [lane for lanes in self._lanes.values() for lane in lanes]

    def connected(self) -> frozenset[PeerId]:
        """The peers with a usable lane."""
        with self._lock:
            return frozenset(peer for peer, lanes in self._lanes.items() if any(lane.usable for lane in lanes))

    def pair(self, peer: PeerId) -> Pair:
        """State that is remembered of a peer; without any, begin to remember it."""
        with self._lock:
            return self._pairs.of(peer)

    def known(self, peer: PeerId) -> Pair | None:
        """State that is remembered of a peer, if any."""
        with self._lock:
            return self._pairs.get(peer)

    def sent_bytes(self, peer: PeerId) -> int:
        """Bytes of payload given to the kernel for `peer`, over all remembered lanes."""
        with self._lock:
            pair = self._pairs.get(peer)
            past = 0 if pair is None else pair.payload_sent
            return past + sum(lane.payload_sent for lane in self._lanes.get(peer, ()))

    def moved(self, peer: PeerId) -> Moved:
        """Traffic between this node and `peer`, over all remembered lanes."""
        with self._lock:
            pair, lanes = self._pairs.get(peer), list(self._lanes.get(peer, ()))
            past = Moved() if pair is None else pair.moved
        return sum((lane.moved for lane in lanes), past)

    @property
    def bytes_sent(self) -> int:
        """Bytes on the wire so far, of all lanes there ever were."""
        with self._lock:
            return self._past_bytes[0] + sum(ln.bytes_sent for lanes in self._lanes.values() for ln in lanes)

    @property
    def bytes_received(self) -> int:
        """Bytes on the wire so far, of all lanes there ever were."""
        with self._lock:
            return self._past_bytes[1] + sum(ln.bytes_received for lanes in self._lanes.values() for ln in lanes)
