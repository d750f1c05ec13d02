"""Where the frames of all lanes go: to the reduction under way, or to the exchange of chunks."""

from __future__ import annotations

import logging
from collections.abc import Callable

from shoal.collectives.traffic import KINDS as PLAN_KINDS
from shoal.collectives.traffic import PlanTraffic
from shoal.protocol.errors import LocalError, NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.swarm.lanes.chunks import KINDS as CHUNK_KINDS
from shoal.swarm.lanes.chunks import ChunkExchange
from shoal.swarm.lanes.frame import FrameHeader

logger = logging.getLogger(__name__)


class FrameRouter:
    """The sink of all lanes; called in their threads."""

    def __init__(self) -> None:
        self._traffic: PlanTraffic | None = None
        self._chunks: ChunkExchange | None = None
        self._is_leaving: Callable[[PeerId], bool] = lambda peer: False

    def connect(
        self, traffic: PlanTraffic, chunks: ChunkExchange, *, is_leaving: Callable[[PeerId], bool] = lambda peer: False
    ) -> None:
        """Name the two parties, which need the lanes, which need this sink.

        parting: whether the end of a lane to a peer was to be expected. Called in the lanes' threads.
        """
        self._traffic, self._chunks, self._is_leaving = traffic, chunks, is_leaving

    def region(self, peer: PeerId, header: FrameHeader) -> memoryview | None:
        """Where a bulk frame's payload goes."""
        traffic, chunks = self._parties()
        if header.kind in PLAN_KINDS:
            return traffic.region(peer, header)
        return chunks.region(peer, header)

    def received(self, peer: PeerId, header: FrameHeader, payload: memoryview) -> None:
        """An authentic frame."""
        traffic, chunks = self._parties()
        if header.kind in PLAN_KINDS:
            traffic.received(peer, header, payload)
        elif header.kind in CHUNK_KINDS:
            chunks.received(peer, header)
        else:
            raise RemoteError(f"a frame of kind {header.kind.name} is of no use here", peer=peer)

    def lane_closed(self, peer: PeerId, error: NetworkError | RemoteError | None) -> None:
        """A lane ended."""
        if error is not None:
            logger.log(logging.DEBUG if self._is_leaving(peer) else logging.INFO, "a lane broke: %s", error)
            traffic, chunks = self._parties()
            traffic.lane_failed(peer)
            chunks.lane_closed(peer)

    def _parties(self) -> tuple[PlanTraffic, ChunkExchange]:
        if self._traffic is None or self._chunks is None:
            raise LocalError("frames before the daemon is assembled")
        return self._traffic, self._chunks
