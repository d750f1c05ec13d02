"""Rollback and rebase: what holds, what is refused, and how a chain goes on in another term."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import pytest

from shoal.lab import signed
from shoal.lab.signed import change_of, prepared_by, propose_of
from shoal.protocol.agreement import Agreement, DurableRecord, Mismatch, NeedState
from shoal.protocol.certificate import check_certificate, follows, genesis
from shoal.protocol.chain import Chain, next_position
from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.messages import (
    NO_HASH,
    Certificate,
    Entry,
    PreparedValue,
    Propose,
    Rebase,
    Target,
    Term,
    Value,
    ViewChange,
)
from shoal.protocol.peering import CERTIFICATES_IN_ANSWER_LIMIT, ChainPart
from shoal.protocol.terms import check_rebase, is_consented, make_consent, make_rebase, make_rollback
from shoal.protocol.wire import canonical, decode
from tests.protocol.lab import SWARM, plan_hash, value_of

KEYS = sorted((Identity.from_seed(bytes([number]) * 32) for number in range(5)), key=lambda key: key.peer_id)
AUTHORITY = Identity.from_seed(b"a" * 32)
PEERS = [key.peer_id for key in KEYS]


def certified(value: Value, signers: Iterable[Identity] = KEYS) -> Certificate:
    return signed.certified(value, *signers)


def result(previous: Value, name: str, members: Sequence[PeerId] | None = None) -> Certificate:
    """The round after `previous` with some outcome."""
    value = value_of(previous, plan_hash(name), PEERS[0], members=members, signing=KEYS)
    return certified(value, [key for key in KEYS if key.peer_id in previous.members])


def back(previous: Value, target: Value, consenting: Sequence[Identity] = KEYS, **changed: Any) -> Value:
    """A rollback, from the round after `previous` to `target`."""
    where = Target(target.round, target.hash)
    consents = {key.peer_id: make_consent(key, previous, where, asked=True) for key in consenting}
    planner = changed.pop("planner", previous.members[0])
    value = make_rollback(previous, planner, where, consents, digest=target.digest)
    return msgspec.structs.replace(value, **changed) if changed else value


def chain_of(rounds: int, members: int = 3) -> Chain:
    chain = Chain(genesis(SWARM, PEERS[:members]), AUTHORITY.peer_id)
    for number in range(rounds):
        chain.extend(result(chain.head, f"first {number}"))
    return chain


def entries(chain: Chain) -> tuple[Entry, ...]:
    return chain.after(0, 99)


def again(chain: Chain) -> Chain:
    """A chain built from the entries of another, as after a restart or at a newcomer's."""
    built = Chain(chain.value(0), AUTHORITY.peer_id)
    for entry in entries(chain):
        built.extend(entry)
    return built


def goes_back(chain: Chain, round: int) -> Value:
    value = back(chain.head, chain.value(round), KEYS[:3])
    chain.extend(certified(value, KEYS[:3]))
    return value


# -- rollback ----------------------------------------------------------------------------------------------------


def test_chain_goes_on_from_the_round_that_it_went_back_to_in_the_next_term() -> None:
    chain = chain_of(5)
    first = [chain.value(round) for round in range(6)]
    value = goes_back(chain, 2)
    assert (value.term, value.round, value.base) == (Term(0, 0), 6, first[5].hash)
    assert (chain.head, chain.standing, chain.height) == (value, first[2], 6)
    assert next_position(chain.head) == (Term(0, 1), 3)
    assert chain.on_branch(first[2])
    assert not chain.on_branch(first[3])
    assert first[3] in [entry.value for entry in entries(chain)]
    with pytest.raises(IndexError):
        chain.value(3)

    second = []
    for number in range(2):
        chain.extend(result(chain.head, f"second {number}"))
        second.append(chain.head)
    assert [(v.term, v.round) for v in second] == [(Term(0, 1), 3), (Term(0, 1), 4)]
    assert second[0].base == value.hash
    assert [chain.value(round) for round in range(5)] == [*first[:3], *second]
    assert (chain.standing, chain.height) == (chain.head, 8)
    copy = again(chain)
    assert (copy.head, copy.standing, entries(copy)) == (chain.head, chain.standing, entries(chain))
    assert again(chain.back_to(first[4])).standing == first[4]


