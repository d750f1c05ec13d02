"""One step of one member of a round with repairs: the machines do their part, and everything they do is judged."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from shoal.collectives.finals import FinalFormat, Finals
from shoal.collectives.progress import ReduceProgress
from shoal.collectives.reduce import Kept, Reduction
from shoal.lab.explore.repair_copy import DUE, MOMENT_S, NOW, copy_of, kept_copy, reduction_copy, unhear
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
from shoal.lab.explore.scope import outweighs
from shoal.lab.explore.word import broken_promise
from shoal.protocol.agreement import Broadcast, Decided, DurableRecord, Mismatch, Persist
from shoal.protocol.effects import CloseOff, Effect, Evicted, Repair, StartReduce
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerId
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
from shoal.protocol.planning import OBSERVER, absent_ready
from shoal.protocol.round import RoundMachine
from shoal.swarm.lanes.frame import FrameKind

MakeMachine = Callable[..., RoundMachine]
MakeReduction = Callable[..., Reduction]

Said = frozenset[Message]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One member in one state, which never changes. `life` is the number of the life that it is in, from 0 on, and
    `old` are the plans that it made in earlier ones; `lost`: it has its contribution no more."""

    machine: RoundMachine
    reduction: Reduction | None
    log: tuple[DurableRecord, ...]
    said: Said
    posted: frozenset[Parcel]
    signed: Signed
    closed: Closed
    words: frozenset[Held]
    finals: frozenset[tuple[bytes, bytes]]
    """(plan, digest) of every complete set that it had."""
    kept: Mapping[bytes, Kept] = field(default_factory=dict)
    """By lineage: what reductions of its present life left for when they are begun again."""
    closed_to: Mapping[bytes, frozenset[PeerId]] = field(default_factory=dict)
    """By lineage: the evictions that it heard in its present life, whether or not it had the plan."""
    life: int = 0
    lost: bool = False
    old: Said = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """What members are made of; tests put machines with a bug in here."""

    machine: MakeMachine = RoundMachine
    reduction: MakeReduction = Reduction


class Passed(enum.Enum):
    """What has passed: nothing, the deadlines that a lead keeps, or also the patience with the lead."""

    NOTHING = ""
    DEADLINES = ", and waits no longer for them"
    TIMEOUT = ", and gives up the view"


class WayBack(enum.Enum):
    """How a member that was killed is there again: its contribution may be on disk, or lost, or none as before."""

    WITH = "returns with its contribution"
    WITHOUT = "returns without its contribution"
    AS_BEFORE = "returns"


