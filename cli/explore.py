"""`shoal explore agreement`: walks every schedule of a small agreement, and shows the one that breaks it, if any."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from shoal.cli.options import AsJson, option
from shoal.cli.text import count
from shoal.protocol.errors import ConfigError

if TYPE_CHECKING:
    from shoal.testnet.explore import Exploration

PROGRESS_PERIOD_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExploreOptions:
    """What the user asked `shoal explore` for."""

    what: Annotated[str, typer.Argument(metavar="agreement", help="What to explore.")] = "agreement"
    members: Annotated[int, option("--members", help="Members of the electorate; member v leads view v.")] = 3
    views: Annotated[int, option("--views", help="How many views there may be, from view 0 on.")] = 3
    crashes: Annotated[int, option("--crashes", help="How often a member may be killed and return.")] = 1
    leaves: Annotated[int, option("--leaves", help="How many members may leave.")] = 0
    plans: Annotated[int, option("--plans", help="How many values a free lead may choose from.")] = 2
    planner: Annotated[int, option("--planner", help="Which member planned the last round.")] = 0
    unreduced: Annotated[bool, option("--unreduced", help="Walk also schedules that differ in nothing.")] = False
    limit: Annotated[int | None, option("--limit", help="Stop after so many states.", metavar="STATES")] = None
    walk: Annotated[
        int | None, option("--walk", help="Take so many random steps instead, unreduced.", metavar="STEPS")
    ] = None
    seed: Annotated[int, option("--seed", help="Of the random steps.")] = 1
    as_json: AsJson = False


def explore(options: ExploreOptions) -> None:
    """Search the schedules of a small agreement, over the machines that nodes run, for one that breaks it."""
    from shoal.testnet.explore import Explorer
    from shoal.testnet.explore_scope import Scope
    from shoal.testnet.explore_walk import walk

    if options.what != "agreement":
        raise ConfigError(f"there is no {options.what!r} to explore; write `shoal explore agreement`")
    for name, bound in (("--limit", options.limit), ("--walk", options.walk)):
        if bound is not None and bound < 1:
            raise ConfigError(f"{name} {bound}: must be 1 or more")
    scope = Scope(
        members=options.members,
        views=options.views,
        crashes=options.crashes,
        leaves=options.leaves,
        plans=options.plans,
        planner=options.planner,
        reduced=not options.unreduced,
    )
    progress = ProgressLines()
    if options.walk is None:
        exploration = Explorer(scope).run(limit=options.limit, on_progress=progress)
    else:
        exploration = walk(scope, options.walk, options.seed, on_progress=progress)
    typer.echo(to_json(exploration) if options.as_json else "\n".join(lines_of(exploration)))
    raise typer.Exit(1 if exploration.violations else 0)


class ProgressLines:
    """A line on stderr every `PROGRESS_PERIOD_S`, if that is a terminal."""

    def __init__(self) -> None:
        self._wanted = sys.stderr.isatty()
        self._told = time.monotonic()

    def __call__(self, states: int, transitions: int) -> None:
        """Tell how far it is."""
        if self._wanted and time.monotonic() - self._told >= PROGRESS_PERIOD_S:
            self._told = time.monotonic()
            typer.echo(f"{states:,} states, {transitions:,} transitions", err=True)


def to_json(exploration: Exploration) -> str:
    """The scope, the figures and the findings as one object."""
    document = asdict(exploration.scope) | {
        "states": exploration.states,
        "transitions": exploration.transitions,
        "member_states": exploration.member_states,
        "seconds": round(exploration.seconds, 3),
        "states_per_s": round(exploration.states / exploration.seconds),
        "complete": exploration.complete,
        "certified": sorted({name for names in exploration.certified for name in names}),
        "violations": [asdict(finding) for finding in exploration.violations],
    }
    return msgspec.json.format(msgspec.json.encode(document)).decode()


def lines_of(exploration: Exploration) -> Iterator[str]:
    """The same for people."""
    scope, seconds = exploration.scope, exploration.seconds
    yield (
        f"scope      {count(scope.members, 'member')}, views 0 to {scope.views - 1}, at most "
        f"{count(scope.crashes, 'restart')} and {count(scope.leaves, 'promise')} to leave, "
        f"{count(scope.plans, 'plan')} to choose from"
    )
    yield (
        f"visited    {exploration.states:,} states, {exploration.transitions:,} transitions, "
        f"{exploration.member_states:,} states of single members"
    )
    yield f"time       {seconds:.1f} s, {exploration.states / seconds:,.0f} states/s"
    names = sorted({name for names in exploration.certified for name in names})
    yield f"certified  {', '.join(names) or 'nothing'}: each in some schedule"
    for finding in exploration.violations:
        yield f"VIOLATION  {finding.kind}, by these steps:"
        yield from (f"{number:>9}  {step}" for number, step in enumerate(finding.schedule, 1))
    if not exploration.violations:
        yield f"violations none in {'any schedule' if exploration.complete else 'what was visited, which is not all'}"
