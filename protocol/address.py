"""Addresses of nodes as people write them: `/ip4/192.0.2.7/tcp/4001/p2p/12D3KooW…`.

The subset of multiaddresses that Shoal listens on and dials: one host, one TCP port, the PeerId that must answer; and
those of nodes that are reached through a relay: `/ip4/192.0.2.7/tcp/4001/p2p/RELAY/p2p-circuit/p2p/PEER`.
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
CIRCUIT = "/p2p-circuit/p2p/"

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


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitAddress:
    """Through which node to connect, and who must prove to be at the far end."""

    relay: Address
    peer: PeerId


def parse_address(text: str) -> Address:
    """Read a dialable address. Raises ConfigError, whose text says what an address looks like."""
    match _parts(text):
        case [kind, host, "tcp", port, "p2p", peer]:
            try:
                return Address(host=_host(kind, host), port=_port(port, lowest=1), peer=parse_peer_id(peer))
            except (ValueError, MalformedPeerId) as error:
                raise ConfigError(f"{_shown(text)}: {error}; an address looks like {EXAMPLE}") from None
    raise ConfigError(f"{_shown(text)} is not the address of a node; it looks like {EXAMPLE}")


def is_circuit(text: str) -> bool:
    """True if a text means an address through a relay, well-formed or not."""
    return "/p2p-circuit" in text


def parse_any(text: str) -> Address | CircuitAddress:
    """Read an address of either sort. Raises ConfigError."""
    if not is_circuit(text) or len(text) > ADDRESS_LIMIT_CHARS:
        return parse_address(text)
    relay_text, found, peer_text = text.partition(CIRCUIT)
    try:
        peer = parse_peer_id(peer_text)
    except MalformedPeerId:
        found = ""
    relay = parse_address(relay_text)
    if not found or relay.peer == peer:
        raise ConfigError(f"{text!r} is no address through a relay; it looks like …/p2p/RELAY{CIRCUIT}PEER")
    return CircuitAddress(relay=relay, peer=peer)


def format_circuit(relay_address: str, peer: PeerId) -> str:
    """The text of `peer`'s address through the node at `relay_address`."""
    return f"{relay_address}{CIRCUIT}{peer}"


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
