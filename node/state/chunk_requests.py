"""Which chunk to ask of which donor: a scheduler without any I/O, and a run of it from its first donor to its end.

What asks, receives and waits is around it: `shoal.node.state.fetching` in a node, and the simulator's own.

    add ──► ASKED ◄──────── more room ───┐        asked of one donor ─── arrived ──► done
              │ requests()               │               │
              └──► chunks in its window ─┘               ├── donor stalls, breaks, refuses, lies ──► free again
                                                         └── at the end, a faster donor has room ──► asked of both

* A donor's window is what it brings in AHEAD_S at its measured rate: enough to keep a long line busy, and little to
  lose. Until the rate is known, the window is what the donor has brought so far, so that it doubles with every turn.
  Whoever is fastest and has room is asked first, so every donor carries what its bandwidth is.
* When nothing is left to be asked for, a donor with room takes over chunks that another would take more than
  STEAL_FACTOR times as long for. Whoever is first counts; the other's bytes are dropped. Where two that were asked are
  both so slow, a third is, and so on, each FURTHER_S after the one before: colluding donors cannot keep a chunk back.
* A donor is out for the rest of the transfer when it does not hold a chunk, its lane breaks, it stalls, or a chunk of
  it is not what it should be. The last is remembered (`shoal.protocol.donors`): who served bad bytes is not asked
  again for a while, which doubles each time.

A donor is introduced before it is asked for anything: does it hold the thing, is there a lane to it? Who does not
answer keeps nobody waiting, and joins in when it does. One whose lane broke is introduced again once.

It has no clock and draws nothing: the same calls lead to the same requests. Times are in seconds of any
monotonic clock, rates in bytes/s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import exp, inf
from typing import Final

from shoal.protocol.donors import DonorScores
from shoal.protocol.errors import LocalError, NetworkError, RemoteError
from shoal.protocol.identity import PeerId

AHEAD_S: Final = 0.5  # of a donor's measured rate that it is asked for at once
WINDOW_FIRST_BYTES: Final = 4 << 20
"""Asked of a donor whose rate is not known yet, to begin with."""
WINDOW_LIMIT_BYTES: Final = 32 << 20
WINDOW_MIN_CHUNKS: Final = 2
"""A donor never runs dry between a chunk and the next request, however large the chunks are."""
WINDOW_LIMIT_CHUNKS: Final = 256
REFILL_SHARE: Final = 0.75
"""A donor is asked for more once it owes no more than this of its window: for several chunks at once."""
SAMPLE_S: Final = 0.25
RATE_MEMORY_S: Final = 2.0
"""Donors that share a line take turns on it: what one brings is measured over about this long."""
RATE_UNKNOWN_BYTES_PER_S: Final = 1e6
HOPE: Final = 2.0
"""A donor whose rate is not known is taken for this much faster than the mean of the others: it is tried."""
STEAL_FACTOR: Final = 2.0  # times as long, before a chunk is asked of another too
STEAL_MARGIN_S: Final = 1.0
FURTHER_S: Final = 2.0  # since a chunk was asked of a second donor or a later one, before it is of another
STALL_S: Final = 5.0
"""A donor that owes chunks and from which not a byte comes for this long is given up."""
IDLE_LIMIT_S: Final = 30.0
"""The same for a donor whose lanes carry other things, but nothing that was asked for."""

DONOR_LIMIT: Final = 16
"""Donors of one transfer; of more, those that were fastest the last time."""
INTRODUCTION_LIMIT: Final = 2  # times that a donor is asked into one transfer
LANE_DEADLINE_S: Final = 10.0  # for a lane to a donor
LOOK_S: Final = 0.1
"""Between two looks at how the donors do."""
REST_SHARE: Final = 0.25
"""Of the time that the first donor who will be through has work for; it is asked for more long before that."""
REST_MIN_S: Final = 0.001
REST_LIMIT_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask `donor` for chunk number `chunk`."""

    donor: PeerId
    chunk: int


