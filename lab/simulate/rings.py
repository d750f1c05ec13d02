"""Many peers on rings, each watching its neighbours: what `cells` has beside its sums.

Everyone's record at everyone is not for ten thousand. Here a peer knows the list of its row (`shoal.lab.rows.rows`),
watches `2 * REACH` neighbours on the ring that the list is with the plain failure detector, and knows the heads of
the other rows.

*Verdicts.* A neighbour that gives a peer up says so to the head, and to the next in order, until the list has the
peer no more. More than half of the living neighbours must; so one bad link evicts nobody.

*Judged* is, see `judge`, that neighbours find who vanished within the detector's bound, that the list has it no more
within `OFF_BOUND_S`, and that who lives is given up by nobody.

Who is on a row's list, and who heads it, is known to the simulation at once where a real head would tell its row; the
bytes of that are counted as the commit's.

Sources: Das, Gupta, Motivala, "SWIM" (DSN 2002), the detector; Suresh et al., "Stable and consistent membership at
scale with Rapid" (USENIX ATC 2018), many observers on a ring and a threshold.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from itertools import chain

from shoal.lab.rows.rows import deal_rows, shortest
from shoal.lab.simulate.judge import LOSS_BORNE_SHARE, Violation
from shoal.lab.simulate.network import (
    CONTROL_OVERHEAD_BYTES,
    DOWNLOADS,
    JITTER_SHARE,
    LAST_MILE_S,
    REGIONS,
    ROUND_TRIPS_MS,
    UPLOADS,
    Timeline,
)
from shoal.lab.simulate.outcome import Workload
from shoal.lab.simulate.rows import Cell, Leaf, message_sizes
from shoal.lab.simulate.scenario import Scenario
from shoal.lab.simulate.watch import HELLO_BYTES, RECORD_BYTES
from shoal.protocol.identity import PeerId
from shoal.protocol.membership import (
    CLOSE_PEERS,
    RECEIVERS,
    TICK_S,
    Died,
    Effect,
    MembershipMachine,
    Refute,
    Say,
    State,
    Suspected,
    detection_bound_s,
)
from shoal.protocol.messages import domain_hash
from shoal.protocol.peering import Ack, Ping, PingRequest, SignOfLife, Suspicion
from shoal.protocol.wire import SwarmId
from shoal.swarm.dialling import DIAL_DEADLINE_S

REACH = 3
CELL_TICK_S = 0.5
EXPECTED_ROUND_S = 15.0
"""Churn is a share of the peers in so long."""
RETRY_S = 0.3
"""Time that TCP needs to notice that a segment was lost."""
LOOK_S = 2.0
FOUND_BOUND_S = detection_bound_s(CLOSE_PEERS) + 4 * (CELL_TICK_S - TICK_S) + 1.0
"""Within which a neighbour gives up who vanished, what was still under way included."""
OFF_BOUND_S = FOUND_BOUND_S + 2 * LOOK_S
"""Within which the row's list has it no more, counted from when its neighbours are those that judge it."""
JUDGES = 2
VERDICT_BYTES = 330
_ALIVE = State.ALIVE
NOTED: Mapping[type, tuple[int, str]] = {
    Ping: (1, "nonce"),
    Ack: (2, "nonce"),
    PingRequest: (3, "nonce"),
    Suspicion: (4, "incarnation"),
}
"""The detector's messages that the trace has: under which number, and what of each."""


