"""Real nodes of which one keeps its contribution from another and accuses it: the liar goes, and rounds go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.protocol.probation import FIRST_REST_TURNS
from tests.node.lab import Node, Swarm, assert_exact
from tests.node.test_evidence_nodes import started_as

ROUNDS = 5
ROUNDS_LIMIT = 25
ACCUSING_NODE = Path(__file__).with_name("accusing_node.py")
GONE_S = 13.0
"""Three detours, and the last accusation (tests/protocol/test_disputes.py)."""
MACHINE_S = 30.0
"""What a loaded machine may add, and training."""


@pytest.mark.parametrize("count", [3, pytest.param(4, marks=pytest.mark.long)])
def test_false_accuser_goes_and_its_victim_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    with Swarm(tmp_path, nodes=count) as swarm:
        honest, victim, liar = swarm.nodes[0], swarm.nodes[-2], swarm.nodes[-1]
        monkeypatch.setenv("ACCUSED", victim.peer_id)
        started_as(ACCUSING_NODE, liar.folder, monkeypatch)
        swarm.start_together()
        rounds = [honest.certified(number) for number in range(1, ROUNDS + 1)]
        truthful = {node.peer_id for node in swarm.nodes if node is not liar}
        for event in rounds:
            assert truthful <= set(event["members"]), "nobody honest loses its place"
        evicted = [event["evicted"] for node in swarm.nodes[:-1] for event in node.events("planned")]
        assert {peer for some in evicted for peer in some} == {liar.peer_id}
        begun_at = honest.events("planned", round=1)[0]["at"]
        assert rounds[0]["at"] - begun_at < GONE_S + MACHINE_S
        assert_exact(swarm.report(ROUNDS))
        last, without = ROUNDS, planned_after(honest, victim, liar)
        while not without and last < ROUNDS_LIMIT:  # keys say who leads when: it may have been the liar or its victim
            last += 1
            honest.certified(last)
            without = planned_after(honest, victim, liar)
        assert without, "others than the liar lead"
        assert set(without) == {count - 1}, "who saw it go plans without it"


def planned_after(honest: Node, victim: Node, liar: Node) -> list[int]:
    """How many the plans of others have who saw the liar go, in the rounds straight after."""
    plans = honest.events("planned")
    fair = [plan["round"] for plan in plans if plan["evicted"] and plan["planner"] != victim.peer_id]
    return [
        plan["participants"]
        for plan in plans
        if plan["planner"] != liar.peer_id and any(0 < plan["round"] - gone <= FIRST_REST_TURNS for gone in fair)
    ]
