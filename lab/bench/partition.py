"""`shoal bench partition`: four real nodes, two and two apart for a while, and what becomes of the work done meanwhile.

    before ─► halves apart ─────────────────────────────► heal ─► one chain ─► all contribute again
              one half certifies, the other trains alone          every step that was made is counted once

The nodes run in network namespaces whose packet filters let nothing pass between the halves. Every step of every node
can be found again (`shoal.lab.bench.tally_workload`): what a contribution holds is read from the values that
the swarm reduced, and compared with what the node's trainer has noted of its steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Final

import msgspec
import trio

from shoal.cli.render import ShowNow
from shoal.cli.text import count, in_one_line
from shoal.lab.bench.step_tally import NodeLog, NodeTally, kept_plan, noting_command, read_node, tally
from shoal.lab.bench.tally_workload import WORKLOAD_NAME
from shoal.lab.case import Case, Spec
from shoal.lab.targets import Row, Target, missed
from shoal.node.option import Option, Within
from shoal.protocol.errors import NetworkError
from shoal.testnet.nodes import Runtime
from shoal.testnet.progress import FaultInjected, Progress
from shoal.testnet.reports.report import Report
from shoal.testnet.scenario import Fault, Scenario
from shoal.testnet.swarm import run_testnet

HALVES: Final = ((0, 1), (2, 3))
APART_ROUND: Final = 4
ROUNDS_AFTER: Final = 10
NUMEL: Final = 50_000
CHUNK_VALUES: Final = 4096
INNER_STEPS: Final = 20
STEP_S: Final = 0.1
STALENESS_ROUNDS: Final = 60
"""Age up to which a missed contribution may count. Rounds are short here; in a swarm of longer ones the default does.
"""
WITHIN_S: Final = 10.0
"""Time from the heal within which there must be one chain and full speed."""
ONE_CHAIN: Final = Target(name="one chain after the heal", unit="s", most=WITHIN_S)
FULL_SPEED: Final = Target(name="a round of all four after the heal", unit="s", most=WITHIN_S)
NONE_LOST: Final = Target(name="steps lost", most=0)
NONE_TWICE: Final = Target(name="steps counted twice", most=0)
NO_FORK: Final = Target(name="forks", most=0)
NONE_WRONG: Final = Target(name="wrong values", most=0)
NO_PROBLEM: Final = Target(name="problems", most=0)
WENT_ON: Final = Target(name="rounds certified by the half with the previous lead", least=1)
STOOD: Final = Target(name="rounds certified by the others", most=0)
TRAINED_ON: Final = Target(name="steps that the others made alone", least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionBench(Spec):
    """Options of `shoal bench partition`, and where its folders stay."""

    seconds: Annotated[float, Option("--seconds", help="For how long the halves are apart.", check=Within(5, 300))] = (
        30.0
    )
    seed: Annotated[int, Option("--seed", help="Of the parameters and the data.")] = 1
    out: Annotated[
        Path | None, Option("--out", help="Where the report and the nodes' folders stay.", metavar="FOLDER")
    ] = None


class PartitionResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `shoal bench partition`. majority: the half that went on, if any; previous_lead: the planner before.

    one_chain_s, full_speed_s: from the heal until all four are past what was certified without them, and until a round
    of all four is certified; None if that never came. round_before_s, round_after_s: medians.
    """

    seconds: float
    majority: tuple[int, ...]
    previous_lead: int
    rounds_of_majority: int
    rounds_of_others: int
    steps_of_others: int
    one_chain_s: float | None
    full_speed_s: float | None
    round_before_s: float
    round_after_s: float
    nodes: tuple[NodeTally, ...]
    steps_made: int
    steps_lost: int
    steps_counted_twice: int
    forks: int
    wrong_values: int
    digests_equal: bool
    rounds_certified: int
    problems: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """True if all targets are met."""
        return not missed(self.rows)

    @property
    def rows(self) -> tuple[Row, ...]:
        """Measured values, each with its target."""
        led = self.previous_lead in self.majority
        return (
            WENT_ON.row(self.rounds_of_majority if led else 0),
            STOOD.row(self.rounds_of_others),
            TRAINED_ON.row(self.steps_of_others),
            ONE_CHAIN.row(inf if self.one_chain_s is None else self.one_chain_s),
            FULL_SPEED.row(inf if self.full_speed_s is None else self.full_speed_s),
            NONE_LOST.row(self.steps_lost),
            NONE_TWICE.row(self.steps_counted_twice),
            NO_FORK.row(self.forks),
            NONE_WRONG.row(self.wrong_values),
            NO_PROBLEM.row(len(self.problems) + (not self.digests_equal)),
        )


