"""`shoal bench …`: what Shoal costs, measured on this machine."""

from __future__ import annotations

import typer

from shoal.cli.options import command_of
from shoal.lab.cli.bench.allreduce import AllreduceOptions, CompareOptions, allreduce, compare
from shoal.lab.cli.bench.attack import AttackOptions, attack
from shoal.lab.cli.bench.checkpoint import CheckpointOptions, RestartOptions, checkpoint, restart
from shoal.lab.cli.bench.dashboard import DashboardOptions, dashboard
from shoal.lab.cli.bench.find import FindOptions, find
from shoal.lab.cli.bench.flood import FloodOptions, flood
from shoal.lab.cli.bench.hostile import HostileOptions, hostile
from shoal.lab.cli.bench.join import JoinOptions, join
from shoal.lab.cli.bench.lane import LaneOptions, lane
from shoal.lab.cli.bench.partition import PartitionOptions, partition
from shoal.lab.cli.bench.sapo import SapoOptions, SapoTableOptions, sapo, sapo_table
from shoal.lab.cli.bench.throughput import ThroughputOptions, throughput
from shoal.lab.cli.bench.train import TrainOptions, TrainTableOptions, train, train_table
from shoal.lab.cli.bench.uneven import UnevenOptions, uneven
from shoal.lab.cli.bench.wan import WanOptions, wan

bench = typer.Typer(help="Measure what rounds cost on this machine.", invoke_without_command=True)


@bench.callback()
def show_help(context: typer.Context) -> None:
    """Show what can be measured, where nothing is named."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


bench.command("allreduce")(command_of(AllreduceOptions, allreduce))
bench.command("compare")(command_of(CompareOptions, compare))
bench.command("find")(command_of(FindOptions, find))
bench.command("flood")(command_of(FloodOptions, flood))
bench.command("hostile")(command_of(HostileOptions, hostile))
bench.command("join")(command_of(JoinOptions, join))
bench.command("dashboard")(command_of(DashboardOptions, dashboard))
bench.command("lane")(command_of(LaneOptions, lane))
bench.command("partition")(command_of(PartitionOptions, partition))
bench.command("uneven")(command_of(UnevenOptions, uneven))
bench.command("throughput")(command_of(ThroughputOptions, throughput))
bench.command("wan")(command_of(WanOptions, wan))
bench.command("checkpoint")(command_of(CheckpointOptions, checkpoint))
bench.command("restart")(command_of(RestartOptions, restart))
bench.command("train")(command_of(TrainOptions, train))
bench.command("train-table")(command_of(TrainTableOptions, train_table))
bench.command("sapo")(command_of(SapoOptions, sapo))
bench.command("sapo-table")(command_of(SapoTableOptions, sapo_table))
bench.command("attack")(command_of(AttackOptions, attack))
