"""One liar in the reduction: nobody honest goes for it where it is alone, and the round goes on at a bounded delay."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection

import pytest

from shoal.collectives.stalls import LATE_S, STALL_S, stall_deadline_s
from shoal.protocol.accusations import THIRDS_LIMIT, Pair, RelayChoice, pack_relays, pair_of
from shoal.protocol.excuses import EXCUSED_S, SETTLED_S
from shoal.protocol.identity import PeerId
from shoal.protocol.leading import RELAY_LATE_S, RELAY_SETTLE_S
from shoal.protocol.messages import Plan, Relay, RelayedWay
from shoal.protocol.planning import PlanOrder, reroute_plan
from shoal.protocol.round import RoundMachine
from shoal.protocol.timeouts import OVERDUE_SETTLE_S, PLAN_TIMEOUT_S, PROPOSE_TIMEOUT_S
from tests.protocol.dispute_lab import NOBODY, STEP_S, Lies, Table
from tests.protocol.lab import paper_identities
from tests.protocol.round_node import SETTINGS

pytestmark = pytest.mark.usefixtures("paper_signatures")

NOBODY_HERE = paper_identities(8)[7].peer_id
SLOW_S, VERY_SLOW_S = 16.0, 40.0
MOMENT_S = 2.0
WORD_S, LIES_FOR_S = 0.4, 8.0
"""How long a word may be on its way; and a lie that is not told to the end, when it would be settled by two words."""
FALSE_ACCUSER_GONE_S = RELAY_SETTLE_S + THIRDS_LIMIT * (RELAY_SETTLE_S + RELAY_LATE_S) + MOMENT_S
"""The accusation, and a detour for each third that may be tried, of which none has anything to say yet."""
WITHHOLDER_GONE_S = STALL_S + RELAY_SETTLE_S + 2 * STALL_S + 4 * STALL_S + MOMENT_S
"""Two detours: the stall deadline doubles with each, and is over at the relay when it is at the one who waits."""


def gone_s(table: Table, peer: PeerId) -> float:
    """When the first plan without `peer` was made."""
    return next(at for at, plan in table.plans if peer in plan.evicted) - table.began


def always(*accused: PeerId) -> Callable[[float, Plan], Collection[PeerId]]:
    return lambda now, plan: accused


# -- who accuses falsely -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 4, 7])
@pytest.mark.parametrize("victim", ["the lead", "a member"])
def test_lone_false_accuser_goes_and_its_victim_stays(count: int, victim: str) -> None:
    table = Table(count, move_s=SLOW_S)
    table.liar = table.others[0]
    table.lies = Lies(accuses=always(table.lead if victim == "the lead" else table.others[1]))
    table.run()
    assert table.evicted == {table.liar}
    assert table.decided is not None
    assert set(table.decided.members) == set(table.honest)
    assert gone_s(table, table.liar) < FALSE_ACCUSER_GONE_S


@pytest.mark.parametrize("count", [3, 4, 7])
def test_false_accuser_of_an_owner_that_waits_itself_is_heard_by_nobody(count: int) -> None:
    table = Table(count, move_s=SLOW_S)
    table.liar = table.others[0]
    table.lies = Lies(late=always(table.others[1]))
    assert table.run() < SLOW_S + MOMENT_S
    assert len(table.plans) == 1
    assert table.decided is not None
    assert set(table.decided.members) == set(table.seats)


@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.parametrize("direct", [True, False])
def test_lone_accuser_is_not_believed_at_the_deadline_either(count: int, direct: bool) -> None:
    """It speaks when the reduction is overdue, and as soon as there is another plan is silent until that is too."""
    table = Table(count, move_s=VERY_SLOW_S)
    table.liar, victim = table.others[0], table.others[1]

    def when_overdue(now: float, plan: Plan) -> Collection[PeerId]:
        planned_at = next(at for at, known in table.plans if known == plan)
        return {victim} if now - planned_at >= SETTINGS.reduce_deadline_s * 2**plan.attempt - 0.5 else NOBODY

    table.lies = Lies(accuses=when_overdue) if direct else Lies(late=when_overdue)
    took_s = table.run(600)
    assert table.evicted <= {table.liar}
    assert table.decided is not None
    assert took_s < 2 * VERY_SLOW_S + FALSE_ACCUSER_GONE_S, "nothing that had come was lost"


@pytest.mark.parametrize("count", [3, 4, 7])
@pytest.mark.parametrize("withholds", [True, False])
def test_who_accuses_everybody_at_once_goes(count: int, withholds: bool) -> None:
    table = Table(count, move_s=0.3 if withholds else SLOW_S)
    table.liar = table.others[0]
    others = frozenset(table.honest)
    table.lies = Lies(accuses=always(*others), withholds=others if withholds else NOBODY)
    table.run()
    assert table.evicted == {table.liar}
    assert gone_s(table, table.liar) < RELAY_SETTLE_S + MOMENT_S


@pytest.mark.parametrize("count", [3, 4, 7])
def test_who_accuses_one_after_the_other_comes_to_an_end(count: int) -> None:
    table = Table(count)
    table.liar, victims = table.others[0], table.honest
    table.lies = Lies(
        accuses=lambda now, plan: {victims[len(table.plans) % len(victims)]}, withholds=frozenset({table.others[1]})
    )
    table.run()
    assert table.evicted == {table.liar}
    assert gone_s(table, table.liar) < FALSE_ACCUSER_GONE_S


# -- who is accused, and lies --------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 4, 7])
@pytest.mark.parametrize("accuses", [False, True])
@pytest.mark.parametrize("victim", ["the lead", "a member"])
def test_who_keeps_its_contribution_from_one_goes(count: int, accuses: bool, victim: str) -> None:
    """Also where it accuses who misses it, which is first to speak then."""
    table = Table(count)
    table.liar, honest = table.others[0], table.lead if victim == "the lead" else table.others[1]
    table.lies = Lies(withholds=frozenset({honest}), accuses=always(honest) if accuses else always())
    table.run()
    assert table.evicted == {table.liar}
    assert gone_s(table, table.liar) < WITHHOLDER_GONE_S
    for peer, left_out in zip(table.honest, table.left_out(), strict=True):
        # Of a lead's own dispute the others know nothing but its word.
        assert left_out == {table.liar} or (accuses and honest == table.lead != peer)


@pytest.mark.parametrize("count", [4, 7])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("late_s", [0.0, 3.0])
def test_victim_of_a_lead_that_lies_stays_under_the_next(count: int, direct: bool, late_s: float) -> None:
    """All that the liar tried in its own view says nothing. late_s: by how much the victim is slower to accuse."""
    table = Table(count)
    table.liar, victim = table.lead, table.others[-1]
    table.lies = Lies(withholds=frozenset({victim}))
    if direct:
        table.lies.accuses = always(victim)
    else:
        table.lies.late = always(victim)
    table.late_s = {victim: late_s}
    table.run()
    assert table.evicted == {table.liar}
    assert table.decided is not None
    assert set(table.decided.members) == set(table.honest)
    assert all(some <= {table.liar} for some in table.left_out())


@pytest.mark.parametrize("seed", [0, 1, 2, 9, 23, 45])
def test_lead_that_lies_is_left_by_all_though_its_plan_comes_before_the_words_on_which_it_was_made(seed: int) -> None:
    """Else one alone leaves its view: with the liar the others are a quorum, and wait until their time is over."""
    table = Table(4, delay_s=WORD_S, seed=seed)
    table.liar, victim = table.lead, table.others[seed % 3]
    lies_until = table.began + LIES_FOR_S
    table.lies = Lies(withholds=frozenset({victim}), accuses=lambda now, plan: {victim} if now < lies_until else NOBODY)
    assert table.run() < WITHHOLDER_GONE_S + MOMENT_S
    assert table.evicted == {table.liar}
    assert all(some <= {table.liar} for some in table.left_out())


@pytest.mark.parametrize("count", [3, 4, 7])
@pytest.mark.parametrize("late_s", [4.0, 6.0])
def test_silence_of_relays_that_run_late_is_held_against_nobody(count: int, late_s: float) -> None:
    table = Table(count)
    table.liar, victim = table.others[0], table.others[1]
    table.lies = Lies(withholds=frozenset({victim}))
    table.late_s = {peer: late_s for peer in table.honest if peer != victim}
    table.run()
    assert table.evicted == {table.liar}


def lead_through_itself(monkeypatch: pytest.MonkeyPatch, pairs_of: Callable[[list[PeerId]], list[Pair]]) -> None:
    """Have the first lead plan these of the pairs of others through itself, whatever was tried."""
    liar, around = list[PeerId](), RelayChoice.around

    def lying(
        self: RelayChoice, plan: Plan, pairs: Collection[Pair], alive: Collection[PeerId]
    ) -> tuple[tuple[Relay, ...], set[Pair]]:
        liar[:] = liar or [self._me]
        if self._me not in liar:
            return around(self, plan, pairs, alive)
        peers = [p.peer for p in plan.participants]
        return pack_relays(peers, dict.fromkeys(pairs_of([p for p in peers if p not in liar]), self._me)), set()

    monkeypatch.setattr(RelayChoice, "around", lying)


@pytest.mark.parametrize("count", [4, 5, 7])
def test_whom_a_lead_that_fell_silent_led_through_itself_stays(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It drops what it should pass on. The next lead plans by its own relays alone."""
    lead_through_itself(monkeypatch, lambda honest: [pair_of(honest[0], other) for other in honest[1:]])
    table = Table(count)
    table.liar = table.lead
    table.lies = Lies(drops=True, claims=lambda ways: [])
    monkeypatch.setattr(table.seats[table.liar].machine._lead, "next_order", lambda now, view_since: None)
    table.run(600)
    assert table.evicted_in_honesty <= {table.liar}
    assert table.decided is not None
    assert set(table.decided.members) >= set(table.honest)
    assert all(some <= {table.liar} for some in table.left_out())


