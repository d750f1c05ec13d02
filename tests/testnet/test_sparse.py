"""`strategy = "sparse"` with real nodes, of which one is killed in the middle of a reduction."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shoal.collectives.codecs import codec
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import CLIP_UNIT, Plan
from shoal.protocol.planning import norm_clips
from shoal.protocol.wire import decode
from shoal.testnet.check import FILE_LIMIT_BYTES, StoredContribution
from shoal.testnet.reports.report import Report
from shoal.testnet.scenario import Fault, Scenario
from tests.testnet.real_nodes import run_real

ROUNDS = 3
PARAMETERS = 1025 * 256
SCENARIO = Scenario(
    nodes=4,
    rounds=ROUNDS,
    strategy="sparse",
    workload="regression",
    options={"inputs": 1024, "outputs": 256},
    inner_steps=30,
    faults=(Fault(kind="kill", node=2, round=2, phase="reduce", progress=0.4),),
)


pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    out = tmp_path_factory.mktemp("sparse")
    return run_real(SCENARIO, out), out


def test_sparse_rounds_are_exact_though_one_is_killed(run: tuple[Report, Path]) -> None:
    report, _ = run
    assert report.digests_equal
    assert [node.outcome for node in report.nodes] == ["running", "running", "killed", "running"]
    assert [r.contributors for r in report.rounds] in ([4, 4, 3], [4, 3, 3])


def test_sparse_tensors_are_a_thousandth_of_fp32_at_every_step(run: tuple[Report, Path]) -> None:
    report, _ = run
    # That of three in the rounds after the kill is less than what is compared with, which is that of four.
    assert report.bytes.fp32_allreduce_every_step >= ROUNDS * 30 * 2 * 2 * PARAMETERS * 4
    assert report.bytes.fp32_allreduce_every_step > 1000 * report.bytes.lanes_sent > 0


def test_clips_in_the_certified_plans_are_those_of_the_contributions(run: tuple[Report, Path]) -> None:
    report, out = run
    clipped = 0
    for number in range(1, ROUNDS + 1):
        folders = {
            node.peer_id: out / "nodes" / str(i) / "rounds" / f"0.0-{number}" for i, node in enumerate(report.nodes)
        }
        plan = decode((folders[report.nodes[0].peer_id] / "plan").read_bytes(), Plan)
        assert plan.codec == "topk64-256"
        announced = {
            plan.participants[i].peer: squares_of(folders, plan.participants[i].peer) for i in plan.contributors()
        }
        places = {plan.participants[i].peer: i for i in plan.contributors()}
        for peer, clip in norm_clips(announced).items():
            assert abs(plan.clip(places[peer]) - clip) <= 1  # the squares are added up in another order here
            clipped += clip < CLIP_UNIT
    assert clipped >= ROUNDS  # of different norms at least one is over the lower median


def squares_of(folders: dict[PeerId, Path], peer: PeerId) -> list[float]:
    """Per chunk the sum of squares of what a node contributed, from the bytes."""
    (path,) = folders[peer].glob("contribution-*")
    stored = decode(path.read_bytes(), StoredContribution, limit_bytes=FILE_LIMIT_BYTES)
    squares, left = [], stored.numel
    for chunk in stored.chunks:
        values = np.empty(min(left, stored.chunk_values), np.float32)
        codec(stored.codec).decode_into(chunk, values)
        squares.append(float((values.astype(np.float64) ** 2).sum()))
        left -= values.size
    return squares
