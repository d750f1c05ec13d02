"""Real engines of which some wait outside for a seat: each comes to one, and what all have learnt is counted once."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from shoal.protocol.messages import Value
from shoal.protocol.seats import counted_in, longest_wait
from tests.node.box_life import Life
from tests.node.simulated_disk import Disks, Survival
from tests.node.swarm_in_a_box import Box, disks

__all__ = ["disks"]

VOTERS, SEATS, NODES, ROUNDS = 2, 2, 5, 8
ENLISTS = 2
"""Rounds until one who was counted is in the line again: in one it says so, and the value of the next has it."""
NEIGHBOURS = {2: (0, 1), 3: (0, 2), 4: (2, 3)}
"""Whom each dials while it follows: of the last one no voter is a neighbour."""


def box_of(tmp_path: Path, disks: Disks, seed: int = 0) -> Box:
    box = Box(tmp_path, disks, nodes=NODES, founders=VOTERS, followers=NEIGHBOURS, seats=SEATS, seed=seed)
    box.adjust_trainer = slow
    return box


def slow(life: Life) -> None:
    """Rounds take longer than it takes to be heard, and to link who takes part."""
    life.trainer.pace = 20.0


def decided(box: Box) -> list[Value]:
    return [value for _, value in sorted(box.values.items(), key=lambda item: item[0])]


def assert_turns(box: Box) -> None:
    """All came to the seats, none of them waited for longer than is said, and not always were all members."""
    values = decided(box)
    counts = [set(counted_in(value)) for value in values]
    assert all(0 < len(some) <= SEATS for some in counts)
    for peer in box.peers:
        turns = [0, *(round for round, some in enumerate(counts, start=1) if peer in some)]
        assert len(turns) > 1
        waits = [after - before for before, after in itertools.pairwise(turns)]
        assert max(waits) <= longest_wait(NODES, SEATS) + ENLISTS, "since it stands in the line"
    assert any(len(value.members) < NODES for value in values), "some wait outside"


@pytest.mark.parametrize("seed", range(3))
def test_all_that_five_nodes_learn_on_two_seats_is_counted_once_and_to_the_bit(
    tmp_path: Path, disks: Disks, seed: int
) -> None:
    box = box_of(tmp_path, disks, seed)
    learnt: list[int] = []
    following: set[int] = set()

    async def course(box: Box) -> None:
        box.start_all()
        await box.until_round(ROUNDS)
        learnt.append(box.next_place())
        following.update(n for n in NEIGHBOURS if box.node(n).engine.phase == "following")
        await box.until_round(box.node(0).round + 7)

    box.run(course)
    assert_turns(box)
    assert following, "some wait outside"
    assert learnt[0] > 2 * SEATS * ROUNDS - 4, "who follows trains on, from head to head"
    assert (box.counted[: learnt[0] - 1] > 0).all(), "nothing was lost"


def test_who_restarts_while_it_follows_loses_nothing_that_was_on_its_disk(tmp_path: Path, disks: Disks) -> None:
    box = box_of(tmp_path, disks)
    learnt: list[int] = []

    async def course(box: Box) -> None:
        box.start_all()
        await box.until_round(3)
        life = box.node(4)
        await box.until(lambda: life.engine.phase == "following" and life.training_client.resting)
        await box.until(lambda: not life.resumption.writing)
        learnt.append(box.next_place())
        box.node(4).cut()
        await box.until_round(box.node(0).round + 1, 0, 1)
        box.start(4, Survival.SYNCED)
        await box.until_round(box.node(0).round + 8)

    box.run(course)
    assert any(box.peers[4] in counted_in(value) for value in decided(box)[4:]), "it came to a seat again"
    assert (box.counted[: learnt[0] - 1] > 0).all()
