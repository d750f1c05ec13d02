"""The soak: what is drawn, that every verdict can fail, and a short one with real processes."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path

import msgspec
import psutil  # type: ignore[import-untyped]
import pytest
import trio

from shoal.cli.main import execute
from shoal.lab.campaigns.campaign_check import MACHINE_S
from shoal.lab.campaigns.campaign_plan import CERTIFYING, Group, groups_of
from shoal.lab.campaigns.campaign_swarm import LivingSwarm
from shoal.lab.campaigns.rounds import MARGIN, RoundJudge
from shoal.lab.campaigns.settings import Soak
from shoal.lab.campaigns.soak import drawn, gap_bound_s, group_of, run_soak, soak_manifest
from shoal.lab.campaigns.soak_faults import faults_of, inject_fault
from shoal.lab.campaigns.soak_measures import (
    DESCRIPTORS_GROWTH,
    DISK_GROWTH_BYTES,
    KEPT_BYTES_PER_ROUND,
    RSS_GROWTH_BYTES,
    THREADS_GROWTH,
    Measure,
    Sample,
    Verdict,
    beyond_chain_per_h,
    entry_bytes,
    judge,
    look_at_folder,
    look_at_processes,
    slope,
    unjudged,
)
from shoal.lab.campaigns.soak_plan import (
    AWAY_S,
    ENDING,
    KINDS,
    LINKED,
    SLOW_MBIT,
    Kind,
    SoakFault,
    draw_faults,
    steady_of,
)
from shoal.lab.campaigns.soak_report import SoakFaultRecord, SoakReport, ok, to_json
from shoal.lab.cli.soak import fault_line, summary, verdict_line
from shoal.node.reporting.events import Certified, Listening, RoundStarted, Started
from shoal.protocol.errors import ConfigError
from shoal.protocol.timeouts import PROPOSE_TIMEOUT_S
from shoal.testnet import faults
from shoal.testnet.check import Witness
from shoal.testnet.faults import NotWhole
from shoal.testnet.journal import Journal
from shoal.testnet.scenario import Fault
from tests.node.checkpoint_lab import new_ledger
from tests.testnet.test_check import PEERS, flip, write_round

MIB = 1 << 20
TWO_HOURS_S = 7200.0


# -- what is drawn -------------------------------------------------------------------------------------------


def test_faults_follow_from_the_seed_and_every_kind_has_its_share() -> None:
    strikes = draw_faults(1, nodes=4, seconds=TWO_HOURS_S, period_s=60)
    assert strikes == draw_faults(1, nodes=4, seconds=TWO_HOURS_S, period_s=60)
    assert strikes != draw_faults(2, nodes=4, seconds=TWO_HOURS_S, period_s=60)
    assert [strike.at_s for strike in strikes] == [60.0 * minute for minute in range(1, 120)]
    shares = [sum(strike.kind == kind for strike in strikes) for kind in KINDS]
    assert max(shares) - min(shares) <= 1


def test_no_fault_ends_a_process_of_a_steady_node_and_all_nodes_are_struck() -> None:
    for seed in range(20):
        strikes = draw_faults(seed, nodes=5, seconds=TWO_HOURS_S, period_s=60)
        ended = {node for strike in strikes if strike.kind in ENDING for node in strike.nodes}
        assert ended == set(range(5)) - set(steady_of(5))
        assert {node for strike in strikes for node in strike.nodes} == set(range(5))
        assert {len(strike.nodes) for strike in strikes if strike.kind == "halves"} == {2}
        besides = [(strike, strike.beside) for strike in strikes if strike.beside is not None]
        assert len(besides) > len(strikes) / 10
        for strike, beside in besides:
            assert (beside.at_s, beside.kind != strike.kind) == (strike.at_s, True)
            assert not set(beside.nodes) & set(strike.nodes)
            assert beside.kind not in ENDING or beside.nodes[0] not in steady_of(5)


def test_clocks_are_set_forward_and_back_by_minutes_and_by_days() -> None:
    strikes = [strike for seed in range(20) for strike in draw_faults(seed, nodes=5, seconds=7200.0, period_s=60)]
    ahead = [strike.ahead_s for strike in strikes if strike.kind == "clock"]
    for sign in (-1, 1):
        minutes = [by * sign / 60 for by in ahead if by * sign > 0]
        assert min(minutes) < 30
        assert max(minutes) > 10 * 24 * 60
    assert {strike.ahead_s for strike in strikes if strike.kind != "clock"} == {0.0}


@pytest.mark.parametrize("kind", ["kill", "clock"])
async def test_a_fault_that_was_not_got_over_is_told_and_so_is_the_one_beside_it(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    async def strike(fault: Fault, swarm: object) -> None:
        done.append(f"{fault.kind} {fault.node}")

    async def until_whole(fault: Fault, swarm: object) -> None:
        if fault.kind in ("clock", "move"):
            raise NotWhole(f"{fault.kind} was not got over")

    monkeypatch.setattr(faults, "strike", strike)
    monkeypatch.setattr(faults, "undo", strike)
    monkeypatch.setattr(faults, "until_whole", until_whole)
    beside = SoakFault(number=1, at_s=1.0, kind="move", nodes=(3,), lasts_s=1.0)
    both = SoakFault(number=1, at_s=1.0, kind=kind, nodes=(1,), lasts_s=1.0, ahead_s=99.0, beside=beside)
    swarm = LivingSwarm(tmp_path / "swarm", Group(peers=4, codec="int8"), seed=1)
    told = await inject_fault(both, swarm)
    assert told is not None
    assert sorted(told.split("; ")) == ["clock was not got over"] * (kind == "clock") + ["move was not got over"]
    assert sorted(set(done)) == sorted([f"{'restart' if kind == 'kill' else kind} 1", "move 3"])


def test_a_liar_is_not_struck_and_nobody_beside_it_is_put_back_on_an_old_folder() -> None:
    soak = Soak(nodes=7, seed=4, liar=True)
    group = group_of(soak)
    assert (group.company, len(group.honest)) == ("liar", 6)
    strikes = drawn(soak, links=True)
    assert {node for strike in strikes for node in strike.nodes} == set(group.honest)
    assert {strike.kind for strike in strikes} == set(KINDS) - {"restore"}
    with pytest.raises(ConfigError, match="cannot bear a fault beside a liar; take 7 or more"):
        group_of(Soak(nodes=6, liar=True))
    assert gap_bound_s(7, [1.0], 0.0, lies=True) > gap_bound_s(7, [1.0], 0.0) + PROPOSE_TIMEOUT_S


def test_without_namespaces_nothing_is_done_to_links() -> None:
    assert {strike.kind for strike in drawn(Soak(), links=False)} == set(KINDS) - set(LINKED)


@pytest.mark.parametrize(
    ("soak", "what"),
    [
        (Soak(nodes=2), "--nodes: a soak has 3 to 16 of them, not 2"),
        (Soak(minutes=0), "--minutes: more than 0"),
        (Soak(minutes=1e9), "--minutes: more than 0"),
        (Soak(period_s=0), "--period: a number of seconds"),
    ],
)
def test_a_soak_that_cannot_be_is_refused(soak: Soak, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        drawn(soak, links=True)


# -- growth --------------------------------------------------------------------------------------------------


def samples(
    *,
    node: int = 0,
    role: str = "daemon",
    per_h: dict[str, float] | None = None,
    lives: int = 1,
    per_life: float = 0.0,
    seconds: float = TWO_HOURS_S,
) -> list[Sample]:
    """Two hours of a process, of several one after the other, or of a folder; `per_h` says what grows by how much."""
    base = {"rss": 100.0 * MIB, "threads": 10, "descriptors": 30} if role != "folder" else {"disk": 2.0 * MIB}
    made = []
    for step in range(int(seconds / 10)):
        at_s = step * 10.0
        life = int(at_s / seconds * lives)
        born = life * seconds / lives
        values = dict(base) | ({} if role != "folder" else {"kept": 1000.0 * step})
        for measure, growth in (per_h or {}).items():
            values[measure] += growth * at_s / 3600
        if lives > 1:
            values["rss"] += per_life * life + MIB * (at_s - born) / 100  # a young process is smaller than an old one
        whole = {name: int(value) for name, value in values.items()}
        made.append(
            msgspec.convert(
                {"at_s": at_s, "node": node, "role": role, "round": step, "born": born, "age_s": at_s - born, **whole},
                Sample,
            )
        )
    return made


def verdicts(*parts: list[Sample], steady: range = range(2)) -> dict[str, Verdict]:
    found = judge([sample for part in parts for sample in part], seconds=TWO_HOURS_S, steady=steady)
    return {f"{verdict.node} {verdict.role} {verdict.measure}": verdict for verdict in found}


def test_what_stays_as_it_is_holds() -> None:
    found = verdicts(samples(), samples(role="trainer"), samples(role="folder"))
    assert len(found) == 3 + 3 + 2
    assert all(verdict.holds and verdict.lives == 1 for verdict in found.values())
    assert found["0 daemon rss"].growth == 0
    assert found["0 folder kept"].growth == 1000


@pytest.mark.parametrize(
    ("measure", "limit", "role"),
    [
        ("rss", RSS_GROWTH_BYTES, "daemon"),
        ("rss", RSS_GROWTH_BYTES, "trainer"),
        ("threads", THREADS_GROWTH, "daemon"),
        ("descriptors", DESCRIPTORS_GROWTH, "trainer"),
        ("disk", DISK_GROWTH_BYTES, "folder"),
    ],
)
def test_what_grows_beyond_its_limit_does_not_hold(measure: Measure, limit: float, role: str) -> None:
    # The middles of the first and the last quarter of a hundred minutes are 75 minutes apart.
    for share, holds in ((0.8, True), (1.5, False)):
        found = verdicts(samples(role=role, per_h={measure: share * limit * 60 / 75}))
        verdict = found[f"0 {role} {measure}"]
        assert verdict.holds is holds
        assert verdict.growth == pytest.approx(share * limit, rel=0.1, abs=1)
        assert [name for name, other in found.items() if not other.holds] == ([] if holds else [verdict_name(verdict)])


def verdict_name(verdict: Verdict) -> str:
    return f"{verdict.node} {verdict.role} {verdict.measure}"


def test_one_tall_moment_is_no_growth() -> None:
    tall = [
        msgspec.structs.replace(s, rss=s.rss + 500 * MIB) if 60 <= i % 200 < 65 else s for i, s in enumerate(samples())
    ]
    assert verdicts(tall)["0 daemon rss"].holds


def test_growth_before_the_warm_up_is_over_is_none() -> None:
    risen = [msgspec.structs.replace(s, rss=s.rss - int(50 * MIB * max(0.0, 1 - s.at_s / 1200))) for s in samples()]
    assert verdicts(risen)["0 daemon rss"].growth == pytest.approx(0, abs=MIB)


def test_logs_may_grow_by_so_many_bytes_a_round_and_no_more() -> None:
    for per_step, holds in ((KEPT_BYTES_PER_ROUND - 1000, True), (KEPT_BYTES_PER_ROUND + 1000, False)):
        of_folder = [msgspec.structs.replace(s, kept=s.round * per_step) for s in samples(role="folder")]
        assert verdicts(of_folder)["0 folder kept"].holds is holds
    late = [msgspec.structs.replace(s, kept=s.round**2 * 20) for s in samples(role="folder")]
    assert not verdicts(late)["0 folder kept"].holds, "it is too much at the end, not at the beginning"


def test_processes_that_end_are_compared_at_equal_age() -> None:
    even = verdicts(samples(node=3, lives=12))
    assert (even["3 daemon rss"].lives, even["3 daemon rss"].growth) == (12, pytest.approx(0, abs=MIB / 10))
    fatter = verdicts(samples(node=3, lives=12, per_life=4.0 * MIB))
    assert not fatter["3 daemon rss"].holds, "each begins four MiB larger than the one before"
    assert fatter["3 daemon threads"].holds
    assert "3 daemon rss" not in verdicts(samples(node=3, lives=3)), "too few to say anything"


def test_no_verdict_on_what_must_have_one_is_told() -> None:
    whole = [samples(role=role, node=node) for node in (0, 1) for role in ("daemon", "trainer", "folder")]
    found = judge([s for part in whole for s in part], seconds=TWO_HOURS_S, steady=range(1))
    assert unjudged(found, nodes=2, steady=range(1)) == ()
    lacking = judge([s for part in whole[:2] for s in part], seconds=TWO_HOURS_S, steady=range(1))
    told = unjudged(lacking, nodes=1, steady=range(1))
    assert told == ("node 0's folder: too few samples of its disk", "node 0's folder: too few samples of its kept")
    assert len(unjudged((), nodes=1, steady=range(1))) == 2 + 6


def test_slope_is_what_most_pairs_of_samples_say() -> None:
    assert slope(samples(per_h={"rss": 7.0 * MIB}), "rss") == pytest.approx(7 * MIB, rel=1e-3)
    assert slope(samples()[:5], "rss") is None


def test_growth_beyond_the_chain_is_what_its_entries_do_not_take() -> None:
    """A round every ten seconds, 1,000 bytes each; the daemon that grew the most, and no trainer, says how much."""
    found = judge(
        [*samples(per_h={"rss": 0.36e6 + 2e6}), *samples(node=1), *samples(role="trainer", per_h={"rss": 9e6})],
        seconds=TWO_HOURS_S,
        steady=range(2),
    )
    assert beyond_chain_per_h(found, 1000) == pytest.approx(2e6, rel=1e-2)
    assert beyond_chain_per_h([verdict for verdict in found if verdict.role == "trainer"], 1000) is None


@pytest.mark.parametrize("rounds", [4, 24])
def test_an_entry_takes_the_same_memory_in_a_chain_of_any_length(tmp_path: Path, rounds: int) -> None:
    assert 700 < entry_bytes(new_ledger(rounds).checkpoint(tmp_path, rounds)) < 4000


def test_this_process_and_a_folder_are_seen_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "1.safetensors").write_bytes(bytes(1000))
    (tmp_path / "rounds" / "0.0-1").mkdir(parents=True)
    (tmp_path / "rounds" / "0.0-1" / "applied").write_bytes(bytes(5000))
    (tmp_path / "chain.log").write_bytes(bytes(300))
    (tmp_path / "events.jsonl").write_bytes(bytes(30))
    folder = look_at_folder(tmp_path, at_s=1.0, node=2, round=7)
    assert (folder.kept, folder.disk >= 1000, folder.disk < 1000 + 3 * 8192) == (330, True, True)
    with (tmp_path / "open").open("w"):
        daemon, *_ = look_at_processes(os.getpid(), at_s=1.0, node=2, round=7, now=psutil.Process().create_time() + 5)
    assert (daemon.role, daemon.age_s, daemon.rss > MIB, daemon.threads >= 1) == ("daemon", 5.0, True, True)
    assert daemon.descriptors == psutil.Process().num_fds() + 1
    assert list(look_at_processes(2**22 + 1, at_s=1.0, node=2, round=7, now=0.0)) == []


def test_folder_that_its_node_removes_while_it_is_looked_at_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        (tmp_path / "finals" / f"0.0-{number}").mkdir(parents=True)
        (tmp_path / "finals" / f"0.0-{number}" / "applied").write_bytes(bytes(5000))
    listing = os.scandir

    def scandir(folder: object) -> object:
        if str(folder).endswith("0.0-1"):
            shutil.rmtree(str(folder))
        return listing(folder)  # type: ignore[call-overload]

    monkeypatch.setattr("os.scandir", scandir)
    assert 5000 <= look_at_folder(tmp_path, at_s=1.0, node=2, round=7).disk < 10_000 + 3 * 8192
    assert not (tmp_path / "finals" / "0.0-1").exists()


# -- strikes -------------------------------------------------------------------------------------------------


def struck(kind: Kind, *nodes: int) -> list[tuple[str, int | None, float | None]]:
    strike = SoakFault(number=7, at_s=60.0, kind=kind, nodes=nodes, lasts_s=0.0 if kind == "cut" else 3.0)
    return [(fault.kind, fault.node, fault.duration_s) for fault in faults_of(strike, 4)]


def test_strikes_are_faults_of_a_scenario_and_who_is_ended_comes_back() -> None:
    assert struck("kill", 3) == [("restart", 3, 3.0)]
    assert struck("leave", 2) == [("leave", 2, None), ("restart", 2, 3.0)]
    assert struck("corrupt", 2) == [("corrupt", 2, None), ("restart", 2, 3.0)]
    assert struck("stop", 0) == [("stop", 0, 3.0)]
    assert struck("cut", 1) == [("cut", 1, None)]
    assert struck("slow", 1) == [("slow", 1, 3.0)]
    assert struck("restore", 3) == [("restore", 3, None)]
    assert struck("move", 3) == [("move", 3, 3.0)]
    (clock,) = faults_of(SoakFault(number=7, at_s=60.0, kind="clock", nodes=(1,), lasts_s=3.0, ahead_s=-900.0), 4)
    assert (clock.kind, clock.ahead_s, clock.duration_s) == ("clock", -900.0, 3.0)
    (slow,) = faults_of(SoakFault(number=7, at_s=60.0, kind="slow", nodes=(1,), lasts_s=3.0), 4)
    assert slow.rate_mbit == SLOW_MBIT
    for kind, nodes, rest in (("partition", (2,), (0, 1, 3)), ("halves", (0, 3), (1, 2))):
        (apart,) = faults_of(SoakFault(number=7, at_s=60.0, kind=kind, nodes=nodes, lasts_s=3.0), 4)
        assert (apart.kind, apart.groups, apart.duration_s, apart.traffic) == ("partition", (nodes, rest), 3.0, "all")


# -- rounds --------------------------------------------------------------------------------------------------


class Swarm:
    """Three nodes' files and journal, made by hand."""

    def __init__(self, folder: Path, rounds: int) -> None:
        self.folder = folder
        nodes = [Witness(index=i, peer_id=PEERS[i], folder=folder / str(i)) for i in range(3)]
        self.journal = Journal()
        self.judge = RoundJudge(nodes, self.journal)
        for index in range(3):
            self.journal.add(index, Listening(at=0.5, addresses=("a",)))
        for number in range(1, rounds + 1):
            write_round(folder, number)
            for index in range(3):
                self.journal.add(index, RoundStarted(at=number - 1.0, round=number))
                self.certify(index, number)

    def certify(self, node: int, number: int, digest: str = "d") -> None:
        event = Certified(at=float(number), term="0.0", round=number, digest=digest, value="v")
        self.journal.add(node, event)

    def kept(self, node: int) -> list[str]:
        return sorted(path.name for path in (self.folder / str(node) / "rounds").iterdir())


