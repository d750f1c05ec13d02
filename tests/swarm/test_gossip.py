"""What gossip keeps of messages that have passed: little, and no more of many than of few."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
import trio

from shoal.protocol.identity import Identity
from shoal.protocol.limits import Rates
from shoal.swarm import gossip, limits
from shoal.swarm.gossip import PUBLISH_LIMIT_BYTES, TOPICS_LIMIT, GossipMessage
from shoal.swarm.gossip_packets import NUMBERS_WINDOW, parse
from shoal.swarm.host import Host
from shoal.swarm.limits import Reason
from shoal.swarm.streams import Mailbox, MessageStream
from tests.swarm.gossiping import published

# Below this line libp2p was imported already, with its warnings silenced, by shoal.swarm.host.
from libp2p.peer.id import ID  # isort: skip
from libp2p.pubsub.pb import rpc_pb2  # isort: skip
from libp2p.pubsub.validators import PUBSUB_SIGNING_PREFIX  # isort: skip
from libp2p.utils import encode_varint_prefixed  # isort: skip
from tests.waiting import WAIT_S, running, until

TEST_DEADLINE_S = 300
TOPIC = "news"
MESSAGES = 150
FULL_PACKET = gossip.GATHER_LIMIT_BYTES // 1024  # so many of them wait for nothing
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
        async with running(near, far):
            await near.subscribe(TOPIC)
            box = await far.subscribe(TOPIC)
            await near.dial(far.addresses[0], deadline_s=WAIT_S)
            yield near, far, box


def news(number: int, size_bytes: int = 1) -> rpc_pb2.RPC:
    return rpc_pb2.RPC(publish=[rpc_pb2.Message(seqno=bytes([number]), data=bytes(size_bytes))])


def numbers_of(packet: rpc_pb2.RPC) -> list[int]:
    return [one.seqno[0] for one in packet.publish]


@pytest.mark.virtual_time(limit_s=60)
async def test_what_comes_soon_after_a_packet_is_gathered_in_the_next() -> None:
    outbox, other = gossip._Outbox(), gossip._Outbox()
    assert outbox.push(news(0))
    began = trio.current_time()
    assert numbers_of(await outbox.pop()) == [0]
    assert trio.current_time() == began, "where little is said nothing waits"
    shared = news(1)
    for one in (shared, news(2), rpc_pb2.RPC(subscriptions=[rpc_pb2.RPC.SubOpts(topicid="t", subscribe=True)])):
        assert outbox.push(one)
    assert other.push(shared)
    packet = await outbox.pop()
    assert trio.current_time() == began + gossip.GATHER_S
    assert (numbers_of(packet), len(packet.subscriptions)) == ([1, 2], 1)
    assert numbers_of(await other.pop()) == [1], "one message may wait for many peers"
    assert outbox._queued_bytes == other._queued_bytes == 0
    await trio.sleep(2 * gossip.GATHER_S)
    assert outbox.push(news(3))
    later = trio.current_time()
    assert numbers_of(await outbox.pop()) == [3]
    assert trio.current_time() == later


@pytest.mark.virtual_time(limit_s=60)
async def test_a_packet_is_gathered_up_to_its_limit_and_the_rest_goes_in_the_next() -> None:
    outbox = gossip._Outbox()
    for number, size_bytes in enumerate((1000, gossip.GATHER_LIMIT_BYTES - 2000, 900, 2 * gossip.GATHER_LIMIT_BYTES)):
        assert outbox.push(news(number, size_bytes))
    began = trio.current_time()
    found = [numbers_of(await outbox.pop()) for _ in range(2)]
    assert found == [[0, 1, 2], [3]], "a message that is larger goes alone, and whole"
    assert outbox.push(news(4))
    for number in (5, 6):
        assert outbox.push(news(number, gossip.GATHER_LIMIT_BYTES))
    assert [numbers_of(await outbox.pop()) for _ in range(2)] == [[4], [5]]
    assert trio.current_time() == began, "a full packet waits for nothing"
    outbox.close()
    assert numbers_of(await outbox.pop()) == [6]
    assert await outbox.pop() is None


async def test_new_subscriber_is_sent_what_it_lacks_of_the_recent_messages_and_none_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with two_hosts() as (near, far, box):
        router, came = near._gossip._router, list[bytes]()
        monkeypatch.setattr(router.mcache, "shift", lambda: None)  # what was published stays recent
        push = far._gossip._pubsub.push_msg

        async def pushed(forwarder: ID, message: rpc_pb2.Message) -> None:
            came.append(message.data)
            await push(forwarder, message)

        monkeypatch.setattr(far._gossip._pubsub, "push_msg", pushed)
        await published(near, box, b"it has this")
        monkeypatch.setattr(router, "mesh", {})  # and nobody to send to at once: it hears of what is offered alone
        await near.publish(TOPIC, b"it lacks this")
        recent = [router.mcache.get(number).data for number in router.mcache.window(TOPIC)]
        assert b"it has this" in recent
        assert b"it lacks this" in recent
        came.clear()
        await router.send_recent_messages(ID.from_base58(far.peer_id), TOPIC)
        await until(lambda: came)
    assert came == [b"it lacks this"]


async def test_of_messages_that_have_passed_nothing_of_their_size_is_kept() -> None:
    async with two_hosts() as (near, far, box):
        await near.publish(TOPIC, bytes(PUBLISH_LIMIT_BYTES))
        received = number = 0
        while received < MESSAGES:  # gossip may lose some, the more so while the mesh grows
            with trio.move_on_after(2 * gossip.GATHER_S):
                for _ in range(FULL_PACKET):
                    number += 1
                    await near.publish(TOPIC, number.to_bytes(2, "big") * 512)
                for _ in range(FULL_PACKET):
                    received += len((await box.receive()).data) == 1024
        for host in (near, far):
            router = host._gossip._router
            assert sum(map(len, router.recent_message_deliveries.values())) == 0
            kept = router.equivocation_detection
            assert len(kept) >= MESSAGES
            assert max(message.ByteSize() for message in kept.values()) <= KEPT_LIMIT_BYTES


async def test_a_second_message_of_the_same_number_is_known_by_its_content_and_topic() -> None:
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


def waiting_streams(host: Host) -> int:
    """Of gossip, that strangers opened."""
    return sum(
        str(stream.get_protocol()).startswith("/meshsub")
        for connection in host._network.get_connections()
        for stream in connection.get_streams()
    )


async def echo(stream: MessageStream) -> None:
    await stream.send(await stream.receive(deadline_s=WAIT_S), deadline_s=WAIT_S)
    await stream.aclose()


async def test_stranger_hears_nothing_and_is_not_heard_until_it_is_admitted() -> None:
    async with two_connected("nobody") as (near, far, box):
        await until(lambda: waiting_streams(near) == 1)  # which the far one opened, as it admits everybody
        far.serve("/echo/1", echo)
        for _ in range(3):  # a stream that was opened before these is there by now
            await near.request(far.peer_id, "/echo/1", b"?", deadline_s=WAIT_S)
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


async def test_streams_of_a_stranger_do_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gossip, "STRANGER_DEADLINE_S", 0.5)
    async with two_connected("nobody") as (near, _, _):
        await until(lambda: waiting_streams(near) == 1)
        await until(lambda: waiting_streams(near) == 0)


async def test_what_a_member_says_of_other_topics_is_nowhere_kept() -> None:
    async with two_hosts() as (near, far, box):
        router, pubsub = far._gossip._router, far._gossip._pubsub
        packet = rpc_pb2.RPC()
        for number in range(200):
            topic = f"topic {number}"
            packet.control.prune.add(topicID=topic, backoff=1 << 40)
            packet.control.graft.add(topicID=topic)
            packet.control.ihave.add(topicID=topic, messageIDs=[b"1"])
            packet.subscriptions.add(subscribe=True, topicid=topic)
        said = signed(near, b"1", b"in two topics", TOPIC, *(f"topic {number}" for number in range(20)))
        packet.publish.append(said)
        packet.publish.append(signed(near, b"2", b"genuine", TOPIC))
        packet.publish.append(signed(near, bytes(100), b"long", TOPIC))
        peer = near_id(near)
        await pubsub._take(peer, parse(packet.SerializeToString()))
        assert (await box.receive()).data == b"genuine"
        assert not box._items
        topics = {TOPIC}
        assert set(pubsub.peer_topics) == topics
        assert set(router.mesh) == topics
        assert set(router.back_off) <= topics
        for table in (router.graft_flood_tracking, router.ihave_message_limits, router.message_rate_limits):
            assert set(table.get(peer, ())) <= topics
        for table in (router.time_since_last_publish, router.recent_message_deliveries):
            assert set(table) <= topics
        assert len(pubsub._said[peer]) == TOPICS_LIMIT
        await near.close(near.connection(far.peer_id))
        await until(lambda: not far.gossip_peers(TOPIC))
        assert not pubsub._said


async def test_subscription_counts_once_its_topic_is_ours() -> None:
    async with two_hosts() as (near, far, _):
        await near.subscribe("later")
        await until(lambda: "later" in far._gossip._pubsub._said.get(near_id(near), ()))
        assert not far.gossip_peers("later")
        box = await far.subscribe("later")
        assert far.gossip_peers("later") == {near.peer_id}
        await until(lambda: near.gossip_peers("later") == {far.peer_id})
        assert (await published(near, box, b"now", topic="later")).data == b"now"


async def test_messages_that_are_wanted_again_and_again_are_sent_within_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WANTED_BURST_BYTES", 1 << 20)
    async with two_hosts() as (near, far, box):
        await published(near, box, bytes(PUBLISH_LIMIT_BYTES))
        router, pubsub = far._gossip._router, far._gossip._pubsub
        number = router.mcache.window(TOPIC)[0]
        sent: list[int] = []
        monkeypatch.setattr(router, "send_rpc", lambda peer, packet, **_: sent.append(packet.ByteSize()))
        want = rpc_pb2.RPC()
        want.control.iwant.add(messageIDs=[number] * 1000)
        for _ in range(20):
            router.iwant_request_limits.clear()  # libp2p's own limit, which counts what is asked at once as one
            router.mcache.put(signed(near, b"1", b"", TOPIC))
            await pubsub._take(near_id(near), parse(want.SerializeToString()))
        assert 1 <= len(sent) <= 5
        assert max(sent) < PUBLISH_LIMIT_BYTES + 4096


async def test_reader_of_gossip_waits_for_who_says_too_much() -> None:
    async with two_hosts() as (near, far, box):
        far._gossip._pubsub._peer_limits._gossip_entries = Rates(0.001, 100)
        stream = (await near._network.open_stream(far.peer_id, "/meshsub/1.1.0", deadline_s=WAIT_S)).raw
        packet = rpc_pb2.RPC(publish=[signed(near, b"1", b"first", TOPIC)])
        for _ in range(101):
            packet.control.graft.add(topicID="no topic")
        await stream.write(encode_varint_prefixed(packet.SerializeToString()))
        assert (await box.receive()).data == b"first"
        packet.publish[0].CopyFrom(signed(near, b"2", b"second", TOPIC))
        await stream.write(encode_varint_prefixed(packet.SerializeToString()))
        await until(lambda: far.refusals.counts().get(Reason.PACED.value, 0) > 0)
        assert not box._items


async def test_of_a_peer_the_newest_stream_is_read_alone() -> None:
    async with two_hosts() as (near, far, box):
        streams = [
            (await near._network.open_stream(far.peer_id, "/meshsub/1.1.0", deadline_s=WAIT_S)).raw for _ in range(3)
        ]
        await until(lambda: waiting_streams(far) <= 2)  # the newest, and the one on which far speaks itself
        packet = rpc_pb2.RPC(publish=[signed(near, b"1", b"heard", TOPIC)])
        await streams[-1].write(encode_varint_prefixed(packet.SerializeToString()))
        assert (await box.receive()).data == b"heard"
        assert len(far._gossip._pubsub._reading) == 1


async def test_what_was_kept_of_peers_that_are_gone_goes_with_a_heartbeat() -> None:
    async with two_hosts() as (near, far, _):
        router, gone = far._gossip._router, near_id(Host(identity=Identity.from_seed(bytes([9]) * 32)))
        router.back_off = {TOPIC: {gone: 1, near_id(near): 1 << 40}}
        router.scorer.first_message_deliveries[gone][TOPIC] = 1.0
        router.scorer.behavior_penalty[gone] = 1.0
        router._periodic_security_cleanup()
        assert router.back_off == {TOPIC: {near_id(near): 1 << 40}}
        assert gone not in router.scorer.first_message_deliveries
        assert gone not in router.scorer.behavior_penalty


def near_id(host: Host) -> ID:
    return ID.from_base58(host.peer_id)


def signed(host: Host, number: bytes, data: bytes, *topics: str) -> rpc_pb2.Message:
    """A message as GossipSub of this host would have made it."""
    said = rpc_pb2.Message(from_id=near_id(host).to_bytes(), seqno=number, data=data, topicIDs=topics)
    pubsub = host._gossip._pubsub
    said.signature = pubsub.sign_key.sign(PUBSUB_SIGNING_PREFIX.encode() + said.SerializeToString())
    said.key = pubsub.host.get_public_key().serialize()
    return said


async def test_a_message_is_taken_and_passed_on_once_however_long_ago_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two_hosts() as (near, far, box):
        pubsub, passed_on = far._gossip._pubsub, list[bytes]()

        async def publish(forwarder: ID, message: rpc_pb2.Message) -> None:
            passed_on.append(message.data)
            await trio.lowlevel.checkpoint()

        async def replay(number: int, data: bytes) -> None:
            message = signed(near, number.to_bytes(8, "big"), data, TOPIC)
            pubsub.seen_messages.cache.clear()  # as after the two minutes that libp2p keeps them
            await pubsub.push_msg(near_id(near), message)

        monkeypatch.setattr(pubsub.router, "publish", publish)
        start = 5 * NUMBERS_WINDOW
        for number, data in ((1, b"newer"), (0, b"late"), (0, b"late"), (1, b"newer")):
            await replay(start + number, data)
        await replay(start + 1 - NUMBERS_WINDOW, b"older than all that is kept")
        assert passed_on == [b"newer", b"late"]
        assert [(await box.receive()).data for _ in range(len(box._items))] == passed_on
        forged = signed(near, (1 << 62).to_bytes(8, "big"), b"forged", TOPIC)
        forged.signature = bytes(64)
        await pubsub.push_msg(near_id(near), forged)
        await replay(start + 2, b"newest")
        assert passed_on[2:] == [b"newest"], "only what an origin signed counts"


async def test_messages_of_a_later_start_are_newer_however_many_there_were_before() -> None:
    identity = Identity.from_seed(bytes(32))
    before, again = (Host(identity=identity, boot=boot)._gossip._pubsub for boot in (7, 8))
    for _ in range(100_000):
        before._next_seqno()
    assert again._next_seqno() > before._next_seqno()


async def test_own_messages_go_out_whatever_is_replayed_of_this_node() -> None:
    async with two_hosts() as (near, far, box):
        pubsub = near._gossip._pubsub
        ahead = signed(near, bytes([127]) + bytes(7), b"of a start that there was not", TOPIC)
        await pubsub.push_msg(near_id(far), ahead)
        assert not pubsub._is_msg_seen(signed(near, bytes([1]) + bytes(7), b"now", TOPIC))
        assert (await published(near, box, b"now")).data == b"now"


async def test_neighbours_are_who_comes_first_and_not_who_asked_first() -> None:
    """Whatever strangers are neighbours before a heartbeat, members are after it, as many as there may be."""
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
