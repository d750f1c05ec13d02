"""One node's event log, read once from its beginning to its end, as a history of bounded size.

A log may be of any length, still be written to, or have been cut by a crash or by a full disk: lines that are none are
counted and stepped over. What is kept does not grow with it: rounds are thinned out evenly (`Thinned`), the course of
time is kept in cells that become wider (`Cells`), and lists end at their limits with a count of what they left out.
Times are those of the node's own clock, in seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Generic, TypeVar

from shoal.node.reporting import events
from shoal.node.reporting.event_log import scan_log
from shoal.node.reporting.events import Event, TaskRewards, name_of
from shoal.node.training.trainer_messages import PROMPT_LIMIT_CHARS, SAMPLE_LIMIT, SAMPLE_LIMIT_CHARS
from shoal.protocol.names import capability_of, claimed_name

TEXT_LIMIT_CHARS: Final = 200
CLOCK_RANGE_S: Final = (1e9, 1e10)
"""Range of wall clocks in seconds, the years 2001 to 2286; a line of another time is damaged."""
ROUND_LIMIT: Final = 2**53
ANCHOR_LIMIT: Final = 4096
CELL_LIMIT: Final = 1024
SPAN_LIMIT: Final = 400
LIFE_LIMIT: Final = 200
FAULT_LIMIT: Final = 400
BANNED_LIMIT: Final = 16
NAME_LIMIT: Final = 4096
"""Peers of whom a log says what they call themselves."""
ROUNDS_KEPT: Final = 50_000
DIGESTS_KEPT: Final = 4
SAMPLES_KEPT: Final = 12
REWARDS_KEPT: Final = 2048
"""Rounds of which rewards are kept, of all tasks together and of each."""
TASK_LIMIT: Final = 64
REASON_LIMIT: Final = 64

FIRST_TERM: Final = "0.0"
"""Under which samples and rewards are kept, which name no term."""
ALIKE: Final = 0.01
"""Two nodes that measured one state's loss on the same text differ by less, whatever they computed it in."""
CURVES_KEPT: Final = 64

T = TypeVar("T")
RoundKey = tuple[str, int]
"""Term and round, as a certificate names them."""


class Thinned(Generic[T]):
    """A mapping by (term, round) that keeps every round, or every 2nd, 4th, … of them once there are too many.

    Two of different lengths that are both thinned still have those rounds in common that the thinner one keeps.
    """

    def __init__(self, limit: int) -> None:
        self.kept: dict[RoundKey, T] = {}
        self.stride = 1
        self._limit = limit

    def has_room_for(self, key: RoundKey) -> bool:
        """True if this round is one of those that are kept."""
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
    """Counts of a node's events in one stretch of its time. first, last: the rounds certified in it, 0 for none."""

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
    """Fault that a log tells of, or decision out of turn. subject: the PeerId that it happened to."""

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


@dataclass(slots=True, kw_only=True)
class Mean:
    """A mean of rewards, each of so many groups or rounds."""

    total: float = 0.0
    weight: int = 0

    def add(self, value: float | None, weight: int) -> None:
        """Take in `value`, the mean of `weight` of them, if there are any."""
        if value is not None and weight > 0:
            self.total, self.weight = self.total + value * weight, self.weight + weight

    @property
    def value(self) -> float | None:
        """The mean, None of nothing."""
        return self.total / self.weight if self.weight else None


@dataclass(slots=True, kw_only=True)
class RoundRewards:
    """Rewards of groups in the rounds of one number: those of the nodes' own, and those of others, as scored there."""

    own: Mean = field(default_factory=Mean)
    external: Mean = field(default_factory=Mean)


class SharedRollouts:
    """Rollouts in all logs together: rewards by round, and by task family, and those on held-out tasks."""

    def __init__(self) -> None:
        self.rewards: Thinned[RoundRewards] = Thinned(REWARDS_KEPT)
        self.tasks: dict[str, Thinned[RoundRewards]] = {}
        self.held_out: Thinned[Mean] = Thinned(REWARDS_KEPT)

    def evaluated(self, event: events.HeldOutReward) -> None:
        """Note what a node's policy earned on held-out tasks after so many rounds of its own."""
        key = (FIRST_TERM, event.round)
        if key not in self.held_out.kept:
            self.held_out.put(key, Mean())
        if key in self.held_out.kept:
            self.held_out.kept[key].add(event.reward, 1)

    def shared(self, event: events.Rollouts) -> None:
        """Note a round that a node made."""
        _add(
            self.rewards,
            event.round,
            TaskRewards(
                own=event.own, reward=event.reward, external=event.external, external_reward=event.external_reward
            ),
        )
        for family, rewards in event.tasks.items():
            known = self.tasks.get(family[:TEXT_LIMIT_CHARS])
            if known is None and len(self.tasks) < TASK_LIMIT:
                known = self.tasks[family[:TEXT_LIMIT_CHARS]] = Thinned(REWARDS_KEPT)
            if known is not None:
                _add(known, event.round, rewards)


