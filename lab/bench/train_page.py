"""`shoal bench train`, and what it found, for people: loss against bytes and against tokens, and a page.

Everything on the page is from the results it is given, with the targets that stand beside them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Final

import typer

from shoal.cli.options import Strategy
from shoal.cli.render import ShowNow
from shoal.cli.testnet_report import TestnetProgress
from shoal.cli.text import number, quantity
from shoal.lab import picture
from shoal.lab.bench.machine import Machine
from shoal.lab.bench.train import TrainResult, load_result, measure, merged, to_json
from shoal.lab.bench.train_spec import CHURN_PERIOD_ROUNDS, SECTIONS, Point, TrainBench
from shoal.lab.case import Case, LongCaseOptions, Numbers, PageOptions, Spec, end, parse_numbers
from shoal.lab.page import UNKNOWN, publish, spread, table, verdict
from shoal.node.option import Option
from shoal.node.state.store import write_atomically
from shoal.protocol.errors import ConfigError
from shoal.protocol.manifest import MANIFEST_LIMIT_BYTES
from shoal.protocol.manifest_workload import Option as WorkloadOption
from shoal.protocol.toml_text import parse_toml

RESULT: Final = "train.json"
LOSS_VS_BYTES: Final = "loss_vs_bytes.png"
LOSS_VS_TOKENS: Final = "loss_vs_tokens.png"
"""Names of the results' files; beside a page each begins with the page's name."""
TITLE: Final = "Training: strategies beside synchronous data parallel"
METRIC: Final = "bits per byte"
_COLOURS: Final = ("#1f6f8b", "#c8553d", "#588157", "#7b2d8b", "#b08900", "#444444")


_DEFINITIONS: Final = """\
* **Tokens** are those that certified rounds count, of all nodes together; both sides get as many (synchronous data
  parallel in whole rounds, so never fewer), in the same batches as long as the same members are there.
* **Loss** is bits per byte on held-out text, always the same, of the certified anchor and of the synchronous model;
  under `gossip` the mean of the nodes' losses, each of its own weights.
* **Synchronous data parallel** is computed in one process, exactly: from the same initial parameters, at each step the
  gradients of all members' batches averaged by tokens, one step of the same AdamW under the same schedule. Its bytes
  are those of an fp32 all-reduce in a ring or a butterfly at every step: steps · 2 · (n − 1) · 4 bytes · parameters.
* **Bytes** are what all nodes together sent, over lanes and control, to their last certificate; of a run in one process
  the payloads alone.
* **Ratios** are taken per seed; the table gives the median and, in brackets, the least and the largest.
* **Blocked** is the share of their time in which trainers wait for the swarm. **Speed ratio** is certified tokens per
  second ÷ the sum of what the nodes' inner steps make by themselves.
