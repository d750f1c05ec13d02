"""`shoal rebase`: the authority goes on without members that are gone for good."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from shoal.cli.status import ORDER_DEADLINE_S
from shoal.cli.text import count, in_one_line
from shoal.node.control_client import request
from shoal.node.option import Option
from shoal.node.options import DEFAULT_DATA_DIR, DataDir
from shoal.protocol.errors import ConfigError, NetworkError


class Rebased(msgspec.Struct, frozen=True, kw_only=True):
    """The node's reply: the term that was opened, on which round, and its electorate."""

    term: str
    round: int
    members: list[str]


def rebase(
    forget: Annotated[
        list[str] | None,
        Option("--forget", help="A member that is gone for good. More may follow it.", metavar="PEER…"),
    ] = None,
    keep_all: Annotated[
        bool, Option("--keep-all", help="Forget nobody: after a fork, or where a node took over its key.")
    ] = False,
    more: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Go on without members that are gone for good, where those that are left are no quorum.

    It takes the swarm's authority key and a node that runs here and has the newest certified round: rounds that others
    certified beyond it are abandoned. Whom it forgets may join again. Where `shoal status` says that a round was
    certified twice, or that this node took over its key, --keep-all goes on with everybody.
    """
    if bool(forget) == keep_all or any(peer.startswith("-") for peer in forget or ()):  # an option taken for a peer
        raise ConfigError(
            "name who is gone for good: `shoal rebase --forget PEER`; `shoal status` lists the members; after a fork "
            "`--keep-all` forgets nobody"
        )
    reply = request(data_dir, "rebase", *(forget or ()), *(more or ()), deadline_s=ORDER_DEADLINE_S)
    try:
        done = msgspec.convert(reply, Rebased)
    except msgspec.ValidationError as error:
        raise NetworkError(
            f"the node on {data_dir} is of another version than this command ({error}); restart it"
        ) from None
    members = ", ".join(in_one_line(peer) for peer in done.members)
    typer.echo(
        f"the swarm goes on from round {done.round} in term {in_one_line(done.term)} with "
        f"{count(len(done.members), 'member')}: {members}"
    )