@pytest.mark.parametrize("count", [3, 4])
def test_who_keeps_its_finals_from_one_is_no_matter(count: int) -> None:
    """They are had from others."""
    table = Table(count)
    table.liar = table.others[0]
    table.lies = Lies(keeps=frozenset({table.others[1]}))
    assert table.run() < 2 * MOMENT_S
    assert table.evicted == set()


class _PlansAgain:
    """A lead that does nothing but plan the same again.

    every_s: after so long; left out, longer each time. in_time: before anybody misses anything under the last plan.
    """

    eviction = None

    def __init__(self, machine: RoundMachine, every_s: float | None = None, *, in_time: bool = False) -> None:
        self._machine = machine
        self._period_s = every_s or 0.55 * SETTINGS.reduce_deadline_s
        self._times, self._in_time = 1 if every_s else 2, in_time

    def adopted(self, plan: Plan) -> None: ...

    def next_order(self, now: float, *, view_since: float) -> Plan | None:
        plan = self._machine.plan
        assert plan is not None
        period_s = min(self._period_s, stall_deadline_s(plan) - 2 * STEP_S if self._in_time else math.inf)
        if plan.view or now - self._machine._facts.planned_at < period_s:
            return None
        self._period_s *= self._times
        order = PlanOrder(view=0, attempt=plan.attempt + 1, planner=plan.planner, evicted=plan.evicted)
        return reroute_plan(plan, order, plan.relays)


