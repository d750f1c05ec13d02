"""A strategy on a real testnet: what its event logs and its report say of loss, tokens, bytes and speed.

    wire bytes after round e   per process, what it had sent by its last certificate up to e; all of them together
    speed of a node            tokens ÷ seconds of its stretches of inner steps, the median
    speed of the swarm         certified tokens ÷ seconds, from the certificate of the first round to that of the last

Under the strategy gossip, where nothing is certified, it is a round's outer step that counts in place of a certificate.

A slow node is one whose trainer is stopped (SIGSTOP) for all but 1/F of each short period: steps, evaluation and
everything else it does take F times as long, and nothing in the node knows why.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeVar

import msgspec
import psutil  # type: ignore[import-untyped]
import trio

from shoal.cli.render import ShowNow
from shoal.lab.bench.skewed_text import texts_of_nodes
from shoal.lab.bench.token_efficiency import Ending, ending
from shoal.lab.bench.train_spec import Point, TrainBench
from shoal.lab.fleet import Swarm, untested_command
from shoal.lab.fork_server import TRAINER
from shoal.node.reporting.event_files import LOG_NAME
from shoal.node.reporting.event_log import read_log
from shoal.node.reporting.events import Certified, Contributed, Evaluated, RoundEnded, Started, Stepped
from shoal.protocol.errors import NetworkError
from shoal.testnet.nodes import Launch, Runtime, node_command
from shoal.testnet.progress import OnProgress, ignore_progress
from shoal.testnet.reports.report import Report, count_forks, ok
from shoal.testnet.run_folder import replace_earlier_run
from shoal.testnet.swarm import run_testnet

Ended = TypeVar("Ended", bound=RoundEnded)

SLOW_PERIOD_S: Final = 0.4
SEARCH_PERIOD_S: Final = 0.1
ROUND_S: Final = 300.0
"""To start, to compile, or for a round of a large model, of which several share a device."""


class SeedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One seed. Losses are held-out ones.

    curve: the strategy's, before round 1 and after each round, to the one that counted the last tokens. sync_curve:
    that of synchronous data parallel, as far as it is known; sync_round_steps and sync_threads: its rounds' steps, and
    torch's threads. In one process there is none of the following three. blocked_fraction: the share of the trainers'
    time in which they waited for a round; None if nothing was timed. rate_ratio: the swarm's speed ÷ the sum of its
    nodes'; None where these come and go, or if it was too short to have one. sound: all tokens were certified, in a
    run with which a testnet would pass. trouble: why it ended before its time.
    """

    seed: int
    in_process: bool
    curve: tuple[Point, ...]
    sync_curve: tuple[Point, ...] = ()
    sync_round_steps: int = 0
    sync_threads: int = 1
    blocked_fraction: float | None = None
    tokens_per_s: float | None = None
    rate_ratio: float | None = None
    sound: bool = True
    trouble: str | None = None

    @property
    def ending(self) -> Ending:
        """Its end beside the synchronous curve."""
        return ending(self.curve, self.sync_curve)

    @property
    def wire_bytes(self) -> int:
        """Bytes that all nodes sent."""
        return self.curve[-1].wire_bytes

    @property
    def sync_wire_bytes(self) -> int:
        """Bytes that synchronous training would have sent for as many tokens; 0 before it made a step."""
        last = self.sync_curve[-1] if self.sync_curve else None
        return self.curve[-1].tokens * last.wire_bytes // last.tokens if last and last.tokens else 0

    @property
    def byte_ratio(self) -> float:
        """Factor by which the strategy sent fewer bytes than synchronous training."""
        return self.sync_wire_bytes / max(1, self.wire_bytes)

    def ended_with(self, tokens: int) -> bool:
        """True if it is a whole run of so many tokens."""
        return len(self.curve) > 1 and self.curve[-1].tokens >= tokens > self.curve[-2].tokens


async def train_in_swarm(
    bench: TrainBench, seed: int, folder: Path, on_progress: OnProgress = ignore_progress
) -> SeedRun:
    """Run the strategy on real nodes in the absolute `folder`, until the tokens asked for are certified.

    Raises ConfigError and StorageError before it starts, NetworkError if it certified no round or no loss is known;
    KeyboardInterrupt. Cancellation: all processes are ended and reaped.
    """
    scenario = bench.scenario(seed)
    with texts_of_nodes(bench, seed) as texts:
        plain = not texts and bench.device == "auto" and bench.text is None
        run = run_testnet if plain else partial(run_testnet, runtime=Runtime(command=node_line(bench, texts)))
        async with trio.open_nursery() as nursery:
            if bench.slow > 1:
                nursery.start_soon(_slow_down, folder / "nodes" / str(bench.nodes - 1), bench.slow)
            report = await run(scenario, folder, on_progress)
            nursery.cancel_scope.cancel()
    return read_run(bench, seed, report, folder)


