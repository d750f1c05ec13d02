"""What of a node's own work is written when, what is found again, and what is made of damage."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from shoal.node.outcome import Notice, Progress
from shoal.node.state.resumption import COPY_REST, MIDWAY, REST, WAIT_MIN_S, WRITE_REST, Found, Resumption
from shoal.node.state.tensor_files import TensorBytes, write_tensors
from shoal.node.training import trainer_messages
from shoal.node.training.trainer import Restarted
from shoal.node.training.trainer_messages import (
    SNAPSHOT_BASE,
    Command,
    Restore,
    Restored,
    Snapshot,
    Snapshotted,
)
from shoal.protocol.messages import Term, Value
from tests.node.checkpoint_lab import CheckpointLedger, new_ledger


@dataclass
class Bench:
    """A node's resumption, and a trainer that writes its part when it is told to."""

    folder: Path
    always: Callable[[int], bool] = lambda round: False
    ordered: list[Command] = field(default_factory=list)
    told: list[Progress] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.resumption = Resumption(self.folder, send=self.send, on_progress=self.told.append, always=self.always)

    async def send(self, command: Command) -> None:
        self.ordered.append(command)

    @property
    def rounds(self) -> list[int]:
        """Of the snapshots that were ordered."""
        return [order.round for order in self.ordered if isinstance(order, Snapshot) and not order.midway]

    @property
    def midway(self) -> list[Snapshot]:
        """Snapshots amid a round that were ordered."""
        return [order for order in self.ordered if isinstance(order, Snapshot) and order.midway]

    @property
    def on_disk(self) -> list[int]:
        return [files.position[1] for files in self.resumption.on_disk()]

    def trains(self) -> None:
        """The trainer made steps."""
        self.resumption.heard(trainer_messages.Progress(round=1, step=1, loss=1.0, tokens_per_s=1.0))

    def answer(self, *, failure: str = "", copy_s: float = 0.0, write_s: float = 0.0) -> None:
        order = self.ordered[-1]
        assert isinstance(order, Snapshot)
        if not failure:
            metadata = {SNAPSHOT_BASE: order.base.hex()} if order.midway else {}
            write_tensors(Path(order.path), [TensorBytes.of("first.w", np.zeros(3, np.float32))], metadata)
        self.resumption.heard(
            Snapshotted(
                round=order.round,
                path=order.path,
                copy_s=copy_s,
                write_s=write_s,
                size_bytes=0,
                failure=failure,
                midway=order.midway,
            )
        )


def run(test: Callable[[trio.Nursery], Awaitable[None]], clock: MockClock | None = None) -> None:
    async def bounded() -> None:
        with trio.fail_after(1e6 if clock else 20):
            async with trio.open_nursery() as nursery:
                await test(nursery)
                nursery.cancel_scope.cancel()

    trio.run(bounded, clock=clock)


async def until(condition: Callable[[], bool]) -> None:
    """Return once threads have brought it about."""
    while not condition():
        await trio.lowlevel.checkpoint()


@pytest.fixture
def ledger() -> CheckpointLedger:
    return new_ledger(5)


def test_certificate_waits_for_both_files_of_its_round(tmp_path: Path, ledger: CheckpointLedger) -> None:
    bench = Bench(tmp_path)
    certified: list[int] = []

    async def certify() -> None:
        await bench.resumption.written(Term(), 1)
        certified.append(1)

    async def test(nursery: trio.Nursery) -> None:
        nursery.start_soon(bench.resumption.run)
        await bench.resumption.written(Term(), 1)  # nothing is under way
        await bench.resumption.made(ledger.work(1))
        assert bench.rounds == [1]
        nursery.start_soon(certify)
        await until((tmp_path / "resume" / "0.0-1.work").exists)
        await wait_all_tasks_blocked(0.01)
        assert certified == []
        await bench.resumption.written(Term(), 2)  # another round does not wait
        bench.answer()
        await until(lambda: bool(certified))
        assert bench.on_disk == [1]

    run(test)


