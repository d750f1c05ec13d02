"""Which IP addresses mean something to whom: private ones only to those on the same network."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

import psutil  # type: ignore[import-untyped]

from shoal.protocol.errors import ConfigError
from shoal.swarm.reaching.circuit_address import CircuitAddress, parse_any

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
    """Whether an IP address means one machine on one network only; names are not."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return any(address in network for network in PRIVATE_NETWORKS)


def own_networks() -> tuple[Network, ...]:
    """The networks that this machine has an interface in."""
    found: list[Network] = []
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6) and entry.netmask and "%" not in entry.address:
                prefix = bin(int(ipaddress.ip_address(entry.netmask))).count("1")
                found.append(ipaddress.ip_network(f"{entry.address}/{prefix}", strict=False))
    return tuple(found)


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
    return frozenset(
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    )
