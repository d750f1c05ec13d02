"""The daemon's side of the trainer: starts the child process, watches it, starts it again when it dies.

A trainer that *dies* (killed for memory, a segmentation fault, a hang past `STALL_DEADLINE_S`) is started again from
the anchor that it was given last and its newest snapshot, unless it dies too often (`Deaths`); what it had learnt since
that, and not contributed, it learns again. A workload that *raises* would raise again: its traceback is the last event
and no restart is tried. This module does not import torch.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import trio

from shoal.node.child_process import ChildDied, ChildRaised, Connection, Deaths, Spawned, running_child, spawn
from shoal.node.pipe import SUMMARY_LIMIT_CHARS, Failed, Pause, Resume
from shoal.node.training import shared_tensors
from shoal.node.training.shared_tensors import Vector
from shoal.node.training.trainer_messages import (
    Applied,
    Apply,
    Attach,
    Attached,
    Command,
    Contribution,
    Evaluate,
    Evaluated,
    Evaluating,
    Hurry,
    Initial,
    InnerSettings,
    Layout,
    Ping,
    Pong,
    Progress,
    Report,
    Restore,
    Restored,
    Retune,
    Scalar,
    Snapshot,
    Snapshotted,
    Start,
    Started,
    SyncSettings,
    Train,
    Trained,
    WriteInitial,
    unpack_report,
)
from shoal.node.workload import WorkloadError
from shoal.protocol.errors import ConfigError, LocalError
from shoal.protocol.manifest import Manifest

PROGRAM: tuple[str, ...] = ("-m", "shoal.node.training.trainer_start")
STOP_DEADLINE_S = 2.0
START_DEADLINE_S = 600.0
"""From spawn to attached: importing torch, building the model, loading the anchor."""
PING_PERIOD_S = 60.0
"""A trainer silent for so long is asked for a sign of life."""
STALL_DEADLINE_S = 600.0
"""From that question to the answer: one inner step or one evaluation must fit."""
INITIAL_DEADLINE_S = 60.0
"""The same of one that is to write S(0), and has nothing else to do: nobody begins before that is there."""

logger = logging.getLogger("shoal.trainer")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """Settings of a trainer: the manifest's first, then this machine's.

    threads: of all `processes` together, though each has one at least.
    """

    workload: str
    options: Mapping[str, Scalar] = field(default_factory=dict)
    seed: int = 0
    inner: InnerSettings = field(default_factory=InnerSettings)
    sync: SyncSettings = field(default_factory=SyncSettings)
    data: str | None = None
    device: str = "auto"
    threads: int = 1
    accumulate: int = 1
    processes: int = 1

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        *,
        device: str,
        threads: int,
        data: str | None = None,
        accumulate: int = 1,
        processes: int = 1,
    ) -> TrainerSpec:
        """Settings of the trainer of a swarm's node, on this machine."""
        return cls(
            workload=manifest.workload.name,
            options=manifest.workload.options,
            seed=manifest.workload.seed,
            inner=InnerSettings.of(manifest),
            sync=SyncSettings.of(manifest),
            data=data,
            device=device,
            threads=threads,
            accumulate=accumulate,
            processes=processes,
        )

    @property
    def threads_each(self) -> int:
        """Number of threads of each process."""
        return max(1, self.threads // self.processes)


class EarlyTrainer:
    """The process, and the descriptor of the memory that it will share, until somebody takes them."""

    def __init__(self, spawned: Spawned, memory: int) -> None:
        self._there: tuple[Spawned, int] | None = (spawned, memory)

    def take(self) -> tuple[Spawned, int] | None:
        """Both, to be ended and closed by who takes them; None if they are taken."""
        there, self._there = self._there, None
        return there


async def spawn_trainer(spec: TrainerSpec, memory: int) -> Spawned:
    """Spawn the process of a trainer, which is told of its work later."""
    return await spawn(PROGRAM, memory, spec.processes, threads=spec.threads_each, inherited=(memory,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarted:
    """The trainer died (`cause`) and a new one stands on θ(`round`), fresh, or on nothing yet if None.

    Orders sent before this event are forgotten: send `Train` or `Evaluate` anew.
    """

    cause: str
    round: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFailed:
    """Training is over: the workload raised, or the trainer died too often. The last event."""

    summary: str
    traceback: str


@dataclass(frozen=True, slots=True, eq=False)
class _Lent:
    """An anchor, and the order to stand on it."""

    order: Apply
    anchor: Vector


TrainerEvent = (
    Initial
    | Progress
    | Contribution
    | Trained
    | Applied
    | Evaluating
    | Evaluated
    | Snapshotted
    | Restored
    | Restarted
    | TrainerFailed
)


class Trainer:
    """Supervises one trainer process.

    `layout`, `started` and `contribution` are there once `run` has reported started, and stay valid through restarts.
    Its events go to whoever listens.
    """

    layout: Layout
    started: Started
    contribution: Vector

    def __init__(self, spec: TrainerSpec, *, early: EarlyTrainer | None = None) -> None:
        """early: has the process that comes first, if it is spawned already."""
        self._spec = spec
        self._early = early
        self._listeners: list[Callable[[TrainerEvent], None]] = []
        self._child: Connection[Report] | None = None  # only while it takes orders
        self._sized = False  # whether layout and contribution are there
        self._anchored: _Lent | None = None  # what it was given last, or is given when it is there
        self._retuned: Retune | None = None  # since that anchor, which is applied by what is in the specification
        self._newest: Restore | None = None  # the snapshot that a restarted trainer is given
        self._midway: Restore | None = None  # a newer one, as long as no contribution holds what is in it
        self._owes_initial = False  # S(0) is ordered, and not written
        self._paused = False
        self._training: Train | None = None  # the newest order
        self._contributions = 0
        self._snapshots_under_way: set[tuple[str, int]] = set()
        """By path and round; without those ordered before the swarm went back, which nobody is to be given."""
        self._contributed_round = 0  # of the newest contribution
        self._announced = False
        self._stands_on: _Lent | None = None  # what this child has applied: nobody else may have its memory
        self._unanswered: deque[_Lent] = deque()  # what it was given after that
        self._waiting: deque[Command | _Lent] = deque()
        """An anchor until the one before it is applied, and what was ordered after it."""
        self._catches_up = False  # what waited is being sent

    def listen(self, listener: Callable[[TrainerEvent], None]) -> None:
        """Have every event from now on told to `listener` too, after those that listen already. It must not raise."""
        self._listeners.append(listener)

    def _tell(self, event: TrainerEvent) -> None:
        for listener in self._listeners:
            listener(event)

    @property
    def pid(self) -> int | None:
        """The process id of the running trainer, or None between two."""
        return self._child.pid if self._child is not None else None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep a trainer running until cancelled, or until training has failed (event `TrainerFailed`).

        Raises `WorkloadError` if the workload raises before `task_status.started`, `ConfigError` if there is none such.
        Cancellation: the child is asked to stop, killed after `STOP_DEADLINE_S`, and always reaped.
        """
        deaths = Deaths("the trainer")
        cause: str | None = None
        early = None if self._early is None else self._early.take()
        spawned, memory = early or (None, shared_tensors.open_memory())
        try:
            while True:
                ending = await self._live(memory, cause, task_status, spawned)
                spawned = None
                if isinstance(ending, ChildRaised):
                    self._fail(ending.failed)
                    return
                cause = str(ending)
                logger.warning("the trainer died: %s", cause)
                too_many = await deaths.count(ending)
                if too_many is not None:
                    self._fail(Failed(summary=too_many[:SUMMARY_LIMIT_CHARS], traceback=""))
                    return
        finally:
            os.close(memory)

    async def send(self, command: Command) -> None:
        """Give the trainer an order.

        Between a death and `Restarted` there is nobody to take it: the settings of a `Retune` are remembered, which
        take effect after the anchor before them as in a trainer that lives; a `Pause` holds until `Resume`, whoever
        lives, and `WriteInitial` until it is done; every other order is dropped, and the daemon orders anew on
        `Restarted`. Cancellation: the order is delivered whole or not at all; a trainer that does not read for
        `SEND_DEADLINE_S` is killed.
        """
        if isinstance(command, Restore):
            self._keep(command)
        elif isinstance(command, Retune):
            self._retuned = command
        elif isinstance(command, Pause | Resume):
            self._paused = isinstance(command, Pause)
        elif isinstance(command, WriteInitial):
            self._owes_initial = True
        elif isinstance(command, Train):
            self._training = command
        if self._child is None:
            return
        if isinstance(command, Snapshot):
            self._snapshots_under_way.add((command.path, command.round))
        if self._in_turn and not isinstance(command, Hurry | Pause | Resume):
            self._waiting.append(command)
        else:
            await self._child.send(command)

    @property
    def _in_turn(self) -> bool:
        """True while orders wait for an anchor that waits, and what comes after them waits too."""
        return bool(self._waiting) or self._catches_up

    async def apply(self, order: Apply, anchor: Vector) -> None:
        """Have the trainer stand on an anchor, which must stay as it is: it is lent, and given again after a death.

        While the one before is not applied, amid a step that may take minutes, it waits here, what is ordered after it
        waits behind it, and one that comes then is given in place of both. Between a death and `Restarted` the new
        trainer will stand on it, with what the newest snapshot holds. Cancellation: as `send`.
        """
        self._anchored = lent = _Lent(order, anchor)
        if order.fresh:  # they belong to what is dropped
            self._newest, self._midway, self._contributed_round = None, None, 0
            self._snapshots_under_way.clear()
        self._spec, self._retuned = self._in_force, None
        if self._child is None:
            return
        if self._unanswered or self._in_turn:
            self._wait_with(lent)
        else:
            await self._lend(self._child, lent)

    def _wait_with(self, lent: _Lent) -> None:
        """Keep an anchor until the one before it is applied; of several that wait one becomes.

        What was to be trained, evaluated and copied on those before goes with them.
        """
        order, kept = lent.order, deque[Command | _Lent]()
        for one in self._waiting:
            if isinstance(one, _Lent):
                taken, fresh = max(order.taken, one.order.taken), order.fresh or one.order.fresh
                order = Apply(round=order.round, taken=taken, fresh=fresh)
            elif isinstance(one, Snapshot):
                self._tell(_unwritten(one, "another anchor came before it"))
            elif not isinstance(one, Train | Evaluate):
                kept.append(one)
        self._waiting = deque((*kept, _Lent(order, lent.anchor)))

    async def _send_waiting(self, child: Connection[Report]) -> None:
        """Give the child what waited for it to apply an anchor, if it has."""
        self._catches_up = True
        try:
            while self._waiting and not (self._unanswered and isinstance(self._waiting[0], _Lent)):
                one = self._waiting.popleft()
                if isinstance(one, _Lent):
                    await self._lend(child, one)
                else:
                    await child.send(one)
        finally:
            self._catches_up = False

    async def _lend(self, child: Connection[Report], lent: _Lent) -> None:
        """Give the child an anchor, and its memory to nobody else until it has applied a later one."""
        self._unanswered.append(lent)
        with trio.CancelScope(shield=True):
            descriptor = await trio.to_thread.run_sync(shared_tensors.lend, lent.anchor)
            try:
                await child.send(lent.order, lent=descriptor)
            finally:
                os.close(descriptor)

    async def give_back_contribution(self) -> None:
        """Give the contribution's memory back: it was read. Cancellation: it is given back all the same."""
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(shared_tensors.give_back, self.contribution)

    @property
    def _in_force(self) -> TrainerSpec:
        """The specification with the settings that were ordered last."""
        last = self._retuned
        return self._spec if last is None else replace(self._spec, inner=last.inner, sync=last.sync)

    async def _live(
        self, memory: int, cause: str | None, task_status: trio.TaskStatus[None], spawned: Spawned | None
    ) -> ChildDied | ChildRaised:
        """Run one child from spawn to its end, and return that end. spawned: if it is spawned already."""
        spec = self._spec
        async with running_child(
            PROGRAM,
            memory,
            spec.processes,
            unpack=unpack_report,
            stop_s=STOP_DEADLINE_S,
            logger=logger,
            threads=spec.threads_each,
            inherited=(memory,),
            spawned=spawned,
        ) as child:
            try:
                await self._prepare(child, memory)
                await self._take_up(child, cause, task_status)
                while True:
                    self._pass_on(await self._next_report(child))
                    await self._send_waiting(child)
            except (ChildDied, ChildRaised) as ending:
                return ending
            except LocalError as error:
                return ChildDied(f"broke the protocol: {error}")
            finally:
                self._child = None

    async def _prepare(self, child: Connection[Report], memory: int) -> None:
        """Bring a new child to where it can take orders, within `START_DEADLINE_S`."""
        with trio.move_on_after(START_DEADLINE_S) as scope:
            given = self._spec if self._anchored is not None else self._in_force
            self._stands_on = None
            self._unanswered.clear()
            self._waiting.clear()
            await self._start(child, memory, given)
            restored = await self._restore(child)
            loaded, paused = None, False
            while True:  # any of it may change while it is sent
                if self._anchored is not None and loaded is not self._anchored:
                    order = self._anchored.order
                    abandoned = restored is not None and restored is not self._midway and restored is not self._newest
                    if loaded is None or abandoned:
                        order = Apply(round=order.round, fresh=abandoned)
                    loaded = self._anchored
                    await self._stand_on_anchor(child, _Lent(order, loaded.anchor))
                elif given != self._in_force:
                    given = self._in_force
                    await child.send(Retune(inner=given.inner, sync=given.sync))
                elif paused != self._paused:
                    paused = self._paused
                    await child.send(Pause() if paused else Resume())
                else:
                    break
        if scope.cancelled_caught:
            raise ChildDied(f"not ready {START_DEADLINE_S:g} s after its start", waited_s=START_DEADLINE_S)

    async def _take_up(self, child: Connection[Report], cause: str | None, task_status: trio.TaskStatus[None]) -> None:
        """Send orders to this child from here on; the first is what the one before it did not do."""
        self._child, owes_initial = child, self._owes_initial
        if not self._announced:
            self._announced = True
            task_status.started()
        elif cause is not None:
            anchored = None if self._anchored is None else self._anchored.order.round
            self._tell(Restarted(cause=cause, round=anchored))
        if owes_initial:
            await child.send(WriteInitial())

    async def _start(self, child: Connection[Report], memory: int, spec: TrainerSpec) -> None:
        """Have the child build its model and map the contribution."""
        await child.send(
            Start(
                workload=spec.workload,
                options=spec.options,
                data=spec.data,
                seed=spec.seed,
                inner=spec.inner,
                sync=spec.sync,
                device=spec.device,
                threads=spec.threads_each,
                accumulate=spec.accumulate,
                contributions=self._contributions,
            )
        )
        started = await child.receive()
        if not isinstance(started, Started):
            raise LocalError(f"the trainer answered Start with {type(started).__name__}")
        if self._sized and started.layout.digest != self.layout.digest:
            raise ChildRaised(_other_layout())
        self._size(memory, started)
        await child.send(Attach(numel=started.layout.numel))
        if not isinstance(await child.receive(), Attached):
            raise LocalError("the trainer did not attach")

    def _size(self, memory: int, started: Started) -> None:
        """Take note of what has started, and have room for its contributions."""
        self.started = started
        if not self._sized:
            self.layout = started.layout
            self.contribution, self._sized = shared_tensors.create(memory, started.layout.numel), True

    async def _restore(self, child: Connection[Report]) -> Restore | None:
        """Give the child the newest snapshot that it takes, and return it; it is dropped if it is abandoned meanwhile.

        One amid a round is good for any anchor after it; of another all is, unless it was given for its moments alone,
        if it is of the anchored round or of the one under way: then it was ordered when its contribution had been
        taken. Before there is an anchor it is what the daemon had restored, for the anchor to come.
        """
        if (kept := self._midway) is not None and await self._restore_from(child, kept):
            return kept
        self._midway = None
        if (kept := self._newest) is not None:
            anchored = kept.round if self._anchored is None else self._anchored.order.round
            exact = kept.exact and kept.round in (anchored, anchored + 1)
            spent = kept.spent or self._contributed_round > kept.round
            order = Restore(path=kept.path, round=kept.round, exact=exact, spent=spent)
            if await self._restore_from(child, order):
                return kept
            self._newest = None
        return None

    async def _restore_from(self, child: Connection[Report], order: Restore) -> bool:
        """Returns whether the child took this snapshot over."""
        await child.send(order)
        restored = await child.receive()
        if not isinstance(restored, Restored):
            raise LocalError(f"the trainer answered Restore with {type(restored).__name__}")
        self._tell(restored)
        return not restored.refused

    def _keep(self, snapshot: Restore) -> None:
        """Have a restarted trainer given this snapshot, unless what it holds was contributed meanwhile."""
        if not snapshot.midway:
            self._newest = snapshot
        elif self._contributed_round <= snapshot.round:
            self._midway = snapshot

    async def _stand_on_anchor(self, child: Connection[Report], lent: _Lent) -> None:
        """Have a new child load an anchor."""
        await self._lend(child, lent)
        if not isinstance(await child.receive(), Applied):
            raise LocalError("the trainer did not apply the anchor")
        self._stands_on = self._unanswered.popleft()

    def _pass_on(self, report: Report) -> None:
        if isinstance(report, Pong):
            return
        if isinstance(report, Started | Attached | Failed):
            raise LocalError(f"the trainer sent {type(report).__name__} out of turn")
        if isinstance(report, Contribution):
            self._check(report)
            self._contributions, self._contributed_round = report.number, report.round
            self._midway = None
        elif isinstance(report, Snapshotted):
            ordered = (report.path, report.round) in self._snapshots_under_way
            self._snapshots_under_way.discard((report.path, report.round))
            if ordered and not report.failure:
                self._keep(Restore(path=report.path, round=report.round, exact=True, midway=report.midway))
        elif isinstance(report, Restored) and report.refused:
            self._newest = self._midway = None
        elif isinstance(report, Initial):
            self._owes_initial = False
        elif isinstance(report, Applied):
            if not self._unanswered:
                raise LocalError("the trainer applied an anchor that it was not given")
            self._stands_on = self._unanswered.popleft()
        self._tell(report)

    def _check(self, made: Contribution) -> None:
        """Raise LocalError for a contribution that was not ordered so: it would be counted as what it is not."""
        if made.number <= self._contributions:
            raise LocalError(f"contribution {made.number} came after contribution {self._contributions}")
        if self._training is not None and made.order == self._training.order and made.round != self._training.round:
            raise LocalError(f"a contribution to round {made.round} came for one to round {self._training.round}")

    async def _next_report(self, child: Connection[Report]) -> Report:
        """Wait for a report. Raises `ChildDied` on a child that does not answer a `Ping` either."""
        with trio.move_on_after(PING_PERIOD_S):
            return await child.receive()
        await child.send(Ping())
        deadline_s = INITIAL_DEADLINE_S if self._owes_initial else STALL_DEADLINE_S
        with trio.move_on_after(deadline_s):
            return await child.receive()
        waited_s = PING_PERIOD_S + deadline_s
        raise ChildDied(
            f"hung: no answer for {deadline_s:g} s, and a step or an evaluation must take less", waited_s=waited_s
        )

    def _fail(self, failed: Failed) -> None:
        """Tell the daemon that training is over: by an event, or where none is awaited yet, by raising."""
        if not self._announced:
            if failed.configuration:
                raise ConfigError(failed.summary)  # one line says it all
            raise WorkloadError(failed.summary, failed.traceback)
        self._tell(TrainerFailed(summary=failed.summary, traceback=failed.traceback))


def _unwritten(order: Snapshot, why: str) -> Snapshotted:
    """The report that a snapshot was not made."""
    return Snapshotted(
        round=order.round, path=order.path, copy_s=0.0, write_s=0.0, size_bytes=0, failure=why, midway=order.midway
    )


def _other_layout() -> Failed:
    return Failed(
        summary="the workload built a model of another shape than before the restart; build() must depend on "
        "the options and the seed alone",
        traceback="",
    )
