"""The engine: one task that feeds the round machine and carries out what it decides.

Everything that happens to a round arrives here as one input after the other: messages of peers, who is alive, what the
trainer made, finals that are complete, the clock, the user's orders. The machine answers with effects, and these are
carried out in order: a `Persist` is on disk before anything after it is sent. What takes long or waits for a peer (a
reduction, fetching finals, catching up) runs beside the engine and comes back as an input.

    state is here ─► begin round ─► machine: ready, plan, reduce, propose, vote ─► certificate ─► apply ─► begin round
         ▲                                                                              │
         └── obtained, beside the engine ◄── the state cannot be computed here ◄────────┘
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable

import trio

from shoal.collectives.fragments import Fragments
from shoal.collectives.grid import Grid
from shoal.node.outcome import PhaseChanged
from shoal.node.rounds.amendments import Amending
from shoal.node.rounds.departure import LINGER_S, Departure, Parting
from shoal.node.rounds.early import Heard
from shoal.node.rounds.engine_parts import EngineParts
from shoal.node.rounds.going_back import GoingBack
from shoal.node.rounds.inbox import (
    AnotherGenesis,
    CaughtUp,
    Fetched,
    Inbox,
    Input,
    Linked,
    Ordered,
    Own,
    Reduced,
    SetPaused,
    StateHeld,
    Tick,
)
from shoal.node.rounds.machines import machine_after_head
from shoal.node.rounds.orders import obeyed
from shoal.node.rounds.participation import Participation
from shoal.node.rounds.round_observer import RoundObserver
from shoal.node.rounds.solitude import Solitude, abstaining, no_quorum
from shoal.node.rounds.state_transition import StateTransition
from shoal.node.state.state_sync import StateSync
from shoal.node.training.trainer import Restarted, TrainerEvent
from shoal.node.training.trainer_messages import Contribution
from shoal.protocol.agreement import Broadcast, Decided, Mismatch, NeedFinals, NeedState, Persist
from shoal.protocol.bans import NeedEvidence
from shoal.protocol.chain import Position, next_position
from shoal.protocol.commitments import check_commitment
from shoal.protocol.effects import CloseOff, Effect, Evicted, Repair, StartReduce, batched
from shoal.protocol.errors import ConfigError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Certificate, Message, Plan, Ready, Rebase
from shoal.protocol.planning import OBSERVER, TRAINING, RoundSettings, check_plan
from shoal.protocol.probation import Probation
from shoal.protocol.round import Phase, RoundMachine

PLAN_OUT_S = 0.05  # a lead begins its own part so much later at most

logger = logging.getLogger(__name__)


class Engine:
    """A node's rounds, from obtaining the state to leaving."""

    def __init__(self, parts: EngineParts) -> None:
        self._p = parts
        self._custody = parts.custody
        self._desk = parts.desk
        self._inbox = Inbox()
        self._sync = StateSync(parts, put=self.put, look_up=lambda peers: self._part.look_up(peers))
        self._transition = StateTransition(parts)
        self.departure = Departure(rounds=parts.config.rounds, tell=parts.on_progress)
        self._solitude = Solitude()
        self.going_back = self._going_back = GoingBack(parts, put=self.put)
        self.amending = Amending(parts)
        self.observer = RoundObserver()
        self._probation = Probation()
        self._part: Participation
        self._fragments: Fragments
        self.machine: RoundMachine | None = None
        self._resumed = False
        self._alive: frozenset[PeerId] = frozenset()
        self._shown_phase = ""
        self._still: str | None = None
        parts.standstill.forks.on_found = lambda: self.put(Tick())

    # -- what others call ------------------------------------------------------------------------------------

    def hear(self, peer: PeerId, message: Message) -> None:
        """A round message arrived."""
        self._inbox.hear(Heard(peer, message))

    def put(self, event: Own) -> None:
        """An input of this node's own: from its trainer, its reduction, its user."""
        self._inbox.put(event)

    def alive(self, peers: frozenset[PeerId]) -> None:
        """Who is believed alive changed."""
        self._alive = peers
        self.put(Tick())

    def missing(self) -> tuple[PeerId, ...]:
        """The electorate's members that are not here; a machine that has just begun has not heard who is."""
        return () if self.machine is None else tuple(p for p in self.machine.missing() if p not in self._alive)

    def linked(self, peer: PeerId, certified: Position) -> None:
        """A link came up; the peer's record says that its newest certificate is that of `certified`.

        What is said to it waits its turn: nothing may be said before it is on disk.
        """
        self.put(Linked(peer, certified))

    async def obey(self, order: Callable[[], Awaitable[None]], *, standing_still: bool = False) -> None:
        """Carry out an order of the user's between two inputs, as `obeyed` does.

        standing_still: also where something keeps this node from taking part.
        """
        if self.machine is None and not (standing_still and self._still):
            raise ConfigError(f"this node is {self.phase}; try again when it takes part in the rounds")
        await obeyed(self.put, order)

    def prove(self, evidence: bytes, accused: PeerId) -> None:
        """Evidence of that digest is verified here, and no ban covers it."""

        async def carry_out() -> None:
            if self.machine is not None and self.machine.phase is not Phase.DECIDED:
                await self._carry_out(self.machine.proven(evidence, accused, trio.current_time()))

        self.put(Ordered(carry_out))

    def ask_to_leave(self) -> None:
        """Leave the swarm as soon as the round allows; `left` is set then."""
        if not self.leaving:
            self.departure.ask(trio.current_time())
            self.put(Tick())

    @property
    def left(self) -> trio.Event:
        """Set once this node takes part in nothing more."""
        return self.departure.left

    @property
    def finished(self) -> bool:
        """Whether the rounds asked for are done: the node stops by itself."""
        return self.departure.finished

    @property
    def leaving(self) -> bool:
        """Whether leaving was asked for."""
        return self.departure.asked

    @property
    def phase(self) -> str:
        """What the node is doing, for its user."""
        if self.leaving:
            return "leaving"
        if self.machine is None:
            return "done" if self.finished else self._still or "joining"
        if self.abstains is not None:
            return "abstaining"
        if self._solitude.without_quorum:
            return "no quorum"
        return "paused" if self._desk.paused else self.machine.phase.value

    @property
    def abstains(self) -> str | None:
        """Why this node signs nothing in the round under way, and what helps; None if it may sign."""
        machine = self.machine
        return abstaining(machine.round) if machine is not None and machine.agreement.abstains else None

    # -- the loop --------------------------------------------------------------------------------------------

    async def run(self, *, numel: int) -> None:
        """Take part in rounds until cancelled, or until this node has left.

        Raises StorageError when something that must be durable cannot be written, ConfigError when the swarm's
        parameters are not this workload's.

        Cancellation: what was persisted stands.
        """
        manifest = self._p.config.manifest
        grid = Grid(numel, manifest.round.chunk_values)
        self._fragments = Fragments(grid, manifest.sync.fragments)
        self._part = Participation(self._p, self._fragments)
        self._custody.expect(manifest.sync.plan_codec, numel, grid.chunk_values)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._sync.run)
            await self._sync.load()
            await self._go_on()
            while not self.left.is_set():  # who has left takes part in nothing more, not even as a returner
                await self._handle(await self._inbox.next())
            nursery.cancel_scope.cancel()

    async def _handle(self, event: Input) -> None:
        if self._stands_still() and self.machine is not None:
            self._abandon_round()
        if isinstance(event, Heard):
            await self._handle_heard(event)
        elif isinstance(event, Reduced):
            await self._handle_reduced(event)
        elif isinstance(event, SetPaused):
            await self._set_paused(event.paused)
        elif isinstance(event, Linked):
            self._sync.ahead(event.peer, (event.certified[0], event.certified[1] + 1))
            for message in () if self.machine is None else self.machine.current():
                self._p.links.send(event.peer, message)  # type: ignore[arg-type]
        elif isinstance(event, Tick):
            await self._handle_tick()
        elif isinstance(event, Ordered):
            await event.carry_out()
            if self.machine is not None and self.machine.previous.hash != self._custody.head.hash:
                self._abandon_round()  # the authority went on with another chain
        elif isinstance(event, StateHeld):
            await self._carry_out(self._going_back.held(event, self.machine))
        elif isinstance(event, Fetched):
            if await self._sync.take(event):
                self._abandon_round()
        elif isinstance(event, CaughtUp):
            await self._sync.caught_up(event)
            await self._go_on()
        elif isinstance(event, AnotherGenesis):
            await self._take_genesis(event)
        else:
            await self._handle_trainer(event)

    async def _handle_heard(self, heard: Heard) -> None:
        message, machine, position, head = heard.message, self.machine, heard.position, self._custody.head
        self.observer.said(heard.peer, message)
        current = next_position(head)
        if position <= current:  # who claims to be beyond this round is on its way to no state that there is
            self._sync.newcomers.heard(heard.peer, message, trio.current_time())
        if isinstance(message, Rebase):
            await self._take_rebase(heard.peer, message)
            return
        self._p.standstill.forks.heard(heard.peer, message, position)
        if self._stands_still() and machine is not None:
            self._abandon_round()
            return
        if isinstance(message, Certificate) and position >= (head.term, head.round):
            self.departure.has_certificate(heard.peer)
        if position < current:
            self._sync.answer_late(heard.peer, position, message)
        elif position > current or machine is None:
            self._inbox.keep_for_later(heard)
            if position > current:
                self._sync.ahead(heard.peer, position)
        elif isinstance(message, Ready) and self._sync.another_genesis(heard.peer, message):
            self._inbox.keep_for_later(heard)
            self._sync.fetch_genesis(heard.peer)
        else:
            try:
                if isinstance(message, Ready):
                    check_commitment(heard.peer, message, self._settings)
                effects = machine.receive(heard.peer, message, trio.current_time())
            except RemoteError as error:
                logger.warning("round %d: %s", position[1], error)
                return
            await self._carry_out(effects)

    async def _handle_tick(self) -> None:
        now = trio.current_time()
        self._show_phase()
        self._sync.advance(in_round=self.machine is not None)
        machine = self.machine
        if machine is None:
            if self.leaving:
                self.left.set()
            return
        await self._carry_out(machine.peers_alive(self._alive, now, suspected=self._p.suspected()))
        if self.machine is machine and machine.phase is not Phase.DECIDED:
            self._p.reduce.complete_at(machine.complete_at())
            stall = self._p.reduce.stalled()
            if stall is not None:
                await self._carry_out(machine.stalled(stall.peers, stall.late, now))
            await self._carry_out(machine.relayed(*self._p.reduce.relayed))
            await self._carry_out(self._going_back.advise(machine, now))
        if self.machine is machine and machine.phase is not Phase.DECIDED:
            await self._carry_out(self.amending.advise(machine, now))
        if self.machine is machine and machine.phase is not Phase.DECIDED:
            await self._keep_busy(machine, now)
            await self._try_leave(machine, now)

    # -- effects ---------------------------------------------------------------------------------------------

    async def _carry_out(self, effects: Iterable[Effect]) -> None:
        decided: Certificate | None = None
        closing: list[CloseOff] = []
        for effect in batched(effects):
            if isinstance(effect, tuple):
                await trio.to_thread.run_sync(self._p.store.persist, *effect)
                for record in effect:
                    self._p.log.persisted(record)
            elif isinstance(effect, Broadcast):
                self._p.links.broadcast(effect.message)  # type: ignore[arg-type]
            elif isinstance(effect, StartReduce | Repair):
                await self._follow(effect)
            elif isinstance(effect, CloseOff):
                closing.append(effect)
            elif isinstance(effect, Evicted):
                self._p.reduce.stop()
                self._p.log.planned(effect.plan)
            elif isinstance(effect, NeedFinals):
                if not self._transition.knows(effect.value.plan):  # it was not reduced here: from those who did
                    linked = self._p.links.linked()
                    self._p.reduce.fetch(effect.value, [peer for peer in effect.value.members if peer in linked])
            elif isinstance(effect, NeedState):
                self._going_back.need(effect.value)
            elif isinstance(effect, NeedEvidence):
                self.observer.need(effect.value)
            elif isinstance(effect, Mismatch):
                logger.error("round %d: the lead proposed another digest than was computed here", effect.value.round)
            elif isinstance(effect, Decided):
                decided = effect.certificate
        for asked in closing:
            chunks = await self._p.reduce.close_off(asked.lineage, asked.evicted)
            if self.machine is not None:
                await self._carry_out(self.machine.closed_off(asked, chunks, trio.current_time()))
        if decided is not None:
            await self._decided(decided)

    async def _follow(self, effect: StartReduce | Repair) -> None:
        plan = effect.plan
        self._p.log.planned(plan)
        self.observer.planned(plan)
        await self._p.holds.at(plan.round, "plan" if isinstance(effect, StartReduce) else "repair")
        if plan.planner == self._p.identity.peer_id:  # once the lanes are at work, what is queued waits for its turn
            await self._p.links.drain(deadline_s=PLAN_OUT_S)
        if isinstance(effect, Repair):
            self._p.reduce.repair(plan, self._part.encoded, dict(effect.held))
        else:
            self._p.reduce.start(plan, self._part.encoded)

    # -- state -----------------------------------------------------------------------------------------------

    async def _go_on(self) -> None:
        """Take part from here, if the state at the head is here, no round is under way and nothing is against it."""
        if self.machine is not None or not self._custody.current or self._stands_still():
            return
        if self._resumed:
            await self._part.settle()
            self._p.log.caught_up(self._custody.head.state_round)
        else:
            self._resumed = True
            await self._part.resume()
        await self._begin_round_or_finish()

    async def _take_genesis(self, event: AnotherGenesis) -> None:
        """Begin the first round again, on the first founder's S(0)."""
        if await self._sync.take_genesis(event):
            self._abandon_round()
            await self._begin_round()

    def _stands_still(self) -> bool:
        """Whether this node may sign nothing in what comes after its head: a fork, or its key in use elsewhere."""
        self._still = self._p.standstill.phase(self._custody.head)
        return self._still is not None

    def _abandon_round(self) -> None:
        self._p.reduce.stop()
        self.machine = None

    # -- rounds ----------------------------------------------------------------------------------------------

    async def _begin_round(self) -> None:
        """Start the round after the head of the chain, whose state is here, unless this node is to stand still."""
        if self._stands_still():
            self._abandon_round()
            return
        head, chain = self._custody.head, self._custody.chain
        manifest = chain.amended(head.next_round) or self._p.config.manifest
        self._settings = RoundSettings.of(manifest, self._fragments.of_round(head.next_round).numel)
        self.observer.began(head, self._settings)
        machine, unfinished = machine_after_head(
            self._p,
            self._settings,
            returners=self._part.recent_members(),
            newcomers=self._sync.newcomers,
            probation=self._probation,
        )
        self.machine = machine
        self._transition.begin_round(trio.current_time())
        self._p.reduce.forget()
        self.departure.begin_round()
        self._solitude.begin_round(trio.current_time())
        await self._going_back.begin_round()
        await self.amending.begin_round()
        role = self._part.role(finished=self.finished or self.leaving)
        self._p.log.started(head, role)
        await self._p.holds.at(machine.round, "train")
        alive = machine.peers_alive(self._alive, trio.current_time(), suspected=self._p.suspected())
        proofs = [machine.proven(*one, trio.current_time()) for one in self.observer.proven(chain).items()]
        await self._carry_out([*unfinished, *alive, *(effect for effects in proofs for effect in effects)])
        if self.machine is not machine:  # its own vote of before a restart was enough
            return
        await self._carry_out(machine.ready(self._part.announcement(role), trio.current_time()))
        if self.machine is not machine:
            return
        await self._inbox.until_begun(next_position(head), self._p.reduce.neighbours(head.members))
        await self._part.stand_on_head()  # may take a while, in which the others know already that they have to wait
        if role == TRAINING:
            await self._part.train()
        for heard in self._inbox.take_early():
            await self._handle_heard(heard)

    async def _set_paused(self, paused: bool) -> None:
        """Pausing before the contribution is made makes this node an observer of the round; after it, of the next."""
        await (self._desk.pause() if paused else self._desk.resume())
        machine = self.machine
        if machine is None or not machine.agreement.member or self._part.made is not None:
            return
        role = self._part.role(finished=self.finished or self.leaving)
        await self._carry_out(machine.ready(self._part.absent(role), trio.current_time()))
        if role == TRAINING and self.machine is machine:
            await self._part.train()

    async def _handle_trainer(self, event: TrainerEvent) -> None:
        self._going_back.note(event)
        if isinstance(event, Contribution):
            await self._contribute(event)
        elif isinstance(event, Restarted):
            waited_for = self.machine is not None and self._part.made is None and not self._desk.paused
            if waited_for:
                await self._part.train()

    async def _contribute(self, event: Contribution) -> None:
        machine = self.machine
        if machine is None or machine.round != event.round or (self.leaving and machine.holds_alone()):
            return
        ready = await self._part.contribute(event)
        if ready is not None:
            if self._part.made is not None:
                self.observer.contributed(self._part.made)
            await self._carry_out(machine.ready(ready, trio.current_time()))

    async def _handle_reduced(self, event: Reduced) -> None:
        finals, machine, state = event.finals, self.machine, self._custody.state
        if machine is None or state is None or finals.plan.base != machine.previous.hash:
            return
        if not self._may_stand(finals.plan, machine):
            return
        report = await self._transition.work_out(finals, event.seconds)
        self.observer.reduced(finals, report)
        await self._p.holds.at(machine.round, "certify")
        participants = [participant.peer for participant in finals.plan.participants]
        await self._carry_out(machine.reduced(report, trio.current_time(), participants=participants))

    def _may_stand(self, plan: Plan, machine: RoundMachine) -> bool:
        """Whether finals are by a plan that the settings allow; one that was fetched no machine has looked at."""
        try:
            check_plan(plan, plan.planner, machine.previous, self._settings)
        except RemoteError as error:
            logger.warning("round %d: %s", plan.round, error)
            return False
        return True

    # -- certificate -----------------------------------------------------------------------------------------

    async def _decided(self, certificate: Certificate) -> None:
        """The round is certified: extend the chain, apply, and go on."""
        value = certificate.value
        candidate = self._transition.candidate(value)
        await self._p.resumption.written(value.term, value.round)
        await self._custody.append(certificate)
        self._p.links.broadcast(certificate)
        self.observer.certified(certificate)
        self._p.reduce.stop()
        if value.rollback or candidate is None:
            self.machine = None  # after a rollback, the next term begins on a state of long ago
            await self._go_on_or_catch_up()
            return
        await self._part.settle()
        await self._transition.apply(certificate, candidate)
        await self._begin_round_or_finish()

    # -- other terms -----------------------------------------------------------------------------------------

    async def _take_rebase(self, peer: PeerId, rebase: Rebase) -> None:
        try:
            await self.rebase(rebase)
        except RemoteError as error:
            logger.info("%s: %s", peer, error)
            self._sync.ahead(peer, next_position(rebase.value))  # it may stand on what is not here yet

    async def rebase(self, rebase: Rebase) -> None:
        """Go on in the term that the authority opened. Raises RemoteError if it cannot have, StorageError."""
        if not await self._custody.append(rebase):
            return
        self._p.links.broadcast(rebase)
        self._abandon_round()
        await self._go_on_or_catch_up()

    async def _go_on_or_catch_up(self) -> None:
        if not self._custody.current or not self._resumed:
            self._sync.hurry()
            return
        await self._part.settle()
        await self._begin_round_or_finish()

    async def _begin_round_or_finish(self) -> None:
        """Go on, or, when the rounds asked for are done, see that the others know it and leave."""
        if not self.departure.rounds_done(self._custody.head.state_round):
            await self._begin_round()
            return
        self.departure.finished = True
        self.machine = None
        with trio.move_on_after(LINGER_S):
            while not self.departure.known_to(self._p.links.linked()):
                event = await self._inbox.next()
                if isinstance(event, Heard):
                    await self._handle_heard(event)
        self.ask_to_leave()
        await self._begin_round()

    # -- alone, and leaving ----------------------------------------------------------------------------------

    async def _keep_busy(self, machine: RoundMachine, now: float) -> None:
        """Do what solitude advises: train on without a quorum, or contribute where nobody does."""
        may_train = not self._desk.paused and self.departure.may_train(machine)
        contributed, resting = self._part.made is not None, self._desk.resting
        gradients = self._p.config.manifest.sync.exchanges_gradients  # of which an anchor gives this node one
        advice = self._solitude.advise(machine, now, contributed=contributed, may_train=may_train, resting=resting)
        if advice.say_no_quorum and self.missing():
            self._p.on_progress(no_quorum(self.missing(), waits=gradients))
        if advice.train_on and not gradients:
            await self._part.train(contribute=False)
        if advice.contribute_after_all:
            await self._carry_out(machine.ready(self._part.absent(TRAINING), now))
            await self._part.train()

    async def _try_leave(self, machine: RoundMachine, now: float) -> None:
        """Promise to sign nothing more, where the round allows and somebody stays; then `left` is set."""
        parting = self.departure.advise(machine, now)
        if parting is Parting.PROMISE:
            effects = machine.leave(now)
            await self._carry_out(effects)
            if any(isinstance(effect, Persist) for effect in effects):
                self.left.set()
        elif parting is Parting.REST:
            await self._carry_out(machine.ready(self._part.absent(OBSERVER), now))
        elif parting is Parting.GO:
            self.left.set()

    def _show_phase(self) -> None:
        if self.phase != self._shown_phase:
            self._shown_phase = self.phase
            self._p.on_progress(PhaseChanged(phase=self.phase, round=self._custody.head.next_round))
