"""`shoal report`: several nodes' event logs as one page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.text import count
from shoal.node.option import Option


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOptions:
    """Options of `shoal report`."""

    places: Annotated[
        list[Path],
        typer.Argument(
            help="Data folders of nodes, event logs themselves, or the --out folder of a testnet.", metavar="DIR…"
        ),
    ]
    title: Annotated[str, Option("--title", help="Of the page; without it, who is in it.", metavar="TEXT")] = ""
    output: Annotated[Path, Option("-o", "--output", help="The page to write.", metavar="FILE")] = Path("report.html")


def report(options: MergeOptions) -> None:
    """Merge several nodes' event logs into one page: who was there, what was certified, what went wrong and when.

    Where rollouts are shared it shows rewards, by task too, groups made, taken and refused, and who samples how much;
    of a text model, what it said. Clocks of different machines are aligned by the rounds that their nodes certified
    together. Lines that are cut or damaged are counted and stepped over: logs of running and of killed nodes will do.
    """
    from shoal.node.state.store import write_output
    from shoal.testnet.reports.page_merged import render_merged
    from shoal.testnet.reports.report_merge import find_logs, merge

    history = merge(find_logs(options.places))
    write_output(options.output, render_merged(history, options.title).encode())
    damaged = sum(log.damaged for log in history.logs)
    rounds = count(history.rounds.number, "round")
    broken = f", {count(damaged, 'damaged line')} stepped over" if damaged else ""
    typer.echo(f"wrote {options.output}: {count(len(history.logs), 'event log')}, {rounds}{broken}")
    if history.rounds.forks:
        typer.echo(f"note: {count(len(history.rounds.forks), 'round')} have two digests; the page names them", err=True)