def test_rounds_are_judged_when_all_are_past_them_and_then_forgotten(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, 5)
    assert swarm.judge.ripe() == 5 - MARGIN
    swarm.judge.judge(3)
    found = swarm.judge
    assert (found.checked, found.wrong_values, found.forks, found.unverified, found.problems) == (3, 0, 0, 0, [])
    assert swarm.kept(1) == ["0.0-4", "0.0-5"]
    rounds = [e.event.round for e in swarm.journal.entries if isinstance(e.event, Certified)]
    assert rounds == [4] * 3 + [5] * 3
    assert len([e for e in swarm.journal.entries if isinstance(e.event, Listening)]) == 3
    assert found.gaps_s == [1.0, 1.0]
    swarm.judge.judge(5)
    assert (found.checked, found.problems, found.last) == (5, [], 5)


def test_a_node_that_is_behind_keeps_rounds_from_being_judged(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, 5)
    swarm.certify(0, 6)
    swarm.certify(1, 6)
    assert swarm.judge.ripe() == 5 - MARGIN


def test_a_liar_is_neither_waited_for_nor_believed(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, 5)
    swarm.certify(0, 6)
    swarm.certify(1, 6)
    swarm.certify(2, 3, digest="other")
    swarm.judge.liar = 2
    assert swarm.judge.ripe() == 6 - MARGIN
    swarm.judge.judge(4)
    assert (swarm.judge.checked, swarm.judge.forks, swarm.judge.problems) == (4, 0, [])


