"""Fetching chunks over lanes: a REQUEST frame names a run of chunks, each is answered by STATE frames or REFUSED.

A chunk is named by what it belongs to (`space`, and 8 bytes of the state's digest or the plan's hash) and its number.
A fetch asks any number of donors for any chunks. Which, whom and how many at once is for who drives it to decide
(`shoal.node.state.chunk_requests`). Every complete chunk is handed to `accept`, in the thread of the lane that brought
its last frame: it alone knows whether the bytes are right. A lane that verifies does not receive meanwhile, so a donor
can be no faster than its bytes are checked, and donors on several lanes are checked side by side.

Nothing is believed here. A donor can waste the time of its own chunks, no more. The bytes of a chunk are decrypted
into the place where it belongs, if its owner lends that (`Places`), or else into a buffer. Either has one writer: the
request that it was given to. A request gives out each byte once and ends before its chunk is checked, so a frame that
comes late, twice or forged can never reach what was verified. A request that is given up returns its place, and says
whether a lane's thread may still be writing there.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import TracebackType
from typing import Final, NamedTuple, Protocol, Self

import trio
from blake3 import blake3

from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.swarm.lanes.frame import FRAME_LIMIT_BYTES, SCOPE_BYTES, FrameHeader, FrameKind, split_chunk
from shoal.swarm.lanes.queue import Frame, Later

FETCH_LIMIT = 16
"""Fetches under way at once."""
REQUEST_LIMIT = 4096
"""Chunks that all fetches together may have asked for and not received."""
RUN_LIMIT = 256
"""Chunks that one request may name."""
SPARE_BUFFERS = 16
"""Buffers of finished chunks that a fetch keeps for the next ones."""

KINDS = frozenset({FrameKind.REQUEST, FrameKind.STATE, FrameKind.REFUSED})

logger = logging.getLogger(__name__)


class ChunkSpace(IntEnum):
    """Kind of thing that a chunk is part of; travels in the frame's flags."""

    ANCHOR = 0
    MOMENTUM = 1
    FINAL = 2
    VECTOR = 3
    SECOND_MOMENT = 4
    CONTRIBUTION = 5
    IMAGE = 6
    """Asked of who said that it has it, under `/shoal/image/1`; and so are changes."""
    CHANGES = 7


_SPACES: Final = {int(space): space for space in ChunkSpace}


class ChunkRef(NamedTuple):
    """The name of a chunk. `scope`: the first 8 bytes of a state's digest, a plan's hash or an offer's root."""

    space: ChunkSpace
    scope: bytes
    chunk: int

    @staticmethod
    def of(header: FrameHeader) -> ChunkRef:
        """The chunk that a frame is about. Raises RemoteError."""
        space = _SPACES.get(header.flags)
        if space is None:
            raise RemoteError(f"asks for chunks of an unknown kind {header.flags}")
        return ChunkRef(space, header.scope, header.chunk)


class Post(Protocol):
    """Outlet of frames: the lane pool's `post`."""

    def __call__(self, peer: PeerId, header: FrameHeader, payload: memoryview | bytes | Later, /) -> None:
        """Queue a frame. Raises NetworkError."""


Lookup = Callable[[ChunkRef], memoryview | None]
Accept = Callable[[PeerId, ChunkRef, memoryview, bytes | None], None]
"""Takes a complete chunk and, of a fetch that hashes, its BLAKE3 hash, in a lane's thread; raises RemoteError if the
bytes are wrong. They last for the call, unless they are in a place that was lent: that is back with its owner from this
call on."""


class Places(Protocol):
    """Places of chunks, of an owner who has them decrypted there. Called in lanes' threads: be quick."""

    def lend(self, ref: ChunkRef) -> memoryview | None:
        """The place of a chunk, writable and of its size, for one request alone; None: it cannot be had."""

    def give_back(self, ref: ChunkRef, *, clean: bool) -> None:
        """The place was lent for nothing. Unless it is `clean`, somebody may yet write there, at any time."""


@dataclass(frozen=True, slots=True)
class ChunkArrived:
    """A chunk is here, and was accepted."""

    peer: PeerId
    ref: ChunkRef


@dataclass(frozen=True, slots=True)
class ChunkFailed:
    """A chunk will not come from this peer, or came wrong: `error` is a RemoteError then, or what `accept` raised."""

    peer: PeerId
    ref: ChunkRef
    error: Exception


@dataclass(frozen=True, slots=True)
class LaneBroke:
    """Notice that what was asked of this peer may never come."""

    peer: PeerId


FetchEvent = ChunkArrived | ChunkFailed | LaneBroke


