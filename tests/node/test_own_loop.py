"""A training loop of a user's own: what it counts, what it contributes, and how it takes anchors; to the bit."""

from __future__ import annotations

import logging
import math
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from shoal.node import own_loop
from shoal.node.loops import external_trainer
from shoal.node.loops.external_trainer import Detached, known_layout
from shoal.node.loops.loop_client import SEND_DEADLINE_S
from shoal.node.own_loop import SwarmWarning, join
from shoal.node.pipe import Pause, Resume, Stop
from shoal.node.state.checkpoints import LAYOUT
from shoal.node.training.flat_parameters import FlatParameters
from shoal.node.training.trainer import Restarted
from shoal.node.training.trainer_messages import (
    Applied,
    Contribution,
    Evaluate,
    Evaluated,
    Layout,
    Restored,
    Snapshot,
    Snapshotted,
    SyncSettings,
    Trained,
)
from shoal.protocol.errors import ConfigError, NetworkError
from shoal.protocol.identity import Identity
from shoal.protocol.manifest import render_manifest, validate_manifest
from shoal.protocol.names import short
from tests.node.loop_ends import DEADLINE_S, PEER, SHARE, DaemonEnd, Ends, StandIn, flat, joining

RATE = np.float32(0.7)


def made(frozen: bool = False) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    if frozen:
        model[0].requires_grad_(False)
    return model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def learn(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> torch.Tensor:
    """One optimizer step on batch `number`; the loss."""
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(number))
    loss = torch.nn.functional.mse_loss(model(x)[:, 0], x.sum(1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def weighs_nothing(steps: int) -> str:
    """What a user is told whose work has no weight."""
    return (
        "step(tokens=0) weighs nothing, and no round counts this work: give step() the number of tokens or samples "
        f"that each of the {steps} steps was made on"
    )


def test_work_is_contributed_once_across_anchors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = made()
    bases, deltas, tokens, locals_, stood = [], [], [], [], []

    async def daemon(end: DaemonEnd) -> None:
        anchor = await end.initial()
        bases.append(anchor)
        taken = 0
        await end.apply(anchor, 0, fresh=True)
        for round in (1, 2, 3):
            await end.train(round, steps=2)
            event, delta = await end.contribution()
            assert (event.number, event.order, event.steps) == (round, round, 2)
            deltas.append(delta)
            tokens.append(event.tokens)
            if round != 2:  # the second is not taken: it belongs to the third
                taken = event.number
            anchor = anchor - RATE * delta
            bases.append(anchor)
            await end.apply(anchor, round, taken=taken)
        await end.send(Stop())

    start = flat(model)
    with Ends(tmp_path, daemon), joining(tmp_path, monkeypatch, model, optimizer) as swarm:
        assert np.array_equal(flat(model), bases[0])
        number = 0
        while True:
            loss = learn(model, optimizer, number)
            locals_.append(flat(model))
            number += 1
            there = swarm.step(tokens=10 + number, loss=loss)
            stood.append(flat(model))
            if not there:
                break
        assert (swarm.round, swarm.over, number) == (3, True, 6)
    assert np.array_equal(start, bases[0])
    # Two steps on the first anchor.
    assert np.array_equal(deltas[0], bases[0] - locals_[1])
    # Taken: the second contribution holds the next two steps and nothing of the first two.
    assert np.array_equal(deltas[1], bases[1] - locals_[3])
    # Not taken: it moves along with the anchor, and the third contribution holds both.
    assert np.array_equal(stood[3], (locals_[3] - bases[1]) + bases[2])
    assert np.array_equal(deltas[2], bases[2] - locals_[5])
    assert tokens == [11 + 12, 13 + 14, 13 + 14 + 15 + 16]
    assert np.array_equal(flat(model), bases[3])


def test_what_a_loop_tells_its_daemon_is_given_up_where_that_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = made()

    async def daemon(end: DaemonEnd) -> None:
        await end.apply(await end.initial(), 0, fresh=True)
        await end.train(1, steps=2)
        await end.contribution()
        await end.send(Stop())

    with Ends(tmp_path, daemon), joining(tmp_path, monkeypatch, model, optimizer) as swarm:
        assert swarm._client is not None
        limit = swarm._client._channel.connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, 16)
        assert struct.unpack("ll", limit) == (SEND_DEADLINE_S, 0)
        for number in range(2):
            swarm.step(tokens=8, loss=learn(model, optimizer, number))


def test_anchors_that_were_missed_become_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop is long away from `step`: the daemon goes on all the same, and the loop takes the newest anchor."""
    model, optimizer = made()
    away, back = threading.Event(), threading.Event()
    anchors = []

    async def daemon(end: DaemonEnd) -> None:
        anchor = await end.initial()
        await end.apply(anchor, 0, fresh=True)
        await end.train(1, steps=2)
        assert (await end.expect(Applied)).round == 0
        await end.wait(away)
        for round in (1, 2, 3):
            anchors.append(anchor + np.float32(round))
            await end.apply(anchors[-1], round)
            assert (await end.expect(Applied)).round == round  # the loop's thread is far away
            await end.train(round + 1, steps=2)
        await end.send(Evaluate(round=3))
        back.set()
        # It evaluates at the first step that finds the order, which may be the one that contributes.
        event, delta, evaluated = await end.contribution_and(Evaluated)
        assert evaluated.round == 3
        assert (event.round, event.order, event.steps, event.tokens) == (4, 4, 2, 20)
        assert np.array_equal(delta, anchors[-1] - local[-1])
        await end.send(Stop())

    local = []
    evaluate = lambda model: float(flat(model)[0])  # noqa: E731
    with (
        Ends(tmp_path, daemon),
        joining(tmp_path, monkeypatch, model, optimizer, evaluate=evaluate) as swarm,
    ):
        base = flat(model)
        learn(model, optimizer, 0)
        progress = flat(model) - base
        away.set()
        assert back.wait(30)
        swarm.step(tokens=10)
        assert swarm.round == 3
        assert np.array_equal(flat(model), progress + anchors[-1])
        learn(model, optimizer, 1)
        local.append(flat(model))
        swarm.step(tokens=10)


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_grad_scaler_skips_count_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    model, _ = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    seen = []

    async def daemon(end: DaemonEnd) -> None:
        await end.apply(await end.initial(), 0, fresh=True)
        await end.train(1, steps=3)
        event, delta = await end.contribution()
        seen.append((event.steps, event.tokens, event.loss, delta))
        await end.send(Stop())

    with Ends(tmp_path, daemon), joining(tmp_path, monkeypatch, model, optimizer) as swarm:
        base = flat(model)
        for number in range(5):
            overflow = number in (0, 3)
            x = torch.full((8, 3), float("inf") if overflow else 1.0)
            loss = model(x).mean() if not overflow else model(x * 0 + 1).mean() * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            before = flat(model)
            swarm.step(tokens=100 + number, loss=loss if not overflow else torch.tensor(1e9))
    ((steps, tokens, loss, delta),) = seen
    assert (steps, tokens) == (3, 101 + 102 + 104)
    assert abs(loss) < 10
    assert np.array_equal(delta, base - before)


class HalfLoop:
    """A loop in bfloat16 by autocast, with a schedule."""

    def __init__(self) -> None:
        self.model, _ = made()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)

    def step(self, number: int) -> torch.Tensor:
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(number))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = self.model(x)
        assert out.dtype is torch.bfloat16
        loss = torch.nn.functional.mse_loss(out[:, 0].float(), x.sum(1))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss

    def moments(self) -> list[torch.Tensor]:
        return [value for state in self.optimizer.state_dict()["state"].values() for value in state.values()]


def test_autocast_a_schedule_and_state_dicts_are_those_of_a_loop_without_a_swarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, up to the first anchor; and that moves parameters and nothing else of what a loop saves."""
    alone, one = HalfLoop(), HalfLoop()
    for number in range(3):
        alone.step(number)

    async def daemon(end: DaemonEnd) -> None:
        anchor = await end.initial()
        await end.apply(anchor, 0, fresh=True)
        await end.train(1, steps=3)
        await end.contribution()
        await end.apply(anchor, 1, taken=1)  # as if the mean update were zero
        await end.train(2, steps=1)
        event, delta = await end.contribution()
        assert (event.steps, event.tokens) == (1, 8)
        assert np.array_equal(delta, anchor - learnt[-1])
        await end.send(Stop())

    learnt = []
    with Ends(tmp_path, daemon), joining(tmp_path, monkeypatch, one.model, one.optimizer) as swarm:
        base = flat(one.model)
        for number in range(3):
            loss = one.step(number)
            learnt.append(flat(one.model))
            swarm.step(tokens=8, loss=loss)
        assert np.array_equal(learnt[-1], flat(alone.model))
        assert np.array_equal(flat(one.model), base)
        assert all(torch.equal(*both) for both in zip(one.moments(), alone.moments(), strict=True))
        assert one.scheduler.state_dict() == alone.scheduler.state_dict()
        assert one.optimizer.param_groups[0]["lr"] == 0.01 * 0.5**3
        one.model.load_state_dict(alone.model.state_dict())  # what is loaded counts as learnt here
        assert np.array_equal(flat(one.model), learnt[-1])
        loss = one.step(3)
        learnt.append(flat(one.model))
        swarm.step(tokens=8, loss=loss)


def test_accumulated_gradients_are_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = made()
    seen = []

    async def daemon(end: DaemonEnd) -> None:
        await end.apply(await end.initial(), 0, fresh=True)
        await end.train(1, steps=2)
        event, _ = await end.contribution()
        seen.append((event.steps, event.tokens))
        await end.send(Stop())

    with Ends(tmp_path, daemon), joining(tmp_path, monkeypatch, model, optimizer) as swarm:
        for number in range(2):
            for part in range(3):
                model(torch.ones(4, 3) * part).mean().backward()
                if part < 2:
                    swarm.step(tokens=1000)  # no optimizer step was made: not counted
            optimizer.step()
            swarm.step(tokens=12 + number)
    assert seen == [(2, 25)]


def test_frozen_parameters_neither_travel_nor_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = made(frozen=True)
    frozen = model[0].weight.clone()
    layouts = []

    async def daemon(end: DaemonEnd) -> None:
        layouts.append(end.trainer.layout)
        anchor = await end.initial()
        await end.apply(anchor + np.float32(1), 0, fresh=True)
        await end.train(1, steps=1)
        await end.contribution()
        await end.send(Stop())

    with Ends(tmp_path, daemon), joining(tmp_path, monkeypatch, model, optimizer) as swarm:
        learn(model, optimizer, 0)
        swarm.step(tokens=1)
    assert layouts == [Layout(names=("2.bias", "2.weight"), shapes=((1,), (1, 4)), numel=5)]
    assert torch.equal(model[0].weight, frozen)


def test_evaluation_that_returns_no_number_is_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = made()

    async def daemon(end: DaemonEnd) -> None:
        await end.apply(await end.initial(), 0, fresh=True)
        await end.send(Evaluate(round=0))
        await end.train(1, steps=1)

    def forgets(model: torch.nn.Module) -> float:
        return None  # type: ignore[return-value]

    with (
        Ends(tmp_path, daemon),
        pytest.raises(ConfigError, match="evaluate= returned NoneType, not a number; have it return the held-out loss"),
        joining(tmp_path, monkeypatch, model, optimizer, evaluate=forgets),
    ):
        pass


def test_a_loss_of_each_sample_is_refused_in_a_line_at_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = made()

    async def daemon(end: DaemonEnd) -> None:
        await end.apply(await end.initial(), 0, fresh=True)
        await end.train(1, steps=1000)
        await end.expect(Detached)

    with Ends(tmp_path, daemon), joining(tmp_path, monkeypatch, model, optimizer) as swarm:
        learn(model, optimizer, 0)
        with pytest.raises(ConfigError, match=r"step\(loss=\) was given 8 values; give it the mean loss of the step"):
            swarm.step(tokens=8, loss=torch.ones(8))


def test_evaluation_sees_the_anchor_and_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = made()
    model.insert(1, torch.nn.Dropout(0.5))
    model[1].eval()  # the user's own choice
    anchors = []

    async def daemon(end: DaemonEnd) -> None:
        anchors.append(await end.initial())
        await end.apply(anchors[0], 0, fresh=True)
        await end.train(1, steps=1)
        await end.contribution()
        await end.send(Evaluate(round=0))
        assert (await end.expect(Evaluated)).value == 0.25
        await end.train(1, steps=1)
        await end.contribution()
        await end.send(Stop())

    def evaluate(given: torch.nn.Module) -> float:
        assert not any(module.training for module in given.modules())
        assert not torch.is_grad_enabled()
        assert np.array_equal(flat(given), anchors[0])
        return 0.25

    with (
        Ends(tmp_path, daemon),
        joining(tmp_path, monkeypatch, model, optimizer, evaluate=evaluate) as swarm,
    ):
        learn(model, optimizer, 0)
        local = flat(model)
        assert swarm.step(tokens=1)
        assert np.array_equal(flat(model), local)
        assert not np.array_equal(local, anchors[0])
        assert (model.training, model[1].training) == (True, False)
        learn(model, optimizer, 1)
        swarm.step(tokens=1)


@pytest.mark.parametrize("ran_before", [False, True])
def test_loop_says_that_it_joined_and_each_round_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, ran_before: bool
) -> None:
    monkeypatch.setattr(StandIn, "leaves", not ran_before)
    model, optimizer = made()
    said = {
        "dashboard": "http://127.0.0.1:8420/",
        "dashboard_link": "http://…/#token=secret",
        "names": {PEER: "box", "12D3KooWB": "elm"},
    }
    monkeypatch.setattr(StandIn, "status", lambda self: said)
    caplog.set_level(logging.INFO, logger="shoal.loop")

    async def daemon(end: DaemonEnd) -> None:
        anchor = await end.initial()
        await end.apply(anchor, 0, fresh=True)
        await end.train(1, steps=1)
        await end.contribution()
        await end.send(Evaluate(round=0))
        await end.expect(Evaluated)
        await end.train(1, steps=1)  # of the same round again, as after a repair
        await end.contribution()
        await end.apply(anchor, 1)
        await end.train(2, steps=1, contributors=1)
        await end.contribution()
        await end.apply(anchor, 2)
        await end.send(Evaluate(round=2))
        await end.expect(Evaluated)
        await end.train(3, steps=1, contributors=2, missing=("12D3KooWB", "12D3KooWnobodyKnows"))
        await end.contribution()
        await end.send(Stop())

    with (
        Ends(tmp_path, daemon),
        joining(tmp_path, monkeypatch, model, optimizer, evaluate=lambda model: 0.123456) as swarm,
    ):
        there, steps = True, 0
        while there:
            learn(model, optimizer, steps)
            there = swarm.step(tokens=1, loss=1.5)
            steps += 1
        assert (swarm.round, swarm.members, swarm.held_out) == (2, SHARE.members, 0.123456)
    lines = [record.getMessage() for record in caplog.records if record.name == "shoal.loop"]
    found = f", which ran on {tmp_path} before," if ran_before else ""
    assert lines[:4] == [
        f"this node{found} takes part as box ({short(PEER)}); its page is http://127.0.0.1:8420/",
        "round 0: 1 member",
        "round 1: 1 of 1 contributed, training loss 1.5, held-out loss 0.1235 (round 0)",
        "round 2: 2 contributed, 1 member goes on, without elm and …yKnows, training loss 1.5, held-out loss 0.1235",
    ]
    assert "secret" not in caplog.text


