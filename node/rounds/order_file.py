"""Orders of the node's user, on disk: what was ordered is not forgotten at a restart.

NAME.order    one record in canonical msgpack, framed as in the logs (store.py)
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from shoal.node.state.store import disk_errors, frame_record, read_records, write_atomically
from shoal.protocol.errors import RemoteError
from shoal.protocol.folders import sync_folder
from shoal.protocol.inputs import Order, Wanted
from shoal.protocol.messages import Target
from shoal.protocol.wire import canonical, decode

FILES: Final[Mapping[type[Order], tuple[str, str]]] = {
    Target: ("rollback.order", "shoal rollback --to"),
    Wanted: ("amend.order", "shoal amend --set"),
}
"""By kind of order its file, and the command that orders anew."""

logger = logging.getLogger(__name__)


class OrderFiles:
    """The orders that may be in `folder`, at most one of a kind. All methods block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self) -> tuple[Order, ...]:
        """All of them; a damaged one is none, and is told. Raises StorageError."""
        found = (self._read(kind) for kind in FILES)
        return tuple(order for order in found if order is not None)

    def _read(self, kind: type[Order]) -> Order | None:
        name, again = FILES[kind]
        path = self._folder / name
        with disk_errors(self._folder):
            if not path.exists():
                return None
            records, _ = read_records(path)
        try:
            (record,) = records
            return decode(record, kind)
        except (ValueError, RemoteError):
            logger.warning("%s is damaged and is ignored; order again with `%s`", path, again)
            return None

    def write(self, order: Order) -> None:
        """Have the order on disk, in place of the one before. Raises StorageError."""
        write_atomically(self._folder / FILES[type(order)][0], frame_record(canonical(order)))

    def remove(self, kind: type[Order]) -> None:
        """There is no order of this kind any more. Raises StorageError."""
        path = self._folder / FILES[kind][0]
        with disk_errors(self._folder):
            if path.exists():
                path.unlink()
                sync_folder(self._folder)
