"""At which addresses others may reach a node on this machine; their form is `shoal.protocol.address`'s."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

import psutil  # type: ignore[import-untyped]

from shoal.protocol.address import (
    ADDRESS_LIMIT_CHARS,
    Address,
    ListenAddress,
    format_address,
    parse_address,
    parse_listen_address,
)
from shoal.protocol.identity import PeerId

__all__ = [
    "ADDRESS_LIMIT_CHARS",
    "Address",
    "ListenAddress",
    "format_address",
    "parse_address",
    "parse_listen_address",
    "reachable_addresses",
]


def reachable_addresses(bound: Iterable[tuple[str, int]], peer: PeerId) -> tuple[str, ...]:
    """Dialable addresses of sockets bound to (host, port), wildcards expanded to this machine's interfaces.

    Loopback comes last: it helps only those on the same machine.
    """
    found: dict[str, bool] = {}  # address → whether it is loopback; also removes repetitions
    for host, port in bound:
        ip = ipaddress.ip_address(host)
        for candidate in _interface_addresses(ip.version) if ip.is_unspecified else [host]:
            found[format_address(candidate, port, peer)] = ipaddress.ip_address(candidate).is_loopback
    return tuple(sorted(found, key=lambda address: found[address]))


def _interface_addresses(version: int) -> list[str]:
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    addresses = [
        entry.address for entries in psutil.net_if_addrs().values() for entry in entries if entry.family == family
    ]
    # A link-local address means something only together with the interface it came from.
    return [address for address in addresses if "%" not in address and not address.startswith("169.254.")]
