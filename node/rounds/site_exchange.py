"""Handing over between nodes of one site (`shoal.protocol.sites`): both ends of `/shoal/site/1`.

    who hands over                                         its delegate
      HandOverOffer(base, root, tokens, …)  ───────────►   of its site? of this round, in this form, not too late?
                                            ◄─ lanes ───   all chunks, each checked against the root
      HandOverAnswer(taken)                 ◄───────────   once its own contribution, with this in it, is on disk

The answer may take as long as the delegate trains, so no time is set for it; but it comes at the latest when the round
is over, and is not waited for once the delegate is linked no more. Where no answer comes, what all chunks of were
fetched counts as taken: it may be.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
import trio

from shoal.collectives.codecs import U8, chunk_codec
from shoal.collectives.contribution import EncodedContribution, encoded_part, payload_bytes
from shoal.collectives.grid import Grid
from shoal.node.outcome import StateFetched
from shoal.node.state.contributions import HandedWork, Made
from shoal.node.state.fetching import Fetcher, Job
from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.inputs import HandedOver, Offered
from shoal.protocol.messages import MEMBER_LIMIT
from shoal.protocol.records import NodeRecord
from shoal.protocol.sites import SITE_PROTOCOL, HandOverAnswer, HandOverOffer, is_of_site
from shoal.protocol.wire import SwarmId, canonical, decode
from shoal.swarm.host import Host
from shoal.swarm.lanes.chunks import ChunkRef, ChunkSpace, Lookup
from shoal.swarm.lanes.frame import SCOPE_BYTES
from shoal.swarm.streams import MessageStream

OFFER_LIMIT_BYTES: Final = 1024
OFFER_DEADLINE_S: Final = 10.0
ANSWER_LIMIT_S: Final = 24 * 3600.0
"""No round is longer, whoever trains how slowly; an answer that has not come by then comes never."""
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

    def offer(self, encoded: EncodedContribution | None) -> None:
        """Serve this from now on, and nothing else; None: nothing."""
        with self._lock:
            self._encoded, self._asked = encoded, set()

    @property
    def all_asked(self) -> bool:
        """True if each of its chunks was asked for."""
        with self._lock:
            return self._encoded is not None and len(self._asked) == self._encoded.grid.chunks

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
    """What is handed over in one round. over: whose work is in this node's contribution; None until that is known."""

    base: bytes = b""
    form: tuple[str, int, int] = ("", 0, 0)
    handed: dict[PeerId, HandedWork] = field(default_factory=dict)
    awaited: set[PeerId] = field(default_factory=set)
    over: frozenset[PeerId] | None = None
    ended: trio.Event = field(default_factory=trio.Event)


