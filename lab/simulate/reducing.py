"""The reductions of one simulated peer: what `node.reducing` is around the same reduction and the same pace."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING

from shoal.collectives.finals import FinalChunk, Finals
from shoal.collectives.reduce import Kept, Reduction
from shoal.lab.simulate.obtaining import Obtaining
from shoal.lab.simulate.serving import Serving
from shoal.lab.simulate.talk import Lacking, Payload, wrong
from shoal.lab.simulate.work import Work
from shoal.node.rounds.copying import Copy, Copying
from shoal.node.rounds.pace import NOBODY, Pace, Told
from shoal.protocol.effects import CloseOff, Repair
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import ChunkResults, Plan
from shoal.swarm.lanes.frame import FrameKind
from shoal.swarm.lanes.socket import Moved

if TYPE_CHECKING:
    from shoal.lab.simulate.peer import SimulatedPeer

MEND_S = 1.0
"""A peer from which nothing came for so long is asked for what it owes again."""
LACKING_BYTES = 400


class Reducing(ABC):
    """One reduction at a time, of the round that `machine` is in."""

    serving: Serving
    work: Work
    obtaining: Obtaining

    def __init__(self, peer: SimulatedPeer) -> None:
        self._peer = peer
        self._swarm = peer.swarm
        self._disk = peer.disk
        self._reduction: Reduction | None = None
        self._kept: dict[bytes, Kept] = {}
        self._closed_to: dict[bytes, frozenset[PeerId]] = {}
        self._posted: dict[tuple[PeerId, FrameKind, int], bytes] = {}
        self._there_at: dict[tuple[PeerId, FrameKind, int], float] = {}
        self._heard_at: dict[PeerId, float] = {}
        self._mended_at: dict[PeerId, float] = {}
        self._received: dict[PeerId, float] = {}
        self._pace: Pace | None = None
        self._stall, self._told = NOBODY, Told()
        self._copying = Copying(self._copy)

    @property
    def _now(self) -> float:
        return self._swarm.timeline.now

    @abstractmethod
    def _computed(self, finals: Finals) -> None:
        """All finals of a plan are here."""

    @abstractmethod
    def _has_finals(self, plan: bytes) -> bool:
        """True if the finals of a plan were here before."""

    def _start_reduce(self, plan: Plan) -> None:
        self._stop_reduction()
        place = plan.number(self._peer.id)
        counted = place is not None and plan.participants[place].weight > 0
        self._reduction = self._swarm.components.reduction(
            plan=plan,
            identity=self._peer.identity,
            contribution=self.work.encoded if counted else None,
            post=partial(self._post, plan.lineage),
            on_progress=lambda progress: None,
            kept=self._kept.setdefault(plan.lineage, Kept()),
        )
        if plan.lineage in self._closed_to:
            self._reduction.close_off(self._closed_to[plan.lineage])
        self._begin_pace(self._reduction)
        self._reduction.start()
        self._look_at_reduction()

    def _repair(self, repair: Repair) -> None:
        plan, reduction = repair.plan, self._reduction
        if reduction is None or reduction.lineage != plan.lineage:
            self._start_reduce(plan)
            return
        reduction.follow(plan)
        reduction.repair(plan, dict(repair.held))
        self._copying.stop()
        self._begin_pace(reduction)
        self._look_at_reduction()

    def _begin_pace(self, reduction: Reduction) -> None:
        self._heard_at = dict.fromkeys(reduction.plan.remaining, self._now)
        self._pace = Pace(reduction, self, self._peer.id, self._now)
        self._stall = NOBODY
        self._told.begin()

    def _close_off(self, asked: CloseOff) -> tuple[ChunkResults, ...]:
        reduction, lineage = self._reduction, asked.lineage
        self._copying.stop()
        self._closed_to[lineage] = self._closed_to.get(lineage, frozenset()) | asked.evicted
        if reduction is None or reduction.lineage != lineage:
            return ()
        return reduction.close_off(asked.evicted)

    def _stop_reduction(self) -> None:
        if self._reduction is not None:
            self._reduction.close()
        self._reduction = self._pace = None
        self._copying.stop()
        self._posted.clear()
        self._there_at.clear()

    def _post(self, lineage: bytes, to: PeerId, kind: FrameKind, chunk: int, payload: memoryview) -> None:
        data = bytes(payload)
        if kind is FrameKind.CONTRIBUTION and "contribution" in self._peer.lies:
            data = wrong(data)
        self._posted[to, kind, chunk] = data
        self._ship(to, Payload(lineage, kind, chunk, data))

    def _ship(self, to: PeerId, payload: Payload) -> None:
        self._swarm.donations.check_duties(self._peer, self.serving.ahead(self._now))
        there_at = self._swarm.ship(self._peer, self._swarm.numbers[to], payload, self._swarm.chunk_bytes)
        self._there_at[to, payload.kind, payload.chunk] = there_at

    def _take_payload(self, sender: int, payload: Payload) -> None:
        reduction, peer = self._reduction, self._swarm.peers[sender].id
        if reduction is None or reduction.lineage != payload.lineage:
            return
        final = payload.kind is FrameKind.FINAL
        where = reduction.final_region if final else reduction.contribution_region
        received = reduction.final_received if final else reduction.contribution_received
        try:
            region = where(peer, payload.chunk, 0, len(payload.data))
            if region is None:
                return
            region[:] = payload.data
            received(peer, payload.chunk, 0, region)
        except RemoteError as error:
            self._swarm.blamed(self._peer.number, sender, str(error))
            return
        self._heard_at[peer] = self._now
        self._received[peer] = self._received.get(peer, 0.0) + self._swarm.chunk_bytes
        self._look_at_reduction()

    def _look_at_reduction(self) -> None:
        reduction = self._reduction
        if reduction is None or reduction.final_chunks != reduction.plan.chunks:
            return
        if not self._has_finals(reduction.plan.hash) and not reduction.verify():
            self._computed(reduction.result())

    def _brings(self, plan: bytes) -> bool:
        """True if the reduction under way will have the finals of `plan` by itself."""
        under_way = self._reduction is not None and self._reduction.plan.hash == plan
        return under_way and not (self._stall.peers | self._stall.late) - {self._peer.id}

    def _look_at_stalls(
        self, now: float, *, overdue: bool = False
    ) -> tuple[frozenset[PeerId], frozenset[PeerId]] | None:
        """Ask again for what is owed; who moves nothing for the stall deadline, and is late, if there is news."""
        reduction = self._reduction
        if reduction is None or reduction.final_chunks == reduction.plan.chunks:
            return None
        waiting = reduction.waiting_for()
        for peer in sorted((waiting.contributions | waiting.finals) - {self._peer.id}):
            if now - max(self._heard_at.get(peer, 0.0), self._mended_at.get(peer, 0.0)) >= MEND_S:
                self._mended_at[peer] = now
                contributions, finals = reduction.lacking(peer)
                asked = Lacking(reduction.lineage, frozenset(contributions), frozenset(finals))
                self._swarm.send(self._peer, self._swarm.numbers[peer], asked, LACKING_BYTES)
        if reduction.delegate is not None:  # of others the finals come from their owners here, however late
            closed_to = self._closed_to.get(reduction.lineage, frozenset())
            self._copying.look(reduction, (), now, closed_to=closed_to)
        if self._pace is None:
            return None
        stall = self._stall = self._pace.look(now)
        stall = self._pace.overdue(stall) if overdue else stall
        is_due = self._told.is_due(stall, now, nodes=len(reduction.plan.participants))
        return (stall.peers, stall.late) if is_due else None

    def _copy(self, copy: Copy) -> None:
        """Have finals from those who have all of them."""
        reduction = copy.reduction

        def take(final: FinalChunk) -> None:
            reduction.take_copy(final)
            self._look_at_reduction()

        def ended(done: bool) -> None:
            self._copying.over(copy, failed_at=None if done else self._now)

        self._swarm.met["finals of the delegate"] += copy.donors == [reduction.delegate]
        self._swarm.met["finals of others than the delegate"] += copy.donors != [reduction.delegate]
        fetching = self.obtaining.copy_finals(reduction.final_format, copy.chunks, copy.donors, take, ended)
        copy.cancel = fetching.cancel

    def moved(self, peer: PeerId) -> Moved:
        """Bytes that came from `peer` over its lane; what it takes is not modelled."""
        return Moved(received=int(self._received.get(peer, 0)), taken=0)

    def queued_bytes(self, peer: PeerId) -> int:
        """Every kernel takes what is posted."""
        return 0

    def _send_again(self, sender: int, asked: Lacking) -> None:
        if self._reduction is None or self._reduction.lineage != asked.lineage:
            return
        peer = self._swarm.peers[sender].id
        for kind, chunks in ((FrameKind.CONTRIBUTION, asked.contributions), (FrameKind.FINAL, asked.finals)):
            for chunk in sorted(chunks):
                data = self._posted.get((peer, kind, chunk))
                if data is not None and self._there_at[peer, kind, chunk] <= self._now:
                    self._ship(peer, Payload(asked.lineage, kind, chunk, data))
