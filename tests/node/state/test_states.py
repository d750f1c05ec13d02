"""States and finals in the cache: what comes back from disk is what was put there, to the bit, or nothing."""

from __future__ import annotations

import gc
import logging
import os
import weakref
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save

from shoal.collectives.grid import Grid
from shoal.collectives.outer import NextState, OuterSettings
from shoal.collectives.state import CertifiedState, StateHeader, frozen, header_of
from shoal.node.state import states as states_module
from shoal.node.state.file_memory import mapping_of
from shoal.node.state.state_files import read_state, write_state
from shoal.node.state.states import FINALS_KEPT, FINALS_MIN, PIN_S, PINS_LIMIT_STATES, STATES_KEPT, StateCache
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Term
from shoal.protocol.wire import canonical
from shoal.swarm.lanes.chunks import ChunkExchange, ChunkRef, ChunkSpace
from shoal.swarm.lanes.frame import SCOPE_BYTES, FrameHeader, FrameKind
from shoal.swarm.lanes.queue import FrameQueue, Later
from tests.node.ledger import GRID, Ledger, identity, plan_of, save_finals, state_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("state", "finals"):
        (tmp_path / name).mkdir()
    return tmp_path


def cache_in(folder: Path) -> StateCache:
    return StateCache(folder, GRID.chunk_values)


def same_bits(first: CertifiedState, second: CertifiedState) -> bool:
    return (
        (first.term, first.round, first.tokens, first.layout_hash)
        == (second.term, second.round, second.tokens, second.layout_hash)
        and first.anchor.tobytes() == second.anchor.tobytes()
        and first.momentum.tobytes() == second.momentum.tobytes()
    )


# -- states on disk ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("imaged", [False, True])
def test_state_comes_back_from_disk_to_the_bit(folder: Path, imaged: bool) -> None:
    odd = np.array([0.0, -0.0, 1e-45, -1e-45, 3.4e38, np.inf, -np.inf, np.nan] * 100, np.float32)
    odd.view(np.uint32)[7] = 0x7FC0_1234  # a NaN with a payload: bits are bits
    before = CertifiedState(
        term=Term(2, 3),
        round=41,
        tokens=2**60,
        layout_hash=bytes(range(32)),
        anchor=frozen(odd),
        momentum=frozen(odd[::-1].copy()),
        imaged=imaged,
    )
    cache_in(folder).save_state(before)
    after = cache_in(folder).load_state(41)
    assert after is not None
    assert same_bits(before, after)
    assert header_of(after, Grid(800, 128)).digest == header_of(before, Grid(800, 128)).digest
    assert not after.anchor.flags.writeable


def test_states_kept_are_the_newest(folder: Path) -> None:
    cache = cache_in(folder)
    for round in (8, 9, 10, 11):
        cache.save_state(state_of(round, seed=round))
    assert sorted(path.name for path in (folder / "state").iterdir()) == ["10.safetensors", "11.safetensors"]
    assert cache.saved_rounds() == [11, 10]
    assert STATES_KEPT == 2


def next_state(cache: StateCache, ledger: Ledger) -> CertifiedState:
    """The state after the ledger's, in the cache's memory; the ledger has it too."""
    ledger.certify(1)
    finals = ledger.finals[ledger.state.round]
    after = NextState(ledger.states[-2], OuterSettings(), GRID, cache.vectors)
    state = after.take(after.complete(finals))
    cache.put(state, cache.header(state))
    return state


