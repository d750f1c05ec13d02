"""Chunk exchanges joined in memory: what one posts arrives at the other, or is lost, cut off or changed on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import trio
from blake3 import blake3
from msgspec.structs import replace

from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.swarm.lanes import chunks
from shoal.swarm.lanes.chunks import (
    FETCH_LIMIT,
    RUN_LIMIT,
    ChunkArrived,
    ChunkExchange,
    ChunkFailed,
    ChunkRef,
    ChunkSpace,
    LaneBroke,
)
from shoal.swarm.lanes.frame import BULK_KINDS, FRAME_LIMIT_BYTES, FrameHeader, FrameKind
from shoal.swarm.lanes.queue import Later, due

pytestmark = pytest.mark.virtual_time(limit_s=1000.0)

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

        def post(receiver: PeerId, header: FrameHeader, payload: memoryview | bytes | Later) -> None:
            if receiver in self.cut:
                raise NetworkError(f"there is no lane to {receiver}")
            header, payload = due(header, payload)
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
    """Accepts chunks, and remembers them; `refuse` names those that it finds wrong."""

    got: dict[ChunkRef, bytes] = field(default_factory=dict)
    sources: dict[ChunkRef, PeerId] = field(default_factory=dict)
    digests: dict[ChunkRef, bytes | None] = field(default_factory=dict)
    refuse: Callable[[PeerId, ChunkRef, bytes], bool] = lambda peer, chunk, data: False

    def __call__(self, peer: PeerId, chunk: ChunkRef, data: memoryview, digest: bytes | None) -> None:
        if self.refuse(peer, chunk, bytes(data)):
            raise RemoteError("not the certified one", peer=peer)
        assert chunk not in self.got
        self.digests[chunk] = digest
        self.got[chunk] = bytes(data)
        self.sources[chunk] = peer


async def fetch_from(
    here: ChunkExchange, peer: PeerId, wanted: dict[ChunkRef, bytes], taker: Taker, *, hashing: bool = False
) -> None:
    """Ask one peer for everything, and wait for as many answers."""
    with here.fetch(taker, hashing=hashing) as fetch:
        for chunk, data in wanted.items():
            fetch.ask(peer, chunk, len(data))
        for _ in wanted:
            event = await fetch.next()
            assert isinstance(event, ChunkArrived), event


def held(*numbers: int, size: int = 100) -> dict[ChunkRef, bytes]:
    return {ref(n, space): content(ref(n, space), size) for n in numbers for space in ChunkSpace}


def requests_only(frame: Frame) -> Frame | None:
    """Donors answer nothing."""
    return frame if frame.header.kind is FrameKind.REQUEST else None


# -- donors that answer --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 100, FRAME_LIMIT_BYTES, FRAME_LIMIT_BYTES + 1, 3 * FRAME_LIMIT_BYTES])
@pytest.mark.parametrize("hashing", [True, False])
async def test_fetch_brings_chunks_of_any_size_and_their_hashes_where_they_are_wanted(size: int, hashing: bool) -> None:
    net, taker, table = Net(), Taker(), held(0, 1, size=size)
    here = net.add(HERE)
    net.add(THERE, table)
    await fetch_from(here, THERE, table, taker, hashing=hashing)
    assert taker.got == table
    assert taker.digests == {chunk: blake3(data).digest() if hashing else None for chunk, data in table.items()}
    frames = -(-size // FRAME_LIMIT_BYTES)
    assert len(net.answers()) == frames * len(table)
    assert not here._incoming
    assert not here._fetches


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
@pytest.mark.parametrize("slow", [None, 0, 1, 2])
async def test_hash_is_that_of_the_chunk_in_whatever_order_its_frames_come(
    order: tuple[int, ...], slow: int | None
) -> None:
    """Also while another lane's thread, the `slow` frame's, is still hashing: it goes on after the last has come."""
    data = content(ref(4), 2 * FRAME_LIMIT_BYTES + 5)
    waiting: list[Frame] = []
    net, taker = Net(on_frame=lambda frame: waiting.append(frame) if frame.payload else frame), Taker()
    here = net.add(HERE)
    net.add(THERE, {ref(4): data})
    with here.fetch(taker, hashing=True) as fetch:
        fetch.ask(THERE, ref(4), len(data))
        (incoming,) = here._incoming.values()
        hashing, go_on = threading.Event(), threading.Event()
        hasher = incoming.hasher

        class Held:
            """Of the slow frame: waits in the middle."""

            def update(self, part: memoryview) -> None:
                assert hasher is not None
                if slow is not None and threading.current_thread() is threads[slow]:
                    hashing.set()
                    assert go_on.wait(60)
                hasher.update(part)

            def digest(self) -> bytes:
                assert hasher is not None
                return hasher.digest()

        incoming.hasher = Held()  # type: ignore[assignment]
        threads = [threading.Thread(target=net.deliver, args=(frame,)) for frame in waiting]
        for number in order:
            threads[number].start()
            while number == slow and threads[number].is_alive() and not hashing.wait(0.001):
                pass  # until it hashes, or is done because its turn has not come
            if number != slow:
                threads[number].join(60)
        go_on.set()
        for thread in threads:
            thread.join(60)
        assert isinstance(await fetch.next(), ChunkArrived)
    assert taker.digests == {ref(4): blake3(data).digest()}
    assert taker.got == {ref(4): data}


async def test_one_fetch_asks_several_donors_and_tells_who_brought_what() -> None:
    table = held(*range(6))
    net, taker = Net(), Taker()
    here = net.add(HERE)
    for peer in (THERE, ELSEWHERE):
        net.add(peer, table)
    with here.fetch(taker) as fetch:
        for number, chunk in enumerate(table):
            fetch.ask((THERE, ELSEWHERE)[number % 2], chunk, 100)
        events = [await fetch.next() for _ in table]
        half = 100 * len(table) // 2
        assert [fetch.moved_bytes(peer) for peer in (THERE, ELSEWHERE, HERE)] == [half, half, 0]
    assert all(isinstance(event, ChunkArrived) for event in events)
    assert taker.got == table
    assert list(taker.sources.values()) == [THERE, ELSEWHERE] * (len(table) // 2)


async def test_fetches_side_by_side_do_not_mix() -> None:
    mine, other = {ref(0): b"a" * 100, ref(1): b"b" * 100}, {ref(0): b"A" * 100, ref(1): b"B" * 100}
    net, first, second = Net(), Taker(), Taker()
    here = net.add(HERE)
    net.add(THERE, mine)
    net.add(ELSEWHERE, other)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fetch_from, here, THERE, mine, first)
        nursery.start_soon(fetch_from, here, ELSEWHERE, other, second)
    assert (first.got, second.got) == (mine, other)


async def test_chunk_is_asked_of_a_peer_by_one_fetch_at_a_time() -> None:
    net, taker = Net(on_frame=requests_only), Taker()
    here = net.add(HERE)
    net.add(THERE, held(0))
    with here.fetch(taker) as first, here.fetch(taker) as second:
        first.ask(THERE, ref(0), 100)
        with pytest.raises(NetworkError, match="chunk 0 is being fetched from there already"):
            second.ask(THERE, ref(0), 100)
        second.ask(THERE, ref(1), 100)
    net.on_frame = lambda frame: frame
    await fetch_from(here, THERE, {ref(0): content(ref(0))}, taker)  # the one that ended is not in the way
    assert taker.got == {ref(0): content(ref(0))}


async def test_fetches_and_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "REQUEST_LIMIT", 3)
    net = Net(on_frame=requests_only)
    here = net.add(HERE)
    net.add(THERE)
    open_fetches = [here.fetch(Taker()) for _ in range(FETCH_LIMIT)]
    with pytest.raises(NetworkError, match=f"{FETCH_LIMIT} fetches are under way"):
        here.fetch(Taker())
    with open_fetches[0] as fetch:
        for number in range(3):
            fetch.ask(THERE, ref(number), 100)
        with pytest.raises(NetworkError, match="3 chunks are asked for already"):
            fetch.ask(THERE, ref(3), 100)
        fetch.forget(THERE, ref(0))
        fetch.ask(THERE, ref(3), 100)
    with here.fetch(Taker()):
        pass


async def test_buffers_are_used_again_and_taken_only_when_bytes_come() -> None:
    net, taker = Net(on_frame=requests_only), Taker()
    here = net.add(HERE)
    net.add(THERE, held(*range(9)))
    with here.fetch(taker) as fetch:
        for number in range(9):
            fetch.ask(THERE, ref(number), 100)
        assert all(incoming.data is None for incoming in here._incoming.values())
        buffers = set()
        for frame in [frame for frame in net.frames if frame.header.kind is FrameKind.STATE]:
            region = here.region(THERE, frame.header)
            assert region is not None
            buffers.add(id(region.obj))
            region[:] = frame.payload
            here.received(THERE, frame.header)
    assert len(buffers) == 1
    assert taker.got == {ref(n): content(ref(n)) for n in range(9)}


# -- donors that do not --------------------------------------------------------------------------------------


async def test_wrong_chunk_is_told_with_its_error_and_its_buffer_is_not_used_again() -> None:
    net, taker = Net(), Taker(refuse=lambda peer, chunk, data: chunk == ref(0))
    here = net.add(HERE)
    net.add(THERE, held(0, 1))
    with here.fetch(taker) as fetch:
        fetch.ask(THERE, ref(0), 100)
        failed = await fetch.next()
        assert isinstance(failed, ChunkFailed)
        assert isinstance(failed.error, RemoteError)
        assert failed.error.peer == THERE
        assert failed.error.__traceback__ is None
        assert fetch._spare == []
        fetch.ask(THERE, ref(1), 100)
        assert await fetch.next() == ChunkArrived(THERE, ref(1))
    assert set(taker.got) == {ref(1)}


async def test_every_frame_counts_as_movement() -> None:
    """A chunk of 16 MB takes longer than any stall deadline on many a home's line."""
    size = 4 * FRAME_LIMIT_BYTES
    net, taker = Net(on_frame=requests_only), Taker()
    here = net.add(HERE)
    net.add(THERE, {ref(0): content(ref(0), size)})
    with here.fetch(taker) as fetch:
        fetch.ask(THERE, ref(0), size)
        seen = []
        for frame in net.answers():
            assert net.deliver(frame)
            seen.append(fetch.moved_bytes(THERE))
        assert seen == [FRAME_LIMIT_BYTES * n for n in (1, 2, 3, 4)]
        assert await fetch.next() == ChunkArrived(THERE, ref(0))


