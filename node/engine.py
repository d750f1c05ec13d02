"""The engine: one task that feeds the round machine and carries out what it decides.

Everything that happens to a round arrives here as one input after the other: messages of peers, who is alive, what the
trainer made, finals that are complete, the clock, the user's orders. The machine answers with effects, and these are
carried out in order: a `Persist` is on disk before anything after it is sent. What takes long (a reduction, fetching
finals) runs beside the engine and comes back as an input.

    obtain state ─► begin round ─► machine: ready, plan, reduce, propose, vote ─► certificate ─► apply ─► begin round
         ▲                                                                             │
         └──────────────── behind, or the state cannot be computed here ◄──────────────┘
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import trio

from shoal.collectives.contribution import EncodedContribution
from shoal.collectives.finals import Finals
from shoal.collectives.grid import Grid
from shoal.collectives.outer import OuterSettings
from shoal.collectives.partition import deal
from shoal.collectives.state import CertifiedState
from shoal.node.audit import AuditTrail
from shoal.node.candidates import Candidates
from shoal.node.config import NodeConfig
from shoal.node.contributions import Contributions, Made
from shoal.node.custody import Custody
from shoal.node.holds import Holds
from shoal.node.inbox import Heard, Inbox, Input, Linked, Own, Reduced, SetPaused, Tick
from shoal.node.outcome import Notice, PhaseChanged, Progress, RoundCertified
from shoal.node.reducing import ReduceDesk
from shoal.node.round_log import RoundLog
from shoal.node.solitude import Solitude
from shoal.node.states import StateShelf
from shoal.node.store import Store
from shoal.node.trainer import Restarted, TrainerEvent
from shoal.node.trainer_messages import Contribution
from shoal.node.training import TrainingDesk
from shoal.protocol.agreement import Broadcast, Decided, DurableRecord, Mismatch, NeedFinals, Persist
from shoal.protocol.errors import ConfigError, LocalError, NetworkError, RemoteError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.messages import Certificate, Leave, Message, Plan, Ready, RoundMessage, Value
from shoal.protocol.planning import JOINER, OBSERVER, TRAINING, RoundSettings, absent_ready
from shoal.protocol.round import CloseOff, Effect, Evicted, Phase, Repair, RoundMachine, StartReduce
from shoal.swarm.lanes import LanePool
from shoal.swarm.links import Links

ANSWER_PERIOD_S = 1.0
RETRY_S = 1.0
LINGER_S = 5.0
LEAVE_PATIENCE_S = 20.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What the engine works with; made by the daemon."""

    config: NodeConfig
    identity: Identity
    store: Store
    custody: Custody
    shelf: StateShelf
    links: Links
    lanes: LanePool
    reduce: ReduceDesk
    desk: TrainingDesk
    log: RoundLog
    holds: Holds
    audit: AuditTrail
    traffic_bytes: Callable[[], dict[str, int]]
    suspected: Callable[[], frozenset[PeerId]]
    on_progress: Callable[[Progress], None]


