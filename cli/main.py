"""Entry of the `shoal` command: a command line ends with a line on stderr, if need be, and an exit code.

    0    done
    1    the job failed
    2    wrong usage or configuration: one line on stderr says what is wrong and what to do
    130  interrupted after a clean leave

The commands themselves are imported in the midst of it, so that an interrupt ends that as quietly as anything later.
"""

from __future__ import annotations

import errno
import shutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from shoal.cli.text import in_one_line
from shoal.protocol.errors import ConfigError, DiskFull, LocalError, ShoalError, StorageError

if TYPE_CHECKING:
    import typer

DONE, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130
PANELS_COLUMNS = 120
"""A terminal that is narrower gets plain help: columns in panels would cut the names of options."""
UNUSABLE = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR),
    *(errno.EIO, errno.ENOSPC, errno.EDQUOT),
)
"""Errors of a file that lie with its name, its mode or its disk: not with this program."""
OF_THE_LABORATORY = frozenset({"bench", "campaign", "chaos", "explore", "simulate", "soak"})
"""Commands that another distribution adds (`shoal.commands` among its entry points)."""


def main() -> None:
    """The entry point of the console script."""
    sys.exit(execute(sys.argv[1:]))


def execute(arguments: Sequence[str]) -> int:
    """Run one command line; returns its exit code, whatever happened."""
    try:
        import typer
        import typer.main

        from shoal.cli.commands import app_of

        command = typer.main.get_command(app_of(arguments))
    except KeyboardInterrupt:
        return INTERRUPTED
    try:
        if shutil.get_terminal_size().columns < PANELS_COLUMNS:
            _list_options_plainly(command, arguments)
        result = command.main(list(arguments), prog_name="shoal", standalone_mode=False)
    except typer.TyperException as error:
        return _complain(_usage_error(error, command, arguments), WRONG_USAGE)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BaseException as error:
        if isinstance(error, SystemExit | GeneratorExit):
            raise
        return _explain(error)
    return result if isinstance(result, int) else DONE


def _list_options_plainly(command: Any, arguments: Sequence[str]) -> None:
    """Let the help of the command that `arguments` name do without panels, unless it lists other commands."""
    command, _ = _named(command, arguments)
    if not hasattr(command, "commands"):
        command.rich_markup_mode = None
        for described in (command, *command.params):  # brackets are escaped for panels, where they are markup
            described.help = (getattr(described, "help", None) or "").replace("\\[", "[")


def _named(command: Any, arguments: Sequence[str]) -> tuple[Any, str]:
    """The command that `arguments` name, and what a user types for it."""
    path = ["shoal"]
    for word in arguments:
        if word in getattr(command, "commands", {}):
            command = command.commands[word]
            path.append(word)
    return command, " ".join(path)


def _explain(error: BaseException) -> int:
    """Say on stderr what went wrong: one line for what is foreseen, a traceback for a bug. Returns the exit code."""
    from shoal.node.control_client import NodeNotRunning

    causes = [_of_the_machine(cause) for cause in _leaves(error)]
    bugs = [cause for cause in causes if not isinstance(cause, ShoalError | KeyboardInterrupt)]
    bugs += [cause for cause in causes if isinstance(cause, LocalError)]
    if bugs:
        traceback.print_exception(error)
        return _complain(f"this is a bug in Shoal: {type(bugs[0]).__name__}: {bugs[0]}", FAILED)
    for cause in causes:
        if isinstance(cause, ShoalError):
            wrong_usage = isinstance(cause, ConfigError) and not isinstance(cause, NodeNotRunning | DiskFull)
            return _complain(str(cause), WRONG_USAGE if wrong_usage else FAILED)
    return INTERRUPTED


def _of_the_machine(error: BaseException) -> BaseException:
    """`error`, or, where a file cannot be used as a user wants it, one that says so; without a name it is stdout."""
    if not isinstance(error, OSError) or error.errno not in UNUSABLE:
        return error
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"cannot write {error.filename or 'the output'}: {error.strerror}; free some space")
    if error.filename is None:
        return error
    return StorageError(f"cannot use {error.filename}: {error.strerror}; check the path, its mode and the disk")


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """The exceptions inside nested groups, in order; a plain exception is its own leaf."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _usage_error(error: typer.TyperException, command: Any, arguments: Sequence[str]) -> str:
    text = error.format_message().rstrip(".").replace("Value error, ", "")
    lacking = next((name for name in OF_THE_LABORATORY if text.startswith(f"No such command '{name}'")), None)
    if lacking is not None:
        return f"`shoal {lacking}` comes with the laboratory: pip install shoal-lab, in a clone ./lab"
    return f"{text}; see `{_named(command, arguments)[1]} --help`"


def _complain(text: str, code: int) -> int:
    print(f"shoal: {in_one_line(text)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
