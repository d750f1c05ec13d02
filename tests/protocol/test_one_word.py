"""What one member says stops nobody, holds nobody up for long, and fills no table: in the machines of a round."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import pytest

from shoal.lab.signed import change_of, moves_of, propose_of, signed_report
from shoal.protocol.agreement import Broadcast
from shoal.protocol.certificate import genesis
from shoal.protocol.effects import CloseOff, Effect, Repair, StartReduce
from shoal.protocol.errors import RemoteError
from shoal.protocol.facts import Gathering
from shoal.protocol.leading import TRY_AGAIN_S
from shoal.protocol.messages import (
    MEMBER_LIMIT,
    ChunkResults,
    Evict,
    Held,
    Message,
    Participant,
    Plan,
    Prepare,
    Propose,
    Relayed,
    RelayedWay,
    Report,
    Stalled,
    Target,
    ViewChange,
    domain_hash,
)
from shoal.protocol.planning import OBSERVER, TRAINING, absent_ready, check_plan
from shoal.protocol.round import LINEAGES_LIMIT, RoundMachine
from shoal.protocol.seats import Seating
from shoal.protocol.terms import make_consent
from shoal.protocol.timeouts import (
    DOUBLINGS_LIMIT,
    HELD_TIMEOUT_S,
    OVERDUE_SETTLE_S,
    PLAN_TIMEOUT_S,
    PROPOSE_TIMEOUT_S,
    doubled,
)
from tests.protocol.lab import SWARM, PaperIdentity, paper_identities
from tests.protocol.round_lab import RoundLab
from tests.protocol.round_machines import contribution, machines_of, planned, sends
from tests.protocol.round_node import SETTINGS, report_on
from tests.round_messages import ready_with, value_with

pytestmark = pytest.mark.usefixtures("paper_signatures")


def broadcast(effects: Sequence[Effect], kind: type[Message]) -> list[Message]:
    return [e.message for e in effects if isinstance(e, Broadcast) and isinstance(e.message, kind)]


def identity_of(lab: RoundLab, machine: RoundMachine) -> PaperIdentity:
    return next(node.identity for node in lab.nodes if node.peer == machine.me)


# -- plans ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", [TRAINING, OBSERVER])
def test_plan_that_counts_on_a_contribution_that_was_not_made_is_not_followed(role: str) -> None:
    """Its reduction would end the node: it has nothing to send."""
    _, machines, leader, plan = planned(4)
    lead = machines[leader]
    _, machines = machines_of(4)
    victim = next(machine for machine in machines if machine.me != lead.me)
    victim.ready(absent_ready(role, victim.previous, victim.previous.digest), 1.0)
    victim.peers_alive([machine.me for machine in machines], 1.0)
    rest = tuple(p for p in plan.participants if p.peer != victim.me)
    sound = msgspec.structs.replace(plan, participants=tuple(sorted([*rest, Participant(victim.me, 0, 0, bytes(32),
        life=victim.life)], key=lambda p: p.peer)))  # fmt: skip
    counted = tuple(
        msgspec.structs.replace(p, weight=1, tokens=10, root=bytes(32)) if p.peer == victim.me else p
        for p in sound.participants
    )
    with pytest.raises(RemoteError, match="did not announce"):
        victim.receive(lead.me, msgspec.structs.replace(sound, participants=counted), 1.1)
    assert StartReduce(sound) in victim.receive(lead.me, sound, 1.1)


def test_finals_of_owners_that_there_are_not_do_not_stand() -> None:
    """The plan that a lead made of them was none, and ended its own node."""
    _, machines, leader, plan = planned(5)
    lead = machines[leader]
    dead, liar, *honest = (machine for machine in machines if machine is not lead)
    effects = [*lead.peers_alive([m.me for m in machines if m is not dead], 2.0), *lead.tick(3.0)]
    evict = broadcast(effects, Evict)[0]
    assert isinstance(evict, Evict)
    (asked, *_) = (effect for effect in effects if isinstance(effect, CloseOff))
    effects = lead.closed_off(asked, (), 3.0)
    invented = ChunkResults.of(63, {chunk: domain_hash("invented") for chunk in range(plan.chunks)})
    for machine in (liar, *honest):
        held = Held(
            term=plan.term,
            round=plan.round,
            base=plan.base,
            lineage=plan.lineage,
            evicted=evict.evicted,
            chunks=(invented,) if machine is liar else (),
        )
        effects += lead.receive(machine.me, held, 3.1)
    (repair,) = (effect for effect in effects if isinstance(effect, Repair))
    check_plan(repair.plan, lead.me, lead.previous, SETTINGS)


@pytest.mark.parametrize("evicts", [False, True])
@pytest.mark.parametrize(
    ("view", "counted", "signs"), [(0, 1, False), (0, 2, True), (0, 3, True), (1, 1, False), (2, 1, True)]
)
@pytest.mark.parametrize("ready", [False, True])
def test_what_came_of_a_plan_that_counts_less_than_half_of_those_who_train_is_not_signed(
    view: int, counted: int, signs: bool, evicts: bool, ready: bool
) -> None:
    """A lead would have its own contribution certified in the place of everybody's, with nothing to clip it by.

    Beyond the views that a minority of four can lead, and one, it is signed: no honest lead may hear enough.
    """
    lab, machines, _, plan = planned(4)
    lead = machines[lab.lead(view)]
    number = next(n for n, machine in enumerate(machines) if machine.me not in (lead.me, machines[lab.lead(0)].me))
    member = machines[number] if ready else machines_of(4)[1][number]
    others = [machine.me for machine in machines if machine.me not in (lead.me, member.me)]
    member.peers_alive([one.me for one in machines], 1.1)
    left = {lead.me, *others[: counted - 1]}
    gone = tuple(sorted(set(others) - left)) if evicts else ()
    moves = moves_of([node.identity for node in lab.nodes], member.previous, view) if view else msgspec.UNSET
    alone = msgspec.structs.replace(
        plan,
        planner=lead.me,
        view=view,
        attempt=1,
        moves=moves,
        evicted=gone,
        participants=tuple(
            p if p.peer in {*left, *gone} else msgspec.structs.replace(p, weight=0, tokens=0, root=bytes(32))
            for p in plan.participants
        ),
    )
    member.weigh(alone)
    report = report_on(alone)
    member.reduced(report, 1.3, participants=[machine.me for machine in machines])
    value = value_with(member.previous, report, lead.me, (machine.me for machine in machines))
    effects = member.receive(lead.me, propose_of(identity_of(lab, lead), view, value, moves), 1.4)
    assert bool(broadcast(effects, Prepare)) == signs
    for _ in range(view + 1):
        effects += member.tick(1.5)
    assert (member.agreement.view > view) != signs, "it goes on to the next lead at once"


@pytest.mark.parametrize("every_s", [1.0, 4.0, 10.0])
@pytest.mark.parametrize("reports", [False, True])
def test_lead_that_plans_again_and_again_keeps_its_view_no_longer_than_two_plans_do(
    every_s: float, reports: bool
) -> None:
    lab, machines, leader, plan = planned(4)
    lead, member = machines[leader], machines[(leader + 1) % 4]
    now, attempt, due = 2.0, 0, 2.0
    member.peers_alive([machine.me for machine in machines], now)
    limit_s = 2 * SETTINGS.reduce_deadline_s + OVERDUE_SETTLE_S + PLAN_TIMEOUT_S + PROPOSE_TIMEOUT_S + every_s
    while member.agreement.view == 0:
        now += 0.5
        assert now < limit_s + 2.0
        if now >= due:
            attempt, due = attempt + 1, now + every_s
            member.receive(lead.me, msgspec.structs.replace(plan, attempt=attempt, origin=plan.hash), now)
            if reports and member.plan is not None:
                result = domain_hash("result")
                member.reduced(report_of(member.plan, result), now)
        member.tick(now)
    del lab


def test_lead_that_plans_again_at_each_deadline_comes_to_an_end() -> None:
    """Each plan has its time, and nobody accuses a lead that has all exchanged through itself and drops it."""
    _, machines, leader, plan = planned(4)
    lead, member = machines[leader], machines[(leader + 1) % 4]
    member.peers_alive([machine.me for machine in machines], 2.0)
    now, attempt = 2.0, 0
    due = now + SETTINGS.reduce_deadline_s
    while member.agreement.view == 0:
        now += 5.0
        assert now < SETTINGS.reduce_deadline_s * 2 ** (DOUBLINGS_LIMIT + 2)
        if now >= due:
            attempt += 1
            member.receive(lead.me, msgspec.structs.replace(plan, attempt=attempt, origin=plan.hash), now)
            due = now + doubled(SETTINGS.reduce_deadline_s, attempt)
        member.tick(now)
    assert attempt > DOUBLINGS_LIMIT


def report_of(plan: Plan, result: bytes) -> Report:
    return Report(
        term=plan.term, round=plan.round, base=plan.base, plan=plan.hash, digest=result, bitmaps=result, tokens=40
    )


def test_plan_that_had_its_time_is_followed_by_one_that_has_twice_as_much() -> None:
    _, machines, leader, plan = planned(4)
    lead, member = machines[leader], machines[(leader + 1) % 4]
    member.peers_alive([machine.me for machine in machines], 2.0)
    deadline_s = SETTINGS.reduce_deadline_s
    member.receive(lead.me, msgspec.structs.replace(plan, attempt=1, origin=plan.hash), 1.1 + deadline_s)
    member.tick(1.1 + deadline_s + 2 * deadline_s + OVERDUE_SETTLE_S + PLAN_TIMEOUT_S - 0.5)
    assert member.agreement.view == 0
    member.tick(1.1 + deadline_s + 2 * deadline_s + OVERDUE_SETTLE_S + PLAN_TIMEOUT_S + 0.5)
    assert member.agreement.view > 0


@pytest.mark.parametrize("died", [True, False])
def test_plan_without_one_who_died_has_its_whole_time_if_the_one_before_had_half_of_it(died: bool) -> None:
    """Else a death in the second half of a reduction leaves the others too little; only the dead may so lengthen it."""
    _, machines, leader, plan = planned(4)
    lead, member, gone = machines[leader], machines[(leader + 1) % 4], machines[(leader + 2) % 4]
    begun, deadline_s = 1.1, SETTINGS.reduce_deadline_s
    member.peers_alive([machine.me for machine in machines if machine is not gone or not died], begun + 1.0)
    repaired_at = begun + 0.6 * deadline_s
    its, other = ([p.peer for p in plan.participants].index(peer) for peer in (gone.me, member.me))
    owners = tuple(
        msgspec.structs.replace(owned, owner=other) if owned.owner == its else owned for owned in plan.owners
    )
    later = msgspec.structs.replace(plan, attempt=1, origin=plan.hash, evicted=(gone.me,), owners=owners)
    assert any(isinstance(e, Repair) for e in member.receive(lead.me, later, repaired_at))
    patience_s = 2 * deadline_s + OVERDUE_SETTLE_S + PLAN_TIMEOUT_S
    member.tick(begun + patience_s - 0.5)
    assert member.agreement.view == 0
    member.tick(begun + patience_s + 0.5)
    assert (member.agreement.view == 0) == died
    member.tick(repaired_at + patience_s + 0.5)
    assert member.agreement.view > 0


def test_lead_begins_only_so_many_reductions_in_a_view() -> None:
    """Each keeps what its owners signed."""
    _, machines, leader, plan = planned(4)
    lead, member = machines[leader], machines[(leader + 1) % 4]
    for attempt in range(1, LINEAGES_LIMIT):
        anew = msgspec.structs.replace(plan, attempt=attempt)
        assert StartReduce(anew) in member.receive(lead.me, anew, 2.0)
    with pytest.raises(RemoteError, match="one reduction after the other"):
        member.receive(lead.me, msgspec.structs.replace(plan, attempt=LINEAGES_LIMIT), 2.0)
    last = member.plan
    assert last is not None
    revised = msgspec.structs.replace(last, attempt=LINEAGES_LIMIT + 1, origin=last.hash)
    assert any(isinstance(effect, Repair) for effect in member.receive(lead.me, revised, 2.0))


def test_lead_that_has_begun_all_that_it_may_gives_up_its_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would follow the next: the others would stay with the last, and it would go on alone."""
    _, machines, leader, plan = planned(4)
    machine, attempts = machines[leader], itertools.count(1)
    monkeypatch.setattr(
        machine._lead, "next_order", lambda *_, **__: msgspec.structs.replace(plan, attempt=next(attempts))
    )
    for attempt in range(1, LINEAGES_LIMIT):
        effects = machine.tick(2.0 + attempt / 10)
        assert [e.plan.attempt for e in effects if isinstance(e, StartReduce)] == [attempt]
        assert not any(sends(effect, ViewChange) for effect in effects)
    followed = machine.plan
    effects = machine.tick(3.0)
    assert any(sends(effect, ViewChange) for effect in effects)
    assert machine.plan == followed
    assert not any(sends(effect, Plan) for effect in effects)


