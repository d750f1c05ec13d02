"""Parts of the reports' pages: one style, tables, a curve, and a timeline with a row per node.

Every page is one file that asks nobody for anything. Drawings are inline SVG that takes its colours from the page, so
that light and dark come for free. All text that is handed in is text: it is escaped here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

WIDTH = 860
CURVE_HEIGHT = 240
ROW_HEIGHT = 34
LOW_ROW_HEIGHT = 14
TALL_ROWS = 24
"""So many rows are drawn in full height; of more, each is low."""
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 14, 28
DOTS_SHOWN = 60
TICKS = 5

STYLE = """
:root { color-scheme: light dark; --ink:#1c2430; --soft:#67717e; --paper:#fbfaf7; --card:#ffffff; --line:#dcdfe3;
  --a:#1f6f8b; --b:#8fc1d0; --fault:#c8553d; --good:#2b7a4b; }
@media (prefers-color-scheme: dark) { :root { --ink:#e6e9ee; --soft:#98a2af; --paper:#14181d; --card:#1b2027;
  --line:#333b45; --a:#6cc0da; --b:#2d5a69; --fault:#ee8a70; --good:#6cc793; } }
* { box-sizing: border-box }
body { margin:0 auto; padding:2rem 1rem 4rem; max-width:920px; background:var(--paper); color:var(--ink);
  font:15px/1.5 system-ui,sans-serif }
h1 { font-size:1.5rem; margin:0 0 .2rem } h2 { font-size:1.05rem; margin:2rem 0 .5rem }
p.verdict { margin:.2rem 0 1rem; color:var(--soft) } .good { color:var(--good); font-weight:600 }
p.note { color:var(--soft); font-size:.9em } .bad { color:var(--fault); font-weight:600 }
figure { margin:0; background:var(--card); border:1px solid var(--line); border-radius:8px; overflow-x:auto }
svg { display:block; min-width:640px; width:100%; height:auto }
svg text { fill:var(--soft); font:11px system-ui,sans-serif } svg text.low { font-size:9px }
.scroll { overflow-x:auto } table { border-collapse:collapse; width:100%; font-variant-numeric:tabular-nums }
th,td { text-align:right; padding:.3rem .6rem; border-bottom:1px solid var(--line) }
th:first-child,td:first-child { text-align:left } th { color:var(--soft); font-weight:500 }
code { font-size:.85em; overflow-wrap:anywhere }
.axis { stroke:var(--line) } .curve { fill:none; stroke:var(--a); stroke-width:2 } .dot { fill:var(--a) }
.life { fill:var(--line) } .even { fill:var(--a) } .odd { fill:var(--b) } .open { fill-opacity:.35 }
.trouble { fill:var(--fault) } .fault { stroke:var(--fault); stroke-width:2 } text.mark { fill:var(--fault) }
"""

Tint = Literal["even", "odd", "trouble"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A stretch of time in a row, in seconds since the timeline begins. open: pale, as what came to no end."""

    start_s: float
    end_s: float
    tint: Tint
    tip: str
    open: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A moment in a row. text: none for a line alone, whose meaning `tip` tells."""

    at_s: float
    text: str = ""
    tip: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One node of a timeline. lives: (start, end) of its processes, in seconds."""

    label: str
    lives: Sequence[tuple[float, float]] = ()
    tiles: Sequence[Tile] = ()
    marks: Sequence[Mark] = ()


def document(title: str, sections: Sequence[str]) -> str:
    """The whole page; `sections` are HTML."""
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
    )
    body = "\n".join((f"<h1>{escape(title)}</h1>", *sections))
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def figure(drawing: str) -> str:
    """A drawing in its frame."""
    return f"<figure>{drawing}</figure>"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def loss_curve(
    points: Sequence[tuple[int, float]], *, rounds: int, metric: str, marks: Sequence[tuple[int, str]] = ()
) -> str:
    """The curve of (round, loss), from round 0 to `rounds`, with `marks` (round, text) standing across it."""
    if not points:
        return '<p style="padding:1rem">Nobody evaluated.</p>'
    values = [value for _, value in points]
    low, high = min(values), max(values)
    spread, rounds = (high - low) or 1.0, max(rounds, 1)

    def at(number: float, value: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * number / rounds
        return x, TOP + (CURVE_HEIGHT - TOP - BOTTOM) * (high - value) / spread

    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in points))
    parts = [f'<polyline class="curve" points="{path}"/>']
    for number, value in points if len(points) <= DOTS_SHOWN else ():
        x, y = at(number, value)
        tip = f"round {number}: {value:.4f} {metric}"
        parts.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3.5"><title>{escape(tip)}</title></circle>')
    for value in sorted({low, high}):
        y = at(0, value)[1]
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.3f}</text>')
    for number in range(0, rounds + 1, max(1, rounds // 10)):
        x = at(number, low)[0]
        parts.append(f'<text x="{x:.1f}" y="{CURVE_HEIGHT - 8}" text-anchor="middle">{number}</text>')
    parts += [_curve_mark(text, at(number, low)[0]) for number, text in marks]
    label = escape(f"Held-out loss by round, in {metric or 'units of the workload'}")
    return f'<svg viewBox="0 0 {WIDTH} {CURVE_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _curve_mark(text: str, x: float) -> str:
    ends = f'y1="{TOP}" y2="{CURVE_HEIGHT - BOTTOM}"'
    return (
        f'<line class="fault" stroke-dasharray="2 4" x1="{x:.1f}" x2="{x:.1f}" {ends}/>'
        f'<text class="mark" x="{x - 4:.1f}" y="{TOP + 10}" text-anchor="end">{escape(text)}</text>'
    )


def timeline(rows: Sequence[Row], wall_s: float) -> str:
    """A row per node over `wall_s` seconds."""
    row_height = ROW_HEIGHT if len(rows) <= TALL_ROWS else LOW_ROW_HEIGHT
    height = TOP + row_height * len(rows) + BOTTOM
    scale = (WIDTH - LEFT - RIGHT) / max(wall_s, 0.001)
    parts = [_row(row, TOP + row_height * number, row_height, scale) for number, row in enumerate(rows)]
    for tick in range(TICKS + 1):
        second = wall_s * tick / TICKS
        x = LEFT + second * scale
        parts.append(f'<text x="{x:.1f}" y="{height - 8}" text-anchor="middle">{duration(second, wall_s)}</text>')
    label = "Rounds and faults of each node over time"
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def duration(seconds: float, whole_s: float) -> str:
    """`12 s`, `12.5 min` or `3.5 h`, in the unit that suits a whole of `whole_s` seconds."""
    if whole_s < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if whole_s < 36_000 else f"{seconds / 3600:.1f} h"


def _row(row: Row, top: float, height: int, scale: float) -> str:
    low = height < ROW_HEIGHT
    kind, corner = (' class="low"', "") if low else ("", ' rx="3"')
    parts = [f'<text{kind} x="{LEFT - 8}" y="{top + height / 2 + 3:.1f}" text-anchor="end">{escape(row.label)}</text>']
    for start, end in row.lives:
        parts.append(
            f'<rect class="life" x="{LEFT + start * scale:.1f}" y="{top + height * 0.4:.1f}" '
            f'width="{max((end - start) * scale, 1):.1f}" height="{2 if low else 4}"/>'
        )
    for tile in row.tiles:
        width = max((tile.end_s - tile.start_s) * scale - (0 if low else 1), 1)
        parts.append(
            f'<rect class="{tile.tint}{" open" if tile.open else ""}" x="{LEFT + tile.start_s * scale:.1f}" '
            f'y="{top + (1 if low else 5)}" width="{width:.1f}" height="{height - (2 if low else 12)}"{corner}>'
            f"<title>{escape(tile.tip)}</title></rect>"
        )
    for mark in row.marks:
        x = LEFT + mark.at_s * scale
        tip = f"<title>{escape(mark.tip)}</title>" if mark.tip else ""
        parts.append(
            f'<line class="fault" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + height - 2}">{tip}</line>'
            + (f'<text class="mark" x="{x + 4:.1f}" y="{top + 9}">{escape(mark.text)}</text>' if mark.text else "")
        )
    return "".join(parts)