@dataclass(slots=True, eq=False)
class _Incoming:
    """A chunk on its way: which frames' places were given out, by offset, and how many bytes are not authentic yet.

    Each place is given out once. Else a second lane could write where the first has delivered, during the check.
    `data` is taken when the first frame comes. lent: it belongs to the fetch's `Places`. writing: frames whose place
    was given out, and of which nothing was heard since. hasher: of a fetch that hashes; what has gone into it is
    `hashed` bytes from the start on. Frames that come in order are hashed as they come, while the cache has them.
    """

    fetch: ChunkFetch
    size: int
    missing: int
    hasher: blake3 | None
    hashed: int = 0
    data: bytearray | memoryview | None = None
    lent: bool = False
    writing: int = 0
    given_out: set[int] = field(default_factory=set)

    def place(self, ref: ChunkRef, header: FrameHeader) -> memoryview | None:
        """Return the place for the bytes of a frame, if it fits; lanes may bring a chunk's frames in any order."""
        length = min(FRAME_LIMIT_BYTES, self.size - header.offset)
        is_expected = header.total == self.size and header.offset % FRAME_LIMIT_BYTES == 0
        if not is_expected or header.length != length or header.offset in self.given_out:
            return None
        if self.data is None:
            place = self.fetch.lend(ref)
            self.data, self.lent = (self.fetch.buffer(self.size), False) if place is None else (place, True)
        self.given_out.add(header.offset)
        self.writing += 1
        return memoryview(self.data)[header.offset : header.offset + length]

    def hashes_next(self, header: FrameHeader) -> bool:
        """True if the bytes of this frame are the next to be hashed: the caller's alone, as each frame comes once."""
        return self.hasher is not None and self.hashed == header.offset

    def hash(self, header: FrameHeader) -> None:
        """Hash the bytes of a frame that is in its place."""
        assert self.data is not None
        assert self.hasher is not None
        end = header.offset + header.length
        self.hasher.update(memoryview(self.data)[header.offset : end])
        self.hashed = end

    def digest(self) -> bytes | None:
        """The hash of the whole chunk, all of which is here; None if nobody wants it."""
        if self.hasher is None:
            return None
        assert self.data is not None
        return (self.hasher if self.hashed == self.size else blake3(self.data)).digest()

    def give_up(self, ref: ChunkRef) -> None:
        """Nothing more is wanted of it."""
        if self.lent:
            self.fetch.give_back(ref, clean=self.writing == 0)


