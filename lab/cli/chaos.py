"""`shoal chaos`: drawn scenarios of all kinds of faults in swarms of real processes, until the time is over."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.long_runs import LongRunOptions, run_and_report, tell
from shoal.cli.render import ShowNow
from shoal.cli.text import count, in_one_line
from shoal.lab.campaigns.settings import Chaos

if TYPE_CHECKING:
    from shoal.lab.campaigns.chaos_report import ChaosReport, ScenarioRecord


def chaos(chosen: Chaos, options: LongRunOptions) -> None:
    """Strike swarms of real nodes with every kind of fault in every phase, and check all that they certify.

    Each scenario is a swarm of its own with a few faults, drawn from the seed: processes killed, stopped, restarted,
    leaving and joining, links apart, slow or cut, files damaged, clocks set, folders put back from old copies,
    addresses changed. The command ends with exit code 1 if any value is wrong, two nodes differ, or a round comes
    later than the protocol's deadlines allow. The folder --out has chaos.json with every fault's delay, and the
    folders of the scenarios that failed.
    """
    from shoal.lab.campaigns.chaos_report import ok, to_json

    run_and_report(options, "chaos", partial(run_to_end, chosen), to_json=to_json, summary=summary, ok=ok)


def run_to_end(chosen: Chaos, out: Path, _: ShowNow) -> ChaosReport:
    """Do it. Raises ShoalError, KeyboardInterrupt if interrupted, or an ExceptionGroup of its tasks'."""
    import trio

    from shoal.lab.campaigns.chaos import run_chaos

    def tell_scenario(record: ScenarioRecord) -> None:
        tell(scenario_line(record), failed=record.failed, problems=record.problems)

    return trio.run(partial(run_chaos, chosen, out, tell_scenario))


def scenario_line(record: ScenarioRecord) -> str:
    """`scenario 3, 5 nodes, int8: 14 of 14 rounds exact; kill at reduce; the longest round took 8.1 s of 61.2 s`."""
    done = [f"{fault.kind} at {fault.phase or 'start'}" for fault in record.faults if fault.error is None]
    longest = f"the longest round took {record.longest_round_s:.1f} s of {record.bound_s:.1f} s"
    parts = [", ".join(done) or "no fault", longest]
    if record.missed:
        parts.append(f"{count(record.missed, 'fault')} not done")
    word = "FAILED" if record.failed else "exact"
    codec = record.strategy if record.codec is None else f"{record.strategy} in {record.codec}"
    codec += f" with {', '.join(record.kinds)}" if record.programs else ""
    return (
        f"scenario {record.number}, {count(record.nodes, 'node')}, {codec}: {record.rounds_certified} of "
        f"{count(record.rounds, 'round')} {word}; {'; '.join(parts)}"
    )


def summary(report: ChaosReport, out: Path) -> list[str]:
    """Summarise a chaos campaign, a fact a line; the last says whether all was as it should be."""
    from shoal.lab.campaigns.chaos_report import ok

    lines = [
        f"scenarios  {report.scenarios} in {report.wall_s / 60:.1f} minutes, {count(report.rounds_certified, 'round')} "
        f"certified and computed again",
        f"exactness  {count(report.wrong_values, 'wrong value')}, {count(report.forks, 'fork')}, "
        f"{count(report.broken_votes, 'broken vote')}, {report.unverified} not verified",
        f"deadlines  {count(report.late_rounds, 'late round')}",
        f"faults     {report.faults_done} done, {report.faults_missed} could not be",
    ]
    if report.without_links is not None:
        over = count(len(report.passed_over), "scenario")
        lines.append(f"links      left alone, {over} that strike some passed over: {in_one_line(report.without_links)}")
    for kind, found in report.by_kind.items():
        took = "" if found.delay_s is None else f", {found.delay_s}"
        lines.append(f"fault      {kind}: {found.done} done{took}")
    if report.failed:
        numbers = ", ".join(str(number) for number in report.failed)
        again = f"shoal chaos --seed {report.seed} --only {report.failed[0]}"
        return [*lines, f"FAILED     scenarios {numbers}; see {out / 'scenarios'}, and try again: {again}"]
    if not ok(report):
        return [*lines, "FAILED     nothing was done"]
    return [*lines, f"report     {out / 'chaos.json'}", "all is as it should be"]
