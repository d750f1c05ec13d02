"""Named voters that change: what an amendment or a ban makes of them, from which round on, and what cannot be."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec
import pytest

from shoal.lab.signed import certified, propose_of, report_of
from shoal.protocol.agreement import Agreement, AgreementEffect, Broadcast
from shoal.protocol.amending import (
    InForce,
    is_done,
    make_amend_consent,
    make_amendment,
    parse_settings,
    settings_text,
    stands_on,
    with_amendment,
)
from shoal.protocol.amendment_orders import Amending
from shoal.protocol.certificate import genesis
from shoal.protocol.chain import Chain
from shoal.protocol.effects import KeepOrder
from shoal.protocol.errors import ConfigError, RemoteError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.manifest import Manifest
from shoal.protocol.messages import Amendment, Ban, Change, Prepare, Target, Value, domain_hash
from shoal.protocol.terms import make_consent, make_rebase, make_rollback
from shoal.protocol.voting import VOTERS, FaultModel, Voting, holds_state
from tests.manifests import manifest_of
from tests.protocol.lab import plan_hash, value_of

KEYS = sorted((Identity.from_seed(bytes([number]) * 32) for number in range(7)), key=lambda key: key.peer_id)
A, B, C, D, E, F, G = KEYS
AUTHORITY = Identity.from_seed(b"a" * 32)


def ids(some: Collection[Identity]) -> tuple[PeerId, ...]:
    return tuple(sorted(one.peer_id for one in some))


def founded_by(founders: Sequence[Identity], faults: str = "crash", voters: str = "named") -> Manifest:
    sections = {"membership": {"voters": voters}, "agreement": {"faults": faults}}
    return manifest_of(ids(founders), sections, authority=AUTHORITY.peer_id)


def new_chain(manifest: Manifest) -> Chain:
    return Chain(genesis(manifest.swarm_id, manifest.swarm.founders), AUTHORITY.peer_id, manifest=manifest)


def chain_of(voters: Sequence[Identity] = (A, B, C), faults: str = "crash") -> Chain:
    """A chain of one round, after which all seven are members."""
    chain = new_chain(founded_by(voters, faults))
    chain.extend(certified(result(chain, members=KEYS), *voters))
    return chain


def in_force(chain: Chain) -> InForce:
    assert chain.in_force is not None
    return chain.in_force


def result(chain: Chain, members: Collection[Identity] | None = None, planner: Identity = A, name: str = "") -> Value:
    plan, stay = plan_hash(f"{chain.head.next_round} {name}"), None if members is None else ids(members)
    return value_of(chain.head, plan, planner.peer_id, stay, signing=KEYS)


def change(chain: Chain, adds: Collection[Identity] = (), removes: Collection[Identity] = ()) -> Amendment:
    wanted: dict[str, object] = {f"{VOTERS}.{one.peer_id}": True for one in adds}
    return make_amendment(in_force(chain), wanted | {f"{VOTERS}.{one.peer_id}": False for one in removes})


def changing(chain: Chain, amendment: Amendment, consenting: Collection[Identity], value: Value | None = None) -> Value:
    consents = [(one.peer_id, make_amend_consent(one, chain.head, amendment, asked=True)) for one in consenting]
    return with_amendment(value or result(chain), consents)


def banning(value: Value, *banned: Identity) -> Value:
    peers = ids(banned)
    members = tuple(peer for peer in value.members if peer not in peers)
    bans = tuple(Ban(peer, domain_hash("proof", peer.encode())) for peer in peers)
    return msgspec.structs.replace(value, members=members, bans=bans)


# -- from which round on -------------------------------------------------------------------------------------------


def test_round_is_decided_by_those_who_voted_before_it_and_the_next_by_the_others() -> None:
    chain = chain_of()
    value = changing(chain, change(chain, adds=[D, E], removes=[A, B]), [A, B])
    with pytest.raises(RemoteError, match="no quorum"):
        chain.snapshot().extend(certified(value, C, D, E))
    chain.extend(certified(value, A, B))
    assert chain.voters == ids([C, D, E])
    following = result(chain, planner=D)
    with pytest.raises(RemoteError, match="no quorum"):
        chain.snapshot().extend(certified(following, A, B, C))
    with pytest.raises(RemoteError, match="signed by who has no vote"):
        chain.snapshot().extend(certified(following, A, D, E))
    chain.extend(certified(following, D, E))
    assert chain.voters == ids([C, D, E]), "in the rounds that follow too"
    assert set(chain.head.members) == set(ids(KEYS)), "who no longer votes goes on contributing"


def test_machine_decides_a_change_by_the_votes_of_those_before_and_the_next_round_by_the_others() -> None:
    chain = chain_of()
    value = changing(chain, change(chain, adds=[D], removes=[A]), [A, B])

    def prepared(chain: Chain, voter: Identity, value: Value) -> list[AgreementEffect]:
        machine = Agreement(identity=voter, previous=chain.head, voting=chain.voting, in_force=chain.in_force)
        lead = next(one for one in KEYS if one.peer_id == machine.lead(0))
        value = msgspec.structs.replace(value, planner=lead.peer_id)
        machine.computed(report_of(value), chain.head.members)
        effects = machine.receive(lead.peer_id, propose_of(lead, 0, value))
        return [one for one in effects if isinstance(one, Broadcast) and isinstance(one.message, Prepare)]

    assert [bool(prepared(chain, one, value)) for one in (A, B, C, D)] == [True, True, True, False]
    chain.extend(certified(value, B, C))
    after = result(chain, planner=B)
    assert [bool(prepared(chain, one, after)) for one in (A, B, C, D)] == [False, True, True, True]


def test_who_comes_late_learns_the_voters_from_the_certificates_alone_and_from_none_without_them() -> None:
    chain = chain_of()
    chain.extend(certified(changing(chain, change(chain, adds=[D], removes=[A]), [A, B]), A, B))
    chain.extend(certified(changing(chain, change(chain, adds=[E, F], removes=[B, C]), [B, D]), B, D))
    chain.extend(certified(result(chain, planner=E), E, F))
    late = new_chain(founded_by([A, B, C]))
    voters = []
    for entry in chain.entries:
        late.extend(entry)
        voters.append(late.voters)
    assert voters == [ids([A, B, C]), ids([B, C, D]), ids([D, E, F]), ids([D, E, F])]
    without = new_chain(founded_by([A, B, C]))
    without.extend(chain.entries[0])
    for entry in chain.entries[2:]:
        with pytest.raises(RemoteError):
            without.extend(entry)
    # Whoever says it: the same certificate with other consents is another value, which no quorum signed.
    value = msgspec.structs.replace(chain.entries[1].value, amended=msgspec.UNSET)
    with pytest.raises(RemoteError, match="forged"):
        without.extend(msgspec.structs.replace(chain.entries[1], value=value))


def test_earlier_round_is_a_fork_by_those_who_voted_then() -> None:
    chain = chain_of()
    base = chain.snapshot()
    chain.extend(certified(changing(chain, change(chain, adds=[D, E], removes=[A, B]), [A, B]), A, B))
    chain.extend(certified(result(chain, planner=D), D, E))
    with pytest.raises(RemoteError, match="no quorum"):
        chain.fork_with(certified(result(base, name="other"), D, E))
    fork = chain.fork_with(certified(result(base, name="other"), A, C))
    assert fork is not None
    assert fork.signers == ids([A])
    assert chain.back_to(base.head).voters == chain.up_to(1).voters == ids([A, B, C])
    assert chain.snapshot().voters == chain.back_to(chain.head).voters == ids([C, D, E])


def test_rollback_brings_back_the_settings_and_not_the_voters_and_a_rebase_names_its_own() -> None:
    chain = chain_of()
    target = Target(1, chain.head.hash)
    wanted: Mapping[str, object] = {f"{VOTERS}.{D.peer_id}": True, f"{VOTERS}.{A.peer_id}": False, "inner.lr": 0.5}
    chain.extend(certified(changing(chain, make_amendment(in_force(chain), wanted), [A, B]), A, B))
    assert in_force(chain).manifest.inner.lr == 0.5
    consents = {one.peer_id: make_consent(one, chain.head, target, asked=True) for one in (B, C, D)}
    before = in_force(chain)
    value = make_rollback(chain.head, B.peer_id, target, consents, digest=chain.value(1).digest, voting=chain.voting)
    chain.extend(certified(value, C, D))
    assert (chain.voters, in_force(chain).voting.named) == (ids([B, C, D]), ids([B, C, D]))
    assert in_force(chain).manifest.inner.lr == founded_by([A]).inner.lr
    assert not stands_on(make_amendment(before, {f"{VOTERS}.{E.peer_id}": True}), in_force(chain))
    with pytest.raises(RemoteError, match="no quorum"):
        chain.snapshot().extend(certified(result(chain, planner=B), A, B))
    chain.extend(certified(result(chain, planner=B), B, C))
    chain.extend(make_rebase(AUTHORITY, chain.value(1), ids([E, F])))
    assert chain.voters == in_force(chain).voting.named == ids([E, F])


# -- what can be decided ---------------------------------------------------------------------------------------------


def test_change_takes_consents_of_a_quorum_of_those_who_vote_before_it() -> None:
    chain = chain_of()
    amendment = change(chain, adds=[D, E])
    for consenting in ([A], [D, E, F, G], [A, D, E]):
        with pytest.raises(RemoteError, match="none that a quorum can have wanted"):
            chain.extend(certified(changing(chain, amendment, consenting), A, B, C))
    chain.extend(certified(changing(chain, amendment, [A, C]), A, B))
    assert chain.voters == ids([A, B, C, D, E])


def test_who_gets_a_vote_is_a_member_after_the_value_and_so_is_a_quorum_of_those_who_vote_next() -> None:
    chain = chain_of()
    amendment, same = change(chain, adds=[D], removes=[A]), chain.voting
    for members, may in (([A, B, C, E], False), ([B, D], True), ([A, B, D], True), ([A, C, D], True)):
        value = changing(chain, amendment, [A, B], result(chain, members))
        # Of B, C and D two are a quorum, whoever planned.
        assert holds_state(value, voting=same) is may
    fewer = changing(chain, change(chain, adds=[D, E, F, G]), [A, B], result(chain, [A, D, E, F, G]))
    assert holds_state(fewer, voting=same)
    swapped = changing(chain, change(chain, removes=[A, B]), [A, B], result(chain, [A, B]))
    assert not holds_state(swapped, voting=same), "the only one that votes next has no state"
    with pytest.raises(RemoteError, match="none that a quorum can have wanted"):
        chain.extend(certified(swapped, A, B))
    plain = msgspec.structs.replace(swapped, amended=msgspec.UNSET)
    assert holds_state(plain, voting=same), "where voters do not change nothing is asked"
    machine = Agreement(identity=C, previous=chain.head, voting=chain.voting, in_force=chain.in_force)
    lead = next(one for one in KEYS if one.peer_id == machine.lead(0))
    if lead is not C:
        swapped = msgspec.structs.replace(swapped, planner=lead.peer_id)
        with pytest.raises(RemoteError, match="an amendment that no quorum consented to"):
            machine.receive(lead.peer_id, propose_of(lead, 0, swapped))


@pytest.mark.parametrize(
    ("faults", "voters", "adds", "removes", "why"),
    [
        ("crash", [A, B], [], [A, B], "that makes 0 voters; there must be from 1 to 64"),
        ("lying", [A, B, C, D], [], [A], "that makes 3 voters; there must be from 4 to 64"),
        ("lying", [A, B, C, D, E], [F], [A, B, C], "that makes 3 voters"),
        ("crash", [A, B], [A], [], "in force already"),
        ("crash", [A, B], [], [C], "in force already"),
    ],
)
def test_change_that_cannot_be_is_refused_in_a_line(
    faults: str, voters: Sequence[Identity], adds: Sequence[Identity], removes: Sequence[Identity], why: str
) -> None:
    chain = chain_of(voters, faults)
    with pytest.raises(ConfigError, match=why):
        change(chain, adds, removes)
    forced = Amendment(
        in_force(chain).since,
        tuple(
            sorted(
                [Change(f"{VOTERS}.{one.peer_id}", value=True) for one in adds]
                + [Change(f"{VOTERS}.{one.peer_id}", value=False) for one in removes],
                key=lambda one: one.key,
            )
        ),
    )
    assert not stands_on(forced, in_force(chain))
    with pytest.raises(RemoteError, match="none that a quorum can have wanted"):
        chain.extend(certified(changing(chain, forced, voters), *voters))


def test_at_most_sixty_four_vote_and_the_last_four_of_whom_one_may_lie_can_be_replaced() -> None:
    many = [PeerId(f"12D3Koo{number:045}") for number in range(64)]
    voting = Voting(FaultModel.CRASH, tuple(many))
    with pytest.raises(ValueError, match="that makes 65 voters"):
        voting.changed({A.peer_id: True})
    assert len(voting.changed({A.peer_id: True, many[0]: False}).named) == 64
    chain = chain_of([A, B, C, D], "lying")
    chain.extend(certified(changing(chain, change(chain, [E, F], [A, B]), [A, B, C]), B, C, D))
    assert chain.voters == ids([C, D, E, F])
    with pytest.raises(RemoteError, match="no quorum"):
        chain.extend(certified(result(chain, planner=E), E, F))
    chain.extend(certified(result(chain, planner=E), D, E, F))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"voters.{D.peer_id}=1", "true for who votes from then on"),
        (f"voters.{D.peer_id}=yes", "true for who votes from then on"),
        ("voters.me=true", "names no peer: write a PeerId"),
        (f"voters.{D.peer_id[:-1]}=true", "names no peer"),
        ("membership.voters=named", "cannot be amended; what can: .*voters.PEER"),
    ],
)
def test_change_of_voters_has_one_form(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make_amendment(in_force(chain_of()), parse_settings([text]))


def test_where_contributors_vote_there_are_no_voters_to_change() -> None:
    chain = new_chain(founded_by([A, B, C], voters="contributors"))
    with pytest.raises(ConfigError, match=r"whoever contributes votes .*; `shoal init --voters named` founds one"):
        change(chain, adds=[D])
    assert in_force(chain).voting == Voting()


def test_what_was_ordered_for_other_voters_can_be_no_more_and_what_is_done_is_told_apart() -> None:
    chain = chain_of()
    one, other, same = change(chain, [D]), change(chain, [E]), change(chain, removes=[C])
    chain.extend(certified(changing(chain, one, [A, B]), A, B))
    assert [stands_on(some, in_force(chain)) for some in (one, other, same)] == [False] * 3
    assert [is_done(some, in_force(chain)) for some in (one, other, same)] == [True, False, False]
    assert settings_text(one) == f"voters.{D.peer_id} = true"
    assert chain.amended(chain.head.next_round) is None, "no setting of the manifest is another"


def test_three_that_a_rebase_left_of_four_are_added_to_and_amend_settings() -> None:
    chain = chain_of([A, B, C, D], "lying")
    chain.extend(make_rebase(AUTHORITY, chain.head, ids([A, B, C])))
    chain.extend(certified(result(chain, members=KEYS), A, B, C))
    chain.extend(certified(changing(chain, make_amendment(in_force(chain), {"inner.lr": 0.5}), [A, B, C]), A, B, C))
    assert (chain.voters, in_force(chain).manifest.inner.lr) == (ids([A, B, C]), 0.5)
    with pytest.raises(ConfigError, match="that makes 3 voters"):
        change(chain, adds=[D], removes=[A])
    assert chain.voting.after(banning(result(chain), A)).named == ids([A, B, C])
    chain.extend(certified(changing(chain, change(chain, adds=[D]), [A, B, C]), A, B, C))
    assert chain.voters == ids([A, B, C, D])


# -- orders and bans -------------------------------------------------------------------------------------------------


def test_order_that_gives_a_vote_to_no_member_is_refused_and_any_other_is_kept() -> None:
    chain = chain_of()
    chain.extend(certified(result(chain, [A, B, C, D]), A, B))

    class Here:
        pass

    here = Here()
    here.chain = chain  # type: ignore[attr-defined]
    amending = Amending(A.peer_id, here, follows=True)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{E.peer_id} is no member; have its node join first"):
        next(amending.order([f"voters.{E.peer_id}=true"], by_authority=False))
    kept = next(amending.order([f"voters.{D.peer_id}=true", f"voters.{A.peer_id}=false"], by_authority=False))
    assert isinstance(kept, KeepOrder)
    stranger = Amending(D.peer_id, here, follows=True)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="has no vote"):
        next(stranger.order([f"voters.{E.peer_id}=true"], by_authority=False))


def test_ban_takes_the_vote_from_the_next_round_on() -> None:
    chain = chain_of([A, B, C, D, E])
    value = banning(result(chain), C)
    with pytest.raises(RemoteError, match="no quorum"):
        chain.snapshot().extend(certified(value, A, B))
    since = in_force(chain).since
    chain.extend(certified(value, A, B, C))  # its vote counts in that round
    assert chain.voters == in_force(chain).voting.named == ids([A, B, D, E])
    assert in_force(chain).since == chain.head.hash != since, "orders for the voters before are over"
    with pytest.raises(RemoteError, match="signed by who has no vote"):
        chain.snapshot().extend(certified(result(chain, planner=B), A, B, C))
    chain.extend(certified(result(chain, planner=B), A, B))
    banned_again = changing(chain, change(chain, [C]), [A, B, D], result(chain, [A, B, D, E]))
    assert not holds_state(banned_again, voting=chain.voting), "nor does it get it back while it cannot be a member"


@pytest.mark.parametrize(
    ("faults", "voters", "banned", "left"),
    [
        ("lying", [A, B, C, D, E], [C], [A, B, D, E]),
        ("lying", [A, B, C, D, E, F], [A, B, C], [C, D, E, F]),
        ("lying", [A, B, C, D], [C], [A, B, C, D]),
        ("crash", [A, B], [B], [A]),
        ("crash", [A], [A], [A]),
        ("crash", [A, B], [E], [A, B]),
    ],
)
def test_ban_leaves_as_many_voters_as_there_must_be(
    faults: str, voters: Sequence[Identity], banned: Sequence[Identity], left: Sequence[Identity]
) -> None:
    chain = chain_of(voters, faults)
    assert chain.voting.after(banning(result(chain), *banned)).named == ids(left)


def test_ban_and_change_of_one_value_both_count() -> None:
    chain = chain_of([A, B, C])
    value = changing(chain, change(chain, adds=[D, E]), [A, B], banning(result(chain), C, E))
    chain.extend(certified(value, A, B))
    assert chain.voters == ids([A, B, D])
    chain = chain_of([A, B, C, D], "lying")
    value = changing(chain, change(chain, adds=[E]), [A, B, C], banning(result(chain), C, E))
    assert not holds_state(value, voting=chain.voting), "it would vote, as the last of four, and is no member"
