"""Real nodes of which one gets slower in the midst of a round: below a quarter of its planned rate it is evicted."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shoal.protocol.manifest import render_manifest
from tests.node.lab import Swarm, assert_exact
from tests.node.test_evidence_nodes import started_as

SLOWING_NODE = Path(__file__).with_name("slowing_node.py")
MODEL = {"inputs": 1024, "outputs": 1024}
"""4 MB, which takes some seconds at such a rate."""
UPLOAD = "2MB/s"
SLOWED = 3
"""In the rounds before it is measured what the node uploads, and said what that is."""


@pytest.mark.long
@pytest.mark.parametrize(("share", "stays"), [(0.3, True), (0.2, False)])
def test_member_is_evicted_below_a_quarter_of_its_planned_rate_and_not_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, stays: bool
) -> None:
    with Swarm(tmp_path, nodes=3, options=MODEL) as swarm:
        sync = msgspec.structs.replace(swarm.manifest.sync, codec="fp32")
        round_ = msgspec.structs.replace(swarm.manifest.round, chunk_values=32768)
        swarm.manifest = msgspec.structs.replace(swarm.manifest, sync=sync, round=round_)
        swarm.manifest_path.write_text(render_manifest(swarm.manifest))
        *others, slow = swarm.nodes
        monkeypatch.setenv("SLOWED_ROUND", str(SLOWED))
        monkeypatch.setenv("SLOWED_TO", str(share))
        started_as(SLOWING_NODE, slow.folder, monkeypatch)
        sockets = "--no-shared-memory"  # as between machines
        swarm.start_together(node0=[sockets], node1=[sockets], node2=[sockets, "--max-upload", UPLOAD])
        for node in others:
            before, slowed = (node.certified(round) for round in (SLOWED - 1, SLOWED))
            assert (before["coverage"], len(before["members"])) == (1.0, 3)
            assert (slow.peer_id in slowed["members"]) == stays
            assert (slowed["coverage"] == 1.0) == stays
            evicted = [event for event in node.events("planned", round=SLOWED) if event["evicted"]]
            assert [event["evicted"] for event in evicted] == ([] if stays else [[slow.peer_id]])
            # Long enough for a stall deadline, and no absolute deadline in it.
            assert 2.0 < slowed["at"] - before["at"] < 60.0
        assert_exact(swarm.report(SLOWED))
        assert "a fault of ours" not in slow.log, "it was evicted for another reason than how slow it is"
