"""The offers of a swarm: what other nodes announced, who holds it, and what is refused at the door.

Sans-IO: sealed announcements go in, offers come out, time and round are arguments. Bounded everywhere: a peer that
announces without end loses its own oldest offers, and a token bucket per peer refuses announcements before their
signature is checked. Where the book is full the one with the most offers loses its oldest, and since names are free,
strangers together have no more than STRANGERS_SHARE of the room while others want it; an origin of higher rank
(`shoal.protocol.places`) is followed in the place of a stranger.

Gossip keeps no order, so a replay is not what is older than the newest: each origin has a window of sequence numbers,
in which each counts once, and what is older than the window counts never. Gossip also loses; `missing` says which
numbers of an origin have not come, to be asked for.

Anybody can send a gossip message once more, whenever it likes. So what is wrong only because of when it came (a replay,
too much at once, a round long past) is refused, and nobody is to blame. And anybody can announce another's digest: who
made the group is seen when it is here, until then it is offered by each of them, and neither is in the other's way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from shoal.protocol.identity import PeerId
from shoal.protocol.limits import TokenBucket
from shoal.protocol.places import Rank
from shoal.protocol.replays import Window
from shoal.protocol.rollouts import (
    Announcement,
    CatchUpRequest,
    Reason,
    RolloutError,
    open_announcement,
    peek_announcement,
)
from shoal.protocol.wire import SwarmId

REPLAY_WINDOW = 4096
"""Sequence numbers of one origin that are told apart: 512 bytes for each origin."""
ROUND_WINDOW = 256
"""The most that an origin's announcements may lie behind its newest, in its rounds."""
ORIGIN_LIMIT = 4096
"""Peers followed at once; one that has no offer left makes room. It could then replay what is its own, no more."""
MISSING_WINDOW = 1024
"""The distance behind an origin's newest number within which the missing ones are asked for."""
STRANGERS_SHARE = 0.5
"""Of the book's offers: of all who never proved anything, together."""
OFFER_LIMIT = 16_384
PEER_OFFER_LIMIT = 2_048
ANNOUNCEMENTS_PER_S, ANNOUNCEMENTS_BURST = 100.0, 400.0
"""Of one peer."""
HOLDER_LIMIT = 8
"""Peers noted as holders of one group, next to its origin."""


OfferKey = tuple[PeerId, bytes]
"""Who offers a group, and its digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A group that `origin` announced; `arrived` is this node's round at that time.

    order: how many offers this node had heard before it.
    """

    announcement: Announcement
    origin: PeerId
    boot: int
    sequence: int
    arrived: int
    order: int

    @property
    def digest(self) -> bytes:
        """The name of the group's bytes."""
        return self.announcement.digest

    @property
    def key(self) -> OfferKey:
        """The name of the offer: several origins may offer one digest, of which one at most made the group."""
        return self.origin, self.digest


@dataclass(slots=True)
class _Origin:
    """The state of a peer that announces: the numbers that came of its start `boot`, and its offers.

    rank: as it was when the last announcement came.
    """

    bucket: TokenBucket
    rank: Rank = Rank.STRANGER
    boot: int = -1
    came: Window = field(default_factory=partial(Window, REPLAY_WINDOW))
    newest_round: int = 0
    offers: OrderedDict[OfferKey, None] = field(default_factory=OrderedDict)
    asked_for: set[int] = field(default_factory=set)  # numbers that were asked for, and may come by gossip as well

    def is_replay(self, boot: int, sequence: int) -> bool:
        if boot != self.boot:
            return boot < self.boot
        return not self.came.is_new(sequence)

    def note(self, boot: int, sequence: int, round_number: int) -> None:
        if boot > self.boot:
            self.boot, self.came, self.newest_round = boot, Window(REPLAY_WINDOW, sequence), 0
            self.asked_for.clear()
        self.came.note(sequence)
        self.newest_round = max(self.newest_round, round_number)

    def missing(self, count: int) -> tuple[int, ...]:
        """Up to `count` numbers that have not come, the newest first."""
        newest = self.came.highest
        behind = range(newest - 1, max(0, newest - MISSING_WINDOW), -1)
        return tuple(islice((number for number in behind if not self.came.came(number)), count))


