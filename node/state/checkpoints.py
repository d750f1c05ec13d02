"""Checkpoints: folders that hold everything of one certified round, each complete or not there.

    checkpoints/<rebases>.<rollbacks>-<round>/
        state.safetensors     the certified state: the saved one, linked, not written again
        chain                 the entries from genesis to the one that certified it, framed as in chain.log
        swarm.toml            the manifest
        layout.json           names and shapes of the parameters, and of the buffers that travel

A folder is made under another name, every file in it is synced, and then it gets its name. It is given back its other
name before it is removed. So a folder of that form is whole, whenever the machine stopped.

Every so many rounds one is put together, beside the rounds: the state is saved first if it is not yet
(state_saver.py). What one node alone knows is in none: a restart takes it from elsewhere (resumption.py).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import trio

from shoal.collectives.state import CertifiedState, StateHeader
from shoal.node.outcome import Notice, Progress
from shoal.node.state.state_files import write_state
from shoal.node.state.states import StateCache
from shoal.node.state.store import decode_entry, disk_errors, frame_record, read_records, write_atomically
from shoal.node.training.trainer_messages import Layout
from shoal.protocol.chain import Chain, Position
from shoal.protocol.errors import ConfigError, StorageError
from shoal.protocol.folders import make_folder, open_file, sync_folder
from shoal.protocol.manifest import Manifest, render_manifest
from shoal.protocol.messages import Entry, Term, Value
from shoal.protocol.wire import canonical

FOLDER = "checkpoints"
STATE, CHAIN, MANIFEST, LAYOUT = "state.safetensors", "chain", "swarm.toml", "layout.json"
PARTIAL = ".partial"
LAYOUT_LIMIT_BYTES = 64 << 20

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointParts:
    """Parts that checkpoints are made with. save: has a state saved, unless a newer one is; the state store's."""

    folder: Path
    manifest: Manifest
    chain: Chain
    save: Callable[[CertifiedState], Awaitable[None]]
    cache: StateCache
    on_progress: Callable[[Progress], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Due:
    state: CertifiedState
    height: int


class Checkpoints:
    """Makes them, one at a time; `run` is the daemon's. every: rounds from one to the next, 0 for none at all."""

    def __init__(self, parts: CheckpointParts, *, every: int, keep: int) -> None:
        self._p = parts
        self._every = every
        self._keep = keep
        self._folder = parts.folder / FOLDER
        self._layout: Layout | None = None
        self._due: _Due | None = None
        self._changed = trio.Event()

    def is_due(self, round: int) -> bool:
        """True if a checkpoint of this round is to be written."""
        return self._every > 0 and round > 0 and round % self._every == 0

    async def expect(self, layout: Layout) -> None:
        """The model is built: its parameters have these names and shapes. Raises StorageError."""
        self._layout = layout
        await trio.to_thread.run_sync(write_atomically, self._p.folder / LAYOUT, msgspec.json.encode(layout))
        if self._folder.is_dir():
            await trio.to_thread.run_sync(tidy, self._folder)

    def certified(self, state: CertifiedState) -> None:
        """The head of the chain stands on `state`; if one is due, make a checkpoint of it beside what follows."""
        if self.is_due(state.round) and self._layout is not None:
            self._due = _Due(state, self._p.chain.height)
            self._changed.set()

    async def run(self) -> None:
        """Make what is due, until cancelled; if another is due before one is made, the newer one only.

        A disk that does not take it is told to the user; what was there is untouched. Raises StorageError where not
        even states can be saved. Cancellation: a checkpoint is made whole or not at all.
        """
        while True:
            while self._due is None:
                await self._changed.wait()
                self._changed = trio.Event()
            await self._make_due(self._due)

    async def _make_due(self, due: _Due) -> None:
        """Make it, and hold on to its state no longer."""
        self._due = None
        if self._p.chain.standing.round < due.state.round:
            return  # the swarm went back to before it
        await self._p.save(due.state)
        try:
            await trio.to_thread.run_sync(self._make, due)
        except StorageError as error:
            logger.warning("no checkpoint of round %d: %s", due.state.round, error)
            self._p.on_progress(Notice(text=f"no checkpoint of round {due.state.round}: {error}"))

    def _make(self, due: _Due) -> None:
        assert self._layout is not None
        content = CheckpointContent(
            state=due.state,
            header=lambda: self._p.cache.header(due.state),
            saved=self._p.cache.state_file(due.state.round),
            entries=self._p.chain.after(0, due.height),
            manifest=self._p.manifest,
            layout=self._layout,
        )
        path = write_checkpoint(self._folder, content, keep=self._keep)
        logger.info("checkpoint %s", path)


# --- folders ---


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointContent:
    """Content of one checkpoint. entries: of the chain, up to the one that led to the state.

    saved: where the state was saved, if it is still there; header: called where it is not.
    """

    state: CertifiedState
    header: Callable[[], StateHeader]
    saved: Path
    entries: Sequence[Entry]
    manifest: Manifest
    layout: Layout

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
            make_folder(folder)
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
    return [path for _, path in _by_position(folder)]


def _by_position(folder: Path) -> list[tuple[Position, Path]]:
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(ValueError):  # something else
            term, round = path.name.split("-")
            rebases, rollbacks = term.split(".")
            found.append(((Term(int(rebases), int(rollbacks)), int(round)), path))
    return sorted(found, reverse=True)


def entries_beyond(data_dir: Path, head: Value) -> list[Entry]:
    """The entries, not yet checked, of the newest checkpoint in a data folder; none where `head` is no older.

    What of them does not hold is told and left out, with all that follows.
    """
    entries: list[Entry] = []
    for position, path in _by_position(data_dir / FOLDER)[:1]:
        if position > (head.term, head.round):
            try:
                for record in read_records(path / CHAIN)[0]:
                    entries.append(decode_entry(record))
            except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
                logger.warning("%s does not hold after %d entries: %s", path / CHAIN, len(entries), error)
    return entries


def read_layout(path: Path) -> Layout:
    """Names and shapes of the parameters. Raises ConfigError that names the file."""
    try:
        with open_file(path) as file:
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
