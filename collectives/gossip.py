"""The outer step between two partners, and the one vector that travels for it.

With φ a node's slow weights, δ its momentum, Δ = θ − φ what its inner steps made of them, and j the partner of i:

    v = β·Δ + γ·φ                                   what a node sends, encoded as v̂
    δ ← α·δ + β·Δ + ½·(v̂_j − v̂_i)                   without a partner the last term is missing
    φ ← φ + δ

Without encoding that is  α·δ + (β/2)(Δ_i + Δ_j) − γ·(φ_i − (φ_i + φ_j)/2),  the outer step of NoLoCo for groups of two:
the mean of the two pseudo-gradients, and a pull towards the mean of the two weights. Taking a node's own vector as
encoded too has both errors cancel in the sum: encoding moves no pair's mean, only its members against each other.

Buffers are values and take no outer step: a node sends its own as they are, in fp32, and after the step has the mean of
its own and its partner's, or without one its own. In Δ and v they stand as they are, and δ is 0 there.

**How strong a pull.** Let x be a node's distance from the mean of a large swarm, its partner's independent of it. The
second moments of (x, δ) then follow a linear recurrence, which contracts if and only if 0 < γ < 2·(1 − α²); a manifest
must keep to that. (`tests/collectives/test_gossip.py` computes its eigenvalues, and simulates it.)

**Codec.** bf16, rounded by chance with the reproducible numbers of `dither`, such that the expected value is the value
itself: 2 bytes per parameter and round, whatever the number of nodes. φ is in v, and so is its range: int8, with one
scale for 4096 values, would hold members a third further apart.

Bits matter nowhere between nodes, since no two hold the same; but an auditor recomputes every step to the bit.
Source: NoLoCo, arXiv 2506.10911 (the outer step); the bound on γ is derived here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from shoal.collectives.codecs import F32, U8, VALUE_LIMIT, Codec, Encoded, Undecodable, chunk_codec
from shoal.collectives.commitment import chunk_hash
from shoal.collectives.dither import Dither
from shoal.collectives.grid import Grid
from shoal.protocol.errors import LocalError
from shoal.protocol.gossip_messages import Offer
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest_sync import SyncSection
from shoal.protocol.messages import domain_hash
from shoal.protocol.wire import SwarmId

_SPAN_VALUES: Final = 1 << 17
_HALF: Final = np.float32(0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipSettings:
    """α, β and γ of the outer step."""

    momentum: float
    lr: float
    gamma: float

    @classmethod
    def of(cls, sync: SyncSection) -> Self:
        """Take the settings from a manifest."""
        return cls(momentum=sync.outer_momentum, lr=sync.outer_lr, gamma=sync.gossip_gamma)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GossipVector:
    """A node's vector of one round as it travels: `chunks` on `grid`, and the offer that vouches for them."""

    offer: Offer
    grid: Grid
    chunks: tuple[U8, ...]


def dither_of(swarm: SwarmId, round: int, sender: PeerId) -> Dither:
    """The chance in a node's vector of a round."""
    base = domain_hash("gossip-dither", swarm, round.to_bytes(8, "little"))
    return Dither(base, "contribution", sender)


def encode_vector(
    anchor: F32, delta: F32, settings: GossipSettings, *, grid: Grid, codec_name: str, round: int, dither: Dither
) -> GossipVector:
    """v = β·Δ + γ·φ, encoded; anchor and delta are φ and Δ, both ``(numel,) float32``.

    Raises LocalError if a value is not finite.
    """
    lr, gamma = np.float32(settings.lr), np.float32(settings.gamma)
    chunks = []
    for chunk in range(grid.chunks):
        here, how = slice(*grid.span(chunk)), chunk_codec(codec_name, grid, chunk)
        if how.plain:
            chunks.append(how.encode(delta[here]))
            continue
        values = delta[here] * lr
        values += anchor[here] * gamma
        chunks.append(_encode(values, how, dither, chunk))
    offer = Offer(
        round=round,
        codec=codec_name,
        numel=grid.numel,
        chunk_values=grid.chunk_values,
        hashes=b"".join(chunk_hash(encoded.data) for encoded in chunks),
    )
    return GossipVector(offer=offer, grid=grid, chunks=tuple(chunks))


def _encode(values: F32, how: Codec, dither: Dither, chunk: int) -> U8:
    if how.name != "bf16":
        return how.encode(values)
    if not np.isfinite(values).all():
        raise LocalError("a parameter is not finite; training has diverged")
    np.clip(values, -VALUE_LIMIT, VALUE_LIMIT, out=values)
    bits = values.view(np.uint32)
    # A magnitude is rounded up with the probability of the share that is cut off: 16 bits of chance for 16 bits.
    bits += dither.chunk(chunk).bits(0, values.size)
    out = np.zeros(how.encoded_bytes(values.size), np.uint8)
    out[: 2 * values.size].view("<u2")[:] = bits >> np.uint32(16)
    return out


def decode_vector(chunks: Sequence[Encoded], grid: Grid, codec_name: str) -> F32:
    """v̂, ``(numel,) float32``. Raises Undecodable for bytes that no encoder writes."""
    if len(chunks) != grid.chunks:
        raise Undecodable(f"a vector of {len(chunks)} chunks, not {grid.chunks}")
    out = np.empty(grid.numel, np.float32)
    for chunk, encoded in enumerate(chunks):
        chunk_codec(codec_name, grid, chunk).decode_into(encoded, out[slice(*grid.span(chunk))])
    return out


def outer_step(
    anchor: F32,
    momentum: F32,
    delta: F32,
    settings: GossipSettings,
    *,
    exchanged: tuple[F32, F32] | None,
    out: tuple[F32, F32],
    buffers_begin: int | None = None,
) -> None:
    """Write φ and δ after the step into `out`; all are ``(numel,) float32``.

    exchanged: v̂ of this node, and its partner's. buffers_begin: the place of the first buffer, None for none.
    The order of the operations is that of the formula above, each rounded to float32.
    """
    alpha, lr = np.float32(settings.momentum), np.float32(settings.lr)
    after, moved = out
    parameters = anchor.size if buffers_begin is None else buffers_begin
    buffers = slice(parameters, None)
    moved[buffers] = 0
    after[buffers] = delta[buffers] if exchanged is None else (exchanged[0][buffers] + exchanged[1][buffers]) * _HALF
    for start in range(0, parameters, _SPAN_VALUES):
        here = slice(start, min(start + _SPAN_VALUES, parameters))
        np.multiply(momentum[here], alpha, out=moved[here])
        moved[here] += delta[here] * lr
        if exchanged is not None:
            apart = exchanged[1][here] - exchanged[0][here]
            apart *= _HALF
            moved[here] += apart
        np.add(anchor[here], moved[here], out=after[here])
