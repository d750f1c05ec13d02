"""The engine: one task that feeds a member (`shoal.protocol.member`) and does what it asks for.

Everything that happens to a round arrives here as one input after the other: messages of peers, who is alive, what the
trainer made, finals that are complete, the clock, the user's orders. The member decides; here each of its effects is
carried out, and what came of it told, before the next. What takes long or waits for a peer (a reduction, fetching
finals, catching up) runs beside the engine and comes back as an input.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import trio

from shoal.collectives.fragments import Fragments
from shoal.collectives.grid import Grid
from shoal.collectives.partition import deal
from shoal.collectives.state import CertifiedState
from shoal.node.outcome import Notice, PhaseChanged
from shoal.node.reporting.event_files import LOG_NAME
from shoal.node.rounds.authority import Authority
from shoal.node.rounds.engine_parts import EngineParts
from shoal.node.rounds.evaluations import past_losses
from shoal.node.rounds.inbox import Fetched, Inbox, Ordered, Own, ToHandle
from shoal.node.rounds.order_file import OrderFiles
from shoal.node.rounds.orders import obeyed
from shoal.node.rounds.participation import Participation
from shoal.node.rounds.round_observer import RoundObserver
from shoal.node.rounds.state_transition import StateTransition
from shoal.node.rounds.surroundings import NodeSurroundings
from shoal.node.state.errands import Errands
from shoal.node.training.trainer import Restarted, TrainerEvent
from shoal.node.training.trainer_messages import Contribution
from shoal.node.training.trainer_messages import Evaluated as Measured
from shoal.protocol.agreement import Broadcast, Mismatch
from shoal.protocol.bans import NeedEvidence
from shoal.protocol.chain import Position, next_position
from shoal.protocol.effects import (
    Adopt,
    Announce,
    Append,
    Apply,
    BeginRound,
    Blame,
    Certified,
    CloseOff,
    Contribute,
    DrawGenesis,
    DropOrder,
    Evicted,
    Examine,
    FetchFinals,
    FindEarlierRounds,
    FindWork,
    FinishWork,
    ForgetEarlier,
    GiveWay,
    Goodbye,
    KeepOrder,
    PauseTrainer,
    Rejoin,
    Repair,
    ResumeWork,
    Seek,
    Send,
    SettleWork,
    SignAmendment,
    StandOnHead,
    StartReduce,
    StopReduction,
    TakePart,
    Tell,
    Train,
    Watched,
    WatchReduction,
    WorkOut,
    Write,
)
from shoal.protocol.errors import ConfigError, LocalError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.inputs import (
    Amend,
    Evaluated,
    GoBack,
    HeadMoved,
    Input,
    Linked,
    Loaded,
    Order,
    Proven,
    Rebased,
    Received,
    Tick,
    Trained,
    TrainerRestarted,
    Withdraw,
)
from shoal.protocol.member import Member
from shoal.protocol.messages import NO_HASH, ChunkResults, Message, Plan, Ready, Rebase, Report
from shoal.protocol.round import RoundMachine
from shoal.protocol.surroundings import Policies

PLAN_OUT_S = 0.05  # a lead begins its own part so much later at most

logger = logging.getLogger(__name__)


class Engine:
    """A node's rounds, from obtaining the state to leaving."""

    def __init__(self, parts: EngineParts) -> None:
        self._p = parts
        self._state_store = parts.state_store
        self._inbox = Inbox()
        self._errands = Errands(
            parts.state_store, parts.links, put=self.put, look_up=lambda peers: self._part.look_up(peers)
        )
        self._transition = StateTransition(parts)
        self._orders = OrderFiles(parts.store.folder)
        self._loaded = Loaded(self._orders.read(), past_losses(parts.store.folder / LOG_NAME))
        self.observer = RoundObserver()
        self._here = NodeSurroundings(parts)
        self._part: Participation
        self.member = Member(
            identity=parts.identity,
            surroundings=self._here,
            deal=deal,
            scores=parts.state_store.scores,
            policies=Policies(rollback=parts.config.rollback, amendments=parts.config.authority_amendments),
            rounds=parts.config.rounds,
        )
        self.left = trio.Event()
        """Set once this node takes part in nothing more."""
        self._shown_phase = ""
        parts.standstill.forks.on_found = lambda: self.put(Tick())

    # -- what others call ------------------------------------------------------------------------------------

    def hear(self, peer: PeerId, message: Message) -> None:
        """A round message arrived."""
        self._inbox.hear(Received(peer, message))

    def put(self, event: Own) -> None:
        """An input of this node's own: from its trainer, its reduction, its user."""
        self._inbox.put(event)

    def alive(self, peers: frozenset[PeerId]) -> None:
        """Who is believed alive changed."""
        self._here.believed_alive = peers
        self.put(Tick())

    def missing(self) -> tuple[PeerId, ...]:
        """The electorate's members that are not here."""
        return self.member.missing()

    def linked(self, peer: PeerId, certified: Position) -> None:
        """A link came up; the peer's record says that its newest certificate is that of `certified`.

        What is said to it waits its turn: nothing may be said before it is on disk.
        """
        self.put(Linked(peer, certified))

    async def go_back(self, round: int) -> None:
        """The user wants to go back to a round. On disk when this returns; raises ConfigError where it cannot be."""
        await obeyed(self.put, partial(self._feed, GoBack(round)))

    async def amend(self, settings: Sequence[str], *, by_authority: bool = False) -> None:
        """The user wants these in force. On disk when this returns; raises ConfigError where they cannot be."""
        await obeyed(self.put, partial(self._feed, Amend(tuple(settings), by_authority)))

    async def withdraw(self, kind: type[Order]) -> None:
        """The user does not want any more what was ordered."""
        await obeyed(self.put, partial(self._feed, Withdraw(kind)))

    async def obey(self, order: Callable[[], Awaitable[None]], *, standing_still: bool = False) -> None:
        """Carry out an order of the user's between two inputs, as `obeyed` does.

        standing_still: also where something keeps this node from taking part.
        """
        if self.machine is None and not (standing_still and self.member.stands_still):
            raise ConfigError(f"this node is {self.phase}; try again when it takes part in the rounds")
        await obeyed(self.put, order)

    async def rebase(self, rebase: Rebase) -> None:
        """Go on in the term that the authority opened; for orders that `obey` carries out.

        Raises RemoteError if it cannot have, StorageError.
        """
        await self._feed(Rebased(rebase))

    def prove(self, evidence: bytes, accused: PeerId) -> None:
        """Evidence of that digest is verified here, and no ban covers it."""
        self.put(Proven(evidence, accused))

    def ask_to_leave(self) -> None:
        """Leave the swarm as soon as the round allows; `left` is set then."""
        if not self.leaving:
            self.member.ask_to_leave(trio.current_time())
            self.put(Tick())

    @property
    def machine(self) -> RoundMachine | None:
        """The round under way."""
        return self.member.machine

    @property
    def finished(self) -> bool:
        """Whether the rounds asked for are done: the node stops by itself."""
        return self.member.finished

    @property
    def leaving(self) -> bool:
        """Whether leaving was asked for."""
        return self.member.leaving

    @property
    def phase(self) -> str:
        """What the node is doing, for its user."""
        return self.member.phase

    @property
    def abstains(self) -> str | None:
        """Why this node signs nothing in the round under way, and what helps; None if it may sign."""
        return self.member.abstains

    # -- the loop --------------------------------------------------------------------------------------------

    async def run(self, *, numel: int) -> None:
        """Take part in rounds until cancelled, or until this node has left.

        Raises StorageError when something that must be durable cannot be written, ConfigError when the swarm's
        parameters are not this workload's.

        Cancellation: what was persisted stands.
        """
        manifest = self._p.config.manifest
        grid = Grid(numel, manifest.round.chunk_values)
        fragments = Fragments(grid, manifest.sync.fragments)
        self._part = Participation(self._p, fragments)
        self._here.begin(self._part, fragments)
        self._state_store.expect(manifest.sync.plan_codec, numel, grid.chunk_values)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._errands.run)
            await self._state_store.load()
            await self._feed(self._loaded)
            while not self.left.is_set():  # who has left takes part in nothing more, not even as a returner
                await self._handle(await self._inbox.next())
            nursery.cancel_scope.cancel()

    async def _handle(self, event: ToHandle) -> None:
        """Feed the member what became of an input of the node's own."""
        if isinstance(event, Tick):
            self._show_phase()
            await self._feed(event)
        elif isinstance(event, Ordered | Fetched):
            before = self._state_store.head.hash
            await (event.carry_out() if isinstance(event, Ordered) else self._errands.take(event))
            if self._state_store.head.hash != before:
                await self._feed(HeadMoved())
        elif isinstance(event, TrainerEvent):
            await self._handle_trainer(event)
        else:
            await self._feed(event)

    async def _handle_trainer(self, event: TrainerEvent) -> None:
        if isinstance(event, Contribution):
            await self._feed(Trained(event.round, event))
        elif isinstance(event, Restarted):
            await self._feed(TrainerRestarted())
        elif isinstance(event, Measured):
            await self._feed(Evaluated(event.round, event.value))

    async def _feed(self, event: Input) -> None:
        """Carry out all effects of an input. Raises RemoteError, ConfigError where the member raises it."""
        effect = self.member.take(event, trio.current_time())
        while effect is not None:
            perform = PERFORMERS.get(type(effect))
            if perform is None:
                raise LocalError(f"nothing here does {type(effect).__name__}")
            try:
                result = await perform(self, effect)
            except (RemoteError, ConfigError) as error:
                effect = self.member.failed(error, trio.current_time())
            else:
                effect = self.member.done(result, trio.current_time())

    def _show_phase(self) -> None:
        if self.phase != self._shown_phase:
            self._shown_phase = self.phase
            self._p.on_progress(PhaseChanged(phase=self.phase, round=self._state_store.head.next_round))

    # -- effects: what is written and said -------------------------------------------------------------------

    async def _write(self, effect: Write) -> None:
        await trio.to_thread.run_sync(self._p.store.persist, *effect.records)
        for record in effect.records:
            self._p.log.persisted(record)

    async def _broadcast(self, effect: Broadcast) -> None:
        self._p.links.broadcast(effect.message)  # type: ignore[arg-type]

    async def _send(self, effect: Send) -> None:
        self._p.links.send(effect.peer, effect.message)  # type: ignore[arg-type]

    async def _examine(self, effect: Examine) -> None:
        self.observer.said(effect.peer, effect.message)
        if not isinstance(effect.message, Rebase):
            self._p.standstill.forks.heard(effect.peer, effect.message, Received(effect.peer, effect.message).position)

    async def _blame(self, effect: Blame) -> None:
        logger.warning("%s: %s", effect.peer, effect.text)

    async def _mismatch(self, effect: Mismatch) -> None:
        logger.error("round %d: the lead proposed another digest than was computed here", effect.value.round)

    async def _tell(self, effect: Tell) -> None:
        if effect.alarming:
            logger.error("%s", effect.text)
        self._p.on_progress(Notice(text=effect.text))

    async def _goodbye(self, effect: Goodbye) -> None:
        self.left.set()

    # -- effects: rounds -------------------------------------------------------------------------------------

    async def _begin_round(self, effect: BeginRound) -> Mapping[bytes, PeerId]:
        self.observer.began(effect.base, effect.settings)
        self._transition.begin_round(trio.current_time())
        self._p.reduce.forget()
        return self.observer.proven(self._state_store.chain)

    async def _take_part(self, effect: TakePart) -> None:
        self._p.log.started(effect.base, effect.role)
        await self._p.holds.at(effect.base.next_round, "train")

    async def _announce(self, effect: Announce) -> Ready:
        return self._part.announcement()

    async def _give_way(self, effect: GiveWay) -> None:
        head = self._state_store.head
        neighbours = self._p.reduce.neighbours(head.members) - effect.announced
        await self._inbox.until_begun(next_position(head), neighbours)

    async def _certified(self, effect: Certified) -> None:
        self.observer.certified(effect.certificate)

    async def _apply(self, effect: Apply) -> None:
        await self._transition.apply(effect.certificate)

    async def _append(self, effect: Append) -> bool:
        return await self._state_store.append(effect.entry)

    async def _need_evidence(self, effect: NeedEvidence) -> None:
        self.observer.need(effect.value)

    # -- effects: what this node gives -----------------------------------------------------------------------

    async def _stand_on_head(self, effect: StandOnHead) -> None:
        await self._part.stand_on_head()

    async def _train(self, effect: Train) -> None:
        await self._part.train(contribute=effect.contribute)

    async def _pause_trainer(self, effect: PauseTrainer) -> None:
        await (self._p.training_client.pause() if effect.paused else self._p.training_client.resume())

    async def _contribute(self, effect: Contribute) -> Ready | None:
        assert isinstance(effect.work, Contribution)
        ready = await self._part.contribute(effect.work, alone=effect.alone)
        if ready is not None and self._part.made is not None:
            self.observer.contributed(self._part.made)
        return ready

    async def _find_work(self, effect: FindWork) -> bool:
        return await self._part.find_work(countable=effect.countable)

    async def _resume_work(self, effect: ResumeWork) -> None:
        await self._part.resume_work()

    async def _settle_work(self, effect: SettleWork) -> None:
        await self._part.settle()

    async def _finish_work(self, effect: FinishWork) -> None:
        await self._p.resumption.written(effect.value.term, effect.value.round)

    # -- effects: reductions ---------------------------------------------------------------------------------

    async def _start_reduce(self, effect: StartReduce) -> None:
        await self._before_plan(effect.plan, "plan")
        self._p.reduce.start(effect.plan, self._part.encoded)

    async def _repair(self, effect: Repair) -> None:
        await self._before_plan(effect.plan, "repair")
        self._p.reduce.repair(effect.plan, self._part.encoded, dict(effect.held))

    async def _before_plan(self, plan: Plan, phase: str) -> None:
        self._p.log.planned(plan)
        self.observer.planned(plan)
        await self._p.holds.at(plan.round, phase)
        if plan.planner == self._p.identity.peer_id:  # once the lanes are at work, what is queued waits for its turn
            await self._p.links.drain(deadline_s=PLAN_OUT_S)

    async def _close_off(self, effect: CloseOff) -> tuple[ChunkResults, ...]:
        return await self._p.reduce.close_off(effect.lineage, effect.evicted)

    async def _evicted(self, effect: Evicted) -> None:
        self._p.reduce.stop()
        self._p.log.planned(effect.plan)

    async def _watch_reduction(self, effect: WatchReduction) -> Watched:
        self._p.reduce.complete_at(effect.complete_at)
        stall = self._p.reduce.stalled()
        return Watched(None if stall is None else (stall.peers, stall.late), self._p.reduce.relayed)

    async def _stop_reduction(self, effect: StopReduction) -> None:
        self._p.reduce.stop()

    async def _fetch_finals(self, effect: FetchFinals) -> None:
        linked = self._p.links.linked()
        self._p.reduce.fetch(effect.value, [peer for peer in effect.value.members if peer in linked])

    async def _work_out(self, effect: WorkOut) -> Report:
        finals: Any = effect.finals
        report = await self._transition.work_out(finals, effect.seconds)
        self.observer.reduced(finals, report)
        await self._p.holds.at(report.round, "certify")
        return report

    # -- effects: what its user wants ------------------------------------------------------------------------

    async def _keep_order(self, effect: KeepOrder) -> None:
        await trio.to_thread.run_sync(self._orders.write, effect.order)

    async def _drop_order(self, effect: DropOrder) -> None:
        await trio.to_thread.run_sync(self._orders.remove, effect.kind)

    async def _sign_amendment(self, effect: SignAmendment) -> bytes:
        swarm = self._p.config.manifest.swarm
        authority = Authority(self._p.store.folder, authority=swarm.authority, node=self._p.identity)
        return await trio.to_thread.run_sync(authority.sign_amendment, self._state_store.head.swarm, effect.amendment)

    async def _find_earlier_rounds(self, effect: FindEarlierRounds) -> list[int]:
        return await trio.to_thread.run_sync(self._state_store.earlier.rounds)

    async def _forget_earlier(self, effect: ForgetEarlier) -> None:
        await self._state_store.earlier.forget(effect.besides)

    # -- effects: catching up --------------------------------------------------------------------------------

    async def _seek(self, effect: Seek) -> None:
        self._errands.begin(effect.errand)

    async def _adopt(self, effect: Adopt) -> None:
        assert isinstance(effect.state, CertifiedState)
        if not effect.state.round and self._state_store.state is not None:
            logger.warning("the initial parameters drawn here differ from the first founder's; using theirs")
        await self._hold(effect.state)

    async def _draw_genesis(self, effect: DrawGenesis) -> None:
        state = await self._p.training_client.initial_state()
        if effect.certified in (NO_HASH, await trio.to_thread.run_sync(self._p.cache.digest, state)):
            await self._hold(state)

    async def _hold(self, state: CertifiedState) -> None:
        if state.layout_hash != self._p.training_client.layout_hash:
            raise ConfigError(
                "the swarm's model has other parameters than this workload builds here; install the same version of it"
            )
        await self._state_store.adopt(state)

    async def _rejoin(self, effect: Rejoin) -> None:
        self._p.log.caught_up(effect.base.state_round)


