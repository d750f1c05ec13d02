"""Admission to the swarm: the manifest's rule, an invite where it asks for one, and the authority's revocations.

    open         every key
    allowlist    the founders, `allow` and the authority
    invite       the founders, the authority, and whose record has an invite that the authority signed

In all three, a peer that the authority has revoked is refused. A signed credential is part of its user's record, so
everybody who has the record can check it, and nobody has to be asked. An invite's expiry is looked at only where its
user says hello (`reason_not_to_join`), and not with members of the last certified round, who come back.

Where there is not room for all who may be in, `Admission.rank` says which peers come first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import PeerId
from shoal.protocol.invites import Credential, Revocations, reason_expired, reason_not_valid
from shoal.protocol.manifest import Manifest
from shoal.protocol.places import Rank
from shoal.protocol.records import NodeRecord
from shoal.protocol.wire import SwarmId


def _nobody(peer: PeerId) -> bool:
    return False


def _forget(revocations: Revocations) -> None:
    """Discard the revocations, as a node without a disk does."""


def _no_key(mine: Revocations, theirs: Revocations) -> None:
    """Sign nothing, as whoever has not the authority's key."""


@dataclass(slots=True, kw_only=True, eq=False)
class Admission:
    """The rule of one swarm at one node.

    credential: this node's own. members: those of the last certified round. contributed: whether a peer was one after
    any round. named: whom this node's user named. keep: makes a list of revocations durable. clock: seconds since 1970.
    join: signs what two lists have together, None at whom the authority's key is not.
    """

    manifest: Manifest
    credential: Credential | None = None
    revocations: Revocations | None = None
    members: Callable[[], Collection[PeerId]] = tuple
    contributed: Callable[[PeerId], bool] = _nobody
    named: frozenset[PeerId] = frozenset()
    keep: Callable[[Revocations], None] = _forget
    join: Callable[[Revocations, Revocations], Revocations | None] = _no_key
    clock: Callable[[], float] = time.time
    _swarm_id: SwarmId = field(init=False)
    _listed: frozenset[PeerId] = field(init=False)
    _founding: frozenset[PeerId] = field(init=False)

    def __post_init__(self) -> None:
        swarm = self.manifest.swarm
        self._swarm_id = self.manifest.swarm_id
        self._founding = frozenset((*swarm.founders, swarm.authority))
        self._listed = self._founding.union(swarm.allow)

    def reason_not_to_know(self, peer: PeerId) -> str | None:
        """Return why a peer known by its PeerId alone is not to be dialled; None if it may be."""
        by_invite = self.manifest.swarm.admission == "invite"
        return self._reason_revoked(peer, None) or (None if by_invite else self._reason_unlisted(peer, None))

    def reason_not_admitted(self, record: NodeRecord) -> str | None:
        """Return why the peer of this record is refused, as its user reads it; None if it is admitted."""
        credential = record.credential
        return self._reason_revoked(record.peer, credential) or self._reason_unlisted(record.peer, credential)

    def reason_not_to_join(self, record: NodeRecord) -> str | None:
        """The same for a peer that says hello, of whom an invite is asked that has not expired."""
        reason = self.reason_not_admitted(record)
        if reason is None and record.peer not in self.members():
            return self.reason_too_late(record.peer, record.credential)
        return reason

    def reason_too_late(self, peer: PeerId, credential: Credential | None) -> str | None:
        """Return why a newcomer's invite is no longer good; None if it is, or none is asked of this peer."""
        if self.manifest.swarm.admission != "invite" or peer in self._listed or credential is None:
            return None
        return reason_expired(credential.invite, self.clock())

    def may_join(self, peer: PeerId, record: NodeRecord | None) -> bool:
        """True if a peer may become a member. record: its own, if known here; by invite nobody may without."""
        credential = None if record is None else record.credential
        return self._reason_revoked(peer, credential) is None and self._reason_unlisted(peer, credential) is None

    def first(self) -> frozenset[PeerId]:
        """Peers that come first where there is not room for all."""
        revoked = () if self.revocations is None else self.revocations.peers
        return self._founding.union(self.named, self.members()).difference(revoked)

    def belongs(self, peer: PeerId) -> bool:
        """True if every node, by what all of them know, puts this peer first; not for this node's user alone."""
        return peer in self._founding or peer in self.members()

    def rank(self, peer: PeerId) -> Rank:
        """Rank of a peer among those who may be here; the least for one whom the authority has revoked."""
        if self._reason_revoked(peer, None) is not None:
            return Rank.STRANGER
        if peer in self._founding or peer in self.named or peer in self.members():
            return Rank.FIRST
        return Rank.CONTRIBUTOR if self.contributed(peer) else Rank.STRANGER

    def is_revoked(self, peer: PeerId, record: NodeRecord | None) -> bool:
        """True if the authority has revoked a peer, or the invite in its record."""
        return self._reason_revoked(peer, None if record is None else record.credential) is not None

    def check_own(self, peer: PeerId) -> None:
        """Raise ConfigError if the authority has revoked `peer`, this node itself, or the invite that it came with."""
        reason = self._reason_revoked(peer, self.credential)
        if reason is None:
            return
        if self._reason_revoked(peer, None) is None:
            raise ConfigError(f"{reason}; ask who runs the swarm for a new link")
        anew = "" if self.manifest.swarm.admission == "open" else ", which has to be invited anew"
        raise ConfigError(
            f"{reason}; ask who runs the swarm: if that was a mistake, "
            f"`shoal id --rotate` makes this another node{anew}"
        )

    def take(self, revocations: Revocations, *, peer: PeerId | None = None) -> bool:
        """Note a list that came from `peer`; return True if there is news. Raises RemoteError for one that is forged.

        The authority revokes for good: of two lists of its own, as after its folder was restored, both count.
        """
        known, is_newer = self.revocations, revocations.is_newer_than(self.revocations)
        mine = set() if known is None else set(known.peers)
        if not is_newer and (mine <= set(revocations.peers) or set(revocations.peers) <= mine):
            return False
        revocations.check(self._swarm_id, self.manifest.swarm.authority, peer=peer)
        joined = None if known is None or mine <= set(revocations.peers) else self.join(known, revocations)
        if joined is None and not is_newer:
            return False
        self.revocations = joined or revocations
        self.keep(self.revocations)
        return True

    def _reason_revoked(self, peer: PeerId, credential: Credential | None) -> str | None:
        revoked = () if self.revocations is None else self.revocations.peers
        invite = None if credential is None or credential.invite.holder not in revoked else credential.invite
        if peer in revoked and not (invite and invite.bearer):
            return f"the swarm's authority has revoked {peer}"
        return "the swarm's authority has revoked the invite that you came with" if invite else None

    def _reason_unlisted(self, peer: PeerId, credential: Credential | None) -> str | None:
        swarm = self.manifest.swarm
        if swarm.admission == "open" or peer in self._listed:
            return None
        if swarm.admission == "allowlist":
            return f"admission is allowlist and {peer} is not on the list"
        if credential is None:
            return "admission is by invite and you have none; ask for a link made with `shoal invite`"
        return reason_not_valid(credential, peer=peer, swarm=self._swarm_id, authority=swarm.authority)
