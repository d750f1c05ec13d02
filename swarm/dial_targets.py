"""Limits on dialling addresses that others name: nobody shall send a swarm against a third party.

A record is signed by its peer, which may put any address into it, and only a handshake shows who is there. So:

* Each host and port is dialled `TARGET_BURST` times, then every `1 / TARGET_PER_S`, whoever names it, and each public
  host `HOST_BURST` times, then `HOST_PER_S`, until somebody is reached there. All DNS names but those that this node's
  user gave count as one target.
* Of one peer at most ADDRESSES_LIMIT addresses are tried.
* Loopback is tried only of a peer that names nothing but this machine's own addresses, and only by a node that has no
  other address than loopback itself, or whose user named one: others on this machine reach each other without. So is
  the unspecified address, which leads there too; and what an IPv6 address has of an IPv4 one in it is taken for that.
* Private addresses of networks in which this machine is not are tried only of a peer that names no public one.
* A name that others gave is dialled where it leads, as far as its peer may be there by the same rules, and counts there
  too: so whoever has it lead elsewhere a moment later gains nothing.

For an address through a relay that is not connected the relay's own address counts in all of this, beside what the peer
names of itself; of where the peer itself is it says nothing.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence

import trio

from shoal.protocol.address import Address, CircuitAddress, format_address, format_circuit, is_circuit, parse_any
from shoal.protocol.errors import ConfigError, NetworkError
from shoal.protocol.identity import PeerId
from shoal.protocol.limits import Rates
from shoal.swarm.reaching.networks import (
    in_dialling_order,
    is_loopback,
    is_private,
    machine_at,
    own_hosts,
    own_networks,
)

ADDRESSES_LIMIT = 8
TARGET_PER_S, TARGET_BURST = 1 / 15, 16.0
HOST_PER_S, HOST_BURST = 1.0, 128.0
NAMED_LIMIT = 1024
_ANY_NAME = ("a name that others gave", 0)


class DialTargets:
    """Dial targets of one node, and how often each was dialled in vain. Use from trio's thread."""

    def __init__(self) -> None:
        self._named: set[str] = set()
        self.begin_anew()

    def begin_anew(self) -> None:
        """This machine's network is another one: what was dialled in vain was from where it is no more."""
        self._targets: Rates[tuple[str, int]] = Rates(TARGET_PER_S, TARGET_BURST)
        self._hosts: Rates[str] = Rates(HOST_PER_S, HOST_BURST)

    def named(self, address: Address | CircuitAddress) -> None:
        """This node's user gave an address: its host counts for itself, though it be a name."""
        if len(self._named) < NAMED_LIMIT:
            self._named.add(_direct(address).host)

    @property
    def names_loopback(self) -> bool:
        """True if this node's user named an address that means this machine alone."""
        return any(host == "localhost" or is_loopback(machine_at(host)) for host in self._named)

    def may_dial(self, address: Address | CircuitAddress) -> bool:
        """Return True if this address may be dialled once more, and count the dial."""
        now, host = trio.current_time(), machine_at(_direct(address).host)
        return self._targets.take(self._target(address), now) and (is_private(host) or self._hosts.take(host, now))

    def reached(self, address: Address | CircuitAddress) -> None:
        """A peer of the swarm has proven to be there."""
        self._targets.forget(self._target(address))
        self._hosts.forget(machine_at(_direct(address).host))

    def is_name_of_others(self, address: Address | CircuitAddress) -> bool:
        """True if the host is a DNS name, and not one that this node's user gave."""
        host = _direct(address).host
        return _is_name(host) and host not in self._named

    def _target(self, address: Address | CircuitAddress) -> tuple[str, int]:
        if self.is_name_of_others(address):
            return _ANY_NAME
        direct = _direct(address)
        return machine_at(direct.host), direct.port


async def places_of(
    address: Address | CircuitAddress, beside: Sequence[str], *, on_loopback: bool = True
) -> list[Address | CircuitAddress]:
    """Where a name leads that others gave, as far as its peer may be there, of which the addresses `beside` are said.

    on_loopback: as of `worth_dialling`. Raises NetworkError if it leads nowhere.
    """
    named = _direct(address)
    try:
        found = await trio.socket.getaddrinfo(named.host, named.port, type=trio.socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # the latter for what no name of a machine can be
        raise NetworkError(f"no machine is found by the name {named.host}: {error}") from error
    hosts = dict.fromkeys(str(place[0]) for *_, place in found if "%" not in str(place[0]))
    texts = [format_address(host, named.port, named.peer) for host in hosts]
    if isinstance(address, CircuitAddress):
        texts = [format_circuit(text, address.peer) for text in texts]
    kept = set(_possible([*filter(_host, beside), *texts], on_loopback=on_loopback))
    return [parse_any(text) for text in in_dialling_order(texts) if text in kept][:ADDRESSES_LIMIT]


def worth_dialling(
    addresses: Sequence[str], *, is_connected: Callable[[PeerId], bool] = lambda peer: False, on_loopback: bool = True
) -> tuple[str, ...]:
    """Of what one peer is said to have, what is tried, in that order. What is no address is left in.

    is_connected: whether a relay is, so that nothing is dialled to get there. on_loopback: whether loopback is tried.
    """
    return in_dialling_order(_possible(addresses, is_connected, on_loopback=on_loopback))[:ADDRESSES_LIMIT]


def _possible(
    addresses: Sequence[str], is_connected: Callable[[PeerId], bool] = lambda peer: False, *, on_loopback: bool
) -> list[str]:
    """Those of a peer's addresses at which it can be, as far as all of them together show that."""
    dialled = {text: host for text in addresses if (host := _host(text, is_connected)) is not None}
    own = {host for text, host in dialled.items() if not is_circuit(text)}
    hosts = own.union(dialled.values())
    mine = own_hosts() if any(map(is_loopback, hosts)) else frozenset[str]()
    here = on_loopback and all(is_loopback(host) or host in mine for host in hosts)
    networks = own_networks() if any(map(is_private, hosts)) and not all(map(is_private, hosts)) else ()

    def may(text: str) -> bool:
        host = dialled.get(text)
        if host is None:
            return True
        if is_loopback(host):
            return here
        beside = hosts if is_circuit(text) else own
        inside = is_private(host) and not all(map(is_private, beside))
        return not inside or any(ipaddress.ip_address(host) in network for network in networks)

    return list(filter(may, addresses))


def _direct(address: Address | CircuitAddress) -> Address:
    return address.relay if isinstance(address, CircuitAddress) else address


def _host(text: str, is_connected: Callable[[PeerId], bool] = lambda peer: False) -> str | None:
    """The IP address that is dialled for an address; None for a name, a relay that is connected, or no address."""
    try:
        parsed = parse_any(text)
    except ConfigError:
        return None
    if isinstance(parsed, CircuitAddress) and is_connected(parsed.relay.peer):
        return None
    host = _direct(parsed).host
    return None if _is_name(host) else machine_at(host)


def _is_name(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False
