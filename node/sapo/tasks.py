"""Verifiable tasks: what an agent is asked, how an answer is scored, and which tasks a swarm draws from.

A family makes tasks from (config, seed, index) and nothing else, so that whoever holds a `TaskRef` asks the same
question and scores answers alone: neither the question nor the reward of a peer is ever believed. A family of
your own is one small class, installed under the entry-point group ``shoal.tasks``:

    class Reversal(TaskFamily):
        name = "reversal"
        version = "1"
        scoring = "direct"

        def check(self, config: Config) -> None:
            check_options(self.name, config, {"letters": range(1, 65)})

        def question(self, config: Config, seed: int, index: int) -> str:
            return f"Write backwards: {self._word(config, seed, index)}"

        def score(self, task: Task, text: str) -> float:
            word = self._word(task.config, task.ref.seed, task.ref.index)
            return float(answer_in(text) == word[::-1])

        def solution(self, task: Task) -> str:
            return self._word(task.config, task.ref.seed, task.ref.index)[::-1]

        def _word(self, config: Config, seed: int, index: int) -> str:
            letters = random.Random(f"{seed}/{index}").choices(string.ascii_lowercase, k=config.get("letters", 4))
            return "".join(letters)

    [project.entry-points."shoal.tasks"]
    reversal = "my_package.tasks:Reversal"

`scoring` says how text from peers reaches `score`. The default ``sandbox`` runs it in a process that can do nothing
but compute (see sandbox.py), where the class is imported and made anew. ``direct`` runs it here: a promise that
`score` evaluates nothing and takes time linear in the text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, count
from typing import Annotated, Any, Literal

import blake3
import msgspec

from shoal.node.sapo.sandbox_support import missing_sandbox
from shoal.protocol.errors import ConfigError, LocalError, RemoteError, did_you_mean
from shoal.protocol.identity import PeerId
from shoal.protocol.rollouts import CONFIG_LIMIT_BYTES, TaskRef, assigned_seed
from shoal.protocol.wire import SwarmId, canonical

QUESTION_LIMIT_CHARS = 16_384
CONFIG_LIMIT_ITEMS = 64
"""Keys of a config, and values of one list in it."""
CONFIG_DEPTH_LIMIT = 2
"""Lists in lists."""
CHOICE_LIMIT = 256
"""Choices of one source."""
WEIGHT_LIMIT = 1_000_000
CACHED_TASKS = 1024
INDEX_LIMIT = 4096
"""Indices of one round: twice as many as the groups that a manifest lets a learner begin in it, its own and those in
place of others', since tasks that cannot be made are skipped."""
FAILED_LIMIT = 100
"""Tasks in a row that cannot be made; then there is something wrong with the family."""

ConfigValue = bool | int | float | str | None | Sequence[Any]
Config = Mapping[str, ConfigValue]
"""A family's settings: scalars and lists of them, by name."""

Scoring = Literal["direct", "sandbox"]

_FAMILY_DOMAIN = b"shoal sapo family"
_decode_config = msgspec.msgpack.Decoder(dict[str, Any]).decode


Answering = Callable[[Sequence[str]], str | None]
"""What the environment of a task answers to what was said so far; None where the dialogue is over."""


@dataclass(frozen=True, slots=True)
class Task:
    """One question, and the reference from which anyone makes it again. answering: None for a task of one turn."""

    ref: TaskRef
    question: str
    answering: Answering | None = field(default=None, compare=False, repr=False)

    @property
    def config(self) -> Config:
        """The family's settings that `ref` names."""
        return unpack_config(self.ref.config)


class TaskFamily(ABC):
    """Tasks of one kind. Made by `from_name`, in this process and in the sandbox alike."""

    name: str
    version: str
    """Of generator and scorer together: nodes with other versions do not exchange this family's rollouts."""
    scoring: Scoring = "sandbox"
    scored_by: str = "score"
    """The name of the method that a family's author wrote to score."""
    executes_text: bool = False
    """True where `score` runs the text as a program. Such a text could set its own reward, so only this node's own is
    scored; where this is False, a text that is about to be executed is worth 0."""

    @classmethod
    def from_name(cls, name: str) -> TaskFamily:
        """The family called `name`, for classes that serve several."""
        return cls()

    @property
    def presets(self) -> Mapping[str, Config]:
        """Configs with a name of their own."""
        return {"default": {}}

    def check(self, config: Config) -> None:
        """Raise ConfigError, one line that says what to do, unless `config` is one that `question` can follow."""
        check_options(self.name, config, {})

    @abstractmethod
    def question(self, config: Config, seed: int, index: int) -> str:
        """The question: equal for equal arguments in any process on any machine."""

    @abstractmethod
    def score(self, task: Task, text: str) -> float:
        """The reward of the completion `text`, in [0, 1]. What it raises counts as 0."""

    def warm_up(self, task: Task) -> None:
        """Import what `score` needs, since nothing can be opened where it scores. No text of a peer is near."""
        with suppress(Exception):  # what it raises for no answer at all does not matter
            self.score(task, "")

    @property
    def peer_safe(self) -> bool:
        """True where text from peers can be scored on this machine."""
        return not self.executes_text and (self.scoring == "direct" or missing_sandbox() is None)

    def solution(self, task: Task) -> str | None:
        """An answer of the highest reward, which an untrained policy is taught first; None where none is known."""
        return None

    def answer(self, task: Task) -> str | None:
        """The answer by `solution`. Raises ConfigError where that returns neither a text nor None."""
        found: object = self.solution(task)
        if found is None or isinstance(found, str):
            return found
        raise ConfigError(
            f"solution() of family {self.name!r} returned {type(found).__name__}; correct it, to return a str, or None"
        )

    def make(self, config: Config, seed: int, index: int) -> Task:
        """The task of a checked config. Raises LocalError where the family makes none of it."""
        question = self.question(config, seed, index)
        if not isinstance(question, str) or not 0 < len(question) <= QUESTION_LIMIT_CHARS:
            raise LocalError(f"task family {self.name!r} made no question of 1 to {QUESTION_LIMIT_CHARS} characters")
        ref = TaskRef(family=self.name, version=self.version, config=pack_config(config), seed=seed, index=index)
        return Task(ref=ref, question=question)


