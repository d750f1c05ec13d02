"""The user's side of the pipe between a training loop and its daemon: attach, read orders, send reports.

A thread reads. It does at once what must not wait for the loop's next step, so that a loop that evaluates for minutes
never holds up the daemon's votes: an anchor that was lent is copied and acknowledged, and a `Ping` answered.
Everything else waits in a queue for `receive`, which the loop calls between its steps.

Anchors that the loop has not taken yet become one: the newest values, the highest number taken, and fresh if any was.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from shoal.collectives.memory import VectorPool
from shoal.node.control_client import SOCKET_PATH_LIMIT_BYTES
from shoal.node.loops.loop_messages import (
    ATTACH_DEADLINE_S,
    LOOP_VERSION,
    Accepted,
    Attaching,
    TurnedAway,
    trainer_socket_path,
    unpack_answer,
)
from shoal.node.pipe import FrameSocket, Pause, Resume, Stop, limit_sends
from shoal.node.training import shared_tensors
from shoal.node.training.shared_tensors import Vector
from shoal.node.training.trainer_messages import (
    Applied,
    Apply,
    Attach,
    Attached,
    Command,
    Layout,
    Ping,
    Pong,
    Report,
    Start,
    Started,
    SyncSettings,
    unpack_command,
)
from shoal.protocol.errors import ConfigError, LocalError, NetworkError

ORDER_LIMIT = 4096
"""Orders waiting for the loop. A round brings about four, so it is far more than a loop misses in a day."""

SEND_DEADLINE_S = 30
"""A daemon that takes nothing for so long, stopped or hung, is gone for the loop."""


class NoDaemon(NetworkError):
    """Refusal for want of a daemon that takes training loops for this data folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorHere:
    """Report that an anchor has come; `LoopClient.take_anchor` hands it over."""

    fresh: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Anchor:
    """θ(round), ``(numel,) float32``, which nobody else changes, with what its `Apply` said."""

    round: int
    taken: int
    fresh: bool
    values: Vector


Order = AnchorHere | Command
T = TypeVar("T", bound=Command)


class LoopClient:
    """One attachment, from `attach` to `close` or the daemon's end."""

    def __init__(self, channel: _Channel, *, accepted: Accepted, start: Start, contribution: Vector) -> None:
        self.peer_id = accepted.peer_id
        self.waits_s = accepted.waits_s
        self.sync: SyncSettings = start.sync
        self.contributions = start.contributions
        self.contribution = contribution
        self.ended_in_order = False
        """True if the daemon announced that it ends."""
        self.paused = False
        """True between a pause and its end, also while the loop has yet to hear of it."""
        self._channel = channel
        self._vectors = VectorPool(1)  # one is its user's base, one may be on its way
        self._newest: Anchor | None = None  # that was not taken
        self._taking = threading.Lock()
        self._orders: queue.Queue[Order] = queue.Queue(ORDER_LIMIT)
        self._gone = threading.Event()
        threading.Thread(target=self._read, name="shoal", daemon=True).start()
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _close_in_child(reference))

    @property
    def gone(self) -> bool:
        """True if the daemon is gone and all that it ordered has been received."""
        return self.ended and self._orders.empty()

    @property
    def ended(self) -> bool:
        """True if the daemon is gone, or was detached from."""
        return self._gone.is_set()

    def send(self, report: Report) -> None:
        """Tell the daemon; one that is gone does not hear it."""
        try:
            self._channel.send(report)
        except OSError:
            self.close()

    def receive(self, timeout_s: float) -> Order | None:
        """The next order, waited for at most so long; None if there is none."""
        try:
            return self._orders.get(timeout=timeout_s) if timeout_s > 0 else self._orders.get_nowait()
        except queue.Empty:
            return None

    def take_anchor(self) -> Anchor | None:
        """Return the newest anchor; None if it was taken already."""
        with self._taking:
            anchor, self._newest = self._newest, None
            return anchor

    def close(self) -> None:
        """Detach. The shared memory is not touched after this by the reading thread; the caller must not either."""
        self._channel.shut()
        self._gone.set()

    def _read(self) -> None:
        try:
            while True:
                self._take(unpack_command(self._channel.receive_frame()))
        except (OSError, LocalError, queue.Full, NetworkError):
            pass  # the daemon is gone, or not to be followed: the loop goes on by itself
        finally:
            self._gone.set()
            self._channel.close()

    def _take(self, command: Command) -> None:
        if isinstance(command, Ping):
            self.send(Pong())
        elif isinstance(command, Apply):
            self._receive_anchor(command)
            self.send(Applied(round=command.round))
        elif isinstance(command, Stop):
            self.ended_in_order = True
        else:
            if isinstance(command, Pause | Resume):
                self.paused = isinstance(command, Pause)
            self._orders.put_nowait(command)

    def _receive_anchor(self, order: Apply) -> None:
        """Copy what was lent: a loop stands on it for as long as it likes, and the daemon wants its memory back."""
        lent = shared_tensors.map_lent(self._channel.take_descriptor(), self.contribution.size)
        values = self._vectors.take(lent.size)
        np.copyto(values, lent)
        with self._taking:
            before = self._newest
            self._newest = Anchor(
                round=order.round,
                taken=order.taken if before is None else max(before.taken, order.taken),
                fresh=order.fresh or (before is not None and before.fresh),
                values=values,
            )
            self._orders.put_nowait(AnchorHere(fresh=order.fresh))


