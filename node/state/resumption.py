"""Resuming: what of a node's own work is on disk, so that after a restart it goes on as if there had been none.

    resume/<rebases>.<rollbacks>-<round>.trainer    what the trainer knows beside the state (inner_state.py)
    resume/<rebases>.<rollbacks>-<round>.work       the contribution to that round, and with it the residual

Both are written when a contribution has been made: the trainer has nothing to do then but to wait for the next anchor,
so the copy costs it nothing, and writing goes on beside the reduction. The engine waits for them, not for long, before
it puts down the certificate of their round. So whenever the chain on disk ends with a round, the work that led to it
is there:

    the files are of the round at the head      settle the contribution by its finals, train on from S(head)
    of the round that follows                   announce the very same contribution again
    older                                       the moments of the optimizer still help; the rest is out of date

Those of one round stay until those of a later one are whole: they are of the round at the head, or of the one that
follows, and so is whatever comes after them.

A write that takes long is followed by a rest, so that the disk is busy for a tenth of the time at most; rounds in
between have no files of their own.

    resume/midway    what the trainer knows amid a round, and what it has learnt since its anchor

That is written while the trainer makes its steps, as often as costs it `1 / COPY_REST` of its time, and the disk
`1 / WRITE_REST`. It is there only as long as no contribution holds what it has learnt: the trainer puts it into its
place before it contributes or not at all, and it is removed before the contribution is said to anybody. So it counts
once, and a node that was away for some rounds takes it along to the head, as one does that was late for them.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import trio

from shoal.node.outcome import Notice, Progress
from shoal.node.state.contributions import SavedWork, WorkAccount, read_account, read_work, write_work
from shoal.node.state.store import disk_errors
from shoal.node.state.tensor_files import DamagedFile, TensorFile
from shoal.node.training import trainer_messages
from shoal.node.training.trainer import Restarted, TrainerEvent, TrainerFailed
from shoal.node.training.trainer_messages import (
    SNAPSHOT_BASE,
    Command,
    Restore,
    Restored,
    Snapshot,
    Snapshotted,
)
from shoal.protocol.chain import Chain
from shoal.protocol.errors import StorageError
from shoal.protocol.folders import make_folder, sync_folder
from shoal.protocol.messages import Term, Value

REST = 9
"""Times as long as it took to write is rested."""
CHEAP_S = 0.25
"""After a write that took no longer there is no rest."""
WAIT_MIN_S = 1.0
WAIT_SHARE = 0.1
"""So long, and this share of a round's time, does a certificate wait for the files of its round."""
SNAPSHOT_DEADLINE_S = 900.0
COPY_REST = 200
"""Times as long as the trainer stopped for a snapshot amid a round are rested after it, before the next."""
WRITE_REST = 20
"""Times as long as it took to write are rested likewise: each is as large as the files of a round."""
MIDWAY = "midway"
"""The file's name, and the beginning of those that it has before it is in its place."""

LOST = "a restart would lose this node's own work since the last round written"

logger = logging.getLogger(__name__)

