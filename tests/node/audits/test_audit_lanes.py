"""Contributions for auditors over lanes: shown in a pause, at the contributor's rate, and within bounds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from shoal.node.audits import audit_lanes
from shoal.node.audits.audit_lanes import (
    ALLOWANCE_TIMEOUT_S,
    FETCH_DEADLINE_S,
    PAUSE_TIMEOUT_S,
    ContributionFetch,
    ContributionServer,
    Pause,
    Wanted,
)
from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import domain_hash
from shoal.swarm.lanes.chunks import ChunkSpace
from shoal.swarm.lanes.frame import FRAME_LIMIT_BYTES, FrameKind
from tests.swarm.lanes.test_chunks import HERE, THERE, Net

ROOT = domain_hash("a contribution")
SIZE = FRAME_LIMIT_BYTES + 1000
"""Of a payload: more than a frame takes."""
_CYCLE = bytes(range(251)) * (SIZE // 251 + 2)
PAYLOADS = {chunk: _CYCLE[chunk : chunk + SIZE] for chunk in range(40)}


class Lanes:
    """There is a lane to everyone but those who are cut off."""

    def __init__(self, net: Net) -> None:
        self._net = net

    async def ensure(self, peer: PeerId, *, deadline_s: float) -> None:
        await trio.lowlevel.checkpoint()
        if peer in self._net.cut:
            raise NetworkError(f"no lane to {peer}")


class Pair:
    """An auditor HERE, who asks a contributor THERE."""

    def __init__(self, *, rate: float = 1e9) -> None:
        self.net = Net()
        self.pauses = {HERE: Pause(), THERE: Pause()}
        self.shown = dict(PAYLOADS)
        here, there = self.net.add(HERE), self.net.add(THERE)
        self.fetch = ContributionFetch(Lanes(self.net), here, self.pauses[HERE])  # type: ignore[arg-type]
        self._server = ContributionServer(there, self.pauses[THERE], held=self._held, rate=lambda: rate)

    def _held(self, scope: bytes, chunk: int) -> memoryview | None:
        return memoryview(self.shown[chunk]) if ROOT.startswith(scope) and chunk in self.shown else None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._server.run)
            await trio.testing.wait_all_tasks_blocked()
            yield
            nursery.cancel_scope.cancel()

    async def get(self, *chunks: int, root: bytes = ROOT) -> dict[int, bytes]:
        wanted = [Wanted(THERE, root, chunk, SIZE) for chunk in chunks]
        return {one.chunk: data for one, data in (await self.fetch.payloads(wanted)).items()}


@pytest.mark.virtual_time
async def test_payloads_come_whole_over_the_lanes() -> None:
    pair = Pair()
    async with pair.serving():
        assert await pair.get(0, 3) == {0: PAYLOADS[0], 3: PAYLOADS[3]}
    kinds = {(frame.header.kind, frame.header.flags) for frame in pair.net.frames}
    assert kinds == {(kind, ChunkSpace.CONTRIBUTION) for kind in (FrameKind.REQUEST, FrameKind.STATE)}


@pytest.mark.virtual_time
async def test_what_may_not_be_shown_is_refused_at_once() -> None:
    pair = Pair()
    del pair.shown[1]
    async with pair.serving():
        assert await pair.get(0, 1) == {0: PAYLOADS[0]}
        assert await pair.get(0, root=domain_hash("another")) == {}
        assert trio.current_time() == pytest.approx(0, abs=1e-3)


@pytest.mark.virtual_time
async def test_nothing_is_asked_or_shown_while_a_reduction_is_under_way() -> None:
    pair = Pair()
    for who in (HERE, THERE):
        pair.pauses[who].end()
        async with pair.serving(), trio.open_nursery() as nursery:
            got = trio.Event()

            async def ask(got: trio.Event = got) -> None:
                assert await pair.get(2) == {2: PAYLOADS[2]}
                got.set()

            nursery.start_soon(ask)
            await trio.sleep(PAUSE_TIMEOUT_S / 2)
            assert not got.is_set()
            assert not any(frame.header.kind is FrameKind.STATE for frame in pair.net.frames), who
            pair.pauses[who].begin()
            began = trio.current_time()
            await got.wait()
            assert trio.current_time() == pytest.approx(began, abs=1e-3)
        pair.net.frames.clear()


@pytest.mark.virtual_time
async def test_where_one_reduction_follows_upon_another_patience_ends() -> None:
    pair = Pair()
    pair.pauses[THERE].end()
    async with pair.serving():
        assert await pair.get(2) == {2: PAYLOADS[2]}
    assert trio.current_time() == pytest.approx(PAUSE_TIMEOUT_S, abs=0.01)


@pytest.mark.virtual_time
async def test_contributor_gives_auditors_no_more_than_its_rate() -> None:
    pair = Pair(rate=SIZE / 2)  # a payload takes two seconds
    async with pair.serving():
        assert len(await pair.get(0, 1, 2, 3)) == 4
        assert trio.current_time() == pytest.approx(6, abs=0.01)  # the fourth is sent when the third is paid for
        assert len(await pair.get(4)) == 1
        assert trio.current_time() == pytest.approx(8, abs=0.01)


@pytest.mark.virtual_time
async def test_who_would_wait_too_long_or_asks_for_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_lanes, "QUEUE_PER_PEER_LIMIT", 3)
    pair = Pair()
    pair.pauses[THERE].end()
    async with pair.serving():
        assert sorted(await pair.get(*range(6))) == [0, 1, 2]
    pair = Pair(rate=SIZE / (2 * ALLOWANCE_TIMEOUT_S))
    async with pair.serving():
        began = trio.current_time()
        assert len(await pair.get(0)) == 1
        assert await pair.get(1) == {}
        assert trio.current_time() == pytest.approx(began, abs=0.01)


@pytest.mark.virtual_time
async def test_fetch_ends_where_nothing_comes() -> None:
    pair = Pair()
    pair.net.on_frame = lambda frame: None
    assert await pair.get(0) == {}
    assert trio.current_time() == pytest.approx(FETCH_DEADLINE_S, abs=0.01)
    pair.net.cut.add(THERE)
    assert await pair.get(0) == {}
    assert trio.current_time() == pytest.approx(FETCH_DEADLINE_S, abs=0.01)


@pytest.mark.virtual_time
async def test_broken_lane_ends_the_wait_for_all_that_was_asked_of_that_peer() -> None:
    pair = Pair()
    pair.net.on_frame = lambda frame: None
    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            assert await pair.get(0, 1) == {}

        nursery.start_soon(ask)
        await trio.sleep(1)
        pair.net.exchanges[HERE].lane_failed(THERE)
    assert trio.current_time() == pytest.approx(1, abs=0.01)
