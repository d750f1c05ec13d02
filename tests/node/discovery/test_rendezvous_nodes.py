"""Two real nodes that know nothing but a hivemind DHT find each other, through `shoal relay` and its real Go daemon."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from shoal.protocol.identity import Identity

DEADLINE_S = 240.0
SHOAL = [sys.executable, "-m", "shoal.cli.main"]
ON_LOOPBACK = ["--listen", "/ip4/127.0.0.1/tcp/0"]
QUIET = ["--no-mdns", "--dashboard", "off", "--threads", "1", "--lane-listen", "127.0.0.1:0"]


@contextmanager
def process(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command of shoal, with `folder` as its data folder and its output beside that; interrupted at the end."""
    with (folder.parent / f"{folder.name}.log").open("wb") as log:
        command = [*SHOAL, *arguments, "--data-dir", str(folder)]
        running = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield running
            running.send_signal(signal.SIGINT)
            assert running.wait(DEADLINE_S) == 130
        finally:
            running.kill()
            running.wait()


def wait_for_line(path: Path, marker: str) -> str:
    """The first whole line of a file that holds `marker`."""
    ends_at = time.monotonic() + DEADLINE_S
    while time.monotonic() < ends_at:
        lines = path.read_text(errors="replace").split("\n")[:-1] if path.exists() else []
        found = next((line for line in lines if marker in line), None)
        if found is not None:
            return found
        time.sleep(0.05)
    raise AssertionError(f"no {marker!r} in {path}")


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("hivemind") is None, reason="hivemind is not installed")
def test_nodes_that_name_a_hivemind_peer_and_nobody_else_are_linked(tmp_path: Path) -> None:
    founder = Identity.load_or_create(tmp_path / "founder" / "node.key")
    manifest = tmp_path / "swarm.toml"
    init = [*SHOAL, "init", "--data-dir", str(tmp_path / "founder"), "--workload", "regression", "-o", str(manifest)]
    subprocess.run(init, check=True, capture_output=True, timeout=DEADLINE_S)
    with ExitStack() as stack:
        stack.enter_context(process(tmp_path / "relay", "relay", *ON_LOOPBACK))
        relay = wait_for_line(tmp_path / "relay.log", "/p2p/")
        for name in ("founder", "newcomer"):
            stack.enter_context(
                process(tmp_path / name, "run", str(manifest), *ON_LOOPBACK, *QUIET, "--hivemind", relay)
            )
        linked = wait_for_line(tmp_path / "newcomer" / "events.jsonl", '"event":"linked"')
        assert json.loads(linked)["peer"] == founder.peer_id
