"""Named tensors as safetensors files: written such that a crash cannot hurt, and believed only where they are whole.

A file carries the BLAKE3 hash of its tensors' bytes and of its other metadata, so that one that was cut short, or that
a disk has changed, is told apart from one that holds strange numbers.
Nothing in a file is ever evaluated; numbers are little-endian.
"""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from shoal.node.state.file_memory import NamedMemory, begin_of, give_name, mapping_of
from shoal.node.state.store import PAGE_BYTES, SYNC_BYTES, disk_errors, write_atomically
from shoal.protocol.errors import LocalError, StorageError
from shoal.protocol.folders import open_file, sync_folder

HEADER_LIMIT_BYTES = 64 << 20
"""Of names, shapes and metadata; the reference implementation allows 100 MB."""
HASH_THREADS = 4
THREADED_BYTES = 1 << 20
"""So many bytes and more are hashed in several threads: to begin these takes longer than to hash less."""
_LENGTH_BYTES = 8
_ALIGNMENT_BYTES = 8
_CHECKSUM = "blake3"
_CHECKSUM_CHARS = 64
_DTYPES: dict[str, str] = {
    "F64": "<f8",
    "I64": "<i8",
    "U64": "<u8",
    "F32": "<f4",
    "I32": "<i4",
    "U32": "<u4",
    "F16": "<f2",
    "BF16": "<u2",  # numpy has no such numbers: their bits
    "I16": "<i2",
    "U16": "<u2",
    "I8": "<i1",
    "U8": "<u1",
    "BOOL": "<u1",
}
"""The format's names of element types, and numpy's."""


class DamagedFile(StorageError):
    """A file of tensors that is not what was written; the text names it."""


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """One tensor on its way into a file: `data` has as many bytes as `dtype` (such as F32) and `shape` ask for."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    @staticmethod
    def of(name: str, array: npt.NDArray[np.generic]) -> TensorBytes:
        """`array` under this name; its bytes are not copied if it is contiguous. Raises LocalError for other types."""
        array = np.ascontiguousarray(array)
        names = [ours for ours, numpys in _DTYPES.items() if np.dtype(numpys) == array.dtype and ours != "BF16"]
        if not names:
            raise LocalError(f"tensor {name!r} is of {array.dtype}, which no file holds")
        return TensorBytes(name, names[0], array.shape, array.reshape(-1).view(np.uint8).data)


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=32)]
    data_offsets: tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[int, msgspec.Meta(ge=0)]]


def element_bytes(dtype: str) -> int:
    """Bytes of one element of this type. Raises KeyError for an unknown one."""
    return np.dtype(_DTYPES[dtype]).itemsize


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor that a file has room for: see `TensorBytes`."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes of it."""
        return math.prod(self.shape) * element_bytes(self.dtype)


