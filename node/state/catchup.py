"""Certificates, finals and states from other nodes, each checked against what is already believed.

Which of them are sought, and from whom, is decided elsewhere (`shoal.protocol.catching_up`); here it is carried out.
Certificates are checked one against the one before, from the founders on. Finals carry their owners' signatures and
belong to a plan that the certificate names. State chunks have the hashes of a header that has the certified digest.
So any node may serve anything; who serves something else is left out, and nothing of it stays.

What is here already is not fetched: chunks that an older state has alike, and those of a transfer that did not come to
its end, be it in this process or, on disk, in an earlier one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import trio

from shoal.collectives.codecs import final_codec
from shoal.collectives.commitment import bitmap_bytes
from shoal.collectives.finals import FinalChunk, FinalFormat, Finals, UseFinal
from shoal.collectives.fragments import Fragments
from shoal.collectives.grid import Grid
from shoal.collectives.outer import NextState, OuterSettings
from shoal.collectives.state import CertifiedState, HeldState, PolicyImage, StateAssembly, StateHeader
from shoal.node.control_groups import usable_cores
from shoal.node.state.asking import ask_in_turn
from shoal.node.state.fetching import Fetcher, Job, OnProgress, tell_nobody
from shoal.node.state.state_server import ANSWER_LIMIT_BYTES
from shoal.node.state.states import STATE_SPACES, StateCache
from shoal.node.state.transfer_files import PartialDownload, TransferFolder
from shoal.protocol.catching_up import check_header, on_branch
from shoal.protocol.chain import Chain
from shoal.protocol.donors import DonorScores
from shoal.protocol.errands import (
    HEADER_TIMEOUT_S,
    AskHolders,
    CountLacking,
    FetchState,
    FindBegun,
    Holders,
    Replay,
)
from shoal.protocol.errors import ConfigError, LocalError, NetworkError, RemoteError
from shoal.protocol.identity import SIGNATURE_BYTES, PeerId
from shoal.protocol.manifest import Manifest
from shoal.protocol.messages import MEMBER_LIMIT, NO_HASH, Value
from shoal.protocol.peering import (
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
from shoal.protocol.planning import split_codec, with_buffers
from shoal.protocol.wire import canonical, decode
from shoal.swarm.lanes.chunks import ChunkExchange, ChunkRef, ChunkSpace
from shoal.swarm.lanes.frame import SCOPE_BYTES
from shoal.swarm.lanes.pool import LanePool

FINALS_DONORS = 4
DONORS_NAMED = 4
"""In a line of the log."""
APPLY_THREADS = min(4, usable_cores())

KINDS = STATE_SPACES
SPACES = {kind: space for space, kind in KINDS.items()}

logger = logging.getLogger(__name__)

Ask = Callable[[PeerId, bytes], Awaitable[bytes]]


@dataclass(slots=True, eq=False)
class _Unfinished:
    """A state that is on its way, and what writes it to disk."""

    assembly: StateAssembly
    partial_download: PartialDownload


class Fetched(msgspec.Struct, frozen=True, kw_only=True):
    """How often something was fetched, and its bytes in all."""

    times: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Places:
    """The places of an assembly's chunks, for the lanes to decrypt them there."""

    assembly: StateAssembly

    def lend(self, ref: ChunkRef) -> memoryview | None:
        return self.assembly.lend(KINDS[ref.space], ref.chunk)

    def give_back(self, ref: ChunkRef, *, clean: bool) -> None:
        self.assembly.give_back(KINDS[ref.space], ref.chunk, clean=clean)


