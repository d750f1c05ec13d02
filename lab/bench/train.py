"""A strategy beside synchronous data parallel on the same tokens, over several seeds: loss, bytes, waiting.

The strategy runs on a testnet of real processes, or in one process (`train_local`), where there is no control
traffic and no time to measure. Synchronous data parallel always runs in one process; its bytes are those of an fp32
all-reduce at every step. It is given at least as many tokens as the strategy had certified, in whole rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import trio

from shoal.lab.bench.machine import Machine, one_thread, this_machine
from shoal.lab.bench.train_local import train_locally
from shoal.lab.bench.train_spec import NOBODY, Point, TrainBench
from shoal.lab.bench.train_swarm import train_in_swarm
from shoal.lab.bench.train_sync import train_synchronously
from shoal.lab.targets import Row, Spread, Target
from shoal.protocol.errors import ConfigError, StorageError
from shoal.testnet.progress import OnProgress, ignore_progress

SAME_LENGTH: Final = 0.1
RESULT_LIMIT_BYTES: Final = 64 << 20
SEEDS_LIMIT: Final = 100

Tell = Callable[[str], None]

UNSOUND: Final = Target(name="runs with wrong values, or not all certified", most=0)


def _loss(most: float) -> Target:
    return Target(name="held-out loss", unit="× synchronous training's", most=most)


def _bytes(least: float) -> Target:
    return Target(name="times fewer bytes", least=least)


TARGETS: Final[Mapping[tuple[str, bool], tuple[Target, Target | None]]] = {
    ("diloco", False): (_loss(1.02), _bytes(100)),
    ("diloco", True): (_loss(1.03), None),
    ("streaming", False): (_loss(1.02), _bytes(200)),
    ("sparse", False): (_loss(1.03), _bytes(1000)),
    ("gossip", False): (_loss(1.04), _bytes(50)),
}
"""Of loss and bytes, by strategy and whether nodes are replaced: beside synchronous training on the same tokens."""


class SeedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One seed. curve: the strategy's; sync_curve: that of synchronous data parallel. Losses are held-out ones.

    In one process there are no speeds and no blocked fraction. sound: see `SwarmRun`.
    """

    seed: int
    curve: tuple[Point, ...]
    sync_curve: tuple[Point, ...]
    blocked_fraction: float | None = None
    tokens_per_s: float | None = None
    rate_ratio: float | None = None
    sound: bool = True
    trouble: str | None = None

    @property
    def loss_ratio(self) -> float:
        """The strategy's final held-out loss ÷ that of synchronous data parallel."""
        return self.curve[-1].val_loss / self.sync_curve[-1].val_loss

    @property
    def byte_ratio(self) -> float:
        """Factor by which the strategy sent fewer bytes than synchronous training."""
        return self.sync_curve[-1].wire_bytes / max(1, self.curve[-1].wire_bytes)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the comparison, in full: the manifest's sections as they were, and whether in one process.

    inner_steps: H. round_steps: those between two rounds, fewer where there are fragments.
    """

    inner_steps: int
    round_steps: int
    churn: float
    slow: float
    in_process: bool
    codec: str
    options: dict[str, object]
    sync: dict[str, object]
    inner: dict[str, object]


class TrainResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `shoal bench train`. The numbers are medians over the seeds; tokens are the certified ones."""

    strategy: str
    nodes: int
    tokens: int
    val_loss: float
    sync_val_loss: float
    wire_bytes: int
    sync_wire_bytes: int
    blocked_fraction: float | None
    rate_ratio: float | None
    tokens_per_s: float | None
    loss_ratio: Spread
    byte_ratio: Spread
    settings: Settings
    seeds: tuple[SeedRun, ...]
    machine: Machine

    @property
    def sound(self) -> bool:
        """True if everything that ran was certified and exact."""
        return all(run.sound for run in self.seeds)

    @property
    def loss_row(self) -> Row | None:
        """The loss beside its target; None without one."""
        found = self._targets
        return None if found is None else found[0].row(self.loss_ratio)

    @property
    def byte_row(self) -> Row | None:
        """The bytes beside their target; None without one."""
        found = self._targets
        return None if found is None or found[1] is None else found[1].row(self.byte_ratio)

    @property
    def _targets(self) -> tuple[Target, Target | None] | None:
        return TARGETS.get((self.strategy, self.settings.churn > 0))

    @property
    def rows(self) -> tuple[Row, ...]:
        """Measured values, each with its target."""
        found = (UNSOUND.row(sum(not run.sound for run in self.seeds)), self.loss_row, self.byte_row)
        return tuple(row for row in found if row is not None)


