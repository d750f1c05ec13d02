"""Key files: PEM (PKCS #8), mode 0600, and encrypted where the user gives a passphrase.

    openssl pkey -in node.key -text            reads one
    SHOAL_KEY_PASSPHRASE_FILE=/run/secret      names the file with the passphrase, one line, closed to others as well

A key that is made while a passphrase is given is encrypted with it, and so is one that is made in the folder of another
that a passphrase opened; what is encrypted can be read with its passphrase alone. Who is asked for one at a terminal
gives it once for each process. Encryption is PBES2 of RFC 8018 (scrypt or PBKDF2, AES-256-CBC), as the library
cryptography sees fit.

Behind the key, where PEM has room for any text, stands the public one: it is compared when the key is read.

Keys stay out of core dumps too: a process that crashes, or is made to, writes none with a key in it.

    RLIMIT_CORE 1              no core file, and none for a program that `core_pattern` pipes cores to: of that one
                               value, which is less than any core has, the kernel keeps cores from pipes as well
    coredump_filter 0          where cores are made all the same, nothing of the heap or of stacks is in them

Both hold for what this process starts later, too. `PR_SET_DUMPABLE` would do the same, and would keep processes of this
very user from the memory that lanes share on one machine (`/proc/PID/fd`); `MADV_DONTDUMP` would have to know all
places where a library keeps a copy of a key.

Source: RFC 5958 (PKCS #8), RFC 7468 (PEM); core(5); fs/coredump.c of Linux.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import stat
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from cryptography.exceptions import InternalError, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shoal.protocol.errors import ConfigError, StorageError
from shoal.protocol.folders import sync_folder
from shoal.protocol.private_folder import make_private

LEAST_CORE_BYTES = 1
FILTER = Path("/proc/self/coredump_filter")


@lru_cache(maxsize=1)
def keep_keys_out() -> None:
    """Let no core dump have a key in it, as above: once for each process, and for good.

    What the system does not offer is left out.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    wanted = LEAST_CORE_BYTES if hard == resource.RLIM_INFINITY else min(LEAST_CORE_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_CORE, (wanted, hard))
    with contextlib.suppress(OSError):
        FILTER.write_text("0")


KEY_FILE_LIMIT_BYTES = 4096
PASSPHRASE_LIMIT_BYTES = 1024
PASSPHRASE_LEAST_BYTES = 8
PASSPHRASE_VARIABLE = "SHOAL_KEY_PASSPHRASE_FILE"
_PUBLIC = b"public key: "
_ENCRYPTED = b"-----BEGIN ENCRYPTED PRIVATE KEY-----"

_opened_by: dict[Path, bytes] = {}
"""By folder, the passphrase that opened a key in it."""
ask: Callable[[str], str] | None = None
"""Asks the user at a terminal; set by the command line, None where nobody can be asked."""


def read(path: Path) -> Ed25519PrivateKey:
    """The key in a file. Raises ConfigError, StorageError."""
    keep_keys_out()
    data = _read_private(path, KEY_FILE_LIMIT_BYTES, "key file", "start the node once to make one")
    remedy = "restore it from a backup, or move it away to start with a new identity"
    if len(data) > KEY_FILE_LIMIT_BYTES:
        raise ConfigError(f"{path} is too big to be a key file; {remedy}")
    passphrase = _passphrase_for(path) if data.startswith(_ENCRYPTED) else None
    try:
        key = serialization.load_pem_private_key(data, password=passphrase)
    except (ValueError, TypeError, UnsupportedAlgorithm, InternalError):
        if passphrase is not None:
            raise ConfigError(f"the passphrase does not open {path}, or the file is damaged; {remedy}") from None
        raise ConfigError(f"{path} is damaged or is not a key file of Shoal's; {remedy}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path} holds a key of another kind than Ed25519; {remedy}")
    says = [line for line in data.splitlines() if line.startswith(_PUBLIC)]
    if passphrase is not None:
        _opened_by[path.parent] = passphrase
    if says and _public_line(key) not in says:
        raise ConfigError(f"{path} is damaged: what it holds is another node's key than it says; {remedy}")
    return key


