"""The commands that talk to a running node through its control socket: status, leave, pause, resume."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import typer

from shoal.cli.options import AsJson
from shoal.cli.render import print_peers, print_status
from shoal.node.control_client import PeerList, Status, request
from shoal.node.option import Option
from shoal.node.options import DEFAULT_DATA_DIR, DataDir
from shoal.protocol.errors import NetworkError

STATUS_DEADLINE_S = 10.0
ORDER_DEADLINE_S = 35.0


Answer = TypeVar("Answer", Status, PeerList)
Peers = Annotated[bool, Option("--peers", help="List all peers that the node knows, one a line.")]


def status(data_dir: DataDir = DEFAULT_DATA_DIR, as_json: AsJson = False, peers: Peers = False) -> None:
    """Show what the node that runs here knows: its phase, round, members, and addresses to give to others.

    All peers are summed up, the members listed, those in trouble first where they are many; missing ones are named,
    with what that means and what helps. `--peers` lists every peer: `shoal status --peers | grep silent`. `shoal watch`
    shows the same live, --json prints it for programs. Ends with exit code 1 where no node runs on --data-dir.
    """
    known = _asked(data_dir, "peers", PeerList) if peers else _asked(data_dir, "status", Status)
    if as_json:
        typer.echo(msgspec.json.encode(known))
    elif isinstance(known, PeerList):
        print_peers(known.peers)
    else:
        print_status(known)


def _asked(data_dir: Path, op: str, kind: type[Answer]) -> Answer:
    reply = request(data_dir, op, deadline_s=STATUS_DEADLINE_S)
    try:
        return msgspec.convert(reply, kind)
    except msgspec.ValidationError as error:
        raise NetworkError(
            f"the node on {data_dir} is of another version than this command ({error}); restart it"
        ) from None


def leave(data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Let the node that runs here leave the swarm gracefully, and stop.

    The others go on at once, without waiting for it. Where it alone has the newest state, or the only vote, it stays
    until others have that too, 20 s at most. It may come back any time: `shoal run` with the same --data-dir.
    """
    request(data_dir, "leave", deadline_s=ORDER_DEADLINE_S)
    typer.echo(f"the node on {data_dir} is leaving; it stops as soon as the others know")


def pause(data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Let the node that runs here stop using the accelerator; it stays a member.

    It goes on to vote, to serve the state and to follow the rounds, so that `shoal resume` takes it back in at once.
    """
    request(data_dir, "pause", deadline_s=ORDER_DEADLINE_S)
    typer.echo(f"the node on {data_dir} stops training; go on with `shoal resume`")


def resume(data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Let the node that runs here train again, after `shoal pause`."""
    why = request(data_dir, "resume", deadline_s=ORDER_DEADLINE_S).get("why_paused")
    typer.echo(f"the node on {data_dir} trains again{f' when it may: {why}' if why else ''}")
