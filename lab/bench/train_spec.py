"""Specification of `shoal bench train`: a strategy and synchronous data parallel, on equal terms.

Both begin with the parameters drawn from the manifest's seed. In round e, member m of n draws its batches from
`Assignment(seed, e, m, n)`; under synchronous data parallel the same n members take as many steps with the same
batches. Inner optimizer, its settings, and the schedule by the swarm's tokens are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import torch

from shoal.node.training.inner_loop import Replica
from shoal.node.training.trainer_messages import InnerSettings, SyncSettings
from shoal.node.workload import Workload, load_workload
from shoal.node.workloads.text import TextWorkload
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.manifest import Manifest
from shoal.protocol.manifest_sync import SyncSection
from shoal.protocol.manifest_workload import Option
from shoal.testnet.scenario import NODE_LIMIT, ROUND_LIMIT, Fault, Scenario
from shoal.testnet.swarm import testnet_manifest

WORKLOAD: Final = "text"
CHURN_PERIOD_ROUNDS: Final = 5
SLOW_LIMIT: Final = 100.0
NOBODY: Final = Identity.from_seed(bytes(32)).peer_id
"""A founder for a manifest whose founders are of no consequence."""
SECTIONS: Final = ("sync", "inner", "round")


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """State of training after a round: certified tokens, bytes sent by all so far, held-out loss."""

    round: int
    tokens: int
    wire_bytes: int
    val_loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBench:
    """One comparison. churn: the share of the nodes that is replaced every 5 rounds. slow: of one node, how many times.

    codec: None for the strategy's usual one. options: of the workload. keys: further ones of the manifest's sections
    `SECTIONS`, by section. Raises ConfigError for what cannot be run.
    """

    strategy: str = "diloco"
    nodes: int = 4
    tokens: int = 1_000_000
    codec: str | None = None
    inner_steps: int = 30
    churn: float = 0.0
    slow: float = 1.0
    options: Mapping[str, Option] = field(default_factory=dict)
    keys: Mapping[str, Mapping[str, Option]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= NODE_LIMIT or self.inner_steps < 1:
            raise ConfigError(f"--nodes is 1 to {NODE_LIMIT}, and --inner-steps at least 1")
        if self.tokens < 1:
            raise ConfigError("--tokens is the number of tokens that all nodes together train on; give at least 1")
        if not 0 <= self.churn < 0.5:
            raise ConfigError("--churn is a share below 0.5, for of each electorate more than half has to stay")
        if not 1 <= self.slow <= SLOW_LIMIT:
            raise ConfigError(f"--slow says how many times slower one node is: 1 to {SLOW_LIMIT:g}")
        if self.churn and self.slow > 1:
            raise ConfigError("--churn and --slow are measured one at a time; leave one of them out")
        self.manifest(0, [NOBODY])

    @property
    def round_tokens(self) -> int:
        """Number of tokens in a round in which every node counts."""
        workload = load_workload(WORKLOAD, self.options, None)
        assert isinstance(workload, TextWorkload)
        return self.nodes * self._sync.round_steps * workload.batch * workload.context

    @property
    def _sync(self) -> SyncSection:
        return self.manifest(0, [NOBODY], rounds=1).sync

    @property
    def full_rounds(self) -> int:
        """Number of rounds where nobody is replaced."""
        return -(-self.tokens // self.round_tokens)

    @property
    def replaced(self) -> int:
        """Number of nodes that are replaced at a time."""
        return max(1, round(self.churn * self.nodes)) if self.churn else 0

    @property
    def rounds(self) -> int:
        """Number of rounds to allow: replacements cost some, and so do fragments until each has had its first.

        How long a newcomer needs to start, in rounds, depends on the machine, and so do the steps that nodes of
        different speed share out among themselves: there is room for as many again.
        """
        rounds = self.full_rounds + self._sync.fragments - 1
        return 2 * rounds if self.replaced or self.slow > 1 else rounds

    def replacements(self, round: int) -> Sequence[tuple[int, int]]:
        """(who goes, who comes) as `round` begins: always the nodes that have been there longest."""
        times, rest = divmod(round - 1, CHURN_PERIOD_ROUNDS)
        if not self.replaced or rest or not times:
            return ()
        first = (times - 1) * self.replaced
        return [(first + i, self.nodes + first + i) for i in range(self.replaced)]

    def scenario(self, seed: int) -> Scenario:
        """The testnet that runs the strategy. Raises ConfigError."""
        return self._scenario(seed, self.rounds)

    def _scenario(self, seed: int, rounds: int) -> Scenario:
        swaps = [(number, *swap) for number in range(1, rounds + 1) for swap in self.replacements(number)]
        if rounds > ROUND_LIMIT or self.nodes + len(swaps) > NODE_LIMIT:
            raise ConfigError(
                f"{self.tokens} tokens take {rounds} rounds and {self.nodes + len(swaps)} nodes, more than "
                f"{ROUND_LIMIT} or {NODE_LIMIT}; give fewer --tokens or more --inner-steps"
            )
        kills = [Fault(kind="kill", node=old, round=number) for number, old, _ in swaps]
        joins = [Fault(kind="join", node=new, round=number) for number, _, new in swaps]
        return Scenario(
            nodes=self.nodes,
            rounds=rounds,
            tokens=self.tokens,
            seed=seed,
            strategy=self.strategy,
            codec=self.codec,
            workload=WORKLOAD,
            options=dict(self.options),
            inner_steps=self.inner_steps,
            sync={"balance": self.slow > 1, **self.keys.get("sync", {})},
            inner=dict(self.keys.get("inner", {})),
            round=dict(self.keys.get("round", {})),
            faults=(*kills, *joins),
        )

    def manifest(self, seed: int, founders: Sequence[PeerId], *, rounds: int | None = None) -> Manifest:
        """The manifest of that testnet, in which the number of `rounds` plays no part. Raises ConfigError."""
        return testnet_manifest(self._scenario(seed, rounds or self.rounds), list(founders))


def workload_of(manifest: Manifest) -> Workload:
    """The manifest's workload, on its default data. Raises ConfigError."""
    return load_workload(manifest.workload.name, manifest.workload.options, None)


def inner_settings(manifest: Manifest) -> InnerSettings:
    """The inner optimizer as a trainer is told of it."""
    return InnerSettings.of(manifest)


def replica_of(manifest: Manifest, workload: Workload) -> Replica:
    """A node's replica as its trainer makes it, on the CPU."""
    return Replica(
        workload,
        seed=manifest.workload.seed,
        inner=inner_settings(manifest),
        device=torch.device("cpu"),
        sync=SyncSettings.of(manifest),
    )