def test_a_state_that_is_saved_is_one_file_on_disk_and_in_memory_and_nothing_is_written_to_it(folder: Path) -> None:
    cache, ledger = cache_in(folder), Ledger()
    first = next_state(cache, ledger)
    held = mapping_of(first.momentum)
    assert held is not None
    assert held.reader is not None
    assert os.fstat(held.reader).st_nlink == 0
    cache.save_state(first)
    path = cache.state_file(1)
    assert os.fstat(held.reader).st_ino == path.stat().st_ino
    cache.save_state(first)  # again, under the name that it has
    assert os.fstat(held.reader).st_nlink == 1
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    whole = path.read_bytes()
    del first, held
    for _ in range(2 * STATES_KEPT):
        next_state(cache, ledger)  # the memory of those that are gone is used again, and this is no such
    assert cache.held_rounds() == [1, 5]
    assert path.read_bytes() == whole
    assert header_of(read_state(path), GRID).digest == ledger.chain.digest(1)


def test_a_file_whose_state_is_gone_from_the_disk_is_read_on_as_it_was(folder: Path) -> None:
    """Whoever exports or copies it may have opened it before."""
    cache, ledger = cache_in(folder), Ledger()
    cache.save_state(next_state(cache, ledger))
    path = cache.state_file(1)
    with path.open("rb") as opened:
        whole = path.read_bytes()
        cache.save_state(next_state(cache, ledger), good=1)
        cache.make_room(2)
        assert cache.saved_rounds() == [2]
        for _ in range(2 * STATES_KEPT):
            next_state(cache, ledger)
        assert cache.held_rounds() == [2, 6]
        assert opened.read() == whole


