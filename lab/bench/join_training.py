"""The second part of `shoal bench join`: what donors that train lose by serving.

    python -m shoal.lab.bench.join_training STATE_MB DONORS SECONDS

Every donor has an upload cap of CAP_BYTES_PER_S and a trainer beside it, a process of one thread. Such a pair stands
for a machine of one core, so it is bound to a core of its own, and what serving costs comes off that trainer's steps.
The joiner is another machine elsewhere, so it has a core to itself, too: it neither takes processor time from the
trainers nor lacks any to pull as fast as the caps allow. With C cores there are at most C − 1 donors, fewer than the
first part has where cores are few, and `donors` says how many there were.

Fetches alternate with pauses of the same length in which the donors only train, and each fetch is compared with the two
pauses around it; the result is the median. `wall_ratio` compares the trainers' steps by the clock. It depends on what
else runs on these cores; `ratio` does not, and agrees with it where nothing does. It is made of what serving costs:

    ratio = (1 − the processor time by which a donor serves a second's worth of its cap)
            × (steps per second of the trainers' processor time while fetches go on ÷ in the pauses)

The second factor is what caches and memory have to do with it. `served_mb_per_s` beside `cap_mb_per_s` says whether the
joiner pulled as much as the caps allow; the second factor, and `wall_ratio`, mean nothing where it did not.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

import msgspec
import psutil  # type: ignore[import-untyped]
import trio

from shoal.lab.bench.join_joiner import DEADLINE_S, JoinBench, Joiner, bare_errors, child_process, joining
from shoal.lab.bench.join_trainer import COUNTER_BYTES
from shoal.protocol.errors import ConfigError, NetworkError

CAP_BYTES_PER_S: Final = 100_000_000
STATE_MB_PER_DONOR: Final = 200
"""At most: a fetch takes two seconds under the cap, and a pause no longer."""
WARM_UP_S: Final = 2.0
LOOK_S: Final = 0.1
CPU_TICK_S: Final = 0.01
"""Resolution of the kernel's accounts of processor time."""


class TrainingRate(msgspec.Struct, frozen=True, kw_only=True):
    """Share of their undisturbed rate that the trainers keep.

    Both ratios are medians over all fetches; those of `ratio` are in `ratios`. donors: how many
    trained and served. served_mb_per_s: what the joiner got of them together while it fetched, and cap_mb_per_s: what
    their caps allow. cpu_s_per_gb: the processor time that serving cost a donor.
    """

    ratio: float
    ratios: tuple[float, ...]
    wall_ratio: float
    donors: int
    served_mb_per_s: float
    cap_mb_per_s: float
    cpu_s_per_gb: float


@dataclass(frozen=True, slots=True)
class _Progress:
    """Progress of the trainers: steps, seconds by the clock, and of their processor time."""

    steps: int
    wall_s: float
    cpu_s: float

    def since(self, before: _Progress) -> _Rates:
        """The rates between the two."""
        steps = self.steps - before.steps
        return _Rates(steps / (self.wall_s - before.wall_s), steps / max(self.cpu_s - before.cpu_s, CPU_TICK_S))


class _Rates(NamedTuple):
    """Steps per second by the clock, and per second of processor time."""

    wall: float
    cpu: float


@dataclass(frozen=True, slots=True)
class _Machines:
    """Donors, and the trainers beside them with the files of their counters."""

    donors: list[int]
    trainers: list[int]
    counters: list[Path]

    def progress(self) -> _Progress:
        """Progress of all trainers so far."""
        cpu_s = sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in self.trainers)
        steps = sum(int.from_bytes(counter.read_bytes(), "little") for counter in self.counters)
        return _Progress(steps, time.perf_counter(), cpu_s)

    async def until_all_train(self) -> None:
        """Return when every trainer has made a step. Raises trio.TooSlowError."""
        with trio.fail_after(DEADLINE_S):
            while not all(int.from_bytes(counter.read_bytes(), "little") for counter in self.counters):  # noqa: ASYNC110
                await trio.sleep(LOOK_S)

    async def rates(self, seconds: float) -> _Rates:
        """Measure the rates over that time."""
        before = self.progress()
        await trio.sleep(seconds)
        return self.progress().since(before)


