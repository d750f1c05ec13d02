"""One direction of an emulated line, in time that its caller makes.

    queue, drained at the rate ──► some packets lost ──► delay, which wanders by the jitter ──► in order, the other end

The rate is that of Ethernet frames, headers and all, as the interface of a router counts it. The jitter is a new
difference from the delay every JITTER_PERIOD_S, as queues elsewhere grow and shrink; no frame overtakes another.
"""

from __future__ import annotations

import math
import random
from collections import deque
from typing import Final

from shoal.testnet.links.wan_frames import ALONE, HEADER_BYTES, burst, cut

QUEUE_S: Final = 0.2
QUEUE_LEAST_BYTES: Final = 64 << 10
"""Bytes that may wait for a link at least: more is dropped, as at a router."""
JITTER_PERIOD_S: Final = 0.02


class Link:
    """One direction: what is sent comes out later, at the rate, or never.

    rate_bytes_per_s: of the narrowest place. delay_s: of the way beyond it. jitter_s: by how much that differs at most,
    either way. loss: the share of packets that is lost there. Frames are those of `wan_frames`.
    """

    def __init__(
        self, *, rate_bytes_per_s: float, delay_s: float, loss: float, draw: random.Random, jitter_s: float = 0.0
    ) -> None:
        self._rate = rate_bytes_per_s
        self._delay_s = delay_s
        self._jitter_s = min(jitter_s, delay_s)
        self._loss = loss
        self._draw = draw
        self._queue_limit_s = max(QUEUE_S, QUEUE_LEAST_BYTES / rate_bytes_per_s)
        self._free_at = 0.0
        self._last_at = 0.0
        self._redraw_at = 0.0
        self._delay_now_s = delay_s
        self._under_way: deque[tuple[float, bytes]] = deque()
        self._until_loss = self._draw_loss()  # packets, up to and with the next that is lost

    def send(self, frame: bytes, now: float) -> bool:
        """Take a frame; False if it is dropped for want of room, with all that it stands for."""
        starts_at = max(now, self._free_at)
        if starts_at - now > self._queue_limit_s:
            return False
        packets, size = (1, len(frame) - HEADER_BYTES) if frame[1] == ALONE else burst(frame)
        self._free_at = starts_at + size / self._rate
        if self._jitter_s and self._free_at >= self._redraw_at:
            self._redraw_at = self._free_at + JITTER_PERIOD_S
            self._delay_now_s = self._delay_s + self._draw.uniform(-self._jitter_s, self._jitter_s)
        self._last_at = max(self._last_at, self._free_at + self._delay_now_s)
        if packets < self._until_loss:
            self._until_loss -= packets
            self._under_way.append((self._last_at, frame))
        else:  # what is lost took its time on the link all the same
            self._under_way.extend((self._last_at, rest) for rest in self._lose(frame, packets))
        return True

    def _lose(self, frame: bytes, packets: int) -> list[bytes]:
        """Lose packets of a frame, and return what is left of it."""
        rest, first = [], 0
        while self._until_loss <= packets - first:
            lost = first + int(self._until_loss) - 1
            if lost > first:
                rest.append(cut(frame, first, lost))
            first, self._until_loss = lost + 1, self._draw_loss()
        self._until_loss -= packets - first
        if first < packets:
            rest.append(cut(frame, first, packets))
        return rest

    def _draw_loss(self) -> float:
        """Draw the number of packets up to and with the next that is lost: as if a die were thrown for each."""
        if not self._loss:
            return math.inf
        return 1 + math.floor(math.log(1.0 - self._draw.random()) / math.log1p(-self._loss))

    def arrived(self, now: float) -> list[bytes]:
        """The frames that are at the other end by now, in order; each once."""
        frames = []
        while self._under_way and self._under_way[0][0] <= now:
            frames.append(self._under_way.popleft()[1])
        return frames

    def next_at(self) -> float | None:
        """Time at which the next frame arrives; None if none is under way."""
        return self._under_way[0][0] if self._under_way else None