def test_a_wrong_value_is_found_and_its_files_stay(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, 4)
    flip(tmp_path / "1" / "rounds" / "0.0-2" / "applied", 17)
    swarm.judge.judge(3)
    assert (swarm.judge.checked, swarm.judge.wrong_values) == (3, 1)
    assert swarm.judge.problems == ["round 2: 1 wrong values"]
    assert swarm.kept(0) == ["0.0-2", "0.0-4"]


def test_another_digest_is_a_fork(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, 4)
    swarm.certify(2, 3, digest="other")
    swarm.judge.judge(3)
    assert (swarm.judge.forks, swarm.judge.problems) == (1, ["round 3: certified with more than one digest or value"])


def test_a_round_without_its_files_or_its_certificate_is_not_verified(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, 4)
    (tmp_path / "1" / "rounds" / "0.0-1" / "applied").unlink()
    entries = swarm.journal.entries
    entries[:] = [e for e in entries if not (isinstance(e.event, Certified) and e.event.round == 2)]
    swarm.judge.judge(3)
    assert swarm.judge.unverified == 2
    assert swarm.judge.problems == [
        "round 1: node 1 certified it but kept no applied update",
        "nobody certified round 2",
    ]


def test_a_new_process_need_not_have_what_the_old_one_may_not_have_written(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, 4)
    (tmp_path / "1" / "rounds" / "0.0-4" / "applied").unlink()
    swarm.journal.add(1, Started(at=9.0))
    swarm.judge.judge(4)
    assert (swarm.judge.checked, swarm.judge.problems) == (4, [])


