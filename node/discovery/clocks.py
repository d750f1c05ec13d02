"""Clocks of this machine and of linked peers, compared: an invite expires by the clock of whoever is asked.

    WallClock(at_s)  ─────►  WallClock(at_s)      over /shoal/clock/1; who does not know the protocol is left out

What a peer says is a claim, and all that comes of it is a line for the user.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection
from typing import Annotated, Final

import msgspec
import trio

from shoal.node.outcome import Notice, Progress
from shoal.protocol.backoff import Backoff
from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.invites import CLOCK_TOLERANCE_S
from shoal.protocol.messages import Message
from shoal.swarm.host import Host
from shoal.swarm.members import Change
from shoal.swarm.questions import answer, ask, hear
from shoal.swarm.streams import MessageStream

CLOCK_PROTOCOL: Final = "/shoal/clock/1"
CLOCK_LIMIT_BYTES: Final = 64
CLOCKS_LIMIT: Final = 5
"""Peers whose clocks are asked for."""
SETTLE_S, SETTLE_LIMIT_S = 2.0, 60.0
"""Links come in bunches; and where nobody answers they have more to do than that."""
PERIOD_S: Final = 3600.0
YEAR_2200_S: Final = 7_258_118_400

logger = logging.getLogger(__name__)


class WallClock(Message, frozen=True, kw_only=True):
    """Seconds since 1970 by the sender's clock."""

    at_s: Annotated[int, msgspec.Meta(ge=0, le=YEAR_2200_S)]


class Clocks:
    """Compares clocks with those who are linked, a service of the node. wall: this machine's, in seconds since 1970."""

    def __init__(
        self,
        host: Host,
        linked: Callable[[], Collection[PeerId]],
        on_progress: Callable[[Progress], None],
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._host, self._linked, self._on_progress, self._wall = host, linked, on_progress, wall
        self._ahead_s: dict[PeerId, float] = {}  # this machine's clock, of theirs
        self._told = False
        self._news = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve, and ask whoever is linked, until cancelled."""
        self._host.serve(CLOCK_PROTOCOL, self._serve, limit_bytes=CLOCK_LIMIT_BYTES)
        task_status.started()
        settle = Backoff(SETTLE_S, SETTLE_LIMIT_S)
        while True:
            with trio.move_on_after(PERIOD_S) as quiet:
                await self._news.wait()
                await trio.sleep(settle.pause_s)
            if quiet.cancelled_caught:
                self._ahead_s.clear()
            self._news = trio.Event()
            asked = [peer for peer in sorted(self._linked())[:CLOCKS_LIMIT] if peer not in self._ahead_s]
            for peer in asked:
                if len(self._ahead_s) < CLOCKS_LIMIT:
                    await self._ask(peer)
            settle.note(failed=bool(asked) and self._ahead_s.keys().isdisjoint(asked))
            self._compare()

    def heard(self, change: Change) -> None:
        """Take note of a change of a peer: one that is linked may be asked."""
        if change.kind == "linked" and len(self._ahead_s) < CLOCKS_LIMIT:
            self._news.set()

    async def _ask(self, peer: PeerId) -> None:
        asked = WallClock(at_s=self._now())
        try:
            told: WallClock = await ask(
                self._host, peer, CLOCK_PROTOCOL, asked, WallClock, limit_bytes=CLOCK_LIMIT_BYTES
            )
        except (NetworkError, RemoteError) as error:
            logger.debug("no clock: %s", error)
        else:
            self._ahead_s[peer] = self._wall() - told.at_s

    async def _serve(self, stream: MessageStream) -> None:
        if stream.peer not in self._linked():
            raise RemoteError("asks for the time without having been admitted", peer=stream.peer)
        await hear(stream, WallClock, limit_bytes=CLOCK_LIMIT_BYTES)
        await answer(stream, WallClock(at_s=self._now()))

    def _now(self) -> int:
        return min(max(int(self._wall()), 0), YEAR_2200_S)

    def _compare(self) -> None:
        """Tell the user, once, where more than half of the others' clocks are far from this one."""
        apart = sorted(self._ahead_s.values(), key=abs)
        ahead_s = apart[(len(apart) - 1) // 2] if apart else 0.0
        is_apart = abs(ahead_s) > CLOCK_TOLERANCE_S
        if is_apart and not self._told:
            self._on_progress(Notice(text=apart_text(ahead_s, len(apart))))
        self._told = is_apart


def apart_text(ahead_s: float, peers: int) -> str:
    """Warning for the user of a clock that is so far ahead of those of so many peers, or behind."""
    minutes = math.floor(abs(ahead_s) / 60)
    how_far = f"{minutes / 60:,.0f} hours" if minutes >= 120 else f"{minutes} minutes"
    whose = "the one member's that was asked" if peers == 1 else f"those of most of {peers} members"
    return (
        f"this machine's clock is {how_far} {'ahead of' if ahead_s > 0 else 'behind'} {whose}: invites expire by it, "
        "too early or too late; set the one that is wrong, for example with `timedatectl set-ntp true`"
    )
