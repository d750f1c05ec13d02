"""Six real nodes of three sites: one of each contributes for all of it, and every value is what that leads to."""

from __future__ import annotations

from pathlib import Path

from tests.node.lab import ROUND_TOKENS, Swarm, assert_exact

SECTIONS: dict[str, dict[str, object]] = {
    "membership": {"sites": "together"},
    "round": {"chunk_values": 4096, "grace_s": 20.0, "reduce_deadline_s": 60.0},
}
SITES = ("north", "north", "south", "south", "east", "east")
ROUNDS = 4


def test_of_each_site_one_contributes_for_all(tmp_path: Path) -> None:
    with Swarm(tmp_path, nodes=6, sections=SECTIONS) as swarm:
        swarm.start_together(**{f"node{index}": ("--site", site) for index, site in enumerate(SITES)})
        for node in swarm.nodes:
            node.certified(ROUNDS)
        statuses = [node.ask("status") for node in swarm.nodes]
        assert_exact(swarm.report(ROUNDS))
        for index, status in enumerate(statuses):
            mates = {node.peer_id for node, site in zip(swarm.nodes, SITES, strict=True) if site == SITES[index]}
            assert {*status["site"], status["peer_id"]} == mates
        for event in swarm.nodes[0].events("certified")[1:ROUNDS]:  # in the first some may be late
            assert (event["contributors"], event["tokens"]) == (6, 6 * ROUND_TOKENS)
        planned = {e["round"]: e["contributors"] for e in swarm.nodes[0].events("planned")}
        assert [planned[round] for round in range(2, ROUNDS + 1)] == [3] * (ROUNDS - 1)
