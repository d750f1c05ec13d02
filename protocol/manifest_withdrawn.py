"""Settings that earlier releases had and this one has not: those a manifest may still name, and those it may not.

A key that is gone stays in its section with the one value that means *without it*, so that the SwarmId of a manifest
that says so, or says nothing, is what it was; `render` does not write it. Of a key that remains a value may be gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

SHOWN_CHARS = 64
"""Of a value that is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawn:
    """Setting that is gone. stays: the only value that its key may have. gone: the value that it may no longer have."""

    advice: str
    stays: object = None
    gone: object = None

    def refuses(self, value: object) -> bool:
        """True if a manifest with this `value` cannot be followed."""
        return value == self.gone if self.stays is None else value != self.stays


WITHDRAWN: Final[Mapping[tuple[str, str], Withdrawn]] = {
    ("sync", "aggregate"): Withdrawn(gone="centred_clip", advice='take "trimmed"'),
    ("sync", "clip_radius"): Withdrawn(stays=1.0, advice='the rule "centred_clip" is gone; leave the key out'),
    ("round", "durability"): Withdrawn(
        stays="disk", advice="results wait for their certificate on disk; leave the key out"
    ),
    ("rollouts", "adaptive"): Withdrawn(
        stays=False, advice="a node takes as many groups of others as `external` says; leave the key out"
    ),
    ("rollouts", "sampling"): Withdrawn(
        stays="uniform", advice="groups are drawn uniformly from those whose rewards vary; leave the key out"
    ),
    ("rollouts", "external_terms"): Withdrawn(gone="damped", advice='take "positive", which did better'),
}
"""By section and key."""


def is_gone(section: str, key: str) -> bool:
    """True if the key is only still read for the sake of old manifests."""
    found = WITHDRAWN.get((section, key))
    return found is not None and found.stays is not None


def refuse_withdrawn(tables: Mapping[str, Any]) -> None:
    """Raise ValueError, with what to do, for the first setting in `tables` that this release does not have."""
    for (section, key), withdrawn in WITHDRAWN.items():
        table = tables.get(section)
        if isinstance(table, dict) and key in table and withdrawn.refuses(table[key]):
            shown = repr(table[key])[:SHOWN_CHARS]
            raise ValueError(f"{shown} is no longer there: {withdrawn.advice} - at `$.{section}.{key}`")
