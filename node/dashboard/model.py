"""Model of the page, kept in bounded memory: a snapshot of everything, then the changes.

    event log ── hear ──┐                        ┌── snapshot: for a viewer that comes
    facts ────── see ───┴─ rounds, curves, peers ┴── delta: for those that are there, what is new since the last

A delta names what it replaces: fields of the node, the summary and of peers by name, rounds by their key; to everything
else it appends. Numbers that change all the time are rounded to what an eye can tell, so that most of them stay out of
it; and however large the swarm, a delta is small (`shoal.node.dashboard.peers`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from math import isfinite
from typing import Any, Final

import msgspec

from shoal.node.dashboard.curves import Curve
from shoal.node.dashboard.facts import Facts, GroupFacts, NodeFacts, Traffic
from shoal.node.dashboard.health import Check, health_of
from shoal.node.dashboard.peers import Fields, Peers, rounded
from shoal.node.dashboard.rounds import Rounds
from shoal.node.gave import Gave
from shoal.node.outcome import is_held_out
from shoal.node.peer_facts import PeerSummary, summary_of
from shoal.node.reporting import events
from shoal.node.reporting.events import Event

BANDWIDTH_POINTS = 300
BANDWIDTH_PERIOD_S = 2.0
NAMED_LIMIT = 8
"""Missing members that are named on the page, and peers of whom most groups were taken."""
SOURCE_LIMIT = 4096
"""Peers of whom is counted how many groups were taken."""
CURVES: Final = ("train", "held_out", "reward", "others_reward")


class Model:
    """The swarm as the page shows it. Use from one thread."""

    def __init__(self) -> None:
        self.seq = 0
        self.rounds = Rounds()
        self.peers = Peers()
        self.curves = {name: Curve() for name in CURVES}
        self.bandwidth: deque[tuple[float, float, float]] = deque(maxlen=BANDWIDTH_POINTS)
        self.metric = ""
        self.device = ""
        self._new_bandwidth: list[tuple[float, float, float]] = []
        self._node: Fields = {}
        self._summary: Fields = {}
        self._health: list[Check] = []
        self._groups: dict[str, GroupFacts] = {}
        self._sources: Counter[str] = Counter()
        """How many groups were taken of whom, as far as the log tells."""
        self._gave = Gave()
        """As far as the log tells."""
        self._samples: tuple[events.Sampled, ...] = ()
        """The first that are known, and the newest."""
        self._news: Fields = {}
        self._total: tuple[float, int, int] | None = None

    # -- what comes in ---------------------------------------------------------------------------------------

    def hear(self, event: Event) -> None:
        """Take one event."""
        self.rounds.hear(event)
        self._gave.hear(event)
        match event:
            case events.Contributed():
                self._measure("train", event.round, event.loss)
            case events.Evaluated() if is_held_out(event.metric):
                self.metric = event.metric
                self._measure("held_out", event.round, event.loss)
            case events.Sampled():
                self._samples = (*self._samples[:1], event)
                self._news["samples"] = self._samples
            case events.TrainerStarted():
                self.device = event.device
            case events.Rollouts():
                self._measure("reward", event.round, event.reward)
                self._measure("others_reward", event.round, event.external_reward)
                self._count_sources(event.origins)
            case events.RolledBack():
                for curve in self.curves.values():
                    curve.rewind(event.to)
                self._samples = tuple(known for known in self._samples if known.round <= event.to)
                self._news["samples"] = self._samples

    def _count_sources(self, origins: Mapping[str, int]) -> None:
        self._sources.update(origins)
        if len(self._sources) > SOURCE_LIMIT:
            self._sources = Counter(dict(self._sources.most_common(SOURCE_LIMIT // 2)))
        if origins:
            self._news["sources"] = self._sources.most_common(NAMED_LIMIT)

    def _measure(self, curve: str, round: int, value: float | None) -> None:
        if value is not None and isfinite(value):
            self.curves[curve].add(round, value)

    def see(self, facts: Facts, now: float, at: float, *, in_turn: bool = False) -> None:
        """Take the facts of this moment: `now` on a clock that never goes back, `at` on the wall's.

        in_turn: whether viewers are there, who are told of a part of the peers at once.
        """
        self.measure(facts.node.traffic, now, at)
        summary = summary_of(facts.peers)
        self._node = self._replaced("node", self._node, self._node_fields(facts.node))
        self._summary = self._replaced("summary", self._summary, _summary_fields(summary))
        self.peers.see(facts.peers, now, in_turn=in_turn)
        health = health_of(facts.node, summary)
        if health != self._health:
            self._health = health
            self._news["health"] = health
        groups = {group.digest: group for group in facts.groups}
        fresh = [group for digest, group in groups.items() if digest not in self._groups]
        if fresh:
            self._news["groups"] = [*self._news.get("groups", ()), *fresh]
        self._groups = groups

    def measure(self, traffic: Traffic, now: float, at: float) -> None:
        """Take the bytes of this moment: a point of the curve when it is time."""
        then, sent, received = self._total or (now, traffic.sent, traffic.received)
        if self._total is None:
            self._total = (now, sent, received)
        elif now - then >= BANDWIDTH_PERIOD_S:
            up, down = (traffic.sent - sent) / (now - then), (traffic.received - received) / (now - then)
            self._total = (now, traffic.sent, traffic.received)
            point = (round(at, 1), rounded(up), rounded(down))
            self.bandwidth.append(point)
            self._new_bandwidth = [*self._new_bandwidth, point][-BANDWIDTH_POINTS:]

    def _node_fields(self, node: NodeFacts) -> Fields:
        up, down = self.bandwidth[-1][1:] if self.bandwidth else (0.0, 0.0)
        fields = {field: getattr(node, field) for field in node.__struct_fields__ if field != "traffic"}
        for field in ("train_loss", "tokens_per_s", "blocked_fraction", "cpu", "memory_bytes", "disk_free_bytes"):
            fields[field] = fields[field] and rounded(fields[field])
        return fields | {
            "tokens_per_s": 0 if node.paused else fields["tokens_per_s"],
            "uptime_s": round(node.uptime_s),
            "device": self.device or node.device,
            "missing": len(node.missing),
            "missing_peers": tuple(node.missing[:NAMED_LIMIT]),
            "long_missing": len(node.long_missing),
            "long_missing_peers": tuple(node.long_missing[:NAMED_LIMIT]),
            "sent": rounded(node.traffic.sent),
            "upload": up,
            "download": down,
            "metric": self.metric,
            "gave_rounds": self._gave.rounds,
            "gave_tokens": self._gave.tokens,
            "gave_since": self._gave.since,
        }

    def _replaced(self, section: str, before: Mapping[str, Any], after: Fields) -> Fields:
        changed = {key: value for key, value in after.items() if key not in before or before[key] != value}
        if changed:
            self._news.setdefault(section, {}).update(changed)
        return after

    # -- what goes out ---------------------------------------------------------------------------------------

    def delta(self) -> Fields | None:
        """Changes since the last delta, None if there are none. Counts the sequence on."""
        news, self._news = self._news, {}
        rounds, certificates, happenings = self.rounds.changed()
        news |= {
            key: items
            for key, items in (
                ("peers", self.peers.changed()),
                ("rounds", rounds),
                ("certificates", certificates),
                ("happenings", happenings),
            )
            if items
        }
        for name, curve in self.curves.items():
            redone, points = curve.changed()
            if redone or points:
                news.setdefault("curves" if redone else "points", {})[name] = points
        if self._new_bandwidth:
            news["bandwidth"], self._new_bandwidth = self._new_bandwidth, []
        if not news:
            return None
        self.seq += 1
        return {"seq": self.seq, **news}

    def snapshot(self) -> Fields:
        """Snapshot as of the last delta: to be taken right after one."""
        return {
            "seq": self.seq,
            "node": self._node,
            "health": self._health,
            "summary": self._summary,
            "peers": self.peers.live,
            "rounds": self.rounds.rounds,
            "certificates": self.rounds.certificates,
            "happenings": self.rounds.happenings,
            "curves": {name: curve.points for name, curve in self.curves.items()},
            "bandwidth": list(self.bandwidth),
            "groups": list(self._groups.values()),
            "samples": self._samples,
            "sources": self._sources.most_common(NAMED_LIMIT),
        }


def _summary_fields(summary: PeerSummary) -> Fields:
    fields: Fields = msgspec.to_builtins(summary)
    fields["tokens_per_s"] = rounded(summary.tokens_per_s)
    fields["speeds"] = None if summary.speeds is None else [rounded(speed, 2) for speed in summary.speeds]
    for outlier in fields["slowest"]:
        outlier["value"] = rounded(outlier["value"], 2)
    return fields
