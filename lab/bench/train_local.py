"""A whole swarm's training in one process, without network and agreement: for tuning, and to check the real one.

Everything that values depend on is what a node runs: `Replica` and its accounts, `Contributions` with their codec and
residuals, the plan and its weights, the sum and the signed finals, the outer step. What is left out decides nothing of
them as long as nobody fails: messages, lanes, votes. So a run leads to the digests that real nodes certify if their
keys, batches and contributors are the same, and the codec needs no dither, whose numbers come from the certificates.
Where seats are few all nodes have made their contribution when those are given out; real nodes that have none may be
amid their steps, and go on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec
import numpy as np
import torch

from shoal.collectives.aggregate import Term as Summand
from shoal.collectives.aggregate import combine
from shoal.collectives.codecs import F32
from shoal.collectives.finals import FinalChunk, FinalFormat, Finals
from shoal.collectives.fragments import Fragments
from shoal.collectives.grid import Grid
from shoal.collectives.outer import OuterSettings, advance
from shoal.collectives.partition import deal
from shoal.collectives.state import CertifiedState, StateHeader
from shoal.lab.bench.skewed_text import texts_of_nodes
from shoal.lab.bench.train_gossip import GossipSwarm
from shoal.lab.bench.train_spec import CPU, Point, TrainBench, replica_of, workload_of
from shoal.node.state.contributions import Contributions
from shoal.node.training.devices import pick_device
from shoal.node.training.trainer_messages import Assignment, Contribution, Train
from shoal.node.workload import Workload
from shoal.protocol.certificate import genesis
from shoal.protocol.errors import ConfigError, LocalError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.manifest import Manifest
from shoal.protocol.messages import Plan, Ready, Value
from shoal.protocol.planning import JOINER, OBSERVER, PlanOrder, RoundSettings, absent_ready, make_plan
from shoal.protocol.seats import Line, are_few
from shoal.protocol.strategies.table import STRATEGIES
from shoal.protocol.voting import lead


class LocalNode:
    """One node's training: its replica, what it owes the swarm, and its key."""

    def __init__(self, identity: Identity, manifest: Manifest, workload: Workload, device: torch.device = CPU) -> None:
        self.identity = identity
        self._manifest = manifest
        sync = manifest.sync
        self._replica = replica_of(manifest, workload, device)
        layout = self._replica.layout
        self.layout_hash = layout.digest
        chunk_values = manifest.round.chunk_values
        buffers = layout.buffer_chunks(chunk_values)
        self.fragments = Fragments(Grid(layout.numel, chunk_values), sync.fragments, buffers)
        self.contributions = Contributions(
            self.fragments,
            sync.plan_codec,
            manifest.round.staleness_rounds,
            sender=identity.peer_id,
            error_feedback=sync.error_feedback,
            mixing=sync.applied_mixing,
            gradients=sync.exchanges_gradients,
            few_seats=are_few(manifest.seats),
        )
        self._out: F32 = np.zeros(layout.numel, np.float32)

    def initial_state(self) -> CertifiedState:
        """S(0), as `TrainingClient.initial_state` has it; only before the first `stand_on`."""
        self._replica.write_initial(self._out)
        return CertifiedState.initial(self._out.copy(), self.layout_hash, OuterSettings.of(self._manifest).kinds)

    def stand_on(self, state: CertifiedState) -> None:
        """Make the steps of overlap, then take over a certified state, keeping progress that was not taken."""
        while self._replica.overlapping:
            self._replica.step(self._out)
        self._replica.apply(state.anchor, round=state.round, taken=self.contributions.taken)

    def train(self, head: Value, state: CertifiedState) -> Ready:
        """Make the inner steps of the round after `head`, and encode what they led to."""
        members = head.members
        share = Assignment(
            seed=self._manifest.workload.seed,
            round=head.next_round,
            member=members.index(self.identity.peer_id),
            members=len(members),
        )
        steps = self._manifest.sync.round_steps
        self._replica.begin(Train(round=head.next_round, steps=steps, assignment=share, certified_tokens=state.tokens))
        report = None
        while not isinstance(report, Contribution):
            report = self._replica.step(self._out)
        values = self._out[: self.contributions.fragment(report.round).numel].copy()
        made = self.contributions.make(
            report.round, report.number, report.tokens, values, base=head.hash, anchor=state.anchor
        )
        return made.ready(head, head.digest, sender=self.identity.peer_id, upload=0, download=0, reaches=())

    def evaluate(self) -> float:
        """The held-out loss of the state it stands on."""
        return self._replica.evaluate()


