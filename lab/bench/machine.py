"""The machine and the software that a benchmark ran on, as its page says it."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import psutil  # type: ignore[import-untyped]

if TYPE_CHECKING:
    import torch

FLAGS: Final = ("aes", "vaes", "avx2", "avx512f", "sha_ni")
"""Those that the speed of ciphers and hashes depends on."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Machine that the numbers belong to. flags: those of `FLAGS` the processor has. load: over the minute before."""

    cpu: str
    cores: int
    memory_gib: float
    kernel: str
    python: str
    torch: str
    flags: tuple[str, ...]
    load: float
    date: str


def this_machine() -> Machine:
    """The machine this runs on, now (the date is that of UTC)."""
    cpu = _cpu_facts()
    return Machine(
        cpu=cpu.get("model name", platform.processor() or platform.machine()),
        cores=os.cpu_count() or 1,
        memory_gib=round(psutil.virtual_memory().total / (1 << 30), 1),
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=importlib.metadata.version("torch"),
        flags=tuple(flag for flag in FLAGS if flag in cpu.get("flags", "").split()),
        load=round(os.getloadavg()[0], 2),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Torch in so many threads; a testnet's trainers have one. Another number sums in another order."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def device_name(device: torch.device) -> str:
    """The device as its maker calls it."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def one_thread() -> AbstractContextManager[None]:
    """Torch in one thread."""
    return torch_threads(1)


def _cpu_facts() -> dict[str, str]:
    """Facts about the first processor; none where the system has no such file."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().partition("\n\n")[0].splitlines() if path.exists() else []
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
