"""Data folder of a node: what it keeps on disk, and the order in which it gets there.

    node.key            identity (0600)
    lock                held while a node runs on this folder
    boot                how often a node started here: orders its records
    swarm.toml          the manifest it runs
    agreement.log       promises, votes, proposals: durable before they are sent
    chain.log           certificates and rebases, in order
    peers.json          whom this node was linked with, and where (finding.py)
    invite, revocations the invite that it came with, and whom the authority took back (credentials.py)
    rebases.log         at the authority's: every rebase that was signed here (authority.py)
    forks.log           two certificates for one position, as this node saw them (fork_file.py)
    elsewhere           that this node's key was seen in use elsewhere (key_use.py)
    checkpoint          what the chain has to contain, by the link that this node came with (credentials.py)
    layout.json         names and shapes of the model's parameters, for exports
    evidence/<digest>   what proves that somebody lied (evidence_store.py)
    state/<round>.safetensors   certified states, saved beside the rounds: the newest may be some rounds back; and S(0)
    finals/<round>-<plan>       encoded finals: of the last rounds, for members that were late, and of all rounds
                                since the newest state here, to compute the ones after it
    resume/<term>-<round>.trainer, .work        what this node alone knows, of the last rounds (resumption.py)
    checkpoints/<term>-<round>/ everything of one round (checkpoints.py)
    rollback/<round>.safetensors    a state that this node agreed to go back to (earlier_states.py)
    rollback.order, amend.order     what its user wants of the swarm, as long as that stands (order_file.py)
    transfer/<term>-<round>-<digest>/   a state on its way here (transfer_files.py)
    events.jsonl        the event log
    rounds/<term>-<round>/      test mode only: contribution, plan, finals, applied

The two logs are append-only, in batches with one checksum each:

    batch   head ‖ check of head and body (CHECK_BYTES) ‖ body
    head    MAGIC ‖ u64 number of the batch, from 0 ‖ u32 length of the body ‖ check of these (CHECK_BYTES)
    body    of each record: u32 length ‖ record

All is little-endian, and a check is the beginning of a BLAKE3 hash. Release 0.1.0 wrote, and files of one record still
have: u32 length ‖ first 8 bytes of BLAKE3 of the record ‖ record. A log that begins so goes on in batches.

A write that a crash cut short is the last, and lacks bytes at its end, or has zeros where a block of the disk was never
written: nobody acted upon it, and it is cut off at the next start. Everything else that does not hold is damage: a bit
that flipped in whichever place, be it a length, a number or the last batch; a batch that is missing between two others.
What follows the damage is found again by MAGIC. Promises may be lost by it: the node then signs nothing in the rounds
that the lost ones may be of, until those are certified without it, or its user decides otherwise.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import logging
import os
import shlex
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Self

import msgspec
from blake3 import blake3

from shoal.node.state.folder_contents import check_no_others
from shoal.protocol.chain import Position, next_position
from shoal.protocol.durable import ABSTAIN, PASSED, DurableRecord
from shoal.protocol.errors import ConfigError, DiskFull, LocalError, RemoteError, StorageError
from shoal.protocol.folders import open_file, sync_folder
from shoal.protocol.messages import Entry, Term, Value
from shoal.protocol.private_folder import make_private
from shoal.protocol.wire import canonical, decode

SYNC_BYTES = 16 << 20
"""Of a file that is being written this much at most waits to be synced."""
PAGE_BYTES = 4096
"""Of a file; and so of the memory, where pages may be larger. A disk has no larger blocks."""
RECORD_LIMIT_BYTES = 1 << 20  # of a record of a log
BATCH_LIMIT_BYTES = 16 << 20  # of a batch of a log
MAGIC = b"SHB2"
"""Of a batch. As a length it would be far beyond RECORD_LIMIT_BYTES, so no older record begins so."""
CHECK_BYTES = 16
HEAD_BYTES = len(MAGIC) + 8 + 4 + CHECK_BYTES
OLD_CHECK_BYTES = 8
OLD_HEAD_BYTES = 4 + OLD_CHECK_BYTES
BLOCK_BYTES = 512
"""Bytes that a disk writes whole or not at all."""
HOLE_MIN_BYTES = 16
"""Zeros at the beginning or end of a batch that may be a block that was not written."""
AGREEMENT_LOG_LIMIT_BYTES = 1 << 20
"""Past this size the agreement log is rewritten with what still binds."""
FIRST: Position = (Term(), 1)
BOOT_DIGITS = 12
"""Of the counter of starts, at most."""
ABSTAINS = (
    "promises may be lost, so this node signs nothing until the others have certified the round under way; where they "
    "cannot without it, start it once with --forget-promises"
)

logger = logging.getLogger(__name__)


# --- how bytes come to disk ---


@contextlib.contextmanager
def disk_errors(path: Path, *, option: str = "--data-dir") -> Iterator[None]:
    """Turns an OSError of this folder's disk into a StorageError that says what to do.

    option: with which the user chose the folder.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            more = _more_than_there_is(path) if error.errno == errno.ENOSPC else ""
            raise DiskFull(
                f"the disk under {path} is full; free some space{more} or choose another {option}"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise StorageError(
                f"{path} cannot be written; give this user the folder or choose another {option}"
            ) from error
        raise StorageError(f"{path}: {error.strerror}; check the disk or choose another {option}") from error


def _more_than_there_is(path: Path) -> str:
    """Say what room there is where it was too little; nothing where that is under a megabyte, or cannot be known."""
    with contextlib.suppress(OSError):
        room = os.statvfs(next(place for place in (path, *path.parents) if place.exists()))
        free = room.f_bavail * room.f_frsize / 1e6
        if free >= 1:
            return f", more than the {free:,.0f} MB that there are,"
    return ""


def write_atomically(path: Path, *parts: bytes | memoryview, option: str = "--data-dir") -> None:
    """Replace `path` by the joined `parts` such that a crash leaves either the old or the new content.

    option: see `disk_errors`.

    Large files are synced piece by piece: the next small record that must be durable then waits for one piece at most.
    A large part whose memory and place in the file begin with a page goes past the page cache (see `finals_file`).
    Pieces of zeros, such as the momentum of S(0), take no room where the file system has holes.
    """
    with disk_errors(path.parent, option=option):
        partial = path.with_name(path.name + ".partial")
        try:
            with partial.open("wb", buffering=0) as file:
                for part in parts:
                    _write_part(file, memoryview(part))
                os.fsync(file.fileno())
            partial.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def write_output(path: Path, data: bytes) -> None:
    """Write what a user asked for to the place given by -o: a file is replaced whole, a pipe or a terminal written to.

    Raises StorageError.
    """
    with disk_errors(path, option="-o"):
        is_stream = path.exists() and not path.is_file()
        if is_stream:
            path.write_bytes(data)
    if not is_stream:
        write_atomically(path.resolve(), data, option="-o")


def _write_part(file: io.FileIO, part: memoryview) -> None:
    part = part[_write_direct(file, part) :]
    for start in range(0, len(part), SYNC_BYTES):
        _write_piece(file, part[start : start + SYNC_BYTES])


def _write_direct(file: io.FileIO, part: memoryview) -> int:
    """Write the whole pages of a large part past the cache; how many bytes went that way, 0 where it cannot be."""
    if len(part) < SYNC_BYTES or file.tell() % PAGE_BYTES:
        return 0
    import numpy as np  # takes longer than a command that writes nothing large

    if np.frombuffer(part, np.uint8).ctypes.data % PAGE_BYTES:
        return 0
    whole, written = part[: len(part) - len(part) % PAGE_BYTES], 0
    is_direct = set_direct(file.fileno(), True)
    try:
        while is_direct and written < len(whole):
            piece = whole[written : written + SYNC_BYTES]
            if _leave_hole(file, piece):
                written += len(piece)
            else:
                written += file.write(piece)
                sync_and_release(file.fileno())
    except OSError as error:
        if error.errno != errno.EINVAL:  # of pages or a file system that do not allow it after all
            raise
    finally:
        set_direct(file.fileno(), False)
    return written


def set_direct(file: int, wanted: bool) -> bool:
    """Have an open file written past the page cache, or not; whether it is."""
    flag = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(file, fcntl.F_GETFL) & ~flag
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | flag if wanted else flags)
    except OSError:  # of a file system that cannot
        return False
    return wanted and bool(flag)


