"""Rounds of several terms in what a testnet reports: what is a fork, and what only looks like one."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from shoal.lab.campaigns.campaign_check import broken_votes
from shoal.node.reporting.event_log import line_of, parse_event
from shoal.node.reporting.events import Certified, Event, RolledBack, Signed, ViewChanged, Voted
from shoal.testnet.check import Witness
from shoal.testnet.faults import FaultRecord
from shoal.testnet.journal import Entry
from shoal.testnet.reports.report import count_forks
from shoal.testnet.run_record import RunRecord, flipped_rounds
from shoal.testnet.scenario import Fault, Scenario


def certified(term: str, round: int, digest: str) -> Certified:
    return Certified(at=0.0, term=term, round=round, digest=digest, value=f"value of {digest}")


def rolled_back(term: str, round: int, to: int, digest: str) -> RolledBack:
    value = f"back to {digest}"
    return RolledBack(at=0.0, term=term, round=round, to=to, digest=digest, value=value)


def forks(*events: Event) -> int:
    entries = tuple(Entry(number, event) for number, event in enumerate(events))
    scenario = Scenario(nodes=4, rounds=9)
    run_record = RunRecord(scenario=scenario, began_at=0.0, ended_at=1.0, entries=entries, nodes=(), faults=())
    return count_forks(run_record.decided())


@pytest.mark.parametrize(
    ("events", "count"),
    [
        ([certified("0.0", 5, "a"), certified("0.0", 5, "a")], 0),
        ([certified("0.0", 5, "a"), certified("0.0", 5, "b")], 1),
        ([certified("0.0", 5, "a"), certified("0.1", 5, "b")], 0),
        ([rolled_back("0.0", 6, 4, "a"), rolled_back("0.0", 6, 4, "a")], 0),
        ([rolled_back("0.0", 6, 4, "a"), rolled_back("0.0", 6, 3, "b")], 1),
        ([rolled_back("0.0", 6, 4, "a"), certified("0.0", 6, "b")], 1),
        ([rolled_back("0.0", 6, 4, "a"), certified("0.0", 6, "a")], 1),  # the same state, but not the same decision
        ([rolled_back("0.0", 6, 4, "a"), certified("0.0", 4, "a"), certified("0.1", 6, "c")], 0),
    ],
)
def test_two_decisions_of_one_term_and_round_are_a_fork(events: list[Event], count: int) -> None:
    assert forks(*events) == count


def test_round_amid_which_a_node_s_files_are_struck_is_the_one_that_it_certifies_next() -> None:
    ends = {0: (1.0, 2.0, 3.0), 1: (1.1, 2.1, 3.1)}
    entries = tuple(
        Entry(node, msgspec.structs.replace(certified("0.0", round, "a"), at=at))
        for node, times in ends.items()
        for round, at in enumerate(times, 1)
    )
    faults = (
        FaultRecord(fault=Fault(kind="corrupt", node=0, round=2), at=1.5, done=True),
        FaultRecord(fault=Fault(kind="corrupt", node=0, round=3)),
        FaultRecord(fault=Fault(kind="kill", node=1, round=2), at=1.5, done=True),
        FaultRecord(fault=Fault(kind="corrupt", node=1, round=3), at=3.5, done=True),
    )
    scenario = Scenario(nodes=2, rounds=3)
    run_record = RunRecord(scenario=scenario, began_at=0.0, ended_at=4.0, entries=entries, nodes=(), faults=faults)
    assert flipped_rounds(run_record, 0) == {("0.0", 2)}
    assert flipped_rounds(run_record, 1) == frozenset()


def test_rollback_is_read_from_the_log_as_the_node_writes_it() -> None:
    line = json.dumps(
        {
            "at": 1.5,
            "event": "rolled_back",
            "to": 4,
            "term": "0.0",
            "round": 6,
            "digest": "a",
            "value": "b",
            "members": [],
        }
    )
    assert parse_event(line.encode()) == RolledBack(at=1.5, term="0.0", round=6, to=4, digest="a", value="b")


def test_votes_of_two_terms_do_not_contradict_each_other(tmp_path: Path) -> None:
    def broken(*events: tuple[type[Signed], str, int]) -> int:
        lines = [line_of(kind(at=1.0, term=term, round=5, view=view)) for kind, term, view in events]
        (tmp_path / "events.jsonl").write_bytes(b"".join(lines))
        return len(broken_votes(Witness(index=0, peer_id="12D3A", folder=tmp_path), 1, 9))  # type: ignore[arg-type]

    assert broken((Voted, "0.0", 0), (Voted, "0.1", 0)) == 0
    assert broken((ViewChanged, "0.0", 3), (Voted, "0.1", 0)) == 0
    assert broken((Voted, "0.1", 0), (Voted, "0.1", 0)) == 1
    assert broken((ViewChanged, "0.1", 3), (Voted, "0.1", 0)) == 1