@pytest.mark.parametrize("ahead", [0, 1])
def test_lead_gives_up_its_view_where_only_those_in_a_later_one_make_up_for_who_is_lost(ahead: int) -> None:
    """Else it would try the lost again and again, while one that lives waits for the others elsewhere."""
    _, machines, leader, plan = planned(5)
    machine, others = machines[leader], [m for m in machines if m is not machines[leader]]
    for one in others[:ahead]:
        moved = one.agreement.move_to(1)
        (change,) = (e.message for e in moved if sends(e, ViewChange))  # type: ignore[union-attr]
        machine.receive(one.me, change, 1.5)
    lost = frozenset(one.me for one in others[ahead:3])
    again = machine._lead._begin_another(plan, lost, 2.0)
    assert again is not None, "they are tried once more: they may have been started again"
    assert set(again.remaining) == set(plan.remaining) - {one.me for one in others[:ahead]}
    another = machine._lead._begin_another(again, lost, 2.0 + TRY_AGAIN_S)
    assert (another is None) == bool(ahead)
    assert machine._facts.gave_up == (0 if ahead else None)
    assert any(sends(effect, ViewChange) for effect in machine.tick(4.0)) == bool(ahead)


def test_lead_that_lost_too_many_to_go_on_tries_the_same_again_more_and_more_rarely() -> None:
    """Else all the reductions of a view are begun within seconds, and none is left for when others are back."""
    _, machines, leader, plan = planned(4)
    machine = machines[leader]
    lost = frozenset(peer for peer in plan.remaining if peer != machine.me)
    begun = []
    for tick in range(1, 600):
        now = 2.0 + tick / 10
        another = machine._lead._begin_another(machine.plan, lost, now)
        if another is not None:
            assert set(another.remaining) == set(plan.remaining)
            begun.append(now)
            machine._adopt(another, now)
    gaps = [after - before for before, after in itertools.pairwise(begun)]
    assert len(begun) < LINEAGES_LIMIT
    assert gaps == pytest.approx([TRY_AGAIN_S * 2**n for n in range(len(gaps))], abs=0.11)
    assert sum(gaps) > 30


