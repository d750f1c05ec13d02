"""Chunk exchanges joined in memory: what one posts arrives at the other, or is lost, cut off or changed on the way."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.swarm import chunks
from shoal.swarm.chunks import FETCH_STALL_S, WINDOW_CHUNKS, ChunkExchange, ChunkRef, ChunkSpace
from shoal.swarm.frame import BULK_KINDS, FRAME_LIMIT_BYTES, FrameHeader, FrameKind

HERE, THERE, ELSEWHERE = PeerId("here"), PeerId("there"), PeerId("elsewhere")
SCOPE = bytes(range(8))


def ref(chunk: int, space: ChunkSpace = ChunkSpace.ANCHOR) -> ChunkRef:
    return ChunkRef(space, SCOPE, chunk)


def content(chunk: ChunkRef, size: int = 100) -> bytes:
    pattern = bytes((chunk.chunk * 31 + chunk.space * 7 + at) % 251 for at in range(251))
    return (pattern * (size // len(pattern) + 1))[:size]


@dataclass(frozen=True)
class Frame:
    sender: PeerId
    receiver: PeerId
    header: FrameHeader
    payload: bytes


@dataclass
class Net:
    """The lanes between exchanges. `on_frame` may drop a frame (None), change it, or hold it back to deliver later."""

    exchanges: dict[PeerId, ChunkExchange] = field(default_factory=dict)
    on_frame: Callable[[Frame], Frame | None] = lambda frame: frame
    cut: set[PeerId] = field(default_factory=set)
    frames: list[Frame] = field(default_factory=list)

    def add(self, peer: PeerId, held: dict[ChunkRef, bytes] | None = None) -> ChunkExchange:
        table = {} if held is None else held

        def lookup(wanted: ChunkRef) -> memoryview | None:
            return memoryview(table[wanted]) if wanted in table else None

        def post(receiver: PeerId, header: FrameHeader, payload: memoryview | bytes) -> None:
            if receiver in self.cut:
                raise NetworkError(f"there is no lane to {receiver}")
            frame = Frame(peer, receiver, header, bytes(payload))
            self.frames.append(frame)
            passed = self.on_frame(frame)
            if passed is not None:
                self.deliver(passed)

        self.exchanges[peer] = ChunkExchange(post=post, lookup=lookup)
        return self.exchanges[peer]

    def deliver(self, frame: Frame) -> bool:
        """As a lane's thread does it; whether the frame was wanted."""
        exchange = self.exchanges[frame.receiver]
        if frame.header.kind in BULK_KINDS:
            region = exchange.region(frame.sender, frame.header)
            if region is None:
                return False
            region[:] = frame.payload
        exchange.received(frame.sender, frame.header)
        return True

    def answers(self) -> list[Frame]:
        return [frame for frame in self.frames if frame.header.kind is not FrameKind.REQUEST]


@dataclass
class Taker:
    """Accepts chunks, and remembers them."""

    got: dict[ChunkRef, bytes] = field(default_factory=dict)

    def __call__(self, chunk: ChunkRef, data: memoryview) -> None:
        assert chunk not in self.got
        self.got[chunk] = bytes(data)


def run(main: Callable[[], Awaitable[None]]) -> None:
    """On a clock that jumps ahead when nothing else is to be done: deadlines cost no time, and are met exactly."""
    trio.run(main, clock=MockClock(autojump_threshold=0), strict_exception_groups=True)


def held(*numbers: int, size: int = 100) -> dict[ChunkRef, bytes]:
    return {ref(n, space): content(ref(n, space), size) for n in numbers for space in ChunkSpace}


