"""The inner loop's arithmetic, and its accounts: progress is kept, and counted once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import blake3
import msgpack  # type: ignore[import-untyped]
import msgspec
import numpy as np
import pytest
import torch

from shoal.collectives.schedule import learning_rate
from shoal.node.training.devices import pick_device
from shoal.node.training.flat_parameters import FlatParameters
from shoal.node.training.inner_loop import NONFINITE_LIMIT_STEPS, Replica
from shoal.node.training.inner_state import SavedInner, Snapshotter
from shoal.node.training.shared_tensors import Vector
from shoal.node.training.trainer_messages import Assignment, Contribution, InnerSettings, Train, Trained
from shoal.node.workload import Workload
from shoal.node.workloads.regression import Batch, RegressionWorkload
from shoal.node.workloads.text import TextWorkload
from shoal.protocol.errors import ConfigError, LocalError
from tests.node.normed import HIDDEN, Normed

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("one_torch_thread")


def new_replica(workload: Workload | None = None, *, contributions: int = 0) -> Replica:
    return Replica(
        workload or RegressionWorkload(), seed=3, inner=InnerSettings(), device=CPU, contributions=contributions
    )


def started(workload: Workload | None = None) -> tuple[Replica, Vector, Vector]:
    """Return a replica that stands on S(0), with the anchor and contribution vectors."""
    replica = new_replica(workload)
    anchor = np.zeros(replica.layout.numel, dtype=np.float32)
    replica.write_initial(anchor)
    replica.apply(anchor)
    return replica, anchor, np.zeros_like(anchor)


def local(replica: Replica) -> Vector:
    """The live parameters, flattened by the rule of the layout and independently of it."""
    named = dict(replica.model.named_parameters())
    pieces = [named[name].detach().numpy().ravel() for name in sorted(named)]
    return np.concatenate(pieces)


class Loose(RegressionWorkload):
    """Returns of loss() what it is told to; has three batches."""

    returned: object = None

    def loss(self, model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
        loss, samples = super().loss(model, batch)
        return {"loss": loss, "vector": (batch[1], samples), "list": [loss, samples], "less": (loss, -3)}.get(  # type: ignore[return-value]
            str(self.returned), (loss, samples)
        )

    def evaluate(self, model: torch.nn.Module) -> float:
        values = {"text": "1.5", "table": {"loss": 1.5}, "nothing": None, "values": torch.ones(2)}
        return values.get(str(self.returned), math.nan)  # type: ignore[return-value]

    def batches(self, assignment: Assignment) -> Iterator[Batch]:
        return islice(super().batches(assignment), 3)


@pytest.mark.parametrize(
    ("returned", "told"), [("loss", "Tensor"), ("vector", "Tensor and 32"), ("list", "list"), ("less", "Tensor and -3")]
)
def test_loss_that_returns_something_else_is_told_what_to_return(returned: str, told: str) -> None:
    workload = Loose()
    replica, _, out = started(workload)
    workload.returned = returned
    with pytest.raises(ConfigError) as caught:
        train(replica, out)
    assert str(caught.value) == (
        f"Loose.loss() returned {told}; correct it, to return the mean loss, a tensor of one value, "
        "and how many tokens or samples it weighs"
    )


@pytest.mark.parametrize(
    ("returned", "told"), [("text", "str"), ("table", "dict"), ("nothing", "NoneType"), ("values", "Tensor")]
)
def test_evaluation_that_returns_no_number_is_told_what_to_return(returned: str, told: str) -> None:
    workload = Loose()
    replica, _, _ = started(workload)
    workload.returned = returned
    with pytest.raises(ConfigError) as caught:
        replica.evaluate()
    assert str(caught.value) == f"Loose.evaluate() returned {told}; correct it, to return one number"


@pytest.mark.parametrize("value", [1.5, np.float32(1.5), np.array(1.5), torch.tensor(1.5), torch.tensor([1.5])])
def test_any_single_number_is_a_value(value: object) -> None:
    class Evaluated(RegressionWorkload):
        def evaluate(self, model: torch.nn.Module) -> float:
            return value  # type: ignore[return-value]

    replica, _, _ = started(Evaluated())
    assert replica.evaluate() == 1.5


def test_batches_that_end_are_told_of_once_and_a_loss_that_is_none(caplog: pytest.LogCaptureFixture) -> None:
    replica, _, out = started(Loose())
    for round_ in (1, 1, 1):
        train(replica, out, steps=2, round_=round_)
    assert math.isnan(replica.evaluate())
    (ended, evaluated) = caplog.messages
    assert evaluated == "evaluate() returned nan, which is no loss: correct it, or lower the learning rate"
    assert ended == ("batches() ended after 3, and begins anew: it should not end by itself")


class InOrder(RegressionWorkload):
    """Reads the same data from their beginning in every round, or by the round's share."""

    def __init__(self, by_round: bool) -> None:
        super().__init__()
        self.by_round = by_round

    def batches(self, assignment: Assignment) -> Iterator[Batch]:
        share = msgspec.structs.replace(assignment, round=assignment.round if self.by_round else 0)
        return super().batches(share)


