"""The swarm link: one line that is all a machine needs to join, `shoal:` and base64url of

    version 1 │ SwarmId 32 │ peers 1 │ per peer: key 32, addresses 1, per address: host, port 2 │ invite
    │ checkpoint │ check 4

    version  2 with a checkpoint, 1 without one: as links were before there were any
    checkpoint   rebases 8 ‖ rollbacks 8 ‖ round 8 ‖ hash 32    the newest certificate where the link was made
    host     0x04 ‖ 4 bytes, 0x06 ‖ 16 bytes, or 0x00 ‖ length 1 ‖ DNS name
    invite   0x00                                                nothing
             0x01 ‖ holder's key 32 ‖ expires 5 ‖ signature 64   for one node
             0x02 ‖ holder's seed 32 ‖ expires 5 ‖ signature 64  for whoever has the link: it is a secret
    check    the first bytes of BLAKE3 over all before it

Who joins by a link with a checkpoint takes only a chain that contains it, so no former member can show it another past.
Integers are big-endian. A text is accepted in its one spelling only. The check is against slips of the pen and says
nothing about who made the link: what is fetched with it is checked against the SwarmId, and an invite is signed.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
import shlex
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from shoal.protocol.address import format_address, parse_address
from shoal.protocol.errors import ConfigError
from shoal.protocol.forks import Checkpoint
from shoal.protocol.identity import SEED_BYTES, SIGNATURE_BYTES, Identity, PeerId, peer_id_of, public_key_of
from shoal.protocol.invites import Credential, Invite, claim
from shoal.protocol.messages import Term, domain_hash
from shoal.protocol.wire import COUNTER_LIMIT, HASH_BYTES, SwarmId

PREFIX = "shoal:"
COMMAND = ("shoal", "run")
LINK_LIMIT_CHARS = 4096  # of a swarm link
LINK_LIMIT_BYTES = (LINK_LIMIT_CHARS - len(PREFIX)) * 3 // 4
LINE_LIMIT_CHARS = LINK_LIMIT_CHARS + 512
"""Characters of a line that joins: the link, and the name of a workload, which has up to 256."""
PEERS_LIMIT = 4  # peers in a link
ADDRESSES_LIMIT = 4
"""Addresses of one peer."""

_LINK = re.compile(rf"(?<![^\s'\"]){PREFIX}[A-Za-z0-9_-]+")
_VERSION, _VERSION_WITH_CHECKPOINT = 1, 2
_COUNTER_BYTES = 8
_CHECK_BYTES = 4
_EXPIRES_BYTES = 5
_PORT_BYTES = 2
_DNS, _IP4, _IP6 = 0, 4, 6
_NO_INVITE, _BOUND, _BEARER = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkInvite:
    """An invite on its way to a user; `key` is the bearer's, None where the invite is for one node."""

    invite: Invite
    key: Identity | None = None

    def credential(self, swarm: SwarmId, peer: PeerId) -> Credential:
        """Return the credential that the node `peer` shows. Raises ConfigError if the invite is for another."""
        if self.key is not None:
            return claim(self.invite, self.key, swarm, peer)
        if self.invite.holder != peer:
            raise ConfigError(
                f"this link is for the node {self.invite.holder}, and this one is {peer}; ask for another"
            )
        return Credential(invite=self.invite)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmLink:
    """Link to a swarm: addresses of some members to ask, the invite to show, and what its chain has to contain."""

    swarm: SwarmId
    addresses: tuple[str, ...] = ()
    invite: LinkInvite | None = None
    checkpoint: Checkpoint | None = None


def is_link(text: str) -> bool:
    """True if the user meant a link rather than a file."""
    return text.startswith(PREFIX)


OWN_DATA = "YOUR_TEXT"
"""In a line to join with, in place of a path: where there is no file of that name, the node says so and ends."""


