"""Whole nodes killed and started again: the rounds that follow are those of a swarm that nobody interrupted."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from shoal.node.state.checkpoint_check import check_checkpoint
from tests.node.lab import Node, Swarm, eventually, shoal

ROUNDS = 6


def digests(nodes: Sequence[Node]) -> dict[int, str]:
    """What was certified by round, over all lives of all nodes; they must agree."""
    found: dict[int, str] = {}
    for node in nodes:
        for event in node.all_events():
            if event["event"] == "certified":
                assert found.setdefault(event["round"], event["digest"]) == event["digest"]
    return found


def twin_of(swarm: Swarm, workplace: Path) -> Swarm:
    """The same nodes and the same manifest, with nothing certified yet."""
    workplace.mkdir()
    twin = Swarm(workplace, nodes=len(swarm.nodes))
    for node, original in zip(twin.nodes, swarm.nodes, strict=True):
        shutil.copy(original.folder / "node.key", node.folder / "node.key")
        node.peer_id = original.peer_id
    shutil.copy(swarm.manifest_path, twin.manifest_path)
    twin.manifest = swarm.manifest
    return twin


@pytest.mark.long
def test_a_node_alone_killed_at_any_moment_certifies_the_same_digests(tmp_path: Path) -> None:
    with Swarm(tmp_path, nodes=1) as swarm, twin_of(swarm, tmp_path / "twin") as twin:
        (node,), (other,) = swarm.nodes, twin.nodes
        node.start("--rounds", str(ROUNDS))
        assert node.wait_exit() == 0
        expected = digests([node])
        assert sorted(expected) == list(range(1, ROUNDS + 1))

        other.start("--checkpoint-every", "2", holds=["3:certify"])
        other.hold("3:certify")  # the contribution is made and announced, and not certified
        eventually(lambda: (other.folder / "resume" / "0.0-3.trainer").exists(), "its own work is on disk")
        other.kill()

        other.start()
        assert other.wait("resumed")["round"] == 3
        assert other.certified(4)
        time.sleep(random.Random(5).random() * 0.4)  # the fault itself: at any moment of a round
        other.kill()

        other.start("--rounds", str(ROUNDS))
        assert other.wait("resumed")["round"] >= 4
        assert other.wait_exit() == 0
        resumed = [e for e in other.all_events() if e["event"] == "resumed"]
        assert all(e["exact"] and not e["refused"] for e in resumed), resumed
        again = digests([other])  # it may have been killed beyond the last round that is compared
        assert {round: digest for round, digest in again.items() if round <= ROUNDS} == expected


DUE_IN_3 = ["--checkpoint-every", "3"]


@pytest.mark.long
def test_a_swarm_stopped_between_rounds_certifies_the_same_digests(tmp_path: Path) -> None:
    with Swarm(tmp_path, nodes=2) as swarm, twin_of(swarm, tmp_path / "twin") as twin:
        for nodes in (swarm, twin):
            # A checkpoint is due in round 3, so that its files are written on a slow disk too.
            nodes.start_together(holds=["4:train"], node0=DUE_IN_3, node1=DUE_IN_3)
            for node in nodes.nodes:
                node.hold("4:train")
        for node in twin.nodes:
            node.kill()
        for node in swarm.nodes:
            node.release()
        # Of two the one that led last is a quorum by itself: neither goes on before they are linked.
        twin.nodes[0].start(holds=["4:train"])
        twin.nodes[1].start(holds=["4:train"], join=[twin.nodes[0]])
        for node in twin.nodes:
            node.hold("4:train")
            node.wait("linked")
        for node in twin.nodes:
            node.release()
        for node in (*swarm.nodes, *twin.nodes):
            node.certified(6)
        for node in twin.nodes:
            assert node.wait("resumed") | {"at": 0} == {
                "at": 0,
                "event": "resumed",
                "round": 3,
                "exact": True,
                "refused": "",
                "tokens": 0,
            }
        expected, found = digests(swarm.nodes), digests(twin.nodes)
        assert [found[round] for round in range(1, 7)] == [expected[round] for round in range(1, 7)]


@pytest.mark.long
def test_checkpoints_of_a_node_are_verified_and_exported(tmp_path: Path) -> None:
    with Swarm(tmp_path, nodes=1) as swarm:
        (node,) = swarm.nodes
        node.start("--rounds", "5", "--checkpoint-every", "2", "--checkpoint-keep", "1")
        assert node.wait_exit() == 0
        folder = node.folder / "checkpoints"
        (checkpoint,) = folder.iterdir()
        assert checkpoint.name == "0.0-4"
        report = check_checkpoint(checkpoint)
        assert (report.ok, report.round, report.digest) == (True, 4, digests([node])[4])
        assert json.loads(shoal("verify", str(node.folder), "--json").stdout)["round"] == 5
        done = shoal("export", str(node.folder), "--out", str(tmp_path / "out"))
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "out" / "model.safetensors").exists()
