"""Carries out a transfer: lanes to the donors, requests as `TransferRun` wants them, and what becomes of them.

Each donor is introduced in a task of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import trio

from shoal.node.outcome import StateFetched
from shoal.node.state.chunk_requests import LANE_DEADLINE_S, LOOK_S, Ask, TransferRun
from shoal.protocol.donors import DonorScores
from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.swarm.lanes.chunks import (
    RUN_LIMIT,
    ChunkArrived,
    ChunkExchange,
    ChunkFailed,
    ChunkFetch,
    ChunkRef,
    ChunkSpace,
    FetchEvent,
    LaneBroke,
    Places,
)
from shoal.swarm.lanes.pool import LanePool

PROGRESS_STEPS: Final = 8
PROGRESS_PERIOD_S: Final = 5.0
"""The steps of a large state, or over a slow link, take minutes."""

logger = logging.getLogger(__name__)

OnProgress = Callable[[StateFetched], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Chunks to fetch. `what` names them in errors. wanted: chunks and their sizes in bytes; here: those already here.

    introduce: returns if the peer holds it; raises NetworkError or RemoteError. accept: takes a chunk, in any thread,
    with its BLAKE3 hash if `hashing`; raises RemoteError if the bytes are wrong. places: where chunks are received, if
    not in a buffer. on_progress: told how much is here, of how much, at the start and the end, PROGRESS_STEPS times on
    the way, and where they are slow every PROGRESS_PERIOD_S; nothing more is asked for until it returns.
    """

    what: str
    wanted: Sequence[tuple[ChunkRef, int]]
    here: Collection[int]
    introduce: Callable[[PeerId], Awaitable[None]]
    accept: Callable[[ChunkRef, memoryview, bytes | None], None]
    on_progress: OnProgress
    places: Places | None = None
    hashing: bool = False


class Fetcher:
    """Fetches chunks from several peers at once, and remembers in `scores` how they did."""

    def __init__(self, *, lanes: LanePool, chunks: ChunkExchange, scores: DonorScores) -> None:
        self._lanes = lanes
        self._chunks = chunks
        self.scores = scores

    async def fetch(self, job: Job, peers: Sequence[PeerId]) -> dict[PeerId, int]:
        """Have all chunks of `job` accepted; returns who brought how many bytes.

        Raises NetworkError, which names everybody's reason, when nobody is left to ask.

        Cancellation: what was accepted stays with who accepted it; what still arrives is dropped.
        """
        with self._chunks.fetch(
            lambda peer, ref, data, digest: job.accept(ref, data, digest), job.places, hashing=job.hashing
        ) as fetch:
            run = _Run(self, job, fetch, self._lanes)
            async with trio.open_nursery() as nursery:
                await run.until_over(nursery, peers)
                nursery.cancel_scope.cancel()
        transfer = run.under_way.transfer
        for peer, reason in transfer.out.items():
            logger.info("%s: %s is asked no more: %s", job.what, peer, reason)
        if run.fault is not None:
            raise run.fault
        if not transfer.done:
            raise transfer.failure(job.what)
        return transfer.arrived_bytes


