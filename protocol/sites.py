"""Sites: members of one place, whose work goes out once, and to whom the finals of a round come in once.

    [membership] sites = "together"            in the manifest, and at each node of the place `shoal run --site NAME`

    of one site, by PeerId: H < J < K, all of which train
    J, K   ── contribution ─────────────────►  H     fetches them, and contributes the mean of all, by their tokens
    J, K   ◄── taken ────────────────────────  H     once they are in its own
    J, K   ── Ready(observer, delegate H) ──►  all   a plan gives them weight zero, no chunk, and nobody's finals
    J, K   ◄── finals ───────────────────────  H     once H has all of them; from others where it does not come to that

So of n nodes in m places the uplinks carry what m nodes would, and n vote. The **delegate** of a site is, of its
members that are still training, the first by PeerId: each works that out by itself, and where two differ one is refused
and contributes by itself. It waits for the others of its site, and they for it, for WAIT_SHARE of the grace: from when
they are ready, or from when the round's grace begins, if that was before. Then they take back what they offered, and
contribute it themselves.

What is handed over is counted once. The delegate says whether it has it, from its disk after a restart. Where it says
nothing, since it died or cannot be reached, it counts as taken if it had asked for all of it: it may then count, and is
lost if it does not. A round weighs a delegate as one contributor, of the tokens of all: `weight_cap` holds for it as
well, so that a site of more nodes than that weighs less than they would apart.

A node says its site in its record, as a capability that follows from the site's name, the swarm and the PeerId. So a
peer that does not know the name can copy it from nobody; where strangers may come it is chosen like a password, since
who knows it has a say in what the site contributes: of tokens no more than `weight_cap` times the median of the site.

Sans-IO. Two levels of sums, as in NCCL's trees, would change what is certified; the lower level here is a mean that one
node contributes, so that there is one sum still, in one order.
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
        raise ConfigError(
            f"{option}: {name!r} is no site's name; write up to {NAME_LIMIT_CHARS} printable characters without a space"
        )


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


class TakeBackOffer(Message, frozen=True, kw_only=True):
    """The sender takes back what it offered for the round after the value of hash `base`."""

    base: Hash


SiteRequest = HandOverOffer | TakeBackOffer


class HandOverAnswer(Message, frozen=True, kw_only=True):
    """True if the contribution is in that of the delegate; else it is not, and will not be."""

    taken: bool


@dataclass(slots=True)
class SiteRound:
    """A member's part in its site, in one round; what it knows of the others of its site is given to it each time.

    work: what its trainer made, where it `holds` it until others of the site hand over theirs. handed_to: who was
    offered it, and has not answered. passed_to: who has it.
    """

    me: PeerId
    base: bytes = b""
    work: object = None
    holds: bool = False
    since: float = 0.0
    handed_to: PeerId | None = None
    passed_to: PeerId | None = None
    takes_back: bool = False
    offered: set[PeerId] = field(default_factory=set)

    def begin(self, base: bytes) -> None:
        """The round after the value of this hash begins, or begins again."""
        if base != self.base:
            self.base, self.handed_to, self.passed_to, self.offered = base, None, None, set()
            self.takes_back = False
        self.let_go()

    def hold(self, work: object, now: float) -> None:
        """The trainer made this."""
        self.work, self.holds, self.since = work, True, now

    def let_go(self) -> object:
        """Hold it no more. Returns what was held."""
        work, self.work, self.holds = self.work, None, False
        return work

    def delegate(self, training: Iterable[PeerId]) -> PeerId | None:
        """The member to hand over to; None if it is this node. training: those of the site who do, this node or not."""
        first = min({*training, self.me})
        return None if first == self.me else first

    def awaited(self, training: Collection[PeerId]) -> frozenset[PeerId]:
        """Those of the site that are going to hand over to this node, its delegate."""
        if self.delegate(training) is not None:
            return frozenset()
        return frozenset(training) - self.offered - {self.me}

    def waits(self, training: Collection[PeerId], now: float, wait_s: float, half_ready_at: float | None) -> bool:
        """True if this node, the delegate, is to wait for others of its site with what it holds."""
        return not self._is_late(now, wait_s, half_ready_at) and bool(self.awaited(training))

    def hand_over(self, delegate: PeerId, now: float) -> None:
        """Note that what was made is offered the delegate."""
        self.handed_to, self.since, self.takes_back = delegate, now, False

    def is_to_take_back(self, now: float, wait_s: float, half_ready_at: float | None) -> bool:
        """True, once, if the delegate has not answered for so long that this node is to contribute by itself."""
        due = self.handed_to is not None and not self.takes_back and self._is_late(now, wait_s, half_ready_at)
        self.takes_back |= due
        return due

    def _is_late(self, now: float, wait_s: float, half_ready_at: float | None) -> bool:
        since = self.since if half_ready_at is None else min(self.since, half_ready_at)
        return now - since >= wait_s
