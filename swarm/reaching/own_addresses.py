"""Own addresses of this machine, watched: which are gone and which have come, as a laptop goes from network to network.

    Linux       the kernel says so over a socket of rtnetlink(7), and nothing runs until it does
    elsewhere   the addresses are looked at every POLL_S

What the kernel says comes in bunches, so a change is what is so when it has been quiet for SETTLE_S. An address that
went and came back meanwhile is in both lists: connections that had it are mostly dead, and another network may use it.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

import trio

from shoal.swarm.reaching.networks import interface_hosts, is_loopback

POLL_S: Final = 3.0
SETTLE_S: Final = 0.2
SETTLE_LIMIT_S: Final = 1.0
"""So long a network that does not become quiet is waited for."""
READ_LIMIT_BYTES: Final = 64 << 10

_GROUPS: Final = 0x10 | 0x100 | 0x40 | 0x400
"""RTMGRP_IPV4_IFADDR, RTMGRP_IPV6_IFADDR, RTMGRP_IPV4_ROUTE, RTMGRP_IPV6_ROUTE (linux/rtnetlink.h)."""
_DELETED_ADDRESS, _NEW_ROUTE, _DELETED_ROUTE = 21, 24, 25
"""RTM_DELADDR, RTM_NEWROUTE, RTM_DELROUTE."""
_HEAD, _ADDRESS, _ROUTE, _ATTRIBUTE = map(struct.Struct, ("=IHHII", "=BBBBI", "=BBBBBBBBI", "=HH"))
"""nlmsghdr, ifaddrmsg, rtmsg, rtattr."""
_ADDRESS_BYTES: Final[dict[int, int]] = {socket.AF_INET: 4, socket.AF_INET6: 16}
_ADDRESS_ATTRIBUTES: Final = (1, 2)
"""IFA_ADDRESS, and IFA_LOCAL, which is the own end where a link has two."""
_MAIN_TABLE: Final = 254
_LOST_SOME: Final = OSError
"""ENOBUFS: the kernel had more to say than there was room for, so that all has to be looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressChange:
    """Own addresses that are gone and that have come; with neither, the way out of this machine is another one."""

    gone: frozenset[str] = frozenset()
    come: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """Word that something changed. removed: addresses that went, if only for a moment. rerouted: a default route."""

    removed: frozenset[str] = frozenset()
    rerouted: bool = False

    def __or__(self, other: Heard) -> Heard:
        return Heard(removed=self.removed | other.removed, rerouted=self.rerouted or other.rerouted)


class Source(Protocol):
    """Tells when addresses may have changed."""

    async def next(self) -> Heard:
        """Return when something has happened. Cancellation loses nothing."""


class OwnAddresses:
    """Addresses of this machine that others can use, and their changes. hosts: looks at them."""

    def __init__(self, source: Source, hosts: Callable[[], frozenset[str]]) -> None:
        self._source, self._hosts = source, hosts
        self.now = hosts()

    async def next_change(self) -> AddressChange:
        """Wait until they are others, or the way out of this machine is. Cancellation loses nothing that lasts."""
        while True:
            heard = await self._source.next()
            with trio.move_on_after(SETTLE_LIMIT_S):
                while (more := await self._quiet()) is not None:
                    heard |= more
            before, self.now = self.now, self._hosts()
            gone = (before - self.now) | (heard.removed & before)
            come = (self.now - before) | (gone & self.now)
            if gone or come or heard.rerouted:
                return AddressChange(gone=gone, come=come)

    async def _quiet(self) -> Heard | None:
        """Return None when nothing has happened for SETTLE_S, else what has."""
        with trio.move_on_after(SETTLE_S):
            return await self._source.next()
        return None


@dataclass(slots=True)
class Netlink:
    """Answers of Linux about addresses and default routes; `with` it, for its socket. Raises OSError where none."""

    _socket: socket.socket = field(init=False)

    def __enter__(self) -> Netlink:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)  # NETLINK_ROUTE
        try:
            self._socket.bind((0, _GROUPS))
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    async def next(self) -> Heard:
        """See `Source`."""
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            try:
                data, (sender, _) = self._socket.recvfrom(READ_LIMIT_BYTES)
            except BlockingIOError:
                continue
            except _LOST_SOME:
                return Heard(rerouted=True)
            if sender == 0 and (heard := heard_in(data)) is not None:  # else a process of this machine sends it
                return heard


class Poll:
    """Says every POLL_S that something may have changed."""

    async def next(self) -> Heard:
        """See `Source`."""
        await trio.sleep(POLL_S)
        return Heard()


def heard_in(data: bytes) -> Heard | None:
    """Facts that messages of rtnetlink(7) tell; None if they are of no meaning here."""
    heard: Heard | None = None
    for kind, body in _messages(data):
        if kind not in (_NEW_ROUTE, _DELETED_ROUTE):
            removed = frozenset(_addresses(body)) if kind == _DELETED_ADDRESS else frozenset()
            heard = (heard or Heard()) | Heard(removed=removed)
        elif _is_default(body):
            heard = (heard or Heard()) | Heard(rerouted=True)
    return heard


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _HEAD.size:
        length, kind, *_ = _HEAD.unpack_from(data)
        if not _HEAD.size <= length <= len(data):
            return
        yield kind, data[_HEAD.size : length]
        data = data[_padded(length) :]


def _addresses(body: bytes) -> Iterator[str]:
    """The addresses in an ifaddrmsg and its attributes."""
    if len(body) < _ADDRESS.size:
        return
    family, body = body[0], body[_ADDRESS.size :]
    while len(body) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(body)
        value = body[_ATTRIBUTE.size : length]
        if length < _ATTRIBUTE.size:
            return
        if kind in _ADDRESS_ATTRIBUTES and len(value) == _ADDRESS_BYTES.get(family):
            yield socket.inet_ntop(family, value)
        body = body[_padded(length) :]


def _is_default(body: bytes) -> bool:
    """True for a route to everywhere, of the table that all programs use."""
    if len(body) < _ROUTE.size:
        return False
    _, destination_bits, _, _, table, *_ = _ROUTE.unpack_from(body)
    return (destination_bits, table) == (0, _MAIN_TABLE)


def _padded(length: int) -> int:
    return -(-length // 4) * 4


def usable_hosts() -> frozenset[str]:
    """The machine's addresses that others may be able to use."""
    families = (socket.AF_INET, socket.AF_INET6)
    return frozenset(host for family in families for host in interface_hosts(family) if not is_loopback(host))


@contextlib.contextmanager
def own_addresses() -> Iterator[OwnAddresses]:
    """Watch this machine's addresses as well as its system lets that be done."""
    with contextlib.ExitStack() as stack:
        source: Source = Poll()
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # a sandbox that has no such sockets
                source = stack.enter_context(Netlink())
        yield OwnAddresses(source, usable_hosts)
