"""The daemon of a node that shares rollouts: the links, members and control socket of any node, and an agent."""

from __future__ import annotations

from shoal.node.daemon import Daemon
from shoal.node.outcome import Outcome
from shoal.node.sapo.engine import RolloutEngine, RolloutParts
from shoal.protocol.chain import Position
from shoal.protocol.errors import LocalError
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
        section = self.config.manifest.rollouts
        if section is None:
            raise LocalError("a node that shares rollouts without a section [rollouts]")
        return RolloutEngine(
            RolloutParts(
                config=self.config,
                section=section,
                identity=self.identity,
                boot=self.boot,
                host=self.host,
                members=self.members,
                folder=self.store.folder / FOLDER,
                events=self.events,
                on_progress=self.on_progress,
            )
        )

    async def _take_part(self) -> None:
        await self._rollouts.run()
