"""The parts of the libp2p adapter that can be driven without a network, on a virtual clock."""

from __future__ import annotations

import errno
import random
import socket
import struct
from functools import partial

import pytest
import trio
import trio.testing

from shoal.protocol.identity import Identity, PeerId
from shoal.swarm import muxer
from shoal.swarm.limits import (
    HANDSHAKE_LIMIT_BYTES,
    PEER_UNREAD_LIMIT_BYTES,
    SMALL_FRAME_BYTES,
    SMALL_FRAMES_BURST,
    SMALL_FRAMES_PER_S,
    Memory,
    PeerLimits,
    Reason,
    Refusals,
)
from shoal.swarm.muxer import (
    CREDIT_BYTES,
    FLAG_SYN,
    FRAME_GRACE_S,
    FRAME_STALL_DEADLINE_S,
    HEADER_SIZE,
    HEARTBEAT_DEADLINE_S,
    HEARTBEAT_INTERVAL_S,
    PINGS_WAITING_LIMIT,
    READ_AHEAD_BYTES,
    TYPE_DATA,
    TYPE_PING,
    USER_TIMEOUT_MS,
    YAMUX_HEADER_FORMAT,
    Allowance,
    ConnectionClosedError,
    Muxer,
    Secured,
    Wire,
    read_bounded,
)
from shoal.swarm.net_stream import NAME_LIMIT_BYTES, NAMES_LIMIT, Communicator, MultiselectCommunicatorError

# Below this line libp2p was imported already, with its warnings silenced, by shoal.swarm.muxer.
from libp2p.stream_muxer.yamux.yamux import FLAG_ACK, TYPE_WINDOW_UPDATE  # isort: skip
from libp2p.utils import encode_delim, encode_uvarint  # isort: skip

PEER_ID = muxer.ID.from_base58(Identity.from_seed(bytes(32)).peer_id)


class SlowConnection:
    """A secured connection that takes `delay_s` for every byte written."""

    def __init__(self, delay_s: float) -> None:
        self.written = b""
        self.closed = False
        self._delay_s = delay_s

    async def write(self, data: bytes) -> None:
        for index in range(len(data)):
            await trio.sleep(self._delay_s)
            self.written += data[index : index + 1]

    async def read(self, n: int) -> bytes:
        return bytes(n)

    async def close(self) -> None:
        self.closed = True


@pytest.mark.virtual_time
async def test_cancelled_frame_is_written_whole() -> None:
    connection = SlowConnection(delay_s=0.05)
    muxer = Muxer(connection, PEER_ID, is_initiator=True)
    with trio.move_on_after(0.12) as scope:
        await muxer._write_frame(b"0123456789")
    assert scope.cancelled_caught
    assert connection.written == b"0123456789"
    await muxer._write_frame(b"next")
    assert connection.written == b"0123456789next"
    assert not connection.closed


class Instant(SlowConnection):
    """One that takes all at once."""

    async def write(self, data: bytes) -> None:
        self.written += data


async def test_frame_that_nobody_else_writes_before_makes_no_step_of_its_own() -> None:
    """The socket gives others their turn; every step more is a turn of the event loop for each ping."""
    connection, turns = Instant(delay_s=0), 0
    muxer = Muxer(connection, PEER_ID, is_initiator=True)

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(others)
        await muxer._write_frame(b"0123456789")
        assert (connection.written, turns) == (b"0123456789", 0)
        with trio.CancelScope() as scope:
            scope.cancel()
            await muxer._write_frame(b"never")
        assert scope.cancelled_caught
        assert connection.written == b"0123456789"
        nursery.cancel_scope.cancel()


