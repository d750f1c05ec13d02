"""Pulling a group: of whom, when somebody is busy, wrong, absent or silent, and what counts against the budget."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from shoal.protocol.errors import LocalError
from shoal.protocol.group_pull import BUSY_LIMIT, Ask, Budget, Came, GivenUp, GroupPull, LeftAlone, Tally, Wait
from shoal.protocol.identity import PeerId
from shoal.protocol.offer_book import Offer
from shoal.protocol.rollouts import (
    CHUNK_LIMIT_BYTES,
    GROUP_LIMIT_BYTES,
    Announcement,
    GroupChunk,
    Reason,
    RolloutError,
    TaskRef,
    digest_of,
)

A, B = PeerId("a"), PeerId("b")
DATA = bytes(range(251)) * 1500  # two chunks
FIRST, SECOND = DATA[:CHUNK_LIMIT_BYTES], DATA[CHUNK_LIMIT_BYTES:]
SMALL = DATA[:1000]
BUSY, ABSENT = GroupChunk(status="busy"), GroupChunk(status="absent")
TASK = TaskRef(family="sums", version="1", config=b"\x80", seed=1, index=0)
OFFER = Offer(
    announcement=Announcement(
        digest=digest_of(DATA),
        size_bytes=len(DATA),
        task=TASK,
        completions=2,
        reward_mean=0.5,
        reward_variance=0.25,
        policy_version=0,
        round=0,
    ),
    origin=A,
    boot=1,
    sequence=1,
    arrived=0,
    order=0,
)


class Lab:
    def __init__(self, *servers: PeerId, limit_bytes: int = 10 * len(DATA), offer: Offer = OFFER) -> None:
        self.left_alone = LeftAlone(30.0)
        self.budget, self.tally = Budget(limit_bytes), Tally()
        self.pull = GroupPull(
            offer,
            servers=lambda now: self.left_alone.allowed(servers, now),
            deadline_s=20.0,
            budget=self.budget,
            tally=self.tally,
        )

    def asked(self, now: float = 0.0) -> tuple[PeerId, int, float]:
        step = self.pull.next(now)
        assert isinstance(step, Ask)
        return step.peer, step.request.offset, step.until

    def serve(self, group: bytes) -> None:
        """Answer as one that has this group, until another is asked."""
        peer = self.asked()[0]
        while (step := self.asked())[0] == peer:
            data = group[step[1] : step[1] + CHUNK_LIMIT_BYTES]
            self.pull.answered(GroupChunk(status="chunk", data=data) if data else ABSENT)

    def chunk(self, data: bytes) -> None:
        self.pull.answered(GroupChunk(status="chunk", data=data))


def test_group_comes_chunk_by_chunk_from_the_first_server() -> None:
    lab = Lab(A, B)
    assert lab.asked(5.0) == (A, 0, 25.0)
    lab.chunk(FIRST)
    assert lab.asked(9.0) == (A, CHUNK_LIMIT_BYTES, 25.0)
    lab.chunk(SECOND)
    assert lab.pull.next(10.0) == Came(DATA)
    assert lab.tally.fetched_bytes == len(DATA)
    assert lab.budget.left_bytes == 9 * len(DATA)
    with pytest.raises(LocalError):
        lab.chunk(FIRST)


def test_wrong_bytes_are_told_and_the_next_server_is_asked_from_the_start() -> None:
    lab = Lab(A, B)
    lab.asked()
    lab.chunk(FIRST)
    lab.asked()
    with pytest.raises(RolloutError, match="other bytes") as caught:
        lab.chunk(SECOND[::-1])
    assert caught.value.peer == A, "its own offer"
    lab.pull.failed()
    assert lab.tally.fetched_bytes == len(DATA)
    assert lab.asked() == (B, 0, 20.0)
    with pytest.raises(RolloutError, match="another size") as caught:
        lab.chunk(FIRST[1:])
    assert caught.value.peer is None, "the size may be a lie of the offer's origin"
    lab.pull.failed()
    assert lab.pull.next(0.0) == GivenUp(spent=False)
    assert lab.tally.fetched_bytes == len(DATA) + CHUNK_LIMIT_BYTES - 1


@pytest.mark.parametrize("size_bytes", [len(SMALL) - 1, len(SMALL) + 1])
def test_who_announced_another_size_is_to_blame_once_another_has_the_group(size_bytes: int) -> None:
    announcement = msgspec.structs.replace(OFFER.announcement, digest=digest_of(SMALL), size_bytes=size_bytes)
    lab = Lab(A, B, offer=replace(OFFER, announcement=announcement))
    lab.asked()
    lab.pull.answered(ABSENT)
    assert lab.asked()[0] == B
    with pytest.raises(RolloutError) as caught:
        lab.chunk(SMALL)
    assert (caught.value.reason, caught.value.peer) == (Reason.MISLABELLED, A)
    lab.pull.failed()
    assert lab.pull.next(0.0) == GivenUp(spent=False)
    assert (lab.tally.fetched_bytes, lab.budget.left_bytes) == (len(SMALL), 10 * len(DATA) - len(SMALL))


LARGEST = bytes(range(256)) * (GROUP_LIMIT_BYTES // 256)
TOO_LARGE = 2 * LARGEST


@pytest.mark.parametrize("size_bytes", [1, CHUNK_LIMIT_BYTES, CHUNK_LIMIT_BYTES + 1, GROUP_LIMIT_BYTES])
@pytest.mark.parametrize("true_bytes", [2 * CHUNK_LIMIT_BYTES, 3 * CHUNK_LIMIT_BYTES - 1, GROUP_LIMIT_BYTES - 1])
def test_who_lies_about_the_size_of_a_large_group_is_to_blame_too(size_bytes: int, true_bytes: int) -> None:
    group = LARGEST[:true_bytes]
    announcement = msgspec.structs.replace(OFFER.announcement, digest=digest_of(group), size_bytes=size_bytes)
    lab = Lab(A, B, limit_bytes=10 * len(LARGEST), offer=replace(OFFER, announcement=announcement))
    lab.asked()
    lab.pull.answered(ABSENT)
    with pytest.raises(RolloutError) as caught:
        lab.serve(group)
    assert (caught.value.reason, caught.value.peer) == (Reason.MISLABELLED, A)
    lab.pull.failed()
    assert lab.pull.next(0.0) == GivenUp(spent=False)
    assert lab.tally.fetched_bytes == true_bytes == 10 * len(LARGEST) - lab.budget.left_bytes


@pytest.mark.parametrize("size_bytes", [1, 2 * CHUNK_LIMIT_BYTES, GROUP_LIMIT_BYTES])
@pytest.mark.parametrize("wrong_bytes", [2 * CHUNK_LIMIT_BYTES, GROUP_LIMIT_BYTES, 2 * GROUP_LIMIT_BYTES])
def test_wrong_bytes_without_end_are_taken_up_to_the_largest_group(size_bytes: int, wrong_bytes: int) -> None:
    announcement = msgspec.structs.replace(OFFER.announcement, size_bytes=size_bytes)
    lab = Lab(A, B, limit_bytes=2 * GROUP_LIMIT_BYTES, offer=replace(OFFER, announcement=announcement))
    cut_off = wrong_bytes < size_bytes
    if cut_off:
        lab.serve(TOO_LARGE[:wrong_bytes])  # as one that has forgotten it meanwhile
    else:
        with pytest.raises(RolloutError) as caught:
            lab.serve(TOO_LARGE[:wrong_bytes])
        assert (caught.value.reason, caught.value.peer) == (
            Reason.FORGED if min(wrong_bytes, GROUP_LIMIT_BYTES) == size_bytes else Reason.MALFORMED,
            A,
        )
        lab.pull.failed()
    assert lab.tally.fetched_bytes == min(wrong_bytes, GROUP_LIMIT_BYTES)
    assert lab.asked()[:2] == (B, 0)


def test_busy_servers_are_asked_again_after_everybody_else() -> None:
    lab = Lab(A, B)
    lab.asked()
    lab.pull.answered(BUSY)
    assert lab.asked()[0] == B
    lab.pull.answered(ABSENT)
    assert lab.pull.next(0.0) == Wait()
    assert lab.asked()[0] == A
    lab.chunk(FIRST)
    lab.asked()
    lab.pull.answered(BUSY)  # in the middle: the same one is waited for
    assert lab.pull.next(0.0) == Wait()
    assert lab.asked()[:2] == (A, CHUNK_LIMIT_BYTES)


def test_server_that_stays_busy_is_given_up() -> None:
    lab, waits = Lab(A), 0
    while isinstance(step := lab.pull.next(0.0), Ask | Wait):
        if isinstance(step, Wait):
            waits += 1
        else:
            lab.pull.answered(BUSY)
    assert (step, waits) == (GivenUp(spent=False), BUSY_LIMIT)
    assert lab.budget.left_bytes == 10 * len(DATA)


def test_server_that_failed_another_group_meanwhile_is_not_turned_to() -> None:
    lab = Lab(A, B)
    lab.asked()
    lab.left_alone.pass_over(B, 1.0)
    lab.pull.answered(ABSENT)
    assert lab.pull.next(2.0) == GivenUp(spent=False)
    assert lab.left_alone.allowed([A, B], 31.5) == [A, B]


def test_server_that_was_started_again_is_asked_at_once_and_one_that_only_speaks_is_not() -> None:
    left = LeftAlone(30.0)
    for peer in (A, B):
        left.pass_over(peer, 1.0, 5)
    left.heard(A, 6)
    left.heard(B, 5)
    assert left.allowed([A, B], 2.0) == [A]
    left.pass_over(A, 3.0, 6)
    assert left.allowed([A, B], 4.0) == []
    assert left.allowed([A, B], 32.0) == [B]


def test_nobody_is_asked_for_more_than_the_budget_has_left() -> None:
    lab = Lab(A, B, limit_bytes=len(DATA) + 1)
    lab.asked()
    lab.chunk(FIRST)
    lab.pull.failed()
    assert lab.pull.next(0.0) == GivenUp(spent=True)
    assert lab.budget.left_bytes == len(DATA) + 1 - len(FIRST)


def test_pull_that_nobody_waits_for_counts_what_came() -> None:
    lab = Lab(A)
    lab.asked()
    lab.chunk(FIRST)
    for _ in range(2):
        lab.pull.close()
    assert lab.tally.fetched_bytes == len(FIRST)
