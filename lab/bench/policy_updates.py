"""Sizes of what would take a sampler from one policy to the next, of values alone: no swarm runs, nothing travels.

The policy is the one that `shoal init --workload char-policy` names, taught its tasks for a while so that it and its
optimizer's moments are as in training; then it makes some steps at each learning rate, and three ways to tell of what
came of them are measured beside each other:

    changes    what changed in the policy's image in bf16 (`shoal.collectives.policy_image`)
    finals     the reduced chunks of a round, in the codec of the manifest: what a node has to fetch today
    whole      the whole policy in bf16

Apart from `samplers`, which shows them, since it is tested without a swarm.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import torch

from shoal.cli.text import count, quantity
from shoal.collectives.codecs import F32, final_chunk_codec
from shoal.collectives.grid import Grid
from shoal.collectives.policy_image import VALUE_BYTES, encode_changes, image_of
from shoal.lab.bench.machine import one_thread
from shoal.node.sapo.families import load_family
from shoal.node.sapo.policies import PolicyLimits, load_policy
from shoal.node.sapo.policy import Policy, module_of
from shoal.node.sapo.policy_optimizer import policy_optimizer
from shoal.node.sapo.tasks import TaskChoice
from shoal.node.sapo.warm_up import Lessons, teach
from shoal.node.training.flat_parameters import FlatParameters
from shoal.protocol.manifest import Manifest

TAUGHT_STEPS: Final = 40
TAUGHT_RATE: Final = 2e-3
LESSONS: Final = 32
"""Of a step."""


class UpdateSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one update, after `steps` at `rate`. changed: the share of bf16 values that are others than before."""

    rate: float
    steps: int
    changed: float
    changes_bytes: int
    finals_bytes: int
    whole_bytes: int

    def __str__(self) -> str:
        """The update on one line."""
        return (
            f"{count(self.steps, 'step')} at {self.rate:g}: {self.changed:.1%} of bf16 values changed; changes "
            f"{quantity(self.changes_bytes, 'B')}, finals {quantity(self.finals_bytes, 'B')}, "
            f"whole {quantity(self.whole_bytes, 'B')}"
        )


@dataclass(frozen=True, slots=True)
class Ways:
    """Rules by which an update is measured: the grid of chunks, and the codec of plans."""

    grid: Grid
    codec: str

    def sizes(self, before: F32, after: F32, *, rate: float, steps: int) -> UpdateSizes:
        """Measure the update that leads from one policy (numel,) to another."""
        spans = [(slice(*self.grid.span(chunk)), self.grid.length(chunk)) for chunk in range(self.grid.chunks)]
        images = [(image_of(before[span]), image_of(after[span]), length) for span, length in spans]
        changed = sum(int(np.count_nonzero(old.view("<u2") != new.view("<u2"))) for old, new, _ in images)
        return UpdateSizes(
            rate=rate,
            steps=steps,
            changed=changed / self.grid.numel,
            changes_bytes=sum(len(encode_changes(*one)) for one in images),
            finals_bytes=sum(
                final_chunk_codec(self.codec, self.grid, chunk).encoded_bytes(self.grid.length(chunk))
                for chunk in range(self.grid.chunks)
            ),
            whole_bytes=VALUE_BYTES * self.grid.numel,
        )


def measure_updates(manifest: Manifest, updates: Sequence[tuple[float, int]]) -> list[UpdateSizes]:
    """Measure updates of the manifest's policy, each so many steps at a learning rate from one taught policy."""
    section = manifest.rollouts
    assert section is not None
    limits = PolicyLimits(
        seed=manifest.workload.seed, completion_tokens=section.completion_tokens, temperature=1.0, device="cpu"
    )
    policy = load_policy(manifest.workload.name, manifest.workload.options).build(limits)
    choices = [
        TaskChoice(family=load_family(one.family), config=one.config, weight=one.weight) for one in section.tasks
    ]
    lessons = Lessons(choices, seed=manifest.workload.seed, stream="lessons")
    with one_thread():
        optimizer = policy_optimizer(policy, TAUGHT_RATE)
        _teach(policy, optimizer, lessons, TAUGHT_STEPS)
        before = _values(policy)
        ways = Ways(Grid(before.size, manifest.round.chunk_values), manifest.sync.plan_codec)
        found = []
        for rate, steps in updates:
            taught, its_optimizer = copy.deepcopy((policy, optimizer))
            for group in its_optimizer.param_groups:
                group["lr"] = rate
            _teach(taught, its_optimizer, lessons, steps)
            found.append(ways.sizes(before, _values(taught), rate=rate, steps=steps))
        return found


def _teach(policy: Policy, optimizer: torch.optim.Optimizer, lessons: Lessons, steps: int) -> None:
    for _ in range(steps):
        teach(policy, lessons.draw(LESSONS), step=optimizer.step)


def _values(policy: Policy) -> F32:
    flat = FlatParameters(module_of(policy), frozen=False)
    values: F32 = flat.gather(torch.empty(flat.layout.numel)).numpy()
    return values
