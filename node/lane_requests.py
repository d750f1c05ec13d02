"""A node's lanes, and how they are asked for: one request over libp2p, answered by the peer's pool."""

from __future__ import annotations

from shoal.node.config import NodeConfig
from shoal.protocol.identity import PeerId
from shoal.swarm.host import Host
from shoal.swarm.lanes.lane import FrameSink
from shoal.swarm.lanes.limits import LaneLimits, RateLimit
from shoal.swarm.lanes.pool import LanePool
from shoal.swarm.questions import REQUEST_DEADLINE_S
from shoal.swarm.streams import MessageStream

LANE_PROTOCOL = "/shoal/lane/1"
LANE_REQUEST_LIMIT_BYTES = 64 << 10


def lane_pool_of(config: NodeConfig, *, me: PeerId, host: Host, sink: FrameSink) -> LanePool:
    """The lanes that a configuration asks for, requested through `host`. Frames go to `sink`."""

    async def request(peer: PeerId, offer: bytes) -> bytes:
        return await host.request(
            peer, LANE_PROTOCOL, offer, deadline_s=REQUEST_DEADLINE_S, limit_bytes=LANE_REQUEST_LIMIT_BYTES
        )

    return LanePool(
        me=me,
        swarm_id=config.manifest.swarm_id,
        sink=sink,
        listen=config.lane_listen,
        request=request,
        limits=LaneLimits(
            upload=_cap(config.max_upload), download=_cap(config.max_download), shares=config.shared_memory
        ),
    )


async def answer_lane_request(lanes: LanePool, stream: MessageStream) -> None:
    """Answer the request of an admitted peer. Raises as `LanePool.answer` and `MessageStream` do."""
    offer = await stream.receive(deadline_s=REQUEST_DEADLINE_S)
    await stream.send(await lanes.answer(stream.peer, offer), deadline_s=REQUEST_DEADLINE_S)
    await stream.aclose()


def _cap(bytes_per_s: int | None) -> RateLimit | None:
    return None if bytes_per_s is None else RateLimit(bytes_per_s)
