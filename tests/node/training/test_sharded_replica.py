"""A trainer of several processes, with real ones on the processor: the values of one process, and one death for all."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import msgspec
import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest
import torch
import trio

from shoal.node import child_process
from shoal.node.training.inner_loop import Replica
from shoal.node.training.inner_state import SavedInner, Snapshotter
from shoal.node.training.shard import rank_device
from shoal.node.training.shared_tensors import Vector
from shoal.node.training.trainer import Restarted, Trainer, TrainerFailed, TrainerSpec
from shoal.node.training.trainer_messages import (
    Applied,
    Apply,
    Assignment,
    Contribution,
    Evaluate,
    Evaluated,
    Initial,
    InnerSettings,
    Restore,
    Restored,
    Snapshot,
    Snapshotted,
    SyncSettings,
    Train,
    WriteInitial,
)
from shoal.protocol.errors import ConfigError
from shoal.protocol.manifest import OptimizerName
from tests.node.lab import Swarm, assert_exact
from tests.node.told_trainer import ToldTrainer, expect, running
from tests.node.uneven import ByHand, Uneven, Wide

DEADLINE_S = 300.0
"""Importing torch's distributed parts in several processes takes long on a busy machine."""
SEED = 3
STEPS = 5
INNER = InnerSettings(lr=1e-2, clip_norm=0.5)
"""A norm that is reached, so that clipping plays its part."""
CLOSE = {"rtol": 0, "atol": 1e-5}
LEVEL_APART = 0.02
"""A step or two of the optimizer: by more no value differs that was moved by a moment one level higher."""


def share(round: int) -> Assignment:
    return Assignment(seed=SEED, round=round, member=0, members=1)


def spec(
    workload: str = "Uneven",
    *,
    processes: int = 2,
    accumulate: int = 1,
    gradients: bool = False,
    inner: InnerSettings = INNER,
) -> TrainerSpec:
    return TrainerSpec(
        sync=SyncSettings(gradients=gradients),
        workload=f"tests.node.uneven:{workload}",
        seed=SEED,
        inner=inner,
        device="cpu",
        processes=processes,
        accumulate=accumulate,
    )


def others(trainer: Trainer) -> list[psutil.Process]:
    """The processes of the group but rank 0."""
    assert trainer.pid is not None
    found: list[psutil.Process] = psutil.Process(trainer.pid).children()
    return found


def reached_from(group: list[psutil.Process]) -> set[str]:
    """The addresses at which they can be reached."""
    return {link.laddr.ip for process in group for link in process.net_connections("inet")}


class Single:
    """The same rounds in this process: contributions and losses of rounds 1 and 2, the anchor after round 1."""

    def __init__(self, inner: InnerSettings = INNER, workload: Uneven | None = None) -> None:
        self.replica = replica = Replica(workload or Uneven(), seed=SEED, inner=inner, device=torch.device("cpu"))
        self.initial = np.zeros(replica.layout.numel, np.float32)
        replica.write_initial(self.initial)
        replica.apply(self.initial, round=0, fresh=True)
        self.first, self.told = self.stretch(1)
        self.anchor = self.after(self.initial, self.first)
        self.anchor[self.span("frozen")] = 1.5  # by whoever went back to another state: it is frozen for the loop only
        self.value = replica.evaluate()

    def span(self, name: str) -> slice:
        """Where the values of a parameter or buffer are in the vectors."""
        return self.replica.layout.places()[name]

    def after(self, anchor: Vector, contribution: Vector) -> Vector:
        """The anchor to which a contribution leads that is the only one, and is taken as it is."""
        following, buffers = anchor - contribution, slice(self.replica.layout.buffers_begin, None)
        following[buffers] = contribution[buffers]
        return following

    def stretch(self, round: int) -> tuple[Vector, Contribution]:
        self.replica.begin(Train(round=round, steps=STEPS, assignment=share(round)))
        out = np.zeros_like(self.initial)
        while not isinstance(report := self.replica.step(out), Contribution):
            pass
        return out, report

    def snapshot(self, path: Path) -> None:
        written = Snapshotter().take(self.replica.inner_state(1), path).write()
        assert not written.failure

    def second(self) -> Vector:
        self.replica.apply(self.anchor, round=1, taken=1)
        return self.stretch(2)[0]


def assert_close(found: np.ndarray, expected: np.ndarray, *, rounded: bool) -> None:
    """Equal to what the order of sums changes. rounded: moments are in 8 bits, so a few may be a level apart."""
    if rounded:
        far = np.abs(found.astype(np.float64) - expected) > CLOSE["atol"]
        assert far.mean() < 0.002
        found = np.where(far & (np.abs(found.astype(np.float64) - expected) < LEVEL_APART), expected, found)
    np.testing.assert_allclose(found, expected, **CLOSE)


