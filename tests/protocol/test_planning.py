"""Plans: weights are capped, the deal covers the grid, and whatever is malformed is refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.certificate import genesis, lead
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import NO_HASH, WEIGHT_LIMIT, OwnedRange, Participant, Plan, Ready, domain_hash
from shoal.protocol.planning import (
    CONTRIBUTOR,
    JOINER,
    OBSERVER,
    ROLES,
    TRAINING,
    PlanSeat,
    RoundSettings,
    capped_weights,
    check_plan,
    make_plan,
)
from tests.protocol.lab import SWARM, paper_identities
from tests.protocol.round_lab import deal_evenly

PEERS = [identity.peer_id for identity in paper_identities(5)]
START = genesis(SWARM, PEERS[:4])
LEAD = lead(START, 0)
SETTINGS = RoundSettings(
    numel=1001, chunk_values=100, codec="int8", grace_s=1.0, reduce_deadline_s=10.0, weight_cap=2.0
)


def ready(peer: PeerId, role: str = CONTRIBUTOR, tokens: int = 10) -> Ready:
    return Ready(
        term=START.term,
        round=1,
        base=START.hash,
        role=role,
        state=START.digest,
        root=domain_hash("root", peer.encode()),
        squares=(),
        tokens=tokens,
        upload=1,
        download=1,
        reaches=(),
    )


def plan_of(
    *readies: tuple[int, str, int], weightless: tuple[int, ...] = (), settings: RoundSettings = SETTINGS
) -> Plan:
    return make_plan(
        START,
        PlanSeat(view=0, attempt=0, planner=LEAD, evicted=()),
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
        ([10], 2.0, [10]),
        ([10, 10, 10], 1.0, [10, 10, 10]),
        ([10, 20, 1000], 2.0, [10, 20, 40]),
        ([10, 1000], 3.0, [10, 30]),  # of an even count the lower median: one giant cannot raise it
        ([0, 0, 0, 8, 100], 2.0, [0, 0, 0, 8, 16]),
        ([1, 1, 9], 0.5, [1, 1, 1]),  # never below one
        ([WEIGHT_LIMIT, WEIGHT_LIMIT], 4.0, [WEIGHT_LIMIT, WEIGHT_LIMIT]),
    ],
)
def test_weights_are_tokens_capped_at_the_median(tokens: list[int], cap: float, weights: list[int]) -> None:
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
    in_order = sorted(range(len(tokens)), key=lambda n: tokens[n])
    assert [capped[peers[n]] for n in in_order] == sorted(capped.values())


# -- making a plan -------------------------------------------------------------------------------------------


def test_plan_orders_by_peer_and_weighs_contributors_only() -> None:
    plan = plan_of((3, CONTRIBUTOR, 10), (1, TRAINING, 0), (0, CONTRIBUTOR, 12), (2, OBSERVER, 0), (4, JOINER, 0))
    assert [p.peer for p in plan.participants] == PEERS
    assert [p.weight for p in plan.participants] == [12, 0, 0, 10, 0]
    assert [p.root == NO_HASH for p in plan.participants] == [False, True, True, False, True]
    assert plan.contributors() == (0, 3)
    assert plan.number(PEERS[3]) == 3
    assert plan.number(PeerId("nobody")) is None
    assert frozenset({CONTRIBUTOR, TRAINING, OBSERVER, JOINER}) == ROLES


def test_newcomer_has_no_weight_even_with_a_contribution_and_does_not_move_the_median() -> None:
    plan = plan_of((0, CONTRIBUTOR, 10), (1, CONTRIBUTOR, 15), (4, CONTRIBUTOR, 1), weightless=(4,))
    assert [(p.weight, p.tokens) for p in plan.participants] == [(10, 10), (15, 15), (0, 0)]
    assert plan.participants[2].root == NO_HASH


def test_plan_carries_the_grid_and_its_seat() -> None:
    seat = PlanSeat(view=4, attempt=2, planner=lead(START, 4), evicted=(PEERS[1],))
    readies = {PEERS[0]: ready(PEERS[0])}
    plan = make_plan(START, seat, readies, weightless=(), settings=SETTINGS, deal=deal_evenly)
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
        ({"evicted": (PEERS[0],)}, "twice"),
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
    ],
)
def test_malformed_plan_is_refused(changes: dict[str, object], says: str) -> None:
    plan = msgspec.structs.replace(GOOD, **changes)
    with pytest.raises(RemoteError, match=says) as error:
        check_plan(plan, LEAD, START, SETTINGS)
    assert error.value.peer == LEAD


def test_plan_relayed_by_another_is_refused() -> None:
    other = next(peer for peer in PEERS if peer != LEAD)
    with pytest.raises(RemoteError, match="another leads"):
        check_plan(GOOD, other, START, SETTINGS)
