"""Real nodes of which one commits to a contribution that is not finite: it counts nowhere, and spreads nowhere."""

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
ROUND = 2


@pytest.mark.long
def test_contribution_that_is_not_finite_is_left_out_of_every_chunk_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Swarm(tmp_path, nodes=3) as swarm:
        sync = msgspec.structs.replace(swarm.manifest.sync, codec="fp32")
        swarm.manifest = msgspec.structs.replace(swarm.manifest, sync=sync)
        swarm.manifest_path.write_text(render_manifest(swarm.manifest))
        *honest, liar = swarm.nodes
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
