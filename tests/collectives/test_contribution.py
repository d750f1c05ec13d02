from __future__ import annotations

import numpy as np
import pytest

from shoal.collectives.codecs import F32, codec
from shoal.collectives.commitment import chunk_hash, merkle_root
from shoal.collectives.contribution import EncodedContribution, encoded_part, payload_bytes, residual_of_chunk
from shoal.collectives.grid import Grid
from shoal.protocol.errors import ConfigError, LocalError

GRID = Grid(23_457, 5_000)


def values(n: int) -> F32:
    return np.random.default_rng(n).standard_normal(GRID.numel).astype(np.float32)


def encode(n: int, name: str) -> EncodedContribution:
    return EncodedContribution.encode(values(n), GRID, name)


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8"])
def test_payload_is_the_encoded_chunk_and_its_proof(name: str) -> None:
    how, contribution = codec(name), encode(1, name)
    chunks = [how.encode(values(1)[slice(*GRID.span(c))]).tobytes() for c in range(GRID.chunks)]
    assert contribution.concatenated() == b"".join(chunks)
    assert contribution.root == merkle_root([chunk_hash(chunk) for chunk in chunks])
    for chunk in range(GRID.chunks):
        payload = np.frombuffer(contribution.payload(chunk), np.uint8)
        assert payload.size == payload_bytes(GRID, how, chunk)
        proven = encoded_part(payload, grid=GRID, codec=how, chunk=chunk, root=contribution.root)
        assert proven is not None
        assert proven.tobytes() == chunks[chunk]
        for at in (0, -1):
            changed = payload.copy()
            changed[at] ^= 1
            assert encoded_part(changed, grid=GRID, codec=how, chunk=chunk, root=contribution.root) is None


def test_encode_refuses_what_does_not_fit() -> None:
    with pytest.raises(LocalError):
        EncodedContribution.encode(values(1)[:-1], GRID, "fp32")
    with pytest.raises(LocalError, match="diverged"):
        EncodedContribution.encode(values(1) * np.float32(np.nan), GRID, "fp32")
    with pytest.raises(ConfigError):
        EncodedContribution.encode(values(1), GRID, "fp8")


def test_contribution_squares_are_of_what_the_others_decode() -> None:
    contribution = encode(3, "int8")
    decoded = contribution.decoded().astype(np.float64)
    want = [float((decoded[slice(*GRID.span(c))] ** 2).sum()) for c in range(GRID.chunks)]
    np.testing.assert_allclose(contribution.squares, want, rtol=1e-12)


def test_contribution_is_the_same_with_more_threads() -> None:
    one = encode(3, "int8")
    more = EncodedContribution.encode(values(3), GRID, "int8", threads=3)
    assert (more.buffer.tobytes(), more.root, more.squares) == (one.buffer.tobytes(), one.root, one.squares)
    with pytest.raises(ValueError, match="read-only"):
        one.buffer[0] = 1


def test_residual_is_the_error_where_included_and_everything_where_not() -> None:
    contribution = encode(2, "int8")
    error = values(2) - contribution.decoded()
    assert np.abs(error).max() > 0
    for chunk, included in enumerate([True, False, True, True, False]):
        at = slice(*GRID.span(chunk))
        residual = np.full(GRID.length(chunk), np.nan, np.float32)
        residual_of_chunk(values(2), contribution, chunk, included, residual)
        assert residual.tobytes() == (error if included else values(2))[at].tobytes()
    for wrong_values, wrong_residual in ((values(2)[1:], residual), (values(2), residual[1:])):
        with pytest.raises(LocalError):
            residual_of_chunk(wrong_values, contribution, GRID.chunks - 1, True, wrong_residual)