class OfferBook:
    """The offers of all peers but `me`, and the order in which they came. rank: of a peer, where there is no room."""

    def __init__(
        self,
        swarm_id: SwarmId,
        me: PeerId,
        *,
        rank: Callable[[PeerId], Rank] = lambda peer: Rank.STRANGER,
    ) -> None:
        self._rank = rank
        self._swarm_id = swarm_id
        self._me = me
        self._origins: dict[PeerId, _Origin] = {}
        self._offers: OrderedDict[OfferKey, Offer] = OrderedDict()
        self._offered_by: dict[bytes, list[PeerId]] = {}
        self._seeds: set[tuple[PeerId, int]] = set()
        self._holders: dict[bytes, list[PeerId]] = {}
        self._heard = 0

    def __len__(self) -> int:
        return len(self._offers)

    def offers(self) -> tuple[Offer, ...]:
        """All offers, in the order of their arrival."""
        return tuple(self._offers.values())

    def get(self, digest: bytes) -> Offer | None:
        """The offer of this group, the first one where several say that it is theirs."""
        origins = self._offered_by.get(digest)
        return None if origins is None else self._offers[origins[0], digest]

    def newest_round(self, peer: PeerId) -> int:
        """The latest round of which a peer announced anything; 0 where nothing is known."""
        origin = self._origins.get(peer)
        return 0 if origin is None else origin.newest_round

    def receive(
        self, data: bytes, *, peer: PeerId, now: float, round_number: int, asked_for: bool = False
    ) -> Offer | None:
        """Take the sealed announcement in `data`, which `peer` published at `now` (s) in this node's round.

        `asked_for`: it came because it was missing, not by gossip, and no quota holds; None if it came by both ways, or
        is of a round long past by now, which is then nobody's fault.
        Raises RolloutError, with the reason by which it counts, and who is to blame if that is known. A peer publishes
        announcements of its own only.
        """
        origin = self._origin(peer, now)
        origin.rank = self._rank(peer)
        if not asked_for and not origin.bucket.take(1, now):
            raise RolloutError(f"more announcements of {peer} than allowed", reason=Reason.QUOTA)
        envelope = peek_announcement(data, peer=peer)
        if envelope.sender != peer:
            raise RolloutError("an announcement of somebody else", reason=Reason.FORGED, peer=peer)
        if origin.is_replay(envelope.boot, envelope.seq):
            if asked_for or (envelope.boot == origin.boot and envelope.seq in origin.asked_for):
                origin.asked_for.discard(envelope.seq)
                return None
            raise RolloutError(f"an announcement of {peer} that came before", reason=Reason.REPLAYED)
        signed = open_announcement(data, self._swarm_id, peer=peer)
        announcement = signed.announcement
        is_behind = signed.boot == origin.boot and announcement.round + ROUND_WINDOW < origin.newest_round
        origin.note(signed.boot, signed.sequence, announcement.round)
        if asked_for and len(origin.asked_for) < MISSING_WINDOW:
            origin.asked_for.add(signed.sequence)
        if is_behind and asked_for:
            return None
        if is_behind:
            raise RolloutError(f"an announcement of {peer} of a round long past", reason=Reason.STALE)
        seed = (peer, announcement.task.seed)
        if (peer, announcement.digest) in self._offers or seed in self._seeds:
            raise RolloutError("announces a task's group once more", reason=Reason.DUPLICATE, peer=peer)
        offer = Offer(
            announcement=announcement,
            origin=peer,
            boot=signed.boot,
            sequence=signed.sequence,
            arrived=round_number,
            order=self._heard,
        )
        self._heard += 1
        self._insert(offer, origin)
        return offer

    def has_come(self, peer: PeerId, boot: int, sequence: int) -> bool:
        """True if an announcement of `peer` with this number would be a replay."""
        origin = self._origins.get(peer)
        return origin is not None and origin.is_replay(boot, sequence)

    def boot_of(self, peer: PeerId) -> int:
        """The number of this peer's newest start that announced something; less than zero if none did."""
        origin = self._origins.get(peer)
        return -1 if origin is None else origin.boot

    def missing(self, peer: PeerId, count: int) -> CatchUpRequest:
        """Return what to ask `peer` for: announcements that have not come, up to `count` by number, and all beyond."""
        origin = self._origins.get(peer)
        if origin is None or origin.boot < 0:
            return CatchUpRequest()
        return CatchUpRequest(boot=origin.boot, newest=origin.came.highest, missing=origin.missing(count))

    def notes_holders(self, digest: bytes) -> bool:
        """True if it would be noted that one more peer serves this group."""
        return digest in self._offered_by and len(self._holders.get(digest, ())) < HOLDER_LIMIT

    def note_holder(self, digest: bytes, peer: PeerId) -> None:
        """`peer` says that it serves this group as well."""
        if digest not in self._offered_by:
            return
        holders = self._holders.setdefault(digest, [])
        if peer not in holders and len(holders) < HOLDER_LIMIT:
            holders.append(peer)

    def holders(self, digest: bytes) -> tuple[PeerId, ...]:
        """Return who says to have the group beside those who offer it, in the order in which they said so."""
        return tuple(self._holders.get(digest, ()))

    def expire(self, before_round: int) -> int:
        """Drop what arrived before this node's round `before_round`; how many that were."""
        old = [offer for offer in self._offers.values() if offer.arrived < before_round]
        for offer in old:
            self._drop(offer.key)
        return len(old)

    def forget(self, peer: PeerId) -> None:
        """Drop all offers of a peer. Its order is kept, so that none of them can be replayed."""
        origin = self._origins.get(peer)
        for key in list(origin.offers) if origin else ():
            self._drop(key)

    def _origin(self, peer: PeerId, now: float) -> _Origin:
        known = self._origins.get(peer)
        if known is not None:
            return known
        if peer == self._me:
            raise RolloutError("speaks as this node itself", reason=Reason.FORGED, peer=peer)
        if len(self._origins) >= ORIGIN_LIMIT:
            self._forget_idle_origin(peer)
        made = _Origin(TokenBucket(ANNOUNCEMENTS_PER_S, ANNOUNCEMENTS_BURST, now))
        self._origins[peer] = made
        return made

    def _forget_idle_origin(self, newcomer: PeerId) -> None:
        gone = next((peer for peer, origin in self._origins.items() if not origin.offers), None)
        if gone is None and self._rank(newcomer) > Rank.STRANGER:
            gone = next((peer for peer, origin in self._origins.items() if origin.rank is Rank.STRANGER), None)
        if gone is None:
            raise RolloutError(f"{newcomer} is one origin more than this node follows", reason=Reason.QUOTA)
        self.forget(gone)
        del self._origins[gone]

    def _insert(self, offer: Offer, origin: _Origin) -> None:
        if len(origin.offers) >= PEER_OFFER_LIMIT:
            self._crowd_out(origin)
        elif len(self._offers) >= OFFER_LIMIT:
            self._crowd_out(self._largest())
        self._offers[offer.key] = offer
        self._offered_by.setdefault(offer.digest, []).append(offer.origin)
        origin.offers[offer.key] = None
        self._seeds.add((offer.origin, offer.announcement.task.seed))

    def _largest(self) -> _Origin:
        """Find the origin that has the most offers; among strangers alone, where these have more than their share."""
        strangers = [origin for origin in self._origins.values() if origin.rank is Rank.STRANGER]
        of_strangers = sum(len(origin.offers) for origin in strangers)
        crowd = strangers if of_strangers > STRANGERS_SHARE * OFFER_LIMIT else self._origins.values()
        return max(crowd, key=lambda origin: len(origin.offers))

    def _crowd_out(self, origin: _Origin) -> None:
        self._drop(next(iter(origin.offers)))

    def _drop(self, key: OfferKey) -> None:
        offer = self._offers.pop(key)
        self._origins[offer.origin].offers.pop(key, None)
        self._seeds.discard((offer.origin, offer.announcement.task.seed))
        self._offered_by[offer.digest].remove(offer.origin)
        if not self._offered_by[offer.digest]:
            del self._offered_by[offer.digest]
            self._holders.pop(offer.digest, None)
