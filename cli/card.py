"""`shoal card`: what this node gave, signed; and whether such a card holds."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from shoal.cli.options import AsJson
from shoal.cli.text import count, in_one_line
from shoal.node.option import Option
from shoal.node.options import DEFAULT_DATA_DIR, DataDir

if TYPE_CHECKING:
    from shoal.node.card import Card

BAD = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CardOptions:
    """Options of `shoal card`."""

    output: Annotated[Path | None, Option("-o", "--output", help="The file to write the card to.", metavar="FILE")] = (
        None
    )
    check: Annotated[
        Path | None, Option("--check", help="Hold this card against the chain in --data-dir.", metavar="FILE")
    ] = None
    data_dir: DataDir = DEFAULT_DATA_DIR
    as_json: AsJson = False


def card(options: CardOptions) -> None:
    """Show what this node gave its swarm, as a card that it signs; or check another's.

    Everybody who has the swarm's chain can check in how many rounds a node was listed: `shoal card --check FILE`, with
    any member's data folder or checkpoint as --data-dir. What it gave, in rounds and tokens, is its own word: its page
    says the same.
    """
    from shoal.node.card import make_card, problems_of, read_card
    from shoal.node.state.store import write_output

    found = make_card(options.data_dir) if options.check is None else read_card(options.check)
    problems = [] if options.check is None else problems_of(found, options.data_dir)
    if options.output is not None:
        write_output(options.output, msgspec.json.encode(found) + b"\n")
    if options.as_json:
        typer.echo(msgspec.json.encode(found))
    else:
        for line in to_lines(found):
            typer.echo(line)
    for problem in problems:
        typer.echo(f"shoal: this card does not hold: {problem}", err=True)
    if problems:
        raise typer.Exit(BAD)
    if options.check is not None and not options.as_json:
        typer.echo("checked    signed by that node, and its rounds are as the certificates have them")


def to_lines(card: Card) -> list[str]:
    """The card for people."""
    since = "" if card.since is None else time.strftime(", since %Y-%m-%d", time.localtime(card.since))
    gave = (
        f"gave {card.tokens:,} tokens in {count(card.gave_rounds, 'round')}"
        if card.gave_rounds
        else "gave nothing yet: it was paused, or came too late to count"
    )
    return [
        f"swarm      {in_one_line(card.name)}, {card.swarm[:16]}…",
        f"node       {card.peer}",
        f"listed     after {count(card.rounds, 'certified round')} from {card.first} on, up to {card.last}",
        f"own word   {gave}{since}",
    ]
