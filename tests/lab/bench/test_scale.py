"""The rows of a crowded swarm, from events made by hand, and what its options refuse."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import pytest

from shoal.lab.bench.scale import CASE, scale_manifest
from shoal.lab.bench.scale_rows import (
    Look,
    Rest,
    all_past_s,
    control_kb_s,
    count_of,
    deaths_announced,
    ends_between,
    evictions,
    fewest_contributors,
    pace_s,
    rest_of,
    rest_percent,
    rounds_of,
    seconds_of_rounds,
    times_dead,
)
from shoal.lab.bench.scale_spec import ScaleBench, ScaleResult, Sides, Steps, Struck
from shoal.lab.shipped import not_default
from shoal.lab.targets import Spread, missed
from shoal.node.reporting.events import CaughtUp, Certified, Died, Event, Linked, Lost, Planned, Revived, RoundStarted
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import Identity
from shoal.testnet.journal import Entry
from shoal.testnet.run_record import NodeFacts, RunRecord
from shoal.testnet.scenario import Scenario

BEGAN = 1000.0
ENDS = {1: 5.0, 2: 7.0, 3: 9.0, 4: 12.0, 5: 30.0, 6: 32.0}
"""When the first node certified each round; the others are a tenth of a second later each."""


def certified(node: int, round: int, at: float, *, contributors: int = 3, sent: int = 0) -> Entry:
    event = Certified(
        at=BEGAN + at, round=round, digest=f"d{round}", contributors=contributors, control_sent=sent, members=("a",)
    )
    return Entry(node, event)


def told(node: int, at: float, event: Event) -> Entry:
    return Entry(node, msgspec.structs.replace(event, at=BEGAN + at))


def record(*extra: Entry) -> RunRecord:
    entries = [told(0, 1.0, RoundStarted(round=1))]
    for number, end in ENDS.items():
        entries += [certified(i, number, end + i / 10, sent=2000 * (i + 1) * int(end)) for i in range(3)]
    nodes = (NodeFacts(index=i, peer_id="abc"[i], outcome="running", lives=((BEGAN, BEGAN + 40),)) for i in range(3))
    return RunRecord(
        scenario=Scenario(nodes=3, rounds=6),
        began_at=BEGAN,
        ended_at=BEGAN + 40,
        entries=(*entries, *extra),
        nodes=tuple(nodes),
        faults=(),
    )


# -- what is computed ----------------------------------------------------------------------------------------


def test_pace_is_the_median_from_one_first_certificate_to_the_next_within_a_time() -> None:
    ends = ends_between(record(), BEGAN + 5.0, BEGAN + 12.0)
    assert ends == [BEGAN + at for at in (5.0, 7.0, 9.0, 12.0)]
    assert pace_s(ends) == 2.0
    assert pace_s(ends_between(record(), BEGAN + 12.5, BEGAN + 31.0)) is None
    assert ends_between(record(), BEGAN + 13.0, BEGAN + 29.0) == []


def test_seconds_of_rounds_leave_out_the_first() -> None:
    assert seconds_of_rounds(record()) == Spread(median=2.0, least=2.0, most=pytest.approx(18.0))
    assert seconds_of_rounds(replace(record(), entries=(certified(0, 1, 5.0),))) is None


def test_evictions_are_of_a_peer_in_a_round_once_and_not_of_the_first_round_or_of_who_is_struck() -> None:
    plans = [
        told(0, 4.0, Planned(round=1, evicted=("b",))),
        told(0, 8.0, Planned(round=3, evicted=("b",))),
        told(2, 8.1, Planned(round=3, attempt=1, evicted=("b", "c"))),
        told(0, 20.0, Planned(round=5, evicted=("b",))),
    ]
    found = record(*plans)
    assert evictions(found, ()) == 3
    assert evictions(found, {1}) == 1


def test_links_and_deaths_are_counted_over_all_nodes_but_no_leave() -> None:
    found = record(
        told(0, 1.0, Linked(peer="b")),
        told(1, 1.0, Linked(peer="a")),
        told(1, 2.0, Lost(peer="a")),
        told(2, 3.0, Died(peer="a")),
        told(0, 4.0, Died(peer="b", left=True)),
        told(2, 5.0, Revived(peer="a")),
    )
    assert (count_of(found, Linked), count_of(found, Lost), count_of(found, Revived)) == (2, 1, 1)
    assert deaths_announced(found) == 1


def test_control_is_what_a_node_sent_between_its_first_and_last_round() -> None:
    assert control_kb_s(record()) == pytest.approx(2 * 2000 * 27 / 27 / 1000)
    assert control_kb_s(replace(record(), entries=(certified(0, 1, 5.0, sent=9),))) is None


def test_fewest_contributors_are_of_the_rounds_that_began_since_then() -> None:
    found = record(certified(0, 6, 32.0, contributors=2), certified(0, 4, 12.0, contributors=1))
    assert fewest_contributors(found, BEGAN + 8.0) == 1, "the third was under way"
    assert fewest_contributors(found, BEGAN + 9.05) == 2, "the fourth was under way, be it certified by some only"
    assert fewest_contributors(found, BEGAN + 31.0) == 0, "the last was under way"


def test_a_death_lasts_until_its_node_revives_the_peer_or_links_with_it_or_until_the_end() -> None:
    found = record(
        told(0, 5.0, Died(peer="c")),  # before the time
        told(0, 6.0, Revived(peer="c")),
        told(0, 11.0, Died(peer="c")),
        told(1, 12.0, Died(peer="c")),
        told(1, 13.0, Died(peer="a")),  # who is not held
        told(2, 14.0, Died(peer="a")),  # what one says who is held itself
        told(0, 15.5, Revived(peer="c")),
        told(0, 16.0, Died(peer="c")),
        told(0, 17.0, Linked(peer="c")),
        told(0, 18.0, Died(peer="c", left=True)),
        told(0, 29.0, Died(peer="c")),  # after it
    )
    assert times_dead(found, frozenset("c"), BEGAN + 10, BEGAN + 20) == (4.5, 1.0, 28.0)


def test_rest_is_the_median_daemon_over_all_times_of_rest() -> None:
    rests = [
        Rest(seconds=6.0, used_s={0: 0.01, 1: 0.03, 2: 0.3}),
        Rest(seconds=4.0, used_s={0: 0.01, 1: 0.02, 2: 0.1}),
    ]
    assert rest_percent(rests) == pytest.approx(100 * 0.05 / 10)
    assert rest_percent([]) is None


def test_a_time_of_rest_is_between_the_looks_before_anybody_contributed() -> None:
    looks = [Look(at=BEGAN + at, used_s={0: at / 100, 1: at / 10}) for at in (1.0, 2.0, 4.0, 5.0)]
    rest = rest_of(looks, BEGAN + 4.5)
    assert rest is not None
    assert (rest.seconds, rest.used_s) == (3.0, {0: pytest.approx(0.03), 1: pytest.approx(0.3)})
    assert rest_of(looks, BEGAN + 1.5) is None
    assert rest_of([], BEGAN) is None


# -- targets -------------------------------------------------------------------------------------------------


GOOD = ScaleResult(
    bench=ScaleBench(nodes=16),
    not_default=("sync.codec = fp32",),
    load=0.1,
    start_s=9.0,
    rounds=6,
    certified=6,
    wrong_values=0,
    forks=0,
    unverified=(),
    missed={},
    evictions=0,
    round_s=Spread.of([10.5]),
    links_made=240,
    links_lost=0,
    deaths=0,
    revivals=0,
    control_kb_s=7.0,
    rest_percent=0.4,
    rest_s=50.0,
    pss_mb=60.0,
    steps=Steps(made=100, lost=0, twice=0, problems=()),
)
STRUCK = Struck(
    means="a cgroup's quota", certified=3, deaths=(), before_s=10.0, during_s=12.0, after_s=10.5, contributors=16
)
HELD = msgspec.structs.replace(GOOD, bench=ScaleBench(nodes=16, held=4), struck=STRUCK, evictions=2)
STOPPED = msgspec.structs.replace(
    GOOD,
    bench=ScaleBench(nodes=16, stopped=8, seconds=30.0),
    struck=msgspec.structs.replace(STRUCK, certified=0, during_s=None),
)


APART = msgspec.structs.replace(
    GOOD,
    bench=ScaleBench(nodes=16, apart=8),
    struck=msgspec.structs.replace(STRUCK, sides=Sides(rounds=(3, 0), alone=240, one_chain_s=2.0)),
)


@pytest.mark.parametrize("result", [GOOD, HELD, STOPPED, APART], ids=["alone", "held", "stopped", "apart"])
def test_a_run_in_which_all_is_well_misses_nothing(result: ScaleResult) -> None:
    assert missed(result.rows) == []


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"certified": 5}, "rounds that were not certified: 1, wanted at most 0"),
        ({"wrong_values": 2}, "wrong values: 2, wanted at most 0"),
        ({"forks": 1}, "forks, and states that differ: 1, wanted at most 0"),
        ({"unverified": ("round 2: …",)}, "what could not be verified: 1, wanted at most 0"),
        ({"missed": {3: (2, 4)}}, "founders that nothing struck and that missed rounds: 1, wanted at most 0"),
        ({"evictions": 1}, "evictions of the living after the first round: 1, wanted at most 0"),
        ({"control_kb_s": 8.5}, "control that a voter sends: 8.5 kB/s, wanted at most 8"),
        ({"rest_percent": 0.6}, "processor time of a daemon at rest: 0.6 % of a core, wanted at most 0.5"),
        ({"steps": Steps(made=9, lost=1, twice=0, problems=())}, "steps lost: 1, wanted at most 0"),
        ({"steps": Steps(made=9, lost=0, twice=0, problems=("x",))}, "steps counted twice: 1, wanted at most 0"),
    ],
)
def test_whatever_is_not_as_it_should_be_is_missed(wrong: dict[str, object], says: str) -> None:
    result = msgspec.structs.replace(GOOD, **wrong)
    assert [str(row) for row in missed(result.rows)] == [says]
    assert any(says.partition(":")[0] in line for line in CASE.told(result))


@pytest.mark.parametrize(
    ("result", "wrong", "says"),
    [
        (HELD, {"certified": 0}, "rounds certified while some are held, or apart: 0, wanted at least 1"),
        (HELD, {"deaths": (2.0, 3.0)}, "times that one who is held was declared dead: 2, wanted at most 0"),
        (HELD, {"after_s": 11.5}, "pace from 10 s after: 0.8696 of that before, wanted at least 0.9"),
        (STOPPED, {"after_s": None}, "pace from 10 s after: 0 of that before, wanted at least 0.9"),
        (STOPPED, {"contributors": 15}, "contributors of every round from 10 s after: 15, wanted at least 16"),
    ],
)
def test_what_a_strike_leaves_is_missed(result: ScaleResult, wrong: dict[str, object], says: str) -> None:
    struck = msgspec.structs.replace(result.struck, **wrong)
    assert [str(row) for row in missed(msgspec.structs.replace(result, struck=struck).rows)] == [says]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"rounds": (0, 0)}, "rounds certified while some are held, or apart: 0, wanted at least 1"),
        ({"rounds": (3, 1)}, "rounds certified by the other side, too: 1, wanted at most 0"),
        ({"alone": 0}, "steps that the other side made meanwhile: 0, wanted at least 1"),
        ({"one_chain_s": 10.5}, "one chain after the heal: 10.5 s, wanted at most 10"),
        ({"one_chain_s": None}, "one chain after the heal: inf s, wanted at most 10"),
    ],
)
def test_what_sides_do_that_do_not_reach_each_other_is_missed(wrong: dict[str, object], says: str) -> None:
    assert APART.struck is not None
    struck = msgspec.structs.replace(APART.struck, sides=msgspec.structs.replace(APART.struck.sides, **wrong))
    assert [str(row) for row in missed(msgspec.structs.replace(APART, struck=struck).rows)] == [says]


def test_rounds_of_a_side_and_the_one_chain_are_read_off_the_logs() -> None:
    found = record(told(2, 33.0, CaughtUp(round=7)), certified(0, 7, 33.5), certified(1, 7, 34.0))
    assert rounds_of(found, {0}, 2, BEGAN + 8.0, BEGAN + 30.0) == {3, 4, 5}
    assert rounds_of(found, {2}, 3, BEGAN + 8.0, BEGAN + 30.0) == {4}
    assert all_past_s(found, 7, BEGAN + 30.0) == 4.0
    assert all_past_s(found, 6, BEGAN + 40.0) == 0.0
    assert all_past_s(found, 8, BEGAN) is None


def test_a_voter_has_a_target_of_control_where_one_was_set_and_only_where_the_processor_is_the_daemons() -> None:
    names = {row.name: row.target for row in GOOD.rows}
    assert names["control that a voter sends"] == 8.0
    larger = {row.name: row.target for row in msgspec.structs.replace(GOOD, bench=ScaleBench(nodes=64)).rows}
    assert larger["control that a voter sends"] == 30.0
    other = {row.name: row.target for row in msgspec.structs.replace(GOOD, bench=ScaleBench(nodes=32)).rows}
    assert other["control that a voter sends"] is None
    for bench in (ScaleBench(nodes=16, trainers="regression"), ScaleBench(nodes=16, beside_loops=2)):
        told_of = [row.name for row in msgspec.structs.replace(GOOD, bench=bench).rows]
        assert "control that a voter sends" not in told_of
        assert "processor time of a daemon at rest" not in told_of


def test_result_is_told_whole() -> None:
    document = json.loads(msgspec.json.encode(CASE.document(msgspec.structs.replace(HELD, missed={3: (2, 4)}))))
    assert (document["missed"], document["struck"]["means"]) == ({"3": [2, 4]}, "a cgroup's quota")
    told = {name.strip(): text for name, _, text in (line.partition("  ") for line in CASE.told(HELD))}
    assert {name: told[name].strip() for name in ("bench.held", "struck.means", "not_default")} == {
        "bench.held": "4", "struck.means": "a cgroup's quota", "not_default": "sync.codec = fp32"
    }  # fmt: skip


# -- options and settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"held": 1, "stopped": 1}, "--held, --stopped, --apart are a measurement each"),
        ({"nodes": 4, "apart": 4}, "--apart: 4 is not in 0..3"),
        ({"nodes": 4, "held": 4}, "--held: 4 is not in 0..3"),
        ({"nodes": 4, "stopped": -1}, "--stopped: -1 is not in 0..3"),
        ({"held": 1, "trainers": "regression"}, "leave --trainers"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ScaleBench(**options)  # type: ignore[arg-type]


def test_the_last_nodes_are_struck() -> None:
    assert list(ScaleBench(nodes=5, held=2).struck) == list(ScaleBench(nodes=5, apart=2).struck) == [3, 4]
    assert not ScaleBench(nodes=5).struck


def test_settings_that_init_does_not_write_are_told() -> None:
    founders = [Identity.from_seed(bytes([number]) * 32).peer_id for number in range(3)]
    trained = scale_manifest(ScaleBench(nodes=3, trainers="regression"), founders)
    assert (trained.swarm.founders, trained.workload.name, not_default(trained)) == (founders, "regression", ())
    waits = scale_manifest(ScaleBench(nodes=3, round_s=4.0), founders)
    assert waits.workload.options == {"numel": 50_000, "step_s": 0.2}
    assert [setting.split(" = ")[0] for setting in not_default(waits)] == [
        "round.chunk_values",
        "round.staleness_rounds",
        "sync.balance",
        "sync.codec",
        "sync.inner_steps",
        "workload.name",
        "workload.options",
    ]