# -- the report ----------------------------------------------------------------------------------------------

STRIKE = SoakFault(number=3, at_s=180.0, kind="kill", nodes=(2,), lasts_s=8.1)
GOOD = SoakReport(
    seed=1,
    nodes=4,
    strategy="diloco",
    minutes=120.0,
    period_s=60.0,
    seconds=7201.0,
    faults_drawn=119,
    faults=(SoakFaultRecord(strike=STRIKE, struck_at_s=180.2, round=41, whole_s=6.2),),
    without_links=None,
    rounds=1500,
    rounds_checked=1500,
    wrong_values=0,
    forks=0,
    broken_votes=0,
    unverified=0,
    longest_gap_s=9.0,
    gap_bound_s=60.0,
    load=1.0,
    digests_equal=True,
    verdicts=(
        Verdict(
            measure="rss",
            node=0,
            role="daemon",
            lives=1,
            before=1e8,
            after=1.01e8,
            limit=1.6e7,
            slope_per_h=2.0e6,
            rounds_per_h=750.0,
        ),
    ),
    entry_bytes=2000,
    problems=(),
)
GROWN = Verdict(measure="threads", node=2, role="daemon", lives=9, before=11, after=19, limit=2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"wrong_values": 1},
        {"forks": 1},
        {"broken_votes": 1},
        {"unverified": 1},
        {"digests_equal": False},
        {"rounds_checked": 0},
        {"faults": ()},
        {"problems": ("node 0: its trainer was started 2 times",)},
        {"trouble": "all contribute again: not within 180 s"},
        {"verdicts": (GROWN,)},
        {"entry_bytes": 1000},  # of 2 MB an hour the chain then explains no more than 0.75
    ],
)
def test_whatever_is_not_as_it_should_be_fails_the_soak(wrong: dict[str, object], tmp_path: Path) -> None:
    assert ok(GOOD)
    assert summary(GOOD, tmp_path)[-1] == "all is as it should be"
    chain = "chain      2000 bytes an entry in memory; beyond it a daemon grew by at most 0.50 MB an hour"
    assert chain in summary(GOOD, tmp_path)
    assert ok(msgspec.structs.replace(GOOD, entry_bytes=1000, seconds=3599.0)), "too short for a slope"
    bad = msgspec.structs.replace(GOOD, **wrong)
    assert not ok(bad)
    assert json.loads(to_json(bad))["ok"] is False
    assert summary(bad, tmp_path)[-1].startswith("FAILED")