def _add(kept: Thinned[RoundRewards], round: int, rewards: TaskRewards) -> None:
    key = (FIRST_TERM, round)
    if not kept.has_room_for(key):
        return
    known = kept.kept.get(key)
    if known is None:
        known = RoundRewards()
        kept.put(key, known)
    known.own.add(rewards.reward, max(rewards.own, 1))
    known.external.add(rewards.external_reward, rewards.external)


@dataclass(slots=True, kw_only=True)
class NodeRollouts:
    """Rollouts that one node made, took and refused. origins: how many groups were taken of whom."""

    rounds: int = 0
    tokens: int = 0
    made: int = 0
    pulled: int = 0
    taken: int = 0
    reward: Mean = field(default_factory=Mean)
    origins: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)

    def shared(self, event: events.Rollouts) -> None:
        """Note a round."""
        self.rounds += 1
        self.tokens += event.tokens
        self.made += event.made
        self.pulled += event.pulled
        self.taken += event.external
        self.reward.add(event.reward, max(event.own, 1))
        for counts, more, limit in (
            (self.origins, event.origins, NAME_LIMIT),
            (self.refused, event.rejected, REASON_LIMIT),
        ):
            for name, count in more.items():
                if name in counts or len(counts) < limit:
                    counts[name[:TEXT_LIMIT_CHARS]] += count


@dataclass(slots=True, kw_only=True)
class HeldOutCurve:
    """Held-out losses of nodes that measured the same of the same states: those nodes' logs, and the losses."""

    labels: list[str]
    losses: Thinned[float]

    def agrees(self, losses: Mapping[RoundKey, float]) -> bool:
        """True if these are of one curve with it: states that both measured had the same loss, and there are some."""
        known = self.losses.kept
        both = [(known[key], loss) for key, loss in losses.items() if key in known]
        return bool(both) and all(abs(one - other) <= ALIKE * abs(one) for one, other in both)


class SwarmRounds:
    """Rounds in all logs together: facts of each, held-out losses, samples, rollouts, rounds with two digests."""

    def __init__(self) -> None:
        self.facts: Thinned[RoundFacts] = Thinned(ROUNDS_KEPT)
        self.curves: list[HeldOutCurve] = []
        self._went_back: set[tuple[tuple[int, ...], int]] = set()
        """Of each step back the first term after it, and the round that it went to."""
        self.samples: Thinned[Mapping[str, str]] = Thinned(SAMPLES_KEPT)
        self.newest_samples: tuple[int, Mapping[str, str]] | None = None
        self.rollouts = SharedRollouts()
        self.forks: list[RoundKey] = []
        self.metric = ""

    @property
    def number(self) -> int:
        """Number of rounds that are kept: certified, or of nodes' own."""
        return len(self.facts.kept) or len(self.rollouts.rewards.kept)

    def ended(self, key: RoundKey, event: events.Certified | events.Stepped) -> None:
        """Note that a log certified a round, or made its outer step."""
        if not self.facts.has_room_for(key):
            return
        facts = self.facts.kept.get(key)
        if facts is None:
            facts = RoundFacts(members=len(event.members))
            self.facts.put(key, facts)
        facts.tellers += 1
        facts.contributors = max(facts.contributors, event.contributors)
        facts.coverage = max(facts.coverage, event.coverage)
        own = isinstance(event, events.Stepped)  # a certificate counts everybody's
        facts.tokens = facts.tokens + event.tokens if own else max(facts.tokens, event.tokens)
        facts.reduce_sum_s += event.reduce_s
        facts.total_sum_s += event.total_s
        digest = event.digest[:64]
        if digest and digest not in facts.digests and len(facts.digests) < DIGESTS_KEPT:
            facts.digests.append(digest)
            if len(facts.digests) == 2:
                self.forks.append(key)

    def measured(self, label: str, losses: Thinned[float]) -> None:
        """Note what one log says of the losses after rounds: of a curve that is there, if it agrees, or of another.

        All members hold the same state, but may hold different texts out.
        """
        if not losses.kept:
            return
        for curve in self.curves:
            if curve.agrees(losses.kept):
                curve.labels.append(label)
                for key, loss in losses.kept.items():
                    if key not in curve.losses.kept:
                        curve.losses.put(key, loss)
                return
        if len(self.curves) < CURVES_KEPT:
            self.curves.append(HeldOutCurve(labels=[label], losses=losses))

    def went_back(self, event: events.RolledBack | events.Rebased) -> None:
        """Note that the rounds after `event.to` do not count any more. A rebase names its own term, the first after."""
        rebases, rollbacks = (*_numbers(event.term), 0, 0)[:2]
        first = (rebases, rollbacks + isinstance(event, events.RolledBack))
        if len(self._went_back) < FAULT_LIMIT:
            self._went_back.add((first, event.to))

    def points(self, curve: HeldOutCurve) -> list[tuple[int, float]]:
        """(round, loss) of the states that count: what was gone back from is not among them."""
        losses = sorted((_numbers(term), round, loss) for (term, round), loss in curve.losses.kept.items())
        counted = {
            round: loss
            for term, round, loss in losses
            if not term or not any(term < first and round > to for first, to in self._went_back)
        }
        return sorted(counted.items())

    def loss(self, key: RoundKey) -> float | None:
        """The loss after a round, as most logs measured it; of an earlier release's logs, which name no term, any."""
        for curve in sorted(self.curves, key=lambda curve: -len(curve.labels)):
            for known in (key, ("", key[1])):
                if known in curve.losses.kept:
                    return curve.losses.kept[known]
        return None

    def sampled(self, event: events.Sampled) -> None:
        """Note what the model said after a round."""
        texts = {
            prompt[:PROMPT_LIMIT_CHARS]: text[:SAMPLE_LIMIT_CHARS]
            for prompt, text in list(event.texts.items())[:SAMPLE_LIMIT]
        }
        self.samples.put((FIRST_TERM, event.round), texts)
        if self.newest_samples is None or event.round >= self.newest_samples[0]:
            self.newest_samples = event.round, texts


