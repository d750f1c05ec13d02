"""Memory that both ends of a lane see, where they are processes of one machine: large frames are sealed into it.

    sender                                                           receiver
      SharedOffer: where memory and pipe are, over libp2p  ────────►   opens both, looks for the nonce in the memory
      ◄──────────────────────────────────────────────────────────────  taken, or not
      a SHARE frame: the large ones after it lie there     ────────►
      header and ciphertext into the next slot
      the frame's header, over the connection              ────────►   opens the frame out of the slot
      ◄──────────────── two bytes in the pipe ───────────────────────  two slots are free

The kernel then copies 52 bytes of a frame instead of all of it twice. Nothing else changes: frames are sealed, counted
and ended as on any lane, and the connection is the lane's life. Each direction has memory of its own, which its sender
makes and its receiver maps for reading. Slots are used in turn, so the two need not tell each other which. How large
they are follows from the size of the memory; a receiver that refuses large ones is offered small ones the next time,
which is what nodes of an earlier release take.

What is believed. A peer's word about descriptors of this machine is worth nothing: anybody may name any. So only a
memory file of this very kind is opened, that cannot be made shorter under the reader and belongs to this user; and
nothing is done with the pipe before the memory was found to hold what the offer says, which only who made it could
write. Who can do that runs as the same user on the same machine. What lies in a slot is sealed like anything else.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import mmap
import os
import secrets
import select
import socket
import threading
import time
from contextlib import suppress
from typing import Annotated, Final

from msgspec import Meta

from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.messages import Message
from shoal.swarm.lanes.frame import FRAME_LIMIT_BYTES, HEADER_BYTES, LARGE_FRAME_BYTES
from shoal.swarm.lanes.seal import LANE_ID_BYTES, TAG_BYTES

SHARED_LEAST_BYTES: Final = 64 * 1024
"""Of a frame's payload: smaller ones stay on the connection, where several go out at once."""
SHARED_SLOTS: Final = 4
SHARED_RETRY_S: Final = 60.0
SHARED_LIMIT_BYTES: Final = 64 << 20
"""Of memory that one process makes, about 15 lanes' of it: where a machine has many nodes the others keep to their
connections, or their memory would grow with the square of how many there are."""
CREDIT_SLOTS: Final = SHARED_SLOTS // 2
"""Are told together that they are free: the sender wakes half as often, and has others meanwhile."""

_NONCE_BYTES: Final = 32
_NAME: Final = "shoal-lane"
_LINK: Final = f"/memfd:{_NAME} (deleted)"
_ALIGNED: Final = 64  # where a ciphertext begins in its slot
_PAGE: Final = mmap.PAGESIZE

logger = logging.getLogger(__name__)

_Descriptor = Annotated[int, Meta(ge=0, lt=1 << 31)]


class SharedOffer(Message, frozen=True, kw_only=True):
    """Offer of memory by a lane's sender: descriptors of process `pid`, and what the memory begins with."""

    lane: Annotated[bytes, Meta(min_length=LANE_ID_BYTES, max_length=LANE_ID_BYTES)]
    pid: Annotated[int, Meta(ge=1, lt=1 << 31)]
    memory: _Descriptor
    pipe: _Descriptor
    nonce: Annotated[bytes, Meta(min_length=_NONCE_BYTES, max_length=_NONCE_BYTES)]


def on_one_machine(connection: socket.socket) -> bool:
    """True if the other end of a TCP connection has this end's address, and this system can share memory that way."""
    if not hasattr(os, "memfd_create"):
        return False
    try:
        return bool(connection.getpeername()[0] == connection.getsockname()[0])
    except OSError:
        return False


