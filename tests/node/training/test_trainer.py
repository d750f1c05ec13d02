"""The trainer and its supervisor, with real processes.

Importing torch takes seconds, so what concerns the supervisor alone is tested with `FAKE`, a trainer of a few
lines that speaks the same messages and trains nothing.
"""

from __future__ import annotations

import math
import os
import re
import select
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trio

from shoal.collectives.memory import VectorPool
from shoal.node import child_process
from shoal.node.child_process import Connection
from shoal.node.pipe import FRAME_LIMIT_BYTES, Framing, Pause, Resume, Stop, frame_of
from shoal.node.state.file_memory import file_memory
from shoal.node.training import trainer as trainer_module
from shoal.node.training.inner_loop import Replica
from shoal.node.training.shared_tensors import attach, create, lend, map_lent, open_memory
from shoal.node.training.trainer import Restarted, Trainer, TrainerFailed, TrainerSpec
from shoal.node.training.trainer_messages import (
    Applied,
    Apply,
    Assignment,
    Command,
    Contribution,
    Evaluate,
    Evaluated,
    Initial,
    InnerSettings,
    Report,
    Restore,
    Restored,
    Retune,
    Snapshot,
    Snapshotted,
    SyncSettings,
    Train,
    Trained,
    WriteInitial,
    unpack_command,
    unpack_report,
)
from shoal.node.workload import WorkloadError
from shoal.node.workloads.regression import RegressionWorkload
from shoal.protocol.errors import LocalError
from tests.node.forks import copied_trainer
from tests.node.told_trainer import ToldTrainer, expect, running

DEADLINE_S = 120.0
SHARE = Assignment(seed=3, round=1, member=0, members=1)

FAKE = """
import os, socket, sys, time
from shoal.node.pipe import *
from shoal.node.training.trainer_messages import *
control, memory = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
framing, numel, number, lr_of_anchor, paused = Framing(), 4, 0, 0.0, False
print("fake trainer begins", flush=True)
while data := control.recv(1 << 16):
    for frame in framing.feed(data):
        answer, command = None, unpack_command(frame)
        if isinstance(command, Start): heard = command.options.get("heard")
        if heard: open(heard, "a").write(f"{command}\\n")
        match command:
            case Start(options=options, contributions=number, inner=inner):
                lr = inner.lr
                if "die_early" in options: sys.exit(9)
                if "grow" in options: numel += number
                answer = Started(layout=Layout(names=("w",), shapes=((numel,),), numel=numel), metric="m", device="cpu")
            case Attach(): answer = Attached()
            case Retune(inner=inner): lr = inner.lr
            case Pause(): paused = True
            case Resume(): paused = False
            case Apply(round=round):
                lr_of_anchor = lr
                while heard and os.path.exists(heard + ".stuck"): time.sleep(0.01)
                answer = Applied(round=round)
            case Restore(path=path, round=round, exact=exact): answer = Restored(path=path, round=round, exact=exact)
            case Snapshot(path=path, round=round, midway=midway):
                answer = Snapshotted(path=path, round=round, midway=midway, copy_s=0.0, write_s=0.0, size_bytes=0)
            case Ping(): answer = Pong()
            case WriteInitial():
                if os.path.exists(options["fuse"]):
                    os.unlink(options["fuse"])
                    sys.exit(9)
                answer = Initial()
            case Train(round=round):
                number += 1
                answer = Contribution(
                    number=number, round=round, tokens=0, steps=0, loss=lr, seconds=lr_of_anchor, tokens_per_s=0.0,
                    blocked_s=float(paused))
            case Evaluate(): control.sendall(bytes.fromhex(open(heard + ".lie").read()))
            case Stop(): sys.exit(0)
        if answer is not None: control.sendall(frame_of(answer))
"""

FAULTY = """
import os, time
from shoal.node.workloads.regression import RegressionWorkload

class InLoss(RegressionWorkload):
    def loss(self, model, batch):
        raise ValueError("a planted\\nmistake")

class Stuck(RegressionWorkload):
    def loss(self, model, batch):
        with open("stuck.fifo", "w") as fifo:
            fifo.write(str(os.getpid()))
        time.sleep(3600)

class Slow(RegressionWorkload):
    def batches(self, assignment):
        for batch in super().batches(assignment):
            if os.path.exists("slow"):
                time.sleep(0.5)
            yield batch

class InBuild(RegressionWorkload):
    def build(self):
        raise ValueError("a planted mistake")
"""

DAEMON = """
import sys, trio
import numpy as np
from shoal.node.training.trainer import Trainer, TrainerSpec
from shoal.node.training.trainer_messages import *

async def main():
    trainer = Trainer(TrainerSpec(workload="faulty:Stuck"))
    async with trio.open_nursery() as nursery:
        await nursery.start(trainer.run)
        share = Assignment(seed=0, round=1, member=0, members=1)
        await trainer.apply(Apply(round=0, fresh=True), np.zeros(trainer.layout.numel, np.float32))
        await trainer.send(Train(round=1, steps=1, assignment=share))

trio.run(main)
"""


def zeros(trainer: Trainer) -> np.ndarray:
    """An anchor."""
    return np.zeros(trainer.layout.numel, np.float32)


