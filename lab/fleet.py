"""Real nodes that are measured or struck: founders of one swarm, started together, watched by their logs, and reaped.

    async with Swarm(…).owned() as swarm:    the processes live in here
        await swarm.start()                  the first, then all others, which join it
        await swarm.until(…)                 what the logs must show

A node that ends by itself, with no fault to explain it, ends all waiting with what it said last.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, Self

import psutil  # type: ignore[import-untyped]
import trio

from shoal.node.holds import HOLD_LIMIT_S
from shoal.node.options import Hold
from shoal.node.reporting.events import (
    Certified,
    Died,
    Failed,
    Holding,
    Linked,
    Lost,
    Released,
    Revived,
    RoundEnded,
    RoundStarted,
    Started,
)
from shoal.protocol.errors import NetworkError, ShoalError
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest import Manifest
from shoal.testnet.check import Check, check_swarm
from shoal.testnet.faults import FaultRecord, kill
from shoal.testnet.fleet import Fleet
from shoal.testnet.links.namespaces import Network
from shoal.testnet.nodes import Launch, NodeProcess, Runtime, node_command
from shoal.testnet.run_record import NodeFacts, RunRecord, settle
from shoal.testnet.scenario import Scenario

LOG_SHOWN_CHARS: Final = 600
TOGETHER: Final = Hold(round=1, phase="train")
RENEWED_S: Final = HOLD_LIMIT_S / 4
"""Between two requests to who waits for others to go on waiting: else the first begins before the last has started."""
START_DEADLINE_S: Final = 180.0
TOGETHER_DEADLINE_S: Final = 120.0
TOGETHER_S_PER_NODE: Final = 12.0
"""Of a machine with two cores that starts all at once: what a daemon and its trainer import takes some seconds each."""
SETTLED_S: Final = 10.0
SETTLE_DEADLINE_S: Final = 180.0
"""Links stay once none has come or gone for so long; founders whose links never do begin at the deadline."""
_UNREST: Final = (Linked, Lost, Died, Revived)


class Swarm(Fleet):
    """Swarm of `count` founders, of the manifest that `manifest_of` makes of their names, in an empty folder.

    ends_by_itself: its nodes were told for how many rounds to run, so one that ends in order has not crashed.
    """

    ends_by_itself = False

    def __init__(
        self,
        folder: Path,
        count: int,
        manifest_of: Callable[[list[PeerId]], Manifest],
        *,
        runtime: Runtime | None = None,
        network: Network | None = None,
        clocks: bool = False,
    ) -> None:
        super().__init__(folder, runtime=runtime, network=network, clocks=clocks)
        self.began_at = time.time()
        self.faults: list[FaultRecord] = []
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

    async def begin_together(self) -> float | None:
        """Start all, let them go once all wait for the first round and links stay; returns how long the start took.

        None if not all were there in time: they begin all the same. Raises NetworkError if one ended.
        """
        began, limit_s = time.monotonic(), TOGETHER_DEADLINE_S + TOGETHER_S_PER_NODE * len(self.nodes)
        await self.start(holds=(TOGETHER,), deadline_s=limit_s)
        took, ends_at = None, trio.current_time() + limit_s
        while took is None and trio.current_time() < ends_at:
            with trio.move_on_after(RENEWED_S):
                await self.until(self.all_wait, "all founders wait for the first round", math.inf)
                took = time.monotonic() - began
            if took is None:
                await self._ask_all("renew")
        await self._settle()
        await self._ask_all("hold")
        await self._ask_all("release")
        return took

    def all_wait(self) -> bool:
        """True if every node stands still before its first round."""
        held = Counter[int]()
        for entry in self.journal.entries:
            held[entry.node] += isinstance(entry.event, Holding) - isinstance(entry.event, Released)
        return sum(held.values()) == len(self.nodes)

    async def _settle(self) -> None:
        """Wait until links stay as they are: many that start on one machine take the time to answer from each other."""
        ends_at = trio.current_time() + SETTLE_DEADLINE_S
        while trio.current_time() < ends_at:
            seen = len(self.journal.entries)
            with trio.move_on_after(SETTLED_S):
                await self.until(lambda: False, "links stay", math.inf)
            if not any(isinstance(entry.event, _UNREST) for entry in self.journal.entries[seen:]):
                return
            await self._ask_all("renew")

    async def _ask_all(self, op: str) -> None:
        """Ask every node for this; who is not there yet, or no more, is left at that."""
        async with trio.open_nursery() as nursery:
            for node in self.nodes:
                nursery.start_soon(self._ask, node, op)

    async def _ask(self, node: NodeProcess, op: str) -> None:
        with suppress(NetworkError):
            await node.ask(op)

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

    async def wait_round(self, number: int, limit_s: float) -> bool:
        """Wait until somebody is past a round; False if nobody is in time. Raises NetworkError if a node ended."""
        with trio.move_on_after(limit_s):
            await self.until(lambda: self.last_certified >= number, f"round {number} is certified", math.inf)
        return self.last_certified >= number

    async def live(self, seconds: float) -> None:
        """Let it be for so long. Raises the `error_of` a node that ends by itself."""
        with trio.move_on_after(seconds):
            await self.until(lambda: False, "nothing is waited for", math.inf)

    @property
    def last_certified(self) -> int:
        """Last round that anybody certified; 0 before."""
        return max((event.round for event in self.journal.of(Certified)), default=0)

    def certificate(self, node: NodeProcess, round: int) -> Certified | None:
        """Event that a node logged when it certified a round; None if it did not."""
        return next((e for e in self.journal.of(Certified, node.index) if e.round == round), None)

    def holding(self, node: NodeProcess, round: int, phase: str) -> Holding | None:
        """Event that a node logged when it began to hold there; None if it did not."""
        events = self.journal.of(Holding, node.index)
        return next((e for e in events if (e.round, e.phase) == (round, phase)), None)

    def began_round(self, node: NodeProcess, round: int | None = None) -> bool:
        """True if the present process of a node has begun that round; any, where none is named."""
        since = node.lives[-1].started_at
        return any(e.at >= since and round in (None, e.round) for e in self.journal.of(RoundStarted, node.index))

    def all_linked(self) -> bool:
        """True if each node is linked with all others, and believes them alive."""
        return all(len(self._linked(node)) == len(self.nodes) - 1 for node in self.nodes)

    def _linked(self, node: NodeProcess) -> set[str]:
        linked: set[str] = set()
        dead: set[str] = set()
        for event in (entry.event for entry in self.journal.entries if entry.node == node.index):
            match event:
                case Started():
                    linked, dead = set(), set()
                case Linked(peer=peer):
                    linked.add(peer)
                    dead.discard(peer)
                case Lost(peer=peer):
                    linked.discard(peer)
                case Died(peer=peer):
                    dead.add(peer)
                case Revived(peer=peer):
                    dead.discard(peer)
        return linked - dead

    def daemons(self) -> dict[int, psutil.Process]:
        """Processes of the nodes that run, by index."""
        found = {}
        for node in self.nodes:
            with suppress(psutil.NoSuchProcess):  # one that ended this moment
                if node.alive:
                    found[node.index] = psutil.Process(node.lives[-1].pid)
        return found

    def common_rounds(self, node: NodeProcess) -> int:
        """Number of rounds certified by a node to which all contributed."""
        return sum(one.contributors == len(self.nodes) for one in self.journal.of(Certified, node.index))

    def record(self, rounds: int) -> RunRecord:
        """Collect the events of a run of so many rounds."""
        now = time.time()
        nodes = (
            NodeFacts(
                index=node.index,
                peer_id=node.peer_id,
                outcome="running" if node.alive else "killed" if node.struck == "killed" else "crashed",
                lives=tuple((life.started_at, life.ended_at or now) for life in node.lives),
            )
            for node in self.nodes
        )
        return RunRecord(
            scenario=Scenario(nodes=len(self.nodes), rounds=rounds),
            began_at=self.began_at,
            ended_at=now,
            entries=tuple(self.journal.entries),
            nodes=tuple(nodes),
            faults=tuple(self.faults),
        )

    def check(self, record: RunRecord) -> Check:
        """Recompute every certified round from what the nodes kept. Blocks."""
        return check_swarm(settle(record, self.witnesses), record.certified_rounds())

    def _crashed(self) -> NodeProcess | None:
        ended = (one for one in self.nodes if one.lives and not one.alive and one.struck is None)
        return next((one for one in ended if one.lives[-1].exit_code or not self.ends_by_itself), None)

    def error_of(self, node: NodeProcess) -> ShoalError:
        """Return the error for a node that ended by itself, with its last words."""
        said = [event.message for event in self.journal.of(Failed, node.index)]
        words, code = _last_words(node), node.lives[-1].exit_code
        if code == -signal.SIGKILL and not said:
            return NetworkError(
                f"node {node.index} was killed, most likely since memory ran out; take fewer nodes, or a smaller model"
            )
        why = said[-1] if said else f"…{words}" if words else "see its log"
        return NetworkError(f"node {node.index} ended with exit code {code}: {why}")


def untested_command(launch: Launch) -> list[str]:
    """The command line of a node as `shoal run` starts it, without test mode, which writes each round to the disk."""
    command = node_command(launch)
    command.remove("--test-mode")
    return command


def load_per_core() -> float:
    """Number of runnable processes a core on this machine, over the last minute."""
    return round(os.getloadavg()[0] / (os.cpu_count() or 1), 2)


def cpu_s(processes: Iterable[psutil.Process]) -> float:
    """Processor time of these so far, in seconds."""
    total = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # a helper that ended this moment
            total += sum(process.cpu_times()[:2])
    return total


def pss_mb(processes: Iterable[psutil.Process]) -> list[float]:
    """Memory of each that still runs, in MB: of a page that several share, each has its part. Blocks."""
    found = []
    for process in processes:
        with suppress(psutil.Error):
            found.append(process.memory_full_info().pss / 1e6)
    return found


def control_rate_kb_s(rounds: Sequence[RoundEnded]) -> float | None:
    """Control that a node sent a second, in kB, from its first round that ended to its last; None of fewer than two."""
    if len(rounds) < 2:
        return None
    first, last = rounds[0], rounds[-1]
    return (last.control_sent - first.control_sent) / (last.at - first.at) / 1000


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
