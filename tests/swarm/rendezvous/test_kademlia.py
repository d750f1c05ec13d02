"""The Kademlia table between real hosts on loopback: points found through strangers, and strangers that lie or hang."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import trio
from libp2p.kad_dht.pb.kademlia_pb2 import Message

from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.wire import SwarmId
from shoal.swarm.host import Host
from shoal.swarm.net_stream import VarintFrames
from shoal.swarm.rendezvous import kademlia as kademlia_module
from shoal.swarm.rendezvous.contacts import Contact
from shoal.swarm.rendezvous.kademlia import KADEMLIA_PROTOCOL, MESSAGE_LIMIT_BYTES, WALKS_AT_ONCE, Kademlia
from shoal.swarm.rendezvous.meeting_points import (
    POINTS_IN_SLOT,
    SLOTS,
    keys_of,
    open_point,
    pack_points,
    sign_point,
    slot_key,
)
from shoal.swarm.streams import MessageStream
from tests.waiting import WAIT_S, running, until

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
OURS, THEIRS = SwarmId(b"o" * 32), SwarmId(b"t" * 32)


@dataclass
class Node:
    """A host in the table, of one swarm or another."""

    seed: int
    swarm: SwarmId = OURS
    kept: set[PeerId] = field(default_factory=set)
    identity: Identity = field(init=False)
    host: Host = field(init=False)
    table: Kademlia = field(init=False)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    def __post_init__(self) -> None:
        self.identity = Identity.from_seed(bytes([self.seed]) * 32)
        self.host = Host(identity=self.identity, listen=LOOPBACK)
        self.table = Kademlia(self.host, self.swarm, keeps=self.kept.__contains__)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with self.scope:
            await self.host.run(task_status=task_status)

    def knows(self, *others: Node) -> None:
        self.table.know(address for other in others for address in other.host.addresses)

    def point(self, sequence: int = 1, **changes: object) -> bytes:
        return sign_point(
            self.identity,
            self.swarm,
            addresses=self.host.addresses,
            sequence=sequence,
            **changes,  # type: ignore[arg-type]
        )

    async def finds(self) -> set[PeerId]:
        return {PeerId(open_point(signed, swarm=self.swarm).peer) for signed in await self.table.look_up()}


def peers(*nodes: Node) -> set[PeerId]:
    return {node.host.peer_id for node in nodes}


async def ask(asker: Node, other: Node, question: Message) -> Message:
    await asker.host.dial(other.host.addresses[0], deadline_s=WAIT_S)
    data = await asker.host.request(
        other.host.peer_id,
        KADEMLIA_PROTOCOL,
        question.SerializeToString(),
        deadline_s=WAIT_S,
        limit_bytes=MESSAGE_LIMIT_BYTES,
        framing=VarintFrames,
    )
    return Message.FromString(data)


def put(key: bytes, value: bytes) -> Message:
    question = Message(type=Message.PUT_VALUE, key=key)
    question.record.key, question.record.value = key, value
    return question


async def test_member_is_found_by_swarm_id_through_strangers_of_another_swarm() -> None:
    strangers = [Node(n, THEIRS) for n in range(10, 13)]
    member, newcomer = Node(1), Node(2)
    async with running(*strangers, member, newcomer):
        for one, next_one in zip(strangers, [*strangers[1:], strangers[0]], strict=True):
            one.knows(next_one)
            await one.table.announce(one.point())
        member.knows(strangers[0])
        assert await member.table.announce(member.point()) >= 2 * len(strangers)
        newcomer.knows(strangers[2])
        assert await newcomer.finds() == peers(member)
        assert await strangers[0].finds() == peers(*strangers)


async def test_who_comes_first_for_a_node_keeps_its_place_in_the_table_of_that_node() -> None:
    keeper, asker = Node(1), Node(2)
    swarm = [Identity.from_seed(n.to_bytes(4, "big") * 8) for n in range(200)]
    points = [sign_point(one, OURS, addresses=[f"/ip4/192.0.2.1/tcp/1/p2p/{one.peer_id}"], sequence=1) for one in swarm]
    key = slot_key(OURS, 0)
    here = [point for point in points if key in keys_of(open_point(point))]
    async with running(keeper, asker):
        for each in here:
            await ask(asker, keeper, put(key, pack_points([each])))
        left_out = set(here) - set(keeper.table.store.get(key, trio.current_time()))
        assert len(left_out) == len(here) - POINTS_IN_SLOT > 0
        member = left_out.pop()
        keeper.host.comes_first = lambda peer: peer == open_point(member).peer
        await ask(asker, keeper, put(key, pack_points([member])))
        assert member in keeper.table.store.get(key, trio.current_time())


async def test_point_outlives_the_stranger_through_whom_it_was_announced() -> None:
    bootstrap, others = Node(10, THEIRS), [Node(n, THEIRS) for n in (11, 12)]
    member, newcomer = Node(1), Node(2)
    async with running(bootstrap, *others, member, newcomer):
        for one in others:
            one.knows(bootstrap)
            await one.table.announce(one.point())
        member.knows(bootstrap)
        await member.table.announce(member.point())
        bootstrap.scope.cancel()
        newcomer.knows(bootstrap, others[1])
        assert await newcomer.finds() == peers(member)


async def test_walk_parts_from_the_strangers_that_it_dialled_and_from_nobody_else() -> None:
    strangers = [Node(n, THEIRS) for n in (10, 11, 12)]
    member = Node(1)
    async with running(*strangers, member):
        member.knows(*strangers)
        await member.host.dial(strangers[0].host.addresses[0], deadline_s=WAIT_S)
        member.kept.add(strangers[1].host.peer_id)
        assert await member.table.announce(member.point()) == 6
        assert member.host.connected() == peers(*strangers[:2])


async def test_connection_that_took_the_place_of_a_walks_own_stays() -> None:
    """The walk waits for one that hangs while another, which it has asked, dials this node anew."""
    stranger, member = sorted((Node(10, THEIRS), Node(11, THEIRS)), key=lambda node: node.host.peer_id)
    again, hanging = Node(stranger.seed, THEIRS), Node(12, THEIRS)
    asked, goes_on = trio.Event(), trio.Event()

    async def hang(stream: MessageStream) -> None:
        asked.set()
        await goes_on.wait()

    hanging.host.serve(KADEMLIA_PROTOCOL, hang)
    async with running(stranger, again, member, hanging):
        member.knows(stranger, hanging)
        async with trio.open_nursery() as visit:
            visit.start_soon(member.table.announce, member.point())
            await asked.wait()
            await until(lambda: stranger.host.peer_id in member.table._dialled)
            walks = member.host.connection(stranger.host.peer_id)
            await again.host.dial(member.host.addresses[0], deadline_s=WAIT_S)
            await until(lambda: member.host.connection(stranger.host.peer_id) not in (walks, None))
            goes_on.set()
        assert member.host.connected() == {again.host.peer_id}


async def test_peer_that_hangs_costs_its_own_deadline_and_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kademlia_module, "ANSWER_DEADLINE_S", WAIT_S)
    monkeypatch.setattr(kademlia_module, "WALK_DEADLINE_S", 2 * WAIT_S)
    asked = 0
    good, member, newcomer = Node(10, THEIRS), Node(1), Node(2)
    hanging = [Node(n) for n in range(20, 22)]
    request = newcomer.host.request

    async def soon_over(peer: PeerId, *arguments: Any, deadline_s: float, **more: Any) -> bytes:
        assert 0 < deadline_s <= WAIT_S
        return await request(peer, *arguments, deadline_s=0.2 if peer in peers(*hanging) else deadline_s, **more)

    newcomer.host.request = soon_over  # type: ignore[method-assign]

    async def never(stream: MessageStream) -> None:
        nonlocal asked
        asked += 1
        await trio.sleep_forever()

    for one in hanging:
        one.host.serve(KADEMLIA_PROTOCOL, never, limit_bytes=MESSAGE_LIMIT_BYTES, framing=VarintFrames)
    async with running(good, member, newcomer, *hanging):
        member.knows(good)
        await member.table.announce(member.point())
        good.knows(*hanging)  # and names them in each of its answers
        newcomer.knows(*hanging, good)
        asked = 0
        assert await newcomer.finds() == peers(member)
        assert {contact.peer for contact in newcomer.table.contacts.nearest(b"", 9)} == peers(good, member)
        assert asked <= WALKS_AT_ONCE * len(hanging), "who was silent is asked again"


async def test_contact_that_is_not_reached_is_dialled_as_seldom_as_any_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    gone, member = Node(10, THEIRS), Node(1)
    dialled, dial = [], member.host.dial_peer

    async def noted(peer: PeerId, *arguments: Any, **more: Any) -> None:
        dialled.append(peer)
        await dial(peer, *arguments, **more)

    monkeypatch.setattr(kademlia_module, "SLOTS", 1)
    member.host.dial_peer = noted  # type: ignore[method-assign]
    async with running(gone, member):
        places = gone.host.addresses
        gone.scope.cancel()
        await until(lambda: gone.host._streams is None)
        for pause_s in (1.0, 2.0, 4.0):
            dialled.clear()
            for _ in range(3):
                member.table.know(places)
                await member.table.look_up()
            assert dialled == [gone.host.peer_id]
            (rest,) = member.table._rests.values()
            assert rest.backoff.pause_s == 2 * pause_s
            rest.until = trio.current_time()


@pytest.mark.parametrize(
    "forged",
    [
        "not signed",
        "signed by another",
        "another's address",
        "under another key",
        "of a swarm without a point there",
        "too many",
        "garbage",
    ],
)
async def test_stranger_keeps_no_point_that_does_not_hold(forged: str) -> None:
    keeper, liar, victim = Node(10, THEIRS), Node(1), Node(2)
    async with running(keeper, liar):
        good = liar.point()
        key = keys_of(open_point(good))[0]
        values = {
            "not signed": pack_points([good[:-64] + bytes(64)]),
            "signed by another": pack_points([good[:-1] + bytes([good[-1] ^ 1])]),
            "another's address": pack_points(
                [
                    sign_point(
                        liar.identity,
                        OURS,
                        addresses=[f"/ip4/127.0.0.1/tcp/9/p2p/{victim.host.peer_id}"],
                        sequence=1,
                    )
                ]
            ),
            "under another key": pack_points([good]),
            "of a swarm without a point there": pack_points(
                [sign_point(liar.identity, THEIRS, addresses=liar.host.addresses, sequence=1)]
            ),
            "too many": b"\x99" + pack_points([good])[1:] * 9,
            "garbage": b"\xff" * 100,
        }
        if forged == "under another key":
            key = next(k for n in range(SLOTS) if (k := slot_key(OURS, n)) not in keys_of(open_point(good)))
        with pytest.raises(NetworkError):
            await ask(liar, keeper, put(key, values[forged]))
        assert len(keeper.table.store) == 0
        assert keeper.host.remote_errors == 1
        answer = await ask(liar, keeper, put(keys_of(open_point(good))[0], pack_points([good])))
        assert answer.key == keys_of(open_point(good))[0]
        assert len(keeper.table.store) == 1


async def test_liar_that_answers_a_look_up_with_what_it_likes_is_not_believed() -> None:
    """The look-up gives back what was found; it is `open_point` that believes nothing of it."""
    member, liar, newcomer = Node(1), Node(20), Node(2)

    async def lie(stream: MessageStream) -> None:
        question = Message.FromString(await stream.receive(deadline_s=WAIT_S))
        answer = Message(type=question.type, key=question.key)
        answer.record.key, answer.record.value = question.key, b"\xff" * 1000
        for _ in range(5000):
            answer.closerPeers.add(id=b"\x00\x24" + bytes(36), addrs=[b"\xff\xff"])
        await stream.send(answer.SerializeToString(), deadline_s=WAIT_S)

    liar.host.serve(KADEMLIA_PROTOCOL, lie, limit_bytes=1 << 20, framing=VarintFrames)
    async with running(member, liar, newcomer):
        newcomer.knows(liar)
        assert await newcomer.table.look_up() == []
        newcomer.knows(member)
        await member.table.announce(member.point())
        assert await newcomer.finds() == peers(member)


async def test_answerer_names_contacts_and_refuses_what_it_does_not_do() -> None:
    server, other, asker = Node(1), Node(2), Node(3)
    async with running(server, other, asker):
        server.knows(other)
        named = await ask(asker, server, Message(type=Message.FIND_NODE, key=b"any"))
        assert [bytes(one.id) for one in named.closerPeers] == [other.table.contacts.own]
        assert (await ask(asker, server, Message(type=Message.PING))).type == Message.PING
        under_two_keys = put(b"one", pack_points([]))
        under_two_keys.key = b"other"
        for question in (
            under_two_keys,
            Message(type=Message.ADD_PROVIDER, key=b"any"),
            Message(type=Message.GET_VALUE, key=b""),
            Message(type=Message.GET_VALUE, key=b"k" * 129),
            Message(type=Message.PUT_VALUE, key=b"any"),
        ):
            with pytest.raises(NetworkError):
                await ask(asker, server, question)
        assert server.host.remote_errors == 5
        assert server.host.handler_errors == 0


@pytest.mark.parametrize("place", ["/dns4/a_b.example.org/tcp/1", "/dns4/a-/tcp/1", "/ip6/fe80::1%25/tcp/1"])
async def test_answerer_goes_on_whatever_place_a_stranger_says_it_has(place: str) -> None:
    server, other, stranger = Node(1), Node(2), Node(3)
    async with running(server, other, stranger):
        server.knows(other)
        point = sign_point(stranger.identity, OURS, addresses=(f"{place}/p2p/{stranger.host.peer_id}",), sequence=1)
        key = keys_of(open_point(point))[0]
        assert (await ask(stranger, server, put(key, pack_points([point])))).type == Message.PUT_VALUE
        named = await ask(other, server, Message(type=Message.FIND_NODE, key=b"any"))
        assert stranger.table.contacts.own not in [bytes(one.id) for one in named.closerPeers]
        assert len(server.table.contacts) == 1
        assert server.host.handler_errors == 0


async def test_answerer_stops_at_its_limit_of_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kademlia_module, "HOST_BURST", 3)
    monkeypatch.setattr(kademlia_module, "HOST_PER_S", 0)
    server, askers = Node(1), [Node(2), Node(3)]
    async with running(server, *askers):
        for asker in (askers[0], askers[1], askers[0]):
            await ask(asker, server, Message(type=Message.PING))
        with pytest.raises(NetworkError):
            await ask(askers[1], server, Message(type=Message.PING))


def test_contact_without_a_place_or_that_is_this_node_is_not_taken() -> None:
    node = Node(1)
    node.table.know(["/ip4/192.0.2.1/tcp/1/p2p/" + node.host.peer_id, "nonsense"])
    node.table.contacts.add(Contact(b"x", "x", ()))
    assert len(node.table.contacts) == 0
