"""What a relay holds of frames for others: bounded however slow they are, and nothing is lost for it."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.collectives import frame_relay
from shoal.collectives.frame_relay import HELD_LIMIT_BYTES, WINDOW_LIMIT_BYTES, Holding, Window, window_bytes
from shoal.collectives.grid import Grid
from shoal.collectives.traffic import PASS_ON, PASSED_ON
from shoal.protocol.messages import Relay
from shoal.swarm.lanes.frame import BULK_KINDS, FRAME_LIMIT_BYTES, FrameHeader, FrameKind
from tests.collectives.reduce_lab import peer
from tests.collectives.test_traffic_relays import apart, four, rerouted
from tests.collectives.traffic_lab import Net, assert_exact, begin_all

WAIT_S = 60.0
WAY, OTHER_WAY = (peer(0), peer(1)), (peer(1), peer(0))
FRAMES = 4
"""Of one chunk, so twice as many go each way: of a contribution, and of finals."""
FEW = 2 * FRAME_LIMIT_BYTES
"""A window of two frames."""


# -- the relay's memory --------------------------------------------------------------------------------------


def test_memory_is_held_until_nobody_refers_to_it_and_counted_as_let_go_then() -> None:
    holding = Holding()
    memory = holding.take(WAY, 1000, window=1000)
    assert memory is not None
    assert (memory.nbytes, memory.readonly, holding.held_bytes, holding.let_go(WAY)) == (1000, False, 1000, 0)
    part = memory.cast("B")[10:20]
    del memory
    assert (holding.held_bytes, holding.let_go(WAY)) == (1000, 0), "a part of it is queued still"
    del part
    assert (holding.held_bytes, holding.let_go(WAY), holding.let_go(OTHER_WAY)) == (0, 1000, 0)
    assert not holding._held


def test_who_sends_more_than_its_windows_waits_for_room_and_no_other_way_does() -> None:
    holding = Holding()
    held = [holding.take(WAY, 500, window=500) for _ in range(2)]
    other = holding.take(OTHER_WAY, 500, window=500, timeout_s=0.0)
    assert other is not None
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(holding.take, WAY, 500, window=500, timeout_s=WAIT_S)
        assert not waiting.done()
        held.pop()
        assert waiting.result(WAIT_S) is not None
        assert (holding.let_go(WAY), holding.held_bytes) == (500, 1500)


def test_frame_for_which_there_is_no_room_for_long_is_dropped_and_counts_as_let_go() -> None:
    holding = Holding(limit_bytes=1500)
    held = [holding.take(way, 500, window=500) for way in (WAY, WAY, OTHER_WAY)]
    for way in (WAY, OTHER_WAY):  # one has its windows full, and all together have as much as is held at all
        assert holding.take(way, 500, window=500, timeout_s=0.01) is None
        assert holding.let_go(way) == 500
    assert holding.held_bytes == sum(one.nbytes for one in held if one is not None) == 1500


def test_nobody_waits_for_room_when_the_reduction_is_over() -> None:
    holding = Holding()
    held = [holding.take(WAY, 500, window=500) for _ in range(2)]
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(holding.take, WAY, 500, window=500, timeout_s=WAIT_S)
        holding.begin()
        assert waiting.result(WAIT_S) is None
    assert (holding.let_go(WAY), holding.held_bytes) == (0, 1000), "of the next nothing is let go yet"
    del held
    assert (holding.let_go(WAY), holding.held_bytes) == (0, 0)


def test_windows_of_all_ways_are_half_of_what_a_relay_holds_at_most() -> None:
    assert window_bytes(0) == window_bytes(2) == window_bytes(8) == WINDOW_LIMIT_BYTES
    assert 2 * 20 * window_bytes(20) <= HELD_LIMIT_BYTES < 2 * 20 * WINDOW_LIMIT_BYTES
    assert window_bytes(10_000) == FRAME_LIMIT_BYTES, "a frame can always be sent"


# -- the sender's window -------------------------------------------------------------------------------------


def waiting(*sizes: int) -> Window[int]:
    window = Window[int](1000)
    for number, size in enumerate(sizes):
        window.waiting.append((FrameHeader(kind=FrameKind.REQUEST, length=size), memoryview(bytes(size)), number))
    return window


def sent(window: Window[int]) -> list[int]:
    found = []
    while (frame := window.next()) is not None:
        found.append(frame[2])
    return found


def test_window_lets_through_what_the_relay_has_let_go() -> None:
    window = waiting(600, 400, 1, 999, 5000, 10)
    assert sent(window) == [0, 1]
    window.hear(0)
    window.hear(600)
    assert sent(window) == [2]
    window.hear(600)
    assert sent(window) == [], "it counts once"
    window.hear(1001)
    assert sent(window) == [3]
    window.hear(2000)
    assert sent(window) == [4], "one that is larger than the window goes alone"
    window.hear(None)
    assert sent(window) == [5], "a relay that does not say holds nobody up"


def test_window_forgets_what_may_be_lost() -> None:
    window = waiting(600, 400, 300, 300)
    assert sent(window) == [0, 1]
    assert window.clear() == [2, 3]
    window.hear(1000)  # of before
    window.waiting.extend(waiting(900, 200).waiting)
    assert sent(window) == [0]
    window.hear(900)
    assert sent(window) == [], "the relay began anew"
    window.hear(1800)
    assert sent(window) == [1]


# -- reductions ----------------------------------------------------------------------------------------------


class SlowLane:
    """The relay's lane to one of a pair, which takes a frame only when told to. Payloads are kept, not copied."""

    def __init__(self, net: Net) -> None:
        self._net = net
        self._frames: deque[tuple[FrameHeader, memoryview]] = deque()
        self._post = net.poster(peer(2))
        self.most_bytes = 0
        holding = net.nodes[2].traffic.holding
        net.nodes[2].traffic._post = self.post
        self._holding = holding

    def post(self, to: object, header: FrameHeader, payload: memoryview | bytes) -> None:
        if to == peer(1) and header.flags == PASSED_ON | 0 and header.kind in BULK_KINDS:
            self._frames.append((header, memoryview(payload)))
            self.most_bytes = max(self.most_bytes, self._holding.held(WAY))  # the other way has its own window
        else:
            self._post(to, header, payload)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._frames)

    def take(self) -> None:
        header, payload = self._frames.popleft()
        self._post(peer(1), header, payload)


