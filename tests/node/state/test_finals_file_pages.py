"""Payloads past the page cache: what is in the file, and what is done where that cannot be had."""

from __future__ import annotations

import errno
import fcntl
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from shoal.collectives.codecs import U8
from shoal.collectives.fragments import Fragments
from shoal.collectives.grid import Grid
from shoal.collectives.memory import VectorPool, own_array
from shoal.collectives.state import CertifiedState, frozen
from shoal.node.state import finals_file, store, tensor_files
from shoal.node.state.contributions import Contributions, write_work
from shoal.node.state.finals_file import DirectFile, paged
from shoal.node.state.state_files import write_state
from shoal.node.state.store import PAGE_BYTES, write_atomically
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Term

if TYPE_CHECKING:
    from typing_extensions import Buffer

SIZES = (300, PAGE_BYTES, 3 * PAGE_BYTES + 65, 1, 2 * PAGE_BYTES)


def payload(number: int, size: int, *, off: int) -> U8:
    """`size` bytes, `off` bytes behind the beginning of a page."""
    memory: U8 = own_array(off + size, np.uint8)
    memory[off:] = np.random.default_rng(number).integers(0, 256, size, np.uint8)
    return memory[off:]


def payloads(off: int = 0) -> list[U8]:
    return [payload(n, size, off=off) for n, size in enumerate(SIZES)]


def content(parts: Sequence[U8]) -> bytes:
    return b"".join(part.tobytes().ljust(paged(part.size), b"\0") for part in parts)


def write(path: Path, parts: Sequence[U8]) -> bool:
    """Write it; whether it went past the cache until the end."""
    with path.open("wb", buffering=0) as opened:
        file = DirectFile(opened.fileno())
        for part in parts:
            file.append(part)
        file.finish()
        return bool(fcntl.fcntl(opened.fileno(), fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0))


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int]]]:
    """Of each call, where the memory lay of each part, and how long it was."""
    calls: list[list[tuple[int, int]]] = []
    real = os.writev

    def note(file: int, parts: Sequence[memoryview]) -> int:
        calls.append([(np.frombuffer(part, np.uint8).ctypes.data, len(part)) for part in parts])
        return real(file, parts)

    monkeypatch.setattr(os, "writev", note)
    return calls


@pytest.mark.parametrize("off", [0, 16])
def test_payloads_begin_on_pages_with_zeros_between(tmp_path: Path, off: int) -> None:
    write(tmp_path / "file", payloads(off))
    assert (tmp_path / "file").read_bytes() == content(payloads(off))


