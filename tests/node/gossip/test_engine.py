"""The engine of the strategy `gossip`: what its user says before it has a state, and what it fetches and no longer."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import trio
import trio.testing

from shoal.collectives.codecs import F32
from shoal.collectives.memory import VectorPool
from shoal.collectives.state import CertifiedState
from shoal.node.gossip.engine import GossipEngine
from shoal.node.state.states import StateCache
from shoal.node.training.trainer_messages import Contribution
from shoal.protocol.gossip_messages import Offer, Standing, Withdraw
from shoal.protocol.identity import PeerId
from shoal.protocol.inputs import SetPaused, Tick
from shoal.protocol.messages import Message
from shoal.protocol.pairing import Phase
from tests.manifests import manifest_of
from tests.node.ledger import GRID, identity, state_of, vector

UNWINDING_S = 30.0


class TrainingClientStandIn:
    """A trainer that draws S(0). ordered: the rounds that it was to train."""

    layout_hash = b"L" * 32
    loss = 1.0

    def __init__(self) -> None:
        self.paused = False
        self.ordered: list[int] = []
        self.stands = trio.Event()
        self.trains = trio.Event()

    async def initial_state(self, vectors: VectorPool) -> CertifiedState:
        await trio.lowlevel.checkpoint()
        return state_of(0)

    def is_current(self, event: Contribution) -> bool:
        return True

    def pseudo_gradient(self, numel: int) -> F32:
        return vector(1, numel)

    async def snapshot(self, round: int, path: str) -> None:
        await trio.lowlevel.checkpoint()

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


class Links:
    """Links to some peers. sent: offers to them that nobody looked at yet."""

    def __init__(self, *peers: PeerId) -> None:
        self.peers = frozenset(peers)
        self._sent, self._offers = trio.open_memory_channel[tuple[PeerId, Offer]](math.inf)

    def linked(self) -> frozenset[PeerId]:
        return self.peers

    def broadcast(self, message: Message) -> None:
        """Nobody answers."""

    def send(self, peer: PeerId, message: Message) -> None:
        if isinstance(message, Offer):
            self._sent.send_nowait((peer, message))

    async def offered(self) -> tuple[PeerId, Offer]:
        return await self._offers.receive()


class Partners:
    """Vectors that never come. A fetch that is ended takes until `unwound` to be over, as one that decodes does."""

    def __init__(self) -> None:
        self.cache = SimpleNamespace(put=lambda made: None)
        self.began: list[PeerId] = []
        self.ended: list[PeerId] = []
        self.unwound = trio.Event()
        self._changed = trio.Event()

    async def vector(self, peer: PeerId, *_: object) -> None:
        self._note(self.began, peer)
        try:
            await trio.sleep_forever()
        finally:
            self._note(self.ended, peer)
            with trio.move_on_after(UNWINDING_S, shield=True):
                await self.unwound.wait()

    async def snapshot(self, peer: PeerId, *_: object) -> None:
        self._note(self.began, peer)
        try:
            await trio.sleep_forever()
        finally:
            self._note(self.ended, peer)

    def _note(self, what: list[PeerId], peer: PeerId) -> None:
        what.append(peer)
        self._changed.set()
        self._changed = trio.Event()

    async def until(self, *, began: list[PeerId] | None = None, ended: list[PeerId] | None = None) -> None:
        while began not in (None, self.began) or ended not in (None, self.ended):
            await self._changed.wait()


def contribution(round: int) -> Contribution:
    return Contribution(number=round, round=round, tokens=10, steps=1, loss=1.0, seconds=1.0, tokens_per_s=10.0)


def joining(
    folder: Path,
    training_client: TrainingClientStandIn,
    links: Links | None = None,
    partners: Partners | None = None,
) -> GossipEngine:
    """The engine of a founder who hears nobody, and draws its state once it has waited for the other."""
    for part in ("state", "finals"):
        (folder / part).mkdir()
    me, other = identity(1), identity(2)
    parts = SimpleNamespace(
        config=SimpleNamespace(
            manifest=manifest_of(
                [me.peer_id, other.peer_id],
                {"sync": {"inner_steps": 1, "strategy": "gossip"}, "round": {"grace_s": 0.1}},
            ),
            rounds=None,
        ),
        identity=me,
        store=SimpleNamespace(folder=folder),
        cache=StateCache(folder, GRID.chunk_values),
        links=links or Links(),
        training_client=training_client,
        log=SimpleNamespace(
            began=lambda round, members: None, contributed=lambda event, tokens: None, stepped=lambda round, **_: None
        ),
        holds=SimpleNamespace(at=nothing),
        audit=SimpleNamespace(
            began=lambda state: None, vector=lambda made, delta: None, stepped=lambda *_, partner, offered: None
        ),
        traffic_bytes=lambda: 0,
        on_progress=lambda progress: None,
    )
    layouts = SimpleNamespace(accept=None, accept_model_of=lambda peer: None, alike=frozenset)
    return GossipEngine(parts, partners or Partners(), layouts)  # type: ignore[arg-type]


@pytest.mark.virtual_time
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


@pytest.mark.parametrize("asked", ["before", "meanwhile"])
async def test_who_is_to_leave_while_a_snapshot_comes_leaves_at_once_and_has_no_state(
    tmp_path: Path, asked: str
) -> None:
    partners = Partners()
    engine = joining(tmp_path, TrainingClientStandIn(), partners=partners)
    other = identity(2).peer_id
    with trio.fail_after(10.0):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: engine.run(numel=GRID.numel))
            await trio.testing.wait_all_tasks_blocked()
            engine.hear(other, Standing(round=4, digest=bytes(32)))
            if asked == "before":
                engine.ask_to_leave()
            engine.put(Tick())
            if asked == "meanwhile":
                await partners.until(began=[other])
                engine.ask_to_leave()
            await engine.left.wait()
    assert partners.began == partners.ended == ([other] if asked == "meanwhile" else [])
    assert (engine.state_round, engine.machine) == (0, None)


async def test_what_is_fetched_ends_when_it_is_wanted_no_more_and_nothing_begins_that_is_not(tmp_path: Path) -> None:
    training_client, partners = TrainingClientStandIn(), Partners()
    links = Links(identity(2).peer_id, identity(4).peer_id)
    engine = joining(tmp_path, training_client, links, partners)
    engine.alive(links.peers)
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: engine.run(numel=GRID.numel))
            await training_client.trains.wait()
            engine.put(contribution(1))
            first, mine = await links.offered()
            assert engine.machine is not None
            (second,) = links.peers - {first}

            engine.hear(first, mine)
            await partners.until(began=[first])
            engine.hear(first, Withdraw(round=1))
            await partners.until(ended=[first])
            assert await links.offered() == (second, mine)

            engine.hear(second, mine)
            await trio.testing.wait_all_tasks_blocked()
            assert (engine.machine.phase, partners.began) == (Phase.PAIRED, [first]), "the first is not over yet"
            training_client.trains = trio.Event()
            engine.hear(second, Withdraw(round=1))
            await training_client.trains.wait()  # after a step alone
            partners.unwound.set()
            await trio.testing.wait_all_tasks_blocked()
            assert partners.began == [first]

            engine.hear(second, msgspec.structs.replace(mine, round=2))
            await trio.testing.wait_all_tasks_blocked()  # it is held
            engine.put(contribution(2))
            await partners.until(began=[first, second])
            nursery.cancel_scope.cancel()
    assert partners.ended == [first, second]
