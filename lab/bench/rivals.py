"""Other systems' all-reduces, each run by a command that somebody else wrote, and how its time is read.

A command has `{peers}` and `{numel}` where these numbers go. Its time is `median_s` of the last line on stdout that is
a JSON object with that key. For a program that prints text a pattern is given instead: its group 1 is the seconds of
one repetition, the first of which warms up; the median of the others counts.
"""

from __future__ import annotations

import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import trio

from shoal.protocol.errors import ConfigError, NetworkError

DEADLINE_S: Final = 900.0
OUTPUT_SHOWN_CHARS: Final = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A system to run beside ours. pattern: None for one that prints JSON."""

    name: str
    command: str
    pattern: re.Pattern[str] | None = None


class _Printed(msgspec.Struct):
    """The line that counts; it may have more keys."""

    median_s: float


def gloo(iters: int) -> Rival:
    """The yardstick that comes with Shoal."""
    command = shlex.join([sys.executable, "-m", "shoal.lab.bench.gloo", "--iters", str(iters)])
    return Rival(name="gloo", command=f"{command} --peers {{peers}} --numel {{numel}}")


def parse_rivals(commands: Sequence[str], patterns: Sequence[str]) -> tuple[Rival, ...]:
    """The rivals of texts NAME=COMMAND, and NAME=REGEX for some of them. Raises ConfigError."""
    compiled: dict[str, re.Pattern[str]] = {}
    for name, text in (_named("--rival-regex", pattern) for pattern in patterns):
        try:
            compiled[name] = re.compile(text)
        except re.error as error:
            raise ConfigError(f"--rival-regex {name}: {error}") from None
        if compiled[name].groups < 1:
            raise ConfigError(f"--rival-regex {name}: the seconds must be a group, like 'took ([0-9.]+) s'")
    rivals = [_named("--rival", command) for command in commands]
    unknown = set(compiled) - {name for name, _ in rivals}
    if unknown:
        raise ConfigError(f"--rival-regex: there is no --rival {min(unknown)}")
    return tuple(Rival(name=name, command=command, pattern=compiled.get(name)) for name, command in rivals)


def _named(option: str, text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not re.fullmatch(r"[A-Za-z0-9._-]{1,40}", name) or not value.strip():
        raise ConfigError(f"{option}: {text!r} is not NAME=…; write {option} 'hivemind=python averager.py'")
    return name, value


async def run_rival(rival: Rival, *, peers: int, numel: int) -> float:
    """Seconds of one all-reduce, as the rival's own command measured it.

    Raises NetworkError if it fails, takes longer than DEADLINE_S, or prints no time. Cancellation ends the command.
    """
    words = shlex.split(rival.command.replace("{peers}", str(peers)).replace("{numel}", str(numel)))
    with trio.move_on_after(DEADLINE_S):
        try:
            ended = await trio.run_process(
                words, capture_stdout=True, stderr=subprocess.STDOUT if rival.pattern else None, check=False
            )
        except OSError as error:
            raise NetworkError(f"rival {rival.name}: {error.strerror}: {words[0]}") from None
        text = ended.stdout.decode(errors="replace")
        if ended.returncode != 0:
            raise NetworkError(f"rival {rival.name} exited with {ended.returncode}: …{text[-OUTPUT_SHOWN_CHARS:]}")
        return read_time(rival, text)
    raise NetworkError(f"rival {rival.name} took longer than {DEADLINE_S:.0f} s")


def read_time(rival: Rival, text: str) -> float:
    """The seconds in what a rival printed. Raises NetworkError if there are none."""
    if rival.pattern is not None:
        times = [float(match.group(1)) for match in rival.pattern.finditer(text)]
        if times:
            return statistics.median(times[1:] or times)
    else:
        for line in reversed(text.splitlines()):
            try:
                return msgspec.json.decode(line, type=_Printed).median_s
            except msgspec.DecodeError:
                continue
    raise NetworkError(f"rival {rival.name} printed no time: …{text[-OUTPUT_SHOWN_CHARS:]}")
