"""A soak: a swarm of real nodes that trains for hours with a fault a minute, and whether anything grows.

    run_soak ── LivingSwarm ──┬─ strikes    one after the other, each at its time and when all are whole again
                              ├─ looks      every LOOK_PERIOD_S at every process and folder ─► samples.jsonl
                              └─ judge      rounds recomputed and forgotten as they become final
             └─ verdicts ─► soak.json

The nodes run in network namespaces where they may be made; without them nothing is done to links but that lanes break.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO, Final

import msgspec
import trio

from shoal.lab.campaigns.campaign_check import broken_votes, machine_s, round_bound_s
from shoal.lab.campaigns.campaign_plan import NOT_BESIDE_A_LIAR, Group, groups_of, liars_among, paced
from shoal.lab.campaigns.campaign_swarm import LivingSwarm, manifest_of_group
from shoal.lab.campaigns.rounds import RoundJudge
from shoal.lab.campaigns.settings import Soak
from shoal.lab.campaigns.soak_faults import inject_fault
from shoal.lab.campaigns.soak_measures import (
    Sample,
    entry_bytes,
    judge,
    look_at_folder,
    look_at_processes,
    unjudged,
)
from shoal.lab.campaigns.soak_plan import AWAY_S, KINDS, LINKED, SoakFault, draw_faults, steady_of
from shoal.lab.campaigns.soak_report import SoakFaultRecord, SoakReport, to_json
from shoal.lab.fleet import load_per_core
from shoal.lab.waiting_workload import WORKLOAD_NAME
from shoal.node.reporting.events import Certified
from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest import Manifest
from shoal.testnet.interruption import until_interrupted
from shoal.testnet.links.namespaces import network, why_not
from shoal.testnet.run_folder import new_run, write_reports
from shoal.testnet.scenario import ROUND_LIMIT

LOOK_PERIOD_S: Final = 10.0
JUDGE_PERIOD_S: Final = 5.0
WHOLE_DEADLINE_S: Final = 300.0
"""Time after the end of a fault within which all nodes must contribute to one round again."""
LAST_DEADLINE_S: Final = 60.0
MODEL: Final = {"inputs": 160, "outputs": 64}
INNER_STEPS: Final = 40
CODEC: Final = "int8"


def drawn(soak: Soak, *, links: bool) -> tuple[SoakFault, ...]:
    """Draw the faults of a soak, without `links` none that needs network namespaces. Raises ConfigError."""
    kinds = [kind for kind in KINDS if links or kind not in LINKED]
    if soak.liar:
        kinds.remove(NOT_BESIDE_A_LIAR)
    seconds, honest = soak.minutes * 60, soak.nodes - soak.liar
    return draw_faults(soak.seed, nodes=honest, seconds=seconds, period_s=soak.period_s, kinds=kinds)


def group_of(soak: Soak) -> Group:
    """The swarm of a soak: its nodes, and the liar among them if there is one. Raises ConfigError."""
    if soak.liar:
        return liars_among(soak.nodes, (CODEC,), (soak.strategy,), soak.seed)[0]
    (group,) = groups_of((soak.nodes,), (CODEC,), (soak.strategy,))
    return group


def soak_manifest(soak: Soak, group: Group, seed: int, founders: list[PeerId]) -> Manifest:
    """Manifest of rounds of a few seconds that cost next to nothing; the protocol's own deadlines."""
    inner_steps, step_s = paced(group.strategy, INNER_STEPS, soak.step_s)
    trained = {"name": WORKLOAD_NAME, "seed": seed, "options": {**MODEL, "step_s": step_s}}
    return manifest_of_group("soak", group, founders, trained, inner_steps=inner_steps, deadlines={})


async def run_soak(soak: Soak, out: Path, on_strike: Callable[[SoakFaultRecord], None]) -> SoakReport:
    """Run the soak in the folder `out`; `on_strike` hears of each fault when all are whole again.

    Raises ConfigError or StorageError before anything starts; KeyboardInterrupt, after the report is written, if a
    signal ended it. Cancellation: all processes are killed and reaped; no report.
    """
    without_links = why_not()
    group = group_of(soak)
    strikes = drawn(soak, links=without_links is None)
    out = await trio.to_thread.run_sync(new_run, out)
    with ExitStack() as stack:
        links = None if without_links else stack.enter_context(network(soak.nodes))
        samples = stack.enter_context((out / "samples.jsonl").open("wb"))
        manifest_of = partial(soak_manifest, soak)
        made = LivingSwarm(out, group, soak.seed, network=links, manifest_of=manifest_of, clocks=True)
        async with made.owned() as swarm:
            course = _Course(soak, swarm, samples, on_strike)
            interrupted = await course.run(strikes)
            report = await trio.to_thread.run_sync(course.report, len(strikes), without_links)
    await trio.to_thread.run_sync(write_reports, out, {"soak.json": to_json(report) + "\n"})
    if interrupted:
        raise KeyboardInterrupt
    return report


