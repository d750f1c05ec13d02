"""The daemon: one root nursery in which everything a node does lives and dies.

    store ── identity, boot counter, logs          host ── links ── members   (who is there)
    trainer process ── desk ─┐                     lanes ── router ─┬─ plan traffic ── reductions
    control socket ── status ┴── engine ───────────────────────────┴─ chunk exchange ── catch-up

Leaving: a promise to sign nothing more, said to the others while the links are still up; then the nursery is
cancelled and every part closes within its own deadline.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable

import trio

from shoal.collectives.outer import OuterSettings
from shoal.collectives.traffic import PlanTraffic
from shoal.node.audit import AuditTrail
from shoal.node.config import NodeConfig
from shoal.node.control import ControlServer
from shoal.node.control_ops import handlers, orders
from shoal.node.discovery.chain_places import choice_of
from shoal.node.discovery.credentials import admission_of
from shoal.node.discovery.finding import Finding, peers_of
from shoal.node.discovery.reaching import Reaching
from shoal.node.gossip.engine import GossipEngine
from shoal.node.gossip.exchange import GossipExchange, VectorShelf
from shoal.node.holds import Holds
from shoal.node.lane_requests import LANE_PROTOCOL, answer_lane_request, lane_pool_of
from shoal.node.loops.attendance import Attendance
from shoal.node.loops.external_trainer import Detached, trainer_of
from shoal.node.outcome import Notice, Outcome, Progress, TrainerTraceback
from shoal.node.reporting.event_files import LOG_NAME
from shoal.node.reporting.events import EventLog
from shoal.node.reporting.round_log import RoundLog
from shoal.node.rounds.engine import Engine
from shoal.node.rounds.engine_parts import EngineParts
from shoal.node.rounds.fork_watch import ForkWatch
from shoal.node.rounds.frames import FrameRouter
from shoal.node.rounds.key_use import KeyUse
from shoal.node.rounds.reducing import ReduceDesk
from shoal.node.rounds.relay_room import RelayRoom
from shoal.node.rounds.standstill import Standstill
from shoal.node.sapo.engine import RolloutEngine
from shoal.node.services import services_of
from shoal.node.state.catchup import CatchUp
from shoal.node.state.checkpoints import CheckpointParts, Checkpoints
from shoal.node.state.custody import Custody, CustodyParts
from shoal.node.state.earlier_states import EarlierStates
from shoal.node.state.fetching import Fetcher
from shoal.node.state.librarian import ANSWER_LIMIT_BYTES, FETCH_PROTOCOL, REQUEST_DEADLINE_S, Librarian
from shoal.node.state.resumption import Resumption
from shoal.node.state.states import StateShelf
from shoal.node.state.store import Store, disk_errors, write_atomically
from shoal.node.state.transfer import DonorScores
from shoal.node.status import either_leaves, node_record, parting
from shoal.node.training.layouts import LAYOUT_PROTOCOL, Layouts
from shoal.node.training.trainer import Restarted, TrainerEvent, TrainerFailed
from shoal.node.training.trainer_messages import Contribution, Evaluated, Restored
from shoal.node.training.training import TrainingDesk
from shoal.node.workload import WorkloadError
from shoal.protocol.certificate import genesis
from shoal.protocol.chain import Chain, Position
from shoal.protocol.errors import ConfigError, RemoteError, ShoalError, StorageError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.inputs import Reduced
from shoal.protocol.manifest import Manifest, render_manifest
from shoal.protocol.messages import Term
from shoal.protocol.records import Phase
from shoal.protocol.wire import Sealer
from shoal.swarm.host import Host
from shoal.swarm.lanes.chunks import ChunkExchange
from shoal.swarm.links import Links
from shoal.swarm.manifest_exchange import ManifestDesk
from shoal.swarm.members import Members
from shoal.swarm.shared_memory import SharedMemory
from shoal.swarm.streams import MessageStream

DRAIN_DEADLINE_S = 3.0
FAREWELL_S = 0.5
"""After saying goodbye, time for it to reach the others."""
EVALUATION_DEADLINE_S = 60.0

logger = logging.getLogger(__name__)


class Daemon:
    """One node. Made by `run_node`, which also owns the store and the event log."""

    def __init__(
        self, config: NodeConfig, store: Store, events: EventLog, on_progress: Callable[[Progress], None]
    ) -> None:
        manifest = config.manifest
        self.config = config
        self.store = store
        self.events = events
        self.on_progress = on_progress
        self.identity = Identity.load_or_create(store.folder / "node.key")
        self.swarm_id = manifest.swarm_id
        self.key_use = KeyUse(store.folder, self.identity.peer_id, store.durable_records(), take_over=config.take_over)
        self.boot = store.next_boot(above=self.key_use.other_boot)
        self.key_use.started(self.boot)
        self.chain = stored_chain(store, manifest)
        self.outer = OuterSettings.of(manifest)
        self.shelf = StateShelf(store.folder, manifest.round.chunk_values, kinds=self.outer.kinds)
        self.host = Host(identity=self.identity, listen=config.listen)
        sealer = Sealer(self.identity, self.swarm_id, self.boot)
        self.router = FrameRouter()
        self.lanes = lane_pool_of(config, me=self.identity.peer_id, host=self.host, sink=self.router)
        self.vectors = VectorShelf(self.shelf.lookup)
        self.chunks = ChunkExchange(post=self.lanes.post, lookup=self.vectors.lookup)
        self.traffic = PlanTraffic(post=self.lanes.post, waiting=self.lanes.waiting)
        self.router.connect(self.traffic, self.chunks, parting=lambda peer: either_leaves(self, peer))
        self.members = Members(
            host=self.host,
            sealer=sealer,
            swarm_id=self.swarm_id,
            manifest=manifest,
            record=lambda: node_record(self),
            deliver=lambda peer, message: self.engine.hear(peer, message),
            admission=admission_of(
                store.folder,
                manifest,
                self.identity.peer_id,
                chain=self.chain,
                named=peers_of((*config.join, *manifest.network.bootstrap)),
            ),
        )
        self.links: Links = self.members.links
        self.lanes.prefer(self.host.comes_first, self.host.is_known)
        self.finding = Finding(
            folder=store.folder, config=config, host=self.host, members=self.members, on_progress=on_progress
        )
        self.holds = Holds(config.holds, events)
        self.trainer = trainer_of(config, self.identity, self.chain, abandoned=self._abandoned)
        self.attendance = Attendance(put=lambda event: self.engine.put(event), on_progress=on_progress)
        self.layouts = Layouts(host=self.host, linked=lambda: self.links.linked(), on_progress=on_progress)
        self.desk = TrainingDesk(
            self.trainer,
            seed=manifest.workload.seed,
            inner_steps=manifest.sync.round_steps,
            speeds=self.members.speeds if manifest.sync.balances else None,
            kinds=self.outer.kinds,
            evaluate_every=manifest.sync.fragments,
        )
        catchup = self._catchup()
        self.standstill = Standstill(forks=self._fork_watch(catchup), key_use=self.key_use)
        self.members.on_elsewhere = self.key_use.saw_record
        self.custody = self._custody(catchup)
        self.custody.parted = self.standstill.forks.suspect
        self.resumption = Resumption(
            store.folder,
            send=self.trainer.send,
            on_progress=on_progress,
            always=lambda round: self.checkpoints.is_due(round),
        )
        self.checkpoints = self._checkpoints()
        self.reduce = ReduceDesk(
            identity=self.identity,
            lanes=self.lanes,
            traffic=self.traffic,
            catchup=catchup,
            holds=self.holds,
            done=lambda finals, seconds: self.engine.put(Reduced(finals, seconds)),
        )
        self.relay_room = RelayRoom(self.host, self.traffic, lambda: self.links.linked())
        self.shared_memory = SharedMemory(self.host, self.lanes, lambda: self.links.linked())
        self.engine = self._new_engine()
        if isinstance(self.engine, GossipEngine | RolloutEngine):  # no chain says who contributed
            self.members.admission.contributed = self.engine.contributors.__contains__
        self.sharing = self.engine if isinstance(self.engine, RolloutEngine) else None
        self.reaching = Reaching(self)
        self.services = services_of(self)
        self.outcome = Outcome.DONE
        self._over = trio.Event()

    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(
            CheckpointParts(
                folder=self.store.folder,
                manifest=self.config.manifest,
                chain=self.chain,
                save=self.custody.save,
                shelf=self.shelf,
                resumption=self.resumption,
                on_progress=self.on_progress,
            ),
            every=self.config.checkpoint_every,
            keep=self.config.checkpoint_keep,
        )

    def _catchup(self) -> CatchUp:
        catchup = CatchUp(ask=self._ask, lanes=self.lanes, chunks=self.chunks, shelf=self.shelf, outer=self.outer)
        catchup.accepts = lambda header: self.layouts.accept(header.layout)
        return catchup

    def _fork_watch(self, catchup: CatchUp) -> ForkWatch:
        return ForkWatch(
            folder=self.store.folder,
            chain=self.chain,
            ask=catchup.certificates,
            say=self.links.broadcast,
            log=RoundLog(self.events),
            tell=self.on_progress,
        )

    def _custody(self, catchup: CatchUp) -> Custody:
        return Custody(
            CustodyParts(
                store=self.store,
                chain=self.chain,
                shelf=self.shelf,
                catchup=catchup,
                earlier=EarlierStates(self.store.folder, chain=self.chain, shelf=self.shelf, outer=self.outer),
                links=self.links,
                choice=choice_of(self, catchup),
                key_use=self.key_use,
                holds=self.holds,
                log=RoundLog(self.events),
                on_progress=self.on_progress,
            )
        )

    def _new_engine(self) -> Engine | GossipEngine | RolloutEngine:
        if self.config.manifest.sync.strategy != "gossip":
            return Engine(self._engine_parts())
        fetcher = Fetcher(lanes=self.lanes, chunks=self.chunks, scores=DonorScores())
        exchange = GossipExchange(shelf=self.vectors, fetcher=fetcher, ask=self._ask)
        return GossipEngine(self._engine_parts(), exchange, self.layouts)

    def _engine_parts(self) -> EngineParts:
        return EngineParts(
            config=self.config,
            identity=self.identity,
            store=self.store,
            custody=self.custody,
            shelf=self.shelf,
            links=self.links,
            reduce=self.reduce,
            resumption=self.resumption,
            checkpoints=self.checkpoints,
            desk=self.desk,
            log=RoundLog(self.events),
            holds=self.holds,
            audit=AuditTrail(self.store.folder / "rounds", enabled=self.config.test_mode),
            standstill=self.standstill,
            traffic_bytes=self.traffic_bytes,
            suspected=self.members.suspected,
            may_join=self.members.may_join,
            on_progress=self.on_progress,
        )

    @property
    def record_phase(self) -> Phase:
        """The phase in this node's record."""
        needed = isinstance(self.engine, Engine) and self.engine.member.needed
        if self._over.is_set() or (self.engine.leaving and not needed):
            return "leaving"
        if self.engine.machine is None:
            return "joining"
        return "paused" if needed or self.desk.paused else "training"

    @property
    def position(self) -> Position:
        """Term and round of this node's record: of its newest certificate, or of its own newest state."""
        if isinstance(self.engine, GossipEngine):
            return Term(), self.engine.state_round
        return self.chain.head.term, self.chain.head.round

    def traffic_bytes(self) -> dict[str, int]:
        """Bytes that went over lanes and control since this node started."""
        return {
            "lanes_sent": self.lanes.bytes_sent,
            "lanes_received": self.lanes.bytes_received,
            "control_sent": self.host.traffic.bytes_sent,
            "control_received": self.host.traffic.bytes_received,
        }

    # -- life ------------------------------------------------------------------------------------------------

    async def run(self) -> Outcome:
        """Live until the rounds are done, the user says so, or training fails.

        Raises ConfigError for a port in use or a workload that cannot be built, StorageError for a full disk.

        Cancellation: everything is closed, the trainer stopped; nothing is said to the others.
        """
        began = time.monotonic()
        self.events.write("started", peer_id=self.identity.peer_id, pid=os.getpid(), boot=self.boot)
        async with trio.open_nursery() as nursery:
            await nursery.start(self.host.run)
            self.host.serve(LANE_PROTOCOL, self._answer_lane)
            self.host.serve(FETCH_PROTOCOL, self._answer_fetch)
            self.host.serve(LAYOUT_PROTOCOL, self.layouts.serve)
            ManifestDesk(self.host, self.config.manifest)
            await nursery.start(self.lanes.run)
            nursery.start_soon(self.shared_memory.run)
            await nursery.start(self.members.run)
            await nursery.start(ControlServer(self.store.folder, handlers(self), orders(self)).run)
            self.events.write(
                "listening",
                addresses=self.host.addresses,
                lanes=self.lanes.addresses,
                seconds=round(time.monotonic() - began, 3),
            )
            nursery.start_soon(self._watch_signals)
            nursery.start_soon(self._watch_alive, nursery)
            nursery.start_soon(self._watch_left)
            nursery.start_soon(self.key_use.run)
            if isinstance(self.engine, Engine):
                nursery.start_soon(self.reduce.run)
                nursery.start_soon(self.relay_room.run)
                nursery.start_soon(self.custody.load_ahead)
                nursery.start_soon(self.custody.run)
                nursery.start_soon(self.engine.going_back.run)
                nursery.start_soon(self.standstill.forks.run)
                nursery.start_soon(self.resumption.run)
                nursery.start_soon(self.checkpoints.run)
            for service in self.services:
                await nursery.start(service.run)
            nursery.start_soon(self._train_and_take_part)
            await self._over.wait()
            await self.links.drain(deadline_s=DRAIN_DEADLINE_S)
            await trio.sleep(FAREWELL_S)
            nursery.cancel_scope.cancel()
        return self.outcome

    def _end(self, outcome: Outcome, reason: str) -> None:
        if not self._over.is_set():
            self.outcome = outcome
            self.events.write("left", reason=reason)
            self.members.announce()
            self._over.set()

    async def _train_and_take_part(self) -> None:
        """Take part to the end, and end the node when what it trains raises."""
        try:
            await self._take_part()
        except* WorkloadError as group:
            error = _first(group)
            self.on_progress(TrainerTraceback(summary=str(error), traceback=getattr(error, "traceback", "")))
            self.events.write("failed", message=str(error))
            self._end(Outcome.FAILED, "the workload failed")

    async def _take_part(self) -> None:
        """Start the trainer, then take part in rounds; the end of either ends the node."""
        assert not isinstance(self.engine, RolloutEngine)
        async with trio.open_nursery() as nursery:
            await nursery.start(self.trainer.run)
            nursery.start_soon(self._watch_trainer)
            started = self.trainer.started
            self.events.write("trainer_started", device=started.device, import_s=round(started.import_s, 6))
            self.layouts.know(self.trainer.layout)
            await self.checkpoints.expect(self.trainer.layout)
            await self.engine.run(numel=self.trainer.layout.numel)

    async def _watch_trainer(self) -> None:
        async for event in self.trainer.events:
            self.desk.heard(event)
            self.resumption.heard(event)
            if isinstance(event, TrainerFailed):
                await self._training_failed(event)
            else:
                self._note_trainer(event)
                if isinstance(event, Restarted) and not isinstance(event, Detached):
                    await self.desk.restarted()
                self.attendance.heard(event)
                self.engine.put(event)

    def _abandoned(self) -> None:
        self.on_progress(Notice(text="no training loop has attached for long; leaving the swarm"))
        self.leave_then(Outcome.LEFT)

    async def _training_failed(self, event: TrainerFailed) -> None:
        self.on_progress(TrainerTraceback(summary=event.summary, traceback=event.traceback))
        self.events.write("failed", message=event.summary)
        self.leave_then(Outcome.FAILED)

    def _note_trainer(self, event: TrainerEvent) -> None:
        if isinstance(event, Contribution) and self.desk.speed_is_news:
            self.members.announce()
        elif isinstance(event, Evaluated):
            metric = self.trainer.started.metric
            self.events.write("evaluated", round=event.round, loss=event.value, metric=metric)
        elif isinstance(event, Restored):
            self.events.write("resumed", round=event.round, exact=event.exact, refused=event.refused)
        elif isinstance(event, Detached):
            self.events.write("loop_detached", cause=event.cause)
        elif isinstance(event, Restarted):
            logger.warning("the trainer was started again: %s", event.cause)
            self.events.write("trainer_restarted", cause=event.cause)

    async def _watch_signals(self) -> None:
        """The first SIGINT or SIGTERM leaves in order, the second at once."""
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for number in signals:
                if self.engine.leaving or self.engine.finished:
                    self._end(Outcome.INTERRUPTED, "interrupted while leaving")
                    return
                self.on_progress(Notice(text="leaving the swarm; press Ctrl-C again to stop at once"))
                logger.info("signal %d: leaving", number)
                self.leave_then(Outcome.INTERRUPTED)

    def leave_then(self, outcome: Outcome) -> None:
        """Leave in order where this node takes part already, else at once."""
        if self.engine.finished:
            return
        if self.engine.machine is not None:
            self.outcome = outcome
            self.engine.ask_to_leave()
        else:
            self._end(outcome, "left before taking part")

    async def _watch_left(self) -> None:
        await self.engine.left.wait()
        if self.engine.finished:
            await self.desk.evaluate_last(EVALUATION_DEADLINE_S)
            self._end(Outcome.DONE, "rounds done")
        self._end(self.outcome, "left")

    # -- peers -----------------------------------------------------------------------------------------------

    async def _watch_alive(self, nursery: trio.Nursery) -> None:
        async for change in self.members.changes:
            record = self.members.record_of(change.peer)
            self.events.write(change.kind, peer=change.peer, **parting(change, record))
            for service in self.services:
                service.heard(change)
            if change.kind == "revoked":
                self.lanes.drop(change.peer)
            self.engine.alive(self.members.alive())
            if change.kind == "lost":
                self.layouts.forget(change.peer)
            elif change.kind == "linked" and not isinstance(self.engine, RolloutEngine):  # models of their own
                nursery.start_soon(self.layouts.watch, change.peer)
            if change.kind in ("linked", "detoured"):
                self.engine.linked(change.peer, (Term(), 0) if record is None else (Term(*record.term), record.round))

    async def _answer_lane(self, stream: MessageStream) -> None:
        self._check_admitted(stream)
        await answer_lane_request(self.lanes, stream)

    async def _answer_fetch(self, stream: MessageStream) -> None:
        self._check_admitted(stream)
        await Librarian(chain=self.chain, shelf=self.shelf).serve(stream)

    def _check_admitted(self, stream: MessageStream) -> None:
        if stream.peer not in self.links.linked():
            raise RemoteError("wants something without having been admitted", peer=stream.peer)

    async def _ask(self, peer: PeerId, request: bytes) -> bytes:
        await self.layouts.check(peer)  # if the swarm's model is another, it can be said where
        return await self.host.request(
            peer, FETCH_PROTOCOL, request, deadline_s=REQUEST_DEADLINE_S, limit_bytes=ANSWER_LIMIT_BYTES
        )


