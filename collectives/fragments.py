"""Fragments of the parameters: what one round reduces, where not all of them travel every time.

    fragment p of n  =  the chunks c of the grid with c mod n == p        (strided, so that all are of nearly one size)
    round e          reduces fragment e mod n

Chunks of buffers, which are the last of the grid, are in every fragment, behind the others.

A round of a fragment is an ordinary round on a shorter vector, that of its chunks in ascending order: plan, finals and
repair know nothing of the rest. One fragment is the whole vector.

Source: Streaming DiLoCo, arXiv 2501.18512, section 2.2 (the strided pattern; there of layers, here of chunks).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shoal.collectives.codecs import F32
from shoal.collectives.grid import Grid
from shoal.protocol.errors import ConfigError

CHUNK_VALUES_STEP = 4096
"""Divisor of every manifest's chunk_values."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """Fragment `number` of `count` of the vectors on the grid `whole`, whose last `buffers` chunks are buffers."""

    whole: Grid
    number: int
    count: int
    buffers: int = 0

    @property
    def parameter_chunks(self) -> range:
        """The numbers of its chunks of parameters on the whole grid, ascending."""
        return range(self.number, self.whole.chunks - self.buffers, self.count)

    @property
    def chunks(self) -> Sequence[int]:
        """The numbers of its chunks on the whole grid, ascending."""
        own, chunks = self.parameter_chunks, self.whole.chunks
        return (*own, *range(chunks - self.buffers, chunks)) if self.buffers else own

    @property
    def numel(self) -> int:
        """Number of values in the fragment."""
        short = self.whole.chunk_values - self.whole.length(self.whole.chunks - 1)
        chunks = self.chunks
        return len(chunks) * self.whole.chunk_values - short * (chunks[-1] == self.whole.chunks - 1)

    @property
    def grid(self) -> Grid:
        """The grid of its own values: its chunks in order, of which only the last may be short."""
        return Grid(self.numel, self.whole.chunk_values)

    def spans(self) -> Iterator[tuple[slice, slice]]:
        """Per chunk, where it lies in the whole vector, and where among the fragment's values."""
        at = 0
        for chunk in self.chunks:
            start, stop = self.whole.span(chunk)
            yield slice(start, stop), slice(at, at + stop - start)
            at += stop - start

    def runs(self) -> list[slice]:
        """Slices of the whole vector that it consists of, neighbouring chunks in one."""
        return runs_of(there for there, _ in self.spans())

    def parameter_runs(self) -> list[slice]:
        """The same of its parameters alone, which come first."""
        return runs_of(slice(*self.whole.span(chunk)) for chunk in self.parameter_chunks)

    def gather(self, vector: F32, out: F32) -> F32:
        """Copy its values out of `vector`, ``(whole.numel,)``, into `out`, ``(numel,)``, and return that."""
        for there, here in self.spans():
            out[here] = vector[there]
        return out

    def scatter(self, values: F32, vector: F32) -> None:
        """Copy `values`, ``(numel,)``, to their places in `vector`, ``(whole.numel,)``."""
        for there, here in self.spans():
            vector[there] = values[here]


@dataclass(frozen=True, slots=True)
class Fragments:
    """The vectors on `grid` in `count` fragments. buffers: how many of the chunks, the last ones, are buffers.

    Raises ConfigError if there are fewer chunks of parameters than fragments.
    """

    grid: Grid
    count: int = 1
    buffers: int = 0

    def __post_init__(self) -> None:
        chunks = self.grid.chunks - self.buffers
        if not 1 <= self.count <= chunks:
            numel = self.buffers_begin
            raise ConfigError(
                f"{numel} parameters are {chunks} chunks of {self.grid.chunk_values} values, too "
                f"few for {self.count} fragments; {_advice(numel, self.count)}"
            )

    @property
    def buffers_begin(self) -> int:
        """Place of the first buffer in a vector; its end where there is none."""
        return min(self.grid.numel, (self.grid.chunks - self.buffers) * self.grid.chunk_values)

    def __iter__(self) -> Iterator[Fragment]:
        return (self.fragment(number) for number in range(self.count))

    def fragment(self, number: int) -> Fragment:
        """Fragment `number` of them."""
        return Fragment(self.grid, number, self.count, self.buffers)

    def of_round(self, round: int) -> Fragment:
        """Return the fragment that the round `round` reduces."""
        return self.fragment(round % self.count)


def runs_of(spans: Iterable[slice]) -> list[slice]:
    """Ascending spans, with those that touch made one."""
    runs: list[slice] = []
    for span in spans:
        if runs and runs[-1].stop == span.start:
            runs[-1] = slice(runs[-1].start, span.stop)
        else:
            runs.append(span)
    return runs


def _advice(numel: int, count: int) -> str:
    """Which manifest would do."""
    finest = (numel - 1) // max(1, count - 1) // CHUNK_VALUES_STEP * CHUNK_VALUES_STEP
    if finest:
        return f"found the swarm with chunk_values = {finest} or less"
    return f"found the swarm with fragments = {max(1, -(-numel // CHUNK_VALUES_STEP))} or less"
