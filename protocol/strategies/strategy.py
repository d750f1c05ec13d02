"""The interface of a strategy: what members exchange, when, their outer step, its defaults, and its checks.

A strategy is one subclass in a file of its own, and a line in `table`. What is left as it is here is that of rounds in
which all members' updates are averaged, and a majority certifies the state that follows. Whoever asks what a swarm does
asks its strategy, by what it says here, and never for its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Protocol


class Exchanges(Enum):
    """Things that members can exchange."""

    UPDATES = "updates"
    """Progress of the parameters by inner steps: averaged over all in rounds that a majority certifies."""
    GRADIENTS = "gradients"
    """The gradient at the parameters that all hold: the same."""
    MODELS = "models"
    """Parameters, with one partner a round: each member holds its own, and nothing is certified."""
    ROLLOUTS = "rollouts"
    """Completions of tasks, and no parameters: each member counts rounds of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nesterov:
    """The outer step is Nesterov momentum on the mean update; `lr=1, momentum=0` just takes the mean."""

    lr: float
    momentum: float


@dataclass(frozen=True, slots=True)
class AdamW:
    """The outer step is AdamW on the mean gradient, by the settings of [inner]."""


OuterStep = Nesterov | AdamW


class Sync(Protocol):
    """The settings of [sync] that strategies read; see `SyncSection`."""

    @property
    def inner_steps(self) -> int: ...
    @property
    def mixing(self) -> float: ...
    @property
    def outer_lr(self) -> float: ...
    @property
    def outer_momentum(self) -> float: ...
    @property
    def gossip_gamma(self) -> float: ...
    @property
    def codec(self) -> str: ...
    @property
    def error_feedback(self) -> float: ...
    @property
    def norm_clip(self) -> bool: ...


class Strategy:
    """One way in which a swarm synchronises."""

    name: ClassVar[str]
    """Name in a manifest."""
    summary: ClassVar[str]
    """Summary in a sentence that follows its name and a colon."""
    exchanges: ClassVar[Exchanges] = Exchanges.UPDATES
    balances: ClassVar[bool] = False
    """True if a node may make more or fewer inner steps than others, by its speed."""
    settings: ClassVar[frozenset[str]] = frozenset()
    """Those keys of [sync] with a meaning under few strategies that have one under this."""
    own_codec: ClassVar[str | None] = None
    """The codec that it cannot do without, and that no other strategy can use."""
    averages_policies: ClassVar[bool] = False
    """True if a section [rollouts] may stand beside it: the swarm shares rollouts, and averages the policies too."""

    @property
    def certifies(self) -> bool:
        """True if all members hold one state, and a majority certifies each round; else everyone has its own."""
        return self.exchanges in (Exchanges.UPDATES, Exchanges.GRADIENTS)

    @property
    def exchanges_gradients(self) -> bool:
        """True if a contribution is the gradient at the anchor, and no progress beyond it."""
        return self.exchanges is Exchanges.GRADIENTS

    @property
    def exchanges_models(self) -> bool:
        """True if members exchange their parameters, of which each holds its own."""
        return self.exchanges is Exchanges.MODELS

    @property
    def shares_rollouts(self) -> bool:
        """True if rollouts are all that is exchanged."""
        return self.exchanges is Exchanges.ROLLOUTS

    @property
    def links_all(self) -> bool:
        """True if each node keeps a link with each other; else with a few, and what all are to hear goes by gossip."""
        return not self.shares_rollouts

    def defaults(self, given: Mapping[str, object]) -> dict[str, object]:
        """Return the defaults of [sync] that differ from those of the keys themselves.

        given: what it says, which nobody has checked yet.
        """
        return {}

    def check(self, sync: Sync) -> None:
        """Raise ValueError, with what to change, where settings do not go with this strategy."""

    def outer_step(self, sync: Sync) -> OuterStep:
        """Outer optimizer, which turns a round's mean into the next anchor; unused where nothing is averaged."""
        return Nesterov(lr=sync.outer_lr, momentum=sync.outer_momentum)

    def mixing(self, sync: Sync) -> float | None:
        """Weight α of a round's outcome in a node's own values, None where it takes their place."""
        return None
