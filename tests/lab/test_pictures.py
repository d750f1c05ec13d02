"""Pictures of the documents: each is shown and made by a command, and real terminals say what they are to say."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from shoal.lab import pictures
from shoal.lab.terminal import Terminal
from shoal.protocol.errors import NetworkError

ROOT = Path(__file__).resolve().parents[2]
DRAWN_BY_HAND = {"node.svg", "round.svg"}
CERTIFIED = re.compile(
    r"[\d:]{8} round (\d+) certified: (\d) of (\d) contributed(?:, without elm)?"
    r"(?:, training loss [\d.]{1,5})?(?:, held-out [\d.]{1,5} \(round (\d+)\))?, [\d.]+ s"
)

needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="a terminal without a screen needs tmux")


def test_each_picture_is_shown_on_a_page_and_made_by_the_command_or_drawn_by_hand() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    shown = {name for page in pages for name in re.findall(r"\]\((?:docs/)?images/([\w.-]+)\)", page.read_text())}
    kept = {path.name for path in (ROOT / "docs" / "images").iterdir()}
    assert shown == kept == DRAWN_BY_HAND | set(pictures.SHOTS) | set(pictures.TERMINALS)


@needs_tmux
def test_terminal_shows_what_a_command_writes_in_its_colours_and_is_gone_afterwards(tmp_path: Path) -> None:
    script = r"printf '\033[31mred\033[0m %s\n' $FISH; printf '=%.0s' {1..50}; printf ' <end>\n'; read; echo over; read"
    with Terminal(["bash", "-c", script], folder=tmp_path, settings={"FISH": "a fish"}, width=40, height=8) as terminal:
        terminal.until("<end>", 30)
        assert terminal.text.split("\n")[:2] == ["red a", "red fish"]
        assert f"{'=' * 50} <end>" in terminal.text
        assert terminal.screen.split("\n")[2:4] == ["=" * 40, f"{'=' * 10} <end>"]
        drawn = terminal.picture("what a fish <is>")
        assert "what&#160;a&#160;fish" in drawn.replace(" ", "&#160;")
        assert "://" not in drawn.replace("http://www.w3.org/2000/svg", "").replace("https://www.textualize.io", "")
        (red,) = re.findall(r'<text class="(terminal-r\d+)"[^>]*>red</text>', drawn)[:1]
        (plain,) = re.findall(r'<text class="(terminal-r\d+)"[^>]*>&#160;a</text>', drawn)
        assert red != plain
        terminal.type("Enter")
        terminal.until("over", 30)
        with pytest.raises(NetworkError, match=r"did not show .never. within 0\.2 s but .red a"):
            terminal.until("never", 0.2)
        place = Path(terminal.place)
        assert (place / "server").is_socket()
    assert not place.exists()


@pytest.mark.long
@needs_tmux
def test_terminals_tell_who_is_missing_who_comes_and_dies_and_what_the_model_says(tmp_path: Path) -> None:
    told = {shown.picture: (shown.terminal.text, shown.terminal.screen) for shown in pictures.terminals(tmp_path)}
    alone, _ = told["terminal-alone.svg"]
    (seconds,) = re.findall(r"warning linked with nobody for (\d+) s; looked for: .*Tried: nobody listens at .*", alone)
    assert int(seconds) < 10
    assert "--join, or a fresh `shoal link`" in alone
    assert re.search(r"the page of this node: http://127\.0\.0\.1:\d+/", alone)

    assert len(re.findall("no peer has the state of round 0", alone)) == 1

    run, _ = told["terminal-run.svg"]
    lines = [line for line in run.splitlines() if re.match(r"\d\d:\d\d:\d\d ", line)]
    assert len(set(lines)) == len(lines), "nothing is said twice"
    assert max(map(len, lines)) < 400
    assert [line[9:] for line in lines if line[9:].startswith("elm ")] == ["elm is here", "elm is gone"]
    assert re.search(r"this node is oak \(…\w{6}\)$", run, re.MULTILINE)
    rounds = [CERTIFIED.fullmatch(line) for line in lines if " certified" in line]
    assert None not in rounds
    counted = [tuple(map(int, found.groups()[:3])) for found in rounds if found]
    assert [number for number, _, _ in counted] == list(range(1, len(counted) + 1))
    assert {(made, of) for _, made, of in counted} >= {(1, 1), (2, 2)}
    assert any(found[4] for found in rounds if found), "held-out loss, with the round that it was measured after"

    _, watch = told["terminal-watch.svg"]
    assert re.search(r'round \d+: "The " → "', watch)
    assert "held-out" in watch
