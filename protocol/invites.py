"""Invites: the authority's signed permissions for nodes to join, and the list of those it revokes.

    Invite       signed by the authority: (swarm, holder, bearer, expires)
    Credential   an invite as its user shows it, inside the user's own signed NodeRecord

An invite is for one node, and `holder` is that node's PeerId; or it is for whoever bears it, and `holder` is a key made
for it alone. Who has that key signs its own PeerId with it, the claim, and shows invite and claim: the key itself never
travels over the network, so who sees a credential cannot use it. The swarm is part of all that is signed, and is not
repeated in the messages, which name it already.

**Expiry needs a wall clock**, the only thing that does: `expires` is in seconds since 1970 (UTC), and is compared with
the clock of the node that is asked to admit. It is the last moment to *join*. An invite is honoured for
CLOCK_TOLERANCE_S beyond it, so clocks may be wrong by that much; a clock that is further back admits late, one that is
further ahead refuses early, and neither changes anything about a round. Who is a member of the last certified round
comes back with an invite that has expired since; who is revoked does not.

`Revocations` names PeerIds of nodes, and holders of invites for bearers: all who joined with such an invite are out.
Those of them that take part in rounds are named as well, where the node with the authority's key knows their records:
what an absent voter came with nobody else could tell.
The list of the higher version counts; of two with one version, the higher in the order of what they name, so that all
members end with the same one whatever reaches them first.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from functools import lru_cache
from typing import Annotated

import msgspec

from shoal.protocol import wire
from shoal.protocol.errors import ConfigError, RemoteError
from shoal.protocol.identity import SIGNATURE_BYTES, Identity, PeerId, parse_peer_id, verify
from shoal.protocol.messages import Message, Peer, Signature
from shoal.protocol.wire import COUNTER_LIMIT, SwarmId, canonical

CLOCK_TOLERANCE_S = 300  # beyond an invite's expiry
EXPIRY_LIMIT_S = 2**40 - 1
"""The latest expiry: five bytes in a link."""
REVOKED_LIMIT = 1024
"""PeerIds in the list: 55 kB."""
CHECKED_LIMIT_ENTRIES = 4096
"""Signatures whose check is remembered: records are repeated every few seconds."""

INVITE_DOMAIN = b"shoal/invite"
CLAIM_DOMAIN = b"shoal/invite-claim"
REVOCATIONS_DOMAIN = b"shoal/revocations"

Expiry = Annotated[int, msgspec.Meta(ge=0, le=EXPIRY_LIMIT_S)]


class Invite(wire.Message, frozen=True, kw_only=True):
    """Permission for its holder to join until `expires`, in seconds since 1970."""

    holder: Peer
    bearer: bool
    expires: Expiry
    signature: Signature

    def signed_part(self, swarm: SwarmId) -> bytes:
        """Return the bytes that the authority signs."""
        return canonical([swarm, self.holder, self.bearer, self.expires])


class Credential(wire.Message, frozen=True, kw_only=True):
    """An invite as a node shows it; `claim` is the signature of a bearer's key over that node's PeerId, or empty."""

    invite: Invite
    claim: Annotated[bytes, msgspec.Meta(max_length=SIGNATURE_BYTES)] = b""

    def __post_init__(self) -> None:
        if self.claim and not self.invite.bearer:
            raise ValueError("a claim to an invite that is for one node")


class Revocations(Message, frozen=True, kw_only=True):
    """Peers that the authority has revoked, sorted."""

    version: Annotated[int, msgspec.Meta(ge=1, le=COUNTER_LIMIT)]
    peers: Annotated[tuple[Peer, ...], msgspec.Meta(max_length=REVOKED_LIMIT)]
    signature: Signature

    def __post_init__(self) -> None:
        if any(one >= other for one, other in zip(self.peers, self.peers[1:], strict=False)):
            raise ValueError("peers that are not in order, or named twice")

    def signed_part(self, swarm: SwarmId) -> bytes:
        """Return the bytes that the authority signs."""
        return canonical([swarm, self.version, self.peers])

    def is_newer_than(self, other: Revocations | None) -> bool:
        """True if this list takes the other's place."""
        return other is None or (self.version, self.peers) > (other.version, other.peers)

    def check(self, swarm: SwarmId, authority: PeerId, *, peer: PeerId | None = None) -> None:
        """Raises RemoteError, blaming `peer` who delivered it, unless the authority signed it for this swarm."""
        if not _is_signed(authority, REVOCATIONS_DOMAIN, self.signed_part(swarm), self.signature):
            raise RemoteError("a list of revocations that the swarm's authority did not sign", peer=peer)


