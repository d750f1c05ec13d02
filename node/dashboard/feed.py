"""Feed of the page's viewers: each gets a snapshot, then what changes, as server-sent events.

A viewer has a queue of messages, each encoded once for all of them. Whoever lets it fill is let go, and so is nobody
else held up; a browser comes back by itself and begins with another snapshot.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from typing import Any

import msgspec
import trio

VIEWER_LIMIT = 16
QUEUE_LIMIT_MESSAGES = 32
HEARTBEAT_S = 15.0
_GZIP = 16 + zlib.MAX_WBITS


class TooManyViewers(Exception):
    """Refusal of another viewer: there is no room."""


class Viewer:
    """One open page. `scope` is cancelled when it is let go."""

    def __init__(self, *, compress: bool) -> None:
        self.scope = trio.CancelScope()
        self._send, self._receive = trio.open_memory_channel[bytes](QUEUE_LIMIT_MESSAGES)
        self._squeeze = zlib.compressobj(6, zlib.DEFLATED, _GZIP) if compress else None

    def tell(self, message: bytes) -> None:
        """Queue a message; one too many ends it."""
        try:
            self._send.send_nowait(message)
        except trio.WouldBlock:
            self.scope.cancel()

    async def next(self) -> bytes:
        """The next piece of the stream, a comment where nothing happens for long."""
        message = b": still here\n\n"
        with trio.move_on_after(HEARTBEAT_S):
            message = await self._receive.receive()
        if self._squeeze is None:
            return message
        return self._squeeze.compress(message) + self._squeeze.flush(zlib.Z_SYNC_FLUSH)


class Feed:
    """The feed of all viewers."""

    def __init__(self) -> None:
        self._viewers: set[Viewer] = set()
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._viewers)

    @contextlib.contextmanager
    def joined(self, *, snapshot: bytes, compress: bool) -> Iterator[Viewer]:
        """A viewer, for the length of the block, that begins with `snapshot`. Raises TooManyViewers.

        The block ends early, and quietly, if the viewer is let go.
        """
        if len(self._viewers) >= VIEWER_LIMIT:
            raise TooManyViewers
        viewer = Viewer(compress=compress)
        viewer.tell(snapshot)
        self._viewers.add(viewer)
        try:
            with viewer.scope:
                yield viewer
        finally:
            self._viewers.discard(viewer)
            self.dropped += viewer.scope.cancel_called

    def tell(self, message: bytes) -> None:
        """Give a message to all of them."""
        for viewer in self._viewers:
            viewer.tell(message)


def server_event(name: str, content: Any) -> bytes:
    """A server-sent event with JSON in it, which has no line breaks of its own; NaN becomes null."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(content))
