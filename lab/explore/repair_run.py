"""One step of one member of a round with repairs: what nodes run does its part, and everything it does is judged."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from shoal.collectives.finals import FinalFormat, Finals
from shoal.collectives.progress import ReduceProgress
from shoal.collectives.reduce import Kept, Reduction
from shoal.lab.box import Box, Doers, Surroundings, do_by, nothing
from shoal.lab.explore.repair_copy import DUE, MOMENT_S, NOW, kept_copy, member_copy, reduction_copy, unhear
from shoal.lab.explore.repair_judge import (
    Closed,
    Parcel,
    Signed,
    report_of,
    wrong_contribution,
    wrong_finals,
    wrong_held,
    wrong_report,
    wrong_revision,
    wrong_signature,
)
from shoal.lab.explore.repair_scope import STATE, ScopeSetup
from shoal.lab.explore.word import broken_promise
from shoal.lab.quorum_rule import outweighs
from shoal.protocol.agreement import Broadcast, DurableRecord, Mismatch
from shoal.protocol.chain import Chain, Position
from shoal.protocol.donors import DonorScores
from shoal.protocol.effects import (
    Announce,
    Append,
    BeginRound,
    Blame,
    CloseOff,
    Evicted,
    Examine,
    FetchFinals,
    FindWork,
    FinishWork,
    GiveWay,
    MemberEffect,
    Repair,
    ResumeWork,
    Seek,
    StandOnHead,
    StartReduce,
    TakePart,
    Tell,
    Train,
    Watched,
    WatchReduction,
    WorkOut,
    Write,
)
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.inputs import Input, Received, Reduced, StateSought, Tick
from shoal.protocol.member import Member
from shoal.protocol.messages import (
    NO_HASH,
    Certificate,
    ChunkResults,
    Held,
    Message,
    Plan,
    Prepare,
    Propose,
    Ready,
    ViewChange,
    Vote,
)
from shoal.protocol.round import RoundMachine
from shoal.protocol.surroundings import Rules
from shoal.swarm.lanes.frame import FrameKind

MakeMachine = Callable[..., RoundMachine]
MakeReduction = Callable[..., Reduction]

Said = frozenset[Message]


@dataclass(slots=True)
class Here(Surroundings):
    """Surroundings of a member in one step. A member that lost its contribution trains no more in this round."""

    setup: ScopeSetup
    position: int
    log: tuple[DurableRecord, ...]
    believed: frozenset[PeerId]
    life: int
    lost: bool
    current = True
    digest = STATE

    @property
    def chain(self) -> Chain:
        """Chain to which the round is not added."""
        return self.setup.chain

    @property
    def made(self) -> bool:
        """True if its contribution is here."""
        return not self.lost and self.position != self.setup.scope.late

    @property
    def paused(self) -> bool:  # type: ignore[override]
        """True if it gives nothing."""
        return self.lost

    def bound_in(self, position: Position) -> tuple[DurableRecord, ...]:
        """Records on disk; they are all of one round."""
        return self.log

    def alive(self) -> frozenset[PeerId]:
        """Peers believed alive."""
        return self.believed

    def linked(self) -> Collection[PeerId]:
        """Peers with a link: all of them."""
        return self.setup.peers

    def rules(self, round: int) -> Rules:
        """Rules of the scope."""
        return self.setup.rules

    def new_life(self) -> bytes:
        """Number of its life, hashed, in place of random bytes."""
        return self.setup.life(self.position, self.life)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberState:
    """One member in one state, which never changes. `member` is None of one that was killed. `life` is the number of
    the life that it is in, from 0 on, and `old` are the plans that it made in earlier ones; `lost`: it has its
    contribution no more; `over`: it knows that the round is decided."""

    member: Member | None = None
    reduction: Reduction | None = None
    log: tuple[DurableRecord, ...] = ()
    said: Said = frozenset()
    posted: frozenset[Parcel] = frozenset()
    signed: Signed = frozenset()
    closed: Closed = frozenset()
    words: frozenset[Held] = frozenset()
    finals: frozenset[tuple[bytes, bytes]] = frozenset()
    """(plan, digest) of every complete set that it had."""
    kept: Mapping[bytes, Kept] = field(default_factory=dict)
    """By lineage: what reductions of its present life left for when they are begun again."""
    closed_to: Mapping[bytes, frozenset[PeerId]] = field(default_factory=dict)
    """By lineage: the evictions that it heard in its present life, whether or not it had the plan."""
    life: int = 0
    lost: bool = False
    old: Said = frozenset()
    over: bool = False

    @property
    def machine(self) -> RoundMachine:
        """Machine of the member's round."""
        return machine_of(self.member)