class LocalSwarm:
    """Nodes that train in turn and certify by themselves. Torch's threads should be one, as a testnet's nodes have.

    texts: where the text of each node lies that has its own. Raises ConfigError for a strategy without a common state,
    and where who has no seat waits outside.
    """

    def __init__(
        self,
        manifest: Manifest,
        identities: Sequence[Identity],
        texts: Mapping[PeerId, Path] = MappingProxyType({}),
        device: torch.device = CPU,
    ) -> None:
        if not manifest.strategy.certifies:
            known = ", ".join(one.name for one in STRATEGIES.values() if one.certifies or one.exchanges_models)
            raise ConfigError(
                f"{manifest.strategy.name} cannot run in one process ({known} can); leave --in-process out"
            )
        if manifest.waits_outside:
            raise ConfigError('membership.waiting = "outside" cannot run in one process; leave --in-process out')
        self._manifest = manifest
        self._device = device
        self._workload = workload_of(manifest)
        self._own_workloads = {peer: workload_of(manifest, text) for peer, text in texts.items()}
        self.paused: Collection[PeerId] = ()
        """Who only observes the next round, as a node does that its user paused."""
        self.nodes: dict[PeerId, LocalNode] = {}
        for identity in identities:
            self._add(identity)
        first = next(iter(self.nodes.values()))
        self.head = genesis(manifest.swarm_id, manifest.swarm.founders)
        self._line = Line(self.head.members)
        self.state = first.initial_state()
        self.header: StateHeader | None = None
        self._fragments = first.fragments
        self._outer = OuterSettings.of(manifest)
        self.wire_bytes = 0
        """Bytes that all nodes would have sent over lanes, without frames and control."""
        for node in self.nodes.values():
            node.stand_on(self.state)

    @property
    def round(self) -> int:
        """Number of the newest certified round."""
        return self.state.round

    @property
    def tokens(self) -> int:
        """Tokens certified so far."""
        return self.state.tokens

    def add(self, identity: Identity) -> None:
        """Add a node: it stands on the certified state, and contributes from the second round on."""
        self._add(identity).stand_on(self.state)

    def _add(self, identity: Identity) -> LocalNode:
        workload = self._own_workloads.get(identity.peer_id, self._workload)
        node = self.nodes[identity.peer_id] = LocalNode(identity, self._manifest, workload, self._device)
        return node

    def replace(self, gone: PeerId, identity: Identity) -> None:
        """End a node with all that it had not contributed, and add another."""
        del self.nodes[gone]
        self.add(identity)

    def run_round(self) -> None:
        """Train, contribute, reduce, apply: from S(e − 1) to S(e)."""
        head, members = self.head, self.head.members
        readies = {peer: self._announced(peer, node) for peer, node in self.nodes.items()}
        plan_order = PlanOrder(view=0, attempt=0, planner=lead(head, 0), evicted=())
        joiners = readies.keys() - set(members)
        fragments = self._fragments
        settings = RoundSettings.of(self._manifest, fragments.of_round(head.next_round).numel, fragments.buffers)
        line = self._line.after(head)
        plan = make_plan(head, plan_order, readies, weightless=joiners, settings=settings, deal=deal, line=line)
        finals = self._reduce(plan)
        self.state, self.header = advance(self.state, finals, self._outer)
        self.head = Value(
            swarm=head.swarm,
            term=plan.term,
            round=plan.round,
            base=head.hash,
            plan=plan.hash,
            planner=plan.planner,
            members=tuple(sorted(self.nodes)),
            bitmaps=finals.bitmaps_root,
            tokens=finals.tokens,
            digest=self.header.digest,
            counted=finals.counted if are_few(self._manifest.seats) else msgspec.UNSET,
        )
        self._line.follow(self.head, self.head.round)
        for place, participant in enumerate(plan.participants):
            node = self.nodes[participant.peer]
            node.contributions.settle(plan.round, finals.included(place), finals)
            node.stand_on(self.state)

    def _announced(self, peer: PeerId, node: LocalNode) -> Ready:
        head = self.head
        if peer not in head.members:
            return absent_ready(JOINER, head, head.digest)
        return absent_ready(OBSERVER, head, head.digest) if peer in self.paused else node.train(head, self.state)

    def evaluate(self) -> float:
        """The held-out loss of the state."""
        return next(iter(self.nodes.values())).evaluate()

    def _reduce(self, plan: Plan) -> Finals:
        """Reduce the contributions as their owners do, chunk by chunk."""
        final_format = FinalFormat(plan)
        return Finals(plan=plan, chunks=tuple(self._reduce_chunk(final_format, chunk) for chunk in range(plan.chunks)))

    def _reduce_chunk(self, final_format: FinalFormat, chunk: int) -> FinalChunk:
        plan, owner = final_format.plan, final_format.owner(chunk)
        summands = []
        for place in plan.contributors():
            participant = plan.participants[place]
            made = self.nodes[participant.peer].contributions.made
            if made is None:
                raise LocalError("a contributor without a contribution")
            summands.append(Summand(place, participant.weight, made.encoded.encoded(chunk), plan.clip(place)))
            if participant.peer != owner:
                self.wire_bytes += made.encoded.payload(chunk).nbytes
        mean = np.empty(final_format.grid.length(chunk), np.float32)
        included, undecodable = combine(final_format.contributed(chunk), summands, final_format.aggregate, mean)
        if undecodable:
            peers = [plan.participants[place].peer for place in undecodable]
            raise LocalError(f"chunk {chunk}: the contributions of {peers} do not decode")
        final = final_format.sign(self.nodes[owner].identity, chunk, mean, included)
        self.wire_bytes += final.payload.nbytes * (len(plan.participants) - 1)
        return final


