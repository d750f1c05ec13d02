"""The agent: a child process that holds a node's policy, makes its rounds, and judges what others offer.

Run by the daemon as ``python -P -m shoal.node.sapo.agent_process SOCKET`` with one inherited descriptor, the socket
pair of `agent_messages`. It opens nothing that a peer could reach and has no keys: peers' text is scored here, or in
the sandbox that it starts.

Two threads. The main one generates, judges and trains. The other reads the socket (`daemon_line`), and when the daemon
is gone (end of stream) ends the process at once. What that loses is at most the rounds since the last file of
`learner_state`.
"""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import torch

from shoal.node.pipe import EXIT_ORPHANED, SUMMARY_LIMIT_CHARS
from shoal.node.sapo import learner_state
from shoal.node.sapo.agent_messages import Begin, Ready, RoundReport, Saved, Teaching
from shoal.node.sapo.averaging import Averaging
from shoal.node.sapo.daemon_line import DaemonLine, DaemonSharing, Stopped, run
from shoal.node.sapo.families import load_choices
from shoal.node.sapo.following import Following
from shoal.node.sapo.held_out import HeldOut, held_out_tasks
from shoal.node.sapo.learner import DrawTask, Learner, LearnerSettings
from shoal.node.sapo.past_policies import PastPolicies
from shoal.node.sapo.policies import PolicyLimits, load_policy, whole
from shoal.node.sapo.replay import Replayer
from shoal.node.sapo.scoring import Scorer
from shoal.node.sapo.tasks import TaskSource
from shoal.node.sapo.unfinished import UnfinishedFile
from shoal.node.sapo.updates import UpdateSettings
from shoal.node.sapo.warm_up import warm_up
from shoal.protocol.errors import StorageError
from shoal.protocol.rollouts import assigned_draws, assigned_seed

SAVE_ROUNDS: Final = 4
JUDGE_WAIT_S: Final = 10.0
LESSONS_INDEX: Final = 2
"""Of the seed of an agent's own lessons: agents that were taught the same have less to learn from one another."""


