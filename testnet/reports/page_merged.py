"""Page of several nodes' event logs: their presence, the certified rounds and the trouble, on one line of time.

However long and however many the logs are, the page stays small: few rounds are drawn one by one with their phases,
many as stretches of time; of many nodes those are shown that had trouble, and all are summed up; long tables show a
part and say so.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from shoal.node.outcome import is_held_out
from shoal.protocol import names
from shoal.testnet.reports.page_parts import (
    COLOURS,
    Line,
    Mark,
    Row,
    Tile,
    Tint,
    chart,
    document,
    duration,
    escaped,
    figure,
    folded,
    table,
    timeline,
)
from shoal.testnet.reports.page_rollouts import rollout_sections
from shoal.testnet.reports.report_log import Cell, Cells, HeldOutCurve, LogHistory, RoundSpan
from shoal.testnet.reports.report_merge import Clock, Incident, SwarmHistory

TILE_LIMIT: Final = 8000
COLUMN_RANGE: Final = (24, 384)
ROW_LIMIT: Final = 100
"""Nodes that are drawn and listed. A report of fewer folders shows the others."""
TABLE_LIMIT: Final = 200
CURVE_POINTS: Final = 400
MARK_LIMIT: Final = 2000
DAMAGED_SHOWN: Final = 20
NAMED_LIMIT: Final = 3
LABEL_CHARS: Final = 40
"""Nodes that a title names."""

MARKED: Final = frozenset(
    {"agent_died", "banned", "died", "evidence", "failed", "left", "restarted", "trainer_restarted"}
)
"""Events that are marked in a node's row; of the rest the table tells."""
WORDS: Final = {
    "detoured": "slow to answer, heard through others",
    "lost": "link lost",
    "parted": "no tensors come through",
    "stranded": "not reached from outside",
}
"""For people, where the event's name does not say it."""


def render_merged(history: SwarmHistory, title: str = "") -> str:
    """The whole page. title: of the user's; else who is in it."""
    logs = len(history.logs)
    shown = _shown(history)
    rows = _rows(history, shown)
    sections = [
        _summary(history),
        *rollout_sections(history, _names(history)),
        *_loss_sections(history),
        *_sample_sections(history),
        "<h2>Timeline</h2>",
        figure(timeline(rows, history.wall_s)),
        _left_out(logs, len(rows), "nodes", " Those here had the most trouble of their own, or certified least."),
        _legend(),
        _clock_note(history),
        "<h2>What went wrong, or was decided out of turn</h2>",
        _incident_table(history),
        *(["<h2>Rounds</h2>", _round_table(history)] if history.rounds.facts.kept or not _shares(history) else []),
        "<h2>Nodes</h2>",
        _node_summary(history),
        _node_table(history, shown),
    ]
    return document(title or _title(history), sections)


def _title(history: SwarmHistory) -> str:
    """`lab-1, lab-2, lab-3 and 5 more, 2026-11-26`."""
    known = _names(history)
    who = _listed([known.get(log.peer_id, log.label) for log in history.logs])
    day = time.strftime("%Y-%m-%d", time.gmtime(history.began_at))
    return f"{who}, {day}"


def _shares(history: SwarmHistory) -> bool:
    return any(log.rollouts.rounds for log in history.logs)


def _loss_sections(history: SwarmHistory) -> list[str]:
    """A line of each group of nodes that measured the same; several where members hold different texts out."""
    curves = sorted(history.rounds.curves, key=lambda curve: -len(curve.labels))
    if not curves and _shares(history):
        return []
    metric = history.rounds.metric or "units of the workload"
    held_out = is_held_out(metric)
    word = "held out" if held_out else "training"
    lines = [
        Line(label=word if len(curves) == 1 else f"{word}, {_listed(curve.labels)}", points=_losses(history, curve))
        for curve in curves[:COLOURS]
    ]
    drawing = chart(lines, what="Held-out loss" if held_out else "Training loss", unit=metric)
    return ["<h2>Loss</h2>", drawing, _differing_note(history, curves) if held_out else ""]


def _listed(named: Sequence[str]) -> str:
    more = len(named) - NAMED_LIMIT
    return ", ".join(name[:LABEL_CHARS] for name in named[:NAMED_LIMIT]) + (f" and {more:,} more" if more > 0 else "")


