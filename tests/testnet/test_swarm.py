"""The testnet's own life, with stand-ins for nodes: starting, faults, ends, and that nothing is ever left running.

And once with real nodes, killed in the phases where a round is most delicate.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path

import msgspec
import pytest
import trio

from shoal.node.control_client import JsonValue
from shoal.protocol.errors import ConfigError
from shoal.protocol.manifest import load_manifest
from shoal.protocol.messages import Plan
from shoal.protocol.wire import decode
from shoal.testnet import nodes, swarm
from shoal.testnet.links.namespaces import LOOPBACK, Place, Uplink
from shoal.testnet.nodes import Launch, Runtime
from shoal.testnet.progress import FaultInjected, LossMeasured, NodeEnded, NodeJoined, Progress, RoundDone
from shoal.testnet.reports.report import Report, failures, ok
from shoal.testnet.scenario import DEMO, Fault, Scenario
from shoal.testnet.swarm import run_testnet
from tests.node.forks import FORKED
from tests.testnet.real_nodes import assert_none_left, pids, run_real

FAKE_NODE = Path(__file__).parent / "fake_node.py"
TEST_DEADLINE_S = 60.0
STARTING = ("join", "restart")


def in_trio(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test, and no longer than it may take."""

    @wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        async def limited() -> None:
            with trio.fail_after(TEST_DEADLINE_S):
                await test(*args, **kwargs)

        trio.run(limited)

    return run


def fakes(scenario: Scenario, modes: dict[int, str] | None = None) -> Runtime:
    """Stand-ins for nodes; `modes` by index, "well" if not named."""
    starts = {fault.target: 1 + (fault.kind == "restart") for fault in scenario.faults if fault.kind in STARTING}
    gate = ",".join(f"{index}:{count}" for index, count in starts.items()) or "-"

    def command(launch: Launch) -> list[str]:
        holds = ",".join(f"{hold.round}:{hold.phase}:{hold.progress}" for hold in launch.holds) or "-"
        rounds = "-" if launch.rounds is None else str(launch.rounds)
        mode = (modes or {}).get(int(launch.data_dir.name), "well")
        script = [sys.executable, "-S", "-E", str(FAKE_NODE)]
        return [*script, str(launch.data_dir), str(scenario.nodes), rounds, holds, str(scenario.rounds), gate, mode]

    def ask(data_dir: Path, op: str, *arguments: str, deadline_s: float) -> dict[str, JsonValue]:
        (data_dir / f"op-{op}").write_text(" ".join(arguments))
        return {}

    return Runtime(command=command, ask=ask)


async def run(scenario: Scenario, out: Path, modes: dict[int, str] | None = None) -> tuple[Report, list[Progress]]:
    told: list[Progress] = []
    report = await run_testnet(scenario, out, told.append, runtime=fakes(scenario, modes))
    assert_none_left(out)
    return report, told


@in_trio
async def test_demo_kills_and_joins_and_certifies_all_rounds(tmp_path: Path) -> None:
    report, told = await run(DEMO, tmp_path)
    assert (report.rounds_certified, report.forks, report.digests_equal, report.trouble) == (8, 0, True, None)
    assert [node.outcome for node in report.nodes] == ["running", "running", "killed", "running", "running"]
    assert [node.rounds for node in report.nodes][:4] == [8, 8, 2, 8]
    assert 1 <= report.nodes[4].rounds <= 4
    kill, join = report.faults
    assert (kill.error, join.error) == (None, None)
    assert kill.at_s is not None
    assert join.at_s is not None
    assert 0 < kill.at_s < join.at_s < report.wall_s
    assert len(pids(tmp_path)) == 5
    assert (report.loss.first, report.loss.last, report.loss.metric) == (8.0, 7.0, "bits per byte")
    assert report.bytes.lanes_sent == 1000 * sum(node.rounds for node in report.nodes)
    assert [t.round for t in told if isinstance(t, RoundDone)] == list(range(1, 9))
    assert [t.round for t in told if isinstance(t, LossMeasured)] == list(range(9))
    assert [t.fault.kind for t in told if isinstance(t, FaultInjected)] == ["kill", "join"]
    assert [(t.index, t.peer_id) for t in told if isinstance(t, NodeJoined)] == [(4, report.nodes[4].peer_id)]
    assert [t for t in told if isinstance(t, NodeEnded)] == []


