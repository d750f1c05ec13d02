"""Messages between two nodes under the strategy `gossip`, where nothing is common and nothing is certified.

Each travels in an envelope that its sender signed, over the link between the two, and concerns nobody else.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated

import msgspec

from shoal.protocol.messages import Count, Hash, Message, domain_hash
from shoal.protocol.wire import HASH_BYTES, canonical

VECTOR_CHUNK_LIMIT = 16_000
"""One hash per chunk has to fit into one message."""
VECTOR_CHUNK_LIMIT_VALUES = 1 << 24

Hashes = Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES * VECTOR_CHUNK_LIMIT)]


class Offer(Message, frozen=True, kw_only=True, dict=True):
    """Offer to be partners, with the vector of the sender's round `round`, to be fetched by the hashes of its chunks.

    Two are partners where each has the other's offer. `hashes`: BLAKE3 of every encoded chunk, joined in order.
    """

    round: Count
    codec: Annotated[str, msgspec.Meta(max_length=16)]
    numel: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
    chunk_values: Annotated[int, msgspec.Meta(ge=1, le=VECTOR_CHUNK_LIMIT_VALUES)]
    hashes: Hashes

    def __post_init__(self) -> None:
        if len(self.hashes) != HASH_BYTES * -(-self.numel // self.chunk_values):
            raise ValueError("an offer without exactly one hash per chunk")

    @cached_property
    def root(self) -> bytes:
        """Hash over all fields, which names the vector."""
        shape = canonical([self.round, self.codec, self.numel, self.chunk_values])
        return domain_hash("gossip-vector", shape, self.hashes)

    @property
    def shape(self) -> tuple[str, int, int]:
        """Shape of the vector, which must be the same at both partners: codec, values, values per chunk."""
        return self.codec, self.numel, self.chunk_values

    def chunk_hash(self, chunk: int) -> bytes:
        """The BLAKE3 hash that chunk `chunk` must have."""
        return self.hashes[chunk * HASH_BYTES : (chunk + 1) * HASH_BYTES]


class Decline(Message, frozen=True, kw_only=True):
    """Refusal of the offer of round `round`. `mine` is the sender's own round."""

    round: Count
    mine: Count


class Withdraw(Message, frozen=True, kw_only=True):
    """Withdrawal of the sender's offer of its round `round`: it waits no longer."""

    round: Count


class Taken(Message, frozen=True, kw_only=True):
    """Receipt of the whole vector of your round `round`: this sender needs you for it no more."""

    round: Count


class AskStanding(Message, frozen=True, kw_only=True):
    """Question for the round and digest of a peer's newest state."""


class Standing(Message, frozen=True, kw_only=True):
    """The sender's newest state is of `round` and has this digest; no hash at all where it has none yet.

    The digest covers the hashes of all chunks, so this one signature vouches for a whole snapshot.
    """

    round: Count
    digest: Hash


GossipMessage = Offer | Decline | Withdraw | Taken | AskStanding | Standing
