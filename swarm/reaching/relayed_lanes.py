"""Lanes through a willing member: it joins two TCP connections and passes on the ciphertext between them.

    A ── AskPassage(B) ──► R                      over the control connections, which prove who is who
    A ◄── two tickets ──── R
    A ── LaneOffer(via R, ticket) ──► B           and B answers as to any offer
    A ── ticket ──► R ◄── ticket ── B             fresh connections to R's lane port; from there on R only copies
    A ══ lane id ‖ sealed hello, frames ══► B     a lane like any other: R has no key of it

Each dials R's own lane addresses, and R dials nobody. Passages are bounded in number, per peer, in bytes and in time
without a byte, and their bytes count as R's own uploads.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

import trio
from msgspec import Meta

from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Message, Peer
from shoal.protocol.peering import Refusal
from shoal.swarm.host import Host
from shoal.swarm.lanes.limits import RateLimit
from shoal.swarm.questions import answer, ask, hear
from shoal.swarm.streams import MessageStream

RELAYED_LANE_PROTOCOL = "/shoal/passage/1"
TICKET_BYTES = 16
TICKET_FIRST_BYTE = 1
"""Neither a knock's; a lane id that happens to equal a ticket is one in 2^120."""
ANSWER_LIMIT_BYTES = 1024
REQUEST_LIMIT_BYTES = 256
COPY_BYTES = 256 << 10
RELAYED_LANE_LIMIT = 128
PEER_LANE_LIMIT = 32
"""Relayed lanes with one peer at either end."""
LANE_LIMIT_BYTES = 1 << 40
IDLE_LIMIT_S = 3600.0
"""Without a byte one way."""
TAKEN_BYTES, TAKE_LIMIT_S = 32 << 10, 120.0
"""So many bytes an end takes within this time, or the passage is over."""
MEET_S = 10.0
"""From the tickets until both have come."""

Ticket = Annotated[bytes, Meta(min_length=TICKET_BYTES, max_length=TICKET_BYTES)]

logger = logging.getLogger(__name__)


class AskPassage(Message, frozen=True, kw_only=True):
    """Asks for a way to `peer`."""

    peer: Peer


class Passage(Message, frozen=True, kw_only=True):
    """The tickets of who asked (`near`) and of the peer (`far`)."""

    near: Ticket
    far: Ticket


RelayedLaneReply = Passage | Refusal


@dataclass(slots=True, eq=False)
class _Open:
    """One passage: whose it is, and the first of the two that came."""

    ends: tuple[PeerId, PeerId]
    expires_at: float
    waiting: dict[bytes, trio.SocketStream] = field(default_factory=dict)
    joined: trio.Event = field(default_factory=trio.Event)
    over: trio.Event = field(default_factory=trio.Event)
    left_bytes: int = 0

    @property
    def counted(self) -> tuple[PeerId, ...]:
        """Peers whose share it takes; until both have come that is who asked, so that nobody uses up another's."""
        return self.ends if self.joined.is_set() else self.ends[:1]


