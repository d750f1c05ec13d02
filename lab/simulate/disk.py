"""The disk of a simulated peer, which survives its process: logs as nodes keep them, and beside them what is modelled.

Agreement and chain are in a `Store` of the product's, in a folder in memory: so a restart reads, checks and cuts what
a node would. Its own work lies beside them, in the files that nodes write and find. States and finals are objects that
are there or not.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from shoal.collectives.codecs import F32
from shoal.collectives.finals import Finals
from shoal.lab.simulate.judge import Violation
from shoal.node.state import store as store_module
from shoal.node.state.contributions import SavedWork, write_work
from shoal.node.state.resumption import Resumption
from shoal.node.state.store import Store
from shoal.protocol.chain import Chain
from shoal.protocol.durable import DurableRecord
from shoal.protocol.forks import Fork
from shoal.protocol.identity import PeerId
from shoal.protocol.inputs import Order
from shoal.protocol.manifest import Manifest
from shoal.protocol.messages import (
    Certificate,
    Entry,
    Leave,
    Message,
    Prepare,
    Propose,
    Ready,
    Rebase,
    Value,
    ViewChange,
    Vote,
)
from shoal.protocol.planning import CONTRIBUTOR

MEMORY = Path("/dev/shm")
AGREEMENT, CHAIN = "agreement.log", "chain.log"
FINALS_KEPT = 6
"""Plans whose finals a peer has for others; fewer than in a node, so that who comes back late needs a state."""
SAVED_STATES = 4


class Disks:
    """Those of one run, in a folder in memory where the system has such. `clear` takes them away."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="shoal-simulated-", dir=MEMORY if MEMORY.is_dir() else None))
        self._disks: list[Disk] = []
        self.clear = weakref.finalize(self, _clear, self._folder, self._disks)

    def add(self, first: Value, state: F32, authority: PeerId, manifest: Manifest | None = None) -> Disk:
        """A new one, whose node knows `first` and the state that it certifies."""
        folder = self._folder / str(len(self._disks))
        disk = Disk(
            genesis=first,
            state=state,
            known=set(),
            held=first.hash,
            folder=folder,
            authority=authority,
            manifest=manifest,
        )
        self._disks.append(disk)
        return disk


