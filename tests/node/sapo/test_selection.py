"""Selection: what may be drawn, and the byte budget."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import msgspec

from shoal.node.sapo.selection import OFFERS_PER_ORIGIN, ByteBudget, Selector
from shoal.node.sapo.tasks import INDEX_LIMIT
from shoal.node.sapo.trust import WEIGHTS, Trust
from shoal.protocol.identity import PeerId
from shoal.protocol.offer_book import Offer
from shoal.protocol.rollouts import Reason, TaskRef
from tests.node.sapo.offering import TASKS, group_of, offer_of, peer_id
from tests.node.sapo.sums import SUMS

ALICE, BOB = peer_id(1), peer_id(2)


def offer(index: int, *, by: PeerId = ALICE, rewards: tuple[float, ...] = (1.0, 0.0), at: int = 0) -> Offer:
    return offer_of(group_of(by, index, rewards=rewards), arrived=at)[0]


def new_selector(*, trust: Trust | None = None) -> Selector:
    return Selector(TASKS, trust or Trust(), staleness_rounds=4)


def test_groups_without_variance_are_dropped_before_sampling() -> None:
    selector = new_selector()
    flat = [offer(index, rewards=(1.0, 1.0)) for index in range(50)] + [offer(99, rewards=(0.0, 0.0))]
    varied = [offer(index, by=BOB) for index in range(4)]
    rejected = Counter[Reason]()
    for round_number in range(3):
        eligible, left_out = selector.eligible(flat + varied, round_number=round_number, used=())
        rejected += left_out
        assert eligible == varied
    assert rejected == {Reason.NO_VARIANCE: 51}  # each once, however long it is offered


def test_offers_that_may_not_be_drawn_are_counted_by_reason() -> None:
    trust = Trust()
    for _ in range(4):
        trust.fault(BOB, Reason.HINT)
    selector = new_selector(trust=trust)
    fresh, used = offer(0, at=6), offer(3, at=6)
    offers = [
        fresh,
        used,
        offer(1, at=5),
        offer(4, by=BOB, at=6),
        offer(5, rewards=(1.0, 1.0), at=6),
        about(offer(6, at=6), msgspec.structs.replace(group_of(ALICE, 6).task, seed=1)),
        about(offer(7, at=6), msgspec.structs.replace(group_of(ALICE, 7).task, family="other")),
    ]
    reasons = (Reason.STALE, Reason.IGNORED, Reason.NO_VARIANCE, Reason.FOREIGN_TASK, Reason.UNSAFE_FAMILY)
    assert selector.eligible(offers, round_number=10, used={used.key}) == ([fresh], dict.fromkeys(reasons, 1))
    assert selector.eligible(offers, round_number=10, used={used.key}) == ([fresh], {})
    assert trust.demerits(ALICE) == WEIGHTS[Reason.FOREIGN_TASK]  # once


def test_who_has_a_family_in_another_version_is_at_no_fault_and_its_other_groups_are_taken() -> None:
    trust, told = Trust(), list[tuple[PeerId, str, str]]()
    selector = Selector(
        TASKS,
        trust,
        staleness_rounds=4,
        other_version=lambda one, here: told.append((one.origin, one.announcement.task.version, here)),
    )
    other = [about(offer(at), msgspec.structs.replace(group_of(ALICE, at).task, version="2")) for at in range(5)]
    same = offer(5)
    assert selector.eligible([*other, same], round_number=0, used=()) == ([same], {Reason.UNKNOWN_TASK: 5})
    assert trust.demerits(ALICE) == 0
    assert told == [(ALICE, "2", SUMS.version)]

    chosen = about(offer(6), msgspec.structs.replace(group_of(ALICE, 7).task, index=6, version="2"))
    beyond = about(offer(6), msgspec.structs.replace(offer(INDEX_LIMIT).announcement.task, version="2"))
    for one in (chosen, beyond):
        assert new_selector().eligible([one], round_number=0, used=()) == ([], {Reason.FOREIGN_TASK: 1})


def test_offer_that_is_not_at_hand_for_a_while_is_counted_once() -> None:
    trust = Trust()
    selector = new_selector(trust=trust)
    flat = offer(0, rewards=(1.0, 1.0))
    foreign = about(offer(1), msgspec.structs.replace(group_of(ALICE, 1).task, seed=1))
    rejected = Counter[Reason]()
    for offers in ([flat, foreign], [], [flat, foreign]):
        rejected += selector.eligible(offers, round_number=0, used=())[1]
    assert rejected == {Reason.NO_VARIANCE: 1, Reason.FOREIGN_TASK: 1}
    assert trust.demerits(ALICE) == WEIGHTS[Reason.FOREIGN_TASK]


def test_offer_of_a_task_beyond_what_a_round_comes_to_is_foreign() -> None:
    last, beyond = offer(INDEX_LIMIT - 1), offer(INDEX_LIMIT)
    found = new_selector().eligible([last, beyond], round_number=0, used=())
    assert found == ([last], {Reason.FOREIGN_TASK: 1})


def test_groups_are_of_policies_that_can_be_gone_through_and_later_ones_wait() -> None:
    selector = new_selector()
    of = {version: offer_of(group_of(ALICE, version, policy_version=version))[0] for version in (6, 7, 8, 9)}
    eligible, left_out = selector.eligible(of.values(), round_number=0, used=(), policies=(7, 8))
    assert (eligible, left_out) == ([of[7], of[8]], {Reason.STALE: 1})
    assert selector.eligible(of.values(), round_number=0, used=(), policies=(8, 9)) == (
        [of[8], of[9]],
        {Reason.STALE: 1},
    )
    assert selector.eligible(of.values(), round_number=0, used=(), policies=()) == ([], {Reason.STALE: 2})
    assert selector.eligible(of.values(), round_number=0, used=())[0] == list(of.values())


def test_peer_that_offers_more_is_not_chosen_more() -> None:
    selector = new_selector()
    flood = [offer(index) for index in range(2 * OFFERS_PER_ORIGIN)]
    few = [offer(index, by=BOB) for index in range(3)]
    offers = flood[:50] + few + flood[50:]
    assert selector.eligible(offers, round_number=0, used=()) == (few + flood[-OFFERS_PER_ORIGIN:], {})


def about(one: Offer, task: TaskRef) -> Offer:
    """The offer as if its origin had announced it for this task."""
    return replace(one, announcement=msgspec.structs.replace(one.announcement, task=task))


def test_budget_lets_replacements_through_up_to_its_share() -> None:
    budget = ByteBudget()
    assert not budget.allows(1)
    budget.note(10_000, trained=True)
    assert budget.allows(500)
    assert not budget.allows(501)
    budget.note(300, trained=False)
    assert budget.allows(200)
    assert not budget.allows(201)
    assert (budget.trained_bytes, budget.wasted_bytes) == (10_000, 300)
