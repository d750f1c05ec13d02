"""Which swarm a data folder is of. Its first start writes that down; the first step into a round makes it final.

A node that promised or signed something must find it again, whenever it comes back to that swarm: no other swarm may
take its folder. Before that, say where its workload could not be built, a corrected manifest, which is that of another
swarm, takes the folder over. What a start may leave of no round is named here: all else binds.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from shoal.node.state.store import disk_errors, write_atomically
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import Identity
from shoal.protocol.manifest import Manifest, render_manifest
from shoal.protocol.wire import SwarmId

SWARM_NAME: Final = "swarm"
STAYS: Final = (
    *("node.key", "node.key.*", "authority.key", "relay.*key"),
    *("boot", "name", SWARM_NAME, "swarm.toml", "lock", "elsewhere"),
    *("invite", "checkpoint", "revocations", "events*.jsonl", "daemon.log", "dashboard.token"),
    *("control.sock", "control.path", "trainer.sock"),
)
"""Of no round, and true or unread in another swarm."""
GOES: Final = ("layout.json", "peers.json", "transfer", "state/0.safetensors")
"""Of the other swarm, and nothing that anybody signed: of states S(0) alone."""


def bound_to(folder: Path) -> str | None:
    """The SwarmId, in hex, of the swarm that a data folder is of for good; None before it took part in a round.

    Raises StorageError.
    """
    with disk_errors(folder):
        path = folder / SWARM_NAME
        return _swarm_in(path) if path.exists() and _has_rounds(folder) else None


def check_free_for(folder: Path, swarm: SwarmId, *, founders: Collection[str] = ()) -> None:
    """Raise ConfigError where a data folder is of another swarm for good.

    founders: of `swarm`, where they are known. Whose key lies in the folder is told how to found with another.
    """
    if (known := bound_to(folder)) not in (None, swarm.hex()):
        anew = "or begin anew with another key: `shoal init --data-dir NEW -o NEW.toml`"
        raise ConfigError(
            f"{folder} belongs to another swarm ({known[:16]}…), in which it has rounds; choose another --data-dir"
            f"{f', {anew}' if _has_key_of(folder, founders) else ''}"
        )


def _has_key_of(folder: Path, peers: Collection[str]) -> bool:
    with suppress(ConfigError, OSError):
        return bool(peers) and Identity.load(folder / "node.key").peer_id in peers
    return False


def bind(folder: Path, manifest: Manifest) -> None:
    """Make a data folder, which is locked, that of the manifest's swarm. Raises ConfigError, StorageError."""
    check_free_for(folder, manifest.swarm_id, founders=manifest.swarm.founders)
    path = folder / SWARM_NAME
    with disk_errors(folder):
        if not path.exists() or path.read_bytes().strip() != manifest.swarm_id.hex().encode():
            for stale in (folder / name for name in GOES):
                if stale.is_dir():
                    shutil.rmtree(stale)
                else:
                    stale.unlink(missing_ok=True)
            write_atomically(path, manifest.swarm_id.hex().encode())
    write_atomically(folder / "swarm.toml", render_manifest(manifest).encode())


def _swarm_in(path: Path) -> str:
    """The SwarmId in a file, in hex. Raises ConfigError where it is damaged, OSError."""
    known = path.read_text("ascii", errors="replace").strip()
    if not re.fullmatch("[0-9a-f]{64}", known):
        raise ConfigError(f"{path} is damaged; write the swarm's id into it, as `shoal status` shows it at a member")
    return known


def _has_rounds(folder: Path) -> bool:
    """True if a file in a data folder may be what its node promised, signed or learnt in a round."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        known = any(fnmatchcase(name, free) for free in (*STAYS, *GOES, "transfer/*"))
        if not known and (path.is_symlink() or (path.is_file() and path.stat().st_size > 0)):
            return True
    return False
