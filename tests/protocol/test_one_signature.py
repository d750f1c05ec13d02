"""What one member signs takes nothing over: no certificate, no electorate, no view, and no value of its invention."""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec
import pytest

from shoal.lab.forgeries import with_stranger, without, without_others
from shoal.lab.signed import (
    certified,
    change_of,
    leave_of,
    moves_of,
    prepare_of,
    prepared_by,
    propose_of,
    signed_report,
    vote_of,
)
from shoal.protocol.agreement import Agreement, Broadcast, Decided, DurableRecord, Mismatch, Persist
from shoal.protocol.certificate import check_certificate
from shoal.protocol.chain import Chain
from shoal.protocol.effects import Effect
from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.messages import (
    FIRST_VOTE_DOMAIN,
    NO_HASH,
    Certificate,
    Evict,
    Message,
    Moved,
    Moves,
    Plan,
    Prepare,
    Prepared,
    PreparedValue,
    Propose,
    Target,
    Value,
    ViewChange,
    Vote,
    domain_hash,
    step_preimage,
)
from shoal.protocol.round import RoundMachine
from shoal.protocol.terms import make_consent, make_rollback
from shoal.protocol.view_change import is_prepared
from shoal.protocol.voting import FaultModel, Voting, is_quorum
from tests.protocol.lab import Lab, PaperIdentity, honest_report, messages_in, plan_hash, value_of
from tests.protocol.round_lab import RoundLab
from tests.protocol.round_machines import planned

pytestmark = pytest.mark.usefixtures("paper_signatures")

LYING = Voting(FaultModel.LYING)


# -- names in a value ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("signs_leaves", [False, True], ids=["unsigned", "signed by itself"])
def test_member_that_lists_all_others_as_gone_certifies_nothing(signs_leaves: bool) -> None:
    lab = Lab(4)
    liar = lab.members[lab.lead(0)].identity
    others = [peer for peer in lab.start.members if peer != liar.peer_id]
    value = without_others(value_of(lab.start, plan_hash("mine"), liar.peer_id), liar)
    if not signs_leaves:
        value = msgspec.structs.replace(value, leave_signatures=msgspec.UNSET)
    forged = certified(value, liar)
    assert is_quorum(lab.start, [liar.peer_id], others), "it would be one, if they had left"
    with pytest.raises(RemoteError, match="without their proofs"):
        check_certificate(forged, lab.start)
    with pytest.raises(RemoteError, match="without their proofs"):
        Chain(lab.start).extend(forged)
    for member in lab.members:
        machine = Agreement(identity=member.identity, previous=lab.start)
        with pytest.raises(RemoteError, match="without their proofs"):
            machine.receive(liar.peer_id, forged)
        if member.identity is not liar:
            with pytest.raises(RemoteError, match="without their proofs"):
                machine.receive(liar.peer_id, propose_of(liar, 0, value))
        assert machine.certificate is None


def test_leaves_that_were_signed_are_counted_and_of_another_round_are_not() -> None:
    lab = Lab(4)
    identities = [member.identity for member in lab.members]
    gone = identities[3]
    staying = [one.peer_id for one in identities[:3]]
    value = value_of(lab.start, plan_hash("x"), staying[0], staying, [gone.peer_id], signing=identities)
    check_certificate(certified(value, *identities[:2]), lab.start)
    elsewhere = msgspec.structs.replace(lab.start, round=7)
    old = msgspec.structs.replace(value, leave_signatures=(leave_of(gone, elsewhere).signature,))
    with pytest.raises(RemoteError, match="without their proofs"):
        check_certificate(certified(old, *identities[:2]), lab.start)


def test_stranger_becomes_no_member_without_its_own_report_of_this_result() -> None:
    lab = Lab(4, founders=range(3))
    identities = [member.identity for member in lab.members]
    report = honest_report(lab.start, plan_hash("x"))
    everyone = [one.peer_id for one in identities]
    value = value_of(lab.start, report.plan, everyone[0], everyone, signing=identities)
    check_certificate(certified(value, *identities[:3]), lab.start)
    other = msgspec.structs.replace(report, tokens=report.tokens + 1)
    for signatures in (
        msgspec.UNSET,
        (signed_report(identities[3], other).signature,),
        (signed_report(identities[0], report).signature,),
    ):
        forged = msgspec.structs.replace(value, report_signatures=signatures)
        with pytest.raises(RemoteError, match="without their proofs"):
            check_certificate(certified(forged, *identities[:3]), lab.start)


