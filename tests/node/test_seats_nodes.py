"""Five real nodes on two seats: they take turns, and every value is what their contributions lead to, to the bit."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from shoal.node.state.store import RecordLog
from shoal.protocol.messages import Certificate
from shoal.protocol.seats import longest_wait
from shoal.protocol.wire import decode
from tests.node.lab import INNER_STEPS, Node, Swarm, assert_exact, eventually, shoal

NODES, SEATS, ROUNDS = 5, 2, 10
WAIT = longest_wait(64, SEATS)
SECTIONS: dict[str, dict[str, object]] = {
    "membership": {"seats": SEATS},
    "round": {"chunk_values": 4096, "grace_s": 20.0, "reduce_deadline_s": 60.0, "staleness_rounds": WAIT},
}


def counted(node: Node) -> dict[int, tuple[str, ...]]:
    """Those whom each certificate on the disk of a node that has ended says it counted, by round."""
    log = RecordLog(node.folder / "chain.log")
    values = [decode(record, Certificate).value for record in log.recovered]
    log.close()
    return {value.round: tuple(value.counted or ()) for value in values}


@pytest.mark.long  # by value: tests/protocol/test_seats.py
def test_five_nodes_take_turns_at_two_seats_with_one_killed_and_started_again(tmp_path: Path) -> None:
    with Swarm(tmp_path, nodes=NODES, sections=SECTIONS) as swarm:
        swarm.start_together()
        first, *_, killed = swarm.nodes
        first.certified(2)
        turns = {node.peer_id: node.ask("status")["turn_in_rounds"] for node in swarm.nodes}
        assert set(turns.values()) <= {0, 1, 2}
        told = shoal("status", "--data-dir", str(first.folder)).stdout
        assert "seat       has a seat in this round" in told or "seat       waits for its seat, about" in told
        first.certified(4)
        killed.kill()
        first.certified(6)
        killed.start(join=[first])
        last = eventually(
            lambda: next(
                (e["round"] for e in first.events("certified") if e["round"] > 6 and killed.peer_id in e["members"]),
                None,
            ),
            "it is a member again",
        )
        last = max(ROUNDS, last + 4)
        for node in swarm.nodes:
            node.certified(last)
        assert_exact(swarm.report(last))
        for node in swarm.nodes:
            node.kill()
        by_round = counted(first)
        for round in range(1, last + 1):
            assert 0 < len(by_round[round]) <= SEATS
        for node in swarm.nodes[:-1]:
            turns_of = [0, *(round for round in range(1, last + 1) if node.peer_id in by_round[round])]
            assert max(after - before for before, after in itertools.pairwise(turns_of)) <= 3
            assert last - turns_of[-1] <= 3
            assert {e["round"] for e in node.events("certified")} >= set(range(1, last + 1)), "who follows applies all"
        assert any(killed.peer_id in by_round[round] for round in range(7, last + 1)), "its turn came again"


VOTERS = 2
ENLISTS = 2
"""Rounds until one who was counted stands in the line again."""
OUTSIDE: dict[str, dict[str, object]] = {
    **SECTIONS,
    "sync": {"inner_steps": 8 * INNER_STEPS, "balance": False},
    "membership": {"seats": SEATS, "voters": "named", "waiting": "outside"},
}
"""Rounds take longer than it takes to be heard of as one who wants a seat, and to link who takes part."""


@pytest.mark.long  # by value: tests/protocol/test_enlisting.py, tests/node/test_outside_in_a_box.py
def test_three_nodes_wait_outside_for_two_seats_and_the_work_of_all_counts(tmp_path: Path) -> None:
    with Swarm(tmp_path, nodes=NODES, founders=VOTERS, sections=OUTSIDE) as swarm:
        first, *others = swarm.nodes
        first.start()
        for node in others:
            node.start(join=[first])
        first.certified(ROUNDS)
        states = [node.ask("status") for node in others[VOTERS - 1 :]]
        last = max(ROUNDS, *(state["round"] for state in states)) + 2
        first.certified(last)
        for node in others:
            eventually(lambda node=node: node.ask("status")["round"] >= last, "it has the state")  # type: ignore[misc]
        assert_exact(swarm.report(last))
        for node in swarm.nodes:
            node.kill()
        by_round = counted(first)
        assert all(0 < len(some) <= SEATS for some in by_round.values())
        for node in others[VOTERS - 1 :]:
            began = node.events("listening")[0]["at"]
            turns = [round for round, some in sorted(by_round.items()) if node.peer_id in some]
            assert len(turns) >= 2, (turns, began)
            between = [after - before for before, after in itertools.pairwise([*turns, last])]
            assert max(between) <= longest_wait(NODES, SEATS) + ENLISTS, turns
        assert any(len(event["members"]) < NODES for event in first.events("certified")), "some waited outside"
