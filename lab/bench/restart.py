"""How long a node that was killed takes until it trains again, from its own disk.

One node alone, founder of its swarm, is killed (SIGKILL) in the middle of a round's training and started again with the
same data folder, some times over. A restart begins when its process is started and ends when the first inner step
begins: the trainer has its orders by then, and steps as soon as it has evaluated the state that it goes on from, which
the event `evaluated` tells. Importing torch is timed inside the trainer process and reported beside it, and taken off;
what the node does beside the import costs nothing then.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shoal.lab.targets import Row, Target
from shoal.node.reporting.event_files import LOG_NAME, lines_of
from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import Identity
from shoal.protocol.manifest import render_manifest, validate_manifest
from shoal.testnet.tether import tethered

INPUTS = 256
STEPS = 1000
"""Inner steps of a round, by the MB of state: steps of large models take longer. From 2 to STEPS_LIMIT."""
STEPS_LIMIT = 100
BYTES_PER_PARAMETER = 8
"""Of a saved state: anchor and momentum."""
POLL_S = 0.01
DEADLINE_S = 300.0
INEXACT = Target(name="restarts that did not go on exactly where the node was", most=0)


class _Event(msgspec.Struct, frozen=True):
    at: float
    event: str
    round: int = 0
    import_s: float = 0.0
    exact: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """One restart: seconds from process start to training, those of importing torch among them, and how it resumed."""

    total_s: float
    import_torch_s: float
    exact: bool

    @property
    def net_s(self) -> float:
        """Without importing torch."""
        return self.total_s - self.import_torch_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartSpeed:
    """All restarts, in order."""

    state_bytes: int
    restarts: tuple[Restart, ...]

    @property
    def net_s(self) -> float:
        """The median without importing torch."""
        return statistics.median(restart.net_s for restart in self.restarts)

    @property
    def rows(self) -> tuple[Row, ...]:
        """What was measured beside its target."""
        return (INEXACT.row(sum(not restart.exact for restart in self.restarts)),)


def measure_restart(*, state_mb: int, repetitions: int) -> RestartSpeed:
    """Measure with a regression whose saved state has about so many MB. Raises NetworkError if a node fails."""
    outputs = max(1, state_mb * 1_000_000 // (BYTES_PER_PARAMETER * (INPUTS + 1)))
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch:
        steps = min(STEPS_LIMIT, max(2, STEPS // state_mb))
        node = _Node(Path(scratch), outputs=outputs, steps=steps)
        try:
            node.start()
            node.wait("round_started", round=3)
            restarts = []
            for _ in range(repetitions):
                node.kill()
                restarts.append(node.restart())
                node.wait("round_started", round=1 + max(event.round for event in node.events("contributed")))
            return RestartSpeed(state_bytes=BYTES_PER_PARAMETER * (INPUTS + 1) * outputs, restarts=tuple(restarts))
        finally:
            node.kill()


class _Node:
    """A node alone, in a folder of its own."""

    def __init__(self, folder: Path, *, outputs: int, steps: int) -> None:
        self._data_dir = folder / "node"
        self._manifest = folder / "swarm.toml"
        self._log = folder / "node.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._began_at = 0.0
        key = Identity.load_or_create(self._data_dir / "node.key")
        tables = {
            "swarm": {"name": "bench", "founders": [key.peer_id], "admission": "open"},
            "workload": {"name": "regression", "options": {"inputs": INPUTS, "outputs": outputs}},
            "sync": {"inner_steps": steps, "balance": False},
        }
        self._manifest.write_text(render_manifest(validate_manifest(tables, source="the benchmark")))

    def start(self) -> None:
        command = [
            sys.executable,
            "-m",
            "shoal.cli.main",
            "run",
            str(self._manifest),
            "--data-dir",
            str(self._data_dir),
        ]
        command += ["--no-mdns", "--dashboard", "off"]
        command += ["--listen", "/ip4/127.0.0.1/tcp/0", "--lane-listen", "127.0.0.1:0"]
        command += ["--threads", "1"]
        self._began_at = time.time()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                tethered(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def restart(self) -> Restart:
        """Start again; returns once it has trained and contributed."""
        self.start()
        self.wait("contributed")
        trained_from = max(self.wait("evaluated").at, self.wait("round_started").at)
        return Restart(
            total_s=trained_from - self._began_at,
            import_torch_s=self.wait("trainer_started").import_s,
            exact=self.wait("resumed").exact,
        )

    def kill(self) -> None:
        """SIGKILL; its trainer ends when its socket does."""
        if self._process is not None:
            if self._process.poll() is None:
                os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def events(self, kind: str) -> list[_Event]:
        """Those of that kind of this life, whose lines are whole."""
        found = (msgspec.json.decode(line, type=_Event) for line in lines_of(self._data_dir / LOG_NAME))
        return [event for event in found if event.event == kind and event.at >= self._began_at]

    def wait(self, kind: str, *, round: int = 0) -> _Event:
        """The first such event of this life, of that round or a later one. Raises NetworkError."""
        ends_at = time.monotonic() + DEADLINE_S
        while True:
            for event in self.events(kind):
                if event.round >= round:
                    return event
            if self._process is None or self._process.poll() is not None or time.monotonic() > ends_at:
                words = self._log.read_text(errors="replace")[-500:]
                raise NetworkError(f"the node does not come to {kind!r}: …{' '.join(words.split())}")
            time.sleep(POLL_S)
