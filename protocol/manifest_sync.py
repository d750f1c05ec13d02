"""The section [sync] of a manifest: what is exchanged, and when; and which of its settings go together."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from shoal.protocol.wire import Message


class SyncSection(Message, frozen=True, kw_only=True):
    """What is exchanged, and when."""

    inner_steps: Annotated[
        int,
        Meta(ge=1, le=1_000_000, description="H: optimizer steps between two rounds, or two of one fragment."),
    ]
    strategy: Annotated[
        Literal["diloco", "ddp", "streaming", "sparse", "gossip", "rollouts"],
        Meta(
            description="diloco: H inner steps, then one outer Nesterov step on the mean pseudo-gradient. ddp: each "
            "round one AdamW step on the mean gradient, by [inner], which all nodes wait for. sparse: of diloco's "
            "update only the largest values, what is left out is carried on, and the outer step is plain. streaming: "
            "the parameters in fragments, each with rounds of its own in turn, beside which training goes on. gossip: "
            "each round with one other member, drawn at random; no two hold the same parameters, nothing is certified. "
            "rollouts: no parameters at all but completions of tasks, see [rollouts]."
        ),
    ] = "diloco"
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
        ),
    ] = 0
    late_steps: Annotated[
        int,
        Meta(
            ge=0,
            le=1_000_000,
            description="Optimizer steps that are made beyond these while the outcome is late, in place of waiting, "
            "until it is here. With 0 what is learnt does not depend on how fast rounds are.",
        ),
    ] = 0
    mixing: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="With strategy = streaming: how much of its own values a node keeps of a fragment when the "
            "round's outcome is applied; 1 would ignore that.",
        ),
    ] = 0.5
    outer_lr: Annotated[float, Meta(gt=0, le=100, description="Learning rate of the outer step.")] = 0.7
    outer_momentum: Annotated[float, Meta(ge=0, lt=1, description="Nesterov momentum of the outer step.")] = 0.9
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
        Literal["fp32", "bf16", "int8", "int4", "topk"],
        Meta(
            description="How values travel: fp32, bf16, int8 or int4 (32, 16, 8 or 4.125 bits each), or topk "
            "(with strategy = sparse: the largest of each 4096, in 2 bits, and their places)."
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
            "chunk. On unless said otherwise, but for ddp, gossip and rollouts."
        ),
    ] = False
    aggregate: Annotated[
        Literal["mean", "median", "trimmed"],
        Meta(
            description="How contributions are combined. mean: weighted by tokens. The others count each once, so that "
            "few hostile ones change little. median: of each value the middle one. trimmed: of each value the mean "
            "without the largest and smallest."
        ),
    ] = "mean"
    trim: Annotated[
        float,
        Meta(
            ge=0,
            lt=0.5,
            description="With aggregate = trimmed: what share is left out at either end: at least that of the hostile.",
        ),
    ] = 0.25
    clip_radius: float = 1.0

    def __post_init__(self) -> None:
        check_sync(self)

    @property
    def balances(self) -> bool:
        """Whether each node's steps of a round follow its speed."""
        return self.balance and self.strategy in ("diloco", "streaming", "sparse")

    @property
    def exchanges_gradients(self) -> bool:
        """Whether a contribution is the gradient at the anchor, and no progress beyond it."""
        return self.strategy == "ddp"

    @property
    def applied_mixing(self) -> float | None:
        """α where a round's outcome is mixed into a node's own values, None where it takes their place."""
        return self.mixing if self.strategy == "streaming" else None

    @property
    def round_steps(self) -> int:
        """How many optimizer steps there are between two rounds."""
        return self.inner_steps // self.fragments

    @property
    def plan_codec(self) -> str:
        """What a plan calls the codec: with the numbers of values, where it has such."""
        return f"topk{self.top_k}-{self.final_top_k}" if self.codec == "topk" else self.codec

    @property
    def plan_aggregate(self) -> str:
        """What a plan calls the aggregate: with its parameter in 1/65536, where it has one."""
        return f"trimmed{round(self.trim * 65536)}" if self.aggregate == "trimmed" else self.aggregate


def check_sync(sync: SyncSection) -> None:
    """Raises ValueError that says what to change, where they do not."""
    _check_steps(sync)
    _check_ddp(sync)
    _check_gossip(sync)
    _check_codec(sync)
    _check_aggregate(sync)


def _check_codec(sync: SyncSection) -> None:
    if (sync.strategy == "sparse") != (sync.codec == "topk"):
        raise ValueError('strategy = "sparse" and codec = "topk" belong together; leave the codec out, or both')
    if sync.codec == "topk" and sync.final_top_k < sync.top_k:
        raise ValueError(f"final_top_k is {sync.final_top_k}; it needs room for one contribution, {sync.top_k}")


def _check_ddp(sync: SyncSection) -> None:
    if sync.strategy != "ddp":
        return
    if sync.inner_steps != 1:
        raise ValueError(f'inner_steps is {sync.inner_steps}; with strategy = "ddp" it is 1, or left out')
    if (sync.outer_lr, sync.outer_momentum) != (0.7, 0.9):
        raise ValueError('outer_lr and outer_momentum have no meaning with strategy = "ddp": it steps by [inner]')


def _check_gossip(sync: SyncSection) -> None:
    if sync.strategy != "gossip":
        if sync.gossip_gamma != 0.6:
            raise ValueError('gossip_gamma has a meaning with strategy = "gossip" only')
        return
    if sync.codec not in ("bf16", "fp32"):
        raise ValueError('strategy = "gossip" sends parameters and not updates: use codec bf16 or fp32')
    if sync.norm_clip or sync.error_feedback != 1:
        raise ValueError('norm_clip and error_feedback have no meaning with strategy = "gossip"')
    limit = 2 * (1 - sync.outer_momentum**2)
    if sync.gossip_gamma >= limit:
        raise ValueError(f"gossip_gamma is {sync.gossip_gamma}; with this outer_momentum it must be < {limit:.4g}")


def _check_steps(sync: SyncSection) -> None:
    if sync.strategy != "streaming":
        if sync.fragments > 1 or sync.mixing != 0.5:
            raise ValueError('fragments and mixing have a meaning with strategy = "streaming" only')
        for key, steps in (("overlap_steps", sync.overlap_steps), ("late_steps", sync.late_steps)):
            if steps and sync.strategy != "diloco":
                raise ValueError(f'{key} has a meaning with strategy = "diloco" or "streaming" only')
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


def _check_aggregate(sync: SyncSection) -> None:
    if sync.aggregate != "mean" and sync.strategy in ("gossip", "rollouts"):
        raise ValueError(f'aggregate has no meaning with strategy = "{sync.strategy}": nothing is summed over all')
    if sync.aggregate != "mean" and sync.codec == "topk":
        raise ValueError(
            f'aggregate = "{sync.aggregate}" would be zero with strategy = "sparse", where few send the same value: '
            "use mean"
        )
    if sync.aggregate != "trimmed" and sync.trim != 0.25:
        raise ValueError('trim has a meaning with aggregate = "trimmed" only')