def _differing_note(history: SwarmHistory, curves: Sequence[HeldOutCurve]) -> str:
    """Say what it means that nodes measured different losses of one certified state."""
    certified = any(facts.digests for facts in history.rounds.facts.kept.values())
    states = [set(curve.losses.kept) for curve in curves]
    if not certified or not any(one & other for one, other in itertools.combinations(states, 2)):
        return ""
    left_out = f" Of {len(curves):,} curves {COLOURS} are drawn." if len(curves) > COLOURS else ""
    return (
        '<p class="note">Nodes measured different losses of the same states: they hold different data out, so they '
        f"may train on different data (<code>--data</code>).{left_out}</p>"
    )


def _sample_sections(history: SwarmHistory) -> list[str]:
    """Texts of a text model, from the first to the newest."""
    newest = history.rounds.newest_samples
    if newest is None:
        return []
    known = {round: texts for (_, round), texts in history.rounds.samples.kept.items()} | dict([newest])
    prompts = list(newest[1])
    rows = [[str(round), *(texts.get(prompt, "") for prompt in prompts)] for round, texts in sorted(known.items())]
    heads = ["after round", *(f"“{prompt}” and then" for prompt in prompts)]
    return ["<h2>What the model says</h2>", table(heads, rows, said=True)]


def short(peer: str) -> str:
    """The end of a PeerId, by which people tell nodes apart; what is none is cut."""
    return names.short(peer) if peer.startswith("12D3Koo") else peer[:24]


def _names(history: SwarmHistory) -> dict[str, str]:
    """Names of all peers that any log names, no two the same. What a log says of its own node counts."""
    claims = {peer: name for log in history.logs for peer, name in log.names.items()}
    claims |= {log.peer_id: log.names[log.peer_id] for log in history.logs if log.peer_id in log.names}
    return names.Names(lambda peer: claims[peer], limit=len(claims) + 1).of_all(claims)


def _summary(history: SwarmHistory) -> str:
    decided = history.rounds.facts
    forks, damaged = len(history.rounds.forks), sum(log.damaged for log in history.logs)
    every = "" if decided.stride == 1 else f" (every {decided.stride}th looked at)"
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(history.began_at))
    facts = (
        f"From {began} over {duration(history.wall_s, history.wall_s)}: {history.rounds.number:,} rounds{every}, "
        f"{sum(log.lines for log in history.logs):,} events"
    )
    word = '<span class="good">No two digests for one round.</span>' if decided.kept else ""
    if forks:
        rounds = ", ".join(f"{term}/{round}" for term, round in history.rounds.forks[:DAMAGED_SHOWN])
        word = f'<span class="bad">{forks} rounds have two digests: {escaped(rounds)}.</span>'
    broken = f" {damaged:,} lines are damaged or unfinished; they were stepped over." if damaged else ""
    return f'<p class="verdict">{word} {escaped(facts)}.{escaped(broken)}</p>'


def _legend() -> str:
    return (
        '<p class="note">Pale: it trains. Strong: it agrees, exchanges and certifies, or, where rounds are too many '
        "to be drawn, a stretch with certified rounds. Red: something went wrong there. Grey and dashed: a node left "
        "in good order. A line alone: it runs. Point at a stretch to read what it is.</p>"
    )


def _clock_note(history: SwarmHistory) -> str:
    known = [clock for clock in history.clocks if clock.rounds]
    lost = [log.label for log, clock in zip(history.logs, history.clocks, strict=True) if not clock.aligned]
    parts = []
    if known:
        parts.append(
            "Clocks of machines differ. These are aligned by the rounds that several logs certified: the largest "
            f"correction is {max(abs(clock.ahead_s) for clock in known):.3f} s, and 9 of 10 rounds agree within "
            f"{max(clock.stray_s for clock in known):.3f} s."
        )
    if lost:
        names = ", ".join(lost[:DAMAGED_SHOWN]) + (", …" if len(lost) > DAMAGED_SHOWN else "")
        parts.append(f"Not aligned, for want of a round in common with the others: {names}.")
    return f'<p class="note">{escaped(" ".join(parts))}</p>' if parts else ""


def _left_out(count: int, shown: int, what: str, which: str = "") -> str:
    return f'<p class="note">{count - shown:,} more {what} are not shown.{which}</p>' if count > shown else ""


def _troubles(history: SwarmHistory) -> Counter[str]:
    """How often something happened to a node that is marked in its row, by PeerId."""
    return Counter(incident.subject for incident in history.incidents if incident.kind in MARKED)


def _shown(history: SwarmHistory) -> list[int]:
    """Places of the logs that are drawn and listed, in order: all of a few, else those with most trouble."""
    troubles = _troubles(history)

    def worst_first(place: int) -> tuple[int, int, int]:
        log = history.logs[place]
        return -troubles[log.peer_id], log.certified, place

    return sorted(heapq.nsmallest(ROW_LIMIT, range(len(history.logs)), key=worst_first))


