"""An option of a command, declared once: as the metadata of the field or parameter that it fills.

The options of `shoal run` are the fields of `NodeOptions`, in `shoal.node.options`.

    threads: Annotated[int, Option("--threads", help="CPU threads of the trainer.", check=Within(0, 4096))] = 0

The type and the default are the field's own. From this one line come the option of the command line with its
environment variable and its place in `--help` (`shoal.cli.options`), the check of what the user wrote, and the row in
the page of commands (`shoal.lab.commands_page`). A field without an `Option` is none of the user's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from shoal.protocol.errors import ConfigError

RATE_LIMIT_BYTES_PER_S = 10**12
PORT_LIMIT = 65_535

_RATE = re.compile(r"(?P<number>\d{1,12}(\.\d{1,6})?) ?(?P<prefix>[kKMG]i?)?(?P<unit>B|bit|bps)?(/s)?", re.ASCII)
_PREFIXES = {None: 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}

Check = Callable[[Any, str], object]
"""Takes a value and the option's name. Raises ConfigError that says what to do."""
Parse = Callable[[str, str], object]
"""Takes what the user wrote and the option's name; returns the value. Raises ConfigError."""


class Option:
    """Declaration of an option, as far as its field's type and default leave it open.

    names: such as "--out", "-o"; "--relay/--no-relay" is a pair that says yes or no. panel: the heading under which
    `--help` shows it. parse: of an option that is written as text and is none; the default's `str` is that text. A
    field that is a tuple is an option that may be repeated, and both parse and the text are of one of its items.
    check: of the value of the whole field, unless that is None.
    """

    def __init__(
        self,
        *names: str,
        help: str,
        metavar: str | None = None,
        panel: str | None = None,
        hidden: bool = False,
        parse: Parse | None = None,
        check: Check | None = None,
    ) -> None:
        self.names = names
        self.help, self.metavar, self.panel, self.hidden = help, metavar, panel, hidden
        self.parse, self.check = parse, check

    @property
    def name(self) -> str:
        """The first long one, without its opposite."""
        return next(name for name in self.names if name.startswith("--")).partition("/")[0]

    @property
    def variable(self) -> str:
        """The environment variable that stands for it, whatever command it belongs to."""
        return "SHOAL_" + self.name.removeprefix("--").replace("-", "_").upper()


def option_of(hint: object) -> Option | None:
    """The option that an annotation declares."""
    found = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((one for one in found if isinstance(one, Option)), None)


def options_of(kind: type) -> dict[str, Option]:
    """The options that a dataclass declares, by its fields."""
    found = {name: option_of(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}
    return {name: option for name, option in found.items() if option is not None}


def check_options(options: Any) -> None:
    """Raise ConfigError for the first option of a dataclass whose value cannot be used."""
    for name, option in options_of(type(options)).items():
        value = getattr(options, name)
        if option.check is not None and value is not None:
            option.check(value, option.name)


def given_options(options: Any) -> Iterator[Option]:
    """The options of a dataclass that are not what they are by default."""
    declared = options_of(type(options))
    for field in fields(options):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if field.name in declared and getattr(options, field.name) != default:
            yield declared[field.name]


class Within:
    """Checks that a number is in least..most. what: what it would be there; advice: what helps where it is not."""

    def __init__(self, least: float, most: float, advice: str = "", *, what: str = "") -> None:
        self.least, self.most = least, most
        self._what, self._advice = what, f"; {advice}" if advice else ""

    def __call__(self, value: float, option: str) -> None:
        """Raise ConfigError if it is not."""
        if self.least <= value <= self.most:
            return
        if self._what:
            raise ConfigError(f"{option}: {value} is no {self._what}{self._advice}")
        raise ConfigError(f"{option}: {value} is not in {self.least}..{self.most}{self._advice}")


def check_exists(path: str | Path, option: str) -> None:
    """Raise ConfigError where there is no such file or folder."""
    if not Path(path).exists():
        raise ConfigError(f"{option}: there is no {path}; check the path")


class HostPort(NamedTuple):
    """Address to listen at; port 0 lets the system choose."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_host_port(text: str, option: str) -> HostPort:
    """Host and port of "0.0.0.0:4100" or "[::]:4100". Raises ConfigError that names `option`."""
    match = re.fullmatch(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[^\s:\[\]]+)):(?P<port>\d{1,5})", text, re.ASCII)
    if match is None or int(match["port"]) > PORT_LIMIT:
        raise ConfigError(f"{option}: {text!r} is not HOST:PORT; write 0.0.0.0:4100, or [::]:4100 for IPv6")
    return HostPort(match["v6"] or match["host"], int(match["port"]))


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
