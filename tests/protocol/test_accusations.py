"""Accusations: whom the lead believes, between whom it looks for another path, and which third it tries next."""

from __future__ import annotations

import msgspec
import pytest

from shoal.protocol.accusations import PLANS_LIMIT, THIRDS_LIMIT, Accusations, Detours, pack_relays
from shoal.protocol.messages import NO_HASH, OwnedRange, Participant, Plan, Relay, Stalled, Term, domain_hash
from tests.protocol.lab import paper_identities

PEERS = [identity.peer_id for identity in paper_identities(6)]
ALIVE = frozenset(PEERS)

Said = dict[int, tuple[tuple[int, ...], tuple[int, ...]]]
"""Per accuser: whom it accuses directly, and of late finals."""


def plan_of(count: int, *, evicted: tuple[int, ...] = (), relays: tuple[Relay, ...] = ()) -> Plan:
    return Plan(
        term=Term(),
        round=1,
        base=NO_HASH,
        view=0,
        attempt=0,
        planner=PEERS[0],
        participants=tuple(Participant(peer, 1, 1, NO_HASH) for peer in PEERS[:count]),
        owners=(OwnedRange(0, 0, 1),),
        evicted=tuple(PEERS[n] for n in evicted),
        codec="fp32",
        numel=1,
        chunk_values=1,
        origin=bytes(range(32)) if evicted else NO_HASH,
        relays=relays,
    )


def stalled(plan: Plan, peers: tuple[int, ...], late: tuple[int, ...] = ()) -> Stalled:
    return Stalled(
        term=Term(),
        round=1,
        base=NO_HASH,
        plan=plan.hash,
        peers=tuple(PEERS[n] for n in peers),
        late=tuple(PEERS[n] for n in late),
    )


def heard(plan: Plan, said: Said) -> Accusations:
    accusations = Accusations()
    for accuser, (peers, late) in said.items():
        accusations.take(PEERS[accuser], stalled(plan, peers, late))
    return accusations


def numbers(peers: set[str]) -> set[int]:
    return {PEERS.index(peer) for peer in peers}  # type: ignore[arg-type]


def pair(one: int, other: int) -> tuple[str, str]:
    return PEERS[one], PEERS[other]


# -- who is believed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "said", "believed"),
    [
        (4, {}, set()),
        (4, {1: ((3,), ())}, set()),  # a lone accuser
        (4, {1: ((3,), ()), 2: ((3,), ())}, {3}),
        (4, {1: ((3,), ()), 2: ((0,), ())}, set()),
        (4, {1: ((3, 0), ()), 2: ((3, 0), ())}, {0, 3}),
        (4, {1: ((3,), ()), 3: ((3,), ())}, set()),  # nobody accuses himself
        (2, {0: ((1,), ())}, {1}),  # the only other one
        (2, {0: ((1,), ()), 1: ((0,), ())}, {0, 1}),
        (4, {1: ((), (3,)), 2: ((), (3,))}, {3}),  # late finals, if there is no direct word at all
        (4, {1: ((), (3,))}, set()),
        (2, {0: ((), (1,))}, {1}),
        (4, {0: ((), (3,)), 1: ((), (3,)), 3: ((2,), ())}, set()),  # the late owner waits for 2
        (4, {0: ((), (3,)), 1: ((2,), (3,)), 3: ((2,), ())}, {2}),
        (4, {1: ((3,), ()), 2: ((), (3,))}, set()),  # a direct word and a late final do not add up
    ],
)
def test_two_are_believed_or_the_only_other_one(count: int, said: Said, believed: set[int]) -> None:
    plan = plan_of(count)
    assert numbers(set(heard(plan, said).believed(plan, ALIVE))) == believed


@pytest.mark.parametrize(
    ("said", "suspected", "believed", "pairs"),
    [
        ({1: ((), (3,)), 2: ((), (3,))}, (), {3}, set()),
        ({1: ((), (3,)), 2: ((), (3,)), 3: ((), (3,))}, (), set(), set()),  # 3 waits for what does come
        ({1: ((), (3,)), 3: ((), (3,))}, (), set(), set()),  # no other path would help it
        ({1: ((), (2, 3)), 2: ((), ()), 3: ((), (3,))}, (), set(), {pair(1, 2)}),
        ({1: ((), (3,)), 2: ((), (3,)), 3: ((), (3,))}, (3,), {3}, set()),  # it said so, and is silent since
        ({1: ((3,), ()), 2: ((3,), ()), 3: ((), (3,))}, (), {3}, set()),  # that it waits excuses late finals only
    ],
)
def test_owner_that_waits_for_what_does_come_is_not_blamed(
    said: Said, suspected: tuple[int, ...], believed: set[int], pairs: set[tuple[str, str]]
) -> None:
    plan = plan_of(4)
    accusations = heard(plan, said)
    assert numbers(set(accusations.believed(plan, ALIVE, {PEERS[n] for n in suspected}))) == believed
    if not suspected:
        assert accusations.pairs(plan, ALIVE) == pairs
    assert PEERS[3] in accusations.anyones(plan, ALIVE), "when the reduction is overdue it has no excuse any more"


