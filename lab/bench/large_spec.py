"""Specification of `shoal bench large`: one run of a model too large to train twice in a command, and its result.

A run is synchronous data parallel, exactly, in one process; or a strategy, by real nodes as `shoal run` starts them on
what `shoal init` writes. A later run is set beside an earlier one of the same model, tokens and batches, as
`token_efficiency` has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec

from shoal.cli.init import DEFAULT_INNER_STEPS
from shoal.lab.bench.throughput_spec import SIZES, Shape
from shoal.lab.bench.token_efficiency import Ending, ending
from shoal.lab.bench.train_spec import Point
from shoal.lab.case import Spec
from shoal.lab.targets import Row, Target
from shoal.node.option import Option, Within
from shoal.node.options import check_device
from shoal.node.workloads.arithmetic import DTYPES
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest import Manifest, validate_manifest
from shoal.protocol.strategies.table import STRATEGIES

EFFICIENCY: Final = Target(name="tokens that synchronous training needs for the same loss", unit="of all", least=0.9)
UNEQUAL: Final = Target(name="rounds in which nodes came to different states", most=0)
TOKENS_LIMIT: Final = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeBench(Spec):
    """Options of `shoal bench large`."""

    strategy: Annotated[
        str | None, Option("--strategy", help="One whose rounds are certified. [default: none, synchronously]")
    ] = None
    parameters: Annotated[
        str, Option("--parameters", help="How large a model: 1M, 10M, 30M, 100M, 125M, 200M or 350M.", metavar="SIZE")
    ] = "125M"
    context: Annotated[int, Option("--context", help="Tokens of one sequence.", check=Within(8, 65_536))] = 1024
    batch: Annotated[int, Option("--batch", help="Sequences of one step of one node.", check=Within(1, 4096))] = 8
    nodes: Annotated[int, Option("--nodes", help="How many nodes, or shares of each batch.", check=Within(1, 64))] = 4
    tokens: Annotated[
        int, Option("--tokens", help="How many tokens, of all nodes together.", check=Within(1, TOKENS_LIMIT))
    ] = 150_000_000
    within_s: Annotated[
        float | None,
        Option("--within", help="End after so many seconds with what is certified by then.", metavar="SECONDS"),
    ] = None
    inner_steps: Annotated[
        int, Option("--inner-steps", help="H, and how often is evaluated.", check=Within(1, 100_000))
    ] = DEFAULT_INNER_STEPS
    lr: Annotated[float | None, Option("--lr", help="Learning rate of the inner steps. [default: as init]")] = None
    dtype: Annotated[str, Option("--dtype", help="What products are computed in: bf16, float32, or auto.")] = "auto"
    compile: Annotated[bool, Option("--compile", help="Compile the model by torch.compile.")] = False
    device: Annotated[str, Option("--device", help="Of all nodes.", check=check_device)] = "auto"
    text: Annotated[
        Path | None, Option("--text", help="Text to train on. [default: Python's library]", metavar="FOLDER")
    ] = None
    seed: Annotated[int, Option("--seed", help="Of the parameters and the data.")] = 1
    beside: Annotated[
        Path | None, Option("--beside", help="What an earlier, synchronous run wrote to --out.", metavar="FILE")
    ] = None
    out: Annotated[
        Path | None, Option("--out", help="Where the result goes, its curve included, as JSON.", metavar="FILE")
    ] = None

    def __post_init__(self) -> None:
        Spec.__post_init__(self)
        if self.parameters not in SIZES:
            raise ConfigError(f"--parameters must be one of {', '.join(SIZES)}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype must be one of {', '.join(DTYPES)}")
        able = {name: one for name, one in STRATEGIES.items() if one.certifies}
        if not self.synchronous and able.get(self.strategy or "") is None:
            raise ConfigError(f"--strategy must be one of {', '.join(able)}, or left out")
        if self.within_s is not None and not self.within_s > 0:
            raise ConfigError("--within is a number of seconds above 0")
        if self.lr is not None and not self.lr > 0:
            raise ConfigError("--lr is a learning rate above 0, such as 0.001")

    @property
    def synchronous(self) -> bool:
        """True if nodes are shares of a batch alone."""
        return self.strategy is None

    def goes_on(self, tokens: int, seconds: float) -> bool:
        """True if a run that has come so far, in so long, is not at its end."""
        return tokens < self.tokens and (self.within_s is None or seconds < self.within_s)

    @property
    def shape(self) -> Shape:
        """Size of the model."""
        return SIZES[self.parameters]

    @property
    def batch_tokens(self) -> int:
        """Number of tokens of one step of all nodes."""
        return self.nodes * self.batch * self.context

    @property
    def alike(self) -> tuple[object, ...]:
        """Settings that two runs must share to be compared."""
        return (self.parameters, self.context, self.batch_tokens, self.seed)

    def manifest(self, founders: Sequence[PeerId]) -> Manifest:
        """The manifest of `shoal init`, but for the workload's options, H and the learning rate. Raises ConfigError."""
        shape = self.shape
        sizes = {"width": shape.width, "layers": shape.layers, "heads": shape.heads}
        options = {**sizes, "context": self.context, "batch": self.batch, "dtype": self.dtype, "compile": self.compile}
        strategy = {} if self.synchronous else {"strategy": self.strategy}
        tables = {
            "swarm": {"name": "large", "founders": list(founders), "admission": "open"},
            "workload": {"name": "text", "seed": self.seed, "options": options},
            "sync": {**strategy, "inner_steps": self.inner_steps},
            "inner": {} if self.lr is None else {"lr": self.lr},
        }
        return validate_manifest(tables, source="the benchmark")


class LargeRun(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `shoal bench large`.

    points: before the first step, and after each evaluation. tokens_per_s: of all nodes, from the first point after
    that on. unequal: the number of rounds in which nodes came to different states. beside: the synchronous curve that
    it is compared with.
    """

    bench: LargeBench
    device: str
    torch: str
    points: tuple[Point, ...]
    tokens_per_s: float
    wall_s: float
    unequal: int = 0
    beside: tuple[Point, ...] = ()

    @property
    def loss(self) -> float:
        """Mean of the last evaluations, bits per byte."""
        return ending(self.points, self.points).val_loss

    @property
    def ending(self) -> Ending | None:
        """Comparison with the synchronous curve; None without one."""
        return ending(self.points, self.beside) if self.beside else None

    @property
    def rows(self) -> tuple[Row, ...]:
        """Measured values beside their targets."""
        unequal = UNEQUAL.row(self.unequal)
        return (unequal,) if self.ending is None else (unequal, EFFICIENCY.row(self.ending.efficiency))
