"""A node's Ed25519 key, its PeerId, and signatures that cannot be moved from one use to another.

A PeerId is the public key itself in libp2p's clothing, so whoever knows a PeerId can verify its signatures
without asking anyone for a key:

    PeerId = base58btc( 0x00 0x24 ‖ 0x08 0x01 0x12 0x20 ‖ 32 bytes of public key )
             identity multihash of    protobuf PublicKey{Type: Ed25519, Data: key}

It is always 52 characters and begins with "12D3Koo". What is signed is never the bare message but

    "shoal-signature-v1" ‖ u16 length of domain ‖ domain ‖ message

so that a vote can never pass for a node record, nor a lane's hello for either.

Keys are kept in files as `shoal.protocol.key_file` says.

Source: libp2p peer-id specification; RFC 8032 (Ed25519); RFC 5958 (PKCS #8).
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import NewType, Self

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from shoal.protocol import key_file
from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.key_file import keep_keys_out

PeerId = NewType("PeerId", str)

SEED_BYTES = 32
SIGNATURE_BYTES = 64
PEER_ID_CHARS = 52
DOMAIN_LIMIT_BYTES = 255
PUBLIC_KEY_CACHE_ENTRIES = 4096
REMEMBERED_SIGNATURES = 4096
REMEMBERED_LIMIT_BYTES = 256
"""Of messages whose signatures are remembered: with the table full that is some 2 MiB."""

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
    """Check that `signature` is `peer_id`'s over (domain, message). A malformed PeerId is just False.

    Short ones are remembered: a vote is checked as it is heard, in its certificate, and by the chain.
    """
    short = len(message) <= REMEMBERED_LIMIT_BYTES
    return (_verified_once if short else _verified)(peer_id, domain, message, signature)


def _verified(peer_id: PeerId, domain: bytes, message: bytes, signature: bytes) -> bool:
    if len(signature) != SIGNATURE_BYTES:
        return False
    try:
        _public_key(peer_id).verify(signature, _to_be_signed(domain, message))
    except (InvalidSignature, MalformedPeerId):
        return False
    return True


_verified_once = lru_cache(maxsize=REMEMBERED_SIGNATURES)(_verified)


def _to_be_signed(domain: bytes, message: bytes) -> bytes:
    if not 0 < len(domain) <= DOMAIN_LIMIT_BYTES:
        raise LocalError(f"a signature domain has 1 to {DOMAIN_LIMIT_BYTES} bytes, not {len(domain)}")
    return b"".join((_SIGNATURE_PREFIX, len(domain).to_bytes(2, "big"), domain, message))


class Identity:
    """An Ed25519 private key and the PeerId that follows from it. A process with one leaves no key in a core dump."""

    __slots__ = ("_key", "peer_id")

    def __init__(self, key: Ed25519PrivateKey) -> None:
        keep_keys_out()
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

        Raises ConfigError if the file is missing, open to others, truncated or not a key of ours, or encrypted with
        another passphrase than the user gives. The file is never changed.
        """
        return cls(key_file.read(Path(path)))

    @classmethod
    def load_or_create(cls, path: Path | str) -> Self:
        """The identity kept at `path`, made now if there is none. An existing file is never overwritten.

        Its folder is made if need be, and closed to other users (`private_folder`).
        Raises ConfigError as `load` does, StorageError if the file cannot be written.
        """
        path = Path(path)
        key_file.make_folder(path.parent)
        if not os.path.lexists(path):
            key_file.publish(path, cls.generate()._key)
        # Read back even what was just written: if another process won the race, its key counts.
        return cls.load(path)

    def private_bytes(self) -> bytes:
        """The 32-byte seed. Whoever holds it is this node."""
        return self._key.private_bytes_raw()

    def sign(self, domain: bytes, message: bytes) -> bytes:
        """A 64-byte signature over (domain, message), valid under that domain only."""
        return self._key.sign(_to_be_signed(domain, message))

    def protect(self, path: Path | str) -> None:
        """Write this key anew to `path`, encrypted with the passphrase that the user gives.

        Raises ConfigError without a passphrase, StorageError where it cannot be written: the old file is then there.
        """
        key_file.replace(Path(path), self._key)
