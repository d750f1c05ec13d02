"""`shoal watch`: a live view of a running node in the terminal."""

from __future__ import annotations

import sys

import typer

from shoal.node.options import DEFAULT_DATA_DIR, DataDir
from shoal.protocol.errors import ConfigError


def watch(data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Watch the node that runs here: members, the round, loss, bytes and faults, live in the terminal.

    Keys: p pauses the training and r resumes it, l leaves the swarm after a question, Tab or 1 2 3 switch panes,
    q quits the view; the node goes on. While no node runs, the view says how to start one and waits for it.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("watch draws on a terminal, and this is none; use `shoal status`, or `ssh -t` to get one")
    from shoal.cli.watch_app import WatchApp
    from shoal.cli.watch_model import Watcher

    app = WatchApp(Watcher(data_dir))
    app.run(mouse=False)
    if app.return_code:
        raise typer.Exit(app.return_code)