def test_members_after_a_round_are_a_quorum_of_those_before_it() -> None:
    lab = Lab(5)
    identities = [member.identity for member in lab.members]
    planner = lab.start.planner
    few = [one.peer_id for one in identities if one.peer_id != planner][:2]
    value = value_of(lab.start, plan_hash("x"), few[0], few)
    with pytest.raises(RemoteError, match="without their proofs"):
        check_certificate(certified(value, *identities), lab.start)


def test_entries_of_the_first_edition_are_believed_from_ones_own_disk_alone() -> None:
    lab = Lab(3)
    identities = [member.identity for member in lab.members]
    gone, staying = identities[2].peer_id, [one.peer_id for one in identities[:2]]
    value = value_of(lab.start, plan_hash("x"), staying[0], staying, [gone])
    signatures = tuple(one.sign(FIRST_VOTE_DOMAIN, step_preimage(0, value.hash)) for one in identities[:2])
    old = Certificate(value=value, view=0, signers=tuple(staying), signatures=signatures)
    Chain(lab.start).extend(old, trusted=True)
    with pytest.raises(RemoteError):
        Chain(lab.start).extend(old)
    plain = value_of(lab.start, plan_hash("x"), staying[0])
    one = identities[1].sign(FIRST_VOTE_DOMAIN, step_preimage(0, plain.hash))
    few = Certificate(value=plain, view=0, signers=(staying[1],), signatures=(one,))
    with pytest.raises(RemoteError, match="no quorum"):
        Chain(lab.start).extend(few, trusted=True)


# -- what a lead may propose ---------------------------------------------------------------------------------


def heard_by(lab: Lab, number: int, plan: bytes, *reporting: int) -> Agreement:
    """A member that has the finals of `plan`, and the Reports of these."""
    machine = lab.machine(number)
    lab.carry_out(number, machine.computed(honest_report(lab.start, plan), lab.start.members))
    for other in reporting:
        identity = lab.members[other].identity
        machine.take_report(identity.peer_id, signed_report(identity, honest_report(lab.start, plan)))
    return machine


def test_proposal_that_leaves_out_a_member_that_reported_is_refused_with_its_report() -> None:
    lab = Lab(4)
    first, second, third, victim = (lab.lead(view) for view in range(4))
    lead, plan = lab.members[first], plan_hash("x")
    without = [member.peer for member in lab.members if member.peer != lab.members[victim].peer]
    value = value_of(lab.start, plan, lead.peer, without)
    ignorant, knowing, left_out = (
        heard_by(lab, n, plan, *more) for n, more in ((second, ()), (third, (victim,)), (victim, ()))
    )
    proposal = propose_of(lead.identity, 0, value)
    assert messages_in(ignorant.receive(lead.peer, proposal), Prepare), "who does not know better accepts it"
    for machine in (knowing, left_out):
        assert messages_in(machine.receive(lead.peer, proposal), Prepare) == []
        assert machine.refuses
    (change,) = messages_in(knowing.move_to(1), ViewChange)
    assert isinstance(change, ViewChange)
    assert change.left_out == (lab.members[victim].peer,)
    report = msgspec.structs.replace(change.report, signature=change.left_out_signatures[0])
    ignorant.take_report(lab.members[victim].peer, report)
    with pytest.raises(RemoteError, match="signature does not hold"):
        ignorant.take_report(lead.peer, report)


def test_lying_lead_that_leaves_members_out_gains_nothing() -> None:
    """In whole rounds: whoever it leaves out is a member of the next round all the same."""
    lab = RoundLab(4, seed=3)
    liar = lab.lead()
    victim = lab.nodes[(liar + 1) % 4].peer

    _proposing_otherwise(lab, liar, lambda value: without(value, victim))
    lab.run_until(lab.height_of_all(1), 30)
    assert lab.members(1) == set(range(4))
    assert lab.value(1).planner != lab.nodes[liar].peer


