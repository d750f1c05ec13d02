"""The fault campaign: a short one with real processes, and that each of its checks can fail."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import trio

from shoal.cli.main import execute
from shoal.cli.render import ShowNow
from shoal.lab.bench import hostile_verdict
from shoal.lab.bench.hostile_member import LYING_KINDS, told_of
from shoal.lab.campaigns import campaign
from shoal.lab.campaigns.campaign import drawn, run_campaign
from shoal.lab.campaigns.campaign_check import Findings, Window, examine, round_bound_s
from shoal.lab.campaigns.campaign_faults import until_voted
from shoal.lab.campaigns.campaign_plan import (
    CERTIFYING,
    CODECS,
    KINDS,
    LIAR_PEERS,
    LOOPED,
    LOOPS_PEERS,
    PAIRED,
    PEERS,
    SHORT_MIX,
    Group,
    Mix,
    Run,
    draw_runs,
    groups_of,
    liars_among,
    paced,
)
from shoal.lab.campaigns.campaign_report import CampaignReport, RunRecord, ok, report_of, spread, to_json
from shoal.lab.campaigns.campaign_swarm import LivingSwarm, campaign_manifest, programs_of, read_chain
from shoal.lab.campaigns.chaos_swarm import STRIKE, command_of
from shoal.lab.campaigns.settings import Campaign
from shoal.lab.cli import campaign as cli_campaign
from shoal.lab.cli.campaign import run_line, summary
from shoal.node.control_ops import orders
from shoal.node.loops.loop_messages import OWN_LOOP
from shoal.node.node import Node
from shoal.node.options import NodeConfig
from shoal.node.reporting.event_log import EventLog, line_of
from shoal.node.reporting.events import Certified, Event, Linked, Voted
from shoal.node.state.store import Store
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.manifest import load_manifest
from shoal.protocol.membership import detection_bound_s
from shoal.protocol.timeouts import PROPOSE_TIMEOUT_S
from shoal.testnet import fleet
from shoal.testnet.check import Witness
from shoal.testnet.check_inputs import InputRules
from shoal.testnet.nodes import Launch, Life, Runtime

SMALL = Campaign(seed=116894, runs=5, peers=(4,), codecs=("int4",), strategies=("diloco",), short=True, keep=True)
"""Of a seed with which a lead, one in a repair, one that hangs and one that hangs for good are struck, then lanes."""
SHORT = Campaign(seed=46, runs=20, short=True, keep=True)
"""Of a seed with which every kind of fault strikes, those that take two nodes included, and lanes at last."""


# -- a short campaign ----------------------------------------------------------------------------------------


class Done(NamedTuple):
    """A campaign, its report, its records, and its folder."""

    campaign: Campaign
    report: CampaignReport
    records: list[RunRecord]
    out: Path


LIARS = Campaign(seed=3, runs=8, liar=True, keep=True)
"""Two runs beside each kind of liar."""


@pytest.fixture(scope="module", params=[SMALL, pytest.param(SHORT, marks=pytest.mark.long)], ids=["small", "short"])
def done(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A campaign that was run."""
    out = tmp_path_factory.mktemp("campaign")
    records: list[RunRecord] = []
    report = trio.run(partial(run_campaign, request.param, out, records.append))
    return Done(request.param, report, sorted(records, key=lambda record: record.run.number), out)


