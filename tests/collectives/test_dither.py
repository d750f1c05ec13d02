"""Every chunk, role, sender and round has a stream of its own, and an auditor can draw it again."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from shoal.collectives.contribution import EncodedContribution
from shoal.collectives.dither import Dither
from shoal.collectives.finals import FinalFormat
from shoal.collectives.grid import Grid
from shoal.collectives.reference import reference
from shoal.protocol.errors import LocalError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.messages import NO_HASH, OwnedRange, Participant
from tests.collectives.encodings import codec, pattern
from tests.round_messages import plan_with

ONE = Dither(bytes(32), "contribution", PeerId("one"))
COUNT = 1 << 16
GRID = Grid(4 * 5000, 5000)
ALICE, BOB = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2))


def test_dither_has_the_golden_bits_on_every_machine() -> None:
    bits = Dither(bytes(range(32)), "contribution", PeerId("golden")).chunk(3).bits(0, 6)
    assert bits.tolist() == [15663, 25777, 9492, 44273, 53813, 24596]
    bits = Dither(bytes(range(32)), "final", PeerId("golden")).chunk(1 << 13).bits(70_000, 70_003)
    assert bits.tolist() == [60905, 30798, 31498]


def test_dither_of_a_span_is_part_of_the_chunk_s() -> None:
    whole = ONE.chunk(0).bits(0, 10_000)
    assert np.array_equal(ONE.chunk(0).bits(4096, 10_000), whole[4096:])
    assert np.array_equal(ONE.chunk(0).bits(0, 1), whole[:1])


OTHERS = {
    "round": replace(ONE, base=bytes(31) + b"\1").chunk(0),
    "role": replace(ONE, role="final").chunk(0),
    "sender": replace(ONE, sender=PeerId("two")).chunk(0),
    "chunk": ONE.chunk(1),
}


@pytest.mark.parametrize("what", OTHERS)
def test_dither_of_another_round_role_sender_or_chunk_is_independent(what: str) -> None:
    one, other = (stream.bits(0, COUNT).astype(np.float64) for stream in (ONE.chunk(0), OTHERS[what]))
    assert np.count_nonzero(one == other) < 10  # one is expected
    assert abs(np.corrcoef(one, other)[0, 1]) < 4 / np.sqrt(COUNT)


def test_dither_is_uniform() -> None:
    bits = ONE.chunk(0).bits(0, COUNT)
    for part in (bits >> 8, bits & 0xFF):  # both bytes: 256 cells of 256 expected each, chi-squared with 255 degrees
        cells = np.bincount(part, minlength=256)
        assert abs(float(((cells - 256) ** 2 / 256).sum()) - 255) < 4 * np.sqrt(2 * 255)


def test_contribution_draws_for_each_chunk_anew() -> None:
    values = np.tile(pattern(GRID.chunk_values, 2.0**-25), GRID.chunks)
    contribution = EncodedContribution.encode(values, GRID, "int4", dither=ONE, threads=3)
    chunks = [contribution.encoded(chunk).tobytes() for chunk in range(GRID.chunks)]
    assert len(set(chunks)) == GRID.chunks
    same = values[: GRID.chunk_values]
    assert chunks == [codec("int4").encode(same, dither=ONE.chunk(n)).tobytes() for n in range(GRID.chunks)]
    with pytest.raises(LocalError, match="dither"):
        EncodedContribution.encode(values, GRID, "int4")


def test_final_rounds_with_its_owner_s_dither_and_the_reference_knows_it() -> None:
    base, weights, senders = bytes([7]) * 32, (3, 5), (ALICE, BOB)
    given = [
        EncodedContribution.encode(
            pattern(GRID.numel, scale), GRID, "int4", dither=Dither(base, "contribution", who.peer_id)
        )
        for who, scale in zip(senders, (2.0**-25, 3e-8), strict=True)
    ]
    plan = plan_with(
        (Participant(w.peer_id, n, n, c.root) for w, n, c in zip(senders, weights, given, strict=True)),
        GRID,
        base=base,
        owners=(OwnedRange(1, 0, 1), OwnedRange(0, 1, GRID.chunks)),
        codec="int4",
    )
    three, five = (contribution.decoded() for contribution in given)
    means = (np.float32(3) * three + np.float32(5) * five) / np.float32(8)
    final_format = FinalFormat(plan)
    finals = [
        final_format.sign(owner, chunk, means[slice(*GRID.span(chunk))], [0, 1]).encoded.tobytes()
        for chunk, owner in enumerate((BOB, ALICE, ALICE, ALICE))
    ]
    by_peer = {who.peer_id: contribution.concatenated() for who, contribution in zip(senders, given, strict=True)}
    assert reference(plan, by_peer, [b"\3"] * GRID.chunks).finals == b"".join(finals)
    # The same mean in other hands, in another chunk, or in another round is rounded otherwise.
    mean = means[:5000]
    other_round = FinalFormat(msgspec.structs.replace(plan, base=NO_HASH))
    again = [
        final_format.sign(ALICE, 0, mean, [0, 1]),
        final_format.sign(BOB, 1, mean, [0, 1]),
        other_round.sign(BOB, 0, mean, [0, 1]),
    ]
    assert len({finals[0], *(final.encoded.tobytes() for final in again)}) == 4
