"""One simulated peer's rounds: what `node.engine` is around the same round machine, in virtual time.

The machine, the reduction with its repair, patience with solitude and the way of leaving are those of a node. What is
modelled is what surrounds them: training is a time, a chunk is a few values whose payload takes the time of
`chunk_bytes`, and the state is a small vector, exact to the bit. What a peer lacks it gets by `obtaining`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from shoal.collectives.codecs import F32
from shoal.collectives.contribution import EncodedContribution
from shoal.collectives.dither import Dither
from shoal.collectives.finals import Finals
from shoal.collectives.partition import deal
from shoal.lab.simulate.fetching import Fetching
from shoal.lab.simulate.judge import STANDSTILL_S, Violation
from shoal.lab.simulate.obtaining import FETCH_PERIOD_S, Obtaining
from shoal.lab.simulate.reducing import Reducing
from shoal.lab.simulate.serving import Serving
from shoal.lab.simulate.states import next_state, state_digest
from shoal.lab.simulate.talk import (
    ChainPart,
    ChunkFrame,
    ChunkRequest,
    CourseTalk,
    FinalsAnswer,
    GetChain,
    GetFinals,
    GetHeader,
    HeaderAnswer,
    Lacking,
    Payload,
    falsehoods,
)
from shoal.protocol.agreement import Broadcast, Decided, DurableRecord, Mismatch, NeedFinals, Persist
from shoal.protocol.departure import Departure, Parting
from shoal.protocol.early import EARLY_LIMIT_MESSAGES
from shoal.protocol.effects import CloseOff, Effect, Evicted, Repair, StartReduce
from shoal.protocol.errors import RemoteError
from shoal.protocol.messages import (
    Certificate,
    Message,
    Ready,
    Report,
    RoundMessage,
    domain_hash,
)
from shoal.protocol.no_quorum import NoQuorum
from shoal.protocol.planning import CONTRIBUTOR, JOINER, OBSERVER, TRAINING, absent_ready
from shoal.protocol.probation import Probation
from shoal.protocol.round import Phase, RoundMachine
from shoal.swarm.lanes.frame import SCOPE_BYTES

if TYPE_CHECKING:
    from shoal.lab.simulate.peer import SimulatedPeer

STALENESS_ROUNDS = 3
CANDIDATES_KEPT = 4
FINALS_KEPT = 6
"""Plans whose finals a peer has for others; fewer than in a node, so that who comes back late needs a state."""
ANSWER_BYTES = 1000
"""Of certificates, of a header or of a plan."""
GOODBYE_S = 1.0


class Course(Reducing):
    """The rounds of a peer in one of its lives."""

    def __init__(self, peer: SimulatedPeer) -> None:
        super().__init__(peer)
        self.early: deque[tuple[int, Message]] = deque(maxlen=EARLY_LIMIT_MESSAGES)
        self._solitude = NoQuorum()
        self._departure = Departure(rounds=None)
        self._probation = Probation()
        self._candidates: dict[bytes, tuple[Finals, Report, F32]] = {}
        self._wanted: set[bytes] = set()
        self.serving = Serving(peer, self._lookup)
        self.obtaining = Obtaining(
            peer, ready=self._begin_round, moved=self._leave_round, computed=self._disk.finals.get
        )
        self._trained_at: float | None = None
        self._stood: tuple[object, ...] = ()
        self._stood_since = 0.0

    # -- rounds ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin with what is on disk."""
        if self.obtaining.current:
            self._begin_round()
        else:
            self.obtaining.begin()

    def stop(self) -> None:
        """The process ended."""
        self.obtaining.stop()
        if self._reduction is not None:
            self._reduction.close()
        self._reduction = self.machine = None

    def ask_to_leave(self) -> None:
        """The user wants the peer to go."""
        self._departure.ask(self._now)

    def _begin_round(self) -> None:
        disk, peer = self._disk, self._peer
        head = disk.chain[-1]
        self._stop_reduction()
        self._kept.clear()
        self._closed_to.clear()
        self._wanted.clear()
        self._plans, self._trained_at = 0, None
        life = domain_hash("simulated life", peer.id.encode(), peer.life.to_bytes(4, "little"))
        recent = {p for value in disk.chain[-STALENESS_ROUNDS:] for p in value.members}
        self.machine = machine = self._swarm.kit.machine(
            identity=peer.identity,
            previous=head,
            state=head.digest,
            life=life,
            settings=self._swarm.settings,
            deal=deal,
            returners=recent,
        )
        machine.remember(self.obtaining.newcomers, self._probation)
        bound = [r for r in disk.log if (r.term, r.round) == (head.next_term, head.next_round)]
        unfinished = machine.restore(bound)
        self._departure.begin_round()
        self._solitude.begin_round(self._now)
        alive = machine.peers_alive(peer.watch.alive(), self._now, suspected=peer.watch.suspected())
        self._carry_out([*unfinished, *alive])
        made = disk.ready is not None and disk.ready.base == head.hash
        lost = not made and any(record.kind == "ready" for record in bound)
        absent = lost or self._departure.asked
        role = OBSERVER if absent else TRAINING if peer.id in recent else JOINER
        ready = disk.ready if made and disk.ready is not None else absent_ready(role, head, head.digest)
        if self.machine is machine:
            self._carry_out(machine.ready(ready, self._now))
        if self.machine is machine and role == TRAINING and not made:
            self._train()
        early, self.early = self.early, deque(maxlen=EARLY_LIMIT_MESSAGES)
        for sender, message in early:
            self.hear(sender, message)

    def _train(self) -> None:
        self._trained_at = self._swarm.trained_at(self._peer)

    def trained(self) -> None:
        """What training was waited for is there."""
        if self._trained_at is not None:
            self._trained_at = self._now

    def _contribute(self, machine: RoundMachine) -> None:
        """Training is done: encode, note on disk, announce."""
        peer, swarm, head = self._peer, self._swarm, machine.previous
        values, tokens = swarm.made(peer, machine.round)
        dither = Dither(head.hash, "contribution", peer.id)
        encoded = EncodedContribution.encode(values, swarm.grid, swarm.settings.codec, dither=dither)
        place = swarm.network.places[peer.number]
        self._disk.contribution = encoded
        self._disk.ready = Ready(
            term=head.next_term,
            round=head.next_round,
            base=head.hash,
            role=CONTRIBUTOR,
            state=head.digest,
            root=encoded.root,
            squares=encoded.squares,
            tokens=tokens,
            upload=int(place.upload),
            download=int(place.download),
            reaches=(),
        )
        swarm.judge.contributed(encoded)
        self._disk.log.append(DurableRecord(kind="ready", term=head.next_term, round=machine.round))
        self._carry_out(machine.ready(self._disk.ready, self._now))

    # -- time --------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """As the engine's tick."""
        self.obtaining.tick(now)
        machine, watch = self.machine, self._peer.watch
        if machine is None:
            return
        self._carry_out(machine.peers_alive(watch.alive(), now, suspected=watch.suspected()))
        if self.machine is machine:
            self._look_at_stalls(machine, now)
        if self.machine is machine and self._trained_at is not None and now >= self._trained_at:
            self._trained_at = None
            self._contribute(machine)
        if self.machine is machine and machine.phase is not Phase.DECIDED:
            self._keep_busy(machine, now)
        if self.machine is machine and self._peer.lies:
            self._swarm.say_falsely(self._peer, falsehoods(self._peer.lies, self._peer.id, machine))
        if self.machine is not None:
            self._check_standstill(self.machine, now)

    def _keep_busy(self, machine: RoundMachine, now: float) -> None:
        made = self._disk.ready is not None and self._disk.ready.base == machine.previous.hash
        may_train = self._departure.may_train(machine)
        resting = self._trained_at is None
        advice = self._solitude.advise(machine, now, contributed=made, may_train=may_train, resting=resting)
        if advice.contribute_after_all:
            self._carry_out(machine.ready(absent_ready(TRAINING, machine.previous, machine.previous.digest), now))
            self._train()
        parting = self._departure.advise(machine, now)
        if parting in (Parting.PROMISE, Parting.GO) and not self._departure.overdue(now):
            self._swarm.donations.check_copy(self._peer)
        if parting is Parting.PROMISE:
            effects = machine.leave(now)
            self._carry_out(effects)
            if any(isinstance(effect, Persist) for effect in effects):
                self._swarm.timeline.after(GOODBYE_S, self._swarm.depart, self._peer.number, self._peer.life)
        elif parting is Parting.REST:
            self._trained_at = None
            self._carry_out(machine.ready(absent_ready(OBSERVER, machine.previous, machine.previous.digest), now))
        elif parting is Parting.GO:
            self._swarm.depart(self._peer.number, self._peer.life)

    def _check_standstill(self, machine: RoundMachine, now: float) -> None:
        plan, agreement = machine.plan, machine.agreement
        self._swarm.judge.view(self._peer.id, machine.previous.hash, agreement.view)
        seat = None if plan is None else (plan.view, plan.attempt)
        where = (machine.round, machine.phase, agreement.view, seat)
        if where != self._stood or not machine.has_quorum() or self._swarm.is_troubled(now):
            self._stood, self._stood_since = where, now
        elif now - self._stood_since > STANDSTILL_S:
            name = f"peer {self._peer.number} in round {machine.round}, {machine.phase.value}, view {agreement.view}"
            raise Violation("no wait too long", f"{name} for {STANDSTILL_S} s")

    # -- what others say ---------------------------------------------------------------------------------------

    def hear(self, sender: int, message: Message) -> None:
        """A message of a round."""
        machine, head = self.machine, self._disk.chain[-1]
        if isinstance(message, Certificate):
            position, base = (message.value.term, message.value.round), message.value.base
        elif isinstance(message, RoundMessage):
            position, base = (message.term, message.round), message.base
        else:
            return
        current = (head.next_term, head.next_round)
        if position <= current:
            self.obtaining.newcomers.heard(self._swarm.peers[sender].id, message, self._now)
        if position < current:
            known = self._disk.certificates.get(base)
            if known is not None and not isinstance(message, Certificate):
                self._swarm.tell(self._peer, (sender,), known)
        elif position > current or machine is None:
            self.early.append((sender, message))
            if position > current:
                self.obtaining.ahead(sender)
        else:
            try:
                effects = machine.receive(self._swarm.peers[sender].id, message, self._now)
            except RemoteError as error:
                self._swarm.blamed(self._peer.number, sender, str(error))
                return
            self._carry_out(effects)

    def linked(self, other: int) -> None:
        """A link came up: tell what stands."""
        if self.machine is not None:
            for message in self.machine.current():
                self._swarm.tell(self._peer, (other,), message)
        self.obtaining.linked(other)

    def unlinked(self, other: int) -> None:
        """A link is gone, and what was under way over its lane."""
        self.serving.lane_broke(other)
        self.obtaining.lane_broke(other)

    @staticmethod
    def takes(message: object) -> bool:
        """Whether a message is for `take`."""
        return isinstance(message, CourseTalk)

    def take(self, sender: int, message: object) -> None:
        """What moves state and chunks."""
        if isinstance(message, Payload):
            self._swarm.donations.heard(self._peer, sender)
            self._take_payload(sender, message)
        elif isinstance(message, Lacking):
            self._send_again(sender, message)
        elif isinstance(message, ChunkFrame):
            peer = self._swarm.peers[sender].id
            self._received[peer] = self._received.get(peer, 0.0) + message.length
            self._swarm.donations.heard(self._peer, sender)
            self.obtaining.frame(sender, message)
        elif isinstance(message, ChunkRequest):
            try:
                self.serving.take(sender, message)
            except RemoteError as error:
                self._swarm.blamed(self._peer.number, sender, str(error))
        elif isinstance(message, ChainPart):
            self.obtaining.told_chain(message)
        elif isinstance(message, HeaderAnswer | FinalsAnswer):
            self.obtaining.told(sender, message)
        elif isinstance(message, GetChain | GetHeader | GetFinals):
            self._swarm.call(self._peer, sender, self._answer(message), ANSWER_BYTES)

    @property
    def transfers(self) -> list[Fetching]:
        """Those that are under way."""
        return [one for one in self.obtaining.transfers.values() if not one.over]

    # -- what others want --------------------------------------------------------------------------------------

    def _answer(self, asked: GetChain | GetHeader | GetFinals) -> ChainPart | HeaderAnswer | FinalsAnswer:
        disk = self._disk
        if isinstance(asked, GetChain):
            bases = [value.base for value in disk.chain[asked.height + 1 :]]
            return ChainPart(tuple(disk.certificates[base] for base in bases))
        if isinstance(asked, GetHeader):
            header = self.obtaining.shelf.begin_serving(asked.round, self._now)
            if header is not None and "header" in self._peer.lies:
                header = replace(header, hashes=header.hashes[::-1])
            return HeaderAnswer(asked.round, header)
        finals = disk.finals.get(asked.plan)
        return FinalsAnswer(asked.plan, None if finals is None else finals.plan)

    def _lookup(self, scope: bytes, chunk: int) -> tuple[bytes, int] | None:
        """A chunk that somebody asks for, and the size of its payload in bytes."""
        data = self.obtaining.shelf.lookup(scope, chunk, self._now)
        if data is not None:
            return data, self._swarm.state_chunk_bytes
        finals = next((f for plan, f in self._disk.finals.items() if plan[:SCOPE_BYTES] == scope), None)
        if finals is None or chunk >= len(finals.chunks):
            return None
        return bytes(finals.chunks[chunk].payload), int(self._swarm.chunk_bytes)

    # -- effects -----------------------------------------------------------------------------------------------

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        decided: Certificate | None = None
        closing: list[CloseOff] = []
        for effect in effects:
            if isinstance(effect, Persist):
                self._disk.log.append(effect.record)
            elif isinstance(effect, Broadcast):
                self._swarm.say(self._peer, effect.message)
            elif isinstance(effect, StartReduce):
                self._start_reduce(effect.plan)
            elif isinstance(effect, CloseOff):
                closing.append(effect)
            elif isinstance(effect, Repair):
                self._repair(effect)
            elif isinstance(effect, Evicted):
                self._stop_reduction()
            elif isinstance(effect, NeedFinals):
                self._need_finals(effect.value.plan)
            elif isinstance(effect, Mismatch):
                raise Violation("the reference", f"two digests of one plan at peer {self._peer.number}")
            elif isinstance(effect, Decided):
                decided = effect.certificate
        for asked in closing:
            self._close_off(asked)
        if decided is not None:
            self._decided(decided)

    def _decided(self, certificate: Certificate) -> None:
        value, disk = certificate.value, self._disk
        self._swarm.judge.decided(certificate)
        disk.certificates[value.base] = certificate
        disk.chain.append(value)
        disk.log.clear()
        self._swarm.say(self._peer, certificate)
        self._stop_reduction()
        candidate = self._candidates.get(value.plan)
        self._swarm.decided(self._peer, value)
        if candidate is None:
            self._leave_round()
            self.obtaining.begin()
            return
        disk.take(value, candidate[2])
        self.obtaining.decided()
        self._begin_round()

    def _leave_round(self) -> None:
        """The round is over here, and the state after it not at hand."""
        self._stop_reduction()
        self.machine = None

    def _has_finals(self, plan: bytes) -> bool:
        return plan in self._candidates

    def _computed(self, finals: Finals) -> None:
        machine, plan = self.machine, finals.plan
        if machine is None or plan.base != machine.previous.hash:
            return
        self._swarm.judge.completed(finals)
        state = next_state(self._disk.state, finals.decoded())
        report = Report(
            term=plan.term,
            round=plan.round,
            base=plan.base,
            plan=plan.hash,
            digest=state_digest(plan.base, state),
            bitmaps=finals.bitmaps_root,
            tokens=finals.tokens,
        )
        self._candidates[plan.hash] = (finals, report, state)
        while len(self._candidates) > CANDIDATES_KEPT:
            del self._candidates[next(iter(self._candidates))]
        self._disk.finals[plan.hash] = finals
        while len(self._disk.finals) > FINALS_KEPT:
            del self._disk.finals[next(iter(self._disk.finals))]
        participants = [participant.peer for participant in plan.participants]
        self._carry_out(machine.reduced(report, self._now, participants=participants))

    # -- finals that others have -------------------------------------------------------------------------------

    def _need_finals(self, plan: bytes) -> None:
        if self._brings(plan) or plan in self._wanted or plan in self._candidates:
            return
        self._wanted.add(plan)
        self._fetch_finals(plan, self._peer.life)

    def _fetch_finals(self, plan: bytes, life: int) -> None:
        if life == self._peer.life and plan in self._wanted:
            self.obtaining.finals(plan, partial(self._take_finals, plan, life))

    def _take_finals(self, plan: bytes, life: int, finals: Finals | None) -> None:
        if life != self._peer.life or plan not in self._wanted:
            return
        if finals is None:
            self._swarm.timeline.after(FETCH_PERIOD_S, self._fetch_finals, plan, life)
        else:
            self._wanted.discard(plan)
            self._computed(finals)
