"""Messages between a training loop of the user's own and its daemon, before they speak as trainer and daemon do.

    loop                                       daemon, on `trainer.sock` in its data folder
    Attaching(layout, …)              ─────►   the same user's process? nobody else attached? the same model?
                                      ◄─────   Accepted(peer_id), with the shared vectors' descriptor; or TurnedAway
    from here on the messages of `trainer_messages`, beginning with the daemon's Start

Frames are those of every pipe (`shoal.node.pipe`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shoal.node.control_client import socket_path
from shoal.node.pipe import SUMMARY_LIMIT_CHARS, Message, unpacker
from shoal.node.training.trainer_messages import Layout

OWN_LOOP = "own-loop"
"""The name that a manifest gives to a workload which is each user's own training loop."""
TRAINER_SOCKET_NAME = "trainer.sock"
LOOP_VERSION = 7
"""Of what both say, the messages of `trainer_messages` included: another with each change of any of them."""
ATTACH_DEADLINE_S = 30.0
"""From the connection to the answer."""


def join_call(swarm: str, data_dir: Path) -> str:
    """Return the call with which a training loop takes part, for people to read: swarm is a manifest or a link."""
    return f"join(model, optimizer, {swarm!r}, data_dir={str(data_dir)!r})"


class Attaching(Message, frozen=True, kw_only=True):
    """Request of a loop to train for this daemon. metric: what its evaluations mean, for people."""

    version: int
    layout: Layout
    metric: str
    device: str


class Accepted(Message, frozen=True, kw_only=True):
    """Acceptance of a loop; the descriptor of the shared vectors comes with the first byte of this frame.

    waits_s: how long the daemon waits for another once this one is gone; None for ever.
    """

    peer_id: str
    waits_s: float | None = None


class TurnedAway(Message, frozen=True, kw_only=True):
    """Refusal of a loop; `reason` is for its user."""

    reason: str


unpack_attaching: Callable[[bytes], Attaching] = unpacker(Attaching, "the words of a training loop")
unpack_answer: Callable[[bytes], Accepted | TurnedAway] = unpacker(Accepted | TurnedAway, "the answer of a daemon")


def trainer_socket_path(data_dir: Path) -> Path:
    """Path at which the node of this data folder takes loops, once it runs: beside its control socket."""
    return socket_path(data_dir).with_name(TRAINER_SOCKET_NAME)


def turned_away(reason: str) -> TurnedAway:
    """The refusal of a loop, within its limit."""
    return TurnedAway(reason=reason[:SUMMARY_LIMIT_CHARS])