def _numbers(term: str) -> tuple[int, ...]:
    """The numbers of a term's text, nothing for none."""
    return tuple(int(part) for part in term.split(".") if part.isdecimal() and part.isascii())


class LogHistory:
    """Contents of one log, in a bounded form. See the module."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.peer_id = ""
        self.names: dict[str, str] = {}
        """The names that this node and those that it was linked with gave themselves, by PeerId."""
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
        self.losses: Thinned[float] = Thinned(ROUNDS_KEPT)
        """What it measured after rounds, until the log is read to its end."""
        self.rollouts = NodeRollouts()
        self._sent_in_life = 0

    def finish(self) -> None:
        """Close the history: the log has been read to its end."""
        self.sent_bytes += self._sent_in_life
        self._sent_in_life = 0

    def take(self, event: Event, rounds: SwarmRounds) -> None:
        """Take one event of the log."""
        at = event.at
        self.first_at = at if self.first_at is None else self.first_at
        self.last_at = max(self.last_at, at)
        if isinstance(event, events.Started):
            self._started(event)
        elif not self.lives:  # the log begins in the midst of a life
            self.lives.append([at, at])
            self.left = False
        self.lives[-1][1] = max(self.lives[-1][1], at)
        cell = self.cells.at(at)
        cell.events += 1
        match event:
            case events.RoundStarted():
                self._span(RoundSpan(term=event.term[:32], round=event.round, began_at=at))
            case events.Contributed() | events.Planned():
                self._advance(event)
            case events.Certified() | events.Stepped():
                self._ended(event, cell, rounds)
            case events.Evaluated():
                self._evaluated(event, rounds)
            case events.HeldOutReward():
                rounds.rollouts.evaluated(event)
            case events.Sampled():
                rounds.sampled(event)
            case events.Rollouts():
                self._shared(event, cell, rounds)
            case events.Left():
                self.left = True
                self._fault(event, self.peer_id, event.reason)
            case events.AgentDied() | events.LoopDetached() | events.TrainerRestarted():
                cell.troubles += 1
                self._fault(event, self.peer_id, event.cause)
            case events.Failed():
                cell.troubles += 1
                self._fault(event, self.peer_id, event.message)
            case events.Linked():
                self._named(event.peer, event.called)
            case events.Stranded():
                cell.troubles += 1
                self._fault(event, self.peer_id)
            case _:
                self._told_of_others(event, rounds)

    def _evaluated(self, event: events.Evaluated, rounds: SwarmRounds) -> None:
        if event.loss is not None:
            self.losses.put((event.term[:32], event.round), event.loss)
            rounds.metric = event.metric[:TEXT_LIMIT_CHARS] or rounds.metric

    def _told_of_others(self, event: Event, rounds: SwarmRounds) -> None:
        """Note what happened to a peer, or was decided out of turn."""
        match event:
            case events.Banned():
                for peer in event.peers[:BANNED_LIMIT]:
                    self._fault(event, peer, f"in round {event.round}")
            case events.Amended():
                self._fault(event, self.peer_id, f"in round {event.round}")
            case events.RolledBack() | events.Rebased():
                text = f"round {event.round} of term {event.term[:32]}, to round {event.to}"
                self._fault(event, self.peer_id, text)
                rounds.went_back(event)
            case events.ViewChanged():
                self._fault(event, self.peer_id, f"round {event.round}, to view {event.view}")
            case events.Died(left=True):
                self._fault(event, event.peer, kind=name_of(events.Left))
            case events.Died() | events.Detoured() | events.Lost() | events.Parted():
                self._fault(event, event.peer)
            case events.Evidence():
                self._fault(event, event.peer, event.kind)

    def _named(self, peer: str, called: str) -> None:
        name = claimed_name([capability_of(called)])
        if name and (peer in self.names or len(self.names) < NAME_LIMIT):
            self.names[peer[:TEXT_LIMIT_CHARS]] = name

    def _started(self, event: events.Started) -> None:
        self.peer_id = event.peer_id[:TEXT_LIMIT_CHARS] or self.peer_id
        self._named(self.peer_id, event.called)
        self.finish()
        if not self.left:
            self.cells.at(event.at).troubles += 1
            self._fault(event, self.peer_id, "the process before it ended without leaving", kind="restarted")
        self.left = False
        if len(self.lives) < LIFE_LIMIT:
            self.lives.append([event.at, event.at])
        else:
            self.lives_left_out += 1

    def _span(self, span: RoundSpan) -> None:
        if self.spans is not None:
            self.spans.append(span)
            if len(self.spans) > SPAN_LIMIT:
                self.spans = None  # the cells tell it, in less detail

    def _advance(self, event: events.Contributed | events.Planned) -> None:
        if not self.spans or self.spans[-1].round != event.round:
            return
        span = self.spans[-1]
        if isinstance(event, events.Contributed):
            self.spans[-1] = replace(span, contributed_at=event.at)
        elif span.planned_at is None:
            self.spans[-1] = replace(span, planned_at=event.at)

    def _ended(self, event: events.Certified | events.Stepped, cell: Cell, rounds: SwarmRounds) -> None:
        key = (event.term[:32], event.round)
        self.certified += 1
        cell.certified += 1
        cell.first = cell.first or event.round
        cell.last = event.round
        self._sent_in_life = event.lanes_sent + event.control_sent
        rounds.ended(key, event)
        if isinstance(event, events.Certified):
            self.anchors.put(key, event.at)
        if self.spans and self.spans[-1].round == event.round:
            self.spans[-1] = replace(self.spans[-1], ended_at=event.at)

    def _shared(self, event: events.Rollouts, cell: Cell, rounds: SwarmRounds) -> None:
        self.certified += 1
        cell.certified += 1
        cell.first = cell.first or event.round
        cell.last = event.round
        self._sent_in_life = event.control_sent
        self.rollouts.shared(event)
        rounds.rollouts.shared(event)

    def _fault(self, event: Event, subject: str, text: str = "", *, kind: str | None = None) -> None:
        """Keep it, under the event's own name unless it is told under another."""
        if len(self.faults) >= FAULT_LIMIT:
            self.faults_left_out += 1
            return
        self.faults.append(
            FaultSeen(
                at=event.at,
                kind=kind or event.name,
                subject=subject[:TEXT_LIMIT_CHARS],
                text=" ".join(text[:TEXT_LIMIT_CHARS].split()),
            )
        )


def read_history(path: Path, label: str, rounds: SwarmRounds) -> LogHistory:
    """Read a whole log, both files of it. Raises OSError if it cannot be read."""
    history = LogHistory(label)
    for event in scan_log(path):
        if event is None or not _plausible(event):
            history.damaged += 1
        else:
            history.lines += 1
            history.take(event, rounds)
    history.finish()
    rounds.measured(history.label, history.losses)
    history.losses = Thinned(ROUNDS_KEPT)
    return history


def _plausible(event: Event) -> bool:
    """True if the event's time and round are within bounds."""
    round: int = getattr(event, "round", 0)
    return CLOCK_RANGE_S[0] <= event.at <= CLOCK_RANGE_S[1] and 0 <= round <= ROUND_LIMIT
