"""What a contributor signs before anybody sees a byte of its contribution, for third parties to hold it to.

    root        over the encoded chunks (collectives/commitment.py); top is the hash right under it
    seal        H("seal", top, PeerId): shows that who signs knew the chunks and did not copy a root from another
    squares     H("squares", canonical of the per-chunk sums of squares)
    signature   over base, life, root, seal, squares, codec and grid

`top` becomes known with the first chunk that is sent to its owner. A life is one run of a node through one round: who
was restarted and lost its contribution may make another one, in another life.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import Identity, PeerId, verify
from shoal.protocol.messages import Count, Hash, Peer, Ready, Signature, domain_hash
from shoal.protocol.planning import CONTRIBUTOR, RoundSettings
from shoal.protocol.wire import canonical

COMMITMENT_DOMAIN = b"shoal/commitment"
CODEC_LIMIT_CHARS = 32
"""Of a codec's name. Names are those of collectives/codecs.py."""


class Commitment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The signed part of a contributor's Ready. `base` is the hash of C(e-1), `squares` that of the sums."""

    peer: Peer
    base: Hash
    life: Hash
    root: Hash
    seal: Hash
    squares: Hash
    codec: Annotated[str, msgspec.Meta(max_length=CODEC_LIMIT_CHARS)]
    numel: Count
    chunk_values: Count
    signature: Signature

    @property
    def chunks(self) -> int:
        """How many chunks it is of."""
        return -(-self.numel // max(1, self.chunk_values))

    def valid(self) -> bool:
        """Whether `peer` signed it."""
        return verify(self.peer, COMMITMENT_DOMAIN, _preimage(self), self.signature)


def _preimage(one: Commitment) -> bytes:
    return canonical([one.base, one.life, one.root, one.seal, one.squares, one.codec, one.numel, one.chunk_values])


def squares_hash(squares: Sequence[float]) -> bytes:
    """What stands for the sums of squares in a commitment."""
    return domain_hash("squares", canonical([float(square) for square in squares]))


def seal_of(top: bytes, peer: PeerId) -> bytes:
    """The seal of `peer` on a contribution whose tree has `top` right under its root."""
    return domain_hash("seal", top, peer.encode())


def commitment_of(peer: PeerId, ready: Ready, settings: RoundSettings) -> Commitment | None:
    """What `peer` signed in `ready`, in a round with these settings; unchecked. None if that is nothing."""
    if ready.role != CONTRIBUTOR or not ready.signature:
        return None
    return Commitment(
        peer=peer,
        base=ready.base,
        life=ready.life,
        root=ready.root,
        seal=ready.seal,
        squares=squares_hash(ready.squares),
        codec=settings.codec,
        numel=settings.numel,
        chunk_values=settings.chunk_values,
        signature=ready.signature,
    )


def committed(identity: Identity, ready: Ready, settings: RoundSettings) -> Ready:
    """`ready` with the signature of `identity`, if it announces a contribution."""
    if ready.role != CONTRIBUTOR:
        return ready
    unsigned = msgspec.structs.replace(ready, signature=bytes(64))
    commitment = commitment_of(identity.peer_id, unsigned, settings)
    assert commitment is not None
    return msgspec.structs.replace(ready, signature=identity.sign(COMMITMENT_DOMAIN, _preimage(commitment)))


def check_commitment(sender: PeerId, ready: Ready, settings: RoundSettings) -> None:
    """Raises RemoteError if a contributor did not sign what it commits to."""
    if ready.role != CONTRIBUTOR:
        return
    commitment = commitment_of(sender, ready, settings)
    if commitment is None or not commitment.valid():
        raise RemoteError("a contribution whose commitment its sender did not sign", peer=sender)
