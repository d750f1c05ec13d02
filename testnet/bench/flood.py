"""`shoal bench flood`: what is left of training while strangers do their worst.

Real nodes train; in windows that take turns they are left alone, attacked by `flood_attacker`, and, as a control, have
a process beside them that uses as much of the processor as the attacker did and makes no connection. On a machine of
few cores the attacker's own work takes time from the nodes, which an attacker elsewhere would not: `ratio` is therefore
the rate under attack by the rate in the control window beside it, and `wall_ratio` that by the rate when left alone.
The processor time of the daemon that is attacked and of all nodes' trainers is told beside both; it depends less on
what else the machine does.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import msgspec
import psutil  # type: ignore[import-untyped]
import trio

from shoal.node.control_client import request
from shoal.protocol.errors import NetworkError
from shoal.protocol.manifest import Manifest, render_manifest, validate_manifest
from shoal.testnet.bench.flood_attacker import FloodReport
from shoal.testnet.journal import Certified, Journal
from shoal.testnet.nodes import Launch, NodeProcess, Runtime

START_DEADLINE_S: Final = 180.0
WINDOW_DEADLINE_S: Final = 120.0
WARM_UP_ROUNDS: Final = 3
LEAST_ROUNDS: Final = 2
"""In a window, or it says nothing."""
INNER_STEPS: Final = 400
MUST: Final = 0.9


class FloodResult(msgspec.Struct, frozen=True, kw_only=True):
    """Rates in tokens per second, medians over the windows of a kind; shares of one processor.

    ratio: under attack by control, the median over neighbours. daemon_share: of the attacked daemon. trainers_share:
    of all nodes' trainers together.
    per_s: what the attacker made each second, by kind. refused: by the attacked node, by reason.
    """

    nodes: int
    windows: int
    alone_tokens_per_s: float
    control_tokens_per_s: float
    attacked_tokens_per_s: float
    ratio: float
    ratios: tuple[float, ...]
    wall_ratio: float
    attacker_share: float
    daemon_share_alone: float
    daemon_share_attacked: float
    trainers_share_alone: float
    trainers_share_control: float
    trainers_share_attacked: float
    per_s: dict[str, float]
    refused: dict[str, int]
    load: float

    @property
    def holds(self) -> bool:
        """Whether training keeps what it must."""
        return self.ratio >= MUST


class _Window(NamedTuple):
    """What one window showed: the rate, the attacked daemon's share of a processor, and that of all trainers together;
    and the report of the process beside them."""

    tokens_per_s: float
    daemon_share: float
    trainers_share: float
    beside: FloodReport | None


class FloodBench:
    """Nodes that train in `folder`, the first of which is attacked."""

    def __init__(self, folder: Path, nodes: int, *, scale: float = 1.0) -> None:
        self.journal = Journal()
        self.scale = scale
        self.nodes: list[NodeProcess] = []
        for index in range(nodes):
            (folder / f"node{index}").mkdir(mode=0o700)
            self.nodes.append(NodeProcess(index, folder / f"node{index}", self.journal, Runtime()))
        self.manifest = _manifest(self.nodes)
        self._path = folder / "swarm.toml"
        self._path.write_text(render_manifest(self.manifest), encoding="utf-8")

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Nodes that have certified some rounds. Raises NetworkError; no process is left behind."""
        first, *others = self.nodes
        async with trio.open_nursery() as nursery:
            nursery.start_soon(first.run, Launch(manifest=self._path, data_dir=first.folder))
            await self._until(lambda: bool(first.addresses), "the first node listens")
            for node in others:
                nursery.start_soon(node.run, Launch(manifest=self._path, data_dir=node.folder, join=first.addresses))
            await self._until(lambda: all(n.certified(WARM_UP_ROUNDS) for n in self.nodes), "the nodes train")
            yield
            nursery.cancel_scope.cancel()

    async def _until(self, condition: Any, what: str) -> None:
        with trio.move_on_after(START_DEADLINE_S) as scope:
            await self.journal.until(condition)
        if scope.cancelled_caught:
            raise NetworkError(f"{what}: not within {START_DEADLINE_S:.0f} s")

    async def window(self, seconds: float, beside: str, share: float = 0.0) -> _Window:
        """The rate of some seconds with an attacker ("attack"), a process that computes ("control"), or nothing."""
        daemon = psutil.Process(self.nodes[0].lives[-1].pid)
        reports: list[FloodReport] = []
        async with trio.open_nursery() as nursery:
            if beside:
                nursery.start_soon(self._beside, self._command(beside, seconds, share), reports)
            began, cpu, trainers = time.time(), _cpu_s([daemon]), _cpu_s(self._trainers())
            await trio.sleep(seconds)
            ended, cpu, trainers = time.time(), _cpu_s([daemon]) - cpu, _cpu_s(self._trainers()) - trainers
        took_s = ended - began
        return _Window(self._rate(began, ended), cpu / took_s, trainers / took_s, reports[0] if reports else None)

    def _trainers(self) -> list[psutil.Process]:
        daemons = [psutil.Process(node.lives[-1].pid) for node in self.nodes]
        return [child for daemon in daemons for child in daemon.children(recursive=True)]

    def _command(self, beside: str, seconds: float, share: float) -> list[str]:
        command = [sys.executable, "-m", "shoal.testnet.bench.flood_attacker"]
        if beside == "control":
            return [*command, "-", "-", "-", f"{seconds}", f"{share:.3f}"]
        status = request(self.nodes[0].folder, "status")
        lanes = _lane_address(self.nodes[0].folder)
        swarm = self.manifest.swarm_id.hex()
        return [*command, str(status["addresses"][0]), lanes, swarm, f"{seconds}", f"{self.scale}"]  # type: ignore[index]

    async def _beside(self, command: list[str], reports: list[FloodReport]) -> None:
        with trio.fail_after(WINDOW_DEADLINE_S):
            done = await trio.run_process(command, capture_stdout=True, stdin=subprocess.DEVNULL)
        reports.append(msgspec.json.decode(done.stdout, type=FloodReport))

    def _rate(self, began: float, ended: float) -> float:
        """Tokens per second of the rounds that were certified in that time, from the first to the last of them.

        Raises NetworkError if there were too few.
        """
        rounds = sorted(
            (entry.event.at, entry.event.tokens)
            for entry in self.journal.entries
            if entry.node == 0 and isinstance(entry.event, Certified) and began <= entry.event.at <= ended
        )
        if len(rounds) <= LEAST_ROUNDS:
            raise NetworkError(f"{len(rounds)} rounds in {ended - began:.0f} s say nothing; give --seconds more")
        return sum(tokens for _, tokens in rounds[1:]) / (rounds[-1][0] - rounds[0][0])

    def refused(self) -> Mapping[str, int]:
        """What the attacked node turned away."""
        return request(self.nodes[0].folder, "status")["refused"]  # type: ignore[return-value]


