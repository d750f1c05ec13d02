"""The swarm of one group of a campaign: it lives on from run to run, and stands still between two of them.

    start ─► gather ─► [fault, while the swarm runs free] ─► revive ─► gather ─► …
             all are members and contribute, and hold where round R begins

While all nodes hold, nothing is under way: what the rounds before left on disk can be judged, the lead of the round to
come is known, and holds for it can be set without a race.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import trio

from shoal.lab.campaigns.campaign_check import Member
from shoal.lab.campaigns.campaign_plan import Group
from shoal.lab.campaigns.soak_workload import WORKLOAD_NAME as PACED_REGRESSION
from shoal.node.config import Hold
from shoal.node.control_client import JsonValue, request
from shoal.node.reporting.events import CaughtUp, Certified, Failed, Holding, Linked, Listening, RoundStarted
from shoal.node.state.store import read_records
from shoal.protocol.certificate import genesis
from shoal.protocol.errors import ConfigError, NetworkError, ShoalError
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest import Manifest, render_manifest, validate_manifest
from shoal.protocol.messages import Certificate, Value
from shoal.testnet.journal import Journal
from shoal.testnet.links.namespaces import LOOPBACK, Network
from shoal.testnet.nodes import CONTROL_DEADLINE_S, Launch, NodeProcess, Runtime

CHUNK_VALUES: Final = 4096
MODEL: Final = {"inputs": 320, "outputs": 256}
"""82,176 parameters: 21 chunks of the smallest grid, the last one not full."""
INNER_STEPS: Final = 50
PACED_STEPS: Final = 5
PACED_STEP_S: Final = 0.1
GRACE_S: Final = 20.0
REDUCE_DEADLINE_S: Final = 60.0

START_DEADLINE_S: Final = 180.0
WHOLE_DEADLINE_S: Final = 90.0
GATHER_DEADLINE_S: Final = 30.0
GATHER_TRIES_LIMIT: Final = 5
AHEAD: Final = 2
"""How many rounds ahead a hold is set, so that it is there before anybody begins that round."""


ManifestOf = Callable[[Group, int, list[PeerId]], Manifest]
"""The manifest of a group's swarm, by the seed and its founders."""


class Unrecovered(ShoalError):
    """The swarm did not come to where it should be in time."""


