"""Other terms, with real nodes: rollback by a quorum, rebase by the authority, and a power cut in the middle."""

from __future__ import annotations

import signal
from pathlib import Path

import msgspec
import pytest

from shoal.node.control_client import ControlRefused, request
from shoal.node.state.store import Store
from shoal.protocol.certificate import genesis
from shoal.protocol.voting import lead
from shoal.testnet.check import Witness, check_swarm
from tests.node.lab import (
    ROUND_TOKENS,
    Node,
    Swarm,
    assert_one_line,
    assert_votes_once,
    eventually,
    lose_newest_certificate,
    shoal,
)


def order(node: Node, *arguments: str) -> str:
    """What a `shoal` command says for a node; it must succeed."""
    done = shoal(*arguments, "--data-dir", str(node.folder))
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_one_decision_each(swarm: Swarm) -> set[tuple[str, int]]:
    """No two nodes ever certified different things at one (term, round); every certified value is recomputed. Returns
    the decided positions."""
    found: dict[tuple[str, int], set[str]] = {}
    for node in swarm.nodes:
        for event in node.all_events():
            if event["event"] in ("certified", "rolled_back", "rebased"):
                key = event["term"], event["round"] + (0.5 if event["event"] == "rebased" else 0)
                found.setdefault(key, set()).add(event["value"])
    assert {key: values for key, values in found.items() if len(values) > 1} == {}
    witnesses = [Witness(index=i, peer_id=n.peer_id, folder=n.folder) for i, n in enumerate(swarm.nodes)]
    certified = {(e["term"], e["round"]) for n in swarm.nodes for e in n.all_events() if e["event"] == "certified"}
    check = check_swarm(witnesses, certified)
    assert (check.wrong_values, check.errors) == (0, ())
    assert all(found.updates_compared for found in check.rounds)
    return certified


@pytest.mark.long
def test_a_quorum_goes_back_and_a_node_that_slept_follows(tmp_path: Path) -> None:
    with Swarm(tmp_path, nodes=3) as swarm:
        first, second, third = swarm.nodes
        policies = {f"node{i}": ["--rollback", "never"] for i in range(3)}
        swarm.start_together(holds=["6:train"], **policies)
        for node in swarm.nodes:
            node.hold("6:train")  # the third stays there, so that the others wait for it and not for us
        wanted = first.certified(4)["digest"]
        for node in (first, second):
            node.release()
        request(first.folder, "rollback", "4")
        eventually(lambda: second.ask("status")["rollbacks"], "the other hears of it")
        told = second.ask("status")["rollbacks"]
        assert [(wish["peer_id"], wish["round"], wish["asked"]) for wish in told] == [(first.peer_id, 4, True)]
        request(second.folder, "rollback", "4")
        back = first.wait("rolled_back")
        assert (back["term"], back["to"], back["digest"]) == ("0.0", 4, wanted)
        assert second.wait("rolled_back")["value"] == back["value"]
        third.kill()
        again = {node: node.wait("certified", term="0.1", round=5) for node in (first, second)}
        assert again[first]["digest"] == again[second]["digest"] != first.certified(5)["digest"]
        assert first.wait("certified", term="0.1", round=6)["members"] == sorted((first.peer_id, second.peer_id))

        third.start(join=[first])
        eventually(lambda: third.events("certified", term="0.1"), "the one who slept takes part again")
        last = third.events("certified", term="0.1")[0]
        assert first.wait("certified", term="0.1", round=last["round"])["digest"] == last["digest"]
        assert third.ask("status")["term"] == "0.1"
        assert [event["value"] for event in third.events("rolled_back")] == [back["value"]]
        refused = shoal("rollback", "--to", "99", "--data-dir", str(first.folder))
        assert refused.returncode == 1
        assert_one_line(refused.stderr, "--to 99", "can go back to rounds before that")
        for node in swarm.nodes:
            node.kill()
        assert {("0.0", 4), ("0.0", 5), ("0.1", 5), ("0.1", 6)} <= assert_one_decision_each(swarm)


