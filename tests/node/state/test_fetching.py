"""Who is introduced as a donor, and who is not any more."""

from __future__ import annotations

from typing import Any

import trio
import trio.testing

from shoal.node.state.fetching import INTRODUCTION_LIMIT, Fetcher, Job, _Run
from shoal.node.state.transfer import DonorScores
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerId
from shoal.swarm.lanes.chunks import ChunkFailed, ChunkRef, ChunkSpace, LaneBroke

DONOR = PeerId("donor")
REF = ChunkRef(ChunkSpace.ANCHOR, bytes(8), 0)


class Fetch:
    """Requests that nobody hears."""

    def forget(self, peer: PeerId, ref: ChunkRef | None = None) -> None: ...

    def wake(self) -> None: ...


class Lanes:
    async def ensure(self, peer: PeerId, *, deadline_s: float) -> None: ...


def test_donor_whose_lane_breaks_is_introduced_again_unless_it_sent_wrong_bytes() -> None:
    introduced: list[PeerId] = []

    async def introduce(peer: PeerId) -> None:
        introduced.append(peer)

    async def on_progress(done: int, total: int) -> None: ...

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
