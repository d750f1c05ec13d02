"""Frames that a relay passes on between two others: how many it holds, how many are sent to it at a time, and what it
can say of the ways that lead through it.

    S ── frames for T, up to a window beyond what R has let go ──► R ── its queue to T ──► T
    S ── how much is that by now? ──► R                            `shoal.node.rounds.relay_room`

What goes beyond the window stays with S, which has these payloads in memory anyway. So a slow T fills nobody's memory;
the lanes from S to R stay free for what R itself is sent; and nobody is blamed for the pace of T. The window is what a
fast link moves from one answer to the next. Where all ways through one relay together would be more than it holds, each
gets its share, which follows from the plan.

From who does not keep to its window R reads nothing more until there is room, for a while; then it drops frames, as if
it could not pass them on.

What it can say: how much of what the one owes the other came in, and was taken.

    S ── frames for T ──► R: on the grid of frames? ─ counted ─ passed on ──► T
                          R: what S owes T by the plan, less what came           `RelayWatch`: too little, for too long?

Frames come in the order and the sizes in which payloads are cut, or they are not passed on: else a sender could send
everything and yet have it refused. Contributions prove themselves at who gets them, and one that is wrong stalls
nobody. A final is compared with the relay's own, since one that is wrong is waited for anew; so a relay says nothing of
finals that it lacks itself. Of what a lane may have lost on the way to T nobody can say that it arrived.

Source: docs/reduce.md, Repair.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from blake3 import blake3

from shoal.collectives.finals import FinalFormat
from shoal.collectives.reduce import Reduction
from shoal.collectives.stalls import StallWatch
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import RelayedWay
from shoal.swarm.lanes.frame import FRAME_LIMIT_BYTES, FrameHeader, FrameKind

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
    """Bytes that one of so many ways through one relay may have there."""
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
        """Count anew what is let go, as another reduction is under way, or none. Who waits for room waits no more."""
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
    """Frames that one node sends to one other through a relay. No lock of its own.

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


Slot = tuple[FrameKind, int]
"""Kind and chunk that a frame is part of."""


@dataclass(slots=True)
class _Passed:
    """Frames that came one way.

    slots: by kind and chunk, a bit for each of its frames. hashes: of the frames of finals.
    """

    came_bytes: int = 0
    slots: dict[Slot, int] = field(default_factory=dict)
    hashes: dict[tuple[int, int], bytes] = field(default_factory=dict)
    wrong: bool = False
    lost: bool = False