def kill(trainer: Trainer, number: int = signal.SIGKILL) -> int:
    pid = trainer.pid
    assert pid is not None
    os.kill(pid, number)
    return pid


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainerSpec:
    path = tmp_path / "fake_trainer.py"
    path.write_text(FAKE)
    monkeypatch.setattr(trainer_module, "PROGRAM", (str(path),))
    monkeypatch.setattr(child_process, "RESTART_PAUSE_S", 0.0)
    return TrainerSpec(workload="fake")


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainers of this test need not import torch."""
    monkeypatch.setattr(trainer_module, "PROGRAM", copied_trainer())


def expected_contribution(steps: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Return anchor, base − local and the anchor's loss, computed in this process by one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    replica = Replica(RegressionWorkload(), seed=3, inner=InnerSettings(), device=torch.device("cpu"))
    anchor = np.zeros(replica.layout.numel, dtype=np.float32)
    out = np.zeros_like(anchor)
    replica.write_initial(anchor)
    replica.apply(anchor)
    replica.begin(Train(round=1, steps=steps, assignment=SHARE))
    while not isinstance(replica.step(out), Contribution):
        pass
    value = replica.evaluate()
    torch.set_num_threads(threads)
    return anchor, out, value


@pytest.mark.usefixtures("copied")
async def test_trainer_lives_a_round_is_killed_and_lives_it_again() -> None:
    """Genesis, training, evaluation, kill -9 in mid-stretch, and the same contribution to the bit after it."""
    anchor, contribution, value = expected_contribution(steps=5)
    async with running(TrainerSpec(workload="regression", seed=3, device="cpu")) as trainer:
        assert (trainer.started.metric, trainer.started.device) == ("mean squared error", "cpu")
        await trainer.send(WriteInitial())
        await expect(trainer, Initial)
        np.testing.assert_array_equal(trainer.contribution, anchor)
        await trainer.apply(Apply(round=0, fresh=True), trainer.contribution.copy())
        await expect(trainer, Applied)
        await trainer.send(Train(round=1, steps=5, assignment=SHARE))
        first = await expect(trainer, Contribution)
        assert (first.number, first.round, first.steps, first.tokens) == (1, 1, 5, 160)
        np.testing.assert_array_equal(trainer.contribution, contribution)
        await trainer.send(Evaluate(round=0))
        assert (await expect(trainer, Evaluated)).value == value

        await trainer.send(Train(round=1, steps=10**12, assignment=SHARE, contribute=False))
        await trainer.events.receive()  # a Progress: it is in the middle of it
        kill(trainer)
        restarted = await expect(trainer, Restarted)
        assert restarted.round == 0
        assert "SIGKILL" in restarted.cause
        trainer.contribution[:] = 0
        await trainer.send(Train(round=1, steps=5, assignment=SHARE))
        assert (await expect(trainer, Contribution)).number == 2
        np.testing.assert_array_equal(trainer.contribution, contribution)

        await trainer.send(Pause())
        await trainer.send(Train(round=1, steps=3, assignment=SHARE, contribute=False))
        await trainer.send(Evaluate(round=0))
        await expect(trainer, Evaluated)  # and no Trained before it: it is paused
        await trainer.send(Resume())
        await expect(trainer, Trained)
        await trainer.apply(Apply(round=1, taken=2), anchor + np.float32(1))
        await expect(trainer, Applied)
        await trainer.send(Train(round=2, steps=1, assignment=SHARE))
        assert (await expect(trainer, Contribution)).tokens == 4 * 32


@pytest.mark.usefixtures("copied")
async def test_a_contribution_that_was_read_is_given_back_and_the_anchor_lent_again_to_a_restarted_trainer() -> None:
    _, contribution, _ = expected_contribution(steps=5)
    async with running(TrainerSpec(workload="regression", seed=3, device="cpu")) as trainer:
        await trainer.send(WriteInitial())
        await expect(trainer, Initial)
        anchor = trainer.contribution.copy()
        await trainer.give_back_contribution()
        assert not trainer.contribution.any()
        await trainer.apply(Apply(round=0, fresh=True), anchor)
        await expect(trainer, Applied)
        kill(trainer)
        await expect(trainer, Restarted)
        await trainer.send(Train(round=1, steps=5, assignment=SHARE))
        await expect(trainer, Contribution)
        np.testing.assert_array_equal(trainer.contribution, contribution)


async def test_the_memory_of_an_anchor_is_nobody_elses_until_a_later_one_was_applied(
    fake: TrainerSpec, tmp_path: Path
) -> None:
    """States are in memory that is used again once nobody refers to it: the trainer does, also while it is stopped."""
    vectors = VectorPool(4, partial(file_memory, tmp_path))

    def place_of_a_new_one() -> int:
        return int(vectors.take(4).ctypes.data)

    async with running(fake) as trainer:
        places = []
        for round in range(2):
            anchor = vectors.take(4)
            places.append(anchor.ctypes.data)
            if round:
                kill(trainer, signal.SIGSTOP)
            await trainer.apply(Apply(round=round), anchor)
            del anchor
            if not round:
                await expect(trainer, Applied)
        assert place_of_a_new_one() not in places
        kill(trainer, signal.SIGCONT)
        await expect(trainer, Applied)
        assert place_of_a_new_one() == places[0]


@pytest.mark.usefixtures("copied")
async def test_restarted_trainer_goes_on_from_its_snapshot_unless_it_is_damaged(tmp_path: Path) -> None:
    """kill -9 in the second round: the same second contribution as without; and again, with the file damaged."""
    expected = second_contributions(steps=5)
    path = tmp_path / "1.trainer"
    second = Assignment(seed=3, round=2, member=0, members=1)
    async with running(TrainerSpec(workload="regression", seed=3, device="cpu")) as trainer:
        await trainer.send(WriteInitial())
        await expect(trainer, Initial)
        anchor = trainer.contribution.copy()
        await trainer.apply(Apply(round=0, fresh=True), anchor)
        await expect(trainer, Applied)
        await trainer.send(Train(round=1, steps=5, assignment=SHARE))
        await expect(trainer, Contribution)
        await trainer.send(Snapshot(round=1, path=str(path)))
        written = await expect(trainer, Snapshotted)
        assert (written.round, written.failure, written.size_bytes) == (1, "", path.stat().st_size)
        await trainer.apply(Apply(round=1, taken=1), anchor - trainer.contribution)
        await expect(trainer, Applied)

        for damaged, refused in ((False, ""), (True, f"{path} is damaged")):
            if damaged:
                path.write_bytes(path.read_bytes()[:-1])
            await trainer.send(Train(round=2, steps=10**12, assignment=second, contribute=False))
            await trainer.events.receive()  # a Progress: it is in the middle of it
            kill(trainer)
            restored = await expect(trainer, Restored)
            assert (restored.round, restored.exact) == (1, True)
            assert restored.refused.startswith(refused)
            assert bool(restored.refused) == damaged
            await expect(trainer, Restarted)
            await trainer.send(Train(round=2, steps=5, assignment=second))
            await expect(trainer, Contribution)
            np.testing.assert_array_equal(trainer.contribution, expected[damaged])


async def amid_its_round(trainer: ToldTrainer) -> np.ndarray:
    """The anchor on which it makes steps without end."""
    await trainer.send(WriteInitial())
    await expect(trainer, Initial)
    anchor = trainer.contribution.copy()
    await trainer.apply(Apply(round=0, fresh=True), anchor)
    await expect(trainer, Applied)
    await trainer.send(Train(round=1, steps=10**12, assignment=SHARE, contribute=False))
    await trainer.events.receive()  # a Progress: it is in the middle of it
    return anchor


@pytest.mark.usefixtures("copied")
async def test_restarted_trainer_goes_on_from_the_midst_of_its_round_unless_that_was_contributed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "midway"
    order = Snapshot(round=0, path=str(path), base=b"anchor")
    async with running(TrainerSpec(workload="regression", seed=3, device="cpu")) as trainer:
        anchor = await amid_its_round(trainer)
        await trainer.send(order)
        written = await expect(trainer, Snapshotted)
        assert (written.midway, written.failure, written.size_bytes) == (True, "", path.stat().st_size)
        await trainer.apply(Apply(round=1), anchor + np.float32(1))  # its node was late for round 1
        await expect(trainer, Applied)
        kill(trainer)
        restored = await expect(trainer, Restored)
        assert (restored.round, restored.exact, restored.refused) == (0, True, "")
        assert restored.tokens > 0
        await expect(trainer, Restarted)
        await trainer.send(Train(round=2, steps=1, assignment=SHARE))
        contribution = await expect(trainer, Contribution)
        assert (contribution.tokens, contribution.steps) == (restored.tokens + 32, 1)
        await trainer.send(order)
        written = await expect(trainer, Snapshotted)
        assert (written.midway, written.failure) == (True, "nothing is to be kept now")
        kill(trainer)
        await expect(trainer, Restarted)  # without anything restored
        await trainer.send(Train(round=2, steps=1, assignment=SHARE))
        assert (await expect(trainer, Contribution)).tokens == 32


@pytest.mark.parametrize("abandoned", [False, True])
@pytest.mark.usefixtures("copied")
async def test_an_anchor_that_comes_when_a_restarted_trainer_is_nearly_ready_leaves_it_what_it_goes_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abandoned: bool
) -> None:
    """Unless that stands on a state which is abandoned meanwhile."""
    async with running(TrainerSpec(workload="regression", seed=3, device="cpu")) as trainer:
        anchor = await amid_its_round(trainer)
        await trainer.send(Snapshot(round=0, path=str(tmp_path / "midway"), base=b"anchor"))
        await expect(trainer, Snapshotted)
        stand, others = trainer._stand_on_anchor, [Apply(round=1, fresh=abandoned), Apply(round=2)]

        async def stand_and_apply(child: Connection[Report], lent: Any) -> None:
            await stand(child, lent)
            if lent.order.round == 0:
                for order in others:
                    await trainer.apply(order, anchor + np.float32(order.round))

        monkeypatch.setattr(trainer, "_stand_on_anchor", stand_and_apply)
        kill(trainer)
        restored = await expect(trainer, Restored)
        assert restored.tokens > 0
        assert (await expect(trainer, Restarted)).round == 2
        await trainer.send(Train(round=3, steps=1, assignment=SHARE))
        assert (await expect(trainer, Contribution)).tokens == 32 + (0 if abandoned else restored.tokens)


@pytest.mark.usefixtures("copied")
async def test_a_state_that_is_gone_back_to_while_a_new_trainer_restores_is_all_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(TrainerSpec(workload="regression", seed=3, device="cpu")) as trainer:
        anchor = await amid_its_round(trainer)
        await trainer.send(Snapshot(round=0, path=str(tmp_path / "midway"), base=b"anchor"))
        await expect(trainer, Snapshotted)
        send = Connection.send

        async def told(child: Connection[Report], command: Command, *, lent: int | None = None) -> None:
            await send(child, command, lent=lent)
            if isinstance(command, Restore):
                await trainer.apply(Apply(round=2, fresh=True), anchor)

        monkeypatch.setattr(Connection, "send", told)
        kill(trainer)
        assert (await expect(trainer, Restored)).tokens > 0
        assert (await expect(trainer, Restarted)).round == 2
        await trainer.send(Train(round=3, steps=1, assignment=SHARE))
        assert (await expect(trainer, Contribution)).tokens == 32
        assert np.abs(trainer.contribution).max() < 10 * InnerSettings().lr, "of one step, and not of thousands"


async def test_what_a_restart_gave_for_its_moments_alone_is_so_given_to_the_next_trainer(fake: TrainerSpec) -> None:
    """It is of the same round in a history that was given up."""
    async with running(fake) as trainer:
        await trainer.send(Restore(path="1.trainer", round=1, exact=False))
        await expect(trainer, Restored)
        await trainer.apply(Apply(round=1), zeros(trainer))
        await expect(trainer, Applied)
        kill(trainer)
        restored = await expect(trainer, Restored)
        assert (restored.path, restored.exact) == ("1.trainer", False)


async def test_what_a_trainer_took_over_before_its_first_anchor_the_next_takes_over(
    fake: TrainerSpec, tmp_path: Path
) -> None:
    """Whether it was told to restore the one thing or the other, and what of that may have been counted already."""
    heard = tmp_path / "heard"
    order = Restore(path="1.trainer", round=1, exact=True, spent=True)
    async with running(replace(fake, options={"heard": str(heard)})) as trainer:
        await trainer.send(order)
        await expect(trainer, Restored)
        kill(trainer)
        await expect(trainer, Restored)
        assert (await expect(trainer, Restarted)).round is None
        await trainer.apply(Apply(round=1), zeros(trainer))
        await expect(trainer, Applied)
        kill(trainer)
        await expect(trainer, Restored)
        await expect(trainer, Restarted)
        assert heard.read_text().count(f"{order}\n") == 3


@pytest.mark.usefixtures("copied")
async def test_work_amid_a_round_counts_once_where_the_trainer_dies_between_taking_it_over_and_its_first_anchor(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "midway")
    async with running(TrainerSpec(workload="regression", seed=3, device="cpu")) as trainer:
        anchor = await amid_its_round(trainer)
        await trainer.send(Snapshot(round=0, path=path, base=b"anchor"))
        await expect(trainer, Snapshotted)
    async with running(TrainerSpec(workload="regression", seed=3, device="cpu")) as trainer:  # of a daemon's next life
        await trainer.send(Restore(path=path, round=0, exact=True, midway=True))
        tokens = (await expect(trainer, Restored)).tokens
        assert tokens > 0
        kill(trainer)
        assert (await expect(trainer, Restored)).tokens == tokens
        await expect(trainer, Restarted)
        await trainer.apply(Apply(round=0), anchor)
        await expect(trainer, Applied)
        for round, counted in ((1, tokens + 32), (2, 32)):
            await trainer.send(Train(round=round, order=round, steps=1, assignment=SHARE))
            contribution = await expect(trainer, Contribution)
            assert contribution.tokens == counted
            await trainer.apply(Apply(round=round, taken=contribution.number), anchor)
            await expect(trainer, Applied)


async def test_work_amid_a_round_is_kept_after_going_back_behind_what_was_contributed(fake: TrainerSpec) -> None:
    async with running(fake) as trainer:
        await trainer.apply(Apply(round=5), zeros(trainer))
        await expect(trainer, Applied)
        await trainer.send(Train(round=6, steps=1, assignment=SHARE))
        await expect(trainer, Contribution)
        await trainer.apply(Apply(round=3, taken=1, fresh=True), zeros(trainer))
        await expect(trainer, Applied)
        await trainer.send(Snapshot(round=3, path="midway", base=b"3"))
        await expect(trainer, Snapshotted)
        kill(trainer)
        restored = await expect(trainer, Restored)
        assert (restored.path, restored.round, restored.exact) == ("midway", 3, True)


async def test_a_snapshot_that_was_under_way_when_the_swarm_went_back_is_given_to_nobody(
    fake: TrainerSpec, tmp_path: Path
) -> None:
    heard, stuck = tmp_path / "heard", tmp_path / "heard.stuck"
    async with running(replace(fake, options={"heard": str(heard)})) as trainer:
        stuck.touch()
        await trainer.apply(Apply(round=5), zeros(trainer))
        await trainer.send(Snapshot(round=5, path="midway", base=b"5"))
        await trainer.apply(Apply(round=3, fresh=True), zeros(trainer))
        stuck.unlink()
        await expect(trainer, Applied)
        await expect(trainer, Snapshotted)
        await expect(trainer, Applied)
        kill(trainer)
        assert (await expect(trainer, Restarted)).round == 3  # and not Restored before it


def second_contributions(steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Of round 2 as a trainer makes it that never died, and as one makes it whose moments are gone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = []
    for forgets in (False, True):
        replica = Replica(RegressionWorkload(), seed=3, inner=InnerSettings(), device=torch.device("cpu"))
        anchor = np.zeros(replica.layout.numel, dtype=np.float32)
        replica.write_initial(anchor)
        for round_ in (1, 2):
            if round_ == 2 and forgets:
                replica = Replica(RegressionWorkload(), seed=3, inner=InnerSettings(), device=torch.device("cpu"))
            replica.apply(anchor, fresh=True)
            out = np.zeros_like(anchor)
            share = Assignment(seed=3, round=round_, member=0, members=1)
            replica.begin(Train(round=round_, steps=steps, assignment=share))
            while not isinstance(replica.step(out), Contribution):
                pass
            anchor -= out
        found.append(out)
    torch.set_num_threads(threads)
    assert not np.array_equal(found[0], found[1])
    return found[0], found[1]


@pytest.mark.usefixtures("copied")
async def test_raising_workload_ends_training_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Side by side: raising in build(), in loss(), and a batch too small; of frames only the user's own are told."""
    monkeypatch.chdir(tmp_path)

    def told(method: str) -> str:
        line = 1 + next(n for n, text in enumerate(FAULTY.splitlines()) if f"def {method}" in text)
        place = f"{tmp_path / 'faulty.py'}, line {line + 1}"
        return (
            f"ValueError: a planted mistake at {place}; correct it, and start this node again: it goes on where it was"
        )

    def frames_of(traceback: str) -> list[str]:
        return re.findall(r"^  File .* in (\w+)$", traceback, re.MULTILINE)

    (tmp_path / "faulty.py").write_text(FAULTY)

    async def in_build() -> None:
        with pytest.raises(WorkloadError) as caught:
            await Trainer(TrainerSpec(workload="faulty:InBuild")).run()
        assert str(caught.value) == told("build")
        assert frames_of(caught.value.traceback) == ["build"]

    async def in_loss() -> None:
        async with running(TrainerSpec(workload="faulty:InLoss")) as trainer:
            await trainer.apply(Apply(round=0, fresh=True), zeros(trainer))
            await expect(trainer, Applied)
            await trainer.send(Train(round=1, steps=1, assignment=SHARE))
            failed = await expect(trainer, TrainerFailed)
            assert failed.summary == told("loss")
            assert frames_of(failed.traceback) == ["loss"]
            with pytest.raises(trio.EndOfChannel):
                await trainer.events.receive()

    async def unsplittable() -> None:
        async with running(TrainerSpec(workload="regression", accumulate=33)) as trainer:
            await trainer.apply(Apply(round=0, fresh=True), zeros(trainer))
            await expect(trainer, Applied)
            await trainer.send(Train(round=1, steps=1, assignment=SHARE))
            failed = await expect(trainer, TrainerFailed)
            assert failed.summary.startswith("--accumulate 33: the workload's batches have 32 rows")
            assert failed.traceback == ""

    async with trio.open_nursery() as nursery:
        nursery.start_soon(in_build)
        nursery.start_soon(in_loss)
        nursery.start_soon(unsplittable)


