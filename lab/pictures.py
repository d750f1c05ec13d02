"""Pictures of the documents, made anew by `python -m shoal.lab.pictures`: of real terminals and of a real browser.

    terminal-*.svg    nodes that run as their titles say, but on the loopback interface alone; of a small model
    page-*.png        the page of a made-up swarm (`shoal.lab.served_page`)

It takes tmux, Chromium and some minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec

from shoal.lab.served_page import Page, Served, browsing
from shoal.lab.synthetic_swarm import SyntheticSwarm
from shoal.lab.terminal import Terminal
from shoal.protocol.identity import Identity
from shoal.protocol.manifest import load_manifest, render_manifest

OUT: Final = Path("docs/images")
DEADLINE_S = 600.0
"""For any one thing to be shown: programs import for long on a machine that is busy with others."""
ON_LOOPBACK: Final = MappingProxyType(
    {"SHOAL_LISTEN": "/ip4/127.0.0.1/tcp/0", "SHOAL_LANE_LISTEN": "127.0.0.1:0", "SHOAL_MDNS": "0"}
)
OPEN: Final = "document.getElementById('setup').open = true"
SMALL: Final[dict[str, str | int | float | bool]] = {"width": 32, "layers": 2, "heads": 2, "context": 32}
INNER_STEPS = 20
NOBODY: Final = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.from_seed(bytes(32)).peer_id}"
"""Address at which no node is."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A terminal that shows what a picture is to show."""

    picture: str
    title: str
    terminal: Terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    """A picture of the page: of how many peers, how wide and high, dark or not, and from which of its elements on.

    rollouts: whether the swarm shares them. opened: a summary that is clicked first; shown: what has to be there then,
    as CSS selects it.
    """

    peers: int = 12
    rollouts: bool = False
    width: int = 1280
    height: int = 860
    dark: bool = False
    element: str = ""
    opened: str = ""
    shown: str = "body"


SHOTS: Final = MappingProxyType(
    {
        "page-swarm.png": Shot(peers=200, dark=True),
        "page-phone.png": Shot(width=390, height=844),
        "page-rollouts.png": Shot(rollouts=True, element="rollouts-card"),
        "page-says.png": Shot(height=520, element="samples-card"),
        "page-joins.png": Shot(
            height=620,
            element="setup-card",
            opened="#setup summary",
            shown="#joining .qr path",
        ),
    }
)
TERMINALS: Final = ("terminal-alone.svg", "terminal-run.svg", "terminal-watch.svg")


def terminals(place: Path) -> Generator[Shown, None, None]:
    """The terminals whose pictures are `TERMINALS`, one after the other. place: an empty folder."""
    _found(place)
    typed = "run swarm.toml --data-dir ivy --name ivy --join"
    with Terminal(_shoal(*typed.split(), NOBODY), folder=place, settings=ON_LOOPBACK, height=14) as ivy:
        ivy.until("linked with nobody", DEADLINE_S)
        ivy.until("no peer has the state", DEADLINE_S)  # either may be said first
        yield Shown("terminal-alone.svg", f"shoal {typed} /ip4/127.0.0.1/…", ivy)
    typed = "run swarm.toml --data-dir oak --name oak"
    with Terminal(_shoal(*typed.split()), folder=place, settings=ON_LOOPBACK, height=20) as oak:
        oak.until("round 1 certified", DEADLINE_S)
        words = ("run", _link(place), "--data-dir", "elm", "--name", "elm")
        with Terminal(_shoal(*words), folder=place, settings=ON_LOOPBACK) as elm:
            oak.until("2 of 2 contributed", DEADLINE_S)
            elm.kill()
        oak.until(r"elm is gone\n(.*\n)*?\d\d:\d\d:\d\d ", DEADLINE_S)  # oak goes on, or says why it cannot
        yield Shown("terminal-run.svg", f"shoal {typed}", oak)
        with Terminal(_shoal("watch", "--data-dir", "oak"), folder=place, height=34) as watch:
            watch.until(r"oak \(this node\)", DEADLINE_S)
            watch.type("4")
            watch.until(r'round \d+: "The ', DEADLINE_S)
            yield Shown("terminal-watch.svg", "shoal watch --data-dir oak", watch)


def _found(place: Path) -> None:
    """Found a swarm in `place`, as `shoal init` does, with a smaller model and shorter rounds."""
    _told(place, "init", "--swarm-name", "garden", "--data-dir", "oak")
    manifest = load_manifest(place / "swarm.toml")
    workload = msgspec.structs.replace(manifest.workload, options=SMALL)
    sync = msgspec.structs.replace(manifest.sync, inner_steps=INNER_STEPS)
    text = render_manifest(msgspec.structs.replace(manifest, workload=workload, sync=sync))
    (place / "swarm.toml").write_text(text, encoding="utf-8")


def _link(place: Path) -> str:
    """The link that oak's user hands on."""
    (link,) = (word for word in _told(place, "link", "--data-dir", "oak").split("'") if word.startswith("shoal:"))
    return link


def _shoal(*words: str) -> list[str]:
    return [sys.executable, "-m", "shoal.cli.main", *words]


def _told(place: Path, *words: str) -> str:
    done = subprocess.run(_shoal(*words), cwd=place, check=True, capture_output=True, text=True, timeout=DEADLINE_S)
    return done.stdout


def shoot(page: Page, url: str, shot: Shot, path: Path) -> None:
    """Open the page in a browser and write what it shows as a PNG."""
    page.size(shot.width, shot.height)
    page.prefer("dark" if shot.dark else "light")
    page.driver.get(url)
    page.until("document.body.dataset.seq")
    if shot.opened:
        page.click(shot.opened)
    page.until(f"document.querySelector({shot.shown!r})")
    page.until("document.querySelector('#t-traffic').textContent !== '0 B/s'")
    page.driver.execute_async_script(
        "const [id, done] = arguments, element = id && document.getElementById(id);"
        "if (element) { element.scrollIntoView(); scrollBy(0, -72); }"  # below the bar that stays
        "requestAnimationFrame(() => requestAnimationFrame(done))",
        shot.element,
    )
    page.shoot(path)


def main(arguments: list[str] | None = None) -> None:
    """Make the pictures that are named, or all."""
    parser = argparse.ArgumentParser(prog="python -m shoal.lab.pictures", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *SHOTS, *TERMINALS], help="pictures; all if none is named")
    parser.add_argument("--out", type=Path, default=OUT, help="the folder to write them to")
    asked = parser.parse_args(arguments)
    left = set(asked.names or [*SHOTS, *TERMINALS])
    asked.out.mkdir(parents=True, exist_ok=True)
    shots = {name: shot for name, shot in SHOTS.items() if name in left}
    for name, shot in shots.items():
        swarm = SyntheticSwarm(peers=shot.peers, now=time.time(), rollouts=shot.rollouts)
        with tempfile.TemporaryDirectory() as folder, Served(swarm, Path(folder)) as served, browsing() as page:
            shoot(page, served.url, shot, asked.out / name)
    left -= shots.keys()
    with tempfile.TemporaryDirectory() as place, contextlib.closing(terminals(Path(place))) as shown_ones:
        while left:
            shown = next(shown_ones)
            if shown.picture in left:
                (asked.out / shown.picture).write_text(shown.terminal.picture(shown.title), encoding="utf-8")
            left -= {shown.picture}


if __name__ == "__main__":
    main()
