"""Reach of a node: how it gets to its peers, in which order, and how soon again. One answer, for lanes and control.

    direct    one of the two dials the other
    punched   both dial at once, which lets each in at the other's router (`punching`)
    relayed   a third passes on what the two seal for each other (`circuits`, `relayed_lanes`)

What is tried next for a lane follows from what was tried in vain and from what is known of the two, `NEXT`:

    in vain    OPEN     CLOSED   LOWER    HIGHER     OPEN     this node can be dialled, as far as is known
    nothing    DIAL     DIAL     DIAL     DIAL       CLOSED   it cannot
    DIAL       ASK      RELAY    PUNCH    ASK        LOWER    neither of the two can, and no third is left;
    ASK        RELAY                                 HIGHER   by PeerId, since the lower begins with holes

Who was asked to dial asks for nothing in turn. For control the addresses of a record say it all: those through relays
come last. Whatever comes up relayed is punched then, if the lower PeerId finds a hole: a lane at once, a connection
when links change and every LOOK_PERIOD_S. After one that failed it is left at that for REST_S; what both sides may try
is bounded for each pair and in all. The reduction knows nothing of any of this.
"""

from __future__ import annotations

import enum
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import trio

from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import PeerId
from shoal.protocol.limits import KEY_LIMIT, Rates

ASK_S = 2.0
"""So long a peer that was asked to dial may take, where there is a third through which it can be reached."""
RELAYS_TRIED_LIMIT = 3
LOOK_PERIOD_S = 15.0
HOLE_OFFERS = 2
"""So often a peer is asked for a hole that says nothing about it."""
PUNCHES_PER_S, PUNCHES_BURST = 1 / 60, 8.0
"""With one peer."""
ALONE_PUNCHES_PER_S, ALONE_PUNCHES_BURST = 1 / 15, 24.0
"""The same without a third: every lane takes one, and there may come to be LANES_PER_PEER_LIMIT of them."""
ALL_PUNCHES_PER_S, ALL_PUNCHES_BURST = 0.5, 32.0
REST_S = 600.0
"""After an attempt that failed, until this node begins another with the same peer, where there is a way around."""
ALONE_ATTEMPTS = 3
"""So many that failed in a row, without a third, and the two are taken to be parted."""


class Step(enum.Enum):
    """Step that is tried for a lane: dial the peer, ask it to dial, both at once, through a third."""

    DIAL = "dial"
    ASK = "ask"
    PUNCH = "punch"
    RELAY = "relay"


class Situation(enum.Enum):
    """Reachability of two, as far as is known; see above."""

    OPEN = "open"
    CLOSED = "closed"
    LOWER = "lower"
    HIGHER = "higher"


