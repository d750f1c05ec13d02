"""How real nodes are started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shoal.node.config import Hold
from shoal.testnet import nodes
from shoal.testnet.faults import FaultRecord, holds_for
from shoal.testnet.links.namespaces import Place
from shoal.testnet.nodes import Launch, node_command
from shoal.testnet.scenario import DEMO


def test_node_command_names_every_setting_that_a_scenario_makes() -> None:
    launch = Launch(
        manifest=Path("/o/swarm.toml"),
        data_dir=Path("/o/nodes/2"),
        join=("/ip4/127.0.0.1/tcp/1/p2p/a", "/ip4/127.0.0.1/tcp/2/p2p/a"),
        rounds=8,
        holds=(Hold(round=3, phase="reduce", progress=0.4),),
    )
    command = " ".join(node_command(launch))
    assert command == (
        f"{sys.executable} -m shoal.cli.main run /o/swarm.toml --data-dir /o/nodes/2 "
        "--listen /ip4/127.0.0.1/tcp/0 --lane-listen 127.0.0.1:0 --dashboard off --no-mdns --threads 1 --test-mode "
        "--join /ip4/127.0.0.1/tcp/1/p2p/a --join /ip4/127.0.0.1/tcp/2/p2p/a --hold 3:reduce:0.4 --rounds 8"
    )
    assert Hold.parse(command.split("--hold ")[1].split()[0]) == launch.holds[0]


def test_node_command_enters_the_place_where_it_runs() -> None:
    place = Place(
        host="198.18.0.3", control_port=4001, lane_port=4002, enter=("ip", "netns", "exec", "shoal-1-0-node2")
    )
    command = node_command(Launch(manifest=Path("/o/swarm.toml"), data_dir=Path("/o/nodes/2"), place=place))
    assert command[:5] == [*place.enter, sys.executable]
    assert "--listen /ip4/198.18.0.3/tcp/4001 --lane-listen 198.18.0.3:4002 " in " ".join(command)


def test_nodes_do_not_see_settings_meant_for_the_testnet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_ROUNDS", "3")
    monkeypatch.setenv("SHOALS", "kept")
    environment = nodes._environment()
    assert "SHOAL_ROUNDS" not in environment
    assert environment["SHOALS"] == "kept"


def test_holds_are_those_of_faults_whose_moment_is_to_come() -> None:
    records = [FaultRecord(fault=fault) for fault in DEMO.faults]
    assert holds_for(DEMO, 2, records) == (Hold(round=3, phase="reduce", progress=0.4),)
    assert holds_for(DEMO, 1, records) == ()
    records[0].at = 1.0
    assert holds_for(DEMO, 2, records) == ()
