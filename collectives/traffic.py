"""Between lanes and the reduction under way: cuts payloads into frames, and brings frames to where they belong.

Frames name the lineage of a plan (its scope) and the revision under which they were sent. A frame can arrive before
the plan that it was sent under, since frames and messages take different ways. So a frame of a newer plan or revision
makes its lane wait for that, PLAN_WAIT_S at most. A frame of an older plan is dropped; one of an older revision is good
still.
Called in the lanes' threads.

A lane can fail while the peer at its end lives: payloads are remembered (by reference) as long as their reduction goes
on, and those who may have missed some are *owed* theirs again. Over the next lane the two tell each other what they
lack (a LACKING frame: a bit per chunk for the contribution, then a bit per chunk for the final), and send that; who is
told nothing in time sends everything. What waits for a lane since before is not posted a second time. A receiver drops
what it has already.

Relays. Two participants that cannot reach each other have their frames passed on by a third, as the plan says. The
frame's flags then name a place: to the relay, for whom it is; from the relay, from whom. The relay vouches for nothing:
contributions are checked against their root, and finals against their owner's signature, wherever they come from. How
much a relay holds, and who keeps the rest back, is in frame_relay.py.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from msgspec.structs import replace

from shoal.collectives.frame_relay import Holding, RelayAccount, Window, window_bytes
from shoal.collectives.reduce import Reduction
from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import MEMBER_LIMIT, Plan
from shoal.swarm.lanes.chunks import Post
from shoal.swarm.lanes.frame import LARGE_FRAME_BYTES, SCOPE_BYTES, FrameHeader, FrameKind, split_chunk

PLAN_WAIT_S = 15.0  # that a frame waits for its plan
PAYLOADS = frozenset({FrameKind.CONTRIBUTION, FrameKind.FINAL})
KINDS = PAYLOADS | {FrameKind.LACKING}

PASS_ON = MEMBER_LIMIT
"""In the flags of a frame to a relay, beside the place it is for."""
PASSED_ON = 2 * MEMBER_LIMIT
"""In the flags of a frame from a relay, beside the place it is from."""
PAST_LIMIT = 64
TO_PASS_LIMIT = 4096
"""Frames of others that wait for a lane to one peer. Beyond it, or where the plan reaches that peer through another,
they are dropped: the two notice that nothing arrives, and are given another relay."""
ANSWER = 1
"""In the flags of a LACKING frame: the receiver need not tell in its turn."""

logger = logging.getLogger(__name__)

FrameOrder = tuple[int, int, int]
"""(round, view, attempt): the order of plans."""
_NEVER: FrameOrder = (1 << 64, 0, 0)
Waiting = Callable[[PeerId, bytes], Collection[tuple[FrameKind, int]]]


@dataclass(frozen=True, slots=True, eq=False)
class _Sent:
    """A payload that was posted to a peer."""

    kind: FrameKind
    chunk: int
    payload: memoryview


class PlanTraffic:
    """The frames of reductions; one reduction is under way at a time.

    waiting: what was posted to a peer in a scope and no lane has begun to send: it need not be posted again.
    """

    def __init__(self, *, post: Post, waiting: Waiting) -> None:
        self._post = post
        self._waiting = waiting
        self._changed = threading.Condition()
        self._reduction: Reduction | None = None
        self._routes = Routes()
        self._scope = b""
        self._frame_order: FrameOrder = (0, 0, 0)
        self._past: deque[bytes] = deque(maxlen=PAST_LIMIT)
        self._sent: dict[PeerId, list[_Sent]] = {}
        self._refused: dict[PeerId, list[_Sent]] = {}
        self._failed: set[PeerId] = set()
        self._resent: dict[PeerId, set[tuple[FrameKind, int]]] = {}
        self._windows: dict[PeerId, Window[_Sent]] = {}  # of those who are reached through another
        self.holding = Holding()
        """Frames that this node passes on between others."""
        self._to_pass: dict[PeerId, deque[tuple[FrameHeader, memoryview]]] = {}
        """Of these, the ones that wait for a lane."""
        self.account: RelayAccount | None = None
        """Record of what came and went of them, under the plan that is followed."""

    def begin(self, reduction: Reduction, routes: Routes) -> None:
        """Frames of this reduction's plan are taken from now on, those of earlier plans dropped."""
        with self._changed:
            self._end()
            self._reduction = reduction
            self._scope = reduction.lineage[:SCOPE_BYTES]
            self._follow(reduction.plan, routes)

    def revise(self, plan: Plan, routes: Routes) -> None:
        """The reduction under way goes on by `plan`. Those who are reached another way now are owed everything."""
        with self._changed:
            before = self._routes
            self._follow(plan, routes)
            changed = {peer for peer in self._sent if routes.via.get(peer) != before.via.get(peer)}
            self._failed |= changed
            for peer in changed:
                self._windows.pop(peer, None)
            for peer in plan.evicted:
                self._forget(peer)

    def _follow(self, plan: Plan, routes: Routes) -> None:
        self._routes = routes
        self._frame_order = (plan.round, plan.view, plan.attempt)
        reduction = self._reduction if routes.passed else None
        self.account = None if reduction is None else RelayAccount(reduction.final_format, routes.passed, self.account)
        self._changed.notify_all()

    def end(self) -> None:
        """The reduction under way is over."""
        with self._changed:
            self._end()
            self._changed.notify_all()

    def close(self) -> None:
        """End it: no reduction will come any more, and lanes that wait for one go on."""
        with self._changed:
            self._end()
            self._frame_order = _NEVER
            self._changed.notify_all()

    def _end(self) -> None:
        if self._reduction is not None:
            self._reduction.close()
            self._past.append(self._scope)
        self._reduction, self._scope, self._routes, self.account = None, b"", Routes(), None
        self._sent, self._refused, self._failed, self._resent, self._windows = {}, {}, set(), {}, {}
        self._to_pass = {}
        self.holding.begin()

    def _forget(self, peer: PeerId) -> None:
        self._sent.pop(peer, None)
        self._refused.pop(peer, None)
        self._failed.discard(peer)
        self._windows.pop(peer, None)
        self._to_pass.pop(peer, None)

    # --- out ---

    def post(self, scope: bytes, peer: PeerId, kind: FrameKind, chunk: int, payload: memoryview) -> None:
        """Send one payload of the reduction whose lineage begins with `scope`; who does not get it now is owed it."""
        sent = _Sent(kind, chunk, payload)
        with self._changed:
            if scope != self._scope:
                return  # of a reduction that has been replaced
            self._sent.setdefault(peer, []).append(sent)
        self._send(peer, sent, scope)

    def lane_failed(self, peer: PeerId) -> None:
        """A lane to `peer` broke: what was queued on it or on its way may be lost."""
        with self._changed:
            affected = {to for to in self._sent if self._routes.via.get(to, to) == peer}
            self._failed |= affected
            for to in affected:
                self._resent.pop(to, None)
            account = self.account
        if account is not None:
            account.lose(peer)

    def owed(self) -> frozenset[PeerId]:
        """Peers that may lack something that was posted, or is to be passed on."""
        with self._changed:
            return frozenset(self._failed | self._refused.keys() | self._to_pass.keys())

    def next_hop(self, peer: PeerId) -> PeerId:
        """Peer that has to be reached for `peer` to be reached."""
        with self._changed:
            return self._routes.via.get(peer, peer)

    def resume(self, peer: PeerId, timeout_s: float) -> None:
        """There is a lane to `peer` again: tell each other what lacks, and send that. Blocks.

        Sends everything if `peer` has not told within `timeout_s`, and where a relay is between the two; and what no
        lane took, if none failed.
        """
        with self._changed:
            can_tell = peer in self._failed and peer not in self._routes.via
        if can_tell and self._tell_lacking(peer, flags=0):
            with self._changed:
                self._changed.wait_for(lambda: peer not in self._failed, timeout=timeout_s)
        self.post_again(peer)

    def _tell_lacking(self, peer: PeerId, *, flags: int) -> bool:
        with self._changed:
            reduction, scope, (round_, view, attempt) = self._reduction, self._scope, self._frame_order
        if reduction is None:
            return False
        lacking = b"".join(_bits(chunks, reduction.plan.chunks) for chunks in reduction.lacking(peer))
        header = FrameHeader(
            kind=FrameKind.LACKING,
            flags=flags,
            attempt=attempt,
            round=round_,
            view=view,
            scope=scope,
            length=len(lacking),
        )
        try:
            self._post(peer, header, lacking)
        except NetworkError:
            return False
        return True

    def _send_lacking(self, peer: PeerId, header: FrameHeader, payload: memoryview) -> None:
        """Send what `peer` says it lacks and this node has posted to it before."""
        with self._changed:
            reduction = self._reduction
            if reduction is None or header.scope != self._scope:
                return
            size = -(-reduction.plan.chunks // 8)
            if len(payload) != 2 * size:
                raise RemoteError(
                    f"{len(payload)} bytes to say what lacks of {reduction.plan.chunks} chunks", peer=peer
                )
            lacking = {FrameKind.CONTRIBUTION: bytes(payload[:size]), FrameKind.FINAL: bytes(payload[size:])}
            resent = self._resent.setdefault(peer, set())
            again = [
                sent
                for sent in self._sent.get(peer, ())
                if lacking[sent.kind][sent.chunk // 8] >> sent.chunk % 8 & 1 and (sent.kind, sent.chunk) not in resent
            ]
            resent |= {(sent.kind, sent.chunk) for sent in again}
            self._refused.pop(peer, None)
            self._failed.discard(peer)
            self._changed.notify_all()
            scope = self._scope
        if not header.flags & ANSWER:
            self._tell_lacking(peer, flags=ANSWER)
        self._send_again(peer, again, scope)

    def post_again(self, peer: PeerId) -> None:
        """Send what no lane took, or everything if a lane failed under it."""
        with self._changed:
            refused = self._refused.pop(peer, [])
            again = list(self._sent.get(peer, ())) if peer in self._failed else refused
            if peer in self._failed and peer in self._windows:
                self._windows[peer].clear()
            self._failed.discard(peer)
            scope, to_pass = self._scope, self._to_pass.pop(peer, deque())
        while to_pass:
            self._pass(peer, *to_pass.popleft())
        self._send_again(peer, again, scope)

    def _send_again(self, peer: PeerId, again: Sequence[_Sent], scope: bytes) -> None:
        with self._changed:
            direct = peer not in self._routes.via
        waiting = self._waiting(peer, scope) if direct else ()
        for sent in again:
            if (sent.kind, sent.chunk) not in waiting:
                self._send(peer, sent, scope)

    def _send(self, peer: PeerId, sent: _Sent, scope: bytes) -> None:
        with self._changed:
            (round_, view, attempt), routes = self._frame_order, self._routes
        hop = routes.via.get(peer, peer)
        model = FrameHeader(
            kind=sent.kind,
            flags=0 if hop == peer else PASS_ON | routes.places[peer],
            attempt=attempt,
            round=round_,
            view=view,
            chunk=sent.chunk,
            scope=scope,
            length=0,
        )
        if hop != peer:
            with self._changed:
                if scope != self._scope:
                    return
                window = self._windows.setdefault(peer, Window(window_bytes(routes.ways(hop))))
                window.waiting.extend((header, piece, sent) for header, piece in split_chunk(model, sent.payload))
            self._send_waiting(peer, hop, scope)
            return
        try:
            for header, piece in split_chunk(model, sent.payload, LARGE_FRAME_BYTES):
                self._post(hop, header, piece)
        except NetworkError as error:
            self._refuse(peer, [sent], scope, error)

    def _refuse(self, peer: PeerId, sent: Sequence[_Sent], scope: bytes, error: NetworkError) -> None:
        """These are owed."""
        logger.debug("%d payloads for %s not sent: %s", len(sent), peer, error)
        with self._changed:
            if scope == self._scope:
                self._refused[peer] = list(dict.fromkeys([*self._refused.get(peer, ()), *sent]))

    def _send_waiting(self, peer: PeerId, hop: PeerId, scope: bytes) -> None:
        """Send what the window of a peer behind a relay lets through."""
        while True:
            with self._changed:
                window = self._windows.get(peer) if scope == self._scope else None
                frame = None if window is None or self._routes.via.get(peer) != hop else window.next()
            if window is None or frame is None:
                return
            header, piece, sent = frame
            try:
                self._post(hop, header, piece)
            except NetworkError as error:
                with self._changed:
                    left = window.clear()
                self._refuse(peer, [sent, *left], scope, error)
                return

    def kept_back(self) -> tuple[tuple[PeerId, PeerId, bytes], ...]:
        """(peer, relay, scope) where frames wait until the relay has let go of others."""
        with self._changed:
            via = self._routes.via
            return tuple((to, via[to], self._scope) for to, one in self._windows.items() if one.waiting and to in via)

    def hear_let_go(self, peer: PeerId, relay: PeerId, scope: bytes, let_go_bytes: int | None) -> None:
        """Note how much of what goes to `peer` the relay has let go in this scope; None: it does not say."""
        with self._changed:
            window = self._windows.get(peer)
            if window is None or scope != self._scope or self._routes.via.get(peer) != relay:
                return
            window.hear(let_go_bytes)
        self._send_waiting(peer, relay, scope)

    def let_go(self, scope: bytes, sender: PeerId, to: PeerId) -> int:
        """Bytes that this relay has let go of `sender`'s for `to` in this scope: 0 where its plan is yet to come."""
        with self._changed:
            return self.holding.let_go((sender, to)) if scope == self._scope else 0

    # --- in ---

    def region(self, peer: PeerId, header: FrameHeader) -> memoryview | None:
        """Return the memory for a frame's bytes, None if they are not wanted. Raises RemoteError."""
        reduction, routes = self._reduction_of(header)
        if reduction is None:
            return None
        if header.flags & PASS_ON:
            return self._room(routes, peer, header)
        sender = routes.sender(peer, header)
        if sender is None:
            return None
        final = header.kind is FrameKind.FINAL
        region = reduction.final_region if final else reduction.contribution_region
        with _blaming(sender, peer):
            return region(sender, header.chunk, header.offset, header.length)
        return None

    def received(self, peer: PeerId, header: FrameHeader, payload: memoryview) -> None:
        """A frame is authentic and in its region. Raises RemoteError."""
        reduction, routes = self._reduction_of(header)
        if reduction is None:
            return
        if header.kind is FrameKind.LACKING:
            self._send_lacking(peer, header, payload)
            return
        if header.flags & PASS_ON:
            self._pass_on(routes, peer, header, payload)
            return
        sender = routes.sender(peer, header)
        if sender is None:
            return
        final = header.kind is FrameKind.FINAL
        received = reduction.final_received if final else reduction.contribution_received
        with _blaming(sender, peer):
            received(sender, header.chunk, header.offset, payload)

    def _room(self, routes: Routes, peer: PeerId, header: FrameHeader) -> memoryview | None:
        """Memory for a frame to pass on; None if it is passed on to nobody, or there is none."""
        to, account = routes.receiver(peer, header), self.account
        if to is None or account is None:
            return None
        account.check(peer, header)
        return self.holding.take((peer, to), header.length, window=window_bytes(routes.ways(routes.me)))

    def _pass_on(self, routes: Routes, peer: PeerId, header: FrameHeader, payload: memoryview) -> None:
        to, account = routes.receiver(peer, header), self.account
        if to is None or account is None:
            return
        account.count((peer, to), header, payload)
        self._pass(to, replace(header, flags=PASSED_ON | routes.places[peer]), payload)

    def _pass(self, to: PeerId, header: FrameHeader, payload: memoryview) -> None:
        """Post a frame of another's, or keep it until there is a lane; its memory is bounded already."""
        try:
            self._post(to, header, payload)
        except NetworkError as error:
            logger.debug("chunk %d for %s not passed on: %s", header.chunk, to, error)
            with self._changed:
                if header.scope == self._scope and to not in self._routes.via:
                    waiting = self._to_pass.setdefault(to, deque())
                    if len(waiting) < TO_PASS_LIMIT:
                        waiting.append((header, payload))
                        return
                account = self.account
            if account is not None:
                account.lose(to)

    def _reduction_of(self, header: FrameHeader) -> tuple[Reduction | None, Routes]:
        """The reduction of a frame, waited for if it is yet to come; None if the frame is of one that is over."""
        scope, frame_order = header.scope, (header.round, header.view, header.attempt)
        with self._changed:
            if scope != self._scope or frame_order > self._frame_order:
                self._changed.wait_for(lambda: self._knows(scope, frame_order), timeout=PLAN_WAIT_S)
            return (self._reduction if scope == self._scope else None), self._routes

    def _knows(self, scope: bytes, frame_order: FrameOrder) -> bool:
        """True if frames of this scope and frame order need not wait for a plan. The caller holds the lock."""
        if scope == self._scope:
            return frame_order <= self._frame_order
        return scope in self._past or frame_order < self._frame_order or self._frame_order == _NEVER


class Routes:
    """Routes between the participants of one plan, direct or through a relay, seen from one of them. Immutable.

    A frame of an older revision may have been relayed as that one said: then it is nobody's fault, and nobody's frame.
    Whoever is reached another way now is sent everything again.
    """

    def __init__(self, plan: Plan | None = None, me: PeerId | None = None) -> None:
        self._frame_order = (0, 0) if plan is None else (plan.view, plan.attempt)
        self._peers = () if plan is None else tuple(p.peer for p in plan.participants)
        self.places = {peer: place for place, peer in enumerate(self._peers)}
        self.via: dict[PeerId, PeerId] = {}
        self._pairs: dict[frozenset[PeerId], PeerId] = {}
        self.me = me
        for relay in () if plan is None else plan.relays:
            one, other, via = (self._peers[place] for place in (relay.one, relay.other, relay.via))
            self._pairs[frozenset((one, other))] = via
            if me in (one, other):
                self.via[other if me == one else one] = via
        self._ways = Counter(self._pairs.values())
        ends = [tuple(pair) for pair, via in self._pairs.items() if via == me]
        self.passed = tuple(way for one, other in ends for way in ((one, other), (other, one)))
        """From whom to whom frames lead through `me`."""

    def ways(self, via: PeerId | None) -> int:
        """Number of ways through one relay: from each of the two of a pair to the other."""
        return 0 if via is None else 2 * self._ways[via]

    def sender(self, peer: PeerId, header: FrameHeader) -> PeerId | None:
        """Return who sent a frame that came from `peer`; None if at most an older plan says so. Raises RemoteError."""
        if not header.flags & PASSED_ON:
            return peer
        return self._other_end(peer, header, via=peer)

    def receiver(self, peer: PeerId, header: FrameHeader) -> PeerId | None:
        """Return for whom a frame is that `peer` asks to pass on; None as above. Raises RemoteError."""
        return self._other_end(peer, header, via=self.me)

    def _other_end(self, peer: PeerId, header: FrameHeader, *, via: PeerId | None) -> PeerId | None:
        place = header.flags % MEMBER_LIMIT
        if place < len(self._peers):
            other = self._peers[place]
            end = self.me if via == peer else peer
            if end is not None and self._pairs.get(frozenset((end, other))) == via:
                return other
        if (header.view, header.attempt) < self._frame_order:
            return None
        raise RemoteError("a relayed frame that the plan does not provide for", peer=peer)


@contextmanager
def _blaming(sender: PeerId, peer: PeerId) -> Iterator[None]:
    """Do not end the lane to a relay, which vouches for nothing, for what another sent through it."""
    try:
        yield
    except RemoteError as error:
        if sender == peer:
            raise
        logger.warning("through %s: %s", peer, error)


def _bits(chunks: set[int], count: int) -> bytes:
    """A bit for each of `count` chunks, least significant first, as in the bitmaps of contributors."""
    return sum(1 << chunk for chunk in chunks).to_bytes(-(-count // 8), "little")
