"""A sampler without a policy of its own: a child process that has an engine draw its groups, and scores them.

Run by the daemon in place of `agent_process` for `--rollouts sample --engine URL`, with the same line to it. It holds
no model, and imports no torch. A round is as many groups as the swarm's manifest or the user says; one that the engine
does not manage is left out, and the next round asks other tasks. Nothing that the engine does ends the process.

The label of a group, its policy's version, is what the engine said with the completions themselves.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Final

from shoal.node.option import HostPort
from shoal.node.pipe import SUMMARY_LIMIT_CHARS
from shoal.node.sapo.agent_messages import Begin, Ready, RoundReport, Waiting
from shoal.node.sapo.completions import TOKEN_CHARS, Completion, Prompt, Reply, version_of
from shoal.node.sapo.daemon_line import DaemonLine, DaemonSharing, run
from shoal.node.sapo.dialogue import as_said, transcript
from shoal.node.sapo.engine_client import REQUEST_DEADLINE_S, EngineClient
from shoal.node.sapo.groups import JudgedGroup, all_known, mean
from shoal.node.sapo.scoring import Scorer
from shoal.node.sapo.tasks import Task, TaskSource, makeable
from shoal.protocol.errors import LocalError
from shoal.protocol.rollouts import COMPLETION_LIMIT, SAMPLING_SEEDS, Sampling, sampling_seed

IN_FLIGHT: Final = 4
"""Groups that are drawn at a time: an engine that batches has some, and one that does not has them wait."""
TURN_SEEDS: Final = COMPLETION_LIMIT
"""The seeds of a turn's completions are so far from those of the next."""


@dataclass(slots=True, kw_only=True)
class DrawnDialogue:
    """A dialogue that an engine draws. spent: of the tokens that it may have, as far as one can tell from here."""

    said: list[str]
    replies: list[str]
    spent: int = 0


