"""The page of the manifest: every key of `swarm.toml`, read off its declaration when the site is built.

python -m shoal.lab.manifest_page
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final, Literal, get_args, get_origin

import msgspec

from shoal.lab.errors_page import escaped
from shoal.node.sapo.policies import BUILT_IN
from shoal.node.workload import installed_workloads
from shoal.node.workloads.default_options import default_options
from shoal.protocol.amending import AMENDABLE
from shoal.protocol.manifest import Manifest
from shoal.protocol.manifest_text import hints_of, in_toml, meta_of, sections_of
from shoal.protocol.manifest_withdrawn import is_gone

_HEAD: Final = """\
# The manifest

Every key of `swarm.toml`, made when this site was built. `shoal init` writes them all, each under its comment; a key
that is left out has its default, or what [its strategy](strategies.md) takes in its place. Everything but `[network]`
is the same at every member and part of the SwarmId. Settings marked *yes* can be
[amended](operating.md) while the swarm runs: `shoal amend --set sync.inner_steps=60`.
"""
_KINDS: Final = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", list: "a list"}


def render() -> str:
    """The whole page."""
    lines = [_HEAD.rstrip("\n")]
    for section, kind in sections_of(Manifest).items():
        lines += ["", f"## [{section}]", "", escaped(kind.__doc__ or ""), ""]
        lines += ["| key | value | default | amended | |", "| --- | --- | --- | --- | --- |", *_rows(section, kind)]
        if section == "workload":
            lines += ["", *_options()]
    return "\n".join(lines) + "\n"


def _options() -> Iterator[str]:
    """The options of what is installed with Shoal: `init` writes those of the workload as comments."""
    yield "`[workload.options]` of the workloads and policies that come with Shoal:"
    told = {name: default_options(name) for name in (*installed_workloads(), *BUILT_IN)}
    for name, options in told.items():
        yield from ("", f"`{name}`: {escaped(' '.join(options.told.split()))}")
    yield from ("", "| of | option | default |", "| --- | --- | --- |")
    for name, options in told.items():
        yield from (f"| {name} | `{key}` | is needed |" for key in options.needed)
        yield from (f"| {name} | `{key}` | `{in_toml(value)}` |" for key, value in options.defaults.items())


def _rows(section: str, kind: type[msgspec.Struct]) -> Iterator[str]:
    for field in msgspec.structs.fields(kind):
        if is_gone(section, field.name):
            continue
        hint = hints_of(kind)[field.name]
        amended = "yes" if field.name in AMENDABLE.get(section, ()) else ""
        told = escaped(meta_of(hint).description or "")
        yield f"| `{field.name}` | {_value(hint)} | {_default(field)} | {amended} | {told} |".replace("||", "\\|\\|")


def _value(hint: Any) -> str:
    """Describe the values that a key may have."""
    kind, meta = get_args(hint)[0], meta_of(hint)
    if get_origin(kind) is Literal:
        return ", ".join(f"`{in_toml(choice)}`" for choice in get_args(kind))
    plain = getattr(kind, "__supertype__", get_origin(kind) or kind)
    text = _KINDS.get(plain, {tuple: "a list", dict: "a table"}.get(plain, "a table"))
    bounds = [
        f"{sign} {_number(bound)}"
        for sign, bound in ((">", meta.gt), ("≥", meta.ge), ("<", meta.lt), ("≤", meta.le))
        if bound is not None
    ]
    most = "" if meta.max_length is None or plain is str else f", at most {meta.max_length}"
    return text + (f" {', '.join(bounds)}" if bounds else "") + most


def _number(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "is needed"
    made = field.default_factory
    value = field.default if made is msgspec.NODEFAULT else made()
    return "" if value in ("", [], {}) else f"`{in_toml(value)}`"


if __name__ == "__main__":
    sys.stdout.write(render())
