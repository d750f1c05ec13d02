"""`shoal bench flood`: what is left of training while strangers do their worst.

Real nodes train; in windows that take turns they are left alone and attacked by `flood_attacker`. An attacker elsewhere
takes no processor time from the nodes, so here it has none of theirs: the nodes run on one half of this machine's
processors, the attacker and this process on the other. With two processors all nodes and their trainers share one, and
whatever the attack costs a daemon is missing in training. Two processors may be halves of one core, or share what else
there is of the machine, so that a busy one slows the other: the attacker's are kept busy in all windows, by processes
that get what nobody else wants.

`ratio` is the rate under attack by the mean of the rates before and after it, in wall-clock time. `work_ratio` is the
same for tokens per second of processor time of all nodes, daemons and trainers: it means the same on a machine that
does other work as well, as long as the attacker gets through what it tries. What the kernel does with a packet before a
socket has it runs where it was sent from on loopback, so the attacker pays that; `packets_share` is how much it was.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Final, NamedTuple

import msgspec
import psutil  # type: ignore[import-untyped]
import trio

from shoal.cli.render import ShowNow
from shoal.lab.bench.flood_attacker import FloodReport
from shoal.lab.case import Case, Spec
from shoal.lab.fleet import START_DEADLINE_S, Swarm, cpu_s
from shoal.lab.targets import Row, Target
from shoal.node.control_client import request
from shoal.node.option import Option, Within
from shoal.node.reporting.event_files import LOG_NAME
from shoal.node.reporting.event_log import read_kind
from shoal.node.reporting.events import Certified, Listening
from shoal.protocol.errors import ConfigError, NetworkError
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest import Manifest, validate_manifest

WINDOW_DEADLINE_S: Final = 240.0
WARM_UP_ROUNDS: Final = 3
LEAST_ROUNDS: Final = 3
"""In a window; it lasts until there were so many, or it would say nothing."""
INNER_STEPS: Final = 400
RATE: Final = Target(name="training under attack", unit="× its rate left alone", least=0.9)
_BALLAST: Final = """\
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while os.getppid() == int(sys.argv[2]):
    sum(range(1_000_000))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FloodBench(Spec):
    """Options of `shoal bench flood`. scale: how hard the attacker tries, 1 for what the help says."""

    nodes: Annotated[int, Option("--nodes", help="Nodes that train; the first is attacked.", check=Within(2, 16))] = 2
    windows: Annotated[
        int, Option("--windows", help="Attacks, each between two times of peace.", check=Within(1, 100))
    ] = 3
    seconds: Annotated[float, Option("--seconds", help="How long each lasts.", check=Within(5, 60))] = 30.0
    scale: float = 1.0


class FloodResult(msgspec.Struct, frozen=True, kw_only=True):
    """Rates in tokens per second, medians over the windows of a kind; shares of one processor.

    ratio: under attack by left alone, the median over neighbours. work_ratio: the same of the tokens of a second of the
    nodes' processor time. daemon_share: of the attacked daemon. trainers_share: of all nodes' trainers together.
    packets_share: of interrupts of the network beside the attacker. per_s: what the attacker made each second, by kind.
    held: what it had open, on average. refused_per_s: by the attacked node under attack, by reason.
    """

    nodes: int
    node_processors: int
    windows: int
    alone_tokens_per_s: float
    attacked_tokens_per_s: float
    ratio: float
    ratios: tuple[float, ...]
    work_ratio: float
    work_ratios: tuple[float, ...]
    attacker_share: float
    packets_share: float
    daemon_share_alone: float
    daemon_share_attacked: float
    trainers_share_alone: float
    trainers_share_attacked: float
    per_s: dict[str, float]
    held: dict[str, float]
    refused_per_s: dict[str, float]
    load: float

    @property
    def rows(self) -> tuple[Row, ...]:
        """Measured value, with its target."""
        return (RATE.row(self.ratio),)


class _Window(NamedTuple):
    """Measurements in one window; rates per second, and shares of one processor."""

    tokens_per_s: float
    tokens_per_cpu_s: float
    daemon_share: float
    trainers_share: float
    packets_share: float
    refused_per_s: dict[str, float]
    report: FloodReport | None