class CatchUp:
    """Fetches what this node lacks, from several peers at once."""

    def __init__(
        self, *, ask: Ask, lanes: LanePool, chunks: ChunkExchange, cache: StateCache, outer: OuterSettings
    ) -> None:
        self._ask = ask
        self._cache = cache
        self._outer = outer
        self.scores = DonorScores()
        self.fetcher = Fetcher(lanes=lanes, chunks=chunks, scores=self.scores)
        self._folder = TransferFolder(cache.folder)
        self._unfinished: _Unfinished | None = None
        self._known_header: tuple[bytes, StateHeader] | None = None  # as it came: donors say the same, checked once
        self._fetching_finals: dict[bytes, trio.Lock] = {}
        self.shape: tuple[str, int, int] | None = None
        """Codec, numel and chunk_values of this swarm; known once the trainer has built the model."""
        self.donated: dict[PeerId, int] = {}
        """Bytes of the last state or finals, by the peer that they came from."""
        self.fetched: dict[str, Fetched] = {}
        """Counts of what came since this node started, by kind: states, finals, images, changes of images."""
        self.accepts: Callable[[StateHeader], None] = lambda header: None
        """Called with the header of a state before its chunks are fetched; may raise ConfigError."""
        self.amended: Callable[[int], Manifest | None] = lambda round: None
        """The settings in force in a round of the chain, None where they are the swarm's first."""

    def came(self, what: str, donated: dict[PeerId, int]) -> None:
        """Something was fetched: so many bytes from whom."""
        before, self.donated = self.fetched.get(what, Fetched()), donated
        self.fetched[what] = Fetched(times=before.times + 1, bytes=before.bytes + sum(donated.values()))

    # -- certificates ----------------------------------------------------------------------------------------

    async def certificates(self, after: int, peer: PeerId, rebases: int = 0) -> ChainPart:
        """Entries of the chain after the first `after` that `peer` has, as many as one answer holds, not yet checked;
        or those from a rebase on of which who knows of `rebases` has not heard.
        """
        part = await self._request(peer, GetChain(after=after, rebases=rebases))
        if not isinstance(part, ChainPart):
            raise RemoteError("answers a request for certificates with something else", peer=peer)
        return part

    # -- finals ----------------------------------------------------------------------------------------------

    async def finals(self, plan_hash: bytes, peers: Sequence[PeerId]) -> Finals:
        """The finals of a plan, from this node's disk or from several of the peers that have them.

        Raises NetworkError when they cannot be had.
        """
        lock = self._fetching_finals.setdefault(plan_hash, trio.Lock())
        try:
            async with lock:  # who wants the same waits for it
                held = await trio.to_thread.run_sync(self._cache.finals, plan_hash)
                if held is None:
                    held = await self._fetch_finals(plan_hash, peers)
                    self._cache.put_finals(held)  # they also tell whether this node's contribution was counted
                return held
        finally:
            if not lock.locked():
                self._fetching_finals.pop(plan_hash, None)

    async def _fetch_finals(self, plan_hash: bytes, peers: Sequence[PeerId]) -> Finals:
        ranked, found = self.scores.ranked(peers, trio.current_time()), dict[PeerId, FinalFormat]()

        async def ask(peer: PeerId) -> float | None:
            try:
                found[peer] = await self._final_format(peer, plan_hash)
            except NetworkError as error:
                logger.info("%s: %s", peer, error)
            except RemoteError as error:
                logger.warning("finals from %s: %s", peer, error)
                self.scores.offended(peer, trio.current_time())
            return 0.0 if peer in found else None

        await ask_in_turn(ranked, ask)
        for known, final_format in found.items():
            donors = [known, *(peer for peer in ranked if peer != known)]
            return await self._finals_by(final_format, known, donors[:FINALS_DONORS])
        raise NetworkError(f"no peer has the finals of plan {plan_hash.hex()[:12]}")

    async def _final_format(self, peer: PeerId, plan_hash: bytes) -> FinalFormat:
        answer = await self._request(peer, GetFinals(plan=plan_hash))
        if isinstance(answer, Refusal):
            raise NetworkError("it has not the finals that this node lacks")
        if not isinstance(answer, FinalsAnswer) or answer.plan.hash != plan_hash:
            raise RemoteError("answers a request for finals with something else", peer=peer)
        shape = (answer.plan.codec, answer.plan.numel, answer.plan.chunk_values)
        if shape != self._shape_of(answer.plan.round):
            raise RemoteError("names a plan for another model", peer=peer)
        try:
            return FinalFormat(answer.plan)
        except (ConfigError, LocalError) as error:  # its hash was named by a lead, who may name what it likes
            raise RemoteError(f"has a plan that nobody can follow: {error}", peer=peer) from None

    def _shape_of(self, round: int) -> tuple[str, int, int] | None:
        """Codec, numel and chunk_values of the plans of a round."""
        if self.shape is None:
            return None
        name, numel, chunk_values = self.shape
        amended, (_, buffers) = self.amended(round), split_codec(name)
        name = name if amended is None else with_buffers(amended.sync.plan_codec, buffers)
        fragments = Fragments(Grid(numel, chunk_values), self._outer.fragments, buffers)
        return name, fragments.of_round(round).numel, chunk_values

    async def _finals_by(self, final_format: FinalFormat, known: PeerId, donors: Sequence[PeerId]) -> Finals:
        found: dict[int, FinalChunk] = {}

        def take(final: FinalChunk) -> None:
            found[final.chunk] = final

        every = range(final_format.plan.chunks)
        self.came("finals", await self.copy_finals(final_format, every, donors, take, known=known))
        return Finals(plan=final_format.plan, chunks=tuple(found[chunk] for chunk in every))

    async def copy_finals(
        self,
        final_format: FinalFormat,
        chunks: Iterable[int],
        peers: Sequence[PeerId],
        take: UseFinal,
        *,
        known: str = "",
    ) -> dict[PeerId, int]:
        """Fetch some finals of a plan, check each and hand it to `take` in any thread; `known` is known to have them.

        Returns who brought how many bytes. Raises NetworkError when not all can be had. Cancellation: what was handed
        over was.
        """

        async def introduce(peer: PeerId) -> None:
            if peer != known:
                await self._final_format(peer, final_format.plan.hash)

        def accept(ref: ChunkRef, data: memoryview, _: bytes | None) -> None:
            take(final_format.open(ref.chunk, bytes(data)))

        scope = final_format.plan.hash[:SCOPE_BYTES]
        job = Job(
            what=f"the finals of plan {final_format.plan.hash.hex()[:12]}",
            wanted=[(ChunkRef(ChunkSpace.FINAL, scope, c), final_format.payload_bytes(c)) for c in chunks],
            here=(),
            introduce=introduce,
            accept=accept,
            on_progress=tell_nobody,
        )
        return await self.fetcher.fetch(job, peers)

    # -- the state at the head -------------------------------------------------------------------------------

    @property
    def replayed_rounds(self) -> int:
        """Number of rounds whose finals are fewer bytes than a state; 0 as long as the model is not built."""
        if self.shape is None:
            return 0
        return replay_limit_rounds(*self.shape, fragments=self._outer.fragments, vectors=len(self._outer.kinds))

    @property
    def finals_bytes(self) -> float:
        """Bytes of the finals of a round, on average; infinity as long as the model is not built."""
        if self.shape is None:
            return math.inf
        return _finals_bytes(*self.shape, self._outer.fragments) / self._outer.fragments

    def performers(self, on_chunk: OnProgress) -> Mapping[type[Any], Callable[[Any], Awaitable[Any]]]:
        """Functions that carry out an errand's requests about states; `on_chunk` is told how a transfer goes."""
        return {
            AskHolders: self._ask_holders,
            CountLacking: self._count_lacking,
            FetchState: partial(self._fetch_state, on_chunk),
            FindBegun: self._find_begun,
            Replay: self._replay,
        }

    async def _count_lacking(self, request: CountLacking) -> int:
        return await trio.to_thread.run_sync(lambda: sum(not self._cache.has_finals(plan) for plan in request.plans))

    async def _replay(self, request: Replay) -> HeldState:
        assert isinstance(request.state, CertifiedState | PolicyImage)
        if isinstance(request.state, PolicyImage):  # no finals lead anywhere from it
            return request.state
        return await self.replay(request.state, request.chain, request.peers)

    async def replay(self, state: CertifiedState, chain: Chain, peers: Sequence[PeerId]) -> CertifiedState:
        """The last state to which finals, of this node's disk or of `peers`, lead from `state` along the chain.

        Each is checked against its certificate, and is in the cache. The chain may go back while finals are awaited.
        Finals that the disk has changed since they were read are fetched anew.
        """
        while state.round < chain.standing.round and on_branch(chain, state):
            value = chain.value(state.round + 1)
            round = value.round
            try:
                finals = await self.finals(value.plan, peers)
                grid, known = Grid(state.numel, finals.plan.chunk_values), partial(self._cache.header, state)
                amended = self.amended(round)
                outer = self._outer if amended is None else OuterSettings.of(amended)
                _, buffers = split_codec(finals.plan.codec)
                after = NextState(state, outer, grid, self._cache.vectors, buffers=buffers, header=known)
                header = await trio.to_thread.run_sync(after.complete, finals, APPLY_THREADS)
            except NetworkError as error:
                logger.info("cannot replay round %d: %s", round, error)
                break
            except (LocalError, RemoteError) as error:
                logger.warning("round %d does not follow from the state here: %s", round, error)
            else:
                if header.digest == value.digest:
                    state = after.take(header)
                    self._cache.put(state, header)
                    continue
                logger.warning("replaying round %d led to another digest than the certified one", round)
            if not await trio.to_thread.run_sync(self._cache.forget_damaged, value.plan):
                break
            logger.warning("the finals of round %d are damaged on this node's disk; others are asked for them", round)
        return state

    def prepare(self) -> None:
        """Have memory ready for a state, so that its arrival does not wait for pages. Blocks; needs the `shape`."""
        if self.shape is not None:
            self._cache.vectors.prepare(self.shape[1])

    def arrived(self) -> None:
        """The state at the head is here, and on disk: what is kept of transfers is of no more use. Blocks."""
        self._unfinished = None
        self._folder.clear()

    # -- a whole state ---------------------------------------------------------------------------------------

    async def _fetch_state(self, on_chunk: OnProgress, request: FetchState) -> CertifiedState | None:
        """The state of a header, None if it is not to be had. Raises ConfigError where `accepts` does."""
        value, certified, header, base = request.value, request.certified, request.header, request.base
        assert isinstance(header, StateHeader)
        base = base if isinstance(base, CertifiedState) else None
        self.accepts(header)
        unfinished = await trio.to_thread.run_sync(self._begin, header, base)
        assembly, partial_download = unfinished.assembly, unfinished.partial_download

        async def introduce(peer: PeerId) -> None:
            if peer not in request.holders and (await self._header(peer, value, certified)).digest != header.digest:
                raise NetworkError("it has another initial state")

        def accept(ref: ChunkRef, data: memoryview, digest: bytes | None) -> None:
            if assembly.accept(KINDS[ref.space], ref.chunk, data, digest):
                partial_download.note(KINDS[ref.space], ref.chunk)

        scope, grid = header.digest[:SCOPE_BYTES], header.grid
        pieces = [(kind, chunk) for kind in header.kinds for chunk in range(grid.chunks)]
        missing = set(assembly.missing())
        here = [number for number, piece in enumerate(pieces) if piece not in missing]
        job = Job(
            what=f"the state of round {value.round}",
            wanted=[(ChunkRef(SPACES[kind], scope, chunk), 4 * grid.length(chunk)) for kind, chunk in pieces],
            here=here,
            introduce=introduce,
            accept=accept,
            on_progress=on_chunk,
            places=_Places(assembly),
            hashing=True,
        )
        try:
            self.came("state", await self._fetch_and_keep(job, request.peers, partial_download))
        except NetworkError as error:
            logger.info("%s", error)
            return None
        self._unfinished = None
        logger.info(
            "%s is here: %s%s",
            job.what,
            _from_whom(self.donated),
            f", beside {len(here):,} of {len(pieces):,} chunks that were" if here else "",
        )
        state = assembly.finish()
        self._cache.put(state, header)
        return state

    async def _fetch_and_keep(
        self, job: Job, peers: Sequence[PeerId], partial_download: PartialDownload
    ) -> dict[PeerId, int]:
        """Fetch, and write what comes to disk beside it. Raises NetworkError. Cancellation: what is written stays."""
        donated: dict[PeerId, int] | NetworkError
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial_download.run)
            try:
                donated = await self.fetcher.fetch(job, peers)
            except NetworkError as error:  # not out of the nursery, which would wrap it
                donated = error
            nursery.cancel_scope.cancel()
        if isinstance(donated, NetworkError):
            raise donated
        return donated

    def _begin(self, header: StateHeader, base: CertifiedState | None) -> _Unfinished:
        """The assembly for `header`, which was checked, with all that is here of it. Blocks."""
        before = self._unfinished
        if before is not None and before.assembly.digest == header.digest:
            return before
        self._unfinished = None
        assembly = StateAssembly(header, digest=header.digest, vectors=self._cache.vectors)
        partial_download = PartialDownload(self._folder, assembly)
        if base is not None:
            assembly.copy_from(base, self._cache.header(base))
        for file in self._folder.unfinished():
            found = file.fill(assembly)
            file.close()
            for piece in () if file.header == header else found:
                partial_download.note(*piece)
        self._unfinished = _Unfinished(assembly, partial_download)
        return self._unfinished

    async def _find_begun(self, request: FindBegun) -> list[tuple[int, bytes]]:
        return await trio.to_thread.run_sync(self._begun)

    def _begun(self) -> list[tuple[int, bytes]]:
        """The rounds and digests of states that are here in part. Blocks."""
        headers = [file.header for file in self._folder.unfinished()]
        if self._unfinished is not None:
            headers.insert(0, self._unfinished.assembly.header)
        return [(header.round, header.digest) for header in headers]

    async def _ask_holders(self, request: AskHolders) -> Holders:
        found, others = dict[PeerId, StateHeader](), list[PeerId]()
        async with trio.open_nursery() as nursery:

            async def ask(peer: PeerId) -> None:
                try:
                    found[peer] = await self._header(peer, request.value, request.certified)
                except NetworkError as error:
                    logger.info("%s: %s", peer, error)
                    others.append(peer)
                except RemoteError as error:
                    logger.warning("%s", error)
                    self.scores.offended(peer, trio.current_time())
                else:
                    nursery.cancel_scope.deadline = min(
                        nursery.cancel_scope.deadline, trio.current_time() + HEADER_TIMEOUT_S
                    )

            for peer in request.peers:
                nursery.start_soon(ask, peer)
        return Holders(found, others)

    async def _header(self, peer: PeerId, value: Value, certified: bytes) -> StateHeader:
        """The header of the state of `value` as `peer` holds it: it has the certified digest, if there is one.

        Raises NetworkError if it holds none, or another branch's, RemoteError if it is another's.
        """
        answer = await self._request(peer, GetHeader(round=value.round))
        if isinstance(answer, Refusal):
            raise NetworkError(f"it has no state of round {value.round}")
        if not isinstance(answer, HeaderAnswer):
            raise RemoteError("answers a request for a header with something else", peer=peer)
        if self._known_header is not None and self._known_header[0] == answer.header:
            header = self._known_header[1]
        else:
            header = decode(answer.header, StateHeader, peer=peer, limit_bytes=ANSWER_LIMIT_BYTES)
        if header.kinds != self._outer.kinds or bool(header.image) != self._outer.imaged:
            raise RemoteError("offers a state of another outer optimizer", peer=peer)
        check_header(header, value, certified, peer)
        if value.round == 0 and certified == NO_HASH:
            self._check_initial(header, value.planner, peer)
        self._known_header = (answer.header, header)
        return header

    def _check_initial(self, header: StateHeader, founder: PeerId, peer: PeerId) -> None:
        """Check the header of an uncertified S(0). Raises RemoteError where it is not of the model built here.

        Whose S(0) is the swarm's, the first founder, may say that the model is another: that is for the user to hear.
        """
        try:
            self.accepts(header)
        except ConfigError:
            if peer != founder:
                raise RemoteError("offers an initial state of another model", peer=peer) from None
        else:
            if self.shape is not None and (header.numel, header.chunk_values) != self.shape[1:]:
                raise RemoteError("offers an initial state of another size than that of the model", peer=peer)

    async def _request(self, peer: PeerId, request: FetchRequest) -> FetchAnswer:
        data = await self._ask(peer, canonical(request))
        answer: FetchAnswer = decode(data, FetchAnswer, peer=peer, limit_bytes=ANSWER_LIMIT_BYTES)  # type: ignore[arg-type]
        return answer


