"""Bans: decided by certificates alone, on evidence that every voter verified, and over when the manifest says so."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from shoal.lab.signed import prepare_of, propose_of, vote_of
from shoal.protocol.agreement import Agreement, Broadcast, Decided
from shoal.protocol.bans import NeedEvidence, Register, may_ban, named, with_bans
from shoal.protocol.certificate import genesis
from shoal.protocol.chain import Chain
from shoal.protocol.effects import CloseOff, StartReduce
from shoal.protocol.errors import RemoteError
from shoal.protocol.facts import Gathering
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.messages import (
    MEMBER_LIMIT,
    Ban,
    Certificate,
    Prepare,
    Propose,
    Report,
    Term,
    Value,
    domain_hash,
)
from shoal.protocol.round import RoundMachine
from shoal.protocol.terms import make_rebase
from shoal.protocol.voting import lead_order
from shoal.protocol.wire import canonical, decode
from tests.manifests import manifest_of
from tests.protocol.lab import honest_report, plan_hash, value_of
from tests.protocol.round_machines import contribution, machines_of

IDENTITIES = sorted((Identity.from_seed(bytes([n]) * 32) for n in range(4)), key=lambda one: one.peer_id)
PEERS = [one.peer_id for one in IDENTITIES]
LIAR = PEERS[3]
PROOF = domain_hash("proof")
START = genesis(domain_hash("swarm"), PEERS)


def banning(previous: Value, name: str = "plan", proof: bytes = PROOF) -> Value:
    """A value after `previous` that bans the liar."""
    lead = lead_order(previous)[0]
    return with_bans(value_of(previous, plan_hash(name), lead, signing=IDENTITIES), {proof: LIAR}, (), [LIAR])


def certificate(value: Value) -> Certificate:
    votes = {one.peer_id: vote_of(one, 0, value) for one in IDENTITIES if one.peer_id != LIAR}
    return Certificate(
        value=value,
        view=0,
        signers=tuple(votes),
        signatures=tuple(vote.signature for vote in votes.values()),
    )


def chain_of(ban_rounds: int) -> Chain:
    return Chain(START, PEERS[0], manifest=manifest_of(PEERS, {"audit": {"ban_rounds": ban_rounds}}, admission="open"))


def propose(value: Value) -> Propose:
    return propose_of(next(one for one in IDENTITIES if one.peer_id == value.planner), 0, value)


def lead_and_voter() -> tuple[PeerId, Identity]:
    """Who leads view 0 of the first round, and a member that does not and is no liar."""
    leader = Agreement(identity=IDENTITIES[0], previous=START).lead(0)
    return leader, next(one for one in IDENTITIES if one.peer_id not in (leader, LIAR))


def test_value_with_bans_has_no_banned_member_and_one_form() -> None:
    value = banning(START)
    assert LIAR not in value.members
    assert [ban.peer for ban in named(value)] == [LIAR]
    assert may_ban(value, ())
    assert not may_ban(value, [LIAR]), "a second ban while the first lasts"
    assert not may_ban(value_of(START, plan_hash("p"), PEERS[0]), [LIAR]), "a banned member"
    kept = msgspec.structs.replace(value, members=START.members)
    assert not may_ban(kept, ())
    twice = msgspec.structs.replace(value, bans=(Ban(LIAR, PROOF), Ban(LIAR, domain_hash("other"))))
    assert not may_ban(twice, ())
    assert value.hash != value_of(START, plan_hash("plan"), START.planner, members=value.members).hash


def test_member_votes_for_a_ban_only_once_it_holds_the_evidence() -> None:
    leader, voter = lead_and_voter()
    value = banning(START)
    machine = Agreement(identity=voter, previous=START)
    machine.computed(honest_report(START, value.plan))
    effects = machine.receive(leader, propose(value))
    assert [effect for effect in effects if isinstance(effect, NeedEvidence)]
    assert not any(isinstance(effect, Broadcast) for effect in effects)
    assert not any(isinstance(effect, Broadcast) for effect in machine.proven(domain_hash("unrelated"), LIAR))
    assert not any(isinstance(effect, Broadcast) for effect in machine.proven(PROOF, PEERS[0])), "against another"
    accepted = machine.proven(PROOF, LIAR)
    assert [type(e.message) for e in accepted if isinstance(e, Broadcast)] == [Prepare]


def test_evidence_alone_changes_no_quorum() -> None:
    """Two of four, without the last planner, are none: that they hold evidence against the fourth makes them none."""
    machine = Agreement(identity=IDENTITIES[1], previous=START)
    machine.proven(PROOF, LIAR)
    value = value_of(START, plan_hash("plan"), machine.lead(0))
    machine.computed(honest_report(START, value.plan))
    effects = machine.receive(machine.lead(0), propose(value))
    for step in (prepare_of, vote_of):
        effects += machine.receive(PEERS[2], step(IDENTITIES[2], 0, value))
    assert [type(e.message) for e in effects if isinstance(e, Broadcast)] == [Prepare]
    assert not any(isinstance(effect, Decided) for effect in effects)
    last = [machine.receive(LIAR, step(IDENTITIES[3], 0, value)) for step in (prepare_of, vote_of)]
    assert [sum(isinstance(e, Decided) for e in effects) for effects in last] == [0, 1]


def test_value_with_a_banned_member_is_refused_in_every_message() -> None:
    leader, voter = lead_and_voter()
    machine = Agreement(identity=voter, previous=START, banned=[LIAR])
    value = value_of(START, plan_hash("plan"), leader)
    with pytest.raises(RemoteError, match="banned"):
        machine.receive(leader, propose(value))
    with pytest.raises(RemoteError, match="banned"):
        machine.receive(leader, certificate(value))


def test_certificate_with_bans_needs_no_evidence_and_changes_the_electorate() -> None:
    _, voter = lead_and_voter()
    value = banning(START)
    machine = Agreement(identity=voter, previous=START)
    assert [type(effect) for effect in machine.receive(PEERS[0], certificate(value))] == [Decided]
    chain = chain_of(0)
    start = chain.head
    value = banning(start)
    chain.extend(certificate(value))
    assert chain.banned.keys() == {LIAR}
    assert LIAR not in chain.recent_members(5)
    with pytest.raises(RemoteError, match="banned"):
        chain.extend(certificate(value_of(value, plan_hash("next"), PEERS[0], members=PEERS, signing=IDENTITIES)))
    assert chain.height == 1


def test_ban_ends_with_its_rounds_and_its_evidence_serves_once() -> None:
    chain = chain_of(2)
    value = banning(chain.head)
    chain.extend(certificate(value))
    assert chain.bans.covers(LIAR, (Term(), 1)), "what was done before the ban"
    assert not chain.bans.covers(LIAR, (Term(), 2))
    for number in (2, 3):
        assert chain.banned.keys() == {LIAR}
        chain.extend(certificate(value_of(chain.head, plan_hash(str(number)), PEERS[0], members=PEERS[:3])))
    assert not chain.banned
    chain.extend(certificate(value_of(chain.head, plan_hash("back"), PEERS[0], members=PEERS, signing=IDENTITIES)))
    again = banning(chain.head, name="again", proof=domain_hash("what it did since"))
    chain.extend(certificate(again))
    assert chain.banned.keys() == {LIAR}
    assert chain.bans.covers(LIAR, (Term(), 5))


def test_rebase_pardons_whom_it_names() -> None:
    chain = chain_of(0)
    chain.extend(certificate(banning(chain.head)))
    chain.extend(make_rebase(IDENTITIES[0], chain.head, PEERS[:3]))
    assert chain.banned.keys() == {LIAR}
    chain.extend(make_rebase(IDENTITIES[0], chain.head, PEERS))
    assert not chain.banned


def test_ban_is_rebuilt_from_the_entries_alone() -> None:
    chain = chain_of(5)
    value = banning(chain.head)
    chain.extend(certificate(value))
    other = chain_of(5)
    for entry in chain.after(0, 10):
        other.extend(entry)
    assert other.banned == chain.banned
    register = Register(5)
    register.follow(value, pardons=False)
    assert register.banned(6).keys() == {LIAR}
    assert register.banned(7) == {}


# -- what a round makes of it --------------------------------------------------------------------------------


def lead_and_rest(count: int) -> tuple[RoundMachine, list[RoundMachine]]:
    """The first round of so many members; the lead comes apart."""
    _, machines = machines_of(count)
    leader = next(machine for machine in machines if machine.me == machine.agreement.lead(0))
    return leader, [machine for machine in machines if machine is not leader]


def planned_by(leader: RoundMachine, others: Sequence[RoundMachine]) -> set[PeerId]:
    """Who is in the plan that the lead makes once all have announced their contributions to it."""
    effects = leader.ready(contribution(leader), 1.0)
    for other in others:
        effects += leader.receive(other.me, contribution(other), 1.0)
    (plan,) = [effect.plan for effect in effects if isinstance(effect, StartReduce)]
    return {participant.peer for participant in plan.participants}


def test_who_is_proven_to_lie_is_not_planned_where_the_rest_are_a_quorum() -> None:
    leader, (liar, *rest) = lead_and_rest(4)
    leader.proven(PROOF, liar.me, 0.5)
    assert planned_by(leader, [liar, *rest]) == {leader.me, *(one.me for one in rest)}


def test_who_is_proven_to_lie_is_planned_where_there_is_no_quorum_without() -> None:
    leader, (liar, _) = lead_and_rest(3)
    leader.peers_alive([leader.me, liar.me], 0.4)
    leader.proven(PROOF, liar.me, 0.5)
    assert planned_by(leader, [liar]) == {leader.me, liar.me}


def test_who_is_proven_to_lie_during_a_reduction_is_evicted_from_it() -> None:
    leader, (liar, *rest) = lead_and_rest(4)
    assert liar.me in planned_by(leader, [liar, *rest])
    effects = [*leader.proven(PROOF, liar.me, 2.0), *leader.tick(3.0)]
    assert {effect.evicted for effect in effects if isinstance(effect, CloseOff)} == {frozenset({liar.me})}


def test_what_the_banned_announce_is_not_listened_to() -> None:
    gathering = Gathering(members=PEERS, returners=(), state=START.digest, banned=[LIAR])
    announced = contribution(lead_and_rest(2)[0], state=START.digest)
    for peer in (LIAR, PEERS[0]):
        gathering.receive(peer, announced)
    assert set(gathering.candidates(PEERS, ())) == {PEERS[0]}
    assert LIAR not in gathering.returners


@pytest.mark.usefixtures("paper_signatures")
def test_keys_that_take_no_part_fill_no_value_whatever_is_proven_of_them() -> None:
    """Anybody can make keys that lie; a value that banned more than it may name would be read by nobody."""
    leader, (liar, *rest) = lead_and_rest(4)
    planned_by(leader, [liar, *rest])
    for number in range(100):
        stranger = Identity.from_seed(bytes([9, number]) * 16).peer_id
        leader.proven(domain_hash(f"proof {number}"), stranger, 1.1)
    leader.proven(PROOF, liar.me, 1.1)
    plan = leader.plan
    assert plan is not None
    report = honest_report(leader.previous, plan.hash)
    for other in rest:
        leader.receive(other.me, report_by(other, report), 1.2)
    effects = [*leader.reduced(report, 1.2), *leader.tick(60.0)]
    (proposal,) = [e.message for e in effects if isinstance(e, Broadcast) and isinstance(e.message, Propose)]
    assert [ban.peer for ban in named(proposal.value)] == [liar.me]
    assert decode(canonical(proposal), Propose) == proposal
    many = {domain_hash(peer): peer for peer in (Identity.from_seed(bytes([8, n]) * 16).peer_id for n in range(100))}
    assert len(named(with_bans(proposal.value, many, (), list(many.values())))) == MEMBER_LIMIT


def report_by(machine: RoundMachine, report: Report) -> Report:
    return machine.agreement.sign_report(report)