def test_faults_and_verdicts_are_told_in_a_line() -> None:
    (record,) = GOOD.faults
    assert fault_line(record) == "fault 3, minute 3.0: kill node 2 for 8.1 s in round 41; whole 6.2 s afterwards"
    beside = SoakFault(number=3, at_s=180.0, kind="clock", nodes=(1,), lasts_s=2.0, ahead_s=-86_400.0)
    two = msgspec.structs.replace(record, strike=msgspec.structs.replace(STRIKE, beside=beside))
    assert "kill node 2 for 8.1 s beside clock node 1 by -86,400 s for 2.0 s in round 41" in fault_line(two)
    failed = msgspec.structs.replace(record, error="node 2 is not running")
    assert fault_line(failed).endswith("; not done: node 2 is not running")
    assert verdict_line(GROWN) == "threads     node 2 daemon: 11 → 19, +8 of at most 2, 9 lives at equal age  GROWS"
    assert "100.0 MB → 101.0 MB, +1.0 MB of at most 16.0 MB" in verdict_line(GOOD.verdicts[0])
    assert json.loads(to_json(GOOD))["verdicts"][0]["holds"] is True


def test_the_bound_between_two_rounds_is_of_two_faults_and_grows_with_load() -> None:
    calm = gap_bound_s(4, [2.0, 2.0, 30.0], load=0.5)
    assert gap_bound_s(4, [4.0, 4.0, 30.0], load=0.5) > calm > AWAY_S[1]
    assert gap_bound_s(4, [2.0, 2.0, 30.0], load=3.0) == calm + 2 * MACHINE_S


