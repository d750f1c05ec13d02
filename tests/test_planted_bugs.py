"""The baseline of planted bugs: each can still be planted, and is still seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.planted_bugs import BUGS, ROOT, Bug, copy_tree, see


@pytest.mark.parametrize("planted", BUGS, ids=lambda planted: planted.name)
def test_a_bug_can_be_planted_and_names_a_test(planted: Bug) -> None:
    for edit in planted.edits:
        assert (ROOT / edit.file).read_text().count(edit.was) == 1, f"plant it anew: {edit.was!r} in {edit.file}"
        assert edit.planted != edit.was
    file, _, name = planted.test.partition("::")
    assert f"\ndef {name}(" in (ROOT / file).read_text()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("tree")
    copy_tree(target)
    return target


@pytest.mark.long
@pytest.mark.parametrize("planted", BUGS, ids=lambda planted: planted.name)
def test_a_planted_bug_is_seen(tree: Path, planted: Bug) -> None:
    said = see(tree, planted)
    assert "failed" in said
