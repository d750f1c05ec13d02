"""Rows for swarms of more members than one plan holds: who stands in which, who heads it, where newcomers go.

The rows follow from the certified membership, and from nothing else, so whoever knows the one knows the other:

    dealt       members in the order of H("row order", swarm, peer), one to each row in turn
    gone        taken out of its row; nobody else moves, so neighbours and what they own stay
    newcomer    last in the shortest row, of several the first
    head        the first of the row's list that is not gone; it stays head as long as it is there

The heads are the electorate: one of each row, at most `ROWS_LIMIT`, whatever the number of members. A certificate of
theirs is a certificate like any other (certificate.py), with at most so many signatures. Among those who are dealt
the hash decides who is head, so nobody chooses it short of making PeerIds until one fits, which admission has to stand
against, as for any vote. A newcomer stands last on its list and is head only when all before it are gone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from shoal.protocol.errors import LocalError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import domain_hash
from shoal.protocol.wire import SwarmId

ROWS_LIMIT = 32
ROWS_LEAST = 2

Row = tuple[PeerId, ...]
"""Members of one row, in its order."""


def row_count(members: int) -> int:
    """Number of rows for so many members: rows are about twice as long as there are rows, until the limit.

    A head has the links of its row and those to the other heads, so the sum of both is what should be small.
    """
    return max(ROWS_LEAST, min(ROWS_LIMIT, math.isqrt(members) // 2))


def deal_rows(swarm: SwarmId, members: Collection[PeerId], count: int) -> tuple[Row, ...]:
    """The rows that a membership begins with; their lengths differ by one at most.

    Raises LocalError where a row would be empty.
    """
    if not 1 <= count <= len(set(members)):
        raise LocalError(f"{len(set(members))} members in {count} rows")
    order = sorted(set(members), key=lambda peer: domain_hash("row order", swarm, peer.encode()))
    return tuple(tuple(order[first::count]) for first in range(count))


def without(rows: Sequence[Row], gone: Collection[PeerId]) -> tuple[Row, ...]:
    """The rows after some of their members are gone."""
    return tuple(tuple(peer for peer in row if peer not in gone) for row in rows)


def shortest(rows: Sequence[Collection[object]]) -> int:
    """The row that the next newcomer goes to."""
    return min(range(len(rows)), key=lambda number: (len(rows[number]), number))


def joined(rows: Sequence[Row], newcomers: Sequence[PeerId]) -> tuple[Row, ...]:
    """The rows after newcomers came, in the order in which they are certified."""
    found = [list(row) for row in rows]
    for peer in newcomers:
        found[shortest(found)].append(peer)
    return tuple(tuple(row) for row in found)
