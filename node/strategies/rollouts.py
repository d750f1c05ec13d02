"""Rounds of a node's own agent, which trains on its own completions and on those of others. No trainer is started."""

from __future__ import annotations

from shoal.node.outcome import PhaseChanged, Progress
from shoal.node.parts import Parts
from shoal.node.sapo.engine import RolloutEngine, RolloutParts
from shoal.node.sapo.families import check_name
from shoal.node.sapo.origins import Origins
from shoal.node.strategies.rounds import ApartRounds
from shoal.protocol.errors import LocalError

FOLDER = "rollouts"
"""In the data folder: groups, the agent's files, and which rounds were announced."""


class RolloutRounds(ApartRounds):
    """A node's rounds under a strategy that exchanges nothing but rollouts."""

    _engine: RolloutEngine
    trains = False

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.engine = self.sharing = self._engine = rollout_engine(parts)

    @property
    def leaves_in_order(self) -> bool:
        """See `Rounds`. Nobody waits for this node, at any time."""
        return True

    @property
    def paused(self) -> bool:
        """See `Rounds`."""
        return self._engine.paused

    async def run(self, *, numel: int, buffers: int = 0) -> None:
        """See `Rounds`. There is no trainer: the agent goes through rounds as long as rollouts are shared."""
        raise LocalError("a trainer where an agent trains")


def rollout_engine(parts: Parts, *, averages: bool = False) -> RolloutEngine:
    """Make the engine that shares rollouts. averages: beside rounds that average policies and set the node's phase.

    Raises ConfigError for a task family that is unknown here.
    """
    section = parts.config.manifest.rollouts
    if section is None:
        raise LocalError("a node that shares rollouts without a section [rollouts]")
    for task in section.tasks:  # before there are links: its agent would say so, seconds later
        check_name(task.family)

    client, trains = parts.training_client, averages and parts.config.rollouts == "train"

    def told(progress: Progress) -> None:
        if not isinstance(progress, PhaseChanged):
            parts.on_progress(progress)

    def measured(tokens_per_s: float) -> None:
        if not trains:  # else it says itself how fast it trains
            client.tokens_per_s = tokens_per_s

    return RolloutEngine(
        RolloutParts(
            config=parts.config,
            section=section,
            identity=parts.identity,
            boot=parts.boot,
            host=parts.host,
            members=parts.members,
            names=parts.names,
            folder=parts.store.folder / FOLDER,
            events=parts.events,
            on_progress=told if averages else parts.on_progress,
            on_speed=measured,
            averages=averages,
            origins=_origins(parts) if section.replays else None,
        )
    )


def _origins(parts: Parts) -> Origins:
    members = parts.members
    return Origins(
        was_member=lambda peer: peer in members.admission.members() or members.admission.contributed(peer),
        record_of=members.record_of,
        waits_outside=parts.config.manifest.waits_outside,
    )
