"""The evidence that a node holds: every piece verified, on disk in `evidence/`, one file by its digest.

Bounded: PIECES_LIMIT and BYTES_LIMIT in all, PIECES_PER_PEER_LIMIT against one peer. One piece proves as much as many,
so more against the same peer is of use only for what it does after its ban has ended. Keys that never were a member's
cost nothing, nor does having them lie: evidence against them has a small share of the room, and the newest is kept.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from shoal.collectives.proofs import verify_evidence
from shoal.node.state.store import disk_errors, write_atomically
from shoal.protocol.bans import Moment
from shoal.protocol.errors import RemoteError
from shoal.protocol.evidence import EVIDENCE_LIMIT_BYTES, Verdict, digest_of
from shoal.protocol.folders import make_folder
from shoal.protocol.identity import PeerId

FOLDER = "evidence"
PIECES_LIMIT = 256
PIECES_PER_PEER_LIMIT = 4
BYTES_LIMIT = 1 << 30
STRANGERS_PIECES_LIMIT = 32
STRANGERS_BYTES_LIMIT = EVIDENCE_LIMIT_BYTES
"""Against all who come last: the largest piece fits."""

logger = logging.getLogger(__name__)


class EvidenceStore:
    """The folder of one node in a swarm. Its methods block; safe in any number of threads.

    first: against whom evidence is kept before that against others, who have the strangers' share of the room.
    """

    def __init__(self, folder: Path, swarm: bytes, *, first: Callable[[PeerId], bool] = lambda peer: True) -> None:
        self._first = first
        self._folder = folder / FOLDER
        self._swarm = swarm
        self._lock = threading.Lock()
        self._verdicts: dict[bytes, Verdict] = {}
        self._sizes: dict[bytes, int] = {}

    def load(self) -> None:
        """Take up what is on disk; what does not hold is removed. Raises StorageError."""
        with disk_errors(self._folder):
            for path in sorted(self._folder.glob("*")) if self._folder.is_dir() else ():
                held = path.stat().st_size <= EVIDENCE_LIMIT_BYTES and self._take(path.read_bytes(), path.name)
                if not held:
                    logger.warning("%s proves nothing and is removed", path)
                    path.unlink()

    def _take(self, data: bytes, name: str) -> bool:
        try:
            verdict = verify_evidence(data, self._swarm)
        except RemoteError:
            return False
        if verdict.digest.hex() != name:
            return False
        self._verdicts[verdict.digest], self._sizes[verdict.digest] = verdict, len(data)
        return True

    def put(self, data: bytes, *, named: bool = False) -> Verdict | None:
        """Verify a piece of evidence and keep it. None if it is here already, or as much against the same peer is.

        named: a value names this very piece, and who votes for it must be able to show it.

        Raises RemoteError if it proves nothing, StorageError.
        """
        if digest_of(data) in self._verdicts:
            return None
        verdict = verify_evidence(data, self._swarm)
        with self._lock:
            if verdict.digest in self._verdicts or not self._has_room(verdict, len(data), named=named):
                return None
            with disk_errors(self._folder):
                make_folder(self._folder)
                write_atomically(self._path(verdict.digest), data)
            self._verdicts[verdict.digest], self._sizes[verdict.digest] = verdict, len(data)
        return verdict

    def _has_room(self, verdict: Verdict, size: int, *, named: bool) -> bool:
        against = sorted(
            (one for one in self._verdicts.values() if one.accused == verdict.accused), key=lambda one: one.done
        )
        if not named and any(one.done == verdict.done for one in against):
            return False  # it would be a second proof of what was done in that round
        while len(against) >= PIECES_PER_PEER_LIMIT:
            self._drop(against.pop(0))
        if not self._first(verdict.accused) and not self._has_strangers_room(verdict, size, named=named):
            return False
        while self._is_full(list(self._verdicts.values()), size, PIECES_LIMIT, BYTES_LIMIT):
            least = min(self._verdicts.values(), key=lambda one: (self._first(one.accused), one.done))
            if self._first(least.accused) and not self._first(verdict.accused):
                return False
            self._drop(least)
        return True

    def _has_strangers_room(self, verdict: Verdict, size: int, *, named: bool) -> bool:
        held = sorted((one for one in self._verdicts.values() if not self._first(one.accused)), key=_age)
        least = []
        while self._is_full(held, size, STRANGERS_PIECES_LIMIT, STRANGERS_BYTES_LIMIT):
            least.append(held.pop(0))
        if least and not named and _age(verdict) < _age(least[-1]):
            return False  # peers that tell each other of more than there is room for come to the same pieces
        for one in least:
            self._drop(one)
        return True

    def _is_full(self, held: list[Verdict], size: int, pieces_limit: int, bytes_limit: int) -> bool:
        """True if there is something to drop, and no room beside it for a piece of that size."""
        held_bytes = sum(self._sizes[one.digest] for one in held)
        return bool(held) and (len(held) >= pieces_limit or held_bytes + size > bytes_limit)

    def _drop(self, verdict: Verdict) -> None:
        del self._verdicts[verdict.digest], self._sizes[verdict.digest]
        with disk_errors(self._folder):
            self._path(verdict.digest).unlink(missing_ok=True)

    def _path(self, digest: bytes) -> Path:
        return self._folder / digest.hex()

    def part(self, digest: bytes, offset: int, limit: int) -> tuple[int, bytes] | None:
        """Read at most `limit` bytes of a piece, with its whole length; None if it is not here. Raises StorageError."""
        if digest not in self._verdicts:
            return None
        with disk_errors(self._folder):
            try:
                with self._path(digest).open("rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    file.seek(min(offset, size))
                    return size, file.read(limit)
            except FileNotFoundError:
                return None

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Verdicts that all of it proves."""
        return tuple(self._verdicts.values())

    def proves(self, digest: bytes) -> Verdict | None:
        """Verdict of the piece with that name; None if it is not here."""
        return self._verdicts.get(digest)

    def has(self, peer: PeerId, done: Moment) -> bool:
        """True if something here proves what that peer did in that round."""
        return any((one.accused, one.done) == (peer, done) for one in self._verdicts.values())


def _age(verdict: Verdict) -> tuple[Moment, bytes]:
    """Order of evidence in which the oldest is first."""
    return verdict.done, verdict.digest
