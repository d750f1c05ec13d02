"""The daemon behind a training loop: the one that runs on the data folder already, or one started for the loop.

One that was started here leaves the swarm with the loop, or, if the loop's process is killed, `ORPHAN_TIMEOUT_S` after
that: a loop started again on the same folder finds it. One that ran before stays.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from shoal.node.control_client import ControlRefused, JsonValue, NodeNotRunning, request
from shoal.node.loops.loop_client import LoopClient, NoDaemon, attach
from shoal.node.loops.loop_messages import OWN_LOOP
from shoal.node.training.trainer_messages import Layout
from shoal.protocol.errors import ConfigError, LocalError, NetworkError, ShoalError
from shoal.protocol.manifest import InnerSection, Manifest, load_manifest
from shoal.protocol.private_folder import make_private
from shoal.protocol.swarm_link import link_in, parse_link
from shoal.protocol.wire import SwarmId

LOG_NAME = "daemon.log"
MANIFEST_NAME = "swarm.toml"
"""In the data folder of a node that has run."""
START_DEADLINE_S = 120.0
"""From its start to the moment at which it takes loops."""
POLL_S = 0.05
TELL_PERIOD_S = 5.0
"""Between two words to a user who waits for the manifest."""
LEAVE_DEADLINE_S = 40.0
"""A daemon that was asked to leave may have to see a vote through."""
STOP_DEADLINE_S = 5.0
END_DEADLINE_S = 15.0
"""From the end of the attachment to that of the process, which says goodbye to the others meanwhile."""
INTERRUPTED = 130
"""Exit code of a daemon that left in order because of a signal."""
ORPHAN_TIMEOUT_S = 600
ASK_DEADLINE_S = 10.0
LOG_READ_BYTES = 64 << 10

logger = logging.getLogger("shoal.loop")


class LoopDaemon:
    """A daemon process, found or started by `found_or_started`."""

    def __init__(
        self, data_dir: Path, process: subprocess.Popen[bytes] | None, log_from: int, manifest: Manifest | None = None
    ) -> None:
        """manifest: None where it is for the daemon to fetch, or to have."""
        self.data_dir = data_dir
        self._manifest = manifest
        self._process = process
        self._log_from = log_from
        self._adopted = False
        self._asked = False  # and heard it

    @property
    def log_path(self) -> Path:
        """Path of the log of a daemon that was started here."""
        return self.data_dir / LOG_NAME

    def attach(self, *, layout: Layout, metric: str, device: str) -> LoopClient:
        """Attach to it as soon as it takes loops. Raises ConfigError, with its own words if it ended, NetworkError."""
        ends_at = time.monotonic() + START_DEADLINE_S
        while True:
            try:
                return attach(self.data_dir, layout=layout, metric=metric, device=device)
            except NoDaemon:
                self.check_running()
                if self._process is None and self.status() is not None:
                    raise ConfigError(
                        f"the node on {self.data_dir} trains by itself; "
                        f"to attach a loop, run one with the workload {OWN_LOOP!r}"
                    ) from None
            if time.monotonic() > ends_at:
                raise NetworkError(f"the node on {self.data_dir} takes no training loop; see {self.log_path}")
            time.sleep(POLL_S)

    @property
    def manifest(self) -> Manifest:
        """The swarm's. Raises LocalError before it is known: `wait_for_manifest`."""
        if self._manifest is None:
            raise LocalError("the manifest is not here yet")
        return self._manifest

    def wait_for_manifest(self, swarm: SwarmId, *, wait_s: float = START_DEADLINE_S) -> None:
        """Wait until the daemon has the manifest of this swarm, which it gets from whom its link names.

        Raises ConfigError, with the daemon's own words if it ended; NetworkError.
        """
        path, began = self.data_dir / MANIFEST_NAME, time.monotonic()
        tell_at = began + TELL_PERIOD_S
        if self._manifest is None and not path.exists():
            logger.info("asking for the manifest whom the link names")
        while self._manifest is None:
            found = load_manifest(path) if path.exists() else None
            if found is not None and found.swarm_id == swarm:
                check_own_loop(found, source=str(path))
                self._manifest = found
                return
            self.check_running()
            now = time.monotonic()
            if now > tell_at:
                tell_at = now + TELL_PERIOD_S
                logger.info("no manifest after %.0f s; whom the link names is asked again", now - began)
            if now > began + wait_s:
                raise NetworkError(f"the node on {self.data_dir} has no manifest yet; see {self.log_path}")
            time.sleep(POLL_S)

    def check_running(self) -> None:
        """Raises ConfigError, with the last of its own words, if a daemon that was started here has ended."""
        if self._process is not None and self._process.poll() is not None:
            raise ConfigError(self.last_words() or f"the node ended at its start; see {self.log_path}")

    def failed(self) -> bool:
        """True if a daemon that was started here, and goes away, ends with an error; waits until it has ended."""
        return self._ended() not in (None, 0, INTERRUPTED)

    def _ended(self) -> int | None:
        """Exit code of a daemon that was started here and goes away, once it has ended; None of another."""
        if self._process is None:
            return None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_DEADLINE_S)
        return self._process.returncode

    def last_words(self) -> str:
        """Reason why a daemon that was started here goes away, if it gives one in a line of Shoal's own; else empty.

        Waits until it has ended: it writes them last. What the log has of earlier runs says nothing of one that ran
        before this loop.
        """
        if self._process is None:
            return ""
        self._ended()
        with suppress(OSError), self.log_path.open("rb") as log:
            log.seek(max(self._log_from, self.log_path.stat().st_size - LOG_READ_BYTES))
            lines = log.read(LOG_READ_BYTES).decode(errors="replace").splitlines()
            return next((line[7:] for line in reversed(lines) if line.startswith("shoal: ")), "")
        return ""

    def status(self) -> dict[str, JsonValue] | None:
        """Ask the daemon for its status; None if it does not run. Raises NetworkError if it gives no answer."""
        try:
            return request(self.data_dir, "status", deadline_s=ASK_DEADLINE_S)
        except (NodeNotRunning, ControlRefused):
            return None

    def adopt(self) -> None:
        """Have the daemon leave with this loop, as one that was started here: it was, by the loop's life before."""
        self._adopted = True

    @property
    def leaves(self) -> bool:
        """True if it leaves with the loop: it runs, and was started here, or adopted."""
        return self._adopted or (self._process is not None and self._process.poll() is None)

    def ask_to_leave(self) -> None:
        """Have a daemon that was started here, or adopted, leave the swarm; another stays as it is."""
        if self.leaves:
            with suppress(ShoalError):
                request(self.data_dir, "leave", deadline_s=ASK_DEADLINE_S)
                self._asked = True

    def give_up(self) -> None:
        """End a daemon that was started here and is of no use."""
        if self._process is not None:
            _stop(self._process)

    def end(self) -> None:
        """Reap a daemon that was asked to leave, and end it if it does not; wait until an adopted one is gone.

        One that is only starting hears nobody yet, and is told by a signal, upon which it leaves likewise.
        """
        if self._adopted:
            self._wait_until_gone()
        process = self._process
        if process is None:
            return
        if not self._asked and process.poll() is None:
            process.terminate()
        try:
            process.wait(LEAVE_DEADLINE_S)
        except subprocess.TimeoutExpired:
            logger.warning("the node on %s does not leave in order; ending it", self.data_dir)
        finally:
            _stop(process)

    def _wait_until_gone(self) -> None:
        ends_at = time.monotonic() + LEAVE_DEADLINE_S
        with suppress(NetworkError):
            while self.status() is not None:
                if time.monotonic() > ends_at:
                    logger.warning("the node on %s does not leave in order; it goes on", self.data_dir)
                    return
                time.sleep(POLL_S)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_DEADLINE_S)
    if process.poll() is None:
        process.kill()
    process.wait()


