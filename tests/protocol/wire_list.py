"""All that peers say to each other, as text: protocol names, unions, and every struct with its fields and their types.

    python -m tests.protocol.wire_list

writes `wire_<WIRE_VERSION>.txt` beside this file. What that file has already it does not change: a field or a message
of a union that is other than before is another wire version. What is said under a protocol name of its own may be
added. Settings of `swarm.toml` are not in the list (the SwarmId in test_manifest.py holds them), nor is what only one
machine reads: its files, and what its processes say to each other.
"""

from __future__ import annotations

import importlib
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
from msgspec import inspect

from shoal.protocol import wire
from shoal.swarm.lanes import frame
from shoal.swarm.lanes.requests import SHARE_PROTOCOL

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("protocol", "swarm", "collectives", "node")
BASES = {"Message", "RoundMessage", "_About", "_VersionOnly"}
"""Never sent as they are."""
OF_ONE_MACHINE = (
    "shoal.protocol.durable",
    "shoal.protocol.forks",
    "shoal.protocol.inputs",
    "shoal.protocol.manifest",
    "shoal.protocol.membership",
    "shoal.node.training.trainer_messages",
    "shoal.swarm.address_book",
    "shoal.swarm.lanes.frame",
    "shoal.swarm.rendezvous.hivemind_messages",
)
"""How modules begin whose structs no peer is sent as they are (records, effects of machines; a lane's frame is bytes by
a layout, with an entry of its own), or that the SwarmId holds."""

LATER_KINDS = {frame.FrameKind.SHARE: SHARE_PROTOCOL}
"""Kinds of frames that a node of the first release does not know, and is never sent."""

LATER_FIELDS = {
    ("Value", "counted"): "where [membership] seats are few",
    ("Value", "enlisted"): 'where [membership] waiting = "outside"',
    ("Ready", "delegate"): "where [membership] sites are together",
    ("Plan", "delegated"): "where [membership] sites are together",
    ("RolloutGroup", "sampling"): "where [rollouts] labels are asked for",
    ("Drawn", "versions"): "where [rollouts] over_provision is above 1",
    ("StateHeader", "image"): "where [rollouts] images are asked for",
}
"""Fields that a node of the first release does not know, and is never sent: they are left out but where a setting is
used with which it refuses the manifest."""

Entries = Mapping[str, str]
"""What each name stands for on the wire, in one line."""


def path_of(version: int) -> Path:
    """The committed list of one wire version."""
    return Path(__file__).with_name(f"wire_{version}.txt")


