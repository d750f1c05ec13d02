"""Filter of gossip packets: what of one reaches libp2p's pubsub, which believes and keeps whatever it is given.

    a packet          at most PACKET_LIMIT_BYTES, of which ENTRIES_LIMIT fields, and CONTROL_LIMIT_BYTES beside messages
    a message         in one topic, which is ours; of a short origin and number; copied, so that the packet goes
    GRAFT, PRUNE      of topics that are ours; peers to go to and long times are dropped
    IHAVE, IWANT      numbers as long as numbers are, each once
    a subscription    of topics that are ours, or may become ours: a few short ones of each peer
    all else          dropped

And of messages, whoever brings them, which one is new (`Numbers`): libp2p's own memory of them lasts two minutes, after
which anybody could have an old one passed on again by everybody.

Source: https://github.com/libp2p/specs/blob/master/pubsub/gossipsub/gossipsub-v1.1.md
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.replays import Window, longest_silent
from shoal.swarm.libp2p_parts import only_what_runs

with only_what_runs():
    from google.protobuf.message import DecodeError
    from libp2p.pubsub.pb import rpc_pb2

PACKET_LIMIT_BYTES = 1 << 20
ENTRIES_LIMIT = 4096
CONTROL_LIMIT_BYTES = 64 << 10
MESSAGE_LIMIT_BYTES = 256 << 10
"""Of what is published in one."""
AROUND_LIMIT_BYTES = 2048
"""Of a message beside that: who, which, where, a key and a signature."""
ORIGIN_LIMIT_BYTES, NUMBER_LIMIT_BYTES = 64, 8
TOPIC_LIMIT_CHARS = 128
BACK_OFF_LIMIT_S = 60
NUMBERS_WINDOW = 1024
"""Before the highest of an origin, so many of its messages may come out of their order."""
NUMBERS_ORIGIN_LIMIT = 4096

_LENGTH_DELIMITED, _MESSAGE_FIELD = 2, rpc_pb2.RPC.DESCRIPTOR.fields_by_name["publish"].number


def parse(data: bytes) -> Any:
    """The packet, which is still all that a peer said. Raises RemoteError for what is none, or over the limits."""
    _count(data)
    packet = rpc_pb2.RPC()
    try:
        packet.ParseFromString(data)
    except DecodeError as error:
        raise RemoteError(f"no packet of gossip: {error}") from None
    return packet


def _count(data: bytes) -> None:
    """Count the packet's fields before libp2p's parser makes an object, of 20 times the size, of each."""
    at = fields = beside_bytes = 0
    while at < len(data):
        fields += 1
        tag, at = _varint(data, at)
        size, at = _varint(data, at)
        at += size
        if tag >> 3 != _MESSAGE_FIELD:
            beside_bytes += size
        if tag & 7 != _LENGTH_DELIMITED or fields > ENTRIES_LIMIT or beside_bytes > CONTROL_LIMIT_BYTES:
            raise RemoteError("a packet of gossip with more in it than there can be")
    if at != len(data):
        raise RemoteError("a packet of gossip that ends too early")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 35:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise RemoteError("a packet of gossip that ends too early")


def entries(packet: Any) -> int:
    """Number of entries beside messages: subscriptions, and control entries with the numbers in them."""
    control = packet.control
    numbers = sum(len(one.messageIDs) for kind in (control.ihave, control.iwant) for one in kind)
    kinds = (control.graft, control.prune, control.ihave, control.iwant, control.idontwant)
    return len(packet.subscriptions) + sum(map(len, kinds)) + numbers


def messages(packet: Any, topics: Container[str]) -> Iterator[Any]:
    """Copies of those published in one of `topics`."""
    for one in packet.publish:
        if (
            len(one.topicIDs) == 1
            and one.topicIDs[0] in topics
            and len(one.from_id) <= ORIGIN_LIMIT_BYTES
            and 0 < len(one.seqno) <= NUMBER_LIMIT_BYTES
            and len(one.data) <= MESSAGE_LIMIT_BYTES
            and one.ByteSize() - len(one.data) <= AROUND_LIMIT_BYTES
        ):
            copy = rpc_pb2.Message()  # what is made of a packet keeps the whole packet
            copy.CopyFrom(one)
            yield copy


def subscriptions(packet: Any) -> Iterator[tuple[str, bool]]:
    """Topics that the peer subscribes to, or no longer."""
    for one in packet.subscriptions:
        if 0 < len(one.topicid) <= TOPIC_LIMIT_CHARS:
            yield one.topicid, one.subscribe


def control(packet: Any, topics: Container[str]) -> Any | None:
    """A packet with the control entries of `topics` alone, and none twice; None without any."""
    said, kept = packet.control, rpc_pb2.RPC()
    for topic in _topics(said.graft, topics):
        kept.control.graft.add(topicID=topic)
    for one in {one.topicID: one for one in said.prune if one.topicID in topics}.values():
        kept.control.prune.add(topicID=one.topicID, backoff=min(one.backoff, BACK_OFF_LIMIT_S))
    for topic in _topics(said.ihave, topics):
        ids = _numbers(number for one in said.ihave if one.topicID == topic for number in one.messageIDs)
        kept.control.ihave.add(topicID=topic, messageIDs=ids)
    ids = _numbers(number for one in said.iwant for number in one.messageIDs)
    if ids:
        kept.control.iwant.add(messageIDs=ids)
    return kept if kept.HasField("control") else None


def _topics(said: Iterable[Any], topics: Container[str]) -> list[str]:
    return list(dict.fromkeys(one.topicID for one in said if one.topicID in topics))


def _numbers(said: Iterable[bytes]) -> list[bytes]:
    return list(dict.fromkeys(one for one in said if len(one) <= ORIGIN_LIMIT_BYTES + NUMBER_LIMIT_BYTES))


class Numbers:
    """Numbers of the messages that came of each origin, which gives them in rising order: each is new only once.

    Bounded as `shoal.protocol.wire.ReplayGuard`: whoever is silent for longest is forgotten, but none that is `kept`,
    and where there is no room no number is new.
    """

    def __init__(self, kept: Callable[[PeerId], bool] = lambda _: False) -> None:
        self._kept = kept
        self._came: dict[PeerId, Window] = {}

    def is_new(self, origin: PeerId, number: int) -> bool:
        """True if no message of this number came yet, as far as is known."""
        if origin not in self._came:
            return len(self._came) < NUMBERS_ORIGIN_LIMIT or longest_silent(self._came, self._kept) is not None
        return self._came[origin].is_new(number)

    def note(self, origin: PeerId, number: int) -> None:
        """Note that a message of this number, which is new and which its origin signed, came."""
        if origin not in self._came and len(self._came) >= NUMBERS_ORIGIN_LIMIT:
            silent = longest_silent(self._came, self._kept)
            assert silent is not None, "no number was new"
            del self._came[silent]
        window = self._came.pop(origin, None) or Window(NUMBERS_WINDOW, number)
        window.note(number)
        self._came[origin] = window  # the last of all

    def __len__(self) -> int:
        return len(self._came)
