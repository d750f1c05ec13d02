"""The reduction of one plan at one node: contributions in, sums out, finals everywhere.

    contribution ──post──▶ owner: check against root ─▶ sum in plan order ─▶ encode, sign ──post──▶ everyone
                                                                                 └▶ decode      decode ◀┘

A `Reduction` has no thread and no socket of its own. The threads that read the lanes call it: `…_region` says where
the bytes of a frame go, `…_received` that they are authentic and there, and does the work that has thereby become
possible, in that thread. What is to be sent goes through `post`.

Per chunk, exactness rests on three things. The set of contributors is fixed before the first addition: a chunk is
summed once, by the one thread that found nothing missing any more. The order is the plan's, whatever arrived first,
and every operation is rounded by itself. And everyone, the owner too, goes on with the decoded bytes of one encoding.

Two locks. `_lock` guards the tables and is never held during work or callbacks. `_gate` is passed, one thread at a
time, by everything this node sends and every progress it reports; so a callback that blocks holds the whole node, with
nothing half-done: what was posted is complete, and what is not posted is not final.

A lost member means a new plan and a new Reduction over the same encoded contributions; the old one is closed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest

import numpy as np

from shoal.collectives.codecs import F32, U8, Undecodable, check_denormals
from shoal.collectives.contribution import EncodedContribution, encoded_part, payload_bytes
from shoal.collectives.finals import FinalChunk, FinalFormat, Finals
from shoal.collectives.grid import Grid
from shoal.collectives.pieces import Pieces
from shoal.collectives.state import frozen
from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.messages import Plan
from shoal.swarm.frame import FrameKind

Post = Callable[[PeerId, FrameKind, int, memoryview], None]
"""(to, kind, chunk, whole payload). Must not block on the network: threads that read lanes call it, and two nodes
waiting for each other to read would wait forever. The payload is never changed and may be sent without copying it;
in all there are at most chunks × participants of them."""


class Reason(StrEnum):
    """Why a contribution was left out of a chunk."""

    MISCOMMITTED = "not what its root commits to"
    UNDECODABLE = "does not decode to finite values"


@dataclass(frozen=True, slots=True)
class Exclusion:
    """`peer`'s contribution to a chunk was left out of the sum, and of the divisor."""

    peer: PeerId
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceProgress:
    """`chunk` became final here, as number `final` of `total`; `excluded` is only known to its owner."""

    chunk: int
    final: int
    total: int
    excluded: tuple[Exclusion, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerProgress:
    """What came from a peer in this reduction, of all that is expected; `last_s` is by the caller's clock."""

    received_bytes: int
    expected_bytes: int
    last_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Who owes what. A missing contribution is its sender's fault; a final may be late because its owner waits too."""

    contributions: frozenset[PeerId]
    finals: frozenset[PeerId]


class _Inbox:
    """What came in for one chunk that this node owns, by the sender's place in the plan."""

    __slots__ = ("arrived", "assembling", "excluded", "owing")

    def __init__(self, contributors: tuple[int, ...], mine: int) -> None:
        self.owing = set(contributors) - {mine}
        self.assembling: dict[int, Pieces] = {}
        self.arrived: dict[int, U8] = {}
        self.excluded: list[Exclusion] = []


class Reduction:
    """One plan's reduction at the node of `identity`, which must take part in it. Thread-safe.

    contribution: this node's; None if its weight is zero. clock: monotonic, seconds.

    Raises LocalError if plan, identity and contribution do not fit together.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        identity: Identity,
        contribution: EncodedContribution | None,
        post: Post,
        on_progress: Callable[[ReduceProgress], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan = plan
        self.form = FinalFormat(plan)
        self._identity = identity
        self._me = _place_of(plan, identity.peer_id, contribution)
        self._contribution = contribution
        self._post = post
        self._on_progress = on_progress
        self._clock = clock
        self._places = {p.peer: i for i, p in enumerate(plan.participants)}
        self._contributors = plan.contributors()
        self._lock = threading.Lock()
        self._gate = threading.Lock()
        self._started = self._closed = False
        owned = [chunk for chunk, owner in enumerate(self.form.owners) if owner == self._me]
        self._inboxes = {chunk: _Inbox(self._contributors, self._me) for chunk in owned}
        others = [chunk for chunk, owner in enumerate(self.form.owners) if owner != self._me]
        self._finals_wanted = {chunk: self._final_pieces(chunk) for chunk in others}
        self._finals: dict[int, FinalChunk] = {}
        self._update: F32 = np.empty(plan.numel, np.float32)
        self._received: dict[PeerId, tuple[int, float]] = {}
        self._expected = self._expected_bytes(owned)

    # --- sending ---

    def start(self) -> None:
        """Post this node's contribution, and reduce the chunks that need nobody else's, in the calling thread."""
        with self._lock:
            if self._started:
                raise LocalError("a reduction is started once")
            self._started = True
        if self._contribution is not None and self._me in self._contributors:
            for chunk in self._sending_order():
                self._send(self.form.owner(chunk), FrameKind.CONTRIBUTION, chunk, self._contribution.payload(chunk))
        for chunk in sorted(self._inboxes):
            self._reduce_if_complete(chunk)

    def _sending_order(self) -> Iterator[int]:
        """Other owners' chunks, one of each owner in turn, from the owner after this node on.

        So all links are busy at once and no owner is everyone's first, while the contributors of one owner send its
        chunks in the same order, so that it can reduce the first early.
        """
        after_me = sorted(
            (owned for owned in self.plan.owners if owned.owner != self._me),
            key=lambda owned: ((owned.owner - self._me) % len(self.plan.participants), owned.start),
        )
        for turn in zip_longest(*(range(owned.start, owned.stop) for owned in after_me)):
            yield from (chunk for chunk in turn if chunk is not None)

    def _send(self, to: PeerId, kind: FrameKind, chunk: int, payload: memoryview) -> None:
        with self._gate:
            if not self._closed:
                self._post(to, kind, chunk, payload)

    # --- contributions in ---

    def contribution_region(self, sender: PeerId, chunk: int, offset: int, length: int) -> memoryview | None:
        """Where to put `length` bytes at `offset` of `sender`'s payload; None if they are not needed (any more).

        The memory is the caller's alone until it gives it back with `contribution_received`.

        Raises RemoteError if the plan does not have `sender` send such bytes.
        """
        place = self._check_contribution(sender, chunk, offset, length)
        with self._lock:
            inbox = None if self._closed else self._inboxes.get(chunk)
            if inbox is None or place not in inbox.owing:
                return None
            pieces = inbox.assembling.get(place)
            if pieces is not None and not pieces.wants(offset, length):
                return None
        return np.empty(length, np.uint8).data

    def contribution_received(self, sender: PeerId, chunk: int, offset: int, region: memoryview) -> None:
        """The authenticated bytes are in `region`. Completing a chunk reduces and posts it, in this thread.

        Raises RemoteError as `contribution_region` does. A payload that was complete but wrong raises nothing: it is
        left out, and the chunk's ReduceProgress says so.
        """
        place = self._check_contribution(sender, chunk, offset, len(region))
        with self._lock:
            inbox = None if self._closed else self._inboxes.get(chunk)
            if inbox is None or place not in inbox.owing:
                return
            pieces = inbox.assembling.get(place)
            if pieces is None:
                size = payload_bytes(self.form.grid, self.form.codec, chunk)
                pieces = inbox.assembling[place] = Pieces(size, sender)
            if not pieces.wants(offset, len(region)):
                return
            self._count(sender, len(region))
            if not pieces.add(offset, region):
                return
        root = self.plan.participants[place].root
        encoded = encoded_part(pieces.joined(), grid=self.form.grid, codec=self.form.codec, chunk=chunk, root=root)
        with self._lock:
            del inbox.assembling[place]
            inbox.owing.remove(place)
            if encoded is None:
                inbox.excluded.append(Exclusion(sender, Reason.MISCOMMITTED))
            else:
                inbox.arrived[place] = encoded
        self._reduce_if_complete(chunk)

    def _check_contribution(self, sender: PeerId, chunk: int, offset: int, length: int) -> int:
        place = self._places.get(sender)
        if place is None or place == self._me or place not in self._contributors:
            raise RemoteError("a contribution from who does not contribute", peer=sender)
        if not 0 <= chunk < self.plan.chunks or self.form.owners[chunk] != self._me:
            raise RemoteError(f"a contribution to chunk {chunk}, which is not summed here", peer=sender)
        if offset < 0 or length < 1 or offset + length > payload_bytes(self.form.grid, self.form.codec, chunk):
            raise RemoteError(f"bytes {offset}+{length} lie outside contributed chunk {chunk}", peer=sender)
        return place

    # --- the sum ---

    def _reduce_if_complete(self, chunk: int) -> None:
        """Reduce `chunk` if nothing is missing and no other thread has taken it."""
        with self._lock:
            inbox = self._inboxes.get(chunk)
            if self._closed or inbox is None or inbox.owing:
                return
            del self._inboxes[chunk]
        mean, included = self._mean(chunk, inbox)
        final = self.form.sign(self._identity, chunk, mean, included)
        self.form.codec.decode_into(final.encoded, self._update[slice(*self.form.grid.span(chunk))])
        self._finish(chunk, final, tuple(inbox.excluded))

    def _mean(self, chunk: int, inbox: _Inbox) -> tuple[F32, list[int]]:
        """The weighted mean of what arrived, in plan order, and whose it is; zeros if it is nobody's."""
        check_denormals()
        if self._contribution is not None and self._me in self._contributors:
            inbox.arrived[self._me] = self._contribution.encoded(chunk)
        total = np.zeros(self.form.grid.length(chunk), np.float32)
        values = np.empty_like(total)
        included, divisor = [], 0
        for place in self._contributors:
            if place not in inbox.arrived:
                continue
            participant = self.plan.participants[place]
            try:
                self.form.codec.decode_into(inbox.arrived[place], values)
            except Undecodable:
                inbox.excluded.append(Exclusion(participant.peer, Reason.UNDECODABLE))
                continue
            np.multiply(values, np.float32(participant.weight), out=values)
            np.add(total, values, out=total)
            divisor += participant.weight
            included.append(place)
        if divisor:
            np.divide(total, np.float32(divisor), out=total)
        return total, included

    def _finish(self, chunk: int, final: FinalChunk, excluded: tuple[Exclusion, ...] = ()) -> None:
        """Post the final if it is this node's own, then count it and say so; all behind the gate."""
        mine = self.form.owners[chunk] == self._me
        with self._gate:
            if self._closed:
                return
            if mine:
                n = len(self.plan.participants)
                for place in ((self._me + i) % n for i in range(1, n)):
                    to = self.plan.participants[place].peer
                    self._post(to, FrameKind.FINAL, chunk, final.payload.data)
            with self._lock:
                self._finals[chunk] = final
                count = len(self._finals)
            self._on_progress(ReduceProgress(chunk=chunk, final=count, total=self.plan.chunks, excluded=excluded))

    # --- finals in ---

    def final_region(self, sender: PeerId, chunk: int, offset: int, length: int) -> memoryview | None:
        """As `contribution_region`, for the final of a chunk that `sender` owns."""
        self._check_final(sender, chunk, offset, length)
        with self._lock:
            pieces = None if self._closed else self._finals_wanted.get(chunk)
            if pieces is None or not pieces.wants(offset, length):
                return None
        return np.empty(length, np.uint8).data

    def final_received(self, sender: PeerId, chunk: int, offset: int, region: memoryview) -> None:
        """The authenticated bytes are in `region`. A complete final is checked and decoded, in this thread.

        Raises RemoteError if it is not what the owner signed, or is nothing that can be applied. Such a final is
        forgotten, and is wanted as before.
        """
        self._check_final(sender, chunk, offset, len(region))
        with self._lock:
            pieces = None if self._closed else self._finals_wanted.get(chunk)
            if pieces is None or not pieces.wants(offset, len(region)):
                return
            self._count(sender, len(region))
            if not pieces.add(offset, region):
                return
            del self._finals_wanted[chunk]  # taken by this thread
        try:
            check_denormals()
            out = self._update[slice(*self.form.grid.span(chunk))]
            final = self.form.open(chunk, pieces.joined(), out)
        except RemoteError:
            with self._lock:
                self._finals_wanted[chunk] = self._final_pieces(chunk)
            raise
        self._finish(chunk, final)

    def _final_pieces(self, chunk: int) -> Pieces:
        return Pieces(self.form.payload_bytes(chunk), self.form.owner(chunk))

    def _check_final(self, sender: PeerId, chunk: int, offset: int, length: int) -> None:
        place = self._places.get(sender)
        if not 0 <= chunk < self.plan.chunks or place is None or place == self._me:
            raise RemoteError(f"a final of chunk {chunk} that nobody owns there", peer=sender)
        if self.form.owners[chunk] != place:
            raise RemoteError(f"a final of chunk {chunk} from who does not own it", peer=sender)
        if offset < 0 or length < 1 or offset + length > self.form.payload_bytes(chunk):
            raise RemoteError(f"bytes {offset}+{length} lie outside final {chunk}", peer=sender)

    # --- looking at it ---

    def _expected_bytes(self, owned: list[int]) -> dict[PeerId, int]:
        expected = dict.fromkeys(self._places, 0)
        contributed = sum(payload_bytes(self.form.grid, self.form.codec, chunk) for chunk in owned)
        for place in self._contributors:
            expected[self.plan.participants[place].peer] += contributed
        for chunk in self._finals_wanted:
            expected[self.form.owner(chunk)] += self.form.payload_bytes(chunk)
        del expected[self._identity.peer_id]
        return expected

    def _count(self, sender: PeerId, size: int) -> None:
        received, _ = self._received.get(sender, (0, 0.0))
        self._received[sender] = (received + size, self._clock())

    @property
    def progress_by_peer(self) -> dict[PeerId, PeerProgress]:
        """Of each peer that has sent or owes something. Before its first byte, `last_s` is minus infinity."""
        with self._lock:
            return {
                peer: PeerProgress(received_bytes=received, expected_bytes=expected, last_s=last)
                for peer, expected in self._expected.items()
                if expected
                for received, last in [self._received.get(peer, (0, float("-inf")))]
            }

    def waiting_for(self) -> Waiting:
        """The peers of whom something is still missing here."""
        with self._lock:
            owing = {place for inbox in self._inboxes.values() for place in inbox.owing}
            late = {self.form.owner(chunk) for chunk in self._finals_wanted}
        contributions = frozenset(self.plan.participants[place].peer for place in owing)
        return Waiting(contributions=contributions, finals=frozenset(late))

    @property
    def final_chunks(self) -> int:
        """How many chunks are final here, of `plan.chunks`."""
        with self._lock:
            return len(self._finals)

    def result(self) -> Finals:
        """All finals, decoded. Raises LocalError while one is missing."""
        with self._lock:
            if len(self._finals) != self.plan.chunks:
                raise LocalError(f"{self.plan.chunks - len(self._finals)} chunks are not final yet")
            chunks = tuple(self._finals[chunk] for chunk in range(self.plan.chunks))
        return Finals(plan=self.plan, chunks=chunks, update=frozen(self._update))

    def close(self) -> None:
        """Post nothing and take nothing any more; idempotent. What `result` can give, it gives still."""
        with self._lock:
            self._closed = True
            self._inboxes.clear()
            self._finals_wanted.clear()


def _place_of(plan: Plan, me: PeerId, contribution: EncodedContribution | None) -> int:
    """This node's place in the plan, after checking that the contribution is the one that the plan names."""
    place = plan.number(me)
    if place is None:
        raise LocalError("a reduction at a node that takes no part in it")
    participant = plan.participants[place]
    if participant.weight > 0:
        if contribution is None or contribution.root != participant.root:
            raise LocalError("the plan counts on another contribution than this node's")
        if contribution.grid != Grid.of(plan) or contribution.codec.name != plan.codec:
            raise LocalError("this node's contribution is on another grid, or in another codec, than the plan")
    return place