def test_words_of_the_dead_the_evicted_and_strangers_are_not_heard() -> None:
    plan = plan_of(5, evicted=(4,))
    for silent in ({1: ((3,), ()), 4: ((3,), ())}, {1: ((3,), ()), 5: ((3,), ())}):
        assert heard(plan, silent).believed(plan, ALIVE) == set()
    both: Said = {1: ((3,), ()), 2: ((3,), ())}
    assert heard(plan, both).believed(plan, ALIVE) == {PEERS[3]}
    assert heard(plan, both).believed(plan, ALIVE - {PEERS[2]}) == set()
    assert heard(plan, both).believed(plan, ALIVE - {PEERS[3]}) == set()  # it is dead already


def test_where_two_of_many_are_left_one_accuser_is_enough() -> None:
    plan = plan_of(4, evicted=(3,))
    assert heard(plan, {1: ((2,), ())}).believed(plan, ALIVE) == set()
    assert heard(plan, {1: ((2,), ())}).believed(plan, ALIVE - {PEERS[0]}) == {PEERS[2]}


@pytest.mark.parametrize(
    ("said", "suspected", "believed"),
    [
        ({1: ((3,), ())}, {3}, {3}),  # the detector, which asked others too, is the second
        ({1: ((3,), ())}, {2}, set()),
        ({1: ((3,), ()), 2: ((0,), ())}, {3}, {3}),
        ({1: ((), (3,))}, {3}, {3}),
        ({1: ((), (3,)), 3: ((2,), ())}, {3}, set()),  # it waits itself, whatever the detector says
        ({3: ((3,), ())}, {3}, set()),
        ({}, {3}, set()),  # suspicion alone is no accusation
    ],
)
def test_suspicion_of_the_detector_stands_for_a_second_accuser(
    said: Said, suspected: set[int], believed: set[int]
) -> None:
    plan = plan_of(4)
    found = heard(plan, said).believed(plan, ALIVE, {PEERS[n] for n in suspected})
    assert numbers(set(found)) == believed


def test_newest_word_of_each_stands_and_is_about_one_plan() -> None:
    plan, other = plan_of(4), plan_of(5)
    accusations = heard(plan, {1: ((3,), ()), 2: ((3,), ())})
    assert accusations.believed(other, ALIVE) == set()
    accusations.take(PEERS[2], stalled(plan, ()))
    assert accusations.believed(plan, ALIVE) == set()
    accusations.take(PEERS[2], stalled(plan, (3,)))
    assert accusations.believed(plan, ALIVE) == {PEERS[3]}


def test_nobody_fills_memory_with_plans_that_do_not_exist() -> None:
    plan = plan_of(4)
    accusations = heard(plan, {1: ((3,), ())})
    for number in range(PLANS_LIMIT):
        invented = domain_hash("invented", number.to_bytes(4, "little"))
        accusations.take(PEERS[2], msgspec.structs.replace(stalled(plan, (3,)), plan=invented))
    accusations.take(PEERS[2], stalled(plan, (3,)))
    assert accusations.believed(plan, ALIVE) == set()
    accusations.take(PEERS[0], stalled(plan, (3,)))  # it is that peer's own room that is used up
    assert accusations.believed(plan, ALIVE) == {PEERS[3]}


# -- anyone's word -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "accused"),
    [
        ({}, set()),
        ({1: ((3,), (0,))}, {3}),
        ({1: ((), (0,)), 2: ((), (3,))}, {0, 3}),
        ({1: ((), (0,)), 2: ((3,), ())}, {3}),
        ({1: ((1,), (2,))}, {2}),
    ],
)
def test_anyones_direct_word_counts_in_the_end_or_else_late_finals(said: Said, accused: set[int]) -> None:
    plan = plan_of(4)
    assert numbers(set(heard(plan, said).anyones(plan, ALIVE))) == accused