def test_survivors_of_every_fault_go_on_exactly_and_in_time(done: Done) -> None:
    campaign, report, records, out = done
    told = [(run_line(record, campaign.runs), record.problems) for record in records]
    assert ok(report), told
    assert (report.runs, report.peers) == (campaign.runs, campaign.peers or PEERS)
    assert (report.codecs, report.strategies) == (
        (("int4",), ("diloco",)) if campaign is SMALL else (("fp32", "bf16", "int8", "topk"), CERTIFYING)
    )
    assert (report.wrong_values, report.forks, report.broken_votes) == (0, 0, 0)
    assert (report.late_rounds, report.unverified, report.unrecovered) == (0, 0, 0)
    assert (report.evicted_survivors, report.unaffected_absent) == (0, 0)
    assert report.cut_coverage == 1.0
    # Each run has its own round, and after it one at least to which all contribute, the struck included.
    assert report.rounds_checked >= 2 * campaign.runs
    assert [record.run for record in records] == list(drawn(campaign))
    for one, next_ in pairwise(records):
        assert one.run.group != next_.run.group or one.round + one.found.rounds_checked == next_.round
    assert set(report.by_fault) == {record.run.kind for record in records}
    assert len(report.by_fault) == (len(SHORT_MIX.kinds) if campaign is SHORT else campaign.runs)
    assert all(record.struck_at > record.released_at > 0 for record in records)
    assert json.loads((out / "campaign.json").read_text()) == json.loads(to_json(report))
    assert [path.name for path in (out / "failures").iterdir()] == [".shoal-campaign"]
    logs = [path.read_bytes() for path in out.glob("groups/*/nodes/*/events.jsonl")]
    started = [e for log in logs for line in log.splitlines() if (e := json.loads(line))["event"] == "started"]
    said = [path.read_text() for path in out.glob("groups/*/nodes/*/log.txt")]
    killed = sum(_killed(record) for record in records) + sum(text.count("is in use elsewhere") for text in said)
    assert len(started) == sum(campaign.peers or PEERS) + killed
    assert len({event["pid"] for event in started}) == len(started)
    assert [event["pid"] for event in started if os.path.exists(f"/proc/{event['pid']}")] == []


def _killed(record: RunRecord) -> int:
    """How many processes the fault of a run ended."""
    if record.run.kind in ("stop_kill", "stop_two"):
        return 1
    if record.run.kind == "restore":
        return 1
    return 1 + len(re.findall(r" and \d", record.struck)) if record.run.kind.startswith("kill") else 0


def test_faults_strike_as_drawn(done: Done) -> None:
    for record in done.records:
        run = record.run
        assert record.struck.startswith(f"{run.kind} node ")
        if run.kind in ("kill", "stop", "stop_continue", "stop_kill", "cut_pair", "cut_all"):
            assert record.struck.split()[2] == str(run.order[0])
        if run.kind.startswith("cut"):
            lanes = int(record.struck.split("lanes to peers cut ")[1].split()[0])
            assert lanes >= 1  # later cuts may come before the lanes are there again
        if run.kind != "kill_voter":
            assert f" at reduce {run.progress:.2f}" in record.struck
        if run.kind == "stop_continue":
            assert record.delay_s is not None
            assert record.delay_s > run.stop_s / 2 or run.group.peers > 3  # a quorum of three needs all but one


@pytest.mark.long
def test_beside_liars_of_every_kind_the_others_go_on_exactly_and_in_time(tmp_path: Path) -> None:
    records: list[RunRecord] = []
    report = trio.run(partial(run_campaign, LIARS, tmp_path, records.append))
    assert ok(report), [(run_line(record, LIARS.runs), record.problems) for record in records]
    assert {record.run.group.lie for record in records} == set(LYING_KINDS)
    assert (report.strategies, report.peers) == (CERTIFYING, (LIAR_PEERS,))
    assert report.rounds_checked >= 2 * LIARS.runs
    assert len(report.lies) == len(LYING_KINDS)
    assert report.silent == ()


# -- each check can fail -------------------------------------------------------------------------------------


class Remains:
    """A copy of what the last run left, and the window in which it is judged."""

    def __init__(self, done: Done, folder: Path) -> None:
        last = done.records[-1]
        group = done.out / "groups" / f"{last.run.group.name}-1" / "nodes"
        shutil.copytree(group, folder, ignore=shutil.ignore_patterns("control.sock*", "state"))
        self.nodes = tuple(
            Witness(index=int(path.name), peer_id=Identity.load_or_create(path / "node.key").peer_id, folder=path)
            for path in sorted(folder.iterdir())
        )
        manifest = load_manifest(next(folder.iterdir()) / "swarm.toml")
        self.window = Window(
            first=last.round,
            last=last.round + last.found.rounds_checked - 1,
            released_at=last.released_at,
            struck=frozenset(),
            cut=False,
            bound_s=last.bound_s,
            codec=manifest.sync.plan_codec,
            rules=InputRules.of(manifest),
        )

    def examine(self) -> Findings:
        return examine(self.nodes, self.window)

    def change_log(self, change: Callable[[dict[str, Any]], list[dict[str, Any]]], node: int = 1) -> None:
        """Put what `change` makes of it in place of each event of the first round of the window."""
        log = self.nodes[node].folder / "events.jsonl"
        events = [json.loads(line) for line in log.read_bytes().splitlines()]
        changed = [new for e in events for new in (change(e) if e.get("round") == self.window.first else [e])]
        log.write_text("".join(json.dumps(event) + "\n" for event in changed))


