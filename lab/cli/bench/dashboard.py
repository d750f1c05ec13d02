"""`shoal bench dashboard`: what the page of a node costs, with as many peers as one likes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from shoal.cli.render import ShowNow
from shoal.lab.case import Case, CaseOptions
from shoal.node.options import Option
from shoal.protocol.errors import ConfigError

if TYPE_CHECKING:
    from shoal.lab.bench.dashboard import PageCost

PEER_LIMIT = 500
SECONDS_LIMIT = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardOptions(CaseOptions):
    """What is served and measured."""

    peers: Annotated[int, Option("--peers", help="Nodes beside the one whose page it is.")] = 200
    seconds: Annotated[float, Option("--seconds", help="How long each of three measurements takes.")] = 10.0
    seed: Annotated[int, Option("--seed", help="Of the made-up swarm.")] = 1
    serve: Annotated[bool, Option("--serve", help="Serve the page and measure nothing, until interrupted.")] = False
    rollouts: Annotated[bool, Option("--share-rollouts", help="With --serve: a swarm that shares rollouts.")] = False


def _run(options: DashboardOptions, tell: ShowNow) -> PageCost:
    """Measure the page of a made-up swarm in headless Chromium: first paint, bytes, processor, scrapes."""
    if not 0 <= options.peers <= PEER_LIMIT:
        raise ConfigError(f"--peers: {options.peers} is not in 0..{PEER_LIMIT}")
    if not 1 <= options.seconds <= SECONDS_LIMIT:
        raise ConfigError(f"--seconds: {options.seconds:g} is not in 1..{SECONDS_LIMIT:g}")
    from shoal.lab.bench.dashboard import measure, serve

    if options.serve:
        import trio

        trio.run(partial(serve, peers=options.peers, seed=options.seed, rollouts=options.rollouts))
        raise typer.Exit
    return measure(peers=options.peers, seconds=options.seconds, seed=options.seed)


def to_lines(found: PageCost) -> list[str]:
    """What was measured, a number a line."""
    return [f"{name:<18} {value:,}" for name, value in msgspec.structs.asdict(found).items()]


dashboard: Final = Case(spec=DashboardOptions, run=_run, lines=to_lines)
