"""Nodes whose logs were damaged while they were away: they stay up, say so, and sign nothing that they may regret."""

from __future__ import annotations

from pathlib import Path

from tests.node.lab import Node, Swarm, eventually, shoal

HEAD_BYTES = 48


def flip_in_first_batch(node: Node, name: str) -> None:
    """A bit of the first record of a log, with what comes after it as it was."""
    path = node.folder / name
    data = bytearray(path.read_bytes())
    data[HEAD_BYTES + 8] ^= 4
    path.write_bytes(data)


def signed(node: Node, round: int) -> list[str]:
    """What it signed in a round, in this life."""
    kinds = ("voted", "proposed", "view_changed")
    return [event["event"] for event in node.events() if event["event"] in kinds and event["round"] == round]


def test_a_node_alone_whose_promises_are_lost_waits_for_its_user(tmp_path: Path) -> None:
    with Swarm(tmp_path, nodes=1) as swarm:
        (node,) = swarm.nodes
        node.start(holds=["3:certify"])
        node.hold("3:certify")
        node.kill()
        flip_in_first_batch(node, "agreement.log")
        node.start()
        node.wait("round_started", round=3)
        status = node.ask("status")
        assert status["phase"] == "abstaining"
        assert "--forget-promises" in status["abstains"]
        assert "--forget-promises" in shoal("status", "--data-dir", str(node.folder)).stdout
        assert "agreement.log is damaged" in node.log
        assert node.running
        assert not signed(node, 3)
        node.kill()
        assert not node.events("certified")

        node.start("--forget-promises", "--rounds", "4")
        assert node.certified(3)["contributors"] == 1
        assert node.wait_exit() == 0


def test_a_node_alone_whose_chain_lost_its_half_goes_on_from_its_own_checkpoint(tmp_path: Path) -> None:
    with Swarm(tmp_path, nodes=1) as swarm:
        (node,) = swarm.nodes
        node.start("--checkpoint-every", "1", holds=["4:train"])
        node.hold("4:train")
        eventually(lambda: (node.folder / "checkpoints" / "0.0-3" / "chain").exists(), "the checkpoint is made")
        digest = node.certified(3)["digest"]
        node.kill()
        chain = node.folder / "chain.log"
        chain.write_bytes(chain.read_bytes()[: chain.stat().st_size // 2])
        node.start("--rounds", "4")
        assert node.wait_exit() == 0
        assert [event["round"] for event in node.events("certified")] == [4]
        assert "chain.log had lost entries that are here: it ends with round 3" in node.log
        digests = {event["digest"] for event in node.all_events() if event.get("round") == 3 and "digest" in event}
        assert digests == {digest}
