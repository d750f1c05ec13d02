"""`shoal bench large`: one run of a large model, synchronous or by a swarm of real nodes; see `large_spec`."""

from __future__ import annotations

import time
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec
import torch
import trio

from shoal.cli.render import ShowNow
from shoal.lab.bench.large_spec import LargeBench, LargeRun
from shoal.lab.bench.machine import device_name
from shoal.lab.bench.train_spec import NOBODY, Point, inner_settings
from shoal.lab.bench.train_swarm import bytes_sent, certified_per_s, first_certificates
from shoal.lab.bench.train_sync import SynchronousTraining
from shoal.lab.case import Case, LongCaseOptions
from shoal.lab.fleet import Swarm, untested_command
from shoal.node.reporting.events import Certified, Evaluated
from shoal.node.state.store import write_atomically
from shoal.node.training.devices import pick_device
from shoal.node.workload import load_workload
from shoal.protocol.errors import ConfigError, NetworkError, StorageError
from shoal.testnet.nodes import Launch, Runtime
from shoal.testnet.reports.report import allreduce_bytes, count_forks

START_S: Final = 300.0
"""To start, compile and train together: several trainers share a device."""
ROUND_S: Final = 300.0
EVALUATION_S: Final = 120.0


def run(bench: LargeBench, tell: ShowNow) -> LargeRun:
    """Train a large model on text once, synchronously or with a strategy by real nodes, and keep its curve."""
    beside = () if bench.beside is None else _earlier(bench.beside, bench).points
    found = _synchronously(bench, tell) if bench.synchronous else trio.run(_in_swarm, bench, tell)
    found = msgspec.structs.replace(found, beside=beside)
    if bench.out is not None:
        bench.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(bench.out, msgspec.json.format(msgspec.json.encode(found, enc_hook=str), indent=1))
    return found


def _earlier(path: Path, bench: LargeBench) -> LargeRun:
    """An earlier result. Raises ConfigError if it is none, or not comparable; StorageError."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=LargeRun, dec_hook=lambda kind, value: kind(value))
    except OSError as error:
        raise StorageError(f"--beside: cannot read {path}: {error.strerror}; check the path") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"--beside: {path} is no result of `shoal bench large`: {error}") from None
    if not found.bench.synchronous or found.bench.alike != bench.alike:
        raise ConfigError("--beside: give a synchronous run of the same model, batch of all nodes and seed")
    return found


# -- synchronous ---------------------------------------------------------------------------------------------


def _synchronously(bench: LargeBench, tell: ShowNow) -> LargeRun:
    began = time.monotonic()
    manifest = bench.manifest([NOBODY])
    device = pick_device(bench.device)
    text = None if bench.text is None else str(bench.text)
    training = SynchronousTraining(
        load_workload(manifest.workload.name, manifest.workload.options, text),
        seed=bench.seed,
        inner=inner_settings(manifest),
        members=bench.nodes,
        device=device,
    )
    points, spent_s, timed = list[Point](), 0.0, 0
    while not points or bench.goes_on(training.tokens, time.monotonic() - began):
        if points:
            before, since = training.tokens, time.monotonic()
            training.train_round(bench.inner_steps)
            if len(points) > 1:  # the first round compiles
                spent_s, timed = spent_s + time.monotonic() - since, timed + training.tokens - before
        point = Point(
            round=training.round,
            tokens=training.tokens,
            wire_bytes=allreduce_bytes(
                nodes=bench.nodes, steps=training.round * bench.inner_steps, numel=training.numel
            ),
            val_loss=training.evaluate(),
        )
        points.append(point)
        tell(told(point))
    return LargeRun(
        bench=bench,
        device=device_name(device),
        torch=str(torch.__version__),
        points=tuple(points),
        tokens_per_s=timed / spent_s if spent_s else 0.0,
        wall_s=time.monotonic() - began,
    )


# -- by a swarm ----------------------------------------------------------------------------------------------


async def _in_swarm(bench: LargeBench, tell: ShowNow) -> LargeRun:
    began = time.monotonic()
    pick_device(bench.device)
    text = [] if bench.text is None else ["--data", str(bench.text.absolute())]

    def command(launch: Launch) -> list[str]:
        line = untested_command(launch)
        at = line.index("--threads")  # as many as a user's node takes by itself
        return [*line[:at], *line[at + 2 :], "--device", bench.device, "--log-level", "warning", *text]

    with TemporaryDirectory(prefix="shoal-bench-large-") as name:
        swarm = Swarm(Path(name), bench.nodes, bench.manifest, runtime=Runtime(command=command))
        curve = Curve(swarm)
        async with swarm.owned():
            await swarm.start(deadline_s=START_S)
            while bench.goes_on(curve.tokens, time.monotonic() - began):
                known = swarm.last_certified
                limit_s = ROUND_S if known else START_S
                await swarm.until(lambda: swarm.last_certified > known, f"round {known + 1} is certified", limit_s)  # noqa: B023  called at once
                if points := curve.points():
                    tell(told(points[-1]))
            last = swarm.last_certified - bench.manifest([NOBODY]).sync.fragments
            await swarm.until(
                lambda: any(e.round > last for e in swarm.journal.of(Evaluated)), "the last loss is known", EVALUATION_S
            )
    points = curve.points()
    if len(points) < 2:
        raise NetworkError(f"only {len(points)} losses are known; give it more --tokens")
    return LargeRun(
        bench=bench,
        device=device_name(pick_device(bench.device)),
        torch=str(torch.__version__),
        points=points,
        tokens_per_s=certified_per_s(swarm.journal.of(Certified)),
        wall_s=time.monotonic() - began,
        unequal=count_forks(swarm.record(swarm.last_certified).decided()),
    )


class Curve:
    """Course of a swarm's training, read off its nodes' logs."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm

    @property
    def tokens(self) -> int:
        """Tokens of all certified rounds."""
        return sum(event.tokens for event in first_certificates(self._swarm.journal.of(Certified)))

    def points(self) -> tuple[Point, ...]:
        """A point for each round whose loss is known, with the bytes that all nodes had sent by then."""
        journal = self._swarm.journal
        firsts = first_certificates(journal.of(Certified))
        tokens = dict(
            zip((0, *(e.round for e in firsts)), accumulate((e.tokens for e in firsts), initial=0), strict=True)
        )
        losses = {event.round: event.loss for event in journal.of(Evaluated) if event.loss is not None}
        lives = [journal.of(Certified, node.index) for node in self._swarm.nodes]
        return tuple(
            Point(round=number, tokens=tokens[number], wire_bytes=bytes_sent(lives, number), val_loss=losses[number])
            for number in sorted(losses)
            if number in tokens
        )


# -- for people ----------------------------------------------------------------------------------------------


def told(point: Point) -> str:
    """One point of a curve."""
    return f"{point.tokens / 1e6:.1f} M tokens, {point.val_loss:.4f} bits per byte"


CASE: Final = Case(
    spec=LargeBench,
    run=run,
    document=lambda result: {"loss": result.loss, **msgspec.to_builtins(result, enc_hook=str)},
    sound=lambda result: not result.unequal,
    options=LongCaseOptions,
)
