"""Credentials in the data folder: what admits a node, and what the authority has said.

invite         the invite that this node came with, as a link without addresses (0600: a bearer's is a secret)
checkpoint     what the link that this node came with says its chain has to contain, as a link without addresses
revocations    the newest list of whom the authority took back, signed
authority.key  at the authority's: makes both
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection
from pathlib import Path

from shoal.node.rounds.authority import KEY_NAME
from shoal.node.state.store import disk_errors, write_atomically
from shoal.protocol import key_file
from shoal.protocol.admission import Admission
from shoal.protocol.chain import Chain
from shoal.protocol.errors import ConfigError, RemoteError, StorageError
from shoal.protocol.folders import sync_folder
from shoal.protocol.forks import Checkpoint
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.invites import Revocations, make_revocations, reason_not_valid
from shoal.protocol.manifest import Manifest
from shoal.protocol.private_folder import make_private
from shoal.protocol.swarm_link import LINK_LIMIT_CHARS, LinkInvite, SwarmLink, format_link, parse_link
from shoal.protocol.wire import MESSAGE_LIMIT_BYTES, SwarmId, canonical, decode

INVITE_NAME = "invite"
CHECKPOINT_NAME = "checkpoint"
REVOCATIONS_NAME = "revocations"

logger = logging.getLogger(__name__)


def keep_invite(folder: Path, swarm: SwarmId, invite: LinkInvite) -> None:
    """Make `invite` the one that this node shows from its next start on. Raises StorageError."""
    _keep_link(folder / INVITE_NAME, SwarmLink(swarm=swarm, invite=invite))


def keep_checkpoint(folder: Path, swarm: SwarmId, checkpoint: Checkpoint) -> None:
    """Make `checkpoint` what a chain has to contain for this node to take it. Raises StorageError."""
    _keep_link(folder / CHECKPOINT_NAME, SwarmLink(swarm=swarm, checkpoint=checkpoint))


def _keep_link(path: Path, link: SwarmLink) -> None:
    folder = path.parent
    partial = path.with_name(path.name + ".partial")
    with disk_errors(folder):
        make_private(folder)
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()  # it may be open to others
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(format_link(link).encode())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync_folder(folder)


def kept_invite(folder: Path, swarm: SwarmId) -> LinkInvite | None:
    """The invite of this node in this swarm, None without one. Raises ConfigError for a damaged file."""
    link = _kept_link(folder / INVITE_NAME)
    return link.invite if link is not None and link.swarm == swarm else None


def kept_checkpoint(folder: Path, swarm: SwarmId) -> Checkpoint | None:
    """Checkpoint that this node's chain has to contain, None for none. Raises ConfigError for a damaged file."""
    link = _kept_link(folder / CHECKPOINT_NAME)
    return link.checkpoint if link is not None and link.swarm == swarm else None


def _kept_link(path: Path) -> SwarmLink | None:
    with disk_errors(path.parent):
        if not path.exists():
            return None
        with path.open("rb") as file:
            data = file.read(LINK_LIMIT_CHARS + 1)
    try:
        return parse_link(data.decode())
    except (ConfigError, UnicodeDecodeError):
        raise ConfigError(f"{path} is damaged; start again from the link that you were given") from None


def kept_revocations(folder: Path, manifest: Manifest) -> Revocations | None:
    """The newest list that this node has heard of; a damaged one is left out, since the members send it again."""
    path = folder / REVOCATIONS_NAME
    with disk_errors(folder):
        if not path.exists():
            return None
        with path.open("rb") as file:
            data = file.read(MESSAGE_LIMIT_BYTES + 1)
    try:
        revocations = decode(data, Revocations)
        revocations.check(manifest.swarm_id, manifest.swarm.authority)
    except RemoteError as error:
        logger.warning("%s does not hold and is ignored: %s", path, error)
        return None
    return revocations


def admission_of(
    folder: Path,
    manifest: Manifest,
    peer: PeerId,
    *,
    chain: Chain | None = None,
    named: frozenset[PeerId] = frozenset(),
    brought: LinkInvite | None = None,
) -> Admission:
    """The admission rule at the node `peer`, whose data folder this is, as its chain grows; `named` by its user.

    brought: the invite of a link with which it would start, in place of the kept one. Raises ConfigError where this
    node is revoked, the link is for another, or admission is by invite and it has none that holds; StorageError.
    """

    def keep(revocations: Revocations) -> None:
        try:
            write_atomically(folder / REVOCATIONS_NAME, canonical(revocations))
        except StorageError as error:  # it holds for this run all the same
            logger.warning("the list of revocations is not kept: %s", error)

    def join(mine: Revocations, theirs: Revocations) -> Revocations | None:
        path = folder / KEY_NAME
        if manifest.swarm.authority != peer and not path.exists():
            return None
        try:
            if path.exists() and key_file.is_encrypted(path) and key_file.given_passphrase() is None:
                raise ConfigError(f"{path} is encrypted; start the node with --key-passphrase-file to have it read")
            key = authority_key(folder, manifest)
            newer, older = (mine, theirs) if mine.is_newer_than(theirs) else (theirs, mine)
            return make_revocations(key, manifest.swarm_id, newer, older.peers)
        except ConfigError as error:
            logger.warning("others have another list of revocations; revoke anew whom it lacks: %s", error)
            return None

    kept = kept_revocations(folder, manifest)
    admission = Admission(manifest=manifest, revocations=kept, keep=keep, join=join)
    if chain is not None:
        admission.members, admission.contributed = lambda: chain.taking_part, chain.was_member
    admission.named = named
    swarm = manifest.swarm
    by_invite = swarm.admission == "invite" and peer not in (*swarm.founders, swarm.authority)
    invite = brought or (kept_invite(folder, manifest.swarm_id) if by_invite else None)
    credential = None if invite is None else invite.credential(manifest.swarm_id, peer)
    admission.credential = credential if by_invite else None
    admission.check_own(peer)
    if not by_invite:
        return admission
    if admission.credential is None:
        raise ConfigError(
            f"this swarm admits by invite and {peer} has none; ask who runs it for a link "
            f"(`shoal invite swarm.toml --for {peer}`), and start with `shoal run 'shoal:…'`"
        )
    reason = reason_not_valid(admission.credential, peer=peer, swarm=manifest.swarm_id, authority=swarm.authority)
    if reason is not None:
        raise ConfigError(reason)
    return admission


def authority_key(folder: Path, manifest: Manifest) -> Identity:
    """The key that signs invites and revocations: `authority.key`, or `node.key` where the manifest names no other.

    Raises ConfigError if neither is the authority's.
    """
    for path in (folder / KEY_NAME, folder / "node.key"):
        if path.exists() and (key := Identity.load(path)).peer_id == manifest.swarm.authority:
            return key
    raise ConfigError(
        f"this takes the key of the swarm's authority, {manifest.swarm.authority}, and {folder / KEY_NAME} is not it; "
        "give the founder's --data-dir"
    )


def revoke(folder: Path, manifest: Manifest, peers: Collection[PeerId]) -> Revocations:
    """The list after the one in this folder with these peers added, signed, and on disk. Blocks.

    Raises ConfigError where that makes no sense or the key is not here; StorageError.
    """
    key = authority_key(folder, manifest)
    if manifest.swarm.authority in peers:
        raise ConfigError("the authority cannot revoke itself; name other peers")
    before = kept_revocations(folder, manifest)
    if before is not None and set(peers) <= set(before.peers):
        return before
    revocations = make_revocations(key, manifest.swarm_id, before, peers)
    write_atomically(folder / REVOCATIONS_NAME, canonical(revocations))
    return revocations
