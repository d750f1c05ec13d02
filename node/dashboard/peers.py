"""Peers as the page shows them: some all the time, all of them on demand, a part at a time.

    rows of all peers ── see ──┬─ changed: of LIVE_LIMIT peers what is new, CHANGE_LIMIT of them at once
                               └─ page: a part of those that match, in order

So what a viewer is told does not grow with the swarm. A change of state is told at once; numbers wait for their turn.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from math import floor, log10
from operator import attrgetter
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from shoal.node.peer_facts import ABSENT, PeerFacts, State, behind_of

LIVE_LIMIT = 200
"""Peers that are told of all the time: this node, members in trouble, the other members, then by PeerId."""
CHANGE_LIMIT = 40
"""Of them, those of whom one look tells."""
PAGE_LIMIT = 30
"""Peers of one answer."""
FIND_LIMIT_CHARS = 128
RATE_PERIOD_S = 2.0
DIGITS = 3
LIVE_DIGITS = 2
"""Of numbers that change all the time, for a drawing."""
URGENT: Final = frozenset({"state", "reach", "member"})

Fields = dict[str, Any]
Group = Literal[State, "member", "following", "behind"]
Sort = Literal["peer", "state", "reach", "round", "speed", "up", "down", "total"]


class Wanted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Question for peers: those with `find` in name, PeerId, state, software or address, of a group if one is named.

    sort: by what, `down` from the highest. first: how many to pass over.
    """

    find: Annotated[str, Meta(max_length=FIND_LIMIT_CHARS)] = ""
    group: Group | Literal[""] = ""
    sort: Sort = "peer"
    down: bool = False
    first: Annotated[int, Meta(ge=0, le=1 << 20)] = 0


class PeerPage(msgspec.Struct, frozen=True, kw_only=True):
    """Part of the peers that match, `total` in all, from number `first` on."""

    total: int
    first: int
    peers: Sequence[Fields]


