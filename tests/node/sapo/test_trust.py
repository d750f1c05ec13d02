"""Trust: what faults cost, when a peer is ignored, and how it comes back."""

from __future__ import annotations

import pytest

from shoal.node.sapo import trust as trust_module
from shoal.node.sapo.trust import HALF_LIFE_ROUNDS, WEIGHTS, Trust
from shoal.protocol.rollouts import Reason
from tests.node.sapo.offering import peer_id

ALICE, BOB, CAROL = peer_id(1), peer_id(2), peer_id(3)


def test_liar_is_ignored_after_four_lies_and_nobody_else() -> None:
    trust = Trust()
    for lies in range(1, 5):
        assert not trust.ignored(ALICE)
        trust.fault(ALICE, Reason.HINT)
        assert trust.demerits(ALICE) == lies
    assert trust.ignored(ALICE)
    assert not trust.ignored(BOB)
    trust.fault(BOB, Reason.HINT)
    assert trust.all_ignored() == [ALICE]


def test_a_peer_that_is_ignored_is_told_of_once_each_time_with_the_fault() -> None:
    told: list[tuple[str, Reason]] = []
    trust = Trust(lambda peer, reason: told.append((peer, reason)))
    for reason in (Reason.HINT, Reason.HINT, Reason.HINT, Reason.COPIED, Reason.HINT):
        trust.fault(ALICE, reason)
    assert told == [(ALICE, Reason.COPIED)]
    trust.advance(int(HALF_LIFE_ROUNDS * 2))
    trust.fault(ALICE, Reason.NO_VARIANCE)
    for _ in range(4):
        trust.fault(ALICE, Reason.HINT)
    assert told == [(ALICE, Reason.COPIED), (ALICE, Reason.HINT)]


def test_demerits_decay_by_half_lives_and_the_second_chance_is_shorter() -> None:
    trust = Trust()
    for _ in range(4):
        trust.fault(ALICE, Reason.HINT)
    trust.advance(int(HALF_LIFE_ROUNDS) - 1)
    assert trust.ignored(ALICE)
    trust.advance(int(HALF_LIFE_ROUNDS))
    assert trust.demerits(ALICE) == pytest.approx(2.0)
    assert not trust.ignored(ALICE)
    trust.fault(ALICE, Reason.HINT)
    assert not trust.ignored(ALICE)
    trust.fault(ALICE, Reason.HINT)
    assert trust.ignored(ALICE)


def test_flood_does_not_put_a_peer_out_for_ever() -> None:
    trust = Trust()
    for _ in range(100_000):
        trust.fault(ALICE, Reason.FORGED)
    assert trust.demerits(ALICE) == 16.0
    trust.advance(int(3.1 * HALF_LIFE_ROUNDS))
    assert not trust.ignored(ALICE)


def test_good_groups_make_up_for_rare_disagreements() -> None:
    trust = Trust()
    for _ in range(100):
        trust.fault(ALICE, Reason.HINT)
        for _ in range(10):
            trust.good(ALICE)
    assert trust.demerits(ALICE) == pytest.approx(0.0)
    assert not trust.ignored(ALICE)


def test_what_is_nobodys_fault_costs_nothing() -> None:
    trust = Trust()
    for reason in set(Reason) - WEIGHTS.keys():
        trust.fault(ALICE, reason)
    assert trust.demerits(ALICE) == 0
    assert {Reason.NO_VARIANCE, Reason.UNSAFE_FAMILY, Reason.REPLAYED, Reason.QUOTA} <= set(Reason) - WEIGHTS.keys()


def test_peers_are_bounded_and_the_best_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust_module, "PEER_LIMIT", 2)
    trust = Trust()
    trust.fault(ALICE, Reason.FORGED)
    trust.fault(BOB, Reason.STALE)
    trust.fault(CAROL, Reason.HINT)
    assert [trust.demerits(peer) for peer in (ALICE, BOB, CAROL)] == [2.0, 0.0, 1.0]
