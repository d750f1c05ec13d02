"""Which lane takes a frame: values of the rule, and lanes of real sockets that leave frames to each other."""

from __future__ import annotations

import contextlib
import queue
import socket

import pytest

from shoal.protocol.identity import PeerId
from shoal.swarm.lanes import lane
from shoal.swarm.lanes.frame import FrameHeader, FrameKind
from shoal.swarm.lanes.limits import LaneLimits
from shoal.swarm.lanes.queue import OVERDUE, OVERDUE_LEAST_S, Lineup
from shoal.swarm.lanes.socket import Path, path_of
from tests.swarm.lane_ends import NEAR, WAIT_S, RecordingSink, agree, make_lane, tcp_pair

FRAME = 512 * 1024
WARM = Path(rtt_s=0.15, bytes_per_s=10_000_000)
COLD = Path(rtt_s=0.15, bytes_per_s=96_500)
"""Ten packets a round trip."""


def takes(lineup: Lineup, lane: str, path: Path, *, now: float = 0.0, waiting: int = FRAME) -> bool:
    return lineup.takes(lane, path, now, size=FRAME, waiting=waiting)


def test_seconds_are_a_round_trip_and_the_time_for_all_that_is_to_go() -> None:
    assert Path(0.1, 1_000_000).seconds(200_000) == pytest.approx(0.3)
    assert Path(0.1, 1_000_000, unsent_bytes=300_000).seconds(200_000) == pytest.approx(0.6)


def test_lane_that_is_alone_takes_whatever_waits() -> None:
    assert takes(Lineup(), "cold", COLD)


def test_cold_lane_takes_of_a_long_queue_and_leaves_its_end_to_the_warm() -> None:
    lineup = Lineup()
    assert takes(lineup, "warm", WARM)
    slack_s = COLD.seconds(FRAME) - WARM.seconds(FRAME)
    others_per_s = WARM.bytes_per_s
    assert not takes(lineup, "cold", COLD, waiting=int(0.99 * slack_s * others_per_s))
    assert takes(lineup, "cold", COLD, waiting=int(1.01 * slack_s * others_per_s))


def test_equal_lanes_all_take() -> None:
    lineup = Lineup()
    assert [takes(lineup, lane, WARM, waiting=FRAME) for lane in "abc"] == [True] * 3


def test_lane_with_much_unsent_leaves_the_last_frame() -> None:
    lineup = Lineup()
    assert takes(lineup, "free", WARM)
    lineup.rests("free")
    full = Path(WARM.rtt_s, WARM.bytes_per_s, unsent_bytes=4_000_000)
    assert not takes(lineup, "full", full, waiting=FRAME)
    assert lineup.someone_else_would("full", 0.0, size=FRAME, waiting=FRAME)


def test_only_a_resting_lane_that_would_take_the_frame_is_to_be_woken() -> None:
    lineup = Lineup()
    assert takes(lineup, "warm", WARM)
    assert not takes(lineup, "cold", COLD)
    assert not takes(lineup, "colder", Path(0.3, 48_250))
    assert not lineup.someone_else_would("cold", 0.0, size=FRAME, waiting=FRAME), "the warm one is sending"
    lineup.rests("warm")
    assert lineup.someone_else_would("cold", 0.0, size=FRAME, waiting=FRAME)
    lineup.goes("warm")
    assert takes(lineup, "cold", COLD)
    assert not lineup.someone_else_would("colder", 0.0, size=FRAME, waiting=FRAME)


def test_nobody_leaves_a_frame_to_a_lane_that_is_stuck() -> None:
    lineup, due_s = Lineup(), max(OVERDUE_LEAST_S, OVERDUE * WARM.seconds(FRAME))
    assert takes(lineup, "stuck", WARM, now=100.0)
    assert not takes(lineup, "cold", COLD, now=100.0 + 0.99 * due_s)
    assert takes(lineup, "cold", COLD, now=100.0 + 1.01 * due_s)
    lineup.rests("stuck")
    lineup.rests("cold")
    assert not takes(lineup, "cold", COLD, now=200.0), "it was only slow"


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="the system has no TCP_INFO")
def test_path_is_what_the_kernel_knows_of_a_connection() -> None:
    near, far = tcp_pair()
    with near, far:
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        path = path_of(near)
        assert path is not None
        assert 0 < path.rtt_s < 1
        assert path.bytes_per_s > 1000  # at least ten packets in a second
        assert path.unsent_bytes == 0
        near.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while near.send(bytes(1 << 20)):
                pass
        full = path_of(near)
        assert full is not None
        assert full.unsent_bytes > 4096
    assert path_of(near) is None


class Numbered(RecordingSink):
    """Says of each frame over which lane it came."""

    def __init__(self, number: int, arrivals: queue.Queue[int]) -> None:
        super().__init__()
        self._number, self._arrivals = number, arrivals

    def received(self, peer: PeerId, header: FrameHeader, payload: memoryview) -> None:
        self._arrivals.put(self._number)


def test_lanes_of_a_queue_leave_its_frames_to_the_warm_one_and_take_them_when_it_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Real lanes: only what they are told of their connections is made up."""
    frames, shared = 40, LaneLimits().queue()
    header = FrameHeader(kind=FrameKind.REQUEST, length=1000)
    arrivals: queue.Queue[int] = queue.Queue()
    paths: dict[int, Path] = {}
    monkeypatch.setattr(lane, "path_of", lambda connection: paths.get(connection.fileno(), COLD))
    with contextlib.ExitStack() as cleaning:
        lanes = []
        for number, path in enumerate((COLD, WARM, COLD)):
            near, far = tcp_pair()
            paths[near.fileno()] = path
            ours, theirs = agree()
            sink = Numbered(number, arrivals)
            ends = make_lane(near, ours, RecordingSink(), queue=shared), make_lane(far, theirs, sink, peer=NEAR)
            for end in ends:
                cleaning.callback(end.join, WAIT_S)
                cleaning.callback(end.abort)
            lanes.append(ends[0])
        cold, warm, _ = lanes

        def send() -> int:
            (warm if warm.usable else cold).post(header, bytes(header.length))
            return arrivals.get(timeout=WAIT_S)

        for _ in range(1000):
            if len(shared.lineup._paths) == len(lanes):  # each has looked at what waits once
                break
            send()
        assert {send() for _ in range(frames)} == {1}
        warm.close()
        assert 1 not in {send() for _ in range(frames)}
