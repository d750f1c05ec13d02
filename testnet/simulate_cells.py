"""Swarms beyond the limit of one plan: peers in cells, each cell one participant of the round, one digest for all.

Everyone's record at everyone, and everyone's vote, is not for ten thousand. Here a peer knows its cell's list,
watches `2 * REACH` neighbours on the cell's ring with the plain failure detector, and knows the heads of the other
cells.

*Grid.* Cells are the rows. A row sums what its members made, token-weighted, in the order of its list; its head
commits to the mean, weighs as much as all their tokens, and takes part in the round of the heads, which is the plain
round: the columns. So what is certified is the weighted mean of all who were counted in their row, and one digest is
everybody's. The mean of a row is encoded once more than in a flat sum; it is exact in that anybody who has the lists
and the contributions gets the same bits.

*Verdicts.* A neighbour that gives a peer up says so to the head, and to the next in order, until the list has the
peer no more. More than half of the living neighbours must; so one bad link evicts nobody. If it is the head that is
given up, the next of the cell's order takes its place: it joins the round of the heads as any newcomer does, its
cell's weight being zero the first time.

*Certificates.* The electorate are the heads of the last round, at most `CELLS_LIMIT` whatever the number of peers, so
a certificate has no more signatures than there are cells. That is a sample of one peer per cell; the rule of quorums,
and the proof that two of them meet, are those of any electorate. Who is head follows from hashes of PeerIds: against
crashes that is as good as any order. Who may make as many PeerIds as it likes can aim for a seat, as it can for a
vote in a small open swarm; admission is what stands against that.

Rows move their bytes as a butterfly does, so each member carries its share of the row, and a column carries the model
divided by the size of a row: so their time is modelled. Who is on a cell's list, and who takes the place of a head,
is known to the simulation at once where a real head would tell its cell; the bytes of that are counted as the
commit's.

Sources: Das, Gupta, Motivala, "SWIM" (DSN 2002), the detector; Suresh et al., "Stable and consistent membership at
scale with Rapid" (USENIX ATC 2018), many observers on a ring and a threshold.
"""

from __future__ import annotations

import math
import random
import time
from bisect import insort
from collections.abc import Iterable
from dataclasses import replace

import msgspec
import numpy as np

from shoal.collectives.codecs import F32
from shoal.protocol.identity import PeerId
from shoal.protocol.liveness import (
    Died,
    Effect,
    Refute,
    SendAck,
    SendNack,
    SendPing,
    SendPingRequest,
    State,
    Suspected,
)
from shoal.protocol.membership import MembershipMachine
from shoal.protocol.messages import domain_hash
from shoal.protocol.peering import Ack, Nack, Ping, PingRequest, Suspicion
from shoal.swarm.members import DIAL_DEADLINE_S
from shoal.testnet.simulate import MODEL_BYTES, Simulation
from shoal.testnet.simulate_judge import Violation
from shoal.testnet.simulate_network import CONTROL_OVERHEAD_BYTES, JITTER_SHARE, LAST_MILE_S, REGIONS, ROUND_TRIPS_MS
from shoal.testnet.simulate_outcome import Kit, Outcome
from shoal.testnet.simulate_peer import SimulatedPeer
from shoal.testnet.simulate_rows import Cell, Leaf, made_by, message_sizes, plain_mean, row_mean
from shoal.testnet.simulate_scenario import Churn, Scenario
from shoal.testnet.simulate_watch import HELLO_BYTES, RECORD_BYTES

REACH = 3
CELL_TICK_S = 0.5
CELLS_LIMIT = 32
ROW_GRACE_S = 3.0
"""After half of a row is done the rest has so long; what comes later counts in the next round."""
TRAIN_S = (4.0, 8.0)
ROW_RATE_BYTES_PER_S = 10e6
FAN_OUT = 4
EXPECTED_ROUND_S = 15.0
RETRY_S = 0.3
"""What TCP needs to notice that a segment was lost."""
LOOK_S = 2.0
JUDGES = 2
SHARE_BYTES = 420
VERDICT_BYTES = 330
COMMIT_BYTES = 900


class Seats(Simulation):
    """The round of the heads, in which training is what their rows do."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tick_s = CELL_TICK_S
        self.crowd: Crowd

    def trained_at(self, peer: SimulatedPeer) -> float:
        """When the row is summed."""
        return self.crowd.row_wanted(peer)

    def made(self, peer: SimulatedPeer, round: int) -> tuple[F32, int]:
        """The row's mean and its tokens."""
        return self.crowd.row_of(peer, round)


