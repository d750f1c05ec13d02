"""The trainer beside a round: how many steps it makes before an anchor, whenever that comes, and how long it stands.

The real loop of the trainer, and the real replica; the orders come from a list that says at which step each is here.
"""

from __future__ import annotations

import os
import time
from collections import deque
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from shoal.node.pipe import ParentPipe, Pause, Resume, Stop
from shoal.node.training import inner_loop, shared_tensors
from shoal.node.training.flat_parameters import DeviceCopies
from shoal.node.training.inner_loop import Replica
from shoal.node.training.shared_tensors import Vector
from shoal.node.training.trainer_messages import (
    Applied,
    Apply,
    Assignment,
    Attach,
    Command,
    Contribution,
    Evaluate,
    Evaluated,
    Hurry,
    InnerSettings,
    Ping,
    Pong,
    Report,
    Retune,
    Snapshot,
    Start,
    SyncSettings,
    Train,
    Trained,
)
from shoal.node.training.trainer_process import TrainerProcess
from shoal.node.workloads.regression import RegressionWorkload

STEPS, TAU, LATE = 4, 3, 5
"""Of a round; that an anchor waits for; that are made beyond these before an anchor is waited for."""
SYNC = SyncSettings(chunk_values=16, fragments=2, overlap_steps=TAU, late_steps=LATE, mixing=0.5)


def new_replica(sync: SyncSettings | None = None) -> Replica:
    return Replica(RegressionWorkload(), seed=3, inner=InnerSettings(), device=torch.device("cpu"), sync=sync)


NUMEL = new_replica().layout.numel


pytestmark = pytest.mark.usefixtures("one_torch_thread")


class Orders(ParentPipe[Command]):
    """Orders, each with the step of the process at which it is here; asked to wait, the next comes, a second later."""

    def __init__(self, orders: list[tuple[int, Command]], clock: list[float]) -> None:
        self.orders, self.steps, self.clock = deque(orders), 0, clock
        self.reports: list[tuple[int, Report]] = []

    def send(self, report: Report) -> None:
        self.reports.append((self.steps, report))

    def receive(self) -> Command:
        if self._late:
            self.clock[0] += 1.0
        return self.orders.popleft()[1]

    def receive_nowait(self) -> Command | None:
        return None if self._late else self.orders.popleft()[1]

    @property
    def _late(self) -> bool:
        return self.steps < self.orders[0][0]

    def take_descriptor(self) -> int:
        """All anchors are one."""
        return shared_tensors.lend(anchor())

    def of(self, kind: type[Report]) -> list[int]:
        """At which step each report of this kind was made."""
        return [at for at, report in self.reports if isinstance(report, kind)]

    def contributions(self) -> list[Contribution]:
        return [report for _, report in self.reports if isinstance(report, Contribution)]


def share(round: int) -> Assignment:
    return Assignment(seed=3, round=round, member=0, members=1)


def train(round: int, *, contribute: bool = True, steps: int = STEPS) -> Train:
    return Train(round=round, steps=steps, assignment=share(round), contribute=contribute)


