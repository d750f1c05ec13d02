"""Lanes through holes, on loopback: two pools that may not dial each other, and a third that sees where they are.

Routers are in `tests/testnet/test_holes.py`. Here nobody's SYN is dropped, so one accepts the other's call.
"""

from __future__ import annotations

import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import trio

from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import PeerId
from shoal.protocol.wire import canonical
from shoal.swarm import incoming
from shoal.swarm.lanes.hello import HELLO_WIRE_BYTES
from shoal.swarm.lanes.listener import PENDING_PER_PEER_LIMIT
from shoal.swarm.lanes.seal import (
    LANE_ID_BYTES,
    LaneOffer,
    LaneProposal,
    LanePunch,
    decode_request,
    encode_handshake,
    format_address,
)
from shoal.swarm.limits import Reason
from shoal.swarm.reaching import observed_addresses, punching
from shoal.swarm.reaching.dial_back_probes import Expected, probe_of
from shoal.swarm.reaching.observed_addresses import (
    OBSERVED_ADDRESS_PROTOCOL,
    PEER_OBSERVED_BURST,
    AskSighting,
    ask_seen,
    sight,
)
from shoal.swarm.reaching.punching import Puncher, PunchPort
from shoal.swarm.reaching.reach import ALONE_ATTEMPTS, ALONE_PUNCHES_BURST, HOLE_OFFERS, PUNCHES_BURST
from shoal.swarm.streams import MessageStream
from tests.swarm.lane_net import WAIT_S, lanes_of
from tests.swarm.reaching.test_relayed_lanes import LANE, SECRET, Node, nodes, note
from tests.waiting import until

HERE = ("127.0.0.1",)


def in_order(one: Node, other: Node) -> tuple[Node, Node]:
    """The one with the lower PeerId, which begins, first."""
    return (one, other) if one.peer < other.peer else (other, one)


def ways(one: Node, other: Node) -> list[bool]:
    """Of each lane between two, whether it goes through a third."""
    return [lane.relayed for lane in lanes_of(one.lanes, other.peer) if lane.usable]


def dialled(one: Node, other: Node) -> list[bool]:
    """Of each lane between two, whether the first dialled it."""
    return [lane.dialled for lane in lanes_of(one.lanes, other.peer)]


def puncher(node: Node) -> Puncher:
    found = node.lanes._dialler.puncher
    assert found is not None
    return found


def blocked(one: Node, other: Node) -> int:
    """Holes in a row that the two made without a third, and that came to nothing."""
    return puncher(one).reach._of(other.peer).blocked_alone


@contextlib.asynccontextmanager
async def bystander(host: str = "127.0.0.1") -> AsyncIterator[tuple[int, list[bytes]]]:
    """A third party that listens: its port, and what each who connected sent."""
    heard: list[bytes] = []

    async def listen(stream: trio.SocketStream) -> None:
        number = len(heard)
        heard.append(b"")
        async with stream:
            with contextlib.suppress(trio.BrokenResourceError):
                async for data in stream:
                    heard[number] += data

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, listen, 0, host=host))
        yield listener.socket.getsockname()[1], heard
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("dialler", [0, 1], ids=["lower", "higher"])
async def test_lane_through_holes_takes_the_place_of_the_one_through_a_third(dialler: int) -> None:
    async with nodes(seen_at=HERE) as (alice, bob, relay):
        pair = in_order(alice, bob)
        one, other = pair[dialler], pair[1 - dialler]
        await one.lanes.ensure(other.peer, deadline_s=WAIT_S)
        await until(lambda: ways(one, other) == ways(other, one) == [False])
        await until(lambda: relay.relayed_lanes.relayed_lanes == 0)
        await until(lambda: dialled(pair[0], pair[1]) == [True])  # the lane that was replaced is closed by then
        await until(lambda: dialled(pair[1], pair[0]) == [False])
        passed = relay.relayed_lanes.bytes_passed
        for sender, receiver in ((one, other), (other, one)):
            sender.lanes.post(receiver.peer, note(SECRET), SECRET)
            assert await receiver.sink.next_frame() == (sender.peer, note(SECRET), SECRET)
        assert relay.relayed_lanes.bytes_passed == passed < len(SECRET)


