"""The order in which a node does what a plan asks of it, and whom the work with a message is charged to."""

from __future__ import annotations

from time import thread_time
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from shoal.node.holds import Holds
from shoal.node.rounds.engine import PERFORMERS, Engine
from shoal.node.rounds.participation import PLAN_OUT_S, Participation
from shoal.node.rounds.round_observer import RoundObserver
from shoal.protocol.effects import Repair, StartReduce
from shoal.protocol.inputs import Received, Tick
from shoal.protocol.messages import Plan
from tests.node.ledger import Ledger, identity, plan_of

LEDGER = Ledger()


class Parts:
    """What an engine does, in order."""

    def __init__(self, me: str) -> None:
        self.did: list[str] = []
        self.identity = SimpleNamespace(peer_id=me)
        self.log = SimpleNamespace(planned=lambda plan: None)
        self.holds = Holds((), SimpleNamespace())  # type: ignore[arg-type]
        self.links = SimpleNamespace(drain=self.drain)
        self.reduce = SimpleNamespace(
            start=lambda *_: self.did.append("start"), repair=lambda *_: self.did.append("repair")
        )

    async def drain(self, *, deadline_s: float) -> None:
        assert deadline_s == PLAN_OUT_S
        await trio.lowlevel.checkpoint()
        self.did.append("plan is out")


def engine_of(parts: Parts) -> Engine:
    engine, part = Engine.__new__(Engine), Participation.__new__(Participation)
    part._p, part._me, part._observer = parts, parts.identity.peer_id, RoundObserver  # type: ignore[assignment]
    part._contributions = SimpleNamespace(made=None)  # type: ignore[assignment]
    engine._part = part
    return engine


def effect_of(kind: Any, plan: Plan) -> StartReduce | Repair:
    return StartReduce(plan) if kind is StartReduce else Repair(plan, ())


@pytest.mark.parametrize(("kind", "does"), [(StartReduce, "start"), (Repair, "repair")])
def test_a_lead_sees_its_plan_out_before_its_own_threads_are_at_work(kind: Any, does: str) -> None:
    plan = plan_of([identity(1), identity(2)], LEDGER.chain.head)
    for me, expected in ((plan.planner, ["plan is out", does]), (identity(9).peer_id, [does])):
        parts = Parts(me)
        trio.run(PERFORMERS[kind], engine_of(parts), effect_of(kind, plan))
        assert parts.did == expected


def test_time_that_a_message_takes_in_the_engine_is_charged_to_who_said_it() -> None:
    plan, charged = plan_of([identity(1), identity(2)], LEDGER.chain.head), dict[str, float]()
    engine = engine_of(Parts(identity(1).peer_id))
    engine._p = SimpleNamespace(links=SimpleNamespace(charge=charged.__setitem__))  # type: ignore[assignment]

    def take(event: Any, now: float) -> None:
        ends_at = thread_time() + 0.05
        while thread_time() < ends_at:
            pass

    engine.member = SimpleNamespace(take=take)  # type: ignore[assignment]
    trio.run(engine._feed, Tick())
    assert charged == {}
    trio.run(engine._feed, Received(identity(2).peer_id, plan))
    assert charged.keys() == {identity(2).peer_id}
    assert 0.05 <= charged[identity(2).peer_id] < 0.5
