"""A contribution on disk: made again the same after a restart, and counted once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shoal.collectives.fragments import Fragments
from shoal.collectives.grid import Grid
from shoal.node.state.contributions import Contributions, Made, SavedWork, read_work, write_work
from shoal.node.state.tensor_files import DamagedFile, TensorBytes, write_tensors
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Term

GRID = Grid(10_000, 4096)
SOME = (True, False, True)


def contributions_in(codec: str, *, grid: Grid = GRID, sender: str = "me") -> Contributions:
    return Contributions(Fragments(grid), codec, 3, sender=PeerId(sender))


def make(contributions: Contributions, round: int) -> Made:
    gradient = np.random.default_rng(round).standard_normal(GRID.numel).astype(np.float32)
    return contributions.make(round, round, 100, gradient, base=round.to_bytes(32, "little"))


def through_disk(work: SavedWork, folder: Path) -> SavedWork:
    write_work(folder / "work", work)
    return read_work(folder / "work")


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4", "2bit"])
def test_contribution_made_again_is_the_same_and_leaves_the_same_residual(tmp_path: Path, codec: str) -> None:
    before = contributions_in(codec)
    make(before, 1)
    before.settle(1, (False, False, False))
    made = make(before, 2)  # with a residual in it
    work = through_disk(before.saved(made, Term(1, 2)), tmp_path)
    assert (work.account.term, work.account.round, work.account.rounds_excluded) == (Term(1, 2), 2, 1)

    after = contributions_in(codec)
    assert after.make_again(work)
    again = after.made
    assert again is not None
    assert again.encoded.buffer.tobytes() == made.encoded.buffer.tobytes()
    assert (again.round, again.base, again.tokens, again.encoded.root) == (2, made.base, 200, made.encoded.root)
    assert after.taken == 0  # the new trainer counts from the beginning
    for one in (before, after):
        one.settle(2, SOME)
    np.testing.assert_array_equal(make(after, 3).values, make(before, 3).values)
    for one in (before, after):
        one.settle(3, (False, False, False))
        one.settle(3, None)
    assert after.made is before.made is None


def test_staleness_is_counted_on(tmp_path: Path) -> None:
    contributions = contributions_in("fp32")
    for round in (1, 2, 3):
        make(contributions, round)
        contributions.settle(round, None)
    work = through_disk(contributions.saved(make(contributions, 4), Term()), tmp_path)
    after = contributions_in("fp32")
    assert after.make_again(work)
    after.settle(4, None)  # the fourth round without it: one more than the limit
    gradient = np.zeros(GRID.numel, np.float32)
    assert not after.make(5, 1, 100, gradient, base=bytes(32)).values.any()


@pytest.mark.parametrize(
    "other",
    [
        contributions_in("bf16"),
        contributions_in("int4", sender="another"),
        contributions_in("int4", grid=Grid(10_001, 4096)),
        contributions_in("int4", grid=Grid(10_000, 8192)),
    ],
)
def test_what_would_not_be_the_same_is_not_made_again(tmp_path: Path, other: Contributions) -> None:
    contributions = contributions_in("int4")
    work = through_disk(contributions.saved(make(contributions, 1), Term()), tmp_path)
    assert not other.make_again(work)
    assert other.made is None


def test_file_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "1.work"
    write_tensors(path, [TensorBytes.of("values", np.zeros(3, np.float32))], {"trainer": "{}"})
    with pytest.raises(DamagedFile, match=r"1\.work holds no contribution .*; remove it"):
        read_work(path)
    with pytest.raises(FileNotFoundError):
        read_work(tmp_path / "none")
