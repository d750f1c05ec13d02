"""A trainer's own knowledge, saved and taken over: what follows is what would have followed without a restart."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.collectives.codecs import F32
from shoal.collectives.fragments import Fragments
from shoal.collectives.grid import Grid
from shoal.node.state.tensor_files import DamagedFile
from shoal.node.training import inner_loop
from shoal.node.training.inner_loop import Replica
from shoal.node.training.inner_state import SPARE, SavedInner, Snapshotter, Writing, Written, take_up
from shoal.node.training.shared_tensors import Vector
from shoal.node.training.trainer_messages import (
    SNAPSHOT_BASE,
    Assignment,
    Contribution,
    InnerSettings,
    Restore,
    Snapshot,
    Snapshotted,
    SyncSettings,
    Train,
    Trained,
)
from shoal.node.workloads.regression import Batch, RegressionWorkload
from shoal.protocol.errors import LocalError
from shoal.protocol.manifest import OptimizerName

pytestmark = pytest.mark.usefixtures("one_torch_thread")


class Noisy(RegressionWorkload):
    """Everything that a restart could get wrong: dropout, running means, and three generators of random numbers."""

    def build(self) -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Linear(self.inputs, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(8, self.outputs),
        )

    def loss(self, model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
        loss, tokens = super().loss(model, batch)
        return loss * (1 + random.gauss(0, 0.1) + 0.1 * np.random.standard_normal()), tokens


class Seeking(Noisy):
    """Finds its place in its share without drawing what comes before."""

    sought: list[int]

    def batches_after(self, assignment: Assignment, drawn: int) -> Iterator[Batch]:
        self.sought.append(drawn)
        batches = self.batches(assignment)
        for _ in range(drawn):
            next(batches)
        return batches


BASE = bytes(31) + b"1"
"""Hash of the value that led to an anchor."""


def new_replica(
    workload: RegressionWorkload | None = None,
    sync: SyncSettings | None = None,
    optimizer: OptimizerName = "adamw",
) -> Replica:
    inner = InnerSettings(warmup_tokens=500, optimizer=optimizer)
    inputs = 512 if optimizer == "adamw8bit" else 16  # moments of a smaller matrix stay in float32
    return Replica(workload or Noisy(inputs=inputs), seed=3, inner=inner, device=torch.device("cpu"), sync=sync)


def order(round_: int, *, steps: int = 3, contribute: bool = True) -> Train:
    share = Assignment(seed=3, round=round_, member=0, members=1)
    return Train(round=round_, steps=steps, assignment=share, certified_tokens=96 * round_, contribute=contribute)


def train(replica: Replica, stretch: Train, numel: int) -> tuple[Vector, Contribution | Trained]:
    out = np.zeros(numel, np.float32)
    replica.begin(stretch)
    while not isinstance(report := replica.step(out), Contribution | Trained):
        pass
    return out, report


class Life:
    """A replica's rounds: each takes the contribution as the update of the anchor."""

    def __init__(self, replica: Replica, anchor: Vector, sync: SyncSettings | None = None) -> None:
        self.replica, self.anchor, self.sync = replica, anchor, sync or SyncSettings()

    @staticmethod
    def new(sync: SyncSettings | None = None, optimizer: OptimizerName = "adamw") -> Life:
        random.seed(7)
        np.random.seed(7)
        replica = new_replica(sync=sync, optimizer=optimizer)
        anchor = np.zeros(replica.layout.numel, np.float32)
        replica.write_initial(anchor)
        replica.apply(anchor)
        return Life(replica, anchor, sync)

    def round(self, number: int) -> Vector:
        out, report = train(self.replica, order(number), self.anchor.size)
        assert isinstance(report, Contribution)
        return self.certify(out, report)

    def certify(self, out: Vector, report: Contribution) -> Vector:
        grid = Grid(self.anchor.size, self.sync.chunk_values)
        buffers = self.replica.layout.buffer_chunks(self.sync.chunk_values)
        fragments = Fragments(grid, self.sync.fragments, buffers)
        update, fragment = np.zeros_like(out), fragments.of_round(report.round)
        fragment.scatter(out, update)
        self.anchor = self.anchor - update
        self.anchor[fragments.buffers_begin :] = update[fragments.buffers_begin :]
        self.replica.apply(self.anchor, round=report.round, taken=report.number)
        return out

    def save(self, path: Path, round_: int, *, midway: bool = False) -> SavedInner:
        snapshotter = Snapshotter()
        state = self.replica.inner_state(round_, midway=midway)
        written = snapshotter.take(state, path, base=BASE if midway else b"").write()
        snapshotter.done()
        assert not written.failure
        assert written.size_bytes == path.stat().st_size
        return SavedInner(path)