def join_line(link: str, workload: str, *, data: bool = False) -> str:
    """The command that joins by `link`, as a shell takes it, whatever the name of the swarm's workload.

    Code of one's own (`module:Class`) is run only by who says so, and who pastes the line says so. data: the node that
    gives the line trains on data that its user named; where a copy lies elsewhere only the receiver knows.
    """
    allowed = ("--allow-workload", workload) if ":" in workload else ()
    named = ("--data", OWN_DATA) if data else ()
    return " ".join((*COMMAND, f"'{link}'", *(shlex.quote(word) for word in (*allowed, *named))))


def link_in(text: str) -> str | None:
    """The link that `text` is, or that is among what was copied with it; None where a file was meant.

    A whole link comes before one that is damaged. Nothing else of a line counts: what it would allow, its reader has to
    allow.
    """
    text = text.strip()
    found: list[str] = _LINK.findall(text)
    for link in (*found, PREFIX + text):  # the last was copied without what stands before it
        with suppress(ConfigError):  # its check tells
            parse_link(link)
            return link
    return next(iter(found), text if is_link(text) else None)


def format_link(link: SwarmLink) -> str:
    """The link as text. Of its addresses the first of each of the first peers are taken, as many as there is room for.

    Raises ConfigError for an address that is none.
    """
    version = _VERSION if link.checkpoint is None else _VERSION_WITH_CHECKPOINT
    rest = _pack_invite(link.invite), _pack_checkpoint(link.checkpoint)
    begin = bytes([version]) + link.swarm
    peers = _pack_peers(link.addresses, LINK_LIMIT_BYTES - _CHECK_BYTES - len(b"".join((begin, *rest))))
    body = b"".join((begin, peers, *rest))
    text = base64.urlsafe_b64encode(body + _check(body)).decode().rstrip("=")
    return PREFIX + text


def parse_link(text: str) -> SwarmLink:
    """Read a link. Raises ConfigError, one line that says what to do."""
    try:
        if len(text) > LINK_LIMIT_CHARS or not is_link(text):
            raise ValueError
        encoded = text.removeprefix(PREFIX)
        data = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
        body, check = data[:-_CHECK_BYTES], data[-_CHECK_BYTES:]
        if check != _check(body):
            raise ValueError
        if body[0] not in (_VERSION, _VERSION_WITH_CHECKPOINT):
            raise ConfigError(
                f"a link of version {body[0]}; this Shoal reads version {_VERSION_WITH_CHECKPOINT}, install a newer one"
            )
        link = _unpack(_Reader(body[1:]), has_checkpoint=body[0] == _VERSION_WITH_CHECKPOINT)
        if format_link(link) != text:
            raise ValueError
    except (ValueError, IndexError, binascii.Error):
        raise ConfigError("this is not a whole swarm link; copy again all that `shoal link` prints") from None
    return link


def _check(body: bytes) -> bytes:
    return domain_hash("link", body)[:_CHECK_BYTES]


# -- addresses -----------------------------------------------------------------------------------------------


def _pack_peers(addresses: Iterable[str], limit_bytes: int) -> bytes:
    """Peers and their addresses; what `limit_bytes` have no room for is left out: the others give themselves names."""
    by_peer: dict[PeerId, list[bytes]] = {}
    left = limit_bytes - 1
    for text in addresses:
        address = parse_address(text)
        packed = by_peer.get(address.peer, [])
        where = _pack_host(address.host) + address.port.to_bytes(_PORT_BYTES, "big")
        is_first = address.peer not in by_peer
        takes = len(where) + (SEED_BYTES + 1 if is_first else 0)
        is_full = len(by_peer) >= PEERS_LIMIT if is_first else len(packed) >= ADDRESSES_LIMIT
        if where in packed or is_full or takes > left:
            continue
        by_peer[address.peer] = [*packed, where]
        left -= takes
    parts = [bytes([len(by_peer)])]
    for peer, packed in by_peer.items():
        parts += [public_key_of(peer), bytes([len(packed)]), *packed]
    return b"".join(parts)


