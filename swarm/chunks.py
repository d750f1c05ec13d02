"""Fetching chunks over lanes: a REQUEST frame names one chunk, the answer is its bytes in STATE frames, or REFUSED.

A chunk is named by what it belongs to (`space`, and 8 bytes of the state's digest or the plan's hash) and its number.
The fetcher keeps a window of requests open with one donor, and hands every complete chunk to `accept`, which alone
knows whether the bytes are right. Nothing is believed here: a donor can waste the time of one fetch, no more.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import trio

from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.swarm.frame import FRAME_LIMIT_BYTES, SCOPE_BYTES, FrameHeader, FrameKind, split_chunk

WINDOW_CHUNKS = 16
FETCH_STALL_S = 5.0
"""A fetch in which not a byte arrives for this long is given up."""

KINDS = frozenset({FrameKind.REQUEST, FrameKind.STATE, FrameKind.REFUSED})

logger = logging.getLogger(__name__)


class ChunkSpace(IntEnum):
    """What kind of thing a chunk is part of; travels in the frame's flags."""

    ANCHOR = 0
    MOMENTUM = 1
    FINAL = 2


@dataclass(frozen=True, slots=True)
class ChunkRef:
    """The name of a chunk. `scope`: the first 8 bytes of a state's digest or of a plan's hash."""

    space: ChunkSpace
    scope: bytes
    chunk: int

    @staticmethod
    def of(header: FrameHeader) -> ChunkRef:
        """The chunk that a frame is about. Raises RemoteError."""
        try:
            return ChunkRef(ChunkSpace(header.flags), header.scope, header.chunk)
        except ValueError:
            raise RemoteError(f"asks for chunks of an unknown kind {header.flags}") from None


class Post(Protocol):
    """How frames leave: the lane pool's `post`."""

    def __call__(self, peer: PeerId, header: FrameHeader, payload: memoryview | bytes, /) -> None:
        """Queue a frame. Raises NetworkError."""


Lookup = Callable[[ChunkRef], memoryview | None]
Accept = Callable[[ChunkRef, memoryview], None]


@dataclass(slots=True, eq=False)
class _Incoming:
    """A chunk on its way: which frames' places were given out, by offset, and how many bytes are not authentic yet.

    Each place is given out once. Else a second lane could write where the first has delivered, after the check.
    """

    data: bytearray
    missing: int
    given_out: set[int] = field(default_factory=set)

    def place(self, header: FrameHeader) -> memoryview | None:
        """Where the bytes of a frame go; the lanes may bring a chunk's frames in any order."""
        length = min(FRAME_LIMIT_BYTES, len(self.data) - header.offset)
        is_expected = header.total == len(self.data) and header.offset % FRAME_LIMIT_BYTES == 0
        if not is_expected or header.length != length or header.offset in self.given_out:
            return None
        self.given_out.add(header.offset)
        return memoryview(self.data)[header.offset : header.offset + length]


