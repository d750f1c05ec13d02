"""Words for what happened to a node and its swarm: the same in its terminal, in `shoal watch`, and on its page."""

from __future__ import annotations

from typing import Final, Literal

from shoal.node.reporting import events
from shoal.node.reporting.events import Event, name_of

Severity = Literal["info", "warn", "bad"]

EVICTED, REPLANNED, DEPARTED = "evicted", "replanned", "departed"
"""Kinds beside the events: those that follow from a later plan of a round, and that a peer took its leave."""
_TOLD: Final[dict[type[Event], tuple[Severity, str]]] = {
    events.Died: ("bad", "{} is gone"),
    events.Revoked: ("bad", "{} was shut out by the swarm's authority"),
    events.Evidence: ("bad", "there is proof against {}"),
    events.Banned: ("bad", "the swarm banned {}"),
    events.Failed: ("bad", "training failed"),
    events.AgentDied: ("bad", "the agent died"),
    events.TrainerRestarted: ("bad", "the trainer was started again"),
    events.Suspected: ("warn", "{} is silent"),
    events.Lost: ("warn", "the link to {} broke"),
    events.Detoured: ("warn", "{} is slow to answer; others pass on what it says"),
    events.Parted: ("warn", "no tensors come through to {}"),
    events.Stranded: ("warn", "nobody outside reaches this node"),
    events.ViewChanged: ("warn", "another lead took over"),
    events.RolledBack: ("warn", "the swarm went back"),
    events.LoopDetached: ("warn", "the training loop detached"),
    events.Linked: ("info", "a link to {} is up"),
    events.Revived: ("info", "{} is back"),
    events.Rebased: ("info", "the authority opened another term"),
    events.Amended: ("info", "settings were amended"),
    events.CaughtUp: ("info", "the state came from others"),
    events.Resumed: ("info", "training resumed"),
    events.Started: ("info", "this node started"),
    events.Left: ("info", "this node left"),
}
_KINDS: Final[dict[str, tuple[Severity, str]]] = {name_of(event): told for event, told in _TOLD.items()} | {
    EVICTED: ("warn", "the round goes on without {}"),
    REPLANNED: ("warn", "the reduce was planned again"),
    DEPARTED: ("info", "{} has left"),
}
SEVERITY: Final = {kind: severity for kind, (severity, _) in _KINDS.items()}
"""Severity of each kind that people should know of."""

TROUBLES: Final = tuple(event for event, (severity, _) in _TOLD.items() if severity != "info")
"""Events by which something goes wrong, or is decided out of turn."""


def words_of(kind: str, peer: str = "") -> str:
    """Tell in words of one thing that happened, with the PeerId of whom it is about."""
    return _KINDS[kind][1].format(peer)