class SiteExchange:
    """Handing over, as one node does it. name: of its site; None, and nobody is of it, where it is of none.

    linked: who may be heard. record_of: what a peer says of itself. put: takes inputs of the member.
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
    ) -> None:
        self._host = host
        self._work = work
        self._fetcher = fetcher
        self._name = name
        self._swarm = swarm
        self._linked = linked
        self._record_of = record_of
        self._round = _Round()
        self._offers, self._to_offer = trio.open_memory_channel[tuple[PeerId, Made]](math.inf)
        self._offering: tuple[bytes, trio.CancelScope] | None = None
        self.put: Callable[[Offered | HandedOver], None] = lambda event: None
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
        if self._round.base != base:
            self._end(frozenset())
            self._round = _Round(base, (codec, grid.numel, grid.chunk_values))

    def take(self, base: bytes) -> list[HandedWork]:
        """All that is handed over for the round; nothing more is taken, and each who did waits for `contributed`."""
        if self._round.base != base or self._round.over is not None:
            return []
        return [work for _, work in sorted(self._round.handed.items())]

    def contributed(self, works: Collection[HandedWork] = ()) -> None:
        """This node's contribution is on disk, with these in it; or there is none, or none of them is."""
        self._end(frozenset(work.peer for work in works))

    def _end(self, taken: frozenset[PeerId]) -> None:
        if self._round.over is None:
            self._round.over = taken
            self._round.ended.set()
            self._round.handed = {}

    async def _serve(self, stream: MessageStream) -> None:
        """Take what another of the site offers. Raises RemoteError, NetworkError where that cannot be."""
        peer, round = stream.peer, self._round
        if peer not in self.mates():
            raise RemoteError("hands over, and is of another site", peer=peer)
        offer = decode(await stream.receive(deadline_s=OFFER_DEADLINE_S), HandOverOffer, peer=peer)
        form = offer.codec, offer.numel, offer.chunk_values
        free = round.over is None and peer not in round.awaited and len(round.awaited) < MEMBER_LIMIT
        if free and (offer.base, form) == (round.base, round.form):
            round.awaited.add(peer)
            try:
                work = await self._fetch(peer, offer)
            except (NetworkError, RemoteError) as error:
                logger.info("%s does not hand over what it offers: %s", peer, error)
            else:
                if round.over is None:
                    round.handed[peer] = work
                    self.put(Offered(peer, offer.base))
                    await round.ended.wait()
        taken = round.over is not None and peer in round.over
        await stream.send(canonical(HandOverAnswer(taken=taken)), deadline_s=OFFER_DEADLINE_S)
        await stream.aclose()

    async def _fetch(self, peer: PeerId, offer: HandOverOffer) -> HandedWork:
        grid = Grid(offer.numel, offer.chunk_values)
        scope, here = offer.root[:SCOPE_BYTES], dict[int, U8]()

        def accept(ref: ChunkRef, data: memoryview, digest: bytes | None) -> None:
            codec = chunk_codec(offer.codec, grid, ref.chunk)
            payload = np.frombuffer(bytes(data), np.uint8)
            encoded = encoded_part(payload, grid=grid, codec=codec, chunk=ref.chunk, root=offer.root)
            if encoded is None:
                raise RemoteError(f"chunk {ref.chunk} of its contribution is not the one it offered", peer=peer)
            here[ref.chunk] = encoded

        sizes = (payload_bytes(grid, chunk_codec(offer.codec, grid, chunk), chunk) for chunk in range(grid.chunks))
        wanted = [(ChunkRef(ChunkSpace.VECTOR, scope, chunk), size) for chunk, size in enumerate(sizes)]
        job = Job(
            what="a contribution of this site",
            wanted=wanted,
            here=(),
            introduce=_nothing_to_ask,
            accept=accept,
            on_progress=_not_shown,
        )
        await self._fetcher.fetch(job, [peer])
        chunks = tuple(here[chunk] for chunk in range(grid.chunks))
        work = HandedWork(peer, offer.tokens, grid, offer.codec, chunks)
        await trio.to_thread.run_sync(work.check)
        return work

    # -- of who hands over -----------------------------------------------------------------------------------

    def hand_over(self, delegate: PeerId, made: Made) -> None:
        """Begin to hand over what was made to the delegate; what comes of it is put as an input, once."""
        self._work.offer(made.encoded)
        self._offering = made.base, trio.CancelScope()
        self._offers.send_nowait((delegate, made))

    def give_up(self, base: bytes) -> bool | None:
        """The round is over: offer nothing more. Returns whether it may have been taken; None: it was not offered."""
        if self._offering is None or self._offering[0] != base:
            return None
        (_, scope), taken = self._offering, self._work.all_asked
        self._offering = None
        self._work.offer(None)
        scope.cancel()
        return taken

    async def run(self) -> None:
        """Offer one contribution after the other, until cancelled."""
        while True:
            delegate, made = await self._to_offer.receive()
            offering = self._offering
            if offering is None or offering[0] != made.base:
                continue
            taken: bool | None = None
            with offering[1]:
                taken = await self._offered(delegate, made)
            if self._offering is offering:
                self._offering, taken = None, self._work.all_asked if taken is None else taken
                self._work.offer(None)
                self.put(HandedOver(made.base, taken))

    async def _offered(self, delegate: PeerId, made: Made) -> bool | None:
        """What the delegate answers; None if it answers nothing."""
        grid, encoded = made.encoded.grid, made.encoded
        offer = HandOverOffer(
            base=made.base,
            root=encoded.root,
            tokens=made.tokens,
            codec=encoded.codec,
            numel=grid.numel,
            chunk_values=grid.chunk_values,
        )
        answers: list[bool] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(self._ask, delegate, offer, answers, nursery.cancel_scope))
            while delegate in self._linked():  # noqa: ASYNC110 -- nobody tells when a link ends
                await trio.sleep(LOOK_S)
            nursery.cancel_scope.cancel()
        return answers[0] if answers else None

    async def _ask(self, delegate: PeerId, offer: HandOverOffer, answers: list[bool], over: trio.CancelScope) -> None:
        try:
            data = await self._host.request(
                delegate, SITE_PROTOCOL, canonical(offer), deadline_s=ANSWER_LIMIT_S, limit_bytes=OFFER_LIMIT_BYTES
            )
            answers.append(decode(data, HandOverAnswer, peer=delegate).taken)
        except (NetworkError, RemoteError) as error:
            logger.info("%s does not say whether it took over what this node made: %s", delegate, error)
        over.cancel()


async def _nothing_to_ask(peer: PeerId) -> None:
    await trio.lowlevel.checkpoint()


async def _not_shown(progress: StateFetched) -> None:
    await trio.lowlevel.checkpoint()
