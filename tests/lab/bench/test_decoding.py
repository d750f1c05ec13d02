"""What a benchmark adds for decoding: that finals are really decoded, all of them, and by which calls."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from shoal.collectives.codecs import F32, Codec, final_codec
from shoal.collectives.outer import SPAN_VALUES
from shoal.lab.bench import decoding
from shoal.lab.bench.decoding import REPETITIONS, decode_s

CHUNK_VALUES = SPAN_VALUES + 4096
NUMEL = 2 * CHUNK_VALUES + 1


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4"])
def test_every_value_of_every_peer_is_decoded_each_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[tuple[int, float]] = []
    lock = threading.Lock()

    class Noting:
        """The codec of that name, whose spans are noted."""

        def __init__(self, how: Codec) -> None:
            self.encode, self.encoded_bytes = how.encode, how.encoded_bytes
            self._decode_span = how.decode_span

        def decode_span(self, encoded: F32, n: int, start: int, stop: int, scratch: F32, *, checked: bool) -> F32:
            values = self._decode_span(encoded, n, start, stop, scratch, checked=checked)
            with lock:
                decoded.append((values.size, float(np.abs(values).max())))
            return values

    monkeypatch.setattr(decoding, "final_codec", lambda name: Noting(final_codec(name)))
    assert decode_s(peers=3, numel=NUMEL, chunk_values=CHUNK_VALUES, codec=name) > 0
    assert sum(size for size, _ in decoded) == REPETITIONS * 3 * NUMEL
    assert 0.45 < max(largest for _, largest in decoded) < 0.6
