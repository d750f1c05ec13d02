"""From the finals of a round to the state after it, where this node computes it itself; and the states it takes over.

finals here ─► work out S(e), keep the finals ─► Report ─► … ─► certificate ─► hold S(e), log the round

Each plan of the round whose finals are here has its candidate, the basis of a report and a vote. However many there
are, there is memory for one state in the making. It stands as the finals that came last have it; should another plan's
value be decided, the chunks in which the two differ are made again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio

from shoal.collectives.finals import Finals, UseFinal
from shoal.collectives.grid import Grid
from shoal.collectives.outer import NextState, OuterSettings
from shoal.collectives.state import CertifiedState, HeldState, PolicyImage, StateHeader
from shoal.node.control_groups import usable_cores
from shoal.node.outcome import RoundCertified
from shoal.node.rounds.engine_parts import EngineParts
from shoal.node.state.finals_file import FinalsWriter
from shoal.protocol.errors import ConfigError, NetworkError, RemoteError, StorageError
from shoal.protocol.messages import NO_HASH, Certificate, Plan, Report, Value
from shoal.protocol.planning import split_codec

APPLY_THREADS = min(4, usable_cores())

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """S(e) as the finals of one plan make it; `seconds` is how long the finals took to come."""

    header: StateHeader
    digest: bytes
    finals: Finals
    seconds: float

    def report(self, previous: Value) -> Report:
        """Report of it, unsigned, for the lead."""
        return Report(
            term=previous.next_term,
            round=self.finals.plan.round,
            base=previous.hash,
            plan=self.finals.plan.hash,
            digest=self.digest,
            bitmaps=self.finals.bitmaps_root,
            tokens=self.finals.tokens,
        )


class StateTransition:
    """The step from S(e-1) to S(e) in the round under way. All of it runs in the engine's task."""

    def __init__(self, parts: EngineParts) -> None:
        self._p = parts
        self._state_store = parts.state_store
        self._cache = parts.cache
        self._outer = OuterSettings.of(parts.config.manifest)
        self._by_plan: dict[bytes, Candidate] = {}
        self._next: NextState | None = None
        self._begun: FinalsWriter | None = None
        """Of finals that nothing was worked out of yet."""
        self._round_started = 0.0
        parts.reduce.begin = self._begin

    def begin_round(self, now: float) -> None:
        """Another round begins: what was worked out for the last one is dropped."""
        amended = self._state_store.chain.amended(self._state_store.head.next_round)
        self._outer = OuterSettings.of(amended or self._p.config.manifest)
        self._round_started = now
        self.drop()

    def drop(self) -> None:
        """Let go of all candidates, and of the state in the making."""
        self._by_plan.clear()
        self._next = None
        self._drop_begun()

    # -- effects of a member -----------------------------------------------------------------------------------

    def _begin(self, finals: Finals) -> UseFinal | None:
        """All finals of a reduction are here, and about to be checked: work out ahead what can be."""
        state = self._state_store.state
        if not isinstance(state, CertifiedState) or finals.plan.base != self._state_store.head.hash:
            return None
        return self.begin(state, finals)

    async def work_out(self, finals: Finals, seconds: float) -> Report:
        """Work out what S(e) will be, and keep the finals on disk before this node reports.

        The state before it is here. Raises StorageError. Cancellation: finals may be on disk, nothing else happened.
        """
        state = self._state_store.state
        assert isinstance(state, CertifiedState)
        candidate = await self.candidate(state, finals, seconds)
        self._p.log.reduced(finals, candidate.digest, seconds)
        return candidate.report(self._state_store.head)

    async def apply(self, certificate: Certificate) -> None:
        """Hold the certified state, which was worked out here, and tell of the round. Raises StorageError.

        Cancellation: the finals of the round are on disk.
        """
        value = certificate.value
        candidate = self.of(value)
        assert candidate is not None
        finals = candidate.finals
        state = await self.take(candidate)
        worked = finals.worked
        missing = [peer for peer in value.members if peer not in worked]
        self._p.training_client.certified(value, len(worked), missing)
        await self._state_store.follow(state, candidate.header)
        self._p.checkpoints.certified(state)
        seconds = trio.current_time() - self._round_started
        kept_s = await trio.to_thread.run_sync(self._p.audit.applied, value.term, finals)
        times = {"reduce_s": candidate.seconds, "total_s": seconds, "kept_s": kept_s}
        me = self._p.identity.peer_id
        self._p.log.certified(certificate, finals, me=me, times=times, traffic=self._p.traffic_bytes())
        client = self._p.training_client
        idle = (client.paused or client.stuck) and me not in worked
        self._p.on_progress(
            RoundCertified(
                round=value.round,
                members=len(value.members),
                contributors=len(worked),
                loss=None if idle else client.loss,
                seconds=seconds,
                held_out=client.held_out,
                loss_metric=client.loss_metric,
                missing=tuple(map(str, missing)),
            )
        )

    async def adopt(self, state: Any) -> None:
        """Hold a state that came from elsewhere, and have it on disk. Raises ConfigError if it is another model's."""
        assert isinstance(state, CertifiedState | PolicyImage)
        if not state.round and self._state_store.state is not None:
            logger.warning("the initial parameters drawn here differ from the first founder's; using theirs")
        await self._hold(state)

    async def draw(self, certified: bytes) -> None:
        """Draw S(0), and hold it if it has the certified digest, or none is certified.

        Where a certified one is not drawn in time, the others have it. Else the trainer is waited for: one that hangs
        is started again, and its user may leave meanwhile.
        """
        while True:
            try:
                state = await self._p.training_client.initial_state(self._cache.vectors)
                break
            except NetworkError as error:
                logger.warning("no state to begin on yet: %s", error)
                if certified != NO_HASH:
                    return
        if certified in (NO_HASH, await trio.to_thread.run_sync(self._cache.digest, state)):
            await self._hold(state)

    async def _hold(self, state: HeldState) -> None:
        if state.layout_hash != self._p.training_client.layout_hash:
            raise ConfigError(
                "the swarm's model has other parameters than this workload builds here; install the same version of it"
            )
        await self._state_store.adopt(state)

    # -- candidates --------------------------------------------------------------------------------------------

    def get(self, plan_hash: bytes) -> Candidate | None:
        """The candidate of a plan, if its finals are here."""
        return self._by_plan.get(plan_hash)

    def of(self, value: Value) -> Candidate | None:
        """The candidate that a certified value names, if it is here and led to the same digest."""
        candidate = self._by_plan.get(value.plan)
        return candidate if candidate is not None and candidate.digest == value.digest else None

    def begin(self, state: CertifiedState, finals: Finals) -> UseFinal | None:
        """Begin what `candidate` does, of `finals` that are still to be checked. What it does not follow is undone.

        Returns what is to be called with each that was checked, if anything is left to be done. Raises LocalError if
        they do not follow the state.
        """
        if finals.plan.hash in self._by_plan:
            return None
        apply = self._over(state, finals.plan).ahead(finals.plan)
        self._drop_begun()
        self._begun = self._cache.finals_writer(finals)
        return apply

    def _drop_begun(self) -> None:
        if self._begun is not None:
            self._begun.abandon()
            self._begun = None

    def _over(self, state: CertifiedState, plan: Plan) -> NextState:
        if self._next is None or self._next.base is not state:
            grid, known = Grid(state.numel, plan.chunk_values), partial(self._cache.header, state)
            _, buffers = split_codec(plan.codec)
            self._next = NextState(state, self._outer, grid, self._cache.vectors, buffers=buffers, header=known)
        return self._next

    async def candidate(self, state: CertifiedState, finals: Finals, seconds: float) -> Candidate:
        """Apply `finals` over `state`, and keep them on disk.

        Raises StorageError, and LocalError if they do not follow the state.

        Cancellation: finals may be on disk, nothing else happened.
        """
        after = self._over(state, finals.plan)
        with self._writer(finals) as finish:
            header = await trio.to_thread.run_sync(after.complete, finals, APPLY_THREADS)
            await trio.to_thread.run_sync(finish)
        self._cache.put_finals(finals)
        candidate = Candidate(header=header, digest=header.digest, finals=finals, seconds=seconds)
        self._by_plan[finals.plan.hash] = candidate
        return candidate

    @contextmanager
    def _writer(self, finals: Finals) -> Iterator[Callable[[], None]]:
        """Have `finals` written; what is given returns when they are there, and may raise StorageError.

        Nothing stays of them when the block is left before that.
        """
        writer, self._begun = self._begun, None
        if writer is None or not writer.writes(finals):
            if writer is not None:
                writer.abandon()
            writer = self._cache.finals_writer(finals)
        try:
            yield writer.finish
        finally:
            writer.abandon()

    async def take(self, candidate: Candidate) -> CertifiedState:
        """The state of the candidate that was certified, made again where another came after it. The round is over.

        Raises StorageError if it cannot be made again: the finals are read from the disk for that. Cancellation: it can
        be taken again.
        """
        assert self._next is not None
        self._next.close()
        try:
            header = await trio.to_thread.run_sync(self._next.complete, candidate.finals, APPLY_THREADS)
        except RemoteError:  # they were checked when they came, and decode no more
            header = None
        if header is None or header.digest != candidate.digest:
            where, round = self._cache.folder / "finals", candidate.header.round
            raise StorageError(f"{where} has other finals of round {round} than were written; check the disk")
        state = self._next.take(header)
        self._next = None
        return state
