"""The examples of docs/own-loop.md, run as they stand: two nodes each, real daemons, nothing fetched."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from shoal.node.own_loop import Swarm, node_seed
from shoal.node.state.checkpoints import LAYOUT, read_layout
from shoal.protocol.errors import ConfigError
from tests.node.loop_lab import WORDS, LoopNode, LoopSwarm, example, save_model

ROUNDS = 4


def losses(node: LoopNode) -> list[float]:
    return [event["loss"] for event in node.events("evaluated")]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a tiny Llama and its tokenizer, made here; beside it `text`, to train on."""
    pytest.importorskip("transformers", reason="the extra shoal[hf] is not installed")
    folder = tmp_path / "model"
    save_model(folder)
    (tmp_path / "text").write_text(" ".join(WORDS * 66))
    return folder


def test_plain_pytorch_trains_one_model_on_two_nodes(tmp_path: Path) -> None:
    with LoopSwarm(tmp_path, nodes=2, inner_steps=50) as swarm:
        swarm.begin_by_link(example("plain.py"), SHOAL_ROUNDS=str(ROUNDS))
        swarm.finish(ROUNDS)
        models = [torch.load(node.folder / "model.pt") for node in swarm.nodes]
        for node in swarm.nodes:
            assert losses(node)[-1] < 0.9 * losses(node)[0], losses(node)
            assert [event["tokens"] for event in node.events("contributed")][1:] == [50 * 64] * (ROUNDS - 1)
    for name, values in models[0].items():
        assert torch.equal(values, models[1][name]), name


def test_what_a_loop_keeps_of_its_own_comes_back_after_a_restart(tmp_path: Path) -> None:
    """Moments that began anew would have counted the steps since the restart alone."""
    with LoopSwarm(tmp_path, nodes=1, inner_steps=50) as swarm:
        (node,) = swarm.nodes
        script = tmp_path / "kept.py"
        script.write_text(example(script.name))
        steps, states = [], []
        for rounds in (2, 4):
            node.begin(script, str(swarm.manifest_path), SHOAL_ROUNDS=str(rounds))
            assert node.wait_exit() == 0, node.log
            kept = torch.load(node.folder / "optimizer.pt")
            steps.append({int(state["step"]) for state in kept["optimizer"]["state"].values()})
            states.append(kept["data"])
            assert kept["optimizer"]["param_groups"][0]["lr"] == pytest.approx(3e-3 * (1 - rounds / 100))
            assert f"round {rounds - 1}: 1 of 1 contributed, training loss" in node.log
    assert steps == [{100}, {200}]
    drawn = torch.Generator().manual_seed(node_seed(node.folder))
    for state in states:
        for _ in range(100):
            torch.randn(64, 16, generator=drawn)
        assert torch.equal(state, drawn.get_state())


@pytest.mark.long
@pytest.mark.parametrize("ranks", [0, 2])
def test_a_hugging_face_trainer_is_a_node_by_one_callback(tmp_path: Path, model: Path, ranks: int) -> None:
    script = example("hf.py")
    if ranks:
        script = script.replace("disable_tqdm=True", "disable_tqdm=True, use_cpu=True")
        script = script.replace("with node.swarm.at_anchor():", "if True:")  # ranks have left by then
    with LoopSwarm(tmp_path, nodes=2) as swarm:
        told = str(model), str(tmp_path / "text")
        swarm.begin_by_link(script, *told, ranks=ranks, SHOAL_ROUNDS=str(ROUNDS), HF_HUB_OFFLINE="1")
        swarm.finish(ROUNDS)
        ended = [load_file(node.folder / "model" / "model.safetensors") for node in swarm.nodes]
        for node in swarm.nodes:
            trained = [event["loss"] for event in node.events("contributed")]
            assert trained[-1] < 0.7 * trained[0], trained
            assert [event["tokens"] for event in node.events("contributed")] == [10 * 8 * 16 * max(1, ranks)] * ROUNDS
    for name, values in ended[0].items():
        assert torch.equal(values, ended[1][name]), name


@pytest.mark.long
def test_of_a_model_with_adapters_the_adapters_alone_travel(tmp_path: Path, model: Path) -> None:
    pytest.importorskip("peft", reason="the extra shoal[hf] is not installed")
    with LoopSwarm(tmp_path, nodes=2) as swarm:
        swarm.begin_by_link(
            example("lora.py"), str(model), str(tmp_path / "text"), SHOAL_ROUNDS=str(ROUNDS), HF_HUB_OFFLINE="1"
        )
        swarm.finish(ROUNDS)
        ended = [load_file(node.folder / "adapters" / "adapter_model.safetensors") for node in swarm.nodes]
        for node in swarm.nodes:
            trained = [event["loss"] for event in node.events("contributed")]
            assert trained[-1] < trained[0], trained
            layout = read_layout(node.folder / LAYOUT)
            assert all(".lora_A." in name or ".lora_B." in name for name in layout.names), layout.names
            assert layout.numel == 2 * 2 * 4 * 64  # two projections, two factors of rank 4 each
    assert ended[0].keys() == ended[1].keys()
    assert any(np.abs(values.numpy()).max() > 0 for name, values in ended[0].items() if "lora_B" in name)
    for name, values in ended[0].items():
        assert torch.equal(values, ended[1][name]), name


@pytest.mark.long
@pytest.mark.parametrize("ranks", [0, 2])
def test_a_loop_that_accelerate_prepared_counts_accumulated_steps_once(tmp_path: Path, ranks: int) -> None:
    pytest.importorskip("accelerate", reason="the extra shoal[hf] is not installed")
    with LoopSwarm(tmp_path, nodes=2) as swarm:
        swarm.begin_by_link(example("prepared.py"), ranks=ranks, SHOAL_ROUNDS=str(ROUNDS))
        swarm.finish(ROUNDS)
        models = [torch.load(node.folder / "model.pt") for node in swarm.nodes]
        for node in swarm.nodes:
            assert [event["tokens"] for event in node.events("contributed")] == [10 * 2 * 32 * max(1, ranks)] * ROUNDS
    for name, values in models[0].items():
        assert torch.equal(values, models[1][name]), name


def test_what_a_hugging_face_trainer_logs_has_the_round_its_members_and_the_held_out_loss() -> None:
    pytest.importorskip("transformers", reason="the extra shoal[hf] is not installed")
    from shoal.node import own_loop_hf

    callback = own_loop_hf.SwarmCallback("swarm.toml")
    logs, state = {"loss": 2.5}, SimpleNamespace(log_history=[{"loss": 2.0}, {"loss": 2.5}])
    callback.on_log(None, state, None, logs=logs)  # before it has joined
    assert logs == {"loss": 2.5}
    callback.swarm = cast(Swarm, SimpleNamespace(round=7, members=3, held_out=None))
    callback.on_log(None, state, None, logs=logs)
    assert logs == {"loss": 2.5, "swarm_round": 7, "swarm_members": 3}
    callback.swarm = cast(Swarm, SimpleNamespace(round=8, members=2, held_out=2.25))
    callback.on_log(None, state, None, logs=logs)
    assert logs == {"loss": 2.5, "swarm_round": 8, "swarm_members": 2, "swarm_held_out_loss": 2.25}
    assert state.log_history == [{"loss": 2.0}, logs]


def test_without_the_extra_the_callback_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.node import own_loop_hf  # takes seconds, and no other file needs it

    monkeypatch.setattr(own_loop_hf, "TrainerCallback", object)
    with pytest.raises(ConfigError, match=r"pip install 'shoal\[hf\]'"):
        own_loop_hf.SwarmCallback("swarm.toml")
