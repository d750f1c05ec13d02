"""What a daemon does beside training: each service lives in the daemon's nursery, and none of them holds up a round.

A service that cannot start raises ConfigError, and the node does not start. Once it runs, trouble of its own is its own
to log: only a bug ends the node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import trio

from shoal.node.audits.auditing import auditing_of
from shoal.node.dashboard.service import page_of
from shoal.node.discovery.meeting import meetings_of
from shoal.node.reporting.event_writers import writers_of
from shoal.swarm.members import Change

if TYPE_CHECKING:
    from shoal.node.daemon import Daemon


class Service(Protocol):
    """One thing that a daemon does beside training."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; started once it can be used."""

    def heard(self, change: Change) -> None:
        """What became of a peer."""


def services_of(daemon: Daemon) -> Sequence[Service]:
    """The services of this daemon, in the order in which they are started. The host, links and lanes are up by then."""
    address = daemon.config.dashboard
    page = [] if address is None else [page_of(daemon, address)]
    writers = writers_of(daemon)
    return [daemon.finding, *meetings_of(daemon), daemon.reaching, *auditing_of(daemon), *writers, *page]