@pytest.fixture
def remains(done: Done, tmp_path: Path) -> Remains:
    return Remains(done, tmp_path / "nodes")


def test_untouched_remains_are_faultless(remains: Remains) -> None:
    found = remains.examine()
    assert found.problems == ()
    assert found.rounds_checked == remains.window.last - remains.window.first + 1


def test_contribution_that_does_not_follow_from_the_one_before_is_unverified(remains: Remains) -> None:
    """The node's record of the round before this says that it had learnt something else."""
    node, before, first = remains.nodes[1], remains.window.first - 1, remains.window.first
    (path,) = (node.folder / "rounds" / f"0.0-{before}").glob("input-*")
    body = msgspec.msgpack.decode(path.read_bytes())
    values = np.frombuffer(body["values"], np.float32) + np.float32(1)
    path.write_bytes(msgspec.msgpack.encode(body | {"values": values.tobytes()}))
    found = remains.examine()
    assert found.unverified == 1
    assert re.fullmatch(
        rf"node 1: of its contribution to round {first} \d+ values do not follow from what it learnt and what was left",
        *found.problems,
    )


def bound(certified: dict[str, Any], event: str, view: int) -> dict[str, Any]:
    """What a node may log in the round that it certified; it need not have voted, where the certificate came first."""
    return {"at": certified["at"], "event": event, "term": "0.0", "round": certified["round"], "view": view}


def test_a_liar_is_believed_nothing_and_judged_in_nothing(remains: Remains, done: Done) -> None:
    liar = remains.nodes[-1]
    at = {"at": remains.window.released_at + 0.1, "round": remains.window.first}
    lied: dict[str, Any] = {**at, "event": "evidence", "kind": "double_vote", "peer": liar.peer_id}
    remains.change_log(lambda e: [e, lied] if e["event"] == "certified" else [e], 1)
    false = {"digest": "ab" * 32}
    remains.change_log(
        lambda e: [e, vote := bound(e, "voted", 7), vote, e | false] if e["event"] == "certified" else [e], liar.index
    )
    found = remains.examine()
    assert (found.forks, found.broken_votes) == (1, 1)
    assert any("has proof that" in problem for problem in found.problems)
    remains.window = replace(remains.window, liar=liar.peer_id)
    assert remains.examine().problems == ()
    remains.change_log(lambda e: [] if e["event"] == "certified" else [e], liar.index)
    assert remains.examine().problems == ()
    remains.change_log(lambda e: [e | false] if e["event"] == "certified" else [e], 0)
    assert remains.examine().forks == 1


def test_a_second_vote_in_a_view_is_a_broken_vote(remains: Remains) -> None:
    remains.change_log(lambda e: [e, vote := bound(e, "voted", 7), vote] if e["event"] == "certified" else [e])
    found = remains.examine()
    assert found.broken_votes == 1
    assert "node 1 voted twice in view" in found.problems[0]


def test_a_vote_below_a_promise_is_a_broken_vote(remains: Remains) -> None:
    remains.change_log(
        lambda e: [e, bound(e, "view_changed", 9), bound(e, "voted", 8)] if e["event"] == "certified" else [e]
    )
    assert remains.examine().broken_votes == 1


def test_a_round_past_its_bound_is_late(remains: Remains) -> None:
    by = remains.window.bound_s + 1
    remains.change_log(lambda e: [e | {"at": e["at"] + by} if e["event"] == "certified" else e])
    found = remains.examine()
    assert found.late_rounds == 1
    assert "took node 1" in found.problems[0]