class _Run:
    """One transfer under way. `fault`: a bug that ended it."""

    def __init__(self, fetcher: Fetcher, job: Job, fetch: ChunkFetch, lanes: LanePool) -> None:
        self._job = job
        self._fetch = fetch
        self._lanes = lanes
        self._numbers = {ref: number for number, (ref, _) in enumerate(job.wanted)}
        self._shown, self._shown_at = -1, 0.0
        self._here_bytes = sum(job.wanted[number][1] for number in job.here)
        self.under_way = TransferRun([size for _, size in job.wanted], here=job.here, scores=fetcher.scores)
        self.fault: Exception | None = None

    async def until_over(self, nursery: trio.Nursery, peers: Sequence[PeerId]) -> None:
        """Return when all is here, or nobody is left, or there is a fault."""
        run = self.under_way
        await self._show()
        for peer in run.begin(peers, trio.current_time()):
            nursery.start_soon(self._introduce, peer)
        while not run.over and self.fault is None:
            self._ask()
            await self._rest()
            event = await self._next() if run.transfer.donors else await self._fetch.next()
            while event is not None:  # and all that came with it
                self._handle(event, nursery)
                await self._show()
                event = self._fetch.next_nowait()
            for peer in run.look(trio.current_time(), self._moved):
                self._fetch.forget(peer)
        run.end()

    def _ask(self) -> None:
        for donor, first, sizes in _runs(self.under_way.transfer.requests(trio.current_time()), self._job.wanted):
            try:
                self._fetch.ask(donor, first, *sizes)
            except NetworkError as error:  # the lane went this moment; of who owes nothing no end is told
                self._drop(donor, str(error))
                self._fetch.wake()

    async def _rest(self) -> None:
        rest = self.under_way.rest_s(trio.current_time())
        if rest:
            await self._fetch.rest(rest)

    async def _next(self) -> FetchEvent | None:
        """The next event; None if it is time to look at the donors."""
        with trio.move_on_after(LOOK_S):
            return await self._fetch.next()
        return None

    def _moved(self, peer: PeerId) -> tuple[int, int]:
        return self._fetch.moved_bytes(peer), self._lanes.moved(peer).received

    def _handle(self, event: FetchEvent, nursery: trio.Nursery) -> None:
        if isinstance(event, ChunkArrived):
            for other in self.under_way.transfer.arrived(event.peer, self._numbers[event.ref]):
                self._fetch.forget(other, event.ref)
        elif isinstance(event, ChunkFailed):
            self._failed(event)
        elif isinstance(event, LaneBroke):
            self._drop(event.peer, "its lane broke")
            self._begin_introduction(nursery, event.peer)

    def _failed(self, event: ChunkFailed) -> None:
        if not isinstance(event.error, NetworkError | RemoteError):
            self.fault = event.error
            return
        if self.under_way.failed(event.peer, event.error, trio.current_time()):
            logger.warning("%s from %s: %s", self._job.what, event.peer, event.error)
        self._fetch.forget(event.peer)

    def _drop(self, peer: PeerId, reason: str) -> None:
        self.under_way.transfer.drop(peer, reason)
        self._fetch.forget(peer)

    def _begin_introduction(self, nursery: trio.Nursery, peer: PeerId) -> None:
        if self.under_way.introduces(peer, trio.current_time()):
            nursery.start_soon(self._introduce, peer)

    async def _introduce(self, peer: PeerId) -> None:
        failed: NetworkError | RemoteError | None = None
        try:
            await self._job.introduce(peer)
            await self._lanes.ensure(peer, deadline_s=LANE_DEADLINE_S)
        except NetworkError as error:
            failed = error
        except RemoteError as error:
            logger.warning("%s from %s: %s", self._job.what, peer, error)
            failed = error
        self.under_way.introduced(peer, trio.current_time(), failed)
        self._fetch.wake()

    async def _show(self) -> None:
        total, transfer, now = len(self._job.wanted), self.under_way.transfer, trio.current_time()
        done = total - transfer.missing
        step = done * PROGRESS_STEPS // max(1, total)
        if step > self._shown or now >= self._shown_at + PROGRESS_PERIOD_S:
            self._shown, self._shown_at = step, now
            await self._job.on_progress(
                StateFetched(
                    done_chunks=done,
                    total_chunks=total,
                    done_bytes=self._here_bytes + sum(transfer.arrived_bytes.values()),
                    total_bytes=sum(size for _, size in self._job.wanted),
                )
            )


def _runs(asks: Sequence[Ask], wanted: Sequence[tuple[ChunkRef, int]]) -> Iterator[tuple[PeerId, ChunkRef, list[int]]]:
    """Join asks into as few requests as say the same: whom to ask, from which chunk on, and the sizes of the run."""
    donor, first, sizes = PeerId(""), ChunkRef(ChunkSpace.ANCHOR, b"", 0), list[int]()
    for ask in asks:
        ref, size = wanted[ask.chunk]
        follows = ask.donor == donor and ref == first._replace(chunk=first.chunk + len(sizes))
        if sizes and (not follows or len(sizes) == RUN_LIMIT):
            yield donor, first, sizes
            sizes = []
        if not sizes:
            donor, first = ask.donor, ref
        sizes.append(size)
    if sizes:
        yield donor, first, sizes


async def tell_nobody(fetched: StateFetched) -> None:
    """Progress that nobody watches."""
    await trio.lowlevel.checkpoint()