@pytest.mark.virtual_time
async def test_frame_cancelled_before_its_turn_is_not_begun() -> None:
    connection = SlowConnection(delay_s=0.05)
    muxer = Muxer(connection, PEER_ID, is_initiator=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(muxer._write_frame, b"0123456789")
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(0.1) as scope:
            await muxer._write_frame(b"never")
        assert scope.cancelled_caught
    assert connection.written == b"0123456789"
    assert not connection.closed


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("deadline_s", "expected_s"),
    [(60, FRAME_STALL_DEADLINE_S), (3, 3), (0.1, FRAME_GRACE_S)],
)
async def test_frame_that_the_peer_does_not_take_closes_the_connection(deadline_s: float, expected_s: float) -> None:
    connection = SlowConnection(delay_s=1000)
    muxer = Muxer(connection, PEER_ID, is_initiator=True)
    began = trio.current_time()
    with trio.move_on_after(deadline_s), pytest.raises(ConnectionClosedError, match="took no data"):
        await muxer._write_frame(b"frame")
    assert trio.current_time() - began == pytest.approx(expected_s)
    assert connection.closed


@pytest.mark.virtual_time
async def test_peer_that_ignores_flow_control_is_cut_off_and_gives_its_room_back() -> None:
    connection, memory = SlowConnection(delay_s=0), Memory(Refusals(), lambda peer: True)
    muxer = Muxer(connection, PEER_ID, is_initiator=True, memory=memory)
    muxer.stream_buffers[2] = bytearray(PEER_UNREAD_LIMIT_BYTES - 100)
    assert await muxer._read_data_body(100) == bytes(100)
    assert memory.unread_bytes == PEER_UNREAD_LIMIT_BYTES
    assert not connection.closed
    with pytest.raises(ConnectionClosedError, match="room"):
        await muxer._read_data_body(101)
    assert connection.closed
    muxer._unread.wait(0)  # as at its end
    assert memory.unread_bytes == 0


@pytest.mark.virtual_time
async def test_bytes_of_streams_count_until_they_are_read() -> None:
    memory = Memory(Refusals(), lambda peer: True)
    muxer = Muxer(SlowConnection(delay_s=0), PEER_ID, is_initiator=True, memory=memory)
    stream = await muxer.open_stream()
    muxer.stream_buffers[stream.stream_id].extend(await muxer._read_data_body(5000))
    assert memory.unread_bytes == 5000
    assert len(await muxer.read_stream(stream.stream_id, 3000)) == 3000
    assert memory.unread_bytes == 2000
    muxer.stream_buffers[stream.stream_id].clear()  # a reset drops them without a word
    assert muxer._has_room(0)
    assert memory.unread_bytes == 0


@pytest.mark.virtual_time
async def test_small_frames_are_paced_and_large_ones_are_not() -> None:
    refusals = Refusals()
    peer_limits = PeerLimits(refusals, lambda peer: True)
    heads = Heads()
    secured = Secured(heads)
    secured.small_frame = partial(peer_limits.small_frame, PeerId("a member"))
    secured.is_open = lambda stream: stream == 3
    for kind, stream, length, piece, is_paced in (
        (TYPE_DATA, 3, 0, 12, True),
        (TYPE_DATA, 3, 0, 5, True),
        (TYPE_DATA, 3, SMALL_FRAME_BYTES - 1, 12, True),
        (TYPE_WINDOW_UPDATE, 3, 1 << 20, 12, True),
        (TYPE_DATA, 5, SMALL_FRAME_BYTES, 12, True),
        (TYPE_DATA, 3, SMALL_FRAME_BYTES, 12, False),
        (TYPE_DATA, 3, SMALL_FRAME_BYTES, 5, False),
    ):
        heads.head = struct.pack(YAMUX_HEADER_FORMAT, 0, kind, 0, stream, length)
        heads.piece = piece
        began = trio.current_time()
        for _ in range(int(SMALL_FRAMES_BURST) + 2000):
            await secured.read(HEADER_SIZE)
        took_s = trio.current_time() - began
        if is_paced:  # the burst was there for the first of them alone
            assert took_s >= 2000 / SMALL_FRAMES_PER_S - 0.01
        else:
            assert took_s == 0
    assert refusals.counts()[Reason.PACED.value] > 2000


class Heads:
    """A connection that has one head of a frame after the other, without an end, in such pieces."""

    head = b""
    piece = 12
    _at = 0

    async def read(self, n: int) -> bytes:
        await trio.lowlevel.checkpoint()
        taken = self.head[self._at :][: min(n, self.piece)]
        self._at = (self._at + len(taken)) % len(self.head)
        return taken


