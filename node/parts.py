"""The parts of a node that all others may know: made by `Node`, which wires them and gives them out.

Whoever needs some of a node is given these, never the node itself; and no part imports this module that is named here.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from shoal.node.discovery.chain_places import ChainPlaces
from shoal.node.gossip.exchange import VectorCache
from shoal.node.holds import Holds
from shoal.node.options import NodeConfig
from shoal.node.outcome import Progress
from shoal.node.reporting.event_log import EventLog
from shoal.node.rounds.enlist_exchange import EnlistExchange
from shoal.node.rounds.reducing import ReductionDriver
from shoal.node.rounds.relay_room import RelayRoom
from shoal.node.rounds.site_exchange import SiteExchange
from shoal.node.rounds.standstill import Standstill
from shoal.node.state.chain_waits import ChainWaits
from shoal.node.state.checkpoints import Checkpoints
from shoal.node.state.image_exchange import ImageExchange
from shoal.node.state.resumption import Resumption
from shoal.node.state.state_store import StateStore
from shoal.node.state.states import StateCache
from shoal.node.state.store import Store
from shoal.node.training.layouts import Layouts
from shoal.node.training.training_client import TrainingClient
from shoal.protocol.chain import Chain
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.names import Names
from shoal.protocol.wire import SwarmId
from shoal.swarm.host import Host
from shoal.swarm.lanes.chunks import ChunkExchange
from shoal.swarm.lanes.pool import LanePool
from shoal.swarm.links import Links
from shoal.swarm.members import Members

SOFTWARE: Final = f"shoal {importlib.metadata.version('shoal')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Parts of a node. ask: one request to a peer's state server, and its answer. is_follower: see `Surroundings`."""

    config: NodeConfig
    store: Store
    events: EventLog
    on_progress: Callable[[Progress], None]
    identity: Identity
    swarm_id: SwarmId
    boot: int
    chain: Chain
    cache: StateCache
    vectors: VectorCache
    host: Host
    lanes: LanePool
    chunks: ChunkExchange
    members: Members
    names: Names
    holds: Holds
    layouts: Layouts
    training_client: TrainingClient
    standstill: Standstill
    chain_places: ChainPlaces
    chain_waits: ChainWaits
    image_exchange: ImageExchange
    enlist_exchange: EnlistExchange
    site: SiteExchange
    is_follower: bool
    state_store: StateStore
    resumption: Resumption
    checkpoints: Checkpoints
    reduce: ReductionDriver
    relay_room: RelayRoom
    ask: Callable[[PeerId, bytes], Awaitable[bytes]]

    @property
    def links(self) -> Links:
        """The connections to members."""
        return self.members.links

    def traffic_bytes(self) -> dict[str, int]:
        """Bytes that went over lanes and control since this node started."""
        return {
            "lanes_sent": self.lanes.bytes_sent,
            "lanes_received": self.lanes.bytes_received,
            "control_sent": self.host.traffic.bytes_sent,
            "control_received": self.host.traffic.bytes_received,
        }