class RelayedLaneServer:
    """Joins passages while `admits` is set; it says between whom. upload: what all passages together may send."""

    def __init__(self, host: Host, *, upload: RateLimit | None = None) -> None:
        self.admits: Callable[[PeerId], bool] | None = None
        self.comes_first: Callable[[PeerId], bool] = lambda peer: True
        """True for a peer that may have all that there is; where either end does not come first, half of it is left."""
        self.bytes_passed = 0
        self._upload = upload or RateLimit()
        self._open: dict[bytes, _Open] = {}  # by ticket
        host.serve(RELAYED_LANE_PROTOCOL, self._serve)

    @property
    def relayed_lanes(self) -> int:
        """Those that are open, or agreed on."""
        self._expire()
        return len(set(map(id, self._open.values())))

    async def _serve(self, stream: MessageStream) -> None:
        asked: AskPassage = await hear(stream, AskPassage, limit_bytes=REQUEST_LIMIT_BYTES)
        await answer(stream, self._agree(stream.peer, PeerId(asked.peer)))

    def _agree(self, near: PeerId, far: PeerId) -> RelayedLaneReply:
        if self.admits is None:
            return Refusal(reason="this node passes no lanes on")
        if near == far or not (self.admits(near) and self.admits(far)):
            return Refusal(reason="no passage between these two: both have to be linked to this node")
        self._expire()
        ends = Counter(peer for relayed_lane in set(self._open.values()) for peer in relayed_lane.counted)
        share = 1 if self.comes_first(near) and self.comes_first(far) else 2
        of_ends = max(ends[near], ends[far])
        if len(self._open) >= 2 * RELAYED_LANE_LIMIT // share or of_ends >= PEER_LANE_LIMIT // share:
            return Refusal(reason="this node passes on as many lanes as it may")
        tickets = [bytes([TICKET_FIRST_BYTE]) + secrets.token_bytes(TICKET_BYTES - 1) for _ in range(2)]
        expires_at = trio.current_time() + MEET_S
        relayed_lane = _Open((near, far), expires_at, left_bytes=LANE_LIMIT_BYTES)
        self._open.update(dict.fromkeys(tickets, relayed_lane))
        return Passage(near=tickets[0], far=tickets[1])

    def _expire(self) -> None:
        now = trio.current_time()
        self._open = {
            ticket: relayed_lane
            for ticket, relayed_lane in self._open.items()
            if relayed_lane.joined.is_set() or relayed_lane.expires_at > now
        }

    def claims(self, ticket: bytes) -> bool:
        """True if a connection that began with these bytes is one end of a relayed lane; then `hold` it."""
        self._expire()
        relayed_lane = self._open.get(ticket)
        return relayed_lane is not None and not relayed_lane.joined.is_set() and ticket not in relayed_lane.waiting

    async def hold(self, ticket: bytes, stream: trio.SocketStream) -> None:
        """Own one end until the passage is over. The end that comes second does the work."""
        relayed_lane = self._open[ticket]
        relayed_lane.waiting[ticket] = stream
        if len(relayed_lane.waiting) < 2:
            with trio.move_on_at(relayed_lane.expires_at):
                await relayed_lane.joined.wait()
            if relayed_lane.joined.is_set():
                await relayed_lane.over.wait()
            return
        relayed_lane.joined.set()
        try:
            await self._join(relayed_lane)
        finally:
            for known in relayed_lane.waiting:
                self._open.pop(known, None)
            relayed_lane.over.set()

    async def _join(self, relayed_lane: _Open) -> None:
        one, other = relayed_lane.waiting.values()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._copy, relayed_lane, one, other, nursery.cancel_scope)
            nursery.start_soon(self._copy, relayed_lane, other, one, nursery.cancel_scope)

    async def _copy(
        self, relayed_lane: _Open, source: trio.SocketStream, sink: trio.SocketStream, scope: trio.CancelScope
    ) -> None:
        """One direction, until its end. Whatever goes wrong ends both: the lane's ends notice and make another."""
        try:
            while relayed_lane.left_bytes > 0:
                with trio.fail_after(IDLE_LIMIT_S):
                    data = await source.receive_some(COPY_BYTES)
                if not data:
                    await sink.send_eof()
                    return
                relayed_lane.left_bytes -= len(data)
                self.bytes_passed += len(data)
                await trio.sleep(self._upload.reserve(len(data)))
                for at in range(0, len(data), TAKEN_BYTES):
                    with trio.fail_after(TAKE_LIMIT_S):
                        await sink.send_all(data[at : at + TAKEN_BYTES])
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError, OSError) as error:
            logger.debug("a passage between %s and %s ended: %r", *relayed_lane.ends, error)
        scope.cancel()


async def ask_relayed_lane(host: Host, relay: PeerId, peer: PeerId) -> Passage:
    """Ask `relay` for a passage to `peer`. Raises NetworkError if it does not answer or refuses."""
    try:
        passage: Passage = await ask(
            host, relay, RELAYED_LANE_PROTOCOL, AskPassage(peer=peer), Passage, limit_bytes=ANSWER_LIMIT_BYTES
        )
    except RemoteError as error:
        raise NetworkError(str(error)) from error
    return passage
