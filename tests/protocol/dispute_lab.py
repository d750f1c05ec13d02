"""Members that reduce in virtual time, of which one lies: who goes for it, and how long the others wait.

Every participant owns a chunk. A contribution and a final take a while to go from one to another, directly or through
the relay of the plan, unless a link on the way is cut, the sender withholds it, or the relay drops it. Who honestly
misses, for the stall deadline, something that does not come says so; who honestly relays says what came in and went
out. The liar says what its `Lies` have it say.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from shoal.collectives.stalls import LATE_S, STALL_S, stall_deadline_s
from shoal.lab.box import Box, Doers, Surroundings, do_by, nothing
from shoal.protocol.accusations import pair_of
from shoal.protocol.agreement import Broadcast
from shoal.protocol.certificate import genesis
from shoal.protocol.chain import Chain, Position
from shoal.protocol.donors import DonorScores
from shoal.protocol.durable import DurableRecord
from shoal.protocol.effects import (
    Append,
    BeginRound,
    Blame,
    CloseOff,
    Contribute,
    Evicted,
    Examine,
    FetchFinals,
    FindWork,
    FinishWork,
    GiveWay,
    Repair,
    ResumeWork,
    Seek,
    StandOnHead,
    StartReduce,
    TakePart,
    Train,
    Watched,
    WatchReduction,
    WorkOut,
    Write,
)
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.inputs import Received, Reduced, StateSought, Tick, Trained
from shoal.protocol.member import Member
from shoal.protocol.messages import Message, Plan, Ready, RelayedWay, Value, domain_hash
from shoal.protocol.round import Phase, RoundMachine
from shoal.protocol.surroundings import Rules
from tests.protocol.lab import SWARM, paper_identities
from tests.protocol.round_machines import contribution
from tests.protocol.round_node import SETTINGS, Whole, deal_evenly, report_on

STEP_S = 0.2
SHORT_STEP_S = 0.05
"""Where words take a while."""
TELL_AGAIN_S = 2.0
"""As nodes do (`shoal.node.rounds.pace`)."""

Way = tuple[PeerId, PeerId]
NOBODY: frozenset[PeerId] = frozenset()


@dataclass
class Lies:
    """What the liar does. accuses, late: whom, at a moment under a plan. withholds, keeps: from whom contributions and
    finals. trickles: a byte of what it owes at a time. drops: whether it passes nothing on. claims: what it says as a
    relay in place of what it should."""

    accuses: Callable[[float, Plan], Collection[PeerId]] = lambda now, plan: NOBODY
    late: Callable[[float, Plan], Collection[PeerId]] = lambda now, plan: NOBODY
    withholds: frozenset[PeerId] = NOBODY
    keeps: frozenset[PeerId] = NOBODY
    trickles: bool = False
    drops: bool = False
    claims: Callable[[list[RelayedWay]], list[RelayedWay]] = lambda ways: ways


class Seat(Surroundings):
    """One participant: its member, what that follows, and what has come to it."""

    current = True

    def __init__(self, table: Table, identity: Identity, chain: Chain) -> None:
        self.table = table
        self.me = identity.peer_id
        self.chain = chain
        self.log: list[DurableRecord] = []
        self.made = self.out = False
        self.plan: Plan
        self.since = 0.0
        self.contributed: set[PeerId] = set()
        self.finals: set[PeerId] = set()
        self.moved_at: dict[PeerId, float] = {}
        """By peer, when its contribution came."""
        self.told: tuple[frozenset[PeerId], frozenset[PeerId]] = (NOBODY, NOBODY)
        self.told_at = float("-inf")
        member = Member(identity=identity, surroundings=self, deal=deal_evenly, scores=DonorScores())
        self.box = Box(member, partial(do_by, DOERS, self), lambda: table.now)

    @property
    def machine(self) -> RoundMachine:
        machine = self.box.member.machine
        assert machine is not None
        return machine

    @property
    def reduces(self) -> bool:
        return not self.out and self.machine.phase is Phase.REDUCE

    @property
    def stall_s(self) -> float:
        return stall_deadline_s(self.plan) + self.table.late_s.get(self.me, 0.0)

    # -- what its member looks at ------------------------------------------------------------------------------

    @property
    def digest(self) -> bytes:
        return self.chain.head.digest

    def bound_in(self, position: Position) -> list[DurableRecord]:
        return self.log

    def alive(self) -> frozenset[PeerId]:
        return frozenset(self.table.seats)

    def linked(self) -> Collection[PeerId]:
        return self.table.seats

    def rules(self, round: int) -> Rules:
        return Rules(settings=SETTINGS, staleness_rounds=1)

    def new_life(self) -> bytes:
        return domain_hash("life", self.me.encode())

    # -- effects -------------------------------------------------------------------------------------------------

    def _blame(self, effect: Blame) -> None:
        if effect.peer != self.table.liar:
            raise AssertionError(f"{effect.peer} was blamed: {effect.text}")

    def _write(self, effect: Write) -> None:
        self.log += effect.records

    def _contribute(self, effect: Contribute) -> Ready:
        self.made = True
        return contribution(self.machine)

    def _broadcast(self, effect: Broadcast) -> None:
        self.table.said.append((self.me, effect.message))
        plans = self.table.plans
        if isinstance(effect.message, Plan) and (not plans or effect.message != plans[-1][1]):
            plans.append((self.table.now, effect.message))

    def _follow(self, effect: StartReduce | Repair | Evicted) -> None:
        if isinstance(effect, StartReduce):
            self.contributed, self.finals = set(), set()
        self.out = isinstance(effect, Evicted)
        self.plan, self.since = effect.plan, self.table.now
        self.told, self.told_at = (NOBODY, NOBODY), float("-inf")

    def _watch(self, effect: WatchReduction) -> Watched:
        return self.table.watched(self, overdue=effect.overdue) if self.reduces else Watched(None, (b"", ()))

    def _append(self, effect: Append) -> None:
        self.table.decided = effect.entry.value
        self.box.stop()


DOERS: Doers = {
    Append: Seat._append,
    BeginRound: lambda seat, effect: {},
    Blame: Seat._blame,
    Broadcast: Seat._broadcast,
    CloseOff: lambda seat, effect: (),
    Contribute: Seat._contribute,
    Evicted: Seat._follow,
    Examine: nothing,
    FetchFinals: nothing,  # who has no finals does not vote
    FindWork: lambda seat, effect: False,
    FinishWork: nothing,
    GiveWay: nothing,
    Repair: Seat._follow,
    ResumeWork: nothing,
    Seek: nothing,
    StandOnHead: nothing,
    StartReduce: Seat._follow,
    TakePart: nothing,
    Train: nothing,
    WatchReduction: Seat._watch,
    WorkOut: lambda seat, effect: report_on(effect.finals.plan),
    Write: Seat._write,
}


class Table:
    """`count` members in the reduction of one plan. move_s: how long each payload takes.

    delay_s: once it is planned, each word from one to another takes up to so long, as `seed` has it, and none overtakes
    another between the two.
    """

    def __init__(self, count: int, *, move_s: float = 0.3, delay_s: float = 0.0, seed: int = 0) -> None:
        identities = paper_identities(count)
        chain = Chain(genesis(SWARM, [identity.peer_id for identity in identities]))
        self.now = self.began = 1.0
        self.move_s = move_s
        self.takes_s: dict[Way, float] = {}
        """By sender and receiver, how long a contribution takes that takes longer."""
        self.liar: PeerId | None = None
        self.lies = Lies()
        self.cut: set[Way] = set()
        """Pairs without a link, the lower first."""
        self.late_s: dict[PeerId, float] = {}
        """By how much longer some wait, who run late themselves."""
        self.plans: list[tuple[float, Plan]] = []
        self.decided: Value | None = None
        self.said: deque[tuple[PeerId, Message]] = deque()
        self._random, self._delay_s = random.Random(seed), 0.0
        self._on_their_way: dict[Way, deque[tuple[float, Message]]] = {}
        self.seats = {identity.peer_id: Seat(self, identity, chain) for identity in identities}
        for event in (StateSought(None), Trained(chain.head.next_round, None)):
            for seat in self.seats.values():
                seat.box.put(event)
            self._deliver()
        self._delay_s = delay_s
        self.lead = self.plans[0][1].planner
        self.others = [peer for peer in self.seats if peer != self.lead]

    @property
    def honest(self) -> list[PeerId]:
        return [peer for peer in self.seats if peer != self.liar]

    @property
    def evicted(self) -> set[PeerId]:
        """By any plan."""
        return {peer for _, plan in self.plans for peer in plan.evicted}

    @property
    def evicted_in_honesty(self) -> set[PeerId]:
        """By a plan of an honest lead, and none before."""
        found, before = set[PeerId](), set[PeerId]()
        for _, plan in self.plans:
            if plan.planner != self.liar:
                found |= {*plan.evicted} - before
            before.update(plan.evicted)
        return found

    def left_out(self) -> list[frozenset[PeerId]]:
        """Whom each honest one leaves out of the next round."""
        assert self.decided is not None
        return [self.seats[peer].box.member._probation.left_out(self.decided) for peer in self.honest]

    def run(self, seconds: float = 300.0) -> float:
        """Until it is decided: the seconds that it took."""
        while self.decided is None and self.now - self.began < seconds:
            self.now += SHORT_STEP_S if self._delay_s else STEP_S
            self._move()
            for seat in self.seats.values():
                seat.box.put(Tick())
            self._deliver()
        return self.now - self.began

    # -- what moves ----------------------------------------------------------------------------------------------

    def comes_through(self, sender: PeerId, receiver: PeerId, plan: Plan) -> bool:
        """Whether what the one sends reaches the other."""
        via = plan.relayed.get(pair_of(sender, receiver))
        hops = [(sender, receiver)] if via is None else [(sender, via), (via, receiver)]
        dropped = via is not None and via == self.liar and self.lies.drops
        return not dropped and all(pair_of(*hop) not in self.cut for hop in hops)

    def _sends(self, sender: PeerId, receiver: PeerId, *, final: bool) -> bool:
        kept = self.lies.keeps if final else self.lies.withholds
        return not (sender == self.liar and receiver in kept)

    def _flows(self, sender: PeerId, seat: Seat, *, final: bool = False) -> bool:
        """Whether this comes to `seat`, now or later."""
        return self.comes_through(sender, seat.me, seat.plan) and self._sends(sender, seat.me, final=final)

    def _remaining(self, seat: Seat) -> set[PeerId]:
        return set(seat.plan.remaining) - {seat.me}

    def _has_final(self, seat: Seat) -> bool:
        return self._remaining(seat) <= seat.contributed

    def _is_blocked(self, seat: Seat) -> bool:
        """Whether a contribution never comes to it."""
        return any(not self._flows(peer, seat) for peer in self._remaining(seat) - seat.contributed)

    def _move(self) -> None:
        for seat in self.seats.values():
            for peer in self._remaining(seat):
                source, moved_s = self.seats[peer], self.now - max(seat.since, self.seats[peer].since)
                trickles = peer == self.liar and self.lies.trickles
                if seat.out or source.plan != seat.plan or trickles or moved_s < self.move_s:
                    continue
                if self._flows(peer, seat) and moved_s >= self.takes_s.get((peer, seat.me), 0.0):
                    if peer not in seat.contributed:
                        seat.moved_at[peer] = self.now
                    seat.contributed.add(peer)
                if self._has_final(source) and self._flows(peer, seat, final=True):
                    seat.finals.add(peer)
        complete = [s.plan for s in self.seats.values() if self._has_all(s) and not self._keeps_all(s)]
        for seat in self.seats.values():
            if seat.plan in complete:  # finals that others have are copied from them: one is enough
                self._finish(seat)

    def _has_all(self, seat: Seat) -> bool:
        return self._has_final(seat) and self._remaining(seat) <= seat.finals

    def _keeps_all(self, seat: Seat) -> bool:
        """Whether nobody has finals from it."""
        return seat.me == self.liar and self.lies.keeps >= set(self.honest)

    def _finish(self, seat: Seat) -> None:
        if seat.reduces and self._has_final(seat):
            seat.box.put(Reduced(Whole(seat.plan), 0.0))

    # -- what is said --------------------------------------------------------------------------------------------

    def watched(self, seat: Seat, *, overdue: bool) -> Watched:
        """What one that reduces has to say, as `shoal.node.rounds.pace` has it."""
        return Watched(self._stalled(seat, overdue=overdue), (seat.plan.hash, tuple(self._ways(seat))))

    def _stalled(self, seat: Seat, *, overdue: bool) -> tuple[frozenset[PeerId], frozenset[PeerId]] | None:
        waited_s = self.now - seat.since
        missed = self._remaining(seat) - seat.contributed
        owing = {p for p in missed if not self._flows(p, seat)} if waited_s >= seat.stall_s else set()
        late = {p for p in self._remaining(seat) - seat.finals - owing if self._is_quiet(seat, p)}
        if overdue and 2 * len(missed) <= len(self._remaining(seat)):
            owing |= missed
            late |= set() if missed else self._remaining(seat) - seat.finals
        if missed and waited_s >= STALL_S:
            late.add(seat.me)
        if seat.me == self.liar:
            owing = set(self.lies.accuses(self.now, seat.plan))
            late = set(self.lies.late(self.now, seat.plan))
        says = frozenset(owing), frozenset(late)
        if says != seat.told or (any(says) and self.now - seat.told_at >= TELL_AGAIN_S):
            seat.told, seat.told_at = says, self.now
            return says
        return None

    def _is_quiet(self, seat: Seat, peer: PeerId) -> bool:
        """Whether nothing comes from it any more, and its final has not."""
        trickles = peer == self.liar and self.lies.trickles
        since = max(seat.since, seat.moved_at.get(peer, 0.0))
        return peer in seat.contributed and not trickles and self.now - since >= seat.stall_s + LATE_S

    def _ways(self, seat: Seat) -> list[RelayedWay]:
        ways = []
        for (one, other), via in seat.plan.relayed.items():
            if via == seat.me:
                ways += [w for way in ((one, other), (other, one)) if (w := self._way(seat, *way)) is not None]
        return self.lies.claims(ways) if seat.me == self.liar else ways

    def _way(self, relay: Seat, sender: PeerId, receiver: PeerId) -> RelayedWay | None:
        source, waited_s = self.seats[sender], self.now - relay.since
        comes = self._sends(sender, receiver, final=False) and pair_of(sender, relay.me) not in self.cut
        kept = self._has_final(source) and not self._sends(sender, receiver, final=True)
        goes = pair_of(relay.me, receiver) not in self.cut
        places = relay.plan.number(sender), relay.plan.number(receiver)
        assert places[0] is not None
        assert places[1] is not None
        if comes and goes and not kept:
            return RelayedWay(*places, True, True, self._has_final(source)) if waited_s >= self.move_s else None
        if waited_s < relay.stall_s:
            return None
        return RelayedWay(*places, comes and not kept, goes or not comes, False)

    def _deliver(self) -> None:
        while self.said:
            sender, message = self.said.popleft()
            for receiver in [peer for peer in self.seats if peer != sender] if self._delay_s else ():
                way = self._on_their_way.setdefault((sender, receiver), deque())
                at = self.now + self._random.uniform(0, self._delay_s)
                way.append((max(at, way[-1][0]) if way else at, message))
            for seat in () if self._delay_s else self.seats.values():
                if seat.me != sender:
                    seat.box.put(Received(sender, message))
        for _, (sender, receiver) in sorted((way[0][0], ends) for ends, way in self._on_their_way.items() if way):
            way = self._on_their_way[sender, receiver]
            while way and way[0][0] <= self.now:
                self.seats[receiver].box.put(Received(sender, way.popleft()[1]))