def found_or_started(
    swarm: Path | str,
    data_dir: Path,
    *,
    peers: Sequence[str],
    options: Sequence[str],
    wait_s: float = START_DEADLINE_S,
) -> LoopDaemon:
    """The daemon that runs on `data_dir`, or one started there with these options of `shoal run`.

    swarm: the path of a manifest, or a link, or the line that has one. wait_s: how long a manifest is asked for, no
    longer than `START_DEADLINE_S`. Raises ConfigError if the swarm is not for own loops, the running daemon is of
    another, or the one that was started ended; NetworkError.
    """
    link, manifest = link_in(str(swarm)), None
    if not str(swarm).strip():
        raise ConfigError("where the manifest or link should stand is nothing; give a file of `shoal init`, or a link")
    if link is None:
        manifest = load_manifest(Path(swarm))
        check_own_loop(manifest, source=str(swarm))
        swarm_id = manifest.swarm_id
    else:
        swarm_id = parse_link(link).swarm
    daemon = LoopDaemon(data_dir, None, 0, manifest)
    status = daemon.status()
    if status is None:
        daemon = _start(str(swarm), link, manifest, data_dir, peers=peers, options=options)
    else:
        _check_same_swarm(status, swarm_id, data_dir)
        if given := [name for name, value in (("peers", peers), ("options", options)) if value]:
            logger.warning(
                "the node on %s ran before this loop, and keeps its options: %s of join() say nothing to it",
                data_dir,
                " and ".join(given),
            )
    try:
        daemon.wait_for_manifest(swarm_id, wait_s=min(wait_s, START_DEADLINE_S))
    except BaseException:
        daemon.give_up()
        raise
    return daemon


