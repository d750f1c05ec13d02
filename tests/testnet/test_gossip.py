"""`strategy = "gossip"` with real nodes, of which one is killed; and a check that finds what is wrong in them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shoal.collectives.gossip import GossipSettings
from shoal.testnet.check import Check, Witness
from shoal.testnet.check_gossip import check_gossip
from shoal.testnet.reports.report import Report
from shoal.testnet.scenario import Fault, Scenario
from tests.testnet.real_nodes import run_real

ROUNDS = 5
PARAMETERS = 257 * 64
INNER_STEPS = 150
"""Rounds so long that a node which is a moment late does not pass over the one in which it is struck."""
SCENARIO = Scenario(
    nodes=4,
    rounds=ROUNDS,
    strategy="gossip",
    workload="regression",
    options={"inputs": 256, "outputs": 64},
    inner_steps=INNER_STEPS,
    inner={"warmup_tokens": 0, "lr": 0.01},
    round={"chunk_values": 4096},
    faults=(Fault(kind="kill", node=2, round=3, phase="reduce", progress=0.4),),
)
SETTINGS = GossipSettings(momentum=0.5, lr=0.7, gamma=0.6)
"""What the strategy implies."""


pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    out = tmp_path_factory.mktemp("gossip")
    return run_real(SCENARIO, out), out


def test_rounds_go_on_though_one_is_killed_and_every_step_is_what_it_must_be(run: tuple[Report, Path]) -> None:
    report, out = run
    lines = [json.loads(line) for log in out.glob("nodes/*/events.jsonl") for line in log.read_text().splitlines()]
    own = [line["tokens"] for line in lines if line["event"] == "stepped" and line["round"] == 1]
    assert (len(own), min(own) > 0) == (4, True)
    assert report.rounds[0].tokens == sum(own), "of all nodes, each of which tells of its own"
    assert report.digests_equal is None
    assert [node.outcome for node in report.nodes] == ["running", "running", "killed", "running"]
    assert max(r.contributors for r in report.rounds) == 4
    assert [r.contributors for r in report.rounds][-1] == 3
    assert sum(r.coverage for r in report.rounds) > 2  # on the whole, most had a partner
    assert report.loss.first is not None
    assert report.loss.last is not None
    assert report.loss.last < 0.9 * report.loss.first


def test_tensors_are_at_least_fifty_times_less_than_fp32_at_every_step(run: tuple[Report, Path]) -> None:
    report, _ = run
    assert report.bytes.fp32_allreduce_every_step == ROUNDS * INNER_STEPS * 2 * 3 * PARAMETERS * 4
    assert 0 < 50 * report.bytes.lanes_sent < report.bytes.fp32_allreduce_every_step


# --- the check finds what is wrong ---


def exchange_of(out: Path, index: int) -> int:
    """A round in which this node had a partner: who is late may go through one without, or pass over it."""
    lines = (out / "nodes" / str(index) / "events.jsonl").read_text().splitlines()
    stepped = [event for event in map(json.loads, lines) if event["event"] == "stepped"]
    return next(event["round"] for event in stepped if event["round"] > 1 and event["partner"] is not None)


def checked(run: tuple[Report, Path], folder: Path, spoil: Callable[[Path], None]) -> Check:
    """What is found in a round in which node 0 had a partner, after `spoil` of what it kept of it."""
    report, out = run
    round = exchange_of(out, 0)
    key = ("0.0", round)
    witnesses = []
    for node in report.nodes:
        shutil.copytree(out / "nodes" / str(node.index) / "rounds", folder / str(node.index) / "rounds")
        settled = frozenset({key}) if node.index == 0 else frozenset()
        witnesses.append(
            Witness(index=node.index, peer_id=node.peer_id, folder=folder / str(node.index), settled=settled)
        )  # type: ignore[arg-type]
    spoil(folder / "0" / "rounds" / f"0.0-{round}")
    return check_gossip(witnesses, [key], SETTINGS)


def flip(path: Path, at: int) -> None:
    values = np.fromfile(path, np.uint32)
    values[at] ^= 1
    values.tofile(path)


def test_one_wrong_bit_in_a_step_is_one_wrong_value(run: tuple[Report, Path], tmp_path: Path) -> None:
    assert checked(run, tmp_path / "sound", lambda folder: None).wrong_values == 0
    found = checked(run, tmp_path / "weight", lambda folder: flip(folder / "stepped", 100))
    assert (found.wrong_values, found.errors) == (1, ())
    found = checked(run, tmp_path / "momentum", lambda folder: flip(folder / "stepped", PARAMETERS + 100))
    assert (found.wrong_values, found.errors) == (1, ())


def test_a_delta_that_was_not_in_the_vector_is_wrong(run: tuple[Report, Path], tmp_path: Path) -> None:
    def other_delta(folder: Path) -> None:
        (np.fromfile(folder / "delta", np.float32) + np.float32(1)).tofile(folder / "delta")

    assert checked(run, tmp_path, other_delta).wrong_values >= 2 * PARAMETERS


def test_a_vector_other_than_the_one_offered_is_not_believed(run: tuple[Report, Path], tmp_path: Path) -> None:
    def other_vector(folder: Path) -> None:
        path = next(folder.glob("vector-*"))
        data = bytearray(path.read_bytes())
        data[-9] ^= 1
        path.write_bytes(data)

    assert any("is not the vector that was offered" in error for error in checked(run, tmp_path, other_vector).errors)


def test_a_step_of_which_nothing_was_kept_is_not_passed_over(run: tuple[Report, Path], tmp_path: Path) -> None:
    found = checked(run, tmp_path, lambda folder: (folder / "stepped").unlink())
    assert found.errors == (f"round {exchange_of(run[1], 0)}: node 0 made its step but kept nothing of it",)