def gap_bound_s(nodes: int, gaps_s: Sequence[float], load: float, *, lies: bool = False) -> float:
    """Seconds within which one round must come after another, whatever struck: as a campaign's bound of two faults.

    gaps_s: what it took, of which the median is undisturbed. load: the most runnable processes a core there were.
    """
    calm_s = statistics.median(gaps_s) if gaps_s else 0.0
    return round_bound_s(peers=nodes, faults=2, cut=True, calm_s=calm_s, lies=lies) + AWAY_S[1] + machine_s(load)


class _Course:
    """One soak under way."""

    def __init__(
        self,
        soak: Soak,
        swarm: LivingSwarm,
        samples: IO[bytes],
        on_strike: Callable[[SoakFaultRecord], None],
    ) -> None:
        self._soak = soak
        self._swarm = swarm
        self._samples_file = samples
        self._on_strike = on_strike
        self._samples: list[Sample] = []
        self._records: list[SoakFaultRecord] = []
        liar = None if swarm.liar is None else swarm.liar.index
        self._rounds = RoundJudge(swarm.witnesses, swarm.journal, liar)
        self._trouble: str | None = None
        self._load = 0.0
        self._began = self._ended = time.monotonic()
        self._interrupted = False

    async def run(self, strikes: Sequence[SoakFault]) -> bool:
        """Run from the start to the end; True if a signal ended it."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._heed_signals, nursery.cancel_scope)
            try:
                await self._swarm.begin()
                await self._until_whole(after=0)
                self._began = time.monotonic()
                nursery.start_soon(self._look_on)
                nursery.start_soon(self._judge_on)
                await self._strike_all(strikes)
                await self._sleep_until(self._soak.minutes * 60)
                await self._until_whole(after=self._head())
            except NetworkError as error:
                self._trouble = str(error)
            self._ended = time.monotonic()
            nursery.cancel_scope.cancel()
        await self._judge_the_rest()
        return self._interrupted

    async def _heed_signals(self, scope: trio.CancelScope) -> None:
        await until_interrupted()
        self._interrupted, self._trouble = True, "interrupted"
        self._ended = time.monotonic()
        scope.cancel()

    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    async def _sleep_until(self, seconds: float) -> None:
        await trio.sleep(max(0.0, seconds - self._elapsed()))

    # -- faults ----------------------------------------------------------------------------------------------

    async def _strike_all(self, strikes: Sequence[SoakFault]) -> None:
        """Strike with all faults, one after the other. Raises NetworkError if the swarm does not get over one."""
        for strike in strikes:
            if self._elapsed() > strike.at_s + self._soak.period_s:
                continue  # the one before took its time: it is left out, and the report says how many were done
            await self._sleep_until(strike.at_s)
            before, struck_at = self._head(), self._elapsed()
            error = await inject_fault(strike, self._swarm)
            undone_at = self._elapsed()
            await self._until_whole(after=max(before, self._head()))
            record = SoakFaultRecord(
                strike=strike,
                struck_at_s=round(struck_at, 3),
                round=before + 1,
                whole_s=round(self._elapsed() - undone_at, 3),
                error=error,
            )
            self._records.append(record)
            self._on_strike(record)

    def _head(self) -> int:
        return max((event.round for event in self._swarm.journal.of(Certified)), default=self._rounds.last)

    async def _until_whole(self, after: int) -> None:
        """Wait until all nodes contributed to one round after `after`. Raises NetworkError."""
        swarm = self._swarm
        await swarm.until(lambda: swarm.whole(after), "all contribute again", WHOLE_DEADLINE_S)

    # -- looking and judging ---------------------------------------------------------------------------------

    async def _look_on(self) -> None:
        looks = 0
        while True:
            await trio.to_thread.run_sync(self._look)
            looks += 1
            await self._sleep_until(looks * LOOK_PERIOD_S)

    def _look(self) -> None:
        at_s, now = round(self._elapsed(), 3), time.time()
        self._load = max(self._load, load_per_core())
        found: list[Sample] = []
        for node in self._swarm.honest:
            reached = [e.round for e in self._swarm.journal.of(Certified, node.index)]
            last = max(reached, default=self._rounds.last)
            if node.alive:
                found += look_at_processes(node.lives[-1].pid, at_s=at_s, node=node.index, round=last, now=now)
            found.append(look_at_folder(node.folder, at_s=at_s, node=node.index, round=last))
        self._samples += found
        self._samples_file.writelines(msgspec.json.encode(sample) + b"\n" for sample in found)
        self._samples_file.flush()

    async def _judge_on(self) -> None:
        while True:
            await trio.sleep(JUDGE_PERIOD_S)
            self._judge(self._rounds.ripe())

    def _judge(self, until: int) -> None:
        """Judge the rounds up to `until`. In the main thread: nobody appends to the journal meanwhile."""
        if until > self._rounds.last:
            self._rounds.judge(until)

    async def _judge_the_rest(self) -> None:
        """Judge all that was certified by every node. The nodes still run, and can: only files are read."""
        journal = self._swarm.journal
        with trio.move_on_after(LAST_DEADLINE_S):
            head = self._head()
            await journal.until(lambda: self._rounds.ripe() >= head or self._trouble is not None)
        self._judge(self._rounds.ripe())

    # -- the report ------------------------------------------------------------------------------------------

    def report(self, drawn: int, without_links: str | None) -> SoakReport:
        """Judge the soak, and return its report. Blocks."""
        soak, rounds = self._soak, self._rounds
        seconds = self._ended - self._began
        honest = len(self._swarm.honest)
        steady = steady_of(honest)
        verdicts = judge(self._samples, seconds=seconds, steady=steady)
        broken = [line for node in self._swarm.witnesses[:honest] for line in broken_votes(node, 1, ROUND_LIMIT)]
        problems = [*rounds.problems, *broken, *unjudged(verdicts, nodes=honest, steady=steady)]
        problems += [f"fault {r.strike.number}: {r.error}" for r in self._records if r.error is not None]
        problems += self._restarted(steady)
        struck = {node for record in self._records for node in record.strike.nodes}
        struck |= {n for record in self._records if record.strike.beside for n in record.strike.beside.nodes}
        problems += self._swarm.taken_over(rounds.last, away=struck)
        problems += ["the liar told no lie"] if soak.liar and not self._swarm.lies else []
        bound_s = gap_bound_s(soak.nodes, rounds.gaps_s, self._load, lies=soak.liar)
        problems += [
            f"{gap:.1f} s between two rounds, more than {bound_s:.1f} s" for gap in rounds.gaps_s if gap > bound_s
        ]
        return SoakReport(
            seed=soak.seed,
            nodes=soak.nodes,
            strategy=soak.strategy,
            minutes=soak.minutes,
            period_s=soak.period_s,
            seconds=round(seconds, 1),
            faults_drawn=drawn,
            faults=tuple(self._records),
            without_links=without_links,
            rounds=rounds.last,
            rounds_checked=rounds.checked,
            wrong_values=rounds.wrong_values,
            forks=rounds.forks,
            broken_votes=len(broken),
            unverified=rounds.unverified,
            longest_gap_s=round(max(rounds.gaps_s, default=0.0), 3),
            gap_bound_s=round(bound_s, 3),
            load=self._load,
            lies=self._swarm.lies,
            digests_equal=self._digests_equal(),
            verdicts=verdicts,
            entry_bytes=entry_bytes(self._swarm.honest[0].folder),
            problems=tuple(problems),
            trouble=self._trouble,
        )

    def _restarted(self, steady: Sequence[int]) -> list[str]:
        """List the steady nodes whose trainer ended and began again: nothing was done to them that ends a process."""
        found = []
        for node in steady:
            trainers = {s.born for s in self._samples if s.node == node and s.role == "trainer"}
            if len(trainers) > 1:
                found.append(f"node {node}: its trainer was started {len(trainers)} times")
        return found

    def _digests_equal(self) -> bool:
        """True if all nodes hold the same state after the last round that all have certified or computed again."""
        last: dict[int, dict[int, str]] = {}
        for entry in self._swarm.journal.entries:
            if isinstance(entry.event, Certified) and entry.node in self._swarm.group.honest:
                last.setdefault(entry.event.round, {})[entry.node] = entry.event.digest
        common = [number for number, digests in last.items() if len(digests) == len(self._swarm.honest)]
        return bool(common) and len(set(last[max(common)].values())) == 1
