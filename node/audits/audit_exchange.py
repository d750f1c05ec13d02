"""Both sides of /shoal/audit/1: asking others for evidence and owners' statements, and answering them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from shoal.collectives.finals import Finals
from shoal.node.audits.evidence_store import EvidenceStore
from shoal.protocol.audit_messages import (
    AUDIT_PROTOCOL,
    CHARGES_LIMIT,
    COMMITMENTS_LIMIT,
    PART_LIMIT_BYTES,
    STATEMENTS_LIMIT,
    AuditAnswer,
    AuditRequest,
    Charge,
    Commitments,
    EvidenceHeld,
    GetCommitments,
    GetEvidence,
    GetStatements,
    Part,
    Stated,
    StatementsPart,
)
from shoal.protocol.commitments import Commitment
from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.evidence import EVIDENCE_LIMIT_BYTES
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import ChunkStatement, Plan
from shoal.protocol.peering import Refusal
from shoal.protocol.wire import canonical, decode
from shoal.swarm.host import Host
from shoal.swarm.streams import MessageStream

REQUEST_DEADLINE_S = 20.0
WHOLE_DEADLINE_S = 120.0
"""For all parts of one thing together."""
REQUEST_LIMIT_BYTES = 64 << 10
ANSWER_LIMIT_BYTES = 1 << 20
ANSWERS_LIMIT = 4
"""Requests that are answered at once; who comes later waits, and is refused after REQUEST_DEADLINE_S."""


class AuditClient:
    """Asks other nodes. What it is given is not believed here: its caller checks it."""

    def __init__(self, host: Host) -> None:
        self._host = host

    async def _ask(self, peer: PeerId, request: AuditRequest) -> AuditAnswer:
        data = await self._host.request(
            peer,
            AUDIT_PROTOCOL,
            canonical(request),
            deadline_s=REQUEST_DEADLINE_S,
            limit_bytes=ANSWER_LIMIT_BYTES,
        )
        answer: AuditAnswer = decode(data, AuditAnswer, peer=peer)  # type: ignore[arg-type]
        if isinstance(answer, Refusal):
            raise NetworkError(f"{peer} does not give it: {answer.reason}")
        return answer

    async def charges(self, peer: PeerId, mine: Sequence[Charge]) -> tuple[Charge, ...]:
        """Exchange with a peer the charges that each holds evidence for. Raises NetworkError, RemoteError."""
        answer = await self._ask(peer, EvidenceHeld(charges=tuple(mine[-CHARGES_LIMIT:])))
        return answer.charges if isinstance(answer, EvidenceHeld) else ()

    async def evidence(self, peer: PeerId, digest: bytes) -> bytes:
        """The bytes that a peer has under that digest. Raises NetworkError, RemoteError."""
        return await self._whole(
            peer, lambda offset: GetEvidence(digest=digest, offset=offset), limit=EVIDENCE_LIMIT_BYTES
        )

    async def commitments(self, peer: PeerId, base: bytes) -> tuple[Commitment, ...]:
        """Fetch the commitments a peer heard in the round after that value. Raises NetworkError, RemoteError."""
        answer = await self._ask(peer, GetCommitments(base=base))
        return answer.commitments if isinstance(answer, Commitments) else ()

    async def _whole(self, peer: PeerId, request: Callable[[int], AuditRequest], *, limit: int) -> bytes:
        deadline, data = trio.current_time() + WHOLE_DEADLINE_S, bytearray()
        while trio.current_time() < deadline:
            part = await self._ask(peer, request(len(data)))
            if not isinstance(part, Part) or part.total > limit or len(data) + len(part.data) > part.total:
                raise RemoteError("answers with something else than what was asked for", peer=peer)
            data += part.data
            if len(data) == part.total:
                return bytes(data)
            if not part.data:
                raise RemoteError("answers with nothing", peer=peer)
        raise NetworkError(f"{peer} did not give it within {WHOLE_DEADLINE_S:g} s")

    async def statements(self, peer: PeerId, plan: Plan) -> list[ChunkStatement]:
        """Fetch a peer's statements of the owners about all chunks. Raises NetworkError, RemoteError."""
        found: list[ChunkStatement] = []
        while len(found) < plan.chunks:
            answer = await self._ask(peer, GetStatements(plan=plan.hash, first=len(found)))
            if not isinstance(answer, StatementsPart) or not answer.statements:
                raise RemoteError("answers with something else than statements", peer=peer)
            for stated in answer.statements:
                if stated.owner >= len(plan.participants):
                    raise RemoteError("statements of who takes no part", peer=peer)
                found.append(
                    ChunkStatement(
                        plan=plan.lineage,
                        chunk=len(found),
                        bitmap=stated.bitmap,
                        result=stated.result,
                        owner=plan.participants[stated.owner].peer,
                        signature=stated.signature,
                    )
                )
        return found[: plan.chunks]


