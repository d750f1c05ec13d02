"""A user's own loop that streams: fragments in turn, steps of overlap, mixing, and settings amended on the way."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from shoal.node import own_loop
from shoal.node.loops.external_trainer import Detached
from shoal.node.pipe import Stop
from shoal.node.training.accounts import Accounts
from shoal.node.training.trainer_messages import InnerSettings, Retune, SyncSettings
from tests.node.loop_ends import DEADLINE_S, DaemonEnd, Ends, flat, joining

CHUNK_VALUES = 4096
WIDTH = 70
SLOW = SyncSettings(chunk_values=CHUNK_VALUES, fragments=2, overlap_steps=1, mixing=0.5)
FAST = SyncSettings(chunk_values=CHUNK_VALUES, fragments=2, overlap_steps=2, mixing=0.25)
STEPS = 2
TOKENS = 10
STEPS_IN_ALL = 11
CONTRIBUTED = (2, 4, 6, 9)
"""After which of them there is a contribution."""

F32 = np.ndarray
FRAGMENTS = (slice(0, CHUNK_VALUES), slice(CHUNK_VALUES, None))
"""Of a model of two chunks: round e is of fragment e mod 2."""


def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = torch.nn.Linear(WIDTH, WIDTH)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def learn(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))
    torch.nn.functional.mse_loss(model(x), x.roll(1, dims=1)).backward()
    optimizer.step()
    optimizer.zero_grad()


def mixed(local: F32, anchor: F32, round: int, alpha: float) -> F32:
    """What a node stands on after the anchor of a round whose contribution was taken."""
    here, after = FRAGMENTS[round % 2], local.copy()
    after[here] = np.float32(alpha) * local[here] + np.float32(1 - alpha) * anchor[here]
    return after


def test_overlap_and_mixing_change_with_the_order_that_amends_them_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two steps a round one overlaps; from round 3 on both do, and less of a node's own values is kept."""
    model, optimizer = made()
    anchors: list[F32] = []
    deltas: list[F32] = []
    tokens: list[int] = []

    async def daemon(end: DaemonEnd) -> None:
        anchors.append(await end.initial())
        await end.apply(anchors[0], 0, fresh=True)
        for round in (1, 2, 3, 4):
            if round == 3:
                await end.send(Retune(inner=InnerSettings(), sync=FAST))
            await end.train(round, steps=STEPS)
            ordered[round].set()
            event, delta = await end.contribution()
            here = FRAGMENTS[round % 2]
            deltas.append(delta[: anchors[-1][here].size])
            tokens.append(event.tokens)
            anchor = anchors[-1].copy()
            anchor[here] -= np.float32(0.7) * deltas[-1]
            anchors.append(anchor)
            await end.apply(anchor, round, taken=event.number)
        await end.train(5, steps=100)
        ordered[5].set()
        await end.wait(over)

    locals_, stood, over = [], [], threading.Event()
    ordered = {round: threading.Event() for round in range(1, 6)}
    with Ends(tmp_path, daemon, sync=SLOW), joining(tmp_path, monkeypatch, model, optimizer) as swarm:
        for number in range(STEPS_IN_ALL):
            learn(model, optimizer, number)
            locals_.append(flat(model))
            assert swarm.step(tokens=TOKENS)
            stood.append(flat(model))
            if number + 1 in CONTRIBUTED:  # what is ordered next is here before the steps of overlap are made
                assert ordered[CONTRIBUTED.index(number + 1) + 2].wait(DEADLINE_S)
        over.set()

    # Contributions after steps 2, 4, 6 and 9: two steps after the one before, and one at least beyond the overlap.
    for round, step in enumerate(CONTRIBUTED, start=1):
        here = FRAGMENTS[round % 2]
        assert np.array_equal(deltas[round - 1], (anchors[round - 1] - locals_[step - 1])[here]), round
    # Each anchor after its steps of overlap: one under the settings of the start, two under the others.
    applied = {3: (1, 0.5), 5: (2, 0.5), 8: (3, 0.25), 11: (4, 0.25)}
    for step in range(1, STEPS_IN_ALL + 1):
        local = locals_[step - 1]
        expected = mixed(local, anchors[applied[step][0]], *applied[step]) if step in applied else local
        np.testing.assert_allclose(stood[step - 1], expected, rtol=0, atol=1e-7, err_msg=f"step {step}")
        moved = np.abs(stood[step - 1] - local).max()
        assert (moved > 1e-3) == (step in applied), step
    # A token was trained on by both fragments, and each contributes its half of it: since its own last contribution.
    assert tokens == [TOKENS, 2 * TOKENS, 2 * TOKENS, 5 * TOKENS // 2]


def test_late_anchor_is_not_waited_for_until_the_steps_for_it_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the round one step of overlap is made, and three for a late anchor."""
    model, optimizer = made()
    anchors: list[F32] = []
    late, over = threading.Event(), threading.Event()

    async def daemon(end: DaemonEnd) -> None:
        anchors.append(await end.initial())
        await end.apply(anchors[0], 0, fresh=True)
        await end.train(1, steps=STEPS)
        event, _ = await end.contribution()
        await end.wait(late)
        anchors.append(anchors[0].copy())
        anchors[1][FRAGMENTS[1]] += np.float32(1)
        await end.apply(anchors[1], 1, taken=event.number)
        await end.train(2, steps=100)
        await end.wait(over)

    sync = msgspec.structs.replace(SLOW, late_steps=3)
    with Ends(tmp_path, daemon, sync=sync), joining(tmp_path, monkeypatch, model, optimizer) as swarm:
        for number in range(STEPS + 4):
            learn(model, optimizer, number)
            local = flat(model)
            if number + 1 == STEPS + 4:
                late.set()
            assert swarm.step(tokens=TOKENS)  # which waits in the last of these only
            expected = mixed(local, anchors[1], 1, 0.5) if number + 1 == STEPS + 4 else local
            np.testing.assert_allclose(flat(model), expected, rtol=0, atol=1e-6, err_msg=f"step {number + 1}")
        assert swarm.round == 1
        over.set()


def test_the_last_anchor_is_taken_though_the_daemon_has_left_before_the_overlap_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = made()
    anchors: list[F32] = []

    async def daemon(end: DaemonEnd) -> None:
        anchors.append(await end.initial())
        await end.apply(anchors[0], 0, fresh=True)
        await end.train(1, steps=STEPS)
        event, _ = await end.contribution()
        anchors.append(anchors[0] + np.float32(1))
        await end.apply(anchors[1], 1, taken=event.number)
        await end.send(Stop())

    with Ends(tmp_path, daemon, sync=FAST), joining(tmp_path, monkeypatch, model, optimizer) as swarm:
        for number in range(STEPS):
            learn(model, optimizer, number)
            assert swarm.step(tokens=TOKENS)
        client = swarm._client
        assert client is not None
        assert client._gone.wait(DEADLINE_S)
        learn(model, optimizer, STEPS)
        local = flat(model)
        assert not swarm.step(tokens=TOKENS)  # one step of overlap, of two
        assert (swarm.round, swarm.over) == (1, True)
    expected = mixed(local, anchors[1], 1, 0.25)
    expected[FRAGMENTS[0]] = (local - anchors[0] + anchors[1])[FRAGMENTS[0]]  # that fragment's anchor changed as well
    np.testing.assert_allclose(flat(model), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("more", [0, 1])
def test_loop_that_ends_while_its_contribution_waits_is_told_that_it_is_in_no_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, more: int
) -> None:
    model, optimizer = made()

    async def daemon(end: DaemonEnd) -> None:
        await end.apply(await end.initial(), 0, fresh=True)
        await end.train(1, steps=STEPS)
        await end.contribution()
        await end.expect(Detached)

    with Ends(tmp_path, daemon, sync=FAST), joining(tmp_path, monkeypatch, model, optimizer) as swarm:
        for number in range(STEPS + more):
            learn(model, optimizer, number)
            assert swarm.step(tokens=TOKENS)
    told = own_loop.NOT_CERTIFIED % f"{STEPS + more} steps"
    assert [record.getMessage() for record in caplog.records if "at_anchor()" in record.getMessage()] == [told]


def test_loop_that_ran_out_of_memory_in_an_anchor_shares_nothing_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its user may go on with a smaller batch, but half of an anchor is nothing to contribute from."""
    model, optimizer = made()
    apply = Accounts.apply

    def fail(accounts: Accounts, anchor: F32, *, round: int, taken: int, fresh: bool) -> None:
        if round == 1:
            raise torch.OutOfMemoryError("planted")
        apply(accounts, anchor, round=round, taken=taken, fresh=fresh)

    monkeypatch.setattr(Accounts, "apply", fail)

    async def daemon(end: DaemonEnd) -> None:
        anchor = await end.initial()
        await end.apply(anchor, 0, fresh=True)
        await end.train(1, steps=STEPS)
        event, _ = await end.contribution()
        await end.apply(anchor, 1, taken=event.number)

    with Ends(tmp_path, daemon, sync=FAST), joining(tmp_path, monkeypatch, model, optimizer) as swarm:

        def go_on() -> None:
            for number in range(STEPS + 100):
                learn(model, optimizer, number)
                assert swarm.step(tokens=TOKENS)

        with pytest.raises(torch.OutOfMemoryError, match="planted"):
            go_on()
        assert not swarm.active
        learn(model, optimizer, 0)
        assert not swarm.step(tokens=TOKENS)