def stored_chain(store: Store, manifest: Manifest) -> Chain:
    """The chain as far as this node had it. Raises StorageError if what is on disk does not hold."""
    chain = Chain(genesis(manifest.swarm_id, manifest.swarm.founders), manifest.swarm.authority, manifest=manifest)
    try:
        for entry in store.certificates():
            chain.extend(entry, trusted=True)
    except RemoteError as error:
        raise StorageError(f"{store.folder}/chain.log does not hold ({error}); remove it to fetch it anew") from None
    return chain


def _first(group: BaseExceptionGroup[ShoalError]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _check_same_swarm(store: Store, manifest: Manifest) -> None:
    """A data folder belongs to one swarm: another swarm's votes and state have no business in it."""
    path = store.folder / "swarm"
    with disk_errors(store.folder):
        known = path.read_text().strip() if path.exists() else None
    if known is not None and known != manifest.swarm_id.hex():
        raise ConfigError(
            f"{store.folder} belongs to another swarm ({known[:16]}…); choose another --data-dir for this manifest"
        )
    if known is None:
        write_atomically(path, manifest.swarm_id.hex().encode())
    write_atomically(store.folder / "swarm.toml", render_manifest(manifest).encode())


async def run_node(config: NodeConfig, *, on_progress: Callable[[Progress], None] | None = None) -> Outcome:
    """Run one node until it is done; see `Daemon.run`."""
    with Store(config.data_dir) as store:
        _check_same_swarm(store, config.manifest)
        if config.forget_promises:
            store.forget_promises()
        events = EventLog(store.folder / LOG_NAME)
        try:
            daemon: type[Daemon] = Daemon
            if config.manifest.rollouts is not None:
                from shoal.node.sapo.daemon import daemon_of  # they are made of the one above

                daemon = daemon_of(config.manifest)
            return await daemon(config, store, events, on_progress or (lambda _: None)).run()
        finally:
            events.close()
