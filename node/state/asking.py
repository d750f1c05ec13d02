"""Asking one peer after the other without waiting for who is slow: the next one's turn comes so much later at most.

peer 1 ── asked ─────────── answers ──► patience for the rest, or none needed
peer 2         apart_s ── asked ───────────────── answers
peer 3                        apart_s ── asked ─ ✕ not waited for any more
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

import trio

from shoal.protocol.donors import HEDGE_S
from shoal.protocol.identity import PeerId


async def ask_in_turn(
    peers: Iterable[PeerId], ask: Callable[[PeerId], Awaitable[float | None]], *, apart_s: float = HEDGE_S
) -> None:
    """Call `ask` for one peer after the other, each when the one before has answered or `apart_s` passed.

    ask: returns for how many seconds from then on the others are still worth waiting for; None if that is open. It
    raises nothing for what a peer does or does not do.

    Cancellation: what is being asked is cancelled too.
    """
    async with trio.open_nursery() as nursery:
        scope = nursery.cancel_scope

        async def ask_one(peer: PeerId, answered: trio.Event) -> None:
            timeout_s = await ask(peer)
            if timeout_s is not None:
                scope.deadline = min(scope.deadline, trio.current_time() + timeout_s)
            answered.set()

        for peer in peers:
            if trio.current_time() >= scope.deadline:
                break
            answered = trio.Event()
            nursery.start_soon(ask_one, peer, answered)
            if apart_s > 0:
                with trio.move_on_after(apart_s):
                    await answered.wait()
