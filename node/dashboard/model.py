"""Model of the page, kept in bounded memory: a snapshot of everything, then the changes.

    event log ── hear ──┐                        ┌── snapshot: for a viewer that comes
    facts ────── see ───┴─ rounds, curves, peers ┴── delta: for those that are there, what is new since the last

A delta names what it replaces: fields of the node and of peers by name, rounds by their key; to everything else it
appends. Numbers that change all the time are rounded to what an eye can tell, so that most of them stay out of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import floor, isfinite, log10
from typing import Any, Final

from shoal.node.dashboard.curves import Curve
from shoal.node.dashboard.facts import Facts, GroupFacts, PeerFacts
from shoal.node.dashboard.health import Check, health_of
from shoal.node.dashboard.rounds import Rounds
from shoal.node.reporting import events
from shoal.node.reporting.events import Event

BANDWIDTH_POINTS = 300
BANDWIDTH_PERIOD_S = 2.0
DIGITS = 3
CURVES: Final = ("train", "held_out", "reward", "others_reward")

Fields = dict[str, Any]


class Model:
    """The swarm as the page shows it. Use from one thread."""

    def __init__(self) -> None:
        self.seq = 0
        self.rounds = Rounds()
        self.curves = {name: Curve() for name in CURVES}
        self.bandwidth: deque[tuple[float, float, float]] = deque(maxlen=BANDWIDTH_POINTS)
        self.metric = ""
        self.device = ""
        self._new_bandwidth: list[tuple[float, float, float]] = []
        self._node: Fields = {}
        self._peers: dict[str, Fields] = {}
        self._health: list[Check] = []
        self._groups: dict[str, GroupFacts] = {}
        self._news: Fields = {}
        self._counted: dict[str, tuple[float, int, int]] = {}
        self._total: tuple[float, int, int] | None = None

    # -- what comes in ---------------------------------------------------------------------------------------

    def hear(self, event: Event) -> None:
        """Take one event."""
        self.rounds.hear(event)
        match event:
            case events.Contributed():
                self._measure("train", event.round, event.loss)
            case events.Evaluated():
                self.metric = event.metric
                self._measure("held_out", event.round, event.loss)
            case events.TrainerStarted():
                self.device = event.device
            case events.Rollouts():
                self._measure("reward", event.round, event.reward)
                self._measure("others_reward", event.round, event.external_reward)
            case events.RolledBack():
                for curve in self.curves.values():
                    curve.rewind(event.to)

    def _measure(self, curve: str, round: int, value: float | None) -> None:
        if value is not None and isfinite(value):
            self.curves[curve].add(round, value)

    def see(self, facts: Facts, now: float, at: float) -> None:
        """Take the facts of this moment: `now` on a clock that never goes back, `at` on the wall's."""
        node = {field: getattr(facts.node, field) for field in facts.node.__struct_fields__}
        up, down = self._rates(facts, now, at)
        for field in ("uptime_s",):
            node[field] = round(node[field])
        for field in ("train_loss", "tokens_per_s", "blocked_fraction", "cpu"):
            node[field] = node[field] and _rounded(node[field])
        if node["paused"]:
            node["tokens_per_s"] = 0
        node |= {
            "device": self.device or node["device"],
            "memory_bytes": _rounded(node["memory_bytes"]),
            "disk_free_bytes": _rounded(node["disk_free_bytes"]),
            "upload": _rounded(up),
            "download": _rounded(down),
            "alive": sum(peer.reach not in ("gone", "unlinked") for peer in facts.peers),
            "swarm_tokens_per_s": _rounded(sum(map(_speed_of, facts.peers))),
            "metric": self.metric,
        }
        self._replace_fields("node", self._node, node)
        self._node = node
        self._see_peers(facts.peers, now)
        health = health_of(facts)
        if health != self._health:
            self._health = health
            self._news["health"] = health
        groups = {group.digest: group for group in facts.groups}
        fresh = [group for digest, group in groups.items() if digest not in self._groups]
        if fresh:
            self._news["groups"] = [*self._news.get("groups", ()), *fresh]
        self._groups = groups

    def _rates(self, facts: Facts, now: float, at: float) -> tuple[float, float]:
        """Upload and download in bytes/s since the last point of the curve; a point of it when it is time."""
        sent = facts.node.lanes_sent + facts.node.control_sent
        received = facts.node.lanes_received + facts.node.control_received
        then, sent_then, received_then = self._total or (now, sent, received)
        if self._total is None:
            self._total = (now, sent, received)
        elif now - then >= BANDWIDTH_PERIOD_S:
            point = (at, (sent - sent_then) / (now - then), (received - received_then) / (now - then))
            self._total = (now, sent, received)
            rounded = (round(point[0], 1), _rounded(point[1]), _rounded(point[2]))
            self.bandwidth.append(rounded)
            self._new_bandwidth = [*self._new_bandwidth, rounded][-BANDWIDTH_POINTS:]
        return self.bandwidth[-1][1:] if self.bandwidth else (0.0, 0.0)

    def _see_peers(self, peers: tuple[PeerFacts, ...] | Any, now: float) -> None:
        news: dict[str, Fields | None] = self._news.setdefault("peers", {})
        seen: dict[str, Fields] = {}
        counted: dict[str, tuple[float, int, int]] = {}
        for peer in peers:
            then, sent, received = self._counted.get(peer.peer, (now, peer.sent, peer.received))
            before = self._peers.get(peer.peer, {})
            up, down = before.get("up", 0.0), before.get("down", 0.0)
            if now - then >= BANDWIDTH_PERIOD_S:
                up = _rounded(max(0, peer.sent - sent) / (now - then))
                down = _rounded(max(0, peer.received - received) / (now - then))
                then, sent, received = now, peer.sent, peer.received
            counted[peer.peer] = (then, sent, received)
            fields = {
                "phase": peer.phase,
                "reach": peer.reach,
                "member": peer.member,
                "round": peer.round,
                "speed": _rounded(_speed_of(peer)),
                "sent": _rounded(peer.sent),
                "received": _rounded(peer.received),
                "up": up,
                "down": down,
                "software": peer.software,
                "address": peer.address,
            }
            seen[peer.peer] = fields
            changed = {key: value for key, value in fields.items() if before.get(key) != value}
            if changed:
                news[peer.peer] = {**(news.get(peer.peer) or {}), **changed}
        for gone in self._peers.keys() - seen.keys():
            news[gone] = None
        self._peers, self._counted = seen, counted

    def _replace_fields(self, section: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        changed = {key: value for key, value in after.items() if key not in before or before[key] != value}
        if changed:
            self._news.setdefault(section, {}).update(changed)

    # -- what goes out ---------------------------------------------------------------------------------------

    def delta(self) -> Fields | None:
        """Changes since the last delta, None if there are none. Counts the sequence on."""
        news, self._news = self._news, {}
        if not news.get("peers"):
            news.pop("peers", None)
        rounds, certificates, happenings = self.rounds.changed()
        news |= {
            key: items
            for key, items in (("rounds", rounds), ("certificates", certificates), ("happenings", happenings))
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
            "peers": self._peers,
            "rounds": self.rounds.rounds,
            "certificates": self.rounds.certificates,
            "happenings": self.rounds.happenings,
            "curves": {name: curve.points for name, curve in self.curves.items()},
            "bandwidth": list(self.bandwidth),
            "groups": list(self._groups.values()),
        }


def _speed_of(peer: PeerFacts) -> float:
    """Tokens/s. A record keeps the last speed of a node that trains no more."""
    return 0.0 if peer.reach == "gone" or peer.phase in ("paused", "leaving") else peer.tokens_per_s


def _rounded(value: float) -> float:
    """Round to `DIGITS` digits, whole where that is large."""
    if value == 0 or value != value:
        return 0
    places = DIGITS - 1 - floor(log10(abs(value)))
    rounded = round(value, places)
    return int(rounded) if places <= 0 else rounded