class Rings(ABC):
    """The peers of one scenario, their rings, and who comes and goes."""

    def __init__(self, scenario: Scenario, rows: int, timeline: Timeline, work: Workload) -> None:
        self.scenario = scenario
        self.timeline = timeline
        self.work = work
        self.churn = scenario.churn.share_per_round
        """Share of the peers that vanish in `EXPECTED_ROUND_S`, and of newcomers."""
        self.swarm = SwarmId(domain_hash("simulated rings", str(scenario.seed).encode()))
        self.rng = random.Random(f"crowd {scenario.seed}")
        self._chance = self.rng.random
        self._loss = scenario.loss
        self._delays = [[2 * LAST_MILE_S + ms / 2000 for ms in row] for row in ROUND_TRIPS_MS]
        self.leaves: list[Leaf] = []
        self.numbers: dict[PeerId, int] = {}
        self._by_id: dict[PeerId, Leaf] = {}
        self.cells = [Cell(number) for number in range(rows)]
        self.found_after_s: list[float] = []
        self.evicted_after_s: list[float] = []
        self.false_deaths = 0
        self.false_evictions = 0
        self._turn = 0
        self._alive: list[int] = []
        self._sizes = message_sizes()
        for _ in range(scenario.peers):
            self._add()
        for cell, row in zip(self.cells, deal_rows(self.swarm, list(self.numbers), rows), strict=True):
            cell.ring = [self.numbers[peer] for peer in row]
            for number in cell.ring:
                self.leaves[number].cell = cell.number
            cell.head = cell.ring[0]
            self._arrange(cell, cell.ring, introduced=True)

    # -- what a swarm does beside watching ---------------------------------------------------------------------

    @abstractmethod
    def _is_off(self, cell: Cell, accused: Leaf) -> None:
        """Somebody is on the row's list no more."""

    @abstractmethod
    def _has_vanished(self, leaf: Leaf) -> None:
        """A peer is gone; nobody knows yet."""

    @abstractmethod
    def _has_come(self, leaf: Leaf) -> None:
        """A newcomer is on its row's list."""

    # -- peers and their rings ---------------------------------------------------------------------------------

    def _add(self) -> Leaf:
        number, rng = len(self.leaves), self.rng
        peer = PeerId(f"{number:052d}")
        seed = rng.getrandbits(62)
        region = rng.randrange(len(REGIONS))
        leaf = Leaf(
            number=number,
            id=peer,
            cell=-1,
            region=region,
            delays_s=self._delays[region],
            train_s=rng.uniform(*self.work.train_s),
            upload=rng.choice(UPLOADS),
            download=rng.choice(DOWNLOADS),
            machine=MembershipMachine(
                me=peer,
                rng=random.Random(seed),
                can_ask=self._can_ask,
                awaited=lambda: [self.leaves[near].id for near in leaf.near],
                tick_s=CELL_TICK_S,
            ),
        )
        self.leaves.append(leaf)
        self.numbers[peer] = number
        self._by_id[peer] = leaf
        self.timeline.after(CELL_TICK_S * rng.random(), self._tick, leaf)
        return leaf

    def _can_ask(self, one: PeerId, other: PeerId) -> bool:
        return self.numbers[one] in self._by_id[other].near

    def _arrange(self, cell: Cell, changed: Iterable[int], *, introduced: bool) -> None:
        """Give those at `changed` and around them the neighbours that the ring has for them."""
        ring = cell.ring
        place = {number: at for at, number in enumerate(ring)}
        size = len(ring)
        around = {ring[(place[c] + d) % size] for c in changed if c in place for d in range(-REACH, REACH + 1)}
        for number in sorted(around):
            leaf = self.leaves[number]
            near = {ring[(place[number] + d) % size] for d in range(-REACH, REACH + 1)} - {number}
            for gone in leaf.near - near:
                leaf.machine.forget(self.leaves[gone].id)
                leaf.near_since.pop(gone, None)
            for fresh in sorted(near - leaf.near) if leaf.up else ():
                leaf.near_since[fresh] = self.timeline.now
                if introduced:
                    leaf.machine.peer_seen(self.leaves[fresh].id, 0, self.timeline.now)
                else:
                    self._deliver(leaf, self.leaves[fresh], "hello", HELLO_BYTES)
            if leaf.near != near:
                leaf.near, leaf.arranged_at = frozenset(near), self.timeline.now

    # -- messages ----------------------------------------------------------------------------------------------

    def _delay_s(self, leaf: Leaf, other: Leaf) -> float:
        """One way, with jitter."""
        return leaf.delays_s[other.region] * (1.0 + JITTER_SHARE * self._chance())

    def _say(self, leaf: Leaf, other: Leaf, message: SignOfLife) -> None:
        """A detector's message: it may be lost."""
        leaf.control_bytes += self._sizes[type(message)]
        chance = self._chance
        if chance() >= self._loss:
            delay_s = leaf.delays_s[other.region] * (1.0 + JITTER_SHARE * chance())
            self.timeline.after(delay_s, self._arrive, leaf, other, message)

    def _deliver(self, leaf: Leaf, other: Leaf, what: str, size: int, *rest: int) -> None:
        """A message over a connection, which repeats what is lost."""
        leaf.control_bytes += size + CONTROL_OVERHEAD_BYTES
        delay = self._delay_s(leaf, other)
        while self._chance() < self._loss:
            delay += RETRY_S
        self.timeline.after(delay, self._take, leaf.number, other.number, what, *rest)

    def _arrive(self, sender: Leaf, leaf: Leaf, message: SignOfLife) -> None:
        """A message that a machine sent has arrived."""
        if not leaf.up:
            return
        timeline, kind = self.timeline, type(message)
        noted = NOTED.get(kind)
        if noted is not None:
            number, what = noted
            timeline.note(number, sender.number, leaf.number, getattr(message, what))
        effects = RECEIVERS[kind](leaf.machine, sender.id, message, timeline.now)
        if effects:
            self._carry_out(leaf, effects)

    def _carry_out(self, leaf: Leaf, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if type(effect) is Say:
                self._say(leaf, self._by_id[effect.peer], effect.message)
            elif type(effect) is Suspected:
                suspicion = Suspicion(peer=effect.peer, incarnation=effect.incarnation)
                for near in sorted(leaf.near):
                    self._say(leaf, self.leaves[near], suspicion)
            elif type(effect) is Died:
                self._found_dead(leaf, self._by_id[effect.peer])
            elif type(effect) is Refute:
                for near in sorted(leaf.near):
                    self._deliver(leaf, self.leaves[near], "record", RECORD_BYTES, effect.incarnation)

    def _tick(self, leaf: Leaf) -> None:
        if leaf.up:
            now = self.timeline.now
            effects = leaf.machine.tick(now)
            if effects:
                self._carry_out(leaf, effects)
            if now - leaf.looked_at >= LOOK_S:
                self._look_around(leaf, now)
            self.timeline.after(CELL_TICK_S, self._tick, leaf)

    def _take(self, sender: int, to: int, what: str, *rest: int) -> None:
        leaf, other = self.leaves[to], self.leaves[sender]
        self.timeline.note(5, sender, to, rest[0] if rest else 0)
        if not leaf.up:
            return
        now = self.timeline.now
        if what == "hello" or what == "welcome":
            if sender in leaf.near and other.cell == leaf.cell:
                self._carry_out(leaf, leaf.machine.peer_seen(other.id, 0, now))
                if what == "hello":
                    self._deliver(leaf, other, "welcome", HELLO_BYTES)
        elif what == "record":
            self._carry_out(leaf, leaf.machine.on_refutation(other.id, rest[0], now))
        else:
            self._judge(self.cells[leaf.cell], sender, rest[0])

    # -- who is gone -------------------------------------------------------------------------------------------

    def _found_dead(self, leaf: Leaf, other: Leaf) -> None:
        if other.up:
            self.false_deaths += 1
            self._bear(f"peer {leaf.number} gives up peer {other.number}, which lives")
        else:
            self.found_after_s.append(self.timeline.now - other.silent_since)
        if other.number in leaf.near:
            self._give_up(leaf, other.number)

    def _look_around(self, leaf: Leaf, now: float) -> None:
        """Say again whom it gave up and its list still has; greet again who has not answered."""
        leaf.looked_at = now
        state_of, leaves = leaf.machine.state_of, self.leaves
        for near in sorted([near for near in leaf.near if state_of(leaves[near].id) is not _ALIVE]):
            state = state_of(leaves[near].id)
            if state is State.DEAD or (state is None and now - leaf.near_since[near] > DIAL_DEADLINE_S):
                self._give_up(leaf, near)
            elif state is None:
                self._deliver(leaf, leaves[near], "hello", HELLO_BYTES)

    def _give_up(self, leaf: Leaf, accused: int) -> None:
        """Tell the head, and the next of the order in case that is gone too; of these, whom it has not given up."""
        cell, told = self.cells[leaf.cell], 0
        for number in chain((cell.head,), (number for number in cell.ring if number != cell.head)):
            if number != accused and leaf.machine.state_of(self.leaves[number].id) is not State.DEAD:
                self._deliver(leaf, self.leaves[number], "verdict", VERDICT_BYTES, accused)
                told += 1
                if told == JUDGES:
                    return

    def _judge(self, cell: Cell, accuser: int, accused: int) -> None:
        """Out is whom more than half of its neighbours gave up that are not given up themselves."""
        if accused not in cell.ring:
            return
        place = cell.ring.index(accused)
        said = cell.verdicts.setdefault(accused, set())
        said.add(accuser)
        near = [number for number in self.leaves[accused].near if not cell.verdicts.get(number)]
        if 2 * len(said & set(near)) <= len(near):
            return
        if self.leaves[accused].up:
            self.false_evictions += 1
            self._bear(f"the row of peer {accused} is without it, which lives")
        else:
            self.evicted_after_s.append(self.timeline.now - self.leaves[accused].silent_since)
        before = [cell.ring[(place + d) % len(cell.ring)] for d in (-1, 1)]
        del cell.ring[place], cell.verdicts[accused]
        self._arrange(cell, before, introduced=False)
        self._is_off(cell, self.leaves[accused])

    # -- what is judged ----------------------------------------------------------------------------------------

    def _bear(self, detail: str) -> None:
        """A living peer is held for dead. Raises Violation unless so much is lost that it may happen."""
        if self.scenario.loss <= LOSS_BORNE_SHARE:
            raise Violation("no false eviction", detail)

    def _check_found(self, watcher: int, gone: int) -> None:
        leaf, other = self.leaves[watcher], self.leaves[gone]
        watches = leaf.up and gone in leaf.near and leaf.near_since[gone] <= other.silent_since
        if watches and leaf.machine.state_of(other.id) in (State.ALIVE, State.SUSPECT):
            raise Violation("no wait too long", f"peer {watcher} holds peer {gone} for alive {FOUND_BOUND_S} s on")

    def _check_off(self, gone: int) -> None:
        """Raises Violation if a row still has who vanished, once those around it have been the same for long enough."""
        other = self.leaves[gone]
        cell, now = self.cells[other.cell], self.timeline.now
        if gone not in cell.ring:
            return
        around = [self.leaves[number] for number in {*other.near, cell.head, *cell.ring[:JUDGES]}]
        changed_at = max(other.silent_since, other.arranged_at, *(leaf.silent_since for leaf in around))
        if now < changed_at + OFF_BOUND_S:
            self.timeline.at(changed_at + OFF_BOUND_S, self._check_off, gone)
        else:
            raise Violation("no wait too long", f"the row of peer {gone} has it {now - other.silent_since:.1f} s on")

    # -- churn -------------------------------------------------------------------------------------------------

    def begin_churn(self) -> None:
        """From now on peers vanish, and as many newcomers start."""
        if self.churn:
            self.timeline.after(1.0, self._churn)

    def _churn(self) -> None:
        """One peer vanishes and one newcomer starts; the next time is drawn."""
        alive = [leaf.number for leaf in self.leaves if leaf.up] if self._turn % 64 == 0 else self._alive
        self._alive, self._turn = alive, self._turn + 1
        victim = self.leaves[self.rng.choice(alive)]
        if victim.up and len(self.cells[victim.cell].ring) > REACH:
            self._vanish(victim)
            self._join()
        rate = self.churn * self.scenario.peers / EXPECTED_ROUND_S
        self.timeline.after(self.rng.expovariate(rate), self._churn)

    def _vanish(self, leaf: Leaf) -> None:
        leaf.up = False
        leaf.silent_since = self.timeline.now
        self.timeline.note(6, leaf.number, leaf.cell, 0)
        for near in sorted(leaf.near):
            if self.leaves[near].machine.state_of(leaf.id) is State.ALIVE:
                self.timeline.after(FOUND_BOUND_S, self._check_found, near, leaf.number)
        self.timeline.after(OFF_BOUND_S, self._check_off, leaf.number)
        self._has_vanished(leaf)

    def _join(self) -> None:
        """A newcomer starts: last in the shortest row."""
        cell = self.cells[shortest([cell.ring for cell in self.cells])]
        leaf = self._add()
        leaf.cell = cell.number
        cell.ring.append(leaf.number)
        self.timeline.note(7, leaf.number, cell.number, 0)
        self._has_come(leaf)
        self._arrange(cell, [leaf.number], introduced=False)
