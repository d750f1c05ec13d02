"""Configs are checked, tasks are drawn the same everywhere, a peer's reference is one of ours or refused."""

from __future__ import annotations

import random
import string
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from shoal.node.sapo.families import installed_families, load_choices, load_family
from shoal.node.sapo.scoring import Scorer
from shoal.node.sapo.tasks import (
    FAILED_LIMIT,
    Config,
    Task,
    TaskChoice,
    TaskFamily,
    TaskSource,
    answer_in,
    check_options,
    makeable,
    pack_config,
    unpack_config,
)
from shoal.protocol.errors import ConfigError, LocalError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest_rollouts import TaskEntry
from shoal.protocol.rollouts import TaskRef
from shoal.protocol.wire import SwarmId

SWARM = SwarmId(bytes(range(32)))
ORIGIN = PeerId("12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp")


class Reversal(TaskFamily):
    name = "reversal"
    version = "1"
    scoring = "direct"

    def check(self, config: Config) -> None:
        check_options(self.name, config, {"letters": range(1, 65)})

    def question(self, config: Config, seed: int, index: int) -> str:
        return f"Write backwards: {self.word(config, seed, index)}"

    def score(self, task: Task, text: str) -> float:
        return float(answer_in(text) == self.word(task.config, task.ref.seed, task.ref.index)[::-1])

    def word(self, config: Config, seed: int, index: int) -> str:
        letters = config.get("letters", 4)
        assert isinstance(letters, int)
        return "".join(random.Random(f"{seed}/{index}").choices(string.ascii_lowercase, k=letters))


class Other(Reversal):
    name = "other"


class Raises(Reversal):
    name = "raises"

    def score(self, task: Task, text: str) -> float:
        raise ValueError(text)


class Silent(Reversal):
    name = "silent"

    def question(self, config: Config, seed: int, index: int) -> str:
        return ""


def choices() -> list[TaskChoice]:
    return [
        TaskChoice(family=Reversal(), config={"letters": 3}, weight=3),
        TaskChoice(family=Reversal(), config={"letters": 5}, weight=2),
        TaskChoice(family=Other(), config="default"),
    ]


def test_source_draws_the_same_tasks_whatever_the_order_of_its_choices() -> None:
    source, turned = TaskSource(choices()), TaskSource(choices()[::-1])
    drawn = [source.draw(SWARM, ORIGIN, round, index) for round in range(4) for index in range(16)]
    assert drawn == [turned.draw(SWARM, ORIGIN, round, index) for round in range(4) for index in range(16)]
    assert len({task.ref.seed for task in drawn}) == 64


def test_source_draws_by_weight() -> None:
    source = TaskSource(choices())
    drawn = [source.table.assigned(SWARM, ORIGIN, 0, index) for index in range(3000)]
    counts = Counter((ref.family, ref.config) for ref in drawn)
    expected = {("reversal", 3): 1500, ("reversal", 5): 1000, ("other", None): 500}
    assert {(family, unpack_config(config).get("letters")) for family, config in counts} == set(expected)
    for (family, config), count in counts.items():
        letters = unpack_config(config).get("letters")
        assert abs(count - expected[family, letters]) < 120  # more than four standard deviations


def test_source_makes_a_referred_task_again() -> None:
    task = TaskSource(choices()).draw(SWARM, ORIGIN, 7, 3)
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(task.ref), type=TaskRef)
    assert TaskSource(choices()).task(travelled) == task


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"family": "unheard"}, "family 'unheard', which this swarm does not draw from"),
        ({"version": "2"}, "version '2'; here it is '1'"),
        ({"config": pack_config({"letters": 4})}, "a config that this swarm does not draw from"),
        ({"config": b"\xc1"}, "a config that this swarm does not draw from"),
    ],
)
def test_source_refuses_a_reference_that_is_not_its_own(change: dict[str, object], message: str) -> None:
    source = TaskSource(choices())
    ref = source.table.assigned(SWARM, ORIGIN, 0, 0)
    with pytest.raises(RemoteError, match=message):
        source.task(msgspec.structs.replace(ref, **change))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"letter": 3}, "no setting 'letter'; did you mean 'letters'\\?; it has letters"),
        ({"letters": 65}, "letters = 65 is not in range"),
        ({"letters": b"x"}, "'letters' is a bytes; give a number"),
        ({"letters": [[[1]]]}, "'letters' is a list"),
        ({"letters": list(range(65))}, "'letters' is a list"),
        ({"letters": float("nan")}, "a task config holds numbers"),
        ({"letters": 1 << 70}, "a task config holds numbers"),
        ({"letters": "x" * 1100}, "give at most 1024"),
        ({f"x{place}": 1 for place in range(65)}, "65 settings; give at most 64"),
        ("hard", "no preset 'hard'; it has default"),
    ],
)
def test_choice_refuses_a_config_in_one_line(config: Config | str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        TaskChoice(family=Reversal(), config=config)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("weight", [0, -1, 1_000_001, 1.5, True])
def test_choice_refuses_a_weight(weight: int) -> None:
    with pytest.raises(ConfigError, match="give a whole weight from 1 to 1000000"):
        TaskChoice(family=Reversal(), config={}, weight=weight)


def test_choice_refuses_a_name_that_cannot_travel() -> None:
    family = Reversal()
    family.name = "Up And Down"
    with pytest.raises(ConfigError, match="a name or version that cannot travel"):
        TaskChoice(family=family, config={})


def test_source_refuses_nothing_and_the_same_twice() -> None:
    with pytest.raises(ConfigError, match="name 1 to 256 task families, not 0"):
        TaskSource([])
    with pytest.raises(ConfigError, match="twice with the same config"):
        TaskSource([*choices(), TaskChoice(family=Reversal(), config={"letters": 3})])


def test_family_that_makes_no_question_is_an_error() -> None:
    with pytest.raises(LocalError, match="'silent' made no question"):
        Silent().make({}, 1, 0)


def test_tasks_are_those_that_can_be_made_unless_there_are_none() -> None:
    asked: list[int] = []

    def make(index: int) -> Task:
        asked.append(index)
        if index % FAILED_LIMIT or index > 2 * FAILED_LIMIT:
            raise LocalError(f"no task at {index}")
        return Reversal().make({}, 1, index)

    tasks = makeable(make)
    assert [next(tasks).ref.index for _ in range(3)] == [0, 100, 200]
    with pytest.raises(LocalError, match=r"^no task at 300$"):
        next(tasks)
    assert asked == list(range(301))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("42", "42"),
        ("  42\n", "42"),
        ("I think <answer> 42 </answer>.", "42"),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("<answer>1", "<answer>1"),
        ("1</answer>", "1</answer>"),
        ("</answer><answer>1", "</answer><answer>1"),
        ("", ""),
    ],
)
def test_answer_in_takes_the_last_tag_or_all(text: str, answer: str) -> None:
    assert answer_in(text) == answer