def partition_scenario(seconds: float, seed: int) -> Scenario:
    """Scenario of a partition, two nodes and two, for so long, with some rounds before and after."""
    # No round is shorter than its steps, so the half that goes on is not done before the heal.
    rounds = APART_ROUND + int(seconds / (INNER_STEPS * STEP_S)) + ROUNDS_AFTER
    return Scenario(
        nodes=4,
        rounds=rounds,
        seed=seed,
        codec="fp32",
        workload=WORKLOAD_NAME,
        options={"numel": NUMEL, "step_s": STEP_S},
        inner_steps=INNER_STEPS,
        round={"chunk_values": CHUNK_VALUES, "staleness_rounds": STALENESS_ROUNDS},
        faults=(Fault(kind="partition", groups=HALVES, round=APART_ROUND, duration_s=seconds),),
    )


async def _run(bench: PartitionBench, folder: Path) -> PartitionResult:
    scenario = partition_scenario(bench.seconds, bench.seed)
    apart_at: list[float] = []

    def note(progress: Progress) -> None:
        if isinstance(progress, FaultInjected):
            apart_at.append(time.time())

    report = await run_testnet(scenario, folder, note, runtime=Runtime(command=noting_command))
    if report.trouble is not None or not apart_at:
        raise NetworkError(f"the nodes did not get through it: {report.trouble or 'they were never apart'}")
    return await trio.to_thread.run_sync(measure, report, folder, apart_at[0])


def run(bench: PartitionBench, tell: ShowNow) -> PartitionResult:
    """Part four nodes two and two, heal it, and account for every step that any of them has made.

    Only the half with the previous lead may certify while the other trains locally; afterwards there is one chain, and
    every step is counted once. Needs network namespaces; the command ends with exit code 1 if anything else is found.
    """
    if bench.out is not None:
        return trio.run(_run, bench, bench.out)
    with TemporaryDirectory(prefix="shoal-bench-partition-") as name:
        return trio.run(_run, bench, Path(name))


# -- measuring -----------------------------------------------------------------------------------------------


def measure(report: Report, folder: Path, apart_at: float) -> PartitionResult:
    """Evaluate a partition that began at `apart_at` (wall clock) from the report and the nodes' folders. Blocks."""
    seconds = report.scenario.faults[0].duration_s or 0.0
    heal_at = apart_at + seconds
    told = [read_node(node.index, node.peer_id, folder / "nodes" / str(node.index)) for node in report.nodes]
    apart = {node.index: _certified_between(node, apart_at, heal_at) for node in told}
    majority = max(HALVES, key=lambda half: max(len(apart[index]) for index in half)) if any(apart.values()) else ()
    others = [node for node in told if node.index not in majority]
    last = max((number for index in majority for number in apart[index]), default=APART_ROUND)
    problems: list[str] = []
    tallies = tuple(tally(node, told, report.scenario.rounds, (apart_at, heal_at), problems) for node in told)
    return PartitionResult(
        seconds=seconds,
        majority=majority,
        previous_lead=_lead(told, APART_ROUND - 1),
        rounds_of_majority=len(set().union(*(apart[index] for index in majority))),
        rounds_of_others=len(set().union(*(apart[node.index] for node in others))),
        steps_of_others=sum(node.between(apart_at, heal_at) for node in others),
        one_chain_s=_one_chain_s(told, last, heal_at),
        full_speed_s=_full_speed_s(told, heal_at),
        round_before_s=_round_s(told, report.scenario.rounds, until=apart_at),
        round_after_s=_round_s(told, report.scenario.rounds, since=heal_at),
        nodes=tallies,
        steps_made=sum(found.made for found in tallies),
        steps_lost=sum(found.lost for found in tallies),
        steps_counted_twice=sum(found.twice for found in tallies),
        forks=report.forks,
        wrong_values=report.wrong_values,
        digests_equal=report.digests_equal is True,
        rounds_certified=report.rounds_certified,
        problems=(*problems, *report.unverified),
    )


