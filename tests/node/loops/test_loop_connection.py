"""The daemon's end of the stream to a loop: what is sent at once by several tasks comes whole, one after the other."""

from __future__ import annotations

import socket

import trio
import trio.testing

from shoal.node.loops.external_trainer import LoopConnection
from shoal.node.pipe import Framing, Stop
from shoal.node.training.trainer_messages import Ping, unpack_command


async def test_goodbye_and_an_order_at_once_are_both_told() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        filled = 0
        while True:  # until nothing more fits: whoever sends now has to wait
            try:
                filled += ours.send(bytes(4096))
            except BlockingIOError:
                break
        connection = LoopConnection(trio.SocketStream(trio.socket.from_stdlib_socket(ours)), pid=1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.part)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(connection.send, Ping())
            await trio.testing.wait_all_tasks_blocked()
            loop = trio.SocketStream(trio.socket.from_stdlib_socket(theirs))
            while filled:
                filled -= len(await loop.receive_some(filled))
            framing, told = Framing(), []
            while len(told) < 2:
                told += [unpack_command(frame) for frame in framing.feed(await loop.receive_some(4096))]
        assert told == [Stop(), Ping()]
        await loop.aclose()
        ours.close()

    with trio.fail_after(20):
        await main()