def big() -> Grid:
    values = FRAMES * FRAME_LIMIT_BYTES - 10_000  # of a byte each
    return Grid(4 * values, values)


def tell_let_go(net: Net) -> bool:
    """As who keeps frames back asks for; whether anybody does."""
    asked = False
    for node in net.nodes:
        for to, via, scope in node.traffic.kept_back():
            relay = next(one for one in net.nodes if one.peer == via).traffic
            node.traffic.hear_let_go(to, via, scope, relay.let_go(scope, node.peer, to))
            asked = True
    return asked


def test_relay_holds_a_window_of_what_goes_to_a_slow_one_and_every_value_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frame_relay, "WINDOW_LIMIT_BYTES", FEW)
    net, given, plan = four(Relay(0, 1, 2), grid=big())
    apart(net, (0, 1))
    lane = SlowLane(net)
    begin_all(net, plan, given)
    net.join()
    assert len(lane) == FEW // FRAME_LIMIT_BYTES, "the rest of the contribution has not left its sender"
    for _ in range(3):
        assert tell_let_go(net), "nothing is let go, and asking changes nothing"
        net.join()
        assert len(lane) == FEW // FRAME_LIMIT_BYTES
    taken = 0
    while len(lane):
        lane.take()
        taken += 1
        net.join()
        while tell_let_go(net):
            net.join()
            if len(lane) == FEW // FRAME_LIMIT_BYTES:
                break
        net.join()
    assert_exact(net, plan, given)
    assert taken >= 2 * FRAMES
    assert 0 < lane.most_bytes <= FEW
    assert net.nodes[2].traffic.holding.held_bytes == 0


def test_relay_reads_no_more_from_who_keeps_to_no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node of an earlier release, or one that means ill: its lane stands still, and nothing it sent is lost."""
    monkeypatch.setattr(frame_relay, "WINDOW_LIMIT_BYTES", FEW)
    net, given, plan = four(Relay(0, 1, 2), grid=big())
    apart(net, (0, 1))
    lane = SlowLane(net)
    with monkeypatch.context() as heedless:
        heedless.setattr(Window, "next", lambda self: self.waiting.popleft() if self.waiting else None)
        begin_all(net, plan, given)
        assert len(lane) <= 2 * FEW // FRAME_LIMIT_BYTES
        assert net.nodes[2].traffic.holding.held(WAY) <= 2 * FEW
        while any(thread.is_alive() for thread in net.threads) or len(lane):
            if len(lane):
                lane.take()
            assert net.nodes[2].traffic.holding.held(WAY) <= 2 * FEW
        assert_exact(net, plan, given)
    assert FEW < lane.most_bytes <= 2 * FEW


def test_what_was_kept_back_goes_another_way_when_a_revision_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_relay, "WINDOW_LIMIT_BYTES", FEW)
    net, given, plan = four(Relay(0, 1, 2), grid=big())
    apart(net, (0, 1))
    lane = SlowLane(net)
    begin_all(net, plan, given)
    net.join()
    assert net.nodes[0].traffic.kept_back() != ()
    revised = rerouted(plan, Relay(0, 1, 3))
    for node in net.nodes:
        net.revise(node, revised)
    assert net.nodes[0].traffic.kept_back() == ()
    deadline = threading.Event()
    for _ in range(200):
        net.join()
        for node in net.nodes:
            for owed in node.traffic.owed():
                node.traffic.post_again(owed)
        tell_let_go(net)
        if all(node.done.is_set() for node in net.nodes):
            break
        deadline.wait(0.01)
    assert_exact(net, revised, given)
    assert {header.flags for _, to, header, _ in net.frames if to == peer(3)} >= {PASS_ON | 1, PASS_ON | 0}
    assert len(lane) > 0, "what the first relay holds nobody waits for"


def test_relay_to_which_the_lane_breaks_is_sent_everything_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_relay, "WINDOW_LIMIT_BYTES", FEW)
    net, given, plan = four(Relay(0, 1, 2), grid=big())
    apart(net, (0, 1))
    lane = SlowLane(net)
    begin_all(net, plan, given)
    net.join()
    sender = net.nodes[0].traffic
    sender.lane_failed(peer(2))
    assert sender.owed() == {peer(1), peer(2)}
    for owed in sender.owed():
        sender.post_again(owed)
    most = 0
    while not net.nodes[1].done.is_set() or len(lane):
        net.join()
        most = max(most, net.nodes[2].traffic.holding.held_bytes)
        tell_let_go(net)
        if len(lane):
            lane.take()
    assert_exact(net, plan, given)
    assert FEW < most <= 2 * FEW, "what it held before, and a window anew"
