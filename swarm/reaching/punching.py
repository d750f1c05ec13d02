"""Holes in two routers at once: a TCP connection between two nodes of which neither can be dialled.

    A: port p ──call──► R        R says where it sees p (see `observed_addresses`); the same for B's port q
    A: p ──SYN──►┐   ┌◄──SYN── B: q        each SYN lets the other's in at its own router, as an answer
                 └─╳─┘                     TCP's simultaneous open, or an accepted call: one connection either way

It works where a router gives a port the same number outside whomever it talks to. Where it does not, both give up
after PUNCH_DEADLINE_S, and what there is goes on.

Where no third is left and the two have a connection through holes already, lanes are made without one: each names a
port of its own that nobody has seen, and dials that of the other at the host at the other end of their connection. It
works where both routers leave ports their numbers, as most do for a port that nobody else behind them has. Where they
do not, both nodes say so.

Nobody is sent against a third party: tried is only an address that the peer itself names over its authenticated
connection *and* a third saw it at, with a host at which the members that dialled back see the peer's side too (a node
names no other); or, without a third, a port of the very host that the peer is connected from. A third that lies for the
peer has it try any port from PORT_LEAST on, but of no host that means a machine less far than where that third is
connected: no loopback unless it is on this machine, nothing in this network unless it is in it. No byte is sent before
a connection is up, and then the sealed hello of a lane alone, or the greeting of a handshake that proves who is who
(`shoal.swarm.reaching.direct_upgrade`). How often a node tries, or lets itself be asked to, is `Reach`'s to say
(`shoal.swarm.reaching.reach`). The lower PeerId begins and is the dialler, whatever TCP makes of two that connect at
once. What comes up takes the place of what was relayed; where no hole leads through, nothing changes.

Source: RFC 9293, section 3.5 (simultaneous open); RFC 5382, sections 4.1 and 4.2 (what routers shall do for TCP).
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TypeVar

import trio

from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.swarm.host import Host
from shoal.swarm.lanes.seal import format_address, parse_address
from shoal.swarm.reaching.networks import reach_of
from shoal.swarm.reaching.observed_addresses import ask_seen, sight
from shoal.swarm.reaching.reach import HOLE_OFFERS, Reach

PUNCH_DEADLINE_S = 3.0
"""A lost SYN is sent again after one second."""
CALL_DEADLINE_S = 3.0
DIALS_LIMIT = 8
DIAL_PAUSE_S = 0.3
"""Between two dials from one port, where a router or its node refuses."""
DELAY_LIMIT_S = 1.0
BACKLOG = 4
PORT_LEAST = 1024
"""Services have those below; nobody calls from them, nor by a router (RFC 6056, section 3.2; RFC 4787, REQ-3)."""
ANSWER_DEADLINE_S = 3 * CALL_DEADLINE_S
"""Time for the other to have a port of its own seen and ask the relay about this one's."""
JOBS_LIMIT = 64
"""Holes that others begin, at once."""

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Offer = Callable[[PeerId, str], Awaitable[str]]
"""Tells the peer who saw this node's port, and where, and returns what it says of its own; raises Unanswered."""
Take = Callable[[trio.SocketStream], Awaitable[None]]
"""Makes something of a connection, or closes it and raises."""


class Unanswered(NetworkError):
    """The peer did not say whether it makes a hole: it was not asked, does not want to, or the connection went."""


