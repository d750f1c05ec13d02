"""Parts that the engine and its collaborators work with: the rest of the node, made by the daemon."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal.node.audit import AuditTrail
from shoal.node.holds import Holds
from shoal.node.options import NodeConfig
from shoal.node.outcome import Progress
from shoal.node.reporting.round_log import RoundLog
from shoal.node.rounds.reducing import ReductionDriver
from shoal.node.rounds.site_exchange import SiteExchange
from shoal.node.rounds.standstill import Standstill
from shoal.node.state.checkpoints import Checkpoints
from shoal.node.state.errands import Performers
from shoal.node.state.resumption import Resumption
from shoal.node.state.state_store import StateStore
from shoal.node.state.states import StateCache
from shoal.node.state.store import Store
from shoal.node.training.training_client import TrainingClient
from shoal.protocol.forks import Checkpoint
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.messages import Enlist
from shoal.swarm.links import Links


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """`traffic_bytes` gives the counts that go into the event log; `suspected` is who may be gone, `leaving` who says
    that it is about to; `announce` publishes this node's record; `may_join` is whether the swarm lets a peer in,
    `is_revoked` whether its authority shut one out.

    caps: of its user's on what is uploaded and downloaded, in bytes/s.
    elsewhere: carries out requests about who may be linked soon, the places where a peer may be, and what somebody will
    have. checkpoint: of the link by which this node joins. is_follower: it takes part in no round. cut_off: whether
    this machine has no network. enlist: tells a peer who wants a seat.
    """

    config: NodeConfig
    identity: Identity
    store: Store
    state_store: StateStore
    cache: StateCache
    links: Links
    reduce: ReductionDriver
    resumption: Resumption
    checkpoints: Checkpoints
    training_client: TrainingClient
    site: SiteExchange
    log: RoundLog
    holds: Holds
    audit: AuditTrail
    standstill: Standstill
    traffic_bytes: Callable[[], dict[str, int]]
    suspected: Callable[[], frozenset[PeerId]]
    leaving: Callable[[], frozenset[PeerId]]
    announce: Callable[[], None]
    on_progress: Callable[[Progress], None]
    elsewhere: Performers
    caps: Callable[[], tuple[int | None, int | None]] = lambda: (None, None)
    checkpoint: Checkpoint | None = None
    may_join: Callable[[PeerId], bool] = lambda peer: True
    is_revoked: Callable[[PeerId], bool] = lambda peer: False
    is_follower: bool = False
    cut_off: Callable[[], bool] = lambda: False
    enlist: Callable[[PeerId, Enlist], None] = lambda peer, message: None