def slot_bytes(frame_bytes: int) -> int:
    """Size in bytes of a slot for frames of so many bytes of payload: whole pages."""
    return -(-(_ALIGNED + frame_bytes + TAG_BYTES) // _PAGE) * _PAGE


def memory_bytes(frame_bytes: int) -> int:
    """Size in bytes of memory with SHARED_SLOTS such slots, after a first page with the nonce."""
    return _PAGE + SHARED_SLOTS * slot_bytes(frame_bytes)


_FRAME_BYTES: Final = {memory_bytes(size): size for size in (LARGE_FRAME_BYTES, FRAME_LIMIT_BYTES)}


def _slots(mapping: memoryview) -> tuple[memoryview, ...]:
    """The slots of the memory, each from its frame's header on."""
    size = (len(mapping) - _PAGE) // SHARED_SLOTS
    starts = range(_PAGE, len(mapping), size)
    return tuple(mapping[start + _ALIGNED - HEADER_BYTES : start + size] for start in starts)


class _Room:
    """Bytes of memory that this process has made to share, over all lanes of its nodes, and their limit."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.used_bytes = 0

    def take(self, size: int) -> None:
        """Count memory that is to be made. Raises OSError if that is too much."""
        with self._lock:
            if self.used_bytes + size > SHARED_LIMIT_BYTES:
                raise OSError(errno.ENOMEM, f"{self.used_bytes} bytes are shared already")
            self.used_bytes += size

    def give_back(self, size: int) -> None:
        """It is no more."""
        with self._lock:
            self.used_bytes -= size


_room: Final = _Room()


class SharedOut:
    """The sender's side. For the lane's sending thread, but for `settle` and `close`.

    offer: good until `settle`. frame_bytes: of payload, at most, in a slot. Raises OSError where no more descriptors or
    memory are to be had.
    """

    def __init__(self, lane: bytes, frame_bytes: int = LARGE_FRAME_BYTES) -> None:
        self.frame_bytes = frame_bytes
        self._counted_bytes = size = memory_bytes(frame_bytes)
        self._memory = self._ours = self._theirs = -1
        _room.take(size)
        try:
            self._memory = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.posix_fallocate(self._memory, 0, size)  # a page that is not to be had later would be fatal
            fcntl.fcntl(self._memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            mapping = memoryview(mmap.mmap(self._memory, size))
            self._ours, self._theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            self.close()
            raise
        nonce = secrets.token_bytes(_NONCE_BYTES)
        mapping[:_NONCE_BYTES] = nonce
        self._slots = _slots(mapping)
        self._poll: select.poll | None = None
        self.offer = SharedOffer(lane=lane, pid=os.getpid(), memory=self._memory, pipe=self._theirs, nonce=nonce)
        self._used, self._free = 0, SHARED_SLOTS

    def settle(self) -> None:
        """The offer was taken: keep no more open than is needed, so that the receiver's end of the pipe is all."""
        for descriptor in (self._memory, self._theirs):
            _close(descriptor)
        self._memory = self._theirs = -1

    def take(self, connection: socket.socket, timeout_s: float) -> memoryview:
        """The next slot, from where its frame's header goes; waits until it is free.

        Raises NetworkError if the lane ends meanwhile, or the receiver frees none in time.
        """
        if self._free == 0:
            self._wait(connection, timeout_s)
        self._free -= 1
        self._used += 1
        return self._slots[(self._used - 1) % SHARED_SLOTS]

    def _wait(self, connection: socket.socket, timeout_s: float) -> None:
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(self._ours, select.POLLIN)
            self._poll.register(connection, 0)  # its end is told anyway
        ready = dict(self._poll.poll(timeout_s * 1000))
        if not ready:
            raise NetworkError(f"no slot of the shared memory came free for {timeout_s} s")
        if connection.fileno() in ready:
            raise NetworkError("the connection ended while a slot of the shared memory was waited for")
        freed = len(os.read(self._ours, 2 * SHARED_SLOTS))
        if not 0 < freed <= SHARED_SLOTS:
            raise NetworkError(f"{freed} slots of the shared memory were freed, of {SHARED_SLOTS}")
        self._free = freed

    def close(self) -> None:
        """Let go of it. Nobody uses it any more."""
        for descriptor in (self._memory, self._ours, self._theirs):
            _close(descriptor)
        self._memory = self._ours = self._theirs = -1
        self._slots = ()
        counted, self._counted_bytes = self._counted_bytes, 0
        _room.give_back(counted)


class SharedIn:
    """The receiver's side of what `offer` names. For the lane's receiving thread.

    Raises NetworkError if it is not to be had from here.
    """

    def __init__(self, offer: SharedOffer) -> None:
        self._taken = self._untold = 0
        try:
            self._slots, self.frame_bytes = _memory_of(offer)
            self._pipe = _open(offer.pid, offer.pipe, os.O_WRONLY, link="pipe:[")
        except (OSError, ValueError) as error:
            raise NetworkError(f"the memory of process {offer.pid} is not to be had: {error}") from None

    def take(self, size: int) -> memoryview:
        """The `size` sealed bytes of the next frame, in its slot."""
        self._taken += 1
        return self._slots[(self._taken - 1) % SHARED_SLOTS][HEADER_BYTES : HEADER_BYTES + size]

    def free(self) -> None:
        """The slot taken last is not read any more. The sender is told of CREDIT_SLOTS together."""
        self._untold += 1
        if self._untold == CREDIT_SLOTS:
            self._untold = 0
            with suppress(OSError):  # the sender is gone, as its connection tells
                os.write(self._pipe, bytes(CREDIT_SLOTS))

    def close(self) -> None:
        """Let go of it. Nobody uses it any more."""
        _close(self._pipe)
        self._pipe = -1
        self._slots = ()


class Sharing:
    """Shared memory of one lane, as its two threads use it.

    Each thread uses its own half. `take`, `answered` and `close` are called under the lane's lock, the last one when
    both have left.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._out: SharedOut | None = None
        self._in: SharedIn | None = None
        self._sends = self._receives = self._closed = False
        self._next_offer, self._offered_bytes = 0.0, LARGE_FRAME_BYTES
        self.bytes_sent = 0
        """Through the memory, of frames: beside what the connection's kernel has counted."""
        self.bytes_received = 0

    def take(self, offer: SharedOffer) -> None:
        """Make ready to receive in the peer's memory. Raises NetworkError if it is not to be had, or some is in use.

        What was taken before and is not in use is let go: the peer had no answer.
        """
        if self._closed or self._receives or not on_one_machine(self._connection):
            raise NetworkError("the lane takes no memory now")
        before, self._in = self._in, SharedIn(offer)
        if before is not None:
            before.close()

    def answered(self, taken: bool) -> bool:
        """The peer has answered the offer; whether the sending thread is to say that it begins.

        If it has not taken it there may be another, with slots of the other size, SHARED_RETRY_S later: what the peer
        lacked may be there by then.
        """
        if self._out is None:
            return False
        if taken:
            self._out.settle()
        else:
            self._out.close()
            self._out = None
            self._offered_bytes = LARGE_FRAME_BYTES + FRAME_LIMIT_BYTES - self._offered_bytes
            self._next_offer = time.monotonic() + SHARED_RETRY_S
        return taken

    # The sending thread

    @property
    def is_used(self) -> bool:
        """True if frames are handed over in memory in either direction."""
        return self._sends or self._receives

    @property
    def frame_bytes(self) -> int:
        """Of payload, at most, in the next frame."""
        return self._out.frame_bytes if self._sends and self._out is not None else FRAME_LIMIT_BYTES

    def offer(self, lane: bytes, size: int) -> SharedOffer | None:
        """Return the offer to make when a frame of `size` bytes of payload goes out, if it is time for one."""
        if self._out is not None or size < SHARED_LEAST_BYTES or time.monotonic() < self._next_offer:
            return None
        if not on_one_machine(self._connection):
            self._next_offer = math.inf
            return None
        try:
            self._out = SharedOut(lane, self._offered_bytes)
        except OSError as error:
            logger.info("no memory to share: %s", error)
            self._next_offer = time.monotonic() + SHARED_RETRY_S
            return None
        return self._out.offer

    def began(self) -> None:
        """The peer was told that all large frames lie in the memory from now on."""
        self._sends = True

    def slot(self, size: int, timeout_s: float) -> memoryview | None:
        """Return the slot to seal the next frame in, of `size` bytes of payload; None: it goes over the connection.

        Raises NetworkError as `SharedOut.take` does.
        """
        if not self._sends or size < SHARED_LEAST_BYTES:
            return None
        assert self._out is not None
        slot = self._out.take(self._connection, timeout_s)
        self.bytes_sent += size + TAG_BYTES
        return slot

    # The receiving thread

    def begin(self) -> bool:
        """The peer says that its large frames lie in the memory from now on; False if it may not."""
        fits = self._in is not None and not self._receives
        self._receives |= fits
        return fits

    def sealed(self, size: int) -> memoryview | None:
        """Return ciphertext and tag of the next frame, of `size` bytes of payload; None: they are on the connection.

        Raises RemoteError if it is larger than what goes there.
        """
        source = self._in if self._receives and size >= SHARED_LEAST_BYTES else None
        limit = FRAME_LIMIT_BYTES if source is None else source.frame_bytes
        if size > limit:
            raise RemoteError(f"a frame of {size} bytes of payload where {limit} is the most")
        if source is None:
            return None
        self.bytes_received += size + TAG_BYTES
        return source.take(size + TAG_BYTES)

    def opened(self) -> None:
        """Free what `sealed` gave, which is not read any more."""
        assert self._in is not None
        self._in.free()

    def close(self) -> None:
        """Let go of everything."""
        self._closed = True
        for side in (self._out, self._in):
            if side is not None:
                side.close()
        self._out = self._in = None


def _memory_of(offer: SharedOffer) -> tuple[tuple[memoryview, ...], int]:
    """The slots of an offer, for reading, and how much payload goes into one.

    Raises OSError, or ValueError if the memory is not what it should be.
    """
    descriptor = _open(offer.pid, offer.memory, os.O_RDONLY, link=_LINK)
    try:
        found = os.fstat(descriptor)
        kept = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        frame_bytes = _FRAME_BYTES.get(found.st_size)
        if found.st_uid != os.geteuid() or frame_bytes is None or not kept:
            raise ValueError("another user's memory, or one that may change its size")
        mapping = memoryview(mmap.mmap(descriptor, found.st_size, prot=mmap.PROT_READ))
    finally:
        os.close(descriptor)
    if mapping[:_NONCE_BYTES] != offer.nonce:
        raise ValueError("another lane's memory")
    return _slots(mapping), frame_bytes


def _open(pid: int, descriptor: int, how: int, *, link: str) -> int:
    """Another process's descriptor, whose name begins with `link`. Raises OSError, or ValueError if it does not."""
    path = f"/proc/{pid}/fd/{descriptor}"
    if not os.readlink(path).startswith(link):  # whatever else it is, opening it could have consequences
        raise ValueError(f"descriptor {descriptor} is something else")
    return os.open(path, how | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)
