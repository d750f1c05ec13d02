"""Folders of runs: an earlier run of the same command gives way, and nothing else does."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.protocol.errors import ConfigError, StorageError
from shoal.testnet.run_folder import new_run, replace_earlier_run, write_reports
from tests.testnet.small_files import files_up_to

COMMANDS = ("campaign", "chaos", "testnet")


def ready(out: Path, command: str) -> Path:
    return replace_earlier_run(out, command, folders=("nodes", "failures"), files=("report.json",))


def test_an_earlier_run_of_the_same_command_is_replaced_and_what_lies_beside_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = ready(Path("out"), "chaos")
    assert out == tmp_path / "out"
    (out / "nodes" / "0").mkdir()
    (out / "nodes" / "0" / "node.key").touch()
    write_reports(out, {"report.json": "{}\n", "notes.txt": "mine\n"})
    assert ready(out, "chaos") == out
    assert [path.name for path in (out / "nodes").iterdir()] == [".shoal-chaos"]
    assert not (out / "report.json").exists()
    assert (out / "notes.txt").read_text() == "mine\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_of_anybody_else_is_refused_before_anything_is_removed(command: str, tmp_path: Path) -> None:
    ready(tmp_path, command)
    (tmp_path / "nodes" / "0").mkdir()
    (tmp_path / "report.json").touch()
    (tmp_path / "failures" / f".shoal-{command}").rename(tmp_path / "failures" / "thesis")
    with pytest.raises(ConfigError, match=rf"failures is not of an earlier `shoal {command}`; choose another --out"):
        ready(tmp_path, command)
    for other in set(COMMANDS) - {command}:
        with pytest.raises(ConfigError, match=rf"nodes is not of an earlier `shoal {other}`"):
            ready(tmp_path, other)
    assert (tmp_path / "failures" / "thesis").exists()
    assert (tmp_path / "nodes" / "0").exists()
    assert (tmp_path / "report.json").exists()


def test_a_run_that_took_hours_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert new_run(Path("out")) == new_run(tmp_path / "out") == tmp_path / "out"  # nothing is in it yet
    write_reports(tmp_path / "out", {"soak.json": "{}"})
    with pytest.raises(ConfigError, match="is not empty; choose another --out"):
        new_run(tmp_path / "out")


def test_a_place_where_no_folder_can_be_names_the_option_that_chose_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for make in (new_run, lambda out: ready(out, "testnet")):
        with pytest.raises(StorageError, match="choose another --out"):
            make(tmp_path / "file")


def test_a_report_that_cannot_be_written_says_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "report.json").mkdir()
    with pytest.raises(StorageError) as caught:
        write_reports(tmp_path, {"report.json": "{}"})
    assert "\n" not in str(caught.value)


def test_a_report_that_cannot_be_written_whole_leaves_the_older_one(tmp_path: Path) -> None:
    write_reports(tmp_path, {"report.json": "older"})
    with files_up_to(1000), pytest.raises(StorageError, match="File too large; check the disk or choose another --out"):
        write_reports(tmp_path, {"report.json": b"n" * 4000})
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("report.json", "older")]