Position = tuple[Term, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeFiles:
    """The two files of one round."""

    position: Position
    trainer: Path
    work: Path


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Found:
    """Files that a restart can take up. work: the contribution, if it can still be settled; exact: nothing is lost.

    files: those of the newest round, None for none; midway: what is taken in place of the trainer's, being newer.
    """

    files: ResumeFiles | None
    exact: bool
    work: SavedWork | None
    midway: Restore | None = None

    @property
    def position(self) -> Position | None:
        """The round that the files are of."""
        return None if self.files is None else self.files.position


class Resumption:
    """Writes the files of a round, finds them again, and tells the trainer. `run` is the daemon's.

    always: rounds whose files are written even if it is time to rest.
    """

    def __init__(
        self,
        folder: Path,
        *,
        send: Callable[[Command], Awaitable[None]],
        on_progress: Callable[[Progress], None],
        always: Callable[[int], bool] = lambda round: False,
    ) -> None:
        self._folder = folder / "resume"
        self._send = send
        self._on_progress = on_progress
        self._always = always
        self._orders, self._received = trio.open_memory_channel[SavedWork](1)
        self._pending: Position | None = None
        self._done = trio.Event()
        self._done.set()
        self._trainer_done = trio.Event()
        self._trainer_failure: str | None = None
        self._rest_ends = float("-inf")
        self._made_at = float("-inf")
        self._round_s = 0.0
        self._complained = False
        self._stands_on: Value | None = None
        self._midway_written = True  # none is under way
        self._midway_rest_ends = float("-inf")
        self._midway_wanted = trio.Event()
        self._has_folder = False

    # -- writing ---------------------------------------------------------------------------------------------

    async def made(self, work: SavedWork, *, alone: bool = False) -> None:
        """A contribution was made: have it and the trainer's state written, unless the disk is busy or rests.

        alone: there is nobody else who would know what comes after it, so there is no rest.
        Returns when the trainer has the order; nothing that is ordered of it later is in the snapshot. What was written
        amid the round is gone then: it is in the contribution. Raises StorageError if it cannot be removed.
        """
        now = trio.current_time()
        self._round_s, self._made_at = (now - self._made_at if self._made_at > 0 else 0.0), now
        position = (work.account.term, work.account.round)
        await self.forget_midway()
        due = alone or now >= self._rest_ends
        skipped = not due and not self._always(work.account.round)
        if self._pending is not None or skipped:
            return
        try:
            await trio.to_thread.run_sync(self.make_folder)
        except StorageError as error:
            self._warn(f"{LOST}: {error}")
            return
        self._pending, self._done = position, trio.Event()
        self._trainer_done, self._trainer_failure = trio.Event(), None
        self._orders.send_nowait(work)
        await self._send(Snapshot(round=work.account.round, path=str(self.files(position).trainer)))

    async def forget_midway(self) -> None:
        """Remove what was written amid the round: it is in a contribution. Raises StorageError if it cannot be."""
        if (self._folder / MIDWAY).exists():
            await trio.to_thread.run_sync(self._forget_midway)

    @property
    def writing(self) -> bool:
        """True if files are being written."""
        return self._pending is not None

    async def written(self, term: Term, round: int) -> None:
        """Return when the files of this round are on disk, at once if there will be none, and after a while anyhow."""
        if self._pending == (term, round):
            with trio.move_on_after(max(WAIT_MIN_S, WAIT_SHARE * self._round_s)) as scope:
                await self._done.wait()
            if scope.cancelled_caught:
                logger.info("round %d: certified before this node's work was on disk", round)

    def heard(self, event: TrainerEvent) -> None:
        """Take note of what the trainer said."""
        if isinstance(event, trainer_messages.Progress):
            self._have_midway_written()
        elif isinstance(event, Snapshotted) and event.midway:
            self._midway_written, self._has_folder = True, not event.failure
            rest_s = max(COPY_REST * event.copy_s, WRITE_REST * event.write_s)
            self._midway_rest_ends = trio.current_time() + rest_s
            logger.debug("amid a round: %s", event)
        elif isinstance(event, Snapshotted):
            if self._pending is not None and event.path == str(self.files(self._pending).trainer):
                self._trainer_failure = event.failure
                self._trainer_done.set()
        elif isinstance(event, Restored):
            if event.refused:
                self._warn(f"the trainer begins without what it knew before: {event.refused}")
            elif event.exact:
                logger.info("the trainer goes on from its snapshot of round %d", event.round)
            else:
                logger.info("the trainer took over the optimizer's moments of round %d, and nothing else", event.round)
        elif isinstance(event, Restarted | TrainerFailed):  # it took the snapshot under way along
            self._trainer_failure = "the trainer died"
            self._trainer_done.set()
            self._midway_written = True

    def stands_on(self, value: Value | None) -> None:
        """The trainer was given the anchor that `value` led to; None: it is about to be given another."""
        self._stands_on = value

    def _have_midway_written(self) -> None:
        """Order a snapshot amid the round, if it is time for one."""
        rests = trio.current_time() < self._midway_rest_ends
        if self._stands_on is not None and self._pending is None and self._midway_written and not rests:
            self._midway_written = False
            self._midway_wanted.set()

    async def run(self) -> None:
        """Have written what is ordered, until cancelled.

        A disk that does not take it is told to the user, and tried again.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._order_midway)
            await self._write_rounds()

    async def _order_midway(self) -> None:
        while True:
            await self._midway_wanted.wait()
            self._midway_wanted = trio.Event()
            if not self._has_folder:
                with suppress(StorageError):  # whose like the round's own files tell the user
                    await trio.to_thread.run_sync(self.make_folder)
            value = self._stands_on
            if value is None:
                self._midway_written = True
            else:
                path = str(self._folder / MIDWAY)
                await self._send(Snapshot(round=value.state_round, path=path, base=value.hash))

    async def _write_rounds(self) -> None:
        async for work in self._received:
            began = trio.current_time()
            try:
                await self._write(work)
                self._complained = False
            except StorageError as error:
                self._warn(f"{LOST}: {error}")
            finally:
                took = trio.current_time() - began
                self._rest_ends = began + took + (REST * took if took > CHEAP_S else 0.0)
                self._pending = None
                self._done.set()

    async def _write(self, work: SavedWork) -> None:
        files = self.files((work.account.term, work.account.round))
        await trio.to_thread.run_sync(write_work, files.work, work)
        with trio.move_on_after(SNAPSHOT_DEADLINE_S) as scope:
            await self._trainer_done.wait()
        failure = "the trainer did not answer" if scope.cancelled_caught else self._trainer_failure
        if failure:
            with suppress(OSError):
                files.work.unlink(missing_ok=True)
            raise StorageError(failure)
        await trio.to_thread.run_sync(self.forget_old, files.position)
        await trio.to_thread.run_sync(work.prepare)

    def _warn(self, text: str) -> None:
        logger.warning("%s", text)
        if not self._complained:
            self._complained = True
            self._on_progress(Notice(text=text))

    # -- files -----------------------------------------------------------------------------------------------

    def files(self, position: Position) -> ResumeFiles:
        """Files of a round, whether they are there or not."""
        stem = f"{position[0].rebases}.{position[0].rollbacks}-{position[1]}"
        return ResumeFiles(
            position=position, trainer=self._folder / f"{stem}.trainer", work=self._folder / f"{stem}.work"
        )

    def make_folder(self) -> None:
        """Have a folder for them. Raises StorageError."""
        with disk_errors(self._folder.parent):
            make_folder(self._folder)

    def on_disk(self) -> list[ResumeFiles]:
        """Files of the rounds of which both are there, newest first."""
        found = [_position_of(path) for path in self._folder.glob("*.work")] if self._folder.is_dir() else []
        files = [self.files(position) for position in sorted((p for p in found if p is not None), reverse=True)]
        return [pair for pair in files if pair.trainer.exists()]

    def forget_old(self, newest: Position) -> None:
        """Keep the newest round up to `newest`, whose files are whole; the others go, and what is half written.

        Raises StorageError.
        """
        whole = [pair.position for pair in self.on_disk() if pair.position <= newest]  # newest first
        with disk_errors(self._folder):
            for path in self._folder.iterdir():
                if _position_of(path) not in whole[:1] and not path.name.startswith(MIDWAY):
                    path.unlink(missing_ok=True)

    def _forget_midway(self) -> None:
        """Remove what was written amid a round, so that it is not found again. Blocks. Raises StorageError."""
        with disk_errors(self._folder):
            (self._folder / MIDWAY).unlink()
            sync_folder(self._folder)

    # -- resuming --------------------------------------------------------------------------------------------

    def find(self, chain: Chain, *, countable: bool, staleness_rounds: int = 0) -> Found | None:
        """The newest files that fit the head of the chain, or else the newest of all, for their moments. Blocks.

        countable: nobody but this node can have counted a contribution that it made after the one on disk, or one that
        it made anew after it had passed that on.
        staleness_rounds: so many rounds later work amid a round still counts.
        """
        found = self._find_round(chain, countable=countable)
        midway = self._find_midway(chain, staleness_rounds)
        if midway is None:
            return found
        if found is None:
            return Found(files=None, exact=True, work=None, midway=midway)
        stood_on = chain.value(midway.round)
        contributed = found.position is not None and found.position > (stood_on.term, stood_on.state_round)
        return found if contributed else replace(found, exact=True, midway=midway)

    def _find_midway(self, chain: Chain, staleness_rounds: int) -> Restore | None:
        """Progress written amid the round after a state that the head's descends from, not too long ago."""
        path = self._folder / MIDWAY
        try:
            file = TensorFile(path)
            file.check_whole()
        except FileNotFoundError:
            return None
        except StorageError as error:
            logger.warning("what this node learnt amid a round is lost: %s", error)
            return None
        newest = chain.standing.state_round
        for round in range(newest, max(-1, newest - staleness_rounds - 1), -1):
            if chain.value(round).hash.hex() == file.metadata.get(SNAPSHOT_BASE):
                return Restore(path=str(path), round=round, exact=True, midway=True)
        logger.info("the work of the round that was broken off counts no more: the swarm has gone on since")
        return None

    def _find_round(self, chain: Chain, *, countable: bool) -> Found | None:
        head, standing = chain.head, chain.standing
        older: ResumeFiles | None = None
        for files in self.on_disk():
            try:
                account = read_account(TensorFile(files.work))
                under_way = _fits(account, head.next_term, head.next_round, head.hash)
                certified = standing.round > 0 and _fits(account, standing.term, standing.round, standing.base)
                if under_way or certified:
                    still_ours = under_way and account.passed_on is not True
                    work = read_work(files.work) if still_ours or countable else None
                    return Found(files=files, exact=True, work=work)
            except (DamagedFile, StorageError, FileNotFoundError) as error:
                self._warn(f"this node's work of round {files.position[1]} is lost: {error}")
            else:
                older = older or files
        return None if older is None else Found(files=older, exact=False, work=None)

    async def restore_trainer(self, found: Found, *, spent: bool = False) -> None:
        """Have the trainer take over its part, before it is given an anchor. spent: see `Restore`."""
        if found.midway is not None:
            await self._send(found.midway)
        elif found.files is not None:
            path, round = str(found.files.trainer), found.files.position[1]
            await self._send(Restore(path=path, round=round, exact=found.exact, spent=spent))


def _fits(account: WorkAccount, term: Term, round: int, base: bytes) -> bool:
    return (account.term, account.round, account.base) == (term, round, base)


def _position_of(path: Path) -> Position | None:
    """The round that a file is of, None for a file of another kind."""
    try:
        term, round = path.stem.split("-")
        rebases, rollbacks = term.split(".")
        return Term(int(rebases), int(rollbacks)), int(round)
    except ValueError:
        return None
