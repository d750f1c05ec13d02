"""The live view, driven by Textual's pilot against a control server and an event log."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, Static, TabbedContent

from shoal.cli.main import execute
from shoal.cli.render import SHOWN_LIMIT
from shoal.cli.watch_app import ConfirmLeave, WatchApp
from shoal.cli.watch_model import GONE_LIMIT, GONE_SHOWN_S, Picture, Watcher, bars
from shoal.node.control_client import BanStatus
from shoal.node.dashboard.rounds import ALIKE_LIMIT
from shoal.node.training.trainer_messages import SAMPLE_LIMIT_CHARS
from tests.cli.test_status import ADA, FakeNode, crowd_of, running, status_of, with_checks

DEADLINE_S = 60.0


def log(data_dir: Path, *events: dict[str, object]) -> None:
    with (data_dir / "events.jsonl").open("a", encoding="utf-8") as file:
        for event in events:
            file.write(json.dumps({"at": 1.8e9, **event}) + "\n")


def fake() -> FakeNode:
    return FakeNode(msgspec.to_builtins(with_checks()))


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    """Let the view go on until this holds."""
    ends_at = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < ends_at
        await pilot.pause(0.01)


def panes_of(app: WatchApp) -> TabbedContent:
    return app.query_one(TabbedContent)


def text(app: WatchApp, name: str) -> str:
    return str(app.query_one(name, Static).render())


def test_watch_shows_what_the_node_and_its_log_say(tmp_path: Path) -> None:
    log(
        tmp_path,
        {"event": "evaluated", "round": 0, "loss": 8.0, "metric": "bits per byte"},
        {"event": "evaluated", "round": 1, "loss": 4.5, "metric": "bits per byte"},
        {"event": "died", "peer": ADA},
        {"event": "died", "peer": ADA, "left": True},
        {"event": "failed", "message": "[red]\x1b[2J"},
        {"event": "sampled", "round": 0, "texts": {"The ": "\x1b[2J\u202e"}},
        {"event": "sampled", "round": 3, "texts": {"The ": "lost"}},
        {"event": "sampled", "round": 4, "texts": {"The ": "cat\n[red]", "def ": "f" * 500}},
    )

    async def watch() -> None:
        app = WatchApp(Watcher(tmp_path), period_s=0.01)
        async with app.run_test(size=(140, 30)) as pilot:
            await until(pilot, lambda: app.picture is not None and app.picture.status is not None)
            await pilot.pause()
            assert "round 8 · reduce" in text(app, "#headline")
            assert text(app, "#phases") == "train → plan → [reduce] → certify"
            assert "sent 1.5 MB" in text(app, "#bytes")
            assert "start the missing one again" in text(app, "#trouble")
            table = app.query_one("#table", DataTable)
            rows = [[str(cell) for cell in table.get_row_at(line)] for line in range(table.row_count)]
            assert rows == [
                ["box (this node)", "12D3A", "reduce", "1,235", "this node"],
                ["", "12D3B", "missing", "–", "missing"],
                ["tom", "12D3C", "training\\x1b[2J", "1", "directly"],
            ]
            assert text(app, "#loss-text") == "8 → 4.5 bits per byte, up to round 1"
            assert app.picture is not None
            assert [line[9:] for line in app.picture.faults] == [
                "ada is gone",
                "ada has left",
                "training failed: [red]\\x1b[2J",
            ]
            assert not panes_of(app).get_tab("rollouts").display
            await pilot.press("2")
            await until(pilot, lambda: "│" in text(app, "#curve"))
            curve = text(app, "#curve").splitlines()
            assert curve[0].endswith("8 │███")
            assert curve[-1].split() == ["0", "1", "round"]
            assert text(app, "#samples-text").splitlines() == [
                'round 0: "The " → "\\x1b[2J\\u202e"',
                'round 4: "The " → "cat\\n[red]"',
                f'round 4: "def " → "{"f" * SAMPLE_LIMIT_CHARS}"',
            ]

    with running(tmp_path, fake()):
        asyncio.run(watch())


def test_bars_stand_on_an_axis_below_the_smallest_value() -> None:
    assert bars([(1.0, 8.0), (2.0, 4.0), (3.0, 2.0)], width=40, height=4) == [
        "    8 │███",
        "      │███",
        "4.625 │███▅▅▅",
        " 1.25 │██████▄▄▄",
        "      └─────────",
        "       1       3 round",
    ]
    assert bars([(7.0, 2.0)], width=40, height=3)[:3] == ["    2 │███", "1.875 │███", " 1.75 │███"], "one value"
    many = bars([(float(place), float(place)) for place in range(1000)], width=27, height=5)
    assert len(many[4]) == 27
    assert many[0].endswith("█")


def test_facts_of_the_head_stay_whole_where_the_terminal_is_narrow() -> None:
    status = with_checks(loss=3.377, metric="bits per byte", train_loss=2.251, train_metric="bits per byte")
    lines = Picture(status=status).headline(60).splitlines()
    assert lines == ["round 8 · reduce", "held-out 3.377 bits per byte; training 2.251", "1,235 tokens/s"]
    assert Picture(status=status).headline(78).count("\n") == 1


def test_samples_of_a_state_that_was_abandoned_are_shown_no_more(tmp_path: Path) -> None:
    samples = [{"event": "sampled", "round": round, "texts": {"The ": "cat"}} for round in (1, 5)]
    log(tmp_path, *samples, {"event": "rolled_back", "round": 6, "to": 3})
    assert Watcher(tmp_path).look().samples == ('round 1: "The " → "cat"',)


def test_watch_of_a_thousand_nodes_lists_few_and_counts_all(tmp_path: Path) -> None:
    status = status_of(crowd_of(1000))
    with running(tmp_path, FakeNode(msgspec.to_builtins(status))):
        picture = Watcher(tmp_path).look()
    assert len(picture.members) == SHOWN_LIMIT
    assert [member.reach for member in picture.members[:3]] == ["this node", "missing", "missing"]
    assert picture.peer_line == (
        "1,000 known, 900 alive: 900 training; 100 gone; 100 not members, 128 behind · "
        "876 more members: `shoal status --peers`"
    )

    async def watch() -> None:
        app = WatchApp(Watcher(tmp_path), period_s=0.01)
        async with app.run_test(size=(140, 30)) as pilot:
            await until(pilot, lambda: app.picture is not None and app.picture.status is not None)
            await pilot.pause()
            assert app.query_one("#table", DataTable).row_count == SHOWN_LIMIT
            assert text(app, "#peers") == picture.peer_line

    with running(tmp_path, FakeNode(msgspec.to_builtins(status))):
        asyncio.run(watch())


def test_watch_shows_who_died_below_the_members_for_a_while(tmp_path: Path) -> None:
    now = time.time()
    lost = [f"12D3gone{number}" for number in range(GONE_LIMIT + 2)]
    log(tmp_path, *({"event": "died", "peer": peer, "at": now - 130 * n} for n, peer in enumerate(lost)))
    log(tmp_path, {"event": "died", "peer": "12D3old", "at": now - GONE_SHOWN_S - 10})
    log(tmp_path, {"event": "died", "peer": "12D3back", "at": now - 5})
    crowd = status_of(crowd_of(3))
    assert crowd.peers is not None
    gone = [*lost, "12D3old", crowd.members[2].peer_id]
    log(tmp_path, {"event": "died", "peer": crowd.members[2].peer_id, "at": now - 5})
    status = msgspec.structs.replace(
        crowd, names={lost[0]: "bob"}, peers=msgspec.structs.replace(crowd.peers, gone=gone)
    )

    async def watch() -> None:
        app = WatchApp(Watcher(tmp_path), period_s=0.01)
        async with app.run_test(size=(140, 30)) as pilot:
            await until(pilot, lambda: app.picture is not None and app.picture.status is not None)
            await pilot.pause()
            table = app.query_one("#table", DataTable)
            rows = [table.get_row_at(line) for line in range(table.row_count)]
            below = rows[len(crowd.members) :]
            assert [str(row[1]) for row in below] == lost[:GONE_LIMIT]
            assert [str(cell) for cell in below[0]] == ["bob", lost[0], "gone", "–", "just now"]
            assert str(below[1][4]) == "2 minutes ago"
            assert {cell.style for row in below for cell in row} == {"dim"}
            assert {cell.style for row in rows[: len(crowd.members)] for cell in row} == {""}

    with running(tmp_path, FakeNode(msgspec.to_builtins(status))):
        asyncio.run(watch())


def test_watch_keys_order_and_confirm_and_switch(tmp_path: Path) -> None:
    node = fake()

    def orders() -> list[str]:
        return [op for op in node.asked if op != "status"]

    async def watch() -> None:
        app = WatchApp(Watcher(tmp_path), period_s=5.0)
        async with app.run_test() as pilot:
            await pilot.press("p")
            await until(pilot, lambda: orders() == ["pause"])
            await pilot.press("r")
            await until(pilot, lambda: orders() == ["pause", "resume"])
            await pilot.press("tab")
            assert app.query_one(TabbedContent).active == "loss"
            await pilot.press("3")
            assert app.query_one(TabbedContent).active == "faults"
            await pilot.press("4")
            assert app.query_one(TabbedContent).active == "samples"
            await pilot.press("l")
            await until(pilot, lambda: isinstance(app.screen, ConfirmLeave))
            await pilot.press("n")
            await until(pilot, lambda: not isinstance(app.screen, ConfirmLeave))
            assert orders() == ["pause", "resume"]
            await pilot.press("l")
            await until(pilot, lambda: isinstance(app.screen, ConfirmLeave))
            await pilot.press("y")
            await until(pilot, lambda: orders() == ["pause", "resume", "leave"])
            await pilot.press("q")

    with running(tmp_path, node):
        asyncio.run(watch())


def test_watch_waits_for_a_node_and_sees_it_go(tmp_path: Path) -> None:
    data_dir = tmp_path / "[bold]x"
    data_dir.mkdir()

    async def watch() -> None:
        app = WatchApp(Watcher(data_dir), period_s=0.01)
        async with app.run_test(size=(240, 24)) as pilot:
            await until(pilot, lambda: "shoal run MANIFEST" in text(app, "#trouble"))
            assert str(data_dir) in text(app, "#trouble")
            assert text(app, "#headline") == "no node answers"
            with running(data_dir, fake()):
                await until(pilot, lambda: "round 8" in text(app, "#headline"))
            await until(pilot, lambda: text(app, "#headline") == "no node answers")
            assert app.query_one("#table", DataTable).row_count == 0

    asyncio.run(watch())


def test_watch_without_a_terminal_says_what_else_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["watch", "--data-dir", str(tmp_path)]) == 2
    assert "use `shoal status`" in capsys.readouterr().err


def test_a_member_that_speaks_of_other_members_is_bounded(tmp_path: Path) -> None:
    watcher = Watcher(tmp_path)
    log(tmp_path, *({"event": "died", "peer": f"peer{number}"} for number in range(5000)))
    picture = watcher.look()
    assert picture.status is None
    assert len(picture.faults) == ALIKE_LIMIT


def test_watch_says_what_stands_in_the_way_as_the_page_and_the_status_do() -> None:
    why = "the machine is in use (--only-when)"
    ban = BanStatus(peer_id="12D3C", term="0.0", round=5, until=9, evidence="ab")
    picture = Picture(status=with_checks(missing=[], bans=[ban], phase="paused", why_paused=why))
    assert picture.advice == (
        f"paused: {why}; it votes and keeps the state, and trains nothing",
        "12D3C is banned until round 9, by round 5",
    )
    assert Picture(status=with_checks(missing=[])).advice == ()


def test_watch_shows_caps() -> None:
    assert "at most" not in Picture(status=with_checks()).bytes_line
    assert Picture(status=with_checks(max_download=2_000_000)).bytes_line.endswith(" · 2.0 MB/s down at most")


def test_watch_cuts_names_where_the_terminal_is_narrow(tmp_path: Path) -> None:
    async def watch() -> None:
        app = WatchApp(Watcher(tmp_path), period_s=0.01)
        async with app.run_test(size=(60, 24)) as pilot:
            table = app.query_one("#table", DataTable)
            await until(pilot, lambda: table.row_count == 3)
            assert [str(table.get_row_at(line)[1]) for line in range(3)] == ["…12D3A", "…12D3B", "…12D3C"]

    with running(tmp_path, fake()):
        asyncio.run(watch())
