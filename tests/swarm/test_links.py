"""Links between real hosts on loopback: the hello, and peers at the far end that keep no rule."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest
import trio

from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.invites import Revocations
from shoal.protocol.limits import TokenBucket
from shoal.protocol.messages import Leave, Term
from shoal.protocol.peering import Full, Hello, HelloAnswer, LinkMessage, Nack, Ping, Refusal, SwarmMessage, Welcome
from shoal.protocol.places import SILENT_STRANGER_S, Rank
from shoal.protocol.wire import MESSAGE_LIMIT_BYTES, WIRE_VERSION, Sealer, SwarmId, canonical
from shoal.swarm import links
from shoal.swarm.host import Host
from shoal.swarm.limits import Reason
from shoal.swarm.links import (
    ENVELOPE_KIND,
    HELLO_PROTOCOL,
    MESSAGES_PROTOCOL,
    REST_LIMIT_S,
    SWARM_KIND,
    Links,
    NoPlaceLeft,
    Refused,
)
from shoal.swarm.streams import MessageStream
from tests.round_messages import unsigned_certificate
from tests.waiting import WAIT_S, running, until

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
SWARM = SwarmId(bytes(range(32)))


def identity(n: int) -> Identity:
    return Identity.from_seed(bytes([n]) * 32)


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


def nack(nonce: int = 1) -> Nack:
    return Nack(target=BY_ANOTHER.peer_id, nonce=nonce)


HELLO = Hello(wire=WIRE_VERSION, swarm=SWARM, software="test", record=b"record")
WELCOME = Welcome(record=b"record", others=())


@dataclass
class Gate:
    """A gatekeeper that admits all but `refusing`, and remembers what it was told."""

    refusing: dict[PeerId, str] = field(default_factory=dict)
    not_believing: set[PeerId] = field(default_factory=set)
    ranks: dict[PeerId, Rank] = field(default_factory=dict)
    following: set[PeerId] = field(default_factory=set)
    fulls: list[tuple[PeerId, Full]] = field(default_factory=list)
    gone: list[PeerId] = field(default_factory=list)
    ups: list[PeerId] = field(default_factory=list)
    downs: list[PeerId] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    took_s: dict[PeerId, float] = field(default_factory=dict)
    asleep: list[PeerId] = field(default_factory=list)
    heard: list[tuple[PeerId, LinkMessage]] = field(default_factory=list)
    through_others: list[tuple[PeerId, SwarmMessage]] = field(default_factory=list)

    def hello(self) -> Hello:
        return HELLO

    def welcome(self, peer: PeerId, hello: Hello) -> tuple[HelloAnswer, Revocations | None]:
        return (Refusal(reason=self.refusing[peer]) if peer in self.refusing else WELCOME), None

    def told_revocations(self, peer: PeerId, revocations: Revocations) -> None:
        raise AssertionError("nobody was revoked")

    def welcomed(self, peer: PeerId, welcome: Welcome) -> None:
        if peer in self.not_believing:
            raise RemoteError("a record that does not hold", peer=peer)

    def rank(self, peer: PeerId) -> Rank:
        return self.ranks.get(peer, Rank.STRANGER)

    def follows(self, peer: PeerId) -> bool:
        return peer in self.following

    def full(self, peer: PeerId) -> Full:
        return Full(others=(b"another",))

    def turned_away(self, peer: PeerId, full: Full) -> None:
        self.fulls.append((peer, full))

    def gave_way(self, peer: PeerId) -> None:
        self.gone.append(peer)

    def linked(self, peer: PeerId) -> None:
        self.ups.append(peer)

    def made(self, peer: PeerId, took_s: float) -> None:
        self.took_s[peer] = took_s

    def lost(self, peer: PeerId, why: str) -> None:
        self.downs.append(peer)
        self.reasons.append(why)

    def rests(self, peer: PeerId) -> None:
        self.asleep.append(peer)

    def message(self, peer: PeerId, message: LinkMessage) -> None:
        self.heard.append((peer, message))

    def admits(self, peer: PeerId) -> bool:
        return peer not in self.refusing

    def passed_on(self, peer: PeerId, message: SwarmMessage) -> None:
        self.through_others.append((peer, message))


@dataclass
class Node:
    identity: Identity
    host: Host
    gate: Gate
    links: Links

    @property
    def peer(self) -> PeerId:
        return self.identity.peer_id

    async def hears(self, other: Node, message: LinkMessage) -> None:
        await until(lambda: (other.peer, message) in self.gate.heard)

    async def join(self, other: Node | Host) -> None:
        host = other if isinstance(other, Host) else other.host
        assert await self.links.join(host.addresses[0], deadline_s=WAIT_S) == host.peer_id


@contextlib.asynccontextmanager
async def nodes(*seeds: int) -> AsyncIterator[list[Node]]:
    """Nodes that run their links, nobody linked yet."""
    made = []
    async with trio.open_nursery() as nursery:
        for seed in seeds:
            who, gate = identity(seed), Gate()
            host = Host(identity=who, listen=LOOPBACK)
            table = Links(host=host, swarm_id=SWARM, sealer=Sealer(who, SWARM, 1), admission_control=gate)
            await nursery.start(host.run)
            await nursery.start(table.run)
            made.append(Node(who, host, gate, table))
        yield made
        nursery.cancel_scope.cancel()


class Stranger:
    """A host that keeps no rule: it says what the test wants, and takes a message stream if `reads`."""

    def __init__(self, seed: int, *, reads: bool = True) -> None:
        self.identity = identity(seed)
        self.sealer = Sealer(self.identity, SWARM, 1)
        self.host = Host(identity=self.identity, listen=LOOPBACK)
        self.host.serve(MESSAGES_PROTOCOL, self._read if reads else self._hold)

    @property
    def peer(self) -> PeerId:
        return self.identity.peer_id

    async def _read(self, stream: MessageStream) -> None:
        with contextlib.suppress(NetworkError):
            while True:
                await stream.receive(deadline_s=None)

    async def _hold(self, stream: MessageStream) -> None:
        await trio.sleep_forever()

    async def say_hello(self, node: Node) -> None:
        """Dial `node` and be admitted."""
        await self.host.dial(node.host.addresses[0], deadline_s=WAIT_S)
        reply = await self.host.request(node.peer, HELLO_PROTOCOL, canonical(HELLO), deadline_s=WAIT_S)
        assert reply == canonical(WELCOME)
        await until(lambda: self.peer in node.links.linked())

    async def open_messages(self, node: Node) -> MessageStream:
        return await self.host.open(node.peer, MESSAGES_PROTOCOL, deadline_s=WAIT_S, limit_bytes=64 << 20)


@contextlib.asynccontextmanager
async def stranger(seed: int, *, reads: bool = True) -> AsyncIterator[Stranger]:
    made = Stranger(seed, reads=reads)
    async with running(made.host):
        yield made


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What our own modules called an error; libp2p is louder than we let it be outside of tests."""
    records = [record for record in caplog.records if record.name.startswith("shoal.")]
    return [record.getMessage() for record in records if record.levelno >= logging.ERROR]


