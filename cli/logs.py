"""Output of log records: to stderr, as text or as one JSON object a line, above a live display if there is one."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from shoal.cli.text import escaped
from shoal.protocol.names import by_name

if TYPE_CHECKING:
    from rich.console import Console


FOR_USER = "shoal.progress"
"""Logger of the lines that are for who runs the command, as text without its name."""
REPEAT_S = 60.0
"""A line that says the same as one of this last minute is not shown again."""
REPEATS_LIMIT = 256
"""Lines that are remembered for that: the newest."""
NAMES_LIMIT = 4096
"""Peers whose names are kept: the newest."""


@dataclass(slots=True)
class Context:
    """Fields that JSON records have beside their own: this node's PeerId, and where it is in its rounds."""

    peer: str | None = None
    round: int | None = None
    phase: str | None = None


@dataclass(slots=True)
class Known:
    """Names by which text shows the peers of this process's node, and its own PeerId."""

    own: str = ""
    names: dict[str, str] = field(default_factory=dict)

    def note(self, peer: str, name: str) -> None:
        """Show this peer by this name from now on, as it was never named if that is empty."""
        self.names.pop(peer, None)
        if len(self.names) >= NAMES_LIMIT:
            del self.names[next(iter(self.names))]
        if name:
            self.names[peer] = name


context = Context()
"""Of this process, which runs at most one node."""
known = Known()
"""The same."""


class TextFormatter(logging.Formatter):
    """`12:30:59 warning shoal.node.rounds.engine: text`, and the traceback below; without the logger where the line is
    for the user. `brief`, for a person who watches, leaves out what goes without saying, PeerIds behind names too.

    A peer's text cannot forge a line.
    """

    def __init__(self, *, brief: bool) -> None:
        super().__init__()
        self._brief = brief

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as one line, or more for a traceback."""
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        origin = "" if self._brief and record.levelno == logging.INFO else f"{record.levelname.lower()} "
        origin += "" if self._brief or record.name == FOR_USER else f"{record.name}: "
        message = by_name(record.getMessage(), known.names, own=known.own, whole=not self._brief)
        line = f"{at} {origin}{escaped(message)}"
        return line if record.exc_info is None else f"{line}\n{_traceback(record)}"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: at (wall-clock seconds), level, logger, message and, of an error, traceback.

    Of a node that runs also peer, round and phase, as soon as they are known.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as one line."""
        fields: dict[str, str | float | None] = {
            "at": round(record.created, 4),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{name: value for name, value in asdict(context).items() if value is not None},
        }
        if record.exc_info is not None:
            fields["traceback"] = _traceback(record)
        return json.dumps(fields, separators=(",", ":"))


def _traceback(record: logging.LogRecord) -> str:
    assert record.exc_info is not None
    return "".join(traceback.format_exception(record.exc_info[1])).rstrip("\n")


class Repeats(logging.Filter):
    """Lets one record of a minute through where an attempt that is made again and again says the same each time."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: dict[tuple[str, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """True for what is to be shown: warnings and errors always."""
        if record.levelno != logging.INFO:
            return True
        line = record.name, record.getMessage()
        if 0 <= record.created - self._shown.get(line, -math.inf) < REPEAT_S:
            return False
        self._shown.pop(line, None)
        if len(self._shown) >= REPEATS_LIMIT:
            del self._shown[next(iter(self._shown))]
        self._shown[line] = record.created
        return True


class ConsoleHandler(logging.Handler):
    """Prints records through the console of a live display, which keeps its place below them."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record; never raises."""
        try:
            style = (
                "red" if record.levelno >= logging.ERROR else "yellow" if record.levelno >= logging.WARNING else None
            )
            self._console.print(self.format(record), style=style, markup=False, highlight=False, soft_wrap=True)
        except Exception:  # logging's contract: a record that cannot be shown must not stop the program
            self.handleError(record)


def configure(*, log_format: str, level: str, console: Console | None) -> None:
    """Send this program's records, and warnings of others, to stderr: through `console` if there is one.

    Text is brief where stderr is a terminal. Replaces what an earlier call set up.
    """
    context.peer = context.round = context.phase = None
    known.own, known.names = "", {}
    handler: logging.Handler = logging.StreamHandler() if console is None else ConsoleHandler(console)
    watched = console is not None or sys.stderr.isatty()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter(brief=watched))
    if level != "debug":
        handler.addFilter(Repeats())
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old.formatter, TextFormatter | JsonFormatter)]:
        root.removeHandler(old)
    root.addHandler(handler)
    shown = logging.getLevelNamesMapping()[level.upper()]
    root.setLevel(max(shown, logging.WARNING))
    logging.getLogger("shoal").setLevel(shown)
    # libp2p reports every connection that peers break; what matters of that, Shoal says itself.
    logging.getLogger("libp2p").setLevel(logging.DEBUG if level == "debug" else logging.CRITICAL)
