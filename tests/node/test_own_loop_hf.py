"""A Trainer's callback over several calls of `train()`; with real nodes it is in `test_own_loop_examples`."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.node import own_loop_hf
from shoal.node.own_loop_hf import SwarmCallback


class Joined:
    """In place of a swarm that was joined."""

    def __init__(self, *_: object, **settings: object) -> None:
        self.life: list[str] = []

    def __enter__(self) -> None:
        self.life.append("joined")

    def close(self) -> None:
        self.life.append("left")


def test_training_that_failed_and_begins_again_leaves_first_and_counts_each_batch_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After an error, or smaller batches that the Trainer tries by itself, `on_train_end` was not called."""
    pytest.importorskip("transformers", reason="the extra shoal[hf] is not installed")
    monkeypatch.setattr(own_loop_hf, "join", Joined)
    model, callback = torch.nn.Linear(3, 1), SwarmCallback("swarm.toml")
    swarms: list[Any] = []
    for _ in range(2):
        callback.on_train_begin(None, None, None, model=model, optimizer=None)
        swarms.append(callback.swarm)
    assert [swarm.life for swarm in swarms] == [["joined", "left"], ["joined"]]
    model(torch.zeros(5, 3))
    assert sum(callback._weights) == 5


def test_a_model_that_is_copied_or_saved_amid_training_is_seen_by_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As an average of it is, or the best one so far."""
    pytest.importorskip("transformers", reason="the extra shoal[hf] is not installed")
    monkeypatch.setattr(own_loop_hf, "join", Joined)
    model, callback = torch.nn.Linear(3, 1), SwarmCallback("swarm.toml")
    callback.lock = threading.Lock()  # a swarm has some
    callback.on_train_begin(None, None, None, model=model, optimizer=None)
    torch.save(model, tmp_path / "model")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model", weights_only=False)):
        assert torch.equal(other(torch.ones(5, 3)), model(torch.ones(5, 3)))
    assert callback._weights == [5, 5], "those of the model alone"
