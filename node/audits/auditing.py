"""Audits: a node recomputes some of what others signed, keeps what proves a lie, and tells every peer.

    certified round ──► a few chunks are drawn ──► their contributions, from who made them ──► the owner's sum again
    messages, reports, exclusions ──► contradictions                                             │ is it what it signed?
                                        └──────────► evidence, verified, on disk ◄───────────────┘
                                                        │ told to all neighbours; they fetch, verify, tell theirs
                                                        └► the round machine: no plan with the accused, and a ban

Nothing of it holds a round up: it is done beside, one chunk after the other, in the pauses between reductions, and
after each this node rests so long that audits take no more than the manifest's share of its time and of its downlink.
What is found here waits for no peer. A few peers are asked at once, each one thing at a time: members first, and last
those that did not answer. A disk that takes no evidence ends nothing: the user is told, and rounds go on.
What is drawn and not done when AUDITS_LIMIT rounds wait is dropped. Contributions of the last CONTRIBUTIONS_KEPT rounds
are held to be shown to other auditors, who get the same share of its uplink; that of the round under way is not shown
to anybody, for who has not committed yet could copy it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import trio

from shoal.collectives.codecs import U8, chunk_codec
from shoal.collectives.commitment import bitmap_indices
from shoal.collectives.contribution import EncodedContribution, payload_bytes
from shoal.collectives.finals import FinalChunk, Finals
from shoal.collectives.grid import Grid
from shoal.collectives.progress import Exclusion, Reason
from shoal.collectives.proofs import is_unsound, is_wrong, proves_itself, top_in
from shoal.node.audits.audit_exchange import WHOLE_DEADLINE_S, AuditClient, AuditServer, Job, Questions
from shoal.node.audits.audit_lanes import ContributionFetch, ContributionServer, Pause, Wanted
from shoal.node.audits.evidence_store import EvidenceStore
from shoal.node.audits.work_audit import WorkAudit
from shoal.node.outcome import Notice
from shoal.node.parts import Parts
from shoal.node.reporting import events
from shoal.node.rounds.engine import Engine
from shoal.node.rounds.round_observer import RoundObserver
from shoal.node.state.contributions import Made
from shoal.protocol.audit_messages import AUDIT_PROTOCOL, Charge
from shoal.protocol.auditing import affordable, beacon, drawn, ticket
from shoal.protocol.backoff import Backoff
from shoal.protocol.bans import named
from shoal.protocol.chain import Chain
from shoal.protocol.commitments import Commitment, seal_of
from shoal.protocol.errors import LocalError, NetworkError, RemoteError, StorageError
from shoal.protocol.evidence import Evidence, Verdict, WrongSum, describe, fits, pack, unpack
from shoal.protocol.identity import PeerId
from shoal.protocol.inputs import Proven
from shoal.protocol.messages import Certificate, Message, Plan, Report, Value
from shoal.protocol.planning import RoundSettings, split_codec
from shoal.protocol.suspicion import FALSE_EVIDENCE, MISCOMMITTED, UNANSWERED, USELESS, Suspicion
from shoal.protocol.witness import Witness
from shoal.swarm.members import Change

AUDITS_LIMIT = 2
"""Rounds whose audits wait."""
JOBS_LIMIT = 256
CONTRIBUTIONS_KEPT = 3
CONTRIBUTIONS_LIMIT_BYTES = 1 << 30
"""Of the last rounds' contributions together; the newest is held whatever it takes."""
FINALS_KEPT = 2
UNKNOWN_BYTES_PER_S = 1 << 24
"""An uplink's or downlink's rate, of which audits take their share, before a reduction measured it."""
NEED_RETRY_S, NEED_RETRY_LIMIT_S = 0.5, 16.0
"""Between two goes at evidence that a proposed value names, at first and at most: there may be no room for it here."""
NEED_LIMIT_S = 60.0
"""Time for which evidence is looked for that a proposed value names; with the next proposal it is looked for again."""
ASKED_AT_ONCE = 3
ASKED_S = 15.0
"""Of one peer, for evidence that a value names; others are asked meanwhile, and then."""
UNANSWERED_MOST = FALSE_EVIDENCE / 2
"""To which questions that were not answered add up at most: whoever is slow has given no false evidence."""

