"""The daemons of nodes that share rollouts: the links, members and control socket of any node, and an agent."""

from __future__ import annotations

from typing import Any

import trio

from shoal.node.daemon import Daemon
from shoal.node.outcome import Outcome, PhaseChanged, Progress
from shoal.node.sapo.engine import RolloutEngine, RolloutParts
from shoal.protocol.chain import Position
from shoal.protocol.errors import LocalError
from shoal.protocol.manifest import Manifest
from shoal.protocol.messages import Term
from shoal.protocol.records import Phase

FOLDER = "rollouts"
"""In the data folder: groups, the agent's files, and which rounds were announced."""


class RolloutDaemon(Daemon):
    """A node under the strategy `rollouts`. No trainer is started: the agent has its place."""

    @property
    def record_phase(self) -> Phase:
        """The phase in this node's record."""
        if self._over.is_set() or self.engine.leaving:
            return "leaving"
        if self.engine.machine is None:
            return "joining"
        return "paused" if self._rollouts.paused else "training"

    @property
    def position(self) -> Position:
        """No term, and this node's own round."""
        return Term(), self._rollouts.state_round

    def leave_then(self, outcome: Outcome) -> None:
        """Leave at once: nobody waits for this node."""
        if not self.engine.finished:
            self.outcome = outcome
            self.engine.ask_to_leave()

    @property
    def _rollouts(self) -> RolloutEngine:
        assert isinstance(self.engine, RolloutEngine)
        return self.engine

    def _new_engine(self) -> RolloutEngine:
        return RolloutEngine(_parts(self))

    async def _take_part(self) -> None:
        await self._rollouts.run()


class AveragingDaemon(Daemon):
    """A node that shares rollouts beside rounds in which the policies are averaged: the agent is its training loop."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.sharing = RolloutEngine(_parts(self, averages=True))

    async def _take_part(self) -> None:
        """The end of the rounds ends the agent, which saves what it knows."""
        assert self.sharing is not None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.sharing.run)
            await super()._take_part()
            nursery.cancel_scope.cancel()


def daemon_of(manifest: Manifest) -> type[Daemon]:
    """The daemon for a manifest with a section [rollouts]."""
    return RolloutDaemon if manifest.strategy.shares_rollouts else AveragingDaemon


def _parts(daemon: Daemon, *, averages: bool = False) -> RolloutParts:
    section = daemon.config.manifest.rollouts
    if section is None:
        raise LocalError("a node that shares rollouts without a section [rollouts]")

    def pass_on(progress: Progress) -> None:
        """Pass on all but phases: the node's is that of the swarm's rounds."""
        if not isinstance(progress, PhaseChanged):
            daemon.on_progress(progress)

    return RolloutParts(
        config=daemon.config,
        section=section,
        identity=daemon.identity,
        boot=daemon.boot,
        host=daemon.host,
        members=daemon.members,
        folder=daemon.store.folder / FOLDER,
        events=daemon.events,
        on_progress=pass_on if averages else daemon.on_progress,
        averages=averages,
    )
