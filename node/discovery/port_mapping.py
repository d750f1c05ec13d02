"""Ports of the router that lead to this machine, where the router offers that (UPnP's Internet Gateway Device).

miniupnpc speaks the protocol; it blocks, so it runs in threads of its own, each call under a deadline. A mapping has a
lease, is renewed before half of it is over, and is removed at the end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import miniupnpc
import trio

from shoal.protocol.errors import NetworkError

DISCOVERY_MS = 2000
CALL_DEADLINE_S = 10.0
REMOVE_DEADLINE_S = 3.0
LEASE_S = 3600
PORTS_TRIED = 4
DESCRIPTION = "shoal"

T = TypeVar("T")

logger = logging.getLogger(__name__)


class MappingFailed(NetworkError):
    """There is no router that maps ports, or it does not want to."""


class PortMapping:
    """TCP ports of this machine, and those of the router that lead to them: `external`, in the same order.

    description_url: of the router's device description, where it is known; else it is looked for by multicast.
    """

    def __init__(self, ports: tuple[int, ...], *, description_url: str | None = None) -> None:
        self._ports = ports
        self._url = description_url
        self._router: Any = None
        self._renew_at = 0.0
        self.external: tuple[int, ...] = ()

    async def add(self) -> None:
        """Have the router map all ports. Raises MappingFailed, and then nothing is mapped."""
        await _in_thread(self._find)
        mapped: list[int] = []
        try:
            for port in self._ports:
                mapped.append(await _in_thread(partial(self._add_near, port, tuple(mapped))))
        except BaseException:
            self.external = tuple(mapped)
            await self.remove()
            raise
        self.external = tuple(mapped)
        self._renew_at = trio.current_time() + LEASE_S / 2

    async def renew_when_due(self) -> None:
        """Ask for another lease if half of the last is over. Raises MappingFailed."""
        if trio.current_time() < self._renew_at:
            return
        for port, external in zip(self._ports, self.external, strict=True):
            await _in_thread(partial(self._add, external, port))
        self._renew_at = trio.current_time() + LEASE_S / 2

    async def remove(self) -> None:
        """Take the mappings back, as far as the router answers. Cancellation: done all the same (bounded)."""
        external, self.external = self.external, ()
        with trio.move_on_after(REMOVE_DEADLINE_S, shield=True):
            for port in external:
                try:
                    await _in_thread(partial(self._delete, port))
                except MappingFailed as error:
                    logger.info("a mapping of the router stays until its lease ends: %s", error)
        await trio.lowlevel.checkpoint_if_cancelled()

    # In threads

    def _find(self) -> None:
        router = miniupnpc.UPnP()
        router.discoverdelay = DISCOVERY_MS
        if self._url is not None:
            router.selectigd(self._url)
        elif router.discover() == 0:
            raise MappingFailed("no router answers to UPnP")
        else:
            router.selectigd()
        self._router = router

    def _add_near(self, port: int, ours: tuple[int, ...]) -> int:
        """Map the same port of the router, or one close to it that is free; which."""
        for external in range(port, min(port + PORTS_TRIED, 65_536)):
            if external in ours:
                continue  # the router would point it elsewhere
            try:
                self._add(external, port)
            except MappingFailed as error:
                logger.debug("port %d of the router: %s", external, error)
            else:
                return external
        raise MappingFailed(f"the router maps none of the ports {port} to {port + PORTS_TRIED - 1}")

    def _add(self, external: int, port: int) -> None:
        router = self._router
        try:
            done = router.addportmapping(external, "TCP", router.lanaddr, port, DESCRIPTION, "", LEASE_S)
        except Exception as error:  # miniupnpc raises bare Exception with the router's own words
            raise MappingFailed(str(error)) from error
        if not done:
            raise MappingFailed("the router refused")

    def _delete(self, external: int) -> None:
        self._router.deleteportmapping(external, "TCP")


async def _in_thread(call: Callable[[], T]) -> T:
    """Raises MappingFailed for whatever the router or its absence causes, and at the deadline."""
    with trio.move_on_after(CALL_DEADLINE_S):
        try:
            return await trio.to_thread.run_sync(call, abandon_on_cancel=True)
        except MappingFailed:
            raise
        except Exception as error:  # see above; where nobody answers at all it raises the text of errno 0
            reason = "no router answers to UPnP" if str(error) == "Success" else str(error) or type(error).__name__
            raise MappingFailed(reason) from error
    raise MappingFailed(f"the router did not answer within {CALL_DEADLINE_S:g} s")