def test_certificate_waits_for_a_slow_disk_only_so_long(tmp_path: Path, ledger: CheckpointLedger) -> None:
    bench, clock = Bench(tmp_path), MockClock()  # which a thread that is slow does not move
    over = trio.Event()

    async def certify() -> None:
        await bench.resumption.written(Term(), 1)
        over.set()

    async def test(nursery: trio.Nursery) -> None:
        nursery.start_soon(bench.resumption.run)
        await bench.resumption.made(ledger.work(1))
        nursery.start_soon(certify)
        await wait_all_tasks_blocked()
        clock.jump(WAIT_MIN_S - 0.01)
        await wait_all_tasks_blocked()
        assert not over.is_set()
        clock.jump(0.02)
        await over.wait()
        assert bench.on_disk == []

    run(test, clock)


def test_write_is_followed_by_a_rest_unless_it_was_quick_or_its_round_always_counts(
    tmp_path: Path, ledger: CheckpointLedger
) -> None:
    bench, clock = Bench(tmp_path, always=lambda round: round == 3), MockClock()

    async def write(round: int, seconds: float, *, alone: bool = False) -> None:
        await bench.resumption.made(ledger.work(round), alone=alone)
        if bench.rounds[-1] == round:
            await wait_all_tasks_blocked()
            clock.jump(seconds)
            bench.answer()
            await until(lambda: not bench.resumption.writing)

    async def test(nursery: trio.Nursery) -> None:
        nursery.start_soon(bench.resumption.run)
        await write(1, 2.0)
        clock.jump(2.0 * REST - 0.1)
        await write(2, 2.0)
        assert bench.rounds == [1]
        await write(3, 0.2)
        assert bench.rounds == [1, 3]
        await write(4, 2.0)  # the one before was quick
        assert bench.rounds == [1, 3, 4]
        await write(5, 0.2)
        assert bench.rounds == [1, 3, 4]
        await write(5, 0.2, alone=True)
        assert bench.rounds == [1, 3, 4, 5]
        assert bench.on_disk == [5]

    run(test, clock)


def test_nothing_is_ordered_while_one_is_written(tmp_path: Path, ledger: CheckpointLedger) -> None:
    bench = Bench(tmp_path)

    async def test(nursery: trio.Nursery) -> None:
        nursery.start_soon(bench.resumption.run)
        for round in (1, 2):
            await bench.resumption.made(ledger.work(round))
        assert bench.rounds == [1]

    run(test)


@pytest.mark.parametrize("how", ["full", "died"])
def test_snapshot_that_fails_leaves_the_one_before_and_is_told_once(
    tmp_path: Path, ledger: CheckpointLedger, how: str
) -> None:
    bench = Bench(tmp_path)

    async def test(nursery: trio.Nursery) -> None:
        nursery.start_soon(bench.resumption.run)
        for round in (1, 2, 3):
            await bench.resumption.made(ledger.work(round))
            if round == 1:
                bench.answer()
            elif how == "full":
                bench.answer(failure="0.0-2.trainer was not written: the disk is full; free some space")
            else:
                bench.resumption.heard(Restarted(cause="killed by SIGKILL", round=1))
            await bench.resumption.written(Term(), round)
        assert bench.on_disk == [1]
        assert len(bench.told) == 1
        assert isinstance(bench.told[0], Notice)
        assert ("is full; free some space" if how == "full" else "died") in bench.told[0].text

    run(test, MockClock())  # whose time stands: a slow disk is given a rest


def test_folder_that_cannot_be_made_is_told_and_training_goes_on(tmp_path: Path, ledger: CheckpointLedger) -> None:
    bench = Bench(tmp_path)
    (tmp_path / "resume").write_text("a file is in the way")

    async def test(nursery: trio.Nursery) -> None:
        nursery.start_soon(bench.resumption.run)
        await bench.resumption.made(ledger.work(1))
        await bench.resumption.written(Term(), 1)
        assert bench.rounds == []
        assert "check the disk" in str(bench.told[0])

    run(test)


