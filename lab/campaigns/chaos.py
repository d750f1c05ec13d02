"""A chaos campaign: drawn scenarios of real processes, one after the other until the time is over, all values judged.

    run_chaos ── per scenario ── run_testnet ─► report ─► judged: values, forks, votes, deadlines ─► ScenarioRecord

A scenario that failed leaves its folder; of the others only the report stays.
The whole is in `chaos.json`, written anew after every scenario.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

import trio

from shoal.lab.bench import hostile_verdict
from shoal.lab.campaigns.campaign_check import broken_votes, machine_s, round_bound_s
from shoal.lab.campaigns.chaos_plan import SCENARIO_LIMIT, draw_scenario, programs_of
from shoal.lab.campaigns.chaos_report import (
    ChaosReport,
    ScenarioRecord,
    late_rounds,
    problems_of,
    report_of,
    to_json,
)
from shoal.lab.campaigns.chaos_swarm import Program, behind, command_of, done_by, judged, liar_of
from shoal.lab.campaigns.settings import Chaos
from shoal.lab.fleet import load_per_core
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest import load_manifest
from shoal.testnet.check import Witness
from shoal.testnet.links.namespaces import why_not
from shoal.testnet.nodes import Runtime
from shoal.testnet.reports.report import NodeReport, Report
from shoal.testnet.run_folder import replace_earlier_run, write_reports
from shoal.testnet.scenario import ROUND_LIMIT, Scenario
from shoal.testnet.swarm import run_testnet

REPORT_NAME: Final = "chaos.json"


async def run_chaos(chaos: Chaos, out: Path, on_scenario: Callable[[ScenarioRecord], None]) -> ChaosReport:
    """Do scenarios in the folder `out` until the time is over; `on_scenario` hears of each as it ends.

    Raises ConfigError or StorageError before anything starts; KeyboardInterrupt, after the report is written, if a
    signal ended it. Cancellation: all processes are killed and reaped; the report is of the scenarios before.
    """
    without_links = why_not()
    numbers = range(1, SCENARIO_LIMIT + 1) if chaos.only is None else (chaos.only,)
    if chaos.only is not None:
        _check_only(chaos.only, draw_scenario(chaos.seed, chaos.only), without_links)
    out = await trio.to_thread.run_sync(_prepare_folder, out)
    began = time.monotonic()
    records: list[ScenarioRecord] = []
    passed_over: list[int] = []

    def told() -> ChaosReport:
        wall_s = time.monotonic() - began
        return report_of(
            chaos.seed,
            records,
            minutes=chaos.minutes,
            wall_s=wall_s,
            without_links=without_links,
            passed_over=passed_over,
        )

    for number in numbers:
        if len(records) == chaos.scenarios or (records and time.monotonic() - began >= chaos.minutes * 60):
            break
        scenario = draw_scenario(chaos.seed, number)
        if scenario.needs_namespaces and without_links is not None:
            passed_over.append(number)
            continue
        folder = out / "scenarios" / str(number)
        programs = programs_of(chaos.seed, number)
        runtime = Runtime(command=partial(command_of, programs))
        report = await run_testnet(scenario, folder, runtime=runtime)
        record = await trio.to_thread.run_sync(judge, number, report, folder, programs)
        records.append(record)
        if not record.failed:
            await trio.to_thread.run_sync(shutil.rmtree, folder / "nodes")
        await trio.to_thread.run_sync(_write, told(), out)
        on_scenario(record)
    return told()


def _check_only(number: int, scenario: Scenario, without_links: str | None) -> None:
    if scenario.needs_namespaces and without_links is not None:
        raise ConfigError(
            f"--only {number}: this scenario strikes links; run it where that can be done, or choose another: "
            f"{without_links}"
        )


def _prepare_folder(out: Path) -> Path:
    return replace_earlier_run(out, "chaos", folders=("scenarios",), files=(REPORT_NAME,))


def _write(report: ChaosReport, out: Path) -> None:
    write_reports(out, {REPORT_NAME: to_json(report) + "\n"})


def judge(
    number: int, report: Report, folder: Path, programs: Mapping[int, Program] = MappingProxyType({})
) -> ScenarioRecord:
    """Judge a scenario by its report and what its nodes left in `folder`; a liar is not judged. Blocks."""
    load = load_per_core()
    lost = behind(report, programs, partial(_home, folder))
    if (liar := liar_of(report, programs)) is not None:
        lost += taken_over_by(liar, report, folder)
    report = judged(report, programs)
    broken = [line for node in _witnesses(report, folder) for line in broken_votes(node, 1, ROUND_LIMIT)]
    bound_s = bound_of(report, load, lies=liar is not None)
    longest_s, late = late_rounds(report, bound_s)
    return ScenarioRecord(
        number=number,
        nodes=report.scenario.nodes,
        programs=dict(programs),
        struck={
            index: done
            for index, program in programs.items()
            if (done := done_by(program, _home(folder, index))) is not None
        },
        strategy=report.scenario.strategy,
        codec=report.scenario.codec,
        rounds=report.scenario.rounds,
        rounds_certified=report.rounds_certified,
        wall_s=report.wall_s,
        load=load,
        faults=report.faults,
        wrong_values=report.wrong_values,
        forks=report.forks,
        broken_votes=len(broken),
        late_rounds=len(late),
        unverified=len(report.unverified),
        longest_round_s=round(longest_s, 3),
        bound_s=round(bound_s, 3),
        problems=(*problems_of(report, broken=broken, late=late), *lost),
    )


def _home(folder: Path, index: int) -> Path:
    return folder / "nodes" / str(index)


def _witnesses(report: Report, folder: Path) -> list[Witness]:
    return [
        Witness(index=node.index, peer_id=PeerId(node.peer_id), folder=_home(folder, node.index))
        for node in report.nodes
    ]


def taken_over_by(liar: NodeReport, report: Report, folder: Path) -> list[str]:
    """Signs in the chains of the honest founders that the liar took something over, or that one of them is out."""
    honest = [node for node in report.nodes if node is not liar]
    faults = [fault for fault in report.scenario.faults if fault.kind != "join"]
    touched = {index for fault in faults for index in fault.struck}
    founders = {
        PeerId(node.peer_id): _home(folder, node.index) for node in honest if node.index < report.scenario.nodes
    }
    struck = {PeerId(node.peer_id) for node in honest if node.index in touched or node.index >= report.scenario.nodes}
    manifest = load_manifest(folder / "swarm.toml")
    found = hostile_verdict.problems_of(
        manifest, founders, PeerId(liar.peer_id), struck=struck, last=report.scenario.rounds
    )
    return [f"node {problem}" for problem in found]


def bound_of(report: Report, load: float, *, lies: bool = False) -> float:
    """Seconds within which one round must come after another in this scenario, whatever was done.

    As a campaign's bound of two faults that strike together, one of them to the links; with what the longest fault
    lasts, and a machine's share of the time that grows with its load (runnable processes a core).
    """
    scenario = report.scenario
    calm = sorted(entry.total_s for entry in report.rounds)
    calm_s = calm[len(calm) // 2] if calm else 0.0
    lasting_s = max((fault.duration_s or 0.0 for fault in scenario.faults), default=0.0)
    bound_s = round_bound_s(peers=scenario.nodes, faults=2, cut=True, calm_s=calm_s, lies=lies)
    return bound_s + lasting_s + machine_s(load)
