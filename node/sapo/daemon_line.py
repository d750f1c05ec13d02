"""A child's line to its daemon where rollouts are made: orders, groups that go out, and others' groups that come in.

What makes rounds is one of two programs: `agent_process`, which holds a policy, or `sampler_process`, which draws from
an engine and needs no tensors. This module does not import torch.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from shoal.node.pipe import EXIT_FAILED, ParentPipe, Pause, Resume, Stop, describe
from shoal.node.sapo.agent_messages import (
    WAIT_LIMIT_S,
    Asked,
    Begin,
    Delivered,
    Finished,
    Judged,
    Made,
    Order,
    Pulled,
    Role,
    RoundReport,
    Take,
    unpack_order,
)
from shoal.node.sapo.families import load_choices
from shoal.node.sapo.groups import JudgedGroup, announced
from shoal.node.sapo.judge import Judge, Replay
from shoal.node.sapo.scoring import Scorer
from shoal.node.sapo.tasks import TaskSource
from shoal.protocol.errors import LocalError
from shoal.protocol.manifest_rollouts import GROUPS_LIMIT

ORDER_QUEUE_LIMIT: Final = 2 * GROUPS_LIMIT
"""More than a delivery, which is the most that waits to be read."""
WORTH_LEAST_S: Final = 1.0
"""Others' groups are waited for so long in any case: a machine that is busy answers in that."""


logger = logging.getLogger(__name__)


class Stopped(Exception):
    """The daemon wants the process to end."""


class DaemonLine(ParentPipe[Order]):
    """The agent's end of the pipe: a pause and a stop have their effect between two pieces of work.

    stopping: is set once the daemon wants the process to end.
    """

    def __init__(self, descriptor: int) -> None:
        self.stopping = threading.Event()
        self._goes_on = threading.Event()
        self._goes_on.set()
        super().__init__(descriptor, unpack_order, who="agent", queued=ORDER_QUEUE_LIMIT)

    def receive(self) -> Order:
        """Wait for an answer or an order. Raises Stopped."""
        order = super().receive()
        if isinstance(order, Stop):
            raise Stopped
        return order

    def rest(self) -> None:
        """Between two pieces of work: wait while the node is paused. Raises Stopped."""
        self._goes_on.wait()
        if self.stopping.is_set():
            raise Stopped

    def end_round(self, report: RoundReport, role: Role) -> None:
        """Send the report of a round. Who makes groups for others alone rests until it is told to go on.

        By then the daemon has counted those of this round.
        """
        if role == "sample":
            self._goes_on.clear()
            if self.stopping.is_set():
                self._goes_on.set()
        self.send(report)

    def take(self, order: Order) -> None:
        """Note a pause, a resumption or a stop at once; the rest is queued, a stop too, for whoever waits."""
        if isinstance(order, Pause):
            self._goes_on.clear()
            return
        if isinstance(order, Stop):
            self.stopping.set()
        if isinstance(order, Stop | Resume):
            self._goes_on.set()
        if not isinstance(order, Resume):
            super().take(order)


class DaemonSharing:
    """`Sharing` through the daemon: own groups are announced there, others' come from there and are judged here."""

    def __init__(self, begin: Begin, line: DaemonLine, *, source: TaskSource, scorer: Scorer) -> None:
        self._me = begin.me
        self._line = line
        self._judge = Judge(swarm_id=begin.swarm_id, source=source, score=scorer.score_each)
        self._labelled = begin.rollouts.replays and begin.role == "sample"
        self._policies: Callable[[], tuple[int, ...]] | None = None
        self._began, self._drawn, self._drawn_s = time.monotonic(), 0, 0.0

    def begin_round(self) -> None:
        """Note that the agent begins to draw groups: what others' are worth waiting for is measured by its own."""
        self._began, self._drawn, self._drawn_s = time.monotonic(), 0, 0.0

    def replay_by(self, replay: Replay, policies: Callable[[], tuple[int, ...]]) -> None:
        """Have groups gone through again by `replay` from here on. policies: gives the versions that it is able to."""
        self._judge.replay, self._policies = replay, policies

    def offer(self, groups: Sequence[JudgedGroup]) -> None:
        """See `Sharing`."""
        self._drawn += len(groups)
        self._drawn_s = time.monotonic() - self._began
        for group in groups:
            try:
                announcement, encoded = announced(group, self._me, labelled=self._labelled)
            except LocalError as error:
                logger.warning("a group is not shared: %s", error)
                continue
            self._judge.note_own(group.task, group.texts)
            self._line.send(Made(announcement=announcement, group=encoded, rewards=group.rewards))
            self._line.send(Asked(digest=announcement.digest, question=group.task.question))
        self._line.rest()

    def take(self, count: int, *, wait_s: float = 0.0) -> list[JudgedGroup]:
        """See `Sharing`. wait_s: how long to wait for offers."""
        self._line.rest()
        limit_s = worth_waiting_s(count, self._drawn, self._drawn_s)
        policies = None if self._policies is None else self._policies()
        self._line.send(Take(count=count, wait_s=wait_s, limit_s=limit_s, policies=policies))
        taken: list[JudgedGroup] = []
        refused = True
        while refused and (pulled := self._delivery()):
            judged = self._judge.judge(
                [(one.offer, one.group) for one in pulled],
                to_replay={one.offer.digest for one in pulled if one.replay},
            )
            for came, one in zip(pulled, judged, strict=True):
                if one.question:
                    self._line.send(Asked(digest=came.offer.digest, question=one.question))
            self._line.send(Judged(verdicts=tuple(one.verdict for one in judged)))
            accepted = [one.group for one in judged if one.group is not None]
            taken += accepted
            refused = len(accepted) < len(judged)
        return taken

    def _delivery(self) -> list[Pulled]:
        came = []
        while isinstance(order := self._line.receive(), Pulled):
            came.append(order)
        if not isinstance(order, Delivered):
            raise LocalError(f"a {type(order).__name__} where groups were asked for")
        return came


def worth_waiting_s(count: int, drawn: int, drawn_s: float) -> float | None:
    """Return how long to wait for `count` groups of others at most: as long as it takes to draw as many here.

    drawn, drawn_s: groups that were drawn in this round, and in which time; None where none were.
    """
    return min(WAIT_LIMIT_S, max(WORTH_LEAST_S, count * drawn_s / drawn)) if drawn else None


MakeRounds = Callable[[Begin, DaemonLine, TaskSource, Scorer], None]


def serve(descriptor: int, make_rounds: MakeRounds) -> int:
    """Serve one daemon over an inherited descriptor until it wants no more; return the exit status."""
    line = DaemonLine(descriptor)
    try:
        begin = line.receive()
        if not isinstance(begin, Begin):
            raise LocalError(f"{type(begin).__name__} before Begin")
        source = TaskSource(load_choices(begin.rollouts.tasks))
        with Scorer(source) as scorer:
            scorer.check()
            make_rounds(begin, line, source, scorer)
        line.send(Finished())
        while True:
            line.receive()
    except Stopped:
        return 0
    except Exception as error:  # the boundary of the user's code: whatever it raised goes to the user
        line.send(describe(error))
        return EXIT_FAILED


def run(make_rounds: MakeRounds) -> None:
    """Serve the daemon whose descriptor is the program's argument, and exit."""
    status = serve(int(sys.argv[1]), make_rounds)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # all is written; taking torch down in order would only take time
