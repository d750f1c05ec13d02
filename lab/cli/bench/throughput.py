"""`shoal bench throughput`: tokens per second of the inner loop, with and without the swarm."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Final

from shoal.cli.options import Strategy
from shoal.cli.render import ShowNow
from shoal.lab.case import Case, CaseOptions
from shoal.node.options import Option
from shoal.protocol.errors import ConfigError

if TYPE_CHECKING:
    from shoal.lab.bench.throughput_spec import Shape, Throughput


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputOptions(CaseOptions):
    """What the user asked `shoal bench throughput` for."""

    parameters: Annotated[
        str, Option("--parameters", help="How large a model: 1M, 10M, 30M, 100M, 125M, 200M or 350M.", metavar="SIZE")
    ] = "10M"
    width: Annotated[int | None, Option("--width", help="Its width, in place of the size's.")] = None
    layers: Annotated[int | None, Option("--layers", help="Its layers, in place of the size's.")] = None
    context: Annotated[int, Option("--context", help="Tokens of one sequence.")] = 128
    batch: Annotated[int, Option("--batch", help="Sequences of one step.")] = 2
    dtype: Annotated[
        str, Option("--dtype", help="What products are computed in: bf16, float32, or auto: bf16 on CUDA.")
    ] = "auto"
    device: Annotated[
        str, Option("--device", help="Of all nodes; or of each in turn, separated by commas: cuda:0,cuda:1.")
    ] = "auto"
    threads: Annotated[int, Option("--threads", help="CPU threads of each trainer.")] = 1
    nodes: Annotated[int, Option("--nodes", help="How many nodes, each a process of its own.")] = 2
    strategy: Strategy = "streaming"
    codec: Annotated[str | None, Option("--codec", help="How updates travel; by default the strategy's own.")] = None
    inner_steps: Annotated[
        int, Option("--inner-steps", help="H: optimizer steps between two rounds, or two of one fragment.")
    ] = 60
    rounds: Annotated[int, Option("--rounds", help="Measured rounds of each run; some more warm up.")] = 8
    repeat: Annotated[int, Option("--repeat", help="Runs of the swarm, each between two of the loops alone.")] = 3
    seed: Annotated[int, Option("--seed", help="Of the parameters and the data.")] = 1


def _run(options: ThroughputOptions, tell: ShowNow) -> Throughput:
    """Train on random tokens: in the inner loop alone, and in a swarm of real nodes on this machine, in turns.

    Alone there are as many loops side by side as there are nodes, so both share this machine alike. The command ends
    with exit code 1 if nodes came to different states; whether the target is met, it prints.
    """
    from shoal.lab.bench.throughput import bench_throughput
    from shoal.lab.bench.throughput_spec import ThroughputBench

    bench = ThroughputBench(
        shape=_shape(options),
        context=options.context,
        batch=options.batch,
        dtype=options.dtype,
        devices=tuple(options.device.split(",")),
        threads=options.threads,
        nodes=options.nodes,
        strategy=options.strategy,
        codec=options.codec,
        inner_steps=options.inner_steps,
        rounds=options.rounds,
        repeat=options.repeat,
        seed=options.seed,
    )
    return bench_throughput(bench, tell)


def _shape(options: ThroughputOptions) -> Shape:
    from shoal.lab.bench.throughput_spec import SIZES

    size = SIZES.get(options.parameters)
    if size is None:
        raise ConfigError(f"--parameters must be one of {', '.join(SIZES)}; or give --width and --layers")
    return size._replace(
        width=size.width if options.width is None else options.width,
        layers=size.layers if options.layers is None else options.layers,
    )


def to_document(result: Throughput) -> dict[str, object]:
    """Return medians over the runs, and every run in order."""
    from shoal.lab.bench.throughput_spec import step_s

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
        "overhead_target": None if result.target is None else result.target.most,
        "target_met": result.target_met,
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


def to_lines(result: Throughput) -> list[str]:
    """The result for people: medians, and from the least to the most."""
    from shoal.lab.bench.throughput_spec import step_s

    bench, together = result.bench, result.together
    rounds = _spread([seconds for run in together for seconds in run.rounds_s], 2)
    trainers = _spread([run.cpu.trainers for run in together], 2)
    daemons = _spread([run.cpu.daemons for run in together], 2)
    target = "" if result.target is None else f"; target <= {100 * (result.target.most or 0):g} %: "
    target += {None: "", True: "met", False: "missed"}[result.target_met]
    alone_s, step = [step_s(run.loops) for run in result.alone], [step_s(run.nodes) for run in together]
    return [
        f"model      {bench.shape.parameters / 1e6:.1f} M parameters, {bench.dtype} on {result.alone[0].device}, "
        f"{bench.tokens_per_step} tokens a step",
        f"nodes      {bench.nodes} of {bench.threads} threads; {bench.strategy}, H = {bench.inner_steps}, "
        f"{bench.rounds} rounds in each of {bench.repeat} runs",
        f"alone      {_spread([run.tokens_per_s for run in result.alone], 0)} tokens/s, {_spread(alone_s, 4)} s a step",
        f"together   {_spread([run.tokens_per_s for run in together], 0)} tokens/s, {_spread(step, 4)} s a step",
        f"overhead   {_spread([100 * one for one in result.overheads], 1)} %{target}",
        f"work       {_spread([100 * one for one in result.work_overheads], 1)} % fewer tokens a second of processors",
        f"blocked    {_spread([100 * run.blocked for run in together], 2)} % of the trainers' time",
        f"hand-over  {_spread([100 * run.hand_over for run in together], 2)} % of the trainers' time",
        f"rounds     {rounds} s; {sum(run.missed for run in together)} contributions missed theirs",
        f"processors {trainers} by trainers, {daemons} by daemons",
        "all is as it should be" if result.sound else "FAILED     two nodes came to different states",
    ]


def _spread(values: Sequence[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


throughput: Final = Case(
    spec=ThroughputOptions,
    run=_run,
    lines=to_lines,
    document=to_document,
    sound=attrgetter("sound"),
)
