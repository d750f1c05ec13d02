"""State of a trainer beside the certified one, copied to memory at once and written to disk beside the training.

    first.<parameter>, second.<parameter>   the inner optimizer's moments
    first_exponent.<parameter>, second_…    those of their blocks, where moments are in 8 bits
    steps                                   how often each parameter was moved, int64
    buffer.<name>                           counters and other state of the model that does not travel
    kept                                    progress that no contribution holds, where there is any: replica − its mark
    local                                   the replica itself, where anchors are mixed into it
    random.*                                generators of random numbers

and as metadata the round whose contribution it includes, the tokens of what is kept, the share of the data it drew
from last, and how many batches of it were drawn.

A snapshot amid a round holds `kept`, and as metadata the hash of the value that its anchor came of. It is written under
another name, and takes its place only while no contribution holds what is in it.

The copy is all that training waits for. It goes to where it will lie in the file, so that none as large lies beside it.
Fresh pages cost more than a copy: after one amid a round the file for the next is made, and has its pages, while
training goes on.
From a CUDA device not even that: a side stream copies while forward and backward leave the optimizer's state alone, and
the device waits before the step that changes it. Buffers, which a forward changes, are copied at once. That copy is in
page-locked memory, made once and used again, and is written from there.

Source of that: DataStates-LLM, arXiv 2406.10707, section 4.1.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol, Self

import msgspec
import numpy as np
import torch

from shoal.collectives.codecs import U8
from shoal.node.pipe import SUMMARY_LIMIT_CHARS, one_line
from shoal.node.state.file_memory import NamedMemory, Unmappable
from shoal.node.state.store import disk_errors
from shoal.node.state.tensor_files import (
    DamagedFile,
    TensorBytes,
    TensorFile,
    TensorPlace,
    TensorsInPlace,
    write_tensors,
)
from shoal.node.training.accounts import SavedAccounts
from shoal.node.training.random_state import RandomState
from shoal.node.training.trainer_messages import (
    SNAPSHOT_BASE,
    Assignment,
    Layout,
    Restore,
    Restored,
    Snapshot,
    Snapshotted,
)
from shoal.protocol.errors import LocalError, StorageError
from shoal.protocol.folders import sync_folder

METADATA = "trainer"
FORMAT = "shoal trainer 1"
BUFFER = "buffer."
"""Names of the model's buffers begin with this."""
SPARE = "midway.spare"
"""The name of a file for the next snapshot; those that begin so are left alone by who removes old ones."""
_PIECE_BYTES = 8 << 20
_FINITE_VALUES = 1 << 22
"""So many are looked at together for whether they are finite."""
_PLACE_BYTES = 64
"""Every tensor of the copy begins at a multiple of this: a cache line."""
_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


class InnerCounters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of a trainer's state. round: the last one that its contribution was for; drawn: batches so far.

    steps: since that contribution; kept_tokens, marked: those of `accounts.SavedAccounts`.
    """

    format: str = FORMAT
    layout: str
    round: Annotated[int, msgspec.Meta(ge=0)]
    steps: Annotated[int, msgspec.Meta(ge=0)]
    kept_tokens: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    marked: Annotated[int, msgspec.Meta(ge=0)] | None
    assignment: Assignment | None
    drawn: Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True, eq=False)
class InnerState:
    """Live tensors of a replica, by name, and its counters: what a copy is made of."""

    tensors: Sequence[tuple[str, torch.Tensor]]
    counters: InnerCounters
    random: RandomState

    @classmethod
    def of(
        cls,
        accounts: SavedAccounts,
        layout: Layout,
        device: torch.device,
        *,
        own: Sequence[tuple[str, torch.Tensor]] = (),
        assignment: Assignment | None = None,
        drawn: int = 0,
        random: RandomState | None = None,
    ) -> Self:
        """Collect what is kept beside these accounts. own: of optimizer and model; drawn: batches of the assignment.

        random: where it is not that of this process now.
        """
        vectors = (("kept", accounts.kept), ("local", accounts.local))
        counters = InnerCounters(
            layout=layout.digest.hex(),
            round=accounts.round,
            steps=accounts.steps,
            kept_tokens=accounts.tokens,
            marked=accounts.marked,
            assignment=assignment,
            drawn=drawn,
        )
        tensors = [*own, *((name, value) for name, value in vectors if value is not None)]
        return cls(tensors, counters, random or RandomState.capture(device))


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Result of writing a snapshot.

    copy_s: for how long the trainer waited; write_s: what the disk took beside it; failure: empty if there was none.
    """

    copy_s: float = 0.0
    write_s: float = 0.0
    size_bytes: int = 0
    failure: str = ""

    def report(self, order: Snapshot) -> Snapshotted:
        """Return the report of it to the daemon."""
        return Snapshotted(
            round=order.round,
            path=order.path,
            copy_s=self.copy_s,
            write_s=self.write_s,
            size_bytes=self.size_bytes,
            failure=self.failure[:SUMMARY_LIMIT_CHARS],
            midway=order.midway,
        )