def scramble() -> None:
    """Another process: its generators stand elsewhere."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "muon"])
def test_rounds_after_a_restart_are_those_without_one(tmp_path: Path, optimizer: OptimizerName) -> None:
    life = Life.new(optimizer=optimizer)
    life.round(1)
    out, report = train(life.replica, order(2), life.anchor.size)
    assert isinstance(report, Contribution)
    saved = life.save(tmp_path / "2.trainer", 2)
    life.certify(out, report)
    anchor = life.anchor.copy()
    expected = [life.round(number) for number in (3, 4)]
    assert not np.array_equal(expected[0], expected[1])

    scramble()
    replica = new_replica(optimizer=optimizer)
    replica.restore(saved, exact=True)
    replica.apply(anchor)
    again = Life(replica, anchor)
    for number, vector in zip((3, 4), expected, strict=True):
        np.testing.assert_array_equal(again.round(number), vector)
    for name, value in life.replica.model.state_dict().items():
        assert torch.equal(value, replica.model.state_dict()[name]), name


@pytest.mark.parametrize("certified", [False, True])
def test_streaming_after_a_restart_is_that_without_one(tmp_path: Path, certified: bool) -> None:
    """In three fragments: what two of them hold is in no contribution yet, and is saved to the bit."""
    sync = SyncSettings(chunk_values=16, fragments=3, mixing=0.5)
    life = Life.new(sync)
    for number in (1, 2, 3):
        life.round(number)
    out, report = train(life.replica, order(4), life.anchor.size)
    assert isinstance(report, Contribution)
    before, saved = life.anchor.copy(), life.save(tmp_path / "4.trainer", 4)
    life.certify(out, report)
    anchor = life.anchor.copy()
    expected = [life.round(number) for number in (5, 6, 7)]

    scramble()
    replica = new_replica(sync=sync)
    replica.restore(saved, exact=True)
    if not certified:
        replica.apply(before, round=3)
    replica.apply(anchor, round=4)
    again = Life(replica, anchor, sync)
    for number, vector in zip((5, 6, 7), expected, strict=True):
        np.testing.assert_array_equal(again.round(number), vector)


@pytest.mark.parametrize("seeks", [False, True])
def test_share_is_gone_on_with_where_it_was_left(tmp_path: Path, seeks: bool) -> None:
    life = Life.new()
    life.round(1)
    train(life.replica, order(2, steps=2, contribute=False), life.anchor.size)
    saved = life.save(tmp_path / "1.trainer", 1)
    assert saved.counters.drawn == 2
    assert (saved.counters.kept_tokens, saved.counters.steps) == ((64,), 2)
    anchor = life.anchor.copy()
    expected, report = train(life.replica, order(2, steps=5), anchor.size)
    assert isinstance(report, Contribution)
    assert report.tokens == 160

    scramble()
    workload = Seeking() if seeks else Noisy()
    if isinstance(workload, Seeking):
        object.__setattr__(workload, "sought", [])
    replica = new_replica(workload)
    replica.restore(saved, exact=True)
    replica.apply(anchor)
    found, again = train(replica, order(2, steps=5), anchor.size)
    assert isinstance(again, Contribution)
    assert again.tokens == 160
    # The replica is the anchor plus what was kept: rounded once more than where it never stopped.
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    if isinstance(workload, Seeking):
        assert workload.sought == [2]


def test_batches_that_were_drawn_are_skipped_in_pieces_and_a_snapshot_amid_them_is_that_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inner_loop, "SKIP_S", 0.0)
    life = Life.new()
    life.round(1)
    train(life.replica, order(2, steps=3, contribute=False), life.anchor.size)
    saved, anchor = life.save(tmp_path / "1.trainer", 1, midway=True), life.anchor.copy()
    expected, _ = train(life.replica, order(2, steps=5), anchor.size)

    scramble()
    replica, out = new_replica(), np.zeros_like(anchor)
    replica.restore(saved, exact=True)
    replica.apply(anchor, round=1)
    replica.begin(order(2, steps=5))
    for _ in range(3):
        assert replica.step(out) is None
        assert (replica.training, replica.accounts.steps) == (True, 3)
    scramble()
    replica = new_replica()
    replica.restore(saved, exact=True)
    replica.apply(anchor, round=1)
    replica.begin(order(2, steps=5))
    assert replica.step(out) is None
    again = Life(replica, anchor).save(tmp_path / "again.trainer", 1, midway=True)
    assert again.counters == saved.counters

    scramble()
    replica = new_replica()
    replica.restore(again, exact=True)
    replica.apply(anchor, round=1)
    found, report = train(replica, order(2, steps=5), anchor.size)
    assert isinstance(report, Contribution)
    assert report.tokens == 160
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)


SYNCS = [SyncSettings(), SyncSettings(chunk_values=16, fragments=3, mixing=0.5)]


def test_only_work_that_no_contribution_holds_is_amid_a_round() -> None:
    life = Life.new()
    life.round(1)
    accounts = life.replica.accounts
    assert not accounts.amid_round  # nothing is learnt yet
    train(life.replica, order(2, steps=1, contribute=False), life.anchor.size)
    assert accounts.amid_round
    out, report = train(life.replica, order(2, steps=3), life.anchor.size)
    assert isinstance(report, Contribution)
    assert not accounts.amid_round
    life.certify(out, report)
    assert not accounts.amid_round


@pytest.mark.parametrize("sync", SYNCS, ids=["diloco", "streaming"])
def test_round_is_gone_on_with_from_its_midst(tmp_path: Path, sync: SyncSettings) -> None:
    life = Life.new(sync)
    life.round(1)
    train(life.replica, order(2, steps=2, contribute=False), life.anchor.size)
    saved, anchor = life.save(tmp_path / "midway", 1, midway=True), life.anchor.copy()
    assert (saved.counters.steps, saved.counters.drawn) == (life.replica.accounts.steps, 2)
    expected, report = train(life.replica, order(2, steps=5), anchor.size)
    assert isinstance(report, Contribution)

    scramble()
    replica = new_replica(sync=sync)
    replica.restore(saved, exact=True)
    replica.apply(anchor, round=1)
    found, again = train(replica, order(2, steps=5), anchor.size)
    assert isinstance(again, Contribution)
    assert (again.tokens, again.steps) == (report.tokens, report.steps - 2)
    # The replica is the anchor plus what was kept: rounded once more than where it never stopped, and where a gradient
    # is all but 0 AdamW makes much of that.
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)


def test_moments_in_8_bits_are_taken_up_amid_a_round_to_the_bit(tmp_path: Path) -> None:
    life = Life.new(optimizer="adamw8bit")
    life.round(1)
    train(life.replica, order(2, steps=2, contribute=False), life.anchor.size)
    saved = life.save(tmp_path / "midway", 1, midway=True)
    replica = new_replica(optimizer="adamw8bit")
    replica.restore(saved, exact=True)
    found, live = dict(replica.inner_state_tensors()), dict(life.replica.inner_state_tensors())
    assert found["first.0.weight"].dtype == torch.uint8
    for name in ("first", "second", "first_exponent", "second_exponent"):
        assert live[f"{name}.0.weight"].any()
    assert found.keys() == live.keys()
    assert all(torch.equal(found[name], live[name]) for name in live)


@pytest.mark.parametrize("sync", SYNCS, ids=["diloco", "streaming"])
def test_work_amid_a_round_goes_along_to_a_later_anchor(tmp_path: Path, sync: SyncSettings) -> None:
    """It is added to the anchor, but not to its buffers; the steps of the round under way are all made."""
    life = Life.new(sync)
    life.round(1)
    train(life.replica, order(2, steps=2, contribute=False), life.anchor.size)
    accounts = life.replica.accounts
    layout, tokens = life.replica.layout, accounts.tokens
    begin = layout.buffers_begin
    end = max(place.stop for name, place in layout.places().items() if name not in layout.buffers)
    work = accounts.local().numpy() - life.anchor
    saved = life.save(tmp_path / "midway", 1, midway=True)

    scramble()
    replica = new_replica(sync=sync)
    replica.restore(saved, exact=True)
    later: F32 = life.anchor + np.linspace(1, 2, life.anchor.size, dtype=np.float32)
    replica.apply(later, round=3)
    local = replica.accounts.local().numpy()
    np.testing.assert_array_equal(local[begin:], later[begin:])
    np.testing.assert_allclose(local[:end], (later + work)[:end], rtol=1e-5)
    assert (replica.accounts.tokens, replica.accounts.steps) == (tokens, 0)
    _, report = train(replica, order(4, steps=5), later.size)
    assert isinstance(report, Contribution)
    assert (report.steps, report.tokens) == (5, (2 + 5) * 32 // sync.fragments)  # of the fragment, since round 1


@pytest.mark.parametrize("sync", SYNCS, ids=["diloco", "streaming"])
@pytest.mark.parametrize("amid", [False, True])
def test_nothing_that_was_restored_is_left_on_an_anchor_of_another_history(
    tmp_path: Path, sync: SyncSettings, amid: bool
) -> None:
    life = Life.new(sync)
    life.round(1)
    train(life.replica, order(2, steps=2, contribute=False), life.anchor.size)
    saved = life.save(tmp_path / "saved", 1, midway=amid)
    replica = new_replica(sync=sync)
    replica.restore(saved, exact=True)
    other: F32 = life.anchor * np.float32(2)
    replica.apply(other, round=1, taken=7, fresh=True)
    np.testing.assert_array_equal(replica.accounts.local(), other)
    assert (replica.accounts.tokens, replica.accounts.steps) == (0, 0)
    replica.apply(other, round=2, taken=7)  # of the process before
    _, report = train(replica, order(3), other.size)
    assert isinstance(report, Contribution)
    assert report.tokens == report.steps * 32 // sync.fragments


def test_a_replica_that_anchors_are_mixed_into_is_not_set_on_a_later_one_than_it_stood_on(tmp_path: Path) -> None:
    """Against that it would take back what the others learnt meanwhile."""
    sync = SYNCS[1]
    life = Life.new(sync)
    life.round(1)
    saved = life.save(tmp_path / "1.trainer", 1)
    replica = new_replica(sync=sync)
    replica.restore(saved, exact=True)
    later: F32 = life.anchor + np.float32(1)
    replica.apply(later, round=2)
    np.testing.assert_allclose(replica.accounts.local()[:4], later[:4])
    assert replica.accounts.tokens == 0


def midway(path: Path) -> Snapshot:
    return Snapshot(round=1, path=str(path), base=BASE)


def test_snapshot_amid_a_round_takes_its_place_only_before_its_work_is_contributed(tmp_path: Path) -> None:
    life = Life.new()
    life.round(1)
    train(life.replica, order(2, steps=2, contribute=False), life.anchor.size)
    path = tmp_path / "midway"
    snapshotter = Snapshotter()
    writing = snapshotter.take(life.replica.inner_state(1, midway=True), path, base=BASE)
    snapshotter.withdraw()
    assert "nothing that a contribution holds" in writing.write().failure
    assert list(tmp_path.iterdir()) == []
    snapshotter.done()
    again = snapshotter.take(life.replica.inner_state(1, midway=True), path, base=BASE)
    assert not again.write().failure
    snapshotter.withdraw()  # it is there: the daemon removes it, which hears of the contribution after this
    assert [file.name for file in tmp_path.iterdir()] == ["midway"]
    assert SavedInner(path).metadata[SNAPSHOT_BASE] == BASE.hex()


def test_snapshot_of_a_contribution_waits_for_one_amid_the_round(tmp_path: Path) -> None:
    life = Life.new()
    life.round(1)
    train(life.replica, order(2, steps=2, contribute=False), life.anchor.size)
    snapshotter, sent = Snapshotter(), list[Snapshotted]()
    first = snapshotter.take(life.replica.inner_state(1, midway=True), tmp_path / "midway", base=BASE)
    snapshotter.save(life.replica.inner_state(1, midway=True), midway(tmp_path / "midway"), sent.append)
    assert [(one.midway, "while the one before" in one.failure) for one in sent] == [(True, True)]
    second = threading.Thread(target=snapshotter.take, args=(life.replica.inner_state(2), tmp_path / "2.trainer"))
    second.start()
    assert not first.write().failure
    snapshotter.done()
    second.join()
    with pytest.raises(LocalError, match="while the one before it is being written"):
        snapshotter.take(life.replica.inner_state(3), tmp_path / "3.trainer")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_snapshot_that_a_device_fails_amid_its_writing_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life.new()
    life.round(1)
    train(life.replica, order(2, steps=2, contribute=False), life.anchor.size)
    snapshotter, failing = Snapshotter(), threading.Event()

    def fail(writing: Writing) -> Written:
        failing.set()
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(Writing, "write", fail)
    snapshotter.save(life.replica.inner_state(1, midway=True), midway(tmp_path / "midway"), lambda _: None)
    assert failing.wait(60)
    state = life.replica.inner_state(2)
    second = threading.Thread(target=snapshotter.take, args=(state, tmp_path / "2.trainer"), daemon=True)
    second.start()
    second.join(60)
    assert not second.is_alive()
    for thread in threading.enumerate():
        if thread.name == "snapshot":
            thread.join(60)  # what it raised is told while this test runs


def test_older_snapshot_gives_moments_only(tmp_path: Path) -> None:
    life = Life.new()
    life.round(1)
    train(life.replica, order(2, contribute=False), life.anchor.size)
    saved = life.save(tmp_path / "1.trainer", 1)
    scramble()
    before = torch.get_rng_state()
    replica = new_replica()
    expected = torch.get_rng_state()
    replica.restore(saved, exact=False)
    assert torch.equal(torch.get_rng_state(), expected)
    assert not torch.equal(before, expected)  # building the model drew from it
    replica.apply(life.anchor)
    named = dict(replica.model.named_parameters())
    flat = np.concatenate([named[name].detach().numpy().ravel() for name in sorted(named)])
    np.testing.assert_array_equal(flat, life.anchor[: flat.size])  # nothing is kept
    running = np.concatenate([replica.model.get_buffer(name).numpy() for name in replica.layout.buffers])
    np.testing.assert_array_equal(running, life.anchor[replica.layout.buffers_begin :])
    theirs = dict(life.replica.inner_state(1).tensors)
    for name, tensor in replica.inner_state(1).tensors:
        assert torch.equal(tensor, theirs[name]), name
    assert int(dict(replica.inner_state(1).tensors)["steps"][0]) == 6


def test_copy_holds_what_was_there_when_it_was_taken(tmp_path: Path) -> None:
    life = Life.new()
    life.round(1)
    expected = {name: tensor.clone() for name, tensor in life.replica.inner_state(1).tensors}
    snapshotter = Snapshotter()
    writing = snapshotter.take(life.replica.inner_state(1), tmp_path / "1.trainer")
    with pytest.raises(LocalError, match="while the one before it is being written"):
        snapshotter.take(life.replica.inner_state(1), tmp_path / "2.trainer")
    life.round(2)  # goes on while nothing is written yet
    thread = threading.Thread(target=writing.write)
    thread.start()
    thread.join()
    snapshotter.done()
    saved = SavedInner(tmp_path / "1.trainer")
    for name, tensor in expected.items():
        saved.copy_to(name, out := torch.empty_like(tensor))
        assert torch.equal(out, tensor), name
    snapshotter.take(life.replica.inner_state(2), tmp_path / "2.trainer")


def test_next_copy_goes_to_a_file_that_was_made_while_training_went_on(tmp_path: Path) -> None:
    life, snapshotter = Life.new(), Snapshotter()
    (tmp_path / SPARE).write_bytes(b"of a process that was killed")
    snapshotter.prepare()  # for a copy of no known size: nothing
    for round in (1, 2, 3):
        life.round(round)
        node = None if round == 1 else (tmp_path / SPARE).stat().st_ino
        expected = {name: tensor.clone() for name, tensor in life.replica.inner_state(round).tensors}
        path = tmp_path / f"{round}.trainer"
        assert not snapshotter.take(life.replica.inner_state(round), path).write().failure
        snapshotter.done()
        assert node in (None, path.stat().st_ino)
        assert not (tmp_path / SPARE).exists()
        snapshotter.prepare()
        snapshotter.prepare()  # there is one
        saved = SavedInner(path)
        for name, tensor in expected.items():
            saved.copy_to(name, out := torch.empty_like(tensor))
            assert torch.equal(out, tensor), name


def test_a_file_for_the_next_is_made_amid_a_round_alone(tmp_path: Path) -> None:
    """After a round's snapshot the one before it is still there, and the trainer has nothing to do but to wait."""
    life, snapshotter, sent = Life.new(), Snapshotter(), list[Snapshotted]()
    life.round(1)
    for order, made in (
        (Snapshot(round=1, path=str(tmp_path / "1.trainer")), False),
        (midway(tmp_path / "midway"), True),
    ):
        before = set(threading.enumerate())
        snapshotter.save(life.replica.inner_state(1, midway=made), order, sent.append)
        for thread in set(threading.enumerate()) - before:
            if thread.name == "snapshot":
                thread.join(60)
        assert (tmp_path / SPARE).exists() == made
    assert [one.failure for one in sent] == ["", ""]


