"""Revised plans: what stands, what is done again and by whom, in every case that a lead can be told of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.collectives.grid import Grid
from shoal.protocol.certificate import genesis
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import NO_HASH, ChunkResults, Held, OwnedRange, Participant, Plan, Relay, Term, domain_hash
from shoal.protocol.planning import Deal, Eviction, PlanOrder, RoundSettings, check_plan, reroute_plan, revise_plan
from shoal.protocol.voting import lead
from tests.protocol.lab import SWARM, paper_identities
from tests.protocol.round_node import deal_evenly
from tests.round_messages import plan_with

PEERS = [identity.peer_id for identity in paper_identities(5)]
START = genesis(SWARM, PEERS)
SETTINGS = RoundSettings(
    numel=1000, chunk_values=100, codec="int8", grace_s=1.0, reduce_deadline_s=10.0, weight_cap=4.0
)
PLAN = plan_with(
    (
        Participant(p, n + 1, 10 * n + 10, domain_hash("root", p.encode()), 100 * n, 200 * n)
        for n, p in enumerate(PEERS)
    ),
    Grid(1000, 100),
    after=START,
    planner=lead(START, 0),
    owners=tuple(OwnedRange(n, 2 * n, 2 * n + 2) for n in range(5)),
)
Holding = Mapping[int, Mapping[int, bytes]]
"""By signer, results by chunk."""


def result(number: int) -> bytes:
    return domain_hash("result", bytes([number]))


def plan_order(*gone: int, view: int = 0, attempt: int = 1) -> PlanOrder:
    return PlanOrder(
        view=view, attempt=attempt, planner=lead(START, view), evicted=tuple(sorted(PEERS[n] for n in gone))
    )


def held(gone: Sequence[int], holding: Holding) -> Held:
    chunks = tuple(ChunkResults.of(signer, results) for signer, results in holding.items())
    evicted = tuple(PEERS[n] for n in gone)
    return Held(term=Term(), round=1, base=START.hash, lineage=PLAN.hash, evicted=evicted, chunks=chunks)


def revise(gone: Sequence[int], holdings: Mapping[int, Holding], plan: Plan = PLAN, deal: Deal = deal_evenly) -> Plan:
    """The revision without `gone`, given what each of the others holds; it passes its check."""
    helds = {peer: held(gone, holdings.get(n, {})) for n, peer in enumerate(PEERS) if n not in gone}
    where = plan_order(*gone, attempt=plan.attempt + 1)
    revised = revise_plan(plan, where, helds, deal)
    check_plan(revised, where.planner, START, SETTINGS)
    return revised


def owners(plan: Plan) -> list[int]:
    return [owned.owner for owned in plan.owners for _ in range(owned.start, owned.stop)]


def standing(plan: Plan) -> dict[int, tuple[int, bytes]]:
    """Per chunk that stands, its source and its result."""
    return {chunk: (part.place, digest) for part in plan.standing for chunk, digest in part.by_chunk().items()}


# -- what stands and what is lost ----------------------------------------------------------------------------


def test_what_nobody_holds_is_dealt_to_who_remains_and_all_else_stays() -> None:
    plan = revise([3], {})
    assert owners(plan) == [0, 0, 1, 1, 2, 2, 1, 4, 4, 4]  # two chunks among four: deal_evenly gives the 2nd and 4th
    assert plan.standing == ()
    assert plan.participants == PLAN.participants
    assert (plan.numel, plan.chunk_values, plan.codec) == (PLAN.numel, PLAN.chunk_values, PLAN.codec)
    assert (plan.origin, plan.lineage, plan.evicted) == (PLAN.hash, PLAN.hash, (PEERS[3],))
    assert (plan.view, plan.attempt, plan.planner) == (0, 1, lead(START, 0))


def test_lost_chunks_are_dealt_by_the_rates_of_who_remains() -> None:
    asked: list[tuple[list[tuple[int, int]], int]] = []

    def deal(rates: Sequence[tuple[int, int]], chunks: int) -> tuple[OwnedRange, ...]:
        asked.append((list(rates), chunks))
        return (OwnedRange(2, 0, 3), OwnedRange(0, 3, 4))

    plan = revise([1, 2], {}, deal=deal)
    assert asked == [([(0, 0), (300, 600), (400, 800)], 4)]
    assert owners(plan) == [0, 0, 4, 4, 4, 0, 3, 3, 4, 4]


def test_final_that_anybody_holds_stands_with_its_signer_and_is_copied_from_the_holder() -> None:
    plan = revise([3], {1: {3: {6: result(6)}}})
    assert owners(plan) == [0, 0, 1, 1, 2, 2, 3, 4, 4, 4]  # 7 is lost
    assert standing(plan) == {6: (1, result(6))}


def test_when_everything_is_held_nothing_is_dealt() -> None:
    def deal(rates: Sequence[tuple[int, int]], chunks: int) -> tuple[OwnedRange, ...]:
        raise AssertionError("there is nothing to deal")

    plan = revise([3], {0: {3: {6: result(6), 7: result(7)}}}, deal=deal)
    assert owners(plan) == owners(PLAN)
    assert standing(plan) == {6: (0, result(6)), 7: (0, result(7))}


def test_copying_is_shared_among_the_holders() -> None:
    both = {3: {6: result(6), 7: result(7)}}
    assert standing(revise([3], {1: both, 4: both})) == {6: (1, result(6)), 7: (4, result(7))}
    assert standing(revise([3], {1: {3: {6: result(6)}}, 0: both})) == {6: (0, result(6)), 7: (0, result(7))}


def test_finals_of_owners_that_remain_are_not_touched() -> None:
    plan = revise([3], {n: {0: {0: result(0)}, 1: {2: result(99)}} for n in (0, 1, 2, 4)})
    assert plan.standing == ()
    assert owners(plan)[:6] == owners(PLAN)[:6]


def test_of_two_results_for_one_chunk_the_one_that_more_hold_stands() -> None:
    mine, theirs = {3: {6: result(1)}}, {3: {6: result(2)}}
    assert standing(revise([3], {0: mine, 1: theirs, 2: theirs}))[6] == (1, result(2))
    assert standing(revise([3], {0: mine, 1: mine, 2: theirs}))[6] == (0, result(1))


def test_tie_between_results_is_broken_the_same_way_whoever_holds_which() -> None:
    one, other = sorted((result(1), result(2)))
    for first, second in ((one, other), (other, one)):
        plan = revise([3], {0: {3: {6: first}}, 1: {3: {6: second}}})
        assert standing(plan)[6] == (0 if first == one else 1, one)


def test_word_of_the_evicted_counts_for_nothing() -> None:
    helds = {PEERS[n]: held([3], {3: {6: result(6)}} if n == 3 else {}) for n in range(5)}
    helds[PeerId("a stranger")] = held([3], {3: {7: result(7)}})
    del helds[PEERS[3]]
    assert revise_plan(PLAN, plan_order(3), helds, deal_evenly).standing == ()


def test_chunk_that_another_summed_meanwhile_stands_with_who_signed_it() -> None:
    """The lead knows only the first plan; by a revision behind its back 6 was dealt to 1, who summed it."""
    plan = revise([3], {1: {1: {6: result(6)}}, 2: {1: {6: result(6)}, 0: {0: result(0)}}, 4: {}})
    assert owners(plan)[6] == 1
    assert standing(plan) == {6: (1, result(6))}


# -- revisions of revisions ----------------------------------------------------------------------------------


def test_lineage_and_places_outlast_all_revisions() -> None:
    first = revise([3], {0: {3: {6: result(6)}}})
    second = revise([0, 3], {1: {3: {6: result(6)}}}, plan=first)
    assert (second.origin, second.lineage, second.attempt) == (PLAN.hash, PLAN.hash, 2)
    assert second.participants == PLAN.participants
    assert standing(second) == {6: (1, result(6))}
    assert owners(second)[6] == 3
    assert set(owners(second)) <= {1, 2, 3, 4}


def test_final_whose_last_holder_was_lost_is_dealt_again() -> None:
    first = revise([3], {0: {3: {6: result(6)}}})
    assert standing(first) == {6: (0, result(6))}
    second = revise([0, 3], {}, plan=first)
    assert second.standing == ()
    assert owners(second)[6] in (1, 2, 4)


def test_chunk_dealt_anew_is_dealt_once_more_when_its_second_owner_is_lost() -> None:
    first = revise([3], {}, deal=lambda rates, chunks: (OwnedRange(0, 0, chunks),))
    assert owners(first)[6:8] == [0, 0]
    second = revise([0, 3], {2: {0: {7: result(7)}}}, plan=first, deal=lambda r, n: (OwnedRange(2, 0, n),))
    assert owners(second) == [4, 4, 1, 1, 2, 2, 4, 0, 4, 4]
    assert standing(second) == {7: (2, result(7))}


def test_relays_of_the_lost_are_dropped() -> None:
    plan = msgspec.structs.replace(PLAN, relays=(Relay(0, 1, 2), Relay(0, 3, 2), Relay(1, 4, 3), Relay(2, 4, 1)))
    assert revise([3], {}, plan=plan).relays == (Relay(0, 1, 2), Relay(2, 4, 1))


def test_rerouting_changes_the_relays_and_the_seat_alone() -> None:
    plan = revise([3], {0: {3: {6: result(6)}}})
    there = plan_order(3, view=2, attempt=5)
    rerouted = reroute_plan(plan, there, (Relay(0, 1, 2),))
    check_plan(rerouted, there.planner, START, SETTINGS)
    assert rerouted == msgspec.structs.replace(
        plan, relays=(Relay(0, 1, 2),), view=2, attempt=5, planner=lead(START, 2)
    )
    assert reroute_plan(PLAN, there, ()).origin == PLAN.hash


# -- any case at all -----------------------------------------------------------------------------------------


@st.composite
def losses(draw: st.DrawFn) -> tuple[list[int], dict[int, Holding]]:
    gone = sorted(draw(st.sets(st.integers(0, 4), min_size=1, max_size=4)))
    results = st.dictionaries(st.integers(0, 9), st.integers(0, 2).map(result), max_size=6)
    holding = st.dictionaries(st.integers(0, 4), results, max_size=3)
    return gone, {n: draw(holding) for n in range(5) if n not in gone}


@given(losses())
def test_every_revision_is_in_order_and_says_something_new_about_the_lost_only(
    loss: tuple[list[int], dict[int, Holding]],
) -> None:
    gone, holdings = loss
    plan = revise(gone, holdings)  # which checks it
    again = revise_plan(
        PLAN, plan_order(*gone), {PEERS[n]: held(gone, h) for n, h in reversed(holdings.items())}, deal_evenly
    )
    assert plan == again
    stand = standing(plan)
    for chunk, (before, after) in enumerate(zip(owners(PLAN), owners(plan), strict=True)):
        claims = [(n, s, r[chunk]) for n, h in holdings.items() for s, r in h.items() if chunk in r]
        if before not in gone:
            assert after == before
            assert chunk not in stand
        elif claims:
            source, digest = stand[chunk]
            assert (source, after, digest) in claims
        else:
            assert chunk not in stand
            assert after not in gone


# -- asking what is held -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lineage", "gone", "answers"),
    [
        (PLAN.hash, (1, 3), True),
        (PLAN.hash, (3, 1), True),
        (PLAN.hash, (1, 2, 3), True),
        (PLAN.hash, (3,), False),
        (PLAN.hash, (2, 3), False),
        (NO_HASH, (1, 3), False),
    ],
)
def test_answer_is_to_the_eviction_that_it_names(lineage: bytes, gone: tuple[int, ...], answers: bool) -> None:
    eviction = Eviction(view=0, attempt=1, lineage=lineage, evicted=frozenset({PEERS[1], PEERS[3]}), since=0.0)
    assert eviction.answered_by(held(gone, {})) == answers
    assert not eviction.answered_by(None)


@pytest.mark.parametrize(
    ("closed", "gone"),
    [
        ({}, set()),
        ({1: {4}, 2: {4}}, set()),
        ({1: {2}}, {1}),
        ({0: {2}}, {2}),
        ({1: {0}}, {1}),
        ({1: {0}, 2: {0}}, {1, 2}),
        ({1: {3}, 2: {3}}, {3}),
        ({1: {2}, 2: {1}}, {1, 2}),
        ({1: {2, 3}, 3: {2}}, {1, 2}),
    ],
)
def test_of_two_between_whom_nothing_is_taken_one_goes(closed: Mapping[int, set[int]], gone: set[int]) -> None:
    """4 is evicted anyhow; the lead is 0, which stays."""
    eviction = Eviction(view=0, attempt=1, lineage=PLAN.hash, evicted=frozenset({PEERS[4]}), since=0.0)
    helds = {PEERS[n]: held(sorted({4} | closed.get(n, set())), {}) for n in range(4)}
    assert all(eviction.answered_by(word) for word in helds.values())
    assert eviction.parted(helds, PEERS[0]) == {PEERS[n] for n in gone}
    wider = Eviction(view=0, attempt=1, lineage=PLAN.hash, evicted=frozenset(PEERS[n] for n in {4} | gone), since=0.0)
    rest = {peer: word for peer, word in helds.items() if peer not in wider.evicted}
    assert wider.parted(rest, PEERS[0]) == set(), "who remains then takes everything from who remains"
