"""Announcements at a steady rate on real hosts: `python -m tests.swarm.rollout_rate SECONDS [HOSTS [PER_SECOND]]`."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import trio

from tests.swarm.rollout_lab import Node, run, running
from tests.waiting import until

ARRIVAL_DEADLINE_S = 60.0


async def announce_steadily(nodes: Sequence[Node], *, seconds: float, per_second: float) -> None:
    """Let the nodes announce `per_second` groups in all; returns when each has received every other's offers.

    What a node received is counted, each offer once, since its book holds the newest only. Raises trio.TooSlowError
    where some did not arrive.
    """
    announced: dict[int, set[bytes]] = {}
    async with trio.open_nursery() as nursery:
        for node in nodes:
            announced[node.seed] = set()
            per_node = per_second / len(nodes)
            nursery.start_soon(_announce, node, announced[node.seed], int(seconds * per_node), 1 / per_node)
    with trio.fail_after(ARRIVAL_DEADLINE_S):
        for node in nodes:
            others = set().union(*(own for seed, own in announced.items() if seed != node.seed))
            await until(partial(lambda node, count: node.exchange.announcements_received == count, node, len(others)))
            assert node.offered() <= others
            assert len(node.offered()) == len(others) - node.exchange.book.crowded_out


async def _announce(node: Node, announced: set[bytes], count: int, period_s: float) -> None:
    start = trio.current_time()
    for index in range(count):
        announced.add(await node.announce(index))
        await trio.sleep_until(start + (index + 1) * period_s)


async def _measure(seconds: float, hosts: int, per_second: float) -> None:
    nodes = [Node(seed, members=range(1, hosts + 1)) for seed in range(1, hosts + 1)]
    async with running(*nodes):
        before_bytes = _resident_bytes()
        start, cpu = time.perf_counter(), time.process_time()
        try:
            await announce_steadily(nodes, seconds=seconds, per_second=per_second)
        except trio.TooSlowError:
            print(f"some announcements did not arrive within {ARRIVAL_DEADLINE_S:g} s")
        elapsed_s, busy_s = time.perf_counter() - start, time.process_time() - cpu
        grown_bytes = _resident_bytes() - before_bytes
        for node in nodes:
            exchange = node.exchange
            print(
                f"node {node.seed}: sent {exchange.announcements_sent}, received {exchange.announcements_received}, "
                f"held {len(exchange.book)}, rejected {dict(exchange.rejected)}, gossip bytes sent "
                f"{node.host.traffic.bytes_sent}, received {node.host.traffic.bytes_received}"
            )
        print(
            f"{elapsed_s:.1f} s, {busy_s:.1f} s of CPU for {hosts} nodes in one process, whose resident memory grew by "
            f"{grown_bytes / 1e6:.1f} MB"
        )


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    arguments = [float(text) for text in sys.argv[1:]]
    seconds, hosts, per_second = [*arguments, *(60.0, 4.0, 200.0)[len(arguments) :]]
    run(partial(_measure, seconds, int(hosts), per_second), deadline_s=seconds + 2 * ARRIVAL_DEADLINE_S)
