"""Waiting outside: who trains in a swarm of named voters, and has no seat, follows until the chain calls it.

    [membership] waiting = "outside"
    enlist    who follows and trains signs that it wants a seat; whom it waits at passes that on, up to the voters
    value     has the enlistments that the lead holds: these stand in the line (seats.py) from that entry on
    line      the voters that are members, and the enlisted; who was counted, and has no vote, is out of it
    near      the first of the enlisted, NEAR_ROUNDS times as many as the seats, sign again: so it is known who lives
    called    of those near who signed lately those who come to the seats of the next two rounds: they link who takes
              part, and do so
    seats     the first of the line among those who are ready, as ever

So the chain alone says who takes part in a round: the voters, and who is called after the value before it. Whoever was
counted follows again, and enlists anew. Who is called, and no member, for CALLED_VALUES values is gone, and out of the
line; so is who was near for PASSED_VALUES values, and signed nothing for FRESH_VALUES, but if it lives it comes back to
where it stood. Nobody gets in front of who waits; so who is there in time waits as long as seats.py says, of as many as
stand in the line.

What a lead can do is to forget an enlistment. Each voter holds those that it heard, and refuses a value that leaves one
out which it has held for HELD_ROUNDS rounds, or for so many more than another that takes its place where there are too
many for one value. So it refuses who passes a member over: for as many views as a minority can lead, and one. What
others can do is to send enlistments of keys that they made up: nobody is heard that the swarm does not admit, who
brings them fills a small part of the book, and a value takes ENLISTED_LIMIT.

Sans-IO. Source: a queue that all replicas work out from the log, as for the reservations of Lamport, "Time, Clocks and
the Ordering of Events in a Distributed System" (CACM 1978).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from types import MappingProxyType
from typing import Final

import msgspec

from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import Identity, PeerId, verify
from shoal.protocol.messages import ENLIST_DOMAIN, ENLISTED_LIMIT, MEMBER_LIMIT, Enlisted, Value
from shoal.protocol.seats import Line, counted_in, longest_wait

ROUNDS_CALLED: Final = 2
"""Rounds for whose seats a value calls: who is called has one round in which to link who takes part."""
CALLED_VALUES: Final = 4
"""Values after which one who is called, and is no member, is out of the line."""
CALLED_LIMIT: Final = 2 * MEMBER_LIMIT
"""Those who are called at once, with the ones that do not come."""
NEAR_ROUNDS: Final = 5
"""Times the seats: so many of the enlisted sign again. Where one in twenty dies in a round, more than half of these are
gone, and a few rounds pass until that is known."""
FRESH_VALUES: Final = 6
"""Who stands in the line is called as long as its enlistment stands on one of the last so many values."""
RENEWED_VALUES: Final = 3
"""Who is near signs again on a value so many after that of its enlistment: the new one counts before the old ends."""
PASSED_VALUES: Final = 4
"""Values by which who is near has to have signed again: one to hear of it, and three for it to get into a value."""
HELD_ROUNDS: Final = 2
"""A voter refuses a value without an enlistment that it has held for so many rounds, or for so many more than another's
that is in a full one."""
LINE_LIMIT: Final = 8192
"""Who stands in the line, or may come back to its place: beyond so many nobody gets into it, until others are counted
or gone. It is put in order with each value, which takes some 3 µs for each."""
VALID_VALUES: Final = 64
"""An enlistment stands on one of the last so many values: an old one is not to be told again for ever."""
MayEnlist = Callable[[PeerId, bytes], bool]
"""True if a peer that signed on the value of this hash may get into the line."""
BOOK_LIMIT: Final = 1024
"""Enlistments that a node holds, one of each peer; the rest come again at the next head."""
BROUGHT_LIMIT: Final = 64
"""Of these, brought by one who is no voter: room for all followers of a node."""


def enlist(identity: Identity, head: Value) -> Enlisted:
    """Sign that this node, whose chain ends with `head`, wants a seat."""
    return Enlisted(identity.peer_id, head.hash, identity.sign(ENLIST_DOMAIN, head.hash))


@lru_cache(maxsize=4 * BOOK_LIMIT)
def is_signed(one: Enlisted) -> bool:
    """Check that the peer signed its enlistment."""
    return verify(one.peer, ENLIST_DOMAIN, one.since, one.signature)


def enlisted_in(value: Value) -> tuple[Enlisted, ...]:
    """The enlistments that a value has."""
    return () if isinstance(value.enlisted, msgspec.UnsetType) else value.enlisted


class OutsideLine(Line):
    """The line where who has no seat waits outside. voters: of the round after the newest entry."""

    def __init__(self, members: Iterable[PeerId], seats: int) -> None:
        super().__init__(members)
        self._seats = seats
        self.voters: frozenset[PeerId] = frozenset(self._since)
        self._out: dict[PeerId, int] = {}
        self._stood: dict[PeerId, int] = {}  # where, of those that are out because they signed nothing
        self._called: dict[PeerId, int] = {}
        self._near: dict[PeerId, int] = {}
        self._signed: dict[PeerId, int] = {}
        self._counted: dict[PeerId, int] = {}

    def follow(
        self,
        value: Value,
        height: int,
        voters: Collection[PeerId] = (),
        signed: Mapping[PeerId, int] = MappingProxyType({}),
    ) -> None:
        """`value` is appended to the chain as its entry number `height`; these vote after it.

        signed: by whom it has enlistments, after how many entries each of them was signed.
        """
        now, members = set(counted_in(value)), set(value.members)
        self.voters = frozenset(voters)
        self._signed |= signed
        late = {p for p, at in self._called.items() if height - at >= CALLED_VALUES and p not in members}
        silent = {p for p, at in self._near.items() if height - at >= PASSED_VALUES and not self._is_fresh(p, height)}
        gone = {p for p in self._since if p in now | late | silent and p not in self.voters}
        since = {p: at for p, at in self._since.items() if p not in gone and p not in self.voters}
        since |= {p: height if p in now else self._since.get(p, height) for p in members & self.voters}
        since |= {p: self._stood.get(p, height) for p in signed if p not in self.voters and p not in since}
        self._stood |= {p: self._since[p] for p in silent & gone}
        self._since, self._ordered = since, None
        self._signed = {p: at for p, at in self._signed.items() if p in since}
        self._counted = {p: height if p in now else at for p, at in {**self._counted, **dict.fromkeys(now, 0)}.items()}
        self._counted = {p: at for p, at in self._counted.items() if p in self.voters}
        self._out = {p: at for p, at in self._out.items() if height - at <= VALID_VALUES} | dict.fromkeys(gone, height)
        self._stood = {p: at for p, at in self._stood.items() if p in self._out and p not in since}
        line = self.after(value)
        called = self._front(line, members, height)
        self._called = {p: height if p in members else self._called.get(p, height) for p in called}
        waiting = (p for p in line if p not in self.voters and p not in self._called)
        self._near = {p: self._near.get(p, height) for p in islice(waiting, NEAR_ROUNDS * self._seats)}

    def _is_fresh(self, peer: PeerId, height: int) -> bool:
        return height - self._signed.get(peer, 0) <= FRESH_VALUES

    @property
    def admitted(self) -> frozenset[PeerId]:
        """All that take part in the round after the newest entry."""
        return self.voters.union(self._called)

    def admits(self, peer: PeerId) -> bool:
        """True if a peer takes part in it."""
        return peer in self.voters or peer in self._called

    @property
    def called(self) -> frozenset[PeerId]:
        """The enlisted that take part in the round after the newest entry."""
        return frozenset(self._called)

    def _front(self, line: Sequence[PeerId], members: Set[PeerId], height: int) -> Iterator[PeerId]:
        """The enlisted that are called: who was, and of the first of the line as many as the next rounds have room for.

        Who was called stays so, whatever its place among those who came with it. No place is taken by voters of whom
        no round counted anything lately, nor by who was called and is no member yet: else who is gone kept all others
        out.
        """
        lately = max(1, height - longest_wait(len(line), self._seats))
        called = (self._called.keys() & self._since.keys()) - self.voters
        here = len(called & members)
        places = ROUNDS_CALLED * self._seats - here
        room = min(MEMBER_LIMIT - here, CALLED_LIMIT - len(called)) - len(self.voters)
        for peer in sorted(line, key=lambda peer: peer not in called):
            if peer in called:
                yield peer
            elif places <= 0 or room <= 0:
                return
            elif peer in self.voters:
                places -= self._counted.get(peer, 0) >= lately
            elif self._is_fresh(peer, height):
                yield peer
                places -= 1
                room -= 1

    def may_enlist(self, peer: PeerId, stands_on: int) -> bool:
        """True if a peer that signed after so many entries can get into the line, or is near and to sign again."""
        if peer in self.voters:
            return False
        if peer in self._since:
            return peer in self._near and stands_on - self._signed.get(peer, 0) >= RENEWED_VALUES
        has_place = peer in self._stood or len(self._since) + len(self._stood) < LINE_LIMIT
        return stands_on >= self._out.get(peer, 0) and has_place


class Enlistments:
    """The enlistments that one node holds: to pass on, to put into a value, and to miss in another's."""

    def __init__(self) -> None:
        self._held: dict[PeerId, tuple[Enlisted, int]] = {}
        self._brought: dict[PeerId, PeerId] = {}  # who brought those that no voter did

    def __len__(self) -> int:
        return len(self._held)

    def take(self, one: Enlisted, height: int, may_enlist: MayEnlist, *, by: PeerId | None = None) -> bool:
        """Hold an enlistment that was heard while the chain had so many entries.

        by: who brought it, if that is no voter. Returns False if it is no news, or more than there is room for.
        """
        known = self._held.get(one.peer)
        if known is not None and may_enlist(one.peer, known[0].since):
            return False
        if known is None and len(self._held) >= BOOK_LIMIT:
            self.keep(may_enlist)
        if not may_enlist(one.peer, one.since) or (known is None and len(self._held) >= BOOK_LIMIT):
            return False
        if by is not None and list(self._brought.values()).count(by) >= BROUGHT_LIMIT:
            self.keep(may_enlist)
            if list(self._brought.values()).count(by) >= BROUGHT_LIMIT:
                return False
        self._held[one.peer] = one, height
        self._brought.pop(one.peer, None)
        if by is not None:
            self._brought[one.peer] = by
        return True

    def keep(self, may_enlist: MayEnlist) -> None:
        """Forget those that are in the line, or too old."""
        self._held = {peer: (one, at) for peer, (one, at) in self._held.items() if may_enlist(one.peer, one.since)}
        self._brought = {peer: by for peer, by in self._brought.items() if peer in self._held}

    def due(self, may_enlist: MayEnlist) -> tuple[Enlisted, ...]:
        """The enlistments of the next value, of those held longest, in the order of their peers."""
        waiting = sorted((at, peer) for peer, (one, at) in self._held.items() if may_enlist(one.peer, one.since))
        return tuple(self._held[peer][0] for peer in sorted(peer for _, peer in waiting[:ENLISTED_LIMIT]))

    def forgotten(self, value: Value, height: int, may_enlist: MayEnlist) -> frozenset[PeerId]:
        """Those whose enlistments a value of a chain of so many entries should have, and leaves out.

        A value that is full should have none instead that was heard of HELD_ROUNDS rounds later, or never.
        """
        there = {one.peer for one in enlisted_in(value)}
        newest = height
        if len(there) >= ENLISTED_LIMIT:
            newest = max(self._held[peer][1] if peer in self._held else height for peer in there)
        held = (one for one, at in self._held.values() if newest - at >= HELD_ROUNDS and one.peer not in there)
        return frozenset(one.peer for one in held if may_enlist(one.peer, one.since))


