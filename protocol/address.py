"""Addresses of nodes as people write them: `/ip4/192.0.2.7/tcp/4001/p2p/12D3KooW…`.

The subset of multiaddresses that Shoal listens on and dials: one host, one TCP port, the PeerId that must answer.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import MalformedPeerId, PeerId, parse_peer_id

ADDRESS_LIMIT_CHARS = 512
EXAMPLE = "/ip4/192.0.2.7/tcp/4001/p2p/12D3KooW…"
LISTEN_EXAMPLE = "/ip4/0.0.0.0/tcp/4001"

_PORT_LIMIT = 65_535
_DNS_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,62}))*\.?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Host and port to connect to, and the peer that must prove its identity there."""

    host: str
    port: int
    peer: PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenAddress:
    """Host and port to listen on; port 0 lets the system choose one."""

    host: str
    port: int


def parse_address(text: str) -> Address:
    """Read a dialable address. Raises ConfigError, whose text says what an address looks like."""
    match _parts(text):
        case [kind, host, "tcp", port, "p2p", peer]:
            try:
                return Address(host=_host(kind, host), port=_port(port, lowest=1), peer=parse_peer_id(peer))
            except (ValueError, MalformedPeerId) as error:
                raise ConfigError(f"{_shown(text)}: {error}; an address looks like {EXAMPLE}") from None
    raise ConfigError(f"{_shown(text)} is not the address of a node; it looks like {EXAMPLE}")


def parse_listen_address(text: str) -> ListenAddress:
    """Read an address to listen on. Raises ConfigError."""
    match _parts(text):
        case ["ip4" | "ip6" as kind, host, "tcp", port]:
            try:
                return ListenAddress(host=_host(kind, host), port=_port(port, lowest=0))
            except ValueError as error:
                raise ConfigError(f"{_shown(text)}: {error}; to listen, write {LISTEN_EXAMPLE}") from None
    raise ConfigError(f"cannot listen on {_shown(text)}; write {LISTEN_EXAMPLE}")


def format_address(host: str, port: int, peer: PeerId) -> str:
    """The text of an IP address or DNS name, port and PeerId."""
    try:
        kind = f"ip{ipaddress.ip_address(host).version}"
    except ValueError:
        kind = "dns"
    return f"/{kind}/{host}/tcp/{port}/p2p/{peer}"


def _parts(text: str) -> list[str]:
    if len(text) > ADDRESS_LIMIT_CHARS or not text.startswith("/"):
        return []
    return text.split("/")[1:]


def _host(kind: str, host: str) -> str:
    match kind:
        case "ip4":
            return str(ipaddress.IPv4Address(host))
        case "ip6":
            return str(ipaddress.IPv6Address(host))
        case "dns" | "dns4" | "dns6" if _DNS_NAME.fullmatch(host):
            return host
    raise ValueError(f"/{kind}/{host} names no host")


def _port(text: str, *, lowest: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and lowest <= int(text) <= _PORT_LIMIT):
        raise ValueError(f"{text!r} is not a port between {lowest} and {_PORT_LIMIT}")
    return int(text)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 100 else text[:100] + "…")
