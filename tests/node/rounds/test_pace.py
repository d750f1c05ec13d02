"""Who stalls, and who is only slow: the pace of a reduction whose progress the test makes up."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import msgspec
import pytest

from shoal.collectives.progress import Waiting
from shoal.collectives.stalls import LATE_S, STALL_LIMIT_S, STALL_S
from shoal.node.rounds.pace import QUIET_S, Pace, Stall, Told
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Plan
from shoal.protocol.timeouts import CROWD
from shoal.swarm.lanes.socket import Moved
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
    view: int = 0
    nodes: int = len(IDENTITIES)
    contributions: frozenset[PeerId] = NOBODY
    finals: frozenset[PeerId] = NOBODY
    moves: frozenset[PeerId] = NOBODY
    queued: frozenset[PeerId] = NOBODY
    step: int = 1
    uploads: dict[PeerId, int] = field(default_factory=dict)
    downloads: dict[PeerId, int] = field(default_factory=dict)
    late_s: float = 0.0
    now: float = 0.0
    bytes: dict[PeerId, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        others = [identity(n + 1) for n in range(len(IDENTITIES), self.nodes)]
        plan = plan_of([*IDENTITIES, *others], LEDGER.chain.head)
        participants = tuple(
            msgspec.structs.replace(p, upload=self.uploads.get(p.peer, 0), download=self.downloads.get(p.peer, 0))
            for p in plan.participants
        )
        plan = msgspec.structs.replace(plan, view=self.view, attempt=self.attempt, participants=participants)
        reduction = SimpleNamespace(plan=plan, received_bytes={}, waiting_for=self.waiting_for)
        self.pace = Pace(
            reduction,  # type: ignore[arg-type]
            self,
            ME,
            0.0,
            late_s=lambda: self.late_s,
        )
        self.plan: Plan = plan

    def waiting_for(self) -> Waiting:
        return Waiting(contributions=self.contributions, finals=self.finals)

    def moved(self, peer: PeerId) -> Moved:
        moved = self.bytes.get(peer, 0)
        return Moved(received=0, taken=moved) if self.queued else Moved(received=moved)

    def queued_bytes(self, peer: PeerId) -> int:
        return int(peer in self.queued)

    def look(self, seconds: float) -> Stall:
        """What the pace says after so many seconds, in which at every look `step` bytes of each in `moves` come, or,
        where something is queued, are taken."""
        stall = Stall(NOBODY, NOBODY)
        for _ in range(round(seconds / LOOK_S)):
            self.now += LOOK_S
            for peer in self.moves:
                self.bytes[peer] = self.bytes.get(peer, 0) + self.step
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


def test_it_names_itself_before_others_would_also_where_it_runs_late() -> None:
    """Those who do not have less patience."""
    waits = Scene(contributions=frozenset({SLOW}), late_s=3.0)
    misses = Scene(finals=frozenset({OWNER}))
    assert waits.look(STALL_S + LATE_S / 2) == Stall(NOBODY, frozenset({ME}))
    assert misses.look(STALL_S + LATE_S / 2).late == NOBODY
    assert waits.look(STALL_S + 3.0).peers == {SLOW}


def test_it_names_itself_until_its_finals_can_be_under_way() -> None:
    scene = Scene(contributions=frozenset({SLOW}), moves=frozenset({SLOW}))
    scene.look(STALL_S + 1.0)
    scene.contributions = NOBODY
    assert scene.look(STALL_S - 2 * LOOK_S).late == {ME}
    assert scene.look(4 * LOOK_S).late == NOBODY


def test_owner_of_finals_of_whom_nothing_comes_is_quiet_long_before_it_is_blamed() -> None:
    scene = Scene(finals=frozenset({OWNER, SLOW}), contributions=frozenset({OTHER}), moves=frozenset({SLOW}))
    scene.look(QUIET_S - LOOK_S)
    assert scene.pace.quiet() == set()
    assert scene.look(3 * LOOK_S) == Stall(NOBODY, NOBODY)
    assert scene.pace.quiet() == {OWNER}
    scene.moves |= {OWNER}
    scene.look(LOOK_S)
    assert scene.pace.quiet() == set()


def test_node_that_waits_for_nothing_that_comes_accuses_and_when_it_does_come_is_excused_all_the_while() -> None:
    """Else there would be a moment in which it accuses nobody, and others miss its finals: a liar's pause made one."""
    scene = Scene(contributions=frozenset({SLOW}))
    assert scene.look(STALL_S + 2 * LOOK_S) == Stall(frozenset({SLOW}), frozenset({ME}))
    scene.moves = frozenset({SLOW})
    assert scene.look(LOOK_S) == Stall(NOBODY, frozenset({ME}))


