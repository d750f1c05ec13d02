"""Requests about lanes over the control connection: for a lane, and to share memory on one machine.

    LanePool ─► LaneOffer, LaneSummons ──/shoal/lane/1──► the peer's pool: keys, addresses
                LaneAnswer ◄────────────────

    a lane's sending thread ─► SharedOffer ──/shoal/share/1──► the peer's lane of that id: takes it, or does not
                               SharedAnswer ◄────────────────

A node that does not know the second name refuses the stream, and the lane goes on over its connection.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Final

import trio

from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Message
from shoal.swarm.host import Host
from shoal.swarm.lanes.lane import Lane
from shoal.swarm.lanes.pool import LanePool
from shoal.swarm.lanes.shared import SharedOffer
from shoal.swarm.questions import REQUEST_DEADLINE_S, answer, ask, hear
from shoal.swarm.streams import MessageStream

LANE_PROTOCOL: Final = "/shoal/lane/1"
LANE_REQUEST_DEADLINE_S: Final = 30.0
"""Whoever wants a lane says for how long, and gives up then. To ask again sooner is in vain where the peer has too much
to do: whatever else may lead to it begins with another question over the same connection."""
REQUEST_LIMIT_BYTES: Final = 64 << 10
"""Of what is asked for a lane, and of the answer."""
SHARE_PROTOCOL: Final = "/shoal/share/1"
MESSAGE_LIMIT_BYTES: Final = 256
WAITING_LIMIT: Final = 256

logger = logging.getLogger(__name__)


class SharedAnswer(Message, frozen=True, kw_only=True):
    """Answer to an offer of shared memory: whether it was taken."""

    taken: bool


async def request_lane(host: Host, peer: PeerId, request: bytes) -> bytes:
    """The answer of the pool of `peer` to what this node's asks. Raises NetworkError."""
    return await host.request(
        peer, LANE_PROTOCOL, request, deadline_s=LANE_REQUEST_DEADLINE_S, limit_bytes=REQUEST_LIMIT_BYTES
    )


class LaneRequests:
    """Both ends of what lanes ask, but that a pool asks by itself; `run` it. linked: who may ask."""

    def __init__(self, host: Host, lanes: LanePool, linked: Callable[[], Collection[PeerId]]) -> None:
        self._host = host
        self._lanes = lanes
        self._linked = linked
        self._waiting, self._to_send = trio.open_memory_channel[tuple[Lane, SharedOffer]](WAITING_LIMIT)
        self._trio: trio.lowlevel.TrioToken | None = None
        lanes.share = self._share
        host.serve(LANE_PROTOCOL, self._serve_lane)
        host.serve(SHARE_PROTOCOL, self._serve_memory)

    async def run(self) -> None:
        """Tell peers of what lanes offer, until cancelled."""
        self._trio = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as nursery:
            async for lane, offer in self._to_send:
                nursery.start_soon(self._offer, lane, offer)

    def _share(self, lane: Lane, offer: SharedOffer) -> None:
        """Called in lanes' threads."""
        if self._trio is None:
            lane.answered(taken=False)
            return
        try:
            self._trio.run_sync_soon(self._put, lane, offer)
        except trio.RunFinishedError:
            lane.answered(taken=False)

    def _put(self, lane: Lane, offer: SharedOffer) -> None:
        try:
            self._waiting.send_nowait((lane, offer))
        except (trio.WouldBlock, trio.BrokenResourceError):
            lane.answered(taken=False)

    async def _offer(self, lane: Lane, offer: SharedOffer) -> None:
        taken = False
        try:
            reply: SharedAnswer = await ask(
                self._host, lane.peer, SHARE_PROTOCOL, offer, SharedAnswer, limit_bytes=MESSAGE_LIMIT_BYTES
            )
            taken = reply.taken
        except (NetworkError, RemoteError) as error:
            logger.debug("%s shares no memory: %s", lane.peer, error)
        finally:
            lane.answered(taken)

    async def _serve_lane(self, stream: MessageStream) -> None:
        """Answer one request. Raises RemoteError for a peer that may not ask, and as `LanePool.answer` does."""
        if stream.peer not in self._linked():
            raise RemoteError("wants something without having been admitted", peer=stream.peer)
        request = await stream.receive(deadline_s=REQUEST_DEADLINE_S)
        await stream.send(await self._lanes.answer(stream.peer, request), deadline_s=REQUEST_DEADLINE_S)
        await stream.aclose()

    async def _serve_memory(self, stream: MessageStream) -> None:
        offer: SharedOffer = await hear(stream, SharedOffer, limit_bytes=MESSAGE_LIMIT_BYTES)
        await answer(stream, SharedAnswer(taken=stream.peer in self._linked() and self._take(stream.peer, offer)))

    def _take(self, peer: PeerId, offer: SharedOffer) -> bool:
        lane = next((lane for lane in self._lanes.lanes_of(peer) if lane.id == offer.lane), None)
        if lane is None:
            return False
        try:
            lane.take_memory(offer)
        except NetworkError as error:  # two containers of one address, say
            logger.debug("no memory is shared with %s: %s", peer, error)
            return False
        return True
