"""Log lines: text, JSON, and above a live line on a terminal."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import time

import pytest
from rich.console import Console

from shoal.cli import logs, render
from shoal.cli.live_line import live_line
from shoal.cli.render import RunProgress, progress_display
from shoal.node.outcome import (
    Notice,
    Outcome,
    PeerChanged,
    PhaseChanged,
    Progress,
    RoundCertified,
    StateFetched,
    StepsMade,
    TakesPart,
)
from shoal.protocol.identity import Identity
from shoal.protocol.names import short

WAIT_S = 20.0
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


def log_something() -> None:
    logging.getLogger("shoal.node.x").info("from a peer: %s", "a\nforged \x1b[2J line")
    logging.getLogger("shoal.node.x").debug("too much")
    logging.getLogger("another").info("too much")
    try:
        raise ValueError("the cause")
    except ValueError:
        logging.getLogger("shoal.node.x").exception("went wrong")


def test_text_log_has_one_line_a_record(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(log_format="text", level="info", console=None)
    log_something()
    out, err = capsys.readouterr()
    first, second, *trace = err.splitlines()
    assert first[8:] == " info shoal.node.x: from a peer: a\\nforged \\x1b[2J line"
    assert second[8:] == " error shoal.node.x: went wrong"
    assert (trace[0], trace[-1]) == ("Traceback (most recent call last):", "ValueError: the cause")
    assert out == ""


def test_json_log_has_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(log_format="json", level="info", console=None)
    log_something()
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert first["message"] == "from a peer: a\nforged \x1b[2J line"
    assert (first["level"], first["logger"]) == ("info", "shoal.node.x")
    assert second["traceback"].endswith("ValueError: the cause")


def test_log_level_selects(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(log_format="text", level="error", console=None)
    log_something()
    assert "from a peer" not in capsys.readouterr().err


def test_line_that_repeats_is_shown_once_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(log_format="text", level="info", console=None)
    (handler,) = [one for one in logging.getLogger().handlers if isinstance(one.formatter, logs.TextFormatter)]

    def say(text: str, at: float, level: int = logging.INFO) -> None:
        handler.handle(logging.makeLogRecord({"name": "shoal.x", "levelno": level, "msg": text, "created": at}))

    for second in range(150):
        say("no peer has the state of round 0", float(second))
    say("another", 149.0)
    say("a quorum is missing", 149.0, logging.WARNING)
    say("a quorum is missing", 149.1, logging.WARNING)
    shown = [line.rpartition(": ")[2] for line in capsys.readouterr().err.splitlines()]
    assert shown == ["no peer has the state of round 0"] * 3 + ["another"] + ["a quorum is missing"] * 2


def test_debug_log_has_every_repetition(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(log_format="text", level="debug", console=None)
    for _ in range(3):
        logging.getLogger("shoal.x").info("again")
    assert capsys.readouterr().err.count("again") == 3


def test_configuring_again_does_not_double_lines(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        logs.configure(log_format="text", level="info", console=None)
    logging.getLogger("shoal").info("once")
    assert capsys.readouterr().err.count("once") == 1


def test_terminal_log_is_brief_and_takes_no_markup() -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, color_system=None, width=40)
    logs.configure(log_format="text", level="info", console=console)
    logging.getLogger("shoal.x").info("[red]round[/red] 3 " + "x" * 60)
    logging.getLogger("shoal.x").warning("careful")
    first, second = shown.getvalue().splitlines()
    assert first[8:] == " [red]round[/red] 3 " + "x" * 60
    assert second[8:] == " warning careful"


def test_progress_goes_to_the_log_or_to_the_live_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="shoal.progress")
    now: list[tuple[str, float | None]] = []
    tell = RunProgress(lambda text, share=None, *, of="": now.append((text, share)))
    tell(StateFetched(done_chunks=1, total_chunks=2, done_bytes=2_100_000, total_bytes=4_200_000))
    tell(StateFetched(done_chunks=2, total_chunks=2, done_bytes=4_200_000, total_bytes=4_200_000))
    tell(RoundCertified(round=1, members=1, contributors=1, loss=None, seconds=2.0))
    tell(PhaseChanged(phase="train", round=2))
    tell(PhaseChanged(phase="no quorum", round=2))
    tell(Notice(text="half of the members are missing"))
    assert now == [
        ("fetching the swarm's state: 2.1 MB of 4.2 MB", 0.5),
        ("fetching the swarm's state: 4.2 MB of 4.2 MB", 1.0),
        ("round 2: train · round 1 was certified", 0.0),
        ("round 2: no quorum · round 1 was certified", None),
    ]
    assert [record.getMessage() for record in caplog.records] == [
        "round 1 certified: 1 of 1 contributed, 2.0 s",
        "half of the members are missing",
    ]


def test_the_end_of_a_run_says_by_what_command_it_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="shoal.progress")
    tell, command = RunProgress(lambda text, share=None, *, of="": None), "shoal run d/swarm.toml --data-dir d"
    for outcome in (Outcome.DONE, Outcome.LEFT):
        tell.end(outcome, command)
    assert [record.getMessage() for record in caplog.records] == [
        f"done; `{command}`, with its options, goes on, `shoal export` takes the model away",
        f"left the swarm; `{command}`, with its options, comes back to it",
    ]


def test_a_long_fetch_and_a_long_round_say_how_far_they_are_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="shoal.progress")
    now = 0.0
    tell = RunProgress(lambda text, share=None, *, of="": None, clock=lambda: now)

    def said(event: Progress, at: float) -> list[str]:
        nonlocal now
        now = at
        caplog.clear()
        tell(event)
        return [record.getMessage() for record in caplog.records]

    def fetched(done: int) -> StateFetched:
        return StateFetched(done_chunks=0, total_chunks=9, done_bytes=done, total_bytes=6_800_000)

    def step(number: int) -> StepsMade:
        return StepsMade(round=4, step=number, steps=100)

    assert said(fetched(100), 9.9) == []
    assert said(fetched(2_100_000), 10.1) == ["fetching the swarm's state: 2.1 MB of 6.8 MB"]
    assert said(fetched(3_000_000), 20.0) == []
    assert said(TakesPart(round=3, counts_from=4), 30.0) == ["new in round 3: this node's work counts from round 4 on"]
    assert said(RoundCertified(round=3, members=2, contributors=1, loss=None, seconds=9.0), 40.0) != []
    assert said(TakesPart(round=4, counts_from=4), 41.0) == ["this node's work counts from round 4 on"]
    assert said(step(39), 100.9) == []
    assert said(step(40), 101.1) == ["round 4: step 40 of 100"]
    assert said(step(80), 161.0) == []
    assert said(PhaseChanged(phase="plan", round=4), 162.0) == ["round 4: plan"]
    assert said(TakesPart(round=5, counts_from=5), 170.0) == []  # it was told once
    assert said(PhaseChanged(phase="train", round=5), 229.0) == []


def test_what_the_trainer_says_last_does_not_hide_a_pause() -> None:
    shown = list[str]()
    tell = RunProgress(lambda text, share=None, *, of="": shown.append(text))
    tell(PhaseChanged(phase="paused", round=4))
    tell(StepsMade(round=4, step=39, steps=100))
    assert shown == ["round 4: paused"]
    tell(PhaseChanged(phase="train", round=5))
    tell(StepsMade(round=5, step=1, steps=100))
    assert shown[-1] == "round 5: step 1 of 100"


class Terminal(io.StringIO):
    """A stderr that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_terminal_gets_a_live_line_and_logs_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress_display(log_format="text", log_level="info") as show_now:
        show_now("round 1: [bold]train\x1b[2J")
        logging.getLogger("shoal.x").info("a record")
    shown = terminal.getvalue()
    assert "a record\n" in shown
    assert "\x1b[2J" not in shown


