"""The page of a made-up swarm, served as a daemon serves it, and a real browser before it: headless Chromium."""

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

import trio

from shoal.lab.synthetic_swarm import SyntheticSwarm
from shoal.node.dashboard.service import PageService
from shoal.node.options import PageAddress
from shoal.protocol.errors import ConfigError, NetworkError

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
        if not self._up.wait(DEADLINE_S):
            raise NetworkError(f"the page did not come up within {DEADLINE_S:g} s")
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End as when the daemon dies."""
        self._over.set()
        self._thread.join()

    def do(self, wish: Callable[[], Any]) -> None:
        """Have something done in the thread of the page."""
        self._wishes.put(wish)

    async def _serve(self) -> None:
        page = PageService(self.swarm, PageAddress(port=self._port, or_free=False), folder=self._folder)
        async with trio.open_nursery() as nursery:
            await nursery.start(page.run)
            self._pass_on(page)
            self.url, self.link = page.url or "", page.link or ""
            self._up.set()
            while not self._over.is_set():
                while not self._wishes.empty():
                    self._wishes.get()()
                self.swarm.advance(time.time())
                self._pass_on(page)
                await trio.sleep(STEP_S)
            nursery.cancel_scope.cancel()

    def _pass_on(self, page: PageService) -> None:
        while self.swarm.waiting:
            page.hear(self.swarm.waiting.popleft())


class Page:
    """One tab. Waits are for something to be there; they raise NetworkError at a deadline."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def run(self, script: str) -> Any:
        """Run a script; what it returns."""
        return self.driver.execute_script(script)

    def count(self, selector: str) -> int:
        """Number of elements that match."""
        return int(self.run(f"return document.querySelectorAll({selector!r}).length"))

    def text(self, selector: str) -> str:
        """The text of an element."""
        return str(self.run(f"return document.querySelector({selector!r}).textContent"))

    def until(self, script: str) -> Any:
        """The value of an expression, once it is true."""
        ends_at = time.monotonic() + DEADLINE_S
        while not (found := self.run(f"return {script}")):
            if time.monotonic() > ends_at:
                raise NetworkError(
                    f"not within {DEADLINE_S:g} s: {script}; see what the page said: {self.complaints()}"
                )
            time.sleep(0.05)
        return found

    def click(self, selector: str) -> None:
        """Click as a user does; again, if the page puts another in the place of what was to be clicked."""
        from selenium.common.exceptions import StaleElementReferenceException

        ends_at = time.monotonic() + DEADLINE_S
        while True:
            try:
                self.driver.find_element("css selector", selector).click()
            except StaleElementReferenceException:
                if time.monotonic() > ends_at:
                    raise
            else:
                return

    def size(self, width: int, height: int) -> None:
        """Make the screen so large."""
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )

    def prefer(self, scheme: str) -> None:
        """Have the system prefer light or dark."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def shoot(self, path: Path) -> None:
        """Write a picture of what is on the screen."""
        self.driver.save_screenshot(str(path))

    def complaints(self) -> list[str]:
        """Messages of the browser's console: errors of scripts, what the policy refused, what did not load."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


@contextmanager
def browsing(width: int = 1360, height: int = 900) -> Iterator[Page]:
    """A browser of its own, as selenium drives it. Raises ConfigError where it is not installed."""
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
