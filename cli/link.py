"""`shoal link`, `shoal invite` and `shoal revoke`: who is let into a swarm, and with what."""

from __future__ import annotations

import re
import shlex
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from shoal.cli.status import ORDER_DEADLINE_S
from shoal.cli.text import count, in_one_line, note
from shoal.node.control_client import NodeNotRunning, request
from shoal.node.discovery.credentials import authority_key, revoke
from shoal.node.loops.loop_messages import OWN_LOOP
from shoal.node.option import Option
from shoal.node.options import DEFAULT_DATA_DIR, DataDir
from shoal.protocol.address import parse_address
from shoal.protocol.errors import ConfigError, NetworkError
from shoal.protocol.identity import Identity
from shoal.protocol.invites import make_invite, parse_holder, when
from shoal.protocol.manifest import load_manifest
from shoal.protocol.no_quorum import forgetting
from shoal.protocol.swarm_link import OWN_DATA, LinkInvite, SwarmLink, format_link, join_line, parse_link

LINK_DEADLINE_S = 10.0
LIFETIME_LIMIT_DAYS = 3650
REVOKED_AT_ONCE_LIMIT = 64
"""PeerIds of one command: as many as one request to a node has room for."""

_LIFETIME = re.compile(r"(?P<number>\d{1,6})(?P<unit>[mhd])", re.ASCII)
_UNITS_S = {"m": 60, "h": 3600, "d": 86_400}


class LinkReply(msgspec.Struct, frozen=True, kw_only=True):
    """The node's reply: its link, and whether that alone lets a stranger in. workload: "" from an older node.

    data: whether it was started with --data.
    """

    link: str
    admits: bool
    admission: str
    workload: str = ""
    data: bool = False