@pytest.mark.virtual_time
@pytest.mark.parametrize("known", [False, True])
async def test_a_connection_says_little_until_it_is_known_whose_it_is(known: bool) -> None:
    memory = Memory(Refusals(), lambda peer: True)
    allowance = Allowance(memory)
    if known:
        allowance.known(PeerId("a member"))
    sent = 0

    async def receive(limit_bytes: int) -> bytes:
        nonlocal sent
        sent += 1000
        assert memory.unread_bytes in (0, sent - 1000)
        return bytes(1000)

    if known:
        assert len(await read_bounded(receive, 64_000, allowance)) == 64_000
    else:
        with pytest.raises(ConnectionClosedError, match="room"):
            await read_bounded(receive, 64_000, allowance)
        assert sent <= HANDSHAKE_LIMIT_BYTES + 1000
    assert memory.unread_bytes == 0
    with pytest.raises(ConnectionClosedError, match="announced"):
        await read_bounded(receive, 1 << 30, allowance)


@pytest.mark.virtual_time
async def test_multistream_hears_few_and_short_names() -> None:
    said = Said(encode_delim(b"/short/1") * (NAMES_LIMIT + 1))
    communicator = Communicator(said)
    for _ in range(NAMES_LIMIT):
        assert await communicator.read() == "/short/1"
    with pytest.raises(MultiselectCommunicatorError, match="no protocol agreed"):
        await communicator.read()
    for bad in (
        encode_delim(bytes(NAME_LIMIT_BYTES)),
        encode_uvarint(1 << 40),
        b"\x03abc",
        b"\x03\xff\xfe\n",
        b"\0",
    ):
        said = Said(bad + bytes(5000))
        with pytest.raises(MultiselectCommunicatorError):
            await Communicator(said).read()
        assert said.at <= 10, "nothing is read of what is too long"


