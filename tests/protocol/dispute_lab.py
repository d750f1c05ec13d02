"""Round machines that reduce in virtual time, of which one lies: who goes for it, and how long the others wait.

Every participant owns a chunk. A contribution and a final take a while to go from one to another, directly or through
the relay of the plan, unless a link on the way is cut, the sender withholds it, or the relay drops it. Who honestly
misses, for the stall deadline, something that does not come says so; who honestly relays says what came in and went
out. The liar says what its `Lies` have it say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from shoal.protocol.accusations import pair_of, relays_of
from shoal.protocol.agreement import Broadcast
from shoal.protocol.effects import CloseOff, Effect, Evicted, Repair, StartReduce
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Certificate, Message, Plan, RelayedWay, Value
from shoal.protocol.newcomers import Newcomers
from shoal.protocol.probation import Probation
from shoal.protocol.round import Phase, RoundMachine
from shoal.protocol.timeouts import doubled
from tests.protocol.round_machines import planned

STEP_S = 0.2
STALL_S, STALL_LIMIT_S, LATE_S = 2.0, 16.0, 1.0
TELL_AGAIN_S = 2.0
"""As nodes have them (`shoal.node.rounds.pace`)."""

Way = tuple[PeerId, PeerId]
NOBODY: frozenset[PeerId] = frozenset()


@dataclass
class Lies:
    """What the liar does. accuses, late: whom, at a moment under a plan. withholds, keeps: from whom contributions and
    finals. drops: whether it passes nothing on. claims: what it says as a relay in place of what it should."""

    accuses: Callable[[float, Plan], Collection[PeerId]] = lambda now, plan: NOBODY
    late: Callable[[float, Plan], Collection[PeerId]] = lambda now, plan: NOBODY
    withholds: frozenset[PeerId] = NOBODY
    keeps: frozenset[PeerId] = NOBODY
    drops: bool = False
    claims: Callable[[list[RelayedWay]], list[RelayedWay]] = lambda ways: ways


@dataclass
class Seat:
    """One participant: its machine, what it follows, and what has come to it."""

    machine: RoundMachine
    plan: Plan
    since: float
    plans: int = 0
    contributed: set[PeerId] = field(default_factory=set)
    finals: set[PeerId] = field(default_factory=set)
    probation: Probation = field(default_factory=Probation)
    told: tuple[frozenset[PeerId], frozenset[PeerId]] = (NOBODY, NOBODY)
    told_at: float = float("-inf")
    out: bool = False

    @property
    def me(self) -> PeerId:
        return self.machine.me

    @property
    def stall_s(self) -> float:
        return min(doubled(STALL_S, max(self.plan.attempt, self.plans)), STALL_LIMIT_S)


class Table:
    """`count` machines in the reduction of one plan. move_s: how long each payload takes."""

    def __init__(self, count: int, *, move_s: float = 0.3) -> None:
        self.lab, machines, leader, plan = planned(count)
        self.now = self.began = 1.1
        self.seats = {machine.me: Seat(machine, plan, self.now) for machine in machines}
        for seat in self.seats.values():
            seat.machine.remember(Newcomers(), seat.probation)
        self.lead = machines[leader].me
        self.others = [machine.me for machine in machines if machine.me != self.lead]
        self.move_s = move_s
        self.liar: PeerId | None = None
        self.lies = Lies()
        self.cut: set[Way] = set()
        """Pairs without a link, the lower first."""
        self.plans: list[tuple[float, Plan]] = [(self.now, plan)]
        self.decided: Value | None = None
        self._said: deque[tuple[PeerId, Message]] = deque()

    @property
    def honest(self) -> list[PeerId]:
        return [peer for peer in self.seats if peer != self.liar]

    @property
    def evicted(self) -> set[PeerId]:
        """By any plan."""
        return {peer for _, plan in self.plans for peer in plan.evicted}

    def left_out(self) -> list[frozenset[PeerId]]:
        """Whom each honest one leaves out of the next round."""
        assert self.decided is not None
        return [self.seats[peer].probation.left_out(self.decided) for peer in self.honest]

    def run(self, seconds: float = 300.0) -> float:
        """Until it is decided: the seconds that it took."""
        everyone = list(self.seats)
        while self.decided is None and self.now - self.began < seconds:
            self.now += STEP_S
            for seat in self.seats.values():
                self._carry_out(seat, seat.machine.peers_alive(everyone, self.now))
            self._move()
            for seat in self.seats.values():
                if not seat.out and seat.machine.phase is Phase.REDUCE:
                    self._speak(seat)
                    self._claim(seat)
            self._deliver()
        return self.now - self.began

    # -- what moves ----------------------------------------------------------------------------------------------

    def comes_through(self, sender: PeerId, receiver: PeerId, plan: Plan) -> bool:
        """Whether what the one sends reaches the other."""
        via = relays_of(plan).get(pair_of(sender, receiver))
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
        return set(seat.plan.remaining()) - {seat.me}

    def _has_final(self, seat: Seat) -> bool:
        return self._remaining(seat) <= seat.contributed

    def _is_blocked(self, seat: Seat) -> bool:
        """Whether a contribution never comes to it."""
        return any(not self._flows(peer, seat) for peer in self._remaining(seat) - seat.contributed)

    def _move(self) -> None:
        for seat in self.seats.values():
            for peer in self._remaining(seat):
                source = self.seats[peer]
                if seat.out or source.plan != seat.plan or self.now - max(seat.since, source.since) < self.move_s:
                    continue
                if self._flows(peer, seat):
                    seat.contributed.add(peer)
                if self._has_final(source) and self._flows(peer, seat, final=True):
                    seat.finals.add(peer)
        complete = [s.plan for s in self.seats.values() if self._has_final(s) and self._remaining(s) <= s.finals]
        for seat in self.seats.values():
            if seat.plan in complete:  # finals that others have are copied from them: one is enough
                self._finish(seat)

    def _finish(self, seat: Seat) -> None:
        if not seat.out and seat.machine.phase is Phase.REDUCE and self._has_final(seat):
            self._carry_out(seat, seat.machine.reduced(self.lab.report(seat.plan), self.now))

    # -- what is said --------------------------------------------------------------------------------------------

    def _speak(self, seat: Seat) -> None:
        waited_s = self.now - seat.since
        missed = self._remaining(seat) - seat.contributed
        owing = {p for p in missed if not self._flows(p, seat)} if waited_s >= seat.stall_s else set()
        missed = self._remaining(seat) - seat.finals - owing if waited_s >= seat.stall_s + LATE_S else set()
        late = {p for p in missed if self._is_blocked(self.seats[p])}
        late |= {p for p in missed if self._has_final(self.seats[p]) and not self._flows(p, seat, final=True)}
        if seat.me == self.liar:
            owing = set(self.lies.accuses(self.now, seat.plan)) & self._remaining(seat)
            late = set(self.lies.late(self.now, seat.plan)) & self._remaining(seat)
        says = frozenset(owing), frozenset(late)
        if says != seat.told or (any(says) and self.now - seat.told_at >= TELL_AGAIN_S):
            seat.told, seat.told_at = says, self.now
            self._carry_out(seat, seat.machine.stalled(owing, late, self.now))

    def _claim(self, seat: Seat) -> None:
        ways = []
        for (one, other), via in relays_of(seat.plan).items():
            if via == seat.me:
                ways += [w for way in ((one, other), (other, one)) if (w := self._way(seat, *way)) is not None]
        if seat.me == self.liar:
            ways = self.lies.claims(ways)
        self._carry_out(seat, seat.machine.relayed(seat.plan.hash, ways))

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

    def _carry_out(self, seat: Seat, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Broadcast):
                self._said.append((seat.me, effect.message))
                if isinstance(effect.message, Plan) and effect.message != self.plans[-1][1]:
                    self.plans.append((self.now, effect.message))
            elif isinstance(effect, CloseOff):
                self._carry_out(seat, seat.machine.closed_off(effect, (), self.now))
            elif isinstance(effect, StartReduce | Repair | Evicted):
                self._follow(seat, effect)

    def _follow(self, seat: Seat, effect: StartReduce | Repair | Evicted) -> None:
        if isinstance(effect, StartReduce):
            seat.contributed, seat.finals = set(), set()
        seat.out = isinstance(effect, Evicted)
        seat.plan, seat.since, seat.plans = effect.plan, self.now, seat.plans + 1
        seat.told, seat.told_at = (NOBODY, NOBODY), float("-inf")

    def _deliver(self) -> None:
        while self._said:
            sender, message = self._said.popleft()
            for seat in self.seats.values():
                if seat.me != sender:
                    self._carry_out(seat, seat.machine.receive(sender, message, self.now))
        for seat in self.seats.values():
            certificate = seat.machine.agreement.certificate
            if isinstance(certificate, Certificate):
                self.decided = certificate.value