def make_invite(authority: Identity, swarm: SwarmId, *, holder: PeerId, bearer: bool = False, expires: int) -> Invite:
    """Make an invite for the node `holder`, or, with `bearer`, for whoever has the key of that PeerId."""
    unsigned = Invite(holder=holder, bearer=bearer, expires=expires, signature=bytes(SIGNATURE_BYTES))
    return msgspec.structs.replace(unsigned, signature=authority.sign(INVITE_DOMAIN, unsigned.signed_part(swarm)))


def claim(invite: Invite, key: Identity, swarm: SwarmId, peer: PeerId) -> Credential:
    """The credential of `peer`, who bears `invite`, with its key."""
    return Credential(invite=invite, claim=key.sign(CLAIM_DOMAIN, canonical([swarm, peer])))


def make_revocations(
    authority: Identity, swarm: SwarmId, before: Revocations | None, peers: Collection[PeerId]
) -> Revocations:
    """The list after `before`, with these peers added. Raises ConfigError if it would be too long."""
    revoked = sorted({*peers, *(before.peers if before else ())})
    if len(revoked) > REVOKED_LIMIT:
        raise ConfigError(
            f"a swarm can revoke {REVOKED_LIMIT} peers; found another swarm, with `shoal init`, for those who are left"
        )
    version = before.version + 1 if before else 1
    unsigned = Revocations(version=version, peers=tuple(revoked), signature=bytes(SIGNATURE_BYTES))
    signature = authority.sign(REVOCATIONS_DOMAIN, unsigned.signed_part(swarm))
    return msgspec.structs.replace(unsigned, signature=signature)


def reason_not_valid(credential: Credential, *, peer: PeerId, swarm: SwarmId, authority: PeerId) -> str | None:
    """Return why `peer` may not use this credential in this swarm, regardless of the time; None if it may."""
    invite = credential.invite
    if not _is_signed(authority, INVITE_DOMAIN, invite.signed_part(swarm), invite.signature):
        return "your invite was not signed for this swarm by its authority; ask for a link made with `shoal invite`"
    if not invite.bearer:
        if invite.holder == peer:
            return None
        return f"your invite is for {invite.holder} and you are {peer}; ask for one of your own"
    if not _is_signed(invite.holder, CLAIM_DOMAIN, canonical([swarm, peer]), credential.claim):
        return f"your invite was not claimed for {peer} with its key; start again from the link that you were given"
    return None


def reason_expired(invite: Invite, now_s: float) -> str | None:
    """Return why it is too late to join with this invite by a clock that says `now_s` (seconds since 1970), or None."""
    if now_s <= invite.expires + CLOCK_TOLERANCE_S:
        return None
    return f"your invite expired on {when(invite.expires)}; ask for another"


def when(seconds: int) -> str:
    """A moment as people read it, in UTC; far ones without the hour."""
    if seconds >= 253_402_300_800:  # the year 10000
        return "a day after the year 9999"
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


@lru_cache(maxsize=CHECKED_LIMIT_ENTRIES)
def _is_signed(peer: PeerId, domain: bytes, message: bytes, signature: bytes) -> bool:
    return verify(peer, domain, message, signature)


def parse_holder(text: str) -> PeerId:
    """A PeerId as a user writes it. Raises ConfigError."""
    try:
        return parse_peer_id(text)
    except ValueError:
        raise ConfigError(
            f"{text!r} is not a PeerId; `shoal id` prints a node's, `shoal status` the members'"
        ) from None
