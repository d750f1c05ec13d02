"""What a user hears of a warm-up, which may take minutes, from the engine of rollouts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import trio
import trio.testing

from shoal.node.outcome import Progress, Progressed
from shoal.node.sapo.agent_messages import Teaching
from shoal.node.sapo.engine import TEACHING_PERIOD_S, RolloutEngine
from shoal.protocol.identity import Identity


def test_warm_up_is_told_at_once_and_then_a_few_times_a_minute() -> None:
    trio.run(tell_of_a_minute, clock=trio.testing.MockClock(autojump_threshold=0))


async def tell_of_a_minute() -> None:
    told: list[Progress] = []
    texts: list[str] = []
    parts: Any = SimpleNamespace(
        config=SimpleNamespace(rollouts="train"), identity=Identity.generate(), on_progress=told.append
    )
    engine = RolloutEngine(parts)
    child: Any = None
    for done in range(61):
        known = {} if not done else {"reward": 0.0625, "left_s": 4.0 * (800 - done)}
        await engine._follow(child, Teaching(done=done, limit=800, wanted=0.2, **known))
        texts.append(engine.status.teaching)
        await trio.sleep(1)
    assert told == [Progressed(text=texts[done]) for done in range(0, 61, 15)]
    assert texts[0] == "teaching the policy: 0 of at most 800 updates"
    assert texts[26] == (
        "teaching the policy: 26 of at most 800 updates, reward 0.06 of the 0.20 wanted, at most 52 min left"
    )
    assert TEACHING_PERIOD_S == 15
