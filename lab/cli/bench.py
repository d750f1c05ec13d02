"""`shoal bench …`: what Shoal costs, measured on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any, Final

import typer
from typer.core import TyperGroup

COMMANDS: Final[Mapping[str, str]] = {
    "allreduce": "allreduce:CASE",
    "compare": "compare:CASE",
    "faults": "faults:CASE",
    "hostile": "hostile:CASE",
    "join": "join:CASE",
    "dashboard": "dashboard:CASE",
    "lane": "lane:CASE",
    "throughput": "throughput:CASE",
    "wan": "wan:CASE",
    "memory": "memory:CASE",
    "scale": "scale:CASE",
    "sites": "sites:CASE",
    "goodput": "goodput:CASE",
    "train": "train_command:CASE",
    "sapo": "sapo_table:CASE",
    "rollouts": "rollouts:CASE",
    "partial": "partial:CASE",
    "crowd": "crowd:CASE",
    "samplers": "samplers:CASE",
    "hostile-samplers": "hostile_samplers:CASE",
    "train-table": "train_command:TABLE",
    "sapo-table": "sapo_table:TABLE",
}
"""All benchmarks in the order of the help, each with the place of its case in `shoal.lab.bench`."""


def load(name: str) -> Any:
    """The case of that name. Raises KeyError."""
    module, _, attribute = COMMANDS[name].partition(":")
    return getattr(import_module(f"shoal.lab.bench.{module}"), attribute)


class _Loaded(Mapping[str, Any]):
    """The commands, of which each is imported when it is asked for: with most comes all that they measure."""

    def __getitem__(self, name: str) -> Any:
        return _command(name)

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


@cache
def _command(name: str) -> Any:
    found = load(name)
    one = typer.Typer(add_completion=False)
    one.command(name)(found.command())
    return typer.main.get_command(one)


class _Benchmarks(TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Loaded()  # type: ignore[assignment]  # nobody adds to it


bench = typer.Typer(cls=_Benchmarks, help="Measure what rounds cost on this machine.", invoke_without_command=True)


@bench.callback()
def show_help(context: typer.Context) -> None:
    """Show what can be measured, where nothing is named."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
