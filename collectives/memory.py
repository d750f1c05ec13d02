"""Memory for what is large: arrays in mappings of their own, and pools that use it again once nobody refers to it.

Fresh pages cost more than the arithmetic in them: than the sum that is read from a payload, or the step that fills a
vector. So threads keep their working arrays, and payloads and vectors that are gone give theirs back. Gone is meant
literally: memory is free when the array in it has ceased to exist, and numpy keeps that in existence as long as there
is a slice, a view or a memoryview of it anywhere, in a lane's queue or in another thread. No one has to say that he is
done with it, and no one can say so too early.

Threads come and go, and what was allocated and freed in the usual way stays in the arena of the C library that the
thread had: there may be eight of those for each processor, and in time each comes to hold a whole thread's arrays that
nobody uses. A mapping is the system's again the moment nobody refers to it. And it begins with a page, as what is
written to disk past the page cache has to (`shoal.node.state.store`).

Vectors are as large as the model, and a round makes two. Payloads of a size are cut from slabs, mappings that ask for
huge pages: one fault for each of those, where ordinary pages take 512. So memory that is fresh all the same (of a first
reduction, or where earlier reduced chunks are still held) costs a fraction. The slab that got room last is cut from
first: its memory may still be in a cache, and the others become empty. An empty slab is the system's again when more
than enough is spare.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

F32: TypeAlias = npt.NDArray[np.float32]
U8: TypeAlias = npt.NDArray[np.uint8]

PAGE_BYTES = 4096
"""Or more: pages are touched one by one. Payloads are rounded up to it, so that contributions and reduced chunks can
use each other's memory."""
HUGE_PAGE_BYTES = 2 << 20
HUGE_BYTES = 16 << 20
"""From so many bytes on an array asks for huge pages."""
SLAB_BYTES = 16 << 20
"""Or a little more, so that it holds whole payloads: those of a chunk are a little more than a power of two."""
SHARING_BYTES = 64 * 1024
"""Smaller payloads have a slab each, of ordinary pages: a huge one could be more than a model needs."""