def test_live_line_shows_a_share_and_never_writes_into_the_log() -> None:
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=100, legacy_windows=False)
    logs.configure(log_format="text", level="info", console=console)
    with live_line(console) as show_now:
        for number in range(40):
            show_now("without a share")
            show_now(f"transfer {number} of 40", number / 40)
            logging.getLogger("shoal.x").info("record %d", number)
        show_now("transfer 39 of 40 \x1b[2J\nline", 0.98)
    assert "\x1b[2J" not in terminal.getvalue()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue()).replace("\r", "\n")
    records = [line for line in plain.split("\n") if "record" in line]
    assert [line[9:].rstrip() for line in records] == [f"record {number}" for number in range(40)]
    assert "transfer 39 of 40" in plain
    assert "98%" in plain


def test_time_beside_the_live_line_goes_on_after_all_is_done_and_begins_anew_with_what_it_is_of() -> None:
    now = 100.0
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=160, legacy_windows=False)

    def drawn() -> str:
        """The line as it was drawn last, without its bar; empty where its spinner stands still."""
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue()).rstrip().replace("\r", "\n")
        spinner, *line = plain.rpartition("\n")[2].translate(dict.fromkeys(map(ord, "━╸╺"))).split()
        return " ".join(line) if spinner in SPINNER else ""

    def shows(line: str, *, at: float, after: Progress | None = None) -> None:
        """Wait until it is drawn: it is drawn anew ten times a second."""
        nonlocal now
        now = 100.0 + at
        if after is not None:
            tell(after)
        ends_at = time.monotonic() + WAIT_S
        while drawn() != line:
            assert time.monotonic() < ends_at, drawn()
            time.sleep(0.01)

    with live_line(console, clock=lambda: now) as show_now:
        tell = RunProgress(show_now)
        show_now("starting")
        shows("starting 0:00:02", at=2.0)
        fetched = StateFetched(done_chunks=2, total_chunks=2, done_bytes=4_200_000, total_bytes=4_200_000)
        shows("fetching the swarm's state: 4.2 MB of 4.2 MB 100% 0:00:00 of the fetch", at=3.0, after=fetched)
        shows("fetching the swarm's state: 4.2 MB of 4.2 MB 100% 0:00:30 of the fetch", at=33.0)
        shows("round 7: train 0% 0:00:00 of round 7", at=40.0, after=PhaseChanged(phase="train", round=7))
        step = StepsMade(round=7, step=100, steps=100)
        shows("round 7: step 100 of 100 100% 0:00:10 of round 7", at=50.0, after=step)
        shows("round 7: plan 25% 0:00:20 of round 7", at=60.0, after=PhaseChanged(phase="plan", round=7))
        shows("round 7: plan 25% 0:01:00 of round 7", at=100.0)
        ahead = StepsMade(round=8, step=1, steps=100)  # made while round 7 is reduced
        shows("round 8: step 1 of 100 1% 0:00:00 of round 8", at=110.0, after=ahead)
        shows("round 7: reduce 50% 0:01:20 of round 7", at=120.0, after=PhaseChanged(phase="reduce", round=7))


