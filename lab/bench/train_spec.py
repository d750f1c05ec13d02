"""Specification of `shoal bench train`: a strategy and synchronous data parallel, on equal terms.

All settings are those that `shoal init` writes, but for what the comparison is told. Both sides begin with the
parameters drawn from the manifest's seed; inner optimizer, its settings, and the schedule by the swarm's tokens are the
same. In round e, member m of n draws its batches from `Assignment(seed, e, m, n)`; under synchronous data parallel the
same n members take as many steps with the same batches.

All nodes together read `GLOBAL_WINDOWS` windows a step, however many they are. Member m of n, with b windows a batch,
reads in step k the places m + n · (b · k + j), j < b, of a round's order: all together those from n · b · k on. So with
equal n · b synchronous data parallel takes the same windows at every step, as long as there is text for a round, and
one curve serves swarms of any size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Final, get_args

import msgspec
import torch

from shoal.cli.init import InitOptions, found
from shoal.node.training.inner_loop import Replica
from shoal.node.training.trainer_messages import InnerSettings, SyncSettings
from shoal.node.workload import Workload, load_workload
from shoal.node.workloads.text import TextWorkload
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.manifest import Manifest, OptimizerName
from shoal.protocol.manifest_sync import SyncSection
from shoal.protocol.manifest_workload import Option
from shoal.testnet.scenario import FAULT_LIMIT, NODE_LIMIT, ROUND_LIMIT, Fault, Scenario
from shoal.testnet.swarm import testnet_manifest

WORKLOAD: Final = "text"
CHURN_PERIOD_ROUNDS: Final = 5
SLOW_LIMIT: Final = 100.0
GLOBAL_WINDOWS: Final = 32
"""Windows of text that all nodes together read at a step: four nodes have the batch that `shoal init` implies."""
TOKENS: Final = 24_576_000
"""60 rounds of 100 steps of 32 windows of 128 bytes: 29 tokens for each parameter of the default model."""
PRESENCE_PERIOD: Final = 3
"""Who is there part of the time is there in one of so many rounds."""
ROOM: Final = 1.25
"""Rounds that are allowed where the tokens of a round are no fixed number, × those that should do."""
ALPHA: Final = 0.3
"""Concentration of the Dirichlet distribution by which text is dealt unevenly, where nothing else is said."""
ALPHA_LIMITS: Final = (0.01, 100.0)
_NOBODY: Final = Identity.from_seed(bytes(32))
NOBODY: Final = _NOBODY.peer_id
"""A founder for a manifest whose founders are of no consequence."""
SECTIONS: Final = ("sync", "inner", "round", "membership")
CPU: Final = torch.device("cpu")


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """State of training after a round: certified tokens, bytes sent by all so far, held-out loss."""

    round: int
    tokens: int
    wire_bytes: int
    val_loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBench:
    """One comparison. codec, inner_steps: None for what `shoal init` writes with this strategy.

    At most one thing disturbs the nodes. churn: the share of them that is replaced every 5 rounds. slow: of one node,
    how many times. part_time: the share of them that is there in every third round only. skew: α of the Dirichlet
    distribution by which each has text of its own; None where all read all of it.

    options: of the workload. text: a folder to read in place of the default one. keys: further ones of the manifest's
    sections `SECTIONS`, by section. device: where all compute, the nodes as well as synchronous training. synchronous:
    that alone, without any nodes; then `strategy` says how many steps its rounds have. unrecorded: nodes run as their
    users', and keep no records of which values are recomputed: those of a large model fill a disk. Raises ConfigError
    for what cannot be run.
    """

    strategy: str = "diloco"
    nodes: int = 4
    tokens: int = TOKENS
    codec: str | None = None
    inner_steps: int | None = None
    churn: float = 0.0
    slow: float = 1.0
    part_time: float = 0.0
    skew: float | None = None
    options: Mapping[str, Option] = field(default_factory=dict)
    text: Path | None = None
    keys: Mapping[str, Mapping[str, Option]] = field(default_factory=dict)
    device: str = "auto"
    synchronous: bool = False
    unrecorded: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= NODE_LIMIT or (self.inner_steps is not None and self.inner_steps < 1):
            raise ConfigError(f"--nodes is 1 to {NODE_LIMIT}, and --inner-steps at least 1")
        if self.tokens < 1:
            raise ConfigError("--tokens is the number of tokens that all nodes together train on; give at least 1")
        if not 0 <= self.churn < 0.5:
            raise ConfigError("--churn is a share below 0.5, for of each electorate more than half has to stay")
        if not 1 <= self.slow <= SLOW_LIMIT:
            raise ConfigError(f"--slow says how many times slower one node is: 1 to {SLOW_LIMIT:g}")
        if not 0 <= self.part_time < 1 or len(self.part_timers) == self.nodes:
            raise ConfigError("--part-time is a share below 1 that leaves somebody who is there in every round")
        if self.skew is not None and not ALPHA_LIMITS[0] <= self.skew <= ALPHA_LIMITS[1]:
            raise ConfigError(f"--alpha is {ALPHA_LIMITS[0]:g} to {ALPHA_LIMITS[1]:g}")
        if self.disturbed > 1:
            raise ConfigError(
                "--churn, --slow, --part-time and --data skewed are measured one at a time; leave all but one out"
            )
        if self.synchronous and self.disturbed:
            raise ConfigError("--synchronous has no nodes that anything disturbs; leave one of the two out")
        if self.text is not None and self.skew is not None:
            raise ConfigError("--data skewed deals the default text out; leave --text out")
        if self.unrecorded and (self.disturbed or not self.manifest(0, [NOBODY]).strategy.certifies):
            raise ConfigError("--unrecorded is for certified rounds that nothing disturbs; leave it out")
        if self.part_time and not self.manifest(0, [NOBODY]).strategy.certifies:
            raise ConfigError(f"--part-time is not measured with {self.strategy}: nodes step alone there; leave it out")
        self.scenario(0)

    @property
    def disturbed(self) -> int:
        """By how many things the nodes are disturbed."""
        return sum((self.churn > 0, self.slow > 1, self.part_time > 0, self.skew is not None))

    @property
    def name(self) -> str:
        """Name of the strategy, or that of synchronous training."""
        return "synchronous" if self.synchronous else self.strategy

    @property
    def workload_options(self) -> dict[str, Option]:
        """Options of the workload with the batch of a node, by which all together read `GLOBAL_WINDOWS` at a step.

        Raises ConfigError where these cannot be dealt alike.
        """
        if "batch" in self.options:
            return dict(self.options)
        if GLOBAL_WINDOWS % self.nodes:
            raise ConfigError(
                f"{GLOBAL_WINDOWS} windows a step cannot be dealt to {self.nodes} nodes alike; give --option batch=N, "
                "what each of them reads"
            )
        return {"batch": GLOBAL_WINDOWS // self.nodes, **self.options}

    @property
    def step_tokens(self) -> int:
        """Number of tokens in a step of every node."""
        workload = load_workload(WORKLOAD, self.workload_options, None)
        assert isinstance(workload, TextWorkload)
        return self.nodes * workload.batch * workload.context

    @property
    def round_tokens(self) -> int:
        """Number of tokens in a round in which every node counts."""
        return self.step_tokens * self._sync.round_steps

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        model = load_workload(WORKLOAD, self.workload_options, None).build()
        return sum(value.numel() for value in model.parameters())

    @property
    def _sync(self) -> SyncSection:
        return self.manifest(0, [NOBODY]).sync

    @property
    def full_rounds(self) -> int:
        """Number of rounds where everybody counts in each."""
        return -(-self.tokens // self.round_tokens)

    @property
    def part_timers(self) -> range:
        """Nodes that are there part of the time: the last ones."""
        count = max(1, round(self.part_time * self.nodes)) if self.part_time else 0
        return range(self.nodes - count, self.nodes)

    def away(self, round: int) -> range:
        """Nodes that do not train in `round`. Rounds of fragments count as one when each had its own."""
        return self._away((round - 1) // self._sync.fragments)

    def _away(self, whole_rounds: int) -> range:
        return self.part_timers if whole_rounds % PRESENCE_PERIOD else range(0)

    @property
    def replaced(self) -> int:
        """Number of nodes that are replaced at a time."""
        return max(1, round(self.churn * self.nodes)) if self.churn else 0

    @property
    def rounds(self) -> int:
        """Number of rounds to allow: who is missing costs some, and so do fragments until each has had its first.

        How long a newcomer needs to start, in rounds, depends on the machine, and so do the steps that nodes of
        different speed share out among themselves: there is room for more.
        """
        sync = self._sync
        missing = len(self.part_timers) * (1 - 1 / PRESENCE_PERIOD) / self.nodes
        rounds = math.ceil(self.full_rounds / (1 - missing)) + sync.fragments - 1
        if self.replaced or self.slow > 1:
            return 2 * rounds
        return math.ceil(ROOM * rounds) if sync.balances or self.part_time else rounds

    def replacements(self, round: int) -> Sequence[tuple[int, int]]:
        """(who goes, who comes) as `round` begins: always the nodes that have been there longest."""
        times, rest = divmod(round - 1, CHURN_PERIOD_ROUNDS)
        if not self.replaced or rest or not times:
            return ()
        first = (times - 1) * self.replaced
        return [(first + i, self.nodes + first + i) for i in range(self.replaced)]

    def scenario(self, seed: int) -> Scenario:
        """The testnet that runs the strategy. Raises ConfigError."""
        rounds = self.rounds
        swaps = [(number, *swap) for number in range(1, rounds + 1) for swap in self.replacements(number)]
        if rounds > ROUND_LIMIT or self.nodes + len(swaps) > NODE_LIMIT:
            raise ConfigError(
                f"{self.tokens} tokens take {rounds} rounds and {self.nodes + len(swaps)} nodes, more than "
                f"{ROUND_LIMIT} or {NODE_LIMIT}; give fewer --tokens or more --inner-steps"
            )
        absences = list(self._absences(rounds))
        if len(absences) > FAULT_LIMIT:
            raise ConfigError(
                f"in {rounds} rounds nodes come and go {len(absences)} times, more than {FAULT_LIMIT}; give fewer "
                "--tokens, or a smaller --part-time"
            )
        kills = [Fault(kind="kill", node=old, round=number) for number, old, _ in swaps]
        joins = [Fault(kind="join", node=new, round=number) for number, _, new in swaps]
        return self._scenario(seed, rounds, (*kills, *joins, *absences))

    def _scenario(self, seed: int, rounds: int, faults: tuple[Fault, ...]) -> Scenario:
        inner = self.keys.get("inner", {})
        shipped = shipped_manifest(self.strategy, inner.get("optimizer"))
        return Scenario(
            nodes=self.nodes,
            rounds=rounds,
            tokens=self.tokens,
            seed=seed,
            strategy=self.strategy,
            codec=self.codec,
            workload=WORKLOAD,
            options=self.workload_options,
            inner_steps=shipped.sync.inner_steps if self.inner_steps is None else self.inner_steps,
            # A testnet's own settings, for short runs that can be repeated, give way to what is shipped.
            sync={"balance": shipped.sync.balance, **self.keys.get("sync", {})},
            inner={"warmup_tokens": shipped.inner.warmup_tokens, "lr": shipped.inner.lr, **inner},
            round={
                "chunk_values": shipped.round.chunk_values,
                "grace_s": shipped.round.grace_s,
                "reduce_deadline_s": shipped.round.reduce_deadline_s,
                **self.keys.get("round", {}),
            },
            membership=dict(self.keys.get("membership", {})),
            faults=faults,
        )

    def _absences(self, rounds: int) -> Iterator[Fault]:
        """Yield how nodes that are there part of the time go and come, as rounds begin."""
        fragments = self._sync.fragments if self.part_timers else rounds
        for number, (before, now) in enumerate(pairwise(map(self._away, range(-(-rounds // fragments)))), start=1):
            for index in set(before) ^ set(now):
                yield Fault(kind="pause" if now else "resume", node=index, round=number * fragments + 1)

    def manifest(self, seed: int, founders: Sequence[PeerId]) -> Manifest:
        """The manifest of that testnet. Raises ConfigError."""
        return testnet_manifest(self._scenario(seed, 1, ()), list(founders))


@cache
def shipped_manifest(strategy: str, optimizer: str | None = None) -> Manifest:
    """The manifest that `shoal init --strategy STRATEGY` writes, with `--optimizer`. Raises ConfigError."""
    known = next((name for name in get_args(OptimizerName) if name == optimizer), None)
    return found(InitOptions(strategy=strategy, optimizer=known), _NOBODY, _NOBODY)


def workload_of(manifest: Manifest, data: Path | None = None) -> Workload:
    """The manifest's workload, on its default data or that at a path. Raises ConfigError."""
    return load_workload(manifest.workload.name, manifest.workload.options, None if data is None else str(data))


def inner_settings(manifest: Manifest) -> InnerSettings:
    """The inner optimizer as a trainer is told of it."""
    return InnerSettings.of(manifest)


def replica_of(manifest: Manifest, workload: Workload, device: torch.device = CPU) -> Replica:
    """A node's replica as its trainer makes it."""
    return Replica(
        workload,
        seed=manifest.workload.seed,
        inner=inner_settings(manifest),
        device=device,
        sync=SyncSettings.of(manifest),
    )
