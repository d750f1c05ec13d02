"""`shoal bench throughput`: what a swarm costs the inner loop.

That is tokens per second of real nodes, beside those of the same trainers with nobody around.

In turns, in folders that are removed afterwards:

    alone       as many inner loops side by side as there are nodes, as in `throughput_nodes`
    together    those nodes as a swarm
    alone       and so on; the last ones are alone, so that each run of the swarm is between two

All that nodes share on one machine, its cores, its memory or one GPU, their loops alone share as well, and they are
processes of the same kind in sessions of their own, as some systems share out processor time by session. What daemons
need of the processor comes on top, and where trainers use all cores it is taken from them.
"""

from __future__ import annotations

import statistics
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import trio

from shoal.cli.render import ShowNow
from shoal.lab.bench.throughput_nodes import run_alone, run_together
from shoal.lab.bench.throughput_spec import Alone, Throughput, ThroughputBench, Together, step_s
from shoal.lab.case import Case


def run(bench: ThroughputBench, tell: ShowNow) -> Throughput:
    """Train on random tokens: in the inner loop alone, and in a swarm of real nodes on this machine, in turns.

    Alone there are as many loops side by side as there are nodes, so both share this machine alike. The command ends
    with exit code 1 if nodes came to different states; whether the target is met, it prints.
    """
    return trio.run(_measure, bench, tell)


async def _measure(bench: ThroughputBench, tell: ShowNow) -> Throughput:
    alone, together = [await _alone(bench, tell)], list[Together]()
    for _ in range(bench.repeat):
        with TemporaryDirectory(prefix="shoal-bench-throughput-") as name:
            found = await run_together(bench, Path(name), step_s=step_s(alone[-1].loops))
        tell(f"together   {found.tokens_per_s:.0f} tokens/s")
        together.append(found)
        alone.append(await _alone(bench, tell))
    return Throughput(bench=bench, alone=tuple(alone), together=tuple(together))


async def _alone(bench: ThroughputBench, tell: ShowNow) -> Alone:
    with TemporaryDirectory(prefix="shoal-bench-throughput-") as name:
        found = await run_alone(bench, Path(name))
    tell(f"alone      {found.tokens_per_s:.0f} tokens/s")
    return found


def to_document(result: Throughput) -> dict[str, object]:
    """Return medians over the runs, and every run in order."""
    bench = result.bench
    alone = [run.tokens_per_s for run in result.alone]
    together = [run.tokens_per_s for run in result.together]
    rounds = [seconds for run in result.together for seconds in run.rounds_s]
    return {
        "parameters": bench.shape.parameters,
        "width": bench.shape.width,
        "layers": bench.shape.layers,
        "context": bench.context,
        "batch": bench.batch,
        "dtype": bench.dtype,
        "device": result.alone[0].device,
        "threads": bench.threads,
        "nodes": bench.nodes,
        "strategy": bench.strategy,
        "inner_steps": bench.inner_steps,
        "rounds": bench.rounds,
        "alone_tokens_per_s": round(statistics.median(alone), 3),
        "tokens_per_s": round(statistics.median(together), 3),
        "overhead": round(result.overhead, 4),
        "overheads": [round(one, 4) for one in result.overheads],
        "work_overhead": round(result.work_overhead, 4),
        "work_overheads": [round(one, 4) for one in result.work_overheads],
        "blocked_fraction": round(statistics.median(run.blocked for run in result.together), 5),
        "hand_over_fraction": round(statistics.median(run.hand_over for run in result.together), 5),
        "alone_step_s": round(statistics.median(step_s(run.loops) for run in result.alone), 6),
        "step_s": round(statistics.median(step_s(run.nodes) for run in result.together), 6),
        "round_s": round(statistics.median(rounds), 3),
        "daemons_cpu": round(statistics.median(run.cpu.daemons for run in result.together), 3),
        "trainers_cpu": round(statistics.median(run.cpu.trainers for run in result.together), 3),
        "alone_cpu": round(statistics.median(run.cpu.total for run in result.alone), 3),
        "alone_tokens": [sum(loop.tokens for loop in run.loops) for run in result.alone],
        "tokens": [sum(node.tokens for node in run.nodes) for run in result.together],
        "alone_runs_tokens_per_s": [round(one, 3) for one in alone],
        "runs_tokens_per_s": [round(one, 3) for one in together],
        "missed": sum(run.missed for run in result.together),
        "sound": result.sound,
    }


CASE: Final = Case(spec=ThroughputBench, run=run, document=to_document, sound=attrgetter("sound"))
