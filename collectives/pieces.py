"""One payload growing out of the pieces that frames bring, in any order, some of them twice.

Every piece keeps the memory it was received into, so a lane that hangs in the middle of writing one can never touch
what another lane has meanwhile delivered; only a payload of several pieces is copied, once, when it is complete.
"""

from __future__ import annotations

import numpy as np

from shoal.collectives.codecs import U8
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerId

PIECE_LIMIT = 1024
"""Pieces of one payload: a stranger who sends single bytes must not make us keep an object for each."""


class Pieces:
    """Not thread-safe; its owner holds a lock."""

    __slots__ = ("_gaps", "_pieces", "_sender")

    def __init__(self, size: int, sender: PeerId) -> None:
        self._sender = sender
        self._gaps = [(0, size)]
        self._pieces: list[tuple[int, memoryview]] = []

    def wants(self, offset: int, length: int) -> bool:
        """Whether any of these bytes is still missing."""
        return any(start < offset + length and offset < stop for start, stop in self._gaps)

    def add(self, offset: int, data: memoryview) -> bool:
        """Keep what is new in `data`; True once nothing is missing.

        Raises RemoteError, with nothing kept, if it makes too many pieces.
        """
        end, gaps, new = offset + len(data), [], []
        for start, stop in self._gaps:
            low, high = max(start, offset), min(stop, end)
            if low >= high:
                gaps.append((start, stop))
                continue
            new.append((low, data[low - offset : high - offset]))
            gaps += [gap for gap in ((start, low), (high, stop)) if gap[0] < gap[1]]
        if len(self._pieces) + len(new) > PIECE_LIMIT:
            raise RemoteError(f"a chunk in more than {PIECE_LIMIT} pieces", peer=self._sender)
        self._pieces += new
        self._gaps = gaps
        return not gaps

    def joined(self) -> U8:
        """The complete payload, (size,) uint8; not a copy where it came in one piece."""
        parts = [np.frombuffer(data, np.uint8) for _, data in sorted(self._pieces, key=lambda piece: piece[0])]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
