from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import trio

from shoal.protocol.identity import PeerId
from shoal.swarm.lanes import count as lane_count
from shoal.swarm.lanes.count import HOLD_OFF_LIMIT_S, HOLD_OFF_MIN_S, MEASURE_S, SETTLE_S, LaneCount
from shoal.swarm.lanes.frame import FrameHeader, FrameKind
from shoal.swarm.lanes.limits import LaneLimits, RateLimit
from shoal.swarm.lanes.pool import LanePool
from shoal.swarm.lanes.socket import Moved
from tests.swarm.lane_net import ALICE, BOB, DEAD_ADDRESS, WAIT_S, alice_and_bob, lanes_of, open_net, until

MB = 1_000_000
STEP_S = 0.25
LONG_S, LOOK_S = 180.0, 0.02


class Link:
    """A simulated link: what a pair moves with so many lanes, and what its lane count makes of it.

    held: the share of the time for which buffers hold that many lanes back.
    """

    def __init__(
        self,
        bytes_per_s: Callable[[int], float],
        *,
        can_have: int = 16,
        held: Callable[[int], float] = lambda lanes: 0.0,
    ) -> None:
        self.count = LaneCount()
        self.now = 0.0
        self.lanes = 1
        self.moved = 0.0
        self.history: list[tuple[float, int]] = [(0.0, 1)]
        self._bytes_per_s = bytes_per_s
        self._can_have = can_have
        self._held = held
        self._busy_s = self._held_s = 0.0

    def busy(self, seconds: float) -> None:
        """Send for a while without a break."""
        since, end = self.now, self.now + seconds
        while self.now < end:
            self.now += STEP_S
            self.moved += self._bytes_per_s(self.lanes) * STEP_S
            self._busy_s += STEP_S * self.lanes
            self._held_s += STEP_S * self.lanes * self._held(self.lanes)
            so_far = Moved(taken=int(self.moved), busy_s=self._busy_s, held_s=self._held_s)
            self.count.sample(self.now, lanes=self.lanes, busy_since=since, moved=so_far)
            if self.count.wanted > self._can_have:
                self.count.give_up(self.now)
            if self.count.wanted != self.lanes:
                self.lanes = self.count.wanted
                self.history.append((self.now, self.lanes))

    @property
    def numbers(self) -> list[int]:
        return [lanes for _, lanes in self.history]


def test_count_doubles_as_long_as_every_lane_adds() -> None:
    link = Link(lambda lanes: lanes * MB)
    link.busy(60.0)
    assert link.numbers == [1, 2, 4, 8, 16]
    assert link.history[1][0] == pytest.approx(SETTLE_S + MEASURE_S, abs=2 * STEP_S)
    assert link.moved > 60 * 8 * MB


def test_count_goes_back_where_lanes_share_one_link_and_tries_ever_more_seldom() -> None:
    link = Link(lambda lanes: 5.0 * MB)
    link.busy(3 * HOLD_OFF_LIMIT_S)
    assert link.numbers[:5] == [1, 2, 1, 2, 1]
    assert max(link.numbers) == 2
    tries = [at for at, lanes in link.history if lanes == 2]
    pauses = [later - earlier for earlier, later in pairwise(tries)]
    assert pauses[0] == pytest.approx(HOLD_OFF_MIN_S, abs=10)
    assert pauses[1] == pytest.approx(2 * HOLD_OFF_MIN_S, abs=10)
    assert max(pauses) == pytest.approx(HOLD_OFF_LIMIT_S, abs=10)


def test_count_keeps_what_gained_and_goes_back_to_it() -> None:
    link = Link(lambda lanes: min(lanes * MB, 3.5 * MB))
    link.busy(50.0)
    assert link.numbers == [1, 2, 4, 8, 4]


@pytest.mark.parametrize(("gain", "kept"), [(1.14, 1), (1.16, 2)])
def test_count_keeps_a_lane_that_gains_15_percent(gain: float, kept: int) -> None:
    link = Link(lambda lanes: MB * (gain if lanes > 1 else 1.0))
    link.busy(HOLD_OFF_MIN_S)
    assert link.lanes == kept


@pytest.mark.parametrize(("share", "numbers"), [(0.0, [1, 2, 1]), (0.05, [1, 2, 1]), (0.2, [1, 2, 4, 2])])
def test_count_keeps_lanes_that_lose_nothing_where_buffers_held_the_fewer_back(
    share: float, numbers: list[int]
) -> None:
    """Two are held back no more, so that four would have to gain something."""
    link = Link(lambda lanes: 1.02 * MB if lanes > 1 else MB, held=lambda lanes: share if lanes == 1 else 0.0)
    link.busy(HOLD_OFF_MIN_S)
    assert link.numbers == numbers