def test_the_manifest_says_how_long_a_step_takes() -> None:
    manifest = soak_manifest(Soak(step_s=0.5), Group(peers=3, codec="int8"), 7, list(PEERS))
    assert (manifest.workload.options["step_s"], manifest.workload.seed) == (0.5, 7)


def test_a_soak_is_of_any_strategy_whose_rounds_are_certified_and_its_rounds_last_as_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for strategy in CERTIFYING:
        (group,) = groups_of((3,), ("int8",), (strategy,))
        manifest = soak_manifest(Soak(strategy=strategy), group, 7, list(PEERS))
        step_s = manifest.workload.options["step_s"]
        assert isinstance(step_s, float)
        assert manifest.sync.round_steps * step_s == pytest.approx(4.0), strategy
    assert execute(["soak", "--strategy", "gossip", "--out", str(tmp_path / "out")]) == 2
    assert "rounds of strategy 'gossip' are not certified" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# -- a short one ---------------------------------------------------------------------------------------------


@pytest.mark.long
def test_real_nodes_are_struck_sampled_and_judged(tmp_path: Path) -> None:
    told: list[SoakFaultRecord] = []
    soak = Soak(minutes=0.4, nodes=3, seed=4, period_s=6.0, step_s=0.01)
    report = trio.run(partial(run_soak, soak, tmp_path / "out", told.append))
    assert report.trouble is None
    assert (report.wrong_values, report.forks, report.broken_votes, report.unverified) == (0, 0, 0, 0)
    assert report.digests_equal
    assert report.rounds_checked == report.rounds > 5
    assert told == list(report.faults) != []
    assert [record.error for record in told] == [None] * len(told)
    # So short a soak has too few samples for verdicts, and says so instead of passing.
    assert not ok(report)
    assert all("too few samples" in problem for problem in report.problems)
    lines = (tmp_path / "out" / "samples.jsonl").read_bytes().splitlines()
    found = [msgspec.json.decode(line, type=Sample) for line in lines]
    assert {(s.node, s.role) for s in found} == {(n, r) for n in range(3) for r in ("daemon", "trainer", "folder")}
    assert all(len(list((tmp_path / "out" / "nodes" / str(n) / "rounds").iterdir())) <= MARGIN + 3 for n in range(3))
    assert json.loads((tmp_path / "out" / "soak.json").read_text())["rounds_checked"] == report.rounds_checked
