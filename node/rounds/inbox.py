"""Inbox of the engine: its own inputs first, then what peers said, then the clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import trio

from shoal.node.training.trainer import TrainerEvent
from shoal.protocol.chain import Position
from shoal.protocol.early import EARLY_PEER_LIMIT_BYTES, EarlyMessages
from shoal.protocol.errors import ConfigError, RemoteError, StorageError
from shoal.protocol.identity import PeerId
from shoal.protocol.inputs import (
    ChainCompared,
    GenesisFetched,
    HandedOver,
    Linked,
    Offered,
    Proven,
    Received,
    Reduced,
    SetPaused,
    StateHeld,
    StateSought,
    Tick,
)
from shoal.protocol.messages import Ready
from shoal.protocol.timeouts import RESTING_TICK_S, next_beat

Result = TypeVar("Result")

TICK_S = 0.1
NEIGHBOURS_BEGIN_S = 0.1
HEARD_PEER_LIMIT_MESSAGES, HEARD_LIMIT_MESSAGES = 512, 16384
HEARD_PEER_LIMIT_BYTES, HEARD_LIMIT_BYTES = EARLY_PEER_LIMIT_BYTES, 256 << 20
"""Of one peer, and of all: as many peers as there may be links each have what EarlyMessages keeps of one for a round.
Beyond that the oldest is dropped, of who has most: everything that matters is sent again."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """Something to be done between two other inputs, by whose task chain and state are. What it raises ends that."""

    take: Callable[[], Awaitable[None]]


async def in_turn(put: Callable[[Turn], None], do: Callable[[], Awaitable[Result]]) -> Result:
    """Have the engine behind `put` do it, and wait for that; what it came to. Raises its ConfigError, RemoteError.

    What else it raises is the engine's, which ends with it and with who waits here; so is a StorageError, for what is
    remembered may be further on than what is on disk.
    Cancellation: it may be done all the same.
    """
    results: list[Result] = []
    errors: list[ConfigError | RemoteError] = []
    over = trio.Event()

    async def take() -> None:
        try:
            results.append(await do())
        except StorageError:
            raise
        except (ConfigError, RemoteError) as error:
            errors.append(error)
        over.set()

    put(Turn(take))
    await over.wait()
    if errors:
        raise errors[0]
    return results[0]


Own = (
    TrainerEvent
    | Reduced
    | Offered
    | HandedOver
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
        self._heard = EarlyMessages(
            peer_messages=HEARD_PEER_LIMIT_MESSAGES,
            peer_bytes=HEARD_PEER_LIMIT_BYTES,
            all_messages=HEARD_LIMIT_MESSAGES,
            all_bytes=HEARD_LIMIT_BYTES,
        )
        self._arrived = trio.Event()
        self._ticked_at = -RESTING_TICK_S  # before any clock began

    def put(self, event: Own) -> None:
        """Something of this node's own happened; never dropped, for each comes once and is awaited."""
        self._own.append(event)
        self._arrived.set()

    def hear(self, heard: Received) -> None:
        """A peer said something."""
        self._heard.keep(heard)
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
        """The next input; a Tick `tick_s` after the last one, however much else there is, or at the next beat.

        Cancellation loses nothing.
        """
        tick_at = self._ticked_at + tick_s if tick_s < RESTING_TICK_S else next_beat(self._ticked_at)
        if not self._own and not self._heard and trio.current_time() < tick_at:
            self._arrived = trio.Event()
            with trio.move_on_at(tick_at):
                await self._arrived.wait()
        else:
            await trio.lowlevel.checkpoint()
        now = trio.current_time()
        if now >= tick_at or not (self._own or self._heard):
            self._ticked_at = now
            return Tick()
        return self._own.popleft() if self._own else self._heard.next()