class _Head:
    """The beginning of a file: where each tensor lies behind it, wide elements first, and how many bytes they take."""

    def __init__(self, places: Sequence[TensorPlace], metadata: Mapping[str, str]) -> None:
        self._metadata = metadata
        self._entries: dict[str, _Entry] = {}
        self.size = 0
        for place in sorted(places, key=lambda place: -element_bytes(place.dtype)):
            end = self.size + place.size
            self._entries[place.name] = _Entry(place.dtype, list(place.shape), (self.size, end))
            self.size = end

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors, as they lie one behind the other."""
        return tuple(self._entries)

    def span(self, name: str) -> slice:
        """Return where the bytes of a tensor lie behind this."""
        return slice(*self._entries[name].data_offsets)

    def data(self, checksum: str | None) -> bytes:
        """The bytes of it, as many for each checksum. Raises LocalError if they are too many."""
        metadata = self._metadata if checksum is None else {**self._metadata, _CHECKSUM: checksum}
        header = msgspec.json.encode({"__metadata__": metadata, **self._entries})
        alignment = _ALIGNMENT_BYTES if self.size < SYNC_BYTES else PAGE_BYTES
        header += b" " * (-(_LENGTH_BYTES + len(header)) % alignment)
        if len(header) > HEADER_LIMIT_BYTES:
            raise LocalError(f"a header of {len(header)} bytes")
        return len(header).to_bytes(_LENGTH_BYTES, "little") + header


def write_tensors(
    path: Path,
    tensors: Sequence[TensorBytes],
    metadata: Mapping[str, str],
    *,
    checksum: bool = True,
    option: str = "--data-dir",
) -> int:
    """Write `tensors` durably, those of wide elements first; a crash leaves the old file or the new one.

    checksum: whether `check_whole` is to hold of it; what has hashes of its own needs none. option: with which the user
    chose the folder. Returns the bytes written. Raises StorageError.
    """
    head = _Head([TensorPlace(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors], metadata)
    by_name = {tensor.name: tensor.data for tensor in tensors}
    ordered = [by_name[name] for name in head.names]
    found = None
    if checksum:
        hasher = _hasher(metadata, head.size)
        for data in ordered:
            hasher.update(data)
        found = hasher.hexdigest()
    with _written(path):
        if not _name_in_place(path, head, ordered, found):
            write_atomically(path, head.data(found), *ordered, option=option)
    return path.stat().st_size


def _name_in_place(path: Path, head: _Head, ordered: Sequence[memoryview], checksum: str | None) -> bool:
    """Have tensors that lie in a nameless file, as they are to lie in this, be the file; False if they do not."""
    mapping = mapping_of(ordered[0]) if ordered else None
    if mapping is None:
        return False
    places = [begin_of(np.frombuffer(data, np.uint8), mapping) for data in ordered if mapping_of(data) is mapping]
    *wanted, end = itertools.accumulate(map(len, ordered), initial=places[0])
    if places != wanted or end != len(mapping):
        return False
    header = head.data(checksum)[_LENGTH_BYTES:].rstrip(b" ").ljust(places[0] - _LENGTH_BYTES)
    data = len(header).to_bytes(_LENGTH_BYTES, "little") + header
    if len(data) > places[0]:  # there is no room for it
        return False
    if not mapping.is_named:
        mapping[: len(data)] = data
    return mapping[: len(data)] == data and give_name(mapping, path)  # what has a name stays as it is


@contextmanager
def _written(path: Path) -> Iterator[None]:
    """Have a StorageError name the file that was not written."""
    try:
        yield
    except StorageError as error:
        raise type(error)(f"{path} was not written: {error}") from error


class TensorsInPlace:
    """A file of tensors in the making, whose tensors are memory that lies in it: what is copied there is not written
    once more.

    Until it is finished it has another name; a crash leaves the old file or the new one.
    """

    def __init__(
        self,
        path: Path,
        places: Sequence[TensorPlace],
        metadata: Mapping[str, str],
        *,
        spare: NamedMemory | None = None,
    ) -> None:
        """Have room for these, in `spare` if that is large enough; it is gone if not.

        Raises StorageError if the disk has none, Unmappable if it has no files to map.
        """
        self._path, self._metadata = path, metadata
        self._partial = path.with_name(path.name + ".partial")
        self._head = _Head(places, metadata)
        begin = len(self._head.data("0" * _CHECKSUM_CHARS))
        self.size = begin + self._head.size
        with disk_errors(path.parent):
            if spare is not None and spare.fit(self._partial, self.size):
                self._memory = spare
            else:
                if spare is not None:
                    spare.path.unlink(missing_ok=True)
                self._memory = NamedMemory(self._partial, self.size)
        self._data = self._memory.data[begin:]

    def place(self, name: str) -> memoryview:
        """The bytes of a tensor, writeable."""
        return self._data[self._head.span(name)]

    def finish(self) -> int:
        """Have what lies in the places on disk, under the file's name; nothing may change any more. Returns its bytes.

        Raises StorageError, and then the file is not there.
        """
        hasher = _hasher(self._metadata, self._head.size)
        hasher.update(self._data)
        begin = self._head.data(hasher.hexdigest())
        self._memory.data[: len(begin)] = begin
        with _written(self._path), disk_errors(self._path.parent):
            self._memory.sync(SYNC_BYTES)
            self._partial.replace(self._path)
            sync_folder(self._path.parent)
        return self.size

    def abandon(self) -> None:
        """Remove what is not finished."""
        with suppress(OSError):
            self._partial.unlink(missing_ok=True)


def _hasher(metadata: Mapping[str, str], size: int) -> blake3:
    """Hash begun with a file's metadata, in as many threads as pay for `size` bytes of tensors."""
    threads = HASH_THREADS if size >= THREADED_BYTES else 1
    return blake3(msgspec.msgpack.encode(sorted(metadata.items())), max_threads=threads)


