"""Swarms beyond the limit of one plan: the two-level sum, each row one participant of the round, one digest for all.

*Grid.* Rows, their heads and who sums what are `shoal.lab.rows.rows` and `shoal.lab.rows.two_level`; every peer has
a `RowRound` of its own (`shoal.lab.rows.row_round`), which decides all that is decided in a row. A row's head
commits to the row's mean, which weighs as much as all tokens in it, and takes part in the round of the heads, which is
the plain round: the columns. So what is certified is the weighted mean of all who were counted in their row, and one
digest is everybody's.

*Losses.* Who is given up while its row is summed counts no more, and the others take over its chunks. If it is the
head, the next of the row takes its place: it joins the round of the heads as any newcomer does, its row's weight being
zero the first time. The first `JUDGES` of a row, to whom verdicts are said, have them at once; the head has the row's
list from the membership when it begins a round; all others know what they are told.

*Certificates.* The electorate are the heads of the last round, at most `ROWS_LIMIT` whatever the number of peers, so a
certificate has no more signatures than there are rows. The rule of quorums, and the proof that two of them meet, are
those of any electorate.

The round of the heads is simulated message by message, a column carrying the model divided by the length of a row. A
row's own messages are too, each of which may be lost, but not its chunks: what each member of it sends follows from the
deal, and the sum takes as long as the slowest of them needs for that, once all of them that live have begun. It is over
only while all of them live; the head's reduction finds who moved nothing for `STALL_S`, meanwhile the others go on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from shoal.collectives.codecs import F32, codec
from shoal.collectives.stalls import STALL_S
from shoal.lab.rows.row_effects import Begun, RowDone, RowEffect, SumRow, Tell, TookOver
from shoal.lab.rows.row_list import Roster
from shoal.lab.rows.row_messages import RowSaid, Stamp
from shoal.lab.rows.row_round import RowRound
from shoal.lab.rows.rows import row_count
from shoal.lab.simulate.judge import Violation
from shoal.lab.simulate.network import CONTROL_OVERHEAD_BYTES, ENVELOPE_BYTES
from shoal.lab.simulate.outcome import Components, Outcome, Workload
from shoal.lab.simulate.peer import SimulatedPeer
from shoal.lab.simulate.residuals import Residuals
from shoal.lab.simulate.rings import CELL_TICK_S, JUDGES, Rings
from shoal.lab.simulate.rows import (
    Cell,
    Given,
    Leaf,
    RowSum,
    given_by,
    made_by,
    plain_row,
    summed_row,
    tokens_of,
)
from shoal.lab.simulate.scenario import Churn, Scenario
from shoal.lab.simulate.simulation import NoQuorum, Simulation
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import domain_hash
from shoal.protocol.wire import HASH_BYTES

MEASURED_LIMIT = 4096
STANDSTILL_S = 240.0
WORK = Workload(train_s=(4.0, 8.0))


class Seats(Simulation):
    """The round of the heads, in which training is what their rows do."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tick_s = CELL_TICK_S
        self.error_feedback = 0.0  # what encoding lost of a row's mean is nobody's
        self.residuals = Residuals(self.judge, staleness_rounds=self.staleness_rounds, error_feedback=0.0)
        self.population: Population

    def trained_at(self, peer: SimulatedPeer) -> float:
        """When the row is summed."""
        return self.population.row_wanted(peer)

    def made(self, peer: SimulatedPeer, round: int) -> tuple[F32, int]:
        """The row's mean and its tokens."""
        return self.population.row_of(peer, round)


