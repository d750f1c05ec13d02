"""What a relay knows of the ways that it passes: how much of what the one owes the other came in, and was taken.

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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from blake3 import blake3

from shoal.collectives.finals import FinalFormat
from shoal.collectives.frame_relay import Holding, Way
from shoal.collectives.reduce import Reduction
from shoal.collectives.stalls import StallWatch
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import RelayedWay
from shoal.swarm.lanes.frame import FRAME_LIMIT_BYTES, FrameHeader, FrameKind

Slot = tuple[FrameKind, int]
"""What a frame is part of: a kind and a chunk."""


@dataclass(slots=True)
class _Passed:
    """What came one way. slots: by kind and chunk, a bit for each of its frames. hashes: of the frames of finals."""

    came_bytes: int = 0
    slots: dict[Slot, int] = field(default_factory=dict)
    hashes: dict[tuple[int, int], bytes] = field(default_factory=dict)
    wrong: bool = False
    lost: bool = False


class RelayAccount:
    """What one relay passed under one plan, by way. From any thread.

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
        """What went to `receiver` may not have arrived."""
        with self._lock:
            for (_, to), passed in self._passed.items():
                passed.lost |= to == receiver and passed.came_bytes > 0

    def lost(self, way: Way) -> bool:
        """Whether something that came this way may not have arrived."""
        with self._lock:
            return self._passed[way].lost

    def came_bytes(self, way: Way) -> int:
        """Bytes of payload that came this way, each once."""
        with self._lock:
            return self._passed[way].came_bytes

    def lacks(self, way: Way, reduction: Reduction, late: frozenset[PeerId]) -> tuple[bool, bool, bool]:
        """Whether contributions lack that the one owes the other, whether finals do that this node has, and whether
        one came that is none. late: owners of whom a final lacks here."""
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
        """Whether all finals of `sender` would come this way: not those that stand and somebody may have had before."""
        return sender not in self._copied

    def _is_whole(self, slots: Mapping[Slot, int], kind: FrameKind, chunk: int) -> bool:
        frames = -(-self._size(kind, chunk) // FRAME_LIMIT_BYTES)
        return slots.get((kind, chunk), 0) == (1 << frames) - 1

    def _size(self, kind: FrameKind, chunk: int) -> int:
        final = kind is FrameKind.FINAL
        return self.final_format.payload_bytes(chunk) if final else self.final_format.contribution_bytes(chunk)


class RelayWatch:
    """What a relay says of the ways under one plan, looked at again and again.

    stall_s: the stall deadline. planned: bytes/s that one way should have; a way that is missing has no known rate.
    """

    def __init__(
        self,
        account: RelayAccount,
        reduction: Reduction,
        holding: Holding,
        *,
        stall_s: float,
        planned: Mapping[Way, float],
    ) -> None:
        self.plan = account.final_format.plan
        self._account = account
        self._reduction = reduction
        self._holding = holding
        self._coming = StallWatch[Way](stall_s=stall_s, planned=planned)
        self._going = StallWatch[Way](stall_s=stall_s, planned=planned)

    def look(self, now: float) -> tuple[RelayedWay, ...]:
        """What can be said at `now`, in the order of the ways."""
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
