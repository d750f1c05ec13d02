"""Contributions on their way into one chunk's sum."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.collectives.codecs import U8
from shoal.collectives.pieces import Pieces
from shoal.collectives.progress import Exclusion


class Arrivals:
    """What came in for one chunk that this node owns, by the sender's place in the plan. Not thread-safe."""

    __slots__ = ("arrived", "assembling", "excluded", "owing")

    def __init__(self, owing: Iterable[int]) -> None:
        self.owing = set(owing)
        self.assembling: dict[int, Pieces] = {}
        self.arrived: dict[int, U8] = {}
        self.excluded: list[Exclusion] = []
