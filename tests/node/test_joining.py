"""Real nodes that join late: from several donors at once, one of which dies in the middle, and after a restart."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.node.lab import Node, Swarm, assert_exact, eventually

MODEL: dict[str, str | int | float | bool] = {"inputs": 1024, "outputs": 768}
"""787,200 parameters: a state of 6.3 MB in 386 chunks, more than is asked for at first."""
STATE_BYTES = 8 * (1024 * 768 + 768)
ARRIVED = re.compile(r"the state of round (\d+) is here: (\d+) of (\d+) chunks were, (.*)")


def kept_bytes(node: Node) -> int:
    """Of the state on its way, what is on the node's disk."""
    return sum(path.stat().st_blocks * 512 for path in node.folder.glob("transfer/*/chunks"))


def donated(node: Node) -> tuple[int, int, dict[str, int]]:
    """Of its transfer: how many chunks were here, of how many, and how many bytes came from whom."""
    found = [match for line in node.log.splitlines() if (match := ARRIVED.search(line))]
    assert len(found) == 1, node.log[-2000:]
    sources = re.findall(r"(\d+) bytes from (\w+)", found[0][4])
    return int(found[0][2]), int(found[0][3]), {peer: int(size) for size, peer in sources}


@pytest.mark.long
def test_joiner_outlives_its_own_restart_and_the_death_of_a_donor(tmp_path: Path) -> None:
    with Swarm(tmp_path, nodes=4, founders=3, options=MODEL) as swarm:
        joiner = swarm.nodes.pop()
        founders = list(swarm.nodes)
        swarm.start_together(holds=["2:train"])
        swarm.nodes.append(joiner)
        for node in founders:
            node.hold("2:train")  # S(1) is certified, and is no state that could be drawn from the seed

        joiner.start(join=founders, holds=["2:transfer:0.5"])
        joiner.hold("2:transfer:0.5")
        eventually(lambda: kept_bytes(joiner) >= STATE_BYTES / 2, "what came is on the disk")
        joiner.kill()
        joiner.start(join=founders, holds=["2:transfer:0.75"])
        joiner.hold("2:transfer:0.75")
        doomed = founders[1]
        doomed.kill()
        joiner.release()

        assert joiner.wait("round_started", round=2)["role"] == "joiner"
        were, total, sources = donated(joiner)
        assert (total, total // 2 <= were < total) == (386, True)
        assert (total - were - 2) * 4 * 4096 <= sum(sources.values()) <= (total - were) * 4 * 4096
        assert sum(sources.values()) > 0
        assert set(sources) <= {node.peer_id for node in founders}
        assert sources.keys() - {doomed.peer_id}
        assert not (joiner.folder / "transfer").exists()

        for node in founders:
            if node is not doomed:
                node.release()
        last = joiner.certified(3)
        for node in (founders[0], founders[2]):
            assert node.certified(3)["digest"] == last["digest"]
        for node in swarm.nodes:
            node.end()
        assert_exact(swarm.report(3))
