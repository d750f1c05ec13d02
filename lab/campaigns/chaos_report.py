"""Outcome of a chaos campaign: a record per scenario, and the report over all, for programs and for people."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from html import escape

import msgspec

from shoal.lab.campaigns.campaign_report import Spread, spread
from shoal.testnet.reports.page_parts import document, table
from shoal.testnet.reports.report import FaultReport, Report, absences
from shoal.testnet.scenario import whom


class ScenarioRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of one scenario.

    faults: each with `delay_s`, how much longer its round took than the median of undisturbed ones. A fault with an
    `error` was not done: its moment never came, or there was nothing to strike. late_rounds: those that came later
    after the one before than `bound_s`. load: of the machine, in runnable processes a core. Each problem in words.
    """

    number: int
    nodes: int
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
    problems: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """True if anything about the scenario was not as it should be."""
        return bool(self.problems)

    @property
    def missed(self) -> int:
        """Number of its faults that were not done."""
        return sum(fault.error is not None for fault in self.faults)


class FaultsOfAKind(msgspec.Struct, frozen=True, kw_only=True):
    """All faults of one kind, or in one phase. missed: how many more were not done."""

    done: int
    missed: int
    delay_s: Spread | None


class ChaosReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole campaign. without_links: why nothing was done to links, if so.

    failed and passed_over are numbers of scenarios; passed over are those that strike links where that cannot be done.
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
        faults_done=sum(len(record.faults) - record.missed for record in records),
        faults_missed=sum(record.missed for record in records),
        failed=tuple(record.number for record in records if record.failed),
        passed_over=tuple(passed_over),
        by_kind={kind: _of_a_kind(faults) for kind, faults in sorted(kinds.items())},
        by_phase={phase: _of_a_kind(faults) for phase, faults in sorted(phases.items())},
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
    problems = [*broken, *late, *report.unverified]
    if report.trouble is not None:
        problems.append(report.trouble)
    if report.rounds_certified != report.scenario.rounds:
        problems.append(f"{report.scenario.rounds - report.rounds_certified} rounds were not certified")
    if report.forks:
        problems.append(f"{report.forks} rounds have two different certificates")
    if report.wrong_values:
        problems.append(f"{report.wrong_values} applied values are not the mean of what was contributed")
    if report.digests_equal is False:
        problems.append("nodes do not hold the same state")
    problems += absences(report)
    problems += [f"node {node.index} crashed" for node in report.nodes if node.outcome == "crashed"]
    return tuple(problems)


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


# -- the page ------------------------------------------------------------------------------------------------


def render_page(report: ChaosReport) -> str:
    """`chaos.html`: the verdict, the delays by kind and by phase, every scenario and every fault."""
    good = '<span class="good">Exact.</span>' if ok(report) else '<span class="bad">Not as it should be.</span>'
    facts = (
        f"{report.scenarios} scenarios in {report.wall_s / 60:.1f} minutes, {report.rounds_certified} rounds certified "
        f"and computed again, {report.faults_done} faults ({report.faults_missed} more could not be done), "
        f"{report.wrong_values} wrong values, {report.forks} forks, {report.broken_votes} broken votes, "
        f"{report.late_rounds} late rounds."
    )
    problems = [f"scenario {record.number}: {text}" for record in report.records for text in record.problems]
    sections = [
        f'<p class="verdict">{good} {escape(facts)}</p>',
        "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in problems) + "</ul>" if problems else "",
        _passed_over(report),
        "<h2>Delays by kind of fault</h2>",
        _kinds_table("fault", report.by_kind),
        "<h2>Delays by phase</h2>",
        _kinds_table("phase", report.by_phase),
        "<h2>Scenarios</h2>",
        _scenarios_table(report.records),
        "<h2>Faults</h2>",
        _faults_table(report.records),
    ]
    return document(f"Chaos campaign, seed {report.seed}", sections)


def _passed_over(report: ChaosReport) -> str:
    if report.without_links is None:
        return ""
    numbers = ", ".join(str(number) for number in report.passed_over) or "none"
    return f"<p>Scenarios that strike links and were passed over: {numbers}. {escape(report.without_links)}</p>"


def _kinds_table(head: str, kinds: dict[str, FaultsOfAKind]) -> str:
    rows = []
    for name, found in kinds.items():
        delay = found.delay_s
        seconds = ["–"] * 3 if delay is None else [f"{s:+.2f}" for s in (delay.median, delay.p90, delay.max)]
        rows.append([name, str(found.done), str(found.missed), *seconds])
    return table([head, "done", "not done", "median s", "p90 s", "max s"], rows)


def _scenarios_table(records: Sequence[ScenarioRecord]) -> str:
    rows = [
        [
            str(record.number),
            str(record.nodes),
            record.codec or "",
            f"{record.rounds_certified} of {record.rounds}",
            f"{record.longest_round_s:.1f} of {record.bound_s:.1f}",
            f"{record.load:.1f}",
            f"{record.wall_s:.0f}",
            "FAILED" if record.failed else "exact",
        ]
        for record in records
    ]
    return table(["scenario", "nodes", "codec", "rounds", "longest s", "load a core", "wall s", ""], rows)


def _faults_table(records: Sequence[ScenarioRecord]) -> str:
    rows = [
        [
            str(record.number),
            fault.kind,
            whom(fault.node, fault.groups),
            str(fault.round),
            fault.phase or "start",
            "–" if fault.at_s is None else f"{fault.at_s:.1f}",
            "–" if fault.delay_s is None else f"{fault.delay_s:+.2f}",
            fault.error or "",
        ]
        for record in records
        for fault in record.faults
    ]
    return table(["scenario", "fault", "node", "round", "phase", "at s", "delay s", ""], rows)
