"""Readings of a machine, for who trains on it beside its user: power, load, input, and the time of day."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import psutil  # type: ignore[import-untyped]

POWER_SUPPLIES: Final = Path("/sys/class/power_supply")
"""Of Linux; see Documentation/ABI/testing/sysfs-class-power of its kernel."""
TERMINALS: Final = (Path("/dev/pts"), Path("/dev"))


def is_on_mains(supplies: Path = POWER_SUPPLIES) -> bool:
    """False if this machine is on its battery. Batteries of what is attached to it, such as a mouse, do not count."""
    if sys.platform != "linux":
        battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
        return battery is None or battery.power_plugged is not False
    own = [one for one in _entries(supplies) if _read(one / "scope") != "Device"]
    if any(_read(one / "type") != "Battery" and _read(one / "online") == "1" for one in own):
        return True
    return not any(_read(one / "type") == "Battery" and _read(one / "status") == "Discharging" for one in own)


def since_input_s(folders: tuple[Path, ...] = TERMINALS, now: Callable[[], float] = time.time) -> float | None:
    """Seconds since something was read from a terminal of this machine, as `w` says of its users; None without any."""
    typed_at = [
        terminal.stat().st_atime
        for folder in folders
        for terminal in _entries(folder)
        if terminal.name.removeprefix("tty").isdigit() and terminal.name != "tty0"
    ]
    return max(0.0, now() - max(typed_at)) if typed_at else None


def processor_s() -> tuple[float, float]:
    """Processor seconds of this machine so far: in all, and of those in use."""
    times = psutil.cpu_times()
    counted = [value for name, value in times._asdict().items() if not name.startswith("guest")]
    return sum(counted), sum(counted) - times.idle - getattr(times, "iowait", 0.0)


class Machine:
    """Readings of this machine, for `shoal.node.when`; those of load are since the one before."""

    def __init__(self) -> None:
        self._me = psutil.Process()
        self._seen = self._look()

    def is_on_mains(self) -> bool:
        """See `Readings`."""
        return is_on_mains()

    def since_input_s(self) -> float | None:
        """See `Readings`."""
        return since_input_s()

    def minute_of_day(self) -> int:
        """See `Readings`."""
        local = time.localtime()
        return local.tm_hour * 60 + local.tm_min

    def others_share(self) -> float:
        """See `Readings`."""
        before, self._seen = self._seen, self._look()
        all_s, busy_s, own = self._seen
        own_s = sum(used - before[2].get(process, 0.0) for process, used in own.items())
        passed_s = all_s - before[0]
        return min(max((busy_s - before[1] - own_s) / passed_s, 0.0), 1.0) if passed_s > 0 else 0.0

    def _look(self) -> tuple[float, float, dict[tuple[int, float], float]]:
        """Processor seconds so far: in all, of those in use, and by each process of this node."""
        return *processor_s(), dict(self._own())

    def _own(self) -> Iterator[tuple[tuple[int, float], float]]:
        for process in (self._me, *self._me.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                used = process.cpu_times()
                yield (process.pid, process.create_time()), used.user + used.system


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
