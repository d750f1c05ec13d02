from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.collectives.grid import Grid
from shoal.collectives.partition import CAP_FAIR_SHARES, EVEN_FACTOR, deal, dialling_order, owner_by_chunk
from shoal.protocol.errors import LocalError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import NO_HASH, OwnedRange, Participant, Plan
from tests.round_messages import plan_with

rate = st.one_of(st.just(0), st.integers(1, 10**12))
rates_lists = st.lists(st.tuples(rate, rate), min_size=1, max_size=64)


def counts(ranges: tuple[OwnedRange, ...], n: int) -> list[int]:
    by_owner = {r.owner: r.stop - r.start for r in ranges}
    return [by_owner.get(i, 0) for i in range(n)]


@settings(max_examples=150)
@given(rates_lists, st.integers(1, 5000))
def test_deal_covers_every_chunk_once_within_the_cap(rates: list[tuple[int, int]], chunks: int) -> None:
    ranges = deal(rates, chunks)
    assert ranges[0].start == 0
    assert ranges[-1].stop == chunks
    assert all(a.stop == b.start and a.owner < b.owner for a, b in itertools.pairwise(ranges))
    assert all(r.start < r.stop for r in ranges)
    assert max(counts(ranges, len(rates))) <= CAP_FAIR_SHARES * chunks / len(rates) + 1


@settings(max_examples=100)
@given(st.lists(st.integers(1, 10**9), min_size=3, max_size=20))
def test_deal_makes_those_below_the_cap_finish_together(bandwidths: list[int]) -> None:
    """Loads D·(1 + (n − 2)·s)/b: equal for whoever owns chunks and is not capped, never larger for the others."""
    n, chunks = len(bandwidths), 60_000
    dealt = counts(deal([(b, 2 * b) for b in bandwidths], chunks), n)
    fastest = max(bandwidths)
    bandwidths = [b if fastest >= EVEN_FACTOR * b else fastest for b in bandwidths]
    times = [(1 + (n - 2) * c / chunks) / b for c, b in zip(dealt, bandwidths, strict=True)]
    slack = [(n - 2) / chunks / b for b in bandwidths]  # of one chunk
    cap = CAP_FAIR_SHARES * chunks / n
    free = [i for i in range(n) if 1 < dealt[i] < cap - 1]
    for i in free:
        for j in range(n):
            if j in free:
                assert abs(times[i] - times[j]) <= slack[i] + slack[j]
            elif dealt[j] >= cap - 1:  # it could have taken more
                assert times[j] <= times[i] + slack[i] + slack[j]
            else:  # it is too slow already without a chunk
                assert times[j] >= times[i] - slack[i] - slack[j]


def test_deal_by_hand() -> None:
    # n = 4, D = 1: T·8 − 1 + T·8 − 1 + T·4 − 1 = 2 gives T = 1/4, shares 1/2, 1/2, 0, 0; the last two are too slow
    assert counts(deal([(8, 9), (9, 8), (4, 4), (1, 100)], 100), 4) == [50, 50, 0, 0]
    # one rate unknown: counts as the lower median, 6
    assert counts(deal([(6, 6), (0, 6), (6, 0), (6, 6)], 10), 4) == [3, 3, 2, 2]


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(501, 1000), st.integers(501, 1000)), min_size=3, max_size=20))
def test_deal_is_equal_where_the_rates_are_nearly_so(rates: list[tuple[int, int]]) -> None:
    """Else who was dealt more, and so moved more in the same time, would be dealt still more the next time."""
    dealt = counts(deal(rates, 960), len(rates))
    assert max(dealt) - min(dealt) <= 1


def test_deal_without_any_rate_is_equal() -> None:
    assert counts(deal([(0, 0)] * 4, 10), 4) == [3, 3, 2, 2]
    assert counts(deal([(5, 1), (0, 0)], 7), 2) == [4, 3]


def test_deal_gives_a_very_slow_peer_nothing() -> None:
    assert counts(deal([(10**8, 10**8)] * 5 + [(10**4, 10**9)], 96), 6)[5] == 0


def test_deal_to_nobody_is_our_bug() -> None:
    with pytest.raises(LocalError):
        deal([], 4)


def owned(owners: tuple[OwnedRange, ...]) -> Plan:
    peers = [PeerId(f"12D3Koo{i:045d}") for i in range(2)]
    return plan_with((Participant(p, 1, 1, NO_HASH) for p in peers), Grid(40, 10), owners=owners)


def test_where_a_few_own_all_chunks_no_owner_is_everyones_first_to_dial() -> None:
    everybody = [PeerId(f"{number:02}") for number in range(64)]
    for owners in (everybody[:13], everybody[-13:], everybody[::5]):
        orders = [dialling_order(owners, everybody, me) for me in everybody if me not in owners]
        assert all(sorted(order) == owners for order in orders)
        for turn in range(len(owners)):
            of_turn = [order[turn] for order in orders]
            assert max(of_turn.count(owner) for owner in owners) <= 5  # of 51, where four or so are a fair share


def test_where_all_are_partners_each_begins_with_who_comes_after_it() -> None:
    everybody = [PeerId(name) for name in "abcdefg"]
    for place, me in enumerate(everybody):
        others = [peer for peer in everybody if peer != me]
        assert dialling_order(others, everybody, me) == everybody[place + 1 :] + everybody[:place]


def test_owner_by_chunk_reads_the_ranges() -> None:
    plan = owned((OwnedRange(1, 0, 1), OwnedRange(0, 1, 3), OwnedRange(1, 3, 4)))
    assert owner_by_chunk(plan) == (1, 0, 0, 1)


@pytest.mark.parametrize(
    "owners",
    [
        (),
        (OwnedRange(0, 0, 3),),
        (OwnedRange(0, 0, 5),),
        (OwnedRange(0, 1, 4),),
        (OwnedRange(0, 0, 2), OwnedRange(1, 1, 4)),
        (OwnedRange(2, 0, 4),),
        (OwnedRange(0, 0, 4), OwnedRange(1, 4, 4)),
        (OwnedRange(0, 0, 1 << 60),),
    ],
)
def test_owner_by_chunk_refuses_gaps_overlaps_and_strangers(owners: tuple[OwnedRange, ...]) -> None:
    with pytest.raises(LocalError):
        owner_by_chunk(owned(owners))