async def assert_still_talking(first: Node, second: Node) -> None:
    """Both ways, over links that were never lost."""
    assert second.peer not in first.gate.downs
    assert first.peer not in second.gate.downs
    for nonce, (source, target) in enumerate([(first, second), (second, first)], start=1000):
        source.links.send(target.peer, nack(nonce))
        await target.hears(source, nack(nonce))


# -- hello ---------------------------------------------------------------------------------------------------


async def test_hello_links_both_ways_and_messages_arrive_in_order() -> None:
    async with nodes(1, 2) as (near, far):
        await near.join(far)
        await until(lambda: near.peer in far.links.linked())
        assert near.links.linked() == {far.peer}
        assert (near.gate.ups, far.gate.ups) == ([far.peer], [near.peer])
        for nonce in range(50):
            near.links.send(far.peer, nack(nonce))
            far.links.broadcast(nack(100 + nonce))
        await until(lambda: len(far.gate.heard) == len(near.gate.heard) == 50)
        assert far.gate.heard == [(near.peer, nack(nonce)) for nonce in range(50)]
        assert near.gate.heard == [(far.peer, nack(100 + nonce)) for nonce in range(50)]
        assert near.gate.downs == far.gate.downs == []


async def test_hello_from_both_ends_at_once_makes_one_link() -> None:
    async with nodes(1, 2) as (one, two):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.join, two)
            nursery.start_soon(two.join, one)
        assert (one.gate.ups, two.gate.ups) == ([two.peer], [one.peer])
        await assert_still_talking(one, two)


async def test_join_raises_refused_with_the_reason_of_the_other() -> None:
    async with nodes(1, 2) as (near, far):
        far.gate.refusing[near.peer] = "you are of another swarm"
        with pytest.raises(Refused, match="refused: you are of another swarm") as caught:
            await near.join(far)
        assert caught.value.peer == far.peer
        assert near.links.linked() == far.links.linked() == frozenset()
        assert near.gate.ups == far.gate.ups == []


async def test_welcome_that_is_not_believed_makes_no_link() -> None:
    async with nodes(1, 2) as (near, far):
        near.gate.not_believing.add(far.peer)
        with pytest.raises(RemoteError, match="does not hold"):
            await near.join(far)
        assert near.links.linked() == frozenset()
        assert near.gate.ups == []


async def test_answer_that_is_no_welcome_makes_no_link() -> None:
    async def gibberish(stream: MessageStream) -> None:
        await stream.receive(deadline_s=WAIT_S)
        await stream.send(b"\xc1", deadline_s=WAIT_S)

    async with nodes(1) as (near,), stranger(9) as odd:
        odd.host.serve(HELLO_PROTOCOL, gibberish)
        with pytest.raises(RemoteError, match=odd.peer):
            await near.join(odd.host)
        assert near.links.linked() == frozenset()


async def test_hello_that_is_none_is_answered_with_nothing() -> None:
    async with nodes(1) as (node,), stranger(9) as odd:
        await odd.host.dial(node.host.addresses[0], deadline_s=WAIT_S)
        hellos = [b"", b"\xc1", nested(100_000), canonical(nack()), canonical(WELCOME), bytes(2 << 20)]
        for count, data in enumerate(hellos, start=1):
            with pytest.raises(NetworkError):
                await odd.host.request(node.peer, HELLO_PROTOCOL, data, deadline_s=WAIT_S)
            assert (node.host.remote_errors, node.host.handler_errors) == (count, 0)
        assert node.links.linked() == frozenset()
        await odd.say_hello(node)  # and is none the worse for it


@contextlib.asynccontextmanager
async def full_node(monkeypatch: pytest.MonkeyPatch, waiting: int) -> AsyncIterator[list[Node]]:
    """Node 1, with a place for one link, which node 2 has; and another, which has no link yet."""
    monkeypatch.setattr(links, "LINK_LIMIT", 1)
    async with nodes(1, 2, waiting) as made:
        await made[0].join(made[1])
        yield made
        assert made[0].links.linked() == {made[1].peer}
        await assert_still_talking(made[0], made[1])


async def test_who_comes_to_a_full_node_is_told_so_at_hello_and_no_link_is_up_at_either_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with full_node(monkeypatch, 3) as (one, _, three):
        with pytest.raises(NoPlaceLeft, match=f"{one.peer} is full"):
            await three.join(one)
        assert three.gate.fulls == [(one.peer, Full(others=(b"another",)))]
        assert (three.gate.ups, three.links.linked()) == ([], frozenset())
        assert one.links._refusals.counts() == {Reason.LINKS.value: 1}


