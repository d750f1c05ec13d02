"""Ranges of options: one that stands for a key of a scenario has the key's range, and is what the error names."""

from __future__ import annotations

from typing import get_type_hints

import msgspec

from shoal.protocol.errors import ConfigError


def check_option(option: str, value: float, of: type[msgspec.Struct], key: str) -> None:
    """Raise ConfigError if `value`, given by `option`, is not in the range that the annotation of `of.key` has."""
    (meta,) = get_type_hints(of, include_extras=True)[key].__metadata__
    low, high = meta.ge, meta.le if meta.lt is None else meta.lt - 1
    if not low <= value <= high:
        raise ConfigError(f"{option}: {value} is not in {low}..{high}")