@pytest.mark.parametrize("damage", ["cut", "longer", "flipped", "metadata", "header", "empty"])
def test_damaged_snapshot_is_refused_by_name_and_changes_nothing(tmp_path: Path, damage: str) -> None:
    life = Life.new()
    life.round(1)
    path = tmp_path / "1.trainer"
    life.save(path, 1)
    data = bytearray(path.read_bytes())
    if damage == "cut":
        del data[-1:]
    elif damage == "longer":
        data += b"\0"
    elif damage == "flipped":
        data[-100] ^= 1
    elif damage == "metadata":
        at = data.index(b'\\"kept_tokens\\":') + len(b'\\"kept_tokens\\":')
        data[at] = ord("9")
    elif damage == "header":
        data[:8] = (1 << 62).to_bytes(8, "little")
    else:
        data.clear()
    path.write_bytes(data)
    with pytest.raises(DamagedFile, match=r"1\.trainer is damaged.*; remove it"):
        SavedInner(path)


def test_snapshot_of_another_model_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    life = Life.new()
    saved = life.save(tmp_path / "0.trainer", 0)
    replica = new_replica(RegressionWorkload())
    before = [tensor.clone() for _, tensor in replica.inner_state_tensors()]
    with pytest.raises(DamagedFile, match="another model"):
        replica.restore(saved, exact=True)
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, replica.inner_state_tensors(), strict=True))
    late = Life.new()
    with pytest.raises(LocalError, match="after an anchor"):
        late.replica.restore(saved, exact=True)


