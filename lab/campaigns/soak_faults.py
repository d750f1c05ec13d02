"""Faults of a soak on a living swarm, each from its beginning until it is undone."""

from __future__ import annotations

from typing import Final

import trio

from shoal.lab.campaigns.campaign_swarm import LivingSwarm
from shoal.lab.campaigns.soak_plan import SLOW_MBIT, SoakFault
from shoal.protocol.errors import NetworkError
from shoal.testnet import faults
from shoal.testnet.scenario import Fault

LEAVE_DEADLINE_S: Final = 30.0


async def inject_fault(strike: SoakFault, swarm: LivingSwarm) -> str | None:
    """Strike, wait as long as the fault lasts, and undo it, and so with the one beside it, at the same moment.

    Returns why it could not be done, or what of it was not got over; None if all is well.
    """
    errors: list[str] = []

    async def inject(one: SoakFault) -> None:
        errors.extend(await _inject(one, swarm))

    async with trio.open_nursery() as nursery:
        for one in (strike, strike.beside):
            if one is not None:
                nursery.start_soon(inject, one)
    return "; ".join(errors) or None


async def _inject(strike: SoakFault, swarm: LivingSwarm) -> list[str]:
    errors: list[str] = []
    for fault in faults_of(strike, len(swarm.nodes)):
        try:
            if fault.kind == "restore":
                await faults.copy_folder(fault, swarm)
                await trio.sleep(strike.lasts_s)
            await faults.strike(fault, swarm)
            if fault.kind == "leave":
                errors += await _until_left(fault, swarm)
            await faults.undo(fault, swarm)
            await faults.until_whole(fault, swarm)
        except NetworkError as error:
            errors.append(str(error))
            if fault.kind != "corrupt":  # else the node is started again all the same
                break
    return errors


def faults_of(strike: SoakFault, nodes: int) -> tuple[Fault, ...]:
    """List the faults of a scenario that make up a strike, in a swarm of so many nodes. Ended nodes come back."""
    number, lasts_s = strike.number, strike.lasts_s
    if strike.kind in ("partition", "halves"):
        rest = tuple(index for index in range(nodes) if index not in strike.nodes)
        return (Fault(kind="partition", round=number, groups=(strike.nodes, rest), duration_s=lasts_s),)
    (node,) = strike.nodes
    back = Fault(kind="restart", round=number, node=node, duration_s=lasts_s)
    if strike.kind == "kill":
        return (back,)
    if strike.kind == "leave" or strike.kind == "corrupt":
        return Fault(kind=strike.kind, round=number, node=node), back
    if strike.kind == "slow":
        return (Fault(kind="slow", round=number, node=node, rate_mbit=SLOW_MBIT, duration_s=lasts_s),)
    if strike.kind == "stop":
        return (Fault(kind="stop", round=number, node=node, duration_s=lasts_s),)
    if strike.kind == "clock":
        return (Fault(kind="clock", round=number, node=node, ahead_s=strike.ahead_s, duration_s=lasts_s),)
    if strike.kind == "restore":
        return (Fault(kind="restore", round=number, node=node),)
    if strike.kind == "move":
        return (Fault(kind="move", round=number, node=node, duration_s=lasts_s),)
    return (Fault(kind="cut", round=number, node=node),)


async def _until_left(fault: Fault, swarm: LivingSwarm) -> list[str]:
    """Wait until the node that was asked to leave is gone; says so if it is not in time, and is to be killed."""
    with trio.move_on_after(LEAVE_DEADLINE_S):
        await swarm.node(fault.target).lives[-1].ended.wait()
        return []
    return [f"node {fault.target} did not leave within {LEAVE_DEADLINE_S:.0f} s"]
