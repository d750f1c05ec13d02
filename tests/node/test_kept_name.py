"""The name that a user gives a node: it stays with the data folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.node.node import kept_name


def test_name_that_was_given_once_stays_until_another_is_given(tmp_path: Path) -> None:
    assert kept_name(tmp_path, None) is None
    assert kept_name(tmp_path, "dan") == "dan"
    assert kept_name(tmp_path, None) == "dan"
    assert kept_name(tmp_path, "eve") == "eve"
    assert kept_name(tmp_path, None) == "eve"


@pytest.mark.parametrize("damaged", [b"", b"\xff", b"two words", b"x" * 99_999 + b"\n", b"\n"])
def test_damaged_file_names_nobody(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / "name").write_bytes(damaged)
    assert kept_name(tmp_path, None) is None