async def test_broken_lane_is_told_at_once_to_those_who_wait_for_that_peer() -> None:
    net = Net(on_frame=requests_only)
    here = net.add(HERE)
    net.add(THERE)
    net.add(ELSEWHERE)
    with here.fetch(Taker()) as fetch, here.fetch(Taker()) as other:
        fetch.ask(THERE, ref(0), 100)
        other.ask(ELSEWHERE, ref(0), 100)
        lane = threading.Thread(target=here.lane_failed, args=(THERE,))
        lane.start()
        lane.join()  # without letting the clock jump meanwhile
        assert await fetch.next() == LaneBroke(THERE)
        with trio.move_on_after(100) as scope:
            await other.next()
        assert scope.cancelled_caught


async def test_asking_without_a_lane_fails_and_leaves_nothing_behind() -> None:
    net = Net(cut={THERE})
    here = net.add(HERE)
    with here.fetch(Taker()) as fetch:
        with pytest.raises(NetworkError, match="no lane"):
            fetch.ask(THERE, ref(0), 100)
        assert not here._incoming


async def test_what_is_forgotten_comes_no_more() -> None:
    net, taker = Net(on_frame=requests_only), Taker()
    here = net.add(HERE)
    for peer in (THERE, ELSEWHERE):
        net.add(peer, held(*range(3)))
    with here.fetch(taker) as fetch:
        for peer in (THERE, ELSEWHERE):
            for number in range(3):
                fetch.ask(peer, ref(number), 100)
        fetch.forget(THERE, ref(1))
        fetch.forget(ELSEWHERE)
        late = {(frame.sender, frame.header.chunk): net.deliver(frame) for frame in net.answers()}
        assert {key for key, wanted in late.items() if wanted} == {(THERE, 0), (THERE, 2)}
    assert set(taker.got) == {ref(0), ref(2)}
    assert [net.deliver(frame) for frame in net.answers()] == [False] * 6  # and after the end nothing at all