def test_loop_is_heard_where_the_program_has_set_up_no_logging(tmp_path: Path) -> None:
    script = "import logging; from shoal.node import own_loop; {}own_loop._be_heard(); own_loop.logger.info('said')"
    heard = {
        before: subprocess.run([sys.executable, "-c", script.format(before)], capture_output=True, text=True).stderr
        for before in ("", "logging.basicConfig(); ")
    }
    assert heard == {"": "shoal: said\n", "logging.basicConfig(); ": ""}


def test_step_that_is_not_called_is_told_of_beside_the_loop_until_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The loop's thread is away; the line is another's, once a period, and none while the node is paused."""
    model, optimizer = made()
    monkeypatch.setattr(own_loop, "UNSTEPPED_S", 0.2)
    monkeypatch.setattr(own_loop, "WARNING_PERIOD_S", 0.2)
    told, stood, paused = threading.Event(), threading.Event(), threading.Event()
    counted: list[str] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "step() was not called for" in record.getMessage():
                counted.append(threading.current_thread().name)
                told.set()

    async def daemon(end: DaemonEnd) -> None:
        await end.apply(await end.initial(), 0, fresh=True)
        await end.train(1, steps=2)
        await end.wait(stood)
        await end.send(Pause())
        await end.wait(paused)
        await end.send(Resume())
        await end.contribution()
        await end.send(Stop())

    heard = Heard()
    own_loop.logger.addHandler(heard)
    try:
        with Ends(tmp_path, daemon), joining(tmp_path, monkeypatch, model, optimizer) as swarm:
            assert told.wait(DEADLINE_S)
            told.clear()
            assert told.wait(DEADLINE_S)  # again
            stood.set()
            client = swarm._client
            assert client is not None
            while not client.paused:  # its reader has heard of it, the loop has not
                time.sleep(0.001)
            told.clear()
            assert not told.wait(3 * own_loop.UNSTEPPED_S)
            paused.set()
            for number in range(2):
                learn(model, optimizer, number)
                swarm.step(tokens=1)
        thread = swarm._watch._thread
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    finally:
        own_loop.logger.removeHandler(heard)
    assert set(counted) == {"shoal steps"}
    assert "call it once after each optimizer step. Until then this node contributes nothing" in caplog.text
    assert "never called" not in caplog.text


def test_loop_that_called_step_never_is_told_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = made()

    async def daemon(end: DaemonEnd) -> None:
        await end.apply(await end.initial(), 0, fresh=True)
        await end.train(1, steps=2)
        await end.expect(Detached)

    with Ends(tmp_path, daemon), joining(tmp_path, monkeypatch, model, optimizer):
        for number in range(3):
            learn(model, optimizer, number)
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "step() was never called: of the 3 optimizer steps that this loop made the swarm has none; "
        "call it once after each"
    ]


def said_at_the_end(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "at_anchor()" in record.getMessage()]


def test_loop_that_ends_before_its_first_round_is_told_that_the_swarm_has_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = made()

    async def daemon(end: DaemonEnd) -> None:
        await end.apply(await end.initial(), 0, fresh=True)
        await end.train(1, steps=5)
        await end.expect(Detached)

    with (
        caplog.at_level(logging.INFO),
        Ends(tmp_path, daemon),
        joining(tmp_path, monkeypatch, model, optimizer) as swarm,
    ):
        for number in range(3):
            learn(model, optimizer, number)
            swarm.step(tokens=1)
    (said,) = said_at_the_end(caplog)
    assert said.startswith("this loop ended after 3 of the 5 steps of its first round: the swarm has nothing of it")


@pytest.mark.parametrize("more", [0, 1, 2])
def test_loop_that_ends_amid_a_later_round_is_told_which_steps_are_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, more: int
) -> None:
    model, optimizer = made()

    async def daemon(end: DaemonEnd) -> None:
        anchor = await end.initial()
        await end.apply(anchor, 0, fresh=True)
        await end.train(1, steps=2)
        event, _ = await end.contribution()
        await end.apply(anchor, 1, taken=event.number)
        await end.train(2, steps=5)
        await end.expect(Detached)

    with (
        caplog.at_level(logging.INFO),
        Ends(tmp_path, daemon),
        joining(tmp_path, monkeypatch, model, optimizer) as swarm,
    ):
        for number in range(2 + more):
            learn(model, optimizer, number)
            swarm.step(tokens=1)
    steps = {1: "1 step", 2: "2 steps"}.get(more)
    told = (
        f"the last {steps} of this loop ended no round: the model has what was learnt in them, at_anchor() has it not"
    )
    assert said_at_the_end(caplog) == ([told] if more else [])
    assert "training loss" not in caplog.text, "it told none"


def test_evaluation_that_takes_longer_than_a_round_keeps_no_loop_from_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_loop, "LONG_EVALUATION_S", 1e-9)
    model, optimizer = made()
    evaluated, begun, gone_on = list[int](), threading.Event(), threading.Event()

    async def daemon(end: DaemonEnd) -> None:
        anchor = await end.initial()
        for round in range(3):
            await end.apply(anchor, round, fresh=not round)
            await end.send(Evaluate(round=round))
            await end.wait(begun)  # two more rounds go on without it
        await end.train(3, steps=5)
        gone_on.set()
        assert (await end.expect(Evaluated)).round == 0
        await end.expect(Detached)

    def evaluate(model: torch.nn.Module) -> float:
        evaluated.append(len(evaluated))
        begun.set()
        assert gone_on.wait(DEADLINE_S)
        return 1.0

    with Ends(tmp_path, daemon), joining(tmp_path, monkeypatch, model, optimizer, evaluate=evaluate) as swarm:
        assert (swarm.round, len(evaluated)) == (2, 1)


def test_loop_whose_optimizer_is_another_than_it_joined_with_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, joined = made()
    other = torch.optim.SGD(model.parameters(), lr=0.1)

    async def daemon(end: DaemonEnd) -> None:
        await end.apply(await end.initial(), 0, fresh=True)
        await end.train(1, steps=50)
        await end.expect(Detached)

    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]

    with Ends(tmp_path, daemon), joining(tmp_path, monkeypatch, model, joined) as swarm:
        for number in range(own_loop.VAIN_CALLS - 1):
            learn(model, other, number)
            swarm.step(tokens=1)
        learn(model, joined, 0)
        swarm.step(tokens=1)
        for number in range(own_loop.VAIN_CALLS - 1):
            learn(model, other, number)
            swarm.step(tokens=1)
        assert warnings() == [], "a loss scaler may skip some"
        for number in range(2):
            learn(model, other, number)
            swarm.step(tokens=1)
        assert warnings() == [own_loop.VAIN % own_loop.VAIN_CALLS]


def test_a_swarm_is_entered_before_its_first_step_and_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = made()

    async def daemon(end: DaemonEnd) -> None:
        await end.apply(await end.initial(), 0, fresh=True)
        await end.train(1, steps=50)
        await end.expect(Detached)

    with Ends(tmp_path, daemon):
        swarm = joining(tmp_path, monkeypatch, model, optimizer)
        learn(model, optimizer, 0)
        with pytest.raises(ConfigError, match=r"step\(\) comes after joining"):
            swarm.step(tokens=1)
        with swarm:
            assert swarm.step(tokens=1, loss=learn(model, optimizer, 1))
        assert not swarm.step(tokens=1), "after the end a loop goes on by itself"
        with pytest.raises(ConfigError, match=r"call join\(\) again"), swarm:
            pass


def test_host_vectors_are_on_the_host_whatever_device_is_the_default() -> None:
    flat_parameters = FlatParameters(torch.nn.Linear(3, 1))
    with torch.device("meta"):
        made_there = (flat_parameters.new_vector(), flat_parameters.new_base())
    assert [vector.device.type for vector in made_there] == ["cpu", "cpu"]


@pytest.mark.parametrize("replaces", [False, True])
def test_loop_that_trains_what_does_not_travel_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, replaces: bool
) -> None:
    """A layer that is unfrozen, or put in the place of another, after the loop has joined."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    async def daemon(end: DaemonEnd) -> None:
        await end.apply(await end.initial(), 0, fresh=True)
        await end.train(1, steps=50)
        await end.expect(Detached)

    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]

    with Ends(tmp_path, daemon), joining(tmp_path, monkeypatch, model, optimizer) as swarm:
        swarm.step(tokens=1, loss=learn(model, optimizer, 0))
        assert warnings() == []
        if replaces:
            model[1] = torch.nn.Linear(4, 1)
            optimizer.add_param_group({"params": list(model[1].parameters())})
        else:
            model[0].requires_grad_(True)
        swarm.step(tokens=1, loss=learn(model, optimizer, 1))
        assert warnings() == [], "the names are looked at once a minute"
        swarm._warned_at.clear()
        for number in (2, 3):
            swarm.step(tokens=1, loss=learn(model, optimizer, number))
        assert warnings() == [own_loop.NEWER % ("1.weight" if replaces else "0.weight")]


