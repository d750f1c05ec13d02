"""The intake: from offers to judged groups, with replacements as far as the byte budget reaches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from shoal.node.sapo.offers import ATTEMPTS_PER_GROUP, Intake, collect, rollout_of, total_bytes
from shoal.protocol.errors import LocalError
from shoal.protocol.identity import PeerId
from shoal.protocol.offer_book import Offer
from shoal.protocol.rollouts import Reason
from tests.node.sapo.offering import group_of, new_intake, offer_of, peer_id

ALICE, BOB, LIAR = peer_id(1), peer_id(2), peer_id(3)


class Peers:
    """What peers offer, and what was pulled of it."""

    def __init__(self) -> None:
        self._held: dict[bytes, bytes] = {}
        self.offers: list[Offer] = []
        self.pulled_bytes = 0
        self.pulls: list[int] = []

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
        groups = collect(intake, self.fetch, self.offers, count=count, round_number=round_number)
        return [group.origin for group in groups]


def test_only_what_is_chosen_is_pulled_and_never_twice() -> None:
    peers, intake = Peers(), new_intake()
    peers.honest(ALICE, 8)
    peers.honest(BOB, 8)
    for round_number in range(4):
        assert len(peers.take(intake, 4, round_number)) == 4
    assert peers.pulls == [4, 4, 4, 4]
    assert peers.pulled_bytes == total_bytes(peers.offers) == intake.budget.trained_bytes
    assert peers.take(intake, 4, 4) == []
    assert not intake.rejected()


def test_liar_costs_a_few_groups_and_is_then_ignored() -> None:
    peers, intake = Peers(), new_intake()
    taken = []
    for round_number in range(40):
        peers.honest(ALICE, 8, start=8 * round_number, at=round_number)
        peers.lies(LIAR, 8, at=round_number)
        taken.append(peers.take(intake, 4, round_number))
    assert LIAR not in [origin for round_taken in taken for origin in round_taken]
    assert intake.rejected()[Reason.HINT] <= 6
    assert intake.trust.ignored(LIAR)
    assert all(len(round_taken) == 4 for round_taken in taken[10:])
    assert peers.pulled_bytes <= 1.05 * intake.budget.trained_bytes


@pytest.mark.parametrize(("allowance", "taken"), [(10.0, 4), (0.0, 2)])
def test_refused_groups_are_replaced_as_far_as_the_budget_reaches(allowance: float, taken: int) -> None:
    peers, intake = Peers(), new_intake(allowance=allowance, seed=1)
    peers.honest(ALICE, 1)
    assert peers.take(intake, 1) == [ALICE]
    peers.honest(ALICE, 4, start=10)
    peers.lies(LIAR, 3)
    assert peers.take(intake, 4) == [ALICE] * taken
    assert intake.rejected()[Reason.HINT] >= 2
    assert peers.pulled_bytes == intake.budget.trained_bytes + intake.budget.wasted_bytes


def test_groups_that_do_not_come_are_replaced_free_of_charge() -> None:
    peers, intake = Peers(), new_intake(allowance=0.0)
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


def test_draws_are_reproducible() -> None:
    taken = []
    for _ in range(2):
        peers, intake = Peers(), new_intake(seed=5)
        peers.honest(ALICE, 20)
        taken.append(collect(intake, peers.fetch, peers.offers, count=5, round_number=0))
    assert taken[0] == taken[1]


def test_rollout_of_another_is_not_ours_to_announce() -> None:
    peers, intake = Peers(), new_intake()
    peers.honest(ALICE, 1)
    (group,) = collect(intake, peers.fetch, peers.offers, count=1, round_number=0)
    with pytest.raises(LocalError):
        rollout_of(group, BOB)
