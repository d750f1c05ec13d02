"""The model against the made-up swarm: rounds as events tell them, and deltas that lead to the snapshot they follow."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shoal.lab.synthetic_swarm import ROUND_S, SyntheticSwarm
from shoal.node.dashboard.model import BANDWIDTH_POINTS, Model
from shoal.node.dashboard.peers import CHANGE_LIMIT, LIVE_LIMIT, Peers
from shoal.node.dashboard.rounds import (
    ALIKE_LIMIT,
    CERTIFICATE_LIMIT,
    HAPPENING_LIMIT,
    ROUND_LIMIT,
    Rounds,
)
from shoal.node.peer_facts import summary_of
from shoal.node.reporting import events
from shoal.node.reporting.event_log import parse_event
from tests.node.dashboard.lab import NOW

DELTA_LIMIT_BYTES = 16_384
SNAPSHOT_LIMIT_BYTES = 100_000
KEPT = {"certificates": CERTIFICATE_LIMIT, "happenings": HAPPENING_LIMIT, "bandwidth": BANDWIDTH_POINTS}


def plain(content: Any) -> Any:
    """As it is after the way to a browser."""
    return msgspec.json.decode(msgspec.json.encode(content))


def follow(model: Model, swarm: SyntheticSwarm) -> None:
    while swarm.waiting:
        model.hear(swarm.waiting.popleft())
    model.see(swarm.look(), swarm.now, swarm.now)


def apply(known: dict[str, Any], delta: dict[str, Any]) -> None:
    """What the page does with a delta."""
    assert delta["seq"] == known["seq"] + 1
    known["seq"] = delta["seq"]
    known["node"] |= delta.get("node", {})
    known["summary"] |= delta.get("summary", {})
    known["health"] = delta.get("health", known["health"])
    for peer, fields in delta.get("peers", {}).items():
        if fields is None:
            del known["peers"][peer]
        else:
            known["peers"][peer] = known["peers"].get(peer, {}) | fields
    rounds = {round["key"]: round for round in known["rounds"]}
    rounds |= {round["key"]: round for round in delta.get("rounds", ())}
    known["rounds"] = list(rounds.values())[-ROUND_LIMIT:]
    for part, limit in KEPT.items():
        known[part] = (known[part] + delta.get(part, []))[-limit:]
    known["groups"] = (known["groups"] + delta.get("groups", []))[-24:]
    known["sources"] = delta.get("sources", known["sources"])
    known["samples"] = delta.get("samples", known["samples"])
    known["curves"] |= delta.get("curves", {})
    for name, points in delta.get("points", {}).items():
        known["curves"][name] = known["curves"][name] + points


@pytest.mark.parametrize("rollouts", [False, True])
def test_a_snapshot_and_the_deltas_after_it_are_the_later_snapshot(rollouts: bool) -> None:
    swarm = SyntheticSwarm(peers=30, now=NOW, rounds=70, rollouts=rollouts)
    model = Model()
    follow(model, swarm)
    model.delta()
    known = plain(model.snapshot())
    for second in range(1, 80):
        if second == 20:
            swarm.kill(2)
        swarm.advance(NOW + second)
        follow(model, swarm)
        delta = model.delta()
        assert delta is not None
        apply(known, plain(delta))
    assert known == plain(model.snapshot())
    assert sum(peer["reach"] == "gone" for peer in known["peers"].values()) == 2
    assert model.delta() is None


def test_deltas_of_a_crowd_are_small_and_lead_to_what_is_true_in_the_end() -> None:
    """Numbers of all change from look to look, a third of them die at once, and half of them are forgotten."""
    swarm = SyntheticSwarm(peers=1000, now=NOW, rounds=20)
    model = Model()
    follow(model, swarm)
    model.delta()
    known = plain(model.snapshot())
    assert (len(known["peers"]), known["summary"]["known"]) == (LIVE_LIMIT, 1001)
    sizes = []
    for second in range(1, 60):
        if second == 20:
            swarm.kill(300)
        swarm.advance(NOW + min(second, 50))  # the clock stands still in the end, and what waited has its turn
        facts = swarm.look()
        if second > 40:
            facts = msgspec.structs.replace(facts, peers=facts.peers[:500])
        while swarm.waiting:
            model.hear(swarm.waiting.popleft())
        model.see(facts, NOW + second, NOW + second, in_turn=True)
        delta = model.delta()
        if delta is None and second > 50:
            break
        assert delta is not None
        assert len(delta.get("peers", ())) <= CHANGE_LIMIT
        sizes.append(len(msgspec.json.encode(delta)))
        apply(known, plain(delta))
    assert delta is None
    assert max(sizes) <= DELTA_LIMIT_BYTES
    assert known == plain(model.snapshot())
    now = Model()
    now.see(facts, NOW, NOW)
    numbers = {"up", "down"}  # which take two looks
    assert {
        peer: {key: value for key, value in fields.items() if key not in numbers}
        for peer, fields in known["peers"].items()
    } == {
        peer: {key: value for key, value in fields.items() if key not in numbers}
        for peer, fields in plain(now.snapshot())["peers"].items()
    }


def test_every_peer_has_its_turn_and_a_change_of_state_comes_first() -> None:
    swarm = SyntheticSwarm(peers=LIVE_LIMIT - 1, now=NOW, rounds=2)
    peers = Peers()
    facts = swarm.look()
    peers.see(facts.peers, NOW, in_turn=False)
    assert len(peers.changed()) == LIVE_LIMIT
    seen: set[str] = set()
    for look in range(1, LIVE_LIMIT // CHANGE_LIMIT + 1):
        rows = [msgspec.structs.replace(peer, round=100 + look) for peer in facts.peers]
        peers.see(rows, NOW + look, in_turn=True)
        told = set(peers.changed())
        assert len(told) == CHANGE_LIMIT
        assert not told & seen
        seen |= told
    assert len(seen) == LIVE_LIMIT
    some = sorted(peer.peer for peer in rows if peer.member and peer.reach == "direct")[-CHANGE_LIMIT + 3 :]
    rows = [
        msgspec.structs.replace(peer, round=300, reach="suspect" if peer.peer in some else peer.reach) for peer in rows
    ]
    peers.see(rows, NOW + 99, in_turn=True)
    news = peers.changed()
    assert len(news) == CHANGE_LIMIT
    assert {peer for peer, fields in news.items() if fields and fields.get("state") == "silent"} == set(some)


def test_the_summary_counts_also_those_that_are_not_told_of_one_by_one() -> None:
    swarm = SyntheticSwarm(peers=1000, now=NOW, rounds=3)
    killed = swarm.kill(300)
    model = Model()
    follow(model, swarm)
    found = plain(model.snapshot())
    assert found["summary"]["states"]["gone"] == 300
    assert found["summary"]["alive"] == 701
    (majority,) = [check for check in found["health"] if check["name"] == "Majority"]
    assert majority["detail"].endswith(" and 297 others")
    assert sum(peer in majority["detail"] for peer in killed) == 3
    assert len(msgspec.json.encode(found)) <= SNAPSHOT_LIMIT_BYTES


def test_a_thousand_nodes_that_are_linked_or_die_at_once_are_a_few_lines() -> None:
    rounds = Rounds()
    rounds.hear(events.Evidence(at=NOW - 9, peer="12D3KooWliar", kind="two votes", round=3))
    for place in range(1000):
        rounds.hear(events.Linked(at=NOW + place / 2000, peer=f"12D3KooW{place}"))
    _, _, told = rounds.changed()
    assert told == rounds.happenings
    assert [happening.kind for happening in told] == ["evidence", *["linked"] * ALIKE_LIMIT]
    assert [happening.more for happening in told[1:]] == [0] * (ALIKE_LIMIT - 1) + [1000 - ALIKE_LIMIT]
    for place in range(3):
        rounds.hear(events.Linked(at=NOW + 0.6 + place / 2000, peer=f"12D3KooW{place}"))
    _, _, later = rounds.changed()
    assert [(happening.peer, happening.more) for happening in later] == [("12D3KooW0", 2)], "what was told stands"
    rounds.hear(events.Linked(at=NOW + 9, peer="12D3KooWlate"))
    rounds.hear(events.Linked(at=NOW + 9.1, peer="12D3KooWlater"))
    assert [happening.more for happening in rounds.changed()[2]] == [0, 0]


def test_a_peer_that_nobody_knows_any_more_goes_from_the_page() -> None:
    swarm = SyntheticSwarm(peers=3, now=NOW, rounds=2)
    model = Model()
    follow(model, swarm)
    model.delta()
    known = plain(model.snapshot())
    facts = swarm.look()
    forgotten = facts.peers[-1].peer
    model.see(msgspec.structs.replace(facts, peers=facts.peers[:-1]), NOW + 1, NOW + 1)
    delta = plain(model.delta())
    assert delta["peers"][forgotten] is None
    apply(known, delta)
    assert known == plain(model.snapshot())
    assert forgotten not in known["peers"]


def test_a_quiet_second_of_a_large_swarm_is_a_small_delta() -> None:
    swarm = SyntheticSwarm(peers=200, now=NOW, rounds=40)
    model = Model()
    follow(model, swarm)
    model.delta()
    whole = len(msgspec.json.encode(model.snapshot()))
    model.see(swarm.look(), NOW, NOW)
    assert model.delta() is None
    swarm.advance(NOW + 1)
    follow(model, swarm)
    delta = model.delta()
    assert delta is not None
    assert len(msgspec.json.encode(delta)) < whole / 4


def test_what_a_node_remembers_is_bounded_however_long_it_runs() -> None:
    sizes = []
    for rounds in (300, 600):
        swarm = SyntheticSwarm(peers=3, now=NOW, rounds=rounds)
        model = Model()
        follow(model, swarm)
        for second in range(3 * BANDWIDTH_POINTS):
            model.see(swarm.look(), NOW + second, NOW + second)
        found = model.snapshot()
        sizes.append({part: len(found[part]) for part in ("rounds", "certificates", "happenings", "bandwidth")})
        assert all(len(points) <= 512 for points in found["curves"].values())
    assert sizes[0] == sizes[1] == {"rounds": ROUND_LIMIT, **KEPT}


def test_a_round_has_the_times_of_its_phases_and_what_disturbed_it() -> None:
    swarm = SyntheticSwarm(peers=4, now=NOW, rounds=11)
    rounds = Rounds()
    for record in swarm.waiting:
        rounds.hear(record)
    calm, disturbed, current = rounds.rounds[-3:]
    assert [calm.state, disturbed.state, current.state] == ["certified", "certified", "open"]
    assert None not in (calm.contributed, calm.planned, calm.reduced, calm.ended)
    assert calm.began < calm.contributed < calm.planned < calm.reduced < calm.ended  # type: ignore[operator]
    assert calm.faults == []
    assert (calm.members, calm.contributors, calm.coverage, calm.attempt) == (5, 5, 1.0, 0)
    assert [fault.kind for fault in disturbed.faults] == ["suspected", "replanned", "evicted"]
    assert len({fault.peer for fault in disturbed.faults if fault.peer}) == 1
    assert (disturbed.contributors, disturbed.attempt, disturbed.coverage) == (4, 1, 0.8)
    newest = rounds.certificates[-1]
    assert (newest.round, newest.digest, newest.contributors) == (11, disturbed.digest, 4)
    assert disturbed.ended is not None
    assert disturbed.ended - disturbed.began <= ROUND_S


def test_what_the_node_gave_is_what_it_contributed_to_certified_rounds_also_in_lives_before() -> None:
    swarm = SyntheticSwarm(peers=2, now=NOW, rounds=0)
    model = Model()
    told = [
        events.Contributed(at=NOW - 9, round=1, tokens=100),
        events.Certified(at=NOW - 8, round=1, digest="d"),
        events.Contributed(at=NOW - 7, round=2, tokens=30),
        events.Contributed(at=NOW - 6, round=2, tokens=50),  # of the next life
        events.Certified(at=NOW - 5, round=2, digest="d"),
        events.Certified(at=NOW - 4, round=3, digest="d"),  # without it
        events.Contributed(at=NOW - 3, round=4, tokens=1000),
    ]
    for event in told:
        model.hear(event)
    follow(model, swarm)
    node = model.snapshot()["node"]
    assert (node["gave_rounds"], node["gave_tokens"], node["gave_since"]) == (2, 150, NOW - 9)
    model.delta()
    model.hear(events.Certified(at=NOW, round=4, digest="d"))
    model.see(swarm.look(), NOW + 1, NOW + 1)
    assert model.snapshot()["node"]["gave_tokens"] == 1150


def test_going_back_takes_the_curves_back() -> None:
    swarm = SyntheticSwarm(peers=2, now=NOW, rounds=9)
    model = Model()
    follow(model, swarm)
    assert model.history.curves["held_out"].points[-1][0] == 9
    model.hear(events.RolledBack(at=NOW, to=5, term="0.1", round=9))
    assert model.history.curves["held_out"].points[-1][0] == 5
    assert model.history.rounds.happenings[-1].detail == "to round 5"


@pytest.mark.parametrize(
    "line",
    [
        b"{}",
        b'{"event":"certified","at":1.0}',
        b'{"event":"certified","at":NaN}',
        b'{"event":["certified"],"at":1.0}',
        b'{"event":"round_started","at":1.0,"round":"one","members":2,"role":"training"}',
        b'{"event":"rolled_back","at":1.0}',
        b'{"event":"planned","at":1.0,"round":true}',
    ],
)
def test_a_malformed_event_never_comes_to_the_page(line: bytes) -> None:
    assert parse_event(line) is None


def test_proof_against_a_member_is_told_with_its_kind() -> None:
    rounds = Rounds()
    rounds.hear(events.Evidence(at=1.0, peer="12D3KooWliar", kind="two votes", round=3))
    rounds.hear(events.Banned(at=2.0, peers=("12D3KooWliar", "12D3KooWother"), round=3))
    happening, *banned = rounds.happenings
    assert [(known.kind, known.peer) for known in banned] == [("banned", "12D3KooWliar"), ("banned", "12D3KooWother")]
    assert (happening.severity, happening.peer, happening.detail) == ("bad", "12D3KooWliar", "two votes")


def test_gossip_and_late_states_end_rounds_too() -> None:
    rounds = Rounds()
    for number in (1, 2):
        rounds.hear(events.RoundStarted(at=number * 10.0, round=number, members=3, role="training"))
    rounds.hear(events.Stepped(at=15.0, round=1, partner="12D3KooWpartner", tokens=64))
    rounds.hear(events.CaughtUp(at=26.0, round=2))
    first, second = rounds.rounds
    assert (first.state, first.partner, first.tokens, first.ended) == ("stepped", "12D3KooWpartner", 64, 15.0)
    assert (second.state, second.ended) == ("skipped", 26.0)


def test_who_trains_no_more_has_no_speed_and_who_left_is_no_fault() -> None:
    swarm = SyntheticSwarm(peers=3, now=NOW, rounds=3)
    model = Model()
    follow(model, swarm)
    left = swarm.part()
    swarm.paused = True
    swarm.advance(NOW + 0.1)
    follow(model, swarm)
    facts = swarm.look()
    resting = next(peer.peer for peer in facts.peers if peer.reach == "direct")
    peers = [msgspec.structs.replace(peer, phase="paused") if peer.peer == resting else peer for peer in facts.peers]
    status = msgspec.structs.replace(facts.status, peers=summary_of(peers))
    assert all(peer.tokens_per_s > 0 for peer in peers if peer.peer != left)  # a record keeps the last speed
    model.see(msgspec.structs.replace(facts, status=status, peers=peers), NOW + 1, NOW + 1)
    found = plain(model.snapshot())
    assert found["peers"][left]["speed"] == found["peers"][resting]["speed"] == 0
    assert found["node"]["tokens_per_s"] == 0
    others = [peer["speed"] for peer in found["peers"].values()]
    assert found["summary"]["tokens_per_s"] == pytest.approx(sum(others), rel=0.02)
    told = found["happenings"][-1]
    assert (told["kind"], told["severity"], told["peer"]) == ("departed", "info", left)
    assert all(not round["faults"] for round in found["rounds"])


def test_the_device_is_the_one_that_the_trainer_took() -> None:
    swarm = SyntheticSwarm(peers=1, now=NOW, rounds=1)
    model = Model()
    follow(model, swarm)
    assert plain(model.snapshot())["node"]["device"] == "cuda"
    model.hear(events.TrainerStarted(at=NOW, device="cuda:1", import_s=1.0))
    follow(model, swarm)
    assert plain(model.snapshot())["node"]["device"] == "cuda:1"


def test_the_first_sample_is_kept_beside_the_newest_and_goes_with_the_state_it_is_of() -> None:
    model = Model()
    first, *others = [events.Sampled(round=round, texts={"The ": f"cat {round}"}) for round in range(4)]
    for event in (first, *others):
        model.hear(event)
    assert model.snapshot()["samples"] == (first, others[-1])
    delta = model.delta()
    assert delta is not None
    assert delta["samples"] == (first, others[-1])
    assert "samples" not in (model.delta() or {})
    model.hear(events.RolledBack(round=4, to=1))
    assert model.snapshot()["samples"] == (first,)
    model.hear(others[0])
    assert model.snapshot()["samples"] == (first, others[0])
