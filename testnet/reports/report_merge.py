"""Several nodes' event logs as the history of one swarm.

Clocks of different machines differ, so times of two logs cannot be compared as they stand. What two logs have in common
are the rounds that both certified, within moments of each other: the median of the differences over those rounds is
what one clock is ahead of the other. A log that shares no round with any other is taken as its clock says. Of one whose
clock was set meanwhile a part is in wrong times, and is no measure for others.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal.node.reporting.event_files import LOG_NAME, earlier_of
from shoal.protocol.errors import ConfigError
from shoal.testnet.reports.report_log import FaultSeen, LogHistory, RoundKey, SwarmRounds, read_history

SHARED_WANTED: Final = 3
"""Rounds in common that make a good measure of two clocks; fewer are taken where there are no more."""
ASTRAY_S: Final = 60.0
"""Nobody certifies a round so long after another and all the same beside it: one of the clocks was set."""
FAREWELL_S: Final = 30.0
INCIDENT_WINDOW_S: Final = 60.0
"""Reports of one thing happening to one node within this time are one incident."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Offset of one log's clock from the reference, in seconds, ahead of it.

    rounds: by how many the offset was found, 0 for the reference itself and for a log that shares no round.
    stray_s: how far 9 of 10 of them are from it at most.
    """

    ahead_s: float = 0.0
    rounds: int = 0
    stray_s: float = 0.0
    aligned: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One thing that happened to a node, in aligned time, and how many logs tell of it."""

    at: float
    kind: str
    subject: str
    text: str
    reporters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmHistory:
    """The logs, each with its clock, and what they say together."""

    logs: Sequence[LogHistory]
    clocks: Sequence[Clock]
    rounds: SwarmRounds
    incidents: Sequence[Incident]

    @property
    def began_at(self) -> float:
        """The first moment, in aligned time; 0 if no log has a line."""
        firsts = [log.first_at - clock.ahead_s for log, clock in self._timed() if log.first_at is not None]
        return min(firsts, default=0.0)

    @property
    def wall_s(self) -> float:
        """Seconds from the first moment to the last."""
        lasts = [log.last_at - clock.ahead_s for log, clock in self._timed()]
        return max(lasts, default=0.0) - self.began_at

    def _timed(self) -> list[tuple[LogHistory, Clock]]:
        return [pair for pair in zip(self.logs, self.clocks, strict=True) if pair[0].first_at is not None]


def find_logs(places: Sequence[Path]) -> list[tuple[str, Path]]:
    """(label, log) of every event log in these places: a log, a node's data folder, or a testnet's.

    Raises ConfigError for a place without one.
    """
    found: dict[Path, str] = {}
    for place in places:
        logs = _logs_of(place)
        if not logs:
            raise ConfigError(
                f"{place}: no {LOG_NAME} there; give a node's --data-dir, or the --out folder of a testnet"
            )
        for log in logs:
            found.setdefault(log.resolve(), log.parent.name if log.name == LOG_NAME else log.stem)
    read_with_later = {earlier_of(path) for path in found}
    return [(label, path) for path, label in found.items() if path not in read_with_later]


def _logs_of(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    for pattern in (LOG_NAME, f"nodes/*/{LOG_NAME}", f"*/{LOG_NAME}"):
        if logs := sorted(place.glob(pattern), key=lambda log: (len(log.parent.name), log.parent.name)):
            return logs
    return []


def merge(found: Sequence[tuple[str, Path]]) -> SwarmHistory:
    """Read the logs and put them side by side. Raises ConfigError for one that cannot be read."""
    rounds = SwarmRounds()
    logs = []
    for label, path in found:
        try:
            logs.append(read_history(path, label, rounds))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}; make it readable or leave it out") from None
    clocks = align([log.anchors.kept for log in logs])
    return SwarmHistory(logs=logs, clocks=clocks, rounds=rounds, incidents=incidents(logs, clocks))