def _leave_hole(file: io.FileIO, piece: memoryview) -> bool:
    """Go past a whole piece of zeros, which then takes no room; False of any other, which is to be written."""
    if len(piece) < SYNC_BYTES or bytes(piece[:PAGE_BYTES]).strip(b"\0") or bytes(piece).strip(b"\0"):
        return False
    file.truncate(file.seek(len(piece), os.SEEK_CUR))
    return True


def _write_piece(file: io.FileIO, piece: memoryview) -> None:
    whole = len(piece) == SYNC_BYTES
    if _leave_hole(file, piece):
        return
    while piece:
        piece = piece[file.write(piece) :]
    if whole:
        sync_and_release(file.fileno())


def sync_and_release(file: int) -> None:
    """fsync, and give the memory of what was written back to the system: only a restart reads it again.

    Kept, it would be other memory for every file, and pages that are fresh cost more than the copy into them.
    """
    os.fsync(file)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


# --- logs ---


class Fault(StrEnum):
    """Kind of fault in a log."""

    TORN = "cut short"
    DAMAGED = "damaged"


@dataclass(slots=True)
class Reading:
    """Content of a log. `good` bytes hold, and have `records`; the batch after them would be number `number`.

    later: records in batches that hold behind what does not.
    """

    records: list[bytes] = field(default_factory=list)
    good: int = 0
    number: int = 0
    fault: Fault | None = None
    later: list[bytes] = field(default_factory=list)


