"""Contributions on their way into one chunk's sum, and the memory that they arrive in."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.collectives.codecs import U8
from shoal.collectives.pieces import Pieces, fresh
from shoal.collectives.progress import Exclusion

SPARE_BUFFERS = 16
"""Payloads' memory kept for the next contribution: fresh pages cost more than the sum."""


class Arrivals:
    """What came in for one chunk that this node owns, by the sender's place in the plan. Not thread-safe."""

    __slots__ = ("arrived", "assembling", "excluded", "owing", "payloads")

    def __init__(self, owing: Iterable[int]) -> None:
        self.owing = set(owing)
        self.assembling: dict[int, Pieces] = {}
        self.arrived: dict[int, U8] = {}
        self.payloads: list[U8] = []
        self.excluded: list[Exclusion] = []


class SpareBuffers:
    """Memory of payloads that were summed, for those to come. Not thread-safe."""

    def __init__(self) -> None:
        self._spare: list[U8] = []

    def take(self, size: int) -> U8:
        """(size,) uint8, whatever is in it."""
        for i, buffer in enumerate(self._spare):
            if buffer.size == size:
                return self._spare.pop(i)
        return fresh(size)

    def give(self, buffers: Iterable[U8]) -> None:
        """These are not read any more."""
        self._spare.extend(buffers)
        del self._spare[:-SPARE_BUFFERS]
