"""Waiting for what has no event of its own, and running what a test needs for as long as it does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

import trio

LOOK_S = 0.005
WAIT_S = 60.0
"""For what has to come: it bounds a test that fails, not one that passes beside other work of the machine."""


async def until(condition: Callable[[], object]) -> None:
    """Wait for a state that has no event; the test's own deadline bounds it."""
    while not condition():  # noqa: ASYNC110
        await trio.sleep(LOOK_S)


class Runs(Protocol):
    """What is started, and runs until it is cancelled."""

    async def run(self, *, task_status: Any = ...) -> None: ...


@asynccontextmanager
async def running(*parts: Runs) -> AsyncIterator[trio.Nursery]:
    """Start these, one after the other, and end them with the block."""
    async with trio.open_nursery() as nursery:
        for part in parts:
            await nursery.start(part.run)
        yield nursery
        nursery.cancel_scope.cancel()
