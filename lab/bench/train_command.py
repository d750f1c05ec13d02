"""`shoal bench train`, and what it found, for people: loss against bytes and against tokens, and a page.

Everything on the page is from the results it is given, with the targets that stand beside them.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import typer

from shoal.cli.options import Strategy
from shoal.cli.render import ShowNow
from shoal.cli.testnet_report import TestnetProgress
from shoal.lab import picture
from shoal.lab.bench.machine import Machine
from shoal.lab.bench.token_efficiency import EVALUATIONS
from shoal.lab.bench.train import AGREEMENT, TrainResult, disturbed_row, load_result, measure, merged, to_json
from shoal.lab.bench.train_spec import (
    ALPHA,
    CHURN_PERIOD_ROUNDS,
    GLOBAL_WINDOWS,
    PRESENCE_PERIOD,
    SECTIONS,
    TOKENS,
    Point,
    TrainBench,
)
from shoal.lab.case import Case, LongCaseOptions, Numbers, PageOptions, Spec, end, parse_numbers
from shoal.lab.page import UNKNOWN, publish, spread, table, verdict
from shoal.node.option import Option, given_options, options_of
from shoal.node.state.store import write_atomically
from shoal.protocol.errors import ConfigError
from shoal.protocol.manifest import MANIFEST_LIMIT_BYTES, OptimizerName
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
* **Settings** are those that `shoal init --strategy S` writes, but for what a row's command says. All nodes together
  read {windows} windows of text a step, however many they are.
* **Tokens** are those that certified rounds count, of all nodes together.
* **Loss** is bits per byte on held-out text, always the same, of the certified anchor and of the synchronous model;
  under `gossip` the mean of the nodes' losses, each of its own weights. It is the mean of the last {evaluations}
  evaluations, one after each round; **ratio** is that ÷ the mean of the synchronous curve at the same tokens.
* **Synchronous data parallel** is computed in one process, exactly: from the same initial parameters, at each step the
  gradients of all members' batches averaged by tokens, one step of the same optimizer under the same schedule. One run
  a seed serves all rows: with rounds of as many steps the windows of each of its steps are those that the row's nodes
  read between them, else others of the same text. It reads all of the text, and nothing disturbs it. Its bytes are
  those of an fp32 all-reduce in a ring or a butterfly at every step: steps · 2 · (n − 1) · 4 bytes · parameters.
* **Synchronous training needs** so many tokens for the row's loss: where its curve, made monotone by isotonic
  regression, comes down to it, on the straight line between two evaluations. **Token efficiency** is that ÷ the mean
  number of tokens at the row's last {evaluations} evaluations; with > the curve ends above the loss.
* **Bytes** are what all nodes together sent, over lanes and control, to their last certificate; of a row without real
  nodes the payloads alone, which no target is held against.
* **Seeds** in one process count beside real nodes' where on a common seed the two losses are within {agreement:.1%}.
* **Ratios** are taken per seed; the table gives the median and, in brackets, the least and the largest.
* **Blocked** is the share of their time in which trainers wait for the swarm. **Speed ratio** is certified tokens per
  second ÷ the sum of what the nodes' inner steps make by themselves.
* **Disturbed rows** are held against the same row undisturbed. *Replaced*: every {churn} rounds that share of the
  nodes, those that are there longest, is killed and replaced. *Part of the time*: that share of the nodes is paused by
  its user in two rounds of three (of all fragments, where there are such). *Skewed*: no two nodes read the same file;
  each package of the library is dealt by shares drawn from a Dirichlet distribution."""


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
                "tokens",
                "synchronous training needs",
                "token efficiency",
                "target",
                "bytes",
                "times fewer",
                "target",
                "blocked",
                "speed ratio",
            ),
            (_row(result, results) for result in results),
        ),
        f"![Loss by bytes]({plots}{LOSS_VS_BYTES}) ![Loss by tokens]({plots}{LOSS_VS_TOKENS})\n",
        "## What ran\n",
        table(
            ("strategy", "settings", "where", "command"),
            ((_name(result), _settings(result), _where(result), _commands(result)) for result in results),
        ),
        *_tried(tried),
        "## How the numbers are defined\n",
        _DEFINITIONS.format(
            churn=CHURN_PERIOD_ROUNDS, windows=GLOBAL_WINDOWS, evaluations=EVALUATIONS, agreement=AGREEMENT
        )
        + "\n",
    ]
    return "\n".join(parts)


