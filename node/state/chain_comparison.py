"""Comparing the chain here with that of a peer: where they part, and what each has there.

Each entry names the hash of the one before, so chains that agree at one height agree below it: some requests find where
they part, however long they are. What is found is checked before it counts, like all that a peer serves.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from shoal.protocol.chain import Chain
from shoal.protocol.errors import RemoteError
from shoal.protocol.messages import Entry
from shoal.protocol.peering import ChainPart
from shoal.protocol.wire import COUNTER_LIMIT

ALL_REBASES = COUNTER_LIMIT
"""Number of rebases to claim in a request, so that entries are served by their number alone."""

AskChain = Callable[[int, int], Awaitable[ChainPart]]
"""Entries after the first so many, for who knows of so many rebases, of one peer; raises NetworkError, RemoteError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Two chains have their first `height` entries in common. mine, theirs: what follows there, None at an end."""

    height: int
    mine: Entry | None
    theirs: Entry | None

    @property
    def parted(self) -> bool:
        """True if neither chain is the beginning of the other."""
        return self.mine is not None and self.theirs is not None


async def difference(entries: Sequence[Entry], ask: AskChain) -> Difference:
    """Find where the chain of these entries parts from a peer's. Raises RemoteError, NetworkError as `ask` does."""
    head = (await ask(len(entries), ALL_REBASES)).head
    shared = min(len(entries), head)
    height = shared if not shared or await _same_from(entries, shared - 1, ask) else await _parts(entries, shared, ask)
    part = await ask(height, ALL_REBASES)
    theirs = part.certificates[0] if part.certificates else None
    mine = entries[height] if height < len(entries) else None
    if mine is not None and theirs is not None and mine.value.hash == theirs.value.hash:
        raise RemoteError("serves another chain from one request to the next")
    return Difference(height=height, mine=mine, theirs=theirs)


async def _parts(entries: Sequence[Entry], shared: int, ask: AskChain) -> int:
    """The number of the first entry that differs, where the one before number `shared` does."""
    low, high = 0, shared - 1
    while low < high:
        middle = (low + high) // 2
        certificates = (await ask(middle, ALL_REBASES)).certificates
        same = _common(entries, middle, certificates)
        if same == 0:
            high = middle
        elif same < len(certificates):
            return middle + same
        else:
            low = middle + same
    return low


async def _same_from(entries: Sequence[Entry], begins: int, ask: AskChain) -> bool:
    return _common(entries, begins, (await ask(begins, ALL_REBASES)).certificates) > 0


def _common(entries: Sequence[Entry], begins: int, certificates: Sequence[Entry]) -> int:
    """Count the peer's entries that are the same here, from `begins` on, up to the first that is not."""
    same = 0
    for mine, theirs in zip(entries[begins : begins + len(certificates)], certificates, strict=False):
        if mine.value.hash != theirs.value.hash:
            break
        same += 1
    return same


async def fetched_after(
    base: Chain, ask: AskChain, extend: Callable[[Chain, Entry], bool], *, first: ChainPart | None = None
) -> Chain:
    """`base`, gone on with all that a peer has after it, checked by `extend`. first: what it has said already.

    Raises RemoteError for what does not follow or does not hold, NetworkError.
    """
    part = first
    while True:
        if part is None:
            part = await ask(base.height, base.head.term.rebases)
        if not part.certificates or base.knows(part.certificates[0].value.hash):
            return base  # it repeats itself
        for entry in part.certificates:
            extend(base, entry)
        if base.height >= part.head:
            return base
        part = None
