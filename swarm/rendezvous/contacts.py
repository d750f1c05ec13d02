"""Kademlia's routing table: a few peers near this node's own key, and fewer the farther away.

Distance is the exclusive or of SHA-256 digests. Peers that share exactly n leading bits with this node are in bucket n,
at most BUCKET_LIMIT of them. Who is there stays: a newcomer takes the place of one that last failed to answer, or none.

Source: Maymounkov and Mazières, Kademlia (2002), sections 2.2 and 2.4; the libp2p Kad-DHT specification.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

BUCKET_LIMIT = 16
ADDRESSES_LIMIT = 4
FAILURES_LIMIT = 3
"""Unanswered questions in a row, until a contact is dropped."""


@dataclass(frozen=True, slots=True)
class Contact:
    """A peer that speaks Kademlia, by its libp2p bytes, and where it is."""

    id: bytes
    peer: str
    addresses: tuple[str, ...]


@dataclass(slots=True)
class _Entry:
    contact: Contact
    failures: int = 0


def point_of(key: bytes) -> int:
    """Point of a key, or of a peer's id, in the space of 256 bits."""
    return int.from_bytes(hashlib.sha256(key).digest(), "big")


def sort_by_distance(contacts: Sequence[Contact], key: bytes) -> list[Contact]:
    """Those nearest to `key` first."""
    target = point_of(key)
    return sorted(contacts, key=lambda contact: point_of(contact.id) ^ target)


@dataclass(slots=True)
class Contacts:
    """The routing table of the node whose id is `own`."""

    own: bytes
    _buckets: dict[int, dict[bytes, _Entry]] = field(default_factory=dict)

    def add(self, contact: Contact) -> None:
        """Note a peer, or its new addresses, if there is room."""
        if contact.id == self.own or not contact.addresses:
            return
        bucket = self._buckets.setdefault(self._index(contact.id), {})
        known = bucket.get(contact.id)
        if known is not None:
            known.contact = contact
            return
        if len(bucket) >= BUCKET_LIMIT:
            failed = next((id for id, entry in bucket.items() if entry.failures), None)
            if failed is None:
                return
            del bucket[failed]
        bucket[contact.id] = _Entry(contact)

    def answered(self, id: bytes) -> None:
        """A contact answered: none of its failures count any more."""
        entry = self._buckets.get(self._index(id), {}).get(id)
        if entry is not None:
            entry.failures = 0

    def failed(self, id: bytes) -> None:
        """A contact did not answer; after FAILURES_LIMIT times it is dropped."""
        bucket = self._buckets.get(self._index(id), {})
        if id in bucket:
            bucket[id].failures += 1
            if bucket[id].failures >= FAILURES_LIMIT:
                del bucket[id]

    def nearest(self, key: bytes, count: int) -> list[Contact]:
        """At most `count` contacts, those nearest to `key` first."""
        everyone = [entry.contact for bucket in self._buckets.values() for entry in bucket.values()]
        return sort_by_distance(everyone, key)[:count]

    def _index(self, id: bytes) -> int:
        return 256 - (point_of(id) ^ point_of(self.own)).bit_length()

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))
