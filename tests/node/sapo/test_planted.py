"""Planted answers in families of which the library evaluates text; `sweep_families` does it for every one offered."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from shoal.node.sapo.families import load_choices
from shoal.node.sapo.gym import GymFamily
from shoal.node.sapo.sandbox_support import missing_sandbox
from shoal.node.sapo.scoring import Scorer
from shoal.node.sapo.tasks import TaskSource
from shoal.protocol.manifest_rollouts import TaskEntry
from tests.node.sapo.planted import plant, trap

pytestmark = [
    pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="the extra shoal[rl] is not installed"),
    pytest.mark.skipif(missing_sandbox() is not None, reason=f"no sandbox: {missing_sandbox()}"),
]

EVALUATING = ("countdown", "n_queens", "simple_integration", "spiral_matrix", "string_insertion")
OTHERS = ("binary_matrix", "boxnet", "number_sorting", "propositional_logic", "simple_equations")
TEXT_LIMIT_S = 0.5


@pytest.fixture(scope="module")
def source() -> TaskSource:
    return TaskSource(load_choices(TaskEntry(family=name) for name in EVALUATING + OTHERS))


@pytest.fixture(scope="module")
def scorer(source: TaskSource) -> Iterator[Scorer]:
    with Scorer(source, text_limit_s=TEXT_LIMIT_S) as scorer:
        yield scorer


@pytest.mark.parametrize("name", EVALUATING + OTHERS)
def test_planted_answers_have_no_effect(name: str, source: TaskSource, scorer: Scorer, tmp_path: Path) -> None:
    assert source.families[name].scoring == "direct" or name not in EVALUATING
    task = source.families[name].make({}, 11, 0)
    with trap(tmp_path) as trapped:
        highest, wrong = plant(scorer, task, trapped, TEXT_LIMIT_S)
    assert wrong == []
    assert highest < 0.5


def test_right_answers_are_worth_what_the_library_says_among_planted_ones(
    source: TaskSource, scorer: Scorer, tmp_path: Path
) -> None:
    pairs, expected = [], []
    with trap(tmp_path) as trapped:
        for name in EVALUATING:
            family = source.families[name]
            assert isinstance(family, GymFamily)
            task = family.make({}, 12, 0)
            _, entry = family._entry({}, 12, 0)
            pairs += [(task, trapped.payloads["system"]), (task, entry["answer"]), (task, f"<answer>{entry['answer']}")]
            expected += [1.0]
        assert scorer.score_each(pairs)[1::3] == expected
        assert trapped.nothing_happened()


def test_planted_answers_do_work_on_the_library_itself(source: TaskSource, tmp_path: Path) -> None:
    """The payloads are real: the library's own scorer, in this process, makes the file."""
    family = source.families["spiral_matrix"]
    assert isinstance(family, GymFamily)
    dataset, entry = family._entry({}, 11, 0)
    with trap(tmp_path) as trapped:
        dataset.score_answer(trapped.payloads["open in a list"], entry)
        assert not trapped.nothing_happened()
