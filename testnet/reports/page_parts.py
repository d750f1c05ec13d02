"""Parts of the reports' pages: one style, tables, a curve, and a timeline with a row per node.

Every page is one file that asks nobody for anything. Drawings are inline SVG that takes its colours from the page, so
that light and dark come for free. All text that is handed in is text: it is escaped here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from shoal.protocol.names import printable

WIDTH = 860
CURVE_HEIGHT = 250
ROW_HEIGHT = 34
LOW_ROW_HEIGHT = 14
TALL_ROWS = 24
"""So many rows are drawn in full height; of more, each is low."""
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 18, 34
DOTS_SHOWN = 60
TICKS = 5
COLOURS = 6
"""Of lines; of more, the first comes again."""
LOG_RATIO = 5.0
"""From so much between the smallest value and the largest on, a linear scale shows the early values alone."""
ROWS_SHOWN = 20
NUMBER = re.compile(r"[-+]?[\d.,]+%?|[–-]?|unknown")
"""Cell of a column of numbers; some may not be known."""

STYLE = """
:root { color-scheme: light dark; --ink:#1c2430; --soft:#67717e; --paper:#fbfaf7; --card:#ffffff; --line:#dcdfe3;
  --a:#1f6f8b; --b:#8fc1d0; --fault:#c8553d; --good:#2b7a4b; --c:#a8690f; --d:#6a4fb0; --e:#2b7a4b; --f:#a8457b; }
@media (prefers-color-scheme: dark) { :root { --ink:#e6e9ee; --soft:#98a2af; --paper:#14181d; --card:#1b2027;
  --line:#333b45; --a:#6cc0da; --b:#2d5a69; --fault:#ee8a70; --good:#6cc793; --c:#e0b25c; --d:#b39cf0; --e:#6cc793;
  --f:#e694bf; } }
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
.axis { stroke:var(--line) } .curve { fill:none; stroke-width:2 } .faint { stroke-opacity:.25; stroke-width:1 }
.l0 { stroke:var(--a) } .l1 { stroke:var(--c) } .l2 { stroke:var(--d) } .l3 { stroke:var(--e) } .l4 { stroke:var(--f) }
.l5 { stroke:var(--soft) } .dot { fill:var(--a) } .legend { display:flex; flex-wrap:wrap; gap:.2rem 1.2rem;
  margin:.4rem 0; padding:0; list-style:none; color:var(--soft); font-size:.9em }
.legend svg { display:inline-block; min-width:0;
  width:22px; height:10px; margin-right:.4rem } details { margin:.6rem 0 } summary { cursor:pointer; color:var(--soft) }
td:not(:last-child):not(.said) { white-space:nowrap } th.said { text-align:left }
td.text,th.text { text-align:left }
td.said { text-align:left; white-space:pre-wrap; overflow-wrap:anywhere; font:.85em ui-monospace,monospace }
.life { fill:var(--line) } .even { fill:var(--a) } .odd { fill:var(--b) } .open { fill-opacity:.35 }
.trouble { fill:var(--fault) } .fault { stroke:var(--fault); stroke-width:2 } text.mark { fill:var(--fault) }
.calm { stroke:var(--soft); stroke-width:2; stroke-dasharray:2 2 } text.calm { fill:var(--soft); stroke:none }
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
    """A moment in a row. text: none for a line alone, whose meaning `tip` tells. calm: nothing went wrong."""

    at_s: float
    text: str = ""
    tip: str = ""
    calm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One node of a timeline. lives: (start, end) of its processes, in seconds."""

    label: str
    lives: Sequence[tuple[float, float]] = ()
    tiles: Sequence[Tile] = ()
    marks: Sequence[Mark] = ()


def folded(heads: Sequence[str], rows: Sequence[Sequence[str]], what: str) -> str:
    """A table of which the last ROWS_SHOWN rows are open, and those before behind a fold. what: rows are, in plural."""
    before = rows[:-ROWS_SHOWN]
    if not before:
        return table(heads, rows)
    fold = f"<details><summary>{len(before):,} earlier {escaped(what)}</summary>{table(heads, before)}</details>"
    return fold + table(heads, rows[-ROWS_SHOWN:])


def document(title: str, sections: Sequence[str]) -> str:
    """The whole page; `sections` are HTML."""
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{STYLE}</style>"
    )
    body = "\n".join((f"<h1>{escaped(title)}</h1>", *sections))
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def figure(drawing: str) -> str:
    """A drawing in its frame."""
    return f"<figure>{drawing}</figure>"


def escaped(text: str) -> str:
    """`text` as HTML shows it: no markup, and with signs for what cannot be seen, which could turn a line around."""
    return escape(printable(text))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, said: bool = False) -> str:
    """A table of texts, columns of numbers to the right. said: all but the first cell of a row are texts of a model."""
    are_numbers = [all(map(NUMBER.fullmatch, column)) for column in zip(*rows, strict=True)]
    kinds = ["" if number else ' class="said"' if said and place else ' class="text"'
             for place, number in enumerate(are_numbers or [False] * len(heads))]  # fmt: skip
    head = "".join(f"<th{kind}>{escaped(cell)}</th>" for cell, kind in zip(heads, kinds, strict=True))
    lines = "".join(
        f"<tr>{''.join(f'<td{kind}>{escaped(cell)}</td>' for cell, kind in zip(row, kinds, strict=True))}</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of a chart: points (round, value), ascending. faint: of the colour of the line after it, and thin."""

    label: str
    points: Sequence[tuple[int, float]]
    faint: bool = False


def chart(
    lines: Sequence[Line],
    *,
    what: str,
    unit: str,
    span: tuple[float, float] | None = None,
    rounds: int | None = None,
    marks: Sequence[tuple[int, str]] = (),
) -> str:
    """Lines over rounds, with a legend where there are several, and `marks` (round, text) standing across them.

    what: is measured, in words, and in which unit. span: of the values, else theirs: on a logarithmic scale where the
    largest is LOG_RATIO times the smallest. rounds: the last one on the axis, else the last point's.
    """
    points = [point for line in lines for point in line.points]
    if not points:
        return f"<p>There is no {escaped(what.lower())} in these logs.</p>"
    values = [value for _, value in points]
    low, high = span or (min(values), max(values))
    numbers = [number for number, _ in points]
    first = min(numbers) if rounds is None else 0
    last = max(*numbers, rounds or 0, first + 1)
    log = span is None and low > 0 and high >= LOG_RATIO * low

    def at(number: float, value: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * (number - first) / (last - first)
        share = math.log(value / low) / math.log(high / low) if log else (value - low) / ((high - low) or 1.0)
        return x, CURVE_HEIGHT - BOTTOM - (CURVE_HEIGHT - TOP - BOTTOM) * share

    parts = []
    for value in log_ticks(low, high) if log else linear_ticks(low, high):
        y = at(first, value)[1]
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    for number in linear_ticks(first, last, count=10):
        if number == int(number):
            x = at(number, high)[0]
            parts.append(f'<text x="{x:.1f}" y="{CURVE_HEIGHT - 20}" text-anchor="middle">{int(number)}</text>')
    label = f"{what}, {unit}{', logarithmic scale' if log else ''}"
    parts.append(f'<text x="{LEFT}" y="{TOP - 4}">{escaped(label)}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{CURVE_HEIGHT - 5}" text-anchor="end">round</text>')
    colour = 0
    for line in lines:
        parts += _line(line, colour, at, unit)
        colour += not line.faint
    parts += [_curve_mark(text, at(number, low)[0]) for number, text in marks]
    drawing = (
        f'<svg viewBox="0 0 {WIDTH} {CURVE_HEIGHT}" role="img" aria-label="{escaped(label)} by round">'
        f"{''.join(parts)}</svg>"
    )
    shown = [line.label for line in lines if not line.faint]
    return figure(drawing) + (_legend(shown) if len(shown) > 1 else "")


def _line(line: Line, colour: int, at: Callable[[float, float], tuple[float, float]], unit: str) -> list[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in line.points))
    faint = " faint" if line.faint else ""
    parts = [f'<polyline class="curve l{colour % COLOURS}{faint}" points="{path}"/>']
    if colour == 0 and not line.faint and len(line.points) <= DOTS_SHOWN:
        for number, value in line.points:
            x, y = at(number, value)
            tip = f"round {number}: {value:.4f} {unit}"
            parts.append(
                f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3.5"><title>{escaped(tip)}</title></circle>'
            )
    return parts


def _legend(labels: Sequence[str]) -> str:
    keys = "".join(
        f'<li><svg viewBox="0 0 22 10" aria-hidden="true"><path class="curve l{number % COLOURS}" d="M0 5h22"/></svg>'
        f"{escaped(label)}</li>"
        for number, label in enumerate(labels)
    )
    return f'<ul class="legend">{keys}</ul>'


def linear_ticks(low: float, high: float, *, count: int = TICKS) -> list[float]:
    """Round numbers from `low` to `high`, about so many, 1, 2 or 5 of a decimal place apart."""
    spread = high - low
    if not spread > 0:
        return [low]
    rough = spread / count
    decade = 10.0 ** math.floor(math.log10(rough))
    step = next(step for step in (decade, 2 * decade, 5 * decade, 10 * decade) if step >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Times the powers of ten from `low` to `high`, 1, 2 and 5; within one more of them, over many the powers alone."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 1.5, 2, 3, 5, 7) if len(decades) == 2 else (1, 2, 5) if len(decades) <= TICKS else (1,)
    return [tick for decade in decades for step in steps if low <= (tick := step * 10.0**decade) <= high]


def smoothed(points: Sequence[tuple[int, float]], window: int) -> list[tuple[int, float]]:
    """Each point's value replaced by the mean of the last `window` up to it."""
    total, means = 0.0, []
    for place, (number, value) in enumerate(points):
        total += value - (points[place - window][1] if place >= window else 0.0)
        means.append((number, total / min(place + 1, window)))
    return means


def thinned(points: Sequence[tuple[int, float]], limit: int) -> list[tuple[int, float]]:
    """About so many of the points, evenly chosen; the last one stays."""
    every = -(-len(points) // limit) or 1
    return [*points[::every], *(points[-1:] if (len(points) - 1) % every else ())]


def left_out(count: int, shown: int, what: str, which: str = "") -> str:
    """A note on those that are not shown, if there are any."""
    return f'<p class="note">{count - shown:,} more {what} are not shown.{which}</p>' if count > shown else ""


def _curve_mark(text: str, x: float) -> str:
    ends = f'y1="{TOP}" y2="{CURVE_HEIGHT - BOTTOM}"'
    return (
        f'<line class="fault" stroke-dasharray="2 4" x1="{x:.1f}" x2="{x:.1f}" {ends}/>'
        f'<text class="mark" x="{x - 4:.1f}" y="{TOP + 10}" text-anchor="end">{escaped(text)}</text>'
    )


def timeline(rows: Sequence[Row], wall_s: float) -> str:
    """A row per node over `wall_s` seconds."""
    row_height = ROW_HEIGHT if len(rows) <= TALL_ROWS else LOW_ROW_HEIGHT
    height = TOP + row_height * len(rows) + BOTTOM
    scale = (WIDTH - LEFT - RIGHT) / max(wall_s, 0.001)
    parts = [_row(row, TOP + row_height * number, row_height, scale) for number, row in enumerate(rows)]
    unit_s, _ = _unit_of(wall_s)
    for tick in linear_ticks(0.0, wall_s / unit_s):
        second = tick * unit_s
        x = LEFT + second * scale
        anchor = "end" if x > WIDTH - 2 * RIGHT else "middle"  # or it is cut off
        parts.append(f'<text x="{x:.1f}" y="{height - 8}" text-anchor="{anchor}">{duration(second, wall_s)}</text>')
    label = "Rounds and faults of each node over time"
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def duration(seconds: float, whole_s: float) -> str:
    """`12 s`, `12.5 min` or `3.5 h`, in the unit that suits a whole of `whole_s` seconds."""
    unit_s, name = _unit_of(whole_s)
    return f"{round(seconds / unit_s, 0 if unit_s == 1 else 1):g} {name}"


def _unit_of(whole_s: float) -> tuple[int, str]:
    return (1, "s") if whole_s < 600 else (60, "min") if whole_s < 36_000 else (3600, "h")


def _row(row: Row, top: float, height: int, scale: float) -> str:
    low = height < ROW_HEIGHT
    kind, corner = (' class="low"', "") if low else ("", ' rx="3"')
    parts = [f'<text{kind} x="{LEFT - 8}" y="{top + height / 2 + 3:.1f}" text-anchor="end">{escaped(row.label)}</text>']
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
            f"<title>{escaped(tile.tip)}</title></rect>"
        )
    for mark in row.marks:
        x, line, text = LEFT + mark.at_s * scale, *(("calm", "calm") if mark.calm else ("fault", "mark"))
        tip = f"<title>{escaped(mark.tip)}</title>" if mark.tip else ""
        parts.append(
            f'<line class="{line}" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + height - 2}">{tip}</line>'
            + (f'<text class="{text}" x="{x + 4:.1f}" y="{top + 9}">{escaped(mark.text)}</text>' if mark.text else "")
        )
    return "".join(parts)