class RelayAccount:
    """Record of what one relay passed on under one plan, by way. From any thread.

    before: the same under the revision before, if there is one; what came a way then need not come again.
    """

    def __init__(self, final_format: FinalFormat, ways: Iterable[Way], before: RelayAccount | None = None) -> None:
        self.final_format = final_format
        self._lock: threading.Lock = threading.Lock() if before is None else before._lock
        known: dict[Way, _Passed] = {} if before is None else before._passed
        self._passed: dict[Way, _Passed] = {way: known[way] if way in known else _Passed() for way in ways}
        plan = final_format.plan
        standing = {chunk for results in plan.standing for chunk in results.by_chunk()}
        self._copied = frozenset(final_format.source(chunk) for chunk in standing)
        self._owned: dict[PeerId, set[int]] = {}
        for chunk in range(final_format.chunks):
            if chunk not in standing:
                self._owned.setdefault(final_format.owner(chunk), set()).add(chunk)
        self._contributors = {plan.participants[place].peer for place in plan.contributors()}

    @property
    def ways(self) -> tuple[Way, ...]:
        """All ways that the plan leads through this node."""
        return tuple(self._passed)

    def check(self, sender: PeerId, header: FrameHeader) -> None:
        """Raise RemoteError unless the frame is one of those into which a payload of the plan is cut."""
        if 0 <= header.chunk < self.final_format.chunks:
            size, offset = self._size(header.kind, header.chunk), header.offset
            if offset % FRAME_LIMIT_BYTES == 0 and 0 < header.length == min(FRAME_LIMIT_BYTES, size - offset):
                return
        raise RemoteError("a frame to pass on that no payload is cut into", peer=sender)

    def count(self, way: Way, header: FrameHeader, payload: memoryview) -> None:
        """An authentic frame that `check` let through came this way."""
        final, number = header.kind is FrameKind.FINAL, header.offset // FRAME_LIMIT_BYTES
        if final and header.chunk not in self._owned.get(way[0], ()):
            return  # as an older revision had it
        digest = blake3(payload).digest() if final else b""
        with self._lock:
            passed = self._passed.get(way)
            if passed is None:
                return
            slot, bit = (header.kind, header.chunk), 1 << number
            if not passed.slots.get(slot, 0) & bit:
                passed.slots[slot] = passed.slots.get(slot, 0) | bit
                passed.came_bytes += header.length
            if final:
                passed.wrong |= passed.hashes.setdefault((header.chunk, number), digest) != digest

    def lose(self, receiver: PeerId) -> None:
        """Note that what went to `receiver` may not have arrived."""
        with self._lock:
            for (_, to), passed in self._passed.items():
                passed.lost |= to == receiver and passed.came_bytes > 0

    def lost(self, way: Way) -> bool:
        """True if something that came this way may not have arrived."""
        with self._lock:
            return self._passed[way].lost

    def came_bytes(self, way: Way) -> int:
        """Bytes of payload that came this way, each once."""
        with self._lock:
            return self._passed[way].came_bytes

    def lacks(self, way: Way, reduction: Reduction, late: frozenset[PeerId]) -> tuple[bool, bool, bool]:
        """Compare what came one way with what the plan and this node's finals want of it.

        Returns whether contributions are missing that the sender owes the receiver; whether finals are missing that
        this node has; and whether a final came that is wrong. late: owners of whom a final is missing here.
        """
        sender, receiver = way
        with self._lock:
            passed = self._passed[way]
            slots, hashes = dict(passed.slots), dict(passed.hashes)
        owed = self._owned.get(receiver, ()) if receiver in late and sender in self._contributors else ()
        contributions = any(not self._is_whole(slots, FrameKind.CONTRIBUTION, chunk) for chunk in owed)
        finals = self._owned.get(sender, ()) if sender not in late else ()
        lacking = any(not self._is_whole(slots, FrameKind.FINAL, chunk) for chunk in finals)
        return contributions, lacking, self._has_wrong(passed, reduction, hashes)

    def _has_wrong(self, passed: _Passed, reduction: Reduction, hashes: Mapping[tuple[int, int], bytes]) -> bool:
        """Compare frames of finals with what this node has of them by now, each once."""
        there = {key: final for key in hashes if (final := reduction.final(key[0])) is not None}
        for (chunk, number), final in there.items():
            start = number * FRAME_LIMIT_BYTES
            mine = blake3(final.payload[start : start + FRAME_LIMIT_BYTES].data).digest()
            with self._lock:
                passed.wrong |= passed.hashes.pop((chunk, number), mine) != mine
        with self._lock:
            return passed.wrong

    def vouches_for_finals(self, sender: PeerId) -> bool:
        """True if all finals of `sender` would come this way: no accepted result that somebody may have had before."""
        return sender not in self._copied

    def _is_whole(self, slots: Mapping[Slot, int], kind: FrameKind, chunk: int) -> bool:
        frames = -(-self._size(kind, chunk) // FRAME_LIMIT_BYTES)
        return slots.get((kind, chunk), 0) == (1 << frames) - 1

    def _size(self, kind: FrameKind, chunk: int) -> int:
        final = kind is FrameKind.FINAL
        return self.final_format.payload_bytes(chunk) if final else self.final_format.contribution_bytes(chunk)


class RelayWatch:
    """Watch of a relay over the ways under one plan, to be looked at again and again.

    stall_s: the stall deadline. planned: bytes/s that one way should have; a way that is missing has no known rate.
    late_s: by how much longer this node waits, as of `StallWatch`.
    """

    def __init__(
        self,
        account: RelayAccount,
        reduction: Reduction,
        holding: Holding,
        *,
        stall_s: float,
        planned: Mapping[Way, float],
        late_s: Callable[[], float],
    ) -> None:
        self.plan = account.final_format.plan
        self._account = account
        self._reduction = reduction
        self._holding = holding
        self._coming = StallWatch[Way](stall_s=stall_s, planned=planned, late_s=late_s)
        self._going = StallWatch[Way](stall_s=stall_s, planned=planned, late_s=late_s)

    def look(self, now: float) -> tuple[RelayedWay, ...]:
        """Return the ways of which something can be said at `now`, in the order of the ways."""
        account, holding = self._account, self._holding
        late = self._reduction.waiting_for().finals
        lacks = {way: account.lacks(way, self._reduction, late) for way in account.ways}
        held = [way for way in account.ways if holding.held(way)]
        owing = [way for way, (contributions, finals, _) in lacks.items() if contributions or finals]
        self._coming.look(now, owing=owing, moved={way: account.came_bytes(way) for way in account.ways})
        self._going.look(now, owing=held, moved={way: holding.let_go(way) for way in account.ways})
        said = []
        for way, (contributions, finals, wrong) in lacks.items():
            taken = way not in self._going.stalled()
            came = not wrong and way not in self._coming.stalled()
            if came and taken and (contributions or way in held or account.lost(way)):
                continue
            all_finals = came and taken and not finals and way[0] not in late and account.vouches_for_finals(way[0])
            said.append(self._claim(way, came=came, taken=taken, finals=all_finals))
        return tuple(said)

    def _claim(self, way: Way, *, came: bool, taken: bool, finals: bool) -> RelayedWay:
        sender, receiver = (self.plan.number(peer) for peer in way)
        assert sender is not None
        assert receiver is not None
        return RelayedWay(sender, receiver, came, taken, finals)
