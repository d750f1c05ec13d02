"""Metrics of a node for Prometheus to scrape, under names and types after its conventions.

Counters and histograms of what happened are fed by the event log; the rest is read off the daemon at each scrape.
There are as many series for a thousand peers as for a hundred: counts by state, sums and quantiles, and a label of its
own for each peer up to `PEER_LABEL_LIMIT`, in the order in which they came; all later ones share `other`, and each
series only ever counts up.

Source: https://prometheus.io/docs/practices/naming/
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal.node.dashboard.facts import Facts, NodeFacts
from shoal.node.peer_facts import QUANTILES, STATES, PeerFacts, PeerSummary, summary_of
from shoal.node.reporting import events
from shoal.node.reporting.events import Event, name_of
from shoal.protocol.member import ABSTAINING, FORKED
from shoal.protocol.pairing import Phase as PairingPhase
from shoal.protocol.round import Phase

PEER_LABEL_LIMIT = 64
OTHER = "other"
SECONDS_BUCKETS = (0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600, 1800, 3600)
PHASES = (
    "joining",
    *(phase.value for phase in Phase),
    *(phase.value for phase in PairingPhase if phase is not PairingPhase.PAUSED),
    "following",
    "paused",
    "no quorum",
    FORKED,
    ABSTAINING,
    "leaving",
    "done",
)
REACHES = ("direct", "detour", "suspect", "unlinked", "gone")
FAULTS: Final[tuple[type[Event], ...]] = (
    events.Died,
    events.Suspected,
    events.Lost,
    events.Detoured,
    events.Revoked,
    events.Evidence,
    events.Banned,
    events.ViewChanged,
    events.RolledBack,
    events.TrainerRestarted,
    events.AgentDied,
    events.LoopDetached,
)


class Metrics:
    """The metrics of one node. viewers: how many pages are open."""

    def __init__(self, *, viewers: Callable[[], int] = lambda: 0) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a series more for each, which says when this node started
        self._registry = CollectorRegistry(auto_describe=False)
        self._rounds = self._counter("shoal_rounds", "Rounds that ended here, by how.", ("outcome",))
        self._faults = self._counter("shoal_faults", "What disturbed rounds, by kind.", ("kind",))
        self._tokens = self._counter("shoal_trained_tokens", "Tokens in this node's contributions.")
        self._round_s = self._seconds("shoal_round_duration_seconds", "From the start of a round to its certificate.")
        self._reduce_s = self._seconds("shoal_reduce_duration_seconds", "From a plan to all its final chunks.")
        for outcome in ("certified", "stepped", "shared", "skipped"):
            self._rounds.labels(outcome)
        for kind in FAULTS:
            self._faults.labels(name_of(kind))
        self._now = _Now(viewers)
        self._registry.register(self._now)
        ProcessCollector(registry=self._registry)

    def _counter(self, name: str, text: str, labels: Iterable[str] = ()) -> Counter:
        return Counter(name, text, labels, registry=self._registry)

    def _seconds(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=SECONDS_BUCKETS, registry=self._registry)

    def hear(self, event: Event) -> None:
        """Count an event of this life of the node."""
        match event:
            case events.Died(left=True):
                pass
            case events.Contributed():
                self._tokens.inc(event.tokens)
            case events.Certified():
                self._ended("certified", event.total_s)
                self._reduce_s.observe(_finite(event.reduce_s))
                self._now.coverage = _finite(event.coverage)
            case events.Stepped():
                self._ended("stepped", event.total_s)
            case events.Rollouts():
                self._ended("shared", event.seconds)
            case events.CaughtUp():
                self._rounds.labels("skipped").inc()
            case _ if isinstance(event, FAULTS):
                self._faults.labels(event.name).inc()

    def _ended(self, outcome: str, seconds: float) -> None:
        self._rounds.labels(outcome).inc()
        self._round_s.observe(_finite(seconds))

    def render(self, facts: Facts, accept: str = "") -> tuple[bytes, str]:
        """Render all metrics with these facts in the format that the client accepts; returns its media type too."""
        encode, kind = choose_encoder(accept)
        self._now.facts = facts
        return encode(self._registry), kind


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


class _Now(Collector):
    """Metrics that are read at each scrape."""

    def __init__(self, viewers: Callable[[], int]) -> None:
        self.facts: Facts | None = None
        self.coverage = math.nan
        self._viewers = viewers
        self._labelled: set[str] = set()
        self._seen: dict[str, tuple[int, int]] = {}
        self._counted: dict[str, tuple[int, int]] = {}

    def describe(self) -> Iterable[Metric]:
        """Describe nothing: names are found when they are collected."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The families of this moment."""
        if self.facts is None:
            return
        node = self.facts.node
        yield _info(node, self.facts.peers)
        yield _one_of("shoal_phase", "The phase that this node is in.", "phase", PHASES, node.phase)
        yield from _peers(node, summary_of(self.facts.peers))
        yield from _gauges(node, self.coverage, self._viewers())
        yield from _bytes(node)
        yield _errors(node)
        yield from self._peer_bytes(self.facts)
        yield from _rollouts(node)

    def _peer_bytes(self, facts: Facts) -> Iterator[Metric]:
        for peer in facts.peers:
            if peer.reach == "self":
                continue
            if peer.peer not in self._labelled and len(self._labelled) < PEER_LABEL_LIMIT:
                self._labelled.add(peer.peer)
            label = peer.peer if peer.peer in self._labelled else OTHER
            sent, received = self._seen.get(peer.peer, (0, 0))
            self._seen[peer.peer] = (peer.sent, peer.received)
            known = self._counted.get(label, (0, 0))
            self._counted[label] = (known[0] + _grown(sent, peer.sent), known[1] + _grown(received, peer.received))
        present = {peer.peer for peer in facts.peers}
        self._seen = {peer: counts for peer, counts in self._seen.items() if peer in present}
        names = ("shoal_peer_sent_bytes", "shoal_peer_received_bytes")
        texts = ("Bytes that a peer took over lanes.", "Bytes that came from a peer over lanes.")
        for way in (0, 1):
            family = CounterMetricFamily(names[way], texts[way], labels=("peer",))
            for label, counts in sorted(self._counted.items()):
                family.add_metric((label,), counts[way])
            yield family