class ChunkExchange:
    """Both sides of chunk fetching. `region`, `received` and `lane_failed` are called in the lanes' threads."""

    def __init__(self, *, post: Post, lookup: Lookup) -> None:
        self._post = post
        self._lookup = lookup
        self._told = False  # that something could not be read
        self._lock = threading.Lock()
        self._incoming: dict[tuple[PeerId, ChunkRef], _Incoming] = {}
        self._fetches: list[ChunkFetch] = []
        self.takes_up: Callable[[PeerId, ChunkRef], bool] = lambda peer, ref: False
        """Called in lanes' threads: whether somebody takes it upon itself to `serve` this chunk to that peer later."""

    # -- called by the lanes ---------------------------------------------------------------------------------

    def region(self, peer: PeerId, header: FrameHeader) -> memoryview | None:
        """Return the place for the bytes of a STATE frame; None for one that nobody asked for."""
        if header.kind is not FrameKind.STATE:
            return None
        ref = ChunkRef.of(header)
        with self._lock:
            incoming = self._incoming.get((peer, ref))
            return None if incoming is None else incoming.place(ref, header)

    def received(self, peer: PeerId, header: FrameHeader, payload: memoryview | None = None) -> None:
        """A frame of one of `KINDS` is authentic, and its payload in its place."""
        ref = ChunkRef.of(header)
        if header.kind is FrameKind.REQUEST:
            self._serve(peer, ref, further=header.total)
            return
        with self._lock:
            incoming = self._incoming.get((peer, ref))
            if incoming is None:
                return
            incoming.fetch.count(peer, header.length)
            if header.kind is not FrameKind.STATE:
                incoming.give_up(ref)
                del self._incoming[peer, ref]
                incoming.fetch.tell(ChunkFailed(peer, ref, NetworkError("does not hold it (any more)")))
                return
            incoming.writing -= 1
            incoming.missing -= header.length
            is_complete = not incoming.missing
            hashes = incoming.hashes_next(header)
            if is_complete:
                del self._incoming[peer, ref]
        if hashes:
            incoming.hash(header)
        if is_complete:
            assert incoming.data is not None
            incoming.fetch.complete(peer, ref, incoming.data, incoming.digest(), lent=incoming.lent)

    def lane_failed(self, peer: PeerId) -> None:
        """Tell who fetches from this peer now rather than at a deadline."""
        with self._lock:
            fetches = {incoming.fetch for (source, _), incoming in self._incoming.items() if source == peer}
        for fetch in fetches:
            fetch.tell(LaneBroke(peer))

    def _serve(self, peer: PeerId, first: ChunkRef, further: int) -> None:
        if further >= RUN_LIMIT:
            raise RemoteError(f"asks for {further + 1} chunks at once; {RUN_LIMIT} may be", peer=peer)
        for chunk in range(first.chunk, first.chunk + 1 + further):
            ref = ChunkRef(first.space, first.scope, chunk)
            if not self.takes_up(peer, ref):
                self.serve(peer, ref, self._held(ref), later=self._due)

    def _held(self, ref: ChunkRef) -> memoryview | None:
        """The bytes of a chunk; None if it is not held, or cannot be read: who asked has its lane still."""
        try:
            return self._lookup(ref)
        except Exception:
            level = logging.DEBUG if self._told else logging.WARNING  # others may ask again and again
            logger.log(level, "chunk %d of %s cannot be read", ref.chunk, ref.scope.hex(), exc_info=True)
            self._told = True
            return None

    def _due(self, header: FrameHeader) -> Frame:
        """A frame whose turn it is; a refusal in its place if the chunk is held no more. See `Later`."""
        ref = ChunkRef.of(header)
        data = self._held(ref)
        if data is None or data.nbytes != header.total:
            return _header(FrameKind.REFUSED, ref), memoryview(b"")
        return header, data.cast("B")[header.offset : header.offset + header.length]

    def serve(self, peer: PeerId, ref: ChunkRef, data: memoryview | None, *, later: Later | None = None) -> None:
        """Send a chunk to who asked for it; None: it is not held. From any thread. Raises NetworkError.

        later: gives its frames when they are due, so that `data` is not kept until then.
        """
        if data is None:
            self._post(peer, _header(FrameKind.REFUSED, ref), b"")
            return
        for header, piece in split_chunk(_header(FrameKind.STATE, ref), data):
            self._post(peer, header, piece if later is None else later)

    # -- called by who wants chunks --------------------------------------------------------------------------

    def fetch(self, accept: Accept, places: Places | None = None, *, hashing: bool = False) -> ChunkFetch:
        """Begin a fetch, to be used as a context manager in a trio task. Raises NetworkError if there are too many.

        places: where the chunks belong; without, each comes in a buffer. hashing: `accept` is told their hashes.
        """
        with self._lock:
            if len(self._fetches) >= FETCH_LIMIT:
                raise NetworkError(f"{FETCH_LIMIT} fetches are under way already")
            fetch = ChunkFetch(self, accept, places, hashing)
            self._fetches.append(fetch)
        return fetch

    def ask(self, fetch: ChunkFetch, peer: PeerId, first: ChunkRef, sizes: Sequence[int]) -> None:
        """`ChunkFetch.ask`."""
        assert len(first.scope) == SCOPE_BYTES
        assert 1 <= len(sizes) <= RUN_LIMIT
        keys = [(peer, ChunkRef(first.space, first.scope, first.chunk + at)) for at in range(len(sizes))]
        with self._lock:
            for _, ref in keys:
                if (peer, ref) in self._incoming:
                    raise NetworkError(f"chunk {ref.chunk} is being fetched from {peer} already")
            if len(self._incoming) + len(keys) > REQUEST_LIMIT:
                raise NetworkError(f"{REQUEST_LIMIT} chunks are asked for already")
            for key, size in zip(keys, sizes, strict=True):
                self._incoming[key] = _Incoming(fetch, size, missing=size, hasher=blake3() if fetch.hashing else None)
        header = FrameHeader(
            kind=FrameKind.REQUEST,
            flags=first.space,
            chunk=first.chunk,
            total=len(sizes) - 1,
            scope=first.scope,
            length=0,
        )
        try:
            self._post(peer, header, b"")
        except NetworkError:
            with self._lock:
                for key in keys:
                    self._incoming.pop(key, None)
            raise

    def forget(self, fetch: ChunkFetch, peer: PeerId | None = None, ref: ChunkRef | None = None) -> None:
        """Take no more of what `fetch` asked for: of that peer only, or that chunk only, where named."""
        with self._lock:
            for key in [
                key
                for key, incoming in self._incoming.items()
                if incoming.fetch is fetch and peer in (None, key[0]) and ref in (None, key[1])
            ]:
                self._incoming.pop(key).give_up(key[1])

    def end(self, fetch: ChunkFetch) -> None:
        """`ChunkFetch` is over."""
        self.forget(fetch)
        with self._lock:
            self._fetches.remove(fetch)


