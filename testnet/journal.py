"""Journal of a testnet: all that its nodes write into their event logs, in one order.

Times are wall-clock seconds of this one machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import trio

from shoal.node.reporting.events import AgentStarted, Event, Rollouts, RoundStarted

E = TypeVar("E", bound=Event)


def round_begun(event: Event) -> int | None:
    """The number of the round that a node, or its agent, begins with this event; None if it begins none."""
    match event:
        case RoundStarted():
            return event.round
        case AgentStarted() | Rollouts():
            return event.round + 1
    return None


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
