"""The swarm of one group of a campaign: it lives on from run to run, and stands still between two of them.

    begin ─► gather ─► [fault, while the swarm runs free] ─► revive ─► gather ─► …
             all are members and contribute, and hold where round R begins

While all nodes hold, nothing is under way: what the rounds before left on disk can be judged, the lead of the round to
come is known, and holds for it can be set without a race.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import trio

from shoal.lab.bench import hostile_verdict
from shoal.lab.campaigns.campaign_plan import WITHSTANDS_A_LIAR, Group, paced
from shoal.lab.campaigns.chaos_swarm import Program, command_of, done_by
from shoal.lab.fleet import START_DEADLINE_S, TOGETHER, Swarm
from shoal.lab.waiting_loop import LOOP
from shoal.lab.waiting_workload import WORKLOAD_NAME as PACED_REGRESSION
from shoal.node.loops.loop_messages import OWN_LOOP
from shoal.node.reporting.events import CaughtUp, Certified, Listening, RoundStarted
from shoal.node.state.store import read_records
from shoal.protocol.certificate import genesis
from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest import Manifest, validate_manifest
from shoal.protocol.messages import Certificate, Value
from shoal.protocol.strategies.table import STRATEGIES
from shoal.testnet.links.namespaces import Network
from shoal.testnet.nodes import NodeProcess, Runtime

CHUNK_VALUES: Final = 4096
MODEL: Final = {"inputs": 320, "outputs": 256}
"""82,176 parameters: 21 chunks of the smallest grid, the last one not full."""
INNER_STEPS: Final = 50
PACED_STEPS: Final = 5
PACED_STEP_S: Final = 0.1
GRACE_S: Final = 20.0
REDUCE_DEADLINE_S: Final = 60.0

WHOLE_DEADLINE_S: Final = 90.0
GATHER_DEADLINE_S: Final = 30.0
GATHER_TRIES_LIMIT: Final = 5
AHEAD: Final = 2
"""Number of rounds ahead for which a hold is set, so that it is there before anybody begins that round."""


ManifestOf = Callable[[Group, int, list[PeerId]], Manifest]
"""The manifest of a group's swarm, by the seed and its founders."""


