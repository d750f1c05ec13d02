"""One node's event log, read once from its beginning to its end, as a history of bounded size.

A log may be of any length, still be written to, or have been cut by a crash or by a full disk: lines that are none are
counted and stepped over. What is kept does not grow with it: rounds are thinned out evenly (`Thinned`), the course of
time is kept in cells that become wider (`Cells`), and lists end at their limits with a count of what they left out.
Times are those of the node's own clock, in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Generic, TypeVar

import msgspec

from shoal.node.reporting.event_files import blocks_of

LINE_LIMIT_BYTES: Final = 1 << 20
TEXT_LIMIT_CHARS: Final = 200
CLOCK_RANGE_S: Final = (1e9, 1e10)
"""What a wall clock can say, the years 2001 to 2286; a line of another time is damaged."""
ROUND_LIMIT: Final = 2**53
ANCHOR_LIMIT: Final = 4096
CELL_LIMIT: Final = 1024
SPAN_LIMIT: Final = 400
LIFE_LIMIT: Final = 200
FAULT_LIMIT: Final = 400
BANNED_LIMIT: Final = 16
ROUNDS_KEPT: Final = 50_000
DIGESTS_KEPT: Final = 4

T = TypeVar("T")
RoundKey = tuple[str, int]
"""Term and round, as a certificate names them."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """What the report reads of a line; each event has some of it. `members` is a count or a list, by the event."""

    at: float
    event: str
    peer_id: str | None = None
    peer: str | None = None
    peers: tuple[str, ...] = ()
    kind: str = ""
    term: str = "0.0"
    round: int = 0
    digest: str | None = None
    members: msgspec.Raw = msgspec.Raw(b"0")
    contributors: int | None = None
    coverage: float = 0.0
    tokens: int = 0
    reduce_s: float = 0.0
    total_s: float = 0.0
    lanes_sent: int = 0
    control_sent: int = 0
    loss: float | None = None
    metric: str = ""
    to: int | None = None
    view: int = 0
    cause: str = ""
    message: str = ""
    reason: str = ""
    left: bool = False


_line = msgspec.json.Decoder(Line)


class Thinned(Generic[T]):
    """A mapping by (term, round) that keeps every round, or every 2nd, 4th, … of them once there are too many.

    Two of different lengths that are both thinned still have those rounds in common that the thinner one keeps.
    """

    def __init__(self, limit: int) -> None:
        self.kept: dict[RoundKey, T] = {}
        self.stride = 1
        self._limit = limit

    def has_room_for(self, key: RoundKey) -> bool:
        """Whether this round is one of those that are kept."""
        return key[1] % self.stride == 0

    def put(self, key: RoundKey, value: T) -> None:
        """Keep `value`, unless the round is one that is left out."""
        if not self.has_room_for(key):
            return
        self.kept[key] = value
        while len(self.kept) > self._limit:
            if self.stride > ROUND_LIMIT:  # many terms of one round: the oldest go
                del self.kept[next(iter(self.kept))]
                continue
            self.stride *= 2
            self.kept = {key: value for key, value in self.kept.items() if self.has_room_for(key)}


@dataclass(slots=True, kw_only=True)
class Cell:
    """What a node did in one stretch of its time. first, last: the rounds certified in it, 0 for none."""

    events: int = 0
    certified: int = 0
    troubles: int = 0
    first: int = 0
    last: int = 0

    def add(self, other: Cell) -> None:
        """Take in what happened in the stretch after this one."""
        self.events += other.events
        self.certified += other.certified
        self.troubles += other.troubles
        self.first = self.first or other.first
        self.last = other.last or self.last


class Cells:
    """The course of one node's time in at most CELL_LIMIT cells of equal width, which doubles as time goes on."""

    def __init__(self) -> None:
        self.origin_s = 0.0
        self.width_s = 1.0
        self.cells: list[Cell] = []

    def at(self, at: float) -> Cell:
        """The cell of a moment; one before the first counts as the first."""
        if not self.cells:
            self.origin_s = at
        while (number := max(0, int((at - self.origin_s) / self.width_s))) >= CELL_LIMIT:
            self._widen()
        self.cells += [Cell() for _ in range(number + 1 - len(self.cells))]
        return self.cells[number]

    def _widen(self) -> None:
        self.width_s *= 2
        wider = self.cells[::2]
        for cell, other in zip(wider, self.cells[1::2], strict=False):
            cell.add(other)
        self.cells = wider


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSpan:
    """One round at one node: when it began, contributed, agreed on a plan, and certified; None where it did not."""

    term: str
    round: int
    began_at: float
    contributed_at: float | None = None
    planned_at: float | None = None
    ended_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSeen:
    """Something that went wrong, or was decided out of turn. subject: the PeerId that it happened to."""

    at: float
    kind: str
    subject: str
    text: str = ""


