"""Real nodes of which some have no connection at all: they are in the same certified rounds, through the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.testnet.links.namespaces import Uplink
from shoal.testnet.reports.report import Report
from shoal.testnet.scenario import Fault
from shoal.testnet.swarm import REDUCE_DEADLINE_S
from tests.testnet.links_lab import (
    assert_everyone_is_in_every_chunk,
    events,
    needs_namespaces,
    plan,
    relays,
    run,
    scenario,
)

pytestmark = needs_namespaces


def assert_nobody_was_given_up(report: Report, out: Path) -> None:
    for node in report.nodes:
        end = events(out, node.index, "certified")[-1]["at"]  # after it the swarm is stopped
        missing = [e for kind in ("suspected", "died") for e in events(out, node.index, kind) if e["at"] < end]
        assert [e for e in missing if not e.get("left")] == []  # who was done first has taken its leave
    assert all(plan(report, out, r.round).evicted == () for r in report.rounds)
    assert all(node.rounds == len(report.rounds) for node in report.nodes)


def assert_told(report: Report, out: Path, *pairs: tuple[int, int]) -> None:
    """Both of each pair found that they do not reach each other."""
    peer = {node.index: node.peer_id for node in report.nodes}
    for one, other in pairs:
        for me, far in ((one, other), (other, one)):
            assert peer[far] in {event["peer"] for event in events(out, me, "detoured")}


@pytest.mark.long
def test_two_pairs_without_any_connection_are_in_every_round(tmp_path: Path) -> None:
    """Whoever leads is in one of the pairs, so one member's contribution, report and vote come through others."""
    apart = (Fault(kind="partition", groups=((a,), (b,)), round=2, phase="train") for a, b in ((0, 1), (2, 3)))
    report = run(scenario(4, *apart), tmp_path)
    assert_everyone_is_in_every_chunk(report)
    assert_nobody_was_given_up(report, tmp_path)
    assert_told(report, tmp_path, (0, 1), (2, 3))
    assert [relays(report, tmp_path, round) != [] for round in (1, 2, 3, 4)] == [False, True, True, True]
    assert [(one, other) for one, other, _ in relays(report, tmp_path, 4)] == [(0, 1), (2, 3)]
    assert max(r.total_s for r in report.rounds) < REDUCE_DEADLINE_S


@pytest.mark.long
def test_pair_that_loses_every_connection_in_the_midst_of_a_reduction(tmp_path: Path) -> None:
    apart = Fault(kind="partition", groups=((2,), (3,)), round=2, phase="reduce", progress=0.3)
    narrow = Uplink(nodes=(2,), rate_mbit=6)  # so that something is still under way between the two
    report = run(scenario(3, apart, uplinks=(narrow,)), tmp_path)
    assert_everyone_is_in_every_chunk(report)
    assert_nobody_was_given_up(report, tmp_path)
    assert_told(report, tmp_path, (2, 3))
    assert [(one, other) for one, other, _ in relays(report, tmp_path, 3)] == [(2, 3)]
    assert max(r.total_s for r in report.rounds) < REDUCE_DEADLINE_S
