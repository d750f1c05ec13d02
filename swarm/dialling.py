"""Dialling: a node dials by itself everybody it knows of and has no link with, or those whom it chose as neighbours.

Dials are made a few at once, and fewer where they are not done in time (`DialWindow`): a node that dials a whole swarm
that is starting, on machines that have much to do, would else have all handshakes under way and none done.

Of two that know each other the lower PeerId dials at once, the other only after DIAL_DEFERRAL_S. Who was not reached is
dialled again after a pause that doubles; who refuses this node, or has no place left for it, after the longest. Anybody
can fill the book of records with peers that are nowhere, so whoever comes first (`shoal.protocol.places`) is dialled
beside the others, and found addresses are kept for it before theirs.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import trio

from shoal.protocol.admission import Admission
from shoal.protocol.backoff import Backoff
from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.neighbours import Neighbours
from shoal.protocol.places import Rank
from shoal.protocol.records import RecordBook
from shoal.swarm.host import NotReached
from shoal.swarm.links import Links, NoPlaceLeft, Refused

DIAL_DEFERRAL_S = 2.0  # that the higher PeerId waits before it dials
DIAL_DEADLINE_S = 5.0
DIAL_PERIOD_S = 0.5
DIALS_AT_ONCE, DIALS_AT_ONCE_LIMIT = 4, 16
"""At first, and at most, of those who come first, and as many of all others."""
NEIGHBOURS_DIALLED_LIMIT = 2
"""Of the neighbours that a node lacks, dialled at once."""
DIAL_BACKOFF_S = 1.0
DIAL_BACKOFF_LIMIT_S = 30.0  # longest pause between dials
FOUND_LIMIT_PEERS = 1024  # peers whose addresses discovery found

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Dial:
    """Time from which a peer that is not linked may be dialled, and the pause after that.

    under_way: it is, or waits for its turn. tried: it had its turn.
    """

    at: float
    backoff: Backoff = field(default_factory=partial(Backoff, DIAL_BACKOFF_S, DIAL_BACKOFF_LIMIT_S))
    under_way: bool = False
    tried: bool = False


class DialWindow:
    """How many dials are under way at once: one more after as many that were done, half as many after one that was not
    done in time though somebody was there.

    Source: Jacobson, Karels, "Congestion avoidance and control" (SIGCOMM 1988).
    """

    def __init__(self) -> None:
        self._size = float(DIALS_AT_ONCE)
        self.places = trio.CapacityLimiter(DIALS_AT_ONCE)

    def done(self) -> None:
        """A link was made."""
        self._resize(self._size + 1 / self._size)

    def late(self) -> None:
        """Somebody was there, and no link was made in time."""
        self._resize(self._size / 2)

    def _resize(self, size: float) -> None:
        self._size = min(max(size, 1.0), DIALS_AT_ONCE_LIMIT)
        self.places.total_tokens = int(self._size)


class Dialling:
    """The dials of one node.

    never_heard: whether the failure detector knows nothing of a peer. start: runs a dial beside all else. shut_out: is
    told the addresses at which somebody was and did not let this node through. neighbours: chooses whom to dial, where
    that is not everybody. Where it is, who follows chooses whom it dials, and nobody dials it.
    """

    def __init__(
        self,
        *,
        me: PeerId,
        links: Links,
        book: RecordBook,
        admission: Admission,
        never_heard: Callable[[PeerId], bool],
        start: Callable[[Callable[[], Awaitable[None]]], None],
        shut_out: Callable[[Sequence[str]], None],
        neighbours: Callable[[], Neighbours | None] = lambda: None,
        follows: Callable[[PeerId], bool] = lambda peer: False,
    ) -> None:
        self._choosing, self._follows = neighbours, follows
        self._me, self._links, self._book, self._admission = me, links, book, admission
        self._never_heard, self._start, self._shut_out = never_heard, start, shut_out
        self._found: dict[PeerId, tuple[str, ...]] = {}  # the last one found last
        self._dials: dict[PeerId, _Dial] = {}
        self._looked_at = -math.inf
        self._windows = {first: DialWindow() for first in (True, False)}
        self.strangers: frozenset[PeerId] = frozenset()
        """Those not linked that have a record, were dialled, and were never heard: before its turn to be dialled nobody
        knows whether a peer is near."""

    def look(self, now: float) -> None:
        """Dial whoever is due, unless DIAL_PERIOD_S have not passed since this was done."""
        if now - self._looked_at >= DIAL_PERIOD_S:
            self._looked_at = now
            self._look(now)

    def known(self) -> set[PeerId]:
        """Everybody of whom there is a record, or who was found."""
        return {*(record.peer for record in self._book.records()), *self._found}

    def addresses_of(self, peer: PeerId) -> tuple[str, ...]:
        """Addresses of a peer: those that its record names, then those where discovery saw it."""
        record = self._book.get(peer)
        known = () if record is None else record.control_addresses
        return tuple(dict.fromkeys((*known, *self._found.get(peer, ()))))

    def found(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Discovery saw a peer at these addresses. Of too many, who does not come first and was found longest ago
        makes room."""
        if peer == self._me or self._admission.reason_not_to_know(peer) is not None:
            return
        self._found.pop(peer, None)
        self._found[peer] = tuple(addresses)
        if len(self._found) > FOUND_LIMIT_PEERS:
            first = self._admission.first()
            del self._found[next((one for one in self._found if one not in first), peer)]

    def forget(self, peer: PeerId) -> None:
        """A peer does not belong here: nothing is kept of where it was found."""
        self._found.pop(peer, None)

    def linked(self, peer: PeerId) -> None:
        """A link is up."""
        self._dials.pop(peer, None)

    def dial_now(self, peers: Iterable[PeerId]) -> None:
        """Dial these without delay, who comes first before the others; where not all are dialled, whom it chooses."""
        now, neighbours = trio.current_time(), self._choosing()
        if neighbours is not None:
            self._dial_neighbours(neighbours, now)
            return
        for peer in sorted(
            itertools.filterfalse(self._follows, set(peers)), key=lambda one: (-self._admission.rank(one), one)
        ):
            self._dials.setdefault(peer, _Dial(at=now))
            self._dial_when_due(peer, now)

    def begin_anew(self) -> None:
        """Dial all who are not linked without delay: what was tried in vain was from where this node is no more."""
        self._dials = {peer: dial for peer, dial in self._dials.items() if dial.under_way}
        for dial in self._dials.values():
            dial.backoff.reset()
        here = (peer for peer in self.known() - self._links.linked() - {self._me} if not self._is_leaving(peer))
        self.dial_now(here)

    def _is_leaving(self, peer: PeerId) -> bool:
        record = self._book.get(peer)
        return record is not None and record.phase == "leaving"

    def _look(self, now: float) -> None:
        self._book.expire(now)
        known = self.known()
        self._dials = {peer: dial for peer, dial in self._dials.items() if peer in known or dial.under_way}
        neighbours = self._choosing()
        if neighbours is not None:
            neighbours.keep(known)
            self._dial_neighbours(neighbours, now)
            return
        strangers = []
        for peer in known - self._links.linked() - self._links.resting() - {self._me}:
            if not (self._is_leaving(peer) or self._follows(peer)):
                self._dial_when_due(peer, now)
                if self._was_tried(peer) and self._book.get(peer) is not None and self._never_heard(peer):
                    strangers.append(peer)
        self.strangers = frozenset(strangers)

    def _was_tried(self, peer: PeerId) -> bool:
        dial = self._dials.get(peer)
        return dial is not None and dial.tried

    def _dial_neighbours(self, neighbours: Neighbours, now: float) -> None:
        """Dial whom this node chooses now, a few at a time: a link costs both ends some work."""
        under_way = {peer for peer, dial in self._dials.items() if dial.under_way}
        if len(under_way) >= NEIGHBOURS_DIALLED_LIMIT:
            return
        chosen = neighbours.choose(
            known={peer for peer in self.known() - {self._me} if self._is_here(neighbours, peer)},
            linked=self._links.linked(),
            dialled=under_way,
            may_dial=lambda peer: peer not in self._dials or now >= self._dials[peer].at,
            is_proven=lambda peer: self._admission.rank(peer) > Rank.STRANGER,
        )
        for peer in chosen[: NEIGHBOURS_DIALLED_LIMIT - len(under_way)]:
            self._dials.setdefault(peer, _Dial(at=now))
            self._dial_when_due(peer, now)

    def _is_here(self, neighbours: Neighbours, peer: PeerId) -> bool:
        is_silent = peer in self._links.resting()
        return not (self._is_leaving(peer) or is_silent or neighbours.is_gone(peer, self._book.order(peer)))

    def _dial_when_due(self, peer: PeerId, now: float) -> None:
        deferral = 0.0 if self._me < peer else DIAL_DEFERRAL_S
        dial = self._dials.setdefault(peer, _Dial(at=now + deferral))
        if now >= dial.at and not dial.under_way:
            dial.under_way = True
            self._start(partial(self._dial, peer, dial))

    async def _dial(self, peer: PeerId, dial: _Dial) -> None:
        window = self._windows[self._admission.rank(peer) is Rank.FIRST]
        try:
            async with window.places:
                dial.tried = True
                deadline_s = self._links.pace * DIAL_DEADLINE_S
                await self._links.meet(peer, self.addresses_of(peer), deadline_s=deadline_s)
                window.done()
        except Refused as error:
            logger.warning("%s", error)
            dial.backoff.exhaust()
        except NoPlaceLeft as error:
            logger.info("%s", error)
            dial.backoff.exhaust()
        except (NetworkError, RemoteError) as error:
            logger.debug("dialling: %s", error)
            if is_there(error):
                window.late()
            if not isinstance(error, NotReached) or error.silent:
                self._shut_out(self.addresses_of(peer))
        finally:
            dial.under_way = False
            dial.at = trio.current_time() + dial.backoff.next_s()


def is_there(error: NetworkError | RemoteError) -> bool:
    """True if a link was not made for want of time alone: somebody took the connection, or shook hands on it.

    That a machine has too much to do is no evidence of an end; whether the peer is there its silence will show.
    """
    return error.is_busy if isinstance(error, NotReached) else isinstance(error, NetworkError)
