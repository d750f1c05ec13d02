"""Members and real reductions in one virtual swarm: everything of a certified round but sockets and disks.

`RoundLab` with its stand-in for the reduction replaced by `Reduction`s whose payloads travel with delay, in any order,
to nodes that may be dead, hung, cut off or not there yet. `check` then recomputes every decided round.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import pytest

from shoal.collectives.contribution import EncodedContribution
from shoal.collectives.finals import Finals
from shoal.collectives.grid import Grid
from shoal.collectives.progress import ReduceProgress
from shoal.collectives.reduce import Reduction
from shoal.collectives.reference import reference
from shoal.protocol import messages
from shoal.protocol.effects import CloseOff, Repair, StartReduce
from shoal.protocol.identity import PeerId
from shoal.protocol.inputs import OfPlan
from shoal.protocol.messages import ChunkResults, Plan, Report, domain_hash
from shoal.swarm.lanes.frame import FrameKind
from tests.protocol.lab import paper_signature
from tests.protocol.round_lab import RoundLab
from tests.protocol.round_node import SETTINGS, Node

GRID = Grid(SETTINGS.numel, SETTINGS.chunk_values)
LATE_S = 1.0
FRAME_WAIT_S = 15.0
FRAME_RETRY_S = 0.1
FRAME_LATENCY_S = (0.01, 0.3)


@pytest.fixture
def paper_statements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunk statements verify against PaperIdentity's signatures."""
    monkeypatch.setattr(
        messages, "verify", lambda peer, domain, text, signature: signature == paper_signature(peer, domain, text)
    )


@dataclass
class Bench:
    """A node's reduction under way, and when something last came from whom."""

    reduction: Reduction
    life: int
    heard_at: dict[PeerId, float] = field(default_factory=dict)
    since: float = 0.0


