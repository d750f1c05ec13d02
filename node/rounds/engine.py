"""The engine: one task that feeds a member (`shoal.protocol.member`) and does what it asks for.

Everything that happens to a round arrives here as one input after the other: messages of peers, who is alive, what the
trainer made, finals that are complete, the clock, the user's orders. The member decides; here each of its effects is
carried out (`PERFORMERS`), and what came of it told, before the next. What takes long or waits for a peer (a reduction,
fetching finals, catching up) runs beside the engine and comes back as an input.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from time import thread_time
from typing import Any

import trio

from shoal.collectives.fragments import Fragments
from shoal.collectives.grid import Grid
from shoal.collectives.partition import deal
from shoal.node.outcome import Notice, PhaseChanged, TakesPart
from shoal.node.reporting.event_files import LOG_NAME
from shoal.node.rounds.engine_parts import EngineParts
from shoal.node.rounds.evaluations import past_losses
from shoal.node.rounds.inbox import TICK_S, Inbox, Own, ToHandle, Turn, in_turn
from shoal.node.rounds.order_file import OrderFiles
from shoal.node.rounds.participation import Participation, told_by_trainer
from shoal.node.rounds.round_observer import RoundObserver
from shoal.node.rounds.signing import signed_amendment, signed_rebase
from shoal.node.rounds.state_transition import StateTransition
from shoal.node.rounds.surroundings import NodeSurroundings
from shoal.node.state.errands import Errands
from shoal.node.training.trainer import TrainerEvent
from shoal.protocol import effects
from shoal.protocol.agreement import Broadcast, Mismatch
from shoal.protocol.bans import NeedEvidence
from shoal.protocol.chain import Position, next_position
from shoal.protocol.errors import ConfigError, LocalError, RemoteError, StorageError
from shoal.protocol.identity import PeerId
from shoal.protocol.inputs import HeadMoved, Input, Linked, Loaded, Received, Tick
from shoal.protocol.member import Member
from shoal.protocol.messages import Enlist, Message, Report
from shoal.protocol.planning import JOINER, OBSERVER, with_buffers
from shoal.protocol.round import RoundMachine
from shoal.protocol.surroundings import Policies
from shoal.protocol.timeouts import RESTING_TICK_S, in_crowd

ANOTHER_DIGEST = "round %d: the lead proposed another digest than was computed here"

logger = logging.getLogger(__name__)


class Engine:
    """A node's rounds, from obtaining the state to leaving."""

    def __init__(self, parts: EngineParts) -> None:
        self._p = parts
        self._state_store = parts.state_store
        self._inbox = Inbox()
        self._errands = Errands(
            parts.state_store,
            parts.links,
            elsewhere=parts.elsewhere,
            put=self.put,
            look_up=lambda peers: self._part.look_up(peers),
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
            scores=parts.state_store.catchup.scores,
            policies=Policies(rollback=parts.config.rollback, amendments=parts.config.authority_amendments),
            rounds=parts.config.rounds,
            checkpoint=parts.checkpoint,
        )
        self.left = trio.Event()
        """Set once this node takes part in nothing more."""
        self.counts_from: int | None = None
        """The round from which this node's work counts, the one under way or the next; None where it gives none."""
        self._shown_phase = ""
        self._part_untold: TakesPart | None = None

    # -- what others call ------------------------------------------------------------------------------------

    def hear(self, peer: PeerId, message: Message) -> None:
        """A round message arrived."""
        self._inbox.hear(Received(peer, message))

    def put(self, event: Own) -> None:
        """An input of this node's own: from its trainer, its reduction, its user."""
        self._inbox.put(event)

    def alive(self, peers: frozenset[PeerId]) -> None:
        """Take note that other peers are believed alive than before."""
        self._here.believed_alive = peers
        self.put(Tick())

    def linked(self, peer: PeerId, certified: Position) -> None:
        """A link came up; the peer's record says that its newest certificate is that of `certified`.

        What is said to it waits its turn: nothing may be said before it is on disk.
        """
        self.put(Linked(peer, certified))

    async def obey(self, order: Input) -> None:
        """Take an order of the user's between two inputs. Raises ConfigError, RemoteError where it cannot be.

        Cancellation: it may be carried out all the same.
        """
        self.member.check(order)
        await in_turn(self.put, partial(self._feed, order))

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
        """True if the rounds asked for are done: the node stops by itself."""
        return self.member.finished

    @property
    def leaving(self) -> bool:
        """True if leaving was asked for."""
        return self.member.leaving

    @property
    def phase(self) -> str:
        """One or two words for the user on what the node is doing."""
        return self.member.phase

    # -- the loop --------------------------------------------------------------------------------------------

    async def run(self, *, numel: int, buffers: int = 0) -> None:
        """Take part in rounds until cancelled, or until this node has left. See `Rounds`.

        Raises StorageError when something that must be durable cannot be written, ConfigError when the swarm's
        parameters are not this workload's.

        Cancellation: what was persisted stands.
        """
        manifest = self._p.config.manifest
        grid = Grid(numel, manifest.round.chunk_values)
        fragments = Fragments(grid, manifest.sync.fragments, buffers)
        self._part = Participation(self._p, fragments, lambda: self.observer)
        self._here.begin(self._part, fragments)
        self._state_store.expect(with_buffers(manifest.sync.plan_codec, buffers), numel, grid.chunk_values)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._errands.run)
            await self._state_store.load()
            await self._feed(self._loaded)
            while not self.left.is_set():  # who has left takes part in nothing more, not even as a returner
                await self._handle(await self._inbox.next(self._tick_s()))
            nursery.cancel_scope.cancel()

    def _tick_s(self) -> float:
        """Time until the next tick, if nothing else happens."""
        shown = self.phase == self._shown_phase
        if shown and self.member.rests:
            return RESTING_TICK_S
        return min(RESTING_TICK_S, in_crowd(TICK_S, len(self._p.links.linked())))

    async def _handle(self, event: ToHandle) -> None:
        """Feed the member what became of an input of the node's own."""
        if isinstance(event, Turn):
            before = self._state_store.head.hash
            await event.take()
            if self._state_store.head.hash != before:
                await self._feed(HeadMoved())
        elif isinstance(event, TrainerEvent):
            told = told_by_trainer(event)
            if told is not None:
                await self._feed(told)
        else:
            if isinstance(event, Tick):
                self._tell_of_part()
            if isinstance(event, Tick) and self.phase != self._shown_phase:
                self._shown_phase = self.phase
                if self.leaving:
                    self._p.announce()  # those who leave in the same moment look who else does
                self._p.on_progress(PhaseChanged(phase=self.phase, round=self._state_store.head.next_round))
            await self._feed(event)

    def _tell_of_part(self) -> None:
        """Say from which round this node's work counts, once a quorum is here and nobody claims that it is behind.

        Who starts again begins the round that it was in, and learns only from the others how far they are.
        """
        told, machine = self._part_untold, self.machine
        if told is None or machine is None or not machine.has_quorum():
            return
        if self._inbox.is_through and not self.member.claimed_behind:
            self._part_untold = None
            self._p.on_progress(told)

    async def _feed(self, event: Input) -> None:
        """Carry out all effects of an input. Raises ConfigError, RemoteError where the member raises them."""
        began = thread_time()
        effect = self.member.take(event, trio.current_time())
        if isinstance(event, Received):
            self._p.links.charge(event.peer, thread_time() - began)
        while effect is not None:
            perform = PERFORMERS.get(type(effect))
            if perform is None:
                raise LocalError(f"nothing here does {type(effect).__name__}")
            try:
                result = perform(self, effect)
                if isinstance(result, Awaitable):
                    result = await result
            except (RemoteError, ConfigError) as error:
                effect = self.member.failed(error, trio.current_time())
            else:
                effect = self.member.done(result, trio.current_time())

    # -- effects of several steps ------------------------------------------------------------------------------

    def _send(self, effect: effects.Send) -> None:
        message: Any = effect.message
        if isinstance(message, Enlist):  # no message of links, which older nodes would not know
            self._p.enlist(effect.peer, message)
        else:
            self._p.links.send(effect.peer, message)

    async def _write(self, effect: effects.Write) -> None:
        await trio.to_thread.run_sync(self._p.store.persist, *effect.records)
        for record in effect.records:
            self._p.log.persisted(record)

    def _examine(self, effect: effects.Examine) -> None:
        self.observer.said(effect.peer, effect.message)

    def _tell(self, effect: effects.Tell) -> None:
        if effect.alarming:
            logger.error("%s", effect.text)
        self._p.on_progress(Notice(text=effect.text))

    def _keep_fork(self, effect: effects.KeepFork) -> None:
        self._p.standstill.forks.keep(effect.fork)
        self._p.log.forked(effect.fork)
        self._tell(effects.Tell(str(effect.fork), alarming=True))

    def _begin_round(self, effect: effects.BeginRound) -> Mapping[bytes, PeerId]:
        self.observer.began(effect.base, effect.settings)
        self._transition.begin_round(trio.current_time())
        self._p.reduce.forget()
        settings = effect.settings
        self._p.site.begin(effect.base.hash, Grid(settings.numel, settings.chunk_values), settings.codec)
        made = self._part.made
        if made is not None and made.base == effect.base.hash:  # before a restart, maybe
            self._p.site.contributed(made.handed)
        return self.observer.proven(self._state_store.chain)

    async def _take_part(self, effect: effects.TakePart) -> None:
        round = effect.base.next_round
        self._p.log.started(effect.base, effect.role)
        self.counts_from = None if effect.role == OBSERVER else round + (effect.role == JOINER)
        if self.counts_from is not None:
            self._part_untold = TakesPart(round=round, counts_from=self.counts_from)
        await self._p.holds.at(round, "train")

    async def _give_way(self, effect: effects.GiveWay) -> None:
        head = self._state_store.head
        neighbours = self._p.reduce.neighbours(head.members) - effect.announced
        await self._inbox.until_begun(next_position(head), neighbours)

    def _goodbye(self, effect: effects.Goodbye) -> None:
        self._p.site.contributed()
        self.left.set()

    def _evicted(self, effect: effects.Evicted) -> None:
        self._p.reduce.stop()
        self._p.log.planned(effect.plan)

    def _watch_reduction(self, effect: effects.WatchReduction) -> effects.Watched:
        self._p.reduce.complete_at(effect.complete_at)
        stall = self._p.reduce.stalled(overdue=effect.overdue)
        return effects.Watched(None if stall is None else (stall.peers, stall.late), self._p.reduce.relayed)

    def _fetch_finals(self, effect: effects.FetchFinals) -> None:
        linked = self._p.links.linked()
        self._p.reduce.fetch(effect.value, [peer for peer in effect.value.members if peer in linked])

    async def _work_out(self, effect: effects.WorkOut) -> Report:
        finals: Any = effect.finals
        report = await self._transition.work_out(finals, effect.seconds)
        self.observer.reduced(finals, report)
        await self._p.holds.at(report.round, "certify")
        return report


