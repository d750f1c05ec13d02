"""Every offered family is checked, makes the same tasks in any process, and leaves the node's random states alone."""

from __future__ import annotations

import decimal
import hashlib
import json
import os
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from shoal.node.sapo.families import load_choices, load_family
from shoal.node.sapo.gym import GymFamily
from shoal.node.sapo.gym_families import EASY, LIMITS, OFFERED, REFUSED
from shoal.node.sapo.scorers import SCORERS
from shoal.node.sapo.tasks import Config, TaskChoice, TaskFamily
from shoal.protocol.errors import ConfigError, LocalError
from shoal.protocol.manifest_rollouts import TaskEntry

pytestmark = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="the extra shoal[rl] is not installed")
"""Not imported to find out, which takes seconds: every process that runs tests imports this module."""

PAPER = (
    "arc_1d",
    "base_conversion",
    "basic_arithmetic",
    "bf",
    "binary_matrix",
    "calendar_arithmetic",
    "decimal_arithmetic",
    "fraction_simplification",
    "propositional_logic",
)
EXECUTING = (
    "bitwise_arithmetic",
    "countdown",
    "n_queens",
    "number_sorting",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
)
"""Where the library's scorer executes Python."""
SAMPLE = (*PAPER, "countdown", "family_relationships", "graph_color", "n_queens", "simple_equations", "spiral_matrix")

DIGESTS = """
import hashlib, json, random, sys
from shoal.node.sapo.gym import GymFamily
random.seed(1)
for name, seeds in json.loads(sys.argv[1]).items():
    family = GymFamily(name)
    questions = [family.question({}, seed, index) for seed, index in seeds]
    print(name, hashlib.sha256(json.dumps(questions).encode()).hexdigest())
"""


def places(name: str) -> list[tuple[int, int]]:
    dice = random.Random(name)
    return [(dice.getrandbits(63), dice.getrandbits(32)) for _ in range(6)] + [(0, 0), (2**63 - 1, 2**32 - 1)]


def test_families_are_each_offered_or_refused_with_a_reason() -> None:
    assert sorted(OFFERED) == list(OFFERED)
    assert set(OFFERED) | set(REFUSED) == set(pytest.importorskip("reasoning_gym.factory").DATASETS)
    assert not set(OFFERED) & set(REFUSED)
    assert set(PAPER + EXECUTING) == set(SCORERS) <= set(OFFERED)
    assert set(EASY) | set(LIMITS) <= set(OFFERED)
    for name in REFUSED:
        with pytest.raises(ConfigError, match=f"{name!r} of reasoning-gym is not offered: "):
            load_family(name)


def test_families_of_the_paper_and_those_that_execute_are_scored_here_and_the_others_in_the_sandbox() -> None:
    assert {name for name in OFFERED if GymFamily(name).scoring == "direct"} == set(PAPER + EXECUTING)


