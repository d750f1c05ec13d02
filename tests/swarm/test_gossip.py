"""What gossip keeps of messages that have passed: little, and no more of many than of few."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
import trio

from shoal.protocol.identity import Identity
from shoal.swarm import gossip
from shoal.swarm.gossip import PUBLISH_LIMIT_BYTES, GossipMessage
from shoal.swarm.host import Host
from shoal.swarm.streams import Mailbox, MessageStream

# Below this line libp2p was imported already, with its warnings silenced, by shoal.swarm.host.
from libp2p.peer.id import ID  # isort: skip
from libp2p.pubsub.pb import rpc_pb2  # isort: skip

TEST_DEADLINE_S = 60
TOPIC = "news"
MESSAGES = 150
KEPT_LIMIT_BYTES = 256
"""Of one message that has passed: who, which, and a digest."""


@contextlib.asynccontextmanager
async def two_hosts() -> AsyncIterator[tuple[Host, Host, Mailbox[GossipMessage]]]:
    """Connected, both subscribed; and what comes to the second."""
    async with two_connected() as (near, far, box):
        await until(lambda: bool(near.gossip_peers(TOPIC) and far.gossip_peers(TOPIC)))
        yield near, far, box


@contextlib.asynccontextmanager
async def two_connected(*admitted: str) -> AsyncIterator[tuple[Host, Host, Mailbox[GossipMessage]]]:
    """Of which the first admits only whom `admitted` names, if it names anybody; and what comes to the second."""
    near, far = (
        Host(identity=Identity.from_seed(bytes([seed]) * 32), listen=("/ip4/127.0.0.1/tcp/0",)) for seed in (1, 2)
    )
    if admitted:
        near.is_admitted = lambda peer: peer in admitted
    with trio.fail_after(TEST_DEADLINE_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(near.run)
            await nursery.start(far.run)
            await near.subscribe(TOPIC)
            box = await far.subscribe(TOPIC)
            await near.dial(far.addresses[0], deadline_s=5)
            yield near, far, box
            nursery.cancel_scope.cancel()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - libp2p has no event
        await trio.sleep(0.005)


def test_of_messages_that_have_passed_nothing_of_their_size_is_kept() -> None:
    async def main() -> None:
        async with two_hosts() as (near, far, box):
            await near.publish(TOPIC, bytes(PUBLISH_LIMIT_BYTES))
            received = number = 0
            while received < MESSAGES:  # gossip may lose some, the more so while the mesh grows
                number += 1
                await near.publish(TOPIC, number.to_bytes(2, "big") * 512)
                with trio.move_on_after(1):
                    received += len((await box.receive()).data) == 1024
            for host in (near, far):
                router = host._gossip._router
                assert sum(map(len, router.recent_message_deliveries.values())) == 0
                kept = router.equivocation_detection
                assert len(kept) >= MESSAGES
                assert max(message.ByteSize() for message in kept.values()) <= KEPT_LIMIT_BYTES

    trio.run(main)


def test_a_second_message_of_the_same_number_is_known_by_its_content_and_topic() -> None:
    async def main() -> None:
        async with two_hosts() as (near, far, _):
            router = far._gossip._router
            first = rpc_pb2.Message(from_id=near.peer_id.encode(), seqno=b"7", topicIDs=[TOPIC], data=b"one" * 100)
            assert router._check_equivocation(first)
            assert router._check_equivocation(first)
            for field in ({"data": b"two"}, {"data": b""}, {"topicIDs": ["olds"]}):
                other = rpc_pb2.Message(**{"data": first.data, "topicIDs": [TOPIC], **field})  # type: ignore[arg-type]
                other.from_id, other.seqno = first.from_id, first.seqno
                assert not router._check_equivocation(other)
            assert router._check_equivocation(rpc_pb2.Message(from_id=first.from_id, seqno=b"8", data=b"two"))

    trio.run(main)


def waiting_streams(host: Host) -> int:
    """Of gossip, that strangers opened."""
    return sum(
        str(stream.get_protocol()).startswith("/meshsub")
        for connection in host._network.get_connections()
        for stream in connection.get_streams()
    )


async def echo(stream: MessageStream) -> None:
    await stream.send(await stream.receive(deadline_s=5), deadline_s=5)
    await stream.aclose()


def test_stranger_hears_nothing_and_is_not_heard_until_it_is_admitted() -> None:
    async def main() -> None:
        async with two_connected("nobody") as (near, far, box):
            await until(lambda: waiting_streams(near) == 1)  # which the far one opened, as it admits everybody
            far.serve("/echo/1", echo)
            for _ in range(3):  # a stream that was opened before these is there by now
                await near.request(far.peer_id, "/echo/1", b"?", deadline_s=5)
            for number in range(5):
                await near.publish(TOPIC, b"a secret" + bytes([number]))
            router, pubsub = near._gossip._router, near._gossip._pubsub
            assert not pubsub.peers
            assert not pubsub.peer_topics.get(TOPIC)
            assert not any(router._pending_messages.values())
            near.is_admitted = lambda peer: peer == far.peer_id
            near.gossip_with(far.peer_id)
            await until(lambda: near.gossip_peers(TOPIC) == {far.peer_id})  # what it said before counts now
            await until(lambda: len(pubsub.peers) == 1)
            while (await box.receive()).data != b"for members":
                await near.publish(TOPIC, b"for members")

    trio.run(main)


def test_streams_of_a_stranger_do_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gossip, "STRANGER_DEADLINE_S", 0.5)

    async def main() -> None:
        async with two_connected("nobody") as (near, _, _):
            await until(lambda: waiting_streams(near) == 1)
            await until(lambda: waiting_streams(near) == 0)

    trio.run(main)


def test_neighbours_are_who_comes_first_and_not_who_asked_first() -> None:
    """Whatever strangers are neighbours before a heartbeat, members are after it, as many as there may be."""

    async def main() -> None:
        async with two_hosts() as (near, far, _box):
            router = near._gossip._router
            member = ID.from_base58(far.peer_id)
            crowd = [ID.from_base58(Identity.from_seed(bytes([seed]) * 32).peer_id) for seed in range(20, 40)]
            router.peer_protocol.update(dict.fromkeys(crowd, router.peer_protocol[member]))
            router.pubsub.peer_topics[TOPIC].update(crowd)
            near.comes_first = lambda peer: peer == far.peer_id
            for _ in range(20):
                router.mesh[TOPIC] = set(crowd)
                graft, prune = router.mesh_heartbeat()
                assert TOPIC in graft[member]
                assert member in router.mesh[TOPIC]
                assert member not in prune
                assert len(router.mesh[TOPIC]) == gossip.DEGREE
            near.comes_first = lambda peer: True
            router.mesh[TOPIC] = {member, *crowd}
            router.mesh_heartbeat()
            assert len(router.mesh[TOPIC]) == gossip.DEGREE, "many that come first are no more than others would be"

    trio.run(main)
