"""Rules for every simulated transfer, judged from outside: by requests and frames, not by the scheduler.

    the reference           a state that a peer takes over is that of the reference, bit for bit
    no wait too long        nothing is owed by a donor of which nothing came for `STALL_S`, nor by one that sent other
                            things only for `IDLE_LIMIT_S`; and a peer that lacks its state has it, or is told why not
    wrong bytes once        whoever sent a chunk that is not the certified one is not asked by that peer for `BAN_S`
    bounded requests        at most `REQUEST_LIMIT` chunks are asked for, of a donor that brought nothing yet no more
                            than its first window, and no chunk of more than two donors at a time, but for one more
                            each time that `FURTHER_S` have passed since it was asked of the last
    a donor's duties        what a donor sends in its own round waits for one frame of what it serves, no more
    the only copy           who leaves in order does not take a state along that nobody else has, while somebody is
                            linked who would fetch it, before its patience is over

The first that does not hold raises `Violation`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shoal.lab.simulate.judge import Violation
from shoal.node.state.chunk_requests import (
    FURTHER_S,
    IDLE_LIMIT_S,
    LOOK_S,
    STALL_S,
    WINDOW_FIRST_BYTES,
    WINDOW_MIN_CHUNKS,
)
from shoal.protocol.donors import BAN_S
from shoal.protocol.messages import Value
from shoal.swarm.lanes.chunks import REQUEST_LIMIT

if TYPE_CHECKING:
    from shoal.lab.simulate.peer import SimulatedPeer

ASKED_OF_LIMIT = 2
"""Donors of whom one chunk is asked at a time, where none of them is slow."""
FRAMES_AHEAD_LIMIT = 1
OBTAIN_LIMIT_S = 180.0
"""A peer that lacks its state while nothing is wrong has it by then."""

Piece = tuple[bytes, int]
"""The scope and the number of a chunk."""


@dataclass(slots=True)
class _Owing:
    """Debt of a donor to one peer, with sizes in bytes, and the time at which something came of it last.

    since: by scope, from when on it owes something of that: each transfer has its own patience.
    """

    pieces: dict[Piece, int] = field(default_factory=dict)
    asked_at: dict[Piece, float] = field(default_factory=dict)
    since: dict[bytes, float] = field(default_factory=dict)
    anything_at: float = float("-inf")
    wanted_at: float = float("-inf")
    brought: bool = False
    banned_until: float = float("-inf")


class Donations:
    """Knows what every peer was asked for, and what came of it."""

    def __init__(self, tick_s: float) -> None:
        self.transfers = 0
        self.obtained = 0
        self._slack_s = 2 * LOOK_S + tick_s
        self._owing: dict[int, dict[int, _Owing]] = {}

    def _of(self, peer: SimulatedPeer, donor: int) -> _Owing:
        return self._owing.setdefault(peer.number, {}).setdefault(donor, _Owing())

    def asked(self, peer: SimulatedPeer, donor: int, pieces: Mapping[Piece, int]) -> None:
        """`peer` asks `donor` for chunks of so many bytes each."""
        now, mine, owing = peer.swarm.timeline.now, self._owing.setdefault(peer.number, {}), self._of(peer, donor)
        if now < owing.banned_until:
            raise Violation("wrong bytes once", f"peer {peer.number} asks peer {donor} again, who sent it wrong bytes")
        scopes = {scope for scope, _ in owing.pieces}
        owing.since = {scope: since for scope, since in owing.since.items() if scope in scopes}
        for scope, _ in pieces:
            owing.since.setdefault(scope, now)
        owing.pieces.update(pieces)
        owing.asked_at.update(dict.fromkeys(pieces, now))
        if sum(len(other.pieces) for other in mine.values()) > REQUEST_LIMIT:
            raise Violation("bounded requests", f"peer {peer.number} waits for more than {REQUEST_LIMIT} chunks")
        size, many = sum(owing.pieces.values()), len(owing.pieces) > WINDOW_MIN_CHUNKS * len(peer.peer_rounds.transfers)
        if many and not owing.brought and size > WINDOW_FIRST_BYTES * len(peer.peer_rounds.transfers):
            raise Violation("bounded requests", f"peer {donor}, who brought nothing yet, owes {size} bytes")
        for piece in pieces:
            before = [other.asked_at[piece] for other in mine.values() if other is not owing and piece in other.pieces]
            if len(before) >= ASKED_OF_LIMIT and now - max(before) < FURTHER_S:
                raise Violation("bounded requests", f"chunk {piece[1]} is asked of more than {ASKED_OF_LIMIT} donors")

    def settled(self, peer: SimulatedPeer, donor: int, scope: bytes, chunk: int) -> None:
        """A chunk came, or is not wanted of this donor any more."""
        owing = self._of(peer, donor)
        owing.pieces.pop((scope, chunk), None)
        owing.asked_at.pop((scope, chunk), None)

    def moved(self, peer: SimulatedPeer, donor: int) -> None:
        """Bytes of what was asked for came."""
        owing = self._of(peer, donor)
        owing.wanted_at, owing.brought = peer.swarm.timeline.now, True

    def heard(self, peer: SimulatedPeer, donor: int) -> None:
        """Bytes of anything came over a lane."""
        mine = self._owing.get(peer.number)
        if mine is not None and donor in mine:
            mine[donor].anything_at = peer.swarm.timeline.now

    def wrong(self, peer: SimulatedPeer, donor: int) -> None:
        """A chunk that `donor` sent is not the certified one."""
        self._of(peer, donor).banned_until = peer.swarm.timeline.now + BAN_S

    def ended(self, peer: SimulatedPeer) -> None:
        """The process is gone, and forgot."""
        self._owing.pop(peer.number, None)

    def check(self, peer: SimulatedPeer, now: float) -> None:
        """Raises Violation if `peer`, which runs, waits longer than it may."""
        for donor, owing in self._owing.get(peer.number, {}).items():
            if not owing.pieces:
                continue
            begun = max(min(owing.since[scope] for scope, _ in owing.pieces), peer.disturbed_at)
            silent = now - max(begun, owing.anything_at, owing.wanted_at)
            idle = now - max(begun, owing.wanted_at)
            if silent > STALL_S + self._slack_s or idle > IDLE_LIMIT_S + self._slack_s:
                owed = f"{len(owing.pieces)} chunks owed by peer {donor}, {silent:.1f} s without a byte"
                raise Violation("no wait too long", f"peer {peer.number} still waits for {owed}")

    @staticmethod
    def check_duties(peer: SimulatedPeer, ahead: int) -> None:
        """Raises Violation if what `peer` sends in its round waits behind more than a frame of what it serves."""
        if ahead > FRAMES_AHEAD_LIMIT:
            raise Violation("a donor's duties", f"{ahead} frames go before what peer {peer.number} owes its round")

    @staticmethod
    def check_copy(peer: SimulatedPeer) -> None:
        """Raises Violation if `peer`, which may wait, leaves with a state that nobody else has."""
        swarm, head = peer.swarm, peer.disk.ledger.standing
        others = [other for other in swarm.peers if other is not peer and not other.gone]
        would_fetch = any(other.running and other.number in peer.watch.links for other in others)
        if peer.peer_rounds.obtaining.current and would_fetch and not any(_has(other, head) for other in others):
            raise Violation("the only copy", f"peer {peer.number} leaves with that of round {head.round}")


def _has(peer: SimulatedPeer, value: Value) -> bool:
    """True if the state of `value` or of a later round, or the finals that lead to it, are on the disk of `peer`."""
    return value.plan in peer.disk.finals or any(
        later.round >= value.round and later.hash == peer.disk.held for later in peer.disk.chain
    )
