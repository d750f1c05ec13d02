"""A trainer that the daemon did not start: a training loop of the user's own, which attaches to the data folder.

    nobody attached ──a loop attaches──► trains ──its process ends, or it detaches──► nobody attached
          │ `timeout_s`                                                                (`Detached`)
          └──► `on_abandoned`

A node whose state is of a known model needs no loop to hold it, vote, and hand it to newcomers: where none attaches for
`LOOP_WAIT_S` it takes part as one whose loop is gone.

Towards the daemon it is a `Trainer`: the same layout, vectors, orders and events. What differs is whose process it is:
it cannot be started again, so its end is an event and the daemon goes on without it; and it is not killed, so one that
hangs keeps its place until it ends, and the rounds go on without its contributions meanwhile.

The socket belongs to its user alone (mode 0600), and a process of another user is turned away by the credentials that
the kernel vouches for. What a loop sends can end its own connection and nothing else.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path

import trio

from shoal.node.child_process import SEND_DEADLINE_S, ChildDied, ChildRaised, Connection
from shoal.node.control import listen_privately
from shoal.node.loops.loop_messages import (
    ATTACH_DEADLINE_S,
    LOOP_VERSION,
    Accepted,
    Attaching,
    trainer_socket_path,
    turned_away,
    unpack_attaching,
)
from shoal.node.options import NodeConfig
from shoal.node.outcome import TRAINING_LOSS
from shoal.node.pipe import Message, frame_of
from shoal.node.state.checkpoints import LAYOUT, read_layout
from shoal.node.training import shared_tensors
from shoal.node.training.early_trainer import has_trainer_process, spec_of
from shoal.node.training.layouts import first_difference
from shoal.node.training.shared_tensors import Vector
from shoal.node.training.trainer import STOP_DEADLINE_S, EarlyTrainer, Restarted, Trainer, TrainerSpec
from shoal.node.training.trainer_messages import (
    PARAMETERS_LIMIT,
    Applied,
    Apply,
    Layout,
    Report,
    Started,
    unpack_report,
)
from shoal.protocol.chain import Chain
from shoal.protocol.errors import ConfigError, LocalError
from shoal.protocol.identity import Identity

CONNECTION_LIMIT = 8
"""Connections that are being attached or turned away at once."""
LOOP_WAIT_S = 10.0
"""A loop that its user starts beside the daemon attaches before; others wait for this node's vote."""
NO_LOOP = "no training loop has attached"
HANDOVER_S = 2.0
"""A loop that is started again at once may come before the end of the one before it is noticed."""

logger = logging.getLogger(__name__)

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: struct ucred of Linux


class Detached(Restarted):
    """Report that the loop is gone (`cause`) and no other is there. As with `Restarted`, its orders are forgotten."""


