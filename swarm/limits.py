"""Limits of the control plane: what strangers and members may cost this node, and who enforces them.

    who comes first   members, founders and whom the user named (`shoal.protocol.places`): no stranger has its place,
                      and what strangers share is not taken from it, from where its PeerId is proven
    a connection      `Door`: so many handshakes a second from one IP address and in all, members' addresses first,
                      then those that have not come before; so many half-open at once, of which the oldest of the most
                      crowded address gives way; who comes too often is left hanging (`shoal.swarm.incoming`)
    a stranger        who is connected and not admitted: few streams, and few of all strangers together, few bytes,
                      parted from after a while, or soon when its hello was refused, and the first to go when there are
                      many (`shoal.swarm.strangers`)
    its reads         `PeerLimits.turn`: all strangers together are read so often in a second, those first that were
                      read little; what they send beyond that stays in the system's buffers, until they are parted from
    a stream          `PeerLimits`: so many at once and a second; who is refused often loses the connection
    a message         `PeerLimits.pace`: over its rate a member is read later, so it fills its own buffers and not ours;
                      the rates are of messages, of bytes, and of the time that handling them takes
    a frame           `PeerLimits.small_frame`: so many of a connection that carry nothing or little; then it is read
                      later
    bytes             `Memory`: received and not yet read, at whatever stage, of one peer, of strangers, and of all

Everything that is turned away is counted in `Refusals`, by reason, and is in the node's status. An address that floods
spends its own allowance, so newcomers from elsewhere still get in; and whom this node dials itself is not counted.
Bounds that belong to one machine of the protocol stay beside it: lanes' queues, gossip's outboxes, links' queues.
"""

from __future__ import annotations

import contextlib
import socket
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from enum import StrEnum

import trio

from shoal.protocol.identity import PeerId
from shoal.protocol.limits import KEY_LIMIT, Rates, TokenBucket

CONNECTION_LIMIT = 512
"""Connections to peers, of all kinds together."""
HALF_OPEN_LIMIT = 64
"""Incoming connections whose handshake is under way."""
HALF_OPEN_PER_ADDRESS_LIMIT = 48
HANDSHAKES_PER_S, HANDSHAKES_BURST = 0.3, 96.0
"""Incoming ones in all, from other addresses than members'. With all that a stranger may say afterwards each costs this
node up to 80 ms of CPU; the burst is as many as a swarm has members."""
NEWCOMERS_PER_S, NEWCOMERS_BURST = 0.3, 64.0
"""Incoming ones from addresses that came hardly ever before: whoever comes again and again leaves them their room."""
NEWCOMER_RETURNS_S, NEWCOMER_BURST = 60.0, 4.0
"""An address is a newcomer's for its first few, and for another one after so long."""
ADDRESS_HANDSHAKES_PER_S, ADDRESS_HANDSHAKES_BURST = 3.0, 96.0
"""From one IP address. A whole swarm on one machine, or behind one router, comes and is re-linked within the burst."""
CALLS_PER_S, CALLS_BURST = 16.0, 256.0
"""Through one relay, of those who belong here or may: all of a swarm behind routers comes and is re-linked that way."""

LANE_CONNECTIONS_PER_S, LANE_CONNECTIONS_BURST = 200.0, 4096.0
LANE_ADDRESS_CONNECTIONS_PER_S, LANE_ADDRESS_CONNECTIONS_BURST = 32.0, 1024.0
"""Incoming ones at the lanes' port, in all and from one IP address. Nothing but reading 16 bytes is done for them."""

STRANGER_LIMIT = 128
"""Peers that are connected, by their own dial, and not admitted."""
STRANGER_DEADLINE_S = 20.0
STRANGERS_LOOK_S = 0.5

STREAM_LIMIT = 256
"""Streams of one admitted peer at once."""
STREAMS_PER_S, STREAMS_BURST = 200.0, 1024.0
STRANGER_STREAM_LIMIT = 16
STRANGER_STREAMS_PER_S, STRANGER_STREAMS_BURST = 4.0, 64.0
"""For hello, manifest, meeting points and a few questions."""
FIRST_STREAMS = 8.0
"""Of a stranger; for those after them all strangers share what follows."""
STRANGERS_STREAMS_PER_S, STRANGERS_STREAMS_BURST = 16.0, 384.0
FIRST_READS = 48.0
"""Of a stranger that dialled: of frames' headers and bodies. A hello with all that is beside it takes up to 42."""
NEWCOMERS_READS_PER_S, NEWCOMERS_READS_BURST = 32.0, 4096.0
"""Of all strangers' first ones: more than those need who are let in at NEWCOMERS_PER_S and HANDSHAKES_PER_S."""
STRANGERS_READS_PER_S, STRANGERS_READS_BURST = 8.0, 256.0
"""Of all strangers' later ones."""
STRIKES_LIMIT = 64
"""Streams that are refused before the connection is closed, unless STRIKES_FORGIVEN_S pass in peace."""
STRIKES_FORGIVEN_S = 10.0
STRANGER_STRIKES = 4.0
"""As many as one of a stranger's streams that is refused counts for."""