def test_whole_pages_are_written_from_where_they_lie_and_all_parts_are_pages(
    tmp_path: Path, written: list[list[tuple[int, int]]]
) -> None:
    parts = payloads()
    write(tmp_path / "file", parts)
    (call,) = written
    assert all(place % PAGE_BYTES == size % PAGE_BYTES == 0 for place, size in call)
    large = [(part.ctypes.data, part.size // PAGE_BYTES * PAGE_BYTES) for part in parts if part.size >= PAGE_BYTES]
    assert len(large) == 3
    assert set(large) <= set(call)


def test_pieces_of_a_write_are_bounded(
    tmp_path: Path, written: list[list[tuple[int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finals_file, "SYNC_BYTES", 4 * PAGE_BYTES)
    write(tmp_path / "file", payloads())
    assert [sum(size for _, size in call) // PAGE_BYTES for call in written] == [6, 3]
    written.clear()
    monkeypatch.setattr(finals_file, "PARTS_LIMIT", 2)
    write(tmp_path / "file", payloads())
    assert [len(call) for call in written] == [2, 2, 2]
    assert (tmp_path / "file").read_bytes() == content(payloads())


def cannot(flags: list[int]) -> Callable[..., int]:
    """fcntl of a file system that has no direct writes."""
    real = fcntl.fcntl

    def call(file: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL:
            flags.append(argument)
            if argument & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no")
        return real(file, command, argument)

    return call


def test_without_direct_writes_it_is_synced_along_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags: list[int] = []
    synced: list[int] = []
    monkeypatch.setattr(fcntl, "fcntl", cannot(flags))
    monkeypatch.setattr(finals_file, "SYNC_BYTES", 4 * PAGE_BYTES)
    monkeypatch.setattr(finals_file, "sync_and_release", lambda file: synced.append(os.fstat(file).st_size))
    assert not write(tmp_path / "file", payloads())
    assert len(flags) == 1
    assert [size // PAGE_BYTES for size in synced] == [6, 9]
    assert (tmp_path / "file").read_bytes() == content(payloads())


@pytest.mark.parametrize("refused", ["first", "second"])
def test_disk_that_refuses_a_direct_write_is_written_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    real, calls = os.writev, 0

    def write_some(file: int, parts: Sequence[memoryview]) -> int:
        nonlocal calls
        calls += 1
        if fcntl.fcntl(file, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0) and (refused == "first" or calls == 2):
            raise OSError(errno.EINVAL, "no")
        # Half of what there is, which ends in the middle of a page where the cache allows it.
        some = b"".join(parts)[: 2 * PAGE_BYTES if calls == 1 else 5 * PAGE_BYTES + 7]
        return os.write(file, some) if calls > 1 or refused == "first" else real(file, parts[:1])

    monkeypatch.setattr(os, "writev", write_some)
    assert not write(tmp_path / "file", payloads())
    assert calls > 2
    assert (tmp_path / "file").read_bytes() == content(payloads())


@pytest.fixture
def direct_writes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Of each write of an atomic file, its length and whether it went past the cache; pieces are of four pages."""
    made: list[tuple[int, bool]] = []

    class Noting(io.FileIO):
        def write(self, data: Buffer, /) -> int:
            size = super().write(data)
            flags = fcntl.fcntl(self.fileno(), fcntl.F_GETFL)
            made.append((size, bool(flags & getattr(os, "O_DIRECT", 0))))
            return size

    monkeypatch.setattr(store, "SYNC_BYTES", 4 * PAGE_BYTES)
    monkeypatch.setattr(tensor_files, "SYNC_BYTES", 4 * PAGE_BYTES)
    monkeypatch.setattr(Path, "open", lambda path, mode, buffering=-1: Noting(path, mode.replace("b", "")))
    return made


def test_large_part_of_an_atomic_file_goes_past_the_cache_but_for_its_end(
    tmp_path: Path, direct_writes: list[tuple[int, bool]]
) -> None:
    head, part = bytes(PAGE_BYTES), payload(9, 9 * PAGE_BYTES + 77, off=0)
    write_atomically(tmp_path / "file", head, part.data)
    pages = [(4 * PAGE_BYTES, True), (4 * PAGE_BYTES, True), (PAGE_BYTES, True)]
    assert direct_writes == [(PAGE_BYTES, False), *pages, (77, False)]
    assert (tmp_path / "file").read_bytes() == head + part.tobytes()


@pytest.mark.parametrize(("head", "off", "size"), [(8, 0, 9), (PAGE_BYTES, 16, 9), (PAGE_BYTES, 0, 3)])
def test_part_that_is_small_or_does_not_lie_on_pages_goes_through_the_cache(
    tmp_path: Path, direct_writes: list[tuple[int, bool]], head: int, off: int, size: int
) -> None:
    part = payload(9, size * PAGE_BYTES, off=off)
    write_atomically(tmp_path / "file", bytes(head), part.data)
    assert not any(direct for _, direct in direct_writes)
    assert (tmp_path / "file").read_bytes() == bytes(head) + part.tobytes()


def test_atomic_file_on_a_file_system_without_direct_writes_is_whole(
    tmp_path: Path, direct_writes: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "fcntl", cannot([]))
    part = payload(9, 9 * PAGE_BYTES + 77, off=0)
    write_atomically(tmp_path / "file", part.data)
    assert not any(direct for _, direct in direct_writes)
    assert (tmp_path / "file").read_bytes() == part.tobytes()


@pytest.mark.parametrize("number", [1, 2])
def test_atomic_file_of_which_a_direct_write_is_refused_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    calls = 0

    class Refusing(io.FileIO):
        def write(self, data: Buffer, /) -> int:
            nonlocal calls
            calls += 1
            if calls == number:
                raise OSError(errno.EINVAL, "no")
            return super().write(data)

    monkeypatch.setattr(store, "SYNC_BYTES", 4 * PAGE_BYTES)
    monkeypatch.setattr(Path, "open", lambda path, mode, buffering=-1: Refusing(path, mode.replace("b", "")))
    part = payload(9, 9 * PAGE_BYTES + 77, off=0)
    write_atomically(tmp_path / "file", part.data)
    monkeypatch.undo()
    assert (tmp_path / "file").read_bytes() == part.tobytes()


def test_contributions_and_anchors_go_past_the_cache(tmp_path: Path, direct_writes: list[tuple[int, bool]]) -> None:
    numel = 5 * PAGE_BYTES + 3
    gradient = np.random.default_rng(1).standard_normal(numel).astype(np.float32)
    contributions = Contributions(Fragments(Grid(numel, PAGE_BYTES)), "fp32", 3, sender=PeerId("me"))
    made = contributions.make(1, 1, 100, gradient, base=bytes(32))
    write_work(tmp_path / "work", contributions.saved(made, Term()))
    whole = 4 * numel // PAGE_BYTES * PAGE_BYTES
    assert sum(size for size, direct in direct_writes if direct) == whole
    direct_writes.clear()
    anchor, momentum = (VectorPool(0).take(numel) for _ in range(2))
    anchor[:], momentum[:] = gradient, -gradient
    vectors = [frozen(anchor), frozen(momentum)]
    state = CertifiedState.of_vectors(vectors, term=Term(), round=1, tokens=9, layout_hash=bytes(32))
    write_state(tmp_path / "state", state)
    assert sum(size for size, direct in direct_writes if direct) == whole
    data = np.fromfile(tmp_path / "state", np.float32, offset=PAGE_BYTES)
    assert (data == np.concatenate([gradient, -gradient])).all()


def test_other_errors_are_the_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, parts: Sequence[memoryview]) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(OSError, match="full"):
        write(tmp_path / "file", payloads())