def machine_of(member: Member | None) -> RoundMachine:
    """The round that a member is in."""
    assert member is not None
    assert member.machine is not None
    return member.machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """Classes that members are made of; tests put machines with a bug in here."""

    machine: MakeMachine = RoundMachine
    reduction: MakeReduction = Reduction


class Passed(enum.Enum):
    """Deadlines that have passed: none, those that a lead keeps, or also the timeout on the lead."""

    NOTHING = ""
    DEADLINES = ", and waits no longer for them"
    TIMEOUT = ", and gives up the view"


class WayBack(enum.Enum):
    """State in which a killed member returns: its contribution is on disk, or lost, or there is none as before."""

    WITH = "returns with its contribution"
    WITHOUT = "returns without its contribution"
    AS_BEFORE = "returns"


class Run:
    """A member that takes a step. `helds` are what others said they hold, by sender."""

    def __init__(
        self,
        setup: ScopeSetup,
        components: Components,
        position: int,
        state: MemberState,
        helds: dict[PeerId, list[Held]],
    ) -> None:
        self._setup = setup
        self._components = components
        self._position = position
        self._helds = helds
        self._state = state
        self._box: Box | None = None
        self._here: Here
        self._now = NOW
        self.reduction = None if state.reduction is None else reduction_copy(state.reduction)
        self.log = state.log
        self.said = set(state.said)
        self.posted = set(state.posted)
        self.signed = set(state.signed)
        self.closed = set(state.closed)
        self.words = set(state.words)
        self.finals = set(state.finals)
        self.kept, self.closed_to = dict(state.kept), dict(state.closed_to)
        if self.reduction is not None:
            self.kept[self.reduction.lineage] = self.reduction._kept
        self.life, self.lost, self.old, self.over = state.life, state.lost, state.old, state.over
        self.computed: list[Finals] = []
        self.votes: list[tuple[int, bytes]] = []
        self.cuts: list[MemberState] = []
        self.interrupted = False
        """True if a reduction was closed off, revised or ended: then it matters what had arrived."""
        self.violation: str | None = None
        self.readies = {} if state.member is None else dict(state.machine._gathering._readies)
        self._before: Plan | None = None if state.member is None else state.machine.plan
        self._closing: CloseOff | None = None
        self._changed = self._acted = False
        self._attach()

    def _attach(self) -> None:
        if self.reduction is not None:
            self.reduction._post = self._post
            self.reduction._on_progress = ignore

    @property
    def machine(self) -> RoundMachine:
        """The machine, this run's own."""
        return machine_of(self._own().member)

    def _own(self) -> Box:
        """The member, this run's own from when it is first needed."""
        if self._box is None:
            assert self._state.member is not None
            self._here = self._surroundings()
            self._box = self._boxed(member_copy(self._state.member, self._here))
        return self._box

    def _surroundings(self) -> Here:
        return Here(self._setup, self._position, self.log, self._setup.everyone, self.life, self.lost)

    def _boxed(self, member: Member) -> Box:
        return Box(member, self._do, lambda: self._now)

    def _feed(self, event: Input) -> None:
        if not self.over:
            self._own().put(event)

    # -- beginning and end ---------------------------------------------------------------------------------------

    def state(self) -> MemberState:
        """The member after the step."""
        if self._box is not None and not self.over:
            self._here.believed = self._setup.everyone
            unhear(self.machine, self._setup.everyone, self.readies)
        return self._state_now(self._state.member if self._box is None else self._box.member)

    def _state_now(self, member: Member | None) -> MemberState:
        return MemberState(
            member=member,
            reduction=self.reduction,
            log=self.log,
            said=frozenset(self.said),
            posted=frozenset(self.posted),
            signed=frozenset(self.signed),
            closed=frozenset(self.closed),
            words=frozenset(self.words),
            finals=frozenset(self.finals),
            kept=dict(self.kept),
            closed_to=dict(self.closed_to),
            life=self.life,
            lost=self.lost,
            old=self.old,
            over=self.over,
        )

    def begin(self) -> None:
        """The process starts, with what is on disk."""
        setup = self._setup
        self._here = self._surroundings()
        member = Member(
            identity=setup.identities[self._position],
            surroundings=self._here,
            deal=setup.deal,
            scores=DonorScores(),
            make=self._components.machine,
        )
        self._box = self._boxed(member)
        self._feed(StateSought(None))

    def restart(self, way: WayBack) -> None:
        """Killed: what was not on disk is gone, and all that was kept of reductions."""
        self.life, self.lost, self.over = self.life + 1, self.lost or way is WayBack.WITHOUT, False
        self.readies = {}
        self.reduction = self._before = None
        self.closed, self.words = set(), set()
        self.kept, self.closed_to = {}, {}
        self.old = frozenset(m for m in self.said if isinstance(m, Plan))
        self.begin()

    # -- inputs --------------------------------------------------------------------------------------------------

    def hear(self, sender: int, message: Message) -> None:
        """A message comes in; one that is refused changes nothing."""
        self._feed(Received(self._setup.peers[sender], message))
        if isinstance(message, Ready) and not self.over:
            self.readies = dict(self.machine._gathering._readies)

    def believe(self, alive: Iterable[PeerId], passed: Passed) -> None:
        """The detector says who lives; after that, as much time passes as is told."""
        if self.over:
            return
        self._own()
        self._here.believed = frozenset(alive)
        self._acted = False
        self._feed(Tick())
        if not self._acted and not self.over and passed is not Passed.NOTHING:
            if passed is Passed.DEADLINES:
                self.machine._watch._timeouts.since = DUE - MOMENT_S
            self._now = DUE
            self._feed(Tick())
            self._now = NOW

    def deliver(self, parcel: Parcel) -> None:
        """A payload comes in, whole."""
        reduction, sender = self.reduction, self._setup.peers[parcel.sender]
        if reduction is None:
            return
        before = reduction._finals.get(parcel.chunk)
        where = reduction.final_region if parcel.final else reduction.contribution_region
        received = reduction.final_received if parcel.final else reduction.contribution_received
        try:
            region = where(sender, parcel.chunk, 0, len(parcel.payload))
            if region is None:
                return
            region[:] = parcel.payload
            received(sender, parcel.chunk, 0, region)
        except RemoteError as error:
            self.violation = self.violation or f"an honest member was blamed: {error}"
            return
        if parcel.final and reduction._finals.get(parcel.chunk) is not before:
            self._judge_counted(reduction, sender)
        self._look_at_reduction()

    def copy(self, finals: Finals) -> None:
        """Copy the finals that lack from somebody who has them all, by the plan that is followed or an earlier one."""
        reduction = self.reduction
        assert reduction is not None
        final_format = FinalFormat(finals.plan)
        for chunk in sorted(reduction._finals_wanted):
            reduction.take_copy(final_format.open(chunk, finals.chunks[chunk].payload))
            if chunk in reduction._finals:
                self._judge_counted(reduction, reduction.final_format.source(chunk))
        self._look_at_reduction()

    def _judge_counted(self, reduction: Reduction, source: PeerId) -> None:
        if (reduction.lineage, source) in self.closed:
            self.violation = self.violation or "a final of the evicted counted after closing off"

    def compute(self, finals: Finals) -> None:
        """All finals of a plan are here, reduced or fetched."""
        self.finals.add((finals.plan.hash, report_of(finals).digest))
        self._feed(Reduced(finals, 0.0))

    # -- effects -------------------------------------------------------------------------------------------------

    def _do(self, effect: MemberEffect) -> Any:
        self._acted |= type(effect) not in LOOKING
        return do_by(DOERS, self, effect)

    def _write(self, effect: Write) -> None:
        if self._changed:
            self.cuts.append(self._state_now(None))
        self.log += tuple(self._setup.proofs.record(record) for record in effect.records)
        self._here.log = self.log

    def _blame(self, effect: Blame) -> None:
        self.violation = self.violation or f"an honest member was blamed: {effect.text}"

    def _mismatch(self, effect: Mismatch) -> None:
        self.violation = self.violation or "two digests of one plan"

    def _evicted(self, effect: Evicted) -> None:
        if self.reduction is not None:
            self.reduction.close()
            self.interrupted = True
        self.reduction = None

    def _append(self, effect: Append) -> None:
        """The round is over for it. Votes are counted and not heard, so only who is a quorum by itself decides."""
        certificate = effect.entry
        if not isinstance(certificate, Certificate) or not outweighs(self._setup.previous, certificate.signers):
            self.violation = self.violation or "certified by a minority"
        if self.reduction is not None:
            self.reduction.close()
        self.over = True
        self._own().stop()

    def _start_reduce(self, effect: StartReduce) -> None:
        self._start(effect.plan)

    def _start(self, plan: Plan) -> None:
        place = plan.number(self._setup.peers[self._position])
        counted = place is not None and plan.participants[place].weight > 0
        left, self.kept[plan.lineage] = self.reduction, kept_copy(self.kept.get(plan.lineage, Kept()))
        self.reduction = self._components.reduction(
            plan=plan,
            identity=self._setup.identities[self._position],
            contribution=self._setup.contributions[self._position] if counted and not self.lost else None,
            post=self._post,
            on_progress=ignore,
            kept=self.kept[plan.lineage],
        )
        self.reduction.close_off(self.closed_to.get(plan.lineage, ()))
        if left is not None:
            left.close()
            self.interrupted = True
        self.closed = {(plan.lineage, self._peer(peer)) for peer in plan.evicted}
        self.closed |= {(word.lineage, self._peer(peer)) for word in self.words for peer in word.evicted}
        self.reduction.start()
        self._look_at_reduction()

    def _repair(self, effect: Repair) -> None:
        plan = effect.plan
        if self.reduction is None or self.reduction.lineage != plan.lineage:
            self._start(plan)
            return
        self.interrupted = True
        self.closed |= {(plan.lineage, self._peer(peer)) for peer in plan.evicted}
        self.reduction.follow(plan)
        self.reduction.repair(plan, dict(effect.held))
        self._look_at_reduction()

    def _close_off(self, asked: CloseOff) -> tuple[ChunkResults, ...]:
        reduction = self.reduction
        self._closing, self.interrupted = asked, True
        self.closed |= {(asked.lineage, peer) for peer in asked.evicted}
        self.closed_to[asked.lineage] = self.closed_to.get(asked.lineage, frozenset()) | asked.evicted
        if reduction is None or reduction.lineage != asked.lineage:
            return ()
        return reduction.close_off(asked.evicted)

    def _to_be_told(self, asked: CloseOff) -> dict[int, tuple[int, bytes]]:
        reduction = self.reduction
        if reduction is None or reduction.lineage != asked.lineage:
            return {}
        gone = {peer for lineage, peer in self.closed if lineage == asked.lineage}
        return {
            chunk: (reduction._places[final.owner], final.result)
            for chunk, final in reduction._finals.items()
            if reduction.plan.origin != NO_HASH or final.owner in gone
        }

    def _look_at_reduction(self) -> None:
        """Note what was signed; report once all finals of the plan are here and are what their owners signed."""
        reduction = self.reduction
        if reduction is None:
            return
        for chunk, final in reduction._signed.items():
            row = (reduction.lineage, chunk, final.bitmap, final.result)
            self.violation = self.violation or wrong_signature(frozenset(self.signed), *row)
            self.signed.add(row)
        complete = reduction.final_chunks == reduction.plan.chunks
        if complete and not any(plan == reduction.plan.hash for plan, _ in self.finals):
            if reduction.verify():
                self.violation = self.violation or "a final that its owner did not sign"
                return
            finals = reduction.result()
            wrong = wrong_finals(self._setup, finals) or wrong_report(self.words, finals)
            self.violation = self.violation or wrong
            self.computed.append(finals)
            self.compute(finals)

    # -- what goes out ------------------------------------------------------------------------------------------

    def _post(self, to: PeerId, kind: FrameKind, chunk: int, payload: memoryview) -> None:
        assert self.reduction is not None
        plan = self.reduction.plan
        parcel = Parcel(
            self._position,
            self._setup.number[to],
            kind is FrameKind.FINAL,
            chunk,
            (plan.view, plan.attempt),
            plan.lineage,
            bytes(payload),
        )
        if not parcel.final:
            self.violation = self.violation or wrong_contribution(self._setup, parcel)
        self._changed |= parcel not in self.posted
        self.posted.add(parcel)

    def _broadcast(self, effect: Broadcast) -> None:
        message, asked = effect.message, self._closing
        if asked is not None and isinstance(message, Held):
            self._closing = None
            self.words.add(message)
            self.violation = self.violation or wrong_held(message, self._to_be_told(asked))
        self._say(message)

    def _say(self, message: Message) -> None:
        message = self._setup.proofs.message(message)
        if isinstance(message, Vote):
            message = msgspec.structs.replace(message, signature=bytes(64))
        if message in self.said:
            return
        if isinstance(message, Prepare | Vote | Propose | ViewChange):
            self.violation = self.violation or broken_promise(self.log, frozenset(self.said), message)
        if isinstance(message, Vote):
            self.votes.append((message.view, message.value))
        if isinstance(message, Prepare | Vote):
            self.violation = self.violation or self._unfounded(message)
        if isinstance(message, Plan):
            me = self._setup.peers[self._position]
            own = [m for m in self.said if isinstance(m, Held)]
            self.violation = self.violation or wrong_revision(self._before, message, {**self._helds, me: own})
            self._before = message
        self._changed = True
        self.said.add(message)

    def _unfounded(self, vote: Prepare | Vote) -> str | None:
        """Check that a signer had all finals of the value, in this life or an earlier one, and found that digest."""
        value = next((r.value for r in self.log if r.value is not None and r.value.hash == vote.value), None)
        founded = value is not None and (value.plan, value.digest) in self.finals
        return None if founded else "a vote without the finals"

    @staticmethod
    def _peer(peer: str) -> PeerId:
        return PeerId(peer)


def ignore(progress: ReduceProgress) -> None:
    """Progress is looked at after every step."""


LOOKING = {Seek, WatchReduction, Tell, Train}
"""Effects of a tick on which nothing happened."""

DOERS: Doers = {
    Announce: lambda run, effect: run._setup.readies[run._position],
    Append: Run._append,
    BeginRound: lambda run, effect: {},
    Blame: Run._blame,
    Broadcast: Run._broadcast,
    CloseOff: Run._close_off,
    Evicted: Run._evicted,
    Examine: nothing,
    FetchFinals: nothing,  # that is a step of its own
    FindWork: lambda run, effect: run._here.made,
    FinishWork: nothing,
    GiveWay: nothing,
    Mismatch: Run._mismatch,
    Repair: Run._repair,
    ResumeWork: nothing,
    Seek: nothing,
    StandOnHead: nothing,
    StartReduce: Run._start_reduce,
    TakePart: nothing,
    Tell: nothing,
    Train: nothing,
    WatchReduction: lambda run, effect: Watched(None, (NO_HASH, ())),
    WorkOut: lambda run, effect: report_of(effect.finals),
    Write: Run._write,
}
"""Handler of each effect of a member. Whatever follows on a decided round is out of scope, and so are stalls."""
