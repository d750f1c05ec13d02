"""Dial-back: a node asks members to knock at its ports from outside, to learn which are reached.

    A ── AskDialBack(secret, ports) ──► C        over a connection without relays
    A ◄═ knocks at A's address, as C sees it ═ C     one per port, from C's side, under that secret
    A ◄── DialedBack(host, reached) ─── C

Nobody can be made a reflector: the asker names ports and no host, and C knocks at the address that the asker's own
connection comes from; a knock is 16 bytes of a hash, and how often anybody may ask is bounded per peer, per address
and in all. Nor does an answer count by itself: a port is reached when C says so *and* the knock came. One that came
from this node's own network, or back from its own router, proves nothing of the outside.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Annotated

import trio
from msgspec import Meta

from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.limits import Rates, TokenBucket, take_of_all
from shoal.protocol.messages import Message
from shoal.protocol.peering import Refusal
from shoal.swarm.host import Host
from shoal.swarm.questions import answer, ask, hear
from shoal.swarm.reaching.dial_back_probes import SECRET_BYTES, Expected, probe
from shoal.swarm.reaching.networks import is_private
from shoal.swarm.streams import MessageStream

DIAL_BACK_PROTOCOL = "/shoal/dial-back/1"
PORTS_LIMIT = 4
PROBE_DEADLINE_S = 4.0
ASK_DEADLINE_S = 8.0
"""For an answer, which takes a dial of each port."""
REQUEST_LIMIT_BYTES = 256
ANSWER_LIMIT_BYTES = 512
AT_ONCE_LIMIT = 8

PEER_PROBES_PER_S, PEER_BURST_PROBES = 0.1, 24
TOTAL_PROBES_PER_S, TOTAL_BURST_PROBES = 2.0, 480
ASKERS_LIMIT = 1024
"""Askers that are remembered; beyond it the one that asked least lately begins anew."""

FINDING_S = 900.0
"""A finding counts no more once another is so much newer: who still is linked is asked three times meanwhile."""

Port = Annotated[int, Meta(ge=1, le=65_535)]


class AskDialBack(Message, frozen=True, kw_only=True):
    """Asks to be knocked at, at these ports."""

    secret: Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    ports: Annotated[tuple[Port, ...], Meta(min_length=1, max_length=PORTS_LIMIT)]


class DialedBack(Message, frozen=True, kw_only=True):
    """Host at which the asker is seen from here, and ports of it that answered."""

    host: Annotated[str, Meta(min_length=2, max_length=45, pattern=r"^[0-9a-f:.]*\Z")]
    reached: Annotated[tuple[Port, ...], Meta(max_length=PORTS_LIMIT)]


DialBackReply = DialedBack | Refusal


class DialBackServer:
    """Probes for those whom `admits` lets ask."""

    def __init__(self, host: Host, admits: Callable[[PeerId], bool]) -> None:
        self._host = host
        self._admits = admits
        self._askers: Rates[str] = Rates(PEER_PROBES_PER_S, PEER_BURST_PROBES, limit=ASKERS_LIMIT)
        """By peer and by IP address."""
        self._total = TokenBucket(TOTAL_PROBES_PER_S, TOTAL_BURST_PROBES)
        self._slots = trio.CapacityLimiter(AT_ONCE_LIMIT)
        host.serve(DIAL_BACK_PROTOCOL, self._serve)

    async def _serve(self, stream: MessageStream) -> None:
        asked: AskDialBack = await hear(stream, AskDialBack, limit_bytes=REQUEST_LIMIT_BYTES)
        await answer(stream, await self._answer(stream.peer, asked))

    async def _answer(self, peer: PeerId, asked: AskDialBack) -> DialBackReply:
        host = self._host.host_of(peer)
        if host is None:
            return Refusal(reason="a connection through a relay has no address to knock at")
        if not self._admits(peer):
            return Refusal(reason="this node knocks for members only")
        ports = tuple(dict.fromkeys(asked.ports))
        now = trio.current_time()
        if not take_of_all((self._total, self._askers.of(peer, now), self._askers.of(host, now)), len(ports), now):
            return Refusal(reason="too many knocks are asked for; try again in a minute")
        try:
            self._slots.acquire_on_behalf_of_nowait(stream := object())
        except trio.WouldBlock:
            return Refusal(reason="this node is knocking elsewhere; try again in a minute")
        try:
            reached = await _probe_all(host, ports, asked.secret)
        finally:
            self._slots.release_on_behalf_of(stream)
        return DialedBack(host=host, reached=tuple(sorted(reached)))


async def _probe_all(host: str, ports: tuple[int, ...], secret: bytes) -> set[int]:
    reached: set[int] = set()

    async def one(port: int) -> None:
        if await probe(host, port, secret, deadline_s=PROBE_DEADLINE_S):
            reached.add(port)

    async with trio.open_nursery() as nursery:
        for port in ports:
            nursery.start_soon(one, port)
    return reached


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Finding of one member: the host at which it sees this node, and which of this node's ports it reached.

    own_host: the address of this machine from which the two were connected; it holds as long as there is that one.
    found_at: time at which it was found.
    """

    checker: PeerId
    host: str
    asked: tuple[int, ...]
    reached: frozenset[int]
    own_host: str = ""
    found_at: float = field(default=0.0, compare=False)


