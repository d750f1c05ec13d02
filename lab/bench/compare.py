"""`shoal bench compare`: ours and others in one run; repetitions alternate, so that other load meets all of them.

One repetition runs, for each number of peers, the yardstick, and then ours in every codec, once as nodes of one machine
do it and once through sockets alone, as between machines; then the other rivals, with the largest number of peers. What
is compared are ratios within one repetition, of which the median is given with the least and the largest. Faults,
values, memory and the single lane are measured once, after the repetitions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from operator import attrgetter
from typing import Annotated, Final

import msgspec
import trio

from shoal.cli.render import ShowNow
from shoal.lab.bench.allreduce import (
    BEYOND,
    DELAYS,
    MIB,
    Allreduce,
    Bench,
    FaultKind,
    FaultResult,
    Iters,
    Numel,
    measure,
    peak_target,
)
from shoal.lab.bench.lane import LaneBench
from shoal.lab.bench.lane import rows as lane_rows
from shoal.lab.bench.machine import Machine, this_machine
from shoal.lab.bench.rivals import Rival, gloo, parse_rivals, run_rival
from shoal.lab.case import Case, LongCaseOptions, Numbers, Spec, parse_numbers, tell_nothing
from shoal.lab.page import targets
from shoal.lab.targets import Row, Spread, Target
from shoal.node.option import Option, Within, check_options
from shoal.protocol.errors import ConfigError, NetworkError, ShoalError
from shoal.testnet.lane_rate import LaneSpeed, measure_lane

CODECS: Final = ("fp32", "int8")
FAULTS: Final[tuple[FaultKind, ...]] = ("sigkill", "sigstop")
YARDSTICK: Final = "gloo"
SOCKETS: Final = ", sockets"
"""After the name of a system that shares no memory."""
WAYS: Final = ("", SOCKETS)
PEER_COUNTS: Final = Numbers((2, 4))
PEERS: Final = 4
"""With so many most targets are set."""
BESIDE_YARDSTICK: Final = (
    ("fp32, 4 peers, beside gloo", "fp32", PEERS, 2.0, 1.5),
    ("fp32, 2 peers, beside gloo", "fp32", 2, 1.8, 1.3),
    ("int8, 4 peers, beside gloo in fp32", "int8", PEERS, 1.6, 1.0),
)
"""Measurements: each with its codec, the number of peers, target and aim."""
RIVAL_TARGETS: Final = {"hivemind": (6.0, 9.0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compare(Spec):
    """Options of `shoal bench compare`."""

    repeat: Annotated[int, Option("--repeat", help="How often everything runs, in turn.", check=Within(1, 100))] = 3
    peers: Annotated[
        Numbers, Option("--peers", help="Numbers of nodes, like 2,4.", metavar="N,N…", parse=parse_numbers)
    ] = PEER_COUNTS
    numel: Numel = 25_000_000
    iters: Iters = 5
    fault_iters: Annotated[int, Option("--fault-iters", help="Strikes of each kind of fault; 0 for none.")] = 3
    rival: Annotated[
        list[str],
        Option(
            "--rival",
            help="A command that prints JSON with median_s; {peers} and {numel} are filled in. Repeatable.",
            metavar="NAME=COMMAND",
        ),
    ] = field(default_factory=list)
    rival_regex: Annotated[
        list[str],
        Option(
            "--rival-regex",
            help="For a rival that prints text: group 1 is a repetition's seconds, the first warms up. Repeatable.",
            metavar="NAME=REGEX",
        ),
    ] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_options(self)
        names, taken = [rival.name for rival in self.rivals], (YARDSTICK, *CODECS)
        if len({*names, *taken}) < len(names) + len(taken):
            raise ConfigError(f"--rival: names must differ, and be none of {', '.join(taken)}")
        for peers in self.peers:
            Bench(peers=peers, numel=self.numel, iters=self.iters)

    @property
    def rivals(self) -> tuple[Rival, ...]:
        """The systems that the user named. Raises ConfigError."""
        return parse_rivals(self.rival, self.rival_regex)


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one system in one repetition. whole_s: ours only, the round with agreement and apply."""

    system: str
    peers: int
    repetition: int
    median_s: float
    whole_s: float | None = None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a comparison. ok: no value was wrong. notes: what was left out, and why.

    rivals: those that the user named, and by which pattern their seconds were found, "" where they print JSON.
    """

    machine: Machine
    repeat: int
    peers: tuple[int, ...]
    numel: int
    iters: int
    fault_iters: int
    rivals: dict[str, str]
    samples: tuple[Sample, ...]
    details: tuple[Allreduce, ...]
    faults: tuple[FaultResult, ...]
    lane: LaneSpeed | None
    rows: tuple[Row, ...]
    ok: bool
    notes: tuple[str, ...]


async def compare(wanted: Compare, tell: ShowNow = tell_nothing) -> Comparison:
    """Run the whole comparison: minutes. Raises NetworkError where ours or the yardstick fails.

    A rival or a lane that fails is noted and left out. Cancellation: all processes are ended and reaped.
    """
    machine = this_machine()
    run = _Run(wanted, tell)
    for repetition in range(wanted.repeat):
        await run.repetition(repetition)
    await run.details_and_faults()
    lane = await run.lane()
    return Comparison(
        machine=machine,
        repeat=wanted.repeat,
        peers=wanted.peers,
        numel=wanted.numel,
        iters=wanted.iters,
        fault_iters=wanted.fault_iters,
        rivals={rival.name: rival.pattern.pattern if rival.pattern else "" for rival in wanted.rivals},
        samples=tuple(run.samples),
        details=tuple(run.details),
        faults=tuple(run.faults),
        lane=lane,
        rows=rows_of(run.samples, run.details, run.faults, lane, [rival.name for rival in wanted.rivals]),
        ok=run.ok,
        notes=tuple(run.notes),
    )


class _Run:
    """One comparison under way, and what it has measured so far."""

    def __init__(self, wanted: Compare, tell: ShowNow) -> None:
        self._wanted = wanted
        self._tell = tell
        self.samples: list[Sample] = []
        self.details: list[Allreduce] = []
        self.faults: list[FaultResult] = []
        self.notes: list[str] = []
        self.ok = True

    async def repetition(self, number: int) -> None:
        """Run every system once."""
        wanted = self._wanted
        for peers in wanted.peers:
            await self._rival(gloo(wanted.iters), peers, number)
            for codec, sockets in product(CODECS, (False, True)):
                bench = Bench(
                    peers=peers,
                    numel=wanted.numel,
                    codec=codec,
                    iters=wanted.iters,
                    inspect=False,
                    sockets=sockets,
                )
                result = await self._ours(bench, f"repetition {number + 1} of {wanted.repeat}")
                self._add(codec + SOCKETS * sockets, peers, number, result.median_s, result.round_s)
        for rival in wanted.rivals:
            try:
                await self._rival(rival, max(wanted.peers), number)
            except NetworkError as error:
                self.notes.append(str(error))

    async def details_and_faults(self) -> None:
        """Measure once, with the most peers: values and memory in every codec, and the faults in fp32."""
        wanted, peers = self._wanted, max(self._wanted.peers)
        for codec in CODECS:
            bench = Bench(peers=peers, numel=wanted.numel, codec=codec, iters=wanted.iters)
            self.details.append(await self._ours(bench, "values and memory"))
        if wanted.fault_iters == 0 or peers < 3:
            self.notes.append("faults were left out")
            return
        for kind in FAULTS:
            bench = Bench(
                peers=peers,
                numel=wanted.numel,
                iters=wanted.fault_iters,
                fault=kind,
                inspect=False,
            )
            self.faults.append((await self._ours(bench, kind)).fault)

    async def lane(self) -> LaneSpeed | None:
        """Measure one lane beside plaintext; None, with a note, if that cannot be done here."""
        self._tell("one lane beside plaintext")
        usual = LaneBench()
        try:
            return await trio.to_thread.run_sync(
                partial(measure_lane, frames=usual.frames, repetitions=usual.repetitions)
            )
        except ShoalError as error:
            self.notes.append(f"one lane was not measured: {error}")
            return None

    async def _ours(self, bench: Bench, why: str) -> Allreduce:
        def tell(text: str, share: float | None = None, *, of: str = "") -> None:
            self._tell(f"{why}: {bench.codec}, {bench.peers} peers: {text}")

        result = await measure(bench, tell)
        if not result.ok:
            self.ok = False
            self.notes.append(f"WRONG VALUES: {bench.codec}, {bench.peers} peers ({why})")
        return result

    async def _rival(self, rival: Rival, peers: int, number: int) -> None:
        self._tell(f"repetition {number + 1} of {self._wanted.repeat}: {rival.name}, {peers} peers")
        self._add(rival.name, peers, number, await run_rival(rival, peers=peers, numel=self._wanted.numel))

    def _add(self, system: str, peers: int, number: int, median_s: float, whole_s: float | None = None) -> None:
        self.samples.append(Sample(system=system, peers=peers, repetition=number, median_s=median_s, whole_s=whole_s))


def rows_of(
    samples: Sequence[Sample],
    details: Sequence[Allreduce],
    faults: Sequence[FaultResult],
    lane: LaneSpeed | None,
    rivals: Sequence[str],
) -> tuple[Row, ...]:
    """The targets beside what was measured."""

    def ratio(over: tuple[str, int], under: tuple[str, int]) -> Spread | None:
        return Spread.of_any(_by_repetition(samples, over, under, lambda a, b: a.median_s / b.median_s))

    ours = ("fp32", PEERS)
    beyond = Spread.of_any(
        _by_repetition(samples, ours, ours, lambda a, _: ((a.whole_s or 0.0) - a.median_s) / a.median_s)
    )
    peaks = [d.peak_extra_bytes for d in details if (d.codec, d.peers) == ours and d.peak_extra_bytes is not None]
    delays = {
        kind: Spread.of_any(d for fault in faults if fault.kind == kind for d in fault.delays_s) for kind in FAULTS
    }
    return (
        *(
            Target(name=name + way, unit="× gloo's time", most=most, aim=aim).row(
                ratio((codec + way, peers), (YARDSTICK, peers))
            )
            for way in WAYS
            for name, codec, peers, most, aim in BESIDE_YARDSTICK
        ),
        BEYOND.row(beyond),
        *(() if lane is None else lane_rows(lane)),
        *(_beside_rival(name, ratio((name, PEERS), ours)) for name in rivals),
        *(DELAYS[kind].row(delays[kind]) for kind in FAULTS),
        peak_target(details[0].numel if details else None).row(Spread.of_any(peak / MIB for peak in peaks)),
    )


def _by_repetition(
    samples: Sequence[Sample],
    over: tuple[str, int],
    under: tuple[str, int],
    quotient: Callable[[Sample, Sample], float],
) -> list[float]:
    """`quotient` of the two systems' samples, per repetition that has both."""
    found = {(s.system, s.peers, s.repetition): s for s in samples}
    repetitions = sorted({s.repetition for s in samples})
    pairs = ((found.get((*over, r)), found.get((*under, r))) for r in repetitions)
    return [quotient(a, b) for a, b in pairs if a is not None and b is not None]


def _beside_rival(name: str, measured: Spread | None) -> Row:
    least, aim = RIVAL_TARGETS.get(name, (None, None))
    return Target(name=f"{name}, fp32, 4 peers, beside ours", unit="× our time", least=least, aim=aim).row(measured)


def run(wanted: Compare, tell: ShowNow) -> Comparison:
    """Run ours beside gloo and other systems, in turn: ratios of times within each repetition."""
    return trio.run(compare, wanted, tell)


CASE: Final = Case(
    spec=Compare,
    run=run,
    lines=lambda found: [targets(found.rows), *found.notes],
    sound=attrgetter("ok"),
    options=LongCaseOptions,
)
