"""`shoal bench …`: what Shoal costs, measured on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import typer

from shoal.cli.options import command_of
from shoal.lab.case import Case
from shoal.lab.cli.bench.allreduce import allreduce, compare
from shoal.lab.cli.bench.attack import attack
from shoal.lab.cli.bench.checkpoint import checkpoint, restart
from shoal.lab.cli.bench.dashboard import dashboard
from shoal.lab.cli.bench.find import find
from shoal.lab.cli.bench.flood import flood
from shoal.lab.cli.bench.hostile import hostile
from shoal.lab.cli.bench.join import join
from shoal.lab.cli.bench.lane import lane
from shoal.lab.cli.bench.partition import partition
from shoal.lab.cli.bench.sapo import sapo, sapo_table
from shoal.lab.cli.bench.throughput import throughput
from shoal.lab.cli.bench.train import train, train_table
from shoal.lab.cli.bench.uneven import uneven
from shoal.lab.cli.bench.wan import wan

bench = typer.Typer(help="Measure what rounds cost on this machine.", invoke_without_command=True)


@bench.callback()
def show_help(context: typer.Context) -> None:
    """Show what can be measured, where nothing is named."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


CASES: Final[Mapping[str, Case[Any, Any]]] = {
    "allreduce": allreduce,
    "compare": compare,
    "find": find,
    "flood": flood,
    "hostile": hostile,
    "join": join,
    "dashboard": dashboard,
    "lane": lane,
    "partition": partition,
    "uneven": uneven,
    "throughput": throughput,
    "wan": wan,
    "checkpoint": checkpoint,
    "restart": restart,
    "train": train,
    "sapo": sapo,
    "attack": attack,
}
"""All benchmarks, in the order of the help."""

for _name, _case in CASES.items():
    bench.command(_name)(_case.command())
bench.command("train-table")(command_of(train_table))
bench.command("sapo-table")(command_of(sapo_table))
