"""Named voters changed in mid-run, with real nodes: one added, one removed, and rounds certified by who votes then."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.node.state.store import RecordLog
from shoal.protocol.messages import Certificate
from shoal.protocol.wire import decode
from tests.node.lab import Node, Swarm, assert_exact, assert_one_line, assert_votes_once, eventually, shoal

NAMED: dict[str, dict[str, object]] = {"membership": {"voters": "named"}}


def signers(node: Node) -> dict[int, set[str]]:
    """Those who signed each certificate on the disk of a node that has ended, by round."""
    log = RecordLog(node.folder / "chain.log")
    certificates = [decode(record, Certificate) for record in log.recovered]
    log.close()
    return {one.value.round: set(one.signers) for one in certificates}


def amend(node: Node, *options: str) -> str:
    """What `shoal amend` says; it must succeed."""
    done = shoal("amend", *options, "--data-dir", str(node.folder))
    assert done.returncode == 0, done.stderr
    return done.stdout


def voters(node: Node) -> set[str]:
    return set(node.ask("status")["voters"])


@pytest.mark.long
def test_three_founders_add_a_fourth_remove_the_first_and_go_on_without_two_of_them(tmp_path: Path) -> None:
    with Swarm(tmp_path, nodes=4, founders=3, sections=NAMED) as swarm:
        first, second, third, fourth = swarm.nodes  # the first founder's key is the authority's
        swarm.nodes.pop()
        swarm.start_together()
        first.certified(1)
        refused = shoal("amend", "--add-voter", fourth.peer_id, "--data-dir", str(first.folder))
        assert refused.returncode == 1
        assert_one_line(refused.stderr, f"{fourth.peer_id} is no member", "have its node join first")
        fourth.start(join=[first])
        eventually(
            lambda: any(fourth.peer_id in event["members"] for event in first.events("certified")), "it is a member"
        )
        swarm.nodes.append(fourth)
        everyone = [node.peer_id for node in swarm.nodes]

        for node in (second, third):
            amend(node, "--add-voter", fourth.peer_id)
        added = first.wait("amended")
        assert added["settings"] == {f"voters.{fourth.peer_id}": True}
        first.certified(added["round"] + 1)
        eventually(lambda: all(voters(node) == set(everyone) for node in swarm.nodes), "all four vote")

        amend(first, "--remove-voter", first.peer_id, "--by-authority")
        removed = fourth.wait("amended", settings={f"voters.{first.peer_id}": False})
        at = removed["round"]
        fourth.certified(at + 1)
        first.kill()
        second.kill()
        fourth.kill()
        fourth.start(join=[third])
        joiner = Node(tmp_path / "joiner", swarm.manifest_path, tmp_path)
        swarm.nodes.append(joiner)
        joiner.start(join=[third])
        eventually(
            lambda: any(joiner.peer_id in event["members"] for event in third.events("certified")),
            "two of three voters certify, one of them restarted, and take a newcomer in",
        )
        for node in (third, fourth, joiner):
            assert voters(node) == {second.peer_id, third.peer_id, fourth.peer_id}
            assert node.ask("status")["missing"] == [second.peer_id]
        shown = shoal("status", "--data-dir", str(joiner.folder)).stdout.splitlines()
        told = [line for line in shown if line.startswith("voter ")]
        for line, peer in zip(told, sorted([second.peer_id, third.peer_id, fourth.peer_id]), strict=True):
            assert line.endswith(f"({peer})")  # behind its name
        last = third.events("certified")[-1]["round"]
        for node in (third, fourth, joiner):
            node.kill()
        before, between, after = set(everyone[:3]), set(everyone), set(everyone[1:])
        by_round = signers(third)
        assert len(by_round) >= last
        for round, some in by_round.items():
            assert some <= (before if round <= added["round"] else between if round <= at else after)
        assert by_round[last] == {third.peer_id, fourth.peer_id}
        for node in (first, second, third, fourth):
            assert_votes_once(node)
        assert_exact(swarm.report(last))
        verified = shoal("verify", str(third.folder))
        assert verified.returncode == 0, verified.stderr
