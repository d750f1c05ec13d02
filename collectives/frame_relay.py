"""Frames that a relay passes on between two others: how many it holds, and how many are sent to it at a time.

    S ── frames for T, up to a window beyond what R has let go ──► R ── its queue to T ──► T
    S ── how much is that by now? ──► R                            `shoal.node.rounds.relay_room`

What goes beyond the window stays with S, which has these payloads in memory anyway. So a slow T fills nobody's memory;
the lanes from S to R stay free for what R itself is sent; and nobody is blamed for the pace of T. The window is what a
fast link moves from one answer to the next. Where all ways through one relay together would be more than it holds, each
gets its share, which follows from the plan.

From who does not keep to its window R reads nothing more until there is room, for a while; then it drops frames, as if
it could not pass them on.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from shoal.protocol.identity import PeerId
from shoal.swarm.lanes.frame import FRAME_LIMIT_BYTES, FrameHeader

WINDOW_LIMIT_BYTES = 16 << 20
"""1 Gbit/s for 0.13 s: a round trip, and the time until S asks again."""
HELD_LIMIT_BYTES = 256 << 20
"""All that one relay holds for others; twice what their windows let through, as a lane that fails can hide what is left
of one window."""
PASS_WAIT_S = 5.0
"""So long a relay reads nothing from who sends more than it may."""

Tag = TypeVar("Tag")
Way = tuple[PeerId, PeerId]
"""From whom to whom."""


def window_bytes(ways: int) -> int:
    """How much one of so many ways through one relay may have there."""
    return max(FRAME_LIMIT_BYTES, min(WINDOW_LIMIT_BYTES, HELD_LIMIT_BYTES // (2 * max(1, ways))))


class Holding:
    """The memory of the frames that one node passes on, in one reduction after another. From any thread.

    A frame is held until nobody refers to its memory any more, whoever did so last: a queue, or a lane.
    """

    def __init__(self, limit_bytes: int = HELD_LIMIT_BYTES) -> None:
        self.held_bytes = 0
        self._limit_bytes = limit_bytes
        self._changed = threading.Condition()  # nothing else is locked while this is held: memory ends anywhere
        self._held: Counter[Way] = Counter()
        self._let_go: Counter[Way] = Counter()

    def begin(self) -> None:
        """Another reduction is under way, or none: count anew what is let go. Who waits for room waits no more."""
        with self._changed:
            self._let_go = Counter()
            self._changed.notify_all()

    def let_go(self, way: Way) -> int:
        """Bytes that came this way in the reduction under way and are not held any more, sent or dropped."""
        with self._changed:
            return self._let_go[way]

    def held(self, way: Way) -> int:
        """Bytes that came this way and are held still."""
        with self._changed:
            return self._held[way]

    def take(self, way: Way, size: int, *, window: int, timeout_s: float = PASS_WAIT_S) -> memoryview | None:
        """Memory for one frame, (size,) uint8; None if there was no room for it in time. Blocks.

        window: of this way; twice as much has room.
        """
        with self._changed:
            let_go = self._let_go

            def is_decided() -> bool:
                fits = self._held[way] + size <= 2 * window and self.held_bytes + size <= self._limit_bytes
                return fits or let_go is not self._let_go

            if not self._changed.wait_for(is_decided, timeout=timeout_s) or let_go is not self._let_go:
                let_go[way] += size
                return None
            memory = np.empty(size, np.uint8)
            self._held[way] += size
            self.held_bytes += size
        weakref.finalize(memory, self._give_back, let_go, way, size).atexit = False
        return memory.data

    def _give_back(self, let_go: Counter[Way], way: Way, size: int) -> None:
        with self._changed:
            self.held_bytes -= size
            self._held[way] -= size
            if not self._held[way]:
                del self._held[way]
            let_go[way] += size
            self._changed.notify_all()


@dataclass(slots=True)
class Window(Generic[Tag]):
    """What one node sends to one other through a relay. No lock of its own.

    limit_bytes: at the relay, or on the way to it. waiting: frames that are kept back, each with a tag.
    """

    limit_bytes: int
    waiting: deque[tuple[FrameHeader, memoryview, Tag]] = field(default_factory=deque)
    _on_way_bytes: int = 0
    _let_go_bytes: int = 0

    def next(self) -> tuple[FrameHeader, memoryview, Tag] | None:
        """The frame to send now, if there is one and it may be sent; it counts as sent."""
        if not self.waiting:
            return None
        size = self.waiting[0][0].length
        if self._on_way_bytes and self._on_way_bytes + size > self.limit_bytes:
            return None
        self._on_way_bytes += size
        return self.waiting.popleft()

    def hear(self, let_go_bytes: int | None) -> None:
        """The relay has let go of so much since the reduction began there; None: it does not say, so as of all."""
        if let_go_bytes is None:
            self._on_way_bytes = 0
            return
        self._on_way_bytes = max(0, self._on_way_bytes - max(0, let_go_bytes - self._let_go_bytes))
        self._let_go_bytes = let_go_bytes

    def clear(self) -> list[Tag]:
        """Forget what waits, and what is on its way: it may be lost. The tags of what waited."""
        tags = [tag for _, _, tag in self.waiting]
        self.waiting.clear()
        self._on_way_bytes = 0
        return tags