MESSAGES_PER_S, MESSAGES_BURST = 400.0, 4096.0
"""Of one member on its link; a round has some dozens."""
MESSAGE_BYTES_PER_S, MESSAGE_BURST_BYTES = 8 << 20, 64 << 20
HANDLING_SHARE, HANDLING_BURST_S = 0.25, 0.5
"""Of the time of the loop that does all of a node's work, for the messages of one link: they may be few and small, and
cost much all the same."""
TURN_S = 0.005
"""After a message that took so long everybody else has a turn."""
GOSSIP_PER_S, GOSSIP_BURST = 200.0, 2048.0
"""Gossip packets of one connected peer, its own and those it passes on."""
STRANGER_GOSSIP_PER_S, STRANGER_GOSSIP_BURST = 2.0, 32.0
GOSSIP_BYTES_PER_S, GOSSIP_BURST_BYTES = 4 << 20, 8 << 20
GOSSIP_ENTRIES_PER_S, GOSSIP_ENTRIES_BURST = 1024.0, 8192.0
"""Of its packets beside messages: subscriptions, GRAFT, PRUNE, and the numbers in IHAVE, which tells of each message
three times, and IWANT."""
WANTED_BYTES_PER_S, WANTED_BURST_BYTES = 2 << 20, 16 << 20
"""Messages that one peer is sent anew since it wants them."""

HANDSHAKE_LIMIT_BYTES = 16 << 10
"""Of one connection, either way made, until both ends are known and their streams agreed on; it takes some 500."""
PEER_UNREAD_LIMIT_BYTES = 32 << 20  # of one member
STRANGER_UNREAD_LIMIT_BYTES, STRANGER_UNREAD_SURE_BYTES = 1 << 20, 128 << 10
STRANGERS_UNREAD_LIMIT_BYTES = 16 << 20
"""Of all strangers together, in what they have beyond that which each is sure of."""
UNREAD_LIMIT_BYTES = 512 << 20
"""Received from all peers and not yet read, from the socket up."""
SMALL_FRAME_BYTES = 1024
SMALL_FRAMES_PER_S, SMALL_FRAMES_BURST = 2000.0, 8192.0
"""Frames of one connection that carry less than that, or nothing: at 100 MiB/s there are some 1,600 of credit."""


class Reason(StrEnum):
    """Reason for which something was turned away."""

    HALF_OPEN = "half-open connections"
    HANDSHAKE_RATE = "connections per second"
    HANDSHAKE_FAILED = "failed handshakes"
    CONNECTIONS = "connections beyond the limit"
    STRANGERS = "unadmitted connections"
    SILENT = "connections without a hello"
    REFUSED = "streams and connections after a refused hello"
    STREAMS = "open streams"
    STREAM_RATE = "streams per second"
    FLOODING = "connections of flooding peers"
    UNREAD = "unread bytes"
    PACED = "messages delayed"
    TURNS = "reads delayed of strangers"
    GOSSIP_RATE = "gossip packets per second"
    ADMISSION = "hellos not admitted"
    LINKS = "hellos and dials beyond the links"
    LANE_RATE = "lane connections per second"
    LANE_STRANGERS = "lane connections pushed out"
    LANE_HELLO = "lane connections not authentic"


