"""`shoal bench …`: what Shoal costs, measured on this machine."""

from __future__ import annotations

import typer

from shoal.cli.options import command_of
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


bench.command("allreduce")(command_of(allreduce))
bench.command("compare")(command_of(compare))
bench.command("find")(command_of(find))
bench.command("flood")(command_of(flood))
bench.command("hostile")(command_of(hostile))
bench.command("join")(command_of(join))
bench.command("dashboard")(command_of(dashboard))
bench.command("lane")(command_of(lane))
bench.command("partition")(command_of(partition))
bench.command("uneven")(command_of(uneven))
bench.command("throughput")(command_of(throughput))
bench.command("wan")(command_of(wan))
bench.command("checkpoint")(command_of(checkpoint))
bench.command("restart")(command_of(restart))
bench.command("train")(command_of(train))
bench.command("train-table")(command_of(train_table))
bench.command("sapo")(command_of(sapo))
bench.command("sapo-table")(command_of(sapo_table))
bench.command("attack")(command_of(attack))
