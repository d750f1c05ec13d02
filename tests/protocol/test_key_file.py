"""Keys at rest: encrypted where a passphrase is given, and never readable without it."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from shoal.protocol import key_file
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import Identity

PASSPHRASE = "a horse and a battery"


@pytest.fixture
def passphrase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "passphrase"
    path.write_text(PASSPHRASE + "\nmore that does not count\n")
    path.chmod(0o600)
    monkeypatch.setenv(key_file.PASSPHRASE_VARIABLE, str(path))
    return path


def test_key_made_with_a_passphrase_is_encrypted_and_opens_with_it_alone(
    tmp_path: Path, passphrase: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "node.key"
    made = Identity.load_or_create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert key_file.is_encrypted(path)
    assert made.private_bytes() not in path.read_bytes()
    key = serialization.load_pem_private_key(path.read_bytes(), password=PASSPHRASE.encode())
    assert key.private_bytes_raw() == made.private_bytes()  # type: ignore[union-attr]
    assert Identity.load(path).private_bytes() == made.private_bytes()
    passphrase.write_text("another passphrase")
    with pytest.raises(ConfigError, match="the passphrase does not open"):
        Identity.load(path)
    monkeypatch.delenv(key_file.PASSPHRASE_VARIABLE)
    with pytest.raises(ConfigError, match="--key-passphrase-file"):
        Identity.load_or_create(path)


def test_user_at_a_terminal_is_asked_for_the_passphrase(
    tmp_path: Path, passphrase: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "node.key"
    made = Identity.load_or_create(path)
    monkeypatch.delenv(key_file.PASSPHRASE_VARIABLE)
    asked: list[str] = []

    def answer(question: str) -> str:
        asked.append(question)
        return PASSPHRASE

    monkeypatch.setattr(key_file, "ask", answer)
    for _ in range(2):
        assert Identity.load(path).peer_id == made.peer_id
    assert asked == [f"Passphrase of {path}: "]
    beside, elsewhere = tmp_path / "authority.key", tmp_path / "other" / "node.key"
    for other in (beside, elsewhere):
        Identity.load_or_create(other)
    assert key_file.is_encrypted(beside), "with what opened the one that was there"
    assert not key_file.is_encrypted(elsewhere)


@pytest.mark.parametrize("protected", [False, True])
def test_key_in_which_a_bit_flipped_is_no_other_nodes(tmp_path: Path, passphrase: Path, protected: bool) -> None:
    path = tmp_path / "node.key"
    with pytest.MonkeyPatch.context() as patch:
        if not protected:
            patch.delenv(key_file.PASSPHRASE_VARIABLE)
        made = Identity.load_or_create(path)
        whole = path.read_bytes()
        refused = 0
        for bit in range(0, 8 * len(whole), 61 if protected else 1):  # opening one with a passphrase takes its time
            data = bytearray(whole)
            data[bit // 8] ^= 1 << bit % 8
            path.write_bytes(data)
            try:
                assert Identity.load(path).peer_id == made.peer_id
            except ConfigError:
                refused += 1
    assert refused > 10


def test_key_of_an_earlier_release_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(key_file.PASSPHRASE_VARIABLE, raising=False)
    path = tmp_path / "node.key"
    made = Identity.load_or_create(path)
    lines = path.read_bytes().splitlines(keepends=True)
    assert lines[-1].startswith(b"public key: ")
    path.write_bytes(b"".join(lines[:-1]))
    assert Identity.load(path).peer_id == made.peer_id


def test_plain_key_needs_no_passphrase_and_is_protected_with_one(tmp_path: Path, passphrase: Path) -> None:
    path = tmp_path / "node.key"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(key_file.PASSPHRASE_VARIABLE)
        made = Identity.load_or_create(path)
        assert not key_file.is_encrypted(path)
        with pytest.raises(ConfigError, match="give the passphrase"):
            made.protect(path)
        assert not key_file.is_encrypted(path)
    assert Identity.load(path).peer_id == made.peer_id
    made.protect(path)
    assert key_file.is_encrypted(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert Identity.load(path).private_bytes() == made.private_bytes()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["node.key", "passphrase"]


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [("short", 0o600, "a passphrase has 8 to"), ("", 0o600, "has 0 bytes"), (PASSPHRASE, 0o644, "chmod 600")],
)
def test_passphrase_file_is_checked(passphrase: Path, tmp_path: Path, text: str, mode: int, says: str) -> None:
    passphrase.write_text(text)
    passphrase.chmod(mode)
    with pytest.raises(ConfigError, match=says):
        Identity.load_or_create(tmp_path / "node.key")
    assert not (tmp_path / "node.key").exists()


def test_passphrase_file_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(key_file.PASSPHRASE_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="there is no passphrase file"):
        Identity.load_or_create(tmp_path / "node.key")
