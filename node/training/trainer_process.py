"""The trainer: a child process that runs inner steps for its daemon.

Run by `shoal.node.training.trainer` as ``python -P -m shoal.node.training.trainer_start CONTROL MEMORY PROCESSES`` with
two inherited descriptors: a socket for messages (`trainer_messages`) and the file of the contribution
(`shared_tensors`). Everything else, the workload's name included, comes in the first message. With more than one
process this one is rank 0 of a group (`ranks`), and its replica a `ShardedReplica`.

Two threads. The main one trains and looks at its orders between steps. The other reads the socket (`ParentPipe`), and
ends the process when the daemon is gone. Nothing is lost by that, since all state worth keeping is the daemon's or in a
snapshot, and a third thread that may be writing one leaves a file that nobody takes for whole.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from functools import partial

import torch

from shoal.node.pipe import (
    EXIT_FAILED,
    Failed,
    ParentPipe,
    Pause,
    Resume,
    Stop,
    describe,
)
from shoal.node.training import shared_tensors
from shoal.node.training.devices import pick_device
from shoal.node.training.inner_loop import Replica
from shoal.node.training.inner_state import Snapshotter, Written, take_up
from shoal.node.training.ranks import Ranks
from shoal.node.training.samples import Sampler
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
    Ping,
    Pong,
    Restore,
    Retune,
    Snapshot,
    Start,
    Started,
    Train,
    WriteInitial,
    unpack_command,
)
from shoal.node.workload import ComparableWorkload, OneUnitWorkload, Workload, load_workload
from shoal.protocol.errors import LocalError


class TrainerProcess:
    """Follows commands until `Stop`."""

    def __init__(
        self, control: ParentPipe[Command], memory: int, *, import_s: float, ranks: Ranks | None = None
    ) -> None:
        self._control = control
        self._ranks = ranks
        self._import_s = import_s
        self._memory = memory
        self._replica: Replica | None = None
        self._out: Vector | None = None  # where contributions are written
        self._sampler: Sampler | None = None
        self._workload: Workload | None = None
        self._snapshotter = Snapshotter()
        self._paused = False
        self._held: deque[Command] = deque()  # an `Apply` that waits for the steps of overlap, and what came after it
        self._hurried = False

    def run(self) -> None:
        """Train while there is a stretch, listen between steps, wait when there is nothing to do."""
        while True:
            command = self._next_command()
            if isinstance(command, Stop):
                return
            if command is not None:
                self._hand_over()
                self._follow(command)
            elif self._replica is not None and self._out is not None:
                report = self._replica.step(self._out)
                if isinstance(report, Contribution):
                    self._contributed(report)
                elif report is not None:
                    self._control.send(report)

    def _hand_over(self) -> None:
        """Write and report a contribution that is on its way from the device, before anything is changed."""
        if self._replica is not None and self._out is not None:
            contribution = self._replica.hand_over(self._out)
            if contribution is not None:
                self._contributed(contribution)

    def _contributed(self, contribution: Contribution) -> None:
        """Report a contribution; from here on what is in it is in no snapshot amid the round."""
        self._snapshotter.withdraw()
        self._control.send(contribution)

    def _next_command(self) -> Command | None:
        """The next order, or None where it is time for a step.

        An anchor that is here before the steps of overlap are made waits for them, and what was ordered after it too,
        so that what is learnt does not depend on how fast the round was, as long as it was not too slow.
        """
        replica = self._replica
        running = replica is not None and not self._paused
        overlapping = replica is not None and running and replica.overlapping
        while True:
            if self._held and (self._hurried or not overlapping):
                return self._held.popleft()
            self._hurried = False
            began = time.monotonic()
            busy = replica is not None and running and replica.training
            command = self._control.receive_nowait() if busy else self._control.receive()
            if replica is not None and running and replica.waiting:
                replica.blocked(time.monotonic() - began)
            anchor = isinstance(command, Apply) and not command.fresh and overlapping
            at_once = isinstance(command, Hurry | Pause | Resume | Ping | Stop)
            if command is None or at_once or not (self._held or anchor):
                return command
            self._held.append(command)

    def _follow(self, command: Command) -> None:
        if isinstance(command, Start):
            self._start(command)
            return
        if isinstance(command, Ping):
            self._control.send(Pong())
            return
        replica = self._replica
        if replica is None:
            raise LocalError(f"{type(command).__name__} before Start")
        if isinstance(command, Attach):
            if command.numel != replica.layout.numel:
                raise LocalError(f"memory for {command.numel} values, the model has {replica.layout.numel}")
            self._out = shared_tensors.attach(self._memory, command.numel)
            self._control.send(Attached())
            return
        if self._out is None:
            raise LocalError(f"{type(command).__name__} before Attach")
        self._work(command, replica, self._out)

    def _start(self, start: Start) -> None:
        torch.set_num_threads(start.threads)
        if self._ranks is None:
            device = pick_device(start.device)
            workload = load_workload(start.workload, start.options, start.data)
            replica = Replica(
                workload,
                seed=start.seed,
                inner=start.inner,
                device=device,
                sync=start.sync,
                accumulate=start.accumulate,
                contributions=start.contributions,
            )
            where = str(device)
        else:
            from shoal.node.training.sharded_replica import (
                ShardedReplica,  # importing it takes seconds, and few need it
            )

            workload = load_workload(start.workload, start.options, start.data)
            replica = ShardedReplica(workload, start, ranks=self._ranks)
            where = f"{self._ranks.processes} x {replica.device_type}"
        self._replica, self._sampler, self._workload = replica, Sampler(workload), workload
        self._control.send(
            Started(
                layout=replica.layout,
                metric=workload.metric,
                loss_metric=workload.metric if isinstance(workload, OneUnitWorkload) else "",
                device=where,
                import_s=self._import_s,
            )
        )

    def _held_out_digest(self) -> bytes:
        return self._workload.held_out_digest() if isinstance(self._workload, ComparableWorkload) else b""

    def _work(self, command: Command, replica: Replica, out: Vector) -> None:
        match command:
            case Train():
                replica.begin(command)
            case Apply():
                anchor = shared_tensors.map_lent(self._control.take_descriptor(), replica.layout.numel)
                replica.apply(anchor, round=command.round, taken=command.taken, fresh=command.fresh)
                self._control.send(Applied(round=command.round))
            case Evaluate():
                self._control.send(Evaluating(round=command.round))
                value = replica.evaluate(self._sampler)
                samples = () if self._sampler is None else self._sampler.take()
                self._control.send(
                    Evaluated(round=command.round, value=value, data=self._held_out_digest(), samples=samples)
                )
            case Snapshot():
                self._save(command, replica)
            case Restore():
                restore = partial(replica.restore, exact=command.exact, spent=command.spent)
                self._control.send(take_up(command, restore))
            case Retune():
                replica.retune(command.inner, command.sync)
            case WriteInitial():
                replica.write_initial(out)
                self._control.send(Initial())
            case Hurry():
                self._hurried = True
            case Pause():
                self._paused = True
                replica.rest()
            case Resume():
                self._paused = False
                replica.wake()

    def _save(self, order: Snapshot, replica: Replica) -> None:
        """Begin a snapshot; one amid a round only while it is amid one."""
        began = time.perf_counter()
        if order.midway and not replica.accounts.amid_round:
            self._control.send(Written(failure="nothing is to be kept now").report(order))
            return
        state = replica.inner_state(order.round, midway=order.midway)
        replica.copied_at(self._snapshotter.save(state, order, self._control.send, began=began))


def serve(control: int, memory: int, *, import_s: float, ranks: Ranks | None = None) -> int:
    """Serve one daemon over two inherited descriptors; return the exit status. import_s: how long importing torch took.

    ranks: the other processes of this trainer, which end with it.
    """
    connection = ParentPipe(control, unpack_command, who="trainer", lends=True)
    if ranks is not None:
        ranks.watch(partial(_fail_with, connection))
    try:
        TrainerProcess(connection, memory, import_s=import_s, ranks=ranks).run()
    except Exception as error:  # the boundary of the user's code: whatever it raised goes to the user
        if ranks is not None:
            ranks.await_blame()
        connection.send(describe(error))
        return _exit(EXIT_FAILED, ranks)
    return _exit(0, ranks)


def _fail_with(control: ParentPipe[Command], failed: Failed) -> None:
    """The workload raised in another rank: tell it as if it had been here."""
    control.send(failed)
    os._exit(EXIT_FAILED)


def _exit(status: int, ranks: Ranks | None) -> int:
    """Return the status; with other ranks, end them and the process without waiting for what they have left undone."""
    if ranks is not None:
        ranks.end()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status
