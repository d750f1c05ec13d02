"""`shoal bench scale`: crowded swarms of real nodes, left alone or struck, on one machine.

    start ─► all wait for round 1 ─► links stay, let go ─► rounds, each with a time of rest ─► what nodes kept, checked
    with --held, --stopped or --apart:   … rounds before ─► some have a share of a core, are stopped, or do not reach
                                         the others ─► 10 s ─► rounds after

The founders have the manifest that `shoal init` writes, but for what `not_default` tells. With `--trainers wait` steps
wait in place of computing, and each can be found again (`step_tally`): so the processor is the daemons', and no step
that was contributed may be lost or counted twice. A daemon is at rest from when all have begun a round until the first
contributes to it.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import trio

from shoal.cli.render import ShowNow
from shoal.lab.bench import scale_rows as rows
from shoal.lab.bench.scale_spec import ScaleBench, ScaleResult, Sides, Steps, Struck
from shoal.lab.bench.step_tally import NodeTally, noting_command, read_node, tally
from shoal.lab.bench.tally_workload import WORKLOAD_NAME
from shoal.lab.case import Case
from shoal.lab.fleet import Swarm, cpu_s, load_per_core, pss_mb
from shoal.lab.shipped import init_tables, not_default
from shoal.node.reporting.events import CaughtUp, Contributed, Holding, Linked, Lost, Released, Revived, RoundEnded
from shoal.node.reporting.events import RoundStarted as Begun
from shoal.protocol.errors import ConfigError, NetworkError
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest import Manifest, validate_manifest
from shoal.testnet.faults import FaultRecord, strike, undo
from shoal.testnet.links.namespaces import Network, network, why_not
from shoal.testnet.nodes import Runtime, node_command
from shoal.testnet.parent_death import ended_with_parent
from shoal.testnet.reports.report import count_forks
from shoal.testnet.run_record import RunRecord
from shoal.testnet.scenario import Fault
from shoal.testnet.throttle import means

STEPS: Final = 20
"""Of a round, where they wait."""
NUMEL: Final = 50_000
CHUNK_VALUES: Final = 4096
"""Thirteen chunks, so that most of a dozen nodes own some."""
STALENESS_ROUNDS: Final = 60
"""Age up to which a missed contribution may count. Rounds are short here; in a swarm of longer ones the default does.
"""
ROUND_DEADLINE_S: Final = 120.0
"""Beside its steps. Where a round takes longer, those before it count, and the command says how many did not come."""
FOLLOW_DEADLINE_S: Final = 30.0
WARM_UP_ROUNDS: Final = 2
LOOK_S: Final = 0.5
POLL_S: Final = 0.2
"""Of a node's log; events say themselves when they were, and who reads many logs often is a load on the machine."""
BACK_S: Final = 10.0
"""From the end of a strike until the swarm is to have its full pace."""
_LOOP: Final = "while True: pass"