@pytest.mark.parametrize("stranger_signs", [False, True])
def test_lying_lead_that_brings_strangers_in_gains_nothing(stranger_signs: bool) -> None:
    lab = RoundLab(4, seed=3)
    liar, stranger = lab.lead(), PaperIdentity("77")

    _proposing_otherwise(lab, liar, lambda value: with_stranger(value, stranger, signs=stranger_signs))
    lab.run_until(lab.height_of_all(1), 30)
    assert set(lab.value(1).members) == {node.peer for node in lab.nodes}


def test_stranger_whom_the_swarm_does_not_let_in_becomes_no_member_although_the_plan_has_it() -> None:
    """A lead can name keys of its own in a plan, and sign their Reports: in a closed swarm they come to nothing."""
    lab, stranger = Lab(4, founders=range(3)), 3
    first, other = lab.lead(0), lab.lead(1)
    everyone = [member.peer for member in lab.members]
    report = honest_report(lab.start, plan_hash("x"))
    identities = [member.identity for member in lab.members]
    value = value_of(lab.start, report.plan, lab.members[first].peer, everyone, signing=identities)
    for lets_in in (True, False):
        machine = Agreement(
            identity=lab.members[other].identity,
            previous=lab.start,
            may_join=lambda peer: lets_in or peer != everyone[stranger],  # noqa: B023
        )
        machine.computed(report, everyone)
        effects = machine.receive(lab.members[first].peer, propose_of(lab.members[first].identity, 0, value))
        assert bool(messages_in(effects, Prepare)) is lets_in
        assert machine.refuses is not lets_in


def _proposing_otherwise(lab: RoundLab, liar: int, changed: Callable[[Value], Value]) -> None:
    """Whatever `liar` proposes as its own is sent otherwise, signed by it, and it says nothing else of it."""
    identity = lab.nodes[liar].identity

    def intercept(number: int, effect: Effect) -> Collection[int] | None:
        if number != liar or not isinstance(effect, Broadcast):
            return None
        if isinstance(effect.message, Propose) and effect.message.value.planner == identity.peer_id:
            message = effect.message
            lie = propose_of(identity, message.view, changed(message.value), message.moves)
            for other in range(len(lab.nodes)):
                if other != liar:
                    lab._send(liar, other, lie)
            return ()
        return () if isinstance(effect.message, Prepare | Vote) else None

    lab.intercept = intercept


@pytest.mark.parametrize("changed", [{"tokens": 10**9}, {"digest": NO_HASH}, {"bitmaps": NO_HASH}], ids=str)
def test_proposal_of_an_invented_result_is_not_accepted(changed: dict[str, object]) -> None:
    lab = Lab(3)
    lead, other = lab.members[lab.lead(0)], lab.lead(1)
    value = msgspec.structs.replace(value_of(lab.start, plan_hash("x"), lead.peer), **changed)
    machine = heard_by(lab, other, value.plan)
    (mismatch,) = machine.receive(lead.peer, propose_of(lead.identity, 0, value))
    assert isinstance(mismatch, Mismatch)


def test_free_proposal_in_anothers_name_is_refused() -> None:
    lab = Lab(3)
    lead, other = lab.members[lab.lead(0)], lab.lead(1)
    value = value_of(lab.start, plan_hash("x"), lab.members[other].peer)
    with pytest.raises(RemoteError, match="another planner"):
        heard_by(lab, other, value.plan).receive(lead.peer, propose_of(lead.identity, 0, value))


def test_proposal_whose_signature_is_anothers_is_refused() -> None:
    lab = Lab(3)
    lead, other = lab.members[lab.lead(0)], lab.lead(1)
    value = value_of(lab.start, plan_hash("x"), lead.peer)
    proposal = propose_of(lab.members[other].identity, 0, value)
    with pytest.raises(RemoteError, match="signature does not hold"):
        heard_by(lab, other, value.plan).receive(lead.peer, proposal)


# -- views ---------------------------------------------------------------------------------------------------


