"""Families of reasoning-gym as task families: made from a name, a config and a seed, the same on every machine.

A task is item 0 of the generator with the given parameters, ``size=1``, and a seed of 31 bits hashed from the task's
own seed and index; nothing else enters. The families of the paper, and those of which the library's `score_answer`
executes Python, are scored here by scorers of our own; all others by the library's in the sandbox.

reasoning-gym is imported when the first task is made. Needs the extra ``rl``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import decimal
import functools
import importlib
import importlib.metadata
import io
import math
import typing
import warnings
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import blake3

from shoal.node.sapo.gym_families import EASY, LIMITS, NO_SETTINGS, REFUSED
from shoal.node.sapo.scorers import ANSWER_LIMIT_CHARS, SCORERS, SCORERS_VERSION
from shoal.node.sapo.tasks import Config, Task, TaskFamily, answer_in, pack_config, unpack_config
from shoal.protocol.errors import ConfigError, LocalError, did_you_mean

DISTRIBUTION = "reasoning-gym"
CACHED_ENTRIES = 256
SETTING_FLOOR = 10
"""A number may always be as large as this."""

_SEED_DOMAIN = b"shoal sapo reasoning-gym seed"
_WARMING = ("", "1 + 1", "1/2", "x", "x**2 + C", "[[1, 2]]", "0.5")


@functools.cache
def _library() -> ModuleType:
    """The module of the registry. Raises ConfigError where the library is missing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("reasoning_gym.factory")  # the package registers all families
    except ImportError as error:
        raise ConfigError(f"tasks of reasoning-gym need it installed: pip install 'shoal[rl]' ({error})") from error


