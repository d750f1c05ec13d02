"""Asking others for announcements that gossip lost, and answering: carries out `shoal.protocol.offer_catch_up`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

import trio

from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.offer_catch_up import ANSWERS_PER_TURN, OfferCatchUp
from shoal.protocol.rollouts import (
    BATCH_LIMIT_BYTES,
    AnnouncementBatch,
    CatchUpRequest,
    RolloutError,
    decode_batch,
    decode_catch_up,
    encode_batch,
)
from shoal.protocol.wire import canonical
from shoal.swarm.host import Host
from shoal.swarm.streams import MessageStream

logger = logging.getLogger(__name__)

CATCH_UP_PROTOCOL = "/shoal/rollout-offers/1"
DEADLINE_S = 10.0


class CatchUp:
    """Both sides of asking for announcements that did not arrive."""

    def __init__(
        self,
        *,
        host: Host,
        protocol: str,
        boot: int,
        peers: Callable[[], Collection[PeerId]],
        missing: Callable[[PeerId], CatchUpRequest],
        take: Callable[[PeerId, AnnouncementBatch], int],
        blame: Callable[[PeerId, RolloutError], None],
    ) -> None:
        """`peers`: who may be asked and may ask. `take`: what to do with an answer; returns how many of it are news."""
        self._host = host
        self._protocol = protocol
        self._peers = peers
        self._take = take
        self._blame = blame
        self._machine = OfferCatchUp(boot=boot, missing=missing)

    def note(self, sequence: int, sealed: bytes, round_number: int) -> None:
        """This node publishes this announcement of its round."""
        self._machine.note(sequence, sealed, round_number, trio.current_time())

    def expire(self, before_round: int) -> None:
        """Forget what was announced before this round."""
        self._machine.expire(before_round)

    async def run(self) -> None:
        """Answer, and ask a few peers each period, until cancelled."""
        self._host.serve(self._protocol, self._answer, limit_bytes=BATCH_LIMIT_BYTES)
        while True:
            await trio.sleep(self._machine.period_s)
            async with trio.open_nursery() as nursery:
                for peer in self._machine.begin_turn(self._host.connected() & frozenset(self._peers())):
                    nursery.start_soon(self._ask, peer)
            self._machine.end_turn()

    async def _ask(self, peer: PeerId) -> None:
        try:
            for _ in range(ANSWERS_PER_TURN):
                request = canonical(self._machine.request(peer))
                answer = await self._host.request(
                    peer, self._protocol, request, deadline_s=DEADLINE_S, limit_bytes=BATCH_LIMIT_BYTES
                )
                batch = decode_batch(answer, peer=peer)
                if not self._machine.came(batch, self._take(peer, batch)):
                    return
        except RolloutError as error:
            self._blame(peer, error)
        except (NetworkError, RemoteError) as error:
            logger.debug("announcements that may be missing: %s", error)

    async def _answer(self, stream: MessageStream) -> None:
        data = await stream.receive(deadline_s=DEADLINE_S)
        try:
            request = decode_catch_up(data, peer=stream.peer)
        except RolloutError as error:
            self._blame(stream.peer, error)
            raise
        is_partner = stream.peer in self._peers()
        batch = self._machine.answer(request, trio.current_time()) if is_partner else AnnouncementBatch()
        await stream.send(encode_batch(batch), deadline_s=DEADLINE_S)