# -- pairs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "said", "pairs"),
    [
        (4, {}, set()),
        (4, {3: ((1,), ())}, {(1, 3)}),
        (4, {3: ((1,), ()), 1: ((3,), ())}, {(1, 3)}),
        (4, {3: ((1,), ()), 0: ((2,), ())}, {(1, 3), (0, 2)}),
        (4, {3: ((), (1,))}, {(1, 3)}),  # only its finals do not come through
        (4, {3: ((), (1,)), 0: ((2,), ())}, {(0, 2)}),  # 1 may be waiting
        (4, {2: ((1,), ()), 3: ((1,), ())}, set()),  # the fault is 1's
        (4, {2: ((1,), ()), 3: ((1,), ()), 0: ((2,), ())}, set()),  # one thing after the other
        (4, {3: ((3,), ())}, set()),
        (2, {0: ((1,), ())}, set()),  # there is no third
    ],
)
def test_lone_accusation_is_a_pair(count: int, said: Said, pairs: set[tuple[int, int]]) -> None:
    plan = plan_of(count)
    assert heard(plan, said).pairs(plan, ALIVE) == {pair(*both) for both in pairs}


def test_pair_with_the_dead_or_evicted_is_none() -> None:
    plan = plan_of(5, evicted=(4,))
    assert heard(plan, {0: ((4,), ())}).pairs(plan, ALIVE) == set()
    assert heard(plan, {0: ((3,), ())}).pairs(plan, ALIVE - {PEERS[3]}) == set()
    assert heard(plan, {0: ((3,), ())}).pairs(plan, ALIVE - {PEERS[1], PEERS[2]}) == set()  # and no third is left


# -- detours -------------------------------------------------------------------------------------------------


def test_thirds_are_tried_one_after_the_other_until_there_is_none() -> None:
    detours, plan, tried = Detours(), plan_of(4), []
    for _ in range(3):
        relays = detours.around(plan, {pair(0, 2)}, ALIVE)
        tried.append(relays)
        plan = plan_of(4, relays=relays or plan.relays)
        detours.note(plan)
    assert tried == [(Relay(0, 2, 1),), (Relay(0, 2, 3),), None]


def test_a_pair_gets_so_many_thirds_however_many_there_are() -> None:
    detours, plan = Detours(), plan_of(6)
    for _ in range(THIRDS_LIMIT):
        relays = detours.around(plan, {pair(0, 2)}, ALIVE)
        assert relays is not None
        detours.note(plan_of(6, relays=relays))
    assert len(PEERS) - 2 > THIRDS_LIMIT
    assert detours.around(plan, {pair(0, 2)}, ALIVE) is None
    assert detours.around(plan, {pair(1, 3)}, ALIVE) is not None


def test_relays_of_other_pairs_stay_as_they_are() -> None:
    detours, plan = Detours(), plan_of(5, relays=(Relay(0, 1, 2), Relay(3, 4, 2)))
    detours.note(plan)
    assert detours.around(plan, {pair(0, 1)}, ALIVE) == (Relay(0, 1, 3), Relay(3, 4, 2))
    assert detours.around(plan, set(), ALIVE) == plan.relays


def test_pairs_are_spread_over_thirds_who_are_in_no_trouble_themselves() -> None:
    relays = Detours().around(plan_of(6), {pair(0, 1), pair(0, 2), pair(1, 2)}, ALIVE)
    assert relays == (Relay(0, 1, 3), Relay(0, 2, 4), Relay(1, 2, 5))
    # Where there is nobody else, one of another pair has to do.
    assert Detours().around(plan_of(4), {pair(0, 1), pair(2, 3)}, ALIVE) == (Relay(0, 1, 2), Relay(2, 3, 0))


def test_third_is_alive_and_not_evicted() -> None:
    plan = plan_of(5, evicted=(1,))
    assert Detours().around(plan, {pair(0, 2)}, ALIVE) == (Relay(0, 2, 3),)
    assert Detours().around(plan, {pair(0, 2)}, ALIVE - {PEERS[3]}) == (Relay(0, 2, 4),)
    assert Detours().around(plan, {pair(0, 2)}, ALIVE - {PEERS[3], PEERS[4]}) is None


def test_one_pair_without_a_third_leaves_all_without() -> None:
    detours, plan = Detours(), plan_of(4)
    for via in (1, 3):
        detours.note(plan_of(4, relays=(Relay(0, 2, via),)))
    assert detours.around(plan, {pair(0, 2), pair(1, 3)}, ALIVE) is None
    assert detours.around(plan, {pair(1, 3)}, ALIVE) == (Relay(1, 3, 0),)


def test_relays_are_packed_by_place_and_in_order() -> None:
    backwards = [PEERS[3], PEERS[2], PEERS[1], PEERS[0]]
    relays = {pair(0, 1): PEERS[2], pair(2, 3): PEERS[0]}
    assert pack_relays(backwards, relays) == (Relay(0, 1, 3), Relay(2, 3, 1))
