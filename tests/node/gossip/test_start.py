"""Where a node of the strategy `gossip` begins: on its own disk, on a peer's snapshot, or on what the seed draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import trio

from shoal.collectives.memory import VectorPool
from shoal.collectives.state import CertifiedState, StateHeader, frozen
from shoal.node.gossip.start import (
    ASK_PERIOD_S,
    FOUNDERS_S,
    HEAR_S,
    HEARD_LIMIT_S,
    SNAPSHOT_DEADLINE_S,
    GossipStart,
)
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
"""The other founders."""
C, D, E = PeerId("c"), PeerId("d"), PeerId("e")
LAYOUT = b"L" * 32
TIMEOUT_S = 20.0

pytestmark = pytest.mark.virtual_time


class Peers:
    """Snapshots as peers have them; those in `gone` do not bring theirs, those that `hang` never end."""

    def __init__(self, cache: StateCache) -> None:
        self.cache = cache
        self.states: dict[PeerId, CertifiedState] = {}
        self.gone: set[PeerId] = set()
        self.hang: set[PeerId] = set()

    async def snapshot(
        self, peer: PeerId, standing: Standing, accepts: Callable[[StateHeader], None], on_progress: OnProgress
    ) -> tuple[CertifiedState, StateHeader]:
        await on_progress(StateFetched(done_chunks=0, total_chunks=1, done_bytes=0, total_bytes=4))
        if peer in self.gone:
            raise NetworkError("gone")
        if peer in self.hang:
            await trio.sleep_forever()
        header = self.cache.header(self.states[peer])
        accepts(header)
        return self.states[peer], header


class TrainingClientStandIn:
    """A trainer that draws S(0)."""

    layout_hash = LAYOUT

    def __init__(self) -> None:
        self.drawn = 0
        self.is_away = False

    async def initial_state(self, vectors: VectorPool) -> CertifiedState:
        await trio.lowlevel.checkpoint()
        if self.is_away:
            raise NetworkError("it wrote no initial parameters")
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
            numel=GRID.numel,
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
        said = Standing(round=0 if state is None else state.round, digest=digest)
        self.start.note(peer, said, trio.current_time())

    def names(self, peer: PeerId, round: int) -> None:
        """A peer says that its state is of that round, and has one."""
        self.says(peer, replace(state_of(round % 1000, seed=round % 1000), round=round))

    async def begins_on(self) -> PeerId | None:
        """The peer whose state this node begins on, once those that it waits for had their time."""
        await trio.sleep(FOUNDERS_S)
        state = await self.attempt()
        return next((peer for peer, one in self.peers.states.items() if one is state), None)

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


async def test_a_trainer_that_is_away_is_asked_again_to_draw(tmp_path: Path) -> None:
    one = Beginner(tmp_path)
    for peer in (A, B):
        one.says(peer, None)
    one.training_client.is_away = True
    assert await one.attempt() is None
    one.training_client.is_away = False
    assert await one.attempt() is not None


async def test_a_founder_too_begins_on_another_that_has_trained(tmp_path: Path) -> None:
    one = Beginner(tmp_path)
    one.says(A, None)
    one.names(B, 9)
    state = await one.attempt()
    assert state is one.peers.states[B]
    assert (one.training_client.drawn, one.cache.newest_round()) == (0, 9)


@pytest.mark.parametrize("lie", [1 << 60, 1])
async def test_who_names_a_round_far_from_the_others_is_passed_over(tmp_path: Path, lie: int) -> None:
    one = Beginner(tmp_path, founder=False)
    one.names(C, lie)
    for peer, round in ((D, 97), (E, 101)):
        one.names(peer, round)
    assert await one.begins_on() == {1: D, 1 << 60: E}[lie]
    for peer in (D, E):
        one.peers.gone.add(peer)
        assert await one.begins_on() != C
    assert one.cache.newest_round() <= 101


async def test_founders_count_and_strangers_only_where_none_has_trained_and_not_all_answer(tmp_path: Path) -> None:
    one = Beginner(tmp_path, founder=False)
    for peer in (C, D, E):
        one.names(peer, 700)
    assert await one.attempt() is None, "founders have their time to answer"
    one.names(A, 20)
    assert await one.begins_on() == A
    for peer in (A, B):
        one.says(peer, None)
    assert await one.begins_on() is None, "nobody can have trained before founders did"
    await trio.sleep(HEARD_LIMIT_S)
    for peer in (C, D):
        one.names(peer, 700)
    assert await one.begins_on() == C


async def test_the_only_one_that_is_there_is_begun_on_once_others_had_their_time(tmp_path: Path) -> None:
    one = Beginner(tmp_path, founder=False)
    one.names(C, 5)
    assert await one.attempt() is None
    assert await one.begins_on() == C


async def test_a_founder_that_answers_after_a_stranger_is_begun_on(tmp_path: Path) -> None:
    one = Beginner(tmp_path, founder=False)
    one.names(C, 5)
    await trio.sleep(FOUNDERS_S - 0.1)
    assert await one.attempt() is None
    one.names(A, 700)
    await trio.sleep(0.1)
    assert await one.attempt() is one.peers.states[A]


async def test_founders_that_have_trained_are_waited_for_less_long(tmp_path: Path) -> None:
    one = Beginner(tmp_path, founder=False)
    one.names(A, 700)
    await trio.sleep(HEAR_S)
    assert await one.attempt() is one.peers.states[A]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
async def test_weights_that_are_not_finite_are_nobodys_start(tmp_path: Path, value: float) -> None:
    one, whole = Beginner(tmp_path, founder=False), state_of(5)
    anchor = whole.anchor.copy()
    anchor[-1] = value
    one.says(A, replace(whole, anchor=frozen(anchor)))
    one.names(B, 6)
    assert await one.begins_on() == B
    one.peers.gone = {B}
    assert await one.begins_on() is None


async def test_state_of_another_size_under_the_layout_of_this_model_is_nobodys_start(tmp_path: Path) -> None:
    one, whole = Beginner(tmp_path, founder=False), state_of(5)
    longer = frozen(np.zeros(GRID.numel + 1, np.float32))
    one.says(A, replace(whole, anchor=longer, momentum=longer))
    one.names(B, 6)
    assert await one.begins_on() == B
    one.peers.gone = {B}
    assert await one.begins_on() is None


async def test_a_peer_that_does_not_bring_its_snapshot_is_passed_over_and_asked_again_later(tmp_path: Path) -> None:
    one = Beginner(tmp_path, founder=False)
    one.says(A, state_of(4, seed=4))
    one.says(B, state_of(9, seed=9))
    one.peers.gone = {A, B}
    assert await one.attempt() is None
    one.peers.gone = set()
    assert await one.attempt() is None, "before they are asked again"
    assert await one.start.attempt(trio.current_time() + 100 * TIMEOUT_S) is None  # no founder draws nothing
    now = trio.current_time()
    assert [one.start.ask_due(now), one.start.ask_due(now), one.start.ask_due(now + ASK_PERIOD_S)] == [
        True,
        False,
        True,
    ]
    one.peers.gone = {A}
    one.says(A, state_of(5, seed=5))
    one.says(B, state_of(9, seed=9))
    assert await one.attempt() is one.peers.states[B]


async def test_a_peer_whose_snapshot_never_ends_is_given_up_for_another(tmp_path: Path) -> None:
    one, began = Beginner(tmp_path, founder=False), trio.current_time()
    one.says(A, state_of(4, seed=4))
    one.says(B, state_of(9, seed=9))
    one.peers.hang = {A}
    with trio.fail_after(2 * SNAPSHOT_DEADLINE_S):
        assert await one.attempt() is one.peers.states[B]
    assert trio.current_time() - began >= SNAPSHOT_DEADLINE_S


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
        await one.begins_on()
    stranger = Beginner(tmp_path, founder=False)
    stranger.says(C, other)
    stranger.says(D, state_of(3))
    assert await stranger.begins_on() == D, "anybody may claim to have another model"
    one.cache.save_state(other)
    with pytest.raises(ConfigError, match="install the same version"):
        await one.start.from_disk()