# -- words ---------------------------------------------------------------------------------------------------


def test_reports_and_accusations_of_many_plans_keep_nobody_from_speaking_of_the_next() -> None:
    """A lead can have everybody report plan after plan; the next lead hears them all the same."""
    lab, machines, leader, plan = planned(4)
    lead, other = machines[leader], machines[(leader + 1) % 4]
    identity, result = identity_of(lab, other), domain_hash("result")
    for attempt in range(200):
        past = msgspec.structs.replace(plan, attempt=1 + attempt)
        lead.receive(other.me, signed_report(identity, report_of(past, result)), 2.0)
        lead.receive(other.me, accusation(past, lead.me), 2.0)
    lead.receive(other.me, signed_report(identity, report_of(plan, result)), 2.0)
    lead.receive(other.me, accusation(plan, lead.me), 2.0)
    assert other.me in lead.agreement.reports[plan.hash]
    assert len(lead.agreement.reports) <= 65
    assert other.me in lead._facts.accusations._said[plan.hash]
    assert len(lead._facts.accusations._said) <= 65


def accusation(plan: Plan, *accused: str) -> Stalled:
    return Stalled(term=plan.term, round=plan.round, base=plan.base, plan=plan.hash, peers=tuple(accused))  # type: ignore[arg-type]


