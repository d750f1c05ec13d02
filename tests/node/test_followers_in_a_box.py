"""Followers beside real engines in a box: each certified round reaches those whom no member links, and checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.collectives.finals import Finals
from shoal.node.state.chain_waits import ChainWaits
from shoal.protocol.identity import PeerId
from shoal.protocol.peering import ChainPart, GetChain, Refusal
from shoal.swarm.lanes.chunks import ChunkRef
from tests.node.box_life import Life
from tests.node.simulated_disk import Disks
from tests.node.swarm_in_a_box import Box, disks

__all__ = ["disks"]

MEMBERS = 3
FIRST, SECOND, THIRD = 3, 4, 5
LINKS = {FIRST: (0,), SECOND: (FIRST, 1), THIRD: (FIRST, SECOND)}
"""Whom each follower dials: of the third no member is a neighbour."""


def box_of(tmp_path: Path, disks: Disks, **options: Any) -> Box:
    return Box(tmp_path, disks, nodes=6, founders=MEMBERS, followers=LINKS, **options)


def assert_apart(box: Box) -> None:
    """No follower was a member, or a participant of a plan that was certified."""
    followers = {box.peers[number] for number in LINKS}
    values = list(box.values.values())
    assert followers.isdisjoint(peer for value in values for peer in value.members)
    plans = [box.finals[value.plan].plan for value in values if value.plan in box.finals]
    assert plans
    assert followers.isdisjoint(one.peer for plan in plans for one in plan.participants)


def test_rounds_reach_followers_through_followers_and_a_parent_that_dies_is_done_without(
    tmp_path: Path, disks: Disks
) -> None:
    box = box_of(tmp_path, disks)

    async def course(box: Box) -> None:
        box.start_all()
        await box.until_round(3)
        assert {box.node(n).engine.phase for n in LINKS} <= {"following", "joining"}
        box.node(FIRST).cut()
        await box.until_round(box.node(0).round + 3, 0, 1, 2, SECOND, THIRD)
        behind = box.node(0).round
        box.start(FIRST)
        await box.until_round(behind + 2)

    box.run(course)
    assert_apart(box)


def skips_an_entry(life: Life) -> None:
    answer = life.chain_waits._answer

    async def lies(peer: PeerId, asked: GetChain) -> ChainPart | Refusal:
        part = await answer(peer, asked)
        return part if isinstance(part, Refusal) else ChainPart(certificates=part.certificates[1:], head=part.head + 1)

    life.chain_waits._answer = lies  # type: ignore[method-assign]


def serves_other_finals(life: Life) -> None:
    lookup = life.exchange._lookup

    def lies(ref: ChunkRef) -> Any:
        data = lookup(ref)
        return None if data is None else memoryview(bytes([data[0] ^ 1]) + bytes(data[1:]))

    life.exchange._lookup = lies


@pytest.mark.parametrize("lie", [skips_an_entry, serves_other_finals])
def test_parent_that_lies_costs_a_follower_no_round_and_nothing_of_it_is_taken(
    tmp_path: Path, disks: Disks, lie: Callable[[Life], None]
) -> None:
    box = box_of(tmp_path, disks)

    async def course(box: Box) -> None:
        box.start_all()
        await box.until_round(2)
        lie(box.node(FIRST))
        await box.until_round(box.node(0).round + 4)

    box.run(course)
    assert_apart(box)
    states = {box.node(n).chain.value(3).digest for n in range(6)}
    assert len(states) == 1


def test_no_more_than_so_many_wait_at_one_node(tmp_path: Path, disks: Disks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.protocol.followers.FOLLOWERS_LIMIT", 2)
    followers = dict.fromkeys(range(MEMBERS, MEMBERS + 4), (0,))
    most: dict[int, int] = {}

    class Counting(ChainWaits):
        async def _answer(self, peer: PeerId, asked: GetChain) -> ChainPart | Refusal:
            try:
                return await super()._answer(peer, asked)
            finally:
                most[id(self)] = max(most.get(id(self), 0), len(self._waiting))

    monkeypatch.setattr("tests.node.box_life.ChainWaits", Counting)
    box = Box(tmp_path, disks, nodes=MEMBERS + 4, founders=MEMBERS, followers=followers)

    async def course(box: Box) -> None:
        box.start_all()
        await box.until_round(4, within_s=300.0)

    box.run(course)
    assert 0 < max(most.values()) <= 2


def test_finals_that_do_not_lead_to_the_certified_digest_are_none(tmp_path: Path, disks: Disks) -> None:
    """Signed by their owners all the same, as a coalition of these might serve them: the state is not taken."""
    box = box_of(tmp_path, disks)
    taken: list[Finals] = []

    async def course(box: Box) -> None:
        box.start_all()
        await box.until_round(2)
        third = box.node(THIRD)
        before = third.catchup.finals

        async def other_finals(plan: bytes, peers: Any) -> Finals:
            right = await before(plan, peers)
            taken.append(right)
            earlier = third.chain.value(third.state_round).plan
            return dataclasses.replace(box.finals[earlier], plan=right.plan)

        third.catchup.finals = other_finals  # type: ignore[method-assign]
        await box.until(lambda: taken)
        at = third.state_round
        await box.until_round(box.node(0).round + 1, 0, 1, 2)
        digest = third.cache.header(third.state_store.state).digest if third.state_store.state else b""
        assert digest == third.chain.digest(third.state_round)
        assert third.state_round >= at
        third.catchup.finals = before  # type: ignore[method-assign]
        await box.until_round(box.node(0).round + 1)

    box.run(course)
