"""Limits on one node's lanes: bytes per second, how many there are, what waits, and for how long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.protocol.errors import ConfigError
from shoal.protocol.limits import TokenBucket
from shoal.swarm.lanes.frame import FRAME_LIMIT_BYTES
from shoal.swarm.lanes.queue import QUEUE_LIMIT_BYTES, QUEUE_LIMIT_FRAMES, FrameQueue
from shoal.swarm.lanes.seal import LANES_PER_PEER_LIMIT

STALL_DEADLINE_S = 30.0  # without progress inside a frame, or until a slot of shared memory is free

RATE_LIMIT_MIN_BYTES_PER_S = 64 * 1024
RATE_SAVED_S = 0.05
RATE_OWED_S = 0.05
PIECE_S = 0.005  # every lane may be one piece ahead of its budget
PIECE_MIN_BYTES = 4 * 1024
PIECE_LIMIT_BYTES = 512 * 1024


class RateLimit:
    """A cap in bytes per second, shared by the threads of all lanes it is given to. It may be changed at any time.

    In any time t, n lanes move at most (t + RATE_SAVED_S + RATE_OWED_S) times the rate, and n pieces. A rest saves up
    RATE_SAVED_S of it. As much as RATE_OWED_S is moved in advance before anybody waits, and then for all of it: to
    sleep after every piece costs three times the processor time for the same bytes.
    """

    def __init__(self, bytes_per_s: int | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.change(bytes_per_s)

    def change(self, bytes_per_s: int | None) -> None:
        """Cap what is moved from now on; None is no cap. Raises ConfigError, and changes nothing, if it is too low."""
        if bytes_per_s is not None and bytes_per_s < RATE_LIMIT_MIN_BYTES_PER_S:
            raise ConfigError(
                f"a rate limit of {bytes_per_s} bytes/s is too low; give at least {RATE_LIMIT_MIN_BYTES_PER_S}"
            )
        bucket = None
        if bytes_per_s is not None:
            now, saved = self._clock(), bytes_per_s * RATE_SAVED_S
            bucket = TokenBucket(bytes_per_s, saved, now)
            bucket.owe(saved, now)  # nothing is saved up at first
        with self._lock:
            self._bucket, self.bytes_per_s = bucket, bytes_per_s

    def piece(self, view: memoryview) -> memoryview:
        """The bytes at the beginning of `view` to move at a time."""
        if self.bytes_per_s is None:
            return view
        return view[: min(max(int(self.bytes_per_s * PIECE_S), PIECE_MIN_BYTES), PIECE_LIMIT_BYTES)]

    def reserve(self, size: int) -> float:
        """Take `size` bytes from the budget; returns how many seconds to wait before taking more."""
        with self._lock:
            owed_s = 0.0 if self._bucket is None else self._bucket.owe(size, self._clock())
            return owed_s if owed_s > RATE_OWED_S else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneLimits:
    """Limits on one node's lanes. Raises ConfigError if a value makes no sense.

    lanes_per_peer: to begin with. lanes_per_peer_limit: what measurement may make of it. queue_frames, queue_bytes:
    waiting for one peer, of one scope. shares: large frames to a node of this machine go through memory that both see,
    where no cap is in their way.
    """

    lanes_per_peer: int = 1
    lanes_per_peer_limit: int = LANES_PER_PEER_LIMIT
    queue_frames: int = QUEUE_LIMIT_FRAMES
    queue_bytes: int = QUEUE_LIMIT_BYTES
    stall_s: float = STALL_DEADLINE_S
    upload: RateLimit = field(default_factory=RateLimit)
    download: RateLimit = field(default_factory=RateLimit)
    shares: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.lanes_per_peer <= self.lanes_per_peer_limit <= LANES_PER_PEER_LIMIT:
            raise ConfigError(
                f"lanes per peer must be 1 to {LANES_PER_PEER_LIMIT}, "
                f"not {self.lanes_per_peer} to {self.lanes_per_peer_limit}"
            )
        if self.queue_frames < 1 or self.queue_bytes < FRAME_LIMIT_BYTES or self.stall_s <= 0:
            raise ConfigError("a lane must have room for one frame and some time to send it")

    @property
    def capped(self) -> bool:
        """True if there is a cap in either direction now."""
        return not self.upload.bytes_per_s is self.download.bytes_per_s is None

    def queue(self) -> FrameQueue:
        """A new queue within these limits."""
        return FrameQueue(limit_frames=self.queue_frames, limit_bytes=self.queue_bytes)
