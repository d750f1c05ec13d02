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
from shoal.lab.bench.hostile_member import LYING_KINDS
from shoal.lab.campaigns import chaos
from shoal.lab.campaigns.campaign_check import MACHINE_S
from shoal.lab.campaigns.campaign_plan import CERTIFYING
from shoal.lab.campaigns.chaos import bound_of, judge, run_chaos
from shoal.lab.campaigns.chaos_plan import (
    BESIDE,
    BESIDE_LEAST,
    DECK,
    FIRST_ROUND,
    INNER_STEPS,
    KINDS,
    MOVES,
    PAIR_NODES,
    PHASES,
    POLICY_STEPS,
    QUICKER,
    ROUNDS,
    SWARMS,
    borne,
    draw_scenario,
    hand,
    programs_of,
    swarm_of,
)
from shoal.lab.campaigns.chaos_report import ScenarioRecord, late_rounds, ok, report_of, to_json
from shoal.lab.campaigns.chaos_swarm import Program, command_of
from shoal.lab.campaigns.settings import Chaos
from shoal.lab.cli.chaos import scenario_line, summary
from shoal.lab.forgeries import without as without_member
from shoal.lab.waiting_loop import DIED, LOOP
from shoal.node.loops.loop_messages import OWN_LOOP
from shoal.node.options import Hold
from shoal.node.reporting.event_log import line_of
from shoal.node.reporting.events import CaughtUp, Holding, Listening, RoundStarted
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import Identity
from shoal.protocol.manifest import render_manifest
from shoal.protocol.manifest_rollouts import DEFAULT_POLICY
from shoal.protocol.messages import Certificate
from shoal.protocol.strategies.table import STRATEGIES
from shoal.protocol.voting import FaultModel, are_enough
from shoal.testnet import faults, swarm
from shoal.testnet.faults import LATER_ROUNDS, FaultRecord, carry_out, has_begun, holds_for
from shoal.testnet.journal import Journal
from shoal.testnet.links.wan_profiles import PROFILES
from shoal.testnet.nodes import Launch, Runtime, node_command
from shoal.testnet.reports.report import BytesReport, FaultReport, LossReport, NodeReport, Report, RoundReport, Span
from shoal.testnet.scenario import Fault, Scenario
from tests.lab.bench.test_hostile import HONEST, LIAR, TAKE_OVERS, VICTIM, Chains, certified, value_after
from tests.testnet.test_swarm import fakes

SCENARIOS = [draw_scenario(3, number) for number in range(1, 97)]


# -- what is drawn -------------------------------------------------------------------------------------------


