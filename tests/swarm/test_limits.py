"""The bounds of the control plane: what a flood may cost, and that nobody else is turned away for it."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import trio
import trio.testing

from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import Identity, PeerId
from shoal.swarm import limits
from shoal.swarm.host import Host
from shoal.swarm.limits import Door, KnownHosts, Memory, Pace, PeerLimits, Reason, Refusals, UnprovenConnections
from shoal.swarm.streams import BACKLOG_LIMIT_BYTES, MessageStream
from tests.swarm.test_streams import framed, memory_pair

pytestmark = pytest.mark.virtual_time

MEMBER, STRANGER, EXPECTED = (PeerId(f"12D3KooW{name}") for name in ("member", "stranger", "expected"))


def is_member(peer: PeerId) -> bool:
    return peer == MEMBER


async def test_door_gives_each_address_its_share_and_more_later() -> None:
    refusals = Refusals()
    door = Door(refusals, per_s=(10, 100), address_per_s=(2, 20))
    assert [door.lets_in("flood") for _ in range(30)] == [True] * 20 + [False] * 10
    assert door.is_spent("flood")
    assert [door.lets_in("other"), *(door.is_spent("other") for _ in range(30))] == [True] + [False] * 30
    assert door.lets_in("other"), "to ask takes nothing"
    assert not door.is_spent("other")
    assert refusals.counts() == {Reason.HANDSHAKE_RATE.value: 10}
    await trio.sleep(1)
    assert [door.lets_in("flood") for _ in range(4)] == [True, True, False, False]


async def test_door_bounds_what_many_addresses_cost_together() -> None:
    door = Door(Refusals(), per_s=(4, 20), address_per_s=(2, 20), newcomers_per_s=(6, 30))
    assert sum(door.lets_in(f"10.0.0.{n}") for n in range(200)) == 50
    await trio.sleep(1)
    assert sum(door.lets_in(f"10.0.1.{n}") for n in range(200)) == 10


async def test_door_keeps_room_for_who_comes_first_from_those_who_come_again_and_again() -> None:
    door = Door(Refusals(), per_s=(4, 20), address_per_s=(50, 500), newcomers_per_s=(6, 30))
    flood = [f"10.0.0.{n}" for n in range(4)]
    assert sum(door.lets_in(address) for _ in range(100) for address in flood) == 4 * 4 + 20
    assert sum(door.lets_in(f"10.0.1.{n}") for n in range(200)) == 30 - 4 * 4


async def test_door_lets_members_addresses_in_first_and_no_faster_than_others() -> None:
    known = KnownHosts()
    known.note("member")
    known.note(None)
    door = Door(Refusals(), per_s=(0, 0), address_per_s=(2, 20), newcomers_per_s=(0, 0), is_known=known.__contains__)
    assert not door.lets_in("stranger")
    assert [door.lets_in("member") for _ in range(30)] == [True] * 20 + [False] * 10


async def test_door_lets_as_many_calls_of_members_through_one_relay_as_a_swarm_has_links_to_make() -> None:
    refusals, relay, stranger = Refusals(), PeerId("relay"), PeerId("stranger")
    door = Door(refusals, per_s=(0.001, 1), newcomers_per_s=(0.001, 1), is_member=is_member)
    assert [door.lets_call(relay, stranger) for _ in range(20)] == [True] * 2 + [False] * 18
    assert [door.lets_call(relay, MEMBER) for _ in range(300)] == [True] * 256 + [False] * 44
    assert door.lets_call(PeerId("another relay"), MEMBER)
    assert refusals.counts() == {Reason.HANDSHAKE_RATE.value: 18 + 44}
    await trio.sleep(1)
    assert [door.lets_call(relay, MEMBER) for _ in range(20)] == [True] * 16 + [False] * 4


def test_door_lets_a_whole_swarm_of_newcomers_in_at_once() -> None:
    """63 of them, each of which comes twice and says all that a hello takes."""

    async def main() -> None:
        door, peer_limits = Door(Refusals()), PeerLimits(Refusals(), is_member)
        for number in range(63):
            assert door.lets_in(f"10.0.0.{number}")
            assert door.lets_in(f"10.0.0.{number}")
            for _ in range(int(limits.FIRST_READS)):
                await peer_limits.turn(PeerId(f"peer {number}"))
        assert trio.current_time() == began, "nobody had to wait"

    clock = trio.testing.MockClock(autojump_threshold=0)
    began = clock.current_time()
    trio.run(main, clock=clock)


async def test_a_whole_swarm_behind_one_router_fits_the_bursts() -> None:
    """63 that dial once each, and a lost link in two that is dialled again."""
    door = Door(Refusals())
    assert all(door.lets_in("192.0.2.7") for _ in range(63 + 32))
    member = Door(Refusals(), per_s=(0, 0), newcomers_per_s=(0, 0), is_known=lambda address: True)
    assert all(member.lets_in("192.0.2.7") for _ in range(63 + 32))


async def test_a_whole_swarm_of_newcomers_has_places_at_once() -> None:
    """63 handshakes that are under way together, each from an address of its own, and then as many strangers."""
    host = Host(identity=Identity.generate())
    with ExitStack() as places:
        for number in range(63):
            places.enter_context(host._half_open.entering(f"10.0.0.{number}"))
        assert len(host._half_open) == 63
        assert host.refusals.counts() == {}
    assert len(host._half_open) == 0
    with ExitStack() as places:  # most of it behind one router
        for address in ["192.0.2.7"] * 48 + [f"10.0.0.{number}" for number in range(15)]:
            places.enter_context(host._half_open.entering(address))
        assert host.refusals.counts() == {}
        places.enter_context(host._half_open.entering("192.0.2.7"))
        assert len(host._half_open) == 63, "one that is crowded already takes none of the others' places"
    assert limits.STRANGER_LIMIT >= 63
    assert limits.CONNECTION_LIMIT >= 63 + limits.STRANGER_LIMIT


async def test_door_counts_the_addresses_of_one_network_as_one() -> None:
    door = Door(Refusals(), address_per_s=(1, 2))
    same = ["2001:db8:1:2::1", "2001:db8:1:2:ffff::2", "2001:db8:1:2::3%eth0"]
    assert [door.lets_in(address) for address in same] == [True, True, False]
    assert [door.is_spent(address) for address in same] == [True] * 3
    assert not door.is_spent("2001:db8:1:3::1")
    assert door.lets_in("2001:db8:1:3::1")
    assert [door.lets_in(address) for address in ("1.2.3.4", "1.2.3.5", "fe80::nonsense")] == [True] * 3


def test_known_hosts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KEY_LIMIT", 2)
    known = KnownHosts()
    for host in ("a", "b", "a", "c"):
        known.note(host)
    assert ["a" in known, "b" in known, "c" in known] == [True, False, True]


async def test_strangers_share_what_goes_beyond_the_first_streams() -> None:
    peer_limits = PeerLimits(Refusals(), is_member)

    def opened(peer: str, count: int) -> int:
        found = 0
        for _ in range(count):
            with peer_limits.stream(PeerId(peer)) as welcome:
                found += welcome
        return found

    many = sum(opened(f"flood {n}", 50) for n in range(20))
    assert many == 20 * limits.FIRST_STREAMS + limits.STRANGERS_STREAMS_BURST
    assert opened("newcomer", 50) == limits.FIRST_STREAMS
    assert opened(MEMBER, 500) == 500


async def test_crowd_pushes_out_the_oldest_of_the_most_crowded_address() -> None:
    refusals = Refusals()
    crowd = UnprovenConnections(refusals, Reason.HALF_OPEN, limit=6, per_address=5)
    out: list[str] = []
    in_place = trio.Event()

    async def wait(address: str, name: str) -> None:
        with crowd.entering(address):
            in_place.set()
            await trio.sleep_forever()
        out.append(name)

    async with trio.open_nursery() as nursery:

        async def enter(address: str, name: str) -> None:
            nonlocal in_place
            in_place = trio.Event()
            nursery.start_soon(wait, address, name)
            await in_place.wait()
            await trio.testing.wait_all_tasks_blocked()

        await enter("honest", "honest")
        for number in range(5):
            await enter("flood", f"flood {number}")
        assert (len(crowd), out) == (6, [])
        await enter("flood", "flood 5")  # over what one address may
        await enter("other", "other")  # over what there is in all
        assert out == ["flood 0", "flood 1"]
        assert (len(crowd), refusals.counts()) == (6, {Reason.HALF_OPEN.value: 2})
        nursery.cancel_scope.cancel()
    assert len(crowd) == 0


async def test_half_open_connections_of_members_addresses_give_way_last() -> None:
    known = {"member"}
    crowd = UnprovenConnections(Refusals(), Reason.HALF_OPEN, limit=4, per_address=4, is_known=known.__contains__)
    out: list[str] = []

    async def wait(address: str) -> None:
        with crowd.entering(address):
            await trio.sleep_forever()
        out.append(address)

    async with trio.open_nursery() as nursery:
        for address in ("member", "member", *(f"10.0.0.{number}" for number in range(8))):
            nursery.start_soon(wait, address)
            await trio.testing.wait_all_tasks_blocked()
        assert out == [f"10.0.0.{number}" for number in range(6)]
        nursery.cancel_scope.cancel()


async def test_who_comes_first_has_a_members_streams_and_reads_before_it_is_admitted() -> None:
    peer_limits = PeerLimits(Refusals(), is_member, comes_first=lambda peer: peer == EXPECTED)
    for flood in range(200):
        for _ in range(int(limits.FIRST_READS)):
            peer_limits._newcomers_reads.owe(1.0, trio.current_time())
        for _ in range(60):
            with peer_limits.stream(PeerId(f"flood {flood}")):
                pass
    began = trio.current_time()
    for _ in range(1000):
        await peer_limits.turn(EXPECTED)
    assert trio.current_time() == began
    opened = 0
    for _ in range(500):
        with peer_limits.stream(EXPECTED) as welcome:
            opened += welcome
    assert opened == 500


def test_memory_holds_little_for_strangers_and_frees_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "UNREAD_LIMIT_BYTES", 40 << 20)
    refusals = Refusals()
    memory = Memory(refusals, is_member)
    assert memory.take(STRANGER, limits.STRANGER_UNREAD_LIMIT_BYTES)
    assert not memory.take(STRANGER, 1)
    assert memory.take(MEMBER, limits.PEER_UNREAD_LIMIT_BYTES)
    assert not memory.take(MEMBER, 1)
    memory.free(STRANGER, limits.STRANGER_UNREAD_LIMIT_BYTES)
    assert memory.take(STRANGER, 1)
    assert not memory.take(PeerId("third"), 10 << 20)
    assert memory.unread_bytes == limits.PEER_UNREAD_LIMIT_BYTES + 1
    assert refusals.counts() == {Reason.UNREAD.value: 3}


def test_strangers_leave_room_for_who_comes_next() -> None:
    memory = Memory(Refusals(), is_member)
    size = 16 << 10

    def fill(peer: PeerId) -> int:
        held = 0
        while memory.take(peer, size):
            held += size
        return held

    held = [fill(PeerId(f"stranger {number}")) for number in range(limits.STRANGER_LIMIT)]
    assert held[0] == limits.STRANGER_UNREAD_LIMIT_BYTES
    assert min(held) >= limits.STRANGER_UNREAD_SURE_BYTES, "who comes last finds what a hello takes"
    sure = limits.STRANGER_LIMIT * limits.STRANGER_UNREAD_SURE_BYTES
    assert sum(held) <= sure + limits.STRANGERS_UNREAD_LIMIT_BYTES
    memory.free(PeerId("stranger 0"), held[0])
    assert fill(PeerId("stranger 1")) == 0
    assert fill(PeerId("stranger 100")) == limits.STRANGER_UNREAD_LIMIT_BYTES - limits.STRANGER_UNREAD_SURE_BYTES
    assert memory.take(MEMBER, limits.PEER_UNREAD_LIMIT_BYTES), "members lose nothing by it"


def test_who_is_no_member_any_more_takes_no_room_from_strangers() -> None:
    members = {MEMBER}
    memory = Memory(Refusals(), members.__contains__)
    assert memory.take(MEMBER, limits.PEER_UNREAD_LIMIT_BYTES)
    members.clear()
    assert not memory.take(MEMBER, 1)
    assert memory.take(STRANGER, limits.STRANGER_UNREAD_SURE_BYTES)


async def test_stream_with_more_than_there_is_room_for_ends_and_gives_its_room_back() -> None:
    refusals = Refusals()
    memory = Memory(refusals, is_member)
    size = limits.STRANGER_UNREAD_LIMIT_BYTES // 2
    async with trio.open_nursery() as nursery:
        streams = []
        for _ in range(4):  # two are as much as a stranger has
            near, far = memory_pair(buffered=float("inf"))
            stream = MessageStream(near, peer=STRANGER, memory=memory)
            nursery.start_soon(stream.run)
            await far.write(framed(bytes(size - 4)))
            streams.append(stream)
        await trio.testing.wait_all_tasks_blocked()
        assert memory.unread_bytes <= limits.STRANGER_UNREAD_LIMIT_BYTES
        ended = 0
        for stream in streams:
            try:
                assert len(await stream.receive(deadline_s=1)) == size - 4
            except NetworkError:
                ended += 1
            await stream.abort()
        assert ended == 2
        assert memory.unread_bytes == 0
        assert refusals.counts()[Reason.UNREAD.value] == 2


async def test_stream_of_a_slow_reader_here_takes_no_more_than_its_backlog() -> None:
    memory = Memory(Refusals(), is_member)
    near, far = memory_pair(buffered=float("inf"))
    stream = MessageStream(near, peer=MEMBER, memory=memory)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.run)
        for _ in range(100):
            await far.write(framed(bytes(60_000)))
        await trio.testing.wait_all_tasks_blocked()
        assert BACKLOG_LIMIT_BYTES < memory.unread_bytes < 2 * BACKLOG_LIMIT_BYTES
        for _ in range(100):
            await stream.receive(deadline_s=1)
        assert memory.unread_bytes == 0
        await stream.abort()


async def test_guests_give_members_more_than_strangers_and_part_with_floods() -> None:
    refusals = Refusals()
    peer_limits = PeerLimits(refusals, is_member)
    for peer, most in ((STRANGER, limits.STRANGER_STREAM_LIMIT), (MEMBER, limits.STREAM_LIMIT)):
        held = [peer_limits.stream(peer) for _ in range(most)]
        assert all(place.__enter__() for place in held)
        with peer_limits.stream(peer) as welcome:
            assert not welcome
        for place in held:
            place.__exit__(None, None, None)
    opened = 0
    for _ in range(limits.STREAM_LIMIT):
        with peer_limits.stream(STRANGER) as welcome:
            opened += welcome
    assert opened == limits.STRANGER_STREAMS_BURST - limits.STRANGER_STREAM_LIMIT
    strikes = limits.STRIKES_LIMIT / limits.STRANGER_STRIKES
    assert [peer_limits.is_flooding(STRANGER) for _ in range(70)].index(True) == strikes
    assert [peer_limits.is_flooding(MEMBER) for _ in range(70)].index(True) == limits.STRIKES_LIMIT
    await trio.sleep(limits.STRIKES_FORGIVEN_S)
    assert not peer_limits.is_flooding(STRANGER)
    assert set(refusals.counts()) == {Reason.STREAMS, Reason.STREAM_RATE, Reason.FLOODING}


async def test_who_was_refused_loses_its_connection_with_its_next_stream_unless_it_is_admitted_after_all() -> None:
    refusals = Refusals()
    peer_limits = PeerLimits(refusals, lambda peer: peer == MEMBER, is_refused=lambda peer: peer in (STRANGER, MEMBER))
    for peer, welcomed in ((STRANGER, False), (MEMBER, True), (EXPECTED, True)):
        with peer_limits.stream(peer) as welcome:
            assert welcome is welcomed
        assert peer_limits.is_flooding(peer) is not welcomed
    assert refusals.counts() == {Reason.REFUSED.value: 1, Reason.FLOODING.value: 1}


async def test_strangers_take_turns_to_be_read_newcomers_first_and_members_at_once() -> None:
    peer_limits = PeerLimits(
        Refusals(), is_member, lambda peer: peer == EXPECTED, lambda address: address == "10.0.0.7"
    )
    of_flood = [PeerId(f"flood{n}") for n in range(10)]
    began = trio.current_time()
    for peer in of_flood:
        for _ in range(int(limits.FIRST_READS)):
            await peer_limits.turn(peer)
    for _ in range(int(limits.STRANGERS_READS_BURST)):
        await peer_limits.turn(of_flood[0])
    assert trio.current_time() == began, "within the bursts nobody waits"

    for peer in of_flood:
        await peer_limits.turn(peer)
    waited_s = trio.current_time() - began
    assert waited_s == pytest.approx(len(of_flood) / limits.STRANGERS_READS_PER_S), "together, not each"
    for peer in (MEMBER, EXPECTED, PeerId("newcomer")):
        for _ in range(int(limits.FIRST_READS)):
            await peer_limits.turn(peer)
    for peer, address in ((MEMBER, None), (EXPECTED, "10.0.0.8"), (PeerId("neighbour"), "10.0.0.7")):
        for _ in range(10_000):
            await peer_limits.turn(peer, address)
    assert trio.current_time() - began == waited_s


async def test_newcomers_are_read_no_faster_than_all_of_them_may_cost() -> None:
    refusals = Refusals()
    peer_limits, began = PeerLimits(refusals, lambda peer: False), trio.current_time()
    crowd = int(limits.NEWCOMERS_READS_BURST / limits.FIRST_READS) + 10
    for number in range(crowd):
        for _ in range(int(limits.FIRST_READS)):
            await peer_limits.turn(PeerId(f"newcomer{number}"))
    over = crowd * limits.FIRST_READS - limits.NEWCOMERS_READS_BURST
    assert trio.current_time() - began == pytest.approx(over / limits.NEWCOMERS_READS_PER_S)
    assert refusals.counts() == {Reason.TURNS.value: over}


def test_newcomers_that_are_let_in_need_fewer_reads_than_there_are() -> None:
    """Else those who flood would keep who comes in a flood from ever being read."""
    assert (limits.NEWCOMERS_PER_S + limits.HANDSHAKES_PER_S) * limits.FIRST_READS < limits.NEWCOMERS_READS_PER_S


async def test_gossip_of_strangers_is_little() -> None:
    peer_limits = PeerLimits(Refusals(), is_member)
    assert sum(peer_limits.may_gossip(STRANGER) for _ in range(500)) == limits.STRANGER_GOSSIP_BURST
    assert sum(peer_limits.may_gossip(MEMBER) for _ in range(500)) == 500


async def test_pace_waits_for_what_took_long_to_handle_and_others_have_a_turn_after_it() -> None:
    refusals, began = Refusals(), trio.current_time()
    pace = Pace(refusals)
    with trio.testing.assert_no_checkpoints():
        await pace.read(100, limits.TURN_S / 2)
    with trio.testing.assert_checkpoints():
        await pace.read(100, limits.TURN_S)
    await pace.read(100, limits.HANDLING_BURST_S - 1.5 * limits.TURN_S)
    assert (trio.current_time(), refusals.counts()) == (began, {})
    await pace.read(100, 2 * limits.HANDLING_SHARE)
    assert trio.current_time() - began == pytest.approx(2.0)
    assert refusals.counts() == {Reason.PACED.value: 1}


async def test_pace_waits_for_what_is_over_the_rate_and_for_nothing_else() -> None:
    refusals = Refusals()
    pace = Pace(refusals)
    began = trio.current_time()
    for _ in range(int(limits.MESSAGES_BURST)):
        await pace.read(100)
    assert trio.current_time() == began
    for _ in range(int(limits.MESSAGES_PER_S) * 2):
        await pace.read(100)
    assert trio.current_time() - began == pytest.approx(2.0)
    await trio.sleep(60)
    later = trio.current_time()
    await pace.read(limits.MESSAGE_BURST_BYTES)
    assert trio.current_time() == later
    await pace.read(limits.MESSAGE_BYTES_PER_S)
    assert trio.current_time() - later == pytest.approx(1.0, abs=0.01)
