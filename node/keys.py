"""Changing a node's keys: encrypting them, and starting anew under another one.

The key is the node: whoever has another key is another node. So a rotation is a newcomer that takes an old node's
place. It is no succession, for the old key, which may be in other hands by then, shall vouch for nobody: the members
treat the two as strangers to each other, what the old one promised binds the new one to nothing, and who was admitted
by name (a founder, one of an allowlist, an invite for one node) has to be admitted anew. The authority's key is part of
what a SwarmId names and cannot be another; protect it with a passphrase.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from shoal.node.rounds.authority import KEY_NAME as AUTHORITY_KEY_NAME
from shoal.node.state.store import Store, disk_errors
from shoal.protocol import key_file
from shoal.protocol.errors import ConfigError
from shoal.protocol.folders import sync_folder
from shoal.protocol.identity import Identity, PeerId

NODE_KEY_NAME = "node.key"
LEFT_BEHIND = ("agreement.log", "boot", "peers.json")
"""Files that only bind the old node, or that only it counted in."""


class Rotated(NamedTuple):
    """The PeerIds before and after, and where the old key lies."""

    before: PeerId
    after: PeerId
    kept: Path


def protect(folder: Path) -> list[Path]:
    """Encrypt the keys in a data folder with the passphrase that the user gives; those that were not yet.

    Raises ConfigError, StorageError; a key is then there as it was.
    """
    changed = []
    for path in (folder / NODE_KEY_NAME, folder / AUTHORITY_KEY_NAME):
        if path.exists() and not key_file.is_encrypted(path):
            Identity.load(path).protect(path)
            changed.append(path)
    return changed


def rotate(folder: Path) -> Rotated:
    """Give the node of this data folder another key; the old one, and what it is bound by, is moved aside.

    Raises ConfigError if the node runs or has no key, StorageError. A crash on the way leaves either key in place, or
    none, and then the next start makes one: the old one is gone before anything is that binds it.
    """
    path = folder / NODE_KEY_NAME
    before = Identity.load(path)
    mark = before.peer_id[-8:]
    kept = path.with_name(f"{NODE_KEY_NAME}.{mark}")
    if kept.exists():
        raise ConfigError(f"{kept} is there already; move it away first")
    with Store(folder), disk_errors(folder):  # nobody runs on it meanwhile
        path.replace(kept)
        sync_folder(folder)
        for name in LEFT_BEHIND:
            if (folder / name).exists():
                (folder / name).replace(folder / f"{name}.{mark}")
        sync_folder(folder)
        after = Identity.load_or_create(path)
    return Rotated(before.peer_id, after.peer_id, kept)
