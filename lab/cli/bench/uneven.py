"""`shoal bench uneven`: what one slow node costs a swarm."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from shoal.cli.render import ShowNow
from shoal.lab.case import Case, CaseOptions
from shoal.node.options import Option

if TYPE_CHECKING:
    from shoal.lab.bench.train_swarm import Speeds
    from shoal.lab.bench.uneven import UnevenResult


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenOptions(CaseOptions):
    """What the user asked `shoal bench uneven` for."""

    nodes: Annotated[int, Option("--nodes", help="How many nodes, each a process of its own.")] = 4
    slow: Annotated[float, Option("--slow", help="How many times slower the last of them is.")] = 4.0
    inner_steps: Annotated[int, Option("--inner-steps", help="H: optimizer steps between two rounds.")] = 200
    step_s: Annotated[float, Option("--step-s", help="What a step of the others takes, in seconds.")] = 0.02
    rounds: Annotated[int, Option("--rounds", help="How many rounds, of each kind.")] = 8
    strategy: Annotated[str, Option("--strategy", help="How nodes synchronise.")] = "diloco"
    seed: Annotated[int, Option("--seed", help="Of the parameters and the data.")] = 1


def _run(options: UnevenOptions, tell: ShowNow) -> UnevenResult:
    """Train with one node slower than the others: with shares of the steps by speed, and with equal ones.

    The steps wait instead of computing, so that the machine's own load does not count. The command ends with exit code
    1 if the swarm makes less than 0.9 of the sum of its nodes' speeds, or any value is wrong.
    """
    from shoal.lab.bench.uneven import UnevenBench, bench_uneven

    return bench_uneven(
        UnevenBench(
            nodes=options.nodes,
            slow=options.slow,
            inner_steps=options.inner_steps,
            step_s=options.step_s,
            rounds=options.rounds,
            strategy=options.strategy,
            seed=options.seed,
        )
    )


def to_lines(result: UnevenResult) -> list[str]:
    """The result for people."""

    def line(speeds: Speeds) -> str:
        rate = f"{speeds.tokens_per_s:.0f} of {speeds.ideal_tokens_per_s:.0f} tokens/s: {speeds.ratio:.2f}"
        return rate if speeds.blocked_fraction is None else f"{rate}; blocked {100 * speeds.blocked_fraction:.1f} %"

    bench = result.bench
    return [
        f"nodes      {bench.nodes}, one {bench.slow:g} times slower; {bench.strategy}, {bench.inner_steps} steps of "
        f"{bench.step_s:g} s, {bench.rounds} rounds",
        f"by speed   {line(result.fair)}",
        f"equal      {line(result.equal)}",
        "all is as it should be" if result.holds else "FAILED     this is not as it should be",
    ]


def to_document(result: UnevenResult) -> dict[str, object]:
    """The result under the names of its fields, and whether it holds."""
    return {**msgspec.to_builtins(result), "holds": result.holds}


uneven: Final = Case(
    spec=UnevenOptions,
    run=_run,
    lines=to_lines,
    document=to_document,
    sound=attrgetter("holds"),
)