async def test_late_frames_of_a_chunk_given_up_cannot_reach_the_one_that_took_its_place() -> None:
    """The region that was given out to the first is not the second's."""
    net, taker = Net(on_frame=requests_only), Taker()
    here = net.add(HERE)
    for peer in (THERE, ELSEWHERE):
        net.add(peer, held(0))
    with here.fetch(taker) as fetch:
        fetch.ask(THERE, ref(0), 100)
        region = here.region(THERE, state_header(0))
        assert region is not None
        fetch.forget(THERE, ref(0))
        fetch.ask(ELSEWHERE, ref(0), 100)
        other = here.region(ELSEWHERE, state_header(0))
        assert other is not None
        other[:] = content(ref(0))
        region[:] = b"!" * 100  # a lane's thread is slow to decrypt
        here.received(ELSEWHERE, state_header(0))
        here.received(THERE, state_header(0))
        assert await fetch.next() == ChunkArrived(ELSEWHERE, ref(0))
        assert region.obj is not None
        assert all(spare is not region.obj for spare in fetch._spare)
    assert taker.got == {ref(0): content(ref(0))}


@pytest.mark.parametrize("size", [1, 99, 101, FRAME_LIMIT_BYTES + 100])
async def test_answer_of_another_size_than_expected_is_not_taken(size: int) -> None:
    net, taker = Net(), Taker()
    here = net.add(HERE)
    net.add(THERE, held(0, size=size))
    with here.fetch(taker) as fetch, trio.move_on_after(100) as scope:
        fetch.ask(THERE, ref(0), 100)
        await fetch.next()
    assert scope.cancelled_caught
    assert fetch.moved_bytes(THERE) == 0
    assert taker.got == {}