NEXT: dict[Situation, dict[Step | None, Step]] = {
    Situation.OPEN: {None: Step.DIAL, Step.DIAL: Step.ASK, Step.ASK: Step.RELAY},
    Situation.CLOSED: {None: Step.DIAL, Step.DIAL: Step.RELAY},
    Situation.LOWER: {None: Step.DIAL, Step.DIAL: Step.PUNCH},
    Situation.HIGHER: {None: Step.DIAL, Step.DIAL: Step.ASK},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to a peer through a third: where that one is ('host:port'), and what each end says there first."""

    via: PeerId
    addresses: tuple[str, ...]
    near: bytes
    far: bytes


class ReachFacts(Protocol):
    """Facts that a node has found out about the network around it. From trio's thread."""

    def may_dial(self, peer: PeerId, host: str) -> bool:
        """True if a host in `peer`'s answer may be dialled: nobody shall send a swarm against a third party."""

    def is_reached(self) -> bool:
        """True if it makes sense to ask others to dial this node."""

    def addresses_of(self, relay: PeerId) -> tuple[str, ...]:
        """Addresses of the lanes of a third that passes others' on; empty if it may not be dialled."""

    def relays(self, peer: PeerId) -> Sequence[PeerId]:
        """Peers that may have a way to `peer`, the best first."""

    async def way(self, relay: PeerId, peer: PeerId) -> Way:
        """A way to `peer` through `relay`. Raises NetworkError if it gives none."""


class Everywhere:
    """Network facts of a node that may dial every address, and for which nobody relays."""

    def may_dial(self, peer: PeerId, host: str) -> bool:
        """Always."""
        return True

    def is_reached(self) -> bool:
        """As far as is known."""
        return True

    def addresses_of(self, relay: PeerId) -> tuple[str, ...]:
        """None."""
        return ()

    def relays(self, peer: PeerId) -> Sequence[PeerId]:
        """Nobody."""
        return ()

    async def way(self, relay: PeerId, peer: PeerId) -> Way:
        """There is none."""
        raise NetworkError(f"no way to {peer} through {relay}")


@dataclass(slots=True)
class _Holes:
    """Outcome of hole punches with one peer. rest_until: no other is begun with a third. blocked_alone: in a row."""

    rest_until: float = -math.inf
    blocked_alone: int = 0


class Reach:
    """Reach of one node: what it knows of the ways to each peer. Use from trio's thread.

    is_direct: whether a peer is connected without a relay; never where this node makes no holes.
    """

    def __init__(
        self, me: PeerId, facts: ReachFacts, *, is_direct: Callable[[PeerId], bool] = lambda peer: False
    ) -> None:
        self.facts = facts
        self._me = me
        self._is_direct = is_direct
        self._by_peer: Rates[PeerId] = Rates(PUNCHES_PER_S, PUNCHES_BURST)
        self._by_peer_alone: Rates[PeerId] = Rates(ALONE_PUNCHES_PER_S, ALONE_PUNCHES_BURST)
        self._all: Rates[None] = Rates(ALL_PUNCHES_PER_S, ALL_PUNCHES_BURST)
        self._holes: OrderedDict[PeerId, _Holes] = OrderedDict()
        self.parted: Callable[[PeerId], None] = lambda peer: None
        """Called for a peer to which no third and no hole leads, again and again while attempts fail."""

    # -- which step comes next -------------------------------------------------------------------------------

    def next_step(self, peer: PeerId, in_vain: Step | None, *, asked: bool) -> Step | None:
        """Return the step to try for a lane after `in_vain`; None to give up. asked: the peer asked for the lane."""
        step = NEXT[self.situation(peer)].get(in_vain)
        if asked and step in (Step.ASK, Step.RELAY):
            return None
        return None if in_vain is Step.ASK and not self.facts.relays(peer) else step

    def situation(self, peer: PeerId) -> Situation:
        """Situation of this node and a peer."""
        if self.is_alone(peer):
            return Situation.LOWER if self.begins(peer) else Situation.HIGHER
        return Situation.OPEN if self.facts.is_reached() else Situation.CLOSED

    def is_alone(self, peer: PeerId) -> bool:
        """True if this node and `peer`, of which neither can be dialled, have nobody but each other.

        That is a direct connection, and no third that relays.
        """
        return self._is_direct(peer) and not (self.facts.is_reached() or self.facts.relays(peer))

    def ask_s(self, peer: PeerId) -> float:
        """Seconds that the peer may take that was asked to dial."""
        return ASK_S if self.facts.relays(peer) else math.inf

    # -- holes -----------------------------------------------------------------------------------------------

    def begins(self, peer: PeerId) -> bool:
        """True if hole punches with a peer are for this node to begin, and not for the peer."""
        return self._me < peer

    def onlooker(self, peer: PeerId) -> PeerId | None:
        """Pick who looks on while this node begins with `peer`; None where it shall not, now. It counts as tried."""
        if self.rests(peer):
            return None
        relays = self.facts.relays(peer)
        return relays[0] if relays and self.may_punch(peer) else None

    def may_punch(self, peer: PeerId, *, alone: bool = False) -> bool:
        """Return True if one more hole may be tried with a peer, whoever begins; it then counts as tried."""
        now = trio.current_time()
        return (self._by_peer_alone if alone else self._by_peer).take(peer, now) and self._all.take(None, now)

    def rests(self, peer: PeerId) -> bool:
        """True if a hole punch with the peer failed a while ago."""
        known = self._holes.get(peer)
        return known is not None and known.rest_until > trio.current_time()

    def failed(self, peer: PeerId) -> None:
        """A hole that this node began, with a third, came to nothing."""
        self._of(peer).rest_until = trio.current_time() + REST_S

    def failed_alone(self, peer: PeerId) -> None:
        """The same without a third, whoever began."""
        holes = self._of(peer)
        holes.blocked_alone += 1
        if holes.blocked_alone >= ALONE_ATTEMPTS:
            self.parted(peer)

    def found_alone(self, peer: PeerId) -> None:
        """A hole was made without a third."""
        self._of(peer).blocked_alone = 0

    def _of(self, peer: PeerId) -> _Holes:
        holes = self._holes.setdefault(peer, _Holes())
        self._holes.move_to_end(peer)
        if len(self._holes) > KEY_LIMIT:
            self._holes.popitem(last=False)
        return holes
