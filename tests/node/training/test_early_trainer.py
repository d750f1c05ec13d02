"""A trainer's process that is there before its node: it is taken once, and ends with a node that does not take it."""

from __future__ import annotations

import os
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
import trio

from shoal.node.loops.external_trainer import trainer_of
from shoal.node.loops.loop_messages import OWN_LOOP
from shoal.node.options import NodeConfig
from shoal.node.training import trainer as trainer_module
from shoal.node.training.early_trainer import early_trainer
from tests.manifests import manifest_of
from tests.node.forks import copied_trainer
from tests.node.ledger import identity


def config_of(folder: Path, workload: str = "regression") -> NodeConfig:
    manifest = manifest_of([identity(1).peer_id], {"workload": {"name": workload}})
    return NodeConfig(manifest=manifest, data_dir=folder, device="cpu", threads=1)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainers of this test need not import torch."""
    monkeypatch.setattr(trainer_module, "PROGRAM", copied_trainer())


async def test_it_becomes_the_first_process_of_the_nodes_trainer(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with trio.fail_after(120):
        others = set(psutil.Process().children())
        async with early_trainer(config) as early, trio.open_nursery() as nursery:
            assert early is not None
            (process,) = set(psutil.Process().children()) - others
            trainer = trainer_of(config, identity(1), None, abandoned=lambda: None, early=early)  # type: ignore[arg-type]
            await nursery.start(trainer.run)
            assert trainer.pid == process.pid
            assert early.take() is None
            process.kill()
            while trainer.pid in (process.pid, None):
                await trio.lowlevel.checkpoint()
            assert trainer.started.metric == "mean squared error"  # of another process, spawned as ever
            nursery.cancel_scope.cancel()


async def test_it_ends_with_a_node_that_does_not_come_to_have_a_trainer(tmp_path: Path) -> None:
    async with early_trainer(config_of(tmp_path)):  # what is opened once, say by a thread pool, is open then
        pass
    before = open_files()
    others = set(psutil.Process().children())
    begun: list[psutil.Process] = []

    async def interrupted() -> None:
        async with early_trainer(config_of(tmp_path)):
            begun.extend(set(psutil.Process().children()) - others)
            raise KeyboardInterrupt

    with trio.fail_after(120):
        with pytest.raises(KeyboardInterrupt):
            await interrupted()
    assert [process.is_running() for process in begun] == [False]
    assert open_files() == before


async def test_there_is_none_for_a_loop_of_the_users_own(tmp_path: Path) -> None:
    async with early_trainer(config_of(tmp_path, OWN_LOOP)) as early:
        assert early is None
