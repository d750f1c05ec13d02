"""The modelled network of a simulation: regions, delays, losses, one-way partitions, bandwidth; and virtual time.

Nothing here reads a clock. An event is due at a time in seconds; events of one time happen in the order in which they
were asked for; and every message that is delivered is put into the trace, so that the hash of the trace names the run.

*Messages* (control) take half the round trip between the two regions, a little jitter, and the time of their bytes on
the sender's uplink; each is lost with the probability `loss`, unless it is a call, of which TCP repeats what is lost:
requests of a transfer and their answers. *Payloads* (bulk) share the sender's uplink and the
receiver's downlink first come, first served: bytes over the lesser of the two rates when both are idle. Loss does not
concern them either, partitions do.

Source of `ROUND_TRIPS_MS`: IBM Cloud, Network latency dashboards, inter-region latency, means of 28 Sep to 27 Oct 2024
(github.com/ibm-cloud-docs/vpc, _include-segments/network-latency.md); within a region as within one zone there.
"""

from __future__ import annotations

import gc
import heapq
import math
import random
from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from struct import Struct, pack
from typing import Any

from blake3 import blake3

REGIONS = ("Dallas", "Toronto", "Washington", "Frankfurt", "London", "Madrid", "Osaka", "Sydney", "Tokyo", "Sao Paulo")
ROUND_TRIPS_MS = (
    (0.1, 34, 31, 123, 113, 119, 150, 185, 141, 144),
    (34, 0.1, 19, 93, 84, 108, 169, 214, 162, 131),
    (31, 19, 0.1, 90, 76, 89, 175, 213, 169, 119),
    (119, 92, 92, 0.1, 13, 29, 232, 250, 231, 197),
    (114, 84, 76, 13, 0.1, 27, 244, 261, 242, 188),
    (119, 107, 90, 29, 27, 0.1, 259, 275, 255, 207),
    (150, 171, 176, 234, 245, 259, 0.1, 122, 9, 292),
    (184, 214, 214, 250, 261, 275, 122, 0.1, 115, 328),
    (143, 164, 167, 231, 243, 257, 9, 115, 0.1, 283),
    (144, 131, 119, 198, 188, 206, 291, 327, 286, 0.1),
)
UPLOADS, DOWNLOADS = (5e6, 12e6, 60e6), (12e6, 60e6, 120e6)
"""Rates of peers in bytes/s, one of each drawn for everyone."""
LAST_MILE_S = 0.008
"""Of each end, one way: what stands between a machine at home and its region."""
JITTER_SHARE = 0.1
IN_FLIGHT_S = 1.0
"""A message has arrived so long after it was sent, if it ever does."""
ENVELOPE_BYTES = 176
"""Of a sealed envelope beside its payload."""
CONTROL_OVERHEAD_BYTES = 80
"""Of each message beside its sealed envelope: TCP and IP headers, the frames of Noise and of the muxer."""

Action = Callable[..., None]
_Due = tuple[float, int, Action, tuple[Any, ...]]
"""When, the how manieth that was asked for, and what."""
SLICES_PER_S = 512
COLLECT_EVERY_OBJECTS = 100_000
"""More objects than before, until cycles among them are looked for."""
_NOTE = "dHIIq"
_NOTE_FIELDS = len(_NOTE)
_NOTES = 4096
_PAGE = Struct("<" + _NOTES * _NOTE)


