"""File of the forks that a node has seen (`shoal.protocol.fork_watch`): each two certificates for one position."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shoal.node.state.store import RecordLog
from shoal.protocol.errors import RemoteError, StorageError
from shoal.protocol.forks import Fork
from shoal.protocol.wire import canonical, decode

LOG_NAME = "forks.log"


class ForkFile:
    """Forks that lie in a data folder."""

    def __init__(self, folder: Path) -> None:
        """Raises StorageError where what was found before cannot be read."""
        self._path = folder / LOG_NAME
        self._forks = self._load()

    def _load(self) -> list[Fork]:
        if not self._path.exists():
            return []
        log = RecordLog(self._path)
        try:
            if log.damaged:
                raise RemoteError("its bytes are not those that were written")
            return [decode(record, Fork) for record in log.recovered]
        except RemoteError as error:
            raise StorageError(f"{self._path} is damaged ({error}); remove it if the fork is settled") from None
        finally:
            log.close()

    @property
    def forks(self) -> Sequence[Fork]:
        """All of them, in the order in which they were seen."""
        return self._forks

    def keep(self, fork: Fork) -> None:
        """Have one more on disk. Raises StorageError."""
        log = RecordLog(self._path)
        try:
            if log.damaged:  # since it was read
                log.keep_damaged()
                log.rewrite([canonical(one) for one in self._forks])
            log.append(canonical(fork))
        finally:
            log.close()
        self._forks.append(fork)
