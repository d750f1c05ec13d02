"""Nodes whose logs were damaged while they were away: they stay up, say so, and sign nothing that they may regret."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.node.lab import Node, Swarm, assert_exact, eventually, shoal

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


def certified_after(node: Node, round: int) -> bool:
    """Whether it certified a later round itself; of rounds that it fetched nothing is told."""
    return any(event["round"] > round for event in node.events("certified"))


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


@pytest.mark.long  # by value: state/test_store.py, tests/protocol/test_agreement.py
@pytest.mark.parametrize("name", ["agreement.log", "chain.log"])
def test_a_member_whose_log_is_damaged_signs_again_once_the_others_have_gone_past(tmp_path: Path, name: str) -> None:
    with Swarm(tmp_path, nodes=3) as swarm:
        swarm.start_together(holds=["3:certify"])
        for node in swarm.nodes:
            node.hold("3:certify")
        victim, *others = swarm.nodes
        victim.kill()
        flip_in_first_batch(victim, name)
        victim.start(join=others)
        eventually(lambda: len({event["peer"] for event in victim.events("linked")}) == 2, "it is linked with both")
        for node in others:
            node.release()
        later = others[0].certified(5)["round"]
        assert f"{name} is damaged" in victim.log
        assert not any(signed(victim, round) for round in (1, 2, 3 if name == "agreement.log" else 2))
        eventually(lambda: any(signed(victim, e["round"]) for e in victim.events("certified")), "it votes again")
        for node in swarm.nodes:
            eventually(partial(certified_after, node, later), "it certifies rounds after the damage")
            node.kill()
        assert_exact(swarm.report(later))
