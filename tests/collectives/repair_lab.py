"""Reductions that lose participants: deaths, close-offs and revised plans at any point of the deliveries.

What stands for the lead here is `revise_plan` and `check_plan` themselves; what stands for the lanes is a heap of
pieces, delivered in any order. As with lanes, a piece that was sent under a newer revision than its receiver follows
waits for that. The dead neither send nor receive; what was on its way from them may arrive, until it is refused.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import gcd
from typing import Any

import msgspec

from shoal.collectives.commitment import bitmap_indices
from shoal.collectives.contribution import EncodedContribution
from shoal.collectives.finals import Finals
from shoal.collectives.grid import Grid
from shoal.collectives.partition import deal, owner_by_chunk
from shoal.collectives.progress import ReduceProgress
from shoal.collectives.reduce import Post, Reduction
from shoal.collectives.reference import reference
from shoal.protocol.certificate import genesis
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.messages import STATEMENT_DOMAIN, Held, OwnedRange, Plan
from shoal.protocol.planning import Deal, PlanOrder, RoundSettings, check_plan, revise_plan
from shoal.protocol.voting import lead
from shoal.swarm.lanes.frame import FrameKind
from tests.collectives.reduce_lab import WAIT_S, Parcel, Piece, by_peer, cut, deliver, encode, identity, make_plan, peer

SMALL = Grid(10 * 128 - 37, 128)
NODES = 6
START = genesis(bytes(32), [peer(n) for n in range(NODES)])


class Witness(Identity):
    """Signs as ever, and remembers every chunk statement that it made: (chunk, bitmap, result)."""

    def __init__(self, of: Identity) -> None:
        self._of = of
        self.peer_id = of.peer_id
        self.stated: list[tuple[int, bytes, bytes]] = []
        self._held: list[tuple[threading.Event, threading.Event]] = []

    def hold(self) -> tuple[threading.Event, threading.Event]:
        """Stop at the end of the next sum: two events, set when it is there, and to be set for it to go on."""
        self._held.append((threading.Event(), threading.Event()))
        return self._held[-1]

    def sign(self, domain: bytes, message: bytes) -> bytes:
        if domain == STATEMENT_DOMAIN:
            _, chunk, bits, result = msgspec.msgpack.decode(message)
            self.stated.append((chunk, bits, result))
            if self._held:
                reached, go_on = self._held.pop()
                reached.set()
                assert go_on.wait(WAIT_S)
        return self._of.sign(domain, message)


@dataclass
class Node:
    """One participant: its reduction, and the newest plan it has."""

    number: int
    identity: Witness
    plan: Plan
    reduction: Reduction
    events: list[ReduceProgress]
    up: bool = True
    started: bool = False

    @property
    def peer(self) -> PeerId:
        return self.identity.peer_id

    @property
    def plan_order(self) -> tuple[int, int]:
        return self.plan.view, self.plan.attempt


@dataclass
class Swarm:
    """The reductions of one lineage, from the first plan to finals that all survivors have."""

    contributions: Sequence[EncodedContribution | None]
    weights: Sequence[int]
    seed: int = 0
    pieces: list[Piece] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    summed_by: dict[int, set[PeerId]] = field(default_factory=dict)
    posted: list[Parcel] = field(default_factory=list)
    on_post: Callable[[Parcel], None] = lambda parcel: None
    rules: Mapping[str, Any] = field(default_factory=dict)
    """What the plan has of aggregate and clips."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        common = gcd(*self.weights) or 1
        plan = make_plan(self.contributions, [w // common for w in self.weights], base=START.hash)
        view = next(view for view in range(NODES) if plan.number(lead(START, view)) is not None)
        plan = msgspec.structs.replace(plan, view=view, planner=lead(START, view), **self.rules)
        self.settings = RoundSettings(
            numel=plan.numel,
            chunk_values=plan.chunk_values,
            codec=plan.codec,
            grace_s=1.0,
            reduce_deadline_s=10.0,
            weight_cap=1e6,
            norm_clip="clips" in self.rules,
            aggregate=self.rules.get("aggregate", "mean"),
        )
        check_plan(plan, plan.planner, START, self.settings)
        self.plans.append(plan)
        for n in range(len(self.weights)):
            self.nodes.append(self.fresh(n, plan))
        owners = self.nodes[0].reduction.final_format.owner
        self.summed_by = {chunk: {owners(chunk)} for chunk in range(plan.chunks)}

    def fresh(self, n: int, plan: Plan) -> Node:
        """Node `n` with a reduction that begins with `plan`."""
        witness, events = Witness(identity(n)), list[ReduceProgress]()
        reduction = Reduction(
            plan=plan,
            identity=witness,
            contribution=self.contributions[n] if self.weights[n] else None,
            post=self.poster(n),
            on_progress=partial(self.told, events),
        )
        return Node(n, witness, plan, reduction, events)

    def told(self, events: list[ReduceProgress], progress: ReduceProgress) -> None:
        """A reduction tells of its progress."""
        events.append(progress)

    def poster(self, n: int) -> Post:
        def post(to: PeerId, kind: FrameKind, chunk: int, payload: memoryview) -> None:
            sender = self.nodes[n]
            parcel = Parcel(to, sender.peer, kind, chunk, bytes(payload), sender.plan_order)
            self.posted.append(parcel)
            self.pieces += cut(parcel, self.rng)
            self.on_post(parcel)

        return post

    # -- the world --

    @property
    def plan(self) -> Plan:
        """The newest plan there is."""
        return self.plans[-1]

    def survivors(self) -> list[Node]:
        return [node for node in self.nodes if node.up]

    def node_of(self, who: PeerId) -> Node:
        return next(node for node in self.nodes if node.peer == who)

    def start(self, *numbers: int) -> None:
        """Start these, or all."""
        for node in self.nodes:
            if not node.started and node.up and (not numbers or node.number in numbers):
                node.started = True
                node.reduction.start()

    def deliver(self, count: int | None = None, *, only: Callable[[Parcel], bool] = lambda parcel: True) -> None:
        """Deliver `count` pieces, or all that can be, in any order; the others stay."""
        reductions = {node.peer: node.reduction for node in self.survivors()}
        while count is None or count > 0:
            self.pieces = [piece for piece in self.pieces if piece[0].to in reductions]
            ready = [
                i
                for i, (p, _, _) in enumerate(self.pieces)
                if p.plan_order <= self.node_of(p.to).plan_order and only(p)
            ]
            self.rng.shuffle(ready)
            if not ready:
                return
            batch = ready if count is None else ready[:count]
            chosen = [self.pieces[i] for i in batch]
            for i in sorted(batch, reverse=True):
                del self.pieces[i]
            for piece in chosen:
                deliver(reductions, *piece)
            count = None if count is None else count - len(chosen)

    def kill(self, n: int, *, loss: float = 0.0) -> None:
        """Node `n` dies, and `loss` of what it had on its way never arrives."""
        node = self.nodes[n]
        node.up = False
        self.pieces = [p for p in self.pieces if p[0].sender != node.peer or self.rng.random() >= loss]

    # -- the lead's part --

    def evicted(self, plan: Plan) -> tuple[PeerId, ...]:
        """Everyone who is dead, or was evicted by `plan`."""
        dead = {node.peer for node in self.nodes if not node.up}
        return tuple(sorted(dead | set(plan.evicted)))

    def close_off(self, node: Node, evicted: Iterable[PeerId]) -> Held:
        """What `node` says it holds, once it takes nothing more from these."""
        chunks = node.reduction.close_off(evicted)
        return Held(
            term=self.plan.term,
            round=self.plan.round,
            base=self.plan.base,
            lineage=self.plan.lineage,
            evicted=tuple(sorted(evicted)),
            chunks=chunks,
        )

    def revise(
        self,
        helds: Mapping[PeerId, Held],
        evicted: tuple[PeerId, ...],
        *,
        view: int | None = None,
        deal: Deal = deal,
    ) -> Plan:
        """The revised plan by the lead of `view`, who knows no newer plan than its own."""
        view = self.plan.view if view is None else view
        planner = lead(START, view)
        before = self.node_of(planner).plan
        attempt = before.attempt + 1 if before.view == view else 0
        plan = revise_plan(before, PlanOrder(view=view, attempt=attempt, planner=planner, evicted=evicted), helds, deal)
        check_plan(plan, planner, START, self.settings)
        standing = {chunk for results in plan.standing for chunk in results.by_chunk()}
        for owned in plan.owners:
            for chunk in range(owned.start, owned.stop):
                if chunk not in standing:
                    self.summed_by[chunk].add(plan.participants[owned.owner].peer)
        self.plans.append(plan)
        return plan

    def living_view(self, view: int) -> int:
        """The first view from `view` on whose lead lives."""
        while not any(node.up and node.peer == lead(START, view) for node in self.nodes):
            view += 1
        return view

    def next_view(self, view: int, *, knows: Plan) -> int:
        """The same; its lead knows no newer plan than this one."""
        view = self.living_view(view)
        self.node_of(lead(START, view)).plan = knows
        return view

    def adopt(self, node: Node, plan: Plan, helds: Mapping[PeerId, Held] | None = None) -> None:
        """`node` goes on by `plan`, unless it has a newer one."""
        if (plan.view, plan.attempt) > node.plan_order:
            node.plan = plan
            node.reduction.follow(plan)
            node.reduction.repair(plan, helds or {})

    def ask(self) -> dict[PeerId, Held]:
        """All survivors close off the dead, and say what they hold."""
        evicted = self.evicted(self.plan)
        return {node.peer: self.close_off(node, evicted) for node in self.shuffled()}

    def repair(self, *, deal: Deal = deal) -> Plan:
        """One whole repair without the dead."""
        helds, view = self.ask(), self.living_view(self.plan.view)
        plan = self.revise(helds, self.evicted(self.plan), view=view, deal=deal)
        for node in self.shuffled():
            self.adopt(node, plan, helds)
        return plan

    def shuffled(self) -> list[Node]:
        """The survivors in any order."""
        nodes = self.survivors()
        self.rng.shuffle(nodes)
        return nodes

    # -- the judge --

    def finals(self) -> list[Finals]:
        return [node.reduction.result() for node in self.survivors()]

    def check(self) -> Finals:
        """Everything that a repaired reduction promises; returns its finals."""
        plan = self.plan
        for node in self.survivors():
            assert node.reduction.final_chunks == plan.chunks, (node.number, node.reduction.waiting_for())
            assert node.reduction.plan == plan
            assert node.reduction.verify() == []
            assert (node.events[-1].final, node.events[-1].total) == (plan.chunks, plan.chunks)
            waiting = node.reduction.waiting_for()
            assert not waiting.contributions
            assert not waiting.finals
        finals, *others = self.finals()
        for other in others:
            assert [c.payload.tobytes() for c in other.chunks] == [c.payload.tobytes() for c in finals.chunks]
        want = reference(plan, by_peer(plan, self.contributions), finals.bitmaps)
        assert finals.concatenated() == want.finals
        self._check_signers(finals)
        self._check_coverage(finals)
        return finals

    def _check_signers(self, finals: Finals) -> None:
        """Each final is signed by who the plan says; everyone signed a chunk once at most, and no other chunks."""
        final_format = self.survivors()[0].reduction.final_format
        standing = {chunk: result for part in self.plan.standing for chunk, result in part.by_chunk().items()}
        for chunk, final in enumerate(finals.chunks):
            assert final.statement.owner == final_format.owner(chunk)
            assert final.statement.valid()
            assert final.statement.result == standing.get(chunk, final.statement.result)
        for node in self.nodes:
            chunks = [chunk for chunk, _, _ in node.identity.stated]
            assert len(set(chunks)) == len(chunks), f"node {node.number} summed a chunk twice"
            assert all(node.peer in self.summed_by[chunk] for chunk in chunks), "a chunk that was not lost"

    def _check_coverage(self, finals: Finals) -> None:
        """Nobody who is there was left out of any chunk."""
        living = {node.number for node in self.survivors() if self.weights[node.number]}
        for bits in finals.bitmaps:
            assert living <= set(bitmap_indices(bits, len(self.nodes)))


def swarm_of(weights: Sequence[int], name: str = "int8", *, seed: int = 0, **rules: Any) -> Swarm:
    """A swarm with these weights, each with its own contribution, and these rules."""
    contributions = [encode(n, name, SMALL) if weight else None for n, weight in enumerate(weights)]
    return Swarm(contributions, weights, seed, rules=rules)


def running(weights: tuple[int, ...], **rules: Any) -> Swarm:
    """A swarm where everyone has posted its contribution and nothing has arrived."""
    swarm = swarm_of(weights, **rules)
    swarm.start()
    return swarm


def running_without(weights: tuple[int, ...], n: int) -> tuple[Swarm, Plan, set[int]]:
    """A swarm in which all has arrived but what node `n` posted, which is dead; the plan, and the chunks it owned."""
    swarm = running(weights)
    swarm.deliver(only=lambda parcel: parcel.sender != peer(n))
    swarm.kill(n, loss=1.0)
    return swarm, swarm.plan, chunks_of(swarm.plan, n)


def chunks_of(plan: Plan, place: int) -> set[int]:
    return {chunk for chunk, owner in enumerate(owner_by_chunk(plan)) if owner == place}


def sums(swarm: Swarm) -> dict[int, int]:
    """How often each chunk was summed, by anybody."""
    return dict(Counter(chunk for node in swarm.nodes for chunk, _, _ in node.identity.stated))


def to_place(place: int) -> Deal:
    """Deals everything to one of those who remain."""
    return lambda rates, chunks: (OwnedRange(place, 0, chunks),)
