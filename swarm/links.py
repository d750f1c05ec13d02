"""Message links: after a hello, every pair of peers keeps one libp2p stream in each direction for signed messages.

    dialler                                   answerer
    Hello (swarm, version, record)  ────────► checks them
                                    ◄──────── Welcome (record, others' records) | Refusal (reason)
                                              and behind a refusal, the Revocations that are its reason, if any
    opens its message stream        ────────► waits for the admission, then reads
    reads                           ◄──────── opens its message stream

A link is up when the hello was answered, and lost when either stream or the connection breaks; it is never half up.
Sending never waits: each link has a bounded queue, and a peer that lets it fill loses the link (round messages are
sent again anyway). A Ping over a link is one of the connection below (`shoal.swarm.muxer`): it and its answer mean
nothing to anybody else, so they are neither signed nor queued. Every other message is an envelope signed by its sender.
What is said to the whole swarm (`SWARM_KIND`) holds whoever brings it, and is passed on between two that have no link
by others (`shoal.swarm.message_relay`); all else (`ENVELOPE_KIND`) must come from the peer at the stream's end.

Whoever is dead of silence has no link any more, but what its link is made of is kept for REST_LIMIT_S: the link rests.
The first thing that comes over it makes a link of it again, without a dial and without handshakes, so that a peer that
was stopped, or had too much to do, costs nothing to have back, and one that gives many up at once, since it is slow
itself, does not have to make all of its links anew.

There are LINK_LIMIT places, or fewer. Where all are taken somebody of a lower rank gives way
(`shoal.protocol.places`), or the newcomer is told that this node is full: before it is welcomed, so that no link is up
at one end alone.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import thread_time
from typing import Protocol

import trio

from shoal.protocol.errors import NetworkError, RemoteError, ShoalError
from shoal.protocol.identity import PeerId
from shoal.protocol.invites import Revocations
from shoal.protocol.lateness import Lateness
from shoal.protocol.limits import Rates
from shoal.protocol.membership import number_of
from shoal.protocol.messages import Certificate, Rebase
from shoal.protocol.peering import (
    Full,
    Hello,
    HelloAnswer,
    LinkMessage,
    Ping,
    Reach,
    Refusal,
    SignOfLife,
    SwarmMessage,
    Welcome,
)
from shoal.protocol.places import Place, Rank, gives_way
from shoal.protocol.wire import Envelope, ReplayGuard, Sealer, SwarmId, canonical, decode, open_envelope
from shoal.swarm.limits import Pace, Reason, Refusals
from shoal.swarm.message_relay import MessageRelay
from shoal.swarm.streams import MessageStream, StreamEnded

HELLO_PROTOCOL = "/shoal/hello/1"
MESSAGES_PROTOCOL = "/shoal/messages/1"

QUEUE_LIMIT_MESSAGES = 1024  # waiting on one link; then it is dropped
SENT_AT_ONCE_BYTES = 64 << 10
"""Of messages that wait, beside the last one of them."""
DIAL_HANDSHAKE_DEADLINE_S = 5.0
"""From when somebody took a connection that this node dialled. This and those that follow are longer by what was late
of late."""
HELLO_DEADLINE_S = 5.0
HELLOS_PER_S, HELLOS_BURST = 2.0, 64.0
"""Of one peer: to answer takes more than most messages do, and names all peers that are known."""
ADMISSION_DEADLINE_S = 5.0
MAKING_LIMIT_S = 16.0
"""Time that the last links took to make up to which the next are waited for: nobody else waits for them meanwhile, and
what is given up has cost both ends most of what a link costs."""
SEND_DEADLINE_S = 10.0
LINK_LIMIT = 256  # links of a node
LAST_WORD_S = 1.0
"""For who is parted from for good to read what is queued; one that does not finds out at its next hello."""
REST_LIMIT_S = 40.0
"""Of rest, and a link is ended. One who is given up is asked every ten seconds whether it is there. So long its stream
may take to open, too: whether one who says nothing meanwhile is there is the failure detector's to say."""
RESTING_LIMIT = 128
"""Links that rest; the one that has for longest makes room."""
RELAYED_QUEUED_LIMIT = QUEUE_LIMIT_MESSAGES // 2
"""Beyond so many messages on a link nothing is passed on over it: others' words shall not cost anybody its link."""
FOR_EVERYBODY = (Certificate, Rebase)
"""Of what is said of rounds: who knows no member has to hear what was decided."""
ENVELOPE_KIND = "link"
SWARM_KIND = "swarm"