def table_of_withholder(count: int, liar: str) -> Table:
    """Of `count` one has all finals, and gives nobody its own."""
    table = Table(count)
    table.liar = table.others[0] if liar == "a member" else table.lead
    table.lies = Lies(keeps=frozenset(table.honest))
    if liar == "a lead that plans again and again":
        machine = table.seats[table.liar].machine
        machine._lead = _PlansAgain(machine)  # type: ignore[assignment]
    return table


LIARS = ["a member", "the lead", "a lead that plans again and again"]


@pytest.mark.parametrize("count", [3, 4, 7])
@pytest.mark.parametrize("liar", LIARS)
def test_owner_that_says_it_waits_and_gives_nobody_its_finals_has_its_time_and_no_more(count: int, liar: str) -> None:
    table = table_of_withholder(count, liar)
    assert table.liar is not None
    table.lies.late = always(table.liar)
    plans_again_s = 6 * STALL_S + 2 * LATE_S if liar != LIARS[0] else 0.0
    assert table.run(900) < STALL_S + LATE_S + EXCUSED_S + plans_again_s + 2 * MOMENT_S
    assert table.evicted == {table.liar}


@pytest.mark.parametrize("count", [3, 4, 7])
@pytest.mark.parametrize("liar", LIARS[:2])
def test_who_sends_a_byte_at_a_time_is_accused_at_the_deadline(count: int, liar: str) -> None:
    """It moves, and so it never stalls; of who lacks most others' contributions nobody is accused for that."""
    table = Table(count)
    table.liar = table.others[0] if liar == LIARS[0] else table.lead
    table.lies = Lies(trickles=True)
    assert table.run(3000) < SETTINGS.reduce_deadline_s + OVERDUE_SETTLE_S
    assert table.evicted == {table.liar}


