"""Catching up: certificates, finals and state from other nodes, each checked against what is already believed.

Certificates are checked one against the one before, from the founders on. Finals carry their owners' signatures and
belong to a plan that the certificate names. State chunks have the hashes of a header that has the certified digest.
So any node may serve anything; a donor that serves something else is left for the next one, and nothing of it stays.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

import trio

from shoal.collectives.finals import FinalFormat, Finals
from shoal.collectives.outer import OuterSettings, advance
from shoal.collectives.state import CertifiedState, StateAssembly, StateHeader, StateKind
from shoal.node.states import StateShelf
from shoal.protocol.certificate import Chain
from shoal.protocol.errors import ConfigError, LocalError, NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Value
from shoal.protocol.peering import (
    CERTIFICATES_IN_ANSWER_LIMIT,
    ChainPart,
    FetchAnswer,
    FetchRequest,
    FinalsAnswer,
    GetChain,
    GetFinals,
    GetHeader,
    HeaderAnswer,
    Refusal,
)
from shoal.protocol.wire import canonical, decode
from shoal.swarm.chunks import ChunkExchange, ChunkRef, ChunkSpace
from shoal.swarm.frame import SCOPE_BYTES
from shoal.swarm.lanes import LanePool
from shoal.swarm.streams import MessageStream

FETCH_PROTOCOL = "/shoal/fetch/1"
REQUEST_DEADLINE_S = 10.0
LANE_DEADLINE_S = 10.0
ANSWER_LIMIT_BYTES = 4 << 20
REPLAY_LIMIT_ROUNDS = 4
"""A node that missed more rounds than this fetches the state instead of replaying the finals of each."""

logger = logging.getLogger(__name__)

Ask = Callable[[PeerId, bytes], Awaitable[bytes]]
OnChunk = Callable[[int, int], Awaitable[None]]


class Librarian:
    """Answers other nodes' fetch requests from this node's chain and shelf."""

    def __init__(self, *, chain: Chain, shelf: StateShelf) -> None:
        self._chain = chain
        self._shelf = shelf

    async def serve(self, stream: MessageStream) -> None:
        """Answer one request. Raises RemoteError when it is malformed."""
        data = await stream.receive(deadline_s=REQUEST_DEADLINE_S)
        request: FetchRequest = decode(data, FetchRequest, peer=stream.peer)  # type: ignore[arg-type]
        await stream.send(canonical(self.answer(request)), deadline_s=REQUEST_DEADLINE_S)
        await stream.aclose()

    def answer(self, request: FetchRequest) -> FetchAnswer:
        """What this node has of what is asked for."""
        if isinstance(request, GetChain):
            part = self._chain.after(request.after, CERTIFICATES_IN_ANSWER_LIMIT)
            return ChainPart(certificates=part, head=self._chain.head.round)
        if isinstance(request, GetHeader):
            header = self._shelf.header_for(request.round)
            return Refusal(reason="not held here") if header is None else HeaderAnswer(header=canonical(header))
        finals = self._shelf.held_finals(request.plan)
        if finals is None:
            return Refusal(reason="not held here")
        return FinalsAnswer(plan=finals.plan)


class CatchUp:
    """Fetches what this node lacks. All methods try the given peers in turn."""

    def __init__(
        self, *, ask: Ask, lanes: LanePool, chunks: ChunkExchange, shelf: StateShelf, outer: OuterSettings
    ) -> None:
        self._ask = ask
        self._lanes = lanes
        self._chunks = chunks
        self._shelf = shelf
        self._outer = outer
        self.shape: tuple[str, int, int] | None = None
        """Codec, numel and chunk_values of this swarm; known once the trainer has built the model."""

    async def certificates(self, after: int, peer: PeerId) -> ChainPart:
        """Certificates of the rounds after `after` that `peer` has, as many as one answer holds, not yet checked."""
        part = await self._fetch(peer, GetChain(after=after))
        if not isinstance(part, ChainPart):
            raise RemoteError("answers a request for certificates with something else", peer=peer)
        return part

    async def finals(self, plan_hash: bytes, peers: Sequence[PeerId]) -> Finals:
        """The finals of a plan, from this node's disk or from the first peer that has them all.

        Raises NetworkError when nobody has.
        """
        held = await trio.to_thread.run_sync(self._shelf.finals, plan_hash)
        if held is not None:
            return held
        for peer in peers:
            try:
                finals = await self._finals_from(peer, plan_hash)
            except (NetworkError, RemoteError) as error:
                logger.info("finals from %s: %s", peer, error)
            else:
                self._shelf.put_finals(finals)  # they also tell whether this node's contribution was counted
                return finals
        raise NetworkError(f"no peer has the finals of plan {plan_hash.hex()[:12]}")

    async def _finals_from(self, peer: PeerId, plan_hash: bytes) -> Finals:
        answer = await self._fetch(peer, GetFinals(plan=plan_hash))
        if not isinstance(answer, FinalsAnswer) or answer.plan.hash != plan_hash:
            raise RemoteError("answers a request for finals with something else", peer=peer)
        shape = (answer.plan.codec, answer.plan.numel, answer.plan.chunk_values)
        if shape != self.shape:
            raise RemoteError("names a plan for another model", peer=peer)
        try:
            form = FinalFormat(answer.plan)
        except (ConfigError, LocalError) as error:  # its hash was named by a lead, who may name what it likes
            raise RemoteError(f"has a plan that nobody can follow: {error}", peer=peer) from None
        scope = plan_hash[:SCOPE_BYTES]
        wanted = [
            (ChunkRef(ChunkSpace.FINAL, scope, chunk), form.payload_bytes(chunk)) for chunk in range(answer.plan.chunks)
        ]
        payloads: dict[int, bytes] = {}

        def accept(ref: ChunkRef, data: memoryview) -> None:
            payloads[ref.chunk] = bytes(data)

        await self._lanes.ensure(peer, deadline_s=LANE_DEADLINE_S)
        await self._chunks.fetch(peer, wanted, accept)
        return await trio.to_thread.run_sync(Finals.open, answer.plan, [payloads[i] for i in range(len(wanted))])

    async def advance(
        self, state: CertifiedState | None, chain: Chain, peers: Sequence[PeerId], on_chunk: OnChunk
    ) -> CertifiedState:
        """The state at the head of `chain`: by replaying finals where few rounds are missing, else fetched whole.

        Raises NetworkError when no peer can help.
        """
        head = chain.head
        if state is not None and 0 < head.round - state.round <= REPLAY_LIMIT_ROUNDS:
            state = await self.replay(state, chain, peers)
            if state.round == head.round:
                return state
        for peer in peers:
            try:
                return await self._state_from(peer, head, on_chunk)
            except (NetworkError, RemoteError) as error:
                logger.warning("state of round %d from %s: %s", head.round, peer, error)
        raise NetworkError(f"no peer has the state of round {head.round}")

    async def replay(self, state: CertifiedState, chain: Chain, peers: Sequence[PeerId]) -> CertifiedState:
        """The last state to which finals, of this node's disk or of `peers`, lead from `state` along the chain.

        Each is checked against its certificate, and is on the shelf.
        """
        for round in range(state.round + 1, chain.head.round + 1):
            value = chain.value(round)
            try:
                finals = await self.finals(value.plan, peers)
            except NetworkError as error:
                logger.info("cannot replay: %s", error)
                break
            after, header = await trio.to_thread.run_sync(advance, state, finals, self._outer)
            if header.digest != value.digest:
                logger.warning("replaying round %d led to another digest than the certified one", round)
                break
            self._shelf.put(after, header)
            state = after
        return state

    async def _state_from(self, peer: PeerId, value: Value, on_chunk: OnChunk) -> CertifiedState:
        answer = await self._fetch(peer, GetHeader(round=value.round))
        if not isinstance(answer, HeaderAnswer):
            reason = answer.reason if isinstance(answer, Refusal) else "answers with something else"
            raise RemoteError(f"no header: {reason}", peer=peer)
        header = decode(answer.header, StateHeader, peer=peer, limit_bytes=ANSWER_LIMIT_BYTES)
        # S(0) is made by a founder before anything is certified; its word, as the one named in the manifest, is enough.
        if value.round == 0 and peer not in value.members:
            raise RemoteError("offers the initial state without being a founder", peer=peer)
        digest = header.digest if value.round == 0 else value.digest
        if (header.term, header.round) != (value.term, value.round):
            raise RemoteError(f"offers the state of round {header.round} for that of {value.round}", peer=peer)
        assembly = StateAssembly(header, digest=digest)
        await self._lanes.ensure(peer, deadline_s=LANE_DEADLINE_S)
        wanted = [self._wanted(header, kind, chunk) for kind, chunk in assembly.missing()]
        spaces = {ChunkSpace.ANCHOR: StateKind.ANCHOR, ChunkSpace.MOMENTUM: StateKind.MOMENTUM}

        def accept(ref: ChunkRef, data: memoryview) -> None:
            assembly.accept(spaces[ref.space], ref.chunk, data)

        step = max(1, len(wanted) // 8)
        for start in range(0, len(wanted), step):
            await on_chunk(start, len(wanted))
            await self._chunks.fetch(peer, wanted[start : start + step], accept)
        await on_chunk(len(wanted), len(wanted))
        return assembly.finish()

    @staticmethod
    def _wanted(header: StateHeader, kind: StateKind, chunk: int) -> tuple[ChunkRef, int]:
        space = ChunkSpace.ANCHOR if kind is StateKind.ANCHOR else ChunkSpace.MOMENTUM
        return ChunkRef(space, header.digest[:SCOPE_BYTES], chunk), 4 * header.grid.length(chunk)

    async def _fetch(self, peer: PeerId, request: FetchRequest) -> FetchAnswer:
        data = await self._ask(peer, canonical(request))
        answer: FetchAnswer = decode(data, FetchAnswer, peer=peer, limit_bytes=ANSWER_LIMIT_BYTES)  # type: ignore[arg-type]
        return answer
