"""A group of another system's peers, each a process of its own, of which the last is struck in mid-reduce.

    start ── meet ── WARM_UP + TIMED reductions, undisturbed ── one more, struck after half of their time ── outcomes

A fault strikes a peer's whole session, with all processes that the system has in it; where it is cut off, each peer is
in a network namespace. What peers returned is read from their files and compared with the means over all sets.
"""

from __future__ import annotations

import hashlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final, Literal, TypeVar

import msgspec
import numpy as np

from shoal.collectives.codecs import F32
from shoal.lab.bench.fault_peer import ERROR_LIMIT_CHARS, Began, Listening, Report, Returned, read_report
from shoal.lab.bench.fault_values import Origin, origin_of
from shoal.lab.bench.synthetic import drawn_values
from shoal.protocol.errors import NetworkError
from shoal.testnet.links.namespaces import LOOPBACK, Network, Place, network, pairs_between
from shoal.testnet.parent_death import ended_with_parent

START_DEADLINE_S: Final = 180.0
REDUCE_DEADLINE_S: Final = 120.0
WARM_UP, TIMED = 1, 5
STRIKE_AT: Final = 0.5
TRIES: Final = 5
LOG_SHOWN_BYTES: Final = 4000

Fault = Literal["sigkill", "sigstop", "partition"]
Kind = Literal["exact", "wrong", "error", "nothing"]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome, at one peer, of a reduction in which another was struck.

    exact: the mean over as many `contributors`. wrong: other values, with `shares` of them by whose mean they are.
    error: an error, the first line of which is `text`. nothing: nothing within the time it was watched.
    after_s: from the fault; None of nothing. claimed: contributors that the system named itself. digest: of the values.
    """

    kind: Kind
    after_s: float | None = None
    contributors: int = 0
    wrong_share: float = 0.0
    shares: dict[str, float] = {}
    claimed: int | None = None
    digest: str = ""
    text: str = ""


class Repetition(msgspec.Struct, frozen=True, kw_only=True):
    """One fault. identical: all survivors returned values, the same by bits.

    struck_after_s: the fault, since the last peer had begun. usual_s: a reduction that nothing disturbs. cut_off: what
    the peer returned that was cut off; None where it was not, or where `apart` tells it.
    apart: of ours, whether the struck one certified nothing while cut off, and all are in one chain afterwards.
    """

    survivors: tuple[Outcome, ...]
    identical: bool
    usual_s: float | None = None
    struck_after_s: float | None = None
    cut_off: Outcome | None = None
    apart: bool | None = None


class Ended(msgspec.Struct, frozen=True):
    """A peer's process is gone."""

    at: float
    code: int


class TooLate(Exception):
    """The reduction could not be struck in its midst: a peer did not begin it, or was done before."""


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """Peers of one system, and the fault of the last of them. watch_s: how long is waited for what others return."""

    system: str
    peers: int
    numel: int
    fault: Fault
    watch_s: float

    @cached_property
    def vectors(self) -> list[F32]:
        """Contributions by peer, each (numel,) float32."""
        return [drawn_values(peer + 1, self.numel) for peer in range(self.peers)]


@dataclass(slots=True, kw_only=True)
class _Process:
    """A peer's process, the leader of a session, and the thread that reads what it reports."""

    started: subprocess.Popen[bytes]
    reader: threading.Thread = field(init=False)

    def order(self, text: str = "") -> None:
        """Write a line to it; one that is gone need not read."""
        assert self.started.stdin is not None
        with suppress(BrokenPipeError):
            self.started.stdin.write(f"{text}\n".encode())
            self.started.stdin.flush()

    def signal(self, number: int) -> None:
        """Send a signal to all processes of its session that are in its group."""
        with suppress(ProcessLookupError):
            os.killpg(self.started.pid, number)


R = TypeVar("R", Began, Listening, Returned, Ended)


