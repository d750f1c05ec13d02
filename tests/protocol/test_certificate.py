"""Certificates: the quorum arithmetic, the order of leads, and what the check of a certificate or chain refuses."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import combinations

import msgspec
import pytest

from shoal.lab import signed
from shoal.lab.quorum_rule import outweighs
from shoal.protocol import certificate as certificate_module
from shoal.protocol.certificate import LeaveCost, check_certificate, follows, genesis, leave_cost, verify_step
from shoal.protocol.chain import Chain
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.messages import NO_HASH, VOTE_DOMAIN, Certificate, Term, Value, step_preimage
from shoal.protocol.voting import is_quorum, lead, lead_order
from tests.protocol.lab import SWARM, plan_hash, value_of

KEYS = [Identity.from_seed(bytes([number]) * 32) for number in range(7)]


def start(count: int) -> Value:
    return genesis(SWARM, [key.peer_id for key in KEYS[:count]])


def subsets(peers: Sequence[PeerId]) -> Iterator[tuple[PeerId, ...]]:
    for size in range(len(peers) + 1):
        yield from combinations(peers, size)


def certified(
    previous: Value, signers: Iterable[Identity], *, view: int = 0, value: Value | None = None
) -> Certificate:
    return signed.certified(value or value_of(previous, plan_hash("plan"), previous.members[0]), *signers, view=view)


# -- quorum --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "with_planner", "without"), [(1, 1, 1), (2, 1, 2), (3, 2, 2), (4, 2, 3), (5, 3, 3), (6, 3, 4), (7, 4, 4)]
)
def test_quorum_is_a_majority_or_half_with_the_planner(count: int, with_planner: int, without: int) -> None:
    previous = start(count)
    others = [peer for peer in previous.members if peer != previous.planner]
    for size in range(count + 1):
        if size >= 1:
            assert is_quorum(previous, [previous.planner, *others[: size - 1]]) == (size >= with_planner)
        if size <= len(others):
            assert is_quorum(previous, others[:size]) == (size >= without)


@pytest.mark.parametrize("count", range(1, 7))
def test_quorum_agrees_with_its_other_wording_for_all_sets_and_leaves(count: int) -> None:
    previous = start(count)
    for leaves in subsets(previous.members):
        for supporters in subsets(previous.members):
            assert is_quorum(previous, supporters, leaves) == outweighs(previous, supporters, leaves)


@pytest.mark.parametrize("count", range(1, 7))
def test_two_disjoint_sets_are_never_both_quorums_whatever_leaves_they_count(count: int) -> None:
    """Leavers sign nothing, so supporters come from those who stay; a side may know of fewer leaves than there are."""
    previous = start(count)
    for left in subsets(previous.members):
        staying = [peer for peer in previous.members if peer not in left]
        known = list(subsets(left))
        for one in subsets(staying):
            other = [peer for peer in staying if peer not in one]
            one_may = any(is_quorum(previous, one, leaves) for leaves in known)
            other_may = any(is_quorum(previous, other, leaves) for leaves in known)
            assert not (one_may and other_may)


def test_quorum_ignores_strangers_and_those_who_left() -> None:
    previous = start(3)
    planner, one, two = previous.planner, *(p for p in previous.members if p != previous.planner)
    strangers = [key.peer_id for key in KEYS[3:]]
    assert not is_quorum(previous, [one, *strangers])
    assert not is_quorum(previous, [one, two], leaves=[two])
    assert is_quorum(previous, [planner], leaves=[two])
    assert not is_quorum(previous, previous.members, leaves=previous.members), "nobody is no quorum"


def test_planner_who_is_no_member_breaks_no_tie() -> None:
    previous = msgspec.structs.replace(start(2), planner=KEYS[5].peer_id)
    assert not is_quorum(previous, previous.members[:1])
    assert not is_quorum(previous, previous.members[1:])
    assert is_quorum(previous, previous.members)


# -- leads ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(1, 8))
def test_lead_order_is_a_permutation_that_views_go_round(count: int) -> None:
    previous = start(count)
    order = lead_order(previous)
    assert sorted(order) == list(previous.members)
    assert [lead(previous, view) for view in range(2 * count)] == [*order, *order]


def test_lead_order_depends_on_swarm_term_and_round_only() -> None:
    previous = start(5)
    assert lead_order(previous) == lead_order(msgspec.structs.replace(previous))
    orders = {lead_order(msgspec.structs.replace(previous, round=round)) for round in range(20)}
    assert len(orders) > 10, "drawn anew for each round"
    chosen = [{"tokens": 7}, {"digest": filled(7)}, {"planner": previous.members[1]}, {"base": filled(8)}]
    assert {lead_order(msgspec.structs.replace(previous, **what)) for what in chosen} == {lead_order(previous)}, (
        "nothing that the last lead chose has a part in it"
    )
    terms = {lead_order(msgspec.structs.replace(previous, term=Term(0, number))) for number in range(5)}
    swarms = {lead_order(msgspec.structs.replace(previous, swarm=filled(number))) for number in range(5)}
    assert len(terms) > 2
    assert len(swarms) > 2


def filled(number: int) -> bytes:
    return bytes([number]) * 32


def test_lead_order_is_what_it_was() -> None:
    """A golden value: nodes of different versions must agree on who leads."""
    number = {key.peer_id: place for place, key in enumerate(KEYS)}
    assert start(7).hash.hex() == "1a54360dee05b1bb4ba450972beee4c068b72fef6b15bc0fcc7978a7d53459e5"
    assert [number[peer] for peer in lead_order(start(7))] == [0, 3, 5, 1, 6, 4, 2]


# -- one certificate -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(1, 8))
def test_certificate_of_exactly_a_quorum_holds_and_of_one_less_does_not(count: int) -> None:
    previous = start(count)
    others = [key for key in KEYS[:count] if key.peer_id != previous.planner]
    needed = count // 2 + 1
    if len(others) >= needed:
        check_certificate(certified(previous, others[:needed], view=3), previous)
    with pytest.raises(RemoteError, match="no quorum"):
        check_certificate(certified(previous, others[: min(needed, count) - 1]), previous)


def test_certificate_with_any_signature_wrong_is_refused() -> None:
    previous = start(3)
    good = certified(previous, KEYS[:3])
    check_certificate(good, previous)
    for place in range(3):
        signatures = list(good.signatures)
        signatures[place] = bytes([signatures[place][0] ^ 1]) + signatures[place][1:]
        with pytest.raises(RemoteError, match="forged") as error:
            check_certificate(msgspec.structs.replace(good, signatures=tuple(signatures)), previous)
        assert error.value.peer == good.signers[place]
    with pytest.raises(RemoteError, match="forged"):
        check_certificate(msgspec.structs.replace(good, view=1), previous)
    other = msgspec.structs.replace(good.value, tokens=99)
    with pytest.raises(RemoteError, match="forged"):
        check_certificate(msgspec.structs.replace(good, value=other), previous)
    swapped = (good.signatures[1], good.signatures[0], good.signatures[2])
    with pytest.raises(RemoteError, match="forged"):
        check_certificate(msgspec.structs.replace(good, signatures=swapped), previous)


def test_certificate_that_mixes_views_is_refused() -> None:
    previous = start(3)
    one, two = certified(previous, KEYS[:1], view=0), certified(previous, KEYS[1:2], view=1)
    pairs = sorted(zip(one.signers + two.signers, one.signatures + two.signatures, strict=True))
    mixed = msgspec.structs.replace(
        one, signers=tuple(peer for peer, _ in pairs), signatures=tuple(signature for _, signature in pairs)
    )
    for view in (0, 1):
        with pytest.raises(RemoteError, match="forged"):
            check_certificate(msgspec.structs.replace(mixed, view=view), previous)


def test_certificate_that_counts_a_signer_twice_is_refused() -> None:
    previous = start(3)
    one = certified(previous, [KEYS[1]])
    twice = msgspec.structs.replace(one, signers=one.signers * 2, signatures=one.signatures * 2)
    with pytest.raises(RemoteError, match="twice"):
        check_certificate(twice, previous)
    with pytest.raises(RemoteError, match="without signatures"):
        check_certificate(msgspec.structs.replace(one, signers=one.signers * 2), previous)


def test_certificate_of_strangers_is_refused() -> None:
    previous = start(3)
    with pytest.raises(RemoteError, match="no quorum"):
        check_certificate(certified(previous, KEYS[3:]), previous)
    with pytest.raises(RemoteError, match="no quorum"):
        check_certificate(certified(previous, [KEYS[1], *KEYS[3:]]), previous)


def test_certificate_does_not_count_those_whose_leave_it_counts() -> None:
    previous = start(4)
    leaver, *rest = [key for key in KEYS[:4] if key.peer_id != previous.planner]
    staying = [peer for peer in previous.members if peer != leaver.peer_id]
    value = value_of(previous, plan_hash("p"), previous.planner, staying, [leaver.peer_id], signing=KEYS)
    check_certificate(certified(previous, rest, value=value), previous)
    with pytest.raises(RemoteError, match="no quorum"):
        check_certificate(certified(previous, [leaver, rest[0]], value=value), previous)


def test_who_leaves_is_no_member_after_the_value_that_counts_its_leave() -> None:
    previous = start(4)
    leaver = next(key for key in KEYS[:4] if key.peer_id != previous.planner)
    staying = [peer for peer in previous.members if peer != leaver.peer_id]
    for members, holds in ((staying, True), (previous.members, False)):
        value = value_of(previous, plan_hash("p"), previous.planner, members, [leaver.peer_id], signing=KEYS)
        assert follows(value, previous) is holds


@pytest.mark.parametrize(
    "wrong",
    [
        {"round": 2},
        {"round": 0},
        {"base": NO_HASH},
        {"swarm": bytes(32)},
        {"term": Term(0, 1)},
        {"members": (KEYS[1].peer_id, KEYS[0].peer_id)},
        {"members": (KEYS[0].peer_id, KEYS[0].peer_id)},
        {"leaves": (KEYS[6].peer_id,)},
        {"leaves": (KEYS[0].peer_id, KEYS[0].peer_id)},
    ],
)
def test_value_that_does_not_follow_is_refused(wrong: dict[str, object]) -> None:
    previous = start(3)
    in_order = sorted(KEYS[:2], key=lambda key: key.peer_id)
    if wrong.get("members") == tuple(key.peer_id for key in in_order):
        wrong = {"members": tuple(key.peer_id for key in reversed(in_order))}
    value = msgspec.structs.replace(value_of(previous, plan_hash("p"), previous.planner), **wrong)
    assert not follows(value, previous)
    with pytest.raises(RemoteError, match="does not follow"):
        check_certificate(certified(previous, KEYS[:3], value=value), previous)


def test_vote_is_bound_to_its_view_value_and_voter() -> None:
    value = value_of(start(3), plan_hash("p"), KEYS[0].peer_id)
    signature = KEYS[0].sign(VOTE_DOMAIN, step_preimage(2, value.hash))
    assert verify_step(VOTE_DOMAIN, KEYS[0].peer_id, 2, value.hash, signature)
    assert not verify_step(VOTE_DOMAIN, KEYS[0].peer_id, 1, value.hash, signature)
    assert not verify_step(VOTE_DOMAIN, KEYS[1].peer_id, 2, value.hash, signature)
    assert not verify_step(VOTE_DOMAIN, KEYS[0].peer_id, 2, NO_HASH, signature)


# -- the chain -----------------------------------------------------------------------------------------------


def chain_of(rounds: int) -> tuple[Chain, list[Certificate]]:
    chain, certificates = Chain(start(3)), []
    for number in range(rounds):
        value = value_of(chain.head, plan_hash(str(number)), KEYS[number % 3].peer_id)
        certificates.append(certified(chain.head, KEYS[:3], value=value))
        chain.extend(certificates[-1])
    return chain, certificates


def test_chain_grows_by_what_follows_and_answers_by_round() -> None:
    chain, certificates = chain_of(5)
    assert chain.head == certificates[-1].value
    assert chain.value(0) == start(3)
    assert [chain.value(r) for r in range(1, 6)] == [c.value for c in certificates]
    assert chain.after(0, 6) == tuple(certificates)
    assert chain.after(2, 2) == tuple(certificates[2:4])
    assert chain.after(5, 2) == ()
    with pytest.raises(IndexError):
        chain.value(6)


def test_chain_refuses_gaps_repeats_and_other_swarms_and_stays_as_it_was() -> None:
    chain, certificates = chain_of(3)
    short = Chain(start(3))
    short.extend(certificates[0])
    for certificate in (certificates[2], certificates[0]):
        with pytest.raises(RemoteError, match="does not follow"):
            short.extend(certificate)
    with pytest.raises(RemoteError, match="does not follow"):
        Chain(start(4)).extend(certificates[0])
    assert short.head == certificates[0].value
    short.extend(certificates[1])
    short.extend(certificates[2])
    assert short.head == chain.head


def test_chain_follows_the_electorate_it_certified() -> None:
    chain = Chain(start(3))
    members = [key.peer_id for key in KEYS[1:6]]
    handover = value_of(chain.head, plan_hash("x"), KEYS[0].peer_id, members=members, signing=KEYS)
    chain.extend(certified(chain.head, KEYS[:3], value=handover))
    following = value_of(chain.head, plan_hash("y"), KEYS[3].peer_id)
    with pytest.raises(RemoteError, match="no quorum"):
        chain.extend(certified(chain.head, KEYS[:3], value=following))
    chain.extend(certified(chain.head, KEYS[3:6], value=following))
    everyone = frozenset(key.peer_id for key in KEYS[:6])
    newer = frozenset(members)
    assert [chain.recent_members(rounds) for rounds in (0, 1, 2, 9)] == [newer, newer, everyone, everyone]
    assert all(map(chain.was_member, everyone))
    assert not chain.was_member(Identity.generate().peer_id)


def test_same_value_certified_in_two_views_is_one_link() -> None:
    chain, _ = chain_of(1)
    value = value_of(chain.head, plan_hash("z"), KEYS[1].peer_id)
    early, late = (certified(chain.head, KEYS[:3], view=view, value=value) for view in (0, 4))
    other, _ = chain_of(1)
    chain.extend(early)
    other.extend(late)
    assert early != late
    assert chain.head.hash == other.head.hash


def leave_costs(previous: Value, alive: Iterable[PeerId], leaving: Collection[PeerId] = ()) -> list[LeaveCost]:
    """For each that lives, in the order of leads."""
    living = set(alive)
    return [leave_cost(previous, peer, living, (), leaving) for peer in lead_order(previous) if peer in living]


def known_to(previous: Value) -> list[tuple[frozenset[PeerId], frozenset[PeerId]]]:
    """All that may be known: who lives, and who of them is leaving."""
    return [(frozenset(a), frozenset(g)) for a in subsets(previous.members) for g in subsets(a)]


@pytest.mark.parametrize("count", range(1, 5))
def test_leave_is_never_promised_by_all_whatever_each_knows_of_the_others(count: int) -> None:
    previous = start(count)
    may_promise = {
        me
        for me in previous.members
        for alive, leaving in known_to(previous)
        if me in alive and leave_cost(previous, me, alive, (), leaving) is LeaveCost.PROMISE
    }
    assert len(may_promise) < count


@pytest.mark.parametrize("count", range(1, 6))
def test_leave_is_promised_only_where_those_who_stay_go_on_with_it_and_not_without(count: int) -> None:
    previous = start(count)
    for alive, leaving in known_to(previous):
        staying = alive - leaving
        found = {me: leave_cost(previous, me, alive, (), leaving) for me in leaving}
        promised = [me for me, one in found.items() if one is LeaveCost.PROMISE]
        if promised:
            assert not is_quorum(previous, staying, ())
            assert is_quorum(previous, staying, [me for me in leaving if me in promised])
        elif staying and is_quorum(previous, alive, ()) and not is_quorum(previous, staying, ()):
            assert set(found.values()) == {LeaveCost.NEEDED}


def test_leave_is_promised_where_one_other_could_not_go_on_without() -> None:
    two, three = start(2), start(3)
    planner_only = [LeaveCost.PROMISE if peer == two.planner else LeaveCost.FREE for peer in lead_order(two)]
    assert leave_costs(two, two.members) == planner_only
    assert leave_costs(three, three.members) == [LeaveCost.FREE] * 3
    for gone in three.members:  # one dead and one counted out: half of those left are no quorum
        left = [peer for peer in three.members if peer != gone]
        assert leave_costs(three, left) == [LeaveCost.NEEDED] * 2
        assert {leave_cost(three, peer, left, (), left) for peer in left} == {LeaveCost.FREE}


def test_two_of_three_that_leave_together_promise_or_see_the_round_through_and_three_simply_go() -> None:
    three = start(3)
    order = lead_order(three)
    spared = next(peer for peer in order if peer != three.planner)
    for stays in order:
        leaving = [peer for peer in order if peer != stays]
        found = {peer: leave_cost(three, peer, order, (), leaving) for peer in leaving}
        if stays == spared:
            assert found == dict.fromkeys(leaving, LeaveCost.PROMISE)
        elif stays == three.planner:
            assert found == {peer: LeaveCost.NEEDED if peer == spared else LeaveCost.PROMISE for peer in leaving}
            (other,) = set(leaving) - {spared}
            assert leave_cost(three, spared, order, (other,)) is LeaveCost.FREE  # once the other's promise is heard
        else:
            assert found == dict.fromkeys(leaving, LeaveCost.NEEDED)
    assert {leave_cost(three, peer, order, (), order) for peer in order} == {LeaveCost.FREE}


def test_what_anybody_can_sign_is_hardly_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty-four keys are cheap; a node that verified what they sign would do nothing else."""
    previous, checked = start(4), list[PeerId]()
    sybils = sorted((Identity.from_seed(bytes([9, n]) * 16) for n in range(60)), key=lambda key: key.peer_id)
    value = value_of(previous, plan_hash("x"), previous.members[0], signing=KEYS)
    by_sybils = certified(previous, sybils, value=value)
    forged = msgspec.structs.replace(by_sybils, signers=previous.members, signatures=by_sybils.signatures[:4])
    mixed = msgspec.structs.replace(
        by_sybils, signers=(*by_sybils.signers, *previous.members), signatures=(*by_sybils.signatures, *[bytes(64)] * 4)
    )
    joining = value_of(
        previous, plan_hash("x"), previous.members[0], [*previous.members, *(s.peer_id for s in sybils)], signing=sybils
    )
    joined = certified(previous, [], value=joining)
    joined = msgspec.structs.replace(joined, signers=previous.members, signatures=(bytes(64),) * 4)
    verify = certificate_module.verify

    def counted(peer: PeerId, *about: bytes) -> bool:
        checked.append(peer)
        return verify(peer, *about)

    monkeypatch.setattr(certificate_module, "verify", counted)
    for certificate in (by_sybils, forged, mixed, joined):
        with pytest.raises(RemoteError):
            check_certificate(certificate, previous)
    assert len(checked) <= 2
    check_certificate(certified(previous, KEYS[:4], value=value), previous)
    assert len(checked) >= 4
