"""Real nodes in sites: one of each contributes for all of it, every value is exact, and who dies takes nobody along."""

from __future__ import annotations

from pathlib import Path

from tests.node.lab import Swarm, assert_exact

SECTIONS: dict[str, dict[str, object]] = {
    "membership": {"sites": "together"},
    "round": {"chunk_values": 4096, "grace_s": 20.0, "reduce_deadline_s": 60.0},
}
SITES = ("north", "north", "south", "south", "east", "east")


def test_of_each_site_one_contributes_for_all(tmp_path: Path) -> None:
    with Swarm(tmp_path, nodes=6, sections=SECTIONS) as swarm:
        swarm.start_together(**{f"node{index}": ("--site", site) for index, site in enumerate(SITES)})
        for node in swarm.nodes:
            node.certified(6)
        report = swarm.report(6)
        assert_exact(report)
