"""Record of the swarms founded here: what `shoal init` was told, so that its user need not say it again.

    shoal init --workload sine:Sine     ─►  founded: this node, this authority, that code
    shoal run FILE                      FILE names sine:Sine  ─►  was that founded by this user, in this folder?

A manifest may name any code, whoever wrote it, and a file or a data folder may come from anybody. So nothing that comes
with them is believed: not an authority's key in the folder, which a stranger could have made; nor that the file names
this user's own keys, which are known to all. What is written here lies where the user's programs keep their state, in
no data folder. A data folder has founded a manifest's swarm where

* its node's key, which no stranger has, is that of a founding written here, and the manifest names it as a founder;
* the manifest names the authority and the code of that same founding;
* the folder is bound to no swarm yet, or to this one: before its first round its user may still edit the manifest.

A folder that was moved to another user or machine has founded nothing there; `--allow-workload` says it then.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec
import platformdirs

from shoal.node.keys import NODE_KEY_NAME
from shoal.node.state.binding import bound_to
from shoal.node.state.store import write_atomically
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.manifest import Manifest
from shoal.protocol.private_folder import make_private

NAME = "founded.jsonl"
FOUNDED_LIMIT = 256
"""Foundings that are kept, the newest ones."""
READ_LIMIT_BYTES = 1 << 18

logger = logging.getLogger(__name__)


class Founding(msgspec.Struct, frozen=True, kw_only=True):
    """Record of one `shoal init`: the node, the authority and the workload of the swarm that it founded."""

    node: PeerId
    authority: PeerId
    workload: str


def record_path() -> Path | None:
    """Path of the record of this user's foundings; None without a home: else it would depend on the folder."""
    path = platformdirs.user_state_path("shoal", appauthor=False) / NAME
    return path if path.is_absolute() else None


def remember(manifest: Manifest, node: PeerId) -> bool:
    """Write down that this user founded the swarm; False where that cannot be kept."""
    made = Founding(node=node, authority=manifest.swarm.authority, workload=manifest.workload.name)
    path = record_path()
    if path is None:
        return False
    known = [founding for founding in _read(path) if founding != made]
    try:
        make_private(path.parent)
        _write(path, [*known, made][-FOUNDED_LIMIT:])
    except (ConfigError, OSError) as error:
        logger.info("what was founded here is not kept: %s", error)
        return False
    return True


def founded_here(manifest: Manifest, data_dir: Path) -> bool:
    """True if this user founded the manifest's swarm in this data folder; see above."""
    try:
        node = Identity.load(data_dir / NODE_KEY_NAME).peer_id
        belongs_to = bound_to(data_dir)
    except (ConfigError, OSError, ValueError):
        return False
    wanted = Founding(node=node, authority=manifest.swarm.authority, workload=manifest.workload.name)
    return (
        node in manifest.swarm.founders
        and belongs_to in (None, manifest.swarm_id.hex())
        and wanted in _read(record_path())
    )


def founded_by(data_dir: Path) -> list[Founding]:
    """The foundings of the node whose key lies in a data folder; none where that cannot be read."""
    try:
        node = Identity.load(data_dir / NODE_KEY_NAME).peer_id
    except (ConfigError, OSError, ValueError):
        return []
    return [founding for founding in _read(record_path()) if founding.node == node]


def forget(foundings: Collection[Founding]) -> None:
    """Take these out of the record, which goes with the last of them. Raises OSError."""
    path = record_path()
    if path is None or not foundings:
        return
    kept = [founding for founding in _read(path) if founding not in foundings]
    if kept:
        _write(path, kept)
        return
    path.unlink(missing_ok=True)
    if not any(path.parent.iterdir()):
        path.parent.rmdir()


def _write(path: Path, foundings: Iterable[Founding]) -> None:
    write_atomically(path, b"".join(map(line_of, foundings)))
    path.chmod(0o600)


def line_of(founding: Founding) -> bytes:
    """The line of the record that says it."""
    return msgspec.json.encode(founding) + b"\n"


def _read(path: Path | None) -> list[Founding]:
    """The foundings in a file that is this user's, and that nobody else can write; damaged lines are left out."""
    if path is None:
        return []
    with suppress(OSError), path.open("rb") as file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
            logger.warning("%s can be written by others, and is ignored; remove it", path)
            return []
        lines, foundings = file.read(READ_LIMIT_BYTES).splitlines(), []
        for line in lines:
            with suppress(msgspec.DecodeError, UnicodeDecodeError):
                foundings.append(msgspec.json.decode(line, type=Founding))
        return foundings
    return []