def test_scorer_keeps_the_order_and_gives_nothing_for_what_cannot_be_read() -> None:
    source = TaskSource([*choices(), TaskChoice(family=Raises(), config={})])
    first, second = (source.families["reversal"].make({"letters": 3}, seed, 0) for seed in (1, 2))
    right = {task: task.question.split()[-1][::-1] for task in (first, second)}
    raising = source.families["raises"].make({}, 1, 0)
    pairs = [
        (second, right[second]),
        (first, right[first]),
        (first, right[second]),
        (raising, "x"),
        (second, "\ud800"),
        (first, right[first] + " " * (32 << 10)),
        (second, f"<answer>{right[second]}</answer>"),
    ]
    with Scorer(source) as scorer:
        assert scorer.score_each(pairs) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
        assert scorer.score_each([]) == []


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, entry_points: str) -> None:
    """A distribution in `folder` with these entry points and this test's families."""
    information = folder / "own_tasks-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: own-tasks\nVersion: 1\n")
    (information / "entry_points.txt").write_text(f"[shoal.tasks]\n{entry_points}\n")
    (folder / "own_tasks.py").write_text(
        "from shoal.node.sapo.tasks import TaskFamily\n\n"
        "class Echo(TaskFamily):\n    name, version = 'echo', '1'\n"
        "    def question(self, config, seed, index): return f'Say {seed}'\n"
        "    def score(self, task, text): return float(int(text) == task.ref.seed)\n\n"
        "class Fails(Echo):\n    def __init__(self): raise OSError('upside down')\n"
    )
    monkeypatch.syspath_prepend(str(folder))


def test_own_family_is_found_by_its_entry_point_and_scored_in_the_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "echo = own_tasks:Echo")
    assert "echo" in installed_families()
    source = TaskSource(load_choices([TaskEntry(family="echo", weight=2)]))
    task = source.draw(SWARM, ORIGIN, 1, 2)
    assert task.question == f"Say {task.ref.seed}"
    escape = f"__import__('os').mkdir({str(tmp_path / 'made')!r})"
    with Scorer(source) as scorer:
        if "echo" in source.scorable:
            assert scorer.score_each([(task, str(task.ref.seed)), (task, "0"), (task, escape)]) == [1.0, 0.0, 0.0]
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("entry_points", "name", "message"),
    [
        ("echo = own_tasks:Echo", "ecko", "unknown task family 'ecko'; did you mean 'echo'"),
        ("echo = own_tasks:Absent", "echo", "module 'own_tasks' has no class 'Absent'"),
        ("echo = absent_module:Echo", "echo", "'echo': there is no module 'absent_module'"),
        ("fails = own_tasks:Fails", "fails", "'fails' cannot be made: OSError: upside down"),
        ("path = pathlib:Path", "path", "pathlib:Path is no class derived from"),
        ("loud = own_tasks:Echo", "loud", "'loud' calls itself 'echo'"),
    ],
)
def test_own_family_that_cannot_be_used_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry_points: str, name: str, message: str
) -> None:
    install(tmp_path, monkeypatch, entry_points)
    with pytest.raises(ConfigError, match=message) as refused:
        load_family(name)
    assert "\n" not in str(refused.value)
