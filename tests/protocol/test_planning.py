"""Plans: weights are capped, the deal covers the grid, and whatever is malformed is refused."""

from __future__ import annotations

from math import gcd

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.certificate import genesis
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import (
    NO_HASH,
    WEIGHT_LIMIT,
    ChunkResults,
    OwnedRange,
    Participant,
    Plan,
    Ready,
    Relay,
    domain_hash,
)
from shoal.protocol.planning import (
    CONTRIBUTOR,
    JOINER,
    OBSERVER,
    ROLES,
    TRAINING,
    PlanOrder,
    RoundSettings,
    capped_weights,
    check_plan,
    make_plan,
    separated,
)
from shoal.protocol.voting import lead
from tests.protocol.lab import SWARM, paper_identities
from tests.protocol.round_node import deal_evenly
from tests.round_messages import ready_with

PEERS = [identity.peer_id for identity in paper_identities(5)]
START = genesis(SWARM, PEERS[:4])
LEAD = lead(START, 0)
SETTINGS = RoundSettings(
    numel=1001, chunk_values=100, codec="int8", grace_s=1.0, reduce_deadline_s=10.0, weight_cap=2.0
)


def ready(peer: PeerId, role: str = CONTRIBUTOR, tokens: int = 10) -> Ready:
    return ready_with(
        START,
        domain_hash("root", peer.encode()),
        role=role,
        tokens=tokens,
        upload=1,
        download=2,
        life=domain_hash("life", peer.encode()),
    )


def plan_of(
    *readies: tuple[int, str, int], weightless: tuple[int, ...] = (), settings: RoundSettings = SETTINGS
) -> Plan:
    return make_plan(
        START,
        PlanOrder(view=0, attempt=0, planner=LEAD, evicted=()),
        {PEERS[number]: ready(PEERS[number], role, tokens) for number, role, tokens in readies},
        weightless={PEERS[number] for number in weightless},
        settings=settings,
        deal=deal_evenly,
    )


GOOD = plan_of((2, CONTRIBUTOR, 10), (0, CONTRIBUTOR, 12), (1, OBSERVER, 0))


# -- weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "cap", "weights"),
    [
        ([], 2.0, []),
        ([0, 0], 2.0, [0, 0]),
        ([10], 2.0, [1]),
        ([10, 10, 10], 1.0, [1, 1, 1]),  # in lowest terms
        ([10, 15, 1000], 2.0, [2, 3, 6]),
        ([10, 15, 1000], 1.4, [10, 15, 21]),  # with the cap in them: 15 · 1.4
        ([10, 1000], 3.0, [1, 3]),  # of an even count the lower median: one giant cannot raise it
        ([0, 0, 0, 8, 100], 2.0, [0, 0, 0, 1, 2]),
        ([1, 1, 9], 0.5, [1, 1, 1]),  # never below one
        ([WEIGHT_LIMIT, WEIGHT_LIMIT], 4.0, [1, 1]),
        ([WEIGHT_LIMIT - 1, WEIGHT_LIMIT], 4.0, [WEIGHT_LIMIT - 1, WEIGHT_LIMIT]),
    ],
)
def test_weights_are_tokens_capped_at_the_median_in_lowest_terms(
    tokens: list[int], cap: float, weights: list[int]
) -> None:
    peers = [PeerId(str(number)) for number in range(len(tokens))]
    capped = capped_weights(dict(zip(peers, tokens, strict=True)), cap)
    assert [capped[peer] for peer in peers] == weights


