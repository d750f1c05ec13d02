"""Specification of `shoal bench throughput`, and its result. No torch, no processes.

    rate of a node       tokens ÷ seconds, from the end of its warm-up on: every second counts, whatever was done in it
    with or without      the sum over the nodes
    overhead             1 − with ÷ without; without: the mean of the measurements before and after the one with

    work overhead        the same of tokens per second of processor time, daemons' included: on a CPU it is what the
                         overhead would be where trainers keep all cores busy, whatever else the machine does

The seconds of a node in a swarm are those of its steps, those in which it stood still and waited for a round, and what
is left between steps: the hand-over, that is values copied out and written, an anchor applied, a snapshot copied.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Final, NamedTuple

import msgspec

from shoal.cli.options import Strategy
from shoal.lab.case import Spec
from shoal.lab.targets import Row, Target
from shoal.node.option import Option, Within, check_options
from shoal.node.workloads.arithmetic import DTYPES
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest import CHUNK_VALUES_STEP, Manifest, RoundSection, validate_manifest
from shoal.protocol.strategies.strategy import Exchanges
from shoal.protocol.strategies.table import STRATEGIES

WORKLOAD_NAME: Final = "shoal.lab.bench.random_tokens:RandomTokensWorkload"
OVERHEADS: Final[Mapping[str, Target]] = {
    "streaming": Target(name="tokens per second that the swarm costs, streaming", unit="of the loops' alone", most=0.03)
}
"""Limits on the cost of a strategy, where that has a target."""
UNEQUAL: Final = Target(name="runs in which nodes came to different states", most=0)
SYMBOLS: Final = 256
HEAD_WIDTH: Final = 64
LEARNING_RATE: Final = 1e-4
"""Small enough for every size: what is computed takes as long, whatever comes of it."""
CHUNKS_PER_NODE: Final = 16
WARM_UP_ROUNDS: Final = 2
"""To which all nodes contributed: each has then begun, and knows the others' speed."""


