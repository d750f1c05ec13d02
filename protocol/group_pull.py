"""The pull of one group of rollouts: of whom, from which byte on, and when that is given up.

    next() ─► Ask ──── answered(chunk) ───► Ask of the same server, from where its chunk ended
               │                        ├─► Came: whole, and its hash is right
               │                        ├─► the next server: it does not hold the group, or is busy
               │                        └─► Wait: it is busy in the middle of the group
               └────── failed() ──────────► the next server
      nobody is left ─► Wait, and everybody again, if somebody was busy; else GivenUp

Sans-IO; `shoal.swarm.rollouts` carries it out. What was received counts against the budget of the fetch, whatever
becomes of it, and a server is asked only if the budget has room for all of the group. Where what comes is no group of
the announced size, it is asked for up to its end, or GROUP_LIMIT_BYTES: the right hash proves that the size was a lie.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NoReturn

from shoal.protocol.errors import LocalError
from shoal.protocol.identity import PeerId
from shoal.protocol.offer_book import Offer
from shoal.protocol.rollouts import (
    CHUNK_LIMIT_BYTES,
    GROUP_LIMIT_BYTES,
    GroupChunk,
    GroupRequest,
    Reason,
    RolloutError,
    digest_of,
)

BUSY_LIMIT = 25
"""Times that busy servers of one group are asked again."""


@dataclass(slots=True)
class Budget:
    """Bytes that one fetch may still receive."""

    left_bytes: int

    def take(self, size_bytes: int) -> bool:
        """Take so much if there is room for it; return whether there was."""
        if size_bytes > self.left_bytes:
            return False
        self.left_bytes -= size_bytes
        return True


@dataclass(slots=True)
class Tally:
    """Bytes of groups that a node received."""

    fetched_bytes: int = 0


class LeftAlone:
    """Servers that failed, and until when they are not asked, unless they are started again before."""

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._until: dict[PeerId, tuple[float, int]] = {}

    def pass_over(self, peer: PeerId, now: float, boot: int = -1) -> None:
        """This server failed. boot: its newest start that was heard of; less than zero if none was."""
        self._until[peer] = now + self._pause_s, boot

    def heard(self, peer: PeerId, boot: int) -> None:
        """This peer said something, since its start of that number."""
        if peer in self._until and boot > self._until[peer][1]:
            del self._until[peer]

    def at(self, now: float) -> Collection[PeerId]:
        """All that are not asked now."""
        self._until = {peer: left for peer, left in self._until.items() if left[0] > now}
        return self._until.keys()

    def allowed(self, peers: Collection[PeerId], now: float) -> list[PeerId]:
        """Those of these that may be asked, in the same order."""
        left = self.at(now)
        return [peer for peer in peers if peer not in left]


@dataclass(frozen=True, slots=True)
class Ask:
    """Send `request` to `peer`, and take no answer after the time `until`."""

    peer: PeerId
    request: GroupRequest
    until: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Go on a little later: who was asked is busy."""


@dataclass(frozen=True, slots=True)
class Came:
    """The group is here."""

    data: bytes


@dataclass(frozen=True, slots=True)
class GivenUp:
    """It will not come: nobody who was asked has it, or, if `spent`, the budget is."""

    spent: bool


Step = Ask | Wait | Came | GivenUp