class Population(Rings):
    """A run of one scenario of more than `FLAT_LIMIT_PEERS` peers."""

    def __init__(self, scenario: Scenario, components: Components | None = None) -> None:
        components = components or Components(work=WORK)
        count = row_count(scenario.peers)
        inner = msgspec.structs.replace(scenario, peers=count, churn=Churn(), fault=())
        self.seats = Seats(inner, components)
        self.seats.population = self
        row_length = scenario.peers / count
        self.seats.chunk_bytes /= row_length
        self.seats.state_bytes /= row_length
        self.seats.settings = replace(self.seats.settings, weight_cap=64.0)
        self.by_seat: dict[int, int] = {}
        self._how = codec(self.seats.settings.codec)
        self._measured: dict[int, tuple[RowSaid, int]] = {}
        self.rounds: list[RowRound] = []
        """Of each leaf, by its number."""
        super().__init__(scenario, count, self.seats.timeline, components.work)
        rosters = [Roster.dealt(self.leaves[number].id for number in cell.ring) for cell in self.cells]
        self.rounds += [self._machine(leaf, rosters[leaf.cell]) for leaf in self.leaves]
        for cell in self.cells:
            self._seat(cell, self.leaves[cell.head], cell.number)

    def _machine(self, leaf: Leaf, roster: Roster) -> RowRound:
        life = domain_hash("simulated life", leaf.id.encode())
        rates = int(leaf.upload), int(leaf.download)
        now = self.timeline.now
        return RowRound(me=leaf.id, roster=roster, life=life, now=now, upload=rates[0], download=rates[1])

    def _seat(self, cell: Cell, head: Leaf, seat: int) -> None:
        cell.head, head.seat = head.number, seat
        self.by_seat[seat] = cell.number
        place = self.seats.network.places[seat]
        place.region, place.upload, place.download = head.region, head.upload, head.download

    # -- who comes and goes ------------------------------------------------------------------------------------

    def _is_off(self, cell: Cell, accused: Leaf) -> None:
        if accused.number == cell.head:  # whose place is taken when its heir hears of it
            cell.head = cell.ring[0]
        for number in cell.ring[:JUDGES]:
            leaf = self.leaves[number]
            if leaf.up:
                self._follow(leaf, self.rounds[number].gave_up(self._off(cell, number), self.timeline.now))

    def _off(self, cell: Cell, number: int) -> list[PeerId]:
        """Of the list that a peer has, who is on the row's no more."""
        ring = set(cell.ring)
        return [peer for peer in self.rounds[number].list.row if self.numbers[peer] not in ring]

    def _succeed(self, cell: Cell, head: Leaf) -> None:
        """The next in order has taken the head's place: among the heads it is a newcomer."""
        cell.row = None
        self.seats.join()
        self._seat(cell, head, len(self.seats.peers) - 1)

    def _has_vanished(self, leaf: Leaf) -> None:
        if leaf.seat is not None:
            seat = self.seats.peers[leaf.seat]
            if seat.up:
                self.seats._kill(seat, silently=True, forgets=False)

    def _has_come(self, leaf: Leaf) -> None:
        ring = self.cells[leaf.cell].ring
        known = next((number for number in ring if self.leaves[number].up and number != leaf.number), ring[0])
        self.rounds.append(self._machine(leaf, self.rounds[known].list.roster))

    # -- rounds of a row ---------------------------------------------------------------------------------------

    def row_wanted(self, seat: SimulatedPeer) -> float:
        """The heads begin a round: when the row of this one is summed, if that is known."""
        cell = self.cells[self.by_seat[seat.number]]
        head, machine, value = self.leaves[cell.head], self.rounds[cell.head], seat.disk.ledger.head
        if head.seat != seat.number or not head.up:
            return math.inf
        if machine.heads and (machine.term, machine.round) < (value.next_term, value.next_round):
            cell.row, now = None, self.timeline.now
            self._follow(head, machine.gave_up(self._off(cell, head.number), now))
            machine.came(self.leaves[number].id for number in cell.ring)
            self._follow(head, machine.begin(value, seat.disk.newest, now))
        return self.timeline.now if cell.row is not None and cell.round == value.next_round else math.inf

    def _tick(self, leaf: Leaf) -> None:
        super()._tick(leaf)
        machine, now = self.rounds[leaf.number], self.timeline.now
        if now >= machine.next_at and leaf.up:
            self._follow(leaf, machine.tick(now))

    def _follow(self, leaf: Leaf, effects: Iterable[RowEffect]) -> None:
        """Do what a row's machine asks for."""
        cell = self.cells[leaf.cell]
        for effect in effects:
            if isinstance(effect, Tell):
                self._tell(leaf, effect)
            elif isinstance(effect, Begun):
                if effect.trains:
                    took_s = leaf.train_s * (0.9 + 0.2 * self._chance())
                    self.timeline.after(took_s, self._trained, leaf.number, effect.begin.stamp)
            elif isinstance(effect, SumRow):
                self._sums(cell, leaf, effect)
            elif isinstance(effect, RowDone):
                self._row_summed(cell, leaf, effect)
            elif isinstance(effect, TookOver):
                self._succeed(cell, leaf)

    def _tell(self, leaf: Leaf, tell: Tell) -> None:
        """A message of the row: it may be lost, as any of the detector's."""
        message, other = tell.message, self.numbers[tell.peer]
        known = self._measured.get(id(message))
        if known is None or known[0] is not message:
            if len(self._measured) > MEASURED_LIMIT:
                self._measured.clear()
            size = len(msgspec.msgpack.encode(message)) + ENVELOPE_BYTES + CONTROL_OVERHEAD_BYTES
            known = self._measured[id(message)] = message, size
        leaf.control_bytes += known[1]
        if self._chance() >= self.scenario.loss:
            delay_s, signer = self._delay_s(leaf, self.leaves[other]), self.numbers[tell.signer]
            self.timeline.after(delay_s, self._told, leaf.number, signer, other, message, known[1])

    def _told(self, via: int, signer: int, to: int, message: RowSaid, size: int) -> None:
        leaf = self.leaves[to]
        self.timeline.note(8, via, to, size)
        if not leaf.up:
            return
        try:
            effects = self.rounds[to].receive(
                self.leaves[signer].id, message, self.timeline.now, via=self.leaves[via].id
            )
        except RemoteError as refused:
            raise Violation("nobody refused", f"peer {to} of its row: {refused}") from refused
        self._follow(leaf, effects)

    def _trained(self, number: int, stamp: Stamp) -> None:
        leaf, machine = self.leaves[number], self.rounds[number]
        if leaf.up and machine.stamp == stamp:
            root = number.to_bytes(HASH_BYTES, "little")
            self._follow(leaf, machine.trained(tokens_of(number), root, self.timeline.now))

    # -- the chunks of a row -----------------------------------------------------------------------------------

    def _sums(self, cell: Cell, leaf: Leaf, effect: SumRow) -> None:
        """A member begins to sum. Raises Violation if its plan is another than that of the others."""
        sum, row = cell.sum, self.rounds[leaf.number].list.row
        if sum is None or sum.plan.stamp != effect.plan.stamp:
            summers = tuple(self.numbers[row[term.place]] for term in effect.plan.terms)
            sum = cell.sum = RowSum(effect.plan, summers, cell.head, self.timeline.now, effect.attempt, effect.gone)
            self.timeline.after(STALL_S, self._look_at_stalls, cell, sum)
        if effect.attempt > sum.attempt:
            sum.attempted(effect.attempt, effect.gone)
        if effect.attempt < sum.attempt:
            return
        if effect.plan != sum.plan or effect.gone != sum.gone:
            raise Violation("one plan of a row", f"peer {leaf.number} sums by another than its row")
        sum.waiting.discard(leaf.number)
        if not any(self.leaves[number].up for number in sum.waiting):
            self._spend(cell, sum)

    def _spend(self, cell: Cell, sum: RowSum) -> None:
        """All who live have begun. Where some were lost, the others send of their own what those had owned again."""
        took_s = sum.work(self.work.model_bytes).took_s
        if sum.due_at is not None:
            before = sum.work(self.work.model_bytes, anew=True)
            took_s = max(took_s - before.took_s, took_s / len(sum.summers))
        sum.due_at = max(sum.due_at or 0.0, self.timeline.now) + took_s
        self.timeline.at(sum.due_at, self._all_summed, cell.number, sum.plan.stamp, sum.attempt)

    def _all_summed(self, number: int, stamp: Stamp, attempt: int) -> None:
        """Every chunk is where it is to be, unless somebody who owns some is gone, known or not."""
        cell = self.cells[number]
        sum = cell.sum
        if sum is None or (sum.plan.stamp, sum.attempt) != (stamp, attempt):
            return
        left = (*sum.left, *(() if cell.head in sum.summers else (cell.head,)))
        if not all(self.leaves[one].up for one in left):
            return
        for one in left:
            self._follow(self.leaves[one], self.rounds[one].summed(stamp, attempt, self.timeline.now))

    def _look_at_stalls(self, cell: Cell, sum: RowSum) -> None:
        """Tell the head of members that fell silent while they should sum, and look again later."""
        if cell.sum is not sum or cell.round == sum.plan.round:
            return
        now = self.timeline.now
        silent = [leaf for leaf in (self.leaves[number] for number in sum.left) if not leaf.up]
        due_at = {leaf.id: max(leaf.silent_since, sum.began_at) + STALL_S for leaf in silent}
        stalled = [peer for peer, at in due_at.items() if at <= now]
        if stalled and self.leaves[cell.head].up:
            self._follow(self.leaves[cell.head], self.rounds[cell.head].stalled(stalled, now))
        next_at = min([now + STALL_S, *(at for at in due_at.values() if at > now)])
        self.timeline.at(next_at, self._look_at_stalls, cell, sum)

    def _row_summed(self, cell: Cell, head: Leaf, done: RowDone) -> None:
        """The head has the row's mean. Raises Violation if it weighs it otherwise than what is in it does."""
        cell.counted, cell.round = tuple(self.numbers[peer] for peer in done.counted), done.round
        cell.given = [self._given(number, done.round) for number in cell.counted]
        cell.row = self._sum(cell.given)
        if sum(tokens_of(number) for number in cell.counted) != done.tokens:
            raise Violation("the reference", f"the weight of cell {cell.number} in round {done.round}")
        if head.seat is not None and self.seats.peers[head.seat].up:
            self.seats.peers[head.seat].peer_rounds.trained()

    def _given(self, number: int, round: int) -> Given:
        return given_by(self._how, self.seats.grid, self.made(number, round))

    def _sum(self, given: Sequence[Given]) -> tuple[F32, int]:
        return summed_row(self._how, self.seats.grid, given)

    def made(self, number: int, round: int) -> tuple[F32, int]:
        """The values that a peer makes in a round, and the number of tokens that they are of."""
        return made_by(self.scenario.seed, number, round, self.seats.grid.numel)

    def row_of(self, seat: SimulatedPeer, round: int) -> tuple[F32, int]:
        """Mean and tokens that a head commits to. Raises Violation if a plain computation of the row differs."""
        cell = self.cells[self.by_seat[seat.number]]
        assert cell.row is not None
        tokens = sum(weight for _, weight in cell.given)
        plain = plain_row(self._how, self.seats.grid, cell.given)
        if cell.round != round or cell.row[1] != tokens or not np.array_equal(plain, cell.row[0]):
            raise Violation("the reference", f"the row of cell {cell.number} in round {round}")
        return cell.row

    # -- the run -----------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Let it happen, to the last round or the first violation."""
        began = time.perf_counter()
        violation = detail = ""
        seats, rounds = self.seats, self.scenario.rounds
        with seats.keys.in_use():
            try:
                for peer in seats.peers:
                    seats.start(peer)
                self.begin_churn()
                self._run(rounds)
            except NoQuorum:
                pass
            except Violation as broken:
                violation, detail = broken.kind, broken.detail
        return self._outcome(time.perf_counter() - began, violation, detail)

    def _run(self, rounds: int) -> None:
        seats, best = self.seats, -1
        while seats._best < rounds:
            if seats._best == best:
                seats.stands_still(STANDSTILL_S)
            best = seats._best
            self.timeline.run(self.timeline.now + STANDSTILL_S, lambda best=best: seats._best > best)  # type: ignore[misc]

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