@pytest.mark.parametrize(
    ("what", "number", "refused"), [("parameters", np.nan, True), ("moments", np.inf, True), ("nothing", 0.0, False)]
)
def test_nothing_is_taken_from_a_snapshot_that_is_not_finite(
    tmp_path: Path, what: str, number: float, refused: bool
) -> None:
    """A loss that was NaN once is in the work amid the round: a script that was mended would never learn again."""
    life = Life.new()
    life.round(1)
    train(life.replica, order(2, steps=2, contribute=False), life.anchor.size)
    of = {
        "parameters": [parameter.data for parameter in life.replica.model.parameters()],
        "moments": [one for name, one in life.replica.inner_state_tensors() if name.startswith("first")],
    }
    if what != "nothing":
        of[what][-1].view(-1)[-1] = number
    life.save(tmp_path / "midway", 1, midway=True)
    replica = new_replica()
    found = take_up(
        Restore(path=str(tmp_path / "midway"), round=1, exact=True, midway=True), partial(replica.restore, exact=True)
    )
    assert bool(found.refused) == refused
    assert ("not finite" in found.refused) == refused
    assert replica.accounts.steps == (0 if refused else 2)


def test_unwritable_folder_is_told_and_not_raised(tmp_path: Path) -> None:
    sent: list[Snapshotted] = []
    snapshotter = Snapshotter()
    for folder in ("none", "nowhere"):  # the second is not refused for the first
        order = Snapshot(round=0, path=str(tmp_path / folder / "0.trainer"))
        began = time.perf_counter() - 9
        assert snapshotter.save(Life.new().replica.inner_state(0), order, sent.append, began=began) == ()
    for report, folder in zip(sent, ("none", "nowhere"), strict=True):
        assert report.copy_s >= 9, "training stopped for it all the same, and who orders the next rests by that"
        assert report.failure.startswith(f"{tmp_path / folder}: No such file or directory; check the disk")
