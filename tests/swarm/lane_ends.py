"""The two ends of real lanes over loopback, for tests."""

from __future__ import annotations

import queue
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.swarm.lanes.frame import FrameHeader, FrameKind
from shoal.swarm.lanes.lane import Lane
from shoal.swarm.lanes.limits import LaneLimits
from shoal.swarm.lanes.queue import FrameQueue
from shoal.swarm.lanes.seal import LANE_ID_BYTES, LaneProposal, Opener, Sealer, accept_offer
from shoal.swarm.lanes.shared import SharedOffer

NEAR, FAR = PeerId("12D3KooWnear"), PeerId("12D3KooWfar")
WAIT_S = 30.0  # far beyond what anything here takes
NOTE = FrameHeader(kind=FrameKind.REQUEST, length=5, chunk=9)


@dataclass
class RecordingSink:
    """Keeps copies of what arrives; bulk frames go to `regions[chunk]`."""

    regions: dict[int, bytearray] = field(default_factory=dict)
    frames: queue.Queue[tuple[FrameHeader, bytes]] = field(default_factory=queue.Queue)
    closed: queue.Queue[NetworkError | RemoteError | None] = field(default_factory=queue.Queue)
    raises: Exception | None = None
    keep_payloads: bool = True

    def region(self, peer: PeerId, header: FrameHeader) -> memoryview | None:
        chunk = self.regions.get(header.chunk)
        if chunk is None:
            return None
        return memoryview(chunk)[header.offset : header.offset + header.length]

    def received(self, peer: PeerId, header: FrameHeader, payload: memoryview) -> None:
        if self.raises is not None:
            raise self.raises
        self.frames.put((header, bytes(payload) if self.keep_payloads else b""))

    def lane_closed(self, peer: PeerId, error: NetworkError | RemoteError | None) -> None:
        self.closed.put(error)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    far.settimeout(WAIT_S)
    return near, far


def agree() -> tuple[tuple[Sealer, Opener], tuple[Sealer, Opener]]:
    """The near and the far end's sealer and opener."""
    proposal = LaneProposal(me=NEAR, peer=FAR, swarm_id=b"s")
    answer, theirs = accept_offer(proposal.offer, me=FAR, peer=NEAR, swarm_id=b"s", addresses=("127.0.0.1:1",))
    ours = proposal.keys(answer)
    return (
        (Sealer(ours.send_key), Opener(ours.receive_key, peer=FAR)),
        (Sealer(theirs.send_key), Opener(theirs.receive_key, peer=NEAR)),
    )


def make_lane(
    connection: socket.socket,
    ends: tuple[Sealer, Opener],
    sink: RecordingSink,
    *,
    peer: PeerId = FAR,
    limits: LaneLimits | None = None,
    queue: FrameQueue | None = None,
    share: Callable[[Lane, SharedOffer], None] | None = None,
) -> Lane:
    lane = Lane(
        connection,
        peer=peer,
        sealer=ends[0],
        opener=ends[1],
        sink=sink,
        limits=limits or LaneLimits(),
        dialled=True,
        queue=queue,
    )
    lane.id, lane.share = bytes(LANE_ID_BYTES), share
    lane.start()
    return lane


@contextmanager
def two_lanes(
    limits: LaneLimits | None = None, *, far_limits: LaneLimits | None = None
) -> Iterator[tuple[Lane, RecordingSink, Lane, RecordingSink]]:
    connections, ends, sinks = tcp_pair(), agree(), (RecordingSink(), RecordingSink())
    lanes: list[Lane] = []

    def share(lane: Lane, offer: SharedOffer) -> None:
        """What the two nodes would say to each other over libp2p."""
        other = lanes[1 - lanes.index(lane)]
        taken = False
        with suppress(NetworkError):
            other.take_memory(offer)
            taken = True
        lane.answered(taken)

    near = make_lane(connections[0], ends[0], sinks[0], limits=limits, share=share)
    far = make_lane(connections[1], ends[1], sinks[1], peer=NEAR, limits=far_limits or limits, share=share)
    lanes += [near, far]
    try:
        yield near, sinks[0], far, sinks[1]
    finally:
        for lane in (near, far):
            lane.abort()
            assert lane.join(WAIT_S)
