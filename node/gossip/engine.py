"""The engine of the strategy `gossip`: rounds of training and exchange with one partner, certified by nobody.

It stands where `Engine` stands for the other strategies. One task takes one input after the other and carries out what
`PairingMachine` answers; a partner's vector is fetched beside it and comes back as an input.

    obtain state ─► train ─► vector ─► partner ─► fetch its vector ─► outer step ─► train …
                                          └─ nobody: outer step alone ──▲

Everything of a node is its own: weights, momentum, round, and the moments of its optimizer. They are saved beside the
rounds, and a restart goes on from what is on disk. Nothing that a node signs here can contradict what it signed before,
so nothing waits for the disk.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio

from shoal.collectives.codecs import F32
from shoal.collectives.gossip import GossipVector
from shoal.collectives.state import CertifiedState, StateHeader
from shoal.node.gossip.exchange import GossipExchange
from shoal.node.gossip.moments import GossipMoments
from shoal.node.gossip.start import GossipStart
from shoal.node.gossip.step import GossipSteps
from shoal.node.outcome import PhaseChanged, RoundStepped, StateFetched
from shoal.node.rounds.engine_parts import EngineParts
from shoal.node.rounds.inbox import Inbox, Own, ToHandle, Turn
from shoal.node.state.state_saver import StateSaver
from shoal.node.training.layouts import Layouts
from shoal.node.training.trainer import Restarted
from shoal.node.training.trainer_messages import Contribution, Snapshotted
from shoal.protocol.chain import Position
from shoal.protocol.errors import LocalError, NetworkError, RemoteError
from shoal.protocol.gossip_messages import (
    AskStanding,
    Decline,
    Offer,
    Standing,
    Taken,
    Withdraw,
)
from shoal.protocol.identity import PeerId
from shoal.protocol.inputs import Linked, Received, SetPaused, Tick
from shoal.protocol.messages import NO_HASH, Message
from shoal.protocol.pairing import Alone, Effect, Fetch, PairingMachine, Phase, Say
from shoal.protocol.places import Contributors

TIMEOUT_MIN_S = 3.0
TIMEOUT_SHARE = 0.5
"""A candidate may take this share of what this node's own inner steps took, between TIMEOUT_MIN_S and `grace_s`."""
LINGER_S = 5.0
"""A partner may still be fetching when this node is done."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Made:
    """This round's work: the trainer's message, Δ ``(numel,) float32``, and the vector that others can fetch."""

    event: Contribution
    delta: F32
    vector: GossipVector


class GossipEngine:
    """A node's rounds under `gossip`, from obtaining a state to leaving."""

    def __init__(self, parts: EngineParts, exchange: GossipExchange, layouts: Layouts) -> None:
        manifest = parts.config.manifest
        self._p = parts
        self._exchange = exchange
        self._layouts = layouts
        self._me = parts.identity.peer_id
        self._founders = manifest.swarm.founders
        self._grace_s = manifest.round.grace_s
        self._inbox = Inbox()
        self._saver = StateSaver(parts.cache)
        self._moments = GossipMoments(parts.store.folder, parts.training_client)
        self._alive: frozenset[PeerId] = frozenset()
        self._steps: GossipSteps
        self._start: GossipStart | None = None
        self._state: CertifiedState | None = None
        self._made: _Made | None = None
        self._taken = 0
        self._began_at = 0.0
        self._leave_asked_at: float | None = None
        self._shown_phase = ""
        self._exchanging: Fetch | None = None  # what is fetched, or is to be
        self._fetch_changed = trio.Event()
        self._fetching = trio.CancelScope()
        self._obtaining = trio.CancelScope()
        self.machine: PairingMachine | None = None
        self.contributors = Contributors()
        self.left = trio.Event()
        self.finished = False

    # -- what others call ------------------------------------------------------------------------------------

    def hear(self, peer: PeerId, message: Message) -> None:
        """A message arrived."""
        self._inbox.hear(Received(peer, message))

    def put(self, event: Own) -> None:
        """An input of this node's own: from its trainer, its user."""
        self._inbox.put(event)

    def alive(self, peers: frozenset[PeerId]) -> None:
        """Take over the peers that are now believed alive."""
        self._alive = peers
        self.put(Tick())

    def linked(self, peer: PeerId, certified: Position) -> None:
        """A link came up."""
        self.put(Linked(peer, certified))

    def ask_to_leave(self) -> None:
        """Leave the swarm once nobody is fetching from this node, or after LINGER_S; `left` is set then."""
        if self._leave_asked_at is None:
            self._leave_asked_at = trio.current_time()
            self._obtaining.cancel()  # a snapshot may take hours to come
            self.put(Tick())

    @property
    def leaving(self) -> bool:
        """True if leaving was asked for."""
        return self._leave_asked_at is not None

    @property
    def state_round(self) -> int:
        """The round of the newest state, 0 before there is one."""
        return 0 if self._state is None else self._state.round

    @property
    def others(self) -> frozenset[PeerId]:
        """The other nodes that are alive and linked, and train the same model: among them are this node's partners."""
        return self._layouts.alike(self._alive & self._p.links.linked())

    @property
    def phase(self) -> str:
        """Phase that the node is in, for its user."""
        if self.leaving:
            return "leaving"
        if self.machine is None:
            return "joining"
        return "paused" if self._p.training_client.paused and self._made is None else self.machine.phase.value

    # -- the loop --------------------------------------------------------------------------------------------

    async def run(self, *, numel: int, buffers: int = 0) -> None:
        """Take part until cancelled, or until this node has left. See `Rounds`.

        Raises StorageError when the state cannot be written, ConfigError when the parameters of the first founder,
        or of the peer that this node is to begin on, are others.
        Cancellation: the newest state is saved.
        """
        self._steps = GossipSteps(self._p.config.manifest, self._me, numel, buffers)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._saver.run)
            nursery.start_soon(self._fetch_wanted)
            if await self._obtain():
                await self._begin_round_or_finish()
            while not self.left.is_set():
                await self._handle(await self._inbox.next())
            nursery.cancel_scope.cancel()

    async def _obtain(self) -> bool:
        """Come to a state; False if the node is to leave before it has one."""
        start = self._start = GossipStart(
            cache=self._p.cache,
            exchange=self._exchange,
            training_client=self._p.training_client,
            founder=self._me in self._founders,
            others=[peer for peer in self._founders if peer != self._me],
            accepts=self._layouts.accept,
            numel=self._steps.grid.numel,
            timeout_s=self._grace_s,
            on_progress=self._p.on_progress,
        )
        await trio.to_thread.run_sync(self._p.cache.tidy)
        state = await start.from_disk()
        if state is not None:
            self._saver.begin(state.round)
        else:
            with self._obtaining:
                state = await self._obtain_from_others(start)
            if state is None:
                self.left.set()
                return False
            await self._saver.save_now(state)
        self._start, self._state = None, state
        if state.round:
            self._p.log.caught_up(state.round)
        self.machine = PairingMachine(
            me=self._me,
            swarm=self._p.config.manifest.swarm_id,
            shape=(self._steps.codec, self._steps.grid.numel, self._steps.grid.chunk_values),
            timeout_s=TIMEOUT_MIN_S,
            round=state.round,
        )
        await trio.to_thread.run_sync(self._p.audit.began, state)
        await self._moments.restore(state.round)
        await self._p.training_client.stand_on(state, state.anchor, taken=0)
        return True

    async def _obtain_from_others(self, start: GossipStart) -> CertifiedState | None:
        """A peer's state, or a founder's own; None if the node is to leave. Cancellation: there is none."""
        while not self.leaving:
            event = await self._inbox.next()
            if isinstance(event, Received):
                await TAKERS[type(event.message)](self, event.peer, event.message)
                continue
            if isinstance(event, SetPaused):
                await self._set_paused(event.paused)
            self._show_phase()
            self._layouts.accept_model_of(self._founders[0])
            if start.ask_due(trio.current_time()):
                self._p.links.broadcast(AskStanding())
            state = await start.attempt(trio.current_time())
            if state is not None:
                return state
        return None

    async def _handle(self, event: ToHandle) -> None:
        machine = self.machine
        assert machine is not None
        if isinstance(event, Received):
            await TAKERS[type(event.message)](self, event.peer, event.message)
        elif isinstance(event, Turn):
            await event.take()
        elif isinstance(event, SetPaused):
            await self._set_paused(event.paused)
        elif isinstance(event, Contribution):
            await self._make(event)
        elif isinstance(event, Snapshotted):
            await self._moments.heard(event)
        elif isinstance(event, Restarted):
            self._moments.interrupted()
            if machine.phase is Phase.TRAINING:
                await self._train()
        elif isinstance(event, Tick):
            self._show_phase()
            self._layouts.accept_model_of(self._founders[0])
            await self._carry_out(machine.tick(self.others, trio.current_time()))
            await self._try_leave()

    # -- what peers say; `TAKERS` has what each message leads to ------------------------------------------------

    async def _tell_standing(self, peer: PeerId, message: AskStanding) -> None:
        self._p.links.send(peer, self._standing())

    async def _note_standing(self, peer: PeerId, message: Standing) -> None:
        if self._start is not None:
            self._start.note(peer, message, trio.current_time())

    async def _take_offer(self, peer: PeerId, message: Offer) -> None:
        if self.machine is None or self.finished or self.leaving:
            self._p.links.send(peer, Decline(round=message.round, mine=self.state_round))
        else:
            await self._pair(peer, message)

    async def _pair(self, peer: PeerId, message: Offer | Decline | Withdraw | Taken) -> None:
        machine = self.machine
        if machine is not None and not self.finished and not self.leaving:
            await self._carry_out(machine.receive(peer, message, trio.current_time()))

    async def _take_taken(self, peer: PeerId, message: Taken) -> None:
        if self.machine is not None:  # also while this node leaves: it waits for those that still fetch
            await self._carry_out(self.machine.receive(peer, message, trio.current_time()))

    def _standing(self) -> Standing:
        state = self._state
        digest = NO_HASH if state is None else self._p.cache.digest(state)
        return Standing(round=self.state_round, digest=digest)

    async def _carry_out(self, effects: Iterable[Effect]) -> None:
        assert self.machine is not None
        if self.machine.phase is not Phase.PAIRED:
            self._fetch(None)
        for effect in effects:
            if isinstance(effect, Say):
                self._p.links.send(effect.peer, effect.message)
            elif isinstance(effect, Fetch):
                self._fetch(effect)
            elif isinstance(effect, Alone):
                await self._step_alone(effect)

    def _fetch(self, wanted: Fetch | None) -> None:
        """Fetch this, and nothing else any more."""
        self._exchanging = wanted
        self._fetching.cancel()
        self._fetch_changed.set()

    # -- a round ---------------------------------------------------------------------------------------------

    async def _begin_round_or_finish(self) -> None:
        rounds = self._p.config.rounds
        if rounds is not None and self.state_round >= rounds:
            self.finished = True
            self.ask_to_leave()
            return
        machine = self.machine
        assert machine is not None
        self._made = None
        machine.begin(machine.next_round)
        self._began_at = trio.current_time()
        self._p.log.began(machine.round, members=len(self.others) + 1)
        await self._p.holds.at(machine.round, "train")
        if self._p.training_client.paused:
            await self._carry_out(machine.pause())
        else:
            await self._train()

    async def _train(self) -> None:
        assert self.machine is not None
        assert self._state is not None
        await self._p.training_client.train_round(self.machine.round, self._me, self._founders, self._state.tokens)

    async def _set_paused(self, paused: bool) -> None:
        machine = self.machine
        await (self._p.training_client.pause() if paused else self._p.training_client.resume())
        if machine is None:  # the first round begins as the trainer is told now
            return
        if paused:
            await self._carry_out(machine.pause())
        elif machine.phase is Phase.PAUSED:
            machine.resume()
            await self._train()

    async def _make(self, event: Contribution) -> None:
        """The inner steps are made: encode the vector, offer it, and find a partner."""
        machine = self.machine
        assert machine is not None
        if (
            self._made is not None
            or self.leaving
            or event.round != machine.round
            or not self._p.training_client.is_current(event)
        ):
            return
        try:
            self._made = made = await trio.to_thread.run_sync(self._encode, event, machine.catch_up())
        except LocalError as error:
            logger.error("round %d: what was learnt is dropped: %s", event.round, error)
            assert self._state is not None
            await self._p.training_client.stand_on(self._state, self._state.anchor, taken=self._taken, fresh=True)
            await self._train()
            return
        await self._moments.made(made.vector.offer.round)
        self._exchange.cache.put(made.vector)
        await trio.to_thread.run_sync(self._p.audit.vector, made.vector, made.delta)
        self._p.log.contributed(event, event.tokens)
        await self._p.holds.at(machine.round, "plan")
        machine.timeout_s = max(TIMEOUT_MIN_S, min(self._grace_s, TIMEOUT_SHARE * event.seconds))
        await self._carry_out(machine.made(made.vector.offer, self.others, trio.current_time()))

    def _encode(self, event: Contribution, round: int) -> _Made:
        assert self._state is not None
        delta = self._steps.delta(self._p.training_client.pseudo_gradient(self._state.numel))
        vector = self._steps.vector(self._state, delta, round)
        return _Made(event=event, delta=delta, vector=vector)

    async def _fetch_wanted(self) -> None:
        """One partner's vector after the other, each within `reduce_deadline_s`."""
        deadline_s = self._p.config.manifest.round.reduce_deadline_s
        while True:
            await self._fetch_changed.wait()
            self._fetch_changed = trio.Event()
            wanted, began = self._exchanging, trio.current_time()
            if wanted is None:
                continue
            with trio.CancelScope() as self._fetching:
                try:
                    with trio.fail_after(deadline_s):
                        values, _ = await self._exchange.vector(wanted.peer, wanted.offer, self._hold_at)
                    outcome = partial(self._fetched, wanted, values, trio.current_time() - began)
                except (NetworkError, RemoteError) as error:
                    outcome = partial(self._not_fetched, wanted, str(error))
                except trio.TooSlowError:
                    outcome = partial(self._not_fetched, wanted, f"did not bring its vector in {deadline_s:g} s")
                self.put(Turn(outcome))

    async def _hold_at(self, fetched: StateFetched) -> None:
        assert self.machine is not None
        await self._p.holds.at(self.machine.round, "reduce", fetched.done_chunks / fetched.total_chunks)

    async def _fetched(self, wanted: Fetch, values: F32, seconds: float) -> None:
        machine = self.machine
        assert machine is not None
        if machine.phase is not Phase.PAIRED or wanted is not self._exchanging:
            return
        self._p.links.send(wanted.peer, Taken(round=wanted.offer.round))
        await self._carry_out(machine.fetched(wanted.peer))
        await self._step(wanted, values, seconds, "")

    async def _not_fetched(self, wanted: Fetch, reason: str) -> None:
        assert self.machine is not None
        if wanted is not self._exchanging:
            return
        await self._carry_out(self.machine.failed(wanted.peer, f"brought no vector ({reason})", trio.current_time()))

    async def _step_alone(self, alone: Alone) -> None:
        assert self.machine is not None
        why = "; ".join(alone.reasons)
        logger.info("round %d: a step without a partner: %s", self.machine.round, why)
        await self._p.holds.at(self.machine.round, "reduce", 1.0)
        await self._step(None, None, 0.0, why)

    async def _step(self, wanted: Fetch | None, values: F32 | None, exchange_s: float, why: str) -> None:
        """Make the outer step, stand on it, tell of it, and go on."""
        machine, made = self.machine, self._made
        assert machine is not None
        assert made is not None
        await self._p.holds.at(machine.round, "certify")
        before = self._state
        assert before is not None
        state, header = await trio.to_thread.run_sync(self._work_out, made, values)
        self._state = state
        self._p.cache.put(state, header)
        await trio.to_thread.run_sync(
            partial(
                self._p.audit.stepped,
                before,
                state,
                made.vector.offer,
                partner=None if wanted is None else wanted.peer,
                offered=None if wanted is None else wanted.offer,
            )
        )
        self._taken = made.event.number
        await self._p.training_client.stand_on(state, state.anchor, taken=self._taken)
        await self._saver.save_soon(state)
        seconds, partner = trio.current_time() - self._began_at, None if wanted is None else wanted.peer
        if partner is not None:
            self.contributors.note(partner)
        self._p.log.stepped(
            state.round,
            members=sorted(self.others | {self._me}),
            partner=partner,
            why=why,
            tokens=made.event.tokens,
            reduce_s=exchange_s,
            total_s=seconds,
            traffic=self._p.traffic_bytes(),
        )
        self._p.on_progress(
            RoundStepped(
                round=state.round, partner=partner, why=why, loss=self._p.training_client.loss, seconds=seconds
            )
        )
        await self._begin_round_or_finish()

    def _work_out(self, made: _Made, values: F32 | None) -> tuple[CertifiedState, StateHeader]:
        before = self._state
        assert before is not None
        # What the swarm trained on, by what this node sees: schedules are to run alike at all.
        tokens = made.event.tokens * (len(self.others) + 1)
        state = self._steps.stepped(
            before, made.delta, made.vector, other=values, tokens=tokens, memory=self._p.cache.vectors.take
        )
        return state, self._p.cache.header(state)

    # -- leaving ---------------------------------------------------------------------------------------------

    async def _try_leave(self) -> None:
        machine, asked_at = self.machine, self._leave_asked_at
        if machine is None or asked_at is None or self.left.is_set():
            return
        await self._carry_out(machine.leave())
        if not machine.owed or trio.current_time() - asked_at >= LINGER_S:
            self.left.set()

    def _show_phase(self) -> None:
        if self.phase != self._shown_phase:
            self._shown_phase = self.phase
            round = 0 if self.machine is None else self.machine.round
            self._p.on_progress(PhaseChanged(phase=self.phase, round=round))


TAKERS: Mapping[type, Callable[[GossipEngine, PeerId, Any], Awaitable[None]]] = {
    AskStanding: GossipEngine._tell_standing,
    Standing: GossipEngine._note_standing,
    Offer: GossipEngine._take_offer,
    Decline: GossipEngine._pair,
    Withdraw: GossipEngine._pair,
    Taken: GossipEngine._take_taken,
}
"""Handlers of a peer's messages, by message type."""
