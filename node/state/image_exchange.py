"""Both ends of fetching a policy's image: what a node that only samples takes in place of a state.

Who asks names the certified digest, and the state whose image it has; the answer is the image's header, and how long
what changed is, chunk by chunk. Then the cheapest is taken: what changed, the finals that lack (`catchup`) or the whole
image. Every chunk that comes of it has the hash that the header says, which has the certified digest; who brings
another is left out, and nothing of it stays.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import trio

from shoal.collectives.commitment import chunk_hash
from shoal.collectives.policy_image import U8, VALUE_BYTES, apply_changes, changes_limit_bytes
from shoal.collectives.spans import Undecodable
from shoal.collectives.state import CertifiedState, HeldState, ImageHeader, PolicyImage, image_of_chunk
from shoal.node.state.asking import ask_in_turn
from shoal.node.state.catchup import CatchUp
from shoal.node.state.fetching import Job, tell_nobody
from shoal.node.state.policy_images import HEADER_LIMIT_BYTES, changes_scope
from shoal.node.state.states import StateCache
from shoal.protocol.errands import TakeImage
from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import NO_HASH
from shoal.protocol.peering import GetImage, ImageAnswer, Refusal
from shoal.protocol.wire import canonical, decode
from shoal.swarm.host import Host
from shoal.swarm.lanes.chunks import ChunkRef, ChunkSpace
from shoal.swarm.lanes.frame import SCOPE_BYTES
from shoal.swarm.questions import REQUEST_DEADLINE_S, answer, ask, hear
from shoal.swarm.streams import MessageStream

IMAGE_PROTOCOL: Final = "/shoal/image/1"
QUESTION_LIMIT_BYTES: Final = 1024
ANSWER_LIMIT_BYTES: Final = 2 << 20
ANSWERS_AT_ONCE: Final = 2
"""In threads: more would wait there for changes that are being made, while other work wants a thread."""
MAKING_DEADLINE_S: Final = 30.0
"""For an answer, which waits for the changes to be made."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Offer:
    """Answer of a peer: the header, which was checked, and the bytes of each chunk's changes; none if it has none."""

    header: ImageHeader
    changes: Sequence[int]

    @property
    def changes_bytes(self) -> float:
        """Bytes of all changes; infinity where there are none."""
        return sum(self.changes) if self.changes else math.inf


class _Growing:
    """An image in the making. `accept` is called in lanes' threads."""

    def __init__(self, header: ImageHeader, room: U8) -> None:
        self.header = header
        self._room = room

    def accept(self, chunk: int, image: U8) -> None:
        """Take a chunk of the image. Raises RemoteError if it is not the certified one."""
        if chunk_hash(image.data) != self.header.chunk_hash(chunk):
            raise RemoteError(f"chunk {chunk} of the image is not the certified one")
        start, stop = self.header.grid.span(chunk)
        self._room[VALUE_BYTES * start : VALUE_BYTES * stop] = image  # twice perhaps, the same

    def finish(self) -> PolicyImage:
        """The image, all chunks of which are here."""
        halves = self._room[:]
        halves.flags.writeable = False
        return PolicyImage(self.header, halves)