def found_rounds(bench: Bench, ledger: CheckpointLedger, head: int, *, countable: bool = True) -> object:
    found = bench.resumption.find(ledger.chain_to(head), countable=countable)
    return None if found is None else (found.files.position[1], found.exact, found.work is not None)


def test_newest_files_that_fit_the_head_are_found(tmp_path: Path, ledger: CheckpointLedger) -> None:
    bench = Bench(tmp_path)
    assert found_rounds(bench, ledger, 0) is None
    for round in (2, 3):
        ledger.resume_files(tmp_path, round)
    assert found_rounds(bench, ledger, 1) == (2, True, True)  # of the round under way
    assert found_rounds(bench, ledger, 2) == (3, True, True)
    assert found_rounds(bench, ledger, 3) == (3, True, True)  # of the round at the head
    assert found_rounds(bench, ledger, 3, countable=False) == (3, True, False)
    assert found_rounds(bench, ledger, 2, countable=False) == (3, True, True)
    assert found_rounds(bench, ledger, 4) == (3, False, False)  # for the moments


def test_files_of_another_history_are_good_for_moments_only(tmp_path: Path, ledger: CheckpointLedger) -> None:
    other = CheckpointLedger(manifest=ledger.manifest, codec="fp32")
    other.certify(4)
    other.resume_files(tmp_path, 3)  # follows another C(2)
    assert found_rounds(Bench(tmp_path), ledger, 3) == (3, False, False)
    assert found_rounds(Bench(tmp_path), ledger, 2) == (3, False, False)


def test_what_was_passed_on_and_made_anew_since_counts_as_earlier(tmp_path: Path, ledger: CheckpointLedger) -> None:
    bench = Bench(tmp_path)
    ledger.resume_files(tmp_path, 3, passed_on=True)
    assert found_rounds(bench, ledger, 2) == (3, True, True)
    assert found_rounds(bench, ledger, 2, countable=False) == (3, True, False)  # it may be in what was announced since


@pytest.mark.parametrize("at", [-1, 20])
def test_damaged_work_is_named_and_the_one_before_it_taken(tmp_path: Path, ledger: CheckpointLedger, at: int) -> None:
    bench = Bench(tmp_path)
    ledger.resume_files(tmp_path, 2)
    damaged = ledger.resume_files(tmp_path, 3).work
    data = bytearray(damaged.read_bytes())
    data[at] ^= 0x80
    damaged.write_bytes(data)
    assert found_rounds(bench, ledger, 2) == (2, True, True)
    (notice,) = bench.told
    assert isinstance(notice, Notice)
    assert "0.0-3.work is damaged" in notice.text
    assert "remove it" in notice.text


def test_work_without_its_trainers_part_is_not_found(tmp_path: Path, ledger: CheckpointLedger) -> None:
    ledger.resume_files(tmp_path, 3).trainer.unlink()
    (tmp_path / "resume" / "0.0-9.work.partial").write_bytes(b"half")
    assert found_rounds(Bench(tmp_path), ledger, 3) is None


def test_trainer_is_told_which_part_fits(tmp_path: Path, ledger: CheckpointLedger) -> None:
    bench = Bench(tmp_path)
    path = str(ledger.resume_files(tmp_path, 3).trainer)

    async def test(nursery: trio.Nursery) -> None:
        for head, exact in ((3, True), (4, False)):
            found = bench.resumption.find(ledger.chain_to(head), countable=True)
            assert found is not None
            await bench.resumption.restore_trainer(found)
            assert bench.ordered[-1] == Restore(path=path, round=3, exact=exact)
        bench.resumption.heard(Restored(round=3, path=path, exact=True, refused=f"{path} is damaged; remove it"))
        assert isinstance(bench.told[0], Notice)
        assert f"{path} is damaged; remove it" in bench.told[0].text

    run(test)


def test_only_the_newest_rounds_stay(tmp_path: Path, ledger: CheckpointLedger) -> None:
    bench = Bench(tmp_path)
    for round in (1, 2, 3, 4):
        ledger.resume_files(tmp_path, round)
    (tmp_path / "resume" / "0.0-2.trainer.partial").write_bytes(b"half")
    bench.resumption.forget_old((Term(), 3))  # 4 is of a round that was gone back on
    assert sorted(path.name for path in (tmp_path / "resume").iterdir()) == [
        "0.0-3.trainer",
        "0.0-3.work",
    ]


