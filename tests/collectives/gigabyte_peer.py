"""One of two peers that reduce a large vector over one real lane, as a process: prints what it measured as JSON.

usage: python -m tests.collectives.gigabyte_peer PLACE PORT NUMEL       PORT 0: listen, and print the port first
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from pathlib import Path

import numpy as np

from shoal.collectives.codecs import F32
from shoal.collectives.contribution import EncodedContribution
from shoal.collectives.grid import Grid
from shoal.collectives.memory import PayloadPool
from shoal.collectives.partition import deal
from shoal.collectives.progress import ReduceProgress
from shoal.collectives.reduce import Reduction
from shoal.collectives.traffic import PlanTraffic, Routes
from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.messages import NO_HASH, Participant, Plan, Term
from shoal.swarm.lanes.frame import SCOPE_BYTES, FrameHeader
from shoal.swarm.lanes.lane import Lane
from shoal.swarm.lanes.limits import LaneLimits
from shoal.swarm.lanes.seal import Opener, Sealer
from shoal.swarm.lanes.socket import receive_exactly

CHUNK_VALUES = 1 << 18
PERIOD = 1000
DEADLINE_S = 120.0
KEYS = (bytes([1]) * 32, bytes([2]) * 32)

identities = [Identity.from_seed(bytes([n + 1]) * 32) for n in range(2)]


def pattern(start: int, stop: int) -> F32:
    """Small whole numbers, so that the mean of their multiples is exact."""
    return (np.arange(start, stop) % PERIOD).astype(np.float32)


def contribution(place: int, grid: Grid) -> EncodedContribution:
    values = np.empty(grid.numel, np.float32)
    for chunk in range(grid.chunks):
        np.multiply(pattern(*grid.span(chunk)), np.float32(place + 1), out=values[slice(*grid.span(chunk))])
    return EncodedContribution.encode(values, grid, "fp32", threads=2)


class Sink:
    """Hands a lane's frames to the traffic, as the daemon does."""

    def __init__(self) -> None:
        self.traffic: PlanTraffic

    def region(self, peer: PeerId, header: FrameHeader) -> memoryview | None:
        return self.traffic.region(peer, header)

    def received(self, peer: PeerId, header: FrameHeader, payload: memoryview) -> None:
        self.traffic.received(peer, header, payload)

    def lane_closed(self, peer: PeerId, error: NetworkError | RemoteError | None) -> None:
        pass


def memory(name: str) -> int:
    """A figure of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def connect(port: int) -> socket.socket:
    if port:
        return socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        return listener.accept()[0]


def main(place: int, port: int, numel: int) -> None:
    me, other = identities[place], identities[1 - place].peer_id
    grid = Grid(numel, CHUNK_VALUES)
    mine = contribution(place, grid)
    connection = connect(port)
    connection.settimeout(None)
    connection.sendall(mine.root)
    theirs = bytearray(32)
    receive_exactly(connection, memoryview(theirs))
    roots = (mine.root, bytes(theirs)) if place == 0 else (bytes(theirs), mine.root)
    plan = Plan(
        term=Term(),
        round=1,
        base=NO_HASH,
        view=0,
        attempt=0,
        planner=identities[0].peer_id,
        participants=tuple(Participant(identities[n].peer_id, 1, 1, roots[n]) for n in range(2)),
        owners=deal([(0, 0)] * 2, grid.chunks),
        codec="fp32",
        numel=numel,
        chunk_values=CHUNK_VALUES,
    )
    sink = Sink()
    lane = Lane(
        connection,
        peer=other,
        sealer=Sealer(KEYS[place]),
        opener=Opener(KEYS[1 - place], peer=other),
        sink=sink,
        limits=LaneLimits(),
        dialled=place == 1,
    )
    sink.traffic = traffic = PlanTraffic(
        post=lambda peer, header, payload: lane.post(header, payload), waiting=lambda to, scope: ()
    )
    done = threading.Event()

    def on_progress(progress: ReduceProgress) -> None:
        if progress.final == progress.total:
            done.set()

    reduction = Reduction(
        plan=plan,
        identity=me,
        contribution=mine,
        post=lambda *payload: traffic.post(plan.lineage[:SCOPE_BYTES], *payload),
        on_progress=on_progress,
        memory=PayloadPool(0),
    )
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    began = time.monotonic()
    lane.start()
    traffic.begin(reduction, Routes(plan, me.peer_id))
    reduction.start()
    if not done.wait(DEADLINE_S):
        raise SystemExit(f"{reduction.final_chunks} of {plan.chunks} chunks after {DEADLINE_S} s")
    seconds, peak = time.monotonic() - began, memory("VmHWM")
    unsound = reduction.verify(threads=2)
    finals = reduction.result()
    wrong = 0
    for chunk, final in enumerate(finals.chunks):
        want = pattern(*grid.span(chunk)) * np.float32(1.5)
        wrong += int(np.count_nonzero(final.encoded.view(np.uint32) != want.view(np.uint32)))
    print(
        json.dumps(
            {
                "seconds": seconds,
                "wrong_values": wrong,
                "unsound": len(unsound),
                "coverage": finals.coverage,
                "extra_bytes": peak - before - sum(final.payload.size for final in finals.chunks),
            }
        ),
        flush=True,
    )
    lane.begin_close()
    lane.join(DEADLINE_S)


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:4]))
