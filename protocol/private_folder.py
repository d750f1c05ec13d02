"""Folders that hold keys: closed to all but their user, whoever made them, and with whatever mode.

A key file is closed to others by itself (`key_file`), but a data folder holds more that is nobody else's affair: the
token of the page, sockets, the invite, what was trained. Who could write there could put other files in their place.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from functools import lru_cache
from pathlib import Path

from shoal.protocol.errors import ConfigError
from shoal.protocol.folders import make_folder

PRIVATE_MODE = 0o700

_SYSTEMS = frozenset(
    (
        *("/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/lib64", "/media", "/mnt", "/opt", "/proc", "/run"),
        *("/sbin", "/srv", "/sys", "/tmp", "/usr", "/var", "/dev/shm"),
        *("/Applications", "/Library", "/System", "/Users", "/private", "/private/var"),
    )
)
"""Folders that must not be closed to the other users of the machine, as all right under /usr and /var."""

logger = logging.getLogger(__name__)


def make_private(folder: Path) -> None:
    """Make a folder that its user alone can enter, with those above it; one that is there is closed to all others.

    Where it belongs to another user that is said in the log. Raises ConfigError for a folder that all users share,
    OSError.
    """
    if is_shared(folder):
        raise ConfigError(f"{folder} is shared by all users; choose a folder of its own, such as {folder / 'shoal'}")
    make_folder(folder, mode=PRIVATE_MODE)
    found = folder.stat()
    if stat.S_IMODE(found.st_mode) & ~PRIVATE_MODE:
        with contextlib.suppress(PermissionError):  # it is another user's
            folder.chmod(PRIVATE_MODE)
    trouble = why_not_private(folder)
    if trouble is not None:
        _say(trouble)


def is_shared(folder: Path) -> bool:
    """True if a folder is the system's, or one of another user's where everybody has files, like /tmp."""
    place = folder.absolute() if not folder.exists() else folder.resolve()
    if place == place.parent or str(place) in _SYSTEMS or str(place.parent) in ("/usr", "/var"):
        return True
    if not place.is_dir():
        return False
    found = place.stat()
    return bool(found.st_mode & stat.S_ISVTX) and found.st_uid != os.geteuid()  # one's own is a fresh volume


def why_not_private(folder: Path) -> str | None:
    """Return what lets other users into a folder, and what to do about it; None where nothing does."""
    found = folder.stat()
    if found.st_uid != os.geteuid():
        return (
            f"{folder} belongs to another user, who can take this node's keys; "
            f"give it to this one (sudo chown -R {os.geteuid()} {folder}), or choose another --data-dir"
        )
    if stat.S_IMODE(found.st_mode) & ~PRIVATE_MODE:
        return f"{folder} can be entered by others; run: chmod 700 {folder}"
    return None


@lru_cache(maxsize=64)
def _say(trouble: str) -> None:
    """Warn once for each folder, however often it is come by."""
    logger.warning("%s", trouble)
