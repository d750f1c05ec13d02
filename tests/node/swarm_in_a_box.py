"""A swarm in a box: real engines with their real stores on disks that lose power, in one thread, on a virtual clock.

    real        Engine, Store, Custody, StateShelf, CatchUp, Librarian, Resumption, TrainingDesk, Reduction, signatures
    stand-ins   links and lanes (calls, with delay), trainers (`box_trainer`), disks (`simulated_disk`), time

A thread of trio's would let an autojumping clock run ahead while it works, and make of one seed many courses of events:
so what the product gives to a thread is done in place, after a delay in which others go on. Everything that happens is
then a function of the seed. What the links let out is judged against the disk at that very moment (`box_witness`).
"""

from __future__ import annotations

import heapq
import itertools
import random
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from shoal.collectives.codecs import F32
from shoal.collectives.contribution import EncodedContribution
from shoal.collectives.finals import Finals
from shoal.collectives.outer import OuterSettings, advance
from shoal.collectives.reference import reference
from shoal.collectives.state import CertifiedState
from shoal.node.audit import AuditTrail
from shoal.node.config import NodeConfig
from shoal.node.daemon import stored_chain
from shoal.node.holds import Holds
from shoal.node.outcome import Progress
from shoal.node.reporting.round_log import RoundLog
from shoal.node.rounds import engine as engine_module
from shoal.node.rounds.engine import Engine
from shoal.node.rounds.engine_parts import EngineParts
from shoal.node.rounds.inbox import Reduced
from shoal.node.state import store as store_module
from shoal.node.state.catchup import CatchUp
from shoal.node.state.checkpoints import CheckpointParts, Checkpoints
from shoal.node.state.custody import Custody, CustodyParts
from shoal.node.state.earlier_states import EarlierStates
from shoal.node.state.librarian import Librarian
from shoal.node.state.resumption import Resumption
from shoal.node.state.states import StateShelf
from shoal.node.state.store import Store
from shoal.node.training.trainer import TrainerEvent
from shoal.node.training.training import TrainingDesk
from shoal.protocol.errors import NetworkError, RemoteError, StorageError
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest import Manifest, validate_manifest
from shoal.protocol.messages import Message, Value
from shoal.protocol.peering import FetchRequest
from shoal.protocol.wire import canonical, decode
from shoal.swarm.lanes.chunks import ChunkExchange
from shoal.swarm.lanes.frame import BULK_KINDS, FrameHeader
from shoal.swarm.lanes.moved import Moved
from tests.node.box_reduce import BoxReduce
from tests.node.box_trainer import BoxTrainer
from tests.node.box_witness import Witness
from tests.node.ledger import identity
from tests.node.simulated_disk import Disk, Disks, PowerCut, Survival

NUMEL = 2 * 4096 + 512
"""Three chunks, the last one ragged."""
LATENCY_S = (0.002, 0.02)
WORK_S = (0.0, 0.004)
"""How long what a thread would do takes."""
NOTICE_S = 0.2
"""Until others notice that a node is gone, or there."""
LOG_LIMIT_BYTES = 2048
"""Past which agreement logs are rewritten: every round or two."""


class Net:
    """Calls that are due later; between two lives in the order in which they were made, where that matters."""

    def __init__(self, box: Box) -> None:
        self._box = box
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._changed = trio.Event()
        self._last: dict[tuple[int, PeerId], float] = {}
        self.slow: dict[tuple[PeerId, PeerId], float] = {}
        """Seconds that messages and frames between a sender and a receiver take more."""

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Make a call so much later."""
        self.at(trio.current_time() + seconds, call)

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Make a call at that time."""
        heapq.heappush(self._due, (when, next(self._numbers), call))
        self._changed.set()

    def carry(self, sender: Life, to: PeerId, arrive: Callable[[], None], *, ordered: bool = True) -> None:
        """Something is on its way from a life to a node, whoever lives there when it arrives."""
        when = trio.current_time() + self._box.rng.uniform(*LATENCY_S) + self.slow.get((sender.peer, to), 0.0)
        if ordered:
            key = (id(sender), to)
            when = self._last[key] = max(when, self._last.get(key, 0.0))
        self.at(when, arrive)

    def hasten(self) -> None:
        """What is slow no longer holds up what is said after it."""
        self.slow.clear()
        self._last.clear()

    async def run(self) -> None:
        """Make the calls, until cancelled."""
        while True:
            if self._due and self._due[0][0] <= trio.current_time():
                heapq.heappop(self._due)[2]()
                continue
            self._changed = trio.Event()
            with trio.move_on_at(self._due[0][0] if self._due else float("inf")):
                await self._changed.wait()


