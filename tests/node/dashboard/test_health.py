"""The checks on the page: what they advise, and what they do not."""

from __future__ import annotations

import time

import msgspec

from shoal.lab.bench.synthetic_swarm import SyntheticSwarm
from shoal.node.dashboard.health import health_of
from shoal.node.peer_facts import summary_of


def remedy(swarm: SyntheticSwarm) -> str:
    facts = swarm.look()
    checks = health_of(facts.node, summary_of(facts.peers))
    return next(check.remedy for check in checks if check.name == "Majority")


def test_only_members_silent_for_an_hour_are_said_to_be_forgettable() -> None:
    swarm = SyntheticSwarm(peers=3, now=time.time(), rounds=3)
    assert remedy(swarm) == ""
    swarm.kill(3)
    assert "start the missing nodes again" in remedy(swarm)
    assert "forget" not in remedy(swarm)
    swarm.silent_for_long = True
    gone = [peer.peer for peer in swarm.look().peers if peer.reach == "gone"]
    assert f"if gone for good: shoal rebase --forget {' '.join(gone)}, where the authority's key is" in remedy(swarm)


def test_page_tells_when_it_is_the_nodes_turn_where_seats_are_few() -> None:
    facts = SyntheticSwarm(peers=3, now=time.time(), rounds=3).look()
    for rounds, told in ((None, []), (0, ["has a seat in this round"]), (3, ["waits for its seat, about 3 rounds"])):
        node = msgspec.structs.replace(facts.node, turn_in_rounds=rounds)
        checks = health_of(node, summary_of(facts.peers))
        assert [check.detail for check in checks if check.name == "Seat"] == told


def test_page_says_why_a_node_trains_nothing_and_what_ends_that() -> None:
    facts = SyntheticSwarm(peers=3, now=time.time(), rounds=3).look()
    for why, remedy_told in (
        ("its user paused it", "go on with Resume, or shoal resume"),
        ("the machine is on its battery (--only-when)", ""),
    ):
        node = msgspec.structs.replace(facts.node, paused=True, why_paused=why)
        (check,) = [one for one in health_of(node, summary_of(facts.peers)) if one.name == "Training"]
        assert (check.state, check.detail, check.remedy) == ("warn", f"paused: {why}", remedy_told)
