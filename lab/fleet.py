"""Real nodes that are measured or struck: founders of one swarm, started together, watched by their logs, and reaped.

    async with Swarm(…).owned() as swarm:    the processes live in here
        await swarm.start()                  the first, then all others, which join it
        await swarm.until(…)                 what the logs must show

A node that ends by itself, with no fault to explain it, ends all waiting with what it said last.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, Self

import psutil  # type: ignore[import-untyped]
import trio

from shoal.node.options import Hold
from shoal.node.reporting.events import Certified, Failed
from shoal.protocol.errors import NetworkError, ShoalError
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest import Manifest
from shoal.testnet.faults import kill
from shoal.testnet.fleet import Fleet
from shoal.testnet.links.namespaces import Network
from shoal.testnet.nodes import Launch, NodeProcess, Runtime, node_command

LOG_SHOWN_CHARS: Final = 600
START_DEADLINE_S: Final = 180.0


class Swarm(Fleet):
    """Swarm of `count` founders, of the manifest that `manifest_of` makes of their names, in an empty folder."""

    def __init__(
        self,
        folder: Path,
        count: int,
        manifest_of: Callable[[list[PeerId]], Manifest],
        *,
        runtime: Runtime | None = None,
        network: Network | None = None,
    ) -> None:
        super().__init__(folder, runtime=runtime, network=network)
        self.found(manifest_of([self.add(index).peer_id for index in range(count)]))

    @asynccontextmanager
    async def owned(self) -> AsyncIterator[Self]:
        """The swarm, of which nodes can be launched within the block. However that ends, no process is left."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.run)
            try:
                yield self
            finally:
                nursery.cancel_scope.cancel()

    async def start(self, *, holds: tuple[Hold, ...] = (), deadline_s: float = START_DEADLINE_S) -> None:
        """Start the first node and, when it listens, all others, which join it. Raises NetworkError."""
        first, *others = self.nodes
        await self.launch(first, holds=holds)
        await self.until(lambda: bool(first.addresses), "the first node listens", deadline_s)
        for node in others:
            await self.launch(node, join=first.addresses, holds=holds)

    async def revive(self, node: NodeProcess) -> None:
        """Start a node again on its folder, once its process is gone. Raises NetworkError if nobody is there."""
        await node.lives[-1].ended.wait()
        hosts = [other for other in self.nodes if other is not node and other.addresses and not other.stopped]
        if not hosts:
            raise NetworkError("nobody is left to join")
        # Of all of them: one may be killed before it is reached, and a node does not remember others' addresses yet.
        await self.launch(node, join=tuple(address for host in hosts for address in host.addresses))

    async def until(self, condition: Callable[[], bool], what: str, deadline_s: float) -> None:
        """Wait for what the logs must show; `what` says it in words.

        Raises NetworkError at the deadline, or `error_of` a node as soon as that one ended and no fault explains it.
        """

        def met() -> bool:
            return condition() or self._crashed() is not None

        with trio.move_on_after(deadline_s):
            await self.journal.until(met)
        if condition():
            return
        if (crashed := self._crashed()) is not None:
            raise self.error_of(crashed)
        raise NetworkError(f"{what}: not within {deadline_s:.0f} s. {told(self.nodes)}")

    def common_rounds(self, node: NodeProcess) -> int:
        """Number of rounds certified by a node to which all contributed."""
        return sum(one.contributors == len(self.nodes) for one in self.journal.of(Certified, node.index))

    def _crashed(self) -> NodeProcess | None:
        return next((one for one in self.nodes if one.lives and not one.alive and one.struck is None), None)

    def error_of(self, node: NodeProcess) -> ShoalError:
        """Return the error for a node that ended by itself, with its last words."""
        said = [event.message for event in self.journal.of(Failed, node.index)]
        words = _last_words(node)
        why = said[-1] if said else f"…{words}" if words else "see its log"
        return NetworkError(f"node {node.index} ended with exit code {node.lives[-1].exit_code}: {why}")


def untested_command(launch: Launch) -> list[str]:
    """The command line of a node as `shoal run` starts it, without test mode, which writes each round to the disk."""
    command = node_command(launch)
    command.remove("--test-mode")
    return command


def cpu_s(processes: Iterable[psutil.Process]) -> float:
    """Processor time of these so far, in seconds."""
    total = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # a helper that ended this moment
            total += sum(process.cpu_times()[:2])
    return total


async def end(node: NodeProcess) -> None:
    """Kill a node's process, and wait until it is gone. Raises NetworkError if it does not run."""
    life = node.lives[-1]
    kill(node)
    await life.ended.wait()


def output_of(node: NodeProcess) -> str:
    """All that its processes have printed."""
    path = node.folder / "log.txt"
    return path.read_text(errors="replace") if path.exists() else ""


def told(nodes: Sequence[NodeProcess]) -> str:
    """Last words of each node."""
    return "; ".join(f"node {node.index}: …{_last_words(node)}" for node in nodes)


def _last_words(node: NodeProcess) -> str:
    """The end of what it printed, on one line."""
    return " ".join(output_of(node)[-LOG_SHOWN_CHARS:].split())
