"""The `shoal` command: which commands there are, and how whatever they raise ends as a line and an exit code.

    0    done
    1    the job failed
    2    wrong usage or configuration: one line on stderr says what is wrong and what to do
    130  interrupted after a clean leave

What a command needs beyond the standard library and the protocol, it imports itself: `shoal --help` starts at once.
"""

from __future__ import annotations

import importlib.metadata
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Final

import typer
import typer.main

from shoal.cli.amend import amend
from shoal.cli.bench.commands import bench
from shoal.cli.campaign import CampaignOptions, campaign
from shoal.cli.chaos import ChaosOptions, chaos
from shoal.cli.doctor import DoctorOptions, doctor
from shoal.cli.evidence import EvidenceOptions, evidence
from shoal.cli.explore import ExploreOptions, explore
from shoal.cli.export import ExportOptions, export
from shoal.cli.init import InitOptions, init, show_id
from shoal.cli.link import InviteOptions, invite, link, take_back
from shoal.cli.options import command_of, help_of
from shoal.cli.passphrase import KeyPassphraseFile, use_passphrase
from shoal.cli.rebase import rebase
from shoal.cli.relay import RelayOptions, relay
from shoal.cli.report import MergeOptions, report
from shoal.cli.rollback import rollback
from shoal.cli.run import RunOptions, run
from shoal.cli.simulate import SimulateOptions, simulate
from shoal.cli.soak import SoakOptions, soak
from shoal.cli.status import leave, pause, resume, status
from shoal.cli.testnet import TestnetOptions, testnet
from shoal.cli.text import in_one_line
from shoal.cli.verify import VerifyOptions, verify
from shoal.cli.watch import watch
from shoal.node.control_client import NodeNotRunning
from shoal.protocol.errors import ConfigError, LocalError, ShoalError

DONE, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130

app = typer.Typer(pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]})

_PANELS: Final[Mapping[str, Mapping[str, Callable[..., None]]]] = {
    "A swarm": {
        "init": command_of(InitOptions, init),
        "link": link,
        "invite": command_of(InviteOptions, invite),
        "revoke": take_back,
        "relay": command_of(RelayOptions, relay),
    },
    "A node": {
        "run": command_of(RunOptions, run),
        "status": status,
        "watch": watch,
        "pause": pause,
        "resume": resume,
        "leave": leave,
        "id": show_id,
        "doctor": command_of(DoctorOptions, doctor),
    },
    "Deciding together": {
        "rollback": rollback,
        "amend": amend,
        "rebase": rebase,
    },
    "Checking and taking away": {
        "verify": command_of(VerifyOptions, verify),
        "export": command_of(ExportOptions, export),
        "report": command_of(MergeOptions, report),
        "evidence": command_of(EvidenceOptions, evidence),
    },
    "Trying and measuring on this machine": {
        "testnet": command_of(TestnetOptions, testnet),
        "simulate": command_of(SimulateOptions, simulate),
        "campaign": command_of(CampaignOptions, campaign),
        "chaos": command_of(ChaosOptions, chaos),
        "soak": command_of(SoakOptions, soak),
        "explore": command_of(ExploreOptions, explore),
    },
}
"""The commands, as `shoal --help` shows them together."""

for panel, commands in _PANELS.items():
    for name, command in commands.items():
        app.command(name, help=help_of(command), rich_help_panel=panel)(command)
app.add_typer(bench, name="bench", rich_help_panel="Trying and measuring on this machine")


def show_version(wanted: bool) -> None:
    """Print the version, if it is asked for, and end."""
    if wanted:
        typer.echo(f"shoal {importlib.metadata.version('shoal')}")
        raise typer.Exit(DONE)


@app.callback(
    invoke_without_command=True,
    epilog="`shoal testnet` shows a whole swarm on this machine in minutes. Each command has its own --help. Every "
    "--some-option is also the environment variable SHOAL_SOME_OPTION; NO_COLOR=1 turns colours off.",
)
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


def main() -> None:
    """The entry point of the console script."""
    sys.exit(execute(sys.argv[1:]))


def execute(arguments: Sequence[str]) -> int:
    """Run one command line; returns its exit code, whatever happened."""
    try:
        result = typer.main.get_command(app).main(list(arguments), prog_name="shoal", standalone_mode=False)
    except typer.TyperException as error:
        return _complain(_usage_error(error), WRONG_USAGE)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BaseException as error:
        if isinstance(error, SystemExit | GeneratorExit):
            raise
        return _explain(error)
    return result if isinstance(result, int) else DONE


def _explain(error: BaseException) -> int:
    """Say on stderr what went wrong: one line for what is foreseen, a traceback for a bug. Returns the exit code."""
    causes = list(_leaves(error))
    bugs = [cause for cause in causes if not isinstance(cause, ShoalError | KeyboardInterrupt)]
    bugs += [cause for cause in causes if isinstance(cause, LocalError)]
    if bugs:
        traceback.print_exception(error)
        return _complain(f"this is a bug in Shoal: {type(bugs[0]).__name__}: {bugs[0]}", FAILED)
    for cause in causes:
        if isinstance(cause, ShoalError):
            wrong_usage = isinstance(cause, ConfigError) and not isinstance(cause, NodeNotRunning)
            return _complain(str(cause), WRONG_USAGE if wrong_usage else FAILED)
    return INTERRUPTED


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """The exceptions inside nested groups, in order; a plain exception is its own leaf."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _usage_error(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    command = "shoal" if context is None else context.command_path
    return f"{error.format_message().rstrip('.')}; see `{command} --help`"


def _complain(text: str, code: int) -> int:
    print(f"shoal: {in_one_line(text)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
