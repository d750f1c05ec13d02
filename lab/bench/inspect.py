"""One swarm that is looked at instead of timed, for one round: its values, and the memory that a reduction takes.

All nodes are in test mode. Every contribution is known, since all stand on zeros and owe nothing from before: the
update that each node applied is compared with the reference by bits, and with the mean in float64 of what was drawn.
All nodes hold when they have accepted the plan, and again when the last chunk is final and decoded. At the first hold
the contribution is encoded and nothing of a reduction was ever there. From then until the second hold the daemon,
without its trainer, is looked at again and again (`resident.watched`):

    growth = the most it had of anonymous and shared memory - what it had of both at the first hold
    extra  = growth - 4 bytes for each value of the mean update, which is the output

The input, the contribution, is a file that is mapped: its pages are the file's, and counted nowhere. It is the first
round, since later ones use memory that was kept, or prepared, for them: there the same shows in no growth. What is kept
of the encoded finals counts as extra, unless the output is a view of them; and so does memory that nodes of one machine
share, at each end.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import trio

from shoal.lab.bench.resident import resident, watched
from shoal.lab.bench.swarm import SEED, BenchSpec, BenchSwarm, running_swarm
from shoal.lab.bench.synthetic import drawn_values
from shoal.node.options import Hold
from shoal.node.training.trainer_messages import Assignment
from shoal.testnet.check import Witness, check_round

TERM: Final = "0.0"
ROUND: Final = 1
VALUE_BYTES: Final = 4
ALLOCATOR: Final = ("MALLOC_MMAP_THRESHOLD_=65536", "MALLOC_TRIM_THRESHOLD_=0")
"""glibc: larger blocks are mappings of their own, which are gone when freed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """Findings in the nodes. exact: every node applied the reference. max_abs_error: of the mean, against float64.

    The bytes are those of the node for which they were highest; None where the system does not tell.
    """

    exact: bool
    max_abs_error: float
    growth_bytes: int | None
    extra_bytes: int | None


async def inspect(spec: BenchSpec, folder: Path) -> Inspection:
    """Look at a swarm like `spec` in `folder`, which must be empty. Raises NetworkError.

    Cancellation: all processes are ended and reaped.
    """
    holds = (Hold(round=ROUND, phase="plan"), Hold(round=ROUND, phase="reduce", progress=1.0))
    held = replace(spec, rounds=ROUND, holds=dict.fromkeys(range(spec.peers), holds), environment=ALLOCATOR)
    async with running_swarm(held, folder) as swarm:
        growth = await _peak_growth(swarm)
        for node in swarm.nodes:
            await node.ask("release")
        await swarm.until_certified(ROUND, swarm.nodes)
    found = check_round(witnesses(swarm, settled=ROUND), TERM, ROUND)
    applied = np.fromfile(swarm.nodes[0].folder / "rounds" / f"{TERM}-{ROUND}" / "applied", "<f4")
    return Inspection(
        exact=found.wrong_values == 0 and not found.errors and found.updates_compared == spec.peers,
        max_abs_error=float(np.abs(applied - _exact_mean(spec)).max()),
        growth_bytes=growth,
        extra_bytes=None if growth is None else growth - VALUE_BYTES * spec.numel,
    )


def witnesses(swarm: BenchSwarm, *, settled: int) -> list[Witness]:
    """All nodes for the check of round `settled`. Who ended before it was certified need not have kept anything."""
    certified, known = swarm.certified_by(settled), frozenset({(TERM, settled)})
    return [replace(one, settled=known) if one.index in certified else one for one in swarm.witnesses]


async def _peak_growth(swarm: BenchSwarm) -> int | None:
    """Take the swarm to the end of its first reduction, where all hold; by how many bytes a node grew in it."""
    swarm.open_gate(ROUND)
    await swarm.until_holding(ROUND, "plan", swarm.nodes)
    pids = [node.lives[-1].pid for node in swarm.nodes]
    if sys.platform != "linux":
        await _go_on(swarm)
        return None
    before = [resident(pid).held for pid in pids]
    with ExitStack() as stack:
        seen = [stack.enter_context(watched([[pid]])) for pid in pids]
        await _go_on(swarm)
    return max(max(look.held for look in looks) - held for looks, held in zip(seen, before, strict=True))


async def _go_on(swarm: BenchSwarm) -> None:
    """Have all nodes go on at once, until all hold at the end of the reduction.

    What is sent to one that is released later than the others would wait in its memory.
    """
    async with trio.open_nursery() as nursery:
        for node in swarm.nodes:
            nursery.start_soon(node.ask, "release")
    await swarm.until_holding(ROUND, "reduce", swarm.nodes)


def _exact_mean(spec: BenchSpec) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    total = np.zeros(spec.numel, np.float64)
    for member in range(spec.peers):
        assignment = Assignment(seed=SEED, round=ROUND, member=member, members=spec.peers)
        total += drawn_values(assignment.stream_seed, spec.numel)
    return total / spec.peers
