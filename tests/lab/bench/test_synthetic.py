"""The synthetic workload: what it takes, that anyone can draw it again, and that it waits at a gate."""

from __future__ import annotations

import fcntl
import threading
import time
from pathlib import Path

import numpy as np
import torch

from shoal.lab.bench.synthetic import WORKLOAD_NAME, SyntheticWorkload, drawn_values
from shoal.node.training.trainer_messages import Assignment
from shoal.node.workload import load_workload

NUMEL = 5000
DEADLINE_S = 60.0


def assignment(round: int) -> Assignment:
    return Assignment(seed=1, round=round, member=0, members=2)


def test_drawn_values_are_each_members_own_and_always_the_same() -> None:
    draws = [drawn_values(seed, NUMEL) for seed in (1, 1, 2)]
    assert np.array_equal(draws[0], draws[1])
    assert not np.array_equal(draws[0], draws[2])
    assert draws[0][0] == 0
    assert -0.5 <= draws[0].min() < -0.49
    assert 0.49 < draws[0].max() < 0.5


def test_a_round_takes_what_was_drawn_and_only_once() -> None:
    workload = load_workload(WORKLOAD_NAME, {"numel": NUMEL}, None)
    model = workload.build()
    assert sum(value.numel() for value in model.parameters()) == NUMEL
    batches = workload.batches(assignment(7))
    for _ in range(2):
        loss, tokens = workload.loss(model, next(batches))
        loss.backward()  # type: ignore[no-untyped-call]
        assert (float(loss.detach()), tokens) == (0.0, 1)
    idle = model.get_parameter("idle")
    assert idle.grad is not None
    assert torch.equal(idle.grad, torch.zeros(1))
    taken = -model.get_parameter("vector").detach().numpy()
    assert np.array_equal(taken, drawn_values(assignment(7).stream_seed, NUMEL)[1:])


def waits_for(path: Path) -> bool:
    """Whether the kernel has somebody waiting for a lock of this file."""
    inode = f":{path.stat().st_ino} "
    return any(" -> " in line and inode in line for line in Path("/proc/locks").read_text().splitlines())


def test_a_locked_gate_holds_its_round_and_no_other(tmp_path: Path) -> None:
    gate = tmp_path / "8"
    workload = SyntheticWorkload(numel=NUMEL, data=str(tmp_path))
    passed: list[int] = []

    def draw() -> None:
        passed.append(next(workload.batches(assignment(8))).numel())

    with gate.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert next(workload.batches(assignment(7))).numel() == NUMEL
        thread = threading.Thread(target=draw)
        thread.start()
        ends_at = time.monotonic() + DEADLINE_S
        while not waits_for(gate):
            assert time.monotonic() < ends_at
            time.sleep(0.002)
        assert passed == []
    thread.join(DEADLINE_S)
    assert passed == [NUMEL]
