"""Real nodes of which some cannot reach each other: relays through a third, connections that are cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.testnet.links.namespaces import Uplink
from shoal.testnet.scenario import Fault
from shoal.testnet.swarm import REDUCE_DEADLINE_S
from tests.testnet.links_lab import (
    PAYLOAD_BYTES,
    assert_everyone_is_in_every_chunk,
    lanes_sent,
    needs_namespaces,
    plan,
    relays,
    run,
    scenario,
)

pytestmark = needs_namespaces

STALLED_S = 4.0
"""More than a round without a stall takes, less than one in which a pair is found to be apart."""


@pytest.mark.long
def test_pair_without_lanes_is_relayed_through_a_third(tmp_path: Path) -> None:
    apart = Fault(kind="partition", groups=((0,), (1,)), traffic="lanes", round=1, phase="train")
    report = run(scenario(4, apart), tmp_path)
    assert_everyone_is_in_every_chunk(report)
    for round in range(1, 5):
        [(one, other, via)] = relays(report, tmp_path, round)
        assert (one, other) == (0, 1)
        assert via in (2, 3)
    # What the two have to say to each other goes through that third, so it sends more than the other one.
    [(_, _, via)] = relays(report, tmp_path, 4)
    beside = 5 - via
    assert lanes_sent(tmp_path, via, 4) > lanes_sent(tmp_path, beside, 4) + PAYLOAD_BYTES / 4
    # It takes a stall to find out; from then on it is known before a round is planned.
    first, *later = report.rounds
    assert first.reduce_s > STALLED_S
    assert max(r.reduce_s for r in later) < STALLED_S


@pytest.mark.long
def test_pair_cut_off_in_the_midst_of_a_reduction_is_relayed_for_the_rest(tmp_path: Path) -> None:
    # As soon as somebody has a final: while contributions are under way between the two. Finals are had from others.
    apart = Fault(kind="partition", groups=((2,), (3,)), traffic="lanes", round=2, phase="reduce", progress=0.1)
    narrow = Uplink(nodes=(2,), rate_mbit=6)
    report = run(scenario(3, apart, uplinks=(narrow,)), tmp_path)
    # Who waits for a share of that uplink may report too late to be listed for the next round; all is counted.
    assert [(r.contributors, r.coverage) for r in report.rounds] == [(4, 1.0)] * 3
    assert relays(report, tmp_path, 1) == []
    [(one, other, via)] = relays(report, tmp_path, 2)
    assert (one, other) == (2, 3)
    assert via in (0, 1)
    assert report.rounds[1].reduce_s < REDUCE_DEADLINE_S
    # Their connections still stand, only nothing comes over them: that is not found out twice.
    assert relays(report, tmp_path, 3) != []
    assert plan(report, tmp_path, 3).attempt == 0


@pytest.mark.long
def test_cut_lanes_are_made_anew_and_nobody_is_evicted(tmp_path: Path) -> None:
    cut = Fault(kind="cut", node=2, round=2, phase="reduce", progress=0.3)
    narrow = Uplink(nodes=(2,), rate_mbit=6)
    report = run(scenario(3, cut, nodes=3, uplinks=(narrow,)), tmp_path)
    assert_everyone_is_in_every_chunk(report)
    assert [(plan(report, tmp_path, round).attempt, relays(report, tmp_path, round)) for round in (1, 2, 3)] == [
        (0, [])
    ] * 3
    log = (tmp_path / "nodes" / "2" / "log.txt").read_text()
    assert "the connection with " in log.partition("round 2 certified")[0]
