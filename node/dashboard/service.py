"""The service of a node that serves the page: takes the port, then lets `Site` do the rest.

What serving needs is imported in a thread once the port is taken, so that no node starts later for its page.
"""

from __future__ import annotations

import importlib
import ipaddress
import logging
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import trio

from shoal.node.dashboard.facts import Source
from shoal.node.dashboard.token import link_of, load_token
from shoal.node.options import PageAddress
from shoal.node.reporting.events import Event
from shoal.protocol.errors import ConfigError

QUEUE_LIMIT_EVENTS = 4096
BACKLOG = 64

Events = deque[Event]

logger = logging.getLogger(__name__)


class PageService:
    """The page of one node; `url` says where, once it runs, and `link` holds the token as well.

    folder: where the token is. history: the event log, with what happened in earlier lives.
    """

    def __init__(self, source: Source, address: PageAddress, *, folder: Path, history: Path | None = None) -> None:
        self.url: str | None = None
        self.link: str | None = None
        self._source = source
        self._address = address
        self._folder = folder
        self._history = history
        self._events: Events = deque(maxlen=QUEUE_LIMIT_EVENTS)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; started once the port is this node's.

        Raises ConfigError if it cannot be had, StorageError if the token cannot be kept.
        """
        with bound(self._address) as listening:
            token = await trio.to_thread.run_sync(load_token, self._folder)
            self.url = url_of(listening)
            self.link = link_of(self.url, token, open_to_view=is_loopback(self._address.host))
            task_status.started()
            site = await trio.to_thread.run_sync(importlib.import_module, "shoal.node.dashboard.site")
            await site.Site(
                source=self._source,
                events=self._events,
                history=self._history,
            ).run(listening, host=self._address.host, url=self.url, token=token)

    def hear(self, event: Event) -> None:
        """Take one event; from any thread, returns at once. If they come faster than they are read, the oldest go."""
        self._events.append(event)


def is_loopback(host: str) -> bool:
    """True if only this machine can connect there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextmanager
def bound(address: PageAddress) -> Iterator[socket.socket]:
    """A listening socket; where `address.or_free` says so, at a free port if that one is taken.

    Raises ConfigError where nothing can be had.
    """
    try:
        (family, _, _, _, place), *_ = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--dashboard: {address.host} is no address of this machine: {error.strerror}") from None
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            _bind(listening, place, or_free=address.or_free)
        except OSError as error:
            raise ConfigError(
                f"--dashboard: cannot listen on {address.host}:{address.port}: {error.strerror}; "
                "choose another port, 0 for any, or off"
            ) from None
        listening.listen(BACKLOG)
        yield listening


def _bind(listening: socket.socket, place: tuple[object, ...], *, or_free: bool) -> None:
    try:
        listening.bind(place)
    except OSError as error:
        if not or_free:
            raise
        logger.info("no page at port %s (%s); another port is taken", place[1], error.strerror)
        listening.bind((place[0], 0, *place[2:]))


def url_of(listening: socket.socket) -> str:
    """URL to open in a browser on this machine."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
