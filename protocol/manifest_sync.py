"""The section [sync] of a manifest: what is exchanged, and when; and which of its settings go together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from shoal.protocol.manifest_text import AMENDABLE
from shoal.protocol.strategies.strategy import OuterStep, Strategy
from shoal.protocol.strategies.table import DEFAULT_STRATEGY, STRATEGIES, named, strategy_named
from shoal.protocol.wire import Message

_DESCRIPTION = " ".join(f"{name}: {strategy.summary}" for name, strategy in STRATEGIES.items())


class SyncSection(Message, frozen=True, kw_only=True):
    """Exchange between nodes: of what, and when."""

    inner_steps: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000,
            description="H: optimizer steps between two rounds, or two of one fragment.",
            extra=AMENDABLE,
        ),
    ]
    strategy: Annotated[str, Meta(description=_DESCRIPTION)] = DEFAULT_STRATEGY
    fragments: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="With strategy = streaming: in how many parts the parameters travel, one every "
            "inner_steps / fragments steps.",
        ),
    ] = 1
    overlap_steps: Annotated[
        int,
        Meta(
            ge=0,
            le=1_000_000,
            description="Optimizer steps that are made before a round's outcome is waited for, and applied: 0 or "
            "more, up to the steps between two rounds. More hide more of a slow network.",
            extra=AMENDABLE,
        ),
    ] = 0
    late_steps: Annotated[
        int,
        Meta(
            ge=0,
            le=1_000_000,
            description="Optimizer steps that are made beyond these while the outcome is late, in place of waiting, "
            "until it is here. With 0 what is learnt does not depend on how fast rounds are.",
            extra=AMENDABLE,
        ),
    ] = 0
    mixing: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="With strategy = streaming: how much of its own values a node keeps of a fragment when the "
            "round's outcome is applied; 1 would ignore that.",
            extra=AMENDABLE,
        ),
    ] = 0.5
    outer_lr: Annotated[
        float,
        Meta(
            gt=0,
            le=100,
            description="Learning rate of the outer step.",
            extra=AMENDABLE,
        ),
    ] = 0.7
    outer_momentum: Annotated[
        float,
        Meta(
            ge=0,
            lt=1,
            description="Nesterov momentum of the outer step.",
            extra=AMENDABLE,
        ),
    ] = 0.9
    gossip_gamma: Annotated[
        float,
        Meta(
            gt=0,
            lt=2,
            description="With strategy = gossip: how strongly two partners are pulled together. Less than "
            "2 (1 - outer_momentum^2), beyond which members drift apart.",
        ),
    ] = 0.6
    codec: Annotated[
        Literal["fp32", "bf16", "int8", "int4", "2bit", "topk"],
        Meta(
            description="How values travel: fp32, bf16, int8, int4 or 2bit (32, 16, 8, 4.125 or 2.125 bits each), or "
            "topk (with strategy = sparse: the largest of each 4096, in 2 bits, and their places).",
            extra=AMENDABLE,
        ),
    ] = "int8"
    balance: Annotated[
        bool,
        Meta(
            description="With diloco, streaming or sparse: whether a node makes more or fewer steps than that in a "
            "round, by its speed beside the others', so that all are ready at the same time."
        ),
    ] = True
    top_k: Annotated[
        int, Meta(ge=1, le=4096, description="With codec = topk: values that a node sends of each 4096.")
    ] = 64
    final_top_k: Annotated[
        int,
        Meta(
            ge=1,
            le=4096,
            description="With codec = topk: values of each 4096 that their mean has room for. Of more the largest "
            "remain; as many times top_k as there are nodes loses none.",
        ),
    ] = 256
    error_feedback: Annotated[
        float,
        Meta(ge=0, le=1, description="What a node did not send, or lost in encoding, counts this much a round later."),
    ] = 1.0
    norm_clip: Annotated[
        bool,
        Meta(
            description="Whether a contribution is scaled down to the norm of the median one, as a whole and in every "
            "chunk. On unless said otherwise, but for ddp, gossip and rollouts.",
            extra=AMENDABLE,
        ),
    ] = False
    aggregate: Annotated[
        Literal["mean", "median", "trimmed"],
        Meta(
            description="How contributions are combined. mean: weighted by tokens. The others count each once, so that "
            "few hostile ones change little. median: of each value the middle one. trimmed: of each value the mean "
            "without the largest and smallest.",
            extra=AMENDABLE,
        ),
    ] = "mean"
    trim: Annotated[
        float,
        Meta(
            ge=0,
            lt=0.5,
            description="With aggregate = trimmed: what share is left out at either end: at least that of the hostile.",
            extra=AMENDABLE,
        ),
    ] = 0.25
    clip_radius: float = 1.0

    def __post_init__(self) -> None:
        check_sync(self)

    @property
    def outer_step(self) -> OuterStep:
        """Outer optimizer, which turns the mean of a round into the next anchor."""
        return strategy_named(self.strategy).outer_step(self)

    @property
    def balances(self) -> bool:
        """True if each node's steps of a round follow its speed."""
        return self.balance and strategy_named(self.strategy).balances

    @property
    def exchanges_gradients(self) -> bool:
        """True if a contribution is the gradient at the anchor, and no progress beyond it."""
        return strategy_named(self.strategy).exchanges_gradients

    @property
    def applied_mixing(self) -> float | None:
        """Weight α of a round's outcome in a node's own values, None where it takes their place."""
        return strategy_named(self.strategy).mixing(self)

    @property
    def round_steps(self) -> int:
        """Number of optimizer steps between two rounds."""
        return self.inner_steps // self.fragments

    @property
    def plan_codec(self) -> str:
        """Name of the codec in plans: with the numbers of values, where it has such."""
        return f"topk{self.top_k}-{self.final_top_k}" if self.codec == "topk" else self.codec

    @property
    def plan_aggregate(self) -> str:
        """Name of the aggregate in plans: with its parameter in 1/65536, where it has one."""
        return f"trimmed{round(self.trim * 65536)}" if self.aggregate == "trimmed" else self.aggregate


