"""Real nodes behind one narrow uplink: what is slow for all of them is nobody's fault, and nobody is evicted for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.collectives.stalls import LATE_S, STALL_S
from shoal.testnet.links.namespaces import Uplink
from tests.testnet.links_lab import assert_everyone_is_in_every_chunk, needs_namespaces, plan, run, scenario

pytestmark = needs_namespaces

RATE_MBIT = 1.5


@pytest.mark.long
def test_three_behind_one_uplink_settle(tmp_path: Path) -> None:
    uplink = Uplink(nodes=(0, 1, 2), rate_mbit=RATE_MBIT, delay_s=0.04)
    report = run(scenario(2, uplinks=(uplink,), inputs=640), tmp_path)
    assert_everyone_is_in_every_chunk(report)
    # Owners keep each other waiting for longer than it takes to be accused of late finals.
    assert min(r.reduce_s for r in report.rounds) > STALL_S + LATE_S
    assert report.rounds[1].reduce_s < 2 * report.rounds[0].reduce_s
    last = plan(report, tmp_path, 2)
    assert last.evicted == ()
    # Rates are known by then, and none of them is taken for more than a link can carry.
    for participant in last.participants:
        assert 0 < participant.download < 40 * RATE_MBIT * 1e6 / 8