@pytest.mark.parametrize(
    ("leaves", "timeout_s", "said"),
    [
        (True, 600.0, "this node has left the swarm"),
        (False, 600.0, "the node on {0} stays in the swarm, and waits 10 min for a loop; "),
        (False, None, "the node on {0} stays in the swarm, and waits for a loop; "),
    ],
)
@pytest.mark.parametrize("ended_by", [KeyboardInterrupt, ValueError])
def test_loop_that_is_broken_off_says_what_becomes_of_its_node(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    leaves: bool,
    timeout_s: float | None,
    said: str,
    ended_by: type[BaseException],
) -> None:
    model, optimizer = made()
    monkeypatch.setattr(StandIn, "leaves", leaves)
    caplog.set_level(logging.INFO, logger="shoal.loop")

    async def daemon(end: DaemonEnd) -> None:
        await end.apply(await end.initial(), 0, fresh=True)
        await end.train(1, steps=2)
        await end.expect(Detached)

    with (
        Ends(tmp_path, daemon, timeout_s=timeout_s),
        pytest.raises(ended_by),
        joining(tmp_path, monkeypatch, model, optimizer),
    ):
        raise ended_by
    last = caplog.records[-1].getMessage()
    assert last == said.format(tmp_path) + ("" if leaves else f"`shoal leave --data-dir {tmp_path}` ends it")


