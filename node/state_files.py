"""States and finals as files: how they are laid out, written such that a crash cannot hurt, and read back.

    state    safetensors: vectors `anchor` and `momentum`; counters and the hashes of the chunks as metadata
    finals   length of the plan (u32) ‖ canonical plan ‖ payload of chunk 0 ‖ payload of chunk 1 ‖ …

A state is believed only where its digest is a certificate's. Finals carry their owners' signatures, and are of the plan
whose hash is in their name. Numbers are little-endian.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from pathlib import Path

import msgspec
import numpy as np

from shoal.collectives.codecs import F32, U8
from shoal.collectives.finals import FinalFormat, Finals
from shoal.collectives.state import CertifiedState, StateHeader, frozen
from shoal.node.store import SYNC_BYTES, disk_errors, sync_and_release, sync_folder, write_atomically
from shoal.node.tensor_files import DamagedFile, TensorFile
from shoal.protocol.errors import LocalError, StorageError
from shoal.protocol.messages import Plan, Term
from shoal.protocol.wire import canonical, decode

_LENGTH_BYTES = 4
_HEADER_ALIGNMENT_BYTES = 8


# -- states --------------------------------------------------------------------------------------------------


def write_state(path: Path, state: CertifiedState, header: StateHeader | None = None) -> None:
    """Write a state durably; a crash leaves it whole or not there. With its header, damage can be told by the chunk.

    Raises StorageError.
    """
    size = state.anchor.nbytes
    metadata = {
        "rebases": str(state.term.rebases),
        "rollbacks": str(state.term.rollbacks),
        "round": str(state.round),
        "tokens": str(state.tokens),
        "layout": state.layout_hash.hex(),
    }
    if header is not None:
        metadata |= {
            "chunk_values": str(header.chunk_values),
            "anchor_hashes": header.anchor.hex(),
            "momentum_hashes": header.momentum.hex(),
        }
    text = msgspec.json.encode(
        {
            "__metadata__": metadata,
            "anchor": {"dtype": "F32", "shape": [state.numel], "data_offsets": [0, size]},
            "momentum": {"dtype": "F32", "shape": [state.numel], "data_offsets": [size, 2 * size]},
        }
    )
    text += b" " * (-len(text) % _HEADER_ALIGNMENT_BYTES)
    head = len(text).to_bytes(8, "little") + text
    write_atomically(path, head, state.anchor.data.cast("B"), state.momentum.data.cast("B"))


def header_in(file: TensorFile) -> StateHeader | None:
    """The header that a state was written with, not believed yet; None if there is none, or none that holds."""
    told = file.metadata
    try:
        return StateHeader(
            term=Term(int(told["rebases"]), int(told["rollbacks"])),
            round=int(told["round"]),
            tokens=int(told["tokens"]),
            numel=(file.span("anchor")[1] - file.span("anchor")[0]) // 4,
            chunk_values=int(told["chunk_values"]),
            layout=bytes.fromhex(told["layout"]),
            anchor=bytes.fromhex(told["anchor_hashes"]),
            momentum=bytes.fromhex(told["momentum_hashes"]),
        )
    except (KeyError, ValueError, ZeroDivisionError, DamagedFile):
        return None


def read_state(path: Path) -> CertifiedState:
    """Read a state. Raises OSError, KeyError, ValueError or LocalError if the file is none."""
    try:
        file = TensorFile(path)
        vectors = [_read_vector(file, name) for name in ("anchor", "momentum")]
    except StorageError as error:
        raise ValueError(str(error)) from None
    told = file.metadata
    return CertifiedState(
        term=Term(int(told["rebases"]), int(told["rollbacks"])),
        round=int(told["round"]),
        tokens=int(told["tokens"]),
        layout_hash=bytes.fromhex(told["layout"]),
        anchor=frozen(vectors[0]),
        momentum=frozen(vectors[1]),
    )


def _read_vector(file: TensorFile, name: str) -> F32:
    """Read, and not mapped: what was checked once must not come from the disk again."""
    begin, end = file.span(name)
    numel = (end - begin) // 4
    if file.dtype(name) != "F32" or file.shape(name) != (numel,) or not numel:
        raise ValueError(f"{name} is no vector of float32")
    vector = np.fromfile(file.path, np.float32, numel, offset=file.data_offset + begin)
    if vector.size != numel:
        raise ValueError(f"{name} is cut short")
    return vector


# -- finals --------------------------------------------------------------------------------------------------


class FinalsWriter:
    """Writes the finals of one plan, each as it comes, in a thread of its own; the file is there after `finish`.

    Nothing of an unfinished file is ever believed: it has another name. Payloads are kept by reference until they are
    written. What has been written is synced along the way, so that little is left to wait for in the end. `add` and
    `abandon` never wait for the disk.
    """

    def __init__(self, path: Path, plan: Plan) -> None:
        self._path = path
        self._partial = path.with_name(path.name + ".partial")
        head = canonical(plan)
        self._head = len(head).to_bytes(_LENGTH_BYTES, "little") + head
        self._offsets = _offsets(plan, len(self._head))
        self._lock = threading.Lock()
        self._added: set[int] = set()
        self._ended = False
        self._file: int | None = None
        self._unsynced_bytes = 0
        self._failure: BaseException | None = None
        self._thread = ThreadPoolExecutor(1)
        self._thread.submit(self._try, self._open)

    def add(self, chunk: int, payload: U8) -> None:
        """Have the final payload of a chunk written; once per chunk, in any order. After the end it does nothing.

        Raises LocalError for a wrong size.
        """
        if payload.nbytes != self._offsets[chunk + 1] - self._offsets[chunk]:
            raise LocalError(f"a final payload of {payload.nbytes} bytes for chunk {chunk}")
        with self._lock:
            if chunk not in self._added and not self._ended:
                self._added.add(chunk)
                self._thread.submit(self._try, self._write, self._offsets[chunk], payload)

    def finish(self) -> None:
        """Return when the file is there for good. Raises StorageError, and LocalError if a chunk was not added."""
        if len(self._added) != len(self._offsets) - 1:
            self.abandon()
            raise LocalError(f"only {len(self._added)} of {len(self._offsets) - 1} finals to write")
        self._end(self._commit)
        self._thread.shutdown()
        if self._failure is not None:
            raise self._failure

    def abandon(self) -> None:
        """Write no more, and remove what was written."""
        self._failure = self._failure or LocalError("the finals are not wanted any more")
        self._end()

    def _end(self, *last: Callable[[], None]) -> None:
        with self._lock:
            if not self._ended:
                self._ended = True
                for step in last:
                    self._thread.submit(self._try, step)
                self._thread.submit(self._close)
                self._thread.shutdown(wait=False)

    # In the writer's thread. After a failure nothing more is tried.

    def _try(self, step: Callable[..., None], *args: object) -> None:
        if self._failure is None:
            try:
                with disk_errors(self._path.parent):
                    step(*args)
            except Exception as error:
                self._failure = error

    def _open(self) -> None:
        self._file = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._write(0, np.frombuffer(self._head, np.uint8))

    def _write(self, offset: int, payload: U8) -> None:
        assert self._file is not None
        data = payload.data
        while data:
            written = os.pwrite(self._file, data, offset)
            data, offset = data[written:], offset + written
        self._unsynced_bytes += payload.nbytes
        if self._unsynced_bytes >= SYNC_BYTES:
            self._sync()

    def _sync(self) -> None:
        assert self._file is not None
        sync_and_release(self._file)
        self._unsynced_bytes = 0

    def _commit(self) -> None:
        self._sync()
        self._partial.replace(self._path)
        sync_folder(self._path.parent)

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        if self._failure is not None:
            with contextlib.suppress(OSError):
                self._partial.unlink(missing_ok=True)


def read_finals(path: Path) -> Finals:
    """Read finals and check every signature. Raises OSError, ValueError, or a ShoalError if the file holds none."""
    data = memoryview(path.read_bytes())
    begin = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    plan = decode(bytes(data[_LENGTH_BYTES:begin]), Plan)
    offsets = _offsets(plan, begin)
    if len(data) != offsets[-1]:
        raise ValueError(f"{len(data)} bytes, not {offsets[-1]}")
    return Finals.open(plan, [data[start:stop] for start, stop in pairwise(offsets)])


def _offsets(plan: Plan, begin: int) -> list[int]:
    """Where each payload begins, and the last ends. Raises LocalError or ConfigError for a plan that cannot be."""
    form = FinalFormat(plan)
    return list(accumulate((form.payload_bytes(chunk) for chunk in range(form.grid.chunks)), initial=begin))
