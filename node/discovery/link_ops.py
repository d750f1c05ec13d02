"""Operations of the control socket for a public swarm: the link that others join with, and revocations."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Mapping, Sequence

import trio

from shoal.node.control import Handler, Order
from shoal.node.control_client import JsonValue
from shoal.node.discovery.credentials import kept_invite, revoke
from shoal.node.parts import Parts
from shoal.protocol.address import parse_address
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import PeerId
from shoal.protocol.invites import parse_holder
from shoal.protocol.swarm_link import ADDRESSES_LIMIT, PEERS_LIMIT, SwarmLink, format_link
from shoal.protocol.voting import FaultModel, are_enough


def link_handlers(parts: Parts) -> Mapping[str, Handler]:
    """The op `link`."""

    async def link() -> Mapping[str, JsonValue]:
        made, admission = swarm_link(parts), parts.config.manifest.swarm.admission
        return {
            "link": format_link(made),
            "admits": admission == "open" or made.invite is not None,
            "admission": admission,
            "workload": parts.config.manifest.workload.name,
            "data": parts.config.data is not None,
        }

    return {"link": link}


def swarm_link(parts: Parts) -> SwarmLink:
    """The link that others join with. An invite in it is for whoever has the link, and so a secret."""
    invite = kept_invite(parts.store.folder, parts.swarm_id)
    return SwarmLink(
        swarm=parts.swarm_id,
        addresses=tuple(link_addresses(parts)),
        invite=invite if invite is not None and invite.key is not None else None,  # one for this node helps nobody
        checkpoint=parts.chain.checkpoint,
    )


def link_orders(parts: Parts) -> Mapping[str, Order]:
    """The op `revoke`."""

    async def take_back(peers: Sequence[str]) -> Mapping[str, JsonValue]:
        """Shut peers out. counted: voters among them that hold up the others until they are forgotten.

        Who takes part in rounds and came with an invite that is revoked is named beside it: a member that was away, or
        starts anew, has no record that says with what another came.
        """
        named = frozenset(map(parse_holder, peers))
        named |= parts.members.came_with(named) & {*parts.chain.voters, *parts.chain.taking_part}
        revocations = await trio.to_thread.run_sync(revoke, parts.store.folder, parts.config.manifest, named)
        parts.members.revoke(revocations)
        here = {*parts.members.alive(), parts.identity.peer_id}
        certifies, chain = parts.config.manifest.strategy.certifies, parts.chain
        out = [peer for peer in chain.voters if certifies and parts.members.is_revoked(peer)]
        return {
            "version": revocations.version,
            "revoked": len(revocations.peers),
            "counted": holding_up(out, here, chain.voters, chain.voting.faults),
        }

    return {"revoke": take_back}


def holding_up(
    revoked: Collection[PeerId], here: Collection[PeerId], voters: Collection[PeerId], faults: FaultModel
) -> list[str]:
    """The voters that are revoked, if those who are here are no majority as long as these are counted; else none."""
    present = set(here).intersection(voters).difference(revoked)
    return [] if are_enough(len(present), len(voters), faults) else sorted(str(peer) for peer in revoked)


def link_addresses(parts: Parts) -> list[str]:
    """Addresses that a newcomer may ask: this node's first, then linked members', in case that this one is gone."""
    members = parts.members
    others = [members.addresses_of(peer) for peer in sorted(members.links.linked())]
    of_peers = [best_addresses(addresses) for addresses in (parts.host.addresses, *others)]
    if any(found and not _is_loopback(found[0]) for found in of_peers):
        of_peers = [[address for address in found if not _is_loopback(address)] for found in of_peers]
    return [address for found in [found for found in of_peers if found][:PEERS_LIMIT] for address in found]


def best_addresses(addresses: Iterable[str]) -> list[str]:
    """Valid addresses of a peer that reach furthest, in order: names and public ones, private ones, loopback."""
    usable = []
    for text in addresses:
        try:
            parse_address(text)
        except ConfigError:
            continue
        usable.append(text)
    return sorted(usable, key=_distance)[:ADDRESSES_LIMIT]


def _distance(address: str) -> int:
    try:
        ip = ipaddress.ip_address(parse_address(address).host)
    except ValueError:
        return 0
    return 2 if ip.is_loopback else 0 if ip.is_global else 1


def _is_loopback(address: str) -> bool:
    return _distance(address) == 2
