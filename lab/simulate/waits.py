"""Waits of followers at a simulated peer for what comes next on its chain (`shoal.protocol.followers`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.lab.simulate.talk import ChainPart, GetChain, NoPlace
from shoal.protocol.followers import Waiting
from shoal.protocol.identity import PeerId

if TYPE_CHECKING:
    from shoal.lab.simulate.peer import SimulatedPeer

ANSWER_BYTES = 600
"""Of an answer beside what it tells."""
ENTRY_BYTES = 1200
"""Of a certificate with the signatures of some voters."""


class ChainWaits:
    """Those who wait at a peer, in one of its lives."""

    def __init__(self, peer: SimulatedPeer) -> None:
        self._peer = peer
        self._waiting = Waiting()
        self._asked: dict[PeerId, GetChain] = {}

    def come(self, sender: int, asked: GetChain) -> None:
        """`sender` waits from now on, or is told that there is no place."""
        swarm = self._peer.swarm
        who = swarm.peers[sender].id
        if not self._waiting.come(who, asked.height, asked.rebases, swarm.timeline.now):
            swarm.call(self._peer, sender, NoPlace(asked), ANSWER_BYTES)
            return
        self._asked[who] = asked
        self.look()

    def look(self) -> None:
        """Answer those for whom there is something, or who waited long enough."""
        if not len(self._waiting):
            return
        swarm, rounds, disk = self._peer.swarm, self._peer.peer_rounds, self._peer.disk
        for who in self._waiting.due(disk.ledger, swarm.timeline.now, current=rounds.current):
            asked = self._asked.pop(who)
            entries = disk.entries_after(asked.height, asked.rebases)
            part = ChainPart(asked, entries, disk.height)
            swarm.call(self._peer, swarm.numbers[who], part, ANSWER_BYTES + ENTRY_BYTES * len(entries))

    def gone(self, other: int) -> None:
        """A link is gone, and the wait over it."""
        self._waiting.gone(self._peer.swarm.peers[other].id)
