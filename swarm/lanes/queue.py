"""Frames that wait for a lane to one peer: in order within a scope, shared fairly between scopes; and who takes them.

All lanes to a peer take from one queue, so a lane that comes up in the middle of a long queue helps with it, and a lane
that goes leaves it to the others. A lane takes of a frame as much as it can carry, and the rest comes next. A scope is
a reduction or a state: whatever each has queued, they are served in turn, FRAME_LIMIT_BYTES at a time, and one cannot
use up another's room, unless a peer has FULL_SCOPES of them wait.

What a peer asked for is looked up when its turn comes (`Later`): however long the peer takes, nothing is kept for it.

Each takes when it has room. That is as fast as can be while the queue is long. At its end a lane whose window is still
small, or has just collapsed, would take a frame that another is through with long before, and everybody waits for it.
So a lane takes a frame only if it is likely to be through with it before the others have emptied the queue and the best
of them has sent one frame more; else it leaves it to them. Who is much longer at a frame than it should be does not
count: what looked best may be stuck.

Source: Shreedhar, Varghese, Efficient Fair Queuing using Deficit Round Robin (SIGCOMM 1995).
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from msgspec.structs import replace

from shoal.protocol.errors import NetworkError
from shoal.protocol.limits import TokenBucket
from shoal.swarm.lanes.frame import FRAME_LIMIT_BYTES, FrameHeader, FrameKind
from shoal.swarm.lanes.seal import SEAL_OVERHEAD_BYTES
from shoal.swarm.lanes.socket import Path

# Of one scope. What waits is referred to, not copied: these bound the headers, and what this node's own frames pin.
QUEUE_LIMIT_FRAMES = 32 * 1024  # frames of one scope waiting for a peer
QUEUE_LIMIT_BYTES = 16 << 30  # the same in bytes, by reference
SCOPE_LIMIT = 64  # scopes waiting for a peer
FULL_SCOPES = 4  # so many scopes' frames at most wait in all: who asks and takes nothing has 40 MB of headers kept
TURN_BYTES = FRAME_LIMIT_BYTES + SEAL_OVERHEAD_BYTES
EMPTY_FRAMES_PER_S, EMPTY_FRAMES_BURST = 2000.0, 16 * 1024.0
"""Of one peer, that carry nothing: a request for each chunk there can be, at once."""
CHUNKS_PER_EMPTY_FRAME = 4.0
"""So many chunks that are asked for together count as one: to answer each takes 20 us, also where it is refused."""
OVERDUE = 4.0
"""So many times as long as expected, and a lane is taken to be stuck; OVERDUE_LEAST_S at least."""
OVERDUE_LEAST_S = 1.0

Frame = tuple[FrameHeader, memoryview]
Later = Callable[[FrameHeader], Frame]
"""Gives a frame when it is its turn, by its header; or one without payload in its place. Called under the queue's lock,
in lanes' threads. Raises nothing: the lane and what it had taken with this frame would be gone."""


def due(header: FrameHeader, payload: memoryview | bytes | Later) -> Frame:
    """The frame that goes out, now that it is its turn."""
    return payload(header) if callable(payload) else (header, memoryview(payload))


class Lineup:
    """The lanes that take from one queue. Whoever uses it holds the queue's lock."""

    def __init__(self) -> None:
        self._paths: dict[Hashable, Path] = {}
        self._sending: dict[Hashable, float] = {}  # until when it is not overdue

    def takes(self, lane: Hashable, path: Path, now: float, *, size: int, waiting: int) -> bool:
        """Return True if `lane` takes the next frame of `size` bytes, of `waiting` not yet given to any kernel.

        Who takes it is sending until it `rests`.
        """
        self._paths[lane] = path
        if self._leaves(lane, size, waiting, now):
            return False
        self._sending[lane] = now + max(OVERDUE_LEAST_S, OVERDUE * path.seconds(size))
        return True

    def someone_else_would(self, lane: Hashable, now: float, *, size: int, waiting: int) -> bool:
        """True if a lane that rests would take the frame that `lane` leaves, and so has to be woken."""
        resting = self._paths.keys() - self._sending.keys() - {lane}
        return any(not self._leaves(other, size, waiting, now) for other in resting)

    def rests(self, lane: Hashable) -> None:
        """`lane` has given to its kernel what it had taken."""
        self._sending.pop(lane, None)

    def goes(self, lane: Hashable) -> None:
        """`lane` takes nothing any more."""
        self.rests(lane)
        self._paths.pop(lane, None)

    def _leaves(self, lane: Hashable, size: int, waiting: int, now: float) -> bool:
        others = [
            path for other, path in self._paths.items() if other != lane and now <= self._sending.get(other, math.inf)
        ]
        if not others:
            return False
        bytes_per_s = sum(path.bytes_per_s for path in others)
        best_s = min(path.seconds(size) for path in others)
        return self._paths[lane].seconds(size) > best_s + waiting / bytes_per_s


@dataclass(slots=True, eq=False)
class _Scope:
    """Frames of one scope that wait, and bytes that are left of its turn."""

    frames: deque[tuple[FrameHeader, memoryview | Later]] = field(default_factory=deque)
    waiting_bytes: int = 0
    credit: int = 0


