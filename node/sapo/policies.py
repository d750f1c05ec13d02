"""Policies by name: what a manifest's [workload] names where rollouts are shared.

A policy is no workload: it has prompts and completions instead of batches and a loss. So its classes have a group of
entry points of their own, `shoal.policies`; what is not built in is one small class of an installed package:

    [project.entry-points."shoal.policies"]
    my-policy = "my_package.policies:MyPolicyFactory"

This module does not import torch: the command line can use it.
"""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from shoal.node.named_code import import_class, made
from shoal.node.training.trainer_messages import Scalar
from shoal.protocol.errors import ConfigError, did_you_mean
from shoal.protocol.manifest_rollouts import RolloutsSection

if TYPE_CHECKING:
    from shoal.node.sapo.policy import Policy
    from shoal.node.sapo.warm_up import WarmUpSettings

GROUP = "shoal.policies"
BUILT_IN: Mapping[str, str] = {
    "char-policy": "shoal.node.sapo.char_policy:CharPolicyFactory",
    "causal-lm-policy": "shoal.node.sapo.causal_lm_policy:CausalLMPolicyFactory",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLimits:
    """The demands of a swarm on every policy. seed: of the initial parameters. device, data: as `shoal run` says."""

    seed: int
    completion_tokens: int
    temperature: float
    device: str = "auto"
    data: str | None = None

    @classmethod
    def of(cls, section: RolloutsSection, *, seed: int, device: str, data: str | None) -> PolicyLimits:
        """The demands of a swarm whose rollouts are as `section` says."""
        return cls(
            seed=seed,
            completion_tokens=section.completion_tokens,
            temperature=section.temperature,
            device=device,
            data=data,
        )


class PolicyFactory(Protocol):
    """Makes one policy. The manifest's [workload.options] arrive as keyword arguments of `__init__`."""

    @property
    def warm_up(self) -> WarmUpSettings | None:
        """The lessons of the policy before its first round; None for one that can answer."""

    def build(self, limits: PolicyLimits) -> Policy:
        """The policy in its initial state: the same for equal limits."""


def installed_policies() -> tuple[str, ...]:
    """Names of the built-in policies and of those of the entry-point group."""
    return tuple(sorted({*BUILT_IN, *(point.name for point in importlib.metadata.entry_points(group=GROUP))}))


def load_policy(name: str, options: Mapping[str, Scalar]) -> PolicyFactory:
    """Import and make the factory called `name`.

    Raises ConfigError, one line each: unknown, not importable, no such class, an option that it does not take.
    """
    factory = factory_of(name)
    known = [key for key in inspect.signature(factory).parameters if key != "self"]
    for key in options:
        if key not in known:
            raise ConfigError(
                f"policy {name!r} has no option {key!r}{did_you_mean(key, known)}; it has {', '.join(known) or 'none'}"
            )
    policy = made(f"policy {name!r}", lambda: factory(**options))
    if not callable(getattr(policy, "build", None)):
        raise ConfigError(f"policy {name!r} has no method build(); it must have one")
    return cast(PolicyFactory, policy)


def whole(name: str, policy: Policy) -> Policy:
    """Return a policy that was built. Raises ConfigError where it lacks what would be missed amid a round only."""
    for member in ("completion_limit", "encode_reply", "drawn_by"):
        if not hasattr(policy, member):
            raise ConfigError(f"policy {name!r} has no {member}; it must be as shoal.node.sapo.policy.Policy says")
    return policy


def factory_of(name: str) -> type:
    """Import the class of the factory called `name`. Raises ConfigError as `load_policy`."""
    return import_class(f"policy {name!r}", BUILT_IN[name] if name in BUILT_IN else _installed(name))


def _installed(name: str) -> str:
    for point in importlib.metadata.entry_points(group=GROUP, name=name):
        return point.value
    known = installed_policies()
    raise ConfigError(
        f"unknown policy {name!r}{did_you_mean(name, known)}; installed are {', '.join(known)}, and your own belongs "
        f"into the entry-point group {GROUP}"
    )
