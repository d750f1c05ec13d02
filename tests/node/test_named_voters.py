"""Real nodes whose voters are named, and a stranger that contributes and never votes."""

from __future__ import annotations

from pathlib import Path

from shoal.node.state.store import RecordLog
from shoal.protocol.messages import Certificate
from shoal.protocol.wire import decode
from tests.node.lab import Node, Swarm, assert_exact, assert_votes_once, eventually

NAMED: dict[str, dict[str, object]] = {"membership": {"voters": "named"}}


def signers(node: Node) -> dict[int, set[str]]:
    """Those who signed each certificate on the disk of a node that has ended, by round."""
    log = RecordLog(node.folder / "chain.log")
    certificates = [decode(record, Certificate) for record in log.recovered]
    log.close()
    return {one.value.round: set(one.signers) for one in certificates}


def test_stranger_beside_three_named_founders_contributes_and_never_votes(tmp_path: Path) -> None:
    with Swarm(tmp_path, nodes=4, founders=3, sections=NAMED) as swarm:
        voters, everyone = {node.peer_id for node in swarm.nodes[:3]}, sorted(node.peer_id for node in swarm.nodes)
        stranger = swarm.nodes.pop()
        founders = list(swarm.nodes)
        swarm.start_together(holds=["2:train"])
        for node in founders:
            node.hold("2:train")
        stranger.start(join=[founders[0]])
        for node in founders:
            node.release()
        counted = eventually(
            lambda: next((e for e in founders[0].events("certified") if e["contributors"] == 4), None),
            "the stranger's work counts",
        )
        assert counted["members"] == everyone
        last = counted["round"] + 1
        founders[0].certified(last)
        swarm.nodes.append(stranger)
        status = stranger.ask("status")
        assert (set(status["voters"]), status["missing"], status["faults"]) == (voters, [], "crash")
        assert_exact(swarm.report(last))
        for node in swarm.nodes:
            node.kill()
        assert not stranger.events("voted")
        assert {record.kind for record in stranger.durable_records()} <= {"ready"}, (
            "it is bound to no view and no value"
        )
        for node in swarm.nodes:
            by_round = signers(node)
            assert len(by_round) >= last - 1
            assert all(some <= voters and len(some) >= 2 for some in by_round.values())
        for node in founders:
            assert_votes_once(node)