class LivingSwarm(Swarm):
    """One group's swarm, in an empty folder.

    network: where the nodes run, None for loopback. manifest_of: what they train; the campaign's own if left out.
    runtime: how they are started; each by itself if left out. clocks: whether faults can set their wall clocks.
    """

    def __init__(
        self,
        folder: Path,
        group: Group,
        seed: int,
        *,
        network: Network | None = None,
        manifest_of: ManifestOf | None = None,
        runtime: Runtime | None = None,
        clocks: bool = False,
    ) -> None:
        self.group = group
        self.seed = seed
        manifest = partial(manifest_of or campaign_manifest, group, seed)
        if programs := programs_of(group):
            runtime = Runtime(command=partial(command_of, programs))
        super().__init__(folder, group.peers, manifest, network=network, runtime=runtime, clocks=clocks)
        self._programs = programs
        self._calm_s: list[float] = []

    @property
    def honest(self) -> list[NodeProcess]:
        """The nodes that are struck, waited for and judged: all but a liar."""
        return [self.nodes[index] for index in self.group.honest]

    @property
    def liar(self) -> NodeProcess | None:
        """The node that lies, if there is one."""
        return self.nodes[-1] if self.group.company == "liar" else None

    @property
    def lies(self) -> int:
        """Number of lies that its liar has told. Blocks for a moment."""
        return 0 if self.liar is None else done_by(self._programs[self.liar.index], self.liar.folder) or 0

    def taken_over(self, last: int, *, away: Collection[int] = ()) -> tuple[str, ...]:
        """Signs in the chains of the others, up to round `last`, that a liar took something over. Blocks.

        away: those who may have left, or be no members after that round.
        """
        if self.liar is None or not last:
            return ()
        folders = {node.peer_id: node.folder for node in self.honest}
        struck = {self.node(index).peer_id for index in away}
        found = hostile_verdict.problems_of(self.manifest, folders, self.liar.peer_id, struck=struck, last=last)
        return tuple(f"node {problem}" for problem in found)

    @property
    def calm_s(self) -> float:
        """Median duration of this swarm's undisturbed rounds, in seconds."""
        return statistics.median(self._calm_s)

    async def begin(self) -> None:
        """Start all nodes and let them begin together. Raises NetworkError if they do not come up."""
        await self.start(holds=(TOGETHER,))
        await self.until(lambda: self.all_wait() and self.all_linked(), "all nodes are up and linked", START_DEADLINE_S)
        await self.release(self.nodes)

    async def join(self, index: int) -> None:
        """Start a node again (see `revive`)."""
        await self.revive(self.node(index))

    # -- orders ----------------------------------------------------------------------------------------------

    async def ask_all(self, nodes: Iterable[NodeProcess], op: str, *arguments: str) -> None:
        """Ask several nodes for the same at once, and all of them. Raises NetworkError as `NodeProcess.ask` does."""
        failed: list[NetworkError] = []

        async def ask(node: NodeProcess) -> None:
            try:
                await node.ask(op, *arguments)
            except NetworkError as error:
                failed.append(error)

        async with trio.open_nursery() as nursery:
            for node in nodes:
                nursery.start_soon(ask, node)
        if failed:
            raise failed[0]

    async def release(self, nodes: Collection[NodeProcess]) -> None:
        """Let nodes go on, and hold nowhere."""
        await self.ask_all(nodes, "hold")
        await self.ask_all(nodes, "release")

    # -- waiting ---------------------------------------------------------------------------------------------

    def is_past(self, node: NodeProcess, round: int) -> bool:
        """True if a node has the state after this round, computed by itself or, where it was evicted, fetched."""
        caught_up = any(event.round >= round for event in self.journal.of(CaughtUp, node.index))
        return caught_up or self.certificate(node, round) is not None

    async def stand_still(self, nodes: Collection[NodeProcess]) -> None:
        """Let nodes hold where one of the next rounds begins, as soon as they come there. Raises NetworkError."""
        gate = max(event.round for event in self.journal.of(Certified)) + AHEAD
        await self.ask_all(nodes, "hold", f"{gate}:train")

    async def gather(self, after: int) -> int:
        """Wait until all contribute to one round after `after`, and let all hold where a later round begins.

        Returns that round. Raises NetworkError if they do not come there, or one does not answer.
        """
        begun_after = after
        for _ in range(GATHER_TRIES_LIMIT):
            await self.until(partial(self.whole, after), "all contribute again", WHOLE_DEADLINE_S)
            gate = max(event.round for event in self.journal.of(Certified)) + AHEAD
            await self.ask_all(self.asked(), "hold", f"{gate}:train")
            with trio.move_on_after(GATHER_DEADLINE_S):
                await self.until(partial(self._all_hold, gate), f"all begin round {gate}", START_DEADLINE_S)
            if self._all_hold(gate) and self._contributed(gate - 1):
                self._note_calm(begun_after)
                return gate
            after = gate  # somebody was past it, or late: all go on, and try again
            await self.release(self.asked())
        raise NetworkError("the nodes do not come together")

    def asked(self) -> list[NodeProcess]:
        """Those that do what they are asked: all, but for a liar that has ended."""
        return [node for node in self.nodes if node is not self.liar or node.alive]

    def _crashed(self) -> NodeProcess | None:
        """See `Swarm`; what becomes of a liar is its own doing."""
        crashed = super()._crashed()
        return None if crashed is self.liar else crashed

    def whole(self, after: int) -> bool:
        """True if there is a round after `after` that all certified, and contributed to, but for a liar.

        Where it contributed itself, one of the others may have been missing: no log says who contributed.
        """
        rounds = {event.round for event in self.journal.of(Certified) if event.round > after}
        return any(self._contributed(number) for number in rounds)

    def _contributed(self, round: int) -> bool:
        events = [self.certificate(node, round) for node in self.honest]
        honest = {node.peer_id for node in self.honest}
        return all(e is not None and honest <= set(e.members) and e.contributors >= len(honest) for e in events)

    def _all_hold(self, gate: int) -> bool:
        return all(self.holding(node, gate, "train") is not None for node in self.honest)

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
        path = self.home(0) / "chain.log"
        origin = genesis(self.manifest.swarm_id, self.manifest.swarm.founders)
        *_, head = (origin, *(certificate.value for certificate in read_chain(path)))
        return head