def _header(kind: FrameKind, ref: ChunkRef) -> FrameHeader:
    return FrameHeader(kind=kind, flags=ref.space, chunk=ref.chunk, scope=ref.scope, length=0)


class ChunkFetch:
    """One task's requests to several donors. A context manager: after it, bytes that still arrive are dropped."""

    def __init__(self, exchange: ChunkExchange, accept: Accept, places: Places | None, hashing: bool) -> None:
        self.hashing = hashing
        self._exchange = exchange
        self._accept = accept
        self._places = places
        self._token = trio.lowlevel.current_trio_token()
        self._send, self._receive = trio.open_memory_channel[FetchEvent | None](2 * REQUEST_LIMIT)
        self._spare: list[bytearray] = []  # guarded by the interpreter: append and pop are atomic
        self._bytes: dict[PeerId, int] = {}
        self._lock = threading.Lock()
        self._told: list[FetchEvent] = []  # guarded by the lock: on their way to the fetching task
        self._resting = False  # guarded by the lock

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exchange.end(self)

    def ask(self, peer: PeerId, first: ChunkRef, *sizes: int) -> None:
        """Ask `peer` for a run of chunks, from `first` on, of so many bytes each; at most RUN_LIMIT.

        For each, one `ChunkArrived` or `ChunkFailed` follows, or a `LaneBroke` for all, or nothing. Raises
        NetworkError, and asks for none, if there is no lane to the peer, or one of them was asked of it already.
        """
        self._exchange.ask(self, peer, first, sizes)

    def forget(self, peer: PeerId, ref: ChunkRef | None = None) -> None:
        """Take this chunk, or any, no more from `peer`. An event that is on its way still comes."""
        self._exchange.forget(self, peer, ref)

    def moved_bytes(self, peer: PeerId) -> int:
        """Bytes of what was asked of `peer` that have come, whatever became of them."""
        return self._bytes.get(peer, 0)

    async def next(self) -> FetchEvent | None:
        """The next event, or None after a `wake`. Cancellation: none is lost."""
        return await self._receive.receive()

    def next_nowait(self) -> FetchEvent | None:
        """The next event if one is here; else, or after a `wake`, None."""
        try:
            return self._receive.receive_nowait()
        except trio.WouldBlock:
            return None

    async def rest(self, seconds: float) -> None:
        """Let events gather for so long, and be woken for none. Cancellation: none is lost."""
        with self._lock:
            self._resting = True
        try:
            await trio.sleep(seconds)
        finally:
            with self._lock:
                self._resting = False
            self._deliver()

    def wake(self) -> None:
        """Have `next` return. For trio's thread."""
        self._put(None)

    # Called in lanes' threads

    def lend(self, ref: ChunkRef) -> memoryview | None:
        """The place of a chunk, if it can be had. Called under the exchange's lock."""
        return None if self._places is None else self._places.lend(ref)

    def give_back(self, ref: ChunkRef, *, clean: bool) -> None:
        """Return a place that was lent for nothing."""
        assert self._places is not None
        self._places.give_back(ref, clean=clean)

    def buffer(self, size: int) -> bytearray:
        """Room for a chunk."""
        while self._spare:
            try:
                data = self._spare.pop()
            except IndexError:
                break
            if len(data) == size:
                return data
        return bytearray(size)

    def count(self, peer: PeerId, size: int) -> None:
        """Bytes came. Called under the exchange's lock."""
        self._bytes[peer] = self._bytes.get(peer, 0) + size

    def complete(
        self, peer: PeerId, ref: ChunkRef, data: bytearray | memoryview, digest: bytes | None, *, lent: bool
    ) -> None:
        """All frames of a chunk are here, so nobody writes into `data` any more: have it checked."""
        try:
            self._accept(peer, ref, memoryview(data), digest)
        except Exception as error:  # whose fault it is, the fetching task decides
            if lent:
                self.give_back(ref, clean=True)
            self.tell(ChunkFailed(peer, ref, error.with_traceback(None)))  # a traceback would keep the buffer
            return
        if isinstance(data, bytearray) and len(self._spare) < SPARE_BUFFERS:
            self._spare.append(data)
        self.tell(ChunkArrived(peer, ref))

    def tell(self, event: FetchEvent) -> None:
        """Carry an event to the fetching task, which is woken once for all that are on their way."""
        with self._lock:
            self._told.append(event)
            if self._resting or len(self._told) > 1:
                return
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            told, self._told = self._told, []
        for event in told:
            self._put(event)

    def _put(self, event: FetchEvent | None) -> None:
        try:
            self._send.send_nowait(event)
        except trio.WouldBlock:
            logger.debug("more events than chunks were asked for")
