"""Bounds of a round in virtual time, and round machines at one point of it, for tests of the round machine."""

from __future__ import annotations

import msgspec

from shoal.protocol.agreement import Broadcast
from shoal.protocol.effects import Effect, MemberEffect, StartReduce
from shoal.protocol.leading import REPLAN_SETTLE_S
from shoal.protocol.messages import (
    Message,
    Plan,
    Ready,
    Stalled,
    domain_hash,
)
from shoal.protocol.round import Phase, RoundMachine
from tests.protocol.round_lab import BREAK_SEEN_S, LATENCY_S, TICK_S, RoundLab
from tests.round_messages import ready_with

TRAIN_S = 1.2
REDUCE_S = 1.0
ROUND_S = TRAIN_S + REDUCE_S + 0.4
"""Longest undisturbed round: training, reducing, five message delays, a tick or two."""
REPLAN_S = BREAK_SEEN_S + REPLAN_SETTLE_S + 2 * TICK_S + 3 * LATENCY_S[1]
"""What a death adds at most, besides reducing again."""


def sends(effect: Effect | MemberEffect, kind: type[Message]) -> bool:
    return isinstance(effect, Broadcast) and isinstance(effect.message, kind)


def machines_of(count: int) -> tuple[RoundLab, list[RoundMachine]]:
    """Machines of a lab in which no time passes; the test hands them messages itself."""
    lab = RoundLab(count)
    return lab, [node.running() for node in lab.nodes]


def contribution(machine: RoundMachine, **changes: object) -> Ready:
    ready = ready_with(
        machine.previous,
        domain_hash("root", machine.me.encode()),
        tokens=10,
        upload=1,
        download=1,
        life=machine.life,
    )
    return msgspec.structs.replace(ready, **changes)


def planned(count: int) -> tuple[RoundLab, list[RoundMachine], int, Plan]:
    """`count` machines, all ready; the lead has planned and the others have the plan."""
    lab, machines = machines_of(count)
    leader = lab.lead()
    effects: list[Effect] = []
    readies = [contribution(machine) for machine in machines]
    for number, machine in enumerate(machines):
        for ready, sender in zip(readies, machines, strict=True):
            if sender is machine:
                effects += machine.ready(ready, 1.0)
            else:
                effects += machine.receive(sender.me, ready, 1.0)
        assert machine.phase in (Phase.PLAN, Phase.REDUCE), number
    (plan,) = [e.message for e in effects if isinstance(e, Broadcast) and isinstance(e.message, Plan)]
    for number, machine in enumerate(machines):
        if number != leader:
            assert StartReduce(plan) in machine.receive(plan.planner, plan, 1.1)
    return lab, machines, leader, plan


def accuse(plan: Plan, *accused: str) -> Stalled:
    return Stalled(term=plan.term, round=plan.round, base=plan.base, plan=plan.hash, peers=tuple(accused))  # type: ignore[arg-type]