@dataclass(slots=True, eq=False)
class _Donor:
    """One who is asked. `owed`: chunks asked for and not arrived, in the order of asking."""

    peer: PeerId
    rate: float | None
    moved: int = 0  # bytes, of what was asked for, ever
    anything: int = 0  # bytes, of whatever its lanes carry, ever
    moved_at: float = 0.0
    anything_at: float = 0.0
    sample_bytes: int = 0
    sample_at: float = 0.0
    owed: dict[int, None] = field(default_factory=dict)
    owed_bytes: int = 0
    arrived_bytes: int = 0
    added_at: float = 0.0

    def busy_s(self, now: float) -> float:
        """Seconds for which it has work; 0 while nothing has come of it."""
        seconds = max(now - self.added_at, 1e-3)
        rate = self.arrived_bytes / seconds if self.rate is None else max(self.rate, 1.0)
        return self.owed_bytes / rate if rate else 0.0

    def has_room(self, size: int) -> bool:
        """True if its window takes another chunk of `size` bytes."""
        if len(self.owed) < WINDOW_MIN_CHUNKS:
            return True
        return self.owed_bytes + size <= self._window and len(self.owed) < WINDOW_LIMIT_CHUNKS

    @property
    def runs_low(self) -> bool:
        """True if it is time to ask it for more."""
        few = len(self.owed) <= REFILL_SHARE * WINDOW_LIMIT_CHUNKS and self.owed_bytes <= REFILL_SHARE * self._window
        return few or len(self.owed) < WINDOW_MIN_CHUNKS

    @property
    def _window(self) -> float:
        """Bytes that it may owe."""
        window = max(WINDOW_FIRST_BYTES, self.arrived_bytes) if self.rate is None else self.rate * AHEAD_S
        return min(window, WINDOW_LIMIT_BYTES)


