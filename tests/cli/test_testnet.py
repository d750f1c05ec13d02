"""`shoal testnet`: options to a scenario, a report to text, JSON and an exit code. The swarm itself is a fake."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import msgspec
import pytest

from shoal.cli import testnet
from shoal.cli.main import execute
from shoal.cli.render import ShowNow
from shoal.cli.testnet_report import TestnetProgress, summary
from shoal.protocol.identity import PeerId
from shoal.testnet.progress import FaultInjected, LossMeasured, NodeEnded, NodeJoined, RoundDone
from shoal.testnet.reports.report import BytesReport, FaultReport, LossReport, NodeReport, Report
from shoal.testnet.scenario import DEMO, Scenario


def report_of(scenario: Scenario) -> Report:
    """The report of a run in which everything went well."""
    return Report(
        scenario=scenario,
        wall_s=12.5,
        rounds_certified=scenario.rounds,
        forks=0,
        wrong_values=0,
        digests_equal=True,
        nodes=(),
        loss=LossReport(metric="bits per byte", first=8.0, last=3.25, by_round=()),
        faults=tuple(
            FaultReport(kind=f.kind, node=f.target, round=f.round, phase=f.phase, at_s=3.0, delay_s=1.5)
            for f in scenario.faults
        ),
        rounds=(),
        bytes=BytesReport(lanes_sent=9_000, control_sent=1_000, fp32_allreduce_every_step=1_000_000),
    )


class FakeSwarm:
    """Keeps the scenario and the folder; returns `report`, or a good one."""

    def __init__(self) -> None:
        self.scenario: Scenario | None = None
        self.out: Path | None = None
        self.report: Report | None = None

    def __call__(self, scenario: Scenario, out: Path, show_now: ShowNow) -> Report:
        self.scenario, self.out = scenario, out
        logging.getLogger("shoal.progress").info("a round")
        return self.report or report_of(scenario)


@pytest.fixture
def swarm(monkeypatch: pytest.MonkeyPatch) -> FakeSwarm:
    fake = FakeSwarm()
    monkeypatch.setattr(testnet, "run_to_end", fake)
    return fake


@pytest.mark.parametrize("arguments", [[], ["--json"], ["--out", "elsewhere"], ["--seed", "1"]])
def test_testnet_without_a_size_is_the_demo(swarm: FakeSwarm, arguments: list[str]) -> None:
    assert execute(["testnet", *arguments]) == 0
    assert swarm.scenario == DEMO


@pytest.mark.parametrize("arguments", [["--nodes", "3"], ["--rounds", "9"]])
def test_testnet_of_another_size_has_no_faults(swarm: FakeSwarm, arguments: list[str]) -> None:
    assert execute(["testnet", *arguments]) == 0
    assert swarm.scenario is not None
    assert swarm.scenario.faults == ()


def test_testnet_runs_the_file_with_what_is_overridden(swarm: FakeSwarm, tmp_path: Path) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text('nodes = 3\nrounds = 4\n[[fault]]\nkind = "leave"\nnode = 1\nround = 2\n')
    arguments = f"--scenario {path} --rounds 6 --codec bf16 --seed 9 --out {tmp_path / 'out'}"
    assert execute(["testnet", *arguments.split()]) == 0
    assert swarm.scenario is not None
    assert (swarm.scenario.nodes, swarm.scenario.rounds, swarm.scenario.codec, swarm.scenario.seed) == (3, 6, "bf16", 9)
    assert [fault.kind for fault in swarm.scenario.faults] == ["leave"]
    assert swarm.out == tmp_path / "out"


@pytest.mark.parametrize("with_file", [False, True])
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--nodes 0", "--nodes: 0 is not in 1..64"),
        ("--nodes 65", "--nodes: 65 is not in 1..64"),
        ("--rounds 10001", "--rounds: 10001 is not in 1..10000"),
        ("--seed -1", f"--seed: -1 is not in 0..{2**63 - 1}"),
    ],
)
def test_testnet_names_the_option_that_is_out_of_range(
    arguments: str, told: str, with_file: bool, swarm: FakeSwarm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "scenario.toml").write_text("nodes = 3\n")
    file = ["--scenario", str(tmp_path / "scenario.toml")] if with_file else []
    assert execute(["testnet", *arguments.split(), *file]) == 2
    assert capsys.readouterr() == ("", f"shoal: {told}\n")
    assert swarm.scenario is None


def test_testnet_json_is_one_document_on_stdout(swarm: FakeSwarm, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["testnet", "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["rounds_certified"] == 8
    assert document["scenario"]["fault"][0] == {
        "kind": "kill",
        "node": 2,
        "round": 3,
        "phase": "reduce",
        "progress": 0.4,
    }
    assert err.endswith(" info a round\n")


def test_testnet_that_fails_exits_1_and_says_why(swarm: FakeSwarm, capsys: pytest.CaptureFixture[str]) -> None:
    swarm.report = msgspec.structs.replace(
        report_of(DEMO),
        rounds_certified=6,
        forks=1,
        wrong_values=3,
        digests_equal=False,
        nodes=(
            NodeReport(index=2, peer_id="12D3", outcome="running", rounds=0, certified=0, contributed=0, digests={}),
        ),
        unaffected_absent=(2,),
        unverified=("x\ny",),
    )
    assert execute(["testnet"]) == 1
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED")] == [
        "FAILED     2 rounds were not certified",
        "FAILED     1 round has two different certificates",
        "FAILED     3 applied values are not the mean of what was contributed",
        "FAILED     nodes do not hold the same state",
        "FAILED     no fault struck node 2, and it took part in no round",
        "FAILED     unverified: x y",
    ]


def test_summary_tells_what_came_of_it() -> None:
    assert summary(report_of(DEMO), Path("out")) == [
        "rounds     8 of 8 certified in 12.5 s",
        "loss       8.0000 → 3.2500 bits per byte",
        "fault      kill node 2 in round 3, reduce: after 3.0 s, the round took +1.5 s against the median",
        "fault      join node 4 in round 5: after 3.0 s, the round took +1.5 s against the median",
        "exactness  0 forks, 0 wrong values, digests equal",
        "bytes      9.0 kB of tensors, 1.0 kB of control: 100 times less than fp32 at every step",
        "report     out/report.json, out/report.html",
        "all is as it should be",
    ]


@pytest.mark.parametrize(
    ("strategy", "sync", "is_told"),
    [("streaming", {}, True), ("diloco", {"overlap_steps": 2}, True), ("diloco", {}, False)],
)
def test_summary_tells_how_long_trainers_waited_where_they_need_not(
    strategy: str, sync: dict[str, int], is_told: bool
) -> None:
    nodes = tuple(
        NodeReport(
            index=n,
            peer_id="12D3",
            outcome="running",
            rounds=8,
            certified=8,
            contributed=8,
            digests={},
            blocked_fraction=waited,
        )
        for n, waited in enumerate((0.01, 0.025, None, 0.0))
    )
    report = report_of(msgspec.structs.replace(DEMO, strategy=strategy, sync=sync))
    lines = summary(msgspec.structs.replace(report, nodes=nodes), Path("out"))
    told = [line for line in lines if line.startswith("blocked")]
    assert told == ["blocked    2.5% of its time, for the trainer that waited longest for rounds"] * is_told


def test_progress_is_told_line_by_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="shoal.progress")
    now: list[tuple[str, float | None]] = []
    tell = TestnetProgress(lambda text, share=None: now.append((text, share)), rounds=8)
    tell(LossMeasured(round=0, loss=8.0, metric="bits per byte"))
    tell(RoundDone(round=1, members=4, contributors=3, coverage=0.75, total_s=4.25))
    tell(FaultInjected(fault=DEMO.faults[0], at_s=1.0))
    tell(NodeJoined(index=4, peer_id=PeerId("12D3"), round=6))
    tell(NodeEnded(index=1, exit_code=1, message="port in use"))
    assert [record.getMessage() for record in caplog.records] == [
        "after round 0: loss 8.0000 bits per byte",
        "round 1 of 8 certified: 3 of 4 contributed, 75% of the chunks, 4.2 s",
        "fault: kill node 2 in round 3, reduce",
        "node 4 has joined and certified round 6",
        "node 1 ended with exit code 1: port in use",
    ]
    assert now == [("1 of 8 rounds certified, loss 8.0000 bits per byte", 0.125)]