async def test_fetch_is_woken() -> None:
    with Net().add(HERE).fetch(Taker()) as fetch:
        fetch.wake()
        assert await fetch.next() is None


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


async def test_frames_that_nobody_asked_for_have_no_region() -> None:
    net = Net(on_frame=requests_only)
    here = net.add(HERE)
    net.add(THERE, held(0))
    net.add(ELSEWHERE)
    assert here.region(THERE, state_header(0)) is None
    with here.fetch(Taker()) as fetch:
        fetch.ask(THERE, ref(0), 100)
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
        assert here.region(THERE, state_header(0)) is not None
    assert here.region(THERE, state_header(0)) is None


async def test_place_of_a_frame_is_given_out_once() -> None:
    """Else a second lane could write into a chunk after its hash was checked."""
    net, taker = Net(on_frame=requests_only), Taker()
    here = net.add(HERE)
    net.add(THERE, held(0))
    with here.fetch(taker) as fetch:
        fetch.ask(THERE, ref(0), 100)
        region = here.region(THERE, state_header(0))
        assert region is not None
        assert here.region(THERE, state_header(0)) is None
        region[:] = content(ref(0))
        here.received(THERE, state_header(0))
    assert taker.got == {ref(0): content(ref(0))}


def test_request_for_an_unknown_kind_of_chunk_is_the_peers_fault() -> None:
    net = Net()
    here = net.add(HERE, held(0))
    strange = FrameHeader(kind=FrameKind.REQUEST, flags=len(ChunkSpace), scope=SCOPE, length=0)
    with pytest.raises(RemoteError, match=f"unknown kind {len(ChunkSpace)}"):
        here.received(THERE, strange)
    with pytest.raises(RemoteError, match=f"unknown kind {len(ChunkSpace)}"):
        here.region(THERE, replace(state_header(0), flags=len(ChunkSpace)))


def test_request_for_what_is_not_held_is_refused() -> None:
    net = Net(on_frame=lambda frame: None)
    here = net.add(HERE, held(0))
    net.add(THERE)
    request = FrameHeader(kind=FrameKind.REQUEST, flags=ChunkSpace.FINAL, chunk=7, scope=SCOPE, length=0)
    here.received(THERE, request)
    (answer,) = net.frames
    assert answer.receiver == THERE
    assert (answer.header.kind, answer.header.chunk, answer.header.flags) == (FrameKind.REFUSED, 7, ChunkSpace.FINAL)


@pytest.mark.parametrize("fails_at", [1, 2])
def test_request_for_what_cannot_be_read_is_refused_whether_it_is_seen_at_once_or_when_its_turn_comes(
    fails_at: int,
) -> None:
    looked_up, answers = 0, []

    def lookup(wanted: ChunkRef) -> memoryview | None:
        nonlocal looked_up
        looked_up += 1
        if looked_up == fails_at:
            raise ValueError("mmap closed or invalid")
        return memoryview(content(wanted))

    def post(receiver: PeerId, header: FrameHeader, payload: memoryview | bytes | Later) -> None:
        answers.append(due(header, payload))

    here = ChunkExchange(post=post, lookup=lookup)
    here.received(THERE, FrameHeader(kind=FrameKind.REQUEST, flags=ChunkSpace.FINAL, chunk=7, scope=SCOPE, length=0))
    here.received(THERE, FrameHeader(kind=FrameKind.REQUEST, flags=ChunkSpace.FINAL, chunk=8, scope=SCOPE, length=0))
    (refused, nothing), (header, data) = answers
    assert (refused.kind, refused.chunk, refused.flags, bytes(nothing)) == (
        FrameKind.REFUSED,
        7,
        ChunkSpace.FINAL,
        b"",
    )
    assert (header.kind, header.chunk, bytes(data)) == (FrameKind.STATE, 8, content(ref(8, ChunkSpace.FINAL)))


