"""The baseline of planted bugs: each can still be planted. `python -m tests.planted` shows that each is seen."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.planted import BUGS
from tests.planted.bugs import (
    ROOT,
    Bug,
    Edit,
    NotPlanted,
    copy_tree,
    edited,
    plant,
    planted_in,
    product,
    run_tests,
)
from tests.planted.member import MEMBER, SEEDS

EVERY = [(area, one) for area, some in BUGS.items() for one in some]


def test_every_bug_can_be_planted_and_names_a_test() -> None:
    texts, tests = product(ROOT), {str(path.relative_to(ROOT)): path.read_text() for path in ROOT.glob("tests/**/*.py")}
    for _, planted in EVERY:
        for path, text in edited(texts, planted).items():
            ast.parse(text)
            assert text != texts[path], planted.name
        file, _, name = planted.test.partition("::")
        by_seed = planted.name in SEEDS and not planted.test
        assert by_seed or re.search(rf"^(async )?def {name}\(", tests[file], re.MULTILINE), planted.name


def test_every_seed_is_that_of_a_bug_and_every_bug_of_a_member_has_one() -> None:
    names = {one.name for _, one in EVERY}
    assert SEEDS.keys() <= names
    assert {one.name for one in MEMBER} <= SEEDS.keys()
    assert all(1 <= seed <= 300 for seed in SEEDS.values())


def test_no_two_bugs_are_the_same() -> None:
    assert len({one.name for _, one in EVERY}) == len({one.edits for _, one in EVERY}) == len(EVERY)


def test_text_is_found_under_any_indentation_and_what_is_planted_has_the_same() -> None:
    text = "def f():\n    if a:\n        b()\n\n        c()\n    d()\n"
    edit = Edit("if a:\n    b()\n\n    c()\n", "if not a:\n    c()\n")
    assert planted_in(text, edit) == ["def f():\n    if not a:\n        c()\n    d()\n"]
    assert planted_in(text, Edit("b()\nd()\n", "d()\n")) == []
    assert planted_in("x = a + a", Edit("a", "b")) == ["x = b + a", "x = a + b"]


def test_text_that_is_nowhere_or_in_two_places_is_not_planted() -> None:
    texts = {Path("one.py"): "a = 1\n", Path("two.py"): "a = 1\nb = 2\n"}
    for was in ("a = 1", "c = 3"):
        with pytest.raises(NotPlanted):
            edited(texts, Bug("some", "", (Edit(was, "a = 0"),)))
    both = Bug("two edits in one file", "", (Edit("b = 2", "b = 3"), Edit("b = 3", "b = 4")))
    assert edited(texts, both) == {Path("two.py"): "a = 1\nb = 4\n"}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("tree")
    copy_tree(target)
    return target


def test_a_test_that_fails_in_a_tree_says_so_and_the_tree_is_as_it_was(tree: Path) -> None:
    planted = next(one for one in BUGS["protocol"] if one.name == "two thirds rounded down")
    before = product(tree)
    with plant(tree, planted):
        assert product(tree) != before
        assert run_tests(tree, planted.test).code == 1
    assert product(tree) == before
    assert run_tests(tree, planted.test).code == 0
