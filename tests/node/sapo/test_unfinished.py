"""Groups that are begun go on after a restart, and none is handed out twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.node.sapo import unfinished
from shoal.node.sapo.char_policy import CharModelSettings, CharPolicy
from shoal.node.sapo.generation import GeneratedGroup, GroupGenerator
from shoal.node.sapo.policy import Rollout
from shoal.node.sapo.tasks import Task
from shoal.node.sapo.unfinished import NAME, UnfinishedFile
from shoal.protocol.errors import LocalError, StorageError
from tests.node.sapo.draws import assigned
from tests.node.sapo.sums import sum_task

SETTINGS = CharModelSettings(width=16, layers=1, heads=2, prompt_chars=8, completion_tokens=30, alphabet="0123456789+=")


def draw(round: int, index: int) -> Task:
    return sum_task(round, index)


def group(round: int, index: int, *lengths: int) -> GeneratedGroup:
    task = draw(round, index)
    prompt = CharPolicy(SETTINGS, seed=1).encode_prompt(task.question)
    return GeneratedGroup(
        task=task,
        round=round,
        rollouts=tuple(
            Rollout(
                prompt=prompt,
                tokens=[4 + at for at in range(length)],
                log_probs=[-0.125 * at for at in range(length)],
                versions=[(round, length - 1), (round + 3, 1)] if length > 1 else [(round, length)] * bool(length),
                done=length > 3,
            )
            for length in lengths
        ),
    )


def told(groups: list[GeneratedGroup]) -> list[object]:
    """All that a group is."""
    return [
        (
            one.task,
            one.round,
            [(each.prompt, each.tokens, each.log_probs, each.versions, each.done) for each in one.rollouts],
        )
        for one in groups
    ]


@pytest.fixture
def file(tmp_path: Path) -> UnfinishedFile:
    return UnfinishedFile(folder=tmp_path / "agent", policy="gpt")


def test_groups_are_restored_as_they_were(file: UnfinishedFile) -> None:
    policy = CharPolicy(SETTINGS, seed=1)
    assert file.restore(policy, draw) == []
    groups = [group(2, 5, 4, 1, 7), group(3, 0, 2, 0, 3), group(3, 1, 0, 0)]
    file.save(groups)
    assert told(file.restore(policy, draw)) == told(groups)
    file.save(groups[2:])
    assert told(file.restore(policy, draw)) == told(groups[2:]), "with no token yet"
    file.save([])
    assert file.restore(policy, draw) == []
    assert list(file.folder.iterdir()) == []
    file.save([])


def test_generator_goes_on_to_the_bit(file: UnfinishedFile) -> None:
    def generator() -> GroupGenerator:
        return GroupGenerator(CharPolicy(SETTINGS, seed=1), group_size=4, draws=assigned(1), over_provision=4.0)

    def rest(of: GroupGenerator) -> list[object]:
        count = len(of.under_way) // 4
        made = of.collect(count, lambda: pytest.fail("a task is begun"), round=6, version=6)
        return told([*made.groups, *of.under_way])

    first, second, begun = generator(), generator(), iter(range(100))
    first.collect(2, lambda: draw(5, next(begun)), round=5, version=5)
    first.collect(2, lambda: draw(5, next(begun)), round=5, version=5)
    first._under_way = first._under_way[: 4 * (len(first.under_way) // 4)]
    assert any(not one.done for one in first.under_way)
    file.save(first.under_way)
    second.go_on_with(file.restore(CharPolicy(SETTINGS, seed=1), draw))
    assert rest(second) == rest(first)


def test_file_has_the_oldest_groups_that_there_is_room_for(
    file: UnfinishedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unfinished, "TOKENS_LIMIT", 12)
    groups = [group(0, 0, 3, 4), group(0, 1, 5), group(0, 2, 1)]
    file.save(groups)
    assert told(file.restore(CharPolicy(SETTINGS, seed=1), draw)) == told(groups[:2])


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "foreign"])
def test_damaged_file_is_refused_in_one_line(file: UnfinishedFile, damage: str) -> None:
    file.save([group(0, 0, 3, 4)])
    path = file.folder / NAME
    data = path.read_bytes()
    path.write_bytes(
        {"cut": data[:-3], "flipped": data[:-9] + bytes([data[-9] ^ 1]) + data[-8:], "empty": b"", "foreign": data}[
            damage
        ]
    )
    reader = UnfinishedFile(folder=file.folder, policy="another") if damage == "foreign" else file
    with pytest.raises(StorageError) as caught:
        reader.restore(CharPolicy(SETTINGS, seed=1), draw)
    assert NAME in str(caught.value)
    assert "\n" not in str(caught.value)


def test_group_whose_task_cannot_be_made_any_more_is_refused_with_what_to_do(file: UnfinishedFile) -> None:
    """Its family may have changed since."""

    def fail(round: int, index: int) -> Task:
        raise LocalError("task family 'sums' made no question")

    file.save([group(0, 0, 3, 4)])
    with pytest.raises(StorageError, match=r"made no question.*; remove it to begin others"):
        file.restore(CharPolicy(SETTINGS, seed=1), fail)


def test_what_cannot_be_written_leaves_no_file_of_before(file: UnfinishedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its groups may have been handed out by then."""
    file.save([group(0, 0, 3, 4)])

    def fail(*_: object) -> None:
        raise StorageError("the disk is full")

    monkeypatch.setattr(unfinished, "write_tensors", fail)
    with pytest.raises(StorageError, match="full"):
        file.save([group(0, 1, 3, 4)])
    assert file.restore(CharPolicy(SETTINGS, seed=1), draw) == []
