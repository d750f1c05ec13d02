"""An agent whose policy is averaged over the swarm: its rounds are the inner steps of the node's own training loop.

The agent attaches to its node as a training loop of a user's own does. A step of its optimizer is an inner step; after
as many as the swarm makes between two averages the node contributes what the agent has learnt since the last, and the
agent's policy moves to the new common parameters in place. The exchange of rollouts goes on beside it, and knows
nothing of it. The optimizer's moments are the agent's own and are kept.

The parameters of the first founder after its warm-up are the swarm's first state.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

from shoal.node.loops.loop_client import Anchor, LoopClient, NoDaemon, attach
from shoal.node.loops.loop_daemon import MANIFEST_NAME, POLL_S, LoopDaemon
from shoal.node.outcome import TRAINING_LOSS
from shoal.node.own_loop import Swarm
from shoal.node.sapo.agent_messages import RoundReport
from shoal.node.sapo.learner import Learner
from shoal.node.sapo.past_policies import PastPolicies
from shoal.node.sapo.policy import module_of
from shoal.node.training.trainer_messages import Layout
from shoal.protocol.errors import NetworkError
from shoal.protocol.manifest import Manifest, load_manifest

METRIC = f"{TRAINING_LOSS}, missing of reward 1"
"""The name of what is reported as the loss: of the agent's own completions, while it trains."""
ATTACH_DEADLINE_S = 120.0


class Averaging(Swarm):
    """The agent's place in its node's rounds; a context manager, which may wait for the swarm to have a state."""

    talks = False  # its node tells of the rounds

    def __init__(self, learner: Learner, data_dir: Path, *, replays: bool) -> None:
        """data_dir: of the node that started this agent. replays: whether the last policies are kept for them.

        Raises ConfigError for parameters that cannot be averaged.
        """
        super().__init__(
            module_of(learner.policy),
            learner.optimizer,
            data_dir / MANIFEST_NAME,
            data_dir=data_dir,
            wait_s=math.inf,
        )
        self._metric = METRIC
        self.past = PastPolicies(lambda: self._flat)
        self._learner = learner
        self._replays = replays

    def count(self, report: RoundReport, *, group_size: int) -> bool:
        """Say that the agent made a round; its weight is the completions in it. Returns whether the node is there.

        May wait for other nodes, and moves the policy's parameters when a round of the swarm is done.
        """
        loss = None if report.reward is None else 1 - report.reward
        return self.step(tokens=(report.local + report.external) * group_size, loss=loss)

    def _apply(self, anchor: Anchor, client: LoopClient) -> None:
        super()._apply(anchor, client)
        self._learner.version = anchor.round
        if self._replays:
            self.past.note(anchor.round, anchor.values)

    def _found(self) -> LoopDaemon:
        return OwnDaemon(self._data_dir, None, 0)


class OwnDaemon(LoopDaemon):
    """The daemon that started this agent: it is there, and takes the agent as soon as it is ready for it."""

    @property
    def manifest(self) -> Manifest:
        """The swarm's, which the daemon has."""
        return load_manifest(self.data_dir / MANIFEST_NAME)

    def attach(self, *, layout: Layout, metric: str, device: str) -> LoopClient:
        """See `LoopDaemon`."""
        ends_at = time.monotonic() + ATTACH_DEADLINE_S
        while True:
            try:
                return attach(self.data_dir, layout=layout, metric=metric, device=device)
            except NoDaemon:
                if time.monotonic() > ends_at:
                    raise NetworkError(
                        f"the node on {self.data_dir} does not take its own agent; see its log"
                    ) from None
            time.sleep(POLL_S)
