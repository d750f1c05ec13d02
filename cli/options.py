"""Options that commands share, the environment variable of each, and how the texts of some become values.

An option --some-thing is also SHOAL_SOME_THING, whatever command it belongs to.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import platformdirs
import typer

from shoal.protocol.errors import ConfigError

DEFAULT_DATA_DIR = platformdirs.user_data_path("shoal", appauthor=False)
NODE_KEY_NAME = "node.key"
AUTHORITY_KEY_NAME = "authority.key"
RATE_LIMIT_BYTES_PER_S = 10**12
PORT_LIMIT = 65_535

_RATE = re.compile(r"(?P<number>\d{1,12}(\.\d{1,6})?) ?(?P<prefix>[kKMG]i?)?(?P<unit>B|bit|bps)?(/s)?", re.ASCII)
_PREFIXES = {None: 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}

OptionsT = TypeVar("OptionsT")


_PANELS: dict[str, tuple[str, ...]] = {
    "Network": (
        *("--join", "--listen", "--lane-listen", "--max-upload", "--max-download", "--mdns", "--relay"),
        *("--shared-memory", "--port-mapping", "--rendezvous", "--hivemind"),
    ),
    "Training": (
        *("--device", "--threads", "--accumulate", "--processes", "--data", "--rounds", "--allow-workload"),
        "--loop-patience",
    ),
    "Sharing rollouts": ("--rollouts", "--local-groups", "--external-groups", "--group-size"),
    "Checkpoints, and going along with others": (
        *("--checkpoint-every", "--checkpoint-keep", "--rollback", "--authority-amendments"),
        "--forget-promises",
    ),
    "Watching": ("--dashboard", "--tensorboard", "--wandb", "--log-format", "--log-level"),
}
"""The options that `--help` shows together, whatever command they belong to; all others come first."""
_PANEL_OF = {name: panel for panel, names in _PANELS.items() for name in names}


def option(*names: str, help: str, hidden: bool = False, metavar: str | None = None) -> Any:
    """A Typer option with the environment variable of its first long name."""
    long_name = next(name for name in names if name.startswith("--")).partition("/")[0]
    variable = "SHOAL_" + long_name.removeprefix("--").replace("-", "_").upper()
    return typer.Option(
        *names,
        help=no_markup(help),
        envvar=variable,
        show_envvar=False,
        hidden=hidden,
        metavar=metavar,
        rich_help_panel=_PANEL_OF.get(long_name),
    )


def no_markup(text: str) -> str:
    """A text for `--help` in which a bracket is one, and no markup. Such a text stays as it is."""
    return re.sub(r"(?<!\\)\[", r"\\[", text)


def help_of(execute: Callable[..., None]) -> str:
    """A command's docstring for `--help`, where every paragraph fills its lines anew."""
    paragraphs = (inspect.getdoc(execute) or "").split("\n\n")
    return no_markup("\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs))


DataDir = Annotated[Path, option("--data-dir", help="Where this node keeps its key and its state.", metavar="FOLDER")]
Device = Annotated[str, option("--device", help="auto, cpu, cuda, cuda:1 … or mps.")]
Data = Annotated[
    str | None, option("--data", help="A file or folder to train on, for workloads that read one.", metavar="PATH")
]
AllowWorkload = Annotated[
    list[str],
    option(
        "--allow-workload",
        help="Code that a manifest may name besides installed workloads. Repeatable.",
        metavar="MODULE:CLASS",
    ),
]
Listen = Annotated[list[str], option("--listen", help="Where to listen, like /ip4/0.0.0.0/tcp/4001. Repeatable.")]
Strategy = Annotated[str, option("--strategy", help="How nodes synchronise.")]
Withdraw = Annotated[bool, option("--withdraw", help="Take back what was ordered before.")]
AsJson = Annotated[bool, option("--json", help="Print one JSON document on stdout.")]
LogFormat = Annotated[Literal["text", "json"], option("--log-format", help="How log lines on stderr are written.")]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"], option("--log-level", help="The least severe records shown.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressOptions:
    """Of a command that takes long: how it tells what goes on."""

    log_format: LogFormat = "text"
    log_level: LogLevel = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions(ProgressOptions):
    """Of a command that takes long and ends with a report."""

    as_json: AsJson = False


def command_of(options: type[OptionsT], execute: Callable[[OptionsT], None]) -> Callable[..., None]:
    """`execute`, which takes one dataclass, as the function with a parameter per option that Typer asks for."""
    hints = get_type_hints(options, include_extras=True)

    def command(**values: Any) -> None:
        execute(options(**values))

    # Typer reads a command's options off its signature; no call in this program relies on it.
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                annotation=hints[field.name],
                default=_default_of(field.default, field.default_factory),
            )
            for field in _in_order(options)
        ]
    )
    command.__annotations__ = hints
    command.__doc__ = help_of(execute)
    return command


def _in_order(options: type[Any]) -> list[Field[Any]]:
    """A command's own options, then those it shares."""
    names = [name for kind in options.__mro__ for name in vars(kind).get("__annotations__", ())]
    return sorted(fields(options), key=lambda field: names.index(field.name))


def _default_of(default: object, factory: object) -> object:
    if default is not MISSING:
        return default
    return factory() if callable(factory) else inspect.Parameter.empty


def parse_rate(text: str, option: str) -> int:
    """Bytes per second out of "10M", "5MiB/s" or "80Mbit". Raises ConfigError that names `option`."""
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{option}: {text!r} is not a rate; write 10M or 10MB/s for bytes, 80Mbit for bits a second")
    bits_per_unit = 1 if match["unit"] in ("bit", "bps") else 8
    rate = int(float(match["number"]) * _PREFIXES[match["prefix"]] * bits_per_unit / 8)
    if not 1 <= rate <= RATE_LIMIT_BYTES_PER_S:
        raise ConfigError(f"{option}: {text!r} is no useful rate; leave {option} out for no limit")
    return rate


def parse_host_port(text: str, option: str) -> tuple[str, int]:
    """Host and port of "0.0.0.0:4100" or "[::]:4100"; port 0 lets the system choose. Raises ConfigError."""
    match = re.fullmatch(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[^\s:\[\]]+)):(?P<port>\d{1,5})", text, re.ASCII)
    if match is None or int(match["port"]) > PORT_LIMIT:
        raise ConfigError(f"{option}: {text!r} is not HOST:PORT; write 0.0.0.0:4100, or [::]:4100 for IPv6")
    return match["v6"] or match["host"], int(match["port"])


def parse_seeds(text: str | None, seed: int) -> tuple[int, ...]:
    """The seeds of "1,2,3", or that one where there is no text. Raises ConfigError."""
    return (seed,) if text is None else parse_numbers(text, "--seeds")


def parse_numbers(text: str, option: str) -> tuple[int, ...]:
    """The numbers of "2,4". Raises ConfigError that names `option`."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option}: {text!r} is not a list of numbers; write them like 2,4") from None
