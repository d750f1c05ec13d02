"""Faults of a scenario, carried out from outside the nodes and at the moment the scenario names.

Without a phase that moment is when the first node begins the round, or a later one: under `gossip` a node that was away
goes on where the others are. With one it is exact: the node was started with a hold and stands still at that very point
until the fault is done.
"""

from __future__ import annotations

import contextlib
import random
import resource
import shutil
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import trio

from shoal.node.options import Hold
from shoal.node.reporting.event_files import LOG_NAME, earlier_of
from shoal.node.reporting.events import Certified, Holding, Linked, RoundEnded
from shoal.node.state.store import disk_errors
from shoal.protocol.errors import NetworkError
from shoal.testnet.journal import Entry, Journal, round_begun
from shoal.testnet.links.namespaces import Network, pairs_between
from shoal.testnet.nodes import NodeProcess
from shoal.testnet.scenario import Fault, Scenario

RESTART_DEADLINE_S: Final = 20.0
FULL_END_S: Final = 10.0
"""A node to whom a write failed has ended by then."""
WHOLE_S: Final = 90.0
AGENT_WHOLE_S: Final = 300.0
"""A node that was struck and is to get over it takes part again within so long; an agent's rounds are long."""
KEPT: Final = (LOG_NAME, earlier_of(Path(LOG_NAME)).name, "log.txt", "rounds")
"""What all lives of a node are judged by, and is not put back."""
NOT_COPIED: Final = (*KEPT, "control.path", "lock")
LATER_ROUNDS: Final = 20
"""A node that fetches a state has begun to when the swarm is in the fault's round, or in one of so many from there; and
one that skips a round, as under `gossip`, comes to one of these."""


@dataclass(slots=True, kw_only=True)
class FaultRecord:
    """Record of one fault: `at` is its wall-clock second, None if its moment never came; `error` why it failed.

    unmet: what should have come of it and did not, once it was done; that is no fault's, but the node's that it struck.
    """

    fault: Fault
    at: float | None = None
    done: bool = False
    error: str | None = None
    unmet: str | None = None


class NotWhole(NetworkError):
    """A fault was done, and the node that it struck is not as it should be after that."""


class Field(Protocol):
    """Swarm as the faults need it that strike it: a `Fleet` that knows how a node joins."""

    network: Network | None
    journal: Journal

    @property
    def nodes(self) -> list[NodeProcess]:
        """All nodes that there are."""

    @property
    def seed(self) -> int:
        """Seed of what is drawn."""

    def node(self, index: int) -> NodeProcess:
        """The node of that index. Raises NetworkError if there is none (yet)."""

    async def join(self, index: int) -> None:
        """Start a node of that index, new or known, and let it join the others."""


class Stage(Field, Protocol):
    """A swarm that goes through a scenario."""

    scenario: Scenario

    def holds(self, index: int) -> tuple[Hold, ...]:
        """Points at which the node of that index is to hold, for the faults whose moment has not come."""


def holds_for(scenario: Scenario, index: int, records: list[FaultRecord]) -> tuple[Hold, ...]:
    """Points at which node `index` is to hold, from its next start on, for the faults whose moment has not come."""
    holds = []
    for record in records:
        fault = record.fault
        if fault.phase is not None and record.at is None and scenario.held_node(fault) == index:
            rounds = range(fault.round, fault.round + (LATER_ROUNDS if scenario.may_come_later(fault) else 1))
            holds += [Hold(round=number, phase=fault.phase, progress=fault.progress or 0.0) for number in rounds]
    return tuple(dict.fromkeys(holds))