ONE_MEMBER = (
    "it names this node alone, which whoever joins from elsewhere needs, at this port, which --listen keeps over "
    "restarts; make another line once others are linked"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InviteOptions:
    """Options of `shoal invite`."""

    manifest: Annotated[Path, typer.Argument(help="The swarm's manifest.", metavar="MANIFEST")]
    holder: Annotated[
        str | None,
        Option(
            "--for",
            help="The node that may come, as its `shoal id` prints it. Without: whoever has the link.",
            metavar="PEER",
        ),
    ] = None
    expires: Annotated[
        str, Option("--expires", help="How long it can be used to join, such as 90m, 12h or 7d.", metavar="TIME")
    ] = "7d"
    data_dir: DataDir = DEFAULT_DATA_DIR


def link(data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Print the line with which another machine joins: `shoal run 'shoal:…'`. Takes a running node.

    It can be pasted in a shell as it stands; a training loop of one's own takes it as well, in place of a manifest.
    """
    reply = _ask_link(data_dir)
    typer.echo(join_line(reply.link, reply.workload, data=reply.data))
    if not reply.admits:
        how = "names who may join" if reply.admission == "allowlist" else "admits by invite: see `shoal invite`"
        note(f"this link lets in nobody by itself; the manifest {how}")
    if reply.data:
        note(
            "this node trains on data that --data names; whoever joins needs a copy, and names it in the place of "
            f"{OWN_DATA}"
        )
    _say_of_code(reply.workload, line=True)
    if len({parse_address(address).peer for address in parse_link(reply.link).addresses}) == 1:
        note(ONE_MEMBER)


def invite(options: InviteOptions) -> None:
    """Print a link that lets a node into a swarm with admission by invite. Takes the authority's key."""
    manifest = load_manifest(options.manifest)
    if manifest.swarm.admission != "invite":
        raise ConfigError(f"{options.manifest}: admission is {manifest.swarm.admission}; `shoal link` is all it takes")
    authority = authority_key(options.data_dir, manifest)
    bearer = Identity.generate() if options.holder is None else None
    holder = bearer.peer_id if bearer else parse_holder(options.holder or "")
    expires = int(time.time()) + parse_lifetime(options.expires)
    signed = make_invite(authority, manifest.swarm_id, holder=holder, bearer=bearer is not None, expires=expires)
    try:
        running = _running_link(options.data_dir, manifest.swarm_id)
    except NodeNotRunning:
        running = SwarmLink(swarm=manifest.swarm_id, addresses=tuple(manifest.network.bootstrap))
    made = replace(running, invite=LinkInvite(invite=signed, key=bearer))
    typer.echo(format_link(made))
    whom = "whoever has this link may join" if bearer else f"{holder} may join"
    back = f"`shoal revoke {options.manifest} {holder}` takes it back"
    note(f"{whom} until {when(expires)}; {back}")
    _say_of_code(manifest.workload.name)
    if not made.addresses:
        note("it names no address, as no node runs here: join with `shoal run LINK --join ADDRESS`")


def take_back(
    manifest: Annotated[Path, typer.Argument(help="The swarm's manifest.", metavar="MANIFEST")],
    peers: Annotated[list[str], typer.Argument(help="PeerIds of nodes, or of invites.", metavar="PEER…")],
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Shut nodes out of a swarm, or all who came with an invite for whoever has its link. Takes the authority's key."""
    swarm = load_manifest(manifest)
    named = [parse_holder(text) for text in peers]
    if len(named) > REVOKED_AT_ONCE_LIMIT:
        raise ConfigError(f"{len(named)} at once; name at most {REVOKED_AT_ONCE_LIMIT}, and then the others")
    authority_key(data_dir, swarm)
    try:
        if parse_link(_ask_link(data_dir).link).swarm != swarm.swarm_id:
            raise ConfigError(
                f"the node on {data_dir} runs another swarm than that of {manifest}; give another --data-dir"
            )
        reply = request(data_dir, "revoke", *named, deadline_s=ORDER_DEADLINE_S)
    except NodeNotRunning:
        revoke(data_dir, swarm, named)
        typer.echo(f"revoked {count(len(named), 'peer')}; the members hear of it when this node runs")
    else:
        typer.echo(f"revoked {count(len(named), 'peer')}; all members that are reached hear of it at once")
        counted = reply.get("counted")
        if counted and isinstance(counted, list):
            whom = [in_one_line(str(peer)) for peer in counted]
            note(f"revoked, and counted for a majority, which may be wanting now, until forgotten; {forgetting(whom)}")


def _say_of_code(workload: str, *, line: bool = False) -> None:
    """Tell the user which code a link's receivers need, where the workload is not an installed one.

    line: what was printed allows it already.
    """
    name = in_one_line(workload)
    if ":" in workload:
        allow = f"--allow-workload {shlex.quote(name)}"
        how = f"trust it: the line says {allow}" if line else f"trust it: {allow} behind the link"
        note(f"this swarm trains {name}; whoever joins has to have that code, and to {how}")
    elif workload == OWN_LOOP:
        note("nodes of this swarm train loops of their own: join(model, optimizer, LINK) takes the link")


def _ask_link(data_dir: Path) -> LinkReply:
    reply = request(data_dir, "link", deadline_s=LINK_DEADLINE_S)
    try:
        return msgspec.convert(reply, LinkReply)
    except msgspec.ValidationError as error:
        raise NetworkError(
            f"the node on {data_dir} is of another version than this command ({in_one_line(str(error))}); restart it"
        ) from None


def _running_link(data_dir: Path, swarm_id: bytes) -> SwarmLink:
    """The link of the node that runs here. Raises NodeNotRunning if it is of another swarm, or none is."""
    running = parse_link(_ask_link(data_dir).link)
    if running.swarm != swarm_id:
        raise NodeNotRunning(f"the node on {data_dir} runs another swarm; give the --data-dir of one that runs this")
    return running


def parse_lifetime(text: str) -> int:
    """Seconds of "90m", "12h" or "7d". Raises ConfigError."""
    match = _LIFETIME.fullmatch(text.strip())
    seconds = int(match["number"]) * _UNITS_S[match["unit"]] if match else 0
    if not 0 < seconds <= LIFETIME_LIMIT_DAYS * 86_400:
        raise ConfigError(f"--expires: {text!r} is no time; write 90m, 12h or 7d, up to {LIFETIME_LIMIT_DAYS}d")
    return seconds
