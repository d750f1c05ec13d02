"""Exchange under the strategy `gossip`: a node fetches a partner's vector, and a snapshot to begin with.

Both come in chunks over lanes, from the one peer that signed their hashes: a vector's are in its offer, those of a
snapshot under the digest of its header. Whatever bytes come, only those that were signed are taken.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from functools import partial

import trio

from shoal.collectives.codecs import F32, chunk_codec
from shoal.collectives.gossip import GossipVector, decode_vector
from shoal.collectives.grid import Grid
from shoal.collectives.state import CertifiedState, StateAssembly, StateHeader
from shoal.node.state.catchup import KINDS, SPACES
from shoal.node.state.fetching import Fetcher, Job, OnProgress
from shoal.node.state.state_server import ANSWER_LIMIT_BYTES
from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.gossip_messages import Offer, Standing
from shoal.protocol.identity import PeerId
from shoal.protocol.peering import FetchAnswer, GetHeader, HeaderAnswer
from shoal.protocol.wire import canonical, decode
from shoal.swarm.lanes.chunks import ChunkRef, ChunkSpace, Lookup
from shoal.swarm.lanes.frame import SCOPE_BYTES

VECTORS_KEPT = 2
"""Of this node: a partner may be a round behind."""


class VectorCache:
    """This node's newest vectors, for partners to fetch. `lookup` is called in lanes' threads; others it passes on."""

    def __init__(self, others: Lookup) -> None:
        self._others = others
        self._lock = threading.Lock()
        self._vectors: dict[bytes, GossipVector] = {}

    def put(self, vector: GossipVector) -> None:
        """Serve this vector from now on, and the one before it."""
        with self._lock:
            self._vectors[vector.offer.root[:SCOPE_BYTES]] = vector
            while len(self._vectors) > VECTORS_KEPT:
                del self._vectors[next(iter(self._vectors))]

    def lookup(self, ref: ChunkRef) -> memoryview | None:
        """The bytes of a chunk, None if it is not here."""
        if ref.space is not ChunkSpace.VECTOR:
            return self._others(ref)
        with self._lock:
            vector = self._vectors.get(ref.scope)
        return vector.chunks[ref.chunk].data if vector is not None and ref.chunk < vector.grid.chunks else None


class GossipExchange:
    """Fetches from one peer at a time. ask: one request to a peer's state server and its answer."""

    def __init__(
        self, *, cache: VectorCache, fetcher: Fetcher, ask: Callable[[PeerId, bytes], Awaitable[bytes]]
    ) -> None:
        self.cache = cache
        self._fetcher = fetcher
        self._ask = ask

    async def vector(self, peer: PeerId, offer: Offer, on_progress: OnProgress) -> tuple[F32, tuple[bytes, ...]]:
        """Fetch the vector that `peer` offers: v̂ ``(numel,) float32``, and its chunks as they came.

        Raises NetworkError if it does not come, RemoteError if it is no vector. Cancellation: nothing is kept.
        """
        grid = Grid(offer.numel, offer.chunk_values)
        scope = offer.root[:SCOPE_BYTES]
        here: dict[int, bytes] = {}

        def accept(ref: ChunkRef, data: memoryview, digest: bytes | None) -> None:
            if digest != offer.chunk_hash(ref.chunk):
                raise RemoteError(f"chunk {ref.chunk} of its vector is not the one it offered", peer=peer)
            here[ref.chunk] = bytes(data)

        job = Job(
            what=f"the vector of round {offer.round}",
            wanted=[
                (
                    ChunkRef(ChunkSpace.VECTOR, scope, chunk),
                    chunk_codec(offer.codec, grid, chunk).encoded_bytes(grid.length(chunk)),
                )
                for chunk in range(grid.chunks)
            ],
            here=(),
            introduce=_nothing_to_ask,
            accept=accept,
            on_progress=on_progress,
            hashing=True,
        )
        await self._fetcher.fetch(job, [peer])
        chunks = tuple(here[chunk] for chunk in range(grid.chunks))
        return await trio.to_thread.run_sync(decode_vector, chunks, grid, offer.codec), chunks

    async def snapshot(
        self, peer: PeerId, standing: Standing, accepts: Callable[[StateHeader], None], on_progress: OnProgress
    ) -> tuple[CertifiedState, StateHeader]:
        """The state that `peer` said it has. accepts: raises ConfigError, or RemoteError, for a state of another model.

        Raises NetworkError if it does not come, RemoteError if it is not what was signed. Its peer alone vouches for
        it, so no memory is taken for a state of a size that `accepts` does not know.
        """
        answer: FetchAnswer = decode(
            await self._ask(peer, canonical(GetHeader(round=standing.round))),
            FetchAnswer,  # type: ignore[arg-type]
            peer=peer,
            limit_bytes=ANSWER_LIMIT_BYTES,
        )
        if not isinstance(answer, HeaderAnswer):
            raise NetworkError(f"{peer} does not hold its state of round {standing.round} any more")
        header = decode(answer.header, StateHeader, peer=peer, limit_bytes=ANSWER_LIMIT_BYTES)
        if header.digest != standing.digest:  # nothing of the header was believed until here
            raise RemoteError("has another state than the one it said", peer=peer)
        if header.round != standing.round:
            raise RemoteError(f"has a state of round {header.round}, and said {standing.round}", peer=peer)
        accepts(header)
        assembly = StateAssembly(header, digest=standing.digest)
        grid, scope = header.grid, header.digest[:SCOPE_BYTES]
        job = Job(
            what=f"the snapshot of round {header.round}",
            wanted=[
                (ChunkRef(SPACES[kind], scope, chunk), 4 * grid.length(chunk))
                for kind in header.kinds
                for chunk in range(grid.chunks)
            ],
            here=(),
            introduce=_nothing_to_ask,
            accept=partial(_take, assembly),
            on_progress=on_progress,
            hashing=True,
        )
        await self._fetcher.fetch(job, [peer])
        return assembly.finish(), header


def _take(assembly: StateAssembly, ref: ChunkRef, data: memoryview, digest: bytes | None) -> None:
    assembly.accept(KINDS[ref.space], ref.chunk, data, digest)


async def _nothing_to_ask(peer: PeerId) -> None:
    await trio.lowlevel.checkpoint()
