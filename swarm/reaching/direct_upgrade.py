"""Relayed control connections made straight: two nodes of which neither can be dialled connect through holes.

    A: port ──call──► R, which says where it sees it         over the relayed connection, which proves who is who:
    A ── Straighten(R, address) ──► B                        B has a port of its own sighted by the same R
    A ◄──── Straight(address) ───── B
    A: port ──SYN──►┐  ┌◄──SYN── B: port                     `shoal.swarm.reaching.punching`
    A ═══════ Noise and yamux, as over any connection ═══════ B

The lower PeerId begins and is the dialler, whatever TCP makes of two that connect at once. The new connection takes the
relayed one's place when it is up, and not before: where no hole leads through, nothing changes. libp2p's own protocol
for this (DCUtR) is not used: in it each dials whatever addresses the other names, and here a third has to confirm them.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import trio

from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Message, Peer
from shoal.protocol.peering import Refusal
from shoal.protocol.wire import canonical, decode
from shoal.swarm.host import Host
from shoal.swarm.reaching.observed_addresses import Address
from shoal.swarm.reaching.punching import CALL_DEADLINE_S, Puncher
from shoal.swarm.streams import MessageStream

DIRECT_UPGRADE_PROTOCOL = "/shoal/straight/1"
MESSAGE_LIMIT_BYTES = 256
REQUEST_DEADLINE_S = 3.0
ANSWER_DEADLINE_S = 3 * CALL_DEADLINE_S
"""In which the other has a port of its own sighted and asks the relay about this one's."""
LOOK_PERIOD_S = 15.0
JOBS_LIMIT = 16

logger = logging.getLogger(__name__)


class Straighten(Message, frozen=True, kw_only=True):
    """Offers to meet: this node's port is where `relay` saw it, at 'host:port'."""

    relay: Peer
    address: Address


class Straight(Message, frozen=True, kw_only=True):
    """Agrees, and says where the same relay saw the port of who agrees."""

    address: Address


DirectUpgradeReply = Straight | Refusal


class DirectUpgrade:
    """Both ends of it, for one node; `run` it. relayed: the members that it is linked with through a relay."""

    def __init__(self, host: Host, puncher: Puncher, relayed: Callable[[], Sequence[PeerId]]) -> None:
        self._host = host
        self._puncher = puncher
        self._relayed = relayed
        self._jobs, self._job_queue = trio.open_memory_channel[Callable[[], Awaitable[None]]](JOBS_LIMIT)
        self._look = trio.Event()
        host.serve(DIRECT_UPGRADE_PROTOCOL, self._serve)

    def look(self) -> None:
        """Links have changed."""
        self._look.set()

    async def run(self) -> None:
        """Make straight what can be, until cancelled. How often it is tried is the puncher's to bound."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._answer_all, nursery)
            while True:
                self._look = trio.Event()
                for peer in self._relayed():
                    if self._host.peer_id < peer and (relay := self._puncher.relay(peer)) is not None:
                        await self._begin(peer, relay)
                with trio.move_on_after(LOOK_PERIOD_S):
                    await self._look.wait()

    async def _begin(self, peer: PeerId, relay: PeerId) -> None:
        try:
            async with self._puncher.port(relay) as port:
                reply = await self._ask(peer, Straighten(relay=relay, address=port.address))
                await self._puncher.aim(port, relay, peer, reply.address)
                try:
                    await self._host.take_over(await port.meet(), peer, dialled=True)
                except NetworkError:
                    self._puncher.failed(peer)
                    raise
        except (NetworkError, RemoteError) as error:
            logger.info("the connection to %s stays relayed: %s", peer, error)

    async def _ask(self, peer: PeerId, question: Straighten) -> Straight:
        data = await self._host.request(
            peer,
            DIRECT_UPGRADE_PROTOCOL,
            canonical(question),
            deadline_s=ANSWER_DEADLINE_S,
            limit_bytes=MESSAGE_LIMIT_BYTES,
        )
        reply: DirectUpgradeReply = decode(data, DirectUpgradeReply, peer=peer, limit_bytes=MESSAGE_LIMIT_BYTES)  # type: ignore[arg-type]
        if isinstance(reply, Refusal):
            raise NetworkError(f"{peer}: {reply.reason}")
        return reply

    async def _answer_all(self, nursery: trio.Nursery) -> None:
        """Not in the handlers: their streams end with the connection that is replaced."""
        async for job in self._job_queue:
            nursery.start_soon(job)

    async def _serve(self, stream: MessageStream) -> None:
        data = await stream.receive(deadline_s=REQUEST_DEADLINE_S)
        asked = decode(data, Straighten, peer=stream.peer, limit_bytes=MESSAGE_LIMIT_BYTES)
        if stream.peer > self._host.peer_id:
            raise RemoteError("begins to straighten, which is for the lower PeerId to do", peer=stream.peer)
        agree, agreed = trio.open_memory_channel[str](1)
        reply: DirectUpgradeReply = Refusal(reason="no hole is made from here now")
        if stream.peer in self._relayed():
            try:
                self._jobs.send_nowait(partial(self._answer, stream.peer, asked, agree))
                with trio.fail_after(ANSWER_DEADLINE_S):
                    reply = Straight(address=await agreed.receive())
            except (trio.WouldBlock, trio.EndOfChannel, trio.TooSlowError) as error:
                logger.debug("not straightened: %r", error)
        await stream.send(canonical(reply), deadline_s=REQUEST_DEADLINE_S)
        await stream.aclose()

    async def _answer(self, peer: PeerId, asked: Straighten, agree: trio.MemorySendChannel[str]) -> None:
        with agree:  # who waits for it hears that nothing comes
            try:
                async with self._puncher.answering(peer, PeerId(asked.relay), asked.address) as port:
                    agree.send_nowait(port.address)
                    await self._host.take_over(await port.meet(), peer, dialled=False)
            except (NetworkError, RemoteError) as error:
                logger.info("the connection to %s stays relayed: %s", peer, error)
