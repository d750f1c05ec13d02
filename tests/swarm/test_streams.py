"""Messages over a byte stream: whole, bounded, and safe to cancel on both sides."""

from __future__ import annotations

import contextlib
import random

import pytest
import trio
import trio.testing

from shoal.protocol.errors import LocalError, NetworkError, RemoteError
from shoal.protocol.identity import Identity
from shoal.swarm.streams import (
    BACKLOG_LIMIT_BYTES,
    LINGER_DEADLINE_S,
    READ_BYTES,
    RECEIVED_LIMIT_MESSAGES,
    Mailbox,
    MessageStream,
    StreamEnded,
)

pytestmark = pytest.mark.virtual_time

PEER = Identity.from_seed(bytes(32)).peer_id


class MemoryStream:
    """One end of a pair in memory. As with libp2p, a cancelled read or write loses or truncates what it moved."""

    def __init__(self, send: trio.MemorySendChannel[bytes], receive: trio.MemoryReceiveChannel[bytes]) -> None:
        self._send = send
        self._receive = receive
        self._unread = b""
        self.bytes_read = 0
        self.was_reset = False
        self.was_finished = False
        self.fragment_bytes = 1 << 30
        self.fragment_delay_s = 0.0

    async def read(self, limit_bytes: int) -> bytes:
        if not self._unread:
            try:
                data = await self._receive.receive()
            except trio.EndOfChannel:
                return b""
            except trio.ClosedResourceError:
                raise NetworkError("reset") from None
            await trio.lowlevel.checkpoint()  # a cancellation here loses `data`
            self._unread = data
        data, self._unread = self._unread[:limit_bytes], self._unread[limit_bytes:]
        self.bytes_read += len(data)
        return data

    async def write(self, data: bytes) -> None:
        for start in range(0, len(data), self.fragment_bytes):
            await trio.sleep(self.fragment_delay_s)
            try:
                await self._send.send(data[start : start + self.fragment_bytes])
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                raise NetworkError("reset") from None

    async def finish(self) -> None:
        self.was_finished = True
        self._send.close()

    async def reset(self) -> None:
        self.was_reset = True
        self._send.close()
        self._receive.close()


def memory_pair(buffered: float = 0) -> tuple[MemoryStream, MemoryStream]:
    there_send, there_receive = trio.open_memory_channel[bytes](buffered)
    back_send, back_receive = trio.open_memory_channel[bytes](buffered)
    return MemoryStream(there_send, back_receive), MemoryStream(back_send, there_receive)


def framed(*messages: bytes) -> bytes:
    return b"".join(len(message).to_bytes(4, "big") + message for message in messages)


async def test_messages_arrive_whole_however_they_are_split() -> None:
    near, far = memory_pair()
    stream = MessageStream(near, peer=PEER)
    messages = [b"", b"a", bytes(range(256)) * 300, b"end"]
    wire = framed(*messages)
    rng = random.Random(1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.run)

        async def feed() -> None:
            start = 0
            while start < len(wire):
                end = start + rng.choice([1, 2, 3, 5000])
                await far.write(wire[start:end])
                start = end

        nursery.start_soon(feed)
        assert [await stream.receive(deadline_s=1) for _ in messages] == messages
        await stream.abort()


async def test_cancelled_receives_lose_nothing() -> None:
    near, far = memory_pair()
    stream = MessageStream(near, peer=PEER)
    far.fragment_bytes = 7
    total = 300
    received: list[int] = []
    cancelled = 0
    rng = random.Random(2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.run)

        async def feed() -> None:
            for number in range(total):
                await far.write(framed(number.to_bytes(20, "big")))
                await trio.sleep(rng.random() * 0.01)

        nursery.start_soon(feed)
        while len(received) < total:
            with trio.move_on_after(rng.random() * 0.004) as scope:
                received.append(int.from_bytes(await stream.receive(deadline_s=None), "big"))
            cancelled += scope.cancelled_caught
        await stream.abort()
    assert received == list(range(total))
    assert cancelled > 100


async def test_cancelled_sends_arrive_whole_or_not_at_all() -> None:
    near, far = memory_pair()
    near.fragment_bytes, near.fragment_delay_s = 5, 0.0002  # a message takes about 2 ms
    sender, receiver = MessageStream(near, peer=PEER), MessageStream(far, peer=PEER)
    rng = random.Random(3)
    received: list[bytes] = []
    cancelled = 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sender.run)
        nursery.start_soon(receiver.run)

        async def collect() -> None:
            with contextlib.suppress(StreamEnded):
                while True:
                    received.append(await receiver.receive(deadline_s=None))
            await receiver.aclose()

        nursery.start_soon(collect)
        for number in range(200):
            with trio.move_on_after(rng.random() * 0.004) as scope:
                await sender.send(number.to_bytes(40, "big"), deadline_s=60)
            cancelled += scope.cancelled_caught
        await sender.aclose()
    numbers = [int.from_bytes(message, "big") for message in received]
    assert all(len(message) == 40 for message in received)
    assert numbers == sorted(set(numbers))  # in order, none twice, none made up
    assert set(numbers) <= set(range(200))
    assert cancelled > 10


async def test_oversized_message_is_the_peers_fault_and_is_not_buffered() -> None:
    near, far = memory_pair(buffered=1000)
    stream = MessageStream(near, peer=PEER, limit_bytes=100)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.run)
        await far.write(framed(b"fine") + (101).to_bytes(4, "big"))
        assert await stream.receive(deadline_s=1) == b"fine"
        with pytest.raises(RemoteError, match="101 bytes exceeds the limit of 100") as caught:
            await stream.receive(deadline_s=1)
        assert caught.value.peer == PEER
    assert near.was_reset


