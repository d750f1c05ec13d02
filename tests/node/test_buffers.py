"""Running means in a swarm of real nodes: one loss at all of them, a newcomer's too, and in the exported file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shoal.node.state.checkpoint_check import check_checkpoint
from shoal.node.state.checkpoint_export import export_model
from tests.node.lab import Node, Swarm, assert_exact
from tests.node.normed import Normed

STREAMED: dict[str, object] = {"strategy": "streaming", "inner_steps": 6, "fragments": 2, "balance": False}
WHOLE: dict[str, object] = {"inner_steps": 6, "balance": False}


def loss_of_export(checkpoint: Path, out: Path) -> float:
    """Of the file as plain torch loads it; what is not in it stays as built."""
    report = check_checkpoint(checkpoint)
    assert report.state_ok, report.error
    assert report.digest is not None
    model = Normed().build()
    loaded = model.load_state_dict(load_file(export_model(checkpoint, out, digest=report.digest)), strict=False)
    assert (loaded.missing_keys, loaded.unexpected_keys) == (["2.calls"], [])
    with torch.no_grad():
        return Normed().evaluate(model.eval())


@pytest.mark.long
@pytest.mark.parametrize("sync", [WHOLE, STREAMED], ids=["diloco", "streaming"])
def test_nodes_export_what_they_evaluate_and_restart_on_it(sync: dict[str, object], tmp_path: Path) -> None:
    often = ("--checkpoint-every", "2")
    with Swarm(tmp_path, nodes=2, workload="tests.node.normed:Normed", options={}, sections={"sync": sync}) as swarm:
        swarm.start_together(node0=often, node1=often)
        one, other = swarm.nodes
        assert other.certified(3)["contributors"] == 2
        other.kill()
        other.start(*often, join=[one])
        newcomer = Node(tmp_path / "newcomer", swarm.manifest_path, tmp_path)
        newcomer.start(join=[one])
        swarm.nodes.append(newcomer)
        last = newcomer.wait("contributed")["round"]
        last += last % 2
        told = [node.wait("evaluated", round=last)["loss"] for node in swarm.nodes]
        assert told[0] == pytest.approx(told[1], rel=1e-6) == pytest.approx(told[2], rel=1e-6)
        one.certified(last + 2)
        for node in swarm.nodes:
            node.kill()
        for number, node in enumerate((one, other)):
            checkpoint = node.folder / "checkpoints" / f"0.0-{last}"
            assert loss_of_export(checkpoint, tmp_path / f"out{number}") == pytest.approx(told[0], abs=1e-4)
        report = swarm.report(last)
        assert_exact(report)
        assert report.wrong_values == 0
