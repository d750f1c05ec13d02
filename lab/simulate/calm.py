"""Checks of the rounds once nothing is wrong any more, with everyone who runs linked to everyone.

    quick rounds       a round takes no longer than the slowest training in it, and `CALM_ROUND_S`
    everyone counts    who runs and was there in the round before, after a rollback with the state that it goes back
                       to, becomes a member, and, unless it pauses, is on its way out or on probation, its contribution
                       counts
    orders             what a user ordered is carried out, or can be no more, by the second round after the first
                       `SETTLING_ROUNDS` in which the user's peer votes, or once the state that it takes has come to
                       those who lack it, or those whom it names as voters are members; for the consent of who has no
                       vote, left out for a while, counts for nothing

The first rounds of a calm are for those who are coming back. Where messages are lost or somebody lies there is none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.lab.simulate.judge import Violation
from shoal.protocol.inputs import Order, Wanted
from shoal.protocol.membership import State
from shoal.protocol.messages import Target, Value
from shoal.protocol.voting import FaultModel, are_enough, voter_changes

if TYPE_CHECKING:
    from shoal.lab.simulate.peer import SimulatedPeer
    from shoal.lab.simulate.simulation import Simulation

CALM_ROUND_S = 4.0
CALM_LIMIT_S = 60.0
"""So long after the last fault calm rounds are waited for: links are dialled by a backoff."""
SETTLING_ROUNDS = 1
ORDER_ROUNDS = 2
"""A voter consents in the first round once it has the state; the others follow by the end of the second."""


class Calm:
    """The number of rounds in a row that have been calm."""

    def __init__(self, swarm: Simulation) -> None:
        self._swarm = swarm
        self._there: set[SimulatedPeer] = set()
        self._decided_at = 0.0
        self._orders: dict[tuple[int, Order], int] = {}
        """By order that is open, the number of rounds in which its peer had a vote since."""
        self.rounds = 0

    def _ordered(self) -> list[tuple[int, Order]]:
        """List the orders that users of running peers wait for."""
        members = ((peer, peer.peer_rounds.member) for peer in self._swarm.peers if peer.running)
        staying = (peer for peer, member in members if not (member.leaving or member.finished))
        return [(peer.number, order) for peer in staying for order in peer.disk.orders.values()]

    def _overdue(self, value: Value) -> list[tuple[int, Order]]:
        """Count the round that `value` decides for the orders that it leaves open; list those that had their rounds."""
        waiting = self._ordered()
        voters = self._swarm.judge.electorate(self._swarm.judge.values[value.base])
        vote = {peer.number for peer in self._there if peer.id in voters}
        self._orders = {
            one: rounds + (one[0] in vote and not self._waits_for_members(value, one[1]))
            for one, rounds in self._orders.items()
            if one in waiting and not self._settles(value, one[1])
        }
        return [one for one, rounds in self._orders.items() if rounds >= ORDER_ROUNDS and not self._is_fetched(one[1])]

    def _waits_for_members(self, value: Value, order: Order) -> bool:
        """True for an order of other voters of whom too few are members, or one that gets a vote is none."""
        changes = voter_changes(order.amendment) if isinstance(order, Wanted) else {}
        added = {peer for peer, votes in changes.items() if votes}
        after = (self._swarm.judge.voters_after(value) - changes.keys()) | added
        faults = FaultModel.LYING if self._swarm.scenario.lying else FaultModel.CRASH
        enough = are_enough(len(after.intersection(value.members)), len(after), faults)
        return bool(changes) and not (enough and added.issubset(value.members))

    @staticmethod
    def _settles(value: Value, order: Order) -> bool:
        """True if `value` carries an order out or makes it impossible."""
        if not isinstance(order, Target):
            return bool(value.amended or value.rollback)
        return bool(value.rollback) and order.round >= value.state_round

    def _is_fetched(self, order: Order) -> bool:
        """True if an order waits for a state to come."""
        return isinstance(order, Target) and any(
            peer.peer_rounds.obtaining.fetches(order.round) for peer in self._there
        )

    def awaited(self) -> bool:
        """True if more of them are to come before a run is over."""
        swarm, scenario = self._swarm, self._swarm.scenario
        late = swarm.timeline.now > swarm.quiet_at + CALM_LIMIT_S
        too_few = self.rounds < scenario.calm_rounds or bool(self._orders)
        return too_few and not (late or scenario.loss or self._somebody_lies)

    def decided(self, value: Value) -> None:
        """A peer is the first to have a round certified. Raises Violation."""
        now, there = self._swarm.timeline.now, self._in_round(value)
        took_s, self._decided_at = now - self._decided_at, now
        before, self._there = self._there, self._holders(there, value) if value.rollback else there
        if not self._swarm.scenario.calm_rounds or not self._is_calm(now):
            self.rounds = 0
            return
        self.rounds += 1
        if self.rounds <= SETTLING_ROUNDS:
            self._orders = dict.fromkeys(self._ordered(), 0)
        elif left := self._overdue(value):
            raise Violation("orders", f"{left} are not carried out by round {value.round}")
        if self.rounds > SETTLING_ROUNDS:
            took_s -= 1.1 * max(peer.train_s for peer in there)
            alone = all(peer in before for peer in self._swarm.peers if peer.running)  # nobody comes who is waited for
            if took_s > CALM_ROUND_S and alone:
                raise Violation("quick rounds", f"round {value.round} took {took_s:.1f} s more than its training")
            self._check_all_count(value, before & there)

    @property
    def _somebody_lies(self) -> bool:
        return any(peer.lies for peer in self._swarm.peers)

    def _is_calm(self, now: float) -> bool:
        swarm, network = self._swarm, self._swarm.network
        troubled = swarm.is_troubled(now) or swarm.scenario.loss or self._somebody_lies
        slow = network.slowed or now < network.cleared_at
        if troubled or network.walls or slow or network.lossy:
            return False
        living = {peer for peer in swarm.peers if peer.up}
        return all(
            not peer.hung
            and all(self._knows(peer, other, other in living) for other in swarm.peers if other is not peer)
            for peer in living
        )

    @staticmethod
    def _knows(peer: SimulatedPeer, other: SimulatedPeer, lives: bool) -> bool:
        state = peer.watch.machine.state_of(other.id)
        if not lives:
            return state not in (State.ALIVE, State.SUSPECT)
        return state is State.ALIVE and other.number in peer.watch.links

    def _in_round(self, value: Value) -> set[SimulatedPeer]:
        """Peers that take part in the round that `value` decides."""
        machines = ((peer, peer.peer_rounds.machine) for peer in self._swarm.peers if peer.running)
        return {peer for peer, machine in machines if machine is not None and machine.previous.hash == value.base}

    @staticmethod
    def _holders(there: set[SimulatedPeer], rollback: Value) -> set[SimulatedPeer]:
        """Those who have the state that is gone back to: nobody waits for a newcomer that has to fetch it."""
        return {peer for peer in there if peer.disk.earlier(rollback.state_round) is not None}

    def _check_all_count(self, value: Value, there: set[SimulatedPeer]) -> None:
        if value.rollback:
            return
        plan, _ = self._swarm.judge.plan_of(value)
        counted = {p.peer for p in plan.participants if p.weight}
        recent = self._swarm.judge.recent_members(plan.base, self._swarm.staleness_rounds)
        for peer in there:
            member = peer.peer_rounds.member
            if member.leaving or member.finished or peer.id in plan.evicted or self._rests(peer, value):
                continue
            if peer.id not in value.members:
                raise Violation("everyone counts", f"peer {peer.number} runs, and is no member after {value.round}")
            full = len(counted) >= self._swarm.settings.seats  # whose turn it is, is for the judge
            gives = not (full or peer.peer_rounds.paused or peer.peer_rounds.paused_in_round)
            if gives and peer.id in recent and not self._counts(peer, value):
                raise Violation("everyone counts", f"the contribution of peer {peer.number} to {value.round} does not")

    def _counts(self, peer: SimulatedPeer, value: Value) -> bool:
        """True if the contribution of a peer, or that of another which has it in it, counts, or that one rests."""
        plan, _ = self._swarm.judge.plan_of(value)
        counted = {p.peer: p.root for p in plan.participants if p.weight}
        by, root = self._swarm.residuals.given_by_another(peer.id, plan.base) or (peer.id, counted.get(peer.id))
        if by != peer.id and by not in counted:
            return self._rests(self._swarm.peers[self._swarm.numbers[by]], value)
        return by in counted and counted[by] == root

    def _rests(self, peer: SimulatedPeer, value: Value) -> bool:
        """True if somebody leaves it out for a while, after disputes."""
        base = self._swarm.judge.values[value.base]
        others = (other.peer_rounds.member for other in self._swarm.peers if other.running)
        return any(peer.id in member._probation.left_out(base) for member in others)