def test_loop_says_once_that_it_trains_without_a_quorum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = made()

    async def daemon(end: DaemonEnd) -> None:
        await end.apply(await end.initial(), 0, fresh=True)
        for _ in range(2):
            await end.train(1, steps=1, contribute=False)
            await end.expect(Trained)
        await end.send(Stop())

    with (
        caplog.at_level(logging.INFO),
        Ends(tmp_path, daemon),
        joining(tmp_path, monkeypatch, model, optimizer) as swarm,
    ):
        while swarm.step(tokens=1):
            learn(model, optimizer, 0)
    said = [record.message for record in caplog.records if "no quorum" in record.message]
    assert len(said) == 1
    assert said[0].startswith("no quorum in round 1: training goes on locally until the others are back")


def test_a_pause_holds_the_loop_which_says_so_once_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = made()
    order = []
    told = threading.Event()
    monkeypatch.setattr(own_loop, "PAUSE_TOLD_S", 0.3)
    monkeypatch.setattr(own_loop, "WAIT_S", 0.05)
    warn = own_loop.logger.warning

    def noted(text: str, *values: object) -> None:
        warn(text, *values)
        if text == own_loop.PAUSED:
            told.set()

    monkeypatch.setattr(own_loop.logger, "warning", noted)

    async def daemon(end: DaemonEnd) -> None:
        await end.send(Pause())
        await end.send(Resume())
        await end.apply(await end.initial(), 0, fresh=True)
        await end.train(1, steps=1, contribute=False)
        await end.expect(Trained)
        await end.send(Pause())
        await end.send(Pause())
        await end.train(1, steps=1)
        await end.send(Snapshot(round=0, path=str(tmp_path / "paused")))
        await end.expect(Snapshotted)  # orders are followed meanwhile
        order.append("paused")
        await end.wait(told)
        await end.send(Resume())
        await end.contribution()
        await end.send(Stop())

    with Ends(tmp_path, daemon), joining(tmp_path, monkeypatch, model, optimizer) as swarm:
        learn(model, optimizer, 0)
        swarm.step(tokens=1)
        order.append("step")
        learn(model, optimizer, 1)
        swarm.step(tokens=1)
    assert order == ["paused", "step"]
    said = [record.message for record in caplog.records if "this node is paused, and step() waits" in record.message]
    assert len(said) == 1
    assert f"`shoal resume --data-dir {tmp_path}` goes on" in said[0]