def _from_whom(donated: Mapping[PeerId, int]) -> str:
    """Bytes that came from whom, in words; of many, together."""
    if len(donated) > DONORS_NAMED:
        return f"{sum(donated.values()):,} bytes from {len(donated)} peers"
    return ", ".join(f"{size:,} bytes from {peer}" for peer, size in donated.items()) or "nothing was fetched"


def replay_limit_rounds(name: str, numel: int, chunk_values: int, *, fragments: int = 1, vectors: int = 2) -> int:
    """Number of rounds, each of a fragment, whose finals are fewer bytes than a state: by the manifest's codec.

    vectors: of a state.
    """
    return max(1, fragments * (4 * vectors * numel - 1) // _finals_bytes(name, numel, chunk_values, fragments))


def _finals_bytes(name: str, numel: int, chunk_values: int, fragments: int) -> int:
    """Bytes of the finals of as many rounds as there are fragments."""
    codec_name, buffers = split_codec(name)
    grid, how = Grid(numel, chunk_values), final_codec(codec_name)
    parameters = grid.chunks - buffers
    own = 4 * (numel - Fragments(grid, fragments, buffers).buffers_begin)  # of buffers, which are in every fragment
    trailers = (parameters + fragments * buffers) * (SIGNATURE_BYTES + bitmap_bytes(MEMBER_LIMIT))
    finals = how.encoded_bytes(grid.length(0)) * (parameters - 1) + how.encoded_bytes(grid.length(parameters - 1))
    return finals + fragments * own + trailers
