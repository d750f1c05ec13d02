"""Carries out the faults of a soak on a living swarm, each from its beginning until it is undone."""

from __future__ import annotations

import random
import signal
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from shoal.lab.campaigns.campaign_swarm import LivingSwarm
from shoal.lab.campaigns.soak_plan import SLOW_MBIT, Strike
from shoal.lab.fleet import kill
from shoal.protocol.errors import NetworkError
from shoal.testnet.faults import flip_bits
from shoal.testnet.links.namespaces import Network, pairs_between
from shoal.testnet.nodes import NodeProcess

LEAVE_DEADLINE_S: Final = 30.0


async def strike_swarm(strike: Strike, swarm: LivingSwarm, links: Network | None) -> str | None:
    """Strike, wait as long as the fault lasts, and undo it; returns why it could not be done, None if it was.

    Raises NetworkError if a node that was ended cannot be started again.
    """
    try:
        await _ACTIONS[strike.kind](strike, swarm, links)
    except NetworkError as error:
        return str(error)
    return None


async def _kill(strike: Strike, swarm: LivingSwarm, _: Network | None) -> None:
    node = _struck(strike, swarm)
    kill(node)
    await trio.sleep(strike.lasts_s)
    await swarm.revive(node)


async def _leave(strike: Strike, swarm: LivingSwarm, _: Network | None) -> None:
    node = _struck(strike, swarm)
    node.struck = "left"  # before it is asked: it may have ended when the answer is here
    try:
        await swarm.order(node, "leave")
    except NetworkError:
        node.struck = None
        raise
    with trio.move_on_after(LEAVE_DEADLINE_S) as scope:
        await node.lives[-1].ended.wait()
    if scope.cancelled_caught:
        kill(node)
        await swarm.revive(node)
        raise NetworkError(f"node {node.index} did not leave within {LEAVE_DEADLINE_S:.0f} s")
    await trio.sleep(strike.lasts_s)
    await swarm.revive(node)


async def _corrupt(strike: Strike, swarm: LivingSwarm, links: Network | None) -> None:
    """Flip bits under the running node, and let another process find them."""
    node = _struck(strike, swarm)
    flipped = await trio.to_thread.run_sync(flip_bits, node.folder, random.Random(f"{strike.number}:corrupt"))
    await _kill(strike, swarm, links)
    if not flipped:
        raise NetworkError(f"node {node.index} had no state on its disk to corrupt")


async def _stop(strike: Strike, swarm: LivingSwarm, _: Network | None) -> None:
    node = _struck(strike, swarm)
    node.signal(signal.SIGSTOP)
    await trio.sleep(strike.lasts_s)
    node.signal(signal.SIGCONT)


async def _cut(strike: Strike, swarm: LivingSwarm, links: Network | None) -> None:
    """In a namespace the kernel destroys the sockets; on loopback the node drops its lanes."""
    node = _struck(strike, swarm)
    if links is None:
        await swarm.order(node, "cut", *(other.peer_id for other in swarm.nodes if other is not node))
    else:
        await trio.to_thread.run_sync(links.reset_lanes, node.index)


async def _apart(strike: Strike, swarm: LivingSwarm, links: Network | None) -> None:
    """The struck nodes on one side, all others on the other."""
    rest = [node.index for node in swarm.nodes if node.index not in strike.nodes]
    pairs = pairs_between((strike.nodes, rest))
    await trio.to_thread.run_sync(_links(links).block, pairs)
    await trio.sleep(strike.lasts_s)
    await trio.to_thread.run_sync(_links(links).unblock, pairs)


async def _slow(strike: Strike, _: LivingSwarm, links: Network | None) -> None:
    (index,) = strike.nodes
    await trio.to_thread.run_sync(_links(links).narrow, index, SLOW_MBIT)
    await trio.sleep(strike.lasts_s)
    await trio.to_thread.run_sync(_links(links).widen, index)


def _struck(strike: Strike, swarm: LivingSwarm) -> NodeProcess:
    (index,) = strike.nodes
    return swarm.nodes[index]


def _links(links: Network | None) -> Network:
    if links is None:
        raise NetworkError("the nodes do not run in network namespaces")
    return links


_ACTIONS: Final[dict[str, Callable[[Strike, LivingSwarm, Network | None], Awaitable[None]]]] = {
    "kill": _kill,
    "leave": _leave,
    "corrupt": _corrupt,
    "stop": _stop,
    "cut": _cut,
    "partition": _apart,
    "halves": _apart,
    "slow": _slow,
}
