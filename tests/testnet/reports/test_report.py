"""The report: its schema, the exit rule, forks, and how long faults delayed their rounds."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from msgspec import structs

from shoal.node.reporting.events import (
    AgentDied,
    CaughtUp,
    Certified,
    Contributed,
    Evaluated,
    Event,
    Evidence,
    Forked,
    Left,
    Linked,
    Planned,
    RoundStarted,
    Started,
    Stepped,
    TrainerRestarted,
)
from shoal.testnet.check import Check, RoundCheck
from shoal.testnet.delays import round_durations, undisturbed_median
from shoal.testnet.faults import FaultRecord
from shoal.testnet.journal import Entry
from shoal.testnet.reports.report import Report, failures, make_report, ok, to_json
from shoal.testnet.run_record import NodeFacts, Outcome, RunRecord, settled_rounds, tokens_by_round
from shoal.testnet.scenario import Fault, Scenario

BEGAN = 1000.0
NUMEL = 800_000


def certified(node: int, round: int, at: float, *, digest: str | None = None, term: str = "0.0") -> Entry:
    event = Certified(
        at=BEGAN + at,
        term=term,
        round=round,
        digest=digest or f"digest {round}",
        value=f"value {round}",
        members=("a", "b", "c", "d"),
        contributors=4,
        coverage=0.5,
        tokens=64,
        reduce_s=0.1 * (node + 1),
        total_s=1.0,
        lanes_sent=100 * round,
        control_sent=7 * round,
    )
    return Entry(node, event)


def started(node: int, round: int, at: float) -> Entry:
    return Entry(node, RoundStarted(at=BEGAN + at, round=round))


def evaluated(round: int, loss: float) -> Entry:
    return Entry(0, Evaluated(at=BEGAN, round=round, loss=loss, metric="bits per byte"))


def plain(node: int, event: Event) -> Entry:
    return Entry(node, structs.replace(event, at=BEGAN))


def facts(index: int, outcome: Outcome = "running") -> NodeFacts:
    return NodeFacts(index=index, peer_id=f"peer {index}", outcome=outcome, lives=((BEGAN, BEGAN + 20.0),))


def kill(round: int = 3, *, at: float | None = 6.5, done: bool = True) -> FaultRecord:
    fault = Fault(kind="kill", node=2, round=round, phase="reduce", progress=0.4)
    return FaultRecord(fault=fault, at=None if at is None else BEGAN + at, done=done)


ENDS = {1: 3.0, 2: 5.0, 3: 10.5, 4: 12.4, 5: 14.5}
"""Round 1 waits for start-up, round 3 for the fault; the others take 2.0, 1.9 and 2.1 s."""


def entries() -> list[Entry]:
    log = [evaluated(0, 8.0)]
    for number, end in ENDS.items():
        for node in (0, 1, 2, 3):
            if node != 2 or number < 3:
                begin = ENDS.get(number - 1, 0.5)
                log += [started(node, number, begin), certified(node, number, end + 0.001 * node)]
        log.append(evaluated(number, 8.0 - number / 10))
    return log


def run_record(*extra: Entry, faults: tuple[FaultRecord, ...] | None = None) -> RunRecord:
    return RunRecord(
        scenario=Scenario(rounds=5, faults=tuple(record.fault for record in faults or (kill(),))),
        began_at=BEGAN,
        ended_at=BEGAN + 16.25,
        entries=(*entries(), *extra),
        nodes=(facts(0), facts(1), facts(2, "killed"), facts(3)),
        faults=(kill(),) if faults is None else faults,
    )


def check(wrong_values: int = 0) -> Check:
    first = RoundCheck(term="0.0", round=1, numel=NUMEL, contributors=3, coverage=0.75, updates_compared=4)
    others = [replace(first, round=number) for number in range(2, 6)]
    return Check(rounds=(replace(first, wrong_values=wrong_values), *others))


def report(*extra: Entry, faults: tuple[FaultRecord, ...] | None = None) -> Report:
    return make_report(run_record(*extra, faults=faults), check())


def test_report_has_the_documented_shape() -> None:
    document = json.loads(to_json(report()))
    assert {"scenario", "wall_s", "rounds_certified", "forks", "wrong_values", "digests_equal"} <= set(document)
    assert document["scenario"]["fault"][0]["kind"] == "kill"
    assert document["wall_s"] == 16.25
    assert (document["rounds_certified"], document["forks"], document["wrong_values"]) == (5, 0, 0)
    assert document["digests_equal"] is True
    node = document["nodes"][2]
    assert (node["index"], node["peer_id"], node["outcome"], node["rounds"]) == (2, "peer 2", "killed", 2)
    assert node["digests"] == {"1": "digest 1", "2": "digest 2"}
    assert document["loss"] == {
        "metric": "bits per byte",
        "first": 8.0,
        "last": 7.5,
        "by_round": [7.9, 7.8, 7.7, 7.6, 7.5],
    }
    assert document["faults"] == [
        {"kind": "kill", "node": 2, "round": 3, "phase": "reduce", "at_s": 6.5, "delay_s": 3.5}
        | {"error": None, "unmet": None, "groups": []}
    ]
    assert document["rounds"][0] == {
        "round": 1,
        "members": 4,
        "contributors": 3,
        "coverage": 0.75,
        "tokens": 64,
        "reduce_s": 0.25,
        "total_s": 1.0,
    }
    assert document["bytes"] == {
        "lanes_sent": 3 * 500 + 200,
        "control_sent": 3 * 35 + 14,
        "fp32_allreduce_every_step": 5 * 20 * 6 * NUMEL * 4,
    }


def test_report_takes_the_logged_coverage_where_nothing_was_checked() -> None:
    made = make_report(run_record(), Check(rounds=()))
    assert (made.rounds[0].contributors, made.rounds[0].coverage) == (4, 0.5)


def test_delay_is_what_the_round_took_beyond_the_median_of_undisturbed_ones() -> None:
    durations = round_durations(run_record())
    assert durations == pytest.approx({1: 2.501, 2: 2.0, 3: 5.5, 4: 1.9, 5: 2.1}, abs=1e-6)
    assert undisturbed_median(run_record(), durations) == pytest.approx(2.0)


def test_delay_counts_no_round_as_undisturbed_into_which_a_stop_reached() -> None:
    stop = FaultRecord(
        fault=Fault(kind="stop", node=1, round=3, duration_s=6.0), at=BEGAN + 6.0, done=True
    )  # until 12.0, in round 4
    disturbed = run_record(faults=(stop,))
    assert undisturbed_median(disturbed, round_durations(disturbed)) == pytest.approx((2.0 + 2.1) / 2)


def test_delay_is_unknown_if_the_fault_did_not_happen_or_nothing_compares() -> None:
    (missed,) = report(faults=(kill(at=None, done=False),)).faults
    assert (missed.at_s, missed.delay_s, missed.error) == (None, None, "its moment never came")
    every = tuple(kill(round=number) for number in range(1, 6))
    assert {fault.delay_s for fault in report(faults=every).faults} == {None}


def test_forks_are_counted_by_term_and_round() -> None:
    assert report(certified(3, 4, 12.5, digest="other")).forks == 1
    assert not report(certified(3, 4, 12.5, digest="other")).digests_equal
    again = (certified(0, 4, 13.0, digest="after a rollback", term="0.1"),)
    assert (report(*again).forks, report(*again).digests_equal) == (0, True)
    two = (certified(3, 4, 12.5, digest="other"), certified(1, 5, 12.5, digest="other"))
    assert report(*two).forks == 2


def test_two_certified_values_of_one_state_do_not_pass() -> None:
    entry = certified(3, 4, 12.5)
    made = report(Entry(3, msgspec.structs.replace(entry.event, value="other")))
    assert (made.forks, made.unverified) == (0, ("round 4: 2 certified values",))
    assert not ok(made)


def test_rounds_beyond_the_scenario_count_for_nothing_but_forks() -> None:
    after = (certified(0, 6, 15.0), certified(1, 6, 15.0), evaluated(6, 1.0))
    made = report(*after)
    assert (made.rounds_certified, made.forks, made.loss.last, len(made.rounds)) == (5, 0, 7.5, 5)
    assert ok(made)
    forked = report(*after, certified(3, 6, 15.0, digest="x"))
    assert (forked.forks, ok(forked)) == (1, False)


def test_ok_wants_everything_right() -> None:
    good = report()
    assert ok(good)
    for wrong in (
        {"rounds_certified": 4},
        {"forks": 1},
        {"wrong_values": 1},
        {"digests_equal": False},
        {"unaffected_absent": (3,)},
        {"unverified": ("round 2: …",)},
        {"faults": report(faults=(kill(at=None, done=False),)).faults},
        {"faults": report(faults=(kill(done=False),)).faults},
    ):
        assert not ok(msgspec.structs.replace(good, **wrong)), wrong


def without(node: int, *rounds: int) -> RunRecord:
    """The run, in which a node certified none of these rounds, but was told of them by others."""
    told = [
        Entry(node, CaughtUp(at=e.event.at, round=e.event.round))
        if e.node == node and isinstance(e.event, Certified) and e.event.round in rounds
        else e
        for e in run_record().entries
    ]
    return replace(run_record(), entries=tuple(told))


def test_a_founder_that_no_fault_struck_and_that_missed_a_round_does_not_pass() -> None:
    assert run_record().missed() == {0: (), 1: (), 3: ()}
    made = make_report(without(3, *ENDS), check())
    assert (made.rounds_certified, made.unaffected_absent, made.nodes[3].missed) == (5, (3,), (1, 2, 3, 4, 5))
    assert failures(made) == ["no fault struck node 3, and it took part in no round"]
    assert not ok(made)
    some = make_report(without(3, 4), check())
    assert (some.nodes[3].missed, some.nodes[3].certified, some.unaffected_absent) == ((4,), 4, (3,))
    assert failures(some) == ["no fault struck node 3, and it missed round 4"]
    assert not ok(some)


def test_a_node_that_ended_by_itself_missed_what_came_after() -> None:
    ended = without(3, 4, 5)
    made = make_report(replace(ended, nodes=(*ended.nodes[:3], facts(3, "crashed"))), check())
    assert failures(made) == ["no fault struck node 3, and it ended by itself and missed rounds 4, 5"]
    assert not ok(made)


def with_last(**changes: Any) -> RunRecord:
    """The run, of whose last node this is known too."""
    *others, last = run_record().nodes
    return replace(run_record(), nodes=(*others, replace(last, **changes)))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"crashes": 1}, "node 3 ended by itself; see nodes/3/log.txt"),
        ({"hung": True}, "node 3 did not end in good order when it was asked to leave; see nodes/3/log.txt"),
        ({"absent_at_end": True}, "node 3 took part neither in the last round nor in one after it"),
    ],
)
@pytest.mark.parametrize("struck", [False, True])
def test_how_a_node_ended_can_fail_a_run_in_which_it_missed_nothing(
    changes: dict[str, object], what: str, struck: bool
) -> None:
    back = FaultRecord(fault=Fault(kind="restart", node=3, round=2), at=BEGAN + 4.0, done=True)
    faults = (kill(), back) if struck else (kill(),)
    made = make_report(replace(with_last(**changes), faults=faults), check())
    assert (made.unaffected_absent, failures(made), ok(made)) == ((), [what], False)


def test_a_newcomer_that_never_got_in_does_not_pass() -> None:
    joins = FaultRecord(fault=Fault(kind="join", node=3, round=2), at=BEGAN + 5.0, done=True)
    never = replace(without(3, *ENDS), scenario=Scenario(nodes=3, rounds=5), faults=(kill(), joins))
    assert never.missed()[3] == ()
    *others, last = never.nodes
    made = make_report(replace(never, nodes=(*others, replace(last, absent_at_end=True))), check())
    assert failures(made) == ["node 3 took part neither in the last round nor in one after it"]
    assert not ok(made)


def test_a_run_that_was_cut_short_does_not_pass_though_all_rounds_are_certified() -> None:
    made = make_report(replace(run_record(), trouble="not finished after 9 s"), check())
    assert (made.rounds_certified, failures(made), ok(made)) == (5, ["not finished after 9 s"], False)


def test_what_sound_nodes_never_say_does_not_pass() -> None:
    said = (
        (Forked(round=3), "node 1 saw two certificates of round 3, and signs no more"),
        (Evidence(peer="peer 0", round=3, kind="false_sum"), "node 1 has proof that peer 0 lied in round 3: false_sum"),
        (TrainerRestarted(cause="exit code 9"), "no fault struck node 1, and its trainer died: exit code 9"),
        (AgentDied(cause="exit code 9"), "no fault struck node 1, and its trainer died: exit code 9"),
    )
    for event, line in said:
        made = report(plain(1, event))
        assert (made.alarms, failures(made), ok(made)) == ((line,), [line], False)
    assert ok(report(plain(2, TrainerRestarted(cause="its node was killed"))))


def test_a_run_whose_nodes_exchanged_nothing_does_not_pass() -> None:
    alone = replace(check(), rounds=tuple(replace(one, coverage=0.0, contributors=0) for one in check().rounds))
    assert failures(make_report(run_record(), alone)) == ["in no round did anything that one node made reach another"]


def test_a_run_for_tokens_ends_with_the_round_that_certifies_the_last_of_them() -> None:
    def of(tokens: int, left_out: Entry | None = None) -> Report:
        scenario = structs.replace(run_record().scenario, tokens=tokens, rounds=100)
        kept = tuple(entry for entry in run_record().entries if entry != left_out)
        return make_report(replace(run_record(), scenario=scenario, entries=kept), check())

    assert (of(5 * 64).wanted_rounds, ok(of(5 * 64))) == (5, True)
    # What is certified while the others are asked to leave may be missed.
    late = certified(3, 5, 14.503)
    assert late in run_record().entries
    assert (of(4 * 64, late).wanted_rounds, of(4 * 64, late).rounds_certified, ok(of(4 * 64, late))) == (4, 5, True)
    assert failures(of(4 * 64 + 1, late)) == ["no fault struck node 3, and it missed round 5"]
    assert failures(of(5 * 64 + 1)) == ["320 of 321 tokens were certified, in 5 rounds"]


def test_tokens_of_a_round_are_those_of_its_certificate_or_of_all_its_steps() -> None:
    assert tokens_by_round([Certified(round=2, digest="", tokens=64)] * 3) == {2: 64}
    again = Certified(round=2, term="0.1", digest="", tokens=32)
    assert tokens_by_round([again, Certified(round=2, digest="", tokens=64)]) == {2: 32}
    assert tokens_by_round([Stepped(round=1, tokens=8), Stepped(round=1, tokens=4)]) == {1: 12}


def test_who_was_struck_may_miss_rounds_and_who_came_later_those_before() -> None:
    absent = without(3, *ENDS)
    stop = FaultRecord(fault=Fault(kind="stop", node=3, round=1), at=BEGAN + 1.0, done=True)
    apart = FaultRecord(fault=Fault(kind="partition", groups=((0,), (3,)), round=1), at=BEGAN + 1.0, done=True)
    for fault in (stop, apart):
        assert replace(absent, faults=(kill(), fault)).unaffected_absent() == ()
    assert replace(absent, faults=(kill(), replace(stop, at=None))).unaffected_absent() == (3,)
    assert replace(absent, nodes=(*absent.nodes[:3], facts(3, "left"))).unaffected_absent() == (3,), "of itself"
    joins = FaultRecord(fault=Fault(kind="join", node=3, round=2), at=BEGAN + 5.0, done=True)
    came = Scenario(nodes=3, rounds=5)
    for rounds, missed in (((1, 2), ()), ((1, 2, 4), (4,)), (tuple(ENDS), ())):
        later = replace(without(3, *rounds), scenario=came, faults=(kill(), joins))
        assert later.missed()[3] == missed
    nothing = replace(absent, entries=())
    assert (nothing.missed(), nothing.unaffected_absent()) == ({0: (), 1: (), 3: ()}, ())


def test_rounds_of_ones_own_are_missed_all_or_none() -> None:
    shared = Scenario(nodes=4, rounds=5, strategy="gossip")
    assert replace(without(3, 4, 5), scenario=shared).missed()[3] == ()
    assert replace(without(3, *ENDS), scenario=shared).missed()[3] == (1, 2, 3, 4, 5)


def test_contributions_count_where_their_round_was_certified() -> None:
    made = make_report(run_record(*(plain(1, Contributed(round=number)) for number in (1, 2, 2, 6))), check())
    assert [node.contributed for node in made.nodes] == [0, 2, 0, 0]


def test_evictions_of_who_runs_and_was_not_struck_are_counted_once_a_round() -> None:
    plans = [
        Entry(0, Planned(at=BEGAN + 9.0, round=3, evicted=("peer 2", "peer 3"))),
        Entry(1, Planned(at=BEGAN + 9.5, round=3, attempt=1, evicted=("peer 2", "peer 3"))),
        Entry(0, Planned(at=BEGAN + 11.0, round=4, evicted=("peer 3", "a stranger"))),
        Entry(0, Planned(at=BEGAN + 25.0, round=5, evicted=("peer 1",))),
    ]
    made = make_report(run_record(*plans), check())
    assert made.evicted_alive == 2, "the second was struck, the first had ended"
    assert ok(made)


def test_wrong_values_come_from_the_check() -> None:
    made = make_report(run_record(), check(wrong_values=3))
    assert made.wrong_values == 3
    assert not ok(made)


def test_nothing_certified_is_not_equal() -> None:
    empty = replace(run_record(), entries=())
    made = make_report(empty, Check(rounds=()))
    assert (made.rounds_certified, made.digests_equal, made.loss.first, made.loss.by_round) == (0, False, None, ())
    assert not ok(made)


def test_spans_are_from_the_start_of_a_round_to_its_certificate_or_catching_up() -> None:
    caught_up = Entry(2, CaughtUp(at=BEGAN + 11.0, round=3))
    spans = report(started(2, 3, 5.0), caught_up, started(2, 4, 11.0)).nodes[2].spans
    assert [(span.round, span.start_s, span.end_s) for span in spans] == [
        (1, 0.5, 3.002),
        (2, 3.0, 5.002),
        (3, 5.0, 11.0),
        (4, 11.0, None),
    ]


def test_bytes_are_the_last_word_of_each_process() -> None:
    again = (plain(2, Started()), certified(2, 5, 14.6))
    assert report(*again).bytes.lanes_sent == 3 * 500 + 200 + 500


def test_a_round_is_settled_once_its_node_lived_on() -> None:
    log = [
        certified(1, 1, 1.0),
        plain(1, Evaluated(round=1, loss=1.0)),
        certified(1, 2, 2.0),
        plain(1, Started()),
        plain(1, Linked(peer="p")),
    ]
    log += [certified(1, 3, 3.0), certified(0, 9, 9.0), plain(0, Left()), certified(1, 4, 4.0)]
    done = replace(run_record(), entries=tuple(log))
    assert settled_rounds(done, 1) == {("0.0", 1), ("0.0", 3)}


def test_what_should_have_come_of_a_fault_and_did_not_fails_the_run() -> None:
    kept = kill()
    kept.unmet = "node 2 took part in no round within 90 s of its move"
    told = report(faults=(kept,))
    assert told.faults[0].unmet == kept.unmet
    assert not ok(told)
    assert failures(told) == [kept.unmet]


def test_who_had_its_clock_set_may_miss_no_round() -> None:
    clock = FaultRecord(fault=Fault(kind="clock", node=2, round=3, ahead_s=3600.0), at=BEGAN + 6.5, done=True)
    told = report(faults=(clock,))
    assert told.unaffected_absent == (2,)
    assert not ok(told)
    stop = FaultRecord(fault=Fault(kind="stop", node=2, round=3), at=BEGAN + 6.5, done=True)
    assert report(faults=(clock, stop)).unaffected_absent == ()
