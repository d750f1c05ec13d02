"""Real nodes of which one comes to a contribution that is not finite: it counts nowhere, and spreads nowhere."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

from shoal.protocol.manifest import render_manifest
from tests.node.lab import Swarm, assert_exact, eventually
from tests.node.test_evidence_nodes import started_as

NOT_FINITE_NODE = Path(__file__).with_name("not_finite_node.py")
ROUND, ROUNDS = 2, 3


def of_three(tmp_path: Path) -> Swarm:
    """Three nodes that exchange what they learn as it is."""
    swarm = Swarm(tmp_path, nodes=3)
    sync = msgspec.structs.replace(swarm.manifest.sync, codec="fp32")
    swarm.manifest = msgspec.structs.replace(swarm.manifest, sync=sync)
    swarm.manifest_path.write_text(render_manifest(swarm.manifest))
    return swarm


@pytest.mark.long
def test_node_whose_values_are_not_finite_observes_that_round_and_contributes_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with of_three(tmp_path) as swarm:
        broken = swarm.nodes[-1]
        monkeypatch.setenv("SENDS_IT", "no")
        started_as(NOT_FINITE_NODE, broken.folder, monkeypatch)
        swarm.start_together()
        for node in swarm.nodes:
            rounds = [node.certified(round) for round in range(1, ROUNDS + 1)]
            assert [event["contributors"] for event in rounds] == [3, 2, 3]
            assert all(event["coverage"] == 1.0 for event in rounds)
            assert all(broken.peer_id in event["members"] for event in rounds)
        assert f"round {ROUND}: this node contributes nothing" in broken.log
        assert "NaN or infinity among the values to encode" in broken.log
        assert_exact(swarm.report(ROUNDS))


def test_contribution_that_is_not_finite_is_left_out_of_every_chunk_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with of_three(tmp_path) as swarm:
        *honest, liar = swarm.nodes
        monkeypatch.setenv("SENDS_IT", "yes")
        started_as(NOT_FINITE_NODE, liar.folder, monkeypatch)
        swarm.start_together()
        for node in honest:
            certified = node.certified(ROUND)
            assert certified["contributors"] == 2
            assert certified["coverage"] == pytest.approx(2 / 3)
            applied = np.fromfile(node.folder / "rounds" / f"0.0-{ROUND}" / "applied", np.float32)
            assert np.isfinite(applied).all()
            assert np.abs(applied).max() > 0
            proof = node.wait("evidence")
            assert (proof["peer"], proof["kind"], proof["round"]) == (liar.peer_id, "unsoundcontribution", ROUND)
        for chunk in range(9):  # an owner says so once it has sent the final, with which others may certify before
            line = rf"chunk {chunk}: {liar.peer_id}( \(.*\))? left out: does not decode to finite values"
            eventually(lambda line=line: any(re.search(line, node.log) for node in swarm.nodes), line)  # type: ignore[misc]
        assert_exact(swarm.report(ROUND))
