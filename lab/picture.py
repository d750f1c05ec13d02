"""Curves of several runs in one picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line of a picture. across, up: as many numbers each. style, marker: as matplotlib names them."""

    name: str
    across: Sequence[float]
    up: Sequence[float]
    colour: str | None = None
    style: str = "-"
    marker: str | None = None


def draw(path: Path, curves: Iterable[Curve], *, across: str, up: str, title: str = "", log: bool = False) -> None:
    """Write a PNG with these curves. across, up: what the axes say; title: the legend's; log: of the axis across."""
    figure = Figure(figsize=(7, 4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for one in curves:
        axes.plot(one.across, one.up, label=one.name, color=one.colour, linestyle=one.style, marker=one.marker)
    if log:
        axes.set_xscale("log")
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(alpha=0.25)
    axes.legend(title=title or None, fontsize=8)
    figure.savefig(path, format="png")
