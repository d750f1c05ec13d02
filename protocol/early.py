"""Messages about rounds that have not begun here, kept for later: of one peer no more than it needs for one round.

A peer that sends too much loses its own oldest messages, not another's; where all do, who takes most room does.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from shoal.protocol.identity import PeerId
from shoal.protocol.inputs import Received
from shoal.protocol.wire import canonical

EARLY_PEER_LIMIT_MESSAGES = 64
EARLY_PEER_LIMIT_BYTES = 4 << 20
"""As they travel. Twice what anybody has to say in a round of the most chunks."""
EARLY_LIMIT_MESSAGES = 1024
EARLY_LIMIT_BYTES = 64 << 20


@dataclass(slots=True)
class _Kept:
    """Messages of one peer, the oldest first: each with its place among all, and its size in bytes."""

    kept: deque[tuple[int, Received, int]] = field(default_factory=deque)
    size: int = 0


class EarlyMessages:
    """Messages that wait for their round. Use from one thread."""

    def __init__(self) -> None:
        self._by_peer: dict[PeerId, _Kept] = {}
        self._count = self._size = 0
        self._places = itertools.count()

    def __iter__(self) -> Iterator[Received]:
        return (heard for words in self._by_peer.values() for _, heard, _ in words.kept)

    def __len__(self) -> int:
        return self._count

    def keep(self, heard: Received) -> None:
        """Keep a message, and let go of what is too much."""
        words, size = self._by_peer.setdefault(heard.peer, _Kept()), len(canonical(heard.message))
        words.kept.append((next(self._places), heard, size))
        words.size += size
        self._size += size
        self._count += 1
        while len(words.kept) > EARLY_PEER_LIMIT_MESSAGES or words.size > EARLY_PEER_LIMIT_BYTES:
            self._drop_oldest(heard.peer)
        while self._size > EARLY_LIMIT_BYTES:
            self._drop_oldest(max(self._by_peer, key=lambda peer: self._by_peer[peer].size))
        while self._count > EARLY_LIMIT_MESSAGES:
            self._drop_oldest(max(self._by_peer, key=lambda peer: len(self._by_peer[peer].kept)))

    def _drop_oldest(self, peer: PeerId) -> None:
        words = self._by_peer[peer]
        _, _, size = words.kept.popleft()
        words.size -= size
        self._size -= size
        self._count -= 1
        if not words.kept:
            del self._by_peer[peer]

    def take(self) -> list[Received]:
        """Remove and return all of them, in the order in which they came."""
        words = sorted((one for words in self._by_peer.values() for one in words.kept), key=lambda one: one[0])
        self._by_peer.clear()
        self._count = self._size = 0
        return [heard for _, heard, _ in words]