async def test_full_node_ends_no_link_for_whom_it_dials_itself_and_does_not_dial_strangers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with full_node(monkeypatch, 3) as (one, _, three):
        with pytest.raises(NoPlaceLeft, match="all 1 links of this node are taken"):
            await one.links.meet(three.peer, three.host.addresses, deadline_s=WAIT_S)
        assert three.gate.ups == [], "it was not even dialled"
        with pytest.raises(NoPlaceLeft, match="all 1 links of this node are taken"):
            await one.join(three)
        await until(lambda: not three.links.linked())


async def test_who_comes_first_gets_the_place_of_the_stranger_that_was_silent_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "LINK_LIMIT", 3)
    async with nodes(1, 2, 3, 4, 5, 6) as (one, gave, silent, talks, member, other):
        one.gate.ranks = {gave.peer: Rank.CONTRIBUTOR, member.peer: Rank.FIRST, other.peer: Rank.FIRST}
        for node in (gave, silent, talks):
            await node.join(one)
        talks.links.send(one.peer, leave())
        await one.hears(talks, leave())
        silent.links.send(one.peer, nack())
        await one.hears(silent, nack())
        await member.join(one)
        assert one.gate.gone == [silent.peer], "a ping is no more than a sign of life"
        await until(lambda: one.links.linked() == {gave.peer, talks.peer, member.peer})
        assert silent.peer not in one.gate.downs, "it is not held for dead"
        await other.join(one)
        assert one.gate.gone == [silent.peer, talks.peer]
        with pytest.raises(NoPlaceLeft):
            await silent.join(one)
        await assert_still_talking(one, gave)
        await assert_still_talking(one, member)


async def test_stranger_gets_the_place_of_another_only_where_that_was_silent_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "LINK_LIMIT", 2)
    async with nodes(1, 2, 3, 4) as (one, first, second, third):
        for node in (first, second):
            await node.join(one)
        with pytest.raises(NoPlaceLeft):
            await third.join(one)
        one.links._links[first.peer].said_at -= SILENT_STRANGER_S
        await third.join(one)
        assert one.gate.gone == [first.peer]
        await until(lambda: one.links.linked() == {second.peer, third.peer})
        await assert_still_talking(one, third)


