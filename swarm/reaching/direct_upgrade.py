"""Relayed control connections made direct: two nodes of which neither can be dialled connect through holes.

    A: port ──call──► R, which says where it sees it         over the relayed connection, which proves who is who:
    A ── Straighten(R, address) ──► B                        B has a port of its own sighted by the same R
    A ◄──── Straight(address) ───── B
    A: port ──SYN──►┐  ┌◄──SYN── B: port                     `shoal.swarm.reaching.punching`
    A ═══════ Noise and yamux, as over any connection ═══════ B

libp2p's own protocol for this (DCUtR) is not used: in it each dials whatever addresses the other names, and here a
third has to confirm them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import trio

from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Message, Peer
from shoal.protocol.peering import Refusal
from shoal.swarm.host import Host
from shoal.swarm.questions import answer, ask, hear
from shoal.swarm.reaching.observed_addresses import Address
from shoal.swarm.reaching.punching import ANSWER_DEADLINE_S, Puncher, Unanswered
from shoal.swarm.reaching.reach import LOOK_PERIOD_S
from shoal.swarm.streams import MessageStream

DIRECT_UPGRADE_PROTOCOL = "/shoal/straight/1"
MESSAGE_LIMIT_BYTES = 256

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
        self._look = trio.Event()
        host.serve(DIRECT_UPGRADE_PROTOCOL, self._serve)

    def look(self) -> None:
        """Links have changed."""
        self._look.set()

    async def run(self) -> None:
        """Make direct what can be, until cancelled."""
        while True:
            self._look = trio.Event()
            for peer in self._relayed():
                if self._puncher.reach.begins(peer):
                    await self.begin(peer)
            with trio.move_on_after(LOOK_PERIOD_S):
                await self._look.wait()

    async def begin(self, peer: PeerId) -> bool:
        """Try for a direct connection to `peer`, if that may be tried now; whether it is up."""
        take = partial(self._host.take_over, peer=peer, dialled=True)
        return await self._puncher.begin(peer, partial(self._offer, peer), take)

    async def _offer(self, peer: PeerId, relay: PeerId, address: str) -> str:
        try:
            reply: Straight = await ask(
                self._host,
                peer,
                DIRECT_UPGRADE_PROTOCOL,
                Straighten(relay=relay, address=address),
                Straight,
                limit_bytes=MESSAGE_LIMIT_BYTES,
                deadline_s=ANSWER_DEADLINE_S,
            )
        except NetworkError as error:
            raise Unanswered(str(error)) from error
        return reply.address

    async def _serve(self, stream: MessageStream) -> None:
        asked: Straighten = await hear(stream, Straighten, limit_bytes=MESSAGE_LIMIT_BYTES)
        await answer(stream, await self._answer(stream.peer, asked))

    async def _answer(self, peer: PeerId, asked: Straighten) -> DirectUpgradeReply:
        take = partial(self._host.take_over, peer=peer, dialled=False)
        try:
            if peer not in self._relayed():
                return Refusal(reason="no hole is made from here now")
            return await self._puncher.answer(
                peer, PeerId(asked.relay), asked.address, lambda address: Straight(address=address), take
            )
        except NetworkError as error:
            logger.debug("not direct: %s", error)
            return Refusal(reason=str(error))
