"""Contributions to past rounds, shown to auditors over the lanes: both sides.

    auditor       REQUEST (space CONTRIBUTION, the first bytes of a root, a chunk)  ──►  contributor
                  ◄── STATE …, or REFUSED, once it is its turn

What is asked for waits at the contributor until no reduction is under way there, and until what went before is paid
for: `rate` bytes per second go to auditors, no more. Both waits are bounded, and so is the queue. An auditor asks in a
pause of its own, and asks all contributors to a chunk at once.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import trio

from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.swarm.lanes.chunks import ChunkExchange, ChunkRef, ChunkSpace, LaneBroke
from shoal.swarm.lanes.frame import SCOPE_BYTES
from shoal.swarm.lanes.pool import LanePool

QUEUE_LIMIT = 256
QUEUE_PER_PEER_LIMIT = 32
"""Chunks that are asked for and wait; what is asked beyond that is refused."""
PAUSE_TIMEOUT_S = 10.0
"""So long the end of a reduction is waited for: where one follows upon another, there is no pause."""
ALLOWANCE_TIMEOUT_S = 30.0
"""Limit on the wait for bytes to be paid for; a request that would have to wait longer is refused."""
LANE_DEADLINE_S = 10.0
FETCH_DEADLINE_S = 60.0
"""For all that is asked for at once."""

logger = logging.getLogger(__name__)


class Pause:
    """Pause of fetching while a reduction is under way here. Use from trio's thread."""

    def __init__(self) -> None:
        self._quiet = trio.Event()
        self._quiet.set()

    def begin(self) -> None:
        """Begin the pause: the reduction is over."""
        self._quiet.set()

    def end(self) -> None:
        """End the pause: a reduction begins."""
        if self._quiet.is_set():
            self._quiet = trio.Event()

    async def wait(self) -> None:
        """Return in a pause, or after PAUSE_TIMEOUT_S. Cancellation: nothing is changed."""
        with trio.move_on_after(PAUSE_TIMEOUT_S):
            await self._quiet.wait()


class ContributionServer:
    """Shows this node's contributions.

    held: the payload of a chunk under the root that begins with these bytes, if it may be shown. rate: bytes per
    second that auditors may have, asked for each chunk anew.
    """

    def __init__(
        self,
        chunks: ChunkExchange,
        pause: Pause,
        *,
        held: Callable[[bytes, int], memoryview | None],
        rate: Callable[[], float],
    ) -> None:
        self._chunks = chunks
        self._pause = pause
        self._held = held
        self._rate = rate
        self._token: trio.lowlevel.TrioToken | None = None
        self._waiting: Counter[PeerId] = Counter()
        self._send, self._receive = trio.open_memory_channel[tuple[PeerId, ChunkRef]](QUEUE_LIMIT)
        self._paid_at = float("-inf")

    async def run(self) -> None:
        """Serve what is asked for, one chunk after the other, until cancelled."""
        self._token = trio.lowlevel.current_trio_token()
        self._chunks.takes_up = self._takes_up
        async for peer, ref in self._receive:
            await self._pause.wait()
            await trio.sleep_until(self._paid_at)
            self._waiting[peer] -= 1
            if not self._waiting[peer]:
                del self._waiting[peer]
            data = self._held(ref.scope, ref.chunk)
            self._serve(peer, ref, data)
            if data is not None:
                self._paid_at = max(self._paid_at, trio.current_time()) + len(data) / self._rate()

    def _takes_up(self, peer: PeerId, ref: ChunkRef) -> bool:
        """Take up a request, in a lane's thread; False for one of another kind."""
        if ref.space is not ChunkSpace.CONTRIBUTION or self._token is None:
            return False
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._take, peer, ref)
        return True

    def _take(self, peer: PeerId, ref: ChunkRef) -> None:
        owed_s = self._paid_at - trio.current_time()
        if self._waiting[peer] < QUEUE_PER_PEER_LIMIT and owed_s <= ALLOWANCE_TIMEOUT_S:
            try:
                self._send.send_nowait((peer, ref))
            except trio.WouldBlock:
                pass
            else:
                self._waiting[peer] += 1
                return
        self._serve(peer, ref, None)

    def _serve(self, peer: PeerId, ref: ChunkRef, data: memoryview | None) -> None:
        try:
            self._chunks.serve(peer, ref, data)
        except NetworkError as error:
            logger.debug("an auditor is gone: %s", error)


class Wanted(NamedTuple):
    """A chunk of the contribution of `peer` with that root, and how many bytes its payload has."""

    peer: PeerId
    root: bytes
    chunk: int
    size: int

    @property
    def ref(self) -> ChunkRef:
        """Name of the chunk on the lanes."""
        return ChunkRef(ChunkSpace.CONTRIBUTION, self.root[:SCOPE_BYTES], self.chunk)


class ContributionFetch:
    """Fetches others' contributions. What comes is not believed here: its caller checks it."""

    def __init__(self, lanes: LanePool, chunks: ChunkExchange, pause: Pause) -> None:
        self._lanes = lanes
        self._chunks = chunks
        self._pause = pause

    async def payloads(self, wanted: Sequence[Wanted]) -> dict[Wanted, bytes]:
        """Fetch contributions' chunks within FETCH_DEADLINE_S; at most QUEUE_PER_PEER_LIMIT of one peer.

        Raises NetworkError if too much is being fetched already.

        Cancellation: what still arrives is dropped.
        """
        await self._pause.wait()
        found: dict[tuple[PeerId, ChunkRef], bytes] = {}

        def take(peer: PeerId, ref: ChunkRef, data: memoryview, digest: bytes | None = None) -> None:
            found[peer, ref] = bytes(data)

        with self._chunks.fetch(take) as fetch:
            awaited = set[tuple[PeerId, ChunkRef]]()
            with trio.move_on_after(FETCH_DEADLINE_S):
                for one in wanted:
                    try:
                        await self._lanes.ensure(one.peer, deadline_s=LANE_DEADLINE_S)
                        fetch.ask(one.peer, one.ref, one.size)
                        awaited.add((one.peer, one.ref))
                    except (NetworkError, RemoteError) as error:
                        logger.info("%s shows no contribution: %s", one.peer, error)
                while awaited:
                    event = await fetch.next()
                    if isinstance(event, LaneBroke):
                        awaited = {key for key in awaited if key[0] != event.peer}
                    elif event is not None:
                        awaited.discard((event.peer, event.ref))
        return {one: found[one.peer, one.ref] for one in wanted if (one.peer, one.ref) in found}
