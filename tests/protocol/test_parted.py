"""Leads that follow each other, of which the later knows nothing of what the earlier evicted.

A reduction stays closed to whoever was evicted from it once, so nobody may wait there for what it will never take.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

import pytest

from shoal.lab.signed import moves_of
from shoal.protocol.agreement import Broadcast
from shoal.protocol.effects import CloseOff, Effect, Evicted, Repair, StartReduce
from shoal.protocol.leading import REPLAN_SETTLE_S
from shoal.protocol.messages import MEMBER_LIMIT, Evict, Held, Message, Plan
from shoal.protocol.round import RoundMachine
from tests.protocol.lab import PaperIdentity
from tests.protocol.round_machines import accuse, contribution, machines_of, planned

pytestmark = pytest.mark.usefixtures("paper_signatures")

MEMBERS = 5


class Table:
    """Machines under one plan, among whom a message is delivered when the test says so."""

    def __init__(self, members: int = MEMBERS) -> None:
        _, self.machines, self.old, self.plan = planned(members)
        self.by_peer = {machine.me: machine for machine in self.machines}
        self.now = 2.0
        self.said: deque[tuple[RoundMachine, Message]] = deque()
        self.followed: dict[str, Effect] = {}
        self.dead: set[str] = set()
        self.orders: list[Message] = []

    @staticmethod
    def of_four() -> tuple[Table, RoundMachine]:
        """A table whose plan one of the members has no part in, since it was away; and that one."""
        table = Table()
        away = table.others(table.lead(0), table.lead(1))[-1]
        _, machines = machines_of(MEMBERS)
        table.machines = machines
        table.by_peer = {machine.me: machine for machine in machines}
        away, present = table.by_peer[away.me], [machine for machine in machines if machine.me != away.me]
        table.now, table.dead = 1.0, {away.me}
        for machine in present:
            table.carry_out(machine, machine.peers_alive([one.me for one in present], table.now))
        for machine in present:
            table.carry_out(machine, machine.ready(contribution(machine), table.now))
        table.deliver()
        table.now = 2.0
        (table.plan,) = (message for message in table.orders if isinstance(message, Plan))
        return table, away

    def lead(self, view: int) -> RoundMachine:
        return self.by_peer[self.machines[0].agreement.lead(view)]

    def others(self, *without: RoundMachine) -> list[RoundMachine]:
        return [machine for machine in self.machines if machine not in without]

    def carry_out(self, machine: RoundMachine, effects: Collection[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Broadcast):
                self.said.append((machine, effect.message))
                if isinstance(effect.message, Evict | Plan):
                    self.orders.append(effect.message)
            elif isinstance(effect, CloseOff):
                self.carry_out(machine, machine.closed_off(effect, (), self.now))
            elif isinstance(effect, StartReduce | Repair | Evicted):
                self.followed[machine.me] = effect

    def deliver(self) -> None:
        """All that was said, and all that is said about it."""
        while self.said:
            sender, message = self.said.popleft()
            for machine in self.others(sender):
                if not {machine.me, sender.me} & self.dead:
                    self.carry_out(machine, machine.receive(sender.me, message, self.now))

    def evicts(self, accused: RoundMachine, heard_by: Collection[RoundMachine] = ()) -> None:
        """The lead of view 0 evicts, on the word of two; nobody but these hears of it."""
        first = self.lead(0)
        present = [machine for machine in self.others(first, accused) if machine.me in self.plan.remaining]
        for accuser in present[:2]:
            self.carry_out(first, first.receive(accuser.me, accuse(self.plan, accused.me), self.now))
        self.now += REPLAN_SETTLE_S
        self.carry_out(first, first.tick(self.now))
        (evict,) = (message for _, message in self.said if isinstance(message, Evict))
        assert evict.evicted == (accused.me,)
        self.said.clear()
        for machine in heard_by:
            self.carry_out(machine, machine.receive(first.me, evict, self.now))
        self.said.clear()
        self.orders.clear()

    def moves_on(self, *dying: RoundMachine) -> None:
        """The lead of view 0 seems dead for a moment; the next one begins without those who die then."""
        first, everyone = self.lead(0), {machine.me for machine in self.machines}
        for machine in self.others(first):
            self.carry_out(machine, machine.peers_alive(everyone - {first.me}, self.now))
        self.carry_out(first, first.peers_alive(everyone, self.now))
        self.deliver()
        assert {machine.agreement.view for machine in self.machines} == {1}
        self.dead = {machine.me for machine in dying}
        for machine in self.others(*dying):
            self.carry_out(machine, machine.peers_alive(everyone - self.dead, self.now))
            for other in self.others(machine, *dying):
                self.carry_out(machine, machine.receive(other.me, contribution(other), self.now))
        self.now += REPLAN_SETTLE_S + 0.1
        for machine in self.others(*dying):
            self.carry_out(machine, machine.tick(self.now))
        self.deliver()


def test_lead_that_was_evicted_unknown_to_it_goes_on_without_the_one_who_takes_nothing_from_it() -> None:
    """Or the one would wait for its finals, and be believed by nobody, for as long as it is asked again."""
    table = Table()
    first, second = table.lead(0), table.lead(1)
    table.evicts(second)
    table.moves_on()
    (last,) = table.orders[-1:]
    assert isinstance(last, Plan)
    assert (last.planner, last.view, last.lineage, last.evicted) == (second.me, 1, table.plan.hash, (first.me,))
    assert table.followed[first.me] == Evicted(last)
    for machine in table.others(first):
        effect = table.followed[machine.me]
        assert isinstance(effect, Repair)
        assert effect.plan == last


def test_pair_without_which_there_is_no_quorum_begins_another_reduction() -> None:
    table = Table()
    first, second = table.lead(0), table.lead(1)
    *dying, third = table.others(first, second)
    table.evicts(second)
    table.moves_on(*dying)
    for machine in (first, second, third):
        effect = table.followed[machine.me]
        assert isinstance(effect, StartReduce)
        plan = effect.plan
        assert {p.peer for p in plan.participants} == {first.me, second.me, third.me}
        assert plan.lineage == plan.hash != table.plan.hash
        assert plan.view == 1


def test_who_cannot_go_on_with_another_in_one_reduction_takes_part_in_the_next() -> None:
    """Also where the others would be enough, with one who was not there when the first was planned."""
    table, away = Table.of_four()
    first, second = table.lead(0), table.lead(1)
    dying, third = table.others(first, second, away)
    table.evicts(second)
    table.dead.clear()
    table.carry_out(away, away.ready(contribution(away), table.now))
    table.moves_on(dying)
    for machine in (first, second, third, away):
        effect = table.followed[machine.me]
        assert isinstance(effect, StartReduce)
        assert {p.peer for p in effect.plan.participants} == {first.me, second.me, third.me, away.me}
        assert effect.plan.evicted == (dying.me,)


def test_one_from_whom_two_take_nothing_goes_itself() -> None:
    table = Table()
    first, second = table.lead(0), table.lead(1)
    accused, third, fourth = table.others(first, second)
    table.evicts(accused, heard_by=[third])
    table.moves_on()
    assert table.followed[accused.me] == Evicted(table.orders[-1])  # type: ignore[arg-type]
    for machine in (first, second, third, fourth):
        effect = table.followed[machine.me]
        assert isinstance(effect, Repair)
        assert (effect.plan.evicted, effect.plan.lineage) == ((accused.me,), table.plan.hash)


def test_one_from_whom_the_lead_takes_nothing_goes_itself() -> None:
    table = Table()
    first, second = table.lead(0), table.lead(1)
    accused = table.others(first, second)[0]
    table.evicts(accused, heard_by=[second])
    table.moves_on()
    assert table.followed[accused.me] == Evicted(table.orders[-1])  # type: ignore[arg-type]


def test_who_is_closed_to_somebody_says_so_to_every_lead() -> None:
    """By an eviction that it heard, or by a revision that it follows, of which it heard no eviction."""
    table = Table()
    second, third, gone = table.lead(1), *table.others(table.lead(0), table.lead(1))[:2]
    table.evicts(gone, heard_by=[third])
    asked = Evict(
        term=table.plan.term,
        round=table.plan.round,
        base=table.plan.base,
        view=1,
        attempt=0,
        lineage=table.plan.hash,
        evicted=(),
        moves=moves_of([PaperIdentity(f"{n:02d}") for n in range(MEMBERS)], second.previous, 1),
    )
    table.carry_out(third, third.receive(second.me, asked, table.now))
    assert [m.evicted for sender, m in table.said if isinstance(m, Held)] == [(gone.me,)]

    table = Table()
    first, third, gone = table.lead(0), *table.others(table.lead(0), table.lead(1))[:2]
    table.evicts(gone)
    for machine in table.others(first, gone):
        if machine is not third:
            held = Held(
                term=asked.term,
                round=1,
                base=asked.base,
                lineage=asked.lineage,
                evicted=(gone.me,),
                chunks=(),
            )
            table.carry_out(first, first.receive(machine.me, held, table.now))
    table.carry_out(first, first.receive(third.me, held, table.now))
    (plan,) = table.orders
    assert isinstance(plan, Plan)
    third.receive(first.me, plan, table.now)
    assert third.plan == plan
    table.said.clear()
    table.carry_out(third, third.receive(table.lead(1).me, asked, table.now))
    assert [m.evicted for sender, m in table.said if isinstance(m, Held)] == [(gone.me,)]


def test_what_is_kept_of_evictions_is_bounded() -> None:
    """A lead may name anybody, and reductions that there are not."""
    _, machines, _, _ = planned(3)
    machine = machines[0]
    crowd = [PaperIdentity(f"x{number}").peer_id for number in range(2 * MEMBER_LIMIT)]
    for number in range(2 * MEMBER_LIMIT):
        effects = machine.closed_off(CloseOff(number.to_bytes(32, "big"), frozenset(crowd[:3])), (), 2.0)
        (held,) = (e.message for e in effects if isinstance(e, Broadcast) and isinstance(e.message, Held))
        assert set(held.evicted) == set(crowd[:3])
    assert len(machine._facts.closed_to) == MEMBER_LIMIT
    some, many = crowd[:MEMBER_LIMIT], crowd[MEMBER_LIMIT : 2 * MEMBER_LIMIT]
    for named in (some, many):
        effects = machine.closed_off(CloseOff((0).to_bytes(32, "big"), frozenset(named)), (), 2.0)
        (held,) = (e.message for e in effects if isinstance(e, Broadcast) and isinstance(e.message, Held))
        assert set(held.evicted) == set(named), "no more than a message may name"
