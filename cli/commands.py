"""Commands of `shoal`, and what it does where none is named.

What a command needs beyond the standard library and the protocol, it imports itself: `shoal --help` starts at once. And
a command line that names a command imports and describes that one: all of them take as long as half a second.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import typer

from shoal.cli.options import command_of
from shoal.cli.passphrase import KeyPassphraseFile, use_passphrase

_TRYING: Final = "Trying and measuring on this machine"
_PANELS: Final[Mapping[str, Sequence[str]]] = {
    "A swarm": ("init", "link", "invite", "revoke", "relay", "engine"),
    "A node": ("run", "status", "watch", "pause", "resume", "limit", "leave", "id", "doctor"),
    "Deciding together": ("rollback", "amend", "rebase"),
    "Checking and taking away": ("verify", "export", "evaluate", "report", "evidence", "card", "uninstall"),
    _TRYING: ("testnet",),
}
"""The commands, as `shoal --help` shows them together. Each is a function of its name in a module of its name."""
_ELSEWHERE: Final[Mapping[str, tuple[str, str]]] = {
    "id": ("init", "show_id"),
    "invite": ("link", "invite"),
    "revoke": ("link", "take_back"),
    "pause": ("status", "pause"),
    "resume": ("status", "resume"),
    "leave": ("status", "leave"),
}
"""Module and function of those that are not."""


def app_of(arguments: Sequence[str] = ()) -> typer.Typer:
    """Make the application of a command line: with the command alone that it begins with, or else with all."""
    app = typer.Typer(pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]})
    panels = {name: panel for panel, names in _PANELS.items() for name in names}
    known = bool(arguments) and arguments[0] in panels
    for name in arguments[:1] if known else panels:
        module, function = _ELSEWHERE.get(name, (name, name))
        command = getattr(importlib.import_module(f"shoal.cli.{module}"), function)
        app.command(name, rich_help_panel=panels[name])(command_of(command))
    if not known:
        for others in importlib.metadata.entry_points(group="shoal.commands"):  # of what builds on this distribution
            others.load()(app, _TRYING)
    app.callback(
        invoke_without_command=True,
        epilog="`shoal testnet` shows a whole swarm on this machine in minutes. Each command has its own --help. Every "
        "--some-option is also the environment variable SHOAL_SOME_OPTION; NO_COLOR=1 turns colours off.",
    )(command_of(shoal))
    return app


def show_version(wanted: bool) -> None:
    """Print the version, if it is asked for, and end."""
    if wanted:
        typer.echo(f"shoal {importlib.metadata.version('shoal')}")
        raise typer.Exit()


def shoal(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=show_version, is_eager=True)
    ] = False,
    key_passphrase_file: KeyPassphraseFile = None,
) -> None:
    """Train one model on many machines that nobody owns together."""
    use_passphrase(key_passphrase_file)
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
