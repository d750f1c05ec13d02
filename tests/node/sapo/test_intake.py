"""The intake: from offers to judged groups, with replacements as far as the byte budget reaches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import pytest

from shoal.lab.bench.sapo_swarm import collect
from shoal.node.reporting.events import TaskRewards
from shoal.node.sapo import groups, selection
from shoal.node.sapo.engine import rewards_by_task
from shoal.node.sapo.groups import JudgedGroup, announced
from shoal.node.sapo.selection import ATTEMPTS_PER_GROUP, Intake, Verdict, total_bytes
from shoal.node.sapo.trust import WEIGHTS, Trust
from shoal.protocol.errors import LocalError
from shoal.protocol.identity import PeerId
from shoal.protocol.offer_book import Offer
from shoal.protocol.rollouts import Drawn, Reason, Sampling, decode_group
from tests.node.sapo.offering import group_of, new_intake, new_judge, offer_of, peer_id

ALICE, BOB, LIAR = peer_id(1), peer_id(2), peer_id(3)


class Peers:
    """What peers offer, and what was pulled of it."""

    def __init__(self) -> None:
        self._held: dict[bytes, bytes] = {}
        self.offers: list[Offer] = []
        self.pulled_bytes = 0
        self.pulls: list[int] = []
        self.judge = new_judge()

    def honest(self, peer: PeerId, count: int, *, start: int = 0, at: int = 0) -> None:
        for index in range(start, start + count):
            self._add(*offer_of(group_of(peer, index), arrived=at))

    def lies(self, peer: PeerId, count: int, *, at: int = 0) -> None:
        for index in range(count):
            group = group_of(peer, index, rewards=(0.0, 0.0, 0.0, 0.0), round_number=at)
            self._add(*offer_of(group, (1.0, 0.0, 1.0, 0.0), arrived=at))

    def _add(self, offer: Offer, data: bytes) -> None:
        self.offers.append(offer)
        self._held[offer.digest] = data

    def lose(self, offer: Offer) -> None:
        del self._held[offer.digest]

    def fetch(self, offers: Sequence[Offer]) -> Mapping[bytes, bytes]:
        came = {offer.digest: self._held[offer.digest] for offer in offers if offer.digest in self._held}
        self.pulled_bytes += sum(map(len, came.values()))
        self.pulls.append(len(offers))
        return came

    def take(self, intake: Intake, count: int, round_number: int = 0) -> list[PeerId | None]:
        return [group.origin for group in self.groups(intake, count, round_number)]

    def groups(self, intake: Intake, count: int, round_number: int = 0) -> list[JudgedGroup]:
        return collect(intake, self.judge, self.fetch, self.offers, count=count, round_number=round_number)


def test_only_what_is_chosen_is_pulled_and_never_twice() -> None:
    peers, intake = Peers(), new_intake()
    peers.honest(ALICE, 8)
    peers.honest(BOB, 8)
    for round_number in range(4):
        assert len(peers.take(intake, 4, round_number)) == 4
    assert peers.pulls == [4, 4, 4, 4]
    assert peers.pulled_bytes == total_bytes(peers.offers) == intake.budget.trained_bytes
    assert peers.take(intake, 4, 4) == []
    assert not intake.rejected


def test_thief_of_a_digest_pays_for_what_it_announced_and_its_maker_is_judged_by_its_own() -> None:
    peers, intake = Peers(), new_intake()
    (offer, data), (own, _) = offer_of(group_of(ALICE)), offer_of(group_of(LIAR))
    stolen = replace(own, announcement=msgspec.structs.replace(own.announcement, digest=offer.digest))
    peers._add(stolen, data)
    assert peers.take(intake, 1) == []  # the thief's alone is here so far
    assert intake.trust.demerits(LIAR) == WEIGHTS[Reason.MISLABELLED]
    peers._add(offer, data)
    assert peers.take(intake, 1) == [ALICE]
    peers, intake = Peers(), new_intake()
    peers._add(stolen, data)
    peers._add(offer, data)
    assert peers.take(intake, 2) == [ALICE]  # both at once
    assert intake.rejected == {Reason.MISLABELLED: 1}
    assert (intake.trust.demerits(ALICE), intake.trust.demerits(LIAR)) == (0.0, WEIGHTS[Reason.MISLABELLED])


def test_round_tells_what_each_task_family_earned() -> None:
    peers, intake = Peers(), new_intake()
    peers.honest(ALICE, 4)
    taken = peers.groups(intake, 4)
    ended = intake.end_round()
    by_family: dict[str, list[Sequence[float]]] = {}
    for group in taken:
        by_family.setdefault(group.task.ref.family, []).append(group.rewards)
    assert ended.rewards == by_family
    everything = [reward for group in taken for reward in group.rewards]
    assert ended.reward == pytest.approx(sum(everything) / len(everything))
    assert (intake.end_round().rewards, intake.end_round().reward) == ({}, None)


def test_rewards_of_a_task_are_means_over_completions_of_own_groups_and_of_others() -> None:
    own = {"sums": [(1.0, 0.0, 0.0, 0.0), (1.0, 1.0)], "chains": [(0.5,)]}
    assert rewards_by_task(own, {"sums": [(0.25,)], "letters": [(1.0,), (0.0,)]}) == {
        "chains": TaskRewards(own=1, reward=0.5),
        "letters": TaskRewards(external=2, external_reward=0.5),
        "sums": TaskRewards(own=2, reward=0.5, external=1, external_reward=0.25),
    }


def test_liar_costs_a_few_groups_and_is_then_ignored() -> None:
    peers, intake = Peers(), new_intake()
    taken = []
    for round_number in range(40):
        peers.honest(ALICE, 8, start=8 * round_number, at=round_number)
        peers.lies(LIAR, 8, at=round_number)
        taken.append(peers.take(intake, 4, round_number))
    assert LIAR not in [origin for round_taken in taken for origin in round_taken]
    assert intake.rejected[Reason.HINT] <= 6
    assert intake.trust.ignored(LIAR)
    assert all(len(round_taken) == 4 for round_taken in taken[10:])
    assert peers.pulled_bytes <= 1.05 * intake.budget.trained_bytes


@pytest.mark.parametrize(("share", "taken"), [(10.0, 4), (0.0, 2)])
def test_refused_groups_are_replaced_as_far_as_the_budget_reaches(
    share: float, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "WASTE_SHARE", share)
    peers, intake = Peers(), new_intake(seed=1)
    peers.honest(ALICE, 1)
    assert peers.take(intake, 1) == [ALICE]
    peers.honest(ALICE, 4, start=10)
    peers.lies(LIAR, 3)
    assert peers.take(intake, 4) == [ALICE] * taken
    assert intake.rejected[Reason.HINT] >= 2
    assert peers.pulled_bytes == intake.budget.trained_bytes + intake.budget.wasted_bytes


def test_groups_that_do_not_come_are_replaced_free_of_charge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "WASTE_SHARE", 0.0)
    peers, intake = Peers(), new_intake()
    peers.honest(ALICE, 12)
    for offer in peers.offers[::2]:
        peers.lose(offer)
    assert peers.take(intake, 3) == [ALICE] * 3
    assert peers.pulled_bytes == intake.budget.trained_bytes


def test_attempts_of_a_round_are_bounded() -> None:
    peers, intake = Peers(), new_intake()
    peers.honest(ALICE, 100)
    for offer in peers.offers:
        peers.lose(offer)
    assert peers.take(intake, 3) == []
    assert sum(peers.pulls) == 3 * ATTEMPTS_PER_GROUP


def test_replacements_that_do_not_come_are_replaced_and_cost_no_more_than_one_budget() -> None:
    """Two of three groups are refused, and the budget has room for one: its replacement's replacement is free."""
    peers, intake = Peers(), new_intake(seed=1)
    peers.honest(ALICE, 12)
    wanted = intake.begin(peers.offers, 3, 0)
    assert len(wanted) == 3
    assert intake.receive(peers.fetch(wanted)) == []
    size = len(intake.pulled[0][1])
    intake.budget.note(60 * size, trained=True)  # 5 % of it are three groups
    refused = Verdict(refused=Reason.UNSCORED, blamed=False)
    wanted = intake.judged([Verdict(rewards=(1.0, 0.0)), refused, refused])
    assert len(wanted) == 1
    wanted = intake.receive({})
    assert len(wanted) == 1
    assert intake.receive(peers.fetch(wanted)) == []
    assert len(intake.pulled) == 1