def assert_moments_close(one: Path, other: Path, *, rounded: bool) -> None:
    """The same tensors in both snapshots; the moments equal to rounding, counts to the bit."""
    left, right = SavedInner(one), SavedInner(other)
    names = {name for name in left._file.names if not name.startswith("random.")}
    assert names == {name for name in right._file.names if not name.startswith("random.")}
    assert {"first.embedding.weight", "second.blocks.1.outer.bias", "steps", "buffer.seen"} <= names
    for name in names - {"buffer.seen"}:
        a, b = left._file.array(name), right._file.array(name)
        if a.dtype == np.uint8:
            assert (a == b).mean() > 0.998, name
        else:
            assert_close(a, b, rounded=rounded)


@pytest.mark.parametrize(
    ("wanted", "there", "found"),
    [
        ("auto", 0, "cpu"),
        ("cpu", 2, "cpu"),
        ("auto", 2, "cuda:1"),
        ("cuda", 3, "cuda:1"),
        ("cuda", 1, "only 1 CUDA device here; give fewer processes, or --device cpu"),
        ("cuda", 0, "no CUDA device here; give fewer processes, or --device cpu"),
        ("mps", 0, "give --device cpu, cuda or auto with it, not 'mps'"),
    ],
)
def test_each_rank_has_a_device(monkeypatch: pytest.MonkeyPatch, wanted: str, there: int, found: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    try:
        device = str(rank_device(wanted, 1, 2))
    except ConfigError as error:
        device = str(error)
    assert device.endswith(found)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "muon"])
async def test_two_processes_learn_what_one_does_and_go_on_when_one_is_killed(
    tmp_path: Path, optimizer: OptimizerName
) -> None:
    """Genesis, a contribution, the next anchor; kill -9 of rank 1 in mid-stretch; the second contribution after it."""
    inner, rounded = msgspec.structs.replace(INNER, optimizer=optimizer), optimizer == "adamw8bit"
    single = Single(inner, Wide() if rounded else Uneven())
    single.snapshot(tmp_path / "one")
    expected = single.second()
    path = tmp_path / "1.trainer"
    async with running(spec("Wide" if rounded else "Uneven", inner=inner)) as trainer:
        assert trainer.started.device == "2 x cpu"
        assert trainer.layout == single.replica.layout
        await trainer.send(WriteInitial())
        await expect(trainer, Initial)
        np.testing.assert_array_equal(trainer.contribution, single.initial)
        await trainer.apply(Apply(round=0, fresh=True), trainer.contribution.copy())
        await expect(trainer, Applied)
        await trainer.send(Snapshot(round=0, path=str(tmp_path / "0.trainer")))  # nothing to keep, and no harm
        assert not (await expect(trainer, Snapshotted)).failure
        await trainer.send(Train(round=1, steps=STEPS, assignment=share(1)))
        first = await expect(trainer, Contribution)
        assert (first.number, first.steps, first.tokens) == (1, STEPS, single.told.tokens)
        assert first.loss == pytest.approx(single.told.loss, abs=1e-5)
        assert_close(trainer.contribution, single.first, rounded=rounded)
        assert np.abs(single.first).max() > 1e-3
        await trainer.send(Evaluate(round=0))
        assert (await expect(trainer, Evaluated)).value == pytest.approx(single.value, abs=1e-5)

        await trainer.send(Snapshot(round=1, path=str(path)))
        assert not (await expect(trainer, Snapshotted)).failure
        assert_moments_close(tmp_path / "one", path, rounded=rounded)
        await trainer.apply(Apply(round=1, taken=1), single.anchor.copy())
        await expect(trainer, Applied)
        await trainer.send(Train(round=2, steps=10**12, assignment=share(2), contribute=False))
        await trainer.events.receive()  # a Progress: it is in the middle of it
        first_group = [psutil.Process(trainer.pid), *others(trainer)]
        assert reached_from(first_group) <= {"127.0.0.1", "::1"}
        first_group[1].kill()
        restored = await expect(trainer, Restored)
        assert (restored.round, restored.exact, restored.refused) == (1, True, "")
        restarted = await expect(trainer, Restarted)
        assert restarted.round == 1
        assert "another of its processes died" in restarted.cause
        assert not any(process.is_running() for process in first_group)
        await trainer.send(Train(round=2, steps=STEPS, assignment=share(2)))
        assert (await expect(trainer, Contribution)).number == 2
        assert_close(trainer.contribution, expected, rounded=rounded)


