"""Candidates: one state in memory for however many plans, and finals on disk before anything is reported."""

from __future__ import annotations

import gc
import os
import threading
import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import msgspec
import numpy.typing as npt
import pytest
import trio

from shoal.collectives import memory
from shoal.collectives.finals import Finals
from shoal.collectives.grid import Grid
from shoal.collectives.outer import NextState, advance
from shoal.collectives.state import StateHeader, header_of
from shoal.node.rounds.state_transition import StateTransition
from shoal.node.state import file_memory as nameless
from shoal.node.state.file_memory import file_memory
from shoal.node.state.finals_file import FinalsWriter
from shoal.node.state.state_saver import StateSaver
from shoal.node.state.states import StateCache
from shoal.protocol.errors import LocalError, StorageError
from tests.node.folders import cache_folder
from tests.node.ledger import GRID, OUTER, Ledger, finals_of, plan_of, state_of
from tests.node.transitions import transition_of


@pytest.fixture
def cache(tmp_path: Path) -> StateCache:
    return cache_in(tmp_path)


def cache_in(folder: Path) -> StateCache:
    return StateCache(cache_folder(folder), GRID.chunk_values)


def candidates_of(cache: StateCache) -> StateTransition:
    return transition_of(cache, OUTER)


def two_plans(ledger: Ledger) -> tuple[Finals, Finals]:
    """The finals of a plan, and those after a repair of it: the last chunk is another."""
    plan = plan_of(ledger.founders, ledger.chain.head)
    repaired = msgspec.structs.replace(plan, attempt=1)
    first, other = finals_of(plan, ledger.founders, seed=1), finals_of(plan, ledger.founders, seed=2)
    return first, Finals(plan=repaired, chunks=(*first.chunks[:-1], other.chunks[-1]))


async def test_candidate_is_the_state_that_the_finals_lead_to(cache: StateCache) -> None:
    ledger = Ledger()
    ledger.certify()
    candidates, value = candidates_of(cache), ledger.chain.value(1)
    candidate = await candidates.candidate(ledger.states[0], ledger.finals[1], 0.5)
    assert candidate.report(ledger.chain.value(0)).digest == value.digest
    assert candidates.of(value) is candidate is candidates.get(value.plan)
    assert candidates.of(msgspec.structs.replace(value, digest=bytes(32))) is None
    state = await candidates.take(candidate)
    assert state.anchor.tobytes() == ledger.state.anchor.tobytes()
    assert header_of(state, GRID) == candidate.header


@pytest.mark.parametrize("certified", [0, 1])
async def test_any_plan_of_the_round_may_be_the_certified_one(cache: StateCache, certified: int) -> None:
    ledger = Ledger()
    plans = two_plans(ledger)
    candidates = candidates_of(cache)
    made = [await candidates.candidate(ledger.state, finals, 0.5) for finals in plans]
    assert made[0].digest != made[1].digest
    state = await candidates.take(made[certified])
    want, header = advance(ledger.state, plans[certified], OUTER)
    assert state.anchor.tobytes() == want.anchor.tobytes()
    assert made[certified].header == header


@pytest.mark.parametrize("codec", ["int8", "int4"])
async def test_finals_that_the_disk_changed_before_they_were_certified_are_told_of_in_a_line(
    cache: StateCache, tmp_path: Path, codec: str
) -> None:
    """They lie in their file, and are applied again where another plan's came between; in int4 there is no -8."""
    ledger = Ledger(codec=codec)
    plan = plan_of(ledger.founders, ledger.chain.head, codec=codec)
    candidates, made = candidates_of(cache), []
    for attempt in (0, 1):
        finals = finals_of(msgspec.structs.replace(plan, attempt=attempt), ledger.founders, seed=attempt)
        made.append(await candidates.candidate(ledger.state, finals, 0.5))
    [path] = (tmp_path / "finals").glob(f"*-{made[0].finals.plan.hash.hex()}")
    values = made[0].finals.chunks[0].encoded
    at = path.read_bytes().index(values.tobytes()) + values.size // 2
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\x88" if codec == "int4" else bytes([values[values.size // 2] ^ 1]))
    with pytest.raises(StorageError, match="has other finals of round 1 than were written; check the disk"):
        await candidates.take(made[0])


