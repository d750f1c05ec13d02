"""One process of a node in a box: what the daemon makes of the parts, without its sockets."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import trio

from shoal.collectives.finals import Finals
from shoal.collectives.outer import OuterSettings
from shoal.node.audit import AuditTrail
from shoal.node.holds import Holds
from shoal.node.node import FAREWELL_S, stored_chain
from shoal.node.options import NodeConfig
from shoal.node.outcome import Progress
from shoal.node.reporting.events import Event
from shoal.node.reporting.round_log import RoundLog
from shoal.node.rounds.engine import Engine
from shoal.node.rounds.engine_parts import EngineParts
from shoal.node.rounds.fork_file import ForkFile
from shoal.node.rounds.key_use import KeyUse
from shoal.node.rounds.site_exchange import OfferedWork, SiteExchange
from shoal.node.rounds.standstill import Standstill
from shoal.node.state.catchup import CatchUp
from shoal.node.state.chain_waits import ChainWaits
from shoal.node.state.checkpoints import CheckpointParts, Checkpoints
from shoal.node.state.earlier_states import EarlierStates
from shoal.node.state.fetching import Fetcher
from shoal.node.state.image_exchange import ImageExchange
from shoal.node.state.resumption import Resumption
from shoal.node.state.state_server import StateServer
from shoal.node.state.state_store import StateStore, StateStoreParts
from shoal.node.state.states import StateCache
from shoal.node.state.store import Store
from shoal.node.training.trainer import TrainerEvent
from shoal.node.training.training_client import TrainingClient
from shoal.protocol.donors import DonorScores
from shoal.protocol.errors import NetworkError, StorageError
from shoal.protocol.identity import PeerId
from shoal.protocol.inputs import Reduced
from shoal.protocol.messages import Value
from shoal.protocol.peering import FetchRequest
from shoal.protocol.records import NodeRecord
from shoal.protocol.sites import capability_of
from shoal.protocol.wire import canonical, decode
from shoal.swarm.lanes.chunks import ChunkExchange
from shoal.swarm.lanes.frame import BULK_KINDS, FrameHeader
from shoal.swarm.lanes.queue import Later, due
from shoal.swarm.lanes.socket import Moved
from tests.node.box_net import LATENCY_S, BoxHost, BoxLinks
from tests.node.box_reduce import BoxReduce
from tests.node.box_trainer import BoxTrainer
from tests.node.ledger import identity
from tests.node.simulated_disk import Disk, PowerCut
from tests.node.state_store_lab import NOWHERE_ELSE

if TYPE_CHECKING:
    from tests.node.swarm_in_a_box import Box

NUMEL = 2 * 4096 + 512
"""Three chunks, the last one ragged."""
RECORD_S = 0.05
"""Until others have a node's record."""