def _certified_between(node: NodeLog, begin: float, end: float) -> set[int]:
    """The rounds from the partition's on that a node certified in that time."""
    return {e.round for e in node.certified() if begin <= e.at <= end and e.round >= APART_ROUND}


def _lead(told: Sequence[NodeLog], number: int) -> int:
    found = kept_plan(told, number)
    planners = [] if found is None else [node.index for node in told if node.peer_id == found[0].planner]
    return planners[0] if planners else -1


def _one_chain_s(told: Sequence[NodeLog], last: int, heal_at: float) -> float | None:
    reached = [node.reached(last, heal_at) for node in told]
    return None if None in reached else round(max(at for at in reached if at is not None) - heal_at, 3)


def _full_speed_s(told: Sequence[NodeLog], heal_at: float) -> float | None:
    """Seconds from the heal until all have certified a round that all contributed to."""
    ends: dict[int, list[float]] = {}
    for node in told:
        for event in node.certified():
            if event.at > heal_at and event.contributors == len(event.members) == len(told):
                ends.setdefault(event.round, []).append(event.at)
    whole = [max(at) for at in ends.values() if len(at) == len(told)]
    return round(min(whole) - heal_at, 3) if whole else None


def _round_s(told: Sequence[NodeLog], rounds: int, *, since: float = 0.0, until: float = float("inf")) -> float:
    """The median time from one certificate to the next, of rounds of all nodes within that time."""
    took = []
    for node in told:
        ends = {e.round: e for e in node.certified() if since <= e.at <= until and e.round <= rounds}
        took += [
            event.at - ends[number - 1].at
            for number, event in ends.items()
            if number - 1 in ends and event.contributors == len(told)
        ]
    return round(statistics.median(took), 3) if took else 0.0


def to_document(result: PartitionResult) -> Mapping[str, object]:
    """The result under the names of its fields, and whether it holds."""
    return {**msgspec.to_builtins(result), "holds": result.holds}


def to_lines(result: PartitionResult) -> list[str]:
    """The result for people."""

    def after(seconds: float | None) -> str:
        return "never" if seconds is None else f"{seconds:.1f} s after the heal"

    halves = " and ".join(str(index) for index in result.majority)
    lines = [
        f"apart       {result.seconds:.0f} s; nodes {halves} went on, node {result.previous_lead} had led before",
        f"certified   {count(result.rounds_of_majority, 'round')} by them, {result.rounds_of_others} by the others, "
        f"who made {count(result.steps_of_others, 'step')} alone",
        f"one chain   {after(result.one_chain_s)}; a round of all four {after(result.full_speed_s)}",
        f"a round     {result.round_before_s:.2f} s before, {result.round_after_s:.2f} s after",
        f"steps       {result.steps_made} made, {result.steps_lost} lost, {result.steps_counted_twice} counted twice",
        f"exactness   {count(result.wrong_values, 'wrong value')}, {count(result.forks, 'fork')} in "
        f"{count(result.rounds_certified, 'round')}",
    ]
    lines += [f"problem     {in_one_line(problem)}" for problem in result.problems]
    return [*lines, "all is as it should be" if result.holds else "FAILED      this is not as it should be"]


CASE: Final = Case(spec=PartitionBench, run=run, lines=to_lines, document=to_document, sound=attrgetter("holds"))
