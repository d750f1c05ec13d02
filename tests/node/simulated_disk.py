"""Disks that lose power: real files in a real folder, beside a record of what of them would survive.

Every operation that changes a disk is counted. At the n-th the power goes (`PowerCut`), or the disk answers with an
error. What survives a power cut is what was synced: the content that a file had at its last fsync, and the names that a
folder held at its own last fsync, whatever stands in the folder that the node sees. A kill of the process alone leaves
all that was written; after a cut that was not so strict, some of what was never synced is there by chance.

Nothing is written through to the real disk: fsync of a real disk costs, and proves nothing here.
"""

from __future__ import annotations

import errno
import io
import os
import random
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import pytest

from shoal.collectives import contribution, finals, outer, state
from shoal.node.state import finals_file

_WRITING = frozenset("wax+")


class PowerCut(BaseException):
    """The machine of a node lost its power: nothing that it runs goes on, and nothing may catch this."""


class Fault(StrEnum):
    """What happens at an operation."""

    CUT = "cut"
    FULL = "full"
    BROKEN = "broken"


class Survival(StrEnum):
    """What a disk holds after the node that wrote to it ended."""

    SYNCED = "synced"
    SOME = "some"
    ALL = "all"


@dataclass(eq=False, slots=True)
class File:
    """What of one file is on the platter; None before its first fsync. name: the one that it had last."""

    name: str
    synced: bytes | None = None


@dataclass(eq=False, slots=True)
class Folder:
    """The names that a folder held at its last fsync."""

    name: str
    synced: dict[str, File | Folder] = field(default_factory=dict)


class Disk:
    """The disk of one life of a node, whose files lie under `root`. `writes` and `syncs` count what was done to it."""

    def __init__(self, root: Path, rng: random.Random) -> None:
        self.root = root
        self.rng = rng
        self.dead = False
        self.operations = self.writes = self.syncs = 0
        self.faults: dict[int, Fault] = {}
        """By number of the operation."""
        self.watch: Callable[[str, str], Fault | None] = lambda what, name: None
        """Called with every operation and the name of its file or folder; what it returns happens."""
        self.failed: list[Fault] = []
        self.version = 0
        """Goes up whenever something more is safe."""
        self._nodes: dict[int, File | Folder] = {}
        root.mkdir(parents=True, exist_ok=True)
        self._adopt(root)
        self.top = self._nodes[root.stat().st_ino]

    def _adopt(self, path: Path) -> File | Folder:
        """All that lies here already survived what was before."""
        inode = path.stat().st_ino
        if path.is_dir():
            folder = self._nodes[inode] = Folder(
                path.name, {child.name: self._adopt(child) for child in path.iterdir()}
            )
            return folder
        file = self._nodes[inode] = File(path.name, path.read_bytes())
        return file

    def revive(self) -> None:
        """Only the process ended: all that it wrote is there, and nothing fails until it is told to."""
        self.dead = False
        self.faults.clear()
        self.failed.clear()
        self.watch = lambda what, name: None

    # -- operations --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises PowerCut once the power is gone."""
        if self.dead:
            raise PowerCut

    def count(self, what: str, name: str) -> None:
        """One more operation begins. Raises PowerCut or OSError if it is the one to fail."""
        self.check()
        self.operations += 1
        fault = self.faults.pop(self.operations, None) or self.watch(what, name)
        if fault is None:
            return
        self.failed.append(fault)
        if fault is Fault.CUT:
            self.dead = True
            raise PowerCut
        number = errno.ENOSPC if fault is Fault.FULL else errno.EIO
        raise OSError(number, os.strerror(number))

    def made(self, path: Path, node: File | Folder) -> None:
        """Something new lies at `path`."""
        self._nodes[os.stat(path).st_ino] = node

    def node(self, inode: int) -> File | Folder | None:
        """What is known of an inode."""
        return self._nodes.get(inode)

    def name_of(self, inode: int) -> str:
        """The name that an inode had last."""
        node = self._nodes.get(inode)
        return "" if node is None else node.name

    def renamed(self, path: Path) -> None:
        """Something that was here lies at `path` now."""
        node = self._nodes.get(os.stat(path).st_ino)
        if node is not None:
            node.name = os.path.basename(path)

    def gone(self, inode: int) -> None:
        """Nothing leads to an inode any more in the folder that the node sees: the system may use it again."""
        self._nodes.pop(inode, None)

    def sync(self, file: int) -> None:
        """fsync of an open file or folder of this disk."""
        node = self._nodes[os.fstat(file).st_ino]
        self.count("sync", node.name)
        self.syncs += 1
        if isinstance(node, Folder):
            node.synced = dict(self._names(file))
        else:
            node.synced = os.pread(file, os.fstat(file).st_size, 0)
        self.version += 1

    def _names(self, folder: int) -> Iterator[tuple[str, File | Folder]]:
        with os.scandir(folder) as entries:
            for entry in entries:
                node = self._nodes.get(entry.inode())
                if node is not None:
                    yield entry.name, node

    # -- what survives -----------------------------------------------------------------------------------------

    def safe(self, *names: str) -> bytes | None:
        """The content that a file is sure to have after a power cut; None if it may not be there."""
        node: File | Folder | None = self.top
        for name in names:
            node = node.synced.get(name) if isinstance(node, Folder) else None
        return (node.synced or b"") if isinstance(node, File) else None

    def copy_survivors(self, target: Path, survival: Survival) -> None:
        """Write what survives into the folder `target`, which is made."""
        assert isinstance(self.top, Folder)
        self._copy(self.top, self.root, target, survival)

    def _copy(self, folder: Folder, here: Path | None, target: Path, survival: Survival) -> None:
        target.mkdir(parents=True, exist_ok=True)
        for name, node, path in self._surviving(folder, here, survival):
            if isinstance(node, Folder):
                self._copy(node, path, target / name, survival)
            else:
                (target / name).write_bytes(self._content(node, path, survival))

    def _surviving(
        self, folder: Folder, here: Path | None, survival: Survival
    ) -> Iterator[tuple[str, File | Folder, Path | None]]:
        """Names, what they lead to, and where that lies if it is there still."""
        present = {} if here is None else {path.name: path for path in sorted(here.iterdir())}
        seen = {name: node for name, path in present.items() if (node := self._nodes.get(path.stat().st_ino))}
        for name in sorted(folder.synced.keys() | seen.keys()):
            new = survival is Survival.ALL or (survival is Survival.SOME and self.rng.random() < 0.5)
            node = (seen if new else folder.synced).get(name)
            if node is not None:
                yield name, node, present[name] if seen.get(name) is node else None

    def _content(self, file: File, path: Path | None, survival: Survival) -> bytes:
        synced = file.synced or b""
        if path is None or survival is Survival.SYNCED:
            return synced
        written = path.read_bytes()
        if survival is Survival.ALL:
            return written
        if written.startswith(synced):  # appended to: the system may have written any part of that
            return written[: self.rng.randint(len(synced), len(written))]
        return self.rng.choice((synced, written))


