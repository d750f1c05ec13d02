"""`shoal run 'shoal:…'`, or `shoal run -`: from a swarm link to the manifest and the members to join.

The manifest comes from any member that the link names, or that is found on the local network, and is checked against
its SwarmId; it can name only workloads that are installed here or that the user allows. A data folder that is of this
swarm already has the manifest, and no member has to be reached for it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TextIO

from shoal.cli.imports import importing
from shoal.cli.logs import FOR_USER
from shoal.cli.options import NODE_KEY_NAME
from shoal.node.discovery.credentials import keep_checkpoint, keep_invite
from shoal.node.state.binding import check_free_for
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import Identity
from shoal.protocol.manifest import Manifest, load_manifest
from shoal.protocol.manifest_workload import check_workload_allowed
from shoal.protocol.swarm_link import LINE_LIMIT_CHARS, SwarmLink, link_in, parse_link

FROM_STDIN = "-"
LINES_LIMIT = 8
"""Of what `shoal link` and `shoal invite` say: the line that joins, and notes."""

log = logging.getLogger(FOR_USER)


def given_link(text: str) -> str | None:
    """The link that a user gave in place of a manifest, or has on standard input for `-`; None for a file's path.

    Raises ConfigError where there is none on standard input.
    """
    return read_link(sys.stdin) if text == FROM_STDIN else link_in(text)


def read_link(source: TextIO) -> str:
    """The link in the first line of `source` that is no note, each read no further than a line that joins is long.

    Raises ConfigError.
    """
    try:
        lines = (source.readline(LINE_LIMIT_CHARS + 1) for _ in range(LINES_LIMIT))
        link = link_in(next((line for line in lines if not line.startswith("note: ")), ""))
    except UnicodeDecodeError:
        link = None
    if link is None:
        raise ConfigError("there is no link on standard input; give it as `shoal invite` or `shoal link` prints it")
    return link


def manifest_by(link: SwarmLink, data_dir: Path, *, tell: Callable[[str], None], within_s: float) -> Manifest:
    """The manifest of a link's swarm: of this data folder, or from a member. Raises ConfigError, NetworkError.

    tell: is given a line when members are asked, and one if they take long.
    """
    return _kept(link, data_dir) or _fetched(link, locally=True, tell=tell, within_s=within_s)


def follow_link(
    text: str,
    *,
    data_dir: Path,
    join: Sequence[str],
    entry_points: Collection[str],
    allowed: Collection[str],
    locally: bool = True,
) -> tuple[Manifest, tuple[str, ...]]:
    """The manifest of the link's swarm, and the addresses to join, those of `join` included.

    locally: whether members are looked for on the local network too. An invite and a checkpoint are kept in the data
    folder. Raises ConfigError for a link that is damaged or for another node, a data folder of another swarm, a
    workload that is not installed; NetworkError if no member gives the manifest.
    """
    link = parse_link(text)
    addresses = tuple(dict.fromkeys((*link.addresses, *join)))
    asked = SwarmLink(swarm=link.swarm, addresses=addresses, invite=link.invite)
    manifest = _kept(link, data_dir) or _fetched(asked, locally=locally)
    check_workload_allowed(manifest.workload, entry_points=entry_points, allowed=allowed)
    if link.invite is not None:
        peer = Identity.load_or_create(data_dir / NODE_KEY_NAME).peer_id
        link.invite.credential(link.swarm, peer)  # raises if it is for another node
        keep_invite(data_dir, link.swarm, link.invite)
    if link.checkpoint is not None:
        keep_checkpoint(data_dir, link.swarm, link.checkpoint)
    return manifest, addresses


def _kept(link: SwarmLink, data_dir: Path) -> Manifest | None:
    """The manifest that this data folder has from an earlier start. Raises ConfigError if it is another swarm's."""
    path = data_dir / "swarm.toml"
    if not (data_dir / "swarm").exists() or not path.exists():
        return None
    manifest = load_manifest(path)
    if manifest.swarm_id == link.swarm:
        return manifest
    check_free_for(data_dir, link.swarm)
    return None


def _fetched(
    link: SwarmLink, *, locally: bool, tell: Callable[[str], None] = log.info, within_s: float | None = None
) -> Manifest:
    tell(f"asking for the manifest whom the link names{', and the local network' if locally else ''}")
    with importing():
        import trio

        from shoal.swarm.manifest_exchange import fetch_manifest
        from shoal.swarm.rendezvous.mdns import LocalDiscovery

    nobody = Identity.generate().peer_id
    finding = LocalDiscovery(peer=nobody, swarm_id=link.swarm.hex(), addresses=None) if locally else None
    fetch = partial(fetch_manifest, link, on_wait=tell, locally=finding)
    return trio.run(fetch if within_s is None else partial(fetch, deadline_s=within_s))
