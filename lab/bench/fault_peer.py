"""One peer of another system, in a process of its own.

    python -m shoal.lab.bench.fault_peer SYSTEM INDEX PEERS FOLDER HOST

    parent ── addresses of those before, then a line for each reduction ──► peer     standard input
    parent ◄── Listening, then Began and Returned for each reduction ────── peer     standard output, JSON a line

The peer contributes the vector in FOLDER/vector-INDEX, the same each time, and leaves what it got in
FOLDER/values-INDEX, both little-endian float32. Nothing of Shoal's network code is imported: hivemind cannot share a
process with it.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import numpy as np

from shoal.testnet.parent_death import ended_with_parent, tie_to

ERROR_LIMIT_CHARS: Final = 160
STAGE_POLL_S: Final = 0.001

# hivemind is asked for groups of all peers, and told to take a peer for failed that is silent for a few seconds, where
# by default it waits for ever. A whole averaging may take what its optimizer lets it take by default.
MATCHMAKING_S: Final = 2.0
REQUEST_TIMEOUT_S: Final = 1.0
CHUNK_TIMEOUT_S: Final = 3.0
AVERAGING_TIMEOUT_S: Final = 60.0


class Listening(msgspec.Struct, frozen=True, tag=True):
    """The peer can be met there."""

    address: str


class Began(msgspec.Struct, frozen=True, tag=True):
    """The exchange of values has begun, at that second of the monotonic clock."""

    at: float


class Returned(msgspec.Struct, frozen=True, tag=True):
    """The reduction returned then: with values if there is no error. claimed: by how many peers, if the system says."""

    at: float
    error: str = ""
    claimed: int | None = None


Report = Listening | Began | Returned


def read_report(line: bytes) -> Report | None:
    """The report in a line; None for a line that is none."""
    try:
        report: Report = msgspec.json.decode(line, type=Report)
    except msgspec.MsgspecError:
        return None
    return report


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The peer's place among the others, and the folder that all share."""

    index: int
    peers: int
    folder: Path
    host: str


class System(Protocol):
    """Another system, as far as it is used here."""

    def listen(self, others: list[str]) -> str:
        """Listen, and know those that listen already; returns the own address."""

    def meet(self) -> None:
        """Wait for the others, as far as the system does."""

    def reduce(self, own: Any, began: Callable[[], None]) -> tuple[Any, int | None]:
        """(mean over peers, number of peers if the system says); calls `began` as the exchange of values begins."""


class Gloo:
    """torch.distributed's gloo, with its timeout of half an hour; the mean is the sum over the number of ranks."""

    def __init__(self, where: Where) -> None:
        self._where = where

    def listen(self, others: list[str]) -> str:
        """See `System`. They meet in a file."""
        return f"file://{self._where.folder}/meet"

    def meet(self) -> None:
        """See `System`."""
        import torch.distributed as dist

        index, peers = self._where.index, self._where.peers
        dist.init_process_group("gloo", init_method=self.listen([]), rank=index, world_size=peers)

    def reduce(self, own: Any, began: Callable[[], None]) -> tuple[Any, int | None]:
        """See `System`."""
        import torch.distributed as dist

        values = own.clone()
        dist.barrier()
        began()
        dist.all_reduce(values)
        return values / self._where.peers, None


class Hivemind:
    """A DHT node and a DecentralizedAverager of hivemind's, which run in processes that end with this one."""

    def __init__(self, where: Where) -> None:
        self._where = where
        self._dht: Any = None
        self._averager: Any = None

    def listen(self, others: list[str]) -> str:
        """See `System`. Each is told of all before it: it forgets addresses that are neither public nor private."""
        from hivemind import DHT  # type: ignore[import-untyped]
        from hivemind.p2p import P2P  # type: ignore[import-untyped]

        arguments = P2P._make_process_args
        P2P._make_process_args = staticmethod(lambda *given, **named: ended_with_parent(arguments(*given, **named)))
        os.register_at_fork(after_in_child=lambda: tie_to(os.getppid()))
        self._dht = DHT(initial_peers=others, start=True, host_maddrs=[f"/ip4/{self._where.host}/tcp/0"])
        return " ".join(map(str, self._dht.get_visible_maddrs()))

    def meet(self) -> None:
        """See `System`. It looks for a group in each reduction."""

    def reduce(self, own: Any, began: Callable[[], None]) -> tuple[Any, int | None]:
        """See `System`."""
        from hivemind.averaging.control import AveragingStage  # type: ignore[import-untyped]

        averager = self._averager or self._start_averager(own)
        with averager.get_tensors() as (values,):
            values.copy_(own)
        step = averager.step(wait=False, allow_retries=False, timeout=AVERAGING_TIMEOUT_S)
        before = (AveragingStage.IDLE, AveragingStage.LOOKING_FOR_GROUP, AveragingStage.AWAITING_TRIGGER)
        while step.stage in before and not step.done():
            time.sleep(STAGE_POLL_S)
        if step.began_allreduce:
            began()
        group = step.result()
        with averager.get_tensors() as (values,):
            return values.clone(), len(group)

    def _start_averager(self, own: Any) -> Any:
        from hivemind import DecentralizedAverager

        self._averager = DecentralizedAverager(
            [own.clone()],
            self._dht,
            start=True,
            prefix="faults",
            target_group_size=self._where.peers,
            min_group_size=self._where.peers,
            min_matchmaking_time=MATCHMAKING_S,
            request_timeout=REQUEST_TIMEOUT_S,
            next_chunk_timeout=CHUNK_TIMEOUT_S,
            allreduce_timeout=AVERAGING_TIMEOUT_S,
        )
        return self._averager


SYSTEMS: Final[dict[str, Callable[[Where], System]]] = {"gloo": Gloo, "hivemind": Hivemind}


_SOURCE_PLACE: Final = re.compile(r"^\[\S+:\d+\] ")


def error_line(error: BaseException) -> str:
    """The first line of an error, with its kind and without the place in its source."""
    lines = _SOURCE_PLACE.sub("", str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:ERROR_LIMIT_CHARS]


def main(arguments: list[str]) -> None:
    """Be the peer until standard input ends."""
    import torch

    torch.set_num_threads(1)
    reports = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a system prints goes to the log

    def report(one: Report) -> None:
        reports.write(msgspec.json.encode(one) + b"\n")

    name, index, peers, folder, host = arguments
    where = Where(index=int(index), peers=int(peers), folder=Path(folder), host=host)
    system = SYSTEMS[name](where)
    report(Listening(system.listen(sys.stdin.readline().split())))
    system.meet()
    own = torch.from_numpy(np.fromfile(where.folder / f"vector-{index}", "<f4"))
    for _ in sys.stdin:
        report(_reduce(system, own, where, report))


def _reduce(system: System, own: Any, where: Where, report: Callable[[Report], None]) -> Returned:
    """Reduce once, and leave the values, if there are any."""
    try:
        values, claimed = system.reduce(own, lambda: report(Began(time.monotonic())))
    except Exception as error:  # the boundary: whatever the system raises is what it returns
        return Returned(time.monotonic(), error_line(error))
    at = time.monotonic()
    values.numpy().astype("<f4", copy=False).tofile(where.folder / f"values-{where.index}")
    return Returned(at, claimed=claimed)


if __name__ == "__main__":
    main(sys.argv[1:])
