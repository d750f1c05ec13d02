"""Sections of a page of merged logs about rollouts: rewards, groups, what was refused, and who samples how much.

Nodes that share rollouts count rounds of their own, so rounds of one number are put together, whenever they were.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from shoal.protocol import names
from shoal.testnet.reports.page_parts import COLOURS, Line, chart, escaped, smoothed, table
from shoal.testnet.reports.report_log import NodeRollouts, RoundRewards, Thinned
from shoal.testnet.reports.report_merge import SwarmHistory

SMOOTHED_OVER: Final = 20
"""A part of all rounds, as one of so many, is averaged to a point."""
END_SHARE: Final = 10
"""Of the rounds, the first and the last of so many parts are compared."""
POINTS_LIMIT: Final = 400
NODES_SHOWN: Final = 100
UNIT: Final = "mean of answers, 0 to 1"


def rollout_sections(history: SwarmHistory, known: Mapping[str, str]) -> list[str]:
    """The sections, HTML; none where no log tells of rollouts. known: names of peers."""
    if not any(log.rollouts.rounds for log in history.logs):
        return []
    shared = history.rounds.rollouts
    own, external = series(shared.rewards, own=True), series(shared.rewards, own=False)
    window = max(1, len(own) // SMOOTHED_OVER)
    over = f", mean of {window} rounds" if window > 1 else ""
    lines = [
        line
        for label, points in (("own", own), ("of others, scored here", external))
        for line in _pair(f"{label}{over}", points, window)
    ]
    sections = ["<h2>Reward</h2>", chart(lines, what="Reward", unit=UNIT, span=(0.0, 1.0))]
    held_out = sorted(
        (round, mean.value) for (_, round), mean in shared.held_out.kept.items() if mean.value is not None
    )
    if held_out:
        line = Line(label="greedy, on held-out tasks", points=_thinned(held_out))
        drawing = chart([line], what="Greedy reward on held-out tasks", unit="mean of tasks, 0 to 1", span=(0.0, 1.0))
        sections += ["<h2>Held-out reward</h2>", drawing]
    if shared.tasks:
        sections += ["<h2>Reward by task</h2>", *_by_task(shared.tasks, window)]
    sections += ["<h2>Groups, and who samples how much</h2>", _node_table(history, known), _refusals(history)]
    return sections


def series(rewards: Thinned[RoundRewards], *, own: bool) -> list[tuple[int, float]]:
    """(round, mean reward) of the rounds that had any."""
    means = {round: (one.own if own else one.external).value for (_, round), one in rewards.kept.items()}
    return sorted((round, value) for round, value in means.items() if value is not None)


def _pair(label: str, points: Sequence[tuple[int, float]], window: int) -> list[Line]:
    """The smoothed line, and behind it the measured one where that differs."""
    if not points:
        return []
    line = Line(label=label, points=_thinned(smoothed(points, window)))
    return [Line(label="", points=_thinned(points), faint=True), line] if window > 1 else [line]


def _thinned(points: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    every = -(-len(points) // POINTS_LIMIT) or 1
    return [*points[::every], *(points[-1:] if (len(points) - 1) % every else ())]


def _by_task(tasks: Mapping[str, Thinned[RoundRewards]], window: int) -> list[str]:
    """A line for each of the tasks that most groups are of, and a row for each task."""
    groups = {family: sum(one.own.weight for one in kept.kept.values()) for family, kept in tasks.items()}
    drawn = heapq.nlargest(COLOURS, tasks, key=lambda family: groups[family])
    lines = [
        Line(label=family, points=_thinned(smoothed(points, max(1, window))))
        for family in sorted(drawn)
        if (points := series(tasks[family], own=True))
    ]
    rows = []
    for family in sorted(tasks):
        cells = [family]
        for own in (True, False):
            points = series(tasks[family], own=own)
            end = max(1, len(points) // END_SHARE)
            weight = sum((one.own if own else one.external).weight for one in tasks[family].kept.values())
            cells += [f"{weight:,}", _mean(points[:end]), _mean(points[-end:])]
        rows.append(cells)
    heads = ["task", "own groups", "first tenth", "last tenth", "others' groups", "first tenth", "last tenth"]
    drawing = [chart(lines, what="Own reward by task", unit=UNIT, span=(0.0, 1.0))] if lines else []
    return [*drawing, table(heads, rows)]


def _mean(points: Sequence[tuple[int, float]]) -> str:
    return f"{sum(value for _, value in points) / len(points):.3f}" if points else "–"


def _node_table(history: SwarmHistory, known: Mapping[str, str]) -> str:
    """Rollouts that each node made and took; of whom there is no log, how much of theirs was taken."""
    taken_of: Counter[str] = Counter()
    for log in history.logs:
        taken_of.update(log.rollouts.origins)
    nodes = {log.peer_id or log.label: log.rollouts for log in history.logs if log.rollouts.rounds}
    tokens = sum(node.tokens for node in nodes.values())
    rows = [_node_row(known.get(peer, names.short(peer)), node, tokens, taken_of[peer]) for peer, node in nodes.items()]
    silent = NodeRollouts()
    for peer, count in taken_of.most_common(NODES_SHOWN):
        if peer not in nodes:
            rows.append(_node_row(f"{known.get(peer, names.short(peer))} (no log)", silent, 0, count))
    heads = ["node", "rounds", "tokens sampled", "share", "own reward", "made", "taken by others"]
    more = (
        f'<p class="note">{len(rows) - NODES_SHOWN:,} more nodes are not shown.</p>' if len(rows) > NODES_SHOWN else ""
    )
    return table([*heads, "pulled", "taken", "refused"], rows[:NODES_SHOWN]) + more


def _node_row(name: str, node: NodeRollouts, tokens: int, taken_by_others: int) -> list[str]:
    reward = node.reward.value
    if not node.rounds:
        return [name, *["–"] * 5, f"{taken_by_others:,}", *["–"] * 3]
    return [
        name,
        f"{node.rounds:,}",
        f"{node.tokens:,}",
        f"{node.tokens / tokens:.0%}" if tokens else "–",
        "–" if reward is None else f"{reward:.3f}",
        f"{node.made:,}",
        f"{taken_by_others:,}",
        f"{node.pulled:,}",
        f"{node.taken:,}",
        f"{node.refused.total():,}",
    ]


def _refusals(history: SwarmHistory) -> str:
    reasons: Counter[str] = Counter()
    for log in history.logs:
        reasons.update(log.rollouts.refused)
    if not reasons:
        return '<p class="note">Nothing was refused.</p>'
    text = ", ".join(f"{reason} {count:,}" for reason, count in reasons.most_common())
    return f'<p class="note">Offers and groups refused, by reason: {escaped(text)}.</p>'