class Shape(NamedTuple):
    """Size of a model."""

    width: int
    layers: int

    @property
    def heads(self) -> int:
        """Number of heads, of 64 channels each."""
        return max(1, self.width // HEAD_WIDTH)

    @property
    def parameters(self) -> int:
        """Number of trained values: matrices, norms, and the symbols' vectors on both ends."""
        return self.layers * (12 * self.width**2 + 2 * self.width) + self.width + 2 * SYMBOLS * self.width


SIZES: Final[Mapping[str, Shape]] = {
    "1M": Shape(128, 5),
    "10M": Shape(320, 8),
    "30M": Shape(512, 10),
    "100M": Shape(768, 14),
    "125M": Shape(768, 17),
    "200M": Shape(1024, 16),
    "350M": Shape(1024, 28),
}
"""By what is asked for; within a tenth of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputBench(Spec):
    """Options of `shoal bench throughput`."""

    parameters: Annotated[
        str, Option("--parameters", help="How large a model: 1M, 10M, 30M, 100M, 125M, 200M or 350M.", metavar="SIZE")
    ] = "10M"
    width: Annotated[
        int | None, Option("--width", help="Its width, in place of the size's.", check=Within(2, 8192))
    ] = None
    layers: Annotated[
        int | None, Option("--layers", help="Its layers, in place of the size's.", check=Within(1, 256))
    ] = None
    context: Annotated[int, Option("--context", help="Tokens of one sequence.", check=Within(8, 65_536))] = 128
    batch: Annotated[int, Option("--batch", help="Sequences of one step.", check=Within(1, 4096))] = 2
    dtype: Annotated[
        str, Option("--dtype", help="What products are computed in: bf16, float32, or auto: bf16 on CUDA.")
    ] = "auto"
    device: Annotated[
        str, Option("--device", help="Of all nodes; or of each in turn, separated by commas: cuda:0,cuda:1.")
    ] = "auto"
    threads: Annotated[int, Option("--threads", help="CPU threads of each trainer.", check=Within(1, 4096))] = 1
    nodes: Annotated[int, Option("--nodes", help="How many nodes, each a process of its own.", check=Within(2, 16))] = 2
    strategy: Strategy = "streaming"
    codec: Annotated[str | None, Option("--codec", help="How updates travel; by default the strategy's own.")] = None
    inner_steps: Annotated[
        int,
        Option(
            "--inner-steps",
            help="H: optimizer steps between two rounds, or two of one fragment.",
            check=Within(1, 100_000),
        ),
    ] = 60
    rounds: Annotated[
        int, Option("--rounds", help="Measured rounds of each run; some more warm up.", check=Within(2, 1000))
    ] = 8
    repeat: Annotated[
        int, Option("--repeat", help="Runs of the swarm, each between two of the loops alone.", check=Within(1, 100))
    ] = 3
    seed: Annotated[int, Option("--seed", help="Of the parameters and the data.")] = 1

    def __post_init__(self) -> None:
        check_options(self)
        if self.parameters not in SIZES:
            raise ConfigError(f"--parameters must be one of {', '.join(SIZES)}; or give --width and --layers")
        if self.shape.width % 2 or (self.shape.width > HEAD_WIDTH and self.shape.width % HEAD_WIDTH):
            raise ConfigError(f"--width must be a multiple of {HEAD_WIDTH}, or even and less than that")
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype must be one of {', '.join(DTYPES)}")
        able = {name: one for name, one in STRATEGIES.items() if one.exchanges is Exchanges.UPDATES}
        if able.get(self.strategy) is None:
            raise ConfigError(f"--strategy must be one of {', '.join(able)}: others have no inner loop of their own")

    @property
    def shape(self) -> Shape:
        """Size of the model."""
        size = SIZES[self.parameters]
        return Shape(self.width or size.width, self.layers or size.layers)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one node trains on in one step."""
        return self.batch * self.context

    @property
    def chunk_values(self) -> int:
        """The manifest's default, or less where the nodes would own only a few chunks each."""
        default: int = RoundSection().chunk_values
        steps = self.shape.parameters // (self.nodes * CHUNKS_PER_NODE * CHUNK_VALUES_STEP)
        return min(default, CHUNK_VALUES_STEP * max(1, steps))

    def device_of(self, node: int) -> str:
        """Device that the node computes on."""
        devices = self.device.split(",")
        return devices[node % len(devices)]

    def options(self) -> dict[str, str | int]:
        """Options of the workload."""
        shape = self.shape
        sizes = {"width": shape.width, "layers": shape.layers, "heads": shape.heads}
        return {**sizes, "context": self.context, "batch": self.batch, "dtype": self.dtype}

    def manifest(self, founders: Sequence[PeerId]) -> Manifest:
        """Manifest of the swarm. Raises ConfigError for settings that there are not."""
        sync = {"inner_steps": self.inner_steps, "strategy": self.strategy}
        tables = {
            "swarm": {"name": "throughput", "founders": list(founders), "admission": "open"},
            "workload": {"name": WORKLOAD_NAME, "seed": self.seed, "options": self.options()},
            "sync": sync if self.codec is None else {**sync, "codec": self.codec},
            "inner": {"lr": LEARNING_RATE},
            "round": {"chunk_values": self.chunk_values},
        }
        return validate_manifest(tables, source="the benchmark")


class Stretch(msgspec.Struct, frozen=True, kw_only=True):
    """Work of one node in `wall_s`, of which `steps_s` were steps and `blocked_s` waiting for a round."""

    tokens: int
    steps: int
    wall_s: float
    steps_s: float
    blocked_s: float = 0.0


class CpuShare(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of processor time per second: of all trainers, and of all who start them, daemons in a swarm."""

    trainers: float
    daemons: float

    @property
    def total(self) -> float:
        """Share of all processes."""
        return self.trainers + self.daemons


class Alone(msgspec.Struct, frozen=True, kw_only=True):
    """The inner loops side by side, without a swarm: one stretch for each. device: what the first computed on."""

    loops: tuple[Stretch, ...]
    cpu: CpuShare
    device: str

    @property
    def tokens_per_s(self) -> float:
        """Rate of all loops together."""
        return rate(self.loops)


class Together(msgspec.Struct, frozen=True, kw_only=True):
    """The same nodes as a swarm: one stretch for each node, and how long each round took.

    first_round: the number of the first measured one. missed: contributions that came too late for their rounds, or
    never; they count in a later one, and what was measured of them is left out. sound: all came to the same states.
    """

    nodes: tuple[Stretch, ...]
    first_round: int
    rounds_s: tuple[float, ...]
    cpu: CpuShare
    missed: int
    sound: bool

    @property
    def tokens_per_s(self) -> float:
        """Rate of all nodes together."""
        return rate(self.nodes)

    @property
    def blocked(self) -> float:
        """The share of the nodes' time in which they stood still and waited for a round."""
        return sum(node.blocked_s for node in self.nodes) / sum(node.wall_s for node in self.nodes)

    @property
    def hand_over(self) -> float:
        """The share of the nodes' time that went between steps, without waiting for a round."""
        left = sum(node.wall_s - node.steps_s - node.blocked_s for node in self.nodes)
        return max(0.0, left / sum(node.wall_s for node in self.nodes))


def rate(stretches: Sequence[Stretch]) -> float:
    """Tokens per second of nodes that ran at the same time."""
    return sum(stretch.tokens / stretch.wall_s for stretch in stretches)


def step_s(stretches: Sequence[Stretch]) -> float:
    """Seconds that a step took, by itself."""
    return sum(stretch.steps_s for stretch in stretches) / sum(stretch.steps for stretch in stretches)


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `shoal bench throughput`: `repeat` runs of the swarm, and one more of the loops alone, in turns."""

    bench: ThroughputBench
    alone: tuple[Alone, ...]
    together: tuple[Together, ...]

    @property
    def overheads(self) -> tuple[float, ...]:
        """Overhead of each run of the swarm, against the loops before and after it."""
        without = [statistics.fmean(pair) for pair in pairwise(run.tokens_per_s for run in self.alone)]
        return tuple(1 - run.tokens_per_s / peace for run, peace in zip(self.together, without, strict=True))

    @property
    def work_overheads(self) -> tuple[float, ...]:
        """The same of tokens per second of processor time of all processes."""
        without = [statistics.fmean(pair) for pair in pairwise(run.tokens_per_s / run.cpu.total for run in self.alone)]
        made = [run.tokens_per_s / run.cpu.total for run in self.together]
        return tuple(1 - run / peace for run, peace in zip(made, without, strict=True))

    @property
    def work_overhead(self) -> float:
        """Median of the work overheads."""
        return statistics.median(self.work_overheads)

    @property
    def overhead(self) -> float:
        """Median of the overheads."""
        return statistics.median(self.overheads)

    @property
    def target(self) -> Target | None:
        """Target of the overhead, if it has one."""
        return OVERHEADS.get(self.bench.strategy)

    @property
    def sound(self) -> bool:
        """True if all nodes came to the same states, in every run."""
        return all(run.sound for run in self.together)

    @property
    def rows(self) -> tuple[Row, ...]:
        """Measured values, each with its target."""
        unequal = UNEQUAL.row(sum(not run.sound for run in self.together))
        return (unequal,) if self.target is None else (unequal, self.target.row(self.overhead))
