"""`shoal bench train` and `train-table`: options, and results of several runs together."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import typer

from shoal.cli.options import Strategy
from shoal.cli.render import ShowNow
from shoal.lab.bench.train import TrainResult, disturbed_row, load_result, measure, merged
from shoal.lab.bench.train_spec import ALPHA, SECTIONS, TOKENS, TrainBench
from shoal.lab.case import Case, LongCaseOptions, Numbers, Spec, parse_numbers
from shoal.lab.targets import Row
from shoal.node.option import Option, Within, given_options, options_of
from shoal.node.options import check_device
from shoal.protocol.errors import ConfigError
from shoal.protocol.manifest import MANIFEST_LIMIT_BYTES, OptimizerName
from shoal.protocol.manifest_workload import Option as WorkloadOption
from shoal.protocol.toml_text import parse_toml

THREADS_LIMIT: Final = 4096


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
            help="A key of the manifest's [sync], [inner], [round] or [membership], such as sync.outer_lr=0.7. "
            "Repeatable.",
            metavar="SECTION.KEY=VALUE",
        ),
    ] = field(default_factory=list)
    options: Annotated[
        list[str],
        Option("--option", help="An option of the workload text, such as width=64. Repeatable.", metavar="KEY=VALUE"),
    ] = field(default_factory=list)
    text: Annotated[
        Path | None, Option("--text", help="Text to train on. [default: Python's library]", metavar="FOLDER")
    ] = None
    device: Annotated[
        str, Option("--device", help="Where all of them compute, synchronous training too.", check=check_device)
    ] = "auto"
    synchronous: Annotated[
        bool, Option("--synchronous", help="Synchronous training alone: for its rate, or as a --baseline.")
    ] = False
    unrecorded: Annotated[
        bool, Option("--unrecorded", help="Nodes keep no records to recompute: those of a large model fill a disk.")
    ] = False
    in_process: Annotated[
        bool, Option("--in-process", help="Without network and processes: the same values, faster, for tuning.")
    ] = False
    baseline: Annotated[
        Path | None,
        Option("--baseline", help="A train.json whose synchronous curves are taken over.", metavar="FILE"),
    ] = None
    threads: Annotated[
        int | None,
        Option(
            "--threads",
            help="Of synchronous training; nodes have one each. [default: all cores]",
            check=Within(1, THREADS_LIMIT),
        ),
    ] = None
    out: Annotated[
        Path | None,
        Option(
            "--out",
            help="Where train.json goes as it comes, with the testnets' folders. Given again, it is gone on from.",
            metavar="FOLDER",
        ),
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
            text=self.text,
            keys=self._keys,
            device=self.device,
            synchronous=self.synchronous,
            unrecorded=self.unrecorded,
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
        told = {"--strategy", "--nodes", *(option.name for option in given_options(self))}
        told -= {"--baseline", "--out", "--text"}
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
        return measure(
            bench,
            options.seeds or (options.seed,),
            folder,
            in_process=options.in_process,
            baseline=None if options.baseline is None else load_result(options.baseline),
            threads=options.threads,
            command=options.command,
            show=tell,
        )


def to_document(result: TrainResult) -> dict[str, object]:
    """The result under the names of its fields, and the token efficiency's median by name."""
    return {**msgspec.to_builtins(result, enc_hook=str), "token_efficiency": result.efficiency.median}


CASE: Final = Case(spec=TrainOptions, run=run, document=to_document, sound=attrgetter("sound"), options=LongCaseOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainTableOptions(Spec):
    """Options of `shoal bench train-table`."""

    results: Annotated[
        list[Path],
        typer.Argument(help="Files train.json; those of other seeds and nothing else are one row.", metavar="FILE…"),
    ]


def put_together(options: TrainTableOptions, tell: ShowNow) -> list[TrainResult]:
    """Results of several runs together: medians over their seeds, and disturbed ones beside undisturbed ones."""
    return merged([load_result(path) for path in options.results])


def rows_together(results: Sequence[TrainResult]) -> list[Row]:
    """Every row of each result, and each disturbed one beside the same undisturbed."""
    beside = [disturbed_row(result, results) for result in results]
    return [row for result in results for row in result.rows] + [row for row in beside if row is not None]


TABLE: Final = Case(spec=TrainTableOptions, run=put_together, rows=rows_together, in_parts=True)


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
