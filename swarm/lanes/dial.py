"""The dialler's side of a lane's beginning: to the peer itself, or to a third at which the two meet."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.swarm.lanes.hello import HELLO_WIRE_BYTES, open_hello, receive_exactly, seal_hello
from shoal.swarm.lanes.listener import Adopt
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
from shoal.swarm.questions import REQUEST_DEADLINE_S
from shoal.swarm.reaching.punching import Puncher, Unanswered
from shoal.swarm.reaching.reach import RELAYS_TRIED_LIMIT, Everywhere, Reach

CONNECT_DEADLINE_S = 5.0
CONNECT_STAGGER_S = 0.25
HELLO_DEADLINE_S = 5.0

Request = Callable[[PeerId, bytes], Awaitable[bytes]]

logger = logging.getLogger(__name__)


class LaneDialler:
    """Brings up the lanes that one node dials. `reach` says where it may dial, and what comes next."""

    def __init__(self, *, me: PeerId, swarm_id: bytes, request: Request, adopt: Adopt) -> None:
        self.reach = Reach(me, Everywhere())
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
            answer, keys = await self.agree(peer, lanes)
            allowed = [text for text in answer.addresses if self.reach.facts.may_dial(peer, parse_address(text)[0])]
            connected = await _connect([text for text in allowed if text not in failed])
            if connected is None:
                break
            address, stream = connected
            try:
                await self.introduce(stream, keys)
                return
            except (trio.TooSlowError, trio.BrokenResourceError, RemoteError) as error:
                # Not held against the peer: a private address may be another machine's on this network.
                logger.debug("%s at %s: %r", peer, address, error)
                failed.add(address)
        raise NetworkError(f"{peer} cannot be reached at {', '.join(answer.addresses)}")

    async def agree(
        self, peer: PeerId, lanes: int, *, via: LaneVia | None = None, punch: LanePunch | None = None
    ) -> tuple[LaneAnswer, LaneKeys]:
        """Offer one lane: what the peer answers, and the keys. Raises NetworkError, RemoteError."""
        proposal = LaneProposal(me=self._me, peer=peer, swarm_id=self._swarm_id, lanes=lanes, via=via, punch=punch)
        answer = decode_answer(await self._request(peer, encode_handshake(proposal.offer)), peer=peer)
        return answer, proposal.keys(answer)

    async def dial_through(self, peer: PeerId, lanes: int) -> None:
        """Bring up one lane through the first third that has a way. Raises NetworkError, RemoteError."""
        reason: Exception | str = "no member that relays is linked"
        for relay in self.reach.facts.relays(peer)[:RELAYS_TRIED_LIMIT]:
            try:
                await self._dial_through(relay, peer, lanes)
                return
            except (NetworkError, trio.TooSlowError, trio.BrokenResourceError) as error:
                logger.debug("through %s: %r", relay, error)
                reason = error
        raise NetworkError(f"no lane to {peer} through others: {reason}")

    async def _dial_through(self, relay: PeerId, peer: PeerId, lanes: int) -> None:
        way = await self.reach.facts.way(relay, peer)
        _, keys = await self.agree(peer, lanes, via=LaneVia(relay=relay, ticket=way.far))
        await self.introduce(await self._arrive(way.addresses, way.near), keys)

    async def punch(self, peer: PeerId, lanes: int) -> None:
        """Bring up one lane through holes in both routers, if that may be tried now."""
        if self.puncher is not None:
            hole = _LaneHole(self, peer, lanes)
            await self.puncher.begin(peer, hole.offer, hole.take)

    async def punch_alone(self, peer: PeerId, lanes: int) -> None:
        """The same with nobody's help, where nobody is left. Raises NetworkError, RemoteError."""
        if self.puncher is None:
            raise NetworkError("this node makes no holes")
        hole = _LaneHole(self, peer, lanes)
        await self.puncher.begin_alone(peer, hole.offer, hole.take)

    async def meet(self, via: LaneVia) -> trio.SocketStream:
        """A connection to where another wants to meet this node. Raises NetworkError."""
        return await self._arrive(self.reach.facts.addresses_of(PeerId(via.relay)), via.ticket)

    async def _arrive(self, addresses: tuple[str, ...], ticket: bytes) -> trio.SocketStream:
        connected = await _connect(list(addresses))
        if connected is None:
            raise NetworkError(f"cannot connect to the lanes of a relay at {', '.join(addresses) or 'no address'}")
        stream = connected[1]
        try:
            await stream.send_all(ticket)
        except BaseException:
            stream.socket.close()
            raise
        return stream

    async def introduce(self, stream: trio.SocketStream, keys: LaneKeys) -> None:
        """Make a lane of a connection, or close it.

        Raises TooSlowError, BrokenResourceError, or RemoteError for a hello that is none.
        """
        sealer, opener = Sealer(keys.send_key), Opener(keys.receive_key, peer=keys.peer)
        try:
            with trio.fail_after(HELLO_DEADLINE_S):
                await stream.send_all(keys.lane_id + seal_hello(sealer, keys))
                open_hello(opener, keys, await receive_exactly(stream, HELLO_WIRE_BYTES))
                self._adopt(stream, keys, sealer, opener, dialled=True)
        finally:
            await trio.aclose_forcefully(stream)  # no effect on a socket that a lane has taken


class _LaneHole:
    """One lane through holes: how it is offered, and what becomes of the connection."""

    def __init__(self, dialler: LaneDialler, peer: PeerId, lanes: int) -> None:
        self._dialler, self._peer, self._lanes = dialler, peer, lanes
        self._keys: LaneKeys | None = None

    async def offer(self, relay: PeerId, address: str) -> str:
        punch = LanePunch(relay=relay, address=address)
        try:
            with trio.fail_after(REQUEST_DEADLINE_S):  # a port is kept open meanwhile
                answer, self._keys = await self._dialler.agree(self._peer, self._lanes, punch=punch)
        except (NetworkError, trio.TooSlowError) as error:
            raise Unanswered(str(error) or f"nothing from {self._peer} within {REQUEST_DEADLINE_S:g} s") from error
        return answer.addresses[0]

    async def take(self, stream: trio.SocketStream) -> None:
        assert self._keys is not None, "a hole is made after it was agreed on"
        await self._dialler.introduce(stream, self._keys)


async def _connect(addresses: list[str]) -> tuple[str, trio.SocketStream] | None:
    """The first address that takes a TCP connection, tried at most CONNECT_STAGGER_S apart; or None.

    Cancellation: no connection is left open.
    """
    winner: list[tuple[str, trio.SocketStream]] = []

    async def attempt(address: str, failed: trio.Event, scope: trio.CancelScope) -> None:
        host, port = parse_address(address)
        try:
            stream = await trio.open_tcp_stream(host, port)
        except (OSError, UnicodeError):  # a name that no resolver takes is the peer's choice too
            failed.set()
            return
        winner.append((address, stream))
        scope.cancel()

    try:
        with trio.move_on_after(CONNECT_DEADLINE_S):
            async with trio.open_nursery() as nursery:
                for address in addresses:
                    failed = trio.Event()
                    nursery.start_soon(attempt, address, failed, nursery.cancel_scope)
                    with trio.move_on_after(CONNECT_STAGGER_S):
                        await failed.wait()
    except BaseException:
        for _, stream in winner:
            stream.socket.close()
        raise
    for _, stream in winner[1:]:
        stream.socket.close()
    return winner[0] if winner else None