class Refusals:
    """Counts of what was turned away since the node started, by reason. From any thread."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def note(self, reason: Reason, times: int = 1) -> None:
        """Count one."""
        self._counts[reason.value] += times

    def counts(self) -> dict[str, int]:
        """By reason, those that happened."""
        return dict(sorted(self._counts.items()))


class UnprovenConnections:
    """Connections that have proven nothing yet, by IP address. Use from trio's thread.

    When there are too many, the oldest of the most crowded address gives way: it had its chance. is_known: whether an
    IP address is a member's; those give way after all others.
    """

    def __init__(
        self,
        refusals: Refusals,
        reason: Reason,
        *,
        limit: int,
        per_address: int,
        is_known: Callable[[str], bool] = lambda address: False,
    ) -> None:
        self._refusals, self._reason, self._is_known = refusals, reason, is_known
        self._limit, self._per_address = limit, per_address
        self._places: dict[str, OrderedDict[object, trio.CancelScope]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._places.values()))

    @contextlib.contextmanager
    def entering(self, address: str) -> Iterator[None]:
        """A place for the block, which is cancelled when another needs the place more."""
        self._make_room(address)
        place, scope = object(), trio.CancelScope()
        self._places.setdefault(address, OrderedDict())[place] = scope
        try:
            with scope:
                yield
        finally:
            self._remove(address, place)

    def _make_room(self, address: str) -> None:
        crowded = address
        if len(self._places.get(address, ())) < self._per_address:
            if len(self) < self._limit:
                return
            crowded = max(self._places, key=lambda one: (not self._is_known(one), len(self._places[one])))
        place = next(iter(self._places[crowded]))
        self._places[crowded][place].cancel()
        self._remove(crowded, place)
        self._refusals.note(self._reason)

    def _remove(self, address: str, place: object) -> None:
        of_address = self._places.get(address, OrderedDict())
        of_address.pop(place, None)
        if not of_address:
            self._places.pop(address, None)


class Door:
    """Decides which incoming connections are worth a handshake. Use from trio's thread.

    is_known: whether an IP address is a member's. Those spend their own allowance alone. is_member: whether a peer
    belongs here or may.
    """

    def __init__(
        self,
        refusals: Refusals,
        reason: Reason = Reason.HANDSHAKE_RATE,
        *,
        per_s: tuple[float, float] = (HANDSHAKES_PER_S, HANDSHAKES_BURST),
        address_per_s: tuple[float, float] = (ADDRESS_HANDSHAKES_PER_S, ADDRESS_HANDSHAKES_BURST),
        newcomers_per_s: tuple[float, float] = (NEWCOMERS_PER_S, NEWCOMERS_BURST),
        is_known: Callable[[str], bool] = lambda address: False,
        is_member: Callable[[PeerId], bool] = lambda peer: False,
    ) -> None:
        self._refusals, self._reason = refusals, reason
        self._calls: Rates[PeerId] = Rates(CALLS_PER_S, CALLS_BURST)
        self._by_address: Rates[str] = Rates(*address_per_s)
        self._first: Rates[str] = Rates(1 / NEWCOMER_RETURNS_S, NEWCOMER_BURST)
        self._newcomers: Rates[None] = Rates(*newcomers_per_s)
        self._all: Rates[None] = Rates(*per_s)
        self._is_known, self._is_member = is_known, is_member

    def lets_call(self, relay: PeerId, caller: PeerId) -> bool:
        """Return True if one more call through a relay may say something; the relay vouches for who calls.

        Strangers share what there is for one address, and take nothing from members.
        """
        if not self._is_member(caller):
            return self.lets_in(f"relay {relay}")
        if self._calls.take(relay, trio.current_time()):
            return True
        self._refusals.note(self._reason)
        return False

    def lets_in(self, address: str) -> bool:
        """Return True if one more connection from this IP address may say something, and count it."""
        now, network = trio.current_time(), network_of(address)
        if self._by_address.take(network, now) and (
            self._is_known(address)
            or (self._first.take(network, now) and self._newcomers.take(None, now))
            or self._all.take(None, now)
        ):
            return True
        self._refusals.note(self._reason)
        return False

    def is_spent(self, address: str) -> bool:
        """True if this IP address has used up what it may have for itself: it comes too often, whoever else comes."""
        return self._by_address.is_spent(network_of(address), trio.current_time())


def network_of(address: str) -> str:
    """Network that is in one hand: an IPv4 address, or the first 64 bits of an IPv6 address."""
    if ":" not in address:
        return address
    try:
        return socket.inet_pton(socket.AF_INET6, address.split("%")[0])[:8].hex()
    except OSError:
        return address


class KnownHosts:
    """The IP addresses at which members were linked last."""

    def __init__(self) -> None:
        self._hosts: OrderedDict[str, None] = OrderedDict()

    def note(self, host: str | None) -> None:
        """A member is linked there."""
        if host is not None:
            self._hosts.pop(host, None)
            self._hosts[host] = None
            if len(self._hosts) > KEY_LIMIT:
                self._hosts.popitem(last=False)

    def __contains__(self, host: str) -> bool:
        return host in self._hosts


NOBODY = PeerId("")


class Memory:
    """Bytes received and not yet read, wherever they wait, of each peer and of all together. Use from trio's thread.

    Connections of which nobody knows yet whose they are count as one stranger, NOBODY. However much other strangers
    hold, each finds what a hello needs.
    """

    def __init__(self, refusals: Refusals, is_admitted: Callable[[PeerId], bool]) -> None:
        self._refusals = refusals
        self._is_admitted = is_admitted
        self._unread: dict[PeerId, int] = {}
        self.unread_bytes = 0

    def take(self, peer: PeerId, size: int) -> bool:
        """Make room for bytes of `peer`; False, and no room is made, beyond the limits."""
        of_peer = self._unread.get(peer, 0) + size
        if not self._may_have(peer, of_peer) or self.unread_bytes + size > UNREAD_LIMIT_BYTES:
            self._refusals.note(Reason.UNREAD)
            return False
        self._unread[peer] = of_peer
        self.unread_bytes += size
        return True

    def _may_have(self, peer: PeerId, unread: int) -> bool:
        if self._is_admitted(peer):
            return unread <= PEER_UNREAD_LIMIT_BYTES
        if unread <= STRANGER_UNREAD_SURE_BYTES:
            return True
        others = (size for one, size in self._unread.items() if one != peer and not self._is_admitted(one))
        beyond = sum(max(0, size - STRANGER_UNREAD_SURE_BYTES) for size in (*others, unread))
        return unread <= STRANGER_UNREAD_LIMIT_BYTES and beyond <= STRANGERS_UNREAD_LIMIT_BYTES

    def free(self, peer: PeerId, size: int) -> None:
        """These bytes of `peer` were read, or dropped."""
        left = self._unread.get(peer, 0) - size
        self.unread_bytes -= size
        if left > 0:
            self._unread[peer] = left
        else:
            self._unread.pop(peer, None)


class PeerLimits:
    """Limits on the streams and messages of connected peers. Use from trio's thread.

    is_admitted: whether a peer belongs to the swarm; to others less is given. is_expected: whether one that does not
    may do so, and is known. is_known: whether an IP address is a member's: others there are read as soon. is_refused:
    whether a peer was told that it does not belong here, and has nothing more to say. comes_first: whether a peer does,
    admitted or not yet.
    """

    def __init__(
        self,
        refusals: Refusals,
        is_admitted: Callable[[PeerId], bool],
        is_expected: Callable[[PeerId], bool] = lambda peer: False,
        is_known: Callable[[str], bool] = lambda address: False,
        is_refused: Callable[[PeerId], bool] = lambda peer: False,
        comes_first: Callable[[PeerId], bool] = lambda peer: False,
    ) -> None:
        self._refusals = refusals
        self.is_admitted, self._is_expected, self._is_known = is_admitted, is_expected, is_known
        self._is_refused, self.comes_first = is_refused, comes_first
        self._streams: Rates[PeerId] = Rates(STREAMS_PER_S, STREAMS_BURST)
        self._stranger_streams: Rates[PeerId] = Rates(STRANGER_STREAMS_PER_S, STRANGER_STREAMS_BURST)
        self._first: Rates[PeerId] = Rates(0.0, FIRST_STREAMS)
        self._strangers: Rates[None] = Rates(STRANGERS_STREAMS_PER_S, STRANGERS_STREAMS_BURST)
        self._first_reads: Rates[PeerId] = Rates(0.0, FIRST_READS)
        self._newcomers_reads = TokenBucket(NEWCOMERS_READS_PER_S, NEWCOMERS_READS_BURST)
        self._strangers_reads = TokenBucket(STRANGERS_READS_PER_S, STRANGERS_READS_BURST)
        self._packets: Rates[PeerId] = Rates(GOSSIP_PER_S, GOSSIP_BURST)
        self._stranger_packets: Rates[PeerId] = Rates(STRANGER_GOSSIP_PER_S, STRANGER_GOSSIP_BURST)
        self._gossip_bytes: Rates[PeerId] = Rates(GOSSIP_BYTES_PER_S, GOSSIP_BURST_BYTES)
        self._gossip_entries: Rates[PeerId] = Rates(GOSSIP_ENTRIES_PER_S, GOSSIP_ENTRIES_BURST)
        self._wanted_bytes: Rates[PeerId] = Rates(WANTED_BYTES_PER_S, WANTED_BURST_BYTES)
        self._small_frames: Rates[PeerId] = Rates(SMALL_FRAMES_PER_S, SMALL_FRAMES_BURST)
        self._open: Counter[PeerId] = Counter()
        self._strikes: Rates[PeerId] = Rates(STRIKES_LIMIT / STRIKES_FORGIVEN_S, STRIKES_LIMIT)

    def is_flooding(self, peer: PeerId) -> bool:
        """Count one stream that was refused; whether the peer's connection is to be closed for it."""
        strikes = 1.0 if self.is_admitted(peer) else STRANGER_STRIKES
        if not self._has_no_business(peer) and self._strikes.take(peer, trio.current_time(), strikes):
            return False
        self._refusals.note(Reason.FLOODING)
        return True

    async def small_frame(self, peer: PeerId) -> None:
        """A frame of this peer's connection carried little: wait until it is within its rate again."""
        wait_s = self._small_frames.owe(peer, trio.current_time())
        if wait_s > 0:
            self._refusals.note(Reason.PACED)
            await trio.sleep(wait_s)

    async def turn(self, peer: PeerId, address: str | None = None) -> None:
        """Wait until this peer, which dialled from `address`, is to be read: members, and who likely is one, now."""
        is_due = self.is_admitted(peer) or self.comes_first(peer) or self._is_expected(peer)
        if is_due or (address is not None and self._is_known(address)):
            return
        now = trio.current_time()
        is_newcomer = self._first_reads.take(peer, now)
        wait_s = (self._newcomers_reads if is_newcomer else self._strangers_reads).owe(1.0, now)
        if wait_s > 0:
            self._refusals.note(Reason.TURNS)
            await trio.sleep(wait_s)

    @contextlib.contextmanager
    def stream(self, peer: PeerId) -> Iterator[bool]:
        """A place for one more incoming stream of `peer` as long as the block lasts; False if it may have none."""
        admitted = self.is_admitted(peer) or self.comes_first(peer)
        if self._has_no_business(peer):
            self._refusals.note(Reason.REFUSED)
            yield False
            return
        if self._open[peer] >= (STREAM_LIMIT if admitted else STRANGER_STREAM_LIMIT):
            self._refusals.note(Reason.STREAMS)
            yield False
            return
        if not self._has_room(peer, admitted=admitted):
            self._refusals.note(Reason.STREAM_RATE)
            yield False
            return
        self._open[peer] += 1
        try:
            yield True
        finally:
            self._open[peer] -= 1
            if not self._open[peer]:
                del self._open[peer]

    def _has_no_business(self, peer: PeerId) -> bool:
        return self._is_refused(peer) and not self.is_admitted(peer)

    def _has_room(self, peer: PeerId, *, admitted: bool) -> bool:
        now = trio.current_time()
        if admitted:
            return self._streams.take(peer, now)
        return self._stranger_streams.take(peer, now) and (
            self._first.take(peer, now) or self._strangers.take(None, now)
        )

    async def gossiped(self, peer: PeerId, size: int, entries: int) -> None:
        """A packet of so many bytes and control entries came by gossip: wait until that is within the rates again."""
        now = trio.current_time()
        wait_s = max(self._gossip_bytes.owe(peer, now, size), self._gossip_entries.owe(peer, now, entries))
        if wait_s > 0:
            self._refusals.note(Reason.PACED)
            await trio.sleep(wait_s)

    def may_want(self, peer: PeerId, size: int) -> bool:
        """Return True if this peer may be sent a message of so many bytes once more, and count them."""
        if self._wanted_bytes.take(peer, trio.current_time(), size):
            return True
        self._refusals.note(Reason.GOSSIP_RATE)
        return False

    def may_gossip(self, peer: PeerId) -> bool:
        """Return True if one more gossip packet of `peer` is looked at, and count it."""
        rates = self._packets if self.is_admitted(peer) else self._stranger_packets
        if rates.take(peer, trio.current_time()):
            return True
        self._refusals.note(Reason.GOSSIP_RATE)
        return False


class Pace:
    """Holds the reader of one link back to its rates, by waiting; nothing is dropped."""

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._messages = TokenBucket(MESSAGES_PER_S, MESSAGES_BURST)
        self._bytes = TokenBucket(float(MESSAGE_BYTES_PER_S), float(MESSAGE_BURST_BYTES))
        self._handling = TokenBucket(HANDLING_SHARE, HANDLING_BURST_S)

    async def read(self, size: int, handled_s: float = 0.0) -> None:
        """A message of so many bytes was read, and handled in that time: wait until this is within the rates again."""
        now = trio.current_time()
        wait_s = max(
            self._messages.owe(1.0, now), self._bytes.owe(float(size), now), self._handling.owe(handled_s, now)
        )
        if wait_s > 0:
            self._refusals.note(Reason.PACED)
            await trio.sleep(wait_s)
        elif handled_s >= TURN_S:
            await trio.lowlevel.checkpoint()

    def charge(self, handled_s: float) -> None:
        """A message that was read a while ago took so long to handle: the next ones wait for it."""
        self._handling.owe(handled_s, trio.current_time())
