"""Agreement: one value per round under loss, reordering, crashes and restarts, by schedules that say what they show.

All schedules of small agreements, and random ones of larger, are the explorer's (`tests/lab/explore`).
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import pytest

from shoal.lab.signed import (
    change_of,
    leave_of,
    moves_of,
    prepare_of,
    prepared_by,
    propose_of,
    vote_of,
)
from shoal.protocol import certificate as certificate_module
from shoal.protocol.agreement import (
    VIEWS_AHEAD_LIMIT,
    Agreement,
    Broadcast,
    Decided,
    DurableRecord,
    Mismatch,
    NeedFinals,
    Persist,
    Standing,
)
from shoal.protocol.certificate import check_certificate, genesis
from shoal.protocol.durable import ABSTAIN
from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.identity import Identity
from shoal.protocol.identity import verify as real_verify
from shoal.protocol.messages import (
    VIEW_LIMIT,
    Leave,
    Prepare,
    PreparedValue,
    Propose,
    RoundMessage,
    Value,
    ViewChange,
    Vote,
)
from shoal.protocol.voting import is_quorum, lead
from tests.protocol.lab import (
    SWARM,
    Lab,
    Ledger,
    PaperIdentity,
    Violation,
    honest_report,
    messages_in,
    plan_hash,
    value_of,
)

pytestmark = pytest.mark.usefixtures("paper_signatures")

# -- the undisturbed course ----------------------------------------------------------------------------------


def test_agreement_with_real_keys_certifies_what_the_lead_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificate_module, "verify", real_verify)
    identities = [Identity.from_seed(bytes([i]) * 32) for i in range(3)]
    start = genesis(SWARM, [i.peer_id for i in identities])
    machines = {i.peer_id: Agreement(identity=i, previous=start) for i in identities}
    leader = lead(start, 0)
    value = value_of(start, plan_hash("one"), leader)
    for machine in machines.values():
        assert machine.computed(honest_report(start, value.plan)) == []
    pending = [(leader, e) for e in machines[leader].propose(value)]
    decided = {}
    while pending:
        sender, effect = pending.pop(0)
        if isinstance(effect, Decided):
            decided[sender] = effect.certificate
        elif isinstance(effect, Broadcast):
            for peer, machine in machines.items():
                if peer != sender:
                    pending += [(peer, e) for e in machine.receive(sender, effect.message)]
    assert set(decided) == set(machines)
    for certificate in decided.values():
        assert certificate.value == value
        assert certificate.view == 0
        check_certificate(certificate, start)


def test_agreement_persists_before_it_sends() -> None:
    lab = Lab(3)
    machine = lab.machine(lab.lead(0))
    report = honest_report(lab.start, plan_hash("p"))
    machine.computed(report)
    value = value_of(lab.start, report.plan, machine.lead(0))
    effects = machine.propose(value)
    kinds = [(type(e).__name__, e.record.kind if isinstance(e, Persist) else "") for e in effects]
    assert kinds == [("Persist", "propose"), ("Broadcast", ""), ("Persist", "prepare"), ("Broadcast", "")]
    other = lab.members[lab.lead(1)]
    effects = machine.receive(other.peer, prepare_of(other.identity, 0, value))
    assert [type(e).__name__ for e in effects] == ["Persist", "Broadcast"]
    prepared = prepared_by([lab.members[lab.lead(view)].identity for view in (0, 1)], 0, value)
    assert effects[0] == Persist(
        DurableRecord(kind="vote", term=lab.start.term, round=1, value=value, prepared=prepared)
    )
    effects = machine.move_to(1)
    assert isinstance(effects[0], Persist)
    assert effects[0].record == DurableRecord(kind="promise", term=lab.start.term, round=1, view=1)


def test_propose_by_another_than_the_lead_is_refused() -> None:
    lab = Lab(3)
    other = lab.machine(lab.lead(1))
    with pytest.raises(LocalError):
        other.propose(value_of(lab.start, plan_hash("p"), lab.members[lab.lead(1)].peer))
    with pytest.raises(RemoteError, match="another leads"):
        lab.machine(lab.lead(0)).receive(
            lab.members[lab.lead(1)].peer,
            propose(lab, 0, value_of(lab.start, plan_hash("p"), lab.members[0].peer)),
        )


def propose(lab: Lab, view: int, value: Value) -> Propose:
    """What the lead of the view says; in a later view with the moves of everyone, who prepared nothing."""
    everyone = [member.identity for member in lab.members]
    moves = moves_of(everyone, lab.start, view) if view else msgspec.UNSET
    return propose_of(lab.members[lab.lead(view)].identity, view, value, moves)


def change(lab: Lab, number: int, view: int, prepared: PreparedValue | None = None) -> ViewChange:
    return change_of(lab.members[number].identity, lab.start, view, prepared)


def prepared_value(lab: Lab, view: int, value: Value) -> PreparedValue:
    """A value that everyone prepared in a view."""
    return PreparedValue(value, prepared_by([member.identity for member in lab.members], view, value))


def test_lead_proposes_once_per_view() -> None:
    lab = Lab(3)
    lab.propose(lab.lead(0), "one")
    machine = lab.machine(lab.lead(0))
    with pytest.raises(LocalError):
        machine.propose(value_of(lab.start, plan_hash("two"), machine.lead(0)))


def test_member_without_the_finals_asks_for_them_and_prepares_when_it_has_them() -> None:
    lab = Lab(3)
    value = lab.propose(lab.lead(0), "one")
    other = lab.lead(1)
    effects = lab.machine(other).receive(lab.members[lab.lead(0)].peer, propose(lab, 0, value))
    assert effects == [NeedFinals(value)]
    prepares = messages_in(lab.compute(other, value.plan), Prepare)
    assert prepares == [prepare_of(lab.members[other].identity, 0, value)]


def test_member_that_computed_another_digest_does_not_vote_and_says_so_once() -> None:
    lab = Lab(3)
    honest = honest_report(lab.start, plan_hash("one"))
    report = msgspec.structs.replace(honest, digest=bytes(32))
    other, leader = lab.lead(1), lab.lead(0)
    machine = lab.machine(other)
    machine.computed(report)
    value = lab.propose(leader, "one")
    message = propose(lab, 0, value)
    assert machine.receive(lab.members[leader].peer, message) == [Mismatch(value)]
    assert machine.receive(lab.members[leader].peer, message) == []
    assert messages_in(machine.computed(honest), Prepare), "a digest put right is accepted"


def test_mismatch_takes_no_promise_along() -> None:
    """A member that moves on while a proposal does not match must still write its promise before it speaks."""
    lab = Lab(3)
    mover, leader = lab.lead(2), lab.lead(1)
    machine = lab.machine(mover)
    machine.computed(msgspec.structs.replace(honest_report(lab.start, plan_hash("x")), digest=bytes(32)))
    value = value_of(lab.start, plan_hash("x"), lab.members[leader].peer)
    machine.receive(lab.members[leader].peer, propose(lab, 1, value))
    effects = machine.move_to(1)
    assert isinstance(effects[0], Persist)
    assert messages_in(effects, ViewChange) == [m for m in machine.current() if isinstance(m, ViewChange)]


def test_new_lead_whose_own_digest_differs_still_writes_what_it_carries_forward() -> None:
    lab = Lab(3)
    first, second, third = lab.lead(0), lab.lead(1), lab.lead(2)
    value = value_of(lab.start, plan_hash("x"), lab.members[first].peer)
    machine = lab.machine(second)
    machine.computed(msgspec.structs.replace(honest_report(lab.start, value.plan), digest=bytes(32)))
    machine.move_to(1)
    stands = prepared_value(lab, 0, value)
    effects = machine.receive(lab.members[third].peer, change(lab, third, 1, stands))
    movers = [lab.members[number].identity for number in (second, third)]
    moves = moves_of(movers, lab.start, 1, {lab.members[third].peer: stands})
    record = DurableRecord(
        kind="propose", term=lab.start.term, round=1, view=1, value=value, moves=moves, prepared=stands.prepared
    )
    assert effects[0] == Persist(record)
    proposal = propose_of(lab.members[second].identity, 1, value, moves, stands.prepared)
    assert messages_in(effects, Propose) == [proposal]


def test_listener_outside_the_electorate_learns_the_outcome_and_signs_nothing() -> None:
    lab = Lab(4, founders=[0, 1, 2])
    outsider = lab.machine(3)
    assert not outsider.votes
    assert outsider.move_to(1) == []
    lab.propose(lab.lead(0), "one")
    for number in range(3):
        lab.carry_out(number, lab.compute(number, plan_hash("one")))
    lab.settle()
    assert [len(member.chain) for member in lab.members] == [2, 2, 2, 2]
    assert lab.members[3].log == []


def test_messages_of_strangers_change_nothing() -> None:
    lab = Lab(3)
    stranger = PaperIdentity("99")
    machine = lab.machine(0)
    value = value_of(lab.start, plan_hash("p"), lab.members[0].peer)
    for message in (
        vote_of(stranger, 0, value),
        prepare_of(stranger, 0, value),
        change_of(stranger, lab.start, 1),
        propose(lab, 0, value),
        leave_of(stranger, lab.start),
    ):
        assert machine.receive(stranger.peer_id, message) == []
    assert machine.view == 0
    assert machine.leaves == set()


def test_message_that_is_not_of_agreement_is_our_own_bug() -> None:
    lab = Lab(2)
    with pytest.raises(LocalError):
        lab.machine(0).receive(lab.members[1].peer, honest_report(lab.start, plan_hash("p")))


@pytest.mark.parametrize("view", [VIEWS_AHEAD_LIMIT + 1, VIEW_LIMIT - 1])
def test_views_far_ahead_are_not_remembered(view: int) -> None:
    lab = Lab(3)
    machine, other = lab.machine(0), lab.members[1]
    value = value_of(lab.start, plan_hash("p"), machine.lead(view))
    assert machine.receive(other.peer, change(lab, 1, view)) == []
    assert machine.receive(other.peer, vote_of(other.identity, view, value)) == []
    assert machine.receive(machine.lead(view), propose(lab, view, value)) == []
    assert not machine._changes
    assert not machine._votes
    assert not machine._proposals


def test_contradictions_are_blamed_on_their_sender() -> None:
    lab = Lab(3)
    leader = lab.lead(0)
    one, two = (value_of(lab.start, plan_hash(name), lab.members[leader].peer) for name in ("one", "two"))
    machine, sender = lab.machine(lab.lead(1)), lab.members[leader]
    machine.receive(sender.peer, propose(lab, 0, one))
    with pytest.raises(RemoteError, match="two values") as error:
        machine.receive(sender.peer, propose(lab, 0, two))
    assert error.value.peer == sender.peer
    machine.receive(sender.peer, vote_of(sender.identity, 0, one))
    with pytest.raises(RemoteError, match="two votes"):
        machine.receive(sender.peer, vote_of(sender.identity, 0, two))
    with pytest.raises(RemoteError, match="signature"):
        machine.receive(sender.peer, vote_of(lab.members[lab.lead(2)].identity, 3, one))
    with pytest.raises(RemoteError, match="impossible certificate"):
        machine.receive(sender.peer, change(lab, leader, 1, prepared_value(lab, 1, one)))
    machine.receive(sender.peer, prepare_of(sender.identity, 0, one))
    with pytest.raises(RemoteError, match="two prepares"):
        machine.receive(sender.peer, prepare_of(sender.identity, 0, two))
    with pytest.raises(RemoteError, match="leaves a round in which it signed"):
        machine.receive(sender.peer, leave_of(sender.identity, lab.start))
    with pytest.raises(RemoteError, match="does not follow"):
        machine.receive(sender.peer, propose(lab, 0, msgspec.structs.replace(one, round=2)))


# -- schedules that broke earlier drafts ---------------------------------------------------------------------


def test_lead_that_alone_saw_the_certificate_and_slept_agrees_with_the_others() -> None:
    lab = Lab(3)
    first, second, third = lab.lead(0), lab.lead(1), lab.lead(2)
    one = lab.propose(first, "one")
    lab.carry_out(second, lab.compute(second, one.plan))
    lab.hear({second}, Propose)
    lab.hear({first, second}, Prepare)
    lab.hear({first}, Vote)
    lab.bag.clear()
    assert [lab.members[n].chain[-1] for n in (first, second, third)] == [one, lab.start, lab.start]
    # Now `first` is stopped. The others move on, and must find the vote of `second`.
    lab.move(second, 1)
    lab.move(third, 1)
    lab.settle({second, third})
    assert one in lab.members[third].needs
    lab.carry_out(third, lab.compute(third, one.plan))
    lab.settle({second, third})
    assert [member.chain[-1].hash for member in lab.members] == [one.hash] * 3


def scattered_votes(ledger: Ledger) -> Lab:
    """A, B vote d0 in view 0; C votes d1 in view 1; E votes d0 in view 2; B, C, D vote d1 in view 3."""
    lab = Lab(6, founders=range(5), ledger=ledger)
    a, c, e, d, b = (lab.lead(view) for view in range(5))

    def prepared(value: Value, by: Collection[int], voting: Collection[int]) -> None:
        for number in by:
            lab.carry_out(number, lab.compute(number, value.plan))
        lab.hear(by, Propose)
        lab.hear(voting, Prepare)
        lab.bag = [entry for entry in lab.bag if entry[0] == 5]  # who only listens hears everything in the end

    d0 = lab.propose(a, "d0")
    prepared(d0, (a, b, c), (a, b))
    for view, leader, movers in ((1, c, (c, d, e)), (2, e, (a, d, e)), (3, d, (b, c, d))):
        for number in movers:
            lab.move(number, view)
        lab.hear({leader}, ViewChange)
        if view == 1:
            d1 = lab.propose(c, "d1")
            prepared(d1, movers, (c,))
        else:
            assert lab.machine(leader).proposed, "what was prepared is carried forward"
            prepared(d0 if view == 2 else d1, movers, (e,) if view == 2 else movers)
    listener = lab.machine(5)
    votes = [message for number, _, message in lab.bag if number == 5 and isinstance(message, Vote)]
    assert [(vote.view, vote.value) for vote in votes] == [
        *[(0, d0.hash)] * 2, (1, d1.hash), (2, d0.hash), *[(3, d1.hash)] * 3
    ]  # fmt: skip
    lab.hear({5}, RoundMessage)
    assert listener.certificate is not None
    assert (listener.certificate.value, listener.certificate.view) == (d1, 3)
    assert set(listener.certificate.signers) == {lab.members[n].peer for n in (b, c, d)}
    return lab


def test_votes_of_different_views_are_not_counted_together() -> None:
    scattered_votes(Ledger(forks_only=True))
    with pytest.raises(Violation, match="fork"):
        scattered_votes(Ledger(forks_only=True, one_view=False))


def reproposed_then_split() -> Lab:
    """View 0 certifies with the original planner at one member; view 1 re-proposes; then 2|2 in the next round."""
    lab = Lab(4, ledger=Ledger(forks_only=True))
    order = [lab.lead(view) for view in range(4)]
    first, second, third, fourth = order
    one = lab.propose(first, "one")
    for number in (second, third):
        lab.carry_out(number, lab.compute(number, one.plan))
    lab.hear({second, third}, Propose)
    lab.hear({first, second, third}, Prepare)
    lab.hear({first}, Vote)  # `first` alone sees the certificate of view 0
    assert lab.members[first].chain[-1] == one
    lab.bag.clear()
    lab.carry_out(fourth, lab.compute(fourth, one.plan))
    for number in (second, third, fourth):
        lab.move(number, 1)
    lab.settle({second, third, fourth})
    return lab


def test_reproposal_keeps_the_planner_so_that_a_split_has_one_half_that_goes_on() -> None:
    lab = reproposed_then_split()
    ends = {member.chain[-1].hash for member in lab.members}
    assert len(ends) == 1
    previous = lab.members[0].chain[-1]
    planner = lab.number(previous.planner)
    assert planner == lab.lead(0)
    halves = [{planner, (planner + 1) % 4}, {(planner + 2) % 4, (planner + 3) % 4}]
    names = [[lab.members[i].peer for i in half] for half in halves]
    assert [is_quorum(previous, half) for half in names] == [True, False]
    for half in halves:
        view = next(v for v in range(1, 5) if lab.lead(v, previous) in half)
        for number in sorted(half):
            lab.move(number, view)
        lab.settle(half)
        leader = lab.lead(view, previous)
        assert lab.machine(leader).free_to_plan == (half is halves[0])
        if half is halves[0]:
            value = lab.propose(leader, "two")
            for number in half - {leader}:
                lab.carry_out(number, lab.compute(number, value.plan))
            lab.settle(half)
    assert sorted(len(member.chain) for member in lab.members) == [2, 2, 3, 3]


def test_member_that_voted_may_not_leave_this_round() -> None:
    lab = Lab(3)
    lab.propose(lab.lead(0), "one")
    machine = lab.machine(lab.lead(0))
    assert machine.leave() == []
    assert machine.standing is Standing.OPEN
    mover = lab.machine(lab.lead(1))
    mover.move_to(2)
    assert mover.leave() == []


def test_member_that_left_signs_nothing_even_after_a_restart() -> None:
    lab = Lab(3)
    leaver, leader = lab.lead(1), lab.lead(0)
    lab.carry_out(leaver, lab.machine(leaver).leave())
    lab.crash(leaver)
    lab.restart(leaver)
    value = lab.propose(leader, "one")
    machine = lab.machine(leaver)
    assert machine.standing is Standing.LEFT
    assert machine.computed(honest_report(lab.start, value.plan)) == []
    assert machine.receive(lab.members[leader].peer, propose(lab, 0, value)) == []
    assert machine.move_to(1) == []
    assert [type(m) for m in machine.current()] == [Leave]


def test_leave_that_is_counted_lets_the_rest_go_on_without_it() -> None:
    lab = Lab(2)
    leaver = lab.lead(1)
    lab.carry_out(leaver, lab.machine(leaver).leave())
    lab.settle()
    rest = lab.lead(0)
    value = lab.propose(rest, "one", members=[lab.members[rest].peer])
    assert value.leaves == (lab.members[leaver].peer,)
    assert lab.members[rest].chain[-1] == value


def test_member_killed_after_voting_votes_the_same_when_it_returns() -> None:
    lab = Lab(3)
    leader, voter = lab.lead(0), lab.lead(1)
    one = lab.propose(leader, "one")
    message = propose(lab, 0, one)
    lab.carry_out(voter, lab.compute(voter, one.plan))
    lab.carry_out(voter, lab.machine(voter).receive(lab.members[leader].peer, message), stop_after=1)
    assert [record.kind for record in lab.members[voter].log] == ["prepare"]
    lab.bag.clear()
    lab.restart(voter)
    sent = [m for _, sender, m in lab.bag if isinstance(m, Prepare) and sender == lab.members[voter].peer]
    assert set(sent) == {prepare_of(lab.members[voter].identity, 0, one)}
    machine = lab.machine(voter)
    prepare = prepare_of(lab.members[leader].identity, 0, one)
    lab.carry_out(voter, machine.receive(lab.members[leader].peer, prepare), stop_after=1)
    assert [record.kind for record in lab.members[voter].log] == ["prepare", "vote"]
    lab.bag.clear()
    lab.restart(voter)
    sent = [m for _, sender, m in lab.bag if isinstance(m, Vote) and sender == lab.members[voter].peer]
    assert set(sent) == {vote_of(lab.members[voter].identity, 0, one)}
    # It holds itself to that vote: another value in this view is refused, and a view change carries it.
    lab.carry_out(voter, lab.machine(voter).receive(lab.members[leader].peer, message))
    changes = messages_in(lab.machine(voter).move_to(1), ViewChange)
    carried = [c.prepared for c in changes if isinstance(c, ViewChange)]
    assert [(c.value, c.prepared.view) for c in carried if c is not None] == [(one, 0)]


def test_lead_restarted_before_it_voted_stands_by_its_proposal() -> None:
    lab = Lab(3)
    leader = lab.lead(0)
    machine = lab.machine(leader)
    one = value_of(lab.start, plan_hash("one"), lab.members[leader].peer)
    machine.computed(honest_report(lab.start, one.plan))
    lab.carry_out(leader, machine.propose(one), stop_after=1)  # written, not sent
    lab.restart(leader)
    again = lab.machine(leader)
    assert again.current() == [propose(lab, 0, one)]
    assert not again.free_to_plan
    # Votes of the others alone make the certificate here too.
    others = [member for member in lab.members if member.peer != lab.members[leader].peer]
    assert again.receive(others[0].peer, vote_of(others[0].identity, 0, one)) == []
    effects = again.receive(others[1].peer, vote_of(others[1].identity, 0, one))
    assert [type(e) for e in effects] == [Decided]


@pytest.mark.parametrize("members", [1, 2])
def test_member_that_is_a_quorum_finds_its_own_vote_enough_when_it_returns(members: int) -> None:
    """Killed between its vote and the certificate: nobody else has to say anything, and no patience has to end."""
    lab = Lab(members)
    planner = lab.number(lab.start.planner)
    leading = next(view for view in range(members) if lab.lead(view) == planner)
    lab.move(planner, leading)
    machine = lab.machine(planner)
    value = value_of(lab.start, plan_hash("one"), lab.members[planner].peer)
    machine.computed(honest_report(lab.start, value.plan))
    effects = machine.propose(value)
    written = [type(effect) for effect in effects].index(Decided)
    lab.carry_out(planner, effects, stop_after=written)
    assert [record.kind for record in lab.members[planner].log][-3:] == ["propose", "prepare", "vote"]
    again = Agreement(identity=lab.members[planner].identity, previous=lab.start)
    again.restore(lab.members[planner].log)
    assert again.is_prepared
    (decided,) = again.resume()
    assert isinstance(decided, Decided)
    assert decided.certificate.value == value
    assert again.resume() == []
    lab.restart(planner)
    assert lab.members[planner].chain[-1] == value


def test_member_that_may_have_forgotten_what_it_signed_signs_nothing_and_learns_the_outcome() -> None:
    lab = Lab(3)
    mute = lab.lead(1)
    lab.members[mute].log.append(DurableRecord(kind=ABSTAIN, term=lab.start.next_term, round=1))
    lab.restart(mute)
    machine = lab.machine(mute)
    assert machine.abstains
    assert not machine.is_prepared
    leader = lab.lead(0)
    one = lab.propose(leader, "one")
    proposal = propose(lab, 0, one)
    effects = machine.receive(lab.members[leader].peer, proposal)
    assert not machine.is_prepared, "it is only proposed"
    effects += machine.computed(honest_report(lab.start, one.plan))
    effects += machine.move_to(1) + machine.leave() + machine.resume()
    for peer in lab.start.members:
        if peer != machine._me:
            effects += machine.receive(peer, change(lab, lab.number(peer), 1))
    assert effects == []
    assert machine.current() == []
    assert not machine.leading
    for number in (lab.lead(0), lab.lead(2)):
        lab.carry_out(number, lab.compute(number, one.plan))
    lab.settle()
    assert lab.members[mute].chain[-1] == one
    assert [record.kind for record in lab.members[mute].log] == [ABSTAIN]
    assert not lab.machine(mute).abstains


def test_last_planner_of_two_goes_on_alone() -> None:
    lab = Lab(2)
    planner = lab.number(lab.start.planner)
    lab.crash(1 - planner)
    leading = next(view for view in range(1, 3) if lab.lead(view) == planner)
    lab.move(planner, leading)
    assert is_quorum(lab.start, {lab.members[planner].peer})
    assert lab.machine(planner).free_to_plan
    value = lab.propose(planner, "alone", members=[lab.members[planner].peer])
    assert lab.members[planner].chain[-1] == value


def test_death_of_the_last_planner_of_two_is_a_stall_until_it_returns() -> None:
    lab = Lab(2)
    planner = lab.number(lab.start.planner)
    other = 1 - planner
    lab.crash(planner)
    assert not is_quorum(lab.start, {lab.members[other].peer})
    for view in range(1, 5):
        lab.move(other, view)
        assert not lab.machine(other).free_to_plan
    if lab.lead(4) != other:
        lab.move(other, 5)
    assert lab.machine(other).leading
    lab.bag.clear()
    lab.restart(planner)
    lab.resend(other)
    lab.settle()
    assert lab.machine(planner).view == 0, "the word of one takes nobody along"
    lab.move(planner, lab.machine(other).view)  # as following.py has it: the other decides nothing in a lower view
    lab.settle()
    value = lab.propose(other, "together")
    lab.carry_out(planner, lab.compute(planner, value.plan))
    lab.settle()
    assert [member.chain[-1] for member in lab.members] == [value, value]


def test_two_of_three_dead_is_a_stall_until_one_returns() -> None:
    lab = Lab(3)
    alone, back = lab.lead(0), lab.lead(1)
    value = lab.propose(alone, "one")
    for view in range(1, 4):
        lab.move(alone, view)
    assert not is_quorum(lab.start, {lab.members[alone].peer})
    assert not lab.machine(alone).free_to_plan
    assert lab.members[alone].chain[-1] == lab.start
    lab.restart(back)
    lab.bag.clear()
    lab.resend(alone)
    lab.settle({alone, back})
    assert lab.machine(back).view == 0
    lab.move(back, 3)  # as following.py has it
    lab.settle({alone, back})  # with a quorum in it, the lead, whose value it was, is free to propose it anew
    lab.carry_out(back, lab.compute(back, value.plan))
    lab.carry_out(alone, lab.machine(alone).propose(value))
    lab.settle({alone, back})
    assert lab.members[alone].chain[-1] == lab.members[back].chain[-1] == value


def test_stale_lead_is_carried_along_by_a_quorum() -> None:
    lab = Lab(5)
    for number in range(2):
        lab.move(number, 7)
    lab.settle()
    assert [lab.machine(i).view for i in range(5)] == [7, 7, 0, 0, 0], "two of five take nobody along"
    lab.move(2, 7)
    for number in range(3):
        lab.resend(number)
    lab.settle()
    assert [lab.machine(i).view for i in range(5)] == [7] * 5


def test_new_lead_takes_the_vote_of_the_highest_view() -> None:
    lab = Lab(5)
    order = [lab.lead(view) for view in range(5)]
    low, high = (value_of(lab.start, plan_hash(n), lab.members[order[i]].peer) for i, n in enumerate("ab"))
    machine = lab.machine(order[2])
    machine.move_to(2)
    carried = {order[0]: prepared_value(lab, 0, low), order[1]: prepared_value(lab, 1, high)}
    assert not machine.is_prepared
    for number in order[:2]:
        assert not machine.proposed
        effects = machine.receive(lab.members[number].peer, change(lab, number, 2, carried[number]))
        assert machine.is_prepared
    (proposal,) = messages_in(effects, Propose)
    assert isinstance(proposal, Propose)
    assert (proposal.view, proposal.value) == (2, high)
    assert proposal.prepared == carried[order[1]].prepared
    assert {one.peer for one in proposal.moves.changes} == {lab.members[n].peer for n in order[:3]}


def test_lead_is_free_to_plan_once_a_quorum_is_in_its_view() -> None:
    lab = Lab(3)
    leader, other = lab.lead(1), lab.lead(2)
    machine = lab.machine(leader)
    machine.move_to(1)
    assert not machine.free_to_plan
    assert machine.receive(lab.members[other].peer, change(lab, other, 1)) == []
    assert machine.free_to_plan


def test_free_lead_that_hears_of_a_prepared_value_before_it_proposes_carries_it_forward_by_its_proof() -> None:
    lab = Lab(4)
    leader, *others = (lab.lead(view) for view in (1, 2, 3, 0))
    machine = lab.machine(leader)
    machine.move_to(1)
    for number in others[:2]:
        machine.receive(lab.members[number].peer, change(lab, number, 1))
    assert machine.free_to_plan
    value = value_of(lab.start, plan_hash("a"), lab.members[others[2]].peer)
    carried = prepared_value(lab, 0, value)
    late = change(lab, others[2], 1, carried)
    (proposal,) = messages_in(machine.receive(lab.members[others[2]].peer, late), Propose)
    assert (proposal.view, proposal.value, proposal.prepared) == (1, value, carried.prepared)
    assert {one.peer for one in proposal.moves.changes} == {member.peer for member in lab.members}
    assert not machine.free_to_plan
    follower = lab.machine(others[0])
    follower.computed(honest_report(lab.start, value.plan))
    assert messages_in(follower.receive(lab.members[leader].peer, proposal), Prepare)


def test_lead_that_has_proposed_by_itself_proposes_nothing_else_whatever_it_hears() -> None:
    lab = Lab(4)
    leader, *others = (lab.lead(view) for view in (1, 2, 3, 0))
    machine = lab.machine(leader)
    machine.move_to(1)
    for number in others[:2]:
        machine.receive(lab.members[number].peer, change(lab, number, 1))
    own = value_of(lab.start, plan_hash("b"), lab.members[leader].peer)
    assert [one.value for one in messages_in(machine.propose(own), Propose)] == [own]
    carried = prepared_value(lab, 0, value_of(lab.start, plan_hash("a"), lab.members[others[2]].peer))
    assert machine.receive(lab.members[others[2]].peer, change(lab, others[2], 1, carried)) == []


def test_restore_passes_over_other_rounds_and_terms() -> None:
    lab = Lab(3)
    machine = Agreement(identity=lab.members[0].identity, previous=lab.start)
    other_term = msgspec.structs.replace(lab.start.term, rollbacks=1)
    machine.restore(
        [
            DurableRecord(kind="promise", term=lab.start.term, round=2, view=9),
            DurableRecord(kind="promise", term=other_term, round=1, view=8),
            DurableRecord(kind="promise", term=lab.start.term, round=1, view=3),
        ]
    )
    assert machine.view == 3