class ScaleSwarm(Swarm):
    """The founders of one run, in an empty `folder`."""

    seed = 1

    def __init__(self, bench: ScaleBench, folder: Path, network: Network | None = None) -> None:
        self.bench = bench
        self.rests: list[rows.Rest] = []
        self.current: dict[int, int] = {}
        self.contributed: dict[int, float] = {}
        self.past: dict[int, int] = {}
        self.together: set[int] = set()
        self._read_entries = 0
        runtime = Runtime(command=noting_command if bench.trainers == "wait" else node_command, poll_s=POLL_S)
        super().__init__(folder, bench.nodes, partial(scale_manifest, bench), runtime=runtime, network=network)

    async def join(self, index: int) -> None:
        """Start a node again (see `revive`)."""
        await self.revive(self.node(index))

    # -- what the nodes have logged --------------------------------------------------------------------------

    def read(self) -> None:
        """Take in what is new in the journal. With many nodes it is too long to be read anew after every event."""
        for entry in self.journal.entries[self._read_entries :]:
            match entry.event:
                case Begun(round=number):
                    self.current[entry.node] = number
                case Contributed(round=number, at=at):
                    self.contributed[number] = min(at, self.contributed.get(number, at))
                case RoundEnded(round=number) | CaughtUp(round=number):
                    self.past[entry.node] = max(number, self.past.get(entry.node, 0))
                case Holding():
                    self.together.add(entry.node)
                case Released():
                    self.together.discard(entry.node)
        self._read_entries = len(self.journal.entries)

    @property
    def last_certified(self) -> int:
        """The last round that anybody is past."""
        self.read()
        return max(self.past.values(), default=0)

    def limit_s(self, count: int) -> float:
        """Seconds within which so many rounds are to come."""
        return count * (ROUND_DEADLINE_S + self._steps_s)

    @property
    def _steps_s(self) -> float:
        return self.bench.round_s if self.bench.trainers == "wait" else 0.0

    # -- the run ---------------------------------------------------------------------------------------------

    def all_wait(self) -> bool:
        """See `Swarm`."""
        self.read()
        return len(self.together) == self.bench.nodes

    async def watch_rest(self) -> None:
        """Measure each round's time of rest, from the second on, until cancelled."""
        while True:
            await self.journal.until(self._rests)
            number = max(self.current.values())
            daemons = self.daemons()
            looks = []
            while not self._rests_no_more(number):
                used = {index: cpu_s([one]) for index, one in daemons.items()}
                looks.append(rows.Look(at=time.time(), used_s=used))
                await trio.sleep(LOOK_S)
            rest = rows.rest_of(looks, self.contributed.get(number, 0.0))
            self.rests += [] if rest is None else [rest]

    def _rests(self) -> bool:
        """True if all are in one round, from the second on, and nobody has contributed to it yet."""
        self.read()
        now = set(self.current.values())
        return len(self.current) == self.bench.nodes and len(now) == 1 and now.isdisjoint({1, *self.contributed})

    def _rests_no_more(self, number: int) -> bool:
        self.read()
        return number in self.contributed or max(self.current.values()) > number

    async def strike_all(self) -> tuple[float, float]:
        """Strike those that the bench says, for its time; returns from when to when (wall clock)."""
        began = time.time()
        async with trio.open_nursery() as nursery:
            for fault in self._faults():
                nursery.start_soon(self._strike, fault)
        return began, time.time()

    def _faults(self) -> Iterator[Fault]:
        bench, number = self.bench, max(1, self.last_certified)
        if bench.apart:
            groups = tuple(tuple(side) for side in bench.sides)
            yield Fault(kind="partition", groups=groups, round=number, duration_s=bench.seconds)
            return
        for index in bench.struck:
            if bench.held:
                yield Fault(kind="throttle", node=index, round=number, cpu_share=bench.share, duration_s=bench.seconds)
            else:
                yield Fault(kind="stop", node=index, round=number, duration_s=bench.seconds)

    async def _strike(self, fault: Fault) -> None:
        self.faults.append(FaultRecord(fault=fault, at=time.time()))
        await strike(fault, self)
        await undo(fault, self)
        self.faults[-1].done = True


def scale_manifest(bench: ScaleBench, founders: list[PeerId]) -> Manifest:
    """The manifest of the swarm that is measured."""
    tables = init_tables("scale", founders)
    if bench.trainers == "wait":
        tables["workload"] |= {
            "name": WORKLOAD_NAME,
            "options": {"numel": NUMEL, "step_s": bench.round_s / STEPS},
        }
        tables["sync"] |= {"inner_steps": STEPS, "codec": "fp32", "balance": False}
        tables["round"] |= {"chunk_values": CHUNK_VALUES, "staleness_rounds": STALENESS_ROUNDS}
    return validate_manifest(tables, source="the benchmark")