async def _measure_training(bench: JoinBench, folder: Path, cores: list[int]) -> TrainingRate:
    """The second part, in a process whose cores it may choose: the first is the joiner's, each donor has another."""
    async with joining(bench, folder, cap=CAP_BYTES_PER_S) as joiner:
        with ExitStack() as processes:
            bind(os.getpid(), cores[0])
            machines = _Machines([donor.pid for donor in joiner.donors], [], [])
            for donor, core in zip(machines.donors, cores[1:], strict=False):
                counter = folder / f"steps{donor}"
                counter.write_bytes(bytes(COUNTER_BYTES))
                trainer = processes.enter_context(child_process("join_trainer", str(counter)))
                bind(trainer.pid, core)
                bind(donor, core)
                machines.trainers.append(trainer.pid)
                machines.counters.append(counter)
            await machines.until_all_train()
            await trio.sleep(min(WARM_UP_S, bench.serving_s))  # the first steps are slow
            return await _alternate(bench, joiner, machines)


async def _alternate(bench: JoinBench, joiner: Joiner, machines: _Machines) -> TrainingRate:
    """Pause, fetch, pause, fetch, …, pause."""
    expected_s = bench.state_bytes / (bench.donors * CAP_BYTES_PER_S)
    during, seconds, cpu = list[_Rates](), list[float](), 0.0
    joiner.become_newcomer()
    alone = [await machines.rates(expected_s)]
    while sum(seconds) < bench.serving_s:
        before, donors_cpu = machines.progress(), joiner.donors_cpu_s()
        await joiner.fetch()
        after = machines.progress()
        during.append(after.since(before))
        seconds.append(after.wall_s - before.wall_s)
        cpu += joiner.donors_cpu_s() - donors_cpu
        joiner.become_newcomer()
        alone.append(await machines.rates(expected_s))
    around = list(zip(during, alone, alone[1:], strict=False))
    serving = cpu / (len(during) * bench.state_bytes) * CAP_BYTES_PER_S  # seconds of a donor's processor a second
    ratios = [(1 - serving) * 2 * rates.cpu / (earlier.cpu + later.cpu) for rates, earlier, later in around]
    wall_ratios = [2 * rates.wall / (earlier.wall + later.wall) for rates, earlier, later in around]
    fetched_bytes = len(during) * bench.state_bytes
    return TrainingRate(
        ratio=round(statistics.median(ratios), 3),
        ratios=tuple(round(ratio, 3) for ratio in ratios),
        wall_ratio=round(statistics.median(wall_ratios), 3),
        donors=bench.donors,
        served_mb_per_s=round(fetched_bytes / sum(seconds) / 1e6, 1),
        cap_mb_per_s=bench.donors * CAP_BYTES_PER_S / 1e6,
        cpu_s_per_gb=round(cpu / fetched_bytes * 1e9, 3),
    )


def bind(process: int, core: int) -> None:
    """Bind all threads of a process, and those that they start, to that core."""
    for thread in Path(f"/proc/{process}/task").iterdir():
        with suppress(OSError):  # it ended meanwhile
            os.sched_setaffinity(int(thread.name), {core})


def cores_here() -> list[int]:
    """The cores that this process may use. Raises ConfigError where processes cannot be bound to two of them."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        raise ConfigError(
            "what donors lose by serving is measured on Linux with two cores or more; add --no-training to leave it out"
        )
    return cores


def training_rate(bench: JoinBench) -> TrainingRate:
    """Run the second part, with no more donors than cores allow.

    Raises NetworkError if it fails, ConfigError where it cannot be measured.
    """
    donors = min(bench.donors, len(cores_here()) - 1)
    state_mb = min(bench.state_mb, STATE_MB_PER_DONOR * donors)
    arguments = [str(state_mb), str(donors), str(bench.serving_s)]
    command = [sys.executable, "-m", "shoal.lab.bench.join_training", *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=4 * DEADLINE_S, check=False)
    if done.returncode != 0:
        words = done.stderr.decode(errors="replace").strip().splitlines() or ["without a word"]
        raise NetworkError(f"the second part of the benchmark failed: {words[-1]}")
    return msgspec.json.decode(done.stdout, type=TrainingRate)


if __name__ == "__main__":
    with TemporaryDirectory(prefix="shoal-bench-join-") as name, bare_errors():
        wanted = JoinBench(state_mb=int(sys.argv[1]), donors=int(sys.argv[2]), serving_s=float(sys.argv[3]))
        sys.stdout.buffer.write(msgspec.json.encode(trio.run(_measure_training, wanted, Path(name), cores_here())))