async def test_finals_are_on_disk_when_the_candidate_is_there(cache: StateCache, tmp_path: Path) -> None:
    ledger = Ledger()
    plan = plan_of(ledger.founders, ledger.chain.head)
    candidates = candidates_of(cache)
    for attempt in (0, 1):
        finals = finals_of(msgspec.structs.replace(plan, attempt=attempt), ledger.founders, seed=attempt)
        await candidates.candidate(ledger.state, finals, 0.5)
        after = StateCache(tmp_path, GRID.chunk_values).finals(finals.plan.hash)
        assert after is not None
        assert after.concatenated() == finals.concatenated()
        assert cache.held_finals(finals.plan.hash) is finals


async def test_finals_that_cannot_be_kept_make_no_candidate(cache: StateCache, tmp_path: Path) -> None:
    ledger = Ledger()
    finals, _ = two_plans(ledger)
    (tmp_path / "finals").rmdir()
    candidates = candidates_of(cache)
    with pytest.raises(StorageError):
        await candidates.candidate(ledger.state, finals, 0.5)
    assert candidates.get(finals.plan.hash) is None


async def test_finals_are_applied_over_the_state_that_is_given(cache: StateCache) -> None:
    """S(0) is replaced in the middle of round 1 where the first founder's is another."""
    finals, _ = two_plans(Ledger())
    candidates = candidates_of(cache)
    for state in (state_of(0), state_of(0, seed=5)):
        candidate = await candidates.candidate(state, finals, 0.5)
        assert candidate.header == advance(state, finals, OUTER)[1]


async def test_finals_that_do_not_follow_are_our_bug_and_nothing_stays_of_them(
    cache: StateCache, tmp_path: Path
) -> None:
    finals, _ = two_plans(Ledger())
    candidates, before = candidates_of(cache), set(threading.enumerate())
    with pytest.raises(LocalError, match="do not follow"):
        await candidates.candidate(state_of(3), finals, 0.5)
    for thread in set(threading.enumerate()) - before:
        if not thread.daemon:  # the writer's, which ends by itself; trio keeps its own
            thread.join(10)
    assert list((tmp_path / "finals").iterdir()) == []
    assert candidates.get(finals.plan.hash) is None


NUMEL = 1 << 20
STATE_BYTES = 8 * NUMEL
HEAD_LIMIT_BYTES = 1 << 14
OWN_ARRAY = memory.own_array


class Mapped:
    """Bytes of mappings that exist, which tracemalloc does not see: of memory alone, or of nameless files."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.inodes: set[int] = set()

    def own_array(self, numel: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        made = OWN_ARRAY(numel, dtype)
        self._count(made, made.nbytes)
        return made

    def file_memory(self, folder: Path, size: int) -> memoryview:
        made = file_memory(folder, size)
        self.inodes.add(os.fstat(made.obj.reader).st_ino)
        self._count(made.obj, size)
        return made

    def _count(self, owner: object, size: int) -> None:
        weakref.finalize(owner, self._gone, size)
        self.now += size
        self.most = max(self.most, self.now)

    def _gone(self, size: int) -> None:
        self.now -= size


async def test_rounds_take_the_room_of_three_states_with_those_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that are held, or on disk, and one in the making; in memory alone a share of one. Finals aside, of a byte."""
    own, files = Mapped(), Mapped()
    monkeypatch.setattr(memory, "own_array", own.own_array)
    monkeypatch.setattr(nameless, "file_memory", files.file_memory)
    ledger, grid = Ledger(), Grid(NUMEL, 1 << 18)
    cache, last = StateCache(cache_folder(tmp_path), grid.chunk_values), state_of(0, grid=grid)
    plan = plan_of(ledger.founders, ledger.chain.head, grid=grid)
    finals = finals_of(plan, ledger.founders, seed=1)
    peaks: list[int] = []

    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        state = last
        candidates, saver = candidates_of(cache), StateSaver(cache)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(saver.run)
            for round in range(1, 9):
                here = Finals(plan=msgspec.structs.replace(plan, round=round), chunks=finals.chunks)
                candidate = await candidates.candidate(state, here, 0.5)
                state = await candidates.take(candidate)
                cache.put(state, candidate.header)
                await saver.save_soon(state)
                candidates.drop()
                async with saver._writing:  # a round takes longer than a write, also where the disk is another's
                    pass
                peaks.append(tracemalloc.get_traced_memory()[1])
                tracemalloc.reset_peak()
            nursery.cancel_scope.cancel()
    finally:
        tracemalloc.stop()
    gc.collect()
    assert own.most + max(peaks) - before <= 0.25 * STATE_BYTES
    assert 2 * STATE_BYTES <= files.most <= 3 * (STATE_BYTES + HEAD_LIMIT_BYTES)
    mapped = {path.stat().st_ino for path in (tmp_path / "state").iterdir()}
    assert mapped <= files.inodes