@given(st.lists(st.integers(0, WEIGHT_LIMIT), max_size=12), st.floats(1.0, 10.0))
def test_weights_never_exceed_tokens_nor_the_cap_and_keep_the_order(tokens: list[int], cap: float) -> None:
    peers = [PeerId(str(number)) for number in range(len(tokens))]
    capped = capped_weights(dict(zip(peers, tokens, strict=True)), cap)
    positive = sorted(t for t in tokens if t > 0)
    for peer, count in zip(peers, tokens, strict=True):
        assert 0 <= capped[peer] <= min(count, WEIGHT_LIMIT)
        assert (capped[peer] == 0) == (count == 0)
        if positive:
            assert capped[peer] <= max(1, cap * positive[(len(positive) - 1) // 2])
    if positive:
        ceiling = max(1, int(cap * positive[(len(positive) - 1) // 2]))
        assert gcd(*capped.values()) == 1
        # The proportions are those of the capped tokens, exactly.
        least = min(capped[peer] for peer in peers if capped[peer])
        assert [capped[p] * min(positive[0], ceiling) for p in peers] == [least * min(t, ceiling) for t in tokens]
    in_order = sorted(range(len(tokens)), key=lambda n: tokens[n])
    assert [capped[peers[n]] for n in in_order] == sorted(capped.values())


# -- making a plan -------------------------------------------------------------------------------------------


def test_plan_orders_by_peer_and_weighs_contributors_only() -> None:
    plan = plan_of((3, CONTRIBUTOR, 10), (1, TRAINING, 0), (0, CONTRIBUTOR, 12), (2, OBSERVER, 0), (4, JOINER, 0))
    assert [p.peer for p in plan.participants] == PEERS
    assert [p.weight for p in plan.participants] == [6, 0, 0, 5, 0]
    assert [p.tokens for p in plan.participants] == [12, 0, 0, 10, 0]
    assert [(p.upload, p.download) for p in plan.participants] == [(1, 2)] * 5
    assert [p.root == NO_HASH for p in plan.participants] == [False, True, True, False, True]
    assert [p.life for p in plan.participants] == [domain_hash("life", peer.encode()) for peer in PEERS]
    assert plan.contributors() == (0, 3)
    assert plan.number(PEERS[3]) == 3
    assert plan.number(PeerId("nobody")) is None
    assert frozenset({CONTRIBUTOR, TRAINING, OBSERVER, JOINER}) == ROLES


def test_newcomer_has_no_weight_even_with_a_contribution_and_does_not_move_the_median() -> None:
    plan = plan_of((0, CONTRIBUTOR, 10), (1, CONTRIBUTOR, 15), (4, CONTRIBUTOR, 1), weightless=(4,))
    assert [(p.weight, p.tokens) for p in plan.participants] == [(2, 10), (3, 15), (0, 0)]
    assert plan.participants[2].root == NO_HASH


def test_plan_carries_the_grid_and_its_seat() -> None:
    plan_order = PlanOrder(view=4, attempt=2, planner=lead(START, 4), evicted=(PEERS[1],))
    readies = {PEERS[0]: ready(PEERS[0])}
    plan = make_plan(START, plan_order, readies, weightless=(), settings=SETTINGS, deal=deal_evenly)
    assert (plan.view, plan.attempt, plan.planner, plan.evicted) == (4, 2, lead(START, 4), (PEERS[1],))
    assert (plan.codec, plan.numel, plan.chunk_values, plan.chunks) == ("int8", 1001, 100, 11)
    assert (plan.term, plan.round, plan.base) == (START.term, 1, START.hash)
    assert plan.owners == (OwnedRange(0, 0, 11),)


@pytest.mark.parametrize(("numel", "chunks"), [(1, 1), (99, 1), (100, 1), (101, 2), (1000, 10)])
def test_last_chunk_may_be_short(numel: int, chunks: int) -> None:
    assert msgspec.structs.replace(GOOD, numel=numel).chunks == chunks


# -- checking a plan -----------------------------------------------------------------------------------------


def test_plan_as_made_passes_its_check() -> None:
    check_plan(GOOD, LEAD, START, SETTINGS)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"planner": PEERS[4]}, "another leads"),
        ({"view": 1}, "another leads"),
        ({"codec": "fp32"}, "grid or codec"),
        ({"numel": 1000}, "grid or codec"),
        ({"chunk_values": 99}, "grid or codec"),
        ({"participants": GOOD.participants + GOOD.participants[:1]}, "twice"),
        ({"evicted": (PEERS[0],)}, "revises nothing"),
        ({"standing": (ChunkResults.of(0, {3: bytes(32)}),)}, "revises nothing"),
        (
            {"participants": tuple(Participant(p.peer, 0, 0, NO_HASH) for p in GOOD.participants)},
            "without a contribution",
        ),
        ({"owners": ()}, "every chunk once"),
        ({"owners": (OwnedRange(0, 0, 10),)}, "every chunk once"),
        ({"owners": (OwnedRange(0, 0, 12),)}, "every chunk once"),
        ({"owners": (OwnedRange(0, 1, 11),)}, "every chunk once"),
        ({"owners": (OwnedRange(0, 0, 5), OwnedRange(1, 4, 11))}, "every chunk once"),
        ({"owners": (OwnedRange(0, 0, 5), OwnedRange(1, 6, 11))}, "every chunk once"),
        ({"owners": (OwnedRange(0, 0, 5), OwnedRange(1, 5, 5), OwnedRange(1, 5, 11))}, "every chunk once"),
        ({"owners": (OwnedRange(0, 0, 5), OwnedRange(1, 5, 3), OwnedRange(1, 3, 11))}, "every chunk once"),
        ({"owners": (OwnedRange(3, 0, 11),)}, "every chunk once"),
        *(({"relays": (Relay(*places),)}, "between nobody") for places in ((0, 3, 1), (1, 0, 2), (1, 1, 2), (0, 1, 3))),
        *(({"relays": (Relay(*places),)}, "cannot be one") for places in ((0, 1, 0), (0, 2, 2))),
    ],
)
def test_malformed_plan_is_refused(changes: dict[str, object], says: str) -> None:
    plan = msgspec.structs.replace(GOOD, **changes)
    with pytest.raises(RemoteError, match=says) as error:
        check_plan(plan, LEAD, START, SETTINGS)
    assert error.value.peer == LEAD


REVISED = msgspec.structs.replace(
    GOOD,
    attempt=1,
    origin=GOOD.hash,
    evicted=(PEERS[1],),
    owners=(OwnedRange(0, 0, 4), OwnedRange(1, 4, 6), OwnedRange(2, 6, 11)),
    standing=(ChunkResults.of(0, {4: bytes(32), 7: bytes(32)}), ChunkResults.of(2, {5: bytes(32)})),
    relays=(Relay(0, 1, 2),),
)
"""Chunks 4 and 5 were signed by the evicted, and stand; 7 stands as a final of who remains."""


def test_revised_plan_passes_its_check() -> None:
    check_plan(REVISED, LEAD, START, SETTINGS)
    assert REVISED.lineage == GOOD.lineage == GOOD.hash
    assert REVISED.remaining == (PEERS[0], PEERS[2])
    assert REVISED.contributors() == GOOD.contributors() == (0, 2)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"standing": REVISED.standing[:1]}, "deals chunks to the evicted"),
        ({"standing": ()}, "deals chunks to the evicted"),
        ({"evicted": (PEERS[1], PEERS[2])}, "had from nobody"),
        ({"evicted": (PEERS[0], PEERS[1], PEERS[2])}, "had from nobody"),
        ({"standing": (ChunkResults.of(1, {4: bytes(32), 5: bytes(32)}),)}, "had from nobody"),
        ({"standing": (ChunkResults.of(3, {4: bytes(32), 5: bytes(32)}),)}, "had from nobody"),
        ({"standing": (*REVISED.standing, ChunkResults.of(2, {4: bytes(32)}))}, "twice or not at all"),
        ({"standing": (*REVISED.standing, ChunkResults.of(2, {11: bytes(32)}))}, "twice or not at all"),
        ({"relays": (Relay(0, 2, 1),)}, "cannot be one"),
        ({"owners": (OwnedRange(0, 0, 4), OwnedRange(1, 4, 7), OwnedRange(2, 7, 11))}, "deals chunks to the evicted"),
        ({"owners": (OwnedRange(0, 0, 4), OwnedRange(1, 4, 6))}, "every chunk once"),
        ({"origin": NO_HASH}, "revises nothing"),
    ],
)
def test_malformed_revision_is_refused(changes: dict[str, object], says: str) -> None:
    plan = msgspec.structs.replace(REVISED, **changes)
    with pytest.raises(RemoteError, match=says) as error:
        check_plan(plan, LEAD, START, SETTINGS)
    assert error.value.peer == LEAD


def test_revision_that_evicts_every_source_deals_to_nobody() -> None:
    plan = msgspec.structs.replace(REVISED, evicted=tuple(PEERS[:3]), standing=(), owners=(OwnedRange(0, 0, 11),))
    with pytest.raises(RemoteError, match="deals chunks to the evicted"):
        check_plan(plan, LEAD, START, SETTINGS)


# -- who cannot reach each other -----------------------------------------------------------------------------


def test_pairs_are_separated_that_both_say_so() -> None:
    said = {0: (1, 2), 1: (0, 2), 2: (0, 1, 3), 3: (0, 2)}
    readies = {
        PEERS[n]: msgspec.structs.replace(ready(PEERS[n]), reaches=tuple(PEERS[m] for m in reached))
        for n, reached in said.items()
    }
    readies[PEERS[4]] = ready(PEERS[4])  # says nothing, and so is taken to reach all
    assert separated(readies) == {(PEERS[1], PEERS[3])}  # 3 reaches 0, whatever 0 says


def test_plan_relayed_by_another_is_refused() -> None:
    other = next(peer for peer in PEERS if peer != LEAD)
    with pytest.raises(RemoteError, match="another leads"):
        check_plan(GOOD, other, START, SETTINGS)