class Sampler:
    """One node's sampler, from `Begin` to its end."""

    def __init__(self, begin: Begin, line: DaemonLine, *, source: TaskSource, scorer: Scorer) -> None:
        if begin.engine is None:
            raise LocalError("a sampler without an engine")
        self._begin = begin
        self._line = line
        self._source = source
        self._scorer = scorer
        self._sharing = DaemonSharing(begin, line, source=source, scorer=scorer)
        self._round = begin.announced
        self._client = EngineClient(
            HostPort(*begin.engine),
            max_tokens=begin.rollouts.completion_tokens,
            temperature=begin.rollouts.temperature,
            stopping=line.stopping,
            rest=line.rest,
            told=lambda text: line.send(Waiting(reason=text[:SUMMARY_LIMIT_CHARS])),
        )
        line.send(Ready(round=self._round, tasks=tuple(source.table.kinds), scorable=tuple(sorted(source.scorable))))

    def run(self) -> None:
        """Make rounds until stopped, or until all are made. Raises Stopped."""
        rounds = self._begin.rounds
        pool = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="engine")
        try:
            while rounds is None or self._round < rounds:
                self._line.rest()
                self._make_round(pool)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _make_round(self, pool: ThreadPoolExecutor) -> RoundReport:
        began = time.monotonic()
        draw = partial(self._source.draw, self._begin.swarm_id, self._begin.me, self._round)
        tasks = islice(makeable(draw), self._begin.rollouts.local)
        rewards: list[float] = []
        made = informative = tokens = 0
        drawing = {pool.submit(self._draw, task): task for task in tasks}
        for one in as_completed(drawing):
            drawn = one.result()
            if drawn is not None and drawing[one].answering is not None:
                drawn = self._go_on(pool, drawing[one], drawn)
            if drawn is None:
                continue
            tokens += drawn.tokens
            group = self._scored(drawing[one], drawn)
            if group is None:
                continue
            self._sharing.offer([group])
            made += 1
            informative += len(set(group.rewards)) > 1
            rewards += group.rewards
        report = RoundReport(
            round=self._round,
            reward=mean(rewards),
            local=made,
            informative=informative,
            generated_tokens=tokens,
            seconds=time.monotonic() - began,
        )
        self._line.end_round(report, self._begin.role)
        self._round += 1
        return report

    def _draw(self, task: Task) -> Reply | None:
        prompt = self._prompt(task, (), ())
        if prompt is None:
            return None
        return self._client.group(prompt, self._begin.rollouts.group_size, self._seed(task))

    def _seed(self, task: Task) -> int:
        return sampling_seed(self._begin.swarm_id, self._begin.me, self._round, task.ref.index)

    def _go_on(self, pool: ThreadPoolExecutor, task: Task, first: Reply) -> Reply | None:
        """Have the dialogues of a group, of which the first turn is drawn, go on turn by turn to their ends.

        None if their policy changes, the engine does not manage, or all of it takes too long. The environment answers
        here, in the thread in which it can be interrupted.
        """
        ends_at, tokens = time.monotonic() + REQUEST_DEADLINE_S, first.tokens
        dialogues = [DrawnDialogue(said=[], replies=[]) for _ in first.completions]
        newest = dict(enumerate(first.completions))
        while newest:
            turns: dict[Future[Reply | None], int] = {}
            for at, completion in newest.items():
                one = dialogues[at]
                one.said.append(as_said(completion.text))
                one.spent += completion.least_tokens
                prompt = None if completion.cut else self._next_prompt(task, one)
                if prompt is not None:
                    seed = (self._seed(task) + at + TURN_SEEDS * len(one.said)) % SAMPLING_SEEDS
                    room = self._room(task, one, prompt)
                    turns[pool.submit(self._client.group, prompt, 1, seed, max_tokens=room)] = at
            newest = {}
            for turn, at in turns.items():
                drawn = turn.result()
                if drawn is None or drawn.policy != first.policy:
                    return None
                tokens += drawn.tokens
                (newest[at],) = drawn.completions
            if newest and time.monotonic() > ends_at:
                self._line.send(
                    Waiting(reason=f"a group's dialogues took the engine more than {REQUEST_DEADLINE_S:g} s")
                )
                return None
        texts = [transcript(one.said, one.replies) for one in dialogues]
        return Reply(
            policy=first.policy, completions=tuple(Completion(text=text, drawn=None) for text in texts), tokens=tokens
        )

    def _next_prompt(self, task: Task, dialogue: DrawnDialogue) -> Prompt | None:
        """Have the environment answer, and return what the engine goes on from; None where the dialogue is over."""
        assert task.answering is not None
        reply = task.answering(dialogue.said)
        if reply is None:
            return None
        prompt = self._prompt(task, dialogue.said, [*dialogue.replies, reply])
        spent = dialogue.spent + len(reply) // TOKEN_CHARS + 1
        if prompt is None or self._room(task, replace(dialogue, spent=spent), prompt) < 1:
            return None
        dialogue.replies.append(reply)
        dialogue.spent = spent
        return prompt

    def _room(self, task: Task, dialogue: DrawnDialogue, prompt: Prompt) -> int:
        """How many tokens are left for the policy in a dialogue that goes on from `prompt`."""
        return self._begin.rollouts.completion_tokens - dialogue.spent

    def _prompt(self, task: Task, said: Sequence[str], replies: Sequence[str]) -> Prompt | None:
        """Return what the engine goes on from; None if that cannot be said. replies: as many as `said`."""
        turns = [f"\n{text}\n{reply}\n" for text, reply in zip(said, replies, strict=True)]
        return task.question + "".join(turns)

    def _scored(self, task: Task, drawn: Reply) -> JudgedGroup | None:
        texts = tuple(one.text for one in drawn.completions)
        rewards = all_known(self._scorer.score_each([(task, text) for text in texts], own=True))
        if rewards is None:
            return None
        return JudgedGroup(
            task=task,
            texts=texts,
            rewards=rewards,
            origin=None,
            round=self._round,
            policy_version=version_of(drawn.policy),
            sampling=sampling_of(drawn) if self._begin.rollouts.labels else None,
        )


def sampling_of(drawn: Reply) -> Sampling:
    """The label that travels with a group: with tokens if all of its completions have them."""
    each = tuple(one.drawn for one in drawn.completions if one.drawn is not None)
    return Sampling(policy=drawn.policy, drawn=each if len(each) == len(drawn.completions) else ())


def make_rounds(begin: Begin, line: DaemonLine, source: TaskSource, scorer: Scorer) -> None:
    """Be the sampler that `begin` says, to its end."""
    Sampler(begin, line, source=source, scorer=scorer).run()


if __name__ == "__main__":
    run(make_rounds)
