"""Handing over between nodes of one site (`shoal.protocol.sites`): both ends of `/shoal/site/1`.

    one of the site                                        its delegate
      HandOverOffer(base, root, tokens, …)  ───────────►   of its site? of this round, in this form, not too late?
                                            ◄─ lanes ───   all chunks, each checked against the root
      HandOverAnswer(taken)                 ◄───────────   once it is in the contribution of its own, or is not

      TakeBackOffer(base)                   ───────────►   it will not be taken any more,
      HandOverAnswer(taken)                 ◄───────────   unless it is in the contribution already

An offer is answered at the latest when the delegate's round is over. Where no answer comes, since the delegate is gone,
what it had asked for all chunks of counts as taken.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Final

import numpy as np
import trio

from shoal.collectives.codecs import U8, chunk_codec
from shoal.collectives.contribution import EncodedContribution, encoded_part, payload_bytes
from shoal.collectives.grid import Grid
from shoal.collectives.memory import own_memory
from shoal.node.outcome import StateFetched
from shoal.node.state.contributions import HandedWork, Made
from shoal.node.state.fetching import Fetcher, Job
from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.inputs import HandedOver, Offered
from shoal.protocol.planning import capped_tokens
from shoal.protocol.records import NodeRecord
from shoal.protocol.sites import (
    SITE_PROTOCOL,
    HandOverAnswer,
    HandOverOffer,
    SiteRequest,
    TakeBackOffer,
    is_of_site,
)
from shoal.protocol.wire import SwarmId, canonical, decode
from shoal.swarm.host import Host
from shoal.swarm.lanes.chunks import ChunkRef, ChunkSpace, Lookup
from shoal.swarm.lanes.frame import SCOPE_BYTES
from shoal.swarm.streams import MessageStream

OFFER_LIMIT_BYTES: Final = 1024
OFFER_DEADLINE_S: Final = 10.0
ANSWER_LIMIT_S: Final = 24 * 3600.0
"""No round is longer, whoever trains how slowly; an answer that has not come by then comes never."""
TAKE_BACK_S: Final = 5.0
"""For a delegate to say whether what is taken back is in its contribution."""
LOOK_S: Final = 0.5

logger = logging.getLogger(__name__)


class OfferedWork:
    """The contribution that this node offers its delegate.

    `lookup` is called in lanes' threads; what is no part of it is for `others`.
    """

    def __init__(self, others: Lookup) -> None:
        self._others = others
        self._lock = threading.Lock()
        self._encoded: EncodedContribution | None = None
        self._asked: set[int] = set()

    def offer(self, encoded: EncodedContribution) -> None:
        """Serve this from now on, and nothing else."""
        with self._lock:
            self._encoded, self._asked = encoded, set()

    def withdraw(self) -> bool:
        """Serve nothing any more. Returns whether each chunk of what was served has been asked for."""
        with self._lock:
            all_asked = self._encoded is not None and len(self._asked) == self._encoded.grid.chunks
            self._encoded = None
            return all_asked

    def lookup(self, ref: ChunkRef) -> memoryview | None:
        """The payload of a chunk, None if it is not here."""
        with self._lock:
            encoded = self._encoded
            if ref.space is not ChunkSpace.VECTOR or encoded is None or ref.scope != encoded.root[:SCOPE_BYTES]:
                encoded = None
            elif ref.chunk < encoded.grid.chunks:
                self._asked.add(ref.chunk)
        if encoded is None:
            return self._others(ref)
        return encoded.payload(ref.chunk) if ref.chunk < encoded.grid.chunks else None


@dataclass(slots=True)
class _Round:
    """Works that are handed over in one round.

    taken: of whom the contribution that is being made has it; None before. over: who is in it; None until it is made.
    """

    base: bytes = b""
    form: tuple[str, int, int] = ("", 0, 0)
    handed: dict[PeerId, HandedWork] = field(default_factory=dict)
    heard: set[PeerId] = field(default_factory=set)
    taken: frozenset[PeerId] | None = None
    over: frozenset[PeerId] | None = None


class HandedIn:
    """Works that others of the site hand over to this node in the round under way, and who was in its contribution to
    the one before. Nobody waits for anything here. Sans-IO.
    """

    def __init__(self) -> None:
        self._round, self._before = _Round(), _Round()

    def begin(self, base: bytes, form: tuple[str, int, int]) -> None:
        """The round after the value of this hash begins. form: codec, values, and values of a chunk that it takes."""
        if self._round.base != base:
            self.end()
            self._before, self._round = self._round, _Round(base, form)

    def hears(self, peer: PeerId, offer: HandOverOffer) -> bool:
        """True if what a peer offers is to be fetched: it is of this round, in its form, not too late, and the only."""
        round, form = self._round, (offer.codec, offer.numel, offer.chunk_values)
        if (offer.base, form) != (round.base, round.form) or round.over is not None or peer in round.heard:
            return False
        round.heard.add(peer)
        return True

    def fetched(self, base: bytes, work: HandedWork) -> bool:
        """True if what was fetched is in time, and was not taken back: what comes of it `end` says."""
        round = self._round
        if base != round.base or round.over is not None or work.peer not in round.heard:
            return False
        round.handed[work.peer] = work
        return True

    def take(self, tokens: int, weight_cap: float) -> list[HandedWork]:
        """All that is handed over for the round, for a contribution of which `end` says that it is made.

        tokens: of this node's own. Nobody's count for more than `weight_cap` times the median of the site.
        """
        round = self._round
        works = [] if round.over is not None else sorted(round.handed.items())
        round.taken = frozenset(peer for peer, _ in works)
        all_tokens = {PeerId(""): tokens, **{peer: work.tokens for peer, work in works}}
        capped = capped_tokens(all_tokens, weight_cap)
        return [replace(work, tokens=capped[peer]) for peer, work in works]

    def end(self, handed: Collection[PeerId] = ()) -> bool:
        """This node's contribution has the works of these in it, and no others. False if that was said before."""
        round = self._round
        if round.over is not None:
            return False
        round.over, round.handed = frozenset(handed), {}
        return True

    def let_go(self, peer: PeerId, base: bytes) -> bool | None:
        """A peer takes back what it offered; whether that is too late. None: `has` says so once the round is over."""
        round = self._round
        if base == round.base and round.over is None:
            if round.taken is not None and peer in round.taken:
                return None
            round.handed.pop(peer, None)
            round.heard.discard(peer)
        return self.has(peer, base)

    def has(self, peer: PeerId, base: bytes) -> bool:
        """True if the work of a peer is in this node's contribution to the round after the value of this hash."""
        rounds = (round for round in (self._round, self._before) if round.base == base)
        return any(round.over is not None and peer in round.over for round in rounds)