def test_count_keeps_no_more_than_four_lanes_for_their_buffers_alone() -> None:
    link = Link(lambda lanes: MB * (1.0 + 0.01 * lanes), held=lambda lanes: 0.5)
    link.busy(HOLD_OFF_MIN_S)
    assert link.numbers == [1, 2, 4, 8, 4]


def test_count_goes_back_where_lanes_that_buffers_hold_back_move_less_together() -> None:
    link = Link(lambda lanes: 0.9 * MB if lanes > 1 else MB, held=lambda lanes: 0.5)
    link.busy(HOLD_OFF_MIN_S)
    assert link.numbers == [1, 2, 1]


def test_count_does_not_measure_a_link_before_its_window_has_grown() -> None:
    """The first second of a busy period is slow; two lanes are no faster, once they have grown."""
    link = Link(lambda lanes: MB if link.now > 1.0 else MB / 100)
    link.busy(20.0)
    assert link.numbers == [1, 2, 1]


def test_count_leaves_short_exchanges_alone() -> None:
    link = Link(lambda lanes: 100.0 * MB)
    for _ in range(100):
        link.busy(2.0)
        link.now += 10.0
    assert link.numbers == [1]


def test_count_goes_on_trying_in_the_next_busy_period() -> None:
    link = Link(lambda lanes: lanes * MB)
    for _ in range(4):
        link.busy(SETTLE_S + MEASURE_S + 2 * STEP_S)
        link.now += 300.0
    assert link.numbers == [1, 2, 4, 8, 16]


def test_count_tries_nothing_with_a_peer_that_takes_nothing() -> None:
    link = Link(lambda lanes: 0.0)
    link.busy(100.0)
    assert link.numbers == [1]


def test_count_stays_with_the_lanes_that_can_be_had() -> None:
    link = Link(lambda lanes: lanes * MB, can_have=2)
    link.busy(HOLD_OFF_MIN_S)
    assert link.numbers == [1, 2]
    link.busy(3 * HOLD_OFF_MIN_S)
    assert link.lanes == 2


def test_count_starts_at_least_and_ends_at_limit() -> None:
    count = LaneCount(least=3, limit=5)
    for step in range(400):
        now = step * STEP_S
        count.sample(now, lanes=count.wanted, busy_since=0.0, moved=Moved(taken=int(step * step * MB)))
    assert count.wanted == 5
    count.give_up(100.0)
    assert count.wanted >= 3


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_count, "MEASURE_S", 0.5)
    monkeypatch.setattr(lane_count, "SETTLE_S", 0.3)
    monkeypatch.setattr("shoal.swarm.lanes.pool.LOOK_PERIOD_S", 0.05)


HEADER = FrameHeader(kind=FrameKind.STATE, length=16 * 1024, total=16 * 1024)


def post(pool: LanePool, peer: PeerId, size: int) -> None:
    payload = bytes(HEADER.length)
    for _ in range(size // HEADER.length):
        pool.post(peer, HEADER, payload)


async def serve_throttled(stream: trio.SocketStream, *, to: str, bytes_per_s: int) -> None:
    """One connection through a proxy that slows down each by itself."""
    host, _, port = to.rpartition(":")
    async with await trio.open_tcp_stream(host, int(port)) as onward, stream, trio.open_nursery() as nursery:
        nursery.start_soon(_forward, onward, stream, None)
        nursery.start_soon(_forward, stream, onward, bytes_per_s)


async def _forward(source: trio.SocketStream, target: trio.SocketStream, bytes_per_s: int | None) -> None:
    paid_until = trio.current_time()
    try:
        async for data in source:
            await target.send_all(data)
            if bytes_per_s is not None:
                paid_until = max(paid_until, trio.current_time() - 0.1) + len(data) / bytes_per_s
                await trio.sleep_until(paid_until)
        await target.send_eof()
    except trio.BrokenResourceError:  # the pools are stopping
        pass


async def received_in(pool: LanePool, seconds: float) -> int:
    before = pool.bytes_received
    await trio.sleep(seconds)
    return pool.bytes_received - before


@pytest.mark.usefixtures("hurried")
async def test_pool_dials_more_lanes_where_each_is_held_back() -> None:
    rate, payload = MB, 64 * MB
    async with open_net() as net, trio.open_nursery() as nursery:
        alice = await net.add(ALICE, limits=LaneLimits(lanes_per_peer_limit=4))
        bob = await net.add(BOB)
        serve = partial(serve_throttled, to=bob.addresses[0], bytes_per_s=rate)
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        listener.socket.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, 64 * 1024)
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        bob.addresses = (f"127.0.0.1:{listener.socket.getsockname()[1]}",)
        await alice.ensure(BOB, deadline_s=WAIT_S)
        assert len(lanes_of(alice, BOB)) == 1
        post(alice, BOB, payload)
        with_one = await received_in(bob, 0.5)
        await until(lambda: alice._table.pair(BOB).count._kept == 4, deadline_s=LONG_S, look_s=LOOK_S)
        assert len(lanes_of(alice, BOB)) == len(lanes_of(bob, ALICE)) == 4
        assert await received_in(bob, 0.5) > 2 * with_one
        assert alice.queued_bytes(BOB) > 0  # it was busy all the time
        nursery.cancel_scope.cancel()


