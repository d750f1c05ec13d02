"""A node of `shoal bench hostile-samplers`: a daemon as it ships, whose agent samples and cheats.

    python -m shoal.lab.bench.hostile_sampler KIND run swarm.toml …      as `shoal run`

The agent is the product's with one thing changed; its bytes are well-formed, and the rewards that it announces are
those that its texts earn, but for the copier's. It is one of four kinds:

* ``other``: draws from another policy than it names: each parameter is a little off.
* ``stale``: draws from the first policy that it got, and names the newest.
* ``garbage``: half of the completions of a group are characters by chance.
* ``copier``: offers another's completions, with the rewards of these, for its own task.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch

from shoal.cli import main as command_line
from shoal.node.loops.loop_client import LoopClient, Order
from shoal.node.sapo import agent_process, engine, learner
from shoal.node.sapo.daemon_line import DaemonSharing, run
from shoal.node.sapo.following import Following
from shoal.node.sapo.generation import Generated, GroupGenerator
from shoal.node.sapo.groups import JudgedGroup
from shoal.node.sapo.policy import module_of
from shoal.node.sapo.tasks import Task

MODULE: Final = "shoal.lab.bench.hostile_sampler"
KIND_NAME: Final = "SHOAL_LAB_HOSTILE_SAMPLER"
"""Environment variable by which a node's agent knows its kind."""
OFF: Final = 0.1
"""By how much of its own size each parameter of another policy is off, one standard deviation."""


class OtherPolicy(Following):
    """Stands beside the certified policy."""

    def _carry_out(self, order: Order, client: LoopClient) -> None:
        version = self._learner.version
        super()._carry_out(order, client)
        if self._learner.version != version:
            chance = torch.Generator().manual_seed(self._learner.version or 0)
            with torch.no_grad():
                for parameter in module_of(self._learner.policy).parameters():
                    parameter.mul_(1 + OFF * torch.randn(parameter.shape, generator=chance))


class StalePolicy(Following):
    """Stands on the first policy."""

    _first: torch.Tensor | None = None

    def _carry_out(self, order: Order, client: LoopClient) -> None:
        version = self._learner.version
        super()._carry_out(order, client)
        if self._learner.version == version:
            return
        if self._first is None:
            self._first = self._flat.gather(self._flat.new_vector())
        self._flat.scatter(self._first)


class GarbageGenerator(GroupGenerator):
    """Draws half of each group, and takes the other half by chance."""

    def collect(self, count: int, draw: Callable[[], Task], *, round: int, version: int) -> Generated:
        """See `GroupGenerator`."""
        made = super().collect(count, draw, round=round, version=version)
        chance = random.Random(round)
        written = [rollout for group in made.groups for rollout in group.rollouts[::2]]
        for rollout in written:
            text = "".join(chance.choices("0123456789abcdef", k=len(rollout.tokens) - 1))
            rollout.tokens[:] = self._policy.encode_completion(text) or rollout.tokens
            rollout.log_probs[:] = [-1.0] * len(rollout.tokens)
            rollout.versions[:] = [(version, len(rollout.tokens))]
        return made


class CopyingSharing(DaemonSharing):
    """Offers what others offer."""

    def offer(self, groups: Sequence[JudgedGroup]) -> None:
        """See `Sharing`. Where nobody else offers anything its own groups go out."""
        others = self.take(len(groups))
        copies = [
            replace(own, texts=other.texts, rewards=other.rewards, sampling=other.sampling)
            for own, other in zip(groups, others, strict=False)
        ]
        super().offer([*copies, *groups[len(copies) :]])


def _change(module: Any, name: str, part: type) -> Callable[[], None]:
    return lambda: vars(module).update({name: part})


KINDS: Final[dict[str, Callable[[], None]]] = {
    "other": _change(agent_process, "Following", OtherPolicy),
    "stale": _change(agent_process, "Following", StalePolicy),
    "garbage": _change(learner, "GroupGenerator", GarbageGenerator),
    "copier": _change(agent_process, "DaemonSharing", CopyingSharing),
}
"""What makes an agent one of a kind."""


def main() -> None:
    """Be a node whose agent cheats, or that agent."""
    kind = os.environ.get(KIND_NAME)
    if kind is not None:
        KINDS[kind]()
        run(agent_process.make_rounds)  # which ends the process
    os.environ[KIND_NAME] = sys.argv.pop(1)
    vars(engine)["PROGRAM"] = ("-m", MODULE)
    command_line.main()


if __name__ == "__main__":
    main()
