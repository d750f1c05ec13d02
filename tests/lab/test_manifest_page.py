"""The page of the manifest tells every key that a manifest may have, and which of them can be amended."""

from __future__ import annotations

import re

import msgspec

from shoal.lab.manifest_page import render
from shoal.protocol.amending import AMENDABLE
from shoal.protocol.manifest import Manifest
from shoal.protocol.manifest_text import sections_of
from shoal.protocol.manifest_withdrawn import WITHDRAWN


def rows() -> dict[str, list[str]]:
    """The cells of each key's row, by section.key."""
    found, section = {}, ""
    for line in render().splitlines():
        if head := re.fullmatch(r"## \[(\w+)\]", line):
            section = head[1]
        elif key := re.match(r"\| `(\w+)` \|", line):
            found[f"{section}.{key[1]}"] = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    return found


def test_page_tells_every_key_but_those_that_are_gone() -> None:
    sections = sections_of(Manifest).items()
    keys = {f"{section}.{key}" for section, kind in sections for key in kind.__struct_fields__}
    gone = {f"{section}.{key}" for (section, key), why in WITHDRAWN.items() if why.stays is not None}
    assert gone
    assert set(rows()) == keys - gone


def test_page_says_what_can_be_amended() -> None:
    told = {key for key, cells in rows().items() if cells[3] == "yes"}
    assert told == {f"{section}.{key}" for section, keys in AMENDABLE.items() for key in keys}


def test_page_tells_the_options_of_each_workload_and_their_defaults() -> None:
    lines = render().splitlines()
    assert {"| text | `width` | `128` |", "| text | `layers` | `4` |", "| text | `batch` | `8` |"} <= set(lines)
    assert {"| causal-lm | `model` | is needed |", "| char-policy | `warm_up_updates` | `800` |"} <= set(lines)
    assert not any("`data` |" in line for line in lines)
    assert any(line.startswith("`text`: Predict the next byte.") and "layers · width²" in line for line in lines)


def test_row_has_range_default_and_meaning() -> None:
    found = rows()
    assert found["sync.outer_momentum"][1:3] == ["a number ≥ 0, < 1", "`0.9`"]
    assert found["sync.inner_steps"][1:3] == ["a whole number ≥ 1, ≤ 1,000,000", "is needed"]
    assert found["swarm.admission"][1:3] == ['`"open"`, `"allowlist"`, `"invite"`', '`"open"`']
    assert found["inner.betas"][1:3] == ["a list", "`[0.9, 0.95]`"]
    assert all(len(cells) == 5 and cells[1] and cells[4] for cells in found.values())
    defaults = {
        f"{section}.{field.name}": field.default
        for section, kind in sections_of(Manifest).items()
        for field in msgspec.structs.fields(kind)
        if isinstance(field.default, bool)
    }
    assert all(found[key][2] == f"`{str(value).lower()}`" for key, value in defaults.items() if key in found)