async def test_sending_over_the_limit_is_our_fault() -> None:
    near, _ = memory_pair()
    with pytest.raises(LocalError, match="exceeds the limit of 10"):
        await MessageStream(near, peer=PEER, limit_bytes=10).send(bytes(11), deadline_s=1)


async def test_unread_messages_stop_the_pump_at_its_limit() -> None:
    near, far = memory_pair()
    stream = MessageStream(near, peer=PEER)
    message = bytes(READ_BYTES)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.run)
        with trio.move_on_after(10):
            for sent in range(100):  # noqa: B007 — the count of writes that ended
                await far.write(framed(message))
        assert near.bytes_read <= BACKLOG_LIMIT_BYTES + 2 * READ_BYTES
        for _ in range(sent):
            assert await stream.receive(deadline_s=1) == message
        await stream.abort()


@pytest.mark.parametrize(
    ("tail", "error"), [(b"", StreamEnded), (b"\0\0", NetworkError), (b"\0\0\0\5ab", NetworkError)]
)
async def test_end_between_messages_differs_from_an_end_inside_one(tail: bytes, error: type[Exception]) -> None:
    near, far = memory_pair(buffered=10)
    stream = MessageStream(near, peer=PEER)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.run)
        await far.write(framed(b"last") + tail)
        await far.finish()
        assert await stream.receive(deadline_s=1) == b"last"
        with pytest.raises(error) as caught:
            await stream.receive(deadline_s=1)
        assert type(caught.value) is error
        await stream.aclose()


async def test_peer_that_finished_can_still_be_answered() -> None:
    near, far = memory_pair(buffered=10)
    stream = MessageStream(near, peer=PEER)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.run)
        await far.write(framed(b"question"))
        await far.finish()
        assert await stream.receive(deadline_s=1) == b"question"
        await trio.testing.wait_all_tasks_blocked()
        await stream.send(b"answer", deadline_s=1)
        await stream.aclose()
    assert await far.read(100) == framed(b"answer")
    assert not near.was_reset


async def test_receive_deadline_is_a_network_error_and_loses_nothing() -> None:
    near, far = memory_pair()
    stream = MessageStream(near, peer=PEER)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.run)
        await far.write(framed(b"slow")[:6])
        with pytest.raises(NetworkError, match="within 2 s"):
            await stream.receive(deadline_s=2)
        await far.write(framed(b"slow")[6:])
        assert await stream.receive(deadline_s=2) == b"slow"
        await stream.abort()


async def test_write_that_times_out_resets_the_stream() -> None:
    near, _ = memory_pair()  # nobody reads the far end
    stream = MessageStream(near, peer=PEER)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.run)
        with pytest.raises(NetworkError, match="did not take a message within 3 s"):
            await stream.send(b"x", deadline_s=3)
    assert near.was_reset
    with pytest.raises(NetworkError):
        await stream.send(b"y", deadline_s=3)


async def test_closed_stream_waits_a_bounded_time_for_the_far_end() -> None:
    near, _ = memory_pair(buffered=1)
    stream = MessageStream(near, peer=PEER)
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.run)
        await stream.aclose()
        assert near.was_finished
        assert trio.current_time() == began
    assert near.was_reset
    assert trio.current_time() - began == pytest.approx(LINGER_DEADLINE_S)


async def test_mailbox_drops_the_oldest_and_ends_after_what_is_queued() -> None:
    mailbox: Mailbox[int] = Mailbox(3)
    for number in range(5):
        mailbox.put(number)
    mailbox.close()
    assert [number async for number in mailbox] == [2, 3, 4]
    assert mailbox.dropped == 2
    mailbox.put(9)
    with pytest.raises(trio.EndOfChannel):
        await mailbox.receive()


async def test_mailbox_wakes_its_reader() -> None:
    mailbox: Mailbox[str] = Mailbox(1)
    async with trio.open_nursery() as nursery:

        async def read() -> None:
            assert await mailbox.receive() == "hello"

        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        mailbox.put("hello")


async def test_messages_that_came_together_are_received_together_and_what_breaks_after_them_the_next_time() -> None:
    near, far = memory_pair(buffered=10)
    stream = MessageStream(near, peer=PEER, limit_bytes=100)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.run)
        await far.write(framed(b"a", b"", b"b" * 100, b"c" * 101))
        assert await stream.receive_all() == [b"a", b"", b"b" * 100]
        with pytest.raises(RemoteError, match="101 bytes"):
            await stream.receive_all()


async def test_no_more_than_the_limit_is_received_at_once() -> None:
    near, far = memory_pair(buffered=10)
    stream = MessageStream(near, peer=PEER)
    many = [bytes([n]) for n in range(RECEIVED_LIMIT_MESSAGES + 6)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.run)
        await far.write(framed(*many))
        assert await stream.receive_all() == many[:-6]
        assert await stream.receive_all() == many[-6:]
        await stream.abort()


async def test_several_messages_are_sent_in_one_write_and_none_where_one_is_over_the_limit() -> None:
    near, far = memory_pair(buffered=10)
    stream = MessageStream(near, peer=PEER, limit_bytes=100)
    with pytest.raises(LocalError):
        await stream.send_all([b"a", b"b" * 101], deadline_s=1)
    await stream.send_all([b"c", b"d" * 100], deadline_s=1)
    assert await far.read(1000) == framed(b"c", b"d" * 100)
