"""The peers that a node was linked with, and where: what finds the swarm again when all that it was told of is gone.

Only who was linked, and so proved its PeerId and was admitted, gets in. The order is by success, then by recency: who
failed less often since its last link first, of those who was linked last. There is no clock in it. When the book is
full, the last in that order makes room, but for whom comes first in the swarm (`shoal.protocol.places`).

As a file it is JSON: {"version": 1, "peers": [{"peer": …, "addresses": […], "failures": 0}, …]}, who was linked last
first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Annotated, Literal

import msgspec

from shoal.protocol.address import parse_any
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import PeerId
from shoal.protocol.records import Address
from shoal.protocol.wire import Message, PeerIdField

BOOK_LIMIT_PEERS = 256  # peers in the address book
BOOK_LIMIT_BYTES = 1 << 20
ADDRESSES_LIMIT = 8
"""Of one peer."""
FAILURES_LIMIT = 1000


class KnownPeer(Message, frozen=True, kw_only=True):
    """A peer, where it was, the address that worked first, and how often it was not reached since."""

    peer: PeerIdField
    addresses: Annotated[tuple[Address, ...], msgspec.Meta(max_length=ADDRESSES_LIMIT)]
    failures: Annotated[int, msgspec.Meta(ge=0, le=FAILURES_LIMIT)] = 0


class _File(Message, frozen=True, kw_only=True):
    version: Literal[1] = 1
    peers: Annotated[tuple[KnownPeer, ...], msgspec.Meta(max_length=BOOK_LIMIT_PEERS)]


class AddressBook:
    """Peers in the order in which they were linked, the last one last."""

    def __init__(self, peers: Iterable[KnownPeer] = ()) -> None:
        self._peers = {PeerId(known.peer): known for known in reversed(tuple(peers))}
        self.first: Callable[[], Collection[PeerId]] = tuple
        """Peers that no stranger pushes out, however often they were not reached."""

    @classmethod
    def parse(cls, data: bytes) -> AddressBook:
        """The book in a file. Raises ValueError for what is none; addresses that are none are left out."""
        if len(data) > BOOK_LIMIT_BYTES:
            raise ValueError(f"it has {len(data)} bytes, and the limit is {BOOK_LIMIT_BYTES}")
        try:
            file = msgspec.json.decode(data, type=_File)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(str(error)) from None
        kept = [
            msgspec.structs.replace(known, addresses=tuple(_usable(PeerId(known.peer), known.addresses)))
            for known in file.peers
        ]
        return cls(known for known in kept if known.addresses)

    def to_bytes(self) -> bytes:
        """The file."""
        return msgspec.json.encode(_File(peers=tuple(reversed(self._peers.values()))))

    def linked(self, peer: PeerId, addresses: Iterable[str]) -> bool:
        """`peer` was linked, with these addresses, the most useful ones first; whether that changes the file.

        The addresses that were known before come last, as long as there is room.
        """
        before = self._peers.get(peer)
        known = before.addresses if before else ()
        found = tuple(dict.fromkeys((*_usable(peer, addresses), *known)))[:ADDRESSES_LIMIT]
        if not found:
            return False
        newest = next(reversed(self._peers), None)
        self._peers.pop(peer, None)
        self._peers[peer] = KnownPeer(peer=peer, addresses=found)
        if len(self._peers) > BOOK_LIMIT_PEERS:
            self.forget(self.in_order()[-1].peer)
        return newest != peer or self._peers[peer] != before

    def failed(self, peer: PeerId) -> None:
        """`peer` was not reached."""
        known = self._peers.get(peer)
        if known is not None:
            failures = min(known.failures + 1, FAILURES_LIMIT)
            self._peers[peer] = msgspec.structs.replace(known, failures=failures)

    def forget(self, peer: str) -> None:
        """Drop a peer that does not belong here."""
        self._peers.pop(PeerId(peer), None)

    def best(self) -> tuple[KnownPeer, ...]:
        """All peers, those first that are most likely to be there."""
        last_first = list(reversed(self._peers.values()))
        return tuple(sorted(last_first, key=lambda known: known.failures))

    def in_order(self) -> tuple[KnownPeer, ...]:
        """All peers, those who come first before the others, and else as in `best`."""
        first = self.first()
        return tuple(sorted(self.best(), key=lambda known: known.peer not in first))

    def __len__(self) -> int:
        return len(self._peers)


def _usable(peer: PeerId, addresses: Iterable[str]) -> Iterable[str]:
    for text in addresses:
        try:
            if parse_any(text).peer == peer:
                yield text
        except ConfigError:
            continue
