"""Sites: members of one place, whose work goes out once, and to whom the finals of a round come in once.

    [membership] sites = "together"            in the manifest, and at each node of the place `shoal run --site NAME`

    of one site, by PeerId: H < J < K, all of which train
    J, K   ── contribution ─────────────────►  H     fetches them, and contributes the mean of all, by their tokens
    J, K   ◄── taken ────────────────────────  H     once its own is on disk
    J, K   ── Ready(observer, delegate H) ──►  all   a plan gives them weight zero, no chunk, and nobody's finals
    J, K   ◄── finals ───────────────────────  H     once H has all of them; from others where it does not come to that

So of n nodes in m places the uplinks carry what m nodes would, and n vote. The **delegate** of a site is, of its
members that are still training, the first by PeerId: each works that out by itself, and where two differ one is refused
and contributes by itself. It waits for the others of its site for WAIT_SHARE of the grace at most, and no longer than
until so much of the round's grace is over: else a delegate that comes late would not be in the round.

What is handed over is counted once. It is the delegate's from the moment it says so, or where it had all of it and says
nothing more: then it may count, and is lost if it does not. Whoever is refused contributes as if it were alone.

A node says its site in its record, as a capability that follows from the site's name, the swarm and the PeerId. So a
peer that does not know the name can copy it from nobody; where strangers may come it is chosen like a password.

Sans-IO. Source: two levels as in Blink or NCCL's trees are of sums; here the lower level is a mean that one node
contributes, so that what is certified stays one sum in one order.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Annotated, Final

import msgspec

from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import WEIGHT_LIMIT, Count, Hash, Message, domain_hash
from shoal.protocol.records import NodeRecord
from shoal.protocol.wire import SwarmId

SITE_PROTOCOL: Final = "/shoal/site/1"
PREFIX: Final = "site."
_DIGEST_CHARS: Final = 26
NAME_LIMIT_CHARS: Final = 64
WAIT_SHARE: Final = 0.5
"""Of the grace: for so long a delegate that is ready waits for others of its site. Nobody else waits longer for it."""

_NAME: Final = re.compile(rf"[!-~]{{1,{NAME_LIMIT_CHARS}}}", re.ASCII)


def check_site(name: str, option: str) -> None:
    """Raise ConfigError for what is no name of a site."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{option}: a site's name has up to {NAME_LIMIT_CHARS} printable characters, and no space")


def capability_of(name: str, swarm: SwarmId, peer: PeerId) -> str:
    """The capability by which the record of `peer` says that it is of the site of this name."""
    digest = domain_hash("site", swarm, peer.encode(), name.encode())
    return PREFIX + digest.hex()[:_DIGEST_CHARS]


def is_of_site(record: NodeRecord | None, name: str, swarm: SwarmId) -> bool:
    """True if the node of a record is of the site of this name."""
    return record is not None and capability_of(name, swarm, record.peer) in record.capabilities


class HandOverOffer(Message, frozen=True, kw_only=True):
    """A contribution to the round after the value of hash `base`: its root, its tokens, and the form of its chunks."""

    base: Hash
    root: Hash
    tokens: Annotated[int, msgspec.Meta(ge=1, le=WEIGHT_LIMIT)]
    codec: Annotated[str, msgspec.Meta(max_length=64)]
    numel: Count
    chunk_values: Count


class HandOverAnswer(Message, frozen=True, kw_only=True):
    """Whether the contribution is in that of the delegate."""

    taken: bool


@dataclass(slots=True)
class SiteRound:
    """A member's part in its site, in one round; what it knows of the others of its site is given to it each time.

    work: what its trainer made, where it `holds` it until others of the site hand over theirs. handed_to: who was
    offered it.
    """

    me: PeerId
    base: bytes = b""
    work: object = None
    holds: bool = False
    since: float = 0.0
    handed_to: PeerId | None = None
    offered: set[PeerId] = field(default_factory=set)

    def begin(self, base: bytes) -> None:
        """The round after the value of this hash begins, or begins again."""
        if base != self.base:
            self.base, self.handed_to, self.offered = base, None, set()
        self.let_go()

    def hold(self, work: object, now: float) -> None:
        """The trainer made this."""
        self.work, self.holds, self.since = work, True, now

    def let_go(self) -> object:
        """What was held; it is held no more."""
        work, self.work, self.holds = self.work, None, False
        return work

    def delegate(self, training: Iterable[PeerId]) -> PeerId | None:
        """Whom to hand over to; None if it is this node. training: those of the site who do, this node or not."""
        first = min({*training, self.me})
        return None if first == self.me else first

    def awaited(self, training: Collection[PeerId]) -> frozenset[PeerId]:
        """Those of the site that are going to hand over to this node, its delegate."""
        if self.delegate(training) is not None:
            return frozenset()
        return frozenset(training) - self.offered - {self.me}

    def waits(self, training: Collection[PeerId], now: float, grace_s: float, half_ready_at: float | None) -> bool:
        """True if this node, the delegate, is to wait for others of its site with what it holds.

        half_ready_at: since when the grace of the round goes by, None if it does not yet.
        """
        since = self.since if half_ready_at is None else min(self.since, half_ready_at)
        return now - since < WAIT_SHARE * grace_s and bool(self.awaited(training))
