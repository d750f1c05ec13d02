"""`shoal bench faults`: what the survivors of an all-reduce return after a fault in mid-reduce, ours and others'.

For each system and fault, as often as asked for: the last of the peers is struck once half of a reduction is done, and
of each survivor it is told what it returned, and when:

    exact      the mean over one set of contributors, in every value; Shoal's is over those whom its certificate names
               for each chunk, by bits
    wrong      a success, with values that are no such mean
    error      an error
    nothing    nothing within the time that it was watched

Values are recomputed by the benchmark itself. Shoal's nodes are struck by `allreduce`, without memory in common, at the
point where half of the chunks are final at the struck one; those of the others by the clock, see `fault_group`.
"""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from operator import attrgetter
from typing import Annotated, Final, TypeVar, get_args

import msgspec
import trio

from shoal.cli.render import ShowNow
from shoal.lab.bench.allreduce import Bench, Numel, Strike, measure
from shoal.lab.bench.fault_group import Fault, GroupSpec, Kind, Outcome, Repetition, strike_once
from shoal.lab.bench.machine import Machine, this_machine
from shoal.lab.case import Case, LongCaseOptions, Spec
from shoal.lab.page import UNKNOWN, spread, table, targets
from shoal.lab.targets import Row, Spread, Target
from shoal.node.option import Option, Within
from shoal.protocol.errors import ConfigError, NetworkError
from shoal.testnet.links.namespaces import why_not

OURS: Final = "shoal"
SYSTEMS: Final = (OURS, "gloo", "hivemind")
FAULTS: Final[tuple[Fault, ...]] = get_args(Fault)
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
T = TypeVar("T", bound=str)
LIMIT_S: Final = 6.0
"""Within so long a survivor of ours has to return."""