def frame_batch(number: int, records: Sequence[bytes]) -> bytes:
    """These records as the batch of that number."""
    body = b"".join(len(record).to_bytes(4, "little") + record for record in records)
    head = MAGIC + number.to_bytes(8, "little") + len(body).to_bytes(4, "little")
    head += _check(head)
    return head + _check(head, body) + body


def frame_record(record: bytes) -> bytes:
    """A record as it stands in a file of one, and in logs of release 0.1.0."""
    return len(record).to_bytes(4, "little") + blake3(record).digest(OLD_CHECK_BYTES) + record


def read_frames(data: bytes) -> Reading:
    """Read a log of which these are the bytes. Never raises."""
    reading, batched = Reading(), False
    while reading.good < len(data):
        at = reading.good
        batch = _batch(data, at)
        if batch is not None and batch.number == reading.number:
            reading.records += batch.records
            reading.good, reading.number, batched = batch.end, reading.number + 1, True
            continue
        record = None if batched else _old_record(data, at)
        if record is None:
            _judge_rest(data, reading, batched)
            break
        reading.records.append(record)
        reading.good = at + OLD_HEAD_BYTES + len(record)
    return reading


@dataclass(frozen=True, slots=True)
class _Batch:
    number: int
    records: list[bytes]
    end: int


def _check(*parts: bytes) -> bytes:
    return blake3(b"".join(parts)).digest(CHECK_BYTES)


def _head(data: bytes, at: int) -> tuple[int, int] | None:
    """Number and length of the batch that begins there; None if its head does not hold."""
    head = data[at : at + HEAD_BYTES]
    plain, check = head[:-CHECK_BYTES], head[-CHECK_BYTES:]
    if len(head) < HEAD_BYTES or head[: len(MAGIC)] != MAGIC or _check(plain) != check:
        return None
    return int.from_bytes(plain[4:12], "little"), int.from_bytes(plain[12:16], "little")