class Peers:
    """All peers of the last look, and what viewers were told of some of them."""

    def __init__(self) -> None:
        self.live: dict[str, Fields] = {}
        """As the viewers know them."""
        self._all: dict[str, PeerFacts] = {}
        self._behind: dict[str, int] = {}
        self._counted: dict[str, tuple[float, int, int]] = {}
        self._rates: dict[str, tuple[float, float]] = {}
        self._changed_at: dict[str, int] = {}
        self._look = 0
        self._news: dict[str, Fields | None] = {}

    def see(self, peers: Iterable[PeerFacts], now: float, *, in_turn: bool, in_step: bool = True) -> None:
        """Take the rows of this moment. in_turn: tell of a part of what is new, as viewers are there.

        in_step: whether anybody can be behind.
        """
        self._look += 1
        self._all = {peer.peer: peer for peer in peers}
        self._behind = behind_of(self._all.values()) if in_step else {}
        self._measure(now)
        chosen = heapq.nsmallest(LIVE_LIMIT, self._all.values(), key=_rank)
        changes: dict[str, Fields | None] = dict.fromkeys(self.live.keys() - {known.peer for known in chosen})
        for known in chosen:
            before, fields = self.live.get(known.peer, {}), self._drawn(known)
            changed = {key: value for key, value in fields.items() if before.get(key) != value}
            if changed:
                changes[known.peer] = changed
        for peer in heapq.nsmallest(CHANGE_LIMIT, changes, key=self._turn(changes)) if in_turn else changes:
            self._apply(peer, changes[peer])

    def _turn(self, changes: dict[str, Fields | None]) -> Callable[[str], tuple[bool, int, str]]:
        """Order of what waits: states before numbers, whoever waits the longest first."""

        def key(peer: str) -> tuple[bool, int, str]:
            changed = changes[peer]
            return changed is not None and URGENT.isdisjoint(changed), self._changed_at.get(peer, 0), peer

        return key

    def _apply(self, peer: str, changed: Fields | None) -> None:
        if changed is None:
            del self.live[peer]
            self._changed_at.pop(peer, None)
            self._news[peer] = None
            return
        self.live[peer] = {**self.live.get(peer, {}), **changed}
        self._changed_at[peer] = self._look
        # One that went and came back since the last delta is told whole: its row began anew.
        self._news[peer] = {**(self._news.get(peer) or {}), **changed}

    def _measure(self, now: float) -> None:
        """Rates of the peers with which anything was exchanged over lanes."""
        counted: dict[str, tuple[float, int, int]] = {}
        rates: dict[str, tuple[float, float]] = {}
        for peer, known in self._all.items():
            if not (known.sent or known.received):
                continue
            then, sent, received = self._counted.get(peer, (now, known.sent, known.received))
            rates[peer] = self._rates.get(peer, (0.0, 0.0))
            if now - then >= RATE_PERIOD_S:
                grown = max(0, known.sent - sent), max(0, known.received - received)
                rates[peer] = grown[0] / (now - then), grown[1] / (now - then)
                then, sent, received = now, known.sent, known.received
            counted[peer] = (then, sent, received)
        self._counted, self._rates = counted, rates

    def changed(self) -> dict[str, Fields | None]:
        """News of the peers that viewers know, since the last call; None of whom they know no more."""
        news, self._news = self._news, {}
        return news

    def _drawn(self, known: PeerFacts) -> Fields:
        up, down = self._rates.get(known.peer, (0.0, 0.0))
        return {
            "name": known.name,
            "state": known.state,
            "reach": known.reach,
            "member": known.member,
            "round": known.round,
            "speed": rounded(known.speed, LIVE_DIGITS),
            "up": rounded(up, LIVE_DIGITS),
            "down": rounded(down, LIVE_DIGITS),
        }

    # -- on demand ---------------------------------------------------------------------------------------------

    def row(self, peer: str) -> Fields | None:
        """All of one peer's row; None if nobody knows it."""
        known = self._all.get(peer)
        if known is None:
            return None
        up, down = self._rates.get(peer, (0.0, 0.0))
        return {
            **self._drawn(known),
            "peer": peer,
            "speed": rounded(known.speed),
            "up": rounded(up),
            "down": rounded(down),
            "behind": self._behind.get(peer, 0),
            "sent": known.sent,
            "received": known.received,
            "software": known.software,
            "address": known.address,
        }

    def page(self, wanted: Wanted) -> PeerPage:
        """The part of the peers that is asked for."""
        text = wanted.find.strip().lower()
        found = [known for known in self._all.values() if self._is_in(wanted.group, known) and _matches(text, known)]
        found.sort(key=lambda known: known.peer)
        found.sort(key=self._sort_key(wanted.sort), reverse=wanted.down)
        part = found[wanted.first : wanted.first + PAGE_LIMIT]
        rows = [row for known in part if (row := self.row(known.peer)) is not None]
        return PeerPage(total=len(found), first=wanted.first, peers=rows)

    def _is_in(self, group: str, known: PeerFacts) -> bool:
        match group:
            case "":
                return True
            case "member":
                return known.member
            case "following":
                return not known.member and known.state not in ABSENT
            case "behind":
                return known.peer in self._behind
        return known.state == group

    def _sort_key(self, sort: Sort) -> Callable[[PeerFacts], Any]:
        match sort:
            case "peer":
                return lambda known: (known.reach != "self", not known.member)
            case "up" | "down":
                way = ("up", "down").index(sort)
                return lambda known: self._rates.get(known.peer, (0.0, 0.0))[way]
            case "total":
                return lambda known: known.sent + known.received
        return attrgetter(sort)


def _rank(known: PeerFacts) -> tuple[int, str]:
    """Order in which peers are chosen; the fewer change places, the better."""
    state = known.state
    if known.reach == "self":
        rank = 0
    elif known.member:
        rank = 1 if state in ("silent", "gone") else 2
    else:
        rank = 4 if state in ABSENT else 3
    return rank, known.peer


def _matches(text: str, known: PeerFacts) -> bool:
    return not text or text in f"{known.name} {known.peer} {known.state} {known.software} {known.address}".lower()


def rounded(value: float, digits: int = DIGITS) -> float:
    """Round to so many digits, whole where that is large."""
    if value == 0 or value != value:
        return 0
    places = digits - 1 - floor(log10(abs(value)))
    near = round(value, places)
    return int(near) if places <= 0 else near
