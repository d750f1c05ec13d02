"""A donor of `shoal bench join`, a process of its own: a cache, a state server, lanes; and orders from the joiner.

    python -m shoal.lab.bench.join_donor NUMBER NUMEL CHUNK_VALUES CAP CONTROL

CONTROL is a Unix socket on which the joiner calls: messages are `u32 (big-endian) length ‖ one byte of order ‖ bytes`,
each answered by one of `u32 length ‖ bytes`. It stands in for the libp2p channel, which a state never passes through.

    FETCH    a fetch request, answered by the state server as in a node
    LANE     a lane request, answered by the lane pool as in a node
    RAW      the share of the state's bytes that this donor sends as bare frames, one of how many

The state is drawn from a seed, so that all donors hold the same. The process ends with the joiner's connection.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
import trio

from shoal.collectives.codecs import F32
from shoal.collectives.grid import Grid
from shoal.collectives.state import CertifiedState, frozen, header_of
from shoal.node.state.state_server import StateServer
from shoal.node.state.states import StateCache
from shoal.protocol.certificate import genesis
from shoal.protocol.chain import Chain
from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Term
from shoal.protocol.peering import FetchRequest
from shoal.protocol.wire import SwarmId, canonical, decode
from shoal.swarm.lanes.chunks import KINDS, ChunkExchange
from shoal.swarm.lanes.frame import FRAME_LIMIT_BYTES, FrameHeader, FrameKind
from shoal.swarm.lanes.limits import LaneLimits, RateLimit
from shoal.swarm.lanes.pool import LanePool

SWARM: Final = SwarmId(b"bench join".ljust(32, b"\0"))
JOINER: Final = PeerId("joiner")
FETCH, LANE, RAW = b"F", b"L", b"R"
MESSAGE_LIMIT_BYTES: Final = 8 << 20
SEED: Final = 1
ROUND: Final = 1
SCOPE_RAW: Final = b"raw     "


def donor_id(number: int) -> PeerId:
    """The name of a donor; higher than the joiner's or lower makes no difference here."""
    return PeerId(f"donor{number}")


def drawn_state(numel: int) -> CertifiedState:
    """S(1), the same in every process: values of no pattern that a codec, a cache or a disk could use."""

    def drawn(seed: int) -> F32:
        return frozen(np.random.Generator(np.random.SFC64(seed)).random(numel, dtype=np.float32))

    return CertifiedState(
        term=Term(),
        round=ROUND,
        tokens=1,
        layout_hash=bytes(32),
        anchor=drawn(SEED),
        momentum=drawn(SEED + 1),
    )


class _Sink:
    """The donor's lanes bring requests for chunks and nothing else."""

    chunks: ChunkExchange

    def region(self, peer: PeerId, header: FrameHeader) -> memoryview | None:
        """Refuse every frame: none is expected."""
        return None

    def received(self, peer: PeerId, header: FrameHeader, payload: memoryview) -> None:
        """Take a request for a chunk."""
        if header.kind in KINDS:
            self.chunks.received(peer, header)

    def lane_closed(self, peer: PeerId, error: NetworkError | RemoteError | None) -> None:
        """Do nothing: the joiner is done."""


class Donor:
    """One donor's parts."""

    def __init__(self, number: int, state: CertifiedState, chunk_values: int, cap: int, folder: Path) -> None:
        self._state = state
        cache = StateCache(folder, chunk_values)
        header = header_of(state, Grid(state.numel, chunk_values), threads=2)
        cache.put(state, header)
        self.digest = header.digest
        self._state_server = StateServer(chain=Chain(genesis(SWARM, [donor_id(0)])), cache=cache)
        sink = _Sink()
        self.lanes = LanePool(
            me=donor_id(number),
            swarm_id=SWARM,
            sink=sink,
            listen=("127.0.0.1", 0),
            request=_calls_nobody,
            limits=LaneLimits(upload=RateLimit(cap or None)),
        )
        sink.chunks = ChunkExchange(post=self.lanes.post, lookup=cache.lookup)

    async def serve(self, stream: trio.abc.Stream) -> None:
        """Follow the joiner's orders until it goes."""
        await send_message(stream, self.digest)
        while (message := await receive_message(stream)) is not None:
            order, body = message[:1], message[1:]
            if order == FETCH:
                request: FetchRequest = decode(body, FetchRequest)  # type: ignore[arg-type]
                answer = canonical(self._state_server.answer(request))
            elif order == LANE:
                answer = await self.lanes.answer(JOINER, body)
            else:
                part, parts = body
                self._post_raw(part, parts)
                answer = b""
            await send_message(stream, answer)

    def _post_raw(self, part: int, parts: int) -> None:
        """Queue one in `parts` of the state's frames, each naming where it lies in the whole."""
        both = [self._state.anchor.data.cast("B"), self._state.momentum.data.cast("B")]
        for number, (vector, offset) in enumerate(frame_places(len(both[0]))):
            if number % parts == part:
                piece = both[vector][offset : offset + FRAME_LIMIT_BYTES]
                header = FrameHeader(
                    kind=FrameKind.CONTRIBUTION,
                    length=len(piece),
                    chunk=number,
                    total=len(piece),
                    scope=SCOPE_RAW,
                )
                self.lanes.post(JOINER, header, piece)


def frame_places(vector_bytes: int) -> list[tuple[int, int]]:
    """(vector, offset) of each full frame of a state's two vectors; the last of each may be shorter."""
    return [(vector, offset) for vector in (0, 1) for offset in range(0, vector_bytes, FRAME_LIMIT_BYTES)]


async def send_message(stream: trio.abc.Stream, message: bytes) -> None:
    """Send one message over the control connection."""
    await stream.send_all(len(message).to_bytes(4, "big") + message)


async def receive_message(stream: trio.abc.Stream) -> bytes | None:
    """Receive the next message; None at the end. Raises NetworkError for one that is too long."""
    head = await _receive_exactly(stream, 4)
    if head is None:
        return None
    size = int.from_bytes(head, "big")
    if size > MESSAGE_LIMIT_BYTES:
        raise NetworkError(f"a control message of {size} bytes")
    return await _receive_exactly(stream, size)


async def _receive_exactly(stream: trio.abc.Stream, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        part = await stream.receive_some(size - len(data))
        if not part:
            return None
        data += part
    return data


async def _calls_nobody(peer: PeerId, offer: bytes) -> bytes:
    raise NetworkError("a donor of the benchmark dials nobody")


async def _run(number: int, numel: int, chunk_values: int, cap: int, control: str) -> None:
    with TemporaryDirectory() as folder:
        for name in ("state", "finals"):
            (Path(folder) / name).mkdir()
        donor = Donor(number, drawn_state(numel), chunk_values, cap, Path(folder))
        async with trio.open_nursery() as nursery:
            await nursery.start(donor.lanes.run)
            await donor.serve(await trio.open_unix_socket(control))
            nursery.cancel_scope.cancel()


if __name__ == "__main__":
    own, values, chunk, limit = map(int, sys.argv[1:5])
    trio.run(_run, own, values, chunk, limit, sys.argv[5])