async def test_places_that_are_promised_are_not_given_away_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hellos at the last place: while the one welcome is on its way, the other is told that there is none."""
    monkeypatch.setattr(links, "LINK_LIMIT", 1)
    async with nodes(1) as (one,), stranger(8) as early, stranger(9) as late:
        sending, go_on = trio.Event(), trio.Event()
        send = MessageStream.send

        async def held(stream: MessageStream, data: bytes, *, deadline_s: float) -> None:
            if stream.peer == early.peer and data == canonical(WELCOME):
                sending.set()
                await go_on.wait()
            await send(stream, data, deadline_s=deadline_s)

        monkeypatch.setattr(MessageStream, "send", held)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(early.say_hello, one)
            await sending.wait()
            await late.host.dial(one.host.addresses[0], deadline_s=WAIT_S)
            reply = await late.host.request(one.peer, HELLO_PROTOCOL, canonical(HELLO), deadline_s=WAIT_S)
            assert reply == canonical(Full(others=(b"another",)))
            go_on.set()
        assert one.links.linked() == {early.peer}


# -- the streams ---------------------------------------------------------------------------------------------


async def test_messages_of_who_was_not_admitted_are_not_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(links, "ADMISSION_DEADLINE_S", 0.1)
    async with nodes(1, 2) as (node, good), stranger(9) as odd:
        await node.join(good)
        await odd.host.dial(node.host.addresses[0], deadline_s=WAIT_S)
        stream = await odd.open_messages(node)
        await stream.send(odd.sealer.seal(ENVELOPE_KIND, canonical(nack())), deadline_s=WAIT_S)
        with pytest.raises(NetworkError):
            await stream.receive(deadline_s=WAIT_S)
        assert node.gate.heard == []
        # Its fault, not a bug of ours with a traceback in the log for every stranger who tries.
        assert (node.host.remote_errors, node.host.handler_errors) == (1, 0)
        await assert_still_talking(node, good)
    assert not errors(caplog)


async def test_messages_that_come_before_the_admission_wait_for_it() -> None:
    async with nodes(1) as (node,), stranger(9) as eager:
        await eager.host.dial(node.host.addresses[0], deadline_s=WAIT_S)
        stream = await eager.open_messages(node)
        await stream.send(eager.sealer.seal(ENVELOPE_KIND, canonical(nack(7))), deadline_s=WAIT_S)
        await eager.say_hello(node)
        await until(lambda: node.gate.heard == [(eager.peer, nack(7))])


BY_ANOTHER = Sealer(identity(77), SWARM, 1)
FAULTS: dict[str, Callable[[Sealer], bytes]] = {
    "empty": lambda sealer: b"",
    "no msgpack": lambda sealer: b"\xc1",
    "over the limit of a message": lambda sealer: bytes(MESSAGE_LIMIT_BYTES + 1),
    "over the limit of a stream": lambda sealer: bytes(5 << 20),
    "nested deeply": lambda sealer: nested(100_000),
    "nested deeply inside": lambda sealer: sealer.seal(ENVELOPE_KIND, nested(1000)),
    "claims more than there is": lambda sealer: b"\xdd\xff\xff\xff\xff",
    "cut short": lambda sealer: sealer.seal(ENVELOPE_KIND, canonical(nack()))[:-1],
    "a bit flipped": lambda sealer: sealer.seal(ENVELOPE_KIND, canonical(nack()))[:-1] + b"?",
    "signed by another": lambda sealer: BY_ANOTHER.seal(ENVELOPE_KIND, canonical(nack())),
    "of another swarm": lambda sealer: of_another_swarm(sealer).seal(ENVELOPE_KIND, canonical(nack())),
    "of another kind": lambda sealer: sealer.seal("node-record", canonical(nack())),
    "no message of a link": lambda sealer: sealer.seal(ENVELOPE_KIND, canonical(HELLO)),
    "out of range": lambda sealer: sealer.seal(
        ENVELOPE_KIND, canonical({"type": "ping", "nonce": -1, "incarnation": 0})
    ),
}


def of_another_swarm(sealer: Sealer) -> Sealer:
    (who,) = (identity(n) for n in range(100, 100 + len(FAULTS)) if identity(n).peer_id == sealer.peer_id)
    return Sealer(who, SwarmId(bytes(32)), 1)


async def test_fault_on_a_link_ends_that_link_only(caplog: pytest.LogCaptureFixture) -> None:
    async def commit(fault: str, odd: Stranger, node: Node) -> None:
        await odd.say_hello(node)
        stream = await odd.open_messages(node)
        await stream.send(odd.sealer.seal(ENVELOPE_KIND, canonical(nack(1))), deadline_s=WAIT_S)
        await until(lambda: node.gate.heard[-1:] == [(odd.peer, nack(1))])
        with contextlib.suppress(NetworkError):  # it may be refused before all of it is sent
            await stream.send(FAULTS[fault](odd.sealer), deadline_s=WAIT_S)
        await until(lambda: node.gate.downs[-1:] == [odd.peer])
        assert node.gate.heard[-1] == (odd.peer, nack(1)), fault

    async with nodes(1, 2) as (node, good):
        await node.join(good)
        for number, fault in enumerate(FAULTS):
            async with stranger(100 + number) as odd:
                await commit(fault, odd, node)
            assert node.links.linked() == {good.peer}, fault
            assert (node.host.remote_errors, node.host.handler_errors) == (number + 1, 0), fault
        await assert_still_talking(node, good)
    assert not errors(caplog)


async def test_message_that_the_gatekeeper_rejects_ends_the_link() -> None:
    class Strict(Gate):
        def message(self, peer: PeerId, message: LinkMessage) -> None:
            raise RemoteError("not allowed", peer=peer)

    async with nodes(1, 2) as (near, far):
        far.gate.__class__ = Strict
        await near.join(far)
        near.links.send(far.peer, nack())
        await until(lambda: far.gate.downs == [near.peer])
        await until(lambda: near.gate.downs == [far.peer])
        assert far.host.remote_errors == 1


async def assert_the_second_is_read_later(near: Node, costly: Node, other: Node) -> None:
    """Of two messages that one sends; what another says is read at once, and no link ends."""
    for nonce in (1, 2):
        costly.links.send(near.peer, nack(nonce))
    await near.hears(costly, nack(1))
    await assert_still_talking(near, other)
    assert (costly.peer, nack(2)) not in near.gate.heard
    assert costly.peer in near.links.linked()


async def test_link_whose_messages_cost_much_is_read_later_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    async with nodes(1, 2, 3) as (near, costly, other):
        await costly.join(near)
        await other.join(near)
        await until(lambda: {costly.peer, other.peer} <= near.links.linked())
        spent_s = lambda: 60.0 * sum(peer == costly.peer for peer, _ in near.gate.heard)  # noqa: E731
        monkeypatch.setattr(links, "thread_time", spent_s)
        await assert_the_second_is_read_later(near, costly, other)


async def test_link_whose_messages_cost_much_after_they_were_delivered_is_read_later_too() -> None:
    async with nodes(1, 2, 3) as (near, costly, other):
        await costly.join(near)
        await other.join(near)
        await until(lambda: {costly.peer, other.peer} <= near.links.linked())
        near.links.charge(costly.peer, 60.0)
        near.links.charge(identity(9).peer_id, 60.0)  # came through another, and is no link's
        await assert_the_second_is_read_later(near, costly, other)


async def test_queue_that_overflows_drops_the_link(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(links, "QUEUE_LIMIT_MESSAGES", 4)
    async with nodes(1, 2) as (node, good), stranger(9, reads=False) as deaf:
        await node.join(good)
        await deaf.say_hello(node)
        for nonce in range(4):
            node.links.send(deaf.peer, nack(nonce))
        assert node.links.linked() == {good.peer, deaf.peer}
        node.links.send(deaf.peer, nack(4))
        assert node.links.linked() == {good.peer}
        assert node.gate.downs == [deaf.peer]
        node.links.send(deaf.peer, nack(5))  # to nobody
        await until(lambda: deaf.peer not in node.host.connected())
        await assert_still_talking(node, good)
    assert f"{identity(9).peer_id} does not take its messages; dropping the link" in caplog.text


async def test_drain_returns_when_all_that_was_queued_is_sent_and_never_hangs() -> None:
    async with nodes(1, 2) as (node, good):
        await node.join(good)
        for nonce in range(100):
            node.links.send(good.peer, nack(nonce))
        await node.links.drain(deadline_s=WAIT_S)
        node.links.drop(good.peer)  # what is in the stream still arrives or not; nothing is left in the queue
        await node.links.drain(deadline_s=1e6)


async def test_dropped_link_is_lost_at_both_ends_and_can_be_made_again() -> None:
    async with nodes(1, 2) as (near, far):
        for time in range(1, 6):
            await near.join(far)
            await until(lambda: near.peer in far.links.linked())
            near.links.drop(far.peer)
            assert near.links.linked() == frozenset()
            await until(lambda: not far.links.linked())
            assert (near.gate.downs, far.gate.downs) == ([far.peer] * time, [near.peer] * time)
            await until(lambda: not near.host.connected() and not far.host.connected())
        await near.join(far)
        await until(lambda: near.peer in far.links.linked())
        near.links.send(far.peer, nack(3))
        await until(lambda: far.gate.heard == [(near.peer, nack(3))])


async def test_meeting_waits_for_the_old_connection_to_be_closed() -> None:
    async with nodes(1, 2) as (near, far):
        await near.join(far)
        await until(lambda: near.peer in far.links.linked())
        for _ in range(5):
            near.links.drop(far.peer)
            await near.links.meet(far.peer, far.host.addresses, deadline_s=WAIT_S)
            assert near.links.linked() == {far.peer}
            await near.links.meet(far.peer, [], deadline_s=0)  # is up: nothing to do


async def test_link_that_one_end_gave_up_comes_back_at_both() -> None:
    """The other may still hold the old link when the new hello comes; neither may be left with half a link."""
    async with nodes(1, 2) as (near, far):
        await near.join(far)
        await until(lambda: near.peer in far.links.linked())
        near.links.drop(far.peer)
        for attempt in range(50):
            with contextlib.suppress(NetworkError, RemoteError):
                await near.join(far)
            near.links.send(far.peer, nack(attempt))
            far.links.send(near.peer, nack(attempt))
            with trio.move_on_after(0.5):
                await far.hears(near, nack(attempt))
                await near.hears(far, nack(attempt))
                return
        raise AssertionError("the link did not come back")


async def test_connection_that_took_the_place_of_one_that_ends_stays() -> None:
    async with nodes(1, 2) as (near, far):
        await near.join(far)
        await until(lambda: near.peer in far.links.linked())
        near.links.drop(far.peer, last_word=True)
        ending = near.links._parting[far.peer]
        far.links.drop(near.peer)
        await until(lambda: not far.host.connected())
        await far.join(near)
        await until(lambda: far.peer in near.links.linked())
        await ending.wait()
        assert (near.gate.downs, far.gate.downs) == ([far.peer], [near.peer])
        with trio.fail_after(4 * links.ADMISSION_DEADLINE_S):
            for source, target in ((near, far), (far, near)):
                source.links.send(target.peer, nack(7))
                await target.hears(source, nack(7))
        assert (near.gate.downs, far.gate.downs) == ([far.peer], [near.peer])


async def test_hello_over_a_new_connection_ends_the_link_over_the_old_one_and_makes_another() -> None:
    """The end of the old one's streams may be seen late: here not at all, for its messages cost more than they may."""
    async with nodes(1) as (node,), stranger(2) as first, stranger(2) as second:
        await first.say_hello(node)
        stream = await first.open_messages(node)
        node.links._links[first.peer].pace._messages = TokenBucket(1e-6, 0.0)
        await stream.send(first.sealer.seal(ENVELOPE_KIND, canonical(nack(1))), deadline_s=WAIT_S)
        await until(lambda: node.gate.heard == [(first.peer, nack(1))])
        await second.host.dial(node.host.addresses[0], deadline_s=WAIT_S)
        await until(lambda: not first.host.connected())
        assert node.gate.ups == [first.peer]
        await second.say_hello(node)
        stream = await second.open_messages(node)
        await stream.send(Sealer(second.identity, SWARM, 2).seal(ENVELOPE_KIND, canonical(nack(2))), deadline_s=WAIT_S)
        with trio.fail_after(4 * links.ADMISSION_DEADLINE_S):
            await until(lambda: (first.peer, nack(2)) in node.gate.heard)
        assert (node.gate.ups, node.gate.downs) == ([first.peer] * 2, [first.peer])
        assert node.gate.reasons == ["another connection took its place"]


