"""The options of installed workloads and policies, for people: read off the class that takes them."""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import dataclass
from typing import Any

from shoal.node.sapo.policies import factory_of, installed_policies
from shoal.node.workload import class_of
from shoal.protocol.manifest_text import LINE_CHARS, in_toml


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultOptions:
    """The options of a workload or a policy. told: what its class says of them; needed: those without a default."""

    told: str
    defaults: dict[str, Any]
    needed: tuple[str, ...]


def default_options(name: str) -> DefaultOptions:
    """The options of the installed workload or policy called `name`. Raises ConfigError if it cannot be imported."""
    kind = factory_of(name) if name in installed_policies() else class_of(name)
    parameters = [one for key, one in inspect.signature(kind).parameters.items() if key != "data"]
    return DefaultOptions(
        told=inspect.getdoc(kind) or "",
        defaults={one.name: one.default for one in parameters if one.default is not one.empty},
        needed=tuple(one.name for one in parameters if one.default is one.empty and one.kind is not one.VAR_KEYWORD),
    )


def option_lines(name: str) -> list[str]:
    """Comments for below [workload.options]: each option with its default. Raises ConfigError."""
    options = default_options(name)
    lines = textwrap.wrap(f"{name}: {options.told}", LINE_CHARS, initial_indent="# ", subsequent_indent="# ")
    lines += [f"# {key} is needed" for key in options.needed]
    return [*lines, *(f"# {key} = {in_toml(default)}" for key, default in options.defaults.items())]
