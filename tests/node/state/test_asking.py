"""Peers asked in turn: nobody who is slow keeps the next one from being asked, and nobody is waited for in vain."""

from __future__ import annotations

from collections.abc import Mapping

import trio
from trio.testing import MockClock

from shoal.node.state.asking import ask_in_turn
from shoal.protocol.donors import HEDGE_S
from shoal.protocol.identity import PeerId

NEVER = float("inf")


def asked(answers: Mapping[str, tuple[float, float | None]]) -> tuple[dict[str, float], list[str], float]:
    """When each peer was asked, who answered, and when it was over. answers: after how long, with which patience."""
    at, answered = dict[str, float](), list[str]()

    async def ask(peer: PeerId) -> float | None:
        after_s, timeout_s = answers[peer]
        at[peer] = trio.current_time()
        await trio.sleep(after_s)
        answered.append(peer)
        return timeout_s

    async def main() -> float:
        began = trio.current_time()
        await ask_in_turn([PeerId(peer) for peer in answers], ask)
        return trio.current_time() - began

    over = trio.run(main, clock=MockClock(autojump_threshold=0))
    first = min(at.values(), default=0.0)
    return {peer: round(when - first, 6) for peer, when in at.items()}, answered, round(over, 6)


def test_next_is_asked_when_the_one_before_answered_or_is_slow() -> None:
    at, answered, over = asked({"quick": (0.1, None), "slow": (3.0, None), "last": (0.2, None)})
    assert at == {"quick": 0.0, "slow": 0.1, "last": round(0.1 + HEDGE_S, 6)}
    assert answered == ["quick", "last", "slow"]
    assert over == 3.1


def test_answer_that_is_enough_ends_it_for_those_that_do_not_answer() -> None:
    at, answered, over = asked({"hangs": (NEVER, None), "has it": (0.1, 0.0), "not asked": (0.0, None)})
    assert at == {"hangs": 0.0, "has it": HEDGE_S}
    assert answered == ["has it"]
    assert over == round(HEDGE_S + 0.1, 6)


def test_those_asked_have_some_more_time_once_one_has_answered() -> None:
    _, answered, over = asked({"hangs": (NEVER, None), "first": (0.1, 0.4), "soon": (0.3, None), "late": (9.0, None)})
    assert answered == ["first", "soon"]
    assert over == round(HEDGE_S + 0.1 + 0.4, 6)


def test_nobody_to_ask_is_over_at_once() -> None:
    assert asked({}) == ({}, [], 0.0)