def test_verdicts_are_as_many_as_groups() -> None:
    peers, intake = Peers(), new_intake()
    peers.honest(ALICE, 2)
    intake.receive(peers.fetch(intake.begin(peers.offers, 2, 0)))
    with pytest.raises(LocalError, match="1 verdicts on 2 groups"):
        intake.judged([Verdict(rewards=(1.0, 0.0))])
    intake.judged([Verdict(rewards=(1.0, 0.0))] * 2)
    with pytest.raises(LocalError, match="1 verdicts on 0 groups"):
        intake.judged([Verdict(rewards=(1.0, 0.0))])


def test_verdicts_cost_trust_where_somebody_is_to_blame() -> None:
    trust = Trust()
    peers, intake = Peers(), new_intake(trust=trust)
    for peer in (ALICE, BOB, LIAR):
        peers.honest(peer, 1)
    intake.receive(peers.fetch(intake.begin(peers.offers, 3, 0)))
    verdicts = {
        ALICE: Verdict(rewards=(1.0, 0.5)),
        BOB: Verdict(refused=Reason.UNSCORED, blamed=False),
        LIAR: Verdict(refused=Reason.HINT),
    }
    trust.fault(ALICE, Reason.UNSCORED)
    sizes = {offer.origin: len(data) for offer, data in intake.pulled}
    intake.judged([verdicts[offer.origin] for offer, _ in intake.pulled])
    assert intake.budget.trained_bytes == sizes[ALICE]
    assert intake.budget.wasted_bytes == sizes[BOB] + sizes[LIAR]
    demerits = [trust.demerits(peer) for peer in (ALICE, BOB, LIAR)]
    assert demerits == pytest.approx([WEIGHTS[Reason.UNSCORED] - 0.1, 0.0, WEIGHTS[Reason.HINT]])


