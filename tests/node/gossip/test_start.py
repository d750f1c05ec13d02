"""Where a node of the strategy `gossip` begins: on its own disk, on a peer's snapshot, or on what the seed draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from shoal.collectives.memory import VectorPool
from shoal.collectives.state import CertifiedState, StateHeader
from shoal.node.gossip.start import ASK_PERIOD_S, GossipStart
from shoal.node.outcome import StateFetched
from shoal.node.state.fetching import OnProgress
from shoal.node.state.states import StateCache
from shoal.protocol.errors import ConfigError, NetworkError
from shoal.protocol.gossip_messages import Standing
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import NO_HASH
from tests.node.donors import flipped
from tests.node.ledger import GRID, state_of

A, B = PeerId("a"), PeerId("b")
LAYOUT = b"L" * 32
TIMEOUT_S = 20.0

pytestmark = pytest.mark.virtual_time


class Peers:
    """Snapshots as peers have them; those in `gone` do not bring theirs."""

    def __init__(self, cache: StateCache) -> None:
        self.cache = cache
        self.states: dict[PeerId, CertifiedState] = {}
        self.gone: set[PeerId] = set()

    async def snapshot(
        self, peer: PeerId, standing: Standing, accepts: Callable[[StateHeader], None], on_progress: OnProgress
    ) -> tuple[CertifiedState, StateHeader]:
        await on_progress(StateFetched(done_chunks=0, total_chunks=1, done_bytes=0, total_bytes=4))
        if peer in self.gone:
            raise NetworkError("gone")
        header = self.cache.header(self.states[peer])
        accepts(header)
        return self.states[peer], header


class TrainingClientStandIn:
    """A trainer that draws S(0)."""

    layout_hash = LAYOUT

    def __init__(self) -> None:
        self.drawn = 0

    async def initial_state(self, vectors: VectorPool) -> CertifiedState:
        await trio.lowlevel.checkpoint()
        self.drawn += 1
        return state_of(0)


class Beginner:
    """One node at its start, over the same folder each time."""

    def __init__(self, folder: Path, *, founder: bool = True) -> None:
        for part in ("state", "finals"):
            (folder / part).mkdir(exist_ok=True)
        self.cache = StateCache(folder, GRID.chunk_values)
        self.peers, self.training_client = Peers(self.cache), TrainingClientStandIn()
        self.start = GossipStart(
            cache=self.cache,
            exchange=self.peers,  # type: ignore[arg-type]
            training_client=self.training_client,  # type: ignore[arg-type]
            founder=founder,
            others=(A, B),
            accepts=self.accepts,
            timeout_s=TIMEOUT_S,
            on_progress=lambda progress: None,
        )

    def accepts(self, layout: bytes) -> None:
        if layout != LAYOUT:
            raise ConfigError("parameter 'w' has another shape")

    def says(self, peer: PeerId, state: CertifiedState | None) -> None:
        if state is not None:
            self.peers.states[peer] = state
        digest = NO_HASH if state is None else self.cache.digest(state)
        self.start.standings[peer] = Standing(round=0 if state is None else state.round, digest=digest)

    async def attempt(self) -> CertifiedState | None:
        return await self.start.attempt(trio.current_time())


async def test_a_founder_draws_once_all_others_were_heard_and_nobody_has_trained(tmp_path: Path) -> None:
    one = Beginner(tmp_path)
    one.says(A, None)
    assert await one.attempt() is None
    one.says(B, state_of(0))
    state = await one.attempt()
    assert state is not None
    assert (state.round, one.training_client.drawn, one.cache.newest_round()) == (0, 1, 0)


async def test_a_founder_waits_for_the_others_no_longer_than_its_patience(tmp_path: Path) -> None:
    one, began = Beginner(tmp_path), trio.current_time()
    assert await one.start.attempt(began + TIMEOUT_S - 0.1) is None
    assert await one.start.attempt(began + TIMEOUT_S) is not None


async def test_who_is_furthest_is_begun_on_though_this_node_is_a_founder(tmp_path: Path) -> None:
    one = Beginner(tmp_path)
    one.says(A, state_of(4, seed=4))
    one.says(B, state_of(9, seed=9))
    state = await one.attempt()
    assert state is one.peers.states[B]
    assert (one.training_client.drawn, one.cache.newest_round()) == (0, 9)


async def test_a_peer_that_does_not_bring_its_snapshot_is_passed_over_and_asked_again_later(tmp_path: Path) -> None:
    one = Beginner(tmp_path, founder=False)
    one.says(A, state_of(4, seed=4))
    one.says(B, state_of(9, seed=9))
    one.peers.gone = {A, B}
    assert await one.attempt() is None
    assert one.start.standings == {}
    assert await one.start.attempt(trio.current_time() + 100 * TIMEOUT_S) is None  # no founder draws nothing
    now = trio.current_time()
    assert [one.start.ask_due(now), one.start.ask_due(now), one.start.ask_due(now + ASK_PERIOD_S)] == [
        True,
        False,
        True,
    ]
    one.peers.gone = {B}
    one.says(A, state_of(5, seed=5))
    assert await one.attempt() is one.peers.states[A]


async def test_the_newest_whole_state_on_disk_is_begun_on(tmp_path: Path) -> None:
    one = Beginner(tmp_path)
    assert await one.start.from_disk() is None
    for round in (6, 7):
        one.cache.save_state(state_of(round, seed=round))
    found = await Beginner(tmp_path).start.from_disk()
    assert found is not None
    assert found.round == 7
    path = one.cache.state_file(7)
    path.write_bytes(flipped(path.read_bytes(), path.stat().st_size - 5))
    found = await Beginner(tmp_path).start.from_disk()
    assert found is not None
    assert found.round == 6


async def test_a_state_of_another_model_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    one = Beginner(tmp_path)
    other = replace(state_of(3), layout_hash=b"O" * 32)
    one.says(A, other)
    with pytest.raises(ConfigError, match="'w' has another shape"):
        await one.attempt()
    one.cache.save_state(other)
    with pytest.raises(ConfigError, match="install the same version"):
        await one.start.from_disk()
