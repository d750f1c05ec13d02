"""`shoal amend`: this node's user proposes other settings than those in force."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.cli.options import Withdraw
from shoal.cli.status import ORDER_DEADLINE_S
from shoal.node.control_client import request
from shoal.node.option import Option
from shoal.node.options import DEFAULT_DATA_DIR, DataDir
from shoal.protocol.errors import ConfigError
from shoal.protocol.voting import VOTERS


def amend(
    settings: Annotated[
        list[str] | None,
        Option("--set", help="As in the manifest, such as sync.inner_steps=60. Repeatable.", metavar="KEY=VALUE"),
    ] = None,
    add_voter: Annotated[
        list[str] | None,
        Option(
            "--add-voter", help="Where voters are named: a member that votes from then on. Repeatable.", metavar="PEER"
        ),
    ] = None,
    remove_voter: Annotated[
        list[str] | None,
        Option("--remove-voter", help="A voter that no longer votes, and may contribute. Repeatable.", metavar="PEER"),
    ] = None,
    by_authority: Annotated[
        bool, Option("--by-authority", help="Sign it with the swarm's authority key: members follow by themselves.")
    ] = False,
    withdraw: Withdraw = False,
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Propose to the members to go on with other settings: steps, learning rates, codec, deadlines; or other voters.

    It happens once a quorum of the members agrees: those whose users order the same, or, with --by-authority, all that
    do not run with --no-authority-amendments. Rounds go on until then; the round after that is by the new settings.
    """
    voters = [*((peer, "true") for peer in add_voter or ()), *((peer, "false") for peer in remove_voter or ())]
    settings = [*(settings or ()), *(f"{VOTERS}.{peer}={votes}" for peer, votes in voters)]
    if bool(settings) == withdraw or (withdraw and by_authority):
        raise ConfigError("write `shoal amend --set SECTION.KEY=VALUE`, or `shoal amend --withdraw`")
    if withdraw:
        request(data_dir, "amend", deadline_s=ORDER_DEADLINE_S)
        typer.echo(f"the node on {data_dir} does not want to amend any more")
        return
    op = "amend_by_authority" if by_authority else "amend"
    request(data_dir, op, *settings, deadline_s=ORDER_DEADLINE_S)
    typer.echo(
        f"the node on {data_dir} proposes to amend {', '.join(settings)}; it happens once a quorum of the "
        "members agrees: `shoal status` shows who does"
    )
