"""Both sides of /shoal/audit/1: asking others for evidence and owners' statements, and answering them."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakValueDictionary

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
"""Requests of members that are answered at once, and as many of others; all are over after REQUEST_DEADLINE_S."""
ANSWERS_PER_PEER_LIMIT = 1
PENDING_LIMIT = CHARGES_LIMIT + 16
"""Questions to one peer that wait: about all that it says at once, and a few more."""

Job = Callable[[], Awaitable[None]]


class NotHeld(NetworkError):
    """A peer answers that it has not what it was asked for."""


class Questions:
    """Questions that wait: one peer is asked one at a time, and no more than PENDING_LIMIT wait for it.

    rank: peers of a lower one are asked first, and among equals whoever was not asked for longest.
    """

    def __init__(self, rank: Callable[[PeerId], tuple[bool, float]]) -> None:
        self._rank = rank
        self._pending: dict[PeerId, deque[Job]] = {}  # whoever was asked last is last
        self._asked: set[PeerId] = set()
        self._askers = trio.lowlevel.ParkingLot()

    def __len__(self) -> int:
        return sum(map(len, self._pending.values()))

    def put(self, peer: PeerId, job: Job) -> bool:
        """Have a peer asked; False, and it is not, where too much waits for that peer."""
        pending = self._pending.setdefault(peer, deque())
        if len(pending) >= PENDING_LIMIT:
            return False
        pending.append(job)
        self._askers.unpark()
        return True

    def forget(self, peer: PeerId) -> None:
        """Ask a peer nothing of what waits."""
        self._pending.pop(peer, None)

    async def ask(self, attempt: Callable[[Job], Awaitable[object]]) -> None:
        """Ask one question after the other, until cancelled; each of several tasks asks another peer."""
        while True:
            free = [peer for peer in self._pending if peer not in self._asked]
            if not free:
                await self._askers.park()
                continue
            peer = min(free, key=self._rank)
            pending = self._pending.pop(peer)
            job = pending.popleft()
            if pending:
                self._pending[peer] = pending
            self._asked.add(peer)
            try:
                await attempt(job)
            finally:
                self._asked.discard(peer)


class AuditClient:
    """Asks other nodes. What it is given is not believed here: its caller checks it.

    unanswered: called with who gave no answer, or too little in too long a time; not with who has nothing to give.
    """

    def __init__(self, host: Host, unanswered: Callable[[PeerId], None] = lambda peer: None) -> None:
        self._host = host
        self._unanswered = unanswered

    @contextmanager
    def _asking(self, peer: PeerId, deadline_s: float) -> Iterator[None]:
        """Hold a whole exchange to its deadline, and a failure against the peer. Raises NetworkError."""
        try:
            with trio.fail_after(deadline_s):
                yield
        except NotHeld:
            raise
        except trio.TooSlowError:
            self._unanswered(peer)
            raise NetworkError(f"{peer} did not give it within {deadline_s:g} s") from None
        except (NetworkError, RemoteError):
            self._unanswered(peer)
            raise

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
            raise NotHeld(f"{peer} does not give it: {answer.reason}")
        return answer

    async def charges(self, peer: PeerId, mine: Sequence[Charge]) -> tuple[Charge, ...]:
        """Exchange with a peer the charges that each holds evidence for. Raises NetworkError, RemoteError."""
        with self._asking(peer, REQUEST_DEADLINE_S):
            answer = await self._ask(peer, EvidenceHeld(charges=tuple(mine[-CHARGES_LIMIT:])))
        return answer.charges if isinstance(answer, EvidenceHeld) else ()

    async def evidence(self, peer: PeerId, digest: bytes, *, deadline_s: float = WHOLE_DEADLINE_S) -> bytes:
        """The bytes that a peer has under that digest. Raises NetworkError, RemoteError."""
        data = bytearray()
        with self._asking(peer, deadline_s):
            while True:
                part = await self._ask(peer, GetEvidence(digest=digest, offset=len(data)))
                if not isinstance(part, Part) or part.total > EVIDENCE_LIMIT_BYTES:
                    raise RemoteError("answers with something else than what was asked for", peer=peer)
                if len(part.data) != min(PART_LIMIT_BYTES, part.total - len(data)):
                    raise RemoteError("answers with more or less than a part", peer=peer)
                data += part.data
                if len(data) == part.total:
                    return bytes(data)

    async def commitments(self, peer: PeerId, base: bytes) -> tuple[Commitment, ...]:
        """Fetch the commitments a peer heard in the round after that value. Raises NetworkError, RemoteError."""
        with self._asking(peer, REQUEST_DEADLINE_S):
            answer = await self._ask(peer, GetCommitments(base=base))
        return answer.commitments if isinstance(answer, Commitments) else ()

    async def statements(self, peer: PeerId, plan: Plan) -> list[ChunkStatement]:
        """Fetch a peer's statements of the owners about all chunks. Raises NetworkError, RemoteError."""
        found: list[ChunkStatement] = []
        with self._asking(peer, WHOLE_DEADLINE_S):
            while len(found) < plan.chunks:
                answer = await self._ask(peer, GetStatements(plan=plan.hash, first=len(found)))
                wanted = min(STATEMENTS_LIMIT, plan.chunks - len(found))
                if not isinstance(answer, StatementsPart) or len(answer.statements) != wanted:
                    raise RemoteError("answers with something else than statements", peer=peer)
                found += _chunk_statements(plan, answer, first=len(found), peer=peer)
        return found