class SnapshotBusy(LocalError):
    """The snapshot before is still being written."""


class Placing:
    """Moving a snapshot amid a round to its place, once it is written; not after it was withdrawn."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._withdrawn = False

    def place(self, written: Path, path: Path) -> None:
        """Have it on disk at `path`. Raises StorageError if it was withdrawn, and the file is gone."""
        with self._lock, disk_errors(path.parent):
            if self._withdrawn:
                written.unlink()
                raise StorageError("not written, since it must have nothing that a contribution holds")
            written.replace(path)
            sync_folder(path.parent)

    def withdraw(self) -> None:
        """Leave it out from here on, unless it is in its place. From any thread."""
        with self._lock:
            self._withdrawn = True


class TensorCopy(Protocol):
    """A copy of tensors in the making, that is a file once `finish` was called."""

    def place(self, name: str) -> memoryview:
        """Bytes for a tensor."""

    def finish(self) -> int:
        """Have it on disk; its bytes. Raises StorageError."""

    def abandon(self) -> None:
        """Leave nothing of it."""


class _WrittenCopy:
    """The same in memory that is there already: what a device copies to is page-locked."""

    def __init__(
        self, memory: memoryview, path: Path, places: Sequence[TensorPlace], metadata: Mapping[str, str]
    ) -> None:
        self._path, self._metadata = path, metadata
        self._tensors: dict[str, TensorBytes] = {}
        at = 0
        for place in places:
            data = memory[at : at + place.size]
            self._tensors[place.name] = TensorBytes(place.name, place.dtype, place.shape, data)
            at += _room_bytes(place)

    def place(self, name: str) -> memoryview:
        return self._tensors[name].data

    def finish(self) -> int:
        return write_tensors(self._path, list(self._tensors.values()), self._metadata)

    def abandon(self) -> None:
        """Nothing of it is on disk."""


class Snapshotter:
    """Copies states to where they are written, or are written from; one at a time."""

    def __init__(self) -> None:
        self._placing: Placing | None = None  # of the one amid a round that was ordered last
        self._memory = memoryview(b"")
        self._spare: NamedMemory | None = None
        self._largest: tuple[Path, int] | None = None  # that was ever made in a file: where, and its bytes
        self._preparing = threading.Lock()
        self._taken = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None

    def _begin(self, path: Path, places: Sequence[TensorPlace], metadata: Mapping[str, str]) -> TensorCopy:
        """Have room for a copy that becomes the file `path`; page-locked where there is a device.

        Raises StorageError if the disk has none.
        """
        if not torch.cuda.is_available():
            spare, self._spare = self._spare, None
            if self._largest is None:
                with suppress(OSError):  # of a process that is gone
                    (path.parent / SPARE).unlink(missing_ok=True)
            with suppress(Unmappable):
                made = TensorsInPlace(path, places, metadata, spare=spare)
                size = max(made.size, 0 if self._largest is None else self._largest[1])
                self._largest = path.parent / SPARE, size
                return made
        size = sum(map(_room_bytes, places))
        if len(self._memory) < size:
            pinned = torch.cuda.is_available()
            self._memory = torch.zeros(size, dtype=torch.uint8, device="cpu", pin_memory=pinned).numpy().data
        return _WrittenCopy(self._memory, path, places, metadata)

    def take(self, state: InnerState, path: Path, *, base: bytes = b"", began: float | None = None) -> Writing:
        """Copy `state`; what is returned writes it to `path`, then call `done`. Raises SnapshotBusy before that.

        base: of one amid a round; whoever comes after such a one waits for it. began: when training stopped for it,
        by the performance counter. Raises StorageError if there is no room to copy to; then `done` is not called.
        """
        began = time.perf_counter() if began is None else began
        if not self._taken.acquire(blocking=self._placing is not None and not base):
            raise SnapshotBusy("a snapshot was ordered while the one before it is being written")
        placing = self._placing = Placing() if base else None
        counters = {METADATA: msgspec.json.encode(state.counters).decode()}
        metadata = {**counters, **state.random.metadata(), **({SNAPSHOT_BASE: base.hex()} if base else {})}
        generators = state.random.tensors()
        places = [
            *(TensorPlace(name, _DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in state.tensors),
            *(TensorPlace(tensor.name, tensor.dtype, tensor.shape) for tensor in generators),
        ]
        written = path.with_name(path.name + ".new") if base else path
        try:
            copy = self._begin(written, places, metadata)
        except StorageError:
            self.done()
            raise
        for generator in generators:
            copy.place(generator.name)[:] = generator.data
        events = self._fill(copy, state.tensors)
        return Writing(
            path=path, written=written, copy=copy, events=events, copy_s=time.perf_counter() - began, placing=placing
        )

    def _fill(self, copy: TensorCopy, tensors: Sequence[tuple[str, torch.Tensor]]) -> tuple[torch.cuda.Event, ...]:
        """Copy the tensors to their places; what is on a device is there when the events have come."""
        pieces: list[tuple[U8, U8]] = []
        sides: dict[torch.device, torch.cuda.Stream] = {}
        for name, tensor in tensors:
            if not tensor.numel():
                continue
            place = torch.frombuffer(copy.place(name), dtype=tensor.dtype).view(tensor.shape)
            if tensor.device.type == "cpu" and tensor.is_contiguous():
                source = tensor.detach().reshape(-1).view(torch.uint8).numpy()
                pieces += _pieces(source, np.frombuffer(copy.place(name), np.uint8))
            elif tensor.is_cuda and not name.startswith(BUFFER):
                if tensor.device not in sides:
                    sides[tensor.device] = side = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
                    side.wait_stream(torch.cuda.current_stream(tensor.device))
                with torch.cuda.stream(sides[tensor.device]):
                    place.copy_(tensor.detach(), non_blocking=True)
                tensor.record_stream(sides[tensor.device])  # its memory may be another's before it is read
            else:
                place.copy_(tensor.detach())
        self._copy(pieces)
        return tuple(side.record_event() for side in sides.values())

    def withdraw(self) -> None:
        """Leave out a snapshot amid a round that is not in its place yet."""
        if self._placing is not None:
            self._placing.withdraw()

    def save(
        self,
        state: InnerState,
        order: Snapshot,
        send: Callable[[Snapshotted], None],
        *,
        began: float | None = None,
    ) -> Sequence[torch.cuda.Event]:
        """Copy `state`; write it where `order` says, and report it, in a thread. Refused while one is written.

        began: see `take`. Returns when what `state` holds may change again; nothing if it may at once.
        """
        began = time.perf_counter() if began is None else began
        try:
            writing = self.take(state, Path(order.path), base=order.base, began=began)
        except (SnapshotBusy, StorageError) as error:
            send(Written(copy_s=time.perf_counter() - began, failure=str(error)).report(order))
            return ()

        def write_and_report() -> None:
            try:
                written = writing.write()
            finally:
                self.done()  # or who comes next would wait for ever
            send(written.report(order))
            if order.midway:  # training stands still for the next; after a round's it has nothing else to do
                self.prepare()

        threading.Thread(target=write_and_report, name="snapshot", daemon=True).start()
        return writing.events

    def _copy(self, pieces: Sequence[tuple[U8, U8]]) -> None:
        """Copy the pieces in as many threads as torch has.

        Each thread takes the next piece: none waits for another before the end, as torch's own copies would after each
        tensor, and that is long on a machine that has other things to do.
        """
        if len(pieces) < 2 or torch.get_num_threads() == 1:
            for source, place in pieces:
                np.copyto(place, source)
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="copy")
        for _ in self._threads.map(lambda piece: np.copyto(piece[1], piece[0]), pieces):
            pass

    def done(self) -> None:
        """The memory may be used for the next one. From any thread."""
        self._taken.release()

    def prepare(self) -> None:
        """Have a file for the next copy, with pages of its own, unless there is one or the disk has no room for it.

        Blocks; from any thread, while training goes on.
        """
        if self._largest is None or not self._preparing.acquire(blocking=False):
            return
        try:
            if self._spare is None:
                with suppress(OSError, StorageError):
                    spare = NamedMemory(*self._largest)
                    spare.touch()
                    self._spare = spare
        finally:
            self._preparing.release()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Writing:
    """A state on its way to disk. events: of devices, when all of it is copied; placing: of one amid a round.

    written: where `copy` becomes a file, `path` itself but amid a round.
    """

    path: Path
    written: Path
    copy: TensorCopy
    events: Sequence[torch.cuda.Event] = ()
    copy_s: float = 0.0
    placing: Placing | None = None

    def write(self) -> Written:
        """Write it durably; a disk that does not take it is told, not raised. Blocks."""
        began = time.perf_counter()
        size, failure = 0, ""
        try:
            for event in self.events:
                event.synchronize()
            size = self.copy.finish()
            if self.placing is not None:
                self.placing.place(self.written, self.path)
        except Exception as error:  # the thread's boundary: the trainer goes on, and the daemon hears why
            self.copy.abandon()
            failure = " ".join(str(error).split()) or type(error).__name__
        return Written(copy_s=self.copy_s, write_s=time.perf_counter() - began, size_bytes=size, failure=failure)


def _pieces(source: U8, place: U8) -> list[tuple[U8, U8]]:
    return [
        (source[at : at + _PIECE_BYTES], place[at : at + _PIECE_BYTES]) for at in range(0, source.size, _PIECE_BYTES)
    ]


def _room_bytes(place: TensorPlace) -> int:
    """Bytes of memory that the copy of a tensor takes."""
    return -(-place.size // _PLACE_BYTES) * _PLACE_BYTES


def keepable(tensor: torch.Tensor) -> bool:
    """True if a file can hold tensors of this type."""
    return tensor.dtype in _DTYPE_NAMES


class SavedInner:
    """A snapshot as it was read back, every byte checked."""

    def __init__(self, path: Path) -> None:
        """Raises DamagedFile, naming the file, if it is not what was written; FileNotFoundError if it is not there."""
        self._file = TensorFile(path)
        self._file.check_whole()
        try:
            self.counters = msgspec.json.decode(self._file.metadata[METADATA], type=InnerCounters)
        except (KeyError, msgspec.MsgspecError) as error:
            raise DamagedFile(f"{path} is no snapshot of a trainer ({error}); remove it") from None
        if self.counters.format != FORMAT:
            raise DamagedFile(f"{path} is of format {self.counters.format!r}, not {FORMAT!r}; remove it")
        self.metadata = self._file.metadata
        self.random = RandomState.read(self._file)

    def check_layout(self, digest: bytes) -> None:
        """Raises DamagedFile unless it is of a model with this layout."""
        if self.counters.layout != digest.hex():
            raise DamagedFile(f"{self._file.path} is of another model; remove it")

    def check_finite(self) -> None:
        """Raises StorageError if what it learnt is not finite: whoever took it up would learn nothing any more."""
        for name in self._file.names:
            dtype = _DTYPES.get(self._file.dtype(name))
            if dtype is None or not dtype.is_floating_point:
                continue
            values = torch.from_numpy(self._file.array(name).reshape(-1).view("u1")).view(dtype)
            begins = range(0, values.numel(), _FINITE_VALUES)
            if not all(values[begin : begin + _FINITE_VALUES].isfinite().all() for begin in begins):
                raise StorageError(
                    f"{self._file.path} holds numbers that are not finite: a loss was not, or the learning rate is too "
                    "high; correct that, and nothing else is to be done"
                )

    def accounts(self, numel: int) -> SavedAccounts:
        """The accounts in it, of a model of so many parameters. Raises DamagedFile."""
        vectors: dict[str, torch.Tensor] = {}
        for name in ("kept", "local"):
            if name in self._file.names:
                vectors[name] = torch.zeros(numel, dtype=torch.float32, device="cpu")
                self.copy_to(name, vectors[name])
        return SavedAccounts(
            kept=vectors.get("kept"),
            local=vectors.get("local"),
            round=self.counters.round,
            steps=self.counters.steps,
            tokens=self.counters.kept_tokens,
            marked=self.counters.marked,
        )

    def check(self, name: str, like: torch.Tensor) -> None:
        """Raises DamagedFile unless it holds a tensor `name` of the type and shape of `like`."""
        found = self._file.array(name)
        if self._file.dtype(name) != _DTYPE_NAMES.get(like.dtype) or found.shape != tuple(like.shape):
            raise DamagedFile(f"{self._file.path} is of another model, {name!r} does not fit; remove it")

    @torch.no_grad()
    def copy_to(self, name: str, out: torch.Tensor) -> None:
        """Copy the tensor `name` into `out`, which it fits. Raises DamagedFile."""
        self.check(name, out)
        stored = torch.from_numpy(self._file.array(name).reshape(-1).view("u1"))
        out.copy_(stored.view(_DTYPES[self._file.dtype(name)]).view(out.shape))


def take_up(order: Restore, use: Callable[[SavedInner], None]) -> Restored:
    """Give `use` the snapshot that `order` names, or say why not.

    There is none, or no finite one, or `use` raised StorageError.
    """
    refused, tokens = "", 0
    try:
        saved = SavedInner(Path(order.path))
        tokens = sum(saved.counters.kept_tokens) // max(1, len(saved.counters.kept_tokens))
        if saved.counters.round != order.round:
            raise StorageError(f"{order.path} is of round {saved.counters.round}, not {order.round}; remove it")
        saved.check_finite()
        use(saved)
    except (StorageError, FileNotFoundError) as error:
        refused = one_line(error) if isinstance(error, FileNotFoundError) else str(error)
    return Restored(
        round=order.round,
        path=order.path,
        exact=order.exact,
        refused=refused[:SUMMARY_LIMIT_CHARS],
        tokens=0 if refused or order.spent or not order.exact else tokens,
    )
