"""A real node that comes at an awkward time: its donor leaves, and the others are in the middle of a reduce."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.node.lab import Swarm, assert_exact, assert_votes_once, shoal
from tests.node.test_joining import CHUNKS, MODEL, donated


@pytest.mark.long
def test_joiner_whose_donor_leaves_arrives_in_the_middle_of_a_reduce(tmp_path: Path) -> None:
    with Swarm(tmp_path, nodes=4, founders=3, options=MODEL) as swarm:
        joiner = swarm.nodes.pop()
        leaver, *staying = founders = list(swarm.nodes)
        held = ["--hold", "3:train", "--hold", "3:reduce:0.4"]
        swarm.start_together(node1=held, node2=held)
        swarm.nodes.append(joiner)
        for node in staying:
            node.hold("3:train")
        joiner.start(join=founders, holds=["3:transfer:0.5"])
        joiner.hold("3:transfer:0.5")

        assert shoal("leave", "--data-dir", str(leaver.folder)).returncode == 0
        assert leaver.wait_exit() == 0
        for node in staying:
            node.release()
        for node in staying:
            node.hold("3:reduce:0.4")
        joiner.release()
        assert joiner.wait("round_started", round=3)["role"] == "joiner"
        assert not any(node.events("certified", round=3) for node in staying)
        _, total, sources = donated(joiner)
        assert total == CHUNKS
        assert {node.peer_id for node in staying} & sources.keys()
        for node in staying:
            node.release()

        third = [node.certified(3) for node in staying]
        assert third[0]["digest"] == third[1]["digest"]
        assert joiner.peer_id not in third[0]["members"]  # its plan was made before
        following = [node.certified(4) for node in (*staying, joiner)]
        assert len({event["digest"] for event in following}) == 1
        assert following[0]["members"] == sorted(node.peer_id for node in (*staying, joiner))
        assert staying[0].certified(5)["contributors"] == 3
        for node in swarm.nodes:
            node.end()
        assert_exact(swarm.report(4))
        for node in staying:
            assert_votes_once(node)
