"""What `shoal bench train` found, for people: loss against bytes and against tokens, and a page.

Everything on the page is from the results it is given; the targets are those of the table below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from shoal.lab.bench.machine import Machine
from shoal.lab.bench.train import Spread, TrainResult
from shoal.lab.bench.train_spec import CHURN_PERIOD_ROUNDS, Point

LOSS_VS_BYTES: Final = "loss_vs_bytes.png"
LOSS_VS_TOKENS: Final = "loss_vs_tokens.png"
"""Where results are; beside a page each begins with the page's name."""
TITLE: Final = "Training: strategies beside synchronous data parallel"
METRIC: Final = "bits per byte"
_COLOURS: Final = ("#1f6f8b", "#c8553d", "#588157", "#7b2d8b", "#b08900", "#444444")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a strategy is to reach: the most loss ratio, and the least byte ratio, None for no target."""

    loss_ratio: float
    byte_ratio: float | None


TARGETS: Final = {
    ("diloco", False): Target(loss_ratio=1.02, byte_ratio=100),
    ("diloco", True): Target(loss_ratio=1.03, byte_ratio=None),
    ("streaming", False): Target(loss_ratio=1.02, byte_ratio=200),
    ("sparse", False): Target(loss_ratio=1.03, byte_ratio=1000),
    ("gossip", False): Target(loss_ratio=1.04, byte_ratio=50),
}
"""By strategy and whether nodes are replaced: against synchronous data parallel on the same tokens."""

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
        _table(
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
        _table(
            ("strategy", "settings", "where"),
            ((_name(result), _settings(result), _where(result)) for result in results),
        ),
        *_tried(tried),
        "## How the numbers are defined\n",
        _DEFINITIONS.format(churn=CHURN_PERIOD_ROUNDS) + "\n",
    ]
    return "\n".join(parts)


def _tried(results: Sequence[TrainResult]) -> list[str]:
    """Other settings, and their ratios; nothing without any."""
    if not results:
        return []
    rows = ((_name(result), _settings(result), *_reached(result)) for result in results)
    return ["## What else was tried\n", _table(("strategy", "settings", "ratio", "times fewer bytes"), rows)]


def _reached(result: TrainResult) -> tuple[str, str]:
    return _spread(result.loss_ratio, "{:.3f}"), _spread(result.byte_ratio, "{:.0f}")


def _row(result: TrainResult) -> tuple[str, ...]:
    target = TARGETS.get((result.strategy, result.settings.churn > 0))
    loss = byte = "–"
    if target is not None:
        loss = _verdict(f"≤ {target.loss_ratio:g}", result.loss_ratio.median <= target.loss_ratio)
        if target.byte_ratio is not None:
            byte = _verdict(f"≥ {target.byte_ratio:g}", result.byte_ratio.median >= target.byte_ratio)
    return (
        _name(result) + ("" if result.sound else " (**not sound**)"),
        f"{result.val_loss:.3f}",
        f"{result.sync_val_loss:.3f}",
        _spread(result.loss_ratio, "{:.3f}"),
        loss,
        f"{result.wire_bytes / 1e6:.1f} MB",
        _spread(result.byte_ratio, "{:.0f}"),
        byte,
        "–" if result.blocked_fraction is None else f"{result.blocked_fraction:.1%}",
        "–" if result.rate_ratio is None else f"{result.rate_ratio:.2f}",
    )


def _verdict(limit: str, met: bool) -> str:
    return f"{limit}, {'met' if met else '**missed**'}"


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


def _spread(spread: Spread, form: str) -> str:
    median, least, most = (form.format(value) for value in (spread.median, spread.least, spread.most))
    return median if least == most else f"{median} ({least}–{most})"


def _table(heads: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    heads = list(heads)
    rows = [heads, ["---"] * len(heads), *lines]
    return (
        "\n".join("| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in row) + " |" for row in rows)
        + "\n"
    )


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
    figure = Figure(figsize=(7, 4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    curves = [("synchronous", results[0].seeds[0].sync_curve)]
    curves += [(_name(result), result.seeds[0].curve) for result in results]
    for at, (name, points) in enumerate(curves):
        shown = [point for point in points if across(point) > 0]
        colour = _COLOURS[-1] if not at else _COLOURS[(at - 1) % (len(_COLOURS) - 1)]
        axes.plot(
            [across(point) for point in shown],
            [point.val_loss for point in shown],
            label=name,
            color=colour,
            linestyle="--" if not at else "-",
            marker=".",
        )
    if log:
        axes.set_xscale("log")
    axes.set_xlabel(label)
    axes.set_ylabel(f"held-out loss ({METRIC})")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    figure.savefig(path, format="png")
