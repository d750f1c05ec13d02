"""Which swarms this user founded, and that neither a file nor a folder of a stranger's can say so."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from shoal.cli.main import execute
from shoal.node import founded
from shoal.node.founded import FOUNDED_LIMIT, founded_here, record_path, remember
from shoal.protocol.identity import Identity
from shoal.protocol.manifest import Manifest, load_manifest, validate_manifest


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "shoal" / "founded.jsonl"


def init(folder: Path, workload: str = "sine:Sine") -> Manifest:
    out = folder.parent / f"{folder.name}.toml"
    assert execute(["init", "--data-dir", str(folder), "--workload", workload, "-o", str(out)]) == 0
    return load_manifest(out)


def changed(manifest: Manifest, section: str, **values: object) -> Manifest:
    tables = msgspec.to_builtins(manifest)
    tables[section] |= values
    return validate_manifest(tables, source="the changed manifest")


def start(folder: Path, manifest: Manifest) -> None:
    """What a node leaves behind that took part in a round."""
    (folder / "swarm").write_text(manifest.swarm_id.hex())
    (folder / "agreement.log").write_bytes(b"a promise")


def test_who_founded_a_swarm_may_run_its_code_and_edit_its_settings_before_the_first_start(tmp_path: Path) -> None:
    manifest = init(tmp_path / "data")
    edited = changed(changed(manifest, "workload", options={"width": 8}), "sync", inner_steps=7)
    assert edited.swarm_id != manifest.swarm_id
    assert founded_here(manifest, tmp_path / "data")
    assert founded_here(edited, tmp_path / "data")
    start(tmp_path / "data", edited)
    assert founded_here(edited, tmp_path / "data")
    assert not founded_here(manifest, tmp_path / "data")


def test_file_of_a_stranger_that_names_this_founder_s_public_keys_is_not_this_founder_s(tmp_path: Path) -> None:
    manifest = init(tmp_path / "data")
    for name in ("subprocess:Popen", "sine:Other", "sine.more:Sine"):
        assert not founded_here(changed(manifest, "workload", name=name), tmp_path / "data")
    start(tmp_path / "data", manifest)
    assert not founded_here(changed(manifest, "workload", options={"path": "/etc"}), tmp_path / "data")


def test_folder_of_a_stranger_with_all_keys_of_its_swarm_has_founded_nothing_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as elsewhere:  # another user's machine
        elsewhere.setenv("XDG_STATE_HOME", str(tmp_path / "theirs"))
        manifest = init(tmp_path / "shipped")
        assert founded_here(manifest, tmp_path / "shipped")
    shutil.copytree(tmp_path / "theirs", tmp_path / "shipped" / "state")
    assert not founded_here(manifest, tmp_path / "shipped")
    start(tmp_path / "shipped", manifest)
    assert not founded_here(manifest, tmp_path / "shipped")
    init(tmp_path / "own")  # who founds swarms here, with that very name, has not founded that one
    assert not founded_here(manifest, tmp_path / "shipped")


def test_other_data_folders_of_a_founder_have_not_founded_it(tmp_path: Path) -> None:
    manifest = init(tmp_path / "data")
    Identity.load_or_create(tmp_path / "other" / "node.key")
    assert not founded_here(manifest, tmp_path / "other")
    assert not founded_here(manifest, tmp_path / "none")
    founders = [*manifest.swarm.founders, Identity.load(tmp_path / "other" / "node.key").peer_id]
    both = changed(manifest, "swarm", founders=founders)
    assert founded_here(both, tmp_path / "data")
    assert not founded_here(both, tmp_path / "other")
    others_alone = changed(manifest, "swarm", founders=founders[1:])
    assert not founded_here(others_alone, tmp_path / "data")


def test_founder_that_moved_its_folder_has_still_founded_it(tmp_path: Path) -> None:
    manifest = init(tmp_path / "data")
    (tmp_path / "data").rename(tmp_path / "moved")
    assert founded_here(manifest, tmp_path / "moved")


def test_swarm_under_another_authority_s_key_was_not_founded_here(tmp_path: Path) -> None:
    manifest = init(tmp_path / "data")
    theirs = changed(manifest, "swarm", authority=Identity.generate().peer_id)
    assert not founded_here(theirs, tmp_path / "data")


def test_foundings_are_kept_beside_each_other_and_are_bounded(tmp_path: Path, state: Path) -> None:
    one, two = init(tmp_path / "one"), init(tmp_path / "two", "own.loss:Loss")
    assert founded_here(one, tmp_path / "one")
    assert founded_here(two, tmp_path / "two")
    assert len(state.read_bytes().splitlines()) == 2
    remember(one, one.swarm.founders[0])
    assert len(state.read_bytes().splitlines()) == 2
    for number in range(FOUNDED_LIMIT + 5):
        remember(changed(two, "workload", name=f"own:N{number}"), two.swarm.founders[0])
    assert len(state.read_bytes().splitlines()) == FOUNDED_LIMIT
    assert state.stat().st_size < founded.READ_LIMIT_BYTES
    assert not founded_here(one, tmp_path / "one")


def test_installed_workloads_need_no_record(tmp_path: Path, state: Path) -> None:
    init(tmp_path / "data", "regression")
    assert not state.exists()


def test_record_that_others_can_write_or_that_is_damaged_is_not_believed(tmp_path: Path, state: Path) -> None:
    manifest = init(tmp_path / "data")
    assert state.stat().st_mode & 0o777 == 0o600
    assert state.parent.stat().st_mode & 0o777 == 0o700
    state.chmod(0o622)
    assert not founded_here(manifest, tmp_path / "data")
    state.chmod(0o600)
    state.write_bytes(b'{"node": 3}\n\xff\n[]\n' + state.read_bytes())
    assert founded_here(manifest, tmp_path / "data")
    state.write_bytes(state.read_bytes()[:-30])
    assert not founded_here(manifest, tmp_path / "data")


def test_user_without_a_home_founds_nothing_and_is_told_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(founded.platformdirs, "user_state_path", lambda *_, **__: Path("~/.local/state/shoal"))
    monkeypatch.chdir(tmp_path)
    assert record_path() is None
    manifest = init(tmp_path / "data")
    assert "--allow-workload sine:Sine`" in capsys.readouterr().out
    assert not founded_here(manifest, tmp_path / "data")
    assert not (tmp_path / "~").exists()


def test_init_whose_record_cannot_be_kept_says_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    init(tmp_path / "data")
    assert "--allow-workload sine:Sine`" in capsys.readouterr().out
