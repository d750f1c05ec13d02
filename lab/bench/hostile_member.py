"""The lying member of `shoal bench hostile`, a real node:

    python -m shoal.lab.bench.hostile_member KIND STRIKE VICTIM run …

It is honest except while the file STRIKE exists. Each lie adds a byte to STRIKE.told. VICTIM is the PeerId of an honest
member. Whatever it says it signs with the one key that it has.

    forged_leaves  sends certificates of its own vote alone, by which all others left, and proposes them where it leads
    electorate     where it leads it proposes others members: a stranger in, signed for or not, or the victim out
    viewjump       moves with invented prepare certificates, and speaks in views far ahead
    accuser        keeps its contribution from the victim, and says that the victim moves nothing
"""

from __future__ import annotations

import runpy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from shoal.collectives.traffic import PlanTraffic
from shoal.lab.forgeries import (
    far_messages,
    forged_certificate,
    invented_change,
    with_stranger,
    without,
)
from shoal.lab.signed import propose_of
from shoal.node.rounds.pace import Stall
from shoal.node.rounds.reducing import ReductionDriver
from shoal.protocol.agreement import Agreement
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.messages import Prepare, Propose, RoundMessage, Value, Vote
from shoal.protocol.peering import LinkMessage
from shoal.swarm.lanes.frame import FrameKind
from shoal.swarm.links import Links

MODULE: Final = "shoal.lab.bench.hostile_member"
PERIOD_S: Final = 0.5
"""Between two lies of those that need no turn of its own."""

TOLD_SUFFIX: Final = ".told"


def lying_command(command: Sequence[str], kind: str, strike: Path, victim: PeerId) -> list[str]:
    """The command line of a node that lies, made of that of an honest one."""
    at = command.index("shoal.cli.main")
    return [*command[:at], MODULE, kind, str(strike), victim, *command[at + 1 :]]


def told_of(strike: Path) -> Path:
    """The file that has a byte for each lie told."""
    return strike.with_name(strike.name + TOLD_SUFFIX)


class Liar:
    """The state of a lying member: when it lies, to whom, and in the agreement of which round."""

    def __init__(self, strike: Path, victim: PeerId) -> None:
        self.victim = victim
        self.identity: Identity | None = None
        self.previous: Value | None = None
        self._strike = strike
        self._told = told_of(strike)
        self._at = float("-inf")

    @property
    def strikes(self) -> bool:
        """True while it is to lie."""
        return self._strike.exists()

    def is_due(self) -> bool:
        """Return True if it is to lie and has not for a while; ask for each lie once."""
        now = time.monotonic()
        if not self.strikes or now - self._at < PERIOD_S:
            return False
        self._at = now
        return True

    def note(self) -> None:
        """Count a lie that was told."""
        with self._told.open("ab") as file:
            file.write(b".")

    def takes_part(self) -> bool:
        """Return True if it is in the electorate of the current round."""
        return (
            self.identity is not None and self.previous is not None and self.identity.peer_id in self.previous.members
        )


Say = Callable[[LinkMessage], None]


class Words:
    """Lies that go out beside, or in place of, a message to everybody. Subclasses say which."""

    def __init__(self, liar: Liar) -> None:
        self.liar = liar

    def instead(self, message: LinkMessage) -> Sequence[LinkMessage] | None:
        """Return what goes out in the place of `message`; None: itself."""
        return None

    def beside(self, me: Identity, previous: Value) -> Iterator[LinkMessage]:
        """Yield what it says from time to time, whatever the phase of the round."""
        yield from ()


class ForgedLeaves(Words):
    """Certificates and proposals by which all others left."""

    def instead(self, message: LinkMessage) -> Sequence[LinkMessage] | None:
        """Replace its own proposals by ones with invented leaves."""
        if not isinstance(message, Propose) or not self.liar.strikes or not self.liar.takes_part():
            return None
        assert self.liar.identity is not None
        assert self.liar.previous is not None
        forged = forged_certificate(self.liar.identity, self.liar.previous)
        return [propose_of(self.liar.identity, message.view, forged.value, message.moves)]

    def beside(self, me: Identity, previous: Value) -> Iterator[LinkMessage]:
        """Yield a forged certificate."""
        yield forged_certificate(me, previous)


