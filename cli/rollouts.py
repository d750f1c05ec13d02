"""The options of `shoal run` that have a meaning in swarms that share rollouts only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from shoal.cli.options import ProgressOptions, option
from shoal.protocol.errors import ConfigError
from shoal.protocol.manifest import Manifest
from shoal.protocol.manifest_rollouts import GROUPS_LIMIT
from shoal.protocol.rollouts import COMPLETION_LEAST, COMPLETION_LIMIT


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions(ProgressOptions):
    """What this node does with rollouts, and its own I, J and G."""

    rollouts: Annotated[
        Literal["train", "sample", "judge"],
        option(
            "--rollouts",
            help="With strategy rollouts: train, sample (generate for others only) or judge (score others' only).",
        ),
    ] = "train"
    local_groups: Annotated[
        int | None,
        option("--local-groups", help="With strategy rollouts: own groups a round, if not the manifest's."),
    ] = None
    external_groups: Annotated[
        int | None,
        option("--external-groups", help="With strategy rollouts: others' groups a round, if not the manifest's."),
    ] = None
    group_size: Annotated[
        int | None,
        option("--group-size", help="With strategy rollouts: completions of one task, if not the manifest's."),
    ] = None


def check_rollout_options(options: RolloutOptions, manifest: Manifest) -> None:
    """Raise ConfigError for an option out of range or without a meaning, and for a policy that is not installed."""
    from shoal.node.sapo.policies import installed_policies
    from shoal.node.sapo.tasks import nearest

    numbers = (
        ("--local-groups", options.local_groups, 1, GROUPS_LIMIT),
        ("--external-groups", options.external_groups, 0, GROUPS_LIMIT),
        ("--group-size", options.group_size, COMPLETION_LEAST, COMPLETION_LIMIT),
    )
    if manifest.rollouts is None:
        for name, value, *_ in numbers:
            if value is not None:
                raise ConfigError(f"{name}: this swarm's strategy is {manifest.sync.strategy}; leave it out")
        if options.rollouts != "train":
            raise ConfigError(f"--rollouts: this swarm's strategy is {manifest.sync.strategy}; leave it out")
        return
    for name, value, least, most in numbers:
        if value is not None and not least <= value <= most:
            raise ConfigError(f"{name}: {value} is not in {least}..{most}")
    if not manifest.strategy.shares_rollouts and options.rollouts != "train":
        raise ConfigError(
            f"--rollouts {options.rollouts}: this swarm averages its policies too, and every node trains; leave it out"
        )
    policies = installed_policies()
    if manifest.workload.name not in policies:
        raise ConfigError(
            f"with a section [rollouts] [workload] names a policy, and {manifest.workload.name!r} is none"
            f"{nearest(manifest.workload.name, policies)}; installed are {', '.join(policies)}"
        )
