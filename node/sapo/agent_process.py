"""The agent: a child process that holds a node's policy, makes its rounds, and judges what others offer.

Run by the daemon as ``python -P -m shoal.node.sapo.agent_process SOCKET`` with one inherited descriptor, the socket
pair of `agent_messages`. It opens nothing that a peer could reach and has no keys: peers' text is scored here, or in
the sandbox that it starts.

Two threads. The main one generates, judges and trains. The other reads the socket, and when the daemon is gone (end of
stream) ends the process at once. What that loses is at most the rounds since the last file of `learner_state`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import torch

from shoal.node.pipe import EXIT_FAILED, EXIT_ORPHANED, SUMMARY_LIMIT_CHARS, ParentPipe, Pause, Resume, Stop, describe
from shoal.node.sapo import learner_state
from shoal.node.sapo.agent_messages import (
    Asked,
    Begin,
    Delivered,
    Done,
    Finished,
    Judged,
    Made,
    Order,
    Pulled,
    Ready,
    Saved,
    Take,
    unpack_order,
)
from shoal.node.sapo.averaging import Averaging
from shoal.node.sapo.families import load_family
from shoal.node.sapo.following import Following
from shoal.node.sapo.groups import JudgedGroup, rollout_of
from shoal.node.sapo.grpo import GrpoSettings
from shoal.node.sapo.judge import Judge
from shoal.node.sapo.learner import Learner, LearnerSettings, RoundReport
from shoal.node.sapo.policies import PolicyLimits, load_policy
from shoal.node.sapo.scoring import Scorer
from shoal.node.sapo.tasks import TaskChoice, TaskSource
from shoal.node.sapo.updates import UpdateSettings
from shoal.node.sapo.warm_up import warm_up
from shoal.protocol.errors import LocalError, StorageError
from shoal.protocol.manifest_rollouts import GROUPS_LIMIT
from shoal.protocol.offer_book import Offer
from shoal.protocol.rollouts import announce_group, assigned_seed, encode_group
from shoal.protocol.wire import SwarmId

SAVE_ROUNDS: Final = 4
ORDER_QUEUE_LIMIT: Final = 2 * GROUPS_LIMIT
"""More than a delivery, which is the most that waits to be read."""
JUDGE_WAIT_S: Final = 10.0


class Stopped(Exception):
    """The daemon wants the process to end."""


class DaemonLine(ParentPipe[Order]):
    """The agent's end of the pipe: a pause and a stop have their effect between two pieces of work."""

    def __init__(self, descriptor: int) -> None:
        self._stopping = False
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
        if self._stopping:
            raise Stopped

    def take(self, order: Order) -> None:
        """Note a pause, a resumption or a stop at once; the rest is queued, a stop too, for whoever waits."""
        if isinstance(order, Pause):
            self._goes_on.clear()
            return
        if isinstance(order, Stop):
            self._stopping = True
        if isinstance(order, Stop | Resume):
            self._goes_on.set()
        if not isinstance(order, Resume):
            super().take(order)


class DaemonSharing:
    """`Sharing` through the daemon: own groups are announced there, others' come from there and are judged here."""

    def __init__(self, begin: Begin, line: DaemonLine, *, source: TaskSource, scorer: Scorer) -> None:
        self._me = begin.me
        self._line = line
        self._judge = Judge(swarm_id=SwarmId(begin.swarm_id), source=source, score=scorer.score_each)

    def offer(self, groups: Sequence[JudgedGroup]) -> None:
        """See `Sharing`."""
        for group in groups:
            try:
                rollout = rollout_of(group, self._me)
                encoded = encode_group(rollout)
                announcement = announce_group(rollout, encoded, group.rewards)
            except LocalError as error:
                print(f"agent: a group is not shared: {error}", file=sys.stderr, flush=True)
                continue
            self._judge.note_own(group.texts)
            self._line.send(Made(announcement=announcement, group=encoded, rewards=group.rewards))
            self._line.send(Asked(digest=announcement.digest, question=group.prompt))
        self._line.rest()

    def take(self, count: int, *, wait_s: float = 0.0) -> list[JudgedGroup]:
        """See `Sharing`. wait_s: how long to wait for offers."""
        self._line.rest()
        self._line.send(Take(count=count, wait_s=wait_s))
        taken: list[JudgedGroup] = []
        refused = True
        while refused and (pulled := self._delivery()):
            judged = self._judge.judge(pulled)
            for (offer, _), one in zip(pulled, judged, strict=True):
                if one.question:
                    self._line.send(Asked(digest=offer.digest, question=one.question))
            self._line.send(Judged(verdicts=tuple(one.verdict for one in judged)))
            accepted = [one.group for one in judged if one.group is not None]
            taken += accepted
            refused = len(accepted) < len(judged)
        return taken

    def _delivery(self) -> list[tuple[Offer, bytes]]:
        came = []
        while isinstance(order := self._line.receive(), Pulled):
            came.append((order.offer, order.group))
        if not isinstance(order, Delivered):
            raise LocalError(f"a {type(order).__name__} where groups were asked for")
        return came