@in_trio
async def test_who_joins_beside_a_kill_is_given_more_addresses_than_that_of_the_killed(tmp_path: Path) -> None:
    faults = (Fault(kind="kill", node=0, round=3), Fault(kind="join", node=4, round=3))
    scenario, launches = Scenario(nodes=4, rounds=5, faults=faults), list[Launch]()
    runtime = fakes(scenario)

    def command(launch: Launch) -> list[str]:
        launches.append(launch)
        return runtime.command(launch)

    report = await run_testnet(scenario, tmp_path, runtime=replace(runtime, command=command))
    assert [fault.error for fault in report.faults] == [None, None]
    assert set(launches[-1].join) - {"/fake/0"} >= {"/fake/1", "/fake/2"}


@in_trio
async def test_run_writes_the_manifest_and_all_reports(tmp_path: Path) -> None:
    report, _ = await run(Scenario(nodes=2, rounds=2, seed=5, codec="bf16"), tmp_path)
    manifest = load_manifest(tmp_path / "swarm.toml")
    assert manifest.swarm.founders == [node.peer_id for node in report.nodes]
    assert (manifest.workload.seed, manifest.sync.codec, manifest.sync.inner_steps) == (5, "bf16", 20)
    assert json.loads((tmp_path / "report.json").read_bytes())["rounds_certified"] == 2
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "nodes" / "1" / "log.txt").exists()
    # The stand-ins keep no rounds, and what is not verified does not pass.
    assert len(report.unverified) >= 2
    assert not ok(report)


@in_trio
async def test_stop_leave_and_restart_do_what_they_say(tmp_path: Path) -> None:
    faults = (
        Fault(kind="stop", node=1, round=2, phase="train", progress=0.0, duration_s=0.1),
        Fault(kind="leave", node=3, round=3, phase="plan"),
        Fault(kind="restart", node=2, round=4, phase="certify", progress=1.0),
    )
    report, told = await run(Scenario(nodes=4, rounds=6, faults=faults), tmp_path)
    assert [fault.error for fault in report.faults] == [None, None, None]
    assert [node.outcome for node in report.nodes] == ["running", "running", "running", "left"]
    assert [len(node.lives) for node in report.nodes] == [1, 1, 2, 1]
    assert report.bytes.lanes_sent == 1000 * sum(node.rounds for node in report.nodes)
    assert report.rounds_certified == 6
    assert [t for t in told if isinstance(t, NodeEnded)] == []
    second = next(span for span in report.nodes[1].spans if span.round == 2)
    assert second.end_s is not None
    assert second.end_s - second.start_s >= 0.1


@in_trio
async def test_a_stopped_node_goes_on_when_a_continue_says_so(tmp_path: Path) -> None:
    faults = (
        Fault(kind="stop", node=1, round=2, phase="reduce", progress=0.5),
        Fault(kind="continue", node=1, round=4),
    )
    report, _ = await run(Scenario(nodes=2, rounds=6, faults=faults), tmp_path)
    assert [fault.error for fault in report.faults] == [None, None]
    assert report.rounds_certified == 6
    assert [node.outcome for node in report.nodes] == ["running", "running"]


@in_trio
async def test_throttled_nodes_have_their_shares_and_no_other_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[tuple[str, int, float]] = []

    async def hold_to(group: int, share: float, stopped: Callable[[], bool]) -> None:
        held.append(("begun", group, share))
        try:
            await trio.sleep_forever()
        finally:
            held.append(("ended", group, share))

    monkeypatch.setattr(nodes, "hold_to", hold_to)
    throttle = Fault(kind="throttle", node=1, round=2, phase="train", cpu_share=0.1, duration_s=0.1)
    endless = Fault(kind="throttle", node=0, round=3, phase="train")
    report, _ = await run(Scenario(nodes=3, rounds=4, faults=(throttle, endless)), tmp_path)
    assert [fault.error for fault in report.faults] == [None, None]
    first, second, _ = pids(tmp_path)
    assert sorted(held) == sorted((when, *of) for when in ("begun", "ended") for of in ((first, 0.05), (second, 0.1)))


@in_trio
async def test_a_node_is_paused_and_resumed_as_its_user_would(tmp_path: Path) -> None:
    pause, resume = Fault(kind="pause", node=1, round=2), Fault(kind="resume", node=2, round=3)
    report, _ = await run(Scenario(nodes=3, rounds=4, faults=(pause, resume)), tmp_path)
    assert [fault.error for fault in report.faults] == [None, None]
    asked = sorted(str(path.relative_to(tmp_path / "nodes")) for path in (tmp_path / "nodes").glob("*/op-[pr]*e"))
    assert [one for one in asked if not one.endswith("release")] == ["1/op-pause", "2/op-resume"]


