"""Lanes through a third over real sockets: two pools that cannot dial each other, and the host that joins them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import trio

from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import Identity, PeerId
from shoal.swarm.host import Host
from shoal.swarm.lanes import pool as pool_module
from shoal.swarm.lanes.frame import FrameHeader, FrameKind
from shoal.swarm.lanes.limits import RateLimit
from shoal.swarm.lanes.pool import LanePool
from shoal.swarm.lanes.seal import LaneProposal, LaneVia, encode_handshake
from shoal.swarm.reaching import reach as reach_module
from shoal.swarm.reaching import relayed_lanes as relayed_lanes_module
from shoal.swarm.reaching.observed_addresses import ObservedAddressServer
from shoal.swarm.reaching.punching import Puncher
from shoal.swarm.reaching.reach import Reach, Way
from shoal.swarm.reaching.relayed_lanes import (
    RELAYED_LANE_PROTOCOL,
    Passage,
    RelayedLaneServer,
    ask_relayed_lane,
)
from shoal.swarm.streams import MessageStream
from tests.swarm.lane_net import LOOPBACK, WAIT_S, RecordingSink
from tests.waiting import until

CONTROL = ("/ip4/127.0.0.1/tcp/0",)
LANE = "/test/lane/1"
SECRET = b"only these two " * 2000
SOON_S = 20.0
"""For what nothing else has to end first."""


class Facts:
    """As where nobody's lanes but the relays' may be dialled."""

    def __init__(self, node: Node, relays: Sequence[Node]) -> None:
        self._node, self._relays = node, {relay.peer: relay for relay in relays}

    def may_dial(self, peer: PeerId, host: str) -> bool:
        return peer in self._relays

    def is_reached(self) -> bool:
        return False

    def addresses_of(self, relay: PeerId) -> tuple[str, ...]:
        return self._relays[relay].lanes.addresses if relay in self._relays else ()

    def relays(self, peer: PeerId) -> Sequence[PeerId]:
        return tuple(self._relays)

    async def way(self, relay: PeerId, peer: PeerId) -> Way:
        relayed_lane = await ask_relayed_lane(self._node.host, relay, peer)
        return Way(via=relay, addresses=self.addresses_of(relay), near=relayed_lane.near, far=relayed_lane.far)


@dataclass
class Node:
    host: Host
    lanes: LanePool
    sink: RecordingSink
    relayed_lanes: RelayedLaneServer
    observed_addresses: ObservedAddressServer

    @property
    def peer(self) -> PeerId:
        return self.host.peer_id


def make_node(upload: RateLimit | None = None) -> Node:
    identity, sink = Identity.generate(), RecordingSink()
    host = Host(identity=identity, listen=CONTROL)

    async def request(peer: PeerId, data: bytes) -> bytes:
        return await host.request(peer, LANE, data, deadline_s=WAIT_S)

    async def answer(stream: MessageStream) -> None:
        offer = await stream.receive(deadline_s=WAIT_S)
        await stream.send(await pool.answer(stream.peer, offer), deadline_s=WAIT_S)

    pool = LanePool(me=host.peer_id, swarm_id=b"swarm", sink=sink, listen=LOOPBACK, request=request)
    host.serve(LANE, answer)
    return Node(host, pool, sink, RelayedLaneServer(host, upload=upload), ObservedAddressServer(host))


@contextlib.asynccontextmanager
async def nodes(
    *,
    relays: int = 1,
    upload: RateLimit | None = None,
    seen_at: Collection[str] | None = None,
) -> AsyncIterator[list[Node]]:
    """Two that are connected, and relays to which both are; the relays come last.

    seen_at: where members that dialled back see the two, which make holes then.
    """
    made = [make_node(upload) for _ in range(2 + relays)]
    async with trio.open_nursery() as nursery:
        for node in made:
            await nursery.start(node.host.run)
            await nursery.start(node.lanes.run)
            reach = Reach(node.peer, Facts(node, made[2:]), is_direct=node.host.is_direct)
            puncher = None if seen_at is None else Puncher(node.host, reach, partial(frozenset, seen_at))
            if puncher is not None:
                nursery.start_soon(puncher.run)
            handlers = (node.relayed_lanes, node.observed_addresses)
            node.lanes.use(reach, dial_back_probes=node.host.dial_back_probes, handlers=handlers, puncher=puncher)
        for relay in made[2:]:
            relay.relayed_lanes.admits = relay.observed_addresses.admits = lambda peer: True
            for node in made[:2]:
                await node.host.dial(relay.host.addresses[0], deadline_s=WAIT_S)
        await made[0].host.dial(made[1].host.addresses[0], deadline_s=WAIT_S)
        yield made
        nursery.cancel_scope.cancel()


def note(payload: bytes) -> FrameHeader:
    return FrameHeader(kind=FrameKind.REQUEST, length=len(payload))


async def test_frames_pass_through_a_third_that_sees_ciphertext_only(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[bytes] = []
    receive = trio.SocketStream.receive_some

    async def spy(self: trio.SocketStream, limit: int | None = None) -> bytes:
        data = bytes(await receive(self, limit))
        if limit == 256 << 10:  # as only passages ask for
            passed.append(data)
        return data

    monkeypatch.setattr(trio.SocketStream, "receive_some", spy)
    async with nodes() as (alice, bob, relay):
        await alice.lanes.ensure(bob.peer, deadline_s=WAIT_S)
        assert relay.relayed_lanes.relayed_lanes == 1
        alice.lanes.post(bob.peer, note(SECRET), SECRET)
        assert await bob.sink.next_frame() == (alice.peer, note(SECRET), SECRET)
        bob.lanes.post(alice.peer, note(b"back"), b"back")
        assert await alice.sink.next_frame() == (bob.peer, note(b"back"), b"back")
        everything = b"".join(passed)
        assert len(everything) > len(SECRET)
        assert SECRET[:30] not in everything
        assert relay.relayed_lanes.bytes_passed >= len(SECRET)
        alice.lanes.drop(bob.peer)
        await until(lambda: relay.relayed_lanes.relayed_lanes == 0)
        assert (await bob.sink.next_closed())[0] == alice.peer


async def test_another_lane_comes_up_through_the_next_relay_when_one_refuses_or_dies() -> None:
    async with nodes(relays=2) as (alice, bob, first, second):
        first.relayed_lanes.admits = None
        await alice.lanes.ensure(bob.peer, deadline_s=WAIT_S)
        assert (first.relayed_lanes.relayed_lanes, second.relayed_lanes.relayed_lanes) == (0, 1)
        await second.host.close(second.host.connection(alice.peer))
        second.relayed_lanes.admits, first.relayed_lanes.admits = None, lambda peer: True
        alice.lanes.drop(bob.peer)
        await bob.sink.next_closed()
        await bob.lanes.ensure(alice.peer, deadline_s=WAIT_S)
        assert first.relayed_lanes.relayed_lanes == 1


async def test_only_members_of_the_relay_get_passages_and_no_more_than_it_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relayed_lanes_module, "PEER_LANE_LIMIT", 2)
    async with nodes() as (alice, bob, relay):
        with pytest.raises(NetworkError, match="no passage"):
            await ask_relayed_lane(alice.host, relay.peer, alice.peer)
        relay.relayed_lanes.admits = lambda peer: peer != bob.peer
        with pytest.raises(NetworkError, match="no passage"):
            await ask_relayed_lane(alice.host, relay.peer, bob.peer)
        relay.relayed_lanes.admits = lambda peer: True
        tickets = [await ask_relayed_lane(alice.host, relay.peer, bob.peer) for _ in range(2)]
        assert len({ticket for one in tickets for ticket in (one.near, one.far)}) == 4
        with pytest.raises(NetworkError, match="as many"):
            await ask_relayed_lane(bob.host, relay.peer, alice.peer)
        assert relay.relayed_lanes.relayed_lanes == 2
        for passage in relay.relayed_lanes._open.values():
            passage.expires_at = trio.current_time()  # as MEET_S later, and nobody came
        assert relay.relayed_lanes.relayed_lanes == 0
        await ask_relayed_lane(bob.host, relay.peer, alice.peer)
        with pytest.raises(NetworkError):
            await alice.host.request(relay.peer, RELAYED_LANE_PROTOCOL, b"\xc1", deadline_s=2.0)


async def test_who_asks_for_passages_and_never_comes_keeps_nobody_from_their_other_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relayed_lanes_module, "PEER_LANE_LIMIT", 2)
    async with nodes(relays=2) as (alice, bob, relay, carol):
        await carol.host.dial(relay.host.addresses[0], deadline_s=WAIT_S)
        for _ in range(2):
            await ask_relayed_lane(alice.host, relay.peer, bob.peer)
        with pytest.raises(NetworkError, match="as many"):
            await ask_relayed_lane(alice.host, relay.peer, bob.peer)
        await ask_relayed_lane(carol.host, relay.peer, bob.peer)
        await ask_relayed_lane(bob.host, relay.peer, carol.peer)


async def test_passages_of_all_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relayed_lanes_module, "RELAYED_LANE_LIMIT", 2)
    async with nodes() as (alice, bob, relay):
        for _ in range(2):
            await ask_relayed_lane(alice.host, relay.peer, bob.peer)
        with pytest.raises(NetworkError, match="as many"):
            await ask_relayed_lane(bob.host, relay.peer, alice.peer)
        assert relay.relayed_lanes.relayed_lanes == 2


async def test_passages_between_others_than_who_comes_first_are_half_of_them_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relayed_lanes_module, "RELAYED_LANE_LIMIT", 2)
    async with nodes() as (alice, bob, relay):
        relay.relayed_lanes.comes_first = lambda peer: peer == bob.peer
        await ask_relayed_lane(alice.host, relay.peer, bob.peer)
        with pytest.raises(NetworkError, match="as many"):
            await ask_relayed_lane(alice.host, relay.peer, bob.peer)
        relay.relayed_lanes.comes_first = lambda peer: peer in (alice.peer, bob.peer)
        await ask_relayed_lane(alice.host, relay.peer, bob.peer)


async def both_ends(calls: contextlib.AsyncExitStack, relay: Node, passage: Passage) -> list[trio.SocketStream]:
    """Connections to the relay that began with the two tickets of a passage."""
    host, port = relay.lanes.addresses[0].split(":")
    ends = []
    for ticket in (passage.near, passage.far):
        ends.append(stream := await calls.enter_async_context(await trio.open_tcp_stream(host, int(port))))
        await stream.send_all(ticket)
    return ends


async def test_passage_without_a_byte_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relayed_lanes_module, "IDLE_LIMIT_S", 0.3)
    async with nodes() as (alice, bob, relay), contextlib.AsyncExitStack() as calls:
        relayed_lane = await ask_relayed_lane(alice.host, relay.peer, bob.peer)
        ends = await both_ends(calls, relay, relayed_lane)
        for stream in ends:
            assert await stream.receive_some(1) == b""
        await until(lambda: relay.relayed_lanes.relayed_lanes == 0)


async def test_passage_ends_where_an_end_takes_nothing_of_what_the_other_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relayed_lanes_module, "TAKE_LIMIT_S", 0.3)
    async with nodes() as (alice, bob, relay), contextlib.AsyncExitStack() as calls:
        relayed_lane = await ask_relayed_lane(alice.host, relay.peer, bob.peer)
        ends = await both_ends(calls, relay, relayed_lane)
        far_more_than_the_kernel_keeps = bytes(64 << 20)
        with trio.fail_after(WAIT_S), pytest.raises(trio.BrokenResourceError):
            await ends[0].send_all(far_more_than_the_kernel_keeps)
        await until(lambda: relay.relayed_lanes.relayed_lanes == 0)


async def test_ticket_is_good_once_and_a_guess_for_nothing() -> None:
    async with nodes() as (alice, bob, relay), contextlib.AsyncExitStack() as calls:
        relayed_lane = await ask_relayed_lane(alice.host, relay.peer, bob.peer)
        host, port = relay.lanes.addresses[0].split(":")

        async def call(ticket: bytes) -> trio.SocketStream:
            stream = await calls.enter_async_context(await trio.open_tcp_stream(host, int(port)))
            await stream.send_all(ticket)
            return stream

        near = await call(relayed_lane.near)
        again = await call(relayed_lane.near)
        assert await again.receive_some(1) == b"", "the place is taken"
        guess = await call(b"\x01" + os.urandom(15) + bytes(200))
        with contextlib.suppress(trio.BrokenResourceError):
            assert await guess.receive_some(1) == b""
        far = await call(relayed_lane.far)
        await near.send_all(b"hello")
        assert await far.receive_some(5) == b"hello"
        await far.aclose()
        assert await near.receive_some(1) == b""
        late = await call(relayed_lane.near)
        assert await late.receive_some(1) == b""


async def test_passage_ends_when_it_has_carried_what_it_may_and_the_lane_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relayed_lanes_module, "LANE_LIMIT_BYTES", 100_000)
    async with nodes(upload=RateLimit(64 << 20)) as (alice, bob, relay):
        await alice.lanes.ensure(bob.peer, deadline_s=WAIT_S)
        with contextlib.suppress(NetworkError):
            for _ in range(8):
                alice.lanes.post(bob.peer, note(SECRET), SECRET)
        _, error = await bob.sink.next_closed()
        assert error is not None
        assert relay.relayed_lanes.bytes_passed <= 100_000 + (256 << 10)


async def test_peer_that_was_summoned_in_vain_is_reached_through_a_third(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach_module, "ASK_S", 0.2)
    async with nodes() as (alice, bob, relay):
        monkeypatch.setattr(Facts, "is_reached", lambda self: True)
        await alice.lanes.ensure(bob.peer, deadline_s=WAIT_S)
        assert relay.relayed_lanes.relayed_lanes == 1


async def test_nobody_is_met_at_a_node_that_is_no_relay_of_ones_own() -> None:
    """Else who asks for a lane could send its peer to any address."""
    async with nodes() as (alice, bob, relay):
        alone = Reach(bob.peer, Facts(bob, ()))
        bob.lanes.use(alone, dial_back_probes=bob.host.dial_back_probes, handlers=(bob.relayed_lanes,))
        with pytest.raises(NetworkError):
            await alice.lanes.ensure(bob.peer, deadline_s=3.0)
        assert relay.relayed_lanes.relayed_lanes <= 1


async def test_who_wants_to_meet_everywhere_at_once_is_met_at_a_few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "MEETINGS_LIMIT", 2 * pool_module.PEER_MEETINGS_LIMIT + 2)
    async with nodes(relays=3) as made:
        alice, bob, first, *others = made
        came: list[trio.SocketStream] = []

        async def hold(stream: trio.SocketStream) -> None:
            came.append(stream)
            await trio.sleep_forever()

        async with trio.open_nursery() as nursery:
            (listener,) = await nursery.start(partial(trio.serve_tcp, hold, 0, host="127.0.0.1"))
            address = f"127.0.0.1:{listener.socket.getsockname()[1]}"
            monkeypatch.setattr(Facts, "addresses_of", lambda facts, relay: (address,))
            bob.lanes._listener.comes_first = lambda peer: peer == others[1].peer

            async def offers(peer: PeerId) -> int:
                """How many of its offers, one more than may be, are taken."""
                taken = 0
                for _ in range(pool_module.PEER_MEETINGS_LIMIT + 1):
                    via = LaneVia(relay=first.peer, ticket=os.urandom(16))
                    proposal = LaneProposal(me=peer, peer=bob.peer, swarm_id=b"swarm", lanes=1, via=via)
                    with contextlib.suppress(NetworkError):
                        await bob.lanes.answer(peer, encode_handshake(proposal.offer))
                        taken += 1
                return taken

            limit = pool_module.PEER_MEETINGS_LIMIT
            assert await offers(alice.peer) == limit
            assert await offers(first.peer) == 1, "half is for those who come first"
            assert await offers(others[0].peer) == 0
            assert await offers(others[1].peer) == limit
            await until(lambda: len(came) == 2 * limit + 1)
            for stream in came:
                await stream.aclose()
            with trio.fail_after(SOON_S):
                await until(lambda: not bob.lanes._meetings)
            assert await offers(alice.peer) == limit
            nursery.cancel_scope.cancel()
