"""Section [workload] of `swarm.toml`: the training task, and the check of whose code a manifest may have run here."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from typing import Annotated

import msgspec
from msgspec import Meta

from shoal.protocol.errors import ConfigError
from shoal.protocol.wire import Message

OPTION_LIMIT = 64
OPTION_TEXT_LIMIT_CHARS = 1024

Option = str | int | float | bool

_WORKLOAD = r"^([a-z][a-z0-9_-]*|[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*)\Z"
_OPTION_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


class WorkloadSection(Message, frozen=True, kw_only=True):
    """Workload that is trained."""

    name: Annotated[
        str,
        Meta(
            pattern=_WORKLOAD,
            max_length=256,
            description="An installed workload such as text, or module:Class, which every node must have installed.",
        ),
    ]
    seed: Annotated[
        int,
        Meta(ge=0, le=2**63 - 1, description="Of the initial parameters and of the order of the data."),
    ] = 0
    options: Annotated[
        dict[str, Option],
        Meta(
            max_length=OPTION_LIMIT,
            description="The workload's own settings: texts, numbers, true or false. Paths of data are "
            "each node's own affair.",
        ),
    ] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, value in self.options.items():
            if not _OPTION_NAME.fullmatch(key):
                raise ValueError(f"options: {key!r} is no name; use a-z, 0-9 and _")
            if isinstance(value, str) and len(value) > OPTION_TEXT_LIMIT_CHARS:
                raise ValueError(f"options: {key} is longer than {OPTION_TEXT_LIMIT_CHARS} characters")
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise ValueError(f"options: {key} does not fit 64 bits")
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"options: {key} is not a finite number")


def check_workload_allowed(
    workload: WorkloadSection,
    *,
    entry_points: Collection[str],
    allowed: Collection[str],
    founded: Callable[[], bool] = lambda: False,
) -> None:
    """Check that importing a manifest's workload is the user's own wish.

    `entry_points` are the names in the group `shoal.workloads` installed here, `allowed` what the user passed
    as `--allow-workload`. `founded` says whether this user founded the swarm with that code, and is asked only where it
    matters; else no manifest may name code, from wherever it came. Raises ConfigError that says what to install or to
    pass.
    """
    name = workload.name
    if name in entry_points or name in allowed:
        return
    if ":" not in name:
        installed = ", ".join(sorted(entry_points)) or "none"
        raise ConfigError(
            f"workload {name!r} is not installed here (installed: {installed}); install the Python package that has "
            f"{name!r} in its entry-point group shoal.workloads"
        )
    if not founded():
        raise ConfigError(
            f"the swarm's manifest names the code {name!r}; if you have it and trust it, pass --allow-workload {name}"
        )