async def carry_out(record: FaultRecord, swarm: Stage, announce: Callable[[FaultRecord], None]) -> None:
    """Wait for the fault's moment, carry it out, and let go the node that held for it.

    A fault that cannot be done (its node is not running, or refuses) is recorded, not raised. What is done to links,
    or by a throttle, for a time is undone at its end, while nobody holds any more.
    Cancellation leaves the record as far as it came.
    """
    fault, held = record.fault, swarm.scenario.held_node(record.fault)
    if (copied := fault.from_round) is not None:
        await swarm.journal.first(lambda entry: (round_begun(entry.event) or 0) >= copied)
        try:
            await copy_folder(fault, swarm)
        except NetworkError as error:
            record.error = str(error)
    later = swarm.scenario.may_come_later(fault)
    await swarm.journal.first(lambda entry: _is_moment(fault, held, entry, later=later))
    record.at = time.time()
    announce(record)
    held_when_stopped = fault.kind == "continue" and _stopped_in_a_hold(fault, swarm)
    try:
        if record.error is None:
            await strike(fault, swarm)
        if held_when_stopped:
            await _let_go(fault.target, swarm, again=not later)
    except NetworkError as error:
        record.error = str(error)
    if held is not None:
        await _release(held, swarm, record)
    if record.error is None:
        try:
            await undo(fault, swarm)
            await until_whole(fault, swarm, limit_s=_limit_s(swarm.scenario))
        except NotWhole as error:
            record.unmet = str(error)
        except NetworkError as error:
            record.error = str(error)
    record.done = True
    swarm.journal.poke()


async def strike(fault: Fault, swarm: Field) -> None:
    """Strike now. A stop has ended when this returns, and a restart is done. Raises NetworkError if it cannot be done.

    Cancellation leaves what was done so far.
    """
    await _ACTIONS[fault.kind](fault, swarm)


async def undo(fault: Fault, swarm: Field) -> None:
    """Wait as long as what was done to links, or by a throttle, lasts, and undo it. Raises NetworkError.

    Cancellation leaves it done.
    """
    if fault.kind in _UNDOING and fault.duration_s is not None:
        await trio.sleep(fault.duration_s)
        await _UNDOING[fault.kind](fault, swarm)


def _stopped_in_a_hold(fault: Fault, swarm: Stage) -> bool:
    """True if the node was stopped while it held, and nobody has let it go."""
    stops = (f for f in swarm.scenario.faults if f.kind == "stop" and f.phase is not None)
    return swarm.node(fault.target).stopped and any(stop.target == fault.target for stop in stops)


def has_begun(fault: Fault, swarm: Stage) -> bool:
    """True if the fault's moment is in the journal, be its task awake already or not."""
    held, later = swarm.scenario.held_node(fault), swarm.scenario.may_come_later(fault)
    return any(_is_moment(fault, held, entry, later=later) for entry in swarm.journal.entries)


def _is_moment(fault: Fault, held: int | None, entry: Entry, *, later: bool) -> bool:
    event = entry.event
    if held is None:
        begun = round_begun(event)
        return begun is not None and begun >= fault.round
    return (
        isinstance(event, Holding)
        and entry.node == held
        and event.phase == fault.phase
        and (event.round >= fault.round if later else event.round == fault.round)
        and event.progress >= round(fault.progress or 0.0, 3)
    )


async def _release(held: int, swarm: Stage, record: FaultRecord) -> None:
    """End the hold, unless its process is gone, or stopped: then a later `continue` ends it."""
    node = swarm.node(held)
    begins_anew = record.fault.kind in ("kill", *_STARTING_AGAIN) and held == record.fault.target
    if not node.alive or node.stopped or begins_anew:
        return
    try:
        await _let_go(held, swarm, again=not swarm.scenario.may_come_later(record.fault))
    except NetworkError as error:
        if node.alive and record.fault.kind != "leave":
            record.error = record.error or str(error)


async def _let_go(index: int, swarm: Stage, *, again: bool) -> None:
    """End a node's hold. again: it is to hold wherever else it was told to, and not for faults to come alone."""
    node = swarm.node(index)
    if not again:
        await node.ask("hold", *(f"{hold.round}:{hold.phase}:{hold.progress}" for hold in swarm.holds(index)))
    await node.ask("release")


def kill(node: NodeProcess) -> None:
    """SIGKILL the node and its trainer, as a fault that explains its end. Raises NetworkError if it does not run."""
    node.signal(signal.SIGKILL)
    node.struck = "killed"


async def _kill(fault: Fault, swarm: Field) -> None:
    kill(swarm.node(fault.target))