@pytest.mark.parametrize("by_round", [False, True])
def test_rounds_that_begin_with_the_same_batch_are_told_of_once(
    caplog: pytest.LogCaptureFixture, by_round: bool
) -> None:
    replica, anchor, out = started(InOrder(by_round))
    for round_ in (1, 1, 2, 3):
        contribute(replica, out, steps=2, round_=round_)
        replica.apply(anchor)
    told = (
        "round 2 begins with the same batch as the round before: batches() is called once a round, so let what it "
        "yields depend on assignment.round or assignment.stream_seed, or most of the data is never read"
    )
    assert caplog.messages == ([] if by_round else [told])


def train(
    replica: Replica, out: Vector, *, steps: int = 4, round_: int = 1, contribute: bool = True
) -> Contribution | Trained:
    share = Assignment(seed=3, round=round_, member=0, members=1)
    replica.begin(Train(round=round_, steps=steps, assignment=share, contribute=contribute))
    while True:
        report = replica.step(out)
        if isinstance(report, Contribution | Trained):
            return report


def contribute(replica: Replica, out: Vector, *, steps: int = 4, round_: int = 1) -> Contribution:
    report = train(replica, out, steps=steps, round_=round_)
    assert isinstance(report, Contribution)
    return report


class Tied(torch.nn.Module):
    """A model with a tied weight, a frozen one, a buffer of whole numbers and an integer parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.z_in = torch.nn.Embedding(5, 3)
        self.out = torch.nn.Linear(3, 5)
        self.out.weight = self.z_in.weight
        self.scale = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        self.count = torch.nn.Parameter(torch.zeros(4, dtype=torch.int64), requires_grad=False)
        self.register_buffer("mean", torch.zeros(7, dtype=torch.int64))


class TiedWorkload(RegressionWorkload):
    def build(self) -> torch.nn.Module:
        return Tied()


class HalfWorkload(RegressionWorkload):
    def build(self) -> torch.nn.Module:
        return super().build().to(torch.bfloat16)


@dataclass(frozen=True)
class BrokenLoss(RegressionWorkload):
    """The loss is not a number in the first `broken` steps of the process."""

    broken: int = 0
    calls: tuple[int, ...] = ()

    def loss(self, model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
        loss, tokens = super().loss(model, batch)
        object.__setattr__(self, "calls", (*self.calls, 1))
        return (loss * math.nan if len(self.calls) <= self.broken else loss), tokens


class ThreeBatches(RegressionWorkload):
    def batches(self, assignment: Assignment) -> Iterator[Batch]:
        for _, batch in zip(range(3), super().batches(assignment), strict=False):
            yield batch


def test_a_text_models_training_loss_is_in_bits_per_byte_as_its_held_out_loss_is() -> None:
    replica, _, out = started(TextWorkload(width=16, layers=1, heads=1, context=16, batch=2))
    report = contribute(replica, out, steps=1)
    assert report.loss == pytest.approx(replica.evaluate(), abs=1e-4) == pytest.approx(8.0, abs=1e-4)


def test_layout_is_sorted_and_lists_tied_weights_once() -> None:
    layout = new_replica(TiedWorkload()).layout
    assert layout.names == ("out.bias", "scale", "z_in.weight")
    assert layout.shapes == ((5,), (2,), (5, 3))
    assert layout.numel == 22
    packed = msgpack.packb([["out.bias", "scale", "z_in.weight"], [[5], [2], [5, 3]]])
    assert layout.digest == blake3.blake3(packed).digest()
    written = b'{"names":["out.bias","scale","z_in.weight"],"shapes":[[5],[2],[5,3]],"numel":22}'
    assert msgspec.json.encode(layout) == written  # what does not travel leaves no trace


RUNNING = ("0.running_mean", "0.running_var", "4.running_mean", "4.running_var")


def running(replica: Replica) -> Vector:
    return np.concatenate([replica.model.get_buffer(name).numpy().ravel() for name in RUNNING])


def test_buffers_begin_a_chunk_behind_the_parameters() -> None:
    layout = new_replica(Normed()).layout
    parameters = sum(value.numel() for value in Normed().build().parameters())
    assert layout.buffers == RUNNING
    assert layout.names == tuple(sorted(layout.names))
    assert layout.buffers_begin == 262_144 > parameters
    assert layout.numel == layout.buffers_begin + 2 * 16 + 2 * HIDDEN
    places = layout.places()
    assert (places["0.bias"].start, places["5.weight"].stop) == (0, parameters)
    assert (places["0.running_mean"].start, places["4.running_var"].stop) == (262_144, layout.numel)
    packed = msgpack.packb([list(layout.names), [list(shape) for shape in layout.shapes], list(RUNNING)])
    assert layout.digest == blake3.blake3(packed).digest()


def test_buffers_are_contributed_as_they_are_and_every_anchor_replaces_them() -> None:
    replica, anchor, out = started(Normed())
    buffers = slice(replica.layout.buffers_begin, None)
    as_built = running(replica)
    assert np.array_equal(anchor[buffers], as_built)
    contribute(replica, out)
    learnt = running(replica)
    assert (learnt != as_built).all()
    assert np.array_equal(out[buffers], learnt)
    train(replica, out, contribute=False)  # beyond the contribution
    anchor[buffers] = learnt * np.float32(0.5)
    replica.apply(anchor, round=1, taken=1)
    assert np.array_equal(running(replica), anchor[buffers])
    train(replica, out, contribute=False)
    replica.apply(anchor, round=2, taken=1)  # nothing of it was contributed: parameters are kept, buffers are not
    assert np.array_equal(running(replica), anchor[buffers])
    replica.apply(anchor, round=3, fresh=True)
    assert np.array_equal(running(replica), anchor[buffers])


def test_a_restart_stands_on_the_anchors_buffers_and_counts_on(tmp_path: Path) -> None:
    replica, anchor, out = started(Normed())
    buffers = slice(replica.layout.buffers_begin, None)
    contribute(replica, out)
    train(replica, out, contribute=False)
    state = replica.inner_state(1)
    names = {name for name, _ in state.tensors}
    assert {name for name in names if name.startswith("buffer.")} == {
        "buffer.0.num_batches_tracked",
        "buffer.2.calls",
        "buffer.4.num_batches_tracked",
    }
    assert "kept" in names  # the steps after the contribution
    assert not Snapshotter().take(state, tmp_path / "trainer").write().failure
    calls = int(replica.model.get_buffer("2.calls"))
    again = new_replica(Normed())
    again.restore(SavedInner(tmp_path / "trainer"), exact=True)
    anchor[buffers] = 2.5
    again.apply(anchor, round=1)
    assert np.array_equal(running(again), anchor[buffers])
    assert (local(again) != local(new_replica(Normed()))).any()
    assert int(again.model.get_buffer("2.calls")) == calls > 0


def test_buffers_that_cannot_travel_are_the_users_to_mend() -> None:
    model = torch.nn.Linear(2, 2)
    model.register_buffer("mask", torch.full((2, 2), -math.inf))
    with pytest.raises(ConfigError, match=r"buffer 'mask' .* make it persistent=False where it is registered"):
        FlatParameters(model)
    model.register_buffer("mask", torch.full((2, 2), -math.inf), persistent=False)
    assert FlatParameters(model).layout.buffers == ()


def test_buffers_that_were_assigned_or_are_of_another_type_are_found() -> None:
    model = torch.nn.Linear(2, 1)
    model.register_buffer("scale", torch.ones(3, dtype=torch.float64))
    flat = FlatParameters(model, chunk_values=4)
    assert (flat.layout.buffers_begin, flat.layout.numel) == (4, 7)
    model.scale = torch.full((3,), 0.5, dtype=torch.float64)
    vector = torch.full((7,), 9.0)
    assert flat.gather(vector)[3:].tolist() == [0, 0.5, 0.5, 0.5]
    assert flat.copy_out([slice(2, 6)]).wait()[1:].tolist() == [0, 0.5, 0.5]
    flat.update([slice(4, 7)], lambda values: values + 1)
    assert model.scale.tolist() == [1.5] * 3
    model.scale = model.scale.clone()
    flat.scatter(torch.zeros(7))
    assert model.scale.tolist() == [0] * 3


def test_tied_weights_stay_tied_through_an_anchor() -> None:
    replica, anchor, _ = started(TiedWorkload())
    moved = anchor + np.arange(len(anchor), dtype=np.float32)
    replica.apply(moved, round=1, fresh=True)
    tied = replica.model.get_parameter("out.weight")
    assert tied is replica.model.get_parameter("z_in.weight")
    np.testing.assert_array_equal(tied.detach().numpy().ravel(), moved[-15:])


def test_half_precision_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match="autocast"):
        new_replica(HalfWorkload())


def test_contribution_is_base_minus_local() -> None:
    replica, anchor, out = started()
    report = contribute(replica, out)
    assert (report.number, report.steps, report.tokens) == (1, 4, 4 * 32)
    np.testing.assert_array_equal(out, anchor - local(replica))
    assert np.abs(out).max() > 1e-3


def test_contribution_is_bitwise_reproducible() -> None:
    runs = []
    for _ in range(2):
        replica, _, out = started()
        contribute(replica, out)
        runs.append(out.tobytes())
    assert runs[0] == runs[1]


def test_inner_step_is_adamw() -> None:
    replica, anchor, out = started()
    contribute(replica, out, steps=1)
    # The first AdamW step is lr·sign(gradient), after decay by lr·weight_decay.
    settings = InnerSettings()
    moved = np.abs(anchor * (1 - settings.lr * settings.weight_decay) - local(replica))
    np.testing.assert_allclose(moved, settings.lr, rtol=1e-3)


def test_apply_keeps_steps_made_after_the_contribution_taken() -> None:
    replica, anchor, out = started()
    report = contribute(replica, out)
    at_contribution = local(replica)
    train(replica, out, steps=2, contribute=False)
    extra = local(replica) - at_contribution
    new_anchor = anchor + np.float32(1)
    replica.apply(new_anchor, taken=report.number)
    np.testing.assert_array_equal(local(replica), extra + new_anchor)
    after = contribute(replica, out, steps=1, round_=2)
    assert after.tokens == 3 * 32
    np.testing.assert_array_equal(out, new_anchor - local(replica))


def test_apply_without_taking_keeps_all_progress() -> None:
    replica, anchor, out = started()
    contribute(replica, out)
    progress = local(replica) - anchor
    new_anchor = anchor + np.float32(1)
    replica.apply(new_anchor, taken=0)
    np.testing.assert_array_equal(local(replica), progress + new_anchor)
    assert contribute(replica, out, steps=1, round_=2).tokens == 5 * 32


def test_apply_of_a_taken_contribution_leaves_exactly_the_anchor() -> None:
    replica, anchor, out = started()
    report = contribute(replica, out)
    new_anchor = anchor + np.float32(1)
    replica.apply(new_anchor, taken=report.number)
    np.testing.assert_array_equal(local(replica), new_anchor)


def test_fresh_apply_drops_local_progress() -> None:
    replica, anchor, out = started()
    contribute(replica, out)
    replica.apply(anchor, fresh=True)
    np.testing.assert_array_equal(local(replica), anchor)
    assert contribute(replica, out, steps=1, round_=2).tokens == 32


def test_later_contribution_replaces_the_earlier() -> None:
    replica, anchor, out = started()
    contribute(replica, out)
    second = contribute(replica, out)
    assert (second.number, second.steps, second.tokens) == (2, 4, 8 * 32)
    np.testing.assert_array_equal(out, anchor - local(replica))


def test_apply_refuses_a_contribution_that_was_replaced() -> None:
    replica, anchor, out = started()
    first = contribute(replica, out)
    contribute(replica, out)
    before = local(replica)
    with pytest.raises(LocalError, match="contribution 1 was taken"):
        replica.apply(anchor + np.float32(1), taken=first.number)
    np.testing.assert_array_equal(local(replica), before)


def test_apply_refuses_to_take_what_an_anchor_has_replaced() -> None:
    replica, anchor, out = started()
    report = contribute(replica, out)
    replica.apply(anchor, taken=0)
    with pytest.raises(LocalError):
        replica.apply(anchor, taken=report.number)


def test_taken_of_an_earlier_process_takes_nothing_of_this_one() -> None:
    replica = new_replica(contributions=5)
    anchor = np.zeros(replica.layout.numel, dtype=np.float32)
    replica.apply(anchor, fresh=True)
    train(replica, np.zeros_like(anchor), contribute=False)
    progress = local(replica)
    replica.apply(anchor + np.float32(1), taken=5)
    np.testing.assert_array_equal(local(replica), progress + np.float32(1))
    assert contribute(replica, np.zeros_like(anchor)).number == 6


def test_progress_over_rounds_is_counted_once() -> None:
    """Whatever is taken when: what was taken and what is left add up to all that was trained."""
    replica, anchor, out = started()
    trained, taken, tokens_taken, steps = np.zeros_like(anchor), np.zeros_like(anchor), 0, 0
    rounds, since = [(0, True), (2, True), (0, False), (3, False), (1, True)], 0
    for round_, (steps_after, take) in enumerate(rounds, start=1):
        before = local(replica)
        report = contribute(replica, out, steps=since + 2, round_=round_)
        if steps_after:
            train(replica, np.zeros_like(out), steps=steps_after, round_=round_, contribute=False)
        trained += before - local(replica)
        steps += 2 + steps_after
        since = steps_after
        if take:
            taken += out
            tokens_taken += report.tokens
        anchor = anchor + np.float32(0.25)
        replica.apply(anchor, taken=report.number if take else 0)
    left = anchor - local(replica)
    np.testing.assert_allclose(taken + left, trained, atol=1e-6)
    assert tokens_taken + contribute(replica, out, steps=1, round_=9).tokens == (steps + 1) * 32  # one at least


def test_equal_assignment_goes_on_in_the_stream() -> None:
    once, _, out = started()
    contribute(once, out, steps=6)
    twice, _, out = started()
    train(twice, out, steps=4, contribute=False)
    assert contribute(twice, out, steps=6).steps == 6  # since the contribution before, of which 4 were made
    np.testing.assert_array_equal(local(twice), local(once))


def test_evaluate_looks_at_the_base_and_leaves_the_replica() -> None:
    replica, _, out = started()
    before = replica.evaluate()
    train(replica, out, steps=50, contribute=False)
    trained = local(replica)
    assert replica.evaluate() == before
    np.testing.assert_array_equal(local(replica), trained)
    replica.apply(trained, fresh=True)
    assert replica.evaluate() < before


def test_nonfinite_step_changes_nothing() -> None:
    replica, anchor, out = started(BrokenLoss(broken=2))
    report = contribute(replica, out, steps=2)
    assert report.tokens == 0
    assert math.isnan(report.loss)
    np.testing.assert_array_equal(local(replica), anchor)
    assert contribute(replica, out, steps=1).tokens == 32


def test_nonfinite_steps_running_fail() -> None:
    replica, _, out = started(BrokenLoss(broken=100))
    with pytest.raises(FloatingPointError, match="lower learning rate"):
        contribute(replica, out, steps=NONFINITE_LIMIT_STEPS)


def test_stretch_ends_with_its_batches() -> None:
    replica, _, out = started(ThreeBatches())
    assert contribute(replica, out, steps=10).steps == 3
    once = out.copy()
    assert contribute(replica, out, steps=10).steps == 3  # the same ones again
    assert not np.array_equal(out, once)


def test_a_stretch_that_ended_with_the_last_batch_is_followed_by_one_from_the_first() -> None:
    """As without a quorum: the round's steps are made, its batches are used up, and training goes on."""
    replica, _, out = started(ThreeBatches())
    assert contribute(replica, out, steps=3).steps == 3
    assert train(replica, out, steps=2, contribute=False).steps == 2
    other, _, _ = started(ThreeBatches())
    contribute(other, out, steps=3)
    other._open_stream(Assignment(seed=3, round=1, member=0, members=1))
    train(other, out, steps=2, contribute=False)
    np.testing.assert_array_equal(local(replica), local(other))