def attach(data_dir: Path, *, layout: Layout, metric: str, device: str) -> LoopClient:
    """Become the trainer of the node that runs on `data_dir`.

    Raises NoDaemon if there is none, ConfigError with its reason if it takes none or not this one, NetworkError if it
    does not answer in time.
    """
    channel = _Channel(_connect(data_dir))
    memory: int | None = None
    try:
        channel.connection.settimeout(ATTACH_DEADLINE_S)
        channel.send(Attaching(version=LOOP_VERSION, layout=layout, metric=metric, device=device))
        answer = unpack_answer(channel.receive_frame())
        if isinstance(answer, TurnedAway):
            raise ConfigError(answer.reason)
        memory = channel.take_descriptor()
        start = _expect(channel, Start)
        channel.send(Started(layout=layout, metric=metric, loss_metric=metric, device=device))
        numel = _expect(channel, Attach).numel
        if numel != layout.numel:
            raise LocalError(f"the daemon's memory is for {numel} values, the model has {layout.numel}")
        contribution = shared_tensors.attach(memory, numel)
        channel.send(Attached())
        channel.connection.settimeout(None)  # what is ordered may take as long as it likes to come
        limit_sends(channel.connection, SEND_DEADLINE_S)
    except TimeoutError:
        channel.close()
        raise NetworkError(f"the node on {data_dir} does not answer; look at its log") from None
    except OSError as error:
        channel.close()
        raise NetworkError(f"the node on {data_dir} broke off: {error}") from None
    except BaseException:
        channel.close()
        raise
    finally:
        if memory is not None:
            os.close(memory)
    return LoopClient(channel, accepted=answer, start=start, contribution=contribution)


class _Channel(FrameSocket):
    """The pipe to the daemon; descriptors come with the first frame, and with anchors."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection, lends=True)

    def receive_frame(self) -> bytes:
        """The next frame. Raises NetworkError at the end, OSError, LocalError."""
        frame = self.receive()
        if frame is None:
            raise NetworkError("the node broke off; look at its log")
        return frame

    def shut(self) -> None:
        """End both directions; whoever reads or writes is woken."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


def _connect(data_dir: Path) -> socket.socket:
    path = trainer_socket_path(data_dir)
    if len(os.fsencode(path)) > SOCKET_PATH_LIMIT_BYTES:  # no node can have bound it
        raise NoDaemon(f"no node takes training loops on {data_dir}")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(path))
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
        connection.close()
        raise NoDaemon(f"no node takes training loops on {data_dir}") from None
    except PermissionError:
        connection.close()
        raise ConfigError(f"the node on {data_dir} belongs to another user; run the loop as that user") from None
    return connection


def _expect(channel: _Channel, kind: type[T]) -> T:
    command = unpack_command(channel.receive_frame())
    if not isinstance(command, kind):
        raise LocalError(f"the daemon sent {type(command).__name__} in place of {kind.__name__}")
    return command


def _close_in_child(reference: weakref.ref[LoopClient]) -> None:
    """Close the connection in a data loader's forked worker, so that it does not outlive the loop's process."""
    client = reference()
    if client is not None:
        client._channel.connection.close()
