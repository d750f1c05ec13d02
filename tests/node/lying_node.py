"""A node that lies about its sums, for tests: it adds one to a value of every chunk that it owns, and signs that."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.cli.main import main
from shoal.collectives.codecs import F32, U8
from shoal.collectives.finals import FinalChunk, FinalFormat
from shoal.protocol.identity import Identity


class LyingFormat(FinalFormat):
    """Signs what nobody's contributions come to."""

    def sign(
        self, identity: Identity, chunk: int, mean: F32, included: Sequence[int], payload: U8 | None = None
    ) -> FinalChunk:
        mean[0] += 1
        return super().sign(identity, chunk, mean, included, payload)


if __name__ == "__main__":
    from shoal.collectives import reduce

    reduce.FinalFormat = LyingFormat  # type: ignore[misc]
    main()
