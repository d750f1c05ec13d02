"""One libp2p stream as Shoal reads and writes it: agreed on a protocol in one round trip, its errors NetworkErrors."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import trio

from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import PeerId
from shoal.swarm.multistream import Communicator
from shoal.swarm.muxer import CLOSE_DEADLINE_S, FOREIGN_ERRORS

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from libp2p.network.stream.exceptions import StreamEOF
    from libp2p.protocol_muxer.multiselect_client import MULTISELECT_PROTOCOL_ID
    from libp2p.utils import encode_delim

AnyStream = Any  # libp2p's stream, which has no types


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
                raise NetworkError("the connection broke") from None
            return b""
        except FOREIGN_ERRORS as error:
            raise NetworkError(f"the stream broke: {type(error).__name__}") from error
        return data

    async def write(self, data: bytes) -> None:
        with _as_network_error():
            await self._stream.write(data)

    async def finish(self) -> None:
        with _as_network_error():
            await self._stream.close()

    async def reset(self) -> None:
        with _as_network_error():
            await self._stream.reset()


@contextlib.contextmanager
def _as_network_error() -> Iterator[None]:
    try:
        yield
    except FOREIGN_ERRORS as error:
        raise NetworkError(f"the stream broke: {type(error).__name__}") from error


def peer_of(stream: AnyStream) -> PeerId:
    """Who is at the other end of a libp2p stream, as Noise proved it."""
    return PeerId(str(stream.muxed_conn.peer_id))


async def reset_quietly(stream: AnyStream) -> None:
    """Reset a libp2p stream that failed anyway (bounded, shielded)."""
    with trio.move_on_after(CLOSE_DEADLINE_S, shield=True), contextlib.suppress(*FOREIGN_ERRORS):
        await stream.reset()