class FrameQueue:
    """The queue of one peer. `changed` guards it and the state of the lanes that take from it: hold it for everything.

    observe: called by the lanes' threads, without holding `changed`, whenever they take frames. Must be quick.
    """

    def __init__(
        self,
        *,
        limit_frames: int = QUEUE_LIMIT_FRAMES,
        limit_bytes: int = QUEUE_LIMIT_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.changed = threading.Condition()
        self.observe: Callable[[], None] = _ignore
        self.lanes = 0  # whose threads run
        self.open_lanes = 0  # of those, the ones that will go on taking frames
        self.queued_bytes = 0  # of payload, posted and not yet given to the kernel
        self.busy_since: float | None = None  # since when there always was something queued
        self.lineup = Lineup()
        self.empty_frames = TokenBucket(EMPTY_FRAMES_PER_S, EMPTY_FRAMES_BURST)  # that came
        self._limit_frames = limit_frames
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._scopes: dict[bytes, _Scope] = {}
        self._turns: deque[bytes] = deque()
        self._waiting_frames = 0  # of all scopes

    @property
    def waits(self) -> bool:
        """True if there is a frame to take."""
        return bool(self._turns)

    @property
    def next_bytes(self) -> int:
        """About how large the next frame is, on the wire; something must wait."""
        return min(self._scopes[self._turns[0]].frames[0][0].length, FRAME_LIMIT_BYTES) + SEAL_OVERHEAD_BYTES

    def waiting(self, scope: bytes) -> frozenset[tuple[FrameKind, int]]:
        """Kind and chunk of what this node itself sends in `scope` and no lane has taken any of yet."""
        waiting = self._scopes.get(scope)
        frames = () if waiting is None else waiting.frames
        return frozenset((header.kind, header.chunk) for header, _ in frames if not header.offset and not header.flags)

    def put(self, header: FrameHeader, payload: memoryview | Later) -> None:
        """Queue a frame and wake one lane. Raises NetworkError if its scope, or all of them, have no room."""
        if self._waiting_frames >= FULL_SCOPES * self._limit_frames:
            raise NetworkError(f"{self._waiting_frames} frames are queued already")
        scope = self._scopes.get(header.scope)
        if scope is None:
            if len(self._scopes) >= SCOPE_LIMIT:
                raise NetworkError(f"{SCOPE_LIMIT} scopes have frames queued already")
            scope = self._scopes[header.scope] = _Scope()
            self._turns.append(header.scope)
        elif len(scope.frames) >= self._limit_frames or scope.waiting_bytes + header.length > self._limit_bytes:
            raise NetworkError(f"{len(scope.frames)} frames of one scope are queued already")
        scope.frames.append((header, payload))
        self._waiting_frames += 1
        scope.waiting_bytes += header.length
        self.queued_bytes += header.length
        if self.busy_since is None:
            self.busy_since = self._clock()
        self.changed.notify()

    def take(self, limit_bytes: int, frame_bytes: int = FRAME_LIMIT_BYTES) -> list[Frame]:
        """The frames to send next: one, and more as long as all fit in `limit_bytes` on the wire; [] if none waits.

        None has more than `frame_bytes` of payload: of a larger one the first part is taken. They stay among
        `queued_bytes` until `done`.
        """
        taken: list[Frame] = []
        size = 0
        while self._turns:
            scope = self._scopes[self._turns[0]]
            cost = min(scope.frames[0][0].length, frame_bytes) + SEAL_OVERHEAD_BYTES
            if taken and size + cost > limit_bytes:
                break
            if scope.credit < cost:
                scope.credit += TURN_BYTES
                if len(self._turns) > 1:
                    self._turns.rotate(-1)
                continue
            taken.append(self._pop(scope, frame_bytes))
            size += cost
        return taken

    def _pop(self, scope: _Scope, frame_bytes: int) -> Frame:
        header, payload = scope.frames.popleft()
        if header.length > frame_bytes:
            rest = replace(header, length=header.length - frame_bytes, offset=header.offset + frame_bytes)
            header = replace(header, length=frame_bytes)
            scope.frames.appendleft((rest, payload if callable(payload) else payload[frame_bytes:]))
            payload = payload if callable(payload) else payload[:frame_bytes]
        else:
            self._waiting_frames -= 1
        scope.credit -= header.length + SEAL_OVERHEAD_BYTES
        scope.waiting_bytes -= header.length
        if not scope.frames:
            del self._scopes[self._turns.popleft()]
        frame = due(header, payload)
        self.queued_bytes -= header.length - frame[0].length
        return frame

    def done(self, size: int) -> None:
        """A lane has let go of `size` bytes of payload that it had taken."""
        self.queued_bytes -= size
        if self.queued_bytes == 0 and not self.waits:
            self.busy_since = None

    def clear(self) -> None:
        """Forget what waits."""
        self.queued_bytes -= sum(scope.waiting_bytes for scope in self._scopes.values())
        self._scopes.clear()
        self._turns.clear()
        self._waiting_frames = 0
        self.busy_since = None


def _ignore() -> None:
    return