def test_report_that_somebody_else_brings_takes_the_place_of_none() -> None:
    lab, machines, leader, plan = planned(4)
    lead, other = machines[leader], machines[(leader + 1) % 4]
    identity, liar = identity_of(lab, other), next(m for m in machines if m is not lead and m is not other)
    wrong, right = (signed_report(identity, report_of(plan, domain_hash(name))) for name in ("wrong", "right"))
    lead.receive(other.me, wrong, 2.0)
    lead.receive(other.me, right, 2.1)  # it healed
    (change,) = broadcast(liar.agreement.move_to(1), Message)  # type: ignore[arg-type]
    own = signed_report(identity_of(lab, liar), report_of(plan, domain_hash("wrong")))
    replayed = msgspec.structs.replace(change, report=own, left_out=(other.me,), left_out_signatures=(wrong.signature,))
    lead.receive(liar.me, replayed, 2.2)
    assert lead.agreement.reports[plan.hash][other.me] == right
    assert lead.agreement.reports[plan.hash][liar.me] == own


def test_words_of_who_takes_no_part_are_not_kept() -> None:
    _, machines, leader, plan = planned(4)
    lead = machines[leader]
    result = domain_hash("result")
    for number in range(300):
        stranger = PaperIdentity(f"S{number}")
        held = Held(term=plan.term, round=plan.round, base=plan.base, lineage=plan.hash, evicted=(), chunks=())
        for message in (signed_report(stranger, report_of(plan, result)), accusation(plan, lead.me), held):
            lead.receive(stranger.peer_id, message, 2.0)
    assert not lead._facts.held.keys() - {machine.me for machine in machines}
    assert plan.hash not in lead.agreement.reports
    assert plan.hash not in lead._facts.accusations._said
    joiner = PaperIdentity("J")
    ready = absent_ready("joiner", lead.previous, lead.previous.digest)
    lead.receive(joiner.peer_id, ready, 2.0)
    lead.receive(joiner.peer_id, signed_report(joiner, report_of(plan, result)), 2.0)
    assert joiner.peer_id in lead.agreement.reports[plan.hash]
    lead.receive(joiner.peer_id, accusation(plan, lead.me), 2.0)
    told = Relayed(
        term=plan.term, round=1, base=plan.base, plan=plan.hash, ways=(RelayedWay(0, 1, True, True, True),) * 4000
    )
    lead.receive(joiner.peer_id, told, 2.0)
    assert plan.hash not in lead._facts.accusations._said, "it has no part in the plan"
    assert plan.hash not in lead._facts.accusations._relayed


