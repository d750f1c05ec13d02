"""`shoal bench dashboard`: what the page of a node costs.

It is served as the daemon serves it, for a made-up swarm, and opened in a real browser.
The server is a process of its own; its processor time while a browser looks, less that while nobody does, is the cost
of a viewer. Making the swarm up happens in the same process and is in both. Needs selenium and Chromium.

What grows with the swarm is measured apart, without a browser: what one look at all peers costs, and comes to, for a
viewer and for a scrape, as a made-up minute passes.
"""

from __future__ import annotations

import contextlib
import gzip
import multiprocessing
import shutil
import statistics
import tempfile
import time
import urllib.request
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import psutil  # type: ignore[import-untyped]
import trio
import typer

from shoal.cli.render import ShowNow
from shoal.lab.bench.synthetic_swarm import SyntheticSwarm
from shoal.lab.case import Case, Spec
from shoal.lab.targets import Row, Target
from shoal.node.dashboard.feed import server_event
from shoal.node.dashboard.model import Model
from shoal.node.dashboard.service import PageService
from shoal.node.option import Option, Within
from shoal.node.options import PageAddress
from shoal.node.reporting.metrics import Metrics
from shoal.protocol.errors import ConfigError, NetworkError

CHROMIUM, DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
START_DEADLINE_S = 60.0
OPEN_DEADLINE_S = 60.0
SCRAPES = 20
STEP_S = 0.5
FIRST_PAINT = Target(name="first paint", unit="ms", most=1800)
"""Limit that https://web.dev/articles/fcp calls good."""
SHOWN = Target(name="the swarm is on the screen", unit="ms", most=1500)
"""Also of a thousand peers: from the click on the link."""
MINUTE_S = 60
LOOK = Target(name="a look at all peers", unit="ms", most=10.0)
"""Of processor time, with the delta that it leads to: 1 % of a core while somebody watches."""
DELTA = Target(name="the largest delta", unit="B", most=16_384)
FEED = Target(name="deltas a second, compressed", unit="B", most=2_048)
SNAPSHOT = Target(name="a snapshot, compressed", unit="B", most=32_768)
SCRAPE = Target(name="a scrape", unit="B", most=32_768)
SERIES = Target(name="series of a scrape", most=400)
CHROMIUM_OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageBench(Spec):
    """Options of `shoal bench dashboard`."""

    peers: Annotated[int, Option("--peers", help="Nodes beside the one whose page it is.", check=Within(0, 4000))] = 200
    seconds: Annotated[
        float, Option("--seconds", help="How long each of three measurements takes.", check=Within(1, 600))
    ] = 10.0
    seed: Annotated[int, Option("--seed", help="Of the made-up swarm.")] = 1
    serve: Annotated[bool, Option("--serve", help="Serve the page and measure nothing, until interrupted.")] = False
    rollouts: Annotated[bool, Option("--share-rollouts", help="With --serve: a swarm that shares rollouts.")] = False


