"""Streaming DiLoCo in real processes: fragments in turn, 4 bits, steps beside the rounds, and a node that is killed."""

from __future__ import annotations

from pathlib import Path

from shoal.protocol.identity import PeerId
from shoal.testnet import swarm
from shoal.testnet.scenario import Fault, Scenario
from tests.node.forks import FORKED
from tests.testnet.real_nodes import run_real

NUMEL = 1024 * 256 + 256
"""Nine chunks, the last of 256 values: two fragments of 98,304 values and one of 65,792."""


def test_streaming_in_four_bits_is_exact_though_a_node_is_killed_in_a_reduction(tmp_path: Path) -> None:
    scenario = Scenario(
        nodes=3,
        rounds=6,
        strategy="streaming",
        workload="regression",
        options={"inputs": 1024, "outputs": 256},
        inner_steps=12,
        sync={"fragments": 3, "overlap_steps": 2},
        faults=(Fault(kind="kill", node=2, round=4, phase="reduce", progress=0.3),),
    )

    report = run_real(scenario, tmp_path, FORKED)
    assert report.digests_equal
    assert [r.members for r in report.rounds] == [3, 3, 3, 2, 2, 2]
    # Six rounds are two of all the parameters: 12 steps each.
    assert report.bytes.fp32_allreduce_every_step == 24 * 2 * 2 * NUMEL * 4
    assert all(node.blocked_fraction is not None for node in report.nodes)
    manifest = swarm.testnet_manifest(scenario, [PeerId(report.nodes[0].peer_id)])
    assert (manifest.sync.codec, manifest.sync.round_steps) == ("int4", 4)
