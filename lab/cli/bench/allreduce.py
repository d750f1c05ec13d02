"""`shoal bench allreduce`, and `shoal bench compare`, which sets it beside others and writes the page of benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

from shoal.cli.options import parse_numbers
from shoal.cli.render import ShowNow
from shoal.cli.text import number, quantity
from shoal.lab.case import Case, LongCaseOptions
from shoal.node.options import Option

if TYPE_CHECKING:
    from shoal.lab.bench.allreduce import Allreduce
    from shoal.lab.bench.compare import Comparison

Numel = Annotated[int, Option("--numel", help="How many values.")]
Iters = Annotated[int, Option("--iters", help="Measured rounds; two more warm up.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class AllreduceOptions(LongCaseOptions):
    """What the user asked `shoal bench allreduce` for."""

    peers: Annotated[int, Option("--peers", help="How many nodes, each a process of its own.")] = 4
    numel: Numel = 25_000_000
    codec: Annotated[str, Option("--codec", help="fp32, bf16, int8 or int4.")] = "fp32"
    iters: Iters = 5
    fault: Annotated[
        Literal["none", "sigkill", "sigstop"],
        Option("--fault", help="Strike one node in mid-reduce, after the undisturbed rounds, as often."),
    ] = "none"
    sockets: Annotated[
        bool, Option("--sockets", help="All through sockets, as between machines: nodes share no memory.")
    ] = False


def _run_allreduce(options: AllreduceOptions, tell: ShowNow) -> Allreduce:
    """Measure rounds of real nodes on loopback, undisturbed or struck; exits 1 if any value is wrong."""
    import trio

    from shoal.lab.bench.allreduce import Bench, measure

    bench = Bench(
        peers=options.peers,
        numel=options.numel,
        codec=options.codec,
        iters=options.iters,
        fault=options.fault,
        sockets=options.sockets,
    )
    return trio.run(partial(measure, bench, tell))


def _summary(result: Allreduce) -> list[str]:
    """What was measured, a fact a line."""
    parts = ", ".join(f"{name.removesuffix('_s').replace('_', ' ')} {s:.3f}" for name, s in result.breakdown.items())
    error = "not measured" if result.max_abs_error is None else f"{result.max_abs_error:.2e}"
    exact = {True: "exact", False: "NOT EXACT", None: "not recomputed"}[result.exact]
    peak = "not measured" if result.peak_extra_bytes is None else quantity(result.peak_extra_bytes, "B")
    lines = [
        f"reduce     {number(result.median_s)} s, median of {len(result.times_s)}; {result.peers} peers, "
        f"{result.numel} values, {result.codec}",
        f"round      {number(result.round_s)} s: {parts}",
        f"wire       {quantity(result.wire_bytes_per_peer, 'B')} sent per peer and round",
        f"memory     {peak} at the peak, beyond input and output",
        f"values     {'identical' if result.identical else 'NOT IDENTICAL'}, {exact}, largest error {error}",
    ]
    if result.fault.kind != "none":
        same = "identical" if result.fault.survivors_identical else "NOT IDENTICAL"
        exact = "exact" if result.fault.exact else "NOT EXACT"
        lines.append(f"fault      {result.fault.kind}: +{result.fault.delay_s:.3f} s, survivors {same}, {exact}")
    return lines


allreduce: Final = Case(spec=AllreduceOptions, run=_run_allreduce, lines=_summary, sound=attrgetter("ok"))


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions(LongCaseOptions):
    """What the user asked `shoal bench compare` for, as written."""

    repeat: Annotated[int, Option("--repeat", help="How often everything runs, in turn.")] = 3
    peers: Annotated[str, Option("--peers", help="Numbers of nodes, like 2,4.", metavar="N,N…")] = "2,4"
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
    campaign: Annotated[
        Path | None, Option("--campaign", help="A report in JSON to put on the page too.", metavar="FILE")
    ] = None
    out: Annotated[Path | None, Option("--out", "-o", help="The page, in Markdown.", metavar="FILE")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPage:
    """What was compared, and the page of it; out: where that was written."""

    found: Comparison
    page: str
    out: Path | None


def _run_compare(options: CompareOptions, tell: ShowNow) -> ComparedPage:
    """Run ours beside gloo and other systems, in turn, and write the page of benchmarks."""
    import trio

    from shoal.lab.bench import compare
    from shoal.lab.bench.compare_page import load_campaign, render
    from shoal.lab.bench.rivals import parse_rivals
    from shoal.lab.page import publish

    wanted = compare.Compare(
        repeat=options.repeat,
        peers=parse_numbers(options.peers, "--peers"),
        numel=options.numel,
        iters=options.iters,
        fault_iters=options.fault_iters,
        rivals=parse_rivals(options.rival, options.rival_regex),
    )
    campaign = None if options.campaign is None else load_campaign(options.campaign)
    found = trio.run(partial(compare.compare, wanted, tell))
    page = render(found, campaign)
    if options.out is not None:
        publish(page, options.out)
    return ComparedPage(found=found, page=page, out=options.out)


compare: Final = Case(
    spec=CompareOptions,
    run=_run_compare,
    rows=attrgetter("found.rows"),
    lines=lambda compared: [f"written to {compared.out}" if compared.out else compared.page],
    document=attrgetter("found"),
    sound=attrgetter("found.ok"),
)