async def _stop(fault: Fault, swarm: Field) -> None:
    node = swarm.node(fault.target)
    node.signal(signal.SIGSTOP)
    if fault.duration_s is not None:
        await trio.sleep(fault.duration_s)
        node.signal(signal.SIGCONT)


async def _continue(fault: Fault, swarm: Field) -> None:
    swarm.node(fault.target).signal(signal.SIGCONT)


async def _leave(fault: Fault, swarm: Field) -> None:
    node = swarm.node(fault.target)
    before, node.struck = node.struck, "left"  # it may have ended when the answer is here
    try:
        await node.ask("leave")
    except NetworkError:
        node.struck = before
        raise


async def _join(fault: Fault, swarm: Field) -> None:
    await swarm.join(fault.target)


async def _restart(fault: Fault, swarm: Field) -> None:
    await _end(swarm.node(fault.target))
    await trio.sleep(fault.duration_s or 0.0)
    await swarm.join(fault.target)


async def _end(node: NodeProcess) -> None:
    """Kill a node, unless it has ended, and wait until it is gone. Raises NetworkError."""
    if node.alive:
        if node.struck != "killed":
            kill(node)
        with trio.move_on_after(RESTART_DEADLINE_S):
            await node.lives[-1].ended.wait()
    if node.alive:
        raise NetworkError(f"node {node.index} does not end")


async def _pause(fault: Fault, swarm: Field) -> None:
    await swarm.node(fault.target).ask("pause")


async def _resume(fault: Fault, swarm: Field) -> None:
    await swarm.node(fault.target).ask("resume")


async def _throttle(fault: Fault, swarm: Field) -> None:
    swarm.node(fault.target).throttle(fault.cpu_share)


async def _unthrottle(fault: Fault, swarm: Field) -> None:
    swarm.node(fault.target).throttle(None)


# -- links ---------------------------------------------------------------------------------------------------


def _network_of(swarm: Field) -> Network:
    if swarm.network is None:
        raise NetworkError("the nodes do not run in network namespaces")
    return swarm.network


async def _partition(fault: Fault, swarm: Field) -> None:
    pairs = pairs_between(fault.groups)
    await trio.to_thread.run_sync(_network_of(swarm).block, pairs, fault.traffic)


async def _join_up(fault: Fault, swarm: Field) -> None:
    pairs = pairs_between(fault.groups)
    await trio.to_thread.run_sync(_network_of(swarm).unblock, pairs, fault.traffic)


async def _heal(fault: Fault, swarm: Field) -> None:
    await trio.to_thread.run_sync(_network_of(swarm).restore)


async def _slow(fault: Fault, swarm: Field) -> None:
    assert fault.rate_mbit is not None
    await trio.to_thread.run_sync(_network_of(swarm).narrow, fault.target, fault.rate_mbit)


async def _speed_up(fault: Fault, swarm: Field) -> None:
    await trio.to_thread.run_sync(_network_of(swarm).widen, fault.target)


async def _cut(fault: Fault, swarm: Field) -> None:
    """Cut a node's lanes: in a namespace the kernel destroys the sockets; on loopback the node drops them."""
    if swarm.network is not None:
        if not await trio.to_thread.run_sync(swarm.network.reset_lanes, fault.target):
            raise NetworkError(f"node {fault.target} has no lanes to cut")
        return
    node = swarm.node(fault.target)
    await node.ask("cut", *(other.peer_id for other in swarm.nodes if other is not node))


# -- disks ---------------------------------------------------------------------------------------------------


async def _corrupt(fault: Fault, swarm: Field) -> None:
    node = swarm.node(fault.target)
    draw = random.Random(f"{swarm.seed} {fault.round} {fault.target}")
    with disk_errors(node.folder):
        flipped = await trio.to_thread.run_sync(flip_bits, node.folder, draw)
    if not flipped:
        raise NetworkError(f"node {fault.target} has no state on its disk yet")


async def _fill(fault: Fault, swarm: Field) -> None:
    node = swarm.node(fault.target)
    node.limit_files(0)
    node.struck = "full"