_OF_FEW: Final[Sequence[tuple[str, ...]]] = (
    ("fragments", "mixing"),
    ("overlap_steps",),
    ("late_steps",),
    ("gossip_gamma",),
)
"""Settings that have a meaning only where a strategy names them; those of one line are refused together."""


def check_sync(sync: SyncSection) -> None:
    """Raises ValueError that says what to change, where settings do not go together."""
    strategy = strategy_named(sync.strategy)
    _check_settings(sync, strategy)
    _check_steps(sync)
    strategy.check(sync)
    _check_codec(sync, strategy)
    _check_aggregate(sync, strategy)


def _check_settings(sync: SyncSection, strategy: Strategy) -> None:
    defaults = {field.name: field.default for field in msgspec.structs.fields(SyncSection)}
    for keys in _OF_FEW:
        if strategy.settings.issuperset(keys) or all(getattr(sync, key) == defaults[key] for key in keys):
            continue
        have = f"{' and '.join(keys)} {'have' if len(keys) > 1 else 'has'}"
        knowing = named(one for one in STRATEGIES.values() if one.settings.issuperset(keys))
        raise ValueError(f"{have} a meaning with strategy = {knowing} only")


def _check_steps(sync: SyncSection) -> None:
    if sync.inner_steps % sync.fragments:
        raise ValueError(
            f"inner_steps is {sync.inner_steps}, which {sync.fragments} fragments do not divide; "
            f"take inner_steps = {sync.inner_steps + -sync.inner_steps % sync.fragments}, or other fragments"
        )
    if sync.overlap_steps > sync.round_steps:
        raise ValueError(
            f"overlap_steps is {sync.overlap_steps}; between two rounds there are only {sync.round_steps} steps: take "
            "no more than these, or more inner_steps"
        )


def _check_codec(sync: SyncSection, strategy: Strategy) -> None:
    for one in STRATEGIES.values():
        if one.own_codec is not None and (one is strategy) != (sync.codec == one.own_codec):
            raise ValueError(
                f'strategy = "{one.name}" and codec = "{one.own_codec}" belong together; leave the codec out, or both'
            )
    if sync.codec == "topk" and sync.final_top_k < sync.top_k:
        raise ValueError(f"final_top_k is {sync.final_top_k}; it needs room for one contribution, {sync.top_k}")


def _check_aggregate(sync: SyncSection, strategy: Strategy) -> None:
    if sync.aggregate != "mean" and not strategy.certifies:
        raise ValueError(f'aggregate has no meaning with strategy = "{sync.strategy}": nothing is summed over all')
    if sync.aggregate != "mean" and sync.codec == "topk":
        raise ValueError(
            f'aggregate = "{sync.aggregate}" would be zero with strategy = "sparse", where few send the same value: '
            "use mean"
        )
    if sync.aggregate != "trimmed" and sync.trim != 0.25:
        raise ValueError('trim has a meaning with aggregate = "trimmed" only')