def test_a_loop_that_joins_a_paused_node_waits_and_says_what_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node was paused when another loop was attached, or none."""
    model, optimizer = made()

    async def daemon(end: DaemonEnd) -> None:
        await end.apply(await end.initial(), 0, fresh=True)
        await end.train(1, steps=1, contribute=False)
        await end.expect(Detached)
        await end.send(Pause())
        await end.expect(Restarted)
        await end.expect(Detached)
        await end.expect(Restarted)
        await end.send(Resume())
        await end.train(1, steps=1)
        await end.contribution()

    with Ends(tmp_path, daemon):
        with joining(tmp_path, monkeypatch, model, optimizer):
            pass
        with pytest.raises(NetworkError, match=r"is paused .* `shoal resume --data-dir"):
            joining(tmp_path, monkeypatch, model, optimizer, wait_s=0.5).__enter__()
        with joining(tmp_path, monkeypatch, model, optimizer) as swarm:
            learn(model, optimizer, 0)
            swarm.step(tokens=1)


def test_a_loop_that_joins_nobody_is_warned_of_it_in_the_daemons_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = made()
    monkeypatch.setattr(own_loop, "JOINING_PERIOD_S", 0.1)
    monkeypatch.setattr(own_loop, "WAIT_S", 0.02)
    said = {"round": 1, "phase": "look", "alerts": ["linked with nobody for 7 s; looked for: her"]}
    monkeypatch.setattr(StandIn, "status", lambda self: said)

    async def daemon(end: DaemonEnd) -> None:
        await end.expect(Detached)

    with (
        Ends(tmp_path, daemon),
        pytest.warns(SwarmWarning, match="linked with nobody for 7 s") as warned,
        pytest.raises(
            NetworkError, match=r"rounds after 0\.5 s; linked with nobody for 7 s; looked for: her; the node's"
        ),
    ):
        joining(tmp_path, monkeypatch, model, optimizer, wait_s=0.5).__enter__()
    assert len(warned) == 1  # though it was asked several times


def test_a_daemon_that_is_gone_leaves_the_loop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = made()

    async def daemon(end: DaemonEnd) -> None:
        await end.apply(await end.initial(), 0, fresh=True)
        await end.train(1, steps=1)
        await end.contribution()
        end.trainer._child._stream.socket.shutdown(2)  # type: ignore[union-attr]  # as when it is killed
        assert isinstance(await end.expect(Detached), Detached)

    with (
        caplog.at_level(logging.INFO),
        Ends(tmp_path, daemon),
        joining(tmp_path, monkeypatch, model, optimizer) as swarm,
    ):
        learn(model, optimizer, 0)
        assert not swarm.step(tokens=1)
        assert (swarm.active, swarm.over) == (False, False)
        before = flat(model)
        learn(model, optimizer, 1)
        assert not swarm.step(tokens=1)
        assert not np.array_equal(flat(model), before)
    assert [r.levelname for r in caplog.records if "is shared: start the script again" in r.message] == ["WARNING"]


def test_daemon_that_ends_while_the_loop_joins_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def daemon(end: DaemonEnd) -> None:
        end.trainer._child._stream.socket.shutdown(2)  # type: ignore[union-attr]  # as when it ends
        await end.expect(Detached)

    ended = pytest.raises(ConfigError, match="the node ended before there was anything to train")
    with caplog.at_level(logging.INFO), Ends(tmp_path, daemon), ended:
        joining(tmp_path, monkeypatch, *made()).__enter__()
    assert not [message for message in caplog.messages if "training goes on locally" in message]


def test_parameters_that_are_not_finite_are_never_contributed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = made()

    async def daemon(end: DaemonEnd) -> None:
        await end.apply(await end.initial(), 0, fresh=True)
        await end.train(1, steps=1)
        await end.expect(Detached)

    diverged = pytest.raises(FloatingPointError, match="the learning rate is too high; the swarm's state is as it was")
    with Ends(tmp_path, daemon), diverged, joining(tmp_path, monkeypatch, model, optimizer) as swarm:
        learn(model, optimizer, 0)
        with torch.no_grad():
            model[0].weight[0, 0] = float("nan")
        swarm.step(tokens=1)


def test_steps_that_weigh_nothing_and_a_loss_that_is_none_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = made()
    told = []

    async def daemon(end: DaemonEnd) -> None:
        anchor = await end.initial()
        await end.apply(anchor, 0, fresh=True)
        await end.send(Evaluate(round=0))
        told.append((await end.expect(Evaluated)).value)
        await end.train(1, steps=2)
        event, _ = await end.contribution()
        told.append(event.tokens)
        await end.apply(anchor, 1, taken=event.number)
        await end.send(Evaluate(round=1))
        await end.expect(Evaluated)
        await end.train(2, steps=2)
        await end.contribution()
        await end.send(Stop())

    evaluate = lambda model: float("nan")  # noqa: E731
    with Ends(tmp_path, daemon), joining(tmp_path, monkeypatch, model, optimizer, evaluate=evaluate) as swarm:
        number = 0
        while swarm.step(tokens=0):
            learn(model, optimizer, number)
            number += 1
    assert (str(told[0]), told[1]) == ("nan", 0)
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "evaluate() returned nan, which is no loss: correct it, or lower the learning rate",
        weighs_nothing(steps=2),
    ]


@pytest.mark.parametrize(("period_s", "times"), [(0.0, 3), (own_loop.WARNING_PERIOD_S, 1)])
def test_work_without_weight_is_told_of_again_while_its_round_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, period_s: float, times: int
) -> None:
    """A member alone whose work has no weight waits for a round that none can end."""
    model, optimizer = made()
    monkeypatch.setattr(own_loop, "LIVENESS_PERIOD_S", 0.05)
    monkeypatch.setattr(own_loop, "WAIT_S", 0.01)
    monkeypatch.setattr(own_loop, "WARNING_PERIOD_S", period_s)
    asked, asked_thrice = [], threading.Event()

    def status(stand_in: StandIn) -> dict[str, object]:
        asked.append(None)
        if len(asked) == 3:  # what was said after the first two is in the log
            asked_thrice.set()
        return {"round": 1, "phase": "ready"}

    monkeypatch.setattr(StandIn, "status", status)

    async def daemon(end: DaemonEnd) -> None:
        await end.apply(await end.initial(), 0, fresh=True)
        await end.train(1, steps=1)
        await end.contribution()
        await end.wait(asked_thrice)
        await end.send(Stop())

    with Ends(tmp_path, daemon), joining(tmp_path, monkeypatch, model, optimizer) as swarm:
        learn(model, optimizer, 0)
        asked.clear()
        for words in ("64", None, [64], -1, math.nan, math.inf, 10**12):
            with pytest.raises(ConfigError, match="give the number of tokens or samples of the step"):
                swarm.step(tokens=words)  # type: ignore[arg-type]
        assert not swarm.step(tokens=0)
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert set(warned) == {weighs_nothing(steps=1)}
    assert len(warned) == times if times == 1 else len(warned) >= times


def test_loop_that_breaks_the_protocol_loses_its_own_part_alone_and_its_user_is_sent_to_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A negative weight would be signed, and refused by all others."""
    model, optimizer = made()
    causes = []

    async def daemon(end: DaemonEnd) -> None:
        await end.apply(await end.initial(), 0, fresh=True)
        await end.train(1, steps=2)
        causes.append((await end.expect(Restarted)).cause)

    with Ends(tmp_path, daemon), joining(tmp_path, monkeypatch, model, optimizer) as swarm:
        assert swarm._client is not None
        swarm._client.send(
            Contribution(number=1, order=1, round=1, tokens=-1, steps=2, loss=0.0, seconds=1.0, tokens_per_s=1.0)
        )
        while swarm.active:
            swarm.step(tokens=8)
        assert not swarm.over
    told = f"the training loop (process {os.getpid()}) broke the protocol: not a report: Expected `int` >= 0 - "
    assert [cause[: len(told)] for cause in causes] == [told]
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert causes[0] in warned
    assert any(line.startswith("the node is gone (see daemon.log); training goes on locally") for line in warned)