def _node_summary(history: SwarmHistory) -> str:
    """All nodes in a line, shown or not."""
    certified = sorted(log.certified for log in history.logs)
    if len(certified) <= ROW_LIMIT:
        return ""
    troubles = _troubles(history)
    troubled = sum(troubles[log.peer_id] > 0 for log in history.logs)
    text = (
        f"{len(certified):,} nodes: {certified[len(certified) // 2]:,} rounds certified in the middle, "
        f"{certified[len(certified) // 10]:,} or fewer at one in ten, {certified[-1]:,} at most; "
        f"{troubled:,} with trouble of their own."
    )
    return f'<p class="note">{escaped(text)}</p>'


def _losses(history: SwarmHistory, curve: HeldOutCurve) -> list[tuple[int, float]]:
    """The loss after each round that counts, thinned evenly to what a curve can show; the last point stays."""
    points = history.rounds.points(curve)
    every = -(-len(points) // CURVE_POINTS) or 1
    return points[::every] + (points[-1:] if points and (len(points) - 1) % every else [])


def _rows(history: SwarmHistory, places: Sequence[int]) -> list[Row]:
    shown = [(history.logs[place], history.clocks[place]) for place in places]
    spans = sum(len(log.spans or ()) for log, _ in shown)
    origins = [history.began_at + clock.ahead_s for _, clock in shown]
    if not _shares(history) and all(log.spans is not None for log, _ in shown) and 2 * spans <= TILE_LIMIT:
        tiles = [_spans(log, origin) for (log, _), origin in zip(shown, origins, strict=True)]
    else:
        tiles = _resampled([log.cells for log, _ in shown], origins, history.wall_s)
    marks = _marks(history)
    return [
        Row(
            label=log.label[:10],
            lives=[(start - origin, end - origin) for start, end in log.lives],
            tiles=row,
            marks=marks.get(log.peer_id, ()),
        )
        for (log, _), origin, row in zip(shown, origins, tiles, strict=True)
    ]


def _resampled(logs: Sequence[Cells], origins: Sequence[float], wall_s: float) -> list[list[Tile]]:
    """Every log in columns, as narrow as the limit of tiles allows."""
    columns = COLUMN_RANGE[1]
    while True:
        tiles = [_columns(cells, origin, wall_s, columns) for cells, origin in zip(logs, origins, strict=True)]
        if columns <= COLUMN_RANGE[0] or sum(len(row) for row in tiles) <= TILE_LIMIT:
            return tiles
        columns //= 2


def _marks(history: SwarmHistory) -> dict[str, list[Mark]]:
    """Marks of a node's incidents, by PeerId."""
    found: dict[str, list[Mark]] = {}
    for incident in [incident for incident in history.incidents if incident.kind in MARKED][:MARK_LIMIT]:
        tip = f"{incident.kind} {incident.text}".strip()
        found.setdefault(incident.subject, []).append(
            Mark(at_s=incident.at - history.began_at, tip=tip, calm=incident.kind == "left")
        )
    return found


def _spans(log: LogHistory, origin: float) -> list[Tile]:
    """A pale tile while a round trains, a strong one from its plan to its certificate."""
    tiles: list[Tile] = []
    for number, span in enumerate(log.spans or ()):
        following = (log.spans or ())[number + 1 : number + 2]
        end = span.ended_at if span.ended_at is not None else (following[0].began_at if following else log.last_at)
        middle = _exchange_began(span, end)
        name, open_end = f"round {span.round} of term {span.term}", span.ended_at is None
        how = "not certified here" if open_end else f"certified after {end - span.began_at:.2f} s"
        stretches: list[tuple[float, float, Tint]] = [(span.began_at, middle, "odd"), (middle, end, "even")]
        tiles += [
            Tile(
                start_s=start - origin, end_s=max(stop, start) - origin, tint=tint, tip=f"{name}: {how}", open=open_end
            )
            for start, stop, tint in stretches
            if stop > start
        ]
    return tiles


def _exchange_began(span: RoundSpan, end: float) -> float:
    """Time at which training gave way to the exchange: the round was planned, or at the latest over."""
    middle = span.planned_at or span.contributed_at or end
    return min(max(middle, span.began_at), end)


def _columns(cells: Cells, origin: float, wall_s: float, columns: int) -> list[Tile]:
    """The cells resampled into columns of equal width, neighbours of one look joined."""
    width = max(wall_s, 0.001) / columns
    found = [Cell() for _ in range(columns)]
    for number, cell in enumerate(cells.cells):
        if cell.events:
            middle = cells.origin_s + (number + 0.5) * cells.width_s - origin
            found[min(max(int(middle / width), 0), columns - 1)].add(cell)
    tiles: list[Tile] = []
    begin = 0
    while begin < columns:
        end, joined = begin + 1, found[begin]
        while end < columns and _tint(found[end]) == _tint(found[begin]):
            joined.add(found[end])
            end += 1
        tint = _tint(joined)
        if tint is not None:
            tiles.append(Tile(start_s=begin * width, end_s=end * width, tint=tint, tip=_cell_text(joined)))
        begin = end
    return tiles


def _tint(cell: Cell) -> Tint | None:
    if not cell.events:
        return None
    return "trouble" if cell.troubles else "even" if cell.certified else "odd"


def _cell_text(cell: Cell) -> str:
    trouble = f", {cell.troubles} times something went wrong" if cell.troubles else ""
    if not cell.certified:
        return f"{cell.events:,} events, no round certified{trouble}"
    return f"rounds {cell.first} to {cell.last}: {cell.certified:,} certified here{trouble}"


def _incident_table(history: SwarmHistory) -> str:
    if not history.incidents:
        return "<p>Nothing.</p>"
    worst = sorted(history.incidents, key=_weight)[:TABLE_LIMIT]
    known = _names(history)
    labels = {log.peer_id: log.label for log in history.logs if log.peer_id} | known
    rows = [
        [
            _moment(incident.at),
            WORDS.get(incident.kind, incident.kind.replace("_", " ")),
            _who(incident.subject, labels),
            str(incident.reporters),
            names.by_name(incident.text, known),
        ]
        for incident in sorted(worst, key=lambda incident: incident.at)
    ]
    more = len(history.incidents) + sum(log.faults_left_out for log in history.logs)
    return folded(["UTC", "what", "node", "told by", "why"], rows, "entries") + _left_out(more, len(rows), "entries")


def _moment(at: float) -> str:
    return time.strftime("%b %d %H:%M:%S", time.gmtime(at))


def _weight(incident: Incident) -> tuple[bool, int]:
    """The grave ones first: nodes that died or failed, and what many tell."""
    return incident.kind not in MARKED, -incident.reporters


def _who(peer: str, labels: dict[str, str]) -> str:
    """A peer as its name or its folder's, and the end of its PeerId, once."""
    end = short(peer)
    label = labels.get(peer, end)
    return label if label.endswith(end) else f"{label} ({end})"


def _round_table(history: SwarmHistory) -> str:
    facts = sorted(history.rounds.facts.kept.items(), key=lambda entry: (entry[0][1], entry[0][0]))
    every = -(-len(facts) // TABLE_LIMIT) or 1
    rows = []
    for (term, number), round in facts[::every]:
        loss = history.rounds.loss((term, number))
        rows.append(
            [
                f"{term} / {number}",
                str(round.tellers),
                str(round.members),
                str(round.contributors),
                f"{round.coverage:.3f}",
                f"{round.tokens:,}",
                f"{round.reduce_sum_s / round.tellers:.3f}",
                f"{round.total_sum_s / round.tellers:.2f}",
                "–" if loss is None else f"{loss:.4f}",
                ", ".join(digest[:12] for digest in round.digests),
            ]
        )
    heads = ["term / round", "logs", "members", "contributors", "coverage", "tokens", "reduce s", "total s"]
    return folded([*heads, history.rounds.metric or "loss", "digest"], rows, "rounds") + _left_out(
        len(facts), len(rows), "rounds"
    )


def _node_table(history: SwarmHistory, shown: Sequence[int]) -> str:
    known = _names(history)
    rows = [_node_row(history.logs[place], history.clocks[place], known) for place in shown]
    heads = [
        "log",
        "node",
        "PeerId",
        "rounds",
        "processes",
        "clock ahead s",
        "rounds in common",
        "bytes sent",
    ]
    return table([*heads, "events", "damaged lines"], rows) + _left_out(len(history.logs), len(rows), "nodes")


def _node_row(log: LogHistory, clock: Clock, known: Mapping[str, str]) -> Sequence[str]:
    return [
        log.label[:LABEL_CHARS],
        known.get(log.peer_id, "–"),
        short(log.peer_id),
        f"{log.certified:,}",
        f"{len(log.lives) + log.lives_left_out:,}",
        f"{clock.ahead_s:+.3f}" if clock.aligned else "unknown",
        f"{clock.rounds:,}" if clock.rounds else "–",
        f"{log.sent_bytes:,}",
        f"{log.lines:,}",
        f"{log.damaged:,}",
    ]
