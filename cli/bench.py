"""`shoal bench …`: what Shoal costs, measured on this machine."""

from __future__ import annotations

import typer

from shoal.cli.bench_allreduce import AllreduceOptions, CompareOptions, allreduce, compare
from shoal.cli.bench_checkpoint import CheckpointOptions, RestartOptions, checkpoint, restart
from shoal.cli.bench_join import JoinOptions, join
from shoal.cli.bench_lane import LaneOptions, lane
from shoal.cli.bench_sapo import SapoOptions, sapo
from shoal.cli.bench_train import TrainOptions, TrainTableOptions, train, train_table
from shoal.cli.options import command_of

bench = typer.Typer(help="Measure what rounds cost on this machine.", no_args_is_help=True)
bench.command("allreduce")(command_of(AllreduceOptions, allreduce))
bench.command("compare")(command_of(CompareOptions, compare))
bench.command("join")(command_of(JoinOptions, join))
bench.command("lane")(command_of(LaneOptions, lane))
bench.command("checkpoint")(command_of(CheckpointOptions, checkpoint))
bench.command("restart")(command_of(RestartOptions, restart))
bench.command("train")(command_of(TrainOptions, train))
bench.command("train-table")(command_of(TrainTableOptions, train_table))
bench.command("sapo")(command_of(SapoOptions, sapo))
