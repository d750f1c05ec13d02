"""Checkpoints: folders that hold everything of one certified round, each complete or not there.

    checkpoints/<rebases>.<rollbacks>-<round>/
        state.safetensors     the certified state: the saved one, linked, not written again
        chain                 the entries from genesis to the one that certified it, framed as in chain.log
        swarm.toml            the manifest
        layout.json           names and shapes of the parameters
        trainer.safetensors   what this node's trainer knew beside the state, if it was written
        work.safetensors      this node's contribution to the round, if it was written

A folder is made under another name, every file in it is synced, and then it gets its name. It is given back its other
name before it is removed. So a folder of that form is whole, whenever the machine stopped.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shoal.collectives.state import CertifiedState, StateHeader
from shoal.node.state.resumption import ResumeFiles
from shoal.node.state.state_files import write_state
from shoal.node.state.store import disk_errors, frame_record, sync_folder, write_atomically
from shoal.node.training.trainer_messages import Layout
from shoal.protocol.errors import ConfigError, StorageError
from shoal.protocol.manifest import Manifest, render_manifest
from shoal.protocol.messages import Entry
from shoal.protocol.wire import canonical

STATE, CHAIN, MANIFEST, LAYOUT = "state.safetensors", "chain", "swarm.toml", "layout.json"
TRAINER, WORK = "trainer.safetensors", "work.safetensors"
PARTIAL = ".partial"
LAYOUT_LIMIT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointContent:
    """What goes into a checkpoint. entries: of the chain, up to the one that led to the state.

    saved: where the state was saved, if it is still there; header: called where it is not.
    """

    state: CertifiedState
    header: Callable[[], StateHeader]
    saved: Path
    entries: Sequence[Entry]
    manifest: Manifest
    layout: Layout
    resume: ResumeFiles | None

    @property
    def name(self) -> str:
        """The folder's."""
        return f"{self.state.term}-{self.state.round}"


def write_checkpoint(folder: Path, content: CheckpointContent, *, keep: int) -> Path:
    """Make the checkpoint in `folder`, then remove all but the newest `keep`. Returns where it is. Blocks.

    Raises StorageError, with nothing that was there before touched.
    """
    target = folder / content.name
    partial = folder / (content.name + PARTIAL)
    try:
        with disk_errors(target):
            folder.mkdir(exist_ok=True)
            _remove(partial)
            if not target.exists():
                partial.mkdir()
                _fill(partial, content)
                sync_folder(partial)
                partial.rename(target)
                sync_folder(folder)
    except StorageError:
        with contextlib.suppress(OSError):
            _remove(partial)
        raise
    with disk_errors(folder):
        for old in checkpoints_in(folder)[keep:]:
            gone = old.with_name(old.name + PARTIAL)
            old.rename(gone)
            _remove(gone)
    return target


def _fill(partial: Path, content: CheckpointContent) -> None:
    try:
        _link_or_copy(content.saved, partial / STATE)
    except FileNotFoundError:  # two newer ones were saved since
        write_state(partial / STATE, content.state, content.header())
    if content.resume is not None:
        for source, name in ((content.resume.trainer, TRAINER), (content.resume.work, WORK)):
            with contextlib.suppress(FileNotFoundError):  # it was of a round long ago, and is gone by now
                _link_or_copy(source, partial / name)
    write_atomically(partial / CHAIN, *(frame_record(canonical(entry)) for entry in content.entries))
    write_atomically(partial / MANIFEST, render_manifest(content.manifest).encode())
    write_atomically(partial / LAYOUT, msgspec.json.encode(content.layout))


def _link_or_copy(source: Path, target: Path) -> None:
    """The same bytes under another name; copied and synced where the file system has no links."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV, errno.EMLINK, errno.ENOSYS):
            raise
        with source.open("rb") as original, target.open("wb") as copy:
            shutil.copyfileobj(original, copy, 1 << 20)
            copy.flush()
            os.fsync(copy.fileno())


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def tidy(folder: Path) -> None:
    """Remove what a crash left unfinished. Raises StorageError."""
    with disk_errors(folder):
        for partial in folder.glob("*" + PARTIAL):
            shutil.rmtree(partial)


def checkpoints_in(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, newest first."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(ValueError):  # something else
            term, round = path.name.split("-")
            rebases, rollbacks = term.split(".")
            found.append(((int(rebases), int(rollbacks), int(round)), path))
    return [path for _, path in sorted(found, reverse=True)]


def read_layout(path: Path) -> Layout:
    """Names and shapes of the parameters. Raises ConfigError that names the file."""
    try:
        with path.open("rb") as file:
            data = file.read(LAYOUT_LIMIT_BYTES + 1)
        if len(data) > LAYOUT_LIMIT_BYTES:
            raise ConfigError(f"{path} is longer than {LAYOUT_LIMIT_BYTES} bytes; use another checkpoint")
        return msgspec.json.decode(data, type=Layout)
    except FileNotFoundError:
        raise ConfigError(f"there is no {path}; give a checkpoint with all its files") from None
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}; check its mode and the disk") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is damaged ({error}); use another checkpoint") from None