class PunchPort:
    """A local TCP port that calls, listens and dials at once; `close` it.

    address: where a third sees it. target: whom to dial, and when to begin, in seconds from the call of `meet`.
    """

    def __init__(self) -> None:
        self.address = ""
        self.target = ("", 0)
        self.delay_s = 0.0
        self._port = 0
        self._family = socket.AF_INET
        self._kept: list[trio.SocketStream] = []
        self._listener: trio.SocketListener | None = None

    async def call(self, addresses: tuple[str, ...], first: bytes) -> None:
        """Connect to the first of 'host:port' that answers and send this; the connection stays.

        Raises NetworkError.
        """
        for text in addresses:
            host, port = parse_address(text)
            self._family = socket.AF_INET6 if ":" in host else socket.AF_INET
            try:
                with trio.fail_after(CALL_DEADLINE_S):
                    self._kept.append(stream := await self._dial(host, port))
                    await stream.send_all(first)
                self._port = stream.socket.getsockname()[1]
                self._listener = self._listen()
                return
            except (OSError, trio.TooSlowError, trio.BrokenResourceError) as error:
                logger.debug("no call to %s: %r", text, error)
        raise NetworkError(f"nobody can be called at {', '.join(addresses) or 'no address'}")

    def open(self, target: str) -> int:
        """Listen at any port that is free, to dial and be dialled by this IP address; its number here.

        Raises NetworkError.
        """
        self._family = socket.AF_INET6 if ":" in target else socket.AF_INET
        try:
            self._listener = self._listen()
        except OSError as error:
            raise NetworkError(f"no port to make a hole from: {error}") from error
        self._port = int(self._listener.socket.getsockname()[1])
        return self._port

    async def meet(self) -> trio.SocketStream:
        """A connection with the target, which does the same, within PUNCH_DEADLINE_S. Raises NetworkError.

        Cancellation: no connection is left open, but for what `close` closes.
        """
        came: list[trio.SocketStream] = []
        try:
            with trio.move_on_after(self.delay_s + PUNCH_DEADLINE_S):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._accept, came, nursery.cancel_scope)
                    nursery.start_soon(self._keep_dialling, came, nursery.cancel_scope)
        except BaseException:
            for stream in came:
                stream.socket.close()
            raise
        for stream in came[1:]:
            stream.socket.close()
        if not came:
            raise NetworkError(f"no hole leads to {format_address(*self.target)}")
        return came[0]

    def close(self) -> None:
        """Close what is open at the port, but for what `meet` returned."""
        for stream in self._kept:
            stream.socket.close()
        if self._listener is not None:
            self._listener.socket.close()

    async def _keep_dialling(self, came: list[trio.SocketStream], scope: trio.CancelScope) -> None:
        await trio.sleep(self.delay_s)
        for _ in range(DIALS_LIMIT):
            try:
                came.append(await self._dial(*self.target))
            except OSError as error:  # refused; or the peer's own call is being accepted
                logger.debug("not through yet: %r", error)
                await trio.sleep(DIAL_PAUSE_S)
            else:
                scope.cancel()
                return

    async def _accept(self, came: list[trio.SocketStream], scope: trio.CancelScope) -> None:
        assert self._listener is not None, "a port listens once it has called, or was opened"
        while True:
            try:
                stream = await self._listener.accept()
            except OSError as error:  # it is reset already
                logger.debug("not accepted: %r", error)
                continue
            if _host_of(stream) == self.target[0]:
                came.append(stream)
                scope.cancel()
                return
            stream.socket.close()

    async def _dial(self, host: str, port: int) -> trio.SocketStream:
        made = self._bound()
        try:
            await made.connect((host, port))
        except BaseException:
            made.close()
            raise
        return trio.SocketStream(made)

    def _listen(self) -> trio.SocketListener:
        made = self._bound()
        made.listen(BACKLOG)
        return trio.SocketListener(made)

    def _bound(self) -> trio.socket.SocketType:
        """A socket at this port, beside the others there; at any port, while there is none. Raises OSError."""
        made = socket.socket(self._family, socket.SOCK_STREAM)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            made.bind(("", self._port))
        except BaseException:
            made.close()
            raise
        return trio.socket.from_stdlib_socket(made)


def _host_of(stream: trio.SocketStream) -> str:
    try:
        return str(stream.socket.getpeername()[0])
    except OSError:
        return ""


