"""The reduction of one plan at one node: contributions in, sums out, finals everywhere; and its repair.

    contribution ──post──▶ owner: check against root ─▶ sum in plan order ─▶ encode, sign ──post──▶ everyone
                                                                                 └▶ keep         keep ◀┘

A `Reduction` has no thread and no socket. The threads that read the lanes call it: `…_region` says where the bytes of a
frame go, `…_received` that they are there, and does what has thereby become possible. What is sent goes through `post`.

A chunk is in one of these states here. That of its owner goes from GATHERING to FINAL, all others' from WANTED:

    GATHERING   `_inboxes`         until every contribution has come, or is not to come any more
    SUMMING     `_summing`         while one thread adds them up, encodes and signs
    SIGNED      `_signed`          until it was posted to everyone; it is never summed again
    WANTED      `_finals_wanted`   until all its bytes came, and are those of a final that the revision means
    FINAL       `_finals`          until `verify` finds it unsound: then WANTED

`_follow` alone puts chunks where a revision has them, and `_finish` alone makes them FINAL. Nothing is tried again in
here: what a lane lost is sent again by `PlanTraffic`.

Per chunk, exactness rests on three things. The set of contributors is fixed before the first addition: a chunk is
summed once, by the one thread that found nothing missing any more. The order is the plan's, whatever arrived first,
and every operation is rounded by itself. And everyone, the owner too, goes on with the bytes of one encoding. Whether
these are what the owner signed is checked once all are here, before anybody reports on them (`verify`).

Repair. When participants are lost, `close_off` stops taking anything from them and says what is final here; `repair`
goes on by the revised plan. What is final and stands stays, as do contributions that have come in; a chunk whose owner
was lost is copied from who has its final, or summed again by its new owner, to whom everyone sends their unchanged
contribution. An owner signs a chunk once in a lineage: when it is to sum it again, it posts the same bytes. Who follows
another revision takes nothing of a chunk that is dealt differently there: what it needs is sent anew under each.

Two locks. `_lock` guards the tables and is never held during work or callbacks. `_gate` is passed, one thread at a
time, by all that this node sends and reports; so a callback that blocks holds the whole node, with nothing half-done:
what was posted is complete, and what is not posted is not final.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import UnsetType

from shoal.collectives.aggregate import Term, combine
from shoal.collectives.codecs import U8
from shoal.collectives.contribution import EncodedContribution, encoded_part, place_of
from shoal.collectives.finals import FinalChunk, FinalFormat, Finals, UnsoundFinal, UseFinal
from shoal.collectives.memory import PayloadPool
from shoal.collectives.partition import sending_order
from shoal.collectives.progress import Exclusion, Reason, ReduceProgress, Waiting
from shoal.collectives.reassembly import ReassemblyBuffer
from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.messages import NO_HASH, ChunkResults, Held, Plan
from shoal.swarm.lanes.frame import FrameKind


class PendingChunk:
    """Contributions received for one chunk that this node owns, by the sender's place in the plan. Not thread-safe.

    arrived: the encoded chunks. payloads: they with their Merkle paths.
    """

    __slots__ = ("arrived", "assembling", "excluded", "owing", "payloads")

    def __init__(self, owing: Iterable[int]) -> None:
        self.owing = set(owing)
        self.assembling: dict[int, ReassemblyBuffer] = {}
        self.arrived: dict[int, U8] = {}
        self.payloads: dict[int, U8] = {}
        self.excluded: list[Exclusion] = []


@dataclass(slots=True)
class Kept:
    """Chunks of a closed reduction, to be used again when its lineage is taken up again.

    signed: by this node, in any revision, at any time. finals: that were here when it was closed.
    """

    signed: dict[int, FinalChunk] = field(default_factory=dict)
    finals: dict[int, FinalChunk] = field(default_factory=dict)


Post = Callable[[PeerId, FrameKind, int, memoryview], None]
"""(to, kind, chunk, whole payload). Must not block on the network: threads that read lanes call it, and two nodes
waiting for each other to read would wait forever. The payload is never changed and may be sent without copying it;
without repairs there are at most chunks × participants of them."""


class Reduction:
    """The reduction of `plan` and its revisions at the node of `identity`, which must take part in it. Thread-safe.

    contribution: this node's; None if its weight is zero. memory: where payloads' memory comes from. kept: what is left
    of an earlier reduction of the same lineage, and what will be of this one.

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
        memory: PayloadPool | None = None,
        kept: Kept | None = None,
    ) -> None:
        self.lineage = plan.lineage
        self._identity = identity
        self._me = place_of(plan, identity.peer_id, contribution)
        self._contribution = contribution
        self._post = post
        self._on_progress = on_progress
        self._memory = memory or PayloadPool(0)
        self._places = {p.peer: i for i, p in enumerate(plan.participants)}
        self._contributors = plan.contributors()
        pairs = () if isinstance(plan.delegated, UnsetType) else plan.delegated
        self._delegated = frozenset(plan.participants[one.place].peer for one in pairs)
        self._lock = threading.Lock()
        self._gate = threading.Lock()
        self._started = self._closed = False
        self._closed_to: frozenset[PeerId] = frozenset()
        self._sent: set[tuple[int, PeerId]] = set()  # (chunk, to) of contributions posted
        self._summing: set[int] = set()
        self._kept = Kept() if kept is None else kept
        self._signed = self._kept.signed
        self._completed = b""  # hash of the newest plan of which it was told that all is final
        self._finals = dict(self._kept.finals)
        self._inboxes: dict[int, PendingChunk] = {}
        self._finals_wanted: dict[int, ReassemblyBuffer] = {}
        self._received: dict[PeerId, int] = {}
        self.final_format = FinalFormat(plan)
        self._first_owners = self.final_format.owners if plan.origin == NO_HASH else ()
        self._follow(self.final_format)

    @property
    def plan(self) -> Plan:
        """The revision that is followed now."""
        return self.final_format.plan

    @property
    def delegate(self) -> PeerId | None:
        """From whom this node takes all finals, once that one has them; None where owners send them."""
        return self.plan.delegates.get(self._identity.peer_id)

    def _follow(self, final_format: FinalFormat) -> None:
        """Set up the tables for a revision, keeping what stands. The caller holds the lock, or nobody else is there."""
        me, before = self._identity.peer_id, self.final_format
        self._closed_to |= frozenset(final_format.plan.evicted)
        self.final_format = final_format
        self._finals = {chunk: final for chunk, final in self._finals.items() if final_format.accepts(final)}
        for chunk in range(final_format.plan.chunks):
            mine = final_format.owner(chunk) == final_format.source(chunk) == me
            if chunk in self._finals or not mine:
                self._inboxes.pop(chunk, None)
            elif not (chunk in self._inboxes or chunk in self._summing or chunk in self._signed):
                self._inboxes[chunk] = PendingChunk(set(self._contributors) - {self._me})
            if chunk in self._finals or mine:
                self._finals_wanted.pop(chunk, None)
            elif chunk not in self._finals_wanted or final_format.source(chunk) != before.source(chunk):
                self._finals_wanted[chunk] = self._final_pieces(final_format, chunk)
        gone = {self._places[peer] for peer in self._closed_to if peer in self._places}
        for inbox in self._inboxes.values():
            inbox.owing -= gone
            for place in gone & inbox.assembling.keys():
                del inbox.assembling[place]

    # --- sending ---

    def start(self) -> None:
        """Post this node's contribution, and reduce the chunks that need nobody else's, in the calling thread."""
        with self._lock:
            if self._started:
                raise LocalError("a reduction is started once")
            self._started = True
        self._go_on(self.final_format, {})

    def close_off(self, evicted: Iterable[PeerId]) -> tuple[ChunkResults, ...]:
        """Take nothing more from these, and tell which finals are here, by the place of who signed them.

        Under the plan that began the reduction only those of the evicted are told; of all others it is known. What is
        told has been verified, in the calling thread.
        """
        with self._lock:
            self._closed_to |= frozenset(evicted)
            final_format = self.final_format
            told = [
                f for f in self._finals.values() if final_format.plan.origin != NO_HASH or f.owner in self._closed_to
            ]
        unsound = {error.chunk for error in self._verify(final_format, told)}
        by_signer: dict[int, dict[int, bytes]] = {}
        for final in told:
            if final.chunk not in unsound:
                by_signer.setdefault(self._places[final.owner], {})[final.chunk] = final.result
        return tuple(ChunkResults.of(place, results) for place, results in sorted(by_signer.items()))

    def follow(self, plan: Plan) -> None:
        """Take in what a revision has others send here, from now on. Does not block, and sends nothing yet.

        A revision older than the one that is followed changes nothing.

        Raises LocalError if it is no revision of this reduction's plan.
        """
        if plan.lineage != self.lineage or self._identity.peer_id in plan.evicted:
            raise LocalError("this plan does not revise the reduction that is under way")
        final_format = FinalFormat(plan)
        with self._lock:
            newer = (plan.view, plan.attempt) >= (self.plan.view, self.plan.attempt) and plan != self.plan
            if newer and not self._closed:
                self._follow(final_format)

    def repair(self, plan: Plan, held: Mapping[PeerId, Held]) -> None:
        """Go on by a revision, in the calling thread; `held` is what others have already, as far as is known.

        Raises LocalError as `follow` does.
        """
        self.follow(plan)
        self._go_on(self.final_format, held)

    def _go_on(self, final_format: FinalFormat, held: Mapping[PeerId, Held]) -> None:
        """Do what `final_format` asks of this node and it has not done yet."""
        self._send_contributions(final_format)
        self._send_copies(final_format, held)
        with self._lock:
            signed, owned = sorted(self._signed.items()), sorted(self._inboxes)
        for chunk, final in signed:
            self._finish(chunk, final)
        for chunk in owned:
            self._reduce_if_complete(chunk)
        with self._gate:
            self._tell_if_complete(ReduceProgress(final=final_format.plan.chunks, total=final_format.plan.chunks))

    def _tell_if_complete(self, progress: ReduceProgress) -> None:
        """Say once of every plan that all is final. The caller has passed the gate."""
        with self._lock:
            final_format, count = self.final_format, len(self._finals)
            if self._closed or count != final_format.plan.chunks or self._completed == final_format.plan.hash:
                return
            self._completed = final_format.plan.hash
        self._on_progress(progress)

    def _send_contributions(self, final_format: FinalFormat) -> None:
        if self._contribution is None or self._me not in self._contributors:
            return
        for chunk in sending_order(final_format.owners, self._me, len(self._places)):
            to = final_format.owner(chunk)
            has = (chunk, to) in self._sent and not self._dealt_anew(final_format, chunk)
            if not (has or to in self._closed_to or chunk in self._finals):
                self._sent.add((chunk, to))
                self._send(to, FrameKind.CONTRIBUTION, chunk, self._contribution.payload(chunk))

    def _dealt_anew(self, final_format: FinalFormat, chunk: int) -> bool:
        """True if `chunk` has another owner than at first: not everyone may have followed the revisions since."""
        return final_format.owners[chunk : chunk + 1] != self._first_owners[chunk : chunk + 1]

    def _send_copies(self, final_format: FinalFormat, held: Mapping[PeerId, Held]) -> None:
        """Post the finals that are to be had from here to those who did not say that they hold them.

        Not those that this node owned from the beginning: those were posted to everyone, who took them, but to those
        who had a delegate then.
        """
        me = self._identity.peer_id
        has = {peer: {c: r for part in h.chunks for c, r in part.by_chunk().items()} for peer, h in held.items()}
        with self._lock:
            finals = sorted(self._finals.items())
        for chunk, final in finals:
            owned = final_format.owners[chunk] == self._me and not self._dealt_anew(final_format, chunk)
            if final_format.source(chunk) != me:
                continue
            for to in final_format.plan.remaining:
                if owned and to not in self._delegated:
                    continue
                if to != me and to not in final_format.plan.delegates and has.get(to, {}).get(chunk) != final.result:
                    self._send(to, FrameKind.FINAL, chunk, final.payload.data)

    def _send(self, to: PeerId, kind: FrameKind, chunk: int, payload: memoryview) -> None:
        with self._gate:
            if not self._closed:
                self._post(to, kind, chunk, payload)

    # --- contributions in ---

    def contribution_region(self, sender: PeerId, chunk: int, offset: int, length: int) -> memoryview | None:
        """Return memory for `length` bytes at `offset` of `sender`'s payload; None if they are not needed (any more).

        The memory is the caller's alone until it gives it back with `contribution_received`.

        Raises RemoteError if no revision of the plan has `sender` send such bytes.
        """
        place = self._check_contribution(sender, chunk, offset, length)
        with self._lock:
            inbox = self._inbox_for(sender, place, chunk)
            if inbox is None:
                return None
            pieces = inbox.assembling.get(place)
            if pieces is None:
                size = self.final_format.contribution_bytes(chunk)
                pieces = inbox.assembling[place] = ReassemblyBuffer(size, sender, self._memory.take)
            return pieces.region(offset, length)

    def contribution_received(self, sender: PeerId, chunk: int, offset: int, region: memoryview) -> None:
        """The authenticated bytes are in `region`. Completing a chunk reduces and posts it, in this thread.

        Raises RemoteError as `contribution_region` does. A payload that was complete but wrong raises nothing: it is
        left out, and the chunk's ReduceProgress says so.
        """
        place = self._check_contribution(sender, chunk, offset, len(region))
        with self._lock:
            inbox = self._inbox_for(sender, place, chunk)
            pieces = None if inbox is None else inbox.assembling.get(place)
            if inbox is None or pieces is None:
                return
            self._count(sender, len(region))
            if not pieces.add(offset, region):
                return
            del inbox.assembling[place]
        final_format, root = self.final_format, self.plan.participants[place].root
        payload = pieces.joined()
        encoded = encoded_part(
            payload, grid=final_format.grid, codec=final_format.contributed(chunk), chunk=chunk, root=root
        )
        with self._lock:
            if place not in inbox.owing:
                return  # evicted meanwhile
            inbox.owing.remove(place)
            if encoded is None:
                inbox.excluded.append(Exclusion(sender, Reason.MISCOMMITTED))
            else:
                inbox.arrived[place], inbox.payloads[place] = encoded, payload
        self._reduce_if_complete(chunk)

    def _inbox_for(self, sender: PeerId, place: int, chunk: int) -> PendingChunk | None:
        """Return the pending chunk of a contribution that is still wanted, else None. The caller holds the lock."""
        if self._closed or sender in self._closed_to:
            return None
        inbox = self._inboxes.get(chunk)
        return inbox if inbox is not None and place in inbox.owing else None

    def _check_contribution(self, sender: PeerId, chunk: int, offset: int, length: int) -> int:
        place = self._places.get(sender)
        if place is None or place == self._me or place not in self._contributors:
            raise RemoteError("a contribution from who does not contribute", peer=sender)
        if not 0 <= chunk < self.final_format.chunks:
            raise RemoteError(f"a contribution to chunk {chunk}, which there is not", peer=sender)
        if offset < 0 or length < 1 or offset + length > self.final_format.contribution_bytes(chunk):
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
            self._summing.add(chunk)
            final_format = self.final_format
        final = self._sum(final_format, chunk, inbox)
        with self._lock:
            self._summing.remove(chunk)
            final = self._signed.setdefault(chunk, final)
        self._finish(chunk, final, tuple(inbox.excluded))

    def _sum(self, final_format: FinalFormat, chunk: int, inbox: PendingChunk) -> FinalChunk:
        """Combine the contributions that arrived, in plan order, and sign the result; zeros if none did."""
        if self._contribution is not None and self._me in self._contributors:
            inbox.arrived[self._me] = self._contribution.encoded(chunk)
        terms = [
            Term(
                place, final_format.plan.participants[place].weight, inbox.arrived[place], final_format.plan.clip(place)
            )
            for place in self._contributors
            if place in inbox.arrived
        ]
        payload, mean = final_format.draft(chunk, self._memory)
        included, undecodable = combine(final_format.contributed(chunk), terms, final_format.aggregate, mean)
        for place in undecodable:
            proof = inbox.payloads[place].tobytes() if place in inbox.payloads else b""
            inbox.excluded.append(Exclusion(final_format.plan.participants[place].peer, Reason.UNDECODABLE, proof))
        return final_format.sign(self._identity, chunk, mean, included, payload)

    def _finish(self, chunk: int, final: FinalChunk, excluded: tuple[Exclusion, ...] = ()) -> None:
        """Post the final if it is this node's own, then count it and say so; all behind the gate."""
        with self._gate:
            with self._lock:
                final_format = self.final_format
                if not self._takes(final):
                    return
            if final.owner == self._identity.peer_id:
                self._post_to_all(final_format, chunk, final)
            with self._lock:
                if not self._takes(final):  # closed off, or revised, meanwhile
                    return
                self._finals[chunk] = final
                self._finals_wanted.pop(chunk, None)
                count = len(self._finals)
            progress = ReduceProgress(chunk=chunk, final=count, total=final_format.chunks, excluded=excluded)
            if count < final_format.chunks:
                self._on_progress(progress)
            else:
                self._tell_if_complete(progress)

    def _takes(self, final: FinalChunk) -> bool:
        """True if a final that was checked is to be kept here. The caller holds the lock.

        Not if it is there already, or of an owner, or a revision, that has been replaced.
        """
        mine = final.owner == self._identity.peer_id
        refused = not mine and self.final_format.source(final.chunk) in self._closed_to
        return not (self._closed or refused or final.chunk in self._finals) and self.final_format.accepts(final)

    def _post_to_all(self, final_format: FinalFormat, chunk: int, final: FinalChunk) -> None:
        n = len(final_format.plan.participants)
        for place in ((self._me + i) % n for i in range(1, n)):
            to = final_format.plan.participants[place].peer
            if to not in self._closed_to and to not in final_format.plan.delegates:
                self._post(to, FrameKind.FINAL, chunk, final.payload.data)

    # --- finals in ---

    def final_region(self, sender: PeerId, chunk: int, offset: int, length: int) -> memoryview | None:
        """Return memory for a final's bytes, as `contribution_region` does for a contribution's."""
        self._check_final(sender, chunk, offset, length)
        with self._lock:
            pieces = self._pieces_for(sender, chunk)
            return None if pieces is None else pieces.region(offset, length)

    def final_received(self, sender: PeerId, chunk: int, offset: int, region: memoryview) -> None:
        """The authenticated bytes are in `region`. Whether a complete final is what its owner signed, `verify` says.

        Raises RemoteError if its bitmap is none of this plan, or another final of the chunk stands. Such a final is
        forgotten, and is wanted as before.
        """
        self._check_final(sender, chunk, offset, len(region))
        with self._lock:
            pieces = self._pieces_for(sender, chunk)
            if pieces is None:
                return
            self._count(sender, len(region))
            if not pieces.add(offset, region):
                return
            del self._finals_wanted[chunk]  # taken by this thread
            final_format = self.final_format
        try:
            final = final_format.read(chunk, pieces.joined())
            final.hash_now()  # it was just deciphered, and is in this core's cache
            if not final_format.accepts(final):
                raise UnsoundFinal("is not the one that stands", chunk=chunk, owner=final.owner)
        except RemoteError:
            with self._lock:
                if self.final_format is final_format and chunk not in self._finals:  # a copy may have come meanwhile
                    self._finals_wanted[chunk] = self._final_pieces(final_format, chunk)
            raise
        self._finish(chunk, final)

    def take_copy(self, final: FinalChunk) -> None:
        """A sound final of this lineage, had from whoever has it: what its owner signed is the same everywhere."""
        if final.lineage == self.lineage:
            self._finish(final.chunk, final)

    def _pieces_for(self, sender: PeerId, chunk: int) -> ReassemblyBuffer | None:
        """Return the buffer of a final that is still wanted from this sender, else None. The caller holds the lock."""
        if self._closed or sender in self._closed_to or self.final_format.source(chunk) != sender:
            return None
        return self._finals_wanted.get(chunk)

    def _final_pieces(self, final_format: FinalFormat, chunk: int) -> ReassemblyBuffer:
        return ReassemblyBuffer(final_format.payload_bytes(chunk), final_format.source(chunk), self._memory.take)

    def _check_final(self, sender: PeerId, chunk: int, offset: int, length: int) -> None:
        place = self._places.get(sender)
        if not 0 <= chunk < self.final_format.chunks or place is None or place == self._me:
            raise RemoteError(f"a final of chunk {chunk} from who takes no part", peer=sender)
        if offset < 0 or length < 1 or offset + length > self.final_format.payload_bytes(chunk):
            raise RemoteError(f"bytes {offset}+{length} lie outside final {chunk}", peer=sender)

    # --- checking what owners signed, off the critical path ---

    def verify(self, threads: int = 1, then: UseFinal | None = None) -> list[UnsoundFinal]:
        """Check all finals that are here and were not checked yet; what is unsound is forgotten, and wanted again.

        Completion is told again when all that was wanted again has come. then: called with each final that is sound,
        in the thread that checked it, while it is in the cache.
        """
        with self._lock:
            final_format, finals = self.final_format, list(self._finals.values())
        return self._verify(final_format, finals, threads, then)

    def _verify(
        self, final_format: FinalFormat, finals: Sequence[FinalChunk], threads: int = 1, then: UseFinal | None = None
    ) -> list[UnsoundFinal]:
        unsound = final_format.verify_all(finals, threads, then)
        with self._lock:
            for final, _ in unsound:
                if self._finals.get(final.chunk) is final:  # no revision has replaced it meanwhile
                    del self._finals[final.chunk]
                    self._finals_wanted[final.chunk] = self._final_pieces(self.final_format, final.chunk)
                    self._completed = b""
        return [error for _, error in unsound]

    # --- looking at it ---

    def _count(self, sender: PeerId, size: int) -> None:
        self._received[sender] = self._received.get(sender, 0) + size

    @property
    def received_bytes(self) -> dict[PeerId, int]:
        """Bytes that came from each peer and were wanted."""
        with self._lock:
            return dict(self._received)

    @property
    def wanted(self) -> frozenset[int]:
        """Chunks whose finals are to come from others, are not here, and would be taken."""
        with self._lock:
            source = self.final_format.source
            return frozenset(chunk for chunk in self._finals_wanted if source(chunk) not in self._closed_to)

    def waiting_for(self) -> Waiting:
        """The peers of whom something is still missing here; whoever has a delegate is owed nothing."""
        with self._lock:
            owing = {place for inbox in self._inboxes.values() for place in inbox.owing}
            late = set() if self.delegate else {self.final_format.source(chunk) for chunk in self._finals_wanted}
        contributions = frozenset(self.plan.participants[place].peer for place in owing)
        return Waiting(contributions=contributions, finals=frozenset(late))

    def lacking(self, peer: PeerId) -> tuple[set[int], set[int]]:
        """The chunks of which `peer`'s contribution lacks here, and those of which a final does that it is to send."""
        with self._lock:
            if peer in self._closed_to:
                return set(), set()
            place = self._places.get(peer)
            contributions = {chunk for chunk, inbox in self._inboxes.items() if place in inbox.owing}
            if self.delegate is not None:
                return contributions, set()
            return contributions, {chunk for chunk in self._finals_wanted if self.final_format.source(chunk) == peer}

    @property
    def final_chunks(self) -> int:
        """Number of chunks that are final here, of `plan.chunks`."""
        with self._lock:
            return len(self._finals)

    def final(self, chunk: int) -> FinalChunk | None:
        """The final of a chunk, if it is here."""
        return self._finals.get(chunk)

    def result(self) -> Finals:
        """All finals. Raises LocalError while one is missing."""
        with self._lock:
            if len(self._finals) != self.plan.chunks:
                raise LocalError(f"{self.plan.chunks - len(self._finals)} chunks are not final yet")
            return Finals(plan=self.plan, chunks=tuple(self._finals[chunk] for chunk in range(self.plan.chunks)))

    def close(self) -> None:
        """Post nothing and take nothing any more; idempotent. What `result` can give, it gives still."""
        with self._lock:
            self._closed = True
            self._kept.finals = self._finals
            self._inboxes.clear()
            self._finals_wanted.clear()
