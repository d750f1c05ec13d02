"""A sampler of averaged policies whose groups an engine draws: each certified policy is handed to the engine.

Run by the daemon in place of `agent_process` for `--rollouts sample --engine URL` in a swarm that averages its policy.
It holds the parameters on the host, writes each newest policy beside its other files in the layout of Hugging Face, and
has the engine load it before it has it draw another group. An engine that has been started again has another policy:
what that drew is thrown away, and the newest is loaded anew. So every group is of the policy that it names.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from shoal.node.pipe import EXIT_ORPHANED
from shoal.node.sapo.agent_messages import Begin
from shoal.node.sapo.completions import Prompt, Reply
from shoal.node.sapo.daemon_line import DaemonLine, run
from shoal.node.sapo.following import Following
from shoal.node.sapo.groups import JudgedGroup
from shoal.node.sapo.policies import PolicyLimits, load_policy, whole
from shoal.node.sapo.policy import Policy
from shoal.node.sapo.policy_export import ExportingPolicy
from shoal.node.sapo.sampler_process import IN_FLIGHT, DrawnDialogue, Sampler
from shoal.node.sapo.scoring import Scorer
from shoal.node.sapo.tasks import Task, TaskSource
from shoal.node.sapo.turns import context_of
from shoal.node.state.store import disk_errors
from shoal.node.workloads.causal_lm_model import EXPORT_FOLDER
from shoal.protocol.errors import ConfigError, LocalError, NetworkError, RemoteError

FOLDER = "engine"
"""Beside the agent's other files: the policy that the engine was told to load, by its version."""


@dataclass(slots=True, kw_only=True)
class _Held:
    """The policy as it is here. version: see `Followed`."""

    policy: Policy
    version: int | None = None


class FollowingSampler(Sampler):
    """One node's sampler by an engine that follows, from `Begin` to its end."""

    def __init__(self, begin: Begin, line: DaemonLine, *, source: TaskSource, scorer: Scorer) -> None:
        """Raises ConfigError for a policy that no engine reads."""
        if begin.averages is None:
            raise LocalError("an engine is to follow, and policies are not averaged")
        limits = PolicyLimits.of(begin.rollouts, seed=begin.seed, device="cpu", data=begin.data)
        policy = whole(begin.policy, load_policy(begin.policy, begin.options).build(limits))
        if not isinstance(policy, ExportingPolicy):
            raise ConfigError(
                f"--engine: the policy {begin.policy!r} has no format that an engine reads; without --engine the node "
                "samples from it itself"
            )
        self._exported = policy
        self._held = _Held(policy=policy)
        self._data_dir = Path(begin.averages)
        self._folder = Path(begin.folder) / FOLDER
        self._loaded: int | None = None
        self._written: int | None = None
        """The policy whose files lie whole where the engine is to read them."""
        self._policy = ""  # as the engine names what it loaded
        super().__init__(begin, line, source=source, scorer=scorer)

    def run(self) -> None:
        """Make rounds until stopped, or until the node has ended. Raises Stopped."""
        pool = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="engine")
        try:
            with Following(self._held, self._data_dir, replays=False, on_fresh=self._forget_loaded) as beside:
                while True:
                    self._line.rest()
                    beside.refresh()
                    while not self._hand_over():
                        beside.refresh()
                    report = self._make_round(pool)
                    if not beside.count(report, group_size=self._begin.rollouts.group_size):
                        break
            if not beside.over:  # the node does not answer; if it is still there, it starts another agent
                os._exit(EXIT_ORPHANED)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _forget_loaded(self) -> None:
        """Have the engine load the next policy, whatever its number: the one that it has is of another history."""
        self._loaded = self._written = None

    def _hand_over(self) -> bool:
        """Have the engine stand on the newest policy; False if it did not take it. Raises Stopped, StorageError."""
        version = self._held.version
        if version is None or version == self._loaded:
            return True
        folder = self._folder / str(version)
        if version != self._written:
            with disk_errors(self._folder):
                shutil.rmtree(self._folder, ignore_errors=True)  # what the engine has read lies in its memory
                folder.mkdir(parents=True)
                self._exported.export(folder)
            self._written = version
        try:
            self._policy = self._client.load((folder / EXPORT_FOLDER).absolute(), version)
        except NetworkError:
            return False
        except RemoteError:  # perhaps for what became of the files
            self._written = None
            return False
        self._loaded, self._written = version, None
        return True

    def _prompt(self, task: Task, said: Sequence[str], replies: Sequence[str]) -> Prompt | None:
        """The tokens that trainers have for it, a chat template's among them."""
        return context_of(self._held.policy, task, said, replies)

    def _room(self, task: Task, dialogue: DrawnDialogue, prompt: Prompt) -> int:
        """See `Sampler`: here the tokens are known."""
        first = self._held.policy.encode_prompt(task.question)
        return self._begin.rollouts.completion_tokens - (len(prompt) - len(first))

    def _scored(self, task: Task, drawn: Reply) -> JudgedGroup | None:
        if drawn.policy != self._policy:
            self._loaded = None
            return None
        return super()._scored(task, drawn)


def make_rounds(begin: Begin, line: DaemonLine, source: TaskSource, scorer: Scorer) -> None:
    """Be the sampler that `begin` says, to its end."""
    FollowingSampler(begin, line, source=source, scorer=scorer).run()


if __name__ == "__main__":
    run(make_rounds)
