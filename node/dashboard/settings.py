"""Settings of a node, by the names that `shoal run` and the manifest have for them, and the line that joins.

The line of a swarm that admits by invite may hold a secret: whoever has it may join. It is given to nobody who has not
asked for it with the page's token. The QR code holds the line as it is typed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any, Final

import msgspec

from shoal.node.option import Option, given_options, options_of
from shoal.node.options import NodeConfig, NodeOptions
from shoal.protocol.manifest import Manifest
from shoal.protocol.swarm_link import SwarmLink, format_link, join_line

VALUE_LIMIT_CHARS: Final = 160
"""Of a value: lists of founders are long."""
QR_BORDER: Final = 4
"""Pale modules around a code, as many as ISO/IEC 18004 asks for."""


class SettingFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One setting. changed: it is not the default, of an option; it was amended, of the swarm's."""

    name: str
    value: str
    changed: bool = False


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a node: options of `shoal run`, and those of the swarm that are in force, by section.key."""

    node: Sequence[SettingFacts]
    swarm: Sequence[SettingFacts]


class QrCode(msgspec.Struct, frozen=True, kw_only=True):
    """A square of `size` by `size` modules, border included. path: its dark ones, as the `d` of an SVG path."""

    size: int
    path: str


class JoinFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Line that joins. admits: it lets a stranger in by itself. secret: it holds one; then it is None unless asked for.

    admission, workload: as in the manifest; they say what else whoever joins needs.
    """

    line: str | None
    admits: bool
    secret: bool
    admission: str
    workload: str


def settings_of(
    config: NodeConfig, *, caps: tuple[int | None, int | None], in_force: Manifest, amended: Sequence[str]
) -> Settings:
    """The settings of a node whose lanes have these caps now. amended: which of the swarm's were, by section.key."""
    changed = {option.name for option in given_options(config)}
    now = dict(zip(("max_upload", "max_download"), caps, strict=True))
    node = []
    for name, option in options_of(NodeOptions).items():
        if option.hidden:
            continue
        value = now.get(name, getattr(config, name))
        default = next(field.default for field in fields(NodeOptions) if field.name == name)
        different = value != default if name in now else option.name in changed
        shown = _option_name(option, value)
        text = "no" if value is False and shown == option.name else _text(name, value)
        node.append(SettingFacts(name=shown, value=text, changed=different))
    swarm = [
        SettingFacts(name=key, value=_short(value), changed=key in amended)
        for key, value in _flat("", msgspec.to_builtins(in_force))
    ]
    return Settings(node=node, swarm=swarm)


def join_facts(link: SwarmLink, manifest: Manifest, *, secret: bool, data: bool) -> JoinFacts:
    """The line of a link; secret: also where it holds one, an invite for whoever has it. data: see `join_line`."""
    admission, workload = manifest.swarm.admission, manifest.workload.name
    shown = secret or link.invite is None
    return JoinFacts(
        line=join_line(format_link(link), workload, data=data) if shown else None,
        secret=link.invite is not None,
        admits=admission == "open" or link.invite is not None,
        admission=admission,
        workload=workload,
    )


@lru_cache(maxsize=2)
def qr_code(text: str) -> QrCode | None:
    """The code of `text`; None for more than a code can hold. Takes a tenth of a second, the first time."""
    import segno  # a node whose page nobody opens needs none of it

    try:
        code = segno.make(text, error="l", micro=False)
    except segno.DataOverflowError:
        return None
    strokes = []
    for y, row in enumerate(code.matrix):
        x = 0
        while x < len(row):
            end = x
            while end < len(row) and row[end]:
                end += 1
            if end > x:
                strokes.append(f"M{x + QR_BORDER} {y + QR_BORDER}h{end - x}v1h-{end - x}z")
            x = end + 1
    return QrCode(size=len(code.matrix) + 2 * QR_BORDER, path="".join(strokes))


def _option_name(option: Option, value: object) -> str:
    """`--threads`; of a pair that says yes or no, the one that holds."""
    yes, _, no = next(name for name in option.names if name.startswith("--")).partition("/")
    return no if no and value is False else yes


def _text(name: str, value: object) -> str:
    match value:
        case bool():
            return ""
        case None:
            return "off" if name == "dashboard" else "–"
        case int() if name in ("max_upload", "max_download"):
            return f"{value:,} B/s"
        case tuple():
            return _short(str(value) if hasattr(value, "_fields") else " ".join(map(str, value)) or "–")
    return _short(str(value))


def _flat(prefix: str, values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Each setting by section.key, its value written as JSON; sections that are not there are left out."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{name}.", value)
        elif value is not None or prefix:
            yield f"{prefix}{name}", json.dumps(value, ensure_ascii=False)


def _short(text: str) -> str:
    return text if len(text) <= VALUE_LIMIT_CHARS else f"{text[:VALUE_LIMIT_CHARS]}…"
