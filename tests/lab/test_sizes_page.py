"""The page of sizes tells what the doctor would say, and what the codecs write."""

from __future__ import annotations

import pytest

from shoal.lab.sizes_page import EXAMPLE, MODELS, bytes_per_parameter, render
from shoal.node import doctor
from shoal.node.options import CHECKPOINTS_KEPT
from shoal.node.state.disk_need import bytes_on_disk
from shoal.protocol.manifest import parse_manifest
from shoal.protocol.manifest_sync import SyncSection


def rows() -> dict[str, list[str]]:
    lines = [line.strip("| ").split(" | ") for line in render().splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in lines}


def sync(strategy: str) -> SyncSection:
    founder = "12D3KooWCjKHyzMTLpykyLoE7roN2U6kdoAb89CXcmJXaCyk1FbW"
    steps = "" if strategy == "ddp" else "inner_steps = 100\n"
    text = f'[swarm]\nname = "a"\nfounders = ["{founder}"]\n[workload]\nname = "regression"\n'
    return parse_manifest(f'{text}[sync]\nstrategy = "{strategy}"\n{steps}', source="the test").sync


def test_model_has_its_row_by_the_doctors_formula() -> None:
    told = rows()
    assert [f"{numel:,}" in told for numel in MODELS] == [True] * len(MODELS)
    trainer, daemon, disk, checkpoints = told["124,000,000"]
    assert (trainer, daemon) == ("2.5 GB", "1.5 GB")  # 20 and 12 bytes a parameter
    assert checkpoints == "4.5 GB"  # three of 8 bytes, and 12 of the newest
    parts = bytes_on_disk(EXAMPLE, "int8", CHECKPOINTS_KEPT)
    assert disk == f"{sum(parts.values()) / 1e9:.1f} GB"


def test_doctor_asks_for_the_memory_that_the_page_tells() -> None:
    check = doctor.memory(doctor.TrialReport(numel=EXAMPLE), "adamw")
    needed = sum(doctor.bytes_in_memory(EXAMPLE).values())
    assert f"about {needed / 1e9:.1f} GB needed for 124.0 million parameters" in check.detail
    assert needed == EXAMPLE * 32 + 1_000_000_000


@pytest.mark.parametrize(
    ("strategy", "nodes", "expected"),
    [("diloco", 2, 1.0), ("diloco", 8, 1.75), ("ddp", 2, 4.0), ("streaming", 2, 4.125 / 8), ("gossip", 30, 2.0)],
)
def test_traffic_is_a_nodes_part_of_contribution_and_result(strategy: str, nodes: int, expected: float) -> None:
    assert bytes_per_parameter(sync(strategy), nodes) == pytest.approx(expected, rel=2e-3)


def test_strategy_has_its_row_with_the_codec_that_init_writes() -> None:
    told = rows()
    assert told["`diloco`, int8"] == ["every 100 steps", "1.00 B", "1.33 B", "1.75 B", "1.94 B", "66 s"]
    assert {name.split("`")[1] for name in told if "`" in name} == {"diloco", "ddp", "streaming", "sparse", "gossip"}
