"""A strategy beside synchronous data parallel on the same tokens, over several seeds: loss, bytes, waiting.

The strategy runs on a testnet of real processes, or in one process (`train_local`), where there is no control
traffic and no time to measure. Synchronous data parallel always runs in one process, on all of the text, undisturbed;
its bytes are those of an fp32 all-reduce at every step. It is given some more tokens than the strategy had certified.

Its curve may be that of an earlier result with the same global batch, model, seed and inner settings. If rounds had as
many steps there, the windows of each of its steps are those of a run of its own (`train_spec`); else they are drawn
from the same text anew as those rounds began.

A row is made of several results: seeds that real nodes ran, and others in one process where that agrees with them.
"""

from __future__ import annotations

import datetime
import logging
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import trio

from shoal.cli.logs import FOR_USER
from shoal.cli.render import ShowNow
from shoal.cli.testnet_report import TestnetProgress
from shoal.lab.bench.machine import Machine, device_name, this_machine, torch_threads
from shoal.lab.bench.train_local import train_locally
from shoal.lab.bench.train_spec import NOBODY, Point, TrainBench
from shoal.lab.bench.train_swarm import SeedRun, train_in_swarm, train_unrecorded
from shoal.lab.bench.train_sync import train_synchronously
from shoal.lab.case import tell_nothing
from shoal.lab.targets import Row, Spread, Target
from shoal.node.state.store import write_atomically
from shoal.node.training.devices import pick_device
from shoal.protocol.errors import ConfigError, StorageError
from shoal.testnet.reports.report import allreduce_bytes

SYNC_LENGTH: Final = 1.05
"""Length of a synchronous run, × the tokens of the run beside it: it serves rows that end a little later, too."""
AGREEMENT: Final = 0.005
"""By so much at most losses in one process differ from real nodes' of the same seed, if its other seeds count."""
SAME_LENGTH: Final = 0.1
RESULT_LIMIT_BYTES: Final = 64 << 20
SEEDS_LIMIT: Final = 100

RESULT: Final = "train.json"
"""Name of the result's file."""

log = logging.getLogger(FOR_USER)

UNSOUND: Final = Target(name="runs with wrong values, or not all certified", most=0)


class Aims(msgspec.Struct, frozen=True, kw_only=True):
    """Targets of a strategy. efficiency, hoped_for: share of the tokens. bytes_per_step: times fewer, ÷ H."""

    efficiency: float
    hoped_for: float | None = None
    bytes_per_step: float | None = None

    @property
    def efficiency_target(self) -> Target:
        """Target of the share of the tokens that synchronous training needs for the same loss."""
        return Target(name="token efficiency", least=self.efficiency, aim=self.hoped_for)

    def byte_target(self, inner_steps: int) -> Target | None:
        """Target of bytes beside fp32 at every step; None where there is none."""
        if self.bytes_per_step is None:
            return None
        return Target(name="times fewer bytes", least=self.bytes_per_step * inner_steps)


AIMS: Final[Mapping[str, Aims]] = {
    "diloco": Aims(efficiency=0.90, hoped_for=0.97, bytes_per_step=3),
    "streaming": Aims(efficiency=0.90, hoped_for=0.95, bytes_per_step=6),
    "sparse": Aims(efficiency=0.75, hoped_for=0.88, bytes_per_step=40),
    "gossip": Aims(efficiency=0.75),
}
"""By strategy, undisturbed."""
CODEC_AIMS: Final[Mapping[str, Aims]] = {"2bit": Aims(efficiency=0.88, hoped_for=0.93, bytes_per_step=11)}
"""By codec, in place of the strategy's."""
DISTURBED: Final = Target(
    name="token efficiency of a disturbed row", unit="× the undisturbed row's", least=0.85, aim=0.93
)
SPEED: Final = Target(name="speed with a slow node", unit="× the sum of its nodes'", least=0.9)
"""Where shares are by speed."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the comparison, in full: the manifest's sections as they were, and what disturbed the nodes.

    inner_steps: H. round_steps: those between two rounds, fewer where there are fragments. churn to skew: see
    `TrainBench`. device: as its maker calls it. text: the name of the folder, None for the default one.
    """

    inner_steps: int
    round_steps: int
    churn: float
    slow: float
    part_time: float
    skew: float | None
    codec: str
    options: dict[str, object]
    sync: dict[str, object]
    inner: dict[str, object]
    round: dict[str, object] = {}
    membership: dict[str, object] = {}
    device: str = "cpu"
    text: str | None = None

    @property
    def undisturbed(self) -> Settings:
        """The same where nothing disturbs."""
        return msgspec.structs.replace(self, churn=0.0, slow=1.0, part_time=0.0, skew=None)


class TrainResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `shoal bench train`. The numbers are medians over the seeds that count; tokens are the certified ones.

    sync_tokens: what synchronous training needs for the same loss, None if one of its curves ends above that; then
    `efficiency` is at least what it says. While such a curve is shorter than the run, no loss is beside that. bytes and
    what follows of them are of real nodes if there were any. commands: those that made it.
    """

    strategy: str
    nodes: int
    tokens: int
    val_loss: float
    sync_val_loss: float | None
    sync_tokens: float | None
    wire_bytes: int
    sync_wire_bytes: int
    blocked_fraction: float | None
    rate_ratio: float | None
    tokens_per_s: float | None
    loss_ratio: Spread | None
    efficiency: Spread
    byte_ratio: Spread
    settings: Settings
    seeds: tuple[SeedRun, ...]
    machines: tuple[Machine, ...]
    commands: tuple[str, ...] = ()

    @property
    def sound(self) -> bool:
        """True if everything that ran was certified and exact."""
        return all(run.sound for run in self.seeds)

    @property
    def disturbed(self) -> bool:
        """True if something disturbed the nodes."""
        return self.settings != self.settings.undisturbed

    @property
    def counted(self) -> tuple[SeedRun, ...]:
        """Runs whose numbers count."""
        return _counted(self.seeds)

    @property
    def efficiency_row(self) -> Row | None:
        """The token efficiency beside its target; None without one, before it is known, and for a disturbed row."""
        if self._aims is None or self.disturbed or (self.sync_tokens is None and self.sync_val_loss is None):
            return None
        return self._aims.efficiency_target.row(self.efficiency)

    @property
    def byte_row(self) -> Row | None:
        """The bytes that real nodes sent beside their target; None likewise."""
        known = self.byte_ratio.least > 0 and not all(run.in_process for run in self.counted)
        if self._aims is None or self.disturbed or not known:
            return None
        target = self._aims.byte_target(self.settings.inner_steps)
        return None if target is None else target.row(self.byte_ratio)

    @property
    def _speed_row(self) -> Row | None:
        """The swarm's speed with one node slower; None where none is, or shares are equal."""
        uneven = self.settings.slow > 1 and self.settings.sync.get("balance")
        return SPEED.row(self.rate_ratio) if uneven else None

    @property
    def _aims(self) -> Aims | None:
        return CODEC_AIMS.get(self.settings.codec, AIMS.get(self.strategy))

    @property
    def rows(self) -> tuple[Row, ...]:
        """Measured values, each with its target."""
        unsound = UNSOUND.row(sum(not run.sound for run in self.seeds))
        found = (unsound, self.efficiency_row, self.byte_row, self._speed_row)
        return tuple(row for row in found if row is not None)


def disturbed_row(result: TrainResult, results: Sequence[TrainResult]) -> Row | None:
    """A disturbed row's token efficiency beside that of the undisturbed one among `results`; None without either."""
    if not result.disturbed:
        return None
    wanted = _json((result.strategy, result.nodes, result.settings.undisturbed))
    alike = (one for one in results if _json((one.strategy, one.nodes, one.settings)) == wanted)
    beside = next(alike, None)
    return None if beside is None else DISTURBED.row(result.efficiency.median / beside.efficiency.median)


