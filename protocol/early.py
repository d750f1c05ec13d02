"""Messages that wait, in order: for their round to begin here, or for the engine to come to them.

A peer that sends too much loses its own oldest messages, not another's; where all do, who takes most room does.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from shoal.protocol.identity import PeerId
from shoal.protocol.inputs import Received

EARLY_PEER_LIMIT_MESSAGES = 64
EARLY_PEER_LIMIT_BYTES = 4 << 20
"""As they travel. Twice what anybody has to say in a round of the most chunks."""
EARLY_LIMIT_MESSAGES = 1024
EARLY_LIMIT_BYTES = 64 << 20


@dataclass(slots=True)
class _OfPeer:
    """Messages of one peer: their places among all, the oldest first, and their size in bytes."""

    places: deque[int] = field(default_factory=deque)
    size: int = 0


class EarlyMessages:
    """Messages that wait, of one peer and of all no more than so many and so many bytes. Use from one thread."""

    def __init__(
        self,
        *,
        peer_messages: int = EARLY_PEER_LIMIT_MESSAGES,
        peer_bytes: int = EARLY_PEER_LIMIT_BYTES,
        all_messages: int = EARLY_LIMIT_MESSAGES,
        all_bytes: int = EARLY_LIMIT_BYTES,
    ) -> None:
        self._peer_messages, self._peer_bytes = peer_messages, peer_bytes
        self._all_messages, self._all_bytes = all_messages, all_bytes
        self._kept: OrderedDict[int, tuple[Received, int]] = OrderedDict()  # by place, with their sizes
        self._by_peer: dict[PeerId, _OfPeer] = {}
        self._size = 0
        self._places = itertools.count()

    def __iter__(self) -> Iterator[Received]:
        return (heard for heard, _ in self._kept.values())

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, heard: Received) -> None:
        """Keep a message, and let go of what is too much."""
        place, size = next(self._places), len(msgspec.msgpack.encode(heard.message))
        self._kept[place] = heard, size
        self._size += size
        words = self._by_peer.setdefault(heard.peer, _OfPeer())
        words.places.append(place)
        words.size += size
        while len(words.places) > self._peer_messages or words.size > self._peer_bytes:
            self._remove_oldest(heard.peer)
        while self._size > self._all_bytes:
            self._remove_oldest(max(self._by_peer, key=lambda peer: self._by_peer[peer].size))
        while len(self._kept) > self._all_messages:
            self._remove_oldest(max(self._by_peer, key=lambda peer: len(self._by_peer[peer].places)))

    def _remove_oldest(self, peer: PeerId) -> None:
        words = self._by_peer[peer]
        _, size = self._kept.pop(words.places.popleft())
        words.size -= size
        self._size -= size
        if not words.places:
            del self._by_peer[peer]

    def next(self) -> Received:
        """Remove and return the oldest; there has to be one."""
        heard, _ = next(iter(self._kept.values()))
        self._remove_oldest(heard.peer)
        return heard

    def take(self) -> list[Received]:
        """Remove and return all of them, in the order in which they came."""
        heard = list(self)
        self._kept.clear()
        self._by_peer.clear()
        self._size = 0
        return heard
