"""An order of the node's user, on disk: what was ordered is not forgotten at a restart.

NAME.order    one record in canonical msgpack, framed as in the logs (store.py)
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from shoal.node.state.store import disk_errors, frame_record, read_records, sync_folder, write_atomically
from shoal.protocol.errors import RemoteError
from shoal.protocol.wire import canonical, decode

logger = logging.getLogger(__name__)

Order = TypeVar("Order", bound=msgspec.Struct)


class OrderFile(Generic[Order]):
    """The one order of its `kind` that may be at `path`. again: the command that orders anew. All methods block."""

    def __init__(self, path: Path, kind: type[Order], *, again: str) -> None:
        self._path = path
        self._kind = kind
        self._again = again

    def read(self) -> Order | None:
        """The order, None if there is none; a damaged one is none, and is told. Raises StorageError."""
        with disk_errors(self._path.parent):
            if not self._path.exists():
                return None
            records, _ = read_records(self._path)
        try:
            (record,) = records
            return decode(record, self._kind)
        except (ValueError, RemoteError):
            logger.warning("%s is damaged and is ignored; order again with `%s`", self._path, self._again)
            return None

    def write(self, order: Order) -> None:
        """Have the order on disk, in place of the one before. Raises StorageError."""
        write_atomically(self._path, frame_record(canonical(order)))

    def remove(self) -> None:
        """There is no order any more. Raises StorageError."""
        with disk_errors(self._path.parent):
            if self._path.exists():
                self._path.unlink()
                sync_folder(self._path.parent)
