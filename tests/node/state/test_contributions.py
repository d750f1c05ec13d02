"""Progress is counted once: what certificates counted, and what is still carried, is all that was ever learnt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from shoal.collectives.codecs import F32
from shoal.collectives.fragments import Fragments
from shoal.collectives.grid import Grid
from shoal.lab.signed import certified
from shoal.node.state.contributions import Contributions, Made, read_work, write_work
from shoal.node.state.file_memory import FilePool, mapping_of
from shoal.protocol.certificate import genesis
from shoal.protocol.chain import Chain
from shoal.protocol.errors import LocalError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.messages import WEIGHT_LIMIT, Term
from tests.manifests import manifest_of
from tests.protocol.lab import SWARM, plan_hash, value_of

GRID = Grid(10_000, 4096)
ALL, NONE = (True, True, True), (False, False, False)
SOME = (True, False, True)


def whole(seed: int) -> F32:
    """Small whole numbers: sums of them are exact in float32, whatever the order."""
    return np.random.default_rng(seed).integers(-1000, 1000, GRID.numel).astype(np.float32)


def real(seed: int) -> F32:
    return np.random.default_rng(seed).standard_normal(GRID.numel).astype(np.float32)


def contributions_in(codec: str, staleness_rounds: int = 3, *, sender: str = "me") -> Contributions:
    return Contributions(Fragments(GRID), codec, staleness_rounds, sender=PeerId(sender))


def make(contributions: Contributions, round: int, number: int, tokens: int, gradient: F32) -> Made:
    """As the node does, on a chain in which every certificate has another hash."""
    return contributions.make(round, number, tokens, gradient, base=round.to_bytes(32, "little"))


def counted(decoded: F32, included: Sequence[bool]) -> F32:
    """What a certificate with these bits takes over of a contribution."""
    out = np.zeros_like(decoded)
    for chunk, bit in enumerate(included):
        if bit:
            at = slice(*GRID.span(chunk))
            out[at] = decoded[at]
    return out


def residual(contributions: Contributions, codec: str) -> F32:
    """What would go into a round in which nothing was learnt."""
    made = make(contributions, 999, 999, 0, np.zeros(GRID.numel, np.float32))
    values = np.array(made.values)
    contributions.settle(999, NONE)
    return values


def test_a_certificate_of_another_number_of_chunks_is_refused_when_it_comes() -> None:
    contributions = contributions_in("int8")
    make(contributions, 1, 1, 10, real(1))
    with pytest.raises(LocalError, match="2 verdicts on a contribution of 3 chunks"):
        contributions.settle(1, (True, True))


SEQUENCES: list[list[Sequence[bool] | None]] = [
    [ALL, ALL, ALL],
    [NONE, NONE, ALL],
    [SOME, SOME, NONE, SOME],
    [None, ALL, None, SOME, None],
    [NONE, SOME, ALL, NONE],
]


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_progress_is_counted_exactly_once_with_fp32(sequence: list[Sequence[bool] | None]) -> None:
    contributions = contributions_in("fp32", 10)
    learnt, certified = np.zeros(GRID.numel, np.float32), np.zeros(GRID.numel, np.float32)
    for round, bits in enumerate(sequence, start=1):
        gradient = whole(round)
        learnt += gradient
        made = make(contributions, round, round, 100, gradient)
        certified += counted(made.encoded.decoded(), bits or NONE)
        contributions.settle(round, bits)
        assert contributions.made is None
    assert np.array_equal(certified + residual(contributions, "fp32"), learnt)


@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize("codec", ["int8", "bf16", "int4", "2bit"])
def test_progress_is_counted_once_within_rounding(codec: str, sequence: list[Sequence[bool] | None]) -> None:
    contributions = contributions_in(codec, 10)
    learnt, certified = np.zeros(GRID.numel, np.float64), np.zeros(GRID.numel, np.float64)
    for round, bits in enumerate(sequence, start=1):
        gradient = real(round)
        learnt += gradient
        made = make(contributions, round, round, 100, gradient)
        certified += counted(made.encoded.decoded(), bits or NONE)
        contributions.settle(round, bits)
    carried = residual(contributions, codec)
    np.testing.assert_allclose(certified + carried, learnt, rtol=0, atol=1e-5)
    if sequence[-1] is ALL:  # all that is carried is the error of one encoding
        assert 0 < np.abs(carried).max() < {"int4": 1.2, "2bit": 8}.get(codec, 0.05)


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_error_of_many_rounds_is_never_more_than_that_of_one(codec: str) -> None:
    gradient = real(1)  # the same in every round, as if there were nothing left but one direction
    contributions, certified = contributions_in(codec), np.zeros(GRID.numel, np.float64)
    # A step is at most a 127th or a 7th of the peak of a block, which is the gradient's and the last error.
    step = np.abs(gradient).max() * (1.01 / 126 if codec == "int8" else 1.01 / 6)
    errors = []
    for round in range(1, 201):
        made = make(contributions, round, round, 100, gradient)
        certified += made.encoded.decoded()
        contributions.settle(round, ALL)
        errors.append(np.abs(certified - round * gradient.astype(np.float64)))
    assert max(error.max() for error in errors) < step
    mean_of_errors = [float(error.mean()) for error in errors]
    assert max(mean_of_errors[100:]) < 1.1 * max(mean_of_errors[10:100])


def test_contribution_in_int4_depends_on_the_round_and_on_who_makes_it() -> None:
    made = [
        make(contributions_in("int4"), 1, 1, 100, real(1)),
        make(contributions_in("int4"), 2, 1, 100, real(1)),
        make(contributions_in("int4", sender="you"), 1, 1, 100, real(1)),
    ]
    assert len({one.encoded.root for one in made}) == 3
    assert make(contributions_in("int4"), 1, 1, 100, real(1)).encoded.root == made[0].encoded.root


def test_quantisation_error_is_carried_into_the_next_round() -> None:
    contributions = contributions_in("int8")
    first = make(contributions, 1, 1, 100, real(1))
    contributions.settle(1, ALL)
    second = make(contributions, 2, 2, 100, real(2))
    error = first.values - first.encoded.decoded()
    assert np.abs(error).max() > 0
    assert second.values.tobytes() == (real(2) + error).tobytes()


def test_tokens_are_carried_until_a_chunk_counts() -> None:
    contributions = contributions_in("fp32", 10)
    made = []
    for round, bits in enumerate([None, NONE, SOME, NONE, ALL, ALL], start=1):
        made.append(make(contributions, round, round, 100, whole(round)).tokens)
        contributions.settle(round, bits)
    assert made == [100, 200, 300, 100, 200, 100]


def test_tokens_stop_at_the_limit_of_a_weight() -> None:
    contributions = contributions_in("fp32", 10)
    make(contributions, 1, 1, WEIGHT_LIMIT - 1, whole(1))
    contributions.settle(1, None)
    assert make(contributions, 2, 2, 100, whole(2)).tokens == WEIGHT_LIMIT


@pytest.mark.parametrize("staleness_rounds", [0, 1, 3])
def test_what_was_excluded_for_too_long_is_dropped(staleness_rounds: int) -> None:
    contributions = contributions_in("fp32", staleness_rounds)
    total = np.zeros(GRID.numel, np.float32)
    for round in range(1, staleness_rounds + 1):
        total += whole(round)
        made = make(contributions, round, round, 100, whole(round))
        contributions.settle(round, NONE)
        assert np.array_equal(made.values, total)
        assert made.tokens == 100 * round
    last = staleness_rounds + 1
    made = make(contributions, last, last, 100, whole(last))
    assert np.array_equal(made.values, total + whole(last))  # still offered once more
    contributions.settle(last, None)
    fresh = make(contributions, last + 1, last + 1, 100, whole(50))
    assert np.array_equal(fresh.values, whole(50))
    assert fresh.tokens == 100


def test_one_included_chunk_ends_the_count_of_exclusions() -> None:
    contributions = contributions_in("fp32", 1)
    for round, bits in enumerate([NONE, SOME, NONE, SOME, NONE], start=1):
        make(contributions, round, round, 100, whole(round))
        contributions.settle(round, bits)
    # The chunk that was never included still waits for its turn.
    excluded = slice(*GRID.span(1))
    want = sum(whole(round)[excluded] for round in range(1, 6))
    assert np.array_equal(residual(contributions, "fp32")[excluded], want)


def test_settling_another_round_counts_nothing() -> None:
    contributions = contributions_in("fp32")
    make(contributions, 4, 7, 100, whole(1))
    contributions.settle(3, ALL)
    assert contributions.made is None
    assert contributions.taken == 7
    contributions.settle(4, ALL)  # nothing is there to be settled
    assert make(contributions, 5, 8, 50, whole(2)).tokens == 50


def test_dropped_residual_is_in_no_later_contribution() -> None:
    contributions = contributions_in("int8")
    make(contributions, 1, 1, 100, real(1))
    contributions.settle(1, NONE)
    contributions.drop()
    made = make(contributions, 2, 2, 10, real(2))
    assert made.values.tobytes() == real(2).tobytes()
    assert made.tokens == 10


def test_diverged_training_is_not_announced_and_spoils_nothing() -> None:
    contributions = contributions_in("int8")
    make(contributions, 1, 1, 100, whole(1))
    contributions.settle(1, NONE)
    bad = whole(2)
    bad[5000] = np.nan
    with pytest.raises(LocalError, match="diverged"):
        make(contributions, 2, 2, 100, bad)
    assert contributions.made is None
    made = make(contributions, 2, 3, 100, whole(3))
    assert np.array_equal(made.values, whole(1) + whole(3))
    assert made.tokens == 200


def test_contribution_that_was_made_does_not_change_with_its_source() -> None:
    contributions = contributions_in("fp32")
    gradient = whole(1)
    made = make(contributions, 1, 1, 100, gradient)
    gradient[:] = 0  # the trainer goes on writing there
    assert np.array_equal(made.values, whole(1))
    assert np.array_equal(made.encoded.decoded(), whole(1))


def test_fp32_leaves_nothing_but_what_was_too_large_to_travel() -> None:
    contributions = contributions_in("fp32")
    gradient = real(1)
    make(contributions, 1, 1, 100, gradient)
    contributions.settle(1, ALL)
    assert not residual(contributions, "fp32").any()
    gradient[5_000] = 2.0**66
    made = make(contributions, 2, 2, 100, gradient)
    sent = made.encoded.decoded()[5_000]
    assert sent < 2.0**65
    contributions.settle(2, ALL)
    left = residual(contributions, "fp32")
    assert np.flatnonzero(left).tolist() == [5_000]
    assert left[5_000] == np.float32(2.0**66) - sent


@pytest.mark.parametrize("bits", [ALL, SOME, NONE])
def test_settled_contribution_is_left_as_it_is_by_what_is_made_of_it(bits: Sequence[bool]) -> None:
    """Its file may still be written."""
    contributions = contributions_in("int8")
    first = make(contributions, 1, 1, 10, real(1))
    contributions.settle(1, bits)
    second = make(contributions, 2, 2, 10, real(2))
    assert first.values.tobytes() == real(1).tobytes()
    left = real(1) - counted(first.encoded.decoded(), bits)
    assert second.values.tobytes() == (real(2) + left).tobytes()
    contributions.settle(2, ALL)
    third = make(contributions, 3, 3, 10, real(3))
    assert third.values.tobytes() == (real(3) + (second.values - second.encoded.decoded())).tobytes()


@pytest.mark.parametrize("verdict", [ALL, NONE, (True, True, False), (False, False, True)])
@pytest.mark.parametrize("mixing", [None, 0.5])
def test_nothing_of_buffers_comes_again(verdict: Sequence[bool], mixing: float | None) -> None:
    contributions = Contributions(Fragments(GRID, buffers=1), "int8", 3, sender=PeerId("me"), mixing=mixing)
    own = slice(2 * 4096, None)
    first = make(contributions, 1, 1, 10, real(1))
    assert first.encoded.codec == "int8+buffers1"
    assert np.array_equal(first.encoded.decoded()[own], real(1)[own])
    contributions.settle(1, verdict)
    second = make(contributions, 2, 2, 10, real(2))
    assert np.array_equal(second.encoded.decoded()[own], real(2)[own])
    assert not np.array_equal(second.values[: 2 * 4096], real(2)[: 2 * 4096])
    contributions.retune("bf16", 3, mixing=mixing)
    assert make(contributions, 3, 3, 10, real(3)).encoded.codec == "bf16+buffers1"


# -- few seats: what several rounds taught is given at once --------------------------------------------------------


@pytest.mark.parametrize("buffers", [0, 1])
def test_who_followed_gives_the_mean_of_what_it_learnt_and_weighs_by_all_of_its_tokens(buffers: int) -> None:
    contributions = Contributions(Fragments(GRID, buffers=buffers), "fp32", 3, sender=PeerId("me"), few_seats=True)
    own = slice(0, (3 - buffers) * 4096)
    for round, tokens in enumerate((300, 100, 200), start=1):
        make(contributions, round, round, tokens, whole(round))
        contributions.settle(round, NONE)
    made = make(contributions, 4, 4, 200, whole(4))
    learnt = [values.astype(np.float64) for values in map(whole, (1, 2, 3, 4))]
    mean = (300 * learnt[0] + 100 * learnt[1] + 200 * learnt[2] + 200 * learnt[3]) / 800
    assert made.tokens == 800
    np.testing.assert_allclose(made.values[own], mean[own], rtol=0, atol=1e-3)
    if buffers:
        assert np.array_equal(made.values[2 * 4096 :], whole(4)[2 * 4096 :]), "buffers are as they are now"
    contributions.settle(4, ALL)
    after = make(contributions, 5, 5, 100, whole(5))
    assert (after.tokens, np.array_equal(after.values, whole(5))) == (100, True), "it was counted once"


def mean_with(step: F32, tokens: int, learnt: F32, moved: F32) -> F32:
    """Of what waited, with its tokens, and 100 tokens of what was learnt then.

    A value of what waited weighs by the share with which it goes beyond what was moved the same way.
    """
    values = []
    for s, new, m in zip(step.tolist(), learnt.tolist(), moved.tolist(), strict=True):
        weight = tokens * (1.0 if s * m <= 0 else max(1 - m / s, 0.0))
        values.append((100 * new + weight * s) / (100 + weight))
    return np.array(values, np.float32)


@pytest.mark.parametrize("restarted", [False, True])
def test_what_waited_weighs_by_what_others_have_left_of_it(restarted: bool, tmp_path: Path) -> None:
    me = PeerId("me")
    contributions = Contributions(Fragments(GRID), "fp32", 3, sender=me, few_seats=True)
    anchors = {round: real(10 + round) for round in (1, 2, 3)}
    for round in (1, 2):
        given = contributions.make(round, round, 100, real(round), base=bytes(32), anchor=anchors[round])
        if round == 2 and restarted:
            write_work(tmp_path / "work", contributions.saved(given, Term(0, 0)))
            contributions = Contributions(Fragments(GRID), "fp32", 3, sender=me, few_seats=True)
            assert contributions.make_again(read_work(tmp_path / "work"))
        contributions.settle(round, NONE)
    made = contributions.make(3, 3, 100, real(3), base=bytes(32), anchor=anchors[3])
    second = mean_with(real(1), 100, real(2), anchors[1] - anchors[2])
    third = mean_with(second, 200, real(3), anchors[2] - anchors[3])
    assert made.tokens == 300
    np.testing.assert_allclose(made.values, third, rtol=0, atol=1e-6)


def test_where_seats_are_few_the_anchor_lies_in_the_file_of_the_contribution(tmp_path: Path) -> None:
    pool = FilePool(tmp_path, GRID.chunk_values, together=2, kept=2)
    contributions = Contributions(Fragments(GRID), "fp32", 3, sender=PeerId("me"), few_seats=True, vectors=pool)
    made = contributions.make(1, 1, 100, real(1), base=bytes(32), anchor=real(2))
    write_work(tmp_path / "work", contributions.saved(made, Term(0, 0)))
    mapping = mapping_of(made.values)
    assert mapping is not None
    assert mapping.is_named, "it is not written a second time"
    found = read_work(tmp_path / "work")
    assert found.anchor is not None
    assert (found.values.tobytes(), found.anchor.tobytes()) == (real(1).tobytes(), real(2).tobytes())


def test_what_encoding_lost_of_a_counted_round_comes_whole_though_seats_are_few() -> None:
    contributions = Contributions(Fragments(GRID), "int8", 3, sender=PeerId("me"), few_seats=True)
    first = contributions.make(1, 1, 10, real(1), base=bytes(32), anchor=real(11))
    contributions.settle(1, ALL)
    second = contributions.make(2, 2, 10, real(2), base=bytes(32), anchor=real(12))
    assert second.values.tobytes() == (real(2) + (first.values - first.encoded.decoded())).tobytes()


@pytest.mark.parametrize("was_counted", [True, False])
def test_whom_a_value_did_not_count_needs_no_finals_to_carry_all_of_its_work_on(was_counted: bool) -> None:
    pair = [Identity.from_seed(bytes([number]) * 32) for number in range(2)]
    me, other = members = [identity.peer_id for identity in pair]
    sections = {"sync": {"inner_steps": 1}, "round": {"staleness_rounds": 66}, "membership": {"seats": 1}}
    chain = Chain(genesis(SWARM, members), manifest=manifest_of(members, sections))
    contributions = Contributions(Fragments(GRID), "fp32", 3, sender=me, few_seats=True)
    contributions.make(1, 1, 300, whole(1), base=chain.head.hash)
    value = value_of(chain.head, plan_hash("1"), me, sorted(members))
    chain.extend(certified(msgspec.structs.replace(value, counted=(me if was_counted else other,)), *pair))
    contributions.settle_by(chain, None)
    made = contributions.make(2, 2, 100, whole(2), base=chain.head.hash)
    mean = (3 * whole(1).astype(np.float64) + whole(2)) / 4
    assert made.tokens == (100 if was_counted else 400)
    np.testing.assert_allclose(made.values, whole(2) if was_counted else mean, rtol=0, atol=1e-3)
