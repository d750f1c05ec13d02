"""A real terminal without a screen, by tmux: what a person sees of a command there, as text and as a picture."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from shoal.protocol.errors import ConfigError, NetworkError

LOOK_S = 0.1
WIDTH_CHARS = 112
"""The line of a round fits, and a page of the documents shows it without making letters small."""
FONT = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)
"""What rich would have a reader's browser fetch from another host."""


class Terminal:
    """A terminal in which one command runs; a context manager, after which nothing of it is left.

    settings: are added to the environment. Raises ConfigError where there is no tmux.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        folder: Path,
        settings: Mapping[str, str] = MappingProxyType({}),
        width: int = WIDTH_CHARS,
        height: int = 30,
    ) -> None:
        if shutil.which("tmux") is None:
            raise ConfigError("a terminal without a screen needs tmux; apt-get install tmux")
        self._command, self._folder, self._settings = command, folder, settings
        self._width, self._height = width, height

    def __enter__(self) -> Self:
        self.place = tempfile.mkdtemp(prefix="shoal-terminal-")
        size = ("-x", str(self._width), "-y", str(self._height))
        given = [word for item in self._settings.items() for word in ("-e", "=".join(item))]
        try:
            self._tmux("new-session", "-d", *size, *given, "-c", str(self._folder), *self._command)
            self._tmux("set-option", "remain-on-exit", "on")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        subprocess.run([*self._server, "kill-server"], capture_output=True, check=False)
        shutil.rmtree(self.place, ignore_errors=True)

    @property
    def text(self) -> str:
        """All that was written so far and still stands there, what has scrolled away too; long lines are whole."""
        return self._tmux("capture-pane", "-p", "-J", "-S", "-")

    @property
    def screen(self) -> str:
        """Lines that are on the screen now."""
        return self._tmux("capture-pane", "-p")

    def type(self, keys: str) -> None:
        """Press keys, as tmux names them."""
        self._tmux("send-keys", keys)

    def kill(self) -> None:
        """End the command as a power cut would."""
        os.kill(int(self._tmux("list-panes", "-F", "#{pane_pid}")), signal.SIGKILL)

    def until(self, pattern: str, deadline_s: float) -> re.Match[str]:
        """Wait until the text has a match of `pattern`. Raises NetworkError at the deadline."""
        ends_at = time.monotonic() + deadline_s
        while (found := re.search(pattern, self.text, re.MULTILINE)) is None:
            if time.monotonic() > ends_at:
                raise NetworkError(f"the terminal did not show {pattern!r} within {deadline_s:g} s but {self.text!r}")
            time.sleep(LOOK_S)
        return found

    def picture(self, title: str) -> str:
        """Return the screen as an SVG, whose title is `title`."""
        console = Console(width=self._width, record=True, file=io.StringIO())
        lines = self._tmux("capture-pane", "-p", "-e").rstrip().splitlines()
        for line in lines:
            console.print(Text.from_ansi(line), soft_wrap=True, highlight=False)
        drawn = console.export_svg(title=title, theme=MONOKAI, unique_id="terminal")
        return FONT.sub("", drawn)

    @property
    def _server(self) -> list[str]:
        return ["tmux", "-S", f"{self.place}/server", "-f", "/dev/null"]

    def _tmux(self, *arguments: str) -> str:
        done = subprocess.run([*self._server, *arguments], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise NetworkError(f"tmux {arguments[0]}: {done.stderr.strip()}")
        return done.stdout
