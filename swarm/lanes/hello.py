"""The first frame of either side of a lane: it proves that who connected holds the keys that were agreed on."""

from __future__ import annotations

import trio

from shoal.protocol.errors import RemoteError
from shoal.swarm.lanes.frame import HEADER_BYTES, FrameHeader, FrameKind
from shoal.swarm.lanes.seal import LANE_ID_BYTES, SEAL_OVERHEAD_BYTES, LaneKeys, Opener, Sealer

_TEXT = b"shoal lane hello"
_HELLO = FrameHeader(kind=FrameKind.HELLO, length=len(_TEXT) + LANE_ID_BYTES)
HELLO_WIRE_BYTES = _HELLO.length + SEAL_OVERHEAD_BYTES


def seal_hello(sealer: Sealer, keys: LaneKeys) -> bytes:
    """Our hello, HELLO_WIRE_BYTES on the wire."""
    out = bytearray(HELLO_WIRE_BYTES)
    sealer.seal_into(_HELLO, _TEXT + keys.lane_id, memoryview(out))
    return bytes(out)


def open_hello(opener: Opener, keys: LaneKeys, wire: bytes) -> None:
    """Raises RemoteError unless `wire` is the hello of who has the keys."""
    head, sealed = wire[:HEADER_BYTES], memoryview(wire)[HEADER_BYTES:]
    text = bytearray(_HELLO.length)
    opener.open_into(head, sealed, memoryview(text))
    if head != _HELLO.encode() or text != _TEXT + keys.lane_id:
        raise RemoteError("a lane opened with something else than a hello", peer=keys.peer)


async def receive_exactly(stream: trio.SocketStream, size: int) -> bytes:
    """Exactly `size` bytes and not one more, for what follows belongs to the lane. Raises RemoteError at the end."""
    data = bytearray()
    while len(data) < size:
        more = await stream.receive_some(size - len(data))
        if not more:
            raise RemoteError("a connection ended before its hello")
        data += more
    return bytes(data)