async def test_link_that_rests_is_none_until_its_peer_says_something() -> None:
    async with nodes(1, 2) as (one, two):
        await two.join(one)
        await until(lambda: two.peer in one.links.linked())
        one.links.rest(two.peer)
        assert one.gate.asleep == [two.peer]
        assert one.links.linked() == frozenset()
        assert one.links.resting() == {two.peer}
        one.links.broadcast(nack(1))
        one.links.send(two.peer, unsigned_certificate(identity(1).peer_id))
        one.links.send(two.peer, nack(2))  # whether it is there
        await two.hears(one, nack(2))
        assert [message for _, message in two.gate.heard] == [nack(2)]
        two.links.send(one.peer, nack(3))
        with trio.fail_after(10):
            await until(lambda: one.links.linked() == {two.peer})
        await one.hears(two, nack(3))
        assert one.links.resting() == frozenset()
        assert one.gate.ups == [two.peer, two.peer]
        assert one.gate.downs == []
        one.links.broadcast(nack(4))
        await two.hears(one, nack(4))


async def test_links_from_an_address_that_is_gone_end_also_where_they_rest_and_others_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with nodes(1, 2, 3, 4) as (one, two, three, four):
        for other in (two, three, four):
            await other.join(one)
        await until(lambda: len(one.links.linked()) == 3)
        assert one.host.own_host_of(two.peer) == "127.0.0.1"
        assert one.host.own_host_of(one.peer) is None
        one.links.rest(three.peer)
        gone = {two.peer: "192.0.2.1", three.peer: "192.0.2.1", four.peer: "192.0.2.2"}
        monkeypatch.setattr(one.host, "own_host_of", gone.get)
        one.links.end_from({"192.0.2.1"}, "its address is gone")
        assert (one.links.linked(), one.links.resting()) == ({four.peer}, frozenset())
        assert (one.gate.downs, one.gate.reasons) == ([two.peer], ["its address is gone"])
        await until(lambda: one.host.connected() == {four.peer})


async def test_what_rests_is_ended_where_its_silence_was_this_nodes_own() -> None:
    async with nodes(1, 2) as (one, two):
        await two.join(one)
        await until(lambda: two.peer in one.links.linked())
        one.links.rest(two.peer)
        one.links.end_rests()
        assert (one.links.holds(two.peer), one.gate.downs) == (False, []), "it was lost when it began to rest"
        await until(lambda: one.host.connected() == frozenset())


