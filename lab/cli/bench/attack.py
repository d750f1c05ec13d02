"""`shoal bench attack`: a swarm some of whose members attack in every round, under each defence."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from shoal.cli.render import ShowNow
from shoal.lab.case import Case, LongCaseOptions
from shoal.node.options import Option

if TYPE_CHECKING:
    from shoal.lab.bench.attack_spec import AttackResult


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackOptions(LongCaseOptions):
    """What the user asked `shoal bench attack` for, as written."""

    peers: Annotated[int, Option("--peers", help="How many peers, attackers among them.")] = 16
    attackers: Annotated[int, Option("--attackers", help="How many of them attack in every round.")] = 3
    attack: Annotated[
        str, Option("--attack", help="What they do: all, or some of a list with commas.", metavar="A,A…|all")
    ] = "all"
    defence: Annotated[
        str, Option("--defence", help="How contributions are combined: all, or some.", metavar="D,D…|all")
    ] = "all"
    rounds: Annotated[int, Option("--rounds", help="How many rounds are trained.")] = 12
    inner_steps: Annotated[int, Option("--inner-steps", help="H: optimizer steps between two rounds.")] = 5
    audits: Annotated[int, Option("--audits", help="Chunks that each peer recomputes a round.")] = 2
    seed: Annotated[int, Option("--seed", help="Of the parameters, the data and the keys.")] = 1
    out: Annotated[Path | None, Option("--out", "-o", help="The tables, in Markdown, go here too.", metavar="FILE")] = (
        None
    )


def _run(options: AttackOptions, tell: ShowNow) -> AttackResult:
    """Train a small model among attackers, in one process: final loss by attack and defence, and what is proven."""
    from shoal.lab.bench.attack import measure, render
    from shoal.lab.bench.attack_spec import ATTACKS, DEFENCES, AttackBench, chosen
    from shoal.lab.page import publish

    bench = AttackBench(
        peers=options.peers,
        attackers=options.attackers,
        rounds=options.rounds,
        inner_steps=options.inner_steps,
        audits=options.audits,
    )
    attacks = chosen(options.attack, ATTACKS, "--attack")
    defences = chosen(options.defence, DEFENCES, "--defence")
    result = measure(bench, attacks, defences, options.seed, tell)
    if options.out is not None:
        publish(render(result), options.out)
    return result


def to_lines(result: AttackResult) -> list[str]:
    """The tables in Markdown."""
    from shoal.lab.bench.attack import render

    return [render(result)]


attack: Final = Case(spec=AttackOptions, run=_run, lines=to_lines)
