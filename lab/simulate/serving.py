"""Serves others, beside a simulated peer's rounds, with chunks of states and of finals.

As on a line that connections share, chunks that are asked for take turns with what the peer's own round sends: one
frame at a time is on its way out, the next when the line is free again, and receivers take turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.lab.simulate.talk import ChunkFrame, ChunkRequest, wrong
from shoal.protocol.errors import RemoteError
from shoal.swarm.lanes.chunks import RUN_LIMIT
from shoal.swarm.lanes.frame import FRAME_LIMIT_BYTES

if TYPE_CHECKING:
    from shoal.lab.simulate.peer import SimulatedPeer

Lookup = Callable[[bytes, int], tuple[bytes, int] | None]
"""Bytes and payload size of a chunk, by scope and number; None if it is not held."""


class Serving:
    """The chunks that others asked of a peer in one of its lives."""

    def __init__(self, peer: SimulatedPeer, lookup: Lookup) -> None:
        self._peer = peer
        self._swarm = peer.swarm
        self._lookup = lookup
        self._queues: dict[int, deque[ChunkFrame]] = {}
        self._leaving: list[float] = []
        self._at_work = False

    @property
    def waiting(self) -> int:
        """Frames that wait for their turn."""
        return sum(map(len, self._queues.values()))

    def ahead(self, now: float) -> int:
        """Frames that are given to the line and have not left: what else is sent waits for them."""
        self._leaving = [at for at in self._leaving if at > now]
        return len(self._leaving)

    def take(self, sender: int, request: ChunkRequest) -> None:
        """Queue what is asked for. Raises RemoteError if that is too much at once."""
        if len(request.chunks) > RUN_LIMIT:
            raise RemoteError(f"asks for {len(request.chunks)} chunks at once", peer=self._swarm.peers[sender].id)
        queue = self._queues.setdefault(sender, deque())
        for chunk in request.chunks:
            found = self._lookup(request.scope, chunk)
            if found is None:
                queue.append(ChunkFrame(request.scope, chunk, 0, None))
                continue
            data, size = found
            data = wrong(data) if "chunk" in self._peer.lies else data
            for offset in range(0, size, FRAME_LIMIT_BYTES):
                queue.append(ChunkFrame(request.scope, chunk, min(FRAME_LIMIT_BYTES, size - offset), data))
        if not self._at_work:
            self._at_work = True
            self._next(self._peer.life)

    def lane_broke(self, other: int) -> None:
        """Nothing more goes to `other`."""
        self._queues.pop(other, None)

    def _next(self, life: int) -> None:
        peer, timeline = self._peer, self._swarm.timeline
        if life != peer.life:
            return
        if peer.hung:
            timeline.after(self._swarm.tick_s, self._next, life)
            return
        place = self._swarm.network.places[peer.number]
        if place.up_free_at > timeline.now:
            timeline.at(place.up_free_at, self._next, life)
            return
        self._queues = {other: queue for other, queue in self._queues.items() if queue}
        if not self._queues:
            self._at_work = False
            return
        other = next(iter(self._queues))
        queue = self._queues.pop(other)
        frame = queue.popleft()
        self._queues[other] = queue  # behind the others: they take turns
        self._swarm.ship(peer, other, frame, frame.length)
        self._leaving.append(place.up_free_at)
        timeline.at(place.up_free_at, self._next, life)
