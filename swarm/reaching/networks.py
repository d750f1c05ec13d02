"""Networks of IP addresses: private ones mean something only to those on the same network; and this machine's own."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import psutil  # type: ignore[import-untyped]

from shoal.protocol.address import CircuitAddress, format_address, parse_any
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import PeerId

PRIVATE_NETWORKS = tuple(
    map(
        ipaddress.ip_network,
        (
            "10.0.0.0/8",
            "172.16.0.0/12",
            "192.168.0.0/16",
            "100.64.0.0/10",
            "127.0.0.0/8",
            "169.254.0.0/16",
            "::1/128",
            "fc00::/7",
            "fe80::/10",
        ),
    )
)
"""Addresses that other machines may have as well (RFC 1918, 6598, 1122, 3927, 4291, 4193)."""

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def is_private(host: str) -> bool:
    """True if an IP address means one machine on one network only; names are not."""
    try:
        address = ipaddress.ip_address(machine_at(host))
    except ValueError:
        return False
    return any(address in network for network in PRIVATE_NETWORKS)


def machine_at(host: str) -> str:
    """The address at which a dial of `host` arrives, whichever way it is written; a name stays as it is.

    An IPv4 address in an IPv6 one is that address, and the unspecified one is this machine.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_unspecified:
        return "127.0.0.1" if address.version == 4 else "::1"
    return str(address)


def reach_of(host: str) -> int:
    """How far an IP address means one machine: 0 on that itself, 1 on its link, 2 in its network, 3 everywhere."""
    address = ipaddress.ip_address(machine_at(host))
    if address.is_loopback:
        return 0
    return 1 if address.is_link_local else 2 if is_private(host) else 3


def is_loopback(host: str) -> bool:
    """True for an IP address that means this machine alone; names are not."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def own_networks() -> tuple[Network, ...]:
    """The networks that this machine has an interface in."""
    found: list[Network] = []
    for _, entry in _addresses():
        if entry.netmask and "%" not in entry.address:
            prefix = bin(int(ipaddress.ip_address(entry.netmask))).count("1")
            found.append(ipaddress.ip_network(f"{entry.address}/{prefix}", strict=False))
    return tuple(found)


def _addresses() -> Iterator[tuple[str, Any]]:
    """The IP addresses of this machine, each with the name of its interface; as psutil tells them."""
    for name, entries in psutil.net_if_addrs().items():
        yield from ((name, entry) for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6))


def in_dialling_order(addresses: Sequence[str]) -> tuple[str, ...]:
    """`addresses`, those that are likely to work first.

    Private ones of this machine's own networks, public ones, then those through relays; private ones of other networks
    last: a router may know the way to them, but mostly they are somebody else's here. What is no address comes first,
    to be complained about.
    """
    if len(addresses) < 2:
        return tuple(addresses)
    networks = own_networks()

    def rank(text: str) -> int:
        try:
            parsed = parse_any(text)
        except ConfigError:
            return 0
        if isinstance(parsed, CircuitAddress):
            return 3
        if not is_private(parsed.host):
            return 2
        address = ipaddress.ip_address(parsed.host)
        if address.is_loopback:
            return 2
        return 1 if any(address in network for network in networks) else 4

    return tuple(sorted(addresses, key=rank))


def own_hosts() -> frozenset[str]:
    """The IP addresses of this machine's interfaces."""
    return frozenset(entry.address for _, entry in _addresses())


def has_network() -> bool:
    """True if an interface that is up has an address which means something beyond this machine."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    here = (ipaddress.ip_address(entry.address) for name, entry in _addresses() if name in up)
    return any(not address.is_loopback and not address.is_link_local for address in here)


def reachable_addresses(bound: Iterable[tuple[str, int]], peer: PeerId) -> tuple[str, ...]:
    """Dialable addresses of sockets bound to (host, port), those that `bound_hosts` says.

    Loopback comes last: it helps only those on the same machine.
    """
    found: dict[str, bool] = {}  # address → whether it is loopback; also removes repetitions
    for host, port in bound:
        for candidate in bound_hosts(host):
            found[format_address(candidate, port, peer)] = ipaddress.ip_address(candidate).is_loopback
    return tuple(sorted(found, key=lambda address: found[address]))


def bound_hosts(host: str) -> list[str]:
    """The addresses that a socket bound to `host` is at: a wildcard is all of this machine's interfaces.

    It is at none while the machine does not have the address that it was bound to.
    """
    ip = ipaddress.ip_address(host)
    if ip.is_unspecified:
        return interface_hosts(socket.AF_INET if ip.version == 4 else socket.AF_INET6)
    return [host] if ip.is_loopback or host in own_hosts() else []


def interface_hosts(family: int) -> list[str]:
    """The addresses of this machine's interfaces, of one family."""
    addresses = [entry.address for _, entry in _addresses() if entry.family == family]
    # A link-local address means something only together with the interface it came from.
    return [address for address in addresses if "%" not in address and not address.startswith("169.254.")]
