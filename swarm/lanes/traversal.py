"""How two nodes of which neither can be dialled come by lanes: at a third, or through holes in both their routers.

A lane through a third comes first, so nobody waits. Then the side with the lower PeerId, and only it, tries for holes
(`shoal.swarm.reaching.punching`); the lane that comes up through them takes the other's place. A lane through holes is
a lane like any other: who offered it is its dialler, whatever TCP makes of two that connect at once. Where no third is
left, holes are all there is: the lower tries for them when it wants a lane, and when the higher summons it.
"""

from __future__ import annotations

import logging
from functools import partial

import trio

from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.swarm.lanes.dial import LaneDialler
from shoal.swarm.lanes.listener import LaneListener
from shoal.swarm.lanes.pairs import Jobs
from shoal.swarm.lanes.seal import LaneAnswer, LaneOffer, LanePunch, LaneVia, encode_handshake

logger = logging.getLogger(__name__)


class LaneTraversal:
    """The meetings of one node. `jobs` run in its pool."""

    def __init__(self, *, me: PeerId, dialler: LaneDialler, listener: LaneListener, jobs: Jobs) -> None:
        self._me = me
        self._dialler = dialler
        self._listener = listener
        self._jobs = jobs

    def begin(self, via: LaneVia) -> None:
        """Go where another wants to meet this node."""
        self._jobs.send_nowait(partial(self._go, via))

    async def _go(self, via: LaneVia) -> None:
        try:
            stream = await self._dialler.meet(via)
        except (NetworkError, trio.BrokenResourceError) as error:
            logger.debug("%s", error)
        else:
            await self._listener.meet(stream)

    def relayed(self, peer: PeerId, lanes: int) -> None:
        """A lane to `peer` came up through a third: try for a straight one, if that is for this node to do."""
        if self._me < peer:
            self._jobs.send_nowait(partial(self._dialler.punch, peer, lanes))

    async def answer(self, peer: PeerId, offer: LaneOffer, punch: LanePunch) -> bytes:
        """What this node answers to an offer to make holes, which it makes when that is sent.

        Raises RemoteError if the offer was not the peer's to make, NetworkError if nothing comes of it.
        """
        if peer > self._me:
            raise RemoteError("offers holes, which is for the lower PeerId to do", peer=peer)
        agree, agreed = trio.open_memory_channel[LaneAnswer](1)
        self._jobs.send_nowait(partial(self._make_hole, peer, offer, punch, agree))
        try:
            return encode_handshake(await agreed.receive())
        except trio.EndOfChannel:
            raise NetworkError("no hole is made from here now") from None

    async def _make_hole(
        self, peer: PeerId, offer: LaneOffer, punch: LanePunch, agree: trio.MemorySendChannel[LaneAnswer]
    ) -> None:
        puncher = self._dialler.puncher
        async with agree:  # who waits for it hears that nothing comes
            try:
                if puncher is None:
                    raise NetworkError("this node makes no holes")
                async with puncher.answering(peer, PeerId(punch.relay), punch.address) as port:
                    answer = self._listener.accept(peer, offer, (port.address,))
                    agree.send_nowait(answer)
                    await self._listener.meet(await port.meet())
            except (NetworkError, RemoteError, trio.BrokenResourceError) as error:
                logger.info("no hole to %s: %s", peer, error)
