"""Floods that a stranger or a member may send to a node's control port, and a node in a process of its own for them.

`python -m tests.swarm.floods` prints what each does to the memory of a fresh process. A flood sends so many bytes, or
as many as are taken before the far end has had enough; then the node has to answer somebody else.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import trio

from shoal.protocol.address import parse_address
from shoal.protocol.identity import Identity
from shoal.swarm import transport
from shoal.swarm.host import Host
from shoal.swarm.muxer import Wire
from tests.waiting import running

# Below this line libp2p was imported already, with its warnings silenced, by shoal.swarm.transport.
from libp2p.identity.identify.pb.identify_pb2 import Identify  # isort: skip
from libp2p.network.connection.raw_connection import RawConnection  # isort: skip
from libp2p.pubsub.pb import rpc_pb2  # isort: skip
from libp2p.pubsub.validators import PUBSUB_SIGNING_PREFIX  # isort: skip
from libp2p.utils import encode_delim, encode_uvarint, encode_varint_prefixed  # isort: skip

MIB = 1 << 20
TOPIC = "news"
ECHO = "/test/echo/1"
GOSSIP = "/meshsub/1.1.0"
PUSH = "/ipfs/id/push/1.0.0"
MULTISTREAM = encode_delim(b"/multistream/1.0.0")
ENDLESS = encode_uvarint(1 << 30)
"""The length of a message that does not end while anybody looks."""
PIECE, LARGE = bytes(64 << 10), bytes(2 << 20)
WAIT_S, FLOOD_S = 30.0, 6.0

NODE_PROCESS = """
import sys, trio
from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import Identity
from shoal.swarm.host import Host

async def echo(stream):
    while True:
        await stream.send(await stream.receive(deadline_s=None), deadline_s=30)

async def main():
    host = Host(identity=Identity.from_seed(bytes([200]) * 32), listen=["/ip4/127.0.0.1/tcp/0"])
    host.is_admitted = lambda peer: sys.argv[1] == "everybody"
    host.serve("/test/echo/1", echo)
    async with trio.open_nursery() as nursery:
        await nursery.start(host.run)
        await host.subscribe("news")
        print(host.addresses[0], flush=True)
        while line := await trio.to_thread.run_sync(sys.stdin.readline):
            try:
                await host.dial(line.strip(), deadline_s=8)
                print("connected", flush=True)
            except NetworkError as error:
                print(error, flush=True)
        nursery.cancel_scope.cancel()