class BoxLinks:
    """A life's links: whom it is linked with is the box's to say."""

    def __init__(self, life: Life) -> None:
        self._life = life

    def linked(self) -> frozenset[PeerId]:
        """The peers that messages can be sent to."""
        return frozenset(other.peer for other in self._life.box.lives_linked_to(self._life))

    def send(self, peer: PeerId, message: Message) -> None:
        """Let a message out to one peer."""
        self._let_out(message, [peer])

    def broadcast(self, message: Message) -> None:
        """Let a message out to everyone, be it nobody."""
        self._let_out(message, sorted(self.linked()))

    def _let_out(self, message: Message, peers: Sequence[PeerId]) -> None:
        life = self._life
        if life.disk.dead:
            return
        life.witness.let_out(message, life.disk)
        life.box.let_out(life, message)
        for peer in peers:
            life.box.net.carry(life, peer, partial(self._arrive, peer, message))

    def _arrive(self, peer: PeerId, message: Message) -> None:
        receiver = self._life.box.life_of(peer)
        if receiver is not None and self._life.peer in receiver.links.linked():
            receiver.engine.hear(self._life.peer, message)

    async def drain(self, *, deadline_s: float) -> None:
        """Nothing is queued here."""
        await trio.lowlevel.checkpoint()


class Life:
    """One process of a node, over the disk that its last one left."""

    def __init__(self, box: Box, number: int, disk: Disk) -> None:
        self.box = box
        self.number = number
        self.identity = identity(number + 1)
        self.peer = self.identity.peer_id
        self.disk = disk
        self.witness = box.witnesses[number]
        self.links = BoxLinks(self)
        self.up = False
        self.over = trio.Event()
        self.ended_by = ""
        self.told: list[Progress] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.scope = trio.CancelScope()

    # -- its parts -------------------------------------------------------------------------------------------

    def build(self, store: Store) -> None:
        """As the daemon does."""
        manifest, folder = self.box.manifest, store.folder
        outer = OuterSettings.of(manifest)
        config = NodeConfig(manifest=manifest, data_dir=folder, rollback="always", checkpoint_every=0)
        events = SimpleNamespace(write=lambda event, **fields: self.events.append((event, fields)))
        log, holds = RoundLog(events), Holds((), events)  # type: ignore[arg-type]
        self.chain = stored_chain(store, manifest)
        self.shelf = StateShelf(folder, manifest.round.chunk_values, clock=trio.current_time)
        self.trainer = BoxTrainer(NUMEL, tell=self._trainer_told, next_place=self.box.next_place)
        self.box.adjust_trainer(self)
        self.exchange = ChunkExchange(post=self._post_chunk, lookup=self.shelf.lookup)
        lanes: Any = SimpleNamespace(ensure=self._ensure_lane, moved=lambda peer: Moved())
        self.catchup = CatchUp(ask=self._ask, lanes=lanes, chunks=self.exchange, shelf=self.shelf, outer=outer)
        self.desk = TrainingDesk(self.trainer, seed=0, inner_steps=1)  # type: ignore[arg-type]
        links: Any = self.links
        self.custody = Custody(
            CustodyParts(
                store=store,
                chain=self.chain,
                shelf=self.shelf,
                catchup=self.catchup,
                earlier=EarlierStates(folder, chain=self.chain, shelf=self.shelf, outer=outer),
                links=links,
                holds=holds,
                log=log,
                on_progress=self.told.append,
            )
        )
        self.resumption = Resumption(folder, send=self.trainer.send, on_progress=self.told.append)
        self.checkpoints = Checkpoints(
            CheckpointParts(
                folder=folder,
                manifest=manifest,
                chain=self.chain,
                save=self.custody.save,
                shelf=self.shelf,
                resumption=self.resumption,
                on_progress=self.told.append,
            ),
            every=0,
            keep=1,
        )
        self.reduce = BoxReduce(self, lambda finals, seconds: self.engine.put(Reduced(finals, seconds)))
        self.engine = Engine(
            EngineParts(
                config=config,
                identity=self.identity,
                store=store,
                custody=self.custody,
                shelf=self.shelf,
                links=links,
                reduce=self.reduce,  # type: ignore[arg-type]
                resumption=self.resumption,
                checkpoints=self.checkpoints,
                desk=self.desk,
                log=log,
                holds=holds,
                audit=AuditTrail(folder / "rounds", enabled=False),
                traffic_bytes=dict,
                suspected=frozenset,
                on_progress=self.told.append,
            )
        )

    def _trainer_told(self, event: TrainerEvent) -> None:
        self.desk.heard(event)
        self.resumption.heard(event)
        self.engine.put(event)

    # -- life ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Live until the power goes, the disk fails, the node has left, or the box ends it."""
        try:
            with self.scope:
                await self._live()
            self.ended_by = self.ended_by or "kill"
        except* PowerCut:
            self.ended_by = "cut"
        except* StorageError as group:
            self.ended_by = f"storage: {group.exceptions[0]}"
        finally:
            self.up = False
            self.over.set()
            self.box.notice(self)

    async def _live(self) -> None:
        with Store(self.disk.root) as store:
            store.next_boot()
            self.build(store)
            async with trio.open_nursery() as nursery:
                for part in (
                    self.reduce.run,
                    self.trainer.run,
                    self.custody.load_ahead,
                    self.custody.run,
                    self.engine.going_back.run,
                    self.resumption.run,
                    self.checkpoints.run,
                ):
                    nursery.start_soon(part)
                self.up = True
                self.box.notice(self)
                await self.checkpoints.expect(self.trainer.layout)
                await self.engine.run(numel=NUMEL)
                nursery.cancel_scope.cancel()
        self.ended_by = "left"

    def cut(self) -> None:
        """The power goes now."""
        self.disk.dead = True
        self.scope.cancel()

    # -- what it fetches -------------------------------------------------------------------------------------

    async def fetch_finals(self, value: Value, peers: Sequence[PeerId]) -> Finals:
        """Raises NetworkError, RemoteError."""
        return await self.catchup.finals(value.plan, peers)

    def _donor(self, peer: PeerId) -> Life:
        donor = self.box.life_of(peer)
        if donor is None or peer not in self.links.linked():
            raise NetworkError(f"{peer} is not connected")
        return donor

    async def _ask(self, peer: PeerId, request: bytes) -> bytes:
        await trio.sleep(self.box.rng.uniform(*LATENCY_S))
        donor = self._donor(peer)
        question: FetchRequest = decode(request, FetchRequest)  # type: ignore[arg-type]
        return canonical(Librarian(chain=donor.chain, shelf=donor.shelf).answer(question))

    async def _ensure_lane(self, peer: PeerId, *, deadline_s: float) -> None:
        await trio.sleep(self.box.rng.uniform(*LATENCY_S))
        self._donor(peer)

    def _post_chunk(self, to: PeerId, header: FrameHeader, payload: memoryview | bytes) -> None:
        exchange, data = self._donor(to).exchange, bytes(payload)
        if header.kind in BULK_KINDS:
            region = exchange.region(self.peer, header)
            if region is None:
                return
            region[:] = data
        exchange.received(self.peer, header)

    # -- what is seen of it ----------------------------------------------------------------------------------

    @property
    def round(self) -> int:
        """The newest round that is certified here."""
        return self.chain.head.round if self.up else -1

    @property
    def state_round(self) -> int:
        """The round of the state that it holds."""
        return self.custody.state.round if self.up and self.custody.state is not None else -1