def halves() -> tuple[list[int], list[int]]:
    """The processors of the nodes, and those of the attacker. Raises ConfigError where there is but one."""
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("this measurement gives processes processors of their own, which takes Linux; run it there")
    found = sorted(os.sched_getaffinity(0))
    if len(found) < 2:
        raise ConfigError("the attacker needs a processor of its own; use a machine, or a taskset, with two or more")
    return found[: len(found) // 2], found[len(found) // 2 :]


@contextlib.contextmanager
def _busy(processors: Sequence[int]) -> Iterator[None]:
    """Keep these processors busy in the block, with what gives way to everything else."""
    with contextlib.ExitStack() as stack:
        for processor in processors:
            ballast = subprocess.Popen([sys.executable, "-I", "-S", "-c", _BALLAST, str(processor), str(os.getpid())])
            stack.callback(ballast.wait)
            stack.callback(ballast.kill)
        yield


@contextlib.contextmanager
def _own_processors() -> Iterator[None]:
    """Give this process back, after the block, the processors that it had."""
    before = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class FloodedSwarm(Swarm):
    """Nodes that train in `folder`, the first of which is attacked."""

    def __init__(self, bench: FloodBench, folder: Path) -> None:
        self.scale = bench.scale
        self.of_nodes, self.of_attacker = halves()
        super().__init__(folder, bench.nodes, _manifest)

    @contextlib.asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Start the nodes; yield once they certified some rounds. Raises NetworkError; no process is left behind."""
        async with self.owned():
            os.sched_setaffinity(0, self.of_nodes)  # what is started from here on runs there
            await self.start()
            await self.until(
                # Which rounds, depends on when the last of them came.
                lambda: all(self.common_rounds(node) >= WARM_UP_ROUNDS for node in self.nodes),
                "the nodes train",
                START_DEADLINE_S,
            )
            os.sched_setaffinity(0, self.of_attacker)
            with _busy(self.of_attacker):
                yield

    async def window(self, seconds: float, *, attacked: bool) -> _Window:
        """Measure for some seconds, or more where rounds take longer. Raises NetworkError if there are too few."""
        if not attacked:
            return await self._watch(seconds)
        attacker = await trio.lowlevel.open_process(
            self._command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert attacker.stdin is not None
        assert attacker.stdout is not None
        try:
            with trio.fail_after(START_DEADLINE_S):
                await attacker.stdout.receive_some(len(b"ready\n"))
            shown = await self._watch(seconds)
            await attacker.stdin.aclose()
            with trio.fail_after(START_DEADLINE_S):
                told = b"".join([part async for part in attacker.stdout])
                await attacker.wait()
        finally:
            attacker.kill()
            with trio.CancelScope(shield=True):
                await attacker.wait()
        return shown._replace(report=msgspec.json.decode(told, type=FloodReport))

    async def _watch(self, seconds: float) -> _Window:
        daemon = self.daemons()[0]
        began, refused, packets = time.time(), Counter(self.refused()), self._packets_s()
        daemons, trainers, attacked = cpu_s(self.daemons().values()), cpu_s(self._trainers()), cpu_s([daemon])
        await trio.sleep(seconds)
        await self.until(lambda: len(self._rounds(began)) > LEAST_ROUNDS, "the nodes train on", WINDOW_DEADLINE_S)
        took_s = time.time() - began
        daemons, trainers = cpu_s(self.daemons().values()) - daemons, cpu_s(self._trainers()) - trainers
        attacked, packets = cpu_s([daemon]) - attacked, self._packets_s() - packets
        rate = self._rate(began)
        news = Counter(self.refused()) - refused
        return _Window(
            tokens_per_s=rate,
            tokens_per_cpu_s=rate * took_s / (daemons + trainers),
            daemon_share=attacked / took_s,
            trainers_share=trainers / took_s,
            packets_share=packets / took_s,
            refused_per_s={reason: times / took_s for reason, times in news.items()},
            report=None,
        )

    def _trainers(self) -> list[psutil.Process]:
        return [child for daemon in self.daemons().values() for child in daemon.children(recursive=True)]

    def _packets_s(self) -> float:
        """Processor time of interrupts of the network, and of little else, where the attacker runs."""
        times = psutil.cpu_times(percpu=True)
        return float(sum(times[processor].softirq for processor in self.of_attacker))

    def _command(self) -> list[str]:
        status = request(self.nodes[0].folder, "status")
        command = [sys.executable, "-m", "shoal.lab.bench.flood_attacker", str(status["addresses"][0])]  # type: ignore[index]
        command += [_lane_address(self.nodes[0].folder), self.manifest.swarm_id.hex(), f"{self.scale}"]
        return [*command, ",".join(map(str, self.of_attacker))]

    def _rounds(self, since: float) -> list[tuple[float, int]]:
        """Rounds that the attacked node certified since then: (time, tokens) of each, in order."""
        events = (entry.event for entry in self.journal.entries if entry.node == 0)
        return sorted(
            (event.at, event.tokens) for event in events if isinstance(event, Certified) and event.at >= since
        )

    def _rate(self, since: float) -> float:
        """Tokens per second of the rounds that were certified since then, from the first to the last of them."""
        rounds = self._rounds(since)
        return sum(tokens for _, tokens in rounds[1:]) / (rounds[-1][0] - rounds[0][0])

    def refused(self) -> Mapping[str, int]:
        """Counts of what the attacked node turned away, by reason."""
        return request(self.nodes[0].folder, "status")["refused"]  # type: ignore[return-value]


def _lane_address(folder: Path) -> str:
    for event in read_kind(folder / LOG_NAME, Listening):
        return event.lanes[0]
    raise NetworkError("the attacked node does not say where its lanes listen")


def _manifest(founders: list[PeerId]) -> Manifest:
    tables = {
        "swarm": {"name": "flood", "founders": founders, "admission": "open"},
        "workload": {"name": "regression", "options": {"inputs": 256, "outputs": 64}},
        "sync": {"inner_steps": INNER_STEPS, "balance": False},
    }
    return validate_manifest(tables, source="the benchmark")


async def _measure(bench: FloodBench, folder: Path) -> FloodResult:
    swarm = FloodedSwarm(bench, folder)
    async with swarm.training():
        alone, attacked = [await swarm.window(bench.seconds, attacked=False)], list[_Window]()
        for _ in range(bench.windows):
            attacked.append(await swarm.window(bench.seconds, attacked=True))
            alone.append(await swarm.window(bench.seconds, attacked=False))

    def median(found: list[_Window], name: str) -> float:
        return round(float(statistics.median(getattr(one, name) for one in found)), 3)

    def ratios(name: str) -> tuple[float, ...]:
        values = [getattr(one, name) for one in alone]
        peace = map(statistics.mean, pairwise(values))
        return tuple(round(getattr(one, name) / mean, 3) for one, mean in zip(attacked, peace, strict=True))

    by_wall, by_work = ratios("tokens_per_s"), ratios("tokens_per_cpu_s")
    reports = [one.report for one in attacked if one.report is not None]
    total_s = sum(report.seconds for report in reports)
    return FloodResult(
        nodes=bench.nodes,
        node_processors=len(swarm.of_nodes),
        windows=bench.windows,
        alone_tokens_per_s=median(alone, "tokens_per_s"),
        attacked_tokens_per_s=median(attacked, "tokens_per_s"),
        ratio=round(statistics.median(by_wall), 3),
        ratios=by_wall,
        work_ratio=round(statistics.median(by_work), 3),
        work_ratios=by_work,
        attacker_share=round(sum(report.cpu_s for report in reports) / total_s, 3),
        packets_share=round(median(attacked, "packets_share") - median(alone, "packets_share"), 3),
        daemon_share_alone=median(alone, "daemon_share"),
        daemon_share_attacked=median(attacked, "daemon_share"),
        trainers_share_alone=median(alone, "trainers_share"),
        trainers_share_attacked=median(attacked, "trainers_share"),
        per_s=_means([{kind: n / report.seconds for kind, n in report.made.items()} for report in reports]),
        held=_means([report.held for report in reports]),
        refused_per_s=_means([one.refused_per_s for one in attacked]),
        load=round(psutil.getloadavg()[0], 2),
    )


def _means(found: Collection[Mapping[str, float]]) -> dict[str, float]:
    kinds = sorted({kind for one in found for kind in one})
    return {kind: round(sum(one.get(kind, 0) for one in found) / len(found), 1) for kind in kinds}


def run(bench: FloodBench, tell: ShowNow) -> FloodResult:
    """Measure the rate of training before and during a flood: 200 hellos/s, 500 half-open connections and more."""
    halves()
    with _own_processors(), TemporaryDirectory(prefix="shoal-bench-flood-") as name:
        return trio.run(_measure, bench, Path(name))


def to_lines(result: FloodResult) -> list[str]:
    """The result for people."""
    made = ", ".join(f"{rate:g} {kind}" for kind, rate in result.per_s.items())
    held = ", ".join(f"{number:g} {kind}" for kind, number in result.held.items())
    refused = ", ".join(f"{rate:g} {reason}" for reason, rate in result.refused_per_s.items())
    trainers = (result.trainers_share_alone, result.trainers_share_attacked)
    alone, attacked = (f"{share:.1%} of one" for share in (result.daemon_share_alone, result.daemon_share_attacked))
    return [
        f"nodes         {result.nodes} on {result.node_processors} processors, the attacker on the others",
        f"left alone    {result.alone_tokens_per_s:.0f} tokens/s; the daemon takes {alone}",
        f"under attack  {result.attacked_tokens_per_s:.0f} tokens/s; the daemon takes {attacked}",
        f"ratio         {result.ratio:.3f}; of tokens per second of the nodes' processor time {result.work_ratio:.3f}",
        "trainers      {:.2f} processors alone, {:.2f} under attack".format(*trainers),
        f"attacker      {result.attacker_share:.1%} of one, packets {result.packets_share:.1%}",
        f"each second   {made}",
        f"held          {held}",
        f"refused       each second {refused}",
    ]


CASE: Final = Case(spec=FloodBench, run=run, lines=to_lines)
