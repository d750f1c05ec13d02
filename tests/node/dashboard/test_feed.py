"""The feed: a snapshot, then deltas, to as many as there is room for; whoever does not read is let go."""

from __future__ import annotations

import zlib

import pytest
import trio
import trio.testing

from shoal.lab.synthetic_swarm import SyntheticSwarm
from shoal.node.dashboard.feed import HEARTBEAT_S, QUEUE_LIMIT_MESSAGES, VIEWER_LIMIT
from shoal.node.reporting.events import Died
from tests.node.dashboard.lab import NOW, Clock, Reader, ask, event_of, site_of
from tests.node.dashboard.test_model import apply

DEADLINE_S = 30.0


@pytest.mark.virtual_time
async def test_a_viewer_gets_everything_and_then_what_changes() -> None:
    clock = Clock()
    swarm = SyntheticSwarm(peers=4, now=NOW, rounds=5)
    site = site_of(swarm, clock)
    app = site.app(token="unused", host="127.0.0.1")
    reader = Reader(app)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader.run)
        name, known = event_of(await reader.pieces.receive())
        assert (name, known["node"]["round"]) == ("snapshot", 5)
        assert reader.start.headers["content-type"] == "text/event-stream"
        for second in range(1, 30):
            if second == 9:
                (killed,) = swarm.kill()
            swarm.advance(NOW + second)
            clock.now += 1
            site.tick()
            name, delta = event_of(await reader.pieces.receive())
            assert name == "delta"
            apply(known, delta)
        assert known["peers"][killed]["reach"] == "gone"
        assert known["node"]["round"] == 8
        assert known == (await ask(app, "/api/snapshot")).json()
        reader.go()
    assert reader.ended
    assert len(site.feed) == 0
    assert site.feed.dropped == 0


async def test_an_event_is_told_without_waiting_for_the_next_look() -> None:
    swarm = SyntheticSwarm(peers=2, now=NOW, rounds=1)
    site = site_of(swarm, Clock())
    reader = Reader(site.app(token="unused", host="127.0.0.1"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader.run)
        await reader.pieces.receive()
        swarm.waiting.append(Died(at=NOW, peer="12D3KooWgone"))
        site.tick()
        _, delta = event_of(await reader.pieces.receive())
        assert [happening["kind"] for happening in delta["happenings"]] == ["died"]
        assert [fault["peer"] for round in delta["rounds"] for fault in round["faults"]] == ["12D3KooWgone"]
        reader.go()


async def test_a_squeezed_feed_can_be_read_as_it_comes() -> None:
    clock = Clock()
    swarm = SyntheticSwarm(peers=50, now=NOW, rounds=5)
    site = site_of(swarm, clock)
    reader = Reader(site.app(token="unused", host="127.0.0.1"), headers={"accept-encoding": "gzip, br"})
    unsqueeze = zlib.decompressobj(16 + zlib.MAX_WBITS)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader.run)
        piece = await reader.pieces.receive()
        whole = unsqueeze.decompress(piece)
        assert event_of(whole)[0] == "snapshot"
        assert len(piece) < len(whole) / 2
        assert reader.start.headers["content-encoding"] == "gzip"
        swarm.advance(NOW + 1)
        clock.now += 1
        site.tick()
        assert event_of(unsqueeze.decompress(await reader.pieces.receive()))[0] == "delta"
        reader.go()


@pytest.mark.virtual_time
async def test_a_viewer_that_does_not_read_is_let_go_and_the_others_miss_nothing() -> None:
    clock = Clock()
    swarm = SyntheticSwarm(peers=2, now=NOW, rounds=1)
    site = site_of(swarm, clock)
    app = site.app(token="unused", host="127.0.0.1")
    stuck, reader = Reader(app, takes=3), Reader(app)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stuck.run)
        nursery.start_soon(reader.run)
        _, known = event_of(await reader.pieces.receive())
        assert len(site.feed) == 2
        for second in range(1, 2 * QUEUE_LIMIT_MESSAGES):
            swarm.advance(NOW + second)
            clock.now += 1
            site.tick()
            apply(known, event_of(await reader.pieces.receive())[1])
        await trio.testing.wait_all_tasks_blocked()
        assert (len(site.feed), site.feed.dropped) == (1, 1)
        reader.go()


async def test_there_is_room_for_so_many_viewers_and_again_when_one_goes() -> None:
    swarm = SyntheticSwarm(peers=1, now=NOW, rounds=1)
    site = site_of(swarm)
    app = site.app(token="unused", host="127.0.0.1")
    readers = [Reader(app) for _ in range(VIEWER_LIMIT)]
    async with trio.open_nursery() as nursery:
        for reader in readers:
            nursery.start_soon(reader.run)
            await reader.pieces.receive()
        with trio.fail_after(DEADLINE_S):
            refused = await ask(app, "/api/feed")
        assert (refused.status, refused.headers["retry-after"]) == (503, "10")
        readers[0].go()
        await trio.testing.wait_all_tasks_blocked()
        late = Reader(app)
        nursery.start_soon(late.run)
        assert event_of(await late.pieces.receive())[0] == "snapshot"
        for reader in (*readers[1:], late):
            reader.go()


@pytest.mark.virtual_time
async def test_where_nothing_happens_a_line_says_so_now_and_then() -> None:
    site = site_of(SyntheticSwarm(peers=1, now=NOW, rounds=1))
    reader = Reader(site.app(token="unused", host="127.0.0.1"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader.run)
        await reader.pieces.receive()
        began = trio.current_time()
        assert (await reader.pieces.receive()).startswith(b":")
        assert trio.current_time() - began == HEARTBEAT_S
        reader.go()