# --- configs ---


def pack_config(config: Config) -> bytes:
    """The one encoding of `config`. Raises ConfigError where it is too large or holds what no config may."""
    if len(config) > CONFIG_LIMIT_ITEMS:
        raise ConfigError(f"a task config of {len(config)} settings; give at most {CONFIG_LIMIT_ITEMS}")
    for key, value in config.items():
        _check_value(key, value, CONFIG_DEPTH_LIMIT)
    try:
        data = canonical(dict(config))
    except LocalError as error:
        raise ConfigError(
            f"a task config holds numbers, texts, true and false, and lists of them only: {error}; correct it"
        ) from None
    if len(data) > CONFIG_LIMIT_BYTES:
        raise ConfigError(f"a task config of {len(data)} bytes; give at most {CONFIG_LIMIT_BYTES}")
    return data


def _check_value(key: str, value: object, depth: int) -> None:
    if isinstance(value, bool | int | float | str | None):
        return
    if not isinstance(value, list | tuple) or depth == 0 or len(value) > CONFIG_LIMIT_ITEMS:
        raise ConfigError(
            f"task setting {key!r} is a {type(value).__name__}; give a number, a text, true, false "
            f"or a list of at most {CONFIG_LIMIT_ITEMS} of them"
        )
    for item in value:
        _check_value(key, item, depth - 1)


def unpack_config(data: bytes) -> Config:
    """Return what `pack_config` made into `data`; only for bytes that a source has recognised as its own."""
    return _decode_config(data)


def check_options(family: str, config: Config, options: Mapping[str, Container[Any]]) -> None:
    """Check that every setting of `config` is one of `options` and its value in there. Raises ConfigError."""
    for key, value in config.items():
        if key not in options:
            hint = f"{did_you_mean(key, options)}; it has {', '.join(options) or 'none'}"
            raise ConfigError(f"task family {family!r} has no setting {key!r}{hint}")
        if value not in options[key] or (isinstance(options[key], range) and type(value) is not int):
            raise ConfigError(f"task family {family!r}: {key} = {value!r} is not in {options[key]}")


# --- answers ---


def answer_in(text: str) -> str:
    """Return the answer that a completion gives: inside its last ``<answer>…</answer>``, else all of it, stripped."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return (text if start < 0 else text[start + len("<answer>") : end]).strip()


# --- sources ---


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskChoice:
    """A family with the config to draw it at, and how often next to the others.

    config: settings, or the name of one of the family's presets. Raises ConfigError, one line that says what to do.
    """

    family: TaskFamily
    config: Config | str
    weight: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.weight, bool) or not isinstance(self.weight, int) or not 0 < self.weight <= WEIGHT_LIMIT:
            raise ConfigError(f"tasks {self.family.name!r}: give a whole weight from 1 to {WEIGHT_LIMIT}")
        data = pack_config(self.settings)
        self.family.check(self.settings)
        ref = TaskRef(family=self.family.name, version=self.family.version, config=data, seed=0, index=0)
        try:
            msgspec.convert(msgspec.to_builtins(ref), TaskRef)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"task family {self.family.name!r} has a name or version that cannot travel: {error}; change it"
            ) from None

    @property
    def settings(self) -> Config:
        """The config itself. Raises ConfigError where the family has no preset of that name."""
        if not isinstance(self.config, str):
            return self.config
        if self.config not in self.family.presets:
            known = ", ".join(self.family.presets) or "none"
            raise ConfigError(f"task family {self.family.name!r} has no preset {self.config!r}; it has {known}")
        return self.family.presets[self.config]


class TaskKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A choice by its names: what it takes to tell whose task is which, without the family's code."""

    family: Annotated[str, msgspec.Meta(max_length=64)]
    version: Annotated[str, msgspec.Meta(max_length=32)]
    config: Annotated[bytes, msgspec.Meta(max_length=CONFIG_LIMIT_BYTES)]
    weight: Annotated[int, msgspec.Meta(ge=1, le=WEIGHT_LIMIT)]