def test_lines_of_a_pipe_that_are_for_the_user_have_no_loggers_name(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(log_format="text", level="info", console=None)
    logging.getLogger(logs.FOR_USER).info("asking for the manifest")
    logging.getLogger("shoal.node.x").info("something else")
    assert [line[9:] for line in capsys.readouterr().err.splitlines()] == [
        "info asking for the manifest",
        "info shoal.node.x: something else",
    ]


def test_terminal_is_brief_before_it_has_a_live_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    logs.configure(log_format="text", level="info", console=None)
    logging.getLogger(logs.FOR_USER).info("asking for the manifest")
    assert terminal.getvalue()[8:] == " asking for the manifest\n"


def test_this_node_is_named_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    me = Identity.from_seed(bytes([1]) * 32).peer_id

    def said(name: str) -> str:
        logs.configure(log_format="text", level="info", console=None)
        RunProgress(lambda text, share=None, *, of="": None)(PeerChanged(kind="self", peer=me, name=name))
        return capsys.readouterr().err[9:]

    assert said("box") == f"info this node is box ({me})\n"
    assert said("") == f"info this node is {me}\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert said("box") == f"this node is box ({short(me)})\n"
    assert said("") == f"this node is {short(me)}\n"


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    with progress_display(log_format="text", log_level="info") as show_now:
        show_now("round 1", 0.5)
        logging.getLogger("shoal.x").error("a record")
    codes = re.findall(r"\x1b\[([0-9;]*)m", terminal.getvalue())
    assert [code for code in codes if any(part[:1] in "3494" and len(part) > 1 for part in code.split(";"))] == []


def test_json_log_of_a_node_names_peer_round_and_phase(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(log_format="json", level="info", console=None)
    logs.context.peer = "12D3A"
    RunProgress(lambda text, share=None, *, of="": None)(PhaseChanged(phase="reduce", round=7))
    logging.getLogger("shoal.x").info("a record")
    record = json.loads(capsys.readouterr().err)
    assert (record["peer"], record["round"], record["phase"]) == ("12D3A", 7, "reduce")
    logs.configure(log_format="json", level="info", console=None)
    logging.getLogger("shoal.x").info("another")
    assert "peer" not in json.loads(capsys.readouterr().err)


def test_json_log_has_no_live_line_even_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_display(log_format="json", log_level="info") as show_now:
        show_now("round 1")
        logging.getLogger("shoal.x").info("a record")
    assert [json.loads(line)["message"] for line in terminal.getvalue().splitlines()] == ["a record"]


def test_table_cells_are_no_markup() -> None:
    shown = io.StringIO()
    render.print_table(("peer",), [("[red]x",)], console=Console(file=shown, width=40))
    assert "[red]x" in shown.getvalue()
