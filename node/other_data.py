"""Held-out data that differ between members, who may then train on different data unawares.

No link and no manifest says where data lie, so a machine that joins by the line of another trains on what its workload
reads where nothing is named. A node therefore says a short hash of what it holds out in its record, as the capability
`held-out.HASH`, once it has evaluated: 64 bits, of the swarm's own, from which nothing can be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from shoal.protocol.messages import domain_hash
from shoal.protocol.wire import SwarmId

PREFIX: Final = "held-out."
MARK_BYTES: Final = 8
NAMED_LIMIT: Final = 3
TOLD_LIMIT: Final = 3
"""Lines of one run: where everybody has data of their own, nobody needs to hear of each."""


def capability_of(swarm: SwarmId, digest: bytes) -> tuple[str, ...]:
    """The capability by which a record says what is held out, by its digest; none where that is not known."""
    return (PREFIX + domain_hash("held-out data", swarm, digest)[:MARK_BYTES].hex(),) if digest else ()


def claimed(capabilities: Iterable[str]) -> str:
    """The capability of that kind that a record has; empty if none."""
    return next((known for known in capabilities if known.startswith(PREFIX)), "")


class OtherData:
    """Warnings that members hold other data out than this node. named: whether its user named data with --data."""

    def __init__(self, *, named: bool) -> None:
        self._named = named
        self._told: set[str] = set()
        self._lines = 0

    def compare(self, own: str, others: Mapping[str, str]) -> str | None:
        """The line to tell, None if there is nothing new. own, others by PeerId: what records claim, empty for none."""
        different = {peer: mark for peer, mark in others.items() if own and mark and mark != own}
        if self._lines >= TOLD_LIMIT or self._told.issuperset(different.values()):
            return None
        new = sorted(peer for peer, mark in different.items() if mark not in self._told)
        self._told.update(different.values())
        self._lines += 1
        more = f" and {len(new) - NAMED_LIMIT} more" if len(new) > NAMED_LIMIT else ""
        remedy = (
            "name the same with --data at every node"
            if self._named
            else "this node was started without --data: ask what the others train on, and name a copy of that here"
        )
        return (
            f"other data than here is held out at {', '.join(new[:NAMED_LIMIT])}{more}, so held-out losses cannot be "
            f"compared, and perhaps other data is trained on; if that is not meant, {remedy}"
        )