class Run:
    """A member that takes a step. `heard` is all that others said by then, by sender; `helds` are among it."""

    def __init__(
        self, setup: ScopeSetup, components: Components, position: int, member: Member, helds: dict[PeerId, list[Held]]
    ) -> None:
        self._setup = setup
        self._components = components
        self._position = position
        self._helds = helds
        self._member = member
        self._machine: RoundMachine | None = None
        self.reduction = None if member.reduction is None else reduction_copy(member.reduction)
        self.log = member.log
        self.said = set(member.said)
        self.posted = set(member.posted)
        self.signed = set(member.signed)
        self.closed = set(member.closed)
        self.words = set(member.words)
        self.finals = set(member.finals)
        self.kept, self.closed_to = dict(member.kept), dict(member.closed_to)
        if self.reduction is not None:
            self.kept[self.reduction.lineage] = self.reduction._kept
        self.life, self.lost, self.old = member.life, member.lost, member.old
        self.computed: list[Finals] = []
        self.votes: list[tuple[int, bytes]] = []
        self.cuts: list[Member] = []
        self.interrupted = False
        """Whether a reduction was closed off, revised or ended: then it matters what had arrived."""
        self.violation: str | None = None
        self.readies = dict(member.machine._gathering._readies)
        self._before: Plan | None = member.machine.plan
        self._changed = False
        self._attach()

    def _attach(self) -> None:
        if self.reduction is not None:
            self.reduction._post = self._post
            self.reduction._on_progress = ignore

    @property
    def machine(self) -> RoundMachine:
        """The machine, this run's own from when it is first needed."""
        if self._machine is None:
            self._machine = copy_of(self._member.machine)
        return self._machine

    # -- beginning and end ---------------------------------------------------------------------------------------

    def member(self) -> Member:
        """The member after the step."""
        if self._machine is not None:
            unhear(self._machine, self._setup.everyone, self.readies)
        return self._now()

    def _now(self) -> Member:
        return Member(
            machine=self._member.machine if self._machine is None else self._machine,
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
        )

    def restart(self, way: WayBack) -> None:
        """Killed: what was not on disk is gone, and all that was kept of reductions."""
        setup = self._setup
        self.life, self.lost = self.life + 1, self.lost or way is WayBack.WITHOUT
        self._machine = new_machine(setup, self._components, self._position, self.life)
        self.machine._facts.alive = setup.everyone
        self.readies = {}
        self.reduction = self._before = None
        self.closed, self.words = set(), set()
        self.kept, self.closed_to = {}, {}
        self.old = frozenset(m for m in self.said if isinstance(m, Plan))
        effects = self.machine.restore(self.log)
        ready = absent_ready(OBSERVER, setup.previous, STATE) if self.lost else setup.readies[self._position]
        effects += self.machine.ready(ready, NOW)
        self.carry_out([*effects, *map(Broadcast, self.machine.current())])

    # -- inputs --------------------------------------------------------------------------------------------------

    def hear(self, sender: int, message: Message) -> None:
        """A message comes in; one that the machine refuses changes nothing."""
        try:
            effects = self.machine.receive(self._setup.peers[sender], message, NOW)
        except RemoteError as error:
            self.violation = self.violation or f"an honest member was blamed: {error}"
            return
        if isinstance(message, Ready):
            self.readies = dict(self.machine._gathering._readies)
        self.carry_out(effects)

    def believe(self, alive: Iterable[PeerId], passed: Passed) -> None:
        """The detector says who lives; after that, as much time passes as is told."""
        effects = self.machine.peers_alive(alive, NOW)
        if not effects and passed is not Passed.NOTHING:
            if passed is Passed.DEADLINES:
                self.machine._watch._timeouts.since = DUE - MOMENT_S
            effects = self.machine.tick(DUE)
        self.carry_out(effects)

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
        """Those that lack come from somebody who has them all, by the plan that is followed or an earlier one."""
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
        report = report_of(finals)
        self.finals.add((report.plan, report.digest))
        participants = [participant.peer for participant in finals.plan.participants]
        self.carry_out(self.machine.reduced(report, NOW, participants=participants))

    # -- effects -------------------------------------------------------------------------------------------------

    def carry_out(self, effects: Iterable[Effect]) -> None:
        """As the engine does: in order, closing off last."""
        closing: list[CloseOff] = []
        for effect in effects:
            if isinstance(effect, Persist):
                if self._changed:
                    self.cuts.append(self._now())
                self.log += (self._setup.proofs.record(effect.record),)
            elif isinstance(effect, Broadcast):
                self._say(effect.message)
            elif isinstance(effect, StartReduce):
                self._start(effect.plan)
            elif isinstance(effect, Repair):
                self._repair(effect)
            elif isinstance(effect, Evicted):
                if self.reduction is not None:
                    self.reduction.close()
                    self.interrupted = True
                self.reduction = None
            elif isinstance(effect, CloseOff):
                closing.append(effect)
            elif isinstance(effect, Mismatch):
                self.violation = self.violation or "two digests of one plan"
            elif isinstance(effect, Decided):
                self._decide(effect.certificate)
        for asked in closing:
            self._close_off(asked)

    def _decide(self, certificate: Certificate) -> None:
        """Votes are counted and not heard, so only who is a quorum by itself decides."""
        if not outweighs(self._setup.previous, certificate.signers):
            self.violation = self.violation or "certified by a minority"
        if self.reduction is not None:
            self.reduction.close()

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

    def _close_off(self, asked: CloseOff) -> None:
        reduction = self.reduction
        told: tuple[ChunkResults, ...] = ()
        self.interrupted = True
        self.closed |= {(asked.lineage, peer) for peer in asked.evicted}
        self.closed_to[asked.lineage] = self.closed_to.get(asked.lineage, frozenset()) | asked.evicted
        if reduction is not None and reduction.lineage == asked.lineage:
            told = reduction.close_off(asked.evicted)
        effects = self.machine.closed_off(asked, told, NOW)
        word = next((e.message for e in effects if isinstance(e, Broadcast) and isinstance(e.message, Held)), None)
        if word is not None:
            self.words.add(word)
            self.violation = self.violation or wrong_held(word, self._to_be_told(asked))
        self.carry_out(effects)

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
        """Who signs has had all finals of what it signs for, in this life or an earlier one, and found that digest."""
        value = next((r.value for r in self.log if r.value is not None and r.value.hash == vote.value), None)
        founded = value is not None and (value.plan, value.digest) in self.finals
        return None if founded else "a vote without the finals"

    @staticmethod
    def _peer(peer: str) -> PeerId:
        return PeerId(peer)


def ignore(progress: ReduceProgress) -> None:
    """Progress is looked at after every step."""


def new_machine(setup: ScopeSetup, components: Components, position: int, life: int = 0) -> RoundMachine:
    """The machine of a member that has just started, for the `life`-th time after the first."""
    return components.machine(
        identity=setup.identities[position],
        previous=setup.previous,
        state=STATE,
        life=setup.life(position, life),
        settings=setup.settings,
        deal=setup.deal,
    )
