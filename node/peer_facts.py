"""Facts of peers as a node tells them, and what they come to where they are many.

    a row for each peer ── summary_of ── counts, quantiles, and the few whom a user should look at

Numbers and names come from peers too, and are passed on as they are: whoever shows them treats them as text.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

import msgspec

OUTLIER_LIMIT = 5
"""Peers that a summary names, of each kind."""
SOFTWARE_LIMIT = 6
"""Versions that a summary names, the most frequent first; the others are `OTHER`."""
OTHER = "other"
BEHIND_ROUNDS = 2
"""A peer so many rounds behind the middle one is behind. Records are up to 5 s old, the middle one's as well."""
QUANTILES = (0.1, 0.5, 0.9)

Reach = Literal["self", "direct", "detour", "suspect", "unlinked", "gone"]
"""direct: by a link; detour: alive, heard through others; unlinked: only its record is here; gone: held for dead."""
State = Literal["training", "joining", "paused", "silent", "left", "gone", "unreached"]
"""Word that a user sees first of a peer: its phase, unless how it is reached says more. unreached: this node knows its
record alone, which lives on for minutes; it may be coming, be dead, or be linked with others."""
STATES: tuple[State, ...] = get_args(State)
ABSENT: frozenset[State] = frozenset({"left", "gone", "unreached"})


class PeerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One node as this one sees it. sent, received: payload bytes over the lanes between the two, in all.

    name: for people, no two peers' the same; empty where none is known.
    """

    peer: str
    phase: str
    reach: Reach
    member: bool
    round: int
    tokens_per_s: float
    sent: int = 0
    received: int = 0
    software: str = ""
    address: str = ""
    name: str = ""

    @property
    def state(self) -> State:
        """See `State`."""
        if self.reach == "gone":
            return "left" if self.phase == "leaving" else "gone"
        if self.reach == "suspect":
            return "silent"
        if self.phase == "leaving":
            return "left"
        if self.reach == "unlinked":
            return "unreached"
        return "paused" if self.phase == "paused" else "training" if self.phase == "training" else "joining"

    @property
    def speed(self) -> float:
        """Tokens/s. A record keeps the last speed of a node that trains no more."""
        return 0.0 if self.state in ABSENT or self.phase == "paused" else self.tokens_per_s


class Outlier(msgspec.Struct, frozen=True, kw_only=True):
    """Peer that a summary names. value: its tokens/s, or by how many rounds it is behind."""

    peer: str
    value: float


class PeerSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All peers that a node knows, itself among them, in a few numbers.

    alive: heard, by this node or others; the rest is ABSENT. members: of the electorate, alive or not; following: alive
    and no member. states, reach: how many of each that there is. behind: those
    BEHIND_ROUNDS or more behind the middle one of those that train. tokens_per_s: of all, as they say; speeds: the
    QUANTILES of those that train, None where nobody does. slowest, most_behind: OUTLIER_LIMIT of each, the worst first.
    gone: as many of those held for dead, by PeerId.
    """

    known: int
    alive: int
    members: int
    following: int
    behind: int
    states: dict[str, int]
    reach: dict[str, int]
    software: dict[str, int]
    tokens_per_s: float
    speeds: tuple[float, float, float] | None = None
    slowest: Sequence[Outlier] = ()
    most_behind: Sequence[Outlier] = ()
    gone: Sequence[str] = ()


def summary_of(peers: Iterable[PeerFacts], *, in_step: bool = True) -> PeerSummary:
    """Sums over the rows of all peers. in_step: whether they share a round; else nobody can be behind."""
    rows = [(peer, peer.state) for peer in peers]
    states, reach = Counter(state for _, state in rows), Counter[str](peer.reach for peer, _ in rows)
    here = [(peer, state) for peer, state in rows if state not in ABSENT]
    training = [peer for peer, state in here if state == "training" and peer.speed > 0]  # else not measured yet
    speeds = sorted(peer.speed for peer in training)
    behind = behind_of(peer for peer, _ in rows) if in_step else {}
    return PeerSummary(
        known=len(rows),
        alive=len(here),
        members=sum(peer.member for peer, _ in rows),
        following=sum(not peer.member for peer, _ in here),
        behind=len(behind),
        states={state: states[state] for state in STATES if states[state]},
        reach=dict(sorted(reach.items())),
        software=_versions(Counter(peer.software for peer, _ in here if peer.software)),
        tokens_per_s=sum(peer.speed for peer, _ in rows),
        speeds=_quantiles(speeds) if speeds else None,
        slowest=[
            Outlier(peer=peer.peer, value=peer.speed)
            for peer in heapq.nsmallest(OUTLIER_LIMIT, training, key=lambda peer: (peer.speed, peer.peer))
        ],
        most_behind=[
            Outlier(peer=peer, value=rounds)
            for peer, rounds in heapq.nsmallest(OUTLIER_LIMIT, behind.items(), key=lambda known: (-known[1], known[0]))
        ],
        gone=heapq.nsmallest(OUTLIER_LIMIT, (peer.peer for peer, state in rows if state == "gone")),
    )


def behind_of(peers: Iterable[PeerFacts]) -> dict[str, int]:
    """By how many rounds a peer is behind the middle one of those that train, for each that is `BEHIND_ROUNDS` or more.

    The middle one, not the first: a peer that claims a round far ahead makes nobody late. Never this node: it is where
    it looks from.
    """
    training = [peer for peer in peers if peer.state in ("training", "silent")]
    if not training:
        return {}
    rounds = sorted(peer.round for peer in training)
    middle = rounds[len(rounds) // 2]
    others = (peer for peer in training if peer.reach != "self")
    return {peer.peer: middle - peer.round for peer in others if middle - peer.round >= BEHIND_ROUNDS}


def _quantiles(ascending: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = (ascending[min(int(share * len(ascending)), len(ascending) - 1)] for share in QUANTILES)
    return low, middle, high


def _versions(count: Counter[str]) -> dict[str, int]:
    """The most frequent, by how many have them; ties by name, so that nothing changes places."""
    ordered = sorted(count.items(), key=lambda known: (-known[1], known[0]))
    named, others = ordered[:SOFTWARE_LIMIT], sum(number for _, number in ordered[SOFTWARE_LIMIT:])
    return dict(named) | ({OTHER: others} if others else {})
