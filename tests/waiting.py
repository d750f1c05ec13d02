"""Waiting for what has no event of its own."""

from __future__ import annotations

from collections.abc import Callable

import trio

LOOK_S = 0.005
WAIT_S = 60.0
"""For what has to come: it bounds a test that fails, not one that passes beside other work of the machine."""


async def until(condition: Callable[[], object]) -> None:
    """Wait for a state that has no event; the test's own deadline bounds it."""
    while not condition():  # noqa: ASYNC110
        await trio.sleep(LOOK_S)