@dataclass(slots=True, kw_only=True)
class RoundFacts:
    """One certified round, as all logs tell it. Sums are over the `tellers`, those logs that certified it."""

    tellers: int = 0
    members: int = 0
    contributors: int = 0
    coverage: float = 0.0
    tokens: int = 0
    reduce_sum_s: float = 0.0
    total_sum_s: float = 0.0
    digests: list[str] = field(default_factory=list)


class SwarmRounds:
    """What all logs together say of rounds: facts of each, held-out losses, and rounds certified with two digests."""

    def __init__(self) -> None:
        self.facts: Thinned[RoundFacts] = Thinned(ROUNDS_KEPT)
        self.losses: Thinned[float] = Thinned(ROUNDS_KEPT)
        self.forks: list[RoundKey] = []
        self.metric = ""

    def certified(self, key: RoundKey, line: Line) -> None:
        """A log certified a round."""
        if not self.facts.has_room_for(key):
            return
        facts = self.facts.kept.get(key)
        if facts is None:
            facts = RoundFacts(members=_members(line.members))
            self.facts.put(key, facts)
        facts.tellers += 1
        facts.contributors = max(facts.contributors, line.contributors or 0)
        facts.coverage = max(facts.coverage, line.coverage)
        facts.tokens = max(facts.tokens, line.tokens)
        facts.reduce_sum_s += line.reduce_s
        facts.total_sum_s += line.total_s
        digest = (line.digest or "")[:64]
        if digest and digest not in facts.digests and len(facts.digests) < DIGESTS_KEPT:
            facts.digests.append(digest)
            if len(facts.digests) == 2:
                self.forks.append(key)

    def evaluated(self, line: Line) -> None:
        """A log measured the loss after a round; all members hold the same state, so any will do."""
        if line.loss is not None:
            self.losses.put((line.term, line.round), line.loss)
            self.metric = line.metric[:TEXT_LIMIT_CHARS] or self.metric


