"""A Kademlia table of meeting points: found by SwarmId, kept by strangers, spoken as libp2p's Kad-DHT speaks.

Any node that speaks `/ipfs/kad/1.0.0` can be asked for those nearer to a key: members of this swarm or of others, or a
Go daemon that serves as bootstrap node. Points are kept by those nodes that are Shoal's; the others refuse them. So
strangers are admitted for this protocol, as they are for the manifest, and to nothing else by it:

* a question takes at most MESSAGE_LIMIT_BYTES and ANSWERERS_LIMIT are answered at once, so many per IP address in a
  while (`HOST_BURST`, `HOST_PER_S`);
* what they store is bounded and signed (`shoal.swarm.rendezvous.meeting_points`), and whoever it names proves
  itself when met;
* a stranger that was dialled for walks is parted from at their end.

A walk has a deadline of its own, and so has every question in it: a peer that hangs costs ANSWER_DEADLINE_S of one of
PARALLEL askers. One that did not answer is asked by no later visit for as long as it would not be dialled to be linked
(`shoal.swarm.dialling`). Who stores a point of its own is noted as a contact, at the addresses that it signed.

Source: https://github.com/libp2p/specs/blob/master/kad-dht/README.md; Maymounkov and Mazières, Kademlia (2002).
libp2p 0.8's own table keeps up to 50,000 values of a megabyte, and waits ten seconds for each peer that hangs.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import base58
import multiaddr
import trio

from shoal.protocol.address import parse_address
from shoal.protocol.backoff import Backoff
from shoal.protocol.errors import ConfigError, NetworkError, RemoteError
from shoal.protocol.identity import MalformedPeerId, PeerId, parse_peer_id
from shoal.protocol.limits import KEY_LIMIT, Rates
from shoal.protocol.wire import SwarmId
from shoal.swarm.dialling import DIAL_BACKOFF_LIMIT_S, DIAL_BACKOFF_S
from shoal.swarm.host import Host
from shoal.swarm.libp2p_parts import only_what_runs
from shoal.swarm.net_stream import VarintFrames
from shoal.swarm.rendezvous.contacts import ADDRESSES_LIMIT, Contact, Contacts, sort_by_distance
from shoal.swarm.rendezvous.meeting_points import (
    SLOTS,
    PointStore,
    keys_of,
    open_point,
    pack_points,
    slot_key,
    unpack_points,
)
from shoal.swarm.streams import MessageStream, StreamEnded

with only_what_runs():
    from google.protobuf.message import DecodeError
    from libp2p.kad_dht.pb.kademlia_pb2 import Message

KADEMLIA_PROTOCOL = "/ipfs/kad/1.0.0"

MESSAGE_LIMIT_BYTES = 64 << 10
KEY_LIMIT_BYTES = 128
NAMED = 16
"""Contacts that an answer names."""
NEAREST = 8
"""A walk asks these, of all that it hears of, and a point is stored at them."""
PARALLEL = 4
ASKED_LIMIT = 32
"""Peers that one walk asks."""
ANSWER_DEADLINE_S = 3.0
"""For dialling a peer and its answer."""
WALK_DEADLINE_S = 15.0
WALKS_AT_ONCE = 4
PART_DEADLINE_S = 3.0
FOUND_LIMIT_POINTS = 256
"""Points that one look-up gives back, at most."""
ENOUGH_POINTS = 32
"""So many end a look-up."""

ANSWERERS_LIMIT = 16
QUESTIONS_LIMIT = 32
"""On one stream."""
QUESTION_DEADLINE_S = 10.0
HOST_BURST, HOST_PER_S = 256, 16
"""Questions of one IP address that are answered at once, and in the long run."""
HOST_LIMIT = 1024

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Rest:
    """Time until which a peer that did not answer is not asked, and the pause after the next failure."""

    until: float = 0.0
    backoff: Backoff = field(default_factory=lambda: Backoff(DIAL_BACKOFF_S, DIAL_BACKOFF_LIMIT_S))


@dataclass(slots=True)
class _Walk:
    """One search for the peers nearest to a key."""

    key: bytes
    known: list[Contact]
    silent: set[bytes]  # those that did not answer, in this walk or others of the same visit
    asked: set[bytes] = field(default_factory=set)
    answered: list[Contact] = field(default_factory=list)
    points: dict[bytes, None] = field(default_factory=dict)
    in_flight: int = 0
    progress: trio.Event = field(default_factory=trio.Event)

    def next(self) -> Contact | None:
        """The nearest of the NEAREST known live contacts that was not asked yet."""
        if len(self.asked) >= ASKED_LIMIT:
            return None
        live = [contact for contact in self.known if contact.id not in self.silent]
        return next((contact for contact in live[:NEAREST] if contact.id not in self.asked), None)

    def learn(self, contacts: Iterable[Contact]) -> None:
        seen = {contact.id for contact in self.known}
        self.known = sort_by_distance([*self.known, *(c for c in contacts if c.id not in seen)], self.key)

    def moved(self) -> None:
        self.progress.set()
        self.progress = trio.Event()


class Kademlia:
    """This node in the table: it answers from when it is made, and asks when told to, one thing at a time.

    keeps: whether the connection to a peer is of use beside this, so that the end of a walk does not close it.
    """

    def __init__(self, host: Host, swarm_id: SwarmId, *, keeps: Callable[[PeerId], bool]) -> None:
        self._host = host
        self._swarm_id = swarm_id
        self._keeps = keeps
        self._own = base58.b58decode(host.peer_id)
        self._dialled: dict[PeerId, object | None] = {}  # in this visit, and the connections that came of it
        self._silent: set[bytes] = set()
        self._rests: OrderedDict[bytes, _Rest] = OrderedDict()  # the one that failed longest ago first
        self._answering = trio.CapacityLimiter(ANSWERERS_LIMIT)
        self._hosts: Rates[str] = Rates(HOST_PER_S, HOST_BURST, limit=HOST_LIMIT)
        self.contacts = Contacts(self._own)
        self.store = PointStore(swarm_id, lambda peer: host.comes_first(peer))
        host.tell_addresses()
        host.serve(KADEMLIA_PROTOCOL, self._serve, limit_bytes=MESSAGE_LIMIT_BYTES, framing=VarintFrames)

    # -- asking ------------------------------------------------------------------------------------------------

    def know(self, addresses: Iterable[str]) -> None:
        """These may be peers that speak Kademlia; malformed addresses are passed over."""
        by_peer: dict[PeerId, list[str]] = {}
        for text in addresses:
            try:
                peer = parse_address(text).peer
                _packed(text)
            except (ConfigError, ValueError):
                continue
            by_peer.setdefault(peer, []).append(text)
        for peer, texts in by_peer.items():
            self.contacts.add(Contact(base58.b58decode(peer), peer, tuple(texts)[:ADDRESSES_LIMIT]))

    async def announce(self, signed: bytes) -> int:
        """Keep a point of this node's and store it at the NEAREST peers to each of its keys; at how many.

        Never raises for the network's sake. Cancellation leaves it stored at some of them.
        """
        keys = keys_of(open_point(signed))
        value, stored = pack_points([signed]), 0
        for key in keys:
            self.store.put(key, signed, trio.current_time())
        async with self._visiting():
            for key in keys:
                walk = await self._walk(key)
                nearest = sort_by_distance(walk.answered, key)[:NEAREST]
                stored += sum([await self._store_at(contact, key, value) for contact in nearest])
        return stored

    async def look_up(self) -> list[bytes]:
        """Signed points of this swarm, as found: not checked, at most FOUND_LIMIT_POINTS.

        Never raises for the network's sake; each walk takes at most WALK_DEADLINE_S, and WALKS_AT_ONCE go on at once.
        """
        found: dict[bytes, None] = {}
        left = iter(random.sample(range(SLOTS), SLOTS))

        async def look() -> None:
            for slot in left:
                if len(found) >= ENOUGH_POINTS:
                    return
                found.update((await self._walk(slot_key(self._swarm_id, slot))).points)

        async with self._visiting(), trio.open_nursery() as nursery:
            for _ in range(WALKS_AT_ONCE):
                nursery.start_soon(look)
        return list(found)[:FOUND_LIMIT_POINTS]

    @contextlib.asynccontextmanager
    async def _visiting(self) -> AsyncIterator[None]:
        """Close at the end the connections that were made meanwhile for the sake of walks only."""
        now = trio.current_time()
        self._dialled.clear()
        self._silent = {id for id, rest in self._rests.items() if now < rest.until}
        try:
            yield
        finally:
            with trio.move_on_after(PART_DEADLINE_S, shield=True):
                async with trio.open_nursery() as nursery:
                    for peer, connection in self._dialled.items():
                        if not self._keeps(peer):
                            nursery.start_soon(self._host.close, connection)

    async def _walk(self, key: bytes) -> _Walk:
        walk = _Walk(key=key, known=self.contacts.nearest(key, NEAREST), silent=self._silent)
        walk.points.update(dict.fromkeys(self.store.get(key, trio.current_time())))
        with trio.move_on_after(WALK_DEADLINE_S):
            async with trio.open_nursery() as nursery:
                for _ in range(PARALLEL):
                    nursery.start_soon(self._ask_in_turn, walk)
        return walk

    async def _ask_in_turn(self, walk: _Walk) -> None:
        while True:
            contact = walk.next()
            if contact is None:
                if not walk.in_flight:
                    return
                await walk.progress.wait()
                continue
            walk.asked.add(contact.id)
            walk.in_flight += 1
            try:
                await self._ask(walk, contact)
            finally:
                walk.in_flight -= 1
                walk.moved()

    async def _ask(self, walk: _Walk, contact: Contact) -> None:
        question = Message(type=Message.GET_VALUE, key=walk.key)
        try:
            answer = await self._request(contact, question)
            points = unpack_points(answer.record.value, blame=PeerId(contact.peer)) if answer.record.value else ()
        except (NetworkError, RemoteError) as error:
            logger.debug("%s does not answer: %s", contact.peer, error)
            walk.silent.add(contact.id)
            self._failed(contact.id)
            return
        self._rests.pop(contact.id, None)
        self.contacts.add(contact)
        self.contacts.answered(contact.id)
        walk.answered.append(contact)
        if len(walk.points) + len(points) <= FOUND_LIMIT_POINTS:
            walk.points.update(dict.fromkeys(points))
        walk.learn(c for c in _contacts_in(answer.closerPeers) if c.id != self._own)

    def _failed(self, id: bytes) -> None:
        self.contacts.failed(id)
        rest = self._rests.pop(id) if id in self._rests else _Rest()
        self._rests[id] = rest
        rest.until = trio.current_time() + rest.backoff.next_s()
        if len(self._rests) > KEY_LIMIT:
            self._rests.popitem(last=False)

    async def _store_at(self, contact: Contact, key: bytes, value: bytes) -> bool:
        question = Message(type=Message.PUT_VALUE, key=key)
        question.record.key, question.record.value = key, value
        try:
            return bool((await self._request(contact, question)).key == key)
        except (NetworkError, RemoteError) as error:
            logger.debug("%s does not keep our meeting point: %s", contact.peer, error)
            return False

    async def _request(self, contact: Contact, question: Any) -> Any:
        """One question and its answer, the dial included. Raises NetworkError, RemoteError."""
        peer = PeerId(contact.peer)
        ends_at = trio.current_time() + ANSWER_DEADLINE_S
        if peer not in self._host.connected():
            await self._host.dial_peer(peer, contact.addresses, deadline_s=ANSWER_DEADLINE_S)
            self._dialled[peer] = self._host.connection(peer)
        data = await self._host.request(
            peer,
            KADEMLIA_PROTOCOL,
            question.SerializeToString(),
            deadline_s=max(ends_at - trio.current_time(), 0.0),
            limit_bytes=MESSAGE_LIMIT_BYTES,
            framing=VarintFrames,
        )
        return _parse(data, peer)

    # -- answering ---------------------------------------------------------------------------------------------

    async def _serve(self, stream: MessageStream) -> None:
        for _ in range(QUESTIONS_LIMIT):
            try:
                data = await stream.receive(deadline_s=QUESTION_DEADLINE_S)
            except StreamEnded:
                return
            if self._answering.available_tokens == 0 or not self._spend(self._host.host_of(stream.peer) or ""):
                raise NetworkError(f"too many questions, the last one of {stream.peer}")
            async with self._answering:
                answer = self._answer(_parse(data, stream.peer), stream.peer)
                await stream.send(answer.SerializeToString(), deadline_s=QUESTION_DEADLINE_S)

    def _answer(self, question: Any, peer: PeerId) -> Any:
        """Raises RemoteError for a question that makes no sense, or a point that does not hold."""
        kind, key = question.type, question.key
        if kind == Message.PING:
            return Message(type=Message.PING)
        if not 0 < len(key) <= KEY_LIMIT_BYTES:
            raise RemoteError(f"a key of {len(key)} bytes", peer=peer)
        if kind == Message.PUT_VALUE:
            return self._keep(question, peer)
        if kind not in (Message.FIND_NODE, Message.GET_VALUE, Message.GET_PROVIDERS):
            raise RemoteError(f"a question of kind {kind}, which is not answered here", peer=peer)
        answer = Message(type=kind, key=key)
        points = self.store.get(key, trio.current_time()) if kind == Message.GET_VALUE else ()
        if points:
            answer.record.key, answer.record.value = key, pack_points(points)
        if key == self._own:  # a Go node takes up only whom it has asked for itself, and who answered
            _name(answer, Contact(self._own, self._host.peer_id, self._host.addresses[:ADDRESSES_LIMIT]))
        for contact in self.contacts.nearest(key, NAMED):
            if contact.peer != peer:
                _name(answer, contact)
        return answer

    def _keep(self, question: Any, peer: PeerId) -> Any:
        key, value = question.record.key, question.record.value
        if key != question.key or not value:
            raise RemoteError("a value under two keys, or none", peer=peer)
        for signed in unpack_points(value, blame=peer):
            point = self.store.put(key, signed, trio.current_time(), blame=peer)
            if point.peer == peer:
                self.know(point.addresses)
        answer = Message(type=Message.PUT_VALUE, key=key)
        answer.record.key, answer.record.value = key, value
        return answer

    def _spend(self, host: str) -> bool:
        """Count a question of an IP address; whether it may be answered."""
        return self._hosts.take(host, trio.current_time())


def _parse(data: bytes, peer: PeerId) -> Any:
    try:
        return Message.FromString(data)
    except DecodeError:
        raise RemoteError("not a message of Kademlia", peer=peer) from None


def _name(answer: Any, contact: Contact) -> None:
    named = answer.closerPeers.add(id=contact.id, connection=Message.CAN_CONNECT)
    for text in contact.addresses:
        named.addrs.append(_packed(text))


def _packed(text: str) -> bytes:
    """A place as an answer names it. Raises ValueError for a name that is none here, though a resolver may take it."""
    try:
        return bytes(multiaddr.Multiaddr(text.rsplit("/p2p/", 1)[0]).to_bytes())
    except Exception as error:  # the boundary: multiaddr's parsers raise whatever they meet in a stranger's text
        raise ValueError(str(error)) from None


def _contacts_in(named: Sequence[Any]) -> list[Contact]:
    """The peers in an answer that this node could dial, at most 2 * NAMED."""
    found = []
    for one in named[: 2 * NAMED]:
        try:
            peer = parse_peer_id(base58.b58encode(one.id).decode()) if len(one.id) <= KEY_LIMIT_BYTES else None
        except MalformedPeerId:  # of another kind of key: this node cannot dial it
            continue
        addresses = tuple(_addresses_in(one.addrs, peer)) if peer else ()
        if peer and addresses:
            found.append(Contact(bytes(one.id), peer, addresses))
    return found


def _addresses_in(addresses: Sequence[bytes], peer: PeerId) -> Iterable[str]:
    for data in addresses[:ADDRESSES_LIMIT]:
        try:
            text = str(multiaddr.Multiaddr(data)).split("/p2p/", 1)[0] + f"/p2p/{peer}"
            parse_address(text)
            _packed(text)  # it is to be passed on
        except Exception:  # the boundary: multiaddr's parsers raise whatever they meet in a stranger's bytes
            continue
        yield text