class Transfer:
    """The chunks of one transfer, `sizes` bytes each, numbered from 0; those in `here` need not be fetched."""

    def __init__(self, sizes: Sequence[int], *, here: frozenset[int] = frozenset()) -> None:
        self._sizes = sizes
        self._free = deque(chunk for chunk in range(len(sizes)) if chunk not in here)
        self._askers: dict[int, list[_Donor]] = {chunk: [] for chunk in self._free}  # of chunks that are not here
        self._asked_at: dict[int, float] = {}
        self._donors: dict[PeerId, _Donor] = {}
        self._arrived_bytes: dict[PeerId, int] = {}
        self._out: dict[PeerId, str] = {}

    @property
    def done(self) -> bool:
        """True if all chunks are here."""
        return not self._askers

    @property
    def missing(self) -> int:
        """Number of chunks that are not here."""
        return len(self._askers)

    @property
    def donors(self) -> tuple[PeerId, ...]:
        """Peers that are being asked."""
        return tuple(self._donors)

    @property
    def arrived_bytes(self) -> dict[PeerId, int]:
        """Bytes of what is here, by the peer that they came from; a peer that brought nothing is not named."""
        return {peer: size for peer, size in self._arrived_bytes.items() if size}

    @property
    def out(self) -> dict[PeerId, str]:
        """Peers that are asked no more, each with the reason."""
        return dict(self._out)

    def rate(self, peer: PeerId) -> float | None:
        """The measured rate of a donor that is being asked."""
        donor = self._donors.get(peer)
        return None if donor is None else donor.rate

    def add(self, peer: PeerId, now: float, *, rate: float | None = None) -> None:
        """`peer` can be asked, and may be as fast as `rate`. One that was out may come back."""
        if peer in self._donors:
            raise LocalError(f"{peer} is a donor already")
        self._out.pop(peer, None)
        self._donors[peer] = _Donor(peer, rate, moved_at=now, anything_at=now, sample_at=now, added_at=now)

    def moved(self, peer: PeerId, total: int, anything: int, now: float) -> None:
        """Since the beginning `total` bytes of what was asked for came from `peer`, and `anything` over its lanes."""
        donor = self._donors.get(peer)
        if donor is None:
            return
        if total > donor.moved:
            donor.moved, donor.moved_at = total, now
        if anything > donor.anything or donor.moved_at == now:
            donor.anything, donor.anything_at = max(anything, donor.anything), now
        if not donor.owed:  # with nothing to do it cannot be measured, and owes no sign of life
            donor.sample_bytes, donor.sample_at = donor.moved, now
            donor.moved_at = donor.anything_at = now
        elif now - donor.sample_at >= SAMPLE_S:
            seconds = now - donor.sample_at
            sample = (donor.moved - donor.sample_bytes) / seconds
            if donor.rate is not None:
                donor.rate += (1 - exp(-seconds / RATE_MEMORY_S)) * (sample - donor.rate)
            elif sample:
                donor.rate = sample
            donor.sample_bytes, donor.sample_at = donor.moved, now

    def requests(self, now: float) -> list[Ask]:
        """Return the chunks to ask for now, and of whom; they count as asked."""
        asks = []
        fastest_first = sorted(self._donors.values(), key=self._pace, reverse=True)
        for donor in filter(lambda donor: donor.runs_low, fastest_first):
            while self._free and donor.has_room(self._sizes[self._free[0]]):
                asks.append(self._ask(donor, self._free.popleft(), now))
        if not self._free:
            etas_s = self._etas_s()
            for donor in fastest_first:
                while (chunk := self._worth_stealing(donor, etas_s, now)) is not None:
                    asks.append(self._ask(donor, chunk, now))
                    etas_s[chunk] = donor.owed_bytes / self._pace(donor)
        return asks

    def _pace(self, donor: _Donor) -> float:
        """Bytes/s to reckon with."""
        if donor.rate is not None:
            return max(donor.rate, 1.0)
        known = [other.rate for other in self._donors.values() if other.rate is not None]
        return max(HOPE * sum(known) / len(known), 1.0) if known else RATE_UNKNOWN_BYTES_PER_S

    def _ask(self, donor: _Donor, chunk: int, now: float) -> Ask:
        if not donor.owed:
            donor.moved_at = donor.anything_at = donor.sample_at = now
            donor.sample_bytes = donor.moved
        donor.owed[chunk] = None
        donor.owed_bytes += self._sizes[chunk]
        self._askers[chunk].append(donor)
        self._asked_at[chunk] = now
        return Ask(donor.peer, chunk)

    def _etas_s(self) -> dict[int, float]:
        """Seconds until each chunk that is owed is here, by the first of those that were asked for it."""
        etas_s: dict[int, float] = {}
        for donor in self._donors.values():
            ahead, pace = 0, self._pace(donor)
            for chunk in donor.owed:
                ahead += self._sizes[chunk]
                eta_s = ahead / pace
                if eta_s < etas_s.get(chunk, inf):
                    etas_s[chunk] = eta_s
        return etas_s

    def _worth_stealing(self, donor: _Donor, etas_s: dict[int, float], now: float) -> int | None:
        """The chunk that is furthest away, if `donor` has room and would bring it much sooner than who was asked."""
        best, best_eta = None, 0.0
        for chunk, eta in etas_s.items():
            if eta > best_eta and chunk not in donor.owed and self._may_be_asked_of_another(chunk, now):
                best, best_eta = chunk, eta
        if best is None or not donor.has_room(self._sizes[best]):
            return None
        own_eta = (donor.owed_bytes + self._sizes[best]) / self._pace(donor)
        return best if best_eta > STEAL_FACTOR * own_eta + STEAL_MARGIN_S else None

    def _may_be_asked_of_another(self, chunk: int, now: float) -> bool:
        return len(self._askers[chunk]) < 2 or now - self._asked_at[chunk] >= FURTHER_S

    def arrived(self, peer: PeerId, chunk: int) -> list[PeerId]:
        """A chunk came and is right. Returns of whom else it was asked: they need not bring it any more."""
        if chunk not in self._askers:
            return []
        askers = self._askers.pop(chunk)
        for donor in askers:
            self._let_go(donor, chunk)
        if not askers:  # it came after its donor was given up
            self._free.remove(chunk)
        if peer in self._donors:
            self._donors[peer].arrived_bytes += self._sizes[chunk]
        self._arrived_bytes[peer] = self._arrived_bytes.get(peer, 0) + self._sizes[chunk]
        return [donor.peer for donor in askers if donor.peer != peer]

    def _let_go(self, donor: _Donor, chunk: int) -> None:
        if chunk in donor.owed:
            del donor.owed[chunk]
            donor.owed_bytes -= self._sizes[chunk]

    def drop(self, peer: PeerId, reason: str) -> None:
        """Ask `peer` for nothing more; what it owes is free again, and asked for first."""
        donor = self._donors.pop(peer, None)
        if donor is None:
            return
        self._out[peer] = reason
        for chunk in reversed(donor.owed):
            self._askers[chunk].remove(donor)
            if not self._askers[chunk]:
                self._free.appendleft(chunk)

    def never(self, peer: PeerId, reason: str) -> None:
        """`peer` could not even be asked."""
        self._out[peer] = reason

    def look(self, now: float) -> list[PeerId]:
        """Drop the donors that stall; who that is."""
        stalled = []
        for donor in list(self._donors.values()):
            if donor.owed and now >= self._timeout_at(donor):
                waited = STALL_S if now - donor.anything_at >= STALL_S else IDLE_LIMIT_S
                self.drop(donor.peer, f"sent nothing for {waited:g} s")
                stalled.append(donor.peer)
        return stalled

    @staticmethod
    def _timeout_at(donor: _Donor) -> float:
        return min(donor.anything_at + STALL_S, donor.moved_at + IDLE_LIMIT_S)

    def busy_s(self, now: float) -> float:
        """Seconds until the first donor will have done all that was asked of it, if they are as fast as so far."""
        if self._free and not all(donor.owed for donor in self._donors.values()):
            return 0.0
        return min((donor.busy_s(now) for donor in self._donors.values() if donor.owed), default=0.0)

    def deadline(self) -> float:
        """Time at which `look` may find somebody who stalls; infinity if nobody owes anything."""
        return min((self._timeout_at(donor) for donor in self._donors.values() if donor.owed), default=float("inf"))

    def failure(self, what: str) -> NetworkError:
        """Return the error that nobody is left to ask, with the reasons."""
        reasons = "; ".join(f"{peer}: {reason}" for peer, reason in sorted(self._out.items()))
        return NetworkError(f"no peer has {what}" + (f" ({reasons})" if reasons else ""))


