"""Outcome of a campaign: a record per run, and the report over all of them."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from shoal.lab.bench.hostile_member import ELECTORATE
from shoal.lab.campaigns.campaign_check import Findings
from shoal.lab.campaigns.campaign_plan import Run


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of one run.

    released_at, struck_at: wall clock. round_s: from the beginning of the faulted round to its certificate, in the
    median of the survivors, without the time that the victim stood still to be struck. delay_s: how much longer that
    was than the group's undisturbed rounds. whole_s: from the fault until all contributed again and had begun another
    round. bound_s: the most that any round may take. lies: how many its liar had told by then. trouble: why the swarm
    did not recover, if so.
    """

    run: Run
    round: int = 0
    struck: str = ""
    released_at: float = 0.0
    struck_at: float = 0.0
    round_s: float | None = None
    delay_s: float | None = None
    whole_s: float | None = None
    bound_s: float = 0.0
    lies: int = 0
    found: Findings = Findings()
    trouble: str | None = None

    @property
    def problems(self) -> tuple[str, ...]:
        """Everything about the run that was not as it should be, in words."""
        troubles = [] if self.trouble is None else [self.trouble]
        if not troubles and not self.found.rounds_checked:
            troubles.append("no round was recomputed")
        return (*troubles, *self.found.problems)

    @property
    def failed(self) -> bool:
        """True if there are problems."""
        return bool(self.problems)


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds over several runs; p90 is the least that nine in ten do not exceed."""

    median: float
    p90: float
    max: float

    def __str__(self) -> str:
        return f"{self.median:+.2f} s median, {self.p90:+.2f} s p90, {self.max:+.2f} s max"


class KindReport(msgspec.Struct, frozen=True, kw_only=True):
    """All runs of one kind of fault; delay_s is None where no round of them was certified."""

    runs: int
    delay_s: Spread | None


class CampaignReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole campaign. runs: how many were done, of `runs_drawn`. calm_s: by group. failed_runs: their numbers.

    cut_coverage: the least coverage of a round in which lanes were cut. lies: told in each swarm with a liar, by group.
    silent: those groups whose liar could have lied at any time, and did not.
    """

    seed: int
    runs: int
    runs_drawn: int
    peers: tuple[int, ...]
    codecs: tuple[str, ...]
    strategies: tuple[str, ...]
    rounds_checked: int
    wrong_values: int
    forks: int
    broken_votes: int
    late_rounds: int
    unverified: int
    unrecovered: int
    evicted_survivors: int
    unaffected_absent: int
    cut_coverage: float | None
    failed_runs: tuple[int, ...]
    by_fault: dict[str, KindReport]
    calm_s: dict[str, float]
    lies: dict[str, int] = {}
    silent: tuple[str, ...] = ()
    longest_round_share: float
    wall_s: float


def report_of(
    seed: int, drawn: Sequence[Run], records: Sequence[RunRecord], calm_s: Mapping[str, float], *, wall_s: float
) -> CampaignReport:
    """The report over the runs that were done, of those that were drawn.

    longest_round_share: the largest share of its bound that a faulted round took.
    """
    kinds: dict[str, list[RunRecord]] = defaultdict(list)
    for record in records:
        kinds[record.run.kind].append(record)
    found = [record.found for record in records]
    shares = [record.round_s / record.bound_s for record in records if record.round_s is not None]
    return CampaignReport(
        seed=seed,
        runs=len(records),
        runs_drawn=len(drawn),
        peers=tuple(dict.fromkeys(run.group.peers for run in drawn)),
        codecs=tuple(dict.fromkeys(run.group.codec for run in drawn)),
        strategies=tuple(dict.fromkeys(run.group.strategy for run in drawn)),
        rounds_checked=sum(one.rounds_checked for one in found),
        wrong_values=sum(one.wrong_values for one in found),
        forks=sum(one.forks for one in found),
        broken_votes=sum(one.broken_votes for one in found),
        late_rounds=sum(one.late_rounds for one in found),
        unverified=sum(one.unverified for one in found),
        unrecovered=sum(record.trouble is not None for record in records),
        evicted_survivors=sum(one.evicted for one in found),
        unaffected_absent=sum(one.absent for one in found),
        cut_coverage=min((one.coverage for one in found if one.coverage is not None), default=None),
        failed_runs=tuple(record.run.number for record in records if record.failed),
        by_fault={
            kind: KindReport(runs=len(of_kind), delay_s=spread([r.delay_s for r in of_kind if r.delay_s is not None]))
            for kind, of_kind in sorted(kinds.items())
        },
        calm_s=dict(calm_s),
        lies=_lies_told(records),
        silent=_silent(records),
        longest_round_share=round(max(shares, default=0.0), 3),
        wall_s=round(wall_s, 1),
    )


def _lies_told(records: Sequence[RunRecord]) -> dict[str, int]:
    told: dict[str, int] = {}
    for record in records:
        if record.run.group.company == "liar":
            name = record.run.group.name
            told[name] = max(record.lies, told.get(name, 0))
    return told


def _silent(records: Sequence[RunRecord]) -> tuple[str, ...]:
    told, groups = _lies_told(records), {record.run.group for record in records}
    return tuple(sorted(group.name for group in groups if told.get(group.name) == 0 and group.lie != ELECTORATE))


def ok(report: CampaignReport) -> bool:
    """True if all runs were done, and all were as they should be, and every liar that could has lied."""
    return report.runs == report.runs_drawn and not report.failed_runs and not report.silent


def spread(seconds: Sequence[float]) -> Spread | None:
    """Median, 90th percentile (nearest rank) and maximum; None of nothing."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    p90 = ordered[math.ceil(0.9 * len(ordered)) - 1]
    return Spread(median=round(statistics.median(ordered), 2), p90=round(p90, 2), max=round(ordered[-1], 2))


def to_json(report: CampaignReport) -> str:
    """The report as one JSON document."""
    return msgspec.json.format(msgspec.json.encode(report)).decode()
