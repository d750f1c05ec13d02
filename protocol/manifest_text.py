"""Conversion between the text of a manifest and its structs: errors in the user's words, and a commented file.

Everything here is driven by the structs themselves. A field's `Meta(description=…)` is its comment in the file that
`render` writes, and part of the answer when its value is wrong. `Meta(extra=AMENDABLE)`: it can be amended.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

import msgspec

from shoal.protocol.errors import ConfigError, LocalError
from shoal.protocol.manifest_withdrawn import is_gone

LINE_CHARS = 100
AMENDABLE: Final = {"amendable": True}
"""Of a key that members can change while the swarm runs. Each other shapes the state, or says whose swarm it is."""

_WORDS = {
    "`bool | int | float | str`": "a text, a number, true or false",
    "`int`": "a whole number",
    "`float`": "a number",
    "`str`": "a text",
    "`bool`": "true or false",
    "`array`": "a list",
    "`object`": "a table",
    "`null`": "nothing",
}
_AT = re.compile(r"^(?P<why>.*?)(?: - at `\$(?P<path>[^`]*)`)?$", re.DOTALL)
_PATH_STEP = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def refuse_unknown_keys(raw: dict[str, Any], root: type[msgspec.Struct], source: str) -> None:
    """Raise ConfigError for the first section or key that `root` does not have, naming the nearest it has."""
    sections = sections_of(root)
    for section, table in raw.items():
        if section not in sections:
            what = f"[{section}]" if isinstance(table, dict) else f"key {section!r} outside any section"
            raise ConfigError(f"{source}: unknown {what}{_nearest(section, sections)}")
        if not isinstance(table, dict):
            continue  # its type is wrong; conversion says so
        fields = sections[section].__struct_fields__
        for key in table:
            if key not in fields:
                known = [name for name in fields if not is_gone(section, name)]
                raise ConfigError(f"{source}: [{section}] unknown key {key!r}{_nearest(key, known)}")


def refuse_non_finite(tables: dict[str, Any]) -> None:
    """Refuse nan and inf, which TOML can say and which pass range checks written with < and >. Raises ValueError."""
    for section, table in tables.items():
        for key, value in table.items() if isinstance(table, dict) else ():
            for number in value if isinstance(value, list) else (value,):
                if isinstance(number, float) and not math.isfinite(number):
                    raise ValueError(f"Expected a finite number - at `$.{section}.{key}`")


def _nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean …?`, or what there is if nothing is near."""
    known = list(known)
    near = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; it knows {', '.join(known)}"


def explain_validation(message: str, root: type[msgspec.Struct], source: str) -> str:
    """One line for the user out of one of msgspec's: ``Expected `int`, got `str` - at `$.sync.inner_steps` ``."""
    match = _AT.match(message)
    if match is None:
        raise LocalError(f"no match for {message!r}")
    section, key, *_ = (*_PATH_STEP.findall(match["path"] or ""), None, None)
    why = match["why"]
    missing = re.fullmatch(r"Object missing required field `(\w+)`", why)
    if missing and section is None:
        return f"{source}: the section [{missing[1]}] is missing"
    if section is None:
        return f"{source}: {_in_words(why)}"
    if missing:
        return f"{source}: [{section}] needs the key {missing[1]}. {_description(root, section, missing[1])}"
    if key is None:
        return f"{source}: [{section}] {_in_words(why)}"
    invalid = re.fullmatch(r"Invalid enum value '(.*)'", why, re.DOTALL)
    if invalid:
        choices = get_args(_plain_hint(root, section, key))
        return f"{source}: [{section}] {key}: {invalid[1]!r} is none of {', '.join(choices)}"
    if "matching regex" in why:
        why = "has characters or a form that it may not have"
    return f"{source}: [{section}] {key}: {_in_words(why)}. {_description(root, section, key)}".rstrip()


def _in_words(why: str) -> str:
    for theirs, ours in _WORDS.items():
        why = why.replace(theirs, ours)
    return why.replace("Expected", "expected")