def live(orders: list[tuple[int, Command]], monkeypatch: pytest.MonkeyPatch) -> tuple[Orders, Vector]:
    """Carry out the orders, from S(0) and the order for round 1 on, to the last; what was contributed last."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    step = Replica.step

    def count(replica: Replica, out: Vector) -> Report | None:
        control.steps += 1
        return step(replica, out)

    monkeypatch.setattr(Replica, "step", count)
    memory = shared_tensors.open_memory()
    try:
        out = shared_tensors.create(memory, NUMEL)
        start = Start(
            workload="regression",
            options={},
            data=None,
            seed=3,
            inner=InnerSettings(),
            sync=SYNC,
            device="cpu",
            threads=1,
            contributions=0,
        )
        first = [start, Attach(numel=NUMEL), Apply(round=0, fresh=True), train(1)]
        control = Orders([*((0, order) for order in first), *orders, (orders[-1][0] + 20, Stop())], clock)
        TrainerProcess(control, memory, import_s=0.0).run()
        return control, out.copy()
    finally:
        os.close(memory)


class SlowCopies:
    """In place of `DeviceCopies.to_host`: a copy is there so many steps after it began, or when it is waited for."""

    def __init__(self, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps, self.made = steps, 0
        monkeypatch.setattr(DeviceCopies, "to_host", lambda copies, values: SlowCopy(self, values))
        step = Replica.step

        def counting(replica: Replica, out: Vector) -> Report | None:
            self.made += 1
            return step(replica, out)

        monkeypatch.setattr(Replica, "step", counting)


class SlowCopy:
    def __init__(self, copies: SlowCopies, values: torch.Tensor) -> None:
        self._copies, self._values, self._at = copies, values, copies.made + copies.steps
        self._bytes = values.numpy().tobytes()

    @property
    def here(self) -> bool:
        return self._copies.made >= self._at

    def wait(self) -> torch.Tensor:
        self._at = 0
        assert self._values.numpy().tobytes() == self._bytes  # nobody has changed them on their way
        return self._values


def anchor() -> Vector:
    return np.random.default_rng(1).standard_normal(NUMEL).astype(np.float32)


def plainly(
    steps_before_the_anchor: int,
    *,
    amended: Retune | None = None,
    early: bool = False,
    steps: int = STEPS,
) -> Vector:
    """The contribution to round 2 of a replica that is given the anchor after so many steps of overlap.

    amended: the settings from round 2 on; `early`: they take effect before the steps of overlap already.
    """
    replica = new_replica(SYNC)
    out = np.zeros(NUMEL, np.float32)
    replica.apply(anchor(), round=0, fresh=True)
    replica.begin(train(1))
    while not isinstance(replica.step(out), Contribution):
        pass
    if amended is not None and early:
        replica.retune(amended.inner, amended.sync)
    for _ in range(steps_before_the_anchor):
        replica.step(out)
    replica.apply(anchor(), round=1, taken=1)
    if amended is not None and not early:
        replica.retune(amended.inner, amended.sync)
    replica.begin(train(2, steps=steps))
    while not isinstance(replica.step(out), Contribution):
        pass
    return out


@pytest.mark.parametrize("here_at", [STEPS, STEPS + 1, STEPS + TAU])
def test_anchor_is_applied_after_exactly_the_steps_of_overlap(here_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, early and just in time: the same history to the bit. What is ordered with it waits with it."""
    after = [(here_at, order) for order in (Apply(round=1, taken=1), Evaluate(round=1), train(2))]
    control, contributed = live(after, monkeypatch)
    assert control.of(Applied) == [0, STEPS + TAU]
    assert control.of(Evaluated) == [STEPS + TAU]
    assert control.of(Contribution) == [STEPS, 2 * STEPS]
    np.testing.assert_array_equal(contributed, plainly(TAU))
    assert not np.array_equal(contributed, plainly(TAU - 1))
    assert [(made.steps, made.blocked_s, made.wall_s) for made in control.contributions()] == [(STEPS, 0, 0)] * 2


