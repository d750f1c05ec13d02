"""Between lanes and the reduction under way: cuts payloads into frames, and brings frames to where they belong.

A contribution can arrive before the plan that asks for it, since frames and messages take different ways. So a frame
of a plan newer than the one under way makes its lane wait for it, PLAN_WAIT_S at most; a frame of an older plan is
dropped. Called in the lanes' threads.

A lane can fail while the peer at its end lives: payloads are remembered (by reference) as long as their reduction goes
on, and those who may have missed some are *owed* all of theirs again. A receiver drops what it has already.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from shoal.collectives.reduce import Reduction
from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Plan
from shoal.swarm.chunks import Post
from shoal.swarm.frame import SCOPE_BYTES, FrameHeader, FrameKind, split_chunk

PLAN_WAIT_S = 15.0
KINDS = frozenset({FrameKind.CONTRIBUTION, FrameKind.FINAL})

logger = logging.getLogger(__name__)

Seat = tuple[int, int, int]
"""(round, view, attempt): the order of plans."""
_NEVER: Seat = (1 << 64, 0, 0)


@dataclass(frozen=True, slots=True)
class _Sent:
    """A payload that was posted to a peer."""

    plan: Plan
    kind: FrameKind
    chunk: int
    payload: memoryview


class PlanTraffic:
    """The frames of reductions; one reduction is under way at a time."""

    def __init__(self, *, post: Post) -> None:
        self._post = post
        self._changed = threading.Condition()
        self._reduction: Reduction | None = None
        self._scope = b""
        self._seat: Seat = (0, 0, 0)
        self._sent: dict[PeerId, list[_Sent]] = {}
        self._refused: dict[PeerId, list[_Sent]] = {}
        self._failed: set[PeerId] = set()

    def begin(self, reduction: Reduction) -> None:
        """Frames of this reduction's plan are taken from now on, those of earlier plans dropped."""
        with self._changed:
            self._end()
            self._reduction = reduction
            self._scope = reduction.plan.hash[:SCOPE_BYTES]
            self._seat = _seat(reduction.plan)
            self._changed.notify_all()

    def end(self) -> None:
        """The reduction under way is over."""
        with self._changed:
            self._end()
            self._changed.notify_all()

    def close(self) -> None:
        """No reduction will come any more: lanes that wait for one go on."""
        with self._changed:
            self._end()
            self._seat = _NEVER
            self._changed.notify_all()

    def _end(self) -> None:
        if self._reduction is not None:
            self._reduction.close()
        self._reduction = None
        self._sent, self._refused, self._failed = {}, {}, set()

    def post(self, plan: Plan, scope: bytes, peer: PeerId, kind: FrameKind, chunk: int, payload: memoryview) -> None:
        """Send one payload of `plan`, whose hash begins with `scope`; who does not get it now is owed it."""
        sent = _Sent(plan, kind, chunk, payload)
        with self._changed:
            if scope != self._scope:
                return  # of a reduction that has been replaced
            self._sent.setdefault(peer, []).append(sent)
        self._send(peer, sent, scope)

    def lane_failed(self, peer: PeerId) -> None:
        """A lane to `peer` broke: what was queued on it or on its way may be lost."""
        with self._changed:
            if peer in self._sent:
                self._failed.add(peer)

    def owed(self) -> frozenset[PeerId]:
        """Who may lack something that was posted."""
        with self._changed:
            return frozenset(self._failed | self._refused.keys())

    def post_again(self, peer: PeerId) -> None:
        """Send what no lane took, or everything if a lane failed under it."""
        with self._changed:
            refused = self._refused.pop(peer, [])
            again = list(self._sent.get(peer, ())) if peer in self._failed else refused
            self._failed.discard(peer)
            scope = self._scope
        for sent in again:
            self._send(peer, sent, scope)

    def _send(self, peer: PeerId, sent: _Sent, scope: bytes) -> None:
        plan, payload = sent.plan, sent.payload
        model = FrameHeader(
            kind=sent.kind,
            attempt=plan.attempt,
            round=plan.round,
            view=plan.view,
            chunk=sent.chunk,
            scope=scope,
            length=0,
        )
        try:
            for header, piece in split_chunk(model, payload):
                self._post(peer, header, piece)
        except NetworkError as error:
            logger.debug("chunk %d for %s not sent: %s", sent.chunk, peer, error)
            with self._changed:
                if scope == self._scope:
                    self._refused.setdefault(peer, []).append(sent)

    def region(self, peer: PeerId, header: FrameHeader) -> memoryview | None:
        """Where a frame's bytes go, None if they are not wanted. Raises RemoteError."""
        reduction = self._reduction_of(header)
        if reduction is None:
            return None
        if header.kind is FrameKind.CONTRIBUTION:
            return reduction.contribution_region(peer, header.chunk, header.offset, header.length)
        return reduction.final_region(peer, header.chunk, header.offset, header.length)

    def received(self, peer: PeerId, header: FrameHeader, payload: memoryview) -> None:
        """A frame is authentic and in its region. Raises RemoteError."""
        reduction = self._reduction_of(header)
        if reduction is None:
            return
        if header.kind is FrameKind.CONTRIBUTION:
            reduction.contribution_received(peer, header.chunk, header.offset, payload)
        else:
            reduction.final_received(peer, header.chunk, header.offset, payload)

    def _reduction_of(self, header: FrameHeader) -> Reduction | None:
        seat = (header.round, header.view, header.attempt)
        with self._changed:
            self._changed.wait_for(lambda: header.scope == self._scope or seat <= self._seat, timeout=PLAN_WAIT_S)
            return self._reduction if header.scope == self._scope else None


def _seat(plan: Plan) -> Seat:
    return plan.round, plan.view, plan.attempt
