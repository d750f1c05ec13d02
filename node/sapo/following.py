"""An agent that trains nothing beside a node whose rounds average policies: its policy is the newest certified one.

It attaches to its node as a training loop does, and is given each certified state; its node takes part in the rounds
as an observer and contributes nothing (`Surroundings.follows`). So the agent needs the policy's parameters, a copy of
them on its way in, and nothing of what training takes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch

from shoal.collectives.policy_image import image_of, put_values
from shoal.node.loops.loop_client import AnchorHere, LoopClient, Order
from shoal.node.pipe import Pause, Resume
from shoal.node.sapo.agent_messages import RoundReport
from shoal.node.sapo.averaging import METRIC, OwnDaemon
from shoal.node.sapo.past_policies import PastPolicies
from shoal.node.sapo.policy import Policy, module_of
from shoal.node.training.flat_parameters import FlatParameters
from shoal.node.training.trainer_messages import Evaluate, Evaluated, Initial, WriteInitial
from shoal.protocol.errors import ConfigError, NetworkError

WAIT_S = 1.0
"""A wait for orders looks so often whether the node is still there."""


class Followed(Protocol):
    """A policy that follows. version: the swarm's round to which it stands, None before the first."""

    policy: Policy
    version: int | None


class Following:
    """The agent's place beside its node's rounds; a context manager, which waits for the swarm to have a state."""

    def __init__(
        self,
        learner: Followed,
        data_dir: Path,
        *,
        replays: bool,
        judges: bool = False,
        on_fresh: Callable[[], None] = lambda: None,
    ) -> None:
        """data_dir: of the node that started this agent. replays: whether its policy is the image of
        the swarm's. judges: whether it is to go through others' groups again. on_fresh: called before a policy of
        another history, whose rounds may have the numbers of those before.

        Raises ConfigError for parameters that cannot be averaged.
        """
        self._learner = learner
        self._daemon = OwnDaemon(data_dir, None, 0)
        chunk_values = self._daemon.manifest.round.chunk_values
        self._flat = FlatParameters(module_of(learner.policy), frozen=False, chunk_values=chunk_values)
        self._device = next(iter(module_of(learner.policy).parameters())).device
        self._replays, self._judges, self._on_fresh = replays, judges, on_fresh
        self.past = PastPolicies(lambda: self._flat)
        self._client: LoopClient | None = None
        self._paused = False
        self._missing: float | None = None
        self.over = False
        """True if the node has ended in order."""

    def __enter__(self) -> Self:
        """Attach; returns when the policy is the swarm's. Raises ConfigError, NetworkError."""
        self._client = client = self._daemon.attach(layout=self._flat.layout, metric=METRIC, device=str(self._device))
        try:
            while self._learner.version is None:
                if not self._obey(client, WAIT_S) and client.gone:
                    raise NetworkError("the node ended before there was a policy to follow")
        except BaseException:
            client.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is not None:
            self._client.close()

    def count(self, report: RoundReport, *, group_size: int) -> bool:
        """Take the newest policy between two rounds of the agent. Returns whether the node is there.

        Waits while the node is paused. What its completions earned in the round before is reported as the loss.
        """
        client = self._client
        assert client is not None
        if report.reward is not None:
            self._missing = 1 - report.reward
        while self._obey(client, WAIT_S if self._paused else 0.0) or self._paused:
            if client.gone:
                break
        gone = client.gone
        self.over = gone and client.ended_in_order
        return not gone

    def refresh(self) -> None:
        """Take the newest policy before a round: another may have come while this agent rested."""
        client = self._client
        assert client is not None
        while self._obey(client, 0.0):
            pass

    def _obey(self, client: LoopClient, wait_s: float) -> bool:
        """Carry out the node's next order, if there is one within that time."""
        order = client.receive(wait_s)
        if order is not None:
            self._carry_out(order, client)
        return order is not None

    def _carry_out(self, order: Order, client: LoopClient) -> None:
        match order:
            case AnchorHere():
                anchor = client.take_anchor()
                if anchor is not None:
                    if anchor.fresh:
                        self._on_fresh()
                    if self._judges:
                        self.past.note(anchor.round, anchor.values)
                    if self._replays:
                        put_values(image_of(anchor.values), anchor.values)
                    self._flat.scatter(torch.from_numpy(anchor.values))
                    self._learner.version = anchor.round
            case Evaluate() if self._missing is not None:
                client.send(Evaluated(round=order.round, value=self._missing))
            case WriteInitial():
                self._write_initial(client)
            case Pause():
                self._paused = True
            case Resume():
                self._paused = False
            case _:  # of training: steps, snapshots, settings of an optimizer
                pass

    def _write_initial(self, client: LoopClient) -> None:
        """Give the policy as it was drawn, which counts until the first founder's, after its warm-up, is there."""
        if client.peer_id in self._daemon.manifest.swarm.founders[:1]:
            raise ConfigError(
                "the swarm has no state yet, and this node's policy is to be its first: start it with --rollouts train"
            )
        self._flat.gather(torch.from_numpy(client.contribution))
        client.send(Initial())