def _grown(before: int, after: int) -> int:
    """Growth of a count that begins anew when its lanes are forgotten."""
    return after - before if after >= before else after


def _info(node: NodeFacts, peers: Iterable[PeerFacts]) -> Metric:
    family = InfoMetricFamily("shoal_node", "Who this node is.")
    family.add_metric(
        (),
        {
            "peer": node.peer,
            "swarm": node.swarm,
            "name": next((peer.name for peer in peers if peer.reach == "self"), ""),
            "swarm_name": node.name,
            "strategy": node.strategy,
            "workload": node.workload,
            "software": node.software,
        },
    )
    return family


def _one_of(name: str, text: str, label: str, values: Iterable[str], value: str) -> Metric:
    family = GaugeMetricFamily(name, text, labels=(label,))
    for known in values:
        family.add_metric((known,), float(known == value))
    return family


def _peers(node: NodeFacts, peers: PeerSummary) -> Iterator[Metric]:
    """Sums over all peers. Their versions are texts of theirs, and no labels."""
    others = dict(peers.reach)
    others.pop("self", None)
    yield _counts("shoal_peers", "Other nodes, by how they are reached.", "reach", REACHES, others)
    yield _counts("shoal_peer_states", "Nodes, this one among them, by state.", "state", STATES, peers.states)
    speeds = GaugeMetricFamily(
        "shoal_peer_tokens_per_second", "The speed of those that train, as they say.", labels=("quantile",)
    )
    for quantile, speed in zip(QUANTILES, peers.speeds or (math.nan,) * len(QUANTILES), strict=True):
        speeds.add_metric((f"{quantile:g}",), speed)
    yield speeds
    same = peers.software.get(node.software, 0)
    for name, text, value in (
        ("shoal_swarm_tokens_per_second", "The speed of all nodes together, as they say.", peers.tokens_per_s),
        ("shoal_peers_following", "Nodes that are here and no members.", peers.following),
        ("shoal_peers_behind", "Nodes whose round is behind that of the middle one.", peers.behind),
        ("shoal_peers_other_software", "Nodes that run another version.", sum(peers.software.values()) - same),
    ):
        family = GaugeMetricFamily(name, text)
        family.add_metric((), value)
        yield family