def own_array(numel: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """(numel,) of `dtype`, in a mapping of its own: zeros, whose pages are taken when they are first written.

    It begins with a page; large ones ask for huge pages, one fault for each of those where ordinary ones take 512.
    """
    size = numel * np.dtype(dtype).itemsize
    whole = 1 if size < HUGE_BYTES else HUGE_PAGE_BYTES  # of a whole number of them the kernel aligns the beginning
    mapping = mmap.mmap(-1, -(-max(size, 1) // whole) * whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            mapping.madvise(mmap.MADV_HUGEPAGE, 0, size - size % HUGE_PAGE_BYTES)
    return np.frombuffer(mapping, dtype, numel)


def own_memory(size: int) -> memoryview:
    """`size` bytes of such a mapping, writeable."""
    return own_array(size, np.uint8).data


class VectorPool:
    """Gives out vectors; keeps the memory of at most `spare_limit` that are gone. Safe in any number of threads.

    allocate: gives memory of so many bytes, writeable, that begins with a page.
    """

    def __init__(self, spare_limit: int, allocate: Callable[[int], memoryview] = own_memory) -> None:
        self._allocate = allocate
        # A vector may cease to exist at any point of any thread, also while this thread takes one: no lock, then, but
        # a deque, whose `append` and `pop` are atomic.
        self._spare: deque[memoryview] = deque(maxlen=spare_limit)

    def take(self, numel: int) -> F32:
        """(numel,) float32 of unspecified content, writeable."""
        memory = self._spare_of(4 * numel)
        if memory is None:
            memory = self._allocate(4 * numel)
        # Over a memoryview, and not over an array, so that slices name this vector as their base and keep it.
        vector = np.frombuffer(memory, np.float32)
        weakref.finalize(vector, self._spare.append, memory).atexit = False
        return vector

    def take_together(self, numel: int, count: int) -> list[F32]:
        """The vectors of one state, like `count` of `take`."""
        return [self.take(numel) for _ in range(count)]

    def prepare(self, numel: int) -> None:
        """Have memory for as many vectors as are kept, with pages of its own, which `take` is spared to wait for."""
        while len(self._spare) < (self._spare.maxlen or 0):
            memory = self._allocate(4 * numel)
            np.frombuffer(memory, np.uint8)[::PAGE_BYTES] = 0
            self._spare.append(memory)

    def _spare_of(self, size: int) -> memoryview | None:
        """Spare memory of that many bytes; what is of another size is let go."""
        while True:
            try:
                memory = self._spare.pop()
            except IndexError:
                return None
            if memory.nbytes == size:
                return memory


class PayloadPool:
    """Gives out payloads; keeps up to `spare_bytes` of each size that are gone, and what shares a slab with others.

    Safe in any number of threads.
    """

    def __init__(self, spare_bytes: int) -> None:
        self._spare_bytes = spare_bytes
        self._slabs: dict[int, _Slabs] = {}
        self._lock = threading.Lock()

    def take(self, size: int) -> U8:
        """(size,) uint8 of unspecified content, writeable."""
        room = -(-size // PAGE_BYTES) * PAGE_BYTES
        with self._lock:
            slabs = self._slabs.get(room)
            if slabs is None:
                slabs = self._slabs[room] = _Slabs(room, self._spare_bytes)
        slab, place = slabs.take()
        payload = np.frombuffer(slab.memory[place : place + room], np.uint8)
        slabs.lend(payload, slab, place)
        return payload[:size]

    def prepare(self) -> None:
        """Have as much spare, with pages of its own, as was taken since the last time, within what is kept at most.

        So payloads of the next reduction need not wait for pages, though earlier ones are still held. Blocks.
        """
        with self._lock:
            all_slabs = list(self._slabs.values())
        for slabs in all_slabs:
            slabs.prepare()

    def spare_bytes(self) -> int:
        """Bytes of memory that are kept for payloads to come."""
        with self._lock:
            return sum(slabs.spare_bytes() for slabs in self._slabs.values())


class _Slab:
    """Memory for one payload or several. `free`: where in it there is room."""

    __slots__ = ("free", "memory", "places")

    def __init__(self, room: int, *, shared: bool) -> None:
        self.places = -(-SLAB_BYTES // room) if shared else 1
        self.memory = own_array(self.places * room, np.uint8).data if shared else np.empty(room, np.uint8).data
        self.free = [place * room for place in reversed(range(self.places))]


class _Lent(weakref.ref[U8]):
    """A payload that is somewhere, and where its memory lies."""

    __slots__ = ("place", "slab")

    def __init__(self, payload: U8, gone: Callable[[_Lent], None], slab: _Slab, place: int) -> None:
        super().__init__(payload, gone)  # type: ignore[call-arg]
        self.slab, self.place = slab, place

    def __new__(cls, payload: U8, gone: Callable[[_Lent], None], slab: _Slab, place: int) -> Self:
        """Make the reference alone."""
        return super().__new__(cls, payload, gone)


class _Slabs:
    """The slabs of payloads that take `room` bytes.

    A payload may cease to exist at any point of any thread, also while this thread holds the lock: so what comes back
    is put into a deque, whose `append` and `popleft` are atomic, and is sorted in by who has the lock.
    """

    def __init__(self, room: int, limit_bytes: int) -> None:
        self._room = room
        self._limit_bytes = limit_bytes
        self._shared = room >= SHARING_BYTES and limit_bytes >= SLAB_BYTES
        self._lock = threading.Lock()
        self._back: deque[_Lent] = deque()
        self._lent: dict[int, _Lent] = {}  # by id; `weakref.finalize` does as much for ten times the time
        self._with_room: OrderedDict[_Slab, None] = OrderedDict()  # the one that got some last comes first
        self._spare = 0  # places
        self._taken = 0  # places, since memory was prepared

    def prepare(self) -> None:
        """Add slabs until there is room for as many payloads as were taken since the last call."""
        with self._lock:
            self._sort_in()
            wanted, self._taken = min(self._taken, self._limit_bytes // self._room), 0
            missing = wanted - self._spare
        while self._shared and missing > 0:
            slab = _Slab(self._room, shared=True)
            np.frombuffer(slab.memory, np.uint8)[::PAGE_BYTES] = 0
            with self._lock:
                self._with_room[slab] = None
                self._spare += slab.places
            missing -= slab.places

    def take(self) -> tuple[_Slab, int]:
        """A slab, and where in it a payload may lie from now on."""
        with self._lock:
            self._sort_in()
            slab = next(iter(self._with_room), None)
            if slab is None:
                slab = _Slab(self._room, shared=self._shared)
                self._with_room[slab] = None
                self._spare += slab.places
            place = slab.free.pop()
            self._spare -= 1
            self._taken += 1
            if not slab.free:
                del self._with_room[slab]
            return slab, place

    def lend(self, payload: U8, slab: _Slab, place: int) -> None:
        """Take the memory there back when `payload`, which lies in it, has ceased to exist."""
        lent = _Lent(payload, self._give_back, slab, place)
        self._lent[id(lent)] = lent

    def _give_back(self, lent: _Lent) -> None:
        """The payload that lay there has ceased to exist."""
        del self._lent[id(lent)]
        self._back.append(lent)
        if self._lock.acquire(blocking=False):  # else whoever has the lock, or takes next, sorts it in
            try:
                self._sort_in()
            finally:
                self._lock.release()

    def spare_bytes(self) -> int:
        """Bytes of these slabs that lie in no payload."""
        with self._lock:
            self._sort_in()
            return self._spare * self._room

    def _sort_in(self) -> None:
        """Put what came back into its slab; let go of empty slabs beyond the limit. The caller holds the lock."""
        while self._back:
            back = self._back.popleft()
            slab = back.slab
            slab.free.append(back.place)
            self._with_room[slab] = None
            self._with_room.move_to_end(slab, last=False)
            self._spare += 1
            if len(slab.free) == slab.places and self._spare * self._room > self._limit_bytes:
                del self._with_room[slab]
                self._spare -= slab.places
