"""The section [rollouts] of a manifest, for swarms that share rollouts: what is asked, and how it is trained on."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from shoal.protocol.manifest_sync import SyncSection
from shoal.protocol.rollouts import COMPLETION_LEAST, COMPLETION_LIMIT
from shoal.protocol.strategies.table import STRATEGIES, named, strategy_named
from shoal.protocol.wire import Message

DEFAULT_POLICY = "char-policy"
DEFAULT_POLICY_OPTIONS = {"style": "rotary"}
"""For a founder who says nothing. The policy's own defaults stay as they were in 0.1.0, for manifests of then."""

DEFAULT_ROLLOUTS = {
    "tasks": [{"family": name, "config": "easy"} for name in ("base_conversion", "basic_arithmetic", "lcm")],
    "completion_tokens": 8,
}
"""A section for a founder who says nothing: short answers, that the built-in policy learns to give in minutes."""

DEFAULT_OPTIMIZER, DEFAULT_LEARNING_RATE = "muon", 5e-4
"""Of the built-in policy where each node has its own, for a founder who says nothing (docs/decisions.md)."""
REPLAYED = {"images": True, "labels": True, "replays": True}
"""For samplers of averaged policies, who then can be held to the policy that they name."""
OTHER_LEARNING_RATE = 2e-4
"""Of AdamW, for all other policies: at 1e-3 they unlearn what they were taught."""


def default_tables(policy: str, *, averages: bool) -> dict[str, dict[str, Any]]:
    """Keys of [workload], [inner] and [rollouts], for a founder who says nothing of a policy.

    averages: the swarm averages policies. Then all is as it was measured for that: images of them travel, too.
    """
    if averages:
        return {"workload": {}, "inner": {"lr": OTHER_LEARNING_RATE}, "rollouts": {**DEFAULT_ROLLOUTS, **REPLAYED}}
    if policy != DEFAULT_POLICY:
        return {"workload": {}, "inner": {"lr": OTHER_LEARNING_RATE}, "rollouts": {**DEFAULT_ROLLOUTS}}
    return {
        "workload": {"options": dict(DEFAULT_POLICY_OPTIONS)},
        "inner": {"optimizer": DEFAULT_OPTIMIZER, "lr": DEFAULT_LEARNING_RATE},
        "rollouts": {**DEFAULT_ROLLOUTS},
    }


TASK_LIMIT = 256
GROUPS_LIMIT = 256
"""Of one round."""
COMPLETION_TOKENS_LIMIT = 32_768
CONFIG_LIMIT_ITEMS = 64
OVER_PROVISION_LIMIT = 4.0

_FAMILY = re.compile(r"^[a-z0-9_.-]+\Z")

TaskScalar = bool | int | float | str
TaskConfig = dict[str, TaskScalar | list[TaskScalar]]


class TaskEntry(Message, frozen=True, kw_only=True):
    """One family of tasks: its config, or the name of a preset of it, and how often it is drawn next to the others."""

    family: Annotated[str, Meta(min_length=1, max_length=64)]
    config: Annotated[str, Meta(max_length=64)] | Annotated[TaskConfig, Meta(max_length=CONFIG_LIMIT_ITEMS)] = "default"
    weight: Annotated[int, Meta(ge=1, le=1_000_000)] = 1

    def __post_init__(self) -> None:
        if not _FAMILY.match(self.family):
            raise ValueError(f"{self.family!r} is no name of a family: give small letters, digits, and _ . - only")
        if isinstance(self.config, dict):
            _check_config(self.config)


