"""The engine of the strategy `gossip`: what its user says before it has a state holds afterwards."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
import trio.testing

from shoal.collectives.memory import VectorPool
from shoal.collectives.state import CertifiedState
from shoal.node.gossip.engine import GossipEngine
from shoal.node.state.states import StateCache
from shoal.protocol.inputs import SetPaused
from tests.manifests import manifest_of
from tests.node.ledger import GRID, identity, state_of

pytestmark = pytest.mark.virtual_time


class TrainingClientStandIn:
    """A trainer that draws S(0). ordered: the rounds that it was to train."""

    layout_hash = b"L" * 32

    def __init__(self) -> None:
        self.paused = False
        self.ordered: list[int] = []
        self.stands = trio.Event()
        self.trains = trio.Event()

    async def initial_state(self, vectors: VectorPool) -> CertifiedState:
        await trio.lowlevel.checkpoint()
        return state_of(0)

    async def stand_on(self, *_: object, taken: int) -> None:
        await trio.lowlevel.checkpoint()
        self.stands.set()

    async def pause(self) -> None:
        await trio.lowlevel.checkpoint()
        self.paused = True

    async def resume(self) -> None:
        await trio.lowlevel.checkpoint()
        self.paused = False

    async def train_round(self, round: int, *_: object) -> None:
        await trio.lowlevel.checkpoint()
        self.ordered.append(round)
        self.trains.set()


async def nothing(*_: object) -> None:
    await trio.lowlevel.checkpoint()


def joining(folder: Path, training_client: TrainingClientStandIn) -> GossipEngine:
    """The engine of a founder who hears nobody, and draws its state once it has waited for the other."""
    for part in ("state", "finals"):
        (folder / part).mkdir()
    me, other = identity(1), identity(2)
    parts = SimpleNamespace(
        config=SimpleNamespace(
            manifest=manifest_of([me.peer_id, other.peer_id], {"sync": {"inner_steps": 1, "strategy": "gossip"}}),
            rounds=None,
        ),
        identity=me,
        store=SimpleNamespace(folder=folder),
        cache=StateCache(folder, GRID.chunk_values),
        links=SimpleNamespace(linked=frozenset, broadcast=lambda message: None),
        training_client=training_client,
        log=SimpleNamespace(began=lambda round, members: None),
        holds=SimpleNamespace(at=nothing),
        audit=SimpleNamespace(began=lambda state: None),
        on_progress=lambda progress: None,
    )
    layouts = SimpleNamespace(accept=None, accept_model_of=lambda peer: None, alike=frozenset)
    return GossipEngine(parts, SimpleNamespace(), layouts)  # type: ignore[arg-type]


async def test_who_is_paused_before_it_has_a_state_trains_nothing_until_it_is_to_go_on(tmp_path: Path) -> None:
    training_client = TrainingClientStandIn()
    engine = joining(tmp_path, training_client)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: engine.run(numel=GRID.numel))
        engine.put(SetPaused(True))
        await training_client.stands.wait()
        await trio.testing.wait_all_tasks_blocked()
        assert (engine.phase, training_client.ordered) == ("paused", [])

        engine.put(SetPaused(False))
        await training_client.trains.wait()
        assert (engine.phase, training_client.ordered) == ("training", [1])
        nursery.cancel_scope.cancel()