class _DiskFile(io.FileIO):
    """A file open for writing on a simulated disk; it can be read too, to see what a sync makes safe."""

    def __init__(self, disk: Disk, path: Path, mode: str) -> None:
        self._disk = disk
        self._name = path.name
        super().__init__(path, mode if "+" in mode else mode + "+")

    def write(self, data: Any) -> int:
        disk, view = self._disk, memoryview(data).cast("B")
        disk.writes += 1
        try:
            disk.count("write", self._name)
        except (OSError, PowerCut):
            super().write(view[: disk.rng.randrange(len(view) + 1)])  # it fails somewhere
            raise
        return super().write(view)

    def truncate(self, size: int | None = None) -> int:
        self._disk.count("truncate", self._name)
        return super().truncate(size)


class InlineExecutor:
    """An executor that does what it is given at once, in the caller's thread: one seed is one course of events."""

    def __init__(self, max_workers: int | None = None) -> None:
        pass

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*arguments))
        except BaseException as error:
            done.set_exception(error)
        return done

    def map(self, work: Callable[..., Any], *arguments: Iterable[Any]) -> Iterator[Any]:
        return iter([work(*each) for each in zip(*arguments, strict=False)])

    def shutdown(self, *, wait: bool = True) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


class Disks:
    """Stands between the product and the operating system, for all folders that are disks; others go past it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._disks: dict[str, Disk] = {}
        self._real: dict[str, Callable[..., Any]] = {}
        for module in (finals_file, contribution, finals, outer, state):
            monkeypatch.setattr(module, "ThreadPoolExecutor", InlineExecutor)
        monkeypatch.delattr(os, "O_DIRECT", raising=False)  # what goes past the cache cannot be looked at
        calls: tuple[tuple[ModuleType, str], ...] = (
            (io, "open"),
            (os, "open"),
            (os, "fsync"),
            (os, "writev"),
            (os, "pwrite"),
            (os, "ftruncate"),
            (os, "replace"),
            (os, "rename"),
            (os, "unlink"),
            (os, "rmdir"),
            (os, "mkdir"),
            (os, "link"),
        )
        for module, name in calls:
            key = f"{module.__name__}_{name}"
            self._real[key] = getattr(module, name)
            monkeypatch.setattr(module, name, getattr(self, f"_{key}"))

    def add(self, root: Path, rng: random.Random) -> Disk:
        """A disk whose files lie under `root`, which is made."""
        disk = self._disks[str(root)] = Disk(root, rng)
        return disk

    def remove(self, disk: Disk) -> None:
        """Nobody writes to it any more."""
        del self._disks[str(disk.root)]

    def _of(self, path: Any) -> Disk | None:
        if isinstance(path, int):
            return None
        text = os.fsdecode(path)
        for root, disk in self._disks.items():
            if text.startswith(root) and text[len(root) : len(root) + 1] in ("", "/"):
                return disk
        return None

    def _of_file(self, file: int) -> Disk | None:
        inode = os.fstat(file).st_ino
        return next((disk for disk in self._disks.values() if disk.node(inode) is not None), None)

    # -- as the system has them --------------------------------------------------------------------------------

    def _io_open(self, path: Any, mode: str = "r", buffering: int = -1, *rest: Any, **options: Any) -> Any:
        disk = self._of(path)
        if disk is None:
            return self._real["io_open"](path, mode, buffering, *rest, **options)
        disk.check()
        if not _WRITING.intersection(mode):
            return self._real["io_open"](path, mode, buffering, *rest, **options)
        new = not os.path.exists(path)
        if new:
            disk.count("make", os.path.basename(path))
        if buffering == 0:
            opened: Any = _DiskFile(disk, path, mode.replace("b", ""))
        else:
            opened = self._real["io_open"](path, mode, buffering, *rest, **options)
        if new:
            disk.made(path, File(os.path.basename(path)))
        return opened

    def _os_open(self, path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
        disk = self._of(path)
        if disk is None:
            return int(self._real["os_open"](path, flags, mode, **options))
        disk.check()
        new = bool(flags & os.O_CREAT) and not os.path.exists(path)
        if new:
            disk.count("make", os.path.basename(path))
        opened = int(self._real["os_open"](path, flags, mode, **options))
        if new:
            disk.made(path, File(os.path.basename(path)))
        return opened

    def _os_fsync(self, file: int) -> None:
        disk = self._of_file(file)
        if disk is not None:
            disk.sync(file)

    def _written(self, name: str, file: int, *rest: Any) -> Any:
        disk = self._of_file(file)
        if disk is not None:
            disk.writes += 1
            disk.count("write", disk.name_of(os.fstat(file).st_ino))
        return self._real[name](file, *rest)

    def _os_writev(self, file: int, parts: Any) -> Any:
        return self._written("os_writev", file, parts)

    def _os_pwrite(self, file: int, data: Any, offset: int) -> Any:
        return self._written("os_pwrite", file, data, offset)

    def _os_ftruncate(self, file: int, size: int) -> Any:
        return self._written("os_ftruncate", file, size)

    def _moved(self, name: str, path: Any, to: Any, **options: Any) -> None:
        disk = self._of(path)
        if disk is None:
            self._real[name](path, to, **options)
            return
        disk.count("rename", os.path.basename(to))
        replaced = os.stat(to).st_ino if os.path.lexists(to) else None
        self._real[name](path, to, **options)
        disk.renamed(to)
        if replaced is not None:
            disk.gone(replaced)

    def _os_replace(self, path: Any, to: Any, **options: Any) -> None:
        self._moved("os_replace", path, to, **options)

    def _os_rename(self, path: Any, to: Any, **options: Any) -> None:
        self._moved("os_rename", path, to, **options)

    def _os_link(self, path: Any, to: Any, **options: Any) -> None:
        disk = self._of(to)
        if disk is not None:
            disk.count("link", os.path.basename(to))
        self._real["os_link"](path, to, **options)
        if disk is not None and disk.node(os.stat(to).st_ino) is None:  # a nameless file that has a name now
            disk.made(to, File(os.path.basename(to)))

    def _removed(self, name: str, path: Any, dir_fd: int | None) -> None:
        found = os.lstat(path, dir_fd=dir_fd)
        disk = next((one for one in self._disks.values() if one.node(found.st_ino) is not None), None)
        if disk is not None:
            disk.count("remove", os.path.basename(path))
        self._real[name](path, dir_fd=dir_fd)
        if disk is not None and (name == "os_rmdir" or found.st_nlink == 1):
            disk.gone(found.st_ino)

    def _os_unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._removed("os_unlink", path, dir_fd)

    def _os_rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._removed("os_rmdir", path, dir_fd)

    def _os_mkdir(self, path: Any, mode: int = 0o777, **options: Any) -> None:
        disk = self._of(path)
        if disk is None or os.path.exists(path):
            self._real["os_mkdir"](path, mode, **options)
            return
        disk.count("make", os.path.basename(path))
        self._real["os_mkdir"](path, mode, **options)
        disk.made(path, Folder(os.path.basename(path)))
