"""The second part of `shoal bench join`: what donors that train lose by serving.

    python -m shoal.testnet.bench_join_training STATE_MB DONORS SECONDS

Each donor has an upload cap of CAP_BYTES_PER_S and a trainer beside it, a process of one thread. The trainers' steps
per second while states are fetched, one after the other, are compared with those of the same trainers before and after.
The joiner is a machine of its own elsewhere in a swarm, so here it runs at the lowest priority: it takes what the
donors' machine would not have to give. `served_mb_per_s` tells whether the caps were used up all the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec
import trio

from shoal.protocol.errors import NetworkError
from shoal.testnet.bench_join_joiner import DEADLINE_S, JoinBench, bare_errors, child_process, joining
from shoal.testnet.bench_join_trainer import COUNTER_BYTES

CAP_BYTES_PER_S: Final = 100_000_000
LOWEST_PRIORITY: Final = 19
LOOK_S: Final = 0.1


class TrainingRate(msgspec.Struct, frozen=True, kw_only=True):
    """What part of their undisturbed rate the trainers keep, the MB/s that all donors served meanwhile, and the
    processor time that serving cost a donor.
    """

    ratio: float
    cpu_s_per_gb: float
    served_mb_per_s: float


class _Trainers:
    """The trainers' counters."""

    def __init__(self, counters: list[Path]) -> None:
        self._counters = counters

    def steps(self) -> int:
        """Of all trainers so far."""
        return sum(int.from_bytes(counter.read_bytes(), "little") for counter in self._counters)

    async def until_all_train(self) -> None:
        """Return when every trainer has made a step. Raises trio.TooSlowError."""
        with trio.fail_after(DEADLINE_S):
            while not all(int.from_bytes(counter.read_bytes(), "little") for counter in self._counters):  # noqa: ASYNC110
                await trio.sleep(LOOK_S)

    async def rate(self, seconds: float) -> float:
        """Steps per second over that time."""
        began, steps = time.perf_counter(), self.steps()
        await trio.sleep(seconds)
        return (self.steps() - steps) / (time.perf_counter() - began)


async def _measure_training(bench: JoinBench, folder: Path) -> TrainingRate:
    """The second part, in a process whose priority it may lower."""
    async with joining(bench, folder, cap=CAP_BYTES_PER_S) as joiner:
        with ExitStack() as processes:
            counters = [folder / f"steps{number}" for number in range(bench.donors)]
            for counter in counters:
                counter.write_bytes(bytes(COUNTER_BYTES))
                processes.enter_context(child_process("bench_join_trainer", str(counter)))
            trainers = _Trainers(counters)
            await trainers.until_all_train()
            _yield_to_others()
            await trio.sleep(bench.serving_s / 4)  # the first steps are slow
            before = await trainers.rate(bench.serving_s / 2)
            steps, began, states, cpu = trainers.steps(), time.perf_counter(), 0, joiner.donors_cpu_s()
            while time.perf_counter() - began < bench.serving_s:
                await joiner.join()
                states += 1
            seconds = time.perf_counter() - began
            during = (trainers.steps() - steps) / seconds
            cpu = joiner.donors_cpu_s() - cpu
            after = await trainers.rate(bench.serving_s / 2)
    return TrainingRate(
        ratio=round(2 * during / (before + after), 3),
        cpu_s_per_gb=round(cpu / (states * bench.state_bytes) * 1e9, 3),
        served_mb_per_s=round(states * bench.state_bytes / seconds / 1e6, 1),
    )


def _yield_to_others() -> None:
    """All threads of this process run when nobody else wants to."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, int(thread.name), LOWEST_PRIORITY)


def training_rate(bench: JoinBench) -> TrainingRate:
    """Run the second part. Raises NetworkError if it fails."""
    arguments = [str(bench.state_mb), str(bench.donors), str(bench.serving_s)]
    command = [sys.executable, "-m", "shoal.testnet.bench_join_training", *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=4 * DEADLINE_S, check=False)
    if done.returncode != 0:
        words = done.stderr.decode(errors="replace").strip().splitlines() or ["without a word"]
        raise NetworkError(f"the second part of the benchmark failed: {words[-1]}")
    return msgspec.json.decode(done.stdout, type=TrainingRate)


if __name__ == "__main__":
    with TemporaryDirectory(prefix="shoal-bench-join-") as name, bare_errors():
        wanted = JoinBench(state_mb=int(sys.argv[1]), donors=int(sys.argv[2]), serving_s=float(sys.argv[3]))
        sys.stdout.buffer.write(msgspec.json.encode(trio.run(_measure_training, wanted, Path(name))))