async def _make_room(fault: Fault, swarm: Field) -> None:
    """Let files grow again, and start who ended of it, be it a moment later: a write may just have failed."""
    node = swarm.node(fault.target)
    if node.alive:
        node.limit_files(resource.RLIM_INFINITY)
        with trio.move_on_after(FULL_END_S):
            await node.lives[-1].ended.wait()
    if not node.alive:
        await swarm.join(fault.target)
    elif node.struck == "full":
        node.struck = None


# -- an old folder, another address, another time -------------------------------------------------------------


def _copy_of(node: NodeProcess) -> Path:
    return node.folder.with_name(f"{node.index}.copy")


async def copy_folder(fault: Fault, swarm: Field) -> None:
    """Copy the folder of the node that is to be put back to it, as it is at one moment. Raises NetworkError."""
    node = swarm.node(fault.target)
    runs = node.alive and not node.stopped and node.struck != "killed"
    if runs:  # else files would be of different moments
        node.signal(signal.SIGSTOP)
    try:
        with disk_errors(node.folder):
            shutil.rmtree(_copy_of(node), ignore_errors=True)
            shutil.copytree(node.folder, _copy_of(node), ignore=_not_copied)
    finally:
        if runs and node.alive:
            node.signal(signal.SIGCONT)


def _not_copied(folder: str, names: list[str]) -> set[str]:
    """Names in a folder that a copy leaves out: sockets are of the process that listens there."""
    return {name for name in names if name in NOT_COPIED or Path(folder, name).is_socket()}


async def _restore(fault: Fault, swarm: Field) -> None:
    node = swarm.node(fault.target)
    if not _copy_of(node).exists():
        raise NetworkError(f"there is no copy of the folder of node {node.index}")
    await _end(node)
    with disk_errors(node.folder):
        await trio.to_thread.run_sync(put_back, _copy_of(node), node.folder)
        await trio.to_thread.run_sync(shutil.rmtree, _copy_of(node))
    await trio.sleep(fault.duration_s or 0.0)
    node.put_back = True
    try:
        await swarm.join(fault.target)
    except NetworkError:
        node.put_back = False
        raise


def put_back(copy: Path, folder: Path) -> None:
    """Have a folder hold what its copy holds, and of the rest only what the testnet judges by. Blocks."""
    for path in folder.iterdir():
        if path.name not in KEPT:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    shutil.copytree(copy, folder, dirs_exist_ok=True)


async def _move(fault: Fault, swarm: Field) -> None:
    """Start it again where it listens elsewhere. On loopback each start of a node gets ports that are free."""
    node = swarm.node(fault.target)
    before = node.addresses
    await _end(node)
    if swarm.network is not None:
        await trio.to_thread.run_sync(swarm.network.move, node.index)
    await trio.sleep(fault.duration_s or 0.0)
    await swarm.join(fault.target)
    with trio.move_on_after(RESTART_DEADLINE_S):
        await swarm.journal.until(lambda: bool(node.addresses) or not node.alive)
    if set(before) & set(node.addresses):
        raise NetworkError(f"node {node.index} listens where it did before")


async def _set_clock(fault: Fault, swarm: Field) -> None:
    await _set_ahead(swarm.node(fault.target), fault.ahead_s or 0.0)


async def _set_right(fault: Fault, swarm: Field) -> None:
    await _set_ahead(swarm.node(fault.target), 0.0)


async def _set_ahead(node: NodeProcess, ahead_s: float) -> None:
    if node.clock is None:
        raise NetworkError(f"node {node.index} has no clock of its own")
    node.clock.set(ahead_s)
    await trio.lowlevel.checkpoint()


# -- what has to come of it ----------------------------------------------------------------------------------


def _limit_s(scenario: Scenario) -> float:
    return AGENT_WHOLE_S if scenario.synchronisation.shares_rollouts else WHOLE_S


