"""What `shoal init`, `run` and `status` say about swarms that share rollouts, without starting a node."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import trio

from shoal.cli.init import InitOptions, found
from shoal.cli.render import SharedRounds, group_lines, shared_line, status_lines
from shoal.cli.run import RunOptions, config_of
from shoal.node.control_client import BytesStatus, GroupStatus, RolloutStatus, Status
from shoal.node.node import run_node
from shoal.node.option import HostPort
from shoal.node.options import parse_engine
from shoal.node.outcome import Progress, RoundShared
from shoal.node.reporting.event_files import LOG_NAME
from shoal.node.reporting.events import TaskRewards
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import Identity
from shoal.protocol.manifest import parse_manifest, render_manifest

ENGINE = HostPort("127.0.0.1", 8000)


def write_manifest(folder: Path, strategy: str = "rollouts", workload: str = "text") -> Path:
    options = InitOptions(strategy=strategy, workload=workload)
    manifest = found(options, Identity.generate(), Identity.generate())
    path = folder / "swarm.toml"
    path.write_text(render_manifest(manifest))
    return path


def test_init_founds_a_swarm_that_can_be_run(tmp_path: Path) -> None:
    path = write_manifest(tmp_path)
    manifest = parse_manifest(path.read_text())
    assert manifest.workload.name == "char-policy"
    assert manifest.rollouts is not None
    assert [entry.family for entry in manifest.rollouts.tasks] == ["base_conversion", "basic_arithmetic", "lcm"]
    assert (manifest.inner.optimizer, manifest.inner.lr) == ("muon", 5e-4)
    assert manifest.workload.options == {"style": "rotary"}
    config = config_of(RunOptions(manifest=path, rollouts="sample", local_groups=2, external_groups=0, group_size=16))
    assert (config.rollouts, config.local_groups, config.external_groups, config.group_size) == ("sample", 2, 0, 16)


def test_init_with_a_policy_founds_a_swarm_that_averages_it(tmp_path: Path) -> None:
    path = write_manifest(tmp_path, "diloco", "char-policy")
    manifest = parse_manifest(path.read_text())
    assert (manifest.sync.strategy, manifest.sync.inner_steps, manifest.inner.lr) == ("diloco", 8, 2e-4)
    assert manifest.rollouts is not None
    config = config_of(RunOptions(manifest=path, external_groups=2))
    assert (config.manifest.strategy.certifies, config.manifest.strategy.shares_rollouts) == (True, False)
    alone = parse_manifest(write_manifest(tmp_path).read_text())
    assert (alone.strategy.certifies, alone.strategy.shares_rollouts) == (False, True)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("lmc", "unknown task family 'lmc'; did you mean 'lcm'?"),
        ("sokoban", "making a task of a small board does not end"),
    ],
)
@pytest.mark.parametrize(("strategy", "workload"), [("rollouts", "text"), ("diloco", "char-policy")])
def test_run_refuses_a_task_family_by_its_name_before_the_node_listens(
    tmp_path: Path, family: str, reason: str, strategy: str, workload: str
) -> None:
    path = write_manifest(tmp_path, strategy, workload)
    text = path.read_text()
    assert text.count('"lcm"') == 1
    path.write_text(text.replace('"lcm"', f'"{family}"'))
    told: list[Progress] = []
    with pytest.raises(ConfigError) as refused:
        trio.run(partial(run_node, config_of(RunOptions(manifest=path, data_dir=tmp_path)), on_progress=told.append))
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)
    log = (tmp_path / LOG_NAME).read_text()
    assert (told, '"listening"' in log, '"agent_started"' in log) == ([], False, False)


@pytest.mark.parametrize(
    ("options", "strategy", "workload", "reason"),
    [
        ({"local_groups": 0}, "rollouts", "text", "--local-groups: 0 is not in 1..256"),
        ({"external_groups": -1}, "rollouts", "text", "--external-groups: -1 is not in 0..256"),
        ({"group_size": 65}, "rollouts", "text", "--group-size: 65 is not in 2..64"),
        ({"group_size": 4}, "diloco", "text", "--group-size: this swarm's strategy is diloco; leave it out"),
        ({"rollouts": "judge"}, "gossip", "text", "--rollouts: this swarm's strategy is gossip; leave it out"),
        ({}, "rollouts", "regression", "[workload] names a policy, and 'regression' is none"),
        ({"accumulate": 2}, "rollouts", "text", "--accumulate: an agent that shares rollouts trains on groups"),
        ({"accumulate": 2}, "diloco", "char-policy", "--accumulate: an agent that shares rollouts trains on groups"),
        ({"engine": ENGINE}, "rollouts", "text", "--engine: only a sampler can do without a policy"),
        ({"engine": ENGINE, "rollouts": "judge"}, "rollouts", "text", "--engine: only a sampler"),
        (
            {"engine": ENGINE, "rollouts": "sample"},
            "diloco",
            "char-policy",
            "--engine: this swarm goes through samplers' tokens again",
        ),
        ({"engine": ENGINE}, "diloco", "text", "--engine: this swarm's strategy is diloco; leave it out"),
        ({"processes": 2}, "rollouts", "text", "--processes: an agent that shares rollouts is one process"),
        ({"processes": 2}, "diloco", "char-policy", "--processes: an agent that shares rollouts is one process"),
    ],
)
def test_option_that_cannot_be_used_is_said_in_one_line(
    tmp_path: Path, options: dict[str, object], strategy: str, workload: str, reason: str
) -> None:
    path = write_manifest(tmp_path, strategy, workload)
    with pytest.raises(ConfigError) as caught:
        config_of(RunOptions(manifest=path, **options))  # type: ignore[arg-type]
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_engine_is_named_by_its_url(tmp_path: Path) -> None:
    for url in ("http://127.0.0.1:8000", "http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1"):
        assert parse_engine(url, "--engine") == ENGINE
    assert parse_engine("http://gpu.local", "--engine") == ("gpu.local", 80)
    assert parse_engine("http://[::1]:8000", "--engine") == ("::1", 8000)
    assert parse_engine("http://[::1]", "--engine") == ("::1", 80)
    config = config_of(RunOptions(manifest=write_manifest(tmp_path), rollouts="sample", engine=ENGINE))
    assert config.engine == ENGINE


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "https://127.0.0.1", "http://", "http://a:99999", "http://a@b", "http://a/v2", "file:///"]
)
def test_engine_that_is_no_url_is_said_in_one_line(url: str) -> None:
    with pytest.raises(ConfigError, match="--engine: ") as caught:
        parse_engine(url, "--engine")
    assert "\n" not in str(caught.value)


def status_with(rollouts: RolloutStatus) -> Status:
    return Status(
        peer_id="peer",
        swarm_id="ab",
        addresses=[],
        phase="training",
        term="0.0",
        round=10,
        digest=None,
        members=[],
        missing=[],
        loss=None,
        tokens_per_s=None,
        bytes=BytesStatus(sent=1, received=2),
        rollouts=rollouts,
    )


def test_status_and_progress_tell_of_rollouts() -> None:
    known = RolloutStatus(
        role="train",
        reward=0.25,
        held_out_reward=0.375,
        held_out_round=20,
        held_out_tasks=200,
        made=40,
        pulled=12,
        taken=11,
        pulled_bytes=3000,
        rejected={"hint": 1, "stale": 4},
        teaching="teaching the policy: 120 of at most 800 updates",
        tasks={
            "chain_sum": TaskRewards(own=2, reward=0.25, external=1, external_reward=0.5),
            "gone\x1b[2J": TaskRewards(external=2, external_reward=0.125),
        },
        groups=[
            GroupStatus(peer_id="a", family="chain_sum", round=3, policy=3, age=0, completions=4, reward=0.5),
            GroupStatus(peer_id="peer", family="x\x1b", round=4, policy=2, age=2, completions=1, reward=0.25),
        ],
    )
    status = status_with(known)
    lines = status_lines(status)
    assert "agent      teaching the policy: 120 of at most 800 updates" in lines
    assert "reward     0.25 (train); greedy 0.375 on 200 held-out tasks after 20 rounds" in lines
    assert "groups     40 made, 12 pulled (3.0 kB), 11 taken" in lines
    assert "refused    hint 1, stale 4" in lines
    assert [line for line in lines if line.startswith("task")] == [
        "task       chain_sum: own 0.25 in 2 groups, others' 0.5 in 1 group",
        "task       gone\\x1b[2J: others' 0.125 in 2 groups",
    ]
    assert group_lines(status) == [
        "x\\x1b: peer (this node), round 4, policy of round 2, 2 rounds ago: reward 0.25 of 1 answer",
        "chain_sum: a, round 3, in this round: reward 0.5 of 4 answers",
    ]
    assert any(line.startswith("groups     40 made, 12 pulled (") and line.endswith("11 taken") for line in lines)
    done = RoundShared(round=3, reward=0.2314, own=4, external=2, seconds=1.21)
    assert shared_line([done]) == "round 3 done: reward 0.231, 4 own groups and 2 of others, 1.2 s"


def test_rounds_of_an_agent_are_told_at_once_and_then_each_thirty_seconds_together() -> None:
    told = SharedRounds()
    lines = []
    for number in range(1, 362):  # two a second
        event = RoundShared(round=number, reward=(number % 2) / 2, own=1 + number % 2, external=0, seconds=0.5)
        lines += told.take(event, number / 2)
    assert len(lines) == 7
    assert lines[:2] == [
        "round 1 done: reward 0.500, 2 own groups and 0 of others, 0.5 s",
        "rounds 2 to 61 done: reward 0.333, 90 own groups and 0 of others, 30.0 s",
    ]
    judged = RoundShared(round=362, reward=None, own=0, external=3, seconds=1.0)
    assert told.take(judged, 181.0) == []
    assert told.rest() == ["round 362 done: 0 own groups and 3 of others, 1.0 s"]
    assert told.rest() == []


@pytest.mark.parametrize(("waits", "told"), [(False, ""), (True, ", waits until they take more")])
def test_status_of_a_sampler_tells_what_others_take_and_whether_it_waits(waits: bool, told: str) -> None:
    status = status_with(RolloutStatus(role="sample", made=40, wanted=18, waits=waits))
    assert f"groups     40 made, 18 taken by others{told}" in status_lines(status)