def _cpu_s(processes: list[psutil.Process]) -> float:
    """Processor time of these so far, in seconds."""
    return float(sum(sum(process.cpu_times()[:2]) for process in processes))


def _lane_address(folder: Path) -> str:
    for line in (folder / "events.jsonl").read_bytes().splitlines():
        told = msgspec.json.decode(line, type=dict[str, Any])
        if told.get("event") == "listening":
            return str(told["lanes"][0])
    raise NetworkError("the attacked node does not say where its lanes listen")


def _manifest(nodes: list[NodeProcess]) -> Manifest:
    tables = {
        "swarm": {"name": "flood", "founders": [node.peer_id for node in nodes], "admission": "open"},
        "workload": {"name": "regression", "options": {"inputs": 256, "outputs": 64}},
        "sync": {"inner_steps": INNER_STEPS, "balance": False},
    }
    return validate_manifest(tables, source="the benchmark")


async def _measure(folder: Path, nodes: int, windows: int, seconds: float, scale: float) -> FloodResult:
    bench = FloodBench(folder, nodes, scale=scale)
    async with bench.training():
        alone, attacked, control = [await bench.window(seconds, "")], list[_Window](), list[_Window]()
        for _ in range(windows):
            attacked.append(await bench.window(seconds, "attack"))
            report = attacked[-1].beside
            assert report is not None
            control.append(await bench.window(seconds, "control", report.cpu_s / report.seconds))
            alone.append(await bench.window(seconds, ""))
        refused = dict(bench.refused())
    ratios = [one.tokens_per_s / other.tokens_per_s for one, other in zip(attacked, control, strict=True)]
    reports = [one.beside for one in attacked if one.beside is not None]
    total_s = sum(report.seconds for report in reports)
    kinds = sorted({kind for report in reports for kind in report.made})

    def median(found: list[_Window], name: str) -> float:
        return round(float(statistics.median(getattr(one, name) for one in found)), 3)

    wall = median(attacked, "tokens_per_s") / median(alone, "tokens_per_s")
    return FloodResult(
        nodes=nodes,
        windows=windows,
        alone_tokens_per_s=median(alone, "tokens_per_s"),
        control_tokens_per_s=median(control, "tokens_per_s"),
        attacked_tokens_per_s=median(attacked, "tokens_per_s"),
        ratio=round(statistics.median(ratios), 3),
        ratios=tuple(round(ratio, 3) for ratio in ratios),
        wall_ratio=round(wall, 3),
        attacker_share=round(sum(report.cpu_s for report in reports) / total_s, 3),
        daemon_share_alone=median(alone, "daemon_share"),
        daemon_share_attacked=median(attacked, "daemon_share"),
        trainers_share_alone=median(alone, "trainers_share"),
        trainers_share_control=median(control, "trainers_share"),
        trainers_share_attacked=median(attacked, "trainers_share"),
        per_s={kind: round(sum(report.made.get(kind, 0) for report in reports) / total_s, 1) for kind in kinds},
        refused=refused,
        load=round(psutil.getloadavg()[0], 2),
    )


def measure_flood(*, nodes: int, windows: int, seconds: float, scale: float = 1.0) -> FloodResult:
    """Measure, in a folder of its own. Raises NetworkError where the nodes do not train."""
    with TemporaryDirectory(prefix="shoal-bench-flood-") as name:
        measure = partial(_measure, Path(name), nodes, windows, seconds, scale)
        try:
            return trio.run(measure)
        except* NetworkError as group:
            error: BaseException = group
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise NetworkError(str(error)) from None
