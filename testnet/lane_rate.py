"""One lane beside the same sockets in plaintext: two processes on loopback, a one-way stream of full frames.

    this process: receives, measures          a child: `python -m shoal.testnet.lane_rate PORT FRAMES REPETITIONS`
      sockets:   region ◄─ decrypt ◄─ recv  ◄────  send ◄─ encrypt ◄─ queued payloads
      shared:    region ◄─ decrypt ◄─ memory that both see ◄─ encrypt ◄─ queued payloads
      plaintext: region ◄─ recv             ◄────  send ◄─ payloads

The first is a lane as between machines, the second one as between nodes of one machine. All set the same socket
options, read the same payloads and write the same regions, which all were touched before and do not fit a cache; the
plaintext loops do nothing but move header and payload. The repetitions alternate, so that whatever else the machine
does meets all. A rate counts payload from the first frame's header to the last frame's delivery. There is no libp2p
channel here, so nobody proves who the two are: a lane in use does not either.
"""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import msgspec

from shoal.protocol.errors import LocalError, NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.swarm.lanes.frame import HEADER_BYTES, FrameHeader, FrameKind
from shoal.swarm.lanes.lane import Lane
from shoal.swarm.lanes.limits import LaneLimits
from shoal.swarm.lanes.seal import (
    LaneKeys,
    LaneOffer,
    LaneProposal,
    Opener,
    Sealer,
    accept_offer,
    decode_answer,
    decode_request,
    encode_handshake,
)
from shoal.swarm.lanes.shared import SharedOffer
from shoal.swarm.lanes.socket import prepare, receive_exactly

FRAME_BYTES = 512 * 1024
POOL_BYTES = 64 << 20
POOL_FRAMES = POOL_BYTES // FRAME_BYTES
DEADLINE_S = 60.0
Way = Literal["sockets", "shared", "plaintext"]
WAYS: Final[tuple[Way, ...]] = ("sockets", "shared", "plaintext")

_SENDER, _RECEIVER = PeerId("sender"), PeerId("receiver")
_SWARM_ID = b"bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSpeed:
    """Payload rates in MB/s (10^6 bytes), one per repetition, in the order they were measured."""

    encrypted: tuple[float, ...]
    shared: tuple[float, ...]
    plaintext: tuple[float, ...]

    @property
    def encrypted_mb_per_s(self) -> float:
        """The median of the lane over its sockets."""
        return statistics.median(self.encrypted)

    @property
    def shared_mb_per_s(self) -> float:
        """The median of the lane within one machine."""
        return statistics.median(self.shared)

    @property
    def plaintext_mb_per_s(self) -> float:
        """The median of the bare sockets."""
        return statistics.median(self.plaintext)

    @property
    def ratios(self) -> list[float]:
        """Rates of the lane as shares of plaintext over its sockets, each of two neighbouring runs."""
        return [one / other for one, other in zip(self.encrypted, self.plaintext, strict=True)]

    @property
    def shared_ratios(self) -> list[float]:
        """The same of the lane within one machine."""
        return [one / other for one, other in zip(self.shared, self.plaintext, strict=True)]


def measure_lane(*, frames: int, repetitions: int) -> LaneSpeed:
    """Run the benchmark; blocks for some seconds.

    Raises NetworkError if the child fails, LocalError if bytes arrive changed.
    """
    regions = memoryview(bytearray(POOL_BYTES))
    expected = _payloads()
    filled = min(frames, POOL_FRAMES) * FRAME_BYTES
    rates: dict[Way, list[float]] = {way: [] for way in WAYS}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(DEADLINE_S)
        with _child(listener.getsockname()[1], frames, repetitions):
            for number, way in enumerate(_variants(repetitions)):
                regions[:] = bytes(POOL_BYTES)
                if way == "plaintext":
                    seconds = _receive_plain(_accept(listener), regions, frames)
                else:
                    seconds = _receive_sealed(listener, regions, frames, shares=way == "shared")
                if regions[:filled] != expected[:filled]:
                    raise LocalError("the benchmark's bytes arrived changed")
                if number >= len(WAYS):
                    rates[way].append(frames * FRAME_BYTES / seconds / 1e6)
    return LaneSpeed(
        encrypted=tuple(rates["sockets"]), shared=tuple(rates["shared"]), plaintext=tuple(rates["plaintext"])
    )


def _variants(repetitions: int) -> list[Way]:
    """The runs: all ways in turn, each turn the other way round than the one before, and a first one to warm up."""
    return [way for turn in range(repetitions + 1) for way in (WAYS if turn % 2 == 0 else WAYS[::-1])]


@contextmanager
def _child(port: int, frames: int, repetitions: int) -> Iterator[None]:
    command = [sys.executable, "-m", "shoal.testnet.lane_rate", str(port), str(frames), str(repetitions)]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        yield
        if child.wait(DEADLINE_S) != 0:
            raise NetworkError("the sending process of the benchmark failed")
    finally:
        with suppress(ProcessLookupError):
            child.kill()
        child.wait()


def _accept(listener: socket.socket) -> socket.socket:
    try:
        connection, _ = listener.accept()
    except TimeoutError:
        raise NetworkError(f"the sending process of the benchmark did not call within {DEADLINE_S:.0f} s") from None
    return connection


