"""The flood of the bench of hostile peers, a small one at a real host: each of its ways is gone, and begun again."""

from __future__ import annotations

import pytest
import trio

from shoal.lab.bench import hostile_stranger
from shoal.lab.bench.hostile_stranger import Flood
from shoal.swarm.manifest_exchange import MANIFEST_PROTOCOL
from shoal.swarm.streams import MessageStream
from tests.swarm.test_members import MANIFEST, Node, running
from tests.waiting import until

WAYS = ("half-open connections", "giant frames", "answers not read", "hellos", "hellos answered")


async def test_each_way_of_a_flood_comes_to_the_node_and_lets_nobody_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in (("HALF_OPEN", 3), ("SLOW_READERS", 1), ("HELLO_CONNECTIONS", 2), ("HELLOS_PER_S", 10)):
        monkeypatch.setattr(hostile_stranger, name, number)
    node, frames = Node(2), list[bytes]()

    async def hold(stream: MessageStream) -> None:
        await trio.sleep_forever()

    async def lane(stream: trio.SocketStream) -> None:
        frames.append(bytes(await stream.receive_some()))
        await stream.aclose()

    node.host.serve(MANIFEST_PROTOCOL, hold)
    async with running(node) as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, lane, [listener])
        host, port = listener.socket.getsockname()
        attack = Flood(MANIFEST.swarm_id, 0, f"{host}:{port}", node.host.addresses)
        nursery.start_soon(attack.run)
        await until(lambda: all(attack.made[way] for way in WAYS) and bool(frames))
        assert frames[0][-200:] == b"\xff" * 200
        assert node.linked() == frozenset()
        nursery.cancel_scope.cancel()
