"""Reproducible randomness for a codec that rounds stochastically: an auditor draws the same numbers as the encoder.

    key    = H("dither", base, role, sender, u64 (little-endian) chunk)        H: the `domain_hash` of the messages
    stream = BLAKE3 keyed with it, of the empty message, extended output
    k(i)   = bytes 2i and 2i + 1 of the stream, little-endian: of value i in the chunk
    u(i)   = (k(i) + ½) ÷ 2^16, exact in fp32, strictly between 0 and 1

`base` is the hash of the previous certificate's value, so the numbers of a round are fixed before anybody knows what
will be rounded with them, and differ between rounds, between what is contributed and what is reduced, between nodes
and between chunks. Whoever encodes the same chunk twice in a round, as an owner does after a re-plan, uses them again.

Sixteen bits: a fraction f is rounded up with the probability f to the nearest 2^-16, wrong by 2^-17 of a step at most,
which would show against the noise of rounding only in a mean over 4 × 10^9 values. Eight bits would be wrong by up to
2^-9 and show after 65,000. The half makes u symmetric, so that a whole number stays what it is, and what is nearer to
one than 2^-17 becomes it from above as from below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from shoal.protocol.identity import PeerId
from shoal.protocol.messages import domain_hash


class ChunkDither:
    """The stream of one chunk. Immutable: safe in any number of threads."""

    __slots__ = ("_stream",)

    def __init__(self, key: bytes) -> None:
        self._stream = blake3(key=key)

    def bits(self, start: int, stop: int) -> npt.NDArray[np.uint16]:
        """k of the values `start` to `stop` (exclusive) of the chunk: (stop − start,) little-endian uint16."""
        return np.frombuffer(self._stream.digest(length=2 * (stop - start), seek=2 * start), "<u2")


@dataclass(frozen=True, slots=True)
class Dither:
    """The dither of what one node encodes in one round: of all chunks of its contribution, or of the finals it owns."""

    base: bytes
    role: Literal["contribution", "final"]
    sender: PeerId

    def chunk(self, chunk: int) -> ChunkDither:
        """The stream of chunk number `chunk`."""
        number = chunk.to_bytes(8, "little")
        return ChunkDither(domain_hash("dither", self.base, self.role.encode(), self.sender.encode(), number))
