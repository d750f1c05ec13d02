"""What of a packet of gossip is for libp2p, and what is not worth an object of it."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerId
from shoal.swarm import gossip_packets
from shoal.swarm.gossip_packets import (
    BACK_OFF_LIMIT_S,
    CONTROL_LIMIT_BYTES,
    ENTRIES_LIMIT,
    MESSAGE_LIMIT_BYTES,
    NUMBERS_WINDOW,
    ORIGIN_LIMIT_BYTES,
    Numbers,
    control,
    entries,
    messages,
    parse,
    rpc_pb2,
    subscriptions,
)

OURS = frozenset({"ours", "also ours"})
ORIGIN = b"o" * 38


def message(**fields: Any) -> Any:
    return rpc_pb2.Message(**{"from_id": ORIGIN, "seqno": b"12345678", "data": b"said", "topicIDs": ["ours"], **fields})


def test_packet_passes_as_it_is_said_where_it_is_about_our_topics() -> None:
    said = rpc_pb2.RPC(publish=[message(), message(data=b"more", topicIDs=["also ours"])])
    said.subscriptions.add(subscribe=True, topicid="ours")
    said.subscriptions.add(subscribe=False, topicid="also ours")
    said.control.graft.add(topicID="ours")
    said.control.prune.add(topicID="also ours", backoff=7)
    said.control.ihave.add(topicID="ours", messageIDs=[ORIGIN + b"1", ORIGIN + b"2"])
    said.control.iwant.add(messageIDs=[ORIGIN + b"3"])
    packet = parse(said.SerializeToString())
    assert list(messages(packet, OURS)) == list(said.publish)
    assert list(subscriptions(packet)) == [("ours", True), ("also ours", False)]
    assert entries(packet) == 2 + 4 + 3
    kept = control(packet, OURS)
    assert kept is not None
    assert kept.control == said.control
    assert not kept.publish
    assert not kept.subscriptions


@pytest.mark.parametrize(
    "fields",
    [
        {"topicIDs": ["theirs"]},
        {"topicIDs": ["ours", "theirs"]},
        {"topicIDs": ["ours", "also ours"]},
        {"topicIDs": []},
        {"from_id": b"o" * (ORIGIN_LIMIT_BYTES + 1)},
        {"seqno": bytes(9)},
        {"seqno": b""},
        {"data": bytes(MESSAGE_LIMIT_BYTES + 1)},
        {"key": bytes(3000)},
        {"signature": bytes(3000)},
    ],
)
def test_message_that_is_too_much_or_not_for_us_is_not_one(fields: dict[str, Any]) -> None:
    packet = parse(rpc_pb2.RPC(publish=[message(**fields), message()]).SerializeToString())
    assert list(messages(packet, OURS)) == [message()]


def test_control_of_other_topics_is_dropped_and_nothing_is_said_twice() -> None:
    said = rpc_pb2.RPC(senderRecord=bytes(100))
    for topic in ("theirs", "ours", "ours"):
        said.control.graft.add(topicID=topic)
        said.control.prune.add(topicID=topic, backoff=1 << 60).peers.add(peerID=b"somebody")
        said.control.ihave.add(topicID=topic, messageIDs=[b"1", b"1", bytes(1000), b"2"])
    said.control.iwant.add(messageIDs=[b"3"] * 1000)
    said.control.idontwant.add(messageIDs=[b"4"])
    said.control.observe.add(topicID="ours")
    expected = rpc_pb2.RPC()
    expected.control.graft.add(topicID="ours")
    expected.control.prune.add(topicID="ours", backoff=BACK_OFF_LIMIT_S)
    expected.control.ihave.add(topicID="ours", messageIDs=[b"1", b"2"])
    expected.control.iwant.add(messageIDs=[b"3"])
    packet = parse(said.SerializeToString())
    assert control(packet, OURS) == expected
    assert entries(packet) == 3 * 2 + 3 * 5 + 1001 + 1
    assert control(packet, frozenset()) is not None  # the message that is wanted is of whatever topic
    assert control(parse(rpc_pb2.RPC(publish=[message()]).SerializeToString()), OURS) is None


@pytest.mark.parametrize(
    "data",
    [
        bytes([0x0A, 0x00]) * (ENTRIES_LIMIT + 1),
        bytes([0x12, 0x00]) * (ENTRIES_LIMIT + 1),
        b"\x1a" + (CONTROL_LIMIT_BYTES + 1).to_bytes(3, "big"),
        b"\x1a\xff\xff\x7f",
        b"\x12\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"\x12\x05abc",
        b"\x08\x01",
        b"\x12",
        b"\xff" * 100,
        b"\x12\x02\xff\xff",
    ],
)
def test_packet_that_holds_too_much_is_none_before_it_is_parsed(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RemoteError):
            parse(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_what_is_made_of_a_packet_does_not_keep_it() -> None:
    packet = parse(rpc_pb2.RPC(publish=[message(), message(data=bytes(200_000))]).SerializeToString())
    (small, large) = messages(packet, OURS)
    packet.publish[0].data = packet.publish[1].data = b"changed"  # a part of a packet would change with it
    assert small == message()
    assert large == message(data=bytes(200_000))


A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def came(numbers: Numbers, origin: PeerId, *some: int) -> list[bool]:
    """Whether each of these was new, as they come."""
    found = []
    for one in some:
        found.append(numbers.is_new(origin, one))
        if found[-1]:
            numbers.note(origin, one)
    return found


@given(st.lists(st.integers(0, 3 * NUMBERS_WINDOW)))
def test_number_is_new_once_and_as_long_as_it_is_within_the_window(some: list[int]) -> None:
    numbers, seen = Numbers(), list[int]()
    for one in some:
        is_new = one not in seen and one > max(seen, default=one) - NUMBERS_WINDOW
        assert came(numbers, A, one) == [is_new]
        if is_new:
            seen.append(one)
    assert not any(numbers.is_new(A, one) for one in seen)


def test_numbers_of_one_origin_say_nothing_of_another_and_a_rise_by_far_keeps_little() -> None:
    numbers = Numbers()
    assert came(numbers, A, 1 << 63, (1 << 63) - 1, 1) == [True, True, False]
    assert came(numbers, B, 1, 1 << 63, 1 << 63, 1) == [True, True, False, False]
    assert max(window._came for window in numbers._came.values()) < 1 << NUMBERS_WINDOW


def test_origins_are_few_and_none_pushes_out_one_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gossip_packets, "NUMBERS_ORIGIN_LIMIT", 2)
    numbers = Numbers(lambda origin: origin == A)
    assert came(numbers, A, 5) + came(numbers, B, 5) + came(numbers, C, 5) == [True, True, True]
    assert numbers.is_new(B, 5), "as it was forgotten"
    assert (len(numbers), numbers.is_new(A, 5), numbers.is_new(C, 5)) == (2, False, False), "who only asks forgets none"
    crowded = Numbers(lambda origin: True)
    assert came(crowded, A, 5) + came(crowded, B, 5) + came(crowded, C, 5) == [True, True, False]
