"""Commands that the laboratory adds to `shoal`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import typer

from shoal.cli.options import command_of
from shoal.lab.cli.bench import bench
from shoal.lab.cli.campaign import campaign
from shoal.lab.cli.chaos import chaos
from shoal.lab.cli.explore import explore
from shoal.lab.cli.simulate import simulate
from shoal.lab.cli.soak import soak

_COMMANDS: Final[Mapping[str, Callable[..., None]]] = {
    "simulate": simulate,
    "campaign": campaign,
    "chaos": chaos,
    "soak": soak,
    "explore": explore,
}


def add_to(app: typer.Typer, panel: str) -> None:
    """Add them all, to be shown together in a panel of the help."""
    for name, command in _COMMANDS.items():
        app.command(name, rich_help_panel=panel)(command_of(command))
    app.add_typer(bench, name="bench", rich_help_panel=panel)
