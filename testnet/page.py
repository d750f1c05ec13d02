"""`report.html`: the report for people, in one file that asks nobody for anything.

Two drawings, both inline SVG that takes its colours from the page, so that light and dark come for free: the loss
curve, and a timeline with a row per node, a bar per process, a tile per round and a mark per fault.
"""

from __future__ import annotations

from html import escape
from itertools import chain

from shoal.testnet.plot import loss_points
from shoal.testnet.report import FaultReport, NodeReport, Report, digests_word, ok
from shoal.testnet.scenario import whom

WIDTH = 860
LOSS_HEIGHT = 240
ROW_HEIGHT = 34
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 14, 28

_STYLE = """
:root { color-scheme: light dark; --ink:#1c2430; --soft:#67717e; --paper:#fbfaf7; --card:#ffffff; --line:#dcdfe3;
  --a:#1f6f8b; --b:#8fc1d0; --fault:#c8553d; --good:#2b7a4b; }
@media (prefers-color-scheme: dark) { :root { --ink:#e6e9ee; --soft:#98a2af; --paper:#14181d; --card:#1b2027;
  --line:#333b45; --a:#6cc0da; --b:#2d5a69; --fault:#ee8a70; --good:#6cc793; } }
* { box-sizing: border-box }
body { margin:0 auto; padding:2rem 1rem 4rem; max-width:920px; background:var(--paper); color:var(--ink);
  font:15px/1.5 system-ui,sans-serif }
h1 { font-size:1.5rem; margin:0 0 .2rem } h2 { font-size:1.05rem; margin:2rem 0 .5rem }
p.verdict { margin:.2rem 0 1rem; color:var(--soft) } .good { color:var(--good); font-weight:600 }
.bad { color:var(--fault); font-weight:600 }
figure { margin:0; background:var(--card); border:1px solid var(--line); border-radius:8px; overflow-x:auto }
svg { display:block; min-width:640px; width:100%; height:auto }
svg text { fill:var(--soft); font:11px system-ui,sans-serif }
.scroll { overflow-x:auto } table { border-collapse:collapse; width:100%; font-variant-numeric:tabular-nums }
th,td { text-align:right; padding:.3rem .6rem; border-bottom:1px solid var(--line) }
th:first-child,td:first-child { text-align:left } th { color:var(--soft); font-weight:500 }
code { font-size:.85em; overflow-wrap:anywhere }
.axis { stroke:var(--line) } .curve { fill:none; stroke:var(--a); stroke-width:2 } .dot { fill:var(--a) }
.life { fill:var(--line) } .even { fill:var(--a) } .odd { fill:var(--b) } .open { fill-opacity:.35 }
.fault { stroke:var(--fault); stroke-width:2 } text.mark { fill:var(--fault) }
"""


def render_page(report: Report) -> str:
    """The whole page."""
    title = f"Testnet: {report.scenario.nodes} nodes, {report.scenario.rounds} rounds"
    sections = [
        f"<h1>{escape(title)}</h1>",
        _verdict(report),
        "<h2>Loss</h2>",
        f"<figure>{_loss_curve(report)}</figure>",
        "<h2>Timeline</h2>",
        f"<figure>{_timeline(report)}</figure>",
        "<h2>Rounds</h2>",
        _rounds_table(report),
        "<h2>Faults</h2>",
        _faults_table(report),
        "<h2>Nodes</h2>",
        _nodes_table(report),
        _bytes_line(report),
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style>"
    )
    body = "\n".join(sections)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _verdict(report: Report) -> str:
    good = ok(report)
    word = '<span class="good">Exact.</span>' if good else '<span class="bad">Not as it should be.</span>'
    facts = (
        f"{report.rounds_certified} of {report.scenario.rounds} rounds certified, {report.forks} forks, "
        f"{report.wrong_values} wrong values, digests {digests_word(report, 'not equal')}, "
        f"{report.wall_s:.1f} s."
    )
    notes = [*report.unverified, *([report.trouble] if report.trouble else [])]
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<p class="verdict">{word} {escape(facts)}</p>' + (f"<ul>{items}</ul>" if items else "")


