"""Real nodes with one key in two places: a data folder that was copied, or put back from an old copy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shoal.node.control_client import request
from shoal.protocol.names import by_name
from tests.node.lab import Node, Swarm, assert_one_line, assert_votes_once, eventually, shoal
from tests.node.test_terms import assert_one_decision_each

LEFT_OUT = ("control.sock", "control.path", "lock")


def copied(swarm: Swarm, node: Node, name: str) -> Node:
    """Another node on a copy of the folder of `node`, as it is now; the swarm ends it."""
    shutil.copytree(node.folder, swarm.workplace / name, ignore=shutil.ignore_patterns(*LEFT_OUT))
    swarm.nodes.append(Node(swarm.workplace / name, swarm.manifest_path, swarm.workplace))
    assert swarm.nodes[-1].peer_id == node.peer_id
    return swarm.nodes[-1]


def newcomer(swarm: Swarm, name: str, what: str | Path = "") -> Node:
    """A node with a folder of its own, on the manifest, or on `what`, a link."""
    swarm.nodes.append(Node(swarm.workplace / name, Path(what or swarm.manifest_path), swarm.workplace))
    return swarm.nodes[-1]


def goes_on(node: Node, after: int = 2) -> int:
    """Wait for some rounds more than a node has certified; the round of the last of them.

    One of them it may have had from others, having come amid it.
    """

    def newest() -> int:
        return max((event["round"] for event in node.events("certified")), default=0)

    last = newest() + after
    eventually(lambda: newest() >= last, f"{node.folder.name} has certified round {last}, or a later one")
    return newest()


def votes_of(*nodes: Node) -> list[tuple[str, int, int]]:
    return [(e["term"], e["round"], e["view"]) for node in nodes for e in node.all_events() if e["event"] == "voted"]


@pytest.mark.long
def test_copy_of_a_running_node_ends_and_starts_again_only_when_told_to_and_then_abstains(tmp_path: Path) -> None:
    with Swarm(tmp_path, nodes=3) as swarm:
        first, second, third = swarm.nodes
        swarm.start_together()
        first.certified(2)
        third.kill()
        copy = copied(swarm, third, "copy")
        third.start(join=[first])
        third.wait("certified")

        copy.start(join=[first, second])
        assert copy.wait_exit() == 2
        assert_one_line(copy.log, f"the key in {copy.folder} is in use elsewhere", "remove this one", "--take-over")
        assert not copy.events("voted")
        copy.start(join=[first, second])  # once it is known it takes its user to say that the other is gone
        assert copy.wait_exit() == 2
        assert not copy.events("linked")
        goes_on(third)
        assert third.running

        third.kill()
        copy.start("--take-over", join=[first, second])
        certified = eventually(lambda: copy.events("certified"), "the copy takes part again")[0]
        assert third.peer_id in certified["members"]
        assert first.certified(certified["round"])["digest"] == certified["digest"]
        assert not (copy.folder / "elsewhere").exists()
        cast = votes_of(third, copy)  # those of before are in both logs
        before = [vote for vote in votes_of(third) if vote[1] <= 2]
        assert len(cast) - len(set(cast)) <= len(before)
        for node in swarm.nodes:
            node.end()
        for node in (first, second):
            assert_votes_once(node)
        assert_one_decision_each(swarm)


@pytest.mark.long
def test_of_a_running_folder_and_its_copy_one_ends_before_both_sign_and_the_swarm_goes_on(tmp_path: Path) -> None:
    with Swarm(tmp_path, nodes=3) as swarm:
        first, second, third = swarm.nodes
        swarm.start_together()
        third.certified(2)
        copy = copied(swarm, third, "copy")
        before = set(votes_of(copy))
        goes_on(third)
        copy.start(join=[first, second])  # counts a start more than the other
        eventually(lambda: not copy.running or copy.events("certified"), "either the copy ends, or it takes part")
        if copy.running:  # no certificate that it met has a vote of the other, which was started less often, and ends
            assert third.wait_exit() == 2
            assert_one_line(third.log, f"the key in {third.folder} is in use elsewhere", "2 times, this one 1")
            certified = copy.events("certified")[-1]
            assert first.certified(certified["round"])["digest"] == certified["digest"]
            for node in swarm.nodes:
                node.end()
            assert not (set(votes_of(third)) - before) & (set(votes_of(copy)) - before)
            assert_one_decision_each(swarm)
            return
        assert copy.wait_exit() == 2
        assert_one_line(copy.log, f"the key in {copy.folder} is in use elsewhere", "--take-over")
        assert not copy.events("voted")
        goes_on(first)
        if third.running:  # mostly it kept the copy from saying hello
            goes_on(third)
        else:  # the copy came through for a moment: the node that was started less often ends too
            assert third.wait_exit() == 2
            assert_one_line(third.log, f"the key in {third.folder} is in use elsewhere", "2 times, this one 1")
            third.start("--take-over", join=[first])
            certified = third.wait("certified")
            assert first.certified(certified["round"])["digest"] == certified["digest"]
        for node in swarm.nodes:
            node.end()
        for node in (first, second, third):
            assert_votes_once(node)
        assert_one_decision_each(swarm)


def test_swarm_of_one_that_was_copied_is_refused_by_name_and_a_link_says_which_is_meant(tmp_path: Path) -> None:
    with Swarm(tmp_path, nodes=1) as swarm:
        (founder,) = swarm.nodes
        founder.start()
        founder.certified(2)
        founder.kill()
        copy = copied(swarm, founder, "copy")
        for node in (founder, copy):
            node.start()
            node.certified(5)
        link = str(request(founder.folder, "link")["link"])

        torn = newcomer(swarm, "torn")
        torn.start(join=[founder, copy])
        assert torn.wait_exit() == 2
        assert_one_line(
            torn.log, "there are two chains of this swarm", founder.address, copy.address, "a fresh link (`shoal link`"
        )
        assert not torn.events("certified")

        founder.kill()
        guest = newcomer(swarm, "guest", link)
        guest.start(join=[copy])
        eventually(lambda: "serves another chain than the link's" in guest.log, "what the copy serves is refused")
        assert request(guest.folder, "status")["round"] == 0
        copy.kill()
        founder.start(join=[guest])
        certified = guest.wait("certified")
        assert founder.certified(certified["round"])["digest"] == certified["digest"]


def parted(swarm: Swarm) -> tuple[Node, Node, Node, Node]:
    """Three founders, of which the second was copied: with the first it certified one chain, with the third another."""
    first, second, third = swarm.nodes
    swarm.start_together(holds=["3:train"])
    for node in swarm.nodes:
        node.hold("3:train")
    for node in (first, second, third):
        node.kill()
    copy = copied(swarm, second, "copy")
    first.start()
    third.start()
    second.start(join=[first])
    copy.start(join=[third])
    for node in (first, third):
        node.certified(5)
    return first, second, third, copy


@pytest.mark.long  # by value: tests/protocol/test_member.py, test_fork_watch.py
def test_members_that_see_a_fork_stop_name_who_signed_twice_and_go_on_after_a_rebase(tmp_path: Path) -> None:
    with Swarm(tmp_path, nodes=3) as swarm:
        first, second, third, copy = parted(swarm)
        copy.kill()
        third.kill()
        third.start(join=[first])
        for node in (first, third):
            fork = node.wait("forked")
            assert (fork["term"], fork["round"], fork["signers"]) == ("0.0", 3, [second.peer_id])
            eventually(lambda node=node: node.ask("status")["phase"] == "forked", "it stands still")  # type: ignore[misc]
            (alert,) = node.ask("status")["alerts"]
            assert f"{second.peer_id} signed both" in alert
            assert "`shoal rebase`" in alert
            shown = by_name(alert, node.ask("status")["names"], own=node.peer_id)
            assert shown in shoal("status", "--data-dir", str(node.folder)).stdout.replace("\n", " ")
            after = [e for e in node.events() if e["at"] > fork["at"] and e["event"] in ("voted", "proposed")]
            assert after == []
        third.kill()
        third.start(join=[first])  # what it saw it keeps
        third.wait("trainer_started")
        eventually(lambda: third.ask("status")["phase"] == "forked", "it stands still again")

        done = shoal("rebase", "--forget", second.peer_id, "--data-dir", str(first.folder))
        assert done.returncode == 0, done.stderr
        for node in (first, third):
            assert first.wait("rebased")["value"] == node.wait("rebased")["value"]
        certified = third.wait("certified", term="1.0")
        assert first.wait("certified", term="1.0", round=certified["round"])["digest"] == certified["digest"]
        assert third.ask("status")["alerts"] == []
        for node in swarm.nodes:
            node.end()
        assert third.durable_records() is not None  # its chain, which begins otherwise than it did, is read again
