"""A task family by its name, and what the tasks of a manifest are drawn from.

Names are those of reasoning-gym (gym.py), of the dialogues that come with Shoal, and of the entry-point group
``shoal.tasks``; a manifest from a peer can name no other code than what is installed here.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping

from shoal.node.named_code import import_class, made
from shoal.node.sapo.gym import GymFamily
from shoal.node.sapo.gym_families import OFFERED, REFUSED
from shoal.node.sapo.higher_lower import HigherLower
from shoal.node.sapo.tasks import TaskChoice, TaskFamily
from shoal.protocol.errors import ConfigError, did_you_mean
from shoal.protocol.manifest_rollouts import TaskEntry

GROUP = "shoal.tasks"
DIALOGUES: Mapping[str, type[TaskFamily]] = {HigherLower.name: HigherLower}
"""Those that come with Shoal, by name."""


def installed_families() -> tuple[str, ...]:
    """Names of the families of the entry-point group."""
    return tuple(sorted({point.name for point in importlib.metadata.entry_points(group=GROUP)}))


def check_name(name: str) -> None:
    """Raise ConfigError for a family that is unknown here, or not offered. Imports no code of a family."""
    if name in REFUSED:
        GymFamily(name)  # says why
    installed = installed_families()
    if name not in OFFERED and name not in DIALOGUES and name not in installed:
        own = ", ".join(installed) or "none"
        raise ConfigError(
            f"unknown task family {name!r}{did_you_mean(name, (*OFFERED, *DIALOGUES, *installed))}; "
            f"reasoning-gym's are offered by name, and your own by the entry-point group {GROUP!r} (installed: {own})"
        )


def load_family(name: str) -> TaskFamily:
    """The family called `name`. Raises ConfigError, one line: unknown, not offered, not importable, no task family."""
    check_name(name)
    if name in OFFERED:
        return GymFamily(name)
    if name in DIALOGUES:
        return DIALOGUES[name].from_name(name)
    (point, *_) = importlib.metadata.entry_points(group=GROUP, name=name)
    what = f"task family {name!r}"
    found = import_class(what, point.value)
    if not issubclass(found, TaskFamily):
        raise ConfigError(
            f"{what}: {point.value} is no class derived from shoal.node.sapo.tasks.TaskFamily; make it one"
        )
    family = made(what, lambda: found.from_name(name))
    if family.name != name:
        raise ConfigError(f"task family {name!r} calls itself {family.name!r}; give the entry point that name")
    return family


def load_choices(tasks: Iterable[TaskEntry]) -> list[TaskChoice]:
    """Load the families that a manifest's tasks are of. Raises ConfigError for one that is not to be had here."""
    return [TaskChoice(family=load_family(one.family), config=one.config, weight=one.weight) for one in tasks]