def test_work_that_has_weight_again_is_told_of_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = made()
    monkeypatch.setattr(own_loop, "WARNING_PERIOD_S", 0.0)

    async def daemon(end: DaemonEnd) -> None:
        anchor = await end.initial()
        await end.apply(anchor, 0, fresh=True)
        for round in range(1, 4):
            await end.train(round, steps=1)
            event, _ = await end.contribution()
            await end.apply(anchor, round, taken=event.number)
        await end.send(Stop())

    with Ends(tmp_path, daemon), joining(tmp_path, monkeypatch, model, optimizer) as swarm:
        for number, tokens in enumerate((0, 0, 1)):
            learn(model, optimizer, number)
            swarm.step(tokens=tokens)
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [weighs_nothing(steps=1)] * 2


def test_a_second_loop_and_another_model_are_turned_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = made()

    async def daemon(end: DaemonEnd) -> None:
        await end.apply(await end.initial(), 0, fresh=True)
        await end.train(1, steps=1)
        await end.expect(Detached)
        again = await end.expect(Restarted)
        assert (type(again), again.round) == (Restarted, 0)
        await end.train(1, steps=1)
        event, _ = await end.contribution()
        assert event.number == 1
        await end.send(Stop())

    wider = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    other = joining(tmp_path, monkeypatch, wider, torch.optim.SGD(wider.parameters(), lr=0.1))
    with Ends(tmp_path, daemon):
        taken = pytest.raises(ConfigError, match=rf"process {os.getpid()}\) is attached; end it first")
        with joining(tmp_path, monkeypatch, model, optimizer), taken:
            joining(tmp_path, monkeypatch, model, optimizer).__enter__()
        with pytest.raises(ConfigError, match=r"'0.bias' has shape \(4,\) in the state .* and \(5,\) here"):
            other.__enter__()
        with joining(tmp_path, monkeypatch, model, optimizer) as swarm:
            learn(model, optimizer, 0)
            swarm.step(tokens=1)


