"""Times at which peers were last heard of: who may be gone for good, and who cannot be yet."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from shoal.protocol.identity import PeerId

PEERS_LIMIT = 4096
LONG_SILENCE_S = 3600.0
"""Before it nobody is to be taken for gone for good."""

Order = tuple[int, int]
"""(boot, sequence) of something that a peer signed."""


class LastSeen:
    """Of one node's life, on any clock in seconds; `began` is when it began to listen."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._at: dict[PeerId, float] = {}  # the last one heard last
        self._newest: dict[PeerId, Order] = {}

    def note(self, peer: PeerId, now: float, *, keep: Callable[[], Collection[PeerId]]) -> None:
        """A peer said something. Beyond PEERS_LIMIT the one silent longest is forgotten that is not to be kept."""
        self._at.pop(peer, None)
        self._at[peer] = now
        if len(self._at) > PEERS_LIMIT:
            kept = keep()
            gone = next((one for one in self._at if one not in kept), peer)
            del self._at[gone]
            self._newest.pop(gone, None)

    def note_signed(self, peer: PeerId, order: Order, now: float, *, keep: Callable[[], Collection[PeerId]]) -> None:
        """Something came through others that a peer signed: it counts if it is newer than all that came that way."""
        if order > self._newest.get(peer, (-1, -1)):
            self.note(peer, now, keep=keep)
            if peer in self._at:
                self._newest[peer] = order

    def long_silent(self, peers: Iterable[str], now: float) -> list[str]:
        """Those of the peers of whom nothing was heard for LONG_SILENCE_S; nobody before this node listened so long."""
        return [peer for peer in peers if now - self._at.get(PeerId(peer), self._began) >= LONG_SILENCE_S]