class Life:
    """One process of a node, over the disk that its last one left."""

    def __init__(self, box: Box, number: int, disk: Disk) -> None:
        self.box = box
        self.number = number
        self.identity = identity(number + 1)
        self.peer = self.identity.peer_id
        self.disk = disk
        self.witness = box.witnesses[number]
        self.links = BoxLinks(self)
        self.host: BoxHost
        self.up = False
        self.over = trio.Event()
        self.ended_by = ""
        self.told: list[Progress] = []
        self.events: list[Event] = []
        self.scope = trio.CancelScope()
        self.says_leaving = self.cut_off = False

    # -- its parts -------------------------------------------------------------------------------------------

    def build(self, store: Store) -> None:
        """As the daemon does."""
        manifest, folder = self.box.manifest, store.folder
        outer = OuterSettings.of(manifest)
        follows = self.number in self.box.followers and self.box.seats is None
        role = "sample" if follows else "train"
        config = NodeConfig(manifest=manifest, data_dir=folder, rollback="always", checkpoint_every=0, rollouts=role)
        events = SimpleNamespace(write=self.events.append)
        log, holds = RoundLog(events), Holds((), events)  # type: ignore[arg-type]
        self.chain = stored_chain(store, manifest)
        self.cache = StateCache(folder, manifest.round.chunk_values, clock=trio.current_time)
        self.trainer = BoxTrainer(NUMEL, tell=self._trainer_told, next_place=self.box.next_place)
        self.box.adjust_trainer(self)
        offered = OfferedWork(self.cache.lookup)
        self.exchange = ChunkExchange(post=self._post_chunk, lookup=offered.lookup)
        lanes: Any = SimpleNamespace(ensure=self._ensure_lane, moved=lambda peer: Moved())
        self.catchup = CatchUp(ask=self._ask, lanes=lanes, chunks=self.exchange, cache=self.cache, outer=outer)
        trainer: Any = self.trainer
        self.training_client = TrainingClient(trainer, seed=0, inner_steps=1, imaged=outer.imaged)
        links: Any = self.links
        key_use = KeyUse(folder, self.peer, store.durable_records(), take_over=False)
        self.standstill = Standstill(forks=ForkFile(folder), key_use=key_use, chain=self.chain)
        self.state_store = StateStore(
            StateStoreParts(
                store=store,
                chain=self.chain,
                cache=self.cache,
                catchup=self.catchup,
                earlier=EarlierStates(folder, chain=self.chain, cache=self.cache, outer=outer),
                key_use=key_use,
                holds=holds,
                log=log,
                on_progress=self.told.append,
                takes_images=follows and outer.imaged,
            )
        )
        host: Any = BoxHost(self)
        self.chain_waits = ChainWaits(host, self.state_store, self.links.linked)
        self.image_exchange = ImageExchange(host, self.cache, self.catchup, self.links.linked)
        self.site = SiteExchange(
            host,
            offered,
            Fetcher(lanes=lanes, chunks=self.exchange, scores=DonorScores()),
            name=self.box.sites.get(self.number),
            swarm=manifest.swarm_id,
            linked=self.links.linked,
            record_of=self._record_of,
        )
        self.resumption = Resumption(folder, send=self.trainer.send, on_progress=self.told.append)
        self.checkpoints = Checkpoints(
            CheckpointParts(
                folder=folder,
                manifest=manifest,
                chain=self.chain,
                save=self.state_store.save,
                cache=self.cache,
                on_progress=self.told.append,
            ),
            every=0,
            keep=1,
        )
        self.reduce = BoxReduce(self, lambda finals, seconds: self.engine.put(Reduced(finals, seconds)))
        self.engine = Engine(
            EngineParts(
                config=config,
                identity=self.identity,
                store=store,
                state_store=self.state_store,
                cache=self.cache,
                links=links,
                reduce=self.reduce,  # type: ignore[arg-type]
                resumption=self.resumption,
                checkpoints=self.checkpoints,
                training_client=self.training_client,
                site=self.site,
                log=log,
                holds=holds,
                audit=AuditTrail(folder / "rounds", enabled=False),
                standstill=self.standstill,
                traffic_bytes=dict,
                suspected=frozenset,
                leaving=self._leaving,
                announce=self._announce,
                on_progress=self.told.append,
                elsewhere={**NOWHERE_ELSE, **self.chain_waits.performers, **self.image_exchange.performers},
                is_follower=follows,
                cut_off=lambda: self.cut_off,
                enlist=self.links.send,
            )
        )
        self.site.put = self.engine.put

    def _record_of(self, peer: PeerId) -> NodeRecord | None:
        """What a peer says of its site."""
        name = self.box.sites.get(self.box.peers.index(peer))
        known = () if name is None else (capability_of(name, self.box.manifest.swarm_id, peer),)
        return NodeRecord(peer=peer, boot=1, capabilities=known)

    def _announce(self) -> None:
        def heard() -> None:
            self.says_leaving = True

        self.box.net.after(RECORD_S, heard)

    def _leaving(self) -> frozenset[PeerId]:
        """Those whose newest record says so; who is gone says so until the others notice it."""
        said = (life for life in self.box.lives if life is not None and life.says_leaving)
        return frozenset(life.peer for life in said if not life.engine.member.needed)

    def _trainer_told(self, event: TrainerEvent) -> None:
        self.training_client.heard(event)
        self.resumption.heard(event)
        self.engine.put(event)

    # -- life ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Live until the power goes, the disk fails, the node has left, or the box ends it."""
        try:
            with self.scope:
                await self._live()
            self.ended_by = self.ended_by or "kill"
        except* PowerCut:
            self.ended_by = "cut"
        except* StorageError as group:
            self.ended_by = f"storage: {group.exceptions[0]}"
        finally:
            self.up = False
            self.over.set()
            self.box.notice(self)

    async def _live(self) -> None:
        with Store(self.disk.root) as store:
            store.next_boot()
            self.build(store)
            async with trio.open_nursery() as nursery:
                for part in (
                    self.reduce.run,
                    self.trainer.run,
                    self.state_store.load_ahead,
                    self.state_store.run,
                    self.resumption.run,
                    self.checkpoints.run,
                    *((self.site.run,) if self.box.sites else ()),  # as there, and other courses go as they went
                ):
                    nursery.start_soon(part)
                self.up = True
                self.box.notice(self)
                await self.checkpoints.expect(self.trainer.layout)
                await self.engine.run(numel=NUMEL)
                await trio.sleep(FAREWELL_S)  # its last words are on their way
                nursery.cancel_scope.cancel()
        self.ended_by = "left"

    def cut(self) -> None:
        """The power goes now."""
        self.disk.dead = True
        self.scope.cancel()

    # -- what it fetches -------------------------------------------------------------------------------------

    async def fetch_finals(self, value: Value, peers: Sequence[PeerId]) -> Finals:
        """Raises NetworkError, RemoteError."""
        return await self.catchup.finals(value.plan, peers)

    def donor(self, peer: PeerId) -> Life:
        """The linked life of a peer. Raises NetworkError if there is none."""
        donor = self.box.life_of(peer)
        if donor is None or peer not in self.links.linked():
            raise NetworkError(f"{peer} is not connected")
        return donor

    async def _ask(self, peer: PeerId, request: bytes) -> bytes:
        await trio.sleep(self.box.rng.uniform(*LATENCY_S))
        donor = self.donor(peer)
        question: FetchRequest = decode(request, FetchRequest)  # type: ignore[arg-type]
        return canonical(StateServer(chain=donor.chain, cache=donor.cache).answer(question))

    async def _ensure_lane(self, peer: PeerId, *, deadline_s: float) -> None:
        await trio.sleep(self.box.rng.uniform(*LATENCY_S))
        self.donor(peer)

    def _post_chunk(self, to: PeerId, header: FrameHeader, payload: memoryview | bytes | Later) -> None:
        header, data = due(header, payload)
        exchange = self.donor(to).exchange
        if header.kind in BULK_KINDS:
            region = exchange.region(self.peer, header)
            if region is None:
                return
            region[:] = data
        exchange.received(self.peer, header)

    # -- what is seen of it ----------------------------------------------------------------------------------

    @property
    def round(self) -> int:
        """The newest round that is certified here."""
        return self.chain.head.round if self.up else -1

    @property
    def state_round(self) -> int:
        """The round of the state that it holds."""
        return self.state_store.state.round if self.up and self.state_store.state is not None else -1