def offer_of(made: Made) -> HandOverOffer:
    """Return the offer of what was made."""
    encoded, grid = made.encoded, made.encoded.grid
    return HandOverOffer(
        base=made.base,
        root=encoded.root,
        tokens=made.tokens,
        codec=encoded.codec,
        numel=grid.numel,
        chunk_values=grid.chunk_values,
    )


def offered_chunk(offer: HandOverOffer, chunk: int, payload: U8, peer: PeerId) -> U8:
    """Return the encoded chunk in a payload that `peer` sent. Raises RemoteError if it is not the one it offered."""
    grid = Grid(offer.numel, offer.chunk_values)
    codec = chunk_codec(offer.codec, grid, chunk)
    encoded = encoded_part(payload, grid=grid, codec=codec, chunk=chunk, root=offer.root)
    if encoded is None:
        raise RemoteError(f"chunk {chunk} of its contribution is not the one it offered", peer=peer)
    return encoded


@dataclass(slots=True)
class _Offer:
    """An offer to the delegate. taken: what came of it; None until that is known, and `ended` is set."""

    delegate: PeerId
    made: Made
    taken: bool | None = None
    takes_back: trio.Event = field(default_factory=trio.Event)
    ended: trio.Event = field(default_factory=trio.Event)


class SiteExchange:
    """Handing over, as one node does it. name: of its site; None, and nobody is of it, where it is of none.

    linked: who may be heard. record_of: what a peer says of itself. allocate: gives memory for what is handed over.
    """

    def __init__(
        self,
        host: Host,
        work: OfferedWork,
        fetcher: Fetcher,
        *,
        name: str | None,
        swarm: SwarmId,
        linked: Callable[[], Collection[PeerId]],
        record_of: Callable[[PeerId], NodeRecord | None],
        allocate: Callable[[int], memoryview] = own_memory,
    ) -> None:
        self._host = host
        self._work = work
        self._fetcher = fetcher
        self._name = name
        self._swarm = swarm
        self._linked = linked
        self._record_of = record_of
        self._allocate = allocate
        self._handed_in, self._ended = HandedIn(), trio.Event()
        self._base = b""
        self._fetching = trio.CapacityLimiter(1)
        self._offers, self._to_offer = trio.open_memory_channel[_Offer](math.inf)
        self._offer: _Offer | None = None
        self.put: Callable[[Offered | HandedOver], None] = lambda event: None
        """Takes inputs of the member."""
        if name is not None:
            host.serve(SITE_PROTOCOL, self._serve, limit_bytes=OFFER_LIMIT_BYTES)

    def mates(self) -> frozenset[PeerId]:
        """Linked peers of this node's site."""
        if self._name is None:
            return frozenset()
        return frozenset(p for p in self._linked() if is_of_site(self._record_of(p), self._name, self._swarm))

    # -- of who is delegate ----------------------------------------------------------------------------------

    def begin(self, base: bytes, grid: Grid, codec: str) -> None:
        """The round after the value of this hash begins: contributions to it are taken, in this form."""
        if self._base != base:
            self.contributed()
            self._base, self._ended = base, trio.Event()
            self._handed_in.begin(base, (codec, grid.numel, grid.chunk_values))

    def take(self, tokens: int, weight_cap: float) -> list[HandedWork]:
        """All that is handed over for the round (`HandedIn.take`); each who did waits for `contributed`."""
        return self._handed_in.take(tokens, weight_cap)

    def contributed(self, handed: Collection[PeerId] = ()) -> None:
        """This node's contribution is on disk, with those of these in it; or there is none, or none of them is."""
        if self._handed_in.end(handed):
            self._ended.set()

    async def _serve(self, stream: MessageStream) -> None:
        """Answer another of the site. Raises RemoteError, NetworkError where that cannot be."""
        peer = stream.peer
        if peer not in self.mates():
            raise RemoteError("hands over, and is of another site", peer=peer)
        request: SiteRequest = decode(await stream.receive(deadline_s=OFFER_DEADLINE_S), SiteRequest, peer=peer)  # type: ignore[arg-type]
        if isinstance(request, HandOverOffer):
            taken = await self._take(peer, request)
        else:
            taken = await self._let_go(peer, request.base)
        await stream.send(canonical(HandOverAnswer(taken=taken)), deadline_s=OFFER_DEADLINE_S)
        await stream.aclose()

    async def _take(self, peer: PeerId, offer: HandOverOffer) -> bool:
        """Fetch what a peer offers; whether it is in this node's contribution, once that is known."""
        handed_in, ended = self._handed_in, self._ended
        if not handed_in.hears(peer, offer):
            return handed_in.has(peer, offer.base)
        try:
            work = await self._fetch(peer, offer)
        except (NetworkError, RemoteError) as error:
            logger.info("%s does not hand over what it offers: %s", peer, error)
            return False
        if handed_in.fetched(offer.base, work):
            self.put(Offered(peer, offer.base))
            await ended.wait()
        return handed_in.has(peer, offer.base)

    async def _let_go(self, peer: PeerId, base: bytes) -> bool:
        """A peer takes back what it offered; whether that is too late."""
        ended, taken = self._ended, self._handed_in.let_go(peer, base)
        if taken is None:
            await ended.wait()
            return self._handed_in.has(peer, base)
        return taken

    async def _fetch(self, peer: PeerId, offer: HandOverOffer) -> HandedWork:
        grid = Grid(offer.numel, offer.chunk_values)
        sizes = [payload_bytes(grid, chunk_codec(offer.codec, grid, chunk), chunk) for chunk in range(grid.chunks)]
        begins = [0, *accumulate(sizes)]
        scope, here = offer.root[:SCOPE_BYTES], dict[int, U8]()

        def accept(ref: ChunkRef, data: memoryview, digest: bytes | None) -> None:
            place = memory[begins[ref.chunk] : begins[ref.chunk + 1]]
            place[:] = np.frombuffer(data, np.uint8)
            here[ref.chunk] = offered_chunk(offer, ref.chunk, place, peer)

        job = Job(
            what="a contribution of this site",
            wanted=[(ChunkRef(ChunkSpace.VECTOR, scope, chunk), size) for chunk, size in enumerate(sizes)],
            here=(),
            introduce=_nothing_to_ask,
            accept=accept,
            on_progress=_not_shown,
        )
        async with self._fetching:
            memory = np.frombuffer(self._allocate(begins[-1]), np.uint8)
            await self._fetcher.fetch(job, [peer])
            chunks = tuple(here[chunk] for chunk in range(grid.chunks))
            work = HandedWork(peer, offer.tokens, grid, offer.codec, chunks)
            await trio.to_thread.run_sync(work.check)
        return work

    # -- of who hands over -----------------------------------------------------------------------------------

    def hand_over(self, delegate: PeerId, made: Made) -> None:
        """Begin to hand over what was made to the delegate; what comes of it is put as an input.

        Of what was handed over already, what came of it is put again.
        """
        offer = self._offer
        if offer is not None and offer.made.base == made.base:
            if offer.taken is not None:
                self.put(HandedOver(made.base, offer.taken))
            return
        self.take_back()
        self._offer = _Offer(delegate, made)
        self._offers.send_nowait(self._offer)

    def take_back(self) -> None:
        """Have the delegate let go of what it was offered, if it may."""
        if self._offer is not None:
            self._offer.takes_back.set()

    async def outcome(self, base: bytes) -> bool:
        """True if what was made for the round after that value was offered, and counts as taken. It is taken back.

        Cancellation: it is taken back all the same.
        """
        offer = self._offer
        if offer is None or offer.made.base != base:
            return False
        offer.takes_back.set()
        await offer.ended.wait()
        return bool(offer.taken)

    async def run(self) -> None:
        """Offer one contribution after the other, until cancelled."""
        async for offer in self._to_offer:
            self._work.offer(offer.made.encoded)
            taken = await self._answered(offer)
            all_asked = self._work.withdraw()
            offer.taken = all_asked if taken is None else taken
            offer.ended.set()
            self.put(HandedOver(offer.made.base, offer.taken))

    async def _answered(self, offer: _Offer) -> bool | None:
        """Answer of the delegate; None if it answers nothing."""
        request = offer_of(offer.made)
        answers: list[bool] = []
        async with trio.open_nursery() as nursery:
            over = nursery.cancel_scope
            nursery.start_soon(self._ask, offer.delegate, request, ANSWER_LIMIT_S, answers, over)
            nursery.start_soon(self._until_unlinked, offer.delegate, over)
            await offer.takes_back.wait()
            await self._ask(offer.delegate, TakeBackOffer(base=offer.made.base), TAKE_BACK_S, answers, over)
        return answers[0] if answers else None

    async def _ask(
        self, delegate: PeerId, request: SiteRequest, deadline_s: float, answers: list[bool], over: trio.CancelScope
    ) -> None:
        try:
            data = await self._host.request(
                delegate, SITE_PROTOCOL, canonical(request), deadline_s=deadline_s, limit_bytes=OFFER_LIMIT_BYTES
            )
            answers.append(decode(data, HandOverAnswer, peer=delegate).taken)
        except (NetworkError, RemoteError) as error:
            logger.info("%s does not say whether it took over what this node made: %s", delegate, error)
        over.cancel()

    async def _until_unlinked(self, delegate: PeerId, over: trio.CancelScope) -> None:
        while delegate in self._linked():  # noqa: ASYNC110 -- nobody tells when a link ends
            await trio.sleep(LOOK_S)
        over.cancel()


async def _nothing_to_ask(peer: PeerId) -> None:
    await trio.lowlevel.checkpoint()


async def _not_shown(progress: StateFetched) -> None:
    await trio.lowlevel.checkpoint()
