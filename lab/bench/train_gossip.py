"""The strategy `gossip` in one process: every node's own weights and steps, without network, all in the same round.

Vectors, outer steps and shares of the data are those of a node (`GossipSteps`, `Replica`), and so are pairs: those that
everyone proposes. Of an odd number one steps alone. So nodes that all see each other, and are all in time, come to the
same weights, to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import MappingProxyType

import numpy as np
import torch

from shoal.collectives.codecs import F32
from shoal.collectives.gossip import GossipVector, decode_vector
from shoal.collectives.state import CertifiedState
from shoal.lab.bench.train_spec import CPU, replica_of, workload_of
from shoal.node.gossip.step import GossipSteps
from shoal.node.training.inner_state import SavedInner
from shoal.node.training.trainer_messages import Assignment, Contribution, Train
from shoal.node.training.training_client import share_of
from shoal.node.workload import Workload
from shoal.protocol.errors import LocalError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.manifest import Manifest
from shoal.protocol.pairing import pairs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Made:
    """A node's work of a round. delta: what its inner steps made of its weights, ``(numel,) float32``."""

    number: int
    tokens: int
    delta: F32
    vector: GossipVector


class GossipNode:
    """One node: its replica, its weights and momentum, and its name. It stands on `state`, or else on S(0).

    kept: what its replica's optimizer knew before a restart. device: where its replica computes.
    """

    def __init__(
        self,
        identity: Identity,
        manifest: Manifest,
        workload: Workload,
        state: CertifiedState | None = None,
        kept: SavedInner | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.peer_id = identity.peer_id
        self._manifest = manifest
        self.replica = replica_of(manifest, workload, device)
        numel, buffers = self.replica.layout.numel, self.replica.layout.buffer_chunks(manifest.round.chunk_values)
        self._steps = GossipSteps(manifest, self.peer_id, numel, buffers)
        self._out: F32 = np.zeros(numel, np.float32)
        self._made: _Made | None = None
        self.state = state or self._initial()
        if kept is not None:
            self.replica.restore(kept, exact=False)
        self.replica.apply(self.state.anchor, round=self.state.round)

    def _initial(self) -> CertifiedState:
        self.replica.write_initial(self._out)
        return CertifiedState.initial(self._out.copy(), self.replica.layout.digest)

    def train(self, round: int) -> None:
        """Make the inner steps of `round`, and the vector."""
        founders = self._manifest.swarm.founders
        share = Assignment(
            seed=self._manifest.workload.seed,
            round=round,
            member=share_of(self.peer_id, founders),
            members=len(founders),
        )
        steps = self._manifest.sync.round_steps
        self.replica.begin(Train(round=round, steps=steps, assignment=share, certified_tokens=self.state.tokens))
        report = None
        while not isinstance(report, Contribution):
            report = self.replica.step(self._out)
        delta = self._steps.delta(self._out)
        vector = self._steps.vector(self.state, delta, round)
        self._made = _Made(number=report.number, tokens=report.tokens, delta=delta, vector=vector)

    @property
    def made(self) -> _Made:
        """Result of this round's training. Raises LocalError before `train`."""
        if self._made is None:
            raise LocalError("no vector of this round was made")
        return self._made

    def step(self, partner: GossipNode | None, nodes: int) -> None:
        """Make the outer step of a round in which so many nodes are seen, with a partner's vector or without."""
        made = self.made
        other = None
        if partner is not None:
            vector = partner.made.vector
            other = decode_vector(vector.chunks, vector.grid, vector.offer.codec)
        self.state = self._steps.stepped(self.state, made.delta, made.vector, other=other, tokens=made.tokens * nodes)
        self.replica.apply(self.state.anchor, round=self.state.round, taken=made.number)

    def evaluate(self) -> float:
        """The held-out loss of its own weights."""
        return self.replica.evaluate()


class GossipSwarm:
    """Nodes that train in turn. Torch's threads should be one, as a testnet's nodes have.

    texts: where the text of each node lies that has its own.
    """

    def __init__(
        self,
        manifest: Manifest,
        identities: Sequence[Identity],
        texts: Mapping[PeerId, Path] = MappingProxyType({}),
        device: torch.device = CPU,
    ) -> None:
        self._manifest = manifest
        self._device = device
        self._workload = workload_of(manifest)
        workloads = {peer: workload_of(manifest, text) for peer, text in texts.items()}
        self.nodes = {
            one.peer_id: GossipNode(one, manifest, workloads.get(one.peer_id, self._workload), device=device)
            for one in identities
        }
        self.round = 0
        self.tokens = 0
        """Trained on by all nodes."""
        self.wire_bytes = 0
        """Bytes that all nodes would have sent over lanes, without frames and control."""

    def replace(self, gone: PeerId, identity: Identity) -> None:
        """End a node, and begin another on a snapshot of the first that is left."""
        del self.nodes[gone]
        snapshot = next(iter(self.nodes.values())).state
        self.nodes[identity.peer_id] = GossipNode(
            identity, self._manifest, self._workload, snapshot, device=self._device
        )

    def run_round(self, partners: Mapping[PeerId, PeerId] | None = None) -> None:
        """Train all, exchange vectors two by two, and step.

        partners: whose vector each takes, where that is known; who is not in it steps alone.
        """
        self.round += 1
        for node in self.nodes.values():
            node.train(self.round)
        partners = self._proposed() if partners is None else partners
        for peer, node in self.nodes.items():
            partner = partners.get(peer)
            node.step(None if partner is None else self.nodes[partner], len(self.nodes))
            self.tokens += node.made.tokens
            if partner is not None:
                self.wire_bytes += sum(chunk.nbytes for chunk in self.nodes[partner].made.vector.chunks)

    def _proposed(self) -> dict[PeerId, PeerId]:
        """Partner that everyone proposes to each peer in this round."""
        found = pairs(self._manifest.swarm_id, self.round, self.nodes)
        return {one: other for pair in found for one, other in (pair, pair[::-1])}

    def evaluate(self) -> float:
        """The mean of all nodes' held-out losses, each of its own weights."""
        return fmean(node.evaluate() for node in self.nodes.values())
