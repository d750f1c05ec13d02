"""Services of a node beside training: each lives in the node's nursery, and none of them holds up a round.

A service that cannot start raises ConfigError, and the node does not start. Once it runs, trouble of its own is its own
to log: only a bug ends the node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import trio


@dataclass(frozen=True, slots=True)
class UserOrders:
    """Orders that a node's user may give at any time: to leave the swarm, to pause (True), to go on (False).

    why_paused: why it trains nothing now, for what order or want; empty while it does.
    """

    leave: Callable[[], None]
    pause: Callable[[bool], None]
    why_paused: Callable[[], str]


class Service(Protocol):
    """One thing that a node does beside training."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; started once it can be used."""