def check_own_loop(manifest: Manifest, *, source: str) -> None:
    """Raise ConfigError where a swarm's nodes train by themselves; warn of settings that are not for loops."""
    if manifest.workload.name != OWN_LOOP:
        raise ConfigError(
            f"{source} names the workload {manifest.workload.name!r}; "
            f"for a loop of your own make one with `shoal init --workload {OWN_LOOP}`"
        )
    if manifest.inner != InnerSection():
        logger.warning("[inner] in %s has no effect on a loop of your own: its optimizer is yours", source)


def _check_same_swarm(status: dict[str, JsonValue], swarm_id: SwarmId, data_dir: Path) -> None:
    if status.get("swarm_id") != swarm_id.hex():
        raise ConfigError(f"the node that runs on {data_dir} is in another swarm; choose another data folder")


def _start(
    swarm: str,
    link: str | None,
    manifest: Manifest | None,
    data_dir: Path,
    *,
    peers: Sequence[str],
    options: Sequence[str],
) -> LoopDaemon:
    """Start a daemon, by its manifest's path or by a link.

    That goes to it over its standard input: others on the machine see what commands are given.
    """
    make_private(data_dir)
    given = swarm if link is None else "-"
    command = [sys.executable, "-P", "-m", "shoal.cli.main", "run", given, "--data-dir", str(data_dir)]
    command += ["--loop-patience", str(ORPHAN_TIMEOUT_S), *options]
    for address in peers:
        command += ["--join", address]
    logger.info("starting a node on %s", data_dir)
    with (data_dir / LOG_NAME).open("ab") as log, TemporaryFile() as source:
        source.write((link or "").encode() + b"\n")
        source.seek(0)
        process = _started(command, source, log)
        return LoopDaemon(data_dir, process, log.tell(), manifest)


def _started(command: Sequence[str], source: IO[bytes], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a process. Ctrl-C in the midst of it is put off until it is known, and ends it, then."""
    interrupted: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    defers = before is not None and threading.current_thread() is threading.main_thread()
    if defers:
        signal.signal(signal.SIGINT, lambda number, frame: interrupted.append(number))
    try:
        process = subprocess.Popen(
            command,
            stdin=source,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C goes to the loop alone, which leaves in order
            env=dict(os.environ),
        )
    finally:
        if defers:
            signal.signal(signal.SIGINT, before)
    if interrupted:
        _stop(process)
        raise KeyboardInterrupt
    return process