@pytest.mark.long
async def test_a_snapshot_is_gone_on_from_by_another_number_of_processes(tmp_path: Path) -> None:
    """One process' by three, with batches in parts; theirs by one. The anchor has another buffer than the models."""
    single = Single()
    single.anchor[single.span("scale")] = 1.5
    path, back = tmp_path / "one", tmp_path / "three"
    single.snapshot(path)
    expected = single.second()
    async with running(spec(processes=3)) as trainer:
        await trainer.send(Restore(path=str(path), round=1, exact=True))
        assert not (await expect(trainer, Restored)).refused
        await trainer.apply(Apply(round=1), single.anchor.copy())
        await expect(trainer, Applied)
        await trainer.send(Train(round=2, steps=STEPS, assignment=share(2)))
        await expect(trainer, Contribution)
        np.testing.assert_allclose(trainer.contribution, expected, **CLOSE)
        await trainer.send(Snapshot(round=2, path=str(back)))
        assert not (await expect(trainer, Snapshotted)).failure
    assert expected[single.span("scale")] == 1.5
    anchor = single.after(single.anchor, expected)
    single.replica.apply(anchor, round=2, taken=2)
    third, _ = single.stretch(3)
    again = Replica(Uneven(), seed=SEED, inner=INNER, device=torch.device("cpu"))
    again.restore(SavedInner(back), exact=True)
    again.apply(anchor, round=2)
    again.begin(Train(round=3, steps=STEPS, assignment=share(3)))
    out = np.zeros_like(anchor)
    while not isinstance(again.step(out), Contribution):
        pass
    np.testing.assert_allclose(out, third, **CLOSE)


@pytest.mark.parametrize("workload", [pytest.param(Uneven, marks=pytest.mark.long), ByHand])
async def test_two_processes_contribute_the_gradient_that_one_does(workload: type[Uneven]) -> None:
    """The strategy ddp, with each part of a batch in parts again: six of five rows, of which two have no tokens."""
    sync = SyncSettings(gradients=True)
    single = Replica(workload(), seed=SEED, inner=INNER, device=torch.device("cpu"), sync=sync)
    anchor = np.zeros(single.layout.numel, np.float32)
    single.write_initial(anchor)
    single.apply(anchor, round=0, fresh=True)
    order = Train(round=1, steps=1, assignment=share(1))
    single.begin(order)
    expected = np.zeros_like(anchor)
    told = single.step(expected)
    assert isinstance(told, Contribution)
    async with running(spec(workload.__name__, accumulate=3, gradients=True)) as trainer:
        assert trainer.layout == single.layout
        await trainer.apply(Apply(round=0, fresh=True), anchor.copy())
        await expect(trainer, Applied)
        await trainer.send(order)
        found = await expect(trainer, Contribution)
        assert (found.tokens, found.loss) == (told.tokens, pytest.approx(told.loss, abs=1e-5))
        np.testing.assert_allclose(trainer.contribution, expected, **CLOSE)
        assert np.abs(expected).max() > INNER.clip_norm / 10


@pytest.mark.long
async def test_what_one_process_raises_ends_training_and_a_dead_rank_0_ends_a_stopped_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error of the user's code is told, whichever process had it; none of them outlives rank 0."""
    monkeypatch.setattr(child_process, "RESTART_PAUSE_S", 0.0)

    async def begin(trainer: ToldTrainer) -> None:
        await trainer.apply(Apply(round=0, fresh=True), np.zeros(trainer.layout.numel, np.float32))
        await expect(trainer, Applied)
        await trainer.send(Train(round=1, steps=1, assignment=share(1)))

    async def raises() -> None:
        async with running(spec("FailsInOne")) as trainer:
            await begin(trainer)
            failed = await expect(trainer, TrainerFailed)
            assert failed.summary.startswith("ValueError: a planted mistake in another process at ")
            assert "in loss" in failed.traceback

    async def stops() -> None:
        async with running(spec("StopsInOne")) as trainer:
            await begin(trainer)
            (stopped,) = others(trainer)
            while stopped.status() != psutil.STATUS_STOPPED:  # noqa: ASYNC110  the kernel tells of no event
                await trio.sleep(0.01)
            assert trainer.pid is not None
            os.kill(trainer.pid, signal.SIGKILL)
            assert "SIGKILL" in (await expect(trainer, Restarted)).cause
            assert not stopped.is_running()

    async with trio.open_nursery() as nursery:
        for part in (raises, stops):
            nursery.start_soon(part)


@pytest.mark.long
def test_a_node_of_two_processes_certifies_rounds_with_a_node_of_one(tmp_path: Path) -> None:
    began = time.monotonic()
    with Swarm(tmp_path, nodes=2) as swarm:
        swarm.start_together(node1=["--processes", "2", "--device", "cpu"])
        for node in swarm.nodes:
            assert node.certified(3)["contributors"] == 2
        for node in swarm.nodes:
            node.kill()
        report = swarm.report(3)
        assert_exact(report)
        assert report.wrong_values == 0
        assert [r.contributors for r in report.rounds] == [2, 2, 2]
    assert time.monotonic() - began < DEADLINE_S
