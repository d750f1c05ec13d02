"""The nodes of one swarm on this machine: added, started, started again, and reaped, in one folder with one journal.

Fleet ── NodeProcess.run, one per start        nodes/<index>/: what each keeps; swarm.toml: what all agreed on
      └── the nodes' event logs, in one journal
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import trio

from shoal.node.options import Hold
from shoal.protocol.errors import NetworkError
from shoal.protocol.manifest import Manifest, render_manifest
from shoal.testnet.check import Witness
from shoal.testnet.journal import Journal
from shoal.testnet.links.namespaces import LOOPBACK, Network
from shoal.testnet.nodes import Launch, NodeProcess, Runtime


def _ignore(node: NodeProcess) -> None:
    """Do nothing, where nobody wants to know."""


class Fleet:
    """Nodes in the folder `folder`, and in the namespaces of `network` if there is one.

    clocks: whether each has a wall clock of its own, which faults can set. `sites`: by node, of which it says that it
    is. First `add`, then `found`; while `run` runs, `launch`.
    """

    manifest: Manifest

    def __init__(
        self, folder: Path, *, runtime: Runtime | None = None, network: Network | None = None, clocks: bool = False
    ) -> None:
        self.folder = folder
        self.network = network
        self.clocks = clocks
        self.sites: Mapping[int, str] = {}
        self.journal = Journal()
        self._runtime = runtime or Runtime()
        self._nodes: dict[int, NodeProcess] = {}
        self._launches, self._to_launch = trio.open_memory_channel[tuple[NodeProcess, Launch]](0)

    @property
    def nodes(self) -> list[NodeProcess]:
        """All nodes, by index."""
        return [node for _, node in sorted(self._nodes.items())]

    @property
    def witnesses(self) -> list[Witness]:
        """The nodes as the check of their rounds knows them."""
        starts = {node.index: tuple(life.started_at for life in node.lives) for node in self.nodes}
        return [
            Witness(index=node.index, peer_id=node.peer_id, folder=node.folder, restarts=starts[node.index][1:])
            for node in self.nodes
        ]

    def node(self, index: int) -> NodeProcess:
        """The node of that index. Raises NetworkError if there is none yet."""
        if index not in self._nodes:
            raise NetworkError(f"there is no node {index} yet")
        return self._nodes[index]

    def has(self, index: int) -> bool:
        """True if there is a node of that index."""
        return index in self._nodes

    def home(self, index: int) -> Path:
        """The folder of a node."""
        return self.folder / "nodes" / str(index)

    def add(self, index: int) -> NodeProcess:
        """Add a node with a key of its own, which is not started."""
        node = self._nodes[index] = self.make(index, self.home(index))
        if self.clocks:
            node.give_clock(node.folder.with_name(f"{index}.clock"))
        return node

    def make(self, index: int, folder: Path) -> NodeProcess:
        """Make a node that is none of the fleet, in a folder that is made if it is not there."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return NodeProcess(index, folder, self.journal, self._runtime)

    def found(self, manifest: Manifest) -> None:
        """Write the manifest of the swarm that all nodes are to be of."""
        self.manifest = manifest
        self._manifest_path.write_text(render_manifest(manifest), encoding="utf-8")

    @property
    def _manifest_path(self) -> Path:
        return self.folder / "swarm.toml"

    async def run(self, on_end: Callable[[NodeProcess], None] = _ignore) -> None:
        """Own the nodes' processes; `on_end` hears of each that ended. Cancellation: all are killed and reaped."""

        async def live(node: NodeProcess, launch: Launch) -> None:
            await node.run(launch)
            on_end(node)

        async with trio.open_nursery() as nursery:
            async for node, launch in self._to_launch:
                nursery.start_soon(live, node, launch)

    async def launch(
        self,
        node: NodeProcess,
        *,
        join: tuple[str, ...] = (),
        rounds: int | None = None,
        holds: tuple[Hold, ...] = (),
    ) -> None:
        """Start a process of `node`; it is there when this returns. Needs `run`."""
        launch = Launch(
            manifest=self._manifest_path,
            data_dir=node.folder,
            join=join,
            rounds=rounds,
            holds=holds,
            place=LOOPBACK if self.network is None else self.network.place(node.index),
            workload=self.manifest.workload.name,
            site=self.sites.get(node.index),
            clock=None if node.clock is None else node.clock.path,
            take_over=node.take_over,
        )
        lives = len(node.lives)
        await self._launches.send((node, launch))
        await self.journal.until(lambda: len(node.lives) > lives)
        node.take_over = False