async def test_run_of_chunks_is_one_request_and_what_is_not_held_of_it_is_refused() -> None:
    net, taker = Net(), Taker()
    wanted = {ref(chunk): content(ref(chunk), 100 + chunk) for chunk in range(3, 8)}
    here = net.add(HERE)
    net.add(THERE, {chunk: data for chunk, data in wanted.items() if chunk.chunk != 5})
    with here.fetch(taker) as fetch:
        fetch.ask(THERE, ref(3), *map(len, wanted.values()))
        events = [await fetch.next() for _ in wanted]
    assert len(net.frames) - len(net.answers()) == 1
    (refused,) = (event for event in events if isinstance(event, ChunkFailed))
    assert (refused.peer, refused.ref, type(refused.error)) == (THERE, ref(5), NetworkError)
    assert taker.got == {chunk: data for chunk, data in wanted.items() if chunk.chunk != 5}


async def test_run_that_overlaps_what_is_under_way_asks_for_nothing() -> None:
    net, taker = Net(on_frame=requests_only), Taker()
    here = net.add(HERE)
    net.add(THERE, held(*range(4)))
    with here.fetch(taker) as fetch:
        fetch.ask(THERE, ref(2), 100)
        with pytest.raises(NetworkError, match="chunk 2 is being fetched"):
            fetch.ask(THERE, ref(0), 100, 100, 100)
        fetch.ask(THERE, ref(0), 100, 100)
    assert len(net.frames) - len(net.answers()) == 2


def test_request_for_more_chunks_than_a_run_has_is_the_peers_fault() -> None:
    net = Net(on_frame=lambda frame: None)
    here = net.add(HERE, held(*range(RUN_LIMIT + 1)))
    net.add(THERE)
    longest = FrameHeader(kind=FrameKind.REQUEST, scope=SCOPE, length=0, total=RUN_LIMIT - 1)
    here.received(THERE, longest)
    assert [frame.header.chunk for frame in net.frames] == list(range(RUN_LIMIT))
    with pytest.raises(RemoteError, match=f"asks for {RUN_LIMIT + 1} chunks at once"):
        here.received(THERE, replace(longest, total=RUN_LIMIT))
    assert len(net.frames) == RUN_LIMIT


async def test_answer_after_the_end_of_the_trio_run_is_dropped() -> None:
    taker, fetches = Taker(), []
    fetches.append(Net().add(HERE).fetch(taker))
    await trio.lowlevel.checkpoint()
    fetches[0].complete(
        THERE, ref(0), bytearray(1), None, lent=False
    )  # a lane's thread may outlive the run by a moment
    assert taker.got == {ref(0): bytes(1)}


# -- chunks that are decrypted into their place --------------------------------------------------------------


@dataclass
class Memories:
    """Lends the place of each chunk to one at a time, and remembers how it came back."""

    memory: dict[ChunkRef, bytearray] = field(default_factory=dict)
    lent: set[ChunkRef] = field(default_factory=set)
    returned: list[tuple[ChunkRef, bool]] = field(default_factory=list)

    def lend(self, chunk: ChunkRef) -> memoryview | None:
        if chunk in self.lent:
            return None
        self.lent.add(chunk)
        return memoryview(self.memory.setdefault(chunk, bytearray(2 * FRAME_LIMIT_BYTES)))

    def give_back(self, chunk: ChunkRef, *, clean: bool) -> None:
        self.lent.remove(chunk)
        self.returned.append((chunk, clean))


TWO_FRAMES = 2 * FRAME_LIMIT_BYTES


def frames_of(net: Net, peer: PeerId) -> list[Frame]:
    return [frame for frame in net.answers() if frame.sender == peer]


async def test_chunk_is_decrypted_where_it_belongs() -> None:
    places, seen, net = Memories(), list[memoryview](), Net()
    here = net.add(HERE)
    net.add(THERE, held(0, size=TWO_FRAMES))
    with here.fetch(lambda peer, chunk, data, digest: seen.append(data), places) as fetch:
        fetch.ask(THERE, ref(0), TWO_FRAMES)
        assert await fetch.next() == ChunkArrived(THERE, ref(0))
    assert seen[0].obj is places.memory[ref(0)]
    assert bytes(places.memory[ref(0)]) == content(ref(0), TWO_FRAMES)
    assert places.returned == []  # it was taken, not given back
    assert fetch._spare == []