class GroupPull:
    """One group's way here. servers: who may have it at a time, the best first. deadline_s: for one of them."""

    def __init__(
        self,
        offer: Offer,
        *,
        servers: Callable[[float], Sequence[PeerId]],
        deadline_s: float,
        budget: Budget,
        tally: Tally,
    ) -> None:
        self._offer = offer
        self._servers = servers
        self._deadline_s = deadline_s
        self._budget = budget
        self._tally = tally
        self._queue: deque[PeerId] = deque()
        self._passes = 0
        self._again = True
        self._any_busy = False
        self._peer: PeerId | None = None
        self._until = 0.0
        self._data = bytearray()
        self._waits = False
        self._end: Came | GivenUp | None = None

    @property
    def size_bytes(self) -> int:
        """Of the group, as it was announced."""
        return self._offer.announcement.size_bytes

    def next(self, now: float) -> Step:
        """Return what to do now."""
        while self._end is None:
            if self._waits:
                self._waits = False
                return Wait()
            if self._peer is not None:
                return Ask(self._peer, GroupRequest(digest=self._offer.digest, offset=len(self._data)), self._until)
            if self._queue:
                self._turn_to(self._queue.popleft(), now)
            elif self._any_busy:  # everybody was asked
                self._any_busy, self._again = False, self._passes < BUSY_LIMIT
                return Wait()
            elif self._again:
                self._again = False
                self._passes += 1
                self._queue.extend(self._servers(now))
            else:
                self._end = GivenUp(spent=False)
        return self._end

    def _turn_to(self, peer: PeerId, now: float) -> None:
        if peer not in self._servers(now):  # it failed meanwhile, asked for another group
            return
        if not self._budget.take(self.size_bytes):
            self._end = GivenUp(spent=True)
            return
        self._peer, self._until = peer, now + self._deadline_s

    def answered(self, chunk: GroupChunk) -> None:
        """The server that was asked answered. Raises RolloutError for wrong bytes; `failed` is to follow.

        The origin is to blame where it serves what it did not announce, and where another has all of the group and it
        is of another size than announced, which ends the pull. Else nobody is: the size may be the lie.
        """
        if self._peer is None:
            raise LocalError("an answer to a question that nobody was asked")
        peer = self._peer if self._peer == self._offer.origin else None
        if chunk.status == "absent":
            self._take_end(peer)
        elif chunk.status == "busy":
            self._busy()
        else:
            self._take(chunk.data, peer)

    def _busy(self) -> None:
        if self._data:
            self._waits = True
            return
        self._any_busy = True
        self._release()

    def _take(self, data: bytes, peer: PeerId | None) -> None:
        wanted_bytes = min(CHUNK_LIMIT_BYTES, self.size_bytes - len(self._data))
        self._data += data
        fits = len(data) == wanted_bytes
        if fits and len(self._data) < self.size_bytes:
            return
        whole = bytes(self._data)
        if digest_of(whole) == self._offer.digest:
            if not fits:
                self._prove_false_size()
            self._end = Came(whole)
            self._release()
        elif len(data) < CHUNK_LIMIT_BYTES or len(whole) >= GROUP_LIMIT_BYTES:  # else more may show that the size lies
            self._refuse(fits, peer)

    def _take_end(self, peer: PeerId | None) -> None:
        """There is no more: it ends before it was to, or where a chunk did."""
        if self._data and digest_of(bytes(self._data)) == self._offer.digest:
            self._prove_false_size()
        if len(self._data) >= self.size_bytes:
            self._refuse(len(self._data) == self.size_bytes, peer)
        self.failed()

    def _prove_false_size(self) -> NoReturn:
        self._end = GivenUp(spent=False)
        origin = self._offer.origin
        raise RolloutError("a group of another size than announced", reason=Reason.MISLABELLED, peer=origin)

    def _refuse(self, fits: bool, peer: PeerId | None) -> NoReturn:
        if fits:
            raise RolloutError("other bytes than the group's", reason=Reason.FORGED, peer=peer)
        raise RolloutError("a chunk of another size than the group's", reason=Reason.MALFORMED, peer=peer)

    def failed(self) -> None:
        """The group does not come from the server that was asked."""
        self._release()

    def close(self) -> None:
        """Nobody waits for the group any more."""
        if self._peer is not None:
            self._release()

    def _release(self) -> None:
        """The server that was asked is done with: what it sent counts, the rest of the budget is free again."""
        came = len(self._data)
        self._tally.fetched_bytes += came
        self._budget.left_bytes += self.size_bytes - came
        self._peer = None
        self._data = bytearray()
