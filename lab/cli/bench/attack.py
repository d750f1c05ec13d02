"""`shoal bench attack`: a swarm some of whose members attack in every round, under each defence."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from shoal.cli.options import ReportOptions
from shoal.cli.render import progress_display
from shoal.node.options import Option


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackOptions(ReportOptions):
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


def attack(options: AttackOptions) -> None:
    """Train a small model among attackers, in one process: final loss by attack and defence, and what is proven."""
    from shoal.lab.bench.attack import measure, render
    from shoal.lab.bench.attack_spec import ATTACKS, DEFENCES, AttackBench, chosen
    from shoal.node.state.store import write_atomically

    bench = AttackBench(
        peers=options.peers,
        attackers=options.attackers,
        rounds=options.rounds,
        inner_steps=options.inner_steps,
        audits=options.audits,
    )
    attacks = chosen(options.attack, ATTACKS, "--attack")
    defences = chosen(options.defence, DEFENCES, "--defence")
    with progress_display(log_format=options.log_format, log_level=options.log_level) as show_now:
        result = measure(bench, attacks, defences, options.seed, show_now)
    if options.out is not None:
        write_atomically(options.out, render(result).encode())
    typer.echo(msgspec.json.encode(result).decode() if options.as_json else render(result))