class Box:
    """Nodes 0, 1, 2 …, the first `founders` of them the founders; `run` runs a course of events over them."""

    def __init__(
        self,
        folder: Path,
        disks: Disks,
        *,
        nodes: int = 3,
        founders: int | None = None,
        seed: int = 0,
        codec: str = "fp32",
        grace_s: float = 2.0,
        work_s: tuple[float, float] = WORK_S,
    ) -> None:
        self.folder = folder
        self.disks = disks
        self.rng = random.Random(seed)
        self.work_s = work_s
        self.seed = seed
        self.peers = [identity(number + 1).peer_id for number in range(nodes)]
        self.manifest = manifest_of(self.peers[: founders or nodes], codec, grace_s)
        self.witnesses = [Witness(f"node {n}", folder / f"scratch{n}") for n in range(nodes)]
        self.lives: list[Life | None] = [None] * nodes
        self.contributions: dict[bytes, EncodedContribution] = {}
        self.finals: dict[bytes, Finals] = {}
        self.values: dict[tuple[Any, int], Value] = {}
        self.adjust_trainer: Callable[[Life], None] = lambda life: None
        """Called with every life once its trainer is made."""
        self.let_out: Callable[[Life, Message], None] = lambda life, message: None
        """Called with every message that a life gives to its links."""
        self.alter_finals: Callable[[Life, Finals], Finals] = lambda life, finals: finals
        """What a life gets in place of the finals that its reduction came to."""
        self._noticed: set[tuple[int, int]] = set()
        self._links: set[frozenset[int]] = set()
        self._places = itertools.count()
        self._disk_numbers = itertools.count()

    def next_place(self) -> int:
        """Of a stretch of training."""
        place = next(self._places)
        assert place < NUMEL, "more was trained than there are places"
        return place

    # -- who lives, and who is linked with whom --------------------------------------------------------------

    def life_of(self, peer: PeerId) -> Life | None:
        """The process that runs for a peer now."""
        life = self.lives[self.peers.index(peer)]
        return life if life is not None and life.up and not life.disk.dead else None

    def living(self) -> list[Life]:
        """All processes that run."""
        return [life for life in self.lives if life is not None and life.up and not life.disk.dead]

    def node(self, number: int) -> Life:
        """The present life of a node."""
        life = self.lives[number]
        assert life is not None
        return life

    def lives_linked_to(self, life: Life) -> list[Life]:
        """Those that a life has a link to."""
        return [other for other in self.living() if frozenset((id(life), id(other))) in self._links]

    def notice(self, life: Life) -> None:
        """A life began or ended; a moment later the others know it."""
        self.net.after(self.rng.uniform(NOTICE_S / 4, NOTICE_S), self._look_around)

    def _look_around(self) -> None:
        living = self.living()
        wanted = {frozenset((id(a), id(b))) for a, b in itertools.combinations(living, 2)}
        new, self._links = wanted - self._links, wanted
        for life in living:
            life.engine.alive(frozenset(other.peer for other in self.lives_linked_to(life)))
        for a, b in itertools.permutations(living, 2):
            if frozenset((id(a), id(b))) in new:
                a.engine.linked(b.peer, (b.chain.head.term, b.chain.head.round))

    # -- a course of events ----------------------------------------------------------------------------------

    def run(self, course: Callable[[Box], Any], *, limit_s: float = 600.0) -> None:
        """Run a course of events, then check everything. limit_s: of virtual time."""

        async def main() -> None:
            with trio.fail_after(limit_s):
                async with self._running():
                    await course(self)
                    self.remember()

        _work_rng.seed(self.seed)
        trio._core._run._r.seed(self.seed)
        try:
            trio.run(main, clock=MockClock(autojump_threshold=0), strict_exception_groups=True)
        finally:
            for life in filter(None, self.lives):
                self.disks.remove(life.disk)
        self.check()

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        self.net = Net(self)
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self.net.run)
            yield
            for life in self.living():
                life.disk.faults.clear()
            nursery.cancel_scope.cancel()

    def start(self, number: int, survival: Survival = Survival.ALL) -> Life:
        """Start a node, on what survived of its disk; where that is all, only its process had ended."""
        before = self.lives[number]
        if before is None:
            disk = self._new_disk(number)
        elif survival is Survival.ALL:
            disk = before.disk
            disk.revive()
        else:
            disk = self._survivor(number, before.disk, survival)
        self.witnesses[number].back(disk)
        life = self.lives[number] = Life(self, number, disk)
        self._nursery.start_soon(life.run)
        return life

    def _new_disk(self, number: int) -> Disk:
        folder = self.folder / f"node{number}-{next(self._disk_numbers)}"
        return self.disks.add(folder, random.Random(self.rng.random()))

    def _survivor(self, number: int, before: Disk, survival: Survival) -> Disk:
        folder = self.folder / f"node{number}-{next(self._disk_numbers)}"
        self.disks.remove(before)
        before.copy_survivors(folder, survival)
        return self.disks.add(folder, random.Random(self.rng.random()))

    def start_all(self) -> None:
        """Start every node."""
        for number in range(len(self.lives)):
            self.start(number)

    async def until(self, condition: Callable[[], object], within_s: float = 120.0) -> None:
        """Return once something holds; AssertionError after so much virtual time."""
        with trio.move_on_after(within_s):
            while not condition():  # noqa: ASYNC110
                await trio.sleep(0.05)
            return
        raise AssertionError(f"seed {self.seed}: not within {within_s} s: {self.story()}")

    async def until_round(self, round: int, *numbers: int, within_s: float = 120.0) -> None:
        """Return once these nodes, or all, have certified a round and hold its state."""

        def there() -> bool:
            lives = [self.node(number) for number in numbers or range(len(self.lives))]
            return all(life.up and life.round >= round and life.state_round >= round for life in lives)

        await self.until(there, within_s)
        self.remember()

    def contributors(self, round: int) -> set[int]:
        """The numbers of those whose contributions a certified round counted."""
        self.remember()
        found = [value for (_, number), value in self.values.items() if number == round and value.plan in self.finals]
        plans = [self.finals[value.plan].plan for value in found]
        return {self.peers.index(one.peer) for plan in plans for one in plan.participants if one.weight}

    def remember(self) -> None:
        """Take note of what every living node holds for certified."""
        for life in self.living():
            for number in range(1, life.chain.standing.round + 1):
                value = life.chain.value(number)
                known = self.values.setdefault((value.term, value.round), value)
                assert known.hash == value.hash, f"round {number} was decided twice"

    def story(self) -> str:
        """Where everybody stands."""
        return "; ".join(
            f"{n}: " + ("never" if life is None else f"round {life.round}/{life.state_round} {life.ended_by or 'lives'}")
            for n, life in enumerate(self.lives)
        )

    # -- checks ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Nobody let out what its disk did not have; every certified round is exact; nothing was counted twice."""
        blames = [blame for witness in self.witnesses for blame in witness.blames]
        assert not blames, f"seed {self.seed}: " + "\n".join(blames[:5])
        self._check_values()

    def _check_values(self) -> None:
        outer, counted = OuterSettings.of(self.manifest), np.zeros(NUMEL, np.float32)
        states: dict[bytes, CertifiedState] = {}
        for (_, number), value in sorted(self.values.items()):
            finals = self.finals[value.plan]
            began = (p for p in finals.plan.participants if p.root in self.contributions)  # who did not is in nothing
            given = {p.peer: self.contributions[p.root] for p in began}
            wanted = reference(
                finals.plan, {peer: one.concatenated() for peer, one in given.items()}, finals.bitmaps
            ).finals
            assert finals.concatenated() == wanted
            assert (finals.bitmaps_root, finals.tokens) == (value.bitmaps, value.tokens)
            before = states.get(value.base) or self.initial_state()
            after, header = advance(before, finals, outer)
            assert header.digest == value.digest, f"round {number} certified another state"
            states[value.hash] = after
            self._count(finals, given, counted)
        assert counted.max() <= 1, f"seed {self.seed}: the work at {np.flatnonzero(counted > 1)} was counted twice"
        self.counted = counted

    def _count(self, finals: Finals, given: dict[PeerId, EncodedContribution], counted: F32) -> None:
        for place, participant in enumerate(finals.plan.participants):
            if participant.peer in given and self.manifest.sync.codec == "fp32":
                values = np.frombuffer(given[participant.peer].concatenated(), "<f4")
                for chunk, included in enumerate(finals.included(place)):
                    at = slice(chunk * 4096, (chunk + 1) * 4096)
                    counted[at] += values[at] if included else 0

    def initial_state(self) -> CertifiedState:
        """S(0), as every trainer draws it."""
        trainer = BoxTrainer(NUMEL, tell=lambda event: None, next_place=self.next_place)
        values = np.random.default_rng(0).standard_normal(NUMEL).astype(np.float32)
        return CertifiedState.initial(values, trainer.layout.digest)