def measure(
    bench: TrainBench,
    seeds: Sequence[int],
    folder: Path,
    *,
    in_process: bool = False,
    baseline: TrainResult | None = None,
    tell: Tell = lambda _: None,
    on_progress: OnProgress = ignore_progress,
) -> TrainResult:
    """Run strategy and baseline for each seed; the testnets' folders are `folder`/seed-S. Minutes to hours.

    baseline: an earlier result whose curves of synchronous data parallel are taken where they are of the same run.
    Raises ConfigError, NetworkError, StorageError, FloatingPointError, KeyboardInterrupt.
    """
    if not seeds or len(set(seeds)) != len(seeds) or len(seeds) > SEEDS_LIMIT:
        raise ConfigError(f"--seeds names 1 to {SEEDS_LIMIT} different numbers, like 1,2,3")
    if in_process and bench.slow > 1:
        raise ConfigError("--slow needs processes that run at the same time; leave --in-process out")
    machine, settings = this_machine(), _settings(bench, in_process)
    known = {} if baseline is None else _curves(baseline, bench, settings)
    runs = []
    with one_thread():
        for seed in seeds:
            run = _strategy(bench, seed, folder.absolute() / f"seed-{seed}", in_process, tell, on_progress)
            rounds = -(-run.curve[-1].tokens // bench.round_tokens)
            curve = known.get(seed, ())[: rounds + 1]
            if len(curve) <= rounds:
                curve = _synchronous(bench, seed, rounds, tell)
            runs.append(msgspec.structs.replace(run, sync_curve=curve))
    return _result_of(bench.strategy, bench.nodes, settings, runs, machine)


def _strategy(
    bench: TrainBench, seed: int, folder: Path, in_process: bool, tell: Tell, on_progress: OnProgress
) -> SeedRun:
    if in_process:
        curve = train_locally(bench, seed, partial(_tell_point, tell, f"{bench.strategy}, seed {seed}"))
        return SeedRun(seed=seed, curve=tuple(curve), sync_curve=())
    run = trio.run(train_in_swarm, bench, seed, folder, on_progress)
    return SeedRun(
        seed=seed,
        curve=run.points,
        sync_curve=(),
        blocked_fraction=run.blocked_fraction,
        tokens_per_s=run.tokens_per_s,
        rate_ratio=run.rate_ratio,
        sound=run.sound,
        trouble=run.trouble,
    )


def _synchronous(bench: TrainBench, seed: int, rounds: int, tell: Tell) -> tuple[Point, ...]:
    manifest = bench.manifest(seed, [NOBODY])
    told = partial(_tell_point, tell, f"synchronous, seed {seed}")
    return tuple(train_synchronously(manifest, members=bench.nodes, rounds=rounds, tell=told))


def _tell_point(tell: Tell, who: str, point: Point) -> None:
    tell(f"{who}: {point.tokens} tokens, loss {point.val_loss:.4f}")


def _settings(bench: TrainBench, in_process: bool) -> Settings:
    manifest = bench.manifest(0, [NOBODY])
    sync, inner = msgspec.to_builtins(manifest.sync), msgspec.to_builtins(manifest.inner)
    return Settings(
        inner_steps=bench.inner_steps,
        round_steps=manifest.sync.round_steps,
        churn=bench.churn,
        slow=bench.slow,
        in_process=in_process,
        codec=manifest.sync.codec,
        options=dict(bench.options),
        sync=sync,
        inner=inner,
    )


def _curves(baseline: TrainResult, bench: TrainBench, settings: Settings) -> dict[int, tuple[Point, ...]]:
    """The baseline's synchronous curves by seed. Raises ConfigError if they are of another model or schedule."""
    theirs = baseline.settings
    same = (baseline.nodes, theirs.round_steps, theirs.options, theirs.inner)
    wanted = (bench.nodes, settings.round_steps, settings.options, settings.inner)
    # As JSON has them: one that was read from a file has lists where the other has tuples.
    if _json(same) != _json(wanted):
        raise ConfigError(
            "--baseline is of other --nodes, steps between two rounds, --option or inner settings; leave it out"
        )
    return {run.seed: run.sync_curve for run in baseline.seeds}


def _result_of(strategy: str, nodes: int, settings: Settings, runs: Sequence[SeedRun], machine: Machine) -> TrainResult:
    def median(numbers: Sequence[float | None]) -> float | None:
        found = [number for number in numbers if number is not None]
        return statistics.median(found) if found else None

    return TrainResult(
        strategy=strategy,
        nodes=nodes,
        tokens=round(statistics.median(run.curve[-1].tokens for run in runs)),
        val_loss=statistics.median(run.curve[-1].val_loss for run in runs),
        sync_val_loss=statistics.median(run.sync_curve[-1].val_loss for run in runs),
        wire_bytes=round(statistics.median(run.curve[-1].wire_bytes for run in runs)),
        sync_wire_bytes=round(statistics.median(run.sync_curve[-1].wire_bytes for run in runs)),
        blocked_fraction=median([run.blocked_fraction for run in runs]),
        rate_ratio=median([run.rate_ratio for run in runs]),
        tokens_per_s=median([run.tokens_per_s for run in runs]),
        loss_ratio=Spread.of([run.loss_ratio for run in runs]),
        byte_ratio=Spread.of([run.byte_ratio for run in runs]),
        settings=settings,
        seeds=tuple(runs),
        machine=machine,
    )


def merged(results: Sequence[TrainResult]) -> list[TrainResult]:
    """Results that differ in nothing but their seeds as one, in the order of the first of each.

    Of equally long runs the tokens differ by less than SAME_LENGTH where nodes are replaced. Raises ConfigError where
    two of them are of the same seed.
    """
    groups: list[list[TrainResult]] = []
    for result in results:
        alike = (group for group in groups if _are_alike(group[0], result))
        found = next(alike, None)
        if found is None:
            groups.append([result])
        else:
            found.append(result)
    return [_merged(group) for group in groups]


def _are_alike(one: TrainResult, other: TrainResult) -> bool:
    told, asked = (_json((result.strategy, result.nodes, result.settings)) for result in (one, other))
    return told == asked and abs(one.tokens - other.tokens) < SAME_LENGTH * one.tokens


def _json(value: object) -> bytes:
    """Key that is equal for settings that are written alike."""
    return msgspec.json.encode(value, order="deterministic")


def _merged(group: Sequence[TrainResult]) -> TrainResult:
    if len(group) == 1:
        return group[0]
    runs = sorted((run for result in group for run in result.seeds), key=lambda run: run.seed)
    if len({run.seed for run in runs}) != len(runs):
        raise ConfigError(f"two results of {group[0].strategy} with the same settings have a seed in common; give one")
    return _result_of(group[0].strategy, group[0].nodes, group[0].settings, runs, group[0].machine)


def to_json(result: TrainResult) -> bytes:
    """The result as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(result), indent=2)


def load_result(path: Path) -> TrainResult:
    """A result that an earlier run wrote. Raises ConfigError if it is none, StorageError."""
    try:
        with path.open("rb") as file:
            data = file.read(RESULT_LIMIT_BYTES + 1)
        if len(data) > RESULT_LIMIT_BYTES:
            raise ConfigError(
                f"{path} is larger than {RESULT_LIMIT_BYTES} bytes; give a train.json of `shoal bench train`"
            )
        return msgspec.json.decode(data, type=TrainResult)
    except FileNotFoundError:
        raise ConfigError(f"there is no {path}; `shoal bench train --out FOLDER` writes FOLDER/train.json") from None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}; check the path and its mode") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no result of `shoal bench train`: {error}") from None
