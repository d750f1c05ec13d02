"""Time that the nodes of a benchmark take to decode the finals, which are all there by then.

A node decodes finals span by span while it makes the next state of them, so that no log tells this part from the rest.
Here it is done alone, by the same calls: the finals of as many peers, by all cores of the machine they run on.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np

from shoal.collectives.codecs import F32, U8, Codec, final_codec
from shoal.collectives.dither import Dither
from shoal.collectives.grid import Grid
from shoal.collectives.outer import SPAN_VALUES
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import NO_HASH

REPETITIONS: Final = 5
_PEER: Final = PeerId("bench")


def decode_s(*, peers: int, numel: int, chunk_values: int, codec: str) -> float:
    """Seconds that `peers` nodes take to decode `numel` values each, all at once: the median of some. Blocks."""
    how, grid = final_codec(codec), Grid(numel, chunk_values)
    cores = os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as pool:
        finals = list(pool.map(lambda chunk: _final(how, grid, chunk), range(grid.chunks)))
        everyones = [finals, *([final.copy() for final in finals] for _ in range(peers - 1))]
        return statistics.median(_decode_all(pool, cores, how, grid, everyones) for _ in range(REPETITIONS))


def _final(how: Codec, grid: Grid, chunk: int) -> U8:
    length = grid.length(chunk)
    encoded = np.empty(how.encoded_bytes(length), np.uint8)
    values = np.random.default_rng(chunk).random(length, np.float32) - np.float32(0.5)
    how.encode(values, out=encoded, dither=Dither(NO_HASH, "final", _PEER).chunk(chunk))
    return encoded


def _decode_all(
    pool: ThreadPoolExecutor, cores: int, how: Codec, grid: Grid, everyones: Sequence[Sequence[U8]]
) -> float:
    def decode_share(core: int) -> None:
        scratch: F32 = np.zeros(SPAN_VALUES, np.float32)
        for finals in everyones:
            for chunk in range(core, grid.chunks, cores):
                length = grid.length(chunk)
                for start in range(0, length, SPAN_VALUES):
                    stop = min(start + SPAN_VALUES, length)
                    how.decode_span(finals[chunk], length, start, stop, scratch, checked=True)

    began = time.perf_counter()
    list(pool.map(decode_share, range(cores)))
    return time.perf_counter() - began
