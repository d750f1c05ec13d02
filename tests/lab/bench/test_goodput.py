"""Goodput: what is refused, failures and what data parallel makes of them, where time goes, and a run of real nodes."""

from __future__ import annotations

import json
import statistics
from itertools import pairwise
from math import inf, sqrt

import msgspec
import pytest

from shoal.cli.main import execute
from shoal.lab.bench.goodput import goodput_manifest, to_document
from shoal.lab.bench.goodput_rows import (
    Account,
    NodeTimes,
    Restart,
    account,
    restarts_of,
    step_seconds,
    times_of,
    window_of,
)
from shoal.lab.bench.goodput_spec import GoodputBench, GoodputResult, rows_of
from shoal.lab.bench.goodput_trace import Failures, draw_failures, stop_and_restart
from shoal.lab.case import Numbers
from shoal.lab.shipped import not_default
from shoal.lab.targets import Spread, missed
from shoal.node.reporting.events import Certified, Contributed, Resumed, RoundStarted, TrainerStarted
from shoal.protocol.identity import Identity
from shoal.testnet.journal import Entry
from shoal.testnet.run_record import RunRecord
from shoal.testnet.scenario import Scenario


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--mtbf-s", "300,often", "--mtbf-s: '300,often' is not a list of numbers; write them like 2,4"),
        ("--mtbf-s", "300,9", "--mtbf-s: 9 is not in 10..86400; a node needs some seconds to start"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    option: str, value: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["bench", "goodput", option, value]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_only_the_workload_is_not_as_init_writes_it() -> None:
    bench = GoodputBench()
    found = not_default(goodput_manifest(bench, [Identity.generate().peer_id for _ in range(bench.nodes)]))
    assert [text.partition(" =")[0] for text in found] == ["workload.name", "workload.options"]


# -- failures ------------------------------------------------------------------------------------------------


def test_failures_are_poisson_in_the_time_that_a_node_is_up() -> None:
    found = draw_failures(1, nodes=200, seconds=10_000, mtbf_s=100, down_s=20)
    first = [moments[0] for moments in found.of_nodes]
    between = [later - at - 20 for moments in found.of_nodes for at, later in pairwise(moments)]
    assert min(between) > 0
    assert statistics.fmean(between) == pytest.approx(100, rel=0.03)
    assert statistics.pstdev(between) == pytest.approx(100, rel=0.05), "as of an exponential distribution"
    assert statistics.fmean(first) == pytest.approx(100, rel=0.2), "all start up"
    assert found.up_s / (200 * 10_000) == pytest.approx(100 / 120, rel=0.01)
    assert found.count == sum(map(len, found.of_nodes)) == pytest.approx(200 * 10_000 / 120, rel=0.03)


def test_failures_are_those_of_the_seed_and_each_node_has_its_own() -> None:
    of_one = draw_failures(1, nodes=3, seconds=1000, mtbf_s=60, down_s=20)
    assert of_one == draw_failures(1, nodes=3, seconds=1000, mtbf_s=60, down_s=20)
    assert of_one.of_nodes[:2] == draw_failures(1, nodes=2, seconds=1000, mtbf_s=60, down_s=20).of_nodes
    assert len({*of_one.of_nodes, *draw_failures(2, nodes=3, seconds=1000, mtbf_s=60, down_s=20).of_nodes}) == 6


def test_time_down_ends_with_the_trace() -> None:
    assert Failures(seconds=100, down_s=20, of_nodes=((10.0, 95.0), ())).up_s == 200 - 20 - 5


# -- stop and restart ----------------------------------------------------------------------------------------


def test_without_failures_no_checkpoint_is_best() -> None:
    found = stop_and_restart(Failures(seconds=100, down_s=20, of_nodes=((), ())), 1.0)
    assert (found.interval_s, found.useful_s, found.of_up, found.of_all) == (inf, 100, 1.0, 1.0)


def test_all_stop_until_the_last_is_up_again_and_go_on_from_the_newest_checkpoint() -> None:
    """One failure at 40 s, another node's at 50 s: from 70 s on all are up. 0..40 holds 39 s of work and a checkpoint.

    At 71 s, after one more second of work, the second checkpoint would come; the work of the last span counts anyway.
    """
    found = stop_and_restart(Failures(seconds=100, down_s=20, of_nodes=((40.0,), (50.0,))), 1.0)
    assert found.interval_s == 39
    assert found.useful_s == 39 + 30
    assert found.of_all == 0.69
    assert found.of_up == pytest.approx(2 * 69 / 160)


def test_work_since_the_last_checkpoint_is_lost_at_every_failure() -> None:
    """Spans of 11, 22 and 5 s: with intervals of 10 s all but the last 5 s are checkpointed, of which none are lost."""
    found = stop_and_restart(Failures(seconds=78, down_s=20, of_nodes=((11.0, 53.0), ())), 1.0)
    assert found.interval_s == 10
    assert found.useful_s == 10 + 20 + 5


def test_no_interval_is_better_than_the_one_that_is_found() -> None:
    failures = draw_failures(3, nodes=4, seconds=2000, mtbf_s=150, down_s=20)
    best = stop_and_restart(failures, 2.0)

    def kept(interval_s: float) -> float:
        moments = sorted(at for moments in failures.of_nodes for at in moments)
        useful = up_at = 0.0
        for at in [*moments, failures.seconds]:
            if at > up_at:
                whole = int((at - up_at) / (interval_s + 2.0) + 1e-9)
                rest = at - up_at - whole * (interval_s + 2.0)
                useful += whole * interval_s + (min(rest, interval_s) if at == failures.seconds else 0.0)
            up_at = max(up_at, at + 20)
        return useful

    assert best.useful_s == pytest.approx(kept(best.interval_s))
    assert max(kept(0.1 * n) for n in range(1, 10_000)) <= best.useful_s + 1e-6


def test_the_best_interval_is_near_youngs_where_failures_are_many_and_checkpoints_cheap() -> None:
    failures = draw_failures(1, nodes=2, seconds=100_000, mtbf_s=1000, down_s=20)
    assert stop_and_restart(failures, 1.0).interval_s == pytest.approx(sqrt(2 * 1.0 * 1000 / 2), rel=0.35)


# -- where time goes -----------------------------------------------------------------------------------------


def steps(first: float, count: int, step_s: float = 1.0) -> list[float]:
    """When so many steps end, the first of which begins at `first`."""
    return [first + step_s * n for n in range(1, count + 1)]


def test_parts_of_the_time_sum_up_to_all_of_it() -> None:
    """Two nodes in a window of 100 s: one lives through it, one is killed at 60 s and back at 80 s."""
    through = NodeTimes(lives=((-50.0, 200.0),), steps=[*steps(0, 40), *steps(45, 50), *steps(95.5, 4, 1.1)])
    struck = NodeTimes(
        lives=((-50.0, 60.0), (80.0, 200.0)),
        steps=[*steps(0, 57), *steps(87, 12)],
        contributed=(40.0,),
        trainers=(-45.0, 84.0),
    )
    assert step_seconds((through, struck), (0.0, 100.0)) == 1.0
    found = account((through, struck), (0.0, 100.0), certified=130, step_s=1.0)
    assert found == Account(
        all_s=200.0,
        certified_s=130.0,
        unfinished_s=17.0,
        lost_s=94 + 69 - 130 - 17,
        starting_s=4.0,
        joining_s=3.0,
        still_s=pytest.approx(5.0 + 3.0 + 1.0),
        slow_s=pytest.approx(0.5 + 0.4 + 0.1),
        down_s=20.0,
    )
    assert found.up_s == 180
    assert found.of_up == 130 / 180
    assert found.of_all == 130 / 200
    lost = (found.unfinished_s, found.lost_s, found.starting_s, found.joining_s, found.still_s, found.slow_s)
    assert found.certified_s + sum(lost) == pytest.approx(found.up_s)


def test_steps_that_a_node_finds_on_its_disk_after_a_failure_are_not_lost() -> None:
    """Killed after 7 steps of which it finds 5; then after 3 more, all 8 of which it finds and contributes."""
    node = NodeTimes(
        lives=((-5.0, 17.0), (30.0, 43.0), (60.0, 90.0), (95.0, 200.0)),
        steps=[*steps(0, 17), *steps(40, 3), *steps(70, 20)],
        contributed=(10.0, 80.0),
        resumed=((35.0, 5), (65.0, 8)),
    )
    found = account((node,), (0.0, 100.0), certified=0, step_s=1.0)
    assert found.unfinished_s == (7 - 5) + (5 + 3 - 8) + 10
    found = account((node,), (0.0, 50.0), certified=0, step_s=1.0)
    assert found.unfinished_s == (7 - 5) + (5 + 3)


def test_a_life_without_a_step_is_all_start_or_once_it_has_a_trainer_joining() -> None:
    node = NodeTimes(lives=((-5.0, 10.0), (30.0, 36.0), (56.0, 200.0)), steps=steps(0, 10), trainers=(58.0,))
    found = account((node,), (0.0, 60.0), certified=10, step_s=1.0)
    assert (found.starting_s, found.joining_s) == (6.0 + 2.0, 2.0)
    assert (found.down_s, found.unfinished_s) == (40.0, 10.0)


def test_restarts_are_those_in_the_window_that_came_to_a_step() -> None:
    node = NodeTimes(
        lives=((-5.0, 10.0), (30.0, 36.0), (56.0, 90.0), (110.0, 200.0)),
        steps=[*steps(0, 10), *steps(60, 30), *steps(120, 10)],
        trainers=(-1.0, 35.0, 58.5, 113.0),
    )
    assert restarts_of(node, (0.0, 100.0), 1.0) == [Restart(trainer_s=2.5, step_s=4.0)]


def test_times_of_a_node_are_of_all_its_lives() -> None:
    events = [
        TrainerStarted(at=1.0),
        Contributed(at=9.0, round=1),
        TrainerStarted(at=31.0),
        Resumed(at=32.0, round=1, exact=True, tokens=1),
        Contributed(at=39.0, round=3),
    ]
    assert times_of(events, [3.0, 2.0], ((0.0, 10.0), (30.0, 40.0))) == NodeTimes(
        lives=((0.0, 10.0), (30.0, 40.0)),
        steps=[2.0, 3.0],
        contributed=[9.0, 39.0],
        trainers=[1.0, 31.0],
        resumed=[(32.0, 1)],
    )


def certified(node: int, round: int, at: float, tokens: int) -> Entry:
    return Entry(node, Certified(at=at, round=round, digest="d", tokens=tokens))


def record(*entries: Entry) -> RunRecord:
    scenario = Scenario(nodes=2, rounds=9)
    return RunRecord(scenario=scenario, began_at=0.0, ended_at=99.0, entries=entries, nodes=(), faults=())


def test_the_window_is_from_the_first_certificate_to_the_first_after_its_time() -> None:
    found = record(
        Entry(0, RoundStarted(at=0.0, round=1)),
        certified(0, 1, 10.2, 7),
        certified(1, 1, 10.0, 7),
        certified(1, 2, 20.0, 11),
        certified(0, 2, 20.1, 11),
        certified(0, 3, 41.0, 13),
        certified(1, 4, 52.0, 17),
    )
    assert window_of(found, 30.0, 99.0) == ((10.0, 41.0), {2: 11, 3: 13})
    assert window_of(found, 50.0, 99.0) == ((10.0, 99.0), {2: 11, 3: 13, 4: 17}), "no round came in time"


# -- rows ----------------------------------------------------------------------------------------------------


def result(mtbf_s: int = 300, of_up: float = 0.96) -> GoodputResult:
    return GoodputResult(
        bench=GoodputBench(mtbf_s=Numbers((mtbf_s,))),
        mtbf_s=mtbf_s,
        not_default=("workload.name = waiting",),
        load=(0.5, 1.25),
        seconds=605.0,
        rounds=58,
        failures=15,
        account=Account(
            all_s=1000.0,
            certified_s=900 * of_up,
            unfinished_s=9.0,
            lost_s=0.0,
            starting_s=18.0,
            joining_s=0.0,
            still_s=4.5,
            slow_s=0.9,
            down_s=100.0,
        ),
        steps_certified=8000,
        steps_made=8100,
        step_s=0.1012,
        round_s=Spread.of([10.2, 10.4, 11.0]),
        fewest=5,
        contributions=440,
        missed=1,
        restarts_s=Spread.of([4.0]),
        trainer_s=None,
        interval_s=12.34,
        parallel_of_up=0.61,
        parallel_of_all=0.57,
        not_made=0,
        wrong_values=0,
        forks=0,
        unverified=(),
    )


@pytest.mark.parametrize(
    ("mtbf_s", "percent", "met", "aim_met"),
    [
        (300, 95.0, True, False),
        (300, 94.9, False, False),
        (120, 94.0, True, True),
        (120, 89.9, False, False),
        (60, 80.0, True, False),
        (60, 79.9, False, False),
        (60, 88.0, True, True),
        (77, 10.0, None, None),
    ],
)
def test_goodput_is_measured_at_what_its_failures_allow(
    mtbf_s: int, percent: float, met: bool | None, aim_met: bool | None
) -> None:
    row = result(mtbf_s, percent / 100 + 1e-9).rows[0]
    assert row.name == f"goodput, a failure per node each {mtbf_s} s"
    assert (row.met, row.aim_met) == (met, aim_met)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"wrong_values": 1}, "wrong values"),
        ({"forks": 1}, "forks, and states that differ"),
        ({"unverified": ("round 3: …",)}, "what could not be verified"),
        ({"not_made": 1}, "steps certified that were not made"),
    ],
)
def test_what_is_wrong_is_missed_whatever_the_goodput(change: dict[str, object], name: str) -> None:
    assert missed(result().rows) == []
    assert [row.name for row in missed(msgspec.structs.replace(result(), **change).rows)] == [name]


def test_both_shares_stand_beside_those_of_stop_and_restart() -> None:
    one = result()
    assert [round(row.measured.median, 6) for row in one.rows[:4] if row.measured] == [96.0, 86.4, 61.0, 57.0]
    assert len(rows_of([one, result(60)])) == 2 * len(one.rows)
    document = json.loads(msgspec.json.encode(to_document(one)))
    assert (document["goodput"], document["restart_goodput"]) == (one.account.of_up, one.parallel_of_up)
    assert (document["tokens"], document["failures"]) == (one.steps_certified, one.failures)
    assert document["account"]["certified_s"] == 864
