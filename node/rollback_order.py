"""The user's order to go back, on disk: `shoal rollback` is not forgotten at a restart.

rollback.order    the round and the hash of its certificate, framed as in the logs (store.py)
"""

from __future__ import annotations

import logging
from pathlib import Path

from shoal.node.store import disk_errors, frame_record, read_records, sync_folder, write_atomically
from shoal.protocol.errors import RemoteError
from shoal.protocol.messages import Target
from shoal.protocol.wire import canonical, decode

NAME = "rollback.order"

logger = logging.getLogger(__name__)


class RollbackOrder:
    """The order of the node whose data folder is `folder`, one at most. All methods block."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME

    def read(self) -> Target | None:
        """The order, None if there is none; a damaged one is none, and is told. Raises StorageError."""
        with disk_errors(self._path.parent):
            if not self._path.exists():
                return None
            records, _ = read_records(self._path)
        try:
            (record,) = records
            return decode(record, Target)
        except (ValueError, RemoteError):
            logger.warning("%s is damaged and is ignored; order again with `shoal rollback --to`", self._path)
            return None

    def write(self, target: Target) -> None:
        """Have the order on disk, in place of the one before. Raises StorageError."""
        write_atomically(self._path, frame_record(canonical(target)))

    def remove(self) -> None:
        """There is no order any more. Raises StorageError."""
        with disk_errors(self._path.parent):
            if self._path.exists():
                self._path.unlink()
                sync_folder(self._path.parent)
