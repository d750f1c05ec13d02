"""Inbox of the engine: its own inputs first, then what peers said, then the clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import trio

from shoal.node.training.trainer import TrainerEvent
from shoal.protocol.chain import Position
from shoal.protocol.errors import ConfigError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.inputs import (
    ChainCompared,
    GenesisFetched,
    Linked,
    Proven,
    Received,
    Reduced,
    SetPaused,
    StateHeld,
    StateSought,
    Tick,
)
from shoal.protocol.messages import Ready

TICK_S = 0.1
RESTING_TICK_S = 1.0
"""While nothing is due but what some input leads to. To wake up ten times a second costs more than all else then."""
NEIGHBOURS_BEGIN_S = 0.1
HEARD_LIMIT_MESSAGES = 4096
"""Beyond it the oldest is dropped: everything that matters is sent again."""


@dataclass(slots=True, eq=False)
class Turn:
    """Something to be done between two other inputs, by whose task chain and state are; who gave it waits for it."""

    do: Callable[[], Awaitable[Any]]
    result: Any = None
    error: ConfigError | RemoteError | None = None
    over: trio.Event = field(default_factory=trio.Event)

    async def take(self) -> None:
        """Do it. What else it raises is the engine's, which ends with it and with whoever waits."""
        try:
            self.result = await self.do()
        except (ConfigError, RemoteError) as error:
            self.error = error
        self.over.set()


async def in_turn(put: Callable[[Turn], None], do: Callable[[], Awaitable[Any]]) -> Any:
    """Have the engine behind `put` do it, and wait for that; what it came to. Raises its ConfigError, RemoteError.

    Cancellation: it may be done all the same.
    """
    turn = Turn(do)
    put(turn)
    await turn.over.wait()
    if turn.error is not None:
        raise turn.error
    return turn.result


Own = (
    TrainerEvent
    | Reduced
    | SetPaused
    | Linked
    | StateHeld
    | Proven
    | Turn
    | StateSought
    | ChainCompared
    | GenesisFetched
    | Tick
)
ToHandle = Received | Own


class Inbox:
    """Inputs in the order in which they are to be handled. Use from trio's thread."""

    def __init__(self) -> None:
        self._own: deque[Own] = deque()
        self._heard: deque[Received] = deque(maxlen=HEARD_LIMIT_MESSAGES)
        self._arrived = trio.Event()
        self._ticked_at = -math.inf

    def put(self, event: Own) -> None:
        """Something of this node's own happened; never dropped, for each comes once and is awaited."""
        self._own.append(event)
        self._arrived.set()

    def hear(self, heard: Received) -> None:
        """A peer said something."""
        self._heard.append(heard)
        self._arrived.set()

    @property
    def is_through(self) -> bool:
        """True if every input of this node's own, links that came up among them, was taken out."""
        return not self._own

    async def until_begun(self, position: Position, neighbours: frozenset[PeerId]) -> None:
        """Leave the processor to nodes of this machine that are still ending the round before `position`'s.

        Returns once all of them have announced themselves in this one, after NEIGHBOURS_BEGIN_S at the latest. Nothing
        is taken out.
        """
        with trio.move_on_after(NEIGHBOURS_BEGIN_S):
            while not neighbours <= self._announced(position):
                self._arrived = trio.Event()
                await self._arrived.wait()

    def _announced(self, position: Position) -> set[PeerId]:
        return {one.peer for one in self._heard if isinstance(one.message, Ready) and one.position == position}

    async def next(self, tick_s: float = TICK_S) -> ToHandle:
        """The next input; a Tick `tick_s` after the last one, however much else there is.

        Cancellation loses nothing.
        """
        await trio.lowlevel.checkpoint()
        tick_at = self._ticked_at + tick_s
        if not self._own and not self._heard and trio.current_time() < tick_at:
            self._arrived = trio.Event()
            with trio.move_on_at(tick_at):
                await self._arrived.wait()
        now = trio.current_time()
        if now >= tick_at or not (self._own or self._heard):
            self._ticked_at = now
            return Tick()
        return (self._own or self._heard).popleft()
