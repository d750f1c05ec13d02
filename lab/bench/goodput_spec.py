"""Specification of `shoal bench goodput`, and its result beside the targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec

from shoal.lab.bench.goodput_rows import Account
from shoal.lab.case import Numbers, Spec, parse_numbers
from shoal.lab.targets import Row, Spread, Target
from shoal.node.option import Option, Within, check_options
from shoal.testnet.scenario import NODE_LIMIT

GOODPUT: Final[Mapping[int, tuple[float, float]]] = {300: (95.0, 97.0), 120: (90.0, 94.0), 60: (80.0, 88.0)}
"""What has to be reached, and what was hoped for, in percent, by the seconds from one failure of a node to its next."""
EVERY_S: Final = Numbers(GOODPUT)
FAILURE_S: Final = Within(10, 86_400, "a node needs some seconds to start")
WRONG: Final = Target(name="wrong values", most=0)
FORKED: Final = Target(name="forks, and states that differ", most=0)
UNVERIFIED: Final = Target(name="what could not be verified", most=0)
TWICE: Final = Target(name="steps certified that were not made", most=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputBench(Spec):
    """Options of `shoal bench goodput`, and where its folders stay."""

    nodes: Annotated[
        int, Option("--nodes", help="How many nodes, each a process of its own.", check=Within(2, NODE_LIMIT))
    ] = 8
    mtbf_s: Annotated[
        Numbers,
        Option(
            "--mtbf-s",
            help="Mean seconds between failures of a node; a run for each.",
            metavar="N,N…",
            parse=parse_numbers,
        ),
    ] = EVERY_S
    minutes: Annotated[
        float, Option("--minutes", help="How long each run lasts, from its first round on.", check=Within(0.1, 600))
    ] = 10.0
    down_s: Annotated[
        float, Option("--down-s", help="Seconds until a node that failed is started again.", check=Within(1, 600))
    ] = 20.0
    step_s: Annotated[
        float, Option("--step-s", help="What a step waits in place of computing, in seconds.", check=Within(0.01, 10))
    ] = 0.1
    checkpoint_s: Annotated[
        float,
        Option(
            "--checkpoint-s",
            help="What writing a checkpoint takes where data parallel training stops and restarts, in seconds.",
            check=Within(0.1, 600),
        ),
    ] = 1.0
    seed: Annotated[int, Option("--seed", help="Of the failures.")] = 1
    out: Annotated[
        Path | None, Option("--out", help="Where the nodes' folders stay, in a folder for each run.", metavar="FOLDER")
    ] = None

    def __post_init__(self) -> None:
        check_options(self)
        for seconds in self.mtbf_s:
            FAILURE_S(seconds, "--mtbf-s")


class GoodputResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one run of `shoal bench goodput`: failures of each node every `mtbf_s` seconds.

    not_default: settings that `shoal init` does not write. load: of the machine, in runnable processes a core, before
    the start and at the end. seconds: of the window, from one certificate to another. steps_certified, steps_made: in
    it. step_s: what a step took, the median. fewest: contributors of a round. contributions: made to these rounds;
    missed: of them, those that the round went on without. restarts_s: from a start after a failure to the first step,
    of those that came so far; trainer_s: to a trainer that is ready. interval_s: the best between checkpoints where
    data parallel training stops and restarts, None for no checkpoint; parallel_of_up, parallel_of_all: its goodput.
    not_made: steps that rounds count beyond those that were made.
    """

    bench: GoodputBench
    mtbf_s: int
    not_default: tuple[str, ...]
    load: tuple[float, float]
    seconds: float
    rounds: int
    failures: int
    account: Account
    steps_certified: int
    steps_made: int
    step_s: float
    round_s: Spread | None
    fewest: int
    contributions: int
    missed: int
    restarts_s: Spread | None
    trainer_s: Spread | None
    interval_s: float | None
    parallel_of_up: float
    parallel_of_all: float
    not_made: int
    wrong_values: int
    forks: int
    unverified: tuple[str, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        """Measured values, each with its target."""
        every = f"a failure per node each {self.mtbf_s} s"
        least, aim = GOODPUT.get(self.mtbf_s, (None, None))
        up, everything = "% of the time up", "% of all time"
        return (
            Target(name=f"goodput, {every}", unit=up, least=least, aim=aim).row(100 * self.account.of_up),
            Target(name=f"the same, {every}", unit=everything).row(100 * self.account.of_all),
            Target(name=f"stop and restart, {every}", unit=up).row(100 * self.parallel_of_up),
            Target(name=f"the same of it, {every}", unit=everything).row(100 * self.parallel_of_all),
            TWICE.row(self.not_made),
            WRONG.row(self.wrong_values),
            FORKED.row(self.forks),
            UNVERIFIED.row(len(self.unverified)),
        )


def rows_of(results: Sequence[GoodputResult]) -> tuple[Row, ...]:
    """The rows of all runs."""
    return tuple(row for result in results for row in result.rows)
