"""Measurements of a soak's processes and folders, sample by sample, and a verdict on whether any of it grows.

    rss, threads, descriptors    per process: the daemon and the trainer of every node
    beyond the chain             of the daemons that live through it: rss, but for what the certificates that came take
    disk                         per data folder, without what is kept for ever (below) and what the soak itself prunes
    kept                         per data folder: logs and the chain of certificates, which grow by design; the chain
                                 also in checkpoints

A process that lives through the soak is compared with itself: the median of the first quarter after the warm-up with
that of the last quarter. Processes that faults end are compared at equal age: the medians of the first lives with those
of the last. What is kept for ever may grow by so many bytes a round, at the end as at the beginning.
"""

from __future__ import annotations

import os
import statistics
import tracemalloc
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec
import psutil  # type: ignore[import-untyped]

from shoal.node.reporting.event_files import LOG_NAME, earlier_of
from shoal.node.state.checkpoint_check import read_chain

Measure = Literal["rss", "threads", "descriptors", "disk", "kept"]
Role = Literal["daemon", "trainer", "folder"]

WARM_UP_SHARE: Final = 1 / 6
WARM_UP_LIMIT_S: Final = 20 * 60.0
QUARTER: Final = 0.25
LEAST_SAMPLES: Final = 5
"""A median of fewer says nothing."""
AGES_S: Final = (60.0, 240.0)
"""At which age processes that faults end are compared."""
LEAST_LIVES: Final = 4

RSS_GROWTH_BYTES: Final = 16 << 20
THREADS_GROWTH: Final = 2.0
DESCRIPTORS_GROWTH: Final = 6.0
DISK_GROWTH_BYTES: Final = 2 << 20
"""The log of promises is rewritten at one MiB (`shoal.node.state.store`); all else is replaced as rounds go by."""
BEYOND_CHAIN_BYTES_PER_H: Final = 1e6
BEYOND_CHAIN_FROM_S: Final = 3600.0
"""Of a shorter soak a slope says too little."""
KEPT_BYTES_PER_ROUND: Final = 16 << 10
"""Certificate, events and log lines of a round of a few nodes, with the faults of a soak among them."""

OF_PROCESSES: Final[tuple[Measure, ...]] = ("rss", "threads", "descriptors")
GROWTH_LIMITS: Final[dict[Measure, float]] = {
    "rss": RSS_GROWTH_BYTES,
    "threads": THREADS_GROWTH,
    "descriptors": DESCRIPTORS_GROWTH,
    "disk": DISK_GROWTH_BYTES,
    "kept": KEPT_BYTES_PER_ROUND,
}

_KEPT_NAMES: Final = ("chain.log", "chain", LOG_NAME, earlier_of(Path(LOG_NAME)).name, "log.txt")
_AUDIT_FOLDER: Final = "rounds"


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One look at one process or folder. at_s: since the swarm began; age_s: of the process, which `born` identifies.

    round: the last that the node had certified. rss in bytes; disk and kept in bytes, of a folder only.
    """

    at_s: float
    node: int
    role: Role
    round: int
    born: float = 0.0
    age_s: float = 0.0
    rss: int = 0
    threads: int = 0
    descriptors: int = 0
    disk: int = 0
    kept: int = 0


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Verdict on the growth of one measure of one process or folder.

    lives: how many processes were compared; 1 for one that lived through the soak. before, after: the medians that were
    compared; for `kept`, bytes a round. slope_per_h: the median of all slopes between two samples (Theil and Sen);
    rounds_per_h: likewise, of the rounds that the node had certified.
    """

    measure: Measure
    node: int
    role: Role
    lives: int
    before: float
    after: float
    limit: float
    slope_per_h: float | None = None
    rounds_per_h: float | None = None

    @property
    def growth(self) -> float:
        """Increase of the measure; for what is kept for ever, all that comes with a round."""
        return max(self.before, self.after) if self.measure == "kept" else self.after - self.before

    @property
    def holds(self) -> bool:
        """True if the growth is within its limit."""
        return self.growth <= self.limit


# -- looking -------------------------------------------------------------------------------------------------