PERFORMERS: Mapping[type[Any], Callable[[Engine, Any], Awaitable[Any]]] = {
    Adopt: Engine._adopt,
    Announce: Engine._announce,
    Append: Engine._append,
    Apply: Engine._apply,
    BeginRound: Engine._begin_round,
    Blame: Engine._blame,
    Broadcast: Engine._broadcast,
    Certified: Engine._certified,
    CloseOff: Engine._close_off,
    Contribute: Engine._contribute,
    DrawGenesis: Engine._draw_genesis,
    DropOrder: Engine._drop_order,
    Evicted: Engine._evicted,
    Examine: Engine._examine,
    FetchFinals: Engine._fetch_finals,
    FindEarlierRounds: Engine._find_earlier_rounds,
    FindWork: Engine._find_work,
    FinishWork: Engine._finish_work,
    ForgetEarlier: Engine._forget_earlier,
    GiveWay: Engine._give_way,
    Goodbye: Engine._goodbye,
    KeepOrder: Engine._keep_order,
    Mismatch: Engine._mismatch,
    NeedEvidence: Engine._need_evidence,
    PauseTrainer: Engine._pause_trainer,
    Rejoin: Engine._rejoin,
    Repair: Engine._repair,
    ResumeWork: Engine._resume_work,
    Seek: Engine._seek,
    Send: Engine._send,
    SettleWork: Engine._settle_work,
    SignAmendment: Engine._sign_amendment,
    StandOnHead: Engine._stand_on_head,
    StartReduce: Engine._start_reduce,
    StopReduction: Engine._stop_reduction,
    TakePart: Engine._take_part,
    Tell: Engine._tell,
    Train: Engine._train,
    WatchReduction: Engine._watch_reduction,
    WorkOut: Engine._work_out,
    Write: Engine._write,
}
"""What carries out each effect of a member."""