class Group:
    """The peers of one repetition. All methods block. Made by `running_group`."""

    def __init__(self, spec: GroupSpec, folder: Path, links: Network | None) -> None:
        self._spec, self._folder, self._links = spec, folder, links
        self._all = range(spec.peers)
        self._processes: list[_Process] = []
        self._queue: queue.SimpleQueue[tuple[int, Report | Ended]] = queue.SimpleQueue()
        self._seen: dict[tuple[int, type], Report | Ended] = {}

    # -- start and end ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all peers and tell each where those before it are. Raises NetworkError if one does not listen."""
        for index, vector in enumerate(self._spec.vectors):
            vector.tofile(self._folder / f"vector-{index}")
        for index in self._all:
            self._processes.append(_Process(started=self._open(index)))
            reader = threading.Thread(target=self._read, args=(index,), daemon=True)
            self._processes[index].reader = reader
            reader.start()
        addresses: list[str] = []
        for index, process in enumerate(self._processes):
            process.order(" ".join(addresses))
            found = self._until(Listening, [index], START_DEADLINE_S)
            if index not in found:
                raise self._failed(index, "does not listen")
            addresses.append(found[index].address)

    def _open(self, index: int) -> subprocess.Popen[bytes]:
        place = LOOPBACK if self._links is None else self._links.place(index)
        spec = self._spec
        numbers = [str(index), str(spec.peers), str(self._folder), place.host]
        module = [sys.executable, "-m", "shoal.lab.bench.fault_peer", spec.system, *numbers]
        with self._log(index).open("wb") as log:
            return subprocess.Popen(
                ended_with_parent([*place.enter, *module]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(place),
                start_new_session=True,
            )

    def _read(self, index: int) -> None:
        """Pass on what a peer reports, to the end of its process."""
        process = self._processes[index].started
        assert process.stdout is not None
        for line in process.stdout:
            if (report := read_report(line)) is not None:
                self._queue.put((index, report))
        self._queue.put((index, Ended(time.monotonic(), process.wait())))

    def end(self) -> None:
        """Kill whatever runs of it."""
        for process in self._processes:
            process.signal(signal.SIGKILL)
        for process in self._processes:
            process.started.wait()
            process.reader.join()
            for pipe in (process.started.stdin, process.started.stdout):
                assert pipe is not None
                with suppress(BrokenPipeError):
                    pipe.close()

    # -- what peers report -----------------------------------------------------------------------------------

    def _until(self, kind: type[R], peers: Collection[int], limit_s: float) -> dict[int, R]:
        """Reports of that kind by these peers, once all have made one, or nothing is left that could.

        A peer that returned, or ended, does not begin any more.
        """
        ends_at = time.monotonic() + limit_s
        final = {kind, Returned, Ended}
        while any(not any((peer, one) in self._seen for one in final) for peer in peers):
            try:
                index, report = self._queue.get(timeout=max(0.0, ends_at - time.monotonic()))
            except queue.Empty:
                break
            self._seen[index, type(report)] = report
        found = {peer: self._seen.get((peer, kind)) for peer in peers}
        return {peer: report for peer, report in found.items() if isinstance(report, kind)}

    def _failed(self, index: int, what: str) -> NetworkError:
        words = _last_line(self._log(index))
        return NetworkError(f"peer {index} of {self._spec.system} {what}; the last it wrote is: {words}")

    def _log(self, index: int) -> Path:
        return self._folder / f"log-{index}"

    # -- reductions ------------------------------------------------------------------------------------------

    def _begin(self, limit_s: float) -> float:
        """Have all reduce; when the last of them began. Raises NetworkError for one that ended, TooLate."""
        self._seen = {key: one for key, one in self._seen.items() if isinstance(one, Ended)}
        for process in self._processes:
            process.order()
        began = self._until(Began, self._all, limit_s)
        for index in self._all:
            if (index, Ended) in self._seen:
                raise self._failed(index, "ended before any fault")
        if len(began) < len(self._all):
            raise TooLate(f"peer {min(set(self._all) - set(began))} did not begin")
        return max(one.at for one in began.values())

    def undisturbed_s(self) -> float:
        """Seconds that a reduction takes which nothing disturbs: the least, since other load only adds to it.

        Raises NetworkError if the last of them is not exact, TooLate.
        """
        times = []
        for number in range(WARM_UP + TIMED):
            began_at = self._begin(REDUCE_DEADLINE_S if number else START_DEADLINE_S)
            returned = self._until(Returned, self._all, REDUCE_DEADLINE_S)
            for index in self._all:
                if index not in returned or returned[index].error:
                    raise self._failed(index, "does not reduce, undisturbed")
            times.append(max(one.at for one in returned.values()) - began_at)
        for index in self._all:
            origin = self._origin(index)
            if not (origin.exact and origin.contributors == self._spec.peers):
                raise self._failed(
                    index, f"has the mean over {origin.contributors}, {origin.wrong_share:.0%} wrong, undisturbed"
                )
        return min(times[WARM_UP:])

    def strike(self) -> Repetition:
        """Strike the last peer half-way, and see what the others return. Raises NetworkError, TooLate."""
        usual_s = self.undisturbed_s()
        began_at = self._begin(REDUCE_DEADLINE_S)
        time.sleep(max(0.0, began_at + STRIKE_AT * usual_s - time.monotonic()))
        *survivors, victim = self._all
        struck_at = time.monotonic()
        self._hit(survivors, victim)
        cut_off = [victim] if self._links is not None else []
        self._until(Returned, [*survivors, *cut_off], self._spec.watch_s)
        returned_at = [one.at for one in self._until(Returned, self._all, 0.0).values()]
        if min(returned_at, default=struck_at) < struck_at:
            raise TooLate("a peer had returned before the fault")
        found = [self._outcome(index, struck_at) for index in (*survivors, *cut_off)]
        returned = found[: len(survivors)]
        return Repetition(
            survivors=tuple(returned),
            identical=bool(returned[0].digest) and len({one.digest for one in returned}) == 1,
            usual_s=usual_s,
            struck_after_s=struck_at - began_at,
            cut_off=found[-1] if cut_off else None,
        )

    def _hit(self, survivors: Sequence[int], victim: int) -> None:
        if self._links is not None:
            self._links.block(pairs_between([survivors, [victim]]))
        else:
            number = {"sigkill": signal.SIGKILL, "sigstop": signal.SIGSTOP}[self._spec.fault]
            self._processes[victim].signal(number)

    def _outcome(self, index: int, struck_at: float) -> Outcome:
        match self._seen.get((index, Returned)) or self._seen.get((index, Ended)):
            case Returned(at=at, error="", claimed=claimed):
                return valued(self._origin(index), at - struck_at, claimed, self._digest(index))
            case Returned(at=at, error=error):
                return Outcome(kind="error", after_s=at - struck_at, text=error)
            case Ended(at=at, code=code):
                words = f"its process ended with {code}: {_last_line(self._log(index))}"
                return Outcome(kind="error", after_s=at - struck_at, text=words[:ERROR_LIMIT_CHARS])
        return Outcome(kind="nothing")

    def _origin(self, index: int) -> Origin:
        return origin_of(np.fromfile(self._folder / f"values-{index}", np.float32), self._spec.vectors)

    def _digest(self, index: int) -> str:
        return hashlib.sha256((self._folder / f"values-{index}").read_bytes()).hexdigest()


def valued(origin: Origin, after_s: float, claimed: int | None, digest: str) -> Outcome:
    """The outcome of one that returned values."""
    return Outcome(
        kind="exact" if origin.exact else "wrong",
        after_s=after_s,
        contributors=origin.contributors,
        wrong_share=origin.wrong_share,
        shares=origin.shares,
        claimed=claimed,
        digest=digest,
    )


def _environment(place: Place) -> dict[str, str]:
    device = "eth0" if place.enter else "lo"
    return {**os.environ, "GLOO_SOCKET_IFNAME": device, "OMP_NUM_THREADS": "1"}


def _last_line(path: Path) -> str:
    lines = path.read_bytes()[-LOG_SHOWN_BYTES:].decode(errors="replace").strip().splitlines()
    return lines[-1][:ERROR_LIMIT_CHARS] if lines else "nothing"


@contextmanager
def running_group(spec: GroupSpec) -> Iterator[Group]:
    """A group that has been started. However the block ends, no process of it is left. Raises NetworkError."""
    with (
        tempfile.TemporaryDirectory(prefix="shoal-faults-") as folder,
        network(spec.peers) if spec.fault == "partition" else nullcontext() as links,
    ):
        group = Group(spec, Path(folder), links)
        try:
            group.start()
            yield group
        finally:
            group.end()


def strike_once(spec: GroupSpec) -> Repetition:
    """One repetition, of a new group. Raises NetworkError, also if the fault never comes in mid-reduce."""
    reason = ""
    for _ in range(TRIES):
        try:
            with running_group(spec) as group:
                return group.strike()
        except TooLate as error:
            reason = str(error)
    raise NetworkError(f"{spec.system} was not struck in mid-reduce, {TRIES} times: {reason}; take more --numel")