# -- a donor that answers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 100, FRAME_LIMIT_BYTES, FRAME_LIMIT_BYTES + 1, 2 * FRAME_LIMIT_BYTES])
def test_fetch_brings_chunks_of_any_size(size: int) -> None:
    async def main() -> None:
        net, taker, table = Net(), Taker(), held(0, 1, size=size)
        here = net.add(HERE)
        net.add(THERE, table)
        await here.fetch(THERE, [(chunk, size) for chunk in table], taker)
        assert taker.got == table
        frames = -(-size // FRAME_LIMIT_BYTES)
        assert len(net.answers()) == frames * len(table)

    run(main)


def test_fetch_keeps_a_window_of_requests_open() -> None:
    async def main() -> None:
        table = held(*range(20))
        wanted = [(chunk, 100) for chunk in table]
        held_back: list[Frame] = []

        def hold_back(frame: Frame) -> Frame | None:
            if frame.header.kind is FrameKind.STATE:
                held_back.append(frame)
                return None
            return frame

        net, taker = Net(on_frame=hold_back), Taker()
        here = net.add(HERE)
        net.add(THERE, table)
        asked: list[int] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(here.fetch, THERE, wanted, taker)
            for left in range(len(table), 0, -1):
                while len(held_back) < min(left, WINDOW_CHUNKS):
                    await trio.lowlevel.checkpoint()
                await wait_all_tasks_blocked()
                asked.append(len(held_back))
                assert net.deliver(held_back.pop())  # the newest first: any order will do
        assert taker.got == table
        assert len(table) == 60
        assert asked == [WINDOW_CHUNKS] * 45 + list(range(WINDOW_CHUNKS - 1, 0, -1))

    run(main)


def test_fetch_takes_the_frames_of_a_chunk_in_any_order() -> None:
    """Two lanes to one peer, and the second frame overtakes the first."""

    async def main() -> None:
        size = 3 * FRAME_LIMIT_BYTES + 5
        table = {ref(4): content(ref(4), size)}
        waiting: list[Frame] = []

        def backwards(frame: Frame) -> Frame | None:
            if frame.header.kind is not FrameKind.STATE:
                return frame
            waiting.append(frame)
            if len(waiting) == 4:
                for late in reversed(waiting):
                    assert net.deliver(late)
            return None

        net, taker = Net(on_frame=backwards), Taker()
        here = net.add(HERE)
        net.add(THERE, table)
        await here.fetch(THERE, [(ref(4), size)], taker)
        assert taker.got == table

    run(main)


def test_fetches_from_two_peers_do_not_mix() -> None:
    async def main() -> None:
        mine, other = {ref(0): b"a" * 100, ref(1): b"b" * 100}, {ref(0): b"A" * 100, ref(1): b"B" * 100}
        net, first, second = Net(), Taker(), Taker()
        here = net.add(HERE)
        net.add(THERE, mine)
        net.add(ELSEWHERE, other)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(here.fetch, THERE, [(ref(0), 100), (ref(1), 100)], first)
            nursery.start_soon(here.fetch, ELSEWHERE, [(ref(1), 100), (ref(0), 100)], second)
        assert (first.got, second.got) == (mine, other)

    run(main)


def test_fetch_from_a_peer_under_way_refuses_another() -> None:
    async def main() -> None:
        net, taker = Net(on_frame=lambda frame: None), Taker()
        here = net.add(HERE)
        net.add(THERE)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(here.fetch, THERE, [(ref(0), 100)], taker)
            await wait_all_tasks_blocked()
            with pytest.raises(NetworkError, match="already fetching from there"):
                await here.fetch(THERE, [(ref(1), 100)], taker)
            nursery.cancel_scope.cancel()
        net.on_frame = lambda frame: frame
        net.add(THERE, held(0))
        await here.fetch(THERE, [(ref(0), 100)], taker)  # the cancelled one is not in the way
        assert taker.got == {ref(0): content(ref(0))}

    run(main)


# -- donors that do not --------------------------------------------------------------------------------------


def test_refused_chunk_ends_the_fetch_and_keeps_what_came() -> None:
    async def main() -> None:
        net, taker = Net(), Taker()
        here = net.add(HERE)
        net.add(THERE, held(0, 1))
        wanted = [(ref(0), 100), (ref(1), 100), (ref(9, ChunkSpace.MOMENTUM), 100)]
        with pytest.raises(NetworkError, match=r"there does not hold chunk 9 \(momentum\)"):
            await here.fetch(THERE, wanted, taker)
        assert taker.got == {ref(0): content(ref(0)), ref(1): content(ref(1))}
        assert not here._incoming
        assert not here._fetches

    run(main)


def test_silent_donor_is_given_up_after_the_stall_deadline() -> None:
    async def main() -> None:
        def lose_the_second(frame: Frame) -> Frame | None:
            return None if frame.header.kind is FrameKind.STATE and frame.header.chunk == 1 else frame

        net, taker = Net(on_frame=lose_the_second), Taker()
        here = net.add(HERE)
        net.add(THERE, held(0, 1, 2))
        began = trio.current_time()
        with pytest.raises(NetworkError, match="there sent nothing for 5"):
            await here.fetch(THERE, [(ref(n), 100) for n in (0, 1, 2)], taker)
        assert trio.current_time() - began == pytest.approx(FETCH_STALL_S)
        assert set(taker.got) == {ref(0), ref(2)}

    run(main)


def test_slow_donor_is_not_given_up_while_bytes_arrive() -> None:
    """A chunk of 16 MB takes longer than the stall deadline on many a home's line."""

    async def main() -> None:
        size = 4 * FRAME_LIMIT_BYTES
        table = {ref(0): content(ref(0), size)}
        waiting: list[Frame] = []

        def hold_back(frame: Frame) -> Frame | None:
            waiting.append(frame)
            return frame if frame.header.kind is FrameKind.REQUEST else None

        net, taker = Net(on_frame=hold_back), Taker()
        here = net.add(HERE)
        net.add(THERE, table)
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(here.fetch, THERE, [(ref(0), size)], taker)
            await wait_all_tasks_blocked()
            for frame in waiting[1:]:
                await trio.sleep(0.9 * FETCH_STALL_S)
                assert net.deliver(frame)
        assert taker.got == table
        assert trio.current_time() - began > 3 * FETCH_STALL_S

    run(main)


def test_donor_that_stops_within_a_chunk_is_given_up() -> None:
    async def main() -> None:
        size = 2 * FRAME_LIMIT_BYTES
        net, taker = Net(on_frame=lambda frame: None if frame.header.offset else frame), Taker()
        here = net.add(HERE)
        net.add(THERE, {ref(0): content(ref(0), size)})
        began = trio.current_time()
        with pytest.raises(NetworkError, match="sent nothing"):
            await here.fetch(THERE, [(ref(0), size)], taker)
        assert trio.current_time() - began <= 2 * FETCH_STALL_S
        assert taker.got == {}

    run(main)


def test_broken_lane_ends_the_fetch_at_once() -> None:
    async def main() -> None:
        net, taker = Net(on_frame=lambda frame: None), Taker()
        here = net.add(HERE)
        net.add(THERE)
        began = trio.current_time()
        async with trio.open_nursery() as nursery:

            async def fetch() -> None:
                with pytest.raises(NetworkError, match="the lane to there broke"):
                    await here.fetch(THERE, [(ref(n), 100) for n in range(40)], taker)

            nursery.start_soon(fetch)
            await wait_all_tasks_blocked()
            here.lane_closed(ELSEWHERE)  # another's is none of its business
            await trio.sleep(1)
            lane = threading.Thread(target=here.lane_closed, args=(THERE,))
            lane.start()
            lane.join()  # without letting the clock jump meanwhile
        assert trio.current_time() - began == pytest.approx(1)

    run(main)


def test_fetch_without_a_lane_fails_and_leaves_nothing_behind() -> None:
    async def main() -> None:
        net = Net(cut={THERE})
        here = net.add(HERE)
        with pytest.raises(NetworkError, match="no lane"):
            await here.fetch(THERE, [(ref(0), 100)], Taker())
        assert not here._incoming
        assert not here._fetches

    run(main)


@pytest.mark.parametrize("size", [1, 99, 101, FRAME_LIMIT_BYTES + 100])
def test_answer_of_another_size_than_expected_is_not_taken(size: int) -> None:
    async def main() -> None:
        net, taker = Net(), Taker()
        here = net.add(HERE)
        net.add(THERE, held(0, size=size))
        with pytest.raises(NetworkError, match="sent nothing"):
            await here.fetch(THERE, [(ref(0), 100)], taker)
        assert taker.got == {}

    run(main)


def test_accept_that_refuses_a_chunk_ends_the_fetch() -> None:
    async def main() -> None:
        def refuse(chunk: ChunkRef, data: memoryview) -> None:
            raise RemoteError("not the certified one", peer=THERE)

        net = Net()
        here = net.add(HERE)
        net.add(THERE, held(0, 1))
        with pytest.raises(RemoteError, match="not the certified one"):
            await here.fetch(THERE, [(ref(0), 100), (ref(1), 100)], refuse)
        assert not here._incoming
        taker = Taker()
        await here.fetch(THERE, [(ref(0), 100)], taker)
        assert taker.got == {ref(0): content(ref(0))}

    run(main)


# -- frames that nobody asked for ----------------------------------------------------------------------------


def state_header(chunk: int, *, size: int = 100, offset: int = 0, length: int | None = None) -> FrameHeader:
    return FrameHeader(
        kind=FrameKind.STATE,
        chunk=chunk,
        scope=SCOPE,
        offset=offset,
        total=size,
        length=size - offset if length is None else length,
    )


def test_frames_that_nobody_asked_for_have_no_region() -> None:
    async def main() -> None:
        net = Net(on_frame=lambda frame: frame if frame.header.kind is FrameKind.REQUEST else None)
        here = net.add(HERE)
        net.add(THERE, held(0))
        net.add(ELSEWHERE)
        assert here.region(THERE, state_header(0)) is None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(here.fetch, THERE, [(ref(0), 100)], Taker())
            await wait_all_tasks_blocked()
            assert here.region(ELSEWHERE, state_header(0)) is None
            assert here.region(THERE, state_header(1)) is None
            assert here.region(THERE, replace(state_header(0), scope=bytes(8))) is None
            assert here.region(THERE, replace(state_header(0), flags=ChunkSpace.MOMENTUM)) is None
            assert here.region(THERE, state_header(0, size=101)) is None
            assert here.region(THERE, state_header(0, size=101, length=100)) is None
            assert here.region(THERE, state_header(0, offset=1)) is None
            assert here.region(THERE, state_header(0, length=99)) is None
            assert here.region(THERE, replace(state_header(0), kind=FrameKind.CONTRIBUTION)) is None
            # A refusal by one who was not asked ends nothing.
            refusal = FrameHeader(kind=FrameKind.REFUSED, chunk=0, scope=SCOPE, length=0)
            here.received(ELSEWHERE, refusal)
            here.received(THERE, replace(refusal, chunk=1))
            await wait_all_tasks_blocked()
            assert here.region(THERE, state_header(0)) is not None
            nursery.cancel_scope.cancel()
        assert here.region(THERE, state_header(0)) is None

    run(main)


def test_place_of_a_frame_is_given_out_once() -> None:
    """Else a second lane could write into a chunk after its hash was checked."""

    async def main() -> None:
        net, taker = Net(on_frame=lambda frame: frame if frame.header.kind is FrameKind.REQUEST else None), Taker()
        here = net.add(HERE)
        net.add(THERE, held(0))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(here.fetch, THERE, [(ref(0), 100)], taker)
            await wait_all_tasks_blocked()
            region = here.region(THERE, state_header(0))
            assert region is not None
            assert here.region(THERE, state_header(0)) is None
            region[:] = content(ref(0))
            here.received(THERE, state_header(0))
        assert taker.got == {ref(0): content(ref(0))}

    run(main)


def test_request_for_an_unknown_kind_of_chunk_is_the_peers_fault() -> None:
    net = Net()
    here = net.add(HERE, held(0))
    strange = FrameHeader(kind=FrameKind.REQUEST, flags=len(ChunkSpace), scope=SCOPE, length=0)
    with pytest.raises(RemoteError, match="unknown kind 3"):
        here.received(THERE, strange)
    with pytest.raises(RemoteError, match="unknown kind 3"):
        here.region(THERE, replace(state_header(0), flags=3))


def test_request_for_what_is_not_held_is_refused() -> None:
    net = Net(on_frame=lambda frame: None)
    here = net.add(HERE, held(0))
    net.add(THERE)
    request = FrameHeader(kind=FrameKind.REQUEST, flags=ChunkSpace.FINAL, chunk=7, scope=SCOPE, length=0)
    here.received(THERE, request)
    (answer,) = net.frames
    assert answer.receiver == THERE
    assert (answer.header.kind, answer.header.chunk, answer.header.flags) == (FrameKind.REFUSED, 7, ChunkSpace.FINAL)


def test_answer_after_the_end_of_the_trio_run_is_dropped() -> None:
    fetches = []

    async def main() -> None:
        fetches.append(chunks._Fetch(1))

    run(main)
    fetches[0].deliver(ref(0), bytearray(1))  # a lane's thread may outlive the run by a moment
