"""Progress of a reduction, and what it still waits for."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from shoal.protocol.identity import PeerId


class Reason(StrEnum):
    """Reason for which a contribution was left out of a chunk."""

    MISCOMMITTED = "not what its root commits to"
    UNDECODABLE = "does not decode to finite values"


@dataclass(frozen=True, slots=True)
class Exclusion:
    """`peer`'s contribution to a chunk was left out of the sum, and of the divisor.

    payload: what came, with its path, where that proves something against `peer`.
    """

    peer: PeerId
    reason: Reason
    payload: bytes = field(default=b"", compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceProgress:
    """`final` of `total` chunks are final here; `excluded` is only known to the owner of the chunk that became so."""

    final: int
    total: int
    chunk: int | None = None
    excluded: tuple[Exclusion, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Peers that still owe contributions or finals.

    A missing contribution is its sender's fault; a final may be late because its owner waits too.
    """

    contributions: frozenset[PeerId]
    finals: frozenset[PeerId]