class TensorFile:
    """A file of tensors, mapped. The arrays are views of private memory: writing to them changes no file."""

    def __init__(self, path: Path) -> None:
        """Open a file and read its header. Raises DamagedFile, FileNotFoundError, StorageError."""
        self.path = path
        try:
            with open_file(path) as file:
                size = file.seek(0, 2)
                self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if size > _LENGTH_BYTES else b""
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror}; check the disk and the file's mode") from None
        if size <= _LENGTH_BYTES:
            raise self._damaged("it is cut short")
        view = memoryview(self._memory)
        length = int.from_bytes(view[:_LENGTH_BYTES], "little")
        if length > min(HEADER_LIMIT_BYTES, size - _LENGTH_BYTES):
            raise self._damaged("its header is cut short, or it is no safetensors file")
        self.data_offset = _LENGTH_BYTES + length
        self._data = view[self.data_offset :]
        try:
            raw = msgspec.json.decode(bytes(view[_LENGTH_BYTES : _LENGTH_BYTES + length]), type=dict[str, msgspec.Raw])
            found = raw.pop("__metadata__", None)
            self.metadata = {} if found is None else msgspec.json.decode(found, type=dict[str, str])
            self._entries = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in raw.items()}
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self._damaged(f"its header does not hold: {error}") from None
        self._check_layout()

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors in the file."""
        return tuple(self._entries)

    @property
    def data(self) -> memoryview:
        """The bytes after the header, as far as they are there."""
        return self._data

    def span(self, name: str) -> tuple[int, int]:
        """Return where the tensor's bytes begin and end in `data`, whether all are there or not. Raises DamagedFile."""
        return self._entry(name).data_offsets

    def check_whole(self) -> None:
        """Raises DamagedFile unless every byte is there and as it was written."""
        expected = self.metadata.get(_CHECKSUM)
        if len(self._data) != max((entry.data_offsets[1] for entry in self._entries.values()), default=0):
            raise self._damaged("it is cut short, or longer than it should be")
        metadata = {key: value for key, value in self.metadata.items() if key != _CHECKSUM}
        hasher = _hasher(metadata, len(self._data))
        hasher.update(self._data)
        if hasher.hexdigest() != expected:
            raise self._damaged("its contents have changed since it was written")

    def array(self, name: str) -> npt.NDArray[np.generic]:
        """The tensor as it lies in the file, BF16 as uint16. Raises DamagedFile if it is not there whole."""
        entry = self._entry(name)
        begin, end = entry.data_offsets
        if end > len(self._data):
            raise self._damaged("it is cut short")
        return np.frombuffer(self._data[begin:end], _DTYPES[entry.dtype]).reshape(entry.shape)

    def dtype(self, name: str) -> str:
        """The element type as the format names it. Raises DamagedFile."""
        return self._entry(name).dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape. Raises DamagedFile."""
        return tuple(self._entry(name).shape)

    def _entry(self, name: str) -> _Entry:
        try:
            return self._entries[name]
        except KeyError:
            raise self._damaged(f"it has no {name!r}") from None

    def _check_layout(self) -> None:
        """Tensors of known types follow each other without a gap."""
        at = 0
        for name, entry in sorted(self._entries.items(), key=lambda item: item[1].data_offsets):
            begin, end = entry.data_offsets
            numel = 1
            for extent in entry.shape:
                numel *= extent
            if entry.dtype not in _DTYPES or begin != at or end - begin != numel * element_bytes(entry.dtype):
                raise self._damaged(f"tensor {name!r} does not lie as its shape says")
            at = end

    def _damaged(self, why: str) -> DamagedFile:
        return DamagedFile(f"{self.path} is damaged: {why}; remove it, or put a good copy in its place")