def _first_of_order(do: Callable[[Engine, Any], Awaitable[Any]]) -> Callable[[Engine, Any], Awaitable[Any]]:
    """An effect before which an order has changed nothing: where the disk refuses it, the order is refused."""

    async def perform(engine: Engine, effect: Any) -> Any:
        try:
            return await do(engine, effect)
        except StorageError as error:
            raise ConfigError(str(error)) from None

    return perform


PERFORMERS: Mapping[type[Any], Callable[[Engine, Any], Any]] = {
    effects.Adopt: lambda engine, effect: engine._transition.adopt(effect.state),
    effects.Announce: lambda engine, effect: engine._part.announcement(),
    effects.Append: lambda engine, effect: engine._state_store.append(effect.entry),
    effects.Apply: lambda engine, effect: engine._transition.apply(effect.certificate),
    effects.BeginRound: Engine._begin_round,
    effects.Blame: lambda engine, effect: logger.warning("%s: %s", effect.peer, effect.text),
    Broadcast: lambda engine, effect: engine._p.links.broadcast(effect.message),
    effects.Certified: lambda engine, effect: engine.observer.certified(effect.certificate),
    effects.CloseOff: lambda engine, effect: engine._p.reduce.close_off(effect.lineage, effect.evicted),
    effects.Contribute: lambda engine, effect: engine._part.contribute(
        effect.work, alone=effect.alone, delegate=effect.delegate
    ),
    effects.DrawGenesis: lambda engine, effect: engine._transition.draw(effect.certified),
    effects.DropOrder: lambda engine, effect: trio.to_thread.run_sync(engine._orders.remove, effect.kind),
    effects.Evicted: Engine._evicted,
    effects.Examine: Engine._examine,
    effects.FetchFinals: Engine._fetch_finals,
    effects.FindEarlierRounds: _first_of_order(
        lambda engine, effect: trio.to_thread.run_sync(engine._state_store.earlier.rounds)
    ),
    effects.FindWork: lambda engine, effect: engine._part.find_work(countable=effect.countable),
    effects.FinishWork: lambda engine, effect: engine._p.resumption.written(effect.value.term, effect.value.round),
    effects.ForgetEarlier: lambda engine, effect: engine._state_store.earlier.forget(effect.besides),
    effects.GiveWay: Engine._give_way,
    effects.Goodbye: Engine._goodbye,
    effects.HandOver: lambda engine, effect: engine._part.hand_over(effect.delegate),
    effects.KeepFork: Engine._keep_fork,
    effects.KeepOrder: _first_of_order(
        lambda engine, effect: trio.to_thread.run_sync(engine._orders.write, effect.order)
    ),
    effects.KeepOwn: lambda engine, effect: engine._part.keep_own(),
    Mismatch: lambda engine, effect: logger.error(ANOTHER_DIGEST, effect.value.round),
    NeedEvidence: lambda engine, effect: engine.observer.need(effect.value),
    effects.PassOn: lambda engine, effect: engine._part.pass_on(),
    effects.PauseTrainer: lambda engine, effect: engine._part.pause(effect.paused),
    effects.Rejoin: lambda engine, effect: engine._p.log.caught_up(effect.base.state_round),
    effects.Repair: lambda engine, effect: engine._part.repair(effect.plan, dict(effect.held)),
    effects.ResumeWork: lambda engine, effect: engine._part.resume_work(),
    effects.Seek: lambda engine, effect: engine._errands.begin(effect.errand),
    effects.Send: Engine._send,
    effects.SettleWork: lambda engine, effect: engine._part.settle(),
    effects.SignAmendment: _first_of_order(lambda engine, effect: signed_amendment(engine._p, effect.amendment)),
    effects.SignRebase: _first_of_order(
        lambda engine, effect: signed_rebase(engine._p, effect.forget, engine._here.alive())
    ),
    effects.StandOnHead: lambda engine, effect: engine._part.stand_on_head(),
    effects.StartReduce: lambda engine, effect: engine._part.reduce(effect.plan),
    effects.StopReduction: lambda engine, effect: engine._p.reduce.stop(),
    effects.TakeBack: lambda engine, effect: engine._part.take_back(),
    effects.TakePart: Engine._take_part,
    effects.Tell: Engine._tell,
    effects.Train: lambda engine, effect: engine._part.train(effect),
    effects.WatchReduction: Engine._watch_reduction,
    effects.WorkOut: Engine._work_out,
    effects.Write: Engine._write,
}
"""Handler that carries out each effect of a member; what waits is awaited."""
