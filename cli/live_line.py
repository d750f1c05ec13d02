"""One line below the log of a terminal that says what goes on right now: a text, a bar where a share is known, a time.

The time is of what the line is about, and stops only with the line: what is done to the last step may yet be waited
for. It and the log share one console, which draws the line anew after every record: neither can write into the other.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Final

from rich.console import Console, RenderableType
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.progress_bar import ProgressBar
from rich.text import Text

from shoal.cli.text import escaped

BAR_CHARS: Final = 24
TIMES_LIMIT: Final = 2
"""Of the newest things that the line is about: a round is reduced while the next one's steps are made."""


class _Bar(ProgressColumn):
    """The share that is done, nothing where none is known."""

    def render(self, task: Task) -> RenderableType:
        share = task.fields["share"]
        return Text("") if share is None else ProgressBar(total=1.0, completed=share, width=BAR_CHARS)


class _Share(ProgressColumn):
    def render(self, task: Task) -> RenderableType:
        share = task.fields["share"]
        return Text("" if share is None else f"{share:.0%}")


class _Time(ProgressColumn):
    """Time since what the line is about began, and what that is."""

    def render(self, task: Task) -> RenderableType:
        of, began = task.fields["of"], task.fields["began"]
        past = timedelta(seconds=int(task.get_time() - began))
        return Text(f"{past} of {of}" if of else str(past), style="progress.elapsed")


class LiveLine:
    """Line that `live_line` yields: call it with the text to show."""

    def __init__(self, progress: Progress, task: TaskID, clock: Callable[[], float]) -> None:
        self._progress = progress
        self._task = task
        self._clock = clock
        self._began = {"": clock()}

    def __call__(self, text: str, share: float | None = None, *, of: str = "") -> None:
        """Show `text`; share: how much of it is done, in 0..1, None where that is not known. From any thread.

        of: what the time beside it is of, which begins with the first text about that; "": all that the command does.
        """
        began = self._began.setdefault(of, self._clock())
        if len(self._began) > TIMES_LIMIT:
            del self._began[next(iter(self._began))]
        done = None if share is None else min(max(share, 0.0), 1.0)
        self._progress.update(self._task, description=escaped(text), share=done, of=of, began=began)


@contextlib.contextmanager
def live_line(console: Console, *, clock: Callable[[], float] = time.monotonic) -> Iterator[LiveLine]:
    """A line on this console until the end of the block, when it vanishes."""
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        _Bar(),
        _Share(),
        _Time(),
        console=console,
        transient=True,
        get_time=clock,
    )
    # Of a task without a total Rich never says that it is finished, which would stop its time and hide the spinner.
    with progress:
        yield LiveLine(progress, progress.add_task("starting", total=None, share=None, of="", began=clock()), clock)