@pytest.mark.parametrize("count", [4, 7])
@pytest.mark.parametrize("victim", ["the lead", "a member"])
@pytest.mark.parametrize("slow_s", [20.0, 28.0])
def test_owner_to_which_one_sends_slowly_keeps_its_place(count: int, victim: str, slow_s: float) -> None:
    table = Table(count)
    sender, honest = table.others[0], table.lead if victim == "the lead" else table.others[1]
    table.takes_s = {(sender, honest): slow_s}
    assert table.run() < slow_s + MOMENT_S
    assert table.evicted == set()


@pytest.mark.parametrize("count", [4, 7])
@pytest.mark.parametrize("victim", ["the lead", "a member"])
def test_owner_to_which_one_trickles_to_the_end_holds_nobody_up_for_longer_and_is_planned_again(
    count: int, victim: str
) -> None:
    """Nobody else can tell what is slow about it."""
    table = Table(count)
    table.liar, honest = table.others[0], table.lead if victim == "the lead" else table.others[1]
    table.takes_s = {(table.liar, honest): 1e9}
    assert table.run(600) < STALL_S + LATE_S + EXCUSED_S + 4 * STALL_S + MOMENT_S
    assert all(some <= {table.liar} for some in table.left_out())


@pytest.mark.parametrize("count", [4, 5, 7])
@pytest.mark.parametrize("relay", ["the lead", "a member"])
def test_relay_that_is_sent_nothing_by_whom_it_relays_keeps_its_place(count: int, relay: str) -> None:
    """The liar accuses all but one, which is led through that one then, to whom it sends nothing any more."""
    table = Table(count, move_s=SLOW_S)
    table.liar, honest = table.others[0], table.lead if relay == "the lead" else table.others[-1]
    others = frozenset(table.honest) - {honest}

    def accused(now: float, plan: Plan) -> Collection[PeerId]:
        if plan.relays:
            table.lies.withholds = frozenset({honest})
        return () if plan.relays else others

    table.lies = Lies(accuses=accused)
    assert table.run() < 2 * SLOW_S
    assert table.evicted == {table.liar}
    assert all(some <= {table.liar} for some in table.left_out())


@pytest.mark.parametrize("count", [4, 7])
def test_who_accuses_now_and_then_while_all_is_slow_keeps_its_place(count: int) -> None:
    """An accuser on and off, as one is to which things come in bursts."""
    table = Table(count, move_s=VERY_SLOW_S / 2)
    flaps, accused = table.others[:2]
    table.liar = flaps
    table.lies = Lies(accuses=lambda now, plan: {accused} if now % 5 < 2.6 else ())
    table.run()
    assert table.evicted == set()


