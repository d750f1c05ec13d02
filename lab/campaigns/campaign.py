"""A fault campaign: many seeded faults in swarms of real processes, and every certified round recomputed.

    run_campaign ── per group ── LivingSwarm
                                   └─ per run: all hold ─ fault ─ the survivors certify ─ victims come back ─ all hold
                                               └─ examine: values, forks, votes, deadlines        ─► RunRecord

The short version does the same to fewer swarms, several of them at once, whose nodes start at once (`fork_client.py`)
and train less between two reductions.

A run that fails leaves what is needed to understand it in `failures/<number>/`, and the campaign goes on; where a swarm
does not come together again, the next run gets a new one. The whole is in `campaign.json`.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import groupby
from pathlib import Path
from typing import Final

import msgspec
import trio

from shoal.lab.campaigns.campaign_check import Window, examine, round_bound_s
from shoal.lab.campaigns.campaign_faults import Fault
from shoal.lab.campaigns.campaign_plan import (
    CERTIFYING,
    CODECS,
    CUTS,
    HARMLESS,
    LIAR_PEERS,
    PEERS,
    SHORT_MIX,
    Group,
    Mix,
    Run,
    draw_runs,
    groups_of,
    liars_among,
    loops_among,
)
from shoal.lab.campaigns.campaign_report import CampaignReport, RunRecord, report_of, to_json
from shoal.lab.campaigns.campaign_swarm import LivingSwarm, short_manifest
from shoal.lab.campaigns.settings import Campaign
from shoal.lab.fork_client import forking
from shoal.node.reporting.event_files import LOG_NAME, earlier_of
from shoal.node.state.store import disk_errors
from shoal.protocol.errors import ConfigError, NetworkError
from shoal.testnet.check_inputs import InputRules
from shoal.testnet.interruption import until_interrupted
from shoal.testnet.nodes import Runtime
from shoal.testnet.run_folder import replace_earlier_run, write_reports

CERTIFY_SLACK_S: Final = 30.0
"""Beyond its bound a faulted round is waited for so long before its swarm is given up."""
KEPT_ROUNDS: Final = 8
"""Rounds before a run whose files are kept: its first contributions follow from those in them."""
ABREAST: Final = 2
"""So many swarms of a short campaign live at once: what one waits for costs no time, and each has processors enough."""
REPORT_NAME: Final = "campaign.json"
_KEPT_OF_A_NODE: Final = (LOG_NAME, earlier_of(Path(LOG_NAME)).name, "log.txt", "agreement.log", "chain.log")


def drawn(campaign: Campaign) -> tuple[Run, ...]:
    """Draw the runs of a campaign. Raises ConfigError."""
    codecs, strategies = campaign.codecs or CODECS, campaign.strategies or CERTIFYING
    if campaign.liar and campaign.short:
        raise ConfigError("--short starts copies of one process, none of which lies; leave --short or --liar out")
    if campaign.liar:
        counts = campaign.peers or (LIAR_PEERS,)
        groups = tuple(one for count in counts for one in liars_among(count, codecs, strategies, campaign.seed))
    else:
        groups = groups_of(campaign.peers or PEERS, codecs, strategies, short=campaign.short)
        if not campaign.short and not campaign.peers:
            groups += (*liars_among(LIAR_PEERS, codecs, strategies, campaign.seed), *loops_among(codecs, strategies))
    runs = draw_runs(campaign.seed, campaign.runs, groups, SHORT_MIX if campaign.short else Mix())
    if campaign.only is None:
        return runs
    if not 1 <= campaign.only <= campaign.runs:
        raise ConfigError(f"--only: there is no run {campaign.only} among {campaign.runs}")
    return (runs[campaign.only - 1],)


async def run_campaign(campaign: Campaign, out: Path, on_run: Callable[[RunRecord], None]) -> CampaignReport:
    """Do all runs in the folder `out`; `on_run` hears of each as it ends. The report is written to `out` as well.

    Raises ConfigError or StorageError before anything starts; KeyboardInterrupt, after the report is written, if a
    signal ended it. Cancellation: all processes are killed and reaped; no report.
    """
    runs = drawn(campaign)
    out = await trio.to_thread.run_sync(_prepare_folder, out)
    began = time.monotonic()
    course = _Course(campaign, out, on_run)
    async with _runtime(campaign) as runtime:
        interrupted = await course.run(runs, runtime)
    records = sorted(course.records, key=lambda record: record.run.number)
    report = report_of(campaign.seed, runs, records, course.calm_s, wall_s=time.monotonic() - began)
    await trio.to_thread.run_sync(write_reports, out, {REPORT_NAME: to_json(report) + "\n"})
    if interrupted:
        raise KeyboardInterrupt
    return report


@asynccontextmanager
async def _runtime(campaign: Campaign) -> AsyncIterator[Runtime | None]:
    """Start and stop the runtime that starts its nodes; None for the usual one."""
    if campaign.short and sys.platform == "linux":
        async with forking() as runtime:
            yield runtime
    else:
        yield None


def _prepare_folder(out: Path) -> Path:
    return replace_earlier_run(out, "campaign", folders=("groups", "failures"), files=(REPORT_NAME,))


class _Course:
    """One campaign under way."""

    def __init__(self, campaign: Campaign, out: Path, on_run: Callable[[RunRecord], None]) -> None:
        self.records: list[RunRecord] = []
        self.calm_s: dict[str, float] = {}
        self._campaign = campaign
        self._out = out
        self._on_run = on_run
        self._interrupted = False

    async def run(self, runs: Sequence[Run], runtime: Runtime | None) -> bool:
        """Do all runs; True if a signal ended them."""
        turns = trio.Semaphore(ABREAST if self._campaign.short else 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._heed_signals, nursery.cancel_scope)
            async with trio.open_nursery() as groups:
                for group, of_group in groupby(runs, key=lambda run: run.group):
                    await turns.acquire()
                    groups.start_soon(self._run_group, group, list(of_group), runtime, turns)
            nursery.cancel_scope.cancel()
        return self._interrupted

    async def _heed_signals(self, scope: trio.CancelScope) -> None:
        await until_interrupted()
        self._interrupted = True
        scope.cancel()

    async def _run_group(self, group: Group, runs: list[Run], runtime: Runtime | None, turns: trio.Semaphore) -> None:
        """Do the runs of one group, on one swarm; on another when that is not whole any more, after other groups."""
        manifest_of = short_manifest if self._campaign.short else None
        swarms = 0
        while runs:
            swarms += 1
            folder = self._out / "groups" / f"{group.name}-{swarms}"
            failed = self._failed(group)
            seed, clocks = self._campaign.seed, not self._campaign.short
            made = LivingSwarm(folder, group, seed, manifest_of=manifest_of, runtime=runtime, clocks=clocks)
            async with made.owned() as swarm:
                await self._run_on(swarm, runs)
            if self._failed(group) == failed and not self._campaign.keep:
                await trio.to_thread.run_sync(shutil.rmtree, folder)
        turns.release()

    def _failed(self, group: Group) -> int:
        return sum(record.failed for record in self.records if record.run.group == group)

    async def _run_on(self, swarm: LivingSwarm, runs: list[Run]) -> None:
        """Take runs off the list and do them, as long as the swarm recovers from them."""
        gate = None
        try:
            await swarm.begin()
            gate = await swarm.gather(after=1)
        except NetworkError as error:
            await self._record(swarm, RunRecord(run=runs.pop(0), trouble=str(error)))
        while runs and gate is not None:
            self.calm_s[swarm.group.name] = round(swarm.calm_s, 3)
            gate = await self._do(swarm, runs.pop(0), gate)

    async def _do(self, swarm: LivingSwarm, run: Run, gate: int) -> int | None:
        """Do one run, in the round `gate`; returns where the next begins, None if the swarm did not recover."""
        await trio.to_thread.run_sync(swarm.forget, gate - KEPT_ROUNDS)
        attempt = _Attempt(swarm, run, gate)
        following = None
        trouble: str | None = None
        try:
            following = await attempt.carry_out()
        except NetworkError as error:
            trouble = str(error)
        last = gate if following is None else following - 1
        record = await trio.to_thread.run_sync(attempt.record, last, trouble)
        await self._record(swarm, record)
        return following

    async def _record(self, swarm: LivingSwarm, record: RunRecord) -> None:
        self.records.append(record)
        if record.failed:
            await trio.to_thread.run_sync(self._save_failure, swarm, record)
        self._on_run(record)

    def _save_failure(self, swarm: LivingSwarm, record: RunRecord) -> None:
        """Save what it takes to understand a failed run, and to do it again."""
        folder = self._out / "failures" / str(record.run.number)
        campaign = self._campaign
        again = f"shoal campaign --runs {campaign.runs} --seed {campaign.seed} --only {record.run.number}"
        again += "".join(f" --peers {count}" for count in campaign.peers)
        again += "".join(f" --codecs {codec}" for codec in campaign.codecs)
        again += "".join(f" --strategies {strategy}" for strategy in campaign.strategies)
        again += " --short" if campaign.short else ""
        again += " --liar" if campaign.liar else ""
        with disk_errors(folder):
            folder.mkdir(parents=True)
            content = msgspec.to_builtins(record) | {"problems": record.problems, "again": again}
            (folder / "run.json").write_bytes(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
            shutil.copy(swarm.folder / "swarm.toml", folder)
            for node in swarm.nodes:  # a liar's too
                kept = folder / "nodes" / str(node.index)
                kept.mkdir(parents=True)
                for name in _KEPT_OF_A_NODE:
                    if (node.folder / name).exists():
                        shutil.copy(node.folder / name, kept)
                if (node.folder / "rounds").exists():
                    shutil.copytree(node.folder / "rounds", kept / "rounds")


class _Attempt:
    """One run being done."""

    def __init__(self, swarm: LivingSwarm, run: Run, gate: int) -> None:
        self._swarm = swarm
        self._run = run
        self._gate = gate
        self._fault = Fault(run, swarm, gate)
        self._calm_s = swarm.calm_s
        self._bound_s = round_bound_s(
            peers=run.group.peers,
            faults=len(self._fault.strike.victims),
            cut=run.kind in CUTS,
            calm_s=self._calm_s,
            lies=run.group.company == "liar",
        )
        self._released_at = 0.0
        self._whole_s: float | None = None

    async def carry_out(self) -> int:
        """Strike, and wait for the certificate and everybody's return; returns where the next round begins.

        Raises NetworkError if the survivors or the whole swarm do not get there.
        """
        self._released_at = await self._fault.let_go()
        trouble: list[NetworkError] = []

        async def noting(part: Callable[[], Awaitable[None]]) -> None:
            try:
                await part()
            except NetworkError as error:
                trouble.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(noting, self._fault.carry_out)
            nursery.start_soon(noting, self._until_certified)
        if trouble:
            raise trouble[0]
        await self._fault.take_back()
        following = await self._swarm.gather(after=self._gate)
        self._whole_s = time.time() - self._fault.strike.at
        return following

    async def _until_certified(self) -> None:
        swarm, gate, survivors = self._swarm, self._gate, self._fault.survivors
        await swarm.until(
            lambda: all(swarm.is_past(node, gate) for node in survivors),
            f"the survivors are past round {gate}",
            self._bound_s + CERTIFY_SLACK_S,
        )

    def record(self, last: int, trouble: str | None) -> RunRecord:
        """Judge the rounds up to `last`, and return the run's record. Blocks."""
        strike = self._fault.strike
        struck = frozenset(n.index for n in self._swarm.honest if n not in self._fault.survivors)
        window = Window(
            first=self._gate,
            last=last,
            released_at=self._released_at,
            struck=struck,
            cut=self._run.kind in HARMLESS,
            bound_s=self._bound_s,
            codec=self._swarm.manifest.sync.plan_codec,
            liar=None if self._swarm.liar is None else self._swarm.liar.peer_id,
            rules=InputRules.of(self._swarm.manifest),
        )
        clocks = {n.index: n.clock.changes for n in self._swarm.nodes if n.clock is not None}
        ends = [c.at for n in self._fault.survivors if (c := self._swarm.certificate(n, self._gate)) is not None]
        round_s = statistics.median(ends) - self._released_at - strike.held_s if ends else None
        found = examine(self._swarm.witnesses, window, clocks)
        away = self._swarm.group.honest if trouble else ()
        if taken := self._swarm.taken_over(last, away=away):
            found = msgspec.structs.replace(found, problems=(*found.problems, *taken))
        return RunRecord(
            run=self._run,
            round=self._gate,
            struck=strike.text(self._run),
            released_at=self._released_at,
            struck_at=strike.at,
            round_s=round_s,
            delay_s=None if round_s is None else round_s - self._calm_s,
            whole_s=self._whole_s,
            bound_s=self._bound_s,
            lies=self._swarm.lies,
            found=found,
            trouble=trouble,
        )