def test_rollback_keeps_the_electorate_that_decided_it_and_not_the_old_one() -> None:
    chain = chain_of(2)
    chain.extend(result(chain.head, "handover", members=PEERS[1:4]))
    old, deciding = chain.value(1), chain.head
    assert set(old.members) != set(deciding.members)
    voters = [key for key in KEYS if key.peer_id in deciding.members]
    value = back(deciding, old, voters)
    assert value.members == deciding.members
    wrong = msgspec.structs.replace(value, members=old.members)
    assert follows(value, deciding)
    assert not follows(wrong, deciding)
    with pytest.raises(RemoteError, match="does not follow"):
        chain.extend(certified(wrong, voters))
    with pytest.raises(RemoteError, match="no quorum"):  # of the old electorate only one is left
        chain.extend(certified(value, KEYS[1:2]))
    chain.extend(certified(value, voters))
    with pytest.raises(RemoteError, match="no quorum"):
        chain.extend(certified(value_of(chain.head, plan_hash("x"), PEERS[0]), KEYS[:1]))
    chain.extend(certified(value_of(chain.head, plan_hash("x"), PEERS[0]), voters))


@pytest.mark.parametrize(
    "changed",
    [
        {"plan": plan_hash("p")},
        {"bitmaps": plan_hash("p")},
        {"tokens": 1},
        {"planner": PEERS[4]},
        {"term": Term(0, 1)},
        {"round": 4},
        {"base": NO_HASH},
        {"members": tuple(PEERS[:2])},
        {"leaves": tuple(PEERS[:1])},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_rollback_with_anything_else_does_not_follow(changed: dict[str, Any]) -> None:
    chain = chain_of(4)
    assert follows(back(chain.head, chain.value(2)), chain.head)
    assert not follows(back(chain.head, chain.value(2), **changed), chain.head)


def test_rollback_goes_back_to_a_certified_round_of_the_branch_only() -> None:
    chain = chain_of(4)
    abandoned = chain.value(3)
    value = chain.value(2)
    for wrong in (
        back(chain.head, chain.value(2), digest=plan_hash("other")),
        back(chain.head, msgspec.structs.replace(value, tokens=99)),
    ):
        with pytest.raises(RemoteError, match="goes back to what was not certified"):
            chain.extend(certified(wrong, KEYS[:3]))
    assert not follows(back(chain.head, msgspec.structs.replace(value, round=5)), chain.head)
    goes_back(chain, 2)
    for number in range(2):
        chain.extend(result(chain.head, f"second {number}"))
    with pytest.raises(RemoteError, match="goes back to what was not certified"):
        chain.extend(certified(back(chain.head, abandoned), KEYS[:3]))
    goes_back(chain, 2)  # the same state once more
    assert next_position(chain.head) == (Term(0, 2), 3)


def test_first_rollback_to_the_initial_state_certifies_it() -> None:
    initial = plan_hash("S(0)")
    chain = chain_of(3)
    origin, first = chain.value(0), chain.value(1)
    assert chain.digest(0) == NO_HASH
    with pytest.raises(RemoteError, match="goes back to what was not certified"):
        chain.extend(certified(back(chain.head, msgspec.structs.replace(origin, tokens=1), digest=initial), KEYS[:3]))
    chain.extend(certified(back(chain.head, origin, digest=initial), KEYS[:3]))
    assert next_position(chain.head) == (Term(0, 1), 1)
    assert (chain.standing, chain.digest(0)) == (origin, initial)
    assert not chain.on_branch(first)

    chain.extend(result(chain.head, "second"))
    assert chain.digest(1) == chain.value(1).digest
    for other in (plan_hash("another S(0)"), NO_HASH):
        with pytest.raises(RemoteError, match="goes back to what was not certified"):
            chain.extend(certified(back(chain.head, origin, digest=other), KEYS[:3]))
    chain.extend(certified(back(chain.head, origin, digest=initial), KEYS[:3]))
    assert next_position(chain.head) == (Term(0, 2), 1)
    assert again(chain).digest(0) == initial
    assert chain.back_to(origin).digest(0) == initial
    assert chain_of(3).back_to(origin, initial=initial).digest(0) == initial


def test_consents_of_half_are_a_quorum_only_with_the_planner_among_them() -> None:
    chain = chain_of(3, members=4)
    head, target = chain.head, chain.value(2)
    assert head.planner == PEERS[0]
    assert is_consented(back(head, target, [KEYS[0], KEYS[3]]), head)
    for others in ([KEYS[1], KEYS[2]], [KEYS[2], KEYS[3]], [KEYS[0]]):
        assert not is_consented(back(head, target, others), head)


def test_consents_of_a_quorum_are_verified() -> None:
    chain = chain_of(4)
    head, target = chain.head, chain.value(2)
    assert is_consented(back(head, target, KEYS[:2]), head)
    assert not is_consented(back(head, target, KEYS[1:2]), head)
    assert is_consented(result(head, "x").value, head)
    good = back(head, target, KEYS[:3])
    assert good.rollback
    for changed in (
        {"signatures": good.rollback.signatures[::-1]},
        {"signatures": good.rollback.signatures[:2]},
        {"consenting": (PEERS[0],) * 3},
        {"target": Target(1, chain.value(1).hash)},
    ):
        rollback = msgspec.structs.replace(good.rollback, **changed)
        assert not is_consented(msgspec.structs.replace(good, rollback=rollback), head)
    other = chain_of(3).head  # consents of another round are worth nothing in this one
    stale = back(other, target, KEYS[:3]).rollback
    assert not is_consented(msgspec.structs.replace(good, rollback=stale), head)


def propose(value: Value) -> Propose:
    return propose_of(next(key for key in KEYS if key.peer_id == value.planner), 0, value)


def test_member_votes_to_go_back_once_it_holds_that_state_and_a_quorum_consented() -> None:
    chain = chain_of(4)
    head = chain.head
    members = {peer: Agreement(identity=key, previous=head) for key in KEYS[:3] for peer in [key.peer_id]}
    lead = next(machine for machine in members.values() if machine.leading)
    voter = next(machine for machine in members.values() if machine is not lead)
    target = Target(2, chain.value(2).hash)
    value = back(head, chain.value(2), KEYS[:2], planner=lead._me)
    for consenting in (KEYS[:1], ()):
        few = back(head, chain.value(2), consenting, planner=lead._me)
        with pytest.raises(LocalError):
            lead.propose(few)
        with pytest.raises(RemoteError, match="without the consent of a quorum"):
            voter.receive(lead._me, propose(few))
        carried = PreparedValue(few, prepared_by(KEYS[:3], 0, few))
        change = change_of(next(key for key in KEYS if key.peer_id == lead._me), head, 1, carried)
        with pytest.raises(RemoteError, match="without the consent of a quorum"):
            voter.receive(lead._me, change)
    (need,) = voter.receive(lead._me, propose(value))
    assert need == NeedState(value)
    (mismatch,) = voter.holds(target, plan_hash("another digest"))
    assert mismatch == Mismatch(value)
    persist, prepare = voter.holds(target, value.digest)[:2]
    record = DurableRecord(kind="prepare", term=Term(), round=5, value=value)
    assert persist.record == record  # type: ignore[union-attr]
    assert prepare.message.value == value.hash  # type: ignore[union-attr]


def test_votes_of_the_abandoned_term_bind_nothing_in_the_round_of_the_same_number() -> None:
    chain = chain_of(4)
    abandoned = value_of(chain.value(2), plan_hash("abandoned"), PEERS[0])
    goes_back(chain, 2)
    prepared = prepared_by(KEYS, 4, abandoned)
    records = [
        DurableRecord(kind="prepare", term=Term(), round=3, view=4, value=abandoned),
        DurableRecord(kind="vote", term=Term(), round=3, view=4, value=abandoned, prepared=prepared),
        DurableRecord(kind="promise", term=Term(), round=3, view=7),
        DurableRecord(kind="leave", term=Term(), round=3),
    ]
    machine = Agreement(identity=KEYS[0], previous=chain.head)
    machine.restore(records)
    assert (machine.round, machine.view, machine.standing.value, machine.current()) == (3, 0, "open", [])
    mine = DurableRecord(kind="promise", term=Term(0, 1), round=3, view=2)
    machine.restore([*records, mine])
    assert machine.view == 2
    (change,) = machine.current()
    assert isinstance(change, ViewChange)
    assert (change.term, change.base, change.prepared) == (Term(0, 1), chain.head.hash, None)


# -- rebase ------------------------------------------------------------------------------------------------------


def test_rebase_takes_the_place_of_what_came_after_and_goes_on_with_its_electorate() -> None:
    long, short = chain_of(6), chain_of(4)
    rebase = make_rebase(AUTHORITY, short.head, PEERS[1:2])
    fourth, sixth = short.head, long.head
    for chain in (long, short):
        assert chain.extend(rebase)
        assert (chain.standing, chain.height) == (fourth, 5)
        assert next_position(chain.head) == (Term(1, 0), 5)
        assert chain.head.members == (PEERS[1],)
        assert chain.recent_members(9) == {PEERS[1]}  # whom it forgets is a joiner again
        assert chain.was_member(PEERS[0])  # but it has contributed
        assert chain.decided((Term(), 6)) == rebase  # what somebody hears who is still in the abandoned round
        assert not chain.extend(rebase)
    assert sixth not in [entry.value for entry in entries(long)]
    assert not long.on_branch(sixth)
    with pytest.raises(RemoteError, match="no quorum"):
        long.extend(certified(value_of(long.head, plan_hash("x"), PEERS[1]), KEYS[2:3]))
    for chain in (long, short):
        chain.extend(certified(value_of(chain.head, plan_hash("x"), PEERS[1]), KEYS[1:2]))
    assert entries(long) == entries(short)
    assert (long.head.term, long.head.round) == (Term(1, 0), 5)
    assert entries(again(long)) == entries(long)


def test_rebase_after_a_rollback_stands_on_the_same_state() -> None:
    chain = chain_of(5)
    goes_back(chain, 3)
    rebase = make_rebase(AUTHORITY, chain.head, PEERS[:1])
    assert (rebase.value.term, rebase.value.round) == (Term(1, 0), 3)
    chain.extend(rebase)
    assert (chain.standing, next_position(chain.head)) == (chain.value(3), (Term(1, 0), 4))
    chain.extend(certified(value_of(chain.head, plan_hash("x"), PEERS[0]), KEYS[:1]))
    value = back(chain.head, chain.value(3), KEYS[:1])
    chain.extend(certified(value, KEYS[:1]))
    assert next_position(chain.head) == (Term(1, 1), 4)
    assert entries(again(chain)) == entries(chain)


def test_rebase_is_the_authoritys_alone_and_stands_on_what_it_names() -> None:
    chain = chain_of(3)
    good = make_rebase(AUTHORITY, chain.head, PEERS[:2])
    check_rebase(good, chain.head, AUTHORITY.peer_id)
    with pytest.raises(RemoteError, match="did not sign"):
        chain.extend(make_rebase(KEYS[0], chain.head, PEERS[:2]))
    with pytest.raises(RemoteError, match="did not sign"):
        chain.extend(Rebase(value=msgspec.structs.replace(good.value, members=(PEERS[0],)), signature=good.signature))
    with pytest.raises(RemoteError, match="not known here"):
        chain.extend(make_rebase(AUTHORITY, chain_of(4).head, PEERS[:2]))
    for changed in ({"round": 2}, {"term": Term(2, 0)}, {"digest": NO_HASH}, {"tokens": 1}, {"planner": PEERS[1]}):
        value = msgspec.structs.replace(good.value, **changed)  # type: ignore[arg-type]
        with pytest.raises(RemoteError, match="does not stand"):
            chain.extend(Rebase(value=value, signature=good.signature))
    nobodys = Chain(chain.value(0))
    with pytest.raises(RemoteError, match="without an authority"):
        nobodys.extend(make_rebase(AUTHORITY, nobodys.head, PEERS[:1]))
    with pytest.raises(LocalError):
        make_rebase(AUTHORITY, chain.head, ())
    with pytest.raises(RemoteError, match="does not follow"):  # nor does a quorum's certificate make a rebase
        check_certificate(certified(good.value), chain.head)
    assert chain.height == 3


def test_of_two_rebases_to_one_term_the_first_seen_stands_and_the_contradiction_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    chain = chain_of(3)
    first, second = (make_rebase(AUTHORITY, chain.head, PEERS[n : n + 1]) for n in range(2))
    assert chain.extend(first)
    with caplog.at_level(logging.ERROR):
        assert not chain.extend(make_rebase(KEYS[0], chain.value(3), PEERS[1:2]))
        assert caplog.records == []  # anyone can write one that is not signed
        assert not chain.extend(second)
    (record,) = caplog.records
    assert "two rebases to term 1.0" in record.getMessage()
    assert chain.head == first.value


# -- serving -----------------------------------------------------------------------------------------------------


def follow(chain: Chain, donor: Chain) -> None:
    """Extend `chain` as a node does that asks `donor`."""
    while True:
        part = donor.after(chain.height, 2, chain.head.term.rebases)
        taken = [chain.extend(entry) for entry in part]
        if not any(taken) or chain.height >= donor.height:
            return


@pytest.mark.parametrize("rounds", range(8))
def test_whoever_is_behind_follows_through_rollbacks_and_rebases(rounds: int) -> None:
    donor = chain_of(5)
    goes_back(donor, 2)
    for number in range(2):
        donor.extend(result(donor.head, f"second {number}"))
    behind = Chain(donor.value(0), AUTHORITY.peer_id)
    for entry in donor.after(0, rounds):
        behind.extend(entry)
    follow(behind, donor)
    assert entries(behind) == entries(donor)


@pytest.mark.parametrize("rounds", range(9))
def test_whoever_went_on_in_an_abandoned_term_is_led_to_the_rebase(rounds: int) -> None:
    behind, donor = chain_of(rounds), chain_of(4)
    donor.extend(make_rebase(AUTHORITY, donor.head, PEERS[:2]))
    donor.extend(certified(value_of(donor.head, plan_hash("x"), PEERS[0]), KEYS[:2]))
    donor.extend(make_rebase(AUTHORITY, donor.head, PEERS[:1]))
    donor.extend(certified(value_of(donor.head, plan_hash("y"), PEERS[0]), KEYS[:1]))
    follow(behind, donor)
    assert entries(behind) == entries(donor)
    assert next_position(behind.head) == (Term(2, 0), 7)


def test_a_long_chain_holds_each_peer_s_name_once() -> None:
    """As they come from the wire, every entry has names of its own: twice as many strings as there are voters."""
    made = chain_of(4)
    goes_back(made, 2)
    made.extend(make_rebase(AUTHORITY, made.head, PEERS[:2]))
    made.extend(certified(value_of(made.head, plan_hash("x"), PEERS[0]), KEYS[:2]))
    founders = genesis(SWARM, tuple(map("".join, PEERS[:3])))  # other strings
    received = [decode(canonical(entry), type(entry)) for entry in entries(made)]
    chain = Chain(founders, AUTHORITY.peer_id)
    for entry in received:
        chain.extend(entry)
    assert entries(chain) == entries(made)
    assert [entry.value.hash for entry in entries(chain)] == [entry.value.hash for entry in entries(made)]
    named = [peer for entry in entries(chain) for peer in (*entry.value.members, entry.value.planner)]
    named += [peer for entry in entries(chain) if isinstance(entry, Certificate) for peer in entry.signers]
    assert len({id(peer) for peer in named}) == len(set(named)) == 3


def test_an_answer_full_of_rollbacks_fits_into_its_limit() -> None:
    chain = chain_of(3)
    value = back(chain.head, chain.value(1), KEYS[:3])
    assert value.rollback
    peers = tuple(PEERS[:1] * 64)
    rollback = msgspec.structs.replace(value.rollback, consenting=peers, signatures=(bytes(64),) * 64)
    proofs = {"leave_signatures": (bytes(64),) * 64, "report_signatures": (bytes(64),) * 64}
    large = msgspec.structs.replace(value, members=peers, leaves=peers, rollback=rollback, **proofs)
    certificate = Certificate(value=large, view=0, signers=peers, signatures=(bytes(64),) * 64)
    part = ChainPart(certificates=(certificate,) * CERTIFICATES_IN_ANSWER_LIMIT, head=9)
    assert len(canonical(part)) < 4 << 20
    assert len(canonical(certificate)) < 1 << 20