@in_trio
async def test_a_fault_that_cannot_be_done_is_reported(tmp_path: Path) -> None:
    faults = (
        Fault(kind="kill", node=1, round=1, phase="train"),
        Fault(kind="kill", node=1, round=3),
        Fault(kind="stop", node=1, round=2, phase="plan"),
    )
    report, _ = await run(Scenario(nodes=3, rounds=4, faults=faults), tmp_path)
    assert [fault.error for fault in report.faults] == [None, "node 1 is not running", "its moment never came"]
    assert report.faults[2].at_s is None
    assert not ok(report)


@in_trio
async def test_lanes_are_cut_and_files_damaged_where_they_are(tmp_path: Path) -> None:
    faults = (
        Fault(kind="cut", node=1, round=2, phase="reduce", progress=0.5),
        Fault(kind="corrupt", node=2, round=3),
    )
    report, _ = await run(Scenario(nodes=3, rounds=4, faults=faults), tmp_path)
    assert [fault.error for fault in report.faults] == [None, "node 2 has no state on its disk yet"]
    cut = (tmp_path / "nodes" / "1" / "op-cut").read_text().split()
    assert cut == [report.nodes[0].peer_id, report.nodes[2].peer_id]


@in_trio
async def test_what_needs_namespaces_is_refused_where_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarm, "why_not", lambda: "network namespaces need nft: install nftables")
    partition = Fault(kind="partition", groups=((0,), (1,)), round=1)
    with pytest.raises(ConfigError, match="the scenario does something to links, and network namespaces need nft"):
        await run(Scenario(nodes=2, rounds=1, faults=(partition,)), tmp_path / "out")
    assert not (tmp_path / "out").exists(), "nothing has been started"


class NotedLinks:
    """Namespaces that are not made: what would be done to them is noted."""

    def __init__(self) -> None:
        self.done: list[tuple[object, ...]] = []

    def place(self, index: int) -> Place:
        return LOOPBACK

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self.done.append((name, *arguments))


@in_trio
async def test_links_are_blocked_and_narrowed_for_as_long_as_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links, made = NotedLinks(), []

    @contextmanager
    def network(nodes: int, uplinks: tuple[Uplink, ...], behind: tuple[int, ...]) -> Iterator[NotedLinks]:
        made.append((nodes, uplinks, behind))
        yield links

    monkeypatch.setattr(swarm, "why_not", lambda: None)
    monkeypatch.setattr(swarm, "network", network)
    faults = (
        Fault(kind="partition", groups=((0, 1), (2,)), traffic="lanes", round=2, phase="train", duration_s=0.1),
        Fault(kind="slow", node=1, round=3, phase="train", rate_mbit=2.5, duration_s=0.1),
        Fault(kind="partition", groups=((0,), (2,)), round=4, phase="train"),
        Fault(kind="heal", round=5, phase="train"),
    )
    uplink = Uplink(nodes=(0,), rate_mbit=5)
    report, _ = await run(Scenario(nodes=3, rounds=6, faults=faults, uplinks=(uplink,)), tmp_path)
    assert [fault.error for fault in report.faults] == [None] * 4
    assert [(fault.node, fault.groups) for fault in report.faults[:2]] == [(None, ((0, 1), (2,))), (1, ())]
    assert made == [(3, (uplink,), ())]
    first, second = frozenset({(0, 2), (1, 2)}), frozenset({(0, 2)})
    orders = [
        [("block", first, "lanes"), ("unblock", first, "lanes")],
        [("narrow", 1, 2.5), ("widen", 1)],
        [("block", second, "all"), ("restore",)],
    ]
    for order in orders:  # rounds of stand-ins take less than a tenth of a second
        assert [done for done in links.done if done in order] == order
    assert len(links.done) == 6
    assert "partition 0 1 | 2" in (tmp_path / "report.html").read_text()


@in_trio
async def test_a_node_that_crashes_is_told_and_the_report_is_written(tmp_path: Path) -> None:
    report, told = await run(Scenario(nodes=2, rounds=2), tmp_path, {0: "crash"})
    assert told == [NodeEnded(index=0, exit_code=7, message="no such luck")]
    assert [(node.outcome, node.crashes) for node in report.nodes] == [("crashed", 1), ("crashed", 0)]
    assert (report.rounds_certified, report.digests_equal) == (0, False)
    assert report.trouble is not None
    assert report.trouble.startswith("node 0 did not come up")
    assert (tmp_path / "report.html").exists()


@in_trio
async def test_a_fork_is_counted(tmp_path: Path) -> None:
    report, _ = await run(Scenario(nodes=2, rounds=3), tmp_path, {1: "fork"})
    assert (report.forks, report.digests_equal) == (3, False)


