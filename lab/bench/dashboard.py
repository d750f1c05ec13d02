"""`shoal bench dashboard`: what the page of a node costs, before a real browser.

It is served as the daemon serves it, for a made-up swarm, and opened in headless Chromium. Processor time is that of
the process that serves it, with the making up of the swarm in it; what it takes while nobody looks is measured apart.
Needs selenium and Chromium.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec

from shoal.cli.render import ShowNow
from shoal.lab.case import Case, Spec
from shoal.lab.served_page import Page, Served, browsing
from shoal.lab.synthetic_swarm import SyntheticSwarm
from shoal.lab.targets import Row, Spread, Target
from shoal.node.option import Option, Within

FIRST_PAINT: Final = Target(name="first paint", unit="ms", most=1500)
SHOWN: Final = Target(name="the swarm is on the screen", unit="ms", most=1500)
"""Of two hundred peers or a thousand, from the click on the link."""
VIEWER: Final = Target(name="a viewer's processor time", unit="% of a core", most=2.0)
_PAINTED: Final = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"
_LOADED: Final = "performance.getEntries().reduce((sum, entry) => sum + (entry.transferSize ?? 0), 0)"


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardBench(Spec):
    """Options of `shoal bench dashboard`."""

    peers: Annotated[int, Option("--peers", help="Nodes beside the page's own.", check=Within(0, 4000))] = 1000
    repeat: Annotated[int, Option("--repeat", help="How often the page is opened.", check=Within(1, 100))] = 5
    seconds: Annotated[
        float, Option("--seconds", help="How long processor time is taken, twice.", check=Within(1, 600))
    ] = 10.0
    seed: Annotated[int, Option("--seed", help="Of the made-up swarm.")] = 1


class DashboardCost(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `shoal bench dashboard`; times in ms from the navigation, each in a browser of its own.

    loaded_bytes: over the wire until the swarm is on the screen, but for the feed, which is a stream. cpu_share: of one
    core, while a browser looks; idle_cpu_share: while none does.
    """

    bench: DashboardBench
    first_paint_ms: Spread
    shown_ms: Spread
    loaded_bytes: int
    cpu_share: float
    idle_cpu_share: float

    @property
    def rows(self) -> tuple[Row, ...]:
        """Measured values, each with its target."""
        return (
            FIRST_PAINT.row(self.first_paint_ms),
            SHOWN.row(self.shown_ms),
            VIEWER.row(100 * (self.cpu_share - self.idle_cpu_share)),
        )


def run(bench: DashboardBench, tell: ShowNow) -> DashboardCost:
    """Measure the page of a made-up swarm in headless Chromium: first paint, bytes, processor time."""
    painted, shown, loaded = [], [], []
    swarm = SyntheticSwarm(peers=bench.peers, now=time.time(), seed=bench.seed)
    with tempfile.TemporaryDirectory() as folder, Served(swarm, Path(folder)) as served:
        for number in range(bench.repeat):
            tell(f"opened {number} of {bench.repeat} times", number / bench.repeat)
            with browsing() as page:
                shown.append(_opened(page, served.url))
                painted.append(float(page.run(f"return {_PAINTED}")))
                loaded.append(int(page.run(f"return {_LOADED}")))
                if number == bench.repeat - 1:
                    share = _cpu_share(bench.seconds)
        idle_share = _cpu_share(bench.seconds)
    return DashboardCost(
        bench=bench,
        first_paint_ms=Spread.of(round(ms, 1) for ms in painted),
        shown_ms=Spread.of(round(ms, 1) for ms in shown),
        loaded_bytes=int(statistics.median(loaded)),
        cpu_share=round(share, 4),
        idle_cpu_share=round(idle_share, 4),
    )


def _opened(page: Page, url: str) -> float:
    """Open the page; the time until the swarm was drawn, in ms."""
    page.driver.get(url)
    page.until("document.body.dataset.seq")
    return float(page.run("return performance.now()"))


def _cpu_share(seconds: float) -> float:
    used, began = time.process_time(), time.monotonic()
    time.sleep(seconds)
    return (time.process_time() - used) / (time.monotonic() - began)


CASE: Final = Case(spec=DashboardBench, run=run)