class LogHistory:
    """What one log says, in a bounded form. See the module."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.peer_id = ""
        self.first_at: float | None = None
        self.last_at = 0.0
        self.lines = self.damaged = 0
        self.certified = 0
        self.anchors: Thinned[float] = Thinned(ANCHOR_LIMIT)
        self.cells = Cells()
        self.spans: list[RoundSpan] | None = []
        self.lives: list[list[float]] = []
        self.lives_left_out = 0
        self.faults: list[FaultSeen] = []
        self.faults_left_out = 0
        self.left = True
        self.sent_bytes = 0
        self._sent_in_life = 0

    def finish(self) -> None:
        """The log has been read to its end."""
        self.sent_bytes += self._sent_in_life
        self._sent_in_life = 0

    def take(self, line: Line, rounds: SwarmRounds) -> None:
        """One line."""
        at = line.at
        self.first_at = at if self.first_at is None else self.first_at
        self.last_at = max(self.last_at, at)
        if line.event == "started":
            self._started(line)
        elif not self.lives:  # the log begins in the midst of a life
            self.lives.append([at, at])
            self.left = False
        self.lives[-1][1] = max(self.lives[-1][1], at)
        cell = self.cells.at(at)
        cell.events += 1
        match line.event:
            case "round_started":
                self._span(RoundSpan(term=line.term[:32], round=line.round, began_at=at))
            case "contributed" | "planned":
                self._advance(line)
            case "certified" | "stepped":
                self._certified(line, cell, rounds)
            case "evaluated":
                rounds.evaluated(line)
            case "left":
                self.left = True
                self._fault(line, "left", self.peer_id, line.reason)
            case "banned":
                for peer in line.peers[:BANNED_LIMIT]:
                    self._fault(line, "banned", peer, _decision(line))
            case kind if kind in _OWN:
                cell.troubles += 1
                self._fault(line, kind, self.peer_id, line.cause or line.message)
            case kind if kind in _DECISIONS:
                self._fault(line, kind, self.peer_id, _decision(line))
            case "died" if line.left:
                self._fault(line, "left", line.peer or "", "")
            case kind if kind in _OF_OTHERS:
                self._fault(line, kind, line.peer or "", line.kind)

    def _started(self, line: Line) -> None:
        self.peer_id = (line.peer_id or "")[:TEXT_LIMIT_CHARS] or self.peer_id
        self.finish()
        if not self.left:
            self.cells.at(line.at).troubles += 1
            self._fault(line, "restarted", self.peer_id, "the process before it ended without leaving")
        self.left = False
        if len(self.lives) < LIFE_LIMIT:
            self.lives.append([line.at, line.at])
        else:
            self.lives_left_out += 1

    def _span(self, span: RoundSpan) -> None:
        if self.spans is not None:
            self.spans.append(span)
            if len(self.spans) > SPAN_LIMIT:
                self.spans = None  # the cells tell it, in less detail

    def _advance(self, line: Line) -> None:
        if not self.spans or self.spans[-1].round != line.round:
            return
        span = self.spans[-1]
        if line.event == "contributed":
            self.spans[-1] = replace(span, contributed_at=line.at)
        elif span.planned_at is None:
            self.spans[-1] = replace(span, planned_at=line.at)

    def _certified(self, line: Line, cell: Cell, rounds: SwarmRounds) -> None:
        key = (line.term[:32], line.round)
        self.certified += 1
        cell.certified += 1
        cell.first = cell.first or line.round
        cell.last = line.round
        self._sent_in_life = line.lanes_sent + line.control_sent
        rounds.certified(key, line)
        if line.event == "certified":
            self.anchors.put(key, line.at)
        if self.spans and self.spans[-1].round == line.round:
            self.spans[-1] = replace(self.spans[-1], ended_at=line.at)

    def _fault(self, line: Line, kind: str, subject: str, text: str) -> None:
        if len(self.faults) >= FAULT_LIMIT:
            self.faults_left_out += 1
            return
        self.faults.append(
            FaultSeen(
                at=line.at,
                kind=kind,
                subject=subject[:TEXT_LIMIT_CHARS],
                text=" ".join(text[:TEXT_LIMIT_CHARS].split()),
            )
        )


_OWN: Final = frozenset({"agent_died", "failed", "loop_detached", "stranded", "trainer_restarted"})
_DECISIONS: Final = frozenset({"amended", "rebased", "rolled_back", "view_changed"})
_OF_OTHERS: Final = frozenset({"detoured", "died", "evidence", "lost", "parted"})
"""What is told as something out of turn: of the node itself, of what its members decide together, of a peer."""


def _decision(line: Line) -> str:
    match line.event:
        case "rolled_back" | "rebased":
            return f"round {line.round} of term {line.term[:32]}, to round {line.to}"
        case "view_changed":
            return f"round {line.round}, to view {line.view}"
        case "amended" | "banned":
            return f"in round {line.round}"
    return ""


def _members(raw: msgspec.Raw) -> int:
    """How many, out of a number or a list of names."""
    try:
        known = msgspec.json.decode(raw, type=int | list[str])
    except msgspec.DecodeError:
        return 0
    return known if isinstance(known, int) else len(known)


def read_log(path: Path, label: str, rounds: SwarmRounds) -> LogHistory:
    """Read a whole log, both files of it. Raises OSError if it cannot be read."""
    history = LogHistory(label)
    for raw in _lines(blocks_of(path)):
        line = None if raw is None else _parsed(raw)
        if line is None:
            history.damaged += 1
        else:
            history.lines += 1
            history.take(line, rounds)
    history.finish()
    return history


def _parsed(raw: bytes) -> Line | None:
    """None for what is cut short, no event, or of no possible time."""
    try:
        line = _line.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    plausible = CLOCK_RANGE_S[0] <= line.at <= CLOCK_RANGE_S[1] and 0 <= line.round <= ROUND_LIMIT
    return line if plausible else None


def _lines(blocks: Iterable[bytes]) -> Iterator[bytes | None]:
    """The lines of a log, None for one that is too long or that no line break ends; blank ones are none."""
    rest, skipping = b"", False
    for block in blocks:
        first, *others = (rest + block).split(b"\n")
        complete = [first, *others][:-1]
        rest = others[-1] if others else first
        if skipping and complete:
            complete, skipping = complete[1:], False
            yield None
        yield from (line for line in complete if line)
        if skipping or len(rest) > LINE_LIMIT_BYTES:
            rest, skipping = b"", True
    if rest or skipping:
        yield None
