"""Who stalls, and who is only slow: the pace of a reduction whose progress the test makes up."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import msgspec
import pytest

from shoal.collectives.progress import Waiting
from shoal.node.rounds.pace import LATE_S, STALL_LIMIT_S, STALL_S, Pace, Stall
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Plan
from shoal.swarm.lanes.moved import Moved
from tests.node.ledger import Ledger, identity, plan_of

LEDGER = Ledger()
IDENTITIES = [identity(n + 1) for n in range(4)]
ME, SLOW, OWNER, OTHER = (one.peer_id for one in IDENTITIES)
LOOK_S = 0.1
NOBODY: frozenset[PeerId] = frozenset()


@dataclass
class Scene:
    """A reduction, and what its lanes have moved, as a test says."""

    attempt: int = 0
    earlier: int = 0
    contributions: frozenset[PeerId] = NOBODY
    finals: frozenset[PeerId] = NOBODY
    moves: frozenset[PeerId] = NOBODY
    now: float = 0.0
    received: dict[PeerId, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plan = msgspec.structs.replace(plan_of(IDENTITIES, LEDGER.chain.head), attempt=self.attempt)
        reduction = SimpleNamespace(plan=plan, received_bytes={}, waiting_for=self.waiting_for)
        self.pace = Pace(reduction, self, ME, 0.0, earlier=self.earlier)  # type: ignore[arg-type]
        self.plan: Plan = plan

    def waiting_for(self) -> Waiting:
        return Waiting(contributions=self.contributions, finals=self.finals)

    def moved(self, peer: PeerId) -> Moved:
        return Moved(received=self.received.get(peer, 0))

    def queued_bytes(self, peer: PeerId) -> int:
        return 0

    def look(self, seconds: float) -> Stall:
        """What the pace says after so many seconds, in which a byte of each in `moves` comes at every look."""
        stall = Stall(NOBODY, NOBODY)
        for _ in range(round(seconds / LOOK_S)):
            self.now += LOOK_S
            for peer in self.moves:
                self.received[peer] = self.received.get(peer, 0) + 1
            stall = self.pace.look(self.now)
        return stall


def test_node_that_waits_long_for_what_does_come_names_itself() -> None:
    scene = Scene(contributions=frozenset({SLOW}), moves=frozenset({SLOW}))
    assert scene.look(STALL_S - LOOK_S) == Stall(NOBODY, NOBODY)
    assert scene.look(3 * LOOK_S) == Stall(NOBODY, frozenset({ME}))


def test_it_names_itself_before_others_that_wait_for_it_would() -> None:
    waits = Scene(contributions=frozenset({SLOW}), moves=frozenset({SLOW}))
    misses = Scene(finals=frozenset({OWNER}))
    assert waits.look(STALL_S + LATE_S / 2).late == {ME}
    assert misses.look(STALL_S + LATE_S / 2).late == NOBODY
    assert misses.look(LATE_S).late == {OWNER}


def test_it_names_itself_until_its_finals_can_be_under_way() -> None:
    scene = Scene(contributions=frozenset({SLOW}), moves=frozenset({SLOW}))
    scene.look(STALL_S + 1.0)
    scene.contributions = NOBODY
    assert scene.look(STALL_S - 2 * LOOK_S).late == {ME}
    assert scene.look(4 * LOOK_S).late == NOBODY


def test_node_that_waits_for_nothing_that_comes_accuses_and_has_no_excuse() -> None:
    scene = Scene(contributions=frozenset({SLOW}))
    assert scene.look(STALL_S + 2 * LOOK_S) == Stall(frozenset({SLOW}), NOBODY)


@pytest.mark.parametrize(
    ("attempt", "earlier", "stall_s"),
    [(0, 0, STALL_S), (1, 0, 2 * STALL_S), (0, 1, 2 * STALL_S), (1, 2, 4 * STALL_S), (0, 9, STALL_LIMIT_S)],
)
def test_stall_deadline_doubles_with_every_plan_of_the_round(attempt: int, earlier: int, stall_s: float) -> None:
    scene = Scene(attempt=attempt, earlier=earlier, contributions=frozenset({SLOW}))
    assert scene.look(stall_s - LOOK_S).peers == NOBODY
    assert scene.look(3 * LOOK_S).peers == {SLOW}
