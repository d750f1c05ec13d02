"""States of three vectors, those of an outer AdamW, wherever a state is kept, sent, joined and checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import trio

from shoal.collectives.outer import OuterSettings
from shoal.collectives.state import ADAMW_KINDS, CertifiedState, header_of
from shoal.node.outcome import StateFetched
from shoal.node.state.catchup import replay_limit_rounds
from shoal.node.state.checkpoint_check import check_checkpoint
from shoal.node.state.state_files import kinds_in, read_state, write_state
from shoal.node.state.states import StateCache
from shoal.node.state.tensor_files import TensorFile
from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest import InnerSection
from shoal.protocol.peering import HeaderAnswer
from shoal.protocol.wire import canonical
from shoal.swarm.lanes.chunks import ChunkRef, ChunkSpace
from tests.node.checkpoint_lab import LAYOUT, CheckpointLedger
from tests.node.donors import World
from tests.node.folders import cache_folder
from tests.node.ledger import GRID, Ledger, state_of
from tests.node.transitions import transition_of

OUTER = OuterSettings(adamw=InnerSection(lr=0.01))
GOOD = PeerId("good")


pytestmark = pytest.mark.usefixtures("no_threads")


def ledger_of(rounds: int) -> Ledger:
    ledger = Ledger(outer=OUTER)
    if rounds:
        ledger.certify(rounds)
    return ledger


def assert_same(state: CertifiedState, ledger: Ledger, round: int) -> None:
    want = ledger.states[round]
    assert (state.round, state.tokens, state.kinds) == (round, want.tokens, ADAMW_KINDS)
    for kind in ADAMW_KINDS:
        assert state.vector(kind).tobytes() == want.vector(kind).tobytes(), kind


async def _ignore(fetched: StateFetched) -> None:
    await trio.lowlevel.checkpoint()


async def advance(world: World, state: CertifiedState | None, *peers: PeerId) -> CertifiedState:
    return await world.advance(state, world.ledger.chain, peers, _ignore)


# -- fetching ------------------------------------------------------------------------------------------------


@pytest.mark.virtual_time
async def test_joiner_fetches_all_three_vectors(tmp_path: Path) -> None:
    world = World(tmp_path, ledger_of(3))
    world.donor(GOOD)
    assert_same(await advance(world, None, GOOD), world.ledger, 3)
    assert world.chunks_from(GOOD) == 3 * GRID.chunks


@pytest.mark.virtual_time
async def test_initial_state_without_a_second_moment_is_no_state_of_this_swarm(tmp_path: Path) -> None:
    """Nobody certified S(0), so that the founder's word would be enough for any other header."""
    world = World(tmp_path, ledger_of(0))
    founder = world.ledger.peers[0]
    two = header_of(state_of(0), GRID)
    world.donor(founder).answer = lambda request: HeaderAnswer(header=canonical(two))
    with pytest.raises(NetworkError, match="no peer has the state of round 0"):
        await advance(world, None, founder)
    assert world.frames == []
    world.donor(GOOD)


@pytest.mark.virtual_time
async def test_member_that_missed_a_round_replays_it(tmp_path: Path) -> None:
    world = World(tmp_path, ledger_of(3))
    world.donor(GOOD)
    assert_same(await advance(world, world.ledger.states[1], GOOD), world.ledger, 3)
    assert world.chunks_from(GOOD) == 2 * GRID.chunks  # the finals of two rounds


def test_a_state_of_three_vectors_pays_for_more_rounds() -> None:
    two, three = (replay_limit_rounds("fp32", 10_000_000, 262_144, vectors=vectors) for vectors in (2, 3))
    assert (two, three) == (1, 2)


# -- holding and saving --------------------------------------------------------------------------------------


def cache_in(folder: Path) -> StateCache:
    return StateCache(cache_folder(folder), GRID.chunk_values, kinds=ADAMW_KINDS)