def _agreement(runs: Sequence[SeedRun]) -> float | None:
    real = {run.seed: run for run in runs if not run.in_process}
    twins = [(run.ending, real[run.seed].ending) for run in runs if run.in_process and run.seed in real]
    return max((abs(one.val_loss / other.val_loss - 1) for one, other in twins), default=None)


def _counted(runs: Sequence[SeedRun]) -> tuple[SeedRun, ...]:
    """Real nodes' runs, and of other seeds those in one process if that agrees; where no nodes ran, those alone."""
    real = tuple(run for run in runs if not run.in_process)
    if not real:
        return tuple(runs)
    agreement, seeds = _agreement(runs), {run.seed for run in real}
    others = tuple(run for run in runs if run.in_process and run.seed not in seeds)
    return real + others if agreement is not None and agreement <= AGREEMENT else real


def measure(
    bench: TrainBench,
    seeds: Sequence[int],
    folder: Path,
    *,
    in_process: bool = False,
    baseline: TrainResult | None = None,
    threads: int | None = None,
    command: str | None = None,
    show: ShowNow = tell_nothing,
) -> TrainResult:
    """Run strategy and baseline for each seed, and keep what there is in `folder`. Minutes to hours.

    `folder` gets the result as it comes, a synchronous run's checkpoint for each seed, and the testnets' folders
    seed-S. What an earlier call with the same settings left there is gone on from.
    baseline: an earlier result whose curves of synchronous data parallel are taken, where they are long enough.
    threads: of synchronous training; all cores if None. command: that makes it, for the result.
    Raises ConfigError, NetworkError, StorageError, FloatingPointError, KeyboardInterrupt.
    """
    if not seeds or len(set(seeds)) != len(seeds) or len(seeds) > SEEDS_LIMIT:
        raise ConfigError(f"--seeds names 1 to {SEEDS_LIMIT} different numbers, like 1,2,3")
    if in_process and bench.slow > 1:
        raise ConfigError("--slow needs processes that run at the same time; leave --in-process out")
    if in_process and (bench.text is not None or bench.unrecorded):
        raise ConfigError("--text and --unrecorded are of real nodes; leave --in-process out")
    machine, settings = this_machine(), _settings(bench)
    known = {} if baseline is None else _curves(baseline, bench, settings)
    kept = _kept(folder / RESULT, bench, settings, seeds)
    runs = {run.seed: run for run in kept if run.in_process == in_process and run.ended_with(bench.tokens)}
    for run in kept:
        done = "is taken over" if run.seed in runs else "is another run than is asked for, and is replaced"
        log.info("what %s has of seed %d %s", folder / RESULT, run.seed, done)

    def keep(run: SeedRun) -> TrainResult:
        runs[run.seed] = run
        commands = () if command is None else (command,)
        result = _result_of(bench.name, bench.nodes, settings, list(runs.values()), (machine,), commands)
        write_atomically(folder / RESULT, to_json(result), option="--out")
        return result

    for seed in seeds:
        checkpoint = folder / f"sync-{seed}.safetensors"
        if bench.synchronous:
            result = keep(_synchronously(bench, seed, None, checkpoint, threads, show, keep))
            continue
        run = runs.get(seed) or _strategy(bench, seed, folder.absolute() / f"seed-{seed}", in_process, show)
        keep(run)
        curve, steps = known.get(seed, ((), 0))
        if curve and curve[-1].tokens >= run.curve[-1].tokens:
            run = msgspec.structs.replace(run, sync_curve=curve, sync_round_steps=steps)
        else:
            run = _synchronously(bench, seed, run, checkpoint, threads, show, keep)
        result = keep(run)
    return result


def _kept(path: Path, bench: TrainBench, settings: Settings, seeds: Sequence[int]) -> list[SeedRun]:
    """Return runs of these seeds that an earlier call left, if of the same settings; else the log says why not.

    Raises ConfigError if the file is no result, StorageError.
    """
    if not path.exists():
        return []
    found = load_result(path)
    if _json((found.strategy, found.nodes, found.settings)) != _json((bench.name, bench.nodes, settings)):
        log.warning("%s is of other settings: it is written anew", path)
        return []
    return [run for run in found.seeds if run.seed in seeds]