def check_enlisted(value: Value, may_enlist: MayEnlist) -> None:
    """Raises RemoteError if a value takes somebody into the line that did not ask, or may not, or in another order."""
    found = enlisted_in(value)
    peers = [one.peer for one in found]
    if (value.rollback and found) or peers != sorted(set(peers)):
        raise RemoteError(f"the value of round {value.round} has enlistments out of place")
    for one in found:
        if not may_enlist(one.peer, one.since) or not is_signed(one):
            raise RemoteError(f"the value of round {value.round} takes {one.peer} into the line, which cannot be")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """Waiting outside, in one round. admitted: who takes part in it. height: entries of the chain before it.

    may_join: whether this swarm admits somebody, as far as this node knows: an invite may have been revoked since.
    """

    admitted: frozenset[PeerId]
    height: int
    may_enlist: MayEnlist
    book: Enlistments
    may_join: Callable[[PeerId], bool]

    def forgotten(self, value: Value) -> frozenset[PeerId]:
        """Those that a value has to take into the line, as far as this node knows, and does not."""
        return self.book.forgotten(value, self.height, self._is_welcome)

    def due(self) -> tuple[Enlisted, ...] | msgspec.UnsetType:
        """Wishes for seats that a value of this node names."""
        return self.book.due(self._is_welcome) or msgspec.UNSET

    def _is_welcome(self, peer: PeerId, since: bytes) -> bool:
        return self.may_join(peer) and self.may_enlist(peer, since)
