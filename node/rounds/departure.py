"""How a node stops taking part: because it is asked to, or because the rounds it was to take part in are done.

    rounds done       first see, for LINGER_S at most, that those who are linked have the last certificate too
    asked to leave    go at once where nobody counts on this node; else promise to sign nothing more, and then go

A vote under way is waited for, the others may need it; and for LEAVE_PATIENCE_S at most is anything waited for.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from enum import Enum, auto

import trio

from shoal.protocol.identity import PeerId
from shoal.protocol.round import Phase, RoundMachine

LINGER_S = 5.0
LEAVE_PATIENCE_S = 20.0


class Parting(Enum):
    """What to do about leaving now."""

    STAY = auto()
    PROMISE = auto()
    GO = auto()


class Departure:
    """When this node may go. `left` is set when it has gone, `finished` once its rounds are done."""

    def __init__(self, *, rounds: int | None) -> None:
        self._rounds = rounds
        self._asked_at: float | None = None
        self._have_certificate: set[PeerId] = set()
        self.finished = False
        self.left = trio.Event()

    @property
    def asked(self) -> bool:
        """Whether this node is to leave."""
        return self._asked_at is not None

    def ask(self, now: float) -> None:
        """Leave as soon as the round allows; patience counts from the first time."""
        if self._asked_at is None:
            self._asked_at = now

    def begin_round(self) -> None:
        """Another round begins, whose certificate nobody has."""
        self._have_certificate.clear()

    def has_certificate(self, peer: PeerId) -> None:
        """This peer sent the certificate of the newest round."""
        self._have_certificate.add(peer)

    def known_to(self, peers: AbstractSet[PeerId]) -> bool:
        """Whether all of these peers have the certificate of the newest round."""
        return self._have_certificate >= peers

    def rounds_done(self, certified: int) -> bool:
        """Whether `certified` rounds are all that this node was to take part in."""
        return self._rounds is not None and certified >= self._rounds

    def advise(self, machine: RoundMachine, now: float) -> Parting:
        """Look at the round, and at the time since leaving was asked for."""
        if self._asked_at is None or self.left.is_set():
            return Parting.STAY
        overdue = now - self._asked_at >= LEAVE_PATIENCE_S
        if not machine.agreement.member or not machine.leave_needs_promise() or overdue:
            return Parting.STAY if machine.phase is Phase.CERTIFY and not overdue else Parting.GO
        return Parting.PROMISE if machine.phase in (Phase.TRAIN, Phase.PLAN) else Parting.STAY
