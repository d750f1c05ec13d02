"""What the nodes of a testnet write into their event logs, typed, in one journal of the whole swarm.

An event log is for people first: lines that are cut short (a node was killed while writing) and events of kinds not
listed here are stepped over. Times are wall-clock seconds of this one machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import trio

from shoal.node.reporting.event_files import LogFollower

LINE_LIMIT_BYTES = 1 << 20


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One line: when, and which event. The subclasses below say more."""

    at: float
    event: str

    @property
    def begins(self) -> int | None:
        """The number of the round that the node begins with it, None if it begins none."""
        return None


class Listening(Event, frozen=True, kw_only=True):
    """The node can be dialled at these multiaddresses."""

    addresses: tuple[str, ...]


class Linked(Event, frozen=True, kw_only=True):
    """The node has a message link with a peer."""

    peer: str


class RoundStarted(Event, frozen=True, kw_only=True):
    """The node begins a round."""

    round: int
    term: str = "0.0"

    @property
    def begins(self) -> int | None:
        """See `Event`."""
        return self.round


class Holding(Event, frozen=True, kw_only=True):
    """The node stands still at a point that the testnet asked for."""

    round: int
    phase: str
    progress: float = 0.0


class Certified(Event, frozen=True, kw_only=True):
    """The node applied a certified round. Bytes are those since its process started."""

    term: str
    round: int
    digest: str
    value: str
    members: tuple[str, ...] = ()
    contributors: int = 0
    coverage: float = 0.0
    tokens: int = 0
    reduce_s: float = 0.0
    total_s: float = 0.0
    lanes_sent: int = 0
    control_sent: int = 0


class Stepped(Certified, frozen=True, kw_only=True):
    """Strategy gossip: the node made the outer step of a round, which nobody certifies; without a partner if None."""

    term: str = "0.0"
    digest: str = ""
    value: str = ""
    partner: str | None = None


class AgentStarted(Event, frozen=True, kw_only=True):
    """Strategy rollouts: the agent is ready, after `round` rounds; with this reward if it was warmed up just before."""

    round: int
    warm_up_reward: float | None = None

    @property
    def begins(self) -> int | None:
        """See `Event`."""
        return self.round + 1


class Shared(Certified, frozen=True, kw_only=True):
    """Strategy rollouts: the agent is through a round of its own, with `own` groups and `external` ones of others.

    reward: the mean of what it generated, None if it generates nothing. tokens: those that it drew.
    """

    term: str = "0.0"
    digest: str = ""
    value: str = ""
    reward: float | None = None
    own: int = 0
    external: int = 0
    seconds: float = 0.0

    @property
    def begins(self) -> int | None:
        """See `Event`."""
        return self.round + 1


class Contributed(Event, frozen=True, kw_only=True):
    """The node announced a contribution, `wall_s` after the one before; so much of that it was blocked by the round.

    steps: those since the one before, which took `seconds`.
    """

    round: int = 0
    steps: int = 0
    seconds: float = 0.0
    wall_s: float = 0.0
    blocked_s: float = 0.0


class RolledBack(Event, frozen=True, kw_only=True):
    """The round decided to go back to the state of round `to`, whose digest this is."""

    term: str
    round: int
    to: int
    digest: str
    value: str


class Evaluated(Event, frozen=True, kw_only=True):
    """Held-out loss after a round; round 0 is before the first."""

    round: int
    loss: float
    metric: str = "loss"


class CaughtUp(Event, frozen=True, kw_only=True):
    """The node reached the state after `round` without having taken part in it."""

    round: int


class Failed(Event, frozen=True, kw_only=True):
    """The node gave up, and why."""

    message: str = ""


_KINDS: Final[dict[str, type[Event]]] = {
    "listening": Listening,
    "linked": Linked,
    "round_started": RoundStarted,
    "holding": Holding,
    "certified": Certified,
    "stepped": Stepped,
    "agent_started": AgentStarted,
    "rollouts": Shared,
    "contributed": Contributed,
    "rolled_back": RolledBack,
    "evaluated": Evaluated,
    "caught_up": CaughtUp,
    "failed": Failed,
}

E = TypeVar("E", bound=Event)


def parse_event(line: bytes) -> Event | None:
    """The event that a line of a log holds; None if it is cut short or not one."""
    try:
        head = msgspec.json.decode(line, type=Event)
        return msgspec.json.decode(line, type=_KINDS.get(head.event, Event))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


class LogTail:
    """Reads what was appended to one event log since the last look."""

    def __init__(self, path: Path) -> None:
        self._follower = LogFollower(path)
        self._rest = b""
        self.skipped = 0

    def read(self) -> list[Event]:
        """The events of all lines completed since; none if there is no file yet."""
        *lines, self._rest = (self._rest + self._follower.read()).split(b"\n")
        if len(self._rest) > LINE_LIMIT_BYTES:
            self._rest = b""
        events = [parse_event(line) for line in lines]
        self.skipped += sum(event is None for event in events)
        return [event for event in events if event is not None]


@dataclass(frozen=True, slots=True)
class Entry:
    """One event of one node."""

    node: int
    event: Event


class Journal:
    """All events of all nodes in the order in which they were seen; tasks wait on it for what they need."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._changed = trio.Event()

    def add(self, node: int, event: Event) -> None:
        """Append, and wake whoever waits."""
        self.entries.append(Entry(node, event))
        self.poke()

    def poke(self) -> None:
        """Wake whoever waits: something outside the journal changed (a process ended, a fault is done)."""
        self._changed.set()
        self._changed = trio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds; it is asked again after every change. Cancellation changes nothing."""
        while not condition():
            await self._changed.wait()

    async def first(self, match: Callable[[Entry], bool]) -> Entry:
        """Wait for the first entry, from the beginning of the journal, that matches."""
        at = 0
        while True:
            for entry in self.entries[at:]:
                if match(entry):
                    return entry
            at = len(self.entries)
            await self._changed.wait()

    def of(self, kind: type[E], node: int | None = None) -> list[E]:
        """All events of a kind, of one node or of all."""
        return [
            entry.event
            for entry in self.entries
            if isinstance(entry.event, kind) and (node is None or entry.node == node)
        ]