class LoopConnection(Connection[Report]):
    """The daemon's end of the stream to a loop that attached."""

    def __init__(self, stream: trio.SocketStream, *, pid: int) -> None:
        super().__init__(stream, pid=pid, unpack=unpack_report)

    def _give_up(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.socket.shutdown(socket.SHUT_RDWR)

    async def _ending(self) -> str:
        return f"the training loop (process {self.pid}) is gone"

    async def answer(self, message: Message, descriptor: int | None = None) -> None:
        """Send a message, with a descriptor beside its first byte. Raises ChildDied if nobody takes it."""
        try:
            with trio.fail_after(SEND_DEADLINE_S):
                await self._send_all(frame_of(message), descriptor)
        except (trio.TooSlowError, trio.BrokenResourceError, OSError):
            raise ChildDied(await self._ending()) from None

    async def part(self) -> None:
        """Tell the loop that the daemon ends. Cancellation: it is told all the same, if it listens."""
        await self._say_stop(STOP_DEADLINE_S)


class ExternalTrainer(Trainer):
    """Trainer that takes one loop after the other. `path` is asked for when `run` begins.

    known: the layout that this node's certified state has, or None while there is none. wait_s: how long it waits for
    the first loop before it takes part in what is known without one. timeout_s: how long nobody need be attached before
    `on_abandoned` is called, None for ever.
    """

    def __init__(
        self,
        spec: TrainerSpec,
        *,
        peer_id: str,
        path: Callable[[], Path],
        known: Callable[[], Layout | None],
        timeout_s: float | None,
        on_abandoned: Callable[[], None],
        wait_s: float = LOOP_WAIT_S,
    ) -> None:
        super().__init__(spec)
        self._wait_s = wait_s
        self._peer_id = peer_id
        self._path = path
        self._known = known
        self._patience_s = timeout_s
        self._on_abandoned = on_abandoned
        self._occupant: int | None = None
        self._arrived, self._left = trio.Event(), trio.Event()
        self._slots = trio.CapacityLimiter(CONNECTION_LIMIT)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take loops until cancelled; `task_status` is told of the first, or that the node takes part without one.

        Raises StorageError, ConfigError if there is no place for the socket. Cancellation: the loop is told that the
        daemon ends, and the socket is removed.
        """
        memory = shared_tensors.open_memory()
        try:
            with contextlib.ExitStack() as undo:
                path = self._path()
                with contextlib.suppress(OSError):
                    path.unlink()
                listening = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                listen_privately(listening, path, undo)
                listener = trio.SocketListener(trio.socket.from_stdlib_socket(listening))

                async def serve(stream: trio.SocketStream) -> None:
                    await self._serve(stream, memory, task_status)

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._watch_patience)
                    nursery.start_soon(self._begin_without, memory, task_status)
                    await trio.serve_listeners(serve, [listener])
        finally:
            os.close(memory)

    async def apply(self, order: Apply, anchor: Vector) -> None:
        """Have the loop stand on an anchor, as any trainer; without one nobody holds it back from being replaced.

        Cancellation: as in `Trainer`.
        """
        await super().apply(order, anchor)
        if self._child is None and self._announced:
            self._tell(Applied(round=order.round))

    async def _begin_without(self, memory: int, task_status: trio.TaskStatus[None]) -> None:
        """Have the node take part where it knows its model, and no loop attaches for so long."""
        known = self._known()
        while known is not None and not self._announced:
            with trio.move_on_after(self._wait_s) as scope:
                await self._arrived.wait()
            if not scope.cancelled_caught:
                await self._left.wait()
            elif not self._announced:
                self._size(memory, Started(layout=known, metric=TRAINING_LOSS, device="none"))
                self._announced = True
                task_status.started()
                self._tell(Detached(cause=NO_LOOP, round=None))

    async def _watch_patience(self) -> None:
        while True:
            with trio.move_on_after(float("inf") if self._patience_s is None else self._patience_s) as scope:
                await self._arrived.wait()
            if scope.cancelled_caught:
                self._on_abandoned()
                return
            await self._left.wait()

    async def _serve(self, stream: trio.SocketStream, memory: int, task_status: trio.TaskStatus[None]) -> None:
        """Serve one connection, from its first message to its end. Raises nothing but Cancelled."""
        async with stream:
            try:
                self._slots.acquire_on_behalf_of_nowait(stream)
            except trio.WouldBlock:
                return
            connection = LoopConnection(stream, pid=_pid_of(stream))
            try:
                attaching = await self._admit(connection, _uid_of(stream))
            except (ChildDied, LocalError) as error:
                logger.info("a process tried to attach: %s", error)
                return
            finally:
                self._slots.release_on_behalf_of(stream)
            if attaching is None:
                return
            try:
                await self._live_with(connection, memory, task_status)
            finally:
                self._occupant = None
                self._arrived = trio.Event()
                self._left.set()

    async def _admit(self, connection: LoopConnection, uid: int | None) -> Attaching | None:
        """Receive a loop's first message; None if it is turned away, else it has the place.

        Raises ChildDied, LocalError.
        """
        with trio.move_on_after(ATTACH_DEADLINE_S) as scope:
            frame = await connection.receive_frame()
        if scope.cancelled_caught:
            raise ChildDied(f"it said nothing for {ATTACH_DEADLINE_S:g} s")
        if uid is not None and uid != os.geteuid():
            await connection.answer(turned_away(f"this node belongs to user {os.geteuid()}; attach as that user"))
            return None
        attaching = unpack_attaching(frame)
        with trio.move_on_after(HANDOVER_S):
            while self._occupant is not None:
                await self._left.wait()
        reason = self._reason_to_refuse(attaching)
        if reason is not None:
            await connection.answer(turned_away(reason))
            return None
        self._occupant = connection.pid
        self._left = trio.Event()
        self._arrived.set()
        return attaching

    def _reason_to_refuse(self, attaching: Attaching) -> str | None:
        if attaching.version != LOOP_VERSION:
            return "the running node is of another version of Shoal; stop it with `shoal leave` and start it again"
        if self._occupant is not None:
            return f"another training loop (process {self._occupant}) is attached; end it first"
        layout = attaching.layout
        if not _sound(layout, self._spec.sync.chunk_values):
            return "the layout of the model's parameters does not add up"
        known = self.layout if self._sized else self._known()
        difference = None if known is None else first_difference(known, layout, "in the state of this data folder")
        if difference is not None:
            return f"this node trains another model: {difference}; build the same model, or use another data folder"
        return None

    async def _live_with(self, connection: LoopConnection, memory: int, task_status: trio.TaskStatus[None]) -> None:
        """Serve a loop from the answer to the end, and tell the daemon of both.

        To one that broke the protocol nobody says that the node ends: it tells its user to look at the log.
        """
        cause, in_order = "", True
        try:
            await connection.answer(Accepted(peer_id=self._peer_id, waits_s=self._patience_s), memory)
            await self._prepare(connection, memory)
            _seal(memory)
            await self._take_up(connection, "a training loop attached", task_status)
            while True:
                self._pass_on(await connection.receive())
                await self._send_waiting(connection)
        except ChildDied as ending:
            cause = str(ending)
        except ChildRaised as ending:
            cause = ending.failed.summary
        except LocalError as error:
            cause = f"the training loop (process {connection.pid}) broke the protocol: {error}"
            in_order = False
        finally:
            self._child = None
            if in_order:
                await connection.part()
        logger.log(logging.INFO if in_order else logging.WARNING, "%s", cause)
        if self._announced:
            self._tell(Detached(cause=cause, round=None))


def _sound(layout: Layout, chunk_values: int) -> bool:
    """True if names are sorted and unique, and the numbers of values add up, with buffers from a chunk's begin on."""
    sizes = [prod(shape) for shape in layout.shapes]
    return (
        0 < len(layout.names) == len(layout.shapes) <= PARAMETERS_LIMIT
        and _ascending(layout.names)
        and _ascending(layout.buffers)
        and set(layout.buffers) < set(layout.names)
        and all(size >= 0 for size in sizes)
        and 0 < layout.numel <= shared_tensors.NUMEL_LIMIT
        and _adds_up(layout, sum(sizes), chunk_values)
    )


def _adds_up(layout: Layout, values: int, chunk_values: int) -> bool:
    parameters = values - (layout.numel - layout.buffers_begin)
    step = chunk_values if values > parameters else 1
    return parameters > 0 and -(-parameters // step) * step == layout.buffers_begin


def _ascending(names: Sequence[str]) -> bool:
    return all(a < b for a, b in pairwise(names))


def _pid_of(stream: trio.SocketStream) -> int:
    return _credentials(stream)[0]


def _uid_of(stream: trio.SocketStream) -> int | None:
    return _credentials(stream)[1]


def _credentials(stream: trio.SocketStream) -> tuple[int, int | None]:
    """Process and user at the other end; where the system does not tell, the socket's mode alone decides."""
    if sys.platform != "linux":
        return 0, None
    packed = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(packed)
    return pid, uid


def _seal(memory: int) -> None:
    """Seal the file's size: a loop that cut it short would crash the daemon."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)


def known_layout(data_dir: Path) -> Layout | None:
    """The layout of the swarm's model, where a state of it lies in a data folder.

    Beside none, what is noted there is what a loop came with, which may be another than the swarm's. None too where the
    note is damaged: the loop that comes brings its own.
    """
    noted, states = data_dir / LAYOUT, (data_dir / "state").glob("*.safetensors")
    if not noted.exists() or not any(states):
        return None
    try:
        return read_layout(noted)
    except ConfigError:
        logger.warning("%s is damaged; this node knows its model again once a loop comes", noted)
        return None


def trainer_of(
    config: NodeConfig,
    identity: Identity,
    chain: Chain,
    *,
    abandoned: Callable[[], None],
    early: EarlyTrainer | None = None,
) -> Trainer:
    """The trainer that the manifest's workload asks for: a process of the daemon's, or a loop of its user's own.

    early: the process, if it was started already.
    """
    spec = spec_of(config)
    averages = config.manifest.rollouts is not None  # an agent's policy: the agent attaches as a loop does
    if has_trainer_process(config.manifest):
        return Trainer(spec, early=early)
    if config.manifest.sync.exchanges_gradients:
        raise ConfigError(
            'a training loop of one\'s own steps by itself, and strategy = "ddp" exchanges gradients; use a workload, '
            "or another strategy"
        )
    return ExternalTrainer(
        spec,
        peer_id=identity.peer_id,
        path=lambda: trainer_socket_path(config.data_dir),
        known=lambda: known_layout(config.data_dir) if chain.head.round else None,
        wait_s=math.inf if averages else LOOP_WAIT_S,
        timeout_s=None if averages else config.loop_patience_s or None,
        on_abandoned=abandoned,
    )
