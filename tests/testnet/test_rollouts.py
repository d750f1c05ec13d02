"""`strategy = "rollouts"` in a testnet: each agent makes rounds of its own, and nothing is in common."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from shoal.node.reporting.event_log import parse_event
from shoal.node.reporting.events import AgentStarted, HeldOutReward, Rollouts, RoundEnded
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import Identity
from shoal.protocol.voting import FaultModel, Voting
from shoal.testnet import swarm
from shoal.testnet.check import Check
from shoal.testnet.journal import Entry, round_begun
from shoal.testnet.reports.report import Report, make_report, ok
from shoal.testnet.run_record import NodeFacts, RunRecord
from shoal.testnet.scenario import Fault, Scenario, choose_scenario
from shoal.testnet.swarm import run_testnet
from tests.testnet.real_nodes import assert_none_left

BEGAN = 1000.0


def started(node: int, round: int, at: float, reward: float | None) -> Entry:
    event = AgentStarted(at=BEGAN + at, round=round, warm_up_reward=reward)
    return Entry(node, event)


def shared(node: int, round: int, at: float, *, reward: float, own: int = 4, external: int = 4) -> Entry:
    event = Rollouts(
        at=BEGAN + at,
        round=round,
        reward=reward,
        own=own,
        external=external,
        tokens=100,
        control_sent=1000 * round,
        seconds=0.5 + node,
    )
    return Entry(node, event)


def held_out(node: int, round: int, reward: float) -> Entry:
    return Entry(node, HeldOutReward(at=BEGAN + 1 + round, round=round, reward=reward, tasks=200))


def run_record(*, strategy: str = "rollouts") -> RunRecord:
    entries = (
        held_out(0, 0, 0.3),
        held_out(1, 0, 0.4),
        held_out(0, 2, 0.6),
        Entry(0, parse_event(b'{"at": 1000.0, "event": "started"}') or pytest.fail("no event")),
        started(0, 0, 0.5, 0.2),
        started(1, 0, 1.0, 0.4),
        shared(0, 1, 2.0, reward=0.25, external=0, own=8),
        shared(1, 1, 3.0, reward=0.35),
        shared(0, 2, 4.0, reward=0.5, external=2, own=6),
    )
    nodes = tuple(NodeFacts(index=i, peer_id=f"p{i}", outcome="running", lives=()) for i in range(2))
    scenario = Scenario(nodes=2, rounds=2, strategy=strategy)
    return RunRecord(scenario=scenario, began_at=BEGAN, ended_at=BEGAN + 9, entries=entries, nodes=nodes, faults=())


def test_the_report_is_of_each_agents_own_rounds() -> None:
    report = make_report(run_record(), Check(rounds=()))
    assert ok(report), report
    assert (report.rounds_certified, report.forks, report.wrong_values, report.digests_equal) == (2, 0, 0, None)
    assert report.loss.first == pytest.approx(0.7)
    assert report.loss.by_round == pytest.approx((0.7, 0.5))
    assert [(one.round, one.reward, one.nodes) for one in report.held_out] == [(0, 0.35, 2), (2, 0.6, 1)]
    first, second = report.rounds
    assert (first.members, first.contributors, first.coverage, first.tokens) == (2, 2, 0.25, 200)
    assert (second.members, second.coverage, second.total_s) == (1, 0.25, 0.5)
    assert [(span.start_s, span.end_s) for span in report.nodes[0].spans] == [(0.5, 2.0), (2.0, 4.0)]
    assert report.bytes.control_sent == 3000  # the last that each process said
    assert report.bytes.fp32_allreduce_every_step == 0


def test_beside_certified_rounds_those_of_agents_do_not_count() -> None:
    found = run_record(strategy="diloco")
    assert found.certified() == []
    assert len(run_record().certified()) == 3


def test_a_round_of_an_agent_is_read_from_its_nodes_log() -> None:
    line = b'{"at": 1.0, "event": "rollouts", "round": 3, "reward": null, "own": 0, "external": 2, "tokens": 0}'
    event = parse_event(line)
    assert isinstance(event, Rollouts)
    assert isinstance(event, RoundEnded)
    assert (event.round, event.reward, event.external, round_begun(event)) == (3, None, 2, 4)


def test_what_a_scenario_of_rollouts_implies() -> None:
    demo = choose_scenario(strategy="rollouts")
    assert [(fault.kind, fault.round, fault.phase) for fault in demo.faults] == [("kill", 3, None), ("join", 5, None)]
    manifest = swarm.testnet_manifest(demo, [Identity.from_seed(bytes(32)).peer_id])
    assert manifest.workload.name == "char-policy"
    assert manifest.rollouts is not None
    assert (manifest.inner.optimizer, manifest.inner.lr) == ("muon", 5e-4)
    assert manifest.workload.options == {"style": "rotary"}
    other = swarm.testnet_manifest(Scenario(strategy="rollouts", options={"width": 32}), [manifest.swarm.founders[0]])
    assert other.workload.options == {"style": "rotary", "width": 32}
    scenario = Scenario(strategy="rollouts", rollouts={"external": 7, "group_size": 3})
    section = swarm.testnet_manifest(scenario, [Identity.from_seed(bytes(32)).peer_id]).rollouts
    assert section is not None
    assert (section.external, section.group_size) == (7, 3)


def test_what_a_scenario_of_averaged_policies_implies() -> None:
    scenario = Scenario(strategy="diloco", rollouts={"external": 7}, inner_steps=2)
    manifest = swarm.testnet_manifest(scenario, [Identity.from_seed(bytes(32)).peer_id])
    assert (manifest.sync.strategy, manifest.sync.inner_steps, manifest.sync.balance) == ("diloco", 2, False)
    assert (manifest.workload.name, manifest.inner.optimizer) == ("char-policy", "adamw")
    assert manifest.rollouts is not None
    assert (manifest.rollouts.external, manifest.rollouts.images, manifest.rollouts.replays) == (7, True, True)
    assert swarm.silence_limit_s(scenario) == swarm.AGENT_ROUND_DEADLINE_S + 2 * swarm.STEP_DEADLINE_S


def test_how_a_swarm_of_a_scenario_votes_is_in_its_manifest() -> None:
    founders = [Identity.from_seed(bytes([number] * 32)).peer_id for number in range(4)]
    scenario = Scenario(membership={"voters": "named"}, agreement={"faults": "lying"})
    manifest = swarm.testnet_manifest(scenario, founders)
    assert manifest.voting == Voting(FaultModel.LYING, tuple(sorted(founders)))
    assert swarm.testnet_manifest(Scenario(), founders).voting == Voting()
    with pytest.raises(ConfigError, match="needs voters"):
        swarm.testnet_manifest(scenario, founders[:3])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"faults": (Fault(kind="kill", node=1, round=2, phase="reduce"),), "strategy": "rollouts"}, "no phases"),
        ({"rollouts": {"external": 2}, "strategy": "streaming"}, "rollouts"),
    ],
)
def test_what_has_no_meaning_is_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Scenario(**wrong)  # type: ignore[arg-type]


def test_a_setting_of_the_section_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="completions"):
        swarm.testnet_manifest(
            Scenario(strategy="rollouts", rollouts={"completions": 2}), [Identity.from_seed(bytes(32)).peer_id]
        )


@pytest.mark.long
def test_agents_share_through_real_processes_though_one_is_killed(tmp_path: Path) -> None:
    scenario = Scenario(
        nodes=3,
        rounds=4,
        strategy="rollouts",
        options={"width": 16, "layers": 1, "heads": 2, "prompt_chars": 16, "warm_up_updates": 0},
        faults=(Fault(kind="kill", node=2, round=2),),
    )

    async def limited() -> Report:
        with trio.fail_after(300):
            return await run_testnet(scenario, tmp_path / "out")

    report = trio.run(limited)
    assert_none_left(tmp_path / "out")
    assert ok(report), report
    assert [node.outcome for node in report.nodes] == ["running", "running", "killed"]
    assert all(node.rounds == 4 for node in report.nodes[:2])
    assert report.digests_equal is None
    assert report.loss.metric == "missing of reward 1"
    assert report.bytes.control_sent > 0