class GymFamily(TaskFamily):
    """One family of reasoning-gym. Raises ConfigError for one that is refused, with the reason."""

    def __init__(self, name: str) -> None:
        if name in REFUSED:
            raise ConfigError(
                f"the task family {name!r} of reasoning-gym is not offered: {REFUSED[name]}; choose another"
            )
        self.name = name
        self.scoring = "direct" if name in SCORERS else "sandbox"
        self._made = functools.lru_cache(CACHED_ENTRIES)(self._make_entry)

    @classmethod
    def from_name(cls, name: str) -> GymFamily:
        """The family called `name`. Raises ConfigError."""
        return cls(name)

    @functools.cached_property
    def version(self) -> str:  # type: ignore[override]
        """The library's version and that of our scorers, such as 0.1.25+2."""
        try:
            return f"{importlib.metadata.version(DISTRIBUTION)}+{SCORERS_VERSION}"
        except importlib.metadata.PackageNotFoundError:
            raise ConfigError("tasks of reasoning-gym need it installed: pip install 'shoal[rl]'") from None

    @property
    def presets(self) -> Mapping[str, Config]:
        """``default``, and ``easy`` where there are settings for small models."""
        return {"default": {}} | ({"easy": EASY[self.name]} if self.name in EASY else {})

    def check(self, config: Config) -> None:
        """Check `config` against the generator's parameters, and that a task comes of it. Raises ConfigError."""
        fields = self._fields()
        hints = typing.get_type_hints(self._classes()[1])
        for key, value in config.items():
            if key not in fields:
                raise ConfigError(
                    f"task family {self.name!r} has no setting {key!r}{did_you_mean(key, fields)}; "
                    f"it has {', '.join(fields)}"
                )
            choices = typing.get_args(hints[key]) if typing.get_origin(hints[key]) is typing.Literal else ()
            if choices and value not in choices:
                raise ConfigError(f"task family {self.name!r}: {key} = {value!r} is not one of {choices}")
            if not _fits(value, fields[key]):
                raise ConfigError(
                    f"task family {self.name!r}: {key} = {value!r} is not like its default {fields[key]!r}"
                )
            self._check_size(key, value, fields[key])
        try:
            self.make(config, 0, 0)
        except LocalError as error:
            raise ConfigError(
                f"task family {self.name!r} makes no tasks of this config: {error}; change the config"
            ) from error

    def question(self, config: Config, seed: int, index: int) -> str:
        """The generator's question. Raises LocalError where it fails."""
        return str(self._entry(config, seed, index)[1]["question"])

    def score(self, task: Task, text: str) -> float:
        """The reward of the answer in `text`: by our own scorer, else by the library's."""
        answer = answer_in(text)
        if len(answer) > ANSWER_LIMIT_CHARS or not answer:
            return 0.0
        dataset, entry = self._entry(task.config, task.ref.seed, task.ref.index)
        own = SCORERS.get(self.name)
        return float(dataset.score_answer(answer, entry) if own is None else own(answer, entry, dataset.config))

    def solution(self, task: Task) -> str | None:
        """The generator's answer, where there is one."""
        answer = self._entry(task.config, task.ref.seed, task.ref.index)[1]["answer"]
        return None if answer is None else str(answer)

    def warm_up(self, task: Task) -> None:
        """Score the right answer and a few others, so that what the library imports on the way is there."""
        right = self._entry(task.config, task.ref.seed, task.ref.index)[1]["answer"]
        for text in (str(right), f"{right} + 1", *_WARMING):
            try:
                self.score(task, text)
            except Exception:  # a wrong answer may raise anything in the library; here it need not
                continue

    def _classes(self) -> tuple[Any, Any]:
        """The generator and the dataclass of its parameters."""
        found: tuple[Any, Any] = _library().DATASETS[self.name]
        return found

    def _fields(self) -> dict[str, Any]:
        """The settings, with their defaults."""
        defaults = self._classes()[1]()
        fields = dataclasses.fields(defaults)
        return {field.name: getattr(defaults, field.name) for field in fields if field.name not in NO_SETTINGS}

    def _entry(self, config: Config, seed: int, index: int) -> tuple[Any, Mapping[str, Any]]:
        return self._made(pack_config(config), seed, index)

    def _make_entry(self, packed: bytes, seed: int, index: int) -> tuple[Any, Mapping[str, Any]]:
        """The generator with the config that `packed` is, and its task. Raises LocalError where it fails."""
        generator, parameters = self._classes()
        with decimal.localcontext(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            # generators set the precision of the context, and some print
            warnings.simplefilter("ignore")
            try:
                dataset = generator(
                    config=parameters(**unpack_config(packed), seed=_generator_seed(seed, index), size=1)
                )
                return dataset, dataset[0]
            except Exception as error:  # generators assert, and fail in their own ways
                raise LocalError(f"{type(error).__name__}: {error}") from error

    def _check_size(self, key: str, value: object, default: object) -> None:
        limit = self._limit(key, default)
        for number in _numbers(value):
            if not abs(number) <= limit:
                raise ConfigError(f"task family {self.name!r}: {key} = {value!r} is more than {limit:g}; lower it")

    def _limit(self, key: str, default: object) -> float:
        """The hardest level of the curriculum, or the default times two where that says more."""
        if key in LIMITS.get(self.name, {}):
            return LIMITS[self.name][key]
        known = [2.0 * abs(number) for number in _numbers(default)]
        if _library().has_curriculum(self.name):
            for attribute in _library().create_curriculum(self.name).attributes.values():
                if key in _field_names(attribute):
                    known += [abs(number) for number in _numbers(list(attribute.levels))]
        return max([SETTING_FLOOR, *known])


def _field_names(attribute: Any) -> Sequence[str]:
    names = (getattr(attribute, name, None) for name in ("field_name", "lower_field_name", "upper_field_name"))
    return [name for name in names if name]


def _fits(value: object, default: object) -> bool:
    """Return whether `value` is of the kind of `default`. Any scalar and list of scalars is, where that is None."""
    if default is None:
        return value is None or isinstance(value, bool | int | float | str | list | tuple)
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, float):
        return isinstance(value, int | float) and math.isfinite(value)
    if isinstance(default, list | tuple):
        items = isinstance(value, list | tuple) and len(value) > 0
        return items and all(_fits(item, default[0] if default else None) for item in typing.cast(Iterable[Any], value))
    return isinstance(default, int | str) and isinstance(value, type(default))


def _numbers(value: object) -> list[float]:
    if isinstance(value, list | tuple):
        return [number for item in value for number in _numbers(item)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


def _generator_seed(seed: int, index: int) -> int:
    digest = blake3.blake3(_SEED_DOMAIN + seed.to_bytes(8, "big") + index.to_bytes(8, "big")).digest(length=4)
    return int.from_bytes(digest, "big") >> 1
