"""One simulated peer's rounds: a driver of the member that nodes run (`shoal.protocol.member`), in virtual time.

The member decides; here its effects are done. What is modelled is what surrounds it: training is a time, a chunk is a
few values whose payload takes the time of `chunk_bytes`, and the state is a small vector, exact to the bit. What a peer
lacks it gets by `obtaining`. An effect that has no place here is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.collectives.codecs import F32
from shoal.collectives.finals import Finals
from shoal.collectives.grid import Grid
from shoal.collectives.partition import deal
from shoal.lab.box import LATER, Box, Surroundings, do_by, nothing
from shoal.lab.simulate.fetching import Fetching
from shoal.lab.simulate.handing_over import HandingOver
from shoal.lab.simulate.judge import STANDSTILL_S, Violation
from shoal.lab.simulate.obtaining import FETCH_PERIOD_S, Obtaining, State
from shoal.lab.simulate.reducing import Reducing
from shoal.lab.simulate.serving import Serving
from shoal.lab.simulate.states import next_state, state_digest
from shoal.lab.simulate.talk import (
    ChainPart,
    ChunkFrame,
    ChunkRequest,
    FinalsAnswer,
    GetChain,
    GetFinals,
    GetHeader,
    HeaderAnswer,
    Lacking,
    NoPlace,
    OfferAnswer,
    Offering,
    Payload,
    PeerTalk,
    TakingBack,
    falsehoods,
    one_more,
)
from shoal.lab.simulate.waits import ChainWaits
from shoal.lab.simulate.work import Work
from shoal.node.rounds.site_exchange import TAKE_BACK_S
from shoal.protocol.agreement import Broadcast, Mismatch
from shoal.protocol.amending import sign_amendment
from shoal.protocol.chain import Chain, Position
from shoal.protocol.departure import LEAVE_TIMEOUT_S, LINGER_S
from shoal.protocol.donors import DonorScores
from shoal.protocol.durable import DurableRecord
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
    HandOver,
    KeepFork,
    KeepOrder,
    KeepOwn,
    PassOn,
    PauseTrainer,
    Rejoin,
    Repair,
    ResumeWork,
    Seek,
    Send,
    SettleWork,
    SignAmendment,
    SignRebase,
    StandOnHead,
    StartReduce,
    StopReduction,
    TakeBack,
    TakePart,
    Tell,
    Train,
    Watched,
    WatchReduction,
    WorkOut,
    Write,
)
from shoal.protocol.errors import ConfigError, RemoteError
from shoal.protocol.forks import Fork
from shoal.protocol.identity import PeerId
from shoal.protocol.inputs import (
    Amend,
    GoBack,
    GoOnWithout,
    Linked,
    Loaded,
    Received,
    Reduced,
    SetPaused,
    Tick,
    Trained,
    TrainerRestarted,
)
from shoal.protocol.member import Member, Standing
from shoal.protocol.messages import Certificate, Enlist, Message, Ready, Rebase, Report, RoundMessage, domain_hash
from shoal.protocol.planning import TRAINING
from shoal.protocol.round import RoundMachine
from shoal.protocol.surroundings import Policies, Rules
from shoal.protocol.terms import make_rebase
from shoal.swarm.lanes.frame import SCOPE_BYTES

if TYPE_CHECKING:
    from shoal.lab.simulate.peer import SimulatedPeer

CANDIDATES_KEPT = 4
ANSWER_BYTES = 1000
"""Of certificates, of a header or of a plan."""
APART_S = 2.0
"""Whoever has its state takes part in the round after it so soon, or once its delegate said what it took."""
RECORD_S = 0.2
"""A record is heard by everyone who is linked after so long."""


class PeerRounds(Reducing, Surroundings):
    """The rounds of a peer in one of its lives; what its member looks at is here too."""

    def __init__(self, peer: SimulatedPeer) -> None:
        super().__init__(peer)
        scores = DonorScores()
        self.member: Member = Member(
            identity=peer.identity,
            surroundings=self,
            deal=deal,
            scores=scores,
            policies=Policies(rollback="always"),
            rounds=peer.rounds,
            make=self._swarm.components.machine,
        )
        self._box = Box(self.member, partial(do_by, DOERS, self), lambda: self._now)
        self._over = False
        self._candidates: dict[bytes, tuple[Report, F32]] = {}
        self._handed_over: set[bytes] = set()
        self._wanted: set[bytes] = set()
        self.work = Work(peer)
        self.waits = ChainWaits(peer)
        self.serving = Serving(peer, self._lookup)
        self.replayed_rounds = self._swarm.components.work.replayed_rounds
        self.obtaining = Obtaining(peer, scores=scores, put=self._box.put, computed=self._disk.finals.get)
        self.handing_over = HandingOver(peer, obtaining=self.obtaining, put=self._box.put)
        self._trained_at: float | None = None
        self.paused = False
        self._stood: tuple[object, ...] = ()
        self._stood_since = 0.0
        self._going_since: float | None = None
        self._leaving_since: float | None = None
        self._apart_since = self._now
        self.paused_in_round = False

    # -- what the member looks at ------------------------------------------------------------------------------

    @property
    def chain(self) -> Chain:
        """All that is decided, as far as is known here."""
        return self._disk.ledger

    @property
    def current(self) -> bool:
        """True if the state at the head is here."""
        return self.obtaining.current

    @property
    def held(self) -> State | None:  # type: ignore[override]
        """The state that is here."""
        return self.obtaining.held

    @property
    def digest(self) -> bytes:
        """The digest of the state at the head."""
        return self.chain.standing.digest

    @property
    def made(self) -> bool:
        """True if a contribution to the round under way is made."""
        return self.work.made is not None

    @property
    def resting(self) -> bool:  # type: ignore[override]
        """True if no training is under way."""
        return self._trained_at is None

    @property
    def forks(self) -> Sequence[Fork]:  # type: ignore[override]
        """Those that it has seen."""
        return self._disk.forks

    def bound_in(self, position: Position) -> list[DurableRecord]:
        """Records on disk about a round."""
        return self._disk.logs.bound_in(position)

    def alive(self) -> frozenset[PeerId]:
        """Peers that are believed alive."""
        return self._peer.watch.alive()

    def suspected(self) -> frozenset[PeerId]:
        """Peers among the living that may be gone."""
        return self._peer.watch.suspected()

    def leaving(self) -> frozenset[PeerId]:
        """Linked peers whose records say that they are about to leave, and said so long enough ago."""
        others = (self._swarm.peers[other] for other in self._peer.watch.links)
        return frozenset(other.id for other in others if other.peer_rounds.says_leaving(self._now - RECORD_S))

    def says_leaving(self, at: float) -> bool:
        """True if its record said at that time that it is about to leave."""
        return self._leaving_since is not None and self._leaving_since <= at

    def linked(self) -> list[PeerId]:
        """Peers that can be told something."""
        return [self._swarm.peers[other].id for other in self._peer.watch.links]

    def site_mates(self) -> list[PeerId]:
        """Linked peers of its site."""
        return self.handing_over.mates()

    def rules(self, round: int) -> Rules:
        """The same in all rounds, but for the fragment that they are of."""
        swarm = self._swarm
        settings = replace(swarm.settings, numel=swarm.fragments.of_round(round).numel)
        amended = self.chain.amended(round)
        if amended is not None:
            in_force = amended.round
            settings = replace(settings, grace_s=in_force.grace_s, weight_cap=in_force.weight_cap)
            settings = replace(settings, reduce_deadline_s=in_force.reduce_deadline_s)
        return Rules(settings=settings, staleness_rounds=swarm.staleness_rounds)

    def new_life(self) -> bytes:
        """The same for all rounds of a process."""
        return domain_hash("simulated life", self._peer.id.encode(), self._peer.life.to_bytes(4, "little"))

    # -- driving it --------------------------------------------------------------------------------------------

    @property
    def machine(self) -> RoundMachine | None:
        """The round under way."""
        return self.member.machine

    def start(self) -> None:
        """Begin with what is on disk."""
        self._box.put(Loaded(tuple(self._disk.orders.values())))

    def stop(self) -> None:
        """The process ended."""
        self.obtaining.stop()
        self.handing_over.stop()
        self._stop_reduction()
        self._box.stop()
        self._over = True
        self.member.machine = None

    def go_back(self, rounds: int) -> bool:
        """The user wants to go back by so many rounds, or as far as there are states; whether that can be asked for."""
        there = self._disk.earlier_rounds()[-rounds:]
        possible = self.machine is not None and self._peer.id in self.chain.voters
        if not there or not possible or self.member.standing is not Standing.IN_ROUND:
            return False
        self._box.put(GoBack(there[0]))
        return True

    def amend(self, *settings: str) -> bool:
        """The user, who has the authority's key, wants these in force; whether that can be asked for."""
        possible = self.machine is not None and self._peer.id in self.chain.voters
        if not possible or self.member.standing is not Standing.IN_ROUND:
            return False
        self._box.put(Amend(settings, by_authority=True))
        return True

    def change_voters(self, *settings: str) -> bool:
        """The same of the voters; false as well where such a change cannot be."""
        try:
            return self._box.idle and self.amend(*settings)
        except ConfigError:
            return False

    @property
    def can_rebase(self) -> bool:
        """True if this peer would take the authority's order to go on without some."""
        try:
            self.member.check(GoOnWithout(frozenset()))
        except ConfigError:
            return False
        return True

    def rebase(self, members: Collection[PeerId]) -> None:
        """The authority, which is here, has the chain go on with these."""
        self._box.put(GoOnWithout(frozenset(self.chain.voters) - set(members)))

    def ask_to_leave(self) -> None:
        """The user wants the peer to go."""
        self.member.ask_to_leave(self._now)

    def pause(self, *, paused: bool) -> None:
        """The user wants the accelerator, or gives it back."""
        self._box.put(SetPaused(paused))

    def trained(self) -> None:
        """Training that was waited for is over."""
        if self._trained_at is not None:
            self._trained_at = self._now

    def trainer_restarted(self) -> None:
        """The trainer begins anew, and knows nothing of what it was told."""
        self._trained_at = None
        self._box.put(TrainerRestarted())

    @property
    def goes(self) -> bool:
        """True if it is to go."""
        return self.member.leaving or self.member.finished

    @property
    def phases(self) -> set[str]:
        """Phase of its round, and what its user wants of it."""
        found = {"joining" if self.machine is None else self.machine.phase.value}
        wanted = {"repair": self._closed_to, "paused": self.paused, "leaving": self.member.leaving}
        return found | {name for name, holds in wanted.items() if holds}

    # -- time --------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """As the engine's tick."""
        self.waits.look()
        self.obtaining.tick(now)
        if self._over:
            return
        done = self._trained_at is not None and now >= self._trained_at and not self.paused
        if done and (self.machine is not None or self.member.follows_head):
            self._trained_at = None
            self._box.put(Trained(self.chain.head.next_round, None))
        self._box.put(Tick())
        if not self.member.leaving or self.member.needed:
            self._leaving_since = None
        elif self._leaving_since is None:
            self._leaving_since = now
        self._check_rest(now)
        if self.machine is not None and self._peer.lies:
            self._swarm.say_falsely(self._peer, falsehoods(self._peer.lies, self._peer.id, self.machine))
        if self.machine is not None:
            self._check_standstill(self.machine, now)

    def _check_rest(self, now: float) -> None:
        """Raises Violation if it says that it trains and does not, or stays long after it was to go."""
        machine = self.machine
        mine = None if machine is None else machine._gathering.get(self._peer.id)
        trains = self.work.made is not None or self._trained_at is not None
        trains = trains or self.member._site.holds  # until others of its site hand over theirs
        if mine is not None and mine.role == TRAINING and not (trains or self.paused or self._over):
            raise Violation("a pause", f"peer {self._peer.number} says that it trains, and does not")
        takes_part = machine is not None or not self.current or self.goes or self.member.follows_head
        self._apart_since = now if takes_part or self._apart_since < self._peer.disturbed_at else self._apart_since
        if now - self._apart_since > APART_S + (TAKE_BACK_S if self.handing_over.settles else 0):
            raise Violation("no wait too long", f"peer {self._peer.number} has its state, and begins no round")
        self._going_since = now if self._going_since is None else self._going_since
        if not self.goes:
            self._going_since = None
        elif now - max(self._going_since, self._peer.disturbed_at) > LEAVE_TIMEOUT_S + LINGER_S + 1.0:
            raise Violation("a leave", f"peer {self._peer.number} was to go {now - self._going_since:.1f} s ago")

    def _check_standstill(self, machine: RoundMachine, now: float) -> None:
        plan, agreement = machine.plan, machine.agreement
        self._swarm.judge.view(self._peer.id, machine.previous.hash, agreement.view)
        plan_order = None if plan is None else (plan.view, plan.attempt)
        where = (machine.round, machine.phase, agreement.view, plan_order)
        if where != self._stood or not machine.has_quorum() or self._swarm.is_troubled(now):
            self._stood, self._stood_since = where, now
        elif now - self._stood_since > STANDSTILL_S:
            name = f"peer {self._peer.number} in round {machine.round}, {machine.phase.value}, view {agreement.view}"
            raise Violation("no wait too long", f"{name} for {STANDSTILL_S} s")

    # -- what others say ---------------------------------------------------------------------------------------

    def hear(self, sender: int, message: Message) -> None:
        """A message of a round."""
        if isinstance(message, Certificate | Rebase | RoundMessage | Enlist):
            self._box.put(Received(self._swarm.peers[sender].id, message))

    def linked_to(self, other: int) -> None:
        """A link came up: tell what stands."""
        head = self._swarm.peers[other].disk.ledger.head  # as its record says
        self._box.put(Linked(self._swarm.peers[other].id, (head.term, head.round)))
        self.obtaining.linked(other)

    def unlinked(self, other: int) -> None:
        """A link is gone, and what was under way over its lane."""
        self.waits.gone(other)
        self.serving.lane_broke(other)
        self.obtaining.lane_broke(other)
        self.handing_over.lane_broke(other)

    @staticmethod
    def takes(message: object) -> bool:
        """True if a message is for `take`."""
        return isinstance(message, PeerTalk)

    def take(self, sender: int, message: object) -> None:
        """Take a message that moves state or chunks."""
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
        elif isinstance(message, Offering):
            self.handing_over.offered(sender, message.offer)
        elif isinstance(message, TakingBack):
            self.handing_over.taken_back(sender, message.offer)
        elif isinstance(message, OfferAnswer):
            self.handing_over.answered(sender, message)
        elif isinstance(message, ChainPart):
            self.obtaining.told_chain(sender, message)
        elif isinstance(message, NoPlace):
            self.obtaining.has_no_place(sender, message.asked)
        elif isinstance(message, GetChain) and message.waits:
            self.waits.come(sender, message)
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
            part = ChainPart(asked, disk.entries_after(asked.height, asked.rebases), disk.height)
            return one_more(part, disk.newest) if "chain" in self._peer.lies else part
        if isinstance(asked, GetHeader):
            header = self.obtaining.begin_serving(asked.round)
            if header is not None and "header" in self._peer.lies:
                header = replace(header, hashes=header.hashes[::-1])
            return HeaderAnswer(asked.round, header)
        finals = disk.finals.get(asked.plan)
        return FinalsAnswer(asked.plan, None if finals is None else finals.plan)

    def _lookup(self, scope: bytes, chunk: int) -> tuple[bytes, int] | None:
        """A chunk that somebody asks for, and the size of its payload in bytes."""
        offered = self.handing_over.lookup(scope, chunk)
        if offered is not None:
            return offered, int(self._swarm.chunk_bytes)
        data = self.obtaining.cache.lookup(scope, chunk, self._now)
        if data is not None:
            return data, self._swarm.state_chunk_bytes
        finals = next((f for plan, f in self._disk.finals.items() if plan[:SCOPE_BYTES] == scope), None)
        if finals is None or chunk >= len(finals.chunks):
            return None
        return bytes(finals.chunks[chunk].payload), int(self._swarm.chunk_bytes)

    # -- effects -----------------------------------------------------------------------------------------------

    def _write(self, effect: Write) -> None:
        if self._disk.tears is None:
            self._disk.logs.persist(*effect.records)
        else:
            self._swarm.dies_writing(self._peer, effect.records)

    def _broadcast(self, effect: Broadcast) -> None:
        trains = isinstance(effect.message, Ready) and effect.message.role == TRAINING
        if self.paused and trains and not self.made:  # what is made and is being handed over is as good as training
            raise Violation("a pause", f"peer {self._peer.number} says that it trains while it pauses")
        self._swarm.say(self._peer, effect.message)

    def _send(self, effect: Send) -> None:
        self._swarm.tell(self._peer, (self._swarm.numbers[effect.peer],), effect.message)

    def _blame(self, effect: Blame) -> None:
        self._swarm.blamed(self._peer.number, self._swarm.numbers[effect.peer], effect.text)

    def _mismatch(self, effect: Mismatch) -> None:
        raise Violation("the reference", f"two digests of one plan at peer {self._peer.number}")

    def _begin_round(self, effect: BeginRound) -> Mapping[bytes, PeerId]:
        self._stop_reduction()
        self._kept.clear()
        self._closed_to.clear()
        self._wanted.clear()
        self._handed_over.clear()
        self._plans, self._trained_at, self.paused_in_round = 0, None, self.paused
        settings = effect.settings
        self.handing_over.begin(effect.base.hash, Grid(settings.numel, settings.chunk_values), settings.codec)
        made = self.work.made
        if made is not None and made.base == effect.base.hash:  # before a restart, maybe
            self.handing_over.contributed(made.handed)
        return {}

    def _announce(self, effect: Announce) -> Ready:
        return self.work.announcement(self.chain.head)

    def _train(self, effect: Train) -> None:
        if self.paused:
            raise Violation("a pause", f"peer {self._peer.number} is told to train while it pauses")
        goes_on = self.member.follows and self._trained_at is not None  # its steps are no round's
        if effect.contribute and not (effect.at_once or goes_on):  # what is learnt alone, and speeds, are not modelled
            self._trained_at = self._swarm.trained_at(self._peer)

    def _pause_trainer(self, effect: PauseTrainer) -> None:
        self.paused, self.paused_in_round = effect.paused, True

    def _contribute(self, effect: Contribute) -> Ready | None:
        if self.made:
            return None
        head = self.chain.head
        weight_cap = self.rules(head.next_round).settings.weight_cap
        take = None if effect.delegate is not None else partial(self.handing_over.take, weight_cap=weight_cap)
        ready = self.work.make(head, take)
        assert self.work.made is not None
        self.handing_over.contributed(self.work.made.handed)
        if self.machine is None:  # it follows, and carries on what it made
            self._swarm.residuals.kept(self._peer.id, msgspec.structs.replace(ready, life=self.new_life()))
        return ready

    def _find_work(self, effect: FindWork) -> bool:
        return self.work.find(countable=effect.countable)

    def _hand_over(self, effect: HandOver) -> None:
        assert self.work.made is not None
        self._swarm.residuals.offered(self._peer, self.work.made)
        self.handing_over.hand_over(self._swarm.numbers[effect.delegate], self.work.made)

    def _pass_on(self, effect: PassOn) -> None:
        self._swarm.met["handed over"] += 1
        self.work.pass_on(self.chain.head)

    def _take_back(self, effect: TakeBack) -> None:
        self.handing_over.take_back()

    def _keep_own(self, effect: KeepOwn) -> Ready:
        self._swarm.met["not handed over"] += 1
        return self.work.keep(self.chain.head)

    def _settle_work(self, effect: SettleWork) -> object:
        made = self.work.is_over
        is_passed_on = False if made is None else self.handing_over.outcome(made.base, self._settled)
        if is_passed_on is None:
            return LATER
        self.work.settle(is_passed_on=is_passed_on)
        return None

    def _settled(self, is_passed_on: bool) -> None:
        self.work.settle(is_passed_on=is_passed_on)
        self._apart_since = self._now
        self._box.done()

    def _resume_work(self, effect: ResumeWork) -> None:
        self.work.resume()

    def _finish_work(self, effect: FinishWork) -> None:
        self.work.finish()

    def _stand_on_head(self, effect: StandOnHead) -> None:
        self.work.stand_on_head()

    def _follow_plan(self, effect: StartReduce) -> None:
        self._start_reduce(effect.plan)

    def _watch_reduction(self, effect: WatchReduction) -> Watched:
        self._copying.complete_at = effect.complete_at
        return Watched(self._look_at_stalls(self._now, overdue=effect.overdue), NOTHING_RELAYED)

    def _stop(self, effect: StopReduction | Evicted) -> None:
        self._stop_reduction()

    def _work_out(self, effect: WorkOut) -> Report:
        finals: Any = effect.finals
        plan = finals.plan
        self._swarm.judge.completed(finals)
        state = next_state(self._disk.state, finals.decoded(), self._swarm.fragments.of_round(plan.round))
        report = Report(
            term=plan.term,
            round=plan.round,
            base=plan.base,
            plan=plan.hash,
            digest=state_digest(plan.base, state),
            bitmaps=finals.bitmaps_root,
            tokens=finals.tokens,
        )
        self._candidates[plan.hash] = report, state
        while len(self._candidates) > CANDIDATES_KEPT:
            del self._candidates[next(iter(self._candidates))]
        self._disk.keep_finals(finals)
        return report

    def _append(self, effect: Append) -> bool:
        entry = effect.entry
        if self._disk.tears is not None:
            self._swarm.dies_writing(self._peer, entry)
            return True
        if isinstance(entry, Certificate):  # before it is refused: of its own no member may think otherwise
            self._swarm.judge.decided(entry)
        if not self.obtaining.extend(entry):
            return False
        self._swarm.decided(self._peer, entry.value)
        return True

    def _apply(self, effect: Apply) -> None:
        value = effect.certificate.value
        self.obtaining.hold(State(value, self._candidates[value.plan][1]))

    def _seek(self, effect: Seek) -> None:
        self.obtaining.begin(effect.errand)

    def _adopt(self, effect: Adopt) -> None:
        assert isinstance(effect.state, State)
        self.obtaining.hold(effect.state)

    def _keep_fork(self, effect: KeepFork) -> None:
        self._disk.forks.append(effect.fork)

    def _keep_order(self, effect: KeepOrder) -> None:
        self._disk.orders[type(effect.order)] = effect.order

    def _drop_order(self, effect: DropOrder) -> None:
        self._disk.orders.pop(effect.kind, None)

    def _sign_amendment(self, effect: SignAmendment) -> bytes:
        return sign_amendment(self._swarm.authority, self.chain.head.swarm, effect.amendment)

    def _sign_rebase(self, effect: SignRebase) -> Rebase:
        electorate = set(self.chain.voters) - effect.forget
        return make_rebase(self._swarm.authority, self.chain.head, electorate)

    def _find_earlier_rounds(self, effect: FindEarlierRounds) -> list[int]:
        return self._disk.earlier_rounds()

    def _forget_earlier(self, effect: ForgetEarlier) -> None:
        self._disk.forget_earlier(effect.besides)

    def _goodbye(self, effect: Goodbye) -> None:
        if not self.member.overdue(self._now):
            self._swarm.donations.check_copy(self._peer)
        self.handing_over.contributed()
        self._swarm.depart(self._peer.number, self._peer.life)

    # -- finals ------------------------------------------------------------------------------------------------

    def _has_finals(self, plan: bytes) -> bool:
        return plan in self._handed_over

    def _computed(self, finals: Finals) -> None:
        self._handed_over.add(finals.plan.hash)
        self._box.put(Reduced(finals, 0.0))

    def _need_finals(self, effect: FetchFinals) -> None:
        plan = effect.value.plan
        if self._brings(plan) or plan in self._wanted:
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