def node_line(bench: TrainBench, texts: Sequence[Path] = ()) -> Callable[[Launch], list[str]]:
    """The command line of a real node: on the benchmark's device, and on its own of these texts where there are any."""

    def line(launch: Launch) -> list[str]:
        text = texts[int(launch.data_dir.name)] if texts else bench.text
        return [
            *(_users_command(launch) if bench.unrecorded else node_command(launch)),
            *("--device", bench.device),
            *(() if text is None else ("--data", str(text.absolute()))),
        ]

    return line


def _users_command(launch: Launch) -> list[str]:
    """Command line of a node with as many threads as a user's takes by itself."""
    line = untested_command(launch)
    at = line.index("--threads")
    return [*line[:at], *line[at + 2 :]]


async def train_unrecorded(bench: TrainBench, seed: int, folder: Path, show: ShowNow) -> SeedRun:
    """Run the strategy on nodes that keep no records, in the absolute `folder`, until all tokens are certified.

    What is checked is that all came to the same states. Raises ConfigError, StorageError, and NetworkError.
    Cancellation: all processes are ended and reaped.
    """
    out = await trio.to_thread.run_sync(partial(replace_earlier_run, folder, "testnet", folders=("nodes",), files=()))
    swarm = Swarm(out, bench.nodes, partial(bench.manifest, seed), runtime=Runtime(command=node_line(bench)))
    journal = swarm.journal

    def tokens() -> dict[int, int]:
        firsts = first_certificates(journal.of(Certified))
        return dict(
            zip([0, *(e.round for e in firsts)], accumulate((e.tokens for e in firsts), initial=0), strict=True)
        )

    def losses() -> dict[int, float]:
        known = tokens()
        found = {event.round: event.loss for event in journal.of(Evaluated) if event.loss is not None}
        return {number: found[number] for number in sorted(found) if number in known}

    def ended() -> int | None:
        """First round with a known loss by which all tokens are certified."""
        known = tokens()
        return next((number for number in losses() if known[number] >= bench.tokens), None)

    async with swarm.owned():
        await swarm.start(deadline_s=ROUND_S)
        while ended() is None:
            done = max(tokens().values())
            told = [f", loss {loss:.4f}" for loss in losses().values()][-1:]
            show(f"{bench.name}, seed {seed}: {done:,} tokens{''.join(told)}", min(1.0, done / bench.tokens))
            known = swarm.last_certified
            await swarm.until(
                lambda: ended() is not None or swarm.last_certified > known,  # noqa: B023  called at once
                f"round {known + 1} is certified",
                ROUND_S,
            )
    lives = [journal.of(Certified, node.index) for node in swarm.nodes]
    last = ended()
    assert last is not None
    return SeedRun(
        seed=seed,
        in_process=False,
        curve=tuple(
            Point(round=number, tokens=tokens()[number], wire_bytes=bytes_sent(lives, number), val_loss=loss)
            for number, loss in losses().items()
            if number <= last
        ),
        tokens_per_s=certified_per_s(journal.of(Certified)),
        sound=not count_forks(swarm.record(swarm.last_certified).decided()),
    )


def read_run(bench: TrainBench, seed: int, report: Report, folder: Path) -> SeedRun:
    """Read a run's outcome from the report, and the nodes' logs in `folder`. Raises NetworkError."""
    lives = [life for node in report.nodes for life in _lives(folder / "nodes" / str(node.index) / LOG_NAME)]
    points = _points(report, [life.certified for life in lives], bench.tokens)
    tokens = {found.round: found.tokens for found in report.rounds}
    speed = certified_per_s([line for life in lives for line in life.certified], tokens)
    ideal = None if bench.churn else _ideal(lives)
    return SeedRun(
        seed=seed,
        in_process=False,
        curve=tuple(points),
        tokens_per_s=speed,
        rate_ratio=speed / ideal if ideal else None,
        blocked_fraction=_blocked(lives),
        sound=_sound(report) and points[-1].tokens >= bench.tokens,
        trouble=report.trouble,
    )


def _sound(report: Report) -> bool:
    """True if a testnet would pass with it; faults of rounds that were not needed any more do not count."""
    struck = tuple(fault for fault in report.faults if fault.round <= report.rounds_certified)
    return ok(msgspec.structs.replace(report, faults=struck))


