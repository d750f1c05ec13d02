"""Overlap and mixing amended while real nodes stream: all change in the same round, and every value stays exact."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shoal.protocol.manifest import render_manifest, validate_manifest
from tests.node.lab import Swarm, assert_exact, eventually, shoal
from tests.node.test_amend_nodes import amend, steps

ROUND_STEPS = 15


@pytest.mark.long
def test_a_quorum_amends_overlap_and_mixing(tmp_path: Path) -> None:
    """With as many steps of overlap as there are between two rounds, a contribution has one more than that."""
    with Swarm(tmp_path, nodes=3) as swarm:
        tables = msgspec.to_builtins(swarm.manifest)
        sync = {"strategy": "streaming", "inner_steps": 2 * ROUND_STEPS, "fragments": 2, "overlap_steps": 1}
        tables["sync"] = {**sync, "late_steps": 0, "balance": False}
        swarm.manifest = validate_manifest(tables, source="the test's manifest")
        swarm.manifest_path.write_text(render_manifest(swarm.manifest))
        first, second, third = swarm.nodes
        swarm.start_together(holds=["3:train"])
        for node in swarm.nodes:
            node.hold("3:train")  # the third stays there, so that the others wait for it and not for us
        for node in (first, second):
            node.release()
        refused = shoal("amend", "--set", f"sync.overlap_steps={ROUND_STEPS + 1}", "--data-dir", str(first.folder))
        assert refused.returncode == 1
        assert "overlap_steps" in refused.stderr
        wanted = (f"sync.overlap_steps={ROUND_STEPS}", "sync.mixing=0.25")
        amend(first, *wanted)
        eventually(lambda: second.ask("status")["amendments"], "the other hears of it")
        amend(second, *wanted)
        third.release()

        told = first.wait("amended")
        at = told["round"]
        assert told["settings"] == {"sync.mixing": 0.25, "sync.overlap_steps": ROUND_STEPS}
        for node in (second, third):
            assert node.wait("amended")["value"] == told["value"]
        final = at + 4
        for node in swarm.nodes:
            node.certified(final)
        for node in swarm.nodes:
            # The anchor of the round that decided it is applied by what was in force before.
            made = [steps(node, round) for round in range(at, final + 1)]
            assert made == [ROUND_STEPS] * 2 + [ROUND_STEPS + 1] * 3
            assert node.ask("status")["settings"] == told["settings"]
        for node in swarm.nodes:
            node.kill()
        assert_exact(swarm.report(final))
