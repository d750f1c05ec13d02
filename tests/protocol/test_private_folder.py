"""A data folder is its user's alone, whoever made it."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest

from shoal.protocol import private_folder
from shoal.protocol.errors import ConfigError
from shoal.protocol.private_folder import is_shared, make_private, why_not_private


def mode_of(folder: Path) -> int:
    return stat.S_IMODE(folder.stat().st_mode)


@pytest.mark.parametrize("mode", [None, 0o755, 0o777, 0o1777, 0o2775, 0o750, 0o700])
def test_folder_is_closed_to_others_whoever_made_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int | None
) -> None:
    folder = tmp_path / "above" / "data"
    if mode is not None:
        folder.mkdir(parents=True)
        folder.chmod(mode)
        (folder / "notes").write_text("of the user's own")
    make_private(folder)
    assert mode_of(folder) == 0o700
    assert why_not_private(folder) is None
    assert caplog.records == []


def test_folder_behind_a_link_is_closed_itself(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(folder)
    make_private(tmp_path / "link")
    assert mode_of(folder) == 0o700


def test_folder_of_another_user_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    folder.mkdir(mode=0o755)
    me = os.geteuid()
    monkeypatch.setattr(private_folder.os, "geteuid", lambda: me + 1)
    with caplog.at_level(logging.WARNING):
        make_private(folder)
        make_private(folder)
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{folder} belongs to another user, who can take this node's keys; "
        f"give it to this one (sudo chown -R {me + 1} {folder}), or choose another --data-dir"
    )


def test_folder_that_cannot_be_closed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    folder.chmod(0o755)

    def refuse(path: Path, mode: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", refuse)
    make_private(folder)
    assert why_not_private(folder) == f"{folder} can be entered by others; run: chmod 700 {folder}"


def test_folders_that_all_users_share_are_not_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    like_tmp = tmp_path / "tmp"
    like_tmp.mkdir()
    like_tmp.chmod(0o1777)
    me = os.geteuid()
    monkeypatch.setattr(private_folder.os, "geteuid", lambda: me + 1)
    systems = ("/", "/etc", "/tmp", "/dev/shm", "/var/lib", "/usr/share", "/var/../etc")
    for folder in (like_tmp, *map(Path, systems)):
        if not folder.exists():
            continue
        before = mode_of(folder)
        with pytest.raises(ConfigError, match=f"is shared by all users; choose a folder of its own, such as {folder}"):
            make_private(folder)
        assert mode_of(folder) == before
    for folder in (like_tmp / "shoal", Path("/var/lib/shoal"), Path("/srv/shoal"), tmp_path):
        assert not is_shared(folder)