def chosen(choices: Sequence[T], asked: Sequence[str], option: str) -> tuple[T, ...]:
    """Those of `choices` that were asked for, in their order; all if none was. Raises ConfigError, naming `option`."""
    for name in asked:
        if name not in choices:
            raise ConfigError(f"{option}: {name!r} is not one of {', '.join(choices)}")
    return tuple(one for one in choices if one in asked or not asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultsBench(Spec):
    """Options of `shoal bench faults`."""

    peers: Annotated[int, Option("--peers", help="How many, of which the last is struck.", check=Within(3, 4))] = 3
    numel: Numel = 4_000_000
    repetitions: Annotated[
        int, Option("--repetitions", help="How often each fault strikes each system.", check=Within(1, 100))
    ] = 2
    systems: Annotated[
        tuple[str, ...], Option("--systems", help=f"One of {', '.join(SYSTEMS)}. Repeatable; all if left out.")
    ] = ()
    faults: Annotated[
        tuple[str, ...],
        Option(
            "--faults",
            help=f"One of {', '.join(FAULTS)}. Repeatable; all if left out. A partition cuts the last peer off, for "
            "which it takes network namespaces.",
        ),
    ] = ()
    watch: Annotated[
        float,
        Option("--watch", help="Seconds for which it is waited that others' survivors return.", check=Within(1, 3600)),
    ] = 60.0


class Struck(msgspec.Struct, frozen=True, kw_only=True):
    """All repetitions of one fault in one system. error: why there are no more."""

    system: str
    fault: Fault
    repetitions: tuple[Repetition, ...] = ()
    error: str = ""

    @property
    def survivors(self) -> list[Outcome]:
        """Outcomes at the survivors, of all repetitions."""
        return [outcome for one in self.repetitions for outcome in one.survivors]


class FaultsResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `shoal bench faults`. notes: what was left out, and why."""

    bench: FaultsBench
    machine: Machine
    struck: tuple[Struck, ...]
    notes: tuple[str, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        """Survivors of ours that miss the target, for each fault."""
        return tuple(
            Target(name=f"ours, {one.fault}: {_ASKED}", most=0).row(missing(one, self.bench))
            for one in self.struck
            if one.system == OURS
        )

    @property
    def ok(self) -> bool:
        """True if no value of ours is wrong."""
        return not any(o.kind == "wrong" for one in self.struck if one.system == OURS for o in one.survivors)


_ASKED: Final = f"peers that did not return the same exact mean within {LIMIT_S:g} s, or went on alone"


def missing(struck: Struck, bench: FaultsBench) -> int:
    """Count, over all repetitions, survivors that miss the target, and peers that did not stay apart."""
    bad = len(struck.survivors) - sum(
        one.identical and outcome.kind == "exact" and (outcome.after_s or 0.0) <= LIMIT_S
        for one in struck.repetitions
        for outcome in one.survivors
    )
    absent = (bench.peers - 1) * (bench.repetitions - len(struck.repetitions))
    return bad + absent + sum(one.apart is False for one in struck.repetitions)


# -- striking ------------------------------------------------------------------------------------------------


def run(bench: FaultsBench, tell: ShowNow) -> FaultsResult:
    """Strike a peer in mid-reduce, in Shoal, gloo and hivemind, and tell what the others return, right or not.

    sigkill and sigstop strike a peer with all its processes. A partition cuts one peer off all others, which is done
    in network namespaces and takes root; where it cannot be, it is left out. Values are compared with the means over
    all sets of contributors; those of Shoal's with the mean over whom its certificate names, chunk by chunk. Only Shoal
    has targets.
    """
    notes, struck = [], []
    systems, faults = chosen(SYSTEMS, bench.systems, "--systems"), chosen(FAULTS, bench.faults, "--faults")
    if "hivemind" in systems and importlib.util.find_spec("hivemind") is None:
        notes.append("hivemind is left out: it is not installed; pip install 'shoal[hivemind]'")
        systems = tuple(one for one in systems if one != "hivemind")
    if "partition" in faults and (reason := why_not()):
        notes.append(f"partitions are left out: {reason}")
        faults = tuple(one for one in faults if one != "partition")
    for system, fault in product(systems, faults):
        tell(f"{system}, {fault}")
        struck.append(_strike(bench, system, fault, tell))
    return FaultsResult(bench=bench, machine=this_machine(), struck=tuple(struck), notes=tuple(notes))


def _strike(bench: FaultsBench, system: str, fault: Fault, tell: ShowNow) -> Struck:
    """Strike one system, as often as asked for or until it cannot be done."""
    found: list[Repetition] = []
    error = ""
    try:
        if system == OURS:
            found += _strike_ours(bench, fault, tell)
        else:
            for turn in range(bench.repetitions):
                tell(f"{system}, {fault}: {turn + 1} of {bench.repetitions}")
                found.append(strike_once(_group(bench, system, fault)))
    except NetworkError as failed:
        error = str(failed)
    return Struck(system=system, fault=fault, repetitions=tuple(found), error=error)


def _group(bench: FaultsBench, system: str, fault: Fault) -> GroupSpec:
    return GroupSpec(system=system, peers=bench.peers, numel=bench.numel, fault=fault, watch_s=bench.watch)


def _strike_ours(bench: FaultsBench, fault: Fault, tell: ShowNow) -> list[Repetition]:
    """Strike real nodes, in rounds of one swarm. Raises NetworkError."""

    def show(text: str, share: float | None = None, *, of: str = "") -> None:
        tell(f"{OURS}, {fault}: {text}")

    ours = Bench(
        peers=bench.peers, numel=bench.numel, iters=bench.repetitions, fault=fault, sockets=True, inspect=False
    )
    result = trio.run(measure, ours, show)
    return [repetition_of(one, result.round_s) for one in result.fault.strikes]


def repetition_of(strike: Strike, usual_s: float) -> Repetition:
    """One strike of nodes of ours, as the others' are told. usual_s: a round that nothing disturbs."""
    survivors = (
        Outcome(
            kind="exact" if strike.exact else "wrong",
            after_s=after_s,
            contributors=contributors,
            claimed=contributors,
            text="" if coverage == 1.0 else f"{coverage:.1%} of their chunks, as certified",
        )
        for after_s, contributors, coverage in zip(strike.after_s, strike.contributors, strike.coverage, strict=True)
    )
    return Repetition(
        survivors=tuple(survivors),
        identical=strike.identical,
        usual_s=usual_s,
        apart=strike.apart,
    )


# -- for people ----------------------------------------------------------------------------------------------


def to_lines(result: FaultsResult) -> list[str]:
    """The table, then a line for each thing that is worth one, and the targets of ours."""
    heads = ("system", "fault", "survivors returned", "after, s", "the same bits", "what it is")
    bench = result.bench
    title = f"{bench.peers} peers, {bench.numel:,} values, the last peer struck, {bench.repetitions} times each"
    lines = [title, "", table(heads, map(_line, result.struck))]
    return [*lines, *([targets(result.rows)] if result.rows else []), *result.notes]


_NUMBERS: Final = re.compile(r":\d+")
"""Such as ports, in which errors differ that are the same."""


def _line(struck: Struck) -> tuple[str, ...]:
    survivors = struck.survivors
    kinds = Counter(outcome.kind for outcome in survivors)
    after = Spread.of_any(outcome.after_s for outcome in survivors if outcome.after_s is not None)
    repetitions = struck.repetitions
    return (
        struck.system,
        struck.fault,
        ", ".join(f"{kinds[kind]} {kind}" for kind in KINDS if kinds[kind]) or UNKNOWN,
        spread(after),
        f"{sum(one.identical for one in repetitions)} of {len(repetitions)}",
        "; ".join({_NUMBERS.sub("", text): text for text in _details(struck)}.values()) or UNKNOWN,
    )


def _details(struck: Struck) -> Iterator[str]:
    for outcome in struck.survivors:
        yield from describe(outcome)
    for one in struck.repetitions:
        if one.cut_off is not None:
            kind = [] if one.cut_off.kind == "wrong" else [one.cut_off.kind]
            yield f"the one cut off: {' '.join((*kind, *describe(one.cut_off)))}"
        if one.apart is False:
            yield "afterwards NOT IN ONE CHAIN"
        elif one.apart and struck.fault == "partition":
            yield "the one cut off certified nothing, and is in one chain with the others afterwards"
    if struck.error:
        yield struck.error


def describe(outcome: Outcome) -> Iterator[str]:
    """Say of an outcome more than its kind."""
    said = "" if outcome.claimed in (None, outcome.contributors) else f", says over {outcome.claimed}"
    match outcome.kind:
        case "exact":
            yield f"over {outcome.contributors}{said}" + (f", {outcome.text}" if outcome.text else "")
        case "wrong":
            parts = sorted(outcome.shares.items(), key=lambda item: -item[1])
            over = ", ".join(f"{share:.0%} over {name}" for name, share in parts)
            yield f"{outcome.wrong_share:.0%} wrong ({over or 'of no mean'}{said})"
        case "error":
            yield outcome.text


CASE: Final = Case(spec=FaultsBench, run=run, lines=to_lines, sound=attrgetter("ok"), options=LongCaseOptions)
