"""Real nodes that join late: from several donors at once, one of which dies in the middle, and after a restart."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.node.lab import Node, Swarm, assert_exact, eventually

MODEL: dict[str, str | int | float | bool] = {"inputs": 1024, "outputs": 4000}
"""4,100,000 parameters: a state of 33 MB. Half of it is more chunks than three donors are asked for at once."""
NUMEL = 1024 * 4000 + 4000
CHUNK_VALUES = 4096
CHUNKS = 2002
ARRIVED = re.compile(r"the state of round \d+ is here: (.*), beside ([\d,]+) of ([\d,]+) chunks that were$")


def kept_chunks(node: Node) -> int:
    """How many chunks of the state on its way are on the node's disk: what has not come yet is a hole, of zeros."""
    begins = np.arange(0, NUMEL, CHUNK_VALUES)
    kept = 0
    for path in node.folder.glob("transfer/*/chunks"):
        state = np.zeros(2 * NUMEL, np.float32)
        came = np.fromfile(path, np.float32)
        state[: came.size] = came
        kept += sum(int(np.logical_or.reduceat(vector != 0, begins).sum()) for vector in np.split(state, 2))
    return kept


def donated(node: Node) -> tuple[int, int, dict[str, int]]:
    """Of its transfer: how many chunks were here, of how many, and how many bytes came from whom."""
    found = [match for line in node.log.splitlines() if (match := ARRIVED.search(line))]
    assert len(found) == 1, node.log[-2000:]
    sources = re.findall(r"([\d,]+) bytes from (\w+)", found[0][1])
    were, total = map(_number, found[0].groups()[1:])
    return were, total, {peer: _number(size) for size, peer in sources}


def _number(text: str) -> int:
    return int(text.replace(",", ""))


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
        eventually(lambda: kept_chunks(joiner) >= CHUNKS // 2, "what came is on the disk")
        joiner.kill()
        joiner.start(join=founders, holds=["2:transfer:0.75"])
        joiner.hold("2:transfer:0.75")
        doomed = founders[1]
        doomed.kill()
        joiner.release()

        assert joiner.wait("round_started", round=2)["role"] == "joiner"
        were, total, sources = donated(joiner)
        assert total == CHUNKS
        assert CHUNKS // 2 <= were < CHUNKS
        assert (CHUNKS - were - 2) * 4 * CHUNK_VALUES <= sum(sources.values()) <= (CHUNKS - were) * 4 * CHUNK_VALUES
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