def modules() -> Iterator[ModuleType]:
    """All in which something of the wire may be defined."""
    for layer in LAYERS:
        for path in sorted((ROOT / layer).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield importlib.import_module(".".join(("shoal", *(part for part in parts if part != "__init__"))))


def collect() -> dict[str, str]:
    """The wire as the source has it, by name."""
    found = {"lane frame": f"version {frame.FRAME_VERSION}, {frame._LAYOUT.format}, {_kinds()}"}
    for kind, protocol in LATER_KINDS.items():
        found[f"lane frame {kind.name}"] = f"{kind.value}, to who agreed to it under {protocol}"
    for module in modules():
        for name, value in vars(module).items():
            if name.endswith("_PROTOCOL") and isinstance(value, str) and value.startswith("/shoal/"):
                found[value] = "a protocol"
            elif _is_said(value) and value.__module__ == module.__name__ and value.__qualname__ not in BASES:
                assert value.__qualname__ not in found, f"there are two messages {value.__qualname__}"
                found[value.__qualname__] = describe(value)
                found |= _later_fields(value)
            elif (members := _members(value)) and all(_is_said(member) for member in members):
                names = sorted(member.__qualname__ for member in members)
                found[f"one of {', '.join(names)}"] = "told apart by their type"
    return dict(sorted(found.items()))


def _kinds() -> str:
    return ", ".join(f"{kind.name} {kind.value}" for kind in frame.FrameKind if kind not in LATER_KINDS)


def said() -> list[type[msgspec.Struct]]:
    """Every struct of the list."""
    return [
        value
        for module in modules()
        for value in vars(module).values()
        if _is_said(value) and value.__module__ == module.__name__ and value.__qualname__ not in BASES
    ]


def _is_said(value: object) -> bool:
    if not isinstance(value, type) or not issubclass(value, msgspec.Struct):
        return False
    if value.__module__.startswith(OF_ONE_MACHINE):
        return False
    return issubclass(value, wire.Message) or not value.__module__.startswith("shoal.node.")


def _members(value: object) -> tuple[Any, ...]:
    return typing.get_args(value) if typing.get_origin(value) in (typing.Union, types.UnionType) else ()


def describe(struct: type[msgspec.Struct]) -> str:
    """A struct's form and fields, each with its type and what is taken where it is left out."""
    found = typing.cast(inspect.StructType, inspect.type_info(struct))
    form = "array" if found.array_like else "map"
    tag = "" if found.tag is None else f" with {found.tag_field} {found.tag}"
    known = "" if found.forbid_unknown_fields else ", more fields are passed over"
    fields = (_field(field) for field in found.fields if (struct.__qualname__, field.name) not in LATER_FIELDS)
    return f"{form}{tag}{known} ({'; '.join(fields)})"


def _later_fields(struct: type[msgspec.Struct]) -> dict[str, str]:
    found = typing.cast(inspect.StructType, inspect.type_info(struct))
    named = ((LATER_FIELDS.get((struct.__qualname__, field.name)), field) for field in found.fields)
    return {f"{struct.__qualname__}.{field.name}": f"{_field(field)}, {when}" for when, field in named if when}


def _field(field: inspect.Field) -> str:
    return f"{field.encode_name}: {_type(field.type)}{_default(field)}"


def _default(field: inspect.Field) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return f" = {field.default_factory()!r}"
    return "" if field.required else f" = {field.default!r}"


def _type(kind: inspect.Type) -> str:
    """One type, with the bounds of its values."""
    match kind:
        case inspect.Metadata():
            return _type(kind.type)
        case inspect.StructType():
            return kind.cls.__qualname__
        case inspect.UnionType():
            return " | ".join(_type(one) for one in kind.types)
        case inspect.LiteralType():
            return "one of " + ", ".join(map(str, kind.values))
        case inspect.TupleType():
            return f"[{', '.join(_type(one) for one in kind.item_types)}]"
        case inspect.VarTupleType() | inspect.ListType():
            return f"[{_type(kind.item_type)}]{_bounds(kind)}"
        case inspect.DictType():
            return f"{{{_type(kind.key_type)}: {_type(kind.value_type)}}}{_bounds(kind)}"
        case _:
            return type(kind).__name__.removesuffix("Type").lower() + _bounds(kind)


def _bounds(kind: inspect.Type) -> str:
    names = ("gt", "ge", "lt", "le", "min_length", "max_length", "pattern")
    told = [f"{name} {value}" for name in names if (value := getattr(kind, name, None)) is not None]
    return f"<{', '.join(told)}>" if told else ""


def render(entries: Entries) -> str:
    """The text of the file."""
    return "".join(f"{name}\n    {text}\n" for name, text in entries.items())


def parse(text: str) -> dict[str, str]:
    """The entries in a file's text."""
    lines = text.splitlines()
    return {name: line.removeprefix("    ") for name, line in zip(lines[::2], lines[1::2], strict=True)}


def broken(before: Entries, now: Entries) -> list[str]:
    """What a node of `before` would not understand any more, or would miss: its messages that are gone or other."""
    return [name for name, text in before.items() if now.get(name) != text]


def main() -> int:
    """Write the list, unless it says that the wire version has to change."""
    path, now = path_of(wire.WIRE_VERSION), collect()
    changed = broken(parse(path.read_text(encoding="utf-8")) if path.exists() else {}, now)
    if changed:
        print(f"other than in {path.name}: {', '.join(changed)}; raise WIRE_VERSION in protocol/wire.py")
        return 1
    path.write_text(render(now), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
