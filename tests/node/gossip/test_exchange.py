"""Partners' vectors and snapshots over real exchanges: only what was signed is taken, and nobody is waited for long."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import trio

from shoal.collectives.codecs import Undecodable
from shoal.collectives.commitment import chunk_hash
from shoal.collectives.gossip import GossipSettings, GossipVector, decode_vector, dither_of, encode_vector
from shoal.collectives.grid import CHUNK_LIMIT_VALUES
from shoal.collectives.state import StateHeader
from shoal.node.gossip.exchange import VECTORS_KEPT, GossipExchange, VectorCache
from shoal.node.outcome import StateFetched
from shoal.node.state.chunk_requests import STALL_S
from shoal.node.state.fetching import Fetcher
from shoal.protocol.donors import DonorScores
from shoal.protocol.errors import ConfigError, NetworkError, RemoteError
from shoal.protocol.gossip_messages import Standing
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import NO_HASH, Term
from shoal.protocol.peering import GetHeader, HeaderAnswer
from shoal.protocol.wire import HASH_BYTES, canonical
from shoal.swarm.lanes.chunks import ChunkExchange, ChunkRef, ChunkSpace
from shoal.swarm.lanes.frame import SCOPE_BYTES
from shoal.swarm.lanes.socket import Moved
from tests.node.donors import ME, Donor, World, flipped
from tests.node.ledger import GRID, SWARM, Ledger, state_of, vector

PARTNER = PeerId("partner")
SETTINGS = GossipSettings(momentum=0.5, lr=0.7, gamma=0.6)


def made(round: int = 1, seed: int = 0) -> GossipVector:
    return encode_vector(
        vector(seed),
        vector(seed + 1),
        SETTINGS,
        grid=GRID,
        codec_name="bf16",
        round=round,
        dither=dither_of(SWARM, round, PARTNER),
    )


pytestmark = [pytest.mark.usefixtures("no_threads"), pytest.mark.virtual_time]


class Pair:
    """Me and one partner, who serves what is put on `cache`, and snapshots of `donor.cache`."""

    def __init__(self, folder: Path) -> None:
        self.world = World(folder, Ledger())
        self.donor: Donor = self.world.donor(PARTNER)
        self.cache = VectorCache(self.donor.cache.lookup)
        self.world.exchanges[PARTNER] = ChunkExchange(post=self.world._poster(PARTNER), lookup=self.cache.lookup)
        lanes = SimpleNamespace(ensure=self.world._ensure, moved=lambda peer: Moved())
        fetcher = Fetcher(lanes=lanes, chunks=self.world.exchanges[ME], scores=DonorScores())  # type: ignore[arg-type]
        self.exchange = GossipExchange(cache=VectorCache(lambda ref: None), fetcher=fetcher, ask=self.world._ask)

    async def fetch(self, offered: GossipVector) -> np.ndarray:
        values, chunks = await self.exchange.vector(PARTNER, offered.offer, ignore)
        assert [chunk_hash(chunk) for chunk in chunks] == [chunk_hash(chunk.data) for chunk in offered.chunks]
        return values


async def ignore(fetched: StateFetched) -> None:
    await trio.lowlevel.checkpoint()


async def test_a_partners_vector_comes_as_it_was_offered(tmp_path: Path) -> None:
    pair, offered = Pair(tmp_path), made()
    pair.cache.put(offered)
    np.testing.assert_array_equal(await pair.fetch(offered), decode_vector(offered.chunks, GRID, "bf16"))


async def test_a_tampered_vector_is_refused(tmp_path: Path) -> None:
    pair, offered = Pair(tmp_path), made()
    pair.cache.put(offered)
    pair.donor.spoil = lambda header, data: flipped(data, 17) if header.chunk == 1 else data
    with pytest.raises(NetworkError, match="chunk 1 of its vector is not the one it offered"):
        await pair.fetch(offered)


async def test_a_vector_that_is_none_is_refused_though_it_was_signed(tmp_path: Path) -> None:
    pair, sound = Pair(tmp_path), made()
    chunks = tuple(chunk.copy() for chunk in sound.chunks)
    chunks[2][:2].view("<u2")[0] = 0x7F80  # infinity
    hashes = b"".join(chunk_hash(chunk.data) for chunk in chunks)
    offered = GossipVector(offer=msgspec.structs.replace(sound.offer, hashes=hashes), grid=GRID, chunks=chunks)
    pair.cache.put(offered)
    with pytest.raises(Undecodable):
        await pair.fetch(offered)


async def test_a_partner_that_brings_nothing_is_given_up_after_the_stall_deadline(tmp_path: Path) -> None:
    pair, offered = Pair(tmp_path), made()
    pair.cache.put(offered)
    pair.donor.spoil = lambda header, data: None
    began = trio.current_time()
    with pytest.raises(NetworkError):
        await pair.fetch(offered)
    assert trio.current_time() - began < STALL_S + 1


async def test_a_vector_of_long_ago_is_not_there_any_more(tmp_path: Path) -> None:
    pair, vectors = Pair(tmp_path), [made(round) for round in range(1, VECTORS_KEPT + 2)]
    for one in vectors:
        pair.cache.put(one)
    for one in vectors[1:]:
        await pair.fetch(one)
    with pytest.raises(NetworkError, match="does not hold it"):
        await pair.fetch(vectors[0])


def test_chunks_that_there_are_not_are_not_served() -> None:
    cache, offered = VectorCache(lambda ref: memoryview(b"other")), made()
    cache.put(offered)
    scope = offered.offer.root[:SCOPE_BYTES]
    assert cache.lookup(ChunkRef(ChunkSpace.VECTOR, scope, 2)) == offered.chunks[2].data
    assert cache.lookup(ChunkRef(ChunkSpace.VECTOR, scope, 3)) is None
    assert cache.lookup(ChunkRef(ChunkSpace.VECTOR, bytes(SCOPE_BYTES), 0)) is None
    assert cache.lookup(ChunkRef(ChunkSpace.ANCHOR, scope, 0)) == b"other"


# --- snapshots ---


def accept_any(header: StateHeader) -> None:
    """Whatever model it is of."""


async def test_a_snapshot_is_what_its_peer_signed(tmp_path: Path) -> None:
    pair, state = Pair(tmp_path), state_of(7, seed=3)
    pair.donor.cache.put(state, pair.donor.cache.header(state))
    standing = Standing(round=7, digest=pair.donor.cache.digest(state))
    found, header = await pair.exchange.snapshot(PARTNER, standing, accept_any, ignore)
    assert (found.round, found.tokens, header.digest) == (7, state.tokens, standing.digest)
    np.testing.assert_array_equal(found.anchor, state.anchor)
    np.testing.assert_array_equal(found.momentum, state.momentum)


async def test_a_snapshot_of_another_digest_or_with_other_bytes_is_refused(tmp_path: Path) -> None:
    pair, state = Pair(tmp_path), state_of(7, seed=3)
    pair.donor.cache.put(state, pair.donor.cache.header(state))
    with pytest.raises(RemoteError, match="has another state than the one it said"):
        await pair.exchange.snapshot(PARTNER, Standing(round=7, digest=NO_HASH), accept_any, ignore)
    pair.donor.spoil = lambda header, data: flipped(data)
    standing = Standing(round=7, digest=pair.donor.cache.digest(state))
    with pytest.raises(NetworkError, match="is not the certified one"):
        await pair.exchange.snapshot(PARTNER, standing, accept_any, ignore)


async def test_a_snapshot_that_is_gone_or_of_another_model_is_not_begun(tmp_path: Path) -> None:
    def refuse(header: StateHeader) -> None:
        raise ConfigError("another model")

    pair, state = Pair(tmp_path), state_of(7, seed=3)
    with pytest.raises(NetworkError, match="does not hold its state of round 7 any more"):
        await pair.exchange.snapshot(PARTNER, Standing(round=7, digest=NO_HASH), accept_any, ignore)
    pair.donor.cache.put(state, pair.donor.cache.header(state))
    standing = Standing(round=7, digest=pair.donor.cache.digest(state))
    with pytest.raises(ConfigError, match="another model"):
        await pair.exchange.snapshot(PARTNER, standing, refuse, ignore)
    assert pair.world.chunks_from(PARTNER) == 0


async def test_a_snapshot_of_another_round_than_its_peer_named_is_refused(tmp_path: Path) -> None:
    """Whether to begin on it was decided by the round that it named."""
    pair, state = Pair(tmp_path), state_of(9, seed=3)
    pair.donor.cache.put(state, pair.donor.cache.header(state))

    async def answers_with_another(peer: PeerId, data: bytes) -> bytes:
        return await pair.world._ask(peer, canonical(GetHeader(round=9)))

    pair.exchange._ask = answers_with_another
    standing = Standing(round=7, digest=pair.donor.cache.digest(state))
    with pytest.raises(RemoteError, match="has a state of round 9, and said 7"):
        await pair.exchange.snapshot(PARTNER, standing, accept_any, ignore)
    assert pair.world.chunks_from(PARTNER) == 0


async def test_no_memory_is_taken_for_a_snapshot_of_a_size_that_is_not_accepted(tmp_path: Path) -> None:
    pair, chunks = Pair(tmp_path), 8000
    hashes = bytes(HASH_BYTES) * chunks
    header = StateHeader(
        term=Term(),
        round=7,
        tokens=0,
        numel=chunks * CHUNK_LIMIT_VALUES,  # a terabyte for two vectors
        chunk_values=CHUNK_LIMIT_VALUES,
        layout=bytes(HASH_BYTES),
        anchor=hashes,
        momentum=hashes,
    )

    async def answers_with_it(peer: PeerId, data: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        return canonical(HeaderAnswer(header=canonical(header)))

    def refuse(found: StateHeader) -> None:
        raise RemoteError(f"{found.numel} values are too many")

    pair.exchange._ask = answers_with_it
    with pytest.raises(RemoteError, match="values are too many"):
        await pair.exchange.snapshot(PARTNER, Standing(round=7, digest=header.digest), refuse, ignore)