def _strategy(bench: TrainBench, seed: int, folder: Path, in_process: bool, show: ShowNow) -> SeedRun:
    if bench.unrecorded:
        return trio.run(train_unrecorded, bench, seed, folder, show)
    if not in_process:
        return trio.run(train_in_swarm, bench, seed, folder, TestnetProgress(show, rounds=bench.rounds))

    def tell(point: Point) -> None:
        text = f"{bench.strategy}, seed {seed}: {point.tokens:,} tokens, loss {point.val_loss:.4f}"
        log.info("%s", text)
        show(text, min(1.0, point.tokens / bench.tokens))

    with torch_threads(1):
        return SeedRun(seed=seed, in_process=True, curve=tuple(train_locally(bench, seed, tell)))


def _synchronously(
    bench: TrainBench,
    seed: int,
    run: SeedRun | None,
    checkpoint: Path,
    threads: int | None,
    show: ShowNow,
    keep: Callable[[SeedRun], object],
) -> SeedRun:
    """The run with the curve of synchronous training, which is kept and told at each of its points.

    Without a run it is beside itself.
    """
    manifest = bench.manifest(seed, [NOBODY])
    steps, threads = manifest.sync.round_steps, threads or os.cpu_count() or 1
    rounds = math.ceil(SYNC_LENGTH * (run.curve[-1].tokens if run else bench.tokens) / bench.round_tokens)
    told: list[tuple[float, int]] = []  # when, and points by then

    def beside(points: Sequence[Point]) -> SeedRun:
        itself = run or SeedRun(seed=seed, in_process=True, curve=tuple(points))
        return msgspec.structs.replace(itself, sync_curve=tuple(points), sync_round_steps=steps, sync_threads=threads)

    def tell(points: Sequence[Point]) -> None:
        so_far = beside(points)
        if len(points) > 1:
            keep(so_far)
        told.append((time.time(), len(points)))
        last = points[-1]
        text = f"synchronous, seed {seed}: round {last.round} of {rounds}, {last.tokens:,} tokens, "
        text += f"loss {last.val_loss:.4f}{_end(told, rounds)}"
        if run is not None and so_far.ending.sync_tokens is not None:
            text += f"; token efficiency of {bench.strategy} {so_far.ending.efficiency:.3f} so far"
        log.info("%s", text)
        show(text, last.round / rounds)

    with torch_threads(threads):
        return beside(
            train_synchronously(
                manifest,
                members=bench.nodes,
                rounds=rounds,
                tell=tell,
                checkpoint=checkpoint,
                device=pick_device(bench.device),
                text=bench.text,
            )
        )


def _end(told: Sequence[tuple[float, int]], rounds: int) -> str:
    """When the last round ends, if the others take as long as those since the first of `told`; empty before that."""
    (began, first), (now, points) = told[0], told[-1]
    if points == first:
        return ""
    end = now + (now - began) / (points - first) * (rounds + 1 - points)
    return f", to end at {datetime.datetime.fromtimestamp(end):%H:%M}"


def _settings(bench: TrainBench) -> Settings:
    manifest = bench.manifest(0, [NOBODY])
    return Settings(
        inner_steps=manifest.sync.inner_steps,
        round_steps=manifest.sync.round_steps,
        churn=bench.churn,
        slow=bench.slow,
        part_time=bench.part_time,
        skew=bench.skew,
        codec=manifest.sync.codec,
        options=dict(bench.workload_options),
        sync=msgspec.to_builtins(manifest.sync),
        inner=msgspec.to_builtins(manifest.inner),
        round=msgspec.to_builtins(manifest.round),
        membership=dict(bench.keys.get("membership", {})),
        device=device_name(pick_device(bench.device)),
        text=None if bench.text is None else bench.text.name,
    )