@lru_cache(maxsize=64)
def hints_of(of: Any) -> dict[str, Any]:
    """The annotations of a struct, by its fields."""
    return get_type_hints(of, include_extras=True)


def sections_of(root: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct]]:
    """The struct of every section, also of those that need not be there."""
    return {name: get_args(hint)[0] if get_args(hint) else hint for name, hint in hints_of(root).items()}


def _field_hint(root: type[msgspec.Struct], section: str, key: str) -> Any:
    return hints_of(sections_of(root)[section]).get(key)


def _plain_hint(root: type[msgspec.Struct], section: str, key: str) -> Any:
    hint = get_args(_field_hint(root, section, key))[0]
    if get_origin(hint) is not Literal:
        raise LocalError(f"[{section}] {key} is no choice")
    return hint


def meta_of(hint: Any) -> msgspec.Meta:
    """Return the bounds and the description that annotate a field's type."""
    return next((one for one in get_args(hint)[1:] if isinstance(one, msgspec.Meta)), msgspec.Meta())


def _description(root: type[msgspec.Struct], section: str, key: str) -> str:
    return meta_of(_field_hint(root, section, key)).description or ""


def amendable_keys(root: type[msgspec.Struct]) -> dict[str, tuple[str, ...]]:
    """Keys that can be amended, by section, in the order of the structs."""
    found = {
        section: tuple(key for key in kind.__struct_fields__ if meta_of(hints_of(kind)[key]).extra == AMENDABLE)
        for section, kind in sections_of(root).items()
    }
    return {section: keys for section, keys in found.items() if keys}


def render(
    manifest: msgspec.Struct, *, commented: bool = True, below: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> str:
    """`manifest`, a struct of sections, as TOML: every key of this release, under its comment if these are wanted.

    below: more lines, by the key that they follow.
    """
    root = type(manifest)
    lines: list[str] = []
    for section, hint in sections_of(root).items():
        table = getattr(manifest, section)
        if table is None:
            continue
        lines += [*_comment(hint.__doc__ or "", commented), f"[{section}]"]
        for key, description in _written_keys(section, hint):
            lines += _comment(description, commented)
            lines += [*_assignment(section, key, getattr(table, key)), *below.get(key, ())]
        lines.append("")
    return "\n".join(lines)


@lru_cache(maxsize=64)
def _written_keys(section: str, kind: type[msgspec.Struct]) -> tuple[tuple[str, str], ...]:
    """The keys of a section in the order in which they are written, and what is said of each."""
    fields = [field for field in msgspec.structs.fields(kind) if not is_gone(section, field.name)]
    return tuple(
        (field.name, meta_of(hints_of(kind)[field.name]).description or "") for field in sorted(fields, key=_is_table)
    )


def _comment(text: str, wanted: bool) -> list[str]:
    return textwrap.wrap(text, LINE_CHARS, initial_indent="# ", subsequent_indent="# ") if wanted else []


def _is_table(field: msgspec.structs.FieldInfo) -> bool:
    """True for a table: it goes last in its section, or TOML would take the keys after it for its own."""
    return "dict" in str(field.type)


def _assignment(section: str, key: str, value: object) -> list[str]:
    if isinstance(value, dict):
        return [f"[{section}.{key}]", *(f"{name} = {in_toml(item)}" for name, item in value.items())]
    return [f"{key} = {in_toml(value)}"]


def in_toml(value: object) -> str:
    """A value as it stands in a manifest."""
    if isinstance(value, str):
        # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        inner = ", ".join(in_toml(item) for item in value)
        if len(inner) <= LINE_CHARS:
            return f"[{inner}]"
        return "[\n" + "".join(f"    {in_toml(item)},\n" for item in value) + "]"
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {in_toml(item)}" for key, item in value.items()) + " }"
    raise LocalError(f"no TOML for a {type(value).__name__}")
