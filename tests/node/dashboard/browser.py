"""A real browser before the real application: the page of a made-up swarm on a socket, in headless Chromium."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import trio

from shoal.lab.bench.synthetic_swarm import SyntheticSwarm
from shoal.node.dashboard.service import PageService
from shoal.node.options import PageAddress
from tests.waiting import running

CHROMIUM, DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
DEADLINE_S = 90.0
STEP_S = 0.1
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


class Served:
    """A made-up swarm whose page is served in a thread, as time passes."""

    def __init__(self, swarm: SyntheticSwarm, folder: Path, *, port: int = 0) -> None:
        self.swarm = swarm
        self.url, self.link = "", ""
        self._folder = folder
        self._port = port
        self._up = threading.Event()
        self._over = threading.Event()
        self._wishes: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self._thread = threading.Thread(target=trio.run, args=(self._serve,), daemon=True)

    def __enter__(self) -> Served:
        self._thread.start()
        assert self._up.wait(DEADLINE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """As when the daemon dies."""
        self._over.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    def do(self, wish: Callable[[], Any]) -> None:
        """Have something done in the thread of the page."""
        self._wishes.put(wish)

    async def _serve(self) -> None:
        page = PageService(self.swarm, PageAddress(port=self._port, or_free=False), folder=self._folder)
        async with running(page):
            self._pass_on(page)
            self.url, self.link = page.url or "", page.link or ""
            self._up.set()
            while not self._over.is_set():
                while not self._wishes.empty():
                    self._wishes.get()()
                self.swarm.advance(time.time())
                self._pass_on(page)
                await trio.sleep(STEP_S)

    def _pass_on(self, page: PageService) -> None:
        while self.swarm.waiting:
            page.hear(self.swarm.waiting.popleft())


class Page:
    """A tab. Waits are for something to be there, under a deadline."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def run(self, script: str) -> Any:
        """What a script returns."""
        return self.driver.execute_script(script)

    def count(self, selector: str) -> int:
        """How many elements match."""
        return int(self.run(f"return document.querySelectorAll({selector!r}).length"))

    def text(self, selector: str) -> str:
        """The text of an element."""
        return str(self.run(f"return document.querySelector({selector!r}).textContent"))

    def until(self, script: str) -> Any:
        """The value of an expression, once it is true."""
        ends_at = time.monotonic() + DEADLINE_S
        while not (found := self.run(f"return {script}")):
            assert time.monotonic() < ends_at, f"not within {DEADLINE_S:g} s: {script}\n{self.complaints()}"
            time.sleep(0.05)
        return found

    def click(self, selector: str) -> None:
        """Click as a user does."""
        self.driver.find_element("css selector", selector).click()

    def size(self, width: int, height: int) -> None:
        """The size of the screen."""
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )

    def prefer(self, scheme: str) -> None:
        """Have the system prefer light or dark."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def shoot(self, path: Path) -> None:
        """A picture of what is on the screen."""
        self.driver.save_screenshot(str(path))

    def complaints(self) -> list[str]:
        """What the browser's console holds: errors of scripts, what the policy refused, what did not load."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


@contextmanager
def browsing(width: int = 1360, height: int = 900) -> Iterator[Page]:
    """A browser of its own; skips the test where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    if not (Path(CHROMIUM).exists() and Path(DRIVER).exists()):
        pytest.skip("there is no chromium with chromedriver at /usr/bin")
    from selenium.webdriver.chrome.service import Service

    profile = tempfile.mkdtemp(prefix="shoal-browser-")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for option in (*OPTIONS, f"--user-data-dir={profile}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        page = Page(driver)
        page.size(width, height)
        yield page
    finally:
        driver.quit()
        shutil.rmtree(profile, ignore_errors=True)
