"""One simulated peer: what runs, and what it is told to lie about; what survives it is its `Disk`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.lab.simulate.disk import Disk
from shoal.lab.simulate.judge import Violation
from shoal.lab.simulate.peer_rounds import PeerRounds
from shoal.lab.simulate.watch import LinkTalk, Watch
from shoal.node.state.chunk_requests import WINDOW_LIMIT_CHUNKS
from shoal.protocol.early import EARLY_LIMIT_MESSAGES
from shoal.protocol.enlisting import BOOK_LIMIT
from shoal.protocol.facts import READIES_LIMIT
from shoal.protocol.identity import Identity
from shoal.protocol.membership import PEER_LIMIT, RELAY_LIMIT
from shoal.protocol.messages import MEMBER_LIMIT, Message
from shoal.protocol.round import RoundMachine
from shoal.swarm.lanes.chunks import FETCH_LIMIT, REQUEST_LIMIT

if TYPE_CHECKING:
    from shoal.lab.simulate.simulation import Simulation

ASLEEP_LIMIT_MESSAGES = 8192
"""The sockets of a process that does not run take so many messages before they are full; the rest is lost."""
SERVED_LIMIT_FRAMES = 2 * WINDOW_LIMIT_CHUNKS
"""Frames that one peer may have to come from another: a window of it, and one that it has given up."""

Queue = Callable[["SimulatedPeer"], int]


class SimulatedPeer:
    """A peer by number. `up`: its process is there; `host_up`: its machine is; `hung`: it is there and does not run."""

    def __init__(self, swarm: Simulation, number: int, identity: Identity, disk: Disk, train_s: float) -> None:
        self.swarm = swarm
        self.number = number
        self.identity = identity
        self.id = identity.peer_id
        self.disk = disk
        self.train_s = train_s
        self.rounds: int | None = None
        self.life = 0
        self.up = self.hung = self.gone = False
        self.host_up = True
        self.silent_since = 0.0
        self.disturbed_at = 0.0
        self.woke_at = float("-inf")
        self.lies: set[str] = set()
        self.asleep: deque[tuple[int, object]] = deque(maxlen=ASLEEP_LIMIT_MESSAGES)
        self._asked_to_pause: bool | None = None
        self.watch: Watch
        self.peer_rounds: PeerRounds

    @property
    def running(self) -> bool:
        """True if its process is there and runs."""
        return self.up and not self.hung

    def start(self) -> None:
        """Bring the process up, with what is on disk."""
        self.up = self.host_up = True
        self.hung = False
        self.life += 1
        self.disk.open()
        self.disk.incarnation += 1
        self.watch = Watch(self)
        self.peer_rounds = PeerRounds(self)
        self.peer_rounds.start()

    def stop(self) -> None:
        """The process is gone."""
        self.up = self.hung = False
        self.life += 1
        self.asleep.clear()
        self._asked_to_pause = None
        self.watch.links.clear()
        self.peer_rounds.stop()
        self.disk.tears = None
        self.disk.close()
        self.swarm.donations.ended(self)

    def tick(self, life: int) -> None:
        """Do what is due, and come again."""
        if life != self.life or not self.up:
            return
        swarm = self.swarm
        if not self.hung:
            now = swarm.timeline.now
            self.watch.tick(now)
            self.peer_rounds.tick(now)
            self.check_queues()
            swarm.look_at_phase(self)
        swarm.timeline.after(swarm.tick_s, self.tick, life)

    def receive(self, sender: int, message: object) -> None:
        """A message arrived over the link to `sender`, if there is one."""
        if self.hung:
            self.asleep.append((sender, message))
        elif isinstance(message, LinkTalk):
            self.watch.receive(sender, message)
        elif self.peer_rounds.takes(message):
            self.watch.seen(sender)
            self.peer_rounds.take(sender, message)
        else:
            assert isinstance(message, Message)
            self.watch.seen(sender)
            self.peer_rounds.hear(sender, message)
        self.swarm.look_at_phase(self)

    def wake(self) -> None:
        """It runs again, and reads first what has arrived meanwhile."""
        self.hung, self.woke_at = False, self.swarm.timeline.now
        waiting = list(self.asleep)
        self.asleep.clear()
        for sender, message in waiting:
            self.receive(sender, message)
        if self._asked_to_pause is not None:
            asked, self._asked_to_pause = self._asked_to_pause, None
            self.pause(paused=asked)

    def pause(self, *, paused: bool = True) -> None:
        """The user wants the accelerator, or gives it back; a process that hangs takes that up when it runs again."""
        if self.hung:
            self._asked_to_pause = paused
        else:
            self.peer_rounds.pause(paused=paused)

    def check_queues(self) -> None:
        """Raises Violation for a table that is longer than its limit."""
        for name, (limit, size) in QUEUES.items():
            found = size(self)
            if found > limit:
                raise Violation("bounded queues", f"{found} {name} at peer {self.number}; the limit is {limit}")


def _readies(peer: SimulatedPeer) -> int:
    machine: RoundMachine | None = peer.peer_rounds.machine
    return 0 if machine is None else len(machine._gathering._readies)


def _votes(peer: SimulatedPeer) -> int:
    machine: RoundMachine | None = peer.peer_rounds.machine
    return 0 if machine is None else sum(len(row) for row in machine.agreement._votes.values())


def _reports(peer: SimulatedPeer) -> int:
    machine: RoundMachine | None = peer.peer_rounds.machine
    return 0 if machine is None else sum(len(row) for row in machine._facts.reports.values())


QUEUES: dict[str, tuple[int, Queue]] = {
    "messages of later rounds": (EARLY_LIMIT_MESSAGES, lambda peer: peer.peer_rounds.member.early),
    "messages to a process that does not run": (ASLEEP_LIMIT_MESSAGES, lambda peer: len(peer.asleep)),
    "pings sent for others": (RELAY_LIMIT, lambda peer: len(peer.watch.machine._relays)),
    "watched peers": (PEER_LIMIT, lambda peer: len(peer.watch.machine._peers)),
    "announcements": (READIES_LIMIT + MEMBER_LIMIT, _readies),
    "votes": (64 * MEMBER_LIMIT, _votes),
    "transfers": (FETCH_LIMIT, lambda peer: len(peer.peer_rounds.transfers)),
    "chunks asked for": (REQUEST_LIMIT, lambda peer: sum(one.owed for one in peer.peer_rounds.transfers)),
    "frames to be served": (MEMBER_LIMIT * SERVED_LIMIT_FRAMES, lambda peer: peer.peer_rounds.serving.waiting),
    "reports": (64 * MEMBER_LIMIT, _reports),
    "enlistments": (BOOK_LIMIT, lambda peer: len(peer.peer_rounds.member.enlistments)),
}
"""Every table of a peer that others can make longer: its name, its limit in entries, and how long it is."""
