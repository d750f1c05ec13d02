"""The outer optimizer: what turns the mean update of a round into the next anchor, to the bit.

Where a strategy averages gradients it is AdamW on their mean (`adamw`). Else it is Nesterov momentum on the mean
pseudo-gradient g:

    momentum  m' = μ·m + g          on the chunks of the round's fragment (`fragments`); every other chunk of anchor and
    anchor    θ' = θ − lr·(g + μ·m')    momentum is that of the state before

Buffers take no outer step: their mean takes the place of the values before, which stay where nobody's are in it. Every
other vector of a state is 0 there.

Source: DiLoCo, arXiv 2311.08105, algorithm 1 (outer Nesterov, 0.7 and 0.9); the recurrence is that of
torch.optim.SGD(nesterov=True).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Self

import msgspec
import numpy as np
from blake3 import blake3

from shoal.collectives.adamw import F64, NORM_SPAN_VALUES, AdamWFactors, adamw_step, square_sum
from shoal.collectives.codecs import F32, Codec, check_denormals, final_chunk_codec
from shoal.collectives.finals import FinalChunk, Finals
from shoal.collectives.fragments import Fragments
from shoal.collectives.grid import Grid
from shoal.collectives.memory import VectorPool, own_array
from shoal.collectives.policy_image import image_of
from shoal.collectives.state import (
    ADAMW_KINDS,
    NESTEROV_KINDS,
    CertifiedState,
    StateHeader,
    StateKind,
    check_grid,
    frozen,
    header_of,
)
from shoal.protocol.errors import LocalError
from shoal.protocol.manifest import InnerSection, Manifest
from shoal.protocol.messages import Plan
from shoal.protocol.planning import split_codec
from shoal.protocol.strategies.strategy import AdamW

SPAN_VALUES: Final = 1 << 17
"""Values that are decoded, applied and hashed together, in the cache: longer than the codecs' spans, for the hash."""


class _Own(threading.local):
    """This thread's own memory, kept: fresh pages cost more than the arithmetic."""

    def __init__(self) -> None:
        self.scratch: F32 = own_array(max(SPAN_VALUES, NORM_SPAN_VALUES), np.float32)
        self.more: F32 = own_array(SPAN_VALUES, np.float32)
        self.squares: F64 = own_array(NORM_SPAN_VALUES, np.float64)