class LivingSwarm:
    """One group's swarm, in the namespaces of `network` if there is one. Made by `living_swarm`, which also ends it."""

    def __init__(
        self,
        folder: Path,
        group: Group,
        seed: int,
        *,
        network: Network | None = None,
        manifest_of: ManifestOf | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        self.group = group
        self.folder = folder
        self.network = network
        self._runtime = runtime or Runtime()
        self.journal = Journal()
        self.nodes = tuple(self._make(index) for index in range(group.peers))
        self._manifest = (manifest_of or campaign_manifest)(group, seed, [node.peer_id for node in self.nodes])
        self._manifest_path = folder / "swarm.toml"
        self._manifest_path.write_text(render_manifest(self._manifest), encoding="utf-8")
        self._calm_s: list[float] = []
        self._launches, self._to_launch = trio.open_memory_channel[tuple[NodeProcess, Launch]](0)

    def _make(self, index: int) -> NodeProcess:
        folder = self.folder / "nodes" / str(index)
        folder.mkdir(mode=0o700, parents=True)
        return NodeProcess(index, folder, self.journal, self._runtime)

    @property
    def members(self) -> tuple[Member, ...]:
        """The nodes as the check knows them."""
        return tuple(Member(index=n.index, peer_id=n.peer_id, folder=n.folder) for n in self.nodes)

    @property
    def calm_s(self) -> float:
        """How long an undisturbed round of this swarm takes, in the median."""
        return statistics.median(self._calm_s)

    # -- processes -------------------------------------------------------------------------------------------

    async def own_processes(self) -> None:
        """Start what is to be started, and own it. Cancellation: all processes are killed and reaped."""
        async with trio.open_nursery() as nursery:
            async for node, launch in self._to_launch:
                nursery.start_soon(node.run, launch)

    async def start(self) -> None:
        """Start all nodes and let them begin together. Raises Unrecovered if they do not come up."""
        first, *others = self.nodes
        gate = (Hold(round=1, phase="train"),)
        await self._launch(first, join=(), holds=gate)
        await self.until(lambda: bool(first.addresses), START_DEADLINE_S, "node 0 listens")
        for node in others:
            await self._launch(node, join=first.addresses, holds=gate)
        await self.until(self._all_linked, START_DEADLINE_S, "all nodes are up and linked")
        await self.release(self.nodes)

    def _all_linked(self) -> bool:
        linked = [entry.node for entry in self.journal.entries if isinstance(entry.event, Linked)]
        holding = {entry.node for entry in self.journal.entries if isinstance(entry.event, Holding)}
        return all(linked.count(n.index) >= self.group.peers - 1 and n.index in holding for n in self.nodes)

    async def revive(self, node: NodeProcess) -> None:
        """Start a killed node again on its folder. Raises Unrecovered if nobody is there to join."""
        await node.lives[-1].ended.wait()
        hosts = [n for n in self.nodes if n is not node and n.addresses and not n.stopped]
        if not hosts:
            raise Unrecovered("nobody is left to join")
        # Of all of them: one may be killed before it is reached, and a node does not remember others' addresses yet.
        await self._launch(node, join=tuple(address for n in hosts for address in n.addresses), holds=())

    async def _launch(self, node: NodeProcess, *, join: tuple[str, ...], holds: tuple[Hold, ...]) -> None:
        lives = len(node.lives)
        place = LOOPBACK if self.network is None else self.network.place(node.index)
        launch = Launch(
            manifest=self._manifest_path,
            data_dir=node.folder,
            join=join,
            holds=holds,
            place=place,
            workload=self._manifest.workload.name,
        )
        await self._launches.send((node, launch))
        await self.journal.until(lambda: len(node.lives) > lives)

    # -- orders ----------------------------------------------------------------------------------------------

    async def order(self, node: NodeProcess, op: str, *arguments: str) -> dict[str, JsonValue]:
        """Ask a node for one thing. Raises NetworkError if it is not there or says no; cancellation abandons it."""

        def ask() -> dict[str, JsonValue]:
            return request(node.folder, op, *arguments, deadline_s=CONTROL_DEADLINE_S)

        try:
            return await trio.to_thread.run_sync(ask, abandon_on_cancel=True)
        except (NetworkError, ConfigError, ShoalError) as error:
            raise NetworkError(f"node {node.index} did not {op}: {error}") from error

    async def order_all(self, nodes: Iterable[NodeProcess], op: str, *arguments: str) -> None:
        """Ask several nodes for the same at once, and all of them. Raises as `order` does."""
        failed: list[NetworkError] = []

        async def ask(node: NodeProcess) -> None:
            try:
                await self.order(node, op, *arguments)
            except NetworkError as error:
                failed.append(error)

        async with trio.open_nursery() as nursery:
            for node in nodes:
                nursery.start_soon(ask, node)
        if failed:
            raise failed[0]

    async def release(self, nodes: Collection[NodeProcess]) -> None:
        """Let nodes go on, and hold nowhere."""
        await self.order_all(nodes, "hold")
        await self.order_all(nodes, "release")

    # -- waiting ---------------------------------------------------------------------------------------------

    async def until(self, condition: Callable[[], bool], deadline_s: float, what: str) -> None:
        """Wait until `condition` holds. Raises Unrecovered at the deadline, or when a node ends that nobody struck."""

        def over() -> bool:
            return condition() or self._crashed() is not None

        with trio.move_on_after(deadline_s):
            await self.journal.until(over)
        if condition():
            return
        crashed = self._crashed()
        raise Unrecovered(crashed or f"{what}: not within {deadline_s:.0f} s")

    def _crashed(self) -> str | None:
        for node in self.nodes:
            if node.lives and not node.alive and node.struck is None:
                said = [event.message for event in self.journal.of(Failed, node.index)]
                why = said[-1] if said else "see its log"
                return f"node {node.index} ended with exit code {node.lives[-1].exit_code}: {why}"
        return None

    def certificate(self, node: NodeProcess, round: int) -> Certified | None:
        """What a node logged when it certified a round; None if it did not."""
        return next((e for e in self.journal.of(Certified, node.index) if e.round == round), None)

    def is_past(self, node: NodeProcess, round: int) -> bool:
        """Whether a node has the state after this round, computed by itself or, where it was evicted, fetched."""
        caught_up = any(event.round >= round for event in self.journal.of(CaughtUp, node.index))
        return caught_up or self.certificate(node, round) is not None

    def holding(self, node: NodeProcess, round: int, phase: str) -> Holding | None:
        """What a node logged when it began to hold there; None if it did not."""
        events = self.journal.of(Holding, node.index)
        return next((e for e in events if (e.round, e.phase) == (round, phase)), None)

    async def stand_still(self, nodes: Collection[NodeProcess]) -> None:
        """Let nodes hold where one of the next rounds begins, as soon as they come there. Raises NetworkError."""
        gate = max(event.round for event in self.journal.of(Certified)) + AHEAD
        await self.order_all(nodes, "hold", f"{gate}:train")

    def under_way(self, node: NodeProcess) -> bool:
        """Whether the present process of a node has begun a round."""
        return any(event.at >= node.lives[-1].started_at for event in self.journal.of(RoundStarted, node.index))

    async def gather(self, after: int) -> int:
        """Wait until all contribute to one round after `after`, and let all hold where a later round begins.

        Returns that round. Raises Unrecovered, and NetworkError if a node does not answer.
        """
        begun_after = after
        for _ in range(GATHER_TRIES_LIMIT):
            await self.until(partial(self.whole, after), WHOLE_DEADLINE_S, "all contribute again")
            gate = max(event.round for event in self.journal.of(Certified)) + AHEAD
            await self.order_all(self.nodes, "hold", f"{gate}:train")
            with trio.move_on_after(GATHER_DEADLINE_S):
                await self.until(partial(self._all_hold, gate), START_DEADLINE_S, f"all begin round {gate}")
            if self._all_hold(gate) and self._contributed(gate - 1):
                self._note_calm(begun_after)
                return gate
            after = gate  # somebody was past it, or late: all go on, and try again
            await self.release(self.nodes)
        raise Unrecovered("the nodes do not come together")

    def whole(self, after: int) -> bool:
        """Whether there is a round after `after` that all certified, and contributed to."""
        rounds = {event.round for event in self.journal.of(Certified) if event.round > after}
        return any(self._contributed(number) for number in rounds)

    def _contributed(self, round: int) -> bool:
        events = [self.certificate(node, round) for node in self.nodes]
        return all(e is not None and len(e.members) == e.contributors == self.group.peers for e in events)

    def _all_hold(self, gate: int) -> bool:
        return all(self.holding(node, gate, "train") is not None for node in self.nodes)

    def _note_calm(self, after: int) -> None:
        """Learn from the rounds after `after` that all contributed to how long one takes."""
        begun = {(e.node, e.event.round): e.event.at for e in self.journal.entries if isinstance(e.event, RoundStarted)}
        for entry in self.journal.entries:
            event = entry.event
            if isinstance(event, Certified) and event.round > after and self._contributed(event.round):
                start = begun.get((entry.node, event.round))
                self._calm_s += [] if start is None else [event.at - start]

    # -- between the runs ------------------------------------------------------------------------------------

    def forget(self, before: int) -> None:
        """Remove the audit files of the rounds before `before`, and the journal's memory of them. Blocks."""
        for node in self.nodes:
            for path in (node.folder / "rounds").glob("*-*"):
                if int(path.name.rpartition("-")[2]) < before:
                    shutil.rmtree(path)
        kept = [e for e in self.journal.entries if isinstance(e.event, Listening)]
        self.journal.entries[:] = kept

    def head(self) -> Value:
        """The newest value that node 0 has in its chain; while all hold, everybody's."""
        path = self.nodes[0].folder / "chain.log"
        origin = genesis(self._manifest.swarm_id, self._manifest.swarm.founders)
        *_, head = (origin, *(certificate.value for certificate in read_chain(path)))
        return head


@asynccontextmanager
async def living_swarm(
    folder: Path,
    group: Group,
    seed: int,
    *,
    network: Network | None = None,
    manifest_of: ManifestOf | None = None,
    runtime: Runtime | None = None,
) -> AsyncIterator[LivingSwarm]:
    """A group's swarm, not started yet. However the block ends, no process is left.

    network: where the nodes run, None for loopback. manifest_of: what they train; the campaign's own if left out.
    runtime: how they are started; each by itself if left out.
    """
    swarm = LivingSwarm(folder, group, seed, network=network, manifest_of=manifest_of, runtime=runtime)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(swarm.own_processes)
        try:
            yield swarm
        finally:
            nursery.cancel_scope.cancel()


def campaign_manifest(
    group: Group,
    seed: int,
    founders: list[PeerId],
    *,
    workload: str = "regression",
    options: Mapping[str, object] = MODEL,
    inner_steps: int = INNER_STEPS,
) -> Manifest:
    """Short rounds over many small chunks; the protocol's own deadlines."""
    tables: dict[str, object] = {
        "swarm": {"name": "campaign", "founders": founders, "admission": "open"},
        "workload": {"name": workload, "seed": seed, "options": dict(options)},
        "sync": {"inner_steps": inner_steps, "codec": group.codec, "balance": False},
        "round": {"chunk_values": CHUNK_VALUES, "grace_s": GRACE_S, "reduce_deadline_s": REDUCE_DEADLINE_S},
    }
    return validate_manifest(tables, source="the campaign's manifest")


def short_manifest(group: Group, seed: int, founders: list[PeerId]) -> Manifest:
    """The same, but training waits more than it computes: for several swarms at once on few cores."""
    options = {**MODEL, "step_s": PACED_STEP_S}
    return campaign_manifest(group, seed, founders, workload=PACED_REGRESSION, options=options, inner_steps=PACED_STEPS)


def read_chain(path: Path) -> list[Certificate]:
    """The certificates in a node's chain.log, to which it may be appending: a record cut short ends it."""
    records, _ = read_records(path)
    return [msgspec.msgpack.decode(payload, type=Certificate) for payload in records]