def _clear(folder: Path, disks: list[Disk]) -> None:
    for disk in disks:
        disk.close()
    shutil.rmtree(folder)


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Inside, what stores warn of is not shown: logs are torn on purpose."""
    logger = logging.getLogger(store_module.__name__)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@dataclass
class Disk:
    """Data that survive a crash. held: the hash of the value whose state `state` is. blank: it has none but the first.

    forks: seen by it. orders: of the user. saved: the newest states, and kept: those to go back to, by the hash of
    their value.

    tears: the process dies with its next write to a log, of whose batch this share of the bytes is there.
    """

    genesis: Value
    state: F32
    known: set[int]
    held: bytes
    folder: Path
    authority: PeerId
    manifest: Manifest | None = None
    blank: bool = False
    finals: dict[bytes, Finals] = field(default_factory=dict)
    forks: list[Fork] = field(default_factory=list)
    orders: dict[type[Order], Order] = field(default_factory=dict)
    saved: dict[bytes, F32] = field(default_factory=dict)
    kept: dict[bytes, F32] = field(default_factory=dict)
    incarnation: int = 0
    tears: float | None = None
    store: Store | None = None

    def __post_init__(self) -> None:
        self.held_value = self.genesis
        self.ledger = Chain(self.genesis, self.authority, manifest=self.manifest)

    # -- the logs ----------------------------------------------------------------------------------------------

    def open(self) -> None:
        """A process starts on it: read the logs."""
        self.store = Store(self.folder)
        self.ledger = Chain(self.genesis, self.authority, manifest=self.manifest)
        for entry in self.store.certificates():
            self.ledger.extend(entry, trusted=True)

    def close(self) -> None:
        """The process is gone."""
        if self.store is not None:
            self.store.__exit__()
        self.store = None

    @property
    def logs(self) -> Store:
        """As the process that runs has them."""
        assert self.store is not None
        return self.store

    def append(self, entry: Entry) -> bool:
        """Extend the chain; what was bound before binds no more. False for a rebase that is known.

        Raises RemoteError where it does not follow.
        """
        if not self.ledger.extend(entry):
            return False
        self.logs.append_certificate(entry)
        self.logs.decided(entry.value)
        return True

    def replace(self, theirs: Chain, height: int) -> None:
        """Go on with another chain, which has the first `height` entries in common with the one here."""
        self.logs.replace_chain(theirs.entries)
        self.ledger.replace(theirs)
        for entry in theirs.entries[height:]:
            self.logs.decided(entry.value)

    def tear(self, entry: Entry | tuple[DurableRecord, ...]) -> None:
        """Write an entry of the chain, or records, of which only a part gets to the disk; who wrote is gone."""
        assert self.tears is not None
        path = self.folder / (AGREEMENT if isinstance(entry, tuple) else CHAIN)
        before = path.stat().st_size
        if isinstance(entry, tuple):
            self.logs.persist(*entry)
        else:
            self.logs.append_certificate(entry)
        os.truncate(path, before + round(self.tears * (path.stat().st_size - before)))

    # -- its own work ------------------------------------------------------------------------------------------

    @property
    def work(self) -> Resumption:
        """The files of what this peer made, and what finds them again."""

        async def send(command: object) -> None:
            """There is no trainer."""

        return Resumption(self.folder, send=send, on_progress=lambda progress: None)

    def save_work(self, work: SavedWork) -> None:
        """Have a contribution on disk, as long as the peer's process is there."""
        kept, position = self.work, (work.account.term, work.account.round)
        kept.make_folder()
        write_work(kept.files(position).work, work)
        kept.files(position).trainer.touch()
        for old in kept.on_disk()[2:]:  # the newest may not get to the disk after all (`forget_work`)
            old.work.unlink()

    def keep_finals(self, finals: Finals) -> None:
        """Have finals for others, FINALS_KEPT at most."""
        self.finals[finals.plan.hash] = finals
        while len(self.finals) > FINALS_KEPT:
            del self.finals[next(iter(self.finals))]

    def forget_work(self) -> None:
        """Remove the newest contribution, which did not get to the disk."""
        for files in self.work.on_disk()[:1]:
            files.work.unlink()

    # -- the chain, and states ---------------------------------------------------------------------------------

    @property
    def height(self) -> int:
        """Number of entries of the chain that are here."""
        return self.ledger.height

    @property
    def chain(self) -> list[Value]:
        """The values that led to the state at the head, from genesis on."""
        return [self.ledger.value(round) for round in range(self.ledger.standing.round + 1)]

    @property
    def newest(self) -> Certificate | None:
        """The certificate that ended the last round; None if none has ended, or by a rebase."""
        entry = next(iter(self.ledger.after(self.height - 1, 1)), None)
        return entry if isinstance(entry, Certificate) else None

    def entries_after(self, height: int, rebases: int) -> tuple[Entry, ...]:
        """Those after the first `height`, for who knows so many rebases."""
        return self.ledger.after(height, self.height, rebases)

    def take(self, value: Value, state: F32) -> None:
        """Hold the state that `value` certifies."""
        self.state, self.held, self.held_value, self.blank = state, value.hash, value, False
        self.saved[value.hash] = state
        while len(self.saved) > SAVED_STATES:
            del self.saved[next(iter(self.saved))]

    def earlier(self, round: int) -> F32 | None:
        """The state of a round of the chain, if it is here."""
        hash = self.ledger.value(round).hash
        return self.saved.get(hash, self.kept.get(hash))

    def earlier_rounds(self) -> list[int]:
        """The rounds before the newest whose state is here."""
        return [round for round in range(self.ledger.standing.round) if self.earlier(round) is not None]

    def forget_earlier(self, besides: Collection[int]) -> None:
        """Nobody goes back any more to what was kept, but to the states of some rounds."""
        there = {self.ledger.value(round).hash for round in besides}
        self.kept = {hash: state for hash, state in self.kept.items() if hash in there}


def check_written(who: PeerId, disk: Disk, message: Message) -> None:
    """Raises Violation if a peer says what binds it, or what is decided, before that is in its logs."""
    if isinstance(message, Certificate | Rebase):
        if message.value not in disk.ledger:
            raise Violation("written first", f"the certificate of round {message.value.round}, said by {who}")
        return
    if not isinstance(message, _BINDING) or (isinstance(message, Ready) and message.role != CONTRIBUTOR):
        return
    kind = _RECORDS[type(message)]
    written = [one for one in disk.logs.durable_records() if (one.term, one.round) == (message.term, message.round)]
    if not any(one.kind == kind and _says(one, message) for one in written):
        raise Violation("written first", f"a {kind} of round {message.round}, said by {who}")


def _says(record: DurableRecord, message: Message) -> bool:
    """True if a record, of the kind that `message` takes, is of what the message says."""
    if isinstance(message, ViewChange):
        return record.view >= message.view
    if isinstance(message, Vote | Prepare):
        return record.value is not None and (record.view, record.value.hash) == (message.view, message.value)
    if isinstance(message, Propose):
        return record.value is not None and (record.view, record.value.hash) == (message.view, message.value.hash)
    return True


_BINDING = Leave | Prepare | Propose | Ready | ViewChange | Vote
_RECORDS: dict[type, str] = {
    Leave: "leave",
    Prepare: "prepare",
    Propose: "propose",
    Ready: "ready",
    ViewChange: "promise",
    Vote: "vote",
}
"""Kind of record in the log for each message that binds its sender."""
