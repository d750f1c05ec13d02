"""Model of `shoal watch`: a running node's answers to `status`, and what its event log says beside them.

A `Watcher` belongs to one thread: each `look` asks the node once, reads what was appended to its log, and returns a
picture that nothing changes afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from shoal.cli.render import (
    PHASES,
    MemberRow,
    advice,
    caps_told,
    group_lines,
    losses_told,
    notable_members,
    peer_counts,
    rollout_lines,
    sample_text,
    seat_told,
    speed_told,
)
from shoal.cli.text import count, figure, in_one_line, quantity
from shoal.node.control_client import Status, request
from shoal.node.dashboard.curves import Point
from shoal.node.dashboard.history import History
from shoal.node.dashboard.rounds import Happening
from shoal.node.outcome import TRAINING_LOSS
from shoal.node.reporting import events
from shoal.node.reporting.event_files import LOG_NAME
from shoal.node.reporting.event_log import LogTail
from shoal.node.training.trainer_messages import SAMPLE_LIMIT_CHARS
from shoal.protocol.errors import ShoalError
from shoal.protocol.names import by_name

STATUS_DEADLINE_S: Final = 5.0
FIRST_READ_BYTES: Final = 4 << 20
READ_LIMIT_BYTES: Final = 4 << 20
ROUNDS_MEASURED: Final = 8
GONE_SHOWN_S: Final = 600.0
GONE_LIMIT: Final = 4
"""Peers that died are shown below the members for so long, and so many of them: a round that goes on without them takes
them off the list."""
DIED: Final = events.name_of(events.Died)
BAR_COLUMNS: Final = 3
"""Columns of a bar, at most."""
BLOCKS: Final = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """All that the view shows. status is None while no node answers, and then `trouble` says what to do."""

    status: Status | None
    trouble: str = ""
    members: Sequence[MemberRow] = ()
    members_left_out: int = 0
    gone: Sequence[MemberRow] = ()
    losses: Sequence[Point] = ()
    metric: str = ""
    samples: tuple[str, ...] = ()
    rewards: Sequence[Point] = ()
    faults: tuple[str, ...] = ()
    round_began_at: float | None = None
    usual_round_s: float | None = None
    sent_per_s: float = 0.0
    received_per_s: float = 0.0
    seen_at: float = 0.0

    def headline(self, width: int = 0) -> str:
        """Term, round, phase, turn, loss and speed, of which each stays in one line of `width` characters."""
        if self.status is None:
            return "no node answers"
        known = self.status
        term = "" if known.term == "0.0" else f" of term {known.term}"
        facts = [
            f"round {known.round + 1}{term}",
            known.doing or known.phase,
            *seat_told(known),
            *filter(None, [losses_told(known)]),
            speed_told(known),
        ]
        return in_lines([in_one_line(fact) for fact in facts], width)

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
        if self.status is None:
            return (f"{self.trouble} (this view goes on by itself as soon as it answers)",)
        return tuple(in_one_line(text) for _, text in advice(self.status))

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
    _history: History = field(default_factory=History)
    _names: Mapping[str, str] = field(default_factory=dict)
    _own: str = ""
    _bytes: tuple[float, int, int] | None = None
    _tail: LogTail | None = None

    def look(self) -> Picture:
        """Ask once; blocks for at most STATUS_DEADLINE_S. Raises nothing that is foreseen."""
        if self._tail is None:
            self._tail = LogTail(self.data_dir / LOG_NAME, from_end_bytes=FIRST_READ_BYTES)
        with suppress(OSError):
            for event in self._tail.read(READ_LIMIT_BYTES):
                self._history.hear(event)
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
        known = self._history
        rounds = known.rounds.rounds
        took = [one.ended - one.began for one in rounds if one.ended is not None][-ROUNDS_MEASURED:]
        shown, left_out = ([], 0) if status is None else notable_members(status)
        return Picture(
            status=status,
            trouble=trouble,
            members=shown,
            members_left_out=left_out,
            gone=() if status is None else gone_rows(status, known.rounds.happenings, now=time.time()),
            losses=tuple(known.curves["held_out"].points or known.curves["train"].points),
            metric=in_one_line(known.metric or TRAINING_LOSS),
            samples=_sample_lines(known.samples),
            rewards=tuple(known.curves["reward"].points),
            faults=tuple(_told(happening, self._names, self._own) for happening in known.rounds.happenings),
            round_began_at=rounds[-1].began if rounds else None,
            usual_round_s=sum(took) / len(took) if took else None,
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


def gone_rows(status: Status, happenings: Sequence[Happening], *, now: float) -> list[MemberRow]:
    """Peers that died within GONE_SHOWN_S, the newest first, and are neither back nor members any more."""
    listed = {member.peer_id for member in status.members}
    gone = () if status.peers is None else set(status.peers.gone) - listed
    died_at = {one.peer: one.at for one in happenings if one.kind == DIED and 0 <= now - one.at < GONE_SHOWN_S}
    newest = sorted((peer for peer in gone if peer in died_at), key=lambda peer: (-died_at[peer], peer))
    return [
        MemberRow(
            peer=in_one_line(peer),
            name=in_one_line(status.names.get(peer, "")),
            phase="gone",
            speed="–",
            reach=_ago(now - died_at[peer]),
        )
        for peer in newest[:GONE_LIMIT]
    ]


def _ago(seconds: float) -> str:
    minutes = int(seconds // 60)
    return f"{count(minutes, 'minute')} ago" if minutes else "just now"


def _sample_lines(sampled: Sequence[events.Sampled]) -> tuple[str, ...]:
    """Each prompt of the newest samples, with what the model said after it first, and what it says now."""
    if not sampled:
        return ()
    lines = []
    for prompt in sampled[-1].texts:
        told = [(event.round, event.texts[prompt]) for event in sampled if prompt in event.texts]
        lines += [f"round {round}: {sample_text(prompt, text[:SAMPLE_LIMIT_CHARS])}" for round, text in told]
    return tuple(lines)


def _told(happening: Happening, names: Mapping[str, str], own: str) -> str:
    """`12:30:59 box is gone`, a line for people."""
    at = time.strftime("%H:%M:%S", time.localtime(min(max(happening.at, 0.0), 1e11)))
    where = "" if happening.round is None else f" (round {happening.round})"
    detail = f": {happening.detail}" if happening.detail else ""
    more = f", and {count(happening.more, 'other')} likewise" if happening.more else ""
    return in_one_line(f"{at} {by_name(f'{happening.text}{detail}{more}', names, own=own)}{where}")


def in_lines(facts: Sequence[str], width: int) -> str:
    """Facts with ` · ` between them, in lines of at most so many characters as long as each fits; 0: in one."""
    lines = [""]
    for fact in facts:
        longer = f"{lines[-1]} · {fact}" if lines[-1] else fact
        if width and lines[-1] and len(longer) > width:
            lines.append(fact)
        else:
            lines[-1] = longer
    return "\n".join(lines)


def bars(points: Sequence[Point], width: int, height: int) -> list[str]:
    """Values over rounds as bars of `height` lines, the newest at the right, with an axis at the left and below.

    The axis begins below the smallest value, so that each bar is seen. Of more points than there is room for, the
    newest value of each column stands.
    """
    values = [value for _, value in points]
    low, high = min(values), max(values)
    bottom = low - ((high - low) or abs(high) or 1.0) / 8
    marks = [figure(value) for value in (high, (high + bottom) / 2, bottom)]
    left = max(map(len, marks))
    room = max(1, width - left - 2)
    columns = min(room, len(points))
    wide = min(BAR_COLUMNS, room // columns)
    shown = [values[(column + 1) * len(values) // columns - 1] for column in range(columns)]
    eighths = [round(8 * height * (value - bottom) / (high - bottom)) for value in shown]
    names = dict(zip((0, height // 2, height - 1), marks, strict=False))
    lines = []
    for line in range(height):
        floor = 8 * (height - 1 - line)
        body = "".join(BLOCKS[min(max(filled - floor, 0), 8)] * wide for filled in eighths)
        lines.append(f"{names.get(line, ''):>{left}} │{body}".rstrip())
    first, last = (f"{points[place][0]:g}" for place in (0, -1))
    between = max(1, columns * wide - len(first) - len(last))
    return [*lines, f"{' ' * left} └{'─' * (columns * wide)}", f"{' ' * left}  {first}{' ' * between}{last} round"]
