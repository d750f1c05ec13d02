"""The strikes of `shoal bench hostile`: each begins as its block does, and has stopped when that is left."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from shoal.lab.bench.hostile_member import LYING_KINDS, told_of
from shoal.lab.bench.hostile_spec import HONEST, STRANGERS
from shoal.lab.fleet import end
from shoal.node.reporting.events import Listening
from shoal.protocol.errors import NetworkError
from shoal.swarm.limits import Reason
from shoal.testnet.nodes import NodeProcess

if TYPE_CHECKING:
    from shoal.lab.bench.hostile import HostileSwarm

START_DEADLINE_S: Final = 120.0
FULL_DEADLINE_S: Final = 300.0
FULL_PERIOD_S: Final = 1.0
LEFT_OUT: Final = ("control.sock", "control.path", "lock")
"""Of a running node's folder, what belongs to its process."""


@dataclass(slots=True, kw_only=True)
class Struck:
    """Effect of a strike. paced: the honest nodes whose rounds count meanwhile. made: what the attacker did."""

    paced: list[NodeProcess]
    made: Counter[str] = field(default_factory=Counter)


Strike = Callable[["HostileSwarm", Struck], AbstractAsyncContextManager[None]]


@contextlib.asynccontextmanager
async def stranger(swarm: HostileSwarm, struck: Struck) -> AsyncIterator[None]:
    """A process of its own, of which no node knows anything. Raises NetworkError if it does not begin."""
    addresses = [node.addresses[0] for node in swarm.honest]
    command = [sys.executable, "-m", "shoal.lab.bench.hostile_stranger", swarm.bench.kind, swarm.swarm_hex]
    lanes = swarm.journal.of(Listening, 0)[-1].lanes[0]
    command += [str(swarm.bench.places), lanes, *addresses]
    attacker = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert attacker.stdin is not None
    assert attacker.stdout is not None
    try:
        with trio.fail_after(START_DEADLINE_S):
            if await attacker.stdout.receive_some(len(b"ready\n")) != b"ready\n":
                raise NetworkError("the attacker did not begin")
        yield
        await attacker.stdin.aclose()
        with trio.fail_after(START_DEADLINE_S):
            told = b"".join([part async for part in attacker.stdout])
        struck.made.update(msgspec.json.decode(told, type=dict[str, int]))
    finally:
        attacker.kill()
        with trio.CancelScope(shield=True):
            await attacker.wait()


@contextlib.asynccontextmanager
async def siege(swarm: HostileSwarm, struck: Struck) -> AsyncIterator[None]:
    """Strangers in all places; then a founder is restarted, whose own rounds do not count meanwhile."""
    async with stranger(swarm, struck):
        with trio.move_on_after(FULL_DEADLINE_S):
            while not all([await _without_place(node) for node in swarm.honest]):  # noqa: ASYNC110  # nothing tells
                await trio.sleep(FULL_PERIOD_S)
            struck.made["nodes full"] = HONEST
        struck.paced = await restart_founder(swarm)
        before = [await _without_place(node) for node in struck.paced]
        yield
        after = [await _without_place(node) for node in struck.paced]
        struck.made["nodes kept full"] = sum(more > some for some, more in zip(before, after, strict=True))


async def restart_founder(swarm: HostileSwarm) -> list[NodeProcess]:
    """Kill the last of the four and start it again; returns the others."""
    *others, founder = swarm.honest
    await end(founder)
    await swarm.launch_with(founder)
    return others


async def _without_place(node: NodeProcess) -> int:
    """Count the peers that the node turned away, or did not dial, because all its places were taken."""
    status: Any = await node.ask("status")
    return int(status["refused"].get(Reason.LINKS.value, 0))


@contextlib.asynccontextmanager
async def lying_member(swarm: HostileSwarm, struck: Struck) -> AsyncIterator[None]:
    """Let the last founder lie as long as a file is there."""
    swarm.strike.touch()
    try:
        yield
    finally:
        swarm.strike.unlink()
    told = told_of(swarm.strike)
    struck.made["lies"] = told.stat().st_size if told.exists() else 0


@contextlib.asynccontextmanager
async def copied_key(swarm: HostileSwarm, struck: Struck) -> AsyncIterator[None]:
    """Run a copy of a node's folder beside it, as long as it will. Once it is gone the other goes on, if it ended.

    The rounds of the node that was copied do not count meanwhile: that it stops signing is what it is to do.
    """
    original = swarm.honest[-1]
    folder = swarm.folder / "copy"
    await trio.to_thread.run_sync(
        partial(shutil.copytree, original.folder, folder, ignore=shutil.ignore_patterns(*LEFT_OUT))
    )
    copy = swarm.make(HONEST, folder)
    struck.paced.remove(original)
    await swarm.launch_with(copy)
    struck.made["copies"] = 1
    yield
    if copy.alive:
        await end(copy)
        struck.made["copies killed at the end"] = 1
    if not original.alive:
        struck.made["originals that ended"] = 1
        await swarm.launch_with(original, "--take-over")


FAULTS: Final[dict[str, Strike]] = {
    **dict.fromkeys(sorted(STRANGERS), stranger),
    "links": siege,
    **dict.fromkeys(LYING_KINDS, lying_member),
    "copykey": copied_key,
}
