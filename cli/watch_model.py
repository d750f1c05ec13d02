"""Model of `shoal watch`: a running node's answers to `status`, and what its event log says beside them.

A `Watcher` belongs to one thread: each `look` asks the node once, reads what was appended to its log, and returns a
picture that nothing changes afterwards.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from shoal.cli.render import (
    caps_told,
    group_lines,
    losses_told,
    marked,
    missing_lines,
    notable_members,
    peer_counts,
    rollout_lines,
    sample_text,
    speed_told,
)
from shoal.cli.text import figure, in_one_line, quantity
from shoal.node.control_client import MemberStatus, Status, request
from shoal.node.loops.attendance import WAITS_MARK
from shoal.node.reporting import events
from shoal.node.reporting.event_files import LOG_NAME
from shoal.node.reporting.event_log import LogTail
from shoal.node.reporting.events import Event
from shoal.node.training.trainer_messages import SAMPLE_LIMIT_CHARS
from shoal.protocol.errors import ShoalError
from shoal.protocol.names import by_name, called
from shoal.protocol.seats import turn_text

STATUS_DEADLINE_S: Final = 5.0
FIRST_READ_BYTES: Final = 4 << 20
READ_LIMIT_BYTES: Final = 4 << 20
LOSSES_KEPT: Final = 400
FAULTS_KEPT: Final = 300
BANS_SHOWN: Final = 3
PHASES: Final = ("train", "plan", "reduce", "certify")

_REACH: Final = {"self": "this node", "direct": "directly", "gone": "missing"}
"""For people; other words are the node's own."""
_SAID: Final[dict[type[Event], str]] = {
    events.Died: "gone",
    events.Detoured: "slow to answer, others pass on what it says:",
    events.Lost: "lost the link to",
    events.Parted: "no tensors come through to",
    events.Stranded: "nobody reaches this node",
}
_TOLD: Final[tuple[type[Event], ...]] = (
    *(events.Started, events.Left, events.Failed, events.AgentDied, events.TrainerRestarted, events.LoopDetached),
    *(events.Died, events.Lost, events.Detoured, events.Suspected, events.Revived, events.Parted, events.Stranded),
    *(events.ViewChanged, events.RolledBack, events.Rebased, events.Amended, events.Banned, events.Evidence),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRow:
    """One member, as texts that are safe to show. name: marked where it is this node; may be nothing."""

    peer: str
    name: str
    phase: str
    speed: str
    reach: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """All that the view shows. status is None while no node answers, and then `trouble` says what to do."""

    status: Status | None
    trouble: str = ""
    members: tuple[MemberRow, ...] = ()
    members_left_out: int = 0
    losses: tuple[float, ...] = ()
    metric: str = ""
    samples: tuple[str, ...] = ()
    rewards: tuple[float, ...] = ()
    faults: tuple[str, ...] = ()
    round_began_at: float | None = None
    usual_round_s: float | None = None
    sent_per_s: float = 0.0
    received_per_s: float = 0.0
    seen_at: float = 0.0

    @property
    def headline(self) -> str:
        """Term, round, phase, turn, loss and speed in one line."""
        if self.status is None:
            return self.trouble
        known = self.status
        told = losses_told(known)
        loss = f" · {in_one_line(told)}" if told else ""
        term = "" if known.term == "0.0" else f" of term {in_one_line(known.term)}"
        speed = speed_told(known.tokens_per_s)
        turn = "" if known.turn_in_rounds is None else f" · {turn_text(known.turn_in_rounds)}"
        return f"round {known.round + 1}{term} · {in_one_line(known.phase)}{turn}{loss} · {speed}"

    @property
    def phase_line(self) -> str:
        """The phases of a round, the present one in brackets; others than these by their name alone."""
        phase = "" if self.status is None else self.status.phase
        if phase not in PHASES:
            return in_one_line(phase) or "–"
        return " → ".join(f"[{name}]" if name == phase else name for name in PHASES)

    @property
    def peer_line(self) -> str:
        """All peers in one line; of members too many to be listed, where the others are."""
        known = None if self.status is None else self.status.peers
        if known is None:
            return ""
        more = f" · {self.members_left_out:,} more members: `shoal status --peers`" if self.members_left_out else ""
        return f"{peer_counts(known)}{more}"

    @property
    def round_share(self) -> float:
        """Progress of the round, in 0..1, measured by the rounds before; 0 if nothing is known."""
        if self.round_began_at is None or not self.usual_round_s:
            return 0.0
        return min(max((self.seen_at - self.round_began_at) / self.usual_round_s, 0.0), 1.0)

    @property
    def rollout_lines(self) -> tuple[str, ...]:
        """Counts of rollouts made, taken and refused, and the newest groups; nothing of a node that shares none."""
        if self.status is None or self.status.rollouts is None:
            return ()
        return (*rollout_lines(self.status), "", *group_lines(self.status))

    @property
    def advice(self) -> tuple[str, ...]:
        """Obstacles, and what to do about each; empty where all is well."""
        known = self.status
        if known is None:
            return (f"{self.trouble} (this view goes on by itself as soon as it answers)",)
        told = []
        missing = [line.removeprefix("help").strip() for line in missing_lines(known) if line.startswith("help")]
        banned = [
            f"{_whose(ban.peer_id, known)} banned {_until(ban.until)}, by round {ban.round}" for ban in known.bans
        ]
        if any(ban.peer_id == known.peer_id for ban in known.bans):
            told.append(
                "the swarm has banned this node; the proof is in evidence/ of the others: `shoal evidence` checks it"
            )
        if known.phase == "paused":
            why = f": {known.why_paused}" if known.why_paused else ""
            goes_on = "" if WAITS_MARK in why else "; r goes on"
            told.append(f"paused{why}; it votes and keeps the state, and trains nothing{goes_on}")
        if banned:
            more = f"; and {len(banned) - BANS_SHOWN} more" if len(banned) > BANS_SHOWN else ""
            told.append("; ".join(banned[:BANS_SHOWN]) + more)
        return (*missing, *told)

    @property
    def bytes_line(self) -> str:
        """Line of the bytes sent and received, their rates, and how this node is reached."""
        if self.status is None:
            return ""
        sent, received = self.status.bytes.sent, self.status.bytes.received
        reach = "" if self.status.reachability == "unknown" else f" · {in_one_line(self.status.reachability)}"
        caps = f" · {caps_told(self.status)}" if caps_told(self.status) else ""
        return (
            f"sent {quantity(sent, 'B')} ({quantity(self.sent_per_s, 'B/s')}) · "
            f"received {quantity(received, 'B')} ({quantity(self.received_per_s, 'B/s')}){caps}{reach}"
        )


@dataclass(slots=True)
class Watcher:
    """Asks the node of one data folder, again and again, whether or not it runs."""

    data_dir: Path
    _losses: deque[float] = field(default_factory=lambda: deque(maxlen=LOSSES_KEPT))
    _faults: deque[Event] = field(default_factory=lambda: deque(maxlen=FAULTS_KEPT))
    _rewards: deque[float] = field(default_factory=lambda: deque(maxlen=LOSSES_KEPT))
    _sampled: tuple[events.Sampled, ...] = ()
    """The first samples that the log still tells of, and the newest."""
    _names: dict[str, str] = field(default_factory=dict)
    _own: str = ""
    _metric: str = ""
    _round_began_at: float | None = None
    _round_s: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    _bytes: tuple[float, int, int] | None = None
    _tail: LogTail | None = None

    def look(self) -> Picture:
        """Ask once; blocks for at most STATUS_DEADLINE_S. Raises nothing that is foreseen."""
        if self._tail is None:
            self._tail = LogTail(self.data_dir / LOG_NAME, from_end_bytes=FIRST_READ_BYTES)
        with suppress(OSError):
            for event in self._tail.read(READ_LIMIT_BYTES):
                self._hear(event)
        status, trouble = None, ""
        try:
            status = msgspec.convert(request(self.data_dir, "status", deadline_s=STATUS_DEADLINE_S), Status)
        except ShoalError as error:
            trouble = in_one_line(str(error))
        except msgspec.ValidationError:
            trouble = f"the node on {self.data_dir} is of another version than this command; restart it"
        if status is not None:
            self._names, self._own = status.names, status.peer_id
        sent_per_s, received_per_s = self._rates(status)
        shown, left_out = ([], 0) if status is None else notable_members(status)
        return Picture(
            status=status,
            trouble=trouble,
            members=tuple(_row(member, marked(member.peer_id, status)) for member in shown) if status else (),
            members_left_out=left_out,
            losses=tuple(self._losses),
            metric=self._metric,
            samples=_sample_lines(self._sampled),
            rewards=tuple(self._rewards),
            faults=tuple(_told(event, self._names, self._own) for event in self._faults),
            round_began_at=self._round_began_at,
            usual_round_s=sum(self._round_s) / len(self._round_s) if self._round_s else None,
            sent_per_s=sent_per_s,
            received_per_s=received_per_s,
            seen_at=time.time(),
        )

    def order(self, op: str) -> str:
        """Ask the node to pause, resume or leave; returns what came of it, for people."""
        try:
            request(self.data_dir, op)
        except ShoalError as error:
            return in_one_line(str(error))
        return {"pause": "it stops training", "resume": "it trains again", "leave": "it leaves the swarm"}[op]

    def _hear(self, event: Event) -> None:
        match event:
            case events.Evaluated(loss=float(loss)):
                self._losses.append(loss)
                self._metric = in_one_line(event.metric)
            case events.Sampled():
                self._sampled = (*self._sampled[:1], event)
            case events.RolledBack():
                self._sampled = tuple(known for known in self._sampled if known.round <= event.to)
                self._faults.append(event)
            case events.RoundStarted():
                self._round_began_at = event.at
            case events.Rollouts(reward=float(reward)):
                self._rewards.append(reward)
            case events.Certified() | events.Stepped():
                self._round_s.append(event.total_s)
            case _ if isinstance(event, _TOLD):
                self._faults.append(event)

    def _rates(self, status: Status | None) -> tuple[float, float]:
        """Bytes a second since the look before, sent and received."""
        if status is None:
            self._bytes = None
            return 0.0, 0.0
        now, before = (time.monotonic(), status.bytes.sent, status.bytes.received), self._bytes
        self._bytes = now
        if before is None or now[0] <= before[0]:
            return 0.0, 0.0
        seconds = now[0] - before[0]
        return max(now[1] - before[1], 0) / seconds, max(now[2] - before[2], 0) / seconds


def _row(member: MemberStatus, name: str) -> MemberRow:
    return MemberRow(
        peer=in_one_line(member.peer_id),
        name=in_one_line(name),
        phase=in_one_line(member.phase),
        speed=figure(member.tokens_per_s),
        reach=in_one_line(_REACH.get(member.reach, member.reach)) or "–",
    )


def _sample_lines(sampled: Sequence[events.Sampled]) -> tuple[str, ...]:
    """Each prompt of the newest samples, with what the model said after it first, and what it says now."""
    if not sampled:
        return ()
    lines = []
    for prompt in sampled[-1].texts:
        told = [(event.round, event.texts[prompt]) for event in sampled if prompt in event.texts]
        lines += [f"round {round}: {sample_text(prompt, text[:SAMPLE_LIMIT_CHARS])}" for round, text in told]
    return tuple(lines)


def _whose(peer: str, status: Status) -> str:
    return "this node is" if peer == status.peer_id else f"{in_one_line(called(peer, status.names))} is"


def _until(round: int | None) -> str:
    return "for ever" if round is None else f"until round {round}"


def _told(event: Event, names: Mapping[str, str], own: str) -> str:
    """`12:30:59 gone box`, a line for people."""
    at = time.strftime("%H:%M:%S", time.localtime(min(max(event.at, 0.0), 1e11)))
    left = isinstance(event, events.Died) and event.left
    what = "left in good order:" if left else _SAID.get(type(event), event.name.replace("_", " "))
    peer: str | None = getattr(event, "peer", None)
    peers: tuple[str, ...] = getattr(event, "peers", ())[:8] if peer is None else (peer,)
    round: int = getattr(event, "round", 0)
    where = f" in round {round}" if round else ""
    back = f", to round {event.to}" if isinstance(event, events.RolledBack | events.Rebased) else ""
    why = next((str(why) for field in ("cause", "message", "reason") if (why := getattr(event, field, ""))), "")
    whom = "".join(f" {called(name, names, own=own)}" for name in peers)
    reason = f": {by_name(why, names, own=own)}" if why else ""
    return in_one_line(f"{at} {what}{whom}{where}{back}{reason}")