def test_invented_certificate_in_a_view_change_is_refused() -> None:
    lab = Lab(4)
    lead, liar = lab.machine(lab.lead(1)), lab.members[lab.lead(2)]
    invented = value_of(lab.start, plan_hash("invented"), liar.peer)
    lead.move_to(1)
    quorum = prepared_by([member.identity for member in lab.members[:3]], 0, invented)
    for prepared in (
        prepared_by([liar.identity], 0, invented),
        Prepared(0, lab.start.members, (prepare_of(liar.identity, 0, invented).signature,) * 4),
        Prepared(0, (liar.peer,) * 3, (prepare_of(liar.identity, 0, invented).signature,) * 3),
        Prepared(0, (*quorum.signers, quorum.signers[0]), (*quorum.signatures, quorum.signatures[0])),
        Prepared(0, lab.start.members, ()),
    ):
        change = change_of(liar.identity, lab.start, 1, PreparedValue(invented, prepared))
        with pytest.raises(RemoteError, match="certificate that does not hold"):
            lead.receive(liar.peer, change)
    honest = lab.members[lab.lead(3)]
    lead.receive(honest.peer, change_of(honest.identity, lab.start, 1))
    lead.receive(lab.members[lab.lead(0)].peer, change_of(lab.members[lab.lead(0)].identity, lab.start, 1))
    assert lead.free_to_plan
    assert not lead.proposed


def lies_about(lab: Lab, view: int) -> list[Moves | msgspec.UnsetType]:
    """What no quorum stands behind, although it says that one moved to `view`."""
    identities = [member.identity for member in lab.members]
    liar = identities[lab.lead(view)]
    alone = moves_of([liar], lab.start, view)
    everyone = moves_of(identities, lab.start, view)
    others_view = moves_of(identities, lab.start, view - 1)
    one = alone.changes[0]
    names = [Moved(peer, -1, NO_HASH, one.signature) for peer in lab.start.members]
    gone = tuple(peer for peer in lab.start.members if peer != liar.peer_id)
    elsewhere = moves_of(identities, msgspec.structs.replace(lab.start, round=9), view)
    return [
        msgspec.UNSET,
        alone,
        others_view,
        elsewhere,
        Moves(alone.changes * 3),
        Moves(tuple(names)),
        Moves(everyone.changes[1:3]),
        Moves(alone.changes, gone, (leave_of(liar, lab.start).signature,) * 3),
        Moves(alone.changes, gone, ()),
    ]


@pytest.mark.parametrize("view", [1, 200])
@pytest.mark.parametrize("lie", range(9))
def test_proposal_of_a_view_that_no_quorum_entered_is_refused(lie: int, view: int) -> None:
    lab = Lab(4)
    lead, other = lab.members[lab.lead(view)], lab.lead(view + 1)
    value = value_of(lab.start, plan_hash("x"), lead.peer)
    machine = heard_by(lab, other, value.plan)
    with pytest.raises(RemoteError, match="no quorum is shown"):
        machine.receive(lead.peer, propose_of(lead.identity, view, value, lies_about(lab, view)[lie]))
    assert machine.view == 0
    moves = moves_of([member.identity for member in lab.members], lab.start, view)
    assert messages_in(machine.receive(lead.peer, propose_of(lead.identity, view, value, moves)), Prepare)


def test_first_view_needs_no_proof_and_has_none() -> None:
    lab = Lab(3)
    lead, other = lab.members[lab.lead(0)], lab.lead(1)
    value = value_of(lab.start, plan_hash("x"), lead.peer)
    moves = moves_of([member.identity for member in lab.members], lab.start, 0)
    with pytest.raises(RemoteError, match="entered by nobody"):
        heard_by(lab, other, value.plan).receive(lead.peer, propose_of(lead.identity, 0, value, moves))


