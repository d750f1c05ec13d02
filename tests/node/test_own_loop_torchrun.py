"""A node of several ranks under torchrun beside one of a single process: real daemons, and ranks that are killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.node.lab import Node, assert_exact, eventually
from tests.node.loop_lab import LoopNode, LoopSwarm, example

LOOP = """
import os, sys
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from shoal.node.own_loop import join
from shoal.testnet.parent_death import tie_to

folder, kind, peers = sys.argv[1], sys.argv[2], sys.argv[3:]
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 33), torch.nn.Tanh(), torch.nn.Linear(33, 1))
rank, size = 0, 1
if "WORLD_SIZE" in os.environ:
    tie_to(os.getppid())
    distributed.init_process_group("gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (size,))
        if kind == "hsdp":
            mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicas", "parts"))
        fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def held_out(model):
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(7))
    return torch.nn.functional.mse_loss(model(x)[:, 0], x.sum(1))


with join(model, optimizer, "swarm.toml", data_dir=folder, peers=peers, evaluate=held_out) as swarm:
    own, part = torch.Generator().manual_seed(len(peers)), 32 // size
    sys.stdout.write(f"ranks {size} stand on {swarm.round}\\n")  # whole: other ranks write to it too
    sys.stdout.flush()
    while swarm.active:
        x = torch.randn(32, 8, generator=own)[rank * part : (rank + 1) * part]
        loss = torch.nn.functional.mse_loss(model(x)[:, 0], x.sum(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        swarm.step(tokens=len(x), loss=loss)
    sys.stdout.write(f"ranks {size} ended {swarm.over} {swarm.round}\\n")
    sys.stdout.flush()
if distributed.is_initialized():
    distributed.destroy_process_group()
"""


def digests(node: Node) -> dict[int, str]:
    """By round, of all its lives; a round that it caught up with is not among them."""
    return {e["round"]: e["digest"] for e in node.all_events() if e["event"] == "certified"}


def reached(node: Node, round: int) -> None:
    """Wait until a node has a certificate of this round or a later one."""
    eventually(lambda: max(digests(node), default=0) >= round, f"{node.folder.name} is at round {round}")


def contributes_again(one: LoopNode, several: LoopNode) -> int:
    """The first round from now on in which both contributed, and which both have, once it is there."""
    after = max(digests(one))

    def found() -> int:
        both = [e["round"] for e in one.events("certified") if e["round"] > after and e["contributors"] == 2]
        return next((round for round in both if round in digests(several)), 0)

    return int(eventually(found, "both contribute again"))


def together(swarm: LoopSwarm, kind: str, ranks: int) -> tuple[LoopNode, LoopNode]:
    """A node of one process and one of so many ranks, begun together."""
    one, several = swarm.nodes
    path = swarm.workplace / "loop.py"
    path.write_text(LOOP)
    one.begin(path, kind, SHOAL_HOLD="1:train")
    several.begin(path, kind, one.address, ranks=ranks, SHOAL_HOLD="1:train")
    for node in (one, several):
        node.hold("1:train")
        node.wait("linked")
    for node in (one, several):
        node.release()
    return one, several


@pytest.mark.long
@pytest.mark.parametrize(("kind", "ranks"), [("fsdp", 2), ("ddp", 2), ("hsdp", 4)])
def test_a_rank_that_is_killed_makes_its_node_late_and_torchrun_brings_it_back(
    tmp_path: Path, kind: str, ranks: int
) -> None:
    with LoopSwarm(tmp_path, nodes=2) as swarm:
        one, several = together(swarm, kind, ranks)
        reached(several, 4)
        several.rank(ranks - 1).send_signal(signal.SIGKILL)
        eventually(lambda: several.events("loop_detached"), "the daemon notices")
        alone = max(digests(one))
        eventually(
            lambda: [e for e in one.events("certified") if e["round"] > alone and e["contributors"] == 1],
            "rounds go on without it",
        )
        contributes_again(one, several)
        several.rank(0).send_signal(signal.SIGKILL)  # its daemon outlives it
        eventually(lambda: len(several.events("loop_detached")) == 2, "the daemon notices")
        reached(one, 10)
        last = contributes_again(one, several)
        assert several.log.count(f"ranks {ranks} stand on") == 3 * ranks
        assert len([e for e in several.all_events() if e["event"] == "started"]) == 1
        mine, theirs = digests(several), digests(one)
        assert all(mine[round] == theirs[round] for round in mine.keys() & theirs.keys())
        losses = [e["loss"] for e in several.events("evaluated")]
        assert losses[-1] < losses[0] / 2
        one.ask("leave")
        several.ask("leave")
        for node in (one, several):
            assert node.wait_exit() == 0, node.log
        assert several.log.count(f"ranks {ranks} ended True") == ranks
        report = swarm.report(last)
        assert_exact(report)


@pytest.mark.long
def test_ranks_whose_daemon_is_killed_go_on_and_end_at_the_same_step(tmp_path: Path) -> None:
    with LoopSwarm(tmp_path, nodes=2) as swarm:
        _, several = together(swarm, "fsdp", 2)
        reached(several, 2)
        pid = next(e["pid"] for e in several.all_events() if e["event"] == "started")
        os.kill(pid, signal.SIGKILL)
        assert several.wait_exit() == 0, several.log
        ended = [line for line in several.log.splitlines() if "ended" in line and line.startswith("ranks")]
        assert len(ended) == 2
        assert ended[0] == ended[1]
        assert ended[0].startswith("ranks 2 ended False")
        # Whether the other goes on alone is chance: of two the one that led last is a quorum by itself.


@pytest.mark.long
def test_the_losses_of_ranks_are_those_of_one_process(tmp_path: Path) -> None:
    seen: list[list[float]] = []
    for ranks in (2, 0):
        place = tmp_path / str(ranks)
        place.mkdir()
        with LoopSwarm(place, nodes=1) as swarm:
            (node,) = swarm.nodes
            path = place / "loop.py"
            path.write_text(LOOP)
            node.begin(path, "fsdp", ranks=ranks, SHOAL_ROUNDS="10")
            assert node.wait_exit() == 0, node.log
            seen.append([e["loss"] for e in node.events("contributed")])
            assert_exact(swarm.report(10))
    assert len(seen[0]) == len(seen[1]) == 10
    assert seen[0] == pytest.approx(seen[1], rel=1e-3)
    assert seen[0][-1] < seen[0][0] / 2


@pytest.mark.long
def test_the_example_of_several_ranks_trains_beside_one_of_its_own_kind(tmp_path: Path) -> None:
    with LoopSwarm(tmp_path, nodes=1, inner_steps=50) as swarm:
        (node,) = swarm.nodes
        path = tmp_path / "ranks.py"
        path.write_text(example("ranks.py"))
        node.begin(path, str(swarm.manifest_path), ranks=2, SHOAL_ROUNDS="4")
        assert node.wait_exit() == 0, node.log
        assert [event["tokens"] for event in node.events("contributed")] == [50 * 2 * 64] * 4
        assert_exact(swarm.report(4))