def look_at_processes(pid: int, *, at_s: float, node: int, round: int, now: float) -> Iterator[Sample]:
    """A sample of a node's daemon and one of its trainer, as far as they are there. Blocks for some milliseconds."""
    try:
        daemon = psutil.Process(pid)
        family: list[tuple[Role, psutil.Process]] = [("daemon", daemon)]
        family += [("trainer", child) for child in daemon.children() if _is_trainer(child)]
    except psutil.Error:
        return
    for role, process in family:
        try:
            with process.oneshot():
                born = process.create_time()
                yield Sample(
                    at_s=at_s,
                    node=node,
                    role=role,
                    round=round,
                    born=born,
                    age_s=now - born,
                    rss=process.memory_info().rss,
                    threads=process.num_threads(),
                    descriptors=process.num_fds(),
                )
        except psutil.Error:  # it has just ended
            continue


def _is_trainer(process: psutil.Process) -> bool:
    """True if a child of a daemon trains; multiprocessing's resource tracker does not."""
    return not any("resource_tracker" in word for word in process.cmdline())


def look_at_folder(folder: Path, *, at_s: float, node: int, round: int) -> Sample:
    """A sample of a node's data folder. Blocks."""
    sizes = {"disk": 0, "kept": 0}
    for path in _everything_in(folder):
        if path.relative_to(folder).parts[0] == _AUDIT_FOLDER:
            continue
        try:
            status = path.lstat()
        except OSError:  # a running node removes files
            continue
        sizes["kept" if path.name in _KEPT_NAMES else "disk"] += status.st_size
    return Sample(at_s=at_s, node=node, role="folder", round=round, **sizes)


def _everything_in(folder: Path) -> Iterator[Path]:
    """The files and folders in it. A running node removes folders too, between their being listed and being read."""
    for parent, folders, files in os.walk(folder):
        yield from (Path(parent, name) for name in (*folders, *files))


# -- judging -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Windows:
    """Seconds that are compared: the first and the last quarter of what follows the warm-up."""

    begin: float
    end: float

    @property
    def quarter(self) -> float:
        return (self.end - self.begin) * QUARTER

    def early(self, samples: Sequence[Sample]) -> list[Sample]:
        return [s for s in samples if self.begin <= s.at_s <= self.begin + self.quarter]

    def late(self, samples: Sequence[Sample]) -> list[Sample]:
        return [s for s in samples if self.end - self.quarter <= s.at_s <= self.end]


def judge(samples: Sequence[Sample], *, seconds: float, steady: Sequence[int]) -> tuple[Verdict, ...]:
    """The verdicts on all measures, of a soak that lasted so long. steady: nodes whose processes lived through it."""
    windows = _Windows(min(WARM_UP_LIMIT_S, seconds * WARM_UP_SHARE), seconds)
    of: dict[tuple[int, Role], list[Sample]] = defaultdict(list)
    for sample in samples:
        of[sample.node, sample.role].append(sample)
    verdicts: list[Verdict] = []
    for (node, role), found in sorted(of.items()):
        if role == "folder":
            verdicts += _through("disk", found, windows)
            verdicts += _per_round(found, windows)
        elif node in steady:
            longest = _longest_life(found)
            for measure in OF_PROCESSES:
                verdicts += _through(measure, longest, windows)
        else:
            for measure in OF_PROCESSES:
                verdicts += _at_equal_age(measure, found)
    return tuple(verdicts)


def unjudged(verdicts: Sequence[Verdict], *, nodes: int, steady: Sequence[int]) -> tuple[str, ...]:
    """List the measures of steady nodes, and of all folders, that have no verdict though they must, in words."""
    judged = {(verdict.node, verdict.role, verdict.measure) for verdict in verdicts}
    wanted: list[tuple[int, Role, Measure]] = [(n, "folder", m) for n in range(nodes) for m in ("disk", "kept")]
    for node in steady:
        for role in ("daemon", "trainer"):
            wanted += [(node, role, measure) for measure in OF_PROCESSES]
    return tuple(
        f"node {node}'s {role}: too few samples of its {measure}"
        for node, role, measure in wanted
        if (node, role, measure) not in judged
    )