def test_lead_may_propose_only_what_its_quorum_compels() -> None:
    lab = Lab(4)
    identities = [member.identity for member in lab.members]
    first, lead = lab.members[lab.lead(0)], lab.members[lab.lead(2)]
    machine = heard_by(lab, lab.lead(3), plan_hash("x"))
    lab.carry_out(lab.lead(3), machine.computed(honest_report(lab.start, plan_hash("other"))))
    low, high, other = (
        value_of(lab.start, plan_hash(name), planner)
        for name, planner in (("low", first.peer), ("x", first.peer), ("other", lead.peer))
    )
    stands = {
        first.peer: PreparedValue(low, prepared_by(identities, 0, low)),
        lead.peer: PreparedValue(high, prepared_by(identities, 1, high)),
    }
    moves = moves_of(identities, lab.start, 2, stands)

    def proposed(value: Value, prepared: Prepared | msgspec.UnsetType = msgspec.UNSET, by: Moves = moves) -> None:
        machine.receive(lead.peer, propose_of(lead.identity, 2, value, by, prepared))

    with pytest.raises(RemoteError, match="in which a value stands already"):
        proposed(other)
    with pytest.raises(RemoteError, match="another value than stands"):
        proposed(low, stands[first.peer].prepared)
    with pytest.raises(RemoteError, match="another value than stands"):
        proposed(msgspec.structs.replace(high, planner=lead.peer), stands[lead.peer].prepared)
    with pytest.raises(RemoteError, match="certificate that does not hold"):
        proposed(high, prepared_by(identities[:1], 1, high))
    free = moves_of(identities, lab.start, 2)
    with pytest.raises(RemoteError, match="another value than stands"):
        proposed(high, stands[lead.peer].prepared, free)
    assert machine.view == 0
    effects = machine.receive(lead.peer, propose_of(lead.identity, 2, high, moves, stands[lead.peer].prepared))
    assert messages_in(effects, Prepare) == [prepare_of(lab.members[lab.lead(3)].identity, 2, high)]


@pytest.mark.parametrize("kind", [Plan, Evict])
@pytest.mark.parametrize("view", [1, 4, 200])
def test_plan_or_eviction_of_a_far_view_binds_nobody(kind: type[Plan] | type[Evict], view: int) -> None:
    lab, machines, leader, plan = planned(4)
    identities = [node.identity for node in lab.nodes]
    sender = lab.number(machines[leader].agreement.lead(view))
    machine = machines[(sender + 1) % 4]
    message: Message = msgspec.structs.replace(plan, view=view, attempt=0, planner=machines[sender].me)
    if kind is Evict:
        message = Evict(
            term=plan.term, round=plan.round, base=plan.base, view=view, attempt=1, lineage=plan.hash, evicted=()
        )
    alone = moves_of([identities[sender]], lab.start, view)
    stands = value_of(lab.start, plan_hash("x"), identities[0].peer_id)
    prepared = PreparedValue(stands, prepared_by(identities, 0, stands))
    bound = moves_of(identities, lab.start, view, {identities[1].peer_id: prepared})
    for moves, said in ((msgspec.UNSET, "no quorum"), (alone, "no quorum"), (bound, "a value stands already")):
        with pytest.raises(RemoteError, match=said):
            machine.receive(machines[sender].me, msgspec.structs.replace(message, moves=moves), 2.0)
        assert machine.agreement.view == 0
    shown = msgspec.structs.replace(message, moves=moves_of(identities, lab.start, view))
    effects = machine.receive(machines[sender].me, shown, 2.0)
    promise = DurableRecord(kind="promise", term=plan.term, round=1, view=view)
    assert Persist(promise) in effects


def test_one_of_three_does_not_lead_the_others_from_view_to_view() -> None:
    lab = RoundLab(3, seed=2)
    liar = next(number for number in range(3) if number != lab.lead())
    moves: list[int] = []

    def restless(number: int, effect: Effect) -> Collection[int] | None:
        if isinstance(effect, Broadcast) and isinstance(effect.message, ViewChange) and number != liar:
            moves.append(number)
        return None

    lab.intercept = restless
    for view in range(1, 40):
        change = change_of(lab.nodes[liar].identity, lab.start, view)
        for other in range(3):
            if other != liar:
                lab._send(liar, other, change)
    honest = set(range(3)) - {liar}
    lab.run_until(lab.height_of(honest, 1), 30)
    assert moves == []
    assert {lab.nodes[number].certificate(lab.start).view for number in honest} == {0}


# -- two steps -----------------------------------------------------------------------------------------------