async def ask_dial_back(host: Host, checker: PeerId, ports: tuple[int, ...]) -> Finding:
    """Have a connected member knock at these ports of this node.

    Raises NetworkError if it does not answer, or will not; RemoteError for an answer that cannot be.
    """
    expected, own_host = Expected(ports=ports), host.own_host_of(checker) or ""
    host.dial_back_probes.expect(expected)
    try:
        reply: DialedBack = await ask(
            host,
            checker,
            DIAL_BACK_PROTOCOL,
            AskDialBack(secret=expected.secret, ports=ports),
            DialedBack,
            limit_bytes=ANSWER_LIMIT_BYTES,
            deadline_s=ASK_DEADLINE_S,
        )
    finally:
        host.dial_back_probes.forget(expected)
    claimed = set(reply.reached)
    if not claimed.issubset(expected.came):
        raise RemoteError(f"says it reached ports {sorted(claimed - expected.came.keys())}, and did not", peer=checker)
    reached = frozenset(port for port in claimed if _from_outside(expected.came[port], reply.host))
    now = trio.current_time()
    return Finding(checker=checker, host=reply.host, asked=ports, reached=reached, own_host=own_host, found_at=now)


def _from_outside(prober: str, seen_as: str) -> bool:
    """True if a probe from `prober` tells anything of who else reaches `seen_as`."""
    return is_private(seen_as) or not (is_private(prober) or prober == seen_as)


class Evidence:
    """Findings of several members about one node. The newest of each counts, until others are FINDING_S newer: what a
    router let in long ago it may let in no more, and while nobody looks, what was found last is all that is known."""

    def __init__(self) -> None:
        self._findings: dict[PeerId, Finding] = {}

    def add(self, finding: Finding) -> None:
        """Note what a member found."""
        self._findings[finding.checker] = finding
        since = finding.found_at - FINDING_S
        self._findings = {checker: one for checker, one in self._findings.items() if one.found_at > since}

    def forget_from(self, hosts: Collection[str]) -> None:
        """These addresses of this machine are gone, and with them what was found of it there."""
        self._findings = {
            checker: finding
            for checker, finding in self._findings.items()
            if finding.own_host not in hosts and finding.host not in hosts
        }

    def __len__(self) -> int:
        return len(self._findings)

    def reached(self, port: int) -> tuple[str, ...]:
        """The IP addresses at which this port is reached.

        That is so if two members say it, or at least half of those who knocked at that address: one that lies counts
        for one.
        """
        hosts = sorted({finding.host for finding in self._findings.values()})
        return tuple(host for host in hosts if self._is_reached(host, port))

    def _is_reached(self, host: str, port: int) -> bool:
        asked = [f for f in self._findings.values() if f.host == host and port in f.asked]
        reached = sum(port in finding.reached for finding in asked)
        return reached >= 2 or (reached > 0 and 2 * reached >= len(asked))

    def hosts(self) -> frozenset[str]:
        """Hosts at which this node is seen, by two members, or by at least half of those who probed."""
        seen = [finding.host for finding in self._findings.values()]
        return frozenset(host for host in seen if seen.count(host) >= 2 or 2 * seen.count(host) >= len(seen))

    def outside(self) -> bool:
        """True if anybody has seen this node at an address that means something everywhere."""
        return any(not is_private(finding.host) for finding in self._findings.values())
