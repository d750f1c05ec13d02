"""Saves the newest state to disk beside the rounds.

A state takes longer to write than a round may take, and can be computed again: from an older one and the finals since.
So there is one write at a time and then a rest, so that saving takes a tenth of the disk's time and not all of it. The
next write begins with the next state: that is held for a round anyway, and the disk is done with it while everyone
trains, where an older one would keep memory of its own and be in the way of the finals. (It does where a write takes
longer than a round: then there are four states, and not three, until it ends.) If no state comes for as long again, the
newest there is is saved. A state that cannot be computed again from what is on disk is saved at once.
"""

from __future__ import annotations

from functools import partial

import trio

from shoal.collectives.state import HeldState
from shoal.node.state.states import StateCache

REST = 9
"""Times as long as it wrote does the saver rest, and once more if no state comes meanwhile."""
LAG_LIMIT_ROUNDS = 32
"""So many rounds at most are newer than the state on disk; at half of that there is no more rest."""


class StateSaver:
    """Owns the writing of states; `run` is the daemon's."""

    def __init__(self, cache: StateCache) -> None:
        self._cache = cache
        self._writing = trio.Lock()
        self._newest: HeldState | None = None
        self._came_at = float("-inf")
        self._saved_round = 0
        self._changed = trio.Event()

    @property
    def lag_rounds(self) -> int:
        """Number of rounds by which the state on disk is behind."""
        return 0 if self._newest is None else self._newest.round - self._saved_round

    def begin(self, saved_round: int) -> None:
        """The state of this round is on disk from an earlier run."""
        self._saved_round = saved_round

    async def save_now(self, state: HeldState) -> None:
        """Return when `state` is on disk. Raises StorageError."""
        async with self._writing:
            await trio.to_thread.run_sync(partial(self._cache.save_state, state, good=self._saved_round))
            self._saved_round = state.round
            if self._newest is not None and self._newest.round <= state.round:
                self._newest = None
        self._tell()

    async def go_back(self, round: int) -> None:
        """States after `round` were abandoned: none is saved any more, and those on disk are removed.

        Raises StorageError.
        """
        async with self._writing:
            if self._newest is not None and self._newest.round > round:
                self._newest = None
            self._saved_round = min(self._saved_round, round)
            await trio.to_thread.run_sync(self._cache.go_back, round)
        self._tell()

    async def save_unless_newer(self, state: HeldState) -> None:
        """Return when `state`, or one of a later round, is on disk. Raises StorageError."""
        if state.round > self._saved_round:
            await self.save_now(state)

    async def save_soon(self, state: HeldState) -> None:
        """Have `state` saved, unless a newer one is before its turn. Waits only while the disk is far behind.

        Cancellation: `state` is saved all the same.
        """
        self._newest, self._came_at = state, trio.current_time()
        self._tell()
        if not self._writing.locked():  # else room was made
            async with self._writing:
                await trio.to_thread.run_sync(self._cache.make_room, self._saved_round)
        while self.lag_rounds > LAG_LIMIT_ROUNDS:
            await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def run(self) -> None:
        """Save until cancelled. Raises StorageError.

        Cancellation: first the newest state is saved.
        """
        rest_ends, rest_s = float("-inf"), 0.0
        try:
            while True:
                rest_s = REST * await self._save_next(rest_ends, rest_s)
                rest_ends = trio.current_time() + rest_s
        except trio.Cancelled:
            with trio.CancelScope(shield=True):
                if self._newest is not None:
                    await self.save_now(self._newest)
            raise

    async def _save_next(self, rest_ends: float, rest_s: float) -> float:
        """Save what is due next, and hold on to it no longer; the seconds that it took to write."""
        state = await self._next_due(rest_ends, rest_s)
        began = trio.current_time()
        await self.save_now(state)
        return trio.current_time() - began

    async def _next_due(self, rest_ends: float, rest_s: float) -> HeldState:
        """The state to save next, once it is time: after a rest of `rest_s` that ends at `rest_ends`."""
        while True:
            state = self._newest
            wait_until = rest_ends + (0 if self._came_at >= rest_ends else rest_s)
            far_behind = self.lag_rounds >= LAG_LIMIT_ROUNDS // 2
            if state is not None and (far_behind or trio.current_time() >= wait_until):
                return state
            with trio.move_on_at(float("inf") if state is None else wait_until):
                await self._changed.wait()