def publish(path: Path, key: Ed25519PrivateKey) -> None:
    """Make `path` hold `key`, whole and on disk, or leave an existing file alone.

    A crash at any point leaves no key file or a complete one: the bytes go to a private temporary first, and `link`
    then gives them the name, failing if somebody has it already. Raises ConfigError, StorageError.
    """
    _write(path, _pem(key, given_passphrase() or _opened_by.get(path.parent)), replacing=False)


def replace(path: Path, key: Ed25519PrivateKey) -> None:
    """Make `path` hold `key`, encrypted; the old file is there until the new one is. Raises ConfigError."""
    passphrase = given_passphrase()
    if passphrase is None:
        raise ConfigError(f"give the passphrase with --key-passphrase-file, or name its file in {PASSPHRASE_VARIABLE}")
    _write(path, _pem(key, passphrase), replacing=True)


def make_folder(folder: Path) -> None:
    """Make a folder for keys, closed to other users. Raises ConfigError, StorageError."""
    try:
        make_private(folder)
    except OSError as error:
        raise StorageError(
            f"cannot make {folder} a folder for keys: {error.strerror}; check the folders above it and the disk"
        ) from None


def is_encrypted(path: Path) -> bool:
    """True if the key in a file is encrypted. Raises ConfigError, StorageError."""
    data = _read_private(path, KEY_FILE_LIMIT_BYTES, "key file", "start the node once to make one")
    return data.startswith(_ENCRYPTED)


def given_passphrase() -> bytes | None:
    """The passphrase in the file that the environment names, None if it names none. Raises ConfigError."""
    named = os.environ.get(PASSPHRASE_VARIABLE)
    if not named:
        return None
    remedy = "write the passphrase into it, or unset " + PASSPHRASE_VARIABLE
    data = _read_private(Path(named), PASSPHRASE_LIMIT_BYTES, "passphrase file", remedy)
    passphrase = data.splitlines()[0] if data else b""
    if not PASSPHRASE_LEAST_BYTES <= len(passphrase) <= PASSPHRASE_LIMIT_BYTES:
        raise ConfigError(
            f"the first line of {named} has {len(passphrase)} bytes; a passphrase has {PASSPHRASE_LEAST_BYTES} to "
            f"{PASSPHRASE_LIMIT_BYTES}"
        )
    return passphrase


def _passphrase_for(path: Path) -> bytes:
    given = given_passphrase()
    if given is not None:
        return given
    if ask is None:
        raise ConfigError(
            f"{path} is encrypted; name the file with its passphrase with --key-passphrase-file, or in "
            f"{PASSPHRASE_VARIABLE}"
        )
    return _asked(str(path))


@lru_cache(maxsize=1)
def _asked(path: str) -> bytes:
    assert ask is not None
    return ask(f"Passphrase of {path}: ").encode()


def _pem(key: Ed25519PrivateKey, passphrase: bytes | None) -> bytes:
    how: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if passphrase is not None:
        how = serialization.BestAvailableEncryption(passphrase)
    pem: bytes = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how)
    return pem + _public_line(key) + b"\n"


def _public_line(key: Ed25519PrivateKey) -> bytes:
    """The line behind a key: a flipped bit mostly makes another valid key, and its node would be a stranger."""
    return _PUBLIC + key.public_key().public_bytes_raw().hex().encode()


def _read_private(path: Path, limit_bytes: int, what: str, remedy: str) -> bytes:
    """The bytes of a file that only its owner can read, one more than the limit at most."""
    try:
        # O_NONBLOCK: opening a named pipe must not wait for its writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"{path} is not a regular file; give the path of a {what}")
            if mode & 0o077:
                raise ConfigError(f"the {what} {path} can be read by others; run: chmod 600 {path}")
            return file.read(limit_bytes + 1)
    except FileNotFoundError:
        raise ConfigError(f"there is no {what} {path}; {remedy}") from None
    except OSError as error:
        raise StorageError(f"cannot read the {what} {path}: {error.strerror}; check its owner and mode") from None


def _write(path: Path, data: bytes, *, replacing: bool) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(descriptor)
            if replacing:
                temporary.replace(path)
            else:
                try:
                    os.link(temporary, path)
                except FileExistsError:
                    return
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)
    except OSError as error:
        raise StorageError(
            f"cannot write the key file {path}: {error.strerror}; check the folder and the disk"
        ) from None