@pytest.mark.parametrize("count", [4, 7])
def test_member_cut_from_one_which_another_accuses_keeps_its_place(count: int) -> None:
    """It names both, and both name it: two voices, of which each may be that of a broken link, or of a liar."""
    table = Table(count)
    victim, cut, liar, *_ = table.others
    table.liar, table.cut = liar, {pair_of(victim, cut)}
    table.lies = Lies(accuses=always(victim), withholds=frozenset({victim}))
    table.run()
    assert victim not in table.evicted
    assert cut not in table.evicted


@pytest.mark.parametrize("count", [4, 7])
@pytest.mark.parametrize("withholds", [False, True])
@pytest.mark.parametrize("every_s", [12.0, 14.2, 15.2])
def test_lead_that_plans_again_after_all_have_reported_has_no_more_time_for_it(
    count: int, withholds: bool, every_s: float
) -> None:
    """Or, where it withholds what it owes, before anybody misses it: twice the time of one plan, and no more."""
    table = Table(count)
    table.liar = table.lead
    machine = table.seats[table.liar].machine
    machine._lead = _PlansAgain(machine, every_s, in_time=withholds)  # type: ignore[assignment]
    table.lies = Lies(withholds=frozenset(table.honest if withholds else ()))
    twice_s = 2 * SETTINGS.reduce_deadline_s + OVERDUE_SETTLE_S + PLAN_TIMEOUT_S
    assert table.run(900) < (twice_s + WITHHOLDER_GONE_S if withholds else PROPOSE_TIMEOUT_S + MOMENT_S)


@pytest.mark.parametrize("liar", LIARS)
@pytest.mark.parametrize("accused", ["itself", "nobody there is"])
def test_word_about_nobody_else_in_the_plan_keeps_no_other_from_being_heard(liar: str, accused: str) -> None:
    table = table_of_withholder(5, liar)
    assert table.liar is not None
    table.lies.accuses = always(table.liar if accused == "itself" else NOBODY_HERE)
    assert table.run(900) < STALL_S + LATE_S + MOMENT_S
    assert table.evicted == {table.liar}


@pytest.mark.parametrize("count", [4, 7])
@pytest.mark.parametrize("liar", LIARS)
@pytest.mark.parametrize("every_s", [0.4, 2.8])
@pytest.mark.parametrize("breaks", [False, True])
def test_who_accuses_one_after_the_other_keeps_no_other_word_from_being_heard_for_long(
    count: int, liar: str, every_s: float, breaks: bool
) -> None:
    """It gives nobody its finals, and names another of them before any dispute has stood for long."""
    table = table_of_withholder(count, liar)
    honest = table.honest

    def accused(now: float, plan: Plan) -> Collection[PeerId]:
        turn, at = divmod(now, every_s)
        return NOBODY if breaks and at < 0.2 else {honest[int(turn) % len(honest)]}

    table.lies.accuses = accused
    in_own_view_s = SETTLED_S + MOMENT_S if liar == LIARS[2] else 0.0
    assert table.run(4000) < in_own_view_s + FALSE_ACCUSER_GONE_S
    assert table.evicted <= {table.liar}


# -- links that are cut, relays that lie ---------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 4, 7])
@pytest.mark.parametrize("lead_is_one", [False, True])
def test_pair_that_cannot_reach_each_other_loses_neither(count: int, lead_is_one: bool) -> None:
    table = Table(count)
    pair = pair_of(table.lead if lead_is_one else table.others[0], table.others[1])
    table.cut = {pair}
    took_s = table.run()
    assert table.evicted == set()
    assert table.decided is not None
    assert set(table.decided.members) == set(table.seats)
    assert not any(table.left_out())
    assert took_s < STALL_S + RELAY_SETTLE_S + 2 * MOMENT_S


