"""Worlds of donors for the tests of catching up, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from shoal.collectives.grid import Grid
from shoal.collectives.state import CertifiedState, header_of
from shoal.node.outcome import StateFetched
from shoal.node.state import chunk_requests as requests_module
from shoal.protocol.identity import PeerId
from tests.node.donors import World
from tests.node.ledger import GRID, Ledger

GOOD, BAD = PeerId("good"), PeerId("bad")


def ledger_of(rounds: int) -> Ledger:
    ledger = Ledger()
    if rounds:
        ledger.certify(rounds)
    return ledger


class Watch:
    """Remembers what was said of the chunks that came."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    async def __call__(self, fetched: StateFetched) -> None:
        self.seen.append((fetched.done_chunks, fetched.total_chunks))


def assert_state(state: CertifiedState, ledger: Ledger, round: int) -> None:
    want = ledger.states[round]
    assert state.round == round
    assert header_of(state, GRID).digest == header_of(want, GRID).digest
    assert state.anchor.tobytes() == want.anchor.tobytes()
    assert state.momentum.tobytes() == want.momentum.tobytes()
    assert (state.tokens, state.layout_hash, state.term) == (want.tokens, want.layout_hash, want.term)


async def advance(world: World, state: CertifiedState | None, peers: Sequence[PeerId]) -> CertifiedState:
    return await world.advance(state, world.ledger.chain, peers, Watch())


FINE = Grid(60_000, 1000)
"""Sixty chunks of each vector: enough for several windows."""
STATE_BYTES = 8 * FINE.numel
PEERS = tuple(PeerId(name) for name in ("one", "two", "three"))


def fine_world(folder: Path, rounds: int, *, grid: Grid = FINE, codec: str = "int8") -> World:
    ledger = Ledger(grid=grid, codec=codec)
    ledger.certify(rounds)
    world = World(folder, ledger)
    for peer in PEERS:
        world.donor(peer)
    return world


def assert_fine(state: CertifiedState, world: World, round: int) -> None:
    want = world.ledger.states[round]
    assert state.round == round
    assert header_of(state, world.ledger.grid).digest == world.ledger.chain.value(round).digest
    assert state.anchor.tobytes() == want.anchor.tobytes()
    assert state.momentum.tobytes() == want.momentum.tobytes()


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if chunks were megabytes: a donor is asked for four at first."""
    monkeypatch.setattr(requests_module, "WINDOW_FIRST_BYTES", 16_000)