class Timeline:
    """Virtual time, and what is due in it. `events` is how many have happened, `digest` names all that was noted.

    What is due lies in slices of time, unsorted until they come. With ten thousand peers some thirty thousand events
    wait; one heap of them all took an eighth of the run.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._slices: dict[int, list[_Due]] = {}
        self._starts: list[int] = []
        """A heap of their numbers."""
        self._slice: list[_Due] = []
        """All that was due before the end of slice `_number`, sorted, of which the first `_happened` have happened."""
        self._number = -1
        self._happened = 0
        self._before = 0
        """Number of events in earlier slices."""
        self._count = 0
        self._hasher = blake3()
        self._noted: list[float] = []
        """Notes that are not in the hash yet, in order. Each message brings one, so whole pages are packed."""

    def at(self, time: float, action: Action, *arguments: Any) -> None:
        """Call `action` at `time`, or next if that is past."""
        self._count += 1
        self._put((time, self._count, action, arguments))

    def after(self, delay_s: float, action: Action, *arguments: Any) -> None:
        """Call `action` when `delay_s` have passed."""
        self._count = count = self._count + 1
        time = self.now + delay_s
        waiting = self._slices.get(int(time * SLICES_PER_S))
        if waiting is None:
            self._put((time, count, action, arguments))
        else:
            waiting.append((time, count, action, arguments))

    def _put(self, due: _Due) -> None:
        number = int(due[0] * SLICES_PER_S)
        if number <= self._number:
            insort(self._slice, due, self._happened)
        elif number in self._slices:
            self._slices[number].append(due)
        else:
            self._slices[number] = [due]
            heapq.heappush(self._starts, number)

    def _next_slice(self) -> bool:
        """Go on to the next, if there is one."""
        if not self._starts:
            return False
        self._before += self._happened
        self._happened, self._number = 0, heapq.heappop(self._starts)
        self._slice = self._slices.pop(self._number)
        self._slice.sort()
        return True

    def note(self, kind: int, one: int, other: int, what: int) -> None:
        """Put a happening into the trace."""
        noted = self._noted
        noted += (self.now, kind, one, other, what)
        if len(noted) == _NOTES * _NOTE_FIELDS:
            self._hasher.update(_PAGE.pack(*noted))
            noted.clear()

    def run(self, until: float, done: Callable[[], bool]) -> None:
        """Let things happen until `done`, which is asked after each, or until nothing more is due before `until`."""
        with _rare_collections():
            while self._happened < len(self._slice) or self._next_slice():
                # What an event adds to this slice comes behind it, where the iterator finds it.
                for time, _, action, arguments in islice(self._slice, self._happened, None):
                    if time > until:
                        self.now = max(self.now, until)
                        return
                    self._happened += 1
                    if time > self.now:
                        self.now = time
                    action(*arguments)
                    if done():
                        return
        self.now = max(self.now, until)

    @property
    def events(self) -> int:
        """Number of events that have happened."""
        return self._before + self._happened

    @property
    def waiting(self) -> int:
        """Number of events that are still to come."""
        return self._count - self.events

    def digest(self) -> str:
        """BLAKE3 over everything noted so far, in hexadecimal."""
        self._hasher.update(pack("<" + len(self._noted) // _NOTE_FIELDS * _NOTE, *self._noted))
        self._noted.clear()
        return self._hasher.hexdigest()


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Events go when nothing refers to them any more; to look for cycles among them took a tenth of the time."""
    before = gc.get_threshold()
    gc.set_threshold(COLLECT_EVERY_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@dataclass(slots=True)
class Place:
    """Place of a peer: its region, its rates in bytes/s, when its links are free again, what it sent."""

    region: int
    upload: float
    download: float
    up_free_at: float = 0.0
    down_free_at: float = 0.0
    control_bytes: int = 0


@dataclass(slots=True)
class Wall:
    """A partition: whoever is in `one` cannot send to whoever is in `other`."""

    one: frozenset[int]
    other: frozenset[int]


@dataclass(slots=True)
class Network:
    """Network that says which peer can send to which, and how long it takes. Peers are numbers."""

    timeline: Timeline
    rng: random.Random
    loss: float = 0.0
    places: list[Place] = field(default_factory=list)
    walls: list[Wall] = field(default_factory=list)
    lossy: dict[int, float] = field(default_factory=dict)
    """Peers whose own connection loses messages, beside what the network loses."""
    slowed: dict[int, float] = field(default_factory=dict)
    """By what the rates of a peer are divided."""
    cleared_at: float = 0.0
    """When all that was given to slow connections has left them, of those that are slow no more."""
    _delays: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._delays = [[LAST_MILE_S * 2 + ms / 2000 for ms in row] for row in ROUND_TRIPS_MS]

    def add(self, region: int, upload: float, download: float) -> int:
        """A new place; returns its number."""
        self.places.append(Place(region, upload, download))
        return len(self.places) - 1

    def settle(self, rng: random.Random) -> int:
        """A new place, drawn from the regions and the rates; returns its number."""
        return self.add(rng.randrange(len(REGIONS)), rng.choice(UPLOADS), rng.choice(DOWNLOADS))

    def part(self, one: Iterable[int], other: Iterable[int]) -> Wall:
        """Nothing passes from `one` to `other` until `walls` has it no more; the other way is not concerned."""
        wall = Wall(frozenset(one), frozenset(other))
        self.walls.append(wall)
        return wall

    def passes(self, sender: int, to: int) -> bool:
        """True if no partition stands between the two, in this direction."""
        return not any(sender in wall.one and to in wall.other for wall in self.walls)

    def quicken(self, peer: int) -> None:
        """A peer is as fast as ever, once what waits on its connection is through: that goes at the rate of before."""
        self.slowed.pop(peer, None)
        place = self.places[peer]
        self.cleared_at = max(self.cleared_at, place.up_free_at, place.down_free_at)

    def delay_s(self, sender: int, to: int) -> float:
        """One way, with jitter."""
        places = self.places
        delay = self._delays[places[sender].region][places[to].region]
        return delay * (1.0 + JITTER_SHARE * self.rng.random())

    def message_delay_s(self, sender: int, to: int, size: int) -> float:
        """Time that a message takes, infinity if it is lost. Its bytes are counted either way."""
        place = self.places[sender]
        size += CONTROL_OVERHEAD_BYTES
        place.control_bytes += size
        rng = self.rng
        if self.walls and not self.passes(sender, to):
            return math.inf
        if self.loss and rng.random() < self.loss:
            return math.inf
        if self.lossy and rng.random() < max(self.lossy.get(sender, 0.0), self.lossy.get(to, 0.0)):
            return math.inf
        delay = self._delays[place.region][self.places[to].region] * (1.0 + JITTER_SHARE * rng.random())
        return delay + size / place.upload * self.slowed.get(sender, 1.0)

    def call_delay_s(self, sender: int, to: int, size: int) -> float:
        """Time that a message takes which TCP repeats until it is there."""
        place = self.places[sender]
        place.control_bytes += size + CONTROL_OVERHEAD_BYTES
        return self.delay_s(sender, to) + size / place.upload * self.slowed.get(sender, 1.0)

    def payload_delay_s(self, sender: int, to: int, size: float) -> float:
        """Time that a payload of `size` bytes takes, queues included."""
        source, target, now = self.places[sender], self.places[to], self.timeline.now
        begins = max(now, source.up_free_at, target.down_free_at)
        rate_up = source.upload / self.slowed.get(sender, 1.0)
        rate_down = target.download / self.slowed.get(to, 1.0)
        took = size / min(rate_up, rate_down)
        source.up_free_at = max(now, source.up_free_at) + size / rate_up
        target.down_free_at = max(now, target.down_free_at) + size / rate_down
        return begins + took - now + self.delay_s(sender, to)