def test_trainer_ends_with_its_daemon_even_in_the_middle_of_a_step(tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    fifo = tmp_path / "stuck.fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)  # so that a daemon that fails cannot block the test
    with subprocess.Popen([sys.executable, "-c", DAEMON], cwd=tmp_path) as daemon:
        try:
            assert select.select([reader], [], [], DEADLINE_S)[0], "the trainer never made a step"
            watched = os.pidfd_open(int(os.read(reader, 20)))
        finally:
            daemon.kill()
            os.close(reader)
        try:
            daemon.wait()
            assert select.select([watched], [], [], DEADLINE_S)[0], "the trainer is an orphan"
        finally:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(watched, signal.SIGKILL)
            os.close(watched)


async def test_cancelled_trainer_is_reaped(fake: TrainerSpec) -> None:
    async with running(fake) as trainer:
        pid = trainer.pid
        assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_stopped_trainer_is_killed_on_cancel(fake: TrainerSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "STOP_DEADLINE_S", 0.1)
    async with running(fake) as trainer:
        pid = kill(trainer, signal.SIGSTOP)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_hung_trainer_is_replaced(fake: TrainerSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "PING_PERIOD_S", 0.05)
    monkeypatch.setattr(trainer_module, "STALL_DEADLINE_S", 2.0)
    monkeypatch.setattr(trainer_module, "STOP_DEADLINE_S", 0.1)
    async with running(fake) as trainer:
        kill(trainer, signal.SIGSTOP)
        assert "hung" in (await expect(trainer, Restarted)).cause
        monkeypatch.setattr(trainer_module, "STALL_DEADLINE_S", 600.0)  # the next may be as slow as it likes
        await trainer.send(Train(round=1, steps=1, assignment=SHARE))
        await expect(trainer, Contribution)


async def test_trainer_that_hangs_again_and_again_is_given_up(
    fake: TrainerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though from one death to the next it is longer than deaths are counted for: it did nothing meanwhile."""
    monkeypatch.setattr(trainer_module, "PING_PERIOD_S", 0.05)
    monkeypatch.setattr(trainer_module, "STALL_DEADLINE_S", 4.0)
    monkeypatch.setattr(trainer_module, "STOP_DEADLINE_S", 0.1)
    monkeypatch.setattr(child_process, "RESTART_WINDOW_S", 4.0)
    monkeypatch.setattr(child_process, "RESTART_LIMIT", 1)
    async with running(fake) as trainer:
        kill(trainer, signal.SIGSTOP)
        await expect(trainer, Restarted)
        kill(trainer, signal.SIGSTOP)
        failed = await expect(trainer, TrainerFailed)
        assert failed.summary == (
            "the trainer died 2 times within 4 s of work; last: hung: no answer for 4 s, and a step or an evaluation "
            "must take less"
        )


def contribution(**told: float) -> Contribution:
    """A trainer's first, which says something else where it is told so."""
    values = {"number": 1, "round": 1, "tokens": 1, "steps": 1, "loss": 0.0, "seconds": 1.0, "tokens_per_s": 1.0}
    return Contribution(**{**values, **told})  # type: ignore[arg-type]


async def test_contribution_to_another_round_than_was_ordered_ends_the_trainer_alone(
    fake: TrainerSpec, tmp_path: Path
) -> None:
    (tmp_path / "heard.lie").write_text(frame_of(contribution(number=2, round=7)).hex())
    async with running(replace(fake, options={"heard": str(tmp_path / "heard")})) as trainer:
        await trainer.send(Train(round=1, steps=1, assignment=SHARE))
        await expect(trainer, Contribution)
        await trainer.send(Evaluate(round=0))
        cause = (await expect(trainer, Restarted)).cause
        assert cause == "broke the protocol: a contribution to round 7 came for one to round 1"


@pytest.mark.parametrize(
    ("lie", "told"),
    [
        (frame_of(Applied(round=1)), "applied an anchor that it was not given"),
        (b"\0\0\0\1\x01", "not a report"),
        (frame_of(contribution(number=0)), "contribution 0 came after contribution 0"),
        (frame_of(contribution(tokens=-1)), "Expected `int` >= 0 - at `$.tokens`"),
        (frame_of(contribution(round=-1)), "Expected `int` >= 0 - at `$.round`"),
        (frame_of(contribution(seconds=math.nan)), "at `$.seconds`"),
        (frame_of(contribution(tokens_per_s=math.inf)), "at `$.tokens_per_s`"),
        (b"\xff\xff\xff\xff", "control frame of 4294967295 bytes"),
    ],
)
async def test_trainer_that_talks_nonsense_ends_itself_alone(
    fake: TrainerSpec, tmp_path: Path, lie: bytes, told: str
) -> None:
    (tmp_path / "heard.lie").write_text(lie.hex())
    async with running(replace(fake, options={"heard": str(tmp_path / "heard")})) as trainer:
        await trainer.send(Evaluate(round=0))
        cause = (await expect(trainer, Restarted)).cause
        assert cause.startswith("broke the protocol: ")
        assert told in cause
        await trainer.send(Train(round=1, steps=1, assignment=SHARE))
        await expect(trainer, Contribution)


@pytest.mark.usefixtures("copied")
async def test_trainer_that_skips_what_it_had_drawn_before_its_restart_is_not_taken_for_hung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "faulty.py").write_text(FAULTY)
    async with running(TrainerSpec(workload="faulty:Slow", seed=3, device="cpu")) as trainer:
        await trainer.send(WriteInitial())
        await expect(trainer, Initial)
        await trainer.apply(Apply(round=0), trainer.contribution.copy())
        await expect(trainer, Applied)
        await trainer.send(Train(round=1, steps=10, assignment=SHARE, contribute=False))
        await expect(trainer, Trained)
        await trainer.send(Snapshot(round=0, path=str(tmp_path / "midway"), base=b"anchor"))
        await expect(trainer, Snapshotted)
        (tmp_path / "slow").touch()
        kill(trainer)
        await expect(trainer, Restored)
        await expect(trainer, Restarted)
        monkeypatch.setattr(trainer_module, "PING_PERIOD_S", 0.05)
        monkeypatch.setattr(trainer_module, "STALL_DEADLINE_S", 3.0)
        await trainer.send(Train(round=1, steps=11, assignment=SHARE))
        assert (await expect(trainer, Contribution)).tokens == 11 * 32


async def test_trainer_that_hangs_over_the_initial_parameters_is_replaced_soon_and_the_next_owes_them(
    fake: TrainerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "PING_PERIOD_S", 0.05)
    monkeypatch.setattr(trainer_module, "INITIAL_DEADLINE_S", 2.0)
    monkeypatch.setattr(trainer_module, "STOP_DEADLINE_S", 0.1)
    async with running(replace(fake, options={"fuse": str(tmp_path / "none")})) as trainer:
        kill(trainer, signal.SIGSTOP)
        await trainer.send(WriteInitial())
        with trio.fail_after(60.0):
            assert (await expect(trainer, Restarted)).cause.startswith("hung: no answer for 2 s, and a step ")
        await expect(trainer, Initial)


async def test_numbers_rise_across_restarts(fake: TrainerSpec) -> None:
    async with running(fake) as trainer:
        numbers = []
        for _ in range(3):
            await trainer.send(Train(round=1, steps=1, assignment=SHARE))
            numbers.append((await expect(trainer, Contribution)).number)
            kill(trainer)
            await expect(trainer, Restarted)
        assert numbers == [1, 2, 3]


async def test_initial_parameters_that_a_trainer_died_of_are_owed_by_the_next(
    fake: TrainerSpec, tmp_path: Path
) -> None:
    fuse = tmp_path / "fuse"
    fuse.touch()
    async with running(replace(fake, options={"fuse": str(fuse)})) as trainer:
        await trainer.send(WriteInitial())
        await expect(trainer, Restarted)
        await expect(trainer, Initial)
        kill(trainer)
        await expect(trainer, Restarted)
        await trainer.send(Train(round=1, steps=1, assignment=SHARE))
        await expect(trainer, Contribution)  # and nothing before it: they are not owed a second time


async def test_apply_sent_while_the_trainer_is_down_is_remembered(fake: TrainerSpec) -> None:
    async with running(fake) as trainer:
        kill(trainer)
        while trainer.pid is not None:
            await trio.lowlevel.checkpoint()
        await trainer.apply(Apply(round=7), zeros(trainer))
        await trainer.send(Train(round=8, steps=1, assignment=SHARE))  # forgotten
        assert (await expect(trainer, Restarted)).round == 7
        await trainer.send(Train(round=9, steps=1, assignment=SHARE))
        assert (await expect(trainer, Contribution)).round == 9


async def test_no_anchor_waits_in_the_daemon_for_a_step_to_end_and_those_that_come_meanwhile_become_one(
    fake: TrainerSpec, tmp_path: Path
) -> None:
    heard, stuck = tmp_path / "heard", tmp_path / "heard.stuck"
    settings = Retune(inner=InnerSettings(lr=0.5), sync=SyncSettings())
    async with running(replace(fake, options={"heard": str(heard)})) as trainer:
        stuck.touch()
        with trio.fail_after(5.0):
            await trainer.apply(Apply(round=1), zeros(trainer))
            await trainer.send(Train(round=2, order=1, steps=1, assignment=SHARE))
            await trainer.apply(Apply(round=2, taken=1, fresh=True), zeros(trainer))
            await trainer.send(Evaluate(round=2))
            await trainer.send(settings)
            await trainer.send(Snapshot(round=2, path="snapshot", base=b"2"))
            await trainer.apply(Apply(round=3), zeros(trainer))
            await trainer.send(Train(round=4, order=2, steps=1, assignment=SHARE))
            await trainer.send(Pause())
        unwritten = await expect(trainer, Snapshotted)
        assert (unwritten.path, unwritten.midway, unwritten.failure) == (
            "snapshot",
            True,
            "another anchor came before it",
        )
        stuck.unlink()
        for round in (1, 3):
            assert (await expect(trainer, Applied)).round == round
            assert (await expect(trainer, Contribution)).round == round + 1
        orders = heard.read_text().splitlines()
        assert orders[2:] == [
            str(one)
            for one in (
                Apply(round=1),
                Train(round=2, order=1, steps=1, assignment=SHARE),
                Pause(),
                settings,
                Apply(round=3, taken=1, fresh=True),
                Train(round=4, order=2, steps=1, assignment=SHARE),
            )
        ]
        stuck.touch()
        await trainer.apply(Apply(round=4), zeros(trainer))
        await trainer.apply(Apply(round=5), zeros(trainer))
        kill(trainer)
        stuck.unlink()
        assert (await expect(trainer, Restarted)).round == 5, "what waited goes with the trainer, but for the newest"
        await trainer.send(Train(round=6, steps=1, assignment=SHARE))
        assert (await expect(trainer, Contribution)).round == 6


async def test_an_anchor_that_comes_when_a_restarted_trainer_is_nearly_ready_is_not_passed_over(
    fake: TrainerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has loaded the anchor before, and is being told of amended settings."""
    applied: list[int] = []
    async with running(fake) as trainer:
        await trainer.apply(Apply(round=3), zeros(trainer))
        await expect(trainer, Applied)
        stand, send = trainer._stand_on_anchor, Connection.send

        async def stand_and_retune(child: Connection[Report], lent: Any) -> None:
            await stand(child, lent)
            if len(applied) == 1:
                await trainer.send(Retune(inner=InnerSettings(lr=0.5), sync=SyncSettings()))

        async def told(child: Connection[Report], command: Command, *, lent: int | None = None) -> None:
            await send(child, command, lent=lent)
            if isinstance(command, Apply):
                applied.append(command.round)
            elif isinstance(command, Retune):
                await trainer.apply(Apply(round=4), zeros(trainer))

        monkeypatch.setattr(trainer, "_stand_on_anchor", stand_and_retune)
        monkeypatch.setattr(Connection, "send", told)
        kill(trainer)
        assert (await expect(trainer, Restarted)).round == 4
        assert applied == [3, 4]


async def test_restarted_trainer_applies_its_anchor_by_the_settings_of_then_and_goes_on_by_those_of_now(
    fake: TrainerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told by the fake: the learning rate that it had when it applied its anchor, and the one that it has."""

    def rate(lr: float) -> Retune:
        return Retune(inner=InnerSettings(lr=lr), sync=SyncSettings())

    async def rates(trainer: ToldTrainer) -> tuple[float, float]:
        await trainer.send(Train(round=1, steps=1, assignment=SHARE))
        told = await expect(trainer, Contribution)
        return told.seconds, told.loss

    async def dies(trainer: ToldTrainer) -> None:
        kill(trainer)
        while trainer.pid is not None:
            await trio.lowlevel.checkpoint()

    async with running(replace(fake, inner=InnerSettings(lr=0.1))) as trainer:
        await trainer.send(rate(0.2))
        await trainer.apply(Apply(round=3), zeros(trainer))
        await expect(trainer, Applied)
        await trainer.send(rate(0.3))
        assert await rates(trainer) == (0.2, 0.3)
        await dies(trainer)
        await expect(trainer, Restarted)
        assert await rates(trainer) == (0.2, 0.3)
        await trainer.apply(Apply(round=4), zeros(trainer))
        await expect(trainer, Applied)
        await dies(trainer)
        await trainer.send(rate(0.4))
        await expect(trainer, Restarted)
        assert await rates(trainer) == (0.3, 0.4)

        stand = trainer._stand_on_anchor

        async def stand_and_retune(child: Connection[Report], lent: Any) -> None:
            await stand(child, lent)
            await trainer.send(rate(0.5))  # while there is nobody yet to take it

        monkeypatch.setattr(trainer, "_stand_on_anchor", stand_and_retune)
        await dies(trainer)
        await expect(trainer, Restarted)
        assert await rates(trainer) == (0.3, 0.5)


async def test_a_restarted_trainer_is_paused_where_the_one_before_it_was(
    fake: TrainerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told by the fake: whether it is paused. Or it would take the accelerator again that its user wanted free."""
    monkeypatch.setattr(child_process, "RESTART_LIMIT", 9)

    async def is_paused(trainer: ToldTrainer) -> bool:
        await trainer.send(Train(round=1, steps=1, assignment=SHARE))
        return bool((await expect(trainer, Contribution)).blocked_s)

    async def dies(trainer: ToldTrainer, *orders: Command) -> None:
        kill(trainer)
        while trainer.pid is not None:
            await trio.lowlevel.checkpoint()
        for order in orders:
            await trainer.send(order)
        await expect(trainer, Restarted)

    async with running(fake) as trainer:
        await trainer.apply(Apply(round=0), zeros(trainer))
        await expect(trainer, Applied)
        await trainer.send(Pause())
        await dies(trainer)
        assert await is_paused(trainer)
        await dies(trainer, Resume())
        assert not await is_paused(trainer)
        await dies(trainer, Pause())
        assert await is_paused(trainer)

        stand = trainer._stand_on_anchor

        async def stand_and_resume(child: Connection[Report], lent: Any) -> None:
            await stand(child, lent)
            await trainer.send(Resume())  # while there is nobody yet to take it

        monkeypatch.setattr(trainer, "_stand_on_anchor", stand_and_resume)
        await dies(trainer)
        assert not await is_paused(trainer)


async def test_trainer_that_dies_too_often_is_given_up(fake: TrainerSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "RESTART_LIMIT", 2)
    async with running(fake) as trainer:
        for _ in range(2):
            kill(trainer)
            await expect(trainer, Restarted)
        kill(trainer)
        failed = await expect(trainer, TrainerFailed)
        assert "died 3 times" in failed.summary
        assert "SIGKILL" in failed.summary


async def test_trainer_that_never_starts_is_given_up(fake: TrainerSpec) -> None:
    with pytest.raises(WorkloadError, match=r"died 4 times.*exited with status 9"):
        await Trainer(TrainerSpec(workload="fake", options={"die_early": True})).run()


async def test_model_of_another_shape_after_a_restart_is_refused(fake: TrainerSpec) -> None:
    async with running(TrainerSpec(workload="fake", options={"grow": True})) as trainer:
        await trainer.send(Train(round=1, steps=1, assignment=SHARE))
        await expect(trainer, Contribution)
        kill(trainer)
        assert "another shape" in (await expect(trainer, TrainerFailed)).summary


async def test_output_goes_to_the_logger(fake: TrainerSpec, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="shoal.trainer"):
        async with running(fake):
            pass
    assert caplog.messages == ["fake trainer begins"]


def test_a_contribution_is_seen_by_both_and_what_is_written_to_a_lent_anchor_by_nobody_else(tmp_path: Path) -> None:
    memory = open_memory()
    ours = create(memory, 5000)
    attach(memory, 5000)[:] = -np.arange(5000)
    os.close(memory)
    assert ours[4999] == -4999
    in_file = np.frombuffer(file_memory(tmp_path, 4 * 5000), np.float32)
    for anchor in (in_file, np.zeros(5000, np.float32), in_file[1000:]):
        anchor[:] = np.arange(anchor.size)
        descriptor = lend(anchor)
        theirs = map_lent(descriptor, anchor.size)
        np.testing.assert_array_equal(theirs, anchor)
        theirs[0] = 1
        assert anchor[0] == 0
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.close(descriptor)  # it is closed


def test_who_is_lent_a_file_cannot_cut_it_short(tmp_path: Path) -> None:
    descriptor = lend(np.frombuffer(file_memory(tmp_path, 4 * 5000), np.float32))
    with pytest.raises(OSError, match="Invalid argument"):
        os.ftruncate(descriptor, 0)
    os.close(descriptor)


def test_pages_of_an_anchor_that_lies_in_a_file_are_those_of_both(tmp_path: Path) -> None:
    anchor = np.frombuffer(file_memory(tmp_path, 4 * 5000), np.float32)
    theirs = map_lent(lend(anchor), 5000)
    anchor[:] = np.arange(5000)
    np.testing.assert_array_equal(theirs, anchor)


def test_framing_yields_whole_frames_from_any_pieces() -> None:
    messages: list[Command] = [Pause(), Train(round=1, steps=2, assignment=SHARE), Stop()]
    stream = b"".join(frame_of(message) for message in messages)
    framing = Framing()
    frames = [frame for byte in stream for frame in framing.feed(bytes([byte]))]
    assert [unpack_command(frame) for frame in frames] == messages


def test_framing_refuses_what_is_too_long_or_no_message() -> None:
    with pytest.raises(LocalError, match="over"):
        list(Framing().feed((FRAME_LIMIT_BYTES + 1).to_bytes(4, "big")))
    with pytest.raises(LocalError, match="not a report"):
        unpack_report(frame_of(Pause())[4:])
