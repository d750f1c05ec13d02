"""Who is introduced as a donor, and who is not any more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from shoal.node.outcome import StateFetched
from shoal.node.state.chunk_requests import INTRODUCTION_LIMIT
from shoal.node.state.fetching import Fetcher, Job, _Run
from shoal.protocol.donors import DonorScores
from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.swarm.lanes.chunks import ChunkExchange, ChunkFailed, ChunkRef, ChunkSpace, LaneBroke

DONOR = PeerId("donor")
REF = ChunkRef(ChunkSpace.ANCHOR, bytes(8), 0)


class Fetch:
    """Requests that nobody hears."""

    def forget(self, peer: PeerId, ref: ChunkRef | None = None) -> None: ...

    def wake(self) -> None: ...


class Lanes:
    async def ensure(self, peer: PeerId, *, deadline_s: float) -> None: ...

    def moved(self, peer: PeerId) -> SimpleNamespace:
        return SimpleNamespace(received=0)


def test_donor_whose_lane_breaks_is_introduced_again_unless_it_sent_wrong_bytes() -> None:
    introduced: list[PeerId] = []

    async def introduce(peer: PeerId) -> None:
        introduced.append(peer)

    async def on_progress(fetched: StateFetched) -> None: ...

    async def breaks(*before: Any) -> int:
        introduced.clear()
        fetcher = Fetcher(lanes=Lanes(), chunks=None, scores=DonorScores())  # type: ignore[arg-type]
        job = Job(
            what="a state",
            wanted=[(REF, 1)],
            here=(),
            introduce=introduce,
            accept=lambda ref, data, digest: None,
            on_progress=on_progress,
        )
        run = _Run(fetcher, job, Fetch(), Lanes())  # type: ignore[arg-type]
        async with trio.open_nursery() as nursery:
            run._begin_introduction(nursery, DONOR)
            await trio.testing.wait_all_tasks_blocked()
            for event in (*before, LaneBroke(DONOR), LaneBroke(DONOR)):
                run._handle(event, nursery)
                await trio.testing.wait_all_tasks_blocked()
        return len(introduced)

    wrong = ChunkFailed(DONOR, REF, RemoteError("other bytes", peer=DONOR))
    assert trio.run(breaks) == INTRODUCTION_LIMIT
    assert trio.run(breaks, wrong) == 1


@pytest.mark.virtual_time
async def test_fetch_ends_when_the_lane_of_its_only_donor_goes_before_it_is_asked() -> None:
    """A lane that still stood when the donor was introduced: it owes nothing yet, so of its end nobody tells."""

    def post(*_: Any, **__: Any) -> None:
        raise NetworkError("there is no lane that takes a frame")

    async def on_progress(fetched: StateFetched) -> None: ...

    async def introduce(peer: PeerId) -> None: ...

    chunks = ChunkExchange(post=post, lookup=lambda ref: None)
    fetcher = Fetcher(lanes=Lanes(), chunks=chunks, scores=DonorScores())  # type: ignore[arg-type]
    job = Job(
        what="a state",
        wanted=[(REF, 1)],
        here=(),
        introduce=introduce,
        accept=lambda ref, data, digest: None,
        on_progress=on_progress,
    )
    with trio.fail_after(600), pytest.raises(NetworkError, match="no lane that takes a frame"):
        await fetcher.fetch(job, [DONOR])