class Agent:
    """One node's agent, from `Begin` to its end."""

    def __init__(self, begin: Begin, line: DaemonLine, *, source: TaskSource, scorer: Scorer) -> None:
        """Builds the policy, and restores it or warms it up. Raises ConfigError."""
        self._begin = begin
        self._line = line
        self._folder = Path(begin.folder)
        self._follows = begin.averages is not None and begin.role != "train"
        self._sharing = DaemonSharing(begin, line, source=source, scorer=scorer)
        section = begin.rollouts
        factory = load_policy(begin.policy, begin.options)
        policy = factory.build(
            PolicyLimits(
                seed=begin.seed,
                completion_tokens=section.completion_tokens,
                temperature=section.temperature,
                device=begin.device,
                data=begin.data,
            )
        )
        self.learner = Learner(
            policy,
            LearnerSettings(
                local=section.local,
                external=section.external if begin.role == "train" else 0,
                group_size=section.group_size,
                trains=begin.role == "train",
                updates=UpdateSettings(
                    learning_rate=begin.learning_rate,
                    gradient_limit=begin.clip_norm,
                    grpo=GrpoSettings(external=section.external_terms),
                ),
            ),
            draw=lambda round, index: source.draw(SwarmId(begin.swarm_id), begin.me, round, index),
            score=partial(scorer.score_many, own=True),
            sharing=self._sharing,
            seed=assigned_seed(SwarmId(begin.swarm_id), begin.me, begin.seed, 0),
        )
        restored, refused = learner_state.restore(self.learner, self._folder, policy=begin.policy)
        reward = None
        if restored is None and begin.role != "judge" and not self._follows and factory.warm_up is not None:
            choices = choices_of(begin)
            report = warm_up(
                policy, choices, factory.warm_up, score=partial(scorer.score_many, own=True), seed=begin.seed
            )
            reward = report.reward
        # A task of a round that was announced is not answered a second time: others would take that for a duplicate.
        self.learner.round = max(self.learner.round, begin.announced)
        self._saved_round = self.learner.round if restored is not None else -1
        line.send(
            Ready(
                round=self.learner.round,
                restored=restored,
                refused="; ".join(refused)[:SUMMARY_LIMIT_CHARS],
                reward=reward,
                tasks=tuple(source.table.kinds),
                scorable=tuple(sorted(source.scorable)),
            )
        )

    def run(self) -> None:
        """Make rounds until stopped, or until all are made; save what was learnt. Raises what the policy raises."""
        self._save()  # the warm-up
        try:
            if self._begin.averages is None:
                self._make_rounds()
            else:
                place = Following if self._follows else Averaging
                with place(self.learner, Path(self._begin.averages)) as beside:
                    self._make_rounds(beside)
        except Stopped:
            self._save()
            return
        self._save()
        self._line.send(Finished())
        while True:
            self._line.receive()

    def _make_rounds(self, beside: Averaging | Following | None = None) -> None:
        """Until all are made, or there is no node any more whose rounds are beside them. Raises Stopped."""
        rounds = self._begin.rounds
        while rounds is None or self.learner.round < rounds:
            self._line.rest()
            report = self._make_round()
            if self.learner.round - self._saved_round >= SAVE_ROUNDS:
                self._save()
            if beside is not None and not beside.count(report, group_size=self._begin.rollouts.group_size):
                if not beside.over:  # the node does not answer; if it is still there, it starts another agent
                    self._save()
                    os._exit(EXIT_ORPHANED)
                return

    def _make_round(self) -> RoundReport:
        began, unencodable = time.monotonic(), self.learner.unencodable.total()
        report = self._judge_round() if self._begin.role == "judge" else self.learner.run_round()
        self._line.send(
            Done(
                round=report.round,
                reward=report.reward if report.local else None,
                local=report.local,
                external=report.external,
                informative=report.informative,
                generated_tokens=report.generated_tokens,
                unencodable=self.learner.unencodable.total() - unencodable,
                seconds=time.monotonic() - began,
            )
        )
        return report

    def _judge_round(self) -> RoundReport:
        groups = self._sharing.take(max(1, self._begin.rollouts.external), wait_s=JUDGE_WAIT_S)
        self.learner.round += 1
        return RoundReport(
            round=self.learner.round - 1,
            reward=0.0,
            local=0,
            external=len(groups),
            informative=len(groups),
            generated_tokens=0,
        )

    def _save(self) -> None:
        """Write what was learnt since the last time, if anything was."""
        if self._saved_round == self.learner.round or self._follows:
            return
        failure = ""
        try:
            learner_state.save(self.learner, self._folder, policy=self._begin.policy)
        except StorageError as error:
            failure = str(error)[:SUMMARY_LIMIT_CHARS]
        self._saved_round = self.learner.round
        self._line.send(Saved(round=self.learner.round, failure=failure))


def choices_of(begin: Begin) -> list[TaskChoice]:
    """The families that the swarm draws from. Raises ConfigError for one that is not to be had here."""
    return [
        TaskChoice(family=load_family(entry.family), config=entry.config, weight=entry.weight)
        for entry in begin.rollouts.tasks
    ]


def serve(descriptor: int) -> int:
    """Serve one daemon over an inherited descriptor; return the exit status."""
    line = DaemonLine(descriptor)
    try:
        begin = line.receive()
        if not isinstance(begin, Begin):
            raise LocalError(f"{type(begin).__name__} before Begin")
        if begin.threads:
            torch.set_num_threads(begin.threads)
        source = TaskSource(choices_of(begin))
        with Scorer(source) as scorer:
            Agent(begin, line, source=source, scorer=scorer).run()
    except Stopped:
        return 0
    except Exception as error:  # the boundary of the user's code: whatever it raised goes to the user
        line.send(describe(error))
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    status = serve(int(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # all is written; taking torch down in order would only take time
