"""The page of events: all that a node can write into its event log, made of the declarations when the site is built.

    python -m shoal.lab.events_page

What an event says, and what its fields mean, are the docstrings of `shoal.node.reporting.events`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Final, get_args, get_origin

import msgspec

from shoal.node.reporting.events import EVENTS, Event

_HEAD: Final = """\
# The event log

What a node writes into `events.jsonl` of its data folder, made of the declarations when this site was built: one JSON
object a line, with `at` (wall clock in seconds; no meaning depends on it), `event`, and the event's own fields. Terms
are texts, `rebases.rollbacks`; digests and hashes are hex; peers are PeerIds. A number that is not finite is null.

"""
_JSON_NAMES: Final = {str: "text", int: "whole number", float: "number", bool: "true or false", NoneType: "null"}


def render() -> str:
    """The whole page."""
    lines = [f"| `{name}` | {_fields(kind)} | {_text(kind)} |" for name, kind in EVENTS.items()]
    return _HEAD + "\n".join(["| event | fields | what it says |", "| --- | --- | --- |", *lines]) + "\n"


def _fields(kind: type[Event]) -> str:
    fields = (field for field in msgspec.structs.fields(kind) if field.name != "at")
    return "<br>".join(f"`{field.name}`: {json_name(field.type)}" for field in fields)


def json_name(declared: object) -> str:
    """Name of the JSON type of a field declared so, in words."""
    origin, arguments = get_origin(declared), get_args(declared)
    if isinstance(declared, UnionType):
        return " or ".join(json_name(one) for one in arguments)
    if origin is tuple:
        return f"list of {json_name(arguments[0])}s"
    if origin is Mapping:
        return f"object of {json_name(arguments[1])}s" if arguments[1] in _JSON_NAMES else "object"
    assert isinstance(declared, type), declared
    return _JSON_NAMES[declared]


def _text(kind: type[Event]) -> str:
    return " ".join((inspect.getdoc(kind) or "").split())


if __name__ == "__main__":
    sys.stdout.write(render())