def _batch(data: bytes, at: int) -> _Batch | None:
    head = _head(data, at)
    if head is None:
        return None
    number, length = head
    begin = at + HEAD_BYTES + CHECK_BYTES
    body = data[begin : begin + length]
    if len(body) < length or _check(data[at : at + HEAD_BYTES], body) != data[at + HEAD_BYTES : begin]:
        return None
    records, place = [], 0
    while place < length:
        size = int.from_bytes(body[place : place + 4], "little")
        records.append(body[place + 4 : place + 4 + size])
        place += 4 + size
    return _Batch(number, records, begin + length)


def _old_record(data: bytes, at: int) -> bytes | None:
    length = int.from_bytes(data[at : at + 4], "little")
    record = data[at + OLD_HEAD_BYTES : at + OLD_HEAD_BYTES + length]
    whole = at + OLD_HEAD_BYTES + length <= len(data) and length <= RECORD_LIMIT_BYTES
    return record if whole and blake3(record).digest(OLD_CHECK_BYTES) == data[at + 4 : at + OLD_HEAD_BYTES] else None


def _judge_rest(data: bytes, reading: Reading, batched: bool) -> None:
    """Find out whether the bytes that do not hold are torn or damaged, and which records hold behind them."""
    at = reading.good
    reading.later = _batches_after(data, at) or ([] if batched else _old_after(data, at))
    torn = _is_torn_batch(data, at) if batched or data[at : at + 4] == MAGIC else _is_torn_record(data, at)
    torn |= not data[at:].strip(b"\0") or _is_torn_magic(data[at:])
    reading.fault = Fault.TORN if torn and not reading.later else Fault.DAMAGED


def _is_torn_magic(rest: bytes) -> bool:
    return len(rest) < len(MAGIC) and MAGIC.startswith(rest)


def _is_torn_batch(data: bytes, at: int) -> bool:
    """True if the last batch lacks bytes that were never written."""
    head, size = _head(data, at), len(data) - at
    if size < HEAD_BYTES:
        return True
    cut = head is not None and head[1] <= BATCH_LIMIT_BYTES and size < HEAD_BYTES + CHECK_BYTES + head[1]
    return cut or _has_hole(data, at)


def _is_torn_record(data: bytes, at: int) -> bool:
    """The same of a record of release 0.1.0, whose length has no check: one that fits to the end was whole."""
    length, rest = int.from_bytes(data[at : at + 4], "little"), data[at + OLD_HEAD_BYTES :]
    if len(data) - at < OLD_HEAD_BYTES:
        return True
    whole = blake3(rest).digest(OLD_CHECK_BYTES) == data[at + 4 : at + OLD_HEAD_BYTES]
    return (length <= RECORD_LIMIT_BYTES and len(rest) < length and not whole) or _has_hole(data, at)


def _has_hole(data: bytes, at: int) -> bool:
    """True if a block of the disk, or the part of one at either end, is all zeros."""
    edges = [at, *range(at - at % BLOCK_BYTES + BLOCK_BYTES, len(data), BLOCK_BYTES), len(data)]
    pieces = (data[begin:end] for begin, end in pairwise(edges))
    return any(len(piece) >= HOLE_MIN_BYTES and not piece.strip(b"\0") for piece in pieces)


def _batches_after(data: bytes, at: int) -> list[bytes]:
    """The records of all batches that hold after `at`."""
    found: list[bytes] = []
    at = data.find(MAGIC, at)
    while at >= 0:
        batch = _batch(data, at)
        if batch is not None:
            found += batch.records
        at = data.find(MAGIC, at + 1 if batch is None else batch.end)
    return found