# -- going back ----------------------------------------------------------------------------------------------


def test_consent_to_go_back_to_nowhere_ends_no_lead() -> None:
    """Of two, the planner of the last round is a quorum; the other one leads, and has a state of that certificate."""
    lab, machines = machines_of(2)
    planner = machines[0].previous.planner
    for leader in machines:
        liar = next(machine for machine in machines if machine is not leader)
        if leader.agreement.lead(0) == leader.me and liar.me == planner:
            break
    else:
        pytest.skip("the planner of the last round leads")
    previous = leader.previous
    leader.peers_alive([machine.me for machine in machines], 1.0)
    leader.holds(Target(0, previous.hash), domain_hash("state"), 1.0)
    far = Target(10**6, previous.hash)
    effects = leader.receive(liar.me, make_consent(identity_of(lab, liar), previous, far, asked=True), 1.1)
    effects += leader.ready(contribution(leader), 1.2)
    assert not broadcast(effects, Propose)


def test_lead_that_evicts_again_and_again_is_answered_once_for_each_of_its_questions() -> None:
    """Each answer goes to everybody, and may be large."""
    _, machines, leader, plan = planned(4)
    lead, member = machines[leader], machines[(leader + 1) % 4]
    evict = Evict(
        term=plan.term,
        round=plan.round,
        base=plan.base,
        view=0,
        attempt=1,
        lineage=plan.hash,
        evicted=(machines[(leader + 2) % 4].me,),
    )
    asked = [effect for _ in range(10) for effect in member.receive(lead.me, evict, 2.0)]
    assert [effect for effect in asked if isinstance(effect, CloseOff)] == [
        CloseOff(plan.hash, frozenset(evict.evicted))
    ]
    for attempt in range(2, MEMBER_LIMIT + 1):
        member.receive(lead.me, msgspec.structs.replace(evict, attempt=attempt), 2.0)
    with pytest.raises(RemoteError, match="again and again"):
        member.receive(lead.me, msgspec.structs.replace(evict, attempt=MEMBER_LIMIT + 1), 2.0)


