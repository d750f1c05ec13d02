"""`shoal testnet`: a swarm of real node processes on this machine, with faults, checked and reported."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from shoal.cli.long_runs import LongRunOptions, run_and_report
from shoal.cli.options import AllowWorkload
from shoal.cli.render import ShowNow
from shoal.node.option import Option

if TYPE_CHECKING:
    from shoal.testnet.reports.report import Report
    from shoal.testnet.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class TestnetOptions(LongRunOptions):
    """Options of `shoal testnet`; None leaves it to the scenario."""

    __test__ = False  # for pytest, which takes the name for its own

    nodes: Annotated[
        int | None, Option("--nodes", help="How many nodes; without a --scenario no faults. [demo: 4]")
    ] = None
    rounds: Annotated[
        int | None, Option("--rounds", help="How many rounds; without a --scenario no faults. [demo: 8]")
    ] = None
    seed: Annotated[int | None, Option("--seed", help="Of the parameters and the data. [demo: 1]")] = None
    scenario: Annotated[
        Path | None, Option("--scenario", help="What to run and which faults to inject.", metavar="FILE")
    ] = None
    strategy: Annotated[str | None, Option("--strategy", help="How nodes synchronise. [demo: diloco]")] = None
    codec: Annotated[
        str | None, Option("--codec", help="How values travel, as [sync] says; topk goes with sparse. [demo: int8]")
    ] = None
    allow_workload: AllowWorkload = field(default_factory=list)
    profile: Annotated[
        str | None,
        Option(
            "--profile",
            help="A line of its own for every node: home, continental, intercontinental or mobile; needs root.",
            metavar="NAME",
        ),
    ] = None


def testnet(options: TestnetOptions) -> None:
    """Run a swarm of real nodes on this machine; with no options the demo, in which one is killed and one joins.

    All are real processes with real connections. Afterwards every round is computed again from what the nodes recorded;
    the command ends with exit code 1 unless all rounds were certified, no two nodes differ, and no value is wrong.
    The folder --out has report.html with the loss and a timeline, report.json, and each node's log and data.
    """
    from shoal.testnet.scenario import check_scenario_workload, choose_scenario

    scenario = choose_scenario(
        options.scenario,
        nodes=options.nodes,
        rounds=options.rounds,
        seed=options.seed,
        strategy=options.strategy,
        codec=options.codec,
    )
    if options.scenario is not None:
        check_scenario_workload(scenario, options.allow_workload, source=str(options.scenario))
    if options.profile is not None:
        from shoal.testnet.links.wan_profiles import with_profile

        scenario = with_profile(scenario, options.profile)
    from shoal.cli.testnet_report import summary
    from shoal.testnet.reports.report import ok, to_json

    run_and_report(options, "testnet", partial(run_to_end, scenario), to_json=to_json, summary=summary, ok=ok)


def run_to_end(scenario: Scenario, out: Path, show_now: ShowNow) -> Report:
    """Run the testnet. Raises ShoalError, KeyboardInterrupt if interrupted, or an ExceptionGroup of its tasks'."""
    import trio

    from shoal.cli.testnet_report import TestnetProgress
    from shoal.testnet.swarm import run_testnet

    return trio.run(partial(run_testnet, scenario, out, TestnetProgress(show_now, rounds=scenario.rounds)))
