"""Comparing the chain here with that of a peer: where they part, and what each has there, as steps of an errand.

Each entry names the hash of the one before, so chains that agree at one height agree below it: some requests find where
they part, however long they are. What is found is checked before it counts, like all that a peer serves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.protocol.chain import Chain
from shoal.protocol.errands import AskEntries, Steps
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Entry
from shoal.protocol.peering import ChainPart
from shoal.protocol.wire import COUNTER_LIMIT

ALL_REBASES = COUNTER_LIMIT
"""Number of rebases to claim in a request, so that entries are served by their number alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Two chains have their first `height` entries in common. mine, theirs: what follows there, None at an end.

    head: how many the peer says that it has in all.
    """

    height: int
    mine: Entry | None
    theirs: Entry | None
    head: int

    @property
    def parted(self) -> bool:
        """True if neither chain is the beginning of the other."""
        return self.mine is not None and self.theirs is not None


def difference(entries: Sequence[Entry], peer: PeerId) -> Steps:
    """Find where the chain of these entries parts from a peer's. Comes to a `Difference`.

    Raises RemoteError, and NetworkError, as asking does.
    """
    newest: ChainPart = yield AskEntries(peer, len(entries), ALL_REBASES)
    shared = min(len(entries), newest.head)
    height = shared
    if shared and not (yield from _common(entries, shared - 1, peer))[0]:
        height = yield from _parts(entries, shared, peer)
    part: ChainPart = yield AskEntries(peer, height, ALL_REBASES)
    theirs = part.certificates[0] if part.certificates else None
    mine = entries[height] if height < len(entries) else None
    if mine is not None and theirs is not None and mine.value.hash == theirs.value.hash:
        raise RemoteError("serves another chain from one request to the next")
    return Difference(height=height, mine=mine, theirs=theirs, head=part.head)


def _parts(entries: Sequence[Entry], shared: int, peer: PeerId) -> Steps:
    """The number of the first entry that differs, where the one before number `shared` does."""
    low, high = 0, shared - 1
    while low < high:
        middle = (low + high) // 2
        same, of = yield from _common(entries, middle, peer)
        if same == 0:
            high = middle
        elif same < of:
            return middle + same
        else:
            low = middle + same
    return low


def _common(entries: Sequence[Entry], begins: int, peer: PeerId) -> Steps:
    """Count the peer's entries that are the same here, from `begins` on, up to the first that is not; of how many."""
    part: ChainPart = yield AskEntries(peer, begins, ALL_REBASES)
    same, certificates = 0, part.certificates
    for mine, theirs in zip(entries[begins : begins + len(certificates)], certificates, strict=False):
        if mine.value.hash != theirs.value.hash:
            break
        same += 1
    return same, len(certificates)


def fetched_after(base: Chain, peer: PeerId, extend: Callable[[Chain, Entry], bool]) -> Steps:
    """Go on with `base` by all that a peer has after it, checked by `extend`; comes to `base`.

    Raises RemoteError for what does not follow or does not hold, NetworkError.
    """
    while extended(base, (yield after(base, peer)), extend):
        pass
    return base


def after(base: Chain, peer: PeerId) -> AskEntries:
    """The request for what a peer has after a chain."""
    return AskEntries(peer, base.height, base.head.term.rebases)


def extended(base: Chain, part: ChainPart, extend: Callable[[Chain, Entry], bool]) -> bool:
    """Go on with `base` by an answer, checked by `extend`; True if there is more to ask for. Raises RemoteError."""
    if not part.certificates or base.knows(part.certificates[0].value.hash):
        return False  # it repeats itself
    for entry in part.certificates:
        extend(base, entry)
    return base.height < part.head
