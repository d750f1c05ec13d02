"""Contributions on their way into one chunk's sum, and what is left of a reduction that may begin again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from shoal.collectives.codecs import U8
from shoal.collectives.finals import FinalChunk
from shoal.collectives.progress import Exclusion
from shoal.collectives.reassembly import ReassemblyBuffer


class PendingChunk:
    """What came in for one chunk that this node owns, by the sender's place in the plan. Not thread-safe.

    arrived: the encoded chunks. payloads: they with their Merkle paths.
    """

    __slots__ = ("arrived", "assembling", "excluded", "owing", "payloads")

    def __init__(self, owing: Iterable[int]) -> None:
        self.owing = set(owing)
        self.assembling: dict[int, ReassemblyBuffer] = {}
        self.arrived: dict[int, U8] = {}
        self.payloads: dict[int, U8] = {}
        self.excluded: list[Exclusion] = []


@dataclass(slots=True)
class Kept:
    """What a reduction leaves for when its lineage is taken up again, by chunk.

    signed: by this node, in any revision, at any time. finals: that were here when it was closed.
    """

    signed: dict[int, FinalChunk] = field(default_factory=dict)
    finals: dict[int, FinalChunk] = field(default_factory=dict)