class Writers:
    """Finals that a writer was made for, and chunks that were made of a state."""

    def __init__(self, cache: StateCache, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[Finals] = []
        self.made: list[int] = []
        writer, make = cache.finals_writer, NextState._make

        def begin(finals: Finals) -> FinalsWriter:
            self.begun.append(finals)
            return writer(finals)

        def count(after: NextState, chunk: int, *rest: Any) -> tuple[bytes, ...]:
            self.made.append(chunk)
            return make(after, chunk, *rest)

        monkeypatch.setattr(cache, "finals_writer", begin)
        monkeypatch.setattr(NextState, "_make", count)


def settled(folder: Path, before: set[threading.Thread]) -> list[str]:
    """The finals' files once every writer's thread has ended."""
    for thread in set(threading.enumerate()) - before:
        if not thread.daemon:
            thread.join(10)
    return sorted(path.name for path in (folder / "finals").iterdir())


async def test_work_that_was_begun_before_the_check_is_taken_up(
    cache: StateCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (finals, _), writers = two_plans(Ledger()), Writers(cache, monkeypatch)
    candidates, state = candidates_of(cache), state_of(0)
    apply = candidates.begin(state, finals)
    assert apply is not None
    for chunk in finals.chunks[:-1]:
        apply(chunk)
    candidate = await candidates.candidate(state, finals, 0.5)
    assert writers.begun == [finals]
    assert writers.made == list(range(GRID.chunks))
    assert candidate.header == advance(state, finals, OUTER)[1]
    on_disk = StateCache(tmp_path, GRID.chunk_values).finals(finals.plan.hash)
    assert on_disk is not None
    assert on_disk.concatenated() == finals.concatenated()
    assert candidates.begin(state, finals) is None


async def test_work_that_was_begun_for_other_finals_leaves_nothing(
    cache: StateCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A final was unsound and came again; another round began; a repaired plan came after all."""
    (finals, repaired), writers, before = (
        two_plans(Ledger()),
        Writers(cache, monkeypatch),
        set(threading.enumerate()),
    )
    candidates, state = candidates_of(cache), state_of(0)
    again = Finals.open(finals.plan, [chunk.payload.tobytes() for chunk in finals.chunks])
    apply = candidates.begin(state, finals)
    assert apply is not None
    apply(finals.chunks[0])
    assert (await candidates.candidate(state, again, 0.5)).header == advance(state, again, OUTER)[1]
    assert writers.begun == [finals, again]
    candidates.begin(state, repaired)
    candidates.drop()
    candidates.begin(state, repaired)
    candidates.begin(state, finals)
    candidates.drop()
    assert settled(tmp_path, before) == [f"1-{finals.plan.hash.hex()}"]


async def test_state_that_is_taken_is_changed_by_nobody_who_begins_meanwhile(
    cache: StateCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    finals, repaired = two_plans(Ledger())
    candidates, state = candidates_of(cache), state_of(0)
    candidate = await candidates.candidate(state, finals, 0.5)
    complete = NextState.complete

    def complete_and_begin(after: NextState, *arguments: Any) -> StateHeader:
        header = complete(after, *arguments)
        apply = candidates.begin(state, repaired)  # nobody has its memory yet
        assert apply is not None
        for chunk in repaired.chunks:
            apply(chunk)
        return header

    monkeypatch.setattr(NextState, "complete", complete_and_begin)
    taken = await candidates.take(candidate)
    candidates.drop()
    monkeypatch.undo()
    assert taken.anchor.tobytes() == advance(state, finals, OUTER)[0].anchor.tobytes()
    assert header_of(taken, GRID) == candidate.header