class ImageExchange:
    """This node's questions for images, and its answers to others. linked: who may ask."""

    def __init__(
        self, host: Host, cache: StateCache, catchup: CatchUp, linked: Callable[[], Collection[PeerId]]
    ) -> None:
        self._host = host
        self._cache = cache
        self._images = cache.images
        self._catchup = catchup
        self._linked = linked
        self._threads = trio.CapacityLimiter(ANSWERS_AT_ONCE)
        host.serve(IMAGE_PROTOCOL, self._serve, limit_bytes=ANSWER_LIMIT_BYTES)

    # -- here ------------------------------------------------------------------------------------------------

    async def _serve(self, stream: MessageStream) -> None:
        """Answer one question. Raises RemoteError when it is malformed, or of who is not linked."""
        if stream.peer not in self._linked():
            raise RemoteError("wants an image without having been admitted", peer=stream.peer)
        asked: GetImage = await hear(stream, GetImage, limit_bytes=QUESTION_LIMIT_BYTES)
        await answer(stream, await trio.to_thread.run_sync(self._answer, asked, limiter=self._threads))

    def _answer(self, asked: GetImage) -> ImageAnswer | Refusal:
        found = self._images.find(asked.state)
        if found is None:
            return Refusal(reason="not held here")
        changes = self._images.changes(asked.since, asked.state) or ()
        sizes = np.array([len(one) for one in changes], "<u4")
        return ImageAnswer(header=canonical(found[1]), changes=sizes.tobytes())

    # -- from others -----------------------------------------------------------------------------------------

    @property
    def performers(self) -> Mapping[type[Any], Callable[[Any], Awaitable[Any]]]:
        """Functions that carry out an errand's requests."""
        return {TakeImage: self._take}

    async def _take(self, request: TakeImage) -> PolicyImage | None:
        """See `TakeImage`."""
        held = await trio.to_thread.run_sync(self._base, request)
        since = request.before if held is not None or request.held is None else NO_HASH
        offers = await self._offers(request, since)
        if not offers:
            return None
        peer, offer = min(offers.items(), key=lambda one: one[1].changes_bytes)
        whole, last = VALUE_BYTES * offer.header.numel, offer.changes_bytes
        if request.cheapest and self._finals_bytes(request) <= (last if request.held is None else min(last, whole)):
            return None
        image = None
        if held is not None and last < whole:
            image = await self._by_changes(request, held, peer, offer)
            if image is None and request.cheapest and isinstance(held, CertifiedState):
                return None  # finals first
        return image or await self._whole(request, offer.header, offers)

    def _base(self, request: TakeImage) -> HeldState | None:
        """The state here whose changes can be asked for: a certified one, and an image itself or imaged. Blocks."""
        held = request.held
        if not isinstance(held, CertifiedState | PolicyImage) or request.before == NO_HASH:
            return None
        return held if self._cache.digest(held) == request.before else None

    def _finals_bytes(self, request: TakeImage) -> float:
        """Bytes of the finals that lack to the state: of all rounds since the one here, or of one without any."""
        held = request.held
        if isinstance(held, PolicyImage):
            return math.inf
        return self._catchup.finals_bytes * (1 if held is None else max(1, request.value.round - held.round))

    async def _offers(self, request: TakeImage, since: bytes) -> dict[PeerId, _Offer]:
        """Ask peers for their offers, in the order in which they answered; the first that has changes ends it."""
        found: dict[PeerId, _Offer] = {}

        async def ask_one(peer: PeerId) -> float | None:
            try:
                found[peer] = await self._offer(peer, request, since)
            except NetworkError as error:
                logger.info("the image of round %d from %s: %s", request.value.round, peer, error)
            except RemoteError as error:
                logger.warning("the image of round %d from %s: %s", request.value.round, peer, error)
                self._catchup.scores.offended(peer, trio.current_time())
            else:
                return 0.0 if found[peer].changes or since == NO_HASH else None
            return None

        now = trio.current_time()
        await ask_in_turn([peer for peer in request.peers if not self._catchup.scores.banned(peer, now)], ask_one)
        return found

    async def _offer(self, peer: PeerId, request: TakeImage, since: bytes) -> _Offer:
        """Raises NetworkError where it has no such image, RemoteError for what is none."""
        question = GetImage(state=request.certified, since=since)
        told: ImageAnswer = await ask(
            self._host,
            peer,
            IMAGE_PROTOCOL,
            question,
            ImageAnswer,
            limit_bytes=ANSWER_LIMIT_BYTES,
            deadline_s=MAKING_DEADLINE_S + REQUEST_DEADLINE_S,
        )
        header: ImageHeader = decode(told.header, ImageHeader, peer=peer, limit_bytes=HEADER_LIMIT_BYTES)
        if header.digest != request.certified:
            raise RemoteError("offers another image for that of the certified state", peer=peer)
        return _Offer(header, _sizes(told.changes, header, peer))

    async def _by_changes(self, request: TakeImage, held: HeldState, peer: PeerId, offer: _Offer) -> PolicyImage | None:
        """Make the image of what is here and what changed, as `peer` tells it; None if that fails."""
        growing = await self._begin(offer.header)
        grid, told = offer.header.grid, dict[int, bytes]()
        scope = changes_scope(request.before, request.certified)

        def accept(ref: ChunkRef, data: memoryview, _: bytes | None) -> None:
            changes = bytes(data)
            try:
                after = apply_changes(image_of_chunk(held, grid, ref.chunk), changes, grid.length(ref.chunk))
            except Undecodable as error:
                raise RemoteError(f"chunk {ref.chunk}: {error}") from None
            growing.accept(ref.chunk, after)
            told[ref.chunk] = changes

        wanted = [(ChunkRef(ChunkSpace.CHANGES, scope, chunk), size) for chunk, size in enumerate(offer.changes)]
        if not await self._fetch("changes", request, wanted, accept, [peer], introduce=_known):
            return None
        self._images.put_changes(request.before, request.certified, tuple(told[c] for c in range(grid.chunks)))
        return growing.finish()

    async def _whole(
        self, request: TakeImage, header: ImageHeader, offers: Mapping[PeerId, _Offer]
    ) -> PolicyImage | None:
        """Fetch the whole image, from all that have it; None if it is not to be had."""
        growing, grid = await self._begin(header), header.grid

        async def introduce(peer: PeerId) -> None:
            if peer not in offers:
                await self._offer(peer, request, NO_HASH)

        def accept(ref: ChunkRef, data: memoryview, _: bytes | None) -> None:
            growing.accept(ref.chunk, np.frombuffer(data, np.uint8))

        scope = request.certified[:SCOPE_BYTES]
        wanted = [
            (ChunkRef(ChunkSpace.IMAGE, scope, chunk), VALUE_BYTES * grid.length(chunk)) for chunk in range(grid.chunks)
        ]
        donors = [*offers, *(peer for peer in request.peers if peer not in offers)]
        fetched = await self._fetch("image", request, wanted, accept, donors, introduce=introduce)
        return growing.finish() if fetched else None

    async def _begin(self, header: ImageHeader) -> _Growing:
        return _Growing(header, await trio.to_thread.run_sync(self._images.room, header))

    async def _fetch(
        self,
        way: str,
        request: TakeImage,
        wanted: Sequence[tuple[ChunkRef, int]],
        accept: Callable[[ChunkRef, memoryview, bytes | None], None],
        donors: Sequence[PeerId],
        *,
        introduce: Callable[[PeerId], Awaitable[None]],
    ) -> bool:
        what = f"the {way} of round {request.value.round}"
        job = Job(what=what, wanted=wanted, here=(), introduce=introduce, accept=accept, on_progress=tell_nobody)
        try:
            donated = await self._catchup.fetcher.fetch(job, donors)
        except NetworkError as error:
            logger.info("%s", error)
            return False
        self._catchup.came(way, donated)
        return True


def _sizes(told: bytes, header: ImageHeader, peer: PeerId) -> Sequence[int]:
    """Bytes of the changes of each chunk, as a peer tells them. Raises RemoteError for any that cannot be."""
    grid = header.grid
    if not told:
        return ()
    if len(told) != 4 * grid.chunks:
        raise RemoteError("tells the lengths of changes of another number of chunks", peer=peer)
    sizes: list[int] = np.frombuffer(told, "<u4").tolist()
    if not all(0 < size <= changes_limit_bytes(grid.length(chunk)) for chunk, size in enumerate(sizes)):
        raise RemoteError("tells of changes that are longer than the whole chunk", peer=peer)
    return sizes


async def _known(peer: PeerId) -> None:
    """It has answered already."""
    await trio.lowlevel.checkpoint()
