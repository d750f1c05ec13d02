"""`shoal explore agreement|repair`: walks every schedule of a small round, and shows the one that breaks it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from shoal.cli.options import AsJson
from shoal.cli.text import count
from shoal.node.option import Option
from shoal.protocol.errors import ConfigError

if TYPE_CHECKING:
    from shoal.lab.explore.repair import RepairExploration
    from shoal.lab.explore.scope import Scope
    from shoal.lab.explore.search import Exploration, Finding
    from shoal.protocol.voting import FaultModel

    AnyExploration = Exploration[Scope] | RepairExploration

PROGRESS_PERIOD_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExploreOptions:
    """Options of `shoal explore`."""

    what: Annotated[str, typer.Argument(metavar="agreement|repair", help="What to explore.")] = "agreement"
    members: Annotated[int, Option("--members", help="Members of the electorate; member v leads view v.")] = 3
    views: Annotated[int, Option("--views", help="How many views there may be, from view 0 on.")] = 3
    crashes: Annotated[int, Option("--crashes", help="How often a member may be killed and return.")] = 1
    returning: Annotated[
        str | None,
        Option("--returning", help="Of a repair: only these return, each as often as named.", metavar="M,M…"),
    ] = None
    leaves: Annotated[int, Option("--leaves", help="How many members may leave.")] = 0
    plans: Annotated[int, Option("--plans", help="How many values a free lead may choose from.")] = 2
    planner: Annotated[int, Option("--planner", help="Which member planned the last round.")] = 0
    rollbacks: Annotated[int, Option("--rollbacks", help="To how many rounds a free lead may go back instead.")] = 0
    unreduced: Annotated[bool, Option("--unreduced", help="Walk also schedules that differ in nothing.")] = False
    quorum: Annotated[str, Option("--quorum", help="The fault model, and so the quorum.", metavar="crash|lying")] = (
        "crash"
    )
    liars: Annotated[
        int, Option("--liars", help="How many members say anything at any time; one, but with --walk.")
    ] = 0
    strangers: Annotated[
        int, Option("--strangers", help="How many contribute without a vote, beside the members, who are named voters.")
    ] = 0
    changing: Annotated[
        bool, Option("--changing", help="The round before changed the voters, and this one does; takes --strangers.")
    ] = False
    liar: Annotated[int, Option("--liar", help="The first member that lies.", metavar="MEMBER")] = 0
    attempts: Annotated[int, Option("--attempts", help="Of a repair: how many plans a lead may make in a view.")] = 2
    chunks: Annotated[int, Option("--chunks", help="Of a repair: how many chunks the model has.")] = 2
    shift: Annotated[int, Option("--shift", help="Of a repair: the place whose owner is dealt the first chunk.")] = 0
    late: Annotated[int | None, Option("--late", help="Of a repair: the member that is late.", metavar="MEMBER")] = None
    codec: Annotated[str, Option("--codec", help="Of a repair: how contributions are encoded.")] = "int8"
    stale: Annotated[bool, Option("--stale", help="Of a repair: plans may be heard after newer ones.")] = False
    limit: Annotated[int | None, Option("--limit", help="Stop after so many states.", metavar="STATES")] = None
    walk: Annotated[
        int | None, Option("--walk", help="Of an agreement: so many random steps instead, unreduced.", metavar="STEPS")
    ] = None
    seed: Annotated[int, Option("--seed", help="Of the random steps.")] = 1
    as_json: AsJson = False


def explore(options: ExploreOptions) -> None:
    """Search the schedules of a small agreement or repair, over the machines that nodes run, for one that breaks it."""
    explored: dict[str, Callable[[ExploreOptions], AnyExploration]] = {
        "agreement": _explored_agreement,
        "repair": _explored_repair,
    }
    if options.what not in explored:
        raise ConfigError(f"there is no {options.what!r} to explore; write `shoal explore agreement` or `… repair`")
    for name, bound in (("--limit", options.limit), ("--walk", options.walk)):
        if bound is not None and bound < 1:
            raise ConfigError(f"{name} {bound}: must be 1 or more")
    exploration = explored[options.what](options)
    typer.echo(to_json(exploration) if options.as_json else "\n".join(lines_of(exploration)))
    raise typer.Exit(1 if exploration.violations else 0)


def _explored_agreement(options: ExploreOptions) -> Exploration[Scope]:
    from shoal.lab.explore.agreement import Explorer
    from shoal.lab.explore.liar_search import LiarExplorer
    from shoal.lab.explore.scope import Scope
    from shoal.lab.explore.walk import walk

    scope = Scope(
        members=options.members,
        views=options.views,
        crashes=options.crashes,
        leaves=options.leaves,
        plans=options.plans,
        planner=options.planner,
        rollbacks=options.rollbacks,
        liars=options.liars,
        liar=options.liar,
        strangers=options.strangers,
        changing=options.changing,
        faults=_faults(options.quorum),
        reduced=not options.unreduced,
    )
    if options.walk is not None:
        return walk(scope, options.walk, options.seed, on_progress=ProgressLines())
    explorer = LiarExplorer(scope) if scope.liars else Explorer(scope)
    return explorer.run(limit=options.limit, on_progress=ProgressLines())


def _faults(quorum: str) -> FaultModel:
    from shoal.protocol.voting import FaultModel

    if quorum not in {faults.value for faults in FaultModel}:
        raise ConfigError(f"--quorum {quorum}: must be crash or lying")
    return FaultModel(quorum)


def _explored_repair(options: ExploreOptions) -> RepairExploration:
    from shoal.lab.explore.repair import RepairExplorer
    from shoal.lab.explore.repair_scope import RepairScope

    if options.walk is not None:
        raise ConfigError("--walk: a repair is walked whole; `shoal simulate` takes steps at random, of reductions too")
    scope = RepairScope(
        members=options.members,
        views=options.views,
        attempts=options.attempts,
        crashes=options.crashes,
        returning=_members(options.returning),
        chunks=options.chunks,
        shift=options.shift,
        late=options.late,
        codec=options.codec,
        stale=options.stale,
        reduced=not options.unreduced,
    )
    return RepairExplorer(scope).run(limit=options.limit, on_progress=ProgressLines())


def _members(listed: str | None) -> tuple[int, ...]:
    try:
        return tuple(map(int, listed.split(","))) if listed is not None else ()
    except ValueError:
        raise ConfigError(f"--returning {listed}: write members as in 0,1") from None


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


def to_json(exploration: AnyExploration) -> str:
    """The scope, the figures and the findings as one object."""
    document = asdict(exploration.scope) | {
        "states": exploration.states,
        "transitions": exploration.transitions,
        "member_states": exploration.member_states,
        "seconds": round(exploration.seconds, 3),
        "states_per_s": round(exploration.states / exploration.seconds),
        "complete": exploration.complete,
        **_found(exploration),
        "violations": [asdict(finding) for finding in exploration.violations],
    }
    return msgspec.json.format(msgspec.json.encode(document)).decode()


def _found(exploration: AnyExploration) -> dict[str, object]:
    """Outcomes that some schedule led to, and that were exercised so."""
    certified = exploration.certified
    if isinstance(certified, int):
        names = ("plans", "revisions", "repaired", "certified")
        return {name: getattr(exploration, name) for name in names}
    return {"certified": sorted({name for names in certified for name in names})}


def lines_of(exploration: AnyExploration) -> Iterator[str]:
    """The same for people."""
    seconds, found = exploration.seconds, _found(exploration)
    yield f"scope      {_told_scope(exploration)}"
    yield (
        f"visited    {exploration.states:,} states, {exploration.transitions:,} transitions, "
        f"{exploration.member_states:,} states of single members"
    )
    yield f"time       {seconds:.1f} s, {exploration.states / seconds:,.0f} states/s"
    if "plans" in found:
        yield (
            f"exercised  {found['plans']} plans, {found['revisions']} of them revisions, {found['repaired']} of these "
            f"reduced to the end; {found['certified']} values certified: each in some schedule"
        )
    else:
        names = found["certified"]
        assert isinstance(names, list)
        yield f"certified  {', '.join(names) or 'nothing'}: each in some schedule"
    yield from _told_findings(exploration.violations, complete=exploration.complete)


def _told_scope(exploration: AnyExploration) -> str:
    from shoal.lab.explore.repair_scope import RepairScope

    scope = exploration.scope
    told = f"{count(scope.members, 'member')}, views 0 to {scope.views - 1}, at most {count(scope.crashes, 'restart')}"
    if isinstance(scope, RepairScope):
        told += f" (of {', '.join(map(str, scope.returning))})" if scope.returning else ""
        return f"{told}, {count(scope.attempts, 'plan')} in a view, {scope.codec}"
    if scope.strangers:
        told = f"{count(scope.strangers, 'stranger')} beside {told}"
    if scope.changing:
        told = f"voters that change before and after, {told}"
    if scope.liars:
        who = " and ".join(map(str, scope.lying))
        told = f"quorums of `{scope.faults.value}`, member {who} lies, {told}"
    back = f", {count(scope.rollbacks, 'round')} to go back to" if scope.rollbacks else ""
    return f"{told} and {count(scope.leaves, 'promise')} to leave, {count(scope.plans, 'plan')} to choose from{back}"


def _told_findings(violations: tuple[Finding, ...], *, complete: bool) -> Iterator[str]:
    for finding in violations:
        yield f"VIOLATION  {finding.kind}, by these steps:"
        yield from (f"{number:>9}  {step}" for number, step in enumerate(finding.schedule, 1))
    if not violations:
        yield f"violations none in {'any schedule' if complete else 'what was visited, which is not all'}"