def _tried(results: Sequence[TrainResult]) -> list[str]:
    """Section on other settings, and their ratios; nothing without any."""
    if not results:
        return []
    rows = ((_name(result), _settings(result), *_reached(result), _commands(result)) for result in results)
    heads = ("strategy", "settings", "ratio", "token efficiency", "times fewer bytes", "command")
    return ["## What else was tried\n", table(heads, rows)]


def _reached(result: TrainResult) -> tuple[str, ...]:
    return spread(result.loss_ratio, "{:.3f}"), efficiency(result), spread(result.byte_ratio, "{:.0f}")


def efficiency(result: TrainResult) -> str:
    """Token efficiency; where a synchronous curve ends above the loss, with a sign that it is more than that."""
    return ("> " if result.sync_tokens is None else "") + spread(result.efficiency, "{:.1%}")


def needed(result: TrainResult) -> str:
    """Tokens that synchronous training needs for the same loss, or that it never came down to it."""
    return "more than it had" if result.sync_tokens is None else f"{result.sync_tokens / 1e6:.2f} M"


def _row(result: TrainResult, results: Sequence[TrainResult]) -> tuple[str, ...]:
    rows = (disturbed_row(result, results) if result.disturbed else result.efficiency_row, result.byte_row)
    loss, byte = (UNKNOWN if row is None else verdict(row) for row in rows)
    if result.disturbed and rows[0] is not None:
        loss += f": {spread(rows[0].measured, '{:.1%}')} of the undisturbed row's"
    return (
        _name(result) + ("" if result.sound else " (**not sound**)"),
        f"{result.val_loss:.3f}",
        f"{result.sync_val_loss:.3f}",
        spread(result.loss_ratio, "{:.3f}"),
        f"{result.tokens / 1e6:.2f} M",
        needed(result),
        efficiency(result),
        loss,
        f"{result.wire_bytes / 1e6:.1f} MB",
        spread(result.byte_ratio, "{:.0f}"),
        byte,
        "–" if result.blocked_fraction is None else f"{result.blocked_fraction:.1%}",
        "–" if result.rate_ratio is None else f"{result.rate_ratio:.2f}",
    )


def _name(result: TrainResult) -> str:
    settings = result.settings
    name = f"{result.strategy}, {settings.codec}, {result.nodes} nodes, H = {settings.inner_steps}"
    if settings.churn:
        name += f", {settings.churn:.0%} replaced every {CHURN_PERIOD_ROUNDS} rounds"
    if settings.slow > 1:
        name += f", one node {settings.slow:g} times slower"
    if settings.part_time:
        name += f", {settings.part_time:.0%} there in one round of {PRESENCE_PERIOD}"
    if settings.skew is not None:
        name += f", skewed data, α = {settings.skew:g}"
    return name


def _settings(result: TrainResult) -> str:
    settings = result.settings
    model = ", ".join(f"{key} {value}" for key, value in sorted(settings.options.items())) or "the default model"
    known = ("lr", "warmup_tokens", "schedule", "decay_tokens", "min_lr")
    inner = ", ".join(f"{key} {settings.inner[key]}" for key in known if settings.inner.get(key))
    left_out = ("inner_steps", "strategy", "codec")
    sync = ", ".join(f"{key} {value}" for key, value in sorted(settings.sync.items()) if key not in left_out)
    rounds = " and ".join(sorted({str(run.sync_round_steps) for run in result.seeds}))
    return f"{result.tokens:,} tokens; {model}; {inner}; {sync}; synchronous training in rounds of {rounds} steps"