def _loss_curve(report: Report) -> str:
    points = loss_points(report.loss)
    if not points:
        return '<p style="padding:1rem">Nobody evaluated.</p>'
    values = [value for _, value in points]
    low, high = min(values), max(values)
    spread = (high - low) or 1.0
    rounds = max(report.scenario.rounds, 1)

    def at(number: float, value: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * number / rounds
        return x, TOP + (LOSS_HEIGHT - TOP - BOTTOM) * (high - value) / spread

    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in points))
    parts = [f'<polyline class="curve" points="{path}"/>']
    for number, value in points:
        x, y = at(number, value)
        tip = f"round {number}: {value:.4f} {report.loss.metric}"
        parts.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3.5"><title>{escape(tip)}</title></circle>')
    for value in {low, high}:
        y = at(0, value)[1]
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.3f}</text>')
    for number in range(0, rounds + 1, max(1, rounds // 10)):
        x = at(number, low)[0]
        parts.append(f'<text x="{x:.1f}" y="{LOSS_HEIGHT - 8}" text-anchor="middle">{number}</text>')
    parts += [_loss_fault(fault, at(fault.round, low)[0]) for fault in report.faults]
    label = escape(f"Held-out loss by round, in {report.loss.metric or 'units of the workload'}")
    return f'<svg viewBox="0 0 {WIDTH} {LOSS_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _loss_fault(fault: FaultReport, x: float) -> str:
    bottom = LOSS_HEIGHT - BOTTOM
    label = f"{fault.kind} {whom(fault.node, fault.groups)}".rstrip()
    return (
        f'<line class="fault" stroke-dasharray="2 4" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>'
        f'<text class="mark" x="{x - 4:.1f}" y="{TOP + 10}" text-anchor="end">{label}</text>'
    )


def _timeline(report: Report) -> str:
    height = TOP + ROW_HEIGHT * len(report.nodes) + BOTTOM
    scale = (WIDTH - LEFT - RIGHT) / max(report.wall_s, 0.001)
    parts = []
    for row, node in enumerate(report.nodes):
        parts.append(_timeline_row(node, TOP + ROW_HEIGHT * row, scale))
        parts += [
            _timeline_fault(fault, TOP + ROW_HEIGHT * row, scale)
            for fault in report.faults
            if node.index in (fault.node, *chain(*fault.groups)) and fault.at_s is not None
        ]
    for tick in range(6):
        second = report.wall_s * tick / 5
        x = LEFT + second * scale
        parts.append(f'<text x="{x:.1f}" y="{height - 8}" text-anchor="middle">{second:.0f} s</text>')
    label = "Rounds and faults of each node over time"
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _timeline_row(node: NodeReport, top: float, scale: float) -> str:
    parts = [f'<text x="{LEFT - 8}" y="{top + 20}" text-anchor="end">node {node.index}</text>']
    last_end = max((end for _, end in node.lives), default=0.0)
    for start, end in node.lives:
        width = max((end - start) * scale, 1)
        parts.append(
            f'<rect class="life" x="{LEFT + start * scale:.1f}" y="{top + 14}" width="{width:.1f}" height="4"/>'
        )
    for span in node.spans:
        end = span.end_s if span.end_s is not None else max(last_end, span.start_s)
        tint = ("even" if span.round % 2 == 0 else "odd") + (" open" if span.end_s is None else "")
        state = "not certified here" if span.end_s is None else f"certified after {end - span.start_s:.2f} s"
        width = max((end - span.start_s) * scale - 1, 1)
        parts.append(
            f'<rect class="{tint}" x="{LEFT + span.start_s * scale:.1f}" y="{top + 5}" width="{width:.1f}" '
            f'height="22" rx="3"><title>round {span.round}: {state}</title></rect>'
        )
    return "".join(parts)


def _timeline_fault(fault: FaultReport, top: float, scale: float) -> str:
    x = LEFT + (fault.at_s or 0.0) * scale
    return (
        f'<line class="fault" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + ROW_HEIGHT - 2}"/>'
        f'<text class="mark" x="{x + 4:.1f}" y="{top + 9}">{fault.kind}</text>'
    )


def _table(heads: list[str], rows: list[list[str]]) -> str:
    """`heads` and cells are text; they are escaped here."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def _rounds_table(report: Report) -> str:
    losses = report.loss.by_round
    rows = []
    for entry in report.rounds:
        loss = losses[entry.round - 1] if entry.round <= len(losses) else None
        rows.append(
            [
                str(entry.round),
                str(entry.members),
                str(entry.contributors),
                f"{entry.coverage:.3f}",
                f"{entry.tokens:,}",
                f"{entry.reduce_s:.3f}",
                f"{entry.total_s:.2f}",
                "–" if loss is None else f"{loss:.4f}",
            ]
        )
    heads = [
        "round",
        "members",
        "contributors",
        "coverage",
        "tokens",
        "reduce s",
        "total s",
        report.loss.metric or "loss",
    ]
    return _table(heads, rows)


def _faults_table(report: Report) -> str:
    if not report.faults:
        return "<p>None.</p>"
    rows = [
        [
            fault.kind,
            whom(fault.node, fault.groups),
            str(fault.round),
            fault.phase or "start",
            "–" if fault.at_s is None else f"{fault.at_s:.2f}",
            "–" if fault.delay_s is None else f"{fault.delay_s:+.2f}",
            fault.error or "",
        ]
        for fault in report.faults
    ]
    return _table(["fault", "node", "round", "phase", "at s", "delay s", ""], rows)


def _nodes_table(report: Report) -> str:
    rows = []
    for node in report.nodes:
        last = max(node.digests, key=int, default=None)
        digest, round = ("–", "–") if last is None else (f"{node.digests[last][:16]}…", str(last))
        peer = f"{node.peer_id[:12]}…{node.peer_id[-6:]}"
        rows.append([str(node.index), node.outcome, str(node.rounds), peer, digest, round])
    return _table(["node", "outcome", "rounds", "PeerId", "last digest", "after round"], rows)


def _bytes_line(report: Report) -> str:
    sent = report.bytes.lanes_sent + report.bytes.control_sent
    line = f"Sent: {report.bytes.lanes_sent:,} bytes on lanes, {report.bytes.control_sent:,} on control."
    if sent and report.bytes.fp32_allreduce_every_step:
        share = report.bytes.fp32_allreduce_every_step / sent
        line += f" An fp32 all-reduce at every step would have sent {share:,.0f} times as much."
    return f"<p>{escape(line)}</p>"
