"""Watches for another chain: two certificates for one position, seen by this node, stop it until the authority decides.

    a certificate for a position that is decided here        it is held against the entry here
    a message, or an entry, on a base that is not here        the chain of who sent it is compared with the one here
    two certificates that hold, with two values               on disk, told to the user and to all peers (forks.py)

Comparing is an errand beside the rounds, with one peer at a time, and with each not more often than every PERIOD_S.
"""

from __future__ import annotations

import logging
from typing import Final

from shoal.protocol.agreement import Broadcast
from shoal.protocol.chain import Position, next_position
from shoal.protocol.chain_comparison import Difference, difference
from shoal.protocol.effects import KeepFork
from shoal.protocol.effects import Steps as Effects
from shoal.protocol.errands import Clock, Errand, Steps
from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.forks import FORKS_LIMIT
from shoal.protocol.identity import PeerId
from shoal.protocol.inputs import ChainCompared
from shoal.protocol.messages import Certificate, Message, RoundMessage
from shoal.protocol.surroundings import Surroundings

PERIOD_S: Final = 10.0
"""Between two comparisons with one peer."""
SUSPECTS_LIMIT: Final = 64
COMPARED_LIMIT_PEERS: Final = 1024

logger = logging.getLogger(__name__)


class ForkWatch:
    """A member's watch over its chain, in whose hands it is; times are the member's."""

    def __init__(self, here: Surroundings) -> None:
        self._here = here
        self._clock = Clock()
        self._suspects: dict[PeerId, None] = {}
        self._compared_at: dict[PeerId, float] = {}
        self._comparing = False

    def heard(self, peer: PeerId, message: Message, position: Position, now: float) -> Effects:
        """A round message came from `peer`; it may show that another chain goes on."""
        chain, current = self._here.chain, next_position(self._here.chain.head)
        base = message.value.base if isinstance(message, Certificate) else getattr(message, "base", None)
        if position > current or base is None:
            return  # it is caught up with, or of no round
        if not chain.knows(base):
            self.suspect(peer, now)
        elif isinstance(message, Certificate):
            yield from self._hold_against(message, peer)
        elif isinstance(message, RoundMessage) and chain.decided(position) is None and base != chain.head.hash:
            self.suspect(peer, now)

    def suspect(self, peer: PeerId, now: float) -> None:
        """Have the chain here compared with that of a peer, which said something that does not go with it."""
        since = self._compared_at.get(peer)
        recently = since is not None and now - since < PERIOD_S
        if not recently and len(self._suspects) < SUSPECTS_LIMIT:
            self._suspects[peer] = None

    @property
    def suspects_somebody(self) -> bool:
        """True if a comparison waits for its turn."""
        return bool(self._suspects)

    def due(self, now: float) -> Errand | None:
        """Return the errand for the comparison to begin now, if any. Comes to `ChainCompared`."""
        peer = next(iter(self._suspects), None)
        if self._comparing or peer is None:
            return None
        del self._suspects[peer]
        self._comparing, self._compared_at[peer] = True, now
        while len(self._compared_at) > COMPARED_LIMIT_PEERS:
            del self._compared_at[next(iter(self._compared_at))]
        return Errand(self._compare(peer), self._clock)

    def _compare(self, peer: PeerId) -> Steps:
        try:
            found: Difference = yield from difference(self._here.chain.entries, peer)
        except (NetworkError, RemoteError) as error:
            logger.info("comparing the chain with that of %s: %s", peer, error)
            return ChainCompared(peer, None)
        theirs = found.theirs if found.parted else None
        return ChainCompared(peer, theirs if isinstance(theirs, Certificate) else None)

    def compared(self, event: ChainCompared) -> Effects:
        """A comparison is over."""
        self._comparing = False
        if event.theirs is not None:
            yield from self._hold_against(event.theirs, event.peer)

    def _hold_against(self, certificate: Certificate, peer: PeerId) -> Effects:
        try:
            fork = self._here.chain.fork_with(certificate)
        except RemoteError as error:
            logger.warning("%s: %s", peer, error)
            return
        if fork is not None and fork not in self._here.forks and len(self._here.forks) < FORKS_LIMIT:
            yield KeepFork(fork)
            yield Broadcast(fork.one)
            yield Broadcast(fork.other)