class RolloutsSection(Message, frozen=True, kw_only=True):
    """Tasks of policies, and how they train on each other's answers: strategy = rollouts, or diloco beside it."""

    tasks: Annotated[
        list[TaskEntry],
        Meta(
            min_length=1,
            max_length=TASK_LIMIT,
            description="Task families, each { family, config, weight }: a family of reasoning-gym or of a package "
            "installed at every node, its settings or the name of a preset, and how often it is drawn.",
        ),
    ]
    local: Annotated[
        int,
        Meta(ge=1, le=GROUPS_LIMIT, description="I: groups of its own that a node trains on in a round."),
    ] = 4
    external: Annotated[
        int,
        Meta(
            ge=0,
            le=GROUPS_LIMIT,
            description="J: groups of others. What others do not deliver, a node generates itself.",
        ),
    ] = 4
    group_size: Annotated[
        int, Meta(ge=COMPLETION_LEAST, le=COMPLETION_LIMIT, description="G: completions of one task.")
    ] = 8
    temperature: Annotated[float, Meta(gt=0, le=10, description="Of sampling.")] = 1.0
    completion_tokens: Annotated[
        int, Meta(ge=1, le=COMPLETION_TOKENS_LIMIT, description="The most tokens of one completion.")
    ] = 24
    staleness_rounds: Annotated[
        int, Meta(ge=0, le=1000, description="An offered group may be taken for so many of the taker's rounds.")
    ] = 4
    adaptive: bool = False
    sampling: Literal["uniform"] = "uniform"
    external_terms: Annotated[
        Literal["naive", "positive", "tis"],
        Meta(
            description="What counts of others' completions that did worse than their group: all (naive), nothing "
            "(positive), or as much as they are probable here beside where they were drawn (tis; needs labels)."
        ),
    ] = "positive"
    labels: Annotated[
        bool,
        Meta(
            description="Whether groups say by which policy they were drawn, with which tokens and log-probabilities."
        ),
    ] = False
    over_provision: Annotated[
        float,
        Meta(
            ge=1,
            le=OVER_PROVISION_LIMIT,
            description="Groups under way ÷ groups that a node needs of its own; those that are not done go on in the "
            "next round.",
        ),
    ] = 1.0
    images: Annotated[
        bool,
        Meta(
            description="Where policies are averaged: whether the certified digest covers the policy's image in bf16, "
            "so that samplers may fetch what changed in it."
        ),
    ] = False

    replays: Annotated[
        bool,
        Meta(
            description="Where policies are averaged: whether nodes that only sample draw from the image of the policy "
            "that they name, and trainers go through a share of their completions again to see it (needs images and "
            "labels)."
        ),
    ] = False

    def __post_init__(self) -> None:
        if self.external_terms == "tis" and not self.labels:
            raise ValueError('external_terms = "tis" weighs by log-probabilities; write labels = true beside it')
        if self.replays and not (self.images and self.labels):
            raise ValueError(
                "replays goes through tokens that an image drew; write images = true, labels = true beside it"
            )
        if self.replays and self.over_provision > 1:
            raise ValueError("replays needs completions of one policy; write over_provision = 1.0, or replays = false")


def check_rollouts(section: RolloutsSection | None, sync: SyncSection) -> None:
    """Raise ValueError unless `section` is there with rollouts, where [sync] says nothing else, or with diloco."""
    strategy = strategy_named(sync.strategy)
    if section is not None and section.images and not strategy.averages_policies:
        raise ValueError(f'images has no meaning with strategy = "{strategy.name}"; leave it out of [rollouts]')
    if not strategy.shares_rollouts:
        if section is not None and not strategy.averages_policies:
            sharing = named(one for one in STRATEGIES.values() if one.shares_rollouts)
            averaging = named(one for one in STRATEGIES.values() if one.averages_policies)
            raise ValueError(
                f"[rollouts] has a meaning with strategy = {sharing}, or {averaging} to average the policies too"
            )
        return
    if section is None:
        raise ValueError(
            f'strategy = "{strategy.name}" needs a section [rollouts]; '
            f"`shoal init --strategy {strategy.name}` writes one"
        )
    defaults = {field.name: field.default for field in msgspec.structs.fields(sync)} | strategy.defaults({})
    for key, value in msgspec.structs.asdict(sync).items():
        if key != "strategy" and value != defaults[key]:
            raise ValueError(f'{key} has no meaning with strategy = "{strategy.name}"; leave it out of [sync]')


def _check_config(config: TaskConfig) -> None:
    for key, value in config.items():
        values = value if isinstance(value, list) else [value]
        if len(key) > 64 or not key.isidentifier():
            raise ValueError(f"config: {key!r} is no name of a setting")
        if len(values) > CONFIG_LIMIT_ITEMS:
            raise ValueError(f"config: {key} has more than {CONFIG_LIMIT_ITEMS} values")
        for item in values:
            if isinstance(item, float) and not math.isfinite(item):
                raise ValueError(f"config: {key} is not a finite number")
            if isinstance(item, int) and not -(2**63) <= item < 2**63:
                raise ValueError(f"config: {key} does not fit 64 bits")