def test_others_make_room_for_a_state_that_is_saved_but_never_the_one_that_is_good(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, there = cache_in(folder), list[list[int]]()

    def write(path: Path, state: CertifiedState, header: StateHeader) -> None:
        there.append(cache.saved_rounds())
        write_state(path, state, header)

    monkeypatch.setattr(states_module, "write_state", write)
    for round, good in ((0, 0), (7, 0), (8, 7), (9, 8), (10, 7), (11, 10), (12, 3), (13, 11)):
        cache.save_state(state_of(round, seed=round), good=good)
    # 7 was gone when 10 came, and 3 never was: then nothing goes beforehand. 13 is a state that nobody vouches for.
    assert there == [[], [0], [7, 0], [8, 0], [9, 8, 0], [10, 0], [11, 10, 0], [11, 0]]
    assert cache.saved_rounds() == [13, 11, 0]


def test_going_back_leaves_the_state_that_is_gone_back_to_and_those_before_it(folder: Path) -> None:
    cache = cache_in(folder)
    for round in (1, 2, 3):
        state = state_of(round, seed=round)
        cache.put(state, cache.header(state))
        cache.save_state(state)
    cache.go_back(2)
    assert cache.held_rounds() == cache.saved_rounds() == [2]


def test_initial_state_is_kept_beside_the_newest(folder: Path) -> None:
    """Nobody could draw it while the trainer trains, and no finals lead to it."""
    cache = cache_in(folder)
    for round in range(5):
        cache.save_state(state_of(round, seed=round))
    assert cache.saved_rounds() == [4, 3, 0]


@pytest.mark.parametrize("at", [0, 3, 8, 9, 40, 120, 200, -1])
def test_damaged_state_is_ignored_with_a_warning_or_is_another_state(
    folder: Path, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    cache = cache_in(folder)
    good, bad = state_of(1), state_of(2)
    cache.save_state(good)
    cache.save_state(bad)
    path = folder / "state" / "2.safetensors"
    data = path.read_bytes()
    for mask in (0x01, 0x80, 0xFF):
        changed = bytearray(data)
        changed[at] ^= mask
        path.write_bytes(changed)
        changed_state, older = cache.load_state(2), cache.load_state(1)
        if changed_state is not None:  # it can be read, so its digest will tell, unless only its hashes were changed
            in_its_hashes = data.index(b'_hashes":"') <= at < data.index(b'"anchor":{')
            assert (header_of(changed_state, GRID).digest == header_of(bad, GRID).digest) == in_its_hashes
        else:
            assert f"{path} is not readable" in caplog.text
        assert older is not None
        assert same_bits(older, good)


@pytest.mark.parametrize("size", [0, 7, 8, 100, 1000, 79_999])
def test_state_cut_short_is_ignored_with_a_warning(folder: Path, size: int, caplog: pytest.LogCaptureFixture) -> None:
    cache = cache_in(folder)
    cache.save_state(state_of(1))
    cache.save_state(state_of(2))
    path = folder / "state" / "2.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with caplog.at_level(logging.WARNING):
        assert cache.load_state(2) is None
        assert cache.load_state(1) is not None
    assert f"{path} is not readable" in caplog.text


def test_files_that_are_no_states_are_ignored(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = cache_in(folder)
    cache.save_state(state_of(5))
    good = {"rebases": "0", "rollbacks": "0", "round": "6", "tokens": "0", "layout": "00" * 32}
    vector, none = np.zeros(4, np.float32), np.zeros(0, np.float32)
    strange = {
        "no values": save({"anchor": none, "momentum": none}, good),
        "no metadata": save({"anchor": vector, "momentum": vector}),
        "no momentum": save({"anchor": vector}, good),
        "no layout": save({"anchor": vector, "momentum": vector}, {**good, "layout": ""}),
        "layout of another length": save({"anchor": vector, "momentum": vector}, {**good, "layout": "00"}),
        "layout that is no hex": save({"anchor": vector, "momentum": vector}, {**good, "layout": "zz"}),
        "round that is no number": save({"anchor": vector, "momentum": vector}, {**good, "round": "six"}),
        "two lengths": save({"anchor": vector, "momentum": np.zeros(5, np.float32)}, good),
        "another round": save({"anchor": vector, "momentum": vector}, {**good, "round": "5"}),
        "a matrix": save({"anchor": vector.reshape(2, 2), "momentum": vector.reshape(2, 2)}, good),
    }
    for name, data in strange.items():
        caplog.clear()
        path = folder / "state" / "6.safetensors"
        path.write_bytes(data)
        assert cache.load_state(6) is None, name
        assert f"{path} is not readable" in caplog.text, name
    path.unlink()
    (folder / "state" / "7.safetensors").mkdir()
    (folder / "state" / "8.safetensors.partial").write_bytes(b"half")
    assert cache.saved_rounds() == [7, 5]
    assert cache.load_state(7) is None
    assert cache.load_state(5) is not None


# -- finals on disk ------------------------------------------------------------------------------------------


def held_on_disk(folder: Path, ledger: Ledger) -> list[int]:
    fresh = cache_in(folder)
    return [round for round, finals in ledger.finals.items() if fresh.finals(finals.plan.hash) is not None]


def test_finals_since_the_newest_state_and_the_last_before_it_are_kept_on_disk(folder: Path) -> None:
    ledger, cache = Ledger(), cache_in(folder)
    ledger.certify(FINALS_KEPT + 9)
    for finals in ledger.finals.values():
        save_finals(cache, finals)
    assert held_on_disk(folder, ledger) == list(range(1, FINALS_KEPT + 10))
    cache.save_state(ledger.states[2])
    assert held_on_disk(folder, ledger) == list(range(1, FINALS_KEPT + 10))
    cache.save_state(ledger.states[FINALS_KEPT + 3])
    assert held_on_disk(folder, ledger) == list(range(4, FINALS_KEPT + 10))


def test_damaged_finals_are_ignored_with_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    ledger, cache = Ledger(), cache_in(folder)
    ledger.certify()
    finals = ledger.finals[1]
    save_finals(cache, finals)
    path = folder / "finals" / f"1-{finals.plan.hash.hex()}"
    whole = path.read_bytes()
    plan_bytes = 4 + int.from_bytes(whole[:4], "little")
    size = finals.chunks[0].payload.nbytes
    for data in (
        b"",
        b"\xc1",
        whole[:4],
        whole[:-1],
        whole + b"\0",
        whole[:-1] + bytes([whole[-1] ^ 1]),
        whole[:200] + bytes([whole[200] ^ 1]) + whole[201:],
        whole[:plan_bytes] + bytes(size) + whole[plan_bytes + size :],  # a chunk that was never written
        b"\xff" * 4 + whole[4:],
    ):
        caplog.clear()
        path.write_bytes(data)
        assert cache.finals(finals.plan.hash) is None
        assert f"{path} is damaged" in caplog.text


def test_finals_under_the_name_of_another_plan_are_not_taken(folder: Path) -> None:
    ledger, cache = Ledger(), cache_in(folder)
    ledger.certify(2)
    one, two = (ledger.finals[round].plan.hash for round in (1, 2))
    save_finals(cache, ledger.finals[1])
    (folder / "finals" / f"1-{one.hex()}").rename(folder / "finals" / f"2-{two.hex()}")
    assert cache.finals(two) is None


# -- lookup --------------------------------------------------------------------------------------------------


def test_lookup_finds_every_chunk_of_state_and_finals_and_nothing_else(folder: Path) -> None:
    ledger, cache = Ledger(), cache_in(folder)
    ledger.certify()
    state, finals = ledger.state, ledger.finals[1]
    cache.put(state, cache.header(state))
    cache.put_finals(finals)
    scope, plan_scope = cache.header(state).digest[:SCOPE_BYTES], finals.plan.hash[:SCOPE_BYTES]
    for space, vector in ((ChunkSpace.ANCHOR, state.anchor), (ChunkSpace.MOMENTUM, state.momentum)):
        chunks = [cache.lookup(ChunkRef(space, scope, chunk)) for chunk in range(GRID.chunks)]
        assert b"".join(bytes(chunk) for chunk in chunks if chunk is not None) == vector.tobytes()
        assert all(chunk is not None and chunk.readonly for chunk in chunks)
        assert cache.lookup(ChunkRef(space, plan_scope, 0)) is None
    for chunk in range(GRID.chunks):
        found = cache.lookup(ChunkRef(ChunkSpace.FINAL, plan_scope, chunk))
        assert found is not None
        assert found.tobytes() == finals.chunks[chunk].payload.tobytes()
    assert cache.lookup(ChunkRef(ChunkSpace.FINAL, scope, 0)) is None
    for space in ChunkSpace:
        for chunk in (GRID.chunks, GRID.chunks + 1, 2**32 - 1):
            for where in (scope, plan_scope, bytes(SCOPE_BYTES)):
                assert cache.lookup(ChunkRef(space, where, chunk)) is None


def test_finals_in_a_file_that_the_disk_has_changed_are_not_served(folder: Path) -> None:
    ledger, cache = Ledger(), cache_in(folder)
    ledger.certify()
    finals = ledger.finals[1]
    save_finals(cache, finals)
    cache.put_finals(finals)
    scope = finals.plan.hash[:SCOPE_BYTES]
    (path,) = (folder / "finals").iterdir()
    at = path.read_bytes().index(finals.chunks[1].payload.tobytes())
    trailer = at + finals.chunks[1].encoded.size
    for place in (at + 7, trailer + 3):
        with path.open("r+b") as file:
            file.seek(place)
            was = file.read(1)
            file.seek(place)
            file.write(bytes([was[0] ^ 1]))
        served = [cache.lookup(ChunkRef(ChunkSpace.FINAL, scope, chunk)) is not None for chunk in range(GRID.chunks)]
        assert served == [chunk != 1 for chunk in range(GRID.chunks)]
        with path.open("r+b") as file:
            file.seek(place)
            file.write(was)


def test_lookup_serves_the_last_states_and_forgets_older_ones(folder: Path) -> None:
    ledger, cache = Ledger(), cache_in(folder)
    ledger.certify(3)
    assert cache.newest_round() is None
    for state in ledger.states:
        cache.put(state, cache.header(state))
    held = [cache.state(round) is not None for round in range(4)]
    assert held == [False, False, True, True]
    assert cache.newest_round() == 3
    for state in ledger.states:
        ref = ChunkRef(ChunkSpace.ANCHOR, header_of(state, GRID).digest[:SCOPE_BYTES], 0)
        assert (cache.lookup(ref) is not None) == (state.round >= 2)


def test_lookup_serves_the_last_finals_and_forgets_older_ones(folder: Path) -> None:
    ledger, cache = Ledger(), cache_in(folder)
    ledger.certify(FINALS_KEPT + 2)
    for finals in ledger.finals.values():
        cache.put_finals(finals)
    served = [
        round
        for round, finals in ledger.finals.items()
        if cache.lookup(ChunkRef(ChunkSpace.FINAL, finals.plan.hash[:SCOPE_BYTES], 0)) is not None
    ]
    assert served == list(range(3, FINALS_KEPT + 3))


def test_header_is_computed_once_for_a_state_that_is_kept(folder: Path) -> None:
    cache, state = cache_in(folder), state_of(1)
    header = cache.header(state)
    assert header == header_of(state, GRID)
    assert cache.header(state) is not header
    cache.put(state, header)
    assert cache.header(state) is header
    other = state_of(1, seed=9)  # of the same round, but another
    assert cache.header(other).digest == header_of(other, GRID).digest != header.digest


def test_plan_that_cannot_be_followed_is_a_damaged_file(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Only its hash vouches for a plan; one that some other version wrote must not end the node."""
    ledger, cache = Ledger(), cache_in(folder)
    plan = plan_of([identity(1)], ledger.chain.head)
    for strange in (
        msgspec.structs.replace(plan, codec="fp3"),
        msgspec.structs.replace(plan, numel=0),
        msgspec.structs.replace(plan, owners=()),
        msgspec.structs.replace(plan, numel=2**62, chunk_values=1),
    ):
        caplog.clear()
        data = canonical(strange)
        (folder / "finals" / f"1-{strange.hash.hex()}").write_bytes(len(data).to_bytes(4, "little") + data)
        assert cache.finals(strange.hash) is None
        assert "is damaged" in caplog.text


def test_finals_on_disk_are_taken_into_memory_and_other_files_left_alone(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger()
    ledger.certify(3)
    for finals in ledger.finals.values():
        save_finals(cache_in(folder), finals)
    for name in ("README", "1-" + "x" * 64, "1-" + "0" * 64, "0" * 64, "one-" + "0" * 64, "1-" + "0" * 64 + ".partial"):
        (folder / "finals" / name).write_bytes(b"something else")
    cache = cache_in(folder)
    cache.load_finals()
    for finals in ledger.finals.values():
        held = cache.held_finals(finals.plan.hash)
        assert held is not None
        assert held.concatenated() == finals.concatenated()
        assert cache.lookup(ChunkRef(ChunkSpace.FINAL, finals.plan.hash[:SCOPE_BYTES], 0)) is not None
    assert (folder / "finals" / "README").exists()


def test_finals_that_a_saver_removes_while_they_are_loaded_are_done_without(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger()
    ledger.certify(3)
    for finals in ledger.finals.values():
        save_finals(cache_in(folder), finals)
    cache = cache_in(folder)
    found = cache._finals_files()
    monkeypatch.setattr(cache, "_finals_files", lambda: found)
    found[0][2].unlink()
    cache.load_finals()
    held = [round for round, finals in ledger.finals.items() if cache.held_finals(finals.plan.hash) is not None]
    assert held == [2, 3]


def test_what_a_crash_left_unfinished_is_removed(folder: Path) -> None:
    for name in ("state/3.safetensors.partial", f"finals/3-{'0' * 64}.partial"):
        (folder / name).write_bytes(b"half")
    cache = cache_in(folder)
    cache.save_state(state_of(2))
    cache.tidy()
    assert [path.name for path in folder.rglob("*") if path.is_file()] == ["2.safetensors"]


def test_finals_in_memory_are_bounded_in_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, cache = Ledger(), cache_in(folder)
    ledger.certify(6)
    size = sum(chunk.payload.nbytes for chunk in ledger.finals[1].chunks)
    for limit, kept in ((4 * size, [3, 4, 5, 6]), (4 * size - 1, [4, 5, 6]), (0, [5, 6])):
        monkeypatch.setattr(states_module, "FINALS_MEMORY_BYTES", limit)
        for finals in ledger.finals.values():
            cache.put_finals(finals)
        held = [round for round, finals in ledger.finals.items() if cache.held_finals(finals.plan.hash) is not None]
        assert held == kept


# -- states that somebody is fetching ------------------------------------------------------------------------


class Clock:
    """Virtual time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def cache_with(folder: Path, clock: Clock, rounds: int) -> StateCache:
    cache = StateCache(folder, GRID.chunk_values, clock=clock)
    for round in range(1, rounds + 1):
        put(cache, round)
    return cache


def put(cache: StateCache, round: int) -> None:
    state = state_of(round, seed=round)
    cache.put(state, cache.header(state))


def chunk_of(cache_or_header: bytes, chunk: int = 0) -> ChunkRef:
    return ChunkRef(ChunkSpace.ANCHOR, cache_or_header[:SCOPE_BYTES], chunk)


def test_state_is_held_while_somebody_fetches_it_and_let_go_afterwards(folder: Path) -> None:
    clock = Clock()
    cache = cache_with(folder, clock, 3)
    header = cache.begin_serving(3)
    assert header is not None
    want = state_of(3, seed=3).anchor[: GRID.chunk_values].tobytes()
    for round in range(4, 12):
        clock.now += PIN_S - 1
        put(cache, round)
        found = cache.lookup(chunk_of(header.digest))
        assert found is not None
        assert found.tobytes() == want  # the same, whatever rounds pass
        assert cache.held_rounds() == sorted({3, round - 1, round})
    clock.now += PIN_S + 1
    put(cache, 12)
    assert cache.held_rounds() == [11, 12]
    assert cache.lookup(chunk_of(header.digest)) is None
    assert cache.begin_serving(3) is None


def test_who_asks_for_something_else_pins_nothing(folder: Path) -> None:
    clock = Clock()
    cache = cache_with(folder, clock, 3)
    assert cache.state(3) is not None  # this node's own question
    assert cache.begin_serving(1) is None
    cache.lookup(ChunkRef(ChunkSpace.FINAL, state_digest(3), 0))
    for round in (4, 5):
        put(cache, round)
    assert cache.held_rounds() == [4, 5]


def state_digest(round: int) -> bytes:
    return header_of(state_of(round, seed=round), GRID).digest[:SCOPE_BYTES]


def test_pinned_states_are_bounded_and_the_last_asked_for_stay(folder: Path) -> None:
    clock = Clock()
    cache = cache_with(folder, clock, 1)
    for round in range(1, 10):
        clock.now += 0.1
        assert cache.begin_serving(round) is not None
        put(cache, round + 1)
    kept = list(range(9 - PINS_LIMIT_STATES, 9))
    assert cache.held_rounds() == [*kept, 9, 10]


def test_pinned_bytes_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states_module, "PINS_LIMIT_BYTES", 2 * 8 * GRID.numel)
    clock = Clock()
    cache = cache_with(folder, clock, 1)
    for round in range(1, 6):
        clock.now += 0.1
        cache.begin_serving(round)
        put(cache, round + 1)
    assert cache.held_rounds() == [3, 4, 5, 6]


def test_state_that_the_swarm_went_back_to_is_among_the_newest(folder: Path) -> None:
    """Rounds are not the order in which states come: a rollback puts an older one in the cache."""
    cache = cache_with(folder, Clock(), 5)
    put(cache, 2)
    assert cache.held_rounds() == [2, 5]
    put(cache, 3)
    assert cache.held_rounds() == [2, 3]


class Drain:
    """A peer that asked a cache for chunks, and takes their frames when it likes."""

    def __init__(self, cache: StateCache) -> None:
        self.queue = FrameQueue()
        self._exchange = ChunkExchange(post=self._post, lookup=cache.lookup)

    def _post(self, peer: PeerId, header: FrameHeader, payload: memoryview | bytes | Later) -> None:
        with self.queue.changed:
            self.queue.put(header, payload if callable(payload) else memoryview(payload))

    def ask(self, ref: ChunkRef) -> None:
        kind = FrameKind.REQUEST
        asked = FrameHeader(kind=kind, flags=ref.space, chunk=ref.chunk, scope=ref.scope, length=0)
        self._exchange.received(PeerId("slow"), asked)

    def take(self) -> tuple[FrameKind, bytes]:
        ((header, payload),) = self.queue.take(0)
        self.queue.done(header.length)
        return header.kind, bytes(payload)


def test_who_asks_for_each_state_and_takes_nothing_keeps_none_of_them(folder: Path) -> None:
    clock, rounds = Clock(), 12
    cache = cache_with(folder, clock, 0)
    drain, files = Drain(cache), []
    for round in range(1, rounds + 1):
        clock.now += PIN_S / 2
        put(cache, round)
        state = cache.state(round)
        assert state is not None
        files.append(weakref.ref(state.anchor))
        drain.ask(chunk_of(state_digest(round)))
        del state
    clock.now += PIN_S + 1
    put(cache, rounds + 1)
    gc.collect()
    assert [round for round, file in enumerate(files, 1) if file() is not None] == [rounds]
    assert drain.queue.queued_bytes == rounds * 4 * GRID.chunk_values
    answers = [drain.take() for _ in range(rounds)]
    newest = state_of(rounds, seed=rounds).anchor[: GRID.chunk_values].tobytes()
    assert answers == [(FrameKind.REFUSED, b"")] * (rounds - 1) + [(FrameKind.STATE, newest)]
    assert not drain.queue.waits
    assert drain.queue.queued_bytes == 0
    assert drain.queue.busy_since is None


def test_who_takes_slowly_what_it_asked_for_is_served_to_the_end(folder: Path) -> None:
    clock = Clock()
    cache, anchor = cache_with(folder, clock, 1), state_of(1, seed=1).anchor
    drain = Drain(cache)
    for chunk in range(GRID.chunks):
        drain.ask(chunk_of(state_digest(1), chunk))
    for chunk in range(GRID.chunks):  # and whatever rounds pass meanwhile
        put(cache, 2 + chunk)
        assert drain.take() == (FrameKind.STATE, anchor[slice(*GRID.span(chunk))].tobytes())
        clock.now += PIN_S - 1
    assert cache.held_rounds() == sorted({1, GRID.chunks, GRID.chunks + 1})


# -- finals on disk, served ----------------------------------------------------------------------------------


def test_finals_that_are_only_on_disk_are_served_chunk_by_chunk(folder: Path) -> None:
    ledger = Ledger()
    ledger.certify(3)
    cache = cache_in(folder)
    for finals in ledger.finals.values():
        save_finals(cache, finals)
    plan = ledger.finals[2].plan
    scope = plan.hash[:SCOPE_BYTES]
    assert cache.lookup(ChunkRef(ChunkSpace.FINAL, scope, 0)) is None  # nobody has asked for the plan
    assert cache.served_plan(plan.hash) == plan
    for chunk, final in enumerate(ledger.finals[2].chunks):
        found = cache.lookup(ChunkRef(ChunkSpace.FINAL, scope, chunk))
        assert found is not None
        assert found.tobytes() == final.payload.tobytes()
    assert cache.lookup(ChunkRef(ChunkSpace.FINAL, scope, GRID.chunks)) is None
    assert cache.held_finals(plan.hash) is None  # and nothing was loaded
    assert cache.served_plan(bytes(32)) is None


def test_finals_removed_while_they_are_served_are_served_to_the_end(folder: Path) -> None:
    ledger = Ledger()
    ledger.certify(1)
    cache, plan = cache_in(folder), ledger.finals[1].plan
    save_finals(cache, ledger.finals[1])
    cache.served_plan(plan.hash)
    for path in (folder / "finals").iterdir():
        path.unlink()
    found = cache.lookup(ChunkRef(ChunkSpace.FINAL, plan.hash[:SCOPE_BYTES], 1))
    assert found is not None
    assert found.tobytes() == ledger.finals[1].chunks[1].payload.tobytes()


@pytest.mark.parametrize("damage", ["empty", "short", "long", "no plan", "another plan"])
def test_damaged_finals_are_not_served(folder: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger()
    ledger.certify(2)
    cache, plan = cache_in(folder), ledger.finals[1].plan
    save_finals(cache, ledger.finals[1])
    (path,) = (folder / "finals").iterdir()
    data = path.read_bytes()
    other = canonical(ledger.finals[2].plan)
    path.write_bytes(
        {
            "empty": b"",
            "short": data[:-1],
            "long": data + b"\0",
            "no plan": b"\xff\xff\xff\x7f" + data[4:],
            "another plan": len(other).to_bytes(4, "little") + other + data[-sum_of(ledger, 1) :],
        }[damage]
    )
    assert cache.served_plan(plan.hash) is None
    assert damage == "another plan" or "is ignored" in caplog.text


def sum_of(ledger: Ledger, round: int) -> int:
    return sum(chunk.payload.nbytes for chunk in ledger.finals[round].chunks)


def test_plans_served_from_disk_at_once_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states_module, "FINALS_OPEN_LIMIT", 2)
    ledger = Ledger()
    ledger.certify(3)
    cache = cache_in(folder)
    for finals in ledger.finals.values():
        save_finals(cache, finals)
        assert cache.served_plan(finals.plan.hash) is not None
    served = [
        cache.lookup(ChunkRef(ChunkSpace.FINAL, finals.plan.hash[:SCOPE_BYTES], 0)) is not None
        for finals in ledger.finals.values()
    ]
    assert served == [False, True, True]


def test_finals_on_disk_are_bounded_in_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger()
    ledger.certify(14)
    monkeypatch.setattr(states_module, "FINALS_DISK_BYTES", 0)
    monkeypatch.setattr(CertifiedState, "nbytes", 200_000)
    cache = cache_in(folder)
    for finals in ledger.finals.values():
        save_finals(cache, finals)
    size = max(path.stat().st_size for path in (folder / "finals").iterdir())
    fit = ledger.states[12].nbytes // 2 // size
    assert FINALS_MIN < fit < 12
    for finals in ledger.finals.values():
        cache.put_finals(finals)
    cache.save_state(ledger.states[12])
    assert held_on_disk(folder, ledger) == list(range(13 - fit, 15))
    lookups = [ChunkRef(ChunkSpace.FINAL, finals.plan.hash[:SCOPE_BYTES], 0) for finals in ledger.finals.values()]
    assert [cache.lookup(ref) is not None for ref in lookups] == [round > 12 - fit for round in range(1, 15)]
    assert cache.held_finals(ledger.finals[1].plan.hash) is None  # mapped, it would keep its room on disk


def test_finals_of_the_last_rounds_stay_whatever_they_take(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger()
    ledger.certify(6)
    monkeypatch.setattr(states_module, "FINALS_DISK_BYTES", 0)
    monkeypatch.setattr(CertifiedState, "nbytes", 0)
    cache = cache_in(folder)
    for finals in ledger.finals.values():
        save_finals(cache, finals)
    cache.save_state(ledger.states[6])
    assert held_on_disk(folder, ledger) == [5, 6]
    assert FINALS_MIN == 2