def _payloads() -> memoryview:
    """Data to send, again and again: POOL_BYTES that differ from frame to frame."""
    pool = bytearray(POOL_BYTES)
    pattern = bytes(range(251)) * (FRAME_BYTES // 251 + 1)
    for number in range(POOL_FRAMES):
        start = number * FRAME_BYTES
        pool[start : start + FRAME_BYTES] = pattern[:FRAME_BYTES]
        pool[start] = number
    return memoryview(pool)


def _frames(pool: memoryview, frames: int) -> Iterator[tuple[FrameHeader, memoryview]]:
    for number in range(frames):
        start = number % POOL_FRAMES * FRAME_BYTES
        header = FrameHeader(kind=FrameKind.STATE, length=FRAME_BYTES, total=FRAME_BYTES, chunk=number)
        yield header, pool[start : start + FRAME_BYTES]


class _Regions:
    """The receiving lane's sink: the regions one after the other, and when the first and last frame came."""

    def __init__(self, pool: memoryview, frames: int) -> None:
        self.done = threading.Event()
        self.started = self.ended = 0.0
        self.error: NetworkError | RemoteError | None = None
        self._pool = pool
        self._left = frames

    def region(self, peer: PeerId, header: FrameHeader) -> memoryview:
        """The next part of the pool."""
        self.started = self.started or time.perf_counter()
        start = header.chunk % POOL_FRAMES * FRAME_BYTES
        return self._pool[start : start + header.length]

    def received(self, peer: PeerId, header: FrameHeader, payload: memoryview) -> None:
        """Note that one more frame is here."""
        self._left -= 1
        if self._left == 0:
            self.ended = time.perf_counter()
            self.done.set()

    def lane_closed(self, peer: PeerId, error: NetworkError | RemoteError | None) -> None:
        """Note that no frame will come any more."""
        self.error = error
        self.done.set()

    @property
    def seconds(self) -> float:
        """Seconds from the first header to the last delivery. Raises what ended the lane before."""
        if not self.ended:
            raise self.error or NetworkError("the benchmark's lane ended early")
        return self.ended - self.started


def _receive_sealed(listener: socket.socket, pool: memoryview, frames: int, *, shares: bool) -> float:
    connection = _accept(listener)
    offer = decode_request(_receive_message(connection), peer=_SENDER)
    assert isinstance(offer, LaneOffer)
    answer, keys = accept_offer(offer, me=_RECEIVER, peer=_SENDER, swarm_id=_SWARM_ID, addresses=("127.0.0.1:1",))
    _send_message(connection, encode_handshake(answer))
    sink = _Regions(pool, frames)
    lane = _start_lane(connection, keys, sink)
    try:
        if shares:
            with _accept(listener) as side:
                lane.take_memory(msgspec.msgpack.decode(_receive_message(side), type=SharedOffer))
                _send_message(side, b"taken")
        sink.done.wait(DEADLINE_S)
    finally:
        lane.close()
    return sink.seconds


def _send_sealed(connection: socket.socket, pool: memoryview, frames: int, *, shares: bool) -> None:
    proposal = LaneProposal(me=_SENDER, peer=_RECEIVER, swarm_id=_SWARM_ID)
    _send_message(connection, encode_handshake(proposal.offer))
    keys = proposal.keys(decode_answer(_receive_message(connection), peer=_RECEIVER))
    lane = _start_lane(connection, keys, _Regions(pool, 0), share=partial(_share, connection) if shares else None)
    for header, payload in _frames(pool, frames):
        lane.post(header, payload)
    lane.close(deadline_s=DEADLINE_S)


def _share(connection: socket.socket, lane: Lane, offer: SharedOffer) -> None:
    """Offer shared memory over a second connection, where nodes have libp2p."""
    with socket.create_connection(connection.getpeername()) as side:
        _send_message(side, msgspec.msgpack.encode(offer))
        lane.answered(_receive_message(side) == b"taken")


def _start_lane(
    connection: socket.socket,
    keys: LaneKeys,
    sink: _Regions,
    share: Callable[[Lane, SharedOffer], None] | None = None,
) -> Lane:
    lane = Lane(
        connection,
        peer=keys.peer,
        sealer=Sealer(keys.send_key),
        opener=Opener(keys.receive_key, peer=keys.peer),
        sink=sink,
        limits=LaneLimits(),
        dialled=True,
    )
    lane.id, lane.share = keys.lane_id, share
    lane.start()
    return lane


def _receive_plain(connection: socket.socket, pool: memoryview, frames: int) -> float:
    prepare(connection, LaneLimits().stall_s)
    sink = _Regions(pool, frames)
    head = memoryview(bytearray(HEADER_BYTES))
    with closing(connection):
        for _ in range(frames):
            receive_exactly(connection, head)
            header = FrameHeader.decode(head)
            region = sink.region(_SENDER, header)
            receive_exactly(connection, region)
            sink.received(_SENDER, header, region)
    return sink.seconds


def _send_plain(connection: socket.socket, pool: memoryview, frames: int) -> None:
    prepare(connection, LaneLimits().stall_s)
    with closing(connection):
        for header, payload in _frames(pool, frames):
            sent = connection.sendmsg([header.encode(), payload])
            if sent < HEADER_BYTES:
                raise NetworkError("not even a header fits the kernel's buffer")
            connection.sendall(payload[sent - HEADER_BYTES :])


def _send_message(connection: socket.socket, message: bytes) -> None:
    connection.sendall(len(message).to_bytes(4, "big") + message)


def _receive_message(connection: socket.socket) -> bytes:
    size = memoryview(bytearray(4))
    receive_exactly(connection, size)
    message = memoryview(bytearray(int.from_bytes(size, "big")))
    receive_exactly(connection, message)
    return bytes(message)


def send(port: int, frames: int, repetitions: int) -> None:
    """Send as the child: one connection per run, sealed and plain in turn."""
    pool = _payloads()
    for way in _variants(repetitions):
        connection = socket.create_connection(("127.0.0.1", port))
        if way == "plaintext":
            _send_plain(connection, pool, frames)
        else:
            _send_sealed(connection, pool, frames, shares=way == "shared")


if __name__ == "__main__":
    send(*(int(argument) for argument in sys.argv[1:]))
