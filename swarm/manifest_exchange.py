"""The manifest, from any member to whoever knows the SwarmId: before a hello, as it must be had to say one.

    GetManifest(swarm)  ─────►  ManifestAnswer(the agreed sections, checked against the SwarmId)  or  Refusal(reason)

It is public to who has the SwarmId, and no secret is in it: whoever is found on the local network may give it as well
as those that a link names, who may be gone. Strangers may ask, so what is given out is bounded per IP address and in
all. Who is not reached, or is asked by too many, is asked again; who is of another swarm, or answers what no member
would, is not.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import trio

from shoal.protocol.address import parse_address
from shoal.protocol.backoff import Backoff
from shoal.protocol.errors import ConfigError, NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.limits import Rates, TokenBucket, take_of_all
from shoal.protocol.manifest import MANIFEST_LIMIT_BYTES, Manifest
from shoal.protocol.peering import GetManifest, ManifestAnswer, ManifestReply, Refusal
from shoal.protocol.swarm_link import SwarmLink
from shoal.protocol.wire import SwarmId, canonical, decode
from shoal.swarm.host import Host, as_a_stranger
from shoal.swarm.questions import REQUEST_DEADLINE_S, hear
from shoal.swarm.reaching.networks import has_network, is_loopback
from shoal.swarm.streams import MessageStream

if TYPE_CHECKING:
    from shoal.swarm.rendezvous.mdns import LocalDiscovery

MANIFEST_PROTOCOL = "/shoal/manifest/1"
REQUEST_LIMIT_BYTES = 128
ANSWER_LIMIT_BYTES = MANIFEST_LIMIT_BYTES + 64
FETCH_DEADLINE_S = 45.0
TRY_DEADLINE_S = 10.0
"""Of one member, for one answer."""
FIRST_PAUSE_S = 1.0
PAUSE_LIMIT_S = 8.0
"""Pauses between tries double from the first to this; each is taken half to one and a half times, so that newcomers who
came together come back apart."""
TELL_AFTER_S = 3.0

ANSWER_LEAST_BYTES = 4096
"""So much an answer counts at least."""
HOST_BYTES_PER_S = 16 << 10
HOST_BURST_BYTES = 512 << 10
"""To one IP address: four small manifests a second in the long run, and 32 of the largest at once."""
TOTAL_BYTES_PER_S = 256 << 10
TOTAL_BURST_BYTES = 4 << 20
HOST_LIMIT = 1024
"""IP addresses that are remembered; beyond it the one that asked least lately begins anew."""
ASKED_LIMIT = 16
"""Peers that are asked, with those who are found on the local network: anybody may say that they are of the swarm."""
REASONS_SHOWN = 3
OTHER_SWARM = "this node is in swarm "
"""So begins the refusal that no later try changes."""

logger = logging.getLogger(__name__)


class ManifestServer:
    """Answers those who ask `host` for the manifest, from when it is made."""

    def __init__(self, host: Host, manifest: Manifest) -> None:
        self._host = host
        self._swarm_id = manifest.swarm_id
        self._answer = canonical(ManifestAnswer(manifest=manifest.to_canonical()))
        self._hosts: Rates[str] = Rates(HOST_BYTES_PER_S, HOST_BURST_BYTES, limit=HOST_LIMIT)
        self._total = TokenBucket(TOTAL_BYTES_PER_S, TOTAL_BURST_BYTES)
        host.serve(MANIFEST_PROTOCOL, self._serve, limit_bytes=ANSWER_LIMIT_BYTES)

    async def _serve(self, stream: MessageStream) -> None:
        asked: GetManifest = await hear(stream, GetManifest, limit_bytes=REQUEST_LIMIT_BYTES)
        await stream.send(
            self._reply(asked.swarm, self._host.host_of(stream.peer) or ""), deadline_s=REQUEST_DEADLINE_S
        )
        await stream.aclose()

    def _reply(self, swarm: bytes, host: str) -> bytes:
        if swarm != self._swarm_id:
            return canonical(Refusal(reason=f"{OTHER_SWARM}{self._swarm_id.hex()[:16]}…, not in that one"))
        if not self._spend(host):
            return canonical(Refusal(reason="too many ask for the manifest; try again in a minute"))
        return self._answer

    def _spend(self, host: str) -> bool:
        cost, now = max(len(self._answer), ANSWER_LEAST_BYTES), trio.current_time()
        return take_of_all((self._hosts.of(host, now), self._total), cost, now)


def _tell_nobody(text: str) -> None:
    """Drop a line, where nobody watches."""


async def fetch_manifest(
    link: SwarmLink,
    *,
    deadline_s: float = FETCH_DEADLINE_S,
    on_wait: Callable[[str], None] = _tell_nobody,
    locally: LocalDiscovery | None = None,
) -> Manifest:
    """The manifest of the link's swarm, from the first of its peers that has it; all are asked at once, and again.

    It is asked for under a key made for that, so nobody is told who will join. `on_wait` is called once, if it takes
    longer than TELL_AFTER_S, with what came of whom so far. locally: where it looks for members on the local network,
    who are asked as well. Raises ConfigError where the link names nobody, NetworkError where none has it: with what the
    peers said last, or that this machine has no network, which both say. Cancellation leaves nothing behind.
    """
    by_peer: dict[PeerId, list[str]] = {}
    for text in link.addresses:
        by_peer.setdefault(parse_address(text).peer, []).append(text)
    if not by_peer:
        raise ConfigError(
            "nobody is named who could be asked for the manifest; ask for a fresh link (`shoal link` at a member), or "
            "add a member's address with --join to `shoal run`"
        )
    ends_at = trio.current_time() + deadline_s
    found: list[Manifest] = []
    reasons: dict[PeerId, str] = {}
    given_up: set[PeerId] = set()

    def is_cut_off() -> bool:
        return not (has_network() or all(is_loopback(parse_address(text).host) for text in link.addresses))

    async def ask(host: Host, asking: trio.CancelScope, peer: PeerId, addresses: list[str]) -> None:
        async def once(try_s: float) -> Manifest:
            try:
                return await _ask(host, peer, addresses, link.swarm, try_s)
            except (NetworkError, RemoteError) as error:
                reasons[peer] = str(error)
                raise

        try:
            found.append(await ask_again(once, ends_at, random.Random()))
        except (NetworkError, RemoteError):
            given_up.add(peer)
        if found or len(given_up) == len(by_peer):
            asking.cancel()

    def why_not_yet() -> str:
        if is_cut_off():
            return f"this machine has no network; asking again, for {deadline_s:.0f} s in all"
        came = [reasons.get(peer, f"nothing yet from {peer}") for peer in by_peer]
        return (
            f"no member that the link names has given the manifest yet; asking again, for {deadline_s:.0f} s in all. "
            f"Tried: {'; '.join(came[:REASONS_SHOWN])}. Start one, or take a fresh link: `shoal link` at a member"
        )

    async def ask_found(host: Host, nursery: trio.Nursery, finding: LocalDiscovery) -> None:
        nursery.start_soon(finding.run)
        async for local in finding.found:
            if local.peer not in by_peer and len(by_peer) < ASKED_LIMIT:
                by_peer[local.peer] = list(local.addresses)
                nursery.start_soon(ask, host, nursery.cancel_scope, local.peer, by_peer[local.peer])

    async def ask_all(host: Host) -> None:
        async with trio.open_nursery() as outer:
            outer.start_soon(_tell_later, on_wait, why_not_yet)
            async with trio.open_nursery() as nursery:
                for peer, addresses in by_peer.items():
                    nursery.start_soon(ask, host, nursery.cancel_scope, peer, addresses)
                if locally is not None:
                    nursery.start_soon(ask_found, host, nursery, locally)
            outer.cancel_scope.cancel()

    await as_a_stranger(ask_all)
    if not found and is_cut_off():
        raise NetworkError("this machine has no network; connect it, and use the same link again")
    if not found:
        raise NetworkError(
            "no member that the link names or this network has gives the manifest; ask for a fresh link (`shoal link` "
            f"at a member), or check the network: {'; '.join([*reasons.values()][:REASONS_SHOWN])}"
        )
    return found[0]


async def _tell_later(on_wait: Callable[[str], None], why: Callable[[], str]) -> None:
    await trio.sleep(TELL_AFTER_S)
    on_wait(why())


async def ask_again(ask: Callable[[float], Awaitable[Manifest]], ends_at: float, rng: random.Random) -> Manifest:
    """Call `ask` with the seconds it may take until it raises no NetworkError, and return what it returns.

    Raises the last NetworkError when no time is left for another try, and at once whatever else `ask` raises.
    """
    pauses = Backoff(FIRST_PAUSE_S, PAUSE_LIMIT_S)
    while True:
        try:
            return await ask(min(TRY_DEADLINE_S, ends_at - trio.current_time()))
        except NetworkError as error:
            taken_s = pauses.next_s() * rng.uniform(0.5, 1.5)
            if trio.current_time() + taken_s + FIRST_PAUSE_S >= ends_at:
                raise  # a try without time would only hide the reason
            logger.debug("no manifest yet: %s", error)
        await trio.sleep(taken_s)


async def _ask(host: Host, peer: PeerId, addresses: list[str], swarm: SwarmId, deadline_s: float) -> Manifest:
    """One try. Raises NetworkError where another may go better, RemoteError where none will."""
    ends_at = trio.current_time() + deadline_s
    await host.dial_peer(peer, addresses, deadline_s=deadline_s)
    connection, left_s = host.connection(peer), max(ends_at - trio.current_time(), 0.0)
    request = canonical(GetManifest(swarm=swarm))
    try:
        data = await host.request(peer, MANIFEST_PROTOCOL, request, deadline_s=left_s, limit_bytes=ANSWER_LIMIT_BYTES)
    except NetworkError:
        await host.close(connection)  # perhaps the far end no longer reads it; the next try makes another
        raise
    reply: ManifestReply = decode(data, ManifestReply, peer=peer, limit_bytes=ANSWER_LIMIT_BYTES)  # type: ignore[arg-type]
    if isinstance(reply, Refusal):
        if reply.reason.startswith(OTHER_SWARM):
            raise RemoteError(reply.reason, peer=peer)
        raise NetworkError(f"{peer}: {reply.reason}")
    return Manifest.from_canonical(reply.manifest, swarm, peer=peer)