class Puncher:
    """Holes of one node, for lanes and connections alike; `run` it.

    reach: with whom, and how soon again. seen_at: the hosts at which members that dialled back see this node.
    """

    def __init__(self, host: Host, reach: Reach, seen_at: Callable[[], frozenset[str]]) -> None:
        self._host = host
        self.reach = reach
        self._seen_at = seen_at
        self._jobs, self._job_queue = trio.open_memory_channel[Callable[[], Awaitable[None]]](JOBS_LIMIT)

    async def run(self) -> None:
        """Make the holes that others begin, until cancelled.

        Not in the handlers of their streams: those end with a connection that is replaced.
        """
        async with trio.open_nursery() as nursery:
            async for job in self._job_queue:
                nursery.start_soon(job)

    # -- who begins ------------------------------------------------------------------------------------------

    async def begin(self, peer: PeerId, offer: Offer, take: Take) -> bool:
        """Make a hole, a third looking on, if that may be tried now; whether `take` had a connection through it.

        What the peer does not answer is asked once more, and is no reason to leave it at that: the connection may just
        have given way to another.
        """
        for _ in range(HOLE_OFFERS):
            relay = self.reach.onlooker(peer)
            if relay is None:
                return False
            try:
                async with self.port(relay) as port:
                    await self.aim(port, relay, peer, await offer(relay, port.address))
                    await take(await port.meet())
            except Unanswered as error:
                logger.debug("no hole to %s: %s", peer, error)
            except (NetworkError, RemoteError, trio.TooSlowError, trio.BrokenResourceError) as error:
                logger.debug("no hole to %s: %s", peer, error)
                self.reach.failed(peer)
                return False
            else:
                return True
        return False

    async def begin_alone(self, peer: PeerId, offer: Offer, take: Take) -> None:
        """The same with nobody's help, where nobody is left. Raises NetworkError, RemoteError."""
        try:
            async with self.port_alone(peer) as port:
                self.aim_alone(port, await offer(peer, port.address))
                await take(await port.meet())
        except (trio.TooSlowError, trio.BrokenResourceError) as error:
            raise NetworkError(f"nobody answers through the hole to {peer}") from error

    # -- who is asked ----------------------------------------------------------------------------------------

    async def answer(
        self, peer: PeerId, relay: PeerId, address: str, make: Callable[[str], Answer], take: Take
    ) -> Answer:
        """Return what `make` answers, given this port's observed address, to a peer that begins; then punch the hole.

        Raises RemoteError if that was not the peer's to begin, NetworkError if nothing comes of it.
        """
        if self.reach.begins(peer):
            raise RemoteError("offers holes, which is for the lower PeerId to do", peer=peer)
        agree, agreed = trio.open_memory_channel[Answer](1)
        try:
            self._jobs.send_nowait(partial(self._answer, peer, relay, address, make, take, agree))
            with trio.fail_after(ANSWER_DEADLINE_S):
                return await agreed.receive()
        except (trio.WouldBlock, trio.EndOfChannel, trio.TooSlowError):
            raise NetworkError("no hole is made from here now") from None

    async def _answer(
        self,
        peer: PeerId,
        relay: PeerId,
        address: str,
        make: Callable[[str], Answer],
        take: Take,
        agree: trio.MemorySendChannel[Answer],
    ) -> None:
        with agree:  # who waits for it hears that nothing comes
            try:
                async with self.answering(peer, relay, address) as port:
                    agree.send_nowait(make(port.address))
                    await take(await port.meet())
            except (NetworkError, RemoteError, trio.BrokenResourceError) as error:
                logger.debug("no hole to %s: %s", peer, error)

    # -- ports -----------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def port(self, relay: PeerId) -> AsyncIterator[PunchPort]:
        """A port of this node as `relay` sees it, for the block. Raises NetworkError.

        So it does where the relay sees it at another host than the members that dialled back.
        """
        addresses = self.reach.facts.addresses_of(relay)
        if not addresses:
            raise NetworkError(f"{relay} is not linked, or does not relay")
        port = PunchPort()
        try:
            port.address = await sight(self._host, relay, addresses, port)
            if _parsed(port.address)[0] not in self._seen_at():
                raise NetworkError(f"{relay} sees this node at {port.address}, others do not")
            yield port
        finally:
            port.close()

    @contextlib.asynccontextmanager
    async def port_alone(self, peer: PeerId) -> AsyncIterator[PunchPort]:
        """A port of this node that nobody has seen, for the block, to meet `peer` with. Raises NetworkError.

        For who begins and who answers alike, so that neither is made to dial too often.
        """
        host = self._host.host_of(peer)
        if host is None or not self.reach.is_alone(peer):
            raise NetworkError(f"holes to {peer} are not made without a third here")
        if not self.reach.may_punch(peer, alone=True):
            raise NetworkError(f"holes to {peer} were tried too often for now")
        port = PunchPort()
        try:
            port.target = (str(ipaddress.ip_address(host)), 0)
            own = min((seen for seen in self._seen_at() if (":" in seen) == (":" in host)), default=host)
            port.address = format_address(own, port.open(host))
            yield port
        except (NetworkError, RemoteError, trio.TooSlowError, trio.BrokenResourceError):
            if port.target[1]:  # else nothing was tried: the peer does not want to, or not now
                self.reach.failed_alone(peer)
            raise
        else:
            self.reach.found_alone(peer)
        finally:
            port.close()

    def aim_alone(self, port: PunchPort, address: str) -> None:
        """Have the port dial the one that the peer named; of what it says its host is, nothing counts.

        Raises NetworkError.
        """
        port.target = (port.target[0], _parsed(address)[1])

    async def aim(self, port: PunchPort, relay: PeerId, peer: PeerId, address: str) -> None:
        """Have the port dial a peer that says it is seen there. Raises NetworkError unless `relay` says so too."""
        target, connected_at = _parsed(address), self._host.host_of(relay)
        if connected_at is None:
            raise NetworkError(f"{relay} is not connected without a relay itself")
        if reach_of(target[0]) < max(map(reach_of, (connected_at, _parsed(port.address)[0]))):
            raise NetworkError(f"{peer} names {address}, which is another machine's here")
        if target[1] < PORT_LEAST:
            raise NetworkError(f"{peer} names {address}, where no router has a port of those that it lets out")
        await ask_seen(self._host, relay, peer, address)
        port.target = target

    @contextlib.asynccontextmanager
    async def answering(self, peer: PeerId, relay: PeerId, address: str) -> AsyncIterator[PunchPort]:
        """The port of who was asked by `peer`, seen by `relay` at `address`, aimed. Raises NetworkError.

        The other begins when it has this port's address and `relay` has confirmed it: a round trip from here to it
        is half for its answer and half for that question, where the relay is half-way. If this node itself is named as
        the relay, there is none, and nobody to ask.
        """
        rtt_s = min(self._host.rtt_s(peer) or 0.0, DELAY_LIMIT_S)
        if relay == self._host.peer_id:
            async with self.port_alone(peer) as port:
                self.aim_alone(port, address)
                port.delay_s = rtt_s / 2
                yield port
            return
        if not self.reach.may_punch(peer):
            raise NetworkError(f"{peer} wants holes too often")
        async with self.port(relay) as port:
            await self.aim(port, relay, peer, address)
            port.delay_s = rtt_s
            yield port


def _parsed(address: str) -> tuple[str, int]:
    """Raises NetworkError unless 'host:port' has an IP address."""
    try:
        host, port = parse_address(address)
        return str(ipaddress.ip_address(host)), port
    except (RemoteError, ValueError) as error:
        raise NetworkError(f"{address!r} is no address of a port: {error}") from error
