"""Contributions of fragments: a round settles its own, and what was left of the others outlives a restart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shoal.collectives.codecs import F32
from shoal.collectives.fragments import Fragments
from shoal.collectives.grid import Grid
from shoal.node.state.contributions import Contributions, Made, SavedWork, read_work, write_work
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Term

FRAGMENTS = Fragments(Grid(10_000, 2048), 2)
"""Of 6144 values in three chunks, and of 3856 in two."""


def contributions_in(
    codec: str = "fp32", *, mixing: float | None = None, fragments: Fragments = FRAGMENTS, staleness: int = 3
) -> Contributions:
    return Contributions(fragments, codec, staleness, sender=PeerId("me"), mixing=mixing)


def gradient(round: int) -> F32:
    """Small whole numbers, so that sums are exact."""
    size = FRAGMENTS.of_round(round).numel
    return np.random.default_rng(round).integers(-100, 100, size).astype(np.float32)


def make(contributions: Contributions, round: int) -> Made:
    return contributions.make(round, round, 100, gradient(round), base=round.to_bytes(32, "little"))


def through_disk(work: SavedWork, folder: Path) -> SavedWork:
    write_work(folder / "work", work)
    return read_work(folder / "work")


def test_round_leaves_the_residual_of_the_other_fragment_alone() -> None:
    contributions = contributions_in()
    make(contributions, 1)
    contributions.settle(1, (False, True))
    second = make(contributions, 2)
    assert second.encoded.grid == FRAGMENTS.fragment(0).grid
    np.testing.assert_array_equal(second.values, gradient(2))
    contributions.settle(2, None)
    third = make(contributions, 3)
    np.testing.assert_array_equal(third.values[:2048], (gradient(1) + gradient(3))[:2048])
    np.testing.assert_array_equal(third.values[2048:], gradient(3)[2048:])
    assert third.tokens == 100  # the one of round 1 counted, in a chunk
    contributions.settle(3, (True, True))
    fourth = make(contributions, 4)
    np.testing.assert_array_equal(fourth.values, gradient(2) + gradient(4))
    assert fourth.tokens == 200


def test_uncounted_work_comes_again_but_what_the_replica_kept_of_it() -> None:
    contributions = contributions_in(mixing=0.25)
    make(contributions, 2)
    contributions.settle(2, (True, False, True))
    values = make(contributions, 4).values
    np.testing.assert_array_equal(values[2048:4096], (0.75 * gradient(2) + gradient(4))[2048:4096])
    np.testing.assert_array_equal(values[:2048], gradient(4)[:2048])
    contributions.settle(4, None)
    values = make(contributions, 6).values
    before = np.array(gradient(2)) * 0.75
    before[:2048] = before[4096:] = 0
    np.testing.assert_array_equal(values, before + np.float32(0.75) * gradient(4) + gradient(6))


@pytest.mark.parametrize(("rounds", "kept"), [(1, True), (2, True), (3, True), (4, True), (5, False)])
def test_staleness_is_counted_in_rounds_of_the_fragment(rounds: int, kept: bool) -> None:
    """With two fragments, five rounds are three of this one: more than two."""
    contributions = contributions_in(staleness=2)
    make(contributions, 1)
    contributions.settle(1, None, rounds=rounds)
    assert (make(contributions, 3).tokens == 200) is kept


@pytest.mark.parametrize("mixing", [None, 0.25])
@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_restart_keeps_what_is_left_of_every_fragment(tmp_path: Path, codec: str, mixing: float | None) -> None:
    """With mixing the restored replica keeps a share of what no certificate counts: that share does not come again."""
    before = contributions_in(codec, mixing=mixing)
    make(before, 1)
    before.settle(1, None)
    make(before, 2)
    before.settle(2, (True, False, True))
    made = make(before, 3)
    work = through_disk(before.saved(made, Term()), tmp_path)
    after = contributions_in(codec, mixing=mixing)
    assert after.make_again(work)
    assert after.made is not None
    assert after.made.encoded.root == made.encoded.root
    for one in (before, after):
        one.settle(3, (True, False))
    for round in (4, 5):
        expected, found = make(before, round), make(after, round)
        np.testing.assert_array_equal(found.values, expected.values)
        assert found.tokens == expected.tokens
        for one in (before, after):
            one.settle(round, None)


def test_work_of_other_fragments_is_not_made_again(tmp_path: Path) -> None:
    before = contributions_in()
    make(before, 1)
    before.settle(1, None)
    work = through_disk(before.saved(make(before, 2), Term()), tmp_path)
    for fragments in (Fragments(FRAGMENTS.grid), Fragments(FRAGMENTS.grid, 3), Fragments(Grid(10_000, 4096), 2)):
        other = contributions_in(fragments=fragments)
        assert not other.make_again(work)
        assert other.made is None
