"""The outer optimizer: what turns the mean update of a round into the next anchor, to the bit.

    momentum  m' = μ·m + g          on the chunks of the round's fragment (`fragments`); every other chunk of anchor and
    anchor    θ' = θ − lr·(g + μ·m')    momentum is that of the state before

Source: DiLoCo, arXiv 2311.08105, algorithm 1 (outer Nesterov, 0.7 and 0.9); the recurrence is that of
torch.optim.SGD(nesterov=True).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from blake3 import blake3

from shoal.collectives.codecs import F32, Codec, check_denormals, final_codec
from shoal.collectives.finals import FinalChunk, Finals
from shoal.collectives.fragments import Fragments
from shoal.collectives.grid import Grid
from shoal.collectives.state import CertifiedState, StateHeader, StateKind, check_grid, frozen, header_of
from shoal.collectives.vectors import VectorPool
from shoal.protocol.errors import LocalError
from shoal.protocol.manifest import SyncSection

SPAN_VALUES: Final = 1 << 17
"""Values that are decoded, applied and hashed together, in the cache: longer than the codecs' spans, for the hash."""


class _Own(threading.local):
    """This thread's own memory, kept: fresh pages cost more than the arithmetic."""

    def __init__(self) -> None:
        self.scratch: F32 = np.empty(SPAN_VALUES, np.float32)


_own = _Own()


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterSettings:
    """Learning rate and momentum of the outer step, and in how many fragments it is made, one a round.

    `lr=1, momentum=0` just takes the mean update.
    """

    lr: float = 0.7
    momentum: float = 0.9
    fragments: int = 1

    @classmethod
    def of(cls, sync: SyncSection) -> Self:
        """Those of a manifest."""
        return cls(lr=sync.outer_lr, momentum=sync.outer_momentum, fragments=sync.fragments)

    def __post_init__(self) -> None:
        if not (0 < self.lr <= 100 and 0 <= self.momentum < 1):
            raise LocalError(f"no outer step has lr {self.lr} and momentum {self.momentum}")


def nesterov_step(
    anchor: F32, momentum: F32, update: F32, settings: OuterSettings, out_anchor: F32, out_momentum: F32
) -> None:
    """One outer step: m' = μ·m + g, θ' = θ − lr·(g + μ·m').

    anchor θ, momentum m, update g: (n,) float32, not changed. Results into out_anchor and out_momentum, which must
    not overlap with the inputs. Every operation is rounded to fp32 by itself, in this order; bit-identical anywhere.
    """
    lr, mu = np.float32(settings.lr), np.float32(settings.momentum)
    np.multiply(momentum, mu, out=out_momentum)
    np.add(out_momentum, update, out=out_momentum)
    np.multiply(out_momentum, mu, out=out_anchor)
    np.add(update, out_anchor, out=out_anchor)
    np.multiply(out_anchor, lr, out=out_anchor)
    np.subtract(anchor, out_anchor, out=out_anchor)