logger = logging.getLogger(__name__)


class Control(Protocol):
    """The part of the libp2p host that links use."""

    def serve(self, protocol: str, handler: Callable[[MessageStream], Awaitable[None]]) -> None:
        """Register a handler for incoming streams."""

    async def dial(self, address: str, *, deadline_s: float) -> PeerId:
        """Connect to one address."""

    async def dial_peer(
        self, peer: PeerId, addresses: Sequence[str], *, deadline_s: float, handshake_s: float | None = None
    ) -> None:
        """Connect to a peer at any of its addresses."""

    async def open(self, peer: PeerId, protocol: str, *, deadline_s: float) -> MessageStream:
        """Open a stream."""

    def connection(self, peer: PeerId) -> object | None:
        """The connection with a peer that there is now, to be told from one that takes its place."""

    async def close(self, connection: object | None) -> None:
        """Close this connection, and no other."""

    def came_over(self, stream: MessageStream, connection: object | None) -> bool:
        """True if a stream that a peer opened came over this connection, and not over one before or after it."""

    async def hang_up(self, peer: PeerId) -> None:
        """Close the connection by which this node called a peer, where there are many."""

    def own_host_of(self, peer: PeerId) -> str | None:
        """The IP address of this end of the connection to a peer, None if there is none, or it is relayed."""

    def ping(self, peer: PeerId, number: int) -> None:
        """Ask a connected peer for a sign of life with this number; never waits."""


class Refused(RemoteError):
    """The peer does not admit this node; the text is its reason."""


class NoPlaceLeft(NetworkError):
    """The peer, or this node, has no place left for a link between the two."""


@dataclass(slots=True, eq=False)
class _Link:
    """One link. In the queue an event stands for "all before it is sent".

    said_at: when the peer last said more than that it is alive, at first when the link came up. takes_part: it said
    something of a round. rests_since: infinity while it is up. unheard: it is parted from, and sent the last word.
    connection: that over which it was made, whose end is its own.
    """

    peer: PeerId
    outbox: trio.MemorySendChannel[bytes | trio.Event]
    queue: trio.MemoryReceiveChannel[bytes | trio.Event]
    scope: trio.CancelScope
    pace: Pace
    connection: object | None
    said_at: float
    takes_part: bool = False
    rests_since: float = math.inf
    unheard: bool = False


class AdmissionControl(Protocol):
    """Decides who is admitted and takes what links deliver; called in trio's thread, must not block."""

    def hello(self) -> Hello:
        """This node's own hello."""

    def welcome(self, peer: PeerId, hello: Hello) -> tuple[HelloAnswer, Revocations | None]:
        """Admit the peer or refuse it, with the list of revocations where that is the reason."""

    def told_revocations(self, peer: PeerId, revocations: Revocations) -> None:
        """The peer refused this node for this list; raises RemoteError for one that is forged."""

    def welcomed(self, peer: PeerId, welcome: Welcome) -> None:
        """The peer admitted this node; raises RemoteError if its record does not hold."""

    def rank(self, peer: PeerId) -> Rank:
        """Rank of a peer when there is not room for all."""

    def follows(self, peer: PeerId) -> bool:
        """True if a peer takes part in no round now."""

    def full(self, peer: PeerId) -> Full:
        """Answer to a peer that would be welcome, were there a place left."""

    def turned_away(self, peer: PeerId, full: Full) -> None:
        """The peer would welcome this node, and has no place left."""

    def linked(self, peer: PeerId) -> None:
        """A link is up."""

    def made(self, peer: PeerId, took_s: float) -> None:
        """A link that this node dialled is up, and took so long."""

    def gave_way(self, peer: PeerId) -> None:
        """A link was ended for another's sake."""

    def lost(self, peer: PeerId, why: str) -> None:
        """A link is gone, and why."""

    def rests(self, peer: PeerId) -> None:
        """A link is none any more, for as long as its peer says nothing."""

    def message(self, peer: PeerId, message: LinkMessage) -> None:
        """A message arrived; raises RemoteError when it breaks the protocol."""

    def admits(self, peer: PeerId) -> bool:
        """True if a peer is known and may be heard through others."""

    def passed_on(self, peer: PeerId, message: SwarmMessage) -> None:
        """A message of a peer arrived through another."""


