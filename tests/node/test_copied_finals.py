"""Real nodes of which one keeps its finals from another: that one has them from others in time to keep its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.node.lab import Swarm, assert_exact
from tests.node.test_evidence_nodes import started_as

ROUNDS = 3
WITHHOLDING_NODE = Path(__file__).with_name("withholding_node.py")


def test_member_whose_finals_are_withheld_stays_a_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Swarm(tmp_path, nodes=4) as swarm:
        *_, deprived, withholder = swarm.nodes
        monkeypatch.setenv("WITHHELD_FROM", deprived.peer_id)
        started_as(WITHHOLDING_NODE, withholder.folder, monkeypatch)
        swarm.start_together()
        everyone = sorted(node.peer_id for node in swarm.nodes)
        for round in range(1, ROUNDS + 1):
            for node in swarm.nodes:
                certified = node.certified(round)
                assert sorted(certified["members"]) == everyone
                assert certified["coverage"] == 1.0
        assert "finals do not come from their owners" in deprived.log
        assert not [node for node in swarm.nodes if node.events("caught_up")]
        assert_exact(swarm.report(ROUNDS))