def test_a_round_is_summed_up_once() -> None:
    peers, intake = Peers(), new_intake()
    peers.honest(ALICE, 2)
    peers.lies(LIAR, 1)
    peers.take(intake, 3)
    ended = intake.end_round()
    assert (ended.origins, ended.reward, ended.rejected) == ({ALICE: 2}, 0.5, {Reason.HINT: 1})
    peers.take(intake, 3, 1)
    ended = intake.end_round()
    assert (ended.origins, ended.reward, ended.rejected) == ({}, None, {})


def test_draws_are_reproducible() -> None:
    taken = []
    for _ in range(2):
        peers, intake = Peers(), new_intake(seed=5)
        peers.honest(ALICE, 20)
        taken.append(peers.groups(intake, 5))
    assert taken[0] == taken[1]


def test_rollout_goes_out_without_tokens_that_leave_the_text_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peers, intake = Peers(), new_intake()
    peers.honest(ALICE, 1)
    (group,) = peers.groups(intake, 1)
    drawn = Drawn.of((-0.5,) * 3, (1, 2, 3))
    group = replace(group, sampling=Sampling(policy="7-gpt", drawn=(drawn,) * len(group.texts)))
    taken = len(group.texts) * 24
    for limit_bytes, expected in ((taken, group.sampling), (taken - 1, Sampling(policy="7-gpt"))):
        monkeypatch.setattr(groups, "DRAWN_LIMIT_BYTES", limit_bytes)
        assert decode_group(announced(group, ALICE)[1]).sampling == expected
    with pytest.raises(LocalError, match="its tokens leave the text no room"):
        announced(group, ALICE, labelled=True)
