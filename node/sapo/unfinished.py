"""The file of groups that an agent has begun and not handed out, so that they go on after a restart.

    <folder>/unfinished.safetensors    tensors `tokens`, `log_probs`, `versions` (a row for each run: version, tokens),
                                       of all completions after each other; metadata `groups`: `Unfinished` as JSON

It is written each time that groups are handed out, before anybody hears of them: a group that is announced is not in
the file any more, whenever the process ends, and so is never announced twice. What a task asks is not in it, since that
follows from its round and index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from shoal.node.sapo.generation import GeneratedGroup
from shoal.node.sapo.policy import Policy, Rollout
from shoal.node.sapo.tasks import Task
from shoal.node.state.store import disk_errors
from shoal.node.state.tensor_files import DamagedFile, TensorBytes, TensorFile, write_tensors
from shoal.protocol.errors import LocalError, StorageError

NAME = "unfinished.safetensors"
METADATA = "groups"
TOKENS_LIMIT = 1 << 22
"""Of all completions in the file, 8 bytes each: the groups that were begun first have their place."""

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Completion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tokens: Count
    runs: Count
    done: bool
    given: tuple[tuple[Count, Count], ...] = ()
    replies: tuple[str, ...] = ()


class _Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    round: Count
    index: Count
    completions: tuple[_Completion, ...]


class Unfinished(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The groups, the oldest first, and the policy in whose tokens they are."""

    policy: str
    groups: tuple[_Group, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedFile:
    """The place of one agent's unfinished groups. policy: its name."""

    folder: Path
    policy: str

    def save(self, groups: Sequence[GeneratedGroup]) -> None:
        """Have these groups in the file, as far as there is room, and no others. Raises StorageError.

        Where they cannot be written there is no file any more, so that none of an earlier one is handed out twice.
        """
        path = self.folder / NAME
        with disk_errors(self.folder):
            if not groups:
                path.unlink(missing_ok=True)
                return
            self.folder.mkdir(parents=True, exist_ok=True)
        kept = _with_room(groups)
        rollouts = [rollout for group in kept for rollout in group.rollouts]
        tensors = [
            TensorBytes.of("tokens", np.array([token for one in rollouts for token in one.tokens], np.int32)),
            TensorBytes.of("log_probs", np.array([log for one in rollouts for log in one.log_probs], np.float32)),
            TensorBytes.of(
                "versions", np.array([run for one in rollouts for run in one.versions], np.int64).reshape(-1, 2)
            ),
        ]
        unfinished = Unfinished(policy=self.policy, groups=tuple(map(_described, kept)))
        try:
            write_tensors(path, tensors, {METADATA: msgspec.json.encode(unfinished).decode()})
        except StorageError:
            with disk_errors(self.folder):
                path.unlink(missing_ok=True)
            raise

    def restore(self, policy: Policy, draw: Callable[[int, int], Task]) -> list[GeneratedGroup]:
        """The groups in the file, none if there is none. draw: the task of a round and index. Raises StorageError."""
        path = self.folder / NAME
        try:
            file = TensorFile(path)
        except FileNotFoundError:
            return []
        file.check_whole()
        try:
            unfinished = msgspec.json.decode(file.metadata.get(METADATA, ""), type=Unfinished)
        except msgspec.MsgspecError as error:
            raise DamagedFile(f"{path} has no groups: {error}; remove it to begin others") from error
        if unfinished.policy != self.policy:
            raise StorageError(f"{path} is of another policy; remove it to begin other groups")
        arrays = [file.array(name).tolist() for name in ("tokens", "log_probs", "versions")]
        completions = [one for group in unfinished.groups for one in group.completions]
        drawn = sum(one.tokens for one in completions)
        spans = all(len(one.given) == len(one.replies) and _in_order(one.given, one.tokens) for one in completions)
        if not spans or [len(values) for values in arrays] != [drawn, drawn, sum(one.runs for one in completions)]:
            raise DamagedFile(f"{path} has other groups than it says; remove it to begin others")
        tokens, logs, versions = map(iter, arrays)
        groups = []
        for group in unfinished.groups:
            try:
                task = draw(group.round, group.index)
            except LocalError as error:
                raise StorageError(f"{path} has a group of no task ({error}); remove it to begin others") from error
            prompt = policy.encode_prompt(task.question)
            rollouts = tuple(
                Rollout(
                    prompt=prompt,
                    tokens=[*islice(tokens, one.tokens)],
                    log_probs=[*islice(logs, one.tokens)],
                    versions=[(version, count) for version, count in islice(versions, one.runs)],
                    done=one.done,
                    given=[*one.given],
                    replies=[*one.replies],
                    open=not one.done and task.answering is not None,
                )
                for one in group.completions
            )
            groups.append(GeneratedGroup(task=task, round=group.round, rollouts=rollouts))
        return groups


def _in_order(spans: Sequence[tuple[int, int]], tokens: int) -> bool:
    places = [place for span in spans for place in span]
    return places == sorted(places) and places[-1:] <= [tokens]


def _with_room(groups: Sequence[GeneratedGroup]) -> list[GeneratedGroup]:
    kept, room = [], TOKENS_LIMIT
    for group in groups:
        room -= sum(len(rollout.tokens) for rollout in group.rollouts)
        if room < 0:
            break
        kept.append(group)
    return kept


def _described(group: GeneratedGroup) -> _Group:
    return _Group(
        round=group.round,
        index=group.task.ref.index,
        completions=tuple(
            _Completion(
                tokens=len(one.tokens),
                runs=len(one.versions),
                done=one.done,
                given=tuple(one.given),
                replies=tuple(one.replies),
            )
            for one in group.rollouts
        ),
    )
