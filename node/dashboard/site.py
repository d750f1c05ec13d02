"""Server of the page, which keeps it up to date.

    event log (any thread) ── a bounded queue ──┐
    daemon ── facts, every LOOK_PERIOD_S ───────┴─ model ── delta ── feed ── viewers

While nobody looks at the page, it looks at no peer: it counts bytes now and then, to keep the curve going.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path

import trio
from starlette.types import ASGIApp

from shoal.node.dashboard.app import Parts, make_app
from shoal.node.dashboard.facts import Source
from shoal.node.dashboard.feed import Feed, server_event
from shoal.node.dashboard.guard import Guard
from shoal.node.dashboard.model import Model
from shoal.node.dashboard.peers import Fields, PeerPage, Wanted
from shoal.node.dashboard.server import serve
from shoal.node.dashboard.service import Events, is_loopback
from shoal.node.reporting.event_log import read_last
from shoal.node.reporting.events import Event
from shoal.node.reporting.metrics import Metrics

TICK_S = 0.2
"""From an event to those who look, at most."""
LOOK_PERIOD_S = 1.0
IDLE_PERIOD_S = 5.0
"""Between counts of bytes while nobody is there to see."""
HISTORY_LIMIT_BYTES = 4 << 20
"""Of the event log's end, read at the start."""
RESTART_PAUSE_S = 1.0

logger = logging.getLogger(__name__)


class Site:
    """The model, its viewers, the metrics, and the application on top of them.

    events: where the event log's listener puts what happens. clock: of waiting and of rates, in seconds.
    """

    def __init__(
        self,
        *,
        source: Source,
        events: Events,
        history: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = Model()
        self.feed = Feed()
        self.metrics = Metrics(viewers=lambda: len(self.feed))
        self._source = source
        self._events = events
        self._history = history
        self._clock = clock
        self._looked_at = self._measured_at = -IDLE_PERIOD_S

    async def run(self, listening: socket.socket, *, host: str, url: str, token: str) -> None:
        """Serve on a socket bound to `host`, where it is `url`, until cancelled."""
        await self.recall()
        logger.info("the page of this node: %s (to give orders there: the link in `shoal status`)", url)
        app = self.app(token=token, host=host)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.keep_up)
            while True:
                try:
                    await serve(app, listening.dup())  # type: ignore[arg-type]  # Starlette's scope is any mapping
                except Exception:  # the boundary: the page is no reason to end a node
                    logger.exception("the page failed; it is served again")
                await trio.sleep(RESTART_PAUSE_S)

    def app(self, *, token: str, host: str) -> ASGIApp:
        """The guarded application."""
        parts = Parts(
            source=self._source,
            feed=self.feed,
            snapshot=self.snapshot,
            peers=self.peers,
            peer=self.peer,
            metrics=self._measure,
        )
        return Guard(make_app(parts), token=token, open_to_view=is_loopback(host), names=(host,))

    async def recall(self) -> None:
        """Take what the event log tells of earlier lives, and of this one up to now."""
        if self._history is None:
            return
        known = await trio.to_thread.run_sync(read_history, self._history)
        for event in known:
            self.model.hear(event)
        last = known[-1].at if known else 0.0
        while self._events and self._events[0].at <= last:
            self.metrics.hear(self._events.popleft())

    async def keep_up(self) -> None:
        """Follow what happens and tell the viewers, until cancelled."""
        while True:
            self.tick()
            await trio.sleep(TICK_S)

    def tick(self) -> None:
        """Take what has happened, look if it is time, and tell the viewers what is new."""
        self._drain()
        if len(self.feed):
            self._look()
        elif self._clock() - self._measured_at >= IDLE_PERIOD_S:
            self._measured_at = self._clock()
            self.model.measure(self._source.traffic(), self._measured_at, time.time())
        self._tell()

    def snapshot(self) -> Fields:
        """Snapshot as of now; the viewers that are there are told what is new first."""
        self._drain()
        self._look()
        self._tell()
        return self.model.snapshot()

    def peers(self, wanted: Wanted) -> PeerPage:
        """Part of all peers that this node knows."""
        self._look()
        return self.model.peers.page(wanted)

    def peer(self, peer: str) -> Fields | None:
        """All that is known of one peer, and what happened to it; None if it is not known."""
        self._drain()
        self._look()
        row = self.model.peers.row(peer)
        if row is None:
            return None
        happened = [known for known in self.model.history.rounds.happenings if known.peer == peer]
        return {**row, "record": self._source.record(peer), "happenings": happened}

    def _tell(self) -> None:
        delta = self.model.delta()
        if delta is not None and len(self.feed):
            self.feed.tell(server_event("delta", delta))

    def _look(self) -> None:
        """Look, unless that was done within the last `LOOK_PERIOD_S`."""
        now = self._clock()
        if now - self._looked_at < LOOK_PERIOD_S:
            return
        self._looked_at = self._measured_at = now
        self.model.see(self._source.look(), now, time.time(), in_turn=len(self.feed) > 0)

    def _drain(self) -> None:
        while self._events:
            event = self._events.popleft()
            self.metrics.hear(event)
            self.model.hear(event)

    def _measure(self, accept: str) -> tuple[bytes, str]:
        self._drain()
        return self.metrics.render(self._source.look(), accept)


def read_history(path: Path) -> list[Event]:
    """The events at the end of a log, oldest first; what is no event is left out. Blocks, raises nothing."""
    try:
        return read_last(path, HISTORY_LIMIT_BYTES)
    except OSError as error:
        logger.info("what happened before is not shown: %s", error)
        return []
