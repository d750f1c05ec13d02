"""Specification of `shoal bench attack`: attacks, defences, and how large a swarm they meet in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Annotated, Final

import msgspec

from shoal.lab.bench.machine import Machine
from shoal.lab.bench.train_spec import TrainBench
from shoal.lab.case import Spec
from shoal.lab.targets import Row, Target
from shoal.node.option import Option
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.manifest import Manifest
from shoal.protocol.manifest_workload import Option as WorkloadOption

CLEAN: Final = "none"
ATTACKS: Final[Mapping[str, str]] = {
    CLEAN: "nobody attacks",
    "sign_flip": "ten times the mean of the honest, with the sign turned",
    "scaled_noise": "Gaussian noise of a hundred times the honest norm",
    "constant": "one drawn direction, the same at every attacker and in every round, of ten times the honest norm",
    "little": "the mean of the honest, moved against its sign by 1.5 of their standard deviations, value by value",
    "label_flip": "training on turned labels, contributed as it comes out",
    "nan": "one NaN in every chunk",
    "false_norm": "sign_flip a thousand times as large, with the sums of squares of an honest contribution",
    "copy": "the contribution of an honest member once more, byte for byte",
    "wrong_sums": "as owners of chunks, ten times the sum with the sign turned",
    "tokens": "sign_flip, of the largest number of tokens that can be declared",
}
"""Behaviour of each attacker in every round. All know what the honest contribute before they contribute themselves."""


@dataclass(frozen=True, slots=True)
class Defence:
    """Settings of [sync] and [round], and whether who is proven to have lied is out from the next round on."""

    says: str
    sync: Mapping[str, WorkloadOption] = field(default_factory=dict)
    round: Mapping[str, WorkloadOption] = field(default_factory=dict)
    bans: bool = True


PROVABLE: Final = frozenset({"nan", "false_norm", "wrong_sums"})
"""Attacks of which signed bytes are proof."""
LOSS: Final = Target(name="loss under the worst attack, recommended defence", unit="× the clean run's", most=1.05)
UNPROVEN: Final = Target(name="attackers that signed a proof and were not proven", most=0)
UNDEFENDED: Final = "mean"
RECOMMENDED: Final = "trimmed"
DEFENCES: Final[Mapping[str, Defence]] = {
    UNDEFENDED: Defence("the weighted mean of all, and no bans", {"norm_clip": False}, bans=False),
    "clip": Defence("the weighted mean, clipped to the median norm: what is on unless said otherwise"),
    "median": Defence("clipped, then value by value the middle one", {"aggregate": "median"}),
    "trimmed": Defence(
        "clipped, then value by value the mean without the quarter that is largest and the quarter that is smallest",
        {"aggregate": "trimmed"},
    ),
}
SIZES: Final[Mapping[str, WorkloadOption]] = {"width": 64, "layers": 1, "heads": 2, "context": 32, "batch": 4}
"""Of the workload text: 82,000 parameters, so that each of 16 peers owns a chunk or two of 4,096."""
INNER: Final[Mapping[str, WorkloadOption]] = {"lr": 0.004, "warmup_tokens": 8192}
CHUNK_VALUES: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackBench(Spec):
    """Options of `shoal bench attack`, for swarms of one size."""

    peers: Annotated[int, Option("--peers", help="How many peers, attackers among them.")] = 16
    attackers: Annotated[int, Option("--attackers", help="How many of them attack in every round.")] = 3
    attack: Annotated[
        str, Option("--attack", help="What they do: all, or some of a list with commas.", metavar="A,A…|all")
    ] = "all"
    defence: Annotated[
        str, Option("--defence", help="How contributions are combined: all, or some.", metavar="D,D…|all")
    ] = "all"
    rounds: Annotated[int, Option("--rounds", help="How many rounds are trained.")] = 12
    inner_steps: Annotated[int, Option("--inner-steps", help="H: optimizer steps between two rounds.")] = 5
    audits: Annotated[int, Option("--audits", help="Chunks that each peer recomputes a round.")] = 2
    seed: Annotated[int, Option("--seed", help="Of the parameters, the data and the keys.")] = 1

    def __post_init__(self) -> None:
        _ = self.attacks, self.defences
        if not (2 <= self.peers <= 64 and 0 <= self.attackers < self.peers / 2):
            raise ConfigError("--peers is 2 to 64, and --attackers fewer than half of them")
        if self.rounds < 1 or self.inner_steps < 1 or self.audits < 0:
            raise ConfigError("--rounds and --inner-steps are at least 1, and --audits at least 0")

    @property
    def attacks(self) -> list[str]:
        """Names of the attacks to measure. Raises ConfigError."""
        return chosen(self.attack, ATTACKS, "--attack")

    @property
    def defences(self) -> list[str]:
        """Names of the defences to measure. Raises ConfigError."""
        return chosen(self.defence, DEFENCES, "--defence")

    def manifest(self, seed: int, founders: list[PeerId], defence: Defence) -> Manifest:
        """The manifest of that swarm. Raises ConfigError."""
        train = TrainBench(
            strategy="diloco",
            nodes=self.peers,
            tokens=1,
            inner_steps=self.inner_steps,
            options=SIZES,
            keys={
                "sync": dict(defence.sync),
                "inner": INNER,
                "round": {"chunk_values": CHUNK_VALUES, **defence.round},
            },
        )
        return train.manifest(seed, founders)


def chosen(names: str, known: Mapping[str, object], option: str) -> list[str]:
    """The names in a list with commas; all of them for "all". Raises ConfigError."""
    wanted = list(known) if names == "all" else [name.strip().replace("-", "_") for name in names.split(",")]
    for name in wanted:
        if name not in known:
            raise ConfigError(f"{option}: there is no {name!r}; choose all, or some of {', '.join(known)}")
    return wanted


def peer_identity(seed: int, index: int) -> Identity:
    """The key of a peer, which follows from the seed."""
    return Identity.from_seed(seed.to_bytes(16, "little") + index.to_bytes(16, "little"))


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One attack under one defence. val_loss: None if it is no number any more. ratio: to the clean, undefended run.

    proven: per attacker after how many rounds its lie was proven, None if it was not. useless: the share of the
    attackers' contributions of the last round that made the loss on their own data no better; honest_useless: of the
    honest ones.
    """

    attack: str
    defence: str
    val_loss: float | None
    ratio: float | None
    proven: tuple[int | None, ...] = ()
    useless: float | None = None
    honest_useless: float | None = None
    seconds: float = 0.0


class AttackResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `shoal bench attack`. clean_val_loss: of the swarm without attackers and defence."""

    peers: int
    attackers: int
    rounds: int
    inner_steps: int
    audits: int
    parameters: int
    seed: int
    first_val_loss: float
    clean_val_loss: float
    recommended: str
    cells: tuple[Cell, ...]
    machine: Machine

    @property
    def rows(self) -> tuple[Row, ...]:
        """Measured values, each with its target; a loss that is not a number any more counts as infinite."""
        ratios = [inf if one.ratio is None else one.ratio for one in self.cells if one.defence == self.recommended]
        provable = [proof for one in self.cells if one.attack in PROVABLE for proof in one.proven]
        return (
            LOSS.row(max(ratios, default=None)),
            UNPROVEN.row(provable.count(None) if provable else None),
        )
