"""A node: one root nursery in which everything it does lives and dies.

    store ── identity, boot counter, logs          host ── links ── members   (who is there)
    trainer process ── client ┐                    lanes ── router ─┬─ plan traffic ── reductions
    control socket ── status ─┴─ engine ───────────────────────────┴─ chunk exchange ── catch-up

Leaving: a promise to sign nothing more, said to the others while the links are still up; then the nursery is
cancelled and every part closes within its own deadline.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import trio

from shoal.collectives.finals import Finals
from shoal.collectives.outer import OuterSettings
from shoal.collectives.traffic import KINDS as PLAN_KINDS
from shoal.collectives.traffic import PlanTraffic
from shoal.node.audits.auditing import Auditing
from shoal.node.control import ControlServer
from shoal.node.control_ops import handlers, orders
from shoal.node.dashboard.facts import NodeSource
from shoal.node.dashboard.service import PageService
from shoal.node.discovery.chain_places import ChainPlaces
from shoal.node.discovery.clocks import Clocks
from shoal.node.discovery.credentials import admission_of
from shoal.node.discovery.finding import Finding, peers_of
from shoal.node.discovery.moving import Moving
from shoal.node.discovery.reaching import Reaching
from shoal.node.discovery.rendezvous import Rendezvous, rendezvous_of
from shoal.node.gossip.exchange import VectorCache
from shoal.node.holds import Holds
from shoal.node.loops.attendance import Attendance
from shoal.node.loops.external_trainer import Detached, trainer_of
from shoal.node.machine_readings import Machine
from shoal.node.only_when import OnlyWhen
from shoal.node.options import NodeConfig
from shoal.node.other_data import OtherData, claimed
from shoal.node.outcome import Notice, Outcome, PeerChanged, Progress, TrainerTraceback
from shoal.node.parts import Parts
from shoal.node.reporting import events
from shoal.node.reporting.event_files import LOG_NAME
from shoal.node.reporting.event_log import EventLog
from shoal.node.reporting.event_writers import writers_of
from shoal.node.reporting.round_log import RoundLog, term_text
from shoal.node.rounds.enlist_exchange import EnlistExchange
from shoal.node.rounds.fork_file import ForkFile
from shoal.node.rounds.key_use import KeyUse
from shoal.node.rounds.reducing import ReductionDriver
from shoal.node.rounds.relay_room import RelayRoom
from shoal.node.rounds.site_exchange import OfferedWork, SiteExchange
from shoal.node.rounds.standstill import Standstill
from shoal.node.services import Service, UserOrders
from shoal.node.state.binding import bind
from shoal.node.state.catchup import CatchUp
from shoal.node.state.chain_waits import ChainWaits
from shoal.node.state.checkpoints import CheckpointParts, Checkpoints, entries_beyond
from shoal.node.state.disk_need import disk_need
from shoal.node.state.earlier_states import EarlierStates
from shoal.node.state.fetching import Fetcher
from shoal.node.state.file_memory import file_memory
from shoal.node.state.image_exchange import ImageExchange
from shoal.node.state.resumption import Resumption
from shoal.node.state.state_server import ANSWER_LIMIT_BYTES, FETCH_PROTOCOL, REQUEST_DEADLINE_S, StateServer
from shoal.node.state.state_store import StateStore, StateStoreParts
from shoal.node.state.states import StateCache
from shoal.node.state.store import Store, disk_errors, write_atomically
from shoal.node.status import NodeView, node_record
from shoal.node.strategies.table import rounds_of
from shoal.node.training.layouts import LAYOUT_PROTOCOL, Layouts
from shoal.node.training.trainer import EarlyTrainer, Restarted, Trainer, TrainerEvent, TrainerFailed
from shoal.node.training.trainer_messages import Contribution, Evaluated, Restored
from shoal.node.training.trainer_messages import Progress as Making
from shoal.node.training.training_client import TrainingClient
from shoal.node.waking import Waking
from shoal.node.when import Rule
from shoal.node.workload import WorkloadError
from shoal.protocol.certificate import genesis
from shoal.protocol.chain import Chain
from shoal.protocol.donors import DonorScores
from shoal.protocol.errors import RemoteError, ShoalError, StorageError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.inputs import Reduced
from shoal.protocol.manifest import Manifest
from shoal.protocol.messages import Term
from shoal.protocol.names import NAME_LIMIT_CHARS, Names, claimed_name, is_name
from shoal.protocol.records import RECORD_LIMIT, NodeRecord, Phase
from shoal.protocol.wire import Sealer
from shoal.swarm.host import Host
from shoal.swarm.lanes.chunks import KINDS as CHUNK_KINDS
from shoal.swarm.lanes.chunks import ChunkExchange
from shoal.swarm.lanes.lane import FrameSink, FrameTakers
from shoal.swarm.lanes.limits import LaneLimits, RateLimit
from shoal.swarm.lanes.pool import LanePool
from shoal.swarm.lanes.requests import LaneRequests, request_lane
from shoal.swarm.manifest_exchange import ManifestServer
from shoal.swarm.members import Members
from shoal.swarm.streams import MessageStream

DRAIN_DEADLINE_S = 3.0
FAREWELL_S = 0.5
"""After saying goodbye, time for it to reach the others."""
EVALUATION_DEADLINE_S = 60.0
NAME_NAME = "name"
"""In the data folder: the name that its user gave the node."""

logger = logging.getLogger(__name__)


class Node:
    """One node. Made by `run_node`, which also owns the store and the event log.

    All parts are made first, each of those before it; then they are wired to each other. None of them is given the
    node: what a part may know of the others are `Parts`, and its rounds.
    """

    def __init__(
        self,
        config: NodeConfig,
        store: Store,
        log: EventLog,
        on_progress: Callable[[Progress], None],
        early: EarlyTrainer | None = None,
    ) -> None:
        manifest, folder = config.manifest, store.folder
        self.outcome, self._over = Outcome.DONE, trio.Event()
        # -- who this is, and what it has
        identity = Identity.load_or_create(folder / "node.key")
        chain, outer = stored_chain(store, manifest), OuterSettings.of(manifest)
        if config.forget_promises:
            store.forget_promises(chain.head)
        self.key_use = KeyUse(folder, identity.peer_id, store.durable_records(), take_over=config.take_over)
        boot = store.next_boot(above=self.key_use.other_boot)
        self.key_use.started(boot)
        cache = StateCache(folder, manifest.round.chunk_values, kinds=outer.kinds)
        round_log, holds = RoundLog(log), Holds(config.holds, log)
        # -- who is there, and what moves between them
        self.host = host = Host(identity=identity, listen=config.listen, boot=boot)
        self.frames = FrameTakers()
        lanes = _lane_pool(config, host, self.frames)
        vectors = VectorCache(cache.lookup)
        offered = OfferedWork(vectors.lookup)
        chunks = ChunkExchange(post=lanes.post, lookup=offered.lookup)
        self.traffic = PlanTraffic(post=lanes.post, waiting=lanes.waiting)
        self.is_follower = is_follower(config, chain, identity.peer_id)
        self.members = members = self._make_members(config, host, Sealer(identity, manifest.swarm_id, boot), chain)
        linked = members.links.linked
        self.finding = Finding(folder=folder, config=config, host=host, members=members, on_progress=on_progress)
        self.lane_requests = LaneRequests(host, lanes, linked)
        # -- what trains
        self.trainer = trainer_of(config, identity, chain, abandoned=self._abandoned, early=early)
        self.layouts = Layouts(
            host=host, linked=linked, on_progress=on_progress, with_all=not manifest.strategy.certifies
        )
        training_client = _training_client(self.trainer, manifest, members)
        # -- the state, and how it is come by
        self.catchup = catchup = CatchUp(ask=self._ask, lanes=lanes, chunks=chunks, cache=cache, outer=outer)
        forks = ForkFile(folder)
        chain_places = ChainPlaces(config, folder=folder, chain=chain, host=host, members=members)
        state_store = StateStore(
            StateStoreParts(
                store=store,
                chain=chain,
                cache=cache,
                catchup=catchup,
                earlier=EarlierStates(folder, chain=chain, cache=cache, outer=outer),
                key_use=self.key_use,
                holds=holds,
                log=round_log,
                on_progress=on_progress,
                takes_images=self.is_follower and outer.imaged,
            )
        )
        reduce = ReductionDriver(
            identity=identity,
            lanes=lanes,
            traffic=self.traffic,
            catchup=catchup,
            holds=holds,
            done=self._reduced,
            late_s=members.late_s,
        )
        resumption = Resumption(folder, send=self.trainer.send, on_progress=on_progress, always=self._keeps_round)
        self.parts = Parts(
            config=config,
            store=store,
            events=log,
            on_progress=on_progress,
            identity=identity,
            swarm_id=manifest.swarm_id,
            boot=boot,
            chain=chain,
            cache=cache,
            vectors=vectors,
            host=host,
            lanes=lanes,
            chunks=chunks,
            members=members,
            names=Names(self._claimed_name, limit=RECORD_LIMIT),
            holds=holds,
            layouts=self.layouts,
            training_client=training_client,
            standstill=Standstill(forks=forks, key_use=self.key_use, chain=chain),
            chain_places=chain_places,
            chain_waits=ChainWaits(host, state_store, linked),
            image_exchange=ImageExchange(host, cache, catchup, linked),
            enlist_exchange=EnlistExchange(host, linked, members.give),
            site=SiteExchange(
                host,
                offered,
                Fetcher(lanes=lanes, chunks=chunks, scores=DonorScores()),
                name=config.site if manifest.sites_together else None,
                swarm=manifest.swarm_id,
                linked=linked,
                record_of=members.record_of,
                allocate=partial(file_memory, folder),
            ),
            is_follower=self.is_follower,
            state_store=state_store,
            resumption=resumption,
            checkpoints=_checkpoints(config, chain, cache, state_store, on_progress),
            reduce=reduce,
            relay_room=RelayRoom(host, self.traffic, linked, reduce.until_relayed),
            ask=self._ask,
        )
        self.rounds = rounds_of(self.parts)
        self._make_services()
        self._wire()

    def _make_members(self, config: NodeConfig, host: Host, sealer: Sealer, chain: Chain) -> Members:
        """Make this node's view of the swarm, with its own record, messages and admission."""
        manifest, me = config.manifest, host.peer_id
        named = peers_of((*config.join, *manifest.network.bootstrap))
        return Members(
            host=host,
            sealer=sealer,
            swarm_id=manifest.swarm_id,
            manifest=manifest,
            record=self._record,
            admission=admission_of(config.data_dir, manifest, me, chain=chain, named=named),
            follows=self.is_follower,
            outside=chain.is_outside if manifest.waits_outside else None,
        )

    def _make_services(self) -> None:
        """Make what goes on beside the rounds."""
        parts, rounds = self.parts, self.rounds
        self.attendance = Attendance(put=rounds.engine.put, on_progress=parts.on_progress)
        self.user = UserOrders(leave=self._leave, pause=self.attendance.pause, why_paused=lambda: self.attendance.why)
        self.reaching = Reaching(parts)
        self.other_data = OtherData(named=parts.config.data is not None)
        self.auditing = None if rounds.certifying is None else Auditing(parts, rounds.certifying)
        self.view = NodeView(
            parts,
            rounds,
            self.finding,
            self.reaching,
            page=lambda: self.page,
            phase=lambda: self.record_phase,
            why_paused=self.user.why_paused,
        )
        self.page = self._page()
        rendezvous_services = rendezvous_of(parts, self.finding.book, lambda: self.reaching.control_addresses)
        writers = writers_of(parts.config, parts.identity.peer_id, parts.events)
        rendezvous = [one for one in rendezvous_services if isinstance(one, Rendezvous)]
        clocks = Clocks(parts.host, parts.members.links.linked, parts.on_progress)
        moving = Moving(parts, [self.reaching.moved, self.finding.moved, *(one.moved for one in rendezvous)])
        machine: list[Service] = [moving, Waking(parts, moving.connect_anew)]
        if parts.config.only_when:
            machine.append(OnlyWhen(Rule(parts.config.only_when, Machine()), self.attendance.wait))
        services = (
            *machine,
            clocks,
            self.finding,
            *rendezvous_services,
            self.reaching,
            self.auditing,
            *writers,
            self.page,
        )
        self.services: Sequence[Service] = [service for service in services if service is not None]
        listening = (self.finding, clocks, *rendezvous, self.reaching, self.auditing)
        self._peer_listeners = [listener.heard for listener in listening if listener is not None]

    def _wire(self) -> None:
        """Connect what was made."""
        parts, rounds = self.parts, self.rounds
        self.frames.register(PLAN_KINDS, self.traffic)
        self.frames.register(CHUNK_KINDS, parts.chunks)
        self.frames.is_leaving = self._either_leaves
        parts.lanes.prefer(parts.host.comes_first, parts.host.is_known)
        for listener in (
            parts.training_client.heard,
            parts.resumption.heard,
            self._note_trainer,
            self.attendance.heard,
            rounds.engine.put,
        ):
            self.trainer.listen(listener)
        parts.members.register(rounds.takers)
        parts.members.on_elsewhere = self.key_use.saw_record
        parts.members.on_moved = parts.lanes.end_towards
        self.reaching.connect()
        self.catchup.accepts = lambda header: self.layouts.accept(header.layout)
        if rounds.contributed is not None:
            parts.members.admission.contributed = rounds.contributed
        if rounds.certifying is not None:
            member = rounds.certifying.member
            parts.members.machine.awaited, parts.members.machine.calm = member.awaited, lambda: member.rests
        if rounds.certifying is not None and self.auditing is not None:
            rounds.certifying.observer = self.auditing
            parts.reduce.excluded = self.auditing.excluded
        if self.page is not None:
            parts.events.listen(self.page.hear)

    def _page(self) -> PageService | None:
        address, folder = self.parts.config.dashboard, self.parts.store.folder
        if address is None:
            return None
        source = NodeSource(self.parts, self.rounds, self.user, self.view)
        return PageService(source, address, folder=folder, history=folder / LOG_NAME)

    # -- what its parts ask --------------------------------------------------------------------------------------

    @property
    def record_phase(self) -> Phase:
        """The phase in this node's record."""
        return "leaving" if self._over.is_set() else self.rounds.record_phase

    def _record(self) -> NodeRecord:
        return node_record(self.parts, self.rounds, self.reaching, self.record_phase)

    def _claimed_name(self, peer: str) -> str:
        """The name that a peer, or this node, claims; empty where none is known."""
        if peer == self.parts.identity.peer_id:
            return self.parts.config.node_name
        record = self.members.record_of(PeerId(peer))
        return "" if record is None else claimed_name(record.capabilities)

    def _reduced(self, finals: Finals, seconds: float) -> None:
        self.rounds.engine.put(Reduced(finals, seconds))

    def _keeps_round(self, round: int) -> bool:
        return self.parts.checkpoints.is_due(round)

    def _either_leaves(self, peer: PeerId) -> bool:
        """True if this node or `peer` is on its way out, so that lanes between them end. From any thread."""
        record = self.members.record_of(peer)
        return self.record_phase == "leaving" or (record is not None and record.phase == "leaving")

    def _leave(self) -> None:
        self._leave_then(Outcome.LEFT)

    # -- life ------------------------------------------------------------------------------------------------

    async def run(self) -> Outcome:
        """Live until the rounds are done, the user says so, or training fails.

        Raises ConfigError for a port in use or a workload that cannot be built, StorageError for a full disk.

        Cancellation: everything is closed, the trainer stopped; nothing is said to the others.
        """
        began = time.monotonic()
        parts = self.parts
        me, called = parts.identity.peer_id, parts.config.node_name
        parts.events.write(events.Started(peer_id=me, pid=os.getpid(), boot=parts.boot, called=called))
        parts.on_progress(PeerChanged(kind="self", peer=me, name=parts.names.of(me)))
        async with trio.open_nursery() as nursery:
            await nursery.start(self.host.run)
            self.host.serve(FETCH_PROTOCOL, self._answer_fetch)
            self.host.serve(LAYOUT_PROTOCOL, self.layouts.serve)
            ManifestServer(self.host, parts.config.manifest)
            await nursery.start(parts.lanes.run)
            nursery.start_soon(self.lane_requests.run)
            await nursery.start(self.members.run)
            shown = handlers(parts, self.user, view=self.view)
            ops = shown, orders(parts, self.rounds)
            await nursery.start(ControlServer(parts.store.folder, *ops).run)
            parts.events.write(
                events.Listening(
                    addresses=tuple(self.host.addresses),
                    lanes=tuple(parts.lanes.addresses),
                    seconds=round(time.monotonic() - began, 3),
                )
            )
            nursery.start_soon(self._watch_signals)
            nursery.start_soon(self._watch_alive, nursery)
            nursery.start_soon(self._watch_left)
            nursery.start_soon(self.key_use.run)
            for task in self.rounds.tasks:
                nursery.start_soon(task)
            for service in self.services:
                await nursery.start(service.run)
            nursery.start_soon(self._train_and_take_part)
            await self._over.wait()
            await self.members.links.drain(deadline_s=DRAIN_DEADLINE_S)
            await trio.sleep(FAREWELL_S)
            nursery.cancel_scope.cancel()
        return self.outcome

    def _end(self, outcome: Outcome, reason: str) -> None:
        if not self._over.is_set():
            self.outcome = outcome
            self.parts.events.write(events.Left(reason=reason))
            self.members.announce()
            self._over.set()

    async def _train_and_take_part(self) -> None:
        """Take part to the end, and end the node when what it trains raises."""
        try:
            await self._take_part()
        except* WorkloadError as group:
            error = _first(group)
            self.parts.on_progress(TrainerTraceback(summary=str(error), traceback=getattr(error, "traceback", "")))
            self.parts.events.write(events.Failed(message=str(error)))
            self._end(Outcome.FAILED, "the workload failed")

    async def _take_part(self) -> None:
        """Have the rounds made, and rollouts shared, by what the strategy asks for; the end of either ends the node."""
        async with trio.open_nursery() as nursery:
            if self.rounds.sharing is not None:
                nursery.start_soon(self.rounds.sharing.run)
            if self.rounds.trains:
                await self._train()
                nursery.cancel_scope.cancel()

    async def _train(self) -> None:
        """Start the trainer, then take part in rounds."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.trainer.run)
            started, layout = self.trainer.started, self.trainer.layout
            logger.info("the trainer is ready, on %s", started.device)
            self.parts.events.write(events.TrainerStarted(device=started.device, import_s=round(started.import_s, 6)))
            self.layouts.know(layout)
            if self.parts.config.manifest.strategy.certifies:
                await self._look_at_disk(layout.numel)
            await self.parts.checkpoints.expect(layout)
            buffers = layout.buffer_chunks(self.parts.config.manifest.round.chunk_values)
            await self.rounds.run(numel=layout.numel, buffers=buffers)

    async def _look_at_disk(self, numel: int) -> None:
        """Tell the user, before any state is fetched, where the disk may not hold what this node keeps."""
        config = self.parts.config
        checkpoints = config.checkpoint_keep if config.checkpoint_every else 0
        need = await trio.to_thread.run_sync(disk_need, config.data_dir, config.manifest, numel, checkpoints)
        if not need.fits:
            self.parts.on_progress(Notice(text=f"the disk may run full: {need.text}; {need.remedy}"))

    def _abandoned(self) -> None:
        self.parts.on_progress(Notice(text="no training loop has attached for long; leaving the swarm"))
        self._leave_then(Outcome.LEFT)

    def _note_trainer(self, event: TrainerEvent) -> None:
        """Write down what the trainer did, for its user; tell peers of a new speed, and leave where training failed."""
        made = self.parts.training_client.steps_made
        if isinstance(event, Making) and made is not None:
            self.parts.on_progress(made)
        elif isinstance(event, Contribution) and self.parts.training_client.speed_is_news:
            self.members.announce()
        elif isinstance(event, Evaluated):
            metric, term = self.trainer.started.metric, term_text(self.parts.training_client.measured_term)
            self.parts.events.write(events.Evaluated(term=term, round=event.round, loss=event.value, metric=metric))
            if event.samples:
                texts = {sample.prompt: sample.text for sample in event.samples}
                self.parts.events.write(events.Sampled(round=event.round, texts=texts))
            self._compare_data()
        elif isinstance(event, Restored):
            self.parts.events.write(
                events.Resumed(round=event.round, exact=event.exact, refused=event.refused, tokens=event.tokens)
            )
        elif isinstance(event, Detached):
            self.parts.events.write(events.LoopDetached(cause=event.cause))
        elif isinstance(event, Restarted):
            logger.warning("the trainer was started again: %s", event.cause)
            self.parts.events.write(events.TrainerRestarted(cause=event.cause))
        elif isinstance(event, TrainerFailed):
            self.parts.on_progress(TrainerTraceback(summary=event.summary, traceback=event.traceback))
            self.parts.events.write(events.Failed(message=event.summary))
            self._leave_then(Outcome.FAILED)

    def _compare_data(self) -> None:
        """Warn where members measure on other data than this node; what this one measures on, its record says."""
        me, records = self.parts.identity.peer_id, self.members
        own = claimed(self._record().capabilities)
        known = {peer: record.capabilities for peer in records.present() if (record := records.record_of(peer))}
        line = self.other_data.compare(own, {str(peer): claimed(said) for peer, said in known.items() if peer != me})
        if line is not None:
            self.parts.on_progress(Notice(text=line))

    async def _watch_signals(self) -> None:
        """The first SIGINT or SIGTERM leaves in order, the second at once."""
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for _ in signals:
                if self.rounds.engine.leaving or self.rounds.engine.finished:
                    self._end(Outcome.INTERRUPTED, "interrupted while leaving")
                    return
                self.parts.on_progress(Notice(text="leaving the swarm; press Ctrl-C again to stop at once"))
                self._leave_then(Outcome.INTERRUPTED)

    def _leave_then(self, outcome: Outcome) -> None:
        """Leave in order where this node takes part already, else at once."""
        if self.rounds.engine.finished:
            return
        if self.rounds.leaves_in_order:
            self.outcome = outcome
            self.rounds.engine.ask_to_leave()
        else:
            self._end(outcome, "left before taking part")

    async def _watch_left(self) -> None:
        await self.rounds.engine.left.wait()
        if self.rounds.engine.finished:
            await self.parts.training_client.evaluate_last(EVALUATION_DEADLINE_S)
            self._end(Outcome.DONE, "rounds done")
        self._end(self.outcome, "left")

    # -- peers -----------------------------------------------------------------------------------------------

    async def _watch_alive(self, nursery: trio.Nursery) -> None:
        async for change in self.members.changes:
            if change.kind == "revoked":
                self.members.admission.check_own(self.parts.identity.peer_id)
            record = self.members.record_of(change.peer)
            left = self.members.left_in_order(change)
            called = self._claimed_name(change.peer)
            self.parts.events.write(
                events.peer_event(change.kind, change.peer, left=left, why=change.why, called=called)
            )
            kind = "left" if left else change.kind
            self.parts.on_progress(PeerChanged(kind=kind, peer=change.peer, name=self.parts.names.of(change.peer)))
            for heard in self._peer_listeners:
                heard(change)
            if change.kind == "revoked":
                self.parts.lanes.drop(change.peer)
            self.rounds.engine.alive(self.members.alive())
            if change.kind == "lost":
                self.layouts.forget(change.peer)
            elif change.kind == "linked" and self.rounds.trains:
                nursery.start_soon(self.layouts.watch, change.peer)
            if change.kind in ("linked", "detoured"):
                certified = (Term(), 0) if record is None else (Term(*record.term), record.round)
                self.rounds.engine.linked(change.peer, certified)

    async def _answer_fetch(self, stream: MessageStream) -> None:
        if stream.peer not in self.members.links.linked():
            raise RemoteError("wants something without having been admitted", peer=stream.peer)
        parts = self.parts
        await StateServer(chain=parts.chain, cache=parts.cache, earlier=parts.state_store.earlier).serve(stream)

    async def _ask(self, peer: PeerId, request: bytes) -> bytes:
        await self.layouts.check(peer)  # if the swarm's model is another, it can be said where
        return await self.host.request(
            peer, FETCH_PROTOCOL, request, deadline_s=REQUEST_DEADLINE_S, limit_bytes=ANSWER_LIMIT_BYTES
        )


def is_follower(config: NodeConfig, chain: Chain, me: PeerId) -> bool:
    """True if a node takes part in no certified round: its agent trains nothing, and it knows itself to be no member.

    A founder, and who trained before and did not leave, observes the rounds: its vote may be needed.
    """
    shares = config.manifest.strategy.certifies and config.manifest.rollouts is not None
    return shares and config.rollouts != "train" and me not in (*chain.head.members, *chain.voters)


def _lane_pool(config: NodeConfig, host: Host, sink: FrameSink) -> LanePool:
    """The lanes that a configuration asks for. Frames go to `sink`."""
    upload, download = RateLimit(config.max_upload), RateLimit(config.max_download)
    return LanePool(
        me=host.peer_id,
        swarm_id=config.manifest.swarm_id,
        sink=sink,
        listen=config.lane_listen,
        request=partial(request_lane, host),
        limits=LaneLimits(upload=upload, download=download, shares=config.shared_memory),
    )


def _training_client(trainer: Trainer, manifest: Manifest, members: Members) -> TrainingClient:
    """The trainer's orders, and what it makes. Steps of a round follow the members' speeds where these are balanced."""
    outer = OuterSettings.of(manifest)
    return TrainingClient(
        trainer,
        seed=manifest.workload.seed,
        inner_steps=manifest.sync.round_steps,
        speeds=members.speeds if manifest.sync.balances else None,
        kinds=outer.kinds,
        imaged=outer.imaged,
        evaluate_every=manifest.sync.fragments,
    )


def _checkpoints(
    config: NodeConfig,
    chain: Chain,
    cache: StateCache,
    state_store: StateStore,
    on_progress: Callable[[Progress], None],
) -> Checkpoints:
    parts = CheckpointParts(
        folder=config.data_dir,
        manifest=config.manifest,
        chain=chain,
        save=state_store.save,
        cache=cache,
        on_progress=on_progress,
    )
    return Checkpoints(parts, every=config.checkpoint_every, keep=config.checkpoint_keep)


def stored_chain(store: Store, manifest: Manifest) -> Chain:
    """The chain as far as this node had it. Raises StorageError if what is on disk does not hold.

    What chain.log lost, and the newest checkpoint here has, or what holds behind the damage, is put into it again: a
    node that is alone has nobody who gives it that.
    """
    chain = Chain(genesis(manifest.swarm_id, manifest.swarm.founders), manifest.swarm.authority, manifest=manifest)
    try:
        for entry in store.certificates():
            chain.extend(entry, trusted=True)
    except RemoteError as error:
        raise StorageError(f"{store.folder}/chain.log does not hold ({error}); remove it to fetch it anew") from None
    known = chain.head.hash
    try:
        for entry in (*entries_beyond(store.folder, chain.head), *store.certificates_behind_damage()):
            if entry.value not in chain:
                chain.extend(entry, trusted=True)
    except RemoteError as error:
        logger.warning("%s: no more than the first %d entries are here: %s", store.folder, chain.height, error)
    if chain.head.hash != known:
        store.replace_chain(chain.entries)
        logger.warning(
            "%s/chain.log had lost entries that are here: it ends with round %d", store.folder, chain.head.round
        )
    return chain


def _first(group: BaseExceptionGroup[ShoalError]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def kept_name(folder: Path, given: str | None) -> str | None:
    """The name that a user gave this node now, else at an earlier start: it stays with the data folder.

    None where none was ever given, or the file is damaged. Blocks. Raises StorageError.
    """
    path = folder / NAME_NAME
    if given is not None:
        write_atomically(path, given.encode())
        return given
    with disk_errors(folder):
        kept = path.read_bytes()[: NAME_LIMIT_CHARS + 1].decode(errors="replace") if path.exists() else ""
    return kept if is_name(kept) else None


async def run_node(
    config: NodeConfig, *, on_progress: Callable[[Progress], None] | None = None, early: EarlyTrainer | None = None
) -> Outcome:
    """Run one node until it is done; see `Node.run`. early: its trainer's process, if that was started already."""
    with Store(config.data_dir) as store:
        store.check_room()
        bind(store.folder, config.manifest)
        config = replace(config, name=kept_name(store.folder, config.name))
        log = EventLog(store.folder / LOG_NAME)
        try:
            return await Node(config, store, log, on_progress or (lambda _: None), early).run()
        finally:
            log.close()
