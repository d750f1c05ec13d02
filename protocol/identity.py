"""A node's Ed25519 key, its PeerId, and signatures that cannot be moved from one use to another.

A PeerId is the public key itself in libp2p's clothing, so whoever knows a PeerId can verify its signatures
without asking anyone for a key:

    PeerId = base58btc( 0x00 0x24 ‖ 0x08 0x01 0x12 0x20 ‖ 32 bytes of public key )
             identity multihash of    protobuf PublicKey{Type: Ed25519, Data: key}

It is always 52 characters and begins with "12D3Koo". What is signed is never the bare message but

    "shoal-signature-v1" ‖ u16 length of domain ‖ domain ‖ message

so that a vote can never pass for a node record, nor a lane's hello for either.

The key file is PEM (PKCS #8, unencrypted), mode 0600: `openssl pkey -in node.key -text` reads it.

Source: libp2p peer-id specification; RFC 8032 (Ed25519); RFC 5958 (PKCS #8).
"""

from __future__ import annotations

import os
import secrets
import stat
from functools import lru_cache
from pathlib import Path
from typing import NewType, Self

import base58
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from shoal.protocol.errors import ConfigError, LocalError, RemoteError, StorageError

PeerId = NewType("PeerId", str)

SEED_BYTES = 32
SIGNATURE_BYTES = 64
PEER_ID_CHARS = 52
KEY_FILE_LIMIT_BYTES = 4096
DOMAIN_LIMIT_BYTES = 255
PUBLIC_KEY_CACHE_ENTRIES = 4096

_MULTIHASH_PREFIX = bytes([0x00, 0x24, 0x08, 0x01, 0x12, 0x20])
_SIGNATURE_PREFIX = b"shoal-signature-v1"


class MalformedPeerId(RemoteError, ValueError):
    """A text that is no PeerId of an Ed25519 key.

    Also a ValueError, so that a message struct may parse its PeerIds in `__post_init__` and a configuration
    reader may turn it into a ConfigError.
    """


def parse_peer_id(text: str) -> PeerId:
    """The PeerId written as `text`, accepted in its one canonical spelling only.

    Raises MalformedPeerId (a RemoteError and a ValueError).
    """
    _public_key_bytes(text)
    return PeerId(text)


@lru_cache(maxsize=PUBLIC_KEY_CACHE_ENTRIES)
def _public_key_bytes(text: str) -> bytes:
    # The length comes first: base58 takes quadratic time, and a stranger chose the text.
    if not isinstance(text, str) or len(text) != PEER_ID_CHARS:
        raise MalformedPeerId(f"a PeerId has {PEER_ID_CHARS} characters and starts with 12D3Koo")
    try:
        raw: bytes = base58.b58decode(text)
    except ValueError:
        raise MalformedPeerId(f"{text!r} is not base58") from None
    # 38 bytes that start like this take all 52 characters: no room for the blanks that base58 forgives, so one
    # peer has one spelling, and one entry in every table.
    if not raw.startswith(_MULTIHASH_PREFIX) or len(raw) != 38:
        raise MalformedPeerId(f"{text!r} is not the PeerId of an Ed25519 key")
    return raw[len(_MULTIHASH_PREFIX) :]


@lru_cache(maxsize=PUBLIC_KEY_CACHE_ENTRIES)
def _public_key(peer_id: str) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(_public_key_bytes(peer_id))


def peer_id_of(public_key: bytes) -> PeerId:
    """The PeerId of a raw 32-byte Ed25519 public key."""
    if len(public_key) != 32:
        raise LocalError(f"an Ed25519 public key has 32 bytes, not {len(public_key)}")
    return PeerId(base58.b58encode(_MULTIHASH_PREFIX + public_key).decode())


def public_key_of(peer_id: PeerId) -> bytes:
    """The raw 32-byte Ed25519 public key inside a PeerId. Raises MalformedPeerId."""
    return _public_key_bytes(peer_id)