def test_of_a_reduction_that_had_its_time_who_lacks_little_says_what_however_steadily_it_comes() -> None:
    scene = Scene(contributions=frozenset({SLOW}), finals=frozenset({SLOW, OWNER}), moves=frozenset({SLOW, OWNER}))
    stall = scene.look(10 * STALL_S)
    assert stall == Stall(NOBODY, frozenset({ME}))
    assert scene.pace.overdue(stall) == Stall(frozenset({SLOW}), frozenset({ME}))
    scene.pace._contributors = frozenset({SLOW})
    assert scene.pace.overdue(stall) == stall, "nobody else of the others has anything to contribute"
    scene.pace._contributors = frozenset({SLOW, OWNER, OTHER})
    scene.contributions = frozenset({SLOW, OWNER, OTHER})
    assert scene.pace.overdue(stall) == stall, "all are slow"
    scene.contributions = NOBODY
    assert scene.pace.overdue(scene.look(2 * STALL_S)) == Stall(NOBODY, frozenset({SLOW, OWNER}))


@pytest.mark.parametrize("owed", ["contributions", "finals", "queued"])
def test_who_runs_late_itself_accuses_nobody_before_its_lag_is_over_too(owed: str) -> None:
    stall_s, late_s = STALL_S + (LATE_S if owed == "finals" else 0.0), 3.0
    scene = Scene(late_s=late_s, **{owed: frozenset({SLOW})})  # type: ignore[arg-type]
    assert scene.look(stall_s + late_s - 2 * LOOK_S) == Stall(
        NOBODY, frozenset({ME}) if owed == "contributions" else NOBODY
    )
    stall = scene.look(4 * LOOK_S)
    assert (stall.peers | stall.late) - {ME} == {SLOW}


@pytest.mark.parametrize(
    ("attempt", "view", "stall_s"),
    [(0, 0, STALL_S), (1, 0, 2 * STALL_S), (0, 1, 2 * STALL_S), (1, 1, 4 * STALL_S), (0, 9, STALL_LIMIT_S)],
)
def test_stall_deadline_doubles_with_every_attempt_and_every_view(attempt: int, view: int, stall_s: float) -> None:
    scene = Scene(attempt=attempt, view=view, contributions=frozenset({SLOW}))
    assert scene.look(stall_s - LOOK_S).peers == NOBODY
    assert scene.look(3 * LOOK_S).peers == {SLOW}


def test_in_a_crowd_all_are_waited_for_longer() -> None:
    """Each owner makes a lane to everybody: three times as many nodes of one machine need thrice the time."""
    scene = Scene(nodes=3 * CROWD, contributions=frozenset({SLOW}))
    assert scene.look(3 * STALL_S - LOOK_S).peers == NOBODY
    assert scene.look(3 * LOOK_S).peers == {SLOW}


def told(stalls: dict[float, Stall], *, nodes: int, seconds: int = 16) -> list[float]:
    """When a node that looks twice a second tells how it stands; each stall from its time on."""
    telling, now = Told(), Stall(NOBODY, NOBODY)
    times = []
    for look in range(2 * seconds):
        now = stalls.get(look / 2, now)
        times += [look / 2] if telling.is_due(now, look / 2, nodes=nodes) else []
    return times


def test_stall_is_told_at_once_and_again_while_it_lasts_and_to_a_crowd_more_seldom() -> None:
    none, one, both = (Stall(peers, NOBODY) for peers in (NOBODY, frozenset({SLOW}), frozenset({SLOW, OTHER})))
    stalls = {3.0: one, 8.0: both, 8.5: one, 9.0: none}
    assert STALL_S == 2.0
    assert told(stalls, nodes=CROWD) == [3.0, 5.0, 7.0, 8.0, 8.5, 9.0], "and no more once nobody stalls"
    assert told(stalls, nodes=3 * CROWD) == [3.0, 8.0, 12.0], "what changed meanwhile is told as it stands then"
    telling = Told()
    assert telling.is_due(one, 0.0, nodes=2)
    telling.begin()
    assert telling.is_due(one, 0.5, nodes=2), "of another plan nothing was told yet"


FAST = 3_000_000
"""Bytes/s of an end; a third of it is for each of three others."""


@pytest.mark.parametrize("sending", [False, True], ids=["receiving", "sending"])
@pytest.mark.parametrize(
    ("ends", "share", "stalls"),
    [
        ((FAST, 0), 0.20, True),
        ((FAST, 0), 0.30, False),
        ((0, FAST), 0.20, True),
        ((0, FAST), 0.30, False),
        ((FAST, FAST // 2), 0.10, True),
        ((FAST, FAST // 2), 0.15, False),  # three tenths of what the narrower end lets through
        ((0, 0), 0.01, False),
    ],
)
def test_who_moves_less_than_a_quarter_of_its_share_of_the_narrower_end_stalls(
    ends: tuple[int, int], share: float, stalls: bool, sending: bool
) -> None:
    giver, taker = (ME, SLOW) if sending else (SLOW, ME)
    scene = Scene(
        contributions=NOBODY if sending else frozenset({SLOW}),
        queued=frozenset({SLOW}) if sending else NOBODY,
        moves=frozenset({SLOW}),
        step=round(share * FAST / 3 * LOOK_S),
        uploads={giver: ends[0]},
        downloads={taker: ends[1]},
    )
    assert scene.look(STALL_S - LOOK_S).peers == NOBODY
    assert scene.look(3 * LOOK_S).peers == (frozenset({SLOW}) if stalls else NOBODY)
