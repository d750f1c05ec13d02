"""The accounts of a replica in fragments: what an anchor touches, what is contributed, what a restart keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal.collectives.codecs import F32
from shoal.node.training.accounts import Accounts, SavedAccounts
from shoal.node.training.flat_parameters import FlatParameters
from shoal.node.training.trainer_messages import SyncSettings
from shoal.protocol.errors import ConfigError, LocalError
from tests.node.normed import model_of
from tests.node.one_vector import OneVector

NUMEL = 10
STREAMING = SyncSettings(chunk_values=2, fragments=2, mixing=0.25)
"""Fragment 0 has the values 0 1 4 5 8 9, fragment 1 has 2 3 6 7."""
FIRST, SECOND = np.array([0, 1, 4, 5, 8, 9]), np.array([2, 3, 6, 7])


def vector(seed: int, scale: float = 1.0) -> F32:
    return (scale * np.random.default_rng(seed).standard_normal(NUMEL)).astype(np.float32)


class Life:
    """Accounts that stand on an anchor, and their model."""

    def __init__(self, sync: SyncSettings = STREAMING, *, contributions: int = 0) -> None:
        self.model, self.out = OneVector(NUMEL), np.zeros(NUMEL, np.float32)
        self.accounts = Accounts(self.model.flat(), sync=sync, contributions=contributions)

    def stand(self, anchor: F32, *, round: int = 0) -> Life:
        self.accounts.apply(anchor, round=round)
        return self

    def learn(self, seed: int, tokens: int = 100) -> None:
        self.model.values += torch.from_numpy(vector(seed, 0.1))
        self.accounts.count(tokens)

    @property
    def local(self) -> F32:
        return self.model.values.numpy().copy()


def test_contribution_is_of_the_round_s_fragment_alone() -> None:
    life, anchor = Life().stand(vector(0)), vector(0)
    life.learn(1)
    written = life.accounts.contribute(life.out, 3)
    assert (written.number, written.tokens) == (1, 50)
    np.testing.assert_array_equal(life.out[:4], (anchor - life.local)[SECOND])
    assert not life.out[4:].any()
    life.learn(2)
    assert life.accounts.contribute(life.out, 4).tokens == 100  # of both steps, half of each token
    np.testing.assert_array_equal(life.out[:6], (anchor - life.local)[FIRST])


def test_anchor_is_mixed_into_the_fragment_and_touches_nothing_else() -> None:
    old = vector(0, 1000.0)
    life = Life().stand(old)
    life.model.values[:] = torch.from_numpy(vector(1))  # so far off that b + (l − b) would be rounded
    life.accounts.contribute(life.out, 1)
    life.learn(2)
    before, anchor = life.local, old.copy()
    assert not np.array_equal(old + (before - old), before)
    anchor[SECOND] += np.float32(0.7)
    life.accounts.apply(anchor, round=1, taken=1)
    assert life.local[FIRST].tobytes() == before[FIRST].tobytes()
    want = np.float32(0.25) * before + np.float32(0.75) * anchor
    assert life.local[SECOND].tobytes() == want[SECOND].tobytes()


def test_rounds_missed_meanwhile_keep_the_work_on_their_chunks() -> None:
    """Fragment 1 was contributed; when the anchor comes, fragment 0 has moved too, but in its last chunk."""
    life, old = Life().stand(vector(0)), vector(0)
    life.learn(1)
    life.accounts.contribute(life.out, 1)
    before, anchor = life.local, vector(0)
    anchor[[0, 1, 4, 5, *SECOND]] += np.float32(0.7)
    life.accounts.apply(anchor, round=2, taken=1)
    np.testing.assert_allclose(life.local[:2], (anchor + before - old)[:2], atol=1e-6)
    np.testing.assert_allclose(life.local[4:6], (anchor + before - old)[4:6], atol=1e-6)
    assert life.local[8:].tobytes() == before[8:].tobytes()
    np.testing.assert_allclose(life.local[SECOND], (0.25 * before + 0.75 * anchor)[SECOND], atol=1e-6)


def test_contribution_that_was_not_taken_is_kept_whole() -> None:
    life, old = Life().stand(vector(0)), vector(0)
    life.learn(1)
    life.accounts.contribute(life.out, 1)
    before, anchor = life.local, vector(0)
    anchor[SECOND] += np.float32(0.7)
    life.accounts.apply(anchor, round=1, taken=0)
    np.testing.assert_allclose(life.local, anchor + before - old, atol=1e-6)
    life.learn(2)
    assert life.accounts.contribute(life.out, 3).tokens == 100  # nothing was taken of it


@pytest.mark.parametrize(("tokens", "announced"), [(1, [1, 1, 1]), (7, [3, 7, 7]), (100, [50, 100, 100])])
def test_tokens_are_shared_among_the_fragments(tokens: int, announced: list[int]) -> None:
    life, found = Life().stand(vector(0)), []
    for round in (1, 2, 3):
        life.learn(round, tokens)
        written = life.accounts.contribute(life.out, round)
        found.append(written.tokens)
        life.accounts.apply(vector(0), round=round, taken=written.number)
    assert found == announced
    assert life.accounts.steps == 0


def test_overlap_ends_after_its_steps() -> None:
    life = Life(SyncSettings(chunk_values=10, overlap_steps=2)).stand(vector(0))
    life.learn(1)
    assert (life.accounts.overlap_left, life.accounts.waiting) == (0, False)
    life.accounts.contribute(life.out, 1)
    left = []
    for seed in (2, 3, 4):
        left.append(life.accounts.overlap_left)
        life.learn(seed)
    assert left == [2, 1, 0]
    assert life.accounts.waiting
    life.accounts.apply(vector(1), round=1, taken=1)
    assert (life.accounts.overlap_left, life.accounts.waiting, life.accounts.steps) == (0, False, 3)


# --- restarts ---


def rounds(life: Life, numbers: range, anchors: dict[int, F32]) -> None:
    for round in numbers:
        life.learn(10 * round)
        written = life.accounts.contribute(life.out, round)
        life.accounts.apply(anchors[round], round=round, taken=written.number)


def anchors_of(count: int) -> dict[int, F32]:
    """What is certified: each round moves its fragment."""
    anchors = {0: vector(0)}
    for round in range(1, count + 1):
        anchors[round] = anchors[round - 1].copy()
        anchors[round][FIRST if round % 2 == 0 else SECOND] += vector(100 + round)[FIRST if round % 2 == 0 else SECOND]
    return anchors


def copied(saved: SavedAccounts) -> SavedAccounts:
    """As it is read back: other memory."""
    return SavedAccounts(
        kept=None if saved.kept is None else saved.kept.clone(),
        local=None if saved.local is None else saved.local.clone(),
        round=saved.round,
        steps=saved.steps,
        tokens=saved.tokens,
        marked=saved.marked,
    )


@pytest.mark.parametrize("certified", [False, True])
@pytest.mark.parametrize("numbers_go_on", [False, True])
def test_streaming_goes_on_from_a_snapshot_as_if_nothing_had_happened(certified: bool, numbers_go_on: bool) -> None:
    """To the bit, whether the round of the snapshot is under way after the restart or certified.

    A trainer alone is told how far the numbers went; with its daemon it begins at zero, and so does what was taken.
    """
    anchors = anchors_of(6)
    life = Life().stand(anchors[0])
    rounds(life, range(1, 4), anchors)
    life.learn(40)
    written = life.accounts.contribute(life.out, 4)
    saved = copied(life.accounts.saved(4))
    life.accounts.apply(anchors[4], round=4, taken=written.number)
    expected = [life.local]
    rounds(life, range(5, 7), anchors)
    expected.append(life.local)

    again = Life(contributions=written.number if numbers_go_on else 0)
    again.accounts.restore(saved)
    taken = written.number if numbers_go_on else 0
    if not certified:
        again.stand(anchors[3], round=3)
        assert again.accounts.waiting
        again.accounts.apply(anchors[4], round=4, taken=taken)
    else:
        again.stand(anchors[4], round=4)
    assert not again.accounts.waiting
    assert again.local.tobytes() == expected[0].tobytes()
    rounds(again, range(5, 7), anchors)
    assert again.local.tobytes() == expected[1].tobytes()
    again.learn(7)
    life.learn(7)
    assert again.accounts.contribute(again.out, 7).tokens == life.accounts.contribute(life.out, 7).tokens
    assert again.out.tobytes() == life.out.tobytes()


def test_work_that_a_later_contribution_held_is_not_kept() -> None:
    """Snapshot of round 4; round 5 was contributed, and may be counted: what fragment 1 held is dropped, 0 is kept."""
    anchors = anchors_of(4)
    life = Life().stand(anchors[0])
    rounds(life, range(1, 4), anchors)
    life.learn(40)
    written = life.accounts.contribute(life.out, 4)
    saved = copied(life.accounts.saved(4))
    life.accounts.apply(anchors[4], round=4, taken=written.number)
    again = Life(contributions=written.number + 1)
    again.accounts.restore(saved, spent=True)
    again.stand(anchors[4], round=4)
    assert again.local[FIRST].tobytes() == life.local[FIRST].tobytes()
    assert again.local[SECOND].tobytes() == anchors[4][SECOND].tobytes()
    assert not np.array_equal(life.local[SECOND], anchors[4][SECOND])
    again.learn(5)
    assert again.accounts.contribute(again.out, 5).tokens == 50  # of this one step
    again.accounts.apply(anchors[4], round=5, taken=written.number + 2)


def test_overlapped_steps_of_diloco_are_kept_by_a_snapshot() -> None:
    sync = SyncSettings(chunk_values=4, overlap_steps=3)
    life = Life(sync).stand(vector(0))
    life.learn(1)
    written = life.accounts.contribute(life.out, 1)
    life.learn(2)
    saved = copied(life.accounts.saved(1))
    life.accounts.apply(vector(5), round=1, taken=written.number)
    assert saved.kept is not None
    again = Life(sync, contributions=1)
    again.accounts.restore(saved)
    again.stand(vector(0), round=0)
    again.accounts.apply(vector(5), round=1, taken=1)
    np.testing.assert_allclose(again.local, life.local, atol=1e-6)
    assert (again.accounts.tokens, again.accounts.steps) == (100, 1) == (life.accounts.tokens, life.accounts.steps)
    spent = Life(sync, contributions=2)
    spent.accounts.restore(copied(life.accounts.saved(1)), spent=True)
    spent.stand(vector(5), round=1)
    assert spent.local.tobytes() == vector(5).tobytes()


@pytest.mark.parametrize(("came_back_to", "steps"), [(4, 0), (4, 1), (6, 0)])
def test_who_comes_back_to_a_later_round_has_all_of_its_steps_to_make(came_back_to: int, steps: int) -> None:
    """Whether the first anchor that it stands on is the one it had, or the newest; what it had learnt it keeps.

    steps: those that it makes on the anchor it had, until it knows of the newest.
    """
    life = Life(SyncSettings(chunk_values=2)).stand(vector(4), round=4)
    life.learn(1)
    life.learn(2)
    saved, learnt = copied(life.accounts.saved(4, midway=True)), life.local - vector(4)
    again = Life(SyncSettings(chunk_values=2))
    again.accounts.restore(saved)
    again.stand(vector(came_back_to), round=came_back_to)
    assert again.accounts.steps == (2 if came_back_to == 4 else 0)
    for _ in range(steps):
        again.learn(1)
        learnt = again.local - vector(4)
    again.stand(vector(6), round=6)
    assert (again.accounts.steps, again.accounts.tokens) == (0, 200 + 100 * steps)
    np.testing.assert_allclose(again.local, vector(6) + learnt, atol=1e-6)
    again.learn(3)
    again.stand(vector(7), round=7)  # it is late for this one, being slow
    assert again.accounts.steps == 1


def test_who_came_back_and_is_late_for_its_round_goes_on_where_it_is() -> None:
    life = Life(SyncSettings(chunk_values=2)).stand(vector(4), round=4)
    life.learn(1)
    saved = copied(life.accounts.saved(4, midway=True))
    again = Life(SyncSettings(chunk_values=2))
    again.accounts.restore(saved)
    again.stand(vector(4), round=4)
    for _ in range(4):
        again.learn(1)
    again.stand(vector(5), round=5)
    assert again.accounts.steps == 5
    again.learn(1)
    again.stand(vector(6), round=6)
    assert again.accounts.steps == 6


def test_snapshot_of_other_fragments_is_refused() -> None:
    life = Life().stand(vector(0))
    with pytest.raises(LocalError, match="after an anchor"):
        life.accounts.restore(life.accounts.saved(0))
    with pytest.raises(LocalError, match="2 fragments for 1"):
        Life(SyncSettings(chunk_values=2)).accounts.restore(life.accounts.saved(0))


def test_too_many_fragments_are_the_user_s_to_mend() -> None:
    with pytest.raises(ConfigError, match="fragments = 1 or less"):
        Life(SyncSettings(chunk_values=10, fragments=2, mixing=0.5))


def test_parameters_that_are_not_finite_are_not_contributed() -> None:
    life = Life().stand(vector(0))
    life.model.values[2] = float("nan")
    with pytest.raises(FloatingPointError) as caught:
        life.accounts.contribute(life.out, 1)
    assert str(caught.value) == (
        "the replica's parameters are no longer finite: a loss was not, or the learning rate is too high"
    )


def test_running_mean_that_one_bad_row_spoilt_is_contributed_as_the_anchor_has_it_and_set_right_by_the_next() -> None:
    model = model_of(3, 1)
    flat = FlatParameters(model, frozen=False, chunk_values=4096)
    accounts = Accounts(flat, sync=SyncSettings(chunk_values=4096))
    anchor = flat.gather(flat.new_vector()).numpy().copy()
    accounts.apply(anchor, round=0)
    model(torch.full((2, 3), float("nan")))
    out = np.zeros_like(anchor)
    own = flat.gather(flat.new_vector()).numpy()
    spoilt = ~np.isfinite(own)
    assert spoilt.sum() >= 2 * 3, "means and variances of the first layer at least"
    accounts.contribute(out, 1)
    np.testing.assert_array_equal(out[spoilt], anchor[spoilt])
    assert np.isfinite(out).all()
    accounts.apply(anchor, round=1, taken=1)
    assert flat.gather(flat.new_vector()).numpy().tobytes() == anchor.tobytes()