class NoBatches(RegressionWorkload):
    def batches(self, assignment: Assignment) -> Iterator[Batch]:
        yield from ()


def test_a_share_without_a_batch_is_said_in_one_line() -> None:
    replica, _, out = started(NoBatches())
    with pytest.raises(ConfigError, match="nothing for member 0 of 1 in round 1; give this node more data"):
        contribute(replica, out, steps=10)


def test_a_parameter_that_is_no_number_ends_in_a_line_that_says_what_to_do() -> None:
    replica, _, out = started()
    with torch.no_grad():
        next(replica.model.parameters()).fill_(math.nan)
    with pytest.raises(FloatingPointError, match=r"loss nan .* not finite for 10 steps running; try a lower"):
        contribute(replica, out, steps=20)


def test_training_needs_an_anchor() -> None:
    replica = new_replica()
    with pytest.raises(LocalError, match="before any anchor"):
        train(replica, np.zeros(replica.layout.numel, dtype=np.float32))


def test_warm_up_rises_by_tokens_and_stays() -> None:
    settings = InnerSettings(lr=1.0, warmup_tokens=100)
    assert [learning_rate(settings, tokens) for tokens in (0, 49, 99, 100, 10**9)] == [0.01, 0.5, 1.0, 1.0, 1.0]


def test_missing_device_is_named() -> None:
    assert pick_device("cpu") == CPU
    with pytest.raises(ConfigError, match="'tpu' is not available"):
        pick_device("tpu")
