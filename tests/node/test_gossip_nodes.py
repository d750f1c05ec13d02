"""Real nodes of the strategy `gossip`: one dies and comes back, one joins, and the user asks for what there is not."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shoal.collectives.gossip import GossipSettings
from shoal.node.control_client import ControlRefused, request
from shoal.protocol.manifest import render_manifest, validate_manifest
from shoal.testnet.check import Witness
from shoal.testnet.check_gossip import check_gossip
from tests.node.lab import Node, Swarm, eventually


def gossiping(workplace: Path, *, nodes: int, founders: int) -> Swarm:
    swarm = Swarm(workplace, nodes=nodes, founders=founders)
    tables = msgspec.to_builtins(swarm.manifest)
    tables["sync"] = {"inner_steps": 100, "strategy": "gossip"}
    swarm.manifest = validate_manifest(tables, source="the test's manifest")
    swarm.manifest_path.write_text(render_manifest(swarm.manifest))
    return swarm


def newest(node: Node) -> int:
    return max(event["round"] for event in node.all_events() if event["event"] == "stepped")


def with_partner(node: Node, partner: Node) -> int:
    """The newest round of this life that it made with that partner, 0 if none."""
    return max((event["round"] for event in node.events("stepped", partner=partner.peer_id)), default=0)


def alone_since(node: Node, round: int) -> list[str]:
    """Why it had no partner, in rounds after that one."""
    return [event["why"] for event in node.events("stepped", partner=None) if event["round"] > round]


@pytest.mark.long
def test_a_node_goes_on_from_its_disk_after_a_death_and_a_newcomer_from_a_peers_snapshot(tmp_path: Path) -> None:
    with gossiping(tmp_path, nodes=3, founders=2) as swarm:
        joiner = swarm.nodes.pop()
        one, other = swarm.nodes
        swarm.start_together()
        assert one.wait("stepped", round=1)["partner"] == other.peer_id
        one.wait("stepped", round=3)

        status = one.ask("status")
        assert (status["digest"], status["term"], status["missing"]) == (None, "0.0", [])
        assert status["round"] >= 3
        assert {member["peer_id"] for member in status["members"]} == {one.peer_id, other.peer_id}
        for order in (("rollback", "1"), ("rebase", other.peer_id)):
            with pytest.raises(ControlRefused, match="no common state"):
                request(one.folder, *order)

        one.ask("pause")
        eventually(lambda: one.ask("status")["phase"] == "paused", "paused")
        rested_at = newest(one)
        other.wait("stepped", partner=None)  # who pauses is not waited for
        assert newest(one) == rested_at
        one.ask("resume")
        eventually(lambda: newest(one) > rested_at, "trains again")

        other.kill()
        eventually(lambda: alone_since(one, newest(other)), "goes on alone")
        died_at = newest(other)

        other.start(join=[one])
        joiner.start(join=[one])
        swarm.nodes.append(joiner)
        went_on = other.wait("caught_up")["round"]
        assert 0 < went_on <= died_at  # from its own disk: the other is further by now
        took_up = other.wait("resumed")
        assert (took_up["refused"], took_up["round"] > 0) == ("", True)  # the moments of its optimizer
        assert joiner.wait("caught_up")["round"] > 0
        for late in (other, joiner):
            eventually(lambda late=late: with_partner(late, one) > died_at, "its clock is the others' again")
        joiner.ask("leave")
        assert joiner.wait_exit() == 0
        for node in swarm.nodes:
            node.end()

        witnesses = [Witness(index=i, peer_id=node.peer_id, folder=node.folder) for i, node in enumerate(swarm.nodes)]
        kept = range(1, min(newest(node) for node in (one, other)))
        found = check_gossip(witnesses, [("0.0", round) for round in kept], GossipSettings.of(swarm.manifest.sync))
        # Of a round in which nobody stepped nothing was kept: numbers are skipped. One was killed as it wrote, perhaps.
        assert (found.wrong_values, sum(r.updates_compared for r in found.rounds) > len(kept)) == (0, True), found
