"""What a swarm costs the inner loop: tokens per second of real nodes, beside the same trainers with nobody around.

In turns, in folders that are removed afterwards:

    alone       as many inner loops side by side as there are nodes, see `throughput_alone`
    together    those nodes as a swarm, see `throughput_swarm`
    alone       and so on; the last ones are alone, so that each run of the swarm is between two

All that nodes share on one machine, its cores, its memory or one GPU, their loops alone share as well, and they are
processes of the same kind in sessions of their own, as some systems share out processor time by session. What daemons
need of the processor comes on top, and where trainers use all cores it is taken from them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import trio

from shoal.lab.bench.throughput_alone import run_alone
from shoal.lab.bench.throughput_spec import Alone, Throughput, ThroughputBench, Together, step_s
from shoal.lab.bench.throughput_swarm import run_together

Tell = Callable[[str], None]


def bench_throughput(bench: ThroughputBench, tell: Tell = lambda line: None) -> Throughput:
    """Measure; `tell` hears of every run as it is done.

    Raises ConfigError, NetworkError, StorageError, alone or in groups.
    """
    return trio.run(_measure, bench, tell)


async def _measure(bench: ThroughputBench, tell: Tell) -> Throughput:
    alone, together = [await _alone(bench, tell)], list[Together]()
    for _ in range(bench.repeat):
        with TemporaryDirectory(prefix="shoal-bench-throughput-") as name:
            found = await run_together(bench, Path(name), step_s=step_s(alone[-1].loops))
        tell(f"together   {found.tokens_per_s:.0f} tokens/s")
        together.append(found)
        alone.append(await _alone(bench, tell))
    return Throughput(bench=bench, alone=tuple(alone), together=tuple(together))


async def _alone(bench: ThroughputBench, tell: Tell) -> Alone:
    with TemporaryDirectory(prefix="shoal-bench-throughput-") as name:
        found = await run_alone(bench, Path(name))
    tell(f"alone      {found.tokens_per_s:.0f} tokens/s")
    return found
