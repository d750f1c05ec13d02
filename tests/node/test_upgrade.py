"""A rolling upgrade: a node of the next minor version takes part; one of another wire version is told why it cannot."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shoal.node.control_client import request
from shoal.protocol.wire import WIRE_VERSION
from tests.node import lab
from tests.node.lab import Swarm, assert_exact, eventually
from tests.node.upgraded_node import VERSION, WIRE

UPGRADED_NODE = Path(__file__).with_name("upgraded_node.py")
NEXT_MINOR, NEXT_MAJOR = "0.2.0", "1.0.0"


def upgrade(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """From now on whoever is started on that folder is of another version."""
    same = lab.command

    def command(*arguments: str) -> list[str]:
        if str(folder) in arguments:
            return [sys.executable, str(UPGRADED_NODE), *arguments]
        return same(*arguments)

    monkeypatch.setattr(lab, "command", command)


@pytest.mark.long
def test_members_are_upgraded_to_the_next_minor_version_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VERSION, NEXT_MINOR)
    with Swarm(tmp_path, nodes=3) as swarm:
        swarm.start_together()
        swarm.nodes[0].certified(2)
        for node in swarm.nodes[:2]:
            others = [one for one in swarm.nodes if one is not node]
            request(node.folder, "leave")
            node.wait_exit()
            upgrade(monkeypatch, node.folder)
            node.start(join=others)
            back = node.wait("certified")
            others[0].certified(back["round"] + 1)
        old = swarm.nodes[2]
        last = old.events("certified")[-1]["round"]
        after = old.certified(last + 2)
        assert sorted(after["members"]) == sorted(node.peer_id for node in swarm.nodes)
        assert_exact(swarm.report(last))


@pytest.mark.long
def test_node_of_another_wire_version_is_told_so_and_the_swarm_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VERSION, NEXT_MAJOR)
    monkeypatch.setenv(WIRE, str(WIRE_VERSION + 1))
    with Swarm(tmp_path, nodes=3) as swarm:
        first, second, newer = swarm.nodes
        first.start()
        second.start(join=[first])
        first.certified(2)
        upgrade(monkeypatch, newer.folder)
        newer.start(join=[first])
        said = f"this node speaks wire version {WIRE_VERSION}, yours {WIRE_VERSION + 1}; install the same version"
        eventually(lambda: said in newer.log, "the reason of the refusal")
        round = first.events("certified")[-1]["round"]
        after = first.certified(round + 2)
        assert newer.peer_id not in after["members"]
        assert not newer.events("certified")
        assert newer.running