def train_locally(bench: TrainBench, seed: int, tell: Callable[[Point], None] = lambda _: None) -> list[Point]:
    """The strategy's curve, until the tokens asked for are counted: a point before round 1 and after each round.

    Raises ConfigError, FloatingPointError. Keys follow from the seed, so equal calls give equal curves.
    """
    identities = [_identity(seed, index) for index in range(bench.scenario(seed).places)]
    peers = [identity.peer_id for identity in identities]
    manifest, founders = bench.manifest(seed, peers[: bench.nodes]), identities[: bench.nodes]
    kind = GossipSwarm if manifest.strategy.exchanges_models else LocalSwarm
    with texts_of_nodes(bench, seed) as texts:
        swarm = kind(manifest, founders, dict(zip(peers, texts, strict=False)), pick_device(bench.device))
        return list(_rounds(bench, swarm, peers, identities, tell))


def _rounds(
    bench: TrainBench,
    swarm: GossipSwarm | LocalSwarm,
    peers: Sequence[PeerId],
    identities: Sequence[Identity],
    tell: Callable[[Point], None],
) -> Iterator[Point]:
    while True:
        point = Point(
            round=swarm.round,
            tokens=swarm.tokens,
            wire_bytes=swarm.wire_bytes,
            val_loss=swarm.evaluate(),
        )
        tell(point)
        yield point
        if point.tokens >= bench.tokens:
            return
        for old, new in bench.replacements(point.round + 1):
            swarm.replace(peers[old], identities[new])
        if isinstance(swarm, LocalSwarm):
            swarm.paused = [peers[index] for index in bench.away(point.round + 1)]
        swarm.run_round()


def _identity(seed: int, index: int) -> Identity:
    return Identity.from_seed(seed.to_bytes(16, "little") + index.to_bytes(16, "little"))