def _counts(name: str, text: str, label: str, values: Iterable[str], counts: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=(label,))
    for value in values:
        family.add_metric((value,), counts.get(value, 0))
    return family


def _gauges(node: NodeFacts, coverage: float, viewers: int) -> Iterator[Metric]:
    for name, text, value in (
        ("shoal_round", "The round of this node's newest state or certificate.", node.round),
        ("shoal_members", "Members, whose work counts, this node included.", node.members),
        ("shoal_members_missing", "Voters that are held for dead.", len(node.missing)),
        ("shoal_held_out_loss", "The held-out loss of the newest certified state.", node.loss),
        (
            "shoal_train_loss",
            "The loss of this node's own training, in the unit of the held-out loss where it has one.",
            node.train_loss,
        ),
        ("shoal_tokens_per_second", "The speed of this node's trainer.", node.tokens_per_s),
        ("shoal_trainer_blocked_ratio", "The share of its time that the trainer waits.", node.blocked_fraction),
        ("shoal_round_coverage_ratio", "The share of contributions that the newest certificate holds.", coverage),
        ("shoal_disk_free_bytes", "Room on the disk of the data folder.", node.disk_free_bytes),
        ("shoal_uptime_seconds", "Since this node started.", node.uptime_s),
        ("shoal_page_viewers", "Open pages of this node.", viewers),
    ):
        family = GaugeMetricFamily(name, text)
        family.add_metric((), math.nan if value is None else value)
        yield family


def _bytes(node: NodeFacts) -> Iterator[Metric]:
    for name, text, counts in (
        ("shoal_sent_bytes", "Bytes sent.", (node.traffic.lanes_sent, node.traffic.control_sent)),
        ("shoal_received_bytes", "Bytes received.", (node.traffic.lanes_received, node.traffic.control_received)),
    ):
        family = CounterMetricFamily(name, text, labels=("channel",))
        for channel, count in zip(("lanes", "control"), counts, strict=True):
            family.add_metric((channel,), count)
        yield family


def _errors(node: NodeFacts) -> Metric:
    text = "Requests of others that failed here: the peer broke the protocol, or this node has a bug."
    family = CounterMetricFamily("shoal_request_errors", text, labels=("fault",))
    family.add_metric(("peer",), node.peer_errors)
    family.add_metric(("own",), node.own_errors)
    return family


def _rollouts(node: NodeFacts) -> Iterator[Metric]:
    known = node.rollouts
    if known is None:
        return
    reward = GaugeMetricFamily("shoal_reward", "The mean reward of this node's newest completions.")
    reward.add_metric((), math.nan if known.reward is None else known.reward)
    yield reward
    held_out = GaugeMetricFamily("shoal_held_out_reward", "The greedy reward of this node's policy on held-out tasks.")
    held_out.add_metric((), math.nan if known.held_out_reward is None else known.held_out_reward)
    yield held_out
    groups = CounterMetricFamily(
        "shoal_rollout_groups", "Groups of rollouts, by what became of them.", labels=("what",)
    )
    for what, count in (("made", known.made), ("pulled", known.pulled), ("taken", known.taken)):
        groups.add_metric((what,), count)
    yield groups
    rejected = CounterMetricFamily(
        "shoal_rollouts_rejected", "Offers and groups that were refused.", labels=("reason",)
    )
    for reason, count in sorted(known.rejected.items()):
        rejected.add_metric((reason,), count)
    yield rejected
    tokens = CounterMetricFamily("shoal_generated_tokens", "Tokens that this node generated.")
    tokens.add_metric((), known.generated_tokens)
    yield tokens