class Crowd:
    """A run of one scenario of more than `FLAT_LIMIT_PEERS` peers."""

    def __init__(self, scenario: Scenario, kit: Kit | None = None) -> None:
        self.scenario = scenario
        count = max(2, min(CELLS_LIMIT, math.isqrt(scenario.peers) // 2))
        inner = msgspec.structs.replace(scenario, peers=count, churn=Churn(), fault=())
        self.seats = Seats(inner, kit or Kit())
        self.seats.crowd = self
        size = scenario.peers / count
        self.seats.chunk_bytes /= size
        self.seats.settings = replace(self.seats.settings, weight_cap=64.0)
        self.timeline = self.seats.timeline
        self.rng = random.Random(f"crowd {scenario.seed}")
        self._chance = self.rng.random
        self._delays = [[2 * LAST_MILE_S + ms / 2000 for ms in row] for row in ROUND_TRIPS_MS]
        self.leaves: list[Leaf] = []
        self.numbers: dict[PeerId, int] = {}
        self.cells = [Cell(number) for number in range(count)]
        self.by_seat: dict[int, int] = {}
        self.found_after_s: list[float] = []
        self.evicted_after_s: list[float] = []
        self.false_deaths = 0
        self.false_evictions = 0
        self._turn = 0
        self._alive: list[int] = []
        self._sizes = message_sizes()
        for _ in range(scenario.peers):
            self._add(len(self.leaves) % count)
        for cell in self.cells:
            self._arrange(cell, cell.members(), introduced=True)
            head = self.leaves[cell.ring[0][1]]
            self._seat(cell, head, cell.number)

    # -- peers and their rings ---------------------------------------------------------------------------------

    def _add(self, cell: int) -> Leaf:
        number, rng = len(self.leaves), self.rng
        peer = PeerId(f"{number:052d}")
        seed = rng.getrandbits(62)
        leaf = Leaf(
            number=number,
            id=peer,
            cell=cell,
            region=rng.randrange(len(REGIONS)),
            train_s=rng.uniform(*TRAIN_S),
            machine=MembershipMachine(me=peer, rng=random.Random(seed), can_ask=self._can_ask),
        )
        self.leaves.append(leaf)
        self.numbers[peer] = number
        insort(self.cells[cell].ring, (domain_hash("cell order", peer.encode()), number))
        self.timeline.after(CELL_TICK_S * rng.random(), self._tick, number)
        return leaf

    def _can_ask(self, one: PeerId, other: PeerId) -> bool:
        return self.numbers[one] in self.leaves[self.numbers[other]].near

    def _arrange(self, cell: Cell, changed: Iterable[int], *, introduced: bool) -> None:
        """Give those at `changed` and around them the neighbours that the ring has for them."""
        ring = cell.members()
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
            leaf.near = frozenset(near)

    def _seat(self, cell: Cell, head: Leaf, seat: int) -> None:
        cell.head, head.seat = head.number, seat
        self.by_seat[seat] = cell.number

    # -- messages ----------------------------------------------------------------------------------------------

    def _say(self, leaf: Leaf, to: PeerId, message: object) -> None:
        """A detector's message: it may be lost."""
        other = self.leaves[self.numbers[to]]
        leaf.control_bytes += self._sizes[type(message)]
        chance = self._chance
        if chance() >= self.scenario.loss:
            delay = self._delays[leaf.region][other.region] * (1.0 + JITTER_SHARE * chance())
            self.timeline.after(delay, self._arrive, leaf.number, other.number, message)

    def _deliver(self, leaf: Leaf, other: Leaf, what: str, size: int, *rest: int) -> None:
        """A message of the cell over a connection, which repeats what is lost."""
        leaf.control_bytes += size + CONTROL_OVERHEAD_BYTES
        delay = self._delays[leaf.region][other.region] * (1.0 + JITTER_SHARE * self._chance())
        while self._chance() < self.scenario.loss:
            delay += RETRY_S
        self.timeline.after(delay, self._take, leaf.number, other.number, what, *rest)

    def _arrive(self, sender: int, to: int, message: object) -> None:
        leaf = self.leaves[to]
        if not leaf.up:
            return
        now, machine, peer = self.timeline.now, leaf.machine, self.leaves[sender].id
        if type(message) is Ping:
            self.timeline.note(1, sender, to, message.nonce)
            effects = machine.on_ping(peer, message.nonce, message.incarnation, now)
        elif type(message) is Ack:
            self.timeline.note(2, sender, to, message.nonce)
            if message.about is None:
                effects = machine.on_ack(peer, message.nonce, message.incarnation, now)
            else:
                effects = machine.on_indirect_ack(peer, message.about, message.nonce, now)
        elif type(message) is PingRequest:
            self.timeline.note(3, sender, to, message.nonce)
            effects = machine.on_ping_request(peer, message.target, message.nonce, now)
        elif type(message) is Nack:
            effects = machine.on_nack(peer, message.target, message.nonce, now)
        else:
            assert isinstance(message, Suspicion)
            self.timeline.note(4, sender, to, message.incarnation)
            effects = machine.on_suspicion(message.peer, message.incarnation, now)
        if effects:
            self._carry_out(leaf, effects)

    def _carry_out(self, leaf: Leaf, effects: Iterable[Effect]) -> None:
        mine = leaf.machine.incarnation
        for effect in effects:
            if type(effect) is SendPing:
                self._say(leaf, effect.peer, Ping(nonce=effect.nonce, incarnation=mine))
            elif type(effect) is SendAck:
                self._say(leaf, effect.peer, Ack(nonce=effect.nonce, incarnation=mine, about=effect.about))
            elif type(effect) is SendPingRequest:
                self._say(leaf, effect.via, PingRequest(target=effect.target, nonce=effect.nonce))
            elif type(effect) is SendNack:
                self._say(leaf, effect.peer, Nack(target=effect.target, nonce=effect.nonce))
            elif type(effect) is Suspected:
                for near in sorted(leaf.near):
                    self._say(leaf, self.leaves[near].id, Suspicion(peer=effect.peer, incarnation=effect.incarnation))
            elif type(effect) is Died:
                self._found_dead(leaf, self.leaves[self.numbers[effect.peer]])
            elif type(effect) is Refute:
                for near in sorted(leaf.near):
                    self._deliver(leaf, self.leaves[near], "record", RECORD_BYTES, effect.incarnation)

    def _tick(self, number: int) -> None:
        leaf = self.leaves[number]
        if leaf.up:
            effects = leaf.machine.tick(self.timeline.now)
            if effects:
                self._carry_out(leaf, effects)
            if self.timeline.now - leaf.looked_at >= LOOK_S:
                self._look_around(leaf, self.timeline.now)
            self.timeline.after(CELL_TICK_S, self._tick, number)

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
        elif what == "verdict":
            self._judge(self.cells[leaf.cell], sender, rest[0])
        elif what == "share":
            self._share(self.cells[leaf.cell], sender, rest[0])
        elif what == "commit":
            self._commit(leaf, rest[0], rest[1])

    # -- who is gone -------------------------------------------------------------------------------------------

    def _found_dead(self, leaf: Leaf, other: Leaf) -> None:
        if other.up:
            self.false_deaths += 1
        else:
            self.found_after_s.append(self.timeline.now - other.silent_since)
        if other.number in leaf.near:
            self._give_up(leaf, other.number)

    def _look_around(self, leaf: Leaf, now: float) -> None:
        """Say again whom it gave up and its list still has; greet again who has not answered."""
        leaf.looked_at = now
        for near in sorted(leaf.near):
            state = leaf.machine.state_of(self.leaves[near].id)
            if state is State.DEAD or (state is None and now - leaf.near_since[near] > DIAL_DEADLINE_S):
                self._give_up(leaf, near)
            elif state is None:
                self._deliver(leaf, self.leaves[near], "hello", HELLO_BYTES)

    def _give_up(self, leaf: Leaf, accused: int) -> None:
        """Tell the head, and the next of the order in case that is gone too; of these, whom it has not given up."""
        cell, told = self.cells[leaf.cell], 0
        for number in (cell.head, *(number for _, number in cell.ring if number != cell.head)):
            if number != accused and leaf.machine.state_of(self.leaves[number].id) is not State.DEAD:
                self._deliver(leaf, self.leaves[number], "verdict", VERDICT_BYTES, accused)
                told += 1
                if told == JUDGES:
                    return

    def _judge(self, cell: Cell, accuser: int, accused: int) -> None:
        """Out is whom more than half of its neighbours gave up that are not given up themselves."""
        place = next((at for at, (_, number) in enumerate(cell.ring) if number == accused), None)
        if place is None:
            return
        said = cell.verdicts.setdefault(accused, set())
        said.add(accuser)
        near = [number for number in self.leaves[accused].near if not cell.verdicts.get(number)]
        if 2 * len(said & set(near)) <= len(near):
            return
        if self.leaves[accused].up:
            self.false_evictions += 1
        else:
            self.evicted_after_s.append(self.timeline.now - self.leaves[accused].silent_since)
        before = [cell.ring[(place + d) % len(cell.ring)][1] for d in (-1, 1)]
        del cell.ring[place], cell.verdicts[accused]
        self._arrange(cell, before, introduced=False)
        if accused == cell.head:
            self._succeed(cell)
        self._close_row(cell)

    def _succeed(self, cell: Cell) -> None:
        """The next in order takes the head's place, among the heads as a newcomer."""
        head = self.leaves[cell.ring[0][1]]
        self.seats.join()
        self._seat(cell, head, len(self.seats.peers) - 1)
        cell.closed, cell.row = False, None

    # -- rounds of a row ---------------------------------------------------------------------------------------

    def row_wanted(self, seat: SimulatedPeer) -> float:
        """The heads begin a round: when the row of this one is summed, if that is known."""
        cell = self.cells[self.by_seat[seat.number]]
        round = len(seat.disk.chain)
        if cell.round < round:
            self._begin_row(cell, round)
        return self.timeline.now if cell.row is not None else math.inf

    def _begin_row(self, cell: Cell, round: int) -> None:
        cell.round, cell.closed, cell.row, cell.half_at = round, False, None, None
        cell.ready.clear()
        head = self.leaves[cell.head]
        if head.up:
            self._commit(head, round, 0)

    def _commit(self, leaf: Leaf, round: int, place: int) -> None:
        """The certificate has come down the row's tree: pass it on, and train."""
        cell = self.cells[leaf.cell]
        order = [cell.head, *(number for number in cell.members() if number != cell.head)]
        for child in range(FAN_OUT * place + 1, min(FAN_OUT * place + 1 + FAN_OUT, len(order))):
            if self.leaves[order[child]].up:
                self._deliver(leaf, self.leaves[order[child]], "commit", COMMIT_BYTES, round, child)
            else:  # its children are told by its parent, who finds no connection
                for grandchild in range(FAN_OUT * child + 1, min(FAN_OUT * child + 1 + FAN_OUT, len(order))):
                    below = self.leaves[order[grandchild]]
                    self._deliver(leaf, below, "commit", COMMIT_BYTES, round, grandchild)
        self.timeline.after(leaf.train_s * (0.9 + 0.2 * self._chance()), self._trained, leaf.number, round)

    def _trained(self, number: int, round: int) -> None:
        leaf = self.leaves[number]
        cell = self.cells[leaf.cell]
        if leaf.up and cell.round == round:
            self._deliver(leaf, self.leaves[cell.head], "share", SHARE_BYTES, round)

    def _share(self, cell: Cell, sender: int, round: int) -> None:
        if cell.round != round or cell.closed:
            return
        cell.ready.add(sender)
        if cell.half_at is None and 2 * len(cell.ready) >= len(cell.ring):
            cell.half_at = self.timeline.now
            self.timeline.after(ROW_GRACE_S, self._row_overdue, cell.number, round)
        self._close_row(cell)

    def _row_overdue(self, number: int, round: int) -> None:
        cell = self.cells[number]
        if cell.round == round:
            self._close_row(cell, overdue=True)

    def _close_row(self, cell: Cell, *, overdue: bool = False) -> None:
        """Sum the row when everyone on its list is done, or the rest had its time."""
        if cell.closed or not cell.ready:
            return
        members = cell.members()
        if overdue or cell.ready.issuperset(members):
            cell.closed = True
            cell.counted = tuple(n for n in members if n in cell.ready and self.leaves[n].since_round < cell.round)
            took_s = 2 * MODEL_BYTES / ROW_RATE_BYTES_PER_S
            self.timeline.after(took_s, self._row_summed, cell.number, cell.round)

    def _row_summed(self, number: int, round: int) -> None:
        cell = self.cells[number]
        if cell.round != round or not cell.closed or not cell.counted:
            return
        cell.row = self._sum(cell.counted, round)
        seat = self.leaves[cell.head].seat
        if seat is not None and self.seats.peers[seat].up:
            self.seats.peers[seat].course.trained()

    def _sum(self, counted: tuple[int, ...], round: int) -> tuple[F32, int]:
        return row_mean([self.made(number, round) for number in counted])

    def made(self, number: int, round: int) -> tuple[F32, int]:
        """What a peer makes in a round, and of how many tokens."""
        return made_by(self.scenario.seed, number, round, self.seats.grid.numel)

    def row_of(self, seat: SimulatedPeer, round: int) -> tuple[F32, int]:
        """What a head commits to. Raises Violation if it is not what a plain computation makes of the row."""
        cell = self.cells[self.by_seat[seat.number]]
        assert cell.row is not None
        if not np.array_equal(plain_mean([self.made(n, round) for n in cell.counted]), cell.row[0]):
            raise Violation("the reference", f"the row of cell {cell.number} in round {round}")
        return cell.row

    # -- churn -------------------------------------------------------------------------------------------------

    def _churn(self) -> None:
        """One peer vanishes and one newcomer starts; the next time is drawn."""
        share = self.scenario.churn.share_per_round
        alive = [leaf.number for leaf in self.leaves if leaf.up] if self._turn % 64 == 0 else self._alive
        self._alive, self._turn = alive, self._turn + 1
        victim = self.leaves[self.rng.choice(alive)]
        if victim.up and len(self.cells[victim.cell].ring) > 2 * REACH + 1:
            self._vanish(victim)
            self._join()
        rate = share * self.scenario.peers / EXPECTED_ROUND_S
        self.timeline.after(self.rng.expovariate(rate), self._churn)

    def _vanish(self, leaf: Leaf) -> None:
        leaf.up = False
        leaf.silent_since = self.timeline.now
        self.timeline.note(6, leaf.number, leaf.cell, 0)
        if leaf.seat is not None:
            seat = self.seats.peers[leaf.seat]
            if seat.up:
                self.seats._kill(seat, silently=True, forgets=False)

    def _join(self) -> None:
        cell = min(self.cells, key=lambda one: (len(one.ring), one.number))
        leaf = self._add(cell.number)
        leaf.since_round = cell.round
        self.timeline.note(7, leaf.number, cell.number, 0)
        # The head stays who it is as long as it lives; the order decides who is next.
        self._arrange(cell, [leaf.number], introduced=False)

    # -- the run -----------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Let it happen, to the last round or the first violation."""
        began = time.perf_counter()
        violation = detail = ""
        seats, rounds = self.seats, self.scenario.rounds
        with seats.keys.in_use():
            try:
                for peer in seats.peers:
                    seats._start(peer)
                if self.scenario.churn.share_per_round:
                    self.timeline.after(1.0, self._churn)
                self._run(rounds)
            except Violation as broken:
                violation, detail = broken.kind, broken.detail
        return self._outcome(time.perf_counter() - began, violation, detail)

    def _run(self, rounds: int) -> None:
        seats, best = self.seats, -1
        while seats._best < rounds:
            if seats._best == best:
                raise Violation("progress", f"none after round {best}")
            best = seats._best
            self.timeline.run(self.timeline.now + 240.0, lambda best=best: seats._best > best)  # type: ignore[misc]

    def _outcome(self, wall_s: float, violation: str, detail: str) -> Outcome:
        plain = self.seats._outcome(wall_s, violation, detail)
        found = sorted([*self.found_after_s, *self.seats.found_after_s])
        now = max(self.timeline.now, 1e-9)
        control = sum(leaf.control_bytes for leaf in self.leaves)
        control += sum(place.control_bytes for place in self.seats.network.places)
        return replace(
            plain,
            peers=self.scenario.peers,
            detect_s_p99=round(found[min(len(found) - 1, int(0.99 * len(found)))], 3) if found else 0.0,
            control_bytes_per_peer_per_s=round(control / self.scenario.peers / now, 1),
            deaths_found=len(found),
            false_evictions=self.false_evictions + self.seats.false_evictions,
        )
