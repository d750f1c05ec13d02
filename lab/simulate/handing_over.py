"""Handing over between simulated peers of one site: what `shoal.node.rounds.site_exchange` is around the same rules.

    who hands over            Offering(offer)     ───────────►  its delegate
                              ◄─ ChunkRequest, ChunkFrame ──    all chunks, each checked against the root
                              ◄─ OfferAnswer(taken) ────────    once its own contribution, with this in it, is made

                              TakingBack(offer)   ───────────►  it will not be taken any more,
                              ◄─ OfferAnswer(taken) ────────    unless it is in the contribution already

A stream repeats what a partition swallows, so what is asked is said again until it is answered, and so is the answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from shoal.collectives.codecs import U8
from shoal.collectives.grid import Grid
from shoal.lab.simulate.fetching import REQUEST_BYTES, Job
from shoal.lab.simulate.obtaining import Obtaining
from shoal.lab.simulate.talk import Answer, OfferAnswer, Offering, TakingBack
from shoal.node.rounds.site_exchange import TAKE_BACK_S, HandedIn, OfferedWork, offer_of, offered_chunk
from shoal.node.state.contributions import HandedWork, Made
from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.inputs import HandedOver, Offered
from shoal.protocol.sites import HandOverOffer
from shoal.swarm.lanes.chunks import ChunkRef, ChunkSpace
from shoal.swarm.lanes.frame import SCOPE_BYTES

if TYPE_CHECKING:
    from shoal.lab.simulate.peer import SimulatedPeer

AGAIN_S = 2.0
"""An offer that is not answered is said again after so long."""


@dataclass(slots=True, eq=False)
class _Offer:
    """An offer of a peer. taken: what came of it; None until that is known. answered: the delegate said so."""

    delegate: int
    made: Made
    offer: HandOverOffer
    takes_back: bool = False
    taken: bool | None = None
    answered: bool = False


class HandingOver:
    """Both ends of it at a peer, in one of its lives. put: takes inputs of the member."""

    def __init__(
        self, peer: SimulatedPeer, *, obtaining: Obtaining, put: Callable[[Offered | HandedOver], None]
    ) -> None:
        self._peer = peer
        self._swarm = peer.swarm
        self._obtaining = obtaining
        self._put = put
        self._life = peer.life
        self._work = OfferedWork(lambda ref: None)
        self._handed_in = HandedIn()
        self._base = b""
        self._waiting: dict[int, HandOverOffer] = {}
        """Those who wait for an answer in this round, by peer."""
        self._answers: dict[tuple[int, bytes, bytes], bool] = {}
        self._offers: deque[_Offer] = deque()
        """Those under way: the first is being offered, the others wait."""
        self._newest: _Offer | None = None
        self._tell: Callable[[bool], None] | None = None
        self._past: dict[bytes, _Offer] = {}
        """By base."""

    def mates(self) -> list[PeerId]:
        """Linked peers of its site."""
        site = self._swarm.site_of(self._peer.number)
        others = sorted(self._peer.watch.links) if site is not None else ()
        return [self._swarm.peers[other].id for other in others if self._swarm.site_of(other) == site]

    def stop(self) -> None:
        """The process ended."""
        self._offers.clear()
        self._waiting.clear()
        self._tell = None

    # -- of who is delegate ----------------------------------------------------------------------------------

    def begin(self, base: bytes, grid: Grid, codec: str) -> None:
        """The round after the value of this hash begins: contributions to it are taken, in this form."""
        if self._base != base:
            self.contributed()
            self._base, self._waiting = base, {}
            self._handed_in.begin(base, (codec, grid.numel, grid.chunk_values))

    def take(self, tokens: int, weight_cap: float) -> list[HandedWork]:
        """All that is handed over for the round. tokens: of the peer's own."""
        return self._handed_in.take(tokens, weight_cap)

    def contributed(self, handed: Collection[PeerId] = ()) -> None:
        """The contribution is made, with those of these in it; or there is none."""
        if self._handed_in.end(handed):
            waiting, self._waiting = self._waiting, {}
            for other, offer in waiting.items():
                self._answer(other, offer)

    def offered(self, sender: int, offer: HandOverOffer) -> None:
        """Another peer offers what it made, for the first time or again."""
        peer, handed_in = self._swarm.peers[sender].id, self._handed_in
        if peer not in self.mates():
            self._swarm.blamed(self._peer.number, sender, "hands over, and is of another site")
        elif (sender, offer.base, offer.root) in self._answers:
            self._say(sender, offer)
        elif handed_in.hears(peer, offer):
            self._fetch(sender, offer)
        elif self._waiting.get(sender) != offer:
            self._answer(sender, offer)

    def taken_back(self, sender: int, offer: HandOverOffer) -> None:
        """Another peer takes back what it offered, for the first time or again."""
        peer = self._swarm.peers[sender].id
        if peer not in self.mates():
            self._swarm.blamed(self._peer.number, sender, "takes back, and is of another site")
        elif (sender, offer.base, offer.root) in self._answers:
            self._say(sender, offer)
        elif self._handed_in.let_go(peer, offer.base) is not None:
            self._waiting.pop(sender, None)
            self._answer(sender, offer)

    def _answer(self, other: int, offer: HandOverOffer) -> None:
        taken = self._handed_in.has(self._swarm.peers[other].id, offer.base)
        self._answers[other, offer.base, offer.root] = taken
        self._say(other, offer)

    def _say(self, other: int, offer: HandOverOffer) -> None:
        answer = OfferAnswer(offer.base, offer.root, self._answers[other, offer.base, offer.root])
        self._swarm.call(self._peer, other, answer, REQUEST_BYTES)

    def _fetch(self, sender: int, offer: HandOverOffer) -> None:
        self._waiting[sender] = offer
        peer, came = self._swarm.peers[sender].id, dict[int, U8]()

        def accept(chunk: int, data: bytes) -> None:
            came[chunk] = offered_chunk(offer, chunk, np.frombuffer(data, np.uint8), peer)

        chunks = Grid(offer.numel, offer.chunk_values).chunks
        job = Job(
            scope=offer.root[:SCOPE_BYTES],
            sizes=[int(self._swarm.chunk_bytes)] * chunks,
            question=None,
            agrees=_nothing_to_ask,
            known={sender},
            accept=accept,
            ended=partial(self._fetched, sender, offer, came),
        )
        self._obtaining.fetch(job, [sender])

    def _fetched(self, sender: int, offer: HandOverOffer, came: dict[int, U8], done: bool) -> None:
        if self._waiting.get(sender) is not offer:
            return  # it is answered
        if done:
            grid, peer = Grid(offer.numel, offer.chunk_values), self._swarm.peers[sender].id
            chunks = tuple(came[chunk] for chunk in range(grid.chunks))
            work = HandedWork(peer, offer.tokens, grid, offer.codec, chunks)
            try:
                work.check()
            except RemoteError as error:
                self._swarm.blamed(self._peer.number, sender, str(error))
            else:
                if self._handed_in.fetched(offer.base, work):
                    self._put(Offered(peer, offer.base))
                    return
        del self._waiting[sender]
        self._answer(sender, offer)

    # -- of who hands over -----------------------------------------------------------------------------------

    def hand_over(self, delegate: int, made: Made) -> None:
        """Begin to hand over what was made to the delegate; what comes of it is put as an input.

        Of what was handed over already, what came of it is put again.
        """
        offer = self._newest
        if offer is not None and offer.made.base == made.base:
            if offer.taken is not None:
                self._put(HandedOver(made.base, offer.taken))
            return
        self.take_back()
        self._newest = self._past[made.base] = _Offer(delegate, made, offer_of(made))
        self._offers.append(self._newest)
        if len(self._offers) == 1:
            self._begin()

    def _begin(self) -> None:
        offer = self._offers[0]
        self._work.offer(offer.made.encoded)
        if offer.takes_back:
            self._swarm.timeline.after(TAKE_BACK_S, self._late, offer)
        self._say_again(offer)

    def _is_under_way(self, offer: _Offer) -> bool:
        return self._life == self._peer.life and bool(self._offers) and self._offers[0] is offer

    def _say_again(self, offer: _Offer) -> None:
        if not self._is_under_way(offer):
            return
        self._swarm.timeline.after(AGAIN_S, self._say_again, offer)
        if not self._peer.hung:
            self._ask(offer)

    def _ask(self, offer: _Offer) -> None:
        if offer.delegate not in self._peer.watch.links:
            self._over(offer, None)
            return
        self._swarm.call(self._peer, offer.delegate, Offering(offer.offer), REQUEST_BYTES)
        if offer.takes_back:
            self._swarm.call(self._peer, offer.delegate, TakingBack(offer.offer), REQUEST_BYTES)

    def take_back(self) -> None:
        """Have the delegate let go of what it was offered, if it may."""
        offer = self._newest
        if offer is None or offer.takes_back:
            return
        offer.takes_back = True
        if self._is_under_way(offer):
            self._swarm.timeline.after(TAKE_BACK_S, self._late, offer)
            self._ask(offer)

    def _late(self, offer: _Offer) -> None:
        if not self._is_under_way(offer):
            return
        if self._peer.hung:
            self._swarm.timeline.after(AGAIN_S, self._late, offer)
        else:
            self._over(offer, None)

    def outcome(self, base: bytes, tell: Callable[[bool], None]) -> bool | None:
        """True if what was made for the round after that value was offered, and counts as taken. It is taken back.

        None where that comes out later, and `tell` is called with it.
        """
        offer = self._newest
        if offer is None or offer.made.base != base:
            return False
        self.take_back()
        if offer.taken is None:
            self._tell = tell
        return offer.taken

    @property
    def settles(self) -> bool:
        """True if what was made is over, and the delegate has not said yet whether it took it."""
        return self._tell is not None

    def lookup(self, scope: bytes, chunk: int) -> bytes | None:
        """The payload of a chunk of what is offered, None if that is another."""
        found = self._work.lookup(ChunkRef(ChunkSpace.VECTOR, scope, chunk))
        return None if found is None else bytes(found)

    def answered(self, sender: int, answer: OfferAnswer) -> None:
        """The delegate says whether it has taken it."""
        for offer in list(self._offers)[:1]:
            asked = offer.delegate, offer.offer.base, offer.offer.root
            if asked == (sender, answer.base, answer.root):
                self._over(offer, answer.taken)

    def lane_broke(self, other: int) -> None:
        """There is no link to `other`: of a delegate no answer comes."""
        if self._offers and self._offers[0].delegate == other:
            self._over(self._offers[0], None)

    def _over(self, offer: _Offer, taken: bool | None) -> None:
        all_asked = self._work.withdraw()
        offer.taken, offer.answered = all_asked if taken is None else taken, taken is not None
        self._offers.popleft()
        tell, self._tell = (self._tell, None) if offer is self._newest else (None, self._tell)
        if self._offers:
            self._begin()
        self._put(HandedOver(offer.made.base, offer.taken))
        if tell is not None:
            tell(offer.taken)

    def may_be_lost(self, base: bytes) -> bool:
        """True if what was offered on that base may be lost: the delegate, of which all was had, never answered."""
        return not self._past[base].answered


def _nothing_to_ask(donor: int, answer: Answer) -> None:
    raise LocalError("nobody asks a donor of a contribution for anything else")
