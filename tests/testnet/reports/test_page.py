"""The page for people: complete in itself, safe, and in agreement with the report."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from shoal.testnet.reports.page import render_page
from shoal.testnet.reports.page_parts import Line, chart, linear_ticks, log_ticks, smoothed
from shoal.testnet.reports.plot import draw_loss, loss_points
from shoal.testnet.reports.report import (
    BytesReport,
    FaultReport,
    LossReport,
    NodeReport,
    Report,
    RoundReport,
    Span,
)
from shoal.testnet.scenario import Fault, Scenario

VOID = {"meta", "br"}


def report(**changes: object) -> Report:
    fields: dict[str, object] = {
        "scenario": Scenario(nodes=2, rounds=2, faults=(Fault(kind="kill", node=1, round=2),)),
        "wall_s": 12.5,
        "rounds_certified": 2,
        "forks": 0,
        "wrong_values": 0,
        "digests_equal": True,
        "nodes": (
            NodeReport(
                index=0,
                peer_id="12D3KooA",
                outcome="running",
                rounds=2,
                certified=2,
                contributed=2,
                digests={"1": "aa" * 32, "2": "bb" * 32},
                lives=((0.0, 12.5),),
                spans=(Span(round=1, start_s=1.0, end_s=6.0), Span(round=2, start_s=6.0, end_s=12.0)),
            ),
            NodeReport(
                index=1,
                peer_id="12D3KooB",
                outcome="killed",
                rounds=1,
                certified=1,
                contributed=1,
                digests={"1": "aa" * 32},
                lives=((0.5, 7.0),),
                spans=(Span(round=2, start_s=6.0, end_s=None),),
            ),
        ),
        "loss": LossReport(metric="bits per byte", first=8.0, last=5.25, by_round=(6.5, 5.25)),
        "faults": (FaultReport(kind="kill", node=1, round=2, phase=None, at_s=7.0, delay_s=1.25),),
        "rounds": tuple(
            RoundReport(round=r, members=2, contributors=2, coverage=1.0, tokens=640, reduce_s=0.2, total_s=4.0)
            for r in (1, 2)
        ),
        "bytes": BytesReport(lanes_sent=1000, control_sent=100, fp32_allreduce_every_step=110_000),
    }
    return Report(**(fields | changes))  # type: ignore[arg-type]  # the tests' own table of fields


class Outline(HTMLParser):
    """Counts tags, and checks that they nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)


def outline(page: str) -> list[str]:
    parser = Outline()
    parser.feed(page)
    assert parser.open == []
    return parser.seen


def test_page_asks_nobody_for_anything() -> None:
    page = render_page(report())
    assert not re.search(r"https?:|//[a-z]|\burl\(|@import|<script|<link|<img|<iframe|\bsrc=|\bhref=", page)


def test_page_draws_the_loss_and_the_timeline() -> None:
    seen = outline(render_page(report()))
    assert seen.count("svg") == 2
    assert seen.count("polyline") == 1
    assert seen.count("circle") == 3
    assert seen.count("rect") == 2 + 3  # lives and rounds
    assert seen.count("table") == 3


def test_page_has_light_and_dark() -> None:
    page = render_page(report())
    assert "prefers-color-scheme: dark" in page
    assert "color-scheme: light dark" in page


def test_page_tells_what_the_report_says() -> None:
    page = render_page(report())
    for text in ("Exact.", "2 of 2 rounds certified", "+1.25", "12D3KooB", "5.2500", "100 times as much"):
        assert text in page
    bad = render_page(report(wrong_values=3, unverified=("round 1: <b>&",), trouble="not finished after 9 s"))
    for text in ("Not as it should be.", "3 wrong values", "round 1: &lt;b&gt;&amp;", "not finished after 9 s"):
        assert text in bad
    outline(bad)


def test_page_of_a_run_in_which_nothing_happened() -> None:
    empty = report(
        nodes=(), rounds=(), faults=(), wall_s=0.0, loss=LossReport(metric="", first=None, last=None, by_round=())
    )
    page = render_page(empty)
    outline(page)
    assert "There is no held-out loss in these logs." in page


def test_page_escapes_what_workloads_say() -> None:
    evil = LossReport(metric='"><script>x', first=1.0, last=1.0, by_round=(1.0, None))
    page = render_page(report(loss=evil))
    assert "<script" not in page
    outline(page)


@pytest.mark.parametrize("by_round", [(6.5, 5.25), (None, 5.25), ()])
def test_draw_loss_makes_a_picture(by_round: tuple[float | None, ...]) -> None:
    loss = LossReport(metric="bits per byte", first=8.0, last=5.25, by_round=by_round)
    assert draw_loss(report(loss=loss)).startswith(b"\x89PNG")


def test_loss_points_leave_out_what_nobody_measured() -> None:
    loss = LossReport(metric="", first=None, last=2.0, by_round=(3.0, None, 2.0))
    assert loss_points(loss) == [(1, 3.0), (3, 2.0)]


def test_chart_is_logarithmic_where_a_linear_one_would_hide_the_end() -> None:
    steep = [Line(label="held out", points=[(0, 100.0), (1, 10.0), (2, 1.0)])]
    page = chart(steep, what="Loss", unit="bits per byte")
    assert "Loss, bits per byte, logarithmic scale" in page
    heights = [float(y) for y in re.findall(r'<circle class="dot" cx="[\d.]+" cy="([\d.]+)"', page)]
    assert heights[1] - heights[0] == pytest.approx(heights[2] - heights[1])
    flat = chart([Line(label="held out", points=[(0, 8.0), (1, 4.0), (2, 2.0)])], what="Loss", unit="bits")
    assert "logarithmic" not in flat
    heights = [float(y) for y in re.findall(r'<circle class="dot" cx="[\d.]+" cy="([\d.]+)"', flat)]
    assert heights[1] - heights[0] == pytest.approx(2 * (heights[2] - heights[1]), abs=0.2)
    zero = [Line(label="held out", points=[(0, 100.0), (1, 0.0)])]
    assert "logarithmic" not in chart(zero, what="Loss", unit="bits")


def test_chart_names_its_lines_and_the_unit_once() -> None:
    lines = [Line(label="", points=[(1, 0.1)], faint=True), Line(label="own", points=[(1, 0.1)])]
    page = chart([*lines, Line(label="<b>", points=[(1, 0.2)])], what="Reward", unit="0 to 1", span=(0.0, 1.0))
    assert re.findall(r"</svg>([^<]+)</li>", page) == ["own", "&lt;b&gt;"]
    assert re.findall(r'polyline class="curve ([^"]+)"', page) == ["l0 faint", "l0", "l1"]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1]), (0.0, 73.0, [0, 20, 40, 60]), (2.5, 8.0, [4, 6, 8]), (3.0, 3.0, [3])],
)
def test_ticks_are_round_numbers(low: float, high: float, ticks: list[float]) -> None:
    assert linear_ticks(low, high) == pytest.approx(ticks)


def test_log_ticks_are_round_numbers() -> None:
    assert log_ticks(1.03, 8.0) == pytest.approx([1.5, 2, 3, 5, 7])
    assert log_ticks(0.9, 30.0) == pytest.approx([1, 2, 5, 10, 20])
    assert log_ticks(1e-6, 1e6) == pytest.approx([10.0**power for power in range(-6, 7)])


def test_smoothed_is_the_mean_of_the_last_ones() -> None:
    assert smoothed([(1, 1.0), (2, 3.0), (3, 5.0), (4, 1.0)], 2) == [(1, 1.0), (2, 2.0), (3, 4.0), (4, 3.0)]