def test_a_node_s_times_are_those_of_the_machine_however_its_clock_was_set(remains: Remains) -> None:
    at, ahead_s = remains.window.released_at - 0.5, -9 * 86_400.0
    log = remains.nodes[1].folder / "events.jsonl"
    events = [json.loads(line) for line in log.read_bytes().splitlines()]
    shifted = [event | {"at": event["at"] + (ahead_s if event["at"] > at else 0.0)} for event in events]
    log.write_text("".join(json.dumps(event) + "\n" for event in shifted))
    changes = {1: ((-math.inf, 0.0), (at, ahead_s))}
    assert examine(remains.nodes, remains.window, changes).problems == ()
    remains.window = replace(remains.window, bound_s=1e-6)
    assert all("took node" in line for line in examine(remains.nodes, remains.window, changes).problems)
    assert any("took node 1" in line for line in examine(remains.nodes, remains.window, changes).problems)


def test_a_survivor_that_is_no_member_afterwards_was_evicted(remains: Remains) -> None:
    gone = remains.nodes[2]
    kept = [member.peer_id for member in remains.nodes if member is not gone]
    for index in range(len(remains.nodes)):
        remains.change_log(lambda e: [e | {"members": kept} if e["event"] == "certified" else e], index)
    found = remains.examine()
    line = f"round {remains.window.first}: node 2, which no fault struck or that lost only lanes, was evicted"
    assert (found.evicted, found.coverage, found.problems) == (1, None, (line,))
    remains.window = replace(remains.window, struck=frozenset({gone.index}))
    assert (remains.examine().evicted, remains.examine().problems) == (0, ())
    remains.window = replace(remains.window, struck=frozenset(), cut=True)
    found = remains.examine()
    assert (found.evicted, found.coverage) == (1, 1.0)
    assert found.problems == (line,)


def test_a_node_that_no_fault_struck_and_that_missed_a_round_was_absent(remains: Remains) -> None:
    remains.change_log(lambda e: [] if e["event"] == "certified" else [e], 1)
    found = remains.examine()
    line = f"rounds {remains.window.first}: no fault struck node 1, and it did not certify them"
    assert (found.absent, found.problems[-1:]) == (1, (line,))
    remains.window = replace(remains.window, struck=frozenset({1}))
    assert remains.examine().absent == 0


def test_a_round_that_cut_lanes_left_something_out_of_is_a_problem(remains: Remains) -> None:
    for index in range(len(remains.nodes)):
        remains.change_log(lambda e: [e | {"coverage": 0.875} if e["event"] == "certified" else e], index)
    assert remains.examine().problems == ()
    remains.window = replace(remains.window, cut=True)
    found = remains.examine()
    assert (found.evicted, found.coverage) == (0, 0.875)
    assert found.problems == (f"round {remains.window.first}: covers 87.5%, and nobody was gone",)


def test_a_round_in_another_codec_is_unverified(remains: Remains) -> None:
    codec = remains.window.codec
    assert codec in ("int4", "topk64-256")
    remains.window = replace(remains.window, codec="int8")
    found = remains.examine()
    assert (found.wrong_values, found.unverified) == (0, found.rounds_checked)
    assert f"round {remains.window.first}: in codec {codec}, not int8" in found.problems


def test_what_sound_nodes_never_say_is_a_problem(tmp_path: Path) -> None:
    """Of the rounds that are judged: what was said in an earlier run was judged there."""
    said: list[dict[str, object]] = [{"event": "forked", "round": at, "at": float(at)} for at in (1, 6)]
    said += [{"event": "trainer_restarted", "cause": "exit code 9", "at": 7.0}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in said))
    node = Witness(index=1, peer_id=Identity.generate().peer_id, folder=tmp_path)
    window = Window(first=6, last=6, released_at=5.0, struck=frozenset(), cut=False, bound_s=9.0, codec="fp32")
    alarm = "node 1 saw two certificates of round 6, and signs no more"
    died = "no fault struck node 1, and its trainer died: exit code 9"
    assert examine([node], window).problems == ("nobody certified round 6", alarm, died)
    assert examine([node], replace(window, struck=frozenset({1}))).problems == ("nobody certified round 6", alarm)


def test_the_chain_is_read_beside_its_node_up_to_a_record_that_is_cut_short(remains: Remains) -> None:
    folder = remains.nodes[0].folder
    with Store(folder) as store:
        chain = store.certificates()
    assert len(chain) >= remains.window.last
    assert read_chain(folder / "chain.log") == chain
    path = folder / "chain.log"
    path.write_bytes(path.read_bytes()[:-1])
    assert read_chain(path) == chain[:-1]
    assert read_chain(folder / "none") == []