@dataclass(frozen=True, slots=True)
class _Life:
    """Rounds that one process of a node certified and contributed to, in order."""

    node: Path
    certified: tuple[Certified | Stepped, ...]
    contributed: tuple[Contributed, ...]


def _lives(log: Path) -> Iterator[_Life]:
    events = list(read_log(log))
    starts = [at for at, event in enumerate(events) if isinstance(event, Started)]
    for start, stop in pairwise([*starts, len(events)]):
        life = events[start:stop]
        yield _Life(
            log.parent,
            tuple(event for event in life if isinstance(event, Certified | Stepped)),
            tuple(event for event in life if isinstance(event, Contributed)),
        )


def _points(report: Report, lives: Sequence[Sequence[Certified | Stepped]], wanted: int) -> list[Point]:
    """One per round whose loss is known; the last is the first of them that is not before the `wanted` tokens."""
    losses = (report.loss.first, *report.loss.by_round)
    tokens = list(accumulate((found.tokens for found in report.rounds), initial=0))
    enough = next((number for number, total in enumerate(tokens) if total >= wanted), len(tokens) - 1)
    if not enough:
        raise NetworkError(f"no round was certified{f': {report.trouble}' if report.trouble else ''}")
    last = next((number for number in range(enough, len(losses)) if losses[number] is not None), None)
    if last is None:
        raise NetworkError(f"nobody evaluated the state after round {enough}; run it again on a machine less busy")
    return [
        Point(round=number, tokens=tokens[number], wire_bytes=bytes_sent(lives, number), val_loss=loss)
        for number, loss in enumerate(losses[: last + 1])
        if loss is not None
    ]


def bytes_sent(lives: Iterable[Sequence[Certified | Stepped]], round: int) -> int:
    """Bytes that all nodes had sent after a round: per life the newest counter up to there."""
    total = 0
    for certified in lives:
        counters = [line.lanes_sent + line.control_sent for line in certified if line.round <= round]
        total += counters[-1] if counters else 0
    return total


def first_certificates(certified: Iterable[Ended]) -> list[Ended]:
    """The first certificate of each round, in the order of the rounds."""
    first: dict[int, Ended] = {}
    for line in sorted(certified, key=lambda line: line.at):
        first.setdefault(line.round, line)
    return [first[number] for number in sorted(first)]


def certified_per_s(
    certified: Iterable[Certified | Stepped], tokens: Mapping[int, int] = MappingProxyType({})
) -> float:
    """Tokens per second of the swarm, by the first certificate of each round; 0 with fewer than two rounds.

    tokens: by round, where a line does not count those of all nodes, as under the strategy gossip.
    """
    rounds = first_certificates(certified)
    if len(rounds) < 2:
        return 0.0
    return sum(tokens.get(line.round, line.tokens) for line in rounds[1:]) / (rounds[-1].at - rounds[0].at)


def _ideal(lives: Iterable[_Life]) -> float:
    """The sum over nodes of the median speed of their inner steps."""
    speeds: dict[Path, list[float]] = defaultdict(list)
    for life in lives:
        speeds[life.node] += [line.tokens / line.seconds for line in life.contributed if line.seconds > 0]
    return sum(statistics.median(found) for found in speeds.values() if found)


def _blocked(lives: Iterable[_Life]) -> float | None:
    """The share of the time between contributions in which trainers waited for a round; None if it was not measured."""
    lines = [line for life in lives for line in life.contributed]
    wall_s = sum(line.wall_s for line in lines)
    return sum(line.blocked_s for line in lines) / wall_s if wall_s else None


async def _slow_down(node: Path, factor: float) -> None:
    """Let the trainer of the node in folder `node` run for 1 / `factor` of the time.

    Cancellation: it is let go on.
    """
    while True:
        trainer = await trio.to_thread.run_sync(_trainer_of, node)
        if trainer is None:
            await trio.sleep(SEARCH_PERIOD_S)
            continue
        with contextlib.suppress(psutil.NoSuchProcess):
            try:
                while True:
                    trainer.suspend()
                    await trio.sleep(SLOW_PERIOD_S * (1 - 1 / factor))
                    trainer.resume()
                    await trio.sleep(SLOW_PERIOD_S / factor)
            finally:
                trainer.resume()


def _trainer_of(node: Path) -> psutil.Process | None:
    """The trainer among this process's descendants that belongs to the node in that folder."""
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if str(node) in process.cmdline():
                return next((c for c in process.children(recursive=True) if TRAINER in c.cmdline()), None)
    return None