def _pack_host(host: str) -> bytes:
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return bytes([_DNS, len(host)]) + host.encode("ascii")
    return bytes([ip.version]) + ip.packed


def _unpack_host(data: _Reader) -> str:
    kind = data.byte()
    if kind == _DNS:
        return data.take(data.byte()).decode("ascii")
    if kind == _IP4:
        return str(ipaddress.IPv4Address(data.take(4)))
    if kind == _IP6:
        return str(ipaddress.IPv6Address(data.take(16)))
    raise ValueError("an address of another kind")


# -- invites -------------------------------------------------------------------------------------------------


def _pack_invite(link_invite: LinkInvite | None) -> bytes:
    if link_invite is None:
        return bytes([_NO_INVITE])
    invite, key = link_invite.invite, link_invite.key
    kind, secret = (_BOUND, public_key_of(invite.holder)) if key is None else (_BEARER, key.private_bytes())
    return b"".join((bytes([kind]), secret, invite.expires.to_bytes(_EXPIRES_BYTES, "big"), invite.signature))


def _unpack_invite(data: _Reader) -> LinkInvite | None:
    kind = data.byte()
    if kind == _NO_INVITE:
        return None
    if kind not in (_BOUND, _BEARER):
        raise ValueError("an invite of another kind")
    secret = data.take(SEED_BYTES)
    key = Identity.from_seed(secret) if kind == _BEARER else None
    invite = Invite(
        holder=peer_id_of(secret) if key is None else key.peer_id,
        bearer=key is not None,
        expires=int.from_bytes(data.take(_EXPIRES_BYTES), "big"),
        signature=data.take(SIGNATURE_BYTES),
    )
    return LinkInvite(invite=invite, key=key)


# -- checkpoints ---------------------------------------------------------------------------------------------


def _pack_checkpoint(checkpoint: Checkpoint | None) -> bytes:
    if checkpoint is None:
        return b""
    counters = checkpoint.term.rebases, checkpoint.term.rollbacks, checkpoint.round
    return b"".join(counter.to_bytes(_COUNTER_BYTES, "big") for counter in counters) + checkpoint.value


def _unpack_checkpoint(data: _Reader) -> Checkpoint:
    counters = [int.from_bytes(data.take(_COUNTER_BYTES), "big") for _ in range(3)]
    if max(counters) > COUNTER_LIMIT:
        raise ValueError("a checkpoint beyond all rounds")
    rebases, rollbacks, round = counters
    return Checkpoint(term=Term(rebases, rollbacks), round=round, value=data.take(HASH_BYTES))


# -- the whole -----------------------------------------------------------------------------------------------


class _Reader:
    """Takes bytes off the front. Raises ValueError where there are too few."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        taken = self._data[self._at : self._at + count]
        if len(taken) != count:
            raise ValueError("too short")
        self._at += count
        return taken

    def byte(self) -> int:
        return self.take(1)[0]

    def end(self) -> None:
        if self._at != len(self._data):
            raise ValueError("too long")


def _unpack(data: _Reader, *, has_checkpoint: bool) -> SwarmLink:
    """A link whose check holds; whether it is in its one spelling shows when it is formatted again."""
    swarm = SwarmId(data.take(HASH_BYTES))
    addresses: list[str] = []
    for _ in range(data.byte()):
        peer = peer_id_of(data.take(SEED_BYTES))
        for _ in range(data.byte()):
            host = _unpack_host(data)
            addresses.append(format_address(host, int.from_bytes(data.take(_PORT_BYTES), "big"), peer))
    invite = _unpack_invite(data)
    checkpoint = _unpack_checkpoint(data) if has_checkpoint else None
    data.end()
    return SwarmLink(swarm=swarm, addresses=tuple(addresses), invite=invite, checkpoint=checkpoint)
