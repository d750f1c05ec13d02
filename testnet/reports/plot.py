"""The loss curve as a picture, `loss.png`."""

from __future__ import annotations

import io

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from shoal.testnet.reports.report import LossReport, Report
from shoal.testnet.scenario import whom


def loss_points(loss: LossReport) -> list[tuple[int, float]]:
    """(round, loss) wherever somebody evaluated; round 0 is before the first."""
    values = (loss.first, *loss.by_round)
    return [(number, value) for number, value in enumerate(values) if value is not None]


def draw_loss(report: Report) -> bytes:
    """Draw the loss by round, with the faults' rounds marked, as a PNG."""
    figure = Figure(figsize=(7, 4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    points = loss_points(report.loss)
    axes.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=4, color="#1f6f8b")
    for fault in report.faults:
        axes.axvline(fault.round, color="#c8553d", linewidth=1, linestyle=":")
        label = f"{fault.kind} {whom(fault.node, fault.groups)}".rstrip()
        axes.annotate(
            label, (fault.round, 1), xycoords=("data", "axes fraction"), fontsize=8, ha="right", va="top", rotation=90
        )
    axes.set_xlabel("round")
    axes.set_ylabel(f"held-out loss ({report.loss.metric})" if report.loss.metric else "held-out loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()
