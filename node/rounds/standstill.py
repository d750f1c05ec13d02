"""Reasons why a node takes no part in rounds although it could.

They are a fork that it saw, and its key, which may be in use elsewhere. It goes on to follow the chain, to serve
what it has and to say why it stands still.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.node.rounds.fork_watch import ForkWatch
from shoal.node.rounds.key_use import KeyUse, abstention
from shoal.protocol.messages import Value

FORKED, ABSTAINING = "forked", "abstaining"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standstill:
    """Facts that keep one node from signing."""

    forks: ForkWatch
    key_use: KeyUse

    def phase(self, head: Value) -> str | None:
        """Return the phase of a node with this head that takes no part; None where it takes part.

        Raises StorageError.
        """
        if self.forks.fork is not None:
            return FORKED
        return ABSTAINING if self.key_use.abstains(head) else None

    @property
    def alerts(self) -> list[str]:
        """Lines for the user: what keeps the node from signing, and what to do about it."""
        fork, sighting = self.forks.fork, self.key_use.sighting
        found = [] if fork is None else [str(fork)]
        return found if sighting is None else [*found, abstention(sighting)]