def lessons_seed(begin: Begin) -> int:
    """The seed of an agent's lessons: of its own, but where what comes of them is to be everybody's policy."""
    return begin.seed if begin.averages else assigned_seed(begin.swarm_id, begin.me, begin.seed, LESSONS_INDEX)


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
        draw = partial(source.draw, begin.swarm_id, begin.me)
        factory = load_policy(begin.policy, begin.options)
        limits = PolicyLimits.of(section, seed=begin.seed, device=begin.device, data=begin.data)
        policy = whole(begin.policy, factory.build(limits))
        self.learner = Learner(
            policy,
            LearnerSettings(
                local=section.local,
                external=section.external if begin.role == "train" else 0,
                group_size=section.group_size,
                over_provision=section.over_provision,
                label=begin.policy if section.labels else None,
                trains=begin.role == "train",
                updates=UpdateSettings(
                    together=(section.local + section.external) * section.group_size,
                    learning_rate=begin.learning_rate,
                    optimizer=begin.optimizer,
                    gradient_limit=begin.clip_norm,
                    terms=section.external_terms,
                ),
            ),
            draw=draw,
            score=partial(scorer.score_each, own=True),
            sharing=self._sharing,
            draws=partial(assigned_draws, begin.swarm_id, begin.me),
            handed_out=self._keep_unfinished,
        )
        restored, refused = learner_state.restore(self.learner, self._folder, policy=begin.policy)
        self._unfinished = UnfinishedFile(folder=self._folder, policy=begin.policy)
        begun = self._go_on(draw, refused)
        reward = None
        if restored is None and begin.role != "judge" and not self._follows and factory.warm_up is not None:
            settings = factory.warm_up
            report = warm_up(
                policy,
                load_choices(section.tasks),
                settings,
                score=partial(scorer.score_each, own=True),
                seed=lessons_seed(begin),
                tell=lambda progress: line.send(
                    Teaching(
                        done=progress.updates,
                        limit=settings.updates,
                        reward=progress.reward,
                        wanted=settings.reward,
                        left_s=progress.left_s,
                    )
                ),
            )
            reward = report.reward
        # A task of a round that was announced is not answered a second time: others would take that for a duplicate.
        self.learner.round = max(self.learner.round, begin.announced, begun)
        self._saved_round = self.learner.round if restored is not None else -1
        self._held_out = HeldOut(
            held_out_tasks(source),
            every=begin.evaluate_rounds if begin.role == "train" else 0,
            together=section.local * section.group_size,
            score=partial(scorer.score_each, own=True),
            rest=line.rest,
        )
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

    def _go_on(self, draw: DrawTask, refused: list[str]) -> int:
        """Take up groups that an earlier process began. Returns a round that comes after all of theirs."""
        try:
            groups = self._unfinished.restore(self.learner.policy, draw)
        except StorageError as error:
            refused.append(str(error))
            return 0
        self.learner.generator.go_on_with(groups)
        return max((group.round + 1 for group in groups), default=0)

    def _keep_unfinished(self) -> None:
        try:
            self._unfinished.save(self.learner.generator.under_way)
        except StorageError as error:
            failure = f"groups that are begun would not go on after a restart: {error}"
            self._line.send(Saved(round=self.learner.round, failure=failure[:SUMMARY_LIMIT_CHARS]))

    def run(self) -> None:
        """Make rounds until all are made; save what was learnt. Raises Stopped, and what the policy raises."""
        self._save()  # the warm-up
        try:
            if self._begin.averages is None:
                self._make_rounds()
            else:
                with self._place(Path(self._begin.averages)) as beside:
                    if self._begin.rollouts.replays and self._begin.role != "sample":
                        self._replay_by(beside.past)
                    self._make_rounds(beside)
        except Stopped:
            self._save()
            raise
        self._save()

    def _place(self, data_dir: Path) -> Averaging | Following:
        replays = self._begin.rollouts.replays
        if self._follows:
            return Following(self.learner, data_dir, replays=replays, judges=replays and self._begin.role == "judge")
        return Averaging(self.learner, data_dir, replays=replays)

    def _replay_by(self, past: PastPolicies) -> None:
        replayer = Replayer(
            self.learner.policy,
            past,
            swarm_id=self._begin.swarm_id,
            together=self._begin.rollouts.local * self._begin.rollouts.group_size,
        )
        self._sharing.replay_by(replayer.replay, lambda: replayer.rounds)

    def _make_rounds(self, beside: Averaging | Following | None = None) -> None:
        """Until all are made, or there is no node any more whose rounds are beside them. Raises Stopped."""
        rounds = self._begin.rounds
        while rounds is None or self.learner.round < rounds:
            self._line.rest()
            if isinstance(beside, Following):
                beside.refresh()
            if self._held_out.is_due(self.learner.round):
                self._evaluate()
            report = self._make_round()
            if self.learner.round - self._saved_round >= SAVE_ROUNDS:
                self._save()
            if beside is not None and not beside.count(report, group_size=self._begin.rollouts.group_size):
                if not beside.over:  # the node does not answer; if it is still there, it starts another agent
                    self._save()
                    os._exit(EXIT_ORPHANED)
                return
        if self._held_out.is_behind(self.learner.round):
            self._evaluate()

    def _evaluate(self) -> None:
        self._line.send(self._held_out.evaluate(self.learner.policy, self.learner.round))

    def _make_round(self) -> RoundReport:
        began = time.monotonic()
        self._sharing.begin_round()
        report = self._judge_round() if self._begin.role == "judge" else self.learner.run_round()
        self._line.end_round(msgspec.structs.replace(report, seconds=time.monotonic() - began), self._begin.role)
        return report

    def _judge_round(self) -> RoundReport:
        groups = self._sharing.take(max(1, self._begin.rollouts.external), wait_s=JUDGE_WAIT_S)
        self.learner.round += 1
        return RoundReport(round=self.learner.round - 1, external=len(groups), informative=len(groups))

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


def make_rounds(begin: Begin, line: DaemonLine, source: TaskSource, scorer: Scorer) -> None:
    """Be the agent that `begin` says, to its end."""
    if begin.threads:
        torch.set_num_threads(begin.threads)
    Agent(begin, line, source=source, scorer=scorer).run()


if __name__ == "__main__":
    run(make_rounds)
