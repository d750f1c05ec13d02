"""A node of a virtual swarm: the member that nodes run, driven by `shoal.lab.box`, what it looks at, and its disk.

What its member decides is the product's; what its effects come to is said here, or by the lab that it is in. A state is
the value that led to it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from shoal.lab.box import LATER, Box, Doers, Surroundings, do_by, nothing
from shoal.lab.errands import Errands
from shoal.protocol.agreement import Broadcast, DurableRecord
from shoal.protocol.bans import NeedEvidence
from shoal.protocol.chain import Chain, Position
from shoal.protocol.donors import DonorScores
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
    KeepFork,
    KeepOrder,
    MemberEffect,
    PauseTrainer,
    Rejoin,
    Repair,
    ResumeWork,
    Seek,
    Send,
    SettleWork,
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
from shoal.protocol.errors import ConfigError
from shoal.protocol.forks import Fork
from shoal.protocol.identity import PeerId
from shoal.protocol.inputs import Input, Loaded, OfPlan, OfState, Order
from shoal.protocol.member import Member
from shoal.protocol.messages import (
    MEMBER_LIMIT,
    Certificate,
    OwnedRange,
    Plan,
    Ready,
    Report,
    Value,
    domain_hash,
)
from shoal.protocol.planning import RoundSettings
from shoal.protocol.round import RoundMachine
from shoal.protocol.surroundings import Rules
from tests.protocol.lab import PaperIdentity

if TYPE_CHECKING:
    from tests.protocol.round_lab import RoundLab

APPLY_S = 0.05
STALENESS_ROUNDS = 2
REPLAYED_ROUNDS = 3

SETTINGS = RoundSettings(
    numel=10_000, chunk_values=1000, codec="fp32", grace_s=3.0, reduce_deadline_s=30.0, weight_cap=4.0
)


def chunk_result(plan: Plan, chunk: int) -> bytes:
    """The hash of a final of that plan."""
    return domain_hash("result", plan.hash, str(chunk).encode())


def report_on(plan: Plan) -> Report:
    """What every honest participant computes."""
    counted = b"".join(p.root for p in plan.participants if p.weight)
    return Report(
        term=plan.term,
        round=plan.round,
        base=plan.base,
        plan=plan.hash,
        digest=domain_hash("digest", plan.hash, counted),
        bitmaps=domain_hash("bitmaps", counted),
        tokens=sum(p.tokens for p in plan.participants),
    )


def deal_evenly(bandwidths: Sequence[tuple[int, int]], chunks: int) -> tuple[OwnedRange, ...]:
    """Equal runs of chunks to everyone, the first ones a chunk more."""
    count = len(bandwidths)
    edges = [chunks * i // count for i in range(count + 1)]
    return tuple(OwnedRange(i, edges[i], edges[i + 1]) for i in range(count) if edges[i] < edges[i + 1])


@dataclass(frozen=True)
class Whole:
    """All finals of a plan."""

    plan: Plan

    @property
    def counted(self) -> list[PeerId]:
        return [p.peer for p in self.plan.participants if p.weight]


class Node(Surroundings):
    """One node: its member, what that looks at and asks for, and what survives a crash.

    On disk are its chain, its log, the state that it is `at`, finals, and its contribution.
    """

    replayed_rounds = REPLAYED_ROUNDS

    def __init__(self, lab: RoundLab, number: int, identity: PaperIdentity, *, train_s: float) -> None:
        self.lab = lab
        self.number = number
        self.identity = identity
        self.chain = Chain(lab.start, manifest=lab.manifest)
        self.at: Value | None = lab.start
        self.log: list[DurableRecord] = []
        self.finals: dict[bytes, OfPlan] = {}
        self.contribution: Ready | None = None
        self.train_s = train_s
        self.trained_at = 0.0
        self.trains = self.paused = self.wrong_state = False
        self.orders: dict[type[Order], Order] = {}
        self.forks: list[Fork] = []
        self.has_old_states = True
        self.box: Box | None = None
        self.hung = False
        self.life = 0
        self.present: dict[PeerId, int] = {}
        """Who is there, each in which of its lives."""
        self.reducing: Plan | None = None
        self.reducing_since = 0.0
        self.asleep: list[Callable[[], None]] = []
        self.fetching: set[bytes] = set()
        self.evictions: list[Plan] = []
        self.blamed: list[str] = []
        self.make: Callable[..., RoundMachine] = RoundMachine
        self._only: Collection[int] | None = None

    @property
    def peer(self) -> PeerId:
        return self.identity.peer_id

    @property
    def up(self) -> bool:
        return self.box is not None

    @property
    def height(self) -> int:
        return self.chain.height

    @property
    def values(self) -> list[Value]:
        """All that were decided, from genesis on."""
        return [self.lab.start, *(entry.value for entry in self.chain.entries)]

    def certificate(self, base: Value) -> Certificate:
        """What was decided after `base`."""
        entry = self.chain.after_base(base.hash)
        assert isinstance(entry, Certificate)
        return entry

    @property
    def member(self) -> Member:
        """The member of a node that is up."""
        assert self.box is not None
        return self.box.member

    @property
    def machine(self) -> RoundMachine | None:
        """The round under way."""
        return None if self.box is None else self.box.member.machine

    def running(self) -> RoundMachine:
        """The machine of a node that is in a round."""
        assert self.machine is not None
        return self.machine

    def put(self, event: Input) -> None:
        """Feed the member, unless its process is gone meanwhile. An order that cannot be comes to nothing."""
        if self.box is not None:
            with suppress(ConfigError):
                self.box.put(event)

    def start(self) -> None:
        """Begin with what is on disk."""
        self.life += 1
        self.trains, self.trained_at = False, 0.0
        self.fetching.clear()
        member = Member(
            identity=self.identity, surroundings=self, deal=deal_evenly, scores=DonorScores(), make=self.make
        )
        self.box = Box(member, self._do, lambda: self.lab.now)
        self.put(Loaded(tuple(self.orders.values())))

    def stop(self) -> None:
        """The process is gone."""
        if self.box is not None:
            self.box.stop()
        self.box = self.reducing = None
        self.hung = False
        self.life += 1
        self.asleep.clear()

    def awake(self, life: int, action: Callable[[], None]) -> bool:
        """Whether it can do something now; if it hangs, it does `action` when it wakes."""
        if self.hung and self.life == life:
            self.asleep.append(action)
        return self.up and self.life == life and not self.hung

    # -- what its member looks at ------------------------------------------------------------------------------

    @property
    def current(self) -> bool:
        return self.at is not None and self.at.hash == self.chain.standing.hash

    @property
    def held(self) -> OfState | None:  # type: ignore[override]
        return self.at

    @property
    def digest(self) -> bytes:
        return domain_hash("wrong") if self.wrong_state else self.chain.head.digest

    @property
    def made(self) -> bool:
        return self.contribution is not None and self.contribution.base == self.chain.head.hash

    @property
    def resting(self) -> bool:  # type: ignore[override]
        return not self.trains

    def bound_in(self, position: Position) -> list[DurableRecord]:
        return [record for record in self.log if (record.term, record.round) == position]

    def alive(self) -> frozenset[PeerId]:
        return frozenset(self.present)

    def leaving(self) -> list[PeerId]:
        others = (node for node in self.lab.nodes if node.up and node.peer in self.present)
        return [node.peer for node in others if node.member.leaving and not node.member.needed]

    def linked(self) -> list[PeerId]:
        return [peer for peer in self.present if peer != self.peer]

    def rules(self, round: int) -> Rules:
        seats = MEMBER_LIMIT if self.lab.manifest is None else self.lab.manifest.seats
        return Rules(settings=replace(SETTINGS, seats=seats), staleness_rounds=STALENESS_ROUNDS)

    def new_life(self) -> bytes:
        return domain_hash("life", self.peer.encode(), next(self.lab.lives).to_bytes(8, "little"))

    # -- effects -------------------------------------------------------------------------------------------------

    def _do(self, effect: MemberEffect) -> Any:
        life = self.life
        self._only = self.lab.intercept(self.number, effect)
        return do_by(DOERS, self, effect) if self.up and self.life == life else None

    def _write(self, effect: Write) -> None:
        self.log += effect.records

    def _broadcast(self, effect: Broadcast) -> None:
        self.lab.broadcast(self.number, effect.message, self._only)

    def _send(self, effect: Send) -> None:
        self.lab.ledger.sent(self.peer, effect.message)
        self.lab._send(self.number, self.lab.number(effect.peer), effect.message)

    def _blame(self, effect: Blame) -> None:
        self.blamed.append(effect.text)

    def _begin_round(self, effect: BeginRound) -> Mapping[bytes, PeerId]:
        self.reducing = None
        return self.lab._evidence(self)

    def _train(self, effect: Train) -> None:
        if effect.contribute and not effect.at_once:  # what is learnt alone meanwhile, and speeds, are not modelled
            self.trains = True
            if self.trained_at <= self.lab.now:
                self.trained_at = self.lab.now + self.train_s * self.lab.rng.uniform(0.8, 1.2)

    def _pause(self, effect: PauseTrainer) -> None:
        self.paused = effect.paused

    def _contribute(self, effect: Contribute) -> Ready:
        self.contribution = self.lab._contribution(self)
        return self.contribution

    def _announce(self, effect: Announce) -> Ready:
        assert self.contribution is not None
        return self.contribution

    def _follow(self, effect: StartReduce | Repair) -> None:
        self.reducing, self.reducing_since = effect.plan, self.lab.now
        self.lab._reduce(self.number, effect)

    def _evicted(self, effect: Evicted) -> None:
        self.reducing = None
        self.evictions.append(effect.plan)

    def _stop_reduction(self, effect: StopReduction) -> None:
        self.reducing = None

    def _watch(self, effect: WatchReduction) -> Watched:
        return Watched(self.lab._stalled(self), (b"", ()))

    def _work_out(self, effect: WorkOut) -> Report:
        self.finals[effect.finals.plan.hash] = effect.finals
        return self.lab.report_of(effect.finals)

    def _append(self, effect: Append) -> bool:
        assert isinstance(effect.entry, Certificate)
        self.lab.append(self, effect.entry)
        return True

    def _apply(self, effect: Apply) -> object:
        self.lab.after(APPLY_S, partial(self._applied, self.life, effect.certificate.value))
        return LATER

    def _applied(self, life: int, value: Value) -> None:
        if self.awake(life, partial(self._applied, life, value)):
            assert self.box is not None
            self.at = value
            with suppress(ConfigError):
                self.box.done()

    def _adopt(self, effect: Adopt) -> None:
        assert isinstance(effect.state, Value)
        self.at = effect.state

    def _seek(self, effect: Seek) -> None:
        errands = Errands(partial(self.lab._perform, self, self.life), lambda: self.lab.now)
        errands.begin(effect.errand, self._sought)

    def _sought(self, outcome: Input | None) -> None:
        if outcome is not None:
            self.put(outcome)

    def _keep_order(self, effect: KeepOrder) -> None:
        self.orders[type(effect.order)] = effect.order

    def _drop_order(self, effect: DropOrder) -> None:
        self.orders.pop(effect.kind, None)

    def _goodbye(self, effect: Goodbye) -> None:
        self.lab.kill(self.number)


DOERS: Doers = {
    Adopt: Node._adopt,
    Announce: Node._announce,
    Append: Node._append,
    Apply: Node._apply,
    BeginRound: Node._begin_round,
    Blame: Node._blame,
    Broadcast: Node._broadcast,
    Certified: lambda node, effect: node.lab._certified(node, effect.certificate),
    CloseOff: lambda node, effect: node.lab._close_off(node, effect),
    Contribute: Node._contribute,
    DropOrder: Node._drop_order,
    Evicted: Node._evicted,
    Examine: lambda node, effect: node.lab._examine(node, effect.peer, effect.message),
    FetchFinals: lambda node, effect: node.lab._need(node, effect.value.plan),
    FindEarlierRounds: lambda node, effect: range(node.chain.standing.round if node.has_old_states else 0),
    FindWork: lambda node, effect: node.made,
    FinishWork: nothing,
    ForgetEarlier: nothing,
    GiveWay: nothing,
    Goodbye: Node._goodbye,
    KeepFork: lambda node, effect: node.forks.append(effect.fork),
    KeepOrder: Node._keep_order,
    NeedEvidence: lambda node, effect: node.lab._need_evidence(node, effect.value),
    PauseTrainer: Node._pause,
    Rejoin: nothing,
    Repair: Node._follow,
    ResumeWork: nothing,
    Seek: Node._seek,
    Send: Node._send,
    SettleWork: nothing,
    StandOnHead: nothing,
    StartReduce: Node._follow,
    StopReduction: Node._stop_reduction,
    TakePart: nothing,
    Tell: nothing,
    Train: Node._train,
    WatchReduction: Node._watch,
    WorkOut: Node._work_out,
    Write: Node._write,
}
"""What does each effect of a member. All compute the same here, and nobody draws S(0), or signs for the authority."""