class AuditServer:
    """Answers other nodes.

    finals: those of a plan, if they are here. commitments: what was heard in the round after the value with that hash.
    """

    def __init__(
        self,
        evidence_store: EvidenceStore,
        finals: Callable[[bytes], Finals | None],
        commitments: Callable[[bytes], Sequence[Commitment]],
        linked: Callable[[], frozenset[PeerId]],
    ) -> None:
        self._evidence_store = evidence_store
        self._finals = finals
        self._commitments = commitments
        self._linked = linked
        self._room = trio.Semaphore(ANSWERS_LIMIT)
        self.charged: Callable[[PeerId, Sequence[Charge]], None] = lambda peer, charges: None
        """Called with what a peer says that it holds."""

    async def serve(self, stream: MessageStream) -> None:
        """Answer one request. Raises RemoteError when it is malformed, or from a peer that was not admitted."""
        if stream.peer not in self._linked():
            raise RemoteError("wants something without having been admitted", peer=stream.peer)
        data = await stream.receive(deadline_s=REQUEST_DEADLINE_S)
        if len(data) > REQUEST_LIMIT_BYTES:
            raise RemoteError(f"a request of {len(data)} bytes", peer=stream.peer)
        request: AuditRequest = decode(data, AuditRequest, peer=stream.peer)  # type: ignore[arg-type]
        async with self._room:
            if isinstance(request, GetCommitments):  # it is of what the engine's task changes
                answer = self.answer(request)
            else:
                answer = await trio.to_thread.run_sync(self.answer, request)
            await stream.send(canonical(answer), deadline_s=REQUEST_DEADLINE_S)
        if isinstance(request, EvidenceHeld):
            self.charged(stream.peer, request.charges)
        await stream.aclose()

    def answer(self, request: AuditRequest) -> AuditAnswer:
        """Return this node's answer to a request. Blocks for evidence. Raises StorageError."""
        if isinstance(request, EvidenceHeld):
            return EvidenceHeld(charges=self.charges())
        if isinstance(request, GetCommitments):
            return Commitments(commitments=tuple(self._commitments(request.base))[:COMMITMENTS_LIMIT])
        if isinstance(request, GetStatements):
            finals = self._finals(request.plan)
            return Refusal(reason="not held here") if finals is None else _statements(finals, request.first)
        part = self._evidence_store.part(request.digest, request.offset, PART_LIMIT_BYTES)
        return Refusal(reason="not held here") if part is None else Part(total=part[0], data=part[1])

    def charges(self) -> tuple[Charge, ...]:
        """Charges proven by the evidence that this node holds, the newest last."""
        verdicts = sorted(self._evidence_store.verdicts, key=lambda one: (one.done, one.digest))
        return tuple(Charge(one.digest, one.accused, *one.done) for one in verdicts)[-CHARGES_LIMIT:]


def _statements(finals: Finals, first: int) -> StatementsPart | Refusal:
    places = {participant.peer: place for place, participant in enumerate(finals.plan.participants)}
    some = finals.chunks[first : first + STATEMENTS_LIMIT]
    return StatementsPart(
        statements=tuple(Stated(places[one.owner], one.bitmap, one.result, one.signature) for one in some)
    )
