"""Overlap: copies, also disguised ones, stand out from contributions that members made themselves."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.collectives.codecs import F32
from shoal.collectives.overlap import COPY_OVERLAP, lookalikes, lookalikes_in_chunk, overlap
from shoal.protocol.errors import LocalError
from shoal.protocol.identity import PeerId
from tests.collectives.encodings import f32
from tests.collectives.reduce_lab import GRID, crafted, encode, make_plan, peer

ONE, TWO, THREE = (PeerId(name) for name in ("a", "b", "c"))


def drawn(seed: int, n: int = 6400) -> F32:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def test_overlap_counts_largest_values_in_place_and_sign() -> None:
    assert overlap(f32(9, -8, 1, 0), f32(7, -6, 0, 1), 0.5) == 1
    assert overlap(f32(9, -8, 1, 0), f32(7, 6, 0, 1), 0.5) == 0.5
    assert overlap(f32(9, -8, 1, 0), f32(0, 1, 8, 9), 0.5) == 0
    assert overlap(f32(0, 0, 0, 0), f32(0, 0, 0, 0), 0.5) == 0  # who contributes nothing copies nobody
    assert overlap(f32(3), f32(4)) == 1
    assert overlap(f32(3), f32(-4)) == 0
    with pytest.raises(LocalError):
        overlap(f32(1), f32(1, 2))


def test_copy_with_noise_is_found_and_kin_is_not() -> None:
    common, own = drawn(0), [drawn(seed) for seed in (1, 2)]
    kin = [common + one for one in own]  # half of what either learnt is the same
    assert overlap(*kin) < COPY_OVERLAP / 2
    disguised = np.float32(1.7) * kin[0] + np.float32(0.02) * drawn(3)
    found = lookalikes({ONE: kin[0], TWO: kin[1], THREE: disguised})
    assert list(found) == [(ONE, THREE)]
    assert found[ONE, THREE] >= COPY_OVERLAP
    assert found[ONE, THREE] == overlap(kin[0], disguised)
    with pytest.raises(LocalError):
        lookalikes({ONE: drawn(0), TWO: drawn(1, 6401)})


def test_copies_are_found_in_one_chunk_as_it_was_encoded() -> None:
    made = [encode(0, "int8"), encode(1, "int8"), encode(0, "int8")]
    plan, whole, last = make_plan(made, [1, 1, 1]), 0, GRID.chunks - 1
    pair = (min(peer(0), peer(2)), max(peer(0), peer(2)))
    chunk = {place: one.encoded(whole) for place, one in enumerate(made)}
    assert lookalikes_in_chunk(plan, whole, chunk) == {pair: 1.0}
    payloads = {place: np.frombuffer(one.payload(whole), np.uint8) for place, one in enumerate(made)}
    assert lookalikes_in_chunk(plan, whole, payloads) == {pair: 1.0}
    assert lookalikes_in_chunk(plan, last, {n: one.encoded(last) for n, one in enumerate(made)}) == {}  # too short
    spoilt = crafted(made[2], {whole: b"\xff" * made[2].encoded(whole).size}, commit=True)
    assert lookalikes_in_chunk(plan, whole, chunk | {2: spoilt.encoded(whole)}) == {}
