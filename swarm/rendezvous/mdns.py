"""Finding nodes of the same swarm on the local network, by multicast DNS (DNS-SD).

    <PeerId>._shoal._tcp.local.   TXT   swarm=<SwarmId in hex>   a0=<address>   a1=<address> …

A hint and no more: whoever is found proves its PeerId when it is dialled. Where multicast does not work the node
warns once and does without. `zeroconf` runs in threads of its own; what it finds crosses into trio by token.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import trio
from zeroconf import (
    Error,
    InterfaceChoice,
    IPVersion,
    ServiceBrowser,
    ServiceInfo,
    ServiceListener,
    Zeroconf,
)

from shoal.protocol.address import Address, parse_address
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import PeerId
from shoal.swarm.streams import Mailbox

log = logging.getLogger(__name__)

SERVICE_TYPE = "_shoal._tcp.local."
ADDRESS_LIMIT_ITEMS = 8  # announced, and read from an announcement
TEXT_LIMIT_BYTES = 255  # of one TXT string, by DNS
SIGHTING_LIMIT_ITEMS = 256  # names waiting to be looked up
FOUND_LIMIT_ITEMS = 256
LOOKUP_DEADLINE_MS = 2_000
LOOKUPS_AT_ONCE = 16
"""In threads of their own: whoever announces names behind which there is nothing keeps others waiting the less."""
OPEN_DEADLINE_S = 20.0  # where one of its sockets fails zeroconf waits for ever, in a thread
REGISTER_DEADLINE_S = 20.0
CLOSE_DEADLINE_S = 2.0


class _NoTracebacks(logging.Filter):
    """Tells in one line what `zeroconf` reports with a traceback: an address that went away is nobody's fault."""

    def filter(self, record: logging.LogRecord) -> bool:
        """True for a record that may stay as it is."""
        if record.exc_info is None:
            return True
        log.info("the local network is not searched from an address that is gone or cut off: %s", record.exc_info[1])
        return False


logging.getLogger("zeroconf").addFilter(_NoTracebacks())


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPeer:
    """A node that announced itself, with the addresses at which it says it can be dialled."""

    peer: PeerId
    addresses: tuple[str, ...]


