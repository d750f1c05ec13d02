"""A real node that joins a swarm whose rounds are over long before it has fetched the state of one."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shoal.protocol.manifest import render_manifest, validate_manifest
from tests.node.lab import Swarm, assert_exact


@pytest.mark.long
def test_joiner_gets_into_rounds_that_are_shorter_than_its_catching_up(tmp_path: Path) -> None:
    with Swarm(tmp_path, nodes=3, founders=2) as swarm:
        tables = msgspec.to_builtins(swarm.manifest)
        tables["sync"] = {"strategy": "ddp"}
        swarm.manifest = validate_manifest(tables, source="the test's manifest")
        swarm.manifest_path.write_text(render_manifest(swarm.manifest))
        joiner = swarm.nodes.pop()
        founders = list(swarm.nodes)
        swarm.start_together()
        swarm.nodes.append(joiner)
        founders[0].certified(5)
        joiner.start(join=founders)

        arrived = joiner.wait("contributed")["round"]
        began = next(event["round"] for event in joiner.events("round_started") if event["role"] == "joiner")
        last = founders[0].certified(arrived + 2)
        assert last["contributors"] == 3
        assert joiner.peer_id in last["members"]
        assert arrived - began < 30  # without anybody waiting for it, it was behind for hundreds
        for node in swarm.nodes:
            node.certified(arrived + 2)
        for node in swarm.nodes:
            node.end()
        assert_exact(swarm.report(arrived + 2))