def test_a_process_of_another_user_is_turned_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = made()

    async def daemon(end: DaemonEnd) -> None:
        assert (tmp_path / "trainer.sock").stat().st_mode & 0o777 == 0o600
        await end.apply(await end.initial(), 0, fresh=True)
        await end.train(1, steps=1)
        await end.expect(Detached)

    with Ends(tmp_path, daemon):
        us = os.geteuid()
        monkeypatch.setattr(external_trainer.os, "geteuid", lambda: us + 1)
        with pytest.raises(ConfigError, match=f"belongs to user {us + 1}"):
            joining(tmp_path, monkeypatch, model, optimizer).__enter__()
        monkeypatch.setattr(external_trainer.os, "geteuid", lambda: us)
        with joining(tmp_path, monkeypatch, model, optimizer) as swarm:
            assert swarm.active


def test_kept_progress_comes_back_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no order asked to contribute is in the snapshot alone; a loop that is started again goes on with it."""
    model, optimizer = made()
    path = str(tmp_path / "0.0-0.trainer")
    anchors, locals_, seen = [], [], []

    async def daemon(end: DaemonEnd) -> None:
        anchor = await end.initial()
        anchors.append(anchor)
        await end.apply(anchor, 0, fresh=True)
        await end.train(1, steps=1, contribute=False)
        await end.expect(Trained)
        await end.send(Snapshot(round=0, path=path))
        assert not (await end.expect(Snapshotted)).failure
        await end.train(1, steps=1)
        await end.expect(Detached)
        restored = await end.expect(Restored)
        assert (restored.refused, restored.exact) == ("", True)
        await end.expect(Restarted)
        await end.train(1, steps=2)
        event, delta = await end.contribution()
        seen.append((event.tokens, delta))
        assert np.abs(delta - (anchor - locals_[-1])).max() == 0
        await end.send(Stop())

    with Ends(tmp_path, daemon):
        with joining(tmp_path, monkeypatch, model, optimizer) as swarm:
            learn(model, optimizer, 0)
            locals_.append(flat(model))
            swarm.step(tokens=5)
        model, optimizer = made()
        with joining(tmp_path, monkeypatch, model, optimizer) as swarm:
            assert np.array_equal(flat(model), (locals_[0] - anchors[0]) + anchors[0])
            learn(model, optimizer, 1)
            locals_.append(flat(model))
            swarm.step(tokens=7)
    assert seen[0][0] == 12


def test_a_node_that_knows_its_model_takes_part_without_a_loop_until_one_attaches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a restart of the daemon alone: the anchor of the state is handed to the loop that comes."""
    model, optimizer = made()
    layout = FlatParameters(model, frozen=False).layout
    anchor = np.arange(layout.numel, dtype=np.float32)
    began = threading.Event()

    async def daemon(end: DaemonEnd) -> None:
        assert (await end.expect(Detached)).cause == "no training loop has attached"
        assert end.trainer.layout == layout
        await end.apply(anchor, 3, fresh=True)
        began.set()
        await end.expect(Restarted)
        await end.train(4, steps=1)
        assert (await end.contribution())[0].round == 4
        assert end.trainer.started.device == "cpu"

    with Ends(tmp_path, daemon, known=layout, wait_s=0.01):
        assert began.wait(10)
        with joining(tmp_path, monkeypatch, model, optimizer) as swarm:
            assert (swarm.round, flat(model).tolist()) == (3, anchor.tolist())
            learn(model, optimizer, 0)
            swarm.step(tokens=1)