class Engine:
    """A node's rounds, from obtaining the state to leaving."""

    def __init__(self, parts: EngineParts) -> None:
        self._p = parts
        self._me = parts.identity.peer_id
        self._custody = parts.custody
        self._desk = parts.desk
        sync = parts.config.manifest.sync
        self._candidates = Candidates(
            shelf=parts.shelf,
            outer=OuterSettings(lr=sync.outer_lr, momentum=sync.outer_momentum),
            durable=parts.config.manifest.round.durability == "disk",
        )
        self._inbox = Inbox()
        self._contributions: Contributions
        self._settings: RoundSettings
        self.machine: RoundMachine | None = None
        self._alive: frozenset[PeerId] = frozenset()
        self._round_started = 0.0
        self._behind: set[PeerId] = set()
        self._retry_at = 0.0
        self._answered: dict[PeerId, float] = {}
        self._known_certified: set[PeerId] = set()
        self._solitude = Solitude()
        self._shown_phase = ""
        self._leave_asked_at: float | None = None
        self._finished = False
        self.left = trio.Event()

    # -- what others call ------------------------------------------------------------------------------------

    def hear(self, peer: PeerId, message: Message) -> None:
        """A round message arrived."""
        self._inbox.hear(Heard(peer, message))

    def put(self, event: Own) -> None:
        """An input of this node's own: from its trainer, its reduction, its user."""
        self._inbox.put(event)

    def reduced(self, finals: Finals, seconds: float) -> None:
        """The finals of a plan are complete."""
        self.put(Reduced(finals, seconds))

    def alive(self, peers: frozenset[PeerId]) -> None:
        """Who is believed alive changed."""
        self._alive = peers
        self.put(Tick())

    def linked(self, peer: PeerId, round: int) -> None:
        """A link came up; the peer's record says that it has certified up to `round`.

        What is said to it waits its turn: nothing may be said before it is on disk.
        """
        self.put(Linked(peer, round))

    def ask_to_leave(self) -> None:
        """Leave the swarm as soon as the round allows; `left` is set then."""
        if self._leave_asked_at is None:
            self._leave_asked_at = trio.current_time()
            self.put(Tick())

    @property
    def finished(self) -> bool:
        """Whether the rounds asked for are done: the node stops by itself."""
        return self._finished

    @property
    def leaving(self) -> bool:
        """Whether leaving was asked for."""
        return self._leave_asked_at is not None

    @property
    def phase(self) -> str:
        """What the node is doing, for its user."""
        if self.leaving:
            return "leaving"
        if self.machine is None:
            return "done" if self._finished else "joining"
        if self._solitude.without_quorum:
            return "no quorum"
        return "paused" if self._desk.paused else self.machine.phase.value

    # -- the loop --------------------------------------------------------------------------------------------

    async def run(self, *, numel: int) -> None:
        """Take part in rounds until cancelled, or until this node has left.

        Raises StorageError when something that must be durable cannot be written, ConfigError when the swarm's
        parameters are not this workload's.

        Cancellation: what was persisted stands.
        """
        manifest = self._p.config.manifest
        grid = Grid(numel, manifest.round.chunk_values)
        codec, staleness_rounds = manifest.sync.codec, manifest.round.staleness_rounds
        self._contributions = Contributions(grid, codec, staleness_rounds, sender=self._me)
        self._settings = RoundSettings(
            numel=numel,
            chunk_values=grid.chunk_values,
            codec=manifest.sync.codec,
            grace_s=manifest.round.grace_s,
            reduce_deadline_s=manifest.round.reduce_deadline_s,
            weight_cap=manifest.round.weight_cap,
        )
        self._custody.expect(manifest.sync.codec, numel, grid.chunk_values)
        await self._obtain_state()
        await self._begin_round_or_finish()
        while not self.left.is_set():  # who has left takes part in nothing more, not even as a returner
            await self._handle(await self._inbox.next())

    async def _handle(self, event: Input) -> None:
        if isinstance(event, Heard):
            await self._handle_heard(event)
        elif isinstance(event, Reduced):
            await self._handle_reduced(event)
        elif isinstance(event, SetPaused):
            await self._set_paused(event.paused)
        elif isinstance(event, Linked):
            if event.round > self._custody.head.round:
                self._behind.add(event.peer)
            for message in () if self.machine is None else self.machine.current():
                self._p.links.send(event.peer, message)  # type: ignore[arg-type]
        elif isinstance(event, Tick):
            await self._handle_tick()
        else:
            await self._handle_trainer(event)

    async def _handle_heard(self, heard: Heard) -> None:
        message, machine, round = heard.message, self.machine, heard.round
        current = self._custody.head.round + 1
        if isinstance(message, Certificate) and round >= current - 1:
            self._known_certified.add(heard.peer)
        if round < current:
            self._answer_late(heard.peer, round, message)
        elif round > current or machine is None:
            self._inbox.keep_for_later(heard)
            if round > current:
                self._behind.add(heard.peer)
        elif isinstance(message, Ready) and await self._other_genesis(heard.peer, message):
            return
        else:
            try:
                effects = machine.receive(heard.peer, message, trio.current_time())
            except RemoteError as error:
                logger.warning("round %d: %s", round, error)
                return
            await self._carry_out(effects)

    def _answer_late(self, peer: PeerId, round: int, message: Message) -> None:
        """Anything of an older round is answered with its certificate, at most once a second per peer."""
        now = trio.current_time()
        due = now - self._answered.get(peer, float("-inf")) > ANSWER_PERIOD_S
        if due and isinstance(message, RoundMessage) and not isinstance(message, Leave):
            certificate = self._custody.chain.certificate(round)
            if certificate is not None:
                self._answered[peer] = now
                self._p.links.send(peer, certificate)

    async def _handle_tick(self) -> None:
        now = trio.current_time()
        self._show_phase()
        if (self._behind or self.machine is None) and now >= self._retry_at:
            await self._catch_up()
        machine = self.machine
        if machine is None:
            if self.leaving:
                self.left.set()
            return
        await self._carry_out(machine.peers_alive(self._alive, now, suspected=self._p.suspected()))
        if self.machine is machine and machine.phase is not Phase.DECIDED:
            stall = self._p.reduce.stalled()
            if stall is not None:
                await self._carry_out(machine.stalled(stall.peers, stall.late, now))
            await self._keep_busy(machine, now)
            await self._try_leave(machine, now)

    # -- effects ---------------------------------------------------------------------------------------------

    async def _carry_out(self, effects: Iterable[Effect]) -> None:
        decided: Certificate | None = None
        closing: list[CloseOff] = []
        for effect in effects:
            if isinstance(effect, Persist):
                await trio.to_thread.run_sync(self._p.store.persist, effect.record)
                self._p.log.persisted(effect.record)
            elif isinstance(effect, Broadcast):
                self._p.links.broadcast(effect.message)  # type: ignore[arg-type]
            elif isinstance(effect, StartReduce):
                await self._start_reduce(effect.plan)
            elif isinstance(effect, CloseOff):
                closing.append(effect)
            elif isinstance(effect, Repair):
                await self._repair(effect)
            elif isinstance(effect, Evicted):
                self._p.reduce.stop()
                self._p.log.planned(effect.plan)
            elif isinstance(effect, NeedFinals):
                self._fetch_finals(effect.value)
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

    async def _start_reduce(self, plan: Plan) -> None:
        self._p.log.planned(plan)
        await self._p.holds.at(plan.round, "plan")
        self._p.reduce.start(plan, self._encoded())

    async def _repair(self, repair: Repair) -> None:
        self._p.log.planned(repair.plan)
        await self._p.holds.at(repair.plan.round, "repair")
        self._p.reduce.repair(repair.plan, self._encoded(), dict(repair.held))

    def _encoded(self) -> EncodedContribution | None:
        made = self._contributions.made
        return None if made is None else made.encoded

    def _fetch_finals(self, value: Value) -> None:
        """A plan that this node did not reduce is proposed: get its finals from those who did."""
        if self._candidates.get(value.plan) is None:
            self._p.reduce.fetch(value, [p for p in value.members if p in self._p.links.linked()])

    # -- state -----------------------------------------------------------------------------------------------

    async def _obtain_state(self) -> None:
        """Get the state at the head of the chain: from disk, as a founder from the seed, or from others."""
        await self._custody.load()
        head = self._custody.head
        if head.round == 0 and self._me in head.members:
            await self._adopt(await self._desk.initial_state())
        while not self._custody.current:
            self._show_phase()
            if self.leaving:
                self.left.set()
            await self._fetch_state()
            if not self._custody.current:
                await trio.sleep(RETRY_S)

    async def _fetch_state(self) -> None:
        peers = await self._custody.extend(self._behind, others=self.machine is None)
        self._behind.clear()
        if not self._custody.current:
            state = await self._custody.fetch(peers)
            if state is not None:
                await self._adopt(state)

    async def _catch_up(self) -> None:
        """Bring chain and state up to date, as far as peers can help; what they cannot is tried again later."""
        self._retry_at = trio.current_time() + RETRY_S
        before = self._custody.head.round
        await self._fetch_state()
        if self._custody.head.round > before:
            self._p.reduce.stop()
            self.machine = None
        if self.machine is None and self._custody.current:
            await self._settle(self._custody.head, peers=self._p.links.linked())
            self._p.log.caught_up(self._custody.head.round)
            await self._begin_round_or_finish()

    async def _other_genesis(self, peer: PeerId, ready: Ready) -> bool:
        """Before anything is certified, take the first founder's S(0) where this machine drew another.

        The same seed may give other last bits on another CPU; nothing but the first founder's word decides then.
        """
        head = self._custody.head
        if head.round or peer != head.planner or peer == self._me or ready.state == self._custody.digest:
            return False
        if any(record.kind in ("vote", "propose") for record in self._p.store.durable_records()):
            return False  # others may have decided on a state that follows from the one here
        state = await self._custody.fetch_initial(peer)
        if state is not None:
            logger.warning("the initial parameters drawn here differ from the first founder's; using theirs")
            self._p.reduce.stop()
            self.machine = None
            await self._adopt(state)
            await self._begin_round()
        return True

    async def _adopt(self, state: CertifiedState) -> None:
        if state.layout_hash != self._desk.layout_hash:
            raise ConfigError(
                "the swarm's model has other parameters than this workload builds here; install the same version of it"
            )
        await self._custody.adopt(state)

    # -- rounds ----------------------------------------------------------------------------------------------

    async def _begin_round(self) -> None:
        """Start the round after the head of the chain, whose state is here."""
        state, head = self._custody.state, self._custody.head
        assert state is not None
        self.machine = machine = RoundMachine(
            identity=self._p.identity,
            previous=head,
            state=self._custody.digest,
            settings=self._settings,
            deal=deal,
            returners=self._recent_members(),
        )
        records = [r for r in self._p.store.durable_records() if (r.round, r.term) == (head.round + 1, head.term)]
        unfinished = machine.restore(records)
        self._candidates.clear()
        self._p.reduce.forget()
        self._known_certified.clear()
        self._solitude.begin_round(trio.current_time())
        self._round_started = trio.current_time()
        role = self._role(records)
        self._p.log.started(head, role)
        await self._p.holds.at(machine.round, "train")
        await self._desk.stand_on(state, taken=self._contributions.taken)
        alive = machine.peers_alive(self._alive, trio.current_time(), suspected=self._p.suspected())
        await self._carry_out([*unfinished, *alive])
        await self._carry_out(machine.ready(self._absent(role), trio.current_time()))
        if role == TRAINING and self.machine is machine:
            await self._train()
        for heard in self._inbox.take_early():
            await self._handle_heard(heard)

    def _recent_members(self) -> frozenset[PeerId]:
        return self._custody.chain.recent_members(self._p.config.manifest.round.staleness_rounds)

    def _role(self, records: list[DurableRecord]) -> str:
        # A contribution that was announced before a restart cannot be made again the same.
        if any(record.kind == "ready" for record in records) or self._desk.paused or self._finished:
            return OBSERVER
        return TRAINING if self._me in self._recent_members() else JOINER

    def _absent(self, role: str) -> Ready:
        return absent_ready(role, self._custody.head, self._custody.digest)

    async def _train(self, *, contribute: bool = True) -> None:
        state = self._custody.state
        assert state is not None
        await self._desk.train(self._custody.head, self._me, state.tokens, contribute=contribute)

    async def _set_paused(self, paused: bool) -> None:
        """Pausing before the contribution is made makes this node an observer of the round; after it, of the next."""
        await (self._desk.pause() if paused else self._desk.resume())
        machine = self.machine
        if machine is None or not machine.agreement.member or self._contributions.made is not None:
            return
        await self._carry_out(machine.ready(self._absent(OBSERVER if paused else TRAINING), trio.current_time()))
        if not paused and self.machine is machine:
            await self._train()

    async def _handle_trainer(self, event: TrainerEvent) -> None:
        if isinstance(event, Contribution):
            await self._contribute(event)
        elif isinstance(event, Restarted):
            waited_for = self.machine is not None and self._contributions.made is None and not self._desk.paused
            if waited_for:
                await self._train()

    async def _contribute(self, event: Contribution) -> None:
        """Encode what the trainer made, commit to it, and announce it."""
        machine = self.machine
        wanted = machine is not None and machine.round == event.round and self._contributions.made is None
        if machine is None or not wanted or not self._desk.is_current(event):
            return
        try:
            made = await trio.to_thread.run_sync(self._make, event)
        except LocalError as error:
            logger.error("round %d: this node contributes nothing: %s", event.round, error)
            await self._carry_out(machine.ready(self._absent(OBSERVER), trio.current_time()))
            return
        head = self._custody.head
        await trio.to_thread.run_sync(self._p.audit.contribution, head.term, made)
        mark = DurableRecord(kind="ready", term=head.term, round=machine.round)
        await trio.to_thread.run_sync(self._p.store.persist, mark)
        self._p.log.contributed(event, made.tokens)
        ready = made.ready(
            head,
            self._custody.digest,
            upload=_at_most(self._p.config.max_upload, self._p.reduce.rates[0]),
            download=_at_most(self._p.config.max_download, self._p.reduce.rates[1]),
            reaches=self._p.links.linked() - self._p.reduce.unreachable,
        )
        await self._carry_out(machine.ready(ready, trio.current_time()))

    def _make(self, event: Contribution) -> Made:
        if not event.tokens:
            raise LocalError("its inner steps counted no tokens; every loss may have been infinite or not a number")
        values, base = self._desk.pseudo_gradient(), self._custody.head.hash
        return self._contributions.make(event.round, event.number, event.tokens, values, base=base)

    async def _handle_reduced(self, event: Reduced) -> None:
        """Work out what S(e) will be, keep the finals where they must be kept, and report."""
        finals, machine, state = event.finals, self.machine, self._custody.state
        if machine is None or state is None or not finals.plan.round == machine.round == state.round + 1:
            return
        candidate = await self._candidates.work_out(state, finals, event.seconds)
        self._p.log.reduced(finals, candidate.digest, event.seconds)
        await self._p.holds.at(machine.round, "certify")
        await self._carry_out(machine.reduced(candidate.report(self._custody.head), trio.current_time()))

    # -- certificate -----------------------------------------------------------------------------------------

    async def _decided(self, certificate: Certificate) -> None:
        """The round is certified: extend the chain, apply, and go on."""
        value = certificate.value
        candidate = self._candidates.of(value)
        await self._custody.append(certificate)
        self._p.links.broadcast(certificate)
        self._p.reduce.stop()
        if candidate is None:
            self.machine = None
            await self._catch_up()
            return
        await self._settle(value, peers=())
        await self._custody.follow(await self._candidates.take(candidate), candidate.header)
        await trio.to_thread.run_sync(self._p.audit.applied, value.term, candidate.finals)
        seconds = trio.current_time() - self._round_started
        self._p.log.certified(
            certificate,
            candidate.finals,
            reduce_s=candidate.seconds,
            total_s=seconds,
            traffic=self._p.traffic_bytes(),
        )
        self._p.on_progress(
            RoundCertified(
                round=value.round,
                members=len(value.members),
                contributors=candidate.finals.contributors,
                loss=self._desk.loss,
                seconds=seconds,
            )
        )
        await self._begin_round_or_finish()

    async def _begin_round_or_finish(self) -> None:
        """Go on, or, when the rounds asked for are done, see that the others know it and leave."""
        limit = self._p.config.rounds
        if limit is None or self._custody.head.round < limit:
            await self._begin_round()
            return
        self._finished = True
        self.machine = None
        with trio.move_on_after(LINGER_S):
            while not self._known_certified >= self._p.links.linked():
                event = await self._inbox.next()
                if isinstance(event, Heard):
                    await self._handle_heard(event)
        self.ask_to_leave()
        await self._begin_round()

    async def _settle(self, value: Value, *, peers: Iterable[PeerId]) -> None:
        """Count this node's contribution as the certificate of its round says; `peers` are asked for what it says."""
        made = self._contributions.made
        if made is None or made.round > value.round:
            return
        try:
            finals = await self._custody.finals(made.round, list(peers))
        except NetworkError:
            # Nobody can say whether it was counted; once is the limit, so it was.
            included: tuple[bool, ...] | None = (True,) * made.encoded.grid.chunks
        else:
            place = finals.plan.number(self._me)
            # A plan may name what this node announced before a restart; what it made since is not in it.
            same = place is not None and finals.plan.participants[place].root == made.encoded.root
            included = finals.included(place) if place is not None and same else None
        await trio.to_thread.run_sync(self._contributions.settle, made.round, included)

    # -- alone, and leaving ----------------------------------------------------------------------------------

    async def _keep_busy(self, machine: RoundMachine, now: float) -> None:
        """Do what solitude advises: train on without a quorum, or contribute where nobody does."""
        may_train = not self._desk.paused and not self.leaving
        contributed = self._contributions.made is not None
        advice = self._solitude.advise(machine, now, contributed=contributed, may_train=may_train)
        if advice.say_no_quorum:
            text = ", ".join(machine.missing())
            self._p.on_progress(Notice(text=f"no quorum, training on locally; start these members again: {text}"))
        if advice.train_on:
            await self._train(contribute=False)
        if advice.contribute_after_all:
            await self._carry_out(machine.ready(self._absent(TRAINING), now))
            await self._train()

    async def _try_leave(self, machine: RoundMachine, now: float) -> None:
        """Promise to sign nothing more, where the round allows and somebody stays; then `left` is set."""
        if self._leave_asked_at is None or self.left.is_set():
            return
        overdue = now - self._leave_asked_at >= LEAVE_PATIENCE_S
        if not machine.agreement.member or not machine.leave_needs_promise() or overdue:
            # A vote under way is still waited for: the others may need it.
            if machine.phase is not Phase.CERTIFY or overdue:
                self.left.set()
        elif machine.phase in (Phase.TRAIN, Phase.PLAN):
            effects = machine.leave(now)
            await self._carry_out(effects)
            if any(isinstance(effect, Persist) for effect in effects):
                self.left.set()

    def _show_phase(self) -> None:
        if self.phase != self._shown_phase:
            self._shown_phase = self.phase
            self._p.on_progress(PhaseChanged(phase=self.phase, round=self._custody.head.round + 1))


def _at_most(cap: int | None, measured: int) -> int:
    """A rate for others to plan with, in bytes/s: what was measured, under the cap; 0 if nothing is known."""
    return min((rate for rate in (cap, measured) if rate), default=0)
