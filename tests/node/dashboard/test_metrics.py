"""The metrics as Prometheus reads them, and the Grafana dashboard that asks for them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from shoal.lab.synthetic_swarm import SyntheticSwarm
from shoal.node.dashboard.facts import Facts
from shoal.node.reporting.metrics import OTHER, PEER_LABEL_LIMIT, Metrics
from tests.node.dashboard.lab import NOW

ROOT = Path(__file__).resolve().parents[3]
GRAFANA, INTERFACES = ROOT / "deploy" / "grafana.json", ROOT / "docs" / "interfaces.md"
SERIES_LIMIT = 400

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(metrics: Metrics, facts: Facts) -> Samples:
    content, kind = metrics.render(facts)
    assert kind.startswith("text/plain")
    found: Samples = {}
    for family in text_string_to_metric_families(content.decode()):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


def with_node(facts: Facts, **changes: Any) -> Facts:
    """The facts, with some of what they say of the node itself changed."""
    node = msgspec.structs.replace(facts.status.node, **changes)
    return msgspec.structs.replace(facts, status=msgspec.structs.replace(facts.status, node=node))


def metrics_of(swarm: SyntheticSwarm) -> Metrics:
    metrics = Metrics(viewers=lambda: 2)
    while swarm.waiting:
        metrics.hear(swarm.waiting.popleft())
    return metrics


def test_a_scrape_tells_what_happened_and_what_is() -> None:
    swarm = SyntheticSwarm(peers=9, now=NOW, rounds=22)
    found = scrape(metrics_of(swarm), swarm.look())
    assert found["shoal_rounds_total", (("outcome", "certified"),)] == 22
    assert found["shoal_round_duration_seconds_count", ()] == 22
    assert 22 * 6 < found["shoal_round_duration_seconds_sum", ()] < 22 * 8
    assert found["shoal_reduce_duration_seconds_count", ()] == 22
    assert found["shoal_faults_total", (("kind", "suspected"),)] == 2
    assert found["shoal_faults_total", (("kind", "view_changed"),)] == 1
    assert found["shoal_faults_total", (("kind", "died"),)] == 0
    assert found["shoal_round", ()] == 22
    assert found["shoal_page_viewers", ()] == 2
    assert found["shoal_peers", (("reach", "direct"),)] + found["shoal_peers", (("reach", "detour"),)] == 9
    status = swarm.look().status
    assert found["shoal_sent_bytes_total", (("channel", "lanes"),)] == status.bytes.lanes_sent
    assert found["shoal_sent_bytes_total", (("channel", "control"),)] == status.bytes.sent - status.bytes.lanes_sent
    assert found["shoal_held_out_loss", ()] == status.loss
    assert found["process_resident_memory_bytes", ()] > 0
    assert found["shoal_request_errors_total", (("fault", "peer"),)] == 0
    assert sum(value for (name, _), value in found.items() if name == "shoal_phase") == 1
    assert "shoal_reward" not in {name for name, _ in found}


def test_failed_requests_are_counted_by_whose_fault_it_was() -> None:
    swarm = SyntheticSwarm(peers=2, now=NOW, rounds=2)
    facts = swarm.look()
    failed = with_node(facts, peer_errors=3, own_errors=1)
    found = scrape(metrics_of(swarm), failed)
    assert found["shoal_request_errors_total", (("fault", "peer"),)] == 3
    assert found["shoal_request_errors_total", (("fault", "own"),)] == 1


def test_peers_beyond_the_limit_share_a_label_and_nothing_is_counted_twice() -> None:
    swarm = SyntheticSwarm(peers=200, now=NOW, rounds=2)
    metrics = metrics_of(swarm)
    swarm.advance(NOW + 4)
    facts = swarm.look()
    found = scrape(metrics, facts)
    again = scrape(metrics, facts)
    sent = {labels[0][1]: value for (name, labels), value in again.items() if name == "shoal_peer_sent_bytes_total"}
    assert len(sent) == PEER_LABEL_LIMIT + 1
    assert sum(sent.values()) == sum(peer.sent for peer in facts.peers)
    assert sent[OTHER] > 0
    assert len(found) < SERIES_LIMIT


def test_a_thousand_peers_are_no_more_series_than_a_hundred_and_all_of_them_are_counted() -> None:
    found = {}
    for peers in (100, 1000):
        swarm = SyntheticSwarm(peers=peers, now=NOW, rounds=2)
        metrics = metrics_of(swarm)
        swarm.kill(7)
        swarm.advance(NOW + 4)
        found[peers] = scrape(metrics, swarm.look())
    few, many = ({(name, labels) for name, labels in series if "peer" not in dict(labels)} for series in found.values())
    assert few == many
    assert len(found[100]) == len(found[1000]) < SERIES_LIMIT
    states = {labels[0][1]: value for (name, labels), value in found[1000].items() if name == "shoal_peer_states"}
    assert sum(states.values()) == 1001
    assert states["gone"] == 7
    assert found[1000]["shoal_peers", (("reach", "gone"),)] == 7
    rows = swarm.look().peers
    assert found[1000]["shoal_swarm_tokens_per_second", ()] == sum(peer.speed for peer in rows)
    training = sorted(peer.speed for peer in rows if peer.state == "training")
    assert found[1000]["shoal_peer_tokens_per_second", (("quantile", "0.5"),)] == training[len(training) // 2]
    assert found[1000]["shoal_peers_following", ()] == sum(not peer.member for peer in rows)
    assert found[1000]["shoal_peers_other_software", ()] == sum(
        peer.software == "shoal 0.0.9" and peer.reach != "gone" for peer in rows
    )
    assert found[1000]["shoal_peers_behind", ()] > 0


def test_a_peers_counters_go_up_also_when_its_lanes_were_forgotten() -> None:
    swarm = SyntheticSwarm(peers=1, now=NOW, rounds=2)
    metrics, facts = metrics_of(swarm), swarm.look()
    me, peer = facts.peers
    label = (("peer", peer.peer),)
    seen = []
    for sent in (100, 250, 30, 30, 80):
        now = msgspec.structs.replace(peer, sent=sent)
        found = scrape(metrics, msgspec.structs.replace(facts, peers=[me, now]))
        seen.append(found["shoal_peer_sent_bytes_total", label])
    assert seen == [100, 250, 280, 280, 330]


def test_what_is_not_known_yet_is_nan_and_text_of_peers_cannot_break_the_format() -> None:
    swarm = SyntheticSwarm(peers=1, now=NOW, rounds=0)
    facts = swarm.look()
    facts = with_node(facts, swarm_name='reef "\\\n# HELP', workload="x}\n")
    named = msgspec.structs.replace(facts.status, names={facts.status.peer_id: "barn", facts.peers[1].peer: "mill"})
    found = scrape(Metrics(), msgspec.structs.replace(facts, status=named))
    assert found["shoal_held_out_loss", ()] != found["shoal_held_out_loss", ()]
    (info,) = [dict(labels) for (name, labels), _ in found.items() if name == "shoal_node_info"]
    assert (info["name"], info["swarm_name"], info["workload"]) == ("barn", 'reef "\\\n# HELP', "x}\n")


def test_each_phase_that_the_interface_lists_has_a_series() -> None:
    listed = re.search(r"phase \((.*?)\)", INTERFACES.read_text(), re.DOTALL)
    assert listed is not None
    found = scrape(Metrics(), SyntheticSwarm(peers=1, now=NOW, rounds=0).look())
    phases = {labels[0][1] for name, labels in found if name == "shoal_phase"}
    assert {"forked", "abstaining", "seeking"} < phases == set(re.findall(r"`([a-z ]+)`", listed[1]))


def test_the_interface_lists_each_metric() -> None:
    paragraph = re.search(r"\*\*Metrics\*\* .*?\n\n", INTERFACES.read_text(), re.DOTALL)
    assert paragraph is not None
    swarm = SyntheticSwarm(peers=3, now=NOW, rounds=3, rollouts=True)
    content = metrics_of(swarm).render(swarm.look())[0].decode()
    named = set(re.findall(r"^# HELP shoal_(\w+)", content, re.MULTILINE))
    assert set(re.findall(r"`([a-z_]+)`", paragraph[0])) - {"shoal_"} == named


def test_grafana_says_why_a_panel_is_empty_in_a_swarm_without_rollouts() -> None:
    swarm = SyntheticSwarm(peers=3, now=NOW, rounds=3)
    names = {name for name, _ in scrape(metrics_of(swarm), swarm.look())}
    empty = {}
    for panel in json.loads(GRAFANA.read_text())["panels"]:
        asked = re.findall(r"\b(?:shoal|process)_\w+", " ".join(target["expr"] for target in panel["targets"]))
        if not names & set(asked):
            empty[panel["title"]] = panel["fieldConfig"]["defaults"].get("noValue")
    assert empty == {"Reward": "Rewards come where rollouts are shared."}


def test_grafana_asks_only_for_metrics_that_a_node_has() -> None:
    swarm = SyntheticSwarm(peers=3, now=NOW, rounds=3, rollouts=True)
    names = {name for name, _ in scrape(metrics_of(swarm), swarm.look())}
    board = json.loads(GRAFANA.read_text())
    asked = set()
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            found = set(re.findall(r"\b(?:shoal|process)_\w+", target["expr"]))
            assert found, panel["title"]
            asked |= found
    assert len(asked) >= 15
    assert asked <= names
