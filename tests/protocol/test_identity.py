"""Identity: PeerIds as libp2p spells them, key files neither lost nor leaked, signatures bound to a use."""

from __future__ import annotations

import os
from pathlib import Path

import libp2p
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from libp2p.peer.id import ID

from shoal.protocol import key_file
from shoal.protocol.errors import ConfigError, LocalError, RemoteError
from shoal.protocol.identity import (
    Identity,
    MalformedPeerId,
    PeerId,
    parse_peer_id,
    peer_id_of,
    public_key_of,
    verify,
)

SEED = bytes(range(32))
ALICE = Identity.from_seed(SEED)
BOB = Identity.from_seed(bytes(32))


@pytest.mark.parametrize("seed", [SEED, bytes(32), b"\xff" * 32, b"shoal" * 6 + b"!!"])
def test_peer_id_is_the_one_libp2p_computes(seed: bytes) -> None:
    pair = libp2p.create_identity_from_seed(seed)
    ours = Identity.from_seed(seed)
    assert ours.peer_id == str(ID.from_pubkey(pair.public_key))
    assert public_key_of(ours.peer_id) == pair.public_key.to_bytes()
    assert parse_peer_id(ours.peer_id) == ours.peer_id
    assert ours.private_bytes() == seed == pair.private_key.to_bytes()


def test_peer_id_golden() -> None:
    assert ALICE.peer_id == "12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB"


def test_every_public_key_gives_a_52_character_peer_id() -> None:
    for edge in (bytes(32), b"\xff" * 32):
        assert len(peer_id_of(edge)) == 52
        assert peer_id_of(edge).startswith("12D3Koo")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "12D3KooW",
        ALICE.peer_id[:-1],
        ALICE.peer_id + "1",
        ALICE.peer_id[:-1] + " ",
        " " + ALICE.peer_id[1:],
        ALICE.peer_id[:-1] + "0",  # not in the alphabet
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",  # an RSA key's
        "z" * 52,
        "1" * 52,
        "1" * 10_000_000,
    ],
)
def test_parse_peer_id_refuses_anything_else(text: str) -> None:
    with pytest.raises(MalformedPeerId) as caught:
        parse_peer_id(text)
    assert isinstance(caught.value, RemoteError)
    assert isinstance(caught.value, ValueError)


def test_signature_holds_for_its_domain_message_and_signer_only() -> None:
    signature = ALICE.sign(b"vote", b"message")
    assert verify(ALICE.peer_id, b"vote", b"message", signature)
    assert not verify(ALICE.peer_id, b"record", b"message", signature)
    assert not verify(ALICE.peer_id, b"vote", b"massage", signature)
    assert not verify(BOB.peer_id, b"vote", b"message", signature)
    assert not verify(ALICE.peer_id, b"vote", b"message", signature[:-1])
    assert not verify(ALICE.peer_id, b"vote", b"message", signature[:-1] + bytes([signature[-1] ^ 1]))
    assert not verify(PeerId("nobody"), b"vote", b"message", signature)


def test_signature_domain_cannot_lend_bytes_to_the_message() -> None:
    assert not verify(ALICE.peer_id, b"vot", b"emessage", ALICE.sign(b"vote", b"message"))


@pytest.mark.parametrize("domain", [b"", b"x" * 256])
def test_signature_domain_is_bounded(domain: bytes) -> None:
    with pytest.raises(LocalError):
        ALICE.sign(domain, b"message")


def test_load_or_create_keeps_one_private_key(tmp_path: Path) -> None:
    path = tmp_path / "data" / "node.key"
    first = Identity.load_or_create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["node.key"]
    assert Identity.load_or_create(path).private_bytes() == first.private_bytes()
    assert Identity.load(path).peer_id == first.peer_id
    key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    assert key.private_bytes_raw() == first.private_bytes()  # type: ignore[union-attr]


def test_load_or_create_that_loses_the_race_takes_the_winners_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "node.key"
    winner = Identity.load_or_create(path)
    monkeypatch.setattr(os.path, "lexists", lambda _: False)  # as seen just before the winner wrote
    assert Identity.load_or_create(path).peer_id == winner.peer_id


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o620])
def test_load_refuses_a_key_others_can_reach(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "node.key"
    Identity.load_or_create(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"chmod 600 {path}"):
        Identity.load_or_create(path)


def _foreign_files() -> list[bytes]:
    pem = key_file._pem(ALICE._key, None)
    foreign = generate_private_key(SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return [b"", pem[: len(pem) // 2], b"not a key", b"\x00\xff" * 100, b"x" * 5000, foreign]


@pytest.mark.parametrize("content", _foreign_files())
def test_load_leaves_a_damaged_or_foreign_file_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "node.key"
    path.write_bytes(content)
    path.chmod(0o600)
    for read in (Identity.load, Identity.load_or_create):
        with pytest.raises(ConfigError, match="restore it from a backup"):
            read(path)
    assert path.read_bytes() == content


def test_load_says_what_to_do_without_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no key file"):
        Identity.load(tmp_path / "node.key")


def test_load_or_create_never_replaces_what_is_not_a_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("folder", "pipe", "dangling"):
        with pytest.raises(ConfigError):
            Identity.load_or_create(tmp_path / name)
    assert not (tmp_path / "nowhere").exists()


def test_identity_does_not_print_its_key() -> None:
    assert repr(ALICE) == f"Identity({ALICE.peer_id})"