def _chunk_statements(plan: Plan, part: StatementsPart, *, first: int, peer: PeerId) -> list[ChunkStatement]:
    if any(stated.owner >= len(plan.participants) for stated in part.statements):
        raise RemoteError("statements of who takes no part", peer=peer)
    return [
        ChunkStatement(
            plan=plan.lineage,
            chunk=chunk,
            bitmap=stated.bitmap,
            result=stated.result,
            owner=plan.participants[stated.owner].peer,
            signature=stated.signature,
        )
        for chunk, stated in enumerate(part.statements, first)
    ]


class AuditServer:
    """Answers other nodes.

    finals: those of a plan, if they are here. commitments: what was heard in the round after the value with that hash.
    is_member: who is a member waits for no place that somebody else has taken who is none.
    """

    def __init__(
        self,
        evidence_store: EvidenceStore,
        finals: Callable[[bytes], Finals | None],
        commitments: Callable[[bytes], Sequence[Commitment]],
        linked: Callable[[], frozenset[PeerId]],
        is_member: Callable[[PeerId], bool] = lambda peer: True,
    ) -> None:
        self._evidence_store = evidence_store
        self._finals = finals
        self._commitments = commitments
        self._linked = linked
        self._is_member = is_member
        self._rooms = {member: trio.Semaphore(ANSWERS_LIMIT) for member in (True, False)}
        self._places = WeakValueDictionary[PeerId, trio.Semaphore]()  # of each peer that is answered
        self.charged: Callable[[PeerId, Sequence[Charge]], None] = lambda peer, charges: None
        """Called with what a peer says that it holds."""

    async def serve(self, stream: MessageStream) -> None:
        """Answer one request.

        Raises RemoteError when it is malformed, or from a peer that was not admitted, NetworkError if that takes long.
        """
        if stream.peer not in self._linked():
            raise RemoteError("wants something without having been admitted", peer=stream.peer)
        data = await stream.receive(deadline_s=REQUEST_DEADLINE_S)
        if len(data) > REQUEST_LIMIT_BYTES:
            raise RemoteError(f"a request of {len(data)} bytes", peer=stream.peer)
        request: AuditRequest = decode(data, AuditRequest, peer=stream.peer)  # type: ignore[arg-type]
        place = self._places.setdefault(stream.peer, trio.Semaphore(ANSWERS_PER_PEER_LIMIT))
        with trio.move_on_after(REQUEST_DEADLINE_S) as scope:
            async with place, self._rooms[self._is_member(stream.peer)]:
                await self._answer(stream, request)
        if scope.cancelled_caught:
            raise NetworkError(f"{stream.peer} was not answered within {REQUEST_DEADLINE_S:g} s")
        if isinstance(request, EvidenceHeld):
            self.charged(stream.peer, request.charges)
        await stream.aclose()

    async def _answer(self, stream: MessageStream, request: AuditRequest) -> None:
        if isinstance(request, GetCommitments):  # it is of what the engine's task changes
            answer = self.answer(request)
        else:
            answer = await trio.to_thread.run_sync(self.answer, request)
        await stream.send(canonical(answer), deadline_s=REQUEST_DEADLINE_S)

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
