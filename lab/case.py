"""One benchmark as `shoal bench` has it: what it takes, how it runs, the rows it comes to, and the targets of these.

    spec ──run──► result ──rows──► each number beside its target ──► exit code, table of a page
                    ├──document──► --json
                    └──lines─────► people

Targets are declared where the number is measured (`shoal.lab.targets`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Generic, Protocol, TypeVar

import msgspec
import typer

from shoal.cli.options import AsJson, ProgressOptions, ReportOptions, command_of
from shoal.cli.render import ShowNow, progress_display
from shoal.lab.targets import Row, missed
from shoal.node.options import Option

MISSED = 1
"""The exit code where a target is missed, or a value is wrong."""

Check = Annotated[bool, Option("--check", help="Exit with code 1 if a target is missed.")]


# -- what a benchmark takes ----------------------------------------------------------------------------------


class Checked(Protocol):
    """What every benchmark takes."""

    @property
    def check(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PageOptions:
    """Of a command that makes a page of results that are there."""

    out: Annotated[
        Path | None, Option("--out", "-o", help="The page, in Markdown; plots go beside it.", metavar="FILE")
    ] = None
    check: Check = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseOptions:
    """Of a benchmark that tells nothing until it is done."""

    as_json: AsJson = False
    check: Check = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LongCaseOptions(ReportOptions):
    """Of a benchmark that tells how far it is."""

    check: Check = False


# -- the benchmark itself ------------------------------------------------------------------------------------

SpecT = TypeVar("SpecT", bound=Checked)
ResultT = TypeVar("ResultT")


def _always(result: object) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Case(Generic[SpecT, ResultT]):
    """One benchmark.

    spec: its options. run: measures, telling how far it is; its docstring is the command's help. lines: for people.
    rows: what was measured beside its targets. document: for --json, None where `run` prints as
    it goes. sound: whether nothing is wrong; where something is, the command ends with 1, checked or not.
    """

    spec: type[SpecT]
    run: Callable[[SpecT, ShowNow], ResultT]
    lines: Callable[[ResultT], Iterable[str]]
    rows: Callable[[ResultT], Sequence[Row]] = attrgetter("rows")
    document: Callable[[ResultT], object] | None = msgspec.to_builtins
    sound: Callable[[ResultT], bool] = _always

    def __call__(self, spec: SpecT) -> None:
        """Measure and print. Raises ShoalError, and typer.Exit with 1 where something is wrong or missed."""
        with _telling(spec) as tell:
            result = self.run(spec, tell)
        self._print(spec, result)
        end(spec, self.rows(result), sound=self.sound(result))

    def _print(self, spec: SpecT, result: ResultT) -> None:
        if not _wants_json(spec):
            typer.echo("\n".join(self.lines(result)))
        elif self.document is not None:
            typer.echo(msgspec.json.encode(self.document(result)).decode())

    def command(self) -> Callable[..., None]:
        """The case as Typer takes a command."""

        def execute(spec: SpecT) -> None:
            self(spec)

        execute.__doc__ = self.run.__doc__
        execute.__annotations__["spec"] = self.spec
        return command_of(execute)


def end(spec: Checked, rows: Sequence[Row], *, sound: bool = True) -> None:
    """End a command: with code 1 where not `sound` or, with --check, a row is missed, each of which gets a line."""
    lines = [f"missed: {row}" for row in missed(rows)] if spec.check else []
    if spec.check and all(row.met is None for row in rows):
        typer.echo("nothing was measured that has a target", err=True)
    for line in lines:
        typer.echo(line, err=True)
    if lines or not sound:
        raise typer.Exit(MISSED)


def _wants_json(spec: object) -> bool:
    return isinstance(spec, CaseOptions | ReportOptions) and spec.as_json


@contextmanager
def _telling(spec: object) -> Iterator[ShowNow]:
    """Show how far it is in a live line, or in lines on stderr where there is no option for how."""
    if isinstance(spec, ProgressOptions):
        with progress_display(log_format=spec.log_format, log_level=spec.log_level) as show_now:
            yield show_now
    else:
        yield _tell


def _tell(text: str, share: float | None = None) -> None:
    typer.echo(text, err=True)