class Links:
    """All message links of this node.

    places: how many links there may be, where this node dialled the next one (True) or was dialled; None: LINK_LIMIT.
    pace: how many times as long as the deadlines say is waited for a link to come up, where nobody waits for it.
    own_lag_s: how much longer this node waits for all, since it runs late itself.
    """

    def __init__(
        self,
        *,
        host: Control,
        swarm_id: SwarmId,
        sealer: Sealer,
        admission_control: AdmissionControl,
        refusals: Refusals | None = None,
        places: Callable[[bool], int | None] = lambda dialled: None,
        pace: float = 1.0,
        own_lag_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._host = host
        self.pace = pace
        self._own_lag_s = own_lag_s
        self._making = Lateness(MAKING_LIMIT_S)
        self._few_places = places
        self._refusals = refusals or Refusals()
        self._swarm_id = swarm_id
        self._sealer = sealer
        self._gate = admission_control
        self._links: dict[PeerId, _Link] = {}
        self._resting: dict[PeerId, _Link] = {}
        self._promised: set[PeerId] = set()  # who is being welcomed
        self.message_relay = MessageRelay(sealer.peer_id)
        self._guard = ReplayGuard(self._is_kept)
        self._passed_on = ReplayGuard(self._is_kept)
        self._hellos: Rates[PeerId] = Rates(HELLOS_PER_S, HELLOS_BURST)
        self._admitted = trio.Event()  # set, and replaced, whenever a link comes up
        self._parting: dict[PeerId, trio.Event] = {}  # connections being closed
        self._jobs, self._job_queue = trio.open_memory_channel[Callable[[], Awaitable[None]]](LINK_LIMIT * 4)
        host.serve(HELLO_PROTOCOL, self._answer_hello)
        host.serve(MESSAGES_PROTOCOL, self._read_messages)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve the links until cancelled; a cancelled run leaves no stream open."""
        async with trio.open_nursery() as nursery:
            task_status.started()
            async for job in self._job_queue:
                nursery.start_soon(job)

    def linked(self) -> frozenset[PeerId]:
        """The peers that messages can be sent to."""
        return frozenset(self._links)

    def holds(self, peer: PeerId) -> bool:
        """True if there is a link to `peer`, or one that rests."""
        return peer in self._links or peer in self._resting

    async def next_linked(self) -> None:
        """Return when the next link comes up."""
        await self._admitted.wait()

    async def join(self, address: str, *, deadline_s: float) -> PeerId:
        """Connect to `address` and introduce this node.

        Raises NetworkError if nobody answers, its NoPlaceLeft if the peer is full, Refused with the peer's reason,
        ConfigError for a malformed address.
        """
        peer = await self._host.dial(address, deadline_s=deadline_s)
        await self._introduce(peer)
        return peer

    async def meet(self, peer: PeerId, addresses: Sequence[str], *, deadline_s: float) -> None:
        """Connect to a known peer and introduce this node; returns at once if a link is up.

        Raises as `join`, and NoPlaceLeft, without a dial, where this node is full and nobody gives way to the peer.
        """
        if peer not in self._links:
            if not self._may_dial(peer):
                raise self._no_place(peer)
            if (parted := self._parting.get(peer)) is not None:
                await parted.wait()  # else the connection that is on its way out would seem to do
            began, made = trio.current_time(), False
            try:
                handshake_s = self._deadline_s(DIAL_HANDSHAKE_DEADLINE_S)
                await self._host.dial_peer(peer, addresses, deadline_s=deadline_s, handshake_s=handshake_s)
                await self._introduce(peer)
                made = True
            except NetworkError as error:
                if not isinstance(error, NoPlaceLeft):
                    await self._leave_mute(peer)
                raise
            finally:
                self._note_making(peer, began, made=made)

    async def _leave_mute(self, peer: PeerId) -> None:
        """Hang up on a stranger that does not answer a hello, or such fill all connections; it may have much to do."""
        if self._gate.rank(peer) is Rank.STRANGER and self._link_now(peer) is None:
            await self._host.hang_up(peer)

    def _note_making(self, peer: PeerId, began: float, *, made: bool) -> None:
        """Note how long a link took to make. Of strangers it counts where it was made: they may take their time."""
        now = trio.current_time()
        if made:
            self._gate.made(peer, now - began)
        if made or self._gate.rank(peer) > Rank.STRANGER:
            self._making.note(now - began, now)

    def _deadline_s(self, usual_s: float) -> float:
        """How long to wait for what should take `usual_s` at most, where links took long of late, or this node is late.

        What is given up is begun anew, at the cost of both ends: where all have too much to do nobody would be done.
        """
        now = trio.current_time()
        return self.pace * usual_s + self._own_lag_s() + self._making.waited_s(now)

    def send(self, peer: PeerId, message: LinkMessage) -> None:
        """Queue a message; a peer with a full queue does not get it.

        Nor does one without a link, unless it is a message to the whole swarm: others who have one pass it on.
        """
        if isinstance(message, Ping) and self.holds(peer):
            self._host.ping(peer, number_of(message.nonce))
            return
        if (resting := self._resting.get(peer)) is not None and isinstance(message, SignOfLife):
            self._post_all([resting], message)
            return
        hops = {peer}
        if peer in self.message_relay.lacking and isinstance(message, SwarmMessage):
            hops.update(self.message_relay.through(self._sealer.peer_id, peer, self._links))
        links = [self._links[hop] for hop in hops if hop in self._links]
        if links:
            self._post_all(links, message)

    def charge(self, peer: PeerId, handled_s: float) -> None:
        """Count time that a message of `peer` took after it was delivered: its next ones are read later for it."""
        if (link := self._links.get(peer)) is not None:
            link.pace.charge(handled_s)

    def broadcast(self, message: LinkMessage) -> None:
        """Queue a message for everyone whom it concerns; it is signed once.

        What who comes first says in the course of a round concerns those who come first too, who contributed, and who
        said something of a round themselves; not who follows now. All else concerns everybody: certificates, and what
        others say of a round, for who knows no member yet has to be heard by one.
        """
        links = list(self._links.values())
        in_course = isinstance(message, SwarmMessage) and not isinstance(message, FOR_EVERYBODY)
        if in_course and self._gate.rank(self._sealer.peer_id) is Rank.FIRST:
            links = [one for one in links if one.takes_part or self._gate.rank(one.peer) > Rank.STRANGER]
            links = [one for one in links if not self._gate.follows(one.peer)]
        self._post_all(links, message)

    def tell_of(self, peer: PeerId, message: LinkMessage) -> None:
        """Queue a message about a peer for everyone; about a stranger for who comes first, and itself, alone.

        A node full of strangers would else tell each of them of each.
        """
        is_stranger = self._gate.rank(peer) is Rank.STRANGER
        links = self._links.values()
        told = [one for one in links if not is_stranger or one.peer == peer or self._gate.rank(one.peer) is Rank.FIRST]
        self._post_all(told, message)

    def lack(self, peers: frozenset[PeerId]) -> None:
        """This node does not reach these live peers over links: everyone else is told, and may help out."""
        self.message_relay.lack(peers)
        self.broadcast(Reach(lacks=tuple(sorted(peers))))

    async def drain(self, *, deadline_s: float) -> None:
        """Return when everything queued has been given to the streams, or the deadline passes."""
        marks: list[trio.Event] = []
        for link in self._links.values():
            with contextlib.suppress(trio.WouldBlock):
                mark = trio.Event()
                link.outbox.send_nowait(mark)
                marks.append(mark)
        with trio.move_on_after(deadline_s):
            for mark in marks:
                await mark.wait()

    def drop(self, peer: PeerId, why: str = "", *, last_word: bool = False) -> None:
        """End the link and the connection with `peer`, also where it rests.

        last_word: what is queued goes to it before that, if it takes that at once; nothing is heard from it any more.
        """
        was_up = peer in self._links
        if self._part(peer, last_word_s=LAST_WORD_S if last_word else 0.0) and was_up:
            self._gate.lost(peer, why)

    def end(self, peer: PeerId) -> None:
        """End the link with `peer` in favour of others: it is not made again."""
        if self._part(peer):
            self._gate.gave_way(peer)

    def make_way(self, peer: PeerId, among: Collection[PeerId]) -> None:
        """End one of the links with those `among` whom `peer` comes before, if there is any."""
        loser = self._loser(peer, among)
        if loser is not None:
            self.end(loser)

    def end_from(self, hosts: Collection[str], why: str) -> None:
        """End the links that lead from these addresses of this machine."""
        for peer in [*self._links, *self._resting]:
            if self._host.own_host_of(peer) in hosts:
                self.drop(peer, why)

    def end_rests(self) -> None:
        """End what rests: that nothing came may have been for reasons of this node's own."""
        for peer in list(self._resting):
            self._part(peer)

    def resting(self) -> frozenset[PeerId]:
        """The peers whose links rest: only signs of life go to them, and a word of theirs is all that is needed."""
        return frozenset(self._resting)

    def rest(self, peer: PeerId) -> None:
        """`peer` is dead of silence: it has no link any more, until it says something over what was one."""
        link = self._links.pop(peer, None)
        if link is None:
            return
        link.rests_since = trio.current_time()
        self._resting[peer] = link
        self.message_relay.forget(peer)
        if len(self._resting) > RESTING_LIMIT:
            self._part(next(iter(self._resting)))
        self._gate.rests(peer)

    def end_long_rests(self, now: float) -> None:
        """End what has rested for REST_LIMIT_S."""
        for peer in [link.peer for link in self._resting.values() if now - link.rests_since >= REST_LIMIT_S]:
            self._part(peer)

    def is_heard(self, peer: PeerId) -> bool:
        """Take note that something came over the connection below a link, which is up then if it rested; False where
        there is none."""
        if (resting := self._resting.get(peer)) is not None:
            self._wake(resting)
        return peer in self._links

    def _wake(self, link: _Link) -> None:
        """Something came over a link that rests: it is up, if there is a place for it still."""
        if not self._make_room(link.peer, dialled=False):
            self._part(link.peer)
            return
        del self._resting[link.peer]
        link.rests_since = math.inf
        self._up(link)

    def _part(self, peer: PeerId, *, last_word_s: float = 0.0) -> bool:
        """End the link with `peer`, or what rests of it; whether there was one."""
        link = self._links.pop(peer, None) or self._resting.pop(peer, None)
        if link is None:
            return False
        if last_word_s:
            link.unheard = True
        else:
            link.scope.cancel()
        self._parting[peer] = parted = trio.Event()
        self._jobs.send_nowait(partial(self._disconnect, link, parted, last_word_s))
        self.message_relay.forget(peer)
        return True

    async def _disconnect(self, link: _Link, parted: trio.Event, last_word_s: float) -> None:
        peer = link.peer
        try:
            if last_word_s:
                await trio.sleep(last_word_s)  # what was sent is read before the connection is closed
                link.scope.cancel()
            await self._host.close(link.connection)
        finally:
            parted.set()
            if self._parting.get(peer) is parted:
                del self._parting[peer]

    # -- hello -----------------------------------------------------------------------------------------------

    async def _introduce(self, peer: PeerId) -> None:
        answer, revocations = await self._say_hello(peer)
        if revocations is not None:
            self._gate.told_revocations(peer, revocations)
        if isinstance(answer, Refusal):
            raise Refused(f"refused: {answer.reason}", peer=peer)
        if isinstance(answer, Full):
            self._gate.turned_away(peer, answer)
            raise NoPlaceLeft(f"{peer} is full: all of its links are taken; others are tried, and it again later")
        self._gate.welcomed(peer, answer)
        if not self._make_room(peer, dialled=True):
            await self._host.close(self._host.connection(peer))
            raise self._no_place(peer)
        self._admit(peer)

    async def _say_hello(self, peer: PeerId) -> tuple[HelloAnswer, Revocations | None]:
        """Say hello; return the answer, and the list of revocations that comes behind a refusal, if one does."""
        ends_at = trio.current_time() + self._deadline_s(HELLO_DEADLINE_S)
        stream = await self._host.open(peer, HELLO_PROTOCOL, deadline_s=_left_s(ends_at))
        revocations: Revocations | None = None
        try:
            await stream.send(canonical(self._gate.hello()), deadline_s=_left_s(ends_at))
            reply = await stream.receive(deadline_s=_left_s(ends_at))
            answer: HelloAnswer = decode(reply, HelloAnswer, peer=peer)  # type: ignore[arg-type]
            if isinstance(answer, Refusal):
                with contextlib.suppress(NetworkError):  # mostly there is none, and the stream ends
                    revocations = decode(await stream.receive(deadline_s=_left_s(ends_at)), Revocations, peer=peer)
        except BaseException:
            await stream.abort()
            raise
        await stream.aclose()
        return answer, revocations

    async def _answer_hello(self, stream: MessageStream) -> None:
        deadline_s = self._deadline_s(HELLO_DEADLINE_S)
        hello = decode(await stream.receive(deadline_s=deadline_s), Hello, peer=stream.peer)
        if not self._hellos.take(stream.peer, trio.current_time()):
            raise RemoteError("says hello over and over", peer=stream.peer)
        answer, revocations = self._gate.welcome(stream.peer, hello)
        if isinstance(answer, Welcome) and answer.record and not self._make_room(stream.peer, dialled=False):
            answer = self._gate.full(stream.peer)
        admitted = isinstance(answer, Welcome) and bool(answer.record)
        with self._promise(stream.peer, admitted):
            await stream.send(canonical(answer), deadline_s=deadline_s)
        if admitted:
            self._admit(stream.peer)
        if revocations is not None:
            await stream.send(canonical(revocations), deadline_s=deadline_s)
        await stream.aclose()

    def _admit(self, peer: PeerId) -> None:
        if self._link_now(peer) is None:
            self.drop(peer, "another connection took its place")
        if peer in self._links:
            return
        if (resting := self._resting.get(peer)) is not None:
            self._wake(resting)
            return
        outbox, queue = trio.open_memory_channel[bytes | trio.Event](QUEUE_LIMIT_MESSAGES)
        pace, connection, now = Pace(self._refusals), self._host.connection(peer), trio.current_time()
        link = _Link(peer, outbox, queue, trio.CancelScope(), pace, connection, said_at=now)
        self._jobs.send_nowait(partial(self._write_messages, link))
        self._up(link)

    def _link_now(self, peer: PeerId) -> _Link | None:
        """The link with a peer, or what rests of it, if it is over the connection that there is now."""
        link = self._links.get(peer) or self._resting.get(peer)
        return link if link is not None and link.connection is self._host.connection(peer) else None

    def _up(self, link: _Link) -> None:
        self._links[link.peer] = link
        self._admitted.set()
        self._admitted = trio.Event()
        if self.message_relay.lacking:
            self.send(link.peer, Reach(lacks=tuple(sorted(self.message_relay.lacking))))
        self._gate.linked(link.peer)

    # -- places ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _promise(self, peer: PeerId, welcome: bool) -> Iterator[None]:
        """Keep a place for a peer while its welcome is being sent."""
        if welcome:
            self._promised.add(peer)
        try:
            yield
        finally:
            self._promised.discard(peer)

    def _has_room(self, peer: PeerId, *, dialled: bool) -> bool:
        """True if there is a place for `peer`; those that are promised to others are none for a stranger."""
        promised = 0 if self._gate.rank(peer) is Rank.FIRST else len(self._promised - {peer, *self._links})
        return peer in self._links or len(self._links) + promised < self._places(dialled)

    def _places(self, dialled: bool) -> int:
        few = self._few_places(dialled)
        return LINK_LIMIT if few is None else few

    def _no_place(self, peer: PeerId) -> NoPlaceLeft:
        return NoPlaceLeft(f"all {self._places(True)} links of this node are taken; there is none for {peer}")

    def _may_dial(self, peer: PeerId) -> bool:
        """True if a link with `peer` would come of it; for strangers that it finds by itself a node ends no links."""
        if self._has_room(peer, dialled=True):
            return True
        return self._gate.rank(peer) > Rank.STRANGER and self._loser(peer) is not None

    def _loser(self, peer: PeerId, among: Collection[PeerId] | None = None) -> PeerId | None:
        now = trio.current_time()
        places = (
            Place(peer=link.peer, rank=self._gate.rank(link.peer), silent_s=now - link.said_at)
            for link in self._links.values()
            if among is None or link.peer in among
        )
        return gives_way(places, self._gate.rank(peer))

    def _make_room(self, peer: PeerId, *, dialled: bool) -> bool:
        """Have a place for `peer`, if need be another's; whether there is one."""
        if self._has_room(peer, dialled=dialled):
            return True
        self._refusals.note(Reason.LINKS)
        loser = self._loser(peer)
        if loser is None:
            return False
        logger.info("all links are taken: that with %s ends for one with %s", loser, peer)
        self.end(loser)
        return True

    # -- streams ---------------------------------------------------------------------------------------------

    def _post_all(self, links: Sequence[_Link], message: LinkMessage) -> None:
        kind = SWARM_KIND if isinstance(message, SwarmMessage) else ENVELOPE_KIND
        sealed = self._sealer.seal(kind, canonical(message))
        for link in links:
            self._post(link, sealed)

    def _post(self, link: _Link, sealed: bytes) -> None:
        try:
            link.outbox.send_nowait(sealed)
        except trio.WouldBlock:
            logger.warning("%s does not take its messages; dropping the link", link.peer)
            self._end(link, f"{QUEUE_LIMIT_MESSAGES} messages wait to be sent")

    def _end(self, link: _Link, why: str) -> None:
        if link in (self._links.get(link.peer), self._resting.get(link.peer)):
            self.drop(link.peer, why)

    async def _write_messages(self, link: _Link) -> None:
        """The outgoing stream of one link, until it breaks."""
        why = "this node stops"
        try:
            with link.scope:
                stream = await self._host.open(link.peer, MESSAGES_PROTOCOL, deadline_s=REST_LIMIT_S)
                try:
                    async for item in link.queue:
                        await self._send_waiting(stream, [item, *_waiting(link.queue)])
                finally:
                    with trio.CancelScope(shield=True):
                        await stream.abort()
        except ShoalError as error:
            why = f"sending: {error}"
        finally:
            self._end(link, why)

    async def _send_waiting(self, stream: MessageStream, items: Sequence[bytes | trio.Event]) -> None:
        """Send what has gathered in a queue at once: the more there is to do, the less each message costs."""
        messages = [item for item in items if not isinstance(item, trio.Event)]
        if messages:
            await stream.send_all(messages, deadline_s=self._deadline_s(SEND_DEADLINE_S))
        for item in items:
            if isinstance(item, trio.Event):
                item.set()

    async def _read_messages(self, stream: MessageStream) -> None:
        """The incoming stream of one link, until it breaks."""
        link: _Link | None = None
        with trio.move_on_after(self._deadline_s(ADMISSION_DEADLINE_S)):
            while (link := self._link_now(stream.peer)) is None:
                await self._admitted.wait()
        if link is None:
            raise RemoteError("sends messages without having been admitted", peer=stream.peer)
        if not self._host.came_over(stream, link.connection):
            raise NetworkError(f"the connection of a stream of {stream.peer} is gone")
        why = "this node stops"
        try:
            while True:
                for sealed in await stream.receive_all():
                    began = thread_time()
                    if self._resting.get(link.peer) is link:
                        self._wake(link)
                    if not link.unheard:
                        self._hear(stream.peer, sealed)
                    await link.pace.read(len(sealed), thread_time() - began)
        except StreamEnded as error:
            why = f"receiving: {error}"
        except ShoalError as error:
            why = f"receiving: {error}"
            raise
        finally:
            self._end(link, why)

    def _hear(self, peer: PeerId, sealed: bytes) -> None:
        """Deliver what came from `peer`, unless it is old, as its signer's; and pass on what is to be."""
        envelope = open_envelope(sealed, self._swarm_id, peer=peer)
        signer = envelope.sender
        if envelope.kind == SWARM_KIND:
            word: SwarmMessage = decode(envelope.payload, SwarmMessage, peer=peer)  # type: ignore[arg-type]
            if signer == peer:
                self._pass_on(envelope, sealed)
                if self._guard.accept(envelope):
                    self.note_said(peer, of_round=True)
                    self._gate.message(peer, word)
            elif self._gate.admits(signer) and self._guard.accept(envelope):
                self._gate.passed_on(signer, word)
            return
        if signer != peer or envelope.kind != ENVELOPE_KIND:
            raise RemoteError(f"passed on a {envelope.kind} of {signer}", peer=peer)
        if self._guard.accept(envelope):
            message: LinkMessage = decode(envelope.payload, LinkMessage, peer=peer)  # type: ignore[arg-type]
            if not isinstance(message, SignOfLife):
                self.note_said(peer)
            self._gate.message(peer, message)

    def _is_kept(self, peer: PeerId) -> bool:
        """True of a peer whose old messages must never pass for new ones: it is linked, or not just anybody."""
        return self.holds(peer) or self._gate.rank(peer) > Rank.STRANGER

    def note_said(self, peer: PeerId, *, of_round: bool = False) -> None:
        """Note that something came from `peer` beyond a sign of life, also if another brought it."""
        link = self._links.get(peer)
        if link is not None:
            link.said_at = trio.current_time()
            link.takes_part |= of_round

    def _pass_on(self, envelope: Envelope, sealed: bytes) -> None:
        """Give what its signer itself sent to those that have no link to it, if that is for this node to do."""
        if not self.message_relay.needed or not self._passed_on.accept(envelope):
            return
        for target in self.message_relay.targets(envelope.sender, self._links, len(sealed), trio.current_time()):
            link = self._links[target]
            if link.outbox.statistics().current_buffer_used < RELAYED_QUEUED_LIMIT:
                self._post(link, sealed)


def _waiting(queue: trio.MemoryReceiveChannel[bytes | trio.Event]) -> Iterator[bytes | trio.Event]:
    """Take the items that wait in a queue now, up to SENT_AT_ONCE_BYTES."""
    size = 0
    with contextlib.suppress(trio.WouldBlock):
        while size < SENT_AT_ONCE_BYTES:
            item = queue.receive_nowait()
            size += 0 if isinstance(item, trio.Event) else len(item)
            yield item


def _left_s(ends_at: float) -> float:
    return max(ends_at - trio.current_time(), 0.0)