@in_trio
async def test_a_founder_that_lives_and_certifies_nothing_is_found(tmp_path: Path) -> None:
    report, _ = await run(Scenario(nodes=3, rounds=3), tmp_path, {1: "absent"})
    assert [(node.outcome, node.rounds) for node in report.nodes] == [("running", 3), ("running", 0), ("running", 3)]
    assert (report.rounds_certified, report.unaffected_absent, report.trouble) == (3, (1,), None)
    assert "no fault struck node 1, and it took part in no round" in (tmp_path / "report.html").read_text()


@in_trio
async def test_who_joined_or_came_back_and_is_told_of_rounds_alone_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarm, "FINISH_DEADLINE_S", 0.5)
    faults = (Fault(kind="join", node=3, round=2), Fault(kind="restart", node=1, round=2))
    report, _ = await run(Scenario(nodes=3, rounds=5, faults=faults), tmp_path, {1: "lost", 3: "absent"})
    assert (report.rounds_certified, report.unaffected_absent, report.trouble) == (5, (), None)
    assert [fault.error for fault in report.faults] == [None, None]
    assert [node.absent_at_end for node in report.nodes] == [False, True, False, True]
    assert [node.hung for node in report.nodes] == [False] * 4
    assert failures(report) == [
        f"node {index} took part neither in the last round nor in one after it" for index in (1, 3)
    ]


@in_trio
async def test_who_is_started_when_the_last_round_is_over_has_time_to_get_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarm, "FINISH_DEADLINE_S", 8.0)
    faults = (Fault(kind="join", node=3, round=5), Fault(kind="restart", node=1, round=5, duration_s=0.3))
    scenario = Scenario(nodes=3, rounds=5, faults=faults)
    runtime = fakes(msgspec.structs.replace(scenario, faults=()))  # the last round waits for nobody
    report = await run_testnet(scenario, tmp_path, runtime=runtime)
    assert [node.absent_at_end for node in report.nodes] == [False] * 4
    assert (report.rounds_certified, failures(report)) == (5, [])
    assert_none_left(tmp_path)


@in_trio
async def test_who_lasts_under_a_fault_need_not_be_there_in_the_end(tmp_path: Path) -> None:
    throttle = Fault(kind="throttle", node=1, round=2)
    report, _ = await run(Scenario(nodes=3, rounds=4, faults=(throttle,)), tmp_path, {1: "absent"})
    assert (report.rounds_certified, failures(report)) == (4, [])


@in_trio
async def test_who_does_not_leave_when_it_is_asked_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm, "LEAVE_DEADLINE_S", 1.0)
    faults = (Fault(kind="cut", node=1, round=2),)  # so that all stay
    report, _ = await run(Scenario(nodes=2, rounds=3, faults=faults), tmp_path, {1: "hung"})
    assert [(node.hung, node.outcome) for node in report.nodes] == [(False, "running"), (True, "running")]
    assert failures(report) == [
        "node 1 did not end in good order when it was asked to leave; see nodes/1/log.txt",
    ]


@in_trio
async def test_a_swarm_that_falls_silent_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm, "silence_limit_s", lambda scenario: 0.5)
    monkeypatch.setattr(swarm, "LEAVE_DEADLINE_S", 5.0)
    report, _ = await run(Scenario(nodes=2, rounds=2), tmp_path, {0: "silent", 1: "silent"})
    assert report.trouble == "no node logged anything for 0 s"
    assert report.rounds_certified == 0


@in_trio
async def test_a_run_past_its_deadline_is_ended_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm, "deadline_s", lambda scenario: 1.0)
    report, _ = await run(Scenario(nodes=2, rounds=2), tmp_path, {1: "silent"})
    assert report.trouble == "not finished after 1 s"


@in_trio
async def test_cancelling_a_run_leaves_no_process(tmp_path: Path) -> None:
    with trio.CancelScope() as scope:

        def stop_it(progress: Progress) -> None:
            if isinstance(progress, RoundDone) and progress.round == 2:
                scope.cancel()

        scenario = Scenario(nodes=3, rounds=5000)
        await run_testnet(scenario, tmp_path, stop_it, runtime=fakes(scenario))
    assert scope.cancelled_caught
    assert len(pids(tmp_path)) == 3
    assert_none_left(tmp_path)