class LookCost(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of looking at all peers once a second, over a made-up minute with a death in twenty in its middle.

    look_ms: processor time of one look and its delta, the median. delta_bytes: of the largest; feed_bytes_per_s and
    snapshot_bytes are compressed. scrape_bytes, series: of the last scrape.
    """

    look_ms: float
    delta_bytes: int
    feed_bytes_per_s: float
    snapshot_bytes: int
    scrape_bytes: int
    series: int

    @property
    def rows(self) -> tuple[Row, ...]:
        """Measured values, each with its target."""
        return (
            LOOK.row(self.look_ms),
            DELTA.row(self.delta_bytes),
            FEED.row(self.feed_bytes_per_s),
            SNAPSHOT.row(self.snapshot_bytes),
            SCRAPE.row(self.scrape_bytes),
            SERIES.row(self.series),
        )


class PageCost(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `shoal bench dashboard`.

    first_paint_ms: of the browser's navigation. loaded_bytes: over the wire until the swarm is on the screen, the
    snapshot included; feed_bytes_per_s: afterwards. cpu_share: of one core, with a viewer; idle_cpu_share: without.
    metrics_ms: the median scrape.
    """

    peers: int
    seconds: float
    first_paint_ms: float
    shown_ms: float
    loaded_bytes: int
    feed_bytes_per_s: float
    cpu_share: float
    idle_cpu_share: float
    metrics_ms: float
    looking: LookCost

    @property
    def rows(self) -> tuple[Row, ...]:
        """Measured values, each with its target."""
        return (FIRST_PAINT.row(self.first_paint_ms), SHOWN.row(self.shown_ms), *self.looking.rows)


def run(bench: PageBench, tell: ShowNow) -> PageCost:
    """Measure the page of a made-up swarm in headless Chromium: first paint, bytes, processor, scrapes."""
    if bench.serve:
        trio.run(serve, bench)
        raise typer.Exit
    seconds, looking = bench.seconds, measure_looks(bench.peers, seed=bench.seed)
    with served(bench) as (url, process):
        idle_share = _cpu_share(process, seconds)
        metrics_ms = _scrape_ms(url)
        with browser() as driver:
            driver.get(url)
            shown_ms = shown_ms_of(driver)
            paint = driver.execute_script(
                "return performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? -1"
            )
            sizes = driver.execute_script("return performance.getEntries().map(entry => entry.transferSize ?? 0)")
            share = _cpu_share(process, seconds)
        snapshot, per_s = _feed_bytes(url, seconds)
    return PageCost(
        peers=bench.peers,
        seconds=seconds,
        first_paint_ms=round(paint, 1),
        shown_ms=round(shown_ms, 1),
        loaded_bytes=sum(sizes) + snapshot,
        feed_bytes_per_s=round(per_s, 1),
        cpu_share=round(share, 4),
        idle_cpu_share=round(idle_share, 4),
        metrics_ms=round(metrics_ms, 2),
        looking=looking,
    )


# -- what grows with the swarm --------------------------------------------------------------------------------------


def measure_looks(peers: int, *, seed: int = 1) -> LookCost:
    """Go through a minute of a made-up swarm, look by look, as the page does for a viewer."""
    began = time.time()
    swarm = SyntheticSwarm(peers=peers, now=began, seed=seed)
    model, metrics = Model(), Metrics()

    def look(now: float) -> bytes:
        facts = swarm.look()  # is not the page's
        before = time.process_time()
        while swarm.waiting:
            event = swarm.waiting.popleft()
            metrics.hear(event)
            model.hear(event)
        model.see(facts, now, now, in_turn=now > began)
        delta = server_event("delta", model.delta())
        spent_ms.append(1000 * (time.process_time() - before))
        return delta

    spent_ms: list[float] = []
    look(began)
    squeeze = zlib.compressobj(6, zlib.DEFLATED, zlib.MAX_WBITS | 16)
    snapshot = len(_squeezed(squeeze, server_event("snapshot", model.snapshot())))
    sizes, wire = [], 0
    for second in range(1, MINUTE_S + 1):
        if second == MINUTE_S // 2:
            swarm.kill(peers // 20)
        swarm.advance(began + second)
        delta = look(began + second)
        sizes.append(len(delta))
        wire += len(_squeezed(squeeze, delta))
    scrape, _ = metrics.render(swarm.look())
    return LookCost(
        look_ms=round(statistics.median(spent_ms), 3),
        delta_bytes=max(sizes),
        feed_bytes_per_s=round(wire / MINUTE_S, 1),
        snapshot_bytes=snapshot,
        scrape_bytes=len(scrape),
        series=sum(not line.startswith(b"#") for line in scrape.splitlines()),
    )


def _squeezed(squeeze: Any, message: bytes) -> bytes:
    found: bytes = squeeze.compress(message) + squeeze.flush(zlib.Z_SYNC_FLUSH)
    return found


# -- the server -----------------------------------------------------------------------------------------------------


async def serve(bench: PageBench, up: Connection | None = None) -> None:
    """Serve the page of a made-up swarm until cancelled; tells `up` its URL. Raises ConfigError for a taken port."""
    swarm = SyntheticSwarm(peers=bench.peers, now=time.time(), seed=bench.seed, rollouts=bench.rollouts)
    with tempfile.TemporaryDirectory() as folder:
        page = PageService(swarm, PageAddress(port=0, or_free=False), folder=Path(folder))
        async with trio.open_nursery() as nursery:
            await nursery.start(page.run)
            if up is None:
                print(page.url, flush=True)
            else:
                up.send(page.url)
            while True:
                swarm.advance(time.time())
                while swarm.waiting:
                    page.hear(swarm.waiting.popleft())
                await trio.sleep(STEP_S)


def _serve_apart(bench: PageBench, up: Connection) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        trio.run(serve, bench, up)


@contextlib.contextmanager
def served(bench: PageBench) -> Iterator[tuple[str, psutil.Process]]:
    """The page of a made-up swarm in a process of its own: its URL, and that process."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_serve_apart, args=(bench, there), daemon=True)
    process.start()
    try:
        if not here.poll(START_DEADLINE_S):
            raise NetworkError(f"the page did not come up within {START_DEADLINE_S:g} s")
        url = here.recv()
        _read(f"{url}api/snapshot")  # all of it is imported by then
        yield url, psutil.Process(process.pid)
    finally:
        process.kill()
        process.join()


def _cpu_share(process: psutil.Process, seconds: float) -> float:
    before, began = process.cpu_times(), time.monotonic()
    time.sleep(seconds)
    after = process.cpu_times()
    used = after.user + after.system - before.user - before.system
    return float(used) / (time.monotonic() - began)


def _read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=OPEN_DEADLINE_S) as answer:
        content: bytes = answer.read()
        return content


def _scrape_ms(url: str) -> float:
    times = []
    for _ in range(SCRAPES):
        began = time.perf_counter()
        _read(f"{url}metrics")
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


def _feed_bytes(url: str, seconds: float) -> tuple[int, float]:
    """Size of the compressed feed: bytes of the snapshot, and bytes a second afterwards."""
    request = urllib.request.Request(f"{url}api/feed", headers={"accept-encoding": "gzip"})
    squeezed = len(gzip.compress(_read(f"{url}api/snapshot"), 6))
    total, began = 0, time.monotonic()
    with urllib.request.urlopen(request, timeout=OPEN_DEADLINE_S) as answer:
        while (elapsed := time.monotonic() - began) < seconds:
            total += len(answer.read1(65_536))
    return squeezed, max(0, total - squeezed) / elapsed


# -- the browser ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """Headless Chromium, as selenium drives it. Raises ConfigError where it is not installed."""
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
    except ImportError:
        raise ConfigError("a browser needs selenium; pip install selenium") from None
    if not (Path(CHROMIUM).exists() and Path(DRIVER).exists()):
        raise ConfigError("a browser needs Chromium; apt-get install chromium chromium-driver")
    profile = tempfile.mkdtemp(prefix="shoal-browser-")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for option in (*CHROMIUM_OPTIONS, f"--user-data-dir={profile}", "--window-size=1360,900"):
        options.add_argument(option)
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()
        shutil.rmtree(profile, ignore_errors=True)


def shown_ms_of(driver: Any) -> float:
    """Time from the navigation until the swarm was drawn, in ms."""
    ends_at = time.monotonic() + OPEN_DEADLINE_S
    while not driver.execute_script("return document.body.dataset.seq"):
        if time.monotonic() > ends_at:
            raise NetworkError(f"the page showed nothing within {OPEN_DEADLINE_S:g} s")
        time.sleep(0.01)
    return float(driver.execute_script("return performance.now()"))


CASE: Final = Case(spec=PageBench, run=run)
