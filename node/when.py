"""When a node trains: `--only-when`, which pauses it as `shoal pause` does for as long as its user wants it to.

    mains          the machine is not on its battery
    HH:MM-HH:MM    by the machine's local time, over midnight too; of several times of day one is enough
    idle           for IDLE_S other programs used less than BUSY_SHARE of all processors, and nobody typed in a terminal

All kinds that are given have to hold. A program that begins is given way to within BUSY_S; a single busy moment of less
is none, and a node that found its machine busy waits for IDLE_S of quiet again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from shoal.protocol.errors import ConfigError

BUSY_S: Final = 10.0
IDLE_S: Final = 120.0
BUSY_SHARE: Final = 0.25
WHENS_LIMIT: Final = 16

IDLE, MAINS = "idle", "mains"
_TIMES = re.compile(r"(\d\d):(\d\d)-(\d\d):(\d\d)", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class When:
    """One condition, as its user wrote it. begins, ends: in minutes of the day; None for what is no time of day."""

    text: str
    begins: int | None = None
    ends: int | None = None

    def __str__(self) -> str:
        return self.text

    def includes(self, minute: int) -> bool:
        """True if a minute of the day is in it."""
        if self.begins is None or self.ends is None:
            return False
        if self.begins < self.ends:
            return self.begins <= minute < self.ends
        return minute >= self.begins or minute < self.ends


def parse_when(text: str, option: str) -> When:
    """Condition that a user wrote. Raises ConfigError."""
    if text in (IDLE, MAINS):
        return When(text=text)
    match = _TIMES.fullmatch(text)
    hours = [int(word) for word in match.groups()] if match else []
    if not match or max(hours[::2]) > 23 or max(hours[1::2]) > 59:
        raise ConfigError(f"{option}: {text!r} is none of idle, mains, and a time of day such as 22:00-07:30")
    begins, ends = hours[0] * 60 + hours[1], hours[2] * 60 + hours[3]
    if begins == ends:
        raise ConfigError(f"{option}: {text} begins when it ends; leave it out for the whole day")
    return When(text=text, begins=begins, ends=ends)


def check_whens(whens: Sequence[When], option: str) -> None:
    """Raise ConfigError where there are too many."""
    if len(whens) > WHENS_LIMIT:
        raise ConfigError(f"{option}: at most {WHENS_LIMIT}")


class Readings(Protocol):
    """Readings of this machine. Each blocks for some milliseconds at most."""

    def is_on_mains(self) -> bool:
        """False if the machine is on its battery; True also where it has none."""

    def others_share(self) -> float:
        """The share of all processors that other programs used since this was asked last, in 0..1."""

    def since_input_s(self) -> float | None:
        """Seconds since somebody typed in a terminal of this machine; None where that cannot be known."""

    def minute_of_day(self) -> int:
        """The local time, in 0..1439."""


class Rule:
    """Conditions of one node, look by look. now: seconds on a clock that never goes back."""

    def __init__(self, whens: Sequence[When], readings: Readings) -> None:
        self._readings = readings
        self._kinds = {when.text for when in whens}
        self._times = [when for when in whens if when.begins is not None]
        self._quiet_since: float | None = None
        self._busy_since: float | None = None
        self._is_idle = False

    def why_not(self, now: float) -> str:
        """Why this node is not to train now, in words that follow "it waits: "; empty if it may."""
        reasons = []
        if MAINS in self._kinds and not self._readings.is_on_mains():
            reasons.append("the machine is on its battery")
        if self._times and not any(one.includes(self._readings.minute_of_day()) for one in self._times):
            reasons.append(f"it is not {' or '.join(map(str, self._times))}")
        if IDLE in self._kinds and not self._looks_idle(now):
            reasons.append("the machine is in use")
        return " and ".join(reasons)

    def _looks_idle(self, now: float) -> bool:
        typed_s = self._readings.since_input_s()
        is_used = typed_s is not None and typed_s < IDLE_S
        if self._readings.others_share() < BUSY_SHARE:
            self._quiet_since, self._busy_since = now if self._quiet_since is None else self._quiet_since, None
        else:
            self._busy_since = now if self._busy_since is None else self._busy_since
            if not self._is_idle or now - self._busy_since >= BUSY_S:
                self._quiet_since = None
        is_quiet = self._quiet_since is not None and (self._is_idle or now - self._quiet_since >= IDLE_S)
        self._is_idle = is_quiet and not is_used
        return self._is_idle