def test_layout_in_a_folder_is_the_swarms_where_a_state_lies_beside_it_and_else_that_of_some_loop(
    tmp_path: Path,
) -> None:
    layout = FlatParameters(made()[0], frozen=False).layout
    assert known_layout(tmp_path) is None
    (tmp_path / LAYOUT).write_bytes(msgspec.json.encode(layout))
    assert known_layout(tmp_path) is None
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "3.safetensors").touch()
    assert known_layout(tmp_path) == layout
    (tmp_path / LAYOUT).write_bytes(msgspec.json.encode(layout)[:-1])
    assert known_layout(tmp_path) is None, "a loop brings its own: the node starts without"


def test_a_node_without_a_loop_for_long_is_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = made()

    async def daemon(end: DaemonEnd) -> None:
        initial = await end.initial()
        await end.apply(initial, 0, fresh=True)
        await end.train(1, steps=1)
        await end.expect(Detached)
        await end.apply(initial + np.float32(1), 1)
        while (await end.expect(Applied)).round != 1:  # nobody to wait for
            pass
        await end.wait(ends.abandoned)

    with Ends(tmp_path, daemon, timeout_s=1.0) as ends:
        with joining(tmp_path, monkeypatch, model, optimizer):
            assert not ends.abandoned.wait(1.5)  # a loop is there
        assert ends.abandoned.wait(10)


def test_what_cannot_be_trained_is_said_in_one_line(tmp_path: Path) -> None:
    model, optimizer = made()
    other, _ = made()
    with pytest.raises(ConfigError, match="holds none of the model's parameters"):
        join(other, optimizer, "swarm.toml", data_dir=tmp_path)
    with pytest.raises(ConfigError, match="nothing to train"):
        join(other.requires_grad_(False), optimizer, "swarm.toml", data_dir=tmp_path)
    half = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"'bias' is torch\.bfloat16") as caught:
        join(half, torch.optim.SGD(half.parameters(), lr=0.1), "swarm.toml", data_dir=tmp_path)
    assert [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)][1:] == ["join"]
    with pytest.raises(ConfigError, match="shoal init"):
        join(model, optimizer, tmp_path / "swarm.toml", data_dir=tmp_path).__enter__()


def manifest_in(folder: Path, chunk_values: int) -> None:
    tables = {
        "swarm": {"name": "loops", "founders": [Identity.from_seed(bytes(32)).peer_id]},
        "workload": {"name": "own-loop"},
        "sync": {"inner_steps": 2},
        "round": {"chunk_values": chunk_values},
    }
    (folder / "swarm.toml").write_text(render_manifest(validate_manifest(tables, source="the test's manifest")))


def test_running_means_travel_and_counters_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = torch.nn.BatchNorm1d(3)
    model = torch.nn.Sequential(norm, torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manifest_in(tmp_path, 4096)
    monkeypatch.chdir(tmp_path)
    vectors = []

    def running() -> np.ndarray:
        return np.concatenate([model.get_buffer(name).numpy() for name in ("0.running_mean", "0.running_var")])

    async def daemon(end: DaemonEnd) -> None:
        anchor = await end.initial()
        assert anchor[4096:].tolist() == [0, 0, 0, 1, 1, 1]
        await end.apply(anchor, 0, fresh=True)
        await end.train(1, steps=2)
        event, delta = await end.contribution()
        following = anchor - delta
        following[4096:] = delta[4096:] * np.float32(0.5)
        vectors.extend((delta, following))
        await end.apply(following, 1, taken=event.number)
        await end.send(Evaluate(round=1))
        assert (await end.expect(Evaluated)).value == float(following[4096:].sum())
        await end.send(Stop())

    evaluate = lambda model: float(running().sum())  # noqa: E731
    with (
        Ends(tmp_path, daemon, sync=SyncSettings(chunk_values=4096)),
        joining(tmp_path, monkeypatch, model, optimizer, evaluate=evaluate) as swarm,
    ):
        there, locals_ = True, []
        while there:
            learn(model, optimizer, len(locals_))
            locals_.append(running())
            there = swarm.step(tokens=8)
    assert np.array_equal(vectors[0][4096:], locals_[1])
    assert np.array_equal(running(), vectors[1][4096:])
    assert norm.num_batches_tracked is not None
    assert int(norm.num_batches_tracked) == len(locals_)


@pytest.mark.parametrize(
    "change",
    [
        {"numel": 4096 + 7},
        {"numel": 8192 + 6},
        {"buffers": ("0.running_var", "0.running_mean")},
        {"buffers": ("0.running_mean", "0.running_var", "1.weight")},
        {"buffers": ("elsewhere",)},
    ],
)
def test_a_layout_whose_buffers_do_not_begin_a_chunk_is_refused(change: dict[str, Any]) -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    layout = FlatParameters(model, chunk_values=4096).layout
    assert external_trainer._sound(layout, 4096)
    assert not external_trainer._sound(layout, 8192)
    assert not external_trainer._sound(msgspec.structs.replace(layout, **change), 4096)