def _old_after(data: bytes, at: int) -> list[bytes]:
    """The records of release 0.1.0 from the first on that holds after the one at `at`."""
    for begin in range(at + 1, min(len(data) - OLD_HEAD_BYTES, at + OLD_HEAD_BYTES + RECORD_LIMIT_BYTES) + 1):
        record = _old_record(data, begin)
        if record:
            rest = read_frames(data[begin:])
            return rest.records + rest.later
    return []


class RecordLog:
    """An append-only file of checked records. `recovered` are those that hold from its beginning on.

    `damaged` tells that more was there and does not hold; `later` are those that hold behind the damage. Such a file is
    left as it is until its owner calls `rewrite`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._may_be_replaced = False
        self._open()

    def _open(self) -> None:
        path = self._path
        with disk_errors(path.parent):
            reading = read_frames(path.read_bytes() if path.exists() else b"")
            self.recovered, self.later, self._number = reading.records, reading.later, reading.number
            self.damaged = reading.fault is Fault.DAMAGED
            with contextlib.ExitStack() as opened:
                self._file = opened.enter_context(path.open("ab", buffering=0))
                if reading.fault is Fault.TORN:  # by a crash: it was never acted upon
                    logger.warning("%s: its last record was cut short by a crash, and is cut off", path)
                    self._file.truncate(reading.good)
                # A process that was killed may have written the last record and not synced it; what is read here binds.
                # And a file that is new is found again after a power cut only once its folder is synced.
                os.fsync(self._file.fileno())
                sync_folder(path.parent)
                opened.pop_all()

    def append(self, *payloads: bytes) -> None:
        """Write these records as one batch and return when they are on disk. Raises StorageError; then none is."""
        for payload in payloads:
            if len(payload) > RECORD_LIMIT_BYTES:
                raise LocalError(f"a record of {len(payload)} bytes; the limit is {RECORD_LIMIT_BYTES}")
        if self._may_be_replaced:
            before = self._file
            self._open()
            before.close()
            self._may_be_replaced = False
        if self.damaged:
            raise LocalError(f"{self._path} is damaged, and was not rewritten")
        batch = frame_batch(self._number, payloads)
        if len(batch) > BATCH_LIMIT_BYTES:
            raise LocalError(f"a batch of {len(batch)} bytes; the limit is {BATCH_LIMIT_BYTES}")
        good = self.size
        with disk_errors(self._path.parent):
            try:
                if self._file.write(batch) != len(batch):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(self._file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    self._file.truncate(good)  # half a batch would hide all that come after it
                raise
        self._number += 1

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return os.fstat(self._file.fileno()).st_size

    def keep_damaged(self) -> Path:
        """Have a copy of the damaged file beside it, for whoever wants to know; where. Raises StorageError."""
        path = self._path.with_name(self._path.name + ".damaged")
        with disk_errors(self._path.parent):
            write_atomically(path, self._path.read_bytes())
        return path

    def rewrite(self, payloads: list[bytes]) -> None:
        """Replace all records by these, atomically.

        Raises StorageError; what is appended then goes behind whichever of both the disk has.
        """
        self._may_be_replaced = True  # also where it fails after that
        write_atomically(self._path, b"".join(frame_batch(number, [one]) for number, one in enumerate(payloads)))
        with disk_errors(self._path.parent):
            file = self._path.open("ab", buffering=0)
        self._file.close()
        self._file, self._number, self.damaged = file, len(payloads), False
        self._may_be_replaced = False

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_records(path: Path) -> tuple[list[bytes], int]:
    """The whole records at the start of a log, which may be growing meanwhile, and how many bytes they take."""
    data = b""
    if path.exists():
        with open_file(path) as file:
            data = file.read()
    reading = read_frames(data)
    return reading.records, reading.good


# --- the folder ---


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a data folder, on which no node runs meanwhile. Raises ConfigError if one does, StorageError."""
    with contextlib.ExitStack() as opened:
        with disk_errors(folder):
            lock = opened.enter_context((folder / "lock").open("w"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"a node is already running on {folder}; stop it with "
                f"`shoal leave --data-dir {shlex.quote(str(folder))}` or choose another --data-dir"
            ) from None
        yield


class Store:
    """A node's data folder, locked for one running node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with contextlib.ExitStack() as opened:  # all of it, or nothing
            with disk_errors(folder):
                if not (folder / "agreement.log").exists():
                    check_no_others(folder)
                make_private(folder)
                for name in ("state", "finals"):  # synced with the logs that are made in it
                    (folder / name).mkdir(exist_ok=True)
            opened.enter_context(locked(folder))
            self._agreement = opened.enter_context(contextlib.closing(RecordLog(folder / "agreement.log")))
            self._chain = opened.enter_context(contextlib.closing(RecordLog(folder / "chain.log")))
            self._bound = self._read_agreement()
            self._floor = max(map(_position, self._bound), default=FIRST)
            self.damage: list[str] = []
            """Messages about damaged logs, one line each, for the log and the user."""
            if self._agreement.damaged or self._chain.damaged:
                self._mend()
            self._opened = opened.pop_all()

    def _read_agreement(self) -> list[DurableRecord]:
        payloads = (*self._agreement.recovered, *self._agreement.later)
        try:
            return [decode(payload, DurableRecord) for payload in payloads]
        except RemoteError as error:
            raise StorageError(
                f"{self.folder / 'agreement.log'} is damaged ({error}); choose another --data-dir to join as a new node"
            ) from None

    def _mend(self) -> None:
        """Write down what a damaged log may have bound this node to, and only then go on without what is damaged.

        Whatever was signed in a round was signed after the certificate of the round before was in chain.log. So what
        the agreement log lost is of the round after the newest certificate at most; of the one after that, if the
        newest certificate itself may be what is damaged. What a damaged chain.log lost is fetched again: meanwhile
        nothing is signed in rounds that were over before. Both are never rewritten at once: what an earlier start noted
        before it was cut short holds on.
        """
        agreement, chain = self._agreement.damaged, self._chain.damaged
        readable = [*self._chain.recovered, *self._chain.later]
        over = next_position(decode_entry(readable[-1]).value) if readable else FIRST
        self._floor = max(self._floor, over)
        marks = [_mark(PASSED, self._floor)]
        if agreement:
            term, round = self._floor
            marks.append(_mark(ABSTAIN, (term, round + 1) if chain else (term, round)))
            kept = self._agreement.keep_damaged()
            self._say(f"{self._path(self._agreement)} is damaged (kept as {kept.name}): {ABSTAINS}")
        if chain:
            kept = self._chain.keep_damaged()
            self._say(f"{self._path(self._chain)} is damaged (kept as {kept.name}): what it lost is fetched again")
        self._bound = marks + [record for record in self._bound if record.kind != PASSED]
        self._agreement.rewrite([canonical(record) for record in self._bound])
        if chain:
            self._chain.rewrite(self._chain.recovered)

    def _say(self, line: str) -> None:
        logger.error("%s", line)
        self.damage.append(line)

    def _path(self, log: RecordLog) -> Path:
        return self.folder / ("agreement.log" if log is self._agreement else "chain.log")

    def abstains(self, position: Position) -> bool:
        """True if this node may have signed in the round at `position` what it no longer knows."""
        lost = max((_position(record) for record in self._bound if record.kind == ABSTAIN), default=None)
        return position < self._floor or (lost is not None and position <= lost)

    def bound_in(self, position: Position) -> list[DurableRecord]:
        """Records that bind this node in the round at `position`: one to abstain, where what it signed may be lost."""
        if self.abstains(position):
            return [_mark(ABSTAIN, position)]
        return [record for record in self.durable_records() if _position(record) == position]

    def forget_promises(self, head: Value) -> None:
        """Sign again where promises may be lost, as the user decided; those that are known still bind.

        head: of the chain. Raises StorageError.
        """
        due = next_position(head)
        self._bound = [r for r in self._bound if r.kind not in (PASSED, ABSTAIN) and _position(r) == due]
        self._agreement.rewrite([canonical(record) for record in self._bound])
        self._floor = due

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._opened.close()

    def check_room(self) -> None:
        """Raise DiskFull where the next state would not fit beside those that are here: only then do the old ones go.

        A node that started all the same would train, fail at its first save, and be missed by the others again.
        """
        with disk_errors(self.folder):
            state = max((path.stat().st_size for path in (self.folder / "state").glob("*.safetensors")), default=0)
            free = shutil.disk_usage(self.folder).free
        if free < state:
            raise DiskFull(
                f"the disk under {self.folder} has {free / 1e6:.1f} MB left, and the next state takes "
                f"{state / 1e6:.1f} MB; free some space or choose another --data-dir"
            )

    def next_boot(self, *, above: int = 0) -> int:
        """Count this start, durably, and return its number, which is greater than `above`.

        A counter that is damaged goes on from the seconds since 1970: nobody was started as often.
        """
        path = self.folder / "boot"
        with disk_errors(self.folder):
            counted = path.read_bytes().strip() if path.exists() else b"0"
        if not (counted.isdigit() and len(counted) <= BOOT_DIGITS):
            counted = b"%d" % time.time()
            self._say(f"{path} is damaged: this node's starts are counted on from {int(counted)}, more than there were")
        number = max(int(counted), above) + 1
        write_atomically(path, f"{number}\n".encode())
        return number

    def durable_records(self) -> list[DurableRecord]:
        """Records by which this node bound itself in rounds that are not decided, before a restart and since."""
        return [record for record in self._bound if record.kind != PASSED]

    def persist(self, *records: DurableRecord) -> None:
        """Make promises durable, all at once. Raises StorageError; what depends on them must then not be sent."""
        self._agreement.append(*map(canonical, records))
        self._bound += records
        self._floor = max([self._floor, *map(_position, records)])

    def decided(self, value: Value) -> None:
        """Drop what was promised before the round after `value`, which binds nobody now; cut a log that has grown."""
        begins = next_position(value)
        self._bound = [record for record in self._bound if _position(record) >= begins]
        if self._agreement.size > AGREEMENT_LOG_LIMIT_BYTES:
            kept = [_mark(PASSED, begins), *self.durable_records()]  # all before is over, whatever becomes of chain.log
            self._agreement.rewrite([canonical(record) for record in kept])

    def certificates(self) -> list[Entry]:
        """The chain as far as this node had it."""
        return self._entries(self._chain.recovered)

    def certificates_behind_damage(self) -> list[Entry]:
        """Entries that hold behind the damage that was found in the log at this start: they lack those between."""
        return self._entries(self._chain.later)

    def _entries(self, payloads: Iterable[bytes]) -> list[Entry]:
        try:
            return [decode_entry(payload) for payload in payloads]
        except (msgspec.DecodeError, UnicodeDecodeError, RemoteError) as error:
            raise StorageError(
                f"{self.folder / 'chain.log'} is damaged ({error}); remove it to fetch it anew"
            ) from None

    def replace_chain(self, entries: Iterable[Entry]) -> None:
        """Have another chain on disk, as the authority went on with it. Raises StorageError, and the old one stays."""
        self._chain.rewrite([canonical(entry) for entry in entries])

    def append_certificate(self, entry: Entry) -> None:
        """Extend the chain on disk; a rebase goes behind what it abandons."""
        self._chain.append(canonical(entry))


def decode_entry(payload: bytes) -> Entry:
    """The entry of a chain in a record of this node's own disk. Raises what msgspec raises."""
    entry: Entry = msgspec.msgpack.decode(payload, type=Entry)
    return entry


def _position(record: DurableRecord) -> Position:
    return record.term, record.round


def _mark(kind: str, position: Position) -> DurableRecord:
    return DurableRecord(kind=kind, term=position[0], round=position[1])
