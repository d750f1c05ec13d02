"""The chaos campaign: what is drawn, that every judgement can fail, and a short one with real processes."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import trio

from shoal.cli.main import execute
from shoal.lab.campaigns import chaos
from shoal.lab.campaigns.campaign_check import MACHINE_S
from shoal.lab.campaigns.chaos import bound_of, judge, run_chaos
from shoal.lab.campaigns.chaos_plan import INNER_STEPS, KINDS, PHASES, QUICKER, ROUNDS, draw_scenario, hand
from shoal.lab.campaigns.chaos_report import late_rounds, ok, report_of, to_json
from shoal.lab.campaigns.settings import Chaos
from shoal.lab.cli.chaos import scenario_line, summary
from shoal.node.options import Hold
from shoal.node.reporting.events import Holding, Listening, RoundStarted
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import Identity
from shoal.protocol.strategies.table import STRATEGIES
from shoal.testnet import swarm
from shoal.testnet.faults import TRANSFER_ROUNDS, FaultRecord, has_begun, holds_for
from shoal.testnet.journal import Journal
from shoal.testnet.nodes import Runtime
from shoal.testnet.reports.report import BytesReport, FaultReport, LossReport, NodeReport, Report, RoundReport, Span
from shoal.testnet.scenario import Fault, Scenario
from tests.testnet.test_swarm import fakes

SCENARIOS = [draw_scenario(3, number) for number in range(1, 97)]
"""Decks of 90 cards, in hands of three."""


# -- what is drawn -------------------------------------------------------------------------------------------


def test_every_kind_meets_every_phase_before_any_meets_it_twice() -> None:
    dealt = [card for number in range(1, 31) for card in hand(3, number)]
    assert len(dealt) == len(set(dealt)) == len(KINDS) * len(PHASES)
    assert Counter(card for number in range(1, 121) for card in hand(3, number)) == Counter(
        {(kind, phase): 4 for kind in KINDS for phase in PHASES}
    )


def test_a_scenario_follows_from_seed_and_number() -> None:
    assert draw_scenario(3, 7) == SCENARIOS[6]
    assert draw_scenario(4, 7) != SCENARIOS[6]
    with pytest.raises(ConfigError, match="--only: the scenarios of a campaign are 1 to"):
        draw_scenario(3, 0)


def test_the_faults_of_a_scenario_are_those_of_its_cards_at_their_points() -> None:
    for number, scenario in enumerate(SCENARIOS, 1):
        points = {(fault.kind, fault.phase) for fault in scenario.faults}
        if not scenario.synchronisation.certifies:
            phases = (
                {None} if scenario.synchronisation.shares_rollouts else {None, "train", "plan", "reduce", "certify"}
            )
            assert {phase for _, phase in points} <= phases
            assert {kind for kind, _ in hand(3, number)} <= {kind for kind, _ in points}
            continue
        for kind, phase in hand(3, number):
            assert (kind, phase) in points
            if phase == "repair":
                assert ("restart", "reduce") in points, "there is something to repair"
            if phase == "transfer":
                assert ("join", "train") in points, "there is somebody who fetches"
        progresses = [fault.progress for fault in scenario.faults if fault.phase in ("reduce", "transfer")]
        assert None not in progresses


def test_every_strategy_line_and_size_is_drawn_and_what_comes_of_it_is_a_swarm() -> None:
    assert Counter(scenario.strategy for scenario in SCENARIOS) == dict.fromkeys(STRATEGIES, 16)
    sizes = {scenario.nodes for scenario in SCENARIOS}
    assert (min(sizes), max(sizes)) == (4, 12)
    assert sum(bool(scenario.behind_routers) for scenario in SCENARIOS) >= 12
    assert sum(bool(scenario.uplinks) for scenario in SCENARIOS) >= 12
    founders = [Identity.from_seed(bytes([index] * 32)).peer_id for index in range(12)]
    for scenario in SCENARIOS:
        sync = swarm.testnet_manifest(scenario, founders[: scenario.nodes]).sync
        steps = 1 if scenario.synchronisation.exchanges_gradients else INNER_STEPS
        assert scenario.synchronisation.shares_rollouts or sync.round_steps == steps, "rounds last as long"


def test_a_swarm_can_survive_what_is_drawn() -> None:
    for scenario in SCENARIOS:
        lost: set[int] = set()
        for fault in scenario.faults:
            if fault.kind in ("kill", "leave"):
                assert fault.target not in lost
                lost.add(fault.target)
            if fault.kind == "stop" and fault.duration_s is None:
                assert any(f.kind == "continue" and f.node == fault.node for f in scenario.faults)
            if fault.kind == "partition" and fault.duration_s is None:
                assert len(fault.groups[0]) == 1, "the others have a majority"
                within = 4 * (QUICKER if scenario.synchronisation.shares_rollouts else 1)
                [heal] = [f for f in scenario.faults if f.kind == "heal" and 0 < f.round - fault.round < within]
                assert scenario.held_node(heal) not in fault.groups[0], "who is apart does not come to that round"
            assert fault.node is None or fault.kind == "restart" or fault.target not in lost - {fault.node}
        founders = {index for index in lost if index < scenario.nodes}
        assert len(founders) <= scenario.nodes - 2
        rounds = ROUNDS * (QUICKER if scenario.synchronisation.shares_rollouts else 1)
        assert scenario.rounds == rounds > max(fault.round for fault in scenario.faults)


OF_A_NODE = ("kill", "leave", "stop", "cut", "slow", "throttle")


def test_moves_do_not_strike_whom_the_one_before_struck() -> None:
    for scenario in SCENARIOS:
        struck = [f for f in scenario.faults if f.kind in OF_A_NODE and f.phase]
        founders = [(f.round, f.target) for f in struck if f.target < scenario.nodes]
        assert all(a[1] != b[1] for a, b in pairwise(founders) if a[0] != b[0])


# -- transfers -----------------------------------------------------------------------------------------------


def test_who_fetches_a_state_holds_for_what_happens_in_a_transfer() -> None:
    join = Fault(kind="join", node=4, round=3, phase="train")
    for kind, more in (("kill", {"node": 4}), ("corrupt", {"node": 1}), ("heal", {}), ("partition", {})):
        groups = ((4,), (0, 1)) if kind == "partition" else ()
        apart = (Fault(kind="partition", round=1, groups=((2,), (0, 1))),)
        fault = msgspec.convert(
            {"kind": kind, "round": 3, "phase": "transfer", "progress": 0.5, "groups": groups, **more}, Fault
        )
        scenario = Scenario(nodes=4, rounds=5, faults=(*apart, join, fault))
        assert scenario.held_node(fault) == 4
    records = [FaultRecord(fault=join, at=1.0, done=True), FaultRecord(fault=fault)]
    # In which round it gets there is not known before.
    assert holds_for(scenario, 4, records) == tuple(
        Hold(round=3 + more, phase="transfer", progress=0.5) for more in range(TRANSFER_ROUNDS)
    )
    assert holds_for(scenario, 0, records) == ()


@pytest.mark.parametrize(
    ("node", "round", "progress", "is_it"),
    [(4, 3, 0.5, True), (4, 9, 0.6, True), (4, 2, 0.5, False), (3, 3, 0.5, False)],
)
def test_a_transfer_is_struck_in_whichever_round_it_is(node: int, round: int, progress: float, is_it: bool) -> None:
    join = Fault(kind="join", node=4, round=3, phase="train")
    kill = Fault(kind="kill", node=4, round=3, phase="transfer", progress=0.5)

    class Field:
        scenario = Scenario(nodes=4, rounds=5, faults=(join, kill))
        journal = Journal()
        network = None

    Field.journal.add(node, Holding(at=1.0, round=round, phase="transfer", progress=progress))
    assert has_begun(kill, Field()) is is_it  # type: ignore[arg-type]


@pytest.mark.parametrize(("rounds", "is_it"), [([], False), ([1, 2], False), ([2, 3], True), ([1, 5], True)])
def test_without_a_phase_the_moment_is_the_first_round_from_there_that_anybody_begins(
    rounds: list[int], is_it: bool
) -> None:
    kill = Fault(kind="kill", node=1, round=3)

    class Field:
        scenario = Scenario(nodes=2, rounds=9, faults=(kill,), strategy="gossip")
        journal = Journal()
        network = None

    Field.journal.add(0, Listening(at=0.5, addresses=()))
    for number in rounds:
        Field.journal.add(0, RoundStarted(at=1.0, round=number))
    assert has_begun(kill, Field()) is is_it  # type: ignore[arg-type]


# -- judging -------------------------------------------------------------------------------------------------


def spans(*ends: float | None) -> tuple[Span, ...]:
    return tuple(Span(round=number, start_s=0.0, end_s=end) for number, end in enumerate(ends, 1))


KILLED = FaultReport(kind="kill", node=2, round=2, phase="reduce", at_s=4.0, delay_s=1.5)
MISSED = FaultReport(
    kind="cut", node=1, round=3, phase="repair", at_s=None, delay_s=None, error="its moment never came"
)
GOOD = Report(
    scenario=Scenario(
        nodes=3, rounds=3, codec="int8", faults=(Fault(kind="stop", node=2, round=2, phase="reduce", duration_s=7.0),)
    ),
    wall_s=20.0,
    rounds_certified=3,
    forks=0,
    wrong_values=0,
    digests_equal=True,
    nodes=tuple(
        NodeReport(
            index=i,
            peer_id=f"peer {i}",
            outcome="running",
            rounds=3,
            certified=3,
            contributed=3,
            digests={},
            spans=spans(9.0, 11.0, 13.5),
        )
        for i in range(3)
    ),
    loss=LossReport(metric="", first=None, last=None, by_round=()),
    faults=(KILLED, MISSED),
    rounds=tuple(
        RoundReport(round=n, members=3, contributors=3, coverage=1.0, tokens=9, reduce_s=0.1, total_s=2.0)
        for n in (1, 2, 3)
    ),
    bytes=BytesReport(lanes_sent=0, control_sent=0, fp32_allreduce_every_step=0),
)


def test_a_faultless_scenario_passes_and_what_was_not_done_is_counted(tmp_path: Path) -> None:
    record = judge(4, GOOD, tmp_path)
    assert (record.failed, record.problems, record.missed) == (False, (), 1)
    assert (record.longest_round_s, record.rounds_certified, record.number) == (2.5, 3, 4)
    report = report_of(1, [record], minutes=1, wall_s=30.0, without_links=None, passed_over=())
    assert ok(report)
    assert (report.faults_done, report.faults_missed, report.by_kind["kill"].delay_s.median) == (1, 1, 1.5)  # type: ignore[union-attr]
    assert (report.by_phase["repair"].done, report.by_phase["repair"].missed) == (0, 1)
    assert "4: 3 of 3 rounds exact; kill at reduce" in scenario_line(record).replace(", 3 nodes, diloco in int8", "")
    assert summary(report, tmp_path)[-1] == "all is as it should be"


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"wrong_values": 2}, "2 applied values are not the mean"),
        ({"forks": 1}, "1 round has two different certificates"),
        ({"digests_equal": False}, "nodes do not hold the same state"),
        ({"rounds_certified": 2}, "1 rounds were not certified"),
        (
            {
                "unaffected_absent": (1,),
                "nodes": (*GOOD.nodes[:1], msgspec.structs.replace(GOOD.nodes[1], missed=(2, 3))),
            },
            "no fault struck node 1, and it missed rounds 2, 3",
        ),
        ({"unverified": ("round 2: <no> node kept what it applied",)}, "round 2: <no> node kept what it applied"),
        ({"trouble": "not finished after 9 s"}, "not finished after 9 s"),
        ({"nodes": (msgspec.structs.replace(GOOD.nodes[0], crashes=1),)}, "node 0 ended by itself"),
        ({"nodes": (msgspec.structs.replace(GOOD.nodes[0], absent_at_end=True),)}, "node 0 took part neither in the"),
    ],
)
def test_whatever_is_not_as_it_should_be_fails_the_scenario(
    wrong: dict[str, object], what: str, tmp_path: Path
) -> None:
    record = judge(4, msgspec.structs.replace(GOOD, **wrong), tmp_path)  # type: ignore[arg-type]
    assert what in "; ".join(record.problems)
    report = report_of(1, [record], minutes=1, wall_s=30.0, without_links=None, passed_over=())
    assert not ok(report)
    assert report.failed == (4,)
    told = json.loads(to_json(report))
    assert (told["ok"], told["again"]) == (False, ["shoal chaos --seed 1 --only 4"])
    assert "try again: shoal chaos --seed 1 --only 4" in summary(report, tmp_path)[-1]


def test_a_round_that_comes_past_its_bound_fails_the_scenario(tmp_path: Path) -> None:
    bound_s = bound_of(GOOD, load=0.5)
    slow = tuple(msgspec.structs.replace(n, spans=spans(9.0, 9.5 + bound_s, 10.0 + bound_s)) for n in GOOD.nodes)
    assert late_rounds(msgspec.structs.replace(GOOD, nodes=slow), bound_s) == (
        bound_s + 0.5,
        [f"round 2: {bound_s + 0.5:.1f} s after the one before, more than {bound_s:.1f} s"],
    )
    slower = tuple(msgspec.structs.replace(n, spans=spans(9.0, 10_000.0)) for n in GOOD.nodes)
    record = judge(4, msgspec.structs.replace(GOOD, nodes=slower), tmp_path)
    assert (record.late_rounds, record.failed) == (1, True)
    # Whoever certifies it first counts; a struck node may be later.
    one_is_late = (msgspec.structs.replace(GOOD.nodes[0], spans=spans(9.0, None, 10_000.0)), *GOOD.nodes[1:])
    assert judge(4, msgspec.structs.replace(GOOD, nodes=one_is_late), tmp_path).late_rounds == 0


def test_the_bound_grows_with_what_lasts_and_with_a_loaded_machine() -> None:
    assert bound_of(GOOD, load=3.0) == bound_of(GOOD, load=0.2) + 2 * MACHINE_S
    longer = Fault(kind="stop", node=2, round=2, duration_s=17.0)
    scenario = msgspec.structs.replace(GOOD.scenario, faults=(longer,))
    assert bound_of(msgspec.structs.replace(GOOD, scenario=scenario), 0.2) == bound_of(GOOD, 0.2) + 10.0


def test_a_vote_against_a_promise_fails_the_scenario(tmp_path: Path) -> None:
    peer = Identity.generate().peer_id
    node = msgspec.structs.replace(GOOD.nodes[0], peer_id=peer)
    folder = tmp_path / "nodes" / "0"
    folder.mkdir(parents=True)
    said = [{"event": e, "at": 1.0, "round": 2, "view": v} for e, v in (("view_changed", 3), ("voted", 2))]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in said))
    record = judge(4, msgspec.structs.replace(GOOD, nodes=(node,)), tmp_path)
    assert (record.broken_votes, record.failed) == (1, True)


def test_nothing_done_is_no_success(tmp_path: Path) -> None:
    report = report_of(1, [], minutes=1, wall_s=0.0, without_links="no root", passed_over=[1, 2])
    assert not ok(report)
    assert summary(report, tmp_path)[-1] == "FAILED     nothing was done"
    assert "links      left alone, 2 scenarios that strike some passed over: no root" in summary(report, tmp_path)


# -- the campaign --------------------------------------------------------------------------------------------


def with_stand_ins(monkeypatch: pytest.MonkeyPatch, without_links: str | None = "no root") -> list[Scenario]:
    """Scenarios of two rounds without faults and without real nodes, of which nothing can be verified."""
    done: list[Scenario] = []

    async def run_testnet(scenario: Scenario, out: Path) -> Report:
        done.append(scenario)
        short = Scenario(nodes=2, rounds=2, seed=scenario.seed)
        runtime: Runtime = fakes(short)
        return await real(short, out, runtime=runtime)

    real = chaos.run_testnet
    monkeypatch.setattr(chaos, "run_testnet", run_testnet)
    monkeypatch.setattr(chaos, "why_not", lambda: without_links)
    return done


STRIKING = [number for number in range(1, 27) if draw_scenario(1, number).needs_namespaces]
LEFT = [number for number in range(1, 27) if number not in STRIKING]
"""Of the first 26 scenarios of seed 1, those that strike links and those that do not."""


def test_a_failed_scenario_leaves_its_folder_and_the_report_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = with_stand_ins(monkeypatch, without_links=None)
    assert execute(["chaos", "--scenarios", "2", "--seed", "5", "--out", str(tmp_path), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["scenarios"], told["failed"], told["seed"], told["passed_over"]) == (2, [1, 2], 5, [])
    assert done == [draw_scenario(5, number) for number in (1, 2)]
    assert (tmp_path / "scenarios" / "1" / "nodes" / "0" / "log.txt").exists()
    assert json.loads((tmp_path / "chaos.json").read_text())["failed"] == [1, 2]


def test_where_links_cannot_be_struck_scenarios_that_do_are_passed_over_by_name_and_the_others_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert STRIKING
    done = with_stand_ins(monkeypatch)
    asked = ["chaos", "--scenarios", "2", "--seed", "1", "--minutes", "9", "--out", str(tmp_path), "--json"]
    assert execute(asked) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["failed"] == LEFT[:2]
    assert told["passed_over"] == [number for number in STRIKING if number < LEFT[1]]
    assert told["again"] == [f"shoal chaos --seed 1 --only {number}" for number in LEFT[:2]]
    assert done == [draw_scenario(1, number) for number in LEFT[:2]]
    assert {fault.kind for scenario in done for fault in scenario.faults}.isdisjoint({"partition", "heal", "slow"})


@pytest.mark.parametrize("without_links", [None, "no root"])
def test_one_of_the_scenarios_is_the_same_with_and_without_the_privilege(
    without_links: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = with_stand_ins(monkeypatch, without_links)
    assert execute(["chaos", "--seed", "1", "--only", str(LEFT[3]), "--out", str(tmp_path)]) == 1
    assert done == [draw_scenario(1, LEFT[3])]


def test_one_that_strikes_links_is_refused_where_they_cannot_be_and_done_where_they_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["chaos", "--seed", "1", "--only", str(STRIKING[0]), "--out", str(tmp_path / "out")]
    with monkeypatch.context() as patch:
        assert with_stand_ins(patch) == []
        assert execute(asked) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"--only {STRIKING[0]}: this scenario strikes links; run it where that can be done" in line
    assert line.endswith("no root")
    assert not (tmp_path / "out").exists()
    done = with_stand_ins(monkeypatch, without_links=None)
    assert execute(asked) == 1
    assert done == [draw_scenario(1, STRIKING[0])]


def test_scenarios_are_begun_until_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = with_stand_ins(monkeypatch)
    report = trio.run(partial(run_chaos, Chaos(minutes=1e-6), tmp_path, lambda record: None))
    assert (len(done), report.scenarios) == (1, 1)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--minutes", "0"], "--minutes: more than 0"),
        (["--scenarios", "0"], "--scenarios: at least one"),
        (["--only", "0"], "--only: the scenarios of a campaign are 1 to"),
    ],
)
def test_what_cannot_be_is_refused(
    arguments: list[str], what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["chaos", *arguments, "--out", str(tmp_path / "out")]) == 2
    assert what in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
