"""`shoal bench goodput`: what share of the work that nodes could do is certified while they fail and come back.

    start ─► all wait for round 1 ─► let go ─► round 1 ─► nodes fail, are down, and are started again ─► one more round
                                              └── the window: from its certificate to the first after the time ──────┘

The nodes are founders of the manifest that `shoal init` writes, but for the workload: its steps wait in place of
computing, each is noted, and each is a token. A failure is SIGKILL of the daemon and its trainer. A node is up from the
moment when its process is started: what it needs until its first step is part of that time.

Goodput: tokens certified in the window, over those that the nodes would have made in the time that they were up, and
over those that they would have made in all the time, were all of it steps. Source: Decoupled DiLoCo, arXiv 2604.21428.
Beside it stands what data parallel training that stops and restarts makes of the same failures (`goodput_trace`).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec
import trio

from shoal.cli.render import ShowNow
from shoal.cli.text import count
from shoal.lab.bench import goodput_rows as rows
from shoal.lab.bench.goodput_spec import GoodputBench, GoodputResult, rows_of
from shoal.lab.bench.goodput_trace import Failures, draw_failures, stop_and_restart
from shoal.lab.bench.scale_rows import seconds_of_rounds
from shoal.lab.bench.step_tally import NodeLog, counted_tokens, kept_plan, noting_command, read_node
from shoal.lab.bench.tally_workload import WORKLOAD_NAME
from shoal.lab.case import Case, LongCaseOptions
from shoal.lab.fleet import Swarm, end, load_per_core
from shoal.lab.shipped import init_tables, not_default
from shoal.lab.targets import Spread
from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest import Manifest, validate_manifest
from shoal.testnet.nodes import Runtime
from shoal.testnet.reports.report import count_forks
from shoal.testnet.run_record import RunRecord

NUMEL: Final = 50_000
ROUND_DEADLINE_S: Final = 120.0
"""Beside its steps. Where the last round takes longer, the window ends without it."""
POLL_S: Final = 0.2
TELL_S: Final = 5.0


class GoodputSwarm(Swarm):
    """The founders of one run, in an empty `folder`."""

    def __init__(self, bench: GoodputBench, folder: Path) -> None:
        self.failures = 0
        self._down_s = bench.down_s
        runtime = Runtime(command=noting_command, poll_s=POLL_S)
        super().__init__(folder, bench.nodes, partial(goodput_manifest, bench), runtime=runtime)

    async def join(self, index: int) -> None:
        """Start a node again, as soon as another listens or none is there that will."""
        others = [node for node in self.nodes if node.index != index]
        await self.journal.until(
            lambda: any(node.addresses for node in others) or not any(node.alive for node in others)
        )
        addresses = tuple(address for node in others for address in node.addresses)
        await self.launch(self.node(index), join=addresses)

    async def fail(self, index: int, moments: Sequence[float], began: float) -> None:
        """Kill a node at each of these moments, in seconds since `began` (trio's clock), and start it again."""
        for at in moments:
            await trio.sleep_until(began + at)
            self.failures += 1
            await end(self.node(index))
            await trio.sleep(self._down_s)
            await self.join(index)


def goodput_manifest(bench: GoodputBench, founders: list[PeerId]) -> Manifest:
    """The manifest of the swarm that is measured."""
    tables = init_tables("goodput", founders)
    tables["workload"] |= {"name": WORKLOAD_NAME, "options": {"numel": NUMEL, "step_s": bench.step_s}}
    return validate_manifest(tables, source="the benchmark")


def run(bench: GoodputBench, tell: ShowNow) -> Iterator[GoodputResult]:
    """Kill real nodes again and again, and say how much of the work that they could do is certified.

    Steps wait in place of computing, so that the machine's own load does not count as long as it has some rest. Every
    value is computed again from what the nodes kept. Beside it stands what data parallel training that stops and
    restarts would make of the very same failures.
    """
    with TemporaryDirectory(prefix="shoal-bench-goodput-") as name:
        for mtbf_s in bench.mtbf_s:
            folder = (bench.out or Path(name)) / f"every-{mtbf_s}-s"
            yield trio.run(_measure, bench, mtbf_s, folder, tell)


async def _measure(bench: GoodputBench, mtbf_s: int, folder: Path, tell: ShowNow) -> GoodputResult:
    load = load_per_core()
    swarm = GoodputSwarm(bench, folder)
    seconds = bench.minutes * 60
    failures = draw_failures(bench.seed, nodes=bench.nodes, seconds=seconds, mtbf_s=mtbf_s, down_s=bench.down_s)
    round_limit_s = ROUND_DEADLINE_S + swarm.manifest.sync.round_steps * bench.step_s
    tell(f"{bench.nodes} nodes start; then each fails every {mtbf_s} s, {count(failures.count, 'time')} in all")
    async with swarm.owned():
        await swarm.begin_together()
        if not await swarm.wait_round(1, round_limit_s):
            raise NetworkError("the nodes do not certify their first round, before any fails")
        async with trio.open_nursery() as nursery:
            began = trio.current_time()
            for index, moments in enumerate(failures.of_nodes):
                nursery.start_soon(swarm.fail, index, moments, began)
            nursery.start_soon(_tell_on, swarm, began, seconds, tell)
            await swarm.live(seconds)
            await swarm.wait_round(swarm.last_certified + 1, round_limit_s)
            ended_at = time.time()
            nursery.cancel_scope.cancel()
        record = swarm.record(swarm.last_certified)
    found = partial(result_of, swarm, record, failures, bench=bench, mtbf_s=mtbf_s, load=(load, load_per_core()))
    return await trio.to_thread.run_sync(partial(found, ended_at=ended_at))


async def _tell_on(swarm: GoodputSwarm, began: float, seconds: float, tell: ShowNow) -> None:
    while True:
        share = min(1.0, (trio.current_time() - began) / seconds)
        tell(f"round {swarm.last_certified}; {sum(node.alive for node in swarm.nodes)} nodes are up", share)
        await trio.sleep(TELL_S)


# -- what came of it -----------------------------------------------------------------------------------------


def result_of(
    swarm: GoodputSwarm,
    record: RunRecord,
    failures: Failures,
    *,
    bench: GoodputBench,
    mtbf_s: int,
    load: tuple[float, float],
    ended_at: float,
) -> GoodputResult:
    """The result of a run whose processes have ended. Blocks while it reads what the nodes kept."""
    logs = [read_node(node.index, node.peer_id, node.folder) for node in swarm.nodes]
    nodes = [rows.times_of(log.events, log.steps, facts.lives) for log, facts in zip(logs, record.nodes, strict=True)]
    window, tokens = rows.window_of(record, failures.seconds, ended_at)
    step_s = rows.step_seconds(nodes, window)
    counted = {number: _counted(logs, number) for number in range(1, record.scenario.rounds + 1)}
    contributed = [(log.peer_id, number) for log in logs for number in log.made_at if number in tokens]
    check = swarm.check(record)
    restarts = [restart for node in nodes for restart in rows.restarts_of(node, window, step_s)]
    parallel = stop_and_restart(failures, bench.checkpoint_s)
    return GoodputResult(
        bench=bench,
        mtbf_s=mtbf_s,
        not_default=not_default(swarm.manifest),
        load=load,
        seconds=round(window[1] - window[0], 3),
        rounds=len(tokens),
        failures=swarm.failures,
        account=rows.account(nodes, window, certified=sum(tokens.values()), step_s=step_s),
        steps_certified=sum(tokens.values()),
        steps_made=sum(len(node.steps_in(*window)) for node in nodes),
        step_s=round(step_s, 5),
        round_s=seconds_of_rounds(record),
        fewest=min((len(counted[number]) for number in tokens), default=0),
        contributions=len(contributed),
        missed=sum(peer not in counted[number] for peer, number in contributed),
        restarts_s=Spread.of_any(restart.step_s for restart in restarts),
        trainer_s=Spread.of_any(restart.trainer_s for restart in restarts),
        interval_s=None if math.isinf(parallel.interval_s) else parallel.interval_s,
        parallel_of_up=parallel.of_up,
        parallel_of_all=parallel.of_all,
        not_made=_not_made(logs, counted.values()),
        wrong_values=check.wrong_values,
        forks=count_forks(record.decided()),
        unverified=check.errors,
    )


def _counted(logs: Sequence[NodeLog], number: int) -> dict[str, int]:
    """Tokens of everyone who is in a certified round; none if no node kept it, which the check says."""
    kept = kept_plan(logs, number)
    return {} if kept is None else counted_tokens(*kept)


def _not_made(logs: Sequence[NodeLog], rounds: Iterable[Mapping[str, int]]) -> int:
    """Steps that rounds count beyond those that each node's trainer noted."""
    counted: Counter[str] = Counter()
    for tokens in rounds:
        counted.update(tokens)
    return sum(max(0, counted[log.peer_id] - len(log.steps)) for log in logs)


def to_document(result: GoodputResult) -> dict[str, object]:
    """One result under the names of its fields, and what others read of it by name."""
    return {
        "goodput": result.account.of_up,
        "restart_goodput": result.parallel_of_up,
        "tokens": result.steps_certified,
        **msgspec.to_builtins(result, enc_hook=str),
    }


CASE: Final = Case(
    spec=GoodputBench,
    run=run,
    rows=rows_of,
    document=to_document,
    options=LongCaseOptions,
    in_parts=True,
)
