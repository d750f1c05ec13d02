"""`shoal rollback`: this node's user proposes to go back to a certified round."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.cli.options import Withdraw
from shoal.cli.status import ORDER_DEADLINE_S
from shoal.node.control_client import request
from shoal.node.option import Option
from shoal.node.options import DEFAULT_DATA_DIR, DataDir
from shoal.protocol.errors import ConfigError


def rollback(
    to: Annotated[
        int | None, Option("--to", help="The certified round to go back to; 0 is the initial state.", metavar="ROUND")
    ] = None,
    withdraw: Withdraw = False,
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Propose to the members to go back to a certified round: after a loss spike, or when state was lost.

    It happens once a quorum of the members agrees: those whose users order the same, and those whose --rollback says
    so. Rounds go on until then. Everything learnt since that round is dropped.
    """
    if (to is None) == (not withdraw):
        raise ConfigError("write `shoal rollback --to ROUND`, or `shoal rollback --withdraw`")
    if to is None:
        request(data_dir, "rollback", deadline_s=ORDER_DEADLINE_S)
        typer.echo(f"the node on {data_dir} does not want to go back any more")
        return
    if to < 0:
        raise ConfigError(f"--to {to}: must be 0, the initial state, or a round")
    request(data_dir, "rollback", str(to), deadline_s=ORDER_DEADLINE_S)
    typer.echo(
        f"the node on {data_dir} proposes to go back to round {to}; it happens once a quorum of the members agrees: "
        "`shoal status` shows who does"
    )