def align(anchors: Sequence[Mapping[RoundKey, float]]) -> list[Clock]:
    """Align each log's clock with the reference, the log that certified most rounds.

    anchors: by log, when it certified each round, by its own clock.
    """
    clocks: dict[int, Clock] = {}
    known: dict[RoundKey, tuple[float, int]] = {}
    order = sorted(range(len(anchors)), key=lambda index: -len(anchors[index]))
    for wanted in (SHARED_WANTED, 1):
        waiting = [index for index in order if index not in clocks]
        while waiting:
            index = next((i for i in waiting if not known or _shared(anchors[i], known) >= wanted), None)
            if index is None:
                break
            clocks[index] = _clock(anchors[index], known)
            _join(anchors[index], clocks[index].ahead_s, known)
            waiting.remove(index)
    return [clocks.get(index, Clock(aligned=len(anchors) == 1)) for index in range(len(anchors))]


def _shared(anchors: Mapping[RoundKey, float], known: Mapping[RoundKey, object]) -> int:
    return sum(key in known for key in anchors)


def _clock(anchors: Mapping[RoundKey, float], known: Mapping[RoundKey, tuple[float, int]]) -> Clock:
    differences = [at - known[key][0] / known[key][1] for key, at in anchors.items() if key in known]
    if not differences:
        return Clock()
    ahead = statistics.median_low(differences)  # one that there was: where a clock was set they are of two kinds
    strays = sorted(abs(difference - ahead) for difference in differences)
    return Clock(ahead_s=ahead, rounds=len(differences), stray_s=strays[int(0.9 * (len(strays) - 1))])


def _join(anchors: Mapping[RoundKey, float], ahead_s: float, known: dict[RoundKey, tuple[float, int]]) -> None:
    """Let the rounds of an aligned log be a measure for the next."""
    for key, at in anchors.items():
        total, tellers = known.get(key, (0.0, 0))
        if not tellers or abs(at - ahead_s - total / tellers) < ASTRAY_S:
            known[key] = (total + at - ahead_s, tellers + 1)


def incidents(logs: Sequence[LogHistory], clocks: Sequence[Clock]) -> list[Incident]:
    """List what went wrong, in order; events of one node at one time in several logs are one incident."""
    seen = sorted(
        (
            (fault.at - clock.ahead_s, index, fault)
            for index, (log, clock) in enumerate(zip(logs, clocks, strict=True))
            for fault in log.faults
        ),
        key=lambda entry: (entry[0], entry[1]),
    )
    open_ones: dict[tuple[str, str, str], list[tuple[float, int, FaultSeen]]] = {}
    found: list[Incident] = []
    for entry in seen:
        key = (entry[2].kind, entry[2].subject if entry[2].kind not in _DECISIONS else "", _decided(entry[2]))
        group = open_ones.get(key)
        if group is not None and entry[0] - group[0][0] <= INCIDENT_WINDOW_S:
            group.append(entry)
            continue
        if group is not None:
            found.append(_incident(group))
        open_ones[key] = [entry]
    found += [_incident(group) for group in open_ones.values()]
    left: dict[str, list[float]] = {}
    for incident in found:
        if incident.kind == "left":
            left.setdefault(incident.subject, []).append(incident.at)
    return sorted((incident for incident in found if not _farewell(incident, left)), key=lambda incident: incident.at)


def _farewell(incident: Incident, left: Mapping[str, Sequence[float]]) -> bool:
    """True if a node was missed because it had announced that it leaves."""
    return incident.kind in ("lost", "died") and any(
        abs(incident.at - at) <= FAREWELL_S for at in left.get(incident.subject, ())
    )


_DECISIONS: Final = frozenset({"amended", "rebased", "rolled_back", "view_changed"})
"""Decisions that all members make together, and each tells of itself."""


def _decided(fault: FaultSeen) -> str:
    return fault.text if fault.kind in _DECISIONS else ""


def _incident(group: Sequence[tuple[float, int, FaultSeen]]) -> Incident:
    at, _, fault = group[0]
    subject = "" if fault.kind in _DECISIONS else fault.subject
    reporters = len({index for _, index, _ in group})
    return Incident(at=at, kind=fault.kind, subject=subject, text=fault.text, reporters=reporters)
