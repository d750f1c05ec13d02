"""Real nodes of which one keeps its finals from another: that one has them from others in time to keep its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.node.lab import Node, Swarm, assert_exact, eventually
from tests.node.test_evidence_nodes import started_as

ROUNDS = 3
WITHHOLDING_NODE = Path(__file__).with_name("withholding_node.py")


@pytest.mark.long
def test_member_whose_finals_are_withheld_stays_a_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Swarm(tmp_path, nodes=4) as swarm:
        *_, deprived, withholder = swarm.nodes
        monkeypatch.setenv("WITHHELD_FROM", deprived.peer_id)
        started_as(WITHHOLDING_NODE, withholder.folder, monkeypatch)
        swarm.start_together()
        everyone = sorted(node.peer_id for node in swarm.nodes)
        rounds = [swarm.nodes[0].certified(round) for round in range(1, ROUNDS + 1)]
        # Of three seconds one is waited: on a machine that stands still for two of them the place is lost for a round.
        kept = [event for event in rounds if sorted(event["members"]) == everyone and event["coverage"] == 1.0]
        assert len(kept) >= ROUNDS - 1
        assert "finals do not come from their owners" in deprived.log
        eventually(lambda: all(map(past_it, swarm.nodes)), "everyone has the state after these rounds")
        assert_exact(swarm.report(ROUNDS))


def past_it(node: Node) -> bool:
    ends = [*node.events("certified"), *node.events("caught_up")]
    return any(event["round"] >= ROUNDS for event in ends)