def test_files_of_a_round_stay_until_those_of_a_later_one_are_whole(tmp_path: Path, ledger: CheckpointLedger) -> None:
    bench = Bench(tmp_path)

    async def test(nursery: trio.Nursery) -> None:
        nursery.start_soon(bench.resumption.run)
        for round in (1, 2):
            await bench.resumption.made(ledger.work(round))
            await until((tmp_path / "resume" / f"0.0-{round}.work").exists)
            assert bench.on_disk == ([] if round == 1 else [1])  # the trainer has not answered
            bench.answer()
            await until(lambda: not bench.resumption.writing)
        assert bench.on_disk == [2]

    run(test)


# -- amid a round ----------------------------------------------------------------------------------------------


def test_snapshots_amid_a_round_cost_the_trainer_and_the_disk_a_small_share(
    tmp_path: Path, ledger: CheckpointLedger
) -> None:
    bench, clock = Bench(tmp_path), MockClock()
    value = ledger.chain_to(2).standing

    async def trains(after_s: float = 0.0, *, ordered: int) -> None:
        """Let so much time pass, then hear of a step; so many are ordered then, and no more."""
        clock.jump(after_s)
        bench.trains()
        await until(lambda: len(bench.midway) >= ordered)
        await wait_all_tasks_blocked()
        assert len(bench.midway) == ordered

    async def test(nursery: trio.Nursery) -> None:
        nursery.start_soon(bench.resumption.run)
        await trains(ordered=0)  # it stands on nothing yet
        bench.resumption.stands_on(value)
        await trains(ordered=1)
        assert bench.midway[0] == Snapshot(round=2, path=str(tmp_path / "resume" / MIDWAY), base=value.hash)
        await trains(9.0, ordered=1)  # it is being written
        bench.answer(copy_s=0.01, write_s=0.02)
        await trains(COPY_REST * 0.01 - 0.1, ordered=1)
        await trains(0.2, ordered=2)
        bench.answer(copy_s=0.01, write_s=0.2)
        await trains(WRITE_REST * 0.2 - 0.1, ordered=2)
        await trains(0.2, ordered=3)
        bench.answer(failure="the disk is full")
        await trains(ordered=4)
        bench.resumption.heard(Restarted(cause="killed by SIGKILL", round=2))  # and took the order along
        await trains(ordered=5)
        bench.answer()
        bench.resumption.stands_on(None)
        await trains(ordered=5)
        assert bench.told == []

    run(test, clock)


def test_nothing_is_ordered_amid_a_round_while_its_own_files_are_written(
    tmp_path: Path, ledger: CheckpointLedger
) -> None:
    bench = Bench(tmp_path)

    async def test(nursery: trio.Nursery) -> None:
        nursery.start_soon(bench.resumption.run)
        bench.resumption.stands_on(ledger.chain_to(0).standing)
        await bench.resumption.made(ledger.work(1))
        bench.trains()
        await wait_all_tasks_blocked(0.01)
        assert bench.midway == []

    run(test)


def test_what_was_learnt_amid_a_round_is_gone_from_disk_before_the_contribution_is_said(
    tmp_path: Path, ledger: CheckpointLedger
) -> None:
    bench = Bench(tmp_path)

    async def test(nursery: trio.Nursery) -> None:
        nursery.start_soon(bench.resumption.run)
        bench.resumption.stands_on(ledger.chain_to(0).standing)
        bench.trains()
        await until(lambda: bool(bench.midway))
        bench.answer()
        assert (tmp_path / "resume" / MIDWAY).exists()
        await bench.resumption.made(ledger.work(1))
        assert not (tmp_path / "resume" / MIDWAY).exists()
        bench.answer()

    run(test)


