"""Rounds that a majority certifies: all members hold one state, and the chain says how it came about.

With a section [rollouts] the members' agents are their training loops, and share rollouts beside the rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import get_args

from shoal.node.audit import AuditTrail
from shoal.node.parts import Parts
from shoal.node.reporting.round_log import RoundLog
from shoal.node.rounds.engine import Engine
from shoal.node.rounds.engine_parts import EngineParts
from shoal.node.strategies.rounds import Rounds, Standing, Task
from shoal.protocol.chain import Position
from shoal.protocol.messages import Enlist
from shoal.protocol.peering import SwarmMessage
from shoal.protocol.records import Phase
from shoal.protocol.seats import LinePlace, are_few, rounds_to_turn
from shoal.swarm.members import Taker


def engine_parts(parts: Parts) -> EngineParts:
    """Collect the parts of an engine that trains."""
    return EngineParts(
        caps=lambda: parts.lanes.caps,
        config=parts.config,
        identity=parts.identity,
        store=parts.store,
        state_store=parts.state_store,
        cache=parts.cache,
        links=parts.links,
        reduce=parts.reduce,
        resumption=parts.resumption,
        checkpoints=parts.checkpoints,
        training_client=parts.training_client,
        site=parts.site,
        log=RoundLog(parts.events),
        holds=parts.holds,
        audit=AuditTrail(parts.store.folder / "rounds", enabled=parts.config.test_mode),
        standstill=parts.standstill,
        traffic_bytes=parts.traffic_bytes,
        suspected=parts.members.suspected,
        leaving=parts.members.leaving,
        announce=parts.members.announce,
        may_join=parts.members.may_join,
        is_revoked=parts.members.is_revoked,
        on_progress=parts.on_progress,
        elsewhere={
            **parts.chain_places.performers,
            **parts.chain_waits.performers,
            **parts.image_exchange.performers,
        },
        checkpoint=parts.chain_places.checkpoint,
        is_follower=parts.is_follower,
        cut_off=lambda: parts.host.is_cut_off,
        enlist=parts.enlist_exchange.tell,
    )


class CertifiedRounds(Rounds):
    """A node's part in certified rounds."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.engine = self.certifying = self._engine = Engine(engine_parts(parts))
        parts.site.put = self._engine.put
        if parts.config.manifest.rollouts is not None:
            from shoal.node.strategies.rollouts import rollout_engine  # with all that only an agent's node needs

            self.sharing = rollout_engine(parts, averages=True)

    @property
    def takers(self) -> Mapping[type, Taker]:
        """See `Rounds`."""
        return dict.fromkeys((*get_args(SwarmMessage), Enlist), self._engine.hear)

    @property
    def tasks(self) -> Sequence[Task]:
        """See `Rounds`."""
        state_store = self._p.state_store
        reductions = (self._p.reduce.run, self._p.relay_room.run)
        exchanges = (self._p.enlist_exchange.run,) if self._p.config.manifest.waits_outside else ()
        sites = (self._p.site.run,) if self._p.config.manifest.sites_together else ()
        return (
            *exchanges,
            *sites,
            *reductions,
            state_store.load_ahead,
            state_store.run,
            self._p.resumption.run,
            self._p.checkpoints.run,
        )

    @property
    def record_phase(self) -> Phase:
        """See `Rounds`. Who is needed until a vote is through says only that it is paused."""
        if self._follows and not self._engine.leaving:
            return "paused" if self.paused else "training"
        if not self._engine.member.needed:
            return super().record_phase
        return "joining" if self._engine.machine is None else "paused"

    @property
    def _follows(self) -> bool:
        return self._engine.member.follows_head

    @property
    def leaves_in_order(self) -> bool:
        """See `Rounds`. A follower has nothing to hand over, and tells its engine so that all of it ends."""
        return self._follows or super().leaves_in_order

    @property
    def position(self) -> Position:
        """See `Rounds`."""
        head = self._p.chain.head
        return head.term, head.round

    async def run(self, *, numel: int, buffers: int = 0) -> None:
        """See `Rounds`."""
        await self._engine.run(numel=numel, buffers=buffers)

    def standing(self) -> Standing:
        """See `Rounds`."""
        head, state, machine = self._p.chain.head, self._p.state_store.state, self._engine.machine
        chain, me = self._p.chain, self._p.identity.peer_id
        line, outside = chain.line, chain.is_outside(me)
        return Standing(
            term=head.next_term,
            round=head.state_round,
            members=head.members,
            voters=self._p.chain.voters,
            faults=self._p.chain.voting.faults,
            digest=None if state is None else self._p.cache.digest(state).hex(),
            missing=self._engine.member.missing(),
            trains_alone=self._engine.member.trains_alone,
            unready=self._engine.member.unready(),
            stuck=self._p.training_client.stuck,
            rollbacks={} if machine is None else machine.consents(),
            amendments={} if machine is None else machine.amend_consents(),
            amended=self._p.chain.amended(head.next_round),
            abstains=self._engine.member.abstains,
            turn_in_rounds=rounds_to_turn(line, me, chain.seats) if are_few(chain.seats) and not outside else None,
            outside=LinePlace.in_line(line, me) if outside else None,
        )
