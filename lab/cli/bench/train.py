"""`shoal bench train`: a strategy beside synchronous data parallel; `shoal bench train-table`: results as a page."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from shoal.cli.options import Strategy, parse_seeds
from shoal.cli.render import ShowNow
from shoal.cli.text import number, quantity
from shoal.lab.case import Case, LongCaseOptions, PageOptions, end
from shoal.node.options import Option
from shoal.protocol.errors import ConfigError

if TYPE_CHECKING:
    from shoal.lab.bench.train import TrainResult
    from shoal.protocol.manifest_workload import Option as WorkloadOption

RESULT = "train.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions(LongCaseOptions):
    """What the user asked `shoal bench train` for, as written."""

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
        str | None, Option("--seeds", help="Several seeds, like 1,2,3: medians are given.", metavar="S,S…")
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


def _run(options: TrainOptions, tell: ShowNow) -> TrainResult:
    """Train with a strategy on real nodes, beside synchronous data parallel on the same tokens; exits 1 if unsound."""
    from shoal.cli.testnet_report import TestnetProgress
    from shoal.lab.bench.train import load_result, measure, to_json
    from shoal.lab.bench.train_page import draw
    from shoal.lab.bench.train_spec import TrainBench
    from shoal.node.state.store import write_atomically

    bench = TrainBench(
        strategy=options.strategy,
        nodes=options.nodes,
        tokens=options.tokens,
        codec=options.codec,
        inner_steps=options.inner_steps,
        churn=options.churn,
        slow=options.slow,
        options=dict(_pair(text, "--option") for text in options.options),
        keys=_by_section(options.settings),
    )
    with ExitStack() as stack:
        folder = options.out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-train-")))
        folder.mkdir(parents=True, exist_ok=True)
        result = measure(
            bench,
            parse_seeds(options.seeds, options.seed),
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
    """What was measured, a fact a line."""
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


train: Final = Case(spec=TrainOptions, run=_run, lines=summary, sound=attrgetter("sound"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainTableOptions(PageOptions):
    """What the user asked `shoal bench train-table` for."""

    results: Annotated[
        list[Path],
        typer.Argument(help="Files train.json; those of other seeds and nothing else are one row.", metavar="FILE…"),
    ]
    tried: Annotated[
        list[Path],
        Option("--tried", help="A train.json of other settings, to be listed below. Repeatable.", metavar="FILE"),
    ] = field(default_factory=list)
    title: Annotated[str | None, Option("--title", help="The page's heading, if not the usual one.")] = None


def train_table(options: TrainTableOptions) -> None:
    """Write the page of training results, and plots of all of them together."""
    from shoal.lab.bench.train import load_result, merged
    from shoal.lab.bench.train_page import TITLE, draw, render
    from shoal.lab.page import publish

    results = merged([load_result(path) for path in options.results])
    plots = "" if options.out is None else f"{options.out.stem}_"
    tried = merged([load_result(path) for path in options.tried])
    publish(render(results, tried, title=options.title or TITLE, plots=plots), options.out)
    if options.out is not None:
        draw(results, options.out.parent, plots)
    end(options, [row for result in results for row in result.rows])


def _by_section(texts: Iterable[str]) -> dict[str, dict[str, WorkloadOption]]:
    """The manifest's keys in `--set`, by section. Raises ConfigError."""
    from shoal.lab.bench.train_spec import SECTIONS

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
    from shoal.protocol.manifest import MANIFEST_LIMIT_BYTES
    from shoal.protocol.toml_text import parse_toml

    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{name}: {text!r} must be KEY=VALUE")
    try:
        read: WorkloadOption = parse_toml(f"value = {value}", source=name, limit_bytes=MANIFEST_LIMIT_BYTES)["value"]
    except ConfigError:
        return key, value
    return key, read
