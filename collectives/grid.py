"""The fixed grid of chunks over the parameters in canonical order.

A chunk is the unit of everything that follows: of encoding, ownership, hashing, repair and state transfer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from shoal.protocol.errors import LocalError
from shoal.protocol.messages import CHUNK_LIMIT, Plan

CHUNK_LIMIT_VALUES = 1 << 24


@dataclass(frozen=True, slots=True)
class Grid:
    """`numel` values in chunks of `chunk_values`; the last chunk may be shorter, none is empty.

    Raises LocalError for a grid that cannot be.
    """

    numel: int
    chunk_values: int

    def __post_init__(self) -> None:
        if self.numel < 1 or not 1 <= self.chunk_values <= CHUNK_LIMIT_VALUES:
            raise LocalError(f"no grid has {self.numel} values in chunks of {self.chunk_values}")
        if self.chunks > CHUNK_LIMIT:
            raise LocalError(f"{self.chunks} chunks are more than {CHUNK_LIMIT}; take larger chunks")

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """The grid of a plan."""
        return cls(plan.numel, plan.chunk_values)

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.numel // self.chunk_values)

    def span(self, chunk: int) -> tuple[int, int]:
        """The values of `chunk`: from start to stop, exclusive. Raises LocalError outside the grid."""
        if not 0 <= chunk < self.chunks:
            raise LocalError(f"chunk {chunk} is not among {self.chunks}")
        start = chunk * self.chunk_values
        return start, min(start + self.chunk_values, self.numel)

    def length(self, chunk: int) -> int:
        """Number of values in `chunk`."""
        start, stop = self.span(chunk)
        return stop - start
