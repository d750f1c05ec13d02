"""Another key for a node's folder: another node, bound by nothing that the old one said."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path

import pytest

from shoal.cli.main import execute
from shoal.node.keys import protect, rotate
from shoal.node.state.store import Store
from shoal.protocol import key_file
from shoal.protocol.agreement import DurableRecord
from shoal.protocol.errors import ConfigError, StorageError
from shoal.protocol.identity import Identity
from shoal.protocol.messages import Term


def test_rotation_takes_a_new_key_and_moves_aside_what_bound_the_old(tmp_path: Path) -> None:
    before = Identity.load_or_create(tmp_path / "node.key")
    with Store(tmp_path) as store:
        assert (store.next_boot(), store.next_boot()) == (1, 2)
        store.persist(DurableRecord(kind="promise", term=Term(), round=1, view=3))
    rotated = rotate(tmp_path)
    assert rotated.before == before.peer_id != rotated.after
    assert Identity.load(tmp_path / "node.key").peer_id == rotated.after
    assert Identity.load(rotated.kept).private_bytes() == before.private_bytes()
    for path in (rotated.kept, tmp_path / "node.key"):
        assert path.stat().st_mode & 0o777 == 0o600
    with Store(tmp_path) as store:
        assert store.durable_records() == []
        assert store.next_boot() == 1


@pytest.mark.parametrize("failing", range(4))
def test_rotation_cut_short_leaves_no_key_beside_promises_that_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    before = Identity.load_or_create(tmp_path / "node.key")
    promise = DurableRecord(kind="promise", term=Term(), round=1, view=3)
    with Store(tmp_path) as store:
        store.next_boot()
        store.persist(promise)
    (tmp_path / "peers.json").write_text("{}")
    moves, replace = itertools.count(), Path.replace

    def move(path: Path, target: Path) -> Path:
        if next(moves) == failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", move)
    with pytest.raises(StorageError):
        rotate(tmp_path)
    monkeypatch.undo()
    with Store(tmp_path) as store:
        binding = store.durable_records()
    after = Identity.load_or_create(tmp_path / "node.key")
    assert after.peer_id != before.peer_id or binding == [promise]
    assert (after.peer_id == before.peer_id) == (failing == 0)


def test_rotation_is_refused_while_the_node_runs(tmp_path: Path) -> None:
    before = Identity.load_or_create(tmp_path / "node.key").peer_id
    with Store(tmp_path), pytest.raises(ConfigError, match="already running"):
        rotate(tmp_path)
    assert Identity.load(tmp_path / "node.key").peer_id == before


def test_rotation_without_a_key_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no key file"):
        rotate(tmp_path)


def test_commands_rotate_and_protect_the_keys_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(key_file.PASSPHRASE_VARIABLE, "")
    folder, phrase = tmp_path / "node", tmp_path / "phrase"
    phrase.write_text("a horse and a battery")
    phrase.chmod(0o600)
    first = Identity.load_or_create(folder / "node.key").peer_id
    authority = Identity.load_or_create(folder / "authority.key").peer_id
    assert execute(["id", "--data-dir", str(folder), "--rotate"]) == 0
    told = capsys.readouterr()
    second = told.out.strip()
    assert second == Identity.load(folder / "node.key").peer_id != first
    assert first in told.err
    assert "have it admitted" in told.err
    with_phrase = ["--key-passphrase-file", str(phrase), "id", "--data-dir", str(folder)]
    assert execute([*with_phrase, "--protect"]) == 0
    assert capsys.readouterr().out.strip() == second
    assert key_file.is_encrypted(folder / "node.key")
    assert key_file.is_encrypted(folder / "authority.key")
    assert Identity.load(folder / "authority.key").peer_id == authority
    assert protect(folder) == []
    monkeypatch.setenv(key_file.PASSPHRASE_VARIABLE, "")
    assert execute(["id", "--data-dir", str(folder)]) == 2
    assert "--key-passphrase-file" in capsys.readouterr().err


def test_rotation_of_a_key_whose_passphrase_was_typed_gives_another_that_it_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phrase = tmp_path / "phrase"
    phrase.write_text("a horse and a battery")
    phrase.chmod(0o600)
    monkeypatch.setenv(key_file.PASSPHRASE_VARIABLE, str(phrase))
    Identity.load_or_create(tmp_path / "node" / "node.key")
    monkeypatch.delenv(key_file.PASSPHRASE_VARIABLE)
    key_file._asked.cache_clear()
    monkeypatch.setattr(key_file, "ask", lambda question: "a horse and a battery")
    rotated = rotate(tmp_path / "node")
    assert key_file.is_encrypted(tmp_path / "node" / "node.key")
    assert key_file.is_encrypted(rotated.kept)
    assert Identity.load(tmp_path / "node" / "node.key").peer_id == rotated.after
