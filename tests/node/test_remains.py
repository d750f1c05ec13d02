"""What a node leaves: found by name, removed when told to, and nothing else with it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli.main import execute
from shoal.node import founded, remains
from shoal.node.founded import Founding, line_of
from shoal.node.remains import find_remains, others_in, remove_remains
from shoal.node.state.store import Store
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import Identity


def line_by(key: Identity) -> bytes:
    return line_of(Founding(node=key.peer_id, authority=key.peer_id, workload="sine:Sine"))


OTHERS = line_by(Identity.from_seed(b"o" * 32))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder of a founder in which its user put two files; the user's record is of another folder as well."""
    data_dir, record = tmp_path / "data", tmp_path / "record" / "founded.jsonl"
    with Store(data_dir):
        pass
    own = line_by(Identity.load_or_create(data_dir / "node.key"))
    half_put = (".node.key.x3f", 32)
    for name, size in (("authority.key", 32), half_put, ("state/4.safetensors", 1000), ("events.1.jsonl", 50)):
        (data_dir / name).write_bytes(bytes(size))
    (data_dir / "notes.txt").write_text("mine")
    (data_dir / "node.keys").write_text("mine too")
    record.parent.mkdir(mode=0o700)
    record.write_bytes(OTHERS + own)
    for module in (founded, remains):
        monkeypatch.setattr(module, "record_path", lambda: record)
    return data_dir


def record(folder: Path) -> Path:
    return folder.parent / "record" / "founded.jsonl"


def names(found: list[remains.Remains]) -> set[str]:
    return {one.path.name for one in found}


def test_what_lies_there_is_told_keys_first_with_sizes_and_what_is_of_its_user_apart(folder: Path) -> None:
    found, own = find_remains(folder), record(folder).read_bytes().removeprefix(OTHERS)
    assert {one.path.name for one in found[:3]} == {"authority.key", "node.key", ".node.key.x3f"}
    assert [one.is_key for one in found[:4]] == [True, True, True, False]
    assert (found[3].path.name, found[3].size) == ("state", 1000)
    assert (found[-1].path.name, found[-1].size) == ("founded.jsonl", len(own))
    assert [path.name for path in others_in(folder)] == ["node.keys", "notes.txt"]


@pytest.mark.parametrize("keys", [False, True])
def test_all_of_it_goes_but_what_is_not_shoals_and_keys_that_are_not_meant(folder: Path, keys: bool) -> None:
    before, own = find_remains(folder), record(folder).read_bytes().removeprefix(OTHERS)
    removed = remove_remains(folder, keys=keys)
    assert names(removed) == {one.path.name for one in before if keys or not one.is_key}
    left = {path.name for path in folder.iterdir()}
    assert left == {"notes.txt", "node.keys"} | (set() if keys else {"node.key", "authority.key", ".node.key.x3f"})
    assert record(folder).read_bytes() == OTHERS + (b"" if keys else own), "others' are not its own"


def test_record_of_what_was_founded_goes_with_its_last_line_and_so_does_its_folder(folder: Path) -> None:
    record(folder).write_bytes(record(folder).read_bytes().removeprefix(OTHERS))
    remove_remains(folder, keys=True)
    assert not record(folder).parent.exists()


def test_record_that_says_nothing_of_the_node_is_not_named(folder: Path) -> None:
    record(folder).write_bytes(OTHERS)
    assert "founded.jsonl" not in names(find_remains(folder))
    remove_remains(folder, keys=True)
    assert record(folder).read_bytes() == OTHERS


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


@pytest.mark.usefixtures("folder")
def test_folder_that_is_no_node_s_keeps_files_and_folders_of_the_same_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tmp_path / "project"
    (project / "checkpoints").mkdir(parents=True)
    mine = [project / name for name in ("checkpoints/best.pt", "state", "lock", "name", "layout.json")]
    for path in mine:
        path.write_text("mine")
    assert find_remains(project) == remove_remains(project, keys=True) == []
    assert execute(["uninstall", "--remove", "--keys", "--data-dir", str(project)]) == 0
    assert f"not Shoal's, and stays: {project / 'checkpoints'}" in capsys.readouterr().out.splitlines()
    assert [path.read_text() for path in mine] == ["mine"] * len(mine)


def test_nothing_goes_while_a_node_runs_there(folder: Path) -> None:
    before = find_remains(folder)
    with Store(folder), pytest.raises(ConfigError, match="a node is already running on"):
        remove_remains(folder, keys=True)
    assert find_remains(folder) == before