class InventedElectorate(Words):
    """Proposals of other members."""

    def __init__(self, liar: Liar) -> None:
        super().__init__(liar)
        self._lies: dict[tuple[bytes, int], int] = {}

    def instead(self, message: LinkMessage) -> Sequence[LinkMessage] | None:
        """Replace its own proposals by other ones, and sign nothing for what it would have proposed."""
        if isinstance(message, Prepare | Vote):
            return [] if (message.base, message.view) in self._lies else None
        me = self.liar.identity
        if not isinstance(message, Propose) or me is None or message.value.planner != me.peer_id:
            return None
        position = message.base, message.view
        if position not in self._lies and not self.liar.strikes:
            return None
        number = self._lies.setdefault(position, len(self._lies))
        return [propose_of(me, message.view, self._lie(message.value, number), message.moves)]

    def _lie(self, value: Value, number: int) -> Value:
        stranger = Identity.from_seed(number.to_bytes(32, "little"))
        lies = (
            without(value, self.liar.victim),
            with_stranger(value, stranger, signs=False),
            with_stranger(value, stranger, signs=True),
        )
        return lies[number % len(lies)]


class FarViews(Words):
    """Moves with invented certificates, and words of views far ahead."""

    def beside(self, me: Identity, previous: Value) -> Iterator[LinkMessage]:
        """Yield all of them."""
        yield invented_change(me, previous, 1)
        yield from far_messages(me, previous)


ELECTORATE: Final = "electorate"
"""The one that lies only where it leads."""
WORDS: Final[dict[str, type[Words]]] = {
    "forged_leaves": ForgedLeaves,
    ELECTORATE: InventedElectorate,
    "viewjump": FarViews,
}
ACCUSER: Final = "accuser"
LYING_KINDS: Final = (*WORDS, ACCUSER)


def lie_in_words(words: Words) -> None:
    """Make this process's links say what `words` want said, from now on."""
    honest_broadcast, honest_init, liar = Links.broadcast, Agreement.__init__, words.liar

    def begin(self: Agreement, **facts: Any) -> None:
        honest_init(self, **facts)
        liar.identity, liar.previous = facts["identity"], facts["previous"]

    def broadcast(self: Links, message: LinkMessage) -> None:
        instead = words.instead(message)
        for one in [message] if instead is None else instead:
            honest_broadcast(self, one)
            if instead is not None:
                liar.note()
        if isinstance(message, RoundMessage) and liar.takes_part() and liar.is_due():
            assert liar.identity is not None
            assert liar.previous is not None
            for one in words.beside(liar.identity, liar.previous):
                honest_broadcast(self, one)
                liar.note()

    Agreement.__init__ = begin  # type: ignore[method-assign]
    Links.broadcast = broadcast  # type: ignore[method-assign]


def accuse(liar: Liar) -> None:
    """Make this process accuse the victim of what it does itself, from now on."""
    honest_post, honest_stalled = PlanTraffic.post, ReductionDriver.stalled

    def post(self: PlanTraffic, scope: bytes, peer: PeerId, kind: FrameKind, chunk: int, payload: memoryview) -> None:
        if kind is FrameKind.CONTRIBUTION and peer == liar.victim and liar.strikes:
            liar.note()
        else:
            honest_post(self, scope, peer, kind, chunk, payload)

    def stalled(self: ReductionDriver, *, overdue: bool = False) -> Stall | None:
        if not liar.strikes:
            return honest_stalled(self, overdue=overdue)
        if self._reduction is None or not liar.is_due():
            return None
        liar.note()
        return Stall(frozenset({liar.victim}), frozenset())

    PlanTraffic.post = post  # type: ignore[method-assign]
    ReductionDriver.stalled = stalled  # type: ignore[method-assign]


def main() -> None:
    kind, strike, victim = sys.argv[1:4]
    del sys.argv[1:4]
    liar = Liar(Path(strike), PeerId(victim))
    if kind == ACCUSER:
        accuse(liar)
    else:
        lie_in_words(WORDS[kind](liar))
    runpy.run_module("shoal.cli.main", run_name="__main__")


if __name__ == "__main__":
    main()