async def test_place_has_one_writer_and_the_second_donors_copy_comes_in_a_buffer() -> None:
    places, taker, net = Memories(), Taker(), Net(on_frame=requests_only)
    here = net.add(HERE)
    for peer in (THERE, ELSEWHERE):
        net.add(peer, held(0, size=TWO_FRAMES))
    with here.fetch(taker, places) as fetch:
        for peer in (THERE, ELSEWHERE):
            fetch.ask(peer, ref(0), TWO_FRAMES)
        first, *_ = frames_of(net, THERE)
        region = here.region(THERE, first.header)
        assert region is not None
        assert region.obj is places.memory[ref(0)]
        other = here.region(ELSEWHERE, first.header)
        assert other is not None
        assert other.obj is not places.memory[ref(0)]


@pytest.mark.parametrize("writing", [False, True])
async def test_place_of_a_request_that_is_given_up_is_returned_with_word_of_who_may_write(writing: bool) -> None:
    places, net = Memories(), Net(on_frame=requests_only)
    here = net.add(HERE)
    net.add(THERE, held(0, size=TWO_FRAMES))
    with here.fetch(Taker(), places) as fetch:
        fetch.ask(THERE, ref(0), TWO_FRAMES)
        first, second = frames_of(net, THERE)
        assert net.deliver(first)
        if writing:
            assert here.region(THERE, second.header) is not None  # and a lane's thread is slow to decrypt
        fetch.forget(THERE)  # it stalls
        assert places.returned == [(ref(0), not writing)]
        assert not net.deliver(second)  # no place is given out any more
        fetch.ask(THERE, ref(0), TWO_FRAMES)
        assert here.region(THERE, first.header) is not None
        assert places.lent == {ref(0)}
    assert places.returned[1:] == [(ref(0), False)]  # the end of the fetch returns what is out


async def test_place_is_returned_when_the_chunk_is_wrong_or_refused_in_the_middle() -> None:
    places, net = Memories(), Net(on_frame=requests_only)
    taker = Taker(refuse=lambda peer, chunk, data: True)
    here = net.add(HERE)
    net.add(THERE, held(0, 1, size=TWO_FRAMES))
    with here.fetch(taker, places) as fetch:
        fetch.ask(THERE, ref(0), TWO_FRAMES)
        fetch.ask(THERE, ref(1), TWO_FRAMES)
        for frame in frames_of(net, THERE)[:3]:  # all of one, half of the other
            assert net.deliver(frame)
        assert places.returned == [(ref(0), True)]
        refusal = FrameHeader(kind=FrameKind.REFUSED, chunk=1, scope=SCOPE, length=0)
        here.received(THERE, refusal)
        assert places.returned[1:] == [(ref(1), True)]
        events = [await fetch.next() for _ in range(2)]
    assert all(isinstance(event, ChunkFailed) for event in events)
    assert (places.lent, taker.got) == (set(), {})


async def test_events_gather_while_the_task_rests_and_none_is_lost() -> None:
    net, taker = Net(), Taker()
    here = net.add(HERE)
    net.add(THERE, held(*range(3)))
    woken = []
    with here.fetch(taker) as fetch:
        fetch._token = FakeToken(woken)  # type: ignore[assignment]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fetch.rest, 5.0)
            await trio.testing.wait_all_tasks_blocked()
            for number in range(3):
                fetch.ask(THERE, ref(number), 100)
            assert woken == []
            assert fetch.next_nowait() is None
        assert [fetch.next_nowait() for _ in range(4)] == [*(ChunkArrived(THERE, ref(n)) for n in range(3)), None]


@dataclass
class FakeToken:
    """Notes who wanted to wake trio."""

    woken: list[object]

    def run_sync_soon(self, call: object) -> None:
        self.woken.append(call)


async def test_events_that_come_at_once_wake_the_task_once() -> None:
    woken = list[object]()
    net = Net()
    here = net.add(HERE)
    net.add(THERE, held(*range(3)))
    with here.fetch(Taker()) as fetch:
        token, fetch._token = fetch._token, FakeToken(woken)  # type: ignore[assignment]
        for number in range(3):
            fetch.ask(THERE, ref(number), 100)
        assert len(woken) == 1
        token.run_sync_soon(woken[0])  # type: ignore[arg-type]
        assert [await fetch.next() for _ in range(3)] == [ChunkArrived(THERE, ref(n)) for n in range(3)]
