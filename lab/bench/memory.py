"""`shoal bench memory`: how much memory a node takes for each parameter, at the peak of a round; and how much disk.

Two swarms of the same make, one of each size: real nodes as a user starts them, with what `shoal init` writes but for
the workload, whose trainer makes up its updates (`shoal.node.workloads.synthetic`), one inner step a round, and that a
round waits longer for who is slow. They share no memory, as between machines. Each daemon is looked at all the while,
without its trainer; with `--optimizer` it is looked at together with its trainer, which trains matrices of so many
parameters with that optimizer, and no layer keeps anything for the backward pass:

    anonymous   what it allocated                                   RssAnon   of /proc/PID/status
    shared      memory files, such as those that its trainer sees   RssShmem
    file        pages of files that it has mapped, clean or not     RssFile

These are the parts of RSS that /proc/PID/smaps_rollup has as well; for that one the kernel walks all pages, and while
it does the daemon waits. A peak is the largest sum of the first two that was seen in the rounds after WARM_UP, of all
nodes. What grows with the model is the slope between the two sizes; the base is what is left of no model at all. File
pages are told apart: the kernel may drop them, once it has written those that were changed. What daemon and trainer
share is one file that both see, and counts once.

Disk is that of a whole node, so with `--optimizer` it has a row (`disk`): the most that was seen on it at any time in
these rounds, and what is left once the last state is saved and nobody trains.

Values are checked in a swarm of the smaller size beside these, which is not measured: its nodes are in test mode, where
they keep what every update is recomputed from.

With `--within` the larger swarm runs once more, each daemon in a control group of so many bytes a parameter beside the
base, where pages of files count too.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import psutil  # type: ignore[import-untyped]
import trio

from shoal.cli.render import ShowNow
from shoal.lab.bench.disk import OnDisk, on_disk
from shoal.lab.bench.inspect import TERM, witnesses
from shoal.lab.bench.resident import Resident, looked_at, watched
from shoal.lab.bench.swarm import GRACE_S, SEED, BenchSpec, running_swarm
from shoal.lab.bench.synthetic import TRAINED_NAME, WORKLOAD_NAME
from shoal.lab.bench.train_spec import NOBODY
from shoal.lab.case import Case, LongCaseOptions, Numbers, Spec, parse_numbers
from shoal.lab.fork_server import TRAINER
from shoal.lab.memory_limit import MemoryLimit, memory_limit
from shoal.lab.targets import Row, Target
from shoal.node.option import Option, Within
from shoal.protocol.errors import ConfigError, NetworkError
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest import Manifest, validate_manifest
from shoal.protocol.strategies.table import DEFAULT_STRATEGY, STRATEGIES
from shoal.testnet.check import check_round
from shoal.testnet.nodes import NodeProcess

WARM_UP: Final = 3
"""Rounds before any is looked at: memory is kept from one to the next, and states and finals of the last ones are."""
CHECKED_ROUNDS: Final = 2
"""Rounds whose values are checked: the second stands on what the first left."""
LEAST: Final = 4096
"""Parameters of the smaller size."""
SIZES: Final = Numbers((100_000_000, 250_000_000))

PER_PARAMETER: Final = Target(
    name="daemon's anonymous and shared memory at the peak of a round", unit="bytes a parameter", most=12.0, aim=8.0
)
_WHOLE: Final = "anonymous and shared memory of daemon and trainer at the peak of a round"
WHOLE_NODE: Final = {
    "adamw": Target(name=_WHOLE, unit="bytes a parameter", most=30.0, aim=26.0),
    "adamw8bit": Target(name=_WHOLE, unit="bytes a parameter", most=22.0, aim=18.0),
}
"""By optimizer."""
DISK: Final = Target(name="disk of a node at the peak of a round", unit="bytes a parameter", most=24.0, aim=16.0)
"""With AdamW."""
LIMITED: Final = Target(name="a round of daemons whose memory is limited", unit="× one without a limit", most=1.3)
LIMITED_BYTES: Final = 16.0
"""The target is of so many bytes a parameter."""
FIND_S: Final = 0.01
DISK_SAMPLE_S: Final = 0.02
"""Between two looks at the same data folder; what is as large as the model takes longer to write."""
SAVE_DEADLINE_S: Final = 120.0
"""For the last state to be saved, beside what the size takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBench(Spec):
    """Options of `shoal bench memory`."""

    numel: Annotated[
        Numbers,
        Option(
            "--numel",
            help="How many parameters, in two sizes, the smaller first; of one number two fifths, and all.",
            metavar="N[,N]",
            parse=parse_numbers,
        ),
    ] = SIZES
    strategy: Annotated[str, Option("--strategy", help="One whose rounds are certified.")] = DEFAULT_STRATEGY
    codec: Annotated[str | None, Option("--codec", help="How values travel. [default: what `shoal init` writes]")] = (
        None
    )
    optimizer: Annotated[
        Literal["adamw", "adamw8bit", "muon"] | None,
        Option("--optimizer", help="Of a trainer that counts too. [default: daemons alone are looked at]"),
    ] = None
    within: Annotated[
        float | None,
        Option(
            "--within",
            help="Run the larger size again, each daemon in so many bytes a parameter, pages of files included.",
            check=Within(1, 1000),
        ),
    ] = None
    nodes: Annotated[int, Option("--nodes", help="How many nodes.", check=Within(1, 64))] = 2
    rounds: Annotated[
        int, Option("--rounds", help=f"Rounds that are looked at; {WARM_UP} more warm up.", check=Within(1, 1000))
    ] = 4

    def __post_init__(self) -> None:
        Spec.__post_init__(self)
        if len(self.numel) not in (1, 2) or not LEAST <= self.sizes[0] < self.sizes[1] <= 1 << 32:
            raise ConfigError(
                f"--numel takes one number, at least {5 * LEAST // 2}, or two from {LEAST} on, the smaller first, like "
                "100000000,250000000"
            )
        known = STRATEGIES.get(self.strategy)
        if known is None or not known.certifies:
            able = (name for name, one in STRATEGIES.items() if one.certifies)
            raise ConfigError(f"--strategy must be one of {', '.join(able)}")
        self.manifest(self.sizes[0], [NOBODY])

    @property
    def sizes(self) -> tuple[int, int]:
        """The two numbers of parameters; of one that is given, two fifths of it and all."""
        return (2 * self.numel[0] // 5, self.numel[0]) if len(self.numel) == 1 else (self.numel[0], self.numel[1])

    def manifest(self, numel: int, founders: list[PeerId]) -> Manifest:
        """The manifest of `shoal init` but for workload, H and grace. Raises ConfigError."""
        tables = {
            "swarm": {"name": "bench", "founders": founders, "admission": "open"},
            "workload": {
                "name": TRAINED_NAME if self.optimizer else WORKLOAD_NAME,
                "seed": SEED,
                "options": {"numel": numel},
            },
            "sync": {"strategy": self.strategy, "inner_steps": 1, **({"codec": self.codec} if self.codec else {})},
            "round": {"grace_s": GRACE_S},
            **({"inner": {"optimizer": self.optimizer}} if self.optimizer else {}),
        }
        return validate_manifest(tables, source="the benchmark")


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a node held with so many parameters, what else it had then, and the most of file pages.

    round_s: seconds that a round took, the median. identical: all nodes certified the same digests. disk: the most that
    a node had on disk; disk_rest: the most that one had when the last state was saved.
    """

    numel: int
    round_s: float
    identical: bool
    most: Resident
    most_file: int
    disk: OnDisk
    disk_rest: OnDisk


class MemoryResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `shoal bench memory`: the peaks of both sizes, and of the larger one within a limit.

    exact: every value that a node of the smaller size applied is the reference's, by bits.
    """

    bench: MemoryBench
    peaks: tuple[Peak, Peak]
    exact: bool
    limited: Peak | None = None

    def slope(self, sizes: Sequence[int]) -> float:
        """Bytes a parameter by which these, one of each size, differ."""
        small, large = self.peaks
        return (sizes[1] - sizes[0]) / (large.numel - small.numel)

    @property
    def held_slope(self) -> float:
        """Bytes a parameter that the kernel cannot drop."""
        return self.slope([peak.most.held for peak in self.peaks])

    @property
    def disk_slope(self) -> float:
        """Bytes a parameter on disk at the peak."""
        return self.slope([peak.disk.total for peak in self.peaks])

    @property
    def base_bytes(self) -> float:
        """The value that the same line has at no parameters."""
        return self.peaks[0].most.held - self.held_slope * self.peaks[0].numel

    @property
    def rows(self) -> tuple[Row, ...]:
        """Measured value beside its target, which is that of the default strategy."""
        is_default = STRATEGIES[self.bench.strategy] is STRATEGIES[DEFAULT_STRATEGY] and self.bench.codec is None
        target = WHOLE_NODE.get(self.bench.optimizer) if self.bench.optimizer else PER_PARAMETER
        rows: tuple[Row, ...] = (target.row(self.held_slope),) if is_default and target is not None else ()
        if is_default and self.bench.optimizer == "adamw":
            rows += (DISK.row(self.disk_slope),)
        if self.limited is not None and self.bench.within == LIMITED_BYTES:
            rows += (LIMITED.row(self.limited.round_s / self.peaks[1].round_s),)
        return rows


def run(bench: MemoryBench, tell: ShowNow) -> MemoryResult:
    """Measure the memory of daemons, or of nodes, for each parameter, at the peak of a round."""
    if sys.platform != "linux":
        raise ConfigError("`shoal bench memory` reads /proc, which only Linux has; run it there")
    small, large = (trio.run(_measure, bench, numel, tell) for numel in bench.sizes)
    result = MemoryResult(bench=bench, peaks=(small, large), exact=trio.run(_check_values, bench, tell))
    if bench.within is None:
        return result
    size = round(result.base_bytes + bench.within * large.numel)
    with ExitStack() as stack:
        limits = [stack.enter_context(memory_limit(str(node), size)) for node in range(bench.nodes)]
        limited = trio.run(_measure, bench, large.numel, tell, limits)
    return msgspec.structs.replace(result, limited=limited)


async def _check_values(bench: MemoryBench, tell: ShowNow) -> bool:
    """True if each update that nodes in test mode applied is, to the bit, that of their contributions."""
    numel, rounds = bench.sizes[0], range(1, CHECKED_ROUNDS + 1)
    spec = _spec(bench, numel, rounds=CHECKED_ROUNDS, test_mode=True)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-memory-") as name:
        async with running_swarm(spec, Path(name)) as swarm:
            for round in rounds:
                await swarm.play(round)
                tell(f"{numel / 1e6:g} M parameters, round {round} of those whose values are checked")
        found = [check_round(witnesses(swarm, settled=round), TERM, round) for round in rounds]
    return all(one.wrong_values == 0 and not one.errors and one.updates_compared == bench.nodes for one in found)


def _spec(
    bench: MemoryBench, numel: int, *, rounds: int, test_mode: bool = False, limits: Sequence[MemoryLimit] = ()
) -> BenchSpec:
    manifest = partial(bench.manifest, numel)
    return BenchSpec(
        peers=bench.nodes,
        numel=numel,
        codec=manifest([NOBODY]).sync.codec,
        rounds=rounds,
        test_mode=test_mode,
        sockets=True,
        manifest=manifest,
        prefixes={node: limit.prefix for node, limit in enumerate(limits)},
    )


async def _measure(bench: MemoryBench, numel: int, tell: ShowNow, limits: Sequence[MemoryLimit] = ()) -> Peak:
    """limits: of the daemons, by node; their trainers are let out as soon as they are there."""
    spec = _spec(bench, numel, rounds=WARM_UP + bench.rounds, limits=limits)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-memory-") as name, _without_trainers(limits):
        async with running_swarm(spec, Path(name)) as swarm:
            for round in range(1, WARM_UP + 1):
                await swarm.play(round)
            took, identical = [], True
            pids = {node.folder: _family(node) for node in swarm.nodes}
            with watched([_processes(bench, node) for node in swarm.nodes]) as seen, disk_watched(pids) as disk:
                for round in range(WARM_UP + 1, spec.rounds + 1):
                    began = time.monotonic()
                    await swarm.play(round)
                    took.append(time.monotonic() - began)
                    identical &= len({event.digest for event in swarm.certified_by(round).values()}) == 1
                    tell(f"{numel / 1e6:g} M parameters, round {round}")
            await swarm.until(
                lambda: all(_is_saved(node.folder, spec.rounds) for node in swarm.nodes),
                "the last state is saved",
                SAVE_DEADLINE_S + spec.round_deadline_s,
            )
            at_rest = [on_disk(folder, found) for folder, found in pids.items()]
    if not seen:
        raise NetworkError("no daemon was seen; see that this user may read /proc/PID/status of its own processes")
    return Peak(
        numel=numel,
        round_s=statistics.median(took),
        identical=identical,
        most=max(seen, key=lambda one: one.held),
        most_file=max(one.file for one in seen),
        disk=max(disk, key=lambda one: one.total),
        disk_rest=max(at_rest, key=lambda one: one.total),
    )


def _processes(bench: MemoryBench, node: NodeProcess) -> list[int]:
    """The processes of a node whose memory is looked at."""
    return _family(node) if bench.optimizer else _family(node)[:1]


def _family(node: NodeProcess) -> list[int]:
    """The daemon of a node, and what it started."""
    daemon = node.lives[-1].pid
    return [daemon, *(child.pid for child in psutil.Process(daemon).children())]


def _is_saved(folder: Path, round: int) -> bool:
    """True if the state of that round is on disk, and nothing is being written beside it."""
    return (folder / "state" / f"{round}.safetensors").exists() and not list(folder.glob("*/*.partial"))


@contextmanager
def _without_trainers(limits: Sequence[MemoryLimit]) -> Iterator[None]:
    """Let trainers out of the limits of their daemons as soon as they are there, in a thread."""

    def look() -> None:
        for limit in limits:
            for pid in limit.processes():
                with suppress(psutil.Error):
                    if TRAINER in psutil.Process(pid).cmdline():
                        limit.let_out(pid)

    with looked_at(look, FIND_S) if limits else nullcontext():
        yield


@contextmanager
def disk_watched(nodes: Mapping[Path, Sequence[int]]) -> Iterator[list[OnDisk]]:
    """The same of each node's disk: of its data folder, and the processes that work on it."""
    seen: list[OnDisk] = []

    def look() -> None:
        seen.extend(on_disk(folder, pids) for folder, pids in nodes.items())

    with looked_at(look, DISK_SAMPLE_S):
        yield seen


def to_document(result: MemoryResult) -> dict[str, object]:
    """The result under the names of its fields, and what others read of it by name."""
    kinds = sorted({kind for peak in result.peaks for kind in (*peak.disk.kinds, *peak.disk_rest.kinds)})
    disk = {kind: result.slope([peak.disk.kinds.get(kind, 0) for peak in result.peaks]) for kind in kinds}
    rest = {kind: result.slope([peak.disk_rest.kinds.get(kind, 0) for peak in result.peaks]) for kind in kinds}
    slopes = {
        "anonymous": [peak.most.anonymous for peak in result.peaks],
        "shared": [peak.most.shared for peak in result.peaks],
        "file": [peak.most_file for peak in result.peaks],
    }
    large = result.peaks[1]
    return {
        "numel": large.numel,
        "strategy": result.bench.strategy,
        "codec": result.bench.manifest(large.numel, [NOBODY]).sync.codec,
        "daemon_bytes_per_parameter": {kind: result.slope(sizes) for kind, sizes in slopes.items()},
        "disk_bytes_per_parameter": {"peak": result.disk_slope, "at rest": sum(rest.values())},
        "disk_by_kind": {"peak": disk, "at rest": rest},
        "base_bytes": result.base_bytes,
        "round_s": large.round_s,
        "identical": _identical(result),
        **msgspec.to_builtins(result, enc_hook=str),
    }


def _identical(result: MemoryResult) -> bool:
    return all(peak.identical for peak in (*result.peaks, result.limited) if peak is not None)


def _is_sound(result: MemoryResult) -> bool:
    return result.exact and _identical(result)


CASE: Final = Case(
    spec=MemoryBench,
    run=run,
    document=to_document,
    sound=_is_sound,
    options=LongCaseOptions,
)
