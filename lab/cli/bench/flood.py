"""`shoal bench flood`: training while strangers flood a node with connections, hellos and giant frames."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

from shoal.cli.render import ShowNow
from shoal.lab.case import Case, CaseOptions
from shoal.node.options import Option
from shoal.protocol.errors import ConfigError

if TYPE_CHECKING:
    from shoal.lab.bench.flood import FloodResult

NODES, WINDOWS, SECONDS = 2, 3, 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FloodOptions(CaseOptions):
    """What the user asked `shoal bench flood` for."""

    nodes: Annotated[int, Option("--nodes", help="Nodes that train; the first is attacked.")] = NODES
    windows: Annotated[int, Option("--windows", help="Attacks, each between two times of peace.")] = WINDOWS
    seconds: Annotated[float, Option("--seconds", help="How long each lasts.")] = SECONDS


def _run(options: FloodOptions, tell: ShowNow) -> FloodResult:
    """Measure the rate of training before and during a flood: 200 hellos/s, 500 half-open connections and more."""
    if not (2 <= options.nodes <= 16 and 1 <= options.windows <= 100 and 5 <= options.seconds <= 60):
        raise ConfigError("--nodes must be 2 to 16, --windows 1 to 100, --seconds 5 to 60")
    from shoal.lab.bench.flood import measure_flood

    return measure_flood(nodes=options.nodes, windows=options.windows, seconds=options.seconds)


def to_lines(result: FloodResult) -> list[str]:
    """The result for people."""
    made = ", ".join(f"{rate:g} {kind}" for kind, rate in result.per_s.items())
    held = ", ".join(f"{number:g} {kind}" for kind, number in result.held.items())
    refused = ", ".join(f"{rate:g} {reason}" for reason, rate in result.refused_per_s.items())
    trainers = (result.trainers_share_alone, result.trainers_share_attacked)
    alone, attacked = (f"{share:.1%} of one" for share in (result.daemon_share_alone, result.daemon_share_attacked))
    return [
        f"nodes         {result.nodes} on {result.node_processors} processors, the attacker on the others",
        f"left alone    {result.alone_tokens_per_s:.0f} tokens/s; the daemon takes {alone}",
        f"under attack  {result.attacked_tokens_per_s:.0f} tokens/s; the daemon takes {attacked}",
        f"ratio         {result.ratio:.3f}; of tokens per second of the nodes' processor time {result.work_ratio:.3f}",
        "trainers      {:.2f} processors alone, {:.2f} under attack".format(*trainers),
        f"attacker      {result.attacker_share:.1%} of one, packets {result.packets_share:.1%}",
        f"each second   {made}",
        f"held          {held}",
        f"refused       each second {refused}",
    ]


flood: Final = Case(spec=FloodOptions, run=_run, lines=to_lines)