def test_vote_needs_a_quorum_of_prepares_of_one_view_and_ones_own() -> None:
    lab = Lab(4)
    lead, other = lab.members[lab.lead(0)], lab.lead(1)
    machine = lab.machine(other)
    value = value_of(lab.start, plan_hash("x"), lead.peer)
    third, fourth = (lab.members[lab.lead(view)] for view in (2, 3))
    assert not messages_in(machine.receive(third.peer, prepare_of(third.identity, 0, value)), Vote)
    assert not messages_in(machine.receive(fourth.peer, prepare_of(fourth.identity, 1, value)), Vote)
    assert not messages_in(machine.receive(lead.peer, propose_of(lead.identity, 0, value)), Vote)
    effects = lab.compute(other, value.plan)
    assert messages_in(effects, Prepare)
    voted = messages_in(effects, Vote)
    if not voted:  # unless the planner of the round before is among the two
        assert not is_quorum(lab.start, [lab.members[other].peer, third.peer])
        voted = messages_in(machine.receive(lead.peer, prepare_of(lead.identity, 0, value)), Vote)
    assert voted == [vote_of(lab.members[other].identity, 0, value)]
    with pytest.raises(RemoteError, match="signature does not hold"):
        machine.receive(third.peer, prepare_of(fourth.identity, 2, value))


def test_quorum_of_others_prepares_is_no_vote_of_who_has_not_prepared() -> None:
    lab = Lab(4)
    lead, other = lab.members[lab.lead(0)], lab.lead(1)
    machine = lab.machine(other)
    value = value_of(lab.start, plan_hash("x"), lead.peer)
    effects = machine.receive(lead.peer, propose_of(lead.identity, 0, value))
    for view in (0, 2, 3):
        member = lab.members[lab.lead(view)]
        effects += machine.receive(member.peer, prepare_of(member.identity, 0, value))
    assert not messages_in(effects, Prepare)
    assert not messages_in(effects, Vote)
    effects = lab.compute(other, value.plan)
    assert messages_in(effects, Prepare)
    assert messages_in(effects, Vote) == [vote_of(lab.members[other].identity, 0, value)]


def test_member_that_moved_on_votes_no_more_for_what_it_prepared_below() -> None:
    lab = Lab(3)
    lead, other = lab.members[lab.lead(0)], lab.lead(1)
    machine = lab.machine(other)
    value = value_of(lab.start, plan_hash("x"), lead.peer)
    lab.carry_out(other, lab.compute(other, value.plan))
    assert messages_in(machine.receive(lead.peer, propose_of(lead.identity, 0, value)), Prepare)
    (change,) = messages_in(machine.move_to(1), ViewChange)
    assert isinstance(change, ViewChange)
    assert change.prepared is None, "a Prepare of its own is no certificate"
    assert machine.receive(lead.peer, prepare_of(lead.identity, 0, value)) == []


def test_restored_prepares_and_votes_count_like_those_that_are_heard() -> None:
    """A lone member, killed after its Prepare or its Vote, decides at once when it returns."""
    lab = Lab(1)
    value = value_of(lab.start, plan_hash("alone"), lab.members[0].peer)
    machine = lab.machine(0)
    machine.computed(honest_report(lab.start, value.plan))
    records = [effect.record for effect in machine.propose(value) if isinstance(effect, Persist)]
    assert [record.kind for record in records] == ["propose", "prepare", "vote"]
    for kept in (2, 3):
        again = Agreement(identity=lab.members[0].identity, previous=lab.start)
        again.restore(records[:kept])
        assert any(isinstance(effect, Decided) for effect in again.resume())


def test_lead_that_lies_about_the_leaves_it_heard_is_refused_by_its_own_machine() -> None:
    lab = Lab(3)
    lead = lab.lead(0)
    machine = lab.machine(lead)
    gone = lab.members[lab.lead(1)].peer
    staying = [peer for peer in lab.start.members if peer != gone]
    value = value_of(lab.start, plan_hash("x"), machine.lead(0), staying, [gone])
    lab.carry_out(lead, lab.compute(lead, value.plan))
    with pytest.raises(LocalError):
        machine.propose(value)


# -- the other fault model -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("members", "needed"), [(1, 1), (2, 2), (3, 3), (4, 3), (5, 4), (6, 5), (7, 5)])
def test_quorum_of_liars_is_more_than_two_thirds_of_all(members: int, needed: int) -> None:
    previous = Lab(members).start
    for count in range(members + 1):
        some = previous.members[:count]
        assert is_quorum(previous, some, voting=LYING) == (count >= needed)
        assert is_quorum(previous, some, previous.members[count:], voting=LYING) == (count >= needed)