def _curves(baseline: TrainResult, bench: TrainBench, settings: Settings) -> dict[int, tuple[tuple[Point, ...], int]]:
    """The baseline's synchronous curves by seed, with the bytes of as many nodes as here, and its rounds' steps.

    Raises ConfigError if they are of another model, global batch or schedule.
    """
    if _of_synchronous(baseline.nodes, baseline.settings) != _of_synchronous(bench.nodes, settings):
        raise ConfigError(
            "--baseline is of another global batch (nodes × batch), --option, --text, --device or inner settings; "
            "leave it out"
        )
    numel, step_tokens = bench.parameters, bench.step_tokens

    def sent(point: Point) -> Point:
        steps = point.tokens // step_tokens
        return msgspec.structs.replace(point, wire_bytes=allreduce_bytes(nodes=bench.nodes, steps=steps, numel=numel))

    return {run.seed: (tuple(map(sent, run.sync_curve)), run.sync_round_steps) for run in baseline.seeds}


def _of_synchronous(nodes: int, settings: Settings) -> bytes:
    """Key that is equal where synchronous training is the same but for the steps of its rounds."""
    options = {name: value for name, value in settings.options.items() if name != "batch"}
    batch = settings.options["batch"]
    assert isinstance(batch, int)
    return _json((nodes * batch, options, settings.inner, settings.device, settings.text))


def _result_of(
    strategy: str,
    nodes: int,
    settings: Settings,
    runs: Sequence[SeedRun],
    machines: tuple[Machine, ...],
    commands: tuple[str, ...] = (),
) -> TrainResult:
    def median(numbers: Iterable[float | None]) -> float | None:
        found = [number for number in numbers if number is not None]
        return statistics.median(found) if found else None

    counted = _counted(runs)
    endings = [run.ending for run in counted]
    sync_tokens, sync_losses = [one.sync_tokens for one in endings], [one.sync_val_loss for one in endings]
    ratios = [one.loss_ratio for one in endings if one.loss_ratio is not None]
    sending = [run for run in counted if not run.in_process] or counted
    return TrainResult(
        strategy=strategy,
        nodes=nodes,
        tokens=round(statistics.median(run.curve[-1].tokens for run in counted)),
        val_loss=statistics.median(one.val_loss for one in endings),
        sync_val_loss=None if None in sync_losses else median(sync_losses),
        sync_tokens=None if None in sync_tokens else median(sync_tokens),
        wire_bytes=round(statistics.median(run.wire_bytes for run in sending)),
        sync_wire_bytes=round(statistics.median(run.sync_wire_bytes for run in sending)),
        blocked_fraction=median(run.blocked_fraction for run in runs),
        rate_ratio=median(run.rate_ratio for run in runs),
        tokens_per_s=median(run.tokens_per_s for run in runs),
        loss_ratio=Spread.of(ratios) if len(ratios) == len(endings) else None,
        efficiency=Spread.of(one.efficiency for one in endings),
        byte_ratio=Spread.of(run.byte_ratio for run in sending),
        settings=settings,
        seeds=tuple(runs),
        machines=machines,
        commands=commands,
    )


def merged(results: Sequence[TrainResult]) -> list[TrainResult]:
    """Results that differ in nothing but their seeds as one, in the order of the first of each.

    Of equally long runs the tokens differ by less than SAME_LENGTH where nodes come and go. Raises ConfigError where
    two of them are of the same seed, both by real nodes or both in one process.
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
    first = group[0]
    runs = sorted((run for result in group for run in result.seeds), key=lambda run: (run.seed, run.in_process))
    if len({(run.seed, run.in_process) for run in runs}) != len(runs):
        raise ConfigError(f"two results of {first.strategy} with the same settings have a seed in common; give one")
    machines = tuple(dict.fromkeys(machine for result in group for machine in result.machines))
    commands = tuple(dict.fromkeys(command for result in group for command in result.commands))
    return _result_of(first.strategy, first.nodes, first.settings, runs, machines, commands)


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