def makeable(make: Callable[[int], Task]) -> Iterator[Task]:
    """Make the tasks of the indices 0, 1, 2 and so on, but for those that cannot be made: some generators have such.

    Raises what `make` raises, a LocalError, for the last of FAILED_LIMIT in a row.
    """
    failed = 0
    for index in count():
        try:
            task = make(index)
        except LocalError:
            failed += 1
            if failed == FAILED_LIMIT:
                raise
            continue
        failed = 0
        yield task


class TaskTable:
    """The assignment of a swarm's tasks. Equal kinds, in any order, make equal tables."""

    def __init__(self, kinds: Sequence[TaskKind]) -> None:
        """`kinds`: one at least, and no family with the same config twice."""
        self.kinds = sorted(kinds, key=lambda kind: (kind.family, kind.config))
        self._cumulative = list(accumulate(kind.weight for kind in self.kinds))

    def assigned(self, swarm_id: SwarmId, origin: PeerId, round: int, index: int) -> TaskRef:
        """Return the task of `origin` at this index of its round: derived, so that nobody chooses what it is asked."""
        return self.of_seed(assigned_seed(swarm_id, origin, round, index), index)

    def is_assigned(self, swarm_id: SwarmId, origin: PeerId, round: int, ref: TaskRef) -> bool:
        """Return whether `ref` is a task that `origin` may have come to in this round, and not one it looked for."""
        return ref.index < INDEX_LIMIT and ref == self.assigned(swarm_id, origin, round, ref.index)

    def of_seed(self, seed: int, index: int) -> TaskRef:
        """Return the task of a seed: which kind it is of follows from it, by the weights."""
        digest = blake3.blake3(_FAMILY_DOMAIN + seed.to_bytes(8, "big")).digest(length=16)
        place = int.from_bytes(digest, "big") % self._cumulative[-1]
        return self.of_kind(self.kinds[bisect_right(self._cumulative, place)], seed=seed, index=index)

    def of_kind(self, kind: TaskKind, *, seed: int, index: int) -> TaskRef:
        """Return the task of a kind that a seed makes."""
        return TaskRef(family=kind.family, version=kind.version, config=kind.config, seed=seed, index=index)


class TaskSource:
    """The tasks of a swarm. Equal choices, in any order, make equal sources: `draw` is the same on every node."""

    def __init__(self, choices: Sequence[TaskChoice]) -> None:
        """Raises ConfigError for no choices, too many, and one made twice."""
        if not 0 < len(choices) <= CHOICE_LIMIT:
            raise ConfigError(f"name 1 to {CHOICE_LIMIT} task families, not {len(choices)}")
        keyed = {(choice.family.name, pack_config(choice.settings)): choice for choice in choices}
        if len(keyed) < len(choices):
            raise ConfigError("a task family is named twice with the same config; give one of them and a larger weight")
        self.table = TaskTable(
            [
                TaskKind(family=name, version=choice.family.version, config=config, weight=choice.weight)
                for (name, config), choice in keyed.items()
            ]
        )
        self._families = {kind.family: keyed[kind.family, kind.config].family for kind in self.table.kinds}
        self._settings = {key: choice.settings for key, choice in keyed.items()}
        self._made = lru_cache(CACHED_TASKS)(self._make)

    @property
    def families(self) -> Mapping[str, TaskFamily]:
        """Task families, by name."""
        return self._families

    def family(self, task: Task) -> TaskFamily:
        """Family of a task."""
        return self._families[task.ref.family]

    @property
    def scorable(self) -> frozenset[str]:
        """Names of the families for which text from peers can be scored on this machine."""
        return frozenset(name for name, family in self._families.items() if family.peer_safe)

    def draw(self, swarm_id: SwarmId, origin: PeerId, round: int, index: int) -> Task:
        """Make the task that the table assigns. Raises LocalError where its family makes none of it."""
        return self.task(self.table.assigned(swarm_id, origin, round, index))

    def task(self, ref: TaskRef) -> Task:
        """Make the task of `ref`. Raises RemoteError where it is not one of this source's, and as `TaskFamily.make`."""
        return self._made(ref)

    def _make(self, ref: TaskRef) -> Task:
        family = self._families.get(ref.family)
        if family is None:
            raise RemoteError(f"a task of the family {ref.family!r}, which this swarm does not draw from")
        if ref.version != family.version:
            raise RemoteError(f"a task of {ref.family!r} version {ref.version!r}; here it is {family.version!r}")
        settings = self._settings.get((ref.family, ref.config))
        if settings is None:
            raise RemoteError(f"a task of {ref.family!r} with a config that this swarm does not draw from")
        return family.make(settings, ref.seed, ref.index)
