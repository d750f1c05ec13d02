"""Which settings of [sync] go together."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.protocol.manifest import SyncSection


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
