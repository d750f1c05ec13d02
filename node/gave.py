"""Work that a node gave its swarm, by its own event log: in certified rounds that counted it, and in tokens.

The page and `shoal card` say the same of equal logs. In how many rounds a node was listed is another number, which the
chain has: who comes amid a round, or is late, is listed after it and gave it nothing; who leaves with it gave, and is
not listed.
"""

from __future__ import annotations

from shoal.node.reporting.events import Certified, Contributed, Event


class Gave:
    """Sums over the events of one log, oldest first. since: when the first one was, None before there is one."""

    def __init__(self) -> None:
        self.rounds = 0
        self.tokens = 0
        self.since: float | None = None
        self._announced: dict[int, int] = {}
        """Tokens, by the rounds that may still be certified."""

    def hear(self, event: Event) -> None:
        """Take one event."""
        self.since = event.at if self.since is None else min(self.since, event.at)
        if isinstance(event, Contributed):
            self._announced[event.round] = event.tokens
        elif isinstance(event, Certified):
            given = self._announced.get(event.round, 0) if event.counted else 0  # else it counts in a later round
            self.rounds += given > 0
            self.tokens += given
            self._announced = {round: tokens for round, tokens in self._announced.items() if round > event.round}