_own = _Own()


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterSettings:
    """Learning rate and momentum of the outer step, and in how many fragments it is made, one a round.

    `lr=1, momentum=0` just takes the mean update. adamw: the settings of the step where it is AdamW, of which lr and
    momentum are no part; there is one fragment then. imaged: whether digests cover states' images.
    """

    lr: float = 0.7
    momentum: float = 0.9
    fragments: int = 1
    adamw: InnerSection | None = None
    imaged: bool = False

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        """Take the settings from a manifest."""
        sync = manifest.sync
        step = sync.outer_step
        if isinstance(step, AdamW):
            return cls(adamw=manifest.inner)
        imaged = manifest.rollouts is not None and manifest.rollouts.images
        return cls(lr=step.lr, momentum=step.momentum, fragments=sync.fragments, imaged=imaged)

    @property
    def kinds(self) -> tuple[StateKind, ...]:
        """The vectors of a state that this step leads to and begins with."""
        return NESTEROV_KINDS if self.adamw is None else ADAMW_KINDS

    def __post_init__(self) -> None:
        if self.adamw is not None and self.fragments != 1:
            raise LocalError("AdamW steps on all parameters at once")
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
    So is one that was made ahead, straight after its final was checked and while that was in the cache (`ahead`).

    grid: of the state. buffers: how many of its chunks, the last ones, are buffers. vectors: where the memory comes
    from. header: gives that of `state`, where it is known; it is
    asked for only if there are chunks to copy, and hashed anew without it. `state` is not changed.

    Raises LocalError if the grid is another state's or too fine, or the state of another outer optimizer; ConfigError
    if it has fewer chunks than fragments.
    """

    def __init__(
        self,
        state: CertifiedState,
        settings: OuterSettings,
        grid: Grid,
        vectors: VectorPool,
        *,
        buffers: int = 0,
        header: Callable[[], StateHeader] | None = None,
    ) -> None:
        check_grid(state, grid)
        if state.kinds != settings.kinds or state.imaged != settings.imaged:
            raise LocalError(f"a state of {', '.join(state.kinds)} is not one of this outer optimizer, or its images")
        self.base = state
        self._settings = settings
        self._grid = grid
        self._fragment = Fragments(grid, settings.fragments, buffers).of_round(state.round + 1)
        self._chunks = self._fragment.chunks
        self._header = header or (lambda: header_of(state, grid))
        self._made = {kind: vectors.take(state.numel) for kind in state.kinds}
        self._made_from: dict[int, tuple[FinalChunk, AdamWFactors | None]] = {}
        self._squares: dict[int, tuple[FinalChunk, float]] = {}
        self._hashes: list[tuple[bytes, ...]] = [(b"",) * (len(state.kinds) + 1)] * grid.chunks
        """Of each chunk those of its vectors, and of its image where the state is imaged."""
        reduced = set(self._chunks)
        self._rest = [chunk for chunk in range(grid.chunks) if chunk not in reduced]
        self._chunk_locks = [threading.Lock() for _ in range(grid.chunks)]
        self._turns = threading.Lock()
        """Guards whose turn it is: of `complete`, or of who applies ahead."""
        self._completing = self._closed = False
        self._ahead: object = None

    def ahead(self, plan: Plan) -> Callable[[FinalChunk], None]:
        """Return what applies a final of `plan` before all are checked: call it with each that was, in any thread.

        It does nothing once `complete` or `close` was called, or `ahead` for another plan. AdamW's step needs all
        finals: only their squares are added up ahead.

        Raises LocalError as `complete` does, now or when it is called.
        """
        self._check_follows(plan)
        grid, turn = self._fragment.grid, object()
        with self._turns:
            if not (self._completing or self._closed):
                self._ahead = turn

        def apply(final: FinalChunk) -> None:
            chunk, how = self._chunks[final.chunk], final_chunk_codec(plan.codec, grid, final.chunk)
            with self._chunk_locks[chunk]:
                if self._ahead is not turn:
                    return
                if self._settings.adamw is not None:
                    self._squares_of(chunk, how, final)
                elif not self._is_made(chunk, final, None):
                    self._apply(chunk, how, final, None)

        return apply

    def close(self) -> None:
        """Have nothing applied ahead from now on."""
        with self._turns:
            self._closed, self._ahead = True, None

    def complete(self, finals: Finals, threads: int = 1) -> StateHeader:
        """Apply what is missing of `finals`, in `threads` threads; the header of the state that they lead to.

        Raises LocalError if they do not follow the state, or a thread flushes subnormals; Undecodable for a final that
        nobody checked.
        """
        plan, state = finals.plan, self.base
        self._check_follows(plan)
        with self._turns:
            self._completing, self._ahead = True, None
        try:
            self._make_all(finals, threads)
        finally:
            self._completing = False
        return StateHeader(
            term=plan.term,
            round=plan.round,
            tokens=state.tokens + finals.tokens,
            numel=state.numel,
            chunk_values=plan.chunk_values,
            layout=state.layout_hash,
            anchor=self._hashes_of(StateKind.ANCHOR),
            momentum=self._hashes_of(StateKind.MOMENTUM),
            second_moment=self._hashes_of(StateKind.SECOND_MOMENT),
            image=b"".join(hashes[-1] for hashes in self._hashes) if state.imaged else msgspec.UNSET,
        )

    def _check_follows(self, plan: Plan) -> None:
        state = self.base
        # The first round of a term stands on a state of an earlier one.
        if (plan.round, Grid.of(plan)) != (state.round + 1, self._fragment.grid) or plan.term < state.term:
            raise LocalError(
                f"finals of round {plan.round} ({plan.numel} values) do not follow round {state.round} ({state.numel})"
            )

    def _make_all(self, finals: Finals, threads: int) -> None:
        name, grid = finals.plan.codec, self._fragment.grid
        wanted = [
            (chunk, final_chunk_codec(name, grid, final.chunk), final)
            for chunk, final in zip(self._chunks, finals.chunks, strict=True)
        ]
        with ThreadPoolExecutor(threads) as pool:
            factors = self._factors(pool, wanted)
            missing = [one for one in wanted if not self._stands(one[0], one[2], factors)]
            list(pool.map(lambda one: self._apply(one[0], one[1], one[2], factors), missing))
            if self._rest:
                before = self._header()
                list(pool.map(lambda chunk: self._copy(chunk, before), self._rest))
                self._rest = []

    def _stands(self, chunk: int, final: FinalChunk, factors: AdamWFactors | None) -> bool:
        """True if a chunk need not be made; waits for whoever is still applying another final to it ahead."""
        with self._chunk_locks[chunk]:
            return self._is_made(chunk, final, factors)

    def _hashes_of(self, kind: StateKind) -> bytes:
        """Join the hashes of all chunks of one vector; nothing for a vector that the state has not."""
        if kind not in self.base.kinds:
            return b""
        place = self.base.kinds.index(kind)
        return b"".join(hashes[place] for hashes in self._hashes)

    def _factors(
        self, pool: ThreadPoolExecutor, wanted: Sequence[tuple[int, Codec, FinalChunk]]
    ) -> AdamWFactors | None:
        """Compute the factors of an AdamW step with the mean gradient in these finals; None for Nesterov's."""
        adamw, state = self._settings.adamw, self.base
        if adamw is None:
            return None
        total = 0.0
        for squares in pool.map(lambda one: self._squares_of(*one), wanted):
            total += squares
        return AdamWFactors.of(adamw, steps=state.round + 1, tokens=state.tokens, norm=math.sqrt(total))

    def _squares_of(self, chunk: int, how: Codec, final: FinalChunk) -> float:
        """The sum of the squares in a final, worked out once, in this thread; 0 of buffers, which are no gradient."""
        if how.plain:
            return 0.0
        known = self._squares.get(chunk)
        if known is not None and known[0] is final:
            return known[1]
        check_denormals()
        total = 0.0
        for start, stop in self._spans(chunk, NORM_SPAN_VALUES):
            total += square_sum(self._decode(chunk, how, final, start, stop), _own.squares)
        self._squares[chunk] = final, total
        return total

    def _spans(self, chunk: int, length: int) -> Iterator[tuple[int, int]]:
        begin, end = self._grid.span(chunk)
        for start in range(begin, end, length):
            yield start, min(start + length, end)

    def _decode(self, chunk: int, how: Codec, final: FinalChunk, start: int, stop: int) -> F32:
        """The values of a final from `start` to `stop` of the model: in this thread's scratch memory, or a view."""
        begin, end = self._grid.span(chunk)
        span = start - begin, stop - begin
        return how.decode_span(final.encoded, end - begin, *span, _own.scratch, checked=final.sound)

    def _is_made(self, chunk: int, final: FinalChunk, factors: AdamWFactors | None) -> bool:
        made = self._made_from.get(chunk)
        return made is not None and made[0] is final and made[1] == factors

    def _apply(self, chunk: int, how: Codec, final: FinalChunk, factors: AdamWFactors | None) -> None:
        """Make chunk `chunk` of the state from its final, and hash it, in this thread."""
        self._made_from.pop(chunk, None)
        self._hashes[chunk] = self._make(chunk, how, final, factors)
        self._made_from[chunk] = final, factors

    def _make(self, chunk: int, how: Codec, final: FinalChunk, factors: AdamWFactors | None) -> tuple[bytes, ...]:
        check_denormals()
        if how.plain:
            return self._make_buffers(chunk, how, final)
        hashers, of_image = [blake3() for _ in self._made], blake3()
        for start, stop in self._spans(chunk, SPAN_VALUES):
            update = self._decode(chunk, how, final, start, stop)
            made = [vector[start:stop] for vector in self._made.values()]
            before = [self.base.vector(kind)[start:stop] for kind in self.base.kinds]
            if factors is None:
                nesterov_step(before[0], before[1], update, self._settings, made[0], made[1])
            else:
                moments = before[0], before[1], before[2]
                adamw_step(moments, update, factors, (made[0], made[1], made[2]), _own.more[: stop - start])
            for hasher, vector in zip(hashers, made, strict=True):
                hasher.update(vector.data.cast("B"))
            if self.base.imaged:
                of_image.update(image_of(made[0]).data)
        return (*(hasher.digest() for hasher in hashers), of_image.digest())

    def _make_buffers(self, chunk: int, how: Codec, final: FinalChunk) -> tuple[bytes, ...]:
        here = slice(*self._grid.span(chunk))
        for kind, vector in self._made.items():
            if kind is not StateKind.ANCHOR:
                vector[here] = 0
            elif any(final.bitmap):
                how.decode_into(final.encoded, vector[here])
            else:
                vector[here] = self.base.anchor[here]
        hashes = [blake3(vector[here].data.cast("B")).digest() for vector in self._made.values()]
        anchor = self._made[StateKind.ANCHOR][here]
        return (*hashes, blake3(image_of(anchor).data).digest() if self.base.imaged else b"")

    def _copy(self, chunk: int, before: StateHeader) -> None:
        """Take over a chunk that the round leaves as it is."""
        here = slice(*self._grid.span(chunk))
        for kind, vector in self._made.items():
            vector[here] = self.base.vector(kind)[here]
        hashes = [before.chunk_hash(kind, chunk) for kind in self.base.kinds]
        image = before.of_image
        self._hashes[chunk] = (*hashes, b"" if image is None else image.chunk_hash(chunk))

    def take(self, header: StateHeader) -> CertifiedState:
        """The state that `complete` gave `header` of. Nothing can be applied any more: its memory is the state's."""
        return CertifiedState.of_vectors(
            [frozen(vector) for vector in self._made.values()],
            term=header.term,
            round=header.round,
            tokens=header.tokens,
            layout_hash=header.layout,
            imaged=self.base.imaged,
        )


def advance(
    state: CertifiedState, finals: Finals, settings: OuterSettings, *, threads: int = 1
) -> tuple[CertifiedState, StateHeader]:
    """The certified state after the round of `finals`, and its header. `state` is not changed.

    Raises LocalError if the finals are of another round, term or size, or if a thread flushes subnormals.
    """
    grid, (_, buffers) = Grid(state.numel, finals.plan.chunk_values), split_codec(finals.plan.codec)
    after = NextState(state, settings, grid, VectorPool(0), buffers=buffers)
    header = after.complete(finals, threads)
    return after.take(header), header
