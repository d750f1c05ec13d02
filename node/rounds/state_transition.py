"""From the finals of a round to the state after it, where this node computes it itself.

finals here ─► work out S(e), keep the finals ─► Report ─► … ─► certificate ─► hold S(e), log the round
"""

from __future__ import annotations

import trio

from shoal.collectives.finals import Finals, UseFinal
from shoal.collectives.outer import OuterSettings
from shoal.node.outcome import RoundCertified
from shoal.node.rounds.candidates import Candidates
from shoal.node.rounds.engine_parts import EngineParts
from shoal.protocol.messages import Certificate, Report


class StateTransition:
    """The step from S(e-1) to S(e) in the round under way. All of it runs in the engine's task."""

    def __init__(self, parts: EngineParts) -> None:
        self._p = parts
        self._state_store = parts.state_store
        self._candidates = Candidates(cache=parts.cache, outer=OuterSettings.of(parts.config.manifest))
        self._round_started = 0.0
        parts.reduce.begin = self._begin

    def begin_round(self, now: float) -> None:
        """Another round begins: what was worked out for the last one is dropped."""
        amended = self._state_store.chain.amended(self._state_store.head.next_round)
        self._candidates.begin_round(OuterSettings.of(amended or self._p.config.manifest))
        self._round_started = now

    def _begin(self, finals: Finals) -> UseFinal | None:
        """All finals of a reduction are here, and about to be checked: work out ahead what can be."""
        state = self._state_store.state
        if state is None or finals.plan.base != self._state_store.head.hash:
            return None
        return self._candidates.begin(state, finals)

    async def work_out(self, finals: Finals, seconds: float) -> Report:
        """Work out what S(e) will be, and keep the finals on disk before this node reports.

        The state before it is here. Raises StorageError. Cancellation: finals may be on disk, nothing else happened.
        """
        state = self._state_store.state
        assert state is not None
        candidate = await self._candidates.work_out(state, finals, seconds)
        self._p.log.reduced(finals, candidate.digest, seconds)
        return candidate.report(self._state_store.head)

    async def apply(self, certificate: Certificate) -> None:
        """Hold the certified state, which was worked out here, and tell of the round. Raises StorageError.

        Cancellation: the finals of the round are on disk.
        """
        value = certificate.value
        candidate = self._candidates.of(value)
        assert candidate is not None
        finals = candidate.finals
        state = await self._candidates.take(candidate)
        await self._state_store.follow(state, candidate.header)
        self._p.checkpoints.certified(state)
        seconds = trio.current_time() - self._round_started
        kept_s = await trio.to_thread.run_sync(self._p.audit.applied, value.term, finals)
        times = {"reduce_s": candidate.seconds, "total_s": seconds, "kept_s": kept_s}
        self._p.log.certified(certificate, finals, times=times, traffic=self._p.traffic_bytes())
        self._p.on_progress(
            RoundCertified(
                round=value.round,
                members=len(value.members),
                contributors=finals.contributors,
                loss=self._p.training_client.loss,
                seconds=seconds,
            )
        )