def programs_of(group: Group) -> dict[int, Program]:
    """Programs that nodes of a group run in place of `shoal run`, by their indices."""
    if group.company == "liar":
        return {group.peers - 1: Program(group.lie)}
    if group.company == "loops":
        _, step_s = paced(group.strategy, PACED_STEPS, PACED_STEP_S)
        return dict.fromkeys(range(group.peers), Program(LOOP, step_s=step_s))
    return {}


def campaign_manifest(
    group: Group,
    seed: int,
    founders: list[PeerId],
    *,
    workload: str = "regression",
    options: Mapping[str, object] = MODEL,
    inner_steps: int = INNER_STEPS,
) -> Manifest:
    """Manifest of short rounds over many small chunks; the protocol's own deadlines, and the strategy's own settings.

    inner_steps: of a round. Where it is one, as with `ddp`, that takes as long as those of a short campaign.
    """
    if STRATEGIES[group.strategy].exchanges_gradients:
        workload = PACED_REGRESSION
        inner_steps, step_s = paced(group.strategy, PACED_STEPS, PACED_STEP_S)
        options = {**MODEL, "step_s": step_s}
    elif group.company == "loops":
        workload, options = OWN_LOOP, {}
        inner_steps, _ = paced(group.strategy, PACED_STEPS, PACED_STEP_S)
    else:
        inner_steps, _ = paced(group.strategy, inner_steps, 0.0)
    trained = {"name": workload, "seed": seed, "options": dict(options)}
    deadlines = {"grace_s": GRACE_S, "reduce_deadline_s": REDUCE_DEADLINE_S}
    return manifest_of_group("campaign", group, founders, trained, inner_steps=inner_steps, deadlines=deadlines)


def manifest_of_group(
    name: str,
    group: Group,
    founders: list[PeerId],
    workload: Mapping[str, object],
    *,
    inner_steps: int,
    deadlines: Mapping[str, float],
) -> Manifest:
    """Manifest of a group's swarm over many small chunks. deadlines: of a round, where not the protocol's own."""
    tables: dict[str, object] = {
        "swarm": {"name": name, "founders": founders, "admission": "open"},
        "workload": dict(workload),
        "sync": {
            "strategy": group.strategy,
            "inner_steps": inner_steps,
            "codec": group.codec,
            "balance": False,
        },
        "round": {"chunk_values": CHUNK_VALUES, **deadlines},
    }
    if group.company == "liar":
        tables |= WITHSTANDS_A_LIAR
    return validate_manifest(tables, source=f"the {name}'s manifest")


def short_manifest(group: Group, seed: int, founders: list[PeerId]) -> Manifest:
    """Manifest as for a campaign, but training waits more than it computes: for several swarms at once on few cores."""
    options = {**MODEL, "step_s": PACED_STEP_S}
    return campaign_manifest(group, seed, founders, workload=PACED_REGRESSION, options=options, inner_steps=PACED_STEPS)


def read_chain(path: Path) -> list[Certificate]:
    """The certificates in a node's chain.log, to which it may be appending: a record cut short ends it."""
    records, _ = read_records(path)
    return [msgspec.msgpack.decode(payload, type=Certificate) for payload in records]
