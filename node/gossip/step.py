"""A round of the strategy `gossip` for one node, as a function of what goes into it: its vector, and its outer step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shoal.collectives.codecs import F32
from shoal.collectives.fragments import Fragments
from shoal.collectives.gossip import (
    GossipSettings,
    GossipVector,
    decode_vector,
    dither_of,
    encode_vector,
    outer_step,
)
from shoal.collectives.grid import Grid
from shoal.collectives.state import CertifiedState, frozen
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest import Manifest
from shoal.protocol.messages import Term
from shoal.protocol.planning import with_buffers


class GossipSteps:
    """The steps of the node `me` in the swarm of `manifest`, whose model has `numel` values.

    buffers: how many of their chunks, the last ones, are buffers.
    """

    def __init__(self, manifest: Manifest, me: PeerId, numel: int, buffers: int = 0) -> None:
        self._swarm = manifest.swarm_id
        self._me = me
        self._settings = GossipSettings.of(manifest.sync)
        self.codec = with_buffers(manifest.sync.codec, buffers)
        self.grid = Grid(numel, manifest.round.chunk_values)
        self._buffers_begin = Fragments(self.grid, buffers=buffers).buffers_begin

    def delta(self, contribution: F32) -> F32:
        """Δ by what the trainer contributes, base − local, both ``(numel,) float32``; of buffers local itself."""
        delta = np.negative(contribution)
        delta[self._buffers_begin :] = contribution[self._buffers_begin :]
        return delta

    def vector(self, state: CertifiedState, delta: F32, round: int) -> GossipVector:
        """Encode this node's vector of `round`. delta: what its inner steps made of its weights, ``(numel,) float32``.

        Raises LocalError if a value is not finite.
        """
        return encode_vector(
            state.anchor,
            delta,
            self._settings,
            grid=self.grid,
            codec_name=self.codec,
            round=round,
            dither=dither_of(self._swarm, round, self._me),
        )

    def stepped(
        self,
        before: CertifiedState,
        delta: F32,
        vector: GossipVector,
        *,
        other: F32 | None,
        tokens: int,
        memory: Callable[[int], F32] = lambda numel: np.empty(numel, np.float32),
    ) -> CertifiedState:
        """The state after the round of `vector`.

        other: the partner's vector, decoded; None without a partner. tokens: of all nodes in this round, as far as this
        one sees. memory: gives ``(numel,) float32`` for each vector of the state.
        """
        anchor, momentum = (memory(before.numel) for _ in range(2))
        exchanged = None if other is None else (decode_vector(vector.chunks, vector.grid, self.codec), other)
        outer_step(
            before.anchor,
            before.momentum,
            delta,
            self._settings,
            exchanged=exchanged,
            out=(anchor, momentum),
            buffers_begin=self._buffers_begin,
        )
        return CertifiedState(
            term=Term(),
            round=vector.offer.round,
            tokens=before.tokens + tokens,
            layout_hash=before.layout_hash,
            anchor=frozen(anchor),
            momentum=frozen(momentum),
        )