PING_DEADLINE_S = 20.0


async def test_ping_over_a_link_is_one_of_the_connection_and_nothing_is_signed() -> None:
    async with nodes(1, 2) as (one, two):
        heard: dict[PeerId, list[tuple[PeerId, int | None]]] = {one.peer: [], two.peer: []}
        for node in (one, two):
            node.host.pinged = lambda peer, number, me=node.peer: heard[me].append((peer, number))
        one.links.send(two.peer, Ping(nonce=77, incarnation=0))  # to nobody
        await two.join(one)
        await until(lambda: two.peer in one.links.linked() and one.peer in two.links.linked())
        sealed = one.links._sealer.order, two.links._sealer.order
        one.links.send(two.peer, Ping(nonce=2**32 - 1, incarnation=0))
        with trio.fail_after(PING_DEADLINE_S):
            await until(lambda: (two.peer, 2**32 - 1) in heard[one.peer])
        assert (one.peer, None) in heard[two.peer]
        assert (two.peer, 77) not in heard[one.peer]
        assert (one.links._sealer.order, two.links._sealer.order) == sealed
        assert two.gate.heard == []


@pytest.mark.parametrize("who_asks", ["it", "its peer"])
async def test_ping_of_the_connection_or_its_answer_wakes_a_link_that_rests(who_asks: str) -> None:
    async with nodes(1, 2) as (one, two):
        await two.join(one)
        await until(lambda: two.peer in one.links.linked() and one.peer in two.links.linked())
        woke: list[bool] = []
        one.host.pinged = lambda peer, number: woke.append(one.links.is_heard(peer))
        one.links.rest(two.peer)
        if who_asks == "it":
            one.links.send(two.peer, Ping(nonce=2, incarnation=0))
        else:
            two.links.send(one.peer, Ping(nonce=2, incarnation=0))
        with trio.fail_after(PING_DEADLINE_S):
            await until(lambda: one.links.linked() == {two.peer})
        assert (woke, one.links.resting()) == ([True], frozenset())
        assert not one.links.is_heard(identity(9).peer_id), "whoever has no link gets none by it"
        assert one.links.linked() == {two.peer}


async def test_link_that_rested_long_enough_is_ended_and_can_be_made_again() -> None:
    async with nodes(1, 2) as (one, two):
        await two.join(one)
        await until(lambda: two.peer in one.links.linked())
        one.links.rest(two.peer)
        one.links.end_long_rests(trio.current_time() + REST_LIMIT_S - 1.0)
        assert one.links.resting() == {two.peer}
        one.links.end_long_rests(trio.current_time() + REST_LIMIT_S + 0.1)
        assert one.links.resting() == frozenset()
        await until(lambda: two.gate.downs == [one.peer])
        assert one.gate.downs == []  # it was said when it began to rest
        await two.join(one)
        await until(lambda: two.peer in one.links.linked())


async def test_link_that_rests_ends_with_its_streams() -> None:
    async with nodes(1, 2) as (one, two):
        await two.join(one)
        await until(lambda: two.peer in one.links.linked())
        one.links.rest(two.peer)
        two.links.drop(one.peer)
        await until(lambda: not one.links.resting())
        assert one.gate.downs == []


async def test_who_introduces_itself_to_one_whose_link_rests_wakes_it() -> None:
    async with nodes(1, 2) as (one, two):
        await two.join(one)
        await until(lambda: two.peer in one.links.linked())
        one.links.rest(two.peer)
        await one.join(two)
        assert one.links.linked() == {two.peer}
        assert one.links.resting() == frozenset()
        one.links.broadcast(nack(5))
        await two.hears(one, nack(5))


async def test_links_that_rest_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "RESTING_LIMIT", 1)
    async with nodes(1, 2, 3) as (one, two, three):
        for other in (two, three):
            await other.join(one)
        await until(lambda: one.links.linked() == {two.peer, three.peer})
        one.links.rest(two.peer)
        one.links.rest(three.peer)
        assert one.links.resting() == {three.peer}


async def test_cancelled_run_ends_its_links_at_the_other_ends() -> None:
    async with nodes(1) as (near,), stranger(9) as far:
        table = Links(host=far.host, swarm_id=SWARM, sealer=far.sealer, admission_control=Gate())
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(table.run)
                await table.join(near.host.addresses[0], deadline_s=WAIT_S)
                await until(lambda: far.peer in near.links.linked())
                table.send(near.peer, nack(1))
                await until(lambda: near.gate.heard == [(far.peer, nack(1))])
                scope.cancel()
        await until(lambda: near.gate.downs == [far.peer])


# -- what others pass on -------------------------------------------------------------------------------------


def leave(round: int = 1) -> Leave:
    return Leave(term=Term(), round=round, base=bytes(32), signature=bytes(64))


async def said_up_to_now(speaker: Node, listener: Node) -> list[LinkMessage]:
    """What one has heard of another when all is there that was said before: a link keeps the order."""
    speaker.links.send(listener.peer, nack(len(listener.gate.heard)))
    await listener.hears(speaker, nack(len(listener.gate.heard)))
    return [message for peer, message in listener.gate.heard if peer == speaker.peer and not isinstance(message, Nack)]