def test_command_tells_what_it_would_remove_and_what_stays(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--data-dir", str(folder)]
    assert execute(["uninstall", *where]) == 0
    told = capsys.readouterr().out.splitlines()
    assert f"here: {folder / 'authority.key'}, 32 B: the authority's key: there is no other" in told[:3]
    assert f"not Shoal's, and stays: {folder / 'notes.txt'}" in told
    assert told[-3] == f"remove it: `shoal uninstall --remove --data-dir {folder}`, with --keys the keys too"
    assert told[-2] == f"looked at {folder} alone; of a node that ran elsewhere: `shoal uninstall --data-dir FOLDER`"
    assert told[-1].startswith("the program goes with `")
    assert (folder / "state" / "4.safetensors").exists()
    assert execute(["uninstall", "--remove", *where]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "removed 1.1 kB"
    assert f"stays: {folder / 'authority.key'}, 32 B: the authority's key: there is no other" in told
    assert execute(["uninstall", "--keys", *where]) == 2
    assert capsys.readouterr().err == (
        "shoal: --keys is of use with --remove only: `shoal uninstall --remove --keys`\n"
    )


def test_what_was_set_up_beside_it_is_told_with_what_removes_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    unit = tmp_path / "home/.config/systemd/user/shoal.service"
    unit.parent.mkdir(parents=True)
    unit.touch()
    assert execute(["uninstall", "--data-dir", str(folder)]) == 0
    removal = f"systemctl --user disable --now shoal && rm {unit}"
    assert f"set up beside it, and stays: {unit}; remove it: `{removal}`" in capsys.readouterr().out.splitlines()
    assert unit.exists()
    completion, rc = tmp_path / "home/.bash_completions/shoal.sh", tmp_path / "home/.bashrc"
    completion.parent.mkdir()
    completion.touch()
    rc.write_text(f"alias ll='ls -l'\nsource '{completion}'\n")  # as `shoal --install-completion` does
    assert execute(["uninstall", "--data-dir", str(folder)]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if f"stays: {rc};" in line]
    command = told[0].partition("remove it: `")[2].removesuffix("`")
    subprocess.run(["sh", "-c", command], check=True)
    assert rc.read_text() == "alias ll='ls -l'\n"


@pytest.mark.parametrize("has_lab", [True, False])
@pytest.mark.parametrize("base", [sys.prefix, "/usr"])
def test_what_removes_the_program_is_what_is_there(monkeypatch: pytest.MonkeyPatch, has_lab: bool, base: str) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "shoal.lab" and not has_lab else found(name)
    )
    monkeypatch.setattr(sys, "base_prefix", base)
    told = remains.removal_of_program()
    assert told.startswith(f"`{sys.executable} -m pip uninstall shoal{' shoal-lab' if has_lab else ''}`")
    assert (f"`rm -r {sys.prefix}`" in told) is (base != sys.prefix)


def test_what_a_killed_node_was_writing_and_keys_of_a_relay_are_shoals_and_a_link_to_the_folder_stays(
    folder: Path, tmp_path: Path
) -> None:
    for name in ("boot.partial", "relay.key", "relay.libp2p-key"):
        (folder / name).write_bytes(b"x")
    assert [path.name for path in others_in(folder)] == ["node.keys", "notes.txt"]
    assert {"relay.key", "relay.libp2p-key"} <= {one.path.name for one in find_remains(folder) if one.is_key}
    for path in others_in(folder):
        path.unlink()
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert execute(["uninstall", "--remove", "--keys", "--data-dir", str(link)]) == 0
    assert [*folder.iterdir()] == []


def test_command_to_remove_it_can_be_pasted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = folder.rename(folder.with_name("my \x1b[31m; data"))
    assert execute(["uninstall", "--data-dir", str(odd)]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("remove it: "))
    quoted = str(odd).replace("\x1b", "\\x1b")
    assert line == f"remove it: `shoal uninstall --remove --data-dir '{quoted}'`, with --keys the keys too"


def test_command_where_there_is_nothing_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remains, "record_path", lambda: None)
    for options in ([], ["--remove", "--keys"]):
        assert execute(["uninstall", *options, "--data-dir", str(tmp_path / "none")]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == f"nothing of Shoal's lies in {tmp_path / 'none'}"
    assert not (tmp_path / "none").exists()


def test_folders_of_plain_names_that_hold_more_than_a_nodes_stay_and_no_node_begins_around_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tmp_path / "project"
    mine = [project / name for name in ("checkpoints/run-epoch9.pt", "state/paper.tex", "transfer/in.csv", "x.partial")]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    Identity.load_or_create(project / "node.key")
    assert execute(["uninstall", "--remove", "--data-dir", str(project)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert {f"not Shoal's, and stays: {project / name}" for name in ("checkpoints", "state", "transfer")} <= set(out)
    with pytest.raises(ConfigError, match=r"state has files that are no node's.*choose another --data-dir"):
        Store(project)
    assert [path.read_text() for path in mine] == ["mine"] * len(mine)
    for path in mine:
        path.unlink()
    with Store(project):
        pass


def test_a_node_that_is_there_begins_whatever_its_user_put_into_its_folders(folder: Path) -> None:
    note = folder / "checkpoints" / "README"
    note.parent.mkdir()
    note.write_text("mine")
    with Store(folder):
        pass
    remove_remains(folder, keys=True)
    assert note.read_text() == "mine"


def test_what_was_moved_aside_for_another_key_is_known(folder: Path) -> None:
    for name in ("agreement.log.x3fAbC12", "boot.x3fAbC12", "peers.json.x3fAbC12", "swarm.toml.partial"):
        (folder / name).write_text("of Shoal's")
    assert [path.name for path in others_in(folder)] == ["node.keys", "notes.txt"]
