"""The dialler's side of a lane's beginning: to the peer itself, or to a third at which the two meet."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.swarm.lanes.connect import connect
from shoal.swarm.lanes.hello import HELLO_WIRE_BYTES, open_hello, receive_exactly, seal_hello
from shoal.swarm.lanes.listener import Adopt
from shoal.swarm.lanes.reach import Everywhere, LaneReach
from shoal.swarm.lanes.seal import (
    ADDRESS_LIMIT,
    LaneAnswer,
    LaneKeys,
    LaneProposal,
    LanePunch,
    LaneVia,
    Opener,
    Sealer,
    decode_answer,
    encode_handshake,
    parse_address,
)
from shoal.swarm.reaching.punching import Puncher, PunchPort

HELLO_DEADLINE_S = 5.0
RELAYS_TRIED_LIMIT = 3
HOLE_OFFERS = 2
"""So often a peer is asked for a hole that says nothing about it."""

Request = Callable[[PeerId, bytes], Awaitable[bytes]]

logger = logging.getLogger(__name__)


class _UnansweredOffer(NetworkError):
    """The peer did not say whether it makes a hole: it was not asked, does not want to, or the connection went."""


class LaneDialler:
    """Brings up the lanes that one node dials. `reach` says where it may dial."""

    def __init__(self, *, me: PeerId, swarm_id: bytes, request: Request, adopt: Adopt) -> None:
        self.reach: LaneReach = Everywhere()
        self.puncher: Puncher | None = None
        self._me = me
        self._swarm_id = swarm_id
        self._request = request
        self._adopt = adopt

    async def dial(self, peer: PeerId, lanes: int) -> None:
        """Bring up one lane. Each try has its own keys and takes the addresses that failed no try before.

        Raises NetworkError, RemoteError.
        """
        failed: set[str] = set()
        for _ in range(ADDRESS_LIMIT):
            proposal = LaneProposal(me=self._me, peer=peer, swarm_id=self._swarm_id, lanes=lanes)
            reply = await self._request(peer, encode_handshake(proposal.offer))
            answer = decode_answer(reply, peer=peer)
            keys = proposal.keys(answer)
            allowed = [text for text in answer.addresses if self.reach.may_dial(peer, parse_address(text)[0])]
            connected = await connect([text for text in allowed if text not in failed])
            if connected is None:
                break
            address, stream = connected
            try:
                with trio.fail_after(HELLO_DEADLINE_S):
                    await self._introduce(stream, keys)
                return
            except (trio.TooSlowError, trio.BrokenResourceError, RemoteError) as error:
                # Not held against the peer: a private address may be another machine's on this network.
                logger.debug("%s at %s: %r", peer, address, error)
                failed.add(address)
            finally:
                await trio.aclose_forcefully(stream)
        raise NetworkError(f"{peer} cannot be reached at {', '.join(answer.addresses)}")

    async def dial_through(self, peer: PeerId, lanes: int) -> None:
        """Bring up one lane through the first third that has a way. Raises NetworkError, RemoteError."""
        reason: Exception | str = "no member that relays is linked"
        for relay in self.reach.relays(peer)[:RELAYS_TRIED_LIMIT]:
            try:
                await self._dial_through(relay, peer, lanes)
                return
            except (NetworkError, trio.TooSlowError, trio.BrokenResourceError) as error:
                logger.debug("through %s: %r", relay, error)
                reason = error
        raise NetworkError(f"no lane to {peer} through others: {reason}")

    async def _dial_through(self, relay: PeerId, peer: PeerId, lanes: int) -> None:
        way = await self.reach.way(relay, peer)
        via = LaneVia(relay=relay, ticket=way.far)
        proposal = LaneProposal(me=self._me, peer=peer, swarm_id=self._swarm_id, lanes=lanes, via=via)
        reply = await self._request(peer, encode_handshake(proposal.offer))
        keys = proposal.keys(decode_answer(reply, peer=peer))
        stream = await self._arrive(way.addresses, way.near)
        try:
            with trio.fail_after(HELLO_DEADLINE_S):
                await self._introduce(stream, keys)
        finally:
            await trio.aclose_forcefully(stream)  # no effect on a socket that a lane has taken

    async def punch(self, peer: PeerId, lanes: int) -> bool:
        """Bring up one lane through holes in both routers, if that may be tried now; whether it came up.

        What the peer does not answer is asked once more, and is no reason to leave it at that: the connection may just
        have given way to another.
        """
        for _ in range(HOLE_OFFERS):
            puncher = self.puncher
            relay = None if puncher is None else puncher.relay(peer)
            if puncher is None or relay is None:
                return False
            try:
                await self._punch(puncher, relay, peer, lanes)
            except _UnansweredOffer as error:
                logger.info("no hole to %s: %s", peer, error)
            except (NetworkError, RemoteError, trio.TooSlowError, trio.BrokenResourceError) as error:
                logger.info("no hole to %s: %s", peer, error)
                puncher.failed(peer)
                return False
            else:
                return True
        return False

    async def _punch(self, puncher: Puncher, relay: PeerId, peer: PeerId, lanes: int) -> None:
        async with puncher.port(relay) as port:
            answer, keys = await self._offer_hole(LanePunch(relay=relay, address=port.address), peer, lanes)
            await puncher.aim(port, relay, peer, answer.addresses[0])
            await self._meet_and_introduce(port, keys)

    async def punch_alone(self, peer: PeerId, lanes: int) -> None:
        """The same with nobody's help, where nobody is left. Raises NetworkError, RemoteError."""
        if self.puncher is None:
            raise NetworkError("this node makes no holes")
        try:
            async with self.puncher.port_alone(peer) as port:
                answer, keys = await self._offer_hole(LanePunch(relay=peer, address=port.address), peer, lanes)
                self.puncher.aim_alone(port, answer.addresses[0])
                await self._meet_and_introduce(port, keys)
        except (trio.TooSlowError, trio.BrokenResourceError) as error:
            raise NetworkError(f"nobody answers through the hole to {peer}") from error

    def is_alone(self, peer: PeerId) -> bool:
        """Whether lanes to `peer` come through holes that the two make by themselves, or not at all."""
        return self.puncher is not None and self.puncher.is_alone(peer)

    async def _offer_hole(self, punch: LanePunch, peer: PeerId, lanes: int) -> tuple[LaneAnswer, LaneKeys]:
        proposal = LaneProposal(me=self._me, peer=peer, swarm_id=self._swarm_id, lanes=lanes, punch=punch)
        try:
            reply = await self._request(peer, encode_handshake(proposal.offer))
        except NetworkError as error:
            raise _UnansweredOffer(str(error)) from error
        answer = decode_answer(reply, peer=peer)
        return answer, proposal.keys(answer)

    async def _meet_and_introduce(self, port: PunchPort, keys: LaneKeys) -> None:
        stream = await port.meet()
        try:
            with trio.fail_after(HELLO_DEADLINE_S):
                await self._introduce(stream, keys)
        finally:
            await trio.aclose_forcefully(stream)

    async def meet(self, via: LaneVia) -> trio.SocketStream:
        """A connection to where another wants to meet this node. Raises NetworkError."""
        return await self._arrive(self.reach.addresses_of(PeerId(via.relay)), via.ticket)

    async def _arrive(self, addresses: tuple[str, ...], ticket: bytes) -> trio.SocketStream:
        connected = await connect(list(addresses))
        if connected is None:
            raise NetworkError(f"cannot connect to the lanes of a relay at {', '.join(addresses) or 'no address'}")
        stream = connected[1]
        try:
            await stream.send_all(ticket)
        except BaseException:
            stream.socket.close()
            raise
        return stream

    async def _introduce(self, stream: trio.SocketStream, keys: LaneKeys) -> None:
        sealer, opener = Sealer(keys.send_key), Opener(keys.receive_key, peer=keys.peer)
        await stream.send_all(keys.lane_id + seal_hello(sealer, keys))
        open_hello(opener, keys, await receive_exactly(stream, HELLO_WIRE_BYTES))
        self._adopt(stream, keys, sealer, opener, dialled=True)
