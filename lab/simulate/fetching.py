"""A transfer of a simulated peer: what `shoal.node.state.fetching` is around the same `TransferRun`, in virtual time.

Here donors answer, requests and frames travel, and wrong bytes are told from right ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from shoal.lab.simulate.talk import Answer, ChunkFrame, ChunkRequest, GetFinals, GetHeader
from shoal.node.state.chunk_requests import LOOK_S, TransferRun
from shoal.node.state.state_server import REQUEST_DEADLINE_S
from shoal.protocol.donors import DonorScores
from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.swarm.lanes.chunks import RUN_LIMIT

if TYPE_CHECKING:
    from shoal.lab.simulate.peer import SimulatedPeer

REQUEST_BYTES = 300
"""Of a request and of a short answer, the sealed envelope included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Chunks to fetch, of `sizes` bytes, named by `scope`; those in `here` are here.

    question: asks a donor whether it holds the thing; None where all donors are known to. agrees: looks at the answer;
    raises NetworkError if the donor does not hold it, RemoteError if it holds something else. known: donors that need
    not be asked. accept: takes a chunk; raises RemoteError if the bytes are wrong. ended: called once, with whether all
    is here.
    """

    scope: bytes
    sizes: Sequence[int]
    here: Collection[int] = ()
    question: GetHeader | GetFinals | None
    agrees: Callable[[int, Answer], None]
    known: Collection[int] = ()
    accept: Callable[[int, bytes], None]
    ended: Callable[[bool], None]


@dataclass(frozen=True, slots=True)
class _Event:
    """A chunk came, or will not; without a chunk, the lane broke."""

    donor: int
    chunk: int | None = None
    error: NetworkError | RemoteError | None = None


@dataclass(slots=True)
class _Incoming:
    """A chunk that was asked of somebody, of which so many bytes lack."""

    lacking: int


@dataclass(eq=False)
class Fetching:
    """One transfer under way."""

    peer: SimulatedPeer
    job: Job
    scores: DonorScores
    over: bool = False
    _pending: dict[int, float] = field(default_factory=dict)
    _incoming: dict[tuple[int, int], _Incoming] = field(default_factory=dict)
    _moved: dict[PeerId, int] = field(default_factory=dict)
    _events: list[_Event] = field(default_factory=list)
    _resting: bool = False

    def __post_init__(self) -> None:
        make = self.peer.swarm.components.transfer
        self.run = TransferRun(self.job.sizes, here=self.job.here, scores=self.scores, make=make)
        self.transfer = self.run.transfer

    @property
    def _now(self) -> float:
        return self.peer.swarm.timeline.now

    def _id(self, number: int) -> PeerId:
        return self.peer.swarm.peers[number].id

    @property
    def owed(self) -> int:
        """Chunks that were asked for and are still to come."""
        return len(self._incoming)

    def begin(self, others: Sequence[int]) -> None:
        """Introduce the donors, the fastest first."""
        for donor in self.run.begin([self._id(other) for other in others], self._now):
            self._introduce(self.peer.swarm.numbers[donor])
        self._work()
        self._look(self.peer.life)

    def stop(self) -> None:
        """The process ended."""
        self.over = True

    def cancel(self) -> None:
        """Nobody wants it any more."""
        if not self.over:
            self._close()

    # -- what happens ------------------------------------------------------------------------------------------

    def told(self, sender: int, answer: Answer) -> None:
        """A donor said whether it holds the thing."""
        if self.over or self._pending.pop(sender, None) is None:
            return
        failed: NetworkError | RemoteError | None = None
        try:
            self.job.agrees(sender, answer)
        except NetworkError as error:
            failed = error
        except RemoteError as error:
            self.peer.swarm.blamed(self.peer.number, sender, str(error))
            failed = error
        self.run.introduced(self._id(sender), self._now, failed)
        self._work()

    def frame(self, sender: int, frame: ChunkFrame) -> None:
        """Bytes of a chunk came, or that there are none."""
        key = sender, frame.chunk
        incoming = self._incoming.get(key)
        if self.over or incoming is None:
            return
        donor = self._id(sender)
        self._moved[donor] = self._moved.get(donor, 0) + frame.length
        self.peer.swarm.donations.moved(self.peer, sender)
        if frame.data is None:
            del self._incoming[key]
            self._happened(_Event(sender, frame.chunk, NetworkError("does not hold it (any more)")))
            return
        incoming.lacking -= frame.length
        if incoming.lacking > 0:
            return
        del self._incoming[key]
        try:
            self.job.accept(frame.chunk, frame.data)
        except RemoteError as error:
            self.peer.swarm.donations.wrong(self.peer, sender)
            self._happened(_Event(sender, frame.chunk, error))
        else:
            self._happened(_Event(sender, frame.chunk))
        if self.over:  # by what came with it
            self._settled(sender, frame.chunk)

    def lane_broke(self, other: int) -> None:
        """The lane to `other` broke: chunks that were asked of it may never come."""
        if not self.over and any(donor == other for donor, _ in self._incoming):
            self._happened(_Event(other))

    def linked(self, other: int) -> None:
        """There is a lane to `other` (again): it can be asked what it holds."""
        if not self.over and other in self._pending:
            if self.job.question is None:
                self._introduce(other)
            else:
                self._question(other)

    def _happened(self, event: _Event) -> None:
        self._events.append(event)
        if not self._resting:
            self._work()

    # -- what is done ------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Take all events, ask for what the scheduler wants, and rest."""
        if self.over:
            return
        events, self._events = self._events, []
        for event in events:
            self._handle(event)
        if self.run.over:
            self._end()
            return
        self._ask()
        rest = self.run.rest_s(self._now)
        if rest and not self._resting:
            self._resting = True
            self.peer.swarm.timeline.after(rest, self._rested, self.peer.life)

    def _rested(self, life: int) -> None:
        self._resting = False
        if self._events and life == self.peer.life and self.peer.running:
            self._work()

    def _ask(self) -> None:
        peer, swarm = self.peer, self.peer.swarm
        asks = self.transfer.requests(self._now)
        for donor, chunks in ((d, [ask.chunk for ask in row]) for d, row in groupby(asks, lambda ask: ask.donor)):
            number = swarm.numbers[donor]
            if number not in peer.watch.links:
                self._drop(number, "there is no lane")
                continue
            for chunk in chunks:
                self._incoming[number, chunk] = _Incoming(self.job.sizes[chunk])
            for first in range(0, len(chunks), RUN_LIMIT):
                request = ChunkRequest(self.job.scope, tuple(chunks[first : first + RUN_LIMIT]))
                swarm.call(peer, number, request, REQUEST_BYTES)
            swarm.donations.asked(peer, number, {(self.job.scope, c): self.job.sizes[c] for c in chunks})

    def _look(self, life: int) -> None:
        """Now and then, measure the donors, and drop who stalls."""
        peer, now = self.peer, self._now
        if self.over or life != peer.life:
            return
        peer.swarm.timeline.after(LOOK_S, self._look, life)
        if peer.hung:
            return
        for donor in self.run.look(now, self._bytes_of):
            self._forget(peer.swarm.numbers[donor])
        for other in [other for other, until in self._pending.items() if now >= until]:
            del self._pending[other]
            late = NetworkError(f"did not answer within {REQUEST_DEADLINE_S:g} s")
            self.run.introduced(self._id(other), now, late)
        self._work()

    def _bytes_of(self, donor: PeerId) -> tuple[int, int]:
        return self._moved.get(donor, 0), int(self.peer.peer_rounds.moved(donor).received)

    def _handle(self, event: _Event) -> None:
        other, donor = event.donor, self._id(event.donor)
        if event.chunk is None:
            self._drop(other, "its lane broke")
            if self.run.introduces(donor, self._now):
                self._introduce(other)
        elif event.error is None:
            self._settled(other, event.chunk)
            for slower in self.transfer.arrived(donor, event.chunk):
                self._forget(self.peer.swarm.numbers[slower], event.chunk)
        else:
            self._settled(other, event.chunk)
            if self.run.failed(donor, event.error, self._now):
                self.peer.swarm.blamed(self.peer.number, other, str(event.error))
            self._forget(other)

    def _drop(self, other: int, reason: str) -> None:
        self.transfer.drop(self._id(other), reason)
        self._forget(other)

    def _forget(self, other: int, chunk: int | None = None) -> None:
        for key in [key for key in self._incoming if key[0] == other and chunk in (None, key[1])]:
            del self._incoming[key]
            self._settled(*key)

    def _settled(self, other: int, chunk: int) -> None:
        self.peer.swarm.donations.settled(self.peer, other, self.job.scope, chunk)

    # -- donors ------------------------------------------------------------------------------------------------

    def _introduce(self, other: int) -> None:
        linked = other in self.peer.watch.links
        if linked and other in self.job.known:
            self._pending.pop(other, None)
            self.run.introduced(self._id(other), self._now)
            return
        self._pending[other] = self._now + REQUEST_DEADLINE_S
        if linked:
            self._question(other)

    def _question(self, other: int) -> None:
        assert self.job.question is not None
        self.peer.swarm.call(self.peer, other, self.job.question, REQUEST_BYTES)

    def _close(self) -> None:
        self.over = True
        for event in self._events:
            if event.chunk is not None:
                self._settled(event.donor, event.chunk)
        for other in {other for other, _ in self._incoming}:
            self._forget(other)
        self.run.end()

    def _end(self) -> None:
        self._close()
        self.job.ended(self.transfer.done)