def verify(peer_id: PeerId, domain: bytes, message: bytes, signature: bytes) -> bool:
    """Whether `signature` is `peer_id`'s over (domain, message). A malformed PeerId is just False."""
    if len(signature) != SIGNATURE_BYTES:
        return False
    try:
        _public_key(peer_id).verify(signature, _to_be_signed(domain, message))
    except (InvalidSignature, MalformedPeerId):
        return False
    return True


def _to_be_signed(domain: bytes, message: bytes) -> bytes:
    if not 0 < len(domain) <= DOMAIN_LIMIT_BYTES:
        raise LocalError(f"a signature domain has 1 to {DOMAIN_LIMIT_BYTES} bytes, not {len(domain)}")
    return b"".join((_SIGNATURE_PREFIX, len(domain).to_bytes(2, "big"), domain, message))


class Identity:
    """An Ed25519 private key and the PeerId that follows from it."""

    __slots__ = ("_key", "peer_id")

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.peer_id: PeerId = peer_id_of(key.public_key().public_bytes_raw())

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"  # never the key

    @classmethod
    def generate(cls) -> Self:
        """A fresh identity from the system's randomness."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> Self:
        """The identity of a 32-byte seed (what `private_bytes` returns)."""
        if len(seed) != SEED_BYTES:
            raise LocalError(f"an Ed25519 seed has {SEED_BYTES} bytes, not {len(seed)}")
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """The identity kept at `path`.

        Raises ConfigError if the file is missing, open to others, truncated or not a key of ours. The file is
        never changed.
        """
        return cls(_parse_key_file(_read_private(Path(path)), Path(path)))

    @classmethod
    def load_or_create(cls, path: Path | str) -> Self:
        """The identity kept at `path`, made now if there is none. An existing file is never overwritten.

        Raises ConfigError as `load` does, StorageError if the file cannot be written.
        """
        path = Path(path)
        if not os.path.lexists(path):
            _publish_exclusively(path, cls.generate()._pem())
        # Read back even what was just written: if another process won the race, its key counts.
        return cls.load(path)

    def private_bytes(self) -> bytes:
        """The 32-byte seed. Whoever holds it is this node."""
        return self._key.private_bytes_raw()

    def sign(self, domain: bytes, message: bytes) -> bytes:
        """A 64-byte signature over (domain, message), valid under that domain only."""
        return self._key.sign(_to_be_signed(domain, message))

    def _pem(self) -> bytes:
        return self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )


def _read_private(path: Path) -> bytes:
    """The bytes of a key file that only its owner can read."""
    try:
        # O_NONBLOCK: opening a named pipe must not wait for its writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"{path} is not a regular file; give the path of a key file")
            if mode & 0o077:
                raise ConfigError(f"the key file {path} can be read by others; run: chmod 600 {path}")
            return file.read(KEY_FILE_LIMIT_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"there is no key file {path}; start the node once to make one") from None
    except OSError as error:
        raise StorageError(f"cannot read the key file {path}: {error.strerror}; check its owner and mode") from None


def _parse_key_file(data: bytes, path: Path) -> Ed25519PrivateKey:
    remedy = "restore it from a backup, or move it away to start with a new identity"
    if len(data) > KEY_FILE_LIMIT_BYTES:
        raise ConfigError(f"{path} is too big to be a key file; {remedy}")
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ConfigError(f"{path} is damaged or is not a key file of Shoal's; {remedy}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path} holds a key of another kind than Ed25519; {remedy}")
    return key


def _publish_exclusively(path: Path, data: bytes) -> None:
    """Make `path` hold `data`, whole and on disk, or leave an existing file alone.

    A crash at any point leaves no key file or a complete one: the bytes go to a private temporary first, and
    `link` then gives them the name, failing if somebody has it already.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(descriptor)
            try:
                os.link(temporary, path)
            except FileExistsError:
                return
        finally:
            temporary.unlink()
        _sync_directory(path.parent)
    except OSError as error:
        raise StorageError(
            f"cannot write the key file {path}: {error.strerror}; check the folder and the disk"
        ) from None


def _sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