class SwarmLab(RoundLab):
    """`unreachable` pairs have no lane between them (their messages arrive); nothing goes around it here."""

    def __init__(self, nodes: int, *, seed: int = 0, stall_s: float = 2.0, loss: float = 0.0) -> None:
        self.benches: dict[int, Bench] = {}
        self.reductions: list[Reduction] = []
        self.contributions: dict[bytes, EncodedContribution] = {}
        self.results: dict[tuple[int, bytes], Finals] = {}
        super().__init__(nodes, seed=seed, stall_s=stall_s, loss=loss, keeps_contribution=False)

    # -- contributions and reductions --------------------------------------------------------------------

    def _root(self, node: Node) -> bytes:
        values = np.random.default_rng(len(self.contributions)).standard_normal(GRID.numel).astype(np.float32)
        encoded = EncodedContribution.encode(values, GRID, SETTINGS.codec)
        self.contributions[encoded.root] = encoded
        return encoded.root

    def _reduce(self, number: int, effect: StartReduce | Repair) -> None:
        node, plan = self.nodes[number], effect.plan
        bench = self.benches.get(number)
        going_on = bench is not None and bench.life == node.life and bench.reduction.lineage == plan.lineage
        if bench is None or not going_on or isinstance(effect, StartReduce):
            place = plan.number(node.peer)
            assert place is not None
            bench = self._open(number, plan, self.contributions.get(plan.participants[place].root))
            bench.reduction.start()
        else:
            bench.heard_at, bench.since = {}, self.now
            bench.reduction.repair(plan, dict(effect.held if isinstance(effect, Repair) else ()))

    def _open(self, number: int, plan: Plan, contribution: EncodedContribution | None) -> Bench:
        node = self.nodes[number]
        life = node.life

        def on_progress(progress: ReduceProgress) -> None:
            if progress.final == progress.total:
                self.after(0.01, lambda: self._complete(number, life, bench.reduction))

        def post(to: PeerId, kind: FrameKind, chunk: int, payload: memoryview) -> None:
            plan_order = (bench.reduction.plan.view, bench.reduction.plan.attempt)
            frame = (bench.reduction.lineage, plan_order, kind, chunk, bytes(payload))
            self._carry(number, life, self.number(to), frame, self.now)

        reduction = Reduction(
            plan=plan, identity=node.identity, contribution=contribution, post=post, on_progress=on_progress
        )
        if number in self.benches:
            self.benches[number].reduction.close()
        self.reductions.append(reduction)
        bench = self.benches[number] = Bench(reduction, life, since=self.now)
        return bench

    def _close_off(self, node: Node, asked: CloseOff) -> tuple[ChunkResults, ...]:
        bench = self.benches.get(node.number)
        if bench is None or bench.life != node.life or bench.reduction.lineage != asked.lineage:
            return ()
        return bench.reduction.close_off(asked.evicted)

    def _try_reduce(self, plan: Plan) -> None:
        """Reductions go on by themselves."""

    # -- frames ------------------------------------------------------------------------------------------

    def _carry(self, number: int, life: int, to: int, frame: tuple[object, ...], sent_at: float) -> None:
        """A lane: keeps order with nothing, loses nothing while both ends live, and waits for who is away."""
        self.after(self.rng.uniform(*FRAME_LATENCY_S), lambda: self._frame(number, life, to, frame, sent_at))

    def _frame(self, number: int, life: int, to: int, frame: tuple[object, ...], sent_at: float) -> None:
        sender, node = self.nodes[number], self.nodes[to]
        if not node.up or self.now - sent_at > FRAME_WAIT_S:
            return
        if (sender.life == life and sender.hung and self.rng.random() < 0.5) or not self.reach(number, to):
            self.after(FRAME_RETRY_S, lambda: self._frame(number, life, to, frame, sent_at))
            return
        if not node.awake(node.life, lambda: self._frame(number, life, to, frame, sent_at)):
            return
        bench = self.benches.get(to)
        lineage, plan_order, kind, chunk, payload = frame
        assert isinstance(plan_order, tuple)
        assert isinstance(chunk, int)
        assert isinstance(payload, bytes)
        plan = None if bench is None or bench.life != node.life else bench.reduction.plan
        if plan is None or bench is None or plan.lineage != lineage or (plan.view, plan.attempt) < plan_order:
            self.after(FRAME_RETRY_S, lambda: self._frame(number, life, to, frame, sent_at))
            return
        bench.heard_at[sender.peer] = self.now
        reduction = bench.reduction
        contribution = kind is FrameKind.CONTRIBUTION
        where = reduction.contribution_region if contribution else reduction.final_region
        region = where(sender.peer, chunk, 0, len(payload))
        if region is not None:
            region[:] = payload
            (reduction.contribution_received if contribution else reduction.final_received)(
                sender.peer, chunk, 0, region
            )

    # -- what comes of it --------------------------------------------------------------------------------

    def _complete(self, number: int, life: int, reduction: Reduction) -> None:
        node = self.nodes[number]
        awake = node.awake(life, lambda: self._complete(number, life, reduction))
        if awake and reduction.final_chunks == reduction.plan.chunks:
            finals = reduction.result()
            self.results[number, finals.plan.hash] = finals
            self.plans[finals.plan.hash] = finals.plan
            self._reduced(node, life, finals)

    @staticmethod
    def report_of(finals: OfPlan) -> Report:
        assert isinstance(finals, Finals)
        plan = finals.plan
        return Report(
            term=plan.term,
            round=plan.round,
            base=plan.base,
            plan=plan.hash,
            digest=domain_hash("digest", plan.base, finals.concatenated(), finals.tokens.to_bytes(8, "little")),
            bitmaps=finals.bitmaps_root,
            tokens=finals.tokens,
        )

    def _stalled(self, node: Node) -> tuple[frozenset[PeerId], frozenset[PeerId]] | None:
        bench = self.benches.get(node.number)
        if node.reducing is None or bench is None or bench.life != node.life:
            return None
        waiting = bench.reduction.waiting_for()

        def silent(peers: Collection[PeerId], limit_s: float) -> frozenset[PeerId]:
            return frozenset(p for p in peers if self.now - max(bench.heard_at.get(p, 0.0), bench.since) >= limit_s)

        limit_s = self._stall_s * 2 ** min(bench.reduction.plan.attempt, 3)
        direct, late = silent(waiting.contributions, limit_s), silent(waiting.finals, limit_s + LATE_S)
        return (direct, late) if direct or late else None

    # -- checks ------------------------------------------------------------------------------------------

    def check(self, first: int = 1) -> None:
        """Every decided round from `first` on is exact at everyone who reduced it, and nobody signed a chunk of a
        lineage twice."""
        heights = max(node.height for node in self.nodes)
        for round in range(first, heights + 1):
            value = self.value(round)
            held = [finals for (_, plan_hash), finals in self.results.items() if plan_hash == value.plan]
            assert held, f"round {round} was certified from nothing"
            plan = held[0].plan
            given = {p.peer: self.contributions[p.root].concatenated() for p in plan.participants if p.weight}
            want = reference(plan, given, held[0].bitmaps)
            for finals in held:
                assert finals.bitmaps == held[0].bitmaps
                assert finals.concatenated() == want.finals
                assert self.report_of(finals).digest == value.digest
            assert value.tokens == held[0].tokens
            for place, participant in enumerate(plan.participants):
                if participant.weight and participant.peer not in plan.evicted:
                    assert all(held[0].included(place)), "who stayed is in every chunk"
        signed: dict[tuple[PeerId, bytes, int], bytes] = {}
        for reduction in self.reductions:
            for chunk, final in reduction._signed.items():
                word = final.statement
                assert signed.setdefault((word.owner, word.plan, chunk), word.result) == word.result