def write_midway(folder: Path, value: Value) -> Path:
    """What a trainer writes amid the round after the state of `value`."""
    path = folder / "resume" / MIDWAY
    path.parent.mkdir(exist_ok=True)
    write_tensors(path, [TensorBytes.of("kept", np.zeros(3, np.float32))], {SNAPSHOT_BASE: value.hash.hex()})
    return path


def find(bench: Bench, ledger: CheckpointLedger, head: int) -> Found | None:
    return bench.resumption.find(ledger.chain_to(head), countable=True, staleness_rounds=2)


def test_what_was_learnt_amid_a_round_is_taken_up_at_its_state_and_not_long_after(
    tmp_path: Path, ledger: CheckpointLedger
) -> None:
    bench = Bench(tmp_path)
    path = write_midway(tmp_path, ledger.chain_to(2).standing)
    order = Restore(path=str(path), round=2, exact=True, midway=True)
    for head in (2, 3, 4):
        found = find(bench, ledger, head)
        assert found is not None, head
        assert (found.files, found.exact, found.work, found.midway) == (None, True, None, order)
    for head in (1, 5):  # of a state that is not there, and of long ago
        assert find(bench, ledger, head) is None, head
    files = ledger.resume_files(tmp_path, 2)
    found = find(bench, ledger, 2)
    assert found is not None
    assert (found.files, found.exact, found.midway) == (files, True, order)
    assert found.work is not None  # the contribution before it is settled all the same
    found = find(bench, ledger, 4)
    assert found is not None
    assert (found.work, found.midway) == (None, order)

    async def test(nursery: trio.Nursery) -> None:
        await bench.resumption.restore_trainer(found, spent=True)  # nothing of it can be spent
        assert bench.ordered == [order]

    run(test)


def test_what_a_later_contribution_holds_is_not_taken_up_again(tmp_path: Path, ledger: CheckpointLedger) -> None:
    bench = Bench(tmp_path)
    write_midway(tmp_path, ledger.chain_to(2).standing)
    files = ledger.resume_files(tmp_path, 3)
    for head in (2, 3, 4):
        found = find(bench, ledger, head)
        assert found is not None
        assert (found.files, found.midway) == (files, None)


def test_what_was_learnt_on_another_history_is_not_taken_up(
    tmp_path: Path, ledger: CheckpointLedger, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "shoal.node.state.resumption")
    other = CheckpointLedger(manifest=ledger.manifest, codec="fp32")
    other.certify(4)
    write_midway(tmp_path, other.chain_to(2).standing)
    assert other.chain_to(2).standing.hash != ledger.chain_to(2).standing.hash
    for head in (2, 3):
        assert find(Bench(tmp_path), ledger, head) is None
        said = "the work of the round that was broken off counts no more: the swarm has gone on since"
        assert caplog.messages[-1] == said


@pytest.mark.parametrize("damage", ["torn", "zeros", "another base"])
def test_torn_snapshot_amid_a_round_is_not_believed(tmp_path: Path, ledger: CheckpointLedger, damage: str) -> None:
    path = write_midway(tmp_path, ledger.chain_to(2).standing)
    files = ledger.resume_files(tmp_path, 2)
    data = path.read_bytes()
    if damage == "torn":
        path.write_bytes(data[:-1])
    elif damage == "zeros":
        path.write_bytes(data[:-8] + b"\x01" + bytes(7))
    else:
        was, then = (ledger.chain_to(head).standing.hash.hex().encode() for head in (2, 1))
        path.write_bytes(data.replace(was, then))
    found = find(Bench(tmp_path), ledger, 2)
    assert found is not None
    assert (found.files, found.exact, found.midway) == (files, True, None)


def test_what_is_written_amid_a_round_stays_when_old_rounds_go(tmp_path: Path, ledger: CheckpointLedger) -> None:
    path = write_midway(tmp_path, ledger.chain_to(2).standing)
    beside = path.with_name(f"{MIDWAY}.new.partial")
    beside.write_bytes(b"half")
    Bench(tmp_path).resumption.forget_old((Term(), 3))
    assert path.exists()
    assert beside.exists()