async def test_who_comes_first_says_nothing_of_the_course_of_a_round_to_strangers_until_they_do() -> None:
    """Else what a round costs would grow with the number of strangers that fill a node."""
    async with nodes(1, 2, 3) as (first, silent, member):
        for node in (silent, member):
            await node.join(first)
            await until(lambda n=node: first.peer in n.links.linked())  # type: ignore[misc]
        first.gate.ranks = {first.peer: Rank.FIRST, member.peer: Rank.CONTRIBUTOR}
        first.links.broadcast(leave(1))
        first.links.broadcast(unsigned_certificate(identity(1).peer_id))
        assert await said_up_to_now(first, silent) == [unsigned_certificate(identity(1).peer_id)]
        assert await said_up_to_now(first, member) == [leave(1), unsigned_certificate(identity(1).peer_id)]
        silent.links.broadcast(leave(2))
        assert await said_up_to_now(silent, first) == [leave(2)]
        first.links.broadcast(leave(3))
        assert await said_up_to_now(first, silent) == [unsigned_certificate(identity(1).peer_id), leave(3)]
        first.gate.following = {silent.peer}  # it took part, and does no more
        first.links.broadcast(leave(4))
        assert await said_up_to_now(first, silent) == [unsigned_certificate(identity(1).peer_id), leave(3)]
        assert (await said_up_to_now(first, member))[-1] == leave(4)


async def test_who_does_not_come_first_says_all_of_a_round_to_everybody() -> None:
    """One that knows no member yet has to be heard by one, and two that know nobody by each other."""
    async with nodes(1, 2) as (one, other):
        await one.join(other)
        await until(lambda: one.peer in other.links.linked())
        one.links.broadcast(leave(1))
        assert await said_up_to_now(one, other) == [leave(1)]


@contextlib.asynccontextmanager
async def chain(*between: int) -> AsyncIterator[list[Node]]:
    """Nodes 1 and 2 without a link, each linked to all of `between`, who have been told; they come last."""
    async with nodes(1, 2, *between) as made:
        one, two, *others = made
        for other in others:
            await one.join(other)
            await two.join(other)
        for first, second in itertools.combinations(others, 2):
            await first.join(second)
        everybody = {node.peer for node in made}
        ends = {one.peer: {two.peer, one.peer}, two.peer: {one.peer, two.peer}}
        await until(lambda: all(n.links.linked() == everybody - ends.get(n.peer, {n.peer}) for n in made))
        for node in others:
            node.links.message_relay.told(one.peer, [two.peer])
        one.links.message_relay.lack([two.peer])
        yield made


async def test_broadcast_reaches_one_without_a_link_through_another_as_its_signers() -> None:
    async with chain(3) as (one, two, between):
        for round in range(1, 20):
            one.links.broadcast(leave(round))
        two.links.broadcast(leave(99))
        await until(lambda: len(two.gate.through_others) == 19 and one.gate.through_others)
        assert two.gate.through_others == [(one.peer, leave(round)) for round in range(1, 20)]
        assert one.gate.through_others == [(two.peer, leave(99))]
        assert two.gate.heard == one.gate.heard == between.gate.through_others == []
        assert [peer for peer, _ in between.gate.heard].count(one.peer) == 19


async def test_message_to_one_without_a_link_goes_through_another() -> None:
    async with chain(3) as (one, two, between):
        one.links.send(two.peer, nack())  # for who hears it, and nobody else
        one.links.send(two.peer, leave(5))
        await until(lambda: two.gate.through_others == [(one.peer, leave(5))])
        assert between.gate.heard == [(one.peer, leave(5))]


async def test_two_forwarders_deliver_once_and_a_third_keeps_out_of_it() -> None:
    async with chain(3, 4, 5) as (one, two, *between):
        before = [node.host.traffic.bytes_sent for node in between]
        for round in range(30):
            one.links.broadcast(leave(round))
        await until(lambda: len(two.gate.through_others) == 30)
        assert two.gate.through_others == [(one.peer, leave(round)) for round in range(30)]
        for node in between:
            await until(lambda n=node: len(n.gate.heard) == 30)  # type: ignore[misc]
            await node.links.drain(deadline_s=WAIT_S)
        assert len(two.gate.through_others) == 30
        sent = [node.host.traffic.bytes_sent - was for node, was in zip(between, before, strict=True)]
        assert sorted(count > 0 for count in sent) == [False, True, True]


async def test_what_was_passed_on_is_not_passed_on_again() -> None:
    """3 is between 1 and 2; 4, which 2 is linked to, lacks 1 as well, and hears nothing of it from 2."""
    async with chain(3) as (one, two, between), nodes(4) as (far,):
        await far.join(two)
        await until(lambda: far.peer in two.links.linked())
        for node in (two, between):
            node.links.message_relay.told(far.peer, [one.peer])
        one.links.broadcast(leave(1))
        await until(lambda: two.gate.through_others == [(one.peer, leave(1))])
        two.links.send(far.peer, nack(3))
        await far.hears(two, nack(3))
        assert far.gate.through_others == []


async def test_replayed_message_is_passed_on_once() -> None:
    async with nodes(1, 2) as (between, target), stranger(9) as origin:
        await target.join(between)
        await origin.say_hello(between)
        between.links.message_relay.told(target.peer, [origin.peer])
        stream = await origin.open_messages(between)
        sealed = origin.sealer.seal(SWARM_KIND, canonical(leave(1)))
        later = origin.sealer.seal(SWARM_KIND, canonical(leave(2)))
        before = between.host.traffic.bytes_sent
        for data in (sealed, sealed, sealed, later, sealed):
            await stream.send(data, deadline_s=WAIT_S)
        await until(lambda: len(target.gate.through_others) == 2)
        await stream.send(origin.sealer.seal(ENVELOPE_KIND, canonical(nack(1))), deadline_s=WAIT_S)
        await until(lambda: between.gate.heard[-1:] == [(origin.peer, nack(1))])
        await between.links.drain(deadline_s=WAIT_S)
        assert target.gate.through_others == [(origin.peer, leave(1)), (origin.peer, leave(2))]
        assert between.host.traffic.bytes_sent - before == len(sealed) + len(later)