def test_four_that_may_lie_decide_by_three_prepares_and_three_votes() -> None:
    lab = Lab(4)
    identities = [lab.members[lab.lead(view)].identity for view in range(4)]
    machine = Agreement(identity=identities[1], previous=lab.start, voting=LYING)
    value = value_of(lab.start, plan_hash("x"), identities[0].peer_id)
    machine.computed(honest_report(lab.start, value.plan))
    machine.receive(identities[0].peer_id, propose_of(identities[0], 0, value))
    for step, kind in ((prepare_of, Vote), (vote_of, None)):
        effects = machine.receive(identities[0].peer_id, step(identities[0], 0, value))
        assert not any(isinstance(effect, Decided) for effect in effects)
        assert not messages_in(effects, Vote)
        effects = machine.receive(identities[2].peer_id, step(identities[2], 0, value))
        assert messages_in(effects, Vote) if kind else any(isinstance(e, Decided) for e in effects)


def test_who_left_counts_in_no_prepare_certificate_and_in_no_votes_where_leaves_are_not_taken_off() -> None:
    lab = Lab(7)
    identities = [lab.members[lab.lead(view)].identity for view in range(7)]
    *staying, gone = identities
    peers = [one.peer_id for one in staying]
    value = value_of(lab.start, plan_hash("x"), peers[0], peers, [gone.peer_id], signing=identities)
    for signing, holds in ((staying[:5], True), ([*staying[:4], gone], False)):
        assert is_prepared(prepared_by(signing, 0, value), value, lab.start, voting=LYING) is holds
    machine = Agreement(identity=identities[1], previous=lab.start, voting=LYING)
    machine.receive(peers[0], propose_of(identities[0], 0, value))
    for one in (gone, identities[0], *identities[2:5]):  # none of them is known here to have left
        assert not machine.receive(one.peer_id, vote_of(one, 0, value))
    (decided,) = machine.receive(peers[5], vote_of(identities[5], 0, value))
    assert isinstance(decided, Decided)
    assert set(decided.certificate.signers) == {peers[0], *peers[2:]}


def test_table_of_what_a_machine_holds_is_bounded_by_views() -> None:
    lab = Lab(3)
    liar = lab.members[lab.lead(1)]
    machine = lab.machine(lab.lead(0))
    for view in range(400):
        machine.receive(liar.peer, change_of(liar.identity, lab.start, view))
        value = value_of(lab.start, domain_hash("some", bytes([view % 256, view // 256])), liar.peer)
        machine.receive(liar.peer, prepare_of(liar.identity, view, value))
    assert len(machine._changes) <= 257
    assert len(machine._prepares) <= 257


def test_helpers_of_this_page_make_what_honest_machines_make() -> None:
    lab = Lab(3)
    number = lab.lead(1)
    machine: Agreement | RoundMachine = lab.machine(number)
    (change,) = messages_in(machine.move_to(1), ViewChange)
    assert change == change_of(lab.members[number].identity, lab.start, 1)


def test_rollback_is_believed_from_nobody_without_the_consents_of_a_quorum() -> None:
    lab = Lab(3)
    identities = [member.identity for member in lab.members]
    chain = Chain(lab.start)
    result = value_of(lab.start, plan_hash("x"), lab.start.planner)
    chain.extend(certified(result, *identities))
    consents = {one.peer_id: make_consent(one, chain.head, Target(0, lab.start.hash), asked=True) for one in identities}
    for few in (identities[1:2], []):
        some = {one.peer_id: consents[one.peer_id] for one in few}
        back = make_rollback(chain.head, identities[0].peer_id, Target(0, lab.start.hash), some, digest=plan_hash("s"))
        with pytest.raises(RemoteError, match="consent"):
            chain.extend(certified(back, *identities))
        machine = Agreement(identity=identities[0], previous=chain.head)
        with pytest.raises(RemoteError, match="consent"):
            machine.receive(identities[1].peer_id, certified(back, *identities))
    back = make_rollback(chain.head, identities[0].peer_id, Target(0, lab.start.hash), consents, digest=plan_hash("s"))
    chain.extend(certified(back, *identities))