async def test_router_that_changes_ports_leaves_the_lane_through_a_third(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has the port that was seen is dialled a few times, and told nothing but one sealed hello."""

    monkeypatch.setattr("shoal.swarm.lanes.dial.HELLO_DEADLINE_S", 0.3)
    monkeypatch.setattr("shoal.swarm.lanes.listener.TRAVERSAL_DEADLINE_S", 0.3)
    async with bystander() as (port, heard):
        monkeypatch.setattr(observed_addresses, "format_address", lambda host, _: format_address(host, port))
        async with nodes(seen_at=HERE) as (alice, bob, relay):
            lower, higher = in_order(alice, bob)
            await alice.lanes.ensure(bob.peer, deadline_s=WAIT_S)
            await until(lambda: puncher(lower).reach.rests(higher.peer))
            assert ways(alice, bob) == ways(bob, alice) == [True]
            alice.lanes.post(bob.peer, note(SECRET), SECRET)
            assert await bob.sink.next_frame() == (alice.peer, note(SECRET), SECRET)
            assert relay.relayed_lanes.bytes_passed > len(SECRET)
        assert sorted(map(len, heard)) == [0, LANE_ID_BYTES + HELLO_WIRE_BYTES]
        assert SECRET[:8] not in b"".join(heard)


async def test_nobody_listens_where_it_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    dials: list[tuple[PunchPort, int]] = []
    dial = PunchPort._dial

    async def counted(self: PunchPort, host: str, port: int) -> trio.SocketStream:
        dials.append((self, port))
        return await dial(self, host, port)

    monkeypatch.setattr(punching, "DIAL_PAUSE_S", 0.01)
    monkeypatch.setattr(PunchPort, "_dial", counted)
    monkeypatch.setattr(observed_addresses, "format_address", lambda host, port: format_address(host, 65535))
    async with nodes(seen_at=HERE) as (alice, bob, _):
        lower, higher = in_order(alice, bob)
        await alice.lanes.ensure(bob.peer, deadline_s=WAIT_S)
        await until(lambda: puncher(lower).reach.rests(higher.peer))
        assert ways(alice, bob) == [True]
        assert puncher(lower).reach.onlooker(higher.peer) is None, "it is left at that for a while"
        assert {Counter(at for at, port in dials if port == 65535)[at] for at, _ in dials} == {punching.DIALS_LIMIT}


@pytest.mark.parametrize("lost", [1, HOLE_OFFERS])
async def test_offer_that_a_lost_connection_swallows_is_made_once_more_and_held_against_nobody(lost: int) -> None:
    async with nodes(seen_at=HERE) as (alice, bob, _):
        lower, higher = in_order(alice, bob)
        request, offers = lower.lanes._dialler._request, 0

        async def losing(peer: PeerId, data: bytes) -> bytes:
            nonlocal offers
            asked = decode_request(data, peer=peer)
            if isinstance(asked, LaneOffer) and asked.punch is not None:
                offers += 1
                if offers <= lost:
                    raise NetworkError(f"{peer} does not answer")
            return await request(peer, data)

        lower.lanes._dialler._request = losing
        await alice.lanes.ensure(bob.peer, deadline_s=WAIT_S)
        await until(lambda: offers == HOLE_OFFERS and (lost == HOLE_OFFERS or ways(alice, bob) == [False]))
        assert ways(alice, bob) == [lost == HOLE_OFFERS]
        assert puncher(lower).reach.onlooker(higher.peer) is not None, "it is not left at that"


async def test_port_takes_nobody_from_elsewhere() -> None:
    async with bystander() as (third, _):
        port = PunchPort()
        await port.call((f"127.0.0.1:{third}",), b"a call")
        port.target, port.delay_s = ("127.0.0.1", 1), 30.0
        came: list[trio.SocketStream] = []
        async with trio.open_nursery() as nursery:

            async def meet() -> None:
                came.append(await port.meet())

            nursery.start_soon(meet)
            stranger = await trio.open_tcp_stream("127.0.0.1", port._port, local_address="127.0.0.2")
            assert await stranger.receive_some(1) == b""
            assert came == []
            right = await trio.open_tcp_stream("127.0.0.1", port._port, local_address="127.0.0.1")
        assert came[0].socket.getpeername() == right.socket.getsockname()
        port.close()
        for stream in (stranger, right, *came):
            await stream.aclose()


async def test_relay_alone_sends_nobody_anywhere() -> None:
    """A host that other members do not see this node at is neither named nor dialled."""
    async with nodes(seen_at=("192.0.2.7",)) as (alice, bob, relay):
        lower, higher = in_order(alice, bob)
        await alice.lanes.ensure(bob.peer, deadline_s=WAIT_S)
        await until(lambda: puncher(lower).reach.rests(higher.peer))
        assert ways(alice, bob) == [True]
        with pytest.raises(NetworkError, match="others do not"):
            async with puncher(lower).port(relay.peer):
                pass


async def test_peer_that_names_a_third_partys_address_sends_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    async with bystander() as (port, heard), nodes(seen_at=HERE) as (alice, bob, relay):
        lower, higher = in_order(alice, bob)
        victim = f"127.0.0.1:{port}"
        async with puncher(lower).port(relay.peer) as mine:
            with pytest.raises(NetworkError, match="not seen there"):
                await puncher(lower).aim(mine, relay.peer, higher.peer, victim)
            with pytest.raises(NetworkError, match="not seen there"):  # another's address is not its own either
                await puncher(lower).aim(mine, relay.peer, higher.peer, mine.address)
            mine.address = "192.0.2.7:4002"
            with pytest.raises(NetworkError, match="another machine's here"):
                await puncher(lower).aim(mine, relay.peer, higher.peer, "10.0.0.1:22")
            with pytest.raises(NetworkError, match="no address"):
                await puncher(lower).aim(mine, relay.peer, higher.peer, "victim.example.org:80")
        # The same from who begins.
        offer = encode_handshake(offered(lower, higher, LanePunch(relay=relay.peer, address=victim)))
        with pytest.raises(NetworkError):
            await lower.host.request(higher.peer, LANE, offer, deadline_s=WAIT_S)
        assert heard == []


@pytest.mark.parametrize(
    ("third", "names", "dialled"),
    [
        ("127.0.0.1", "127.0.0.1:6379", True),  # all on this machine
        ("127.0.0.1", "198.51.100.9:6379", True),
        ("192.168.7.9", "192.168.7.3:6379", True),
        ("192.168.7.9", "198.51.100.9:6379", True),
        ("192.168.7.9", "127.0.0.1:6379", False),
        ("192.168.7.9", "0.0.0.0:6379", False),
        ("192.168.7.9", "[::1]:6379", False),
        ("192.168.7.9", "[::ffff:127.0.0.1]:6379", False),
        ("192.168.7.9", "169.254.169.254:6379", False),
        ("192.168.7.9", "[fe80::1]:6379", False),
        ("198.51.100.8", "198.51.100.9:6379", True),
        ("198.51.100.8", "192.168.7.3:6379", False),
        ("198.51.100.8", "127.0.0.1:6379", False),
        ("198.51.100.8", "198.51.100.9:1024", True),
        ("198.51.100.8", "198.51.100.9:1023", False),
        ("198.51.100.8", "198.51.100.9:22", False),
    ],
)
async def test_third_that_lies_for_a_peer_sends_nobody_where_neither_can_be(
    third: str, names: str, dialled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it says that it sees this node at loopback."""
    async with nodes(seen_at=HERE) as (alice, bob, relay):
        lower, higher = in_order(alice, bob)
        relay.observed_addresses._remember(higher.peer, names)
        async with puncher(lower).port(relay.peer) as mine:
            monkeypatch.setattr(lower.host, "host_of", {relay.peer: third}.get)
            with (
                contextlib.nullcontext()
                if dialled
                else pytest.raises(NetworkError, match=r"another machine's|lets out|no address")
            ):
                await puncher(lower).aim(mine, relay.peer, higher.peer, names)
        aimed = format_address(*mine.target)
        assert aimed == (names if dialled else ":0")


def offered(one: Node, other: Node, punch: LanePunch) -> Any:
    return LaneProposal(me=one.peer, peer=other.peer, swarm_id=b"swarm", punch=punch).offer


async def test_only_the_lower_begins_and_nobody_too_often() -> None:
    async with nodes(seen_at=HERE) as (alice, bob, relay):
        lower, higher = in_order(alice, bob)
        seen = LanePunch(relay=relay.peer, address="127.0.0.1:9")
        offer = encode_handshake(offered(higher, lower, seen))
        with pytest.raises(NetworkError):
            await higher.host.request(lower.peer, LANE, offer, deadline_s=WAIT_S)
        assert lower.host.remote_errors == 1
        for _ in range(int(PUNCHES_BURST)):
            assert puncher(higher).reach.may_punch(lower.peer)
        assert puncher(lower).reach.may_punch(higher.peer)
        with pytest.raises(NetworkError, match="too often"):
            async with puncher(higher).answering(lower.peer, relay.peer, seen.address):
                pass
        assert puncher(higher).reach.onlooker(lower.peer) is None


# -- where no third is left ----------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def two_alone() -> AsyncIterator[tuple[Node, Node, list[Node]]]:
    """Two that are connected and have no relay, the lower PeerId first; and whom each was told it is parted from."""
    async with nodes(relays=0, seen_at=HERE) as (alice, bob):
        pair, parted = in_order(alice, bob), list[Node]()
        for node in pair:
            puncher(node).reach.parted = lambda peer, node=node: parted.append(node)  # type: ignore[misc]
        yield *pair, parted


def change_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every port appear with the number of one at which nobody listens."""
    opened = PunchPort.open

    def elsewhere(self: PunchPort, target: str) -> int:
        opened(self, target)
        return 1

    monkeypatch.setattr(PunchPort, "open", elsewhere)


@pytest.mark.parametrize("dialler", [0, 1], ids=["lower", "higher"])
async def test_two_without_a_third_make_holes_for_a_lane_by_themselves(dialler: int) -> None:
    async with two_alone() as (*pair, parted):
        one, other = pair[dialler], pair[1 - dialler]
        await one.lanes.ensure(other.peer, deadline_s=WAIT_S)
        await until(lambda: ways(one, other) == ways(other, one) == [False])
        assert (dialled(pair[0], pair[1]), dialled(pair[1], pair[0])) == ([True], [False])
        for sender, receiver in ((one, other), (other, one)):
            sender.lanes.post(receiver.peer, note(SECRET), SECRET)
            assert await receiver.sink.next_frame() == (sender.peer, note(SECRET), SECRET)
        assert parted == []


async def test_both_want_a_lane_at_once_and_again_after_it_is_lost() -> None:
    async with two_alone() as (lower, higher, parted):
        for _ in range(3):
            async with trio.open_nursery() as nursery:
                for one, other in ((lower, higher), (higher, lower)):
                    nursery.start_soon(partial(one.lanes.ensure, other.peer, deadline_s=WAIT_S))
            await until(lambda: ways(lower, higher) == ways(higher, lower) == [False])
            higher.lanes.drop(lower.peer)
            await until(lambda: ways(lower, higher) == ways(higher, lower) == [])
        assert parted == []


async def test_two_without_a_third_or_a_hole_are_told_and_a_hole_later_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However often a lane was asked for in vain meanwhile."""

    monkeypatch.setattr(punching, "DIAL_PAUSE_S", 0.01)
    async with two_alone() as (lower, higher, parted):
        with monkeypatch.context() as router:
            change_ports(router)
            router.setattr(punching, "PUNCH_DEADLINE_S", 0.5)
            for number in range(ALONE_ATTEMPTS):
                assert parted == [], f"after {number}"
                with pytest.raises(NetworkError, match="no hole leads"):
                    await lower.lanes.ensure(higher.peer, deadline_s=WAIT_S)
            await until(lambda: sorted(map(id, parted)) == sorted(map(id, (lower, higher))))
            for _ in range(PENDING_PER_PEER_LIMIT + 1):
                with pytest.raises(NetworkError, match="cannot be reached"):
                    await lower.lanes._dialler.dial(higher.peer, 1)
            with pytest.raises(NetworkError):
                await higher.lanes.ensure(lower.peer, deadline_s=1.0)
        await lower.lanes.ensure(higher.peer, deadline_s=WAIT_S)
        await until(lambda: ways(lower, higher) == ways(higher, lower) == [False])
        await until(lambda: blocked(lower, higher) == blocked(higher, lower) == 0)
        assert (lower.host.remote_errors, higher.host.remote_errors) == (0, 0)


async def test_two_are_not_parted_where_the_other_makes_no_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be dialled, and was not there for a moment."""
    async with two_alone() as (lower, higher, parted):
        monkeypatch.setattr(higher.lanes._dialler.reach.facts, "is_reached", lambda: True)
        for _ in range(ALONE_ATTEMPTS):
            with pytest.raises(NetworkError):
                await lower.lanes.ensure(higher.peer, deadline_s=WAIT_S)
        assert (parted, blocked(lower, higher)) == ([], 0)


async def test_who_offers_a_hole_without_a_third_sends_nobody_to_another_host() -> None:
    async with bystander("127.0.0.2") as (port, heard), two_alone() as (lower, higher, _):
        aimed: list[tuple[str, int]] = []
        async with puncher(higher).answering(lower.peer, higher.peer, f"127.0.0.2:{port}") as mine:
            aimed.append(mine.target)
        assert aimed == [("127.0.0.1", port)]
        assert heard == []


async def test_holes_without_a_third_are_for_two_who_have_none_and_not_made_too_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dials: list[str] = []

    async def never(self: PunchPort, host: str, port: int) -> trio.SocketStream:
        dials.append(host)
        raise OSError("not here")

    async with nodes(seen_at=HERE) as (alice, bob, _):
        lower, higher = in_order(alice, bob)
        offer = encode_handshake(offered(lower, higher, LanePunch(relay=higher.peer, address="127.0.0.1:9")))
        with monkeypatch.context() as spied:
            spied.setattr(PunchPort, "_dial", never)
            with pytest.raises(NetworkError):  # a third is linked
                await lower.host.request(higher.peer, LANE, offer, deadline_s=WAIT_S)
            assert dials == []
            reach = higher.lanes._dialler.reach.facts
            spied.setattr(reach, "relays", lambda peer: ())
            spied.setattr(reach, "is_reached", lambda: True)
            with pytest.raises(NetworkError):  # it can be dialled
                await lower.host.request(higher.peer, LANE, offer, deadline_s=WAIT_S)
            assert dials == []
            spied.setattr(reach, "is_reached", lambda: False)
            for _ in range(int(ALONE_PUNCHES_BURST)):
                assert puncher(higher).reach.may_punch(lower.peer, alone=True)
            with pytest.raises(NetworkError):
                await lower.host.request(higher.peer, LANE, offer, deadline_s=WAIT_S)
            with pytest.raises(NetworkError, match="too often"):
                async with puncher(higher).answering(lower.peer, higher.peer, "127.0.0.1:9"):
                    pass
            assert dials == []


async def test_sightings_are_for_members_rare_and_told_for_a_while() -> None:
    async with nodes() as (alice, bob, relay):
        port = PunchPort()
        address = await sight(alice.host, relay.peer, relay.lanes.addresses, port)
        assert address == f"127.0.0.1:{port._port}"
        port.close()
        await ask_seen(bob.host, relay.peer, alice.peer, address)
        for peer, asked in ((bob.peer, address), (alice.peer, "127.0.0.1:1")):
            with pytest.raises(NetworkError, match="not seen there"):
                await ask_seen(bob.host, relay.peer, peer, asked)
        for _ in range(int(PEER_OBSERVED_BURST) - 1):
            relay.observed_addresses._by_peer.take(alice.peer, trio.current_time())
        with pytest.raises(NetworkError, match="too many calls"):
            await sight(alice.host, relay.peer, relay.lanes.addresses, PunchPort())
        relay.observed_addresses._seen[alice.peer][0] = (address, trio.current_time())
        with pytest.raises(NetworkError, match="not seen there"):
            await ask_seen(bob.host, relay.peer, alice.peer, address)
        relay.observed_addresses.admits = lambda peer: peer != bob.peer
        with pytest.raises(NetworkError, match="members only"):
            await ask_seen(bob.host, relay.peer, alice.peer, address)
        relay.observed_addresses.admits = None
        with pytest.raises(NetworkError, match="where it relays"):
            await sight(alice.host, relay.peer, relay.lanes.addresses, PunchPort())
        await until(lambda: relay.observed_addresses._calls == {})


async def test_ticket_of_a_call_is_good_for_a_moment() -> None:
    async with nodes() as (alice, _, relay):

        async def ask(call_deadline_s: float) -> tuple[MessageStream, bytes]:
            relay.observed_addresses._call_deadline_s = call_deadline_s
            stream = await alice.host.open(relay.peer, OBSERVED_ADDRESS_PROTOCOL, deadline_s=WAIT_S)
            await stream.send(canonical(AskSighting()), deadline_s=WAIT_S)
            reply = await stream.receive(deadline_s=WAIT_S)
            return stream, observed_addresses._check(reply, observed_addresses.SightingTicket, relay.peer).ticket

        calling, ticket = await ask(WAIT_S)
        assert relay.observed_addresses.claims(ticket)
        late, expired = await ask(0.1)
        with pytest.raises(NetworkError, match="no call came"):
            observed_addresses._check(await late.receive(deadline_s=WAIT_S), observed_addresses.Sighted, relay.peer)
        assert not relay.observed_addresses.claims(expired)
        assert relay.observed_addresses.claims(ticket)
        for stream in (calling, late):
            await stream.abort()


@pytest.mark.parametrize("what", ["a call to be sighted", "a knock"])
async def test_connection_that_is_reset_as_it_says_what_it_is_ends_nothing_else(what: str) -> None:
    async with nodes() as (alice, bob, relay):
        if what == "a knock":
            expected = Expected(ports=(7,))
            relay.host.dial_back_probes.expect(expected)
            first = probe_of(expected.secret, 7)
        else:
            asking = await alice.host.open(relay.peer, OBSERVED_ADDRESS_PROTOCOL, deadline_s=WAIT_S)
            await asking.send(canonical(AskSighting()), deadline_s=WAIT_S)
            reply = await asking.receive(deadline_s=WAIT_S)
            first = observed_addresses._check(reply, observed_addresses.SightingTicket, relay.peer).ticket
        host, _, port = relay.lanes.addresses[0].rpartition(":")
        with socket.create_connection((host, int(port))) as calling:  # before the relay has a look at it
            calling.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, incoming.LINGER_NOT)
            calling.sendall(first)
        await until(lambda: relay.lanes._listener.refusals.counts().get(Reason.LANE_HELLO.value))
        port = PunchPort()
        assert await sight(bob.host, relay.peer, relay.lanes.addresses, port) == f"127.0.0.1:{port._port}"
        port.close()