class Said:
    """A stream on which this was said."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    async def read(self, n: int) -> bytes:
        await trio.lowlevel.checkpoint()
        taken = self.data[self.at : self.at + n]
        self.at += len(taken)
        return taken


async def test_wire_sets_the_options_that_find_a_dead_peer() -> None:
    near, far = await trio.to_thread.run_sync(_connected_pair)
    for one in (near, far):
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(one))
        wire = Wire(stream)
        assert stream.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            assert stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == USER_TIMEOUT_MS
            assert stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 5
            assert stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 2
            assert stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 3
        assert not wire.closed
        wire.sever()
        assert wire.closed


async def test_connection_that_takes_no_options_any_more_ends_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = await trio.to_thread.run_sync(_connected_pair)
    with far:
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(near))

        def refuse(*args: object) -> None:
            raise OSError(errno.EINVAL, "the connection was reset")

        monkeypatch.setattr(stream, "setsockopt", refuse)
        wire = Wire(stream)
        assert not wire.closed
        wire.sever()


async def test_wire_reads_exactly_what_was_asked_and_ends_in_an_error() -> None:
    near, far = await trio.to_thread.run_sync(_connected_pair)
    wire = Wire(trio.SocketStream(trio.socket.from_stdlib_socket(near)))
    writer = trio.SocketStream(trio.socket.from_stdlib_socket(far))

    async def trickle() -> None:
        for index in range(250):  # libp2p would give up after a hundred
            await writer.send_all(bytes([index]))
            await trio.lowlevel.checkpoint()
        await writer.aclose()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trickle)
        assert await wire.read(200) == bytes(range(200))
        assert await wire.read(50) == bytes(range(200, 250))
        with pytest.raises(ConnectionClosedError):
            await wire.read(1)
    await wire.close()


async def test_what_came_together_is_taken_from_the_socket_together_and_counted_as_it_is_read() -> None:
    near, far = await trio.to_thread.run_sync(_connected_pair)
    stream, writer = (trio.SocketStream(trio.socket.from_stdlib_socket(one)) for one in (near, far))
    takes: list[int | None] = []
    take = stream.receive_some

    async def counted(limit_bytes: int | None = None) -> bytes:
        takes.append(limit_bytes)
        return bytes(await take(limit_bytes))

    stream.receive_some = counted  # type: ignore[method-assign]
    wire = Wire(stream)
    messages = [bytes([number]) * (28 + number) for number in range(20)] + [bytes(3 * READ_AHEAD_BYTES)]
    await writer.send_all(b"".join(len(message).to_bytes(2, "big") + message for message in messages))
    read_bytes = 0
    for message in messages:
        assert await wire.read(2) == len(message).to_bytes(2, "big")
        assert await wire.read(len(message)) == message
        read_bytes += 2 + len(message)
        assert wire.allowance._left == HANDSHAKE_LIMIT_BYTES - read_bytes
    assert len(takes) == 2, "one for all that is little, one for the rest of what is long"
    await writer.aclose()
    with pytest.raises(ConnectionClosedError):
        await wire.read(1)
    await wire.close()


def _connected_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    return near, far


def credit(stream_id: int, size: int) -> bytes:
    return struct.pack(YAMUX_HEADER_FORMAT, 0, TYPE_WINDOW_UPDATE, 0, stream_id, size)


@pytest.mark.virtual_time
async def test_connection_is_read_when_it_is_its_turn() -> None:
    connection = Secured(SlowConnection(delay_s=0.0))
    turns: list[float] = []

    async def turn() -> None:
        await trio.sleep(2.0)
        turns.append(trio.current_time())

    began = trio.current_time()
    assert await connection.read(HEADER_SIZE) == bytes(HEADER_SIZE)
    assert trio.current_time() == began
    connection.turn = turn
    assert await connection.read(HEADER_SIZE) == bytes(HEADER_SIZE)
    assert turns == [trio.current_time()] == [began + 2.0]


class Joined:
    """One end of a connection in memory, which notes when it sends a ping that asks, and the credit that it gives."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.asked_at: list[float] = []
        self.given: list[int] = []
        self._stream = stream

    async def write(self, data: bytes) -> None:
        if len(data) == HEADER_SIZE:
            _, kind, flags, _, size = struct.unpack(YAMUX_HEADER_FORMAT, data)
            if (kind, flags) == (TYPE_PING, FLAG_SYN):
                self.asked_at.append(trio.current_time())
            elif (kind, flags) == (TYPE_WINDOW_UPDATE, 0):
                self.given.append(size)
        await self._stream.send_all(data)

    async def read(self, n: int) -> bytes:
        data = b""
        while len(data) < n:
            some = await self._stream.receive_some(n - len(data))
            if not some:
                raise ConnectionClosedError("over")
            data += some
        return data

    async def close(self) -> None:
        await self._stream.aclose()


@pytest.mark.parametrize(("messages", "frames"), [(100, 0), (4096, 32)])
@pytest.mark.virtual_time
async def test_who_sends_is_told_of_room_only_where_much_was_read_and_sends_on(messages: int, frames: int) -> None:
    near, far = (Joined(stream) for stream in trio.testing.memory_stream_pair())
    one, other = Muxer(near, PEER_ID, is_initiator=True), Muxer(far, PEER_ID, is_initiator=False)
    sent = random.Random(1).randbytes(512)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.start)
        nursery.start_soon(other.start)
        stream = await one.open_stream()
        accepted = await other.accept_stream()

        async def say_all() -> None:
            for _ in range(messages):
                await stream.write(sent)

        nursery.start_soon(say_all)
        received = b""
        with trio.fail_after(60):
            while len(received) < len(sent) * messages:
                received += await accepted.read(512)
        nursery.cancel_scope.cancel()
    assert received == sent * messages
    assert 0 < len(far.given) <= frames if frames else not far.given