def test_shelf_serves_saves_and_loads_the_second_moment(tmp_path: Path) -> None:
    cache, ledger = cache_in(tmp_path), ledger_of(1)
    state, header = ledger.states[1], ledger.header(1)
    assert state.second_moment is not None
    cache.put(state, header)
    scope = header.digest[:8]
    for chunk in range(GRID.chunks):
        data = cache.lookup(ChunkRef(ChunkSpace.SECOND_MOMENT, scope, chunk))
        assert data == state.second_moment[slice(*GRID.span(chunk))].tobytes()
    assert cache.lookup(ChunkRef(ChunkSpace.SECOND_MOMENT, scope, GRID.chunks)) is None
    assert cache.lookup(ChunkRef(ChunkSpace.VECTOR, scope, 0)) is None
    cache.save_state(state)
    loaded = cache.load_state(1)
    assert loaded is not None
    assert_same(loaded, ledger, 1)
    assert header_of(loaded, GRID).digest == ledger.chain.value(1).digest


def test_shelf_of_two_vectors_has_no_second_moment_to_serve(tmp_path: Path) -> None:
    cache, state = StateCache(cache_folder(tmp_path), GRID.chunk_values), state_of(1)
    cache.put(state, header := header_of(state, GRID))
    assert cache.lookup(ChunkRef(ChunkSpace.MOMENTUM, header.digest[:8], 0)) is not None
    assert cache.lookup(ChunkRef(ChunkSpace.SECOND_MOMENT, header.digest[:8], 0)) is None


def test_file_names_its_vectors(tmp_path: Path) -> None:
    for kinds in (ADAMW_KINDS, ADAMW_KINDS[:2]):
        write_state(path := tmp_path / f"{len(kinds)}.safetensors", state := state_of(1, kinds=kinds))
        assert kinds_in(TensorFile(path)) == kinds == read_state(path).kinds
        assert TensorFile(path).names == tuple(kinds)
        assert path.stat().st_size < len(kinds) * 4 * GRID.numel + 1000
        assert read_state(path).vector(kinds[-1]).tobytes() == state.vector(kinds[-1]).tobytes()


@pytest.mark.virtual_time
async def test_candidates_make_the_certified_state_in_memory_that_is_used_again(tmp_path: Path) -> None:
    cache, ledger = cache_in(tmp_path), ledger_of(3)
    candidates, state = transition_of(cache, OUTER), ledger.states[0]
    for round in (1, 2, 3):
        candidate = await candidates.candidate(state, ledger.finals[round], 0.0)
        assert candidate.digest == ledger.chain.value(round).digest
        state = await candidates.take(candidate)
        assert_same(state, ledger, round)
        candidates.drop()


# -- checkpoints ---------------------------------------------------------------------------------------------


@dataclass
class AdamWLedger(CheckpointLedger):
    def __post_init__(self) -> None:
        self.states = [state_of(0, layout=LAYOUT.digest, kinds=ADAMW_KINDS)]
        super().__post_init__()


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[AdamWLedger, Path]:
    ledger = AdamWLedger(outer=OUTER)
    ledger.certify(3)
    return ledger, ledger.checkpoint(tmp_path, 2)


@pytest.mark.parametrize(("place", "bad"), [(39_999, "anchor/2"), (40_000, "momentum/0"), (80_000, "second_moment/0")])
def test_changed_value_is_found_by_its_chunk(checkpoint: tuple[AdamWLedger, Path], place: int, bad: str) -> None:
    path = checkpoint[1] / "state.safetensors"
    data = bytearray(path.read_bytes())
    data[TensorFile(path).data_offset + place] ^= 1
    path.write_bytes(data)
    report = check_checkpoint(checkpoint[1])
    assert (report.ok, report.chunks, report.bad_chunks) == (False, 9, (bad,))


def test_state_without_its_second_moment_is_not_the_certified_one(checkpoint: tuple[AdamWLedger, Path]) -> None:
    ledger, folder = checkpoint
    two = replace(ledger.states[2], second_moment=None)
    write_state(folder / "state.safetensors", two, header_of(two, GRID))
    report = check_checkpoint(folder)
    assert (report.ok, report.bad_chunks) == (False, ())
    assert "is not the state that round 2 certified" in str(report.error)
