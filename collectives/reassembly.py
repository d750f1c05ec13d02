"""One payload growing out of the pieces that frames bring, in any order, some of them twice.

A piece is received straight into its place in the payload, without a copy. The memory lent out for that belongs to the
lane until it says that the piece is there; a lane may hang in the middle of writing it, and write on much later. So
bytes that are lent already, or there already, are never lent again: a second lane that brings them is given memory of
its own, and if what it brought overlaps with something lent, the payload first moves away from under the first lane.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shoal.collectives.codecs import U8
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerId

PIECE_LIMIT = 1024
"""Holes in one payload: a stranger who sends single bytes must not make us remember each."""

Span = tuple[int, int]


def fresh(size: int) -> U8:
    """(size,) uint8, whatever is in it."""
    return np.empty(size, np.uint8)


class ReassemblyBuffer:
    """A payload of `size` bytes from `sender`. Not thread-safe; its owner holds a lock.

    allocate: gives memory for the whole payload when the first piece comes.
    """

    __slots__ = ("_allocate", "_buffer", "_gaps", "_lent", "_sender", "_size")

    def __init__(self, size: int, sender: PeerId, allocate: Callable[[int], U8] = fresh) -> None:
        self._size = size
        self._sender = sender
        self._allocate = allocate
        self._buffer: U8 | None = None
        self._gaps: list[Span] = [(0, size)]
        self._lent: list[Span] = []

    def region(self, offset: int, length: int) -> memoryview | None:
        """Return the memory to put these bytes into; None if none of them is missing.

        Raises RemoteError if it makes too many pieces.
        """
        wanted = (offset, offset + length)
        missing = _cut(self._gaps, wanted)
        if not missing:
            return None
        if len(self._gaps) + len(self._lent) >= PIECE_LIMIT:
            raise RemoteError(f"a chunk in more than {PIECE_LIMIT} pieces", peer=self._sender)
        if missing != [wanted] or _cut(self._lent, wanted):
            return fresh(length).data
        self._lent.append(wanted)
        return self._memory().data[offset : offset + length]

    def add(self, offset: int, data: memoryview) -> bool:
        """The bytes are in `data`, a region of this payload or any other memory; True once nothing is missing."""
        span = (offset, offset + len(data))
        buffer = self._memory()
        own: object = data.obj
        if own is buffer and span in self._lent:
            self._lent.remove(span)
        elif new := _cut(self._gaps, span):
            if any(_cut(self._lent, part) for part in new):
                self._buffer = buffer = buffer.copy()
                self._lent.clear()
            for start, stop in new:
                buffer[start:stop] = np.frombuffer(data[start - offset : stop - offset], np.uint8)
        self._gaps = [part for gap in self._gaps for part in _without(gap, span)]
        return not self._gaps

    def joined(self) -> U8:
        """The complete payload, (size,) uint8; nobody else writes to it any more."""
        return self._memory()

    def _memory(self) -> U8:
        if self._buffer is None:
            self._buffer = self._allocate(self._size)
        return self._buffer


def _cut(spans: list[Span], by: Span) -> list[Span]:
    """Parts of `spans` that lie in `by`."""
    first, last = by
    cut = [(max(start, first), min(stop, last)) for start, stop in spans if start < last and first < stop]
    return cut if first < last else []


def _without(span: Span, hole: Span) -> list[Span]:
    """`span` without `hole`."""
    parts = ((span[0], min(span[1], hole[0])), (max(span[0], hole[1]), span[1]))
    return [part for part in parts if part[0] < part[1]]