class TransferRun:
    """One transfer under way: whom to introduce, what becomes of what comes, and when it is over.

    scores: who was how fast, and who sent wrong bytes. make: makes its scheduler.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        here: Collection[int],
        scores: DonorScores,
        make: Callable[..., Transfer] = Transfer,
    ) -> None:
        self.transfer = make(sizes, here=frozenset(here))
        self._scores = scores
        self._introductions: dict[PeerId, int] = {}
        self._pending: set[PeerId] = set()
        self._look_at = float("-inf")

    @property
    def over(self) -> bool:
        """True if all is here, or nobody is left to ask."""
        return self.transfer.done or not (self.transfer.donors or self._pending)

    def begin(self, peers: Sequence[PeerId], now: float) -> list[PeerId]:
        """Return the peers to introduce first of all, out of these."""
        ranked = self._scores.ranked(peers, now)[:DONOR_LIMIT]
        return [peer for peer in ranked if self.introduces(peer, now)]

    def introduces(self, peer: PeerId, now: float) -> bool:
        """True if `peer` is to be introduced once more; it is then waited for."""
        count = self._introductions.get(peer, 0)
        if count >= INTRODUCTION_LIMIT or self._scores.banned(peer, now):
            return False
        self._introductions[peer] = count + 1
        self._pending.add(peer)
        return True

    def introduced(self, peer: PeerId, now: float, error: NetworkError | RemoteError | None = None) -> None:
        """The introduction of `peer` is over: it can be asked, unless there is an error."""
        self._pending.discard(peer)
        if error is None:
            self.transfer.add(peer, now, rate=self._scores.rate(peer))
            return
        if isinstance(error, RemoteError):
            self._scores.offended(peer, now)
        self._scores.lacked(peer, now)
        self.transfer.never(peer, str(error))

    def failed(self, peer: PeerId, error: NetworkError | RemoteError, now: float) -> bool:
        """A chunk will not come of `peer`, or came wrong: it is asked no more. Whether that is held against it; several
        chunks on their way are one offence."""
        offends = isinstance(error, RemoteError) and peer in self.transfer.donors
        if offends:
            self._scores.offended(peer, now)
        self._scores.lacked(peer, now)
        self.transfer.drop(peer, str(error))
        return offends

    def look(self, now: float, moved: Callable[[PeerId], tuple[int, int]]) -> list[PeerId]:
        """Now and then, measure the donors, and drop who stalls; who that is.

        moved: the bytes that came of a donor since the beginning, of what was asked for and of anything.
        """
        if now < self._look_at:
            return []
        self._look_at = now + LOOK_S
        for peer in self.transfer.donors:
            wanted, anything = moved(peer)
            self.transfer.moved(peer, wanted, anything, now)
        stalled = self.transfer.look(now)
        for peer in stalled:
            self._scores.lacked(peer, now)
        return stalled

    def rest_s(self, now: float) -> float:
        """Seconds to let chunks gather while every donor has enough to do: a look at one costs as much as at twenty."""
        rest = min(REST_LIMIT_S, REST_SHARE * self.transfer.busy_s(now))
        return rest if rest >= REST_MIN_S else 0.0

    def end(self) -> None:
        """Remember how fast the donors were."""
        for peer in self.transfer.donors:
            rate = self.transfer.rate(peer)
            if rate:
                self._scores.measured(peer, rate)