@in_trio
async def test_a_signal_ends_the_run_after_a_clean_leave(tmp_path: Path) -> None:
    def interrupt(progress: Progress) -> None:
        if isinstance(progress, RoundDone) and progress.round == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    scenario = Scenario(nodes=2, rounds=5000)
    with pytest.raises(KeyboardInterrupt):
        await run_testnet(scenario, tmp_path, interrupt, runtime=fakes(scenario))
    assert_none_left(tmp_path)
    assert json.loads((tmp_path / "report.json").read_bytes())["trouble"] == "interrupted"
    logs = [(tmp_path / "nodes" / str(i) / "events.jsonl").read_text() for i in range(2)]
    assert ["asked" in log for log in logs] == [True, True]


@in_trio
async def test_a_second_run_replaces_the_first(tmp_path: Path) -> None:
    await run(Scenario(nodes=2, rounds=1), tmp_path)
    report, _ = await run(Scenario(nodes=1, rounds=1), tmp_path)
    assert len(report.nodes) == 1
    assert not (tmp_path / "nodes" / "1").exists()


@in_trio
async def test_a_wrong_setting_is_refused_before_an_earlier_run_is_removed(tmp_path: Path) -> None:
    await run(Scenario(nodes=1, rounds=1), tmp_path)
    for wrong in (Scenario(strategy="no-such"), Scenario(codec="int9"), Scenario(workload="No Such")):
        with pytest.raises(ConfigError, match="the scenario"):
            await run_testnet(wrong, tmp_path, runtime=fakes(wrong))
    assert (tmp_path / "report.json").exists()


def test_deadlines_grow_with_the_scenario() -> None:
    deadline = partial(swarm.deadline_s)
    assert deadline(Scenario(rounds=16)) > deadline(Scenario(rounds=8)) > 8 * swarm.ROUND_DEADLINE_S
    stop = Fault(kind="stop", node=1, round=1, duration_s=100)
    assert deadline(Scenario(faults=(stop,))) == deadline(Scenario()) + 100


def test_silence_of_agents_that_warm_up_ends_no_run() -> None:
    silence = swarm.silence_limit_s
    assert silence(Scenario(strategy="rollouts")) >= 300.0 > silence(Scenario(strategy="diloco"))
    assert swarm.deadline_s(Scenario(strategy="rollouts")) > Scenario().rounds * 300.0


def test_real_nodes_killed_while_planning_and_certifying_cost_the_others_nothing_but_time(tmp_path: Path) -> None:
    faults = (
        Fault(kind="kill", node=3, round=2, phase="plan"),
        Fault(kind="kill", node=2, round=3, phase="certify"),
    )
    scenario = Scenario(
        nodes=4,
        rounds=4,
        workload="regression",
        options={"inputs": 1024, "outputs": 256},
        inner_steps=10,
        faults=faults,
    )

    report = run_real(scenario, tmp_path, FORKED)
    assert report.digests_equal
    assert [node.outcome for node in report.nodes] == ["running", "running", "killed", "killed"]
    assert [node.rounds for node in report.nodes] == [4, 4, 2, 1]
    assert [r.members for r in report.rounds] == [4, 3, 2, 2]
    # Who is killed before it reduces is in no chunk; its plan still counts on it, unless another lead plans anew.
    # Who is killed when it has all finals is in every chunk of others, and in those of its own that it had sent.
    assert [r.contributors for r in report.rounds] == [4, 3, 3, 2]
    plan = decode((tmp_path / "nodes" / "0" / "rounds" / "0.0-2" / "plan").read_bytes(), Plan)
    first, second, third, fourth = (r.coverage for r in report.rounds)
    assert (first, second, fourth) == (1.0, 3 / len(plan.participants), 1.0)
    assert 2 / 3 < third <= 1.0
    for fault in report.faults:
        assert fault.delay_s is not None
        assert fault.delay_s < 20


def test_real_nodes_that_come_late_or_come_back_get_in_before_the_others_go(tmp_path: Path) -> None:
    faults = (
        Fault(kind="join", round=3),
        Fault(kind="pause", node=2, round=3),  # it follows, and is there all the same
        Fault(kind="restart", node=1, round=5),
    )
    scenario = Scenario(
        nodes=3,
        rounds=5,
        workload="regression",
        options={"inputs": 1024, "outputs": 256},
        inner_steps=10,
        faults=faults,
    )

    report = run_real(scenario, tmp_path, FORKED)
    assert [(node.absent_at_end, node.hung, node.crashes) for node in report.nodes] == [(False, False, 0)] * 4
    logs = [(tmp_path / "nodes" / str(index) / "events.jsonl").read_text().splitlines() for index in range(4)]
    last = [max(e["round"] for e in map(json.loads, log) if e["event"] == "certified") for log in logs]
    assert min(last) >= scenario.rounds
