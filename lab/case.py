"""One benchmark as `shoal bench` has it: what it takes, how it runs, the rows it comes to, and the targets of these.

    spec ──run──► result ──rows──► each number beside its target ──► exit code, table of a page
                    └──document──► --json, and lines for people

A spec's fields are the command's options (`shoal.node.option`); how its result is told is declared
here, once for all (`CaseOptions`).
Targets are declared where the number is measured (`shoal.lab.targets`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any, Generic, TypeVar

import msgspec
import typer

from shoal.cli.options import AsJson, ProgressOptions, ReportOptions, command_of
from shoal.cli.render import ShowNow, progress_display
from shoal.cli.text import in_one_line
from shoal.lab.targets import Row, missed
from shoal.node.option import Option, check_options
from shoal.protocol.errors import ConfigError

FEW = 8
"""So many parts of a list are told one by one."""
MISSED = 1
"""The exit code where a target is missed, or a value is wrong."""

Check = Annotated[bool, Option("--check", help="Exit with code 1 if a target is missed.")]


# -- what every benchmark takes ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseOptions:
    """Options of a benchmark that tells nothing until it is done."""

    as_json: AsJson = False
    check: Check = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LongCaseOptions(ReportOptions):
    """Options of a benchmark that tells how far it is."""

    check: Check = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """Options of a benchmark. Raises ConfigError for a value that one of them cannot have."""

    def __post_init__(self) -> None:
        check_options(self)


class Numbers(tuple[int, ...]):
    """Numbers that are written as one text, like "2,4"."""

    __slots__ = ()

    def __str__(self) -> str:
        return ",".join(map(str, self))


def parse_numbers(text: str, option: str) -> Numbers:
    """The numbers of "2,4". Raises ConfigError that names `option`."""
    try:
        return Numbers(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option}: {text!r} is not a list of numbers; write them like 2,4") from None


# -- the benchmark itself ------------------------------------------------------------------------------------

SpecT = TypeVar("SpecT")


def _always(result: object) -> bool:
    return True


def _fields(result: object) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(result, str_keys=True, enc_hook=str)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Case(Generic[SpecT]):
    """One benchmark.

    spec: its options. run: measures, telling how far it is; its docstring is the command's help. rows: what was
    measured beside its targets. document: for --json, which has the rows too. lines: for people, where these are not
    the document's. sound: whether nothing is wrong; where something is, the command ends with 1, checked or not.
    options: of how it is told. in_parts: `run` makes the items of a sequence, each with a document of its own; of
    several --json prints one, in which they are the `cases`.
    """

    spec: type[SpecT]
    run: Callable[[SpecT, ShowNow], Any]
    lines: Callable[[Any], Iterable[str]] | None = None
    rows: Callable[[Any], Sequence[Row]] = attrgetter("rows")
    document: Callable[[Any], dict[str, Any]] = _fields
    sound: Callable[[Any], bool] = _always
    options: type[CaseOptions | LongCaseOptions] = CaseOptions
    in_parts: bool = False

    def __call__(self, spec: SpecT, options: CaseOptions | LongCaseOptions | None = None) -> None:
        """Measure and print. Raises ShoalError, and typer.Exit with 1 where something is wrong or missed."""
        options = self.options() if options is None else options
        with _telling(options) as tell:
            result = self.run(spec, tell)
            if self.in_parts:
                result = list(result)
        rows = self.rows(result)
        if options.as_json:
            typer.echo(msgspec.json.encode({**self._whole_document(result), "rows": rows}).decode())
        else:
            typer.echo("\n".join(self.told(result)))
        end(options.check, rows, sound=self.sound(result))

    def told(self, result: Any) -> list[str]:
        """A result for people: what its document has, a line each, and the rows."""
        if self.lines is not None:
            return list(self.lines(result))
        parts = result if self.in_parts else [result]
        facts = [fact for part in parts for fact in _facts("", self.document(part))]
        return [f"{name:<32}  {text}" for name, text in facts] + [str(row) for row in self.rows(result)]

    def _whole_document(self, result: Any) -> dict[str, Any]:
        if not self.in_parts:
            return self.document(result)
        cases = [{**self.document(part), "rows": self.rows([part])} for part in result]
        return cases[0] if len(cases) == 1 else {"cases": cases}

    def command(self) -> Callable[..., None]:
        """The case as Typer takes a command."""

        def execute(spec: SpecT, options: CaseOptions | LongCaseOptions) -> None:
            self(spec, options)

        execute.__doc__ = self.run.__doc__
        execute.__annotations__.update(spec=self.spec, options=self.options)
        return command_of(execute)


def _facts(name: str, found: Any) -> Iterator[tuple[str, str]]:
    """Every number and text of a document with its path, but for the rows; of many numbers, from where to where."""
    match found:
        case {"median": median, "least": least, "most": most}:
            yield name, f"{_shown(median)} ({_shown(least)} to {_shown(most)})"
        case dict():
            for key, value in found.items():
                if key != "rows":
                    yield from _facts(f"{name}.{key}" if name else str(key), value)
        case list() | tuple() if any(isinstance(one, dict | list | tuple) for one in found):
            if len(found) > FEW:
                yield name, f"{len(found)}, see --json"
            for number, one in enumerate(found if len(found) <= FEW else ()):
                yield from _facts(f"{name}.{number}", one)
        case list() | tuple() if len(found) > FEW and all(isinstance(one, int | float) for one in found):
            yield name, f"{len(found)}, {_shown(min(found))} to {_shown(max(found))}"
        case list() | tuple():
            yield name, ", ".join(map(_shown, found)) or "none"
        case _:
            yield name, _shown(found)


def _shown(value: object) -> str:
    if value is None:
        return "none"
    return f"{value:.6g}" if isinstance(value, float) else in_one_line(str(value))


def end(check: bool, rows: Sequence[Row], *, sound: bool = True) -> None:
    """End a command: with code 1 where not `sound` or, if they are checked, a row is missed, each on a line."""
    lines = [f"missed: {row}" for row in missed(rows)] if check else []
    if check and all(row.met is None for row in rows):
        typer.echo("nothing was measured that has a target", err=True)
    for line in lines:
        typer.echo(line, err=True)
    if lines or not sound:
        raise typer.Exit(MISSED)


@contextmanager
def _telling(options: object) -> Iterator[ShowNow]:
    """Show how far it is in a live line, or in lines on stderr where there is no option for how."""
    if isinstance(options, ProgressOptions):
        with progress_display(log_format=options.log_format, log_level=options.log_level) as show_now:
            yield show_now
    else:
        yield _tell


def _tell(text: str, share: float | None = None, *, of: str = "") -> None:
    typer.echo(text, err=True)


def tell_nothing(text: str, share: float | None = None, *, of: str = "") -> None:
    """Tell nobody how far a run is."""