@pytest.mark.long
def test_the_authority_goes_on_without_those_who_are_gone_and_they_may_join_again(tmp_path: Path) -> None:
    with Swarm(tmp_path, nodes=3) as swarm:
        founder, returner, gone = swarm.nodes  # the first founder's key is the authority's
        swarm.start_together(holds=["3:plan"])
        for node in swarm.nodes:
            node.hold("3:plan")
        returner.kill()
        gone.kill()
        founder.release()
        eventually(lambda: founder.ask("status")["phase"] == "no quorum", "it notices")
        assert "`shoal rebase --forget`" not in order(founder, "status"), "they were heard a moment ago"
        told = order(founder, "rebase", "--forget", returner.peer_id, "--forget", gone.peer_id)
        assert "from round 2 in term 1.0 with 1 member" in told
        rebased = founder.wait("rebased")
        assert (rebased["term"], rebased["to"], rebased["members"]) == ("1.0", 2, [founder.peer_id])
        assert rebased["digest"] == founder.certified(2)["digest"]
        assert founder.wait("certified", term="1.0", round=3)["members"] == [founder.peer_id]
        # What it learnt for the round that was abandoned counts in the new one, once.
        assert [e["tokens"] for e in founder.events("contributed", round=3)][-1] >= ROUND_TOKENS

        returner.start(join=[founder])
        again = eventually(lambda: returner.events("round_started", term="1.0"), "the forgotten one comes back")[0]
        assert again["role"] == "joiner"
        first = returner.wait("certified", term="1.0")
        assert returner.peer_id in first["members"]
        following = returner.wait("certified", term="1.0", round=first["round"] + 1)
        assert following["contributors"] == 2
        assert founder.wait("certified", term="1.0", round=first["round"] + 1)["digest"] == following["digest"]
        with pytest.raises(ControlRefused, match="this is signed with the key of"):
            request(returner.folder, "rebase", gone.peer_id)
        for node in (founder, returner):
            node.kill()
        assert ("0.0", 3) not in assert_one_decision_each(swarm)


@pytest.mark.long
def test_power_lost_in_the_middle_of_a_vote_to_go_back(tmp_path: Path) -> None:
    with Swarm(tmp_path, nodes=3, forked=False) as swarm:
        swarm.start_together(holds=["6:train"], **{f"node{i}": ["--rollback", "never"] for i in range(3)})
        for node in swarm.nodes:
            node.hold("6:train")
        origin = genesis(swarm.manifest.swarm_id, swarm.manifest.swarm.founders)
        leader = swarm.by_peer(lead(msgspec.structs.replace(origin, round=5), 0))
        silent, absent = (node for node in swarm.nodes if node is not leader)
        for node in (leader, silent):
            node.release()
        request(silent.folder, "rollback", "4")
        eventually(lambda: leader.ask("status")["rollbacks"], "one consented")
        silent.signal(signal.SIGSTOP)
        request(leader.folder, "rollback", "4")
        leader.wait("prepared", round=6, view=0)  # alone: one is stopped, the other has not begun the round
        for node in swarm.nodes:
            node.kill()
        (cast,) = (one.value for one in leader.durable_records() if one.kind == "prepare" and one.round == 6)
        assert cast is not None
        assert cast.rollback
        assert not any(event["event"] == "rolled_back" for node in swarm.nodes for event in node.all_events())

        leader.start()
        for node in (silent, absent):
            node.start(join=[leader])
        for node in swarm.nodes:
            back = node.wait("rolled_back")
            assert (back["value"], back["to"]) == (cast.hash.hex(), 4)
        assert len({node.wait("certified", term="0.1", round=6)["digest"] for node in swarm.nodes}) == 1
        for node in swarm.nodes:
            node.kill()
        assert ("0.0", 6) not in assert_one_decision_each(swarm)


@pytest.mark.long
def test_a_certificate_that_only_one_disk_has_is_decided_again_the_same_without_it(tmp_path: Path) -> None:
    with Swarm(tmp_path, nodes=3) as swarm:
        holder, *others = swarm.nodes
        swarm.start_together(holds=["4:train"])
        for node in swarm.nodes:
            node.hold("4:train")
        decided = holder.certified(3)
        for node in swarm.nodes:
            node.kill()
        for node in others:
            lose_newest_certificate(node)
        others[0].start()
        others[1].start(join=[others[0]])
        for node in others:
            assert node.wait("round_started")["round"] == 3
            node.certified(4)  # the votes for the third were on disk, and decide it as soon as they meet
        holder.start(join=others[:1])
        last = holder.wait("certified")
        assert last["round"] > 3
        assert len({node.certified(last["round"])["digest"] for node in swarm.nodes}) == 1
        for node in swarm.nodes:
            node.kill()
            assert_votes_once(node)
            with Store(node.folder) as store:
                assert store.certificates()[2].value.hash.hex() == decided["value"]
        assert_one_decision_each(swarm)