@pytest.mark.parametrize("delay_s", [0.0, WORD_S])
@pytest.mark.parametrize("lead_is_one", [False, True])
@pytest.mark.parametrize(("count", "cuts"), [(8, 3), (9, 3), (16, 3), (16, 7)])
def test_member_that_does_not_reach_some_of_many_keeps_its_place(
    count: int, cuts: int, lead_is_one: bool, delay_s: float
) -> None:
    """As behind a router in a first round: fewer than half miss it, and it them. Its word may be the last to come."""
    table = Table(count, delay_s=delay_s, seed=1)
    one = table.lead if lead_is_one else table.others[0]
    missed = [peer for peer in table.others if peer != one][:cuts]
    table.cut = {pair_of(one, other) for other in missed}
    took_s = table.run()
    assert table.evicted == set()
    assert table.decided is not None
    assert set(table.decided.members) == set(table.seats)
    assert not any(table.left_out())
    assert took_s < STALL_S + RELAY_SETTLE_S + 2 * MOMENT_S


def test_members_that_reach_none_of_each_other_keep_their_places() -> None:
    table = Table(16)
    table.cut = {pair_of(one, other) for one in table.others[:6] for other in table.others[:6] if one != other}
    assert table.run() < STALL_S + RELAY_SETTLE_S + 2 * MOMENT_S
    assert table.evicted == set()


@pytest.mark.parametrize("accuses", [False, True])
@pytest.mark.parametrize("leads", [False, True])
def test_who_keeps_its_contribution_from_some_of_many_goes(leads: bool, accuses: bool) -> None:
    table = Table(16, delay_s=WORD_S)
    table.liar = table.lead if leads else table.others[0]
    victims = frozenset([peer for peer in table.others if peer != table.liar][:3])
    table.lies = Lies(withholds=victims, accuses=always(*victims) if accuses else always())
    took_s = table.run()
    assert table.evicted_in_honesty <= {table.liar}
    assert table.decided is not None
    assert set(table.decided.members) >= set(table.honest)
    assert took_s < 2 * WITHHOLDER_GONE_S


def claims_of(table: Table, came: bool, taken: bool) -> Callable[[list[RelayedWay]], list[RelayedWay]]:
    """What the liar says of all ways that it is to pass."""

    def claims(honest: list[RelayedWay]) -> list[RelayedWay]:
        assert table.liar is not None
        plan = table.seats[table.liar].plan
        places = {p.peer: place for place, p in enumerate(plan.participants)}
        pairs = [pair for pair, via in plan.relayed.items() if via == table.liar]
        ways = [way for one, other in pairs for way in ((one, other), (other, one))]
        return [RelayedWay(places[one], places[other], came, taken, came and taken) for one, other in ways]

    return claims


@pytest.mark.parametrize("count", [4, 7])
@pytest.mark.parametrize("claim", [None, (True, True), (False, True), (True, False)])
@pytest.mark.parametrize("accuses", [False, True])
def test_relay_that_lies_takes_neither_of_a_pair_while_another_works(
    count: int, claim: tuple[bool, bool] | None, accuses: bool
) -> None:
    """It passes nothing on, says of it what it likes, and accuses one of the two itself."""
    table = Table(count)
    one, other = table.lead, max(table.others)
    table.liar = min(peer for peer in table.seats if peer not in (one, other))  # the first that is tried
    table.cut = {pair_of(one, other)}
    table.lies = Lies(
        drops=True,
        claims=(lambda ways: []) if claim is None else claims_of(table, *claim),
        accuses=lambda now, plan: {other} if accuses and plan.relays else NOBODY,
    )
    table.run()
    assert table.evicted <= {table.liar}
    assert table.decided is not None
    assert set(table.decided.members) >= {one, other}