class ChunkExchange:
    """Both sides of chunk fetching. `region` and `received` are called in the lanes' threads."""

    def __init__(self, *, post: Post, lookup: Lookup) -> None:
        self._post = post
        self._lookup = lookup
        self._lock = threading.Lock()
        self._incoming: dict[tuple[PeerId, ChunkRef], _Incoming] = {}
        self._fetches: dict[PeerId, _Fetch] = {}

    # -- called by the lanes ---------------------------------------------------------------------------------

    def region(self, peer: PeerId, header: FrameHeader) -> memoryview | None:
        """Where the bytes of a STATE frame go; None for one that nobody asked for."""
        if header.kind is not FrameKind.STATE:
            return None
        with self._lock:
            incoming = self._incoming.get((peer, ChunkRef.of(header)))
            return None if incoming is None else incoming.place(header)

    def received(self, peer: PeerId, header: FrameHeader) -> None:
        """A frame of one of `KINDS` is authentic and in its place."""
        ref = ChunkRef.of(header)
        if header.kind is FrameKind.REQUEST:
            self._serve(peer, ref)
            return
        with self._lock:
            incoming = self._incoming.get((peer, ref))
            fetch = self._fetches.get(peer)
            if incoming is None or fetch is None:
                return
            fetch.has_moved = True
            if header.kind is FrameKind.STATE:
                incoming.missing -= header.length
                if incoming.missing:
                    return
            del self._incoming[peer, ref]
        fetch.deliver(ref, incoming.data if header.kind is FrameKind.STATE else None)

    def lane_closed(self, peer: PeerId) -> None:
        """All fetches from this peer fail now rather than at their deadline."""
        with self._lock:
            fetch = self._fetches.get(peer)
        if fetch is not None:
            fetch.deliver(None, None)

    def _serve(self, peer: PeerId, ref: ChunkRef) -> None:
        data = self._lookup(ref)
        if data is None:
            header = FrameHeader(kind=FrameKind.REFUSED, flags=ref.space, chunk=ref.chunk, scope=ref.scope, length=0)
            self._post(peer, header, b"")
            return
        model = FrameHeader(kind=FrameKind.STATE, flags=ref.space, chunk=ref.chunk, scope=ref.scope, length=0)
        for header, piece in split_chunk(model, data):
            self._post(peer, header, piece)

    # -- called by who wants chunks --------------------------------------------------------------------------

    async def fetch(self, peer: PeerId, wanted: Sequence[tuple[ChunkRef, int]], accept: Accept) -> None:
        """Fetch chunks of the given sizes (bytes) from one peer, passing each to `accept` in a worker thread.

        Raises NetworkError when the peer stalls, refuses a chunk or loses its lanes, and whatever `accept` raises.
        Chunks accepted until then are kept by whoever accepted them.

        Cancellation: bytes that still arrive are dropped.
        """
        with self._lock:
            if peer in self._fetches:
                raise NetworkError(f"already fetching from {peer}")
            fetch = self._fetches[peer] = _Fetch(len(wanted))
        todo = list(reversed(wanted))
        open_requests = 0
        try:
            while todo or open_requests:
                while todo and open_requests < WINDOW_CHUNKS:
                    self._ask(peer, *todo.pop())
                    open_requests += 1
                ref, data = await fetch.next(peer)
                open_requests -= 1
                await trio.to_thread.run_sync(accept, ref, memoryview(data))
        finally:
            with self._lock:
                del self._fetches[peer]
                self._incoming = {key: value for key, value in self._incoming.items() if key[0] != peer}

    def _ask(self, peer: PeerId, ref: ChunkRef, size: int) -> None:
        assert len(ref.scope) == SCOPE_BYTES
        with self._lock:
            self._incoming[peer, ref] = _Incoming(bytearray(size), missing=size)
        header = FrameHeader(kind=FrameKind.REQUEST, flags=ref.space, chunk=ref.chunk, scope=ref.scope, length=0)
        self._post(peer, header, b"")


class _Fetch:
    """Carries finished chunks from the lanes' threads to the fetching task."""

    def __init__(self, count: int) -> None:
        self.has_moved = False  # whether bytes came in the present wait
        self._token = trio.lowlevel.current_trio_token()
        self._send, self._receive = trio.open_memory_channel[tuple[ChunkRef | None, bytearray | None]](count + 2)

    def deliver(self, ref: ChunkRef | None, data: bytearray | None) -> None:
        """Called in a lane's thread. No data means that the chunk will not come."""
        try:
            self._token.run_sync_soon(self._put, ref, data)
        except trio.RunFinishedError:
            return

    def _put(self, ref: ChunkRef | None, data: bytearray | None) -> None:
        try:
            self._send.send_nowait((ref, data))
        except trio.WouldBlock:
            logger.debug("more chunks than were asked for")

    async def next(self, peer: PeerId) -> tuple[ChunkRef, bytearray]:
        while True:
            self.has_moved = False
            with trio.move_on_after(FETCH_STALL_S):
                ref, data = await self._receive.receive()
                if ref is None:
                    raise NetworkError(f"the lane to {peer} broke")
                if data is None:
                    raise NetworkError(f"{peer} does not hold chunk {ref.chunk} ({ref.space.name.lower()})")
                return ref, data
            if not self.has_moved:
                raise NetworkError(f"{peer} sent nothing for {FETCH_STALL_S:g} s")
