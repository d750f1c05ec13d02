"""A peer's name as libp2p has it, worked out once: base58 takes longer than most of what is done with it."""

from __future__ import annotations

from functools import lru_cache

from shoal.protocol.identity import PUBLIC_KEY_CACHE_ENTRIES, PeerId
from shoal.swarm.libp2p_parts import only_what_runs

with only_what_runs():
    from libp2p.peer.id import ID


@lru_cache(maxsize=PUBLIC_KEY_CACHE_ENTRIES)
def libp2p_id(peer: PeerId) -> ID:
    """The same peer to libp2p. Raises ValueError of a text that is not base58."""
    return ID.from_base58(peer)
