"""Commands of `shoal`, and what it does where none is named.

What a command needs beyond the standard library and the protocol, it imports itself: `shoal --help` starts at once.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Annotated, Final

import typer

from shoal.cli.amend import amend
from shoal.cli.card import card
from shoal.cli.doctor import doctor
from shoal.cli.engine import engine
from shoal.cli.evaluate import evaluate
from shoal.cli.evidence import evidence
from shoal.cli.export import export
from shoal.cli.init import init, show_id
from shoal.cli.limit import limit
from shoal.cli.link import invite, link, take_back
from shoal.cli.options import command_of
from shoal.cli.passphrase import KeyPassphraseFile, use_passphrase
from shoal.cli.rebase import rebase
from shoal.cli.relay import relay
from shoal.cli.report import report
from shoal.cli.rollback import rollback
from shoal.cli.run import run
from shoal.cli.status import leave, pause, resume, status
from shoal.cli.testnet import testnet
from shoal.cli.uninstall import uninstall
from shoal.cli.verify import verify
from shoal.cli.watch import watch

app = typer.Typer(pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]})

_TRYING: Final = "Trying and measuring on this machine"
_PANELS: Final[Mapping[str, Mapping[str, Callable[..., None]]]] = {
    "A swarm": {
        "init": init,
        "link": link,
        "invite": invite,
        "revoke": take_back,
        "relay": relay,
        "engine": engine,
    },
    "A node": {
        "run": run,
        "status": status,
        "watch": watch,
        "pause": pause,
        "resume": resume,
        "limit": limit,
        "leave": leave,
        "id": show_id,
        "doctor": doctor,
    },
    "Deciding together": {
        "rollback": rollback,
        "amend": amend,
        "rebase": rebase,
    },
    "Checking and taking away": {
        "verify": verify,
        "export": export,
        "evaluate": evaluate,
        "report": report,
        "evidence": evidence,
        "card": card,
        "uninstall": uninstall,
    },
    _TRYING: {
        "testnet": testnet,
    },
}
"""The commands, as `shoal --help` shows them together."""

for panel, commands in _PANELS.items():
    for name, command in commands.items():
        app.command(name, rich_help_panel=panel)(command_of(command))
for others in importlib.metadata.entry_points(group="shoal.commands"):  # of distributions that build on this one
    others.load()(app, _TRYING)


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


app.callback(
    invoke_without_command=True,
    epilog="`shoal testnet` shows a whole swarm on this machine in minutes. Each command has its own --help. Every "
    "--some-option is also the environment variable SHOAL_SOME_OPTION; NO_COLOR=1 turns colours off.",
)(command_of(shoal))
