"""Commands that run swarms for long: a folder for what they leave, word of what goes on, and a report in the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

import typer

from shoal.cli.logs import FOR_USER
from shoal.cli.options import ReportOptions
from shoal.cli.render import ShowNow, progress_display
from shoal.cli.text import in_one_line
from shoal.node.option import Option

PROBLEMS_SHOWN = 5

log = logging.getLogger(FOR_USER)

ReportT = TypeVar("ReportT")

RunFolder = Annotated[
    Path | None, Option("--out", help="Where the report and the nodes' folders go.", metavar="FOLDER")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRunOptions(ReportOptions):
    """Options of a command that runs a swarm and leaves its report and the nodes' folders."""

    out: RunFolder = None


def run_and_report(
    options: LongRunOptions,
    command: str,
    run: Callable[[Path, ShowNow], ReportT],
    *,
    to_json: Callable[[ReportT], str | bytes],
    summary: Callable[[ReportT, Path], Sequence[str]],
    ok: Callable[[ReportT], bool],
) -> NoReturn:
    """Do the run in its folder, print its report, and end with exit code 0, or 1 if it is not `ok`.

    Raises what `run` raises.
    """
    out = run_folder(options.out, command)
    with progress_display(log_format=options.log_format, log_level=options.log_level) as show_now:
        report = run(out, show_now)
    typer.echo(to_json(report) if options.as_json else "\n".join(summary(report, out)))
    raise typer.Exit(0 if ok(report) else 1)


def run_folder(out: Path | None, command: str) -> Path:
    """Return the folder of --out, or one named after this moment."""
    return out or Path("runs") / time.strftime(f"{command}-%Y%m%d-%H%M%S")


def tell(line: str, *, failed: bool, problems: Sequence[str] = ()) -> None:
    """One line in the log for a part of the run that is over, and one for each of its first problems."""
    log.log(logging.ERROR if failed else logging.INFO, "%s", line)
    for problem in problems[:PROBLEMS_SHOWN]:
        log.error("  %s", in_one_line(problem))