def _where(result: TrainResult) -> str:
    """Which seeds real nodes ran and which one process, whether these count, and on what machines."""
    parts = []
    for how, in_process in (("real nodes", False), ("one process", True)):
        seeds = [str(run.seed) for run in result.seeds if run.in_process == in_process]
        if seeds:
            parts.append(f"{how}: seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}")
    if len(parts) > 1:
        agreement = result.agreement
        apart = "no seed was run in both" if agreement is None else f"the losses are within {agreement:.2%}"
        uncounted = agreement is None or agreement > AGREEMENT
        parts.append(f"{apart}{', **so that only real nodes count**' if uncounted else ''}")
    return "; ".join((*parts, *dict.fromkeys(map(_machine, result.machines))))


def _commands(result: TrainResult) -> str:
    return ", ".join(f"`{command}`" for command in result.commands) or UNKNOWN


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
        TOKENS
    )
    codec: Annotated[str | None, Option("--codec", help="How values travel. [default: the strategy's own]")] = None
    churn: Annotated[
        float, Option("--churn", help="Share of the nodes that is killed, and replaced, every 5 rounds.")
    ] = 0.0
    slow: Annotated[float, Option("--slow", help="How many times slower one of the nodes is.")] = 1.0
    part_time: Annotated[
        float, Option("--part-time", help="Share of the nodes that is there in every third round only.")
    ] = 0.0
    data: Annotated[
        Literal["even", "skewed"],
        Option("--data", help="Whether all nodes read all of the text, or each its own part of it."),
    ] = "even"
    alpha: Annotated[
        float | None,
        Option(
            "--alpha", help=f"With --data skewed: of the Dirichlet distribution; less is less even. [default: {ALPHA}]"
        ),
    ] = None
    optimizer: Annotated[
        OptimizerName | None,
        Option("--optimizer", help="Of each node's own steps. [default: what `shoal init` writes]"),
    ] = None
    seed: Annotated[int, Option("--seed", help="Of the parameters and the data.")] = 1
    seeds: Annotated[
        Numbers | None,
        Option("--seeds", help="Several seeds, like 1,2,3: medians are given.", metavar="S,S…", parse=parse_numbers),
    ] = None
    inner_steps: Annotated[
        int | None,
        Option("--inner-steps", help="H: optimizer steps between two rounds. [default: what `shoal init` writes]"),
    ] = None
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
            part_time=self.part_time,
            skew=self._skew,
            options=dict(_pair(text, "--option") for text in self.options),
            keys=self._keys,
        )

    @property
    def _keys(self) -> dict[str, dict[str, WorkloadOption]]:
        keys = _by_section(self.settings)
        if self.optimizer is None:
            return keys
        if "optimizer" in keys["inner"]:
            raise ConfigError("--optimizer and --set inner.optimizer say the same; leave one of them out")
        return {**keys, "inner": {**keys["inner"], "optimizer": self.optimizer}}

    @property
    def _skew(self) -> float | None:
        if self.data == "even":
            if self.alpha is not None:
                raise ConfigError("--alpha has a meaning with --data skewed only; leave it out")
            return None
        return ALPHA if self.alpha is None else self.alpha

    @property
    def command(self) -> str:
        """The command line that says the same, but for where files lie."""
        words = ["shoal", "bench", "train"]
        told = {"--strategy", "--nodes", *(option.name for option in given_options(self))} - {"--baseline", "--out"}
        for name, option in options_of(TrainOptions).items():
            value = getattr(self, name)
            if option.name in told and value is True:
                words.append(option.name)
            elif option.name in told:
                for one in value if isinstance(value, list) else (value,):
                    words += [option.name, str(one)]
        return shlex.join(words)


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
        result = msgspec.structs.replace(result, commands=(options.command,))
        if options.out is not None:
            write_atomically(folder / RESULT, to_json(result))
            draw([result], folder)
    return result


CASE: Final = Case(spec=TrainOptions, run=run, sound=attrgetter("sound"), options=LongCaseOptions)


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
    beside = [disturbed_row(result, results) for result in results]
    end(options.check, [row for result in results for row in result.rows] + [row for row in beside if row is not None])


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
