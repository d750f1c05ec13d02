"""What `shoal bench train` found, for people: loss against bytes and against tokens, and a page.

Everything on the page is from the results it is given, with the targets that stand beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from shoal.lab import picture
from shoal.lab.bench.machine import Machine
from shoal.lab.bench.train import TrainResult
from shoal.lab.bench.train_spec import CHURN_PERIOD_ROUNDS, Point
from shoal.lab.page import UNKNOWN, spread, table, verdict

LOSS_VS_BYTES: Final = "loss_vs_bytes.png"
LOSS_VS_TOKENS: Final = "loss_vs_tokens.png"
"""Where results are; beside a page each begins with the page's name."""
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
    """Other settings, and their ratios; nothing without any."""
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
