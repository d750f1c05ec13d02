"""Swarms beyond the limit of one plan: the two-level sum, each row one participant of the round, one digest for all.

*Grid.* Rows, their heads and who sums what are `shoal.protocol.rows` and `shoal.collectives.two_level`. A row's head
commits to the row's mean, which weighs as much as all tokens in it, and takes part in the round of the heads, which is
the plain round: the columns. So what is certified is the weighted mean of all who were counted in their row, and one
digest is everybody's.

*Losses.* Who is given up while its row is summed counts no more, and the others take over its chunks. If it is the
head, the next of the row takes its place: it joins the round of the heads as any newcomer does, its row's weight being
zero the first time.

*Certificates.* The electorate are the heads of the last round, at most `ROWS_LIMIT` whatever the number of peers, so a
certificate has no more signatures than there are rows. The rule of quorums, and the proof that two of them meet, are
those of any electorate.

The round of the heads is simulated message by message, a column carrying the model divided by the length of a row. A
row's own messages are too, but not its chunks: what each member of it sends follows from the deal, and the sum takes as
long as the slowest of them needs for that.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import msgspec
import numpy as np

from shoal.collectives.codecs import F32, codec
from shoal.protocol.rows import head_of, row_count
from shoal.testnet.simulate.judge import Violation
from shoal.testnet.simulate.outcome import Kit, Outcome, Workload
from shoal.testnet.simulate.peer import SimulatedPeer
from shoal.testnet.simulate.rings import CELL_TICK_S, Rings
from shoal.testnet.simulate.rows import Cell, Leaf, made_by, plain_row, row_work, summed_row
from shoal.testnet.simulate.scenario import Churn, Scenario
from shoal.testnet.simulate.simulation import NoQuorum, Simulation

ROW_GRACE_S = 3.0
"""After half of a row is done the rest has so long; what comes later counts in the next round."""
FAN_OUT = 4
SHARE_BYTES = 420
COMMIT_BYTES = 900
STANDSTILL_S = 240.0
WORK = Workload(train_s=(4.0, 8.0))


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


class Crowd(Rings):
    """A run of one scenario of more than `FLAT_LIMIT_PEERS` peers."""

    def __init__(self, scenario: Scenario, kit: Kit | None = None) -> None:
        kit = kit or Kit(work=WORK)
        count = row_count(scenario.peers)
        inner = msgspec.structs.replace(scenario, peers=count, churn=Churn(), fault=())
        self.seats = Seats(inner, kit)
        self.seats.crowd = self
        self.row_length = scenario.peers / count
        self.seats.chunk_bytes /= self.row_length
        self.seats.state_bytes /= self.row_length
        self.seats.settings = replace(self.seats.settings, weight_cap=64.0)
        self.by_seat: dict[int, int] = {}
        self._how = codec(self.seats.settings.codec)
        super().__init__(scenario, count, self.seats.timeline, kit.work)
        for cell in self.cells:
            self._seat(cell, self.leaves[cell.head], cell.number)

    def _seat(self, cell: Cell, head: Leaf, seat: int) -> None:
        cell.head, head.seat = head.number, seat
        self.by_seat[seat] = cell.number
        place = self.seats.network.places[seat]
        place.region, place.upload, place.download = head.region, head.upload, head.download

    # -- who comes and goes ------------------------------------------------------------------------------------

    def _heard(self, leaf: Leaf, sender: Leaf, what: str, rest: tuple[int, ...]) -> None:
        if what == "share":
            self._share(self.cells[leaf.cell], sender.number, rest[0])
        elif what == "commit":
            self._commit(leaf, rest[0], rest[1])

    def _is_off(self, cell: Cell, accused: Leaf) -> None:
        if accused.number == cell.head:
            self._succeed(cell)
        if cell.closed and cell.row is None and accused.number in cell.summers:
            self._sum_without(cell, accused.number)
        self._close_row(cell)

    def _succeed(self, cell: Cell) -> None:
        """The next in order takes the head's place, among the heads as a newcomer."""
        ids = [self.leaves[number].id for number in cell.ring]
        head = head_of(ids, self.leaves[cell.head].id)
        assert head is not None
        self.seats.join()
        self._seat(cell, self.leaves[self.numbers[head]], len(self.seats.peers) - 1)
        cell.closed, cell.row = False, None
        cell.attempt += 1

    def _has_vanished(self, leaf: Leaf) -> None:
        if leaf.seat is not None:
            seat = self.seats.peers[leaf.seat]
            if seat.up:
                self.seats._kill(seat, silently=True, forgets=False)

    def _has_come(self, leaf: Leaf) -> None:
        leaf.since_round = self.cells[leaf.cell].round

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
        cell.attempt += 1
        cell.ready.clear()
        head = self.leaves[cell.head]
        if head.up:
            self._commit(head, round, 0)

    def _commit(self, leaf: Leaf, round: int, place: int) -> None:
        """The certificate has come down the row's tree: pass it on, and train."""
        cell = self.cells[leaf.cell]
        order = [cell.head, *(number for number in cell.ring if number != cell.head)]
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
        if overdue or cell.ready.issuperset(cell.ring):
            cell.closed = True
            leaves = [self.leaves[number] for number in cell.ring]
            cell.summers = tuple(cell.ring)
            cell.counted = tuple(x.number for x in leaves if x.number in cell.ready and x.since_round < cell.round)
            cell.due_at = self.timeline.now + 2 * max(self._delays[leaves[0].region][leaf.region] for leaf in leaves)
            cell.work = row_work([(leaf.upload, leaf.download) for leaf in leaves], self.work.model_bytes)
            self._spend(cell, cell.work.took_s)

    def _sum_without(self, cell: Cell, lost: int) -> None:
        """The lost counts no more; what it owned the others sum, each of whom sends that part of its own again."""
        leaves = [self.leaves[number] for number in cell.summers]
        gone = [place for place, leaf in enumerate(leaves) if leaf.number not in cell.ring]
        rates = [(leaf.upload, leaf.download) for leaf in leaves]
        before = row_work(rates, self.work.model_bytes)
        cell.work = row_work(rates, self.work.model_bytes, gone=gone)
        cell.counted = tuple(number for number in cell.counted if number != lost)
        self._spend(cell, max(cell.work.took_s - before.took_s, cell.work.took_s / len(leaves)))

    def _spend(self, cell: Cell, took_s: float) -> None:
        """The row is summed so much later, unless somebody is lost meanwhile."""
        cell.attempt += 1
        cell.due_at = max(cell.due_at, self.timeline.now) + took_s
        self.timeline.at(cell.due_at, self._row_summed, cell.number, cell.round, cell.attempt)

    def _row_summed(self, number: int, round: int, attempt: int) -> None:
        cell = self.cells[number]
        if (cell.round, cell.attempt) != (round, attempt) or cell.work is None or not cell.closed or not cell.counted:
            return
        for one, sent in zip(cell.summers, cell.work.sent, strict=True):
            self.leaves[one].bulk_bytes += sent
        cell.row = self._sum(cell.counted, round)
        seat = self.leaves[cell.head].seat
        if seat is not None and self.seats.peers[seat].up:
            self.seats.peers[seat].course.trained()

    def _sum(self, counted: tuple[int, ...], round: int) -> tuple[F32, int]:
        return summed_row(self._how, self.seats.grid, [self.made(number, round) for number in counted])

    def made(self, number: int, round: int) -> tuple[F32, int]:
        """What a peer makes in a round, and of how many tokens."""
        return made_by(self.scenario.seed, number, round, self.seats.grid.numel)

    def row_of(self, seat: SimulatedPeer, round: int) -> tuple[F32, int]:
        """What a head commits to. Raises Violation if it is not what a plain computation makes of the row."""
        cell = self.cells[self.by_seat[seat.number]]
        assert cell.row is not None
        made = [self.made(number, round) for number in cell.counted]
        tokens = sum(weight for _, weight in made)
        if cell.row[1] != tokens or not np.array_equal(plain_row(self._how, self.seats.grid, made), cell.row[0]):
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

    def bulk_bytes(self) -> float:
        """All bytes of chunks that were sent. Of the columns the heads' are simulated; the others are like them."""
        columns = sum(place.bulk_bytes for place in self.seats.network.places) * self.row_length
        return sum(leaf.bulk_bytes for leaf in self.leaves) + columns

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
