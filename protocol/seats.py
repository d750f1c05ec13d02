"""Seats: who contributes to a round that has no room for all who train, and who comes next.

    [membership] seats    so many contribute to a round at most; MEMBER_LIMIT or more leave nobody out
    line                  the members, who waits longest first
    a plan                counts the first of the line among those who are ready
    a value               names whom it counted, who go to the end of the line; so do those who become members by it

A member waits since the value that counted it last, or by which it became a member. Those of one value stand in the
order of BLAKE3(swarm, term, round, PeerId), other in every round. So the line after a value follows from the chain,
which everyone has, and is no one's choice. Who has no seat waits for it: it trains, takes part with weight zero, holds
the state and votes where it has a vote; what it learnt is carried on, and weighs by what is left of it to do.

Why nobody waits for long: nobody gets in front of who waits, and a round takes its seats from the front, of those who
are ready. So who is ready in every round is counted in one of the next members ÷ seats. Two more are for the round by
which it becomes a member, and for a lead that did not hear it.

What a lead can do: pass somebody over, as if it had not heard. Each voter notes whom a plan passes over though it holds
the announcement, or the lead had to wait for it, and refuses what comes of a plan that does so to one who was passed
over in the round before (`PassedOver`). Whom a value says it counted each voter has worked out itself, like the digest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import msgspec

from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import MEMBER_LIMIT, Plan, Term, Value, domain_hash

MORE_ROUNDS = 2
"""Beyond the members by the seats, as said above."""


def longest_wait(members: int, seats: int) -> int:
    """Return for how many rounds a member that is ready in each of them may have no seat."""
    return -(-members // seats) + MORE_ROUNDS


def are_few(seats: int) -> bool:
    """True if members can be more than the seats, so that values name whom they counted."""
    return seats < MEMBER_LIMIT


def rounds_to_turn(line: Sequence[PeerId], peer: PeerId, seats: int) -> int | None:
    """Return the number of rounds after the one under way in which `peer` has a seat, if all before it are ready.

    None for who is no member.
    """
    return line.index(peer) // seats if peer in line else None


def turn_text(rounds: int) -> str:
    """`has a seat in this round`, or `waits for its seat, about 2 rounds`; `rounds` as in `rounds_to_turn`."""
    return f"waits for its seat, about {rounds} round{'s' * (rounds > 1)}" if rounds else "has a seat in this round"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinePlace:
    """Place of one who waits outside in the line of so many, 1 for the first; None while it is not in it."""

    place: int | None
    of: int

    @staticmethod
    def in_line(line: Sequence[PeerId], peer: PeerId) -> LinePlace:
        """The place of `peer`."""
        return LinePlace(place=line.index(peer) + 1 if peer in line else None, of=len(line))

    def __str__(self) -> str:
        if self.place is None:
            return f"outside, asks for a seat: {self.of} are in the line"
        return f"outside, waits for a seat: place {self.place} of {self.of}"


@dataclass(frozen=True)
class Seating:
    """The seats of one round, and the line of its members."""

    seats: int = MEMBER_LIMIT
    line: tuple[PeerId, ...] = ()

    @cached_property
    def _places(self) -> dict[PeerId, int]:
        return {peer: place for place, peer in enumerate(self.line)}

    def first(self, peers: Collection[PeerId]) -> frozenset[PeerId]:
        """Those of `peers` who have the seats; members before others."""
        if len(peers) <= self.seats:
            return frozenset(peers)
        last = len(self.line)
        return frozenset(sorted(peers, key=lambda peer: (self._places.get(peer, last), peer))[: self.seats])

    def passed_over(self, plan: Plan, ready: Iterable[PeerId]) -> frozenset[PeerId]:
        """Members among the `ready` that `plan` does not count, though it counts who comes later or has a seat free."""
        counted = [plan.participants[place].peer for place in plan.contributors()]
        last = len(self.line)
        until = max(self._places.get(peer, last) for peer in counted) if len(counted) >= self.seats else last
        return frozenset(peer for peer in ready if peer not in counted and self._places.get(peer, last) < until)


def first_by_group(peers: Iterable[PeerId], groups: Sequence[Collection[PeerId]], most: int) -> list[PeerId]:
    """Return no more than `most` of the peers: who is in the first group comes before all others, and so on."""
    return sorted(peers, key=lambda peer: (*(peer not in group for group in groups), peer))[:most]


class Line:
    """Members that wait: by member, the number of the chain's entry that counted it last or made it one."""

    def __init__(self, members: Iterable[PeerId]) -> None:
        self._since = dict.fromkeys(members, 0)
        self._ordered: tuple[bytes, tuple[PeerId, ...]] | None = None  # after which value

    def follow(
        self,
        value: Value,
        height: int,
        voters: Collection[PeerId] = (),
        signed: Mapping[PeerId, int] = MappingProxyType({}),
    ) -> None:
        """`value` is appended to the chain as its entry number `height`; `voters` vote after it, where named."""
        del voters, signed
        now = counted_in(value)
        self._since = {p: height if p in now else self._since.get(p, height) for p in value.members}
        self._ordered = None

    def after(self, head: Value) -> tuple[PeerId, ...]:
        """The line in the round after `head`, which is the value that came last; put in order once for each."""
        if self._ordered is None or self._ordered[0] != head.hash:
            self._ordered = head.hash, self._in_order(head)
        return self._ordered[1]

    def _in_order(self, head: Value) -> tuple[PeerId, ...]:
        rebases, rollbacks, round = head.next_term.rebases, head.next_term.rollbacks, head.next_round
        position = b"".join(number.to_bytes(8, "little") for number in (rebases, rollbacks, round))

        def place(peer: PeerId) -> tuple[int, bytes]:
            return self._since[peer], domain_hash("seat", head.swarm, position, peer.encode())

        return tuple(sorted(self._since, key=place))


class PassedOver:
    """Members that plans passed over, as one node saw it; one object for all its rounds."""

    def __init__(self) -> None:
        self._term: Term | None = None
        self._by_round: dict[int, frozenset[PeerId]] = {}

    def note(self, previous: Value, peers: frozenset[PeerId]) -> bool:
        """The newest plan of the round after `previous` passes over these; True if the round before did so to one."""
        if previous.next_term != self._term:
            self._term, self._by_round = previous.next_term, {}
        round = previous.next_round
        before = self._by_round.get(round - 1, frozenset())
        self._by_round = {round - 1: before, round: peers}
        return not before.isdisjoint(peers)


# -- what a value says ---------------------------------------------------------------------------------------


def counted_in(value: Value) -> tuple[PeerId, ...]:
    """Peers that `value` says it counted; nobody where seats are for all."""
    return () if isinstance(value.counted, msgspec.UnsetType) else value.counted


def may_count(value: Value, seats: int) -> bool:
    """Check that a result names whom it counted where seats are few, in one form, and nothing else does."""
    if not are_few(seats) or value.rollback:
        return isinstance(value.counted, msgspec.UnsetType)
    named = counted_in(value)
    return 0 < len(named) <= seats and list(named) == sorted(set(named))


def check_counted(value: Value, seats: int) -> None:
    """Raises RemoteError if `value` does not say in its one form whom it counted."""
    if not may_count(value, seats):
        raise RemoteError(f"the value of round {value.round} does not say whom its seats were for")