class NextState:
    """S(e + 1) in the making over S(e): each chunk is applied and hashed while it is in the cache.

    The finals are those of a round, so of its fragment; every other chunk is copied, and keeps its hash. Those of a
    second plan of the round, after a repair, cost what differs: a chunk made from the very same final is left as it is.

    grid: of the state. vectors: where the memory comes from. header: gives that of `state`, where it is known; it is
    asked for only if there are chunks to copy, and hashed anew without it. `state` is not changed.

    Raises LocalError if the grid is another state's or too fine, ConfigError if it has fewer chunks than fragments.
    """

    def __init__(
        self,
        state: CertifiedState,
        settings: OuterSettings,
        grid: Grid,
        vectors: VectorPool,
        *,
        header: Callable[[], StateHeader] | None = None,
    ) -> None:
        check_grid(state, grid)
        self.base = state
        self._settings = settings
        self._grid = grid
        self._fragment = Fragments(grid, settings.fragments).of_round(state.round + 1)
        self._header = header or (lambda: header_of(state, grid))
        self._anchor, self._momentum = vectors.take(state.numel), vectors.take(state.numel)
        self._made_from: dict[int, FinalChunk] = {}
        self._hashes: list[tuple[bytes, bytes]] = [(b"", b"")] * grid.chunks
        self._rest = [chunk for chunk in range(grid.chunks) if chunk not in self._fragment.chunks]

    def complete(self, finals: Finals, threads: int = 1) -> StateHeader:
        """Apply what is missing of `finals`, in `threads` threads; the header of the state that they lead to.

        Raises LocalError if they do not follow the state, or a thread flushes subnormals; Undecodable for a final that
        nobody checked.
        """
        plan, state = finals.plan, self.base
        # The first round of a term stands on a state of an earlier one.
        if (plan.round, Grid.of(plan)) != (state.round + 1, self._fragment.grid) or plan.term < state.term:
            raise LocalError(
                f"finals of round {plan.round} ({plan.numel} values) do not follow round {state.round} ({state.numel})"
            )
        how = final_codec(plan.codec)
        wanted = list(zip(self._fragment.chunks, finals.chunks, strict=True))
        missing = [(chunk, final) for chunk, final in wanted if self._made_from.get(chunk) is not final]
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda one: self._apply(one[0], how, one[1]), missing))
            if self._rest:
                before = self._header()
                list(pool.map(lambda chunk: self._copy(chunk, before), self._rest))
                self._rest = []
        return StateHeader(
            term=plan.term,
            round=plan.round,
            tokens=state.tokens + finals.tokens,
            numel=state.numel,
            chunk_values=plan.chunk_values,
            layout=state.layout_hash,
            anchor=b"".join(anchor for anchor, _ in self._hashes),
            momentum=b"".join(momentum for _, momentum in self._hashes),
        )

    def _apply(self, chunk: int, how: Codec, final: FinalChunk) -> None:
        """Make chunk `chunk` of the state from its final, and hash it, in this thread."""
        self._made_from.pop(chunk, None)
        self._hashes[chunk] = self._make(chunk, how, final)
        self._made_from[chunk] = final

    def _make(self, chunk: int, how: Codec, final: FinalChunk) -> tuple[bytes, bytes]:
        check_denormals()
        begin, end = self._grid.span(chunk)
        hashes = blake3(), blake3()
        for start in range(begin, end, SPAN_VALUES):
            stop = min(start + SPAN_VALUES, end)
            update = how.decode_span(final.encoded, end - begin, start - begin, stop - begin, _own.scratch)
            made = self._anchor[start:stop], self._momentum[start:stop]
            before = self.base.anchor[start:stop], self.base.momentum[start:stop]
            nesterov_step(*before, update, self._settings, *made)
            for hasher, vector in zip(hashes, made, strict=True):
                hasher.update(vector.data.cast("B"))
        return hashes[0].digest(), hashes[1].digest()

    def _copy(self, chunk: int, before: StateHeader) -> None:
        """Take over a chunk that the round leaves as it is."""
        here = slice(*self._grid.span(chunk))
        self._anchor[here], self._momentum[here] = self.base.anchor[here], self.base.momentum[here]
        self._hashes[chunk] = before.chunk_hash(StateKind.ANCHOR, chunk), before.chunk_hash(StateKind.MOMENTUM, chunk)

    def take(self, header: StateHeader) -> CertifiedState:
        """The state that `complete` gave `header` of. Nothing can be applied any more: its memory is the state's."""
        return CertifiedState(
            term=header.term,
            round=header.round,
            tokens=header.tokens,
            layout_hash=header.layout,
            anchor=frozen(self._anchor),
            momentum=frozen(self._momentum),
        )


def advance(
    state: CertifiedState, finals: Finals, settings: OuterSettings, *, threads: int = 1
) -> tuple[CertifiedState, StateHeader]:
    """The certified state after the round of `finals`, and its header. `state` is not changed.

    Raises LocalError if the finals are of another round, term or size, or if a thread flushes subnormals.
    """
    after = NextState(state, settings, Grid(state.numel, finals.plan.chunk_values), VectorPool(0))
    header = after.complete(finals, threads)
    return after.take(header), header
