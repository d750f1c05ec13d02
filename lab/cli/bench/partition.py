"""`shoal bench partition`: two and two nodes apart for a while, and what becomes of the work done meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from shoal.cli.render import ShowNow
from shoal.cli.text import count, in_one_line
from shoal.lab.case import Case, CaseOptions
from shoal.node.options import Option

if TYPE_CHECKING:
    from shoal.lab.bench.partition import PartitionResult


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionOptions(CaseOptions):
    """What the user asked `shoal bench partition` for."""

    seconds: Annotated[float, Option("--seconds", help="For how long the halves are apart.")] = 30.0
    seed: Annotated[int, Option("--seed", help="Of the parameters and the data.")] = 1
    out: Annotated[
        Path | None, Option("--out", help="Where the report and the nodes' folders stay.", metavar="FOLDER")
    ] = None


def _run(options: PartitionOptions, tell: ShowNow) -> PartitionResult:
    """Part four nodes two and two, heal it, and account for every step that any of them has made.

    Only the half with the previous lead may certify while the other trains locally; afterwards there is one chain, and
    every step is counted once. Needs network namespaces; the command ends with exit code 1 if anything else is found.
    """
    from shoal.lab.bench.partition import bench_partition

    return bench_partition(options.seconds, options.seed, options.out)


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


def to_document(result: PartitionResult) -> Mapping[str, object]:
    """The result under the names of its fields, and whether it holds."""
    from shoal.lab.bench.partition import document

    return document(result)


partition: Final = Case(
    spec=PartitionOptions,
    run=_run,
    lines=to_lines,
    document=to_document,
    sound=attrgetter("holds"),
)