@pytest.mark.virtual_time
async def test_connection_at_rest_carries_one_heartbeat_of_one_end_in_a_long_while() -> None:
    ends = [Joined(stream) for stream in trio.testing.memory_stream_pair()]
    one, other = (Muxer(end, PEER_ID, is_initiator=end is ends[0]) for end in ends)
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.start)
        nursery.start_soon(other.start)
        await trio.sleep(10 * HEARTBEAT_INTERVAL_S + 1)
        nursery.cancel_scope.cancel()
    asked = [[at - began for at in end.asked_at] for end in ends]
    assert asked == [pytest.approx([n * HEARTBEAT_INTERVAL_S for n in range(11)]), pytest.approx([0])]


@pytest.mark.virtual_time
async def test_connection_over_which_something_comes_needs_no_heartbeat() -> None:
    ends = [Joined(stream) for stream in trio.testing.memory_stream_pair()]
    one, other = (Muxer(end, PEER_ID, is_initiator=end is ends[0]) for end in ends)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.start)
        nursery.start_soon(other.start)
        for _ in range(20):
            await trio.sleep(HEARTBEAT_INTERVAL_S / 2)
            await one._write_frame(credit(1, CREDIT_BYTES))
            await other._write_frame(credit(1, CREDIT_BYTES))
        nursery.cancel_scope.cancel()
    assert [len(end.asked_at) for end in ends] == [1, 1], "at the start"


@pytest.mark.parametrize("is_initiator", [True, False])
@pytest.mark.virtual_time
async def test_peer_that_hangs_is_given_up_within_a_minute(is_initiator: bool) -> None:
    near, far = (Joined(stream) for stream in trio.testing.memory_stream_pair())
    muxer = Muxer(near, PEER_ID, is_initiator=is_initiator)
    began = trio.current_time()
    with trio.fail_after(1000):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(muxer.start)
            ping = await far.read(HEADER_SIZE)
            await far.write(struct.pack(YAMUX_HEADER_FORMAT, 0, TYPE_PING, FLAG_ACK, 0, ping[-1]))
            await muxer.confirm()
    waited_s = trio.current_time() - began
    assert waited_s == pytest.approx((1 if is_initiator else 1.5) * HEARTBEAT_INTERVAL_S + HEARTBEAT_DEADLINE_S)
    assert waited_s <= 60


@pytest.mark.virtual_time
async def test_ping_is_answered_by_its_number_and_each_end_hears_of_it() -> None:
    ends = [Joined(stream) for stream in trio.testing.memory_stream_pair()]
    one, other = (Muxer(end, PEER_ID, is_initiator=end is ends[0]) for end in ends)
    heard: dict[Muxer, list[int | None]] = {one: [], other: []}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.start)
        nursery.start_soon(other.start)
        await trio.testing.wait_all_tasks_blocked()  # each asks once at the start
        for muxer in heard:
            muxer.on_ping(heard[muxer].append)
        for number in (7, 2**32 - 1):
            one.ping(number)
        await trio.testing.wait_all_tasks_blocked()
        assert heard == {one: [7, 2**32 - 1], other: [None, None]}
        nursery.cancel_scope.cancel()


class Unread(Joined):
    """An end from which nothing is taken any more once it is `full`."""

    full = False

    async def write(self, data: bytes) -> None:
        if self.full:
            await trio.sleep_forever()
        await super().write(data)


@pytest.mark.virtual_time
async def test_end_whose_answers_are_not_taken_reads_on() -> None:
    """Of two that both have much to write and are asked by each other, one at least has to read first."""
    near, far = (make(stream) for make, stream in zip((Unread, Joined), trio.testing.memory_stream_pair(), strict=True))
    muxer, heard = Muxer(near, PEER_ID, is_initiator=False), list[int | None]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(muxer.start)
        await trio.testing.wait_all_tasks_blocked()
        muxer.on_ping(heard.append)
        assert isinstance(near, Unread)
        near.full = True
        for number in range(50):
            await far.write(struct.pack(YAMUX_HEADER_FORMAT, 0, TYPE_PING, FLAG_SYN, 0, number))
        await trio.testing.wait_all_tasks_blocked()
        assert heard == [None] * 50
        assert len(muxer._pings) == PINGS_WAITING_LIMIT, "what waits to be written is bounded"
        nursery.cancel_scope.cancel()