@contextmanager
def _endless_loops(number: int) -> Iterator[None]:
    loops = [subprocess.Popen(ended_with_parent([sys.executable, "-c", _LOOP])) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@contextmanager
def _links(bench: ScaleBench) -> Iterator[Network | None]:
    """Network of the nodes, where some are to be apart; None for loopback. Raises ConfigError where none can be."""
    if not bench.apart:
        yield None
        return
    if (reason := why_not()) is not None:
        raise ConfigError(f"--apart takes network namespaces, and {reason}")
    with network(bench.nodes) as links:
        yield links


@asynccontextmanager
async def _watched(swarm: ScaleSwarm) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(swarm.watch_rest)
        yield
        nursery.cancel_scope.cancel()


async def _measure(bench: ScaleBench, folder: Path, tell: ShowNow) -> ScaleResult:
    load = load_per_core()
    with _endless_loops(bench.beside_loops), _links(bench) as links:
        swarm = ScaleSwarm(bench, folder, links)
        async with swarm.owned():
            start_s = await swarm.begin_together()
            tell(f"{bench.nodes} nodes have started")
            began, ended, rounds = 0.0, 0.0, bench.rounds
            if bench.struck:
                began, ended = await _go_through_a_strike(swarm, tell)
                rounds = max(1, swarm.last_certified)
            else:
                await _go_on_for(swarm, tell)
            await _let_all_follow(swarm, rounds)
            memory_mb = await trio.to_thread.run_sync(pss_mb, swarm.daemons().values())
            record = swarm.record(rounds)
    found = partial(result_of, swarm, record, load=load, start_s=start_s, memory_mb=memory_mb, struck=(began, ended))
    return await trio.to_thread.run_sync(found)


async def _go_on_for(swarm: ScaleSwarm, tell: ShowNow) -> None:
    """Let the swarm make its rounds, as many as come in time."""
    rounds = swarm.bench.rounds
    async with _watched(swarm):
        for number in range(1, rounds + 1):
            if not await swarm.wait_round(number, swarm.limit_s(1)):
                return
            tell(f"round {number} of {rounds}", number / rounds)


async def _let_all_follow(swarm: ScaleSwarm, last: int) -> None:
    """Wait for all who can, until they are past the last round that counts: somebody is first."""

    def all_are_past() -> bool:
        swarm.read()
        return all(swarm.past.get(node.index, 0) >= last for node in swarm.nodes if node.alive)

    with trio.move_on_after(FOLLOW_DEADLINE_S):
        await swarm.journal.until(all_are_past)


async def _go_through_a_strike(swarm: ScaleSwarm, tell: ShowNow) -> tuple[float, float]:
    """Some rounds, the strike, and as many rounds after it; returns from when to when it was. Raises NetworkError."""
    rounds = swarm.bench.rounds
    before = WARM_UP_ROUNDS + rounds
    async with _watched(swarm):
        if not await swarm.wait_round(before, swarm.limit_s(before)):
            raise NetworkError(f"left alone the nodes certify {swarm.last_certified} rounds, not {before}")
    tell(f"{before} rounds; now {len(swarm.bench.struck)} nodes are struck for {swarm.bench.seconds:g} s")
    began, ended = await swarm.strike_all()
    tell("it is over")
    await trio.sleep(BACK_S)
    after = 1 + rounds  # the first may have begun before
    await swarm.wait_round(swarm.last_certified + after, swarm.limit_s(after))
    return began, ended


def result_of(
    swarm: ScaleSwarm,
    record: RunRecord,
    *,
    load: float,
    start_s: float | None,
    memory_mb: list[float],
    struck: tuple[float, float],
) -> ScaleResult:
    """The result of a run whose processes have ended. Blocks while it reads what the nodes kept."""
    bench = swarm.bench
    check = swarm.check(record)
    names = frozenset(swarm.node(index).peer_id for index in bench.struck)
    tallies, steps = _tallied(swarm, record, struck) if bench.trainers == "wait" else ((), None)
    return ScaleResult(
        bench=bench,
        not_default=not_default(swarm.manifest),
        load=load,
        start_s=start_s,
        rounds=record.scenario.rounds,
        certified=len({number for _, number in record.certified_rounds()}),
        wrong_values=check.wrong_values,
        forks=count_forks(record.decided()),
        unverified=check.errors,
        missed={index: ones for index, ones in record.missed().items() if ones and index not in bench.struck},
        evictions=rows.evictions(record, bench.struck),
        round_s=rows.seconds_of_rounds(record),
        links_made=rows.count_of(record, Linked),
        links_lost=rows.count_of(record, Lost),
        deaths=rows.deaths_announced(record),
        revivals=rows.count_of(record, Revived),
        control_kb_s=rows.control_kb_s(record),
        rest_percent=rows.rest_percent(swarm.rests),
        rest_s=sum(rest.seconds for rest in swarm.rests),
        pss_mb=statistics.median(memory_mb) if memory_mb else None,
        steps=steps,
        struck=_struck(bench, record, names, struck, tallies) if bench.struck else None,
    )


def _tallied(swarm: ScaleSwarm, record: RunRecord, struck: tuple[float, float]) -> tuple[Sequence[NodeTally], Steps]:
    """The steps of each node, and of all."""
    told = [read_node(node.index, node.peer_id, node.folder) for node in swarm.nodes]
    problems: list[str] = []
    tallies = [tally(node, told, record.scenario.rounds, struck, problems) for node in told]
    return tallies, Steps(
        made=sum(one.made for one in tallies),
        lost=sum(one.lost for one in tallies),
        twice=sum(one.twice for one in tallies),
        problems=tuple(dict.fromkeys(problems)),
    )


def _struck(
    bench: ScaleBench,
    record: RunRecord,
    names: frozenset[str],
    when: tuple[float, float],
    tallies: Sequence[NodeTally],
) -> Struck:
    began, ended = when
    first, *_ = rows.ends_between(record, 0.0, began)[WARM_UP_ROUNDS:]
    during = rows.ends_between(record, began, ended)
    return Struck(
        means=means() if bench.held else "SIGSTOP" if bench.stopped else "packet filters",
        certified=len(during),
        deaths=rows.times_dead(record, names, began, ended + BACK_S) if bench.held else (),
        before_s=rows.pace_s(rows.ends_between(record, first, began)),
        during_s=rows.pace_s(during),
        after_s=rows.pace_s(rows.ends_between(record, ended + BACK_S, record.ended_at)),
        contributors=rows.fewest_contributors(record, ended + BACK_S),
        sides=_sides(bench, record, when, tallies) if bench.apart else None,
    )


def _sides(bench: ScaleBench, record: RunRecord, when: tuple[float, float], tallies: Sequence[NodeTally]) -> Sides:
    """Work of the sides while they were apart, but for the round that was certified when they were parted."""
    began, ended = when
    known = len(rows.ends_between(record, 0.0, began))
    certified = [(rows.rounds_of(record, side, known, began, ended), side) for side in bench.sides]
    certified.sort(key=lambda one: len(one[0]), reverse=True)
    (more, _), (fewer, others) = certified
    return Sides(
        rounds=(len(more), len(fewer)),
        alone=sum(one.alone for one in tallies if one.index in others),
        one_chain_s=rows.all_past_s(record, max(more, default=known), ended),
    )


def run(bench: ScaleBench, tell: ShowNow) -> ScaleResult:
    """Run many real nodes on this machine, and say what holds and what it costs; or strike some of them meanwhile.

    Every value is computed again from what the nodes kept. With --held some are held to a share of a core for a while,
    with --stopped they are stopped, with --apart they do not reach the others: rounds are to go on, nothing is to be
    lost, and the pace is to be back 10 s after.
    """
    with TemporaryDirectory(prefix="shoal-bench-scale-") as name:
        return trio.run(_measure, bench, Path(name), tell)


CASE: Final = Case(spec=ScaleBench, run=run)