def test_tasks_are_the_same_in_another_process() -> None:
    wanted = {name: places(name) for name in SAMPLE}
    other = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DIGESTS, json.dumps(wanted)],
        env=os.environ | {"PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    told = dict(line.split() for line in other.stdout.splitlines())
    for name, seeds in wanted.items():
        family = GymFamily(name)
        backwards = [family.question({}, seed, index) for seed, index in reversed(seeds)]
        assert told[name] == hashlib.sha256(json.dumps(backwards[::-1]).encode()).hexdigest(), name


def test_tasks_of_other_seeds_and_indices_are_others() -> None:
    family = GymFamily("basic_arithmetic")
    questions = {family.question({}, seed, index) for seed in range(20) for index in range(20)}
    assert len(questions) > 390


def test_task_is_the_librarys_own() -> None:
    """The first item of the library's generator with a seed that the task's seed and index give."""
    seed = int.from_bytes(hash_of(7, 3), "big") >> 1
    made = pytest.importorskip("reasoning_gym.factory").create_dataset(
        "base_conversion", max_base=4, seed=seed, size=1
    )[0]
    assert GymFamily("base_conversion").question({"max_base": 4}, 7, 3) == made["question"]


def hash_of(seed: int, index: int) -> bytes:
    import blake3

    text = b"shoal sapo reasoning-gym seed" + seed.to_bytes(8, "big") + index.to_bytes(8, "big")
    return blake3.blake3(text).digest(length=4)


def test_making_tasks_leaves_random_states_and_decimal_precision_alone() -> None:
    before = random.getstate(), repr(np.random.get_state())
    with decimal.localcontext(decimal.Context(prec=31)):
        for name in SAMPLE:
            GymFamily(name).make({}, 5, 6)
        assert decimal.getcontext().prec == 31
    assert (random.getstate(), repr(np.random.get_state())) == before


@pytest.mark.parametrize("name", PAPER)
def test_easy_preset_makes_short_questions_in_variety(name: str) -> None:
    (family,) = (choice.family for choice in load_choices([TaskEntry(family=name, config="easy")]))
    easy = [family.make(family.presets["easy"], seed, 0) for seed in range(30)]
    usual = [family.make({}, seed, 0) for seed in range(30)]
    assert sum(len(task.question) for task in easy) < sum(len(task.question) for task in usual) * 1.2
    assert len({task.question for task in easy}) > 10
    assert {task.ref.version for task in easy} == {family.version}
    assert family.version.endswith("+2")


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("basic_arithmetic", {"max_term": 2}, "no setting 'max_term'; did you mean 'max_terms'\\?; it has min_terms"),
        ("basic_arithmetic", {"seed": 2}, "no setting 'seed'"),
        ("basic_arithmetic", {"size": 2}, "no setting 'size'"),
        ("spell_backward", {"data_file": "../../../../etc/passwd"}, "no setting 'data_file'"),
        ("basic_arithmetic", {"max_terms": "2"}, "max_terms = '2' is not like its default 6"),
        ("basic_arithmetic", {"max_terms": True}, "max_terms = True is not like its default 6"),
        ("basic_arithmetic", {"max_terms": 2.0}, "max_terms = 2.0 is not like its default 6"),
        ("basic_arithmetic", {"allow_negation": 1}, "allow_negation = 1 is not like its default True"),
        ("basic_arithmetic", {"operators": "+"}, "operators = '\\+' is not like its default"),
        ("basic_arithmetic", {"operators": []}, "operators = \\[\\] is not like its default"),
        ("basic_arithmetic", {"operators": [1]}, "operators = \\[1\\] is not like its default"),
        ("basic_arithmetic", {"operators": ["%"]}, "makes no tasks of this config: .*unsupported operator: %"),
        ("basic_arithmetic", {"format_style": "loud"}, "format_style = 'loud' is not one of \\('simple', 'natural'\\)"),
        ("base_conversion", {"max_value": 10**9}, "max_value = 1000000000 is more than 1e\\+06"),
        ("basic_arithmetic", {"max_terms": 10**6}, "max_terms = 1000000 is more than 12"),
        ("basic_arithmetic", {"min_terms": 9}, "makes no tasks of this config: .*max_terms must be >= min_terms"),
        ("binary_matrix", {"p_zero": float("inf")}, "inf is not a finite number"),
        ("binary_matrix", {"p_zero": 30.0}, "p_zero = 30.0 is more than 10"),
        ("calendar_arithmetic", {"tasks": ["doomsday"]}, "makes no tasks of this config: .*doomsday"),
        ("propositional_logic", {"max_vars": 40}, "max_vars = 40 is more than 6"),
        ("composite", {}, "'composite' of reasoning-gym is not offered: it mixes other families; name those"),
        ("basic_aritmetic", {}, "unknown task family 'basic_aritmetic'; did you mean 'basic_arithmetic'"),
    ],
)
def test_config_is_refused_in_one_line(name: str, config: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        TaskChoice(family=load_family(name), config=config)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", OFFERED)
def test_no_setting_names_a_file(name: str) -> None:
    texts = {key: value for key, value in GymFamily(name)._fields().items() if type(value) is str}
    assert not [key for key, value in texts.items() if "file" in key or "/" in value or Path(value).suffix]


def test_config_at_its_bounds_is_taken() -> None:
    family: TaskFamily = GymFamily("basic_arithmetic")
    family.check({"max_terms": 12, "operators": ["+"], "whitespace": "random", "allow_parentheses": False})
    GymFamily("propositional_logic").check({"max_vars": 6, "max_complexity": 4})


def test_generator_that_fails_is_a_local_error() -> None:
    with pytest.raises(LocalError, match="AssertionError: p_zero must be between 0 and 1"):
        GymFamily("binary_matrix").question({"p_zero": 2.0}, 1, 1)


def test_library_that_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.node.sapo import gym

    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    gym._library.cache_clear()
    with pytest.raises(ConfigError, match="pip install 'shoal\\[rl\\]'"):
        GymFamily("bf").make({}, 1, 1)
    monkeypatch.undo()
    gym._library.cache_clear()
    assert Path(gym._library().__file__ or "").name == "factory.py"
