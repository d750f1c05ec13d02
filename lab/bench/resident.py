"""Memory of running processes, read from /proc again and again in a thread while something else goes on.

The kernel's own high-water mark (VmHWM) counts pages of mapped files as well, which it may drop: here they are told
apart from anonymous memory and memory files.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

SAMPLE_S: Final = 0.01
"""Between two looks at the same daemon; what takes memory takes longer at the sizes that are measured."""


class Resident(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a process, or of a daemon with its trainer, in bytes."""

    anonymous: int
    shared: int
    file: int

    @property
    def held(self) -> int:
        """Bytes that the kernel cannot drop."""
        return self.anonymous + self.shared


@contextmanager
def watched(nodes: Sequence[Sequence[int]]) -> Iterator[list[Resident]]:
    """Look at the processes of each node again and again, in a thread; what was seen when the block ends, of all."""
    seen: list[Resident] = []

    def look() -> None:
        for pids in nodes:
            with suppress(OSError):  # one has just ended
                seen.append(together([resident(pid) for pid in pids]))

    with looked_at(look, SAMPLE_S):
        yield seen


@contextmanager
def looked_at(look: Callable[[], None], every_s: float) -> Iterator[None]:
    """Call `look` every so often in a thread, until the block ends."""
    over = threading.Event()

    def run_until_over() -> None:
        while not over.wait(every_s):
            look()

    thread = threading.Thread(target=run_until_over, name="looks")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def resident(pid: int) -> Resident:
    """Memory of a process now. Raises OSError if there is none such."""
    kib = dict[str, int]()
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.startswith("Rss"):
            kib[name] = int(value.split()[0])
    return Resident(
        anonymous=kib.get("RssAnon", 0) * 1024, shared=kib.get("RssShmem", 0) * 1024, file=kib.get("RssFile", 0) * 1024
    )


def together(processes: Sequence[Resident]) -> Resident:
    """Memory of processes that share what the largest of them has of memory files."""
    return Resident(
        anonymous=sum(one.anonymous for one in processes),
        shared=max(one.shared for one in processes),
        file=sum(one.file for one in processes),
    )