@pytest.mark.parametrize("claim", [None, (True, True), (False, True), (True, False)])
def test_of_three_a_pair_that_only_the_third_joins_loses_one_if_the_third_lies(
    claim: tuple[bool, bool] | None,
) -> None:
    """Two that do not reach each other are no quorum without it; the round goes on."""
    table = Table(3)
    one, table.liar, other = table.lead, *table.others
    table.cut = {pair_of(one, other)}
    table.lies = Lies(drops=True, claims=(lambda ways: []) if claim is None else claims_of(table, *claim))
    took_s = table.run()
    assert len(table.evicted & {one, other}) == 1
    assert table.decided is not None
    assert took_s < 20.0


def test_broken_link_and_a_false_accuser_of_one_of_its_ends_evict_nobody_honest() -> None:
    """The word of two that accuse each other is not added to that of a third."""
    table = Table(5, move_s=SLOW_S)
    one, table.liar, other = table.others[0], table.others[1], table.others[2]
    table.cut = {pair_of(one, other)}
    table.lies = Lies(accuses=always(other))
    table.run()
    assert table.evicted == {table.liar}


# -- slow, and anything --------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 4, 7])
@pytest.mark.parametrize("move_s", [SLOW_S, VERY_SLOW_S])
def test_slow_reduction_costs_nobody_its_place(count: int, move_s: float) -> None:
    table = Table(count, move_s=move_s)
    table.run()
    assert table.evicted == set()
    assert table.decided is not None


def lies_at_random(rng: random.Random, table: Table) -> Lies:
    """Accusations and claims that change as they like, and things kept from some."""
    assert table.liar is not None
    others, period_s = [*table.honest, table.liar, NOBODY_HERE], rng.choice([1.0, 3.5, 10.0, 1000.0])
    known: dict[object, set[PeerId] | tuple[bool, bool, bool]] = {}

    def at_random(what: str, share: float) -> Callable[[float, Plan], Collection[PeerId]]:
        def accused(now: float, plan: Plan) -> Collection[PeerId]:
            key = what, plan.hash, int(now / period_s)
            if key not in known:
                known[key] = {peer for peer in others if rng.random() < share}
            return known[key]  # type: ignore[return-value]

        return accused

    def some(share: float) -> frozenset[PeerId]:
        return frozenset(peer for peer in others if rng.random() < share)

    return Lies(
        accuses=at_random("accuses", rng.choice([0.0, 0.2, 0.5, 1.0])),
        late=at_random("late", rng.choice([0.0, 0.3])),
        withholds=some(rng.choice([0.0, 0.3, 0.6])),
        keeps=some(rng.choice([0.0, 0.3])),
        drops=rng.random() < 0.5,
        claims=rng.choice([lambda ways: ways, claims_of(table, rng.random() < 0.5, rng.random() < 0.5)]),
    )


@pytest.mark.parametrize("seed", range(16))
def test_one_liar_that_does_anything_evicts_nobody_honest_and_stalls_nothing(seed: int) -> None:
    rng = random.Random(seed)
    table = Table(rng.choice([3, 4, 5, 7]), move_s=rng.choice([0.3, 5.0, 25.0]))
    table.liar = rng.choice(table.others)
    table.lies = lies_at_random(rng, table)
    took_s = table.run()
    assert table.evicted <= {table.liar}
    assert all(some <= {table.liar} for some in table.left_out())
    assert table.decided is not None
    assert took_s < 2 * table.move_s + WITHHOLDER_GONE_S + 2 * table.move_s


@pytest.mark.parametrize("seed", range(16))
def test_lead_that_does_anything_has_no_other_lead_evict_somebody_honest(seed: int) -> None:
    """What it does in its own view is up to it; the others run late by this or that much."""
    rng = random.Random(seed)
    table = Table(rng.choice([3, 4, 5, 7]), move_s=rng.choice([0.3, 5.0, 25.0]))
    table.liar = table.lead
    table.lies = lies_at_random(rng, table)
    table.late_s = {peer: rng.choice([0.0, 0.0, 1.0, 3.0, 6.0]) for peer in table.honest}
    table.run(600)
    assert table.evicted_in_honesty <= {table.liar}
    assert table.decided is not None
