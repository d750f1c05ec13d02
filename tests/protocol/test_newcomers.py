"""Newcomers in rounds that are shorter than a fetch: they get in, and nobody can hold the swarm up with it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from random import Random

import msgspec
import pytest

from shoal.protocol.agreement import Broadcast
from shoal.protocol.certificate import genesis
from shoal.protocol.effects import Adopt, MemberEffect
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import NO_HASH, Ready, Value
from shoal.protocol.newcomers import (
    ALONE_S,
    LAPSE_LIMIT_S,
    NEWCOMERS_LIMIT,
    REST,
    SAVED_LIMIT_S,
    Newcomers,
    coming,
)
from shoal.protocol.planning import JOINER, OBSERVER, absent_ready
from tests.protocol.lab import SWARM, paper_identities
from tests.protocol.round_lab import FETCH_S, RoundLab
from tests.protocol.round_node import SETTINGS

pytestmark = pytest.mark.usefixtures("paper_signatures")

GRACE_S = SETTINGS.grace_s


def appear(lab: RoundLab, *, dumb: bool = False) -> None:
    """The last node is there, and has nothing of the swarm yet. dumb: nor will it do anything about that."""
    lab.restart(len(lab.nodes) - 1)
    if dumb:
        assert lab.nodes[-1].box is not None
        lab.nodes[-1].box.stop()
    lab._see()


def short_rounds(founders: int = 2) -> RoundLab:
    """A swarm one of whose rounds takes less than FETCH_S, and a newcomer that is about to start."""
    lab = RoundLab(founders + 1, founders=founders, train_s=0.01, reduce_s=0.01)
    lab.run_until(lab.height_of(range(founders), 5), 10)
    took_s = lab.run_until(lab.height_of(range(founders), 25), 20)
    assert took_s / 20 < FETCH_S
    return lab


def newest(lab: RoundLab) -> int:
    return max(node.height for node in lab.nodes)


def in_it(lab: RoundLab) -> bool:
    """Whether the newcomer is a member."""
    return len(lab.nodes) - 1 in lab.members(newest(lab))


def test_newcomer_that_says_that_it_comes_is_waited_for_and_becomes_a_member() -> None:
    lab = short_rounds()
    adopted: list[float] = []

    def note(number: int, effect: MemberEffect) -> None:
        if isinstance(effect, Adopt):
            adopted.append(lab.now)

    lab.intercept = note
    appear(lab)
    lab.run_until(lambda: in_it(lab), GRACE_S)
    assert len(adopted) <= 3
    joined = newest(lab)
    lab.run_until(lab.height_of(range(3), joined + 5), 10)
    assert lab.contributors(joined + 3) == {0, 1, 2}


def test_newcomer_that_says_nothing_stays_behind() -> None:
    lab = short_rounds()

    def silent(number: int, effect: MemberEffect) -> Collection[int] | None:
        said = effect.message if isinstance(effect, Broadcast) else None
        return () if isinstance(said, Ready) and said.role == JOINER and said.state == NO_HASH else None

    lab.intercept = silent
    appear(lab)
    lab.run_until(lab.height_of(range(2), newest(lab) + 20), 30)
    assert not in_it(lab)


def gaps(lab: RoundLab) -> list[float]:
    """Seconds from each certificate to the next."""
    return [later - earlier for earlier, later in pairwise(lab.decided_at[round] for round in sorted(lab.decided_at))]


def repeat(lab: RoundLab, what: Callable[[], None], period_s: float) -> None:
    """Do it now, and every `period_s`."""
    what()
    lab.after(period_s, lambda: repeat(lab, what, period_s))


def test_who_always_says_that_it_comes_costs_a_bounded_share_of_the_time() -> None:
    lab = RoundLab(3, founders=2, train_s=2.0, reduce_s=0.1)
    appear(lab, dumb=True)
    lab.run_until(lab.height_of((0, 1), 2), 10)
    repeat(lab, lambda: lab.broadcast(2, coming(lab.value(max(lab.decided_at)))), GRACE_S / 4)
    span_s = 400.0
    lab.run_for(span_s)
    waits = [gap - 2.9 for gap in gaps(lab) if gap > 3.5]  # a round alone takes 2.0 to 2.9
    assert span_s / REST < sum(waits) < span_s / REST + SAVED_LIMIT_S + 2 * GRACE_S
    assert max(waits) < GRACE_S + 0.1
    assert lab.members(max(lab.decided_at)) == {0, 1}


def test_one_that_decides_alone_waits_for_longer_and_no_more_of_its_time_altogether() -> None:
    lab = RoundLab(2, founders=1, train_s=8.0, reduce_s=0.1)
    appear(lab, dumb=True)
    lab.run_until(lab.height_of((0,), 2), 40)
    repeat(lab, lambda: lab.broadcast(1, coming(lab.value(max(lab.decided_at)))), GRACE_S)
    span_s = 2 * REST * ALONE_S
    lab.run_for(span_s)
    waits = [gap - 9.9 for gap in gaps(lab) if gap > 10.5]  # a round alone takes at most 10.2
    assert ALONE_S - 3.0 < max(waits) < ALONE_S + 0.1
    assert sum(waits) < span_s / REST + SAVED_LIMIT_S + ALONE_S
    assert lab.members(max(lab.decided_at)) == {0}


@dataclass
class Turns:
    """Leads in turn, each with every trainer there after half a second, and a newcomer that says so all the time and
    leaves after a while: how long each wait took."""

    leads: int
    stays_s: Callable[[], float]
    now: float = 0.0
    waits: list[float] = field(default_factory=list)

    def run_for(self, span_s: float) -> None:
        peers = [identity.peer_id for identity in paper_identities(3)]
        previous = msgspec.structs.replace(genesis(SWARM, peers), members=tuple(map(str, range(self.leads))))
        leads, rounds = [Newcomers() for _ in range(self.leads)], 0
        while self.now < span_s:
            rounds += 1
            base, lead = msgspec.structs.replace(previous, round=rounds), leads[rounds % self.leads]
            self.now += 0.5
            began, gone = self.now, self.now + self.stays_s()
            while self.now < span_s and self.held_back(lead, base, peers[0], gone):
                self.now += 0.05
            lead.planned(base, self.now)
            self.waits.append(self.now - began)

    def held_back(self, lead: Newcomers, base: Value, peer: PeerId, gone: float) -> bool:
        lead.heard(peer, coming(base), self.now)
        return lead.hold_back(base, [peer] if self.now < gone else [], self.now, leads=self.leads, timeout_s=GRACE_S)


STAYS: dict[str, Callable[[], float]] = {
    "always": lambda: 1e9,
    "for a moment": lambda: 0.05,
    "until the grace is nearly over": lambda: GRACE_S - 0.1,
    "for any time": partial(Random(1).uniform, 0.0, 2 * GRACE_S),
}


@pytest.mark.parametrize("leads", [1, 8, 64])
@pytest.mark.parametrize("stays", STAYS)
def test_all_leads_together_wait_no_longer_than_their_share(stays: str, leads: int) -> None:
    """However many come, and however long they seem to: span / REST + SAVED_LIMIT_S + a grace for each lead."""
    turns, span_s = Turns(leads, STAYS[stays]), 4_000.0
    turns.run_for(span_s)
    assert max(turns.waits) < GRACE_S + 0.1
    assert 0.9 * span_s / REST < sum(turns.waits) <= span_s / REST + SAVED_LIMIT_S + leads * GRACE_S
    assert sum(turns.waits[: len(turns.waits) // 2]) < span_s / 2 / REST + SAVED_LIMIT_S + leads * GRACE_S


def test_short_waits_may_follow_each_other_until_what_was_saved_is_spent() -> None:
    lead, peer, members = Newcomers(), paper_identities(1)[0].peer_id, 8
    start = msgspec.structs.replace(RoundLab(3).start, members=tuple(map(str, range(members))))
    held = []
    for number in range(6):
        base, now = msgspec.structs.replace(start, round=number), 10.0 + number
        lead.heard(peer, coming(base), now)
        held.append(lead.hold_back(base, [peer], now, leads=members, timeout_s=GRACE_S))
        lead.planned(base, now + 0.6)
    # Three waits of 0.6 s at 8 members cost 14.4 s, of which 10 were saved and 0.1 came in.
    assert held == [True, True, True, False, False, False]


def test_who_is_not_there_is_not_waited_for() -> None:
    lab = RoundLab(3, founders=2, train_s=0.5, reduce_s=0.1)
    lab.run_until(lab.height_of(range(2), 2), 10)
    for node in lab.nodes[:2]:
        node.member.newcomers.heard(lab.nodes[2].peer, coming(node.values[-1]), lab.now)
    lab.run_for(3 * GRACE_S)
    assert max(gaps(lab)) < GRACE_S / 2


@pytest.mark.parametrize(("who", "awaited"), [("a member", False), ("banned", False), ("a newcomer", True)])
def test_members_are_no_newcomers_and_nobody_who_is_banned_is_one(who: str, awaited: bool) -> None:
    lab = RoundLab(3, founders=2)
    appear(lab, dumb=True)
    node, peer = lab.nodes[1], lab.nodes[0 if who == "a member" else 2].peer
    facts = node.running()._facts
    facts.banned = frozenset([peer] if who == "banned" else [])
    assert peer in facts.alive
    assert peer not in facts.candidates()
    node.member.newcomers.heard(peer, coming(lab.start), lab.now)
    assert not facts.waits_for_newcomers(lab.now), "half of those who train are not ready"
    facts.gathering.half_ready_at = lab.now
    assert facts.waits_for_newcomers(lab.now) is awaited
    assert not facts.waits_for_newcomers(lab.now + GRACE_S)


def test_only_a_joiner_without_a_state_is_coming() -> None:
    lab = RoundLab(2)
    previous, peer = lab.start, lab.nodes[1].peer
    for ready, awaited in (
        (absent_ready(JOINER, previous, bytes([1]) * 32), False),
        (absent_ready(OBSERVER, previous, NO_HASH), False),
        (coming(previous), True),
    ):
        newcomers = Newcomers()
        newcomers.heard(peer, ready, 0.0)
        assert newcomers.hold_back(previous, [peer], 0.0, leads=len(previous.members), timeout_s=1.0) is awaited


def test_wait_ends_with_the_patience_and_is_paid_for() -> None:
    previous = RoundLab(3).start
    one, other = (identity.peer_id for identity in paper_identities(2))
    newcomers = Newcomers()
    newcomers.heard(one, coming(previous), 0.0)
    for now in (0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5):
        assert newcomers.hold_back(previous, [one], now, leads=len(previous.members), timeout_s=8.0)
    assert not newcomers.hold_back(previous, [one], 8.0, leads=len(previous.members), timeout_s=8.0)
    newcomers.planned(previous, 8.0)
    over = 8.0 + REST * (3 * 7.5 - SAVED_LIMIT_S)
    for now, awaited in ((over - 0.1, False), (over + 0.1, True)):
        newcomers.heard(other, coming(previous), now)
        assert newcomers.hold_back(previous, [other], now, leads=len(previous.members), timeout_s=8.0) is awaited


def test_newcomers_one_after_the_other_hold_a_plan_back_no_longer_than_one() -> None:
    previous = RoundLab(3).start
    newcomers = Newcomers()
    held = []
    for second, identity in enumerate(paper_identities(6)):
        newcomers.heard(identity.peer_id, coming(previous), second)
        held.append(newcomers.hold_back(previous, [identity.peer_id], second, leads=3, timeout_s=4.0))
    assert held == [True, True, True, True, False, False]


@pytest.mark.parametrize("then", ["the plan", "a plan of another round", "the question again"])
def test_wait_that_a_lost_quorum_or_another_lead_ended_costs_what_it_took(then: str) -> None:
    """Nobody asks for an hour; then there is `then`."""
    previous, peer = RoundLab(3).start, paper_identities(1)[0].peer_id
    newcomers = Newcomers()
    newcomers.heard(peer, coming(previous), 0.0)
    assert newcomers.hold_back(previous, [peer], 0.0, leads=3, timeout_s=8.0)
    for now in range(1, 6):
        assert newcomers.hold_back(previous, [peer], now, leads=len(previous.members), timeout_s=8.0)
    later = msgspec.structs.replace(previous, round=7) if then == "a plan of another round" else previous
    if then == "the question again":
        newcomers.heard(peer, coming(later), 3600.0)
        assert not newcomers.hold_back(later, [peer], 3600.0, leads=3, timeout_s=8.0)
    else:
        newcomers.planned(later, 3600.0)
    over = 3600.0 + REST * (3 * (5.0 + LAPSE_LIMIT_S) - SAVED_LIMIT_S)
    for now, awaited in ((over - 0.1, False), (over + 0.1, True)):
        newcomers.heard(peer, coming(later), now)
        assert newcomers.hold_back(later, [peer], now, leads=len(previous.members), timeout_s=8.0) is awaited


def test_who_did_not_come_has_to_say_so_again() -> None:
    previous = RoundLab(3).start
    peer = paper_identities(1)[0].peer_id
    newcomers = Newcomers()
    newcomers.heard(peer, coming(previous), 0.0)
    assert newcomers.hold_back(previous, [peer], 0.0, leads=3, timeout_s=2.0)
    newcomers.planned(previous, 0.01)
    assert not newcomers.hold_back(previous, [peer], 1.0, leads=3, timeout_s=2.0)
    newcomers.heard(peer, coming(previous), 1.0)
    assert newcomers.hold_back(previous, [peer], 1.0, leads=3, timeout_s=2.0)


def test_rounds_in_which_nobody_was_waited_for_cost_nothing() -> None:
    previous = RoundLab(3).start
    peer = paper_identities(1)[0].peer_id
    newcomers = Newcomers()
    newcomers.planned(previous, 5.0)
    newcomers.heard(peer, coming(previous), 6.0)
    assert newcomers.hold_back(previous, [peer], 6.0, leads=3, timeout_s=2.0)


def test_list_of_newcomers_is_bounded() -> None:
    previous = RoundLab(2).start
    newcomers = Newcomers()
    peers = [identity.peer_id for identity in paper_identities(NEWCOMERS_LIMIT + 1)]
    for peer in peers:
        newcomers.heard(peer, coming(previous), 0.0)
    assert not newcomers.hold_back(previous, peers[:1], 0.0, leads=len(previous.members), timeout_s=1.0)
    assert newcomers.hold_back(previous, peers[1:2], 0.0, leads=len(previous.members), timeout_s=1.0)
    assert len(newcomers._said_at) == NEWCOMERS_LIMIT
