"""Model of the page, kept in bounded memory: a snapshot of everything, then the changes.

    event log ── hear ──┐                        ┌── snapshot: for a viewer that comes
    facts ────── see ───┴─ rounds, curves, peers ┴── delta: for those that are there, what is new since the last

A delta names what it replaces: fields of the node, the summary and of peers by name, rounds by their key; to everything
else it appends. Numbers that change all the time are rounded to what an eye can tell, so that most of them stay out of
it; and however large the swarm, a delta is small (`shoal.node.dashboard.peers`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from shoal.node.control_client import BytesStatus, Check, GroupStatus, RolloutStatus, Status
from shoal.node.dashboard.facts import Facts
from shoal.node.dashboard.history import History
from shoal.node.dashboard.peers import Fields, Peers, rounded
from shoal.node.peer_facts import PeerSummary
from shoal.node.reporting.events import Event

BANDWIDTH_POINTS = 300
BANDWIDTH_PERIOD_S = 2.0
_SHOWN: Final = (
    *("peer_id", "phase", "doing", "term", "round", "digest", "why_paused", "train_loss", "train_metric"),
    *("tokens_per_s", "blocked_fraction", "max_upload", "max_download", "bans"),
)
"""Fields of a status that the page has as they are."""


class Model:
    """The swarm as the page shows it. Use from one thread."""

    def __init__(self) -> None:
        self.seq = 0
        self.history = History()
        self.peers = Peers()
        self.bandwidth: deque[tuple[float, float, float]] = deque(maxlen=BANDWIDTH_POINTS)
        self._new_bandwidth: list[tuple[float, float, float]] = []
        self._node: Fields = {}
        self._summary: Fields = {}
        self._health: list[Check] = []
        self._groups: dict[str, GroupStatus] = {}
        self._news: Fields = {}
        self._told: Fields = {}
        """Of the history, what was told whole: samples and sources."""
        self._total: tuple[float, int, int] | None = None

    # -- what comes in ---------------------------------------------------------------------------------------

    def hear(self, event: Event) -> None:
        """Take one event."""
        self.history.hear(event)

    def see(self, facts: Facts, now: float, at: float, *, in_turn: bool = False) -> None:
        """Take the facts of this moment: `now` on a clock that never goes back, `at` on the wall's.

        in_turn: whether viewers are there, who are told of a part of the peers at once.
        """
        status = facts.status
        self.measure(status.bytes, now, at)
        self._node = self._replaced("node", self._node, self._node_fields(status))
        if status.peers is not None:
            self._summary = self._replaced("summary", self._summary, _summary_fields(status.peers))
        in_step = status.peers is None or status.peers.behind > 0
        self.peers.see(facts.peers, now, in_turn=in_turn, in_step=in_step)
        if status.checks != self._health:
            self._news["health"] = self._health = status.checks
        told = () if status.rollouts is None else status.rollouts.groups
        groups = {group.digest: msgspec.structs.replace(group, age=0) for group in told}  # the page counts it itself
        fresh = [group for digest, group in groups.items() if digest not in self._groups]
        if fresh:
            self._news["groups"] = [*self._news.get("groups", ()), *fresh]
        self._groups = groups

    def measure(self, traffic: BytesStatus, now: float, at: float) -> None:
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

    def _node_fields(self, status: Status) -> Fields:
        up, down = self.bandwidth[-1][1:] if self.bandwidth else (0.0, 0.0)
        node, history, gave = status.node, self.history, self.history.gave
        fields: Fields = {field: getattr(status, field) for field in _SHOWN}
        fields |= {field: getattr(node, field) for field in node.__struct_fields__}
        for field in ("train_loss", "tokens_per_s", "blocked_fraction", "cores", "memory_bytes", "disk_free_bytes"):
            fields[field] = fields[field] and rounded(fields[field])
        return fields | {
            "paused": status.paused,
            "tokens_per_s": 0 if status.paused else fields["tokens_per_s"],
            "loss": history.held_out if status.loss is None else status.loss,
            "metric": history.metric if status.loss is None else status.metric,
            "uptime_s": round(node.uptime_s),
            "device": history.device or node.device,
            "members": len(status.members),
            "rollouts": None if status.rollouts is None else _counts(status.rollouts),
            "sent": rounded(status.bytes.sent),
            "upload": up,
            "download": down,
            "gave_rounds": gave.rounds,
            "gave_tokens": gave.tokens,
            "gave_since": gave.since,
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
        rounds, certificates, happenings = self.history.rounds.changed()
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
        for name, whole in (("samples", self.history.samples), ("sources", self.history.sources)):
            if whole != self._told.get(name, type(whole)()):
                news[name] = self._told[name] = whole
        for name, curve in self.history.curves.items():
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
        history = self.history
        return {
            "seq": self.seq,
            "node": self._node,
            "health": self._health,
            "summary": self._summary,
            "peers": self.peers.live,
            "rounds": history.rounds.rounds,
            "certificates": history.rounds.certificates,
            "happenings": history.rounds.happenings,
            "curves": {name: curve.points for name, curve in history.curves.items()},
            "bandwidth": list(self.bandwidth),
            "groups": list(self._groups.values()),
            "samples": history.samples,
            "sources": history.sources,
        }


def _counts(rollouts: RolloutStatus) -> Fields:
    """All but the groups, of which only those that are new are told."""
    return {field: getattr(rollouts, field) for field in rollouts.__struct_fields__ if field != "groups"}


def _summary_fields(summary: PeerSummary) -> Fields:
    fields: Fields = msgspec.to_builtins(summary)
    fields["tokens_per_s"] = rounded(summary.tokens_per_s)
    fields["speeds"] = None if summary.speeds is None else [rounded(speed, 2) for speed in summary.speeds]
    for outlier in fields["slowest"]:
        outlier["value"] = rounded(outlier["value"], 2)
    return fields
