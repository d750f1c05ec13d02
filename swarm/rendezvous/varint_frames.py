"""A byte stream whose far end frames its messages as libp2p's protocols do, made to look framed as ours are.

    theirs    length (unsigned varint) ‖ that many bytes
    ours      length (4 bytes, big-endian) ‖ that many bytes, see `shoal.swarm.streams`

So a `MessageStream`, with its limits and its care for cancellation, talks to software that is not Shoal.

Source: https://github.com/multiformats/unsigned-varint
"""

from __future__ import annotations

from shoal.protocol.errors import NetworkError
from shoal.swarm.streams import LENGTH_BYTES, RawStream

VARINT_LIMIT_BYTES = 4


class VarintFrames:
    """A `RawStream` over another one. Read and write it as a `MessageStream` does: whole messages in each write."""

    def __init__(self, raw: RawStream) -> None:
        self._raw = raw
        self._ahead = b""  # read, and not looked at
        self._left_bytes = 0  # of the message being read
        self._varint = bytearray()

    async def read(self, limit_bytes: int) -> bytes:
        """As `RawStream.read`; raises NetworkError for a length that is no varint of VARINT_LIMIT_BYTES."""
        while True:
            data = self._ahead or await self._raw.read(limit_bytes)
            self._ahead = b""
            if not data:
                if self._varint:
                    raise NetworkError("the stream ended inside a length")
                return b""
            if self._left_bytes:
                taken, self._ahead = data[: self._left_bytes], data[self._left_bytes :]
                self._left_bytes -= len(taken)
                return taken
            self._varint.append(data[0])
            self._ahead = data[1:]
            if data[0] < 0x80:
                self._left_bytes = _decode(self._varint)
                self._varint.clear()
                return self._left_bytes.to_bytes(LENGTH_BYTES, "big")
            if len(self._varint) >= VARINT_LIMIT_BYTES:
                raise NetworkError("a length that is no varint")

    async def write(self, data: bytes) -> None:
        """As `RawStream.write`."""
        await self._raw.write(encode_varint(len(data) - LENGTH_BYTES) + data[LENGTH_BYTES:])

    async def finish(self) -> None:
        """As `RawStream.finish`."""
        await self._raw.finish()

    async def reset(self) -> None:
        """As `RawStream.reset`."""
        await self._raw.reset()


def _decode(varint: bytearray) -> int:
    return sum((byte & 0x7F) << (7 * index) for index, byte in enumerate(varint))


def encode_varint(number: int) -> bytes:
    """Encode a number as libp2p and protobuf do: seven bits a byte, the lowest first."""
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])