trio.run(main)
"""


class NodeProcess:
    """A node that admits `everybody` or `nobody`, serves an echo, hears the topic, and dials whom it is told to."""

    def __init__(self, admits: str) -> None:
        command = [sys.executable, "-c", NODE_PROCESS, admits]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def dial(self, address: str) -> str:
        """Have it dial; what came of it."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{address}\n")
        self._process.stdin.flush()
        return self._line()

    @property
    def memory_bytes(self) -> int:
        """What of its memory is in use now."""
        return self._of("VmRSS")

    @property
    def peak_bytes(self) -> int:
        """The most that was since `forget_peak`."""
        return self._of("VmHWM")

    def forget_peak(self) -> None:
        """Begin anew with the peak."""
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")

    def _of(self, name: str) -> int:
        with open(f"/proc/{self._process.pid}/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith(f"{name}:")) * 1024

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def node_process(admits: str) -> Iterator[NodeProcess]:
    node = NodeProcess(admits)
    try:
        yield node
    finally:
        node.close()


Flood = Callable[[NodeProcess, int], Awaitable[None]]
"""Sends so many bytes to a node."""


async def pour(write: Callable[[bytes], Awaitable[None]], size: int, piece: bytes = PIECE) -> None:
    """Write so many bytes, or what is taken of them within FLOOD_S."""
    with trio.move_on_after(FLOOD_S), contextlib.suppress(Exception):  # whatever ends the far end's patience
        for _ in range(-(-size // len(piece))):
            await write(piece)


@contextlib.asynccontextmanager
async def plain_socket(node: NodeProcess) -> AsyncIterator[trio.SocketStream]:
    where = parse_address(node.address)
    stream = await trio.open_tcp_stream(where.host, where.port)
    try:
        yield stream
    finally:
        await trio.aclose_forcefully(stream)


@contextlib.asynccontextmanager
async def connected(node: NodeProcess, seed: int = 1) -> AsyncIterator[tuple[Host, Any]]:
    """A host that dialled the node and says nothing by itself, and its connection."""
    host = Host(identity=Identity.from_seed(bytes([seed]) * 32), listen=["/ip4/127.0.0.1/tcp/0"])
    host.is_admitted = lambda peer: False
    async with running(host):
        peer = await host.dial(node.address, deadline_s=WAIT_S)
        yield host, host._network.link(transport.ID.from_base58(peer))


newcomers = itertools.count(100)


async def answers(node: NodeProcess) -> None:
    """Wait until the node has answered somebody who comes for the first time."""
    async with connected(node, next(newcomers)) as (host, _):
        (peer,) = host.connected()
        assert await host.request(peer, ECHO, b"alive", deadline_s=WAIT_S) == b"alive"


# -- of a stranger -----------------------------------------------------------------------------------------------


async def endless_name(node: NodeProcess, size: int) -> None:
    """A plain socket begins a name of a protocol that never ends."""
    async with plain_socket(node) as stream:
        await pour(stream.send_all, len(ENDLESS), ENDLESS)
        await pour(stream.send_all, size)


async def six_endless_names(node: NodeProcess, size: int) -> None:
    """Six plain sockets do, each with a share."""
    async with trio.open_nursery() as nursery:
        for _ in range(6):
            nursery.start_soon(endless_name, node, size // 6)


async def endless_names(node: NodeProcess, size: int) -> None:
    """A plain socket asks for one protocol after the other."""
    async with plain_socket(node) as stream, trio.open_nursery() as nursery:
        nursery.start_soon(drain, stream)
        await pour(stream.send_all, len(MULTISTREAM), MULTISTREAM)
        await pour(stream.send_all, size, encode_delim(b"/no/such/protocol") * 1000)
        nursery.cancel_scope.cancel()


async def drain(stream: trio.SocketStream) -> None:
    with contextlib.suppress(trio.BrokenResourceError):
        while await stream.receive_some():
            pass


async def endless_muxer_name(node: NodeProcess, size: int) -> None:
    """Who is encrypted, and may be anybody, begins the name of a muxer that never ends."""
    host = Host(identity=Identity.from_seed(bytes([2]) * 32), listen=["/ip4/127.0.0.1/tcp/0"])
    peer = transport.ID.from_base58(parse_address(node.address).peer)
    async with plain_socket(node) as stream:
        secured = await host._network.upgrader.upgrade_security(RawConnection(Wire(stream), True), True, peer)
        await secured.write(ENDLESS)
        await pour(secured.write, size)


async def endless_answer(node: NodeProcess, size: int) -> None:
    """Whom the node dials, since a link names its address, answers with a name that never ends."""

    async def answer(stream: trio.SocketStream) -> None:
        await pour(stream.send_all, len(ENDLESS), ENDLESS)
        await pour(stream.send_all, size)

    peer = Identity.from_seed(bytes([3]) * 32).peer_id
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, answer, listeners)
        port = listeners[0].socket.getsockname()[1]
        said = await trio.to_thread.run_sync(node.dial, f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}")
        assert said != "connected"
        nursery.cancel_scope.cancel()


async def endless_protocol(node: NodeProcess, size: int) -> None:
    """A connected stranger begins, on a stream, the name of a protocol that never ends."""
    async with connected(node) as (_, link):
        stream = await link.new_stream()
        await stream.write(MULTISTREAM + ENDLESS)
        await pour(partial_frames(link, stream.muxed_stream.stream_id), size, LARGE)


async def windows_ignored(node: NodeProcess, size: int) -> None:
    """Six strangers send on streams on which nobody reads, whatever room there is."""

    async def one(seed: int) -> None:
        async with connected(node, seed) as (host, link):
            stream = (await host._network.open_stream(next(iter(host.connected())), GOSSIP, deadline_s=WAIT_S)).raw
            await pour(partial_frames(link, stream.muxed_stream.stream_id), size // 6, LARGE)

    async with trio.open_nursery() as nursery:
        for seed in range(10, 16):
            nursery.start_soon(one, seed)


def partial_frames(link: Any, stream_id: int) -> Callable[[bytes], Awaitable[None]]:
    """Writes data of a stream as frames of yamux, whatever credit there is."""

    async def write(data: bytes) -> None:
        await link.muxed_conn._write_frame(struct.pack("!BBHII", 0, 0, 0, stream_id, len(data)) + data)

    return write


async def identify_push(node: NodeProcess, size: int) -> None:
    """A connected stranger tells of itself, again and again, what libp2p would keep."""
    async with connected(node) as (host, link):
        with trio.move_on_after(FLOOD_S), contextlib.suppress(Exception):
            for number in range(size // MIB):
                names = [f"/{number}/{name}".ljust(40, "x") for name in range(20_000)]
                addresses = [b"\x04\x7f\x00\x00\x01\x06" + n.to_bytes(2, "big") for n in range(1000)]
                told = Identify(protocols=names, listen_addrs=addresses).SerializeToString()
                stream = (await host._network.open_stream(next(iter(host.connected())), PUSH, deadline_s=WAIT_S)).raw
                await partial_frames(link, stream.muxed_stream.stream_id)(encode_varint_prefixed(told))
                await stream.close()


# -- of a member -------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def gossiping(node: NodeProcess) -> AsyncIterator[tuple[Host, Callable[[Any], Awaitable[None]]]]:
    """A member, and what sends a packet of gossip in its name."""
    async with connected(node) as (host, _):
        stream = (await host._network.open_stream(next(iter(host.connected())), GOSSIP, deadline_s=WAIT_S)).raw

        async def send(packet: Any) -> None:
            await stream.write(encode_varint_prefixed(packet.SerializeToString()))

        yield host, send


async def prunes(node: NodeProcess, size: int) -> None:
    """PRUNE of topics that there are not, each of its own."""
    async with connected(node) as (host, _):
        stream = (await host._network.open_stream(next(iter(host.connected())), GOSSIP, deadline_s=WAIT_S)).raw
        numbers = itertools.count(10_000_000)
        sent = 0
        with trio.move_on_after(FLOOD_S), contextlib.suppress(Exception):
            while sent < size:
                entries = b"".join(b"\x22\x0a\x0a\x08%d" % next(numbers) for _ in range(2000))
                packet = encode_varint_prefixed(b"\x1a" + encode_varint_prefixed(entries))  # its field of control
                await stream.write(packet)
                sent += len(packet)


async def other_topics(node: NodeProcess, size: int) -> None:
    """PRUNE, GRAFT, IHAVE and subscriptions, of topics that there are not."""
    async with gossiping(node) as (_, send):
        sent = number = 0
        with trio.move_on_after(FLOOD_S), contextlib.suppress(Exception):
            while sent < size:
                packet = rpc_pb2.RPC()
                for _ in range(200):
                    number += 1
                    topic = f"topic {number}".ljust(60, "x")
                    packet.control.prune.add(topicID=topic, backoff=1 << 40)
                    packet.control.graft.add(topicID=topic)
                    packet.control.ihave.add(topicID=topic, messageIDs=[b"1"])
                    packet.subscriptions.add(subscribe=True, topicid=topic)
                await send(packet)
                sent += packet.ByteSize()


async def empty_entries(node: NodeProcess, size: int) -> None:
    """Control entries of two bytes each, as many as a packet holds."""
    packet = rpc_pb2.RPC()
    for _ in range(200_000):
        packet.control.prune.add()
        packet.subscriptions.add()
    async with gossiping(node) as (_, send):
        with trio.move_on_after(FLOOD_S), contextlib.suppress(Exception):
            for _ in range(-(-size // packet.ByteSize())):
                await send(packet)


def message(identity: Identity, number: bytes, data: bytes, topics: list[str]) -> Any:
    """A message as GossipSub has them, well signed."""
    said = rpc_pb2.Message(from_id=transport.ID.from_base58(identity.peer_id).to_bytes(), seqno=number, data=data)
    said.topicIDs.extend(topics)
    keys = transport.ed25519_key_pair(identity.private_bytes())
    said.signature = keys.private_key.sign(PUBSUB_SIGNING_PREFIX.encode() + said.SerializeToString())
    said.key = keys.public_key.serialize()
    return said


async def wants(node: NodeProcess, size: int) -> None:
    """IWANT: one large message, thousands of times."""
    said = message(Identity.from_seed(bytes([1]) * 32), b"1", bytes(250_000), [TOPIC])
    packet = rpc_pb2.RPC(publish=[said])
    packet.control.iwant.add(messageIDs=[said.from_id + said.seqno] * (size // 250_000))
    async with gossiping(node) as (_, send):
        await send(packet)
        await send(packet)
        await answers(node)


async def long_numbers(node: NodeProcess, size: int) -> None:
    """Messages whose number is long: it is what they are known by for two minutes."""
    identity = Identity.from_seed(bytes([1]) * 32)
    async with gossiping(node) as (_, send):
        with trio.move_on_after(FLOOD_S), contextlib.suppress(Exception):
            for number in range(size // 500_000):
                await send(rpc_pb2.RPC(publish=[message(identity, bytes([number]) * 500_000, b"", [TOPIC])]))


async def many_topics(node: NodeProcess, size: int) -> None:
    """Messages in many topics at once, of which there is one."""
    identity = Identity.from_seed(bytes([1]) * 32)
    async with gossiping(node) as (_, send):
        with trio.move_on_after(FLOOD_S), contextlib.suppress(Exception):
            for number in range(size // 500_000):
                topics = [TOPIC, *(f"{number} {topic}" for topic in range(30_000))]
                await send(rpc_pb2.RPC(publish=[message(identity, bytes([number]), b"", topics)]))


STRANGERS: dict[str, Flood] = {
    "endless name": endless_name,
    "six endless names": six_endless_names,
    "endless names": endless_names,
    "endless muxer name": endless_muxer_name,
    "endless answer": endless_answer,
    "endless protocol": endless_protocol,
    "windows ignored": windows_ignored,
    "identify push": identify_push,
}
MEMBERS: dict[str, Flood] = {
    "prunes": prunes,
    "other topics": other_topics,
    "empty entries": empty_entries,
    "wants": wants,
    "long numbers": long_numbers,
    "many topics": many_topics,
}


async def growth(node: NodeProcess, flood: Flood, size: int) -> tuple[int, int]:
    """By how many bytes a flood makes a node grow at most, and what of that stays."""
    await answers(node)
    node.forget_peak()
    before = node.memory_bytes
    await flood(node, size)
    await answers(node)
    return node.peak_bytes - before, node.memory_bytes - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=192)
    parser.add_argument("names", nargs="*")
    asked = parser.parse_args()
    for name in asked.names or (STRANGERS | MEMBERS):
        with node_process("everybody" if name in MEMBERS else "nobody") as node:
            peak, kept = trio.run(growth, node, (STRANGERS | MEMBERS)[name], asked.mib * MIB)
        print(f"{name}: at most {peak / MIB:.1f} MiB more, {kept / MIB:.1f} of it after", flush=True)


if __name__ == "__main__":
    main()
