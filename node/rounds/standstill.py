"""Reasons why a node takes no part in rounds although it could, as they lie on its disk and as its user is told.

They are a fork that it saw, and its key, which may be in use elsewhere. It goes on to follow the chain, to serve
what it has and to say why it stands still.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.node.rounds.fork_file import ForkFile
from shoal.node.rounds.key_use import KeyUse, abstention
from shoal.protocol.chain import Chain
from shoal.protocol.forks import Fork, binding


@dataclass(frozen=True, slots=True, kw_only=True)
class Standstill:
    """Facts that keep one node, which has this chain, from signing."""

    forks: ForkFile
    key_use: KeyUse
    chain: Chain

    @property
    def fork(self) -> Fork | None:
        """The fork that binds this node to sign nothing more, if there is one."""
        return binding(self.forks.forks, self.chain.head)

    @property
    def alerts(self) -> list[str]:
        """Lines for the user: what keeps the node from signing, and what to do about it."""
        fork, sighting = self.fork, self.key_use.sighting
        found = [] if fork is None else [str(fork)]
        return found if sighting is None else [*found, abstention(sighting)]