# -- what fails is kept --------------------------------------------------------------------------------------


def test_swarms_that_do_not_come_up_fail_their_runs_and_end_the_command_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    crash = Runtime(command=lambda launch: [sys.executable, "-c", "raise SystemExit(7)"])
    monkeypatch.setattr(fleet, "Runtime", lambda: crash)
    arguments = ["--runs", "2", "--seed", "3", "--peers", "3", "--codecs", "fp32", "--out", str(tmp_path)]
    assert execute(["campaign", *arguments, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["runs"], report["unrecovered"], report["failed_runs"]) == (2, 2, [1, 2])
    kept = json.loads((tmp_path / "failures" / "2" / "run.json").read_text())
    assert kept["problems"] == ["node 0 ended with exit code 7: see its log"]
    assert (tmp_path / "failures" / "2" / "swarm.toml").exists()
    assert (tmp_path / "failures" / "2" / "nodes" / "0" / "log.txt").exists()


async def test_the_command_that_a_failure_names_does_the_same_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Campaign(seed=5, runs=30, peers=(3, 4), codecs=("bf16",), strategies=("ddp",))
    struck = drawn(broken)[22]
    (tmp_path / "failures").mkdir()
    swarm = LivingSwarm(tmp_path / "swarm", Group(peers=4, codec="bf16"), seed=5)
    log = swarm.nodes[2].folder / "events.jsonl"
    log.write_text("{}\n")
    (swarm.nodes[2].folder / "rounds" / "0.0-7").mkdir(parents=True)
    told: list[RunRecord] = []
    course = campaign._Course(broken, tmp_path, told.append)
    await course._record(
        swarm, RunRecord(run=struck, found=Findings(wrong_values=1, problems=("round 7: 1 wrong values",)))
    )
    assert [record.failed for record in told] == [True]
    folder = tmp_path / "failures" / "23"
    assert (folder / "nodes" / "2" / "events.jsonl").read_text() == "{}\n"
    assert (folder / "nodes" / "2" / "rounds" / "0.0-7").is_dir()
    kept = json.loads((folder / "run.json").read_text())
    assert msgspec.convert(kept["run"], Run) == struck
    chosen: list[Campaign] = []

    def note(campaign: Campaign, out: Path, _: ShowNow) -> CampaignReport:
        chosen.append(campaign)
        return report_of(5, drawn(campaign), [], {}, wall_s=0.0)

    monkeypatch.setattr(cli_campaign, "run_to_end", note)
    _, *arguments = shlex.split(kept["again"])
    assert execute(arguments) == 1  # for it was not done
    assert drawn(chosen[0]) == (struck,)


# -- drawing -------------------------------------------------------------------------------------------------


def test_runs_follow_from_the_seed_and_every_kind_and_group_has_its_share() -> None:
    groups = groups_of(PEERS, CODECS, CERTIFYING)
    runs = draw_runs(7, 200, groups, Mix())
    assert runs == draw_runs(7, 200, groups, Mix())
    assert runs != draw_runs(8, 200, groups, Mix())
    assert [run.number for run in runs] == list(range(1, 201))
    by_group = [sum(run.group == group for run in runs) for group in groups]
    assert max(by_group) - min(by_group) <= 1
    assert {run.group.codec for run in runs} == {*CODECS, "topk"}
    for kind in KINDS:
        assert sum(run.kind == kind for run in runs) >= 10, kind
    assert not any(run.kind in PAIRED for run in runs if run.group.peers == 3)
    for run_ in runs:
        assert sorted(run_.order) == list(range(run_.group.peers))
        assert 0.5 <= run_.stop_s <= 12
    assert 2 * sum(run.phase == "reduce" for run in runs) > 0.8 * sum(run.phase is not None for run in runs)
    assert {run.phase for run in runs} == {"reduce", "plan", "certify", None}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--runs", "0"], "--runs: 0 is not in 1.."),
        (["--peers", "2"], "a swarm of 2 nodes is none of 3.."),
        (["--codecs", "int7"], "there is no codec 'int7'; choose of fp32"),
        (["--strategies", "gossip"], "rounds of strategy 'gossip' are not certified; choose of diloco"),
        (["--runs", "3", "--only", "4"], "--only: there is no run 4 among 3"),
        (["--liar", "--short"], "--short starts copies of one process, none of which lies"),
        (["--liar", "--peers", "6"], "a swarm of 6 nodes cannot bear a fault beside a liar; take 7 or more"),
    ],
)
def test_a_campaign_that_cannot_be_is_refused(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["campaign", *arguments, "--out", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_manifest_has_many_chunks_of_which_the_last_is_not_full() -> None:
    for group in groups_of(PEERS, CODECS, CERTIFYING):
        manifest = campaign_manifest(group, 1, ["12D3KooWEUqXXWDFDK2UnUFgkVJ7GTpHzYpmiYV6YdJzq24kHaLm"])  # type: ignore[list-item]
        assert (manifest.sync.codec, manifest.sync.strategy) == (group.codec, group.strategy)
        options = manifest.workload.options
        numel = (int(options["inputs"]) + 1) * int(options["outputs"])
        assert numel // manifest.round.chunk_values >= 3 * max(PEERS)
        assert numel % manifest.round.chunk_values


def test_some_swarms_have_a_liar_and_in_some_all_train_by_loops_of_their_own() -> None:
    runs = drawn(Campaign(runs=200))
    groups = tuple(dict.fromkeys(run.group for run in runs))
    liars = [group for group in groups if group.company == "liar"]
    assert [group.strategy for group in liars] == list(CERTIFYING)
    assert sorted(group.lie for group in liars) == sorted(LYING_KINDS)
    assert [group.lie for group in liars] != [group.lie for group in liars_among(7, CODECS, CERTIFYING, seed=3)]
    assert {(group.peers, len(group.honest)) for group in liars} == {(LIAR_PEERS, LIAR_PEERS - 1)}
    loops = [group for group in groups if group.company == "loops"]
    assert [(group.strategy, group.peers) for group in loops] == [(name, LOOPS_PEERS) for name in LOOPED]
    assert [group for group in groups if group.company == "nodes"] == list(groups_of(PEERS, CODECS, CERTIFYING))
    assert len({group.name for group in groups}) == len(groups)
    kinds = {run.kind for run in runs if run.group.company == "liar"}
    assert {"kill", "kill_lead", "stop"} <= kinds
    assert kinds.isdisjoint({*PAIRED, "restore"})
    for run in runs:
        assert sorted(run.order) == list(run.group.honest)
    assert {run.group.company for run in drawn(Campaign(runs=200, peers=(4,)))} == {"nodes"}
    assert {run.group.company for run in drawn(SHORT)} == {"nodes"}
    assert {run.group.company for run in drawn(LIARS)} == {"liar"}


def test_the_last_of_a_liar_s_swarm_lies_and_the_others_withstand_it(tmp_path: Path) -> None:
    group = next(one for one in liars_among(LIAR_PEERS, CODECS, CERTIFYING, 1) if one.strategy == "diloco")
    swarm = LivingSwarm(tmp_path, group, seed=1)
    assert swarm.manifest.agreement.faults == "lying"
    assert swarm.manifest.membership.voters == "named"
    assert [node.index for node in swarm.honest] == list(range(LIAR_PEERS - 1))
    assert swarm.liar is swarm.nodes[-1]
    launches = [Launch(data_dir=node.folder, manifest=tmp_path / "swarm.toml") for node in swarm.nodes]
    programs = programs_of(group)
    lying = ["shoal.lab.bench.hostile_member" in command_of(programs, launch) for launch in launches]
    assert lying == [False] * (LIAR_PEERS - 1) + [True]
    assert swarm.lies == 0
    told_of(swarm.liar.folder / STRIKE).write_bytes(b"...")
    assert swarm.lies == 3
    assert swarm.taken_over(0) == ()
    assert sum("certified nothing" in line for line in swarm.taken_over(4)) == LIAR_PEERS - 1
    seen: list[set[PeerId]] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(hostile_verdict, "problems_of", lambda *_, struck, last: seen.append(struck) or ("0: a fork",))
        assert swarm.taken_over(4, away=[2]) == ("node 0: a fork",)
    assert seen == [{swarm.node(2).peer_id}]
    swarm.liar.lives.append(Life(pid=1, started_at=0.0, ended_at=1.0, exit_code=1))
    assert swarm._crashed() is None
    assert swarm.asked() == swarm.honest
    swarm.nodes[2].lives.append(Life(pid=2, started_at=0.0, ended_at=1.0, exit_code=1))
    assert swarm._crashed() is swarm.nodes[2]


def test_where_all_train_by_loops_of_their_own_no_node_trains_by_itself(tmp_path: Path) -> None:
    groups = [run.group for run in drawn(Campaign(runs=200)) if run.group.company == "loops"]
    for group in dict.fromkeys(groups):
        swarm = LivingSwarm(tmp_path / group.name, group, seed=1)
        assert swarm.manifest.workload.name == OWN_LOOP
        assert (swarm.honest, swarm.liar, swarm.asked()) == (swarm.nodes, None, swarm.nodes)
        launch = Launch(data_dir=swarm.nodes[2].folder, manifest=tmp_path / "swarm.toml")
        assert "shoal.lab.waiting_loop" in command_of(programs_of(group), launch)
        inner_steps, step_s = paced(group.strategy, 5, 0.1)
        assert swarm.manifest.sync.inner_steps == inner_steps
        assert {program.step_s for program in programs_of(group).values()} == {step_s}


# -- figures -------------------------------------------------------------------------------------------------


LYING = Group(peers=7, codec="fp32", company="liar", lie="accuser")


def test_delays_are_told_by_kind_and_whatever_failed_fails_the_whole() -> None:
    runs = draw_runs(1, 12, groups_of((5,), ("fp32",), ("diloco",)), Mix(kinds=("kill", "cut_all")))
    records = [
        RunRecord(run=run, round_s=1.0 + number, delay_s=float(number), bound_s=20.0, found=Findings(rounds_checked=2))
        for number, run in enumerate(runs)
    ]
    report = report_of(1, runs, records, {"5xdiloco-fp32": 1.0}, wall_s=9.0)
    assert ok(report)
    assert (report.rounds_checked, report.longest_round_share) == (24, 0.6)
    delays = [record.delay_s for record in records if record.run.kind == "kill"]
    kills = report.by_fault["kill"]
    assert (kills.runs, kills.delay_s) == (6, spread([delay for delay in delays if delay is not None]))
    assert summary(report, Path("out"))[-1] == "all is as it should be"
    assert not ok(report_of(1, runs, records[1:], {}, wall_s=9.0))
    lied = [msgspec.structs.replace(one, run=msgspec.structs.replace(one.run, group=LYING)) for one in records]
    silent = report_of(1, runs, lied, {}, wall_s=9.0)
    assert (ok(silent), silent.lies) == (False, {LYING.name: 0})
    assert summary(silent, Path("out"))[-1] == f"FAILED     no lie was told in {LYING.name}"
    leading = msgspec.structs.replace(LYING, lie="electorate")  # it may never have led
    lied = [msgspec.structs.replace(one, run=msgspec.structs.replace(one.run, group=leading)) for one in records]
    assert ok(report_of(1, runs, lied, {}, wall_s=9.0))
    lied = [msgspec.structs.replace(one, run=msgspec.structs.replace(one.run, group=LYING)) for one in records]
    lied[3] = msgspec.structs.replace(lied[3], lies=5)
    told = report_of(1, runs, lied, {}, wall_s=9.0)
    assert (ok(told), told.lies) == (True, {LYING.name: 5})
    assert f"liars      5 lies in {LYING.name}" in summary(told, Path("out"))
    assert RunRecord(run=runs[0]).problems == ("no round was recomputed",)
    assert RunRecord(run=runs[0], trouble="they stand still").problems == ("they stand still",)
    wrong = ("wrong_values", "forks", "broken_votes", "late_rounds", "unverified")
    changes: list[tuple[str, dict[str, object]]] = [
        (field, {"found": Findings(**{field: 1}, problems=(field,))})
        for field in wrong  # type: ignore[arg-type]
    ]
    for field, change in [*changes, ("unrecovered", {"trouble": "the nodes do not come together"})]:
        failed = msgspec.structs.replace(records[3], **change)
        report = report_of(1, runs, [*records[:3], failed, *records[4:]], {}, wall_s=9.0)
        assert (ok(report), report.failed_runs, getattr(report, field)) == (False, (4,), 1)
        assert summary(report, Path("out"))[-1].startswith("FAILED     runs 4;")


def test_every_strategy_meets_every_number_of_peers_and_every_codec_unless_it_has_its_own() -> None:
    groups = groups_of(PEERS, CODECS, CERTIFYING)
    assert len(groups) == len(PEERS) * len(CERTIFYING)
    for strategy in CERTIFYING:
        of_strategy = [group for group in groups if group.strategy == strategy]
        assert {group.peers for group in of_strategy} == set(PEERS)
        assert {group.codec for group in of_strategy} == ({"topk"} if strategy == "sparse" else set(CODECS))
    for peers in PEERS:
        assert len({group.codec for group in groups if group.peers == peers}) == len(CERTIFYING)
    assert [group.name for group in groups_of((4,), ("int8", "fp32"), ("ddp",))] == ["4xddp-int8", "4xddp-fp32"]
    assert groups_of((), CODECS, CERTIFYING) == ()


def test_a_short_campaign_has_every_number_of_peers_and_every_strategy_and_strikes_in_the_reduce() -> None:
    names = [group.name for group in groups_of(PEERS, CODECS, CERTIFYING, short=True)]
    assert names == ["3xdiloco-fp32", "4xddp-bf16", "5xstreaming-int8", "6xsparse-topk"]
    pairs = [group.name for group in groups_of((4, 3), ("int8",), ("diloco",), short=True)]
    assert pairs == ["4xdiloco-int8", "3xdiloco-int8"]
    assert {run.phase for run in drawn(SHORT)} == {"reduce"}
    assert {run.quiet for run in drawn(SHORT)} == {True, False}


def test_spread_is_the_median_the_ninth_in_ten_and_the_longest() -> None:
    found = spread([5.0, 1.0, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0, 10.0, 9.0])
    assert found is not None
    assert (found.median, found.p90, found.max) == (5.5, 9.0, 10.0)
    assert spread([]) is None


def test_the_bound_grows_with_what_there_is_to_notice() -> None:
    kill = round_bound_s(peers=4, faults=1, cut=False, calm_s=0.5)
    assert detection_bound_s(4, awaited=True) < kill < 3 * detection_bound_s(4)
    assert round_bound_s(peers=4, faults=2, cut=False, calm_s=0.5) > kill
    assert round_bound_s(peers=4, faults=1, cut=False, calm_s=1.5) >= kill + 2
    beside = round_bound_s(peers=4, faults=1, cut=False, calm_s=0.5, lies=True)
    assert beside == pytest.approx(kill + 2 * PROPOSE_TIMEOUT_S)  # a view after the one that the lost one led


# -- orders in test mode -------------------------------------------------------------------------------------


async def test_a_vote_is_noticed_and_a_certificate_that_was_faster_told_apart(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    log.write_bytes(line_of(Voted(round=4, view=0)) + line_of(Linked(peer="a")))

    async def append(event: Event) -> None:
        with log.open("ab") as file:
            file.write(line_of(event))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(append, Voted(round=5, view=0))
        assert await until_voted(log, 5)
    await append(Certified(round=5, digest="aa"))
    assert not await until_voted(log, 5)


def test_only_a_node_in_test_mode_takes_orders_to_hold_and_to_cut(tmp_path: Path) -> None:
    manifest = campaign_manifest(Group(peers=3, codec="fp32"), 1, [Identity.generate().peer_id])
    for test_mode in (True, False):
        config = NodeConfig(manifest=manifest, data_dir=tmp_path / "node", test_mode=test_mode)
        with Store(config.data_dir) as store:
            log = EventLog(tmp_path / "events.jsonl")
            node = Node(config, store, log, lambda _: None)
            log.close()
            everyday = {"rollback", "rebase", "amend", "amend_by_authority", "limit", "revoke"}
            assert set(orders(node.parts, node.rounds)) == everyday | ({"hold", "cut"} if test_mode else set())