logger = logging.getLogger(__name__)


class Auditing(RoundObserver):
    """Audits of one node over its rounds: a service of the node, which its engine tells of them."""

    def __init__(self, parts: Parts, engine: Engine) -> None:
        self._p = parts
        self._engine = engine
        self._settings = parts.config.manifest.audits
        self._me = parts.identity.peer_id
        self._links = parts.links
        self._witness = Witness()
        self.suspicion = Suspicion()
        self.evidence_store = EvidenceStore(parts.store.folder, parts.swarm_id, first=parts.chain.was_member)
        self._client = AuditClient(parts.host, self._unanswered)
        self._server = AuditServer(
            self.evidence_store,
            self._finals_of,
            self._witness.commitments,
            lambda: self._links.linked(),
            self._is_member,
        )
        self._server.charged = self._charged
        self._pause = Pause()
        self._shown = ContributionServer(
            parts.chunks, self._pause, held=self._held, rate=lambda: self._settings.share * self._rates()[0]
        )
        self._fetch_lanes = ContributionFetch(parts.lanes, parts.chunks, self._pause)
        self._made: dict[bytes, tuple[bytes, EncodedContribution]] = {}  # base and bytes by root, the oldest first
        self._finals: dict[bytes, tuple[Finals, Report]] = {}  # by plan, the oldest first
        self._jobs, self._job_queue = trio.open_memory_channel[Job](JOBS_LIMIT)
        self._audits, self._audit_queue = trio.open_memory_channel[Job](AUDITS_LIMIT)
        self._needs, self._need_queue = trio.open_memory_channel[Job](1)
        self._work_audit = WorkAudit(parts, self._sound_chunks, self._found_useless)
        self._weighings, self._weighing_queue = trio.open_memory_channel[Job](1)
        self._questions = Questions(self._rank)
        self._exchanging: set[PeerId] = set()  # charges wait to be exchanged: once, whatever is news till then
        self._shapes: dict[int, tuple[int, int]] = {}  # by fragment: values, and chunks of buffers
        self._disk_is_told = False
        self._compared: set[tuple[bytes, PeerId]] = set()
        self._settling: set[PeerId] = set()  # whose plans are in dispute: one question to each at a time
        self._token: trio.lowlevel.TrioToken | None = None

    # -- the service -----------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take up what is on disk, answer others, and audit until cancelled. Raises StorageError at its start."""
        self._token = trio.lowlevel.current_trio_token()
        await trio.to_thread.run_sync(self.evidence_store.load)
        self._p.host.serve(AUDIT_PROTOCOL, self._server.serve)
        async with trio.open_nursery() as nursery:
            for queue in (self._job_queue, self._audit_queue, self._need_queue, self._weighing_queue):
                nursery.start_soon(self._work, queue)
            for _ in range(ASKED_AT_ONCE):
                nursery.start_soon(self._questions.ask, self._attempt)
            nursery.start_soon(self._shown.run)
            task_status.started()

    def heard(self, change: Change) -> None:
        """Exchange charges with a peer that has just come; ask nothing of one that has gone."""
        if change.kind == "linked":
            self._exchange_with(change.peer)
        elif change.kind == "lost":
            self._exchanging.discard(change.peer)
            self._questions.forget(change.peer)

    async def _work(self, queue: trio.MemoryReceiveChannel[Job]) -> None:
        async for job in queue:
            await self._attempt(job)

    async def _attempt(self, job: Job) -> bool:
        """Do a job; False if the disk did not let it be done."""
        try:
            await job()
        except (NetworkError, RemoteError) as error:
            logger.info("%s", error)
        except StorageError as error:
            logger.info("%s", error)
            if not self._disk_is_told:
                self._disk_is_told = True
                self._p.on_progress(Notice(text=f"audits and evidence are left out: {error}"))
            return False
        return True

    def _is_member(self, peer: PeerId) -> bool:
        return peer in self._p.chain.voting.everyone(self._p.chain.head)

    def _rank(self, peer: PeerId) -> tuple[bool, float]:
        """Order in which peers are asked. No PeerId comes first: keys are made until one does."""
        return not self._is_member(peer), self.suspicion.of(peer, trio.current_time())

    def _unanswered(self, peer: PeerId) -> None:
        now = trio.current_time()
        self.suspicion.add(peer, UNANSWERED, now, most=max(UNANSWERED_MOST, self.suspicion.of(peer, now)))

    def _do(self, job: Job, queue: trio.MemorySendChannel[Job] | None = None) -> None:
        try:
            (queue or self._jobs).send_nowait(job)
        except trio.WouldBlock:
            logger.debug("too much to audit at once: something is left out")

    # -- what the engine tells -------------------------------------------------------------------------------

    def began(self, base: Value, settings: RoundSettings) -> None:
        """Note that the round after `base` begins."""
        self._witness.begin(base, settings, voting=self._p.chain.voting)
        self._shapes[self._fragment(base)] = settings.numel, split_codec(settings.codec)[1]
        self._compared.clear()
        self._settling.clear()
        self._pause.begin()

    def said(self, peer: PeerId, message: Message) -> None:
        """Check a round message, signed by `peer`, for evidence."""
        for evidence in self._witness.hear(peer, message):
            self._charge(evidence)
        if isinstance(message, Report):
            self._compare_with(peer, message)
        elif isinstance(message, Plan) and message.planner == peer:
            self._settle_with(peer, message)

    def planned(self, plan: Plan) -> None:
        """Note the plan that is followed here."""
        self._witness.hear(plan.planner, plan)
        self._pause.end()

    def contributed(self, made: Made) -> None:
        """Note this node's contribution, which is announced; it is shown from the next round on."""
        self._made[made.encoded.root] = made.base, made.encoded
        kept = list(self._made.items())
        while len(kept) > 1 and (
            len(kept) > CONTRIBUTIONS_KEPT or sum(one.buffer.nbytes for _, (_, one) in kept) > CONTRIBUTIONS_LIMIT_BYTES
        ):
            del self._made[kept.pop(0)[0]]

    def reduced(self, finals: Finals, report: Report) -> None:
        """Note the finals of a plan, which are here, and the `report` they lead to."""
        self._finals[finals.plan.hash] = finals, report
        while len(self._finals) > FINALS_KEPT:
            del self._finals[next(iter(self._finals))]

    def certified(self, certificate: Certificate) -> None:
        """Note that a round that was under way here is decided."""
        value = certificate.value
        self._pause.begin()
        for evidence in self._witness.hear(self._me, certificate):
            self._charge(evidence)
        finals, report = self._finals.get(value.plan, (None, None))
        if finals is not None and report is not None and report.digest == value.digest:
            self._do(partial(self._audit, value, finals), self._audits)
        elif finals is not None:
            for peer in sorted(self._links.linked().intersection(value.members)):
                self._questions.put(peer, partial(self._compare, finals, peer))

    def need(self, value: Value) -> None:
        """Look for the evidence of a proposed value's bans that is not here."""
        self._do(partial(self._find, value), self._needs)

    def proven(self, chain: Chain) -> Mapping[bytes, PeerId]:
        """The accused by the digest of evidence that is here and that no ban of `chain` covers."""
        return {
            one.digest: one.accused
            for one in self.evidence_store.verdicts
            if one.accused != self._me and not chain.bans.covers(one.accused, one.done)
        }

    # -- what is shown to others -----------------------------------------------------------------------------

    def contribution(self, root: bytes, chunk: int) -> memoryview | None:
        """The payload of a chunk in this node's contribution with that root, if it is of a past round."""
        base, encoded = self._made.get(root, (b"", None))
        if encoded is None or base == self._p.chain.head.hash or not 0 <= chunk < encoded.grid.chunks:
            return None
        return encoded.payload(chunk)

    def _held(self, scope: bytes, chunk: int) -> memoryview | None:
        root = next((root for root in self._made if root.startswith(scope)), None)
        return None if root is None else self.contribution(root, chunk)

    def _rates(self) -> tuple[float, float]:
        """Bytes per second up and down: as the last reductions measured, under the user's caps."""
        up, down = map(_lowest, self._p.lanes.caps, self._p.reduce.rates)
        return up, down

    def _finals_of(self, plan_hash: bytes) -> Finals | None:
        found = self._finals.get(plan_hash)
        return None if found is None else found[0]

    # -- evidence --------------------------------------------------------------------------------------------

    def _charge(self, evidence: Evidence, attachment: bytes = b"") -> None:
        if evidence.accused != self._me:
            self._do(partial(self._make, evidence, attachment))

    async def _make(self, evidence: Evidence, attachment: bytes) -> None:
        """Keep what was found here; what was said in forged signatures alone proves nothing, and is forgotten."""
        if not self.evidence_store.has(evidence.accused, evidence.done):
            await self._keep(await trio.to_thread.run_sync(pack, evidence, attachment))

    async def _keep(self, data: bytes, *, by_name: bool = False) -> None:
        """Verify and keep a piece of evidence; if it is news, tell the engine and the neighbours.

        Raises RemoteError if it proves nothing, NetworkError if it is nothing to this swarm, StorageError.
        """
        evidence, _ = unpack(data)
        accused, chain = evidence.accused, self._p.chain
        # Anybody can have keys convicted that take no part, or in a round that there never was.
        takes_part = accused == self._me or chain.was_member(accused) or accused in self._links.linked()
        if not (chain.knows(evidence.base.hash) and (by_name or (takes_part and self._fits(evidence)))):
            raise NetworkError(f"evidence against {accused} about a peer, a round or vectors that are not known here")
        verdict = await trio.to_thread.run_sync(partial(self.evidence_store.put, data, named=by_name))
        if verdict is None:
            return
        self._tell(verdict)
        for peer in sorted(self._links.linked()):
            self._exchange_with(peer)

    def _fits(self, evidence: Evidence) -> bool:
        manifest = self._p.chain.amended(evidence.base.next_round) or self._p.config.manifest
        return fits(evidence, manifest, self._shapes.get(self._fragment(evidence.base)))

    def _fragment(self, base: Value) -> int:
        """Number of the fragment that the round after `base` is of."""
        return base.next_round % self._p.config.manifest.sync.fragments

    def _tell(self, verdict: Verdict) -> None:
        _, round = verdict.done
        what = describe(verdict.kind)
        self._p.events.write(
            events.Evidence(peer=verdict.accused, kind=verdict.kind, round=round, digest=verdict.digest.hex())
        )
        self._p.on_progress(Notice(text=f"{verdict.accused} is proven to have lied in round {round}: {what}"))
        if verdict.accused != self._me and not self._p.chain.bans.covers(verdict.accused, verdict.done):
            self._engine.put(Proven(verdict.digest, verdict.accused))

    def _exchange_with(self, peer: PeerId) -> None:
        if peer not in self._exchanging and self._questions.put(peer, partial(self._exchange, peer)):
            self._exchanging.add(peer)

    async def _exchange(self, peer: PeerId) -> None:
        """Tell a peer what is here, and fetch what it has and this node has not."""
        self._exchanging.discard(peer)
        self._charged(peer, await self._client.charges(peer, self._server.charges()))

    def _charged(self, peer: PeerId, charges: Sequence[Charge]) -> None:
        for charge in charges:
            if not self.evidence_store.has(charge.peer, (charge.term, charge.round)):
                self._questions.put(peer, partial(self._pull, peer, charge))

    async def _pull(self, peer: PeerId, charge: Charge) -> None:
        if not self.evidence_store.has(charge.peer, (charge.term, charge.round)):
            await self._fetch(peer, charge.digest)

    async def _fetch(self, peer: PeerId, digest: bytes, *, by_name: bool = False) -> None:
        """Fetch a piece of evidence. Raises NetworkError, RemoteError if what comes proves nothing, StorageError."""
        if self.suspicion.of(peer, trio.current_time()) >= FALSE_EVIDENCE:
            raise NetworkError(f"{peer} gave evidence before that proved nothing")
        data = await self._client.evidence(peer, digest, deadline_s=ASKED_S if by_name else WHOLE_DEADLINE_S)
        try:
            await self._keep(data, by_name=by_name)
        except RemoteError:
            self.suspicion.add(peer, FALSE_EVIDENCE, trio.current_time())
            raise

    async def _find(self, value: Value) -> None:
        """Fetch what the bans of `value` rest on, from whoever has it."""
        rests = Backoff(NEED_RETRY_S, NEED_RETRY_LIMIT_S)
        with trio.move_on_after(NEED_LIMIT_S):
            while self._p.chain.head.hash == value.base:
                lacking = [ban.evidence for ban in named(value) if self.evidence_store.proves(ban.evidence) is None]
                if not lacking:
                    return
                for digest in lacking:
                    await self._fetch_from_any(digest)
                await trio.sleep(rests.next_s())

    async def _fetch_from_any(self, digest: bytes) -> None:
        """Fetch a piece from who gives it first: ASKED_AT_ONCE peers are asked, each for ASKED_S, then others."""
        peers = iter(sorted(self._links.linked(), key=self._rank))
        async with trio.open_nursery() as nursery:
            for _ in range(ASKED_AT_ONCE):
                nursery.start_soon(self._fetch_in_turn, peers, digest, nursery.cancel_scope)

    async def _fetch_in_turn(self, peers: Iterator[PeerId], digest: bytes, all_asked: trio.CancelScope) -> None:
        for peer in peers:
            has_room = await self._attempt(partial(self._fetch, peer, digest, by_name=True))
            if not has_room or self.evidence_store.proves(digest) is not None:
                all_asked.cancel()
                return

    # -- contributions that were left out --------------------------------------------------------------------

    def excluded(self, plan: Plan, chunk: int, exclusion: Exclusion) -> None:
        """Note, in a thread of the reduction, that an owner's chunk is made without somebody."""
        if self._token is not None:
            self._token.run_sync_soon(self._note_exclusion, plan, chunk, exclusion)

    def _note_exclusion(self, plan: Plan, chunk: int, exclusion: Exclusion) -> None:
        if exclusion.reason is Reason.MISCOMMITTED:
            self.suspicion.add(exclusion.peer, MISCOMMITTED, trio.current_time())
        elif exclusion.payload:
            commitment = self._commitment(plan, exclusion.peer)
            charge = None if commitment is None else self._witness.unsound(commitment, chunk)
            if charge is not None:
                self._charge(charge, exclusion.payload)

    def _commitment(self, plan: Plan, peer: PeerId) -> Commitment | None:
        place = plan.number(peer)
        root = b"" if place is None else plan.participants[place].root
        return self._witness.commitment(plan.base, peer, root)

    # -- statements that differ ------------------------------------------------------------------------------

    def _compare_with(self, peer: PeerId, report: Report) -> None:
        """Compare finals with a peer that came to something else from the same plan: some chunk's differs."""
        finals, mine = self._finals.get(report.plan, (None, None))
        if finals is None or mine is None or (mine.digest, mine.bitmaps) == (report.digest, report.bitmaps):
            return
        if (report.plan, peer) not in self._compared:
            self._compared.add((report.plan, peer))
            self._questions.put(peer, partial(self._compare, finals, peer))

    async def _compare(self, finals: Finals, peer: PeerId) -> None:
        theirs = await self._client.statements(peer, finals.plan)
        mine = [final.statement for final in finals.chunks]
        for evidence in self._witness.compare(finals.plan, mine, theirs):
            self._charge(evidence)

    def _settle_with(self, peer: PeerId, plan: Plan) -> None:
        if peer not in self._settling and self._witness.disputes(plan):
            self._settling.add(peer)
            self._questions.put(peer, partial(self._settle_dispute, plan))

    async def _settle_dispute(self, plan: Plan) -> None:
        """Find out whether a contributor told the planner of a plan with wrong clips something else."""
        try:
            theirs = await self._client.commitments(plan.planner, plan.base)
        finally:
            self._settling.discard(plan.planner)
        for evidence in self._witness.hear_commitments(plan.base, theirs):
            self._charge(evidence)

    # -- sums ------------------------------------------------------------------------------------------------

    async def _audit(self, value: Value, finals: Finals) -> None:
        """Recompute the chunks that this node draws in a certified round."""
        plan = self._witness.origin(finals.plan)
        if plan is None or self._p.chain.head.round - value.round >= CONTRIBUTIONS_KEPT:
            return
        await self._look_for_copies(plan)
        stated = [(final.result, final.bitmap) for final in finals.chunks]
        mark = ticket(self._p.identity, beacon(value.hash, stated))
        base = self._witness.base(plan.base)
        weighing = None if base is None else self._work_audit.drawn(base, plan, mark)
        if weighing is not None:
            self._do(partial(self._work_audit.weigh, weighing), self._weighings)
        done = 0
        limit, share = self._settings.chunks, self._settings.share
        wanted = affordable(len(stated), len(plan.contributors()), limit=limit, share=share)
        for chunk in drawn(mark, len(stated), wanted):
            took_s = await self._audit_chunk(plan, finals.chunks[chunk])
            done += took_s is not None
            await trio.sleep((took_s or 0.0) * (1 / self._settings.share - 1))
        self._p.events.write(events.Audited(round=value.round, chunks=done))

    async def _audit_chunk(self, plan: Plan, final: FinalChunk) -> float | None:
        """Recompute an owner's sum, and keep what that proves. None if it cannot be recomputed.

        Returns for how long, in seconds, it kept this node or its downlink busy.
        """
        if final.owner == self._me:
            return None
        wanted = {place: self._wanted(plan, place, final.chunk) for place in self._places(plan, final)}
        shown = await self._show(list(wanted.values()))
        payloads: dict[int, U8] = {}
        began = trio.current_time()
        for place, one in wanted.items():
            payload = await self._sound(plan, place, final.chunk, shown.get(one))
            if payload is None:
                return None
            payloads[place] = payload
        base, statement = self._witness.base(plan.base), final.statement
        if base is not None and await trio.to_thread.run_sync(is_wrong, plan, statement, payloads):
            attachment = b"".join(payloads[place].tobytes() for place in sorted(payloads))
            self._charge(WrongSum(base=base, plan=plan, statement=statement), attachment)
        moved = sum(one.size for one in wanted.values() if one.peer != self._me)
        return trio.current_time() - began + moved / self._rates()[1]

    @staticmethod
    def _places(plan: Plan, final: FinalChunk) -> tuple[int, ...]:
        """Numbers of the participants whose contributions are in a chunk."""
        return bitmap_indices(final.bitmap, len(plan.participants))

    @staticmethod
    def _wanted(plan: Plan, place: int, chunk: int) -> Wanted:
        participant = plan.participants[place]
        grid = Grid.of(plan)
        size = payload_bytes(grid, chunk_codec(plan.codec, grid, chunk), chunk)
        return Wanted(participant.peer, participant.root, chunk, size)

    async def _show(self, wanted: Sequence[Wanted]) -> dict[Wanted, bytes]:
        """The payloads that are shown; it is held against a peer that it shows none. Raises NetworkError."""
        mine = {one: self.contribution(one.root, one.chunk) for one in wanted if one.peer == self._me}
        shown = await self._fetch_lanes.payloads([one for one in wanted if one.peer != self._me])
        shown |= {one: bytes(held) for one, held in mine.items() if held is not None}
        for one in wanted:
            if one not in shown and one.peer != self._me:
                logger.info("%s does not show chunk %d of its contribution", one.peer, one.chunk)
                self._unanswered(one.peer)
        return shown

    async def _sound(self, plan: Plan, place: int, chunk: int, data: bytes | None) -> U8 | None:
        """Return a participant's payload, charged if unsound; None, held against it, unless the plan's root commits to
        it.
        """
        if data is None:
            return None
        payload = np.frombuffer(data, np.uint8)
        if await trio.to_thread.run_sync(proves_itself, plan, place, chunk, payload) is None:
            self._unanswered(plan.participants[place].peer)
            return None
        await self._look_at(plan, place, chunk, payload)
        return payload

    async def _sound_chunks(self, plan: Plan, place: int, chunks: Sequence[int]) -> dict[int, U8]:
        """Payloads of one participant, those that are shown and are what it committed to."""
        shown = await self._show([self._wanted(plan, place, chunk) for chunk in chunks])
        payloads = {one.chunk: await self._sound(plan, place, one.chunk, data) for one, data in sorted(shown.items())}
        return {chunk: payload for chunk, payload in payloads.items() if payload is not None}

    def _found_useless(self, peer: PeerId) -> None:
        self.suspicion.add(peer, USELESS, trio.current_time())

    async def _look_at(self, plan: Plan, place: int, chunk: int, payload: U8) -> None:
        """Charge a contributor whose payload is not what it signed about it."""
        commitment = self._commitment(plan, plan.participants[place].peer)
        if commitment is None:
            return
        squares = self._witness.squares(commitment)
        if await trio.to_thread.run_sync(is_unsound, commitment, chunk, payload, squares):
            charge = self._witness.unsound(commitment, chunk)
            if charge is not None:
                self._charge(charge, payload.tobytes())
        self._check_seal(commitment, top_in(commitment, chunk, payload))

    async def _look_for_copies(self, plan: Plan) -> None:
        """Find the participants that committed to another's root and did not know what is under it."""
        for root, commitments in self._witness.alike(plan.base).items():
            for one in commitments:
                top = await self._top_of(one, root)
                if top is not None:
                    for other in commitments:
                        self._check_seal(other, top)
                    break

    async def _top_of(self, commitment: Commitment, root: bytes) -> bytes | None:
        """Return the hash under a root, from a contributor that committed to it, if it shows anything of it."""
        try:
            grid = Grid(commitment.numel, commitment.chunk_values)
            size = payload_bytes(grid, chunk_codec(commitment.codec, grid, 0), 0)
        except LocalError as error:
            logger.info("%s", error)
            return None
        wanted = Wanted(commitment.peer, root, 0, size)
        data = (await self._show([wanted])).get(wanted)
        return None if data is None else top_in(commitment, 0, np.frombuffer(data, np.uint8))

    def _check_seal(self, commitment: Commitment, top: bytes | None) -> None:
        charge = None if top is None else self._witness.copied(commitment, top)
        if charge is not None and top is not None and seal_of(top, commitment.peer) != commitment.seal:
            self._charge(charge)


def _lowest(cap: int | None, measured: int) -> float:
    return min((rate for rate in (cap, measured) if rate), default=UNKNOWN_BYTES_PER_S)
