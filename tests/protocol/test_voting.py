"""Named voters: who votes, who leads and who is a member, where these are not the same; and by which fault model."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path

import msgspec
import pytest

from shoal.lab.signed import (
    certified,
    change_of,
    leave_of,
    prepare_of,
    prepared_by,
    propose_of,
    report_of,
    signed_report,
    vote_of,
)
from shoal.protocol.agreement import Agreement, AgreementEffect, Broadcast, Decided
from shoal.protocol.certificate import LeaveCost, check_certificate, follows, genesis, has_proofs, leave_cost
from shoal.protocol.chain import Chain
from shoal.protocol.errors import ConfigError, RemoteError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.manifest import Manifest, parse_manifest, render_manifest
from shoal.protocol.messages import Prepare, Target, Value, ViewChange, Vote
from shoal.protocol.terms import is_consented, make_consent, make_rebase, make_rollback
from shoal.protocol.view_change import is_prepared, make_moves
from shoal.protocol.voting import FaultModel, Voting, are_enough, common_view, is_quorum, lead, lead_order
from tests.protocol.lab import SWARM, plan_hash, value_of

ROOT = Path(__file__).parents[2]

FOUNDERS = [Identity.from_seed(bytes([number]) * 32) for number in range(4)]
STRANGERS = [Identity.from_seed(bytes([number]) * 32) for number in range(10, 15)]
AUTHORITY = Identity.from_seed(bytes([99]) * 32)
KEYS = {one.peer_id: one for one in (*FOUNDERS, *STRANGERS)}


def ids(some: Sequence[Identity]) -> tuple[PeerId, ...]:
    return tuple(sorted(one.peer_id for one in some))


def voting_of(count: int, faults: FaultModel = FaultModel.CRASH) -> Voting:
    return Voting(faults, ids(FOUNDERS[:count]))


def after_strangers(count: int) -> Value:
    """A value after which all strangers are members too, and more of them than of the voters."""
    start = genesis(SWARM, [one.peer_id for one in FOUNDERS[:count]])
    return msgspec.structs.replace(start, members=ids([*FOUNDERS[:count], *STRANGERS]))


def manifest_of(founders: Sequence[Identity], voters: str = "named", faults: str = "crash") -> Manifest:
    named = ", ".join(f'"{one.peer_id}"' for one in founders)
    return parse_manifest(
        f"[swarm]\nname = 'test'\nfounders = [{named}]\nauthority = '{AUTHORITY.peer_id}'\n[workload]\nname = 'text'\n"
        f"[sync]\ninner_steps = 1\n[membership]\nvoters = '{voters}'\n[agreement]\nfaults = '{faults}'\n"
    )


def subsets(peers: Sequence[PeerId]) -> Iterator[tuple[PeerId, ...]]:
    for size in range(len(peers) + 1):
        yield from combinations(peers, size)


class Round:
    """A round of named voters, in which strangers contribute too; `order` has the voters as they lead."""

    def __init__(self, voters: int = 3, faults: FaultModel = FaultModel.CRASH) -> None:
        self.voting = voting_of(voters, faults)
        self.previous = after_strangers(voters)
        self.order = [KEYS[peer] for peer in lead_order(self.previous, voting=self.voting)]

    def machine(self, identity: Identity) -> Agreement:
        return Agreement(identity=identity, previous=self.previous, voting=self.voting)

    def value(self, members: Sequence[PeerId] | None = None, *, planner: int = 0) -> Value:
        return value_of(self.previous, plan_hash("x"), self.order[planner].peer_id, members, signing=[*KEYS.values()])

    def reduced(self, identity: Identity, value: Value) -> Agreement:
        """The machine of one that computed what `value` says, of a plan in which everybody is."""
        machine = self.machine(identity)
        machine.computed(report_of(value), self.previous.members)
        return machine


def said(effects: Sequence[AgreementEffect]) -> list[object]:
    return [effect.message for effect in effects if isinstance(effect, Broadcast)]


# -- who decides -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "faults", "needed"), [(1, "crash", 1), (3, "crash", 2), (4, "lying", 3)])
def test_quorum_is_of_the_named_voters_whoever_else_contributes_and_whoever_leaves(
    count: int, faults: str, needed: int
) -> None:
    previous, voting = after_strangers(count), voting_of(count, FaultModel(faults))
    strangers = ids(STRANGERS)
    assert not is_quorum(previous, strangers, voting=voting)
    for some in subsets(voting.named):
        for leaves in ((), voting.named[-1:], strangers):
            assert is_quorum(previous, [*some, *strangers], leaves, voting=voting) == (len(some) >= needed)


def test_half_of_named_voters_decide_with_the_last_planner_among_them() -> None:
    previous, voting = after_strangers(4), voting_of(4)
    others = [peer for peer in voting.named if peer != previous.planner]
    assert is_quorum(previous, [previous.planner, others[0]], voting=voting)
    assert not is_quorum(previous, [*others[:2], *ids(STRANGERS)], voting=voting)


@pytest.mark.parametrize("faults", list(FaultModel))
def test_count_that_is_always_enough_is_a_quorum_whoever_is_in_it(faults: FaultModel) -> None:
    voting = voting_of(4, faults)
    previous = msgspec.structs.replace(after_strangers(4), planner=STRANGERS[0].peer_id)
    for some in subsets(voting.named):
        assert are_enough(len(some), 4, faults) == is_quorum(previous, some, voting=voting)


def test_named_voters_lead_in_turn_and_nobody_else_does() -> None:
    previous, voting = after_strangers(3), voting_of(3)
    order = lead_order(previous, voting=voting)
    assert sorted(order) == list(voting.named)
    assert [lead(previous, view, voting=voting) for view in range(6)] == [*order, *order]


def test_contributors_vote_where_nobody_is_named() -> None:
    previous, voting = after_strangers(2), Voting()
    assert voting.electorate(previous) == voting.may_leave(previous) == previous.members
    assert voting.everyone(previous) == set(previous.members)
    assert voting.rebased(genesis(SWARM, ids(FOUNDERS))) == voting


def test_certificate_of_strangers_is_refused_however_many_they_are() -> None:
    previous, voting = after_strangers(3), voting_of(3)
    value = value_of(previous, plan_hash("x"), FOUNDERS[0].peer_id)
    check_certificate(certified(value, *FOUNDERS[:2]), previous, voting=voting)
    for signing, why in (
        ([FOUNDERS[0], *STRANGERS], "no quorum"),
        ([*FOUNDERS[:2], STRANGERS[0]], "who has no vote"),
    ):
        with pytest.raises(RemoteError, match=why):
            check_certificate(certified(value, *signing), previous, voting=voting)
    check_certificate(certified(value, FOUNDERS[0], *STRANGERS), previous)  # where contributors vote they decide


def test_value_is_none_without_a_quorum_of_voters_among_its_members() -> None:
    previous, voting = after_strangers(3), voting_of(3)
    voters, strangers = voting.named, ids(STRANGERS)
    for members, holds in (([*voters[:2], *strangers], True), ([voters[1], *strangers], False)):
        value = value_of(previous, plan_hash("x"), voters[0], members)
        assert has_proofs(value, previous, voting=voting) is holds


def test_consents_of_strangers_take_nothing_back() -> None:
    previous, voting = msgspec.structs.replace(after_strangers(3), round=5), voting_of(3)
    target = Target(2, plan_hash("a certificate"))
    everyone = {one.peer_id: make_consent(one, previous, target, asked=True) for one in (*FOUNDERS[:3], *STRANGERS)}
    strangers = {peer: consent for peer, consent in everyone.items() if peer in ids(STRANGERS)}
    planner = FOUNDERS[0].peer_id
    wanted = make_rollback(previous, planner, target, everyone, digest=plan_hash("state"), voting=voting)
    assert wanted.rollback
    assert wanted.rollback.consenting == voting.named
    assert wanted.members == previous.members, "who contributed goes on contributing"
    assert follows(wanted, previous, voting=voting)
    assert is_consented(wanted, previous, voting=voting)
    by_strangers = make_rollback(previous, planner, target, strangers, digest=plan_hash("state"))
    assert is_consented(by_strangers, previous)
    assert not is_consented(by_strangers, previous, voting=voting)
    taken_over = msgspec.structs.replace(wanted, planner=STRANGERS[0].peer_id)
    assert not follows(taken_over, previous, voting=voting)


def test_view_in_which_the_living_meet_is_one_of_enough_voters() -> None:
    previous, voting = after_strangers(3), voting_of(3)
    promised = {voting.named[1]: 4}
    living = {*voting.named[1:], *ids(STRANGERS)}
    assert common_view(previous, 1, promised, living, (), voting=voting) == 4
    assert common_view(previous, 1, promised, living, ()) == 1, "contributors would meet without it"


# -- what one member does ----------------------------------------------------------------------------------------


def test_stranger_signs_nothing_and_learns_the_outcome() -> None:
    round = Round()
    value, one = round.value(), STRANGERS[0]
    machine = round.reduced(one, value)
    assert not machine.votes
    assert not said(machine.receive(round.order[0].peer_id, propose_of(round.order[0], 0, value)))
    assert not machine.move_to(1)
    assert not machine.leave()
    for voter in round.order[:2]:
        effects = machine.receive(voter.peer_id, vote_of(voter, 0, value))
    assert [type(effect) for effect in effects] == [Decided]


def test_words_of_strangers_count_for_nothing() -> None:
    round = Round()
    value = round.value()
    machine = round.reduced(round.order[1], value)
    machine.receive(round.order[0].peer_id, propose_of(round.order[0], 0, value))
    for stranger in STRANGERS:
        for message in (
            prepare_of(stranger, 0, value),
            vote_of(stranger, 0, value),
            change_of(stranger, round.previous, 1),
            leave_of(stranger, round.previous),
        ):
            assert machine.receive(stranger.peer_id, message) == []
    assert (machine.view, machine.leaves) == (0, set())
    effects = machine.receive(round.order[0].peer_id, prepare_of(round.order[0], 0, value))
    assert [type(message) for message in said(effects)] == [Vote]
    (decided,) = machine.receive(round.order[0].peer_id, vote_of(round.order[0], 0, value))
    assert isinstance(decided, Decided)
    assert decided.certificate.signers == ids(round.order[:2])


def test_stranger_that_proposes_is_no_lead() -> None:
    round = Round()
    value = msgspec.structs.replace(round.value(), planner=STRANGERS[0].peer_id)
    machine = round.reduced(round.order[1], value)
    for view in range(6):
        assert machine.receive(STRANGERS[0].peer_id, propose_of(STRANGERS[0], view, value)) == []
    assert not machine.proposed


def test_four_named_voters_of_whom_one_may_lie_decide_by_three_votes() -> None:
    round = Round(4, FaultModel.LYING)
    value = round.value()
    machine = round.reduced(round.order[1], value)
    machine.receive(round.order[0].peer_id, propose_of(round.order[0], 0, value))
    assert not said(machine.receive(round.order[0].peer_id, prepare_of(round.order[0], 0, value)))
    assert said(machine.receive(round.order[2].peer_id, prepare_of(round.order[2], 0, value)))
    assert not machine.receive(round.order[0].peer_id, vote_of(round.order[0], 0, value))
    (decided,) = machine.receive(round.order[2].peer_id, vote_of(round.order[2], 0, value))
    assert isinstance(decided, Decided)


def test_prepare_certificate_of_strangers_is_none() -> None:
    round = Round()
    value = round.value()
    assert is_prepared(prepared_by(round.order[:2], 0, value), value, round.previous, voting=round.voting)
    fewer = prepared_by([round.order[0], *STRANGERS], 0, value)
    assert not is_prepared(fewer, value, round.previous, voting=round.voting)


def test_view_changes_of_strangers_free_no_lead() -> None:
    round = Round()
    value = round.value(planner=1)
    machine = round.reduced(round.order[2], value)
    moved = {one.peer_id: change_of(one, round.previous, 1) for one in (round.order[1], *STRANGERS)}
    shown = make_moves(moved, {})
    with pytest.raises(RemoteError, match="no quorum is shown"):
        machine.receive(round.order[1].peer_id, propose_of(round.order[1], 1, value, shown))
    moved[round.order[0].peer_id] = change_of(round.order[0], round.previous, 1)
    proposal = propose_of(round.order[1], 1, value, make_moves(moved, {}))
    assert [type(message) for message in said(machine.receive(round.order[1].peer_id, proposal))] == [Prepare]


def test_proposal_that_leaves_out_a_contributor_is_refused_by_who_holds_its_report() -> None:
    round = Round()
    left_out = STRANGERS[0]
    value = round.value([peer for peer in round.previous.members if peer != left_out.peer_id])
    for reported in (False, True):
        machine = round.reduced(round.order[1], value)
        if reported:
            machine.take_report(left_out.peer_id, signed_report(left_out, report_of(value)))
        prepared = said(machine.receive(round.order[0].peer_id, propose_of(round.order[0], 0, value)))
        assert (not prepared, machine.refuses) == (reported, reported)
    (change,) = said(machine.move_to(1))
    assert isinstance(change, ViewChange)
    assert change.left_out == (left_out.peer_id,)


def test_voter_that_was_away_is_a_member_again_by_its_own_report_without_being_planned() -> None:
    round = Round()
    away = round.order[2].peer_id
    round.previous = msgspec.structs.replace(
        round.previous, members=tuple(peer for peer in round.previous.members if peer != away)
    )
    round.order = [KEYS[peer] for peer in lead_order(round.previous, voting=round.voting)]
    value = round.value([*round.previous.members, away])
    assert not isinstance(value.report_signatures, msgspec.UnsetType)
    assert has_proofs(value, round.previous, voting=round.voting)
    assert not has_proofs(
        msgspec.structs.replace(value, report_signatures=msgspec.UNSET), round.previous, voting=round.voting
    )
    machine = round.reduced(round.order[1], value)
    assert said(machine.receive(round.order[0].peer_id, propose_of(round.order[0], 0, value)))
    unplanned = STRANGERS[4].peer_id
    round.previous = msgspec.structs.replace(
        round.previous, members=tuple(peer for peer in round.previous.members if peer != unplanned)
    )
    value = round.value([*round.previous.members, unplanned])
    machine = round.reduced(round.order[1], value)
    assert not said(machine.receive(round.order[0].peer_id, propose_of(round.order[0], 0, value)))
    assert machine.refuses, "who has no vote and was not planned is no member by it"


def test_named_voters_promise_to_leave_no_round() -> None:
    round = Round()
    voter, other = round.order[1], round.order[2]
    machine = round.machine(voter)
    assert machine.leave() == []
    assert machine.move_to(1), "it signs on"
    with pytest.raises(RemoteError, match="stays a voter"):
        machine.receive(other.peer_id, leave_of(other, round.previous))
    assert machine.leaves == set()
    value = round.value([peer for peer in round.previous.members if peer != other.peer_id])
    left = msgspec.structs.replace(
        value, leaves=(other.peer_id,), leave_signatures=(leave_of(other, round.previous).signature,)
    )
    assert follows(left, round.previous)
    assert not follows(left, round.previous, voting=round.voting)


@pytest.mark.parametrize("faults", list(FaultModel))
def test_named_voter_whom_the_others_need_stays_for_a_while_and_promises_nothing(faults: FaultModel) -> None:
    previous, voting = after_strangers(4), voting_of(4, faults)
    for alive in subsets(voting.named):
        for me in alive:
            others = [peer for peer in alive if peer != me]
            enough, before = (is_quorum(previous, some, voting=voting) for some in (others, alive))
            expected = LeaveCost.NEEDED if others and before and not enough else LeaveCost.FREE
            assert leave_cost(previous, me, {*alive, *ids(STRANGERS)}, (), voting=voting) is expected
    stranger = STRANGERS[0].peer_id
    assert leave_cost(previous, stranger, previous.members, (), voting=voting) is LeaveCost.FREE


# -- the chain, and the manifest -----------------------------------------------------------------------------------


def test_chain_is_checked_by_its_manifest_and_after_a_rebase_by_whom_that_names() -> None:
    manifest = manifest_of(FOUNDERS[:3])
    chain = Chain(genesis(manifest.swarm_id, manifest.swarm.founders), AUTHORITY.peer_id, manifest=manifest)
    joined = [*FOUNDERS[:3], *STRANGERS]
    first = value_of(chain.head, plan_hash("1"), FOUNDERS[0].peer_id, ids(joined), signing=joined)
    chain.extend(certified(first, *FOUNDERS[:2]))
    assert (chain.voters, chain.head.members) == (ids(FOUNDERS[:3]), ids(joined))
    second = value_of(chain.head, plan_hash("2"), FOUNDERS[1].peer_id)
    with pytest.raises(RemoteError, match="no quorum"):
        chain.extend(certified(second, *STRANGERS))
    chain.extend(certified(second, *FOUNDERS[1:3]))
    before = chain.snapshot()

    chain.extend(make_rebase(AUTHORITY, chain.head, ids(FOUNDERS[1:3])))
    assert (chain.voters, before.voters) == (ids(FOUNDERS[1:3]), ids(FOUNDERS[:3]))
    joined = [*FOUNDERS[1:3], *STRANGERS]
    third = value_of(chain.head, plan_hash("3"), chain.head.planner, ids(joined), signing=joined)
    with pytest.raises(RemoteError, match="no quorum"):
        chain.extend(certified(third, FOUNDERS[0], *STRANGERS))
    chain.extend(certified(third, KEYS[chain.head.planner]))  # one of two, and the casting vote
    assert chain.voters == ids(FOUNDERS[1:3]), "in the rounds that follow too"
    assert chain.back_to(second).voters == ids(FOUNDERS[:3])


def test_other_certificate_of_an_earlier_round_is_a_fork_by_the_voters_of_that_round_alone() -> None:
    manifest = manifest_of(FOUNDERS[:3])
    chain = Chain(genesis(manifest.swarm_id, manifest.swarm.founders), AUTHORITY.peer_id, manifest=manifest)
    start, others = chain.head, {one.peer_id for one in STRANGERS}
    joined = [*FOUNDERS[:3], *STRANGERS]
    chain.extend(
        certified(value_of(start, plan_hash("1"), FOUNDERS[0].peer_id, ids(joined), signing=joined), *FOUNDERS[:2])
    )
    base = chain.head
    chain.extend(certified(value_of(base, plan_hash("2"), FOUNDERS[0].peer_id), *FOUNDERS[:2]))
    other = value_of(base, plan_hash("3"), FOUNDERS[1].peer_id)
    assert others <= set(base.members)
    with pytest.raises(RemoteError, match="no quorum"):
        chain.fork_with(certified(other, *STRANGERS))
    fork = chain.fork_with(certified(other, *FOUNDERS[1:3]))
    assert fork is not None
    assert set(fork.signers) == {FOUNDERS[1].peer_id}
    chain.extend(make_rebase(AUTHORITY, chain.head, ids(FOUNDERS[2:3])))
    fork = chain.fork_with(certified(other, *FOUNDERS[:2]))
    assert fork is not None
    assert fork.signers == ids(FOUNDERS[:2]), "that now others vote does not undo what these signed"


def test_manifest_says_who_votes_and_by_which_fault_model() -> None:
    plain = parse_manifest(render_manifest(manifest_of(FOUNDERS)).split("\n# Voting on rounds")[0])
    assert (plain.membership, plain.agreement, plain.voting) == (None, None, Voting())
    named, lying = manifest_of(FOUNDERS), manifest_of(FOUNDERS, faults="lying")
    assert named.voting == Voting(FaultModel.CRASH, ids(FOUNDERS))
    assert lying.voting == Voting(FaultModel.LYING, ids(FOUNDERS))
    assert manifest_of(FOUNDERS, voters="contributors").voting == Voting()
    everyone = {one.swarm_id for one in (plain, named, lying, manifest_of(FOUNDERS, voters="contributors"))}
    assert len(everyone) == 4
    assert parse_manifest(render_manifest(lying)) == lying
    assert Manifest.from_canonical(lying.to_canonical(), lying.swarm_id).voting == lying.voting


@pytest.mark.parametrize(("voters", "founders"), [("contributors", 4), ("named", 3), ("named", 1)])
def test_lying_without_four_named_voters_is_refused_in_a_line_that_says_what_to_do(voters: str, founders: int) -> None:
    with pytest.raises(ConfigError) as caught:
        manifest_of(FOUNDERS[:founders], voters, "lying")
    text = str(caught.value)
    assert f'needs voters = "named" in [membership] and 4 founders or more; this has {founders}' in text
    assert "`shoal id`" in text
    assert "\n" not in text


def test_strategy_that_certifies_nothing_has_no_voters() -> None:
    text = (
        f"[swarm]\nname = 'test'\nfounders = ['{FOUNDERS[0].peer_id}']\n[workload]\nname = 'text'\n"
        "[sync]\nstrategy = 'gossip'\ninner_steps = 1\n"
    )
    assert parse_manifest(text).voting == Voting()
    for section in ("[membership]\nvoters = 'named'\n", "[agreement]\nfaults = 'crash'\n"):
        with pytest.raises(ConfigError, match="about certified rounds, which the strategy gossip does not have"):
            parse_manifest(text + section)


# -- no call that forgets who votes ----------------------------------------------------------------------------------


def test_every_call_in_the_product_says_who_votes() -> None:
    """A call that leaves it out would count those who contribute."""
    trees = {
        path: ast.parse(path.read_text()) for folder in ("protocol", "node") for path in (ROOT / folder).rglob("*.py")
    }
    asking = {
        function.name
        for tree in trees.values()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        and any(argument.arg == "voting" for argument in function.args.kwonlyargs)
        and function.name != "__init__"
    }
    assert {"is_quorum", "lead_order", "lead", "check_certificate", "has_proofs", "follows", "leave_cost"} <= asking
    forgetful = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path, tree in trees.items()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id in asking
        and all(keyword.arg != "voting" for keyword in call.keywords)
    ]
    assert forgetful == []