def test_revision_of_a_plan_that_was_not_seen_is_not_followed() -> None:
    """Sums are signed by the hash of that plan: with other weights in it each would be the proof of a lie."""
    _, machines, leader, plan = planned(4)
    _, fresh = machines_of(4)
    member = fresh[(leader + 1) % 4]
    member.peers_alive([machine.me for machine in machines], 1.0)
    place = plan.number(member.me)
    assert place is not None
    life = plan.participants[place].life
    member.ready(msgspec.structs.replace(contribution(member), life=life), 1.0)
    member.life = life
    lead = plan.planner
    revised = msgspec.structs.replace(plan, attempt=1, origin=plan.hash)
    weights = tuple(
        msgspec.structs.replace(p, weight=2 if p.peer == lead else 1, tokens=20 if p.peer == lead else 10)
        for p in plan.participants
    )
    other = msgspec.structs.replace(revised, participants=weights)
    for one in (revised, other):
        effects = member.receive(lead, one, 1.1)
        assert not any(isinstance(effect, StartReduce | Repair) for effect in effects)
    assert StartReduce(plan) in member.receive(lead, plan, 1.2)
    with pytest.raises(RemoteError, match="other participants"):
        member.receive(lead, other, 1.3)
    assert any(isinstance(effect, Repair) for effect in member.receive(lead, revised, 1.3))


def test_plan_that_came_too_late_to_be_followed_is_one_that_was_seen() -> None:
    _, machines, leader, plan = planned(4)
    _, fresh = machines_of(4)
    by_peer = {machine.me: machine for machine in fresh}
    second = machines[0].agreement.lead(1)
    member = next(by_peer[machine.me] for machine in machines if machine.me not in (plan.planner, second))
    place = plan.number(member.me)
    assert place is not None
    member.life = plan.participants[place].life
    member.ready(contribution(member), 1.0)
    member.agreement.move_to(1)
    assert member.receive(plan.planner, plan, 1.1) == []
    identities = [node.identity for node in RoundLab(4).nodes]
    moves = moves_of([one for one in identities if one.peer_id != plan.planner], member.previous, 1)
    revised = msgspec.structs.replace(plan, view=1, planner=second, origin=plan.hash, moves=moves)
    effects = member.receive(second, revised, 1.2)
    assert any(isinstance(effect, StartReduce) and effect.plan == revised for effect in effects)
    del leader


