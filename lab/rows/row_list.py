"""The list of a row as one member knows it: who is on it, who is gone since, who comes next, and the tree it makes.

A list changes only when a round begins; so places on it name the same members to all who follow that round. Besides
each on it has a number, which nobody else in the row has before or after: newcomers get the next ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import msgspec

from shoal.lab.rows.row_messages import ROW_LIMIT, RowBegin
from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import domain_hash
from shoal.protocol.wire import canonical

FAN_OUT: Final = 4


def below(place: int, size: int) -> range:
    """The places right below one in the tree of a list of so many."""
    return range(min(FAN_OUT * place + 1, size), min(FAN_OUT * place + 1 + FAN_OUT, size))


@dataclass(frozen=True)
class Roster:
    """A list: peers in its order, each with its number, and the number that the next newcomer gets.

    Raises LocalError for one that cannot be.
    """

    row: tuple[PeerId, ...]
    numbers: tuple[int, ...]
    next_number: int
    _next: dict[tuple[tuple[PeerId, ...], tuple[PeerId, ...]], Roster] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not 0 < len(self.row) == len(self.numbers) == len(set(self.row)) <= ROW_LIMIT:
            raise LocalError("no list of a row")
        if any(one >= other for one, other in zip(self.numbers, (*self.numbers[1:], self.next_number), strict=True)):
            raise LocalError("numbers of a row out of order")

    @classmethod
    def dealt(cls, row: Iterable[PeerId]) -> Roster:
        """A row as the membership begins with."""
        peers = tuple(row)
        return cls(peers, tuple(range(len(peers))), len(peers))

    @cached_property
    def hash(self) -> bytes:
        """Hash that names it."""
        return domain_hash("row list", canonical([self.numbers, self.next_number]), *(p.encode() for p in self.row))

    @cached_property
    def places(self) -> dict[PeerId, int]:
        """Index of each member on the list."""
        return {peer: place for place, peer in enumerate(self.row)}

    def number(self, peer: PeerId) -> int:
        """Number of `peer`, which is on the list."""
        return self.numbers[self.places[peer]]

    def changed(self, gone: Iterable[PeerId], came: Iterable[PeerId]) -> Roster:
        """Make the next list without some, and with the newcomers that are not on it. Raises LocalError as above.

        The last answer is kept: a beginning comes more than once, and to all members that run in one process.
        """
        asked = tuple(gone), tuple(came)
        known = self._next.get(asked)
        if known is None:
            known = self._changed(*asked)
            self._next.clear()
            self._next[asked] = known
        return known

    def _changed(self, gone: tuple[PeerId, ...], came: tuple[PeerId, ...]) -> Roster:
        without = set(gone)
        fresh = [peer for peer in came if peer not in self.places]
        stay = [(peer, number) for peer, number in zip(self.row, self.numbers, strict=True) if peer not in without]
        stay += [(peer, self.next_number + at) for at, peer in enumerate(fresh)]
        return Roster(tuple(p for p, _ in stay), tuple(n for _, n in stay), self.next_number + len(fresh))


def whole(begin: RowBegin, signer: PeerId) -> Roster | None:
    """The list that a beginning has in full. Raises RemoteError if it is none, or another than it says."""
    if not begin.row:
        return None
    try:
        roster = Roster(begin.row, begin.numbers, begin.next_number)
    except LocalError as wrong:
        raise RemoteError("a list of a row that cannot be", peer=signer) from wrong
    if roster.hash != begin.list:
        raise RemoteError("another list of a row than it says", peer=signer)
    return roster


def in_full(begin: RowBegin, roster: Roster) -> RowBegin:
    """The same beginning, with its list."""
    return msgspec.structs.replace(begin, row=roster.row, numbers=roster.numbers, next_number=roster.next_number)


class RowList:
    """Knowledge of `me` about its row: the list of its round, and the changes to come."""

    def __init__(self, me: PeerId, roster: Roster) -> None:
        self._me = me
        self.roster = roster
        self.gone: dict[PeerId, None] = {}
        """Of the list, who was given up since."""
        self._came: dict[PeerId, None] = {}
        self._former: dict[PeerId, None] = {}

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self.roster.places

    def __len__(self) -> int:
        return len(self.roster.row)

    @property
    def row(self) -> tuple[PeerId, ...]:
        """Members on the list, in order."""
        return self.roster.row

    def place(self, peer: PeerId) -> int:
        """Index of `peer` on the list."""
        return self.roster.places[peer]

    def living(self) -> Iterator[PeerId]:
        """Members on the list that were not given up, in its order."""
        return (peer for peer in self.roster.row if peer not in self.gone)

    def knows(self, peer: PeerId) -> bool:
        """True if a peer is on the list, or was."""
        return peer in self.roster.places or peer in self._former

    def give_up(self, peers: Iterable[PeerId]) -> list[PeerId]:
        """Give up these peers. Returns those of the list that were not given up yet."""
        fresh = []
        for peer in peers:
            self._came.pop(peer, None)
            if peer in self.roster.places and peer not in self.gone and peer != self._me:
                self.gone[peer] = None
                self._remember(peer)
                fresh.append(peer)
        return fresh

    def come(self, peers: Iterable[PeerId]) -> None:
        """Newcomers, for the next list."""
        for peer in peers:
            if len(self._came) < ROW_LIMIT and (peer not in self.roster.places or peer in self.gone):
                self._came[peer] = None

    def next(self) -> tuple[Roster, tuple[PeerId, ...], tuple[PeerId, ...]]:
        """The list of the next round, who is gone from this one, and who comes."""
        gone = tuple(self.gone)
        room = ROW_LIMIT - len(self.roster.row) + len(gone)
        came = tuple(peer for peer in self._came if peer not in self.roster.places)[:room]
        return self.roster.changed(gone, came), gone, came

    def after(self, begin: RowBegin) -> Roster | None:
        """The list of the round that `begin` begins, if this one and what it says make it."""
        try:
            roster = self.roster.changed(begin.gone, begin.came)
        except LocalError:
            return None
        return roster if roster.hash == begin.list else None

    def become(self, roster: Roster, gone: Iterable[PeerId]) -> None:
        """Take another round's list. `gone` were on one that this member may have missed."""
        for peer in (*gone, *(peer for peer in self.roster.row if peer not in roster.places)):
            self._remember(peer)
        self.roster = roster
        self.gone = {peer: None for peer in self.gone if peer in roster.places}
        self._came = {peer: None for peer in self._came if peer not in roster.places}

    def _remember(self, peer: PeerId) -> None:
        """Remember a former member, to be answered should it come back."""
        self._former[peer] = None
        if len(self._former) > ROW_LIMIT:
            del self._former[next(iter(self._former))]