PASSED_ON: dict[str, tuple[Callable[[], bytes], bool]] = {
    "of a member": (lambda: BY_ANOTHER.seal(SWARM_KIND, canonical(leave(7))), True),
    "with a bit flipped": (lambda: BY_ANOTHER.seal(SWARM_KIND, canonical(leave(7)))[:-1] + b"?", False),
    "that is no message to the swarm": (lambda: BY_ANOTHER.seal(SWARM_KIND, canonical(nack())), False),
    "that was meant for a neighbour": (lambda: BY_ANOTHER.seal(ENVELOPE_KIND, canonical(leave(7))), False),
    "of another swarm": (
        lambda: Sealer(identity(77), SwarmId(bytes(32)), 1).seal(SWARM_KIND, canonical(leave(7))),
        False,
    ),
}


@pytest.mark.parametrize("what", PASSED_ON)
async def test_message_through_another_is_taken_as_its_signers_or_ends_the_link(what: str) -> None:
    make, good = PASSED_ON[what]
    async with nodes(1) as (node,), stranger(9) as between:
        await between.say_hello(node)
        stream = await between.open_messages(node)
        await stream.send(make(), deadline_s=WAIT_S)
        if good:
            await until(lambda: node.gate.through_others == [(BY_ANOTHER.peer_id, leave(7))])
            assert node.gate.heard == []
            assert node.links.linked() == {between.peer}
        else:
            await until(lambda: node.gate.downs == [between.peer])
            assert node.gate.through_others == node.gate.heard == []


async def test_stranger_is_not_heard_through_another() -> None:
    async with nodes(1) as (node,), stranger(9) as between:
        node.gate.refusing[BY_ANOTHER.peer_id] = "who is that"
        await between.say_hello(node)
        stream = await between.open_messages(node)
        await stream.send(BY_ANOTHER.seal(SWARM_KIND, canonical(leave(7))), deadline_s=WAIT_S)
        await stream.send(between.sealer.seal(ENVELOPE_KIND, canonical(nack(1))), deadline_s=WAIT_S)
        await until(lambda: node.gate.heard == [(between.peer, nack(1))])
        assert node.gate.through_others == []


async def test_flood_that_is_to_be_passed_on_costs_nobody_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "QUEUE_LIMIT_MESSAGES", 8)
    monkeypatch.setattr(links, "RELAYED_QUEUED_LIMIT", 4)
    async with nodes(1, 2) as (between, good), stranger(8) as flooder, stranger(9) as slow:
        open_stream = between.host.open

        async def open_or_wait(peer: PeerId, protocol: str, *, deadline_s: float) -> MessageStream:
            if peer == slow.peer:
                await trio.sleep_forever()
            return await open_stream(peer, protocol, deadline_s=deadline_s)

        between.host.open = open_or_wait  # type: ignore[method-assign, assignment]
        await good.join(between)
        await slow.say_hello(between)
        await flooder.say_hello(between)
        between.links.message_relay.told(slow.peer, [flooder.peer])
        stream = await flooder.open_messages(between)
        for round in range(50):
            await stream.send(flooder.sealer.seal(SWARM_KIND, canonical(leave(round))), deadline_s=WAIT_S)
        await until(lambda: len(between.gate.heard) == 50)
        assert slow.peer in between.links.linked()
        await assert_still_talking(between, good)


async def test_stranger_that_was_called_and_answers_no_hello_keeps_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "HELLO_DEADLINE_S", 0.5)
    async with nodes(1) as (one,), stranger(8) as mute, stranger(9) as member:
        one.gate.ranks[member.peer] = Rank.FIRST

        async def call(silent: Stranger) -> None:
            silent.host.serve(HELLO_PROTOCOL, silent._hold)
            with pytest.raises(NetworkError, match="nothing from"):
                await one.links.meet(silent.peer, silent.host.addresses, deadline_s=WAIT_S)

        await call(mute)
        assert mute.peer in one.host.connected(), "there is room, and it may have too much to do"
        one.host._network._connection_limit = 2
        for silent in (mute, member):
            await call(silent)
        assert mute.peer not in one.host.connected()
        assert member.peer in one.host.connected(), "who comes first has its place"


async def test_stream_of_a_connection_that_is_gone_takes_no_part_in_the_next_ones_link() -> None:
    async with nodes(1) as (one,), stranger(9) as early:
        await early.host.dial(one.host.addresses[0], deadline_s=WAIT_S)
        before = one.host.connection(early.peer)
        await (await early.open_messages(one)).send(b"of no link", deadline_s=WAIT_S)
        await until(lambda: waiting_to_be_admitted(one) == 1)
        await early.host.close(early.host.connection(one.peer))
        await until(lambda: one.host.connection(early.peer) is not before)
        await early.say_hello(one)
        stream = await early.open_messages(one)
        await stream.send(early.sealer.seal(ENVELOPE_KIND, canonical(nack())), deadline_s=WAIT_S)
        with trio.fail_after(WAIT_S / 3):
            await until(lambda: (early.peer, nack()) in one.gate.heard or one.gate.downs)
        assert one.gate.downs == []
        assert early.peer in one.links.linked()


def waiting_to_be_admitted(node: Node) -> int:
    """Message streams that were opened to it, and whose peer has not said hello."""
    return node.links._admitted.statistics().tasks_waiting


async def test_who_says_hello_over_and_over_is_answered_for_a_while_and_keeps_its_link() -> None:
    async with nodes(1) as (one,), stranger(9) as eager:
        await eager.say_hello(one)
        answers = 0
        with contextlib.suppress(NetworkError):
            while answers < 4 * links.HELLOS_BURST:
                await eager.host.request(one.peer, HELLO_PROTOCOL, canonical(HELLO), deadline_s=WAIT_S)
                answers += 1
        assert links.HELLOS_BURST - 2 <= answers < 4 * links.HELLOS_BURST
        assert one.gate.downs == []
        assert eager.peer in one.links.linked()