def test_lead_of_a_later_view_that_planned_has_the_time_of_a_reduction_also_from_who_cannot_follow_the_plan() -> None:
    """The member has seen the first plan, but not the one that the lead goes on with."""
    lab, machines, leader, plan = planned(4)
    second = machines[0].agreement.lead(1)
    member = next(machine for machine in machines if machine.me not in (plan.planner, second))
    alive = [machine.me for machine in machines if machine.me != plan.planner]
    member.peers_alive(alive, 2.0)
    assert member.agreement.view == 1
    for peer in alive:
        identity = next(node.identity for node in lab.nodes if node.peer == peer)
        member.receive(peer, change_of(identity, member.previous, 1), 2.0)
    timeout_s = 2 * (SETTINGS.grace_s + PLAN_TIMEOUT_S + HELD_TIMEOUT_S)
    member.tick(1.5 + timeout_s)
    assert member.agreement.view == 1
    moves = moves_of([node.identity for node in lab.nodes if node.peer in alive], member.previous, 1)
    unseen = msgspec.structs.replace(plan, view=1, planner=second, origin=domain_hash("unseen"), moves=moves)
    member.receive(second, unseen, 1.5 + timeout_s)
    assert member.plan == plan, "it does not follow it"
    member.tick(2.5 + timeout_s)
    assert member.agreement.view == 1
    member.tick(2.5 + 2 * (SETTINGS.reduce_deadline_s + OVERDUE_SETTLE_S + PLAN_TIMEOUT_S))
    assert member.agreement.view == 2
    del leader


def test_contributions_of_strangers_make_no_round_half_ready() -> None:
    """They weigh nothing; a few of them would have leads go on without members that are still training."""
    _, machines = machines_of(4)
    lead = next(machine for machine in machines if machine.agreement.lead(0) == machine.me)
    strangers = [PaperIdentity(f"S{number}") for number in range(8)]
    lead.peers_alive([*(machine.me for machine in machines), *(one.peer_id for one in strangers)], 1.0)
    for stranger in strangers:
        lead.receive(stranger.peer_id, contribution(lead, root=domain_hash(stranger.peer_id)), 1.0)
    for machine in machines:
        training = absent_ready(TRAINING, machine.previous, machine.previous.digest)
        if machine is lead:
            lead.ready(training, 1.1)
        else:
            lead.receive(machine.me, training, 1.1)
    first, second, *_ = (machine for machine in machines if machine is not lead)
    lead.receive(first.me, contribution(first), 1.2)
    assert broadcast(lead.tick(1.2 + 2 * SETTINGS.grace_s), Plan) == []
    lead.receive(second.me, contribution(second), 20.0)
    assert broadcast(lead.tick(20.0 + SETTINGS.grace_s), Plan) != []


@pytest.mark.parametrize("seats", [1, 2, 3])
@pytest.mark.parametrize("others", [1, 2, 3])
def test_those_whose_turn_it_is_and_that_train_for_ever_keep_no_round_from_being_half_ready(
    seats: int, others: int
) -> None:
    """The first `seats` of the line say that they train, and say so for ever."""
    peers = [identity.peer_id for identity in paper_identities(seats + others)]
    previous = genesis(SWARM, peers)
    seating = Seating(seats, tuple(peers))
    gathering = Gathering(members=peers, returners=(), state=previous.digest, seating=seating)
    for peer in peers[:seats]:
        gathering.take(peer, absent_ready(TRAINING, previous, previous.digest))
    for peer in peers[seats:]:
        gathering.take(peer, ready_with(previous, domain_hash(peer), state=previous.digest, tokens=5))
    gathering.note_half_ready(peers, (), 100.0)
    assert (gathering.half_ready_at == 100.0) == (others >= seats)