class LocalDiscovery:
    """Announces this node, if it is to, and reports others of the same swarm in `found`."""

    def __init__(
        self,
        *,
        peer: PeerId,
        swarm_id: str,
        addresses: Sequence[str] | None,
        interfaces: Sequence[str] | None = None,
    ) -> None:
        """`swarm_id` in hex. `addresses`: None for who only listens. `interfaces` are IPv4 addresses of this machine's
        interfaces; None means all of them."""
        self.found: Mailbox[LocalPeer] = Mailbox(FOUND_LIMIT_ITEMS)
        self._peer = peer
        self._swarm_id = swarm_id
        self._announces = addresses is not None
        self._addresses = tuple(addresses or ())[:ADDRESS_LIMIT_ITEMS]
        self._interfaces = list(interfaces) if interfaces is not None else InterfaceChoice.All
        self._sightings: Mailbox[str] = Mailbox(SIGHTING_LIMIT_ITEMS)
        self._threads = trio.CapacityLimiter(LOOKUPS_AT_ONCE)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Announce and listen until cancelled; started at once, since announcing takes a second or two.

        Never raises for the network's sake: without multicast it warns once and returns. Cancellation withdraws the
        announcement and returns within CLOSE_DEADLINE_S.
        """
        task_status.started()
        try:
            with trio.fail_after(OPEN_DEADLINE_S):
                zeroconf = await trio.to_thread.run_sync(self._open, abandon_on_cancel=True)
        except trio.TooSlowError:
            _warn(TimeoutError(f"not there within {OPEN_DEADLINE_S:g} s"))
            return
        except (OSError, Error, RuntimeError) as error:
            _warn(error)
            return
        try:
            listener = _Sightings(trio.lowlevel.current_trio_token(), self._sightings)
            ServiceBrowser(zeroconf, SERVICE_TYPE, listener)
            async with trio.open_nursery() as nursery:
                if self._announces:
                    nursery.start_soon(self._announce, zeroconf)
                nursery.start_soon(self._look_up, zeroconf)
        finally:
            self.found.close()
            with trio.move_on_after(CLOSE_DEADLINE_S, shield=True):
                await trio.to_thread.run_sync(zeroconf.close, abandon_on_cancel=True)

    def _open(self) -> Zeroconf:
        return Zeroconf(interfaces=self._interfaces, ip_version=IPVersion.V4Only)

    async def _announce(self, zeroconf: Zeroconf) -> None:
        """Register our service: probes for the name, which takes over a second."""
        info = self._service()
        with trio.move_on_after(REGISTER_DEADLINE_S) as scope:
            try:
                await trio.to_thread.run_sync(zeroconf.register_service, info, abandon_on_cancel=True)
            except (OSError, Error, RuntimeError) as error:
                _warn(error)
        if scope.cancelled_caught:
            _warn(TimeoutError(f"not announced within {REGISTER_DEADLINE_S:g} s"))

    async def _look_up(self, zeroconf: Zeroconf) -> None:
        """Read the announcement behind each name seen."""
        places = trio.Semaphore(LOOKUPS_AT_ONCE)
        async with trio.open_nursery() as nursery:
            async for name in self._sightings:
                if name != f"{self._peer}.{SERVICE_TYPE}":
                    await places.acquire()
                    nursery.start_soon(self._look_up_one, zeroconf, name, places)

    async def _look_up_one(self, zeroconf: Zeroconf, name: str, places: trio.Semaphore) -> None:
        try:
            info = await trio.to_thread.run_sync(
                zeroconf.get_service_info,
                SERVICE_TYPE,
                name,
                LOOKUP_DEADLINE_MS,
                abandon_on_cancel=True,
                limiter=self._threads,
            )
        except (OSError, Error, RuntimeError) as error:
            log.debug("cannot look up %s: %s", name, error)
        else:
            peer = PeerId(name.removesuffix("." + SERVICE_TYPE))
            if info is not None and (local := self._read(peer, info)) is not None:
                self.found.put(local)
        finally:
            places.release()

    def _service(self) -> ServiceInfo:
        properties = {"swarm": self._swarm_id}
        for index, address in enumerate(self._addresses):
            if len(address) + len(f"a{index}=") <= TEXT_LIMIT_BYTES:
                properties[f"a{index}"] = address
        hosts = [parsed.host for parsed in map(parse_address, self._addresses)]
        return ServiceInfo(
            SERVICE_TYPE,
            f"{self._peer}.{SERVICE_TYPE}",
            parsed_addresses=[host for host in hosts if _is_ipv4(host)],
            port=parse_address(self._addresses[0]).port if self._addresses else 0,
            properties=properties,
            server=f"{self._peer}.local.",
        )

    def _read(self, peer: PeerId, info: ServiceInfo) -> LocalPeer | None:
        """Read an announcement; None if it is not of our swarm or makes no sense."""
        texts = info.decoded_properties
        if texts.get("swarm") != self._swarm_id:
            return None
        addresses = [texts.get(f"a{index}") for index in range(ADDRESS_LIMIT_ITEMS)]
        usable = tuple(text for text in addresses if text and _names(peer, text))
        return LocalPeer(peer=peer, addresses=usable) if usable else None


class _Sightings(ServiceListener):
    """Called in zeroconf's thread; hands names to trio."""

    def __init__(self, token: trio.lowlevel.TrioToken, sightings: Mailbox[str]) -> None:
        self._token = token
        self._sightings = sightings

    def add_service(self, zc: Zeroconf, type_: str, name: str) -> None:
        with contextlib.suppress(trio.RunFinishedError):  # zeroconf's thread ends a moment after the node
            self._token.run_sync_soon(self._sightings.put, name)

    update_service = add_service

    def remove_service(self, zc: Zeroconf, type_: str, name: str) -> None:
        """Membership finds out who is gone; a withdrawn announcement proves nothing."""


def _names(peer: PeerId, text: str) -> bool:
    parsed = _parsed(text)
    return parsed is not None and parsed.peer == peer


def _parsed(text: str) -> Address | None:
    try:
        return parse_address(text)
    except ConfigError:
        return None


def _is_ipv4(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 4
    except ValueError:
        return False


def _warn(error: Exception) -> None:
    why = str(error) or type(error).__name__
    log.warning("nodes on the local network cannot be found (%s); peers must be named by address", why)
