"""The yardstick: an all-reduce of fp32 by torch.distributed's gloo, on loopback, in plaintext, surviving no fault.

    python -m shoal.lab.bench.gloo --peers 4 --numel 25000000 --iters 5         prints one JSON line

One process per peer, the leader of a session as a node is (the kernel weighs sessions before it weighs processes), and
one torch thread each. The time of an iteration is from a barrier to the barrier after it, at the first peer; the
vectors are in memory before it. Iterations before the last `--iters` warm up.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from shoal.testnet.parent_death import ended_with_parent

WARM_UP: Final = 2
DEADLINE_S: Final = 600.0


def main(arguments: list[str]) -> int:
    """Be the yardstick, or, with --rank and --meet, one peer of it."""
    parser = argparse.ArgumentParser()
    for option in ("--peers", "--numel", "--iters"):
        parser.add_argument(option, type=int, required=True)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--meet", type=Path)
    options = parser.parse_args(arguments)
    if options.rank is None:
        return _start_peers(options.peers, arguments)
    times = _be_peer(options.rank, options.peers, options.numel, options.iters, options.meet)
    if options.rank == 0:
        print(json.dumps({"peers": options.peers, "median_s": statistics.median(times), "times_s": times}))
    return 0


def _start_peers(peers: int, arguments: list[str]) -> int:
    """Run all peers to their end; they meet in a file, so no port has to be free. Returns the worst exit code."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="shoal-gloo-") as folder:
        command = [sys.executable, "-m", "shoal.lab.bench.gloo", *arguments, "--meet", f"{folder}/meet"]
        processes = [
            subprocess.Popen(
                ended_with_parent([*command, "--rank", str(rank)]), env=environment, start_new_session=True
            )
            for rank in range(peers)
        ]
        try:
            ends_at = time.monotonic() + DEADLINE_S
            return max(abs(process.wait(max(0.0, ends_at - time.monotonic()))) for process in processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _be_peer(rank: int, peers: int, numel: int, iters: int, meet: Path) -> list[float]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=peers)
    values = torch.rand(numel)
    times = []
    for _ in range(WARM_UP + iters):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(values)
        dist.barrier()
        times.append(time.perf_counter() - began)
        values /= peers
    dist.destroy_process_group()
    return times[WARM_UP:]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
