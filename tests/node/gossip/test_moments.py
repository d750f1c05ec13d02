"""The moments of a gossiping node's optimizer: written beside the rounds, and taken up again after a restart."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trio

from shoal.lab.bench.train_gossip import GossipNode
from shoal.lab.bench.train_spec import TrainBench, workload_of
from shoal.node.gossip.moments import GossipMoments
from shoal.node.state.resumption import CHEAP_S, REST
from shoal.node.state.store import write_atomically
from shoal.node.training.inner_state import SavedInner, Snapshotter
from shoal.node.training.trainer_messages import Snapshotted
from shoal.protocol.identity import Identity
from tests.node.simulated_disk import Disks

INNER: dict[str, Any] = {"lr": 0.01, "warmup_tokens": 0}

pytestmark = pytest.mark.virtual_time


class TrainingClientStandIn:
    """A trainer's answers, given by the test."""

    def __init__(self) -> None:
        self.wrote: list[tuple[int, Path]] = []
        self.restored: list[tuple[int, str]] = []

    async def snapshot(self, round: int, path: str) -> None:
        await trio.lowlevel.checkpoint()
        self.wrote.append((round, Path(path)))

    async def restore_moments(self, round: int, path: str) -> None:
        await trio.lowlevel.checkpoint()
        self.restored.append((round, Path(path).name))


@pytest.fixture
def training_client() -> TrainingClientStandIn:
    return TrainingClientStandIn()


@pytest.fixture
def moments(tmp_path: Path, training_client: TrainingClientStandIn) -> GossipMoments:
    return GossipMoments(tmp_path, training_client)  # type: ignore[arg-type]


def answer(training_client: TrainingClientStandIn, failure: str = "") -> Snapshotted:
    """What the trainer says of the newest order, with the file there if it could be written."""
    round, path = training_client.wrote[-1]
    if not failure:
        path.write_bytes(b"moments")
    return Snapshotted(round=round, path=str(path), copy_s=0.0, write_s=0.0, size_bytes=7, failure=failure)


async def test_the_newest_two_are_kept_and_the_nearest_to_the_state_is_taken_up(
    moments: GossipMoments, training_client: TrainingClientStandIn
) -> None:
    await moments.made(2)
    training_client.wrote[-1][1].with_suffix(".trainer.partial").touch()  # and its writer was killed
    moments.interrupted()
    for round in (3, 4, 7):
        await moments.made(round)
        await moments.heard(answer(training_client))
    assert sorted(path.name for path in training_client.wrote[0][1].parent.iterdir()) == [
        "0.0-4.trainer",
        "0.0-7.trainer",
    ]
    for state in (7, 5, 20):
        await moments.restore(state)
    assert [name for _, name in training_client.restored] == ["0.0-7.trainer", "0.0-4.trainer", "0.0-7.trainer"]


async def test_the_first_moments_are_there_after_a_power_cut(
    training_client: TrainingClientStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disks(monkeypatch).add(tmp_path / "disk", random.Random(1))
    await GossipMoments(disk.root, training_client).made(3)  # type: ignore[arg-type]
    write_atomically(training_client.wrote[-1][1], b"as the trainer does")
    assert disk.safe("resume", "0.0-3.trainer") == b"as the trainer does"


async def test_without_files_nothing_is_taken_up(
    moments: GossipMoments, training_client: TrainingClientStandIn
) -> None:
    await moments.restore(3)
    assert training_client.restored == []


async def test_one_is_written_at_a_time_and_a_slow_disk_rests(
    moments: GossipMoments, training_client: TrainingClientStandIn
) -> None:
    await moments.made(1)
    await moments.made(2)
    took = 2 * CHEAP_S
    await trio.sleep(took)
    await moments.heard(answer(training_client))
    await moments.made(3)
    await trio.sleep(REST * took + 0.1)
    await moments.made(4)
    assert [round for round, _ in training_client.wrote] == [1, 4]


async def test_a_death_of_the_trainer_and_a_full_disk_do_not_end_it(
    moments: GossipMoments, training_client: TrainingClientStandIn
) -> None:
    await moments.made(1)
    moments.interrupted()
    await moments.made(2)
    await moments.heard(answer(training_client, failure="the disk is full"))
    await moments.made(3)
    assert [round for round, _ in training_client.wrote] == [1, 2, 3]


def test_a_node_that_takes_up_its_moments_goes_on_to_the_bit(tmp_path: Path) -> None:
    """Beside one that was never ended; and without its moments it goes elsewhere."""
    torch.set_num_threads(1)
    tiny: dict[str, Any] = {"width": 16, "layers": 1, "heads": 2, "context": 16, "batch": 4}
    bench = TrainBench(strategy="gossip", nodes=1, tokens=1, inner_steps=3, options=tiny, keys={"inner": INNER})
    one = Identity.from_seed(b"\1" * 32)
    manifest = bench.manifest(7, [one.peer_id])
    workload = workload_of(manifest)
    node = GossipNode(one, manifest, workload)
    node.train(1)
    path = tmp_path / "0.0-1.trainer"
    snapshotter = Snapshotter()
    assert not snapshotter.take(node.replica.inner_state(1), path).write().failure
    node.step(None, 1)

    ended = [GossipNode(one, manifest, workload, node.state, kept) for kept in (SavedInner(path), None)]
    for each in (node, *ended):
        each.train(2)
        each.step(None, 1)
    assert np.array_equal(node.state.anchor, ended[0].state.anchor)
    assert np.abs(node.state.anchor - ended[1].state.anchor).max() > 1e-4
