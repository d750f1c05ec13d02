"""A trainer's process that is started before the rest of its node: both import for seconds, and can at the same time.

    early_trainer ─► the process imports torch ───────────────────────► the node's `Trainer` takes it and gives orders
                     the daemon imports what it is made of, begins ──┘

Nobody has told it anything by then; a node that ends before it takes it ends it too.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from shoal.node.control_groups import usable_cores
from shoal.node.loops.loop_messages import OWN_LOOP
from shoal.node.options import NodeConfig
from shoal.node.training import shared_tensors, trainer
from shoal.node.training.trainer import EarlyTrainer, TrainerSpec
from shoal.protocol.key_file import keep_keys_out
from shoal.protocol.manifest import Manifest


def has_trainer_process(manifest: Manifest) -> bool:
    """True if a node trains in a process of the daemon's; else in a loop of its user's, or of its agent's."""
    return manifest.workload.name != OWN_LOOP and manifest.rollouts is None


def spec_of(config: NodeConfig) -> TrainerSpec:
    """Settings of a node's trainer."""
    return TrainerSpec.of(
        config.manifest,
        data=config.data,
        device=config.device,
        threads=config.threads or max(1, usable_cores() // 2),
        accumulate=config.accumulate,
        processes=config.processes,
    )


@asynccontextmanager
async def early_trainer(config: NodeConfig) -> AsyncIterator[EarlyTrainer | None]:
    """The process of the trainer that a node will have, begun; None for one without. Whoever takes none has it ended.

    Cancellation: likewise.
    """
    if not has_trainer_process(config.manifest):
        yield None
        return
    keep_keys_out()  # of what it dumps as well: no key has been read yet, whose reader would see to it
    memory = shared_tensors.open_memory()
    try:
        spawned = await trainer.spawn_trainer(spec_of(config), memory)
    except BaseException:
        os.close(memory)
        raise
    early = EarlyTrainer(spawned, memory)
    try:
        yield early
    finally:
        left = early.take()
        if left is not None:
            os.close(memory)
            with trio.CancelScope(shield=True):
                await spawned.end()
