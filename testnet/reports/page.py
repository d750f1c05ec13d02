"""`report.html` of a testnet: the report for people, in one file that asks nobody for anything.

Two drawings: the loss curve, and a timeline with a row per node, a bar per process, a tile per round and a mark per
fault.
"""

from __future__ import annotations

from itertools import chain

from shoal.testnet.reports.page_parts import (
    Line,
    Mark,
    Row,
    Tile,
    chart,
    document,
    escaped,
    figure,
    folded,
    table,
    timeline,
)
from shoal.testnet.reports.plot import loss_points
from shoal.testnet.reports.report import FaultReport, NodeReport, Report, digests_word, failures, ok
from shoal.testnet.scenario import whom

CALM = frozenset({"continue", "heal", "join", "leave"})
"""Faults of a scenario by which nothing goes wrong."""


def render_page(report: Report) -> str:
    """The whole page."""
    rows = [_row(node, report.faults) for node in report.nodes]
    marks = [(fault.round, _fault_name(fault)) for fault in report.faults]
    losses = loss_points(report.loss)
    sections = [
        _verdict(report),
        "<h2>Loss</h2>",
        chart(
            [Line(label="held out", points=losses)],
            what="Held-out loss",
            unit=report.loss.metric or "units of the workload",
            rounds=report.scenario.rounds,
            marks=marks,
        ),
        "<h2>Timeline</h2>",
        figure(timeline(rows, report.wall_s)),
        "<h2>Rounds</h2>",
        _rounds_table(report),
        "<h2>Faults</h2>",
        _faults_table(report),
        "<h2>Nodes</h2>",
        _nodes_table(report),
        _bytes_line(report),
    ]
    return document(f"Testnet: {report.scenario.nodes} nodes, {report.scenario.rounds} rounds", sections)


def _verdict(report: Report) -> str:
    good = ok(report)
    word = '<span class="good">Exact.</span>' if good else '<span class="bad">Not as it should be.</span>'
    facts = (
        f"{report.rounds_certified} of {report.wanted_rounds} rounds certified, {report.forks} forks, "
        f"{report.wrong_values} wrong values, digests {digests_word(report, 'not equal')}, "
        f"{report.wall_s:.1f} s."
    )
    items = "".join(f"<li>{escaped(note)}</li>" for note in (*failures(report), *report.unverified))
    return f'<p class="verdict">{word} {escaped(facts)}</p>' + (f"<ul>{items}</ul>" if items else "")


def _fault_name(fault: FaultReport) -> str:
    return f"{fault.kind} {whom(fault.node, fault.groups)}".rstrip()


def _row(node: NodeReport, faults: tuple[FaultReport, ...]) -> Row:
    last_end = max((end for _, end in node.lives), default=0.0)
    tiles = []
    for span in node.spans:
        certified = span.end_s is not None
        end = span.end_s if span.end_s is not None else max(last_end, span.start_s)
        state = f"certified after {end - span.start_s:.2f} s" if certified else "not certified here"
        tiles.append(
            Tile(
                start_s=span.start_s,
                end_s=end,
                tint="even" if span.round % 2 == 0 else "odd",
                tip=f"round {span.round}: {state}",
                open=not certified,
            )
        )
    marks = [
        Mark(at_s=fault.at_s, text=fault.kind, calm=fault.kind in CALM)
        for fault in faults
        if fault.at_s is not None and node.index in (fault.node, *chain(*fault.groups))
    ]
    return Row(label=f"node {node.index}", lives=node.lives, tiles=tiles, marks=marks)


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
    return folded(heads, rows, "rounds")


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
    return table(["fault", "node", "round", "phase", "at s", "delay s", ""], rows)


def _nodes_table(report: Report) -> str:
    rows = []
    for node in report.nodes:
        last = max(node.digests, key=int, default=None)
        digest, round = ("–", "–") if last is None else (f"{node.digests[last][:16]}…", str(last))
        peer = f"{node.peer_id[:12]}…{node.peer_id[-6:]}"
        rows.append([str(node.index), node.outcome, str(node.rounds), peer, digest, round])
    return table(["node", "outcome", "rounds", "PeerId", "last digest", "after round"], rows)


def _bytes_line(report: Report) -> str:
    sent = report.bytes.lanes_sent + report.bytes.control_sent
    line = f"Sent: {report.bytes.lanes_sent:,} bytes on lanes, {report.bytes.control_sent:,} on control."
    if sent and report.bytes.fp32_allreduce_every_step:
        share = report.bytes.fp32_allreduce_every_step / sent
        line += f" An fp32 all-reduce at every step would have sent {share:,.0f} times as much."
    return f"<p>{escaped(line)}</p>"
