"""`shoal soak`: a swarm of real nodes that trains for hours with a fault a minute, and whether anything grows."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.long_runs import LongRunOptions, run_and_report, tell
from shoal.cli.render import ShowNow
from shoal.cli.text import count, in_one_line, quantity
from shoal.lab.campaigns.settings import Soak

if TYPE_CHECKING:
    from shoal.lab.campaigns.soak_measures import Verdict
    from shoal.lab.campaigns.soak_plan import SoakFault
    from shoal.lab.campaigns.soak_report import SoakFaultRecord, SoakReport

PROBLEMS_SHOWN = 10
_IN_BYTES = ("rss", "disk", "kept")


def soak(chosen: Soak, options: LongRunOptions) -> None:
    """Let a swarm of real nodes train for hours with a fault a minute, and see whether anything grows.

    Memory, threads and open descriptors of every process and the size of every data folder are sampled; every round is
    computed again. The command ends with exit code 1 if anything grows or any value is wrong.
    """
    from shoal.lab.campaigns.soak_report import ok, to_json

    run_and_report(options, "soak", partial(run_to_end, chosen), to_json=to_json, summary=summary, ok=ok)


def run_to_end(chosen: Soak, out: Path, _: ShowNow) -> SoakReport:
    """Do it. Raises ShoalError, KeyboardInterrupt if interrupted, or an ExceptionGroup of its tasks'."""
    import trio

    from shoal.lab.campaigns.soak import run_soak

    def tell_fault(record: SoakFaultRecord) -> None:
        tell(fault_line(record), failed=record.error is not None)

    return trio.run(partial(run_soak, chosen, out, tell_fault))


def fault_line(record: SoakFaultRecord) -> str:
    """`fault 12, minute 12.0: kill node 2 for 8.1 s in round 168; whole 6.2 s afterwards`."""
    strike = record.strike
    faults = [fault_words(one) for one in (strike, strike.beside) if one is not None]
    failed = "" if record.error is None else f"; not done: {in_one_line(record.error)}"
    return (
        f"fault {strike.number}, minute {record.struck_at_s / 60:.1f}: {' beside '.join(faults)} "
        f"in round {record.round}; whole {record.whole_s:.1f} s afterwards{failed}"
    )


def fault_words(strike: SoakFault) -> str:
    """`clock node 2 by +3,600 s for 8.1 s`."""
    who = " and ".join(str(node) for node in strike.nodes)
    ahead = f" by {strike.ahead_s:+,.0f} s" if strike.ahead_s else ""
    lasting = f" for {strike.lasts_s:.1f} s" if strike.lasts_s else ""
    return f"{strike.kind} node {who}{ahead}{lasting}"


def summary(report: SoakReport, out: Path) -> list[str]:
    """Summarise a soak, a fact a line; the last says whether all was as it should be."""
    from shoal.lab.campaigns.soak_report import ok

    lines = [
        f"soak       {count(report.nodes, 'node')}, {report.seconds / 60:.1f} minutes, "
        f"{count(report.rounds, 'round')}, {count(len(report.faults), 'fault')} of {report.faults_drawn}",
        f"exactness  {count(report.rounds_checked, 'round')} recomputed, {count(report.wrong_values, 'wrong value')}, "
        f"{count(report.forks, 'fork')}, {count(report.broken_votes, 'broken vote')}, {report.unverified} not verified",
        f"longest    {report.longest_gap_s:.1f} s between two rounds, of at most {report.gap_bound_s:.1f} s",
    ]
    if report.lies:
        lines.append(f"liar       told {count(report.lies, 'lie')}")
    if report.without_links is not None:
        lines.append(f"links      left alone: {in_one_line(report.without_links)}")
    lines += [verdict_line(verdict) for verdict in report.verdicts]
    if report.beyond_chain_per_h is not None:
        mark = "  GROWS" if report.grows_beyond_chain else ""
        lines.append(
            f"chain      {count(report.entry_bytes, 'byte')} an entry in memory; beyond it a daemon grew by at most "
            f"{report.beyond_chain_per_h / 1e6:.2f} MB an hour{mark}"
        )
    if ok(report):
        return [*lines, f"report     {out / 'soak.json'}", "all is as it should be"]
    reasons = [] if report.trouble is None else [in_one_line(report.trouble)]
    reasons += [f"{v.measure} of node {v.node}'s {v.role} grows" for v in report.grown]
    reasons += ["a daemon grows beyond its chain"] if report.grows_beyond_chain else []
    reasons += [in_one_line(problem) for problem in report.problems[:PROBLEMS_SHOWN]]
    return [*lines, *(f"FAILED     {reason}" for reason in reasons or ["nothing was checked"])]


def verdict_line(verdict: Verdict) -> str:
    """`rss        node 0 daemon: 181.2 MB → 182.0 MB, +0.8 MB of at most 16.8 MB`."""

    def shown(value: float) -> str:
        return quantity(int(value), "B") if verdict.measure in _IN_BYTES else f"{value:.0f}"

    compared = "" if verdict.lives == 1 else f", {verdict.lives} lives at equal age"
    each = " a round" if verdict.measure == "kept" else ""
    sign = "-" if verdict.growth < 0 else "+"
    mark = "" if verdict.holds else "  GROWS"
    return (
        f"{verdict.measure:<12}node {verdict.node} {verdict.role}: "
        f"{shown(verdict.before)} → {shown(verdict.after)}{each}, "
        f"{sign}{shown(abs(verdict.growth))} of at most {shown(verdict.limit)}{compared}{mark}"
    )
