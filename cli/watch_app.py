"""The live view of `shoal watch`, drawn by Textual. The node is asked in a worker thread, never in the view's own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ClassVar, Final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Label, ProgressBar, RichLog, Static, TabbedContent, TabPane

from shoal.cli.text import figure
from shoal.cli.watch_model import Picture, Watcher, bars
from shoal.protocol.names import short

PERIOD_S: Final = 0.5
NARROW_COLUMNS: Final = 120
"""Below which PeerIds, beside names, are cut to their ends, by which people tell nodes apart."""
PANES: Final = ("members", "loss", "faults", "samples", "rollouts")


class ConfirmLeave(ModalScreen[bool]):
    """Question to the user, before the node leaves."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "leave"),
        Binding("n,escape", "answer(False)", "stay"),
    ]
    CSS = "ConfirmLeave { align: center middle } #question { border: round $error; padding: 1 2; width: auto }"

    def compose(self) -> ComposeResult:
        """Compose the one question."""
        yield Label("Let this node leave the swarm and stop?  y: leave   n: stay", id="question")

    def action_answer(self, leave: bool) -> None:
        """Hand the answer to the view."""
        self.dismiss(leave)


class WatchApp(App[None]):
    """Members, the round, loss, bytes and faults of one running node; waits for the node while there is none."""

    TITLE = "shoal"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: auto; padding: 0 1 } #headline { text-style: bold } #trouble { color: $error; text-style: bold }
    #phases { width: 1fr } #round { width: auto } #bar { height: 1 }
    TabbedContent { height: 1fr } DataTable { height: 1fr } #curve { height: 1fr; margin: 1 1 }
    RichLog { height: 1fr; padding: 0 1 } .quiet { color: $text-muted }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("ctrl+c", "quit", "quit", show=False, priority=True),
        Binding("p", "order('pause')", "pause"),
        Binding("r", "order('resume')", "resume"),
        Binding("l", "leave", "leave"),
        Binding("tab", "next_pane", "next pane", priority=True),
        Binding("1", "pane('members')", "members", show=False),
        Binding("2", "pane('loss')", "loss", show=False),
        Binding("3", "pane('faults')", "faults", show=False),
        Binding("4", "pane('samples')", "samples", show=False),
        Binding("5", "pane('rollouts')", "rollouts", show=False),
    ]

    def __init__(self, watcher: Watcher, *, period_s: float = PERIOD_S) -> None:
        super().__init__()
        self._watcher = watcher
        self._period_s = period_s
        self._over = threading.Event()
        self._faults: tuple[str, ...] = ()
        self.picture: Picture | None = None
        self.pictures = 0

    def compose(self) -> ComposeResult:
        """A head of a few lines, and a pane for each of members, loss, faults, samples and rollouts."""
        with Vertical(id="head"):
            yield Static("asking the node …", id="headline")
            yield Static("", id="trouble")
            with Horizontal(id="bar"):
                yield Static("", id="phases")
                yield ProgressBar(total=100, show_eta=False, id="round")
            yield Static("", id="bytes", classes="quiet")
            yield Static("", id="peers", classes="quiet")
        with TabbedContent(initial="members"):
            with TabPane("1 Members", id="members"):
                yield DataTable(id="table", cursor_type="row", zebra_stripes=True)
            with TabPane("2 Loss", id="loss"):
                yield Static("", id="loss-text", classes="quiet")
                yield Static("", id="curve")
            with TabPane("3 Events", id="faults"):
                yield RichLog(id="log", wrap=True, max_lines=500)
            with TabPane("4 Samples", id="samples"), VerticalScroll():
                yield Static("", id="samples-text")
            with TabPane("5 Rollouts", id="rollouts"), VerticalScroll():
                yield Static("", id="rollouts-text")
        yield Footer()

    def on_mount(self) -> None:
        """Begin to ask."""
        self.query_one("#table", DataTable).add_columns("member", "id", "phase", "tokens/s", "reached")
        self.run_worker(self._ask, thread=True, name="ask")

    def on_unmount(self) -> None:
        """Stop asking."""
        self._over.set()

    def _ask(self) -> None:
        """Look, hand the picture over, wait, again and again: in a thread of its own."""
        while not self._over.is_set():
            picture = self._watcher.look()
            if not self._hand_over(lambda picture=picture: self.show(picture)):  # type: ignore[misc]
                return
            self._over.wait(self._period_s)

    def _hand_over(self, call: Callable[[], None]) -> bool:
        """Let the view do something; False if it is gone."""
        if self._over.is_set() or not self.is_running:
            return False
        try:
            self.call_from_thread(call)
        except RuntimeError:  # it ended this moment
            return False
        return True

    def show(self, picture: Picture) -> None:
        """Draw one picture."""
        self.picture = picture
        self.pictures += 1
        here = picture.status is not None
        self.query_one("#headline", Static).update(Text(picture.headline(self.size.width - 2)))
        self.query_one("#trouble", Static).update(Text("\n".join(picture.advice)))
        self.query_one("#phases", Static).update(Text(picture.phase_line))
        self.query_one("#round", ProgressBar).update(progress=100 * picture.round_share if here else 0)
        self.query_one("#bytes", Static).update(Text(picture.bytes_line))
        self.query_one("#peers", Static).update(Text(picture.peer_line))
        self._show_members(picture)
        self._show_loss(picture)
        samples = "\n".join(picture.samples) or "nothing was sampled yet: workloads of text say something"
        self.query_one("#samples-text", Static).update(Text(samples))
        self.query_one("#rollouts-text", Static).update(Text("\n".join(picture.rollout_lines)))
        panes = self.query_one(TabbedContent)
        tab = panes.get_tab("rollouts")
        if tab.display != bool(picture.rollout_lines):
            panes.show_tab("rollouts") if picture.rollout_lines else panes.hide_tab("rollouts")
        if picture.faults != self._faults:
            self._show_faults(picture.faults)

    def _show_members(self, picture: Picture) -> None:
        """Change the cells that changed, so that the cursor stays where it is."""
        table = self.query_one("#table", DataTable)
        narrow = self.size.width < NARROW_COLUMNS
        rows = {
            (row.peer, style): (row.name, short(row.peer) if narrow else row.peer, row.phase, row.speed, row.reach)
            for shown, style in ((picture.members, ""), (picture.gone, "dim"))
            for row in shown
        }
        if [key.value for key in table.rows] != [f"{peer}{style}" for peer, style in rows]:
            table.clear()
            for (peer, style), cells in rows.items():
                table.add_row(*(Text(cell, style) for cell in cells), key=f"{peer}{style}")
            return
        for line, ((_, style), cells) in enumerate(rows.items()):
            for column, cell in enumerate(cells):
                if str(table.get_cell_at((line, column))) != cell:  # type: ignore[arg-type]  # a Coordinate is a tuple
                    table.update_cell_at((line, column), Text(cell, style), update_width=True)  # type: ignore[arg-type]

    def _show_loss(self, picture: Picture) -> None:
        points, told = picture.losses or picture.rewards, "nobody has evaluated yet"
        if points:
            what, unit = ("", f" {picture.metric}") if picture.losses else ("reward ", "")
            told = f"{what}{figure(points[0][1])} → {figure(points[-1][1])}{unit}, up to round {points[-1][0]:g}"
        self.query_one("#loss-text", Static).update(Text(told))
        curve = self.query_one("#curve", Static)
        lines = bars(points, curve.size.width, max(3, curve.size.height - 2)) if points and curve.size.width else []
        curve.update(Text("\n".join(lines), no_wrap=True))

    def _show_faults(self, faults: tuple[str, ...]) -> None:
        log = self.query_one("#log", RichLog)
        log.clear()
        for line in faults:
            log.write(Text(line))
        self._faults = faults

    def action_order(self, op: str) -> None:
        """Give the node an order, in a thread, and show the reply."""

        def ask() -> None:
            told = self._watcher.order(op)
            self._hand_over(lambda: self.notify(told, markup=False))

        self.run_worker(ask, thread=True, name=op)

    def action_leave(self) -> None:
        """Leave, if the user means it."""
        self.push_screen(ConfirmLeave(), lambda sure: self.action_order("leave") if sure else None)

    def action_pane(self, name: str) -> None:
        """Show this pane, if there is one."""
        if name in self._panes():
            self.query_one(TabbedContent).active = name

    def action_next_pane(self) -> None:
        """Show the pane after this one."""
        panes, shown = self.query_one(TabbedContent), self._panes()
        panes.active = shown[(shown.index(panes.active) + 1) % len(shown)]

    def _panes(self) -> tuple[str, ...]:
        """Panes that there are: of rollouts only where some are shared."""
        return PANES if self.picture is not None and self.picture.rollout_lines else PANES[:-1]
