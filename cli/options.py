"""Conversion of declared options to commands of Typer; and the options that several commands of this program share.

A command is a function that takes either dataclasses whose fields declare its options, or a parameter for each.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from shoal.node.option import Option, option_of
from shoal.node.options import PANELS, TRAINING, WATCHING
from shoal.protocol.errors import ConfigError
from shoal.protocol.strategies.table import STRATEGIES, strategy_named

NODE_KEY_NAME = "node.key"
AUTHORITY_KEY_NAME = "authority.key"

AllowWorkload = Annotated[
    list[str],
    Option(
        "--allow-workload",
        help="Code that a manifest may name besides installed workloads. Repeatable.",
        metavar="MODULE:CLASS",
        panel=TRAINING,
    ),
]


def parse_strategy(text: str, option: str) -> str:
    """Name of a strategy. Raises ConfigError where there is none of it."""
    try:
        return strategy_named(text).name
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None


Strategy = Annotated[
    str, Option("--strategy", help=f"How nodes synchronise: {', '.join(STRATEGIES)}.", parse=parse_strategy)
]
Withdraw = Annotated[bool, Option("--withdraw", help="Take back what was ordered before.")]
AsJson = Annotated[bool, Option("--json", help="Print one JSON document on stdout.")]
LogFormat = Annotated[
    Literal["text", "json"], Option("--log-format", help="How log lines on stderr are written.", panel=WATCHING)
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"],
    Option("--log-level", help="The least severe records shown.", panel=WATCHING),
]


@dataclass(frozen=True, kw_only=True)  # without slots: beside `NodeOptions` it is one of two parents
class ProgressOptions:
    """Options of a command that takes long: how it shows its progress."""

    log_format: LogFormat = "text"
    log_level: LogLevel = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions(ProgressOptions):
    """Options of a command that takes long and ends with a report."""

    as_json: AsJson = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taken:
    """One thing that a command takes: a field or a parameter by its name, annotation and default, if it has one."""

    name: str
    hint: Any
    default: Any = inspect.Parameter.empty

    @property
    def option(self) -> Option | None:
        """Option that it declares; None for an argument, and for what Typer itself hands over."""
        return option_of(self.hint)

    @property
    def repeats(self) -> bool:
        """True if it is a tuple, for which Typer hands over a list."""
        return get_origin(get_args(self.hint)[0]) is tuple

    @property
    def parameter(self) -> inspect.Parameter:
        """Parameter as Typer asks for it."""
        hint, default, option = self.hint, self.default, self.option
        if option is not None:
            kind, has_default = get_args(hint)[0], default is not inspect.Parameter.empty
            if self.repeats:
                kind = list[str] if option.parse else list[get_args(kind)[0]]  # type: ignore[misc]
                default = [str(one) if option.parse else one for one in default] if has_default else default
            elif option.parse:
                kind = str if default is not None else str | None
                default = str(default) if has_default and default is not None else default
            hint = Annotated[kind, _for_typer(option)]
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=default)

    def value(self, given: Any) -> Any:
        """Convert a value from Typer into what the command takes. Raises ConfigError."""
        option = self.option
        if option is None or given is None:
            return given
        if self.repeats:
            return tuple(option.parse(one, option.name) if option.parse else one for one in given)
        return option.parse(given, option.name) if option.parse else given


def command_of(execute: Callable[..., None]) -> Callable[..., None]:
    """`execute` as a function with the parameters that Typer asks for. Called, it raises ConfigError first."""
    hints = get_type_hints(execute, include_extras=True)
    kinds: list[Any] = [hint for hint in hints.values() if is_dataclass(hint)]
    own = [[*_fields_of(kind)] for kind in kinds] or [[*_parameters_of(execute, hints)]]
    taken = [one for part in own for one in part]

    def command(**given: Any) -> None:
        values = [{one.name: one.value(given[one.name]) for one in part} for part in own]
        if kinds:
            execute(*(kind(**part) for kind, part in zip(kinds, values, strict=True)))
        else:
            execute(**values[0])

    parameters = [one.parameter for one in sorted(taken, key=_panel)]
    # Typer reads a command's options off its signature; no call in this program relies on it.
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    command.__doc__ = help_of(execute)
    return command


def _parameters_of(execute: Callable[..., None], hints: dict[str, Any]) -> Iterator[_Taken]:
    for name, parameter in inspect.signature(execute).parameters.items():
        yield _Taken(name=name, hint=hints[name], default=parameter.default)


def _fields_of(options: type[Any]) -> Iterator[_Taken]:
    """A command's own options, then those it shares. A field that declares nothing is none of the user's."""
    hints = get_type_hints(options, include_extras=True)
    names = [name for kind in options.__mro__ for name in vars(kind).get("__annotations__", ())]
    declared = [field for field in fields(options) if get_origin(hints[field.name]) is Annotated]
    for field in sorted(declared, key=lambda field: names.index(field.name)):
        yield _Taken(name=field.name, hint=hints[field.name], default=_default_of(field))


def _default_of(field: Field[Any]) -> object:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return inspect.Parameter.empty if field.default is MISSING else field.default


def _panel(taken: _Taken) -> int:
    panel = taken.option.panel if taken.option else None
    return PANELS.index(panel) if panel else -1


def _for_typer(option: Option) -> Any:
    return typer.Option(
        *option.names,
        help=no_markup(option.help),
        envvar=option.variable,
        show_envvar=False,
        hidden=option.hidden,
        metavar=option.metavar,
        rich_help_panel=option.panel,
    )


def no_markup(text: str) -> str:
    """A text for `--help` in which a bracket is one, and no markup. Such a text stays as it is."""
    return re.sub(r"(?<!\\)\[", r"\\[", text)


def help_of(execute: Callable[..., None]) -> str:
    """A command's docstring for `--help`, where every paragraph fills its lines anew."""
    paragraphs = (inspect.getdoc(execute) or "").split("\n\n")
    return no_markup("\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs))
