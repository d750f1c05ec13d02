"""What a node leaves: found by name, removed when told to, and nothing else with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli.main import execute
from shoal.node import remains
from shoal.node.remains import find_remains, others_in, remove_remains
from shoal.node.state.store import Store
from shoal.protocol.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder of a founder in which its user put two files; the record of what was founded is beside it."""
    data_dir, record = tmp_path / "data", tmp_path / "founded.jsonl"
    with Store(data_dir):
        pass
    for name, size in (("node.key", 32), ("authority.key", 32), ("state/4.safetensors", 1000), ("events.1.jsonl", 50)):
        (data_dir / name).write_bytes(bytes(size))
    (data_dir / "notes.txt").write_text("mine")
    (data_dir / "node.keys").write_text("mine too")
    record.write_bytes(bytes(10))
    monkeypatch.setattr(remains, "record_path", lambda: record)
    return data_dir


def names(found: list[remains.Remains]) -> set[str]:
    return {one.path.name for one in found}


def test_what_lies_there_is_told_keys_first_with_sizes_and_what_is_of_its_user_apart(folder: Path) -> None:
    found = find_remains(folder)
    assert [one.path.name for one in found[:3]] == ["authority.key", "node.key", "state"]
    assert [one.is_key for one in found[:3]] == [True, True, False]
    assert (found[2].size, found[-1].path.name, found[-1].size) == (1000, "founded.jsonl", 10)
    assert [path.name for path in others_in(folder)] == ["node.keys", "notes.txt"]


@pytest.mark.parametrize("keys", [False, True])
def test_all_of_it_goes_but_what_is_not_shoals_and_keys_that_are_not_meant(folder: Path, keys: bool) -> None:
    before = find_remains(folder)
    removed = remove_remains(folder, keys=keys)
    assert names(removed) == {one.path.name for one in before if keys or not one.is_key}
    left = {path.name for path in folder.iterdir()}
    assert left == {"notes.txt", "node.keys"} | (set() if keys else {"node.key", "authority.key"})
    assert (folder.parent / "founded.jsonl").exists() is not keys


def test_a_folder_in_which_nothing_is_left_goes_too_and_what_a_link_points_to_stays(
    folder: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("mine")
    for path in others_in(folder):
        path.unlink()
    (folder / "checkpoints").symlink_to(elsewhere)
    remove_remains(folder, keys=True)
    assert not folder.exists()
    assert (elsewhere / "precious").read_text() == "mine"


def test_nothing_goes_while_a_node_runs_there(folder: Path) -> None:
    before = find_remains(folder)
    with Store(folder), pytest.raises(ConfigError, match="a node is already running on"):
        remove_remains(folder, keys=True)
    assert find_remains(folder) == before


def test_command_tells_what_it_would_remove_and_what_stays(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--data-dir", str(folder)]
    assert execute(["uninstall", *where]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == f"here: {folder / 'authority.key'}, 32 B: the authority's key: there is no other"
    assert f"not Shoal's, and stays: {folder / 'notes.txt'}" in told
    assert told[-2] == f"remove it: `shoal uninstall --remove --data-dir {folder}`, with --keys the keys too"
    assert told[-1].startswith("the program goes with `")
    assert (folder / "state" / "4.safetensors").exists()
    assert execute(["uninstall", "--remove", *where]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "removed 1.1 kB"
    assert f"stays: {folder / 'node.key'}, 32 B: this node's identity" in told
    assert execute(["uninstall", "--keys", *where]) == 2
    assert capsys.readouterr().err == (
        "shoal: --keys is of use with --remove only: `shoal uninstall --remove --keys`\n"
    )


def test_command_where_there_is_nothing_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remains, "record_path", lambda: None)
    for options in ([], ["--remove", "--keys"]):
        assert execute(["uninstall", *options, "--data-dir", str(tmp_path / "none")]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == f"nothing of Shoal's lies in {tmp_path / 'none'}"
    assert not (tmp_path / "none").exists()
