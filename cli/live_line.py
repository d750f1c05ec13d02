"""One line below the log of a terminal that says what goes on right now: a text, and a bar where a share is known.

It and the log share one console, which draws the line anew after every record: neither can write into the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from rich.console import Console, RenderableType
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar
from rich.text import Text

from shoal.cli.text import escaped

BAR_CHARS: Final = 24


class _Bar(ProgressColumn):
    """The share that is done, nothing where none is known."""

    def render(self, task: Task) -> RenderableType:
        if task.total is None:
            return Text("")
        return ProgressBar(total=task.total, completed=task.completed, width=BAR_CHARS)


class _Share(ProgressColumn):
    def render(self, task: Task) -> RenderableType:
        return Text("" if task.total is None else f"{task.percentage:.0f}%")


class LiveLine:
    """Line that `live_line` yields: call it with the text to show."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def __call__(self, text: str, share: float | None = None) -> None:
        """Show `text`; share: how much of it is done, in 0..1, None where that is not known. From any thread."""
        if share is None:
            self._progress.tasks[0].total = None
            self._progress.update(self._task, description=escaped(text))
        else:
            done = min(max(share, 0.0), 1.0)
            self._progress.update(self._task, description=escaped(text), total=1.0, completed=done)


@contextlib.contextmanager
def live_line(console: Console) -> Iterator[LiveLine]:
    """A line on this console until the end of the block, when it vanishes."""
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        _Bar(),
        _Share(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    with progress:
        yield LiveLine(progress, progress.add_task("starting", total=None))