def manifest_of(founders: Sequence[PeerId], codec: str, grace_s: float) -> Manifest:
    """Rounds that wait for nobody long."""
    return validate_manifest(
        {
            "swarm": {"name": "box", "founders": list(founders), "admission": "open"},
            "workload": {"name": "regression", "options": {}},
            "sync": {"inner_steps": 1, "balance": False, "codec": codec},
            "round": {"chunk_values": 4096, "grace_s": grace_s, "reduce_deadline_s": 60.0},
        },
        source="the test's manifest",
    )


@pytest.fixture
def disks(monkeypatch: pytest.MonkeyPatch) -> Disks:
    """Everything that a box needs of the process: its disks, its threads, its tasks in an order of the seed's."""
    monkeypatch.setattr(store_module, "AGREEMENT_LOG_LIMIT_BYTES", LOG_LIMIT_BYTES)
    monkeypatch.setattr(engine_module, "PLAN_OUT_S", 0.0)
    monkeypatch.setattr(trio.to_thread, "run_sync", _work_in_place)
    monkeypatch.setattr(secrets, "token_bytes", _work_rng.randbytes)
    monkeypatch.setattr(trio._core._run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
    return Disks(monkeypatch)


_work_rng = random.Random(0)


async def _work_in_place(work: Callable[..., Any], *arguments: Any, **_: Any) -> Any:
    """Do at once what a thread would do, after a while in which others go on; uncancellable, as there."""
    await trio.lowlevel.checkpoint_if_cancelled()
    with trio.CancelScope(shield=True):
        await trio.sleep(_work_rng.uniform(*WORK_S))
    return work(*arguments)
