"""Commitments: what a contributor signs, before anybody sees a byte of its contribution, for third parties to check."""

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
        """Number of chunks in the contribution."""
        return -(-self.numel // max(1, self.chunk_values))

    def valid(self) -> bool:
        """Check that `peer` signed it."""
        return verify(self.peer, COMMITMENT_DOMAIN, _preimage(self), self.signature)


def _preimage(one: Commitment) -> bytes:
    return canonical([one.base, one.life, one.root, one.seal, one.squares, one.codec, one.numel, one.chunk_values])


def squares_hash(squares: Sequence[float]) -> bytes:
    """Hash of the per-chunk sums of squares, as a commitment has it."""
    return domain_hash("squares", canonical([float(square) for square in squares]))


def seal_of(top: bytes, peer: PeerId) -> bytes:
    """The seal of `peer` on a contribution whose tree has `top` right under its root."""
    return domain_hash("seal", top, peer.encode())


def commitment_of(peer: PeerId, ready: Ready, settings: RoundSettings) -> Commitment | None:
    """Return the commitment, unchecked, that `peer` signed in `ready` in a round of these settings; None if none."""
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
    """Return `ready` with the signature of `identity`, if it announces a contribution."""
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
