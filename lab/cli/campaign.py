"""`shoal campaign`: many seeded faults in swarms of real processes on this machine, every round recomputed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.long_runs import LongRunOptions, run_and_report, tell
from shoal.cli.render import ShowNow
from shoal.cli.text import count
from shoal.lab.campaigns.settings import Campaign

if TYPE_CHECKING:
    from shoal.lab.campaigns.campaign_report import CampaignReport, RunRecord


def campaign(chosen: Campaign, options: LongRunOptions) -> None:
    """Strike swarms of real nodes with kills, stops and cut lanes, and check every round that they certify."""
    from shoal.lab.campaigns.campaign_report import ok, to_json

    run_and_report(options, "campaign", partial(run_to_end, chosen), to_json=to_json, summary=summary, ok=ok)


def run_to_end(chosen: Campaign, out: Path, _: ShowNow) -> CampaignReport:
    """Do the campaign. Raises ShoalError, KeyboardInterrupt if interrupted, or an ExceptionGroup of its tasks'."""
    import trio

    from shoal.lab.campaigns.campaign import run_campaign

    def tell_run(record: RunRecord) -> None:
        tell(run_line(record, chosen.runs), failed=record.failed, problems=record.problems)

    return trio.run(partial(run_campaign, chosen, out, tell_run))


def run_line(record: RunRecord, runs: int) -> str:
    """`run 12 of 200, 4xint8: kill_lead node 2 at reduce 0.41, round 57 +1.31 s, whole after 5.1 s, 4 rounds exact`."""
    parts = [record.struck or record.run.kind]
    if record.delay_s is not None:
        parts.append(f"round {record.round} {record.delay_s:+.2f} s of at most {record.bound_s:.1f} s")
    if record.found.evicted:
        parts.append(f"went on without {count(record.found.evicted, 'survivor')}")
    if record.whole_s is not None:
        parts.append(f"whole after {record.whole_s:.1f} s")
    parts.append("FAILED" if record.failed else f"{count(record.found.rounds_checked, 'round')} exact")
    return f"run {record.run.number} of {runs}, {record.run.group.name}: {', '.join(parts)}"


def summary(report: CampaignReport, out: Path) -> list[str]:
    """Summarise a campaign, a fact a line; the last says whether all was as it should be."""
    from shoal.lab.campaigns.campaign_report import ok

    lines = [
        f"runs       {report.runs} of {report.runs_drawn}, {count(report.rounds_checked, 'round')} recomputed, "
        f"in {report.wall_s:.0f} s",
        f"exactness  {count(report.wrong_values, 'wrong value')}, {count(report.forks, 'fork')}, "
        f"{count(report.broken_votes, 'broken vote')}, {report.unverified} not verified",
        f"deadlines  {count(report.late_rounds, 'late round')}, {report.unrecovered} not recovered; the longest round "
        f"took {report.longest_round_share:.0%} of what it may, {count(report.evicted_survivors, 'survivor')} evicted, "
        f"{report.unaffected_absent} unaffected absent",
    ]
    if report.lies:
        lines.append(f"liars      {', '.join(f'{told} lies in {name}' for name, told in report.lies.items())}")
    for kind, found in report.by_fault.items():
        took = "" if found.delay_s is None else f", {found.delay_s}"
        lines.append(f"fault      {kind}: {count(found.runs, 'run')}{took}")
    if report.failed_runs:
        numbers = ", ".join(str(number) for number in report.failed_runs)
        return [*lines, f"FAILED     runs {numbers}; see {out / 'failures'}"]
    if report.runs != report.runs_drawn:
        return [*lines, "FAILED     not all runs were done"]
    if not ok(report):
        return [*lines, f"FAILED     no lie was told in {', '.join(report.silent)}"]
    return [*lines, f"report     {out / 'campaign.json'}", "all is as it should be"]