NOTHING_RELAYED: tuple[bytes, tuple[()]] = (b"", ())
"""Nothing is led through a third here."""

DOERS: Mapping[type[Any], Callable[[PeerRounds, Any], Any]] = {
    Adopt: PeerRounds._adopt,
    Announce: PeerRounds._announce,
    Append: PeerRounds._append,
    Apply: PeerRounds._apply,
    BeginRound: PeerRounds._begin_round,
    Blame: PeerRounds._blame,
    Broadcast: PeerRounds._broadcast,
    Certified: nothing,
    CloseOff: PeerRounds._close_off,
    Contribute: PeerRounds._contribute,
    DropOrder: PeerRounds._drop_order,
    Evicted: PeerRounds._stop,
    Examine: nothing,
    FetchFinals: PeerRounds._need_finals,
    FindEarlierRounds: PeerRounds._find_earlier_rounds,
    FindWork: PeerRounds._find_work,
    FinishWork: PeerRounds._finish_work,
    ForgetEarlier: PeerRounds._forget_earlier,
    GiveWay: nothing,
    Goodbye: PeerRounds._goodbye,
    HandOver: PeerRounds._hand_over,
    KeepFork: PeerRounds._keep_fork,
    KeepOrder: PeerRounds._keep_order,
    KeepOwn: PeerRounds._keep_own,
    Mismatch: PeerRounds._mismatch,
    PassOn: PeerRounds._pass_on,
    PauseTrainer: PeerRounds._pause_trainer,
    Rejoin: nothing,
    Repair: PeerRounds._repair,
    ResumeWork: PeerRounds._resume_work,
    Seek: PeerRounds._seek,
    Send: PeerRounds._send,
    SignAmendment: PeerRounds._sign_amendment,
    SignRebase: PeerRounds._sign_rebase,
    SettleWork: PeerRounds._settle_work,
    StandOnHead: PeerRounds._stand_on_head,
    StartReduce: PeerRounds._follow_plan,
    StopReduction: PeerRounds._stop,
    TakeBack: PeerRounds._take_back,
    TakePart: nothing,
    Tell: nothing,
    Train: PeerRounds._train,
    WatchReduction: PeerRounds._watch_reduction,
    WorkOut: PeerRounds._work_out,
    Write: PeerRounds._write,
}
"""The method that carries out each effect of a member. Nobody draws S(0) or bans here."""