@pytest.mark.usefixtures("hurried")
async def test_pool_goes_back_to_one_lane_where_all_share_a_cap() -> None:
    peer, sender = ALICE, BOB  # who sends, and finds out, is not the one that decides
    frames = 8 * MB // HEADER.length
    async with open_net() as net:
        pool = await net.add(sender, limits=LaneLimits(upload=RateLimit(2 * MB)))
        await net.add(peer)
        await pool.ensure(peer, deadline_s=WAIT_S)
        post(pool, peer, frames * HEADER.length)
        closed = net.sinks[peer].closed
        await until(lambda: not closed.empty() and len(lanes_of(pool, peer)) == 1, deadline_s=LONG_S, look_s=LOOK_S)
        count = pool._table.pair(peer).count
        assert (count.wanted, count._hold_off.pause_s) == (1, 2 * HOLD_OFF_MIN_S)
        # Nothing was lost with the lane that went.
        await until(lambda: net.sinks[peer].frames.qsize() == frames, deadline_s=LONG_S, look_s=LOOK_S)
        assert closed.get_nowait() == (sender, None)


@pytest.mark.usefixtures("hurried")
async def test_pools_that_both_go_back_keep_the_lane_they_began_with() -> None:
    """Each would retire what it has dialled: one decides, so that none is retired that the other counts on."""
    pairs = ((ALICE, BOB), (BOB, ALICE))
    posted = dict.fromkeys((ALICE, BOB), 0)
    async with open_net() as net:
        pools = {me: await net.add(me, limits=LaneLimits(upload=RateLimit(2 * MB))) for me in (ALICE, BOB)}
        await pools[ALICE].ensure(BOB, deadline_s=WAIT_S)
        await until(lambda: len(lanes_of(pools[BOB], ALICE)) == 1)
        first = {me: lanes_of(pools[me], peer) for me, peer in pairs}

        def went_back() -> bool:
            """Keeps both busy: a trial that nothing waits for any more is never judged."""
            for me, peer in pairs:
                if pools[me].queued_bytes(peer) < MB:
                    post(pools[me], peer, MB)
                    posted[peer] += MB // HEADER.length
            return all(
                pools[me]._table.pair(peer).count._hold_off.pause_s == 2 * HOLD_OFF_MIN_S
                and lanes_of(pools[me], peer) == first[me]
                for me, peer in pairs
            )

        await until(went_back, deadline_s=LONG_S, look_s=LOOK_S)
        for me in posted:
            await until(lambda m=me: net.sinks[m].frames.qsize() == posted[m], deadline_s=LONG_S, look_s=LOOK_S)


async def test_pool_that_cannot_have_more_lanes_takes_back_what_it_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the peer, which decides, would keep as many for its sake, whoever dials them."""
    monkeypatch.setattr("shoal.swarm.lanes.pool.WIDEN_DEADLINE_S", 1.0)
    async with alice_and_bob() as (_, alice, bob):
        await alice.ensure(BOB, deadline_s=WAIT_S)
        alice.addresses = bob.addresses = (DEAD_ADDRESS,)
        await until(lambda: len(lanes_of(bob, ALICE)) == 1)
        bob._table.pair(ALICE).count.wanted = 2
        bob._follow_count(ALICE)
        await until(lambda: alice._table.pair(BOB).asked_for == 2)
        await until(lambda: alice._table.pair(BOB).asked_for == 1)
        assert bob._table.pair(ALICE).count.wanted == 1
        assert len(lanes_of(alice, BOB)) == 1


async def test_pool_of_a_fast_link_stays_with_one_lane() -> None:
    async with alice_and_bob() as (net, alice, _):
        await alice.ensure(BOB, deadline_s=WAIT_S)
        for _ in range(5):
            post(alice, BOB, 8 * MB)
            await until(lambda: alice.queued_bytes(BOB) == 0)
        assert alice._table.pair(BOB).count.wanted == 1
        assert len(lanes_of(alice, BOB)) == 1
        assert net.requests == 1
