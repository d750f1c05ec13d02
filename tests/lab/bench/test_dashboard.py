"""The cost of a crowd before the page, by counts: bytes and series do not grow with the swarm."""

from __future__ import annotations

from shoal.lab.bench.dashboard import LOOK, measure_looks
from shoal.lab.targets import missed
from shoal.node.dashboard.peers import LIVE_LIMIT


def test_a_thousand_peers_cost_viewers_and_scrapes_what_two_hundred_do() -> None:
    few, many = measure_looks(LIVE_LIMIT), measure_looks(1000)
    assert [row for row in missed(many.rows) if row.name != LOOK.name] == []
    assert many.series == few.series
    for field in ("delta_bytes", "feed_bytes_per_s", "snapshot_bytes", "scrape_bytes"):
        assert getattr(many, field) <= 1.5 * getattr(few, field), field