def _value(sample: Sample, measure: Measure | Literal["round"]) -> float:
    return float(getattr(sample, measure))


def _median(samples: Sequence[Sample], measure: Measure) -> float:
    return statistics.median(_value(sample, measure) for sample in samples)


def _longest_life(samples: Sequence[Sample]) -> list[Sample]:
    lives: dict[float, list[Sample]] = defaultdict(list)
    for sample in samples:
        lives[sample.born].append(sample)
    return max(lives.values(), key=len)


def _through(measure: Measure, samples: Sequence[Sample], windows: _Windows) -> list[Verdict]:
    early, late = windows.early(samples), windows.late(samples)
    if min(len(early), len(late)) < LEAST_SAMPLES:
        return []
    settled = [sample for sample in samples if windows.begin <= sample.at_s <= windows.end]
    return [
        Verdict(
            measure=measure,
            node=samples[0].node,
            role=samples[0].role,
            lives=1,
            before=_median(early, measure),
            after=_median(late, measure),
            limit=GROWTH_LIMITS[measure],
            slope_per_h=slope(settled, measure),
            rounds_per_h=slope(settled, "round"),
        )
    ]


def _per_round(samples: Sequence[Sample], windows: _Windows) -> list[Verdict]:
    rates = []
    for part in (windows.early(samples), windows.late(samples)):
        rounds = part[-1].round - part[0].round if len(part) >= LEAST_SAMPLES else 0
        if rounds <= 0:
            return []
        rates.append((part[-1].kept - part[0].kept) / rounds)
    before, after = rates
    limit = GROWTH_LIMITS["kept"]
    node = samples[0].node
    return [Verdict(measure="kept", node=node, role="folder", lives=1, before=before, after=after, limit=limit)]


def _at_equal_age(measure: Measure, samples: Sequence[Sample]) -> list[Verdict]:
    """The first third of the lives beside the last third, each life by its median at that age."""
    lives: dict[float, list[Sample]] = defaultdict(list)
    for sample in samples:
        if AGES_S[0] <= sample.age_s <= AGES_S[1]:
            lives[sample.born].append(sample)
    medians = [_median(of, measure) for _, of in sorted(lives.items()) if len(of) >= LEAST_SAMPLES]
    if len(medians) < LEAST_LIVES:
        return []
    third = max(2, len(medians) // 3)
    return [
        Verdict(
            measure=measure,
            node=samples[0].node,
            role=samples[0].role,
            lives=len(medians),
            before=statistics.median(medians[:third]),
            after=statistics.median(medians[-third:]),
            limit=GROWTH_LIMITS[measure],
        )
    ]


def entry_bytes(folder: Path) -> int:
    """Bytes of memory that an entry of the chain in a data folder takes, on average, as a daemon holds it. Blocks.

    Raises ConfigError.
    """
    read_chain(folder)  # what is remembered of signatures is bounded, and is there from now on
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        chain = read_chain(folder)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return (after - before) // max(chain.height, 1)


def beyond_chain_per_h(verdicts: Sequence[Verdict], entry_bytes: int) -> float | None:
    """The most that a daemon that lived through the soak grew an hour, but for its chain; None of none."""
    grew = [
        verdict.slope_per_h - verdict.rounds_per_h * entry_bytes
        for verdict in verdicts
        if (verdict.measure, verdict.role) == ("rss", "daemon")
        and verdict.slope_per_h is not None
        and verdict.rounds_per_h is not None
    ]
    return max(grew, default=None)


def slope(samples: Sequence[Sample], measure: Measure | Literal["round"]) -> float | None:
    """Growth of a measure per hour: the median slope of pairs half the samples apart; None of too few."""
    apart = len(samples) // 2
    if apart < LEAST_SAMPLES:
        return None
    pairs = zip(samples[:-apart], samples[apart:], strict=True)
    slopes = [(_value(b, measure) - _value(a, measure)) / (b.at_s - a.at_s) for a, b in pairs if b.at_s > a.at_s]
    return statistics.median(slopes) * 3600 if slopes else None
