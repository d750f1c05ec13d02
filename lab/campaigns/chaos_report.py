"""Outcome of a chaos campaign: a record per scenario, and the report over all."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import msgspec

from shoal.lab.campaigns.campaign_report import Spread, spread
from shoal.lab.campaigns.chaos_swarm import Program
from shoal.testnet.reports.report import FaultReport, Report, failures


class ScenarioRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of one scenario.

    faults: each with `delay_s`, how much longer its round took than the median of undisturbed ones. A fault with an
    `error` was not done: its moment never came, or there was nothing to strike. late_rounds: those that came later
    after the one before than `bound_s`. load: of the machine, in runnable processes a core. programs: of nodes that are
    not `shoal run` as it ships; struck: how often those that strike did, such as a liar, who is judged in nothing. Each
    problem in words.
    """

    number: int
    nodes: int
    strategy: str
    codec: str | None
    rounds: int
    rounds_certified: int
    wall_s: float
    load: float
    faults: tuple[FaultReport, ...]
    wrong_values: int
    forks: int
    broken_votes: int
    late_rounds: int
    unverified: int
    longest_round_s: float
    bound_s: float
    programs: dict[int, Program] = {}
    struck: dict[int, int] = {}
    problems: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """True if anything about the scenario was not as it should be."""
        return bool(self.problems)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of its programs, each once."""
        return tuple(sorted({program.kind for program in self.programs.values()}))

    @property
    def missed(self) -> int:
        """Number of its faults that were not done; a liar that told no lie is one."""
        return sum(fault.error is not None for fault in self.faults) + sum(not done for done in self.struck.values())


class FaultsOfAKind(msgspec.Struct, frozen=True, kw_only=True):
    """All faults of one kind, or in one phase. missed: how many more were not done."""

    done: int
    missed: int
    delay_s: Spread | None


class ChaosReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole campaign. without_links: why nothing was done to links, if so.

    by_strategy, by_program: how many scenarios of each. failed and passed_over are numbers of scenarios; passed over
    are those that strike links where that cannot be done.
    """

    seed: int
    minutes: float
    wall_s: float
    without_links: str | None
    scenarios: int
    rounds_certified: int
    wrong_values: int
    forks: int
    broken_votes: int
    late_rounds: int
    unverified: int
    faults_done: int
    faults_missed: int
    failed: tuple[int, ...]
    passed_over: tuple[int, ...]
    by_kind: dict[str, FaultsOfAKind]
    by_phase: dict[str, FaultsOfAKind]
    by_strategy: dict[str, int]
    by_program: dict[str, int]
    records: tuple[ScenarioRecord, ...]


def report_of(
    seed: int,
    records: Sequence[ScenarioRecord],
    *,
    minutes: float,
    wall_s: float,
    without_links: str | None,
    passed_over: Sequence[int],
) -> ChaosReport:
    """The report over the scenarios that were done."""
    kinds: dict[str, list[FaultReport]] = defaultdict(list)
    phases: dict[str, list[FaultReport]] = defaultdict(list)
    for record in records:
        for fault in record.faults:
            kinds[fault.kind].append(fault)
            phases[fault.phase or "start"].append(fault)
    return ChaosReport(
        seed=seed,
        minutes=minutes,
        wall_s=round(wall_s, 1),
        without_links=without_links,
        scenarios=len(records),
        rounds_certified=sum(record.rounds_certified for record in records),
        wrong_values=sum(record.wrong_values for record in records),
        forks=sum(record.forks for record in records),
        broken_votes=sum(record.broken_votes for record in records),
        late_rounds=sum(record.late_rounds for record in records),
        unverified=sum(record.unverified for record in records),
        faults_done=sum(len(record.faults) + len(record.struck) - record.missed for record in records),
        faults_missed=sum(record.missed for record in records),
        failed=tuple(record.number for record in records if record.failed),
        passed_over=tuple(passed_over),
        by_kind={kind: _of_a_kind(faults) for kind, faults in sorted(kinds.items())},
        by_phase={phase: _of_a_kind(faults) for phase, faults in sorted(phases.items())},
        by_strategy=dict(Counter(record.strategy for record in records)),
        by_program=dict(Counter(kind for record in records for kind in record.kinds)),
        records=tuple(records),
    )


def _of_a_kind(faults: Sequence[FaultReport]) -> FaultsOfAKind:
    done = [fault for fault in faults if fault.error is None]
    delays = [fault.delay_s for fault in done if fault.delay_s is not None]
    return FaultsOfAKind(done=len(done), missed=len(faults) - len(done), delay_s=spread(delays))


def ok(report: ChaosReport) -> bool:
    """True if anything was done, and all was as it should be."""
    return report.faults_done > 0 and not report.failed


def problems_of(report: Report, *, broken: Sequence[str], late: Sequence[str]) -> tuple[str, ...]:
    """List why a scenario failed. Faults that could not be done are no reason: they are counted apart."""
    return (*broken, *late, *report.unverified, *failures(report))


def late_rounds(report: Report, bound_s: float) -> tuple[float, list[str]]:
    """(the longest that a round came after the one before it, which came later than `bound_s` allows).

    Counted from the first certificate of a round to the first of the next, whoever has it; round 1, which waits for
    the start of all, is left out.
    """
    ends: dict[int, float] = {}
    for node in report.nodes:
        for span in node.spans:
            if span.end_s is not None:
                ends[span.round] = min(span.end_s, ends.get(span.round, span.end_s))
    took = {number: end - ends[number - 1] for number, end in ends.items() if number - 1 in ends}
    late = [
        f"round {number}: {seconds:.1f} s after the one before, more than {bound_s:.1f} s"
        for number, seconds in sorted(took.items())
        if seconds > bound_s
    ]
    return max(took.values(), default=0.0), late


def to_json(report: ChaosReport) -> str:
    """The report as one JSON document; of what failed also the commands that do it again."""
    again = [f"shoal chaos --seed {report.seed} --only {number}" for number in report.failed]
    content = msgspec.to_builtins(report) | {"ok": ok(report), "again": again}
    return msgspec.json.format(msgspec.json.encode(content)).decode()
