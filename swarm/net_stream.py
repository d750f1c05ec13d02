"""libp2p's streams as Shoal reads and writes them: agreed on a protocol in one round trip, their errors NetworkErrors.

Agreeing takes no more than it needs from whoever asks, and a protocol that is not Shoal's keeps the framing it has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import trio

from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import PeerId
from shoal.swarm.libp2p_parts import only_what_runs
from shoal.swarm.muxer import CLOSE_DEADLINE_S, FOREIGN_ERRORS
from shoal.swarm.streams import LENGTH_BYTES, RawStream

with only_what_runs():
    from libp2p.exceptions import ParseError
    from libp2p.host import basic_host
    from libp2p.io.abc import ReadWriteCloser
    from libp2p.io.exceptions import IOException
    from libp2p.network.stream.exceptions import StreamEOF
    from libp2p.protocol_muxer import generic_selector
    from libp2p.protocol_muxer.exceptions import MultiselectCommunicatorError
    from libp2p.protocol_muxer.multiselect_client import MULTISELECT_PROTOCOL_ID
    from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
    from libp2p.utils import encode_delim
    from libp2p.utils.varint import read_varint_prefixed_bytes_limited

NAME_LIMIT_BYTES = 1024
"""Of one message: the name of a protocol, or what answers it."""
NAMES_LIMIT = 16
"""Messages of the far end until both have agreed."""
VARINT_LIMIT_BYTES = 4

AnyStream = Any  # libp2p's stream, which has no types


class Communicator(MultiselectCommunicator):  # type: ignore[misc]
    """Reads NAMES_LIMIT messages of NAME_LIMIT_BYTES each at most; more is an error before it is read.

    libp2p's own reads as many bytes as a message's length claims, and hears as many names as are said.
    """

    def __init__(self, read_writer: ReadWriteCloser) -> None:
        super().__init__(read_writer)
        self._left = NAMES_LIMIT

    async def read(self) -> str:
        """The next message. Raises MultiselectCommunicatorError for what is none, or over the limits."""
        if self._left == 0:
            raise MultiselectCommunicatorError(f"{NAMES_LIMIT} messages and no protocol agreed on")
        self._left -= 1
        try:
            message: bytes = await read_varint_prefixed_bytes_limited(self.read_writer, NAME_LIMIT_BYTES)
            if not message.endswith(b"\n"):
                raise ParseError("a message that no line ends")
            return message[:-1].decode()
        except (ParseError, IOException, ValueError) as error:
            raise MultiselectCommunicatorError(f"no message of multistream: {error}") from error


# Looked up there by name, for streams and for connections.
basic_host.MultiselectCommunicator = Communicator
generic_selector.MultiselectCommunicator = Communicator


async def agree(stream: AnyStream, protocol: str) -> bool:
    """Ask for `protocol` in one round trip; libp2p's own client takes two. False if the peer does not serve it.

    Source: multistream-select 1.0, https://github.com/multiformats/multistream-select
    """
    await stream.write(encode_delim(MULTISELECT_PROTOCOL_ID.encode()) + encode_delim(protocol.encode()))
    communicator = Communicator(stream)
    greeting, choice = await communicator.read(), await communicator.read()
    stream.set_protocol(protocol)
    return (greeting, choice) == (MULTISELECT_PROTOCOL_ID, protocol)


class NetStream:
    """A libp2p stream as a `shoal.swarm.streams.RawStream`: foreign errors become NetworkError here."""

    def __init__(self, stream: AnyStream) -> None:
        self.raw = self._stream = stream

    async def read(self, limit_bytes: int) -> bytes:
        try:
            data: bytes = await self._stream.read(limit_bytes)
        except StreamEOF:
            if self._stream.muxed_conn.event_shutting_down.is_set():
                raise self._broken("the connection broke") from None
            return b""
        except FOREIGN_ERRORS as error:
            raise self._broken(f"the stream broke: {type(error).__name__}") from error
        return data

    async def write(self, data: bytes) -> None:
        with self._as_network_error():
            await self._stream.write(data)

    async def finish(self) -> None:
        with self._as_network_error():
            await self._stream.close()

    async def reset(self) -> None:
        with self._as_network_error():
            await self._stream.reset()

    @contextlib.contextmanager
    def _as_network_error(self) -> Iterator[None]:
        try:
            yield
        except FOREIGN_ERRORS as error:
            raise self._broken(f"the stream broke: {type(error).__name__}") from error

    def _broken(self, text: str) -> NetworkError:
        """The error for a stream that broke; where its connection ended, with the reason for that."""
        why = getattr(self._stream.muxed_conn, "why_ended", "")
        return NetworkError(f"the connection broke: {why}" if why else text)


def peer_of(stream: AnyStream) -> PeerId:
    """Peer at the other end of a libp2p stream, as Noise proved it."""
    return PeerId(str(stream.muxed_conn.peer_id))


async def reset_quietly(stream: AnyStream) -> None:
    """Reset a libp2p stream that failed anyway (bounded, shielded)."""
    with trio.move_on_after(CLOSE_DEADLINE_S, shield=True), contextlib.suppress(*FOREIGN_ERRORS):
        await stream.reset()


class VarintFrames:
    """A byte stream whose far end frames its messages as libp2p's protocols do, made to look framed as ours are.

    theirs    length (unsigned varint) ‖ that many bytes
    ours      length (4 bytes, big-endian) ‖ that many bytes, see `shoal.swarm.streams`

    So a `MessageStream`, with its limits and its care for cancellation, talks to software that is not Shoal. Read and
    write it as a `MessageStream` does: whole messages in each write.

    Source: https://github.com/multiformats/unsigned-varint
    """

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