* **Churn**: every {churn} rounds that share of the nodes, those that are there longest, is killed and replaced."""


def render(
    results: Sequence[TrainResult], tried: Sequence[TrainResult] = (), *, title: str = TITLE, plots: str = ""
) -> str:
    """The page, a row per result. tried: others, of which the page says what they were and what they led to.

    plots: what the names of the plots begin with.
    """
    parts = [
        f"# {title}\n",
        "Made by `shoal bench train-table` from results of `shoal bench train --out`; no number here was written by "
        "hand.\n",
        table(
            (
                "strategy",
                "loss",
                "synchronous",
                "ratio",
                "target",
                "bytes",
                "times fewer",
                "target",
                "blocked",
                "speed ratio",
            ),
            (_row(result) for result in results),
        ),
        f"![Loss by bytes]({plots}{LOSS_VS_BYTES}) ![Loss by tokens]({plots}{LOSS_VS_TOKENS})\n",
        "## What ran\n",
        table(
            ("strategy", "settings", "where"),
            ((_name(result), _settings(result), _where(result)) for result in results),
        ),
        *_tried(tried),
        "## How the numbers are defined\n",
        _DEFINITIONS.format(churn=CHURN_PERIOD_ROUNDS) + "\n",
    ]
    return "\n".join(parts)


def _tried(results: Sequence[TrainResult]) -> list[str]:
    """Section on other settings, and their ratios; nothing without any."""
    if not results:
        return []
    rows = ((_name(result), _settings(result), *_reached(result)) for result in results)
    return ["## What else was tried\n", table(("strategy", "settings", "ratio", "times fewer bytes"), rows)]


def _reached(result: TrainResult) -> tuple[str, str]:
    return spread(result.loss_ratio, "{:.3f}"), spread(result.byte_ratio, "{:.0f}")


def _row(result: TrainResult) -> tuple[str, ...]:
    loss, byte = (UNKNOWN if row is None else verdict(row) for row in (result.loss_row, result.byte_row))
    return (
        _name(result) + ("" if result.sound else " (**not sound**)"),
        f"{result.val_loss:.3f}",
        f"{result.sync_val_loss:.3f}",
        spread(result.loss_ratio, "{:.3f}"),
        loss,
        f"{result.wire_bytes / 1e6:.1f} MB",
        spread(result.byte_ratio, "{:.0f}"),
        byte,
        "–" if result.blocked_fraction is None else f"{result.blocked_fraction:.1%}",
        "–" if result.rate_ratio is None else f"{result.rate_ratio:.2f}",
    )


def _name(result: TrainResult) -> str:
    settings = result.settings
    name = f"{result.strategy}, {settings.codec}, H = {settings.inner_steps}"
    if settings.churn:
        name += f", {settings.churn:.0%} replaced every {CHURN_PERIOD_ROUNDS} rounds"
    if settings.slow > 1:
        name += f", one node {settings.slow:g} times slower"
    return name


def _settings(result: TrainResult) -> str:
    settings = result.settings
    model = ", ".join(f"{key} {value}" for key, value in sorted(settings.options.items())) or "the default model"
    known = ("lr", "warmup_tokens", "schedule", "decay_tokens", "min_lr")
    inner = ", ".join(f"{key} {settings.inner[key]}" for key in known if settings.inner.get(key))
    left_out = ("inner_steps", "strategy", "codec")
    sync = ", ".join(f"{key} {value}" for key, value in sorted(settings.sync.items()) if key not in left_out)
    seeds = ", ".join(str(run.seed) for run in result.seeds)
    return f"{result.nodes} nodes, {result.tokens:,} tokens; {model}; {inner}; {sync}; seeds {seeds}"


def _where(result: TrainResult) -> str:
    how = "one process" if result.settings.in_process else "real nodes"
    return f"{how}; {_machine(result.machine)}"


def _machine(machine: Machine) -> str:
    return f"{machine.cpu}, {machine.cores} cores, torch {machine.torch}, {machine.date}"


def draw(results: Sequence[TrainResult], folder: Path, plots: str = "") -> None:
    """Write both pictures: each result's curve of its first seed, and that seed's synchronous one.

    plots: what their names begin with.
    """
    by_bytes, by_tokens = folder / f"{plots}{LOSS_VS_BYTES}", folder / f"{plots}{LOSS_VS_TOKENS}"
    _draw(results, by_bytes, lambda point: point.wire_bytes / 1e6, "MB sent by all nodes", log=True)
    _draw(results, by_tokens, lambda point: point.tokens / 1e6, "million tokens", log=False)


def _draw(
    results: Sequence[TrainResult], path: Path, across: Callable[[Point], float], label: str, *, log: bool
) -> None:
    curves = [("synchronous", results[0].seeds[0].sync_curve)]
    curves += [(_name(result), result.seeds[0].curve) for result in results]
    picture.draw(
        path, (_curve(at, *one, across) for at, one in enumerate(curves)),
        across=label, up=f"held-out loss ({METRIC})", log=log,
    )  # fmt: skip


def _curve(at: int, name: str, points: Sequence[Point], across: Callable[[Point], float]) -> picture.Curve:
    """The curve of one run; the first is that of synchronous training."""
    shown = [point for point in points if across(point) > 0]
    return picture.Curve(
        name=name,
        across=[across(point) for point in shown],
        up=[point.val_loss for point in shown],
        colour=_COLOURS[(at - 1) % (len(_COLOURS) - 1)] if at else _COLOURS[-1],
        style="-" if at else "--",
        marker=".",
    )


# -- the commands --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions(Spec):
    """Options of `shoal bench train`, as written."""

    strategy: Strategy = "diloco"
    nodes: Annotated[int, Option("--nodes", help="How many nodes, each a process of its own.")] = 4
    tokens: Annotated[int, Option("--tokens", help="How many tokens are to be certified, of all nodes together.")] = (
        2_000_000
    )
    codec: Annotated[str | None, Option("--codec", help="How values travel. [default: the strategy's own]")] = None
    churn: Annotated[
        float, Option("--churn", help="Share of the nodes that is killed, and replaced, every 5 rounds.")
    ] = 0.0
    slow: Annotated[float, Option("--slow", help="How many times slower one of the nodes is.")] = 1.0
    seed: Annotated[int, Option("--seed", help="Of the parameters and the data.")] = 1
    seeds: Annotated[
        Numbers | None,
        Option("--seeds", help="Several seeds, like 1,2,3: medians are given.", metavar="S,S…", parse=parse_numbers),
    ] = None
    inner_steps: Annotated[int, Option("--inner-steps", help="H: optimizer steps between two rounds.")] = 30
    settings: Annotated[
        list[str],
        Option(
            "--set",
            help="A key of the manifest's [sync], [inner] or [round], such as sync.outer_lr=0.7. Repeatable.",
            metavar="SECTION.KEY=VALUE",
        ),
    ] = field(default_factory=list)
    options: Annotated[
        list[str],
        Option("--option", help="An option of the workload text, such as width=64. Repeatable.", metavar="KEY=VALUE"),
    ] = field(default_factory=list)
    in_process: Annotated[
        bool, Option("--in-process", help="Without network and processes: the same values, faster, for tuning.")
    ] = False
    baseline: Annotated[
        Path | None,
        Option("--baseline", help="A train.json whose synchronous curves are taken over.", metavar="FILE"),
    ] = None
    out: Annotated[
        Path | None,
        Option("--out", help="Where train.json, two plots and the testnets' folders go.", metavar="FOLDER"),
    ] = None

    @property
    def bench(self) -> TrainBench:
        """Benchmark that these options describe. Raises ConfigError."""
        return TrainBench(
            strategy=self.strategy,
            nodes=self.nodes,
            tokens=self.tokens,
            codec=self.codec,
            inner_steps=self.inner_steps,
            churn=self.churn,
            slow=self.slow,
            options=dict(_pair(text, "--option") for text in self.options),
            keys=_by_section(self.settings),
        )


def run(options: TrainOptions, tell: ShowNow) -> TrainResult:
    """Train with a strategy on real nodes, beside synchronous data parallel on the same tokens; exits 1 if unsound."""
    bench = options.bench
    with ExitStack() as stack:
        folder = options.out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-train-")))
        folder.mkdir(parents=True, exist_ok=True)
        result = measure(
            bench,
            options.seeds or (options.seed,),
            folder,
            in_process=options.in_process,
            baseline=None if options.baseline is None else load_result(options.baseline),
            tell=tell,
            on_progress=TestnetProgress(tell, rounds=bench.rounds),
        )
        if options.out is not None:
            write_atomically(folder / RESULT, to_json(result))
            draw([result], folder)
    return result


def summary(result: TrainResult) -> list[str]:
    """Summarise the result, a fact a line."""
    ratio, fewer = result.loss_ratio, result.byte_ratio
    blocked = "not measured" if result.blocked_fraction is None else f"{result.blocked_fraction:.1%} of the time"
    lines = [
        f"loss       {result.val_loss:.4f} bits per byte, synchronous {result.sync_val_loss:.4f}: "
        f"{ratio.median:.4f} times ({ratio.least:.4f} to {ratio.most:.4f} over {len(result.seeds)} seeds)",
        f"tokens     {result.tokens} certified, {result.nodes} nodes, {result.settings.inner_steps} steps a round",
        f"bytes      {quantity(result.wire_bytes, 'B')} sent, synchronous {quantity(result.sync_wire_bytes, 'B')}: "
        f"{fewer.median:.0f} times fewer",
        f"blocked    {blocked}",
    ]
    if result.rate_ratio is not None:
        lines.append(
            f"speed      {number(result.tokens_per_s, 0)} tokens/s, {result.rate_ratio:.2f} of the sum of the nodes'"
        )
    troubles = [f"seed {run.seed}: {run.trouble or 'see its report.json'}" for run in result.seeds if not run.sound]
    return lines + [f"FAILED     {trouble}" for trouble in troubles]


CASE: Final = Case(spec=TrainOptions, run=run, lines=summary, sound=attrgetter("sound"), options=LongCaseOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainTableOptions(PageOptions):
    """Options of `shoal bench train-table`."""

    results: Annotated[
        list[Path],
        typer.Argument(help="Files train.json; those of other seeds and nothing else are one row.", metavar="FILE…"),
    ]
    tried: Annotated[
        list[Path],
        Option("--tried", help="A train.json of other settings, to be listed below. Repeatable.", metavar="FILE"),
    ] = field(default_factory=list)
    title: Annotated[str | None, Option("--title", help="The page's heading, if not the usual one.")] = None


def write_page(options: TrainTableOptions) -> None:
    """Write the page of training results, and plots of all of them together."""
    results = merged([load_result(path) for path in options.results])
    plots = "" if options.out is None else f"{options.out.stem}_"
    tried = merged([load_result(path) for path in options.tried])
    publish(render(results, tried, title=options.title or TITLE, plots=plots), options.out)
    if options.out is not None:
        draw(results, options.out.parent, plots)
    end(options.check, [row for result in results for row in result.rows])


def _by_section(texts: Iterable[str]) -> dict[str, dict[str, WorkloadOption]]:
    """The manifest's keys in `--set`, by section. Raises ConfigError."""
    found: dict[str, dict[str, WorkloadOption]] = {section: {} for section in SECTIONS}
    for text in texts:
        path, value = _pair(text, "--set")
        section, dot, key = path.partition(".")
        if not dot or section not in SECTIONS:
            raise ConfigError(f"--set: {text!r} is not like sync.outer_lr=0.7 or inner.lr=0.001")
        found[section][key] = value
    return found


def _pair(text: str, name: str) -> tuple[str, WorkloadOption]:
    """Key and value of `key=value`, the value read as TOML has it, or else as text."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{name}: {text!r} must be KEY=VALUE")
    try:
        read: WorkloadOption = parse_toml(f"value = {value}", source=name, limit_bytes=MANIFEST_LIMIT_BYTES)["value"]
    except ConfigError:
        return key, value
    return key, read
