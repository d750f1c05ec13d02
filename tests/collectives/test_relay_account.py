"""What a relay says of the ways that it passes, from frames of real reductions."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from msgspec.structs import replace

from shoal.collectives.frame_relay import RelayWatch
from shoal.collectives.traffic import PASS_ON, PASSED_ON, PAYLOADS
from shoal.node.rounds.pace import planned_ways
from shoal.protocol.errors import RemoteError
from shoal.protocol.messages import ChunkResults, Relay
from shoal.swarm.lanes.frame import FRAME_LIMIT_BYTES, FrameHeader, FrameKind
from tests.collectives.reduce_lab import peer
from tests.collectives.test_traffic_relays import apart, four, mend, rerouted
from tests.collectives.traffic_lab import Net, assert_exact, begin_all, header_of

STALL_S = 2.0
LOOK_S = 0.5
RELAY = Relay(0, 1, 2)

Said = dict[tuple[int, int], tuple[bool, bool, bool]]
FINE, NO_FINALS = (True, True, True), (True, True, False)
NOTHING_CAME, NOT_TAKEN = (False, True, False), (True, False, False)


class Relaying:
    """Four nodes, of which 0 and 1 are led through 2; what 2 says as time passes in which nothing else happens."""

    def __init__(self) -> None:
        self.net, self.given, self.plan = four(RELAY)
        apart(self.net, (0, 1))
        self.now = self.late_s = 0.0
        self.watch: RelayWatch | None = None

    def run(self) -> None:
        begin_all(self.net, self.plan, self.given)
        self.net.join()

    def says(self, seconds: float = STALL_S + LOOK_S) -> Said:
        node = self.net.nodes[2]
        account = node.traffic.account
        assert account is not None
        assert node.reduction is not None
        if self.watch is None:
            self.watch = RelayWatch(
                account,
                node.reduction,
                node.traffic.holding,
                stall_s=STALL_S,
                planned={},
                late_s=lambda: self.late_s,
            )
        ends_at = self.now + seconds
        ways = self.watch.look(self.now)
        while self.now < ends_at:
            self.now += LOOK_S
            ways = self.watch.look(self.now)
        return {(way.sender, way.receiver): (way.came, way.taken, way.finals) for way in ways}


def loses(*flags: int, kinds: frozenset[FrameKind] = PAYLOADS) -> Callable[[FrameHeader], bool]:
    return lambda header: header.flags in flags and header.kind in kinds


CONTRIBUTIONS, FINALS = frozenset({FrameKind.CONTRIBUTION}), frozenset({FrameKind.FINAL})


def test_pair_of_which_everything_came_and_went_is_cleared_at_once() -> None:
    swarm = Relaying()
    swarm.run()
    assert swarm.says(0.0) == {(0, 1): FINE, (1, 0): FINE}
    assert_exact(swarm.net, swarm.plan, swarm.given)


def test_who_sends_nothing_is_named_once_the_deadline_is_over() -> None:
    swarm = Relaying()
    swarm.net.lose = loses(PASS_ON | 1)
    swarm.run()
    assert swarm.says(0.0) == {(1, 0): NO_FINALS}, "1 cannot sum what it lacks, and has no finals yet"
    assert swarm.says() == {(0, 1): NOTHING_CAME, (1, 0): NO_FINALS}


def test_relay_that_runs_late_itself_names_who_sends_or_takes_nothing_only_later() -> None:
    swarm = Relaying()
    swarm.late_s = 3.0
    swarm.net.lose = loses(PASS_ON | 1)
    swarm.run()
    assert (0, 1) not in swarm.says()
    assert swarm.says(swarm.late_s)[0, 1] == NOTHING_CAME


def test_who_sends_contributions_and_no_finals_is_named() -> None:
    """Those of 1 that the relay has; so it cannot be that there are none yet."""
    swarm = Relaying()
    swarm.net.lose = loses(PASS_ON | 0, kinds=FINALS)
    swarm.run()
    assert swarm.says(0.0) == {(0, 1): FINE, (1, 0): NO_FINALS}
    assert swarm.says() == {(0, 1): FINE, (1, 0): NOTHING_CAME}


def test_who_sends_half_of_it_is_named() -> None:
    swarm = Relaying()
    swarm.net.lose = lambda header: loses(PASS_ON | 0)(header) and header.chunk == 0 and header.kind in CONTRIBUTIONS
    swarm.run()
    assert swarm.says()[1, 0] == NOTHING_CAME


def test_who_takes_nothing_is_named_and_not_who_sends_no_more_for_it() -> None:
    swarm = Relaying()
    swarm.net.queued[peer(2), peer(1)] = []  # a lane that takes what is posted, and sends nothing
    kept: list[memoryview] = []
    take = swarm.net.nodes[2].traffic.holding.take

    def taking(way: tuple[str, str], size: int, **more: float) -> memoryview | None:
        memory = take(way, size, **more)  # type: ignore[arg-type]
        kept.append(memory)  # type: ignore[arg-type]
        return memory

    swarm.net.nodes[2].traffic.holding.take = taking  # type: ignore[method-assign, assignment]
    swarm.net.lose = loses(PASSED_ON | 0, PASS_ON | 0)
    swarm.run()
    assert kept
    assert swarm.says()[0, 1] == NOT_TAKEN
    assert swarm.says()[1, 0] == NOTHING_CAME


def test_final_that_is_none_is_held_against_its_sender_at_once_and_stalls_nobody_else() -> None:
    """Who gets it would wait for it anew, and the relay would say that it came."""
    swarm = Relaying()
    swarm.net.alter = lambda header, data: (
        bytes([data[0] ^ 1]) + data[1:] if (header.flags, header.kind) == (PASS_ON | 0, FrameKind.FINAL) else data
    )
    swarm.run()
    swarm.net.join()
    assert swarm.says(0.0)[1, 0] == NOTHING_CAME
    assert swarm.says(0.0)[0, 1] == FINE


def test_contribution_that_is_wrong_stalls_nobody_and_is_not_held_against_who_relays_it() -> None:
    swarm = Relaying()
    swarm.net.alter = lambda header, data: (
        bytes(len(data)) if (header.flags, header.kind) == (PASS_ON | 1, FrameKind.CONTRIBUTION) else data
    )
    swarm.run()
    assert swarm.says(0.0) == {(0, 1): FINE, (1, 0): FINE}


@pytest.mark.parametrize(
    ("offset", "length"), [(1, 100), (0, 100), (0, 1), (FRAME_LIMIT_BYTES, 100), (FRAME_LIMIT_BYTES << 9, 1)]
)
def test_frame_into_which_no_payload_is_cut_is_not_passed_on(offset: int, length: int) -> None:
    """Many small ones would have the whole payload refused that comes after them."""
    swarm = Relaying()
    node = swarm.net.nodes[2]
    swarm.net.begin(node, swarm.plan, swarm.given[2])
    for kind, chunk in ((FrameKind.CONTRIBUTION, 1), (FrameKind.FINAL, 0), (FrameKind.FINAL, 99)):
        header = replace(
            header_of(swarm.plan, kind, chunk), flags=PASS_ON | 1, offset=offset, length=length, total=1 << 30
        )
        with pytest.raises(RemoteError, match="no payload is cut into") as caught:
            node.traffic.region(peer(0), header)
        assert caught.value.peer == peer(0)


def test_nothing_is_said_for_the_way_to_whom_a_lane_failed() -> None:
    """What was on it may be lost, and whose fault that is the relay cannot say."""
    swarm = Relaying()
    swarm.run()
    swarm.net.nodes[2].traffic.lane_failed(peer(1))
    assert swarm.says() == {(1, 0): FINE}


def test_account_goes_on_where_a_revision_leads_a_pair_the_same_way() -> None:
    """What came need not come again, and does not."""
    swarm = Relaying()
    swarm.run()
    plan = rerouted(swarm.plan, RELAY, Relay(0, 3, 2))
    for node in swarm.net.nodes:
        swarm.net.revise(node, plan)
    said = swarm.says()
    assert (said[0, 1], said[1, 0]) == (FINE, FINE)


def test_pair_that_is_led_through_another_begins_anew() -> None:
    net, given, plan = four()
    apart(net, (0, 1))
    begin_all(net, plan, given)
    net.join()
    revised = rerouted(plan, RELAY)
    for node in net.nodes:
        net.revise(node, revised)
    swarm = Relaying()
    swarm.net, swarm.plan = net, revised
    assert swarm.says()[0, 1] == NOTHING_CAME
    mend(net.nodes)
    net.join()
    assert swarm.says(LOOK_S) == {(0, 1): FINE, (1, 0): FINE}
    assert_exact(net, revised, given)


def test_finals_that_stand_are_nothing_that_a_relay_can_vouch_for() -> None:
    """Who said that it has them is not sent them."""
    swarm = Relaying()
    swarm.run()
    result = swarm.net.nodes[0].reduction.result().chunks[0].result  # type: ignore[union-attr]
    standing = (ChunkResults.of(0, {0: result}),)
    plan = msgspec.structs.replace(rerouted(swarm.plan, RELAY), standing=standing)
    swarm.net.revise(swarm.net.nodes[2], plan)
    assert swarm.says() == {(0, 1): NO_FINALS, (1, 0): FINE}


def test_broken_frame_through_a_relay_does_not_end_the_lane_to_it() -> None:
    net, given, plan = four(RELAY)
    node = net.nodes[1]
    net.begin(node, plan, given[1])
    header = replace(header_of(plan, FrameKind.FINAL, 99), flags=PASSED_ON | 0)
    assert node.traffic.region(peer(2), header) is None
    with pytest.raises(RemoteError):
        node.traffic.region(peer(2), replace(header, flags=0))


def test_ways_are_planned_with_the_rates_of_their_ends() -> None:
    _, _, plan = four(RELAY)
    rates = [(100, 900), (600, 300), (1, 1), (0, 0)]
    participants = tuple(
        msgspec.structs.replace(p, upload=up, download=down)
        for p, (up, down) in zip(plan.participants, rates, strict=True)
    )
    plan = msgspec.structs.replace(plan, participants=participants)
    ways = [(peer(0), peer(1)), (peer(1), peer(0)), (peer(3), peer(0))]
    assert planned_ways(plan, ways) == {ways[0]: 100 / 3, ways[1]: 600 / 3, ways[2]: 900 / 3}


def test_relay_counts_ways_only_that_lead_through_it() -> None:
    net: Net
    net, given, plan = four(RELAY)
    apart(net, (0, 1))
    begin_all(net, plan, given)
    net.join()
    accounts = [node.traffic.account for node in net.nodes]
    assert [account is not None for account in accounts] == [False, False, True, False]
