"""Why a node takes no part in rounds although it could: a fork that it saw, or a key that may be in use elsewhere.

It goes on to follow the chain, to serve what it has and to say why it stands still.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.node.rounds.fork_watch import ForkWatch
from shoal.node.rounds.key_use import KeyUse, abstention
from shoal.protocol.messages import Value

FORKED, ABSTAINING = "forked", "abstaining"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standstill:
    """What keeps one node from signing."""

    forks: ForkWatch
    key_use: KeyUse

    def phase(self, head: Value) -> str | None:
        """What a node whose chain has this head is doing instead of taking part; None where it takes part.

        Raises StorageError.
        """
        if self.forks.fork is not None:
            return FORKED
        return ABSTAINING if self.key_use.abstains(head) else None

    @property
    def alerts(self) -> list[str]:
        """What the user is to know and to do about it, in a line each."""
        fork, sighting = self.forks.fork, self.key_use.sighting
        found = [] if fork is None else [str(fork)]
        return found if sighting is None else [*found, abstention(sighting)]
