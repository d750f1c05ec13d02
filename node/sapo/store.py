"""The groups that this node holds, its own and those it pulled: on disk, and so across restarts.

    <folder>/<round>/<digest in hex>    the bytes of one group, held since this node's round

A file's name is the hash of its contents, which is checked when it is read: a torn or foreign file is never served, and
nothing has to be synced to the disk. Groups expire by rounds; when the store is full, the oldest go first. What was
read last stays in memory: a group is asked for in chunks, and by several one after the other.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from shoal.protocol.errors import StorageError
from shoal.protocol.rollouts import GROUP_LIMIT_BYTES, digest_of

DISK_LIMIT_BYTES = 512 << 20
GROUP_LIMIT = 65_536
MEMORY_LIMIT_BYTES = 8 << 20
"""Of groups that were read: as many as are sent to one peer at once, each as large as may be."""
HELD_ROUNDS = 1024
"""Of this node's: those of one that only samples are much shorter than those of who takes its groups a few later."""

logger = logging.getLogger(__name__)

_ROUND = re.compile(r"0|[1-9][0-9]{0,18}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(slots=True)
class _Held:
    round: int
    size_bytes: int


class GroupStore:
    """Groups by digest."""

    def __init__(self, folder: Path) -> None:
        """Take up what an earlier process of the node left. Raises StorageError if the folder cannot be used."""
        self._folder = folder
        self._round = 0
        self._held: OrderedDict[bytes, _Held] = OrderedDict()
        self._read_last: OrderedDict[bytes, bytes] = OrderedDict()
        self._memory_bytes = 0
        self.disk_bytes = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._take_up()
        except OSError as error:
            raise StorageError(
                f"cannot use the rollout folder {folder}: {error.strerror}; check its owner, or name another"
            ) from None

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._held

    def get(self, digest: bytes) -> bytes | None:
        """The bytes of a group, None if it is not held."""
        held = self._held.get(digest)
        if held is None:
            return None
        if digest in self._read_last:
            self._read_last.move_to_end(digest)
            return self._read_last[digest]
        data = self._read(digest, held)
        if data is None:
            self._drop(digest)
        else:
            self._remember(digest, data)
        return data

    def keep(self, digest: bytes, data: bytes) -> bool:
        """Hold a group, whose bytes the caller has checked, from this round on; False where no disk takes it."""
        if digest not in self._held:
            if not self._write(digest, data):
                return False
            self._note(digest, _Held(round=self._round, size_bytes=len(data)))
            self._make_room()
        return True

    @property
    def oldest(self) -> int:
        """The round since which groups are held."""
        return self._round - HELD_ROUNDS

    def advance(self, round_number: int) -> None:
        """This node's round is now `round_number`: drop what was held for longer than HELD_ROUNDS."""
        self._round = max(self._round, round_number)
        oldest = self.oldest
        for digest in [digest for digest, held in self._held.items() if held.round < oldest]:
            self._drop(digest)
        for folder in self._round_folders():
            if int(folder.name) < oldest:
                shutil.rmtree(folder, ignore_errors=True)

    def _remember(self, digest: bytes, data: bytes) -> None:
        self._read_last[digest] = data
        self._memory_bytes += len(data)
        while self._memory_bytes > MEMORY_LIMIT_BYTES:
            self._memory_bytes -= len(self._read_last.popitem(last=False)[1])

    def _note(self, digest: bytes, held: _Held) -> None:
        self._held[digest] = held
        self.disk_bytes += held.size_bytes

    def _drop(self, digest: bytes) -> None:
        held = self._held.pop(digest)
        self.disk_bytes -= held.size_bytes
        self._memory_bytes -= len(self._read_last.pop(digest, b""))
        _remove(self._path(digest, held.round))

    def _make_room(self) -> None:
        while len(self._held) > GROUP_LIMIT or self.disk_bytes > DISK_LIMIT_BYTES:
            self._drop(next(iter(self._held)))

    # -- disk ------------------------------------------------------------------------------------------------

    def _path(self, digest: bytes, round_number: int) -> Path:
        return self._folder / str(round_number) / digest.hex()

    def _round_folders(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        found = [path for path in self._folder.iterdir() if _ROUND.fullmatch(path.name) and path.is_dir()]
        return sorted(found, key=lambda path: int(path.name))

    def _take_up(self) -> None:
        """Index what is there by name, oldest first; contents are checked when they are read."""
        foreign = sum(1 for path in self._folder.iterdir() if not (_ROUND.fullmatch(path.name) and path.is_dir()))
        for round_folder in self._round_folders():
            for path in sorted(round_folder.iterdir()):
                size_bytes = path.stat().st_size if path.is_file() and not path.is_symlink() else 0
                if not (_DIGEST.fullmatch(path.name) and 0 < size_bytes <= GROUP_LIMIT_BYTES):
                    foreign += 1
                    continue
                digest = bytes.fromhex(path.name)
                if digest in self._held:
                    path.unlink()
                    continue
                self._note(digest, _Held(round=int(round_folder.name), size_bytes=size_bytes))
            self._round = max(self._round, int(round_folder.name))
        if foreign:
            logger.warning("%d files in %s are no groups and are ignored", foreign, self._folder)
        self._make_room()

    def _read(self, digest: bytes, held: _Held) -> bytes | None:
        path = self._path(digest, held.round)
        try:
            with open(path, "rb") as file:
                data = file.read(GROUP_LIMIT_BYTES + 1)
        except OSError as error:
            logger.warning("the group in %s cannot be read and is ignored: %s", path, error.strerror)
            return None
        if digest_of(data) != digest:
            logger.warning("the group in %s is damaged and is ignored", path)
            return None
        return data

    def _write(self, digest: bytes, data: bytes) -> bool:
        """Write a group; return whether it is on disk now, whole."""
        path = self._path(digest, self._round)
        temporary = path.with_name(f".{path.name}")
        try:
            path.parent.mkdir(exist_ok=True)
            temporary.write_bytes(data)
            os.replace(temporary, path)
        except OSError as error:
            _remove(temporary)
            logger.warning("the group in %s is not held: %s", path, error.strerror)
            return False
        return True


def _remove(path: Path) -> None:
    """Remove a file. One that stays is taken up by the next process, or written over."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("the file %s stays: %s", path, error.strerror)
