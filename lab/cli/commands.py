"""Which commands the laboratory adds to `shoal`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import typer

from shoal.cli.options import command_of, help_of
from shoal.lab.cli.bench.commands import bench
from shoal.lab.cli.campaign import CampaignOptions, campaign
from shoal.lab.cli.chaos import ChaosOptions, chaos
from shoal.lab.cli.explore import ExploreOptions, explore
from shoal.lab.cli.simulate import SimulateOptions, simulate
from shoal.lab.cli.soak import SoakOptions, soak

_COMMANDS: Final[Mapping[str, Callable[..., None]]] = {
    "simulate": command_of(SimulateOptions, simulate),
    "campaign": command_of(CampaignOptions, campaign),
    "chaos": command_of(ChaosOptions, chaos),
    "soak": command_of(SoakOptions, soak),
    "explore": command_of(ExploreOptions, explore),
}


def add_to(app: typer.Typer, panel: str) -> None:
    """Add them all, to be shown together in a panel of the help."""
    for name, command in _COMMANDS.items():
        app.command(name, help=help_of(command), rich_help_panel=panel)(command)
    app.add_typer(bench, name="bench", rich_help_panel=panel)
