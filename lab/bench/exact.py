"""Expected results of a benchmark's rounds, recomputed from the seed without the nodes' help.

Every number a node works with follows from the manifest: the synthetic contributions from seed, round and member, the
state from the contributions. So the digests in the nodes' logs are compared with digests computed here, and the error
of the mean is measured against a mean in float64 of what each node had before it was encoded.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from shoal.collectives.codecs import F32, codec
from shoal.collectives.grid import Grid
from shoal.collectives.outer import OuterSettings, nesterov_step
from shoal.collectives.state import CertifiedState, frozen, header_of
from shoal.lab.bench.swarm import SEED, BenchSpec
from shoal.lab.bench.synthetic import TOKENS, drawn_values, layout_of
from shoal.node.training.trainer_messages import Assignment
from shoal.protocol.manifest_sync import SyncSection
from shoal.protocol.messages import Term

THREADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """One round: the digest (hex) that all must have certified, and the largest error of its mean update."""

    round: int
    digest: str
    max_abs_error: float


class Recomputation:
    """The swarm of `spec` as long as every member contributes to every round, computed by one process."""

    def __init__(self, spec: BenchSpec) -> None:
        sync = SyncSection(inner_steps=1)
        self._peers = spec.peers
        self._grid = Grid(spec.numel, spec.chunk_values)
        self._codec = codec(spec.codec)
        self._outer = OuterSettings(lr=sync.outer_lr, momentum=sync.outer_momentum)
        self._layout = layout_of(spec.numel).digest
        self._anchor, self._momentum = np.zeros((2, spec.numel), np.float32)
        self._residuals = np.zeros((spec.peers, spec.numel), np.float32)

    def rounds(self, last: int) -> Iterator[Expected]:
        """Recompute rounds 1 to `last`. Takes about as long as the nodes took; blocks."""
        with ThreadPoolExecutor(THREADS) as pool:
            for round in range(1, last + 1):
                drawn = list(pool.map(lambda member, round=round: self._drawn(round, member), range(self._peers)))
                errors = pool.map(lambda chunk, drawn=drawn: self._chunk(chunk, drawn), range(self._grid.chunks))
                error = max(errors)
                yield Expected(round=round, digest=self._digest(round), max_abs_error=error)

    def _drawn(self, round: int, member: int) -> F32:
        assignment = Assignment(seed=SEED, round=round, member=member, members=self._peers)
        return drawn_values(assignment.stream_seed, self._grid.numel)

    def _chunk(self, chunk: int, drawn: list[F32]) -> float:
        """Take one chunk a round further, and return the largest error of its mean.

        The order is the plan's: members stand in it by their PeerId, which is how they are numbered.
        """
        at = slice(*self._grid.span(chunk))
        anchor = self._anchor[at]
        total = np.zeros(self._grid.length(chunk), np.float32)
        exact = np.zeros(self._grid.length(chunk), np.float64)
        for member, values in enumerate(drawn):
            pseudo_gradient = anchor - (anchor - values[at])  # rounded twice, as the trainer does
            given = pseudo_gradient + self._residuals[member, at]
            exact += given
            sent = self._through_codec(given)
            self._residuals[member, at] = given - sent
            total += sent
        update = self._through_codec(total / np.float32(self._peers))
        after, momentum = np.empty_like(total), np.empty_like(total)
        nesterov_step(anchor, self._momentum[at], update, self._outer, after, momentum)
        self._anchor[at], self._momentum[at] = after, momentum
        return float(np.abs(exact / self._peers - update).max())

    def _through_codec(self, values: F32) -> F32:
        decoded = np.empty_like(values)
        self._codec.decode_into(self._codec.encode(values), decoded)
        return decoded

    def _digest(self, round: int) -> str:
        state = CertifiedState(
            term=Term(),
            round=round,
            tokens=round * self._peers * TOKENS,
            layout_hash=self._layout,
            anchor=frozen(self._anchor.view()),
            momentum=frozen(self._momentum.view()),
        )
        return header_of(state, self._grid, threads=THREADS).digest.hex()
