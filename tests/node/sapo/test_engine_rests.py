"""An agent that says nothing for long: one that rests is waited for, one that does not is taken for hung."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio

from shoal.node.child_process import ChildDied
from shoal.node.pipe import Pause, Resume
from shoal.node.sapo.agent_messages import AgentReport, Saved
from shoal.node.sapo.engine import STALL_DEADLINE_S, RolloutEngine
from shoal.protocol.identity import Identity
from shoal.protocol.inputs import SetPaused
from shoal.protocol.offer_pace import GRANTED_FIRST, PROBE_S, OfferPace

pytestmark = pytest.mark.virtual_time

SAID = Saved(round=1)


class SilentAgent:
    """An agent that says one thing, at a time. told: the orders that it got, each with when."""

    def __init__(self, says_at: float) -> None:
        self._says_at = trio.current_time() + says_at
        self._began = trio.current_time()
        self.told: list[tuple[float, object]] = []

    async def receive(self) -> AgentReport:
        await trio.sleep_until(self._says_at)
        return SAID

    async def send(self, order: object) -> None:
        await trio.lowlevel.checkpoint()
        self.told.append((trio.current_time() - self._began, order))


def engine_of(agent: SilentAgent, *, role: str = "train") -> RolloutEngine:
    parts: Any = SimpleNamespace(
        config=SimpleNamespace(rollouts=role),
        identity=Identity.generate(),
        members=SimpleNamespace(announce=lambda: None),
        on_progress=lambda progress: None,
        averages=False,
    )
    engine = RolloutEngine(parts)
    engine._child = agent  # type: ignore[assignment]
    return engine


async def heard(engine: RolloutEngine, agent: Any, paused: list[tuple[float, bool]]) -> AgentReport | ChildDied:
    """What the agent says next, or its end. paused: when its user pauses it, and has it go on."""

    async def order() -> None:
        for after_s, wish in paused:
            await trio.sleep(after_s)
            engine.put(SetPaused(wish))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine._pass_on_pauses)
        nursery.start_soon(order)
        try:
            return await engine._next(agent)
        except ChildDied as end:
            return end
        finally:
            nursery.cancel_scope.cancel()


async def test_time_of_a_pause_is_not_taken_for_a_hang() -> None:
    agent = SilentAgent(says_at=STALL_DEADLINE_S + 900)
    engine = engine_of(agent)
    engine._changed.set()  # as for an agent that has just begun
    assert await heard(engine, agent, [(60, True), (STALL_DEADLINE_S - 120, False)]) == SAID
    assert [type(order) for _, order in agent.told] == [Resume, Pause, Resume]


async def test_sampler_that_waits_for_its_groups_to_be_taken_does_not_hang() -> None:
    agent = SilentAgent(says_at=2 * STALL_DEADLINE_S)
    engine, made = engine_of(agent, role="sample"), int(GRANTED_FIRST + 2 * STALL_DEADLINE_S / PROBE_S)
    engine._pace = OfferPace(trio.current_time())
    for number in range(made):
        engine._pace.made(number.to_bytes(32, "big"), trio.current_time())
    engine._changed.set()
    assert await heard(engine, agent, []) == SAID
    assert [type(order) for _, order in agent.told] == [Pause]


@pytest.mark.parametrize("paused", [[], [(60.0, True), (60.0, False)]])
async def test_agent_that_goes_on_and_says_nothing_hangs(paused: list[tuple[float, bool]]) -> None:
    agent = SilentAgent(says_at=2 * STALL_DEADLINE_S)
    began = trio.current_time()
    assert isinstance(await heard(engine_of(agent), agent, paused), ChildDied)
    assert trio.current_time() - began == pytest.approx(STALL_DEADLINE_S + sum(after_s for after_s, _ in paused))
