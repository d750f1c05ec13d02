"""A real node that leaves with what the others need: the only copy of the state, and the only vote."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from shoal.protocol.departure import LEAVE_TIMEOUT_S
from tests.node.lab import Swarm, assert_exact, assert_votes_once, eventually

MODEL: dict[str, str | int | float | bool] = {"inputs": 1024, "outputs": 4000}
"""4,100,000 parameters: a state of 33 MB."""


@pytest.mark.long
def test_node_leaves_when_another_has_its_state_and_its_vote(tmp_path: Path) -> None:
    few_steps: dict[str, dict[str, object]] = {"sync": {"inner_steps": 10, "balance": False}}  # within its patience
    with Swarm(tmp_path, nodes=2, founders=1, options=MODEL, sections=few_steps) as swarm:
        founder, joiner = swarm.nodes
        founder.start(holds=["3:train"])
        founder.hold("3:train")
        joiner.start(join=[founder], holds=["3:transfer:0.5"])
        joiner.hold("3:transfer:0.5")

        founder.ask("leave")
        asked_at = time.monotonic()
        founder.release()
        eventually(lambda: "the others cannot go on from round 2 without this node" in founder.log, "it stays")
        assert founder.running
        status = founder.ask("status")
        assert status["phase"] == "leaving"
        assert [m["phase"] for m in status["members"] if m["peer_id"] == founder.peer_id] == ["paused"]
        assert not founder.events("certified", round=3)

        joiner.release()
        third = joiner.certified(3)
        assert third["members"] == sorted(node.peer_id for node in swarm.nodes)
        assert founder.wait_exit() == 0
        assert time.monotonic() - asked_at < LEAVE_TIMEOUT_S + 5
        assert "only copy" not in founder.log
        assert joiner.certified(4)["members"] == [joiner.peer_id]
        joiner.kill()
        assert_exact(swarm.report(4))
        for node in swarm.nodes:
            assert_votes_once(node)