async def until_whole(fault: Fault, swarm: Field, *, limit_s: float = WHOLE_S) -> None:
    """Wait until the node goes on that a fault struck which it is to get over, or others keep it from that.

    Raises NotWhole if it does not in so many seconds, or ended otherwise than it may; NetworkError.
    """
    if fault.kind not in _GOT_OVER:
        return
    node, since = swarm.node(fault.target), time.time()
    if node.put_back:
        with trio.move_on_after(limit_s):
            await swarm.journal.until(lambda: not node.alive or _took_part(node, swarm, since))
        if node.struck == "refused":
            node.take_over, since = True, time.time()
            await swarm.join(node.index)
        node.put_back = False
    with trio.move_on_after(limit_s):
        await swarm.journal.until(lambda: not _is_free(node) or _took_part(node, swarm, since))
    if _is_free(node) and not _took_part(node, swarm, since):
        raise NotWhole(f"node {node.index} took part in no round within {limit_s:.0f} s of its {fault.kind}")
    if not node.alive and node.struck is None and node.lives[-1].exit_code:  # its rounds may be done
        raise NotWhole(f"node {node.index} ended after its {fault.kind}; see its log")
    if fault.kind == "move":
        await _until_linked(node, swarm, limit_s)


def _is_free(node: NodeProcess) -> bool:
    """True if nothing keeps it from taking part."""
    return node.alive and not node.stopped and node.struck is None


def _took_part(node: NodeProcess, swarm: Field, since: float) -> bool:
    """True if it is of a round that ended since, or, where no round has members, ended one.

    Where rounds are certified an agent's own are none of the swarm's.
    """
    kind = Certified if swarm.journal.of(Certified) else RoundEnded
    ended = (event for event in swarm.journal.of(kind, node.index) if event.at > since)
    return any(not isinstance(event, Certified) or node.peer_id in event.members for event in ended)


async def _until_linked(node: NodeProcess, swarm: Field, limit_s: float) -> None:
    """Wait until all who run, are not kept apart and had found it before have found a node that came back elsewhere.

    Raises NotWhole.
    """

    def missing() -> list[int]:
        since = node.lives[-1].started_at
        links = [(entry.node, entry.event) for entry in swarm.journal.entries if isinstance(entry.event, Linked)]
        found = {index: event.at > since for index, event in links if event.peer == node.peer_id}
        return [index for index, again in found.items() if not again and may_find(index)]

    def may_find(index: int) -> bool:
        apart = swarm.network is not None and swarm.network.is_apart((index, node.index))
        return not apart and _is_free(swarm.node(index))

    with trio.move_on_after(limit_s):
        await swarm.journal.until(lambda: not _is_free(node) or not missing())
    if _is_free(node) and missing():
        raise NotWhole(f"node {node.index} has another address, and nodes {missing()} did not find it there")


def flip_bits(folder: Path, draw: random.Random) -> list[Path]:
    """Flip a bit of a value in every state and all finals in a node's folder; returns the files. Blocks.

    What these files begin with, and it is less than a quarter, says what they hold. A value with one bit more or less
    is a value all the same; zeros may be no values, but what fills a page.
    """
    flipped = []
    for path in sorted([*folder.glob("state/*.safetensors"), *folder.glob("finals/*-*")]):
        with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:  # a running node removes old ones
            data = file.read()
            drawn = (draw.randrange(len(data) // 4, len(data)) for _ in data)
            at = next((at for at in drawn if data[at]), None)
            if at is None:  # a running node has only just begun it
                continue
            file.seek(at)
            file.write(bytes([data[at] ^ 1 << draw.randrange(8)]))
            flipped.append(path)
    return flipped


_ACTIONS: Final[dict[str, Callable[[Fault, Field], Awaitable[None]]]] = {
    "kill": _kill,
    "stop": _stop,
    "continue": _continue,
    "leave": _leave,
    "join": _join,
    "restart": _restart,
    "pause": _pause,
    "resume": _resume,
    "throttle": _throttle,
    "partition": _partition,
    "heal": _heal,
    "slow": _slow,
    "corrupt": _corrupt,
    "full": _fill,
    "cut": _cut,
    "clock": _set_clock,
    "restore": _restore,
    "move": _move,
}

_UNDOING: Final[dict[str, Callable[[Fault, Field], Awaitable[None]]]] = {
    "throttle": _unthrottle,
    "partition": _join_up,
    "slow": _speed_up,
    "full": _make_room,
    "clock": _set_right,
}

_STARTING_AGAIN: Final = ("restart", "restore", "move")
_GOT_OVER: Final = ("clock", "restore", "move")
"""Kinds whose node is to take part again at once."""
