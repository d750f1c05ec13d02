"""Addresses of nodes that are reached through a relay: `/ip4/192.0.2.7/tcp/4001/p2p/RELAY/p2p-circuit/p2p/PEER`."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.protocol.address import ADDRESS_LIMIT_CHARS, Address, parse_address
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import MalformedPeerId, PeerId, parse_peer_id

_CIRCUIT = "/p2p-circuit/p2p/"


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitAddress:
    """Through which node to connect, and who must prove to be at the far end."""

    relay: Address
    peer: PeerId


def is_circuit(text: str) -> bool:
    """Whether a text means an address through a relay, well-formed or not."""
    return "/p2p-circuit" in text


def parse_any(text: str) -> Address | CircuitAddress:
    """Read an address of either sort. Raises ConfigError."""
    if not is_circuit(text) or len(text) > ADDRESS_LIMIT_CHARS:
        return parse_address(text)
    relay_text, found, peer_text = text.partition(_CIRCUIT)
    try:
        peer = parse_peer_id(peer_text)
    except MalformedPeerId:
        found = ""
    relay = parse_address(relay_text)
    if not found or relay.peer == peer:
        raise ConfigError(f"{text!r} is no address through a relay; it looks like …/p2p/RELAY{_CIRCUIT}PEER")
    return CircuitAddress(relay=relay, peer=peer)


def format_circuit(relay_address: str, peer: PeerId) -> str:
    """The text of `peer`'s address through the node at `relay_address`."""
    return f"{relay_address}{_CIRCUIT}{peer}"
