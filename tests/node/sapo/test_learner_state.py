"""What an agent writes is what it goes on from, and nothing that a disk has spoilt."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from shoal.node.sapo import learner_state
from shoal.node.sapo.char_policy import CharModelSettings, CharPolicy
from shoal.node.sapo.learner import Alone, Learner, LearnerSettings
from tests.node.sapo.draws import assigned
from tests.node.sapo.sums import score, sum_task
from tests.node.simulated_disk import Disks, Survival

POLICY = "char-policy"


def learner(seed: int = 0, *, width: int = 16) -> Learner:
    settings = CharModelSettings(
        width=width, layers=1, heads=2, prompt_chars=4, completion_tokens=3, alphabet="0123456789+="
    )
    policy = CharPolicy(settings, seed=seed)
    rounds = LearnerSettings(local=4, group_size=8)
    # The reward of one's own first character keeps rewards varied without a warm-up.
    return Learner(
        policy,
        rounds,
        draw=lambda round, index: sum_task(round, index, most=1),
        score=lambda pairs: [
            max(found, float(text[:1] > "4")) for found, (_, text) in zip(score(pairs), pairs, strict=True)
        ],
        sharing=Alone(),
        draws=assigned(0),
    )


def after(rounds: int, of: Learner) -> list[float]:
    """The rewards of the next rounds, and where the parameters end."""
    rewards = [of.run_round().reward for _ in range(rounds)]
    return [*rewards, *(float(parameter.detach().double().sum()) for parameter in of.policy.parameters())]


def test_restored_learner_goes_on_to_the_bit(tmp_path: Path) -> None:
    first = learner()
    before = after(3, first)
    (tmp_path / "2.safetensors.partial").touch()  # its writer was killed
    learner_state.save(first, tmp_path, policy=POLICY)
    assert [path.name for path in tmp_path.iterdir()] == ["3.safetensors"]
    second = learner(seed=1)
    assert learner_state.restore(second, tmp_path, policy=POLICY) == (3, [])
    assert second.round == 3
    following = after(3, first)
    assert after(3, second) == following
    assert following != before


def test_learner_without_a_step_is_restored(tmp_path: Path) -> None:
    first = learner()
    learner_state.save(first, tmp_path, policy=POLICY)
    second = learner(seed=1)
    assert learner_state.restore(second, tmp_path, policy=POLICY) == (0, [])
    assert after(2, second) == after(2, first)


def test_the_first_file_is_there_after_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In folders that were not there before."""
    disk = Disks(monkeypatch).add(tmp_path / "disk", random.Random(1))
    learner_state.save(learner(), disk.root / "rollouts" / "agent", policy=POLICY)
    disk.copy_survivors(tmp_path / "after", Survival.SYNCED)
    restored = learner_state.restore(learner(seed=1), tmp_path / "after" / "rollouts" / "agent", policy=POLICY)
    assert restored == (0, [])


def test_only_the_newest_files_remain(tmp_path: Path) -> None:
    one = learner()
    for _ in range(4):
        one.run_round()
        learner_state.save(one, tmp_path, policy=POLICY)
    assert [path.name for path in learner_state.saved_files(tmp_path)] == ["4.safetensors", "3.safetensors"]


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "missing"])
def test_damaged_file_is_passed_over_for_the_one_before(tmp_path: Path, damage: str) -> None:
    one = learner()
    for _ in range(2):
        one.run_round()
        learner_state.save(one, tmp_path, policy=POLICY)
    newest = tmp_path / "2.safetensors"
    data = newest.read_bytes()
    if damage == "missing":
        newest.unlink()
    else:
        spoilt = {"cut": data[:-7], "flipped": data[:-9] + bytes([data[-9] ^ 1]) + data[-8:], "empty": b""}
        newest.write_bytes(spoilt[damage])
    other = learner(seed=1)
    restored, refused = learner_state.restore(other, tmp_path, policy=POLICY)
    assert (restored, other.round) == (1, 1)
    assert len(refused) == (damage != "missing")
    assert all("2.safetensors" in reason for reason in refused)


def test_file_of_another_policy_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    learner_state.save(learner(), tmp_path, policy=POLICY)
    for other, name in ((learner(seed=1, width=32), POLICY), (learner(seed=1), "another")):
        untouched = [parameter.clone() for parameter in other.policy.parameters()]
        restored, refused = learner_state.restore(other, tmp_path, policy=name)
        assert restored is None
        assert "of another policy" in refused[0]
        assert all(torch.equal(*pair) for pair in zip(untouched, other.policy.parameters(), strict=True))
        assert other.round == 0