def test_every_kind_meets_every_phase_before_any_meets_it_twice() -> None:
    hands = len(DECK) // MOVES
    dealt = [card for number in range(1, hands + 1) for card in hand(3, number)]
    assert len(dealt) == len(set(dealt)) == len(KINDS) * len(PHASES)
    assert Counter(card for number in range(1, 4 * hands + 1) for card in hand(3, number)) == Counter(
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
        for kind, phase in [borne(card, swarm_of(3, number)[1]) for card in hand(3, number)]:
            assert (kind, phase) in points
            if phase == "repair":
                assert ("restart", "reduce") in points, "there is something to repair"
            if phase == "transfer":
                assert ("join", "train") in points, "there is somebody who fetches"
        progresses = [fault.progress for fault in scenario.faults if fault.phase in ("reduce", "transfer")]
        assert None not in progresses


def test_every_strategy_line_and_size_is_drawn_and_what_comes_of_it_is_a_swarm() -> None:
    dealt = [swarm_of(3, number) for number in range(1, 5 * len(SWARMS) + 1)]
    assert Counter(dealt) == dict.fromkeys(SWARMS, 5)
    assert {name for name, company in SWARMS if company == "nodes"} == set(STRATEGIES)
    assert [s.strategy for s in SCENARIOS] == [swarm_of(3, number)[0] for number in range(1, len(SCENARIOS) + 1)]
    sizes = {scenario.nodes for scenario in SCENARIOS}
    assert (min(sizes), max(sizes)) == (3, 16)
    assert sum(bool(scenario.behind_routers) for scenario in SCENARIOS) >= 8
    delays = Counter(uplink.delay_s for scenario in SCENARIOS for uplink in scenario.uplinks[:1])
    assert delays.keys() == {PROFILES["home"].rtt_s / 4, PROFILES["continental"].rtt_s / 4}
    assert min(delays.values()) >= 8
    assert sum(is_of_a_pair(fault) for scenario in SCENARIOS for fault in scenario.faults) >= 2
    founders = [Identity.from_seed(bytes([index] * 32)).peer_id for index in range(16)]
    for scenario in SCENARIOS:
        sync = swarm.testnet_manifest(scenario, founders[: scenario.nodes]).sync
        steps = 1 if scenario.synchronisation.exchanges_gradients else INNER_STEPS
        steps = POLICY_STEPS if scenario.rollouts else steps
        assert scenario.synchronisation.shares_rollouts or sync.round_steps == steps, "rounds last as long"


def is_of_a_pair(fault: Fault) -> bool:
    """True if two never reach each other, from the first round on."""
    first = fault.round in (1, QUICKER) and fault.duration_s is None
    return first and [len(group) for group in fault.groups] == [1, 1]


def test_a_swarm_can_survive_what_is_drawn() -> None:
    for scenario in SCENARIOS:
        lost: set[int] = set()
        for fault in scenario.faults:
            if fault.kind in ("kill", "leave"):
                assert fault.target not in lost
                lost.add(fault.target)
            if fault.kind == "stop" and fault.duration_s is None:
                assert any(f.kind == "continue" and f.node == fault.node for f in scenario.faults)
            if is_of_a_pair(fault):
                assert scenario.nodes >= PAIR_NODES, "others are left between the two"
            elif fault.kind == "partition" and fault.duration_s is None:
                assert len(fault.groups[0]) == 1, "the others have a majority"
                within = 4 * (QUICKER if scenario.synchronisation.shares_rollouts else 1)
                [heal] = [f for f in scenario.faults if f.kind == "heal" and 0 < f.round - fault.round < within]
                assert scenario.held_node(heal) not in fault.groups[0], "who is apart does not come to that round"
            assert fault.node is None or fault.kind == "restart" or fault.target not in lost - {fault.node}
        founders = {index for index in lost if index < scenario.nodes}
        assert len(founders) <= scenario.nodes - 2
        rounds = ROUNDS * (QUICKER if scenario.synchronisation.shares_rollouts else 1)
        assert scenario.rounds == rounds > max(fault.round for fault in scenario.faults)


def test_a_liar_is_among_as_many_voters_as_withstand_it_and_what_else_strikes() -> None:
    lying = of("liar")
    assert {scenario.strategy for scenario, _ in lying} == set(CERTIFYING)
    assert {program.kind for _, programs in lying for program in programs.values()} == set(LYING_KINDS)
    for scenario, programs in lying:
        assert [*programs] == [scenario.nodes - 1]
        founders = [Identity.from_seed(bytes([index] * 32)).peer_id for index in range(scenario.nodes)]
        voting = swarm.testnet_manifest(scenario, founders).voting
        assert (voting.faults, voting.named) == (FaultModel.LYING, tuple(sorted(founders)))
        gone = {fault.node for fault in scenario.faults if fault.kind in ("kill", "leave", "continue", "corrupt")}
        there = set(range(scenario.nodes - 1)) - gone
        assert are_enough(len(there), scenario.nodes, FaultModel.LYING)
        assert scenario.nodes - 1 not in {fault.node for fault in scenario.faults}
    assert all(programs == {} for _, programs in of("nodes"))


def test_the_liar_is_a_node_of_the_bench_that_lies_from_the_first_round_on(tmp_path: Path) -> None:
    for index in range(2):
        (tmp_path / str(index)).mkdir()
    victim = Identity.load_or_create(tmp_path / "0" / "node.key").peer_id
    launches = [Launch(manifest=tmp_path / "swarm.toml", data_dir=tmp_path / str(index)) for index in range(2)]
    honest, liar = (command_of({1: Program("viewjump")}, launch) for launch in launches)
    assert honest == node_command(launches[0])
    at = honest.index("shoal.cli.main")
    lying = ["shoal.lab.bench.hostile_member", "viewjump", str(tmp_path / "1" / "strike"), victim]
    assert liar == [*honest[:at], *lying, *node_command(launches[1])[at + 1 :]]
    assert (tmp_path / "1" / "strike").exists()
    assert not (tmp_path / "0" / "strike").exists()


def test_two_kinds_strike_two_nodes_at_one_point_where_the_others_can_bear_it() -> None:
    pairs = []
    for scenario in SCENARIOS:
        points: dict[object, list[Fault]] = {}
        for fault in scenario.faults:
            if fault.phase not in (None, "repair", "transfer", "train") and fault.node is not None:
                points.setdefault((fault.round, fault.phase, fault.progress), []).append(fault)
        pairs += [(scenario, found) for found in points.values() if len(found) > 1]
    assert len(pairs) > len(SCENARIOS) / 10
    for scenario, found in pairs:
        first, second = found
        assert (first.kind != second.kind, first.target != second.target) == (True, True)
        assert scenario.nodes >= BESIDE_LEAST
        assert {scenario.held_node(fault) for fault in found} >= {second.target}
    assert {second.kind for _, (_, second) in pairs} == set(BESIDE)


def test_clocks_are_set_either_way_and_no_named_voter_is_put_back_on_an_old_folder() -> None:
    ahead = [fault.ahead_s for scenario in SCENARIOS for fault in scenario.faults if fault.ahead_s is not None]
    assert min(map(abs, ahead)) < 3600
    assert min(ahead) < -5 * 86_400
    assert max(ahead) > 5 * 86_400
    old = [fault.from_round for scenario in SCENARIOS for fault in scenario.faults if fault.kind == "restore"]
    assert len(old) > 5
    lying = [draw_scenario(3, number) for number in range(1, 97) if swarm_of(3, number)[1] == "liar"]
    assert not [fault for scenario in lying for fault in scenario.faults if fault.kind == "restore"]


def of(company: str) -> list[tuple[Scenario, dict[int, Program]]]:
    """Scenarios of such a company, each with who of it runs what."""
    numbers = [number for number in range(1, len(SCENARIOS) + 1) if swarm_of(3, number)[1] == company]
    return [(SCENARIOS[number - 1], programs_of(3, number)) for number in numbers]


def test_each_node_of_a_swarm_of_loops_has_one_and_one_of_ranks_loses_one() -> None:
    for company in ("loops", "ranks"):
        for scenario, programs in of(company):
            assert programs.keys() == set(range(scenario.places)), "who joins has one too"
            assert {program.kind for program in programs.values()} == {LOOP}
            assert (scenario.workload, scenario.options) == (OWN_LOOP, {})
            several = {index: program for index, program in programs.items() if program.ranks > 1}
            if company == "loops":
                assert several == {}
                continue
            [(index, program)] = several.items()
            assert index < scenario.nodes
            assert (program.ranks, FIRST_ROUND <= program.dies <= ROUNDS // 2) == (2, True)
    assert {scenario.strategy for scenario, _ in of("loops")} == {"diloco", "streaming"}


def test_a_sampler_and_a_judge_join_trainers_of_averaged_policies_and_the_sampler_is_killed_and_comes_back() -> None:
    for scenario, programs in of("samplers"):
        first = scenario.nodes
        assert {index: program.kind for index, program in programs.items()} == {first: "sample", first + 1: "judge"}
        joins = {fault.node: fault.round for fault in scenario.faults if fault.kind == "join"}
        assert (joins[first], joins[first + 1]) == (1, 1)
        assert [f.node for f in scenario.faults if f.kind == "restart" and f.node == first] == [first]
        founders = [Identity.from_seed(bytes([index] * 32)).peer_id for index in range(first)]
        manifest = swarm.testnet_manifest(scenario, founders)
        assert (manifest.sync.strategy, manifest.workload.name) == ("diloco", DEFAULT_POLICY)
        assert manifest.rollouts is not None
        assert (manifest.rollouts.images, manifest.rollouts.replays) == (True, True)


@pytest.mark.parametrize(
    ("program", "module", "more"),
    [
        (Program(LOOP, step_s=0.1), ["shoal.lab.waiting_loop", "0.1", "1", "0"], []),
        (Program(LOOP, step_s=0.1, ranks=2, dies=4), ["shoal.lab.waiting_loop", "0.1", "2", "4"], []),
        (Program("sample"), [], ["--rollouts", "sample"]),
        (Program("judge"), [], ["--rollouts", "judge"]),
    ],
)
def test_a_program_takes_the_options_of_the_node_in_whose_place_it_is(
    program: Program, module: list[str], more: list[str], tmp_path: Path
) -> None:
    for clock in (None, tmp_path / "clock"):
        launch = Launch(manifest=tmp_path / "swarm.toml", data_dir=tmp_path / "5", clock=clock)
        ordinary = node_command(launch)
        at = ordinary.index("shoal.cli.main" if clock is None else "shoal.testnet.wall_clock")
        assert command_of({5: program}, launch) == [*ordinary[:at], *module, *ordinary[at:], *more]
        assert command_of({4: program}, launch) == ordinary


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
        Hold(round=3 + more, phase="transfer", progress=0.5) for more in range(LATER_ROUNDS)
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


@pytest.mark.parametrize("kind", ["corrupt", "restore", "partition"])
async def test_who_holds_in_a_transfer_goes_on_once_another_was_struck(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    join = Fault(kind="join", node=4, round=3, phase="train")
    where = {"groups": ((4,), (0, 1))} if kind == "partition" else {"node": 1}
    fault = msgspec.convert({"kind": kind, "round": 3, "phase": "transfer", **where}, Fault)

    class Node:
        alive, stopped = True, False

        def __init__(self) -> None:
            self.asked: list[tuple[str, ...]] = []

        async def ask(self, *words: str) -> None:
            self.asked.append(words)

    class Field:
        scenario = Scenario(nodes=4, rounds=5, faults=(join, fault))
        journal = Journal()
        network = None
        nodes = tuple(Node() for _ in range(5))

        def node(self, index: int) -> Node:
            return self.nodes[index]

        def holds(self, index: int) -> tuple[Hold, ...]:
            return ()

    async def struck(fault: Fault, swarm: object, limit_s: float = 0.0) -> None:
        await trio.lowlevel.checkpoint()

    for what in ("strike", "until_whole", "copy_folder"):
        monkeypatch.setattr(faults, what, struck)
    Field.journal.add(0, RoundStarted(at=1.0, round=3))
    Field.journal.add(4, Holding(at=1.0, round=3, phase="transfer", progress=0.0))
    record = FaultRecord(fault=fault)
    with trio.fail_after(5):
        await carry_out(record, Field(), lambda record: None)  # type: ignore[arg-type]
    assert record.done
    assert Field.nodes[4].asked[-1] == ("release",)
    assert Field.nodes[1].asked == []


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


def test_a_rank_that_was_not_killed_is_counted_as_what_was_not_done(tmp_path: Path) -> None:
    programs = {0: Program(LOOP), 2: Program(LOOP, ranks=2, dies=4)}
    assert [(r.struck, r.missed) for r in [judge(4, GOOD, tmp_path, programs)]] == [({2: 0}, 2)]
    (tmp_path / "nodes" / "2").mkdir(parents=True)
    (tmp_path / "nodes" / "2" / DIED).touch()
    assert [(r.struck, r.missed) for r in [judge(4, GOOD, tmp_path, programs)]] == [({2: 1}, 1)]


def test_who_lost_a_rank_may_have_got_its_loop_back_and_nobody_else(tmp_path: Path) -> None:
    back = [f"no fault struck node {index}, and its trainer died: a training loop attached" for index in (0, 2)]
    report = msgspec.structs.replace(GOOD, alarms=tuple(back))
    assert judge(4, report, tmp_path, {0: Program(LOOP), 2: Program(LOOP, ranks=2, dies=4)}).problems == (back[0],)


@pytest.mark.parametrize(("last", "said"), [(None, "up to round 0"), (7, "up to round 7"), (8, ""), (12, "")])
def test_who_follows_takes_part_in_no_round_and_has_to_come_to_one_of_the_last(
    last: int | None, said: str, tmp_path: Path
) -> None:
    folder = tmp_path / "nodes" / "3"
    folder.mkdir(parents=True)
    caught_up = [] if last is None else [CaughtUp(round=3), CaughtUp(round=last)]
    (folder / "events.jsonl").write_bytes(b"".join(map(line_of, caught_up)))
    sampler = msgspec.structs.replace(GOOD.nodes[0], index=3, certified=0, rounds=0, absent_at_end=True)
    scenario = msgspec.structs.replace(GOOD.scenario, rounds=12)
    ends = tuple(msgspec.structs.replace(GOOD.rounds[0], round=number) for number in range(1, 13))
    report = msgspec.structs.replace(
        GOOD, nodes=(*GOOD.nodes, sampler), scenario=scenario, rounds=ends, rounds_certified=12
    )
    [*problems] = judge(4, report, tmp_path, {3: Program("sample")}).problems
    assert problems == ([f"node 3 followed {said} of 12"] if said else [])
    assert judge(4, report, tmp_path).failed, "as a member it would be absent"


def test_nothing_done_is_no_success(tmp_path: Path) -> None:
    report = report_of(1, [], minutes=1, wall_s=0.0, without_links="no root", passed_over=[1, 2])
    assert not ok(report)
    assert summary(report, tmp_path)[-1] == "FAILED     nothing was done"
    assert "links      left alone, 2 scenarios that strike some passed over: no root" in summary(report, tmp_path)


class Remains:
    """A report of five founders of which the last lies, and what chaos finds of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "nodes").mkdir()
        self.chains = Chains(folder / "nodes", name="")
        (folder / "swarm.toml").write_text(render_manifest(self.chains.manifest))
        peers = [one.peer_id for one in (*HONEST, LIAR)]
        nodes = tuple(
            msgspec.structs.replace(GOOD.nodes[0], index=index, peer_id=peer) for index, peer in enumerate(peers)
        )
        (folder / "nodes" / "4").mkdir()
        (folder / "nodes" / "4" / "strike.told").write_bytes(b"..")
        scenario = msgspec.structs.replace(GOOD.scenario, nodes=5, faults=())
        self.report = msgspec.structs.replace(GOOD, nodes=nodes, scenario=scenario, faults=())
        self.liar = nodes[-1]

    def write(self, certificate: Certificate) -> None:
        for number in range(4):
            self.chains.write(number, certificate)

    def judged(self, **changes: object) -> ScenarioRecord:
        return judge(4, msgspec.structs.replace(self.report, **changes), self.folder, {4: Program("viewjump")})


@pytest.fixture
def remains(tmp_path: Path) -> Remains:
    return Remains(tmp_path)


def test_what_a_liar_misses_and_is_convicted_of_is_no_failure_and_what_an_honest_node_misses_is(
    remains: Remains,
) -> None:
    remains.write(certified(value_after(remains.chains.genesis)))
    calm = remains.judged()
    assert (calm.problems, calm.struck, calm.programs, calm.missed) == ((), {4: 2}, {4: Program("viewjump")}, 0)
    liar = msgspec.structs.replace(remains.liar, missed=(2, 3), crashes=1, hung=True, absent_at_end=True)
    proof = f"node 1 has proof that {LIAR.peer_id} lied in round 2: equivocation"
    told = remains.judged(nodes=(*remains.report.nodes[:4], liar), unaffected_absent=(4,), alarms=(proof,))
    assert told.problems == ()
    wrong = "node {}: of its contribution to round 2 5 values do not follow from what it learnt and what was left"
    assert remains.judged(unverified=(wrong.format(4),)).problems == ()
    assert remains.judged(unverified=(wrong.format(1),)).problems == (wrong.format(1),)
    missed = msgspec.structs.replace(remains.report.nodes[1], missed=(2, 3))
    nodes = (remains.report.nodes[0], missed, *remains.report.nodes[2:])
    proof = f"node 1 has proof that {HONEST[2].peer_id} lied in round 2: equivocation"
    assert remains.judged(nodes=nodes, unaffected_absent=(1, 4), alarms=(proof,)).problems == (
        "no fault struck node 1, and it missed rounds 2, 3",
        proof,
    )


@pytest.mark.parametrize("kind", ["an honest member is out", "an honest member is banned", "a stranger that signed"])
def test_what_a_liar_took_over_fails_the_scenario(remains: Remains, kind: str) -> None:
    forge, said = TAKE_OVERS[kind]
    remains.write(forge(remains.chains.genesis))
    record = remains.judged()
    assert record.failed
    assert all(any(p.startswith(f"node {index}: ") and said in p for p in record.problems) for index in range(4))


def test_who_was_killed_beside_a_liar_may_be_out_and_nobody_else(remains: Remains) -> None:
    remains.write(certified(without_member(value_after(remains.chains.genesis), VICTIM)))
    out = [one.peer_id for one in HONEST].index(VICTIM)
    killed = msgspec.structs.replace(remains.report.scenario, faults=(Fault(kind="kill", node=out, round=1),))
    assert remains.judged(scenario=killed).problems == ()
    assert remains.judged().failed


def test_a_liar_that_told_no_lie_is_counted_as_what_was_not_done(remains: Remains) -> None:
    remains.write(certified(value_after(remains.chains.genesis)))
    (remains.folder / "nodes" / "4" / "strike.told").unlink()
    record = remains.judged()
    assert (record.failed, record.struck, record.missed) == (False, {4: 0}, 1)
    report = report_of(1, [record], minutes=1, wall_s=30.0, without_links=None, passed_over=())
    assert (report.faults_done, report.faults_missed, report.by_program) == (0, 1, {"viewjump": 1})
    assert scenario_line(record).startswith("scenario 4, 5 nodes, diloco in int8 with viewjump: ")


# -- the campaign --------------------------------------------------------------------------------------------


def with_stand_ins(monkeypatch: pytest.MonkeyPatch, without_links: str | None = "no root") -> list[Scenario]:
    """Scenarios of two rounds without faults and without real nodes, of which nothing can be verified."""
    done: list[Scenario] = []

    async def run_testnet(scenario: Scenario, out: Path, *, runtime: Runtime) -> Report:
        done.append(scenario)
        short = Scenario(nodes=2, rounds=2, seed=scenario.seed)
        return await real(short, out, runtime=fakes(short))

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


@pytest.mark.long
@pytest.mark.parametrize("company", ["liar", "loops", "ranks", "samplers"])
def test_real_swarms_of_each_company_get_over_what_is_drawn(company: str, tmp_path: Path) -> None:
    """The smallest of the first scenarios that need no namespaces."""
    drawn = {number: draw_scenario(1, number) for number in range(1, 200) if swarm_of(1, number)[1] == company}
    smallest = min((s.nodes, number) for number, s in drawn.items() if not s.needs_namespaces)[1]
    told: list[ScenarioRecord] = []
    report = trio.run(partial(run_chaos, Chaos(seed=1, only=smallest), tmp_path, told.append))
    [record] = told
    assert ok(report), (smallest, record.problems)
    assert record.programs == programs_of(1, smallest) != {}
    assert record.rounds_certified == record.rounds
    assert bool(record.struck) == (company in ("liar", "ranks"))
    assert all(record.struck.values())


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