@pytest.mark.parametrize("late", [1, 2, LATE, LATE + 1, LATE + 10])
def test_late_anchor_is_not_waited_for_until_the_steps_for_it_are_made(
    late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps that are made meanwhile count towards the next contribution, which has one of its own at least."""
    here_at = STEPS + TAU + late
    after = [(here_at, order) for order in (Apply(round=1, taken=1), Evaluate(round=1), train(2))]
    control, contributed = live(after, monkeypatch)
    beside = TAU + min(late, LATE)
    assert control.of(Applied) == [0, STEPS + beside]
    assert control.of(Evaluated) == [STEPS + beside]
    made = max(STEPS, beside + 1)
    assert control.of(Contribution) == [STEPS, STEPS + made]
    np.testing.assert_array_equal(contributed, plainly(beside))
    assert not np.array_equal(contributed, plainly(beside - 1))
    first, second = control.contributions()
    assert (first.steps, second.steps) == (STEPS, made)
    # Orders that are not here while it waits come a second apart; once the anchor is here, nothing is blocked.
    waits = here_at > STEPS + TAU + LATE
    assert (first.blocked_s, second.blocked_s) == (0, 1.0 if waits else 0)
    assert second.wall_s == (3.0 if waits else 0)


def test_without_steps_of_overlap_an_anchor_is_waited_for_at_once() -> None:
    replica = new_replica(SyncSettings(chunk_values=16))
    out = np.zeros(NUMEL, np.float32)
    replica.apply(anchor(), round=0, fresh=True)
    replica.begin(train(1))
    for _ in range(STEPS):
        assert replica.training
        replica.step(out)
    assert (replica.training, replica.waiting) == (False, True)


@pytest.mark.parametrize("copy_steps", [0, 1, TAU - 1, TAU, TAU + 1])
def test_contribution_that_is_still_on_the_device_is_reported_when_it_is_here(
    copy_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the step in which it arrived, after the steps of overlap at the latest; the values are the mark's."""
    SlowCopies(copy_steps, monkeypatch)
    late = STEPS + TAU + LATE + 10
    control, contributed = live([(late, Apply(round=1, taken=1)), (late, train(2))], monkeypatch)
    until_here = min(copy_steps, TAU)
    assert control.of(Contribution) == [STEPS + until_here, STEPS + TAU + LATE + 1 + until_here]
    first, second = control.contributions()
    assert (first.steps, second.steps) == (STEPS, TAU + LATE + 1)
    assert second.blocked_s == 1.0  # a wait for the device is none for the swarm
    monkeypatch.undo()
    np.testing.assert_array_equal(contributed, plainly(TAU + LATE))


@pytest.mark.parametrize(
    "order",
    [
        Pause(),
        Ping(),
        Apply(round=0, fresh=True),
        Evaluate(round=0),
        train(1, contribute=False),
        Retune(inner=InnerSettings(), sync=SYNC),
        Snapshot(round=1, path="nowhere"),
    ],
    ids=lambda order: type(order).__name__,
)
def test_contribution_on_its_way_is_reported_before_an_order_is_followed(
    order: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(order, Snapshot):  # which may be written when the loop is over
        order = msgspec.structs.replace(order, path=str(tmp_path / order.path))
    SlowCopies(100, monkeypatch)
    control, contributed = live([(STEPS + 1, order)], monkeypatch)
    kinds = [(at, type(report)) for at, report in control.reports if at > STEPS]
    assert kinds[0] == (STEPS + 1, Contribution)
    monkeypatch.undo()
    replica, out = new_replica(SYNC), np.zeros(NUMEL, np.float32)
    replica.apply(anchor(), round=0, fresh=True)
    replica.begin(train(1))
    while not isinstance(replica.step(out), Contribution):
        pass
    np.testing.assert_array_equal(contributed, out)


def test_contribution_is_reported_although_the_data_ends_in_the_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    SlowCopies(100, monkeypatch)
    monkeypatch.setattr(
        inner_loop, "batches_from", lambda workload, share, drawn: (islice(workload.batches(share), STEPS + 1), drawn)
    )
    late = STEPS + TAU + 10
    control, _ = live([(late, Apply(round=1, taken=1))], monkeypatch)
    assert control.of(Contribution) == [STEPS + 2]


AMENDED = {
    "learning rate": Retune(inner=InnerSettings(lr=0.05), sync=SYNC),
    "weight decay": Retune(inner=InnerSettings(weight_decay=20.0), sync=SYNC),
    "mixing": Retune(inner=InnerSettings(), sync=msgspec.structs.replace(SYNC, mixing=0.1)),
    "steps of overlap": Retune(inner=InnerSettings(), sync=msgspec.structs.replace(SYNC, overlap_steps=1)),
}


@pytest.mark.parametrize("what", AMENDED)
@pytest.mark.parametrize("here_at", [STEPS, STEPS + 1, STEPS + TAU, STEPS + TAU + 2, STEPS + TAU + LATE + 10])
def test_amended_settings_take_effect_after_the_anchor_however_early_they_are_here(
    what: str, here_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps beside the round, and the anchor of the round that amended, are by the settings of before."""
    amended, steps = AMENDED[what], STEPS + 2
    orders = [Apply(round=1, taken=1), Evaluate(round=1), amended, train(2, steps=steps)]
    control, contributed = live([(here_at, order) for order in orders], monkeypatch)
    beside = min(max(here_at - STEPS, TAU), TAU + LATE)
    assert control.of(Applied) == [0, STEPS + beside]
    assert control.of(Contribution) == [STEPS, STEPS + max(beside + 1, steps)]
    np.testing.assert_array_equal(contributed, plainly(beside, amended=amended, steps=steps))
    if here_at <= STEPS + TAU:
        overlap = amended.sync.overlap_steps
        assert not np.array_equal(contributed, plainly(overlap, amended=amended, steps=steps, early=True))


def test_questions_are_answered_before_the_overlap_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[tuple[int, Command]] = [(STEPS, Apply(round=1, taken=1)), (STEPS + 1, Ping()), (STEPS + 1, train(2))]
    control, contributed = live(orders, monkeypatch)
    assert control.of(Pong) == [STEPS + 1]
    assert control.of(Applied) == [0, STEPS + TAU]
    np.testing.assert_array_equal(contributed, plainly(TAU))


@pytest.mark.parametrize("ends", [[Hurry()], [Pause(), Resume()]])
def test_overlap_is_cut_short_by_a_pause_and_by_the_next_round(
    ends: list[Command], monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: list[tuple[int, Command]] = [(STEPS, Apply(round=1, taken=1)), (STEPS + 1, train(2))]
    control, contributed = live([*orders, *((STEPS + 1, order) for order in ends)], monkeypatch)
    assert control.of(Applied) == [0, STEPS + 1]
    np.testing.assert_array_equal(contributed, plainly(1))


@pytest.mark.parametrize("paused_at", [STEPS, STEPS + TAU, STEPS + TAU + LATE])
def test_paused_trainer_is_not_blocked(paused_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the pause nor what it has nothing to do in is waiting for the network."""
    late = STEPS + TAU + LATE + 100
    after = [(late, Apply(round=1, taken=1)), (late, Resume()), (late, train(2))]
    control, _ = live([(paused_at, Pause()), *after], monkeypatch)
    assert [made.blocked_s for made in control.contributions()] == [0, 0]


def test_training_on_without_a_quorum_is_no_waiting_and_counts_towards_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end = STEPS + TAU + 6
    orders: list[tuple[int, Command]] = [
        (STEPS + 1, train(1, contribute=False, steps=8)),
        (end, Apply(round=1, taken=1)),
        (end, train(2)),
    ]
    control, _ = live(orders, monkeypatch)
    assert control.of(Trained) == [STEPS + 1 + 8]
    assert control.of(Applied) == [0, STEPS + 1 + 8]
    assert control.of(Contribution) == [STEPS, STEPS + 1 + 8 + 1]  # they were made: one more at least
    assert control.contributions()[1].steps == 10


def test_memory_of_the_shared_vectors_holds_the_fragment_first(monkeypatch: pytest.MonkeyPatch) -> None:
    late = STEPS + TAU + LATE + 1
    control, contributed = live([(late, Apply(round=1, taken=1)), (late, train(2))], monkeypatch)
    assert len(control.contributions()) == 2
    fragment = sum(min(16, NUMEL - at) for at in range(0, NUMEL, 32))
    assert contributed[:fragment].any()
